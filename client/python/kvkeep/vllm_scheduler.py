"""The connector's half in vLLM's scheduler: which requests hit, what is copied, what is sealed.

vLLM's thread never waits here: it reads what is known and leaves jobs. Threads of ours ask the
daemon. A request's way:

    OPENING    look-up and room were asked for: one OpenSequence on the host tier
    OPEN       answered; its hit is held, and its blocks are saved as they fill
    LOADING    ranks copy the hit into vLLM's blocks
    FINISHING  vLLM has ended it and keeps its blocks, until the last full ones are saved
    CLOSING    nothing more is ordered; waits for the ranks' reports, then is sealed and closed

Whatever fails, takes too long or is refused ends in "not here": vLLM computes. When the connection
is lost, all of these are forgotten (the daemon ends them itself) and a new epoch begins.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence as SequenceOf

from kvkeep.client import Client, Retry, Space, default_target
from kvkeep.errors import Code, KvkeepError
from kvkeep.session import Lease, Sequence, Session
from kvkeep.shapes import (ContentSpan, Identity, LayerGroup, Placement, PrefillCost, Prompt,
                           Tier)
from kvkeep.vllm_identity import Adapter, Adapters, Facts, canonical, digest
from kvkeep.vllm_orders import NO_BLOCK, Copy, Endpoint, Orders, Report, Settings

__all__ = ["Counts", "Model", "Request", "SchedulerSide", "State"]

logger = logging.getLogger("vllm.kvkeep")

RECONNECT_MS_MAX = 5000
PIN_MS = 60_000
RETRY = Retry(attempts=2, first_ms=5, longest_ms=20)  # others' jobs wait behind
PAUSE_S = 0.003  # before it is looked again whether something has come
TOUCHES_MAX = 256  # waiting to be told; what is past them is left out


@dataclasses.dataclass(frozen=True)
class Model:
    """What every space of the engine has in common."""

    facts: Facts
    groups: tuple[LayerGroup, ...]
    block_tokens: int
    engine_block_tokens: int
    ranks: int
    prefill_cost: PrefillCost = PrefillCost()
    late_saves: bool = False  # a save may end steps after it was ordered
    drafts: bool = False  # vLLM may count tokens as computed that it takes back
    # Where all layers have windows, vLLM gives blocks that no query will see to others while their
    # request runs, and has this one in their place. None: it keeps all.
    null_block: int | None = None

    def identity(self, adapter: Adapter | None) -> Identity:
        """With the geometry in it: engines that cut blocks or heads otherwise have spaces of their
        own, where kvkeep would refuse one identity with two geometries."""
        named = self.facts.identity(adapter)
        geometry = canonical([self.block_tokens, self.ranks,
                              [dataclasses.astuple(group) for group in self.groups]])
        return dataclasses.replace(named, extra={**named.extra, "geometry": digest(geometry)})


@dataclasses.dataclass(frozen=True)
class Request:
    """A request as vLLM has it. `tokens()` are all it knows now, prompt and output."""

    id: str
    tokens: Callable[[], SequenceOf[int]]
    salt: str = ""
    spans: tuple[ContentSpan, ...] = ()
    adapter: tuple[str, int, str, bool] | None = None  # name, id, path, load anew
    again: bool = False  # it was preempted: the query was counted before
    awaited: int = 0     # tokens that another engine has prefilled for it, and may just be sealing
    computed: Callable[[], int] = lambda: 0


class State(enum.Enum):
    OPENING = "opening"
    OPEN = "open"
    LOADING = "loading"
    FINISHING = "finishing"
    CLOSING = "closing"


@dataclasses.dataclass
class Counts:
    """Counters; they only grow, over reconnections too."""

    queries: int = 0         # requests that were looked up, each once
    query_tokens: int = 0
    hit_tokens: int = 0      # found beyond vLLM's own cache
    loaded_tokens: int = 0
    failed_loads: int = 0
    saved_tokens: int = 0    # copied by all ranks, and sealed
    touched_tokens: int = 0
    refused: int = 0         # no room to save a request
    late: int = 0            # answers, or ranks, that vLLM did not wait for
    lost: int = 0            # connections
    resets: int = 0
    dropped_jobs: int = 0


class _Tracked:
    """One request between its first look-up and its close. Guarded by the side's lock."""

    def __init__(self, request: Request, epoch: int) -> None:
        self.request = request
        self.epoch = epoch
        self.state = State.OPENING
        self.space: Space | None = None
        self.holder: Sequence | Lease | None = None
        self.rows: list[tuple[int, int, int]] = []
        self.length = 0       # tokens that the holder stands for
        self.cached = 0       # of them found
        self.usable = 0       # of the found, what may be loaded: 0 after a failure
        self.asked_at = time.monotonic()
        self.looks = 0        # while more was to come from the store that daemons share
        self.late = False
        self.touched = False
        self.local = 0        # tokens that vLLM has itself, when it asked last
        self.load_tokens = 0  # to be loaded, and not ordered yet
        self.bound = 0        # whole blocks' tokens, computed when the current step is done
        self.ordered = 0      # tokens that saves were ordered for
        self.orders = 0       # copies that some rank has not answered
        self.reported = 0     # tokens that all ranks have saved
        self.growing = False  # an Append is under way
        self.grows = True     # no Append was refused
        self.may_save = True
        self.engine_blocks: list[int] = []
        self.finish_by = 0.0
        self.over = False     # vLLM has ended it
        self.held = False     # and keeps its blocks until no save reads them
        self.void = False     # the cache was reset since it was asked for

    @property
    def key(self) -> str:
        return self.request.id


class _Up:
    """A connection, while it lasts. It is used once all ranks have joined it."""

    def __init__(self, epoch: int, client: Client, session: Session) -> None:
        self.epoch = epoch
        self.client = client
        self.session = session
        self.spaces: dict[Adapter | None, Space] = {}
        self.joined = 0
        self.remote = False   # the daemon shares prefixes with others
        self.ready_by: float | None = None  # until then requests wait for the ranks
        self.late = False     # they were not there by then

    def lose(self) -> None:
        """Have the link's thread drop it, as if the daemon had ended the session."""
        self.session.ended.set()


@dataclasses.dataclass
class _Order:
    """A copy that ranks were told to make."""

    tracked: _Tracked
    first: int
    end: int
    load: bool
    waiting: int  # ranks that have not answered
    well: bool = True


class SchedulerSide:
    """All of it for one engine. `own_ns` is what vLLM's thread has spent in here."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counts = Counts()
        self.own_ns = 0
        self._model: Model | None = None
        self._unready_since: float | None = None  # the first request, with no model told yet
        self._lock = threading.Lock()
        self._space_lock = threading.Lock()
        self._adapters = Adapters()
        self._tracked: dict[str, _Tracked] = {}
        self._unsealed: dict[str, _Tracked] = {}  # preempted, and not sealed yet
        self._orders: dict[int, _Order] = {}
        self._to_load: list[_Tracked] = []
        self._finishing: list[_Tracked] = []
        self._up: _Up | None = None
        self._epoch = 0
        self._synced_epoch = 0
        self._new_spaces: list[Space] = []
        self._releases: list[str] = []
        self._order_count = 0
        self._touches = 0
        self._must_reset = False
        self._stopping = threading.Event()
        self._tried = threading.Event()  # to connect, well or not
        self._opens: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def started(self) -> bool:
        return self._model is not None

    def start(self, model: Model, wait: bool = True) -> None:
        """The ranks have said what their caches are. Waits a moment for the first connection, so
        that an engine's first requests can hit, where nothing is served yet."""
        self._model = model
        for name, target in (("link", self._keep_connected), ("open", self._run_opens),
                             ("open", self._run_opens), ("jobs", self._run_jobs)):
            thread = threading.Thread(target=target, name=f"kvkeep-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        if wait:
            self._tried.wait(self.settings.start_wait_ms / 1e3)

    def close(self) -> None:
        """What ranks have saved is sealed; then the session ends."""
        for jobs in (self._opens, self._opens, self._jobs):
            jobs.put(None)
        end = time.monotonic() + self.settings.call_timeout_s
        for thread in self._threads[1:]:
            thread.join(max(end - time.monotonic(), 0.0))
        self._stopping.set()
        up = self._up
        if up is not None:
            up.lose()
        for thread in self._threads[:1]:
            thread.join(self.settings.call_timeout_s)

    @property
    def connected(self) -> bool:
        return self._up is not None

    def counted(self) -> dict[str, int]:
        with self._lock:
            return dict(vars(self.counts))

    # ------------------------------------------------------------- what vLLM's thread calls

    def match(self, request: Request, computed: int) -> int | None:
        """Tokens beyond `computed` that can be loaded; None: not known yet, ask again."""
        with self._lock:
            up = self._synced()
            tracked = self._tracked.get(request.id)
            if tracked is not None and tracked.over:
                return 0  # a name that is used again while its last bearer is being closed
            if tracked is None:
                return self._begin(up, request)
            tracked.local = computed
            if tracked.state is State.OPENING:
                waited = (time.monotonic() - tracked.asked_at) * 1e3
                if not tracked.late and waited < self._patience_ms(tracked.request):
                    return None
                if not tracked.late:
                    tracked.late = True
                    self.counts.late += 1
                return 0
            if tracked.state is not State.OPEN:
                return 0
            self._touch(up, tracked, computed)
            hit = min(tracked.usable, len(request.tokens()) - 1) - computed
            if hit <= 0 or not self.settings.load:
                return 0
            return hit

    def _patience_ms(self, request: Request) -> float:
        """How long a request waits for its answer."""
        wait = self.settings.lookup_wait_ms
        return wait + self.settings.handoff_wait_ms if request.awaited > 0 else wait

    def _begin(self, up: _Up | None, request: Request) -> int | None:
        if self._model is None or not self._tried.is_set():
            # The ranks say what their caches are with their first step, then it is connected.
            now = time.monotonic()
            if self._unready_since is None:
                self._unready_since = now
            late = (now - self._unready_since) * 1e3 >= self.settings.lookup_wait_ms
            return 0 if late else None
        tokens = len(request.tokens())
        least = max(self.settings.min_tokens, self.settings.block_tokens)
        if up is None or self._must_reset or tokens < least:
            return 0
        if up.joined < self._ranks():
            now = time.monotonic()
            if up.ready_by is None:
                up.ready_by = now + self.settings.lookup_wait_ms / 1e3
            if now < up.ready_by:
                return None
            if not up.late:
                up.late = True
                logger.warning("kvkeep: %d of %d ranks have joined within %d ms (lookup_wait_ms), "
                               "vLLM goes on without until all have", up.joined, self._ranks(),
                               self.settings.lookup_wait_ms)
            self.counts.late += 1
            return 0
        opening = sum(1 for tracked in self._tracked.values() if not tracked.engine_blocks)
        if opening >= self.settings.lookups:
            return None
        tracked = _Tracked(request, up.epoch)
        self._tracked[request.id] = tracked
        if not request.again:
            self.counts.queries += 1
            self.counts.query_tokens += tokens
        self._opens.put(lambda: self._open(up, tracked))
        return None

    def _touch(self, up: _Up | None, tracked: _Tracked, computed: int) -> None:
        """vLLM's own cache was hit: what is hot there must not age out in kvkeep."""
        if computed == 0 or tracked.touched or up is None or tracked.space is None:
            return
        tracked.touched = True
        if self._touches >= TOUCHES_MAX:
            self.counts.dropped_jobs += 1
            return
        self._touches += 1
        space, request = tracked.space, tracked.request
        prompt = _prompt(request, list(request.tokens()[:computed]))

        def touch() -> None:
            try:
                touched = up.client.touch(space, prompt)
                with self._lock:
                    self.counts.touched_tokens += touched
            finally:
                with self._lock:
                    self._touches -= 1

        self._jobs.put(touch)

    def allocated(self, request_id: str, engine_blocks: SequenceOf[int], external: int) -> None:
        """vLLM has admitted it, with room for `external` tokens of ours."""
        with self._lock:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.over:
                return
            tracked.engine_blocks = list(engine_blocks)
            if external > 0:
                tracked.state = State.LOADING
                tracked.load_tokens = external
                self._to_load.append(tracked)
                if not tracked.request.again:
                    self.counts.hit_tokens += external

    def step(self, scheduled: Mapping[str, int], preempted: Iterable[str],
             blocks_of: Callable[[str], SequenceOf[int]]) -> Orders:
        """What the ranks do in this step, which computes `scheduled` tokens of each request."""
        orders = Orders()
        with self._lock:
            up = self._synced()
            if up is not None:
                orders.endpoint = Endpoint(up.epoch, up.session.instance_token)
                orders.spaces = tuple(self._new_spaces)
                self._new_spaces.clear()
            orders.preempted = list(preempted)
            for request_id in orders.preempted:
                self._preempt(orders, request_id)
            if self._frees() and self._model is not None and self._model.late_saves:
                orders.preempted += {order.tracked.key for order in self._orders.values()
                                     if not order.load}
            for request_id, count in scheduled.items():
                tracked = self._tracked.get(request_id)
                if tracked is not None:
                    self._advance(orders, tracked, count, blocks_of)
            for tracked in self._to_load:
                end = tracked.local + tracked.load_tokens
                orders.loads.append(self._order(tracked, tracked.local, end, load=True))
                tracked.load_tokens = 0
            self._to_load.clear()
            self._finishing = [tracked for tracked in self._finishing
                               if not self._finish(orders, tracked)]
            orders.releases, self._releases = self._releases, []
            orders.idle = not scheduled and bool(self._tracked)
        return orders

    def _advance(self, orders: Orders, tracked: _Tracked, count: int,
                 blocks_of: Callable[[str], SequenceOf[int]]) -> None:
        """Order what this step fills, and ask for room for what comes after."""
        if tracked.state is not State.OPEN or tracked.over or not tracked.may_save \
                or not isinstance(tracked.holder, Sequence):
            return
        assert tracked.space is not None and self._model is not None
        known = len(tracked.request.tokens()) - int(self._model.drafts)
        whole = min(tracked.request.computed() + count, known)
        whole -= whole % tracked.space.block_tokens
        if whole <= tracked.ordered:
            return
        placed = min(whole, self._covered(tracked))
        if placed <= tracked.ordered and (tracked.growing or not tracked.grows):
            tracked.bound = whole
            return
        tracked.bound = whole
        tracked.engine_blocks = list(blocks_of(tracked.key))
        self._grow(tracked, whole)
        if placed > tracked.ordered and self._has_bytes(tracked, placed):
            orders.saves.append(self._order_save(tracked, placed, last=False))

    def _frees(self) -> bool:
        """May vLLM give blocks of a running request to others?"""
        return self._model is not None and self._model.null_block is not None

    def _has_bytes(self, tracked: _Tracked, end: int) -> bool:
        """Are there bytes for what would be saved? Where vLLM has let go of a block, the chain ends
        before it, and nothing behind it could be found: no more of the request is saved."""
        assert self._model is not None
        size = self._model.engine_block_tokens
        blocks = tracked.engine_blocks[tracked.ordered // size:-(-end // size)]
        if self._frees() and self._model.null_block in blocks:
            tracked.may_save = False
        return tracked.may_save

    def _order_save(self, tracked: _Tracked, end: int, last: bool) -> Copy:
        copy = self._order(tracked, tracked.ordered, end, load=False, last=last)
        tracked.ordered = end
        return copy

    def _order(self, tracked: _Tracked, first: int, end: int, load: bool, last: bool = False
               ) -> Copy:
        assert tracked.space is not None and self._model is not None
        size, engine_size = tracked.space.block_tokens, self._model.engine_block_tokens
        first_block, end_block = first // size, -(-end // size)
        first_engine, end_engine = first // engine_size, -(-end // engine_size)
        engine_blocks = tuple(NO_BLOCK if self._frees() and block == self._model.null_block
                              else block for block in
                              tracked.engine_blocks[first_engine:end_engine])
        self._order_count += 1
        tracked.orders += 1
        self._orders[self._order_count] = _Order(tracked, first, end, load, self._ranks())
        return Copy(tracked.key, self._order_count, tracked.epoch, tracked.space, first, end,
                    first_block, tuple(tracked.rows[first_block:end_block]), first_engine,
                    engine_blocks, last)

    def _ranks(self) -> int:
        assert self._model is not None
        return self._model.ranks

    def _covered(self, tracked: _Tracked) -> int:
        """Tokens whose place is known: whole blocks of the sequence."""
        assert tracked.space is not None
        size = tracked.space.block_tokens
        return min(tracked.length - tracked.length % size, len(tracked.rows) * size)

    def _grow(self, tracked: _Tracked, length: int) -> None:
        up = self._up
        if tracked.growing or not tracked.grows or length <= tracked.length or up is None:
            return
        tracked.growing = True
        tokens = list(tracked.request.tokens()[tracked.length:length])
        self._jobs.put(lambda: self._append(tracked, tokens))

    def _preempt(self, orders: Orders, request_id: str) -> None:
        """Its blocks go to others in this step: save what is computed and has a place, now."""
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.over:
            return
        # Where vLLM frees by windows, the blocks that are known here may be others' by now.
        if isinstance(tracked.holder, Sequence) and tracked.state is State.OPEN \
                and tracked.may_save and not self._frees():
            end = min(tracked.bound, self._covered(tracked))
            if end > tracked.ordered:
                orders.early_saves.append(self._order_save(tracked, end, last=False))
        self._unsealed[request_id] = tracked
        self._end(tracked)

    def hands_on(self, request_id: str, computed: int) -> int:
        """Tokens of a request that is about to end that another engine will find: what is cached of
        it, or will be once its last blocks are saved."""
        with self._lock:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.over or tracked.space is None \
                    or tracked.state is not State.OPEN:
                return 0
            if not isinstance(tracked.holder, Sequence) or not tracked.may_save:
                return tracked.usable
            bound = min(computed, len(tracked.request.tokens()) - 1)
            return bound - bound % tracked.space.block_tokens

    def finished(self, request_id: str, computed: int, engine_blocks: SequenceOf[int]) -> bool:
        """vLLM has ended it. True: keep its blocks until the ranks say that they are saved."""
        with self._lock:
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.over:
                return False
            self._synced()
            if tracked.key not in self._tracked:
                return False
            if tracked.state is not State.OPEN or not isinstance(tracked.holder, Sequence) \
                    or not tracked.may_save:
                self._end(tracked)
                return False
            assert tracked.space is not None
            bound = min(computed, len(tracked.request.tokens()) - 1)
            whole = bound - bound % tracked.space.block_tokens
            if whole <= tracked.ordered:
                tracked.held = self._saves_read(tracked)
                self._end(tracked)
                return tracked.held
            tracked.bound = whole
            tracked.engine_blocks = list(engine_blocks)
            tracked.over = True
            tracked.state = State.FINISHING
            tracked.finish_by = time.monotonic() + self.settings.finish_wait_ms / 1e3
            self._finishing.append(tracked)
            self._grow(tracked, whole)
            return True

    def _finish(self, orders: Orders, tracked: _Tracked) -> bool:
        """The last full blocks of a finished request, when their places are known. True: it is
        done with, one way or the other."""
        if tracked.state is not State.FINISHING:
            return True
        end = min(tracked.bound, self._covered(tracked))
        if end < tracked.bound and tracked.grows and time.monotonic() < tracked.finish_by:
            self._grow(tracked, tracked.bound)  # where none is under way
            return False
        if end > tracked.ordered and tracked.may_save and self._has_bytes(tracked, end):
            orders.saves.append(self._order_save(tracked, end, last=True))
        elif self._saves_read(tracked):
            tracked.held = True
        else:
            self._releases.append(tracked.key)
        self._end(tracked)
        return True

    def _saves_read(self, tracked: _Tracked) -> bool:
        """Saves that were ordered may still read its blocks."""
        assert self._model is not None
        return self._model.late_saves and tracked.orders > 0

    def _end(self, tracked: _Tracked) -> None:
        """Nothing more is ordered for it. Where it is still being opened, _settle() closes it."""
        tracked.over = True
        if self._tracked.get(tracked.key) is tracked:
            del self._tracked[tracked.key]
        opening = tracked.state is State.OPENING
        tracked.state = State.CLOSING
        if not opening:
            self._close_if_done(tracked)

    def _close_if_done(self, tracked: _Tracked) -> None:
        if tracked.state is State.CLOSING and tracked.orders == 0 and not tracked.growing:
            self._jobs.put(lambda: self._seal_and_close(tracked))

    def reported(self, report: Report) -> None:
        """What ranks have done since they were asked last."""
        with self._lock:
            up = self._up
            for epoch, ranks in report.joined.items():
                if up is not None and up.epoch == epoch:
                    up.joined += ranks
            for number, (well, ranks) in report.done.items():
                order = self._orders.get(number)
                if order is None:
                    continue
                order.well = order.well and well
                order.waiting -= ranks
                if order.waiting <= 0:
                    del self._orders[number]
                    self._order_done(order)

    def _order_done(self, order: _Order) -> None:
        tracked = order.tracked
        tracked.orders -= 1
        if tracked.held and tracked.orders == 0:
            tracked.held = False
            self._releases.append(tracked.key)
        if order.load:
            if order.well:
                self.counts.loaded_tokens += order.end - order.first
            else:
                self.counts.failed_loads += 1
                tracked.usable = 0
            if tracked.state is State.LOADING:
                tracked.state = State.OPEN
        elif not order.well:
            tracked.may_save = False
        elif tracked.may_save:
            tracked.reported = max(tracked.reported, order.end)
            if tracked.state is not State.CLOSING:
                self._jobs.put(lambda: self._seal(tracked))
        if tracked.epoch != (self._up.epoch if self._up is not None else 0):
            self._forget(tracked)
        else:
            self._close_if_done(tracked)

    def reset(self) -> bool:
        """Forget the model's cache, in kvkeep too: its weights may have changed. False: the daemon
        could not be told; then nothing is looked up until it is."""
        with self._lock:
            self.counts.resets += 1
            orders = [order.tracked for order in self._orders.values()]
            for tracked in orders + list(self._tracked.values()):
                tracked.may_save = False
                tracked.usable = 0
                tracked.void = True
            self._must_reset = True
            up = self._up
        return up is not None and self._invalidate(up)

    def _synced(self) -> _Up | None:
        """The connection; what belongs to an earlier one is forgotten, but for loads that ranks
        have not answered: vLLM waits for those, and they fail."""
        up = self._up
        epoch = up.epoch if up is not None else 0
        if epoch != self._synced_epoch:
            self._synced_epoch = epoch
            for tracked in list(self._tracked.values()):
                if tracked.epoch != epoch and tracked.state is not State.LOADING:
                    if tracked.state is State.FINISHING:
                        self._releases.append(tracked.key)
                    self._forget(tracked)
        return up

    def _forget(self, tracked: _Tracked) -> None:
        tracked.over = True
        tracked.may_save = False
        tracked.state = State.CLOSING
        tracked.holder = None
        for known in (self._tracked, self._unsealed):
            if known.get(tracked.key) is tracked:
                del known[tracked.key]

    # ------------------------------------------------------------- threads of ours

    def _run_opens(self) -> None:
        while (job := self._opens.get()) is not None:
            self._try(job)

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._try(job)

    @staticmethod
    def _try(job: Callable[[], None]) -> None:
        try:
            job()
        except KvkeepError as error:
            logger.info("kvkeep: %s", error)
        except Exception:  # a thread that ends would leave its queue to grow
            logger.exception("kvkeep: a job failed")

    def _space(self, up: _Up, adapter: Adapter | None) -> Space:
        assert self._model is not None
        with self._space_lock:
            if adapter not in up.spaces:
                model = self._model
                space = up.client.open_space(
                    model.identity(adapter), model.groups, block_tokens=model.block_tokens,
                    tensor_shards=model.ranks, prefill_cost=model.prefill_cost,
                    tenant=self.settings.tenant)
                up.spaces[adapter] = space
                with self._lock:
                    self._new_spaces.append(space)
            return up.spaces[adapter]

    def _open(self, up: _Up, tracked: _Tracked) -> None:
        """Find the prefix and hold it, with room for the rest: one call. Without room for that,
        hold what was found."""
        request = tracked.request
        if self._seals_first(tracked):
            self._opens.put(lambda: self._open(up, tracked))
            return
        holder: Sequence | Lease | None = None
        space = None
        refused = 0
        try:
            adapter = None
            if request.adapter is not None:
                with self._space_lock:
                    adapter = self._adapters.find(*request.adapter)
            if request.adapter is None or adapter is not None:
                space = self._space(up, adapter)
                tokens = list(request.tokens())
                if (up.remote or request.awaited > 0) and \
                        self._more_comes(up, space, tracked, tokens):
                    self._opens.put(lambda: self._open(up, tracked))
                    return
                holder, refused = self._hold(up, space, request, tokens, tracked.looks > 0)
        except KvkeepError as error:
            logger.info("kvkeep: a look-up failed: %s", error)
        with self._lock:
            self.counts.refused += refused
            if holder is None:
                self._settle(tracked, None, None)
                return
            self._settle(tracked, space, holder)

    def _seals_first(self, tracked: _Tracked) -> bool:
        """It was preempted, and what it had computed is just being sealed."""
        with self._lock:
            waits = tracked.key in self._unsealed and not tracked.over
        waited_ms = (time.monotonic() - tracked.asked_at) * 1e3
        if not waits or waited_ms >= self.settings.lookup_wait_ms / 2:
            return False
        if self._opens.empty():
            time.sleep(PAUSE_S)
        return True

    def _more_comes(self, up: _Up, space: Space, tracked: _Tracked, tokens: list[int]) -> bool:
        """There is more to wait for, and time to: the store that daemons share is asked for the
        rest of this prompt, or the engine that prefilled it is just sealing."""
        waited_ms = (time.monotonic() - tracked.asked_at) * 1e3
        awaited = min(tracked.request.awaited, len(tokens))
        most_ms = self.settings.handoff_wait_ms if awaited > 0 else self.settings.remote_wait_ms
        if tracked.over or waited_ms >= most_ms:
            return False
        if tracked.looks > 0 and self._opens.empty():
            time.sleep(PAUSE_S)
        found = up.client.lookup(space, _prompt(tracked.request, tokens),
                                 retry=tracked.request.again or tracked.looks > 0)
        tracked.looks += 1
        return found.cached_tokens < awaited or \
            (found.remote_pending and waited_ms < self.settings.remote_wait_ms)

    def _hold(self, up: _Up, space: Space, request: Request, tokens: list[int], counted: bool
              ) -> tuple[Sequence | Lease, int]:
        prompt = _prompt(request, tokens)
        if self.settings.save:
            try:
                return up.session.open_sequence(space, prompt, tier=Tier.HOST, leave_on_host=True,
                                                retry=request.again or counted), 0
            except KvkeepError as error:
                if error.code != Code.RESOURCE_EXHAUSTED:
                    raise
        return up.session.pin(space, prompt, ttl_ms=PIN_MS, copy_pin=True), int(self.settings.save)

    def _settle(self, tracked: _Tracked, space: Space | None, holder: Sequence | Lease | None
                ) -> None:
        """An answer to OPENING."""
        tracked.space = space
        tracked.holder = holder
        if holder is not None:
            tracked.cached = holder.cached_tokens if isinstance(holder, Sequence) \
                else holder.tokens
            tracked.length = holder.length if isinstance(holder, Sequence) else holder.tokens
            tracked.rows = _rows(holder.blocks())
        tracked.usable = 0 if tracked.void else tracked.cached
        tracked.ordered = tracked.reported = tracked.cached
        if tracked.state is State.OPENING:
            tracked.state = State.OPEN
        else:
            self._close_if_done(tracked)

    def _append(self, tracked: _Tracked, tokens: list[int]) -> None:
        sequence = tracked.holder
        try:
            if not isinstance(sequence, Sequence):
                return
            sequence.append(tokens)
            with self._lock:
                tracked.rows = _rows(sequence.blocks())
                tracked.length = sequence.length
        except KvkeepError:
            with self._lock:
                self.counts.refused += 1
                tracked.grows = False
            raise
        finally:
            with self._lock:
                tracked.growing = False
                self._close_if_done(tracked)

    def _seal(self, tracked: _Tracked) -> None:
        sequence = tracked.holder
        if not isinstance(sequence, Sequence) or not tracked.may_save:
            return
        end = tracked.reported
        if end > sequence.sealed_tokens:
            before = sequence.sealed_tokens
            sequence.seal(end, all_ranks=True)
            with self._lock:
                self.counts.saved_tokens += end - before

    def _seal_and_close(self, tracked: _Tracked) -> None:
        holder = tracked.holder
        try:
            if holder is not None:
                self._seal(tracked)
        finally:
            self._sealed(tracked)
            if isinstance(holder, Sequence):
                holder.close()
            elif holder is not None:
                holder.release()

    def _sealed(self, tracked: _Tracked) -> None:
        with self._lock:
            if self._unsealed.get(tracked.key) is tracked:
                del self._unsealed[tracked.key]

    def _keep_connected(self) -> None:
        wait_ms = self.settings.reconnect_ms
        said = ""  # a daemon that stays away is reported once, not with each try
        while not self._stopping.is_set():
            try:
                up = self._connect()
            except (KvkeepError, OSError) as error:
                cause = error.code.name if isinstance(error, KvkeepError) else type(error).__name__
                logger.log(logging.DEBUG if cause == said else logging.WARNING,
                           "kvkeep: no connection to %s, vLLM goes on without, and tries again: %s",
                           self.settings.target or default_target(), error)
                said = cause
                self._tried.set()
            else:
                self._tried.set()
                said = ""
                wait_ms = self.settings.reconnect_ms
                up.session.ended.wait()
                with self._lock:
                    self._up = None
                    self.counts.lost += not self._stopping.is_set()
                self._drop(up)
                if self._stopping.is_set():
                    return
                logger.warning("kvkeep: the connection is lost, vLLM goes on without")
            self._stopping.wait(wait_ms / 1e3)
            wait_ms = min(2 * wait_ms, RECONNECT_MS_MAX)

    def _connect(self) -> _Up:
        client = Client(self.settings.target, token=self.settings.credential(),
                        tenant=self.settings.tenant, timeout=self.settings.call_timeout_s,
                        retry=RETRY)
        try:
            session = client.session(name="vllm-scheduler")
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._new_spaces.clear()
        up = _Up(self._epoch + 1, client, session)
        try:
            if self._must_reset and not self._invalidate(up):
                raise KvkeepError("the cache could not be reset", Code.UNAVAILABLE)
            up.remote = b"remote" in client.server_info().features
            self._space(up, None)
        except BaseException:
            self._drop(up)
            raise
        with self._lock:
            self._epoch = up.epoch
            self._up = up
        logger.info("kvkeep: connected to %s", client.target)
        return up

    def _drop(self, up: _Up) -> None:
        try:
            up.session.close()
        except (KvkeepError, OSError) as error:
            logger.debug("kvkeep: %s", error)
        up.client.close()

    def _invalidate(self, up: _Up) -> bool:
        """All spaces of the model's weights, with any adapter, of this tenant."""
        assert self._model is not None
        facts = self._model.facts
        try:
            up.client.invalidate(model=facts.model, revision=facts.revision,
                                 tenant=self.settings.tenant)
        except KvkeepError as error:
            logger.warning("kvkeep: the cache could not be reset: %s", error)
            up.lose()  # a new connection resets before anything else
            return False
        with self._lock:
            self._must_reset = False
        return True


def _prompt(request: Request, tokens: list[int]) -> Prompt:
    spans = tuple(span for span in request.spans if span.first + span.count <= len(tokens))
    return Prompt(tokens, salt=request.salt, spans=spans, whole_blocks=True)


def _rows(blocks: list[Placement]) -> list[tuple[int, int, int]]:
    """Up to the first block without a place."""
    rows = []
    for block in blocks:
        if block.slot is None:
            break
        rows.append((int(block.tier), block.slot, block.generation))
    return rows
