/*
 * Every law of the index, recounted from the blocks up. Any breach aborts.
 *
 * A chain is checked from each of its blocks: that the run says what the block says, that its key
 * follows from its parent's, and that looking for it finds it and nothing else. Counts that are
 * kept (children, hollow ones, totals) are compared with counts made here.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "index/internal.h"

static void check_life(const struct kvk_block *block)
{
    switch ((enum kvk_block_state)block->state) {
    case KVK_BLOCK_FREE:
    case KVK_BLOCK_EVICTABLE:
    case KVK_BLOCK_HOLLOW:
        KVK_ASSERT(block->hold_count == 0);
        break;
    case KVK_BLOCK_RESERVED:
    case KVK_BLOCK_ACTIVE:
        KVK_ASSERT(block->hold_count > 0);
        break;
    case KVK_BLOCK_SEALED:
        KVK_ASSERT(block->hold_count == 1);
        break;
    case KVK_BLOCK_SHARED:
        KVK_ASSERT(block->hold_count > 1);
        break;
    }
    KVK_ASSERT(block->state < KVK_BLOCK_STATE_COUNT);
    if (block->transfer_count > 0) {
        KVK_ASSERT(kvk_block_is_whole(block) || block->state == KVK_BLOCK_ACTIVE);
    }
    KVK_ASSERT((block->queue == NULL) == (block->queue_index == UINT32_MAX));
    if (block->queue != NULL) {
        KVK_ASSERT(kvk_block_is_whole(block));
    }
}

static void check_key(const struct kvk_index *index, uint32_t id, const struct kvk_block *block,
                      const struct kvk_run *run)
{
    const struct kvk_root *root = kvk_root_at(index, run->root);
    const uint32_t *tokens = kvk_run_tokens(run, block->run_offset);
    const struct kvk_extra *extra = kvk_run_extra(run, block->run_offset);
    const uint8_t *bytes = extra == NULL ? NULL : extra->bytes;
    size_t size = extra == NULL ? 0 : extra->size;
    struct kvk_key above =
        block->parent == KVK_BLOCK_NONE ? root->key : kvk_block_at(index, block->parent)->key;
    struct kvk_key key =
        kvk_key_block(root->hasher, above, tokens, root->block_tokens, bytes, size);
    KVK_ASSERT(kvk_key_equal(key, block->key));
    KVK_ASSERT(kvk_chain_child(index, run->root, block->parent, key, tokens, bytes, size) == id);
}

/* The children of a block, or of a root, counted one by one against what was kept. */
static void check_children(const struct kvk_index *index, uint32_t root, uint32_t parent,
                           uint32_t position)
{
    uint32_t count = 0;
    uint32_t in_memory = 0;
    uint32_t on_device = 0;
    uint32_t on_disk = 0;
    for (uint32_t id = kvk_index_first_child(index, root, parent); id != KVK_BLOCK_NONE;
         id = kvk_index_next_child(index, id)) {
        const struct kvk_block *child = kvk_block_at(index, id);
        KVK_ASSERT(kvk_block_is_indexed(child));
        KVK_ASSERT(child->parent == parent);
        KVK_ASSERT(child->position == position);
        KVK_ASSERT(kvk_run_at(index, child->run)->root == root);
        count++;
        in_memory += kvk_mask_has_memory(child->tier_mask);
        on_disk += kvk_mask_has_disk(child->tier_mask);
        on_device += kvk_mask_has_device(child->tier_mask);
        KVK_ASSERT(count <= index->indexed_count); /* no ring among the siblings */
    }
    if (parent == KVK_BLOCK_NONE) {
        KVK_ASSERT(count == kvk_root_at(index, root)->child_count);
        return;
    }
    const struct kvk_block *block = kvk_block_at(index, parent);
    KVK_ASSERT(count == block->child_count);
    KVK_ASSERT(in_memory == block->memory_children);
    KVK_ASSERT(on_disk == block->disk_children);
    KVK_ASSERT(on_device == block->device_children);
}

/* An indexed block: its parent is indexed too, and all places that know of it agree. */
static void check_indexed(const struct kvk_index *index, uint32_t id, const struct kvk_block *block)
{
    KVK_ASSERT(kvk_block_is_whole(block) || block->state == KVK_BLOCK_HOLLOW);
    KVK_ASSERT(block->state != KVK_BLOCK_HOLLOW || block->tier_mask == 0);
    KVK_ASSERT(block->run < index->run_high);
    const struct kvk_run *run = kvk_run_at(index, block->run);
    KVK_ASSERT(block->run_offset < run->count);
    KVK_ASSERT(kvk_run_ids(run)[block->run_offset] == id);
    KVK_ASSERT(kvk_run_tiers(run)[block->run_offset] == block->tier_mask);
    uint32_t parent = block->run_offset > 0 ? kvk_run_ids(run)[block->run_offset - 1] : run->parent;
    KVK_ASSERT(block->parent == parent);
    if (parent == KVK_BLOCK_NONE) {
        KVK_ASSERT(block->position == 0);
    } else {
        const struct kvk_block *above = kvk_block_at(index, parent);
        KVK_ASSERT(kvk_block_is_indexed(above));
        KVK_ASSERT(block->position == above->position + 1);
    }
    if (block->state == KVK_BLOCK_HOLLOW) {
        KVK_ASSERT(block->queue == NULL);
    }
    check_key(index, id, block, run);
    check_children(index, run->root, id, block->position + 1);
}

static void check_blocks(const struct kvk_index *index)
{
    uint64_t allocated = 0;
    uint64_t indexed = 0;
    uint64_t hollow = 0;
    for (uint32_t id = 0; id < index->block_high; id++) {
        const struct kvk_block *block = kvk_block_at(index, id);
        if (block->run_offset == KVK_OFFSET_UNALLOCATED) {
            KVK_ASSERT(block->state == KVK_BLOCK_FREE);
            KVK_ASSERT(!kvk_block_is_indexed(block));
            continue;
        }
        allocated++;
        check_life(block);
        if (kvk_block_is_indexed(block)) {
            indexed++;
            hollow += block->tier_mask == 0;
            check_indexed(index, id, block);
        } else {
            KVK_ASSERT(block->parent == KVK_BLOCK_NONE);
            KVK_ASSERT(block->state != KVK_BLOCK_HOLLOW);
        }
    }
    KVK_ASSERT(allocated == index->block_count);
    KVK_ASSERT(allocated <= index->block_count_max);
    KVK_ASSERT(indexed == index->indexed_count);
    KVK_ASSERT(hollow == index->hollow_count);
    uint64_t unallocated = 0;
    for (uint32_t id = index->block_free; id != KVK_BLOCK_NONE;
         id = kvk_block_at(index, id)->hash_next) {
        KVK_ASSERT(kvk_block_at(index, id)->run_offset == KVK_OFFSET_UNALLOCATED);
        unallocated++;
        KVK_ASSERT(unallocated <= index->block_high);
    }
    KVK_ASSERT(allocated + unallocated == index->block_high);
}

static void check_runs(const struct kvk_index *index)
{
    uint64_t runs = 0;
    uint64_t blocks = 0;
    for (uint32_t id = 0; id < index->run_high; id++) {
        const struct kvk_run *run = kvk_run_at(index, id);
        if (run->count == 0) {
            continue;
        }
        runs++;
        blocks += run->count;
        const struct kvk_root *root = kvk_root_at(index, run->root);
        KVK_ASSERT(run->count <= run->capacity);
        KVK_ASSERT(run->capacity <= root->run_blocks_max);
        KVK_ASSERT(run->block_tokens == root->block_tokens);
        if (run->previous_sibling == KVK_RUN_NONE) {
            KVK_ASSERT(*kvk_run_head(index, run->root, run->parent) == id);
        } else {
            KVK_ASSERT(kvk_run_at(index, run->previous_sibling)->next_sibling == id);
        }
    }
    KVK_ASSERT(runs == index->run_count);
    KVK_ASSERT(blocks == index->indexed_count);
}

static void check_roots(const struct kvk_index *index)
{
    uint64_t roots = 0;
    uint64_t blocks = 0;
    for (uint32_t id = 0; id < index->root_high; id++) {
        const struct kvk_root *root = kvk_root_at(index, id);
        if (root->hasher == NULL) {
            continue;
        }
        roots++;
        blocks += root->block_count;
        KVK_ASSERT(root->reference_count > 0 || root->block_count > 0);
        check_children(index, id, KVK_BLOCK_NONE, 0);
    }
    KVK_ASSERT(roots == index->root_count);
    KVK_ASSERT(roots <= index->root_count_max);
    KVK_ASSERT(blocks == index->indexed_count);
}

static void check_keymap(const struct kvk_index *index)
{
    uint64_t blocks = 0;
    KVK_ASSERT(index->bucket_round <= index->bucket_count);
    KVK_ASSERT(index->bucket_count < 2 * (uint64_t)index->bucket_round);
    for (uint32_t bucket = 0; bucket < index->bucket_count; bucket++) {
        for (uint32_t id = *kvk_keymap_bucket(index, bucket); id != KVK_BLOCK_NONE;) {
            const struct kvk_block *block = kvk_block_at(index, id);
            KVK_ASSERT(kvk_block_is_indexed(block));
            KVK_ASSERT(kvk_keymap_head(index, block->key) == kvk_keymap_bucket(index, bucket));
            blocks++;
            KVK_ASSERT(blocks <= index->indexed_count);
            id = block->hash_next;
        }
    }
    KVK_ASSERT(blocks == index->indexed_count);
}

void kvk_index_check(const struct kvk_index *index)
{
    check_blocks(index);
    check_runs(index);
    check_roots(index);
    check_keymap(index);
}
