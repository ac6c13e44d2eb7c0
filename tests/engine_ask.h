/*
 * Asking the engine for attention in tests: K and V whose every value follows from its place alone,
 * written as a worker would through its mapping, requests with their operands, and a plain loop in
 * double that knows nothing of blocks, shards or tiers, to compare the answers with.
 */
#ifndef KVK_TESTS_ENGINE_ASK_H
#define KVK_TESTS_ENGINE_ASK_H

#include <math.h>

#include "daemon/attention.h"
#include "tests/engine_house.h"

#define HEAD_SIZE_MAX 64

/* ---- Values ---- */

static inline uint64_t mix(uint64_t value)
{
    value ^= value >> 31;
    value *= UINT64_C(0x9e3779b97f4a7c15);
    value ^= value >> 29;
    value *= UINT64_C(0xbf58476d1ce4e5b9);
    return value ^ value >> 32;
}

/* K (kind 0), V (1) or a query (2): eight bits, so exact in every format. */
static inline float value_at(uint32_t kind, uint32_t layer, uint32_t head, uint32_t token,
                             uint64_t position, uint32_t dim)
{
    uint64_t seed = mix(kind + 3 * mix(layer + mix(head + mix(token + mix(position + mix(dim))))));
    return (float)((int)(seed % 255) - 127) / 64.0F;
}

static inline void value_store(enum kvk_format format, uint8_t *target, float value)
{
    uint32_t wide;
    memcpy(&wide, &value, sizeof(wide));
    uint16_t brain = (uint16_t)(wide >> 16);
    uint32_t exponent = wide >> 23 & 0xff;
    uint16_t half = (uint16_t)(wide >> 16 & 0x8000);

    if (exponent != 0) {
        half = (uint16_t)(half | (exponent - 127 + 15) << 10 | (wide >> 13 & 0x3ff));
    }
    switch (format) {
    case KVK_FORMAT_FP32:
        memcpy(target, &wide, 4);
        break;
    case KVK_FORMAT_FP16:
        memcpy(target, &half, 2);
        break;
    case KVK_FORMAT_BF16:
        memcpy(target, &brain, 2);
        break;
    case KVK_FORMAT_NONE:
    case KVK_FORMAT_FP8_E4M3:
    case KVK_FORMAT_INT8_CHANNEL:
    case KVK_FORMAT_INT8_32:
        cr_assert(false);
    }
}

/* ---- Writing through the engine's own memory, as a worker would through its mapping ---- */

static inline void token_write(const struct kvk_geometry *geometry, uint32_t shard, uint8_t *page,
                               uint32_t slot, uint32_t token, uint64_t position)
{
    uint32_t first_head = kvk_geometry_shard_first_head(geometry, shard);
    uint32_t first_layer = kvk_geometry_shard_first_layer(geometry, shard);

    for (uint32_t l = 0; l < kvk_geometry_shard_layers(geometry, shard); l++) {
        for (uint32_t h = 0; h < kvk_geometry_shard_heads(geometry, shard); h++) {
            uint64_t row = (uint64_t)h * geometry->block_tokens + slot;
            size_t k_bytes = kvk_format_bytes(geometry->format_k);
            uint8_t *k = page + kvk_geometry_k_offset(geometry, shard, l) +
                         row * geometry->head_size_k * k_bytes;
            for (uint32_t d = 0; d < geometry->head_size_k; d++) {
                value_store(geometry->format_k, k + d * k_bytes,
                            value_at(0, first_layer + l, first_head + h, token, position, d));
            }
            if (geometry->latent) {
                continue;
            }
            size_t v_bytes = kvk_format_bytes(geometry->format_v);
            uint8_t *v = page + kvk_geometry_v_offset(geometry, shard, l) +
                         row * geometry->head_size_v * v_bytes;
            for (uint32_t d = 0; d < geometry->head_size_v; d++) {
                value_store(geometry->format_v, v + d * v_bytes,
                            value_at(1, first_layer + l, first_head + h, token, position, d));
            }
        }
    }
}

/* Write tokens [first, length) of a sequence, all groups and shards; a block that is new to it is
 * all NaN before. */
static inline void sequence_write(struct house *house, uint64_t sequence_id, uint64_t first)
{
    kvk_lock(&house->cache->lock);
    struct kvk_sequence *sequence = kvk_table_get(&house->cache->sequence_table, sequence_id);
    cr_assert_not_null(sequence);
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        const struct kvk_group *group = sequence->space->groups[g];
        uint32_t block_tokens = group->geometry.block_tokens;
        for (uint64_t position = first; position < sequence->length; position++) {
            uint32_t id = sequence->groups[g].blocks[position / block_tokens];
            cr_assert_neq(id, KVK_BLOCK_NONE);
            const struct kvk_block *block = kvk_index_block(house->cache->index, id);
            for (uint32_t shard = 0; shard < group->shard_count; shard++) {
                uint8_t *page =
                    kvk_block_address(house->cache, block, kvk_block_tier(block), shard);
                if (position % block_tokens == 0) {
                    memset(page, 0xff, group->shard_bytes[shard]);
                }
                token_write(&group->geometry, shard, page, (uint32_t)(position % block_tokens),
                            sequence->tokens[position], position);
            }
        }
    }
    kvk_unlock(&house->cache->lock);
}

/* Open, write and seal. */
static inline uint64_t sequence_make(struct house *house, uint64_t session_id, uint64_t space_id,
                                     const uint32_t *tokens, uint64_t count)
{
    struct kvk_sequence_reply reply = house_open(house, session_id, space_id, tokens, count);
    sequence_write(house, reply.sequence_id, reply.grant_first);
    house_seal(house, session_id, reply.sequence_id, count);
    return reply.sequence_id;
}

static inline void sequence_append(struct house *house, uint64_t session_id, uint64_t sequence_id,
                                   uint64_t length, const uint32_t *tokens, uint64_t count)
{
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    const struct kvk_append_request request = {.session_id = session_id,
                                               .sequence_id = sequence_id,
                                               .expected_length = length,
                                               .tokens = tokens,
                                               .token_count = count};
    cr_assert_eq(
        kvk_sequence_append(house->cache, &house->caller, &request, &reply, &tables, &house->error),
        KVK_OK, "%s", house->error.text);
    kvk_tables_finish(&tables);
    sequence_write(house, sequence_id, reply.grant_first);
    house_seal(house, session_id, sequence_id, length + count);
}

static inline void swap_out(struct house *house, uint64_t session_id, uint64_t sequence_id)
{
    struct kvk_swap_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    cr_assert_eq(kvk_sequence_swap_out(house->cache, &house->caller, session_id, sequence_id,
                                       &reply, &tables, &house->error),
                 KVK_OK, "%s", house->error.text);
    kvk_tables_finish(&tables);
}

static inline void swap_in(struct house *house, uint64_t session_id, uint64_t sequence_id)
{
    struct kvk_swap_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    cr_assert_eq(kvk_sequence_swap_in(house->cache, &house->caller, session_id, sequence_id, &reply,
                                      &tables, &house->error),
                 KVK_OK, "%s", house->error.text);
    kvk_tables_finish(&tables);
}

/* ---- Asking ---- */

/* A request of a few items with room for its operands. */
struct ask {
    struct kvk_attention_request request;
    struct kvk_attention_item items[8];
    const uint32_t *tokens[8]; /* of the item's sequence */
    uint64_t sealed[8];
    struct kvk_geometry geometry;
    float slopes[KVK_HEAD_COUNT_MAX];
    float sinks[KVK_HEAD_COUNT_MAX];
    uint8_t *queries[8];
    float *output[8];
    float *lse[8];
};

static inline void ask_init(struct ask *ask, uint64_t session_id,
                            const struct kvk_geometry *geometry, uint32_t query_heads)
{
    memset(ask, 0, sizeof(*ask));
    ask->geometry = *geometry;
    ask->request.session_id = session_id;
    ask->request.query_heads = query_heads;
    ask->request.format = KVK_FORMAT_FP32;
    ask->request.scale = 0.25F;
    ask->request.causal = true;
    ask->request.items = ask->items;
}

static inline struct kvk_attention_item *ask_add(struct ask *ask, uint64_t sequence_id,
                                                 const uint32_t *tokens, uint64_t sealed,
                                                 uint64_t position, uint32_t query_count)
{
    uint32_t i = ask->request.item_count;
    uint32_t heads = ask->request.query_heads;
    size_t value_bytes = kvk_format_bytes(ask->request.format);
    uint64_t rows = (uint64_t)query_count * heads;

    cr_assert(i < 8);
    ask->request.item_count++;
    ask->tokens[i] = tokens;
    ask->sealed[i] = sealed;
    ask->queries[i] = malloc(rows * ask->geometry.head_size_k * value_bytes);
    ask->output[i] = malloc(rows * ask->geometry.head_size_v * sizeof(float));
    ask->lse[i] = malloc(rows * sizeof(float));
    for (uint64_t row = 0; row < rows; row++) {
        for (uint32_t d = 0; d < ask->geometry.head_size_k; d++) {
            value_store(ask->request.format,
                        ask->queries[i] + (row * ask->geometry.head_size_k + d) * value_bytes,
                        value_at(2, 0, (uint32_t)(row % heads), 0, position + row / heads, d));
        }
    }
    ask->items[i] =
        (struct kvk_attention_item){.sequence_id = sequence_id,
                                    .position = position,
                                    .query_count = query_count,
                                    .queries = ask->queries[i],
                                    .queries_size = rows * ask->geometry.head_size_k * value_bytes,
                                    .output = ask->output[i],
                                    .lse = ask->lse[i]};
    return &ask->items[i];
}

/* ALiBi slopes, or sink logits, a different one for each query head. */
static inline void ask_slopes(struct ask *ask)
{
    for (uint32_t head = 0; head < ask->request.query_heads; head++) {
        ask->slopes[head] = ldexpf(1, -1 - (int)(head % 6));
    }
    ask->request.alibi_slopes = ask->slopes;
    ask->request.alibi_slope_count = ask->request.query_heads;
}

static inline void ask_sinks(struct ask *ask)
{
    for (uint32_t head = 0; head < ask->request.query_heads; head++) {
        ask->sinks[head] = head % 4 == 3 ? -INFINITY : (float)head - 2;
    }
    ask->request.sink_logits = ask->sinks;
    ask->request.sink_logit_count = ask->request.query_heads;
}

static inline void ask_finish(struct ask *ask)
{
    for (uint32_t i = 0; i < ask->request.item_count; i++) {
        free(ask->queries[i]);
        free(ask->output[i]);
        free(ask->lse[i]);
    }
}

static inline enum kvk_status ask_run(struct house *house, struct ask *ask)
{
    for (uint32_t i = 0; i < ask->request.item_count; i++) {
        uint64_t rows = (uint64_t)ask->items[i].query_count * ask->request.query_heads;
        memset(ask->output[i], 0xff, rows * ask->geometry.head_size_v * sizeof(float));
        memset(ask->lse[i], 0xff, rows * sizeof(float));
    }
    enum kvk_status status =
        kvk_attention_run(house->cache, &house->caller, &ask->request, &house->error);
    kvk_lock(&house->cache->lock);
    cr_expect_eq(house->cache->passing_holds, 0);
    kvk_unlock(&house->cache->lock);
    return status;
}

/* ---- The plain loop ---- */

static inline bool sees(const struct ask *ask, uint64_t position, uint64_t token)
{
    uint32_t window = ask->request.group_window ? ask->geometry.window : ask->request.window;
    uint32_t sinks = ask->request.group_window ? ask->geometry.sinks : ask->request.sinks;

    if (ask->geometry.attention == KVK_ATTENTION_CROSS) {
        return true;
    }
    if (ask->request.causal && token > position) {
        return false;
    }
    return window == 0 || token + window > position || token < sinks;
}

/* One row, in double: where `row` is query x head. Returns LSE. */
static inline double plain_row(const struct ask *ask, uint32_t item, uint64_t row, double *output)
{
    const struct kvk_geometry *geometry = &ask->geometry;
    uint32_t heads = ask->request.query_heads;
    uint64_t position = ask->items[item].position + row / heads;
    uint64_t count = ask->sealed[item];
    /* Which of all KV heads this rank's query head reads. */
    uint32_t shard = kvk_geometry_rank_shard(geometry, ask->request.rank);
    uint32_t kv_heads = kvk_geometry_shard_heads(geometry, shard);
    uint32_t kv_head = kvk_geometry_shard_first_head(geometry, shard) +
                       (uint32_t)(row % heads) / (heads / kv_heads);
    double sum = 0;

    if (ask->items[item].token_limit != 0 && ask->items[item].token_limit < count) {
        count = ask->items[item].token_limit;
    }
    for (uint32_t d = 0; d < geometry->head_size_v; d++) {
        output[d] = 0;
    }
    for (uint64_t token = 0; token < count; token++) {
        if (!sees(ask, position, token)) {
            continue;
        }
        double dot = 0;
        for (uint32_t d = 0; d < geometry->head_size_k; d++) {
            dot += (double)value_at(2, 0, (uint32_t)(row % heads), 0, position, d) *
                   (double)value_at(0, ask->request.layer, kv_head, ask->tokens[item][token], token,
                                    d);
        }
        double logit = dot * (double)ask->request.scale;
        if (ask->request.soft_cap > 0) {
            logit = (double)ask->request.soft_cap * tanh(logit / (double)ask->request.soft_cap);
        }
        if (ask->request.alibi_slope_count != 0) {
            logit -= (double)ask->slopes[row % heads] * fabs((double)position - (double)token);
        }
        /* Logits are small here: no maximum is needed. */
        double weight = exp(logit);
        sum += weight;
        for (uint32_t d = 0; d < geometry->head_size_v; d++) {
            output[d] += weight * (double)value_at(geometry->latent ? 0 : 1, ask->request.layer,
                                                   kv_head, ask->tokens[item][token], token, d);
        }
    }
    if (ask->request.sink_logit_count != 0) {
        sum += exp((double)ask->sinks[row % heads]);
    }
    for (uint32_t d = 0; d < geometry->head_size_v; d++) {
        output[d] = sum == 0 ? 0 : output[d] / sum;
    }
    return log(sum);
}

/* Kernels for 16 bits may round weights to what they multiply with. */
static inline double tolerance_of(const struct ask *ask)
{
    bool fp32 = ask->request.format == KVK_FORMAT_FP32 &&
                ask->geometry.format_k == KVK_FORMAT_FP32 &&
                (ask->geometry.latent || ask->geometry.format_v == KVK_FORMAT_FP32);
    return fp32 ? 1e-5 : 1e-2;
}

/* All results as the plain loop has them. */
static inline void ask_check(const struct ask *ask, const char *what)
{
    double output[HEAD_SIZE_MAX];
    double tolerance = tolerance_of(ask);

    for (uint32_t i = 0; i < ask->request.item_count; i++) {
        uint64_t rows = (uint64_t)ask->items[i].query_count * ask->request.query_heads;
        double difference = 0;
        double norm = 0;
        for (uint64_t row = 0; row < rows; row++) {
            double lse = plain_row(ask, i, row, output);
            float found = ask->lse[i][row];
            cr_assert(isinf(lse) ? isinf(found) && found < 0
                                 : fabs((double)found - lse) < 10 * tolerance * (1 + fabs(lse)),
                      "%s: item %u row %llu lse %f not %f", what, i, (unsigned long long)row,
                      (double)found, lse);
            for (uint32_t d = 0; d < ask->geometry.head_size_v; d++) {
                double value = (double)ask->output[i][row * ask->geometry.head_size_v + d];
                cr_assert(isfinite(value), "%s: item %u row %llu", what, i,
                          (unsigned long long)row);
                difference += (value - output[d]) * (value - output[d]);
                norm += output[d] * output[d];
            }
        }
        cr_assert(sqrt(difference) <= tolerance * sqrt(norm) + 1e-12, "%s: item %u off by %g of %g",
                  what, i, sqrt(difference), sqrt(norm));
    }
}

static inline void ask_right(struct house *house, struct ask *ask, const char *what)
{
    cr_assert_eq(ask_run(house, ask), KVK_OK, "%s: %s", what, house->error.text);
    ask_check(ask, what);
}

#endif
