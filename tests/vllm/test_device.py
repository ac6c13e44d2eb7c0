"""A cache on a GPU: kvkeep.vllm_device and what its late saves ask of both halves. Needs torch, no
vLLM and no GPU: late_device stands in for one, with streams that run late, each on its own."""

import dataclasses
import pathlib
import random
import sys
import time
import types

import numpy as np
import pytest
import torch
from conftest import Daemon
from late_device import LateStream, LateStreams

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "python"))

import test_vllm_parts as parts  # noqa: E402
from kvkeep import vllm_device, vllm_worker  # noqa: E402
from kvkeep.errors import KvkeepError  # noqa: E402
from kvkeep.vllm_blocks import (  # noqa: E402
    ORDER_PLAIN, ORDER_SIDE_BY_SIDE, ORDER_TRANSPOSED, EngineLayer)
from kvkeep.vllm_orders import NO_BLOCK, Copy  # noqa: E402
from test_vllm_parts import wait  # noqa: E402
from tiny_engine import (  # noqa: E402
    BLOCK, ENGINE_BLOCK, HEADS, SIZE, Ask, Tiny, words)


# ------------------------------------------------------------- one lane, against plain loops

class Slots:
    """Slots of one group as bytes; generations may be changed by tests."""

    def __init__(self, count, size_bytes, seed):
        self.bytes = np.random.default_rng(seed).integers(0, 256, (count, size_bytes + 24)).astype(
            np.uint8)
        self.generations = np.arange(count) + 7

    def slot(self, slot):
        return self.bytes[slot]

    def generation(self, slot):
        return int(self.generations[slot])


def random_cache(source, layers, blocks, heads, tokens, size, order, fused):
    """Layers as vLLM 0.32 hands them out, [block][head][token][2 x size] by any steps, and an
    EngineLayer of each that reads the same memory."""
    count = layers * blocks * heads * tokens * 2 * size
    memory = torch.from_numpy(source.integers(-30000, 30000, count).astype(np.int16))
    if order == ORDER_SIDE_BY_SIDE and source.random() < 0.5:  # tokens before heads in memory
        lying = memory.view(layers, blocks, tokens, heads, 2 * size).transpose(2, 3)
    else:
        lying = memory.view(layers, blocks, heads, tokens, 2 * size)
    if fused:
        return [lying[i] for i in range(layers)]
    return [lying[i].clone(memory_format=torch.preserve_format) for i in range(layers)]


def at(cache, order, block, head, token, dim, value, tokens, size):
    """One value by the definition of the orders."""
    if order == ORDER_SIDE_BY_SIDE:
        return cache[block, head, token, size * value + dim]
    place = token * size + dim if order == ORDER_PLAIN else dim * tokens + token
    return cache[block, head].reshape(-1)[tokens * size * value + place]


@pytest.mark.parametrize("seed", range(40))
def test_a_lane_against_plain_loops(seed):
    source = np.random.default_rng(seed)
    layers, heads, size = (int(source.integers(1, top)) for top in (4, 4, 6))
    block, kernel = int(source.integers(1, 9)), int(source.integers(1, 7))
    ratio = int(source.integers(1, 4))
    engine_block = kernel * ratio
    order_k, order_v = (ORDER_SIDE_BY_SIDE,) * 2 if seed % 2 else \
        [str(source.choice([ORDER_PLAIN, ORDER_TRANSPOSED])) for _ in range(2)]
    end = int(source.integers(1, 60))
    first = int(source.integers(0, end))
    engine_count = -(-end // engine_block) - first // engine_block
    numbers = source.permutation(engine_count + 3)[:engine_count]
    cache = random_cache(source, layers, (engine_count + 3) * ratio, heads, kernel, size,
                         order_k, bool(source.integers(2)))
    group = vllm_device.paged_group(
        [vllm_device.side_view(layer, order_k, size, False) for layer in cache],
        [vllm_device.side_view(layer, order_v, size, True) for layer in cache], block)
    assert group.slot_bytes == layers * 2 * heads * block * size * 2
    slot_count = -(-end // block) - first // block
    rows = tuple((2 + int(source.integers(2)), int(slot), int(slot) + 7)
                 for slot in source.permutation(slot_count + 2)[:slot_count])
    copy = Copy("r", 1, 1, types.SimpleNamespace(block_tokens=block), first, end, first // block,
                rows, first // engine_block, tuple(int(n) for n in numbers))
    tiers = {tier: Slots(slot_count + 2, group.slot_bytes, seed + tier) for tier in (2, 3)}
    streams = LateStreams(0.001)
    lane = vllm_device.Lane(vllm_device.DeviceCache(
        streams, (group,), engine_block, staging_bytes=int(source.integers(1, 3)) *
        group.slot_bytes))

    def places():
        """(slot's bytes place, cache's place) of every value of the copy, one by one."""
        for position in range(first, end):
            tier, slot, _ = rows[position // block - first // block]
            token = numbers[position // engine_block - first // engine_block] * engine_block + \
                position % engine_block
            for layer in range(layers):
                for value in range(2):
                    for head in range(heads):
                        for dim in range(size):
                            i = (((layer * 2 + value) * heads + head) * block +
                                 position % block) * size + dim
                            yield tier, slot, i, layer, (token // kernel, head, token % kernel,
                                                         dim, value)

    def read(layer, place):
        order = order_v if place[4] else order_k
        return int(at(cache[layer], order, *place, kernel, size))

    expected = {tier: slots.bytes.copy() for tier, slots in tiers.items()}
    for tier, slot, i, layer, place in places():
        expected[tier][slot, :group.slot_bytes].view(np.int16)[i] = read(layer, place)
    lane.save(copy, 0, tiers.__getitem__, streams.mark())
    for tier, slots in tiers.items():
        assert np.array_equal(slots.bytes, expected[tier])  # and nothing else was written
    # Back, into a cache of other bytes.
    for slots in tiers.values():
        slots.bytes[:] = source.integers(0, 256, slots.bytes.shape)
    before = [layer.clone() for layer in cache]
    wanted = {}
    for tier, slot, i, layer, place in places():
        wanted[layer, place] = tiers[tier].bytes[slot, :group.slot_bytes].view(np.int16)[i]
    lane.load(copy, 0, tiers.__getitem__, streams.mark())
    for (layer, place), value in wanted.items():
        assert read(layer, place) == value
    changed = sum(int((now != then).sum()) for now, then in zip(cache, before))
    assert changed <= len(wanted)
    # Where the engine keeps no block nothing is loaded.
    for now, then in zip(cache, before):
        now.copy_(then)
    gone = {int(number) for number in numbers if source.random() < 0.5}
    lane.load(dataclasses.replace(copy, engine_blocks=tuple(
        NO_BLOCK if int(number) in gone else int(number) for number in numbers)), 0,
        tiers.__getitem__, streams.mark())
    for (layer, place), value in wanted.items():
        if place[0] // ratio in gone:
            value = at(before[layer], order_v if place[4] else order_k, *place, kernel, size)
        assert read(layer, place) == value


@pytest.mark.parametrize("seed", range(5))
def test_raw_blocks_are_copied_whole(seed):
    source = np.random.default_rng(seed)
    layers = [torch.from_numpy(source.integers(0, 256, (6, size)).astype(np.uint8))
              for size in (5, 16, 3)]
    group = vllm_device.raw_group(layers)
    streams = LateStreams(0.001)
    lane = vllm_device.Lane(vllm_device.DeviceCache(streams, (group,), 16, staging_bytes=1))
    slots = Slots(4, group.slot_bytes, seed)
    copy = Copy("r", 1, 1, types.SimpleNamespace(block_tokens=16), 16, 64, 1,
                ((2, 3, 10), (2, 0, 7), (2, 2, 9)), 1, (5, 0, 2))
    lane.save(copy, 0, lambda tier: slots, streams.mark())
    for slot, block in ((3, 5), (0, 0), (2, 2)):
        assert slots.bytes[slot, :24].tobytes() == b"".join(
            layer[block].numpy().tobytes() for layer in layers)
    whole = [layer.clone() for layer in layers]
    for layer in layers:
        layer.zero_()
    lane.load(copy, 0, lambda tier: slots, streams.mark())
    for now, then in zip(layers, whole):
        assert torch.equal(now[[0, 2, 5]], then[[0, 2, 5]]) and not now[[1, 3, 4]].any()


def test_layers_at_even_steps_are_one_launch():
    whole = torch.zeros((5, 4, 2, 3, 8), dtype=torch.int16)
    keys, values = ([part[i, ..., side:side + 4] for i in range(5)]
                    for part, side in ((whole, 0), (whole, 4)))
    assert len(vllm_device.paged_group(keys, values, 3).parts) == 2
    del keys[2], values[2]  # a gap
    assert [int(part.cache.shape[0]) for part in
            vllm_device.paged_group(keys, values, 3).parts] == [2, 2, 2, 2]
    apart = [torch.zeros((4, 2, 3, 4), dtype=torch.int16) for _ in range(3)]
    assert len(vllm_device.paged_group(apart, apart, 3).parts) == 6


def test_a_failed_lane_works_on():
    """A device error is raised once, in the copy that it hit; nothing of the lane stays busy."""
    cache = [torch.zeros((8, 2, 4, 4), dtype=torch.int16)]
    group = vllm_device.paged_group([cache[0][..., :2]], [cache[0][..., 2:]], 4)
    streams = LateStreams(0.001)
    lane = vllm_device.Lane(vllm_device.DeviceCache(streams, (group,), 4, staging_bytes=1))
    slots = Slots(8, group.slot_bytes, 1)
    copy = Copy("r", 1, 1, types.SimpleNamespace(block_tokens=4), 0, 32, 0,
                tuple((2, i, i + 7) for i in range(8)), 0, tuple(range(8)))
    for call in (lane.save, lane.load):
        for nth in range(1, 9):
            streams.given, streams.fail_at = 0, nth
            with pytest.raises(RuntimeError, match="made by a test"):
                call(copy, 0, lambda tier: slots, streams.mark())
            slots.generations[nth - 1] += 1  # a slot that is another's is the copy's failure too
            streams.fail_at = None
            with pytest.raises(KvkeepError, match="another block's"):
                call(copy, 0, lambda tier: slots, streams.mark())
            slots.generations[nth - 1] -= 1
        call(copy, 0, lambda tier: slots, streams.mark())
        assert len(lane._free) == vllm_device.CHUNKS


# ------------------------------------------------------------- both halves, over a real daemon

class LateTiny(Tiny):
    """The toy engine with its cache on such a GPU: it computes on a stream that runs late too, and
    gives blocks to others as soon as it is told that it may."""

    ORDERS = (ORDER_SIDE_BY_SIDE, ORDER_SIDE_BY_SIDE)
    LATE_SAVES = True

    def __init__(self, *arguments, **settings):
        self.computing = LateStream(1, 0.0003)
        self.streams = []
        super().__init__(*arguments, **settings)

    def make_worker(self, rank):
        cache = [torch.from_numpy(memory.view(np.int16)).view(-1, HEADS, ENGINE_BLOCK, 2 * SIZE)
                 for memory in self.memories[rank]]
        group = vllm_device.paged_group(
            [vllm_device.side_view(layer, self.ORDERS[0], SIZE, False) for layer in cache],
            [vllm_device.side_view(layer, self.ORDERS[1], SIZE, True) for layer in cache],
            self.settings.block_tokens)
        streams = LateStreams(0.02, self.computing)
        self.streams.append(streams)
        return vllm_worker.WorkerSide(
            self.settings, rank, ENGINE_BLOCK, [], [],
            vllm_device.DeviceCache(streams, (group,), ENGINE_BLOCK, staging_bytes=1))

    def write(self, view, block, place, value):
        self.computing.give(lambda: Tiny.write(self, view, block, place, value))

    def check(self, ask, end):
        assert self.computing.give(lambda: None).wait(30)
        super().check(ask, end)


@pytest.fixture
def start(tmp_path):
    daemons = []

    def begin(config):
        daemons.append(Daemon(tmp_path / str(len(daemons)), config))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.stop()


@pytest.fixture
def tiny(start):
    engines = []

    def begin(daemon, **settings):
        engines.append(LateTiny(daemon.target, **settings))
        return engines[-1]

    yield begin
    for engine in engines:
        engine.close()


# What holds of a cache in host memory holds of one on a GPU.
test_two_engines_share = parts.test_two_engines_share_byte_for_byte
test_salts_and_adapters_are_kept_apart = parts.test_salts_and_adapters_are_kept_apart
test_what_is_decoded_is_saved_as_it_fills = parts.test_what_is_decoded_is_saved_as_it_fills
test_a_preempted_request_comes_back = parts.test_a_preempted_request_comes_back_to_what_it_had
test_a_preemption_saves_what_has_a_place = parts.test_a_preemption_saves_what_has_a_place
test_a_rank_that_cannot_load_or_save = parts.test_a_rank_that_cannot_load_or_save_is_believed
test_a_slot_that_is_anothers = parts.test_a_slot_that_is_another_blocks_now_is_not_believed
test_a_full_tier_serves_hits = parts.test_a_full_tier_serves_hits_and_saves_nothing
test_a_reset_forgets_what_runs_too = parts.test_a_reset_forgets_what_runs_too
test_a_daemon_that_goes = parts.test_a_daemon_that_goes_takes_nothing_with_it
test_an_abort_during_a_load = parts.test_an_abort_during_a_load_holds_nothing


def test_blocks_are_kept_until_no_save_reads_them(start, tiny):
    """Many short requests, each ended at once and its blocks overwritten by the next: what another
    engine loads is what was computed."""
    daemon = start(parts.TIERS.format(4096))
    engine = tiny(daemon)
    source = random.Random(3)
    prompts = [words(100 + i, source.randrange(8, 40)) for i in range(40)]
    for i, prompt in enumerate(prompts):
        assert engine.run(Ask(f"a{i}", prompt)) == 0
    engine.settle()
    other = tiny(daemon)
    for i, prompt in enumerate(prompts):
        assert other.run(Ask(f"b{i}", prompt)) == min(len(prompt) // BLOCK * BLOCK,
                                                      len(prompt) - 1)
    assert not other.failed


def test_a_step_that_takes_a_preempted_requests_blocks_waits(start, tiny):
    daemon = start(parts.TIERS.format(4096))
    engine = tiny(daemon)
    for i in range(20):
        ask = Ask(f"a{i}", words(i, 24))
        engine.prefill(ask)
        engine.step([(ask, 24)])
        ask.computed, ask.again = 0, True
        taken = engine.tables.pop(ask.name)
        engine.free += taken
        # The same step computes another request in the blocks that were taken.
        thief = Ask(f"t{i}", words(1000 + i, 24))
        engine.tables[thief.name] = [engine.free.pop() for _ in range(len(taken))]
        engine.step([(thief, 24)], preempted=[ask.name])
        engine.free += engine.tables.pop(thief.name)
        engine.settle()
    other = tiny(daemon)
    hits = [other.run(Ask(f"b{i}", words(i, 24))) for i in range(20)]  # run() compares the bytes
    assert hits == [23] * 20 and not other.failed


def test_what_a_preemption_cannot_wait_for_is_not_believed(start, tiny):
    """The wait is bounded; then the block's bytes may be another request's."""
    engine = tiny(start(parts.TIERS.format(1024)), call_timeout_s=0.5)
    ask = Ask("a", words(1, 24))
    engine.prefill(ask)
    blocked = engine.computing.give(lambda: time.sleep(2))
    engine.step([(ask, 24)])
    begin = time.monotonic()
    engine.step(preempted=["a"])
    assert 0.4 < time.monotonic() - begin < 1.9 and not blocked.is_set()
    engine.settle()
    assert engine.scheduler.counted()["saved_tokens"] == 0
    assert engine.run(Ask("b", words(1, 24))) == 0


def test_a_device_error_is_a_miss(start, tiny):
    daemon = start(parts.TIERS.format(1024))
    engine = tiny(daemon)
    engine.streams[1].fail_at = 2
    assert engine.run(Ask("a", words(1, 24))) == 0
    engine.settle()
    assert engine.scheduler.counted()["saved_tokens"] == 0
    engine.streams[1].fail_at = None
    assert engine.run(Ask("b", words(1, 24))) == 0
    engine.settle()
    engine.streams[0].given, engine.streams[0].fail_at = 0, 3
    ask = Ask("c", words(1, 24))
    assert engine.prefill(ask) == 23 and engine.failed
    engine.failed.clear()
    wait(lambda: not engine.workers[0]._late_of)
    engine.finish(ask)
