"""kvkeep.vllm as it is served: by its name alone, prefill and decode in engines apart, as one
of several connectors, and seen in vLLM's metrics."""

import types

import pytest
from conftest import Engine, same, settings, tokens
from test_engines import settled, whole


@pytest.fixture(scope="module")
def pair(daemon, model):
    """A prefilling engine that was given the connector's name and nothing else, and a decoding one
    in a process of its own, where kvkeep is the second of two connectors."""
    named = {"kv_connector": "KvkeepConnector", "kv_role": "kv_both"}
    short = Engine(model, settings(daemon), transfer={
        **named, "kv_connector_extra_config": settings(daemon)})
    several = {"kv_connector": "MultiConnector", "kv_role": "kv_both",
               "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"connectors": [
                   {"kv_connector": "OtherConnector", "kv_role": "kv_both",
                    "kv_connector_module_path": "other_connector"},
                   {**named, "kv_connector_extra_config": settings(daemon)}]}}
    apart = Engine(model, None, transfer=several, apart=True)
    yield short.ready(), apart.ready()
    for engine in (short, apart):
        engine.kill()


def test_a_prefilled_request_is_decoded_by_another_engine(pair, plain):
    """As vLLM's routers do it: what the first answer says is sent along with the second request."""
    prefill, decode = pair
    for i, length in enumerate((100, 400, 129)):
        prompt = tokens(600 + i, length)
        told = prefill.generate(prompt, max_tokens=1, handed={"do_remote_decode": True})["handed"]
        assert told == [{"kvkeep_tokens": (length - 1) // 32 * 32}]
        found = decode.generate(prompt, handed=told[0])
        assert found["cached"] == [told[0]["kvkeep_tokens"]]
        same(found, plain.generate(prompt))
    asked_nothing = prefill.generate(tokens(650, 100), max_tokens=1)
    assert asked_nothing["handed"] == [None]


def test_counters_are_seen_in_vllms_metrics(pair):
    prefill, decode = pair
    for engine in pair:
        engine.generate([5, 6, 7], max_tokens=1)  # what is counted is told with the next step
    seen, theirs = decode.ask("metrics"), prefill.ask("metrics")
    assert seen["vllm:kvkeep_connected"] == theirs["vllm:kvkeep_connected"] == 1
    assert seen["vllm:kvkeep_loaded_tokens"] == seen["vllm:kvkeep_hit_tokens"] == 96 + 384 + 128
    assert seen["vllm:kvkeep_queries"] == 3 and seen["vllm:kvkeep_failed_loads"] == 0
    counts = settled(prefill)
    prefill.generate([5, 6, 7], max_tokens=1)
    assert prefill.ask("metrics")["vllm:kvkeep_saved_tokens"] == counts["saved_tokens"] > 0


def test_a_failed_load_is_computed_by_default(pair, plain):
    """vLLM's own default would fail the request."""
    prefill, _ = pair
    prompt = tokens(660, 300)
    same(prefill.generate(prompt), plain.generate(prompt))
    settled(prefill)
    prefill.ask("reset")
    prefill.ask("break_loads")
    same(prefill.generate(prompt), plain.generate(prompt))
    prefill.ask("break_loads", broken=False)
    assert settled(prefill)["failed_loads"] >= 1


def test_without_caches_of_its_own_vllm_only_numbers_images():
    """Why such requests are left alone (vllm_model.contents_are_named): two processes give two
    images one name."""
    from vllm.renderers.base import BaseRenderer

    media = types.SimpleNamespace(mm_processor_cache_gb=0)
    process = types.SimpleNamespace(
        model_config=types.SimpleNamespace(multimodal_config=media),
        config=types.SimpleNamespace(cache_config=types.SimpleNamespace(
            enable_prefix_caching=False)), _validate_mm_uuids=lambda *_: None)
    names = []
    for image in ("a cat", "a dog"):
        items = types.SimpleNamespace(get_all_counts=lambda: {"image": 1})
        names.append(BaseRenderer._process_mm_uuids(
            process, {"image": [image]}, items, {}, "renderer0-mm-1"))
    assert names[0] == names[1] == {"image": ["renderer0-mm-1-image-0"]}
