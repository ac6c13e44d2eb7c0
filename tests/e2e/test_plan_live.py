"""Planned against measured: the planner's formulas over gRPC, for shapes and for live spaces."""

import json
import os
import subprocess

import grpc
import pytest
from kvkeep.v1 import kvkeep_pb2 as pb

from conftest import binary
from worker import BLOCK_TOKENS, Refused, Worker, group

CONFIG = """
[tiers]
device_bytes = 256 KiB
host_bytes = 1 MiB
huge_pages = no
"""


def plan(worker, **request):
    return worker.call("Plan", pb.PlanRequest(**request), stub=worker.admin)


def llama(**changes):
    return group(layers=32, kv_heads=8, head_size_k=128, head_size_v=128,
                 format_k=pb.FORMAT_BF16, format_v=pb.FORMAT_BF16, **changes)


def test_the_formulas_of_the_planner(daemon):
    worker = Worker(daemon)
    answer = plan(worker, block_tokens=16, groups=[llama()], budget_bytes=5 << 30,
                  lengths=[100, 4096])
    assert answer.bytes_per_token == answer.bytes_per_token_per_rank == 131072
    assert answer.max_tokens == 40960 and answer.blocks == 2560
    assert [row.blocks for row in answer.sequences] == [7, 256]
    assert [row.unused_slots for row in answer.sequences] == [12, 0]
    assert answer.sequences[1].bytes_per_rank == 512 << 20
    assert answer.bytes_per_value == 2 and len(answer.measured) == 0
    ranks = plan(worker, block_tokens=16, groups=[llama()], tensor_shards=8, pipeline_shards=4,
                 budget_bytes=1 << 30, prompt_tokens=1000, output_tokens=24)
    assert ranks.bytes_per_token_per_rank == 131072 // 32
    assert ranks.sequences_at_once == (1 << 30) // (1024 * 131072 // 32)
    worker.leave()


@pytest.mark.parametrize("request_, field", [
    (dict(block_tokens=0, groups=[llama()]), "block_tokens"),
    (dict(block_tokens=16), "groups"),
    (dict(block_tokens=16, groups=[llama()] * 9), "groups"),
    (dict(block_tokens=16, groups=[llama()], space_id=5), "space_id"),
    (dict(block_tokens=16, groups=[llama()], prompt_tokens=1 << 50), "prompt_tokens"),
    (dict(block_tokens=16, groups=[llama()], prompt_tokens=1, shared_tokens=2), "shared_tokens"),
    (dict(block_tokens=16, groups=[llama()], lengths=[1] * 1025), "lengths"),
    (dict(block_tokens=16, groups=[llama()], lengths=[(1 << 64) - 1]), "lengths"),
    (dict(block_tokens=16, groups=[llama()], tensor_shards=3), "tensor_ranks"),
])
def test_absurd_requests(daemon, request_, field):
    worker = Worker(daemon)
    with Refused(grpc.StatusCode.INVALID_ARGUMENT, field=field):
        plan(worker, **request_)
    worker.leave()


def test_what_has_no_one_figure(daemon):
    worker = Worker(daemon)
    mixed = group(format_v=pb.FORMAT_FP16)
    opaque = group(layout=pb.LAYOUT_OPAQUE, opaque_bytes=4096)
    for one, field in ((mixed, "groups.format_v"), (opaque, "groups.layout")):
        with Refused(grpc.StatusCode.UNIMPLEMENTED, field=field):
            plan(worker, block_tokens=16, groups=[one])
    with Refused(grpc.StatusCode.NOT_FOUND, field="space_id"):
        plan(worker, space_id=77)
    worker.leave()


def test_measured_beside_planned(start):
    daemon = start(CONFIG)
    worker = Worker(daemon)
    space = worker.open_space()
    token_bytes = space.groups[0].block_bytes // BLOCK_TOKENS
    empty = plan(worker, space_id=space.space_id)
    assert empty.bytes_per_token == token_bytes
    assert [tier.tokens for tier in empty.measured] == [0, 0, 0]
    whole = worker.prefill(space, list(range(10 * BLOCK_TOKENS)), seed=1)
    worker.open(space, [7, 8, 9])  # an unfinished block
    answer = plan(worker, space_id=space.space_id)
    device = answer.measured[0]
    assert device.tier == pb.TIER_DEVICE and device.limit_bytes == 256 << 10
    assert (device.blocks, device.tokens) == (10, 10 * BLOCK_TOKENS)
    assert device.planned_bytes == 10 * BLOCK_TOKENS * token_bytes
    assert device.used_bytes == device.planned_bytes + BLOCK_TOKENS * token_bytes
    assert device.bytes_per_token == pytest.approx(1.1 * token_bytes)
    assert answer.budget_bytes == 256 << 10
    worker.close(whole.sequence_id)

    ctl = os.path.join(os.path.dirname(binary()), "kvkeepctl")
    done = subprocess.run([ctl, "--connect", daemon.target, "--json", "plan", "--space", "tiny"],
                          capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["bytes_per_token"] == token_bytes
    assert shown["measured"][0]["used_bytes"] == device.used_bytes
    text = subprocess.run([ctl, "--connect", daemon.target, "plan", "--space",
                           str(space.space_id), "--prompt", "30", "--output", "2"],
                          capture_output=True, text=True, timeout=20, check=True).stdout
    assert "1.100" in text and "run at once" in text
    worker.leave()


def test_another_tenants_space_is_not_there(start):
    daemon = start(CONFIG + """
[tenant a]
[tenant b]
[credential a]
token = token-of-tenant-aaaa
tenants = a
[credential b]
token = token-of-tenant-bbbb
tenants = b
""")
    a = Worker(daemon, token="token-of-tenant-aaaa")
    b = Worker(daemon, token="token-of-tenant-bbbb")
    space = a.open_space()
    assert plan(a, space_id=space.space_id).bytes_per_token > 0
    with Refused(grpc.StatusCode.NOT_FOUND, field="space_id"):
        plan(b, space_id=space.space_id)
    a.leave()
    b.leave()
