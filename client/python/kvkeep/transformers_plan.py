"""What a batch can take from the cache: plain arithmetic over columns, without torch.

Transformers keeps a batch's K/V in columns: all rows have as many, and a shorter row is padded.
kvkeep knows each row by its own tokens. Here padding becomes spans, cached rows become a number of
columns that all rows can be given, and layers become groups of equal shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

__all__ = ["GROUPS_MAX", "Layer", "Plan", "Span", "choose", "group_layers", "row_spans"]

GROUPS_MAX = 8  # of a space


@dataclasses.dataclass(frozen=True)
class Span:
    """The columns of a row that are tokens. `stop` None: all to the end, and what is generated."""

    first: int
    stop: int | None = None

    def end(self, columns: int) -> int:
        """Where the tokens end within the first `columns`."""
        return columns if self.stop is None else min(self.stop, columns)

    def tokens(self, columns: int) -> int:
        """Tokens within the first `columns`."""
        return max(self.end(columns) - self.first, 0)


def row_spans(mask: np.ndarray) -> list[Span] | None:
    """Spans of a 0/1 mask [row][column]. None: a row has holes, or no token at all, and nothing can
    be said of where its tokens are."""
    spans = []
    length = mask.shape[1]
    for row in mask != 0:
        there = np.flatnonzero(row)
        if there.size == 0 or there[-1] - there[0] + 1 != there.size:
            return None
        stop = int(there[-1]) + 1
        spans.append(Span(int(there[0]), None if stop == length else stop))
    return spans


@dataclasses.dataclass(frozen=True)
class Plan:
    """`columns` come from the cache: of each row `used` tokens of it; the tokens of a row between
    them and `columns` are computed for that row alone, `alone` tokens in all rows."""

    columns: int
    used: tuple[int, ...]
    alone: int


def choose(spans: Sequence[Span], found: Sequence[int], length: int, *, may_cut: bool,
           may_compute: bool) -> Plan:
    """The number of columns that leaves least to compute.

    `found`: cached tokens of each row. may_cut: fewer than these can be used (not under a window,
    whose bytes end where the cached prefix does). may_compute: rows that are behind can be computed
    alone. At least the last column is left: its logits are wanted.
    """
    nothing = Plan(0, (0,) * len(spans), 0)
    best, best_cost = nothing, len(spans) * length
    ends = {min(span.first + count, length - 1)
            for span, count in zip(spans, found, strict=True) if count > 0}
    for columns in sorted(ends):
        used, alone = [], 0
        for span, count in zip(spans, found, strict=True):
            wanted = span.tokens(columns)
            take = min(count, wanted)
            if take < count and not may_cut:
                take = 0
            used.append(take)
            alone += wanted - take
        cost = alone + len(spans) * (length - columns)
        if cost < best_cost and (may_compute or alone == 0):
            best, best_cost = Plan(columns, tuple(used), alone), cost
    return best


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's shape. `dtype` is torch's name of it, without the module."""

    heads: int
    size_k: int
    size_v: int
    dtype: str
    window: int = 0


def group_layers(layers: Sequence[Layer]) -> list[tuple[Layer, tuple[int, ...]]] | None:
    """Layers of equal shape, in the order of their first. None: more groups than a space has."""
    groups: dict[Layer, list[int]] = {}
    for index, layer in enumerate(layers):
        groups.setdefault(layer, []).append(index)
    if not 0 < len(groups) <= GROUPS_MAX:
        return None
    return [(layer, tuple(indices)) for layer, indices in groups.items()]
