"""Who may share and who may not; and what happens when the daemon is gone."""

import json
import os
import pathlib
import subprocess
import sys

import models
import pytest
import torch
import transformers
from conftest import TIERS

import kvkeep
from kvkeep.transformers import CachedModel

HERE = pathlib.Path(__file__).resolve().parent
IDS = models.prompt(25, seed=50)
NEW = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 5}
QUICK = {"block_tokens": 4, "call_timeout_s": 60}  # no test depends on a machine's speed
DURABLE = TIERS.format(device="0", host="16 MiB") + """
[durable]
folder = {folder}/durable
keeper = process
"""


def reused(model, daemon, salt=None, **options):
    """How many tokens of IDS a new wrapper finds, having made sure that the answer is right."""
    expected = model.generate(IDS, **NEW)
    with CachedModel(model, target=daemon.target, **QUICK, **options) as cached:
        got = cached.generate(IDS, salt=salt, **NEW)
        assert got.tolist() == expected.tolist()
        return cached.report.reused_tokens


def test_the_same_model_built_twice_shares(shared):
    assert reused(models.build("llama", seed=51), shared) == 0
    assert reused(models.build("llama", seed=51), shared) == 24


def test_whatever_differs_is_a_miss(shared):
    assert reused(models.build("llama", seed=52), shared) == 0
    one = models.build("llama", seed=52)
    with torch.no_grad():
        one.model.layers[2].self_attn.k_proj.weight[3, 5] += 1.0
    assert reused(one, shared) == 0
    assert reused(models.build("llama", seed=53), shared) == 0
    assert reused(models.build("llama", seed=52, dtype=torch.float16), shared) == 0
    assert reused(models.build("llama", seed=52, dtype=torch.bfloat16), shared) == 0
    for rope in ({"rope_type": "default", "rope_theta": 20000.0},
                 {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}):
        assert reused(models.build("llama", seed=52, rope_parameters=rope), shared) == 0
    assert reused(models.build("llama", seed=52, rms_norm_eps=1e-3), shared) == 0
    assert reused(models.build("llama", seed=52), shared, salt="somebody") == 0
    assert reused(models.build("llama", seed=52), shared, salt="another") == 0
    assert reused(models.build("llama", seed=52), shared, salt="another") == 24
    assert reused(models.build("llama", seed=52), shared, identity={"policy": "b"}) == 0
    assert reused(models.build("llama", seed=52), shared, revision="2") == 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert reused(models.build("llama", seed=52), shared) == 0
    assert reused(models.build("llama", seed=52), shared) == 24  # and the first is still there


def test_weights_that_change_under_the_wrapper(shared):
    model = models.build("qwen3", seed=54)
    with CachedModel(model, target=shared.target, **QUICK) as cached:
        def step(wanted):
            expected = model.generate(IDS, **NEW)
            assert cached.generate(IDS, **NEW).tolist() == expected.tolist()
            assert cached.report.reused_tokens == wanted

        step(0)
        step(24)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight[0, 0] += 1.0  # counted by torch
        step(0)
        model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5)    # not counted, but seen
        step(0)
        model.model.layers[1].mlp.up_proj.weight.data[1, 1] += 1.0  # neither: must be said
        cached.weights_changed()
        step(0)
        step(24)
        longer = torch.cat([IDS, models.prompt(9, seed=63)], dim=1)
        kept = cached.cache(longer)
        weight = model.lm_head.weight
        with torch.no_grad():
            before = weight.clone()
            weight.mul_(2.0)
            model(input_ids=longer, past_key_values=kept)
            weight.copy_(before)  # as it was: but not while this was computed
        cached.store(kept)
        cached.generate(torch.cat([longer, IDS], dim=1), max_new_tokens=5, past_key_values=kept)
        assert cached.report.stored_tokens == 0
        assert cached.cache(longer).get_seq_length() == 24


def test_a_tokenizer_and_its_template_count(shared):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    def tokenizer(words, template):
        made = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(
            {word: number for number, word in enumerate(words)}, unk_token="a")))
        made.chat_template = template
        return made

    model = models.build("llama", seed=55)
    for words, template, wanted in (("ab", "x", 0), ("ab", "y", 0), ("ac", "x", 0),
                                   ("ab", "x", 24)):
        assert reused(model, shared, tokenizer=tokenizer(words, template)) == wanted


def test_adapters_never_stand_in_for_each_other(shared):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapt(seed, rank=2):
        made = peft.get_peft_model(models.build("llama", seed=56), peft.LoraConfig(
            r=rank, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)).eval()
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0, 0.2)
        return made

    plain = models.build("llama", seed=56)
    assert reused(plain, shared) == 0
    assert reused(adapt(1), shared) == 0
    assert reused(adapt(2), shared) == 0
    assert reused(adapt(1), shared) == 24
    both = adapt(1)
    both.add_adapter("other", peft.LoraConfig(r=2, target_modules=["k_proj"],
                                              init_lora_weights=False))
    with CachedModel(both, target=shared.target, **QUICK) as cached:
        def step():
            expected = both.generate(input_ids=IDS, **NEW)
            assert cached.generate(IDS, **NEW).tolist() == expected.tolist()
            return cached.report.reused_tokens

        both.set_adapter("other")
        assert (step(), step()) == (0, 24)
        both.set_adapter("default")
        step()
        assert step() == 24
        with both.disable_adapter():
            assert step() == 24  # the base as it is without: the plain model's
        longer = torch.cat([IDS, models.prompt(9, seed=64)], dim=1)
        kept = cached.cache(longer)
        with both.disable_adapter(), torch.no_grad():
            both(input_ids=longer, past_key_values=kept)
        cached.store(kept)  # computed without the adapter that it was asked for with
        assert cached.cache(longer).get_seq_length() == 24
        both.merge_adapter()
        assert step() == 0
        both.unmerge_adapter()


def test_tenants_are_apart(start):
    daemon = start(TIERS.format(device="0", host="8 MiB") + """
[tenant one]
[tenant two]
[credential one]
token = one-one-one-one-one
tenants = one
[credential two]
token = two-two-two-two-two
tenants = two
""")
    model = models.build("llama", seed=57)
    for word, wanted in (("one", 0), ("two", 0), ("one", 24)):
        assert reused(model, daemon, token="-".join([word] * 5)) == wanted


def test_models_that_cannot_be_told_are_not_cached(shared):
    model = models.build("llama", seed=58)
    with CachedModel(model, target=shared.target, **QUICK) as cached:
        def why():
            cached.generate(IDS, **NEW)
            assert cached.report.prompt_tokens == 0
            return cached.report.why

        handle = model.model.layers[1].register_forward_hook(lambda _m, _i, output: output)
        assert "hook" in why()
        handle.remove()
        old = model.model.layers[1].mlp.forward
        model.model.layers[1].mlp.forward = lambda x: old(x) * 2
        assert "hook" in why()
        del model.model.layers[1].mlp.forward
        model.train()
        assert "training" in why()
        model.eval()
        cached.generate(IDS, **NEW)
        assert cached.report.why == ""
    for rope in ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},):
        moving = models.build("llama", seed=58, rope_parameters=rope)
        with CachedModel(moving, target=shared.target) as cached:
            cached.generate(IDS, **NEW)
            assert "rotary" in cached.report.why


def test_no_daemon_one_that_dies_and_one_that_is_back(start, tmp_path):
    model = models.build("gemma3", seed=59)
    expected = model.generate(IDS, **NEW).tolist()
    with CachedModel(model, target=f"unix:{tmp_path}/nobody.sock", **QUICK) as cached:
        assert cached.generate(IDS, **NEW).tolist() == expected
        assert cached.report.found_tokens == 0
    daemon = start()
    with CachedModel(model, target=daemon.target, **QUICK, reconnect_ms=0) as cached:
        def step():
            assert cached.generate(IDS, **NEW).tolist() == expected
            return cached.report.reused_tokens

        assert (step(), step()) == (0, 24)

        class Killer(transformers.StoppingCriteria):
            def __call__(self, ids, scores, **_):
                if ids.shape[1] == 27 and daemon.process.poll() is None:
                    daemon.kill()
                return torch.zeros(len(ids), dtype=torch.bool)

        other = models.prompt(25, seed=60)
        wanted = model.generate(other, **NEW).tolist()
        got = cached.generate(other, **NEW, stopping_criteria=transformers.StoppingCriteriaList(
            [Killer()]))
        assert got.tolist() == wanted
        assert step() == 0
        daemon.start()
        step()
        assert step() == 24


def test_a_pool_that_is_too_small(start):
    daemon = start("[tiers]\ndevice_bytes = 0\nhost_bytes = 64 KiB\nhuge_pages = no\n")
    model = models.build("llama", seed=61)
    ids = models.prompt(300, seed=62)
    mask = torch.ones_like(ids)
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=5).tolist()
    with CachedModel(model, target=daemon.target, **QUICK) as cached:
        for _ in range(2):
            assert cached.generate(ids, attention_mask=mask, max_new_tokens=5).tolist() == expected
    with kvkeep.connect(daemon.target) as client:  # nothing is left held
        from kvkeep.v1 import kvkeep_pb2 as pb
        assert not client.admin.ListSequences(pb.ListSequencesRequest(), timeout=5).sequences


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_another_process_and_a_daemon_that_was_restarted(start, name):
    daemon = start(DURABLE)

    def process():
        done = subprocess.run([sys.executable, str(HERE / "worker.py"), daemon.target, name, "33"],
                              capture_output=True, check=True, cwd=HERE,
                              env={**os.environ, "PYTHONPATH": str(HERE)})
        answer = json.loads(done.stdout)
        assert answer["same"] and answer["why"] == ""
        return answer["encoder"] if name == "t5" else answer["reused"]

    whole = True if name == "t5" else 32
    assert process() == 0
    assert process() == whole
    daemon.stop()
    daemon.start()
    assert process() == whole
    daemon.kill()
    daemon.start()
    assert process() == whole
