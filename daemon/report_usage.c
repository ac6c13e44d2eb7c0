#include "daemon/report_usage.h"

#include <stdlib.h>
#include <string.h>

#include "daemon/report_internal.h"

static void row_fill(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                     struct kvk_usage_report *row)
{
    kvk_usage_get(cache, tenant, &row->usage);
    kvk_lock(&cache->lock);
    const struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    row->tenant = tenant;
    row->quota = state->quota;
    row->sequences = state->sequences;
    row->leases = state->leases;
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        const uint64_t *bytes = cache->tiers[i].tenant_bytes;
        row->used_bytes[i] = bytes != NULL ? bytes[tenant->index] : 0;
        row->bound_bytes[i] = state->bound_bytes[i];
    }
    kvk_unlock(&cache->lock);
}

static int compare_rows(const void *left, const void *right)
{
    const struct kvk_usage_report *a = left;
    const struct kvk_usage_report *b = right;
    return strcmp(a->tenant->name, b->tenant->name);
}

enum kvk_status kvk_report_usage(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 struct kvk_view tenant, struct kvk_usage_report **rows,
                                 uint32_t *row_count, struct kvk_error *error)
{
    struct kvk_scope scope;
    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status != KVK_OK) {
        return status;
    }
    uint32_t capacity = kvk_tenants_count(cache->tenants);
    struct kvk_usage_report *list = calloc(capacity + 1U, sizeof(*list));
    if (list == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for the rows of the answer");
    }
    uint32_t count = 0;
    for (uint32_t i = 0; i < capacity; i++) {
        const struct kvk_tenant *known = kvk_tenants_get(cache->tenants, i);
        if (known != NULL && kvk_scope_sees(&scope, known)) {
            row_fill(cache, known, &list[count]);
            count++;
        }
    }
    qsort(list, count, sizeof(*list), compare_rows);
    *rows = list;
    *row_count = count;
    return KVK_OK;
}
