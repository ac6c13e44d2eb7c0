#!/usr/bin/env bash
# Build kvkeep, start a daemon of our own and show what it does: a workload of four workers that
# checks every byte, a small model whose whole KV cache lives in the daemon, then kill -9 and a
# start that finds its blocks again.
#
#     deploy/run.sh [--once]      --once: end after the runs instead of staying up
set -euo pipefail
cd "$(dirname "$0")/.."

once=no
if [[ "${1:-}" == "--once" ]]; then
    once=yes
elif [[ $# -gt 0 ]]; then
    echo "usage: deploy/run.sh [--once]" >&2
    exit 2
fi

deploy/packages.sh
mkdir -p build/logs
echo "building (build/logs/build-release.log)"
if ! { cmake --preset release && cmake --build --preset release -j "$(nproc)"; } \
    >build/logs/build-release.log 2>&1; then
    tail -n 40 build/logs/build-release.log
    exit 1
fi
bin=$PWD/build/release/bin

# The daemon runs on its embedded defaults but for small tiers, so that a short demonstration fills
# them, three tenants instead of one, and what is off by itself: a folder for what outlives the
# daemon, and the page.
folder=$(mktemp -d "${XDG_RUNTIME_DIR:-/tmp}/kvkeep-demo.XXXX")
state=$(mktemp -d "$PWD/build/demo.XXXX") # on a disk, where the other may be memory
address=unix:$folder/kvkeep.sock
cat >"$folder/kvkeepd.conf" <<END
[server]
unix_path = $folder/kvkeep.sock
[tiers]
device_bytes = 64 MiB
host_bytes = 192 MiB
[durable]
folder = $state
disk_bytes = 512 MiB
[http]
address = 127.0.0.1:0
open = all
[tenant chat]
[tenant agents]
[tenant research]
[credential demonstration]
uids = $(id -u)
tenants = chat, agents, research
admin = yes
END

# Start the daemon and wait until it serves.
start() {
    "$bin/kvkeepd" --config "$folder/kvkeepd.conf" 2>"$folder/kvkeepd.log" &
    daemon=$!
    local tries=0
    until "$bin/kvkeepctl" --connect "$address" status >/dev/null 2>&1; do
        tries=$((tries + 1))
        if [[ $tries -ge 100 ]] || ! kill -0 "$daemon" 2>/dev/null; then
            echo "kvkeepd did not come up" >&2
            exit 1
        fi
        sleep 0.1
    done
}
daemon=

finish() {
    local status=$?
    trap - EXIT
    if [[ -n "$daemon" ]]; then
        kill -TERM "$daemon" 2>/dev/null || true
        wait "$daemon" 2>/dev/null || true
    fi
    # What outlives the daemon was for the show only.
    "$bin/kvkeepd" --config "$folder/kvkeepd.conf" --forget >/dev/null 2>&1 || true
    if [[ $status -ne 0 ]]; then
        echo "the daemon's last lines:" >&2
        tail -n 20 "$folder/kvkeepd.log" >&2 || true
    fi
    rm -rf "$folder" "$state"
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

start
"$bin/kvkeepctl" --connect "$address" demo --workers 4 --requests 4000
"$bin/tiny_llama" --connect "$address"

echo
echo "kill -9, and a start that finds its blocks again:"
"$bin/kvkeepctl" --connect "$address" stats | grep -E 'kvkeep_index_blocks ' || true
kill -KILL "$daemon"
wait "$daemon" 2>/dev/null || true
start
grep -E '^(warm_start|cold_start)' "$folder/kvkeepd.log" || true
"$bin/kvkeepctl" --connect "$address" status

if [[ $once == yes ]]; then
    exit 0
fi
cat <<END

kvkeepd is up at $address, its page at http://127.0.0.1:$(
    sed -nE 's/^ready .*http_port=([0-9]+).*/\1/p' "$folder/kvkeepd.log")/ (Ctrl-C ends both).
To go on, in another shell:

    export PATH=$bin:\$PATH
    kvkeepctl --connect $address status
    kvkeepctl --connect $address top
    kvkeepctl --help
END
trap 'echo; exit 0' INT TERM
wait "$daemon"
