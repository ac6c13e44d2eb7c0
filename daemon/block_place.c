/*
 * Where a block's bytes lie, and how answers say it: addresses, generations, checksums, and the
 * tables of slots that go out to workers.
 */
#include "daemon/cache_internal.h"

#include <stdlib.h>

#include "base/assert.h"

/* ---- Where bytes lie ---- */

enum kvk_tier kvk_block_tier(const struct kvk_block *block)
{
    if ((block->tier_mask & KVK_MEMORY_TIER_MASK) == 1U << KVK_TIER_HOST) {
        return KVK_TIER_HOST; /* a slot beside it would hold damaged bytes */
    }
    if (block->slot[KVK_TIER_DEVICE] != KVK_SLOT_NONE) {
        return KVK_TIER_DEVICE;
    }
    KVK_ASSERT(block->slot[KVK_TIER_HOST] != KVK_SLOT_NONE);
    return KVK_TIER_HOST;
}

int kvk_tier_descriptor(const struct kvk_group_tier *at, uint32_t shard)
{
    const struct kvk_region *region = &at->regions[shard];
    return region->slabs != NULL ? region->slabs->fd : region->fd;
}

bool kvk_tier_is_lent(const struct kvk_group_tier *at)
{
    return at->lent_count > 0;
}

uint8_t *kvk_slot_address(const struct kvk_group *group, enum kvk_tier tier, uint32_t slot,
                          uint32_t shard)
{
    uint8_t *address = kvk_region_at(&group->tiers[tier].regions[shard],
                                     slot * group->forms[tier].shard_bytes[shard]);
    KVK_ASSERT(address != NULL);
    return address;
}

uint8_t *kvk_block_address(const struct kvk_cache *cache, const struct kvk_block *block,
                           enum kvk_tier tier, uint32_t shard)
{
    const struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(shard < group->shard_count);
    KVK_ASSERT(block->slot[tier] != KVK_SLOT_NONE);
    return kvk_slot_address(group, tier, block->slot[tier], shard);
}

uint32_t kvk_block_generation(const struct kvk_cache *cache, const struct kvk_block *block,
                              enum kvk_tier tier)
{
    KVK_ASSERT(block->slot[tier] != KVK_SLOT_NONE);
    const void *generations = kvk_group_of(cache, block)->tiers[tier].generations.address;
    return __atomic_load_n((const uint32_t *)generations + block->slot[tier], __ATOMIC_ACQUIRE);
}

uint64_t *kvk_block_checksums(const struct kvk_cache *cache, const struct kvk_block *block,
                              enum kvk_tier tier)
{
    const struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(block->slot[tier] != KVK_SLOT_NONE);
    return group->tiers[tier].checksums + (size_t)block->slot[tier] * group->shard_count;
}

/* ---- Tables in answers ---- */

#define TABLE_ENTRY_SIZE (sizeof(uint64_t) + 2 * sizeof(uint32_t) + sizeof(uint8_t))

/* Bytes of one part: its tiers come last and are rounded up, so that the next part is aligned. */
static size_t part_size(uint64_t count)
{
    size_t size = (size_t)count * TABLE_ENTRY_SIZE;
    return (size + sizeof(uint64_t) - 1) / sizeof(uint64_t) * sizeof(uint64_t);
}

enum kvk_status kvk_tables_reserve_unlocked(struct kvk_tables *tables, uint64_t entries,
                                            struct kvk_error *error)
{
    tables->part_count = 0;
    if (entries > SIZE_MAX / (2 * TABLE_ENTRY_SIZE)) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a block table");
    }
    /* Every part may be rounded up. */
    size_t size = part_size(entries) + KVK_GROUP_COUNT_MAX * sizeof(uint64_t);
    if (size <= tables->memory_size) {
        return KVK_OK;
    }
    uint8_t *memory = realloc(tables->memory, size);
    if (memory == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a block table");
    }
    tables->memory = memory;
    tables->memory_size = size;
    return KVK_OK;
}

struct kvk_table_part *kvk_tables_part(struct kvk_tables *tables, uint32_t group,
                                       uint64_t first_block, uint32_t count)
{
    KVK_ASSERT(tables->part_count < KVK_GROUP_COUNT_MAX);
    size_t offset = 0;
    for (uint32_t i = 0; i < tables->part_count; i++) {
        offset += part_size(tables->parts[i].count);
    }
    KVK_ASSERT(offset + part_size(count) <= tables->memory_size);
    uint64_t *spaces = (uint64_t *)(void *)(tables->memory + offset);
    uint32_t *words = (uint32_t *)(void *)(spaces + count);
    struct kvk_table_part *part = &tables->parts[tables->part_count++];
    *part = (struct kvk_table_part){
        .group = group,
        .first_block = first_block,
        .count = count,
        .spaces = spaces,
        .slots = words,
        .generations = words + count,
        .tiers = (uint8_t *)(words + 2 * (size_t)count),
    };
    return part;
}

/* A pinned copy stays where the answer says it is, so it comes first. */
static int tier_to_show(const struct kvk_block *block)
{
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (block->pin_count[i] > 0) {
            return i;
        }
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (block->slot[i] != KVK_SLOT_NONE) {
            return i;
        }
    }
    return -1;
}

void kvk_table_fill(const struct kvk_cache *cache, const uint32_t *blocks, uint32_t count,
                    struct kvk_table_part *part)
{
    for (uint32_t i = 0; i < count; i++) {
        int tier = -1;
        const struct kvk_block *block = NULL;
        part->spaces[i] = 0;
        if (blocks[i] != KVK_BLOCK_NONE) {
            block = kvk_index_block(cache->index, blocks[i]);
            tier = tier_to_show(block);
            const struct kvk_space *space = kvk_group_of(cache, block)->space;
            if (space->is_public) {
                part->spaces[i] = space->id;
                part->any_public = true;
            }
        }
        part->slots[i] = tier < 0 ? KVK_TABLE_SLOT_NONE : block->slot[tier];
        part->tiers[i] = (uint8_t)(tier + 1);
        part->generations[i] =
            tier < 0 ? 0 : kvk_block_generation(cache, block, (enum kvk_tier)tier);
    }
}

void kvk_tables_finish(struct kvk_tables *tables)
{
    free(tables->memory);
    *tables = (struct kvk_tables){0};
}
