"""kvkeep under Transformers: `generate` that finds the longest cached prefix, and keeps what it
computes.

    import kvkeep.transformers

    with kvkeep.transformers.CachedModel(model, tokenizer=tokenizer) as cached:
        output = cached.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=100)
        print(cached.report)      # of 1,800 tokens 1,792 came from the cache

Takes what `model.generate` takes, and answers the same. Whatever cannot be cached (a model in
training, images, a static cache, a hook that may change what is computed…) is generated as without,
and `report.why` says so; so is everything while no daemon is there.

The manual use of `past_key_values`:

    cache = cached.cache(input_ids, attention_mask)          # filled with the longest prefix
    output = model(input_ids, attention_mask=…, position_ids=…, past_key_values=cache)
    cached.store(cache)

docs/transformers.md says which models, and what is lost where.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from transformers import DynamicCache, EncoderDecoderCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvkeep import transformers_call as calls
from kvkeep import transformers_identity as naming
from kvkeep.client import Space
from kvkeep.errors import KvkeepError
from kvkeep.shapes import ContentSpan, Prompt, Text, as_bytes
from kvkeep.transformers_call import Report
from kvkeep.transformers_cache import KvkeepCache, Row, layer_shape, supported
from kvkeep.transformers_cross import Cross
from kvkeep.transformers_plan import Span, choose, group_layers, row_spans
from kvkeep.transformers_store import FORMATS, Found, Groups, Lost, Planes, Store, Writer

__all__ = ["CachedModel", "KvkeepCache", "Report"]

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

SELF, CROSS = 0, 1


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's caches as a probe of one token showed them: self-attention, cross-attention."""

    identities: tuple[Any, ...]
    groups: tuple[Groups, ...]
    devices: tuple[tuple[torch.device, ...], ...]
    encoder_size: int = 0


class CachedModel:
    """A model of Transformers with kvkeep behind it. A context manager; one thread at a time.

    target, token, tenant: the daemon, the credential, whom the cache belongs to.
    salt: only calls with the same salt share; generate(salt=…) says it for one call.
    name, revision, identity: further parts of the identity; the weights' digest is always one.
    tokenizer: its vocabulary and chat template become parts of the identity.
    block_tokens: the unit of reuse. store_every: tokens of a running generation after which it is
    stored, its prompt always being stored before the second step.
    """

    def __init__(self, model: Any, *, target: str | None = None, token: str | None = None,
                 tenant: str = "", salt: Text = b"", tokenizer: Any = None, name: str = "",
                 revision: str = "", identity: Mapping[str, str] | None = None,
                 block_tokens: int = 16, store_every: int = 256, call_timeout_s: float = 5.0,
                 reconnect_ms: int = 1000) -> None:
        if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            if getattr(model, "prompt_encoder", None):
                raise ValueError("prompt tuning puts K and V before the prompt: not cached")
            model = model.get_base_model()
        self.model = model
        self.report = Report()
        self._connect = target, token, tenant, call_timeout_s, block_tokens
        self._salt = as_bytes(salt)
        self._words = {"name": name, "revision": revision, "extra": dict(identity or {})}
        self._tokenizer = tokenizer
        self.block_tokens = block_tokens
        self._store_every = max(store_every, block_tokens)
        self._reconnect_s = reconnect_ms / 1e3
        self._again_at = 0.0
        self._store: Store | None = None
        self._fingerprint = naming.Fingerprint(model)
        self._shape: Shape | None = None
        self._said = ""  # why the model cannot be read
        self._writers: list[Writer] = []
        self.call_salt = self._salt
        forward = inspect.signature(model.forward).parameters
        self._two_parts = bool(model.config.is_encoder_decoder)
        self._takes_positions = "position_ids" in forward
        self._takes_logits_to_keep = "logits_to_keep" in forward
        self._known = calls.known_names(model)
        self._hook: Callable[..., Any] = self._before_forward
        self._handle = model.register_forward_pre_hook(self._hook, with_kwargs=True)

    def __enter__(self) -> "CachedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the model as it was, and drop the connection."""
        self._handle.remove()
        self._close_writers(())
        if self._store is not None:
            self._store.close()
            self._store = None

    def weights_changed(self) -> None:
        """Single weights were changed through `.data`: hash them all again."""
        self._fingerprint.forget()

    # ------------------------------------------------------------- generate

    @torch.no_grad()
    def generate(self, inputs: torch.Tensor | None = None, *, salt: Text | None = None,
                 **kwargs: Any) -> Any:
        """model.generate, with kvkeep."""
        self.report = Report()
        self.call_salt = self._salt if salt is None else as_bytes(salt)
        ids = kwargs.pop("input_ids", None) if inputs is None else inputs
        given = calls.given_cache(kwargs)
        if _own(given) is not None:
            return self._go_on(ids, given, kwargs)
        why = calls.why_not(self.model, ids, kwargs, self._known)
        began = time.monotonic()
        shape = None if why else self._find_shape()
        if shape is None:
            self.report.why = self.report.why or why
            return self.model.generate(ids, **kwargs)
        if self._two_parts:
            return Cross(self, shape).generate(ids, kwargs)
        kwargs["attention_mask"] = calls.mask(self.model, ids, kwargs)
        spans = self._spans(kwargs["attention_mask"])
        if spans is None:
            return self.model.generate(ids, **kwargs)
        cache = self.loaded(shape, ids, spans, may_compute=True)
        self.report.load_s = time.monotonic() - began
        try:
            return self.model.generate(ids, **{calls.CACHE: cache}, **kwargs)
        finally:
            self.store(cache, pad=calls.pad(self.model, kwargs))

    def _go_on(self, ids: Any, given: Any, kwargs: dict[str, Any]) -> Any:
        """With a cache of an earlier call, which knows its tokens."""
        own = _own(given)
        assert own is not None
        own.watched = True
        try:
            return self.model.generate(ids, **kwargs)
        finally:
            self.store(own, pad=calls.pad(self.model, kwargs))

    def _call_shape(self, cache: KvkeepCache) -> Shape | None:
        shape = self._find_shape()
        return shape if shape is not None and shape.identities[SELF] == cache.identity else None

    # ------------------------------------------------------------- by hand

    @torch.no_grad()
    def cache(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None, *,
              salt: Text | None = None) -> KvkeepCache:
        """A cache for forward() or generate(), filled with the longest prefix; decoder-only models.
        The first forward may be given all ids, or those from cache.get_seq_length() on. Pass
        position_ids where rows are padded: positions are counted from a row's first token."""
        if self._two_parts:
            raise ValueError("an encoder-decoder model's cache begins with generate()")
        began = time.monotonic()
        self.report = Report()
        self.call_salt = self._salt if salt is None else as_bytes(salt)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        spans = self._spans(mask)
        shape = None if spans is None else self._find_shape()
        if spans is None or shape is None:
            cache = self._empty([Span(0)] * len(input_ids), input_ids.shape[1])
            cache.trusted = False
            return cache
        cache = self.loaded(shape, input_ids, spans, may_compute=True)
        cache.watched = True
        self.report.load_s = time.monotonic() - began
        return cache

    @torch.no_grad()
    def store(self, cache: Any, *, pad: int | None = None) -> None:
        """Keep what a cache holds by now. A cache can go on afterwards, and be stored again."""
        own = _own(cache)
        if own is not None:
            self._flush(own, pad)
            own.watched = True
            for row in own.rows:
                row.writer, row.keep, row.failed = None, None, False
        self._close_writers(())

    # ------------------------------------------------------------- the model

    def _find_shape(self) -> Shape | None:
        """Identity and shape as they are now. None: not cached, and report.why says why."""
        try:
            seen = naming.switches(self.model, (id(self._hook),))
            self.report.why = naming.refusal(self.model.config, seen, self.model.training)
            if self.report.why:
                return None
            device = next(self.model.parameters()).device.type
            autocast = str(torch.get_autocast_dtype(device)) \
                if torch.is_autocast_enabled(device) else ""
            identities = tuple(naming.identity(
                self.model, self._fingerprint, seen, part=part, autocast=autocast,
                version=transformers.__version__, tokenizer=self._tokenizer, **self._words)
                for part in ("self", "cross")[:1 + self._two_parts])
            if self._shape is None or self._shape.identities != identities:
                self._shape = self._probe(identities)
        except (NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
            self.report.why = f"the model cannot be read: {error}"
            if self.report.why != self._said:  # of every call, but told once
                logger.warning("kvkeep: nothing is cached: %s", self.report.why)
                self._said = self.report.why
        else:
            return self._shape
        return None

    def _spans(self, mask: torch.Tensor) -> list[Span] | None:
        """Where the rows' tokens are. None: K and V would not follow from them alone."""
        spans = row_spans(mask.cpu().numpy())
        if spans is None:
            self.report.why = "a row of the attention mask has holes, or no token"
        elif not self._takes_positions and any(span.first > 0 for span in spans):
            self.report.why = "padded on the left, and the model is not told positions"
        else:
            return spans
        return None

    def _empty(self, spans: Sequence[Span], columns: int) -> KvkeepCache:
        return KvkeepCache(self.model.config.get_text_config(decoder=True), spans, columns)

    def _probe(self, identities: tuple[Any, ...]) -> Shape | None:
        """One token through the model shows what its caches are made of."""
        config = self.model.config.get_text_config(decoder=True)
        caches = [DynamicCache(config=config) for _ in identities]
        if not supported(caches[SELF]):
            self.report.why = "a layer is neither plain nor windowed attention"
            return None
        token = torch.zeros((1, 1), dtype=torch.long, device=self.model.device)
        size = 0
        if self._two_parts:
            output = self.model(input_ids=token, decoder_input_ids=token, use_cache=True,
                                **{calls.CACHE: EncoderDecoderCache(*caches)})
            size = output.encoder_last_hidden_state.shape[-1]
        else:
            self.model(input_ids=token, use_cache=True, **{calls.CACHE: caches[SELF]})
        groups, devices = [], []
        for part, cache in enumerate(caches):
            if any(not layer.is_initialized for layer in cache.layers):
                self.report.why = "a layer has no K and V of its own"
                return None
            layers = [layer_shape(layer) for layer in cache.layers]
            if part == CROSS:
                layers = [dataclasses.replace(layer, window=0) for layer in layers]
                if any(isinstance(layer, DynamicSlidingWindowLayer) for layer in cache.layers):
                    self.report.why = "cross-attention under a window"
                    return None
            found = group_layers(layers)
            if found is None or any(layer.dtype not in FORMATS for layer in layers):
                self.report.why = "layers of too many shapes, or of a dtype that is not kept"
                return None
            groups.append(found)
            devices.append(tuple(layer.keys.device for layer in cache.layers))
        return Shape(identities, tuple(groups), tuple(devices), size)

    # ------------------------------------------------------------- the daemon

    def use(self, work: Callable[[Store], Result], otherwise: Result) -> Result:
        """`work` on a connection that lives; else, or where it fails, `otherwise`."""
        if self._store is None or not self._store.lives:
            now = time.monotonic()
            if self._store is not None:
                self._store.close()
                self._store = None
            if now < self._again_at:
                return otherwise
            self._again_at = now + self._reconnect_s
            try:
                self._store = Store(*self._connect)
            except (KvkeepError, OSError) as error:
                logger.warning("kvkeep: not reached, going on without: %s", error)
                return otherwise
        try:
            return work(self._store)
        except (KvkeepError, OSError, Lost) as error:
            logger.info("kvkeep: %s", error)
            self._store.forget()
            return otherwise

    def space(self, store: Store, shape: Shape, part: int = SELF) -> Space:
        return store.space(shape.identities[part], shape.groups[part], cross=part == CROSS)

    def prompt(self, tokens: np.ndarray, content: bytes | None) -> Prompt:
        """`content`: the digest of what an encoder has read; all that follows depends on it."""
        spans = [ContentSpan(0, 1, content)] if content is not None else []
        return Prompt(tokens, salt=self.call_salt, spans=spans, whole_blocks=True)

    # ------------------------------------------------------------- loading

    def loaded(self, shape: Shape, ids: torch.Tensor, spans: Sequence[Span], *,
                may_compute: bool, contents: Sequence[bytes] | None = None) -> KvkeepCache:
        length = ids.shape[1]
        cache = self._empty(spans, length)
        cache.identity, cache.salt = shape.identities[SELF], self.call_salt
        for number, row in enumerate(cache.rows):
            row.content = contents[number] if contents is not None else None
        tokens = [ids[row, span.first:span.end(length)].cpu().numpy()
                  for row, span in enumerate(spans)]
        self.report.prompt_tokens = sum(len(row) for row in tokens)
        nothing: list[Found | None] = [None] * len(spans)

        def find(store: Store) -> list[Found | None]:
            space = self.space(store, shape)
            return [store.find(space, self.prompt(ours, row.content))
                    for ours, row in zip(tokens, cache.rows, strict=True)]

        found = self.use(find, nothing)
        counts = [part.tokens if part is not None else 0 for part in found]
        self.report.found_tokens = sum(counts)
        windowed = any(layer.window > 0 for layer, _ in shape.groups[SELF])
        plan = choose(spans, counts, length, may_cut=not windowed, may_compute=may_compute)
        if plan.columns == 0:
            return cache
        self.report.reused_tokens, self.report.alone_tokens = sum(plan.used), plan.alone
        rows = self._complete(shape, ids, spans, found, plan.columns, plan.used)
        for row, part, used in zip(cache.rows, found, plan.used, strict=True):
            row.known_from = part.whole_from if part is not None and used > 0 else 0
        cache.fill(ids, plan.columns, shape.groups[SELF], rows, shape.devices[SELF])
        return cache

    def _complete(self, shape: Shape, ids: torch.Tensor, spans: Sequence[Span],
                  found: Sequence[Found | None], columns: int, used: Sequence[int]
                  ) -> list[Planes]:
        """All rows up to `columns`: what was found, and the rest computed for rows of equal need
        together; padding is zeros, which the mask hides."""
        groups, devices = shape.groups[SELF], shape.devices[SELF]
        rows = [[tuple(_padded(part[:, :, :count], span.first, columns) for part in plane)
                 for plane in (one.planes if one is not None and count > 0 else _blank(groups))]
                for one, count, span in zip(found, used, spans, strict=True)]
        behind: dict[tuple[int, int], list[int]] = {}
        for number, (span, count) in enumerate(zip(spans, used, strict=True)):
            if span.tokens(columns) > count:
                behind.setdefault((count, span.tokens(columns)), []).append(number)
        for (count, wanted), members in behind.items():
            ours = torch.stack([ids[row, spans[row].first:spans[row].first + wanted]
                                for row in members])
            alone = self._empty([Span(0)] * len(members), wanted)
            alone.trusted = False
            if count > 0:
                alone.fill(ours, count, groups, [
                    [tuple(part[:, :, :count] for part in plane) for plane in found[row].planes]
                    for row in members], devices)  # type: ignore[union-attr]
            keep = {"logits_to_keep": 1} if self._takes_logits_to_keep else {}
            self.model(input_ids=ours.to(self.model.device), use_cache=True,
                       **{calls.CACHE: alone}, **keep)
            for place, row in enumerate(members):
                rows[row] = [tuple(_padded(part, spans[row].first, columns)
                                   for part in alone.take(place, indices, 0, wanted))
                             for _, indices in groups]
        return rows  # type: ignore[return-value]

    # ------------------------------------------------------------- the hook

    def _before_forward(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Before each step: store what is due, and note what the step computes."""
        given = calls.given_cache(kwargs)
        own = _own(given)
        if own is None:
            return None
        names = ("decoder_input_ids", "decoder_position_ids", "decoder_attention_mask") \
            if self._two_parts else ("input_ids", "position_ids", "attention_mask")
        ids, positions, mask = (kwargs.get(name) for name in names)
        if ids is None and args and not self._two_parts:
            ids = args[0]
        if ids is None or ids.dim() != 2:
            own.sees(None, None, None)
            return None
        if len(ids) > len(own.rows) and len(ids) % len(own.rows) == 0:
            given.batch_repeat_interleave(len(ids) // len(own.rows))  # beams and the like begin
        if own.watched and self._call_shape(own) is None:
            own.trusted = False  # by hand, the model may be another at each step
        first, own.loaded_columns = own.loaded_columns, 0
        if first > 0 and ids.shape[1] >= own.prompt_columns and \
                (mask is None or mask.shape[1] == ids.shape[1]):
            whole = ids.shape[1]  # the whole prompt is passed: what is loaded is not computed again
            ids = ids[:, first:]
            if positions is not None and positions.shape[-1] == whole:
                positions = positions[..., first:]
                kwargs[names[1]] = positions
            args = (ids, *args[1:]) if args and not self._two_parts else args
            if names[0] in kwargs:
                kwargs[names[0]] = ids
        columns = own.get_seq_length()
        if columns >= own.prompt_columns and (
                own.stored_columns == 0 or columns - own.stored_columns >= self._store_every):
            self._flush(own, None)
        own.sees(ids, positions, mask)
        return args, kwargs

    # ------------------------------------------------------------- storing

    def _flush(self, cache: KvkeepCache, pad: int | None) -> None:
        columns = cache.get_seq_length()
        if not cache.trusted:
            cache.let_go(columns)
        if not cache.trusted or cache.ids is None or cache.ids.shape[1] != columns or \
                cache.identity is None or columns == 0:
            return
        shape = self._shape
        if shape is None or shape.identities[SELF] != cache.identity or \
                any(layer.get_seq_length() != columns for layer in cache.layers) or \
                any(layer_shape(cache.layers[index]) != like
                    for like, indices in shape.groups[SELF] for index in indices):
            return
        began = time.monotonic()
        bad = cache.bad.tolist() if cache.bad is not None else [False] * len(cache.rows)
        for number, row in enumerate(cache.rows):
            if not (row.failed or bad[number]):
                row.failed = not self.use(
                    lambda store, n=number, r=row: self._store_row(store, shape, cache, n, r, pad),
                    False)
        cache.stored_columns = columns
        ends = [row.span.first + row.writer.stored for row in cache.rows
                if row.writer is not None and not row.failed]
        cache.let_go(min(ends, default=columns))
        self._close_writers(cache.rows)
        self.report.store_s += time.monotonic() - began

    def _store_row(self, store: Store, shape: Shape, cache: KvkeepCache, number: int, row: Row,
                   pad: int | None) -> bool:
        tokens = cache.tokens(number, cache.stored_end(number, pad))
        writer = row.writer
        if writer is None:
            space = self.space(store, shape)
            prompt = self.prompt(tokens, row.content)
            writer = Writer(store, space, cache.salt, prompt.spans)
            self._writers.append(writer)
        elif len(tokens) // self.block_tokens * self.block_tokens > writer.stored or \
                (row.keep is not None and row.keep < writer.stored):
            if sum(other.writer is writer for other in cache.rows) > 1:
                writer = writer.fork()
                self._writers.append(writer)
        row.writer = writer
        if row.keep is not None:
            writer.truncate(row.keep)
            row.keep = None
        before = writer.written
        indices = [indices for _, indices in shape.groups[SELF]]
        try:
            writer.extend(tokens, cache.first_known(number),
                          lambda group, first, end: cache.take(number, indices[group], first, end))
        finally:
            self.report.stored_tokens += writer.written - before
        return True

    def _close_writers(self, rows: Sequence[Row]) -> None:
        """All but those that rows go on with."""
        wanted = {id(row.writer) for row in rows}
        for writer in [one for one in self._writers if id(one) not in wanted]:
            self._writers.remove(writer)
            try:
                writer.close()
            except (KvkeepError, OSError) as error:
                logger.debug("kvkeep: %s", error)


def _own(cache: Any) -> KvkeepCache | None:
    """Ours, where it is one."""
    inner = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    return inner if isinstance(inner, KvkeepCache) else None


def _padded(part: torch.Tensor, first: int, columns: int) -> torch.Tensor:
    """[layer][head][token][dim] as columns, zeros where there is no token."""
    whole = part.new_zeros(*part.shape[:2], columns, part.shape[-1])
    whole[:, :, first:first + part.shape[2]] = part
    return whole


def _blank(groups: Groups) -> Planes:
    """Planes of no token."""
    return [tuple(torch.zeros(len(indices), layer.heads, 0, size, dtype=getattr(torch, layer.dtype))
                  for size in (layer.size_k, layer.size_v))  # type: ignore[misc]
            for layer, indices in groups]

