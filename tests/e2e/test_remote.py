"""Two daemons that share a store: what one computed the other finds, byte by byte, and everything
local goes on whatever becomes of the store. Skipped where redis-server is not installed."""

import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import time

import pytest
from kvkeep.v1 import kvkeep_pb2 as pb

from conftest import Daemon, binary, promised
from worker import BLOCK_TOKENS, Worker, block_bytes, prompt, space_request

pytestmark = pytest.mark.skipif(not shutil.which("redis-server"),
                                reason="redis-server is not installed")

CONFIG = """
[tiers]
host_bytes = 8 MiB
huge_pages = no
[remote]
seeds = 127.0.0.1:{port}
key_file = {folder}/fleet.key
admit_uses = 1
fetch_tokens = 4
generation_ms = 1 s
ask_ms = 10 s
fetch_ms = 10 s
store_ms = 10 s
node_timeout_ms = 5 s
"""

PENDING = (pb.REMOTE_STATE_ASKED, pb.REMOTE_STATE_FETCHING)


class Store:
    """One redis-server, empty, on a port below those that the kernel gives away."""

    def __init__(self, folder):
        self.folder = folder
        self.process = None
        self.port = self.free_port()
        self.run()

    @staticmethod
    def free_port():
        while True:
            port = random.randint(20000, 32000)
            with socket.socket() as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                    return port
                except OSError:
                    continue

    def run(self):
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "",
             "--dir", self.folder, "--logfile", f"{self.folder}/redis.log"])
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.01)
        raise AssertionError("redis-server does not answer")

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def store(folder):
    one = Store(folder)
    yield one
    one.kill()


@pytest.fixture
def nodes(start, store, folder):
    """Two daemons; the second begins when the first may use the store."""
    key = pathlib.Path(folder) / "fleet.key"
    key.write_text(os.urandom(32).hex() + "\n")
    key.chmod(0o600)
    workers = []
    for _ in range(2):
        worker = Worker(start(CONFIG.format(port=store.port, folder=folder)))
        worker.space = dear_space(worker)
        wait_for(lambda: figure(worker, "kvkeep_remote_spaces") == 1 and
                 figure(worker, "kvkeep_remote_spaces_out") == 0)
        workers.append(worker)
    return workers


def wait_for(condition, seconds=10):
    until = time.monotonic() + promised(seconds)
    while not condition():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.01)


def dear_space(worker):
    """One whose tokens are dear to compute: a fetch of any length is quicker."""
    request = space_request()
    request.prefill_cost.flops_per_second = 1e6
    return worker.call("OpenSpace", request)


def figures(worker):
    return {stat.name.decode(): stat.value for stat in
            worker.call("GetStats", pb.GetStatsRequest(), stub=worker.admin).stats}


def figure(worker, name):
    return figures(worker).get(name, 0)


def settled(worker, values):
    """Look up again and again, as a worker that would rather wait than compute."""
    answer = None

    def is_settled():
        nonlocal answer
        answer = worker.lookup(worker.space, values, retry=True)
        return answer.remote.state not in PENDING
    wait_for(is_settled)
    return answer


def share(worker, values, seed):
    before = figure(worker, "kvkeep_remote_sent_blocks_total")
    worker.close(worker.prefill(worker.space, values, seed).sequence_id)
    wait_for(lambda: figure(worker, "kvkeep_remote_sent_blocks_total") >=
             before + len(values) // BLOCK_TOKENS)


def check_bytes(worker, values, seed, blocks):
    lease = worker.pin(worker.space, values)
    assert lease.cached_tokens == blocks * BLOCK_TOKENS
    size = worker.space.groups[0].shard_bytes[0]
    assert worker.read(0, blocks, lease_id=lease.lease_id) == [
        block_bytes(repr((seed, block)), size) for block in range(blocks)]
    worker.call("Release", pb.ReleaseRequest(session_id=worker.id, lease_ids=[lease.lease_id]))


def test_what_one_computed_the_other_finds(nodes):
    a, b = nodes
    values = list(range(100, 140))
    share(a, values, "first")
    first = b.lookup(b.space, values)
    assert first.cached_tokens == 0
    assert first.remote.state == pb.REMOTE_STATE_ASKED
    assert settled(b, values).cached_tokens == 40
    check_bytes(b, values, "first", 10)

    told = figures(b)
    assert told["kvkeep_remote_fetched_blocks_total"] == 10
    assert told["kvkeep_remote_fetched_tokens_total"] == 40
    assert told["kvkeep_remote_asks_total"] >= 1
    assert told["kvkeep_remote_ask_hits_total"] == 1
    assert told["kvkeep_remote_fetches_total"] == 1
    assert told['kvkeep_remote_state{state="good"}'] == 1
    assert told['kvkeep_remote_blocks_total{operation="fetch",result="hit"}'] == 10
    assert told["kvkeep_remote_fetch_bytes_per_second"] >= 0
    assert figures(a)["kvkeep_remote_sent_bytes_total"] > 10 * 1024

    # What nobody has, in words; and what the operator sees.
    absent = list(range(5000, 5040))
    assert settled(b, absent).remote.state == pb.REMOTE_STATE_ABSENT
    why = b.call("ExplainMiss", pb.ExplainMissRequest(space_id=b.space.space_id,
                                                      prompt=prompt(absent)), stub=b.admin)
    assert why.remote.state == pb.REMOTE_STATE_ABSENT
    assert b"The remote store has no more of it." in why.sentence
    occupancy = b.call("GetOccupancy", pb.GetOccupancyRequest(), stub=b.admin)
    assert occupancy.remote.state == b"good"
    assert occupancy.remote.nodes == 1 and occupancy.remote.spaces == 1
    ctl = pathlib.Path(binary()).parent / "kvkeepctl"
    text = subprocess.run([ctl, "--connect", b.daemon.target, "status"], capture_output=True,
                          text=True, timeout=30, check=True).stdout
    assert "remote store: good, 0 of 1 nodes away" in text


def test_a_store_that_dies(nodes, store):
    a, b = nodes
    values = list(range(100, 140))
    share(a, values, "first")
    assert settled(b, values).cached_tokens == 40
    store.kill()
    for turn in range(20):
        new = list(range(10000 + 100 * turn, 10040 + 100 * turn))
        assert b.lookup(b.space, new).cached_tokens == 0
        b.close(b.prefill(b.space, new, turn).sequence_id)
        assert b.lookup(b.space, new).cached_tokens == 40
    check_bytes(b, values, "first", 10)
    wait_for(lambda: figures(b).get('kvkeep_remote_state{state="away"}') == 1)
    findings = b.call("Doctor", pb.DoctorRequest(), stub=b.admin).findings
    assert b"remote_away" in [finding.code for finding in findings]
    later = list(range(700, 740))
    a.close(a.prefill(a.space, later, "later").sequence_id)
    assert settled(b, later).remote.state == pb.REMOTE_STATE_FAILED

    store.run()
    wait_for(lambda: settled(b, later).cached_tokens == 40)
    check_bytes(b, later, "later", 10)


def test_an_invalidation_while_one_stands_still(nodes):
    a, b = nodes
    values = list(range(100, 140))
    share(a, values, "first")
    assert settled(b, values).cached_tokens == 40
    os.kill(b.daemon.process.pid, signal.SIGSTOP)
    try:
        answer = a.call("Invalidate", pb.InvalidateRequest(space_id=a.space.space_id))
    finally:
        os.kill(b.daemon.process.pid, signal.SIGCONT)
    assert answer.spaces == 1 and answer.store_pending_spaces == 0
    assert a.lookup(a.space, values).cached_tokens == 0
    wait_for(lambda: b.lookup(b.space, values, retry=True).cached_tokens == 0)
    assert settled(b, values).cached_tokens == 0
    assert figure(b, "kvkeep_remote_generation_learned_total") == 1
    assert figure(a, "kvkeep_remote_generation_raises_total") == 1
    share(a, values, "second")
    wait_for(lambda: settled(b, values).cached_tokens == 40)
    check_bytes(b, values, "second", 10)


def test_a_store_that_was_never_there(start, folder):
    key = pathlib.Path(folder) / "fleet.key"
    key.write_text("00112233445566778899aabbccddeeff" * 2 + "\n")
    key.chmod(0o600)
    worker = Worker(start(CONFIG.format(port=Store.free_port(), folder=folder)))
    worker.space = worker.open_space()
    values = list(range(40))
    worker.close(worker.prefill(worker.space, values, "alone").sequence_id)
    check_bytes(worker, values, "alone", 10)
    answer = worker.call("Invalidate", pb.InvalidateRequest(space_id=worker.space.space_id))
    assert answer.spaces == 1 and answer.store_pending_spaces == 1
    assert worker.lookup(worker.space, values).cached_tokens == 0


@pytest.mark.parametrize("change, words", [
    ("", "remote.key_file"),
    ("key_file = {folder}/nowhere", "remote.key_file"),
    ("key_file = {folder}/fleet.key\nuser = x", "remote.password_file"),
    ("key_file = {folder}/fleet.key\npassword_file = {folder}/nowhere", "remote.password_file"),
    ("key_file = {folder}/fleet.key\ntls_name = x", "remote.tls"),
])
def test_what_cannot_be_configured(folder, change, words):
    key = pathlib.Path(folder) / "fleet.key"
    key.write_text("00112233445566778899aabbccddeeff" * 2 + "\n")
    key.chmod(0o600)
    with pytest.raises(AssertionError, match=words.replace(".", r"\.")):
        Daemon(folder, "[tiers]\nhost_bytes = 8 MiB\nhuge_pages = no\n"
                       "[remote]\nseeds = 127.0.0.1:1\n" + change.format(folder=folder))
