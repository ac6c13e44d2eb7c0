#!/usr/bin/env bash
# What one tenant can learn of another: refusals alike in kind, and figures of time (JSON).
#
#     tests/isolation/run.sh [--tries N] [--tokens N] [--looks N]      2,000 fresh prompts of
#                                                                      49,152 tokens, 25 looks each
#
# Time is reported, not judged. But a measure that does not see a tenant's own hits says nothing of
# others': that fails, here and nowhere else, for it wants a calm machine.
#
# Uses the programs of build/dev/bin, or of $KVKEEP_BIN.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${KVKEEP_BIN:-$PWD/build/dev/bin}
export KVKEEPD=$bin/kvkeepd
exec "$bin/test_isolation_isolation" "$@" --refuse-blind 1 --tries 2000 --looks 25
