"""Rows of a batch to and from kvkeep: one connection, prefixes read, and writers that grow.

Everything here may raise KvkeepError or OSError; the caller goes on without. Reading is under a
lease that keeps the very copies; writing is into blocks of a sequence of this process, sealed block
by block.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence as SequenceOf

import numpy as np
import torch

from kvkeep.client import Client, Retry, Space
from kvkeep.errors import KvkeepError
from kvkeep.memory import SlotMemory
from kvkeep.session import Lease, Sequence, Session
from kvkeep.shapes import (Attention, ContentSpan, Format, Identity, LayerGroup, Placement, Prompt,
                           Tier)
from kvkeep.transformers_plan import Layer

__all__ = ["Groups", "Lost", "Planes", "Store", "Writer"]

FORMATS = {"float32": Format.FP32, "float16": Format.FP16, "bfloat16": Format.BF16}
PIN_MS = 30_000

Groups = list[tuple[Layer, tuple[int, ...]]]
Planes = list[tuple[torch.Tensor, torch.Tensor]]  # [group] K and V: [layer][head][token][dim]
Take = Callable[[int, int, int], tuple[torch.Tensor, torch.Tensor]]  # group, first, end: as Planes


class Lost(Exception):
    """What would have to be written is not at hand any more."""


@dataclasses.dataclass(frozen=True)
class Found:
    """A cached prefix, copied. From `whole_from` on every group has bytes."""

    tokens: int
    whole_from: int
    planes: Planes


class Store:
    """A connection, with its spaces by identity and the memory of their groups."""

    def __init__(self, target: str | None, token: str | None, tenant: str, timeout: float,
                 block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.client = Client(target, token=token, tenant=tenant, timeout=timeout,
                             retry=Retry(2, 5, 100))
        self._spaces: dict[str, Space] = {}
        self._maps: dict[tuple[int, int, int, int], SlotMemory] = {}
        try:
            self.session: Session = self.client.session(name="transformers")
        except BaseException:
            self.client.close()
            raise

    @property
    def lives(self) -> bool:
        return not self.session.ended.is_set()

    def close(self) -> None:
        """End it. What goes wrong then is of no interest."""
        try:
            self.session.close()
        except (KvkeepError, OSError):
            pass
        self.client.close()

    def space(self, identity: Identity, groups: Groups, cross: bool = False) -> Space:
        """The space of an identity. Memory of the last one stays mapped."""
        key = repr((identity, groups))
        if key not in self._spaces:
            self._spaces[key] = self.client.open_space(identity, [
                LayerGroup(layers=len(indices), kv_heads=layer.heads, head_size_k=layer.size_k,
                           head_size_v=layer.size_v, format_k=FORMATS[layer.dtype],
                           window=layer.window,
                           attention=Attention.CROSS if cross else Attention.SELF)
                for layer, indices in groups], block_tokens=self.block_tokens)
        return self._spaces[key]

    def forget(self) -> None:
        """Ask for spaces anew: after a refusal that may mean that one has gone."""
        self._spaces.clear()
        self._maps.clear()

    def memory(self, space: Space, group: int, row: Placement) -> SlotMemory:
        key = (space.id, group, int(row.tier), row.space_id)
        if key not in self._maps:
            self._maps[key] = self.session.map_slots(space, group=group, tier=row.tier,
                                                     public_id=row.space_id)
        return self._maps[key]

    def find(self, space: Space, prompt: Prompt, leave_last: bool = True) -> Found | None:
        """The longest cached prefix, copied out. None: nothing."""
        with self.session.pin(space, prompt, ttl_ms=PIN_MS, leave_last=leave_last,
                              copy_pin=True) as lease:
            return self._copy(space, lease) if lease.tokens > 0 else None

    def _copy(self, space: Space, lease: Lease) -> Found:
        size, whole_from, planes = self.block_tokens, 0, []
        for number, group in enumerate(space.groups):
            shape = (group.layers, group.kv_heads, lease.tokens)
            dtype = getattr(torch, _dtype(group))
            keys = torch.zeros(*shape, group.head_size_k, dtype=dtype)
            values = torch.zeros(*shape, group.value_size, dtype=dtype)
            for row in lease.blocks(number):
                first = row.block * size
                count = min(size, lease.tokens - first)
                if row.slot is None:
                    whole_from = max(whole_from, first + size)
                elif count > 0:
                    memory = self.memory(space, number, row)
                    from_keys, from_values = memory.tensor(row)
                    keys[:, :, first:first + count] = from_keys[:, :, :count]
                    values[:, :, first:first + count] = from_values[:, :, :count]
                    if memory.generation(row) != row.generation:
                        raise Lost("a block went away while it was read")
            planes.append((keys, values))
        return Found(lease.tokens, whole_from, planes)


def _dtype(group: LayerGroup) -> str:
    return next(name for name, form in FORMATS.items() if form == group.format_k)


class Writer:
    """A row's sequence: whole blocks, sealed as they come. `stored` is a multiple of a block, and
    all that the sequence holds."""

    def __init__(self, store: Store, space: Space, salt: bytes, spans: SequenceOf[ContentSpan]
                 ) -> None:
        self._store = store
        self._space = space
        self._salt = salt
        self._spans = tuple(spans)
        self._sequence: Sequence | None = None
        self.stored = 0
        self.written = 0  # of these, those that were not there

    def extend(self, tokens: np.ndarray, known_from: int, take: Take) -> None:
        """Store the whole blocks of `tokens`. take(group, first, end) gives K and V of tokens, from
        known_from on. Lost: blocks before it would have to be written."""
        size = self._space.block_tokens
        target = len(tokens) // size * size
        first = self.stored
        if first >= target:
            return
        if self._sequence is None:
            self._sequence = self._store.session.open_sequence(
                self._space, self._prompt(tokens[:target]), tier=Tier.HOST, leave_on_host=True,
                retry=True)
            first = self._sequence.cached_tokens // size * size
        else:
            self._sequence.append(tokens[first:target])
        if first < known_from:
            raise Lost(f"tokens {first} to {known_from} are not at hand")
        if first < target:
            self._write(self._sequence, first, take)
            self._sequence.seal(all_ranks=True)
            self.written += target - first
        self.stored = target

    def _prompt(self, tokens: np.ndarray) -> Prompt:
        return Prompt(tokens, salt=self._salt, spans=self._spans, whole_blocks=True)

    def _write(self, sequence: Sequence, first: int, take: Take) -> None:
        size = self._space.block_tokens
        for number in range(len(self._space.groups)):
            rows = [row for row in sequence.blocks(number)
                    if row.block * size >= first and row.slot is not None]
            if not rows:
                continue
            low = rows[0].block * size
            keys, values = take(number, low, sequence.length)
            for row in rows:
                at = row.block * size - low
                to_keys, to_values = self._store.memory(self._space, number, row).tensor(row)
                to_keys.copy_(keys[:, :, at:at + size])
                to_values.copy_(values[:, :, at:at + size])

    def truncate(self, tokens: int) -> None:
        """Keep the whole blocks of the first `tokens`."""
        keep = tokens // self._space.block_tokens * self._space.block_tokens
        if self._sequence is not None and keep < self.stored:
            self._sequence.truncate(keep)
            self.stored = keep

    def fork(self) -> "Writer":
        """Another row that goes on from here; all blocks are shared."""
        child = Writer(self._store, self._space, self._salt, self._spans)
        if self._sequence is not None:
            child._sequence = self._sequence.fork()[0]
            child.stored = self.stored
        return child

    def close(self) -> None:
        sequence, self._sequence = self._sequence, None
        if sequence is not None and self._store.lives:
            sequence.close()
