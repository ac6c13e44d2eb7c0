#include "daemon/heal.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "daemon/disk_tier_internal.h"

struct healing {
    uint32_t block;
    enum kvk_tier tier;
    uint32_t shard_count;
    uint64_t disk_bytes; /* of the buffer */
    uint8_t *address[KVK_SHARD_COUNT_MAX];
    uint64_t known[KVK_SHARD_COUNT_MAX]; /* as sealed, by the copy on disk */
    uint64_t sums[KVK_SHARD_COUNT_MAX];  /* as read */
    struct kvk_disk_piece pieces[KVK_SHARD_COUNT_MAX];
};

enum heal_end { HEAL_GOOD, HEAL_FAILED, HEAL_DISK_DAMAGED };

/* Where in memory the block has a slot whose bytes are no copy, and which the processor reads. */
static bool damaged_tier(const struct kvk_cache *cache, const struct kvk_block *block,
                         enum kvk_tier *tier)
{
    const struct kvk_group *group = kvk_group_of(cache, block);
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (block->slot[i] != KVK_SLOT_NONE && (block->tier_mask & (1U << i)) == 0 &&
            group->tiers[i].regions[0].fd >= 0) {
            *tier = (enum kvk_tier)i;
            return true;
        }
    }
    return false;
}

static bool is_possible(const struct kvk_cache *cache, const struct kvk_block *block, uint32_t id,
                        enum kvk_tier *tier)
{
    if (cache->disk_tier == NULL || !kvk_block_is_whole(block) || block->transfer_count > 0 ||
        (block->tier_mask & (1U << KVK_TIER_DISK)) == 0 || !damaged_tier(cache, block, tier)) {
        return false;
    }
    const struct kvk_group *group = kvk_group_of(cache, block);
    /* A compact copy gives no sealed bytes back, and whoever holds the block was promised them. */
    return group->disk != NULL && group->disk->file != NULL &&
           !group->forms[KVK_TIER_DISK].compact && !kvk_disk_bit(&cache->disk_tier->restoring, id);
}

static void healing_begin(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier,
                          struct healing *healing)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    const struct kvk_group *group = kvk_group_of(cache, block);
    *healing = (struct healing){.block = id, .tier = tier, .shard_count = group->shard_count};
    memcpy(healing->known, kvk_block_checksums(cache, block, KVK_TIER_DISK),
           group->shard_count * sizeof(healing->known[0]));
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        healing->address[shard] = kvk_slot_address(group, tier, block->slot[tier], shard);
        healing->pieces[shard] = (struct kvk_disk_piece){
            .file = group->disk->file,
            .slot = block->slot[KVK_TIER_DISK],
            .offset = group->disk->shard_offset[shard],
            .size_bytes = group->shard_bytes[shard],
            .checksum = &healing->sums[shard],
            .status = KVK_UNAVAILABLE,
        };
        healing->disk_bytes += kvk_disk_shard_stride(group->shard_bytes[shard]);
    }
    kvk_block_borrow(cache, id, tier);
    kvk_disk_read_begin(cache, id);
}

/* Into a buffer first: what is damaged on disk too shall change nothing in memory. */
static enum heal_end heal_unlocked(struct kvk_cache *cache, struct healing *healing)
{
    struct kvk_error error;
    uint64_t at = 0;
    KVK_ASSERT(kvk_locks_held() == 0);
    uint8_t *buffer = aligned_alloc(KVK_DISK_ALIGN, healing->disk_bytes);
    if (buffer == NULL) {
        return HEAL_FAILED;
    }
    for (uint32_t shard = 0; shard < healing->shard_count; shard++) {
        healing->pieces[shard].memory = buffer + at;
        at += kvk_disk_shard_stride(healing->pieces[shard].size_bytes);
    }
    enum heal_end end = kvk_disk_read(cache->disk, KVK_DISK_RESTORE, healing->pieces,
                                      healing->shard_count, &error) == KVK_OK
                            ? HEAL_GOOD
                            : HEAL_FAILED;
    for (uint32_t shard = 0; shard < healing->shard_count && end == HEAL_GOOD; shard++) {
        end = healing->sums[shard] == healing->known[shard] ? HEAL_GOOD : HEAL_DISK_DAMAGED;
    }
    for (uint32_t shard = 0; shard < healing->shard_count && end == HEAL_GOOD; shard++) {
        uint64_t size = healing->pieces[shard].size_bytes;
        memcpy(healing->address[shard], healing->pieces[shard].memory, size);
        if (kvk_checksum(healing->address[shard], size) != healing->known[shard]) {
            end = HEAL_FAILED; /* somebody writes there still */
        }
    }
    free(buffer);
    return end;
}

bool kvk_block_heal_drops(struct kvk_cache *cache, uint32_t id)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    enum kvk_tier tier;
    struct healing healing;
    KVK_ASSERT(block->hold_count > 0);
    if (!is_possible(cache, block, id, &tier)) {
        return false;
    }
    healing_begin(cache, id, tier, &healing);
    kvk_unlock(&cache->lock);
    enum heal_end end = heal_unlocked(cache, &healing);
    kvk_lock(&cache->lock);
    /* The slot is the block's still: it is pinned. */
    KVK_ASSERT((block->tier_mask & (1U << tier)) == 0);
    if (end == HEAL_GOOD) {
        kvk_block_recredit(cache, id, tier, healing.known);
        cache->stats.healed_blocks++;
        kvk_log(KVK_LOG_INFO, "block_healed", "block=%u space=%llu", id,
                (unsigned long long)kvk_group_of(cache, block)->space->id);
    } else if (end == HEAL_DISK_DAMAGED) {
        cache->stats.disk_damaged_blocks++;
        kvk_block_discredit(cache, id, KVK_TIER_DISK);
    } else {
        cache->stats.disk_read_failures++;
    }
    kvk_disk_bit_set(&cache->disk_tier->restoring, id, false);
    kvk_block_return(cache, id, KVK_TIER_DISK);
    kvk_block_return(cache, id, tier);
    pthread_cond_broadcast(&cache->changed);
    return end == HEAL_GOOD;
}
