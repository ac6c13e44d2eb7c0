"""The connector's counters in vLLM's own log and at its /metrics, as vllm:kvkeep_*."""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics, KVConnectorStats)
from vllm.v1.metrics.utils import create_metric_per_engine

__all__ = ["DOCUMENTED", "KvkeepPromMetrics", "KvkeepStats"]

CONNECTED = "connected"
DOCUMENTED = {
    "queries": "Requests that were looked up, each once.",
    "query_tokens": "Tokens of those requests.",
    "hit_tokens": "Tokens found beyond vLLM's own cache.",
    "loaded_tokens": "Tokens loaded into vLLM's cache.",
    "failed_loads": "Loads that failed; vLLM computed what they were for.",
    "saved_tokens": "Tokens copied by all ranks, and sealed.",
    "touched_tokens": "Tokens hit in vLLM's own cache that the daemon was told of.",
    "refused": "Requests that are not saved, for want of room.",
    "late": "Requests that did not wait for the daemon's answer or for the ranks.",
    "lost": "Connections to the daemon that were lost.",
    "resets": "Resets of the cache.",
    "dropped_jobs": "Notices to the daemon that were left out.",
}


class KvkeepStats(KVConnectorStats):
    """`data`: what was counted since the last time, and whether the daemon is connected."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> "KvkeepStats":
        for name, value in other.data.items():
            self.data[name] = value if name == CONNECTED else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        return {f"kvkeep {name.replace('_', ' ')}": value for name, value in self.data.items()
                if value or name == CONNECTED}

    def is_empty(self) -> bool:
        return not self.data


class KvkeepPromMetrics(KVConnectorPromMetrics):
    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: create_metric_per_engine(
                metric_types[Counter](name=f"vllm:kvkeep_{name}", documentation=text,
                                      labelnames=labelnames), per_engine_labelvalues)
            for name, text in DOCUMENTED.items()}
        self._connected = create_metric_per_engine(
            metric_types[Gauge](name=f"vllm:kvkeep_{CONNECTED}", multiprocess_mode="livemax",
                                documentation="1 while the daemon is connected.",
                                labelnames=labelnames), per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            if name == CONNECTED:
                self._connected[engine_idx].set(value)
            elif name in self._counters:
                self._counters[name][engine_idx].inc(value)
