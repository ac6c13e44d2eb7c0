/*
 * What would twice the memory bring? Per tenant, the hit ratio of an LRU cache of any size, from
 * sampled reuse distances (index/shards.h).
 *
 * A reference is a whole block of a prompt that OpenSequence was asked for and granted, once per
 * request however often it was tried: one that was cached is referred to when the sequence opens,
 * one that was not when it is sealed and has its key anyway. So nothing is hashed for it, look-ups
 * that hold nothing cost nothing, and the order is that in which the cache itself uses blocks.
 * Blocks that come without being asked for (generated tokens) take room, and count as neither.
 *
 * One block in eight is offered by its key, fewer where that would cost more than a hundredth of
 * the time: see kvk_mrc_maintain(). What was counted loses half its weight every six hours.
 *
 * Locking: the cache lock.
 */
#ifndef KVK_DAEMON_MRC_H
#define KVK_DAEMON_MRC_H

#include "daemon/space.h"
#include "index/shards.h"

struct kvk_space;
struct kvk_sequence;

struct kvk_mrc {
    uint64_t tenant_id;
    struct kvk_shards *shards; /* ours; NULL: nobody's place */
    uint64_t aged_ns;
    uint64_t followed; /* as of the last round */
};

struct kvk_mrcs {
    struct kvk_mrc *list; /* [count_max], ours */
    uint32_t *of_tenant;  /* [KVK_TENANT_COUNT_MAX] place + 1 by tenant.index; 0: none; ours */
    uint32_t count_max;
    uint32_t count;
    uint64_t maintained_ns;
};

KVK_CHECKED enum kvk_status kvk_mrcs_init(struct kvk_mrcs *mrcs, const struct kvk_config *config);
void kvk_mrcs_finish(struct kvk_mrcs *mrcs);
uint64_t kvk_mrcs_bytes(const struct kvk_mrcs *mrcs); /* of memory */

/* The tenant has a space: from now on it is followed, if config.mrc_tenants are not already, and
 * there is memory. */
void kvk_mrc_begin(struct kvk_cache *cache, const struct kvk_tenant *tenant);
/* The tenant is forgotten: so is what was learned of it. */
void kvk_mrc_end(struct kvk_cache *cache, const struct kvk_tenant *tenant);

/* The sequence was opened; what it found is in its table. */
void kvk_mrc_opened(struct kvk_cache *cache, const struct kvk_sequence *sequence);
/* Its blocks [first, end) were sealed just now, and its cursor stands behind them. */
void kvk_mrc_sealed(struct kvk_cache *cache, const struct kvk_sequence *sequence, uint64_t first,
                    uint64_t end);

/* Which of a space's groups stands for all: the first that is not windowed. */
uint32_t kvk_mrc_group(const struct kvk_space *space);

/* Keep to the hundredth, and age. One bounded round. */
void kvk_mrc_maintain(struct kvk_cache *cache);

/* ---- The answer ---- */

#define KVK_MRC_POINTS 32

struct kvk_mrc_point {
    uint64_t size_bytes;
    double hits;  /* share of the references, 0 to 1 */
    double error; /* of it, estimated */
};

struct kvk_mrc_report {
    const struct kvk_tenant *tenant;
    uint64_t now_bytes;                                /* that its blocks take, in memory */
    uint64_t pool_bytes;                               /* of all tiers in memory together */
    double rate;                                       /* of blocks that are followed */
    uint32_t samples;                                  /* blocks that are followed */
    double references;                                 /* blocks asked for, as they weigh now */
    double hits;                                       /* of them, what the real cache had: share */
    struct kvk_mrc_point now, twice, four_times, pool; /* LRU of so many bytes */
    struct kvk_mrc_point ceiling;                      /* an endless cache */
    struct kvk_mrc_point points[KVK_MRC_POINTS];       /* [point_count] */
    uint32_t point_count;
    uint64_t distinct_bytes; /* of all different blocks, as far as they are remembered */
};

/* One row per tenant that is followed and that the caller may see; free(). `tenant` empty: all. */
KVK_CHECKED enum kvk_status kvk_report_mrc(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           struct kvk_view tenant, struct kvk_mrc_report **rows,
                                           uint32_t *row_count, struct kvk_error *error);

#endif
