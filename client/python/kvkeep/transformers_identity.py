"""Who may share: the identity of a model in memory, taken from the model itself.

Names and paths prove nothing about a model that lives in a process: weights are changed in place,
adapters are switched. So the identity is made of the bytes: every weight and buffer is hashed,
once, and again when the model has changed; what acts beside the weights (adapters that are on,
rotary scaling, precision, the attention that is used) is read from the modules at each call.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from kvkeep import vllm_identity as naming
from kvkeep.shapes import Identity

__all__ = ["Fingerprint", "Switches", "config_text", "identity", "refusal", "switches"]

VOLATILE = frozenset({"_name_or_path", "name_or_path", "transformers_version", "use_cache",
                      "output_attentions", "output_hidden_states", "return_dict"})
MOVING_ROPE = frozenset({"dynamic", "longrope"})  # their angles depend on the whole prompt's length
SAMPLES = 16


def config_text(config: Mapping[str, Any]) -> str:
    """A configuration without what says nothing of K and V."""
    return naming.canonical({name: value for name, value in config.items()
                             if name not in VOLATILE})


def _rope_types(config: Any) -> Iterable[str]:
    """Of a configuration's rotary parameters, in whichever of their forms."""
    for name in ("rope_parameters", "rope_scaling"):
        part = getattr(config, name, None)
        for parameters in ([part, *part.values()] if isinstance(part, Mapping) else []):
            if isinstance(parameters, Mapping):
                yield str(parameters.get("rope_type", parameters.get("type", "")))


@dataclasses.dataclass(frozen=True)
class Switches:
    """What of a model's modules acts beside its weights, as it is now."""

    adapters: tuple[str, ...]  # names of those that are on
    adapter_state: str         # which module, which adapters, how they are scaled
    foreign_hooks: tuple[str, ...]
    bidirectional: bool


def switches(model: Any, own_hooks: Iterable[int] = ()) -> Switches:
    """Read the modules. `own_hooks`: ids of hook functions that change nothing."""
    own, names, state, hooks = set(own_hooks), set(), [], []
    both_ways = False
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            if any(id(hook) not in own and not _is_theirs(hook)
                   for hook in getattr(module, kind, {}).values()):
                hooks.append(name)
        # Replaced on this very module; accelerate's placement is known to change nothing.
        if "forward" in vars(module) and not _is_theirs(getattr(module, "_hf_hook", None)):
            hooks.append(name)
        if getattr(module, "is_causal", True) is False:
            both_ways = True
        on = getattr(module, "active_adapters", None)  # of a whole model it is a method
        if isinstance(on, (list, tuple)):
            active = [] if getattr(module, "disable_adapters", False) else list(on)
            merged = list(getattr(module, "merged_adapters", []))
            scaling = {key: getattr(module, "scaling", {}).get(key) for key in active}
            if active or merged:
                names.update(active + merged)
                state.append([name, type(module).__name__, active, merged, scaling,
                              sorted(getattr(module, "use_dora", {}) or {})])
    return Switches(tuple(sorted(map(str, names))), naming.canonical(state) if state else "",
                    tuple(hooks), both_ways)


def _is_theirs(hook: Any) -> bool:
    """A hook of the libraries themselves: they look, or move tensors between devices."""
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return hook is not None and where.split(".")[0] in ("transformers", "accelerate")


def refusal(config: Any, seen: Switches, training: bool) -> str:
    """Why a model's K/V cannot be kept; "" where they can."""
    if training:
        return "the model is in training: dropout makes every run another"
    if seen.foreign_hooks:
        return f"the module {seen.foreign_hooks[0]!r} has a hook that may change what it computes"
    if seen.bidirectional and not getattr(config, "is_encoder_decoder", False):
        return "a layer attends both ways: K and V depend on later tokens"
    decoder = config.get_text_config(decoder=True)
    moving = sorted(set(_rope_types(decoder)) & MOVING_ROPE)
    if moving:
        return f"rotary scaling {moving[0]!r}: K depends on the length of the whole prompt"
    if "chunked_attention" in (getattr(decoder, "layer_types", None) or ()) or \
            getattr(decoder, "attention_chunk_size", None):
        return "chunked attention: which tokens a layer sees depends on the padding"
    return ""


def _bytes(tensor: Any) -> Any:
    """A tensor's bytes as numpy u8, wherever it is."""
    import torch

    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()


def _sample(tensor: Any) -> bytes:
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return _bytes(flat[::max(flat.numel() // SAMPLES, 1)][:SAMPLES + 1]).tobytes()


def _is_adapters(name: str) -> bool:
    return any(part.startswith("lora_") for part in name.split("."))


class Fingerprint:
    """The digests of a model's weights: of the base, and of adapters. Hashed in full when first
    asked for, and whenever a tensor is another, has been written to (torch counts writes), or shows
    other values in a sample (writes through `.data` are not counted). `forget()` after single
    values were changed through `.data`."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._stamp: Any = None
        self._digests = ("", "")

    def forget(self) -> None:
        self._stamp = None

    def _tensors(self) -> list[tuple[str, Any]]:
        model = self._model
        return sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0])

    def digests(self) -> tuple[str, str]:
        """(base, adapters)"""
        tensors = self._tensors()
        sample = hashlib.blake2b()
        for _, tensor in tensors:
            sample.update(_sample(tensor))
        stamp = ([(name, tensor.data_ptr(), tensor._version, tuple(tensor.shape), tensor.dtype)
                  for name, tensor in tensors], sample.digest())
        if stamp != self._stamp:
            self._digests = self._hash(tensors)
            self._stamp = stamp
        return self._digests

    @staticmethod
    def _hash(tensors: list[tuple[str, Any]]) -> tuple[str, str]:
        base: list[bytes | str] = []
        adapters: list[bytes | str] = []
        for name, tensor in tensors:
            into = adapters if _is_adapters(name) else base
            into += [name.replace(".base_layer.", "."),
                     f"{tensor.dtype} {tuple(tensor.shape)}",
                     xxhash.xxh3_128_digest(_bytes(tensor))]
        return naming.digest(*base), naming.digest(*adapters)


def identity(model: Any, fingerprint: Fingerprint, seen: Switches, *, part: str, autocast: str,
             version: str, tokenizer: Any = None, name: str = "", revision: str = "",
             extra: Mapping[str, str] | None = None) -> Identity:
    """All of it. `part`: which of a model's caches. `name` and `revision` are the operator's words,
    and count beside the digests, not in their place."""
    config = model.config.get_text_config(decoder=True)
    base, adapters = fingerprint.digests()
    adapter = None
    if seen.adapters:
        adapter = naming.Adapter("+".join(seen.adapters)[:255], naming.digest(seen.adapter_state),
                                 adapters)
    rope = {key: getattr(config, key, None) for key in (
        "rope_parameters", "rope_scaling", "rope_theta", "position_embedding_type", "alibi")}
    mask = {key: getattr(config, key, None) for key in (
        "sliding_window", "layer_types", "use_sliding_window", "attention_chunk_size")}
    template = getattr(tokenizer, "chat_template", None) if tokenizer is not None else None
    return naming.Facts(
        model=name or type(model).__name__, revision=naming.digest(base, revision),
        tokenizer=_tokenizer_digest(tokenizer),
        template=naming.digest(naming.canonical(template)) if template else "",
        rope=rope, mask=mask, config_digest=naming.digest(config_text(model.config.to_dict())),
        compute_dtype=f"{getattr(model, 'dtype', '')} autocast {autocast}".strip(),
        cache_dtype=str(getattr(model, "dtype", "")),
        layout="transformers " + part,
        quantization=naming.digest(naming.canonical(_quantization(model))),
        extra={"transformers": version, "class": type(model).__name__,
               "attention": str(getattr(config, "_attn_implementation", "")), **(extra or {})},
    ).identity(adapter)


def _quantization(model: Any) -> Any:
    found = getattr(model.config, "quantization_config", None)
    return found.to_dict() if hasattr(found, "to_dict") else found


def _tokenizer_digest(tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else naming.canonical(tokenizer.get_vocab())
    return naming.digest(type(tokenizer).__name__, text)
