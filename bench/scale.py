#!/usr/bin/env python3
"""A fleet on paper and by simulation: what 1,000 nodes and 10 billion blocks come to.

    bench/scale.py [--nodes 1000] [--blocks 10000000000] [--prompts 150000] [--seed 1] [--paper]

Prints the tables of docs/scale.md. The simulation has the fleet's nodes with a thousandth of their
blocks, and prompts of conversations with shared beginnings; what it counts for each prompt is then
multiplied on paper. Measured figures are those of docs/measured.md and docs/remote.md.
"""

import argparse
import bisect
import collections
import itertools
import random

# ---- Measured (bytes, rates on one core or one server)
INDEX_BYTES = 158        # of a block known to a node, its tokens apart
TOKENS_BYTES = 4 * 16    # its tokens
REMOTE_BYTES = 33        # beside it where a store is shared: a link and flags
CATALOGUE_BYTES = 428    # of a block on disk: its record, and its tokens twice
EVENT_BYTES = 84         # of one event over ZeroMQ, 16 tokens a block
VALUE_HEADER = 144 + 32 + 64  # of a value in the store: header, witness
NAME_BYTES = 39 + 90     # of its name, and what Redis keeps for a key
ROUTER_EVENTS = 330_000  # a second that the sample router takes in, in Python, on one core
ROUTER_BYTES = 180       # of a block that it knows, in Python
MASTER_ASKS = 240_000    # headers a second that one Redis server answers, pipelined
MASTER_BYTES = 1.3e9     # bytes a second of values of 128 KiB and more
INSERTS = 1.9e6          # blocks a second that a node's index takes in and lets go

# ---- Assumed of each node and its prompts
PROMPTS_PER_SECOND = 10
BLOCK_TOKENS = 16
SPACES = 20
GENERATION_S = 1.0
ANNOUNCE_S = 10
MODELS = [("8B, bf16", 32 * 2 * 8 * 128 * 2), ("70B, fp8", 80 * 2 * 8 * 128 * 1 + 80 * 2 * 8 * 4),
          ("latent (MLA), bf16", 61 * 576 * 2)]

# ---- The simulation's prompts, in blocks
STEMS = 20_000           # system prompts, documents, tools: shared by many conversations
STEM_ZIPF = 1.0
STEM_BLOCKS = (8, 400)
TURN_BLOCKS = (2, 60)
TURNS_MEAN = 5
SCALE = 1000             # a node of the simulation has so many times fewer blocks


def count(number):
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.3g}"


def table(title, head, rows):
    print(f"\n{title}\n\n| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(str(cell) for cell in row) + " |")


# ---- Prompts


class Prompts:
    """Conversations that come and go: each turn has the stem, all turns before, and a new one. A
    part is (name, blocks that all its users have in common)."""

    def __init__(self, source, alive):
        self.source, self.alive = source, alive
        weights = itertools.accumulate(1 / (rank + 1) ** STEM_ZIPF for rank in range(STEMS))
        self.weights = list(weights)
        self.stems = [source.randrange(*STEM_BLOCKS) for _ in range(STEMS)]
        self.open, self.next = [], 0

    def draw(self):
        """(stem, its blocks, conversation, its blocks before this turn, the turn's)."""
        if len(self.open) < self.alive:
            stem = bisect.bisect_left(self.weights, self.source.random() * self.weights[-1])
            self.open.append([min(stem, STEMS - 1), self.next, 0])
            self.next += 1
            place = len(self.open) - 1
        else:
            place = self.source.randrange(len(self.open))
        talk = self.open[place]
        turn = self.source.randrange(*TURN_BLOCKS)
        drawn = (talk[0], self.stems[talk[0]], talk[1], talk[2], turn)
        talk[2] += turn
        if self.source.random() < 1 / TURNS_MEAN:
            self.open[place] = self.open[-1]
            self.open.pop()
        return drawn


class Cache:
    """Parts in the order of their last use; what is over its size goes from the oldest part's
    end."""

    def __init__(self, blocks):
        self.limit, self.used = blocks, 0
        self.parts = collections.OrderedDict()

    def has(self, part):
        held = self.parts.get(part)
        if held is not None:
            self.parts.move_to_end(part)
        return held or 0

    def put(self, part, blocks):
        """Blocks that came, and blocks that went for them."""
        came = max(0, blocks - self.parts.get(part, 0))
        went = 0
        if came:
            self.parts[part] = blocks
            self.used += came
        self.parts.move_to_end(part)
        while self.used > self.limit:
            oldest, held = next(iter(self.parts.items()))
            gone = min(held, self.used - self.limit)
            went += gone
            self.used -= gone
            if gone == held:
                del self.parts[oldest]
            else:
                self.parts[oldest] = held - gone
        return came, went


class Fleet:
    """Nodes, a store or none, and a router: by chance, or to the longest prefix."""

    def __init__(self, nodes, node_blocks, store_blocks, by_prefix, admit_uses, source):
        self.nodes = [Cache(node_blocks) for _ in range(nodes)]
        self.store = Cache(store_blocks) if store_blocks else None
        self.by_prefix, self.admit_uses, self.source = by_prefix, admit_uses, source
        self.where = collections.defaultdict(dict)  # part -> {node: None}, of those that had it
        self.uses = collections.Counter()
        self.sums = collections.Counter()

    def choose(self, stem, talk):
        if self.by_prefix:
            for part in (talk, stem):
                holders = [n for n in self.where[part] if part in self.nodes[n].parts]
                self.where[part] = dict.fromkeys(holders)
                if holders:
                    two = self.source.sample(holders, min(2, len(holders)))
                    busy = min(two, key=lambda n: self.nodes[n].used)
                    # A stem that all want is not sent to one node for ever: now and then another.
                    if part is talk or self.source.random() > 0.02:
                        return busy
        return self.source.randrange(len(self.nodes))

    def serve(self, drawn):
        stem_id, stem_blocks, talk_id, before, turn = drawn
        stem, talk = ("s", stem_id), ("t", talk_id)
        node_id = self.choose(stem, talk)
        node = self.nodes[node_id]
        self.sums["prompts"] += 1
        self.sums["blocks"] += stem_blocks + before + turn
        local = node.has(stem)
        whole = local >= stem_blocks
        if whole:
            local = stem_blocks + min(node.has(talk), before)
        wanted = stem_blocks + before  # the turn itself is new to everybody
        fetched = 0
        if self.store is not None and local < wanted + turn:
            self.sums["asks"] += stem_blocks + before + turn - local
            there = min(self.store.has(stem), stem_blocks)
            if there == stem_blocks:
                there += min(self.store.has(talk), before)
            fetched = max(0, there - local)
        self.sums["local"] += local
        self.sums["fetched"] += fetched
        self.sums["new"] += turn
        for part, blocks in ((stem, stem_blocks), (talk, before + turn)):
            came, went = node.put(part, blocks)
            self.sums["events"] += came + went
            self.sums["stored here"] += came
            self.where[part][node_id] = None
            self.uses[part, node_id] += 1
            if self.store is not None and self.is_due(self.uses[part, node_id]):
                # What this turn adds was used once only: it goes when the next turn uses it.
                sent = blocks if part is stem or self.admit_uses == 1 else before
                if sent > 0:
                    self.sums["sent"] += self.store.put(part, sent)[0]

    def is_due(self, uses):
        """A node sends a block at its admit_uses-th use, and looks after it at twice as many each
        time."""
        times, rest = divmod(uses, self.admit_uses)
        return rest == 0 and times & (times - 1) == 0

    def per_prompt(self, name):
        return self.sums[name] / self.sums["prompts"]


def simulate(options, name, store_share, by_prefix, admit_uses):
    source = random.Random(options.seed)
    node_blocks = options.blocks // options.nodes // SCALE
    total = node_blocks * options.nodes
    fleet = Fleet(options.nodes, node_blocks, int(total * store_share), by_prefix, admit_uses,
                  source)
    # As many conversations are alive as fit into half of the fleet's memory.
    prompts = Prompts(source, max(10, total // 2 // 300))
    for number in range(options.prompts):
        if number == options.prompts // 2:
            fleet.sums.clear()  # what comes before fills the caches
        fleet.serve(prompts.draw())
    known = fleet.per_prompt("blocks") - fleet.per_prompt("new")
    return {"name": name, "known": known, "local": fleet.per_prompt("local") / known,
            "fetched": fleet.per_prompt("fetched") / known,
            "asks": fleet.per_prompt("asks"), "fetches": fleet.per_prompt("fetched"),
            "sent": fleet.per_prompt("sent"), "events": fleet.per_prompt("events"),
            "blocks": fleet.per_prompt("blocks")}


# ---- Paper


def paper_sizes(options):
    node = options.blocks / options.nodes
    table(f"Sizes: {count(options.nodes)} nodes, {count(options.blocks)} blocks of {BLOCK_TOKENS} "
          f"tokens, {count(node)} a node", ["what", "a block", "a node", "the fleet"], [
              ["index in memory, with tokens and the store's links",
               f"{INDEX_BYTES + TOKENS_BYTES + REMOTE_BYTES} B",
               count(node * (INDEX_BYTES + TOKENS_BYTES + REMOTE_BYTES)) + "B",
               count(options.blocks * (INDEX_BYTES + TOKENS_BYTES + REMOTE_BYTES)) + "B"],
              ["catalogue on disk", f"{CATALOGUE_BYTES} B", count(node * CATALOGUE_BYTES) + "B",
               count(options.blocks * CATALOGUE_BYTES) + "B"],
              ["a router that knows all (the sample, in Python)", f"{ROUTER_BYTES} B", "",
               count(options.blocks * ROUTER_BYTES) + "B"],
              ["a router's least: 8 B of a hash, 2 B a node, of each block once", "10 B", "",
               count(options.blocks * 10) + "B"],
              ["names and headers in the store, of 0.1 % of the blocks",
               f"{NAME_BYTES + VALUE_HEADER} B", "",
               count(options.blocks * 0.001 * (NAME_BYTES + VALUE_HEADER)) + "B"]])
    head = ["model", "a block", "a node", "the fleet", "0.1 % in the store, twice"]
    table("Bytes of blocks", head, [
        [name, count(size * BLOCK_TOKENS) + "B", count(node * size * BLOCK_TOKENS) + "B",
         count(options.blocks * size * BLOCK_TOKENS) + "B",
         count(options.blocks * 0.002 * size * BLOCK_TOKENS) + "B"] for name, size in MODELS])


def paper_rates(options, row):
    rate = PROMPTS_PER_SECOND * options.nodes
    size = MODELS[1][1] * BLOCK_TOKENS
    events = row["events"] * rate
    asks = row["asks"] * rate
    fetch, sent = row["fetches"] * rate * size, row["sent"] * rate * size
    records = options.nodes * SPACES * 2 / GENERATION_S + options.nodes * 2 / ANNOUNCE_S
    masters = max(asks / MASTER_ASKS, (fetch + sent) / MASTER_BYTES)
    table(f"Rates at {PROMPTS_PER_SECOND} prompts a second and node, blocks of {MODELS[1][0]} "
          f"({count(size)}B), as simulated: {row['name']}",
          ["what", "a node", "the fleet", "one can", "so many are needed"], [
              ["events", count(events / options.nodes) + "/s", count(events) + "/s",
               count(ROUTER_EVENTS) + "/s (the sample router)", f"{events / ROUTER_EVENTS:.1f}"],
              ["bytes of events", count(events * EVENT_BYTES / options.nodes) + "B/s",
               count(events * EVENT_BYTES) + "B/s", "1.25 GB/s (10 Gbit/s)",
               f"{events * EVENT_BYTES / 1.25e9:.2f}"],
              ["blocks into and out of a node's index", count(events / options.nodes) + "/s", "",
               count(INSERTS) + "/s", f"{events / options.nodes / INSERTS:.4f}"],
              ["headers asked for", count(asks / options.nodes) + "/s", count(asks) + "/s",
               count(MASTER_ASKS) + "/s a master", f"{asks / MASTER_ASKS:.1f}"],
              ["bytes fetched", count(fetch / options.nodes) + "B/s", count(fetch) + "B/s",
               count(MASTER_BYTES) + "B/s a master", f"{fetch / MASTER_BYTES:.0f}"],
              ["bytes sent", count(sent / options.nodes) + "B/s", count(sent) + "B/s",
               count(MASTER_BYTES) + "B/s a master", f"{sent / MASTER_BYTES:.0f}"],
              [f"generations of {SPACES} spaces, and announcements",
               count(records / options.nodes) + "/s", count(records) + "/s",
               count(MASTER_ASKS) + "/s a master", f"{records / MASTER_ASKS:.2f}"],
              ["reads of one space's generation, all on one master", "",
               count(options.nodes * 2 / GENERATION_S) + "/s", count(MASTER_ASKS) + "/s a master",
               f"{options.nodes * 2 / GENERATION_S / MASTER_ASKS:.3f}"],
              [f"connections to each of {masters:.0f} masters (1 thread, 2 connections)",
               f"{2 * masters:.0f}", f"{2 * options.nodes} a master", "10,000 (maxclients)",
               f"{2 * options.nodes / 10_000:.2f}"]])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--blocks", type=int, default=10_000_000_000)
    parser.add_argument("--prompts", type=int, default=150_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--paper", action="store_true", help="sizes alone")
    options = parser.parse_args()
    paper_sizes(options)
    if options.paper:
        return
    rows = [simulate(options, *case) for case in (
        ("no store, any node", 0, False, 1),
        ("no store, longest prefix", 0, True, 1),
        ("store of 1 %, any node", 0.01, False, 2),
        ("store of 1 %, longest prefix", 0.01, True, 2),
        ("store of 1 %, longest prefix, sent at 8 uses", 0.01, True, 8),
        ("store of 0.1 %, any node", 0.001, False, 2),
        ("store of 0.1 %, longest prefix, sent at 8 uses", 0.001, True, 8))]
    table(f"Simulated, {count(options.prompts)} prompts of {rows[0]['blocks']:.0f} blocks, of "
          f"which {rows[0]['known']:.0f} somebody computed before",
          ["", "known blocks hit here", "from the store", "computed again", "asked", "fetched",
           "sent", "events, a prompt"],
          [[row["name"], f"{100 * row['local']:.1f} %", f"{100 * row['fetched']:.1f} %",
            f"{100 * (1 - row['local'] - row['fetched']):.1f} %", f"{row['asks']:.0f}",
            f"{row['fetches']:.0f}", f"{row['sent']:.1f}", f"{row['events']:.0f}"]
           for row in rows])
    for place in (2, 3, 4):
        paper_rates(options, rows[place])


if __name__ == "__main__":
    main()
