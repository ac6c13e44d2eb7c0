/*
 * A device that fell away, with all that lay on it: the tier is degraded, the daemon serves on.
 *
 * What was there counts as no copy any more, found by nobody, as if its bytes were damaged; copies
 * on the host and on disk stay what they are. Sequences that live on the device are refused what
 * would touch it until they are closed; new ones go to the host tier. Nothing comes back without a
 * restart: the driver gives a broken context to nobody.
 */
#include "base/assert.h"
#include "base/log.h"
#include "daemon/cache_internal.h"

bool kvk_tier_is_lost(const struct kvk_cache *cache, enum kvk_tier tier)
{
    const struct kvk_device *device = cache->tiers[tier].device;
    return device != NULL && device->ops->is_lost != NULL && device->ops->is_lost(device);
}

enum kvk_tier kvk_tier_first(const struct kvk_cache *cache)
{
    bool device = cache->tiers[KVK_TIER_DEVICE].device != NULL;
    bool host = cache->tiers[KVK_TIER_HOST].device != NULL;
    return device && !(host && kvk_tier_is_lost(cache, KVK_TIER_DEVICE)) ? KVK_TIER_DEVICE
                                                                         : KVK_TIER_HOST;
}

void kvk_tier_health(const struct kvk_cache *cache, struct kvk_device_health *health)
{
    struct kvk_device *device = cache->tiers[KVK_TIER_DEVICE].device;
    *health = (struct kvk_device_health){.lost = false};
    if (device != NULL && device->ops->health != NULL) {
        device->ops->health(device, health);
    }
}

void kvk_device_health_unlocked(struct kvk_cache *cache, struct kvk_device_health *health)
{
    kvk_tier_health(cache, health); /* which device it is never changes */
}

enum kvk_status kvk_tier_check_there(const struct kvk_cache *cache, enum kvk_tier tier,
                                     struct kvk_error *error)
{
    return kvk_tier_is_lost(cache, tier)
               ? kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_NONE, "tier",
                          "the device tier's GPU has fallen away: close what lies there, the host "
                          "tier serves on")
               : KVK_OK;
}

void kvk_lost_slice(struct kvk_cache *cache, uint32_t count)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (!kvk_tier_is_lost(cache, KVK_TIER_DEVICE)) {
        return;
    }
    if (!cache->lost_told) {
        cache->lost_told = true;
        kvk_log(KVK_LOG_ERROR, "device_tier_lost",
                "text=\"what lay on the device is gone; the host tier serves on\"");
    }
    uint32_t end = kvk_index_block_id_end(cache->index);
    for (uint32_t i = 0; i < count && i < end; i++) {
        uint32_t id = cache->lost_next < end ? cache->lost_next : 0;
        cache->lost_next = id + 1;
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if ((block->tier_mask & 1U << KVK_TIER_DEVICE) != 0 && block->transfer_count == 0) {
            kvk_block_discredit(cache, id, KVK_TIER_DEVICE);
        }
    }
}
