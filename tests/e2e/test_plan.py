"""kvkeepctl plan: figures of published models, and configs that must not be guessed at."""

import json
import os
import pathlib
import subprocess
import xml.dom.minidom

import pytest

from conftest import binary

LLAMA_8B = dict(model_type="llama", num_hidden_layers=32, hidden_size=4096,
                num_attention_heads=32, num_key_value_heads=8)
LLAMA_70B = dict(model_type="llama", num_hidden_layers=80, hidden_size=8192,
                 num_attention_heads=64, num_key_value_heads=8)
QWEN3_4B = dict(model_type="qwen3", num_hidden_layers=36, hidden_size=2560,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                use_sliding_window=False, sliding_window=None, max_window_layers=36)
DEEPSEEK_V3 = dict(model_type="deepseek_v3", num_hidden_layers=61, hidden_size=7168,
                   num_attention_heads=128, num_key_value_heads=128, kv_lora_rank=512,
                   qk_rope_head_dim=64, v_head_dim=128, num_nextn_predict_layers=1)
GEMMA2_9B = dict(model_type="gemma2", num_hidden_layers=42, hidden_size=3584,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=256,
                 sliding_window=4096)
GPT2 = dict(model_type="gpt2", n_layer=12, n_head=12, n_embd=768)
FALCON_7B = dict(model_type="falcon", num_hidden_layers=32, hidden_size=4544,
                 num_attention_heads=71, multi_query=True, new_decoder_architecture=False)
T5_BASE = dict(model_type="t5", is_encoder_decoder=True, num_layers=12, num_decoder_layers=12,
               num_heads=12, d_model=768, d_kv=64)


def run(folder, config, *options, code=0):
    """The planner's answer; of a failure, what it said."""
    ctl = pathlib.Path(os.environ.get("KVKEEPCTL", pathlib.Path(binary()).parent / "kvkeepctl"))
    command = [ctl, "plan"]
    if config is not None:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config))
        command.append(path)
    done = subprocess.run([*command, *map(str, options), "--json"], capture_output=True, text=True,
                          timeout=20, check=False)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout) if code == 0 else done.stderr


FLAGS = ["--layers", 32, "--kv-heads", 8, "--head-size", 128]
MIB = 1 << 20


@pytest.mark.parametrize("options, expected", [
    (["--kv-heads", 8, "--lengths", 4096], 512 * MIB),
    (["--kv-heads", 32, "--lengths", 4096], 2048 * MIB),
    (["--kv-heads", 8, "--lengths", 4096, "--sequences", 8], 4096 * MIB),
    (["--kv-heads", 8, "--lengths", "1024,2048,4096"], 896 * MIB),
])
def test_sequences_of_32_layers(folder, options, expected):
    answer = run(folder, None, "--layers", 32, "--head-size", 128, *options)
    assert answer["total_bytes_per_rank"] == expected


def test_a_device_of_24_gib(folder):
    answer = run(folder, LLAMA_8B, "--device-memory", "24GiB", "--weights", "18GiB", "--reserve",
                 "1GiB", "--sequences", 16)
    assert answer["bytes_per_token"] == 131072
    assert answer["max_tokens"] == 40960
    assert answer["tokens_per_sequence"] == 2560


def test_blocks_and_what_they_waste(folder):
    answer = run(folder, LLAMA_8B, "--lengths", 100)
    assert answer["sequences"][0]["blocks"] == 7
    assert answer["unused_slots"] == 12
    assert {row["block_tokens"]: row["unused_slots"] for row in answer["block_sizes"]} == {
        1: 0, 4: 0, 16: 12, 64: 28, 256: 156}


@pytest.mark.parametrize("config, options, per_token, per_rank", [
    (QWEN3_4B, [], 147456, 147456),
    (LLAMA_70B, ["--tensor", 8], 327680, 40960),
    (LLAMA_70B, ["--tensor", 16], 327680, 40960),
    (DEEPSEEK_V3, ["--tensor", 8], 70272, 70272),
    (GPT2, [], 36864, 36864),
    (FALCON_7B, [], 8192, 8192),
    (LLAMA_8B, ["--pipeline", 4], 131072, 32768),
    (LLAMA_8B, ["--tensor", 2, "--pipeline", 4], 131072, 16384),
    (LLAMA_8B, ["--format", "fp32"], 262144, 262144),
    (LLAMA_8B, ["--value-bits", 4, "--scale-values", 32, "--scale-bits", 16, "--zero-bits", 16],
     65536 // 2 + 65536 // 32 * 4, 65536 // 2 + 65536 // 32 * 4),
])
def test_bytes_per_token(folder, config, options, per_token, per_rank):
    answer = run(folder, config, *options)
    assert answer["bytes_per_token"] == per_token
    assert answer["bytes_per_token_per_rank"] == per_rank


def test_k1_head_size_and_kv_heads_are_read_not_derived(folder):
    answer = run(folder, QWEN3_4B)
    assert answer["layers"][0]["head_size_k"] == 128  # not 2560 / 32
    assert answer["layers"][0]["kv_heads"] == 8       # not the query heads
    assert run(folder, None, *FLAGS)["bytes_per_token"] == 131072


def test_k3_scales_cost_bytes_too(folder):
    answer = run(folder, None, *FLAGS, "--format", "int8", "--budget", "1GiB")
    assert answer["bytes_per_token"] == 69632
    assert answer["blocks"] == 963
    assert run(folder, None, *FLAGS, "--value-bits", 8, "--scale-bits", 16, "--scale-values", 32,
               "--budget", "1GiB") == answer


@pytest.mark.parametrize("form,block_bytes,value_bytes", [
    ("int8_32", 32 * 2 * 8 * 16 * 136, 1.0625),
    ("int8_channel", 32 * (16384 + 2048 + 16384 + 256), 1.0703125),
    ("fp8_e4m3", 32 * 2 * (16384 + 32), 1.001953125),
])
def test_the_daemons_own_formats_are_counted_with_their_scales(folder, form, block_bytes,
                                                                value_bytes):
    answer = run(folder, None, *FLAGS, "--format", form, "--budget", "1GiB")
    assert answer["block_bytes_per_rank"] == block_bytes
    assert answer["bytes_per_value"] == pytest.approx(value_bytes, abs=1e-6)
    assert answer["blocks"] == (1 << 30) // block_bytes
    if form == "int8_32":
        odd = ["--layers", 32, "--kv-heads", 8, "--head-size", 80, "--format", form]
        assert "multiple of 32" in run(folder, None, *odd, "--budget", "1GiB", code=1)


def test_windows_of_every_other_layer(folder):
    full, window = run(folder, GEMMA2_9B, "--lengths", 8192)["layers"]
    assert (full["kind"], full["layers"], full["tokens"]) == ("full", 21, 8192)
    assert (window["kind"], window["layers"], window["tokens"]) == ("window", 21, 4096)
    assert full["bytes_per_token_per_layer"] == window["bytes_per_token_per_layer"] == 8192


def test_layer_types_and_families(folder):
    listed = dict(QWEN3_4B, sliding_window=512, num_hidden_layers=4, layer_types=[
        "full_attention", "sliding_attention", "linear_attention", "full_attention"])
    answer = run(folder, listed)
    assert [(row["kind"], row["layers"]) for row in answer["layers"]] == [("full", 2),
                                                                         ("window", 1)]
    assert any("1 layers without attention" in text for text in answer["left_out"])
    gemma3 = dict(GEMMA2_9B, model_type="gemma3_text", num_hidden_layers=12)
    assert [row["layers"] for row in run(folder, gemma3)["layers"]] == [2, 10]
    mistral = dict(LLAMA_8B, model_type="mistral", sliding_window=4096)
    assert [row["kind"] for row in run(folder, mistral)["layers"]] == ["window"]
    off = dict(QWEN3_4B, sliding_window=4096)
    assert [row["kind"] for row in run(folder, off)["layers"]] == ["full"]
    strange = dict(LLAMA_8B, model_type="newmodel", sliding_window=4096)
    answer = run(folder, strange)
    assert [row["kind"] for row in answer["layers"]] == ["full"]
    assert any("sliding_window" in text for text in answer["left_out"])
    nested = dict(model_type="gemma3", text_config=gemma3)
    answer = run(folder, nested)
    assert [row["layers"] for row in answer["layers"]] == [2, 10]
    assert any("images" in text for text in answer["left_out"])


def test_static_against_paged(folder):
    answer = run(folder, None, *FLAGS, "--lengths", "100,200,300,4096", "--max-length", 8192)
    assert answer["static_slots"] == 32768
    assert answer["paged_slots"] == 4720


def test_cross_attention_of_an_encoder(folder):
    answer = run(folder, T5_BASE, "--encoder-tokens", 512)
    assert answer["cross_bytes"] == 18874368
    longer = run(folder, T5_BASE, "--encoder-tokens", 512, "--lengths", 4096)
    assert longer["cross_bytes"] == 18874368
    assert "encoder_tokens" in run(folder, T5_BASE, code=1)


def test_how_many_at_once(folder):
    base = ["--budget", "4GiB", "--prompt", 1024, "--output", 1024]
    assert run(folder, LLAMA_8B, *base)["sequences_at_once"] == 16
    assert run(folder, LLAMA_8B, *base, "--preempt")["sequences_at_once"] == 21
    assert run(folder, LLAMA_8B, *base, "--prefix-hit", 1)["sequences_at_once"] == 31
    table = run(folder, LLAMA_8B, "--budget", "4GiB")["table"]
    assert {"context_tokens": 4096, "sequences": 8} in table


@pytest.mark.parametrize("config, word", [
    ("{", "config.json"),
    ("[]", "not an object"),
    ({}, "num_hidden_layers"),
    (dict(model_type="unheard_of", num_hidden_layers=2, num_attention_heads=4, hidden_size=64),
     "num_key_value_heads"),
    (dict(LLAMA_8B, hidden_size=4097), "head_dim"),
    (dict(LLAMA_8B, num_hidden_layers=2, layer_types=["full_attention"]), "layer_types"),
    (dict(LLAMA_8B, num_hidden_layers=1, layer_types=["magic"]), "magic"),
    (dict(DEEPSEEK_V3, qk_rope_head_dim=None), "qk_rope_head_dim"),
    (dict(LLAMA_8B, num_hidden_layers=10**9), "layers"),
])
def test_what_cannot_be_read_is_named(folder, config, word):
    assert word in run(folder, config, code=1)


def test_ranks_that_cannot_share_the_heads(folder):
    assert "tensor ranks" in run(folder, LLAMA_8B, "--tensor", 3, code=1)


def test_the_plot_is_a_picture(folder):
    path = pathlib.Path(folder) / "plot.svg"
    answer = run(folder, LLAMA_8B, "--budget", "40GiB", "--plot", path)
    picture = xml.dom.minidom.parse(str(path))
    assert len(picture.getElementsByTagName("circle")) == len(answer["table"]) > 5
