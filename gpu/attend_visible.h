/*
 * Which tokens a run of queries can see: the mask rule of gpu/attend.h as ranges. At most two:
 * the sinks, and the rest. Pages may be absent in them.
 */
#ifndef KVK_GPU_ATTEND_VISIBLE_H
#define KVK_GPU_ATTEND_VISIBLE_H

#include "gpu/attend.h"

/* Positions, [begin, end); begin == end: empty. */
struct kvk_token_range {
    uint64_t begin;
    uint64_t end;
};

struct kvk_attend_visible {
    struct kvk_token_range sinks; /* where there is a window: it does not bind these */
    struct kvk_token_range rest;  /* begins at their end or later */
};

static inline struct kvk_token_range kvk_token_range_from(struct kvk_token_range range,
                                                          uint64_t begin)
{
    if (range.begin < begin) {
        range.begin = begin < range.end ? begin : range.end;
    }
    return range;
}

/* What at least one of `query_count` queries from `position` on sees of the item's pages. */
static inline struct kvk_attend_visible kvk_attend_visible(const struct kvk_attend *attend,
                                                           const struct kvk_attend_item *item,
                                                           uint64_t position, uint64_t query_count)
{
    struct kvk_attend_visible visible = {{0, 0}, {0, item->token_count}};

    if (attend->causal && position + query_count < item->token_count) {
        visible.rest.end = position + query_count;
    }
    if (attend->window != 0) {
        uint64_t end = visible.rest.end;
        visible.sinks.end = attend->sinks < end ? attend->sinks : end;
        visible.rest.begin = visible.sinks.end;
        if (position + 1 > attend->window) {
            visible.rest = kvk_token_range_from(visible.rest, position + 1 - attend->window);
        }
    }
    visible.sinks = kvk_token_range_from(visible.sinks, item->first_token);
    visible.rest = kvk_token_range_from(visible.rest, item->first_token);
    return visible;
}

#endif
