"""kvkeep as a storage backend of SGLang's HiCache: pages that outlive an engine, shared by engines
of one tenant.

    python -m sglang.launch_server --enable-hierarchical-cache --hicache-mem-layout page_first
        --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
            "backend_name": "kvkeep", "module_path": "kvkeep.sglang", "class_name": "KvkeepStorage",
            "interface_v1": 1, "hicache_storage_pass_prefix_keys": true,
            "target": "unix:/run/kvkeep/kvkeep.sock"}'

SGLang names a page by a hash over all tokens up to it, and does not hand on the tokens. So a page
is one block of kvkeep, whose "tokens" are the eight words of that hash, and whose bytes are opaque:
that two pages are the same is as sure as SGLang's SHA-256, no more. Pages of a prompt form a chain
where SGLang passes the hashes before them; else each stands alone.

Calls come on SGLang's background threads, and may wait, but boundedly. What fails is a miss, or not
stored. A lost connection is made anew by a later call.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Sequence as SequenceOf
from typing import Any

import numpy as np
import torch
from sglang.srt.mem_cache import utils as their_utils
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from kvkeep import vllm_identity as naming
from kvkeep.client import Client, Retry, Space, default_target
from kvkeep.errors import Code, KvkeepError
from kvkeep.memory import SlotMemory
from kvkeep.session import Session
from kvkeep.shapes import Identity, Layout, LayerGroup, Placement, Prompt, Tier

__all__ = ["KvkeepStorage"]

logger = logging.getLogger(__name__)

WORDS = 8  # of a page's name: SHA-256 as u32
WEIGHTS = r".*\.(safetensors|bin|pt|pth|gguf)"
# Of the server's arguments, what changes K and V with the same files of weights.
ARGUMENTS = ("json_model_override_args", "quantization", "quantization_param_path", "dtype",
             "kv_cache_dtype", "context_length", "load_format", "model_impl",
             "speculative_draft_model_path", "speculative_draft_model_revision")
ALONE = "page alone"  # the salt of pages without known ancestors: none is a chain's first
PIN_MS = 30_000
THEIRS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


@dataclasses.dataclass(frozen=True)
class _Settings:
    target: str | None = None
    token: str | None = None
    tenant: str = ""
    model: str | None = None
    revision: str | None = None
    call_timeout_s: float = 5.0
    reconnect_ms: int = 1000
    identity: dict[str, str] = dataclasses.field(default_factory=dict)


class _Up:
    """A connection: session, space, and the memory of its pages."""

    def __init__(self, settings: _Settings, identity: Identity, page_bytes: int) -> None:
        self.client = Client(settings.target, token=settings.token, tenant=settings.tenant,
                             timeout=settings.call_timeout_s, retry=Retry(2, 5, 100))
        self._maps: dict[int, SlotMemory] = {}
        try:
            self.session: Session = self.client.session(name="sglang")
            self.space: Space = self.client.open_space(
                identity, [LayerGroup(layers=1, kv_heads=1, head_size_k=1, layout=Layout.OPAQUE,
                                      opaque_bytes=page_bytes)],
                block_tokens=WORDS, tenant=settings.tenant)
        except BaseException:
            self.client.close()
            raise

    def memory(self, row: Placement) -> SlotMemory:
        tier = int(row.tier)
        if tier not in self._maps:
            self._maps[tier] = self.session.map_slots(self.space, tier=row.tier)
        return self._maps[tier]

    def close(self) -> None:
        try:
            self.session.close()
        except (KvkeepError, OSError) as error:
            logger.debug("kvkeep: %s", error)
        self.client.close()


class KvkeepStorage(HiCacheStorage):  # type: ignore[misc]
    """The backend of one rank. Ranks are apart: SGLang itself takes what all of them have."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        if not hasattr(their_utils, "storage_namespace_seed"):
            raise ValueError("kvkeep.sglang: this SGLang names pages by tokens alone, without "
                             "adapter and salt, so that two adapters would share; 0.5.23 does not")
        extra = dict(storage_config.extra_config or {})
        known = {field.name for field in dataclasses.fields(_Settings)}
        self._settings = _Settings(**{name: value for name, value in extra.items()
                                      if name in known})
        for name in sorted(set(extra) - known - THEIRS):
            if not name.startswith(("hicache_", "prefetch_")):
                raise ValueError(f"kvkeep.sglang: no setting {name!r}")
        self._config = storage_config
        # Without the batch calls SGLang asks with the pages before, and stores without them.
        self._chained = bool(extra.get("interface_v1", 0))
        self._page_bytes = 0
        self._page_size = 1
        self._identity: Identity | None = None
        self._up: _Up | None = None
        self._again_at = 0.0
        self._said = ""  # why it is not connected: told once, not with each try
        self._lock = threading.Lock()

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._page_size = int(mem_pool_host.page_size)
        self._page_bytes = int(mem_pool_host.get_size_per_token()) * self._page_size
        self._identity = self._name(mem_pool_host)

    def _name(self, pool: Any) -> Identity:
        """Everything that decides what a page's bytes mean, the rank included."""
        config, settings = self._config, self._settings
        model = settings.model or config.model_name
        if not model:
            raise ValueError("kvkeep.sglang: the model has no name: give one as \"model\"")
        arguments = _server_arguments()
        folder = str(arguments.get("model_path") or config.model_name)
        revision = settings.revision or naming.snapshot_commit(folder)
        if revision is None and pathlib.Path(folder).is_dir():
            found = naming.sampled_digest(folder, WEIGHTS)
            revision = None if found is None else "sampled " + found
        elif revision is None:
            revision = naming.hub_commit(folder, arguments.get("revision"))
        if revision is None:
            raise ValueError("kvkeep.sglang: which weights these are cannot be told: give a "
                             "\"revision\"")
        ranks = {name: getattr(config, name, 0) for name in (
            "tp_rank", "tp_size", "pp_rank", "pp_size", "attn_cp_rank", "attn_cp_size", "dcp_rank",
            "dcp_size", "should_split_heads", "tp_lcm_size")}
        if getattr(config, "is_mla_model", False):
            del ranks["tp_rank"]  # all tensor ranks have the same bytes
        form = {name: str(getattr(pool, name, "")) for name in (
            "dtype", "layout", "layer_num", "head_num", "head_dim", "kv_lora_rank",
            "qk_rope_head_dim")}
        return Identity(
            model=settings.model or model, revision=revision,
            kv_format=naming.canonical([type(pool).__name__, form, self._page_size])[:255],
            mask_rule=f"sglang page {self._page_size}",
            extra={"ranks": naming.canonical(ranks), "form": naming.digest(naming.canonical(form)),
                   "arguments": naming.digest(naming.canonical(
                       {name: arguments.get(name) for name in ARGUMENTS})),
                   "config": naming.content_digest(folder, r"config\.json")
                   if pathlib.Path(folder).is_dir() else "",
                   **{f"operator.{name}": value for name, value in settings.identity.items()}})

    # ------------------------------------------------------------- the connection

    def _use(self, work: Callable[[_Up], Any], otherwise: Any) -> Any:
        """`work` under the lock, on a connection that lives; else `otherwise`."""
        with self._lock:
            up = self._connected()
            if up is None:
                return otherwise
            try:
                return work(up)
            except (KvkeepError, OSError) as error:
                logger.info("kvkeep: %s", error)
                return otherwise

    def _connected(self) -> _Up | None:
        if self._up is not None and not self._up.session.ended.is_set():
            return self._up
        now = time.monotonic()
        if self._identity is None or now < self._again_at:
            return None
        self._again_at = now + self._settings.reconnect_ms / 1e3
        if self._up is not None:
            self._up.close()
            self._up = None
        try:
            self._up = _Up(self._settings, self._identity, self._page_bytes)
        except (KvkeepError, OSError) as error:
            cause = error.code.name if isinstance(error, KvkeepError) else type(error).__name__
            logger.log(logging.DEBUG if cause == self._said else logging.WARNING,
                       "kvkeep: no connection to %s, SGLang goes on without, and tries again: %s",
                       self._settings.target or default_target(), error)
            self._said = cause
        else:
            self._said = ""
            logger.info("kvkeep: connected to %s", self._up.client.target)
        return self._up

    # ------------------------------------------------------------- chains of pages

    def _chains(self, keys: SequenceOf[str], extra_info: Any) -> list[tuple[Prompt, int]]:
        """The pages as prompts, each with how many pages of it are not asked for: one chain, or
        each page for itself."""
        before = getattr(extra_info, "prefix_keys", None) if self._chained else None
        if before is None:
            return [(Prompt(_words([key]), salt=ALONE, whole_blocks=True), 0) for key in keys]
        return [(Prompt(_words([*before, *keys]), whole_blocks=True), len(before))] if keys else []

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """How many pages from the first on are there."""
        def count(up: _Up) -> int:
            found = 0
            for prompt, before in self._chains(keys, extra_info):
                wanted = len(prompt.tokens) // WORDS - before  # type: ignore[arg-type]
                there = max(up.client.lookup(up.space, prompt).cached_tokens // WORDS - before, 0)
                found += there
                if there < wanted:
                    break
            return found

        return int(self._use(count, 0))

    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
                     ) -> list[bool]:
        """Pages from kvkeep's memory into SGLang's, without a copy in between."""
        pages = self._pages(keys, host_indices)
        return self._get(keys, extra_info, pages)

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
                     ) -> list[bool]:
        """And the other way."""
        pages = self._pages(keys, host_indices)
        return self._set(keys, extra_info, pages)

    def _pages(self, keys: list[str], host_indices: torch.Tensor) -> list[list[np.ndarray]]:
        """The pieces of each page in the host pool, as bytes over its memory."""
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        each = len(pointers) // max(len(keys), 1)
        pieces = [np.frombuffer((ctypes.c_uint8 * size).from_address(pointer), np.uint8)
                  for pointer, size in zip(pointers, sizes, strict=True)]
        pages = [pieces[i * each:(i + 1) * each] for i in range(len(keys))]
        if any(sum(piece.size for piece in page) != self._page_bytes for page in pages):
            raise ValueError("kvkeep.sglang: the host pool's pages are not of the size it says")
        return pages

    def _get(self, keys: SequenceOf[str], extra_info: Any, pages: list[list[np.ndarray]]
             ) -> list[bool]:
        results = [False] * len(keys)

        def get(up: _Up) -> list[bool]:
            at = 0
            for prompt, before in self._chains(keys, extra_info):
                with up.session.pin(up.space, prompt, ttl_ms=PIN_MS, copy_pin=True) as lease:
                    for row in lease.blocks()[before:]:
                        results[at + row.block - before] = _read(up, row, pages[
                            at + row.block - before])
                at += len(prompt.tokens) // WORDS - before  # type: ignore[arg-type]
            return results

        return list(self._use(get, results))

    def _set(self, keys: SequenceOf[str], extra_info: Any, pages: list[list[np.ndarray]]
             ) -> list[bool]:
        results = [False] * len(keys)
        if any(sum(piece.size for piece in page) != self._page_bytes for page in pages):
            return results

        def put(up: _Up) -> list[bool]:
            at = 0
            for prompt, before in self._chains(keys, extra_info):
                count = len(prompt.tokens) // WORDS - before  # type: ignore[arg-type]
                results[at:at + count] = [self._put(up, prompt, before, pages[at:at + count])
                                          ] * count
                at += count
            return results

        return list(self._use(put, results))

    def _put(self, up: _Up, prompt: Prompt, before: int, pages: list[list[np.ndarray]]) -> bool:
        """All pages of a chain. False: an ancestor has gone, so that nobody could find them, or
        there is no room."""
        try:
            sequence = up.session.open_sequence(up.space, prompt, tier=Tier.HOST,
                                                leave_on_host=True)
        except KvkeepError as error:
            if error.code == Code.RESOURCE_EXHAUSTED:
                return False
            raise
        with sequence:
            known = sequence.cached_tokens // WORDS
            if known < before:
                return False
            for row in sequence.blocks()[known:]:
                place, at = up.memory(row).slot(row), 0
                for piece in pages[row.block - before]:
                    place[at:at + piece.size] = piece
                    at += piece.size
            sequence.seal(all_ranks=True)
        return True

    # ------------------------------------------------------------- one page at a time

    def get(self, key: str, target_location: torch.Tensor | None = None,
            target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
                  ) -> list[torch.Tensor | None]:
        targets = list(target_locations or [])
        if len(targets) != len(keys) or any(target is None for target in targets):
            return [None] * len(keys)  # there is no other place to put them
        found = self._get(keys, None, [[_flat(target)] for target in targets])
        return [target if well else None for target, well in zip(targets, found)]

    def set(self, key: str, value: torch.Tensor | None = None,
            target_location: torch.Tensor | None = None, target_sizes: Any = None) -> bool:
        source = value if value is not None else target_location
        return source is not None and self.batch_set([key], [source])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None,
                  target_sizes: Any = None) -> bool:
        sources = list(values if values is not None else target_locations or [])
        if len(sources) != len(keys):
            return False
        return all(self._set(keys, None, [[_flat(source.contiguous())] for source in sources]))

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Forget the model's pages of this rank, for every engine of the tenant that has it."""
        if not self._use(lambda up: up.client.invalidate(up.space) is not None, False):
            raise RuntimeError("kvkeep could not be told to forget: try again")

    def close(self) -> None:
        with self._lock:
            if self._up is not None:
                self._up.close()
                self._up = None


def _server_arguments() -> dict[str, Any]:
    """Of the server in this process; none where the backend is used without one."""
    try:
        from sglang.srt.runtime_context import get_server_args

        return dict(vars(get_server_args()))
    except (AttributeError, ImportError, TypeError, ValueError):
        return {}


def _words(keys: SequenceOf[str]) -> np.ndarray:
    """Names of pages as tokens. Names that are not a SHA-256 are made one, marked as such."""
    parts = []
    for key in keys:
        try:
            name = bytes.fromhex(key)
        except ValueError:
            name = b""
        if len(name) != 4 * WORDS:
            name = hashlib.sha256(b"kvkeep page\0" + key.encode()).digest()
        parts.append(np.frombuffer(name, "<u4"))
    return np.concatenate(parts) if parts else np.empty(0, np.uint32)


def _flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).view(torch.uint8).numpy()


def _read(up: _Up, row: Placement, page: list[np.ndarray]) -> bool:
    if row.slot is None:
        return False
    memory = up.memory(row)
    place, at = memory.slot(row), 0
    if sum(piece.size for piece in page) != place.size:
        return False
    for piece in page:
        piece[:] = place[at:at + piece.size]
        at += piece.size
    return memory.generation(row) == row.generation
