"""The operator's answers, from the real daemon: why a prompt missed, the doctor, the miss-ratio
curve, and what a refusal advises; by stock grpcio and through kvkeepctl."""

import json
import os
import pathlib
import random
import struct
import subprocess
import xml.dom.minidom

import grpc
import pytest

from conftest import binary
from worker import Refused, Worker, pb, prompt

BLOCK_BYTES = 1024  # 2 layers x K and V x 2 heads x 4 tokens x 8 values, fp32

HOST_ONLY = """
[tiers]
device_bytes = 0
host_bytes = 64 KiB
huge_pages = no
"""

TWO_TENANTS = HOST_ONLY + """
[tenant a]
[tenant b]
[credential a]
token = token-of-tenant-aaaa
tenants = a
[credential b]
token = token-of-tenant-bbbb
tenants = b
[credential boss]
token = token-of-the-admin-00
admin = yes
"""


def ctl(daemon, *arguments, token=None, code=0, stdin=None):
    path = pathlib.Path(binary()).with_name("kvkeepctl")
    common = ["--connect", daemon.target] + (["--token", token] if token else [])
    done = subprocess.run([path, *common, *map(str, arguments)], capture_output=True,
                          input=stdin, timeout=30, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout.decode()


def ctl_json(daemon, *arguments, **options):
    return json.loads(ctl(daemon, "--json", *arguments, **options))


def keep(worker, space, values):
    """Open, write, seal and close."""
    sequence = worker.prefill(space, values, 1)
    worker.close(sequence.sequence_id)
    return sequence


def tokens_from(first, count):
    return list(range(first, first + count))


def explain(worker, space, values, salt=b"", **changes):
    return worker.call("ExplainMiss", pb.ExplainMissRequest(
        space_id=space.space_id, prompt=prompt(values, salt), **changes), stub=worker.admin)


# ---- why a prompt missed


def test_why_a_prompt_missed(start):
    daemon = start(HOST_ONLY)
    worker = Worker(daemon)
    space = worker.open_space()
    keep(worker, space, tokens_from(1, 32))
    answer = explain(worker, space, tokens_from(1, 32))
    assert answer.verdict == b"nothing_missing" and answer.cached_tokens == 32
    answer = explain(worker, space, tokens_from(1, 40))
    assert answer.verdict == b"never_sealed" and answer.missing_block == 8
    assert explain(worker, space, tokens_from(1, 3)).verdict == b"shorter_than_a_block"
    assert explain(worker, space, tokens_from(1, 8), b"salt").verdict == b"other_salt"
    for i in range(1, 5):
        keep(worker, space, tokens_from(1000 * i, 64))
    answer = explain(worker, space, tokens_from(1, 32))
    assert answer.verdict == b"gone" and answer.reason == b"evicted"
    assert answer.missing_block == 0 and answer.missing_gone == 8
    assert answer.gone_tier == pb.TIER_HOST and answer.gone_uses == 1
    assert answer.gone_for_tenant == b"default" and not answer.gone_for_other
    assert answer.gone_for_space_id == space.space_id
    worker.call("Invalidate", pb.InvalidateRequest(space_id=space.space_id))
    answer = explain(worker, space, tokens_from(4000, 64))
    assert answer.verdict == b"gone" and answer.reason == b"invalidated" and answer.gone_before
    sequence = worker.open(space, tokens_from(7, 16))
    answer = explain(worker, space, tokens_from(7, 16))
    assert answer.verdict == b"being_written"
    assert answer.writing_sequence_id == sequence.sequence_id
    worker.close(sequence.sequence_id)
    assert explain(worker, space, tokens_from(7, 16)).reason == b"aborted"
    with Refused(grpc.StatusCode.NOT_FOUND, field="space_id"):
        worker.call("ExplainMiss", pb.ExplainMissRequest(space_id=12345, prompt=prompt([1])),
                    stub=worker.admin)
    with Refused(grpc.StatusCode.INVALID_ARGUMENT, field="space_id"):
        worker.call("ExplainMiss", pb.ExplainMissRequest(prompt=prompt([1])), stub=worker.admin)


def test_a_neighbour_is_only_another_tenant(start):
    daemon = start(TWO_TENANTS)
    a = Worker(daemon, token="token-of-tenant-aaaa")
    b = Worker(daemon, token="token-of-tenant-bbbb")
    space_a = a.open_space()
    space_b = b.open_space()
    keep(a, space_a, tokens_from(1, 64 * 4))
    for i in range(1, 9):
        keep(b, space_b, tokens_from(1000 * i, 32))
    answer = explain(a, space_a, tokens_from(1, 256))
    assert answer.verdict == b"gone" and answer.reason == b"evicted"
    assert answer.gone_for_other and answer.gone_for_tenant == b""
    assert answer.gone_for_space_id == 0
    assert b"another tenant" in answer.sentence
    with Refused(grpc.StatusCode.NOT_FOUND, field="space_id"):
        explain(b, space_a, tokens_from(1, 256))
    with Refused(grpc.StatusCode.PERMISSION_DENIED):
        a.call("Doctor", pb.DoctorRequest(), stub=a.admin)
    with Refused(grpc.StatusCode.PERMISSION_DENIED):
        a.call("GetMissRatio", pb.GetMissRatioRequest(tenant=b"b"), stub=a.admin)
    curves = a.call("GetMissRatio", pb.GetMissRatioRequest(), stub=a.admin).curves
    assert [curve.tenant for curve in curves] == [b"a"]
    told = ctl_json(daemon, "why", "--space", space_a.space_id, "--tokens",
                    ",".join(map(str, tokens_from(1, 256))), token="token-of-the-admin-00")
    assert told["gone"]["for_tenant"] == "b" and told["gone"]["for_other_tenant"]
    assert told["gone"]["for_space_id"] == str(space_b.space_id)
    assert len(ctl_json(daemon, "mrc", token="token-of-the-admin-00")) == 2


def test_ctl_why_takes_a_prompt_from_anywhere(start, folder):
    daemon = start(HOST_ONLY)
    worker = Worker(daemon)
    space = worker.open_space(model=b"org/model")
    values = tokens_from(70000, 24)
    keep(worker, space, values)
    longer = values + [5, 6, 7, 8]
    files = {
        "json": json.dumps(longer).encode(),
        "text": "\n".join(map(str, longer)).encode(),
        "words": struct.pack(f"<{len(longer)}I", *longer),
    }
    for name, content in files.items():
        path = os.path.join(folder, name)
        pathlib.Path(path).write_bytes(content)
        told = ctl_json(daemon, "why", "--space", "org/model", "--prompt-file", path)
        assert (told["verdict"], told["missing_block"]) == ("never_sealed", 6), name
    told = ctl_json(daemon, "why", "--space", space.space_id, "--prompt-file", "-",
                    stdin=files["text"])
    assert told["cached_tokens"] == 24
    text = ctl(daemon, "why", "--space", "org/model", "--tokens", ",".join(map(str, longer)))
    assert "24 tokens are cached. Block 6 of the chain (tokens 24 to 27)" in text
    assert "70000" not in text, "a prompt is not shown again"
    ctl(daemon, "why", "--space", "nobody's", "--tokens", "1,2", code=1)
    ctl(daemon, "why", "--space", "org/model", "--tokens", "1,zwei", code=2)
    ctl(daemon, "why", "--tokens", "1,2", code=2)
    ctl(daemon, "why", "--space", "org/model", "--prompt-file", "/no/such/file", code=1)


# ---- refusals and their advice


def test_a_refusal_says_what_to_swap_out(start):
    daemon = start("[tiers]\ndevice_bytes = 16 KiB\nhost_bytes = 64 KiB\nhuge_pages = no\n")
    worker = Worker(daemon)
    space = worker.open_space()
    large = worker.prefill(space, tokens_from(1, 32), 1).sequence_id
    small = worker.prefill(space, tokens_from(1000, 16), 2).sequence_id
    with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, pb.CAUSE_POOL_ACTIVE) as refused:
        worker.open(space, tokens_from(5000, 32))
    advice = refused.detail.advice
    assert advice.kind == pb.Advice.KIND_SWAP_OUT
    assert list(advice.sequence_ids) == [small] and advice.total == 1
    assert advice.missing_bytes == 4 * BLOCK_BYTES == advice.bytes
    assert 10 <= refused.detail.retry_after_ms <= 60000
    told = ctl_json(daemon, "why")
    assert told["refusals"][0]["advice"]["sequence_ids"] == [str(small)]
    assert told["refusals"][0]["advice"]["do"] == "swap_out"
    assert told["metadata_bytes"] > 0
    text = ctl(daemon, "why")
    assert "swapping out 1 of its own sequences makes 4.0 KiB free" in text and str(small) in text
    worker.call("SwapOut", pb.SwapOutRequest(session_id=worker.id, sequence_id=small))
    third = worker.open(space, tokens_from(5000, 32))
    worker.close(third.sequence_id, large)
    worker.call("SwapIn", pb.SwapInRequest(session_id=worker.id, sequence_id=small))


# ---- the doctor


def codes(told):
    return [finding["code"] for finding in told["findings"]]


def test_doctor(start):
    daemon = start(HOST_ONLY)
    told = ctl_json(daemon, "doctor")
    assert told["findings"] == [] and told["checks"] >= 20
    assert "there is nothing to say" in ctl(daemon, "doctor")
    worker = Worker(daemon)
    space = worker.open_space()
    held = worker.prefill(space, tokens_from(1, 250), 1).sequence_id
    for _ in range(10):
        with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED):
            worker.open(space, tokens_from(5000, 32))
    told = ctl_json(daemon, "doctor")
    assert {"evictable_tiny", "refusals"} <= set(codes(told))
    text = ctl(daemon, "doctor")
    assert "warning: Hardly anything can be evicted" in text and "pool_active" in text
    worker.close(held)
    assert "evictable_tiny" not in codes(ctl_json(daemon, "doctor"))


def test_doctor_sees_a_wrong_reuse(start):
    daemon = start(HOST_ONLY)
    worker = Worker(daemon)
    space = worker.open_space(identity=pb.Identity(model=b"org/model", revision=b"1"))
    first = worker.open(space, tokens_from(1, 8))
    second = worker.open(space, tokens_from(1, 8))
    for seed, sequence in enumerate((first, second)):
        worker.write_whole(space, sequence.sequence_id, seed, 0, 2)
        worker.seal(sequence.sequence_id, 8)
    told = ctl_json(daemon, "doctor", code=1)
    assert codes(told)[0] == "wrong_reuse"
    finding = told["findings"][0]
    assert finding["severity"] == "fault" and "org/model" in finding["evidence"]
    assert "adapter_version" in finding["action"] and "revision" not in finding["action"]


# ---- the miss-ratio curve


def exact_hits(requests, blocks):
    """LRU over whole blocks, as the cache uses them: what is known deepest first, then what is
    new."""
    stack, hits, asked = {}, 0, 0
    clock = 0
    for request in requests:
        known = 0
        while known < len(request) and request[known] in stack:
            known += 1
        for name in request[:known][::-1] + request[known:][::-1]:
            asked += 1
            clock += 1
            hits += name in stack
            stack.pop(name, None)
            stack[name] = clock
            if len(stack) > blocks:
                del stack[next(iter(stack))]
    return hits / asked


def test_miss_ratio_curve(start, folder):
    daemon = start(HOST_ONLY + "[cache]\npolicy = lru\n")
    worker = Worker(daemon)
    space = worker.open_space()
    source = random.Random(4)
    requests = []
    for _ in range(600):
        name = int(300 * source.random() ** 2)
        length = 4 + name % 5
        requests.append([(name, i) for i in range(length)])
        values = [1000 * name + i for i in range(4 * length)]
        sequence = worker.open(space, values)
        worker.seal(sequence.sequence_id, len(values))
        worker.close(sequence.sequence_id)
    curve, = worker.call("GetMissRatio", pb.GetMissRatioRequest(), stub=worker.admin).curves
    assert curve.tenant == b"default" and curve.pool_bytes == 64 * BLOCK_BYTES
    assert curve.references == sum(map(len, requests))
    assert 0 < curve.rate <= 0.125 and curve.samples > 50
    exact = exact_hits(requests, 64)
    assert abs(curve.hits - exact) < 0.01
    # A few hundred followed blocks: as near as the error that it states allows.
    for point, blocks in ((curve.now, curve.now_bytes // BLOCK_BYTES),
                          (curve.twice, 2 * curve.now_bytes // BLOCK_BYTES),
                          (curve.four_times, 4 * curve.now_bytes // BLOCK_BYTES),
                          (curve.ceiling, 10 ** 9)):
        assert abs(point.hits - exact_hits(requests, blocks)) < 4 * point.error + 0.05
    hits = [point.hits for point in curve.points]
    assert len(hits) == 32 and 0 <= min(hits) and max(hits) <= 1
    told, = ctl_json(daemon, "mrc", "--html", os.path.join(folder, "curve.html"))
    assert told["policy"] == "lru" and told["references"] == curve.references
    page = pathlib.Path(folder, "curve.html").read_text()
    drawing = page[page.index("<svg"):page.index("</svg>") + 6]
    xml.dom.minidom.parseString(drawing)
    text = ctl(daemon, "mrc")
    assert "The curve is LRU's" in text and "ceiling" in text and "1 in" in text


def test_no_curve_where_none_is_wanted(start):
    daemon = start(HOST_ONLY + "[limits]\nmrc_samples = 0\n")
    worker = Worker(daemon)
    worker.open_space()
    assert not worker.call("GetMissRatio", pb.GetMissRatioRequest(), stub=worker.admin).curves
    assert "No tenant is followed" in ctl(daemon, "mrc")


@pytest.mark.parametrize("field", ["mrc_samples = 63", "journal_entries = -1"])
def test_limits_are_named(folder, field):
    path = pathlib.Path(folder, "bad.ini")
    path.write_text(HOST_ONLY + f"[limits]\n{field}\n")
    done = subprocess.run([binary(), "--config", path, "--socket", f"{folder}/s.sock"],
                          capture_output=True, timeout=10, check=False)
    assert done.returncode != 0
    assert field.split()[0].encode() in done.stderr
