"""kvkeep.vllm on a real vLLM: equal outputs, hits over engines and restarts, identities, resets,
and every kind of end. The tests of this file are one story, in order: engines start slowly."""

import threading
import time

import pytest
from conftest import PATIENCE_S, Engine, differ, make_adapter, same, settings, tokens

LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}


@pytest.fixture(scope="module")
def prompts():
    """Lengths around the edges of vLLM's blocks (128 tokens) and kvkeep's (32)."""
    return [tokens(i, count) for i, count in enumerate((31, 32, 33, 64, 127, 128, 129, 400))]


@pytest.fixture(scope="module")
def fleet(daemon, model):
    """Two engines at once, on one daemon."""
    engines = [Engine(model, settings(daemon), **LORA) for _ in range(2)]
    yield [engine.ready() for engine in engines]
    for engine in engines:
        engine.kill()


def whole(length, block=32):
    """What of a prompt can be found: whole blocks, and never its last token."""
    return min(length // block * block, length - 1) if length >= block else 0


def settled(engine):
    """The connector's counts, when nothing is under way any more."""
    answer = engine.ask("settle", patience_s=PATIENCE_S)
    assert answer["counts"] is not None, answer
    return answer["counts"]


def drop(engine, **how):
    """Reset vLLM's own cache. An engine in this test's process steps only when it is asked for
    something; until then a finished request whose last block is being saved holds its blocks."""
    def dropped():
        if engine.ask("reset", **how)["reset"]:
            return True
        engine.generate([5, 6, 7], max_tokens=1)
        return False

    eventually(dropped)


def eventually(check):
    end = time.monotonic() + PATIENCE_S
    while not check():
        assert time.monotonic() < end
        time.sleep(0.1)


def test_outputs_are_equal_cold_and_warm(fleet, plain, prompts):
    one, _ = fleet
    right = plain.generate(*prompts)
    cold = one.generate(*prompts)
    same(cold, right)
    assert cold["cached"] == [0] * len(prompts)
    counts = settled(one)
    assert counts["queries"] == len([p for p in prompts if len(p) >= 32])
    # Outputs are saved too, as far as they fill blocks; their last token is never computed.
    assert counts["saved_tokens"] == sum((len(p) + 7) // 32 * 32 for p in prompts if len(p) >= 32)
    drop(one)  # vLLM's own cache: all comes from kvkeep
    warm = one.generate(*prompts)
    same(warm, right)
    assert warm["cached"] == [whole(len(p)) for p in prompts]


def test_the_space_is_the_models_size(fleet, daemon):
    """Case K1: KV heads are not query heads, and a head's size is what the model says."""
    assert daemon.geometry() == {(2, 2, 128)}


def test_a_second_engine_hits_what_the_first_computed(fleet, plain, prompts):
    _, two = fleet
    right = plain.generate(*prompts)
    warm = two.generate(*prompts)
    same(warm, right)
    assert warm["cached"] == [whole(len(p)) for p in prompts]
    assert settled(two)["loaded_tokens"] == sum(warm["cached"])
    # Now vLLM's own cache has them. kvkeep is told, so that they do not age out there.
    two.generate(*prompts)
    assert settled(two)["touched_tokens"] > 0
    assert settled(two)["loaded_tokens"] < 2 * sum(warm["cached"])


def test_the_check_of_outputs_can_fail(fleet, plain, prompts):
    _, two = fleet
    right = plain.generate(*prompts)
    drop(two)
    two.ask("spoil_loads")
    spoiled = two.generate(*prompts)
    two.ask("spoil_loads", spoiled=False)
    assert spoiled["cached"][-1] == 384 and differ(spoiled, right) > 0.05
    drop(two)


def test_loads_that_fail_are_computed(fleet, plain, prompts):
    _, two = fleet
    two.ask("break_loads")
    broken = two.generate(*prompts)
    two.ask("break_loads", broken=False)
    same(broken, plain.generate(*prompts))
    assert settled(two)["failed_loads"] >= 7
    drop(two)


def test_a_conversation_finds_its_own_answers(fleet, plain):
    """Decoded tokens are saved as blocks fill, and hit by the next turn, in the other engine."""
    one, two = fleet
    talk = tokens(50, 100)
    first = one.generate(talk, max_tokens=60)
    settled(one)
    turn = talk + first["tokens"][0] + tokens(51, 20)
    answer = two.generate(turn)
    same(answer, plain.generate(turn))
    assert answer["cached"] == [159 // 32 * 32]  # 100 + 60 tokens; the last was not computed


def test_adapter_salt_and_tenant_never_stand_in_for_each_other(fleet, plain, model, room):
    """Case A1, and one word as adapter, as salt and as neither."""
    one, two = fleet
    adapter = make_adapter(room / "x", model, 7)
    other = make_adapter(room / "y", model, 8)
    prompt = tokens(60, 200)
    ways = {"plain": {}, "salt": {"salt": "x"}, "other salt": {"salt": "y"},
            "adapter": {"lora": ["x", 1, str(adapter)]},
            "other id": {"lora": ["x2", 2, str(other)]}}
    right = {}
    for name, way in ways.items():
        right[name] = plain.generate(prompt, **way)
        cold = one.generate(prompt, **way)
        same(cold, right[name])
        assert cold["cached"] == [0], name
        settled(one)
    for name, way in ways.items():
        warm = two.generate(prompt, **way)
        same(warm, right[name])
        assert warm["cached"] == [192], name
    assert differ(right["adapter"], right["plain"]) > 0.05


def test_a_reset_reaches_kvkeep_and_the_other_engine(fleet, plain, prompts):
    """reset_cache, as after an update of weights, invalidates: nothing of before is found."""
    one, two = fleet
    assert one.generate(prompts[-1])["cached"][0] > 0
    drop(one, connector=True)
    assert settled(one)["resets"] > 0
    again = one.generate(*prompts)
    assert again["cached"] == [0] * len(prompts)
    same(again, plain.generate(*prompts))
    # The next look-ups find what was computed since.
    settled(one)
    drop(two)
    assert two.generate(prompts[-1])["cached"] == [384]


def test_hit_rates_are_not_inflated(fleet, daemon):
    """Case J3: unique prompts hit nothing, here and in the daemon; each is one query."""
    one, _ = fleet
    before, counted = daemon.stats(), settled(one)
    unique = [tokens(1000 + i, 96) for i in range(20)]
    one.generate(*unique, max_tokens=2)
    after, counts = daemon.stats(), settled(one)
    assert counts["queries"] - counted["queries"] == 20
    assert counts["hit_tokens"] == counted["hit_tokens"]
    assert after["kvkeep_lookup_total"] - before["kvkeep_lookup_total"] == 20
    assert after["kvkeep_hit_tokens_total"] == before["kvkeep_hit_tokens_total"]


def test_a_killed_daemon_is_done_without_and_found_again(fleet, daemon, plain, prompts):
    one, two = fleet
    right = plain.generate(*prompts)
    daemon.kill()
    eventually(lambda: not one.ask("counts")["connected"])
    drop(one)
    same(one.generate(*prompts), right)
    # While requests run, too.
    daemon.start()
    eventually(lambda: one.ask("counts")["connected"])
    killer = threading.Timer(0.3, daemon.kill)
    killer.start()
    long = [tokens(70 + i, 300) for i in range(4)]
    during = one.generate(*long, max_tokens=30)
    killer.join()
    same(during, plain.generate(*long, max_tokens=30))
    daemon.start()
    eventually(lambda: one.ask("counts")["connected"] and two.ask("counts")["connected"])
    drop(one)
    same(one.generate(*prompts), right)
    settled(one)
    drop(two)
    warm = two.generate(*prompts)
    same(warm, right)
    assert warm["cached"] == [whole(len(p)) for p in prompts]
    assert settled(one)["lost"] == 2


def test_a_killed_engine_leaves_nothing_held_and_a_warm_cache(fleet, daemon, model, plain, prompts):
    one, two = fleet
    answers = []

    def ask():
        try:
            answers.append(one.generate(*[tokens(80 + i, 500) for i in range(8)],
                                        max_tokens=2000))
        except (AssertionError, ValueError):
            pass  # it was killed, and closed its end

    asked = threading.Thread(target=ask)
    asked.start()
    eventually(lambda: daemon.sequences() > 0)
    one.kill()
    asked.join()
    assert not answers
    eventually(lambda: daemon.instances() == 1 and daemon.sequences() == 0)
    restarted = Engine(model, settings(daemon), **LORA).ready()
    try:
        warm = restarted.generate(*prompts)
        same(warm, plain.generate(*prompts))
        assert warm["cached"] == [whole(len(p)) for p in prompts]
    finally:
        restarted.end()
    assert two.generate(prompts[0])["cached"] == [0]
    two.end()
