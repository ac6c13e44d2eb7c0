"""Copies between a paged cache in a GPU's memory and kvkeep's mapped slots in host memory.

Three legs, each on what does it best: tokens are gathered from the paged cache into a slot's own
order by the GPU; that goes over the link in one piece, to or from page-locked memory of this
process; from there to the mapped slot the processor copies. The mapped memory itself is not
page-locked: the daemon may take pages out of a slot's file and back them anew, and a registration
would go on naming the old ones.

A lane is a stream of its own with its staging, used by one thread. Where what is copied was
computed by the engine's stream, the lane waits for an event of that stream, on the GPU; the
engine's stream never waits for a lane.

The GPU is seen through `Streams`, so that tests can put one in its place whose streams run late.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence as SequenceOf
from typing import Any, Protocol

import numpy as np
import torch

from kvkeep.errors import Code, KvkeepError
from kvkeep.memory import SlotMemory
from kvkeep.vllm_blocks import ORDER_SIDE_BY_SIDE, steps
from kvkeep.vllm_orders import NO_BLOCK, Copy

__all__ = ["CudaStreams", "DeviceCache", "Lane", "PagedGroup", "PagedPart", "Streams",
           "paged_group", "raw_group", "side_view"]

STAGING_BYTES = 32 << 20  # of a chunk; at least one slot
CHUNKS = 3                # of a lane: one is gathered, one goes over the link, one is copied
UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # values are moved, never looked into


class Streams(Protocol):
    """Streams, events and memory of one GPU."""

    def enter(self) -> None:
        """This thread works on this GPU from now on."""

    def stream(self) -> Any:
        """A new stream, of low priority."""

    def mark(self) -> Any:
        """An event behind all that the calling thread's current stream was given."""

    def run(self, stream: Any, work: Callable[[], None], after: Any = None) -> Any:
        """Have a stream do the work, behind an event; the event that it is done."""

    def wait(self, event: Any) -> None:
        """Until it has come."""

    def memory(self, size_bytes: int) -> torch.Tensor:
        """Of the GPU: u8 [size_bytes]."""

    def host(self, size_bytes: int) -> torch.Tensor:
        """Of the host, page-locked: u8 [size_bytes]."""


class CudaStreams:
    """Streams of torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def enter(self) -> None:
        torch.cuda.set_device(self.device)

    def stream(self) -> torch.cuda.Stream:
        lowest, _ = torch.cuda.Stream.priority_range()  # type: ignore[attr-defined]
        return torch.cuda.Stream(self.device, priority=lowest)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def run(self, stream: torch.cuda.Stream, work: Callable[[], None],
            after: torch.cuda.Event | None = None) -> torch.cuda.Event:
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            work()
            event = torch.cuda.Event()
            event.record(stream)
            return event

    def wait(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def memory(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def host(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


@dataclasses.dataclass(frozen=True)
class PagedPart:
    """K or V of some layers: `cache` [layer][block][head][token][dim], as it lies; and where it
    stands in a slot, in elements."""

    cache: torch.Tensor
    offset: int
    layer_step: int
    head_step: int
    token_step: int

    def staged(self, chunk: torch.Tensor, slots: int, slot_elements: int, slot_tokens: int
               ) -> torch.Tensor:
        """The same [layer][slot][head][token][dim] in a chunk of slots."""
        layers, _, heads, _, size = self.cache.shape
        return chunk.as_strided(
            (layers, slots, heads, slot_tokens, size),
            (self.layer_step, slot_elements, self.head_step, self.token_step, 1),
            chunk.storage_offset() + self.offset)


@dataclasses.dataclass(frozen=True)
class PagedGroup:
    """What a slot of one group holds, and where the engine has it. `slot_tokens` are a slot's,
    `engine_tokens` those of a block of the engine's cache as its kernel sees it, which may be a
    part of a block as the engine counts them. `whole`: blocks are copied as one token is."""

    parts: tuple[PagedPart, ...]
    slot_bytes: int
    slot_tokens: int
    engine_tokens: int
    whole: bool = False

    @property
    def unit(self) -> int:
        return int(self.parts[0].cache.element_size())


def side_view(cache: torch.Tensor, order: str | None, size: int, value: bool) -> torch.Tensor:
    """K or V of a layer, [block][head][token][dim] of integers, from a cache that is seen as
    [block][head][token][2 x size] and lies in an order of vllm_blocks."""
    assert order is not None
    cache = cache.view(UNITS[cache.element_size()])
    if order == ORDER_SIDE_BY_SIDE:  # tokens and heads may lie at any steps
        return cache[..., size:] if value else cache[..., :size]
    blocks, heads, tokens, _ = cache.shape
    begin, token, dim = steps(order, value, tokens, size)
    return cache.as_strided((blocks, heads, tokens, size), (*cache.stride()[:2], token, dim),
                            cache.storage_offset() + begin)


def paged_group(keys: SequenceOf[torch.Tensor], values: SequenceOf[torch.Tensor],
                slot_tokens: int) -> PagedGroup:
    """Of layers of one geometry: views [block][head][token][dim] of a cache, which become a slot
    [layer][K or V][head][token][dim]."""
    _, heads, engine_tokens, size = keys[0].shape
    half = heads * slot_tokens * size
    parts = []
    for side, views in enumerate((keys, values)):
        for first, stack in _stacks(views):
            parts.append(PagedPart(stack, (2 * first + side) * half, 2 * half, slot_tokens * size,
                                   size))
    return PagedGroup(tuple(parts), 2 * half * len(keys) * keys[0].element_size(), slot_tokens,
                      int(engine_tokens))


def raw_group(layers: SequenceOf[torch.Tensor]) -> PagedGroup:
    """Blocks kept as they are, u8 [block][bytes] of each layer: one after another in a slot."""
    parts = []
    at = 0
    for layer in layers:
        view = layer.view(layer.shape[0], 1, 1, layer.shape[1]).unsqueeze(0)
        parts.append(PagedPart(view, at, 0, 0, 0))
        at += int(layer.shape[1])
    return PagedGroup(tuple(parts), at, 1, 1, whole=True)


def _stacks(views: SequenceOf[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Neighbouring layers at even steps of one allocation as one view with a layer in front: what
    is one view is one launch."""
    first = 0
    while first < len(views):
        head = views[first]
        end = first + 1
        step = 0
        while end < len(views):
            view = views[end]
            alike = view.shape == head.shape and view.stride() == head.stride() and \
                view.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
            apart = view.storage_offset() - views[end - 1].storage_offset()
            if not alike or apart <= 0 or (step and apart != step):
                break
            step = apart
            end += 1
        yield first, head.as_strided((end - first, *head.shape), (step, *head.stride()),
                                     head.storage_offset())
        first = end


@dataclasses.dataclass(frozen=True)
class _Piece:
    """Slots of one chunk: their numbers, generations and, of each, the tokens [first, end)."""

    slots: tuple[tuple[int, int, int, int], ...]  # slot, generation, first token, end
    tier: int
    blocks: torch.Tensor   # i64 [tokens]: block of the cache
    offsets: torch.Tensor  # i64 [tokens]: token in it
    staged: torch.Tensor   # i64 [tokens]: slot of the chunk
    places: torch.Tensor   # i64 [tokens]: token in it


class _Chunk:
    def __init__(self, streams: Streams, size_bytes: int) -> None:
        self.device = streams.memory(size_bytes)
        self.host = streams.host(size_bytes)
        self.bytes = self.host.numpy()
        self.busy: Any = None  # an event, until which the GPU uses it


@dataclasses.dataclass(frozen=True)
class DeviceCache:
    """A rank's paged cache on a GPU: one group for each of the space's."""

    streams: Streams
    groups: tuple[PagedGroup, ...]
    engine_block_tokens: int
    staging_bytes: int = STAGING_BYTES


class Lane:
    """Copies in one direction, by one thread, which calls enter() first."""

    def __init__(self, cache: DeviceCache) -> None:
        self._streams = cache.streams
        self._groups = cache.groups
        self._engine_block_tokens = cache.engine_block_tokens
        self._stream = cache.streams.stream()
        least = max(group.slot_bytes for group in cache.groups)
        self._size = -(-max(cache.staging_bytes, least) // 4) * 4
        self._free = collections.deque(_Chunk(cache.streams, self._size) for _ in range(CHUNKS))

    def enter(self) -> None:
        self._streams.enter()

    def save(self, copy: Copy, group: int, memory: Callable[[int], SlotMemory], after: Any) -> None:
        """From the cache into slots, behind the event. Returns when the slots have it; raises where
        a slot is not the block's any more."""
        plan = self._groups[group]
        under_way: collections.deque[tuple[_Piece, _Chunk]] = collections.deque()

        def land() -> None:
            piece, chunk = under_way.popleft()
            try:
                self._streams.wait(chunk.busy)
                for i, (slot, generation, first, end) in enumerate(piece.slots):
                    slots = memory(piece.tier)
                    _put(plan, slots.slot(slot), chunk.bytes[i * plan.slot_bytes:], first, end)
                    _check(slots, slot, generation)
            finally:
                self._free.append(chunk)

        try:
            for piece in self._pieces(plan, copy):
                if not self._free:
                    land()
                chunk = self._free.popleft()
                under_way.append((piece, chunk))
                chunk.busy = self._streams.run(
                    self._stream, functools.partial(self._gather, plan, piece, chunk), after)
            while under_way:
                land()
        finally:
            self._settle(under_way)

    def load(self, copy: Copy, group: int, memory: Callable[[int], SlotMemory], after: Any) -> None:
        """From slots into the cache, behind the event. Returns when the cache has it."""
        plan = self._groups[group]
        under_way: collections.deque[tuple[_Piece, _Chunk]] = collections.deque()
        try:
            for piece in self._pieces(plan, copy):
                if not self._free:
                    _, done = under_way.popleft()
                    self._free.append(done)
                    self._streams.wait(done.busy)
                chunk = self._free.popleft()
                under_way.append((piece, chunk))
                chunk.busy = None
                for i, (slot, generation, _, _) in enumerate(piece.slots):
                    slots = memory(piece.tier)
                    at = i * plan.slot_bytes
                    chunk.bytes[at:at + plan.slot_bytes] = slots.slot(slot)[:plan.slot_bytes]
                    _check(slots, slot, generation)
                chunk.busy = self._streams.run(
                    self._stream, functools.partial(self._scatter, plan, piece, chunk), after)
        finally:
            self._settle(under_way)

    def _settle(self, under_way: collections.deque[tuple[_Piece, _Chunk]]) -> None:
        """All that the GPU was given has ended, and every chunk is free."""
        failure: BaseException | None = None
        while under_way:
            _, chunk = under_way.popleft()
            self._free.append(chunk)
            try:
                if chunk.busy is not None:
                    self._streams.wait(chunk.busy)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _gather(self, plan: PagedGroup, piece: _Piece, chunk: _Chunk) -> None:
        count = len(piece.slots)
        size = count * plan.slot_bytes
        device = chunk.device
        place = [index.to(device.device, non_blocking=True) for index in
                 (piece.staged, piece.places, piece.blocks, piece.offsets)]
        values = device[:size].view(UNITS[plan.unit])
        for part in plan.parts:
            staged = part.staged(values, count, plan.slot_bytes // plan.unit, plan.slot_tokens)
            staged[:, place[0], :, place[1]] = part.cache[:, place[2], :, place[3]]
        chunk.host[:size].copy_(device[:size], non_blocking=True)

    def _scatter(self, plan: PagedGroup, piece: _Piece, chunk: _Chunk) -> None:
        count = len(piece.slots)
        size = count * plan.slot_bytes
        device = chunk.device
        device[:size].copy_(chunk.host[:size], non_blocking=True)
        place = [index.to(device.device, non_blocking=True) for index in
                 (piece.staged, piece.places, piece.blocks, piece.offsets)]
        values = device[:size].view(UNITS[plan.unit])
        for part in plan.parts:
            staged = part.staged(values, count, plan.slot_bytes // plan.unit, plan.slot_tokens)
            part.cache[:, place[2], :, place[3]] = staged[:, place[0], :, place[1]]

    def _pieces(self, plan: PagedGroup, copy: Copy) -> Iterator[_Piece]:
        """The copy's blocks, as many at a time as a chunk holds, all of one tier."""
        size = copy.space.block_tokens
        ratio = 1 if plan.whole else self._engine_block_tokens // plan.engine_tokens
        most = max(1, self._size // plan.slot_bytes)
        rows = copy.rows[:-(-copy.end // size) - copy.first_block]
        at = copy.first // size - copy.first_block
        while at < len(rows):
            tier = rows[at][0]
            end = at
            while end < len(rows) and end - at < most and rows[end][0] == tier:
                end += 1
            slots, tokens = [], []
            for i in range(at, end):
                base = (copy.first_block + i) * size
                first, last = max(copy.first, base), min(copy.end, base + size)
                _, slot, generation = rows[i]
                if plan.whole:
                    slots.append((slot, generation, 0, 1))
                    tokens.append(np.array([[copy.first_block + i, 0, i - at, 0]]))
                    continue
                slots.append((slot, generation, first - base, last - base))
                numbers = np.arange(first, last)
                tokens.append(np.stack([numbers // plan.engine_tokens,
                                        numbers % plan.engine_tokens,
                                        np.full(last - first, i - at), numbers - base], axis=1))
            table = np.concatenate(tokens)
            engine = np.asarray(copy.engine_blocks)
            table = table[engine[table[:, 0] // ratio - copy.first_engine_block] != NO_BLOCK]
            numbers, inner = np.divmod(table[:, 0], ratio)
            blocks = engine[numbers - copy.first_engine_block] * ratio + inner
            yield _Piece(tuple(slots), tier, *(torch.from_numpy(np.ascontiguousarray(column))
                                               for column in (blocks, table[:, 1], table[:, 2],
                                                              table[:, 3])))
            at = end


def _put(plan: PagedGroup, slot: np.ndarray, staged: np.ndarray, first: int, end: int) -> None:
    """A slot's tokens [first, end); of the others not a byte."""
    if first == 0 and end == plan.slot_tokens:
        slot[:plan.slot_bytes] = staged[:plan.slot_bytes]
        return
    size = int(plan.parts[0].cache.shape[4]) * plan.unit
    shape = (plan.slot_bytes // (plan.slot_tokens * size), plan.slot_tokens, size)
    there = slot[:plan.slot_bytes].reshape(shape)
    there[:, first:end] = staged[:plan.slot_bytes].reshape(shape)[:, first:end]


def _check(memory: SlotMemory, slot: int, generation: int) -> None:
    """The slot is what it was when the order was given: what was copied is the block's."""
    if memory.generation(slot) != generation:
        raise KvkeepError(f"slot {slot} is another block's now", Code.ABORTED)
