"""A Cache of Transformers that knows its tokens, so that kvkeep can keep what it holds.

A Cache sees keys and values, never token ids; a forward hook of the model tells this one which ids,
positions and mask each step had. Whatever generation does to the columns (beams that are reordered,
drafts that are cropped, rows that are repeated) it does to the ids as well. A row whose positions
or mask are not those of its own tokens, counted from 0, is marked and never stored.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvkeep.transformers_plan import Layer, Span
from kvkeep.transformers_store import Groups, Planes, Writer

__all__ = ["KvkeepCache", "Row", "layer_shape", "supported"]


class RememberingLayer(DynamicSlidingWindowLayer):  # type: ignore[misc]
    """A window that also keeps what fell out of it, until that is stored. `past` begins at column
    `past_first`."""

    def __init__(self, sliding_window: int) -> None:
        super().__init__(sliding_window)
        self.past: tuple[torch.Tensor, torch.Tensor] | None = None
        self.past_first = 0

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
               ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.past is None:
            self.past_first = self.cumulative_length
            self.past = key_states, value_states
        else:
            self.past = (torch.cat([self.past[0], key_states], dim=-2),
                         torch.cat([self.past[1], value_states], dim=-2))
        return super().update(key_states, value_states, *args, **kwargs)

    def crop(self, tokens_to_remove: int) -> None:
        before = self.cumulative_length
        super().crop(tokens_to_remove)
        gone = before - self.cumulative_length
        if gone > 0 and self.past is not None:
            kept = max(self.past[0].shape[-2] - gone, 0)
            self._change(lambda part: part[:, :, :kept])

    def let_go(self, column: int) -> None:
        """What is before `column` is stored, or never will be."""
        drop = column - self.past_first
        if drop > 0 and self.past is not None:
            self._change(lambda part: part[:, :, drop:].clone())
            self.past_first = column

    def _change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        if self.past is not None:
            self.past = change(self.past[0]), change(self.past[1])

    def reset(self) -> None:
        super().reset()
        self.past, self.past_first = None, 0

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._change(lambda part: part.index_select(0, beam_idx.to(part.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._change(lambda part: part.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._change(lambda part: part[indices, ...])


def supported(cache: DynamicCache) -> bool:
    """Are all layers plain or windowed attention?"""
    return len(cache.layers) > 0 and all(
        type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers)


def layer_shape(layer: DynamicLayer) -> Layer:
    """Of a layer that has been filled."""
    kinds = {str(part.dtype).removeprefix("torch.") for part in (layer.keys, layer.values)}
    return Layer(layer.keys.shape[1], layer.keys.shape[-1], layer.values.shape[-1],
                 " and ".join(sorted(kinds)), getattr(layer, "sliding_window", 0))


@dataclasses.dataclass
class Row:
    """A row of the batch, and how much of it kvkeep has."""

    span: Span
    known_from: int = 0          # tokens before have no K/V here in some group
    keep: int | None = None      # tokens that were never cropped since the writer stored
    writer: Writer | None = None  # shared by rows that were one, until one of them stores
    failed: bool = False
    content: bytes | None = None  # the digest of what the encoder read


class KvkeepCache(DynamicCache):  # type: ignore[misc]
    """DynamicCache that keeps ids beside K and V. `owner` stores it, and is asked to before each
    step; a copy has none until it is used again."""

    def __init__(self, config: Any, spans: Sequence[Span], prompt_columns: int) -> None:
        super().__init__(config=config)
        self.layers = [RememberingLayer(layer.sliding_window)
                       if type(layer) is DynamicSlidingWindowLayer else layer
                       for layer in self.layers]
        self.rows = [Row(span) for span in spans]
        self.prompt_columns = prompt_columns
        self.ids: torch.Tensor | None = None  # [row][column]
        self.bad: torch.Tensor | None = None  # bool [row], on the model's device
        self.trusted = True                   # no ids are missing, and the model was the same
        self.watched = False                  # the model is to be looked at before each step
        self.loaded_columns = 0               # not to be computed by the first step
        self.stored_columns = 0
        self.identity: Any = None             # whose K and V these are; None: never stored
        self.salt = b""

    # ------------------------------------------------------------- filling

    def fill(self, ids: torch.Tensor, columns: int, groups: Groups, rows: Sequence[Planes],
             devices: Sequence[torch.device]) -> None:
        """Give the first `columns` of each row its planes, [group] of that many columns."""
        for number, (_, indices) in enumerate(groups):
            for place, index in enumerate(indices):
                keys, values = (torch.stack([planes[number][part][place] for planes in rows])
                                .to(devices[index]) for part in (0, 1))
                self.layers[index].update(keys, values)
        self.ids = ids[:, :columns].clone()
        self.loaded_columns = columns

    # ------------------------------------------------------------- what the forward hook tells

    def sees(self, ids: torch.Tensor | None, positions: torch.Tensor | None,
             mask: torch.Tensor | None) -> None:
        """A step is about to compute these: ids [row][new column]; positions as the model gets
        them; mask over all columns."""
        if ids is None or ids.dim() != 2 or (self.ids is not None
                                             and len(ids) != len(self.ids)) or \
                len(ids) != len(self.rows):
            self.trusted = False
            return
        before = 0 if self.ids is None else self.ids.shape[1]
        if before != self.get_seq_length():
            self.trusted = False
        self.ids = ids.clone() if self.ids is None else torch.cat([self.ids, ids], dim=1)
        wrong = self._mask_is_wrong(mask, self.ids.shape[1]) | \
            self._positions_are_wrong(positions, before, self.ids.shape[1])
        self.bad = wrong if self.bad is None else self.bad | wrong

    def _edges(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.ids is not None
        device = self.ids.device
        far = 1 << 40
        return (torch.tensor([[row.span.first] for row in self.rows], device=device),
                torch.tensor([[far if row.span.stop is None else row.span.stop]
                              for row in self.rows], device=device))

    def _mask_is_wrong(self, mask: torch.Tensor | None, columns: int) -> torch.Tensor:
        first, stop = self._edges()
        at = torch.arange(columns, device=first.device)
        seen = (at >= first) & ((at < stop) | (at >= self.prompt_columns))
        if mask is None:
            return ~seen.all(dim=1)
        if mask.dim() != 2 or mask.shape != seen.shape:
            return torch.ones(len(self.rows), dtype=torch.bool, device=first.device)
        return ((mask.to(first.device) != 0) != seen).any(dim=1)

    def _positions_are_wrong(self, positions: torch.Tensor | None, before: int, columns: int
                             ) -> torch.Tensor:
        first, stop = self._edges()
        if positions is None:
            return first[:, 0] > 0  # counted from the padding, or we cannot tell
        at = torch.arange(before, columns, device=first.device)
        if positions.dim() != 2 or positions.shape[1] != len(at):
            return torch.ones(len(self.rows), dtype=torch.bool, device=first.device)
        matters = (at >= first) & (at < stop)
        return (matters & (positions.to(first.device) != at - first)).any(dim=1)

    # ------------------------------------------------------------- what generation does

    def _permute(self, indices: torch.Tensor) -> None:
        self.rows = [dataclasses.replace(self.rows[index]) for index in indices.tolist()]
        if self.ids is not None:
            self.ids = self.ids.index_select(0, indices.to(self.ids.device))
        if self.bad is not None:
            self.bad = self.bad.index_select(0, indices.to(self.bad.device))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        super().reorder_cache(beam_idx)
        self._permute(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        self._permute(torch.arange(len(self.rows)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        self._permute(torch.arange(len(self.rows))[indices.cpu()])

    def crop(self, tokens_to_remove: int) -> None:
        super().crop(tokens_to_remove)
        columns = self.get_seq_length()
        if self.ids is not None and self.ids.shape[1] > columns:
            self.ids = self.ids[:, :columns]
            self.stored_columns = min(self.stored_columns, columns)
            for row in self.rows:
                kept = row.span.tokens(columns)
                row.keep = kept if row.keep is None else min(row.keep, kept)

    def reset(self) -> None:
        super().reset()
        self.ids = self.bad = None
        self.loaded_columns = self.stored_columns = 0
        for row in self.rows:
            row.writer, row.keep, row.known_from, row.failed = None, 0, 0, True

    def __deepcopy__(self, memo: dict[int, Any]) -> "KvkeepCache":
        """A copy goes on by itself: it shares what is stored, not who stores it."""
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        for name, value in vars(self).items():
            if name == "rows":
                other.rows = [dataclasses.replace(row, writer=None, keep=None) for row in value]
            else:
                setattr(other, name, copy.deepcopy(value, memo))
        other.stored_columns = 0
        return other

    # ------------------------------------------------------------- storing

    def tokens(self, row: int, end: int) -> np.ndarray:
        """The ids of a row's tokens within the first `end` columns."""
        assert self.ids is not None
        span = self.rows[row].span
        return self.ids[row, span.first:span.end(end)].cpu().numpy()

    def stored_end(self, row: int, pad: int | None) -> int:
        """The columns of a row that are worth storing: without the padding that generate() puts
        behind a row which has ended."""
        assert self.ids is not None
        end = self.ids.shape[1]
        if pad is not None:
            made = self.ids[row, self.prompt_columns:]
            end -= int((made.flip(0) == pad).long().cumprod(0).sum())
        return end

    def first_known(self, row: int) -> int:
        """The first token of a row that every layer has K and V of."""
        one = self.rows[row]
        past = max((layer.past_first for layer in self.layers
                    if isinstance(layer, RememberingLayer)), default=0)
        return max(one.known_from, past - one.span.first)

    def take(self, row: int, indices: Sequence[int], first: int, end: int
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a row's tokens [first, end) in these layers: [layer][head][token][dim]."""
        at = self.rows[row].span.first
        keys, values = [], []
        for index in indices:
            layer = self.layers[index]
            k, v, begin = layer.keys, layer.values, 0
            if isinstance(layer, RememberingLayer):
                assert layer.past is not None
                (k, v), begin = layer.past, layer.past_first
            keys.append(k[row, :, at + first - begin:at + end - begin])
            values.append(v[row, :, at + first - begin:at + end - begin])
        return torch.stack(keys).cpu(), torch.stack(values).cpu()

    def let_go(self, column: int) -> None:
        """Columns before are stored: windows need not remember them."""
        for layer in self.layers:
            if isinstance(layer, RememberingLayer):
                layer.let_go(column)
