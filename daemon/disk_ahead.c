/*
 * Reading ahead: what a prompt that was looked up has on disk alone comes to memory before anybody
 * asks for it, as long as that costs nobody anything: into free slots, or those of blocks that are
 * on disk too.
 */
#include <stdlib.h>

#include "base/assert.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/room_internal.h"

#define CHAIN_BLOCKS 32 /* behind the end of the prompt */
#define ON_DISK_ALONE (1U << KVK_TIER_DISK)

/* ---- Asking ---- */

static bool is_missing(const struct kvk_cache *cache, uint32_t id)
{
    return kvk_index_block(cache->index, id)->tier_mask == ON_DISK_ALONE &&
           kvk_disk_is_current(cache, id);
}

/* What follows on the prefix, as long as there is but one way on. */
static void chain_add(struct kvk_cache *cache, uint32_t id)
{
    for (uint32_t i = 0; i < CHAIN_BLOCKS; i++) {
        if (kvk_index_block(cache->index, id)->child_count != 1) {
            return;
        }
        id = kvk_index_first_child(cache->index, KVK_ROOT_NONE, id);
        if (is_missing(cache, id) && !kvk_disk_ring_add(&cache->disk_tier->ahead, id)) {
            return;
        }
    }
}

void kvk_disk_ahead(struct kvk_cache *cache, const struct kvk_space *space,
                    const struct kvk_prefix *prefix)
{
    struct kvk_disk_tier *tier = cache->disk_tier;
    if (tier == NULL || tier->ahead.capacity == 0) {
        return;
    }
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    for (uint64_t i = 0; i < prefix->blocks; i++) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            if (cache->path_tiers[g][i] == ON_DISK_ALONE &&
                kvk_group_sees(space->groups[g], prefix->blocks, i) &&
                !kvk_disk_ring_add(&tier->ahead, cache->path[g][i])) {
                i = prefix->blocks - 1; /* so many wait already */
                break;
            }
        }
    }
    for (uint32_t g = 0; g < space->group_count && prefix->blocks > 0; g++) {
        chain_add(cache, cache->path[g][prefix->blocks - 1]);
    }
    if (tier->ahead.count > 0) {
        pthread_cond_signal(&tier->wake);
    }
}

/* ---- Doing ---- */

/* A slot that nobody misses, or KVK_SLOT_NONE. */
static uint32_t slot_get_drops(struct kvk_cache *cache, struct kvk_group *group,
                               enum kvk_tier target)
{
    struct kvk_space *space = group->space;
    for (int steps = 0; steps < 4; steps++) {
        struct kvk_room_choice choice;
        uint32_t slot = kvk_slot_take(cache, group, target);
        if (slot != KVK_SLOT_NONE) {
            return slot;
        }
        kvk_room_choose(cache, group, target, NULL, &choice);
        bool clean = choice.step == KVK_ROOM_EVICT &&
                     kvk_disk_is_on_disk(kvk_index_block(cache->index, choice.victim));
        if (choice.step == KVK_ROOM_BACK) {
            struct kvk_room_want want = {.tier = target};
            const struct kvk_caller quiet = {.may_block = true, .deadline_ns = UINT64_MAX};
            want.counts[group->index] = 1;
            if (kvk_room_make_drops(cache, space, &want, &quiet, NULL) != KVK_OK) {
                return KVK_SLOT_NONE;
            }
        } else if ((choice.step != KVK_ROOM_GROW && !clean) ||
                   !kvk_room_apply(cache, group, target, &choice)) {
            return KVK_SLOT_NONE;
        }
    }
    return KVK_SLOT_NONE;
}

bool kvk_disk_ahead_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_disk_tier *tier = cache->disk_tier;
    struct kvk_disk_read_job jobs[KVK_DISK_BATCH_BLOCKS / 4];
    enum kvk_tier target = KVK_TIER_HOST;
    uint32_t count = 0;
    while (tier->ahead.count > 0 && count < sizeof(jobs) / sizeof(jobs[0])) {
        uint32_t id = tier->ahead.blocks[tier->ahead.first];
        struct kvk_group *group = NULL;
        enum kvk_tier wanted;
        if (is_missing(cache, id) && !kvk_disk_bit(&tier->restoring, id)) {
            group = kvk_group_of(cache, kvk_index_block(cache->index, id));
        }
        if (group == NULL || !kvk_disk_target(group, &wanted)) {
            (void)kvk_disk_ring_take(&tier->ahead);
            continue;
        }
        if (count > 0 && wanted != target) {
            break;
        }
        target = wanted;
        group->space->reference_count++;
        uint32_t slot = slot_get_drops(cache, group, target);
        group->space->reference_count--;
        if (slot == KVK_SLOT_NONE) {
            tier->ahead.count = 0; /* there is no room: who needs them will ask */
            break;
        }
        (void)kvk_disk_ring_take(&tier->ahead);
        if (!is_missing(cache, id) || kvk_disk_bit(&tier->restoring, id)) { /* meanwhile */
            kvk_slot_give(cache, group, target, slot);
            continue;
        }
        kvk_disk_read_begin(cache, id);
        jobs[count++] = (struct kvk_disk_read_job){.block = id, .slot = slot};
    }
    if (count == 0) {
        return false;
    }
    if (kvk_disk_read_jobs_drops(cache, target, KVK_DISK_AHEAD, jobs, count) != KVK_OK) {
        tier->ahead.count = 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        cache->stats.disk_ahead_blocks += jobs[i].landed ? 1 : 0;
    }
    return tier->ahead.count > 0;
}
