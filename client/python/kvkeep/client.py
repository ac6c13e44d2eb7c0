"""A connection to one kvkeepd: calls, errors and repeats; spaces and what needs no session."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import random
import stat
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from kvkeep import errors
from kvkeep.errors import Code, KvkeepError
from kvkeep.shapes import (Identity, LayerGroup, PrefillCost, PriorityHint, Prompt, Text, Tokens,
                           as_bytes, prompt_message)
from kvkeep.v1 import kvkeep_pb2 as pb
from kvkeep.v1 import kvkeep_pb2_grpc as services

if TYPE_CHECKING:
    from kvkeep.session import Session

__all__ = ["Client", "Lookup", "Retry", "Space", "Tls", "connect", "default_target",
           "default_tls"]


@dataclasses.dataclass(frozen=True)
class Retry:
    """How calls that may be repeated are: after UNAVAILABLE, and after RESOURCE_EXHAUSTED where
    the daemon says when. Waits double from first_ms, never below what the daemon asked for."""

    attempts: int = 4
    first_ms: int = 20
    longest_ms: int = 2000

    def wait_ms(self, attempt: int, error: KvkeepError) -> int | None:
        """How long before attempt + 1; None: give up."""
        again = error.code == Code.UNAVAILABLE or (
            error.code == Code.RESOURCE_EXHAUSTED and error.retry_after_ms > 0)
        if not again or attempt + 1 >= self.attempts or error.retry_after_ms > self.longest_ms:
            return None
        wait = min(self.first_ms << attempt, self.longest_ms)
        return max(error.retry_after_ms, random.randint(wait // 2, wait))


@dataclasses.dataclass(frozen=True)
class Tls:
    """TLS for TCP, as PEM. Without `ca` the system's authorities; `certificate` and `key` where the
    daemon asks for a client's certificate."""

    ca: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None
    server_name: str | None = None  # where the certificate names another than the target


@dataclasses.dataclass(frozen=True)
class Space:
    """An open space. The id is good until the daemon says otherwise; opening again by the same
    identity gives the same space."""

    id: int
    created: bool
    block_tokens: int
    groups: tuple[LayerGroup, ...]
    tensor_shards: int
    pipeline_shards: int
    block_bytes: tuple[int, ...]               # [group], all shards
    shard_bytes: tuple[tuple[int, ...], ...]   # [group][stored shard]
    rank_shard: tuple[tuple[int, ...], ...]    # [group][rank]
    disk_block_bytes: tuple[int, ...] = ()     # [group] as stored there; 0: none is
    host_block_bytes: tuple[int, ...] = ()

    def rank_bytes(self, group: int = 0, rank: int = 0) -> int:
        """Bytes of one block's shard of a rank: the stride between slots of its memory."""
        return self.shard_bytes[group][self.rank_shard[group][rank]]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """How many tokens of a prompt are cached, and where. Times are estimates; 0: unknown.

    restore_ns is for reading what is on disk alone, restore_recompute_ns for computing from there.
    """

    cached_tokens: int
    device_tokens: int
    host_tokens: int
    load_ns: int
    recompute_ns: int
    disk_tokens: int
    restore_ns: int
    restore_recompute_ns: int
    partial_tokens: int = 0  # of cached_tokens, the last: in a part of a block
    remote_state: int = 0  # pb.RemoteState: of the store that daemons share, for the rest
    remote_tokens: int = 0  # that it has behind those that are cached here

    @property
    def remote_pending(self) -> bool:
        """More may come from the store that daemons share: look up again, or compute."""
        return self.remote_state in (pb.REMOTE_STATE_ASKED, pb.REMOTE_STATE_FETCHING)


def default_target() -> str:
    """The daemon's own default: KVKEEP_TARGET, else the first socket that is there of
    $XDG_RUNTIME_DIR, /run/kvkeep and /tmp; in /tmp, where anybody can put one, only one's own or
    root's. Without any, the first that may be in a folder which does not let one look."""
    if os.environ.get("KVKEEP_TARGET"):
        return os.environ["KVKEEP_TARGET"]
    folders = [os.environ.get("XDG_RUNTIME_DIR"), "/run/kvkeep", "/tmp"]
    paths = [os.path.join(folder, "kvkeep.sock") for folder in folders if folder]
    hidden = []
    for path in paths:
        try:
            status = os.lstat(path)
        except PermissionError:
            hidden.append(path)
            continue
        except OSError:
            continue
        if stat.S_ISSOCK(status.st_mode) and (path != "/tmp/kvkeep.sock"
                                              or status.st_uid in (os.geteuid(), 0)):
            return "unix:" + path
    return "unix:" + (hidden or paths)[0]


def default_tls() -> Tls | None:
    """What KVKEEP_CA, KVKEEP_CERTIFICATE, KVKEEP_KEY and KVKEEP_SERVER_NAME say, as kvkeepctl reads
    them; None: neither of the first two is set, so no TLS is wanted. OSError: a file of them cannot
    be read."""
    paths = [os.environ.get(name) for name in ("KVKEEP_CA", "KVKEEP_CERTIFICATE", "KVKEEP_KEY")]
    if not (paths[0] or paths[1]):
        return None
    return Tls(*(pathlib.Path(path).read_bytes() if path else None for path in paths),
               server_name=os.environ.get("KVKEEP_SERVER_NAME") or None)


class Client:
    """One connection. Thread safe; use as a context manager, or close().

    Calls raise KvkeepError. Each takes at most `timeout` seconds; those that are safe to repeat
    are repeated as `retry` says.

    Where no `token` is given, KVKEEP_TOKEN is taken, and where no `tls` is, default_tls(); "" is no
    token, and white space around it (a file's last newline) is not part of it. A unix socket needs
    neither: it knows the caller's uid. ValueError: the target is neither "host:port" nor
    "unix:path", or the token has what no token has.

    A connection belongs to the process that made it and cannot be pickled: after os.fork() or in a
    worker process make another.
    """

    def __init__(self, target: str | None = None, *, token: str | None = None,
                 tls: Tls | None = None, tenant: Text = b"", timeout: float = 20.0,
                 retry: Retry = Retry(), message_bytes: int = 64 << 20) -> None:
        self.target = target or default_target()
        if ":" not in self.target:
            raise ValueError(f'target: "{self.target}" must be host:port or unix:path')
        token = (os.environ.get("KVKEEP_TOKEN", "") if token is None else token).strip()
        if not token.isascii() or not token.isprintable():
            raise ValueError("token: it has characters that no token has")
        if self.target.startswith("unix:"):
            tls = None
        elif tls is None:
            tls = default_tls()
        self._closed = False
        self.tenant = as_bytes(tenant)
        self.timeout = timeout
        self.retry = retry
        self.metadata = (("authorization", f"Bearer {token}"),) if token else ()
        options: list[tuple[str, Any]] = [("grpc.use_local_subchannel_pool", 1),
                                          ("grpc.max_receive_message_length", message_bytes),
                                          ("grpc.max_send_message_length", message_bytes)]
        if tls is None:
            self._channel = grpc.insecure_channel(self.target, options=options)
        else:
            if tls.server_name:
                options.append(("grpc.ssl_target_name_override", tls.server_name))
            self._channel = grpc.secure_channel(
                self.target, grpc.ssl_channel_credentials(tls.ca, tls.key, tls.certificate),
                options=options)
        self.calls = services.KvkeepStub(self._channel)
        self.admin = services.AdminStub(self._channel)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a kvkeep.Client is a connection of its process: make one in each")

    def close(self) -> None:
        """Drop the connection; sessions on it end."""
        self._closed = True
        self._channel.close()

    def open_calls(self) -> services.KvkeepStub:
        """The service's calls. KvkeepError: close() was called."""
        if self._closed:
            raise KvkeepError("the client was closed", Code.FAILED_PRECONDITION)
        return self.calls

    def call(self, name: str, request: Any, *, timeout: float | None = None,
             repeat: bool = False) -> Any:
        """One unary call of the Kvkeep service by its name, errors translated. `repeat`: it is
        safe to send again."""
        end = time.monotonic() + (self.timeout if timeout is None else timeout)
        attempt = 0
        while True:
            try:
                return getattr(self.open_calls(), name)(request, metadata=self.metadata,
                                                 timeout=max(end - time.monotonic(), 0.001))
            except grpc.RpcError as raised:
                error = errors.from_rpc_error(raised)
                wait_ms = self.retry.wait_ms(attempt, error) if repeat else None
                if wait_ms is None or time.monotonic() + wait_ms / 1e3 >= end:
                    raise error from None
            time.sleep(wait_ms / 1e3)
            attempt += 1

    def server_info(self) -> pb.GetServerInfoResponse:
        """Version, features, limits, tenants of the credential."""
        return self.call("GetServerInfo", pb.GetServerInfoRequest(), repeat=True)

    def open_space(self, identity: Identity, groups: Sequence[LayerGroup], *,
                   block_tokens: int = 16, tensor_shards: int = 1, pipeline_shards: int = 1,
                   prefill_cost: PrefillCost = PrefillCost(), lookup_min_tokens: int = 0,
                   tenant: Text | None = None, partial_reuse: bool | None = None) -> Space:
        """Open a space, or find it. KvkeepError ALREADY_EXISTS: the identity is known with another
        geometry. `partial_reuse`: hits may end within a block, for every worker of the space, until
        somebody says False; None: as it is."""
        response = self.call("OpenSpace", pb.OpenSpaceRequest(
            tenant=self.tenant if tenant is None else as_bytes(tenant),
            identity=identity.message(), block_tokens=block_tokens,
            groups=[group.message() for group in groups], tensor_shards=tensor_shards,
            pipeline_shards=pipeline_shards, prefill_cost=prefill_cost.message(),
            lookup_min_tokens=lookup_min_tokens,
            partial_reuse={None: pb.PARTIAL_REUSE_AS_IT_IS, False: pb.PARTIAL_REUSE_OFF,
                           True: pb.PARTIAL_REUSE_ON}[partial_reuse]), repeat=True)
        return Space(
            id=response.space_id, created=response.created, block_tokens=block_tokens,
            groups=tuple(groups), tensor_shards=tensor_shards, pipeline_shards=pipeline_shards,
            block_bytes=tuple(group.block_bytes for group in response.groups),
            shard_bytes=tuple(tuple(group.shard_bytes) for group in response.groups),
            rank_shard=tuple(tuple(group.rank_shard) for group in response.groups),
            disk_block_bytes=tuple(group.disk_block_bytes for group in response.groups),
            host_block_bytes=tuple(group.host_block_bytes for group in response.groups))

    def lookup(self, space: Space, tokens: Tokens, *, leave_last: bool = False,
               retry: bool = False, read_ahead: bool = False) -> Lookup:
        """How much of a prompt is cached now. Holds nothing. `retry`: this query was counted
        before; `read_ahead`: bring what is on disk alone to memory."""
        response = self.call("Lookup", pb.LookupRequest(
            space_id=space.id, prompt=prompt_message(tokens), leave_last=leave_last, retry=retry,
            read_ahead=read_ahead), repeat=True)
        return Lookup(response.cached_tokens, response.device_tokens, response.host_tokens,
                      response.load_ns, response.recompute_ns, response.disk_tokens,
                      response.restore_ns, response.restore_recompute_ns,
                      response.partial_tokens, response.remote.state, response.remote.tokens)

    def touch(self, space: Space, tokens: Tokens, hints: Sequence[PriorityHint] = ()) -> int:
        """These tokens were hit in the engine's own cache: keep them young here. How many of them
        are known."""
        response = self.call("Touch", pb.TouchRequest(
            space_id=space.id, prompt=prompt_message(tokens),
            hints=[hint.message() for hint in hints]), repeat=True)
        return response.touched_tokens

    def invalidate(self, space: Space | None = None, *, prefix: Prompt | None = None,
                   salt: Text | None = None, model: Text = b"", revision: Text = b"",
                   adapter_name: Text = b"", adapter_id: Text = b"",
                   adapter_version: Text = b"", position_encoding: Text = b"",
                   kv_format: Text = b"", mask_rule: Text = b"", tenant: Text | None = None
                   ) -> pb.InvalidateResponse:
        """Forget a space, a prefix or a salt of it, or by names over all spaces of the tenant.
        Nothing of it is found when this returns, in no tier, nor after a restart."""
        if space is None and prefix is not None:
            raise ValueError("a prefix is of one space: name it")
        request = pb.InvalidateRequest(
            space_id=space.id if space else 0,
            tenant=self.tenant if tenant is None else as_bytes(tenant), model=as_bytes(model),
            revision=as_bytes(revision), adapter_name=as_bytes(adapter_name),
            adapter_id=as_bytes(adapter_id), adapter_version=as_bytes(adapter_version),
            position_encoding=as_bytes(position_encoding), kv_format=as_bytes(kv_format),
            mask_rule=as_bytes(mask_rule), by_salt=salt is not None, salt=as_bytes(salt or b""),
            prefix=prefix.message() if prefix else None)
        return self.call("Invalidate", request, repeat=True)

    def publish(self, space: Space, tokens: Tokens) -> pb.PublishPrefixResponse:
        """Put the whole blocks of a cached prefix into the public scope; needs the right to."""
        return self.call("PublishPrefix", pb.PublishPrefixRequest(
            space_id=space.id, prompt=prompt_message(tokens)), repeat=True)

    def unpublish(self, public_id: int) -> pb.UnpublishPrefixResponse:
        """No look-up finds it any more; who holds it reads on."""
        return self.call("UnpublishPrefix", pb.UnpublishPrefixRequest(public_id=public_id))

    def session(self, *, name: Text = "", tenant: Text | None = None, rank: int = 0,
                instance_token: bytes = b"",
                on_notice: Callable[[str, int], None] | None = None) -> "Session":
        """Open an instance, or join one by its token. A context manager: what it holds ends with
        it. `on_notice`: see Session. KvkeepError ALREADY_EXISTS: the rank is there; NOT_FOUND: no
        such instance."""
        from kvkeep.session import Session

        return Session(self, name=as_bytes(name),
                       tenant=self.tenant if tenant is None else as_bytes(tenant), rank=rank,
                       instance_token=instance_token, on_notice=on_notice)


def connect(target: str | None = None, **options: Any) -> Client:
    """Client(target, …): the daemon's default socket where no target is given. Targets are
    gRPC's: "unix:/run/kvkeep/kvkeep.sock", "host:port"."""
    return Client(target, **options)
