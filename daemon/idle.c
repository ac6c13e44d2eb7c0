/*
 * What was not used for as long as its tenant or its space allows goes: block by block, leaves
 * first, a bounded number a round. A hint to keep a block outranks it until the hint's time is
 * over.
 */
#include "base/assert.h"
#include "daemon/room_internal.h"

#define IDLE_GROUPS 32  /* that one round looks at */
#define IDLE_BLOCKS 512 /* that one round drops */

static uint64_t idle_ns(const struct kvk_cache *cache, const struct kvk_space *space)
{
    uint64_t quota_ms = kvk_tenant_state_of(cache, space->tenant)->quota.idle_ms;
    uint64_t ms = space->idle_ms;
    if (ms == 0 || (quota_ms != 0 && quota_ms < ms)) {
        ms = quota_ms;
    }
    return ms > UINT64_MAX / KVK_NS_PER_MS ? UINT64_MAX : ms * KVK_NS_PER_MS;
}

/* The next block of the queue that is idle for so long and may go; KVK_BLOCK_NONE: none. */
static uint32_t idle_block(const struct kvk_cache *cache, const struct kvk_group *group,
                           enum kvk_tier tier, const struct kvk_evict_queue *queue,
                           uint64_t older_ns)
{
    uint64_t used_ns;
    uint32_t id = kvk_evict_queue_oldest(queue, &used_ns);
    if (id == KVK_BLOCK_NONE || used_ns > older_ns) {
        return KVK_BLOCK_NONE;
    }
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    bool hinted = block->hint == KVK_EVICT_HINT_LAST &&
                  block->hint_until > kvk_policy_now(cache) / KVK_EVICT_HINT_NS;
    bool goes = block->state == KVK_BLOCK_EVICTABLE && !hinted && block->transfer_count == 0 &&
                (tier == KVK_TIER_DISK || kvk_block_is_leaf(group, block));
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        goes = goes && block->pin_count[i] == 0;
    }
    return goes ? id : KVK_BLOCK_NONE;
}

/* Its copies in memory, or where it has none there, that on disk. */
static void idle_drop(struct kvk_cache *cache, uint32_t id)
{
    uint32_t mask = kvk_index_block(cache->index, id)->tier_mask;
    uint32_t memory = mask & KVK_MEMORY_TIER_MASK;
    mask = memory != 0 ? memory : mask;
    kvk_gone_begin(cache, KVK_GONE_IDLE, NULL);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        if ((mask & (1U << i)) != 0) {
            kvk_block_drop_copy(cache, id, (enum kvk_tier)i, false);
        }
    }
    kvk_gone_end(cache);
}

static uint32_t group_idle(struct kvk_cache *cache, struct kvk_group *group, uint32_t blocks_max)
{
    uint64_t limit_ns = idle_ns(cache, group->space);
    uint64_t now_ns = kvk_policy_now(cache);
    uint32_t dropped = 0;
    if (limit_ns == 0 || limit_ns > now_ns) {
        return 0;
    }
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        struct kvk_group_tier *at = &group->tiers[i];
        struct kvk_evict_queue *queues[] = {&at->queue, &at->clean};
        for (size_t k = 0; at->present && k < sizeof(queues) / sizeof(queues[0]); k++) {
            uint32_t id;
            while (dropped < blocks_max &&
                   (id = idle_block(cache, group, (enum kvk_tier)i, queues[k],
                                    now_ns - limit_ns)) != KVK_BLOCK_NONE) {
                idle_drop(cache, id);
                dropped++;
            }
        }
    }
    kvk_tenant_state_of(cache, group->space->tenant)->usage.idle_blocks += dropped;
    return dropped;
}

void kvk_idle_round(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t dropped = 0;
    uint32_t looked = 0;
    for (uint32_t i = 0; i < cache->group_end && looked < IDLE_GROUPS && dropped < IDLE_BLOCKS;
         i++) {
        cache->idle_next = cache->idle_next + 1 < cache->group_end ? cache->idle_next + 1 : 0;
        struct kvk_group *group = cache->groups[cache->idle_next];
        if (group != NULL) {
            looked++;
            dropped += group_idle(cache, group, IDLE_BLOCKS - dropped);
        }
    }
}
