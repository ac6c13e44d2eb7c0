"""Each call of a worker's life, over stock grpcio, with every byte compared."""

import threading
import time

import grpc
import pytest

from worker import (BLOCK_TOKENS, Refused, Worker, block_bytes, pb, prompt, rpc, space_request,
                    table, token_ranges, tokens)

CODE = grpc.StatusCode


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.02)


def expected_block(seed, block, size, count=BLOCK_TOKENS):
    """What prefill() wrote of a block: the first `count` tokens; the rest is not looked at."""
    return [(offset, block_bytes(repr((seed, block)), size)[offset:offset + length])
            for offset, length in token_ranges(count)]


def check_blocks(blocks, seed, first, size, length=None):
    for index, data in enumerate(blocks):
        block = first + index
        count = BLOCK_TOKENS if length is None else min(BLOCK_TOKENS,
                                                        length - block * BLOCK_TOKENS)
        for offset, part in expected_block(seed, block, size, count):
            assert data[offset:offset + len(part)] == part, f"block {block} at {offset}"


def test_server_info(daemon):
    worker = Worker(daemon)
    info = worker.call("GetServerInfo", pb.GetServerInfoRequest())
    assert info.boot_id == worker.welcome.boot_id and len(info.boot_id) == 16
    assert info.tenant == b"default" and info.tenants == [b"default"]
    assert info.admin
    assert b"map_memory" in info.features and b"attend" in info.features
    assert b"test_hooks" not in info.features
    assert info.device == b"cpu" and info.device_path
    assert info.device_bytes == 4 << 20 and info.host_bytes == 8 << 20
    assert info.policy == b"rp-cost"
    assert info.limits.message_bytes == 64 << 20
    assert info.limits.tokens > 0 and info.limits.attend_queries > 0
    worker.leave()


def test_session_welcome_and_ranks(daemon):
    worker = Worker(daemon)
    assert len(worker.welcome.instance_token) == 16 and len(worker.welcome.side_token) == 16
    assert worker.welcome.side_socket_path.decode() == daemon.socket + ".side"
    rank = Worker(daemon, instance_token=worker.welcome.instance_token, rank=1)
    assert rank.id != worker.id
    instances = worker.call("ListInstances", pb.ListInstancesRequest(), stub=worker.admin)
    assert len(instances.instances) == 1
    assert sorted(s.rank for s in instances.instances[0].sessions) == [0, 1]
    assert all(s.connected for s in instances.instances[0].sessions)
    rank.leave()
    notice = worker.events.get(timeout=10).notice
    assert notice.kind == pb.SessionNotice.KIND_RANK_ENDED and notice.value == 1
    with pytest.raises(grpc.RpcError):
        Worker(daemon, instance_token=b"x" * 16)
    worker.leave()


def test_space_is_found_by_its_content(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    assert space.created and space.space_id != 0
    assert space.groups[0].shard_bytes == [space.groups[0].block_bytes]
    again = worker.open_space()
    assert not again.created and again.space_id == space.space_id
    assert worker.open_space(model=b"other").space_id != space.space_id
    with Refused(CODE.ALREADY_EXISTS, pb.CAUSE_IDENTITY_MISMATCH):
        worker.open_space(block_tokens=8)
    listed = worker.call("ListSpaces", pb.ListSpacesRequest(), stub=worker.admin).spaces
    assert sorted(s.identity.model for s in listed) == [b"other", b"tiny"]
    assert all(s.groups[0].kv_heads == 2 and s.block_tokens == BLOCK_TOKENS for s in listed)
    worker.leave()


def test_prefill_is_hit_and_read_back_by_another(daemon):
    writer = Worker(daemon, name=b"writer")
    space = writer.open_space()
    size = space.groups[0].shard_bytes[0]
    values = list(range(1, 11))
    assert writer.lookup(space, values).cached_tokens == 0
    sequence = writer.prefill(space, values, "a")
    assert sequence.length == 10 and sequence.cached_tokens == 0 and sequence.grant_first == 0
    assert len(table(sequence)) == 3

    reader = Worker(daemon, name=b"reader")
    found = reader.lookup(space, values)
    assert found.cached_tokens == 8 and found.device_tokens == 8 and found.host_tokens == 0
    assert found.recompute_ns > 0
    assert reader.lookup(space, values[:8], leave_last=True).cached_tokens == 4
    assert reader.lookup(space, values[:6] + [99, 99]).cached_tokens == 4
    assert reader.lookup(space, [2] + values[1:]).cached_tokens == 0

    lease = reader.pin(space, values)
    assert lease.cached_tokens == 8 and lease.lease_id != 0
    assert [row[0] for row in table(lease)] == [0, 1]
    check_blocks(reader.read(0, 2, lease_id=lease.lease_id), "a", 0, size)

    renewed = reader.call("Renew", pb.RenewRequest(session_id=reader.id, lease_id=lease.lease_id,
                                                   ttl_ms=20000))
    assert renewed.ttl_ms == 20000
    leases = reader.call("ListLeases", pb.ListLeasesRequest(), stub=reader.admin).leases
    assert [row.lease_id for row in leases] == [lease.lease_id]
    assert leases[0].blocks == 2 and leases[0].instance_name == b"reader"
    released = reader.call("Release", pb.ReleaseRequest(session_id=reader.id,
                                                        lease_ids=[lease.lease_id]))
    assert released.released_blocks == 2
    with Refused(CODE.NOT_FOUND):
        reader.call("Release", pb.ReleaseRequest(session_id=reader.id,
                                                 lease_ids=[lease.lease_id]))
    touched = reader.call("Touch", pb.TouchRequest(space_id=space.space_id, prompt=prompt(values)))
    assert touched.touched_tokens == 8

    closed = writer.close(sequence.sequence_id)
    assert closed.cached_blocks == 2 and closed.freed_blocks == 1
    assert reader.lookup(space, values).cached_tokens == 8
    reader.leave()
    writer.leave()


def test_open_sequence_reuses_and_reserves(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    size = space.groups[0].shard_bytes[0]
    values = list(range(1, 13))
    first = worker.prefill(space, values, "a")
    second = worker.open(space, values + [50, 51], leave_last=True)
    assert second.cached_tokens == 12 and second.sealed_tokens == 12
    assert second.grant_first == 12 and second.length == 14
    check_blocks(worker.read(0, 3, sequence_id=second.sequence_id), "a", 0, size)
    assert [row[2] for row in table(first)][:3] == [row[2] for row in table(second)][:3]
    third = worker.open(space, values, no_lookup=True)
    assert third.cached_tokens == 0
    worker.close(first.sequence_id, second.sequence_id, third.sequence_id)
    worker.leave()


def test_request_ids_make_opening_repeatable(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    first = worker.open(space, [1, 2, 3], request_id=b"r1")
    assert worker.open(space, [1, 2, 3], request_id=b"r1").sequence_id == first.sequence_id
    assert worker.open(space, [1, 2, 3], request_id=b"r2").sequence_id != first.sequence_id
    worker.leave()


def test_append_draft_commit_truncate(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    values = [1, 2, 3, 4, 5, 6]
    sequence = worker.prefill(space, values, "a").sequence_id

    grown = worker.append(sequence, 6, [7, 8])
    assert grown.length == 8 and grown.grant_first == 6 and grown.committed_tokens == 8
    worker.write(sequence, [(0, 0, 1, offset + 2 * 32, b"\0" * 64)
                            for offset, _ in token_ranges(1)])
    assert worker.seal(sequence, 8).sealed_tokens == 8
    assert worker.lookup(space, values + [7, 8]).cached_tokens == 8

    drafts = worker.append(sequence, 8, [20, 21, 22, 23, 24], draft=True)
    assert drafts.length == 13 and drafts.committed_tokens == 8
    with Refused(CODE.FAILED_PRECONDITION, pb.CAUSE_LENGTH_MISMATCH) as refused:
        worker.append(sequence, 8, [1])
    assert refused.detail.value == 13
    worker.seal(sequence, 13)
    assert worker.lookup(space, values + [7, 8, 20, 21, 22, 23]).cached_tokens == 8
    accepted = worker.commit(sequence, 13, 2)
    assert accepted.length == 10 and accepted.committed_tokens == 10
    assert accepted.freed_blocks == 1

    cut = worker.truncate(sequence, 10, 5)
    assert cut.length == 5 and cut.freed_blocks == 1
    with Refused(CODE.OUT_OF_RANGE):
        worker.truncate(sequence, 5, 6)
    assert worker.get(sequence).length == 5
    empty = worker.truncate(sequence, 5, 0)
    assert empty.length == 0
    worker.close(sequence)
    worker.leave()


def test_fork_shares_and_copies_on_write(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    size = space.groups[0].shard_bytes[0]
    values = [1, 2, 3, 4, 5, 6]
    parent = worker.prefill(space, values, "a").sequence_id
    forks = worker.fork(parent, 6, 3, request_id=b"f")
    assert len(set(forks)) == 3
    assert worker.fork(parent, 6, 3, request_id=b"f") == forks
    slots = {row[0]: row[2] for row in table(worker.get(parent))}
    tails = set()
    for number, fork in enumerate(forks):
        grown = worker.append(fork, 6, [30 + number])
        rows = {row[0]: row[2] for row in table(worker.get(fork))}
        assert rows[0] == slots[0] and rows[1] != slots[1]
        tails.add(rows[1])
        assert grown.grant_first == 6
        data = block_bytes(f"tail {number}", size)
        worker.write(fork, [(0, 0, 1, offset + 2 * 32, data[offset:offset + 32])
                            for offset, _ in token_ranges(1)])
        worker.seal(fork, 7)
    assert len(tails) == 3
    for number, fork in enumerate(forks):
        blocks = worker.read(0, 2, sequence_id=fork)
        check_blocks(blocks, "a", 0, size, 6)
        data = block_bytes(f"tail {number}", size)
        for offset, _ in token_ranges(1):
            assert blocks[1][offset + 64:offset + 96] == data[offset:offset + 32]
    check_blocks(worker.read(0, 2, sequence_id=parent), "a", 0, size, 6)
    worker.close(parent, *forks)
    worker.leave()


def test_fork_waits_for_what_is_granted(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    sequence = worker.open(space, [1, 2, 3]).sequence_id
    with Refused(CODE.FAILED_PRECONDITION, pb.CAUSE_GRANT_UNWRITTEN):
        worker.fork(sequence, 3, 1)
    worker.leave()


def test_swap_out_and_in(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    size = space.groups[0].shard_bytes[0]
    values = list(range(100, 118))
    sequence = worker.prefill(space, values, "swap").sequence_id
    worker.append(sequence, 18, [7, 7, 7], draft=True)
    worker.seal(sequence, 21, upto=21)
    before = worker.read(0, 6, sequence_id=sequence)

    out = worker.call("SwapOut", pb.SwapOutRequest(session_id=worker.id, sequence_id=sequence))
    assert out.sequence.state == pb.SEQUENCE_STATE_SWAPPED_OUT
    assert out.moved_blocks == 6 and out.moved_bytes == 6 * size
    assert out.load_ns > 0 and out.recompute_ns > 0
    assert all(row[1] == pb.TIER_HOST for row in table(worker.get(sequence)))
    occupancy = worker.call("GetOccupancy", pb.GetOccupancyRequest(), stub=worker.admin)
    assert occupancy.rows[0].device_blocks == 0
    with Refused(CODE.FAILED_PRECONDITION, pb.CAUSE_SWAPPED_OUT):
        worker.append(sequence, 21, [1])
    with Refused(CODE.FAILED_PRECONDITION, pb.CAUSE_SWAPPED_OUT):
        worker.fork(sequence, 21, 1)
    assert worker.read(0, 6, sequence_id=sequence) == before
    assert worker.lookup(space, values).host_tokens == 16

    back = worker.call("SwapIn", pb.SwapInRequest(session_id=worker.id, sequence_id=sequence))
    assert back.sequence.state == pb.SEQUENCE_STATE_RUNNING and back.sequence.length == 21
    assert back.moved_bytes == 6 * size
    assert all(row[1] == pb.TIER_DEVICE for row in table(worker.get(sequence)))
    assert worker.read(0, 6, sequence_id=sequence) == before
    check_blocks(before[:5], "swap", 0, size, 18)
    worker.close(sequence)
    worker.leave()


def test_transfer_keeps_slots_past_the_lease(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    values = list(range(8))
    sequence = worker.prefill(space, values, "a").sequence_id
    worker.close(sequence)
    lease = worker.pin(space, values, copy_pin=True)
    transfer = worker.call("BeginTransfer", pb.BeginTransferRequest(
        session_id=worker.id, lease_id=lease.lease_id, first_block=0, block_count=2))
    assert transfer.ticket != 0 and table(transfer) == table(lease)
    worker.call("Release", pb.ReleaseRequest(session_id=worker.id, lease_ids=[lease.lease_id]))
    block = worker.call("GetBlock", pb.GetBlockRequest(
        space_id=space.space_id, prefix=prompt(values)), stub=worker.admin)
    assert block.device_pins == 1 and block.state == b"SEALED" and block.on_device
    worker.call("EndTransfer", pb.EndTransferRequest(session_id=worker.id, ticket=transfer.ticket))
    block = worker.call("GetBlock", pb.GetBlockRequest(
        space_id=space.space_id, prefix=prompt(values)), stub=worker.admin)
    assert block.device_pins == 0 and block.state == b"EVICTABLE"
    with Refused(CODE.NOT_FOUND):
        worker.call("EndTransfer", pb.EndTransferRequest(session_id=worker.id,
                                                         ticket=transfer.ticket))
    worker.leave()


def test_invalidate_forgets(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    size = space.groups[0].shard_bytes[0]
    values = list(range(1, 13))
    worker.close(worker.prefill(space, values, "a").sequence_id)
    lease = worker.pin(space, values)
    part = worker.call("Invalidate", pb.InvalidateRequest(space_id=space.space_id,
                                                          prefix=prompt(values[:8])))
    assert part.spaces == 1 and part.device_blocks == 2 and part.held_blocks == 2
    assert worker.lookup(space, values).cached_tokens == 4
    check_blocks(worker.read(0, 3, lease_id=lease.lease_id), "a", 0, size)
    everything = worker.call("Invalidate", pb.InvalidateRequest(model=b"tiny"))
    assert everything.spaces == 1
    assert worker.lookup(space, values).cached_tokens == 0
    notice = worker.events.get(timeout=10).notice
    assert notice.kind == pb.SessionNotice.KIND_INVALIDATED and notice.value == space.space_id
    worker.leave()


def test_salts_and_content_separate(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    values = [1, 2, 3, 4] + [9] * 8

    def open_prompt(salt, spans):
        sequence = worker.call("OpenSequence", pb.OpenSequenceRequest(
            session_id=worker.id, space_id=space.space_id, prompt=prompt(values, salt, spans)))
        worker.write_whole(space, sequence.sequence_id, "x", 0, 3)
        worker.seal(sequence.sequence_id, 12)

    def cached(salt, spans):
        return worker.call("Lookup", pb.LookupRequest(
            space_id=space.space_id, prompt=prompt(values, salt, spans))).cached_tokens

    open_prompt(b"user 1", [(5, 7, b"image 1")])
    assert cached(b"user 1", [(5, 7, b"image 1")]) == 12
    assert cached(b"user 1", [(5, 7, b"image 2")]) == 4
    assert cached(b"user 1", [(6, 6, b"image 1")]) == 4
    assert cached(b"user 1", []) == 4
    assert cached(b"user 2", [(5, 7, b"image 1")]) == 0
    assert cached(b"", [(5, 7, b"image 1")]) == 0
    worker.leave()


def test_large_blocks_by_one_write(daemon):
    """Messages beyond gRPC's default of 4 MiB, and reads in pieces of about 1 MiB."""
    worker = Worker(daemon)
    request = space_request(model=b"large", block_tokens=64)
    request.groups[0].layers = 4
    request.groups[0].head_size_k = request.groups[0].head_size_v = 256
    space = worker.call("OpenSpace", request)
    size = space.groups[0].shard_bytes[0]
    assert size == 1 << 20
    sequence = worker.open(space, list(range(192))).sequence_id
    data = [bytes([block + 1]) * size for block in range(3)]
    answer = worker.calls.WriteBlocks(iter([pb.WriteBlocksRequest(
        session_id=worker.id, sequence_id=sequence,
        pieces=[pb.BlockPiece(block=block, data=data[block]) for block in range(3)])]))
    assert answer.written_bytes == 3 * size and answer.pieces == 3
    worker.seal(sequence, 192)
    assert worker.read(0, 3, sequence_id=sequence) == data
    worker.leave()


def test_closing_gives_everything_back(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    for round_number in range(5):
        values = [round_number * 1000 + i for i in range(9)]
        worker.close(worker.prefill(space, values, round_number).sequence_id)
    other = Worker(daemon)
    other.open(other.open_space(), [1, 2, 3, 4, 5])
    other.leave()
    worker.call("Invalidate", pb.InvalidateRequest(space_id=space.space_id))
    occupancy = worker.call("GetOccupancy", pb.GetOccupancyRequest(), stub=worker.admin)
    for tier in occupancy.tiers:
        assert tier.used_bytes == 0 and tier.free_bytes == tier.limit_bytes
    assert not worker.call("ListSequences", pb.ListSequencesRequest(),
                           stub=worker.admin).sequences
    worker.leave()


def test_lists_by_page(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    made = sorted(worker.open(space, [i]).sequence_id for i in range(5))
    seen, after, more = [], 0, True
    while more:
        page = worker.call("ListSequences", pb.ListSequencesRequest(limit=2, after_id=after),
                           stub=worker.admin)
        assert len(page.sequences) <= 2
        seen += [row.sequence_id for row in page.sequences]
        after, more = seen[-1], page.more
    assert sorted(seen) == made and len(set(seen)) == 5
    worker.leave()


def test_why_tells_of_a_refusal(start):
    daemon = start("[tiers]\ndevice_bytes = 64 KiB\nhost_bytes = 0\nhuge_pages = no\n")
    worker = Worker(daemon)
    space = worker.open_space()
    with Refused(CODE.RESOURCE_EXHAUSTED, pb.CAUSE_TOO_LARGE):
        worker.open(space, list(range(4 * 100)))
    answer = worker.call("Why", pb.WhyRequest(), stub=worker.admin)
    assert answer.refusals[0].call == b"OpenSequence"
    assert answer.refusals[0].detail.cause == pb.CAUSE_TOO_LARGE
    assert answer.advice
    worker.leave()


def test_stats_are_named_and_move(daemon):
    worker = Worker(daemon)
    space = worker.open_space()

    def stats():
        rows = worker.call("GetStats", pb.GetStatsRequest(), stub=worker.admin).stats
        return {row.name.decode(): row.value for row in rows}

    before = stats()
    worker.lookup(space, [1, 2, 3, 4])
    after = stats()
    assert after["kvkeep_calls_total"] > before["kvkeep_calls_total"]
    assert len(after) > 20
    worker.leave()


def test_ranks_seal_apart(daemon):
    """A block is a hit only when every rank has sealed its shard."""
    first = Worker(daemon, rank=0)
    second = Worker(daemon, instance_token=first.welcome.instance_token, rank=1)
    space = first.open_space(model=b"sharded", tensor_shards=2)
    size = space.groups[0].shard_bytes
    assert len(size) == 2 and space.groups[0].rank_shard == [0, 1]
    values = list(range(8))
    sequence = first.open(space, values).sequence_id
    for worker, rank in ((first, 0), (second, 1)):
        worker.write(sequence, [(0, rank, block, 0, bytes([rank + 1]) * size[rank])
                                for block in range(2)])
        assert first.lookup(space, values).cached_tokens == 0
        worker.seal(sequence, 8, all_ranks=False)
    assert first.lookup(space, values).cached_tokens == 8
    for rank in (0, 1):
        assert first.read(0, 2, sequence_id=sequence, rank=rank) == [
            bytes([rank + 1]) * size[rank]] * 2
    second.leave()
    first.leave()


def test_tokens_helper_is_little_endian():
    assert tokens([1, 0x01020304]) == b"\1\0\0\0\4\3\2\1"


def test_cancelled_read_gives_its_pins_back(daemon):
    worker = Worker(daemon)
    request = space_request(model=b"large", block_tokens=64)
    request.groups[0].layers = 4
    request.groups[0].head_size_k = request.groups[0].head_size_v = 256
    space = worker.call("OpenSpace", request)
    values = list(range(192))
    sequence = worker.open(space, values).sequence_id
    worker.seal(sequence, 192)
    worker.close(sequence)
    lease = worker.pin(space, values)

    def block():
        return worker.call("GetBlock", pb.GetBlockRequest(
            space_id=space.space_id, prefix=prompt(values[:64])), stub=worker.admin)

    # A channel of its own, whose window is full before the blocks are through.
    channel = daemon.channel()
    stream = rpc.KvkeepStub(channel).ReadBlocks(pb.ReadBlocksRequest(
        session_id=worker.id, lease_id=lease.lease_id, block_count=3))
    next(stream)
    stream.cancel()
    wait_for(lambda: block().device_pins == 0)
    worker.call("Release", pb.ReleaseRequest(session_id=worker.id, lease_ids=[lease.lease_id]))
    wait_for(lambda: block().state == b"EVICTABLE")
    worker.leave()


def test_cancelled_write_leaves_the_sequence_usable(daemon):
    worker = Worker(daemon)
    space = worker.open_space()
    size = space.groups[0].shard_bytes[0]
    sequence = worker.open(space, list(range(8))).sequence_id
    hold = threading.Event()

    def messages():
        yield pb.WriteBlocksRequest(session_id=worker.id, sequence_id=sequence,
                                    pieces=[pb.BlockPiece(data=b"\1" * size)])
        hold.wait(10)

    future = worker.calls.WriteBlocks.future(messages())
    time.sleep(0.1)
    future.cancel()
    hold.set()
    worker.write_whole(space, sequence, "after", 0, 2)
    assert worker.seal(sequence, 8).sealed_tokens == 8
    assert worker.read(0, 1, sequence_id=sequence) == [block_bytes(repr(("after", 0)), size)]
    worker.leave()


def test_cancelled_open_leaves_nothing(start):
    """Nobody hears of a sequence whose client gave up while room was made for it."""
    daemon = start("[tiers]\ndevice_bytes = 64 KiB\nhost_bytes = 1 MiB\nhuge_pages = no\n",
                   ["--test-hooks"])
    worker = Worker(daemon)
    space = worker.open_space()
    for number in range(15):
        values = [number * 100 + i for i in range(16)]
        worker.close(worker.prefill(space, values, number).sequence_id)
    worker.call("TestControl", pb.TestControlRequest(set_copy_delay=True, copy_delay_us=20000),
                stub=worker.admin)
    with pytest.raises(grpc.RpcError) as late:
        worker.call("OpenSequence", pb.OpenSequenceRequest(
            session_id=worker.id, space_id=space.space_id, prompt=prompt(range(5000, 5160))),
            timeout=0.1)
    assert late.value.code() == CODE.DEADLINE_EXCEEDED
    worker.call("TestControl", pb.TestControlRequest(set_copy_delay=True), stub=worker.admin)
    time.sleep(0.5)
    wait_for(lambda: not worker.call("ListSequences", pb.ListSequencesRequest(),
                                     stub=worker.admin).sequences)
    occupancy = worker.call("GetOccupancy", pb.GetOccupancyRequest(), stub=worker.admin)
    counts = occupancy.rows[0].counts
    assert counts.reserved == 0 and counts.active == 0
    worker.leave()
