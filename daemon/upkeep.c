/* Who keeps a block for the daemon's own work: a short list, searched only where room is short. */
#include "daemon/upkeep.h"

#include "base/assert.h"
#include "daemon/cache_internal.h"

void kvk_upkeep_borrow(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier)
{
    struct kvk_upkeep *upkeep = &cache->upkeep;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(tier < KVK_MEMORY_TIER_COUNT && upkeep->count < KVK_UPKEEP_BLOCKS_MAX);
    upkeep->blocks[upkeep->count++] = block;
    kvk_block_borrow(cache, block, tier);
}

void kvk_upkeep_return(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier)
{
    struct kvk_upkeep *upkeep = &cache->upkeep;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t at = 0;
    while (at < upkeep->count && upkeep->blocks[at] != block) {
        at++;
    }
    KVK_ASSERT(at < upkeep->count);
    upkeep->blocks[at] = upkeep->blocks[--upkeep->count];
    kvk_block_return(cache, block, tier);
    pthread_cond_broadcast(&cache->changed);
}

bool kvk_upkeep_keeps_room(const struct kvk_cache *cache)
{
    const struct kvk_upkeep *upkeep = &cache->upkeep;
    for (uint32_t i = 0; i < upkeep->count; i++) {
        uint32_t keepers = 0;
        for (uint32_t j = 0; j < upkeep->count; j++) {
            keepers += upkeep->blocks[j] == upkeep->blocks[i] ? 1 : 0;
        }
        if (kvk_index_block(cache->index, upkeep->blocks[i])->hold_count == keepers) {
            return true;
        }
    }
    return false;
}
