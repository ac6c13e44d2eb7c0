"""kvkeep.vllm in vLLM's other modes: little memory, ranks as processes, caches kept raw."""

import pytest
from conftest import Daemon, Engine, differ, make_model, same, settings, tokens
from test_engines import drop, eventually, settled, whole


@pytest.fixture
def engine():
    """engine(model, settings, …): ended after the test."""
    started = []

    def start(*arguments, **named):
        started.append(Engine(*arguments, **named))
        return started[-1].ready()

    yield start
    for each in started:
        each.end()


def test_preempted_requests_come_back(daemon, model, plain, engine):
    """A cache of 7 blocks for requests that grow to 12: vLLM preempts, kvkeep has what was
    computed, and the daemon counts no query twice (case J3)."""
    small = engine(model, settings(daemon, block_tokens=16), num_gpu_blocks_override=8,
                   max_model_len=512, enable_prefix_caching=False)
    prompts = [tokens(200 + i, 200) for i in range(4)]
    before = daemon.stats()
    found = small.generate(*prompts, max_tokens=100)
    assert found["preempted"] > 0
    counts = settled(small)
    assert counts["loaded_tokens"] > 0 and counts["hit_tokens"] == 0 and counts["queries"] == 4
    after = daemon.stats()
    assert after["kvkeep_lookup_total"] - before["kvkeep_lookup_total"] == 4
    assert after["kvkeep_lookup_retries_total"] > before["kvkeep_lookup_retries_total"]
    assert found["tokens"] == plain.generate(*prompts, max_tokens=100)["tokens"]


def test_two_ranks_in_processes_of_their_own(daemon, room, engine):
    """Tensor parallelism: the ranks join the scheduler's instance, and a hit is one for both. The
    one KV head that they both have is kept once."""
    model = make_model(room / "one-head", seed=3, kv_heads=1)
    prompts = [tokens(300 + i, count) for i, count in enumerate((100, 400, 129))]
    ranks = {"apart": True, "tensor_parallel_size": 2}
    two = engine(model, settings(daemon), **ranks)
    cold = two.generate(*prompts)
    eventually(lambda: daemon.sequences() == 0)
    drop(two)
    warm = two.generate(*prompts)
    same(warm, cold)
    assert warm["cached"] == [whole(len(p)) for p in prompts]
    assert (2, 1, 128) in daemon.geometry()


@pytest.mark.parametrize("kind", ["raw", "fp8"])
def test_a_cache_that_is_kept_raw(daemon, model, engine, kind):
    """Blocks whose inside is the kernel's business are kept whole, and told apart from others."""
    prompts = [tokens(400 + i, count) for i, count in enumerate((127, 128, 129, 600))]
    how = {"kv_cache_dtype": "fp8"} if kind == "fp8" else {}
    one = engine(model, settings(daemon, layout="raw"), **how)
    cold = one.generate(*prompts)
    settled(one)
    drop(one)
    warm = one.generate(*prompts)
    same(warm, cold)
    assert warm["cached"] == [whole(len(p), 128) for p in prompts]


def test_other_weights_of_one_name_do_not_share(daemon, room, engine):
    """Case A5's like: the same model name, other weights."""
    prompt = tokens(500, 300)
    outputs = []
    for seed in (11, 12):
        model = make_model(room / f"weights-{seed}", seed=seed)
        one = engine(model, settings(daemon, model="one name"))
        outputs.append(one.generate(prompt))
        assert outputs[-1]["cached"] == [0]
        settled(one)
    assert differ(*outputs) > 0.05


def test_windows_in_all_layers(tmp_path, room, engine):
    """vLLM has let go of what the window does not see, and has the rest in its own cache; the
    daemon has lost everything. What is not there must not be saved: shorter prompts would see
    it."""
    daemon = Daemon(tmp_path / "d")
    model = make_model(room / "windows", architectures=["MistralForCausalLM"],
                       model_type="mistral", sliding_window=256)
    how = {"max_num_batched_tokens": 512}
    one, plain = engine(model, settings(daemon), **how), engine(model, None, **how)
    prompt = tokens(700, 1500)
    same(one.generate(prompt), plain.generate(prompt))
    assert settled(one)["saved_tokens"] >= whole(1500) - 32
    drop(one)
    warm = one.generate(prompt[:1200])
    same(warm, plain.generate(prompt[:1200]))
    assert warm["cached"] == [whole(1200)]
    one.generate(prompt)
    settled(one)
    daemon.kill()
    daemon.start()
    eventually(lambda: one.ask("counts")["connected"])
    assert one.generate(prompt)["cached"][0] > 1024  # its own
    settled(one)
    drop(one)
    for length in (300, 500, 900):
        same(one.generate(prompt[:length]), plain.generate(prompt[:length]))
    daemon.stop()
