/*
 * Hints of priority: a caller says of a range of a prompt's tokens how much their blocks are worth
 * to eviction, for a while.
 *
 * Above 50 the blocks go only after all others of their queues, below 50 before them. The strength
 * is time: 100 (and 0) count for the whole duration, 75 (and 25) for half of it, in proportion;
 * among blocks with hints the one whose time ends first goes first. So a hint ages out by itself,
 * and no block is kept for ever. What a tenant may keep by hints is bounded to config.hint_percent
 * of what it may use in all tiers; beyond that they count for nothing, soonest to end first.
 *
 * Locking: cache.lock.
 */
#ifndef KVK_DAEMON_HINT_H
#define KVK_DAEMON_HINT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "index/evict.h"

#define KVK_HINTS_MAX 64 /* of one call */
#define KVK_HINT_MS_MAX (UINT64_C(24) * 3600 * 1000)
#define KVK_HINT_PRIORITY_NEUTRAL 50U
#define KVK_HINT_PRIORITY_MAX 100U

struct kvk_cache;
struct kvk_space;

/* As a request says it; checked at the edge: the range lies in the prompt. */
struct kvk_priority_hint {
    uint64_t first_token;
    uint64_t token_count; /* at least 1 */
    uint64_t duration_ms; /* 1 to KVK_HINT_MS_MAX */
    uint32_t priority;    /* 0 to 100 */
};

/* What comes of it, on the policy clock. */
struct kvk_hint {
    uint64_t first_token, end_token;
    uint64_t until_ns;
    enum kvk_evict_hint_kind kind;
};

struct kvk_hint kvk_hint_from(const struct kvk_priority_hint *asked, uint64_t now_ns);

/* The last hint that touches the block's tokens counts for it, where it is indexed and whole. */
void kvk_hints_apply(struct kvk_cache *cache, const struct kvk_space *space,
                     const struct kvk_hint *hints, uint32_t hint_count, uint64_t index,
                     uint32_t block);

#endif
