/* Who keeps a block for the daemon's own work: a short list, searched only where room is short. */
#include "daemon/upkeep.h"

#include "base/assert.h"
#include "daemon/cache_internal.h"

static void keep(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, uint64_t until_ns)
{
    struct kvk_upkeep *upkeep = &cache->upkeep;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(tier < KVK_MEMORY_TIER_COUNT && upkeep->count < KVK_UPKEEP_BLOCKS_MAX);
    upkeep->blocks[upkeep->count] = block;
    upkeep->until_ns[upkeep->count] = until_ns;
    upkeep->count++;
    kvk_block_borrow(cache, block, tier);
}

static void give_back(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier, bool lasting)
{
    struct kvk_upkeep *upkeep = &cache->upkeep;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t at = 0;
    while (at < upkeep->count &&
           (upkeep->blocks[at] != block || (upkeep->until_ns[at] != 0) != lasting)) {
        at++;
    }
    KVK_ASSERT(at < upkeep->count);
    upkeep->count--;
    upkeep->blocks[at] = upkeep->blocks[upkeep->count];
    upkeep->until_ns[at] = upkeep->until_ns[upkeep->count];
    kvk_block_return(cache, block, tier);
    pthread_cond_broadcast(&cache->changed);
}

void kvk_upkeep_borrow(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier)
{
    keep(cache, block, tier, 0);
}

void kvk_upkeep_return(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier)
{
    give_back(cache, block, tier, false);
}

void kvk_upkeep_borrow_lasting(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier)
{
    keep(cache, block, tier, kvk_clock_now(kvk_clock_monotonic()) + KVK_UPKEEP_LASTING_NS);
}

void kvk_upkeep_return_lasting(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier)
{
    give_back(cache, block, tier, true);
}

static bool is_awaited(const struct kvk_upkeep *upkeep, uint32_t at, uint64_t now_ns)
{
    return upkeep->until_ns[at] == 0 || upkeep->until_ns[at] > now_ns;
}

/* Is there a block that nobody keeps but such work, all of which is still waited for at `now_ns`?
 */
static bool keeps_room(const struct kvk_cache *cache, uint64_t now_ns)
{
    const struct kvk_upkeep *upkeep = &cache->upkeep;
    for (uint32_t i = 0; i < upkeep->count; i++) {
        uint32_t keepers = 0;
        for (uint32_t j = 0; j < upkeep->count && is_awaited(upkeep, i, now_ns); j++) {
            bool same = upkeep->blocks[j] == upkeep->blocks[i];
            keepers += same && is_awaited(upkeep, j, now_ns) ? 1 : 0;
        }
        if (keepers > 0 &&
            kvk_index_block(cache->index, upkeep->blocks[i])->hold_count == keepers) {
            return true;
        }
    }
    return false;
}

bool kvk_upkeep_keeps_room(const struct kvk_cache *cache)
{
    return cache->upkeep.count > 0 && keeps_room(cache, kvk_clock_now(kvk_clock_monotonic()));
}

bool kvk_upkeep_keeps_room_briefly(const struct kvk_cache *cache)
{
    return keeps_room(cache, UINT64_MAX); /* what lasts is not awaited */
}
