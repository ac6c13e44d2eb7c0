#!/usr/bin/env bash
# The Debian package on a Debian 12 that has nothing, started by systemd in a container: the unit
# with all its restrictions, what each way of ending leaves to the next daemon, the watchdog, users
# of the socket, an upgrade while it runs, purging.
#
#     tests/package/boot.sh [--package FILE] [--mirror URL] [--keep]
#
# Without --package it is made first, in another fresh Debian, as README.md says. Needs root,
# debootstrap and systemd-nspawn (systemd-container), and a mirror of Debian. Exit codes: 0 all
# shown, 1 not, 77 it cannot be tried here.
set -euo pipefail
cd "$(dirname "$0")/../.."

package=
mirror=http://deb.debian.org/debian
keep=no
while [[ $# -gt 0 ]]; do
    case "$1" in
    --package)
        package=$(realpath "$2")
        shift 2
        ;;
    --mirror)
        mirror=$2
        shift 2
        ;;
    --keep)
        keep=yes
        shift
        ;;
    *)
        echo "usage: tests/package/boot.sh [--package FILE] [--mirror URL] [--keep]" >&2
        exit 2
        ;;
    esac
done
for program in debootstrap systemd-nspawn nsenter; do
    if [[ $(id -u) -ne 0 ]] || ! command -v "$program" >/dev/null; then
        echo "skipped: it needs root, debootstrap and systemd-nspawn" >&2
        exit 77
    fi
done

say() {
    printf '== %s\n' "$*"
}
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

work=$(mktemp -d /var/tmp/kvkeep-boot.XXXXXX)
manager= # the process of systemd-nspawn
cleanup() {
    if [[ -n $manager ]]; then
        kill -TERM "$manager" 2>/dev/null || true
        wait "$manager" 2>/dev/null || true
    fi
    [[ $keep == yes ]] || rm -rf "$work"
}
trap cleanup EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

nspawn=(systemd-nspawn --quiet --register=no --keep-unit --resolv-conf=copy-host --console=pipe
    --system-call-filter=@memlock)

say "a Debian that has nothing"
debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus bookworm "$work/system" \
    "$mirror" >"$work/log" 2>&1 || { tail -n 20 "$work/log"; fail "debootstrap"; }

if [[ -z $package ]]; then
    say "the package, made in another"
    cp -a "$work/system" "$work/maker"
    mkdir "$work/maker/source"
    git ls-files -z | tar --null -T - -cf - | tar -C "$work/maker/source" -xf -
    "${nspawn[@]}" -D "$work/maker" --chdir=/source bash -euo pipefail -c '
        deploy/packages.sh --package
        cmake --preset release
        cmake --build --preset release
        cpack --config build/release/CPackConfig.cmake -B build' \
        </dev/null >"$work/log" 2>&1 || { tail -n 40 "$work/log"; fail "making the package"; }
    package=$(ls "$work"/maker/source/build/kvkeep_*.deb)
fi
cp "$package" "$work/system/kvkeep.deb"
"${nspawn[@]}" -D "$work/system" bash -euo pipefail -c '
    apt-get -qq update
    apt-get -qq install -y --no-install-recommends --download-only /kvkeep.deb' \
    </dev/null >"$work/log" 2>&1 || { tail -n 20 "$work/log"; fail "what it depends on"; }

say "systemd starts it"
# With a network of its own, so that the ports are free.
"${nspawn[@]}" --boot --private-network -D "$work/system" </dev/null >"$work/console" 2>&1 &
manager=$!
# inside COMMAND…: in the container, as its root.
inside() {
    local init
    init=$(pgrep -P "$manager" | head -n 1)
    nsenter --target "$init" --mount --uts --ipc --net --pid --root --wd \
        env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 HOME=/root \
        DEBIAN_FRONTEND=noninteractive "$@"
}
for try in $(seq 300); do
    [[ $(inside systemctl is-system-running 2>/dev/null) =~ running|degraded ]] && break
    [[ $try -lt 300 ]] && kill -0 "$manager" 2>/dev/null ||
        { tail -n 20 "$work/console"; fail "the container did not start"; }
    sleep 0.1
done

cp tests/package/boot_inside.sh "$work/system/"
inside bash /boot_inside.sh || fail "inside"
say "well"
