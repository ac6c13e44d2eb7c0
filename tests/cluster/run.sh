#!/usr/bin/env bash
# Three daemons and a real Redis Cluster of three masters and three replicas, and everything that
# goes wrong between them: tests/cluster/run.py says what is shown.
#
#     tests/cluster/run.sh [--bin build/release/bin] [--seconds 8] [--only NAME,…] [--keep]
#
# In a network namespace of its own, with one more for each of the three machines: nothing outside
# is touched, and a partition is a cable that is pulled. Where namespaces are not allowed all runs
# on loopback, and the partition is left out, in words.
#
# Needs redis-server, redis-cli, ip (iproute2) and a Python with what tests/e2e/requirements.txt
# names ($PYTHON, or python3). Exit codes: 0 all shown, 1 not, 77 redis-server is not installed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if ! command -v redis-server >/dev/null || ! command -v redis-cli >/dev/null; then
    echo "skipped: redis-server and redis-cli are not installed (deploy/packages.sh --test)" >&2
    exit 77
fi
python=${PYTHON:-python3}
if [[ $(id -u) == 0 ]]; then
    inside=(unshare --net --mount --propagation private)
else
    inside=(unshare --net --mount --propagation private --map-root-user)
fi
# Where namespaces get their names: a file system of our own, so that no name is left behind.
prepare='mkdir -p /run/netns && mount -t tmpfs none /run/netns && ip link set lo up && exec "$@"'
if command -v ip >/dev/null &&
    "${inside[@]}" bash -c 'mkdir -p /run/netns && mount -t tmpfs none /run/netns &&
        ip link set lo up && ip netns add try && ip link add c0 type veth peer name c1' \
        2>/dev/null; then
    exec "${inside[@]}" bash -c "$prepare" bash "$python" "$here/run.py" --machines "$@"
fi
echo "no network namespaces here: all on loopback, and no partition" >&2
exec "$python" "$here/run.py" "$@"
