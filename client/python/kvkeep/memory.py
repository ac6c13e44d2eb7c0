"""The daemon's memory as arrays of this process: slots and scratch, without a copy."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.client import Space
from kvkeep.errors import Code, KvkeepError
from kvkeep.shapes import Format, Layout, Placement, Tier
from kvkeep.v1 import kvkeep_pb2 as pb

if TYPE_CHECKING:
    from kvkeep.session import Session

__all__ = ["Scratch", "SlotMemory"]

TOKEN_SIZE = 16
MADV_POPULATE_WRITE = 23
_LIBC = ctypes.CDLL(None)  # mmap.madvise() would hold the interpreter's lock
DTYPES: dict[Format, Any] = {Format.FP32: np.float32, Format.FP16: np.float16,
                             Format.BF16: np.uint16}  # numpy has no bfloat16: its bits


class SideSocket:
    """The unix socket that passes descriptors. Open for the session's life: it is what tells the
    daemon that this process may still write."""

    def __init__(self, path: str, token: bytes) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(10)
            self._socket.connect(path)
            self._socket.sendall(token)
            if self._socket.recv(1) != b"\0":
                raise KvkeepError("the side socket refused the session", Code.PERMISSION_DENIED)
        except OSError as error:
            self._socket.close()
            raise KvkeepError(f"the side socket {path}: {error}", Code.UNAVAILABLE) from error
        except KvkeepError:
            self._socket.close()
            raise

    def descriptors(self, token: bytes) -> list[int]:
        """What a map token stands for; the caller closes them."""
        self._socket.sendall(token)
        data, descriptors, _, _ = socket.recv_fds(self._socket, 1, 4)
        if data != b"\0" or not descriptors:
            raise KvkeepError("the side socket refused a map token", Code.NOT_FOUND)
        return list(descriptors)

    def close(self) -> None:
        self._socket.close()


def _map(descriptor: int, size_bytes: int, writable: bool) -> mmap.mmap:
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    return mmap.mmap(descriptor, size_bytes, access=access)


def _memory_name(tier: Tier, public_id: int) -> str:
    return f"the {tier.name.lower()} tier" + (f" (public space {public_id})" if public_id else "")


class SlotMemory:
    """The slots of one shard of a group in a tier, mapped.

    `slot(b)` is the bytes of a slot; `array(b)` the same as [layer][K or V][head][token][dim] (or
    [token][head] where the layout has tokens first). `b` is a Placement, of which it is checked
    that it lies in this memory, or the bare number of a slot. Write only what was granted, before
    Seal; read under a sequence, a lease with copy_pin or a ticket, or compare `generation(b)`
    before and after.
    """

    def __init__(self, session: "Session", space: Space, group: int, tier: Tier, rank: int,
                 read_only: bool, public_id: int = 0) -> None:
        side = session.side()  # first: the daemon maps for sessions that have one
        response = session.client.call("MapMemory", pb.MapMemoryRequest(
            session_id=session.id, kind=pb.MapMemoryRequest.KIND_SLOTS,
            space_id=public_id or space.id,
            group=group, rank=rank, tier=int(tier), read_only=read_only))
        descriptors = side.descriptors(response.map_token)
        with _Closing(descriptors):
            self._memory = _map(descriptors[0], response.size_bytes, not read_only)
            self._generations = _map(descriptors[1], 4 * response.slot_count, False)
        self.space = space
        self.group = group
        self.tier = Tier(response.tier)
        self.public_id = public_id
        self.rank = rank
        self.slot_stride = response.slot_stride
        self.slot_count = response.slot_count
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)
        self._numbers = np.frombuffer(self._generations, dtype="<u4")

    def _number(self, slot: int | Placement) -> int:
        if not isinstance(slot, Placement):
            return int(slot)
        if slot.slot is None:
            raise ValueError(f"block {slot.block} has no bytes: it is outside the window")
        if (slot.tier, slot.space_id) != (self.tier, self.public_id):
            raise ValueError(
                f"block {slot.block} lies in {_memory_name(slot.tier, slot.space_id)}, and these "
                f"are slots of {_memory_name(self.tier, self.public_id)}")
        return slot.slot

    def slot(self, slot: int | Placement) -> np.ndarray:
        """Bytes of a slot: u8 [slot_stride]."""
        slot = self._number(slot)
        if not 0 <= slot < self.slot_count:
            raise IndexError(f"slot {slot} of {self.slot_count}")
        first = slot * self.slot_stride
        return self._bytes[first:first + self.slot_stride]

    def populate(self, slot: int | Placement) -> None:
        """Have a granted slot's pages mapped for writing, so that a later write does not stop for
        each. Without the kernel's help (Linux 5.14) they are mapped as they are written."""
        place = self.slot(slot)
        first = place.ctypes.data
        begin = first - first % mmap.PAGESIZE
        _LIBC.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(first + place.size - begin),
                      MADV_POPULATE_WRITE)

    def generation(self, slot: int | Placement) -> int:
        """The slot's generation now; changed: other bytes are there."""
        return int(self._numbers[self._number(slot)])

    def array(self, slot: int | Placement) -> tuple[np.ndarray, np.ndarray | None]:
        """K and V of a slot as views: [layer][head][token][dim] of this rank's layers and heads,
        or [layer][token][head][dim]. V is None for a latent cache. bf16 comes as its bits, u16;
        tensor() gives torch.bfloat16."""
        shape = self.space.groups[self.group]
        if shape.layout == Layout.OPAQUE:
            raise ValueError("an opaque block has no K and V: use slot()")
        if shape.format_k not in DTYPES:
            raise ValueError(f"{shape.format_k.name} has scales beside its values: use slot()")
        tokens = self.space.block_tokens
        heads = shape.kv_heads if shape.latent else \
            max(shape.kv_heads // self.space.tensor_shards, 1)
        size_v = 0 if shape.value_format == Format.NONE else shape.value_size
        cut = heads * tokens * shape.head_size_k * shape.format_k.size
        end = cut + heads * tokens * size_v * shape.value_format.size
        layers = self.slot_stride // end
        flat = self.slot(slot)[:layers * end].reshape(layers, end)
        order = (heads, tokens) if shape.layout == Layout.HEADS_FIRST else (tokens, heads)
        keys = flat[:, :cut].view(DTYPES[shape.format_k]).reshape(layers, *order,
                                                                  shape.head_size_k)
        if size_v == 0:
            return keys, None
        values = flat[:, cut:].view(DTYPES[shape.value_format]).reshape(layers, *order, size_v)
        return keys, values

    def tensor(self, slot: int | Placement) -> tuple[Any, Any]:
        """array() as torch tensors over the same memory."""
        import torch

        def convert(part: np.ndarray | None, form: Format) -> Any:
            if part is None:
                return None
            if form == Format.BF16:
                return torch.from_numpy(part.view(np.int16)).view(torch.bfloat16)
            return torch.from_numpy(part)

        keys, values = self.array(slot)
        shape = self.space.groups[self.group]
        return convert(keys, shape.format_k), convert(values, shape.value_format)


class Scratch:
    """Memory for operands of Attend, shared with the daemon: u8 [size_bytes] in `bytes`."""

    def __init__(self, session: "Session", size_bytes: int) -> None:
        side = session.side()  # first: the daemon maps for sessions that have one
        response = session.client.call("MapMemory", pb.MapMemoryRequest(
            session_id=session.id, kind=pb.MapMemoryRequest.KIND_SCRATCH, size_bytes=size_bytes))
        descriptors = side.descriptors(response.map_token)
        with _Closing(descriptors):
            self._memory = _map(descriptors[0], response.size_bytes, True)
        self.map_id = response.map_id
        self.size_bytes = response.size_bytes
        self.bytes = np.frombuffer(self._memory, dtype=np.uint8)

    def array(self, offset: int, shape: tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
        """A view of [offset, …) as an array."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if offset < 0 or offset + count > self.size_bytes:
            raise IndexError(f"{count} bytes at {offset} of {self.size_bytes}")
        return self.bytes[offset:offset + count].view(dtype).reshape(shape)

    def place(self, offset: int, size_bytes: int) -> pb.MemoryPlace:
        """Where an operand of Attend lies."""
        return pb.MemoryPlace(map_id=self.map_id, offset=offset, size_bytes=size_bytes)


class _Closing:
    """Close descriptors at the end of the block: the mappings live without them."""

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
