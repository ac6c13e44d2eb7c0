"""A compact format on disk, seen from outside: how a space says it, what comes back after a restart,
what it takes beside the plan, and the example worker's two-path check over it."""

import array
import json
import os
import subprocess

import grpc
import pytest

from conftest import Daemon, binary
from test_durable import TIERS, open_space, stats, store
from worker import BLOCK_TOKENS, HEAD_SIZE, Refused, Worker, block_bytes, group, pb

CODE = grpc.StatusCode
BLOCKS = 8
VALUES = BLOCKS * BLOCK_TOKENS


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


LITTLE_MEMORY = """
[tiers]
device_bytes = 320 KiB
host_bytes = 192 KiB
huge_pages = no
[durable]
folder = {folder}
disk_bytes = 64 MiB
disk_admit_uses = 1
keeper = no
"""


@pytest.mark.parametrize("name", ["int8_channel", "fp8_e4m3"])
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
