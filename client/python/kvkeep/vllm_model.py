"""What vLLM's configuration says of a model, as kvkeep's identity and geometry.

Reads vLLM's objects by their fields and imports none of it. What changes K or V and is not in the
weights or the model's own configuration has to be found here, or two engines that differ in it
would share.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from kvkeep import vllm_identity as naming
from kvkeep.shapes import Format, Layout, LayerGroup, PrefillCost
from kvkeep.vllm_orders import LayerShape, RankShape, Settings
from kvkeep.vllm_scheduler import Model, Request

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["FORMATS", "HANDED_ON", "contents_are_named", "grouped", "hands_on", "make_model",
           "make_request", "stands_alone"]

FORMATS = {"bfloat16": Format.BF16, "float16": Format.FP16, "float32": Format.FP32}
WEIGHTS = r".*\.(safetensors|bin|pt|pth|gguf)"
TOKENIZER = r"(tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|.*\.model|tekken\.json)"
TEMPLATE = r"(chat_template.*|tokenizer_config\.json)"
HANDED_ON = "kvkeep_tokens"  # of kv_transfer_params: what a prefilling engine says that it leaves
LONG_ROPE = ("longrope", "su")
LLAMA4_TUNES_PAST = 32768  # vLLM's default for Llama 4, by max_model_len


# ------------------------------------------------------------- requests

def contents_are_named(config: "VllmConfig") -> bool:
    """Does vLLM name images and the like by digests of them? With neither of its own caches it
    numbers them instead, and each process begins at one."""
    media = getattr(config.model_config, "multimodal_config", None)
    return media is None or media.mm_processor_cache_gb != 0 or \
        bool(config.cache_config.enable_prefix_caching)


def stands_alone(request: Any, contents_named: bool) -> bool:
    """Neither looked up nor saved: its K and V are not told by what we would call it, or it does
    not want what is cached. A resumable one grows by inputs, images among them, and takes tokens
    back."""
    return request.prompt_embeds is not None or request.skip_reading_prefix_cache \
        or request.resumable or (bool(request.mm_features) and not contents_named)


def hands_on(request: Any) -> bool:
    """Will another engine decode it? So routers of vLLM's disaggregated serving say."""
    said = request.kv_transfer_params
    return isinstance(said, dict) and bool(said.get("do_remote_decode"))


def _awaited(said: Any) -> int:
    """Whoever sends a request may have written anything there."""
    value = said.get(HANDED_ON) if isinstance(said, dict) else None
    return value if isinstance(value, int) and value > 0 else 0


def make_request(request: Any) -> Request:
    lora = request.lora_request
    return Request(
        id=request.request_id,
        tokens=lambda: request.all_token_ids,
        salt=request.cache_salt or "",
        spans=tuple(naming.spans(((feature.mm_position.offset, feature.mm_position.length,
                                   feature.identifier) for feature in request.mm_features),
                                 request.num_prompt_tokens)),
        adapter=None if lora is None else (lora.lora_name, lora.lora_int_id, lora.lora_path,
                                           lora.load_inplace),
        again=request.num_preemptions > 0,
        awaited=_awaited(request.kv_transfer_params),
        computed=lambda: request.num_computed_tokens)


# ------------------------------------------------------------- geometry

def grouped(shapes: tuple[LayerShape, ...]) -> list[list[int]]:
    """Layers of one geometry are a group, in the order of their first."""
    groups: dict[tuple[int, int, str], list[int]] = {}
    for i, shape in enumerate(shapes):
        groups.setdefault((shape.heads, shape.size, shape.dtype), []).append(i)
    return list(groups.values())


def make_model(config: "VllmConfig", settings: Settings, shapes: list[RankShape],
               null_block: int | None = None) -> Model:
    shape = shapes[0]
    if any(other != shape for other in shapes):
        raise ValueError("kvkeep.vllm: the ranks' caches differ in shape or scales")
    ranks = len(shapes)
    raw = shape.layers[0].order_k is None
    groups: tuple[LayerGroup, ...]
    block_tokens = shape.block_tokens if raw else settings.block_tokens
    if raw:
        size = sum(layer.block_bytes for layer in shape.layers)
        groups = (LayerGroup(layers=1, kv_heads=ranks, head_size_k=1, layout=Layout.OPAQUE,
                             opaque_bytes=size),)
    else:
        total = config.model_config.get_total_num_kv_heads()
        groups = tuple(_group(shape, members, ranks, total) for members in grouped(shape.layers))
    return Model(
        facts=_facts(config, settings, shape), groups=groups, block_tokens=block_tokens,
        engine_block_tokens=shape.block_tokens, ranks=ranks, prefill_cost=_prefill_cost(config),
        late_saves=shape.late_saves, drafts=config.speculative_config is not None,
        null_block=null_block)


def _group(shape: RankShape, members: list[int], ranks: int, total: int) -> LayerGroup:
    first = shape.layers[members[0]]
    heads = first.heads * ranks
    if ranks > 1 and first.heads == 1 and total < ranks:
        heads = total  # fewer heads than ranks: each rank has one of them, and they are kept once
    return LayerGroup(layers=len(members), kv_heads=heads, head_size_k=first.size,
                      format_k=FORMATS[first.dtype])


# ------------------------------------------------------------- identity

def _facts(config: "VllmConfig", settings: Settings, shape: RankShape) -> naming.Facts:
    model = config.model_config
    text = model.hf_text_config
    whole = model.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "torch_dtype", "dtype"):
        whole.pop(name, None)
    rope = {name: getattr(text, name) for name in
            ("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings",
             "partial_rotary_factor", "position_embedding_type", "alibi")
            if getattr(text, name, None) is not None}
    mask = {name: getattr(text, name) for name in
            ("sliding_window", "layer_types", "use_sliding_window", "attention_chunk_size",
             "max_window_layers") if getattr(text, name, None) is not None}
    folder = pathlib.Path(str(model.tokenizer or model.model))
    tokens = folder.is_dir() and not model.skip_tokenizer_init
    return naming.Facts(
        model=settings.model or str(model.model),
        revision=settings.revision or _revision(config),
        tokenizer=naming.content_digest(folder, TOKENIZER) if tokens else
        f"{model.tokenizer} {model.tokenizer_revision or ''}",
        template=naming.content_digest(folder, TEMPLATE) if tokens else "",
        rope=rope, mask=mask, config_digest=naming.digest(naming.canonical(whole)),
        compute_dtype=str(model.dtype), cache_dtype=f"{config.cache_config.cache_dtype} "
        f"{shape.layers[0].dtype}", scales_digest=shape.scales_digest, layout=shape.layout,
        quantization=_quantization(model), length_rule=_length_rule(model, text),
        draft=_draft(config), extra=settings.identity)


def _quantization(model: Any) -> str:
    """How weights are quantized, and what the operator said of it beyond the model's own files."""
    given = getattr(model, "quantization_config", None)
    name = str(model.quantization or "")
    return name if given is None else f"{name} {naming.digest(naming.canonical(given))}"


def _length_rule(model: Any, text: Any) -> str:
    """What vLLM decides by the longest prompt an engine takes, not by the model: which of
    LongRoPE's factors rotate K, and whether Llama 4's queries are scaled by their position."""
    parts = {}
    ropes = [*_rope_parts(getattr(text, "rope_parameters", None)),
             *_rope_parts(getattr(text, "rope_scaling", None))]
    if any(part.get("rope_type", part.get("type")) in LONG_ROPE for part in ropes):
        original = _original_length(text, ropes)
        parts["rope"] = "by " + str(model.max_model_len) if original is None else \
            "long" if model.max_model_len > original else "short"
    if str(getattr(text, "model_type", "")).startswith("llama4"):
        said = {**model.try_get_generation_config(), **model.override_generation_config}
        parts["tuning"] = str(bool(said.get("attn_temperature_tuning",
                                            model.max_model_len > LLAMA4_TUNES_PAST)))
    return naming.canonical(parts) if parts else ""


def _rope_parts(part: Any) -> list[dict[str, Any]]:
    """Rotary parameters: of the whole model, or of each kind of layer."""
    if not isinstance(part, dict):
        return []
    return [part] + [found for value in part.values() for found in _rope_parts(value)]


def _original_length(text: Any, parts: list[dict[str, Any]]) -> int | None:
    name = "original_max_position_embeddings"
    values = [getattr(text, name, None), *(part.get(name) for part in parts)]
    return next((int(value) for value in values if value is not None), None)


def _draft(config: "VllmConfig") -> str:
    """A drafting model has layers in the cache too: those of another would be accepted less."""
    draft = getattr(config.speculative_config, "draft_model_config", None)
    if draft is None or str(draft.model) == str(config.model_config.model):
        return ""
    commit = naming.snapshot_commit(str(draft.model)) or draft.revision or ""
    if not commit and pathlib.Path(str(draft.model)).is_dir():
        commit = naming.sampled_digest(str(draft.model), WEIGHTS) or ""
    return naming.canonical([config.speculative_config.method, str(draft.model), str(commit)])


def _revision(config: "VllmConfig") -> str:
    """Which weights: a commit where there is one, else a digest of the files. A branch's name says
    nothing, and neither does what a configuration in a folder says of where it was copied from."""
    model = config.model_config
    if str(config.load_config.load_format) == "dummy":
        return f"dummy {model.seed}"
    path = str(model.model)
    commit = naming.snapshot_commit(path)
    if commit is None and pathlib.Path(path).is_dir():
        found = naming.sampled_digest(path, WEIGHTS)
        commit = None if found is None else "sampled " + found
    elif commit is None:
        if getattr(model, "hf_config_path", None) is None:  # else it is of the configuration's
            commit = getattr(model.hf_config, "_commit_hash", None)
        commit = commit or naming.hub_commit(path, model.revision)
    if commit is None:
        raise ValueError(f"kvkeep.vllm: which weights {path} has cannot be told (no commit, no "
                         "files of weights in a folder): give a --revision that is a commit, or "
                         "kv_connector_extra_config.revision")
    return str(commit)


def _prefill_cost(config: "VllmConfig") -> PrefillCost:
    """Two FLOPs a weight, and attention's share of each token before; the speed is not known."""
    text = config.model_config.hf_text_config
    layers = int(getattr(text, "num_hidden_layers", 0) or 0)
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    return PrefillCost(2.0 * layers * hidden * (4 * hidden + 3 * inner), 4.0 * layers * hidden, 0.0)
