/*
 * Twins: a block that was computed again though it was cached. The later copy stays private, and
 * the two are compared: that they differ by more than rounding means that the cache serves, under
 * one identity, what was computed differently: a wrong reuse.
 *
 * Equal checksums are equal bytes, and most cost no more than that. Where they differ, values are
 * compared within the tolerance of their format, without the lock, and of one Seal's only so many
 * bytes, spread evenly over its twins: a fault of this kind shows in all blocks of a space.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/sequence_internal.h"
#include "gpu/values.h"

/* Compared by one Seal: some milliseconds. At least one block. */
#define COMPARE_BYTES_MAX (UINT64_C(8) << 20)

/* How far K and V computed twice may lie apart, as a share of their size: other batches, other
 * orders of summing. What was computed for other tokens is off by all of it. */
static double tolerance_of(enum kvk_format format)
{
    switch (format) {
    case KVK_FORMAT_FP32:
        return 1e-3;
    case KVK_FORMAT_FP16:
        return 2e-2;
    case KVK_FORMAT_BF16:
        return 8e-2;
    case KVK_FORMAT_INT8_CHANNEL: /* and where that rounds the other way */
    case KVK_FORMAT_INT8_32:
        return 1e-1;
    case KVK_FORMAT_FP8_E4M3:
        return 1.5e-1;
    case KVK_FORMAT_NONE:
        break;
    }
    return 0;
}

/* Either of two may have been on disk, where another format rounds more. */
static double group_tolerance(const struct kvk_group *group, enum kvk_format own)
{
    return fmax(tolerance_of(own),
                tolerance_of(kvk_tier_form_format(&group->forms[KVK_TIER_DISK])));
}

/* Relative L2 distance of two parts: 0 where they are equal, about 1.4 where they have nothing to
 * do with each other. A NaN equals a NaN only: else infinite. Which way tokens and heads lie makes
 * no difference where values have no scales beside them; where they have, heads come first. */
static double distance_of(const struct kvk_part *part, const uint8_t *a, const uint8_t *b)
{
    uint64_t row_count = (uint64_t)part->heads * part->tokens;
    double distance = 0;
    double size = 0;
    for (uint64_t i = 0; i < row_count * part->head_size; i++) {
        uint32_t row = (uint32_t)(i / part->head_size);
        uint32_t index = (uint32_t)(i % part->head_size);
        double x = kvk_part_value(part, a, row / part->tokens, row % part->tokens, index);
        double y = kvk_part_value(part, b, row / part->tokens, row % part->tokens, index);
        if (isnan(x) || isnan(y)) {
            if (isnan(x) != isnan(y)) {
                return INFINITY;
            }
            continue;
        }
        if (x != y) { /* equal infinities are no distance */
            distance += (x - y) * (x - y);
        }
        size += x * x + y * y;
    }
    return distance == 0 ? 0 : sqrt(distance / (size / 2));
}

/* Where the shards of both lie; read with the lock, used without. */
struct comparison {
    const struct kvk_group *group;
    const uint8_t *ours[KVK_SHARD_COUNT_MAX];
    const uint8_t *winner[KVK_SHARD_COUNT_MAX];
    struct kvk_wrong_reuse found; /* where they differ */
};

/* K, or V, of one layer; true: beyond the tolerance, and noted. */
static bool part_differs(struct comparison *comparison, uint32_t shard, uint32_t layer,
                         bool is_value, uint64_t begin)
{
    const struct kvk_geometry *geometry = &comparison->group->geometry;
    const struct kvk_part part = kvk_geometry_part(geometry, shard, is_value);
    double tolerance = group_tolerance(comparison->group, part.format);
    double distance =
        distance_of(&part, comparison->ours[shard] + begin, comparison->winner[shard] + begin);
    if (distance <= tolerance) {
        return false;
    }
    comparison->found.shard = shard;
    comparison->found.layer = kvk_geometry_shard_first_layer(geometry, shard) + layer;
    comparison->found.is_value = is_value;
    comparison->found.distance = distance;
    comparison->found.tolerance = tolerance;
    return true;
}

static bool shard_differs(struct comparison *comparison, uint32_t shard)
{
    const struct kvk_geometry *geometry = &comparison->group->geometry;
    uint64_t size_bytes = comparison->group->shard_bytes[shard];
    if (memcmp(comparison->ours[shard], comparison->winner[shard], size_bytes) == 0) {
        return false;
    }
    if (geometry->layout == KVK_LAYOUT_OPAQUE) {
        comparison->found.shard = shard;
        comparison->found.opaque = true;
        return true;
    }
    uint32_t layers = kvk_geometry_shard_layers(geometry, shard);
    for (uint32_t layer = 0; layer < layers; layer++) {
        uint64_t k = kvk_geometry_k_offset(geometry, shard, layer);
        uint64_t v = kvk_geometry_v_offset(geometry, shard, layer);
        if (part_differs(comparison, shard, layer, false, k) ||
            (!geometry->latent && part_differs(comparison, shard, layer, true, v))) {
            return true;
        }
    }
    return false;
}

static bool comparison_differs(struct comparison *comparison)
{
    for (uint32_t s = 0; s < comparison->group->shard_count; s++) {
        if (shard_differs(comparison, s)) {
            return true;
        }
    }
    return false;
}

/* ---- With the lock ---- */

/* Both checksums are taken, and equal: so are the bytes. */
static bool is_same(const struct kvk_cache *cache, const struct kvk_duplicate *duplicate)
{
    const struct kvk_block *ours = kvk_index_block(cache->index, duplicate->ours);
    const struct kvk_block *winner = kvk_index_block(cache->index, duplicate->winner);
    const struct kvk_group *group = kvk_group_of(cache, ours);
    const uint64_t *a = kvk_block_checksums(cache, ours, (enum kvk_tier)duplicate->ours_tier);
    const uint64_t *b = kvk_block_checksums(cache, winner, (enum kvk_tier)duplicate->winner_tier);
    for (uint32_t s = 0; s < group->shard_count; s++) {
        if (a[s] == 0 || a[s] != b[s]) {
            return false;
        }
    }
    return true;
}

/* Memory that the processor cannot read is not compared here, nor what has another format. */
static bool is_readable(const struct kvk_group *group, const struct kvk_duplicate *duplicate)
{
    return !group->forms[duplicate->ours_tier].compact &&
           !group->forms[duplicate->winner_tier].compact &&
           group->tiers[duplicate->ours_tier].regions[0].fd >= 0 &&
           group->tiers[duplicate->winner_tier].regions[0].fd >= 0;
}

static void comparison_find(const struct kvk_cache *cache, const struct kvk_duplicate *duplicate,
                            struct comparison *comparison)
{
    const struct kvk_block *ours = kvk_index_block(cache->index, duplicate->ours);
    const struct kvk_block *winner = kvk_index_block(cache->index, duplicate->winner);
    const struct kvk_group *group = kvk_group_of(cache, ours);
    *comparison = (struct comparison){.group = group};
    for (uint32_t s = 0; s < group->shard_count; s++) {
        comparison->ours[s] =
            kvk_block_address(cache, ours, (enum kvk_tier)duplicate->ours_tier, s);
        comparison->winner[s] =
            kvk_block_address(cache, winner, (enum kvk_tier)duplicate->winner_tier, s);
    }
    comparison->found.space_id = group->space->id;
    comparison->found.group = group->index;
    comparison->found.key = winner->key;
    comparison->found.position = winner->position;
}

static void found_note(struct kvk_cache *cache, struct kvk_wrong_reuse *found)
{
    if (found->opaque) {
        cache->stats.opaque_differences++;
        return; /* nothing more is known of bytes that we cannot read: no fault by itself */
    }
    found->time_ns = kvk_clock_now(cache->clock);
    cache->wrong_reuses[cache->stats.wrong_reuse % KVK_WRONG_REUSE_COUNT] = *found;
    cache->stats.wrong_reuse++;
    kvk_log(KVK_LOG_ERROR, "wrong_reuse",
            "space=%llu group=%u position=%u shard=%u layer=%u part=%s distance=%.3g "
            "tolerance=%.3g",
            (unsigned long long)found->space_id, found->group, found->position, found->shard,
            found->layer, found->is_value ? "v" : "k", found->distance, found->tolerance);
}

static void compare_drops(struct kvk_cache *cache, const struct kvk_caller *caller,
                          const struct kvk_duplicate *duplicate)
{
    struct comparison comparison;
    comparison_find(cache, duplicate, &comparison);
    /* Where the caller may not block the whole call was of few bytes. */
    struct kvk_space *space = comparison.group->space;
    space->reference_count++;
    if (caller->may_block) {
        kvk_unlock(&cache->lock);
    }
    bool differs = comparison_differs(&comparison);
    if (caller->may_block) {
        kvk_lock(&cache->lock);
    }
    space->reference_count--;
    cache->stats.twins_compared++;
    if (differs) {
        found_note(cache, &comparison.found);
    }
}

/* Of those whose checksums differ, every so many are compared. */
static uint32_t stride_of(const struct kvk_cache *cache, const struct kvk_settling *settling)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < settling->duplicate_count; i++) {
        const struct kvk_duplicate *duplicate = &settling->duplicates[i];
        const struct kvk_group *group =
            kvk_group_of(cache, kvk_index_block(cache->index, duplicate->ours));
        bytes += is_same(cache, duplicate) ? 0 : group->block_bytes;
    }
    return (uint32_t)(bytes / COMPARE_BYTES_MAX) + 1;
}

void kvk_settling_finish_drops(struct kvk_cache *cache, const struct kvk_caller *caller,
                               struct kvk_settling *settling)
{
    uint32_t stride = settling->duplicate_count > 0 ? stride_of(cache, settling) : 1;
    uint32_t unlike = 0;
    for (uint32_t i = 0; i < settling->duplicate_count; i++) {
        const struct kvk_duplicate *duplicate = &settling->duplicates[i];
        const struct kvk_group *group =
            kvk_group_of(cache, kvk_index_block(cache->index, duplicate->ours));
        if (is_same(cache, duplicate)) {
            cache->stats.twins_equal++;
        } else if (!is_readable(group, duplicate) || unlike++ % stride != 0) {
            cache->stats.twins_left_out++;
        } else {
            compare_drops(cache, caller, duplicate);
        }
        kvk_block_return(cache, duplicate->ours, (enum kvk_tier)duplicate->ours_tier);
        kvk_block_return(cache, duplicate->winner, (enum kvk_tier)duplicate->winner_tier);
    }
    free(settling->duplicates);
    *settling = (struct kvk_settling){0};
}
