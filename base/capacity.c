#include "base/capacity.h"

#include <stddef.h>
#include <string.h>

#include "base/assert.h"

#define COUNT_MAX 1000000U /* of layers, heads, ranks, head sizes: far past any model */
#define BLOCK_TOKENS_MAX 65536U

/* ---- Formats ---- */

const char *const kvk_capacity_format_names =
    "fp32, bf16, fp16, fp8, int8, int4, int4z, fp8_e4m3, int8_channel, int8_32";

bool kvk_capacity_format_named(const char *name, struct kvk_capacity_format *format)
{
    static const struct {
        const char *name;
        struct kvk_capacity_format format;
    } known[] = {
        {"fp32", {.value_bits = 32}},
        {"bf16", {.value_bits = 16}},
        {"fp16", {.value_bits = 16}},
        {"fp8", {.value_bits = 8}},
        {"int8", {.value_bits = 8, .scale_bits = 16, .scale_values = 32}},
        {"int4", {.value_bits = 4, .scale_bits = 16, .scale_values = 32}},
        {"int4z", {.value_bits = 4, .scale_bits = 16, .zero_bits = 16, .scale_values = 32}},
        {"fp8_e4m3", {.stored = KVK_FORMAT_FP8_E4M3, .value_bits = 8}},
        {"int8_channel", {.stored = KVK_FORMAT_INT8_CHANNEL, .value_bits = 8}},
        {"int8_32", {.stored = KVK_FORMAT_INT8_32, .value_bits = 8}},
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (strcmp(name, known[i].name) == 0) {
            *format = known[i].format;
            return true;
        }
    }
    return false;
}

/* ---- Checks ---- */

static enum kvk_status fail(struct kvk_error *error, const char *field, uint64_t value,
                            uint64_t limit, const char *text)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit, "%s: %s", field,
                          text);
}

static enum kvk_status check_count(struct kvk_error *error, const char *field, uint64_t value,
                                   uint64_t limit)
{
    if (value >= 1 && value <= limit) {
        return KVK_OK;
    }
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit,
                          "%s must be 1 to %llu", field, (unsigned long long)limit);
}

static enum kvk_status check_format(const struct kvk_capacity_format *format,
                                    struct kvk_error *error)
{
    enum kvk_status status = check_count(error, "value_bits", format->value_bits, 64);
    if (status != KVK_OK) {
        return status;
    }
    if (format->scale_bits > 64 || format->zero_bits > 64) {
        return fail(error, format->scale_bits > 64 ? "scale_bits" : "zero_bits",
                    format->scale_bits > 64 ? format->scale_bits : format->zero_bits, 64,
                    "at most 64");
    }
    if (format->scale_values > COUNT_MAX) {
        return fail(error, "scale_values", format->scale_values, COUNT_MAX, "too many");
    }
    if (format->scale_values == 0 && (format->scale_bits > 0 || format->zero_bits > 0)) {
        return fail(error, "scale_values", 0, 0, "how many values share a scale?");
    }
    return KVK_OK;
}

static uint64_t layer_values(const struct kvk_capacity_layers *layers, uint32_t heads)
{
    return (uint64_t)heads * ((uint64_t)layers->head_size_k + layers->head_size_v);
}

/* Heads of one tensor rank. */
static uint32_t rank_heads(const struct kvk_capacity *capacity,
                           const struct kvk_capacity_layers *layers)
{
    if (layers->latent) {
        return layers->kv_heads;
    }
    uint32_t heads = layers->kv_heads / capacity->tensor_ranks;
    return heads == 0 ? 1 : heads;
}

static enum kvk_status check_layers(const struct kvk_capacity *capacity,
                                    const struct kvk_capacity_layers *layers,
                                    struct kvk_error *error)
{
    enum kvk_status status = check_count(error, "layers", layers->layers, COUNT_MAX);
    if (status == KVK_OK) {
        status = check_count(error, "kv_heads", layers->kv_heads, COUNT_MAX);
    }
    if (status == KVK_OK) {
        status = check_count(error, "head_size", layers->head_size_k, COUNT_MAX);
    }
    if (status != KVK_OK) {
        return status;
    }
    if (layers->head_size_v > COUNT_MAX) {
        return fail(error, "head_size_v", layers->head_size_v, COUNT_MAX, "too large");
    }
    uint32_t heads = layers->kv_heads;
    uint32_t ranks = capacity->tensor_ranks;
    if (!layers->latent && (heads >= ranks ? heads % ranks : ranks % heads) != 0) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "tensor_ranks", ranks, heads,
                              "%u KV heads cannot be dealt out to %u tensor ranks", heads, ranks);
    }
    if (capacity->pipeline_ranks > layers->layers) {
        return fail(error, "pipeline_ranks", capacity->pipeline_ranks, layers->layers,
                    "more than the layers of a group");
    }
    const struct kvk_capacity_format *format = &capacity->format;
    uint64_t values = layer_values(layers, rank_heads(capacity, layers));
    if (format->scale_values > 0 && values % format->scale_values != 0) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "scale_values",
                              format->scale_values, values,
                              "scale_values: %llu values of a token and layer are not whole groups "
                              "of %u",
                              (unsigned long long)values, format->scale_values);
    }
    if (!kvk_format_fits(format->stored, layers->head_size_k) ||
        !kvk_format_fits(format->stored, layers->head_size_v)) {
        return fail(error, "head_size", layers->head_size_k, KVK_INT8_32_VALUES,
                    "must be a multiple of 32 in int8_32");
    }
    if (format->stored == KVK_FORMAT_INT8_CHANNEL && layers->latent) {
        return fail(error, "format", format->stored, 0,
                    "int8_channel scales K and V in different ways, so V cannot be a view of K");
    }
    if (values * format->value_bits % 8 != 0) {
        return fail(error, "value_bits", format->value_bits, values,
                    "the values of a token and layer are not whole bytes");
    }
    return KVK_OK;
}

enum kvk_status kvk_capacity_check(const struct kvk_capacity *capacity, struct kvk_error *error)
{
    enum kvk_status status =
        check_count(error, "groups", capacity->group_count, KVK_CAPACITY_GROUP_MAX);
    if (status == KVK_OK) {
        status = check_count(error, "tensor_ranks", capacity->tensor_ranks, COUNT_MAX);
    }
    if (status == KVK_OK) {
        status = check_count(error, "pipeline_ranks", capacity->pipeline_ranks, COUNT_MAX);
    }
    if (status == KVK_OK) {
        status = check_count(error, "block_tokens", capacity->block_tokens, BLOCK_TOKENS_MAX);
    }
    if (status == KVK_OK) {
        status = check_format(&capacity->format, error);
    }
    bool crosses = false;
    double total = 0;
    for (uint32_t i = 0; i < capacity->group_count && status == KVK_OK; i++) {
        const struct kvk_capacity_layers *layers = &capacity->groups[i];
        status = check_layers(capacity, layers, error);
        crosses = crosses || layers->cross;
        total += (double)layer_values(layers, layers->kv_heads) * layers->layers;
    }
    if (status == KVK_OK && total > 1e12) {
        status = fail(error, "layers", 0, 0, "the model is larger than can be counted");
    }
    if (status == KVK_OK && capacity->encoder_tokens > KVK_CAPACITY_TOKENS_MAX) {
        status = fail(error, "encoder_tokens", capacity->encoder_tokens, KVK_CAPACITY_TOKENS_MAX,
                      "too many");
    }
    if (status == KVK_OK && crosses && capacity->encoder_tokens == 0) {
        status = fail(error, "encoder_tokens", 0, 0,
                      "the model has cross-attention: how many tokens has its encoder?");
    }
    return status;
}

/* ---- Bytes ---- */

static uint64_t value_bytes(const struct kvk_capacity_format *format, uint64_t values)
{
    uint64_t bits = values * format->value_bits;
    if (format->scale_values > 0) {
        bits += values / format->scale_values * (format->scale_bits + format->zero_bits);
    }
    return (bits + 7) / 8;
}

/* A block of `heads` heads of one layer. */
static uint64_t heads_block_bytes(const struct kvk_capacity *capacity,
                                  const struct kvk_capacity_layers *layers, uint32_t heads)
{
    const struct kvk_capacity_format *format = &capacity->format;
    if (format->stored == KVK_FORMAT_NONE) {
        return value_bytes(format, layer_values(layers, heads)) * capacity->block_tokens;
    }
    uint32_t tokens = capacity->block_tokens;
    uint64_t bytes =
        kvk_part_of(format->stored, false, heads, tokens, layers->head_size_k).size_bytes;
    if (layers->head_size_v > 0) {
        bytes += kvk_part_of(format->stored, true, heads, tokens, layers->head_size_v).size_bytes;
    }
    return bytes;
}

static uint64_t token_share(const struct kvk_capacity *capacity, uint64_t block_bytes)
{
    return (block_bytes + capacity->block_tokens - 1) / capacity->block_tokens;
}

static uint64_t layers_per_rank(const struct kvk_capacity *capacity,
                                const struct kvk_capacity_layers *layers)
{
    return (layers->layers + capacity->pipeline_ranks - 1) / capacity->pipeline_ranks;
}

uint64_t kvk_capacity_layer_bytes(const struct kvk_capacity *capacity, uint32_t group)
{
    KVK_ASSERT(group < capacity->group_count);
    const struct kvk_capacity_layers *layers = &capacity->groups[group];
    return token_share(capacity, heads_block_bytes(capacity, layers, layers->kv_heads));
}

uint64_t kvk_capacity_rank_bytes(const struct kvk_capacity *capacity, uint32_t group)
{
    KVK_ASSERT(group < capacity->group_count);
    const struct kvk_capacity_layers *layers = &capacity->groups[group];
    uint64_t bytes = heads_block_bytes(capacity, layers, rank_heads(capacity, layers));
    return token_share(capacity, bytes) * layers_per_rank(capacity, layers);
}

uint64_t kvk_capacity_rank_block_bytes(const struct kvk_capacity *capacity, uint32_t group)
{
    KVK_ASSERT(group < capacity->group_count);
    const struct kvk_capacity_layers *layers = &capacity->groups[group];
    return heads_block_bytes(capacity, layers, rank_heads(capacity, layers)) *
           layers_per_rank(capacity, layers);
}

double kvk_capacity_value_bytes(const struct kvk_capacity *capacity)
{
    double bytes = 0;
    double values = 0;
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        const struct kvk_capacity_layers *layers = &capacity->groups[i];
        bytes += (double)heads_block_bytes(capacity, layers, layers->kv_heads) * layers->layers;
        values += (double)layer_values(layers, layers->kv_heads) * capacity->block_tokens *
                  layers->layers;
    }
    return bytes / values;
}

uint64_t kvk_capacity_token_bytes(const struct kvk_capacity *capacity)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        if (!capacity->groups[i].cross) {
            bytes += kvk_capacity_layer_bytes(capacity, i) * capacity->groups[i].layers;
        }
    }
    return bytes;
}

uint64_t kvk_capacity_token_rank_bytes(const struct kvk_capacity *capacity)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        bytes += capacity->groups[i].cross ? 0 : kvk_capacity_rank_bytes(capacity, i);
    }
    return bytes;
}

uint64_t kvk_capacity_cross_bytes(const struct kvk_capacity *capacity)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        if (capacity->groups[i].cross) {
            bytes += kvk_capacity_layer_bytes(capacity, i) * capacity->groups[i].layers *
                     capacity->encoder_tokens;
        }
    }
    return bytes;
}

/* ---- Sequences ---- */

uint64_t kvk_capacity_kept_tokens(const struct kvk_capacity *capacity, uint32_t group,
                                  uint64_t tokens)
{
    KVK_ASSERT(group < capacity->group_count);
    const struct kvk_capacity_layers *layers = &capacity->groups[group];
    if (layers->cross) {
        return capacity->encoder_tokens;
    }
    uint64_t most = (uint64_t)layers->window + layers->sinks;
    return layers->window > 0 && tokens > most ? most : tokens;
}

static uint64_t blocks_of(const struct kvk_capacity *capacity, uint64_t tokens)
{
    return (tokens + capacity->block_tokens - 1) / capacity->block_tokens;
}

uint64_t kvk_capacity_kept_blocks(const struct kvk_capacity *capacity, uint32_t group,
                                  uint64_t tokens)
{
    KVK_ASSERT(group < capacity->group_count);
    const struct kvk_capacity_layers *layers = &capacity->groups[group];
    if (layers->cross) {
        return blocks_of(capacity, capacity->encoder_tokens);
    }
    if (layers->window == 0 || tokens <= layers->window) {
        return blocks_of(capacity, tokens);
    }
    uint64_t first = (tokens - layers->window) / capacity->block_tokens;
    uint64_t sinks = blocks_of(capacity, layers->sinks);
    return blocks_of(capacity, tokens) - (first > sinks ? first - sinks : 0);
}

uint64_t kvk_capacity_sequence_bytes(const struct kvk_capacity *capacity, uint64_t tokens)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        bytes += kvk_capacity_kept_blocks(capacity, i, tokens) *
                 kvk_capacity_rank_block_bytes(capacity, i);
    }
    return bytes;
}

uint64_t kvk_capacity_block_bytes(const struct kvk_capacity *capacity)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        bytes += capacity->groups[i].cross ? 0 : kvk_capacity_rank_block_bytes(capacity, i);
    }
    return bytes;
}

uint64_t kvk_capacity_tokens_max(const struct kvk_capacity *capacity, uint64_t budget_bytes)
{
    uint64_t low = 0; /* in blocks: fits */
    uint64_t high = KVK_CAPACITY_TOKENS_MAX / capacity->block_tokens;
    if (kvk_capacity_sequence_bytes(capacity, high * capacity->block_tokens) <= budget_bytes) {
        return UINT64_MAX;
    }
    if (kvk_capacity_sequence_bytes(capacity, 0) > budget_bytes) {
        return 0; /* not even the encoder's part */
    }
    while (high - low > 1) {
        uint64_t middle = low + (high - low) / 2;
        if (kvk_capacity_sequence_bytes(capacity, middle * capacity->block_tokens) <=
            budget_bytes) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low * capacity->block_tokens;
}

/* What each sequence needs beside the whole shared blocks, and these, once. */
uint64_t kvk_capacity_sequences(const struct kvk_capacity *capacity,
                                const struct kvk_capacity_load *load, uint64_t budget_bytes)
{
    KVK_ASSERT(load->shared_tokens <= load->prompt_tokens);
    uint64_t output = load->preempt ? (load->output_tokens + 1) / 2 : load->output_tokens;
    uint64_t tokens = load->prompt_tokens + output;
    uint64_t whole = load->shared_tokens / capacity->block_tokens;
    uint64_t shared_bytes = 0;
    uint64_t own_bytes = 0;
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        uint64_t block_bytes = kvk_capacity_rank_block_bytes(capacity, i);
        uint64_t kept = kvk_capacity_kept_blocks(capacity, i, tokens);
        uint64_t shared = 0;
        if (!capacity->groups[i].cross) {
            /* Of the shared blocks, those that are still kept at that length. */
            uint64_t all = blocks_of(capacity, tokens);
            uint64_t behind = all - kept; /* let go by the window, but for the sinks */
            shared = whole > behind ? whole - behind : 0;
            shared = shared < kept ? shared : kept;
        }
        shared_bytes += shared * block_bytes;
        own_bytes += (kept - shared) * block_bytes;
    }
    if (shared_bytes > budget_bytes) {
        return 0;
    }
    /* Where nothing is its own (all shared, nothing written) as many as anybody asks for. */
    return own_bytes == 0 ? UINT64_MAX : (budget_bytes - shared_bytes) / own_bytes;
}
