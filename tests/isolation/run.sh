#!/usr/bin/env bash
# What one tenant can learn of another: refusals alike in kind, and figures of time (JSON).
#
#     tests/isolation/run.sh [--tries N] [--tokens N]      2,000 fresh prompts of 16,384 tokens
#
# Uses the programs of build/dev/bin, or of $KVKEEP_BIN.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${KVKEEP_BIN:-$PWD/build/dev/bin}
export KVKEEPD=$bin/kvkeepd
exec "$bin/test_isolation_isolation" --tries 2000 "$@"
