#!/usr/bin/env bash
# Build and test everything: the dev build with all tests, static analysis, the sanitizers, threads,
# and a worker's life from Python.
#
#     deploy/test.sh [--quick]      --quick: the dev build and its tests only
#
# Ends with what failed, each with its output, and "N passed, N failed" over all parts; exits with 1
# if anything failed. What a part printed is in build/logs/.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

quick=no
if [[ "${1:-}" == "--quick" ]]; then
    quick=yes
elif [[ $# -gt 0 ]]; then
    echo "usage: deploy/test.sh [--quick]" >&2
    exit 2
fi

jobs=$(nproc)
logs=build/logs
passed=0
failed=0
failures=() # what the end says of each that failed
mkdir -p "$logs"

heading() {
    printf '\n==== %s (after %d min %02d s)\n' "$1" $((SECONDS / 60)) $((SECONDS % 60))
}

# fail NAME OUTPUT [COUNT]: remember it for the end.
fail() {
    failed=$((failed + ${3:-1}))
    failures+=("---- $1"$'\n'"$2")
}

# part NAME COMMAND…: run, with the output in a log; shown where it fails, counted as one test.
part() {
    local name=$1
    shift
    if "$@" >"$logs/$name.log" 2>&1; then
        passed=$((passed + 1))
        echo "$name: well"
        return 0
    fi
    tail -n 60 "$logs/$name.log"
    echo "$name: FAILED"
    fail "$name" "$(tail -n 60 "$logs/$name.log")"
    return 1
}

# configure_and_build PRESET [targets…]: all of it, or these alone.
configure_and_build() {
    local preset=$1
    shift
    cmake --preset "$preset" -DKVK_WERROR=ON &&
        cmake --build --preset "$preset" -j "$jobs" ${1:+--target "$@"}
}

# run_ctest PRESET [arguments…]: add its figures to ours.
run_ctest() {
    local preset=$1 log=$logs/ctest-$1.log summary
    shift
    ctest --test-dir "build/$preset" --output-on-failure -j "$jobs" "$@" 2>&1 | tee "$log"
    summary=$(sed -nE 's/^[0-9]+% tests passed, ([0-9]+) tests failed out of ([0-9]+)$/\1 \2/p' \
        "$log" | tail -n 1)
    if [[ -z "$summary" ]]; then
        echo "no tests ran in $preset: FAILED"
        fail "ctest of $preset" "no tests ran"
        return
    fi
    passed=$((passed + ${summary#* } - ${summary% *}))
    if [[ ${summary% *} -gt 0 ]]; then
        fail "ctest of $preset" "$(failed_of_ctest "$log")" "${summary% *}"
    fi
}

# failed_of_ctest LOG: the result lines of the tests that failed, each with what it printed.
failed_of_ctest() {
    awk '/^ *[0-9]+\/[0-9]+ Test +#/ { shown = !/ Passed / && !/\*\*\*Skipped/; lines = 0 }
         /^ +Start +[0-9]+: / || /^[0-9]+% tests passed/ { next }
         shown && lines++ < 60' "$1"
}

static_analysis() {
    git ls-files '*.c' | grep -E '^(base|index|gpu|hosttier|daemon|client)/' |
        xargs -P "$jobs" -n 4 clang-tidy --quiet -p build/dev
}

python_tests() {
    if [[ ! -x build/venv/bin/pytest ]]; then
        part venv python3 -m venv build/venv || return
        part pip build/venv/bin/pip install --quiet -r tests/e2e/requirements.txt || return
    fi
    part "pip: the client" build/venv/bin/pip install --quiet ./client/python || return
    # Apart: the first make their stubs as a worker's author would, the second use the package.
    pytest_folder tests/e2e "$logs/pytest-e2e.log"
    pytest_folder tests/python "$logs/pytest-python.log"
    pytest_folder tests/page "$logs/pytest-page.log"
}

# pytest_folder FOLDER LOG: run its tests and count them.
pytest_folder() {
    local log=$2 summary count
    KVKEEP_BIN="$PWD/build/dev/bin" build/venv/bin/pytest -q "$1" 2>&1 | tee "$log"
    summary=$(tail -n 1 "$log")
    count=$(sed -nE 's/.*\b([0-9]+) passed.*/\1/p' <<<"$summary")
    passed=$((passed + ${count:-0}))
    if [[ -z "$count" ]]; then
        echo "no test passed: FAILED"
        fail "$1" "no test passed"
    fi
    while read -r count; do
        fail "$1" "$(sed -n '/^=* \(FAILURES\|ERRORS\) =*$/,$p' "$log" | tail -n 120)" "$count"
    done < <(grep -oE '[0-9]+ (failed|error)' <<<"$summary" | cut -d' ' -f1)
}

heading "packages"
part packages deploy/packages.sh --test

heading "dev: build"
if part build-dev configure_and_build dev; then
    heading "dev: tests"
    run_ctest dev
fi

if [[ $quick == no ]]; then
    if [[ -d build/dev/bin ]] && compgen -G "tests/e2e/*.py" >/dev/null; then
        heading "a worker's life from Python"
        python_tests
    fi

    heading "static analysis"
    part clang-tidy static_analysis

    heading "asan: build with AddressSanitizer and UndefinedBehaviorSanitizer"
    if part build-asan configure_and_build asan tests_unit tests_sim; then
        heading "asan: unit tests and simulation"
        export LSAN_OPTIONS="suppressions=$PWD/tests/lsan.supp:print_suppressions=0"
        run_ctest asan -L '^(unit|sim)$'
    fi

    heading "tsan: build with ThreadSanitizer"
    if part build-tsan configure_and_build tsan tests_stress; then
        heading "tsan: tests of threads"
        export TSAN_OPTIONS="halt_on_error=1 suppressions=$PWD/tests/tsan.supp"
        run_ctest tsan -L '^stress$'
    fi
fi

if [[ $failed -gt 0 ]]; then
    heading "what failed"
    printf '%s\n' "${failures[@]}"
fi
heading "done"
echo "$passed passed, $failed failed"
[[ $failed -eq 0 ]]
