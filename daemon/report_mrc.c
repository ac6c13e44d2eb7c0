/*
 * The miss-ratio curve as an answer: counts are copied with the lock held, the curve is drawn from
 * them without it.
 */
#include <math.h>
#include <stdlib.h>

#include "base/assert.h"
#include "daemon/mrc.h"
#include "daemon/report_internal.h"

static struct kvk_mrc_point point_at(const struct kvk_shards_counts *counts, uint64_t size_bytes)
{
    struct kvk_shards_ratio ratio = kvk_shards_ratio(counts, size_bytes);
    return (struct kvk_mrc_point){
        .size_bytes = size_bytes, .hits = ratio.hits, .error = ratio.error};
}

#define SMALLEST_PART 16 /* of what the tenant has now: the curve's beginning */

/*
 * To the longest distance, in even steps of a ratio, from a small part of what the tenant has now:
 * smaller caches are no question, and there chance decides which of the hottest blocks are
 * followed.
 */
static void curve_fill(const struct kvk_shards_counts *counts, struct kvk_mrc_report *report)
{
    uint64_t first = report->now_bytes / SMALLEST_PART;
    first = first > counts->shortest_bytes ? first : counts->shortest_bytes;
    if (first >= counts->longest_bytes) {
        return;
    }
    double step = pow((double)counts->longest_bytes / (double)first, 1.0 / (KVK_MRC_POINTS - 1));
    double size = (double)first;
    for (uint32_t i = 0; i < KVK_MRC_POINTS; i++) {
        report->points[i] = point_at(counts, (uint64_t)ceil(size));
        size *= step;
    }
    report->point_count = KVK_MRC_POINTS;
}

static void report_fill(const struct kvk_shards_counts *counts, struct kvk_mrc_report *report)
{
    double known = counts->references[KVK_SHARDS_KNOWN];
    report->references = known + counts->references[KVK_SHARDS_NEW];
    report->hits = report->references > 0 ? known / report->references : 0;
    report->now = point_at(counts, report->now_bytes);
    report->twice = point_at(counts, 2 * report->now_bytes);
    report->four_times = point_at(counts, 4 * report->now_bytes);
    report->pool = point_at(counts, report->pool_bytes);
    report->ceiling = point_at(counts, UINT64_MAX);
    curve_fill(counts, report);
}

/* One tenant's, copied. False: it is not followed. */
static bool counts_take(const struct kvk_cache *cache, const struct kvk_mrc *mrc,
                        const struct kvk_scope *scope, struct kvk_shards_counts *counts,
                        struct kvk_mrc_report *report)
{
    const struct kvk_tenant *tenant =
        mrc->shards == NULL ? NULL : kvk_tenants_find(cache->tenants, mrc->tenant_id);
    if (tenant == NULL || !kvk_scope_sees(scope, tenant)) {
        return false;
    }
    struct kvk_shards_stats stats;
    kvk_shards_stats(mrc->shards, &stats);
    *counts = *kvk_shards_counts(mrc->shards);
    *report = (struct kvk_mrc_report){
        .tenant = tenant,
        .rate = stats.rate,
        .samples = stats.samples,
        .distinct_bytes = stats.distinct_bytes,
    };
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const struct kvk_tier_state *tier = &cache->tiers[i];
        if (tier->device != NULL) {
            report->now_bytes += tier->tenant_bytes[tenant->index];
            report->pool_bytes += tier->pool.limit_bytes;
        }
    }
    return true;
}

enum kvk_status kvk_report_mrc(struct kvk_cache *cache, const struct kvk_caller *caller,
                               struct kvk_view tenant, struct kvk_mrc_report **rows,
                               uint32_t *row_count, struct kvk_error *error)
{
    struct kvk_scope scope;
    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status != KVK_OK) {
        return status;
    }
    uint32_t count_max = cache->mrcs.count_max; /* fixed */
    struct kvk_mrc_report *list = calloc(count_max + 1U, sizeof(*list));
    struct kvk_shards_counts *counts = malloc(sizeof(*counts));
    if (list == NULL || counts == NULL) {
        free(list);
        free(counts);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    uint32_t count = 0;
    for (uint32_t i = 0; i < count_max; i++) {
        kvk_lock(&cache->lock);
        bool taken = counts_take(cache, &cache->mrcs.list[i], &scope, counts, &list[count]);
        kvk_unlock(&cache->lock);
        if (taken) {
            report_fill(counts, &list[count]);
            count++;
        }
    }
    free(counts);
    *rows = list;
    *row_count = count;
    return KVK_OK;
}
