/*
 * The table of keys: a linear hash.
 *
 * With n buckets, 2^k <= n < 2^(k+1), a hash belongs to bucket hash mod 2^(k+1) where that exists,
 * else to hash mod 2^k. When there are not two buckets for each block, one bucket more comes into
 * use and takes its share from the one that it was part of. So an insert moves the blocks of two
 * buckets at most, a few, and never waits for a table to be copied. Two, so that the list of a
 * bucket seldom leads over another block: each that it does is far away. The table does not shrink:
 * heads cost eight bytes for each block that there once was.
 */
#include <stdlib.h>

#include "base/assert.h"
#include "index/internal.h"
#include "base/pages.h"

#define BUCKET_COUNT_FIRST 64

_Static_assert(BUCKET_COUNT_FIRST <= KVK_SEGMENT_BUCKETS, "the first ones lie in one segment");

/* Two buckets for each block that there can be. */
static uint64_t bucket_count_max(const struct kvk_index *index)
{
    uint64_t count = 2 * (uint64_t)index->block_count_max;
    if (count < BUCKET_COUNT_FIRST) {
        return BUCKET_COUNT_FIRST;
    }
    return count < UINT64_C(1) << 31 ? count : UINT64_C(1) << 31;
}

uint32_t *kvk_keymap_bucket(const struct kvk_index *index, uint32_t bucket)
{
    return &index->segments[bucket / KVK_SEGMENT_BUCKETS][bucket % KVK_SEGMENT_BUCKETS];
}

uint32_t *kvk_keymap_head(const struct kvk_index *index, struct kvk_key key)
{
    uint32_t bucket = (uint32_t)(key.low & (2 * (uint64_t)index->bucket_round - 1));
    if (bucket >= index->bucket_count) {
        bucket &= index->bucket_round - 1;
    }
    return kvk_keymap_bucket(index, bucket);
}

/* The last one that there can be is only as large as needed. */
static size_t segment_size(const struct kvk_index *index, uint32_t segment)
{
    uint64_t buckets = bucket_count_max(index) - (uint64_t)segment * KVK_SEGMENT_BUCKETS;
    return (buckets < KVK_SEGMENT_BUCKETS ? buckets : KVK_SEGMENT_BUCKETS) * sizeof(uint32_t);
}

static bool segment_add(struct kvk_index *index)
{
    if (index->segment_count == index->segment_count_max) {
        return false;
    }
    size_t size = segment_size(index, index->segment_count);
    uint32_t *segment = kvk_pages_create(size);
    if (segment == NULL) {
        return false;
    }
    kvk_memory_add(index, size);
    index->segments[index->segment_count++] = segment;
    return true;
}

bool kvk_keymap_init(struct kvk_index *index)
{
    index->segment_count_max =
        (uint32_t)((bucket_count_max(index) + KVK_SEGMENT_BUCKETS - 1) / KVK_SEGMENT_BUCKETS);
    size_t size = index->segment_count_max * sizeof(*index->segments);
    index->segments = calloc(1, size);
    if (index->segments == NULL) {
        return false;
    }
    kvk_memory_add(index, size);
    index->bucket_count = BUCKET_COUNT_FIRST;
    index->bucket_round = BUCKET_COUNT_FIRST;
    if (!segment_add(index)) {
        return false;
    }
    for (uint32_t bucket = 0; bucket < BUCKET_COUNT_FIRST; bucket++) {
        *kvk_keymap_bucket(index, bucket) = KVK_BLOCK_NONE;
    }
    return true;
}

void kvk_keymap_finish(struct kvk_index *index)
{
    for (uint32_t i = 0; i < index->segment_count; i++) {
        kvk_pages_destroy(index->segments[i], segment_size(index, i));
    }
    free(index->segments);
}

/* Bring one bucket more into use. Without memory for it, the lists get longer instead. */
static void bucket_split(struct kvk_index *index)
{
    uint32_t added = index->bucket_count;
    if (added == bucket_count_max(index)) {
        return;
    }
    if (added / KVK_SEGMENT_BUCKETS >= index->segment_count && !segment_add(index)) {
        return;
    }
    uint32_t split = added - index->bucket_round;
    uint32_t *link = kvk_keymap_bucket(index, split);
    uint32_t *target = kvk_keymap_bucket(index, added);
    *target = KVK_BLOCK_NONE;
    while (*link != KVK_BLOCK_NONE) {
        struct kvk_block *block = kvk_block_at(index, *link);
        if ((block->key.low & index->bucket_round) == 0) {
            link = &block->hash_next;
            continue;
        }
        uint32_t moved = *link;
        *link = block->hash_next;
        block->hash_next = *target;
        *target = moved;
    }
    index->bucket_count++;
    if (index->bucket_count == 2 * index->bucket_round) {
        index->bucket_round *= 2;
    }
}

void kvk_index_expect(struct kvk_index *index, uint32_t block_count)
{
    uint64_t wanted = 2 * (index->indexed_count + block_count);
    uint32_t before;
    do {
        before = index->bucket_count;
        bucket_split(index);
    } while (index->bucket_count != before && index->bucket_count <= wanted);
}

void kvk_keymap_insert(struct kvk_index *index, uint32_t block)
{
    for (int i = 0; i < 2 && 2 * index->indexed_count >= index->bucket_count; i++) {
        bucket_split(index);
    }
    struct kvk_block *added = kvk_block_at(index, block);
    uint32_t *head = kvk_keymap_head(index, added->key);
    added->hash_next = *head;
    *head = block;
}

void kvk_keymap_remove(struct kvk_index *index, uint32_t block)
{
    struct kvk_block *removed = kvk_block_at(index, block);
    uint32_t *link = kvk_keymap_head(index, removed->key);
    while (*link != block) {
        KVK_ASSERT(*link != KVK_BLOCK_NONE);
        link = &kvk_block_at(index, *link)->hash_next;
    }
    *link = removed->hash_next;
    removed->hash_next = KVK_BLOCK_NONE;
}
