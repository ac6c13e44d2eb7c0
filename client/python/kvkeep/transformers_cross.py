"""Encoder-decoder models: cross-attention's K/V in a space of its own, and decoders that depend on
what was read.

What an encoder makes of a token depends on all the others, so its K/V are all or nothing: they are
found by the digest of the whole input, and where all rows are there the encoder does not run. The
decoder's own prefix carries that digest in its first block, and so in every block after it.
"""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from kvkeep import transformers_call as calls
from kvkeep.shapes import ContentSpan, Prompt
from kvkeep.transformers_plan import Span, row_spans
from kvkeep.transformers_store import Planes, Store, Writer

if TYPE_CHECKING:
    from kvkeep.transformers import CachedModel, Shape

__all__ = ["Cross", "content_digest"]

CROSS = 1


def content_digest(ids: np.ndarray) -> bytes:
    """Of what an encoder reads."""
    return hashlib.sha256(b"kvkeep encoder\0" + np.ascontiguousarray(ids, "<i8").tobytes()).digest()


class Cross:
    """One call of generate() on an encoder-decoder model."""

    def __init__(self, cached: "CachedModel", shape: "Shape") -> None:
        self._cached = cached
        self._shape = shape
        self._size = cached.block_tokens

    def generate(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        cached, model = self._cached, self._cached.model
        began = time.monotonic()
        kwargs["attention_mask"] = mask = calls.mask(model, ids, kwargs)
        spans = row_spans(mask.cpu().numpy())
        decoder = kwargs.get("decoder_input_ids")
        decoder_mask = kwargs.get("decoder_attention_mask")
        if spans is None or any(span.first > 0 for span in spans):
            cached.report.why = "the encoder's input is padded on the left, or has holes"
        elif decoder_mask is not None and not bool((decoder_mask != 0).all()):
            cached.report.why = "the decoder's input is padded"
        if spans is None or cached.report.why:
            return model.generate(ids, **kwargs)
        lengths = [span.end(ids.shape[1]) for span in spans]
        contents = [content_digest(ids[row, :count].cpu().numpy())
                    for row, count in enumerate(lengths)]
        if decoder is None or not self._begins(decoder, kwargs):
            decoder = ids.new_zeros((len(ids), 1))  # the start token: nothing to look for
        own = cached.loaded(self._shape, decoder, [Span(0)] * len(ids), may_compute=False,
                            contents=contents)
        if own.get_seq_length() > 0:
            kwargs.setdefault("decoder_attention_mask", torch.ones_like(decoder))
        cross = self._load(contents, lengths, ids.shape[1])
        reused = cross is not None
        if cross is None:
            cross = DynamicCache(config=model.config.get_text_config(decoder=True))
        elif self._may_skip(kwargs):
            # Their K and V are there: nobody reads what the encoder says, only how much of it.
            kwargs["encoder_outputs"] = BaseModelOutput(last_hidden_state=torch.zeros(
                (1, 1, 1), dtype=model.dtype, device=ids.device).expand(
                    *ids.shape, self._shape.encoder_size))
            cached.report.encoder_reused = True
        cached.report.load_s = time.monotonic() - began
        try:
            return model.generate(ids, **{calls.CACHE: EncoderDecoderCache(own, cross)}, **kwargs)
        finally:
            cached.store(own, pad=calls.pad(model, kwargs))
            if not reused:
                self._store(cross, contents, lengths)

    def _begins(self, decoder: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Does it begin with the start token? Else generate() puts one before it."""
        for name in ("decoder_start_token_id", "bos_token_id"):
            start = calls.word(self._cached.model, kwargs, name)
            if start is not None:
                return isinstance(start, int) and bool((decoder[:, 0] == start).all())
        return False

    @staticmethod
    def _may_skip(kwargs: dict[str, Any]) -> bool:
        return kwargs.get("assistant_model") is None and not any(
            kwargs.get(name) or getattr(kwargs.get("generation_config"), name, None)
            for name in ("output_hidden_states", "output_attentions", "guidance_scale",
                         "encoder_repetition_penalty"))

    def _prompt(self, content: bytes, count: int) -> Prompt:
        """As many numbers as tokens, whole blocks of them; the content is what tells them apart."""
        whole = -(-count // self._size) * self._size
        return Prompt(np.arange(whole), salt=self._cached.call_salt,
                      spans=[ContentSpan(0, whole, content)])

    def _load(self, contents: list[bytes], lengths: list[int], columns: int
              ) -> DynamicCache | None:
        """All rows, or nothing."""
        nothing: list[Planes] = []

        def find(store: Store) -> list[Planes]:
            space, rows = self._cached.space(store, self._shape, CROSS), []
            for content, count in zip(contents, lengths, strict=True):
                prompt = self._prompt(content, count)
                found = store.find(space, prompt, leave_last=False)
                if found is None or found.tokens < count:
                    return []
                rows.append(found.planes)
            return rows

        rows = self._cached.use(find, nothing)
        if not rows:
            return None
        cache = DynamicCache(config=self._cached.model.config.get_text_config(decoder=True))
        for number, (_, indices) in enumerate(self._shape.groups[CROSS]):
            for place, index in enumerate(indices):
                sides = []
                for side in (0, 1):
                    parts = [planes[number][side][place] for planes in rows]
                    whole = parts[0].new_zeros(len(rows), parts[0].shape[0], columns,
                                               parts[0].shape[-1])
                    for row, (part, count) in enumerate(zip(parts, lengths, strict=True)):
                        whole[row, :, :count] = part[:, :count]
                    sides.append(whole.to(self._shape.devices[CROSS][index]))
                cache.layers[index].update(*sides)
        return cache

    def _store(self, cross: DynamicCache, contents: list[bytes], lengths: list[int]) -> None:
        if any(not layer.is_initialized for layer in cross.layers):
            return
        began = time.monotonic()
        repeats = cross.layers[0].keys.shape[0] // len(contents)  # beams
        for number, (content, count) in enumerate(zip(contents, lengths, strict=True)):
            if not self._cached.use(
                    lambda store, n=number, d=content, c=count: self._store_row(
                        store, cross, n * repeats, d, c), False):
                break
        self._cached.report.store_s += time.monotonic() - began

    def _store_row(self, store: Store, cross: DynamicCache, row: int, content: bytes, count: int
                   ) -> bool:
        prompt = self._prompt(content, count)
        groups = self._shape.groups[CROSS]

        def take(group: int, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
            sides = []
            for name in ("keys", "values"):
                parts = torch.stack([getattr(cross.layers[index], name)[row, :, :count].cpu()
                                     for index in groups[group][1]])
                whole = parts.new_zeros(*parts.shape[:2], max(end, count), parts.shape[-1])
                whole[:, :, :count] = parts
                sides.append(whole[:, :, first:end])
            return sides[0], sides[1]

        writer = Writer(store, self._cached.space(store, self._shape, CROSS),
                        self._cached.call_salt, prompt.spans)
        try:
            writer.extend(np.asarray(prompt.tokens), 0, take)
        finally:
            writer.close()
        return True
