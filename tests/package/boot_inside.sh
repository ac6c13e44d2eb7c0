#!/usr/bin/env bash
# What tests/package/boot.sh tries in its container: /kvkeep.deb on a Debian that systemd has
# started. Ends with 1 at the first thing that is not so.
set -euo pipefail

say() {
    printf '== %s\n' "$*"
}
fail() {
    echo "FAILED: $*" >&2
    journalctl -u kvkeepd --no-pager -o cat -n 30 >&2 || true
    exit 1
}
# says PATTERN COMMAND…: it ends well, and the pattern is in what it prints.
says() {
    local text
    text=$("${@:2}") && grep -q "$1" <<<"$text"
}
# expect WHAT FOUND WANTED
expect() {
    [[ "$2" == "$3" ]] || fail "$1: $2, not $3"
}
property() {
    systemctl show kvkeepd -p "$1" --value
}
blocks() {
    kvkeepctl stats | awk '$1 == "kvkeep_index_blocks" {print $2}'
}
wait_for() { # wait_for WHAT COMMAND…
    local what=$1
    shift
    for _ in $(seq 300); do
        "$@" >/dev/null 2>&1 && return
        sleep 0.1
    done
    fail "$what"
}
other_daemon_serves() {
    [[ $(property MainPID) != "$1" ]] && kvkeepctl status
}
# Of the daemon that runs: the words of its log that begin so.
log_of_this_one() {
    journalctl --no-pager -o cat "_PID=$(property MainPID)" | grep "^$1" || true
}
field() { # field NAME LINE
    sed -nE "s/.* $1=([0-9a-z]+).*/\1/p" <<<"$2"
}

# warm HOW COMMAND…: the daemon is ended so, and the next one has all blocks in memory again.
warm() {
    local how=$1 before pid line
    shift
    say "$how"
    before=$(blocks)
    pid=$(property MainPID)
    "$@"
    wait_for "$how: no other daemon serves" other_daemon_serves "$pid"
    line=$(log_of_this_one warm_start)
    [[ -n $line ]] || fail "$how: the start was not warm"
    expect "$how: blocks in memory" "$(field host "$line")" "$in_memory"
    expect "$how: blocks" "$(blocks)" "$before"
}

# as USER COMMAND…
as() {
    setpriv --reuid="$1" --regid="$1" --init-groups "${@:2}"
}
quietly() {
    "$@" >/log 2>&1 || fail "$*: $(cat /log)"
}

say "install"
quietly apt-get -qq install -y --no-install-recommends /kvkeep.deb
systemd-analyze verify kvkeepd.service || fail "systemd-analyze verify"
for file in /usr/share/bash-completion/completions/kvkeepctl /usr/share/man/man8/kvkeepd.8.gz \
    /usr/share/man/man1/kvkeepctl.1.gz /usr/share/man/man5/kvkeepd.conf.5.gz; do
    [[ -s $file ]] || fail "no $file"
done
for file in /usr/share/doc/kvkeep/examples/samples/*.conf; do
    says "the configuration is right" kvkeepd --config "$file" --check-config ||
        fail "$file is wrong"
done

say "on the configuration that came with it"
systemctl start kvkeepd || fail "it does not start"
says "you are default (admin)" kvkeepctl status || fail "root is not its operator"
token=$(kvkeepctl credential create first --tenant default 2>/dev/null)
useradd --create-home --groups kvkeep first
KVKEEP_TOKEN=$token says "you are default" as first kvkeepctl status ||
    fail "an engine with a token is not served"

say "with tenants and a disk"
useradd --create-home --groups kvkeep engine
useradd --create-home stranger
cat >/etc/kvkeep/kvkeepd.conf <<END
[server]
unix_path = /run/kvkeep/kvkeep.sock
unix_mode = 0660
[tiers]
device_bytes = 0
host_bytes = 256 MiB
huge_pages = yes
interleave_memory = yes
[durable]
folder = /var/lib/kvkeep
disk_bytes = 512 MiB
[tenant default]
[tenant chat]
[credential operator]
uids = 0
tenants = default, chat
admin = yes
[credential engine]
uids = $(id -u engine)
tenants = chat
END
systemctl restart kvkeepd || fail "it does not start again"
expect "its state" "$(property ActiveState)" active
pid=$(property MainPID)
expect "a warning in its log" "$(log_of_this_one '[a-z_]* level=\(warning\|error\)')" ""
expect "who keeps its memory" "$(field kind "$(log_of_this_one keeper)")" systemd
for line in CapPrm:0000000000000000 CapBnd:0000000000000000 NoNewPrivs:1 Seccomp:2; do
    grep -qF "${line/:/:$'\t'}" "/proc/$pid/status" || fail "its status has no line $line"
done

say "users of the socket"
says "you are chat" as engine kvkeepctl status || fail "engine, of the group, is not served"
says " 0 wrong" as engine kvkeepctl demo --workers 2 --requests 300 ||
    fail "engine's workers"
said=$(as stranger kvkeepctl status 2>&1) && fail "stranger, not of the group, is served"
grep -q "Permission denied" <<<"$said" || fail "stranger is told: $said"

in_memory=$(blocks)
[[ $in_memory -gt 0 ]] || fail "the workers left nothing"
warm "systemctl restart" systemctl restart kvkeepd
warm "kill -9" systemctl kill --kill-who=main -s KILL kvkeepd
warm "kvkeepctl drain" quietly kvkeepctl drain
warm "an upgrade of the package" quietly apt-get -qq install -y --reinstall /kvkeep.deb
mkdir -p /run/systemd/system/kvkeepd.service.d
printf '[Service]\nWatchdogSec=3\n' >/run/systemd/system/kvkeepd.service.d/quick.conf
systemctl daemon-reload
systemctl restart kvkeepd
warm "the watchdog, when it stands still" kill -STOP "$(property MainPID)"
says "Watchdog timeout" journalctl -u kvkeepd --no-pager -o cat || fail "no watchdog"

say "reload"
pid=$(property MainPID)
systemctl reload kvkeepd || fail "reload"
reloaded() {
    [[ -n $(log_of_this_one reloaded) ]]
}
wait_for "it does not say that it has read its certificates again" reloaded
expect "its process" "$(property MainPID)" "$pid"

say "stop and start"
systemctl stop kvkeepd
expect "how it ended" "$(property Result)" success
expect "descriptors kept" "$(property NFileDescriptorStore)" 0
[[ -d /run/kvkeep ]] || fail "the folder that containers mount is gone"
systemctl start kvkeepd
line=$(log_of_this_one warm_start)
expect "blocks in memory after a stop" "$(field host "$line")" 0
[[ $(field disk "$line") -gt 0 ]] || fail "nothing came back from disk"

say "purge"
quietly apt-get -qq purge -y kvkeep
for path in /run/kvkeep /var/lib/kvkeep /etc/kvkeep /usr/bin/kvkeepd; do
    [[ ! -e $path ]] || fail "$path is left"
done
expect "daemons left" "$(systemctl is-active kvkeepd || true)" inactive
