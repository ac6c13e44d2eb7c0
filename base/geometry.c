#include "base/geometry.h"

#include <stdio.h>

#include "base/assert.h"

/* ---- Checking ---- */

static enum kvk_status refuse(struct kvk_error *error, const char *prefix, const char *name,
                              uint64_t value, uint64_t limit, const char *reason)
{
    char field[KVK_ERROR_FIELD_SIZE];
    (void)snprintf(field, sizeof(field), "%s%s", prefix != NULL ? prefix : "", name);
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit, "%s: %llu: %s",
                          field, (unsigned long long)value, reason);
}

static enum kvk_status check_count(struct kvk_error *error, const char *prefix, const char *name,
                                   uint32_t value, uint32_t limit)
{
    if (value >= 1 && value <= limit) {
        return KVK_OK;
    }
    char reason[64];
    (void)snprintf(reason, sizeof(reason), "must be 1 to %u", limit);
    return refuse(error, prefix, name, value, limit, reason);
}

/* Counts that every layout needs: they decide how many shards there are. */
static enum kvk_status check_counts(const struct kvk_geometry *geometry, const char *prefix,
                                    struct kvk_error *error)
{
    const struct {
        const char *name;
        uint32_t value;
        uint32_t limit;
    } counts[] = {
        {"layers", geometry->layers, KVK_LAYER_COUNT_MAX},
        {"block_tokens", geometry->block_tokens, KVK_BLOCK_TOKENS_MAX},
        {"tensor_shards", geometry->tensor_shards, KVK_SHARD_COUNT_MAX},
        {"pipeline_shards", geometry->pipeline_shards, KVK_SHARD_COUNT_MAX},
    };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        enum kvk_status status =
            check_count(error, prefix, counts[i].name, counts[i].value, counts[i].limit);
        if (status != KVK_OK) {
            return status;
        }
    }
    if (geometry->pipeline_shards > geometry->layers) {
        return refuse(error, prefix, "pipeline_shards", geometry->pipeline_shards, geometry->layers,
                      "must not be more than layers");
    }
    uint32_t ranks = geometry->tensor_shards * geometry->pipeline_shards;
    if (ranks > KVK_SHARD_COUNT_MAX) {
        return refuse(error, prefix, "tensor_shards", ranks, KVK_SHARD_COUNT_MAX,
                      "tensor_shards x pipeline_shards is over the limit");
    }
    return KVK_OK;
}

static enum kvk_status check_view(const struct kvk_geometry *geometry, const char *prefix,
                                  struct kvk_error *error)
{
    if (geometry->layout != KVK_LAYOUT_OPAQUE && geometry->latent) {
        if (geometry->head_size_v > geometry->head_size_k) {
            return refuse(error, prefix, "head_size_v", geometry->head_size_v,
                          geometry->head_size_k, "must not be more than head_size_k where latent");
        }
        if (geometry->format_v != KVK_FORMAT_NONE && geometry->format_v != geometry->format_k) {
            return refuse(error, prefix, "format_v", geometry->format_v, geometry->format_k,
                          "must be format_k or none where latent");
        }
    }
    if (geometry->attention != KVK_ATTENTION_SELF && geometry->attention != KVK_ATTENTION_CROSS) {
        return refuse(error, prefix, "attention", geometry->attention, 0, "must be self or cross");
    }
    if (geometry->attention == KVK_ATTENTION_CROSS && geometry->window != 0) {
        return refuse(error, prefix, "window", geometry->window, 0,
                      "must be 0 for cross-attention");
    }
    if (geometry->sinks != 0 && geometry->window == 0) {
        return refuse(error, prefix, "sinks", geometry->sinks, 0, "needs a window");
    }
    return KVK_OK;
}

/* K and V of one layer follow each other; each must begin on a multiple of its value or scale. */
static bool values_are_aligned(const struct kvk_geometry *geometry)
{
    if (geometry->latent) {
        return true;
    }
    struct kvk_part k =
        kvk_part_of(geometry->format_k, false, 1, geometry->block_tokens, geometry->head_size_k);
    struct kvk_part v =
        kvk_part_of(geometry->format_v, true, 1, geometry->block_tokens, geometry->head_size_v);
    return k.size_bytes % kvk_format_align(geometry->format_v) == 0 &&
           v.size_bytes % kvk_format_align(geometry->format_k) == 0;
}

/* Compact formats: what their kernels can read. */
static enum kvk_status check_compact(const struct kvk_geometry *geometry, const char *prefix,
                                     struct kvk_error *error)
{
    enum kvk_format format_k = geometry->format_k;
    enum kvk_format format_v = geometry->latent ? format_k : geometry->format_v;

    if (format_k != format_v &&
        (kvk_format_is_compact(format_k) || kvk_format_is_compact(format_v))) {
        return refuse(error, prefix, "format_v", format_v, format_k,
                      "a compact format is one of both K and V");
    }
    if (format_k == KVK_FORMAT_INT8_CHANNEL && geometry->latent) {
        return refuse(error, prefix, "format_k", format_k, 0,
                      "int8_channel scales K and V in different ways, so V cannot be a view of K");
    }
    if (!kvk_format_fits(format_k, geometry->head_size_k)) {
        return refuse(error, prefix, "head_size_k", geometry->head_size_k, KVK_INT8_32_VALUES,
                      "must be a multiple of 32 in int8_32");
    }
    if (!kvk_format_fits(format_v, geometry->head_size_v)) {
        return refuse(error, prefix, "head_size_v", geometry->head_size_v, KVK_INT8_32_VALUES,
                      "must be a multiple of 32 in int8_32");
    }
    return KVK_OK;
}

static enum kvk_status check_heads(const struct kvk_geometry *geometry, const char *prefix,
                                   struct kvk_error *error)
{
    const struct {
        const char *name;
        uint32_t value;
        uint32_t limit;
    } counts[] = {
        {"kv_heads", geometry->kv_heads, KVK_HEAD_COUNT_MAX},
        {"head_size_k", geometry->head_size_k, KVK_HEAD_SIZE_MAX},
        {"head_size_v", geometry->head_size_v, KVK_HEAD_SIZE_MAX},
    };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        enum kvk_status status =
            check_count(error, prefix, counts[i].name, counts[i].value, counts[i].limit);
        if (status != KVK_OK) {
            return status;
        }
    }
    if (!kvk_format_is_known(geometry->format_k)) {
        return refuse(error, prefix, "format_k", geometry->format_k, 0, "no such format");
    }
    if (!geometry->latent && !kvk_format_is_known(geometry->format_v)) {
        return refuse(error, prefix, "format_v", geometry->format_v, 0, "no such format");
    }
    if (geometry->opaque_bytes != 0) {
        return refuse(error, prefix, "opaque_bytes", geometry->opaque_bytes, 0,
                      "only an opaque layout has it");
    }
    enum kvk_status status = check_compact(geometry, prefix, error);
    if (status == KVK_OK && !values_are_aligned(geometry)) {
        status = refuse(error, prefix, "format_v", geometry->format_v, 0,
                        "K and V of these sizes would not be aligned in one block");
    }
    return status;
}

static enum kvk_status check_opaque(const struct kvk_geometry *geometry, const char *prefix,
                                    struct kvk_error *error)
{
    if (geometry->opaque_bytes == 0 || geometry->opaque_bytes > KVK_BLOCK_BYTES_MAX) {
        return refuse(error, prefix, "opaque_bytes", geometry->opaque_bytes, KVK_BLOCK_BYTES_MAX,
                      "must be 1 to 1073741824");
    }
    return KVK_OK;
}

enum kvk_status kvk_geometry_check(const struct kvk_geometry *geometry, const char *prefix,
                                   struct kvk_error *error)
{
    enum kvk_status status = check_counts(geometry, prefix, error);
    if (status != KVK_OK) {
        return status;
    }
    if (geometry->layout == KVK_LAYOUT_OPAQUE) {
        status = check_opaque(geometry, prefix, error);
    } else if (geometry->layout == KVK_LAYOUT_HEADS_FIRST ||
               geometry->layout == KVK_LAYOUT_TOKENS_FIRST) {
        status = check_heads(geometry, prefix, error);
    } else {
        status = refuse(error, prefix, "layout", geometry->layout, 0,
                        "must be heads first, tokens first or opaque");
    }
    if (status != KVK_OK) {
        return status;
    }
    status = check_view(geometry, prefix, error);
    if (status != KVK_OK) {
        return status;
    }
    /* The first shard has the most layers and heads. The limits above keep this far below 2^64. */
    uint64_t shard_bytes = kvk_geometry_shard_bytes(geometry, 0);
    if (shard_bytes > KVK_BLOCK_BYTES_MAX) {
        return refuse(error, prefix, "block_tokens", shard_bytes, KVK_BLOCK_BYTES_MAX,
                      "bytes of one shard of one block, over the limit of 1073741824");
    }
    return KVK_OK;
}

/* ---- Ranks and shards ---- */

/* One dealer's hand: `count` things over `hands`, the first hands take the rest. */
static uint32_t deal_count(uint32_t count, uint32_t hands, uint32_t hand)
{
    return count / hands + (hand < count % hands ? 1 : 0);
}

static uint32_t deal_first(uint32_t count, uint32_t hands, uint32_t hand)
{
    uint32_t rest = count % hands;
    return hand * (count / hands) + (hand < rest ? hand : rest);
}

static uint32_t shard_pipeline(const struct kvk_geometry *geometry, uint32_t shard)
{
    KVK_ASSERT(shard < kvk_geometry_shard_count(geometry));
    return geometry->latent ? shard : shard / geometry->tensor_shards;
}

uint32_t kvk_geometry_rank_count(const struct kvk_geometry *geometry)
{
    return geometry->tensor_shards * geometry->pipeline_shards;
}

uint32_t kvk_geometry_shard_count(const struct kvk_geometry *geometry)
{
    return geometry->latent ? geometry->pipeline_shards : kvk_geometry_rank_count(geometry);
}

uint32_t kvk_geometry_rank_shard(const struct kvk_geometry *geometry, uint32_t rank)
{
    KVK_ASSERT(rank < kvk_geometry_rank_count(geometry));
    return geometry->latent ? rank / geometry->tensor_shards : rank;
}

uint32_t kvk_geometry_shard_layers(const struct kvk_geometry *geometry, uint32_t shard)
{
    return deal_count(geometry->layers, geometry->pipeline_shards, shard_pipeline(geometry, shard));
}

uint32_t kvk_geometry_shard_first_layer(const struct kvk_geometry *geometry, uint32_t shard)
{
    return deal_first(geometry->layers, geometry->pipeline_shards, shard_pipeline(geometry, shard));
}

uint32_t kvk_geometry_shard_heads(const struct kvk_geometry *geometry, uint32_t shard)
{
    KVK_ASSERT(shard < kvk_geometry_shard_count(geometry));
    if (geometry->latent) {
        return geometry->kv_heads;
    }
    if (geometry->kv_heads < geometry->tensor_shards) {
        return geometry->kv_heads == 0 ? 0 : 1;
    }
    return deal_count(geometry->kv_heads, geometry->tensor_shards, shard % geometry->tensor_shards);
}

uint32_t kvk_geometry_shard_first_head(const struct kvk_geometry *geometry, uint32_t shard)
{
    KVK_ASSERT(shard < kvk_geometry_shard_count(geometry));
    if (geometry->latent) {
        return 0;
    }
    uint32_t tensor_rank = shard % geometry->tensor_shards;
    if (geometry->kv_heads < geometry->tensor_shards) {
        /* Neighbouring ranks have the same head, as engines replicate them. */
        return tensor_rank * geometry->kv_heads / geometry->tensor_shards;
    }
    return deal_first(geometry->kv_heads, geometry->tensor_shards, tensor_rank);
}

/* ---- Bytes ---- */

/* Of a layer of `heads` heads. */
static struct kvk_part part_of(const struct kvk_geometry *geometry, uint32_t heads, bool is_value)
{
    if (!is_value) {
        return kvk_part_of(geometry->format_k, false, heads, geometry->block_tokens,
                           geometry->head_size_k);
    }
    if (geometry->latent) { /* a view of K */
        return kvk_part_of(KVK_FORMAT_NONE, true, heads, geometry->block_tokens,
                           geometry->head_size_v);
    }
    return kvk_part_of(geometry->format_v, true, heads, geometry->block_tokens,
                       geometry->head_size_v);
}

struct kvk_part kvk_geometry_part(const struct kvk_geometry *geometry, uint32_t shard,
                                  bool is_value)
{
    KVK_ASSERT(geometry->layout != KVK_LAYOUT_OPAQUE);
    return part_of(geometry, kvk_geometry_shard_heads(geometry, shard), is_value);
}

/* K and V of one layer of `heads` heads of one block. */
static uint64_t heads_bytes(const struct kvk_geometry *geometry, uint32_t heads)
{
    return part_of(geometry, heads, false).size_bytes + part_of(geometry, heads, true).size_bytes;
}

/* K and V of one layer of one shard of one block. */
static uint64_t layer_bytes(const struct kvk_geometry *geometry, uint32_t shard)
{
    return heads_bytes(geometry, kvk_geometry_shard_heads(geometry, shard));
}

uint64_t kvk_geometry_shard_bytes(const struct kvk_geometry *geometry, uint32_t shard)
{
    if (geometry->layout == KVK_LAYOUT_OPAQUE) {
        KVK_ASSERT(shard < kvk_geometry_shard_count(geometry));
        return geometry->opaque_bytes;
    }
    return kvk_geometry_shard_layers(geometry, shard) * layer_bytes(geometry, shard);
}

uint64_t kvk_geometry_k_offset(const struct kvk_geometry *geometry, uint32_t shard,
                               uint32_t shard_layer)
{
    KVK_ASSERT(geometry->layout != KVK_LAYOUT_OPAQUE);
    KVK_ASSERT(shard_layer < kvk_geometry_shard_layers(geometry, shard));
    return shard_layer * layer_bytes(geometry, shard);
}

uint64_t kvk_geometry_v_offset(const struct kvk_geometry *geometry, uint32_t shard,
                               uint32_t shard_layer)
{
    uint64_t k_offset = kvk_geometry_k_offset(geometry, shard, shard_layer);
    if (geometry->latent) {
        return k_offset;
    }
    return k_offset + kvk_geometry_part(geometry, shard, false).size_bytes;
}

uint64_t kvk_geometry_block_bytes(const struct kvk_geometry *geometry)
{
    uint64_t bytes = 0;
    uint32_t shard_count = kvk_geometry_shard_count(geometry);
    for (uint32_t shard = 0; shard < shard_count; shard++) {
        bytes += kvk_geometry_shard_bytes(geometry, shard);
    }
    return bytes;
}

uint64_t kvk_geometry_token_bytes(const struct kvk_geometry *geometry)
{
    if (geometry->layout == KVK_LAYOUT_OPAQUE) {
        uint64_t block_bytes = kvk_geometry_block_bytes(geometry);
        return (block_bytes + geometry->block_tokens - 1) / geometry->block_tokens;
    }
    uint64_t bytes = heads_bytes(geometry, geometry->kv_heads);
    return geometry->layers * ((bytes + geometry->block_tokens - 1) / geometry->block_tokens);
}

uint64_t kvk_geometry_window_start(const struct kvk_geometry *geometry, uint64_t position)
{
    if (geometry->window == 0 || position < geometry->window) {
        return 0;
    }
    return position - geometry->window + 1;
}

bool kvk_geometry_equal(const struct kvk_geometry *a, const struct kvk_geometry *b)
{
    return a->layers == b->layers && a->kv_heads == b->kv_heads &&
           a->head_size_k == b->head_size_k && a->head_size_v == b->head_size_v &&
           a->block_tokens == b->block_tokens && a->format_k == b->format_k &&
           a->format_v == b->format_v && a->layout == b->layout && a->attention == b->attention &&
           a->tensor_shards == b->tensor_shards && a->pipeline_shards == b->pipeline_shards &&
           a->latent == b->latent && a->window == b->window && a->sinks == b->sinks &&
           a->opaque_bytes == b->opaque_bytes;
}
