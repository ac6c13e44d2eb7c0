"""Small models of random weights, built from configurations. Seeded: two processes have the
same."""

import torch
import transformers as hf

VOCABULARY = 97
COMMON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
          "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 96, "pad_token_id": 0}


def config(name):
    if name == "llama":
        return hf.LlamaConfig(**COMMON)
    if name == "qwen3":
        return hf.Qwen3Config(**COMMON, head_dim=16)
    if name == "mistral":  # every layer under a window
        return hf.MistralConfig(**COMMON, sliding_window=12)
    if name == "gemma3":   # windows and full layers
        return hf.Gemma3TextConfig(**COMMON, head_dim=16, sliding_window=12, layer_types=[
            "sliding_attention", "full_attention", "sliding_attention"])
    if name == "gpt2":
        return hf.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4,
                             n_positions=512, bos_token_id=1, eos_token_id=96, pad_token_id=0)
    if name == "deepseek":  # MLA
        return hf.DeepseekV3Config(**{**COMMON, "num_key_value_heads": 4}, kv_lora_rank=24,
                                   q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16,
                                   v_head_dim=16, first_k_dense_replace=3, n_routed_experts=4,
                                   moe_intermediate_size=16, num_experts_per_tok=2, n_group=1,
                                   topk_group=1)
    if name == "t5":
        return hf.T5Config(vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=3,
                           num_heads=4, pad_token_id=0, eos_token_id=96,
                           decoder_start_token_id=0)
    if name == "bart":
        return hf.BartConfig(vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=3,
                             encoder_attention_heads=4, decoder_attention_heads=4,
                             encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=256,
                             pad_token_id=0, bos_token_id=1, eos_token_id=96,
                             decoder_start_token_id=2, forced_eos_token_id=None)
    raise ValueError(name)


def build(name, seed=1, dtype=torch.float32, **changes):
    """A model whose greedy answers vary with its prompt: its weights are larger than fresh ones."""
    torch.manual_seed(seed)
    made = config(name)
    for key, value in changes.items():
        setattr(made, key, value)
    kind = hf.AutoModelForSeq2SeqLM if made.is_encoder_decoder else hf.AutoModelForCausalLM
    model = kind.from_config(made).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25 if name != "t5" else 0.6)
    return model.to(dtype)


def prompt(length, seed=5, rows=1):
    """Ids that are none of the special ones."""
    source = torch.Generator().manual_seed(seed)
    return torch.randint(3, 90, (rows, length), generator=source)


def batch(prompts, side="left"):
    """Rows of different length, padded: ids and mask."""
    length = max(len(row) for row in prompts)
    ids = torch.zeros((len(prompts), length), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(prompts):
        first = length - len(row) if side == "left" else 0
        ids[number, first:first + len(row)] = row
        mask[number, first:first + len(row)] = 1
    return ids, mask
