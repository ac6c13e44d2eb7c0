"""Attend against plain Python: formats, masks, places in mapped memory, both tiers."""

import array
import math
import mmap
import random
import struct

import grpc
import pytest

from worker import (BLOCK_TOKENS, HEAD_SIZE, KV_HEADS, LAYERS, Refused, Worker, block_bytes, pb)

CODE = grpc.StatusCode
QUERY_HEADS = 4


def stored(seed, position, layer, is_value, head):
    """The K or V vector of a token as prefill() wrote it."""
    block, within = divmod(position, BLOCK_TOKENS)
    size = LAYERS * 2 * KV_HEADS * BLOCK_TOKENS * HEAD_SIZE * 4
    data = block_bytes(repr((seed, block)), size)
    row = ((layer * 2 + is_value) * KV_HEADS + head) * BLOCK_TOKENS + within
    return struct.unpack_from(f"<{HEAD_SIZE}f", data, row * HEAD_SIZE * 4)


def reference(seed, token_count, queries, position, layer, scale, causal=True, window=0, sinks=0,
              soft_cap=0.0, alibi_slopes=None, sink_logits=None):
    outputs, lses = [], []
    per_kv = QUERY_HEADS // KV_HEADS
    for index in range(len(queries) // (QUERY_HEADS * HEAD_SIZE)):
        p = position + index
        for head in range(QUERY_HEADS):
            at = (index * QUERY_HEADS + head) * HEAD_SIZE
            q = queries[at:at + HEAD_SIZE]
            logits = []
            for j in range(token_count):
                if causal and j > p:
                    continue
                if window and j <= p - window and j >= sinks:
                    continue
                k = stored(seed, j, layer, 0, head // per_kv)
                logit = scale * sum(a * b for a, b in zip(q, k))
                if soft_cap:
                    logit = soft_cap * math.tanh(logit / soft_cap)
                if alibi_slopes:
                    logit -= alibi_slopes[head] * abs(p - j)
                logits.append((j, logit))
            sink = sink_logits[head] if sink_logits else -math.inf
            if not logits:
                outputs += [0.0] * HEAD_SIZE
                lses.append(sink)
                continue
            top = max(logit for _, logit in logits)
            total = sum(math.exp(logit - top) for _, logit in logits) + math.exp(sink - top)
            lses.append(top + math.log(total))
            result = [0.0] * HEAD_SIZE
            for j, logit in logits:
                weight = math.exp(logit - top) / total
                for d, v in enumerate(stored(seed, j, layer, 1, head // per_kv)):
                    result[d] += weight * v
            outputs += result
    return outputs, lses


def floats(data):
    values = array.array("f")
    values.frombytes(data)
    return list(values)


def close_to(found, expected, tolerance=1e-5):
    assert len(found) == len(expected)
    for a, b in zip(found, expected):
        if math.isinf(b):
            assert a == b
        else:
            assert abs(a - b) <= tolerance * max(1.0, abs(b)), (a, b)


def make_queries(seed, count):
    source = random.Random(seed)
    return array.array("f", (source.uniform(-1, 1)
                             for _ in range(count * QUERY_HEADS * HEAD_SIZE)))


def request(worker, items, **changes):
    values = dict(session_id=worker.id, layer=1, query_heads=QUERY_HEADS, format=pb.FORMAT_FP32,
                  scale=0.5, causal=True, items=items)
    values.update(changes)
    return pb.AttendRequest(**values)


def item(sequence_id, queries, position, **changes):
    count = len(queries) // (QUERY_HEADS * HEAD_SIZE)
    return pb.AttendItem(sequence_id=sequence_id, position=position, query_count=count,
                         queries=pb.Operand(data=queries.tobytes()), **changes)


@pytest.fixture
def worker(daemon):
    worker = Worker(daemon)
    yield worker
    worker.leave()


def test_against_plain_python(worker):
    space = worker.open_space()
    length = 14
    sequence = worker.prefill(space, list(range(length)), "kv").sequence_id
    masks = [dict(), dict(causal=False), dict(window=5), dict(window=3, sinks=2),
             dict(soft_cap=0.8), dict(causal=False, window=4),
             dict(alibi_slopes=[0.5, 0.25, 0.125, 0.0625]),
             dict(sink_logits=[0.5, -math.inf, 3.0, -2.0]),
             dict(alibi_slopes=[0.5, 0.25, 0.0, 0.0625], sink_logits=[1.0] * 4, soft_cap=0.8,
                  window=6, sinks=1)]
    for number, mask in enumerate(masks):
        position = (0, 11, 13, 9, 5, 12, 7, 11, 12)[number]
        queries = make_queries(number, 3)
        answer = worker.call("Attend", request(worker, [item(sequence, queries, position)],
                                               **mask))
        outputs, lses = reference("kv", length, queries, position, 1, 0.5,
                                  **{"causal": True, **mask})
        close_to(floats(answer.results[0].output), outputs)
        close_to(floats(answer.results[0].lse), lses)
        seen = answer.results[0]
        assert 0 < seen.device_tokens <= length and seen.host_tokens == 0


def test_swapped_out_and_by_lease(worker):
    space = worker.open_space()
    values = list(range(12))
    sequence = worker.prefill(space, values, "kv").sequence_id
    lease = worker.pin(space, values)
    queries = make_queries(1, 1)
    outputs, lses = reference("kv", 12, queries, 12, 0, 0.5)
    worker.call("SwapOut", pb.SwapOutRequest(session_id=worker.id, sequence_id=sequence))
    by_lease = item(0, queries, 12)
    by_lease.lease_id = lease.lease_id
    answer = worker.call("Attend", request(worker, [item(sequence, queries, 12), by_lease],
                                           layer=0))
    for result in answer.results:
        close_to(floats(result.output), outputs)
        close_to(floats(result.lse), lses)
    assert answer.results[0].host_tokens + answer.results[0].device_tokens == 12


def test_token_limit_and_nothing_visible(worker):
    space = worker.open_space()
    sequence = worker.prefill(space, list(range(12)), "kv").sequence_id
    queries = make_queries(2, 1)
    answer = worker.call("Attend", request(worker, [item(sequence, queries, 12, token_limit=5)]))
    outputs, lses = reference("kv", 5, queries, 12, 1, 0.5)
    close_to(floats(answer.results[0].output), outputs)
    close_to(floats(answer.results[0].lse), lses)
    empty = worker.open(space, []).sequence_id
    answer = worker.call("Attend", request(worker, [item(empty, queries, 0)]))
    assert floats(answer.results[0].output) == [0.0] * (QUERY_HEADS * HEAD_SIZE)
    assert all(value == -math.inf for value in floats(answer.results[0].lse))
    answer = worker.call("Attend", request(worker, [item(empty, queries, 0)],
                                           sink_logits=[0.5, 1, 2, -math.inf]))
    assert floats(answer.results[0].output) == [0.0] * (QUERY_HEADS * HEAD_SIZE)
    assert floats(answer.results[0].lse) == [0.5, 1, 2, -math.inf]


def test_operands_in_scratch_memory(worker):
    space = worker.open_space()
    sequence = worker.prefill(space, list(range(9)), "kv").sequence_id
    answer, fds = worker.map(kind=pb.MapMemoryRequest.KIND_SCRATCH, size_bytes=8192)
    memory = mmap.mmap(fds[0], 8192)
    queries = make_queries(3, 2)
    size = len(queries) * 4
    memory[64:64 + size] = queries.tobytes()

    def place(offset, size_bytes):
        return pb.MemoryPlace(map_id=answer.map_id, offset=offset, size_bytes=size_bytes)

    asked = pb.AttendItem(sequence_id=sequence, position=7, query_count=2,
                          queries=pb.Operand(place=place(64, size)),
                          output_place=place(4096, size), lse_place=place(2048, 8 * 4))
    result = worker.call("Attend", request(worker, [asked])).results[0]
    assert result.output == b"" and result.lse == b""
    outputs, lses = reference("kv", 9, queries, 7, 1, 0.5)
    close_to(floats(memory[4096:4096 + size]), outputs)
    close_to(floats(memory[2048:2048 + 32]), lses)

    asked.output_place.offset = 8192 - size + 4
    with Refused(CODE.OUT_OF_RANGE, pb.CAUSE_NOT_MAPPED, "items[0].output_place"):
        worker.call("Attend", request(worker, [asked]))
    asked.output_place.offset = 4098
    with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, "items[0].output_place"):
        worker.call("Attend", request(worker, [asked]))
    asked.output_place.offset = 2**64 - 4
    with Refused(CODE.OUT_OF_RANGE, pb.CAUSE_NOT_MAPPED, "items[0].output_place"):
        worker.call("Attend", request(worker, [asked]))


def test_bad_operands_are_named(worker):
    space = worker.open_space()
    sequence = worker.prefill(space, list(range(4)), "kv").sequence_id
    queries = make_queries(4, 1)
    good = item(sequence, queries, 3)
    for changes, field in ((dict(scale=math.nan), "scale"), (dict(scale=math.inf), "scale"),
                           (dict(scale=0.0), "scale"), (dict(scale=-1.0), "scale"),
                           (dict(soft_cap=math.nan), "soft_cap"),
                           (dict(soft_cap=-1.0), "soft_cap"),
                           (dict(alibi_slopes=[0.5]), "alibi_slopes"),
                           (dict(alibi_slopes=[0.5] * 5), "alibi_slopes"),
                           (dict(alibi_slopes=[0, 0, math.nan, 0]), "alibi_slopes[2]"),
                           (dict(sink_logits=[0.5] * 3), "sink_logits"),
                           (dict(sink_logits=[0, math.inf, 0, 0]), "sink_logits[1]"),
                           (dict(format=0), "format"), (dict(format=77), "format"),
                           (dict(format=4), "format"),
                           (dict(format=6), "format"),
                           (dict(query_heads=0), "query_heads"),
                           (dict(query_heads=2**32 - 1), "query_heads"),
                           (dict(sinks=1), "sinks"),
                           (dict(group_window=True, window=4), "window"),
                           (dict(items=[]), "items"), (dict(layer=2), "layer"),
                           (dict(group=1), "group"), (dict(rank=1), "rank")):
        with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, field):
            worker.call("Attend", request(worker, **{"items": [good], **changes}))

    for field, change in (("items[1].query_count", dict(query_count=0)),
                          ("items[1].query_count", dict(query_count=2**32 - 1)),
                          ("items[1].position", dict(position=2**64 - 1)),
                          ("items[1].queries", dict(queries=pb.Operand())),
                          ("items[1].queries", dict(queries=pb.Operand(data=b"123"))),
                          ("items[1].sequence_id", dict(sequence_id=0))):
        bad = pb.AttendItem()
        bad.CopyFrom(good)
        for name, value in change.items():
            if isinstance(value, int):
                setattr(bad, name, value)
            else:
                getattr(bad, name).CopyFrom(value)
        with Refused(CODE.INVALID_ARGUMENT, pb.CAUSE_FIELD, field):
            worker.call("Attend", request(worker, [good, bad]))
