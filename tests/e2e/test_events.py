"""Events: a router that knows nothing but them finds the same longest prefixes as a look-up does,
over ZeroMQ by vLLM's public format alone, and over gRPC; over dropped messages, restarts, evictions
and invalidations."""

import os
import random
import struct
import subprocess
import threading
import time
from typing import Any, Optional, Union

import grpc
import msgspec
import pytest
import zmq
from kvkeep.v1 import kvkeep_pb2 as pb

from conftest import Daemon, binary, promised
from test_restart import Place, values_of
from worker import BLOCK_TOKENS, Refused, Worker, space_request

CONFIG = """
[tiers]
device_bytes = {device}
host_bytes = {host}
huge_pages = no
[events]
log_bytes = {log}
publish = ipc://{folder}/events
replay = ipc://{folder}/replay
replay_bytes = {replay}
encoding = {encoding}
batch_ms = 5 ms
watchers = 2
{more}
"""

END = (1 << 64) - 1

# ---- vLLM's events as published: the batch by position, events by name


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[bytes]
    parent_block_hash: Optional[bytes]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]
    extra_keys: Optional[list[Optional[tuple[Any, ...]]]] = None
    group_idx: Optional[int] = None
    kv_cache_spec_kind: Optional[str] = None
    kv_cache_spec_sliding_window: Optional[int] = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[bytes]
    medium: Optional[str]
    group_idx: Optional[int] = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Union[BlockStored, BlockRemoved, AllBlocksCleared]]
    data_parallel_rank: Optional[int] = None


class StoredArray(msgspec.Struct, tag="BlockStored", array_like=True):
    block_hashes: list[bytes]
    parent_block_hash: Optional[bytes]
    token_ids: list[int]
    block_size: int
    lora_id: Optional[int]
    medium: Optional[str]
    lora_name: Optional[str]


class RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True):
    block_hashes: list[bytes]
    medium: Optional[str]


class ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True):
    pass


class ArrayBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Union[StoredArray, RemovedArray, ClearedArray]]
    data_parallel_rank: Optional[int] = None


class Index:
    """Which blocks there are, by what lies before them and their tokens."""

    def __init__(self):
        self.clear()

    def clear(self):
        self.blocks = {}    # hash -> (parent, tokens)
        self.children = {}  # (parent, tokens) -> hash
        self.mediums = {}   # hash -> set

    def store(self, key, parent, values, medium):
        self.blocks[key] = (parent, values)
        self.children[parent, values] = key
        self.mediums.setdefault(key, set()).add(medium)

    def remove(self, key, medium):
        places = self.mediums.get(key, set())
        places.discard(medium)
        if not places and key in self.blocks:
            del self.children[self.blocks.pop(key)]
            del self.mediums[key]

    def longest(self, values):
        parent, count = None, 0
        while count + BLOCK_TOKENS <= len(values):
            key = self.children.get((parent, tuple(values[count:count + BLOCK_TOKENS])))
            if key is None:
                break
            parent, count = key, count + BLOCK_TOKENS
        return count


class Subscriber(threading.Thread):
    """A router's reader: sees gaps in the numbers and asks for what it missed. `drop` is the share
    of live messages that it loses."""

    def __init__(self, folder, topic, batch=Batch, drop=0.0, replays=True):
        super().__init__(daemon=True)
        self.index = Index()
        self.folder, self.topic, self.drop, self.replays = folder, topic, drop, replays
        self.decoder = msgspec.msgpack.Decoder(batch)
        self.next = 0
        self.dropped = self.replayed = self.cleared = self.messages = 0
        self.mediums = set()
        self.error = None
        self.random = random.Random(1)
        self.lock = threading.Lock()
        self.stopping = False
        self.context = zmq.Context()
        self.live = self.context.socket(zmq.SUB)
        self.live.connect(f"ipc://{folder}/events")
        self.live.setsockopt(zmq.SUBSCRIBE, topic)
        self.start()

    def run(self):
        try:
            quiet = time.monotonic()
            while not self.stopping:
                if not self.live.poll(50):
                    # Nobody says what was said before we came, or last of all.
                    if self.replays and time.monotonic() - quiet > 0.3:
                        self.replay()
                        quiet = time.monotonic()
                    continue
                quiet = time.monotonic()
                topic, number, payload = self.live.recv_multipart()
                assert topic == self.topic
                if self.random.random() < self.drop:
                    self.dropped += 1
                    continue
                self.take(int.from_bytes(number, "big"), payload)
        except Exception as error:  # shown by the test
            self.error = error

    def take(self, number, payload):
        if number > self.next:
            if self.replays:
                self.replay()
            if number > self.next:
                self.next = number  # what is missing is published anew
        if number == self.next:
            self.apply(payload)
            self.next = number + 1

    def replay(self):
        request = self.context.socket(zmq.DEALER)
        request.linger = 0
        request.connect(f"ipc://{self.folder}/replay")
        request.send_multipart([b"", self.next.to_bytes(8, "big"), self.topic])
        while request.poll(1000):
            empty, number, payload = request.recv_multipart()
            assert empty == b""
            number = int.from_bytes(number, "big")
            if number == END:
                break
            self.replayed += 1
            if number >= self.next:
                self.apply(payload)
                self.next = number + 1
        request.close()

    def apply(self, payload):
        self.messages += 1
        batch = self.decoder.decode(payload)
        assert abs(batch.ts - time.time()) < 300
        assert batch.events
        with self.lock:
            for event in batch.events:
                self.apply_one(event)

    def apply_one(self, event):
        name = type(event).__name__
        if "Cleared" in name:
            self.index.clear()
            self.cleared += 1
        elif "Removed" in name:
            for key in event.block_hashes:
                self.index.remove(key, event.medium)
        else:
            size = event.block_size
            assert size == BLOCK_TOKENS and len(event.token_ids) == size * len(event.block_hashes)
            parent = event.parent_block_hash
            self.mediums.add(event.medium)
            for i, key in enumerate(event.block_hashes):
                assert len(key) == 16
                values = tuple(event.token_ids[i * size:(i + 1) * size])
                self.index.store(key, parent, values, event.medium)
                parent = key

    def longest(self, values):
        with self.lock:
            return self.index.longest(values)

    def stop(self):
        self.stopping = True
        self.join(10)
        self.live.close()
        self.context.destroy(linger=0)
        if self.error is not None:
            raise self.error


def config_of(folder, device="64 KiB", host="64 KiB", log="4 MiB", replay="8 MiB", encoding="maps",
              more=""):
    return CONFIG.format(folder=folder, device=device, host=host, log=log, replay=replay,
                         encoding=encoding, more=more)


def agree(worker, space, reader, prompts):
    """Soon, and then for all prompts, the reader says what a look-up says."""
    deadline = time.monotonic() + 60
    while True:
        wrong = [(p[0], worker.lookup(space, p).cached_tokens, reader.longest(p)) for p in prompts]
        wrong = [row for row in wrong if row[1] != row[2]]
        if not wrong:
            return sum(reader.longest(p) > 0 for p in prompts)
        assert reader.error is None, reader.error
        assert time.monotonic() < deadline, f"(prompt, look-up, reader): {wrong[:5]}"
        time.sleep(0.05)


def soon(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def prompts_of(count):
    """Prompts that share beginnings of several lengths."""
    source = random.Random(5)
    found = []
    for number in range(count):
        family = source.randrange(4)
        shared = source.randrange(0, 6) * BLOCK_TOKENS
        found.append([family] * shared + [100 + number * 50 + i for i in range(3 * BLOCK_TOKENS)])
    return found


def play(worker, space, prompts, steps, seed=1):
    source = random.Random(seed)
    for _ in range(steps):
        values = source.choice(prompts)
        try:
            sequence = worker.open(space, values)
        except grpc.RpcError as error:
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            continue
        worker.seal(sequence.sequence_id, len(values))
        worker.close(sequence.sequence_id)
        if source.random() < 0.02:
            worker.call("Invalidate", pb.InvalidateRequest(space_id=space.space_id))


def stats_of(worker):
    answer = worker.call("GetStats", pb.GetStatsRequest(), stub=worker.admin)
    return {stat.name.decode(): stat.value for stat in answer.stats}


@pytest.mark.parametrize("encoding", ["maps", "arrays"])
def test_a_subscriber_knows_what_a_look_up_finds(start, folder, encoding):
    daemon = start(config_of(folder, encoding=encoding))
    worker = Worker(daemon)
    space = worker.open_space()
    prompts = prompts_of(60)
    play(worker, space, prompts, 50)  # before anybody listens
    kind = Batch if encoding == "maps" else ArrayBatch
    reader = Subscriber(folder, b"kv@default@tiny", batch=kind)
    for round_ in range(4):
        play(worker, space, prompts, 150, seed=round_)
        assert agree(worker, space, reader, prompts) > 5
    stats = stats_of(worker)
    assert stats['kvkeep_evictions_total{tier="host"}'] > 50
    assert reader.mediums == {"GPU", "CPU"}
    reader.stop()
    assert stats["kvkeep_events_topics"] == 1
    assert stats["kvkeep_events_messages_total"] >= reader.messages - reader.replayed > 0
    assert stats["kvkeep_events_replays_total"] > 0
    assert stats["kvkeep_events_published_total"] > 200
    assert stats["kvkeep_events_total"] >= stats["kvkeep_events_published_total"] / 2
    worker.leave()


def test_a_subscriber_that_loses_messages_asks_for_them(start, folder):
    daemon = start(config_of(folder))
    worker = Worker(daemon)
    space = worker.open_space()
    prompts = prompts_of(40)
    reader = Subscriber(folder, b"kv@default@tiny", drop=0.3)
    for round_ in range(4):
        play(worker, space, prompts, 100, seed=round_)
        time.sleep(0.1)
    assert agree(worker, space, reader, prompts) > 5
    reader.stop()
    assert reader.dropped > 3 and reader.replayed > 3
    worker.leave()


def test_what_is_no_longer_kept_is_published_anew(start, folder):
    daemon = start(config_of(folder, replay="64 KiB"))
    worker = Worker(daemon)
    space = worker.open_space()
    prompts = prompts_of(60)
    for round_ in range(10):
        play(worker, space, prompts, 150, seed=round_)
    before = stats_of(worker)["kvkeep_events_topic_restarts_total"]
    late = Subscriber(folder, b"kv@default@tiny")
    soon(lambda: late.cleared >= 1)
    assert agree(worker, space, late, prompts) > 5
    late.stop()
    assert stats_of(worker)["kvkeep_events_topic_restarts_total"] > before
    worker.leave()


def test_a_log_that_overflows_is_no_lie(start, folder):
    """Events come faster than the log keeps them: the topic is published anew."""
    daemon = start(config_of(folder, log="4 KiB", more="").replace("batch_ms = 5 ms",
                                                                    "batch_ms = 500 ms"))
    worker = Worker(daemon)
    space = worker.open_space()
    prompts = prompts_of(60)
    reader = Subscriber(folder, b"kv@default@tiny")
    for round_ in range(3):
        play(worker, space, prompts, 200, seed=round_)
        assert agree(worker, space, reader, prompts) > 5
    assert stats_of(worker)["kvkeep_events_topic_restarts_total"] > 0
    reader.stop()
    worker.leave()


def test_over_a_restart(folder):
    """Killed and started again on the same memory: what came back is published first."""
    more = """
[durable]
folder = {0}/data
keeper = process
keeper_socket = {0}/keeper
keeper_hold_ms = 1 min
""".format(folder)
    text = config_of(folder, host="1 MiB", device="256 KiB", more=more)
    place = Place(folder)
    try:
        for life in range(2):
            home = os.path.join(folder, f"life{life}")
            os.mkdir(home)
            place.daemon = Daemon(home, text)
            worker = Worker(place.daemon)
            space = worker.open_space()
            prompts = [values_of(number) for number in range(20)]
            if life == 0:
                reader = Subscriber(folder, b"kv@default@tiny")
                for number, values in enumerate(prompts):
                    worker.close(worker.prefill(space, values, seed=number).sequence_id)
            assert agree(worker, space, reader, prompts) == 20
            if life == 0:
                place.kill()
        soon(lambda: reader.cleared >= 2)
        prompts += [values_of(number) for number in range(100, 110)]
        for number, values in enumerate(prompts[20:]):
            worker.close(worker.prefill(space, values, seed=100 + number).sequence_id)
        assert agree(worker, space, reader, prompts) == 30
        reader.stop()
        worker.leave()
        place.daemon.stop()
    finally:
        if place.daemon.process.poll() is None:
            place.kill()
        for pid in place.keepers():
            os.kill(pid, 9)


TENANTS = """
[tenant a]
[tenant b@c]
[credential a]
token = token-of-tenant-aaaa
tenants = a
[credential b]
token = token-of-tenant-bbbb
tenants = b@c
[credential boss]
token = token-of-the-admin-00
admin = yes
"""


def test_tenants_have_topics_of_their_own(start, folder):
    daemon = start(config_of(folder, more=TENANTS))
    workers = {name: Worker(daemon, token=f"token-of-tenant-{letter * 4}")
               for name, letter in ((b"a", "a"), (b"b@c", "b"))}
    prompts = prompts_of(10)
    readers = {b"a": Subscriber(folder, b"kv@a@tiny"), b"b@c": Subscriber(folder, b"kv@b%40c@tiny")}
    spaces = {name: worker.open_space() for name, worker in workers.items()}
    play(workers[b"a"], spaces[b"a"], prompts, 30)
    assert agree(workers[b"a"], spaces[b"a"], readers[b"a"], prompts) > 3
    assert all(readers[b"b@c"].longest(values) == 0 for values in prompts)
    play(workers[b"b@c"], spaces[b"b@c"], prompts, 20, seed=9)
    assert agree(workers[b"b@c"], spaces[b"b@c"], readers[b"b@c"], prompts) > 3
    both = [key for key in readers[b"a"].index.blocks if key in readers[b"b@c"].index.blocks]
    assert both == [], "the same tokens of two tenants have the same name"
    for reader in readers.values():
        reader.stop()
    for worker in workers.values():
        worker.leave()


def test_salted_chains_are_told_apart(start, folder):
    daemon = start(config_of(folder))
    worker = Worker(daemon)
    space = worker.open_space()
    values = list(range(2 * BLOCK_TOKENS))
    prompt = pb.Prompt(tokens=struct.pack(f"<{len(values)}I", *values), salt=b"eve")
    watch = Watcher(worker, pb.WatchBlocksRequest())
    sequence = worker.call("OpenSequence", pb.OpenSequenceRequest(
        session_id=worker.id, space_id=space.space_id, prompt=prompt))
    worker.seal(sequence.sequence_id, len(values))
    watch.wait(lambda: len(watch.events) >= 2)
    assert [event.salted for event in watch.events] == [True, True]
    assert b"eve" not in b"".join(event.SerializeToString() for event in watch.events)
    watch.stop()
    worker.leave()


def test_nonsense_at_the_replay_socket(start, folder):
    daemon = start(config_of(folder))
    worker = Worker(daemon)
    space = worker.open_space()
    prompts = prompts_of(20)
    play(worker, space, prompts, 20)
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.connect(f"ipc://{folder}/replay")
    source = random.Random(3)
    for _ in range(300):
        frames = [source.randbytes(source.choice([0, 0, 1, 7, 8, 8, 9, 5000]))
                  for _ in range(source.randrange(1, 7))]
        socket.send_multipart(frames)
    for number in (0, 1, 5, END - 1, END):
        for topic in (b"", b"kv@", b"kv@default@tiny", b"kv@default@tinyer"):
            socket.send_multipart([b"", number.to_bytes(8, "big"), topic])
    time.sleep(0.3)
    socket.close()
    reader = Subscriber(folder, b"kv@default@tiny")
    assert agree(worker, space, reader, prompts) > 3
    reader.stop()
    context.destroy(linger=0)
    worker.leave()


@pytest.mark.parametrize("lines, field", [
    ("publish = tcp://0.0.0.0:5557", "events.publish"),
    ("publish = tcp://*:5557", "events.publish"),
    ("publish = ipc://@abstract", "events.publish"),
    ("publish = udp://127.0.0.1:1", "events.publish"),
    ("replay = tcp://127.0.0.1:5558", "events.publish"),
    ("publish = tcp://127.0.0.1:5557\nreplay = tcp://10.0.0.1:1", "events.replay"),
])
def test_endpoints_that_are_refused(folder, lines, field):
    path = os.path.join(folder, "bad.ini")
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"[tiers]\nhost_bytes = 1 MiB\n[events]\nlog_bytes = 1 MiB\n{lines}\n")
    result = subprocess.run([binary(), "--config", path, "--check-config"], capture_output=True,
                            text=True, timeout=10)
    assert result.returncode != 0 and field in result.stderr, result.stderr


def test_publishing_needs_a_log(folder):
    path = os.path.join(folder, "bad.ini")
    with open(path, "w", encoding="utf-8") as file:
        file.write("[tiers]\nhost_bytes = 1 MiB\n[events]\npublish = tcp://127.0.0.1:5557\n")
    result = subprocess.run([binary(), "--config", path, "--check-config"], capture_output=True,
                            text=True, timeout=10)
    assert result.returncode != 0 and "events.log_bytes" in result.stderr, result.stderr


# ---- over gRPC


class Watcher(threading.Thread):
    """Keeps an index by WatchBlocks."""

    def __init__(self, worker, request, index=None):
        super().__init__(daemon=True)
        self.index = index or Index()
        self.spaces = {}
        self.events = []
        self.roots = set()
        self.phases = []
        self.epoch = b""
        self.after = 0
        self.error = None
        self.lock = threading.Lock()
        self.call = worker.calls.WatchBlocks(request, metadata=worker.metadata)
        self.start()

    def run(self):
        try:
            for message in self.call:
                with self.lock:
                    self.take(message)
        except grpc.RpcError as error:
            self.error = error

    def take(self, message):
        phases = pb.WatchBlocksResponse
        if not self.phases or self.phases[-1] != message.phase:
            self.phases.append(message.phase)
        self.epoch = message.epoch or self.epoch
        if message.phase == phases.PHASE_SNAPSHOT_BEGIN:
            self.index.clear()
        if message.phase in (phases.PHASE_LIVE, phases.PHASE_SNAPSHOT_END, phases.PHASE_RESUMED):
            assert message.after >= self.after
            self.after = message.after
        for space in message.spaces:
            self.spaces[space.space_id] = space
        for event in message.events:
            self.events.append(event)
            assert event.space_id in self.spaces
            if event.kind == pb.BlockEvent.KIND_CLEARED:
                self.index.clear()  # there is one space in these tests
            elif event.kind == pb.BlockEvent.KIND_REMOVED:
                self.index.remove(event.key, event.tier)
            else:
                values = struct.unpack(f"<{len(event.tokens) // 4}I", event.tokens)
                parent = None if event.position == 0 else event.parent_key
                self.index.store(event.key, parent, values, event.tier)

    def longest(self, values):
        with self.lock:
            return self.index.longest(values)

    def wait(self, condition, seconds=60):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline and self.error is None, self.error
            time.sleep(0.01)

    def stop(self):
        self.call.cancel()
        self.join(10)
        assert self.error is None or self.error.code() == grpc.StatusCode.CANCELLED, self.error


def test_a_watcher_knows_what_a_look_up_finds(start, folder):
    daemon = start(config_of(folder))
    worker = Worker(daemon)
    space = worker.open_space()
    prompts = prompts_of(60)
    play(worker, space, prompts, 100)
    watch = Watcher(worker, pb.WatchBlocksRequest())
    for round_ in range(3):
        play(worker, space, prompts, 150, seed=round_)
        assert agree(worker, space, watch, prompts) > 5
    assert watch.phases[0] == pb.WatchBlocksResponse.PHASE_SNAPSHOT_BEGIN
    row = watch.spaces[space.space_id]
    assert (row.tenant, row.model, row.block_tokens) == (b"default", b"tiny", BLOCK_TOKENS)
    assert list(row.windows) == [0]
    watch.stop()

    # Gone on with where it ended: no snapshot, and right again.
    play(worker, space, prompts, 50, seed=8)
    again = Watcher(worker, pb.WatchBlocksRequest(epoch=watch.epoch, after=watch.after),
                    index=watch.index)
    assert agree(worker, space, again, prompts) > 5
    assert again.phases[0] == pb.WatchBlocksResponse.PHASE_RESUMED
    again.stop()
    assert pb.WatchBlocksResponse.PHASE_SNAPSHOT not in again.phases

    # A number of the future, or of another life: everything anew.
    for request in (pb.WatchBlocksRequest(epoch=watch.epoch, after=1 << 60),
                    pb.WatchBlocksRequest(epoch=b"x" * 16, after=watch.after)):
        other = Watcher(worker, request)
        assert agree(worker, space, other, prompts) > 5
        assert other.phases[0] == pb.WatchBlocksResponse.PHASE_SNAPSHOT_BEGIN
        other.stop()
    assert stats_of(worker)["kvkeep_events_snapshots_total"] == 3
    worker.leave()


def test_a_slow_watcher_gets_a_snapshot(start, folder):
    """One that does not read for a while costs the daemon nothing, and is right in the end."""
    daemon = start(config_of(folder, log="16 KiB"))
    worker = Worker(daemon)
    space = worker.open_space()
    prompts = prompts_of(60)
    watch = Watcher(worker, pb.WatchBlocksRequest())
    watch.wait(lambda: watch.phases)
    with watch.lock:  # it stands still
        for round_ in range(6):
            play(worker, space, prompts, 200, seed=round_)
    assert agree(worker, space, watch, prompts) > 5
    watch.stop()
    assert stats_of(worker)["kvkeep_events_snapshots_total"] >= 2
    worker.leave()


def test_who_may_watch_what(start, folder):
    daemon = start(config_of(folder, more=TENANTS))
    a = Worker(daemon, token="token-of-tenant-aaaa")
    boss_metadata = [("authorization", "Bearer token-of-the-admin-00")]
    space = a.open_space()
    a.close(a.prefill(space, list(range(8)), seed=1).sequence_id)

    def first(worker, request, metadata=None):
        call = worker.calls.WatchBlocks(request, metadata=metadata or worker.metadata, timeout=10)
        messages = []
        for message in call:
            messages.append(message)
            if message.phase == pb.WatchBlocksResponse.PHASE_SNAPSHOT_END:
                call.cancel()
                break
        return [event for message in messages for event in message.events]

    assert len(first(a, pb.WatchBlocksRequest())) == 2
    b = Worker(daemon, token="token-of-tenant-bbbb")
    assert first(b, pb.WatchBlocksRequest()) == []
    with Refused(grpc.StatusCode.PERMISSION_DENIED):
        first(b, pb.WatchBlocksRequest(tenant=b"a"))
    with Refused(grpc.StatusCode.PERMISSION_DENIED):
        first(b, pb.WatchBlocksRequest(all_tenants=True))
    assert len(first(b, pb.WatchBlocksRequest(tenant=b"a"), boss_metadata)) == 2
    assert len(first(b, pb.WatchBlocksRequest(all_tenants=True), boss_metadata)) == 2
    with Refused(grpc.StatusCode.NOT_FOUND, field="tenant"):
        first(b, pb.WatchBlocksRequest(tenant=b"nobody"), boss_metadata)
    with Refused(grpc.StatusCode.INVALID_ARGUMENT, field="tenant"):
        first(b, pb.WatchBlocksRequest(tenant=b"a", all_tenants=True), boss_metadata)
    with Refused(grpc.StatusCode.INVALID_ARGUMENT, field="epoch"):
        first(a, pb.WatchBlocksRequest(epoch=b"short"))
    a.leave()
    b.leave()


def test_a_revoked_token_ends_the_stream(start, folder):
    daemon = start(config_of(folder, more=TENANTS + f"[durable]\nfolder = {folder}/data\n"
                                                     "keeper = no\n"))
    a = Worker(daemon, token="token-of-tenant-aaaa")
    boss = [("authorization", "Bearer token-of-the-admin-00")]
    token = a.admin.CreateCredential(
        pb.CreateCredentialRequest(name=b"router", tenants=[b"a"], token=True),
        metadata=boss).token.decode()
    space = a.open_space()
    router = Worker(daemon, token=token)
    watch = Watcher(router, pb.WatchBlocksRequest())
    a.close(a.prefill(space, list(range(8)), seed=1).sequence_id)
    watch.wait(lambda: len(watch.events) == 2)
    a.admin.RevokeTokens(pb.RevokeTokensRequest(name=b"router"), metadata=boss)
    a.close(a.prefill(space, list(range(100, 108)), seed=2).sequence_id)
    watch.join(10)
    assert watch.error.code() == grpc.StatusCode.UNAUTHENTICATED
    assert len(watch.events) == 2
    a.leave()


def test_streams_are_limited_and_end_with_the_daemon(start, folder):
    daemon = start(config_of(folder))
    worker = Worker(daemon)
    watches = [Watcher(worker, pb.WatchBlocksRequest()) for _ in range(2)]
    for watch in watches:
        watch.wait(lambda: pb.WatchBlocksResponse.PHASE_SNAPSHOT_END in watch.phases)
    with Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, field="events.watchers"):
        next(worker.calls.WatchBlocks(pb.WatchBlocksRequest(), metadata=worker.metadata))
    watches[0].stop()
    deadline = time.monotonic() + 60
    while True:  # its place is free again
        try:
            third = Watcher(worker, pb.WatchBlocksRequest())
            third.wait(lambda: pb.WatchBlocksResponse.PHASE_SNAPSHOT_END in third.phases, 2)
            break
        except AssertionError:
            assert time.monotonic() < deadline
    worker.leave()
    begun = time.monotonic()
    daemon.process.terminate()
    assert daemon.process.wait(10) == 0
    assert time.monotonic() - begun < promised(3)
    for watch in (watches[1], third):
        watch.join(5)
        assert watch.error is None, watch.error


def test_events_that_are_off(daemon):
    worker = Worker(daemon)
    with Refused(grpc.StatusCode.FAILED_PRECONDITION, cause=pb.CAUSE_SWITCHED_OFF):
        next(worker.calls.WatchBlocks(pb.WatchBlocksRequest(), metadata=worker.metadata))
    assert "kvkeep_events_total" not in stats_of(worker)
    worker.leave()
