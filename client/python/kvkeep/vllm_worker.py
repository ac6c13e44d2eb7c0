"""The connector's half in a rank: copies between vLLM's paged cache and kvkeep's mapped slots.

Loads run on a thread of their own between steps, so that other requests' steps go on. Saves of a
cache in host memory run on vLLM's when a step's forward is done, before vLLM can give the blocks to
another request. Saves of a cache on a GPU run on a second thread, behind an event of the forward;
the scheduler's half has vLLM keep the blocks of a finished request until they are done, and a step
that takes a preempted request's blocks waits for them here. A copy that cannot be made is reported:
a load as failed blocks, which vLLM computes; a save as not done, and then the scheduler's half does
not seal it. A rank seals nothing itself: a block becomes visible when all of them have reported it.
"""

from __future__ import annotations

import functools
import logging
import math
import queue
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvkeep.client import Client, Space
from kvkeep.errors import Code, KvkeepError
from kvkeep.memory import SlotMemory
from kvkeep.session import Session
from kvkeep.shapes import Tier
from kvkeep.vllm_blocks import EngineLayer, pieces
from kvkeep.vllm_orders import NO_BLOCK, Copy, Endpoint, Orders, Report, Settings

if TYPE_CHECKING:
    from kvkeep.vllm_device import DeviceCache, Lane

__all__ = ["WorkerSide"]

JOIN_AGAIN_S = 1.0
GIVE_WAY_S = 0.001

logger = logging.getLogger("vllm.kvkeep")


class _Link:
    """This rank's session in one epoch, and what it has mapped."""

    def __init__(self, settings: Settings, rank: int, endpoint: Endpoint) -> None:
        self.epoch = endpoint.epoch
        self._rank = rank
        self.client = Client(settings.target, token=settings.credential(), tenant=settings.tenant,
                             timeout=settings.call_timeout_s)
        try:
            # The scheduler's session, which opened the instance, has number 0 of it.
            self.session: Session = self.client.session(
                name=f"vllm-rank-{rank}", rank=rank + 1, instance_token=endpoint.instance_token)
            self.session.side()  # a rank that cannot map memory has nothing to join for
        except BaseException:
            self.client.close()
            raise
        self._maps: dict[tuple[int, int, int], SlotMemory] = {}
        self._lock = threading.Lock()

    def memory(self, space: Space, tier: int, group: int) -> SlotMemory:
        with self._lock:
            key = (space.id, tier, group)
            if key not in self._maps:
                self._maps[key] = self.session.map_slots(
                    space, group=group, tier=Tier(tier), rank=self._rank)
            return self._maps[key]

    def close(self) -> None:
        try:
            self.session.close()
        finally:
            self.client.close()


class WorkerSide:
    """One rank. `groups`: the layers in the order of the model, grouped as the space's groups are;
    or for raw spaces `raw`, byte arrays [block][bytes]; or `device` for a cache on a GPU."""

    def __init__(self, settings: Settings, rank: int, engine_block_tokens: int,
                 groups: list[list[EngineLayer]], raw: list[np.ndarray],
                 device: "DeviceCache | None" = None) -> None:
        self.settings = settings
        self.rank = rank
        self.own_ns = 0  # time spent inside vLLM's calls
        self._engine_block_tokens = engine_block_tokens
        self._groups = groups
        self._raw = raw
        self._device = device
        self._link: _Link | None = None
        self._wanted: Endpoint | None = None
        self._join_again = math.inf  # when to try again, where a try has failed
        self._said = ""  # why it failed: told once, not with each try
        self._lock = threading.Lock()
        self._idle = False  # the step computes nothing
        self._ahead: set[int] = set()  # saves whose slots may be mapped while the forward runs
        self._report = Report()
        self._received: set[str] = set()
        self._sent: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._work: queue.SimpleQueue[tuple[str, object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(self._lane(),),
                                        name="kvkeep-loads", daemon=True)
        self._thread.start()
        # With a device: saves, and which of whose are under way.
        self._late: queue.SimpleQueue[tuple[Copy, Any] | None] = queue.SimpleQueue()
        self._late_of: dict[str, set[int]] = {}
        self._copied = threading.Condition(self._lock)
        self._void: set[int] = set()  # orders whose blocks others may have by now
        self._late_thread: threading.Thread | None = None
        if device is not None:
            self._late_thread = threading.Thread(target=self._run_late, args=(self._lane(),),
                                                 name="kvkeep-saves", daemon=True)
            self._late_thread.start()

    # What vLLM's thread calls: none of these waits for the daemon, or while there is to compute.

    def begin(self, orders: Orders) -> None:
        """A step's orders have come; may be called again with the same."""
        endpoint = orders.endpoint
        if endpoint is not None and (endpoint != self._wanted or
                                     self._join_again < time.monotonic()):
            self._wanted = endpoint
            self._join_again = math.inf
            self._work.put(("join", endpoint))
        for space in orders.spaces:
            self._work.put(("map", space))
        self._save_all(orders.early_saves)
        if self._device is not None and orders.preempted:
            self._await_late(orders.preempted)
        self._idle = orders.idle
        orders.spaces, orders.early_saves, orders.preempted = (), [], []
        for copy in orders.saves if self._device is None else ():
            if copy.order not in self._ahead:
                self._ahead.add(copy.order)
                self._work.put(("ahead", copy))

    def start_loads(self, orders: Orders) -> None:
        if orders.loads:
            after = self._device.streams.mark() if self._device is not None else None
            for copy in orders.loads:
                self._work.put(("load", (copy, after)))
        orders.loads = []

    def save(self, orders: Orders) -> None:
        """After the forward, before anyone else can have the blocks."""
        self._save_all(orders.saves)
        if orders.releases:
            with self._lock:
                self._sent.update(orders.releases)
            orders.releases = []
        orders.saves = []

    def give_way(self) -> None:
        """In a step that computes nothing: until a load has ended, or for a moment. vLLM would come
        again at once, and hold Python's lock, for which a thread of ours would wait 5 ms each time
        that it has let go of it (sys.getswitchinterval): a load of hundreds of copies, for seconds.
        """
        if self._idle:
            with self._copied:
                if not self._received:
                    self._copied.wait(GIVE_WAY_S)

    def finished(self) -> tuple[set[str], set[str]]:
        """Requests whose last save, and whose load has ended, since the last call."""
        with self._lock:
            result = (self._sent, self._received)
            self._sent, self._received = set(), set()
            return result

    def failed_blocks(self) -> set[int]:
        with self._lock:
            result, self._failed_blocks = self._failed_blocks, set()
            return result

    def report(self) -> Report | None:
        with self._lock:
            if not self._report.done and not self._report.joined:
                return None
            result, self._report = self._report, Report()
            return result

    def close(self) -> None:
        self._work.put(None)
        self._late.put(None)
        self._thread.join(self.settings.call_timeout_s)
        if self._late_thread is not None:
            self._late_thread.join(self.settings.call_timeout_s)
        link, self._link = self._link, None
        if link is not None:
            link.close()

    # Copies.

    def _alive(self, epoch: int) -> _Link | None:
        link = self._link
        if link is None or link.epoch != epoch or link.session.ended.is_set():
            return None
        return link

    def _save_all(self, copies: list[Copy]) -> None:
        if self._device is None:
            for copy in copies:
                self._save(copy)
        elif copies:
            after = self._device.streams.mark()
            for copy in copies:
                with self._lock:
                    self._late_of.setdefault(copy.request_id, set()).add(copy.order)
                self._late.put((copy, after))

    def _await_late(self, request_ids: list[str]) -> None:
        """Until nothing reads these requests' blocks, which this step gives to others. What takes
        too long is not believed: its bytes may be another request's."""
        until = time.monotonic() + self.settings.call_timeout_s
        with self._copied:
            for request_id in request_ids:
                while request_id in self._late_of and time.monotonic() < until:
                    self._copied.wait(max(until - time.monotonic(), 0.001))
                self._void |= self._late_of.get(request_id, set())

    def _save(self, copy: Copy, lane: "Lane | None" = None, after: Any = None) -> None:
        link = self._alive(copy.epoch)
        well = False
        if link is not None:
            try:
                self._copy(link, copy, False, lane, after)
                well = True
            except Exception as error:  # whatever it is, vLLM goes on
                logger.warning("kvkeep: a save was left out: %s", error)
        with self._lock:
            self._ahead.discard(copy.order)
            if copy.order in self._void:
                self._void.discard(copy.order)
                well = False
            self._report.done[copy.order] = (well, 1)
            if copy.last:
                self._sent.add(copy.request_id)

    def _load(self, copy: Copy, lane: "Lane | None", after: Any) -> None:
        link = self._alive(copy.epoch)
        well = False
        if link is not None:
            try:
                self._copy(link, copy, True, lane, after)
                well = self._alive(copy.epoch) is link
            except Exception as error:  # whatever it is, the request waits for an answer
                logger.warning("kvkeep: a load failed, vLLM computes: %s", error)
        with self._lock:
            if not well:
                self._failed_blocks.update(self._engine_blocks(copy))
            self._report.done[copy.order] = (well, 1)
            self._received.add(copy.request_id)
            self._copied.notify_all()

    def _engine_blocks(self, copy: Copy) -> Iterable[int]:
        first = copy.first // self._engine_block_tokens
        end = -(-copy.end // self._engine_block_tokens)
        blocks = copy.engine_blocks[first - copy.first_engine_block:end - copy.first_engine_block]
        return [block for block in blocks if block != NO_BLOCK]

    def _copy(self, link: _Link, copy: Copy, load: bool, lane: "Lane | None", after: Any) -> None:
        if lane is not None:
            for group in range(len(copy.space.groups)):
                (lane.load if load else lane.save)(
                    copy, group, functools.partial(self._slots, link, copy.space, group), after)
        elif self._raw:
            self._copy_raw(link, copy, load)
        else:
            for group in range(len(self._groups)):
                self._copy_group(link, copy, group, load)

    @staticmethod
    def _slots(link: _Link, space: Space, group: int, tier: int) -> SlotMemory:
        return link.memory(space, tier, group)

    def _copy_group(self, link: _Link, copy: Copy, group: int, load: bool) -> None:
        for piece in pieces(copy.first, copy.end, copy.space.block_tokens,
                            self._engine_block_tokens):
            engine_block = copy.engine_blocks[piece.engine_block - copy.first_engine_block]
            if engine_block == NO_BLOCK:
                continue
            tier, slot, generation = copy.rows[piece.block - copy.first_block]
            memory = link.memory(copy.space, tier, group)
            keys, values = memory.array(slot)
            assert values is not None  # latent caches are kept raw
            for i, layer in enumerate(self._groups[group]):
                if load:
                    layer.load(engine_block, piece, _bits(keys[i]), _bits(values[i]))
                else:
                    layer.save(engine_block, piece, _bits(keys[i]), _bits(values[i]))
            _check(memory, slot, generation)

    def _copy_raw(self, link: _Link, copy: Copy, load: bool) -> None:
        """Blocks are as large as vLLM's: each is copied as it is."""
        first = copy.first // copy.space.block_tokens
        end = -(-copy.end // copy.space.block_tokens)
        for block in range(first, end):
            engine_block = copy.engine_blocks[block - copy.first_engine_block]
            if engine_block == NO_BLOCK:
                continue
            tier, slot, generation = copy.rows[block - copy.first_block]
            memory = link.memory(copy.space, tier, 0)
            place = memory.slot(slot)
            at = 0
            for layer in self._raw:
                size = layer.shape[1]
                if load:
                    layer[engine_block] = place[at:at + size]
                else:
                    place[at:at + size] = layer[engine_block]
                at += size
            _check(memory, slot, generation)

    # The thread: joins, maps, loads.

    def _run(self, lane: "Lane | None") -> None:
        if lane is not None:
            lane.enter()
        while (work := self._work.get()) is not None:
            kind, what = work
            try:
                if kind == "join":
                    assert isinstance(what, Endpoint)
                    self._join(what)
                elif kind == "ahead":
                    assert isinstance(what, Copy)
                    self._populate(what)
                elif kind == "map":
                    assert isinstance(what, Space)
                    self._map(what)
                else:
                    assert isinstance(what, tuple)
                    self._load(what[0], lane, what[1])
            except Exception:  # vLLM must go on, and a load must be answered
                logger.exception("kvkeep: %s", kind)

    def _lane(self) -> "Lane | None":
        if self._device is None:
            return None
        from kvkeep.vllm_device import Lane  # needs torch, which a cache in host memory does not

        return Lane(self._device)

    def _run_late(self, lane: "Lane") -> None:
        lane.enter()
        while (work := self._late.get()) is not None:
            copy, after = work
            try:
                self._save(copy, lane, after)
            finally:
                with self._copied:
                    orders = self._late_of[copy.request_id]
                    orders.discard(copy.order)
                    if not orders:
                        del self._late_of[copy.request_id]
                    self._copied.notify_all()

    def _join(self, endpoint: Endpoint) -> None:
        old, self._link = self._link, None
        if old is not None:
            old.close()
        try:
            self._link = _Link(self.settings, self.rank, endpoint)
        except (KvkeepError, OSError) as error:
            logger.log(logging.DEBUG if str(error) == self._said else logging.WARNING,
                       "kvkeep: rank %d could not join, vLLM goes on without, and it tries again: "
                       "%s", self.rank, error)
            self._said = str(error)
            self._join_again = time.monotonic() + JOIN_AGAIN_S
            return
        self._said = ""
        with self._lock:
            self._report.joined[endpoint.epoch] = 1

    def _populate(self, copy: Copy) -> None:
        """Map the slots that this step's save will write: most of what a first write costs, and
        here it is nobody's step."""
        link = self._alive(copy.epoch)
        if link is None:
            return
        for tier, slot, _ in copy.rows:
            for group in range(len(copy.space.groups)):
                if copy.order not in self._ahead:
                    return  # it is saved: the slot is no longer this process's to write
                link.memory(copy.space, tier, group).populate(slot)

    def _map(self, space: Space) -> None:
        link = self._link
        if link is None:
            return
        try:
            for group in range(len(space.groups)):
                link.memory(space, int(Tier.HOST), group)
        except (KvkeepError, OSError) as error:
            logger.warning("kvkeep: a space could not be mapped: %s", error)


def _bits(part: np.ndarray) -> np.ndarray:
    """As integers of the same width."""
    return part.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[part.itemsize])


def _check(memory: SlotMemory, slot: int, generation: int) -> None:
    """The slot is what it was when the order was given: what was copied is the block's."""
    if memory.generation(slot) != generation:
        raise KvkeepError(f"slot {slot} is another block's now", Code.ABORTED)
