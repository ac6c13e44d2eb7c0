/*
 * Slots as the engine counts them: taken for copies on their way (loose), owned by blocks, given
 * back. Each step keeps the sums of its tier, group and tenant.
 */
#include "daemon/block_slots.h"

#include <string.h>

#include "base/assert.h"
#include "daemon/sidecar.h"

static void used_add(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    struct kvk_tier_state *state = &cache->tiers[tier];
    uint64_t bytes = group->tiers[tier].arena.slot_bytes;
    kvk_usage_advance(cache, group->space->tenant, tier);
    group->tiers[tier].used_bytes += bytes;
    state->used_bytes += bytes;
    state->tenant_bytes[group->space->tenant->index] += bytes;
}

/* The slot goes back to its arena. Whoever read it while it was taken sees another generation. */
static void slot_return(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                        uint32_t slot)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_tier_state *state = &cache->tiers[tier];
    uint64_t bytes = at->arena.slot_bytes;
    if (tier < KVK_MEMORY_TIER_COUNT && !cache->leaving) {
        uint32_t *generation = (uint32_t *)(void *)at->generations.address + slot;
        (void)__atomic_add_fetch(generation, 1, __ATOMIC_RELEASE);
    }
    kvk_sidecar_slot_freed(group, tier, slot);
    kvk_arena_give(&at->arena, slot);
    kvk_usage_advance(cache, group->space->tenant, tier);
    kvk_bytes_sub(&at->used_bytes, bytes);
    kvk_bytes_sub(&state->used_bytes, bytes);
    kvk_bytes_sub(&state->tenant_bytes[group->space->tenant->index], bytes);
    pthread_cond_broadcast(&cache->changed);
}

void kvk_slot_retire(struct kvk_cache *cache, struct kvk_group *group, uint32_t slot)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(group->tiers[KVK_TIER_DISK].owners[slot] == 0);
    slot_return(cache, group, KVK_TIER_DISK, slot);
}

/* A slot was taken for a copy that is on its way there. */
static void loose_begin(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                        uint32_t slot)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    KVK_ASSERT(at->owners[slot] == 0);
    memset(at->checksums + (size_t)slot * group->shard_count, 0,
           group->shard_count * sizeof(*at->checksums));
    used_add(cache, group, tier);
    at->loose_count++;
    kvk_quota_bound_change(cache, group->space->tenant, tier, at->arena.slot_bytes, true);
    cache->tiers[tier].copying_bytes += at->arena.slot_bytes;
}

static void loose_end(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    KVK_ASSERT(group->tiers[tier].loose_count > 0);
    uint64_t bytes = group->tiers[tier].arena.slot_bytes;
    group->tiers[tier].loose_count--;
    kvk_quota_bound_change(cache, group->space->tenant, tier, bytes, false);
    kvk_bytes_sub(&cache->tiers[tier].copying_bytes, bytes);
}

uint32_t kvk_slot_take(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_group_tier *at = &group->tiers[tier];
    KVK_ASSERT(at->present);
    /* The one way to a slot: so a tenant's limit is passed on none. */
    uint32_t slot = KVK_SLOT_NONE;
    if (!kvk_quota_is_full(cache, group->space->tenant, tier, at->arena.slot_bytes)) {
        slot = kvk_arena_take(&at->arena);
    }
    if (slot != KVK_SLOT_NONE) {
        at->empty_rounds = 0;
        kvk_sidecar_slot_granted(group, tier, slot);
        loose_begin(cache, group, tier, slot);
    }
    return slot;
}

enum kvk_status kvk_slot_take_at(struct kvk_cache *cache, struct kvk_group *group,
                                 enum kvk_tier tier, uint32_t slot)
{
    uint64_t bytes = group->tiers[tier].arena.slot_bytes;
    if (kvk_quota_is_full(cache, group->space->tenant, tier, bytes)) {
        return KVK_EXHAUSTED;
    }
    return kvk_slot_keep_at(cache, group, tier, slot);
}

enum kvk_status kvk_slot_keep_at(struct kvk_cache *cache, struct kvk_group *group,
                                 enum kvk_tier tier, uint32_t slot)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_group_tier *at = &group->tiers[tier];
    KVK_ASSERT(at->present);
    enum kvk_status status = kvk_arena_take_at(&at->arena, slot);
    if (status != KVK_OK) {
        return status;
    }
    uint32_t slots = at->arena.slot_count;
    if (kvk_evict_queue_reserve(&at->queue, slots) != KVK_OK ||
        kvk_evict_queue_reserve(&at->clean, slots) != KVK_OK ||
        kvk_evict_queue_reserve(&at->held, slots) != KVK_OK) {
        kvk_arena_give(&at->arena, slot);
        return KVK_EXHAUSTED;
    }
    uint32_t slab = kvk_arena_slab_of(&at->arena, slot);
    KVK_ASSERT(at->places[slab] != KVK_PLACE_LEAVING);
    if (at->places[slab] < at->arena.slabs[slab].slot_count) {
        at->places[slab] = at->arena.slabs[slab].slot_count;
    }
    loose_begin(cache, group, tier, slot);
    return KVK_OK;
}

void kvk_slot_give(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                   uint32_t slot)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(group->tiers[tier].owners[slot] == 0);
    loose_end(cache, group, tier);
    slot_return(cache, group, tier, slot);
}

void kvk_slot_own(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                  uint32_t slot, uint32_t id)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    KVK_ASSERT(block->slot[tier] == KVK_SLOT_NONE);
    KVK_ASSERT(group->tiers[tier].owners[slot] == 0);
    loose_end(cache, group, tier);
    group->tiers[tier].owners[slot] = id + 1;
    block->slot[tier] = slot;
}

void kvk_slot_disown(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                     uint32_t id)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    uint32_t slot = block->slot[tier];
    KVK_ASSERT(slot != KVK_SLOT_NONE);
    KVK_ASSERT(group->tiers[tier].owners[slot] == id + 1);
    group->tiers[tier].owners[slot] = 0;
    block->slot[tier] = KVK_SLOT_NONE;
    if (tier == KVK_TIER_DISK) {
        kvk_disk_slot_leave(cache, group, slot); /* nobody's, but not free while it is recorded */
    } else {
        slot_return(cache, group, tier, slot);
    }
}
