"""kvkeep's connector for vLLM: KV that outlives an engine, shared by engines of one tenant.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KvkeepConnector",
        "kv_connector_module_path": "kvkeep.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"target": "unix:/run/kvkeep/kvkeep.sock"}}'

Settings are vllm_orders.Settings. This module is only the seam between vLLM's interface and the two
halves, vllm_scheduler and vllm_worker, which do not know vLLM. Written for vLLM 0.32 with caches in
host memory (CPU builds) or on CUDA devices (vllm_device); on others it is refused at the start.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorRole,
    KVConnectorWorkerMetadata)

from kvkeep import vllm_identity as naming
from kvkeep.shapes import Format, Layout, LayerGroup, PrefillCost
from kvkeep.vllm_blocks import ORDER_SIDE_BY_SIDE, EngineLayer, find_order
from kvkeep.vllm_device import (CudaStreams, DeviceCache, Streams, paged_group, raw_group,
                                side_view)
from kvkeep.vllm_orders import LayerShape, Orders, RankShape, Report, Settings
from kvkeep.vllm_scheduler import Model, Request, SchedulerSide
from kvkeep.vllm_worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

__all__ = ["KvkeepConnector"]

FORMATS = {torch.bfloat16: Format.BF16, torch.float16: Format.FP16, torch.float32: Format.FP32}
WEIGHTS = r".*\.(safetensors|bin|pt|gguf)"
TOKENIZER = r"(tokenizer.*|vocab.*|merges\.txt|special_tokens_map\.json|.*\.model|tekken\.json)"
TEMPLATE = r"(chat_template.*|tokenizer_config\.json)"

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclasses.dataclass
class _StepOrders(KVConnectorMetadata):
    orders: Orders


@dataclasses.dataclass
class _StepReport(KVConnectorWorkerMetadata):
    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, _StepReport)
        return _StepReport(self.report.join(other.report))


@dataclasses.dataclass
class _Handshake(KVConnectorHandshakeMetadata):
    shape: RankShape


def _timed(method: Method) -> Method:
    """Add what a call takes to the half's own time."""
    def run(self: "KvkeepConnector", *arguments: Any, **named: Any) -> Any:
        begin = time.perf_counter_ns()
        try:
            return method(self, *arguments, **named)
        finally:
            self.own_ns += time.perf_counter_ns() - begin

    run.__name__, run.__doc__ = method.__name__, method.__doc__
    return run  # type: ignore[return-value]


class KvkeepConnector(KVConnectorBase_V1):
    """Both roles; vLLM makes one of each. `own_ns` is the time vLLM's thread has spent in here."""

    def __init__(self, vllm_config: "VllmConfig", role: KVConnectorRole,
                 kv_cache_config: "KVCacheConfig") -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.own_ns = 0
        transfer = self._kv_transfer_config
        settings = Settings.of(transfer.kv_connector_extra_config)
        self.settings = dataclasses.replace(
            settings, save=settings.save and transfer.is_kv_producer,
            load=settings.load and transfer.is_kv_consumer)
        _check_config(vllm_config)
        self.scheduler: SchedulerSide | None = None
        self.worker: WorkerSide | None = None
        self._shape: RankShape | None = None
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(self.settings)

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is not saved is computed

    # ------------------------------------------------------------- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

        layers = _layers(kv_caches)
        block_tokens = self._engine_block_tokens()
        shapes = tuple(self._layer_shape(name, tensor, block_tokens) for name, tensor in layers)
        if any(shape.order_k is None for shape in shapes):
            shapes = tuple(dataclasses.replace(shape, order_k=None, order_v=None)
                           for shape in shapes)
        raw = shapes[0].order_k is None
        if raw and any(tensor.shape[0] != self._kv_cache_config.num_blocks for _, tensor in layers):
            raise ValueError("kvkeep.vllm: the kernel cuts vLLM's blocks further, in no order "
                             "known here: give vLLM the kernel's own block size")
        self._shape = RankShape(
            block_tokens, shapes, self._scales_digest([name for name, _ in layers]),
            self._layout_name(layers) if raw else "")
        rank = get_tensor_model_parallel_rank()
        tensors = [tensor for _, tensor in layers]
        streams = self._streams(tensors[0].device)
        if streams is not None:
            device = _device_cache(streams, tensors, shapes, block_tokens,
                                   self.settings.block_tokens)
            self._shape = dataclasses.replace(self._shape, late_saves=True)
            self.worker = WorkerSide(self.settings, rank, block_tokens, [], [], device)
        elif raw:
            rows = [tensor.view(torch.uint8).numpy().reshape(tensor.shape[0], -1)
                    for tensor in tensors]
            self.worker = WorkerSide(self.settings, rank, block_tokens, [], rows)
        else:
            groups = [[_engine_layer(tensors[i], shapes[i], block_tokens) for i in members]
                      for members in _grouped(shapes)]
            self.worker = WorkerSide(self.settings, rank, block_tokens, groups, [])

    def _streams(self, device: torch.device) -> Streams | None:
        """None: the cache is in host memory, and is copied by the processor."""
        return CudaStreams(device) if device.type == "cuda" else None

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return _Handshake(self._shape) if self._shape is not None else None

    @_timed
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        assert self.worker is not None
        self.worker.begin(_orders(kv_connector_metadata))

    @_timed
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self.worker is not None
        orders = _orders(self._get_connector_metadata())
        self.worker.begin(orders)
        self.worker.start_loads(orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return  # loads are made between steps: what a step reads is there

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any,
                      **kwargs: Any) -> None:
        return  # all layers are saved when the forward is done

    @_timed
    def wait_for_save(self) -> None:
        assert self.worker is not None
        self.worker.save(_orders(self._get_connector_metadata()))

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        assert self.worker is not None
        self.worker.give_way()
        return self._finished()

    @_timed
    def _finished(self) -> tuple[set[str] | None, set[str] | None]:
        assert self.worker is not None
        sent, received = self.worker.finished()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        assert self.worker is not None
        return self.worker.failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        assert self.worker is not None
        report = self.worker.report()
        return _StepReport(report) if report is not None else None

    # ------------------------------------------------------------- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]
                                    ) -> None:
        assert self.scheduler is not None
        shapes = []
        for rank in sorted(metadata):
            handshake = metadata[rank]
            assert isinstance(handshake, _Handshake)
            shapes.append(handshake.shape)
        self.scheduler.start(_model(self._vllm_config, self.settings, shapes))

    @_timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int
                                   ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        if request.prompt_embeds is not None or request.skip_reading_prefix_cache:
            return 0, False
        tokens = self.scheduler.match(_request(request), num_computed_tokens)
        return tokens, bool(tokens)

    @_timed
    def update_state_after_alloc(self, request: Any, blocks: "KVCacheBlocks",
                                 num_external_tokens: int) -> None:
        assert self.scheduler is not None
        self.scheduler.allocated(request.request_id, blocks.get_block_ids()[0],
                                 num_external_tokens)

    @_timed
    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> KVConnectorMetadata:
        assert self.scheduler is not None and self._kv_cache_manager is not None
        manager = self._kv_cache_manager
        return _StepOrders(self.scheduler.step(
            scheduler_output.num_scheduled_tokens, scheduler_output.preempted_req_ids or (),
            lambda request_id: manager.get_block_ids(request_id)[0]))

    @_timed
    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        assert self.scheduler is not None
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, _StepReport):
            self.scheduler.reported(meta.report)

    @_timed
    def request_finished(self, request: Any, block_ids: list[int]
                         ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        return self.scheduler.finished(request.request_id, computed, block_ids), None

    def reset_cache(self) -> bool | None:
        """vLLM's caches are reset, as when weights were updated: kvkeep forgets the model too."""
        assert self.scheduler is not None
        return self.scheduler.reset()

    def shutdown(self) -> None:
        for half in (self.scheduler, self.worker):
            if half is not None:
                half.close()

    # ------------------------------------------------------------- the rank's cache

    def _engine_block_tokens(self) -> int:
        (group,) = self._kv_cache_config.kv_cache_groups
        return int(group.kv_cache_spec.block_size)

    def _layer_shape(self, name: str, tensor: torch.Tensor, block_tokens: int) -> LayerShape:
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"kvkeep.vllm: the cache of {name} is on {tensor.device}; this "
                             "connector is for caches in host memory and on CUDA devices")
        if tensor.device.type == "cpu" and not tensor.is_contiguous():
            raise ValueError(f"kvkeep.vllm: the cache of {name} is not in one piece")
        block_bytes = tensor[0].numel() * tensor.element_size()
        order = None
        heads = size = 0
        kernel_tokens = int(tensor.shape[2]) if tensor.dim() == 4 else 0
        fits = kernel_tokens == block_tokens if tensor.device.type == "cpu" else \
            kernel_tokens > 0 and block_tokens % kernel_tokens == 0
        if self.settings.layout == "auto" and tensor.dtype in FORMATS and fits:
            heads, size = int(tensor.shape[1]), int(tensor.shape[3]) // 2
            layer = self._vllm_config.compilation_config.static_forward_context.get(name)
            order = _probe(tensor, layer, kernel_tokens, size)
        return LayerShape(heads, size, str(tensor.dtype).removeprefix("torch."),
                          order[0] if order else None, order[1] if order else None, block_bytes)

    def _scales_digest(self, names: list[str]) -> str:
        """Of what an FP8 cache's values are scaled by; values of other scales are other values."""
        if not str(self._vllm_config.cache_config.cache_dtype).startswith("fp8"):
            return ""
        context = self._vllm_config.compilation_config.static_forward_context
        parts = []
        for name in names:
            for scale in ("_k_scale", "_v_scale"):
                value = getattr(context[name], scale, None)
                parts.append("none" if value is None else
                             torch.as_tensor(value).float().cpu().numpy().tobytes().hex())
        return naming.digest(*parts)

    def _layout_name(self, layers: list[tuple[str, torch.Tensor]]) -> str:
        """What decides how raw bytes are to be read: the kernel's choice, and the shapes."""
        context = self._vllm_config.compilation_config.static_forward_context
        return naming.canonical([
            [list(tensor.shape[1:]), str(tensor.dtype), str(getattr(context.get(name), "isa", "")),
             type(getattr(context.get(name), "impl", None)).__name__]
            for name, tensor in layers])


def _orders(metadata: KVConnectorMetadata) -> Orders:
    assert isinstance(metadata, _StepOrders)
    return metadata.orders


def _check_config(config: "VllmConfig") -> None:
    parallel = config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size",
                 "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"kvkeep.vllm: {name} must be 1")
    # Versions before this one could find the scales while they run.
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ValueError("kvkeep.vllm: calculate_kv_scales finds the scales while it runs: blocks "
                         "of two engines could not be told apart")


def _layers(kv_caches: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """In the order of the model; layers that share another's cache once."""
    def number(name: str) -> list[int]:
        return [int(part) for part in re.findall(r"\d+", name)]

    seen: set[int] = set()
    result = []
    for name in sorted(kv_caches, key=lambda name: (number(name), name)):
        tensor = kv_caches[name]
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            result.append((name, tensor))
    return result


def _grouped(shapes: tuple[LayerShape, ...]) -> list[list[int]]:
    """Layers of one geometry are a group, in the order of their first."""
    groups: dict[tuple[int, int, str], list[int]] = {}
    for i, shape in enumerate(shapes):
        groups.setdefault((shape.heads, shape.size, shape.dtype), []).append(i)
    return list(groups.values())


def _engine_layer(tensor: torch.Tensor, shape: LayerShape, block_tokens: int) -> EngineLayer:
    unit: Any = {1: np.uint8, 2: np.uint16, 4: np.uint32}[tensor.element_size()]
    memory = tensor.view(torch.uint8).numpy().view(unit)
    assert shape.order_k is not None and shape.order_v is not None
    return EngineLayer(memory.reshape(tensor.shape[0], shape.heads, -1), block_tokens, shape.size,
                       shape.order_k, shape.order_v)


def _probe(like: torch.Tensor, layer: Any, block_tokens: int, size: int
           ) -> tuple[str, str] | None:
    """How the backend lays out K and V of a block: it is asked, not believed. A scratch cache of
    two blocks is written by the backend's own update with numbers that say where each came from."""
    impl, heads = getattr(layer, "impl", None), int(like.shape[1])
    if impl is None or not hasattr(impl, "do_kv_cache_update"):
        return None
    count = block_tokens * size
    device = like.device
    numbers = torch.arange(count, device=device).reshape(block_tokens, 1, size)
    numbers = numbers.expand(-1, heads, -1)
    found = torch.zeros(2 * count, dtype=torch.int64)
    scratch = torch.empty_strided((2, *like.shape[1:]), like.stride(), dtype=like.dtype,
                                  device=device)
    scratch.zero_()
    place = 1
    while place < count:  # digits of base 64: small enough for any format
        values = (numbers // place % 64).to(like.dtype).contiguous()
        # K and V differ, so that a swap of the two would show.
        impl.do_kv_cache_update(layer, values, -values, scratch,
                                torch.arange(block_tokens, device=device) + block_tokens)
        found += scratch[1, heads - 1].reshape(-1).float().cpu().long() * place
        place *= 64
    rows = found.reshape(block_tokens, 2, size)
    asked = torch.arange(count).reshape(block_tokens, size)
    if torch.equal(rows[:, 0], asked) and torch.equal(rows[:, 1], -asked):
        return ORDER_SIDE_BY_SIDE, ORDER_SIDE_BY_SIDE
    keys, values = found.split(count)
    orders = [find_order(part.numpy(), block_tokens, size) for part in (keys, -values)]
    if orders[0] is None or orders[1] is None:
        return None
    return orders[0], orders[1]


def _device_cache(streams: Streams, tensors: list[torch.Tensor], shapes: tuple[LayerShape, ...],
                  engine_block_tokens: int, block_tokens: int) -> DeviceCache:
    if shapes[0].order_k is None:
        rows = []
        for tensor in tensors:
            if not tensor[0].is_contiguous():
                raise ValueError("kvkeep.vllm: a block of the cache is in no order known here, nor "
                                 "in one piece")
            rows.append(tensor.as_strided((tensor.shape[0], tensor[0].numel()),
                                          (tensor.stride(0), 1)).view(torch.uint8))
        return DeviceCache(streams, (raw_group(rows),), engine_block_tokens)
    groups = []
    for members in _grouped(shapes):
        keys = [side_view(tensors[i], shapes[i].order_k, shapes[i].size, False) for i in members]
        values = [side_view(tensors[i], shapes[i].order_v, shapes[i].size, True) for i in members]
        groups.append(paged_group(keys, values, block_tokens))
    return DeviceCache(streams, tuple(groups), engine_block_tokens)


# ------------------------------------------------------------- what the model is

def _request(request: Any) -> Request:
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
        computed=lambda: request.num_computed_tokens)


def _model(config: "VllmConfig", settings: Settings, shapes: list[RankShape]) -> Model:
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
        groups = tuple(_group(shape, members, ranks, total) for members in _grouped(shape.layers))
    return Model(
        facts=_facts(config, settings, shape), groups=groups, block_tokens=block_tokens,
        engine_block_tokens=shape.block_tokens, ranks=ranks, prefill_cost=_prefill_cost(config),
        late_saves=shape.late_saves, drafts=config.speculative_config is not None)


def _group(shape: RankShape, members: list[int], ranks: int, total: int) -> LayerGroup:
    first = shape.layers[members[0]]
    heads = first.heads * ranks
    if ranks > 1 and first.heads == 1 and total < ranks:
        heads = total  # fewer heads than ranks: each rank has one of them, and they are kept once
    return LayerGroup(layers=len(members), kv_heads=heads, head_size_k=first.size,
                      format_k=FORMATS[getattr(torch, first.dtype)])


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
        quantization=str(model.quantization or ""), extra=settings.identity)


def _revision(config: "VllmConfig") -> str:
    """Which weights: a commit where there is one, else a digest of the files."""
    model = config.model_config
    if str(config.load_config.load_format) == "dummy":
        return f"dummy {model.seed}"
    commit = naming.snapshot_commit(str(model.model)) or \
        getattr(model.hf_config, "_commit_hash", None) or model.revision
    if commit:
        return str(commit)
    if pathlib.Path(str(model.model)).is_dir():
        return "sampled " + naming.sampled_digest(str(model.model), WEIGHTS)
    raise ValueError("kvkeep.vllm: which weights these are cannot be told: give a revision, or "
                     "kv_connector_extra_config.revision")


def _prefill_cost(config: "VllmConfig") -> PrefillCost:
    """Two FLOPs a weight, and attention's share of each token before; the speed is not known."""
    text = config.model_config.hf_text_config
    layers = int(getattr(text, "num_hidden_layers", 0) or 0)
    hidden = int(getattr(text, "hidden_size", 0) or 0)
    inner = int(getattr(text, "intermediate_size", 0) or 4 * hidden)
    return PrefillCost(2.0 * layers * hidden * (4 * hidden + 3 * inner), 4.0 * layers * hidden, 0.0)
