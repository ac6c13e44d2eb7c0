"""Engines, daemons and models for the tests of kvkeep.vllm. Run by tests/vllm/run.sh, in an
environment that has vLLM; the daemon is $KVKEEPD."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

import kvkeep

HERE = pathlib.Path(__file__).resolve().parent
# Two processors may serve several engines here. Tests must not depend on speed: neither they nor
# the engines give up on what must come before this.
PATIENCE_S = 120
WAIT_MS = PATIENCE_S * 1000

CONFIG = """
[tiers]
device_bytes = 0
host_bytes = 768 MiB
huge_pages = no
"""


class Daemon:
    def __init__(self, folder, config=CONFIG):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.target = f"unix:{self.folder}/k.sock"
        (self.folder / "kvkeepd.conf").write_text(config)
        self.process = None
        self.start()

    def start(self):
        log = self.folder / "kvkeepd.log"
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [os.environ["KVKEEPD"], "--config", str(self.folder / "kvkeepd.conf"),
                 "--socket", str(self.folder / "k.sock")], stderr=file)
        end = time.monotonic() + PATIENCE_S
        while b"ready " not in log.read_bytes():
            assert self.process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.02)

    def kill(self):
        self.process.kill()
        self.process.wait(30)

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)

    def stats(self, token=None):
        """Counters of the daemon by name."""
        from kvkeep.v1 import kvkeep_pb2 as pb

        with kvkeep.connect(self.target, token=token) as client:
            answer = client.admin.GetStats(pb.GetStatsRequest(), metadata=client.metadata)
        return {stat.name.decode(): stat.value for stat in answer.stats}

    def geometry(self):
        """(layers, KV heads, head size) of the first group of each space."""
        from kvkeep.v1 import kvkeep_pb2 as pb

        with kvkeep.connect(self.target) as client:
            spaces = client.admin.ListSpaces(pb.ListSpacesRequest(),
                                             metadata=client.metadata).spaces
        return {(space.groups[0].layers, space.groups[0].kv_heads, space.groups[0].head_size_k)
                for space in spaces}

    def instances(self):
        """How many engines hold anything."""
        from kvkeep.v1 import kvkeep_pb2 as pb

        with kvkeep.connect(self.target) as client:
            return len(client.admin.ListInstances(pb.ListInstancesRequest(),
                                                  metadata=client.metadata).instances)

    def sequences(self):
        from kvkeep.v1 import kvkeep_pb2 as pb

        with kvkeep.connect(self.target) as client:
            return len(client.admin.ListSequences(pb.ListSequencesRequest(),
                                                  metadata=client.metadata).sequences)


class Engine:
    """engine.py, started; its methods are called by name."""

    def __init__(self, model, kvkeep, python=sys.executable, **arguments):
        folder = pathlib.Path(os.environ.get("VLLM_TEST_LOGS", "/tmp"))
        log = folder / f"engine-{time.time_ns()}.log"
        self.log = log
        asked = json.dumps({"model": str(model), "kvkeep": kvkeep, **arguments})
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [python, str(HERE / "engine.py"), asked], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True)

    def ready(self):
        self._answer()
        return self

    def _answer(self):
        line = self.process.stdout.readline()
        assert line, self.log.read_text(errors="replace")[-6000:]
        return json.loads(line)

    def ask(self, name, **arguments):
        self.process.stdin.write(json.dumps({"do": name, **arguments}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def generate(self, *prompts, **arguments):
        return self.ask("generate", prompts=list(prompts), **arguments)

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def end(self):
        if self.process.poll() is not None:
            return
        try:
            self.ask("end")
            self.process.wait(60)
        finally:
            self.kill()


def settings(daemon, **changes):
    return {"target": daemon.target, "block_tokens": 32, "lookup_wait_ms": WAIT_MS,
            "start_wait_ms": WAIT_MS, "call_timeout_s": 30, "finish_wait_ms": WAIT_MS, **changes}


def tokens(seed, count, vocabulary=1000):
    source = random.Random(seed)
    return [source.randrange(3, vocabulary) for _ in range(count)]


def same(one, other):
    """The same greedy outputs; log probabilities within what the order of sums changes in bf16."""
    assert one["tokens"] == other["tokens"]
    assert differ(one, other) < 0.05


def differ(one, other):
    return max(abs(a - b) for mine, theirs in zip(one["logprobs"], other["logprobs"])
               for a, b in zip(mine, theirs))


def make_config(folder, *, layers=2, hidden=256, heads=4, kv_heads=2, inner=512, vocabulary=1000,
                **changes):
    """A head size that is not hidden / heads (case K1), unless `changes` say another."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
              "intermediate_size": inner, "num_hidden_layers": layers,
              "num_attention_heads": heads, "num_key_value_heads": kv_heads,
              "head_dim": 2 * hidden // heads, "vocab_size": vocabulary,
              "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "hidden_act": "silu", "torch_dtype": "bfloat16", "bos_token_id": 1,
              "eos_token_id": 2, "tie_word_embeddings": False, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_model(folder, seed=1, **shape):
    """A Llama with random weights, so large that what a token attends to decides what follows."""
    import torch
    from safetensors.torch import save_file

    folder = make_config(folder, **shape)
    config = json.loads((folder / "config.json").read_text())
    source = torch.Generator().manual_seed(seed)
    size, inner = config["hidden_size"], config["intermediate_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    wide = config["num_attention_heads"] * config["head_dim"]

    def matrix(rows, columns, scale=3.0):
        return (torch.randn(rows, columns, generator=source) * scale / columns ** 0.5).bfloat16()

    weights = {"model.embed_tokens.weight": torch.randn(
        config["vocab_size"], size, generator=source).bfloat16(),
        "lm_head.weight": matrix(config["vocab_size"], size),
        "model.norm.weight": torch.ones(size).bfloat16()}
    for i in range(config["num_hidden_layers"]):
        name = f"model.layers.{i}."
        for part, rows, columns in (
                ("self_attn.q_proj", wide, size), ("self_attn.k_proj", kv, size),
                ("self_attn.v_proj", kv, size), ("self_attn.o_proj", size, wide),
                ("mlp.gate_proj", inner, size), ("mlp.up_proj", inner, size),
                ("mlp.down_proj", size, inner)):
            weights[f"{name}{part}.weight"] = matrix(rows, columns, 1.5)
        for part in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{name}{part}.weight"] = torch.ones(size).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_adapter(folder, model, seed):
    """A LoRA adapter of rank 8 on K and V: with it, other K/V."""
    import torch
    from safetensors.torch import save_file

    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    source = torch.Generator().manual_seed(seed)
    kv = config["num_key_value_heads"] * config["head_dim"]
    weights = {}
    for i in range(config["num_hidden_layers"]):
        for part in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{i}.self_attn.{part}"
            weights[f"{name}.lora_A.weight"] = torch.randn(8, config["hidden_size"],
                                                          generator=source) * 0.1
            weights[f"{name}.lora_B.weight"] = torch.randn(kv, 8, generator=source) * 0.3
    (folder / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["k_proj", "v_proj"],
         "bias": "none", "base_model_name_or_path": str(model), "task_type": "CAUSAL_LM"}))
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="session")
def room(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
def model(room):
    return make_model(room / "model")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    running = Daemon(tmp_path_factory.mktemp("d"))
    yield running
    running.stop()


@pytest.fixture
def engines():
    """engines(model, settings, …): started, and ended after the test."""
    started = []

    def start(*arguments, **named):
        started.append(Engine(*arguments, **named))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


@pytest.fixture(scope="session")
def plain(model):
    """The engine without kvkeep: what is right."""
    engine = Engine(model, None, enable_lora=True, max_lora_rank=8, max_loras=2).ready()
    yield engine
    engine.kill()
