#!/usr/bin/env bash
# Build the Debian package, install it on this machine, and try what it brings: the daemon on the
# configuration it came with, as its own user; the pages of the manual; completion; a worker in C
# built against the installed library. Then purge it again. Needs root, on Debian 12.
#
#     tests/package/run.sh [CMAKE OPTION…]      such as -DKVKEEP_CUDA=OFF
set -euo pipefail
cd "$(dirname "$0")/../.."

if [[ $(id -u) -ne 0 ]]; then
    echo "tests/package/run.sh installs a package: run it as root" >&2
    exit 2
fi
deploy/packages.sh --package
apt-get -qq install -y --no-install-recommends \
    man-db bash-completion lintian curl procps >/dev/null

say() {
    printf '== %s\n' "$*"
}
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

user=(setpriv --reuid=kvkeep --regid=kvkeep --init-groups)

folder=$(mktemp -d /tmp/kvkeep-package.XXXXXX)
daemon=
cleanup() {
    [[ -z $daemon ]] || kill "$daemon" 2>/dev/null || true
    pkill -u kvkeep kvkeepd 2>/dev/null || true # its keeper
    apt-get -qq purge -y kvkeep >/dev/null 2>&1 || true
    rm -rf "$folder"
}
trap cleanup EXIT

say "build"
cmake --preset release -DKVK_TESTS=OFF -DCMAKE_INSTALL_PREFIX=/usr "$@" -B "$folder/build" \
    >"$folder/log" 2>&1 || { cat "$folder/log"; fail "configuring"; }
cmake --build "$folder/build" -j "$(nproc)" --target all manual >"$folder/log" 2>&1 ||
    { tail -n 40 "$folder/log"; fail "building"; }
(cd "$folder/build" && cpack -G DEB >/dev/null)
package=$(ls "$folder"/build/kvkeep_*.deb)
dpkg-deb --info "$package" | grep -E '^ (Package|Version|Depends|Installed-Size)'
say "lintian: errors"
# Left out: what a package of Debian itself would carry.
lintian --fail-on error --suppress-tags no-copyright-file,no-changelog,bogus-mail-host \
    "$package" || fail "lintian has errors"

say "install"
apt-get -qq install -y "$package" >/dev/null
getent passwd kvkeep >/dev/null || fail "no user kvkeep"
kvkeepd --config /etc/kvkeep/kvkeepd.conf --check-config
if command -v systemd-analyze >/dev/null; then
    systemd-analyze verify kvkeepd.service
fi

say "the daemon, as the unit starts it"
install -d -o kvkeep -g kvkeep -m 0750 /run/kvkeep
install -d -o kvkeep -g kvkeep -m 0700 /var/lib/kvkeep
"${user[@]}" kvkeepd --config /etc/kvkeep/kvkeepd.conf 2>"$folder/log" &
daemon=$!
for _ in $(seq 100); do
    grep -q '^ready ' "$folder/log" && break
    kill -0 "$daemon" 2>/dev/null || { cat "$folder/log"; fail "the daemon ended"; }
    sleep 0.1
done
kvkeepctl status # root is the operator
curl -sf http://127.0.0.1:9480/health/live >/dev/null || fail "no answer on the HTTP port"

say "manual and completion"
for page in kvkeepd kvkeepctl kvkeepd.conf; do
    man -w "$page" >/dev/null || fail "no page of the manual for $page"
    text=$(LC_ALL=C.UTF-8 man --warnings "$page" 2>"$folder/warnings")
    grep -q kvkeep <<<"$text" || fail "$page is empty"
    [[ ! -s "$folder/warnings" ]] || { cat "$folder/warnings"; fail "warnings about $page"; }
done
complete_words() { # what is offered behind these words
    bash -c 'source /usr/share/bash-completion/completions/kvkeepctl
        COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _kvkeepctl; echo "${COMPREPLY[@]}"' _ "$@"
}
offers() { # offers WORDS… EXPECTED
    local expected=${*: -1} found
    found=$(complete_words "${@:1:$#-1}")
    [[ "$found" == "$expected" ]] || fail "completion of ${*:1:$#-1}: $found, not $expected"
}
offers kvkeepctl st "status stats"
offers kvkeepctl tenant c "change create"
offers kvkeepctl plan --tens --tensor

say "a worker in C against the installed library"
cat >"$folder/worker.c" <<'C'
#include <base/slab_table.h>
#include <client/kvkeep.h>
#include <stdio.h>

int main(void)
{
    const struct kvkeep_options options = {.target = NULL};
    struct kvk_error error;
    struct kvkeep_client *client = NULL;
    if (kvkeep_connect(&options, &client, &error) != KVK_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    kvkeep_disconnect(client);
    puts("connected");
    return 0;
}
C
read -ra flags < <(pkg-config --cflags --libs libkvkeep)
g++ -std=c++20 -Wall -x c++ "$folder/worker.c" -x none "${flags[@]}" -o "$folder/worker"
gcc -std=c17 -Wall -Wextra "$folder/worker.c" "${flags[@]}" -o "$folder/worker"
chmod 755 "$folder"
"$folder/worker" | grep -q connected || fail "the worker did not connect"
library=$(ldconfig -p | sed -nE 's/.*libkvkeep\.so\.0 .* => (.*)/\1/p' | head -n 1)
foreign=$(nm -D --defined-only "$library" | awk '{print $3}' | grep -vE '^kv(keep|k)_' || true)
[[ -z "$foreign" ]] || fail "libkvkeep shows what is not its own: $foreign"

say "purge"
kill "$daemon"
wait "$daemon" || fail "the daemon did not end well"
daemon=
"${user[@]}" kvkeepd --config /etc/kvkeep/kvkeepd.conf --forget
apt-get -qq purge -y kvkeep >/dev/null
for path in /var/lib/kvkeep /usr/bin/kvkeepd /etc/kvkeep/kvkeepd.conf; do
    [[ ! -e $path ]] || fail "$path is left"
done
say "well"
