"""Refusals: each with its code, its cause and its field, and nothing changed by it."""

import math
import os

import grpc
import pytest
import xxhash

from worker import (Refused, Worker, block_bytes, group, pb, prompt, rpc, space_request, tokens)

CODE = grpc.StatusCode
INVALID = (CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD)

TENANTS = """
[tiers]
device_bytes = 4 MiB
host_bytes = 8 MiB
huge_pages = no

[server]
tcp_address = 127.0.0.1:0

[tenant red]
[tenant blue]

[credential red-engine]
token = red-red-red-red-red
tenants = red

[credential both]
token = both-both-both-both
tenants = blue, red

[credential operator]
token = operator-operator-1
admin = yes
"""


@pytest.fixture
def worker(daemon):
    worker = Worker(daemon)
    yield worker
    worker.leave()


def test_bad_spaces_are_named(worker):
    nan = pb.PrefillCost(flops_per_token=math.nan)
    cases = [
        (space_request(block_tokens=0), "block_tokens"),
        (space_request(block_tokens=2**32 - 1), "block_tokens"),
        (space_request(groups=[]), "groups"),
        (space_request(groups=[group()] * 9), "groups"),
        (space_request(identity=pb.Identity()), "identity.model"),
        (space_request(identity=pb.Identity(model=b"\xff")), "identity.model"),
        (space_request(identity=pb.Identity(model=b"a\0b")), "identity.model"),
        (space_request(identity=pb.Identity(model=b"x" * 40960)), "identity.model"),
        (space_request(tenant=b"\xc0\x80"), "tenant"),
        (space_request(groups=[group(format_k=9)]), "groups[0].format_k"),
        (space_request(groups=[group(), group(layout=0)]), "groups[1].layout"),
        (space_request(groups=[group(layout=9)]), "groups[0].layout"),
        (space_request(groups=[group(attention=0)]), "groups[0].attention"),
        (space_request(groups=[group(kv_heads=0)]), "groups[0].kv_heads"),
        (space_request(groups=[group(kv_heads=2**32 - 1)]), "groups[0].kv_heads"),
        (space_request(groups=[group(layers=0)]), "groups[0].layers"),
        (space_request(groups=[group(head_size_v=0)]), "groups[0].head_size_v"),
        (space_request(groups=[group(sinks=3)]), "groups[0].sinks"),
        (space_request(tensor_shards=2**31), "tensor_shards"),
        (space_request(tensor_shards=64, pipeline_shards=64), "pipeline_shards"),
    ]
    for request, field in cases:
        with Refused(*INVALID, field):
            worker.call("OpenSpace", request)
    request = space_request()
    request.prefill_cost.CopyFrom(nan)
    with Refused(*INVALID, "prefill_cost.flops_per_token"):
        worker.call("OpenSpace", request)
    request = space_request()
    request.ClearField("identity")
    with Refused(*INVALID, "identity"):
        worker.call("OpenSpace", request)
    assert not worker.call("ListSpaces", pb.ListSpacesRequest(), stub=worker.admin).spaces


def test_odd_block_sizes_work(worker):
    """Case L1: an impossible block size is a clear error, an odd one works as usual."""
    for size in (1, 3):
        space = worker.open_space(model=b"odd %d" % size, block_tokens=size)
        sequence = worker.open(space, list(range(7))).sequence_id
        worker.seal(sequence, 7)
        assert worker.lookup(space, list(range(7))).cached_tokens == 7 // size * size


def test_bad_prompts_are_named(worker):
    space = worker.open_space()
    limits = worker.call("GetServerInfo", pb.GetServerInfoRequest()).limits
    many = [(i, 1, b"d") for i in range(limits.spans + 1)]
    cases = [
        (pb.Prompt(tokens=b"12345"), "prompt.tokens"),
        (pb.Prompt(tokens=b"\0" * 4 * (limits.tokens + 1)), "prompt.tokens"),
        (prompt([1, 2], salt=b"s" * (limits.salt_bytes + 1)), "prompt.salt"),
        (prompt([1, 2], spans=[(0, 0, b"d")]), "prompt.spans[0].count"),
        (prompt([1, 2], spans=[(0, 3, b"d")]), "prompt.spans[0].count"),
        (prompt([1, 2], spans=[(1, 2**64 - 1, b"d")]), "prompt.spans[0].count"),
        (prompt([1, 2], spans=[(0, 1, b"")]), "prompt.spans[0].digest"),
        (prompt([1, 2], spans=[(0, 1, b"d" * 65)]), "prompt.spans[0].digest"),
        (prompt([1, 2], spans=[(1, 1, b"d"), (0, 1, b"d")]), "prompt.spans[1].first"),
        (prompt([1, 2], spans=[(0, 2, b"d"), (1, 1, b"d")]), "prompt.spans[1].first"),
        (prompt(range(limits.spans + 1), spans=many), "prompt.spans"),
    ]
    for bad, field in cases:
        for name, request in (
                ("Lookup", pb.LookupRequest(space_id=space.space_id, prompt=bad)),
                ("Touch", pb.TouchRequest(space_id=space.space_id, prompt=bad)),
                ("Pin", pb.PinRequest(session_id=worker.id, space_id=space.space_id, prompt=bad,
                                      ttl_ms=1000)),
                ("OpenSequence", pb.OpenSequenceRequest(session_id=worker.id,
                                                        space_id=space.space_id, prompt=bad))):
            with Refused(*INVALID, field):
                worker.call(name, request)
    assert worker.call("Lookup", pb.LookupRequest(space_id=space.space_id)).cached_tokens == 0


def test_bad_numbers_are_named(worker):
    space = worker.open_space()
    sequence = worker.open(space, [1, 2, 3]).sequence_id
    limits = worker.call("GetServerInfo", pb.GetServerInfoRequest()).limits
    me = dict(session_id=worker.id)
    it = dict(session_id=worker.id, sequence_id=sequence)
    cases = [
        ("Lookup", pb.LookupRequest(), "space_id"),
        ("Pin", pb.PinRequest(space_id=space.space_id, ttl_ms=1), "session_id"),
        ("Pin", pb.PinRequest(**me, space_id=space.space_id), "ttl_ms"),
        ("Pin", pb.PinRequest(**me, space_id=space.space_id, ttl_ms=limits.lease_ms + 1),
         "ttl_ms"),
        ("Pin", pb.PinRequest(**me, space_id=space.space_id, ttl_ms=1, request_id=b"r" * 65),
         "request_id"),
        ("Renew", pb.RenewRequest(**me, lease_id=1), "ttl_ms"),
        ("Release", pb.ReleaseRequest(**me), "lease_ids"),
        ("Release", pb.ReleaseRequest(**me, lease_ids=[5, 5]), "lease_ids"),
        ("Release", pb.ReleaseRequest(**me, lease_ids=[0]), "lease_ids"),
        ("BeginTransfer", pb.BeginTransferRequest(**me, block_count=1), "sequence_id"),
        ("BeginTransfer", pb.BeginTransferRequest(**it, lease_id=1, block_count=1), "sequence_id"),
        ("BeginTransfer", pb.BeginTransferRequest(**it), "block_count"),
        ("BeginTransfer", pb.BeginTransferRequest(**it, first_block=2**64 - 1, block_count=2),
         "block_count"),
        ("BeginTransfer", pb.BeginTransferRequest(**me, lease_id=1, write=True, block_count=1),
         "write"),
        ("OpenSequence", pb.OpenSequenceRequest(**me, space_id=space.space_id, tier=9), "tier"),
        ("OpenSequence", pb.OpenSequenceRequest(**me, space_id=space.space_id,
                                                growth_tokens=2**64 - 1), "growth_tokens"),
        ("Append", pb.AppendRequest(**it, expected_length=3), "tokens"),
        ("Append", pb.AppendRequest(**it, expected_length=3, tokens=b"123"), "tokens"),
        ("Append", pb.AppendRequest(**it, expected_length=2**64 - 1, tokens=tokens([1])),
         "expected_length"),
        ("Append", pb.AppendRequest(**it, expected_length=3, tokens=tokens([1]), spans=[
            pb.ContentSpan(first=2, count=1, digest=b"d")]), "spans[0].first"),
        ("Seal", pb.SealRequest(**it, expected_length=3, length=4), "length"),
        ("Fork", pb.ForkRequest(**it, expected_length=3), "count"),
        ("Fork", pb.ForkRequest(**it, expected_length=3, count=2**32 - 1), "count"),
        ("Close", pb.CloseRequest(**me), "sequence_ids"),
        ("Close", pb.CloseRequest(**me, sequence_ids=[sequence, sequence]), "sequence_ids"),
        ("Invalidate", pb.InvalidateRequest(prefix=pb.Prompt(tokens=tokens([1]))), "space_id"),
        ("Invalidate", pb.InvalidateRequest(model=b"m" * 4097), "model"),
        ("Invalidate", pb.InvalidateRequest(kv_format=b"m" * 4097), "kv_format"),
        ("Invalidate", pb.InvalidateRequest(space_id=space.space_id, prefix=pb.Prompt()),
         "prefix.tokens"),
    ]
    for name, request, field in cases:
        with Refused(*INVALID, field):
            worker.call(name, request)
    assert worker.get(sequence).length == 3


def test_bad_bytes_are_refused(worker):
    space = worker.open_space()
    size = space.groups[0].shard_bytes[0]
    sequence = worker.open(space, list(range(8))).sequence_id
    data = block_bytes("x", size)

    def write(*pieces, session_id=worker.id, sequence_id=sequence):
        return worker.calls.WriteBlocks(iter([pb.WriteBlocksRequest(
            session_id=session_id, sequence_id=sequence_id, pieces=pieces)]))

    for piece, field in ((pb.BlockPiece(), "pieces.data"),
                         (pb.BlockPiece(data=b"x", offset=2**64 - 1), "pieces.offset")):
        with Refused(*INVALID, field):
            write(piece)
    with Refused(*INVALID, "session_id"):
        write(session_id=0)
    with Refused(*INVALID, "sequence_id"):
        write(sequence_id=0)
    with Refused(*INVALID, "session_id"):
        worker.calls.WriteBlocks(iter([]))
    with Refused(*INVALID, "sequence_id"):
        worker.calls.WriteBlocks(iter([
            pb.WriteBlocksRequest(session_id=worker.id, sequence_id=sequence),
            pb.WriteBlocksRequest(sequence_id=sequence + 1)]))
    with Refused(CODE.DATA_LOSS, pb.CAUSE_CHECKSUM):
        write(pb.BlockPiece(data=data, checksum=xxhash.xxh3_64_intdigest(data) ^ 1))
    for piece in (pb.BlockPiece(block=2, data=data), pb.BlockPiece(group=1, data=data),
                  pb.BlockPiece(rank=1, data=data), pb.BlockPiece(offset=4, data=data),
                  pb.BlockPiece(block=2**64 - 1, data=b"x")):
        with pytest.raises(grpc.RpcError) as refused:
            write(piece)
        assert refused.value.code() in (CODE.INVALID_ARGUMENT, CODE.OUT_OF_RANGE)

    write(pb.BlockPiece(data=data), pb.BlockPiece(block=1, data=data))
    worker.seal(sequence, 8)
    with pytest.raises(grpc.RpcError):
        write(pb.BlockPiece(data=data))
    assert worker.read(0, 1, sequence_id=sequence) == [data]

    def read(**request):
        return list(worker.calls.ReadBlocks(pb.ReadBlocksRequest(session_id=worker.id, **request)))

    with Refused(*INVALID, "sequence_id"):
        read(block_count=1)
    with Refused(*INVALID, "block_count"):
        read(sequence_id=sequence)
    with Refused(*INVALID, "block_count"):
        read(sequence_id=sequence, first_block=2**64 - 1, block_count=2)
    with Refused(CODE.OUT_OF_RANGE):
        read(sequence_id=sequence, first_block=1, block_count=2)
    with Refused(CODE.NOT_FOUND):
        read(sequence_id=sequence + 1, block_count=1)


def test_hostile_repetition(worker):
    """Bytes by hand: what stock clients would not send, but anybody can."""
    call = worker.channel.unary_unary("/kvkeep.v1.Kvkeep/Lookup")
    for data, field in ((b"\x12\x04\x1a\x00\x1a", ""), (b"\xff\xff", ""), (b"\x08", ""),
                        (b"\x0b\x0c", "")):
        with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD):
            call(data)
    spans = b"\x1a\x00" * 1000000
    with Refused(*INVALID, "prompt.spans"):
        call(b"\x12" + bytes([len(spans) & 127 | 128, len(spans) >> 7 & 127 | 128,
                              len(spans) >> 14]) + spans)
    release = worker.channel.unary_unary("/kvkeep.v1.Kvkeep/Release")
    with Refused(*INVALID, "lease_ids"):
        release(b"\x12\xc0\x84\x3d" + b"\x01" * 1000000)


def test_session_hello_is_checked(daemon):
    channel = daemon.channel()
    stub = rpc.KvkeepStub(channel)
    hello = pb.SessionHello
    for messages, field in (([pb.SessionRequest()], "hello"),
                            ([pb.SessionRequest(hello=hello(rank=64))], "hello.rank"),
                            ([pb.SessionRequest(hello=hello(name=b"\xff"))], "hello.name"),
                            ([pb.SessionRequest(hello=hello(instance_token=b"short"))],
                             "hello.instance_token"),
                            ([pb.SessionRequest(hello=hello())] * 2, "hello")):
        with Refused(*INVALID, field):
            list(stub.Session(iter(messages)))
    assert list(stub.Session(iter([]))) == []
    with Refused(CODE.PERMISSION_DENIED):
        list(stub.Session(iter([pb.SessionRequest(hello=hello(tenant=b"somebody"))])))


def test_ids_of_another_instance(daemon):
    owner, other = Worker(daemon), Worker(daemon)
    space = owner.open_space()
    sequence = owner.prefill(space, list(range(8)), "a").sequence_id
    lease = owner.pin(space, list(range(8))).lease_id
    theirs = dict(session_id=other.id)
    for name, request in (
            ("GetSequence", pb.GetSequenceRequest(**theirs, sequence_id=sequence)),
            ("Append", pb.AppendRequest(**theirs, sequence_id=sequence, expected_length=8,
                                        tokens=tokens([1]))),
            ("SwapOut", pb.SwapOutRequest(**theirs, sequence_id=sequence)),
            ("Close", pb.CloseRequest(**theirs, sequence_ids=[sequence])),
            ("Renew", pb.RenewRequest(**theirs, lease_id=lease, ttl_ms=1000)),
            ("Release", pb.ReleaseRequest(**theirs, lease_ids=[lease]))):
        with pytest.raises(grpc.RpcError) as refused:
            other.call(name, request)
        assert refused.value.code() in (CODE.PERMISSION_DENIED, CODE.NOT_FOUND), name
    assert owner.get(sequence).length == 8
    owner.leave()
    with pytest.raises(grpc.RpcError):
        other.call("GetSequence", pb.GetSequenceRequest(session_id=owner.id, sequence_id=sequence))
    other.leave()


def test_tenants_are_apart(start):
    daemon = start(TENANTS)
    tcp = f"127.0.0.1:{daemon.tcp_port}"
    for target in (None, tcp):
        red = Worker(daemon, token="red-red-red-red-red", target=target)
        both = Worker(daemon, token="both-both-both-both", target=target)
        assert bool(red.welcome.side_socket_path) == (target is None)
        space = red.open_space()
        values = list(range(8))
        sequence = red.prefill(space, values, "red").sequence_id
        assert red.lookup(space, values).cached_tokens == 8

        blue_space = both.open_space()
        assert blue_space.space_id != space.space_id
        assert both.lookup(blue_space, values).cached_tokens == 0
        shared = both.open_space(tenant=b"red")
        assert shared.space_id == space.space_id
        assert both.lookup(shared, values).cached_tokens == 8
        with Refused(CODE.PERMISSION_DENIED):
            red.open_space(tenant=b"blue")
        with Refused(CODE.PERMISSION_DENIED):
            red.open_space(tenant=b"nobody")
        with pytest.raises(grpc.RpcError) as foreign:
            red.call("Lookup", pb.LookupRequest(space_id=blue_space.space_id))
        with pytest.raises(grpc.RpcError) as unknown:
            red.call("Lookup", pb.LookupRequest(space_id=2**63))
        assert foreign.value.code() == unknown.value.code()
        with pytest.raises(grpc.RpcError):
            both.call("GetSequence", pb.GetSequenceRequest(session_id=both.id,
                                                           sequence_id=sequence))
        with pytest.raises(grpc.RpcError) as refused:
            red.call("GetStats", pb.GetStatsRequest(), stub=red.admin)
        assert refused.value.code() == CODE.PERMISSION_DENIED
        red.leave()
        both.leave()


def test_credentials_are_needed(start):
    daemon = start(TENANTS)
    for target in (None, f"127.0.0.1:{daemon.tcp_port}"):
        stub = rpc.KvkeepStub(daemon.channel(target))
        for metadata in ([], [("authorization", "Bearer wrong-wrong-wrong-")],
                         [("authorization", "red-red-red-red-red")],
                         [("authorization", "Basic red-red-red-red-red")],
                         [("authorization", "Bearer " + "x" * 2000)]):
            with Refused(CODE.UNAUTHENTICATED):
                stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata)
        info = stub.GetServerInfo(pb.GetServerInfoRequest(),
                                  metadata=[("authorization", "Bearer operator-operator-1")])
        assert info.admin and info.tenant == b"" and not info.tenants


def test_test_hooks_are_off_unless_asked_for(daemon, start):
    admin = rpc.AdminStub(daemon.channel())
    with Refused(CODE.UNIMPLEMENTED):
        admin.TestControl(pb.TestControlRequest())
    hooked = start(arguments=["--test-hooks"])
    admin = rpc.AdminStub(hooked.channel())
    admin.TestControl(pb.TestControlRequest(policy_time_ns=1 << 40))
    with Refused(*INVALID, "copy_delay_us"):
        admin.TestControl(pb.TestControlRequest(set_copy_delay=True, copy_delay_us=2**64 - 1))


def test_empty_requests_are_answered(daemon):
    """Every unary call with nothing in it: a clear answer or a clear error, never a fall."""
    channel = daemon.channel()
    for service in ("Kvkeep", "Admin"):
        for method in pb.DESCRIPTOR.services_by_name[service].methods:
            if method.name in ("Session", "WriteBlocks", "ReadBlocks", "WatchBlocks",
                               "Drain"):
                continue  # streams; and one that does as it is told
            try:
                channel.unary_unary(f"/kvkeep.v1.{service}/{method.name}")(b"", timeout=10)
            except grpc.RpcError as error:
                # GetFleet asks for nothing; this daemon is in no fleet.
                wanted = (CODE.FAILED_PRECONDITION,) if method.name == "GetFleet" else \
                    (CODE.INVALID_ARGUMENT, CODE.UNIMPLEMENTED)
                assert error.code() in wanted, method.name
                assert error.details()
    assert os.path.exists(daemon.socket)
