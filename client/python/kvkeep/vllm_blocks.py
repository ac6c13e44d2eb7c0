"""Where a token's K and V lie: in an engine's paged cache, and in a slot of kvkeep's.

Both sides cut tokens into blocks, of sizes that need not agree, so copies go by pieces that lie
within one block of either. An engine's block may hold K transposed (token innermost): strided views
put it into kvkeep's order, [head][token][dim], whichever way it lies. What is in neither order
("raw") is kept whole, block by block, and never looked into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

__all__ = ["EngineLayer", "ORDER_PLAIN", "ORDER_TRANSPOSED", "Piece", "find_order", "pieces"]

ORDER_PLAIN = "token, dim"
ORDER_TRANSPOSED = "dim, token"

# A transposing copy of more tokens at a time walks strides that fall into few sets of the cache.
PIECE_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Piece:
    """`count` tokens: from `offset` of kvkeep's block on, and from `engine_offset` of the engine's.
    Blocks are numbered within the sequence, on both sides."""

    block: int
    offset: int
    engine_block: int
    engine_offset: int
    count: int


def pieces(first: int, end: int, block_tokens: int, engine_block_tokens: int,
           most: int = PIECE_TOKENS) -> Iterator[Piece]:
    """The tokens [first, end) in order, each once, none across an edge of either block."""
    if not 0 <= first <= end or min(block_tokens, engine_block_tokens, most) < 1:
        raise ValueError(f"no tokens [{first}, {end}) in blocks of {block_tokens} and "
                         f"{engine_block_tokens}")
    at = first
    while at < end:
        block, offset = divmod(at, block_tokens)
        engine_block, engine_offset = divmod(at, engine_block_tokens)
        count = min(end - at, block_tokens - offset, engine_block_tokens - engine_offset, most)
        yield Piece(block, offset, engine_block, engine_offset, count)
        at += count


def find_order(places: np.ndarray, tokens: int, size: int) -> str | None:
    """The order of a block of one head, from what lies where: `places[i]` is the number,
    token x size + dim, of the value that was found at place i. None: in no order known here."""
    numbers = np.arange(tokens * size)
    if np.array_equal(places, numbers):
        return ORDER_PLAIN
    if np.array_equal(places, numbers.reshape(tokens, size).T.reshape(-1)):
        return ORDER_TRANSPOSED
    return None


class EngineLayer:
    """One layer of an engine's paged cache as views [block][head][token][dim] over its memory.

    `memory` is the layer's memory, [block][head][K then V, each tokens x size]; values as integers
    of their width, since numpy does not know all formats.
    """

    def __init__(self, memory: np.ndarray, tokens: int, size: int, order_k: str,
                 order_v: str) -> None:
        block_count, heads = memory.shape[:2]
        flat = memory.reshape(block_count, heads, -1)
        if not np.shares_memory(flat, memory) or flat.shape[2] != 2 * tokens * size:
            raise ValueError(f"a layer of {memory.shape} is not [block][head][2 x {tokens} x "
                             f"{size}] in one piece")
        self.keys = _view(flat[:, :, :tokens * size], tokens, size, order_k)
        self.values = _view(flat[:, :, tokens * size:], tokens, size, order_v)

    def save(self, engine_block: int, piece: Piece, keys: np.ndarray, values: np.ndarray) -> None:
        """To a slot's [head][token][dim]."""
        here = slice(piece.engine_offset, piece.engine_offset + piece.count)
        there = slice(piece.offset, piece.offset + piece.count)
        keys[:, there] = self.keys[engine_block, :, here]
        values[:, there] = self.values[engine_block, :, here]

    def load(self, engine_block: int, piece: Piece, keys: np.ndarray, values: np.ndarray) -> None:
        """From a slot's."""
        here = slice(piece.engine_offset, piece.engine_offset + piece.count)
        there = slice(piece.offset, piece.offset + piece.count)
        self.keys[engine_block, :, here] = keys[:, there]
        self.values[engine_block, :, here] = values[:, there]


def _view(flat: np.ndarray, tokens: int, size: int, order: str) -> np.ndarray:
    block_count, heads = flat.shape[:2]
    unit = flat.itemsize
    steps = (size * unit, unit) if order == ORDER_PLAIN else (unit, tokens * unit)
    if order not in (ORDER_PLAIN, ORDER_TRANSPOSED):
        raise ValueError(f"no order {order!r}")
    return np.lib.stride_tricks.as_strided(
        flat, (block_count, heads, tokens, size), (*flat.strides[:2], *steps),
        writeable=flat.flags.writeable)
