"""The parts of kvkeep.vllm that need no vLLM: block sizes, layouts, identities, and the life of a
request between a scheduler's half and two ranks' halves over a real daemon."""

import dataclasses
import os
import pathlib
import random
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time

import numpy as np
import pytest

import kvkeep
from kvkeep import vllm_identity as naming
from kvkeep import vllm_worker
from kvkeep.v1 import kvkeep_pb2 as pb
from kvkeep.vllm_blocks import (ORDER_PLAIN, ORDER_SIDE_BY_SIDE, ORDER_TRANSPOSED, EngineLayer,
                                find_order, pieces)
from kvkeep.vllm_orders import Orders, Report, Settings
from tiny_engine import (BLOCK, ENGINE_BLOCK, FACTS, HEADS, RANKS, SIZE, Ask, Tiny, group, words)

TIERS = """
[tiers]
device_bytes = 0
host_bytes = {} KiB
huge_pages = no
"""


# ------------------------------------------------------------- blocks

@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_every_token_once(seed):
    source = random.Random(seed)
    block, engine_block = source.randint(1, 40), source.randint(1, 40)
    first = source.randint(0, 200)
    end = first + source.randint(0, 300)
    most = source.choice([1, 7, 64])
    seen = []
    for piece in pieces(first, end, block, engine_block, most):
        assert 1 <= piece.count <= most
        assert piece.offset + piece.count <= block
        assert piece.engine_offset + piece.count <= engine_block
        for i in range(piece.count):
            token = piece.block * block + piece.offset + i
            assert token == piece.engine_block * engine_block + piece.engine_offset + i
            seen.append(token)
    assert seen == list(range(first, end))


def test_pieces_refuse_what_cannot_be():
    for bad in ((-1, 3, 4, 4), (5, 3, 4, 4), (0, 3, 0, 4), (0, 3, 4, 0)):
        with pytest.raises(ValueError):
            list(pieces(*bad))


def test_orders_are_told_from_what_lies_where():
    numbers = np.arange(6 * 8)
    assert find_order(numbers, 6, 8) == ORDER_PLAIN
    assert find_order(numbers.reshape(6, 8).T.reshape(-1), 6, 8) == ORDER_TRANSPOSED
    packed = numbers.reshape(3, 2, 8).transpose(0, 2, 1).reshape(-1)  # pairs of tokens, by dim
    assert find_order(packed, 6, 8) is None
    assert find_order(numbers[::-1], 6, 8) is None


@pytest.mark.parametrize("order_k", [ORDER_PLAIN, ORDER_TRANSPOSED])
@pytest.mark.parametrize("order_v", [ORDER_PLAIN, ORDER_TRANSPOSED])
def test_a_layer_is_seen_by_token_whatever_its_order(order_k, order_v):
    source = np.random.default_rng(1)
    memory = source.integers(0, 60000, (3, HEADS, 2 * ENGINE_BLOCK * SIZE)).astype(np.uint16)
    layer = EngineLayer(memory, ENGINE_BLOCK, SIZE, order_k, order_v)
    for block, head, token, dim in ((0, 0, 0, 0), (2, 1, 5, 7), (1, 0, 3, 6)):
        half = memory[block, head].reshape(2, -1)
        for view, part, order in ((layer.keys, half[0], order_k), (layer.values, half[1], order_v)):
            place = token * SIZE + dim if order == ORDER_PLAIN else dim * ENGINE_BLOCK + token
            assert view[block, head, token, dim] == part[place]
    beside = EngineLayer(memory, ENGINE_BLOCK, SIZE, ORDER_SIDE_BY_SIDE, ORDER_SIDE_BY_SIDE)
    rows = memory.reshape(3, HEADS, ENGINE_BLOCK, 2, SIZE)
    assert (beside.keys == rows[..., 0, :]).all() and (beside.values == rows[..., 1, :]).all()
    with pytest.raises(ValueError, match="in one piece"):
        EngineLayer(memory[:, :, ::2], ENGINE_BLOCK, SIZE, order_k, order_v)


# ------------------------------------------------------------- identities

def bytes_of(identity):
    return identity.message().SerializeToString(deterministic=True)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(naming.Facts)])
def test_every_fact_counts(name):
    other = {"rope": {"theta": 1e4, "factor": 4}, "mask": {"window": 8}, "extra": {"site": "b"}}
    changed = dataclasses.replace(FACTS, **{name: other.get(name, "other")})
    assert bytes_of(changed.identity()) != bytes_of(FACTS.identity())


def test_parts_cannot_stand_in_for_each_other():
    """Case A1, and one word in each place."""
    made = {bytes_of(FACTS.identity(adapter)) for adapter in (
        None, naming.Adapter("x", "1", "v1"), naming.Adapter("x", "2", "v1"),
        naming.Adapter("x", "1", "v2"), naming.Adapter("1", "x", "v1"))}
    assert len(made) == 5
    assert bytes_of(dataclasses.replace(FACTS, model="m1", revision="").identity()) != \
        bytes_of(dataclasses.replace(FACTS, model="m", revision="1").identity())
    assert naming.digest("ab", "c") != naming.digest("a", "bc") != naming.digest("abc")


def test_long_parts_are_digests_and_still_count():
    long = {"factors": list(range(200))}
    one = dataclasses.replace(FACTS, rope=long).identity()
    two = dataclasses.replace(FACTS, rope={"factors": list(range(1, 201))}).identity()
    assert len(one.position_encoding) <= 255 and one != two


def test_an_adapter_whose_files_change_is_not_cached(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"one")
    adapters = naming.Adapters()
    first = adapters.find("x", 1, str(tmp_path))
    assert first == adapters.find("x", 1, str(tmp_path)) and first.version
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other")
    assert adapters.find("x", 1, str(tmp_path)) is None   # the engine still has the old one
    again = adapters.find("x", 1, str(tmp_path), True)    # unless it was told to load it anew
    assert again is not None and again.version != first.version
    assert adapters.find("x", 1, str(tmp_path / "none")) is None


def test_sampled_digests_see_other_weights(tmp_path):
    source = np.random.default_rng(1)
    weights = source.integers(0, 255, 3 << 20, dtype=np.uint8)
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(
            (weights + (name == "b")).tobytes()[:-1 if name == "c" else None])
        (tmp_path / name / "README.md").write_text(name)
    same = naming.sampled_digest(tmp_path / "a", r".*\.safetensors")
    assert len({naming.sampled_digest(tmp_path / name, r".*\.safetensors")
                for name in "abc"}) == 3
    (tmp_path / "a" / "README.md").write_text("changed")
    assert naming.sampled_digest(tmp_path / "a", r".*\.safetensors") == same


def test_images_are_told_apart(client):
    """Case A3, by the digests that vLLM gives."""
    space = client.open_space(FACTS.identity(), [group()], block_tokens=4)
    tokens = [1, 2, 3, 4, 5, 6] + [9] * 10

    def prompt(first, name):
        return kvkeep.Prompt(tokens, spans=naming.spans([(first, 10, name)], len(tokens)))

    with client.session() as session:
        with session.open_sequence(space, prompt(6, "1" * 60 + "abcd")) as sequence:
            sequence.seal(all_ranks=True)
    assert client.lookup(space, prompt(6, "1" * 60 + "abcd")).cached_tokens == 16
    assert client.lookup(space, prompt(6, "2" * 60 + "abcd")).cached_tokens == 4
    assert client.lookup(space, prompt(7, "1" * 60 + "abcd")).cached_tokens <= 4
    assert client.lookup(space, tokens).cached_tokens == 4


def test_settings_name_what_they_do_not_know():
    assert Settings.of({"target": "unix:/x"}).target == "unix:/x"
    for wrong in ({"tagret": "x"}, {"block_tokens": 0}, {"layout": "odd"}, {"lookups": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Settings.of(wrong)


def test_reports_of_ranks_are_joined():
    one = Report({1: (True, 1), 2: (True, 1)}, {3: 1})
    joined = one.join(Report({1: (False, 1), 4: (True, 1)}, {3: 1}))
    assert joined.done == {1: (False, 2), 2: (True, 1), 4: (True, 1)} and joined.joined == {3: 2}


# ------------------------------------------------------------- a request's life

@pytest.fixture
def tiny(start):
    engines = []

    def begin(daemon, **settings):
        engines.append(Tiny(daemon.target, **settings))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def sequences(client):
    return len(client.admin.ListSequences(pb.ListSequencesRequest(),
                                          metadata=client.metadata).sequences)


def resident(address):
    """Bytes of the mapping at an address that this process need not fault in."""
    inside = False
    with open("/proc/self/smaps", encoding="ascii") as file:
        for line in file:
            words = line.split()
            if "-" in words[0] and not words[0].endswith(":"):
                begin, end = (int(part, 16) for part in words[0].split("-"))
                inside = begin <= address < end
            elif inside and words[0] == "Rss:":
                return int(words[1]) * 1024
    raise AssertionError(address)


def test_slots_are_mapped_ahead(start):
    with kvkeep.connect(start(TIERS.format(4096)).target) as client, client.session() as session:
        space = client.open_space(kvkeep.Identity(model="m"), [kvkeep.LayerGroup(
            layers=8, kv_heads=8, head_size_k=64)], block_tokens=16)
        memory = session.map_slots(space, tier=kvkeep.Tier.HOST)
        with session.open_sequence(space, words(1, 32)) as sequence:
            row = sequence.blocks()[1]
            place = memory.slot(row.slot)
            before = resident(place.ctypes.data)
            memory.populate(row.slot)
            assert resident(place.ctypes.data) >= before + place.size // 4096 * 4096
            place[:] = 7


def test_ranks_that_do_not_join_are_said_once(start, tiny, caplog):
    engine = tiny(start(TIERS.format(1024)), lookup_wait_ms=100)
    model = engine.scheduler._model
    engine.scheduler._model = dataclasses.replace(model, ranks=RANKS + 1)
    with caplog.at_level("WARNING", "vllm.kvkeep"):
        assert engine.run(Ask("a", words(1, 40))) == 0
        assert engine.run(Ask("b", words(1, 40))) == 0
    said = [record.getMessage() for record in caplog.records if "ranks" in record.getMessage()]
    assert len(said) == 1 and f"of {RANKS + 1} ranks" in said[0] and "100 ms" in said[0]
    counts = engine.scheduler.counted()
    assert counts["late"] == 2 and counts["queries"] == 0
    engine.scheduler._model = model
    assert engine.run(Ask("c", words(1, 40))) == 0
    assert engine.scheduler.counted()["queries"] == 1


def test_ranks_that_cannot_map_memory_do_not_join(start, tiny, caplog, monkeypatch):
    """A daemon on another machine, say: its blocks could not be loaded, so nothing is looked up."""
    monkeypatch.setattr(kvkeep.Session, "is_local", False)
    monkeypatch.setattr(vllm_worker, "JOIN_AGAIN_S", 0.0)
    engine = tiny(start(TIERS.format(1024)), lookup_wait_ms=100)
    tried = []
    join = engine.workers[0]._join
    engine.workers[0]._join = lambda endpoint: (tried.append(endpoint), join(endpoint))
    assert engine.run(Ask("a", words(1, 40))) == 0
    wait(lambda: engine.step() and len(tried) >= 3)
    assert engine.scheduler.counted()["queries"] == 0
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"
            and "rank 0 could not join" in record.getMessage()]
    assert len(said) == 1 and "local processes only" in said[0]


def test_a_step_that_computes_nothing_gives_way_to_a_load(start, tiny):
    """vLLM asks again at once: without that, thousands of times, with Python's lock."""
    engine = tiny(start(TIERS.format(1024)))
    assert engine.run(Ask("a", words(1, 40))) == 0
    engine.settle()
    ask = Ask("b", words(1, 40))
    found = engine.match(ask)
    begun = threading.Event()
    for worker in engine.workers:
        copy = worker._copy

        def slow(*arguments, copy=copy):
            begun.set()
            time.sleep(0.1)
            copy(*arguments)

        worker._copy = slow
    steps = 0
    step = engine.step

    def counted(*arguments):
        nonlocal steps
        steps += 1
        return step(*arguments)

    engine.step = counted
    engine.admit(ask, found)
    assert begun.is_set() and 1 < steps <= 110  # of a millisecond or more, while it is copied
    engine.check(ask, found)
    engine.step = step
    for idle, waits in ((True, 1), (False, 0)):  # with something to compute nobody waits
        for worker in engine.workers:
            waited = []
            worker._copied.wait = waited.append
            worker.begin(Orders(idle=idle))
            worker.give_way()
            assert len(waited) == waits
            del worker._copied.wait
    engine.step([(ask, 1)])
    engine.finish(ask)


def test_two_engines_share_byte_for_byte(start, tiny):
    daemon = start(TIERS.format(1024))
    one, two = tiny(daemon), tiny(daemon)
    prompts = [words(i, count) for i, count in enumerate((3, 4, 5, 11, 12, 13, 40, 77))]
    for i, prompt in enumerate(prompts):
        assert one.run(Ask(f"a{i}", prompt)) == 0
    one.settle()
    for i, prompt in enumerate(prompts):
        expected = min(len(prompt) // 4 * 4, len(prompt) - 1) if len(prompt) >= 4 else 0
        assert two.run(Ask(f"b{i}", prompt)) == expected
    two.settle()
    counts = two.scheduler.counted()
    assert counts["queries"] == 7 and counts["failed_loads"] == 0
    assert counts["loaded_tokens"] == counts["hit_tokens"] > 0
    with kvkeep.connect(daemon.target) as client:
        assert sequences(client) == 0


def test_engines_that_cut_blocks_otherwise_do_not_get_in_each_others_way(start, tiny):
    daemon = start(TIERS.format(1024))
    prompt = words(1, 24)
    for block_tokens in (BLOCK, 3):
        engine = tiny(daemon, block_tokens=block_tokens)
        assert engine.run(Ask("a", prompt)) == 0
        engine.settle()
        assert engine.run(Ask("b", prompt)) == 23


def test_salts_and_adapters_are_kept_apart(start, tiny, tmp_path):
    daemon = start(TIERS.format(1024))
    engine = tiny(daemon)
    prompt = words(1, 24)
    (tmp_path / "weights").write_bytes(b"w")
    ways = [{}, {"salt": "x"}, {"salt": "y"}, {"adapter": ("x", 1, str(tmp_path), False)},
            {"adapter": ("x", 2, str(tmp_path), False)}]
    for i, way in enumerate(ways):
        assert engine.run(Ask(f"a{i}", prompt, **way)) == 0
        engine.settle()
    for i, way in enumerate(ways):
        assert engine.run(Ask(f"b{i}", prompt, **way)) == 23
        engine.settle()
    (tmp_path / "weights").write_bytes(b"changed")  # under the engine: not cached any more
    assert engine.run(Ask("c", prompt, **ways[-1])) == 0


def test_what_is_decoded_is_saved_as_it_fills(start, tiny):
    engine = tiny(start(TIERS.format(1024)))
    ask = Ask("a", words(1, 10))
    engine.prefill(ask)
    engine.step([(ask, 10)])
    for token in words(2, 23):
        ask.tokens.append(token)
        engine.step([(ask, 1)])
    engine.finish(ask)  # 33 computed: the last full block may just have been asked for
    engine.settle()
    assert engine.scheduler.counted()["saved_tokens"] == 32
    assert engine.run(Ask("b", ask.tokens[:33])) == 32


def test_a_preempted_request_comes_back_to_what_it_had(start, tiny):
    daemon = start(TIERS.format(1024))
    engine = tiny(daemon)
    ask = Ask("a", words(1, 30))
    engine.prefill(ask)
    engine.step([(ask, 18)])
    ask.computed, ask.again = 0, True
    engine.step(preempted=["a"])
    engine.free += engine.tables.pop("a")
    engine.settle()
    assert engine.prefill(ask) == 16
    engine.check(ask, 16)
    engine.step([(ask, 14)])
    engine.finish(ask)
    engine.settle()
    counts = engine.scheduler.counted()
    assert (counts["queries"], counts["hit_tokens"], counts["saved_tokens"]) == (1, 0, 28)
    with kvkeep.connect(daemon.target) as client:
        stats = client.admin.GetStats(pb.GetStatsRequest(), metadata=client.metadata).stats
    counted = {stat.name.decode(): stat.value for stat in stats}
    assert counted["kvkeep_lookup_total"] == 1 and counted["kvkeep_lookup_retries_total"] == 1


def test_a_preempted_request_that_is_asked_for_at_once_finds_what_it_had(start, tiny):
    """Its blocks are sealed on a thread of ours: the next look-up comes after that."""
    engine = tiny(start(TIERS.format(1024)))
    seal = engine.scheduler._seal

    def slow(tracked):
        time.sleep(0.3)
        seal(tracked)

    engine.scheduler._seal = slow
    ask = Ask("a", words(1, 30))
    engine.prefill(ask)
    engine.step([(ask, 18)])
    ask.computed, ask.again = 0, True
    engine.step(preempted=["a"])
    engine.free += engine.tables.pop("a")
    assert engine.prefill(ask) == 16
    engine.check(ask, 16)
    engine.finish(ask)
    engine.settle()
    assert not engine.scheduler._unsealed


def test_a_preemption_saves_what_has_a_place(start, tiny):
    """A block filled in the last step, whose place came since: it is saved before others get
    vLLM's block."""
    engine = tiny(start(TIERS.format(1024)))
    ask = Ask("a", words(1, 10))
    engine.prefill(ask)
    engine.step([(ask, 10)])
    for token in words(2, 2):
        ask.tokens.append(token)
        engine.step([(ask, 1)])  # the last one fills a block, and asks for its place
    tracked = engine.scheduler._tracked["a"]
    wait(lambda: tracked.length == 12 and not tracked.growing)
    ask.computed, ask.again = 0, True
    engine.step(preempted=["a"])
    engine.settle()
    assert engine.scheduler.counted()["saved_tokens"] == 12


def test_a_block_is_sealed_when_all_ranks_have_it(start, tiny):
    engine = tiny(start(TIERS.format(1024)))
    ask = Ask("a", words(1, 10))
    engine.prefill(ask)
    engine.step([(ask, 10)], reporting=[1])
    time.sleep(0.1)
    assert engine.scheduler.counted()["saved_tokens"] == 0
    engine.scheduler.finished("a", 10, engine.tables["a"])  # and it waits for them, once ended
    engine.step(reporting=[])
    time.sleep(0.1)
    assert engine.scheduler.counted()["saved_tokens"] == 0
    engine.step()
    engine.settle()
    assert engine.scheduler.counted()["saved_tokens"] == 8


def test_what_was_prefilled_elsewhere_is_waited_for(start, tiny):
    """The prefilling engine has answered, and is only just sealing: the decoding one waits for as
    many tokens as it was told of, and not for ever."""
    daemon = start(TIERS.format(1024))
    first, second = tiny(daemon), tiny(daemon, handoff_wait_ms=20_000)
    prompt = words(1, 26)
    ask = Ask("a", prompt)
    first.prefill(ask)
    first.step([(ask, 26)], reporting=[1])
    ask.tokens.append(3)
    assert first.scheduler.hands_on("a", 26) == 24
    assert first.scheduler.hands_on("b", 26) == 0
    told, untold = Ask("b", prompt, awaited=24), Ask("c", prompt)
    assert second.match(untold) == 0  # as it is now
    tracked = None
    while tracked is None or tracked.looks < 3:
        assert second.scheduler.match(told.view(), 0) is None
        tracked = second.scheduler._tracked["b"]
    first.step()
    assert second.match(told) == 24
    object.__setattr__(second.settings, "handoff_wait_ms", 50)
    assert second.match(Ask("d", words(2, 26), awaited=24)) == 0  # it never comes
    assert second.match(Ask("e", prompt, awaited=999)) == 24  # nor more than there is


class Windowed(Tiny):
    """Lets go of what its windows do not see: block 0 stands in its place, and holds nothing."""

    NULL_BLOCK = 0

    def drop(self, ask, count):
        assert 0 not in self.tables[ask.name]
        self.tables[ask.name][:count] = [0] * count


@pytest.fixture
def windowed(start):
    engines = []

    def begin(daemon, **settings):
        engines.append(Windowed(daemon.target, **settings))
        engines[-1].free.remove(0)
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


def test_what_an_engine_has_let_go_of_is_not_saved(start, windowed, tiny):
    """It had the prefix in its own cache, but for what no query sees; the daemon did not. Once such
    blocks were saved, shorter prompts hit them."""
    daemon = start(TIERS.format(1024))
    engine, prompt = windowed(daemon), words(1, 24)
    ask = Ask("a", prompt)
    assert engine.match(ask, local=12) == 0
    engine.admit(ask, 0, local=12)
    engine.drop(ask, 1)
    ask.computed = 12
    engine.step([(ask, 12)])
    ask.tokens.append(3)
    assert not engine.scheduler.finished("a", 24, engine.tables["a"])
    engine.settle()
    assert engine.scheduler.counted()["saved_tokens"] == 0
    assert tiny(daemon).match(Ask("b", prompt)) == 0


def test_nothing_is_loaded_where_an_engine_keeps_no_block(start, windowed, tiny):
    daemon = start(TIERS.format(1024))
    engine, prompt = windowed(daemon), words(1, 24)
    engine.free.remove(63)  # numpy's block -1
    tiny(daemon).run(Ask("a", prompt))
    for broken in (False, True):
        ask = Ask("b", prompt)
        while engine.match(ask) != 23:
            engine.scheduler.finished("b", 0, [])
        engine.tables["b"] = [0, 0] + [engine.free.pop() for _ in range(4)]
        engine.scheduler.allocated("b", engine.tables["b"], 23)
        for worker in engine.workers if broken else ():
            worker._copy = None  # fails
        engine.received.pop("b", None)
        wait(lambda: engine.step() and engine.received.get("b", 0) == RANKS)
        assert not any(memory[[0, 63]].any() for rank in engine.memories for memory in rank)
        if broken:
            assert engine.failed == set(engine.tables["b"][2:4])
            return
        for position in range(12, 23):
            block = engine.tables["b"][position // ENGINE_BLOCK]
            for rank in range(RANKS):
                for layer, view in enumerate(engine.layers[rank]):
                    assert (view.keys[block, :, position % ENGINE_BLOCK] ==
                            engine.value(position, prompt[position], layer, rank)).all()
        engine.scheduler.finished("b", 0, engine.tables["b"])


def test_saves_end_before_windows_let_go(start, windowed):
    """Where saves are late, each step first waits for those of before: it may give their blocks to
    others. And a preempted request's blocks are not read once it has lost them."""
    daemon = start(TIERS.format(1024))
    engine = windowed(daemon)
    ask = Ask("a", words(1, 30))
    engine.prefill(ask)
    engine.step([(ask, 10)], reporting=[1])
    assert engine.step([(ask, 10)], reporting=[1]).preempted == []
    model = engine.scheduler._model
    engine.scheduler._model = dataclasses.replace(model, late_saves=True)
    assert engine.scheduler.step({}, (), list).preempted == ["a"]
    engine.scheduler._tracked["a"].bound = 24
    assert not engine.scheduler.step({}, ["a"], list).early_saves


def test_a_rank_that_cannot_load_or_save_is_believed(start, tiny):
    engine = tiny(start(TIERS.format(1024)))
    prompt = words(1, 24)
    engine.run(Ask("a", prompt))
    engine.settle()

    def broken(*_, **__):
        raise OSError("broken by a test")

    engine.workers[1]._copy = broken
    ask = Ask("b", prompt)
    assert engine.prefill(ask) == 23
    assert engine.failed == set(engine.tables["b"][:4])
    ask.computed = 0
    assert engine.scheduler.match(ask.view(), 0) == 0  # not again
    engine.step([(ask, 24)])
    engine.finish(ask)
    other = Ask("c", words(2, 24))
    engine.prefill(other)
    engine.step([(other, 24)])
    engine.finish(other)
    engine.settle()
    counts = engine.scheduler.counted()
    assert (counts["failed_loads"], counts["saved_tokens"]) == (1, 24)
    del engine.workers[1]._copy
    engine.failed.clear()
    assert engine.run(Ask("d", words(2, 24))) == 0
    assert engine.run(Ask("e", prompt)) == 23


def test_a_slot_that_is_another_blocks_now_is_not_believed(start, tiny):
    engine = tiny(start(TIERS.format(1024)))
    prompt = words(1, 24)
    engine.run(Ask("a", prompt))
    engine.settle()
    ask = Ask("b", prompt)
    assert engine.match(ask) == 23
    tracked = engine.scheduler._tracked["b"]
    tier, slot, generation = tracked.rows[3]
    tracked.rows[3] = (tier, slot, generation + 1)
    engine.admit(ask, 23)
    assert engine.failed == set(engine.tables["b"][:4])


def test_a_finished_request_is_let_go_where_there_is_no_room(start, tiny):
    daemon = start(TIERS.format(16))
    with kvkeep.connect(daemon.target) as client, client.session() as other:
        engine = tiny(daemon)
        ask = Ask("a", words(1, 10))
        engine.prefill(ask)
        engine.step([(ask, 10)])
        space = client.open_space(FACTS.identity(), [group()], block_tokens=BLOCK,
                                  tensor_shards=RANKS)
        room = client.server_info().host_bytes // space.block_bytes[0]
        with other.open_sequence(space, words(9, (room - 3) * BLOCK)):
            ask.tokens += words(2, 6)
            ask.computed = 16
            engine.finish(ask)
            engine.settle()
        counts = engine.scheduler.counted()
        assert (counts["saved_tokens"], counts["refused"]) == (8, 1)


def test_a_full_tier_serves_hits_and_saves_nothing(start, tiny):
    """4 KiB a block of both ranks: room for 16."""
    daemon = start(TIERS.format(16))
    with kvkeep.connect(daemon.target) as client, client.session() as other:
        engine = tiny(daemon)
        known = words(1, 16)
        engine.run(Ask("a", known))
        engine.settle()
        space = client.open_space(FACTS.identity(), [group()], block_tokens=BLOCK,
                                  tensor_shards=RANKS)
        room = client.server_info().host_bytes // space.block_bytes[0]
        with other.open_sequence(space, words(9, (room - 4) * BLOCK)):
            assert engine.run(Ask("b", known + words(2, 40))) == 16
            engine.settle()
            assert engine.scheduler.counted()["refused"] == 1
        assert engine.run(Ask("c", known + words(3, 40))) == 16
        engine.settle()
        assert engine.run(Ask("d", known + words(3, 40))) == 55
        engine.settle()


def test_a_reset_forgets_what_runs_too(start, tiny):
    daemon = start(TIERS.format(1024))
    engine = tiny(daemon)
    prompt = words(1, 24)
    engine.run(Ask("a", prompt))
    engine.settle()
    running = Ask("b", words(2, 24))
    engine.prefill(running)
    engine.step([(running, 12)])
    assert engine.scheduler.reset()
    engine.step([(running, 12)])
    engine.finish(running)
    engine.settle()
    assert engine.run(Ask("c", prompt)) == 0
    assert engine.run(Ask("d", words(2, 24))) == 0  # computed in part before the reset
    engine.settle()
    assert engine.run(Ask("e", prompt)) == 23
    engine.settle()
    held = Ask("f", prompt)
    assert engine.match(held) == 23
    assert engine.scheduler.reset()
    assert engine.scheduler.match(held.view(), 0) == 0
    assert not engine.scheduler.finished("f", 0, [])


def test_an_answer_from_before_a_reset_is_not_used(start, tiny):
    engine = tiny(start(TIERS.format(1024)))
    prompt = words(1, 24)
    engine.run(Ask("a", prompt))
    engine.settle()
    hold, answered, go = engine.scheduler._hold, threading.Event(), threading.Event()

    def late(*arguments):
        answer = hold(*arguments)
        answered.set()
        assert go.wait(20)
        return answer

    engine.scheduler._hold = late
    ask = Ask("b", prompt)
    assert engine.scheduler.match(ask.view(), 0) is None
    assert answered.wait(20)
    assert engine.scheduler.reset()
    go.set()
    assert engine.match(ask) == 0


def test_a_reset_without_a_daemon_is_made_up_for(start, tiny):
    """Memory that outlives the daemon is not here; another engine could have it, so nothing is
    looked up before the daemon was told."""
    daemon = start(TIERS.format(1024))
    engine = tiny(daemon, reconnect_ms=20)
    prompt = words(1, 24)
    engine.run(Ask("a", prompt))
    engine.settle()
    daemon.kill()
    wait(lambda: not engine.scheduler.connected)
    assert not engine.scheduler.reset()
    daemon.start()
    wait(lambda: engine.scheduler.connected)
    assert not engine.scheduler._must_reset
    assert engine.run(Ask("b", prompt)) == 0


def wait(check):
    end = time.monotonic() + 20
    while not check():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_daemon_that_goes_takes_nothing_with_it(start, tiny):
    daemon = start(TIERS.format(1024))
    engine = tiny(daemon, reconnect_ms=20)
    prompt = words(1, 24)
    engine.run(Ask("a", prompt))
    engine.settle()
    # It goes while a load is ordered, and while a request runs.
    running = Ask("b", words(2, 30))
    engine.prefill(running)
    engine.step([(running, 10)])
    hit = Ask("c", prompt)
    assert engine.match(hit) == 23
    daemon.kill()
    wait(lambda: not engine.scheduler.connected)
    for worker in engine.workers:
        wait(lambda worker=worker: worker._link.session.ended.is_set())
    engine.admit(hit, 23)
    assert engine.failed  # told, so that these blocks are computed
    hit.computed = 0
    assert engine.scheduler.match(hit.view(), 0) == 0
    engine.step([(hit, 24), (running, 20)])
    engine.finish(hit)
    engine.finish(running)
    assert engine.run(Ask("d", prompt)) == 0  # without: computed
    daemon.start()
    wait(lambda: engine.scheduler.connected)
    engine.failed.clear()
    assert engine.run(Ask("e", prompt)) == 0  # this daemon keeps nothing
    engine.settle()
    assert engine.run(Ask("f", prompt)) == 23
    engine.settle()
    assert engine.scheduler.counted()["lost"] == 1


def test_an_abort_during_a_load_holds_nothing(start, tiny):
    daemon = start(TIERS.format(1024))
    engine = tiny(daemon)
    prompt = words(1, 24)
    engine.run(Ask("a", prompt))
    engine.settle()
    for i in range(20):
        ask = Ask(f"b{i}", prompt)
        assert engine.match(ask) == 23
        engine.tables[ask.name] = [engine.free.pop() for _ in range(8)]
        engine.scheduler.allocated(ask.name, engine.tables[ask.name], 23)
        engine.step()
        assert not engine.scheduler.finished(ask.name, 0, engine.tables[ask.name])
        wait(lambda ask=ask: engine.step() and engine.received.get(ask.name, 0) == RANKS)
        engine.free += engine.tables.pop(ask.name)
    engine.settle()
    with kvkeep.connect(daemon.target) as client:
        assert sequences(client) == 0


def stop(daemon):
    """Stopped when this returns: all of its threads, which the signal reaches one after another."""
    os.kill(daemon.process.pid, signal.SIGSTOP)
    tasks = pathlib.Path(f"/proc/{daemon.process.pid}/task")
    wait(lambda: all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
                     for task in tasks.iterdir()))


def test_nothing_waits_for_a_daemon_that_does_not_answer(start, tiny):
    daemon = start(TIERS.format(1024))
    engine = tiny(daemon, call_timeout_s=10.0)
    engine.run(Ask("a", words(1, 24)))
    engine.settle()
    stop(daemon)
    try:
        object.__setattr__(engine.settings, "lookup_wait_ms", 100)
        ask = Ask("b", words(2, 24))
        begin = time.monotonic()
        calls = 0
        while engine.scheduler.match(ask.view(), 0) is None:
            calls += 1
            time.sleep(0.005)
        assert 0.09 < time.monotonic() - begin < 5 and calls > 5
        assert engine.scheduler.counted()["late"] == 1
        begin = time.monotonic()
        engine.admit(ask, 0)
        engine.step([(ask, 24)])
        engine.finish(ask)
        assert time.monotonic() - begin < 5
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)


def test_tenants_never_share(start, tiny):
    daemon = start(TIERS.format(1024) + """
[tenant x]
[tenant y]
[credential a]
token = 0123456789abcdef0123456789abcdef
tenants = x
[credential b]
token = fedcba9876543210fedcba9876543210
tenants = y
""")
    one = tiny(daemon, token="0123456789abcdef0123456789abcdef")
    two = tiny(daemon, token="fedcba9876543210fedcba9876543210")
    prompt = words(1, 24)
    one.run(Ask("a", prompt))
    one.settle()
    assert two.run(Ask("b", prompt)) == 0
    assert two.run(Ask("c", prompt, salt="x")) == 0
    assert one.run(Ask("d", prompt)) == 23


@pytest.fixture
def shared_store(tmp_path):
    """[remote] of a configuration, with a server of its own behind it."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    key = tmp_path / "fleet.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    server = subprocess.Popen(["redis-server", "--port", str(port), "--bind", "127.0.0.1",
                               "--save", "", "--appendonly", "no", "--dir", str(tmp_path)],
                              stdout=subprocess.DEVNULL)
    yield f"\n[remote]\nseeds = 127.0.0.1:{port}\nkey_file = {key}\nfetch_tokens = 4\n" \
        "ask_ms = 5 s\ngeneration_ms = 10 s\n"  # the machine may be busy
    server.kill()
    server.wait(30)


def test_what_another_machine_computed_comes_from_the_shared_store(start, tiny, shared_store):
    one, two = (tiny(start(TIERS.format(1024) + shared_store), remote_wait_ms=8000)
                for _ in range(2))
    prompts = [words(i, 41) for i in range(3)]
    for round in "ab":  # a block is sent when it is used a second time
        for i, prompt in enumerate(prompts):
            assert one.run(Ask(f"{round}{i}", prompt)) == (40 if round == "b" else 0)
        one.settle()

    def sent():
        with kvkeep.connect(one.settings.target) as client:
            stats = client.admin.GetStats(pb.GetStatsRequest(), metadata=client.metadata).stats
        return {stat.name.decode(): stat.value for stat in stats}["kvkeep_remote_sent_blocks_total"]

    def out():
        with kvkeep.connect(two.settings.target) as client:
            return client.admin.GetOccupancy(pb.GetOccupancyRequest(),
                                             metadata=client.metadata).remote.spaces_out

    wait(lambda: sent() == 30 and out() == 0)
    for i, prompt in enumerate(prompts):
        assert two.run(Ask(f"c{i}", prompt)) == 40  # run() compares what was loaded
    two.settle()
    counts = two.scheduler.counted()
    assert counts["loaded_tokens"] == 120 and counts["queries"] == 3
    assert two.run(Ask("d", words(9, 41))) == 0  # what nobody has is computed


def test_a_prompt_is_handed_over_through_the_shared_store(start, tiny, shared_store):
    """Prefilled on one machine and decoded on another, which asks before it is there."""
    tail = TIERS.format(1024) + shared_store + "admit_uses = 1\n"  # else a second use is waited for
    one, two = (tiny(start(tail), handoff_wait_ms=60_000, remote_wait_ms=8000) for _ in range(2))
    told = Ask("b", words(1, 41), awaited=40)
    tracked = None
    while tracked is None or tracked.looks < 3:
        assert two.scheduler.match(told.view(), 0) is None
        tracked = two.scheduler._tracked.get("b")
        two.step()  # the ranks join
    one.run(Ask("a", words(1, 41)))
    one.settle()
    end = time.monotonic() + 60
    while (found := two.scheduler.match(told.view(), 0)) is None:
        assert time.monotonic() < end
        one.step()
        time.sleep(0.005)
    assert found == 40


def test_a_shared_store_that_is_away_is_not_waited_for_long(start, tiny, shared_store):
    gone = shared_store.replace(shared_store.split(":")[1].split("\n")[0], "1")
    engine = tiny(start(TIERS.format(1024) + gone), remote_wait_ms=300)
    begin = time.monotonic()
    assert engine.run(Ask("a", words(1, 41))) == 0
    assert time.monotonic() - begin < 5
    engine.settle()
    assert engine.run(Ask("b", words(1, 41))) == 40
