"""A worker in Python: a session, and each call of a worker's life as one method."""

import array
import mmap
import queue
import random
import socket
import struct
import threading

import grpc
import xxhash
from google.rpc import status_pb2
from grpc_status import rpc_status

from kvkeep.v1 import kvkeep_pb2 as pb
from kvkeep.v1 import kvkeep_pb2_grpc as rpc

BLOCK_TOKENS = 4
LAYERS = 2
KV_HEADS = 2
HEAD_SIZE = 8
SLOT_NONE = 0xFFFFFFFF


def tokens(values):
    return struct.pack(f"<{len(values)}I", *values)


def prompt(values, salt=b"", spans=()):
    return pb.Prompt(tokens=tokens(values), salt=salt,
                     spans=[pb.ContentSpan(first=a, count=b, digest=c) for a, b, c in spans])


def group(**changes):
    values = dict(layers=LAYERS, kv_heads=KV_HEADS, head_size_k=HEAD_SIZE, head_size_v=HEAD_SIZE,
                  format_k=pb.FORMAT_FP32, format_v=pb.FORMAT_FP32, layout=pb.LAYOUT_HEADS_FIRST,
                  attention=pb.ATTENTION_SELF)
    values.update(changes)
    return pb.LayerGroup(**values)


def space_request(model=b"tiny", groups=None, block_tokens=BLOCK_TOKENS, tenant=b"",
                  identity=None, **changes):
    return pb.OpenSpaceRequest(
        tenant=tenant, identity=identity or pb.Identity(model=model), block_tokens=block_tokens,
        groups=[group()] if groups is None else groups,
        prefill_cost=pb.PrefillCost(flops_per_token=1e6, flops_per_token_position=10,
                                    flops_per_second=1e12), **changes)


def block_bytes(seed, size):
    """Finite fp32 values that only this block has."""
    source = random.Random(seed)
    values = array.array("f", (source.uniform(-1, 1) for _ in range(size // 4)))
    return values.tobytes()


def detail_of(error):
    """The ErrorDetail of a failed call, as stock tools read it."""
    status = rpc_status.from_call(error)
    assert isinstance(status, status_pb2.Status)
    assert status.code == error.code().value[0]
    assert status.message == error.details()
    assert len(status.details) == 1
    detail = pb.ErrorDetail()
    assert status.details[0].Unpack(detail)
    assert detail.message.decode() == error.details()
    return detail


class Refused:
    """with Refused(code, cause, field): the call in it must be refused like that."""

    def __init__(self, code, cause=None, field=None):
        self.code, self.cause, self.field = code, cause, field
        self.detail = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        assert error is not None, f"the call went through, and should be {self.code}"
        if not isinstance(error, grpc.RpcError):
            return False
        assert error.code() == self.code, f"{error.code()}: {error.details()}"
        self.detail = detail_of(error)
        if self.cause is not None:
            assert self.detail.cause == self.cause, self.detail
        if self.field is not None:
            assert self.detail.field.decode() == self.field, self.detail
        return True


class Worker:
    def __init__(self, daemon, token=None, tenant=b"", instance_token=b"", rank=0, name=b"worker",
                 target=None):
        self.daemon = daemon
        self.metadata = [("authorization", f"Bearer {token}")] if token else []
        self.channel = daemon.channel(target)
        self.calls = rpc.KvkeepStub(self.channel)
        self.admin = rpc.AdminStub(self.channel)
        self.requests = queue.Queue()
        self.events = queue.Queue()
        self.end = None
        self.side = None
        self.mappings = []
        self.requests.put(pb.SessionRequest(hello=pb.SessionHello(
            tenant=tenant, instance_token=instance_token, rank=rank, name=name)))
        self.stream = self.calls.Session(iter(self.requests.get, None), metadata=self.metadata)
        self.reader = threading.Thread(target=self.read_events, daemon=True)
        self.reader.start()
        first = self.events.get(timeout=10)
        if first is None:
            raise self.end
        assert first.HasField("welcome")
        self.welcome = first.welcome
        self.id = self.welcome.session_id

    def read_events(self):
        try:
            for event in self.stream:
                self.events.put(event)
        except grpc.RpcError as error:
            self.end = error
        self.events.put(None)

    def leave(self):
        """End the session in order."""
        self.requests.put(None)
        while self.events.get(timeout=10) is not None:
            pass
        self.reader.join(10)
        if self.side is not None:
            self.side.close()

    def call(self, name, request, timeout=20, stub=None):
        return getattr(stub or self.calls, name)(request, metadata=self.metadata, timeout=timeout)

    # ---- spaces and prompts

    def open_space(self, **changes):
        return self.call("OpenSpace", space_request(**changes))

    def lookup(self, space, values, **changes):
        request = pb.LookupRequest(space_id=space.space_id, prompt=prompt(values), **changes)
        return self.call("Lookup", request)

    def pin(self, space, values, ttl_ms=10000, **changes):
        return self.call("Pin", pb.PinRequest(session_id=self.id, space_id=space.space_id,
                                              prompt=prompt(values), ttl_ms=ttl_ms, **changes))

    # ---- sequences

    def open(self, space, values, **changes):
        return self.call("OpenSequence", pb.OpenSequenceRequest(
            session_id=self.id, space_id=space.space_id, prompt=prompt(values), **changes))

    def get(self, sequence_id):
        return self.call("GetSequence", pb.GetSequenceRequest(session_id=self.id,
                                                              sequence_id=sequence_id))

    def append(self, sequence_id, length, values, draft=False):
        return self.call("Append", pb.AppendRequest(
            session_id=self.id, sequence_id=sequence_id, expected_length=length,
            tokens=tokens(values), draft=draft))

    def seal(self, sequence_id, length, upto=None, all_ranks=True):
        return self.call("Seal", pb.SealRequest(
            session_id=self.id, sequence_id=sequence_id, expected_length=length,
            length=length if upto is None else upto, all_ranks=all_ranks))

    def commit(self, sequence_id, length, accept):
        return self.call("Commit", pb.CommitRequest(session_id=self.id, sequence_id=sequence_id,
                                                    expected_length=length, accept=accept))

    def truncate(self, sequence_id, length, to):
        return self.call("Truncate", pb.TruncateRequest(
            session_id=self.id, sequence_id=sequence_id, expected_length=length, length=to))

    def fork(self, sequence_id, length, count, request_id=b""):
        return self.call("Fork", pb.ForkRequest(
            session_id=self.id, sequence_id=sequence_id, expected_length=length, count=count,
            request_id=request_id)).sequence_ids

    def close(self, *sequence_ids):
        return self.call("Close", pb.CloseRequest(session_id=self.id, sequence_ids=sequence_ids))

    # ---- bytes

    def write(self, sequence_id, pieces, checksum=True):
        """pieces: (group, rank, block, offset, data)"""
        def messages():
            yield pb.WriteBlocksRequest(session_id=self.id, sequence_id=sequence_id)
            for where in pieces:
                data = where[4]
                yield pb.WriteBlocksRequest(pieces=[pb.BlockPiece(
                    group=where[0], rank=where[1], block=where[2], offset=where[3], data=data,
                    checksum=xxhash.xxh3_64_intdigest(data) if checksum else 0)])
        return self.calls.WriteBlocks(messages(), metadata=self.metadata, timeout=30)

    def write_whole(self, space, sequence_id, seed, first_block, end_block):
        size = space.groups[0].shard_bytes[0]
        return self.write(sequence_id, [
            (0, 0, block, 0, block_bytes((seed, block).__repr__(), size))
            for block in range(first_block, end_block)])

    def read(self, first_block, block_count, sequence_id=0, lease_id=0, group_index=0, rank=0):
        """The bytes of each block, checksums compared."""
        blocks = {}
        for part in self.calls.ReadBlocks(pb.ReadBlocksRequest(
                session_id=self.id, sequence_id=sequence_id, lease_id=lease_id, group=group_index,
                rank=rank, first_block=first_block, block_count=block_count),
                metadata=self.metadata, timeout=30):
            assert xxhash.xxh3_64_intdigest(part.data) == part.checksum
            so_far = blocks.setdefault(part.block, b"")
            assert part.offset == len(so_far)
            blocks[part.block] = so_far + part.data
        return [blocks[index] for index in sorted(blocks)]

    def prefill(self, space, values, seed):
        """Open, write, seal. Blocks that were cached are left alone; a partial tail is written."""
        sequence = self.open(space, values)
        first = sequence.cached_tokens // BLOCK_TOKENS
        last = -(-len(values) // BLOCK_TOKENS)
        size = space.groups[0].shard_bytes[0]
        pieces = []
        for block in range(first, last):
            data = block_bytes(repr((seed, block)), size)
            count = min(BLOCK_TOKENS, len(values) - block * BLOCK_TOKENS)
            pieces += [(0, 0, block, offset, data[offset:offset + length])
                       for offset, length in token_ranges(count)]
        if pieces:
            self.write(sequence.sequence_id, pieces)
        self.seal(sequence.sequence_id, len(values))
        return sequence

    # ---- mapped memory

    def map(self, **request):
        """Ask for memory; the descriptors come by the side socket. Returns (answer, fds)."""
        if self.side is None:
            self.side = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.side.connect(self.welcome.side_socket_path.decode())
            self.side.sendall(self.welcome.side_token)
            assert self.side.recv(1) == b"\0"
        answer = self.call("MapMemory", pb.MapMemoryRequest(session_id=self.id, **request))
        self.side.sendall(answer.map_token)
        data, fds, _, _ = socket.recv_fds(self.side, 1, 4)
        assert data == b"\0"
        return answer, fds

    def map_slots(self, space, tier, read_only=False):
        answer, fds = self.map(kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=space.space_id,
                               tier=tier, read_only=read_only)
        access = mmap.ACCESS_READ if read_only else mmap.ACCESS_WRITE
        memory = mmap.mmap(fds[0], answer.size_bytes, access=access)
        generations = mmap.mmap(fds[1], 4 * answer.slot_count, access=mmap.ACCESS_READ)
        return answer, memory, generations


def token_ranges(count):
    """Where the first `count` tokens of a block lie: (offset, size), heads first."""
    token = HEAD_SIZE * 4
    for part in range(LAYERS * 2 * KV_HEADS):
        yield part * BLOCK_TOKENS * token, count * token


def table(response, index=0):
    """The table of a group as a list of (block, tier, slot, generation)."""
    rows = []
    for part in response.tables:
        if part.group != index:
            continue
        slots = array.array("I", part.slots)
        generations = array.array("I", part.generations)
        for i, slot in enumerate(slots):
            rows.append((part.first_block + i, part.tiers[i], slot, generations[i]))
    return rows
