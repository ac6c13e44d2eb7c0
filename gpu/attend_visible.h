/*
 * Which tokens a query, or a run of queries, can see: the mask rule of gpu/attend.h as ranges.
 * At most two: the sinks, and the rest. One place, for the check, the driver and the plan.
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

/* What at least one of `query_count` queries from `position` on sees. Only what a query sees lies
 * in the ranges and, for one query, all of the ranges is seen. */
static inline struct kvk_attend_visible kvk_attend_visible(const struct kvk_attend *attend,
                                                           uint64_t token_count, uint64_t position,
                                                           uint64_t query_count)
{
    struct kvk_attend_visible visible = {{0, 0}, {0, token_count}};

    if (attend->causal && position + query_count < token_count) {
        visible.rest.end = position + query_count;
    }
    if (attend->window != 0) {
        uint64_t end = visible.rest.end;
        visible.sinks.end = attend->sinks < end ? attend->sinks : end;
        visible.rest.begin = visible.sinks.end;
        if (position + 1 > attend->window && position + 1 - attend->window > visible.rest.begin) {
            visible.rest.begin = position + 1 - attend->window;
        }
        if (visible.rest.begin > end) {
            visible.rest.begin = end;
        }
    }
    return visible;
}

#endif
