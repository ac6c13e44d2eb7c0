#!/usr/bin/env bash
# kvkeep.transformers on the real Transformers: installs PyPI's torch, transformers and peft into a
# virtual environment, and runs the tests of this folder against the real daemon. Some minutes on
# two processors, and 5 GB of disk. Nothing is downloaded but packages: models are built from
# configurations, with random weights.
#
#     tests/transformers/run.sh [pytest's arguments…]
#     tests/transformers/run.sh bench [bench.py's arguments…]
#
# KVKEEPD             the daemon; else build/release/bin/kvkeepd or build/dev/bin/kvkeepd
# TRANSFORMERS_VENV   where the environment is made, and found again; else build/transformers-venv
set -euo pipefail
cd "$(dirname "$0")/../.."
version=5.24.0
venv=${TRANSFORMERS_VENV:-build/transformers-venv}
. tests/venv.sh
if ! has transformers "$version"; then
    install torch "transformers==$version" peft pytest grpcio-tools setuptools
fi
client_install
cd tests/transformers
if [[ "${1:-}" == bench ]]; then
    shift
    exec "$python" bench.py "$@"
fi
exec "$python" -m pytest -q -x -p no:cacheprovider "$@"
