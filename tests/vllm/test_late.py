"""What a GPU gets of kvkeep.vllm, on a real vLLM: the connector's lanes, late saves and all that
they ask of the scheduler, under a CPU build's cache. Only CUDA's streams are not real: they run
late (late_device)."""

import pytest
from conftest import Engine, same, settings, tokens
from test_engines import drop, eventually, settled, whole


@pytest.fixture(scope="module")
def prompts():
    return [tokens(600 + i, count) for i, count in enumerate((31, 32, 33, 64, 127, 128, 129, 400))]


@pytest.fixture(scope="module")
def late(daemon, model):
    engine = Engine(model, settings(daemon), late=True).ready()
    yield engine
    engine.kill()


def test_outputs_are_equal_cold_and_warm(late, plain, prompts):
    right = plain.generate(*prompts)
    cold = late.generate(*prompts)
    same(cold, right)
    assert cold["cached"] == [0] * len(prompts)
    counts = settled(late)
    drop(late)
    warm = late.generate(*prompts)
    same(warm, right)
    assert warm["cached"] == [whole(len(p)) for p in prompts]
    assert settled(late)["loaded_tokens"] == sum(warm["cached"]) and counts["failed_loads"] == 0


def test_an_engine_with_its_cache_in_host_memory_shares_with_it(late, daemon, model, plain, prompts,
                                                               engines):
    other = engines(model, settings(daemon)).ready()
    warm = other.generate(*prompts)
    same(warm, plain.generate(*prompts))
    assert warm["cached"] == [whole(len(p)) for p in prompts]
    own = [tokens(700 + i, 200) for i in range(3)]
    right = other.generate(*own)
    settled(other)
    found = late.generate(*own)
    same(found, right)
    assert found["cached"] == [whole(200)] * 3


@pytest.mark.parametrize("tries", range(3))
def test_preempted_requests_come_back(daemon, model, plain, engines, tries):
    """Blocks that are taken and given to others while saves read them."""
    small = engines(model, settings(daemon, block_tokens=16), late=True, num_gpu_blocks_override=8,
                    max_model_len=512, enable_prefix_caching=False).ready()
    prompts = [tokens(800 + 10 * tries + i, 200) for i in range(4)]
    found = small.generate(*prompts, max_tokens=100)
    assert found["preempted"] > 0
    counts = settled(small)
    assert counts["loaded_tokens"] > 0 and counts["queries"] == 4
    right = plain.generate(*prompts, max_tokens=100)
    assert found["tokens"] == right["tokens"]
    again = small.generate(*prompts, max_tokens=100)  # from kvkeep: what was saved meanwhile
    assert again["tokens"] == right["tokens"] and sum(again["cached"]) > 0


def test_a_killed_daemon_is_done_without(daemon, late, plain):
    prompts = [tokens(900 + i, 300) for i in range(2)]
    right = plain.generate(*prompts)
    daemon.kill()
    same(late.generate(*prompts), right)
    daemon.start()
    eventually(lambda: late.generate([9, 8, 7], max_tokens=1) and
               late.ask("counts")["connected"])
    same(late.generate(*prompts), right)
    settled(late)
    drop(late)
    warm = late.generate(*prompts)
    same(warm, right)
    assert warm["cached"] == [whole(300)] * 2
