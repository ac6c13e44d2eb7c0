#!/usr/bin/env bash
# Install the Debian packages that building and running need, where they are missing; with --test
# also those that only the tests use, with --package those that cpack calls. Quiet where there is
# nothing to do.
#
#     deploy/packages.sh [--test] [--package] [--print]
#
# --print says which, one a line, and installs nothing.
set -euo pipefail

# g++ is nvcc's, where there is a CUDA toolkit, and the tests'.
packages=(
    cmake ninja-build gcc g++ pkg-config
    libgrpc-dev libprotobuf-c-dev protobuf-c-compiler protobuf-compiler libprotobuf-dev
    libxxhash-dev liblmdb-dev liburing-dev libssl-dev libjansson-dev libmicrohttpd-dev libzmq3-dev
    libmsgpack-dev zlib1g-dev
    libunistring-dev libhiredis-dev
)
test_packages=(libcriterion-dev spin gdb fio clang clang-format clang-tidy python3 python3-venv
    chromium redis-server redis-tools git openssl iproute2 curl procps)
package_packages=(dpkg-dev file)

print=no
for option in "$@"; do
    case "$option" in
    --test) packages+=("${test_packages[@]}") ;;
    --package) packages+=("${package_packages[@]}") ;;
    --print) print=yes ;;
    *)
        echo "usage: deploy/packages.sh [--test] [--package] [--print]" >&2
        exit 2
        ;;
    esac
done
if [[ $print == yes ]]; then
    printf '%s\n' "${packages[@]}"
    exit 0
fi

if ! command -v apt-get >/dev/null; then
    echo "no apt-get here: install what corresponds to Debian's ${packages[*]}" >&2
    exit 1
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
    if ! command -v sudo >/dev/null; then
        echo "packages are missing, and there is no sudo to install them with; as root:" >&2
        echo "    apt-get update && apt-get install --no-install-recommends ${missing[*]}" >&2
        exit 1
    fi
fi
echo "installing: ${missing[*]}"
"${as_root[@]}" apt-get -qq update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -qq install -y --no-install-recommends "${missing[@]}" >/dev/null
