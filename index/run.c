/* Runs: the memory of unbranched stretches, and the lists by which they hang from blocks. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "index/internal.h"
#include "base/pages.h"

/* ---- Memory ---- */

static size_t run_size(const struct kvk_run *run, uint32_t capacity)
{
    size_t per_block = (size_t)run->block_tokens * sizeof(uint32_t) + 2 * sizeof(uint32_t) + 1;
    return capacity * per_block;
}

/*
 * The capacities that runs have: 1, 2, 3, 4, 6, 8, 12, 16, 24… A third at most lies idle, and each
 * block is copied three times in all while its run grows.
 */
static uint32_t capacity_for(uint32_t count, uint32_t capacity_max)
{
    uint32_t capacity = 1;
    while (capacity < count) {
        bool is_power = (capacity & (capacity - 1)) == 0;
        capacity += capacity == 1 ? 1 : is_power ? capacity / 2 : capacity / 3;
    }
    return capacity < capacity_max ? capacity : capacity_max;
}

/* Move the run to arrays of another capacity. False: no memory, nothing changed. */
static bool run_resize(struct kvk_index *index, struct kvk_run *run, uint32_t capacity)
{
    KVK_ASSERT(capacity >= run->count);
    struct kvk_extra **extras = NULL;
    if (run->extras != NULL) {
        extras = calloc(capacity, sizeof(*extras));
        if (extras == NULL) {
            return false;
        }
    }
    struct kvk_run moved = *run;
    moved.tokens = malloc(run_size(run, capacity));
    if (moved.tokens == NULL) {
        free(extras);
        return false;
    }
    moved.capacity = (uint16_t)capacity;
    moved.extras = extras;
    kvk_memory_add(index, run_size(run, capacity));
    if (run->tokens != NULL) {
        size_t count = run->count;
        memcpy(moved.tokens, run->tokens, count * run->block_tokens * sizeof(uint32_t));
        memcpy(kvk_run_ids(&moved), kvk_run_ids(run), count * sizeof(uint32_t));
        memcpy(kvk_run_branches(&moved), kvk_run_branches(run), count * sizeof(uint32_t));
        memcpy(kvk_run_tiers(&moved), kvk_run_tiers(run), count);
        kvk_memory_sub(index, run_size(run, run->capacity));
        free(run->tokens);
    }
    if (run->extras != NULL) {
        memcpy(extras, run->extras, run->count * sizeof(*extras));
        kvk_memory_add(index, capacity * sizeof(*extras));
        kvk_memory_sub(index, run->capacity * sizeof(*extras));
        free(run->extras);
    }
    *run = moved;
    return true;
}

static bool run_chunk_add(struct kvk_index *index)
{
    size_t size = kvk_chunk_count(index, index->run_high, KVK_CHUNK_RUNS) * sizeof(struct kvk_run);
    struct kvk_run *chunk = kvk_pages_create(size);
    if (chunk == NULL) {
        return false;
    }
    kvk_memory_add(index, size);
    index->run_chunks[index->run_high / KVK_CHUNK_RUNS] = chunk;
    return true;
}

uint32_t kvk_run_create(struct kvk_index *index, uint32_t root)
{
    uint32_t id = index->run_free;
    if (id == KVK_RUN_NONE) {
        /* A run holds a block at least, so there are never more of them. */
        KVK_ASSERT(index->run_high < index->block_count_max);
        if (index->run_high % KVK_CHUNK_RUNS == 0 && !run_chunk_add(index)) {
            return KVK_RUN_NONE;
        }
        id = index->run_high++;
        *kvk_run_at(index, id) = (struct kvk_run){.next_sibling = KVK_RUN_NONE};
        index->run_free = id;
    }
    struct kvk_run *run = kvk_run_at(index, id);
    uint32_t next_free = run->next_sibling;
    *run = (struct kvk_run){
        .root = root,
        .parent = KVK_BLOCK_NONE,
        .next_sibling = KVK_RUN_NONE,
        .previous_sibling = KVK_RUN_NONE,
        .block_tokens = kvk_root_at(index, root)->block_tokens,
    };
    if (!run_resize(index, run, 1)) {
        run->next_sibling = next_free;
        return KVK_RUN_NONE;
    }
    index->run_free = next_free;
    index->run_count++;
    return id;
}

void kvk_run_destroy(struct kvk_index *index, uint32_t run_id)
{
    struct kvk_run *run = kvk_run_at(index, run_id);
    KVK_ASSERT(run->count == 0);
    kvk_memory_sub(index, run_size(run, run->capacity));
    free(run->tokens);
    if (run->extras != NULL) {
        kvk_memory_sub(index, run->capacity * sizeof(struct kvk_extra *));
        free(run->extras);
    }
    *run = (struct kvk_run){.next_sibling = index->run_free};
    index->run_free = run_id;
    index->run_count--;
}

bool kvk_run_reserve(struct kvk_index *index, struct kvk_run *run, bool with_extra)
{
    if (run->count == run->capacity) {
        uint32_t capacity_max = kvk_root_at(index, run->root)->run_blocks_max;
        KVK_ASSERT(run->count < capacity_max);
        if (!run_resize(index, run, capacity_for(run->count + 1U, capacity_max))) {
            return false;
        }
    }
    if (with_extra && run->extras == NULL) {
        run->extras = calloc(run->capacity, sizeof(struct kvk_extra *));
        if (run->extras == NULL) {
            return false;
        }
        kvk_memory_add(index, run->capacity * sizeof(struct kvk_extra *));
    }
    return true;
}

struct kvk_extra *kvk_extra_create(struct kvk_index *index, const uint8_t *bytes, size_t size)
{
    struct kvk_extra *extra = malloc(sizeof(*extra) + size);
    if (extra != NULL) {
        kvk_memory_add(index, sizeof(*extra) + size);
        index->content_bytes += size;
        extra->size = size;
        memcpy(extra->bytes, bytes, size);
    }
    return extra;
}

void kvk_extra_destroy(struct kvk_index *index, struct kvk_extra *extra)
{
    if (extra != NULL) {
        kvk_memory_sub(index, sizeof(*extra) + extra->size);
        index->content_bytes -= extra->size;
        free(extra);
    }
}

/* ---- Blocks at the end ---- */

void kvk_run_append(struct kvk_index *index, struct kvk_run *run, uint32_t block,
                    const uint32_t *tokens, struct kvk_extra *extra, uint8_t tier_mask)
{
    KVK_ASSERT(run->count < run->capacity);
    size_t token_size = (size_t)run->block_tokens * sizeof(uint32_t);
    memcpy(run->tokens + (size_t)run->count * run->block_tokens, tokens, token_size);
    kvk_run_ids(run)[run->count] = block;
    kvk_run_branches(run)[run->count] = KVK_RUN_NONE;
    kvk_run_tiers(run)[run->count] = tier_mask;
    if (extra != NULL) {
        run->extras[run->count] = extra;
    }
    run->count++;
    index->content_bytes += token_size;
}

void kvk_run_drop_last(struct kvk_index *index, struct kvk_run *run)
{
    KVK_ASSERT(run->count > 0);
    run->count--;
    KVK_ASSERT(kvk_run_branches(run)[run->count] == KVK_RUN_NONE);
    index->content_bytes -= (size_t)run->block_tokens * sizeof(uint32_t);
    if (run->extras != NULL) {
        kvk_extra_destroy(index, run->extras[run->count]);
        run->extras[run->count] = NULL;
    }
    /* Far below the next smaller capacity, so that a chain that grows and shrinks by turns does
     * not move each time. Without memory to move to, it stays as large as it is. */
    if (run->count > 0 && run->count <= run->capacity / 3) {
        (void)run_resize(index, run, capacity_for(run->count + 1U, run->capacity));
    }
}

/* ---- Siblings ---- */

uint32_t *kvk_run_head(const struct kvk_index *index, uint32_t root, uint32_t parent)
{
    if (parent == KVK_BLOCK_NONE) {
        return &kvk_root_at(index, root)->first_run;
    }
    const struct kvk_block *block = kvk_block_at(index, parent);
    return &kvk_run_branches(kvk_run_at(index, block->run))[block->run_offset];
}

void kvk_run_link(struct kvk_index *index, uint32_t run_id, uint32_t parent)
{
    struct kvk_run *run = kvk_run_at(index, run_id);
    uint32_t *head = kvk_run_head(index, run->root, parent);
    run->parent = parent;
    run->next_sibling = *head;
    if (*head != KVK_RUN_NONE) {
        kvk_run_at(index, *head)->previous_sibling = run_id;
    }
    *head = run_id;
}

void kvk_run_unlink(struct kvk_index *index, uint32_t run_id)
{
    struct kvk_run *run = kvk_run_at(index, run_id);
    if (run->next_sibling != KVK_RUN_NONE) {
        kvk_run_at(index, run->next_sibling)->previous_sibling = run->previous_sibling;
    }
    if (run->previous_sibling != KVK_RUN_NONE) {
        kvk_run_at(index, run->previous_sibling)->next_sibling = run->next_sibling;
    } else {
        *kvk_run_head(index, run->root, run->parent) = run->next_sibling;
    }
    run->next_sibling = KVK_RUN_NONE;
    run->previous_sibling = KVK_RUN_NONE;
}
