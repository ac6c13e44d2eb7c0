/*
 * Planned against measured: what a space's blocks should take by the formulas of base/capacity.h,
 * and what they take.
 */
#ifndef KVK_DAEMON_REPORT_PLAN_H
#define KVK_DAEMON_REPORT_PLAN_H

#include "base/capacity.h"
#include "daemon/cache.h"

/* The formulas' view of layer groups that the daemon can hold. KVK_UNSUPPORTED, naming the field:
 * a layout of which no values are known, or K and V of different plain formats. */
KVK_CHECKED enum kvk_status kvk_plan_capacity(const struct kvk_geometry *groups,
                                              uint32_t group_count, uint64_t encoder_tokens,
                                              struct kvk_capacity *capacity,
                                              struct kvk_error *error);

struct kvk_plan_tier {
    uint64_t blocks;        /* whole copies, of all groups */
    uint64_t tokens;        /* that they stand for: those of the group that has most */
    uint64_t used_bytes;    /* slots taken, those of unfinished blocks too */
    uint64_t planned_bytes; /* what so many tokens take by the formulas, in the tier's format */
    uint64_t values;        /* of K and V that so many tokens have */
    uint64_t limit_bytes;   /* of the tier, all spaces together */
};

struct kvk_plan_space {
    struct kvk_capacity capacity;
    struct kvk_plan_tier tiers[KVK_TIER_COUNT];
};

/* Of a space that the caller may see. KVK_NOT_FOUND. */
KVK_CHECKED enum kvk_status kvk_report_plan(struct kvk_cache *cache,
                                            const struct kvk_caller *caller, uint64_t space_id,
                                            uint64_t encoder_tokens, struct kvk_plan_space *result,
                                            struct kvk_error *error);
/* The tier that sequences begin in, its bytes divided over the ranks: the budget where none is
 * named. */
uint64_t kvk_report_plan_budget(struct kvk_cache *cache, uint32_t rank_count);

#endif
