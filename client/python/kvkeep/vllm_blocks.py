"""Where a token's K and V lie: in an engine's paged cache, and in a slot of kvkeep's.

Both sides cut tokens into blocks, of sizes that need not agree, so copies go by pieces that lie
within one block of either. An engine's block may hold K transposed (token innermost), or each
token's K and V side by side: strided views put it into kvkeep's order, [head][token][dim], however
it lies. What is in no order known here ("raw") is kept whole, block by block, not looked into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

__all__ = ["EngineLayer", "ORDER_PLAIN", "ORDER_SIDE_BY_SIDE", "ORDER_TRANSPOSED", "Piece",
           "find_order", "pieces", "steps"]

ORDER_PLAIN = "token, dim"             # all of K, then all of V
ORDER_TRANSPOSED = "dim, token"
ORDER_SIDE_BY_SIDE = "token, K and V"  # of one token K, then V

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


def steps(order: str, value: bool, tokens: int, size: int) -> tuple[int, int, int]:
    """In a block of one head, in elements: where K (or V) begins, and from token to token, and from
    dim to dim."""
    if order == ORDER_SIDE_BY_SIDE:
        return size if value else 0, 2 * size, 1
    begin = tokens * size if value else 0
    if order == ORDER_PLAIN:
        return begin, size, 1
    if order == ORDER_TRANSPOSED:
        return begin, 1, tokens
    raise ValueError(f"no order {order!r}")


class EngineLayer:
    """One layer of an engine's paged cache as views [block][head][token][dim] over its memory.

    `memory` is the layer's memory, [block][head][2 x tokens x size], K and V in their orders;
    values as integers of their width, since numpy does not know all formats.
    """

    def __init__(self, memory: np.ndarray, tokens: int, size: int, order_k: str,
                 order_v: str) -> None:
        block_count, heads = memory.shape[:2]
        flat = memory.reshape(block_count, heads, -1)
        if not np.shares_memory(flat, memory) or flat.shape[2] != 2 * tokens * size:
            raise ValueError(f"a layer of {memory.shape} is not [block][head][2 x {tokens} x "
                             f"{size}] in one piece")
        self.keys = _view(flat, tokens, size, order_k, False)
        self.values = _view(flat, tokens, size, order_v, True)

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


def _view(flat: np.ndarray, tokens: int, size: int, order: str, value: bool) -> np.ndarray:
    block_count, heads = flat.shape[:2]
    begin, token, dim = (step * flat.itemsize for step in steps(order, value, tokens, size))
    return np.lib.stride_tricks.as_strided(
        flat[:, :, begin // flat.itemsize:], (block_count, heads, tokens, size),
        (*flat.strides[:2], token, dim), writeable=flat.flags.writeable)
