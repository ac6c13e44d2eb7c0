"""Compact formats below the device, seen from outside: how a space says them, what comes back
after a restart, what it takes beside the plan, and the example worker's two-path check over it."""

import array
import json
import os
import subprocess

import grpc
import pytest

import conftest
from conftest import binary
from test_durable import TIERS, open_space, stats, store
from worker import BLOCK_TOKENS, HEAD_SIZE, Refused, Worker, block_bytes, group, pb

CODE = grpc.StatusCode
BLOCKS = 8
VALUES = BLOCKS * BLOCK_TOKENS


RUNNING = []


class Daemon(conftest.Daemon):
    """One that does not outlive its test."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        RUNNING.append(self.process)


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    while RUNNING:
        process = RUNNING.pop()
        process.kill()
        process.wait()


def start_one(folder, name):
    place = os.path.join(folder, name)
    os.mkdir(place)
    return Daemon(place, TIERS.format(folder=os.path.join(folder, "durable"), keeper="no"))


def compact(disk_format):
    return [group(disk_format=disk_format)]


def floats(data):
    values = array.array("f")
    values.frombytes(data)
    return values


def ctl(daemon, *arguments):
    program = os.path.join(os.path.dirname(binary()), "kvkeepctl")
    done = subprocess.run([program, "--connect", daemon.target, *arguments], capture_output=True,
                          text=True, timeout=20, check=True)
    return done.stdout


@pytest.mark.parametrize("disk_format, name, near", [
    (pb.FORMAT_FP8_E4M3, "fp8_e4m3", 2 ** -4),
    (pb.FORMAT_INT8_CHANNEL, "int8_channel", 1 / 127),
])
def test_down_a_restart_and_up(folder, disk_format, name, near):
    values = list(range(VALUES))
    daemon = start_one(folder, "first")
    worker = Worker(daemon)
    space = open_space(worker, groups=compact(disk_format))
    assert space.groups[0].disk_format == disk_format
    assert 0 < space.groups[0].disk_block_bytes < space.groups[0].block_bytes
    store(worker, space, values, seed=1)
    assert stats(worker)["kvkeep_disk_narrowed_blocks_total"] == BLOCKS
    lease = worker.pin(space, values)
    for index, data in enumerate(worker.read(0, BLOCKS, lease_id=lease.lease_id)):
        assert data == block_bytes(repr((1, index)), len(data)), "memory has what was sealed"
    worker.leave()
    daemon.stop()

    daemon = start_one(folder, "second")
    worker = Worker(daemon)
    space = open_space(worker)  # as it is
    assert space.groups[0].disk_format == disk_format
    with Refused(CODE.ALREADY_EXISTS, pb.CAUSE_IDENTITY_MISMATCH, "groups[0].disk_format"):
        open_space(worker, groups=compact(pb.FORMAT_FP8_E4M3 + pb.FORMAT_INT8_CHANNEL -
                                          disk_format))
    listed = worker.call("ListSpaces", pb.ListSpacesRequest(), stub=worker.admin).spaces
    assert [one.groups[0].disk_format for one in listed] == [disk_format]
    lease = worker.pin(space, values)
    assert lease.cached_tokens == VALUES
    moved = 0
    for index, data in enumerate(worker.read(0, BLOCKS, lease_id=lease.lease_id)):
        was = floats(block_bytes(repr((1, index)), len(data)))
        now = floats(data)
        assert max(abs(a - b) for a, b in zip(was, now)) <= near
        moved += sum(a != b for a, b in zip(was, now))
    assert moved > 0
    assert stats(worker)["kvkeep_disk_widened_blocks_total"] == BLOCKS

    measured = worker.call("Plan", pb.PlanRequest(space_id=space.space_id),
                           stub=worker.admin).measured[2]
    assert measured.tier == pb.TIER_DISK and measured.tokens == VALUES
    per_token = 2 * 2 * 2 * HEAD_SIZE  # layers, K and V, heads
    assert measured.planned_bytes_per_value == pytest.approx(
        space.groups[0].disk_block_bytes / BLOCK_TOKENS / per_token, rel=0.02)
    assert measured.planned_bytes_per_value < 4
    assert measured.bytes_per_value == measured.used_bytes / VALUES / per_token
    host = worker.call("Plan", pb.PlanRequest(space_id=space.space_id),
                       stub=worker.admin).measured[1]
    assert host.planned_bytes_per_value == host.bytes_per_value == 4
    assert "disk " + name in ctl(daemon, "spaces")
    assert json.loads(ctl(daemon, "--json", "spaces"))[0]["disk_formats"] == [name]
    shown = json.loads(ctl(daemon, "--json", "plan", "--space", "tiny"))["measured"][2]
    assert shown["bytes_per_value"] == pytest.approx(measured.bytes_per_value)
    worker.leave()
    daemon.stop()


@pytest.mark.parametrize("one", [
    group(disk_format=pb.FORMAT_BF16),
    group(disk_format=pb.FORMAT_INT8_32),  # heads of 8
    group(disk_format=77),
    group(layout=pb.LAYOUT_TOKENS_FIRST, disk_format=pb.FORMAT_FP8_E4M3),
    group(format_k=pb.FORMAT_FP8_E4M3, format_v=pb.FORMAT_FP8_E4M3,
          disk_format=pb.FORMAT_INT8_CHANNEL),
])
def test_what_cannot_be_converted(daemon, one):
    worker = Worker(daemon)
    with Refused(CODE.INVALID_ARGUMENT, field="groups[0].disk_format"):
        open_space(worker, groups=[one])
    worker.leave()


FEW_BLOCKS = """
[cache]
policy = lru
[tiers]
device_bytes = {device}
host_bytes = {host}
huge_pages = no
[durable]
folder = {folder}
disk_bytes = 16 MiB
disk_admit_uses = 2
keeper = process
keeper_socket = {folder}.keeper
keeper_hold_ms = 5 s
"""


def rounded(worker, space, values, seed):
    """The blocks of a cached prompt, each near what was written, and one at least not the same."""
    lease = worker.pin(space, values)
    assert lease.cached_tokens == len(values)
    blocks = worker.read(0, len(values) // BLOCK_TOKENS, lease_id=lease.lease_id)
    for index, data in enumerate(blocks):
        was = floats(block_bytes(repr((seed, index)), space.groups[0].block_bytes))
        assert max(abs(a - b) for a, b in zip(was, floats(data))) <= 1 / 127
    worker.call("Release", pb.ReleaseRequest(session_id=worker.id, lease_ids=[lease.lease_id]))
    return blocks


def kill(daemon):
    daemon.process.kill()
    daemon.process.wait()
    for channel in daemon.channels:
        channel.close()


def few_blocks(folder, **tiers):
    """The configuration, and a place for each of two daemons."""
    places = [os.path.join(folder, str(i)) for i in range(2)]
    for place in places:
        os.mkdir(place)
    return FEW_BLOCKS.format(folder=os.path.join(folder, "durable"), **tiers), places


def test_memory_is_kept_beside_a_compact_disk(folder):
    config, places = few_blocks(folder, device=0, host="32 KiB")
    daemon = Daemon(places[0], config)
    worker = Worker(daemon)
    space = open_space(worker, groups=compact(pb.FORMAT_INT8_CHANNEL))
    values = list(range(4 * BLOCK_TOKENS))
    store(worker, space, values, seed=1)
    for i in range(32):  # others
        other = [1000 + 100 * i + j for j in range(4 * BLOCK_TOKENS)]
        worker.close(worker.prefill(space, other, seed=2).sequence_id)
    assert worker.lookup(space, values).disk_tokens == len(values)
    blocks = rounded(worker, space, values, 1)
    assert stats(worker)["kvkeep_disk_widened_blocks_total"] == 4
    kill(daemon)
    daemon = Daemon(places[1], config)
    worker = Worker(daemon)
    space = open_space(worker)
    assert worker.lookup(space, values).host_tokens == len(values)
    assert rounded(worker, space, values, 1) == blocks
    figures = stats(worker)
    assert figures["kvkeep_disk_widened_blocks_total"] == 0
    assert figures["kvkeep_checksum_failures_total"] == 0
    worker.leave()
    daemon.stop()


def test_a_compact_host_tier(folder):
    config, places = few_blocks(folder, device="16 KiB", host="64 KiB")
    daemon = Daemon(places[0], config)
    worker = Worker(daemon)
    space = open_space(worker, groups=[group(host_format=pb.FORMAT_INT8_CHANNEL)])
    assert space.groups[0].host_format == space.groups[0].disk_format == pb.FORMAT_INT8_CHANNEL
    assert 0 < space.groups[0].host_block_bytes < space.groups[0].block_bytes / 2
    values = list(range(4 * BLOCK_TOKENS))
    worker.close(worker.prefill(space, values, seed=1).sequence_id)
    for i in range(16):  # others
        other = [1000 + 100 * i + j for j in range(4 * BLOCK_TOKENS)]
        worker.close(worker.prefill(space, other, seed=2).sequence_id)
    assert worker.lookup(space, values).host_tokens == len(values)
    blocks = rounded(worker, space, values, 1)
    assert blocks != [block_bytes(repr((1, index)), len(data)) for index, data in enumerate(blocks)]

    with Refused(CODE.FAILED_PRECONDITION, field="tier"):
        worker.map_slots(space, pb.TIER_HOST)
    with Refused(CODE.UNIMPLEMENTED, field="tier"):
        worker.open(space, values, tier=pb.TIER_HOST)
    sequence = worker.open(space, values)
    assert sequence.cached_tokens == len(values)
    assert worker.read(0, 4, sequence_id=sequence.sequence_id) == blocks
    with Refused(CODE.UNIMPLEMENTED, field="host_format"):
        worker.call("SwapOut", pb.SwapOutRequest(session_id=worker.id,
                                              sequence_id=sequence.sequence_id))
    worker.close(sequence.sequence_id)
    measured = worker.call("Plan", pb.PlanRequest(space_id=space.space_id),
                           stub=worker.admin).measured
    assert measured[0].bytes_per_value == 4
    assert measured[1].bytes_per_value == measured[1].planned_bytes_per_value < 2
    assert "host int8_channel, disk int8_channel" in ctl(daemon, "spaces")
    assert json.loads(ctl(daemon, "--json", "spaces"))[0]["host_formats"] == ["int8_channel"]

    kill(daemon)
    daemon = Daemon(places[1], config)
    worker = Worker(daemon)
    again = open_space(worker)
    assert again.groups[0].host_format == pb.FORMAT_INT8_CHANNEL
    assert rounded(worker, again, values, 1) == blocks, "memory of before, in its format"
    worker.leave()
    daemon.stop()


def test_a_compact_host_tier_needs_a_device(start):
    daemon = start("[tiers]\ndevice_bytes = 0\nhost_bytes = 1 MiB\nhuge_pages = no\n")
    worker = Worker(daemon)
    with Refused(CODE.UNIMPLEMENTED, field="groups[0].host_format"):
        open_space(worker, groups=[group(host_format=pb.FORMAT_FP8_E4M3)])
    open_space(worker)
    worker.leave()


LITTLE_MEMORY = """
[tiers]
device_bytes = 640 KiB
host_bytes = 384 KiB
huge_pages = no
[durable]
folder = {folder}
disk_bytes = 64 MiB
disk_admit_uses = 1
keeper = no
"""


@pytest.mark.parametrize("name", ["int8_channel", "int8_32", "fp8_e4m3"])
def test_two_paths(folder, name):
    place = os.path.join(folder, "0")
    os.mkdir(place)
    daemon = Daemon(place, LITTLE_MEMORY.format(folder=os.path.join(folder, "durable")))
    program = os.path.join(os.path.dirname(binary()), "tiny_llama")
    done = subprocess.run([program, "--connect", daemon.target, "--disk-format", name,
                           "--prompts", "160"],
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    worker = Worker(daemon)
    assert stats(worker)["kvkeep_disk_widened_blocks_total"] > 50
    worker.leave()
    daemon.stop()
