/* The index: its memory, its blocks, and what is known of all of them together. */
#include "index/index.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/slots.h"
#include "index/internal.h"
#include "base/pages.h"

/* ---- Create and destroy ---- */

/* A counted piece of zeroed memory. What is not touched yet costs nothing. */
static void *directory_create(struct kvk_index *index, size_t count, size_t size)
{
    void *memory = calloc(count, size);
    if (memory != NULL) {
        kvk_memory_add(index, count * size);
    }
    return memory;
}

static uint32_t power_of_two_above(uint32_t count)
{
    uint32_t power = 1;
    while (power < count && power < UINT32_C(1) << 31) {
        power *= 2;
    }
    return power;
}

static bool directories_create(struct kvk_index *index)
{
    size_t block_chunk_count = index->block_count_max / KVK_CHUNK_BLOCKS + 1;
    size_t run_chunk_count = index->block_count_max / KVK_CHUNK_RUNS + 1;
    size_t bucket_count = index->root_bucket_count;
    index->block_chunks = directory_create(index, block_chunk_count, sizeof(*index->block_chunks));
    index->run_chunks = directory_create(index, run_chunk_count, sizeof(*index->run_chunks));
    index->roots = directory_create(index, index->root_count_max, sizeof(*index->roots));
    index->root_buckets = directory_create(index, bucket_count, sizeof(*index->root_buckets));
    if (index->block_chunks == NULL || index->run_chunks == NULL || index->roots == NULL ||
        index->root_buckets == NULL) {
        return false;
    }
    memset(index->root_buckets, 0xff, bucket_count * sizeof(*index->root_buckets));
    return kvk_keymap_init(index);
}

enum kvk_status kvk_index_create(const struct kvk_index_options *options, struct kvk_index **index)
{
    KVK_ASSERT(options->block_count_max > 0);
    KVK_ASSERT(options->block_count_max < KVK_BLOCK_NONE);
    KVK_ASSERT(options->root_count_max > 0);
    KVK_ASSERT(options->root_count_max < KVK_ROOT_NONE);
    struct kvk_index *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return KVK_EXHAUSTED;
    }
    kvk_memory_add(created, sizeof(*created));
    created->block_count_max = options->block_count_max;
    created->block_free = KVK_BLOCK_NONE;
    created->run_free = KVK_RUN_NONE;
    created->root_count_max = options->root_count_max;
    created->root_bucket_count = power_of_two_above(options->root_count_max);
    created->root_free = KVK_ROOT_NONE;
    if (!directories_create(created)) {
        kvk_index_destroy(created);
        return KVK_EXHAUSTED;
    }
    *index = created;
    return KVK_OK;
}

static void runs_finish(struct kvk_index *index)
{
    for (uint32_t id = 0; id < index->run_high; id++) {
        struct kvk_run *run = kvk_run_at(index, id);
        for (uint32_t i = 0; i < run->count && run->extras != NULL; i++) {
            free(run->extras[i]);
        }
        free(run->extras);
        free(run->tokens);
    }
    for (uint32_t id = 0; id < index->run_high; id += KVK_CHUNK_RUNS) {
        kvk_pages_destroy(index->run_chunks[id / KVK_CHUNK_RUNS],
                          kvk_chunk_count(index, id, KVK_CHUNK_RUNS) * sizeof(struct kvk_run));
    }
}

void kvk_index_destroy(struct kvk_index *index)
{
    if (index == NULL) {
        return;
    }
    runs_finish(index);
    for (uint32_t id = 0; id < index->block_high; id += KVK_CHUNK_BLOCKS) {
        kvk_pages_destroy(index->block_chunks[id / KVK_CHUNK_BLOCKS],
                          kvk_chunk_count(index, id, KVK_CHUNK_BLOCKS) * sizeof(struct kvk_block));
    }
    for (uint32_t id = 0; id < index->root_high; id++) {
        free(kvk_root_at(index, id)->identity);
    }
    kvk_keymap_finish(index);
    free(index->block_chunks);
    free(index->run_chunks);
    free(index->roots);
    free(index->root_buckets);
    free(index->scratch);
    free(index);
}

/* ---- Blocks ---- */

static bool block_chunk_add(struct kvk_index *index)
{
    size_t size =
        kvk_chunk_count(index, index->block_high, KVK_CHUNK_BLOCKS) * sizeof(struct kvk_block);
    struct kvk_block *chunk = kvk_pages_create(size);
    if (chunk == NULL) {
        return false;
    }
    kvk_memory_add(index, size);
    index->block_chunks[index->block_high / KVK_CHUNK_BLOCKS] = chunk;
    return true;
}

uint32_t kvk_index_block_alloc(struct kvk_index *index, uint32_t arena)
{
    uint32_t id = index->block_free;
    if (id != KVK_BLOCK_NONE) {
        index->block_free = kvk_block_at(index, id)->hash_next;
    } else {
        if (index->block_high == index->block_count_max) {
            return KVK_BLOCK_NONE;
        }
        if (index->block_high % KVK_CHUNK_BLOCKS == 0 && !block_chunk_add(index)) {
            return KVK_BLOCK_NONE;
        }
        id = index->block_high++;
    }
    struct kvk_block *block = kvk_block_at(index, id);
    *block = (struct kvk_block){
        .parent = KVK_BLOCK_NONE,
        .run = KVK_RUN_NONE,
        .hash_next = KVK_BLOCK_NONE,
        .state = KVK_BLOCK_FREE,
        .arena = arena,
        .queue_index = UINT32_MAX,
    };
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        block->slot[tier] = KVK_SLOT_NONE;
    }
    index->block_count++;
    return id;
}

void kvk_index_block_free(struct kvk_index *index, uint32_t block)
{
    struct kvk_block *freed = kvk_index_block(index, block);
    KVK_ASSERT(freed->run_offset != KVK_OFFSET_UNALLOCATED);
    KVK_ASSERT(freed->state == KVK_BLOCK_FREE);
    KVK_ASSERT(!kvk_block_is_indexed(freed));
    KVK_ASSERT(freed->queue == NULL);
    freed->run_offset = KVK_OFFSET_UNALLOCATED;
    freed->hash_next = index->block_free;
    index->block_free = block;
    index->block_count--;
}

struct kvk_block *kvk_index_block(const struct kvk_index *index, uint32_t block)
{
    KVK_ASSERT(block < index->block_high);
    return kvk_block_at(index, block);
}

uint32_t kvk_index_block_count(const struct kvk_index *index)
{
    return index->block_count;
}

uint32_t kvk_index_block_id_end(const struct kvk_index *index)
{
    return index->block_high;
}

uint32_t kvk_index_root_of(const struct kvk_index *index, uint32_t block)
{
    const struct kvk_block *indexed = kvk_index_block(index, block);
    KVK_ASSERT(kvk_block_is_indexed(indexed));
    return kvk_run_at(index, indexed->run)->root;
}

/* One child more or less in a count of the parent. True: the count left 0 or came back to it. */
static bool count_changed(uint32_t *count, bool before, bool after)
{
    if (before == after) {
        return false;
    }
    if (after) {
        return (*count)++ == 0;
    }
    KVK_ASSERT(*count > 0);
    return --*count == 0;
}

uint32_t kvk_index_set_tiers(struct kvk_index *index, uint32_t block, uint8_t tier_mask)
{
    struct kvk_block *changed = kvk_index_block(index, block);
    uint8_t before = changed->tier_mask;
    changed->tier_mask = tier_mask;
    if (!kvk_block_is_indexed(changed)) {
        return KVK_BLOCK_NONE;
    }
    kvk_run_tiers(kvk_run_at(index, changed->run))[changed->run_offset] = tier_mask;
    index->hollow_count += tier_mask == 0;
    index->hollow_count -= before == 0;
    if (changed->parent == KVK_BLOCK_NONE) {
        return KVK_BLOCK_NONE;
    }
    struct kvk_block *parent = kvk_block_at(index, changed->parent);
    bool leaf = count_changed(&parent->memory_children, kvk_mask_has_memory(before),
                              kvk_mask_has_memory(tier_mask));
    bool device_leaf = count_changed(&parent->device_children, kvk_mask_has_device(before),
                                     kvk_mask_has_device(tier_mask));
    bool disk_leaf = count_changed(&parent->disk_children, kvk_mask_has_disk(before),
                                   kvk_mask_has_disk(tier_mask));
    return leaf || device_leaf || disk_leaf ? changed->parent : KVK_BLOCK_NONE;
}

void kvk_index_anchor(struct kvk_index *index, uint32_t block)
{
    struct kvk_block *anchored = kvk_index_block(index, block);
    KVK_ASSERT(kvk_block_is_indexed(anchored));
    KVK_ASSERT(anchored->anchor_count < UINT32_MAX);
    anchored->anchor_count++;
}

void kvk_index_unanchor(struct kvk_index *index, uint32_t block)
{
    struct kvk_block *anchored = kvk_index_block(index, block);
    KVK_ASSERT(anchored->anchor_count > 0);
    anchored->anchor_count--;
}

void kvk_index_stats(const struct kvk_index *index, struct kvk_index_stats *stats)
{
    *stats = (struct kvk_index_stats){
        .blocks = index->indexed_count,
        .private_blocks = index->block_count - index->indexed_count,
        .hollow_blocks = index->hollow_count,
        .runs = index->run_count,
        .roots = index->root_count,
        .bytes = index->memory_bytes - index->content_bytes,
        .token_bytes = index->content_bytes,
    };
}
