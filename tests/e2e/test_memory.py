"""Mapped memory: written without gRPC, read with generations, and never another's."""

import mmap
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import grpc
import pytest

from conftest import promised
from worker import BLOCK_TOKENS, Refused, Worker, block_bytes, pb, table, token_ranges

CODE = grpc.StatusCode


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def test_write_by_mapping_read_by_another(daemon):
    writer = Worker(daemon)
    space = writer.open_space()
    size = space.groups[0].shard_bytes[0]
    answer, memory, _ = writer.map_slots(space, pb.TIER_DEVICE)
    assert answer.slot_stride == size
    assert answer.size_bytes >= answer.slot_count * answer.slot_stride
    values = list(range(8))
    sequence = writer.open(space, values)
    for block, tier, slot, _ in table(sequence):
        assert tier == pb.TIER_DEVICE
        memory[slot * size:(slot + 1) * size] = block_bytes(repr(("m", block)), size)
    writer.seal(sequence.sequence_id, 8)

    reader = Worker(daemon)
    lease = reader.pin(space, values, copy_pin=True)
    assert lease.cached_tokens == 8
    _, view, generations = reader.map_slots(space, pb.TIER_DEVICE, read_only=True)
    for block, _, slot, generation in table(lease):
        assert view[slot * size:(slot + 1) * size] == block_bytes(repr(("m", block)), size)
        assert int.from_bytes(generations[4 * slot:4 * slot + 4], "little") == generation
    assert reader.read(0, 2, lease_id=lease.lease_id) == [
        block_bytes(repr(("m", block)), size) for block in range(2)]
    writer.leave()
    reader.leave()


def test_read_only_means_read_only(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    answer, fds = worker.map(kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=space.space_id,
                             tier=pb.TIER_DEVICE, read_only=True)
    for fd in fds:
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, access=mmap.ACCESS_WRITE)
        with pytest.raises(OSError):
            os.write(fd, b"x")
    assert answer.map_id == 0 or answer.map_id > 0
    worker.leave()


def test_mapped_files_cannot_be_cut(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    _, fds = worker.map(kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=space.space_id,
                        tier=pb.TIER_DEVICE)
    with pytest.raises(OSError):
        os.ftruncate(fds[0], 4096)
    with pytest.raises(OSError):
        os.ftruncate(fds[0], 1 << 40)
    worker.leave()


def test_tokens_work_once_and_for_their_session(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    with Refused(CODE.FAILED_PRECONDITION):
        worker.call("MapMemory", pb.MapMemoryRequest(
            session_id=worker.id, kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=space.space_id,
            tier=pb.TIER_DEVICE))
    for wrong in (b"\0" * 16, os.urandom(16)):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(worker.welcome.side_socket_path.decode())
        stranger.sendall(wrong)
        assert stranger.recv(1) != b"\0"
        stranger.close()
    answer, fds = worker.map(kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=space.space_id,
                             tier=pb.TIER_DEVICE)
    worker.side.sendall(answer.map_token)
    data, more, _, _ = socket.recv_fds(worker.side, 1, 4)
    assert data != b"\0" and not more
    second = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    second.connect(worker.welcome.side_socket_path.decode())
    second.sendall(worker.welcome.side_token)
    assert second.recv(1) != b"\0"
    assert len(fds) == 2
    worker.leave()


def test_bad_mappings_are_named(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    worker.map(kind=pb.MapMemoryRequest.KIND_SCRATCH, size_bytes=4096)
    slots = dict(kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=space.space_id, tier=pb.TIER_DEVICE)
    for changes, field in ((dict(kind=0), "kind"), (dict(kind=9), "kind"),
                           (dict(space_id=0), "space_id"), (dict(tier=3), "tier"),
                           (dict(tier=5), "tier"), (dict(group=1), "group"),
                           (dict(rank=1), "rank")):
        with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, field):
            worker.map(**{**slots, **changes})
    for size in (0, 2**64 - 1):
        with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "size_bytes"):
            worker.map(kind=pb.MapMemoryRequest.KIND_SCRATCH, size_bytes=size)
    worker.leave()


WORKER_THAT_HANGS = """
    import sys, time
    sys.path[:0] = {path!r}
    import conftest, worker
    class Place:
        socket = {socket!r}
        target = "unix:" + socket
        channel = conftest.Daemon.channel
        channels = []
    w = worker.Worker(Place())
    space = w.open_space()
    _, memory, _ = w.map_slots(space, worker.pb.TIER_DEVICE)
    sequence = w.open(space, list(range(400)))
    w.append(sequence.sequence_id, 400, [1])
    print("up", flush=True)
    time.sleep(60)
"""


def test_killed_worker_gives_back_within_a_second(daemon):
    watcher = Worker(daemon)
    here = os.path.dirname(os.path.abspath(__file__))
    code = textwrap.dedent(WORKER_THAT_HANGS).format(path=[here], socket=daemon.socket)

    def used():
        answer = watcher.call("GetOccupancy", pb.GetOccupancyRequest(), stub=watcher.admin)
        return sum(tier.used_bytes for tier in answer.tiers)

    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            assert process.stdout.readline() == b"up\n"
            assert used() > 0
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed = time.monotonic()
            wait_for(lambda: used() == 0)
            assert time.monotonic() - killed < promised(1)
    watcher.leave()


def test_scattered_tail_is_written_by_mapping(daemon):
    """An append grants only what is new; what was sealed stays as it is."""
    worker = Worker(daemon)
    space = worker.open_space()
    size = space.groups[0].shard_bytes[0]
    sequence = worker.prefill(space, [1, 2, 3, 4, 5], "a").sequence_id
    _, memory, _ = worker.map_slots(space, pb.TIER_DEVICE)
    grown = worker.append(sequence, 5, [6, 7])
    assert grown.grant_first == 5
    slot = {row[0]: row[2] for row in table(worker.get(sequence))}[1]
    data = block_bytes("tail", size)
    for offset, _ in token_ranges(BLOCK_TOKENS):
        at = slot * size + offset
        memory[at + 32:at + 96] = data[offset + 32:offset + 96]
    worker.seal(sequence, 7)
    block = worker.read(1, 1, sequence_id=sequence)[0]
    first = block_bytes(repr(("a", 1)), size)
    for offset, _ in token_ranges(1):
        assert block[offset:offset + 32] == first[offset:offset + 32]
        assert block[offset + 32:offset + 96] == data[offset + 32:offset + 96]
    worker.leave()
