#!/usr/bin/env bash
# A real Redis Cluster on loopback for tests: masters and replicas in a folder of their own.
#
#     cluster.sh start FOLDER PORT [MASTERS [REPLICAS]]   3 and 1 each; nodes are PORT, PORT + 1, …:
#                                                         masters first
#     cluster.sh signal FOLDER PORT SIGNAL                KILL, STOP, CONT …: one node
#     cluster.sh reshard PORT FROM_PORT TO_PORT SLOTS     move slots with their keys
#     cluster.sh all FOLDER COMMAND…                      a command to every node
#     cluster.sh stop FOLDER                              kill all, remove the folder
#
# Exits with 77 where redis-server is not installed.
set -euo pipefail

if ! command -v redis-server >/dev/null || ! command -v redis-cli >/dev/null; then
    echo "skipped: redis-server and redis-cli are not installed (deploy/packages.sh --test)" >&2
    exit 77
fi

cli() {
    redis-cli -h 127.0.0.1 "$@"
}

node_start() {
    local folder=$1 port=$2
    mkdir -p "$folder/$port"
    redis-server --port "$port" --bind 127.0.0.1 --cluster-enabled yes \
        --cluster-config-file nodes.conf --cluster-node-timeout 1500 \
        --cluster-port $((port + 500)) --appendonly no --save "" --dir "$folder/$port" \
        --daemonize yes --pidfile "$folder/$port/pid" --logfile "$folder/$port/log" \
        --repl-diskless-sync-delay 0 --cluster-replica-validity-factor 0 >/dev/null
}

start() {
    local folder=$1 port=$2 masters=${3:-3} replicas=${4:-1}
    local count=$((masters * (1 + replicas))) nodes=()
    for ((i = 0; i < count; i++)); do
        node_start "$folder" $((port + i))
        nodes+=("127.0.0.1:$((port + i))")
    done
    for ((i = 0; i < count; i++)); do
        for ((try = 0; try < 100; try++)); do
            [[ $(cli -p $((port + i)) ping 2>/dev/null) == PONG ]] && break
            sleep 0.05
        done
    done
    redis-cli --cluster create "${nodes[@]}" --cluster-replicas "$replicas" --cluster-yes \
        >"$folder/create.log"
    for ((i = 0; i < count; i++)); do
        for ((try = 0; try < 200; try++)); do
            cli -p $((port + i)) cluster info | grep -q cluster_state:ok && break
            sleep 0.05
        done
    done
}

node_id() {
    cli -p "$1" cluster myid
}

case "${1:-}" in
start)
    start "${@:2}"
    ;;
signal)
    kill "-$4" "$(<"$2/$3/pid")"
    ;;
reshard)
    redis-cli --cluster reshard "127.0.0.1:$2" --cluster-from "$(node_id "$3")" \
        --cluster-to "$(node_id "$4")" --cluster-slots "$5" --cluster-yes >/dev/null
    ;;
all)
    for file in "$2"/*/pid; do
        port=$(basename "$(dirname "$file")")
        cli -p "$port" "${@:3}" >/dev/null 2>&1 || true
    done
    ;;
stop)
    for file in "$2"/*/pid; do
        if [[ -r $file ]]; then
            kill -KILL "$(<"$file")" 2>/dev/null || true
        fi
    done
    rm -rf -- "$2"
    ;;
*)
    sed -n '2,11s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
