#!/usr/bin/env bash
# Mixed load for a long time; every minute the laws, memory, descriptors, threads and tiers are
# looked at. A table, a line of JSON, and exit 1 where something grows or a law is broken.
#
#     tests/soak/run.sh [--minutes N] [--sample SECONDS]      30 minutes
#
# Uses the programs of build/dev/bin, or of $KVKEEP_BIN.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${KVKEEP_BIN:-$PWD/build/dev/bin}
minutes=30
arguments=()
while [[ $# -gt 0 ]]; do
    case "$1" in
    --minutes)
        minutes=$2
        shift 2
        ;;
    --sample | --seed)
        arguments+=("$1" "$2")
        shift 2
        ;;
    *)
        echo "usage: tests/soak/run.sh [--minutes N] [--sample SECONDS] [--seed N]" >&2
        exit 2
        ;;
    esac
done
export KVKEEPD=$bin/kvkeepd
exec "$bin/test_soak_soak" --seconds $((minutes * 60)) "${arguments[@]}"
