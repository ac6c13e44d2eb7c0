#!/usr/bin/env bash
# Does a daemon give back all that it took? Starts an AddressSanitizer build of kvkeepd with a
# catalogue, a disk tier and an HTTP page, lets it live through look-ups, copies, tenants,
# credentials, refusals, questions, an invalidation, and clients that are killed, ends it by
# SIGTERM with one client still there, and demands of LeakSanitizer that nothing is left; then once
# more on the same folder, so that what is brought back at a start is looked at as well.
#
#     tests/leaks/run.sh [BUILD_FOLDER]      build/asan without it (cmake --preset asan)
#
# The daemon cannot be traced as it usually runs, and LeakSanitizer traces: core_dumps = yes, and no
# filter of system calls.
# Takes a minute. Ends with 1, and the report, where anything leaked.
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=$(cd "${1:-build/asan}" && pwd)/bin
kvkeepd=${KVKEEPD:-$bin/kvkeepd}
kvkeepctl=${KVKEEPCTL:-$bin/kvkeepctl}
if [[ $(nm "$kvkeepd" | grep -c __asan_init) -eq 0 ]]; then
    echo "$kvkeepd is no AddressSanitizer build" >&2
    exit 2
fi

work=$(mktemp -d /tmp/kvkeep-leaks.XXXXXX)
daemon=
finish() {
    if [[ -n $daemon ]] && kill -0 "$daemon" 2>/dev/null; then
        kill -KILL "$daemon"
    fi
    rm -rf "$work"
}
trap finish EXIT

port=$((20000 + RANDOM % 20000))
cat >"$work/kvkeepd.conf" <<CONF
[server]
unix_path = $work/kvkeep.sock
[tiers]
device_bytes = 16 MiB
host_bytes = 16 MiB
huge_pages = no
[http]
address = 127.0.0.1:$port
open = all
[process]
core_dumps = yes
seccomp = no
[durable]
folder = $work/data
keeper = no
disk_bytes = 64 MiB
disk_admit_uses = 1
catalogue_bytes = 64 MiB
CONF
export KVKEEP_TARGET=unix:$work/kvkeep.sock
ctl() {
    ASAN_OPTIONS=detect_leaks=0 "$kvkeepctl" "$@" >>"$work/ctl.log" 2>&1
}
# A call that is refused is part of life.
try() {
    ctl "$@" || true
}

daemon_start() {
    ASAN_OPTIONS=detect_leaks=1:exitcode=23 LSAN_OPTIONS=report_objects=1 \
        "$kvkeepd" --config "$work/kvkeepd.conf" --log warning 2>"$work/log" &
    daemon=$!
    for _ in $(seq 600); do
        if ctl status; then
            return
        fi
        if ! kill -0 "$daemon" 2>/dev/null; then
            break
        fi
        sleep 0.1
    done
    echo "kvkeepd does not answer" >&2
    cat "$work/log" >&2
    exit 1
}

daemon_end() {
    local code=0
    kill -TERM "$daemon"
    wait "$daemon" || code=$?
    daemon=
    if [[ $code -ne 0 ]] || grep -q "LeakSanitizer" "$work/log"; then
        echo "FAILED: kvkeepd ended with $code" >&2
        cat "$work/log" >&2
        exit 1
    fi
}

# Look-ups and copies, until it is killed.
client_start() {
    ASAN_OPTIONS=detect_leaks=0 "$kvkeepctl" bench --blocks 32 >/dev/null 2>&1 &
    client=$!
}
client_kill() {
    kill -KILL "$client" 2>/dev/null || true
    wait "$client" 2>/dev/null || true
}

life() {
    ctl bench --blocks 32
    try tenant create a --host 1MiB
    try tenant create b
    try credential create engine --tenant a
    try credential rotate engine
    try tenant change a --mode off
    for question in status tenants spaces sequences leases instances usage why doctor mrc stats \
        "tenant list" "credential list"; do
        # shellcheck disable=SC2086
        try --json $question
    done
    for path in / /metrics /health/live /health/ready /nothing; do
        curl -s -o /dev/null "http://127.0.0.1:$port$path" || true
    done
    for method in GetOccupancy ListSpaces Doctor Nothing; do
        curl -s -o /dev/null -d '{}' "http://127.0.0.1:$port/api/$method" || true
    done
    curl -s -o /dev/null -d '{"space_id": [' "http://127.0.0.1:$port/api/ListSpaces" || true
    printf 'no http' | timeout 2 bash -c "cat >/dev/tcp/127.0.0.1/$port" || true
    for _ in 1 2 3; do
        client_start
        sleep 0.7
        client_kill
    done
    try invalidate --all
    try credential delete engine
    try tenant delete a
    ctl bench --blocks 16
    sleep 1 # for what is written behind
    client_start
    sleep 0.7
    daemon_end
    client_kill
}

for round in 1 2; do
    daemon_start
    life
    echo "round $round: nothing leaked"
done
