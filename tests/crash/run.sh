#!/usr/bin/env bash
# Kill kvkeepd at random moments under load, start it again, and check every byte and every law.
#
#     tests/crash/run.sh [--rounds N] [--seed N]      200 rounds; about 1 to 2 s each
#
# Uses the programs of build/dev/bin, or of $KVKEEP_BIN.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${KVKEEP_BIN:-$PWD/build/dev/bin}
arguments=("$@")
if [[ " $* " != *" --rounds "* ]]; then
    arguments+=(--rounds 200)
fi
export KVKEEPD=$bin/kvkeepd
exec "$bin/test_crash_crash" "${arguments[@]}"
