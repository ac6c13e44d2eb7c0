r"""kvkeep's connector for vLLM: KV that outlives an engine, shared by engines of one tenant.

    vllm serve MODEL --kv-transfer-config \
        '{"kv_connector": "KvkeepConnector", "kv_role": "kv_both"}'

Settings are vllm_orders.Settings. This module is only the seam between vLLM's interface and the two
halves, vllm_scheduler and vllm_worker, which do not know vLLM. Written for vLLM 0.32 with caches in
host memory (CPU builds) or on CUDA devices (vllm_device); on others it is refused at the start.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1, KVConnectorHandshakeMetadata, KVConnectorMetadata, KVConnectorRole,
    KVConnectorWorkerMetadata)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics, KVConnectorStats)
from vllm.v1.kv_cache_interface import (FullAttentionSpec, MLAAttentionSpec,
                                        SinkFullAttentionSpec)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvkeep import vllm_identity as naming
from kvkeep.vllm_blocks import ORDER_SIDE_BY_SIDE, EngineLayer, find_order
from kvkeep.vllm_device import (CudaStreams, DeviceCache, Streams, paged_group, raw_group,
                                side_view)
from kvkeep.vllm_metrics import CONNECTED, KvkeepPromMetrics, KvkeepStats
from kvkeep.vllm_model import (FORMATS, HANDED_ON, contents_are_named, grouped, hands_on,
                               make_model, make_request, stands_alone)
from kvkeep.vllm_orders import LayerShape, Orders, RankShape, Report, Settings
from kvkeep.vllm_plugin import register
from kvkeep.vllm_scheduler import SchedulerSide
from kvkeep.vllm_worker import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput

__all__ = ["KvkeepConnector"]

logger = logging.getLogger("vllm.kvkeep")
KEEPING = (FullAttentionSpec, MLAAttentionSpec, SinkFullAttentionSpec)  # and not their heirs
NULL_BLOCK = 0  # vLLM's pool takes its first block for that

register()  # where this module was named by its path: MultiConnector looks its children up by name

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclasses.dataclass
class _StepOrders(KVConnectorMetadata):
    orders: Orders


@dataclasses.dataclass
class _StepReport(KVConnectorWorkerMetadata):
    """What ranks have done; and, once, what their caches are, by rank: where kvkeep is one of a
    MultiConnector's, the handshake may carry another's."""

    report: Report
    shapes: dict[int, RankShape]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, _StepReport)
        return _StepReport(self.report.join(other.report), {**self.shapes, **other.shapes})


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

    _cache_hit_source = CacheHitSource.HOST  # whatever tier it came from, it is loaded from there

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
        self._shapes: dict[int, RankShape] = {}  # of ranks that have said what their caches are
        self._told: dict[str, int] = {}  # of the counters, at the last metrics
        self._contents_named = contents_are_named(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self.scheduler = SchedulerSide(self.settings)
            # A cache's failure must not be the request's; vLLM reads this after it has made us.
            transfer.kv_load_failure_policy = "recompute"
            if not self._contents_named:
                logger.warning("kvkeep: requests with images, audio or video are left alone: with "
                               "neither prefix caching nor a processor cache vLLM numbers these, "
                               "and does not digest them")

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
            block_tokens, shapes, self._scales_digest(layers),
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
                      for members in grouped(shapes)]
            self.worker = WorkerSide(self.settings, rank, block_tokens, groups, [])
        self._shapes = {rank: self._shape}

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
        if report is None and not self._shapes:
            return None
        shapes, self._shapes = self._shapes, {}
        return _StepReport(report or Report(), shapes)

    # ------------------------------------------------------------- scheduler

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]
                                    ) -> None:
        """Of other connectors, where this is one of several: then it comes with the first step."""
        for rank, handshake in metadata.items():
            if isinstance(handshake, _Handshake):
                self._shapes[rank] = handshake.shape
        self._start(wait=True)

    def _start(self, wait: bool) -> None:
        """When all ranks have said what their caches are."""
        assert self.scheduler is not None
        ranks = self._vllm_config.parallel_config.tensor_parallel_size
        if len(self._shapes) == ranks and not self.scheduler.started:
            shapes = [self._shapes[rank] for rank in sorted(self._shapes)]
            self.scheduler.start(make_model(self._vllm_config, self.settings, shapes,
                                            self._null_block()), wait)

    def _null_block(self) -> int | None:
        """Of a group that lets go of blocks while their request runs: any but full attention's."""
        (group,) = self._kv_cache_config.kv_cache_groups
        spec = group.kv_cache_spec
        layers = getattr(spec, "kv_cache_specs", {"": spec}).values()
        return None if all(type(layer) in KEEPING for layer in layers) else NULL_BLOCK

    @_timed
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int
                                   ) -> tuple[int | None, bool]:
        assert self.scheduler is not None
        if stands_alone(request, self._contents_named):
            return 0, False
        tokens = self.scheduler.match(make_request(request), num_computed_tokens)
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
            if not self.scheduler.started:
                self._shapes.update(meta.shapes)
                self._start(wait=False)
            self.scheduler.reported(meta.report)

    @_timed
    def request_finished(self, request: Any, block_ids: list[int]
                         ) -> tuple[bool, dict[str, Any] | None]:
        assert self.scheduler is not None
        computed = max(0, request.num_computed_tokens - request.num_in_flight_tokens)
        said = None
        if hands_on(request):
            said = {HANDED_ON: self.scheduler.hands_on(request.request_id, computed)}
        return self.scheduler.finished(request.request_id, computed, block_ids), said

    def reset_cache(self) -> bool | None:
        """vLLM's caches are reset, as when weights were updated: kvkeep forgets the model too."""
        assert self.scheduler is not None
        return self.scheduler.reset()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.scheduler is None or not self.scheduler.started:
            return None
        now = {**self.scheduler.counted(), CONNECTED: int(self.scheduler.connected)}
        changed = {name: value if name == CONNECTED else value - self._told.get(name, 0)
                   for name, value in now.items() if value != self._told.get(name)}
        self._told = now
        return KvkeepStats(changed) if changed else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None
                                 ) -> KVConnectorStats | None:
        return KvkeepStats(dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, vllm_config: "VllmConfig", metric_types: Any,
                           labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
                           ) -> KVConnectorPromMetrics | None:
        return KvkeepPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

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
        if self.settings.layout == "auto" and _dtype(tensor) in FORMATS and fits:
            heads, size = int(tensor.shape[1]), int(tensor.shape[3]) // 2
            layer = self._vllm_config.compilation_config.static_forward_context.get(name)
            order = _probe(tensor, layer, kernel_tokens, size)
        return LayerShape(heads, size, _dtype(tensor),
                          order[0] if order else None, order[1] if order else None, block_bytes)

    def _scales_digest(self, layers: list[tuple[str, torch.Tensor]]) -> str:
        """Of what a compact cache's values are scaled by; values of other scales are others."""
        if all(_dtype(tensor) in FORMATS for _, tensor in layers):
            return ""
        context = self._vllm_config.compilation_config.static_forward_context
        parts = []
        for name, _ in layers:
            for scale in ("_k_scale", "_v_scale"):
                value = getattr(context.get(name), scale, None)
                parts.append("none" if value is None else
                             torch.as_tensor(value).float().cpu().numpy().tobytes().hex())
        return naming.digest(*parts)

    def _layout_name(self, layers: list[tuple[str, torch.Tensor]]) -> str:
        """What decides how raw bytes are to be read: the kernel's choice, in this version of vLLM,
        and the shapes."""
        context = self._vllm_config.compilation_config.static_forward_context
        return naming.canonical([vllm.__version__, *(
            [list(tensor.shape[1:]), str(tensor.dtype), str(getattr(context.get(name), "isa", "")),
             type(getattr(context.get(name), "impl", None)).__name__]
            for name, tensor in layers)])


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
    for members in grouped(shapes):
        keys = [side_view(tensors[i], shapes[i].order_k, shapes[i].size, False) for i in members]
        values = [side_view(tensors[i], shapes[i].order_v, shapes[i].size, True) for i in members]
        groups.append(paged_group(keys, values, block_tokens))
    return DeviceCache(streams, tuple(groups), engine_block_tokens)
