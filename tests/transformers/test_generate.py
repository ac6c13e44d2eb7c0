"""The same greedy tokens with kvkeep and without, cold and warm, however generation is done."""

import copy

import models
import pytest
import torch
import transformers

import kvkeep
from kvkeep.transformers import CachedModel

DECODERS = ["llama", "qwen3", "mistral", "gemma3", "gpt2", "deepseek"]
ENCODERS = ["t5", "bart"]
WAIT_S = 60  # no test depends on how busy the machine is
NEW = {"max_new_tokens": 10, "return_dict_in_generate": True, "output_logits": True}


def same(got, wanted):
    """Tokens equal; logits to rounding."""
    assert got.sequences.tolist() == wanted.sequences.tolist()
    for ours, theirs in zip(got.logits or (), wanted.logits or (), strict=True):
        assert torch.allclose(ours, theirs, atol=2e-3, rtol=1e-3)


def wrap(model, daemon, **options):
    return CachedModel(model, target=daemon.target, call_timeout_s=WAIT_S,
                       **{"block_tokens": 4, **options})


def ones(ids):
    return torch.ones_like(ids)


@pytest.mark.parametrize("name", DECODERS)
def test_cold_warm_and_a_shared_prefix(shared, name):
    model = models.build(name)
    ids = models.prompt(41)
    other = torch.cat([ids[:, :22], models.prompt(9, seed=8)], dim=1)
    expected = [model.generate(part, attention_mask=ones(part), **NEW) for part in (ids, other)]
    with wrap(model, shared) as cached:
        same(cached.generate(ids, attention_mask=ones(ids), **NEW), expected[0])
        assert (cached.report.reused_tokens, cached.report.why) == (0, "")
        assert cached.report.stored_tokens == 48  # 41 + 9 that were fed back, in blocks of 4
        same(cached.generate(ids, attention_mask=ones(ids), **NEW), expected[0])
        assert cached.report.reused_tokens == 40
        same(cached.generate(input_ids=other, attention_mask=ones(other), **NEW), expected[1])
        assert cached.report.reused_tokens == 20
    with wrap(model, shared) as again:
        follow = torch.cat([expected[0].sequences, models.prompt(5, seed=9)], dim=1)
        wanted = model.generate(follow, attention_mask=ones(follow), **NEW)
        same(again.generate(follow, attention_mask=ones(follow), **NEW), wanted)
        assert again.report.reused_tokens == 48  # the answer too is a prefix of what follows


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_of_different_prefixes(shared, name, side):
    model = models.build(name, seed=2)
    first = models.prompt(30, seed=11)[0]
    rows = [first, torch.cat([first[:13], models.prompt(11, seed=12)[0]]),
            models.prompt(9, seed=13)[0], models.prompt(27, seed=14)[0]]
    ids, mask = models.batch(rows, side)
    expected = model.generate(ids, attention_mask=mask, **NEW)
    with wrap(model, shared, salt=side) as cached:
        alone = first[None]
        cached.generate(alone, attention_mask=ones(alone), **NEW)
        same(cached.generate(ids, attention_mask=mask, **NEW), expected)
        report = cached.report
        assert report.found_tokens >= 28 + 12
        if side == "left":
            assert report.reused_tokens >= 28 and report.alone_tokens > 0
        same(cached.generate(ids, attention_mask=mask, **NEW), expected)
        assert cached.report.reused_tokens >= 60 and cached.report.found_tokens >= 28 + 20 + 8 + 24
        for row in rows:  # what a batch stored is what a row alone would have computed
            wanted = model.generate(row[None], attention_mask=ones(row[None]), **NEW)
            same(cached.generate(row[None], attention_mask=ones(row[None]), **NEW), wanted)
            assert cached.report.reused_tokens >= (len(row) - 1) // 4 * 4


def test_the_mask_that_generate_guesses(shared):
    model = models.build("llama", seed=3)
    ids, _ = models.batch([models.prompt(21, seed=15)[0], models.prompt(12, seed=16)[0]])
    expected = model.generate(ids, **NEW)
    with wrap(model, shared) as cached:
        for reused in (0, 20 + 8):
            same(cached.generate(ids, **NEW), expected)
            assert cached.report.reused_tokens >= reused and cached.report.prompt_tokens == 33


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "t5", "bart"])
def test_beams(shared, name):
    model = models.build(name, seed=4)
    ids, mask = models.batch([models.prompt(25, seed=17)[0], models.prompt(18, seed=18)[0]],
                             "right" if model.config.is_encoder_decoder else "left")
    beams = {**NEW, "max_new_tokens": 14, "num_beams": 3, "num_return_sequences": 2,
             "output_logits": False}
    expected = model.generate(ids, attention_mask=mask, **beams)
    with wrap(model, shared, store_every=4) as cached:
        for _ in range(3):
            got = cached.generate(ids, attention_mask=mask, **beams)
            assert got.sequences.tolist() == expected.sequences.tolist()
            assert cached.report.why == ""
        assert cached.report.encoder_reused if model.config.is_encoder_decoder else \
            cached.report.reused_tokens > 30, cached.report
        if not model.config.is_encoder_decoder:  # the beams' own tails were stored under their ids
            best = expected.sequences[:1]
            follow = best[:, -(25 + 14):]
            wanted = model.generate(follow, attention_mask=ones(follow), **NEW)
            same(cached.generate(follow, attention_mask=ones(follow), **NEW), wanted)
            assert cached.report.reused_tokens >= 24


def test_sampling_several_answers(shared):
    model = models.build("qwen3", seed=5)
    ids = models.prompt(22, seed=19)
    options = {**NEW, "do_sample": True, "num_return_sequences": 4}
    torch.manual_seed(7)
    expected = model.generate(ids, attention_mask=ones(ids), **options)
    with wrap(model, shared) as cached:
        for _ in range(2):
            torch.manual_seed(7)
            same(cached.generate(ids, attention_mask=ones(ids), **options), expected)
        assert cached.report.reused_tokens == 20
        for answer in expected.sequences:
            wanted = model.generate(answer[None], attention_mask=ones(answer[None]), **NEW)
            same(cached.generate(answer[None], attention_mask=ones(answer[None]), **NEW), wanted)
            assert cached.report.reused_tokens >= 28


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("how", ["assistant", "lookup"])
def test_assisted_decoding(shared, name, how):
    model = models.build(name, seed=6)
    ids = models.prompt(14, seed=20).repeat(1, 2)
    if how == "lookup":
        options = {"prompt_lookup_num_tokens": 3}
    else:
        helper = models.build("llama", seed=6)
        options = {"assistant_model": helper}
    steps = {"max_new_tokens": 16, "return_dict_in_generate": True}
    expected = model.generate(ids, attention_mask=ones(ids), **steps)
    with wrap(model, shared, salt=how, store_every=4) as cached:
        for reused in (0, 24):
            got = cached.generate(ids, attention_mask=ones(ids), **steps, **options)
            assert got.sequences.tolist() == expected.sequences.tolist()
            assert cached.report.reused_tokens >= reused and cached.report.why == ""
        answer = expected.sequences  # drafts that were cropped were not stored as the answer
        wanted = model.generate(answer, attention_mask=ones(answer), **NEW)
        same(cached.generate(answer, attention_mask=ones(answer), **NEW), wanted)
        assert cached.report.reused_tokens >= 36


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders(shared, name):
    model = models.build(name, seed=7)
    ids, mask = models.batch([models.prompt(25, seed=21)[0], models.prompt(18, seed=22)[0]],
                             "right")
    expected = model.generate(ids, attention_mask=mask, **NEW)
    with wrap(model, shared) as cached:
        same(cached.generate(ids, attention_mask=mask, **NEW), expected)
        assert not cached.report.encoder_reused
        same(cached.generate(ids, attention_mask=mask, **NEW), expected)
        assert cached.report.encoder_reused
        alone = ids[1:, :18]  # whoever padded it
        wanted = model.generate(alone, attention_mask=ones(alone), **NEW)
        same(cached.generate(alone, attention_mask=ones(alone), **NEW), wanted)
        assert cached.report.encoder_reused
        start = model.config.decoder_start_token_id
        begun = torch.cat([torch.full((2, 1), start), models.prompt(13, seed=23, rows=2)], dim=1)
        wanted = model.generate(ids, attention_mask=mask, decoder_input_ids=begun, **NEW)
        for reused in (0, 2 * 12):
            same(cached.generate(ids, attention_mask=mask, decoder_input_ids=begun, **NEW), wanted)
            assert cached.report.reused_tokens == reused
        changed = ids.clone()
        changed[0, 3] = 91  # another text for one row: the decoder's prefix is another there
        wanted = model.generate(changed, attention_mask=mask, decoder_input_ids=begun, **NEW)
        same(cached.generate(changed, attention_mask=mask, decoder_input_ids=begun, **NEW), wanted)
        assert cached.report.found_tokens == 12 and not cached.report.encoder_reused
        left, left_mask = models.batch([models.prompt(9, seed=1)[0], models.prompt(5, seed=2)[0]])
        wanted = model.generate(left, attention_mask=left_mask, **NEW)
        same(cached.generate(left, attention_mask=left_mask, **NEW), wanted)
        assert "left" in cached.report.why


@pytest.mark.parametrize("name", DECODERS)
def test_the_manual_two_calls(shared, name):
    model = models.build(name, seed=8)
    ids = models.prompt(33, seed=24)
    more = torch.cat([ids, models.prompt(6, seed=25)], dim=1)
    expected = model.generate(more, attention_mask=ones(more), **NEW)
    with wrap(model, shared) as cached, torch.no_grad():
        for reused in (0, 32):
            cache = cached.cache(ids)
            assert cache.get_seq_length() == reused == cached.report.reused_tokens
            model(input_ids=ids, past_key_values=cache)  # whole, or from where the cache ends
            assert cache.get_seq_length() == 33
            cached.store(cache)
            again = copy.deepcopy(cache)
            same(cached.generate(more, attention_mask=ones(more), past_key_values=cache, **NEW),
                 expected)
            same(cached.generate(more, attention_mask=ones(more), past_key_values=again, **NEW),
                 expected)
        cache = cached.cache(more)
        assert cache.get_seq_length() == 36
        rest = more[:, 36:]
        logits = model(input_ids=rest, past_key_values=cache).logits[:, -1]
        assert torch.allclose(logits, expected.logits[0], atol=2e-3, rtol=1e-3)
        known = cached.generate(more, attention_mask=ones(more), **NEW)
        same(known, expected)
        follow = torch.cat([known.sequences, models.prompt(4, seed=26)], dim=1)
        wanted = model.generate(follow, attention_mask=ones(follow), **NEW)
        same(cached.generate(follow, attention_mask=ones(follow),
                             past_key_values=known.past_key_values, **NEW), wanted)


def test_positions_that_are_not_a_rows_own_are_not_stored(shared):
    model = models.build("llama", seed=9)
    ids, mask = models.batch([models.prompt(20, seed=27)[0], models.prompt(12, seed=28)[0]])
    with wrap(model, shared) as cached, torch.no_grad():
        cache = cached.cache(ids, mask)
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)  # counted from the padding
        cached.store(cache)
        assert cached.report.stored_tokens == 20
        cache = cached.cache(ids[:1])
        model(input_ids=ids[:1], past_key_values=cache, position_ids=torch.arange(100, 120)[None])
        cached.store(cache)
        other = models.prompt(20, seed=29)
        cache = cached.cache(other)
        model(input_ids=other, past_key_values=cache, position_ids=torch.arange(100, 120)[None])
        cached.store(cache)
        cache = cached.cache(other)
        hidden = ones(other)
        hidden[0, 4] = 0
        model(input_ids=other, past_key_values=cache, attention_mask=hidden)
        cached.store(cache)
        cache = cached.cache(other)
        model(inputs_embeds=model.get_input_embeddings()(other), past_key_values=cache)
        cached.store(cache)
        assert cached.report.stored_tokens == 0 and cached.cache(other).get_seq_length() == 0


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_what_is_forgotten_while_it_is_used(shared, name):
    """Under a window only the window was loaded: what came before it cannot be stored again."""
    model = models.build(name, seed=12)
    ids = models.prompt(41, seed=32)
    expected = model.generate(ids, attention_mask=ones(ids), **NEW)

    class Forget(transformers.StoppingCriteria):
        def __call__(self, tokens, scores, **_):
            if tokens.shape[1] == 42:
                with kvkeep.connect(shared.target) as client:
                    client.invalidate(model=type(model).__name__)
            return torch.zeros(len(tokens), dtype=torch.bool)

    with wrap(model, shared, salt="forgotten") as cached:
        cached.generate(ids, attention_mask=ones(ids), **NEW)
        same(cached.generate(ids, attention_mask=ones(ids), **NEW, stopping_criteria=[Forget()]),
             expected)
        assert cached.report.reused_tokens == 40
        for length in (41, 30):
            part = ids[:, :length]
            wanted = model.generate(part, attention_mask=ones(part), **NEW)
            same(cached.generate(part, attention_mask=ones(part), **NEW), wanted)
            if name != "llama" and length == 41:
                assert cached.report.reused_tokens == 0


def test_half_precision(shared):
    for name in ("llama", "gemma3"):
        model = models.build(name, seed=10, dtype=torch.bfloat16)
        ids = models.prompt(33, seed=30)
        expected = model.generate(ids, attention_mask=ones(ids), max_new_tokens=6)
        with wrap(model, shared) as cached:
            for reused in (0, 32):
                got = cached.generate(ids, attention_mask=ones(ids), max_new_tokens=6)
                assert cached.report.reused_tokens == reused
                assert got[:, :34].tolist() == expected[:, :34].tolist()


def test_a_model_that_cannot_be_read_is_said_once(shared, monkeypatch, caplog):
    """As where a new version of Transformers keeps its caches otherwise."""
    def unknown(layer):
        raise AttributeError("no such thing")

    monkeypatch.setattr(kvkeep.transformers, "layer_shape", unknown)
    model = models.build("llama", seed=12)
    ids = models.prompt(20, seed=35)
    with wrap(model, shared) as cached:
        for _ in range(3):
            same(cached.generate(ids, attention_mask=ones(ids), **NEW),
                 model.generate(ids, attention_mask=ones(ids), **NEW))
            assert "no such thing" in cached.report.why
    said = [record.getMessage() for record in caplog.records if record.name.startswith("kvkeep")]
    assert len(said) == 1 and "no such thing" in said[0]


def test_what_cannot_be_cached_is_generated_as_without(shared):
    model = models.build("llama", seed=11)
    ids = models.prompt(20, seed=31)
    reasons = {
        "use_cache": {"use_cache": False},
        "cache_implementation": {"cache_implementation": "static"},
        "prefill_chunk_size": {"prefill_chunk_size": 8},
        "output_hidden_states": {"output_hidden_states": True},
        "tokens are not known": {"past_key_values": "fresh"},
        "position_ids": {"position_ids": torch.arange(20)[None]}}
    with wrap(model, shared) as cached:
        cached.generate(ids, attention_mask=ones(ids), **NEW)
        for reason, options in reasons.items():
            def call(generate):
                own = {name: transformers.DynamicCache(config=model.config) if value == "fresh" else
                       value for name, value in options.items()}
                return generate(ids, attention_mask=ones(ids), **NEW, **own)

            same(call(cached.generate), call(model.generate))
            assert reason in cached.report.why and cached.report.prompt_tokens == 0
        holes = ones(ids)
        holes[0, 7] = 0
        same(cached.generate(ids, attention_mask=holes, **NEW),
             model.generate(ids, attention_mask=holes, **NEW))
        assert "holes" in cached.report.why
    bloom = transformers.BloomForCausalLM(transformers.BloomConfig(
        vocab_size=97, hidden_size=32, n_layer=2, n_head=4, pad_token_id=0)).eval()
    left, mask = models.batch([models.prompt(20, seed=33)[0], models.prompt(9, seed=34)[0]])
    with wrap(bloom, shared) as cached:  # takes no positions: what padding does can't be told
        for part, seen, reused in ((left[:1], mask[:1], 0), (left[:1], mask[:1], 16),
                                   (left, mask, 0)):
            same(cached.generate(part, attention_mask=seen, **NEW),
                 bloom.generate(part, attention_mask=seen, **NEW))
            assert cached.report.reused_tokens == reused
        assert "left" in cached.report.why
    mamba = transformers.MambaForCausalLM(transformers.MambaConfig(
        vocab_size=97, hidden_size=16, num_hidden_layers=1, state_size=4)).eval()
    with wrap(mamba, shared) as cached:
        assert cached.generate(ids, max_new_tokens=3).tolist() == \
            mamba.generate(ids, max_new_tokens=3).tolist()
        assert cached.report.why != ""


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_any_prefix_of_a_prompt_much_longer_than_the_window(shared, name):
    model = models.build(name, seed=13)
    ids = models.prompt(200, seed=35)
    with wrap(model, shared, store_every=8) as cached:
        cached.generate(ids, attention_mask=ones(ids), max_new_tokens=40)
        for cut in (8, 60, 133, 200):
            part = torch.cat([ids[:, :cut], models.prompt(7, seed=36)], dim=1)
            wanted = model.generate(part, attention_mask=ones(part), **NEW)
            same(cached.generate(part, attention_mask=ones(part), **NEW), wanted)
            assert cached.report.reused_tokens == cut // 4 * 4
