"""The sample router (client/examples/router.py) over three real daemons: it finds the longest
prefix that any of them has, from events alone, as their own look-ups say."""

import importlib.util
import pathlib
import random
import subprocess
import sys
import time

import pytest
from kvkeep.v1 import kvkeep_pb2 as pb

from conftest import ROOT, STUBS
from worker import BLOCK_TOKENS, Worker

PATH = ROOT / "client/examples/router.py"
NODES = 3
MODEL, REVISION = b"tiny", b""

CONFIG = """
[tiers]
device_bytes = 128 KiB
host_bytes = 0
huge_pages = no
[events]
log_bytes = 1 MiB
batch_ms = 5 ms
watchers = 4
"""


def load_router():
    spec = importlib.util.spec_from_file_location("router", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.RETRY_SECONDS = 0.05
    module.BUSY_TOKENS = 300
    return module


@pytest.fixture
def fleet(start):
    daemons = [start(CONFIG) for _ in range(NODES)]
    workers = [Worker(daemon) for daemon in daemons]
    spaces = [worker.open_space() for worker in workers]
    router = load_router().Router([daemon.target for daemon in daemons])
    assert router.await_ready(30)
    yield daemons, workers, spaces, router
    router.close()
    for daemon, worker in zip(daemons, workers):
        if daemon.process.poll() is None:
            worker.leave()


def looked_up(workers, spaces, daemons, values):
    return {daemon.target: worker.lookup(space, values).cached_tokens
            for daemon, worker, space in zip(daemons, workers, spaces)}


def agrees(fleet, values, seconds=30):
    """The router's counts become what look-ups say."""
    daemons, workers, spaces, router = fleet
    until = time.monotonic() + seconds
    while True:
        truth = looked_up(workers, spaces, daemons, values)
        said = router.longest(MODEL, REVISION, values)
        if said == truth:
            return truth
        assert time.monotonic() < until, (said, truth)
        time.sleep(0.005)


def test_longest_prefix_of_three(fleet):
    """Random prompts with shared beginnings, on random nodes, with evictions and invalidations."""
    daemons, workers, spaces, router = fleet
    source = random.Random(3)
    stems = [[1000 * s + i for i in range(40)] for s in range(6)]
    prompts = []
    apart = 0
    for step in range(120):
        stem = source.choice(stems)[:source.randrange(4, 41)]
        values = stem + [source.randrange(9000, 9003) for _ in range(source.randrange(0, 24))]
        node = source.randrange(NODES)
        sequence = workers[node].prefill(spaces[node], values, seed=step)
        workers[node].close(sequence.sequence_id)
        prompts.append(values)
        if step % 40 == 39:
            workers[node].call("Invalidate", pb.InvalidateRequest(space_id=spaces[node].space_id))
        if step % 5 == 4:
            for asked in source.sample(prompts, min(len(prompts), 5)):
                asked = asked + [7]
                truth = agrees(fleet, asked)
                address, cached = router.choose(MODEL, REVISION, asked)
                assert cached == max(truth.values()) == truth[address]
                apart += len(set(truth.values())) > 1
    assert apart > 20  # nodes did differ


def test_of_equal_ones_the_least_busy(fleet):
    daemons, workers, spaces, router = fleet
    values = list(range(BLOCK_TOKENS * 3))
    for worker, space in zip(workers, spaces):
        worker.close(worker.prefill(space, values, seed=1).sequence_id)
    agrees(fleet, values)
    router.nodes[0].sent, router.nodes[1].sent, router.nodes[2].sent = 5, 1, 3
    assert router.choose(MODEL, REVISION, values) == (daemons[1].target, len(values))
    assert router.choose(MODEL, b"another", values)[1] == 0


def test_a_long_prefix_outweighs_a_queue_and_a_short_one_does_not(fleet):
    daemons, workers, spaces, router = fleet
    values = list(range(BLOCK_TOKENS * 100))
    workers[0].close(workers[0].prefill(spaces[0], values, seed=1).sequence_id)
    agrees(fleet, values)
    agrees(fleet, values[:40])
    router.nodes[0].sent = 1
    assert router.choose(MODEL, REVISION, values) == (daemons[0].target, len(values))
    address, cached = router.choose(MODEL, REVISION, values[:40])
    assert address != daemons[0].target and cached == 0
    router.nodes[0].sent = 2
    assert router.choose(MODEL, REVISION, values)[0] != daemons[0].target


def test_a_node_that_is_gone(fleet):
    """It gets nothing any more; the next longest does."""
    daemons, workers, spaces, router = fleet
    values = list(range(BLOCK_TOKENS * 6))
    for node, count in ((2, 6), (1, 3)):
        part = values[:BLOCK_TOKENS * count]
        workers[node].close(workers[node].prefill(spaces[node], part, seed=2).sequence_id)
    agrees(fleet, values)
    assert router.choose(MODEL, REVISION, values) == (daemons[2].target, BLOCK_TOKENS * 6)
    daemons[2].process.kill()
    daemons[2].process.wait()
    until = time.monotonic() + 30
    while router.choose(MODEL, REVISION, values)[0] == daemons[2].target:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert router.choose(MODEL, REVISION, values) == (daemons[1].target, BLOCK_TOKENS * 3)
    daemons[2].process = subprocess.Popen(["true"])  # so that stopping it finds what it expects


def test_as_a_program(start):
    daemons = [start(CONFIG) for _ in range(2)]
    worker = Worker(daemons[1])
    space = worker.open_space()
    values = list(range(BLOCK_TOKENS * 2))
    worker.close(worker.prefill(space, values, seed=1).sequence_id)
    done = subprocess.run(
        [sys.executable, str(PATH), "--node", daemons[0].target, "--node", daemons[1].target,
         "--model", "tiny"], input=" ".join(map(str, values)) + " 99\n7 8 9\n", text=True,
        env={"PYTHONPATH": STUBS}, stdout=subprocess.PIPE, check=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[0] == f"{daemons[1].target} {len(values)}"
    assert lines[1].endswith(" 0")
    worker.leave()
