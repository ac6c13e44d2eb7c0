"""A toy engine that has vLLM's order of calls into kvkeep.vllm's two halves, and nothing else of
it: for tests without vLLM."""

import dataclasses
import random
import time

import numpy as np

import kvkeep
from kvkeep import vllm_identity as naming
from kvkeep.vllm_blocks import ORDER_PLAIN, ORDER_TRANSPOSED, EngineLayer
from kvkeep.vllm_orders import Report, Settings
from kvkeep.vllm_scheduler import Model, Request, SchedulerSide
from kvkeep.vllm_worker import WorkerSide

LAYERS, HEADS, SIZE = 2, 2, 8       # of a rank
BLOCK, ENGINE_BLOCK = 4, 6          # tokens: neither divides the other
RANKS = 2

FACTS = naming.Facts(model="m", revision="1", tokenizer="t", template="c", rope={"theta": 1e4},
                     mask={"window": 4}, config_digest="f", compute_dtype="bf16",
                     cache_dtype="auto", scales_digest="s", layout="l", quantization="q",
                     length_rule="r", draft="d", extra={"site": "a"})


def words(seed, count):
    source = random.Random(seed)
    return [source.randrange(1000) for _ in range(count)]


def group():
    return kvkeep.LayerGroup(layers=LAYERS, kv_heads=RANKS * HEADS, head_size_k=SIZE,
                             format_k=kvkeep.Format.BF16)


class Ask:
    """A request as an engine has it."""

    def __init__(self, name, tokens, salt="", adapter=None, awaited=0):
        self.tokens = list(tokens)
        self.computed = 0
        self.again = False
        self.name, self.salt, self.adapter, self.awaited = name, salt, adapter, awaited

    def view(self):
        return Request(self.name, lambda: self.tokens, self.salt, (), self.adapter, self.again,
                       self.awaited, lambda: self.computed)


class Tiny:
    """An engine of two ranks that computes K and V from tokens alone: value = f(position, token,
    layer, rank)."""

    ORDERS = (ORDER_TRANSPOSED, ORDER_PLAIN)
    LATE_SAVES = False
    NULL_BLOCK = None

    def __init__(self, target, blocks=64, block_tokens=BLOCK, **settings):
        waits = {"lookup_wait_ms": 10_000, "start_wait_ms": 10_000}
        self.settings = Settings(target=target, block_tokens=block_tokens, **(waits | settings))
        self.memories = [[np.zeros((blocks, HEADS, 2 * ENGINE_BLOCK * SIZE), np.uint16)
                          for _ in range(LAYERS)] for _ in range(RANKS)]
        self.layers = [[EngineLayer(memory, ENGINE_BLOCK, SIZE, *self.ORDERS) for memory in rank]
                       for rank in self.memories]
        self.scheduler = SchedulerSide(self.settings)
        self.workers = [self.make_worker(rank) for rank in range(RANKS)]
        self.scheduler.start(Model(FACTS, (group(),), block_tokens, ENGINE_BLOCK, RANKS,
                                   late_saves=self.LATE_SAVES, null_block=self.NULL_BLOCK))
        self.free = list(range(blocks))
        self.tables = {}
        self.received = {}
        self.sent = {}
        self.failed = set()

    def make_worker(self, rank):
        return WorkerSide(self.settings, rank, ENGINE_BLOCK, [self.layers[rank]], [])

    def close(self):
        self.scheduler.close()
        for worker in self.workers:
            worker.close()

    @staticmethod
    def value(position, token, layer, rank):
        return (position * 31 + token * 7 + layer * 3 + rank * 1000) & 0xFFFF

    def step(self, asks=(), preempted=(), reporting=range(RANKS)):
        """Compute some tokens of each ask: [(ask, count)]. Ranks that are not reporting do so in a
        later step."""
        orders = self.scheduler.step({ask.name: count for ask, count in asks}, preempted,
                                     self.tables.__getitem__)
        copies = [dataclasses.replace(orders, loads=list(orders.loads), saves=list(orders.saves),
                                      early_saves=list(orders.early_saves),
                                      releases=list(orders.releases),
                                      preempted=list(orders.preempted)) for _ in self.workers]
        for worker, mine in zip(self.workers, copies):
            worker.begin(mine)
            worker.start_loads(mine)
        for ask, count in asks:
            self.compute(ask, count)
        report = Report()
        for worker, mine in zip(self.workers, copies):
            worker.save(mine)
            worker.give_way()
            sent, received = worker.finished()
            for names, counts in ((sent, self.sent), (received, self.received)):
                for name in names:
                    counts[name] = counts.get(name, 0) + 1
            self.failed |= worker.failed_blocks()
            part = worker.report() if worker in [self.workers[rank] for rank in reporting] else None
            if part is not None:
                report.join(part)
        self.scheduler.reported(report)
        return orders

    def compute(self, ask, count):
        for position in range(ask.computed, ask.computed + count):
            block = self.tables[ask.name][position // ENGINE_BLOCK]
            for rank in range(RANKS):
                for layer in range(LAYERS):
                    value = self.value(position, ask.tokens[position], layer, rank)
                    self.write(self.layers[rank][layer], block, position % ENGINE_BLOCK, value)
        ask.computed += count

    def write(self, view, block, place, value):
        view.keys[block, :, place] = value
        view.values[block, :, place] = value ^ 0x5555

    def check(self, ask, end):
        """The first `end` tokens are in the cache as they were computed."""
        for position in range(end):
            block = self.tables[ask.name][position // ENGINE_BLOCK]
            for rank in range(RANKS):
                for layer in range(LAYERS):
                    value = self.value(position, ask.tokens[position], layer, rank)
                    view = self.layers[rank][layer]
                    assert (view.keys[block, :, position % ENGINE_BLOCK] == value).all()
                    assert (view.values[block, :, position % ENGINE_BLOCK] == value ^ 0x5555).all()

    def match(self, ask, local=0):
        end = time.monotonic() + 20
        while (found := self.scheduler.match(ask.view(), local)) is None:
            self.step()
            assert time.monotonic() < end
        return found

    def admit(self, ask, external, local=0):
        count = -(-len(ask.tokens) // ENGINE_BLOCK) + 4
        self.tables[ask.name] = [self.free.pop() for _ in range(count)]
        self.scheduler.allocated(ask.name, self.tables[ask.name], external)
        if external:
            end = time.monotonic() + 20
            while self.received.get(ask.name, 0) < RANKS:
                self.step()
                assert time.monotonic() < end
            del self.received[ask.name]
            ask.computed = local + external

    def prefill(self, ask, local=0):
        found = self.match(ask, local)
        self.admit(ask, found, local)
        return found

    def run(self, ask):
        """Look up, load, compute the rest, end."""
        found = self.prefill(ask)
        if found and not self.failed:
            self.check(ask, found)
        while ask.computed < len(ask.tokens):
            self.step([(ask, min(5, len(ask.tokens) - ask.computed))])
        self.finish(ask)
        return found

    def finish(self, ask):
        ask.tokens.append(3)  # the last sampled token, never computed
        delay = self.scheduler.finished(ask.name, ask.computed, self.tables[ask.name])
        end = time.monotonic() + 20
        while delay and self.sent.get(ask.name, 0) < RANKS:
            self.step()
            assert time.monotonic() < end
        self.free += self.tables.pop(ask.name)

    def settle(self):
        """Until nothing is under way."""
        end = time.monotonic() + 20
        while self.scheduler._orders or self.scheduler._tracked or \
                not self.scheduler._jobs.empty():
            self.step()
            time.sleep(0.01)
            assert time.monotonic() < end
        time.sleep(0.05)
