#!/usr/bin/env bash
# kvkeep.sglang against SGLang's own classes: installs PyPI's sglang without its engine's needs (its
# wheels want a GPU's kernels) into a virtual environment, with what its storage interface imports.
#
#     tests/sglang/run.sh [pytest's arguments…]      KVKEEPD, SGLANG_VENV: as in tests/vllm/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
version=0.5.23
venv=${SGLANG_VENV:-build/sglang-venv}
if [[ ! -x "$venv/bin/python" ]]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet uv
fi
install() { "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "$@"; }
installed=$("$venv/bin/uv" pip list --python "$venv/bin/python" 2>/dev/null |
    sed -n 's/^sglang *//p' | tr -d ' ')
if [[ "$installed" != "$version" ]]; then
    install torch==2.13.0 numpy orjson transformers triton psutil pyzmq requests fastapi pybase64 \
        pillow msgspec uvicorn IPython aiohttp pytest
    install --no-deps "sglang==$version"
fi
install --reinstall-package kvkeep ./client/python
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
cd tests/sglang
exec "$python" -m pytest -q -x -p no:cacheprovider "$@"
