"""Public prefixes, seen from outside: one tenant publishes, others find, read and map it, and
nobody learns anything that was not published."""

import json
import mmap
import os
import pathlib
import struct
import subprocess
import time

import grpc
import pytest

from conftest import binary
from kvkeep.v1 import kvkeep_pb2 as pb
from worker import Refused, Worker, block_bytes, prompt, table

CONFIG = """
[tiers]
device_bytes = {device}
host_bytes = 1 MiB
huge_pages = no
[limits]
public_prefixes = 2
{durable}
[tenant library]
may_publish = yes
[tenant reader]
[tenant stranger]

[credential library]
token = library-library-library
tenants = library
[credential reader]
token = reader-reader-reader
tenants = reader
[credential stranger]
token = stranger-stranger-stranger
tenants = stranger
[credential operator]
uids = {uid}
admin = yes
"""

TOKENS = {"library": "library-library-library", "reader": "reader-reader-reader",
          "stranger": "stranger-stranger-stranger"}
SHARED = list(range(1000, 1016))  # four blocks
BLOCK = 1024


def config(device="256 KiB", durable=""):
    return CONFIG.format(uid=os.geteuid(), device=device, durable=durable)


def worker_of(daemon, name):
    worker = Worker(daemon, token=TOKENS[name])
    worker.space = worker.open_space()
    return worker


def public_prompt(values, salt=b""):
    message = prompt(values, salt)
    message.use_public = True
    return message


def lookup(worker, values, use_public=True, salt=b""):
    message = public_prompt(values, salt)
    message.use_public = use_public
    return worker.call("Lookup", pb.LookupRequest(space_id=worker.space.space_id, prompt=message))


def open_public(worker, values, **changes):
    return worker.call("OpenSequence", pb.OpenSequenceRequest(
        session_id=worker.id, space_id=worker.space.space_id, prompt=public_prompt(values),
        **changes))


def keep(worker, values, seed):
    worker.close(worker.prefill(worker.space, values, seed).sequence_id)


def publish(worker, values, space=None):
    return worker.call("PublishPrefix", pb.PublishPrefixRequest(
        space_id=(space or worker.space).space_id, prompt=prompt(values)))


def spaces_of(response):
    part, = response.tables
    return struct.unpack(f"<{len(part.spaces) // 8}Q", part.spaces)


def ctl(daemon, *arguments, token=None, code=0, stdin=None):
    path = pathlib.Path(binary()).with_name("kvkeepctl")
    common = ["--connect", daemon.target, "--json"] + (["--token", token] if token else [])
    done = subprocess.run([path, *common, *map(str, arguments)], capture_output=True,
                          input=stdin, timeout=30, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout) if code == 0 else done.stderr.decode()


@pytest.mark.parametrize("device", ["0", "256 KiB"])
def test_published_found_read_and_mapped(start, device):
    daemon = start(config(device))
    library, reader, stranger = (worker_of(daemon, name) for name in TOKENS)
    keep(library, SHARED, "library")
    assert lookup(reader, SHARED).cached_tokens == 0
    published = publish(library, SHARED)
    assert (published.tokens, published.blocks, published.bytes) == (16, 4, 4 * BLOCK)

    found = lookup(reader, SHARED + [7, 8, 9])
    assert (found.cached_tokens, found.public_tokens) == (16, 16)
    assert lookup(reader, SHARED, use_public=False).cached_tokens == 0
    assert lookup(reader, SHARED, salt=b"mine").cached_tokens == 16

    # A sequence over it: the bytes by gRPC, and in mapped memory where the table says they are.
    expected = [block_bytes(repr(("library", block)), BLOCK) for block in range(4)]
    sequence = open_public(reader, SHARED + [7, 8, 9, 10])
    assert (sequence.cached_tokens, sequence.public_tokens) == (16, 16)
    assert spaces_of(sequence) == (published.space_id,) * 4 + (0,)
    assert reader.read(0, 4, sequence_id=sequence.sequence_id) == expected
    where, memory, generations = reader.map_slots(published, pb.TIER_HOST, read_only=True)
    for block, tier, slot, generation in table(sequence)[:4]:
        assert tier == pb.TIER_HOST
        at = slot * where.slot_stride
        assert memory[at:at + BLOCK] == expected[block]
        assert struct.unpack_from("<I", generations, 4 * slot)[0] == generation

    # Nobody maps it writably: not by asking, not with the descriptor, not by opening it anew.
    with Refused(grpc.StatusCode.PERMISSION_DENIED, field="read_only"):
        reader.map(kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=published.space_id,
                   tier=pb.TIER_HOST)
    answer, fds = reader.map(kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=published.space_id,
                             tier=pb.TIER_HOST, read_only=True)
    for fd in fds:
        with pytest.raises(OSError):
            mmap.mmap(fd, 4096, access=mmap.ACCESS_WRITE)
        if os.geteuid() == 0:  # whoever may open anything
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
            with pytest.raises(OSError):
                mmap.mmap(again, 4096, access=mmap.ACCESS_WRITE)
            with pytest.raises(OSError):
                os.pwrite(again, b"x", 0)
            os.close(again)
        else:
            with pytest.raises(PermissionError):
                os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        os.close(fd)
    assert answer.slot_count == 4

    # What is computed behind it is the reader's own, and hangs behind it.
    reader.write_whole(reader.space, sequence.sequence_id, "reader", 4, 5)
    reader.seal(sequence.sequence_id, 20)
    reader.close(sequence.sequence_id)
    assert lookup(reader, SHARED + [7, 8, 9, 10]).cached_tokens == 20
    assert lookup(stranger, SHARED + [7, 8, 9, 10]).cached_tokens == 16
    again = open_public(reader, SHARED + [7, 8, 9, 10])
    assert reader.read(0, 5, sequence_id=again.sequence_id) == \
        expected + [block_bytes(repr(("reader", 4)), BLOCK)]
    reader.close(again.sequence_id)

    # A lease is held on it too.
    lease = stranger.call("Pin", pb.PinRequest(
        session_id=stranger.id, space_id=stranger.space.space_id, prompt=public_prompt(SHARED),
        ttl_ms=10000, copy_pin=True))
    assert lease.cached_tokens == 16
    assert spaces_of(lease) == (published.space_id,) * 4
    assert stranger.read(0, 4, lease_id=lease.lease_id) == expected


def test_rights(start):
    daemon = start(config())
    library, reader, stranger = (worker_of(daemon, name) for name in TOKENS)
    keep(library, SHARED, "library")
    keep(reader, SHARED, "reader")
    with Refused(grpc.StatusCode.PERMISSION_DENIED):
        publish(reader, SHARED)
    with Refused(grpc.StatusCode.NOT_FOUND, field="space_id"):
        publish(reader, SHARED, library.space)
    with Refused(grpc.StatusCode.NOT_FOUND, field="space_id"):
        publish(library, SHARED, reader.space)
    with Refused(grpc.StatusCode.NOT_FOUND, field="prompt.tokens"):
        publish(library, SHARED + [1, 2, 3, 4])
    with Refused(grpc.StatusCode.INVALID_ARGUMENT, field="prompt.salt"):
        library.call("PublishPrefix", pb.PublishPrefixRequest(
            space_id=library.space.space_id, prompt=prompt(SHARED, b"salt")))
    published = publish(library, SHARED)
    assert not publish(library, SHARED[:8]).created
    for other in (reader, stranger):
        with Refused(grpc.StatusCode.NOT_FOUND, field="public_id"):
            other.call("UnpublishPrefix", pb.UnpublishPrefixRequest(public_id=published.public_id))
        assert not other.call("ListPublicPrefixes", pb.ListPublicPrefixesRequest()).prefixes
    # The public space is nobody's to open, to seal in, or to invalidate by its number.
    for worker in (library, reader):
        with Refused(grpc.StatusCode.NOT_FOUND):
            worker.call("OpenSequence", pb.OpenSequenceRequest(
                session_id=worker.id, space_id=published.space_id, prompt=prompt(SHARED)))
        with Refused(grpc.StatusCode.NOT_FOUND):
            worker.call("Invalidate", pb.InvalidateRequest(space_id=published.space_id))
    # Without a space of this identity it cannot be mapped either.
    other = Worker(daemon, token=TOKENS["stranger"])
    stranger.call("Invalidate", pb.InvalidateRequest(space_id=stranger.space.space_id))
    assert lookup(stranger, SHARED).cached_tokens == 0, "invalidated for itself"
    other.space = other.open_space(model=b"another")
    assert lookup(other, SHARED).cached_tokens == 0


def test_equal_prompts_tell_nothing(start):
    """Who happens to cache what another has cached, publisher or not, sees no difference."""
    daemon = start(config())
    library, reader, stranger = (worker_of(daemon, name) for name in TOKENS)
    secret = [5000 + i for i in range(16)]
    keep(library, SHARED + secret, "library")
    publish(library, SHARED)
    keep(stranger, secret, "stranger")
    assert lookup(reader, SHARED + secret).cached_tokens == 16, "the published part alone"
    assert lookup(reader, secret).cached_tokens == 0
    assert lookup(library, secret).cached_tokens == 0
    # What the publisher may see of it says nothing of who asks.
    row, = library.call("ListPublicPrefixes", pb.ListPublicPrefixesRequest()).prefixes
    assert (row.hits, row.hit_tokens) == (0, 0)
    sequence = reader.prefill(reader.space, SHARED + secret, "reader")
    assert sequence.cached_tokens == 0


def test_withdrawn_and_audited(start, folder):
    daemon = start(config(durable=f"[durable]\nfolder = {folder}/data\nkeeper = no\n"))
    library, reader, _ = (worker_of(daemon, name) for name in TOKENS)
    keep(library, SHARED, "library")
    tokens = ",".join(map(str, SHARED))
    made = ctl(daemon, "publish", "--space", library.space.space_id, "--tokens", tokens)
    assert made["created"] and made["tokens"] == 16
    ctl(daemon, "publish", "--space", library.space.space_id, "--tokens", tokens,
        token=TOKENS["reader"], code=1)
    sequence = open_public(reader, SHARED)
    rows = ctl(daemon, "public")
    assert [row["public_id"] for row in rows["prefixes"]] == [made["public_id"]]
    assert rows["prefixes"][0]["hits"] == 1 and rows["prefixes"][0]["hit_tokens"] == 16
    assert rows["prefixes"][0]["tenant"] == "library"
    assert any(space["is_public"] for space in ctl(daemon, "spaces"))

    gone = ctl(daemon, "unpublish", made["public_id"], token=TOKENS["library"])
    assert gone == {"blocks": 4, "held_blocks": 4}
    assert lookup(reader, SHARED).cached_tokens == 0
    assert reader.read(0, 4, sequence_id=sequence.sequence_id) == \
        [block_bytes(repr(("library", block)), BLOCK) for block in range(4)]
    # Who holds it may still map it; who does not, no more.
    place = pb.MapMemoryRequest(kind=pb.MapMemoryRequest.KIND_SLOTS, space_id=made["space_id"],
                                tier=pb.TIER_HOST, read_only=True)
    _, fds = reader.map(kind=place.kind, space_id=place.space_id, tier=place.tier, read_only=True)
    for fd in fds:
        os.close(fd)
    stranger = worker_of(daemon, "stranger")
    with Refused(grpc.StatusCode.NOT_FOUND):
        stranger.map(kind=place.kind, space_id=place.space_id, tier=place.tier, read_only=True)
    assert ctl(daemon, "public")["withdrawn_bytes"] == 4 * BLOCK
    reader.close(sequence.sequence_id)
    lines = [json.loads(line) for line in
             pathlib.Path(folder, "data", "audit.log").read_text().splitlines()]
    calls = [(line["call"], line["result"]) for line in lines]
    assert ("PublishPrefix", "OK") in calls and ("UnpublishPrefix", "OK") in calls
    assert any(call == "PublishPrefix" and result != "OK" for call, result in calls)


def test_metrics_and_limit(start):
    daemon = start(config())
    library, reader, _ = (worker_of(daemon, name) for name in TOKENS)

    def read():
        text = ctl(daemon, "stats")
        rows = text["stats"] if isinstance(text, dict) and "stats" in text else text
        if isinstance(rows, list):
            rows = {row["name"]: row["value"] for row in rows}
        return {name: rows[name] for name in rows if name.startswith("kvkeep_public_")}

    before = read()
    assert before["kvkeep_public_prefixes"] == 0
    other = [9000 + i for i in range(8)]
    third = [9500 + i for i in range(8)]
    for values in (SHARED, other, third):
        keep(library, values, "library")
    first = publish(library, SHARED)
    publish(library, other)
    with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, pb.CAUSE_LIMIT, "public_prefixes"):
        publish(library, third)
    lookup(reader, SHARED)
    reader.close(open_public(reader, other).sequence_id)
    after = read()
    assert after["kvkeep_public_prefixes"] == 2
    assert after["kvkeep_public_blocks"] == 6
    assert after["kvkeep_public_bytes"] == 6 * BLOCK
    assert after["kvkeep_public_published_total"] == 2
    assert after["kvkeep_public_hits_total"] == 2
    assert after["kvkeep_public_hit_tokens_total"] == 24
    sequence = open_public(reader, SHARED)
    library.call("UnpublishPrefix", pb.UnpublishPrefixRequest(public_id=first.public_id))
    last = read()
    assert last["kvkeep_public_withdrawn_total"] == 1
    assert last["kvkeep_public_withdrawn_bytes"] == 4 * BLOCK
    reader.close(sequence.sequence_id)
    deadline = time.monotonic() + 60
    while read()["kvkeep_public_withdrawn_bytes"] > 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert read()["kvkeep_public_withdrawn_bytes"] == 0
    publish(library, third)


def test_a_deleted_publisher_and_a_restart(start, folder):
    durable = f"[durable]\nfolder = {folder}/data\nkeeper = no\n"
    daemon = start(config(durable=durable))
    operator = Worker(daemon, token=TOKENS["reader"])
    operator.metadata = []

    def admin(name, request):
        return operator.call(name, request, stub=operator.admin)

    admin("CreateTenant", pb.CreateTenantRequest(name=b"press", may_publish=True))
    made = admin("CreateCredential", pb.CreateCredentialRequest(name=b"press", tenants=[b"press"],
                                                               token=True))
    press = Worker(daemon, token=made.token.decode())
    press.space = press.open_space()
    reader = worker_of(daemon, "reader")
    keep(press, SHARED, "press")
    publish(press, SHARED)
    sequence = open_public(reader, SHARED)
    with Refused(grpc.StatusCode.UNAVAILABLE):
        admin("DeleteTenant", pb.DeleteTenantRequest(name=b"press"))
    assert lookup(reader, SHARED).cached_tokens == 0
    assert reader.read(0, 4, sequence_id=sequence.sequence_id) == \
        [block_bytes(repr(("press", block)), BLOCK) for block in range(4)]
    reader.close(sequence.sequence_id)
    deadline = time.monotonic() + 60
    while True:
        try:
            admin("DeleteTenant", pb.DeleteTenantRequest(name=b"press"))
            break
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline
            time.sleep(0.05)
    # What is public has a file, and is public again; what was withdrawn with its publisher is not.
    library = worker_of(daemon, "library")
    keep(library, SHARED, "library")
    publish(library, SHARED)
    assert lookup(reader, SHARED).cached_tokens == 16
    daemon.stop()
    again = start(config(durable=durable))
    reader = worker_of(again, "reader")
    assert lookup(reader, SHARED).cached_tokens == 16
    sequence = open_public(reader, SHARED)
    assert reader.read(0, 4, sequence_id=sequence.sequence_id) == \
        [block_bytes(repr(("library", block)), BLOCK) for block in range(4)]
