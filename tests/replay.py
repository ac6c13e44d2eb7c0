#!/usr/bin/env python3
"""Replay real traces through a private daemon and hold the ratios against what was measured before.

    tests/replay.py [--bin build/release/bin] [--traces FOLDER] [--quick]

The block hit ratios of leaf-first LRU and the saved-FLOPs ratios of RP-cost below come from a
simulator of its own (lru also from a second program); the daemon must give the same within 0.002
and 0.003. Traces are looked for in --traces, then KVK_TRACES, then ../shared/data/traces; where
there are none, it says so and passes. --quick leaves the long agentic trace out.
Prints a table, as in docs/eviction.md. Exit code: 0 all within, 1 some are not.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONVERSATION = "mooncake_conversation.jsonl.gz"
SYNTHETIC = "mooncake_synthetic.jsonl.gz"
AGENTIC = "weka_agentic_8h.runs.jsonl.gz"

# trace, group, policy, device blocks, which figure, expected, tolerance
CASES = [
    (CONVERSATION, 1, "lru", 1828, "block_hit_ratio", 0.0525, 0.002),
    (CONVERSATION, 1, "lru", 9140, "block_hit_ratio", 0.1958, 0.002),
    (CONVERSATION, 1, "lru", 18279, "block_hit_ratio", 0.2789, 0.002),
    (CONVERSATION, 1, "lru", 45698, "block_hit_ratio", 0.3535, 0.002),
    (SYNTHETIC, 1, "lru", 439, "block_hit_ratio", 0.0381, 0.002),
    (SYNTHETIC, 1, "lru", 2196, "block_hit_ratio", 0.1566, 0.002),
    (SYNTHETIC, 1, "lru", 4392, "block_hit_ratio", 0.2623, 0.002),
    (AGENTIC, 4, "lru", 6338, "block_hit_ratio", 0.2295, 0.002),
    (AGENTIC, 4, "lru", 31692, "block_hit_ratio", 0.9147, 0.002),
    (AGENTIC, 4, "lru", 63384, "block_hit_ratio", 0.9513, 0.002),
    (CONVERSATION, 1, "rp-cost", 9140, "saved_flops_ratio", 0.2027, 0.003),
    (CONVERSATION, 1, "rp-cost", 18279, "saved_flops_ratio", 0.2726, 0.003),
    (SYNTHETIC, 1, "rp-cost", 2196, "saved_flops_ratio", 0.1884, 0.003),
    (SYNTHETIC, 1, "rp-cost", 4392, "saved_flops_ratio", 0.3075, 0.003),
]


def folder(given):
    """The first folder that is there."""
    for path in (given, os.environ.get("KVK_TRACES"), ROOT.parent / "shared" / "data" / "traces"):
        if path and (pathlib.Path(path) / CONVERSATION).exists():
            return pathlib.Path(path)
    return None


def replay(binary, trace, group, policy, blocks):
    command = [binary / "kvkeepctl", "--json", "replay", "--trace", trace, "--group", str(group),
               "--policy", policy, "--device-blocks", str(blocks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
    if done.returncode != 0:
        sys.exit(f"replay failed: {done.stderr.decode()}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", type=pathlib.Path, default=ROOT / "build/release/bin")
    parser.add_argument("--traces")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    traces = folder(options.traces)
    if traces is None:
        print("no traces here: set KVK_TRACES to their folder; nothing was replayed")
        return 0
    bad = 0
    print("| trace | policy | blocks | block hits | saved FLOPs | expected | look-up p50 / p99 |")
    print("|---|---|---|---|---|---|---|")
    for trace, group, policy, blocks, figure, expected, tolerance in CASES:
        if options.quick and trace == AGENTIC:
            continue
        result = replay(options.bin, traces / trace, group, policy, blocks)
        near = abs(result[figure] - expected) <= tolerance and result["mismatches"] == 0
        bad += 0 if near else 1
        what = "hits" if figure == "block_hit_ratio" else "FLOPs"
        print(f"| {trace.split('.')[0]} | {policy} | {blocks:,} | {result['block_hit_ratio']:.4f} "
              f"| {result['saved_flops_ratio']:.4f} | {what} {expected:.4f}"
              f"{'' if near else ' **missed**'} | {result['lookup_p50_us']:.0f} / "
              f"{result['lookup_p99_us']:.0f} us |", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
