#!/usr/bin/env bash
# Everything that wants a GPU, prepared for a machine that has one: builds for its architecture,
# holds the CUDA device against the CPU's reference, runs kvkeepd on it, measures, and prints one
# table. In under five minutes, most of it the build.
#
#     tests/device/run.sh [--simulated | --built]
#         --simulated: no GPU; a simulated one, to try the script
#         --built: what was built elsewhere, and BUILD names: for a machine with a GPU and a
#                  driver, but without a toolkit or the libraries that kvkeepd is built with. Its
#                  bin/ is run, with shared libraries from its lib/ where there is one; what the
#                  machine cannot load is left out, and said
#
# A part that fails does not end it: the others are run. Exits with 1 where a check failed, with 77
# where there is no GPU, or no nvcc to build with. What each part
# printed is in build/device/logs/, the figures also in build/device/bench.json; with OUT set, both
# are copied there. BUILD is another folder to build in, PATIENCE how many times as long each part
# may take, on a machine that is busy with other work.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit

simulated=no
built=no
if [[ "${1:-}" == "--simulated" ]]; then
    simulated=yes
elif [[ "${1:-}" == "--built" ]]; then
    built=yes
    export LD_LIBRARY_PATH=${BUILD:-build/device}/lib:${LD_LIBRARY_PATH:-}
elif [[ $# -gt 0 ]]; then
    echo "usage: tests/device/run.sh [--simulated | --built]" >&2
    exit 2
fi

build=${BUILD:-build/device}
logs=$build/logs
failed=0
mkdir -p "$logs"
PATH=$PATH:/usr/local/cuda/bin
SECONDS=0

say() {
    printf '%4d s  %s\n' "$SECONDS" "$*"
}

# part NAME SECONDS COMMAND…: run within that time, its words in a log that is shown where it fails.
part() {
    local name=$1 limit=$(($2 * ${PATIENCE:-1}))
    shift 2
    if timeout -k 5 "$limit" "$@" >"$logs/$name.log" 2>&1; then
        say "$name: well"
        return 0
    fi
    failed=$((failed + 1))
    tail -n 30 "$logs/$name.log"
    say "$name: FAILED"
    return 1
}

# The compute capability as nvcc wants it: "9.0" is 90.
architecture=90
if [[ $simulated == no ]]; then
    if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L >"$logs/gpus.log" 2>&1; then
        echo "no GPU here: nothing was run (--simulated tries the script without one)"
        exit 77
    fi
    if [[ $built == no ]] && ! command -v nvcc >/dev/null; then
        echo "no nvcc here: nothing was run"
        exit 77
    fi
    cat "$logs/gpus.log"
    architecture=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader |
        head -n 1 | tr -d '. ')
    nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.current,ecc.mode.current \
        --format=csv >"$logs/gpu.csv" 2>&1
fi

cuda=ON
suffix=
targets=(test_device_check bench_device kvkeepd tiny_llama)
if [[ $simulated == yes ]]; then
    cuda=AUTO
    suffix=_sim
    targets=(test_device_check_sim bench_device_sim kvkeepd_sim tiny_llama
        test_cuda_sim_daemon_gpu)
fi

if [[ $built == no ]]; then
    part configure 60 cmake -G Ninja -S . -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo \
        -DKVKEEP_CUDA=$cuda -DKVKEEP_CUDA_ARCHITECTURES="$architecture" || exit 1
    part build 280 cmake --build "$build" -j "$(nproc)" --target "${targets[@]}" || exit 1
fi
bin=$build/bin

# loads PROGRAM: is it there, with all the libraries that it wants?
loads() {
    local missing
    if [[ ! -x $1 ]]; then
        say "$1 was not built: left out"
        return 1
    fi
    missing=$(ldd "$1" 2>&1 | grep 'not found')
    if [[ -n $missing ]]; then
        printf '%s\n' "$missing"
        say "$1 does not start here: left out"
        return 1
    fi
}

# sanitizer TOOL SECONDS ARGUMENTS…: the check under one of CUDA's own tools.
sanitizer() {
    local tool=$1 limit=$2
    shift 2
    if ! part "$tool" "$limit" compute-sanitizer --tool "$tool" --error-exitcode 1 \
        --target-processes all "$bin/test_device_check" "$@" &&
        grep -q 'Device not supported' "$logs/$tool.log"; then
        failed=$((failed - 1))
        say "$tool: compute-sanitizer does not run here, which is no fault of the check"
    fi
}

# The device against the CPU, each part by itself; under sanitizers of CUDA's too where there are.
rounds=400
[[ $simulated == yes ]] && rounds=4
if loads "$bin/test_device_check$suffix"; then
    for what in copies slabs attention traps threads import; do
        part "check-$what" 60 "$bin/test_device_check$suffix" --rounds $rounds --only $what
    done
    if [[ $simulated == no ]] && command -v compute-sanitizer >/dev/null; then
        sanitizer memcheck 60 --rounds 10 --only attention
        sanitizer racecheck 60 --rounds 4 --only attention
    fi
else
    failed=$((failed + 1))
fi

# kvkeepd with its device tier on the GPU.
prompts=120
[[ $simulated == yes ]] && prompts=8
if loads "$bin/kvkeepd$suffix" && loads "$bin/tiny_llama"; then
    part two-paths 100 tests/cuda_sim/two_paths.sh "$bin/kvkeepd$suffix" "$bin/tiny_llama" $prompts
fi
if [[ $simulated == yes ]]; then
    part daemon 120 env KVKEEPD="$bin/kvkeepd_sim" "$bin/test_cuda_sim_daemon_gpu"
fi

small=()
[[ $simulated == yes ]] && small=(--small)
if loads "$bin/bench_device$suffix" &&
    part bench 90 "$bin/bench_device$suffix" "${small[@]}" --json; then
    cp "$logs/bench.log" "$build/bench.json"
    python3 - "$build/bench.json" <<'PYTHON'
import json
import sys

found = json.load(open(sys.argv[1]))
print(f"\n{'':28}{'value':>10} {'unit':6}{'reference':>10}{'ratio':>8}")
for row in found["results"]:
    numbers = [row["value"], row["reference"], row["ratio"]]
    value, reference, ratio = ["" if n is None else f"{n:.2f}" for n in numbers]
    print(f"{row['name']:28}{value:>10} {row['unit']:6}{reference:>10}{ratio:>8}")
PYTHON
fi
if [[ -n "${OUT:-}" ]]; then
    cp -r "$logs" "$build/bench.json" "$OUT"/ 2>/dev/null
fi
say "$failed failed"
[[ $failed -eq 0 ]]
