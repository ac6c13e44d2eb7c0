/*
 * Blocks without sequences: reserve, write, seal and index single blocks of one space, for tests of
 * what lies below sequences. The references taken here are counted as passing ones, so that
 * kvk_cache_check() knows of them.
 */
#ifndef KVK_TESTS_ENGINE_STORE_H
#define KVK_TESTS_ENGINE_STORE_H

#include "tests/engine_house.h"

struct store {
    struct house house;
    struct kvk_cache *cache;
    struct kvk_space *space;
    struct kvk_group *group;
    uint32_t root;
};

static inline void store_open_space(struct store *store, const char *model, uint32_t window)
{
    struct kvk_geometry geometry = house_geometry();
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    geometry.window = window;
    uint64_t id = house_space_of(&store->house, &store->house.caller, model, &geometry, 1);
    kvk_lock(&store->cache->lock);
    cr_assert_eq(
        kvk_space_find(store->cache, &store->house.caller, id, &store->space, &store->house.error),
        KVK_OK);
    store->group = store->space->groups[0];
    store->space->reference_count++;
    cr_assert_eq(kvk_space_roots(store->cache, store->space, NULL, 0, roots, NULL), KVK_OK);
    store->root = roots[0];
    kvk_unlock(&store->cache->lock);
}

/* Tiers in blocks of 1 KiB. The lock is held from here on. */
static inline void store_start(struct store *store, uint32_t device_blocks, uint32_t host_blocks)
{
    const struct house_options options = {.device_bytes = 1024 * (uint64_t)device_blocks,
                                          .host_bytes = 1024 * (uint64_t)host_blocks,
                                          .manual_clock = true};
    house_init(&store->house);
    house_start(&store->house, &options);
    store->cache = store->house.cache;
    store_open_space(store, "model", 0);
    kvk_lock(&store->cache->lock);
}

static inline void store_stop(struct store *store)
{
    kvk_index_root_release(store->cache->index, store->root);
    store->space->reference_count--;
    kvk_cache_check_locked(store->cache);
    kvk_unlock(&store->cache->lock);
    house_stop(&store->house);
}

static inline struct kvk_block *store_block(struct store *store, uint32_t id)
{
    return kvk_index_block(store->cache->index, id);
}

static inline enum kvk_status store_try_reserve(struct store *store, enum kvk_tier tier,
                                                uint32_t count, uint32_t *ids)
{
    uint32_t *blocks[KVK_GROUP_COUNT_MAX] = {ids};
    const struct kvk_room_want want = {.tier = tier, .counts = {count}};
    enum kvk_status status = kvk_room_reserve_drops(store->cache, store->space, &want, blocks,
                                                    &store->house.caller, &store->house.error);
    store->cache->passing_holds += status == KVK_OK ? count : 0;
    return status;
}

static inline uint32_t store_reserve(struct store *store, enum kvk_tier tier)
{
    uint32_t id = KVK_BLOCK_NONE;
    cr_assert_eq(store_try_reserve(store, tier, 1, &id), KVK_OK, "%s", store->house.error.text);
    return id;
}

static inline void store_write(struct store *store, uint32_t id, uint8_t value)
{
    struct kvk_block *block = store_block(store, id);
    kvk_block_step(block, KVK_BLOCK_WRITE);
    kvk_block_settle(store->cache, id);
    memset(kvk_block_address(store->cache, block, kvk_block_tier(block), 0), value,
           store->group->block_bytes);
}

static inline void store_expect_bytes(struct store *store, uint32_t id, enum kvk_tier tier,
                                      uint8_t value)
{
    const uint8_t *bytes = kvk_block_address(store->cache, store_block(store, id), tier, 0);
    for (uint64_t i = 0; i < store->group->block_bytes; i++) {
        cr_assert_eq(bytes[i], value, "byte %llu of block %u", (unsigned long long)i, id);
    }
}

/* A whole block of four equal tokens under the cursor, held and pinned by us. */
static inline uint32_t store_seal(struct store *store, enum kvk_tier tier,
                                  struct kvk_cursor *cursor, uint32_t token)
{
    const uint32_t tokens[4] = {token, token, token, token};
    const struct kvk_content content = {
        .tokens = tokens, .first = cursor->blocks * 4, .token_count = 4};
    uint32_t winner;
    uint32_t id = store_reserve(store, tier);
    store_write(store, id, (uint8_t)token);
    cr_assert_eq(kvk_block_checksum_drops(store->cache, &id, 1, false, NULL), KVK_OK);
    kvk_block_seal(store->cache, id);
    cr_assert_eq(kvk_index_insert(store->cache->index, cursor, &content, id, &winner), KVK_OK);
    kvk_evict_admit(store->cache->evict, store_block(store, id), 1, store->group->windowed,
                    ++store->cache->stamp, kvk_policy_now(store->cache));
    kvk_block_settle(store->cache, id);
    return id;
}

static inline struct kvk_cursor store_cursor(const struct store *store)
{
    return (struct kvk_cursor){.root = store->root, .block = KVK_BLOCK_NONE};
}

/* Our pin and hold go. */
static inline void store_release(struct store *store, uint32_t id)
{
    const struct kvk_block *block = store_block(store, id);
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (block->pin_count[i] > 0) {
            kvk_block_unpin(store->cache, id, (enum kvk_tier)i);
            break;
        }
    }
    store->cache->passing_holds--;
    kvk_block_release(store->cache, id, false);
}

static inline uint64_t store_used(const struct store *store, enum kvk_tier tier)
{
    return store->cache->tiers[tier].used_bytes / store->group->block_bytes;
}

static inline uint64_t store_bound(const struct store *store, enum kvk_tier tier)
{
    return store->cache->tiers[tier].bound_bytes / store->group->block_bytes;
}

#endif
