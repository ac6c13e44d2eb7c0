/*
 * What the report files share: whose figures a caller may see.
 *
 * An admin sees all tenants; another credential sees those that it may act for, and of the pools
 * only what is its own. Either may narrow an answer to one tenant.
 */
#ifndef KVK_DAEMON_REPORT_INTERNAL_H
#define KVK_DAEMON_REPORT_INTERNAL_H

#include "daemon/cache_internal.h"

struct kvk_scope {
    const struct kvk_credential *credential;
    const struct kvk_tenant *tenant; /* the one that was asked for; NULL: all that may be seen */
};

/* KVK_PERMISSION: another's tenant. KVK_NOT_FOUND: an admin names one that is not there. */
KVK_CHECKED enum kvk_status kvk_scope_init(const struct kvk_cache *cache,
                                           const struct kvk_caller *caller, struct kvk_view tenant,
                                           struct kvk_scope *scope, struct kvk_error *error);
bool kvk_scope_sees(const struct kvk_scope *scope, const struct kvk_tenant *tenant);

/* The pools as a whole: an admin who asked for no single tenant. */
static inline bool kvk_scope_is_all(const struct kvk_scope *scope)
{
    return scope->credential->admin && scope->tenant == NULL;
}

/* Both tiers at one moment. Needs the lock. */
void kvk_report_tiers(const struct kvk_cache *cache, const struct kvk_scope *scope,
                      struct kvk_tier_report tiers[KVK_TIER_COUNT]);

/* What went into a report's slice; gives the lock back and takes it again when it was enough. */
void kvk_report_slice_drops(struct kvk_cache *cache, uint64_t *work, uint64_t more);

#endif
