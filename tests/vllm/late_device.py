"""A GPU whose streams run late, for tests: kvkeep.vllm_device.Streams over host memory.

Each stream is a thread that takes its work in order and waits a random while before each piece, so
that what is not waited for is seen to be missing. `LateConnector` is kvkeep's connector for vLLM
with such a device under a CPU build's cache: everything but CUDA itself is what a GPU gets.
"""

import queue
import random
import threading
import time

import torch


class LateStream:
    def __init__(self, seed, longest_s):
        self._random = random.Random(seed)
        self._longest_s = longest_s
        self._work = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, work, after=None):
        event = threading.Event()
        event.failure = None
        self._work.put((work, after, event))
        return event

    def _run(self):
        while True:
            work, after, event = self._work.get()
            if after is not None:
                after.wait()
            time.sleep(self._random.uniform(0, self._longest_s))
            try:
                work()
            except Exception as error:
                event.failure = error
            event.set()


class LateStreams:
    """`engine`: the stream that the engine computes on; None: it computes at once."""

    def __init__(self, longest_s=0.01, engine=None):
        self._engine = engine
        self._longest_s = longest_s
        self.given = 0  # pieces of work
        self.fail_at = None  # the piece of work that fails

    def enter(self):
        pass

    def stream(self):
        return LateStream(id(self), self._longest_s)

    def mark(self):
        if self._engine is not None:
            return self._engine.give(lambda: None)
        event = threading.Event()
        event.set()
        return event

    def run(self, stream, work, after=None):
        self.given += 1
        if self.given == self.fail_at:
            return stream.give(self._fail, after)
        return stream.give(work, after)

    def wait(self, event):
        assert event.wait(30)
        if getattr(event, "failure", None) is not None:
            raise event.failure

    def memory(self, size_bytes):
        return self.host(size_bytes)

    def host(self, size_bytes):
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)

    @staticmethod
    def _fail():
        raise RuntimeError("a device error, made by a test")


def __getattr__(name):
    """LateConnector, where vLLM is: the toy engine's tests do without."""
    if name != "LateConnector":
        raise AttributeError(name)
    from kvkeep.vllm import KvkeepConnector

    class LateConnector(KvkeepConnector):
        def _streams(self, device):
            return LateStreams()

    globals()[name] = LateConnector
    return LateConnector
