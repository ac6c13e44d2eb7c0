#!/usr/bin/env python3
"""Attention of decoding queries: kvkeep's CPU device against what one would take instead.

    bench/compare_attend.py --bench build/release/bin/bench_attend [--ggml FOLDER] [--threads N]
                            [--rounds N] [--svg FILE] [--json]

The same shapes in one run, in turn: bench_attend of this repository (its K and V lie in scattered
blocks), PyTorch's scaled_dot_product_attention, and the flash attention of ggml, which is what
llama.cpp runs (their K and V lie in one piece each). For PyTorch the better of two ways counts:
heads grouped by enable_gqa, and the query heads of a group given as so many queries.

Needs numpy; torch, if it is to be compared; and for ggml its shared libraries, which --ggml names
(libggml-base.so, libggml-cpu.so). They can be built from the sources that PyPI has of
llama-cpp-python:

    pip download --no-deps --no-binary llama-cpp-python llama-cpp-python && tar xzf llama_cpp*.gz
    cmake -S llama_cpp*/vendor/llama.cpp -B b -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON
          -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
          -DLLAMA_CURL=OFF
    cmake --build b --target ggml-cpu          # then --ggml b/bin

Milliseconds are medians; lower is better.
"""

import argparse
import ctypes
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import time

import numpy as np

KV_HEADS, HEAD_SIZE = 8, 128
SHAPES = [(32768, 1, 1), (32768, 1, 4), (32768, 1, 8), (131072, 1, 1), (131072, 1, 4),
          (131072, 1, 8), (4096, 16, 4)]  # tokens, sequences, query heads per KV head
SCALE = 1 / math.sqrt(HEAD_SIZE)


class Kvkeep:
    name = "kvkeep"
    what = "bf16, blocks of 16 tokens"

    def __init__(self, program, threads):
        self.program, self.threads = program, threads

    def prepare(self, shape, rounds):
        command = [self.program, "--json", "--threads", str(self.threads), "--rounds", str(rounds),
                   "--shape", ",".join(map(str, shape))]
        self.run = lambda: json.loads(subprocess.run(
            command, check=True, capture_output=True).stdout)["results"][0]["value"]

    def measure(self):
        return self.run()

    def finish(self):
        pass


class Torch:
    what = "bf16, contiguous"

    def __init__(self, threads):
        import torch
        self.torch = torch
        self.name = f"PyTorch {torch.__version__.split('+')[0]}"
        torch.set_num_threads(threads)

    def prepare(self, shape, rounds):
        tokens, sequences, group = shape
        torch = self.torch
        self.rounds = rounds

        def random(*sizes):
            return (torch.rand(*sizes) * 2 - 1).to(torch.bfloat16)
        self.k = random(sequences, KV_HEADS, tokens, HEAD_SIZE)
        self.v = random(sequences, KV_HEADS, tokens, HEAD_SIZE)
        self.q = random(sequences, KV_HEADS * group, 1, HEAD_SIZE)
        self.grouped = self.q.reshape(sequences, KV_HEADS, group, HEAD_SIZE).contiguous()

    def attend(self, grouped):
        attention = self.torch.nn.functional.scaled_dot_product_attention
        with self.torch.no_grad():
            if grouped:
                return attention(self.grouped, self.k, self.v)
            return attention(self.q, self.k, self.v, enable_gqa=True)

    def measure(self):
        best = math.inf
        for grouped in (True, False):
            self.attend(grouped)
            took = []
            for _ in range(self.rounds):
                began = time.perf_counter()
                self.attend(grouped)
                took.append((time.perf_counter() - began) * 1e3)
            best = min(best, statistics.median(took))
        return best

    def finish(self):
        self.k = self.v = None


class Ggml:
    """The flash attention operation of ggml's CPU backend, called as llama.cpp's graphs call it."""

    name = "llama.cpp (ggml)"
    what = "fp16, contiguous"

    class Parameters(ctypes.Structure):
        _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p),
                    ("no_alloc", ctypes.c_bool)]

    FP32, FP16 = 0, 1

    def __init__(self, folder, threads):
        self.threads = threads
        self.base = ctypes.CDLL(os.path.join(folder, "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(os.path.join(folder, "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
        pointer, floats, size = ctypes.c_void_p, ctypes.c_float, ctypes.c_int64
        for library, name, result, arguments in (
                (self.base, "ggml_init", pointer, [self.Parameters]),
                (self.base, "ggml_free", None, [pointer]),
                (self.base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int] + [size] * 4),
                (self.base, "ggml_get_data", pointer, [pointer]),
                (self.base, "ggml_flash_attn_ext", pointer, [pointer] * 5 + [floats] * 3),
                (self.base, "ggml_new_graph", pointer, [pointer]),
                (self.base, "ggml_build_forward_expand", None, [pointer, pointer]),
                (self.cpu, "ggml_cpu_init", None, []),
                (self.cpu, "ggml_graph_compute_with_ctx", ctypes.c_int,
                 [pointer, pointer, ctypes.c_int])):
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self.cpu.ggml_cpu_init()

    def tensor(self, kind, sizes, values):
        tensor = self.base.ggml_new_tensor_4d(self.context, kind, *sizes)
        ctypes.memmove(self.base.ggml_get_data(tensor), values.ctypes.data, values.nbytes)
        return tensor

    def prepare(self, shape, rounds):
        tokens, sequences, group = shape
        self.rounds, self.shape = rounds, shape
        source = np.random.default_rng(1)

        def random(kind, *sizes):
            return (source.random(sizes, dtype=np.float32) * 2 - 1).astype(kind)
        self.k = random(np.float16, sequences, KV_HEADS, tokens, HEAD_SIZE)
        self.v = random(np.float16, sequences, KV_HEADS, tokens, HEAD_SIZE)
        self.q = random(np.float32, sequences, KV_HEADS * group, 1, HEAD_SIZE)
        room = 2 * self.k.nbytes + self.q.nbytes * 4 + (64 << 20)
        self.context = self.base.ggml_init(self.Parameters(room, None, False))
        q = self.tensor(self.FP32, (HEAD_SIZE, 1, KV_HEADS * group, sequences), self.q)
        k = self.tensor(self.FP16, (HEAD_SIZE, tokens, KV_HEADS, sequences), self.k)
        v = self.tensor(self.FP16, (HEAD_SIZE, tokens, KV_HEADS, sequences), self.v)
        self.result = self.base.ggml_flash_attn_ext(self.context, q, k, v, None, SCALE, 0.0, 0.0)
        self.graph = self.base.ggml_new_graph(self.context)
        self.base.ggml_build_forward_expand(self.graph, self.result)
        self.attend()
        self.check()

    def attend(self):
        # Its plan is made in the context's memory anew each time; the graph is one operation.
        if self.cpu.ggml_graph_compute_with_ctx(self.context, self.graph, self.threads) != 0:
            raise RuntimeError("ggml did not compute")

    def check(self):
        """That the operation was asked right: its first head by numpy."""
        size = self.q.size
        data = ctypes.cast(self.base.ggml_get_data(self.result), ctypes.POINTER(ctypes.c_float))
        found = np.ctypeslib.as_array(data, (size,))[:HEAD_SIZE]
        logits = SCALE * self.k[0, 0].astype(np.float32) @ self.q[0, 0, 0]
        weights = np.exp(logits - logits.max())
        expected = weights @ self.v[0, 0].astype(np.float32) / weights.sum()
        if not np.allclose(found, expected, atol=2e-3):
            raise RuntimeError("ggml's result is another one")

    def measure(self):
        took = []
        for _ in range(self.rounds):
            began = time.perf_counter()
            self.attend()
            took.append((time.perf_counter() - began) * 1e3)
        return statistics.median(took)

    def finish(self):
        self.base.ggml_free(self.context)
        self.k = self.v = None


def label(shape):
    tokens, sequences, group = shape
    text = f"{tokens // 1024}k tokens, group {group}"
    return text if sequences == 1 else f"{sequences} x {text}"


def compare(rivals, turns, rounds):
    table = {}
    for shape in SHAPES:
        for rival in rivals:
            rival.prepare(shape, rounds)
        took = {rival.name: [] for rival in rivals}
        for _ in range(turns):  # in turn, so that all meet the machine in the same mood
            for rival in rivals:
                took[rival.name].append(rival.measure())
        for rival in rivals:
            rival.finish()
        table[shape] = {name: statistics.median(values) for name, values in took.items()}
        print(label(shape), {name: round(value, 2) for name, value in table[shape].items()},
              file=sys.stderr)
    return table


def markdown(rivals, table):
    names = [rival.name for rival in rivals]
    lines = ["| shape | " + " | ".join(f"{n}, ms" for n in names) + " | "
             + " | ".join(f"times as fast as {n}" for n in names[1:]) + " |",
             "|---" * (2 * len(names)) + "|"]
    for shape, took in table.items():
        ratios = [f"{took[name] / took[names[0]]:.1f}" for name in names[1:]]
        lines.append(f"| {label(shape)} | " + " | ".join(f"{took[name]:.1f}" for name in names)
                     + " | " + " | ".join(ratios) + " |")
    return "\n".join(lines)


def plot(rivals, table):
    """Tokens of K/V a second, by shape: bars that start at 0."""
    colors = ["#1f6f8b", "#c8553d", "#8a8d91", "#6b8f3c"]
    left, top, height, bar, gap = 60, 60, 260, 26, 30
    wide = len(rivals) * bar + gap
    width = left + wide * len(table) + 20
    speeds = {shape: {name: shape[0] * shape[1] / value / 1e3 for name, value in took.items()}
              for shape, took in table.items()}
    most = max(max(values.values()) for values in speeds.values())
    step = 10 ** math.floor(math.log10(most))
    step = step / 2 if most / step < 2 else step
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height + 130}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{height + 130}" fill="#ffffff"/>',
           f'<text x="{left}" y="22" font-size="15">Attended tokens per second (millions; '
           'one layer of 8 KV heads of 128)</text>']
    x = left
    for index, rival in enumerate(rivals):
        out.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{colors[index]}"/>'
                   f'<text x="{x + 17}" y="45">{rival.name}, {rival.what}</text>')
        x += 40 + 7 * len(rival.name + rival.what)
    value = 0.0
    while value <= most:
        y = top + height - height * value / most
        out.append(f'<line x1="{left}" x2="{width - 20}" y1="{y:.1f}" y2="{y:.1f}" '
                   f'stroke="#dddddd"/><text x="{left - 8}" y="{y + 4:.1f}" '
                   f'text-anchor="end">{value:g}</text>')
        value += step
    for place, (shape, values) in enumerate(speeds.items()):
        x = left + gap / 2 + place * wide
        for index, rival in enumerate(rivals):
            tall = height * values[rival.name] / most
            out.append(f'<rect x="{x + index * bar:.1f}" y="{top + height - tall:.1f}" '
                       f'width="{bar - 2}" height="{tall:.1f}" fill="{colors[index]}"/>')
        middle = x + len(rivals) * bar / 2
        for line, text in enumerate(label(shape).split(", ")):
            out.append(f'<text x="{middle:.1f}" y="{top + height + 18 + 15 * line}" '
                       f'text-anchor="middle">{text}</text>')
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--bench", default="build/release/bin/bench_attend")
    parser.add_argument("--ggml", help="folder of ggml's shared libraries")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--svg", type=pathlib.Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rivals = [Kvkeep(options.bench, options.threads)]
    try:
        rivals.append(Torch(options.threads))
    except ImportError as error:
        print(f"without PyTorch: {error}", file=sys.stderr)
    if options.ggml:
        rivals.append(Ggml(options.ggml, options.threads))
    table = compare(rivals, options.turns, options.rounds)
    if options.svg:
        options.svg.write_text(plot(rivals, table))
    if options.json:
        print(json.dumps([{"tokens": s[0], "sequences": s[1], "group": s[2], "ms": took}
                          for s, took in table.items()], indent=1))
    else:
        print(markdown(rivals, table))


if __name__ == "__main__":
    main()
