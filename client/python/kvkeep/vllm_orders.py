"""What the two halves of the connector tell each other, once a step. Plain data: it is pickled on
its way to the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvkeep.client import Space
from kvkeep.errors import Code, KvkeepError

__all__ = ["NO_BLOCK", "Copy", "Endpoint", "LayerShape", "Orders", "RankShape", "Report",
           "Settings"]


NO_BLOCK = -1  # in place of an engine's block that it does without: nothing is loaded there


@dataclasses.dataclass(frozen=True)
class Settings:
    """kv_connector_extra_config. Every wait is bounded: where kvkeep is slow, vLLM computes."""

    target: str | None = None    # gRPC target; None: the daemon's default socket
    token: str | None = None     # credential; on a unix socket the uid may be one
    token_file: str | None = None
    tenant: str = ""             # empty: the credential's own
    block_tokens: int = 64       # of kvkeep's blocks; any size, vLLM's may be another
    layout: str = "auto"         # "raw": keep vLLM's blocks as they are, whole
    model: str | None = None     # name of the model, where the path is not one
    revision: str | None = None  # of the weights, where they cannot be told by their files
    identity: Mapping[str, str] = dataclasses.field(default_factory=dict)  # further parts
    save: bool = True
    load: bool = True
    min_tokens: int = 0          # shorter prompts are left alone; 0: one block
    lookup_wait_ms: int = 250    # then the request is computed
    remote_wait_ms: int = 150    # of that, for what comes from the store that daemons share
    handoff_wait_ms: int = 1000  # for what the engine that prefilled a request is just sealing
    lookups: int = 32            # requests between look-up and admission at a time
    finish_wait_ms: int = 1000   # how long a finished request's last blocks may wait to be saved
    start_wait_ms: int = 2000    # for the first connection, before the engine serves
    call_timeout_s: float = 5.0
    reconnect_ms: int = 200      # first wait before another try; doubles to 5 s

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Settings":
        known = {field.name for field in dataclasses.fields(cls)}
        strange = sorted(set(values) - known)
        if strange:
            raise ValueError(f"kv_connector_extra_config: kvkeep has no setting {strange[0]!r}; "
                             f"it has {', '.join(sorted(known))}")
        settings = cls(**values)
        for name in ("block_tokens", "lookups", "lookup_wait_ms"):
            if getattr(settings, name) < 1:
                raise ValueError(f"kv_connector_extra_config: {name} must be at least 1")
        if settings.layout not in ("auto", "raw"):
            raise ValueError("kv_connector_extra_config: layout is auto or raw")
        return settings

    def credential(self) -> str | None:
        if self.token_file is None:
            return self.token
        try:
            with open(self.token_file, encoding="utf-8") as file:
                return file.read().strip()
        except OSError as error:
            raise KvkeepError(f"token_file: {error}", Code.UNAUTHENTICATED) from error


@dataclasses.dataclass(frozen=True)
class LayerShape:
    """One layer of a rank's paged cache. `order_k` None: kept raw, `block_bytes` of each block."""

    heads: int
    size: int
    dtype: str
    order_k: str | None
    order_v: str | None
    block_bytes: int


@dataclasses.dataclass(frozen=True)
class RankShape:
    """What a rank says of its cache before the first step."""

    block_tokens: int             # of vLLM's blocks
    layers: tuple[LayerShape, ...]
    scales_digest: str = ""
    layout: str = ""              # a name for what is kept raw
    late_saves: bool = False      # on a GPU: a save may end steps after it was ordered


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """The instance that ranks join; `epoch` counts the scheduler's connections."""

    epoch: int
    instance_token: bytes


@dataclasses.dataclass(frozen=True)
class Copy:
    """Copy the tokens [first, end) of a request. `rows` are kvkeep's blocks from `first_block` on:
    (tier, slot, generation); `engine_blocks` are vLLM's, from `first_engine_block` on."""

    request_id: str
    order: int
    epoch: int
    space: Space
    first: int
    end: int
    first_block: int
    rows: tuple[tuple[int, int, int], ...]
    first_engine_block: int
    engine_blocks: tuple[int, ...]
    last: bool = False            # of a finished request: vLLM waits to be told, and frees it


@dataclasses.dataclass
class Orders:
    """From the scheduler to every rank."""

    endpoint: Endpoint | None = None
    spaces: tuple[Space, ...] = ()  # new ones, to be mapped ahead
    loads: list[Copy] = dataclasses.field(default_factory=list)
    saves: list[Copy] = dataclasses.field(default_factory=list)          # after this step's forward
    early_saves: list[Copy] = dataclasses.field(default_factory=list)    # before: of the preempted
    releases: list[str] = dataclasses.field(default_factory=list)        # nothing is saved of these
    preempted: list[str] = dataclasses.field(default_factory=list)  # others may get their blocks
    idle: bool = False              # nothing is computed: what is asked for or loaded is waited for


@dataclasses.dataclass
class Report:
    """From the ranks to the scheduler: which orders are done, well or not, by how many ranks; and
    how many have joined an epoch."""

    done: dict[int, tuple[bool, int]] = dataclasses.field(default_factory=dict)
    joined: dict[int, int] = dataclasses.field(default_factory=dict)

    def join(self, other: "Report") -> "Report":
        for order, (well, ranks) in other.done.items():
            known = self.done.get(order, (True, 0))
            self.done[order] = (known[0] and well, known[1] + ranks)
        for epoch, ranks in other.joined.items():
            self.joined[epoch] = self.joined.get(epoch, 0) + ranks
        return self
