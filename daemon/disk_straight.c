/*
 * Which blocks are written to disk from where they lie, instead of from a copy.
 *
 * Sealed bytes never change, and a block that is borrowed stays where it is; so where nothing is to
 * be converted, the address and the size suit the disk, and the checksum of sealing is known, the
 * disk can have the bytes from the slot itself, and that checksum beside them. Neither copying nor
 * hashing is left; damage in between is found by whoever reads the copy on disk.
 *
 * The price: such a block keeps its room for as long as the disk takes. So all of them together are
 * a small share of the tier, and of what their tenant may have there; and a disk that has shown
 * that it takes long gets copies for a while.
 */
#include "daemon/disk_tier_internal.h"

#define SHARE 16 /* of the tier, and of a tenant's limit, one such part at most */
#define HELD_NS_MAX (250 * KVK_NS_PER_MS)  /* that writing may take, or copies are made… */
#define COPIES_NS (10 * KVK_NS_PER_SECOND) /* …for so long */

/* Bytes that may be written so at a time, this group's among them. */
static uint64_t share_bytes(const struct kvk_cache *cache, const struct kvk_group *group)
{
    const struct kvk_tenant_state *state = kvk_tenant_state_of(cache, group->space->tenant);
    uint64_t limit = cache->tiers[KVK_TIER_HOST].pool.limit_bytes;
    uint64_t own = state->quota.limit_bytes[KVK_TIER_HOST];
    return (own != 0 && own < limit ? own : limit) / SHARE;
}

static bool suits_the_disk(const struct kvk_cache *cache, const struct kvk_group *group,
                           const struct kvk_block *block)
{
    const uint64_t *known = kvk_block_checksums(cache, block, KVK_TIER_HOST);
    const struct kvk_tier_form *form = &group->forms[KVK_TIER_HOST];
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        const uint8_t *memory = kvk_block_address(cache, block, KVK_TIER_HOST, shard);
        if (known[shard] == 0 ||
            !kvk_disk_goes_straight(cache->disk, memory, form->shard_bytes[shard])) {
            return false;
        }
    }
    return true;
}

bool kvk_disk_is_straight(const struct kvk_cache *cache, const struct kvk_group *group,
                          const struct kvk_block *block, uint64_t straight_bytes)
{
    uint64_t bytes = group->forms[KVK_TIER_HOST].block_bytes;
    uint64_t share = share_bytes(cache, group);
    return (block->tier_mask & (1U << KVK_TIER_HOST)) != 0 && bytes <= share &&
           straight_bytes <= share - bytes &&
           kvk_clock_now(cache->clock) >= cache->disk_tier->copies_until_ns &&
           group->forms[KVK_TIER_HOST].compact == group->forms[KVK_TIER_DISK].compact &&
           suits_the_disk(cache, group, block);
}

void kvk_disk_straight_took(struct kvk_cache *cache, uint64_t duration_ns)
{
    if (duration_ns > HELD_NS_MAX) {
        cache->disk_tier->copies_until_ns = kvk_clock_now(cache->clock) + COPIES_NS;
    }
}
