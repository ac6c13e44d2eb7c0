/*
 * Scales of compact formats, before a block is sealed for good: one that is not finite, or
 * negative, would spoil every answer that the block has a part in, and kernels rely on there being
 * none.
 */
#include <math.h>

#include "base/assert.h"
#include "daemon/sequence_internal.h"
#include "gpu/values.h"

/* Where the shards of a block lie; read with the lock, used without. */
struct places {
    const struct kvk_group *group;
    const uint8_t *shards[KVK_SHARD_COUNT_MAX];
};

static bool scale_is_good(float scale)
{
    return isfinite(scale) && scale >= 0;
}

/* The first scale of a part that is not good; false: all are. */
static bool part_is_bad(const struct kvk_part *part, const uint8_t *bytes, float *scale)
{
    uint64_t rows = (uint64_t)part->heads * part->tokens;
    enum kvk_format stored =
        part->format == KVK_FORMAT_FP8_E4M3 ? KVK_FORMAT_FP32 : KVK_FORMAT_BF16;

    if (part->format == KVK_FORMAT_INT8_32) {
        for (uint64_t i = 0; i < rows * part->row_bytes; i += KVK_INT8_32_BYTES) {
            *scale = kvk_value_widen(KVK_FORMAT_FP16, bytes + i, 0);
            if (!scale_is_good(*scale)) {
                return true;
            }
        }
        return false;
    }
    uint64_t count = part->scale_stride * part->heads / kvk_format_bytes(stored);
    for (uint64_t i = 0; i < count; i++) {
        *scale = kvk_value_widen(stored, bytes + part->scales_offset, i);
        if (!scale_is_good(*scale)) {
            return true;
        }
    }
    return false;
}

static enum kvk_status shard_check(const struct places *places, uint32_t shard, uint64_t block,
                                   struct kvk_error *error)
{
    const struct kvk_geometry *geometry = &places->group->geometry;
    uint32_t layers = kvk_geometry_shard_layers(geometry, shard);

    for (uint32_t layer = 0; layer < layers; layer++) {
        for (int is_value = 0; is_value < (geometry->latent ? 1 : 2); is_value++) {
            const struct kvk_part part = kvk_geometry_part(geometry, shard, is_value != 0);
            const uint8_t *bytes = places->shards[shard];
            float scale;
            bytes += is_value != 0 ? kvk_geometry_v_offset(geometry, shard, layer)
                                   : kvk_geometry_k_offset(geometry, shard, layer);
            if (part_is_bad(&part, bytes, &scale)) {
                return kvk_fail_limit(
                    error, KVK_INVALID, KVK_CAUSE_FIELD, "scales", block, 0,
                    "block %llu, shard %u, layer %u: a scale of %s is %g; scales must be finite "
                    "and not negative",
                    (unsigned long long)block, shard,
                    kvk_geometry_shard_first_layer(geometry, shard) + layer,
                    is_value != 0 ? "V" : "K", (double)scale);
            }
        }
    }
    return KVK_OK;
}

/* False: memory that the processor cannot read. */
static bool places_find(const struct kvk_cache *cache, uint32_t id, struct places *places)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    enum kvk_tier tier = kvk_block_tier(block);

    places->group = kvk_group_of(cache, block);
    if (places->group->tiers[tier].regions[0].fd < 0) {
        return false;
    }
    for (uint32_t shard = 0; shard < places->group->shard_count; shard++) {
        places->shards[shard] = kvk_block_address(cache, block, tier, shard);
    }
    return true;
}

enum kvk_status kvk_block_scales_check_drops(struct kvk_cache *cache, uint32_t id, uint64_t number,
                                             bool keep_lock, struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    struct places places;

    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (!places_find(cache, id, &places) || places.group->geometry.layout == KVK_LAYOUT_OPAQUE ||
        !kvk_format_is_compact(places.group->geometry.format_k)) {
        return KVK_OK;
    }
    if (!keep_lock) {
        kvk_unlock(&cache->lock);
    }
    for (uint32_t shard = 0; shard < places.group->shard_count && status == KVK_OK; shard++) {
        status = shard_check(&places, shard, number, error);
    }
    if (!keep_lock) {
        kvk_lock(&cache->lock);
    }
    return status;
}
