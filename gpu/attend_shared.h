/*
 * Prefixes that items of a batch share, found in their page tables.
 *
 * Two items whose tables begin with the same pages at the same first_token read the same K/V there.
 * A batch is taken apart into segments: runs of pages with the items that have them in common. The
 * segments of an item are disjoint, and together they are its table, so a device reads every
 * segment once for all of its items and merges what each item got, by LSE. What a query sees of a
 * segment is still for the mask to say: shared is the memory, not the view of it. Under a window
 * only items at the same position share, since others see other pages.
 */
#ifndef KVK_GPU_ATTEND_SHARED_H
#define KVK_GPU_ATTEND_SHARED_H

#include <stdint.h>

#include "gpu/attend.h"

struct kvk_attend_segment {
    uint32_t first_member; /* members[first_member…] of the split */
    uint32_t member_count; /* at least 1 */
    uint32_t first_page;   /* in each member's table */
    uint32_t page_count;   /* 0: an item without pages, which still wants its empty result */
};

/* Segments stand before those that continue them. */
struct kvk_attend_split {
    struct kvk_attend_segment *segments; /* [segment_count], at most 2 x item_count */
    uint32_t segment_count;
    uint32_t *members; /* [item_count]: items, so ordered that a segment's lie side by side */
};

/* `attend` has passed kvk_attend_check(). Runs of fewer than `tokens_min` tokens are left to each
 * item: what sharing saves must pay for merging. KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_attend_split_init(struct kvk_attend_split *split,
                                                  const struct kvk_attend *attend,
                                                  uint64_t tokens_min, struct kvk_error *error);
void kvk_attend_split_finish(struct kvk_attend_split *split);

#endif
