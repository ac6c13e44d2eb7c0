"""Quotas, rates and usage of tenants, against the real daemon."""

import json
import os
import pathlib
import subprocess
import time

import grpc
import pytest

from conftest import binary, needs_descriptors
from kvkeep.v1 import kvkeep_pb2 as pb
from worker import Refused, Worker, prompt

BLOCK = 1024  # bytes of the tests' small geometry, 4 tokens

CONFIG = """
[tiers]
device_bytes = 0
host_bytes = 4 MiB
huge_pages = no
{durable}
[tenant small]
host_limit_bytes = 10240 B
[tenant strict]
host_limit_bytes = 10240 B
over_quota = refuse
[tenant neighbour]
host_guaranteed_bytes = 20480 B
[tenant slow]
requests_per_second = 20
request_burst = 5
sequences = 2
leases = 1
[tenant brief]
idle_ms = 1 s

[credential small]
token = small-small-small-small
tenants = small
[credential strict]
token = strict-strict-strict
tenants = strict
[credential neighbour]
token = neighbour-neighbour
tenants = neighbour
[credential slow]
token = slow-slow-slow-slow
tenants = slow
[credential brief]
token = brief-brief-brief
tenants = brief
[credential engine]
token = engine-engine-engine
tenants = slow, neighbour
[credential operator]
uids = {uid}
admin = yes
"""


def config(durable=""):
    return CONFIG.format(uid=os.geteuid(), durable=durable)


TOKENS = {"small": "small-small-small-small", "strict": "strict-strict-strict",
          "neighbour": "neighbour-neighbour", "slow": "slow-slow-slow-slow",
          "brief": "brief-brief-brief", "engine": "engine-engine-engine"}


def worker_of(daemon, name, **changes):
    return Worker(daemon, token=TOKENS[name], **changes)


def values_of(name, blocks=1):
    return [name * 1000 + i for i in range(4 * blocks)]


def store(worker, space, name, blocks=1):
    sequence = worker.open(space, values_of(name, blocks))
    worker.seal(sequence.sequence_id, 4 * blocks)
    worker.close(sequence.sequence_id)


def usage(daemon, tenant):
    worker = pb.GetUsageRequest(tenant=tenant.encode())
    from kvkeep.v1 import kvkeep_pb2_grpc as rpc
    rows = rpc.AdminStub(daemon.channel()).GetUsage(worker, timeout=10).rows
    assert len(rows) == 1
    return rows[0]


def host(row):
    return next(tier for tier in row.tiers if tier.tier == pb.TIER_HOST)


def cached(worker, space, names):
    return sum(worker.lookup(space, values_of(name)).cached_tokens == 4 for name in names)


def test_j1_quota_of_ten_blocks(start):
    """J1: accepted - evicted = resident <= 10; refusals explicit; the neighbour keeps its 20."""
    daemon = start(config())
    neighbour = worker_of(daemon, "neighbour")
    theirs = neighbour.open_space()
    for name in range(20):
        store(neighbour, theirs, name)

    small = worker_of(daemon, "small")
    space = small.open_space()
    for name in range(256):
        store(small, space, name)
    row = usage(daemon, "small")
    resident = cached(small, space, range(256))
    assert row.sealed_blocks == 256
    assert row.sealed_blocks - host(row).evictions == resident == 10
    assert row.limit_evictions == 246
    assert host(row).used_bytes == 10 * BLOCK == host(row).limit_bytes

    strict = worker_of(daemon, "strict")
    own = strict.open_space()
    accepted = 0
    for name in range(256):
        try:
            store(strict, own, name)
            accepted += 1
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, pb.CAUSE_TENANT_LIMIT,
                 "host_limit_bytes") as refused:
        store(strict, own, 300)
    assert refused.detail.limit == 10 * BLOCK
    row = usage(daemon, "strict")
    assert accepted == 10 == cached(strict, own, range(256))
    assert row.limit_refusals == row.refusals == 247
    assert row.limit_evictions == 0

    assert cached(neighbour, theirs, range(20)) == 20
    assert host(usage(daemon, "neighbour")).evictions == 0


def test_a_flood_leaves_what_is_guaranteed(start):
    daemon = start(config().replace("host_bytes = 4 MiB", "host_bytes = 64 KiB"))
    neighbour = worker_of(daemon, "neighbour")
    theirs = neighbour.open_space()
    for name in range(20):
        store(neighbour, theirs, name)
    flood = worker_of(daemon, "brief")
    space = flood.open_space()
    for name in range(300):
        store(flood, space, name)
    assert cached(neighbour, theirs, range(20)) == 20
    with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, pb.CAUSE_GUARANTEED,
                 "host_guaranteed_bytes"):
        flood.open(space, list(range(7, 7 + 4 * 50)))


def test_rate_of_requests(start):
    daemon = start(config())
    slow = worker_of(daemon, "slow")
    space = None
    passed = refused = 0
    begin = time.monotonic()
    for _ in range(400):
        try:
            if space is None:
                space = slow.open_space()
            slow.lookup(space, values_of(1))
            passed += 1
        except grpc.RpcError as error:
            refused += 1
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            last = error
    seconds = time.monotonic() - begin
    assert passed <= 5 + 20 * seconds + 1
    assert refused > 0
    with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, pb.CAUSE_TENANT_LIMIT,
                 "requests_per_second") as detail:
        raise last
    assert detail.detail.limit == 20 and 0 < detail.detail.retry_after_ms <= 50
    row = usage(daemon, "slow")
    assert row.rate_refusals == refused and row.requests == passed + 1
    # Giving back is always let in, and an engine is charged to the tenant that it acts for.
    with pytest.raises(grpc.RpcError) as error:
        slow.close(12345)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    engine = worker_of(daemon, "engine", tenant=b"neighbour")
    for _ in range(50):
        engine.call("GetServerInfo", pb.GetServerInfoRequest())


def test_an_engine_is_charged_to_the_tenant_it_acts_for(start):
    daemon = start(config())
    free = worker_of(daemon, "engine", tenant=b"neighbour")
    theirs = free.open_space(tenant=b"neighbour")
    for name in range(60):
        free.lookup(theirs, values_of(name))
    bound = worker_of(daemon, "engine", tenant=b"slow")
    time.sleep(0.3)
    own = bound.open_space(tenant=b"slow")
    with pytest.raises(grpc.RpcError) as error:
        for name in range(60):
            bound.lookup(own, values_of(name))
    assert error.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    free.lookup(theirs, values_of(1))
    assert usage(daemon, "neighbour").rate_refusals == 0
    assert usage(daemon, "neighbour").lookups == 61
    assert usage(daemon, "slow").rate_refusals > 0


def test_limits_of_sequences_and_leases(start):
    daemon = start(config())
    slow = worker_of(daemon, "slow")

    def patiently(call):
        while True:
            try:
                return call()
            except grpc.RpcError as error:
                if "rate of requests" not in error.details():
                    raise
                time.sleep(0.05)

    space = patiently(slow.open_space)
    opened = [patiently(lambda name=name: slow.open(space, values_of(name))) for name in range(2)]
    with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, pb.CAUSE_TENANT_LIMIT, "sequences"):
        patiently(lambda: slow.open(space, values_of(7)))
    patiently(lambda: slow.seal(opened[0].sequence_id, 4))
    patiently(lambda: slow.pin(space, values_of(0)))
    with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, pb.CAUSE_TENANT_LIMIT, "leases"):
        patiently(lambda: slow.pin(space, values_of(0)))


def test_idle_blocks_go(start):
    daemon = start(config())
    brief = worker_of(daemon, "brief")
    space = brief.open_space()
    for name in range(30):
        store(brief, space, name)
    assert host(usage(daemon, "brief")).used_bytes == 30 * BLOCK
    deadline = time.monotonic() + 60
    while host(usage(daemon, "brief")).used_bytes > 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert usage(daemon, "brief").idle_blocks == 30


def test_hints_keep_and_are_checked(start):
    daemon = start(config().replace("[tenant small]", "[cache]\npolicy = lru\n[tenant small]"))
    small = worker_of(daemon, "small")
    space = small.open_space()

    def touch(name, **hint):
        return small.call("Touch", pb.TouchRequest(
            space_id=space.space_id, prompt=prompt(values_of(name)),
            hints=[pb.PriorityHint(**{"token_count": 4, "priority": 100, "duration_ms": 60000,
                                      **hint})])).touched_tokens

    # A quarter of ten blocks may be kept by hints.
    for name in range(2):
        sequence = small.call("OpenSequence", pb.OpenSequenceRequest(
            session_id=small.id, space_id=space.space_id, prompt=prompt(values_of(name)),
            hints=[pb.PriorityHint(token_count=4, priority=90, duration_ms=60000)]))
        small.seal(sequence.sequence_id, 4)
        small.close(sequence.sequence_id)
    for name in range(100, 150):
        store(small, space, name)
    assert cached(small, space, range(2)) == 2
    assert touch(1, priority=50) == 4
    for name in range(150, 200):
        store(small, space, name)
    assert cached(small, space, range(2)) == 1
    for field, wrong in (("token_count", {"token_count": 0}), ("token_count", {"token_count": 5}),
                         ("token_count", {"first_token": 1}),
                         ("token_count", {"first_token": 2 ** 64 - 1}),
                         ("priority", {"priority": 101}), ("duration_ms", {"duration_ms": 0}),
                         ("duration_ms", {"duration_ms": 2 ** 63})):
        with Refused(grpc.StatusCode.INVALID_ARGUMENT, pb.CAUSE_FIELD, f"hints[0].{field}"):
            touch(0, **wrong)


def ctl(daemon, *arguments):
    path = pathlib.Path(binary()).with_name("kvkeepctl")
    return subprocess.run([path, "--connect", daemon.target, *arguments], check=True,
                          capture_output=True, text=True).stdout


def test_usage_is_shown_and_counted(start):
    daemon = start(config())
    small = worker_of(daemon, "small")
    space = small.open_space()
    store(small, space, 1, 3)
    store(small, space, 1, 3)
    rows = json.loads(ctl(daemon, "usage", "--tenant", "small", "--json"))
    assert len(rows) == 1 and rows[0]["tenant"] == "small"
    assert rows[0]["lookup_tokens"] == 24 and rows[0]["saved_tokens"] == 12
    assert rows[0]["sealed_blocks"] == 3
    text = ctl(daemon, "usage")
    assert "small" in text and "neighbour" in text and "GiB hours" in text
    stats = {row.name.decode(): row.value for row in small.admin.GetStats(
        pb.GetStatsRequest(), timeout=10).stats}
    assert stats['kvkeep_tenant_saved_tokens_total{tenant="small"}'] == 12
    assert stats['kvkeep_tenant_limit_bytes{tenant="small",tier="host"}'] == 10240
    # A tenant sees its own, and nothing of others.
    own = small.call("GetUsage", pb.GetUsageRequest(), stub=small.admin).rows
    assert [row.tenant for row in own] == [b"small"]
    with Refused(grpc.StatusCode.PERMISSION_DENIED):
        small.call("GetUsage", pb.GetUsageRequest(tenant=b"neighbour"), stub=small.admin)


def test_byte_seconds_grow_with_time_alone(start):
    daemon = start(config())
    neighbour = worker_of(daemon, "neighbour")
    space = neighbour.open_space()
    store(neighbour, space, 1, 200)
    asked = time.monotonic()
    first = host(usage(daemon, "neighbour")).byte_seconds
    answered = time.monotonic()
    time.sleep(2)
    asked_again = time.monotonic()
    more = host(usage(daemon, "neighbour")).byte_seconds - first
    least, most = asked_again - answered, time.monotonic() - asked
    assert 0.9 * 200 * BLOCK * least < more < 1.1 * 200 * BLOCK * most


def test_usage_outlives_the_daemon(folder):
    from conftest import Daemon
    durable = f"[durable]\nfolder = {folder}/durable\nkeeper = no\n"
    daemon = Daemon(folder, config(durable))
    try:
        neighbour = worker_of(daemon, "neighbour")
        space = neighbour.open_space()
        store(neighbour, space, 1, 3)
        store(neighbour, space, 1, 3)
        before = usage(daemon, "neighbour")
        assert before.saved_tokens == 12
        daemon.stop()
        daemon = Daemon(folder, config(durable))
        after = usage(daemon, "neighbour")
        assert after.saved_tokens == 12 and after.sealed_blocks == before.sealed_blocks
        assert after.lookup_tokens == before.lookup_tokens
        assert host(after).byte_seconds >= host(before).byte_seconds
    finally:
        daemon.stop()


@needs_descriptors
def test_a_deleted_tenant_leaves_no_byte(folder):
    """DeleteTenant: counts come back, and its bytes are in no memory of the daemon any more."""
    from conftest import Daemon
    from kvkeep.v1 import kvkeep_pb2_grpc as rpc
    durable = f"[durable]\nfolder = {folder}/durable\nkeeper = no\n"
    daemon = Daemon(folder, config(durable))
    try:
        admin = rpc.AdminStub(daemon.channel())
        admin.CreateTenant(pb.CreateTenantRequest(name=b"gone"), timeout=10)
        token = admin.CreateCredential(pb.CreateCredentialRequest(
            name=b"gone", tenants=[b"gone"], token=True), timeout=10).token.decode()
        worker = Worker(daemon, token=token)
        space = worker.open_space()
        size = space.groups[0].shard_bytes[0]
        mark = b"KVK-E2E-MARK-OF-A-TENANT-THAT-GOES!!"[:32]
        data = (mark * (size // len(mark) + 1))[:size]
        sequence = worker.open(space, values_of(5, 40))
        worker.write(sequence.sequence_id, [(0, 0, block, 0, data) for block in range(40)])
        worker.seal(sequence.sequence_id, 160)
        assert scan(daemon, mark) > 0
        answer = admin.DeleteTenant(pb.DeleteTenantRequest(name=b"gone"), timeout=30)
        assert answer.host_bytes == 40 * size, answer
        assert scan(daemon, mark) == 0
        for root, _, names in os.walk(f"{folder}/durable"):
            for name in names:
                assert mark not in (pathlib.Path(root) / name).read_bytes()
    finally:
        daemon.stop()


def scan(daemon, mark):
    """How often the mark lies in the daemon's shared memory files."""
    found = 0
    place = f"/proc/{daemon.process.pid}/fd"
    for name in os.listdir(place):
        try:
            target = os.readlink(f"{place}/{name}")
            if "memfd:" not in target:
                continue
            with open(f"{place}/{name}", "rb") as file:
                found += sum(part.count(mark) for part in file_parts(file))
        except OSError:
            continue
    return found


def file_parts(file):
    """Only what is there: the files are sparse and large."""
    descriptor = file.fileno()
    end = os.fstat(descriptor).st_size
    at = 0
    while at < end:
        try:
            at = os.lseek(descriptor, at, os.SEEK_DATA)
            hole = os.lseek(descriptor, at, os.SEEK_HOLE)
        except OSError:
            return
        yield os.pread(descriptor, hole - at, at)
        at = hole


def test_a_flood_of_one_tenant_leaves_room_for_others(start):
    daemon = start("[server]\ntenant_calls = 2\n" + config())
    small, neighbour = worker_of(daemon, "small"), worker_of(daemon, "neighbour")
    space, other = small.open_space(), neighbour.open_space()
    request = pb.LookupRequest(space_id=space.space_id, prompt=prompt(values_of(1)))
    refusals = []
    while not refusals:
        calls = [small.calls.Lookup.future(request, metadata=small.metadata, timeout=20)
                 for _ in range(300)]
        # Of a flood that is under way the neighbour feels nothing.
        neighbour.call("Lookup", pb.LookupRequest(space_id=other.space_id,
                                                  prompt=prompt(values_of(1))))
        refusals = [call.exception() for call in calls if call.exception() is not None]
    for refusal in refusals:
        assert refusal.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tenant" in refusal.details()
    stats = {row.name.decode(): row.value for row in small.admin.GetStats(
        pb.GetStatsRequest(), timeout=10).stats}
    assert stats["kvkeep_calls_of_one_tenant_refused_total"] >= len(refusals)
    # An engine's calls count for the tenant of the space they name, not for its first one.
    engine, slow = worker_of(daemon, "engine", tenant=b"neighbour"), worker_of(daemon, "slow")
    third = slow.open_space()
    request = pb.LookupRequest(space_id=other.space_id, prompt=prompt(values_of(1)))
    refused = 0
    for _ in range(3):
        calls = [engine.calls.Lookup.future(request, metadata=engine.metadata, timeout=20)
                 for _ in range(300)]
        slow.call("Lookup", pb.LookupRequest(space_id=third.space_id, prompt=prompt(values_of(1))))
        refused += sum(call.exception() is not None for call in calls)
    assert refused > 0
