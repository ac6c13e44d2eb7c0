#!/usr/bin/env bash
# Install the Debian packages that building and running need, where they are missing; with --test
# also those that only the tests use. Quiet where there is nothing to do.
set -euo pipefail

packages=(
    cmake ninja-build gcc pkg-config
    libgrpc-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler libprotobuf-dev
    libxxhash-dev liblmdb-dev liburing-dev libssl-dev libjansson-dev libmicrohttpd-dev libzmq3-dev
    libmsgpack-dev zlib1g-dev
    libunistring-dev libhiredis-dev
)
test_packages=(libcriterion-dev spin gdb fio clang-format clang-tidy python3 python3-venv chromium
    redis-server redis-tools)

if [[ "${1:-}" == "--test" ]]; then
    packages+=("${test_packages[@]}")
fi

missing=()
for package in "${packages[@]}"; do
    if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "ok installed"; then
        missing+=("$package")
    fi
done
if [[ ${#missing[@]} -eq 0 ]]; then
    exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
    as_root=(sudo)
fi
echo "installing: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get -qq update
"${as_root[@]}" apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
