"""What a model's KV cache looks like: identity, layer groups, prompts."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import Union

import numpy as np
from numpy.typing import ArrayLike

from kvkeep.v1 import kvkeep_pb2 as pb

__all__ = ["Attention", "ContentSpan", "Format", "Identity", "Layout", "LayerGroup", "Placement",
           "PrefillCost", "PriorityHint", "Prompt", "Tier", "Tokens", "token_bytes"]

Text = Union[str, bytes]
Tokens = Union[ArrayLike, "Prompt"]


class Format(enum.IntEnum):
    """How one value of K or V is stored."""

    NONE = pb.FORMAT_NONE
    FP32 = pb.FORMAT_FP32
    FP16 = pb.FORMAT_FP16
    BF16 = pb.FORMAT_BF16
    FP8_E4M3 = pb.FORMAT_FP8_E4M3          # the compact ones: values and scales, see
    INT8_CHANNEL = pb.FORMAT_INT8_CHANNEL  # docs/formats.md
    INT8_32 = pb.FORMAT_INT8_32

    @property
    def size(self) -> int:
        """Bytes of a value; 0 for none and for the compact formats, whose scales count too."""
        return {Format.FP32: 4, Format.FP16: 2, Format.BF16: 2}.get(self, 0)


class Layout(enum.IntEnum):
    HEADS_FIRST = pb.LAYOUT_HEADS_FIRST    # [layer][K or V][head][token][dim]; can be attended
    TOKENS_FIRST = pb.LAYOUT_TOKENS_FIRST  # [layer][K or V][token][head][dim]; kept, not attended
    OPAQUE = pb.LAYOUT_OPAQUE              # opaque_bytes per block and rank


class Attention(enum.IntEnum):
    SELF = pb.ATTENTION_SELF
    CROSS = pb.ATTENTION_CROSS


class Tier(enum.IntEnum):
    ANY = pb.TIER_UNSPECIFIED
    DEVICE = pb.TIER_DEVICE
    HOST = pb.TIER_HOST
    DISK = pb.TIER_DISK


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a block's bytes are. `tier` ANY and `slot` None: it has none (outside the window)."""

    block: int  # in the sequence's or lease's table
    tier: Tier
    slot: int | None
    generation: int
    space_id: int = 0  # whose slot: 0: the space's own; else a public one's, read-only


class AttendPlace(enum.IntEnum):
    """Where blocks of host memory were attended."""

    NO_CHOICE = pb.ATTEND_PLACE_UNSPECIFIED   # none on the host, or the device tier is the CPU's
    IN_PLACE = pb.ATTEND_PLACE_IN_PLACE       # by the CPU, where they lie
    BROUGHT_IN = pb.ATTEND_PLACE_BROUGHT_IN   # on the device, copied there for the call


def as_bytes(value: Text) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which KV can stand in for which. Every part counts; only `model` is required.

    Two identities that differ in any byte never share a block, so put in all that changes K or V:
    weights (revision), tokenizer and template digests, position encoding with its scaling,
    adapter (all three parts), scales of a quantised cache (kv_format), the mask's rule.
    """

    model: Text
    revision: Text = b""
    tokenizer_digest: Text = b""
    template_digest: Text = b""
    position_encoding: Text = b""
    adapter_name: Text = b""
    adapter_id: Text = b""
    adapter_version: Text = b""
    kv_format: Text = b""
    mask_rule: Text = b""
    extra: Mapping[str, Text] = dataclasses.field(default_factory=dict)

    def message(self) -> pb.Identity:
        parts = {field.name: as_bytes(getattr(self, field.name))
                 for field in dataclasses.fields(self) if field.name != "extra"}
        pairs = [pb.Pair(name=name.encode(), value=as_bytes(value))
                 for name, value in sorted(self.extra.items())]
        return pb.Identity(extra=pairs, **parts)


@dataclasses.dataclass(frozen=True)
class LayerGroup:
    """Layers of equal geometry. Sizes are over all ranks; head sizes are in values."""

    layers: int
    kv_heads: int
    head_size_k: int
    head_size_v: int | None = None  # None: as head_size_k
    format_k: Format = Format.BF16
    format_v: Format | None = None  # None: as format_k; NONE for a latent cache
    layout: Layout = Layout.HEADS_FIRST
    attention: Attention = Attention.SELF
    latent: bool = False  # MLA: V is the first head_size_v values of K
    window: int = 0       # tokens that a query sees back, itself counted; 0: all
    sinks: int = 0
    opaque_bytes: int = 0
    disk_format: Format = Format.NONE  # in which blocks lie on disk; NONE: as in memory
    host_format: Format = Format.NONE  # and in the host tier: then on disk too

    @property
    def value_size(self) -> int:
        """head_size_v, with its default."""
        return self.head_size_k if self.head_size_v is None else self.head_size_v

    @property
    def value_format(self) -> Format:
        """format_v, with its default."""
        if self.format_v is not None:
            return self.format_v
        return Format.NONE if self.latent else self.format_k

    def message(self) -> pb.LayerGroup:
        if self.layout == Layout.OPAQUE:
            return pb.LayerGroup(layers=self.layers, kv_heads=self.kv_heads,
                                 layout=int(self.layout), attention=int(self.attention),
                                 window=self.window, sinks=self.sinks,
                                 opaque_bytes=self.opaque_bytes)
        return pb.LayerGroup(
            layers=self.layers, kv_heads=self.kv_heads, head_size_k=self.head_size_k,
            head_size_v=self.value_size, format_k=int(self.format_k),
            format_v=int(self.value_format), layout=int(self.layout),
            attention=int(self.attention), latent=self.latent, window=self.window,
            sinks=self.sinks, disk_format=int(self.disk_format),
            host_format=int(self.host_format))


@dataclasses.dataclass(frozen=True)
class PrefillCost:
    """What prefilling a token at position p costs: flops_per_token + flops_per_token_position x p,
    and how many FLOPs the engine does in a second (0: unknown)."""

    flops_per_token: float = 0.0
    flops_per_token_position: float = 0.0
    flops_per_second: float = 0.0

    def message(self) -> pb.PrefillCost:
        return pb.PrefillCost(flops_per_token=self.flops_per_token,
                              flops_per_token_position=self.flops_per_token_position,
                              flops_per_second=self.flops_per_second)


@dataclasses.dataclass(frozen=True)
class ContentSpan:
    """Placeholder tokens [first, first + count), and the digest (1 to 64 bytes) of the content,
    an image say, that they stand for."""

    first: int
    count: int
    digest: bytes

    def message(self) -> pb.ContentSpan:
        return pb.ContentSpan(first=self.first, count=self.count, digest=self.digest)


@dataclasses.dataclass(frozen=True)
class PriorityHint:
    """What eviction should think of tokens [first, first + count) of a prompt, for a while:
    priority 0 (goes first) to 100 (stays), 50 says nothing."""

    first: int
    count: int
    priority: int
    duration_ms: int

    def message(self) -> pb.PriorityHint:
        return pb.PriorityHint(first_token=self.first, token_count=self.count,
                               priority=self.priority, duration_ms=self.duration_ms)


def token_bytes(tokens: ArrayLike) -> bytes:
    """Token ids as the API takes them: u32 little-endian.

    Takes lists, numpy arrays and torch tensors of one dimension. ValueError: an id that is not a
    whole number of 0 to 2^32 - 1.
    """
    values = np.asarray(tokens)
    if values.size == 0:
        return b""
    if values.ndim != 1:
        raise ValueError(f"tokens have {values.ndim} dimensions; one is meant")
    if values.dtype.kind not in "iu":
        raise ValueError(f"tokens are {values.dtype}; whole numbers are meant")
    if values.dtype.itemsize > 4 or values.dtype.kind == "i":
        if int(values.min()) < 0 or int(values.max()) > 0xFFFFFFFF:
            raise ValueError("a token id is not within 0 to 4294967295")
    return values.astype("<u4").tobytes()


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokens with what else decides who may share them."""

    tokens: ArrayLike
    salt: Text = b""  # only prompts with the same salt share
    spans: Sequence[ContentSpan] = ()
    # Published prefixes are hits too. Read such blocks where Placement.space_id says, by
    # map_slots(public_id=…), or with read() and attend().
    use_public: bool = False
    # No hit within a block, though the space allows it (open_space(partial_reuse=True)).
    whole_blocks: bool = False

    def message(self) -> pb.Prompt:
        return pb.Prompt(tokens=token_bytes(self.tokens), salt=as_bytes(self.salt),
                         spans=[span.message() for span in self.spans],
                         use_public=self.use_public, whole_blocks=self.whole_blocks)


def prompt_message(tokens: Tokens) -> pb.Prompt:
    return tokens.message() if isinstance(tokens, Prompt) else Prompt(tokens).message()


def span_messages(spans: Iterable[ContentSpan]) -> list[pb.ContentSpan]:
    return [span.message() for span in spans]
