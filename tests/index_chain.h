/*
 * Small helpers for tests and benchmarks that drive the index: whole blocks out of nothing, and
 * chains of them. Blocks come and go by the same steps as in the engine.
 */
#ifndef KVK_TESTS_INDEX_CHAIN_H
#define KVK_TESTS_INDEX_CHAIN_H

#include <stdbool.h>
#include <stdint.h>

#include "base/assert.h"
#include "index/index.h"

#define CHAIN_ON_DEVICE (1U << KVK_TIER_DEVICE)

static inline struct kvk_index *chain_index(uint32_t block_count_max, uint32_t root_count_max)
{
    const struct kvk_index_options options = {
        .block_count_max = block_count_max,
        .root_count_max = root_count_max,
    };
    struct kvk_index *index = NULL;
    enum kvk_status status = kvk_index_create(&options, &index);
    KVK_ASSERT(status == KVK_OK);
    return index;
}

static inline uint32_t chain_root(struct kvk_index *index, const struct kvk_hasher *hasher,
                                  const char *identity, uint32_t block_tokens)
{
    size_t size = 0;
    while (identity[size] != '\0') {
        size++;
    }
    const struct kvk_root_options options = {
        .hasher = hasher,
        .identity = (const uint8_t *)identity,
        .identity_size = size,
        .block_tokens = block_tokens,
    };
    uint32_t root = KVK_ROOT_NONE;
    enum kvk_status status = kvk_index_root_open(index, &options, &root);
    KVK_ASSERT(status == KVK_OK);
    return root;
}

/* A sealed block with one holder and a copy in the tiers of the mask; KVK_BLOCK_NONE: no more. */
static inline uint32_t chain_block(struct kvk_index *index, uint8_t tier_mask)
{
    uint32_t id = kvk_index_block_alloc(index, 0);
    if (id == KVK_BLOCK_NONE) {
        return id;
    }
    struct kvk_block *block = kvk_index_block(index, id);
    kvk_block_step(block, KVK_BLOCK_RESERVE);
    kvk_block_step(block, KVK_BLOCK_WRITE);
    kvk_block_step(block, KVK_BLOCK_SEAL);
    kvk_index_set_tiers(index, id, tier_mask);
    return id;
}

/* Give back a sealed block that is not indexed. */
static inline void chain_discard(struct kvk_index *index, uint32_t id)
{
    kvk_block_step(kvk_index_block(index, id), KVK_BLOCK_DISCARD);
    kvk_index_block_free(index, id);
}

/* Insert one block of `content` behind the cursor and let go of it. The block there, new or not;
 * KVK_BLOCK_NONE: there are no more blocks. */
static inline uint32_t chain_add(struct kvk_index *index, struct kvk_cursor *cursor,
                                 const struct kvk_content *content)
{
    uint32_t id = chain_block(index, CHAIN_ON_DEVICE);
    if (id == KVK_BLOCK_NONE) {
        return id;
    }
    uint32_t winner = id;
    enum kvk_status status = kvk_index_insert(index, cursor, content, id, &winner);
    if (status == KVK_EXISTS) {
        chain_discard(index, id);
        return winner;
    }
    KVK_ASSERT(status == KVK_OK);
    kvk_block_step(kvk_index_block(index, id), KVK_BLOCK_RELEASE);
    return id;
}

/* All whole blocks of `content` under the root; ids (may be NULL) gets theirs. How many. */
static inline uint64_t chain_add_all(struct kvk_index *index, uint32_t root, uint32_t block_tokens,
                                     const struct kvk_content *content, uint32_t *ids)
{
    struct kvk_cursor cursor = {.root = root, .block = KVK_BLOCK_NONE};
    uint64_t count = content->token_count / block_tokens;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t id = chain_add(index, &cursor, content);
        if (id == KVK_BLOCK_NONE) {
            return i;
        }
        if (ids != NULL) {
            ids[i] = id;
        }
    }
    return count;
}

/* Evict a block that nobody holds: out of the index where nothing needs it, else hollow. */
static inline void chain_evict(struct kvk_index *index, uint32_t id)
{
    struct kvk_block *block = kvk_index_block(index, id);
    kvk_block_step(block, KVK_BLOCK_EVICT);
    kvk_index_set_tiers(index, id, 0);
    if (block->state == KVK_BLOCK_FREE) {
        kvk_index_remove(index, id);
        kvk_index_block_free(index, id);
    }
}

/* How many blocks of `content` the root's chains know, and that all of them have bytes. */
static inline uint64_t chain_hit(const struct kvk_index *index, uint32_t root,
                                 const struct kvk_content *content)
{
    struct kvk_match match = {
        .cursor = {.root = root, .block = KVK_BLOCK_NONE},
        .path_capacity = UINT64_MAX,
    };
    kvk_index_match(index, content, &match);
    return match.path_count;
}

#endif
