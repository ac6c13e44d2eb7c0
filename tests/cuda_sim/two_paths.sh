#!/usr/bin/env bash
# The two-path check of the example worker with the device tier on GPUs, simulated or not, or, with
# KVKEEP_TEST_DEVICE=cpu, on the CPU.
#
#     two_paths.sh KVKEEPD TINY_LLAMA PROMPTS [OPTIONS OF TINY_LLAMA…]
set -uo pipefail

folder=$(mktemp -d /tmp/kvkeep-test.XXXXXX)
printf '%s\n' '[server]' "unix_path = $folder/kvkeep.sock" \
    '[tiers]' 'device_bytes = 1 MiB' 'host_bytes = 32 MiB' \
    '[device]' "kind = ${KVKEEP_TEST_DEVICE:-cuda}" 'required = yes' >"$folder/kvkeepd.conf"
"$1" --config "$folder/kvkeepd.conf" &
daemon=$!
trap 'kill -KILL $daemon 2>/dev/null; rm -rf "$folder"' EXIT
for _ in $(seq 200); do
    [[ -S "$folder/kvkeep.sock" ]] && break
    kill -0 $daemon 2>/dev/null || exit 1
    sleep 0.1
done
"$2" --connect "unix:$folder/kvkeep.sock" --prompts "$3" "${@:4}"
result=$?
kill -TERM $daemon
wait $daemon || result=1
exit $result
