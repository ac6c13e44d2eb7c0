"""Warm restarts of the real daemon: killed at rest and under load, drained, forgotten; the keeper
lost; workers that live on and write late."""

import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import grpc
import pytest
from kvkeep.v1 import kvkeep_pb2 as pb

from conftest import Daemon, binary, sees_descriptors
from worker import BLOCK_TOKENS, Refused, Worker, block_bytes, space_request, table

CONFIG = """
[tiers]
device_bytes = {device}
host_bytes = {host}
huge_pages = no
[durable]
folder = {folder}
keeper = process
keeper_socket = {folder}/keeper
keeper_hold_ms = {hold}
"""


class Place:
    """A folder, and one daemon after the other on it."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.count = 0
        self.daemon = None

    def start(self, device="256 KiB", host="1 MiB", hold="1 min"):
        place = self.folder / f"d{self.count}"
        self.count += 1
        place.mkdir()
        data = self.folder / "data"
        self.daemon = Daemon(place, CONFIG.format(folder=data, device=device, host=host, hold=hold))
        return self.daemon

    def kill(self):
        for channel in self.daemon.channels:
            channel.close()
        self.daemon.process.kill()
        self.daemon.process.wait(10)

    def log(self):
        return self.daemon.log.read_text()

    def forget(self):
        config = self.daemon.folder / "kvkeep.ini"
        return subprocess.run([binary(), "--config", str(config), "--socket", self.daemon.socket,
                               "--forget"], capture_output=True, text=True, timeout=20)

    def keepers(self):
        """Processes that keep for this folder."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"--keeper" in words and str(self.folder).encode() in b" ".join(words):
                found.append(int(path.parent.name))
        return found


@pytest.fixture
def place(folder):
    place = Place(folder)
    yield place
    if place.daemon is not None and place.daemon.process.poll() is None:
        place.kill()
    for pid in place.keepers():
        os.kill(pid, signal.SIGKILL)


def values_of(number, blocks=8):
    return [number * 1000 + i for i in range(blocks * BLOCK_TOKENS)]


def fill(worker, space, numbers):
    for number in numbers:
        sequence = worker.prefill(space, values_of(number), seed=number)
        worker.close(sequence.sequence_id)


def check(worker, space, number):
    """How many tokens are hit; every byte of them is right."""
    values = values_of(number)
    sequence = worker.open(space, values)
    cached = sequence.cached_tokens
    size = space.groups[0].shard_bytes[0]
    if cached > 0:
        blocks = worker.read(0, cached // BLOCK_TOKENS, sequence_id=sequence.sequence_id)
        for index, data in enumerate(blocks):
            assert data == block_bytes(repr((number, index)), size), f"{number}: block {index}"
    worker.close(sequence.sequence_id)
    return cached


def open_again(place):
    worker = Worker(place.daemon)
    return worker, worker.call("OpenSpace", space_request())


def test_killed_at_rest_it_comes_back_with_every_byte(place):
    place.start()
    worker, space = open_again(place)
    fill(worker, space, range(20))
    left_open = worker.open(space, values_of(1))
    lease = worker.pin(space, values_of(2))
    place.kill()
    place.start()
    assert "warm_start" in place.log()
    worker, again = open_again(place)
    assert again.space_id == space.space_id and not again.created
    for number in range(20):
        assert check(worker, again, number) == 8 * BLOCK_TOKENS
    stats = worker.call("GetStats", pb.GetStatsRequest(), stub=worker.admin).stats
    values = {stat.name.decode(): stat.value for stat in stats}
    assert values["kvkeep_restored_blocks_total"] == 20 * 8
    assert values["kvkeep_torn_records_total"] == 0
    assert values["kvkeep_unkept_blocks_total"] == 0
    # What was open or lent before is not known, and that is a plain answer.
    with Refused(grpc.StatusCode.NOT_FOUND):
        worker.get(left_open.sequence_id)
    with Refused(grpc.StatusCode.NOT_FOUND):
        worker.read(0, 1, lease_id=lease.lease_id)
    place.daemon.stop()


def test_killed_under_load_nothing_wrong_is_served(place):
    """G1: rounds of load and SIGKILL; what is hit is right, and the memory is the daemon's own."""
    place.start()
    rng = random.Random(7)
    hits = 0
    for _ in range(12):
        worker, space = open_again(place)
        end = time.monotonic() + rng.uniform(0.05, 0.4)
        while time.monotonic() < end:
            number = rng.randrange(60)
            if rng.random() < 0.5:
                fill(worker, space, [number])
            else:
                check(worker, space, number)
        place.kill()
        place.start()
        worker, space = open_again(place)
        for number in range(60):
            hits += check(worker, space, number) > 0
    assert hits > 100
    assert len(place.keepers()) == 1
    place.daemon.stop()


def test_drain_hands_over(place):
    place.start()
    worker, space = open_again(place)
    fill(worker, space, range(10))
    answer = worker.call("Drain", pb.DrainRequest(), stub=worker.admin)
    assert answer.kept and answer.kept_blocks == 80
    assert place.daemon.process.wait(20) == 0
    place.start()
    worker, space = open_again(place)
    for number in range(10):
        assert check(worker, space, number) == 8 * BLOCK_TOKENS
    place.daemon.stop()
    place.start()  # and so after SIGTERM
    worker, space = open_again(place)
    assert check(worker, space, 3) == 8 * BLOCK_TOKENS
    place.daemon.stop()


def shmem_of_keepers(place):
    """Memory files that processes of this place hold."""
    files = 0
    for pid in place.keepers():
        for path in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
            try:
                files += "memfd:kvkeep" in os.readlink(path)
            except OSError:
                continue
    return files


def test_forget_leaves_nothing(place):
    place.start()
    worker, space = open_again(place)
    fill(worker, space, range(4))
    # While the daemon uses it, the keeper lets nobody take it away.
    refused = place.forget()
    assert refused.returncode == 1 and "another daemon" in refused.stderr
    place.daemon.stop()
    assert not sees_descriptors or shmem_of_keepers(place) > 0
    done = place.forget()
    assert done.returncode == 0, done.stderr
    deadline = time.monotonic() + 60
    while place.keepers() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert place.keepers() == []
    place.start()
    worker, space = open_again(place)
    assert check(worker, space, 1) == 0
    place.daemon.stop()


def test_the_keeper_lets_go_when_its_time_is_over(place):
    place.start(hold="300 ms")
    worker, space = open_again(place)
    fill(worker, space, range(4))
    place.daemon.stop()
    deadline = time.monotonic() + 60
    while place.keepers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert place.keepers() == []


def test_without_its_keeper_the_next_start_is_cold(place):
    place.start()
    worker, space = open_again(place)
    fill(worker, space, range(4))
    for pid in place.keepers():
        os.kill(pid, signal.SIGKILL)
    assert check(worker, space, 1) == 8 * BLOCK_TOKENS  # the daemon goes on
    place.kill()
    place.start()
    assert "cold_start" in place.log()
    worker, space = open_again(place)
    assert check(worker, space, 1) == 0
    fill(worker, space, range(4))
    place.daemon.stop()


def test_another_size_takes_what_fits_or_says_so(place):
    place.start()
    worker, space = open_again(place)
    fill(worker, space, range(20))
    place.kill()
    place.start(device="128 KiB", host="256 KiB")
    worker, space = open_again(place)
    assert sum(check(worker, space, number) > 0 for number in range(20)) > 0
    place.daemon.stop()
    place.start(device="512 KiB", host="4 MiB")
    assert "it begins cold" in place.log()
    worker, space = open_again(place)
    for number in range(20):
        check(worker, space, number)
    fill(worker, space, range(30, 40))
    place.daemon.stop()


def quarantine_of(worker):
    occupancy = worker.call("GetOccupancy", pb.GetOccupancyRequest(), stub=worker.admin)
    return sum(tier.quarantine_bytes for tier in occupancy.tiers)


# A worker of before, in a process of its own: it is given memory, and writes when told to.
OLD_WORKER = """
import sys
sys.path[:0] = {paths!r}
import conftest
from worker import Worker, table, space_request
from kvkeep.v1 import kvkeep_pb2 as pb
class Daemon:
    target = {target!r}
    channels = []
    def channel(self, target=None):
        return conftest.Daemon.channel(self)
worker = Worker(Daemon())
space = worker.call("OpenSpace", space_request())
answer, memory, generations = worker.map_slots(space, pb.TIER_DEVICE)
sequence = worker.open(space, list(range(900000, 900032)))
rows = table(sequence)
print("ready", *[slot for _, _, slot, _ in rows], flush=True)
sys.stdin.readline()
for _, _, slot, _ in rows:
    size = answer.slot_stride
    memory[slot * size:(slot + 1) * size] = b"\\xee" * size
print("written", flush=True)
sys.stdin.readline()
"""


def test_an_old_worker_that_writes_late_harms_nobody(place):
    place.start()
    worker, space = open_again(place)
    fill(worker, space, range(4))
    script = OLD_WORKER.format(paths=[p for p in sys.path if p], target=place.daemon.target)
    old = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE,
                           stdout=subprocess.PIPE, text=True)
    try:
        words = old.stdout.readline().split()
        assert words[0] == "ready"
        slots = {int(word) for word in words[1:]}
        place.kill()
        place.start()
        worker, space = open_again(place)
        assert quarantine_of(worker) == len(slots) * space.groups[0].block_bytes
        # Nobody is given those slots; what the old worker writes there now is in nobody's block.
        for number in range(100, 130):
            sequence = worker.open(space, values_of(number))
            assert not slots & {slot for _, tier, slot, _ in table(sequence)
                                if tier == pb.TIER_DEVICE}
            worker.close(sequence.sequence_id)
        fill(worker, space, range(50, 60))
        old.stdin.write("\n")
        old.stdin.flush()
        assert old.stdout.readline().strip() == "written"
        for number in [*range(4), *range(50, 60)]:
            check(worker, space, number)
        assert check(worker, space, 55) == 8 * BLOCK_TOKENS
    finally:
        old.kill()
        old.wait(10)
    deadline = time.monotonic() + 60
    while quarantine_of(worker) > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert quarantine_of(worker) == 0
    place.daemon.stop()
