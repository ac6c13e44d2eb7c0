"""A worker's life through the Python package."""

import concurrent.futures
import math
import multiprocessing
import os
import pathlib
import pickle
import stat
import sys
import threading
import time
import types

import numpy as np
import pytest

import kvkeep
from kvkeep import Code, KvkeepError, Tier
from kvkeep.v1 import kvkeep_pb2 as pb

GROUP = kvkeep.LayerGroup(layers=2, kv_heads=2, head_size_k=8, format_k=kvkeep.Format.FP32)
COST = kvkeep.PrefillCost(1e6, 10, 1e12)
TOKENS = list(range(100, 110))  # two blocks of four and two tokens


def open_space(client, model="tiny", groups=(GROUP,), **changes):
    values = {"block_tokens": 4, "prefill_cost": COST, **changes}
    return client.open_space(kvkeep.Identity(model=model), groups, **values)


def fill(memory, sequence, seed):
    """Random K and V in every block from the first that may be written; what was written."""
    source = np.random.default_rng(seed)
    written = {}
    first = sequence.grant_first // sequence.space.block_tokens
    for block in sequence.blocks()[first:]:
        keys, values = memory.array(block.slot)
        keys[:] = source.standard_normal(keys.shape, dtype=np.float32)
        values[:] = source.standard_normal(values.shape, dtype=np.float32)
        written[block.block] = (keys.copy(), values.copy())
    return written


def prefill(session, space, tokens, seed=1):
    memory = session.map_slots(space)
    sequence = session.open_sequence(space, tokens)
    written = fill(memory, sequence, seed)
    sequence.seal(all_ranks=True)
    return sequence, memory, written


def test_memory_is_of_the_tier_where_sequences_begin(start):
    """With a device tier, there; on a daemon without one, as in README's example, on the host."""
    for tiers, tier in (("device_bytes = 1 MiB\nhost_bytes = 1 MiB\n", Tier.DEVICE),
                        ("device_bytes = 0\nhost_bytes = 1 MiB\n", Tier.HOST)):
        daemon = start(f"[tiers]\n{tiers}huge_pages = no\n")
        with kvkeep.connect(daemon.target) as client, client.session() as session:
            space = open_space(client)
            sequence, memory, written = prefill(session, space, TOKENS)
            assert memory.tier == tier
            assert {block.tier for block in sequence.blocks()} == {tier}
            with session.open_sequence(space, TOKENS) as again:
                assert again.cached_tokens == 8
                for block in again.blocks()[:2]:
                    assert np.array_equal(memory.array(block)[0], written[block.block][0])
        daemon.stop()


def test_a_block_is_looked_for_in_the_memory_where_it_lies(client):
    with client.session() as session:
        space = open_space(client)
        on_host = session.map_slots(space, tier=Tier.HOST)
        sequence, memory, _ = prefill(session, space, TOKENS)
        block = sequence.blocks()[0]
        memory.array(block)
        for read in (on_host.slot, on_host.array, on_host.generation, on_host.populate):
            with pytest.raises(ValueError, match="block 0 lies in the device tier, and these are "
                                                 "slots of the host tier"):
                read(block)
        with pytest.raises(ValueError, match="block 3 has no bytes"):
            memory.slot(kvkeep.Placement(3, Tier.ANY, None, 0))


def test_the_environment_says_what_the_call_does_not(start, monkeypatch):
    """As kvkeepctl and the programs in C read it: KVKEEP_TARGET and KVKEEP_TOKEN."""
    daemon = start("[tenant own]\n[tenant other]\n[credential own]\n"
                   f"uids = {os.getuid()}\ntenants = own\n"
                   "[credential other]\ntoken = 0123456789abcdef\ntenants = other\n")
    monkeypatch.setenv("KVKEEP_TARGET", daemon.target)
    monkeypatch.setenv("KVKEEP_CA", "/no/such/file")  # a unix socket has no TLS
    for variable, token, tenant in ((None, None, b"own"), ("0123456789abcdef", None, b"other"),
                                    ("0123456789abcdef", "", b"own"),
                                    ("wrong", "0123456789abcdef", b"other")):
        if variable is not None:
            monkeypatch.setenv("KVKEEP_TOKEN", variable)
        with kvkeep.connect(token=token) as client:
            assert client.server_info().tenant == tenant
    with pytest.raises(OSError):
        kvkeep.connect("localhost:1")
    with pytest.raises(ValueError, match="host:port or unix:path"):
        kvkeep.connect("localhost")


def test_the_first_socket_that_is_there_is_taken(monkeypatch, tmp_path):
    """In /tmp only one's own or root's; where none is seen, the one in a folder that hides it."""
    def seen(sockets):
        def lstat(path):
            owner = sockets.get(path, FileNotFoundError(path))
            if isinstance(owner, OSError):
                raise owner
            return types.SimpleNamespace(st_mode=stat.S_IFSOCK | 0o660, st_uid=owner)
        monkeypatch.setattr(os, "lstat", lstat)
        return kvkeep.client.default_target()

    monkeypatch.delenv("KVKEEP_TARGET", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    service, loose = "/run/kvkeep/kvkeep.sock", "/tmp/kvkeep.sock"
    assert seen({service: 101, loose: 0}) == "unix:" + service
    assert seen({loose: 0}) == seen({loose: os.geteuid()}) == "unix:" + loose
    assert seen({loose: os.geteuid() + 1}) != "unix:" + loose
    assert seen({service: PermissionError(service)}) == "unix:" + service
    assert seen({service: PermissionError(service), loose: 0}) == "unix:" + loose
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert seen({service: PermissionError(service)}) == "unix:" + service
    assert seen({str(tmp_path / "kvkeep.sock"): 5, service: 101}) == f"unix:{tmp_path}/kvkeep.sock"


def test_server_info(client):
    info = client.server_info()
    assert info.limits.tokens > 0 and info.device_bytes == 4 << 20
    assert info.boot_id and len(info.boot_id) == 16


def test_what_one_writes_another_reads_without_a_copy(client):
    space = open_space(client)
    assert space.rank_bytes() == 2 * 2 * 2 * 4 * 8 * 4
    with client.session(name="writer") as writer:
        sequence, _, written = prefill(writer, space, TOKENS)
        assert sequence.length == 10 and sequence.sealed_tokens == 10
        sequence.close()
    assert client.lookup(space, TOKENS).cached_tokens == 8
    with client.session() as reader:
        memory = reader.map_slots(space, read_only=True)
        with reader.pin(space, TOKENS, copy_pin=True) as lease:
            assert lease.tokens == 8
            for block in lease.blocks():
                keys, values = memory.array(block.slot)
                assert memory.generation(block.slot) == block.generation
                assert np.array_equal(keys, written[block.block][0])
                assert np.array_equal(values, written[block.block][1])
                assert not keys.flags.writeable and not keys.flags.owndata
                assert block.tier == Tier.DEVICE
            assert [np.frombuffer(data, np.uint8).tobytes() for data in lease.read()] == [
                memory.slot(block.slot).tobytes() for block in lease.blocks()]
            assert lease.renew(60_000) > 30_000


def test_bytes_by_grpc(client):
    space = open_space(client)
    size = space.rank_bytes()
    data = np.random.default_rng(3).integers(0, 255, size * 2, dtype=np.uint8).tobytes()
    with client.session() as session:
        with session.open_sequence(space, TOKENS[:8]) as sequence:
            pieces = [(0, 0, 0, 0, data[:size]), (0, 0, 1, 0, data[size:])]
            assert sequence.write(pieces) == 2 * size
            sequence.seal(all_ranks=True)
            assert b"".join(sequence.read()) == data
            assert b"".join(sequence.read(first_block=1)) == data[size:]


def test_append_drafts_commit_truncate_fork(client):
    space = open_space(client)
    with client.session() as session:
        sequence, memory, _ = prefill(session, space, TOKENS)
        sequence.append([1, 2, 3], draft=True)
        assert (sequence.length, sequence.committed_tokens) == (13, 10)
        fill(memory, sequence, 2)
        sequence.seal(all_ranks=True)
        sequence.commit(1)
        assert (sequence.length, sequence.committed_tokens) == (11, 11)
        assert len(sequence.blocks()) == 3
        children = sequence.fork(2)
        assert len({child.id for child in children} | {sequence.id}) == 3
        for number, child in enumerate(children):
            assert child.length == 11
            child.append([50 + number])
            assert child.blocks()[2].slot != sequence.blocks()[2].slot
            assert child.blocks()[:2] == sequence.blocks()[:2]
        sequence.truncate(3)
        assert sequence.length == 3 and len(sequence.blocks()) == 1


def test_swap_is_byte_exact(client):
    space = open_space(client)
    with client.session() as session:
        sequence, memory, written = prefill(session, space, TOKENS)
        out = sequence.swap_out()
        assert sequence.swapped_out and out.moved_bytes == 3 * space.block_bytes[0]
        with pytest.raises(KvkeepError) as refused:
            sequence.append([1])
        assert refused.value.cause == pb.CAUSE_SWAPPED_OUT
        assert refused.value.code == Code.FAILED_PRECONDITION
        sequence.swap_in()
        assert not sequence.swapped_out
        for block in sequence.refresh().blocks():
            keys, values = memory.array(block.slot)
            assert np.array_equal(keys, written[block.block][0])
            assert np.array_equal(values, written[block.block][1])


def test_attend_against_numpy(client):
    space = open_space(client)
    with client.session() as session:
        sequence, _, written = prefill(session, space, TOKENS)
        layer, scale, position = 1, 0.4, 8
        queries = np.random.default_rng(5).standard_normal((2, 4, 8)).astype(np.float32)
        result, = session.attend(space, [(sequence, position, queries)], layer=layer, scale=scale)
        keys = np.concatenate([written[b][0][layer] for b in range(3)], axis=1)[:, :10]
        values = np.concatenate([written[b][1][layer] for b in range(3)], axis=1)[:, :10]
        for i in range(2):
            for head in range(4):
                logits = scale * keys[head // 2, :position + i + 1].astype(float) @ queries[i, head]
                top = logits.max()
                weights = np.exp(logits - top)
                expected = weights @ values[head // 2, :position + i + 1] / weights.sum()
                assert np.allclose(result.output[i, head], expected, atol=1e-5)
                assert math.isclose(result.lse[i, head], top + math.log(weights.sum()),
                                    rel_tol=1e-5, abs_tol=1e-5)
        assert result.device_tokens == 10 and result.host_tokens == 0
        assert result.host_place == kvkeep.AttendPlace.NO_CHOICE  # nothing of it is on the host
        slopes, sinks = [0.5, 0.0, 0.25, 1.0], [1.0, -math.inf, 0.0, 2.0]
        result, = session.attend(space, [(sequence, position, queries)], layer=layer, scale=scale,
                                 alibi_slopes=slopes, sink_logits=sinks)
        for head in range(4):
            logits = scale * keys[head // 2, :position + 1].astype(float) @ queries[0, head]
            logits -= slopes[head] * (position - np.arange(position + 1))
            total = np.exp(logits).sum() + math.exp(sinks[head])
            expected = np.exp(logits) @ values[head // 2, :position + 1] / total
            assert np.allclose(result.output[0, head], expected, atol=1e-5)
            assert math.isclose(result.lse[0, head], math.log(total), rel_tol=1e-5, abs_tol=1e-5)


def test_ranks_of_an_instance(client):
    """Two tensor ranks, two sessions; visible when both have sealed."""
    space = open_space(client, tensor_shards=2)
    with client.session(name="rank 0") as first:
        with client.session(instance_token=first.instance_token, rank=1) as second:
            sequence = first.open_sequence(space, TOKENS[:8])
            for session in (first, second):
                memory = session.map_slots(space)
                for block in sequence.blocks():
                    keys, _ = memory.array(block.slot)
                    assert keys.shape == (2, 1, 4, 8)
                    keys[:] = session.rank + 1
                assert client.lookup(space, TOKENS[:8]).cached_tokens == 0
                second_view = sequence if session is first else \
                    kvkeep.Sequence(second, space, pb.SequenceResponse(
                        sequence_id=sequence.id, length=8))
                second_view.seal()
            assert client.lookup(space, TOKENS[:8]).cached_tokens == 8


def test_transfer_ticket(client):
    space = open_space(client)
    with client.session() as session:
        sequence, memory, written = prefill(session, space, TOKENS)
        with sequence.begin_transfer(block_count=2) as transfer:
            for block in transfer.blocks():
                assert np.array_equal(memory.array(block.slot)[0], written[block.block][0])
        with pytest.raises(KvkeepError) as refused:
            session.client.call("EndTransfer", pb.EndTransferRequest(session_id=session.id,
                                                                     ticket=transfer.ticket))
        assert refused.value.code == Code.NOT_FOUND


def test_salt_and_spans_keep_apart(client):
    space = open_space(client)
    span = kvkeep.ContentSpan(2, 2, b"image one")
    plain = kvkeep.Prompt(TOKENS)
    salted = kvkeep.Prompt(TOKENS, salt="user 1")
    pictured = kvkeep.Prompt(TOKENS, spans=[span])
    with client.session() as session:
        prefill(session, space, salted)
        prefill(session, space, pictured)
        assert client.lookup(space, plain).cached_tokens == 0
        assert client.lookup(space, salted).cached_tokens == 8
        assert client.lookup(space, pictured).cached_tokens == 8
        other = kvkeep.Prompt(TOKENS, spans=[kvkeep.ContentSpan(2, 2, b"image two")])
        assert client.lookup(space, other).cached_tokens == 0
        assert client.touch(space, salted, [kvkeep.PriorityHint(0, 8, 90, 60_000)]) == 8
        assert client.lookup(space, salted, leave_last=True).cached_tokens == 8
        assert client.invalidate(space, salt="user 1").device_blocks == 2
        assert client.lookup(space, salted).cached_tokens == 0
        assert client.lookup(space, pictured).cached_tokens == 8


def test_refusals_name_the_field(client):
    with pytest.raises(KvkeepError) as refused:
        open_space(client, block_tokens=0)
    assert refused.value.code == Code.INVALID_ARGUMENT
    assert refused.value.field == "block_tokens" and "block_tokens" in str(refused.value)
    assert refused.value.cause == pb.CAUSE_FIELD and refused.value.cause.name == "field"
    for wrong in ([-1], [1 << 32], [0.5], [[1, 2]]):
        with pytest.raises(ValueError):
            kvkeep.token_bytes(wrong)
    assert kvkeep.token_bytes(np.array([1, 2], dtype=np.int64)) == b"\1\0\0\0\2\0\0\0"
    assert kvkeep.token_bytes([]) == b""
    with pytest.raises(ValueError):
        client.invalidate(prefix=kvkeep.Prompt([1]))


def test_a_published_prefix_is_read_where_it_lies(start):
    daemon = start("""[tiers]
device_bytes = 1 MiB
host_bytes = 1 MiB
huge_pages = no
[tenant library]
may_publish = yes
[tenant reader]
[credential library]
token = library-library-library
tenants = library
[credential reader]
token = reader-reader-reader
tenants = reader
""")
    prompt = kvkeep.Prompt(TOKENS, use_public=True)
    with kvkeep.connect(daemon.target, token="library-library-library") as library, \
            kvkeep.connect(daemon.target, token="reader-reader-reader") as client:
        own = open_space(library)
        with library.session() as writer:
            sequence, _, written = prefill(writer, own, TOKENS)
            sequence.close()
        space = open_space(client)
        assert client.lookup(space, prompt).cached_tokens == 0
        published = library.publish(own, TOKENS)
        assert published.tokens == 8 and library.publish(own, TOKENS).created is False
        assert client.lookup(space, TOKENS).cached_tokens == 0
        with client.session() as session:
            sequence = session.open_sequence(space, prompt)
            assert sequence.cached_tokens == 8
            memory = session.map_slots(space, public_id=published.space_id)
            for block in sequence.blocks()[:2]:
                assert (block.space_id, block.tier) == (published.space_id, Tier.HOST)
                keys, values = memory.array(block.slot)
                assert memory.generation(block.slot) == block.generation
                assert np.array_equal(keys, written[block.block][0])
                assert np.array_equal(values, written[block.block][1])
                assert not keys.flags.writeable
            assert sequence.blocks()[2].space_id == 0
            assert library.unpublish(published.public_id).held_blocks == 2
            assert client.lookup(space, prompt).cached_tokens == 0
            sequence.close()


def test_a_full_pool_is_typed(start):
    daemon = start("[tiers]\ndevice_bytes = 64 KiB\nhost_bytes = 0\nhuge_pages = no\n")
    quick = kvkeep.Retry(attempts=1)
    with kvkeep.connect(daemon.target, retry=quick) as client, client.session() as session:
        space = open_space(client)
        sequence = session.open_sequence(space, list(range(4 * 60)))
        with pytest.raises(KvkeepError) as refused:
            session.open_sequence(space, list(range(1000, 1000 + 4 * 60)))
        assert refused.value.code == Code.RESOURCE_EXHAUSTED
        assert refused.value.cause == pb.CAUSE_POOL_ACTIVE
        advice = refused.value.advice
        assert advice.action == "close" and advice.sequence_ids == (sequence.id,)
        assert advice.bytes >= advice.missing_bytes > 0
        sequence.close()  # and the call succeeds
        session.open_sequence(space, list(range(1000, 1000 + 4 * 60))).close()


def test_bf16_and_different_head_sizes(client):
    group = kvkeep.LayerGroup(layers=3, kv_heads=2, head_size_k=16, head_size_v=8)
    space = open_space(client, model="bf16", groups=(group,))
    with client.session() as session:
        memory = session.map_slots(space)
        with session.open_sequence(space, TOKENS[:4]) as sequence:
            keys, values = memory.array(sequence.blocks()[0].slot)
            assert keys.shape == (3, 2, 4, 16) and values.shape == (3, 2, 4, 8)
            assert keys.dtype == np.uint16
            keys[:] = 0x3F80  # 1.0
            values[:] = 0x4000  # 2.0
            raw = memory.slot(sequence.blocks()[0].slot).view(np.uint16)
            per_layer = raw.reshape(3, -1)
            assert (per_layer[:, :2 * 4 * 16] == 0x3F80).all()
            assert (per_layer[:, 2 * 4 * 16:] == 0x4000).all()


def test_latent_cache_has_no_values(client):
    group = kvkeep.LayerGroup(layers=2, kv_heads=1, head_size_k=24, head_size_v=16, latent=True,
                              format_k=kvkeep.Format.FP32)
    space = open_space(client, model="mla", groups=(group,), tensor_shards=4)
    assert len(space.shard_bytes[0]) == 1 and space.rank_shard[0] == (0, 0, 0, 0)
    with client.session() as session:
        memory = session.map_slots(space)
        with session.open_sequence(space, TOKENS[:4]) as sequence:
            keys, values = memory.array(sequence.blocks()[0].slot)
            assert keys.shape == (2, 1, 4, 24) and values is None


def test_scratch(client):
    with client.session() as session:
        scratch = session.map_scratch(1 << 16)
        view = scratch.array(256, (4, 8))
        view[:] = 7
        assert scratch.bytes[256:260].view(np.float32)[0] == 7
        with pytest.raises(IndexError):
            scratch.array(1 << 16, (1,))


def test_a_session_ends_with_its_client(daemon, client):
    other = kvkeep.connect(daemon.target)
    session = other.session()
    space = open_space(client)
    sequence = session.open_sequence(space, TOKENS)
    other.close()
    assert session.ended.wait(10)
    end = time.monotonic() + 60
    while True:
        info = client.admin.ListSequences(pb.ListSequencesRequest(), timeout=5)
        if not any(row.sequence_id == sequence.id for row in info.sequences):
            break
        assert time.monotonic() < end, "the sequence did not end with its session"
        time.sleep(0.02)


def test_the_daemon_dies_and_is_there_again(daemon):
    with kvkeep.connect(daemon.target, retry=kvkeep.Retry(attempts=12, longest_ms=500)) as client:
        session = client.session()
        space = open_space(client)
        daemon.kill()
        assert session.ended.wait(10)
        assert session.error is not None and session.error.code == Code.UNAVAILABLE
        answers = []
        waiter = threading.Thread(target=lambda: answers.append(client.server_info().boot_id))
        waiter.start()
        daemon.start()
        waiter.join(20)
        assert answers and answers[0] != session.boot_id
        again = open_space(client)
        assert again.block_bytes == space.block_bytes
        with client.session() as fresh:
            sequence, _, _ = prefill(fresh, again, TOKENS)
            assert sequence.sealed_tokens == 10
        session.close()


def test_notices_are_told(client):
    told = []
    with kvkeep.Session(client, on_notice=lambda *notice: told.append(notice)) as session:
        space = open_space(client)
        prefill(session, space, TOKENS)
        client.invalidate(space)
        end = time.monotonic() + 60
        while ("invalidated", space.id) not in told:
            assert time.monotonic() < end, told
            time.sleep(0.01)


def test_a_listener_that_fails_does_not_end_the_session(client, caplog):
    told = threading.Event()

    def fail(*_):
        told.set()
        raise ValueError("a listener's")

    with kvkeep.Session(client, on_notice=fail) as session:
        space = open_space(client)
        prefill(session, space, TOKENS)
        client.invalidate(space)
        assert told.wait(60)
        with session.open_sequence(space, TOKENS):
            assert not session.ended.is_set()
    assert "on_notice failed" in caplog.text


def test_a_listener_may_close_the_session(client):
    done = []
    session = kvkeep.Session(client, on_notice=lambda *_: (session.close(), done.append(True)))
    space = open_space(client)
    prefill(session, space, TOKENS)
    client.invalidate(space)
    assert session.ended.wait(client.timeout / 2) and done == [True]
    session.close()


def test_what_was_closed_says_so(client, daemon):
    other = kvkeep.connect(daemon.target)
    session = other.session()
    space = open_space(client)
    session.close()
    with pytest.raises(KvkeepError, match="the session has ended"):
        session.map_slots(space)
    other.close()
    for call in (other.server_info, other.session, lambda: other.lookup(space, TOKENS)):
        with pytest.raises(KvkeepError, match="the client was closed") as told:
            call()
        assert told.value.code == Code.FAILED_PRECONDITION


def test_errors_are_told_between_processes(client):
    """As concurrent.futures does; what cannot be is said in words."""
    with pytest.raises(KvkeepError) as told:
        open_space(client, groups=())
    with concurrent.futures.ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn")) as others:
        error = others.submit(_raised_there, client.target).exception(60)
    assert isinstance(error, KvkeepError) and str(error) == str(told.value)
    assert (error.code, error.cause, error.field) == \
        (told.value.code, told.value.cause, told.value.field)
    full = KvkeepError("no", Code.RESOURCE_EXHAUSTED, 3, "f", 1, 2, 5,
                       kvkeep.Advice("close", (7,), 1, 8, 9, 10))
    assert vars(pickle.loads(pickle.dumps(full))) == vars(full)
    with client.session() as session:
        for mine in (client, session):
            with pytest.raises(TypeError, match="in each"):
                pickle.dumps(mine)


def _raised_there(target):
    with kvkeep.connect(target) as client:
        open_space(client, groups=())


def test_a_client_is_made_anew_after_a_fork(client):
    """And the parent's goes on."""
    client.server_info()
    child = os.fork()
    if child == 0:
        try:
            with kvkeep.connect(client.target, timeout=30) as own, own.session() as session:
                prefill(session, open_space(own), TOKENS)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.lookup(open_space(client), TOKENS).cached_tokens == 8


def test_a_tokens_last_newline_is_not_part_of_it(start, monkeypatch):
    daemon = start("[tenant other]\n[credential other]\ntoken = 0123456789abcdef\n"
                   "tenants = other\n")
    monkeypatch.setenv("KVKEEP_TOKEN", "0123456789abcdef\n")
    with kvkeep.connect(daemon.target) as client:
        assert client.server_info().tenant == b"other"
    with pytest.raises(ValueError, match="token"):
        kvkeep.connect(daemon.target, token="a\nb")


def test_a_hit_that_ends_within_a_block(client):
    space = open_space(client, prefill_cost=kvkeep.PrefillCost(), partial_reuse=True)
    with client.session() as session:
        sequence, memory, written = prefill(session, space, TOKENS)
        sequence.close()
        other = [*TOKENS[:7], 7, 8, 9]
        found = client.lookup(space, other)
        assert (found.cached_tokens, found.partial_tokens) == (7, 3)
        assert client.lookup(space, kvkeep.Prompt(other, whole_blocks=True)).cached_tokens == 4
        with session.open_sequence(space, other) as branch:
            assert (branch.cached_tokens, branch.partial_tokens, branch.grant_first) == (7, 3, 7)
            keys, values = memory.array(branch.blocks()[1].slot)
            assert np.array_equal(keys[:, :, :3], written[1][0][:, :, :3])
            assert np.array_equal(values[:, :, :3], written[1][1][:, :, :3])
    open_space(client, prefill_cost=kvkeep.PrefillCost(), partial_reuse=False)
    assert client.lookup(space, other).cached_tokens == 4


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="older generators do not run there")
def test_generated_code_asks_for_no_newer_libraries_than_the_package():
    """Engines pin protobuf and grpcio; code made by new generators fails at import beside old ones,
    whatever the package's own requirements say."""
    for module in (pb, kvkeep.client.services):
        text = pathlib.Path(module.__file__).read_text()
        assert "ValidateProtobufRuntimeVersion" not in text
        assert "GRPC_GENERATED_VERSION" not in text


def test_type_stubs_are_python():
    stubs = pathlib.Path(pb.__file__).with_suffix(".pyi")
    compile(stubs.read_text(), str(stubs), "exec")
