/* The doctor's facts: one walk over sequences, leases, sessions and groups, in slices. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/doctor_internal.h"
#include "daemon/mrc.h"

/* Fewer references than this say little. */
#define GAP_REFERENCES_MIN 1000
#define CAUSES_MAX 64

static uint64_t since(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? now_ns - then_ns : 0;
}

static void example_take(struct kvk_example *example, uint64_t id, uint64_t age_ns,
                         const struct kvk_instance *instance, const struct kvk_tenant *tenant)
{
    if (example->id != 0 && age_ns <= example->age_ns) {
        return;
    }
    example->id = id;
    example->age_ns = age_ns;
    memcpy(example->instance, instance->name, sizeof(example->instance));
    memcpy(example->tenant, tenant->name, sizeof(example->tenant));
}

/* ---- Sequences ---- */

static void growth_look(struct kvk_facts *facts, const struct kvk_sequence *sequence)
{
    uint64_t age_ns = since(facts->now_ns, sequence->opened_ns);
    if (sequence->growth_bytes == 0 || age_ns < KVK_DOCTOR_GROWTH_OLD_NS ||
        sequence->last.kind != 0) {
        return; /* it has grown, or was cut */
    }
    facts->unused_growths++;
    facts->unused_growth_bytes += sequence->growth_bytes;
    example_take(&facts->oldest_growth, sequence->id, age_ns, sequence->instance,
                 sequence->space->tenant);
}

static void ranks_look(struct kvk_facts *facts, const struct kvk_sequence *sequence)
{
    uint64_t age_ns = since(facts->now_ns, sequence->ranks_apart_ns);
    if (sequence->ranks_apart_ns == 0 || age_ns < KVK_DOCTOR_APART_OLD_NS) {
        return;
    }
    facts->apart++;
    uint64_t before = facts->oldest_apart.id;
    example_take(&facts->oldest_apart, sequence->id, age_ns, sequence->instance,
                 sequence->space->tenant);
    if (facts->oldest_apart.id == before) {
        return;
    }
    facts->slow_rank = 0;
    facts->fast_tokens = 0;
    for (uint32_t r = 0; r < sequence->space->rank_count; r++) {
        uint64_t sealed = sequence->rank_sealed[r];
        facts->slow_rank = sealed < sequence->rank_sealed[facts->slow_rank] ? r : facts->slow_rank;
        facts->fast_tokens = sealed > facts->fast_tokens ? sealed : facts->fast_tokens;
    }
    facts->slow_tokens = sequence->rank_sealed[facts->slow_rank];
}

static void sequences_walk_drops(struct kvk_cache *cache, struct kvk_facts *facts)
{
    const struct kvk_table_entry *entry;
    uint64_t work = 0;
    size_t place = 0;
    for (size_t before = 0; (entry = kvk_table_next(&cache->sequence_table, &place)) != NULL;
         before = place) {
        const struct kvk_sequence *sequence = (const struct kvk_sequence *)entry->value;
        growth_look(facts, sequence);
        ranks_look(facts, sequence);
        kvk_report_slice_drops(cache, &work, place - before);
    }
}

/* ---- Leases and sessions ---- */

static void leases_walk_drops(struct kvk_cache *cache, struct kvk_facts *facts)
{
    const struct kvk_table_entry *entry;
    uint64_t work = 0;
    size_t place = 0;
    uint64_t now_ns = kvk_lease_clock(cache);
    for (size_t before = 0; (entry = kvk_table_next(&cache->lease_table, &place)) != NULL;
         before = place) {
        const struct kvk_lease *lease = (const struct kvk_lease *)entry->value;
        uint64_t age_ns = since(now_ns, lease->begun_ns);
        if (age_ns >= KVK_DOCTOR_LEASE_OLD_NS) {
            facts->old_leases++;
            example_take(&facts->oldest_lease, lease->id, age_ns, lease->instance,
                         lease->space->tenant);
            facts->oldest_lease_tokens =
                facts->oldest_lease.id == lease->id ? lease->tokens : facts->oldest_lease_tokens;
        }
        kvk_report_slice_drops(cache, &work, place - before);
    }
}

static void sessions_walk(const struct kvk_cache *cache, struct kvk_facts *facts)
{
    const struct kvk_table_entry *entry;
    size_t place = 0;
    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        const struct kvk_session *session = (const struct kvk_session *)entry->value;
        if (session->quarantine_count > 0) {
            facts->waiting_sessions++;
            facts->waiting_blocks += session->quarantine_count;
            facts->waiting_pid = session->pid;
        }
    }
}

/* ---- Spaces ---- */

static void space_look(struct kvk_facts *facts, const struct kvk_space *space)
{
    if (space->hit_tokens > 0 && space->saved_ns == 0) {
        facts->unpriced_spaces++;
        return;
    }
    if (space->queries < 100 || space->cost_ns <= space->saved_ns) {
        return;
    }
    facts->dear_spaces++;
    if (facts->dear_space == 0 ||
        space->cost_ns - space->saved_ns > facts->dear_cost_ns - facts->dear_saved_ns) {
        facts->dear_space = space->id;
        facts->dear_queries = space->queries;
        facts->dear_cost_ns = space->cost_ns;
        facts->dear_saved_ns = space->saved_ns;
    }
}

static void group_look(struct kvk_facts *facts, const struct kvk_group *group)
{
    for (int state = 0; state < KVK_BLOCK_STATE_COUNT; state++) {
        facts->state_blocks[state] += group->state_counts[state];
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const struct kvk_group_tier *at = &group->tiers[i];
        if (!at->present) {
            continue;
        }
        uint64_t slab_bytes = (uint64_t)at->arena.slot_count * group->forms[i].block_bytes;
        uint64_t free_bytes = slab_bytes - at->used_bytes;
        facts->scattered_groups += free_bytes > 0 ? 1 : 0;
        if (free_bytes > facts->scattered_bytes) {
            facts->scattered_tier = i;
            facts->scattered_space = group->space->id;
            facts->scattered_bytes = free_bytes;
            facts->scattered_slab_bytes = slab_bytes;
            facts->scattered_slabs = 0;
            for (uint32_t s = 0; s < at->arena.slab_capacity; s++) {
                facts->scattered_slabs += at->arena.slabs[s].slot_count > 0 ? 1 : 0;
            }
        }
    }
}

static void groups_walk_drops(struct kvk_cache *cache, struct kvk_facts *facts)
{
    uint64_t work = 0;
    for (uint32_t i = 0; i < cache->group_end; i++) {
        const struct kvk_group *group = cache->groups[i];
        if (group != NULL) {
            group_look(facts, group);
            if (group->index == 0) {
                space_look(facts, group->space);
            }
        }
        kvk_report_slice_drops(cache, &work, 1);
    }
}

/* ---- What was wrong ---- */

static const char *const part_names[KVK_IDENTITY_PART_COUNT] = {
    [KVK_IDENTITY_REVISION - 1] = "revision",
    [KVK_IDENTITY_TOKENIZER - 1] = "tokenizer_digest",
    [KVK_IDENTITY_TEMPLATE - 1] = "template_digest",
    [KVK_IDENTITY_POSITION - 1] = "position_encoding",
    [KVK_IDENTITY_ADAPTER_ID - 1] = "adapter_id",
    [KVK_IDENTITY_ADAPTER_VERSION - 1] = "adapter_version",
    [KVK_IDENTITY_KV_FORMAT - 1] = "kv_format",
    [KVK_IDENTITY_MASK - 1] = "mask_rule",
};

static void identity_look(const struct kvk_space *space, struct kvk_facts *facts)
{
    bool is_said[KVK_IDENTITY_PART_COUNT] = {false};
    size_t offset = 0;
    uint32_t tag;
    struct kvk_view part;
    while (kvk_identity_next(space->identity, space->identity_size, &offset, &tag, &part)) {
        if (tag >= 1 && tag <= KVK_IDENTITY_PART_COUNT) {
            is_said[tag - 1] = part.size > 0;
        }
        if (tag == KVK_IDENTITY_MODEL) {
            (void)snprintf(facts->wrong_model, sizeof(facts->wrong_model), "%.*s",
                           (int)(part.size < KVK_NAME_SIZE ? part.size : KVK_NAME_SIZE - 1),
                           (const char *)part.data);
        }
    }
    size_t used = 0;
    for (uint32_t i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        if (!is_said[i] && part_names[i] != NULL && used < sizeof(facts->wrong_unsaid)) {
            int size = snprintf(facts->wrong_unsaid + used, sizeof(facts->wrong_unsaid) - used,
                                "%s%s", used == 0 ? "" : ", ", part_names[i]);
            used += size > 0 ? (size_t)size : 0;
        }
    }
}

static void wrong_look(const struct kvk_cache *cache, struct kvk_facts *facts)
{
    if (cache->stats.wrong_reuse == 0) {
        return;
    }
    facts->wrong = cache->wrong_reuses[(cache->stats.wrong_reuse - 1) % KVK_WRONG_REUSE_COUNT];
    const struct kvk_space *space = kvk_table_get(&cache->space_table, facts->wrong.space_id);
    if (space != NULL) {
        identity_look(space, facts);
    }
}

static void refusals_look(const struct kvk_cache *cache, struct kvk_facts *facts)
{
    uint64_t counts[CAUSES_MAX] = {0};
    uint64_t first =
        cache->refusal_count > KVK_REFUSAL_COUNT ? cache->refusal_count - KVK_REFUSAL_COUNT : 0;
    for (uint64_t i = cache->refusal_count; i > first; i--) {
        const struct kvk_refusal *refusal = &cache->refusals[(i - 1) % KVK_REFUSAL_COUNT];
        if (since(facts->now_ns, refusal->time_ns) > KVK_DOCTOR_REFUSAL_RECENT_NS) {
            return;
        }
        facts->recent_refusals++;
        facts->refusals_more = facts->recent_refusals == KVK_REFUSAL_COUNT;
        uint64_t *count = &counts[(unsigned)refusal->error.cause % CAUSES_MAX];
        (*count)++;
        if (*count > facts->refusal_cause_count) {
            facts->refusal_cause_count = *count;
            facts->refusal_cause = refusal->error.cause;
        }
    }
}

static void journal_look(const struct kvk_cache *cache, struct kvk_facts *facts)
{
    const struct kvk_journal *journal = &cache->journal;
    const struct kvk_gone *oldest = kvk_journal_oldest(journal);
    facts->journal_capacity = journal->capacity;
    facts->journal_entries = journal->added;
    if (oldest != NULL && kvk_journal_has_overwritten(journal)) {
        facts->journal_reach_ns = since(facts->now_ns, oldest->time_ns) + 1;
    }
}

/* ---- The hit rate ---- */

static enum kvk_status gap_look(struct kvk_cache *cache, const struct kvk_caller *caller,
                                struct kvk_facts *facts, struct kvk_error *error)
{
    const struct kvk_view everybody = {.size = 0};
    struct kvk_mrc_report *rows = NULL;
    uint32_t count = 0;
    double most = 0;
    enum kvk_status status = kvk_report_mrc(cache, caller, everybody, &rows, &count, error);
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_mrc_report *row = &rows[i];
        double gap = row->ceiling.hits - row->hits;
        if (row->references < GAP_REFERENCES_MIN || gap <= most) {
            continue;
        }
        most = gap;
        (void)snprintf(facts->gap_tenant, sizeof(facts->gap_tenant), "%s", row->tenant->name);
        facts->gap_hits = row->hits;
        facts->gap_twice = row->twice.hits;
        facts->gap_ceiling = row->ceiling.hits;
        facts->gap_error = row->ceiling.error;
        facts->gap_references = row->references;
    }
    free(rows);
    return KVK_OK;
}

/* ---- Quotas ---- */

static void quotas_look(const struct kvk_cache *cache, struct kvk_facts *facts)
{
    for (uint32_t i = 0; i < KVK_TENANT_COUNT_MAX; i++) {
        const struct kvk_tenant *tenant = cache->tenant_states[i].tenant;
        struct kvk_quota_short found;
        if (tenant == NULL || !kvk_quota_is_short(cache, tenant, &found)) {
            continue;
        }
        if (facts->short_limits++ == 0) {
            facts->short_tier = (int)found.tier;
            facts->short_space = found.space_id;
            facts->short_limit_bytes = found.limit_bytes;
            facts->short_block_bytes = found.block_bytes;
            (void)snprintf(facts->short_tenant, sizeof(facts->short_tenant), "%s", tenant->name);
        }
    }
}

/* ---- All of it ---- */

static void durable_look(const struct kvk_cache *cache, struct kvk_facts *facts)
{
    enum kvk_config_keeper wanted = cache->config->keeper;
    bool is_durable = cache->config->durable_folder[0] != '\0';
    facts->has_disk = cache->disk != NULL;
    facts->has_catalogue = cache->catalogue != NULL;
    facts->has_keeper = cache->keeper != NULL;
    facts->keeper_wanted =
        is_durable && (wanted == KVK_CONFIG_KEEPER_PROCESS || wanted == KVK_CONFIG_KEEPER_SYSTEMD);
    facts->keeper_may_be_wanted = is_durable && wanted != KVK_CONFIG_KEEPER_NO;
}

static void facts_take_drops(struct kvk_cache *cache, struct kvk_facts *facts)
{
    const struct kvk_credential everything = {.admin = true};
    const struct kvk_scope scope = {.credential = &everything};
    facts->now_ns = kvk_clock_now(cache->clock);
    kvk_report_tiers(cache, &scope, facts->tiers);
    kvk_tier_health(cache, &facts->device);
    facts->passing = cache->passing_holds + cache->moves_under_way;
    facts->sequences = cache->sequence_table.count;
    facts->leases = cache->lease_table.count;
    facts->transfers = cache->transfer_table.count;
    facts->instances = cache->instance_count;
    facts->sessions = cache->session_table.count;
    facts->stats = cache->stats;
    facts->draining = cache->draining;
    kvk_index_stats(cache->index, &facts->index);
    facts->metadata_bytes = kvk_cache_metadata_bytes(cache);
    kvk_scrub_counts(cache, &facts->scrub);
    durable_look(cache, facts);
    kvk_remote_report(cache, &facts->remote);
    wrong_look(cache, facts);
    refusals_look(cache, facts);
    journal_look(cache, facts);
    sessions_walk(cache, facts);
    quotas_look(cache, facts);
    sequences_walk_drops(cache, facts);
    leases_walk_drops(cache, facts);
    groups_walk_drops(cache, facts);
}

enum kvk_status kvk_facts_gather(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 struct kvk_facts *facts, struct kvk_error *error)
{
    *facts = (struct kvk_facts){.scattered_tier = -1};
    kvk_lock(&cache->lock);
    facts_take_drops(cache, facts);
    kvk_unlock(&cache->lock);
    facts->memory_known = kvk_machine_memory("", &facts->memory);
    if (facts->has_disk) {
        kvk_disk_health(cache->disk, &facts->disk);
    }
    if (facts->has_catalogue) {
        kvk_catalogue_stats(cache->catalogue, &facts->catalogue);
    }
    return gap_look(cache, caller, facts, error);
}
