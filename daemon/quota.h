/*
 * What a tenant may use, and what it has used: guaranteed shares and limits per tier, limits of
 * sequences and leases, the rate of its requests, and the counters that it can be charged by.
 *
 * The rules:
 * - A limit is never passed, by no path: one more slot of a tier is taken for a tenant only where
 *   the limit has room for it. Over it, the tenant's own idle blocks go, least worth first
 *   (over_quota 0), or the call is refused (over_quota 1), with the cause TENANT_LIMIT. Either is
 *   counted.
 * - A guaranteed share is its tenant's: eviction on behalf of others leaves it alone, and others'
 *   sequences and leases are refused (cause GUARANTEED) before what cannot be evicted grows into
 *   it. What of it is unused may be borrowed; when its owner asks, the borrowers' idle blocks go
 *   first, before any of the owner's own.
 * - Between tenants above their guarantee: each has a fair share, its guarantee and an equal part
 *   of what is guaranteed to nobody among the tenants that use the tier. Whoever is furthest above
 *   it pays first; where two are nearly alike (two slabs), worth alone decides.
 *
 * Locking: the functions take the cache's lock; none may be called with it, but for
 * kvk_quota_check(), which reads its arguments alone, and kvk_rate_take(), which is atomic.
 */
#ifndef KVK_DAEMON_QUOTA_H
#define KVK_DAEMON_QUOTA_H

#include <stdatomic.h>

#include "daemon/cache.h"
#include "hosttier/catalogue.h"

enum kvk_over_quota {
    KVK_OVER_QUOTA_EVICT = 0, /* the tenant's own idle blocks make the room */
    KVK_OVER_QUOTA_REFUSE = 1,
};

/* What a tenant has used since it was made: these only grow, over restarts too where there is a
 * catalogue. */
struct kvk_tenant_usage {
    uint64_t byte_seconds[KVK_TIER_COUNT]; /* exact: bytes of slots x time, summed at each change */
    uint64_t requests;                     /* that the rate let pass */
    uint64_t lookups;
    uint64_t lookup_tokens;
    uint64_t hit_tokens;
    uint64_t saved_tokens; /* of opened sequences: not to be computed again */
    uint64_t sealed_blocks;
    uint64_t moved_bytes;               /* copied between tiers */
    uint64_t evictions[KVK_TIER_COUNT]; /* copies dropped to make room */
    uint64_t limit_evictions;           /* of them, for its own limit */
    uint64_t idle_blocks;               /* that went after the idle time */
    uint64_t hints_left_out;            /* blocks: past what hints may keep */
    uint64_t refusals;                  /* of all kinds, */
    uint64_t limit_refusals;            /* of them over a limit of its own, */
    uint64_t rate_refusals;             /* and over its rate */
    uint64_t partial_hit_tokens;        /* of hit_tokens, in a part of a block */
};

/* Is the quota possible beside the guarantees of others? `guaranteed_bytes` is their sum.
 * KVK_INVALID names the field ("host_guaranteed_bytes") and the limit. */
KVK_CHECKED enum kvk_status kvk_quota_check(const struct kvk_tenant_quota *quota,
                                            const uint64_t pool_bytes[KVK_TIER_COUNT],
                                            const uint64_t guaranteed_bytes[KVK_TIER_COUNT],
                                            struct kvk_error *error);

/* Change a tenant's quota; it holds for the next request. Where a limit is lowered under what is
 * used, idle blocks go soon. Checks as above against the tiers and all other tenants. */
KVK_CHECKED enum kvk_status kvk_quota_set(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                          const struct kvk_tenant_quota *quota,
                                          struct kvk_error *error);
/* Take over what kvk_tenant_quota() says where it has changed. Maintenance does so for all tenants,
 * and every tenant's first request for itself; whoever changes a quota calls it so that it holds at
 * once. KVK_INVALID: impossible; the quota of before stays. */
enum kvk_status kvk_quota_sync(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                               struct kvk_error *error);
/* A limit that is less than one block of one of the tenant's spaces, all its groups together: its
 * sequences are refused there, whatever is free. */
struct kvk_quota_short {
    enum kvk_tier tier;
    uint64_t space_id;
    uint64_t limit_bytes;
    uint64_t block_bytes;
};
/* With the lock held. False: there is none. */
bool kvk_quota_is_short(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                        struct kvk_quota_short *found);
/* The same as a sentence; takes the lock. "": there is none. */
void kvk_quota_short_text(struct kvk_cache *cache, const struct kvk_tenant *tenant, char *text,
                          size_t size);
void kvk_quota_get(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                   struct kvk_tenant_quota *quota);

/* A tenant's place in the tables is new: its counters are read from the catalogue (by its id), or
 * 0, and it has no quota yet. kvk_quota_sync() calls it. */
void kvk_usage_begin(struct kvk_cache *cache, const struct kvk_tenant *tenant);
/* The counters as they are now. */
void kvk_usage_get(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                   struct kvk_tenant_usage *usage);
/* Write all counters that changed to the catalogue, where there is one: at the drain; maintenance
 * does so about every minute. */
void kvk_usage_save(struct kvk_cache *cache);

/*
 * One request of the tenant, before any work is done for it. KVK_EXHAUSTED (cause TENANT_LIMIT,
 * field requests_per_second, with the time until the next is let in): over its rate.
 */
KVK_CHECKED enum kvk_status kvk_rate_take(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                          struct kvk_error *error);

/* Whose request is it that names this session or space (0: none)? NULL: none of these that the
 * credential may act for; the call itself says so. */
const struct kvk_tenant *kvk_rate_tenant(struct kvk_cache *cache,
                                         const struct kvk_credential *credential,
                                         uint64_t session_id, uint64_t space_id);

#endif
