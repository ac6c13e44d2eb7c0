"""A call of generate(): what it says, whether K and V follow from its token ids alone, and what
came of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.utils import ALL_CACHE_NAMES

__all__ = ["CACHE", "Report", "given_cache", "known_names", "mask", "pad", "why_not", "word"]

INPUTS = frozenset({"inputs", "input_ids", "attention_mask", "decoder_input_ids",
                    "decoder_attention_mask", "past_key_values", "cache", "tokenizer",
                    "assistant_tokenizer"})
# What models call the argument that is a cache. Newer ones take the old name with a warning.
CACHE = "cache" if "cache" in ALL_CACHE_NAMES else "past_key_values"
PLAIN: dict[str, tuple[Any, ...]] = {  # what generation may say for a call to be cached
    "use_cache": (None, True), "prefill_chunk_size": (None,),
    "cache_implementation": (None, "dynamic"), "token_healing": (None, False),
    # Of tokens that are not computed again there would be none:
    "output_attentions": (None, False), "output_hidden_states": (None, False)}


def given_cache(kwargs: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, under either of its names."""
    found = kwargs.get("cache")
    return found if found is not None else kwargs.get("past_key_values")


@dataclasses.dataclass
class Report:
    """What the last call of generate() or cache() took from kvkeep and gave to it, in tokens over
    all rows. `why`: why nothing was asked; "" where it was."""

    prompt_tokens: int = 0
    found_tokens: int = 0     # cached in the daemon
    reused_tokens: int = 0    # of these, not computed again
    alone_tokens: int = 0     # computed for rows that were behind, before the batch
    stored_tokens: int = 0    # written, and not there before
    encoder_reused: bool = False  # all cross-attention was there, and the encoder did not run
    load_s: float = 0.0
    store_s: float = 0.0
    why: str = ""


def known_names(model: Any) -> frozenset[str]:
    """Arguments that are prompts, or say how to generate. All others may change K and V."""
    named = set(inspect.signature(model.generate).parameters) - {"self", "kwargs"}
    return INPUTS | named | set(vars(GenerationConfig()))


def word(model: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """A word of the generation's configuration, as the call, its configuration or the model says
    it."""
    if kwargs.get(name) is not None:
        return kwargs[name]
    for holder in (kwargs.get("generation_config"), model.generation_config):
        if getattr(holder, name, None) is not None:
            return getattr(holder, name)
    return None


def pad(model: Any, kwargs: Mapping[str, Any]) -> int | None:
    """The padding's id, where there is one."""
    found = word(model, kwargs, "pad_token_id")
    return found if isinstance(found, int) else None


def mask(model: Any, ids: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The mask that was given, or the one that generate() would guess: it is then given."""
    given = kwargs.get("attention_mask")
    if given is not None:
        return given
    padding, ends = pad(model, kwargs), word(model, kwargs, "eos_token_id")
    known = torch.as_tensor([] if ends is None else ends).flatten().tolist()
    if padding is None or padding in known:
        return torch.ones_like(ids)
    return (ids != padding).long()


def why_not(model: Any, ids: Any, kwargs: Mapping[str, Any], known: frozenset[str]) -> str:
    """Why a call cannot be cached; "" where it can."""
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.is_floating_point() or \
            ids.shape[1] == 0:
        return "the prompt is not token ids"
    for name, value in kwargs.items():
        if value is not None and name not in known:
            return f"{name}: may decide K and V, and is no part of a prompt that kvkeep knows"
    if given_cache(kwargs) is not None:
        return "past_key_values: a cache whose tokens are not known"
    given = kwargs.get("attention_mask")
    if given is not None and given.shape != ids.shape:
        return "attention_mask is not of the prompt's shape"
    if kwargs.get("custom_generate") is not None:
        return "custom_generate"
    for name, plain in PLAIN.items():
        if word(model, kwargs, name) not in plain:
            return f"{name} is set"
    return ""
