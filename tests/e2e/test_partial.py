"""Hits that end within a block: what the wire says, and the bytes that a stock worker reads."""

import grpc
import pytest

from worker import (BLOCK_TOKENS, HEAD_SIZE, Refused, Worker, block_bytes, group, pb, prompt,
                    space_request, token_ranges)

CODE = grpc.StatusCode


def open_space(worker, reuse=pb.PARTIAL_REUSE_ON, **changes):
    request = space_request(partial_reuse=reuse, **changes)
    request.prefill_cost.flops_per_second = 0  # nobody knows: always worth it
    return worker.call("OpenSpace", request)


def rows(data, first, end):
    """The bytes of tokens [first, end) of a block."""
    token = HEAD_SIZE * 4
    return [data[offset + first * token:offset + end * token]
            for offset, _ in token_ranges(BLOCK_TOKENS)]


def test_a_branch_within_a_block(daemon):
    worker = Worker(daemon)
    space = open_space(worker)
    assert space.created and space.partial_reuse
    first = list(range(100, 112))
    worker.close(worker.prefill(space, first, "a").sequence_id)
    second = first[:7] + [7, 8, 9, 10, 11]
    found = worker.lookup(space, second)
    assert (found.cached_tokens, found.partial_tokens) == (7, 3)
    assert found.device_tokens + found.host_tokens + found.disk_tokens == 7
    sequence = worker.open(space, second)
    assert (sequence.cached_tokens, sequence.partial_tokens, sequence.grant_first) == (7, 3, 7)
    assert worker.get(sequence.sequence_id).partial_tokens == 3
    size = space.groups[0].shard_bytes[0]
    blocks = worker.read(0, 2, sequence_id=sequence.sequence_id)
    assert blocks[0] == block_bytes(repr(("a", 0)), size)
    source = block_bytes(repr(("a", 1)), size)
    assert rows(blocks[1], 0, 3) == rows(source, 0, 3)
    # The last token of the block is this worker's to write; those before it are sealed.
    token = HEAD_SIZE * 4
    with Refused(CODE.FAILED_PRECONDITION, field="offset"):
        worker.write(sequence.sequence_id, [(0, 0, 1, 2 * token, bytes(token))])
    own = block_bytes("own", size)
    worker.write(sequence.sequence_id, [
        (0, 0, 1, offset + 3 * token, own[offset + 3 * token:offset + 4 * token])
        for offset, _ in token_ranges(BLOCK_TOKENS)])
    worker.write_whole(space, sequence.sequence_id, "b", 2, 3)
    worker.seal(sequence.sequence_id, 12)
    worker.close(sequence.sequence_id)
    # Both are whole hits now, each with its own bytes.
    for values, last in ((first, source), (second, own)):
        lease = worker.pin(space, values)
        assert lease.cached_tokens == 12
        data = worker.read(1, 1, lease_id=lease.lease_id)[0]
        assert rows(data, 0, 3) == rows(source, 0, 3)
        assert rows(data, 3, 4) == rows(last, 3, 4)
    worker.leave()


def test_on_and_off(daemon):
    worker = Worker(daemon)
    space = open_space(worker, pb.PARTIAL_REUSE_AS_IT_IS)
    assert not space.partial_reuse
    values = list(range(8))
    worker.close(worker.prefill(space, values, "a").sequence_id)
    assert worker.lookup(space, values, leave_last=True).cached_tokens == 4
    assert open_space(worker).partial_reuse
    assert worker.lookup(space, values, leave_last=True).cached_tokens == 7
    assert open_space(worker, pb.PARTIAL_REUSE_AS_IT_IS).partial_reuse
    whole = prompt(values)
    whole.whole_blocks = True
    assert worker.call("Lookup", pb.LookupRequest(
        space_id=space.space_id, prompt=whole, leave_last=True)).cached_tokens == 4
    assert worker.call("OpenSequence", pb.OpenSequenceRequest(
        session_id=worker.id, space_id=space.space_id, prompt=whole,
        leave_last=True)).cached_tokens == 4
    assert not open_space(worker, pb.PARTIAL_REUSE_OFF).partial_reuse
    assert worker.lookup(space, values, leave_last=True).cached_tokens == 4
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "partial_reuse"):
        open_space(worker, 3)
    worker.leave()


@pytest.mark.parametrize("changes, word", [
    (dict(format_k=pb.FORMAT_FP8_E4M3, format_v=pb.FORMAT_FP8_E4M3), "share scales"),
    (dict(format_k=pb.FORMAT_INT8_CHANNEL, format_v=pb.FORMAT_INT8_CHANNEL), "share scales"),
    (dict(attention=pb.ATTENTION_CROSS), "cross-attention"),
])
def test_what_cannot_be_cut_is_refused(daemon, changes, word):
    worker = Worker(daemon)
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "partial_reuse") as refused:
        open_space(worker, groups=[group(), group(**changes)])
    assert "groups[1]" in refused.detail.message.decode()
    assert word in refused.detail.message.decode()
    worker.leave()


def test_ranks_are_told_the_same(daemon):
    first = Worker(daemon)
    second = Worker(daemon, instance_token=first.welcome.instance_token, rank=1)
    space = open_space(first, tensor_shards=2)
    values = list(range(8))
    sequence = first.open(space, values)
    for rank in (0, 1):
        size = space.groups[0].shard_bytes[rank]
        first.write(sequence.sequence_id, [
            (0, rank, block, 0, block_bytes(repr((rank, block)), size)) for block in (0, 1)])
    first.seal(sequence.sequence_id, 8)
    first.close(sequence.sequence_id)
    sequence = first.open(space, values, leave_last=True)
    assert (sequence.cached_tokens, sequence.partial_tokens) == (7, 3)
    seen = second.get(sequence.sequence_id)
    assert (seen.cached_tokens, seen.partial_tokens, seen.grant_first) == (7, 3, 7)
    token = HEAD_SIZE * 4
    for rank in (0, 1):
        size = space.groups[0].shard_bytes[rank]
        data = second.read(1, 1, sequence_id=sequence.sequence_id, rank=rank)[0]
        source = block_bytes(repr((rank, 1)), size)
        assert data[:3 * token] == source[:3 * token]
    second.leave()
    first.leave()


def test_why_and_usage(daemon):
    worker = Worker(daemon)
    space = open_space(worker)
    values = list(range(8))
    worker.close(worker.prefill(space, values, "a").sequence_id)
    values[6] = 99
    worker.close(worker.open(space, values).sequence_id)
    answer = worker.call("ExplainMiss", pb.ExplainMissRequest(
        space_id=space.space_id, prompt=prompt(values)), stub=worker.admin)
    assert (answer.cached_tokens, answer.partial_tokens) == (6, 2)
    assert b"The last 2 of the cached tokens" in answer.sentence
    stats = {value.name.decode(): value.value for value in
             worker.call("GetStats", pb.GetStatsRequest(), stub=worker.admin).stats}
    assert stats["kvkeep_partial_hits_total"] == 1
    assert stats["kvkeep_partial_hit_tokens_total"] == 2
    assert stats["kvkeep_partial_given_up_total"] == 0
    usage = worker.call("GetUsage", pb.GetUsageRequest(), stub=worker.admin).rows[0]
    assert usage.partial_hit_tokens == 2
    spaces = worker.call("ListSpaces", pb.ListSpacesRequest(), stub=worker.admin).spaces
    assert spaces[0].partial_reuse
    worker.leave()
