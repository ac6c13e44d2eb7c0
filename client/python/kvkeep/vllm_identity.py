"""Who may share: an engine's model, adapters, salts and images as kvkeep's identities.

Every part that changes K or V goes in, each in its own place, so that none can stand in for
another: an adapter is a part of the identity (a space of its own), a salt is part of a prompt,
images are digests over the placeholders that they stand for, and the tenant is the credential's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from kvkeep.shapes import ContentSpan, Identity

__all__ = ["Adapter", "Adapters", "Facts", "canonical", "content_digest", "digest",
           "hub_commit", "hub_folder", "sampled_digest", "snapshot_commit", "spans"]

SAMPLE_BYTES = 64 << 10
SAMPLES = 16


def digest(*parts: bytes | str) -> str:
    """A digest of parts, each with its length before it, so that no two lists give the same."""
    state = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def canonical(value: Any) -> str:
    """JSON with one spelling for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _files(folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    wanted = re.compile(pattern)
    return sorted(path for path in folder.iterdir()
                  if path.is_file() and wanted.fullmatch(path.name))


def content_digest(folder: str | os.PathLike[str], pattern: str = ".*") -> str:
    """Of the names and the whole content of a folder's files."""
    parts: list[bytes | str] = []
    for path in _files(pathlib.Path(folder), pattern):
        state = hashlib.sha256()
        with open(path, "rb") as file:
            while data := file.read(1 << 20):
                state.update(data)
        parts += [path.name, state.digest()]
    return digest(*parts)


def sampled_digest(folder: str | os.PathLike[str], pattern: str) -> str | None:
    """Of files too large to be read at each start: names, sizes, and pieces at even distances, the
    first and the last included. Training moves all weights, so it shows in any of them; who changes
    single values in place must give another revision. None: there is no such file, as where weights
    are streamed from an object store beside a folder of configurations."""
    parts: list[bytes | str] = []
    for path in _files(pathlib.Path(folder), pattern):
        size = path.stat().st_size
        parts += [path.name, str(size)]
        with open(path, "rb") as file:
            for i in range(SAMPLES):
                file.seek(max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))
                parts.append(file.read(SAMPLE_BYTES))
    return digest(*parts) if parts else None


def snapshot_commit(path: str) -> str | None:
    """The commit of a model that lies in a hub's cache (…/snapshots/COMMIT)."""
    found = re.search(r"/snapshots/([0-9a-f]{40})(?:/|$)", path)
    return found.group(1) if found else None


def hub_folder(name: str, revision: str | None = None, file: str = "config.json") -> str | None:
    """Where a hub's model or adapter of that name lies on this machine; nothing is downloaded."""
    try:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(name, file, revision=revision)
    except (ImportError, ValueError):  # no hub here, or no name of a hub's
        return None
    return os.path.dirname(path) if isinstance(path, str) else None


def hub_commit(name: str, revision: str | None) -> str | None:
    """The commit that a branch or tag of a hub's model stands for on this machine; a commit as it
    is."""
    if revision is not None and re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    for file in ("config.json", "params.json"):
        folder = hub_folder(name, revision, file)
        if folder is not None:
            return snapshot_commit(folder)
    return None


@dataclasses.dataclass(frozen=True)
class Facts:
    """What an engine says of its model. Texts as they are; kvkeep compares them in full."""

    model: str
    revision: str           # a commit, a digest of the weights, or a word of the operator's
    tokenizer: str = ""
    template: str = ""
    rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mask: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config_digest: str = ""  # of the whole model configuration
    compute_dtype: str = ""
    cache_dtype: str = ""
    scales_digest: str = ""  # of the FP8 scales; "" where the cache has none
    layout: str = ""         # how the bytes lie, where that is not what the format says
    quantization: str = ""
    length_rule: str = ""    # what follows from the longest prompt an engine takes
    draft: str = ""          # the model whose layers draft, and lie in the same cache
    extra: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def identity(self, adapter: "Adapter | None" = None) -> Identity:
        form = {"cache": self.cache_dtype, "scales": self.scales_digest, "layout": self.layout}
        extra = {"compute": self.compute_dtype, "config": self.config_digest,
                 "quantization": self.quantization, "length": self.length_rule,
                 "draft": self.draft}
        extra |= {f"operator.{name}": value for name, value in self.extra.items()}
        return Identity(
            model=self.model, revision=self.revision, tokenizer_digest=self.tokenizer,
            template_digest=self.template, position_encoding=_short(self.rope),
            adapter_name=adapter.name if adapter else b"",
            adapter_id=adapter.id if adapter else b"",
            adapter_version=adapter.version if adapter else b"",
            kv_format=_short(form), mask_rule=_short(self.mask),
            extra={name: value for name, value in extra.items() if value})


def _short(parts: Mapping[str, Any]) -> str:
    """Readable where it fits a name of the API (255 bytes), else its digest."""
    text = canonical({name: value for name, value in parts.items() if value not in ("", None)})
    return text if len(text.encode()) <= 255 else "sha256:" + digest(text)


@dataclasses.dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: `version` is the digest of its files."""

    name: str
    id: str
    version: str


class Adapters:
    """The adapters of an engine, with the versions that it has loaded.

    The engine reads an adapter's files once. When they change later under the same id, what it
    computes is of neither version for sure: such an adapter is not cached, until the engine is told
    to load it anew. Not thread safe.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, str, str], tuple[Any, Adapter]] = {}

    def find(self, name: str, number: int, path: str, reload: bool = False) -> Adapter | None:
        """None: its files have changed under it, or cannot be read."""
        try:
            path = _adapter_folder(path)
            stamp = [(file.name, file.stat().st_size, file.stat().st_mtime_ns)
                     for file in _files(pathlib.Path(path), ".*")]
            known = self._known.get((number, name, path))
            if known is not None and known[0] == stamp:
                return known[1]
            if known is not None and not reload:
                return None
            adapter = Adapter(name, str(number), content_digest(path))
        except OSError:
            return None
        self._known[number, name, path] = (stamp, adapter)
        return adapter


def _adapter_folder(path: str) -> str:
    """As vLLM finds it: a folder, one of the user's, or the name of a hub's adapter."""
    path = os.path.expanduser(path)
    if os.path.exists(path):
        return path
    return hub_folder(path, file="adapter_config.json") or path


def spans(features: Iterable[tuple[int, int, str]], length: int) -> list[ContentSpan]:
    """Images and the like as (first placeholder, count, hash of the content), within `length`
    tokens. The whole hash counts: it is hashed again only to fit."""
    result = []
    for first, count, name in sorted(features):
        end = min(first + count, length)
        if end > first:
            result.append(ContentSpan(first, end - first, hashlib.sha256(name.encode()).digest()))
    return result
