"""What a refused call says: the daemon's typed cause, not only a sentence."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import grpc

from kvkeep.v1 import kvkeep_pb2 as pb

__all__ = ["Advice", "Cause", "Code", "KvkeepError", "from_rpc_error"]


class Code(enum.IntEnum):
    """The status of a failed call, by gRPC's numbers."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Cause(int):
    """Why, as a number of the API's enum Cause; `name` is its word. Causes that this package does
    not know yet keep their number."""

    @property
    def name(self) -> str:
        try:
            return pb.Cause.Name(int(self)).removeprefix("CAUSE_").lower()
        except ValueError:
            return str(int(self))

    def __repr__(self) -> str:
        return f"Cause({self.name})"


@dataclasses.dataclass(frozen=True)
class Advice:
    """How the caller itself could make the room that was missing: `action` is "swap_out" or "close"
    of these sequences of its own, at least cost. `total` counts all that it takes; the ids are the
    first 16 of them."""

    action: str
    sequence_ids: tuple[int, ...]
    total: int
    missing_bytes: int
    bytes: int
    cost_ns: int  # estimate; 0: unknown


class KvkeepError(Exception):
    """A call was refused or failed. Nothing was changed by it.

    Attributes:
        code: the status.
        cause: the daemon's typed reason; NONE where the call never reached a daemon.
        field: the request's field that was wrong; "" if it was none.
        value, limit: the numbers behind it; 0 where there are none.
        retry_after_ms: when to try again; 0: trying again will not help, or may be done at once.
        advice: for want of room, how this instance could make it; else None.
    """

    def __init__(self, message: str, code: Code, cause: int = 0, field: str = "", value: int = 0,
                 limit: int = 0, retry_after_ms: int = 0, advice: Advice | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.cause = Cause(cause)
        self.field = field
        self.value = value
        self.limit = limit
        self.retry_after_ms = retry_after_ms
        self.advice = advice

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled whole: it may be raised in a worker process and told in another."""
        return KvkeepError, (self.args[0], self.code, int(self.cause), self.field, self.value,
                             self.limit, self.retry_after_ms, self.advice)

    def __str__(self) -> str:
        return f"{super().__str__()} [{self.code.name}, {self.cause.name}]"


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, at


def _parts(data: bytes, number: int) -> list[bytes]:
    """The length-delimited fields `number` of a message. google.rpc.Status and Any are read by
    hand, since their generated code would be one more package to depend on."""
    found = []
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            _, at = _varint(data, at)
        elif key & 7 == 2:
            size, at = _varint(data, at)
            if key >> 3 == number:
                found.append(data[at:at + size])
            at += size
        else:
            return found
    return found


def _detail(error: grpc.RpcError) -> pb.ErrorDetail | None:
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            for packed in _parts(value, 3):
                url = b"".join(_parts(packed, 1))
                if url.endswith(b"/kvkeep.v1.ErrorDetail"):
                    return pb.ErrorDetail.FromString(b"".join(_parts(packed, 2)))
        except (IndexError, ValueError):
            return None
    return None


def from_rpc_error(error: grpc.RpcError) -> KvkeepError:
    """The KvkeepError of what a call of grpcio raised."""
    code = Code(error.code().value[0])
    detail = _detail(error)
    if detail is None:
        return KvkeepError(error.details() or "the call failed", code)
    advice = None
    if detail.advice.kind != pb.Advice.KIND_NOTHING:
        action = pb.Advice.Kind.Name(detail.advice.kind).removeprefix("KIND_").lower()
        advice = Advice(action, tuple(detail.advice.sequence_ids), detail.advice.total,
                        detail.advice.missing_bytes, detail.advice.bytes, detail.advice.cost_ns)
    return KvkeepError(error.details() or "", code, detail.cause,
                       detail.field.decode("utf-8", "replace"), detail.value, detail.limit,
                       detail.retry_after_ms, advice)
