/*
 * What a model's KV cache costs, and what a budget can hold: the formulas of the capacity planner.
 *
 *     bytes per token and layer = kv_heads x (head_size_k + head_size_v) x bits / 8
 *                                 + scales and zero-points of as many values
 *
 * over all layers 2 L Hkv d b where K and V are alike. A rank has its share of the heads (a whole
 * one where there are fewer heads than ranks) and of the layers; a latent cache (MLA) lies whole on
 * every tensor rank. A sequence takes whole blocks; under a window, those that a next query can
 * still see, and the sinks; a cross-attention layer, those of the encoder's tokens, however long
 * the output.
 *
 * Everything is exact integer arithmetic, checked for overflow by kvk_capacity_check().
 */
#ifndef KVK_BASE_CAPACITY_H
#define KVK_BASE_CAPACITY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/format.h"
#include "base/status.h"

#define KVK_CAPACITY_GROUP_MAX 8
#define KVK_CAPACITY_TOKENS_MAX (UINT64_C(1) << 40) /* of anything that is asked for */

/* How a value is stored: as the daemon stores `stored`, in whole blocks with their scales; or,
 * where that is NONE, `value_bits` each, and for every `scale_values` of them a scale and a
 * zero-point. */
struct kvk_capacity_format {
    enum kvk_format stored; /* compact formats, whose scales depend on the block's shape */
    uint32_t value_bits;
    uint32_t scale_bits;
    uint32_t zero_bits;
    uint32_t scale_values; /* 0: none have scales or zero-points */
};

/* By name: fp32, bf16, fp16, fp8 (its scales elsewhere), int8 (fp16 scale per 32 values), int4 (the
 * same), int4z (with an fp16 zero-point); and the daemon's fp8_e4m3, int8_channel and int8_32.
 * False: unknown. */
bool kvk_capacity_format_named(const char *name, struct kvk_capacity_format *format);
extern const char *const kvk_capacity_format_names; /* "fp32, bf16, …" */

/* Layers that are alike. */
struct kvk_capacity_layers {
    uint32_t layers;
    uint32_t kv_heads; /* over all ranks; not the query heads */
    uint32_t head_size_k;
    uint32_t head_size_v; /* 0 for a latent cache: V is a part of K */
    bool latent;
    bool cross;      /* keeps the encoder's tokens instead */
    uint32_t window; /* 0: all */
    uint32_t sinks;
};

struct kvk_capacity {
    struct kvk_capacity_layers groups[KVK_CAPACITY_GROUP_MAX];
    uint32_t group_count;
    struct kvk_capacity_format format;
    uint32_t tensor_ranks;
    uint32_t pipeline_ranks;
    uint32_t block_tokens;
    uint64_t encoder_tokens; /* of each sequence, where there are cross layers */
};

/* KVK_INVALID naming the field: a zero or absurd number, heads that the ranks cannot share, values
 * that do not fill whole scales. Everything below needs a checked one. */
KVK_CHECKED enum kvk_status kvk_capacity_check(const struct kvk_capacity *capacity,
                                               struct kvk_error *error);

/* Bytes of a token in one layer of the group, all ranks' heads once. Where scales belong to blocks,
 * here and below a token's bytes are its block's, dealt out and rounded up. */
uint64_t kvk_capacity_layer_bytes(const struct kvk_capacity *capacity, uint32_t group);
/* The same on the fullest rank, for all of the group's layers that it has; and of a whole block. */
uint64_t kvk_capacity_rank_bytes(const struct kvk_capacity *capacity, uint32_t group);
uint64_t kvk_capacity_rank_block_bytes(const struct kvk_capacity *capacity, uint32_t group);

/* Bytes per value over all layers, scales and padding counted: what 2 L Hkv d is multiplied by. */
double kvk_capacity_value_bytes(const struct kvk_capacity *capacity);

/* A token of the decoder over all layers that keep it, windowed ones too; cross layers apart. */
uint64_t kvk_capacity_token_bytes(const struct kvk_capacity *capacity);
uint64_t kvk_capacity_token_rank_bytes(const struct kvk_capacity *capacity); /* fullest rank */
/* The encoder's tokens of one sequence in all cross layers, without rounding to blocks. */
uint64_t kvk_capacity_cross_bytes(const struct kvk_capacity *capacity);

/* Tokens of the group that a sequence of `tokens` keeps, without rounding. */
uint64_t kvk_capacity_kept_tokens(const struct kvk_capacity *capacity, uint32_t group,
                                  uint64_t tokens);
/* Blocks of the group that they lie in. */
uint64_t kvk_capacity_kept_blocks(const struct kvk_capacity *capacity, uint32_t group,
                                  uint64_t tokens);

/* One sequence in whole blocks, on the fullest rank: all groups. */
uint64_t kvk_capacity_sequence_bytes(const struct kvk_capacity *capacity, uint64_t tokens);
/* One block of every self-attention group, on the fullest rank. */
uint64_t kvk_capacity_block_bytes(const struct kvk_capacity *capacity);

/* The longest sequence, alone, that fits; a multiple of block_tokens. UINT64_MAX: any (all layers
 * are windowed and fit). */
uint64_t kvk_capacity_tokens_max(const struct kvk_capacity *capacity, uint64_t budget_bytes);

/* What runs at once. */
struct kvk_capacity_load {
    uint64_t prompt_tokens;
    uint64_t output_tokens;
    uint64_t shared_tokens; /* of each prompt, that all have in common: stored once */
    bool preempt;           /* running sequences may be swapped out: room for the mean length, not
                               for every one's end */
};

/* How many such sequences fit in the budget at once. 0: not one. */
uint64_t kvk_capacity_sequences(const struct kvk_capacity *capacity,
                                const struct kvk_capacity_load *load, uint64_t budget_bytes);

#endif
