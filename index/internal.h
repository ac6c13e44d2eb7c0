/*
 * Inside the index: how blocks, runs, roots and the table of keys lie in memory.
 *
 * - Blocks and runs live in chunks that never move and are named by 32-bit ids.
 * - A run is an unbranched stretch of one chain. Its tokens, block ids, branch heads and tier masks
 *   are four arrays in one piece of memory. A block's first child goes into the same run, right
 *   behind it; any further child begins a run of its own that hangs from the block, in a doubly
 *   linked list of siblings whose head is the branch head beside the block's id (or in the root).
 *   A run is never split: a branch only adds a sibling. A run has a greatest length, so that
 *   growing one copies a bounded number of bytes; past it the chain goes on in a child run.
 * - The table of keys is a linear hash: an insert splits two buckets at most, so that it grows
 *   without ever moving everything at once. Blocks of a bucket are chained by kvk_block.hash_next.
 *
 * Locking: as index/index.h.
 */
#ifndef KVK_INDEX_INTERNAL_H
#define KVK_INDEX_INTERNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/block.h"
#include "index/index.h"
#include "index/key.h"

#define KVK_RUN_NONE UINT32_MAX
#define KVK_OFFSET_UNALLOCATED UINT32_MAX /* kvk_block.run_offset of a block that nobody has */

#define KVK_RUN_BLOCKS_MAX 256         /* of one run */
#define KVK_RUN_BLOCKS_MIN 4           /* that any run may reach, however long its blocks are */
#define KVK_RUN_TOKENS_MAX 4096        /* of one run, where that leaves KVK_RUN_BLOCKS_MIN */
#define KVK_CHUNK_BLOCKS 17408         /* of one chunk: 2 MiB but for a little */
#define KVK_CHUNK_RUNS 52224           /* of one chunk, likewise */
#define KVK_SEGMENT_BUCKETS (1U << 19) /* buckets that are allocated together: 2 MiB */
#define KVK_ALLOCATION_OVERHEAD 16     /* what malloc adds to a piece, for honest counting */

/* The content bytes of one block. */
struct kvk_extra {
    size_t size;
    uint8_t bytes[];
};

struct kvk_run {
    /* tokens [capacity][block_tokens], ids [capacity], branch heads [capacity], tiers [capacity] */
    uint32_t *tokens;
    struct kvk_extra **extras; /* [capacity], or NULL while no block has content bytes */
    uint32_t root;
    uint32_t parent; /* the block that the first one hangs from; KVK_BLOCK_NONE: from the root */
    uint32_t next_sibling;     /* also the list of free runs */
    uint32_t previous_sibling; /* KVK_RUN_NONE: the head names this one */
    uint16_t count;            /* 0: a free run */
    uint16_t capacity;
    uint32_t block_tokens; /* the root's */
};

struct kvk_root {
    struct kvk_key key;
    const struct kvk_hasher *hasher; /* borrowed; NULL: a free root */
    uint8_t *identity;               /* ours; the salt lies behind it */
    size_t identity_size;
    size_t salt_size;
    uint32_t group;
    uint32_t block_tokens;
    uint32_t run_blocks_max;
    uint32_t reference_count;
    uint32_t block_count; /* indexed */
    uint32_t child_count;
    uint32_t first_run;   /* head of the runs that hang from it */
    uint32_t bucket_next; /* next root of its bucket; also the list of free roots */
    bool windowed;
    uint64_t user;
    struct kvk_index_account *account; /* borrowed, or NULL */
};

struct kvk_index {
    struct kvk_block *
        *block_chunks; /* [block_count_max / KVK_CHUNK_BLOCKS + 1], ours, as all here */
    uint32_t block_count_max;
    uint32_t block_high;  /* ids below were given out at least once */
    uint32_t block_count; /* allocated now */
    uint32_t block_free;  /* list through kvk_block.hash_next */

    struct kvk_run **run_chunks; /* likewise: there are no more runs than blocks */
    uint32_t run_high;
    uint32_t run_count;
    uint32_t run_free;

    struct kvk_root *roots; /* [root_count_max] */
    uint32_t *root_buckets; /* [root_bucket_count], a power of two */
    uint32_t root_bucket_count;
    uint32_t root_count_max;
    uint32_t root_high;
    uint32_t root_count;
    uint32_t root_free;

    uint32_t **segments; /* buckets of the table of keys: [segment_count_max] */
    uint32_t segment_count_max;
    uint32_t segment_count;
    uint32_t bucket_count; /* buckets in use; grows one by one */
    uint32_t bucket_round; /* the greatest power of two that is not greater */

    uint8_t *scratch; /* content bytes of one block of any open root */
    size_t scratch_size;

    uint64_t indexed_count;
    uint64_t hollow_count;  /* indexed, without a copy */
    uint64_t memory_bytes;  /* all of the above and what it points to, tokens and content too */
    uint64_t content_bytes; /* tokens and content bytes of indexed blocks */
};

static inline struct kvk_block *kvk_block_at(const struct kvk_index *index, uint32_t block)
{
    return &index->block_chunks[block / KVK_CHUNK_BLOCKS][block % KVK_CHUNK_BLOCKS];
}

static inline struct kvk_run *kvk_run_at(const struct kvk_index *index, uint32_t run)
{
    return &index->run_chunks[run / KVK_CHUNK_RUNS][run % KVK_CHUNK_RUNS];
}

static inline struct kvk_root *kvk_root_at(const struct kvk_index *index, uint32_t root)
{
    return &index->roots[root];
}

static inline bool kvk_block_is_indexed(const struct kvk_block *block)
{
    return block->run != KVK_RUN_NONE;
}

/* How many of a chunk's places can ever be needed: the chunk that begins at `first`. */
static inline uint32_t kvk_chunk_count(const struct kvk_index *index, uint32_t first, uint32_t most)
{
    uint32_t left = index->block_count_max - first;
    return left < most ? left : most;
}

static inline bool kvk_mask_has_memory(uint8_t tier_mask)
{
    return (tier_mask & KVK_MEMORY_TIER_MASK) != 0;
}

static inline bool kvk_mask_has_disk(uint8_t tier_mask)
{
    return (tier_mask & (1U << KVK_TIER_DISK)) != 0;
}

static inline bool kvk_mask_has_device(uint8_t tier_mask)
{
    return (tier_mask & (1U << KVK_TIER_DEVICE)) != 0;
}

/* Count a piece of memory that was allocated, or will be freed. */
static inline void kvk_memory_add(struct kvk_index *index, size_t size)
{
    index->memory_bytes += size + KVK_ALLOCATION_OVERHEAD;
}

static inline void kvk_memory_sub(struct kvk_index *index, size_t size)
{
    index->memory_bytes -= size + KVK_ALLOCATION_OVERHEAD;
}

/* ---- keymap.c: the table of keys ---- */

bool kvk_keymap_init(struct kvk_index *index); /* false: no memory */
void kvk_keymap_finish(struct kvk_index *index);
void kvk_keymap_insert(struct kvk_index *index, uint32_t block);
void kvk_keymap_remove(struct kvk_index *index, uint32_t block);

/* Where the list of the blocks begins whose keys fall together with this one. */
uint32_t *kvk_keymap_head(const struct kvk_index *index, struct kvk_key key);
uint32_t *kvk_keymap_bucket(const struct kvk_index *index, uint32_t bucket);

/* ---- run.c ---- */

static inline uint32_t *kvk_run_ids(const struct kvk_run *run)
{
    return run->tokens + (size_t)run->capacity * run->block_tokens;
}

/* Per block, the head of the runs that hang from it beside its child in this run. */
static inline uint32_t *kvk_run_branches(const struct kvk_run *run)
{
    return kvk_run_ids(run) + run->capacity;
}

static inline uint8_t *kvk_run_tiers(const struct kvk_run *run)
{
    return (uint8_t *)(kvk_run_branches(run) + run->capacity);
}

static inline const uint32_t *kvk_run_tokens(const struct kvk_run *run, uint32_t offset)
{
    return run->tokens + (size_t)offset * run->block_tokens;
}

static inline const struct kvk_extra *kvk_run_extra(const struct kvk_run *run, uint32_t offset)
{
    return run->extras == NULL ? NULL : run->extras[offset];
}

/* A new run with room for one block, linked nowhere; KVK_RUN_NONE: no memory. */
uint32_t kvk_run_create(struct kvk_index *index, uint32_t root);
void kvk_run_destroy(struct kvk_index *index, uint32_t run); /* of count 0 */

/* Room for one block more, and for content bytes where `with_extra`. False: no memory, but the run
 * is as good as before. */
bool kvk_run_reserve(struct kvk_index *index, struct kvk_run *run, bool with_extra);

struct kvk_extra *kvk_extra_create(struct kvk_index *index, const uint8_t *bytes, size_t size);
void kvk_extra_destroy(struct kvk_index *index, struct kvk_extra *extra);

void kvk_run_append(struct kvk_index *index, struct kvk_run *run, uint32_t block,
                    const uint32_t *tokens, struct kvk_extra *extra, uint8_t tier_mask);
void kvk_run_drop_last(struct kvk_index *index, struct kvk_run *run);

/* The head of the list of runs that hang from a block, or from the root. */
uint32_t *kvk_run_head(const struct kvk_index *index, uint32_t root, uint32_t parent);
void kvk_run_link(struct kvk_index *index, uint32_t run, uint32_t parent);
void kvk_run_unlink(struct kvk_index *index, uint32_t run);

/* ---- root.c ---- */

/* The root goes, unless somebody has a reference or blocks hang from it. */
void kvk_root_free_unused(struct kvk_index *index, uint32_t root);

/* ---- chain.c ---- */

/* The child of `parent` (or of the root) with this key, these tokens and content bytes, or
 * KVK_BLOCK_NONE. The key finds candidates; what decides is equality itself. */
uint32_t kvk_chain_child(const struct kvk_index *index, uint32_t root, uint32_t parent,
                         struct kvk_key key, const uint32_t *tokens, const uint8_t *extra,
                         size_t extra_size);

#endif
