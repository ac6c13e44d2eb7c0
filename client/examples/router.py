#!/usr/bin/env python3
"""A small router: sends a prompt to the node that has its longest prefix, from events alone.

    router.py [--node ADDRESS]… [--fleet ADDRESS] [--token TOKEN] [--tenant NAME]
              --model MODEL [--revision REVISION]

Nodes are named, or asked of one daemon that shares a store with the others (Admin.GetFleet). Then
each line of standard input is a prompt, as token ids with blanks between; each line of output says
where it should go: ADDRESS, and how many of its tokens are cached there.

How it works. Every node tells what it holds (WatchBlocks), each under keys of its own. The
router has one tree for all: what a block is, is the hash of what lies before it and of its tokens;
what it knows of a block is which nodes have it, a bit each. A prompt is followed down that tree
once, however many nodes there are. No node is asked when a prompt comes, and a node that is lost
loses its bits at once.
"""

import argparse
import array
import hashlib
import struct
import sys
import threading
import time

import grpc

from kvkeep.v1 import kvkeep_pb2 as pb
from kvkeep.v1 import kvkeep_pb2_grpc as rpc

RETRY_SECONDS = 1.0
BUSY_TOKENS = 512  # a prompt under way on a node counts as so many tokens that it has not cached


def digest(parent, tokens):
    return hashlib.blake2b(parent + tokens, digest_size=16).digest()


def root(tenant, model, revision, adapter, group):
    """Where the chains of a model's layer group begin, alike for all nodes."""
    parts = (tenant, model, revision, adapter, struct.pack("<I", group))
    return digest(b"".join(struct.pack("<I", len(part)) + part for part in parts), b"")


class Holders:
    """Which nodes have a block: digest -> bits."""

    def __init__(self):
        self.bits = {}

    def add(self, key, bit):
        self.bits[key] = self.bits.get(key, 0) | bit

    def drop(self, key, bit):
        left = self.bits.get(key, 0) & ~bit
        if left:
            self.bits[key] = left
        else:
            self.bits.pop(key, None)


class Node(threading.Thread):
    """One node's stream, for as long as the router lives."""

    def __init__(self, router, address, index):
        super().__init__(daemon=True)
        self.router, self.address, self.bit = router, address, 1 << index
        self.ready = False
        self.going = True
        self.sent = 0  # prompts under way there, as the router's user counts them
        self.epoch, self.after = b"", 0
        self.spaces, self.blocks, self.stream = {}, {}, None

    def run(self):
        while self.going:
            try:
                channel = grpc.insecure_channel(self.address, options=[
                    ("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 10_000),
                    ("grpc.max_receive_message_length", 64 << 20)])
                with channel:
                    self.stream = rpc.KvkeepStub(channel).WatchBlocks(pb.WatchBlocksRequest(
                        tenant=self.router.tenant, epoch=self.epoch, after=self.after),
                        metadata=self.router.metadata)
                    for message in self.stream:
                        with self.router.lock:
                            self.apply(message)
            except grpc.RpcError:
                pass
            with self.router.lock:
                self.ready = False  # what it had counts again if the stream can be gone on with
            time.sleep(RETRY_SECONDS if self.going else 0)

    def stop(self):
        self.going = False
        if self.stream is not None:
            self.stream.cancel()

    def forget(self):
        for places in self.blocks.values():
            self.router.holders.drop(places[0], self.bit)
        self.blocks = {}

    def apply(self, message):
        if message.phase == pb.WatchBlocksResponse.PHASE_SNAPSHOT_BEGIN:
            self.ready = False
            self.forget()
            self.spaces = {}
        if message.epoch:
            self.epoch = message.epoch
        for space in message.spaces:
            self.spaces[space.space_id] = space
            self.router.learn(space)
        for event in message.events:
            self.block(event)
        if message.phase in (pb.WatchBlocksResponse.PHASE_SNAPSHOT_END,
                             pb.WatchBlocksResponse.PHASE_LIVE,
                             pb.WatchBlocksResponse.PHASE_RESUMED):
            self.after = message.after or self.after
            self.ready = True

    def block(self, event):
        """A block is one of a space and group; it is there as long as a tier has it."""
        where = (event.space_id, event.group)
        if event.kind == pb.BlockEvent.KIND_STORED:
            if event.salted or event.content:
                return  # tokens alone do not find it
            space = self.spaces[event.space_id]
            if event.position == 0:
                parent = root(space.tenant, space.model, space.revision, space.adapter_name,
                              event.group)
            elif (*where, event.parent_key) in self.blocks:
                parent = self.blocks[(*where, event.parent_key)][0]
            else:
                return  # behind one that tokens alone do not find
            known = self.blocks.setdefault((*where, event.key),
                                           (digest(parent, event.tokens), set()))
            known[1].add(event.tier)
            self.router.holders.add(known[0], self.bit)
        elif event.kind == pb.BlockEvent.KIND_REMOVED:
            known = self.blocks.get((*where, event.key))
            if known is not None:
                known[1].discard(event.tier)
                if not known[1]:
                    self.router.holders.drop(known[0], self.bit)
                    del self.blocks[(*where, event.key)]
        elif event.kind == pb.BlockEvent.KIND_CLEARED:
            for key in [key for key in self.blocks if key[0] == event.space_id]:
                self.router.holders.drop(self.blocks.pop(key)[0], self.bit)


class Router:
    def __init__(self, addresses, token=None, tenant=b""):
        self.lock = threading.Lock()
        self.holders = Holders()
        self.tenant = tenant
        self.metadata = [("authorization", f"Bearer {token}")] if token else []
        self.models = {}  # (model, revision, adapter) -> (tenant, block_tokens, windows)
        self.nodes = [Node(self, address, index) for index, address in enumerate(addresses)]
        for node in self.nodes:
            node.start()

    def close(self):
        for node in self.nodes:
            node.stop()
        for node in self.nodes:
            node.join(10)

    def learn(self, space):
        self.models[space.model, space.revision, space.adapter_name] = (
            space.tenant, space.block_tokens, list(space.windows))

    def longest(self, model, revision, tokens, adapter=b""):
        """address -> tokens of the prompt that are cached there, of the nodes that are in reach."""
        with self.lock:
            ready = [node for node in self.nodes if node.ready]
            counts = dict.fromkeys((node.address for node in ready), 0)
            known = self.models.get((model, revision, adapter))
            if known is None:
                return counts
            tenant, block_tokens, windows = known
            keys = [root(tenant, model, revision, adapter, group)
                    for group in range(len(windows))]
            alive = sum(node.bit for node in ready)
            count = 0
            while alive and count + block_tokens <= len(tokens):
                block = array.array("I", tokens[count:count + block_tokens]).tobytes()
                keys = [digest(key, block) for key in keys]
                for key in keys:  # every layer group must have it; windows could do with less
                    alive &= self.holders.bits.get(key, 0)
                count += block_tokens
                for node in ready:
                    if alive & node.bit:
                        counts[node.address] = count
            return counts

    def choose(self, model, revision, tokens, adapter=b""):
        """(address, tokens cached there): the longest prefix, less what the prompts under way
        there weigh; without that, what all prompts begin with would draw them all to one node.
        None where no node is in reach."""
        counts = self.longest(model, revision, tokens, adapter)
        ready = [node for node in self.nodes if node.address in counts]
        if not ready:
            return None
        best = max(ready, key=lambda node: counts[node.address] - BUSY_TOKENS * node.sent)
        return best.address, counts[best.address]

    def await_ready(self, seconds=10):
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(node.ready for node in self.nodes):
            time.sleep(0.01)
        return all(node.ready for node in self.nodes)


def fleet_addresses(address, token):
    """The nodes that share a store with this one, where they say how they are reached."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    with grpc.insecure_channel(address) as channel:
        answer = rpc.AdminStub(channel).GetFleet(pb.GetFleetRequest(), metadata=metadata,
                                                 timeout=10)
    return [node.address.decode() for node in answer.nodes if node.address]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--node", action="append", default=[])
    parser.add_argument("--fleet")
    parser.add_argument("--token")
    parser.add_argument("--tenant", default="")
    parser.add_argument("--model", required=True)
    parser.add_argument("--revision", default="")
    options = parser.parse_args()
    addresses = options.node + (fleet_addresses(options.fleet, options.token)
                                if options.fleet else [])
    if not addresses:
        sys.exit("no nodes: name them with --node, or one of a fleet with --fleet")
    router = Router(addresses, options.token, options.tenant.encode())
    if not router.await_ready():
        print("not all nodes are in reach", file=sys.stderr)
    for line in sys.stdin:
        chosen = router.choose(options.model.encode(), options.revision.encode(),
                               [int(word) for word in line.split()])
        print(*(chosen or ("nowhere", 0)), flush=True)
    router.close()


if __name__ == "__main__":
    main()
