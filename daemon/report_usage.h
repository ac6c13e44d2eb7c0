/*
 * What tenants have used and what they may: one row each, of one moment.
 *
 * Locking: takes the cache lock in slices.
 */
#ifndef KVK_DAEMON_REPORT_USAGE_H
#define KVK_DAEMON_REPORT_USAGE_H

#include "daemon/quota.h"
#include "daemon/space.h"

/* What has been used is written to the catalogue so often: a crash loses no more. A synced commit
 * for each tenant whose figures moved. */
#define KVK_USAGE_SAVE_S UINT64_C(10)

struct kvk_usage_report {
    const struct kvk_tenant *tenant;
    struct kvk_tenant_quota quota;
    struct kvk_tenant_usage usage;
    uint64_t used_bytes[KVK_TIER_COUNT];
    uint64_t bound_bytes[KVK_TIER_COUNT];
    uint32_t sequences;
    uint32_t leases;
};

/* Rows are the caller's to free(), in the order of the tenants' names. `tenant` empty: all that the
 * credential may see. */
KVK_CHECKED enum kvk_status kvk_report_usage(struct kvk_cache *cache,
                                             const struct kvk_caller *caller,
                                             struct kvk_view tenant, struct kvk_usage_report **rows,
                                             uint32_t *row_count, struct kvk_error *error);

#endif
