"""What kvkeep.vllm makes of vLLM's configuration and requests, by stand-ins with vLLM's fields: two
engines that compute other K or V have another identity, and what has no true name is left alone."""

import copy
import logging
import threading
import time
import types

import pytest

from kvkeep import vllm_identity as naming
from kvkeep.vllm_model import (HANDED_ON, contents_are_named, hands_on, make_model, make_request,
                               stands_alone)
from kvkeep.vllm_orders import LayerShape, RankShape, Settings
from kvkeep.vllm_scheduler import SchedulerSide
from tiny_engine import Ask, words

COMMIT = "0123456789abcdef" * 2 + "01234567"
SHAPE = RankShape(16, tuple(LayerShape(2, 8, "bfloat16", "token, dim", "token, dim", 1024)
                            for _ in range(2)))


class Config(types.SimpleNamespace):
    """A model's configuration, as transformers has it."""

    def to_dict(self):
        return {name: value for name, value in vars(self).items() if name != "_commit_hash"}


def config(**model):
    text = Config(model_type="llama", num_hidden_layers=2, hidden_size=16, _commit_hash=COMMIT,
                  rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    fields = {
        "model": "org/name", "revision": None, "tokenizer": "org/name", "tokenizer_revision": None,
        "skip_tokenizer_init": False, "hf_config": text, "hf_text_config": text, "dtype": "bf16",
        "quantization": None, "quantization_config": None, "max_model_len": 4096, "seed": 0,
        "hf_config_path": None, "multimodal_config": None, "override_generation_config": {},
        "try_get_generation_config": dict, "get_total_num_kv_heads": lambda: 2}
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(**{**fields, **model}),
        cache_config=types.SimpleNamespace(cache_dtype="auto", enable_prefix_caching=True),
        load_config=types.SimpleNamespace(load_format="auto"), speculative_config=None)


def identity(made, **settings):
    model = make_model(made, Settings(**settings), [SHAPE])
    return model.identity(None).message().SerializeToString(deterministic=True)


def changed(made, **fields):
    """With other fields of the model's configuration proper, in a copy."""
    made = copy.deepcopy(made)
    for name, value in fields.items():
        setattr(made.model_config.hf_text_config, name, value)
    made.model_config.hf_config = made.model_config.hf_text_config
    return made


# ------------------------------------------------------------- what an engine's arguments decide

def test_long_ropes_factors_follow_from_the_longest_prompt():
    """vLLM rotates K by the long factors where max_model_len is beyond the original length."""
    scaled = {"rope_type": "longrope", "long_factor": [2.0], "short_factor": [1.0],
              "original_max_position_embeddings": 4096}

    def engine(most, **fields):
        return identity(changed(config(max_model_len=most), **fields))

    for fields in ({"rope_parameters": scaled}, {"rope_parameters": {"full_attention": scaled}},
                   {"rope_scaling": {**scaled, "type": "su", "rope_type": "su"}},
                   {"rope_parameters": {"rope_type": "longrope"},
                    "original_max_position_embeddings": 4096}):
        assert engine(4096, **fields) == engine(2048, **fields)
        assert engine(8192, **fields) != engine(4096, **fields)
        assert engine(8192, **fields) == engine(131072, **fields)
    unknown = {"rope_parameters": {"rope_type": "longrope"}}
    assert engine(8192, **unknown) != engine(4096, **unknown)
    assert engine(8192) == engine(4096)  # other scalings do not ask


def test_llama_4_scales_queries_by_the_longest_prompt():
    def engine(most, **more):
        return identity(changed(config(max_model_len=most, **more), model_type="llama4_text"))

    assert engine(32768) == engine(4096) != engine(40960)
    said = {"override_generation_config": {"attn_temperature_tuning": False}}
    assert engine(40960, **said) == engine(4096)
    assert engine(4096, try_get_generation_config=lambda: {"attn_temperature_tuning": True}) == \
        engine(40960)


def test_how_weights_are_quantized_while_they_are_loaded_counts():
    made = {identity(config(quantization=name, quantization_config=given)) for name, given in (
        (None, None), ("fp8", None), ("fp8", {"linear": "per_tensor"}),
        ("fp8", {"linear": "per_block"}))}
    assert len(made) == 4


def test_a_drafting_model_counts():
    def engine(method, model, revision=None):
        made = config()
        made.speculative_config = types.SimpleNamespace(
            method=method, draft_model_config=types.SimpleNamespace(model=model, revision=revision))
        return identity(made)

    assert engine("eagle", "org/a") != engine("eagle", "org/b") != identity(config())
    assert engine("eagle", "org/a", "1") != engine("eagle", "org/a", "2")
    assert engine("ngram", "org/name") == identity(config())  # no layers of its own


# ------------------------------------------------------------- which weights

def revision(made):
    return make_model(made, Settings(), [SHAPE]).facts.revision


def test_a_folders_weights_are_named_by_their_bytes(tmp_path):
    """Not by a commit that its configuration was copied with, nor by what --revision says."""
    (tmp_path / "model.safetensors").write_bytes(b"one")
    made = config(model=str(tmp_path), tokenizer=str(tmp_path), revision="main")
    first = revision(made)
    (tmp_path / "model.safetensors").write_bytes(b"two")
    assert revision(made) != first and COMMIT not in first


def test_a_folder_without_weights_names_none(tmp_path):
    """As where they are streamed from an object store: two of them would look alike."""
    (tmp_path / "config.json").write_text("{}")
    made = config(model=str(tmp_path), tokenizer=str(tmp_path))
    with pytest.raises(ValueError, match="which weights"):
        revision(made)
    assert make_model(made, Settings(revision="r1"), [SHAPE]).facts.revision == "r1"


def test_a_branch_is_no_revision(tmp_path, monkeypatch):
    made = config(revision="main")
    assert revision(made) == COMMIT
    del made.model_config.hf_config._commit_hash
    with pytest.raises(ValueError, match="which weights"):
        revision(made)
    made.model_config.revision = COMMIT
    assert revision(made) == COMMIT
    other = config(hf_config_path="org/configurations")  # the commit is of those
    with pytest.raises(ValueError, match="which weights"):
        revision(other)


def test_a_branch_is_looked_up_in_the_hubs_cache(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    folder = tmp_path / "models--org--name"
    (folder / "snapshots" / COMMIT).mkdir(parents=True)
    (folder / "snapshots" / COMMIT / "config.json").write_text("{}")
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    real = hub.try_to_load_from_cache
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda name, file, revision=None: real(
        name, file, cache_dir=tmp_path, revision=revision))
    assert naming.hub_commit("org/name", None) == naming.hub_commit("org/name", "main") == COMMIT
    assert naming.hub_commit("org/name", "gone") is None
    assert naming.hub_commit("/no/name of a hub", None) is None


# ------------------------------------------------------------- requests

def ask(**fields):
    return types.SimpleNamespace(**{
        "request_id": "r", "all_token_ids": [1, 2, 3], "num_prompt_tokens": 3, "cache_salt": None,
        "mm_features": [], "lora_request": None, "num_preemptions": 0, "num_computed_tokens": 0,
        "prompt_embeds": None, "skip_reading_prefix_cache": False, "resumable": False,
        "kv_transfer_params": None, **fields})


IMAGE = types.SimpleNamespace(identifier="renderer0-mm-1-image-0",
                              mm_position=types.SimpleNamespace(offset=0, length=2))


def test_images_that_are_only_numbered_are_left_alone():
    """Each process numbers its images from one: another engine's first would be this one's."""
    made = config(multimodal_config=types.SimpleNamespace(mm_processor_cache_gb=0))
    assert contents_are_named(made) and contents_are_named(config())
    made.cache_config.enable_prefix_caching = False
    assert not contents_are_named(made)
    made.model_config.multimodal_config.mm_processor_cache_gb = 4
    assert contents_are_named(made)
    assert stands_alone(ask(mm_features=[IMAGE]), False)
    assert not stands_alone(ask(mm_features=[IMAGE]), True)
    assert not stands_alone(ask(), False)


@pytest.mark.parametrize("fields", [{"prompt_embeds": object()}, {"resumable": True},
                                    {"skip_reading_prefix_cache": True}])
def test_what_a_prompt_does_not_tell_is_left_alone(fields):
    assert stands_alone(ask(**fields), True)


def test_what_a_request_says_of_a_hand_over_may_be_anything():
    for said in (None, {}, [], "x", {HANDED_ON: "64"}, {HANDED_ON: None}, {HANDED_ON: -1},
                 {HANDED_ON: [1]}, {"do_remote_decode": False}):
        request = ask(kv_transfer_params=said)
        assert make_request(request).awaited == 0 and not hands_on(request)
    assert make_request(ask(kv_transfer_params={HANDED_ON: 64})).awaited == 64
    assert hands_on(ask(kv_transfer_params={"do_remote_decode": True}))


# ------------------------------------------------------------- before ranks, without a daemon

def test_requests_wait_a_moment_for_what_the_ranks_are():
    side = SchedulerSide(Settings(lookup_wait_ms=50))
    assert side.match(Ask("a", words(1, 100)).view(), 0) is None
    assert not side.step({}, (), list).saves
    end = time.monotonic() + 20
    while side.match(Ask("a", words(1, 100)).view(), 0) is None:
        assert time.monotonic() < end
        time.sleep(0.005)
    assert side.match(Ask("b", words(1, 100)).view(), 0) == 0


def test_and_for_the_first_try_to_connect(tmp_path):
    """Where the ranks speak with their first step, requests are there before the connection."""
    side = SchedulerSide(Settings(target=f"unix:{tmp_path}/none.sock", lookup_wait_ms=60_000))
    goes_on = threading.Event()
    connect = side._connect
    side._connect = lambda: goes_on.wait(60) and connect()
    side.start(make_model(config(), side.settings, [SHAPE]), wait=False)
    try:
        assert side.match(Ask("a", words(1, 100)).view(), 0) is None
        goes_on.set()
        end = time.monotonic() + 60
        while side.match(Ask("a", words(1, 100)).view(), 0) is None:
            assert time.monotonic() < end
            time.sleep(0.005)
    finally:
        side.close()


def test_an_absent_daemon_is_reported_once_and_by_its_address(tmp_path, caplog):
    caplog.set_level(logging.DEBUG, "vllm.kvkeep")
    target = f"unix:{tmp_path}/none.sock"
    side = SchedulerSide(Settings(target=target, reconnect_ms=1, revision="r"))
    tried = threading.Semaphore(0)
    connect = side._connect

    def count():
        tried.release()
        return connect()

    side._connect = count
    side.start(make_model(config(), side.settings, [SHAPE]), wait=False)
    try:
        for _ in range(4):
            assert tried.acquire(timeout=60)
        said = [record for record in caplog.records if "no connection" in record.getMessage()]
        assert len(said) >= 3 and target in said[0].getMessage()
        assert [record.levelno for record in said] == [logging.WARNING] + \
            [logging.DEBUG] * (len(said) - 1)
    finally:
        side.close()
