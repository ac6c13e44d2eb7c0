#!/usr/bin/env bash
# kvkeep.sglang against SGLang's own classes: installs PyPI's sglang without its engine's needs (its
# wheels want a GPU's kernels) into a virtual environment, with what its storage interface imports.
#
#     tests/sglang/run.sh [pytest's arguments…]      KVKEEPD, SGLANG_VENV: as in tests/vllm/run.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
version=0.5.23
venv=${SGLANG_VENV:-build/sglang-venv}
. tests/venv.sh
if ! has sglang "$version"; then
    install torch==2.13.0 numpy orjson transformers triton psutil pyzmq requests fastapi pybase64 \
        pillow msgspec uvicorn IPython aiohttp pytest
    install --no-deps "sglang==$version"
fi
client_install
cd tests/sglang
exec "$python" -m pytest -q -x -p no:cacheprovider "$@"
