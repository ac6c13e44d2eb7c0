"""Workers of one daemon, for tests of a fleet: every byte that is found is compared with what it
must be.

    fleet_load.py load|probe SOCKET STUBS OUT    until SIGTERM; a line of JSON to OUT each second

load: prompts in random order; what is cached is read and compared, the rest is written and sealed.
probe: looks up a prompt that stays in this daemon's memory, and says how long that took.
"""

import array
import hashlib
import json
import random
import signal
import sys
import time

BLOCK_TOKENS = 16
BLOCKS = 24          # of a prompt
SHARED = 8           # of them, with all prompts of its family
FAMILIES = 4
PROMPTS = 40
LAYERS, KV_HEADS, HEAD_SIZE = 4, 4, 64
POLL_SECONDS = 0.3   # that a prompt waits for the remote store


def block_data(model, prompt, block, size):
    whose = f"family {prompt % FAMILIES}" if block < SHARED else f"prompt {prompt}"
    return hashlib.shake_128(f"{model}/{whose}/{block}".encode()).digest(size)


def token_ids(prompt, blocks=BLOCKS):
    """One more than the blocks have, so that something is left to compute."""
    family = 1_000_000 * (1 + prompt % FAMILIES)
    own = 500_000_000 + 1000 * prompt
    return ([family + i for i in range(SHARED * BLOCK_TOKENS)] +
            [own + i for i in range((blocks - SHARED) * BLOCK_TOKENS + 1)])[
                :blocks * BLOCK_TOKENS + 1]


class Node:
    """A session of a daemon, with the test's space."""

    def __init__(self, daemon, model="fleet", tenant=b""):
        import worker
        from kvkeep.v1 import kvkeep_pb2 as pb
        self.pb, self.model = pb, model
        self.worker = worker.Worker(daemon, tenant=tenant)
        self.space = self.worker.call("OpenSpace", pb.OpenSpaceRequest(
            tenant=tenant, identity=pb.Identity(model=model.encode(), revision=b"1"),
            block_tokens=BLOCK_TOKENS,
            groups=[worker.group(layers=LAYERS, kv_heads=KV_HEADS, head_size_k=HEAD_SIZE,
                                 head_size_v=HEAD_SIZE)],
            prefill_cost=pb.PrefillCost(flops_per_token=1e12, flops_per_token_position=1e6,
                                        flops_per_second=1e12)))
        self.size = self.space.groups[0].shard_bytes[0]

    def cached(self, prompt, blocks=BLOCKS):
        """Whole blocks that a look-up finds; it also has the store asked for the rest."""
        answer = self.worker.lookup(self.space, token_ids(prompt, blocks))
        return answer.cached_tokens // BLOCK_TOKENS

    def await_cached(self, prompt, seconds, blocks=BLOCKS):
        until = time.monotonic() + seconds
        while True:
            found = self.cached(prompt, blocks)
            if found >= blocks or time.monotonic() > until:
                return found
            time.sleep(0.01)

    def use(self, prompt, wait=POLL_SECONDS, blocks=BLOCKS, model=None):
        """(blocks found, wrong ones among them); writes and seals the rest."""
        if wait > 0:
            self.await_cached(prompt, wait, blocks)
        sequence = self.worker.open(self.space, token_ids(prompt, blocks))
        found = min(sequence.cached_tokens // BLOCK_TOKENS, blocks)
        wrong = 0
        try:
            if found > 0:
                parts = self.worker.read(0, found, sequence_id=sequence.sequence_id)
                wrong = sum(part != block_data(model or self.model, prompt, block, self.size)
                            for block, part in enumerate(parts))
                wrong += found - len(parts)
            if found < blocks:
                self.worker.write(sequence.sequence_id, [
                    (0, 0, block, 0, block_data(model or self.model, prompt, block, self.size))
                    for block in range(found, blocks)])
                self.worker.seal(sequence.sequence_id, len(token_ids(prompt, blocks)),
                                 upto=blocks * BLOCK_TOKENS)
        finally:
            self.worker.close(sequence.sequence_id)
        return found, wrong


def load(node, say, going):
    source = random.Random()
    counts = dict(prompts=0, found=0, wanted=0, wrong=0, failed=0)
    second = time.time()
    while going():
        prompt = source.randrange(PROMPTS)
        try:
            found, wrong = node.use(prompt)
        except Exception as error:  # pylint: disable=broad-except
            counts["failed"] += 1
            say({"error": repr(error)[:500]})
            time.sleep(0.05)
            continue
        counts["prompts"] += 1
        counts["found"] += found
        counts["wanted"] += BLOCKS
        counts["wrong"] += wrong
        if time.time() - second >= 1:
            second = time.time()
            say({"at": second, **counts})
            counts = dict.fromkeys(counts, 0)
    say({"at": time.time(), **counts})


def probe(node, say, going):
    """The prompt is leased, so that it does not leave this node's memory."""
    prompt = 900_000
    node.use(prompt, wait=0)
    node.worker.pin(node.space, token_ids(prompt), ttl_ms=600_000)
    times = array.array("d")
    second = time.time()
    while going():
        begun = time.perf_counter()
        assert node.cached(prompt) == BLOCKS
        times.append((time.perf_counter() - begun) * 1e6)
        time.sleep(0.002)
        if time.time() - second >= 1:
            second = time.time()
            say({"at": second, "us": [round(t, 1) for t in times]})
            times = array.array("d")


def main():
    kind, socket_path, stubs, out = sys.argv[1:]
    sys.path.insert(0, stubs)
    sys.path.insert(0, str(__import__("pathlib").Path(__file__).resolve().parents[1] / "e2e"))
    import grpc
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))

    class Daemon:
        def channel(self, target=None):
            return grpc.insecure_channel(target or "unix:" + socket_path, options=[
                ("grpc.use_local_subchannel_pool", 1),
                ("grpc.max_receive_message_length", 64 << 20)])

    with open(out, "a", encoding="utf-8") as file:
        def say(line):
            file.write(json.dumps(line) + "\n")
            file.flush()
        {"load": load, "probe": probe}[kind](Node(Daemon()), say, lambda: not stopped)


if __name__ == "__main__":
    main()
