/*
 * The memory of a layer group: per tier its files of slots, and the tables beside them. Everything
 * is address space until slabs come, so a space that is not used costs next to nothing.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"
#include "daemon/kept.h"
#include "daemon/sidecar.h"
#include "daemon/space_internal.h"
#include "daemon/warm.h"
#include "base/pages.h"

/* A first block's cost per byte where a space does not say what prefilling costs: that of a model
 * of eight billion parameters, so that it competes on equal terms with those that do. */
#define DEFAULT_FLOPS_PER_BYTE 122880.0

static size_t checksums_size(const struct kvk_group *group, uint32_t slots)
{
    return (size_t)slots * group->shard_count * sizeof(uint64_t);
}

/* What one block of the space is worth per byte in the tier, against blocks of other spaces. */
static float weight_of(const struct kvk_space *space, int tier)
{
    double own_bytes = 0;
    double bytes = 0;
    for (uint32_t i = 0; i < space->group_count; i++) {
        own_bytes += (double)space->groups[i]->block_bytes;
        bytes += (double)space->groups[i]->forms[tier].block_bytes;
    }
    if (space->flops_per_token <= 0) {
        return (float)(DEFAULT_FLOPS_PER_BYTE * (own_bytes / bytes));
    }
    double half = space->block_tokens / 2.0;
    double flops =
        space->block_tokens * (space->flops_per_token + space->flops_per_token_position * half);
    return (float)fmin(fmax(flops / bytes, 1e-30), 1e30); /* whatever a request claims */
}

void kvk_space_weigh(struct kvk_space *space)
{
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        float weight = weight_of(space, tier);
        KVK_ASSERT(weight > 0 && isfinite(weight));
        for (uint32_t i = 0; i < space->group_count; i++) {
            struct kvk_group_tier *at = &space->groups[i]->tiers[tier];
            at->queue.weight = weight;
            at->clean.weight = weight;
            at->held.weight = weight;
        }
    }
}

static struct kvk_kept_name slots_name(const struct kvk_group *group, enum kvk_tier tier,
                                       uint32_t shard)
{
    return (struct kvk_kept_name){.kind = KVK_KEPT_SLOTS,
                                  .space_id = group->space->id,
                                  .group = group->index,
                                  .tier = (uint32_t)tier,
                                  .shard = shard};
}

static struct kvk_kept_name generations_name(const struct kvk_group *group, enum kvk_tier tier)
{
    return (struct kvk_kept_name){.kind = KVK_KEPT_GENERATIONS,
                                  .space_id = group->space->id,
                                  .group = group->index,
                                  .tier = (uint32_t)tier};
}

/* Is every file of the tier there that a daemon before made, and large enough for it now? */
static bool regions_are_kept(const struct kvk_cache *cache, const struct kvk_group *group,
                             enum kvk_tier tier, uint64_t slots)
{
    const struct kvk_kept_name generations = generations_name(group, tier);
    bool kept =
        group->sidecar != NULL && kvk_kept_has(cache, &generations, slots * sizeof(uint32_t));
    for (uint32_t shard = 0; kept && shard < group->shard_count; shard++) {
        const struct kvk_kept_name name = slots_name(group, tier, shard);
        kept = kvk_kept_has(cache, &name, slots * group->forms[tier].shard_bytes[shard]);
    }
    return kept;
}

/* All of them are adopted, or none: then those that were are freed again. */
static enum kvk_status regions_adopt(struct kvk_cache *cache, struct kvk_group *group,
                                     enum kvk_tier tier, uint64_t slots, struct kvk_error *error)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_device *device = cache->tiers[tier].device;
    const struct kvk_kept_name generations = generations_name(group, tier);
    enum kvk_status status = kvk_kept_adopt(cache, cache->memory, &generations,
                                            slots * sizeof(uint32_t), 0, &at->generations, error);
    for (uint32_t shard = 0; status == KVK_OK && shard < group->shard_count; shard++) {
        const struct kvk_kept_name name = slots_name(group, tier, shard);
        status = kvk_kept_adopt(cache, device, &name, slots * group->forms[tier].shard_bytes[shard],
                                group->forms[tier].shard_bytes[shard], &at->regions[shard], error);
    }
    return status;
}

/* Of a public space: other tenants' processes map it, and nothing of it outlives the daemon. */
static enum kvk_status public_regions_create(struct kvk_cache *cache, struct kvk_group *group,
                                             enum kvk_tier tier, struct kvk_error *error)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_device *device = cache->tiers[tier].device;
    uint64_t slots = kvk_arena_slot_capacity(&at->arena);
    if (device->ops->alloc_public == NULL || cache->memory->ops->alloc_public == NULL) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "memory of the host tier cannot be made public");
    }
    enum kvk_status status = KVK_OK;
    for (uint32_t shard = 0; status == KVK_OK && shard < group->shard_count; shard++) {
        status = device->ops->alloc_public(device, slots * group->forms[tier].shard_bytes[shard],
                                           "kvkeep-public", &at->regions[shard], error);
    }
    if (status == KVK_OK) {
        status = cache->memory->ops->alloc_public(cache->memory, slots * sizeof(uint32_t),
                                                  "kvkeep-public", &at->generations, error);
    }
    return status;
}

static void public_region_free(struct kvk_device *device, struct kvk_region *region)
{
    if (region->size_bytes > 0) {
        device->ops->free(device, region);
    }
}

static void regions_free(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    if (group->space->is_public) {
        for (uint32_t shard = 0; shard < group->shard_count; shard++) {
            public_region_free(cache->tiers[tier].device, &at->regions[shard]);
        }
        public_region_free(cache->memory, &at->generations);
        return;
    }
    const struct kvk_kept_name generations = generations_name(group, tier);
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        const struct kvk_kept_name name = slots_name(group, tier, shard);
        struct kvk_device *device = cache->tiers[tier].device;
        if (at->lent_for_good && at->regions[shard].size_bytes > 0) {
            device->ops->leave(device, &at->regions[shard]);
        } else {
            kvk_kept_free(cache, device, &name, &at->regions[shard]);
        }
    }
    kvk_kept_free(cache, cache->memory, &generations, &at->generations);
}

static enum kvk_status regions_create(struct kvk_cache *cache, struct kvk_group *group,
                                      enum kvk_tier tier, struct kvk_error *error)
{
    static const char *const labels[KVK_MEMORY_TIER_COUNT] = {"kvkeep-device", "kvkeep-host"};
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_device *device = cache->tiers[tier].device;
    uint64_t slots = kvk_arena_slot_capacity(&at->arena);
    const struct kvk_kept_name generations = generations_name(group, tier);
    if (group->space->is_public) {
        return public_regions_create(cache, group, tier, error);
    }
    if (regions_are_kept(cache, group, tier, slots)) {
        if (regions_adopt(cache, group, tier, slots, error) == KVK_OK) {
            at->adopted = true;
            at->backing_count++; /* what is there has no slab yet, and is no stray: see warm.c */
            return KVK_OK;
        }
        regions_free(cache, group, tier);
    } else if (group->sidecar != NULL) {
        kvk_log(KVK_LOG_WARNING, "kept_memory_refused",
                "space=%llu group=%u tier=%d text=\"files are missing, or smaller than the tier is "
                "now: it begins cold\"",
                (unsigned long long)group->space->id, group->index, (int)tier);
    }
    kvk_sidecar_tier_reset_unlocked(cache, group, tier);
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        const struct kvk_kept_name name = slots_name(group, tier, shard);
        enum kvk_status status = kvk_kept_alloc(
            cache, device, &name, slots * group->forms[tier].shard_bytes[shard],
            group->forms[tier].shard_bytes[shard], labels[tier], &at->regions[shard], error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return kvk_kept_alloc(cache, cache->memory, &generations, slots * sizeof(uint32_t), 0,
                          "kvkeep-generations", &at->generations, error);
}

static enum kvk_status tier_create(struct kvk_cache *cache, struct kvk_group *group,
                                   enum kvk_tier tier, struct kvk_error *error)
{
    struct kvk_tier_state *state = &cache->tiers[tier];
    struct kvk_group_tier *at = &group->tiers[tier];
    uint32_t public_slots = group->space->public_slots[group->index];
    uint64_t bytes = group->forms[tier].block_bytes;
    if (state->device == NULL || state->pool.limit_bytes < bytes) {
        return KVK_OK;
    }
    if (group->space->is_public && (tier != KVK_TIER_HOST || public_slots == 0)) {
        return KVK_OK;
    }
    enum kvk_status status = group->space->is_public
                                 ? kvk_arena_init_for(&at->arena, &state->pool, bytes, public_slots)
                                 : kvk_arena_init(&at->arena, &state->pool, bytes);
    if (status != KVK_OK) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a space's slots");
    }
    at->present = true; /* from here on destroying undoes what was done */
    bool forgets = tier == KVK_TIER_HOST || cache->tiers[KVK_TIER_HOST].device == NULL;
    kvk_evict_queue_init(&at->queue, cache->evict, tier, forgets, 1.0F); /* see kvk_space_weigh() */
    kvk_evict_queue_init(&at->clean, cache->evict, tier, false, 1.0F);
    kvk_evict_queue_init(&at->held, cache->evict, tier, false, 1.0F);
    uint32_t slots = kvk_arena_slot_capacity(&at->arena);
    at->checksums = kvk_pages_create_sparse(checksums_size(group, slots));
    at->owners = kvk_pages_create_sparse((size_t)slots * sizeof(*at->owners));
    at->places = calloc(at->arena.slab_capacity, sizeof(*at->places));
    if (at->checksums == NULL || at->owners == NULL || at->places == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a space's slots");
    }
    return regions_create(cache, group, tier, error);
}

static enum kvk_status check_presence(const struct kvk_cache *cache, const struct kvk_group *group,
                                      struct kvk_error *error)
{
    uint64_t limit = 0;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (group->tiers[i].present) {
            return KVK_OK;
        }
        if (cache->tiers[i].pool.limit_bytes > limit) {
            limit = cache->tiers[i].pool.limit_bytes;
        }
    }
    return kvk_fail_limit(
        error, KVK_EXHAUSTED, KVK_CAUSE_TOO_LARGE, "block_tokens", group->block_bytes, limit,
        "one block of group %u has %llu bytes, more than any tier: %llu", group->index,
        (unsigned long long)group->block_bytes, (unsigned long long)limit);
}

static void tier_destroy(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier);

static enum kvk_status memory_create(struct kvk_cache *cache, struct kvk_group *group,
                                     struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT && status == KVK_OK; i++) {
        status = tier_create(cache, group, (enum kvk_tier)i, error);
    }
    return status == KVK_OK && !group->space->is_public
               ? kvk_sidecar_create_unlocked(cache, group, error)
               : status;
}

static void memory_destroy(struct kvk_cache *cache, struct kvk_group *group)
{
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        tier_destroy(cache, group, (enum kvk_tier)i);
    }
    kvk_sidecar_destroy_unlocked(cache, group);
}

enum kvk_status kvk_group_create(struct kvk_cache *cache, struct kvk_space *space, uint32_t index,
                                 const struct kvk_geometry *geometry, enum kvk_format host_format,
                                 enum kvk_format disk_format, struct kvk_group **result,
                                 struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    struct kvk_group *group = calloc(1, sizeof(*group));
    if (group == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a group");
    }
    group->space = space;
    group->number = UINT32_MAX;
    group->index = index;
    group->geometry = *geometry;
    group->shard_count = kvk_geometry_shard_count(geometry);
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        group->shard_bytes[shard] = kvk_geometry_shard_bytes(geometry, shard);
    }
    group->block_bytes = kvk_geometry_block_bytes(geometry);
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        enum kvk_format format = tier == KVK_TIER_DISK   ? disk_format
                                 : tier == KVK_TIER_HOST ? host_format
                                                         : KVK_FORMAT_NONE;
        kvk_tier_form_init(&group->forms[tier], geometry, format);
    }
    group->windowed = geometry->window > 0;
    space->groups[index] = group;

    bool is_public = space->is_public;
    if (!is_public) {
        kvk_sidecar_find_unlocked(cache, group);
    }
    enum kvk_status status = memory_create(cache, group, error);
    if (status == KVK_OK && !is_public && !kvk_warm_is_possible(cache, group)) {
        memory_destroy(cache, group); /* and once more, with files of its own */
        status = memory_create(cache, group, error);
    }
    if (status == KVK_OK && !is_public) {
        status = check_presence(cache, group, error);
    }
    if (status == KVK_OK && !is_public) {
        status = kvk_disk_group_create(cache, group, error);
    }
    if (status != KVK_OK) {
        kvk_group_destroy_unlocked(cache, group);
        space->groups[index] = NULL;
        return status;
    }
    *result = group;
    return KVK_OK;
}

static void tier_destroy(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    if (!at->present) {
        return;
    }
    regions_free(cache, group, tier);
    uint32_t slots = kvk_arena_slot_capacity(&at->arena);
    kvk_pages_destroy_sparse(at->checksums, checksums_size(group, slots));
    kvk_pages_destroy_sparse(at->owners, (size_t)slots * sizeof(*at->owners));
    free(at->places);
    kvk_evict_queue_finish(&at->queue);
    kvk_evict_queue_finish(&at->clean);
    kvk_evict_queue_finish(&at->held);
    kvk_lock(&cache->lock);
    struct kvk_tier_state *state = &cache->tiers[tier];
    KVK_ASSERT(state->stray_bytes >= at->stray_bytes);
    state->stray_bytes -= at->stray_bytes;
    state->pool.charge_bytes -= at->stray_bytes;
    kvk_arena_finish(&at->arena);
    kvk_unlock(&cache->lock);
    *at = (struct kvk_group_tier){.present = false};
}

void kvk_group_destroy_unlocked(struct kvk_cache *cache, struct kvk_group *group)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    if (group == NULL) {
        return;
    }
    memory_destroy(cache, group);
    kvk_disk_group_destroy_unlocked(cache, group);
    free(group);
}

bool kvk_group_is_unused(const struct kvk_cache *cache, const struct kvk_group *group)
{
    for (int i = 0; i < KVK_BLOCK_STATE_COUNT; i++) {
        if (group->state_counts[i] > 0) {
            return false;
        }
    }
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        if (group->tiers[i].present && group->tiers[i].arena.used_count > 0) {
            return false;
        }
    }
    for (const struct kvk_punch *punch = cache->punches; punch != NULL; punch = punch->next) {
        if (punch->group == group) {
            return false;
        }
    }
    return true;
}

bool kvk_space_is_unused(const struct kvk_cache *cache, const struct kvk_space *space)
{
    if (space->reference_count > 0) {
        return false;
    }
    for (uint32_t i = 0; i < space->group_count; i++) {
        if (!kvk_group_is_unused(cache, space->groups[i])) {
            return false;
        }
    }
    return true;
}

void kvk_space_set_generation(struct kvk_space *space, uint64_t generation)
{
    space->generation = generation;
    kvk_store_le64(space->identity + space->identity_size, generation);
}
