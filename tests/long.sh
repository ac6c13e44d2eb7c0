#!/bin/sh
# The long tests, at full size: the simulation, and the tests with real processes.
#
#     tests/long.sh [BUILD_FOLDER]
#
# BUILD_FOLDER is where the project was built, build/dev without it. Takes an hour or two on two
# processors. Ends with 1 if anything failed; what failed is named last. ctest runs the same
# programs in a minute or two at sizes that find most.
set -u

here=$(cd "$(dirname "$0")/.." && pwd)
bin=${1:-$here/build/dev}/bin
failed=""
# What is promised within a time is asked for as it is promised.
KVKEEP_TEST_CALM=1
export KVKEEP_TEST_CALM

run() {
    echo "==== $*"
    program=$1
    shift
    if ! "$bin/$program" "$@"; then
        failed="$failed $program"
    fi
}

for program in kvkeepd test_sim_engine test_stress_daemon_crash; do
    if [ ! -x "$bin/$program" ]; then
        echo "$bin/$program is not there: build first, or name the build folder" >&2
        exit 1
    fi
done

run test_sim_engine --seeds 20 --events 1000000
run test_stress_daemon_crash --rounds 60 --restores 500 --writers 200
run test_stress_daemon_churn --clients 20000
run test_stress_daemon_revoke
run test_stress_daemon_ranks --rounds 100
run test_stress_daemon_cases --rounds 1000 --stops 5
run test_stress_server_churn
run test_stress_server_mixed

# Three daemons and a Redis Cluster, where there is one, and a Python with what tests/e2e needs.
python=$here/build/venv/bin/python
if [ -x "$python" ]; then
    echo "==== tests/cluster/run.sh"
    PYTHON=$python "$here/tests/cluster/run.sh" --bin "$bin" --seconds 20
    case $? in
    0 | 77) ;;
    *) failed="$failed tests/cluster/run.sh" ;;
    esac
fi

if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
echo "all passed"
