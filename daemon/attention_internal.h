/*
 * An attention under way. attention.c checks, computes and merges; attention_pages.c finds which
 * blocks its queries see and keeps them where they are meanwhile.
 */
#ifndef KVK_DAEMON_ATTENTION_INTERNAL_H
#define KVK_DAEMON_ATTENTION_INTERNAL_H

#include "daemon/cache_internal.h"

/* Blocks that one call may see, over all its items: bounds what it allocates. */
#define KVK_ATTENTION_PAGES_MAX (UINT64_C(4) << 20)

/* One block that some query sees. */
struct kvk_attention_page {
    uint32_t block; /* KVK_BLOCK_NONE: no query sees it */
    uint8_t tier;
    bool borrowed; /* by this page; else the same block's page of the item before keeps it */
};

/* What an item sees: pages first_page… of its sequence or lease. */
struct kvk_attention_span {
    uint64_t token_count; /* that are sealed, as far as it may see */
    uint64_t first_page;
    uint32_t page_count;
    uint64_t offset;                        /* in the arrays of pages */
    uint64_t tokens[KVK_MEMORY_TIER_COUNT]; /* seen there */
};

struct kvk_attention_plan {
    struct kvk_cache *cache; /* borrowed, as are the next two */
    const struct kvk_caller *caller;
    struct kvk_attention_request *request;

    uint64_t space_id;                 /* of all items */
    struct kvk_geometry geometry;      /* as on the device */
    struct kvk_geometry host_geometry; /* of blocks in the host tier: perhaps in a compact format */
    uint32_t shard;
    uint32_t shard_layer;
    struct kvk_attend attend;      /* all but the items; of the device tier */
    struct kvk_attend host_attend; /* the same of the host tier: format and offsets may be others */

    struct kvk_attention_span *spans;              /* [item_count], ours */
    struct kvk_attention_page *pages;              /* [page_count], ours */
    const void **addresses[KVK_MEMORY_TIER_COUNT]; /* [page_count], NULL: not there. Ours */
    uint64_t page_count;
};

/* Find the space and what each item sees; then, with room for them, take the pages; give them
 * back. All without the lock, which they hold in slices. */
KVK_CHECKED enum kvk_status kvk_attention_measure_unlocked(struct kvk_attention_plan *plan,
                                                           struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_attention_take_unlocked(struct kvk_attention_plan *plan,
                                                        struct kvk_error *error);
void kvk_attention_return_unlocked(struct kvk_attention_plan *plan);

/* The group that the request is for, checked; with the lock held. Fills geometry, shard, attend. */
KVK_CHECKED enum kvk_status kvk_attention_choose_group(struct kvk_attention_plan *plan,
                                                       const struct kvk_space *space,
                                                       struct kvk_error *error);

/* Blocks of the host tier in memory of the device, for one call. */
struct kvk_attention_brought {
    struct kvk_device *device; /* NULL: nothing was brought in */
    struct kvk_workspace *workspace;
    const void **pages; /* [page_count]: where the layer of the page's block begins; NULL: it is not
                           in the host tier. Ours */
};

/* Bytes that bringing in would copy; and doing it, without the lock. Where that fails nothing is
 * left of it, and blocks are attended where they lie. */
uint64_t kvk_attention_bring_bytes(const struct kvk_attention_plan *plan);
KVK_CHECKED enum kvk_status kvk_attention_bring(const struct kvk_attention_plan *plan,
                                                struct kvk_attention_brought *brought,
                                                struct kvk_error *error);
void kvk_attention_bring_finish(struct kvk_cache *cache, struct kvk_attention_brought *brought);

/* The space of an item's sequence or lease; with the lock held. */
KVK_CHECKED enum kvk_status kvk_attention_space(struct kvk_attention_plan *plan, uint32_t item,
                                                struct kvk_space **space, struct kvk_error *error);

#endif
