#!/usr/bin/env bash
# Run every fuzz target for some minutes each, one after another, from the kept corpora.
#
#     tests/fuzz/run.sh [--minutes N] [TARGET…]      10 minutes each, all targets
#
# Builds the preset fuzz (clang). What is found lies in build/fuzz/found/TARGET. New inputs lie in
# build/fuzz/corpus/TARGET; --keep merges the smallest set that reaches as much into the kept one.
# Exits with 1 if a target found anything.
set -euo pipefail
cd "$(dirname "$0")/../.."

minutes=10
keep=no
targets=()
while [[ $# -gt 0 ]]; do
    case "$1" in
    --minutes)
        minutes=$2
        shift 2
        ;;
    --keep)
        keep=yes
        shift
        ;;
    -*)
        echo "usage: tests/fuzz/run.sh [--minutes N] [--keep] [TARGET…]" >&2
        exit 2
        ;;
    *)
        targets+=("$1")
        shift
        ;;
    esac
done
if [[ ${#targets[@]} -eq 0 ]]; then
    for file in tests/fuzz/*.c; do
        targets+=("$(basename "$file" .c)")
    done
fi

cmake --preset fuzz >/dev/null
cmake --build --preset fuzz -j "$(nproc)" -- "${targets[@]/#/fuzz_}"
python3 tests/fuzz/seeds.py build/fuzz/seeds
status=0
for target in "${targets[@]}"; do
    kept=tests/fuzz/corpus/$target
    mkdir -p "build/fuzz/corpus/$target" "build/fuzz/found/$target" "build/fuzz/seeds/$target" \
        "$kept"
    echo "$target: $minutes min"
    if ! "build/fuzz/bin/fuzz_$target" -max_total_time=$((minutes * 60)) -timeout=20 \
        -rss_limit_mb=4096 -max_len=4096 -print_final_stats=1 \
        -artifact_prefix="build/fuzz/found/$target/" "build/fuzz/corpus/$target" "$kept" \
        "build/fuzz/seeds/$target" >"build/fuzz/$target.log" 2>&1; then
        echo "$target: FOUND something"
        tail -n 40 "build/fuzz/$target.log"
        status=1
    fi
    grep -E "stat::(number_of_executed_units|new_units_added)|cov:" "build/fuzz/$target.log" |
        tail -n 3
    if [[ $keep == yes ]]; then
        "build/fuzz/bin/fuzz_$target" -merge=1 -max_len=1024 "$kept" "build/fuzz/corpus/$target" \
            "build/fuzz/seeds/$target" >/dev/null 2>&1
    fi
done
exit "$status"
