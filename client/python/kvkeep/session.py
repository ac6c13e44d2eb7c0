"""A process's session, and what it holds: sequences, leases, transfers, mapped memory."""

from __future__ import annotations

import dataclasses
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence as SequenceOf
from typing import Any

import grpc
import numpy as np
import xxhash
from numpy.typing import ArrayLike

from kvkeep import errors
from kvkeep.client import Client, Space
from kvkeep.errors import Code, KvkeepError
from kvkeep.memory import Scratch, SideSocket, SlotMemory
from kvkeep.shapes import (AttendPlace, ContentSpan, Format, Placement, PriorityHint, Tier, Tokens,
                           prompt_message, span_messages, token_bytes)
from kvkeep.v1 import kvkeep_pb2 as pb

__all__ = ["AttendResult", "Lease", "Sequence", "Session", "Swap", "Transfer"]

logger = logging.getLogger(__name__)

SLOT_NONE = 0xFFFFFFFF
PIECE_BYTES = 1 << 20


class _Tables:
    """Block tables as they come in answers, kept up to date: [group][block]."""

    def __init__(self, group_count: int) -> None:
        self.groups: list[dict[int, Placement]] = [{} for _ in range(group_count)]

    def update(self, tables: Iterable[pb.BlockTable]) -> None:
        for table in tables:
            slots = np.frombuffer(table.slots, dtype="<u4")
            generations = np.frombuffer(table.generations, dtype="<u4")
            spaces = np.frombuffer(table.spaces, dtype="<u8")
            for i, slot in enumerate(slots.tolist()):
                block = table.first_block + i
                gone = slot == SLOT_NONE
                self.groups[table.group][block] = Placement(
                    block, Tier.ANY if gone else Tier(table.tiers[i]), None if gone else slot,
                    int(generations[i]), int(spaces[i]) if len(spaces) > 0 else 0)

    def cut(self, block_count: int) -> None:
        for group in self.groups:
            for block in [block for block in group if block >= block_count]:
                del group[block]

    def rows(self, group: int) -> list[Placement]:
        return [self.groups[group][block] for block in sorted(self.groups[group])]


@dataclasses.dataclass(frozen=True)
class AttendResult:
    """output: fp32 [query_count][query_heads][head_size_v]; lse: fp32 [query_count][query_heads],
    the natural log, -inf where nothing is visible. Where blocks of host memory were attended is
    one choice for all items of a call, by the estimates beside it (0: not known)."""

    output: np.ndarray
    lse: np.ndarray
    device_tokens: int
    host_tokens: int
    host_place: AttendPlace = AttendPlace.NO_CHOICE
    in_place_ns: int = 0
    bring_in_ns: int = 0


@dataclasses.dataclass(frozen=True)
class Swap:
    """What SwapOut or SwapIn moved. Estimates in ns; 0: unknown."""

    moved_blocks: int
    moved_bytes: int
    copy_ns: int
    load_ns: int
    recompute_ns: int


class Session:
    """One process of an instance, for as long as its stream is open. Thread safe, but a Sequence
    is one thread's at a time.

    `on_notice(kind, value)` is called on a thread of the session's: "draining", "rank_ended"
    (value: the rank) or "invalidated" (value: the space). It may close() the session; what it
    raises is logged.
    """

    def __init__(self, client: Client, *, name: bytes = b"", tenant: bytes = b"", rank: int = 0,
                 instance_token: bytes = b"",
                 on_notice: Callable[[str, int], None] | None = None) -> None:
        self.client = client
        self.rank = rank
        self.on_notice = on_notice
        self.ended = threading.Event()
        self.error: KvkeepError | None = None  # why it ended, where it did by itself
        self._side: SideSocket | None = None
        self._lock = threading.Lock()
        self._requests: queue.SimpleQueue[pb.SessionRequest | None] = queue.SimpleQueue()
        self._welcome: queue.SimpleQueue[pb.SessionWelcome | None] = queue.SimpleQueue()
        self._requests.put(pb.SessionRequest(hello=pb.SessionHello(
            tenant=tenant, instance_token=instance_token, rank=rank, name=name)))
        self._stream = client.open_calls().Session(iter(self._requests.get, None),
                                            metadata=client.metadata)
        self._reader = threading.Thread(target=self._read, name="kvkeep-session", daemon=True)
        self._reader.start()
        try:
            welcome = self._welcome.get(timeout=client.timeout)
        except queue.Empty:
            self._stream.cancel()
            raise KvkeepError("the daemon did not open a session in time",
                              Code.DEADLINE_EXCEEDED) from None
        if welcome is None:
            raise self.error or KvkeepError("the session did not begin", Code.UNAVAILABLE)
        self.id: int = welcome.session_id
        self.instance_token: bytes = welcome.instance_token  # ranks join by it
        self.boot_id: bytes = welcome.boot_id
        self._side_path = welcome.side_socket_path.decode()
        self._side_token = welcome.side_token

    def _read(self) -> None:
        try:
            for event in self._stream:
                if event.HasField("welcome"):
                    self._welcome.put(event.welcome)
                elif event.HasField("notice") and self.on_notice is not None:
                    kind = pb.SessionNotice.Kind.Name(event.notice.kind)
                    try:
                        self.on_notice(kind.removeprefix("KIND_").lower(), event.notice.value)
                    except Exception:  # the session is not the listener's to end
                        logger.exception("kvkeep: on_notice failed")
        except grpc.RpcError as raised:
            self.error = errors.from_rpc_error(raised)
        finally:
            self.ended.set()
            self._welcome.put(None)

    def __reduce__(self) -> Any:
        raise TypeError("a kvkeep.Session is of its process: open one in each, or join the "
                        "instance by its token")

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the session: what it holds is given back. Arrays of mapped memory stay readable, but
        the slots behind them are others' from here on."""
        self._requests.put(None)
        if threading.current_thread() is self._reader:  # from on_notice: the stream ends after it
            self._stream.cancel()
        else:
            if not self.ended.wait(self.client.timeout):
                self._stream.cancel()
            self._reader.join(self.client.timeout)
        with self._lock:
            if self._side is not None:
                self._side.close()
                self._side = None

    @property
    def is_local(self) -> bool:
        """Can memory be mapped?"""
        return self._side_path != ""

    def side(self) -> SideSocket:
        """The session's side socket, connected when first asked for."""
        with self._lock:
            if self._side is None:
                if self.ended.is_set():
                    raise KvkeepError("the session has ended", Code.FAILED_PRECONDITION)
                if not self.is_local:
                    raise KvkeepError("memory can be mapped by local processes only",
                                      Code.FAILED_PRECONDITION)
                self._side = SideSocket(self._side_path, self._side_token)
            return self._side

    def map_slots(self, space: Space, *, group: int = 0, tier: Tier = Tier.ANY,
                  rank: int | None = None, read_only: bool = False,
                  public_id: int = 0) -> SlotMemory:
        """Map the slots of a rank's shard (this session's where none is given), in the tier where
        open_sequence() puts blocks, or in that which is named. `public_id`: those of a public space
        of this geometry (Placement.space_id) instead, read-only, on the host."""
        if public_id != 0:
            tier, read_only = Tier.HOST, True
        return SlotMemory(self, space, group, tier, self.rank if rank is None else rank, read_only,
                          public_id)

    def map_scratch(self, size_bytes: int) -> Scratch:
        """Map memory for operands of attend()."""
        return Scratch(self, size_bytes)

    def open_sequence(self, space: Space, tokens: Tokens = (), *, leave_last: bool = False,
                      growth_tokens: int = 0, tier: Tier = Tier.ANY, leave_on_host: bool = False,
                      no_lookup: bool = False, retry: bool = False,
                      hints: SequenceOf[PriorityHint] = (),
                      request_id: bytes | None = None) -> "Sequence":
        """Find the longest cached prefix, hold it, reserve blocks for the rest. Repeated safely:
        each call has a request id of its own where none is given."""
        response = self.client.call("OpenSequence", pb.OpenSequenceRequest(
            session_id=self.id, space_id=space.id,
            request_id=secrets.token_bytes(16) if request_id is None else request_id,
            prompt=prompt_message(tokens), leave_last=leave_last, growth_tokens=growth_tokens,
            tier=int(tier), leave_on_host=leave_on_host, no_lookup=no_lookup, retry=retry,
            hints=[hint.message() for hint in hints]), repeat=True)
        return Sequence(self, space, response)

    def pin(self, space: Space, tokens: Tokens, *, ttl_ms: int = 30_000, leave_last: bool = False,
            min_tokens: int = 0, copy_pin: bool = False,
            request_id: bytes | None = None) -> "Lease":
        """Hold the longest cached prefix under a lease. Nothing cached: a lease of 0 tokens."""
        response = self.client.call("Pin", pb.PinRequest(
            session_id=self.id, space_id=space.id, prompt=prompt_message(tokens),
            leave_last=leave_last, ttl_ms=ttl_ms, min_tokens=min_tokens, copy_pin=copy_pin,
            request_id=secrets.token_bytes(16) if request_id is None else request_id), repeat=True)
        return Lease(self, space, response)

    def attend(self, space: Space, items: SequenceOf[tuple["Sequence | Lease", int, np.ndarray]],
               *, layer: int, scale: float, group: int = 0, causal: bool = True,
               group_window: bool = True, window: int = 0, sinks: int = 0, soft_cap: float = 0.0,
               query_format: Format = Format.FP32, rank: int | None = None,
               alibi_slopes: SequenceOf[float] = (),
               sink_logits: SequenceOf[float] = ()) -> list[AttendResult]:
        """Attention of queries over what sequences or leases hold, where it lies.

        items: (sequence or lease, absolute position of the first query, queries
        [query_count][query_heads][head_size_k] in query_format; bf16 as its bits, u16). `layer` is
        within the group. alibi_slopes and sink_logits: one for each query head, or none. Results in
        the order of items.
        """
        if not items:
            raise ValueError("nothing to attend")
        messages = []
        for holder, position, queries in items:
            array = np.ascontiguousarray(queries)
            if array.ndim != 3 or array.itemsize != query_format.size:
                raise ValueError("queries are [query_count][query_heads][head_size_k] of "
                                 f"{query_format.size} bytes each")
            name = "sequence_id" if isinstance(holder, Sequence) else "lease_id"
            messages.append(pb.AttendItem(position=position, query_count=array.shape[0],
                                          queries=pb.Operand(data=array.tobytes()),
                                          **{name: holder.id}))
        heads = items[0][2].shape[1]
        response = self.client.call("Attend", pb.AttendRequest(
            session_id=self.id, group=group, layer=layer,
            rank=self.rank if rank is None else rank, query_heads=heads, format=int(query_format),
            scale=scale, soft_cap=soft_cap, causal=causal, group_window=group_window,
            window=window, sinks=sinks, items=messages, alibi_slopes=alibi_slopes,
            sink_logits=sink_logits), repeat=True)
        results = []
        for message, result in zip(messages, response.results, strict=True):
            output = np.frombuffer(result.output, dtype="<f4")
            results.append(AttendResult(
                output.reshape(message.query_count, heads, -1),
                np.frombuffer(result.lse, dtype="<f4").reshape(message.query_count, heads),
                result.device_tokens, result.host_tokens, AttendPlace(response.host_place),
                response.in_place_ns, response.bring_in_ns))
        return results

    def _read_blocks(self, group: int, rank: int | None, first: int, count: int,
                     **holder: int) -> Iterator[tuple[int, bytes]]:
        """Blocks by gRPC, whole and checked against their checksums."""
        parts: list[bytes] = []
        block = first
        request = pb.ReadBlocksRequest(session_id=self.id, group=group,
                                       rank=self.rank if rank is None else rank,
                                       first_block=first, block_count=count, **holder)
        try:
            for part in self.client.open_calls().ReadBlocks(
                    request, metadata=self.client.metadata, timeout=self.client.timeout):
                if xxhash.xxh3_64_intdigest(part.data) != part.checksum:
                    raise KvkeepError(f"block {part.block} was damaged on its way", Code.DATA_LOSS)
                if part.block != block:
                    yield block, b"".join(parts)
                    parts, block = [], part.block
                parts.append(part.data)
        except grpc.RpcError as raised:
            raise errors.from_rpc_error(raised) from None
        if parts:
            yield block, b"".join(parts)


class _Holder:
    """What sequences and leases have in common: blocks that can be read."""

    session: Session
    space: Space
    id: int
    _tables: _Tables
    _field: str

    def blocks(self, group: int = 0) -> list[Placement]:
        """Where the blocks of a group are, from the first."""
        return self._tables.rows(group)

    def read(self, *, group: int = 0, rank: int | None = None, first_block: int = 0,
             block_count: int | None = None) -> list[bytes]:
        """Bytes of blocks by gRPC: for workers that cannot map memory."""
        count = len(self.blocks(group)) - first_block if block_count is None else block_count
        parts = self.session._read_blocks(group, rank, first_block, count,
                                          **{self._field: self.id})
        return [data for _, data in parts]

    def begin_transfer(self, *, write: bool = False, first_block: int = 0,
                       block_count: int | None = None) -> "Transfer":
        """A ticket under which the slots stay where they are, even past a lease's end: for copies
        that this process makes. A context manager."""
        count = len(self.blocks(0)) - first_block if block_count is None else block_count
        response = self.session.client.call("BeginTransfer", pb.BeginTransferRequest(
            session_id=self.session.id, write=write, first_block=first_block, block_count=count,
            **{self._field: self.id}))
        return Transfer(self.session, self.space, response)


class Transfer:
    """An open ticket; `blocks(group)` says where its slots are."""

    def __init__(self, session: Session, space: Space, response: pb.BeginTransferResponse) -> None:
        self._session = session
        self.ticket: int = response.ticket
        self._tables = _Tables(len(space.groups))
        self._tables.update(response.tables)
        self._open = True

    def blocks(self, group: int = 0) -> list[Placement]:
        return self._tables.rows(group)

    def __enter__(self) -> "Transfer":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Nothing of this process touches the slots any more."""
        if self._open:
            self._open = False
            self._session.client.call("EndTransfer", pb.EndTransferRequest(
                session_id=self._session.id, ticket=self.ticket))


class Lease(_Holder):
    """A pinned prefix of `tokens` tokens, until it is released or its time is over."""

    _field = "lease_id"

    def __init__(self, session: Session, space: Space, response: pb.PinResponse) -> None:
        self.session = session
        self.space = space
        self.id = response.lease_id
        self.tokens: int = response.cached_tokens
        self.ttl_ms: int = response.ttl_ms
        self._tables = _Tables(len(space.groups))
        self._tables.update(response.tables)
        self._released = response.lease_id == 0

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.release()
        except KvkeepError as error:
            if error.code not in (Code.NOT_FOUND, Code.FAILED_PRECONDITION):
                raise  # over by itself is as good as released

    def renew(self, ttl_ms: int) -> int:
        """From now on; the time left in ms."""
        response = self.session.client.call("Renew", pb.RenewRequest(
            session_id=self.session.id, lease_id=self.id, ttl_ms=ttl_ms), repeat=True)
        self.ttl_ms = response.ttl_ms
        return self.ttl_ms

    def release(self) -> None:
        """Give it back; once is enough."""
        if not self._released:
            self._released = True
            self.session.client.call("Release", pb.ReleaseRequest(
                session_id=self.session.id, lease_ids=[self.id]))


class Sequence(_Holder):
    """A request's block table in the daemon. Figures are as of the last call."""

    _field = "sequence_id"

    def __init__(self, session: Session, space: Space, response: pb.SequenceResponse) -> None:
        self.session = session
        self.space = space
        self.id = response.sequence_id
        self._tables = _Tables(len(space.groups))
        self._closed = False
        self._update(response)

    def _update(self, response: pb.SequenceResponse) -> None:
        self.cached_tokens: int = response.cached_tokens
        self.sealed_tokens: int = response.sealed_tokens
        self.committed_tokens: int = response.committed_tokens
        self.length: int = response.length
        self.grant_first: int = response.grant_first  # [grant_first, length) may be written
        self.partial_tokens: int = response.partial_tokens  # of cached_tokens: of a part of a block
        self.swapped_out: bool = response.state == pb.SEQUENCE_STATE_SWAPPED_OUT
        self._tables.update(response.tables)
        self._tables.cut(-(-self.length // self.space.block_tokens))

    def __enter__(self) -> "Sequence":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except KvkeepError as error:
            if error.code != Code.NOT_FOUND:
                raise

    def refresh(self) -> "Sequence":
        """Ask for all of it again."""
        self._update(self.session.client.call("GetSequence", pb.GetSequenceRequest(
            session_id=self.session.id, sequence_id=self.id), repeat=True))
        return self

    def append(self, tokens: ArrayLike, *, draft: bool = False,
               spans: SequenceOf[ContentSpan] = ()) -> None:
        """Grow. What may be written now is [grant_first, length)."""
        self._update(self.session.client.call("Append", pb.AppendRequest(
            session_id=self.session.id, sequence_id=self.id, expected_length=self.length,
            tokens=token_bytes(tokens), draft=draft, spans=span_messages(spans)), repeat=True))

    def seal(self, length: int | None = None, *, all_ranks: bool = False) -> pb.SealResponse:
        """This rank (or with all_ranks this process for all) has written everything below `length`
        (None: all). Full blocks become visible when every rank has sealed them."""
        response = self.session.client.call("Seal", pb.SealRequest(
            session_id=self.session.id, sequence_id=self.id, expected_length=self.length,
            length=self.length if length is None else length, all_ranks=all_ranks), repeat=True)
        self.sealed_tokens = response.sealed_tokens
        return response

    def commit(self, accept: int) -> None:
        """Take the first drafts, drop the others."""
        self._update(self.session.client.call("Commit", pb.CommitRequest(
            session_id=self.session.id, sequence_id=self.id, expected_length=self.length,
            accept=accept), repeat=True))

    def truncate(self, length: int) -> None:
        """Cut the tail."""
        self._update(self.session.client.call("Truncate", pb.TruncateRequest(
            session_id=self.session.id, sequence_id=self.id, expected_length=self.length,
            length=length), repeat=True))

    def fork(self, count: int = 1) -> list["Sequence"]:
        """New sequences that share all blocks; the first write to a shared tail copies it."""
        response = self.session.client.call("Fork", pb.ForkRequest(
            session_id=self.session.id, sequence_id=self.id, expected_length=self.length,
            count=count, request_id=secrets.token_bytes(16)), repeat=True)
        children = []
        for sequence_id in response.sequence_ids:
            child = Sequence(self.session, self.space, pb.SequenceResponse(
                sequence_id=sequence_id, length=self.length))
            children.append(child.refresh())
        return children

    def write(self, pieces: Iterable[tuple[int, int, int, int, bytes]]) -> int:
        """K/V by gRPC: (group, rank, block, offset, data) each; bytes written in all."""
        def messages() -> Iterator[pb.WriteBlocksRequest]:
            yield pb.WriteBlocksRequest(session_id=self.session.id, sequence_id=self.id)
            for group, rank, block, offset, data in pieces:
                for at in range(0, len(data), PIECE_BYTES):
                    part = bytes(data[at:at + PIECE_BYTES])
                    yield pb.WriteBlocksRequest(pieces=[pb.BlockPiece(
                        group=group, rank=rank, block=block, offset=offset + at, data=part,
                        checksum=xxhash.xxh3_64_intdigest(part))])

        client = self.session.client
        try:
            response = client.open_calls().WriteBlocks(
                messages(), metadata=client.metadata, timeout=client.timeout)
        except grpc.RpcError as raised:
            raise errors.from_rpc_error(raised) from None
        return response.written_bytes

    def _swap(self, call: str, request: Any) -> Swap:
        response = self.session.client.call(call, request, repeat=True)
        self._update(response.sequence)
        return Swap(response.moved_blocks, response.moved_bytes, response.copy_ns,
                    response.load_ns, response.recompute_ns)

    def swap_out(self) -> Swap:
        """Move what only this sequence needs to the host tier."""
        return self._swap("SwapOut", pb.SwapOutRequest(session_id=self.session.id,
                                                       sequence_id=self.id))

    def swap_in(self) -> Swap:
        """Bring it back, or be refused with everything still whole on the host."""
        return self._swap("SwapIn", pb.SwapInRequest(session_id=self.session.id,
                                                     sequence_id=self.id))

    def close(self) -> None:
        """Release it; sealed full blocks stay cached. Once is enough."""
        if not self._closed:
            self._closed = True
            self.session.client.call("Close", pb.CloseRequest(session_id=self.session.id,
                                                              sequence_ids=[self.id]))
