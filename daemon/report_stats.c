/*
 * Every counter and gauge of the engine, by its Prometheus name. One list each, so that a counter
 * that is added is added here in one line. Taken at one moment with the lock held, visited
 * without it.
 */
#include "daemon/report_internal.h"

#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/metrics.h"
#include "daemon/public.h"
#include "daemon/report_remote.h"
#include "daemon/scrub.h"
#include "hosttier/catalogue.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Tenants with figures of their own in one answer; those after them are in the sums alone. */
#define TENANT_ROWS_MAX 256

struct named {
    const char *name;
    size_t offset; /* of a uint64_t in its struct */
};

#define COUNTER(member, text)                                                                      \
    {                                                                                              \
        .name = "kvkeep_" text "_total", .offset = offsetof(struct kvk_cache_stats, member)        \
    }

static const struct named counters[] = {
    COUNTER(lookups, "lookup"),
    COUNTER(lookup_tokens, "lookup_tokens"),
    COUNTER(hit_tokens, "hit_tokens"),
    COUNTER(partial_hits, "partial_hits"),
    COUNTER(partial_hit_tokens, "partial_hit_tokens"),
    COUNTER(partial_given_up, "partial_given_up"),
    COUNTER(retries, "lookup_retries"),
    COUNTER(hashed_bytes, "hashed_bytes"),
    COUNTER(pins, "pins"),
    COUNTER(opens, "sequences_opened"),
    COUNTER(seals, "seals"),
    COUNTER(appends, "appends"),
    COUNTER(forks, "forks"),
    COUNTER(closes, "sequences_closed"),
    COUNTER(sealed_blocks, "sealed_blocks"),
    COUNTER(duplicate_blocks, "duplicate_blocks"),
    COUNTER(wrong_reuse, "wrong_reuse"),
    COUNTER(twins_equal, "twins_equal"),
    COUNTER(twins_compared, "twins_compared"),
    COUNTER(twins_left_out, "twins_left_out"),
    COUNTER(opaque_differences, "opaque_differences"),
    COUNTER(forgotten_blocks, "forgotten_blocks"),
    COUNTER(demoted_blocks, "demoted_blocks"),
    COUNTER(promoted_blocks, "promoted_blocks"),
    COUNTER(swapped_out_blocks, "swapped_out_blocks"),
    COUNTER(swapped_in_blocks, "swapped_in_blocks"),
    COUNTER(swapped_out_bytes, "swapped_out_bytes"),
    COUNTER(swapped_in_bytes, "swapped_in_bytes"),
    COUNTER(copy_failures, "copy_failures"),
    COUNTER(host_narrowed_blocks, "host_narrowed_blocks"),
    COUNTER(host_widened_blocks, "host_widened_blocks"),
    COUNTER(host_unfit_blocks, "host_unfit_blocks"),
    COUNTER(checksum_failures, "checksum_failures"),
    COUNTER(healed_blocks, "healed_blocks"),
    COUNTER(refusals, "refusals"),
    COUNTER(leases_expired, "leases_expired"),
    COUNTER(instances_ended, "instances_ended"),
    COUNTER(sessions_ended, "sessions_ended"),
    COUNTER(quarantined_blocks, "quarantined_blocks"),
    COUNTER(attended_tokens, "attended_tokens"),
    COUNTER(attended_in_place, "attended_in_place"),
    COUNTER(attended_brought_in, "attended_brought_in"),
    COUNTER(slabs_moved, "slabs_moved"),
    COUNTER(shifted_blocks, "shifted_blocks"),
    COUNTER(invalidated_blocks, "invalidated_blocks"),
    COUNTER(published, "public_published"),
    COUNTER(withdrawn, "public_withdrawn"),
    COUNTER(public_hits, "public_hits"),
    COUNTER(public_restored, "public_restored"),
    COUNTER(public_store_failures, "public_store_failures"),
    COUNTER(public_hit_tokens, "public_hit_tokens"),
    COUNTER(disk_written_blocks, "disk_written_blocks"),
    COUNTER(disk_written_bytes, "disk_written_bytes"),
    COUNTER(disk_late_blocks, "disk_late_blocks"),
    COUNTER(disk_skipped_blocks, "disk_skipped_blocks"),
    COUNTER(disk_write_failures, "disk_write_failures"),
    COUNTER(disk_extent_failures, "disk_extent_failures"),
    COUNTER(disk_restored_blocks, "disk_restored_blocks"),
    COUNTER(disk_restored_bytes, "disk_restored_bytes"),
    COUNTER(disk_straight_blocks, "disk_straight_blocks"),
    COUNTER(disk_narrowed_blocks, "disk_narrowed_blocks"),
    COUNTER(disk_widened_blocks, "disk_widened_blocks"),
    COUNTER(disk_unfit_blocks, "disk_unfit_blocks"),
    COUNTER(disk_restores, "disk_restores"),
    COUNTER(disk_recomputes, "disk_recomputes"),
    COUNTER(disk_ahead_blocks, "disk_ahead_blocks"),
    COUNTER(disk_read_failures, "disk_read_failures"),
    COUNTER(disk_damaged_blocks, "disk_damaged_blocks"),
    COUNTER(disk_returned_blocks, "disk_returned_blocks"),
    COUNTER(disk_refused_blocks, "disk_refused_blocks"),
    COUNTER(spaces_restored, "spaces_restored"),
    COUNTER(space_records_refused, "space_records_refused"),
    COUNTER(space_record_failures, "space_record_failures"),
    COUNTER(restored_blocks, "restored_blocks"),
    COUNTER(torn_records, "torn_records"),
    COUNTER(unkept_blocks, "unkept_blocks"),
};

#define TIER_GAUGE(member, text)                                                                   \
    {                                                                                              \
        .name = "kvkeep_tier_" text, .offset = offsetof(struct kvk_tier_report, member)            \
    }

static const struct named tier_gauges[] = {
    TIER_GAUGE(limit_bytes, "limit_bytes"),
    TIER_GAUGE(used_bytes, "used_bytes"),
    TIER_GAUGE(free_bytes, "free_bytes"),
    TIER_GAUGE(slab_bytes, "slab_bytes"),
    TIER_GAUGE(active_bytes, "active_bytes"),
    TIER_GAUGE(leased_bytes, "leased_bytes"),
    TIER_GAUGE(evictable_bytes, "evictable_bytes"),
    TIER_GAUGE(copying_bytes, "copying_bytes"),
    TIER_GAUGE(quarantine_bytes, "quarantine_bytes"),
    TIER_GAUGE(growth_bytes, "growth_bytes"),
    TIER_GAUGE(stray_bytes, "stray_bytes"),
    TIER_GAUGE(scattered_bytes, "scattered_bytes"),
    TIER_GAUGE(largest_admissible_bytes, "largest_admissible_bytes"),
};

static const char *const tier_names[KVK_TIER_COUNT] = {"device", "host", "disk"};

#define TENANT_COUNTER(member, text)                                                               \
    {                                                                                              \
        .name = "kvkeep_tenant_" text "_total",                                                    \
        .offset = offsetof(struct kvk_tenant_usage, member)                                        \
    }

static const struct named tenant_counters[] = {
    TENANT_COUNTER(requests, "requests"),
    TENANT_COUNTER(lookups, "lookups"),
    TENANT_COUNTER(lookup_tokens, "lookup_tokens"),
    TENANT_COUNTER(hit_tokens, "hit_tokens"),
    TENANT_COUNTER(partial_hit_tokens, "partial_hit_tokens"),
    TENANT_COUNTER(saved_tokens, "saved_tokens"),
    TENANT_COUNTER(sealed_blocks, "sealed_blocks"),
    TENANT_COUNTER(moved_bytes, "moved_bytes"),
    TENANT_COUNTER(limit_evictions, "limit_evictions"),
    TENANT_COUNTER(idle_blocks, "idle_blocks"),
    TENANT_COUNTER(hints_left_out, "hints_left_out"),
    TENANT_COUNTER(refusals, "refusals"),
    TENANT_COUNTER(limit_refusals, "limit_refusals"),
    TENANT_COUNTER(rate_refusals, "rate_refusals"),
};

struct tenant_figures {
    struct kvk_tenant_usage usage;
    struct kvk_tenant_quota quota;
    uint64_t bytes[KVK_TIER_COUNT];
    uint64_t metadata_bytes;
    uint64_t metadata_limit_bytes;
    uint64_t instances;
    uint64_t sequences;
    uint64_t leases;
};

/* All of it, at one moment. */
struct figures {
    struct kvk_cache_stats stats;
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    struct kvk_disk_report disk;
    struct kvk_device_health device;
    struct kvk_remote_report remote;
    struct kvk_catalogue_stats catalogue; /* where there is one */
    bool has_catalogue;
    struct kvk_index_stats index;
    struct kvk_scrub_counts scrub;
    uint64_t state_blocks[KVK_BLOCK_STATE_COUNT];
    uint64_t evict_bytes;
    uint64_t gone[KVK_GONE_REASON_COUNT];
    uint64_t journal_bytes;
    uint64_t metadata_bytes;
    uint64_t workspace_bytes;
    uint64_t mrc_bytes;
    uint64_t spaces;
    uint64_t sequences;
    uint64_t leases;
    uint64_t transfers;
    uint64_t instances;
    uint64_t sessions;
    struct tenant_figures *tenants; /* [KVK_TENANT_COUNT_MAX], ours */
};

static void figures_take(struct kvk_cache *cache, struct figures *figures)
{
    const struct kvk_credential everything = {.admin = true};
    const struct kvk_scope scope = {.credential = &everything};

    figures->stats = cache->stats;
    kvk_report_tiers(cache, &scope, figures->tiers);
    kvk_disk_report(cache, &figures->disk);
    kvk_tier_health(cache, &figures->device);
    kvk_remote_report(cache, &figures->remote);
    figures->has_catalogue = cache->catalogue != NULL;
    if (figures->has_catalogue) {
        kvk_catalogue_stats(cache->catalogue, &figures->catalogue);
    }
    kvk_index_stats(cache->index, &figures->index);
    kvk_scrub_counts(cache, &figures->scrub);
    figures->evict_bytes = kvk_evict_bytes(cache->evict);
    memcpy(figures->gone, cache->journal.counts, sizeof(figures->gone));
    figures->metadata_bytes = kvk_cache_metadata_bytes(cache);
    figures->workspace_bytes = kvk_cache_workspace_bytes(cache);
    figures->journal_bytes = kvk_journal_bytes(&cache->journal);
    figures->mrc_bytes = kvk_mrcs_bytes(&cache->mrcs);
    figures->spaces = cache->space_count;
    figures->sequences = cache->sequence_table.count;
    figures->leases = cache->lease_table.count;
    figures->transfers = cache->transfer_table.count;
    figures->instances = cache->instance_count;
    figures->sessions = cache->session_table.count;
    for (const struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            for (int state = 0; state < KVK_BLOCK_STATE_COUNT; state++) {
                figures->state_blocks[state] += space->groups[g]->state_counts[state];
            }
        }
    }
    for (uint32_t i = 0; i < kvk_tenants_count(cache->tenants); i++) {
        struct kvk_tenant_state *state = &cache->tenant_states[i];
        if (state->tenant != NULL) {
            kvk_usage_refresh(cache, state);
            figures->tenants[i].usage = state->usage;
            figures->tenants[i].quota = state->quota;
            figures->tenants[i].metadata_bytes = kvk_metadata_bytes(cache, state->tenant);
            figures->tenants[i].metadata_limit_bytes = kvk_metadata_limit(cache, state->tenant);
        }
        for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
            figures->tenants[i].bytes[tier] =
                cache->tiers[tier].tenant_bytes != NULL ? cache->tiers[tier].tenant_bytes[i] : 0;
        }
    }
    for (const struct kvk_instance *instance = cache->instances; instance != NULL;
         instance = instance->next) {
        struct tenant_figures *tenant = &figures->tenants[instance->tenant->index];
        tenant->instances++;
        tenant->sequences += instance->sequence_count;
        tenant->leases += instance->lease_count;
    }
}

/* ---- Visiting ---- */

struct visitor {
    void (*visit)(void *context, const char *name, double value);
    void *context;
};

static void visit_plain(const struct visitor *visitor, const char *name, uint64_t value)
{
    visitor->visit(visitor->context, name, (double)value);
}

/* With one label or two; the second's key may be NULL. */
static void visit_labelled(const struct visitor *visitor, const char *name, const char *key,
                           const char *value, const char *other_key, const char *other_value,
                           uint64_t number)
{
    char labels[KVK_METRIC_LABELS_SIZE] = "";
    char text[KVK_METRIC_NAME_SIZE + KVK_METRIC_LABELS_SIZE + 2];

    /* A name of 255 bytes that are all escaped has no room; it is in the sums. */
    if (!kvk_metrics_label(labels, key, value) ||
        (other_key != NULL && !kvk_metrics_label(labels, other_key, other_value))) {
        return;
    }
    (void)snprintf(text, sizeof(text), "%s{%s}", name, labels);
    visitor->visit(visitor->context, text, (double)number);
}

static uint64_t member(const void *record, const struct named *named)
{
    return *(const uint64_t *)(const void *)((const uint8_t *)record + named->offset);
}

static void visit_counters(const struct visitor *visitor, const struct kvk_cache_stats *stats)
{
    for (size_t i = 0; i < COUNT(counters); i++) {
        visit_plain(visitor, counters[i].name, member(stats, &counters[i]));
    }
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        visit_labelled(visitor, "kvkeep_evictions_total", "tier", tier_names[tier], NULL, NULL,
                       stats->evictions[tier]);
        visit_labelled(visitor, "kvkeep_block_uses_total", "tier", tier_names[tier], NULL, NULL,
                       stats->block_uses[tier]);
    }
    visitor->visit(visitor->context, "kvkeep_lookup_seconds_total",
                   (double)stats->lookup_ns / (double)KVK_NS_PER_SECOND);
    visitor->visit(visitor->context, "kvkeep_saved_seconds_total",
                   (double)stats->saved_ns / (double)KVK_NS_PER_SECOND);
}

static void visit_scrub(const struct visitor *visitor, const struct kvk_scrub_counts *counts)
{
    static const char *const names[KVK_TIER_COUNT] = {"device", "host", "disk"};
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        visit_labelled(visitor, "kvkeep_scrub_blocks_total", "tier", names[tier], NULL, NULL,
                       counts->blocks[tier]);
        visit_labelled(visitor, "kvkeep_scrub_bytes_total", "tier", names[tier], NULL, NULL,
                       counts->bytes[tier]);
        visit_labelled(visitor, "kvkeep_scrub_damaged_total", "tier", names[tier], NULL, NULL,
                       counts->damaged[tier]);
    }
    visit_plain(visitor, "kvkeep_scrub_unreadable_total", counts->unreadable);
    visit_plain(visitor, "kvkeep_scrub_passes_total", counts->passes);
    visitor->visit(visitor->context, "kvkeep_scrub_last_pass_seconds",
                   (double)counts->last_pass_ns / (double)KVK_NS_PER_SECOND);
    visitor->visit(visitor->context, "kvkeep_scrub_last_pass_age_seconds",
                   (double)counts->last_pass_age_ns / (double)KVK_NS_PER_SECOND);
}

static void visit_tiers(const struct visitor *visitor, const struct figures *figures)
{
    for (size_t i = 0; i < COUNT(tier_gauges); i++) {
        for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
            visit_labelled(visitor, tier_gauges[i].name, "tier", tier_names[tier], NULL, NULL,
                           member(&figures->tiers[tier], &tier_gauges[i]));
        }
    }
}

static void visit_device(const struct visitor *visitor, const struct kvk_device_health *health)
{
    if (health->can_fail) {
        visit_plain(visitor, "kvkeep_device_lost", health->lost ? 1 : 0);
        visit_plain(visitor, "kvkeep_device_memory_failures_total", health->memory_failures);
        visit_plain(visitor, "kvkeep_device_call_failures_total", health->call_failures);
    }
}

static void visit_disk(const struct visitor *visitor, const struct kvk_disk_report *disk)
{
    static const char *const states[] = {"good", "failing", "off", "full", "read-only"};
    if (!disk->present) {
        return;
    }
    for (size_t i = 0; i < COUNT(states); i++) {
        visit_labelled(visitor, "kvkeep_disk_state", "state", states[i], NULL, NULL,
                       strcmp(states[i], disk->state) == 0 ? 1 : 0);
    }
    visit_plain(visitor, "kvkeep_disk_queued_blocks", disk->queued);
    visit_plain(visitor, "kvkeep_disk_leaving_slots", disk->leaving);
    visit_plain(visitor, "kvkeep_disk_read_bytes_per_second", disk->read_rate);
    visit_plain(visitor, "kvkeep_disk_write_bytes_per_second", disk->write_rate);
    visit_plain(visitor, "kvkeep_disk_read_bytes_total", disk->read_bytes);
    visit_plain(visitor, "kvkeep_disk_wrote_bytes_total", disk->written_bytes);
    visit_plain(visitor, "kvkeep_disk_read_errors_total", disk->read_errors);
    visit_plain(visitor, "kvkeep_disk_write_errors_total", disk->write_errors);
    visit_plain(visitor, "kvkeep_disk_sync_errors_total", disk->sync_errors);
    visit_plain(visitor, "kvkeep_disk_short_reads_total", disk->short_reads);
    visit_plain(visitor, "kvkeep_disk_full_errors_total", disk->full_errors);
}

static void visit_catalogue(const struct visitor *visitor, const struct figures *figures)
{
    const struct kvk_catalogue_stats *catalogue = &figures->catalogue;
    if (!figures->has_catalogue) {
        return;
    }
    visit_plain(visitor, "kvkeep_catalogue_blocks", catalogue->blocks);
    visit_plain(visitor, "kvkeep_catalogue_spaces", catalogue->spaces);
    visit_plain(visitor, "kvkeep_catalogue_used_bytes", catalogue->used_bytes);
    visit_plain(visitor, "kvkeep_catalogue_limit_bytes", catalogue->limit_bytes);
    visit_plain(visitor, "kvkeep_catalogue_queued", catalogue->queued);
    visit_plain(visitor, "kvkeep_catalogue_failing", catalogue->failing ? 1 : 0);
    visit_plain(visitor, "kvkeep_catalogue_commits_total", catalogue->commits);
    visit_plain(visitor, "kvkeep_catalogue_operations_total", catalogue->committed_operations);
    visit_plain(visitor, "kvkeep_catalogue_commit_failures_total", catalogue->commit_failures);
    visit_plain(visitor, "kvkeep_catalogue_damaged_records_total", catalogue->damaged_records);
    visitor->visit(visitor->context, "kvkeep_catalogue_commit_seconds",
                   (double)catalogue->commit_ns / (double)KVK_NS_PER_SECOND);
}

static void visit_public(const struct visitor *visitor, struct kvk_cache *cache)
{
    struct kvk_public_totals totals;
    kvk_public_totals(cache, &totals);
    visit_plain(visitor, "kvkeep_public_prefixes", totals.prefixes);
    visit_plain(visitor, "kvkeep_public_blocks", totals.blocks);
    visit_plain(visitor, "kvkeep_public_bytes", totals.bytes);
    visit_plain(visitor, "kvkeep_public_withdrawn_bytes", totals.withdrawn_bytes);
}

static void visit_blocks(const struct visitor *visitor, const struct figures *figures)
{
    for (int state = KVK_BLOCK_RESERVED; state < KVK_BLOCK_STATE_COUNT; state++) {
        visit_labelled(visitor, "kvkeep_blocks", "state",
                       kvk_block_state_name((enum kvk_block_state)state), NULL, NULL,
                       figures->state_blocks[state]);
    }
    visit_plain(visitor, "kvkeep_index_blocks", figures->index.blocks);
    visit_plain(visitor, "kvkeep_index_private_blocks", figures->index.private_blocks);
    visit_plain(visitor, "kvkeep_index_hollow_blocks", figures->index.hollow_blocks);
    visit_plain(visitor, "kvkeep_index_runs", figures->index.runs);
    visit_plain(visitor, "kvkeep_index_roots", figures->index.roots);
    visit_plain(visitor, "kvkeep_index_bytes", figures->index.bytes);
    visit_plain(visitor, "kvkeep_index_token_bytes", figures->index.token_bytes);
    visit_plain(visitor, "kvkeep_evict_bytes", figures->evict_bytes);
    visit_plain(visitor, "kvkeep_journal_bytes", figures->journal_bytes);
    visit_plain(visitor, "kvkeep_metadata_bytes", figures->metadata_bytes);
    visit_plain(visitor, "kvkeep_workspace_bytes", figures->workspace_bytes);
    visit_plain(visitor, "kvkeep_mrc_bytes", figures->mrc_bytes);
    for (int reason = KVK_GONE_NONE + 1; reason < KVK_GONE_REASON_COUNT; reason++) {
        visit_labelled(visitor, "kvkeep_blocks_gone_total", "reason",
                       kvk_gone_reason_name((enum kvk_gone_reason)reason), NULL, NULL,
                       figures->gone[reason]);
    }
}

static void visit_counts(const struct visitor *visitor, const struct figures *figures)
{
    visit_plain(visitor, "kvkeep_spaces", figures->spaces);
    visit_plain(visitor, "kvkeep_sequences", figures->sequences);
    visit_plain(visitor, "kvkeep_leases", figures->leases);
    visit_plain(visitor, "kvkeep_transfers", figures->transfers);
    visit_plain(visitor, "kvkeep_instances", figures->instances);
    visit_plain(visitor, "kvkeep_sessions", figures->sessions);
}

static void visit_usage(const struct visitor *visitor, const char *name,
                        const struct tenant_figures *tenant)
{
    const char *const tiers[KVK_TIER_COUNT] = {"device", "host", "disk"};
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        visit_labelled(visitor, "kvkeep_tenant_byte_seconds_total", "tenant", name, "tier",
                       tiers[tier], tenant->usage.byte_seconds[tier]);
        visit_labelled(visitor, "kvkeep_tenant_evictions_total", "tenant", name, "tier",
                       tiers[tier], tenant->usage.evictions[tier]);
        visit_labelled(visitor, "kvkeep_tenant_limit_bytes", "tenant", name, "tier", tiers[tier],
                       tenant->quota.limit_bytes[tier]);
        visit_labelled(visitor, "kvkeep_tenant_guaranteed_bytes", "tenant", name, "tier",
                       tiers[tier], tenant->quota.guaranteed_bytes[tier]);
    }
    for (size_t i = 0; i < COUNT(tenant_counters); i++) {
        visit_labelled(visitor, tenant_counters[i].name, "tenant", name, NULL, NULL,
                       member(&tenant->usage, &tenant_counters[i]));
    }
}

static void visit_tenants(const struct visitor *visitor, const struct kvk_cache *cache,
                          const struct figures *figures)
{
    uint32_t rows = 0;

    for (uint32_t i = 0; i < kvk_tenants_count(cache->tenants) && rows < TENANT_ROWS_MAX; i++) {
        const struct tenant_figures *tenant = &figures->tenants[i];
        const struct kvk_tenant *known = kvk_tenants_get(cache->tenants, i);
        const char *name = known != NULL ? known->name : "";
        bool idle = tenant->instances == 0 && tenant->bytes[0] == 0 && tenant->bytes[1] == 0 &&
                    tenant->bytes[2] == 0 && tenant->usage.requests == 0 &&
                    tenant->usage.lookups == 0;
        if (known == NULL || idle) {
            continue;
        }
        rows++;
        for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
            visit_labelled(visitor, "kvkeep_tenant_used_bytes", "tenant", name, "tier",
                           tier_names[tier], tenant->bytes[tier]);
        }
        visit_labelled(visitor, "kvkeep_tenant_instances", "tenant", name, NULL, NULL,
                       tenant->instances);
        visit_labelled(visitor, "kvkeep_tenant_metadata_bytes", "tenant", name, NULL, NULL,
                       tenant->metadata_bytes);
        visit_labelled(visitor, "kvkeep_tenant_metadata_limit_bytes", "tenant", name, NULL, NULL,
                       tenant->metadata_limit_bytes);
        visit_labelled(visitor, "kvkeep_tenant_sequences", "tenant", name, NULL, NULL,
                       tenant->sequences);
        visit_labelled(visitor, "kvkeep_tenant_leases", "tenant", name, NULL, NULL, tenant->leases);
        visit_usage(visitor, name, tenant);
    }
}

void kvk_report_stats(struct kvk_cache *cache,
                      void (*visit)(void *context, const char *name, double value), void *context)
{
    const struct visitor visitor = {.visit = visit, .context = context};
    struct figures figures = {.spaces = 0};

    _Static_assert(KVK_TIER_COUNT == 3, "tier_names, and the test for a tenant without bytes");
    figures.tenants = calloc(KVK_TENANT_COUNT_MAX, sizeof(figures.tenants[0]));
    if (figures.tenants == NULL) {
        kvk_log(KVK_LOG_WARNING, "stats_dropped", "reason=memory");
        return;
    }
    kvk_lock(&cache->lock);
    figures_take(cache, &figures);
    kvk_unlock(&cache->lock);

    visit_counters(&visitor, &figures.stats);
    visit_scrub(&visitor, &figures.scrub);
    visit_tiers(&visitor, &figures);
    visit_blocks(&visitor, &figures);
    visit_counts(&visitor, &figures);
    visit_tenants(&visitor, cache, &figures);
    visit_disk(&visitor, &figures.disk);
    visit_device(&visitor, &figures.device);
    kvk_report_remote_visit(&figures.remote, visit, context);
    visit_catalogue(&visitor, &figures);
    visit_public(&visitor, cache);
    visit_plain(&visitor, "kvkeep_copied_bytes_total", kvk_mover_bytes(cache->mover));
    visit_plain(&visitor, "kvkeep_copy_bytes_per_second", kvk_mover_rate(cache->mover));
    free(figures.tenants);
}
