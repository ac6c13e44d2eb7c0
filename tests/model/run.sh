#!/usr/bin/env bash
# Check the models exhaustively, then plant one breach of each law and see that it is found:
# block.pml of pin, copy, evict, restore and invalidate; public.pml of public prefixes and of the
# hollow blocks that are known by their tokens alone.
#
#     tests/model/run.sh [--full]
#
# Without --full one reader is modelled (about a minute, half a GiB); with it also two (some
# minutes, 2 GiB). The last line is "model: N passed, N failed"; exits with 1 if anything failed,
# with 77 where spin or a C compiler is not installed.
set -uo pipefail
folder_of_models=$(cd "$(dirname "$0")" && pwd)
model=$folder_of_models/block.pml

full=no
if [[ "${1:-}" == "--full" ]]; then
    full=yes
elif [[ $# -gt 0 ]]; then
    echo "usage: tests/model/run.sh [--full]" >&2
    exit 2
fi
for program in spin cc; do
    if ! command -v "$program" >/dev/null; then
        echo "model: $program is not installed; nothing was checked"
        exit 77
    fi
done
folder=$(mktemp -d "${TMPDIR:-/tmp}/kvkeep-model.XXXX")
trap 'rm -rf "$folder"' EXIT
cd "$folder" || exit 1
passed=0
failed=0

# build "SPIN FLAGS" "CC FLAGS" [LEVEL]: make ./pan
build() {
    # shellcheck disable=SC2086
    spin $1 -a "$model" >spin.log 2>&1 &&
        cc "${3:--O2}" -w -DCOLLAPSE -DMEMLIM=4096 $2 -o pan pan.c
}

verdict() {
    if [[ $2 == yes ]]; then
        passed=$((passed + 1))
        printf 'ok      %s\n' "$1"
    else
        failed=$((failed + 1))
        printf 'FAILED  %s\n' "$1"
        tail -n 20 spin.log pan.log 2>/dev/null
    fi
}

# Every state was seen and no law was broken. A search that stopped early is no proof.
holds() {
    local name=$1
    shift
    ./pan -m2000000 -n "$@" >pan.log 2>&1
    local states
    states=$(awk '/states, stored/ {print $1; exit}' pan.log)
    if grep -q "errors: 0" pan.log &&
        ! grep -qE "not completed|max search depth too small" pan.log; then
        verdict "$name ($states states)" yes
    else
        verdict "$name" no
    fi
}

# breaks NAME BUG [CLAIM]: the planted breach must be found.
breaks() {
    local name=$1 flags="-DSAFETY -DNOCLAIM" arguments=()
    if [[ $# -gt 2 ]]; then
        flags="-DNFAIR=3"
        arguments=(-a -f -N "$3")
    fi
    # A breach is found soon: compiling would take the most of it.
    if build "-DREADERS=1 -DBUG=$2" "$flags" -O0; then
        ./pan -m2000000 -n "${arguments[@]}" >pan.log 2>&1
    fi
    if grep -q "errors: 1" pan.log; then
        verdict "found: $name" yes
    else
        verdict "not found: $name" no
    fi
    rm -f pan.log
}

build "-DREADERS=1" "-DSAFETY -DNOCLAIM" && holds "all laws, one reader"
build "-DREADERS=1" "-DNFAIR=3"
holds "what was invalidated is never found again" -a -f -N never_found_again
holds "whoever reads comes to an end" -a -f -N reading_ends
if [[ $full == yes ]]; then
    build "-DREADERS=2" "-DSAFETY -DNOCLAIM" && holds "all laws, two readers"
fi

breaks "a pinned copy is dropped" 1
breaks "the last copy of a held block is dropped" 2
breaks "a copy counts before it has landed" 3
breaks "a failed copy counts" 4
breaks "a slot is taken that is somebody's" 5
breaks "a failed copy forgets its pin" 6
breaks "a record is committed before its bytes" 7
breaks "a disk slot is given on before its record is gone" 8
breaks "a dead writer's slot is given on while its process lives" 9
breaks "an invalidation is answered before it is durable" 10
breaks "an invalidation is answered before it is done" 11 never_found_again
breaks "a reader waits for room while it holds a pin" 12 reading_ends

model=$folder_of_models/public.pml
build "-DREADERS=1" "-DSAFETY" && holds "public prefixes, one reader"
build "-DREADERS=2" "-DSAFETY" && holds "public prefixes, two readers"
breaks "a prefix is published before its bytes are there" 1
breaks "a withdrawal is answered before it is done" 2
breaks "a withdrawn prefix's room comes back while it is read" 3
breaks "a namesake goes while its child is indexed" 4
breaks "what is sealed behind a public prefix has no namesake above it" 5
breaks "a hollow namesake is a hit" 6
breaks "a namesake stays that nothing needs" 7

echo "model: $passed passed, $failed failed"
[[ $failed -eq 0 ]]
