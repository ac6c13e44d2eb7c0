#include "daemon/cache.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/cache_internal.h"
#include "daemon/kept.h"
#include "daemon/sidecar.h"
#include "daemon/persist.h"
#include "daemon/scrub.h"

#define TICK_NS (50 * KVK_NS_PER_MS) /* between rounds of maintenance */
#define STALL_NS KVK_NS_PER_SECOND   /* a gap beyond which the daemon itself stood still */
#define PURGE_IDS 4096               /* that one slice of a purge looks at */
#define SLICE_BLOCKS 1024            /* references: about a fifth of a millisecond */
#define PURGE_SLICES 8               /* in one round: ten million blocks go in 15 s */
#define SYNC_IDS 4096                /* blocks whose uses one round writes down */
#define STRAY_GROUPS 4               /* so many groups' memory is measured in one round */
#define PAGE_BYTES UINT64_C(4096)    /* memory is backed and punched by pages */
#define GHOST_BLOCKS 1024            /* until a space says how large blocks are */

/* ---- Creating ---- */

static enum kvk_status fail_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the cache");
}

/* Which devices serve: a tier of size 0 is none, but its device may still make memory. */
static enum kvk_status devices_take(struct kvk_cache *cache,
                                    const struct kvk_cache_options *options,
                                    struct kvk_error *error)
{
    const struct kvk_config *config = options->config;
    cache->devices[KVK_TIER_DEVICE] = options->device;
    cache->devices[KVK_TIER_HOST] = options->host_device;
    cache->memory = options->host_device != NULL ? options->host_device : options->device;
    const uint64_t limits[KVK_MEMORY_TIER_COUNT] = {config->device_bytes, config->host_bytes};
    uint64_t disk_bytes = options->disk != NULL ? config->disk_bytes : 0;
    kvk_pool_init(&cache->tiers[KVK_TIER_DISK].pool, disk_bytes);
    if (disk_bytes > 0) {
        cache->tiers[KVK_TIER_DISK].tenant_bytes = calloc(KVK_TENANT_COUNT_MAX, sizeof(uint64_t));
        if (cache->tiers[KVK_TIER_DISK].tenant_bytes == NULL) {
            return fail_memory(error);
        }
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        kvk_pool_init(&cache->tiers[i].pool, limits[i]);
        if (limits[i] == 0) {
            continue;
        }
        if (cache->devices[i] == NULL) {
            return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD,
                            i == KVK_TIER_DEVICE ? "device_bytes" : "host_bytes",
                            "a tier has bytes but no device");
        }
        cache->tiers[i].device = cache->devices[i];
        cache->tiers[i].tenant_bytes =
            calloc(KVK_TENANT_COUNT_MAX, sizeof(*cache->tiers[i].tenant_bytes));
        if (cache->tiers[i].tenant_bytes == NULL) {
            return fail_memory(error);
        }
    }
    if (cache->tiers[KVK_TIER_DEVICE].device == NULL &&
        cache->tiers[KVK_TIER_HOST].device == NULL) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "device_bytes",
                        "device_bytes and host_bytes are both 0");
    }
    return KVK_OK;
}

static enum kvk_status index_make(struct kvk_cache *cache, struct kvk_error *error)
{
    const struct kvk_config *config = cache->config;
    const struct kvk_index_options index_options = {
        .block_count_max = config->blocks,
        .root_count_max = config->roots,
    };
    if (kvk_index_create(&index_options, &cache->index) != KVK_OK) {
        return fail_memory(error);
    }
    const struct kvk_evict_options evict_options = {
        .policy = config->policy,
        .ghost_count = config->ghost_ratio * GHOST_BLOCKS,
        .block_count = GHOST_BLOCKS,
        .cost_lists = config->cost_lists,
    };
    if (kvk_evict_create(cache->index, &evict_options, &cache->evict) != KVK_OK) {
        return fail_memory(error);
    }
    if (kvk_journal_init(&cache->journal, config->journal_entries) != KVK_OK ||
        kvk_mrcs_init(&cache->mrcs, config) != KVK_OK ||
        kvk_events_create(config->events_log_bytes, &cache->events) != KVK_OK) {
        return fail_memory(error);
    }
    cache->group_capacity = config->spaces * KVK_GROUP_COUNT_MAX;
    cache->groups = calloc(cache->group_capacity, sizeof(struct kvk_group *));
    cache->path_capacity = config->tokens;
    cache->slice_blocks = SLICE_BLOCKS;
    bool enough = cache->groups != NULL;
    for (int g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        cache->path[g] = calloc(cache->path_capacity, sizeof(*cache->path[g]));
        cache->path_tiers[g] = calloc(cache->path_capacity, sizeof(*cache->path_tiers[g]));
        enough = enough && cache->path[g] != NULL && cache->path_tiers[g] != NULL;
    }
    return enough ? KVK_OK : fail_memory(error);
}

static enum kvk_status tables_make(struct kvk_cache *cache, struct kvk_error *error)
{
    const struct {
        struct kvk_table *table;
        uint32_t count;
    } tables[] = {
        {&cache->space_table, cache->config->spaces},
        {&cache->sequence_table, cache->config->sequences},
        {&cache->lease_table, cache->config->leases},
        {&cache->transfer_table, cache->config->transfers},
        {&cache->session_table, cache->config->sessions},
    };
    for (size_t i = 0; i < sizeof(tables) / sizeof(tables[0]); i++) {
        if (kvk_table_init(tables[i].table, tables[i].count) != KVK_OK) {
            return fail_memory(error);
        }
    }
    const struct kvk_mover_options mover_options = {
        .thread_count = cache->threads ? cache->config->copy_threads : 0,
        .queue_max = cache->config->copy_queue,
    };
    return kvk_mover_create(&mover_options, &cache->mover) == KVK_OK
               ? KVK_OK
               : kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no threads for copies");
}

static void *maintenance_main(void *argument)
{
    struct kvk_cache *cache = argument;
    while (!atomic_load(&cache->stopping)) {
        kvk_lock(&cache->lock);
        uint64_t until_ns = kvk_clock_now(kvk_clock_monotonic()) + TICK_NS;
        while (!atomic_load(&cache->stopping) &&
               kvk_condition_wait(&cache->wake, &cache->lock, until_ns)) {
        }
        kvk_unlock(&cache->lock);
        if (!atomic_load(&cache->stopping)) {
            kvk_cache_maintain(cache);
        }
    }
    return NULL;
}

/* Signals belong to the daemon's own threads. */
static enum kvk_status maintenance_start(struct kvk_cache *cache, struct kvk_error *error)
{
    sigset_t all;
    sigset_t before;

    cache->maintained_ns = kvk_clock_now(cache->clock);
    cache->maintenance_running = true;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&cache->maintenance, NULL, maintenance_main, cache);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0) {
        cache->maintenance_running = false;
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no thread for maintenance");
    }
    (void)pthread_setname_np(cache->maintenance, "kvk-maintain");
    return KVK_OK;
}

enum kvk_status kvk_cache_create(const struct kvk_cache_options *options, struct kvk_cache **result,
                                 struct kvk_error *error)
{
    struct kvk_cache *cache = calloc(1, sizeof(*cache));
    if (cache == NULL) {
        struct kvk_device *devices[2] = {options->device, options->host_device};
        for (int i = 0; i < 2; i++) {
            if (devices[i] != NULL) {
                devices[i]->ops->close(devices[i]);
            }
        }
        return fail_memory(error);
    }
    kvk_lock_init(&cache->lock);
    kvk_condition_init(&cache->changed);
    kvk_condition_init(&cache->wake);
    cache->config = options->config;
    cache->tenants = options->tenants;
    cache->clock = options->clock != NULL ? options->clock : kvk_clock_monotonic();
    cache->catalogue = options->catalogue;
    cache->disk = options->disk;
    cache->keeper = options->keeper;
    cache->threads = options->threads;
    cache->maintained_ns = kvk_clock_now(cache->clock);
    kvk_random_secret(&cache->next_id, sizeof(cache->next_id));
    cache->next_id >>=
        2; /* ids are numbers in JSON too, where many readers know signed ones alone */
    enum kvk_status status = devices_take(cache, options, error);
    if (status == KVK_OK) {
        status = kvk_tenant_states_create(cache, error);
    }
    if (status == KVK_OK) {
        status = index_make(cache, error);
    }
    if (status == KVK_OK) {
        status = kvk_disk_tier_create(cache, error);
    }
    if (status == KVK_OK) {
        status = tables_make(cache, error);
    }
    if (status == KVK_OK) {
        status = kvk_remote_store_create(cache, error);
    }
    if (status == KVK_OK && cache->threads) {
        status = maintenance_start(cache, error);
    }
    if (status == KVK_OK) {
        status = kvk_disk_tier_start(cache, error);
    }
    if (status == KVK_OK) {
        status = kvk_remote_store_start(cache, error);
    }
    if (status == KVK_OK) {
        status = kvk_scrub_create(cache, error);
    }
    if (status != KVK_OK) {
        kvk_cache_destroy(cache);
        return status;
    }
    *result = cache;
    return KVK_OK;
}

/* ---- Destroying ---- */

static void maintenance_stop(struct kvk_cache *cache)
{
    if (!cache->maintenance_running) {
        return;
    }
    kvk_lock(&cache->lock);
    atomic_store(&cache->stopping, true);
    pthread_cond_broadcast(&cache->wake);
    kvk_unlock(&cache->lock);
    pthread_join(cache->maintenance, NULL);
    cache->maintenance_running = false;
}

/* With all sessions closed and the index emptied, all is free. */
static void blocks_forget(struct kvk_cache *cache)
{
    kvk_lock(&cache->lock);
    uint32_t end = kvk_index_block_id_end(cache->index);
    for (uint32_t id = 0; id < end; id++) {
        uint8_t mask = kvk_index_block(cache->index, id)->tier_mask;
        for (int i = 0; i < KVK_TIER_COUNT; i++) {
            if ((mask & (1U << i)) != 0) {
                kvk_block_drop_copy(cache, id, (enum kvk_tier)i, false);
            }
        }
    }
    KVK_ASSERT(kvk_index_block_count(cache->index) == 0);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        KVK_ASSERT(cache->tiers[i].used_bytes == 0);
        KVK_ASSERT(cache->tiers[i].bound_bytes == 0);
        KVK_ASSERT(cache->tiers[i].growth_bytes == 0);
    }
    while (cache->punches != NULL) {
        struct kvk_punch *punch = cache->punches;
        cache->punches = punch->next;
        free(punch); /* the memory goes with its region */
    }
    kvk_unlock(&cache->lock);
}

static void memory_free(struct kvk_cache *cache)
{
    kvk_journal_finish(&cache->journal);
    kvk_mrcs_finish(&cache->mrcs);
    kvk_events_destroy(cache->events);
    kvk_evict_destroy(cache->evict);
    kvk_index_destroy(cache->index);
    kvk_table_finish(&cache->space_table);
    kvk_table_finish(&cache->sequence_table);
    kvk_table_finish(&cache->lease_table);
    kvk_table_finish(&cache->transfer_table);
    kvk_table_finish(&cache->session_table);
    for (int g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        free(cache->path[g]);
        free(cache->path_tiers[g]);
    }
    kvk_remote_store_destroy(cache);
    kvk_disk_tier_destroy(cache);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        free(cache->tiers[i].tenant_bytes);
    }
    free(cache->tenant_states);
    free(cache->groups);
    kvk_kept_destroy(cache);
    for (int i = 0; i < 2; i++) {
        if (cache->devices[i] != NULL) {
            cache->devices[i]->ops->close(cache->devices[i]);
        }
    }
    pthread_cond_destroy(&cache->wake);
    pthread_cond_destroy(&cache->changed);
    kvk_lock_finish(&cache->lock);
    free(cache);
}

void kvk_cache_quiesce(struct kvk_cache *cache)
{
    kvk_scrub_destroy(cache);
    kvk_remote_store_stop(cache);
    maintenance_stop(cache);
    kvk_disk_tier_stop(cache);
}

void kvk_cache_destroy(struct kvk_cache *cache)
{
    if (cache == NULL) {
        return;
    }
    kvk_cache_quiesce(cache);
    if (cache->mover != NULL) { /* made last: all else is there too */
        kvk_usage_save(cache);
        kvk_sessions_end_all_unlocked(cache);
        kvk_workspaces_finish(cache);
        kvk_public_withdraw_all_unlocked(cache);
        blocks_forget(cache);
        kvk_space_destroy_all(cache);
        kvk_mover_destroy(cache->mover);
    }
    memory_free(cache);
}

/* ---- Maintenance ---- */

uint64_t kvk_cache_metadata_bytes(const struct kvk_cache *cache)
{
    struct kvk_index_stats index;
    kvk_index_stats(cache->index, &index);
    return index.bytes + index.token_bytes + kvk_evict_bytes(cache->evict) +
           kvk_journal_bytes(&cache->journal) + kvk_mrcs_bytes(&cache->mrcs) +
           kvk_events_bytes(cache->events);
}

uint64_t kvk_cache_workspace_bytes(const struct kvk_cache *cache)
{
    const struct kvk_table_entry *entry;
    uint64_t bytes = kvk_workspace_bytes(cache);
    size_t place = 0;
    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        const struct kvk_session *session = (const struct kvk_session *)entry->value;
        for (const struct kvk_mapping *m = session->mappings; m != NULL; m = m->next) {
            bytes += m->kind == KVK_MAP_SCRATCH ? m->scratch.size_bytes : 0;
        }
    }
    return bytes;
}

uint64_t kvk_cache_stood_still(const struct kvk_cache *cache, uint64_t now_ns)
{
    uint64_t gap = now_ns > cache->maintained_ns ? now_ns - cache->maintained_ns : 0;
    bool stalled = cache->maintenance_running && gap > STALL_NS;
    return cache->stood_still_ns + (stalled ? gap - TICK_NS : 0);
}

/* What the tier's files may have backed: the slots of every place that has memory, and, where slots
 * are not whole pages, up to a page at either end of a place: memory comes by whole pages, and a
 * punch leaves those that reach out of the place. */
static uint64_t backed_expected(const struct kvk_group *group, enum kvk_tier tier)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    uint64_t slots = 0;
    uint64_t places = 0;
    uint64_t edges = 0;
    for (uint32_t i = 0; i < at->arena.slab_capacity; i++) {
        slots += at->places[i] == KVK_PLACE_LEAVING ? at->arena.slab_slots : at->places[i];
        places += at->places[i] > 0 || i < at->arena.place_fresh ? 1 : 0;
    }
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        edges +=
            group->forms[tier].shard_bytes[shard] % PAGE_BYTES == 0 ? 0 : 2 * PAGE_BYTES * places;
    }
    return slots * group->forms[tier].block_bytes + edges;
}

/* Slots that are being backed or punched now cannot be told from strays. */
static bool is_settled(const struct kvk_cache *cache, const struct kvk_group *group,
                       enum kvk_tier tier)
{
    for (const struct kvk_punch *punch = cache->punches; punch != NULL; punch = punch->next) {
        if (punch->group == group && punch->tier == tier) {
            return false;
        }
    }
    return group->tiers[tier].backing_count == 0;
}

/* Nobody's bytes lie where no slab is, so what strayed in there goes again. A place is marked as
 * leaving meanwhile, so that no slab comes to it. */
static void strays_punch(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    for (uint32_t i = 0; i < at->arena.slab_capacity; i++) {
        if (at->places[i] != 0) {
            continue;
        }
        struct kvk_punch *punch = calloc(1, sizeof(*punch));
        if (punch == NULL) {
            return; /* the next round tries again */
        }
        *punch =
            (struct kvk_punch){.group = group, .tier = tier, .slab = i, .next = cache->punches};
        cache->punches = punch;
        at->places[i] = KVK_PLACE_LEAVING;
    }
    at->leave_count++;
}

/* Memory that workers faulted in where no slab is counts against the pool, until it is gone. */
static void strays_measure_drops(struct kvk_cache *cache, struct kvk_group *group,
                                 enum kvk_tier tier)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_tier_state *state = &cache->tiers[tier];
    if (!at->present || !is_settled(cache, group, tier)) {
        return;
    }
    uint32_t leave_count = at->leave_count;
    uint64_t expected = backed_expected(group, tier);
    uint64_t backed = 0;
    kvk_unlock(&cache->lock);
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        backed += state->device->ops->backed_bytes(state->device, &at->regions[shard]);
    }
    kvk_lock(&cache->lock);
    if (!is_settled(cache, group, tier) || at->leave_count != leave_count ||
        backed_expected(group, tier) != expected) {
        return; /* the next time */
    }
    uint64_t stray = backed > expected ? backed - expected : 0;
    if (stray > at->stray_told_bytes) {
        at->stray_told_bytes = stray;
        kvk_log(KVK_LOG_WARNING, "stray_memory", "space=%llu tier=%d bytes=%llu",
                (unsigned long long)group->space->id, (int)tier, (unsigned long long)stray);
    }
    KVK_ASSERT(state->stray_bytes >= at->stray_bytes);
    state->stray_bytes = state->stray_bytes - at->stray_bytes + stray;
    state->pool.charge_bytes = state->pool.charge_bytes - at->stray_bytes + stray;
    at->stray_bytes = stray;
    if (stray > 0 && !kvk_tier_is_lent(at)) {
        strays_punch(cache, group, tier);
    }
}

static void strays_drops(struct kvk_cache *cache)
{
    uint32_t looked = 0;
    for (uint32_t i = 0; i < cache->group_end && looked < STRAY_GROUPS; i++) {
        cache->stray_next = cache->stray_next + 1 < cache->group_end ? cache->stray_next + 1 : 0;
        struct kvk_group *group = cache->groups[cache->stray_next];
        if (group == NULL || group->space->is_public) { /* nobody else can write there */
            continue;
        }
        looked++;
        group->space->reference_count++; /* stays while it is measured */
        for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT; tier++) {
            strays_measure_drops(cache, group, (enum kvk_tier)tier);
        }
        group->space->reference_count--;
    }
}

/* Note a gap that is too long for the daemon's own work: it was stopped, wherever it was just then,
 * between two rounds or in the middle of one. */
static void gap_note(struct kvk_cache *cache)
{
    uint64_t now_ns = kvk_clock_now(cache->clock);
    uint64_t stood_still_ns = kvk_cache_stood_still(cache, now_ns);
    if (stood_still_ns != cache->stood_still_ns) {
        kvk_log(KVK_LOG_WARNING, "stood_still", "ms=%llu",
                (unsigned long long)((stood_still_ns - cache->stood_still_ns) / KVK_NS_PER_MS));
        cache->stood_still_ns = stood_still_ns;
    }
    cache->maintained_ns = now_ns;
}

/* What was invalidated goes before it is missed: until then it takes room that others give up
 * theirs for. */
static void purge_drops(struct kvk_cache *cache)
{
    for (uint32_t i = 0; i < PURGE_SLICES && cache->purge_wanted; i++) {
        if (i > 0) {
            kvk_pause_drops(cache);
        }
        kvk_purge_slice(cache, PURGE_IDS);
    }
}

void kvk_cache_maintain(struct kvk_cache *cache)
{
    kvk_lock(&cache->lock);
    gap_note(cache);
    kvk_leases_expire_drops(cache);
    kvk_mrc_maintain(cache);
    kvk_release_rates_maintain(cache);
    kvk_sessions_maintain(cache);
    gap_note(cache);
    purge_drops(cache);
    kvk_lost_slice(cache, PURGE_IDS);
    kvk_tier_run_ahead_drops(cache);
    gap_note(cache);
    kvk_quota_maintain_drops(cache);
    gap_note(cache);
    kvk_room_tidy_drops(cache);
    gap_note(cache);
    strays_drops(cache);
    gap_note(cache);
    if (!cache->threads) {
        (void)kvk_disk_round_drops(cache);
    }
    kvk_workspaces_maintain_drops(cache);
    kvk_public_maintain_drops(cache);
    kvk_persist_maintain_drops(cache);
    gap_note(cache);
    kvk_usage_maintain_drops(cache);
    kvk_sidecar_sync_slice(cache, SYNC_IDS);
    kvk_sidecar_tidy_drops(cache);
    gap_note(cache);
    kvk_unlock(&cache->lock);
}

void kvk_cache_pulse(struct kvk_cache *cache, struct kvk_cache_pulse *pulse)
{
    _Static_assert(KVK_MEMORY_TIER_COUNT == 2, "device and host");
    uint64_t now_ns = kvk_clock_now(cache->clock);
    kvk_lock(&cache->lock);
    *pulse = (struct kvk_cache_pulse){
        .silent_ns = now_ns > cache->maintained_ns ? now_ns - cache->maintained_ns : 0,
        .sequences = cache->sequence_table.count,
        .leases = cache->lease_table.count,
        .sessions = cache->session_table.count};
    for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT; tier++) {
        pulse->used_bytes[tier] = cache->tiers[tier].used_bytes;
        pulse->limit_bytes[tier] = cache->tiers[tier].pool.limit_bytes;
    }
    kvk_unlock(&cache->lock);
}

/* ---- Test hooks ---- */

enum kvk_status kvk_cache_test_control(struct kvk_cache *cache,
                                       const struct kvk_test_control *control,
                                       struct kvk_error *error)
{
    if (!cache->config->test_hooks) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "this daemon runs without --test-hooks");
    }
    kvk_lock(&cache->lock);
    if (control->policy_time_ns != 0) {
        cache->policy_ns = control->policy_time_ns;
    }
    cache->constant_hash = control->constant_hash;
    if (control->slice_blocks > 0) {
        cache->slice_blocks = control->slice_blocks;
    }
    kvk_unlock(&cache->lock);
    if (control->set_copy_delay) {
        kvk_mover_test_delay(cache->mover, control->copy_delay_us);
    }
    if (control->fail_next_copy) {
        kvk_mover_test_fail_next(cache->mover);
    }
    return KVK_OK;
}
