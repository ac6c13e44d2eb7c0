#include "daemon/forget.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/persist.h"
#include "daemon/remote_store.h"
#include "daemon/room_internal.h"
#include "daemon/space_internal.h"

#define SLICE_IDS 4096 /* block ids that a sweep looks at with the lock held */
#define SLICE_SLOTS 64
#define PAGE_BYTES UINT64_C(4096)
#define DISK_ROUNDS 256
#define WAIT_NS (20 * KVK_NS_PER_MS) /* for a busy call of the tenant to end */
#define WAITS 50
#define RETRY_MS 500

/* ---- What is there ---- */

static void count_what_is_there(struct kvk_cache *cache, const struct kvk_tenant_state *state,
                                const struct kvk_tenant *tenant, struct kvk_forget_counts *counts)
{
    for (const struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            for (int i = 0; i < KVK_TIER_COUNT; i++) {
                counts->blocks[i] += space->groups[g]->tier_blocks[i];
                counts->bytes[i] += space->groups[g]->tiers[i].used_bytes;
            }
        }
    }
    for (const struct kvk_instance *instance = cache->instances; instance != NULL;
         instance = instance->next) {
        if (instance->tenant == tenant && !instance->ending) {
            counts->instances++;
            counts->sequences += instance->sequence_count;
            counts->leases += instance->lease_count;
        }
    }
}

static uint64_t bytes_left(const struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    uint64_t bytes = 0;
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        const uint64_t *used = cache->tiers[i].tenant_bytes;
        bytes += used != NULL ? used[tenant->index] : 0;
    }
    return bytes;
}

/* ---- Sessions ---- */

/* End every session of the tenant that is still connected. */
static enum kvk_status sessions_end_drops(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                          struct kvk_error *error)
{
    uint32_t count = 0;
    size_t place = 0;
    const struct kvk_table_entry *entry;
    kvk_unlock(&cache->lock);
    uint64_t *ids = calloc(cache->config->sessions, sizeof(*ids));
    kvk_lock(&cache->lock);
    if (ids == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for the sessions' ids");
    }
    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        const struct kvk_session *session = (const struct kvk_session *)entry->value;
        if (session->tenant == tenant && session->connected) {
            KVK_ASSERT(count < cache->config->sessions);
            ids[count++] = session->id;
        }
    }
    kvk_unlock(&cache->lock);
    for (uint32_t i = 0; i < count; i++) {
        kvk_session_end(cache, ids[i]);
    }
    free(ids);
    kvk_lock(&cache->lock);
    kvk_sessions_maintain(cache); /* whoever is gone by now */
    return KVK_OK;
}

/* Processes that are waited for, and instances whose last busy call has not ended. */
static uint32_t count_waiting(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                              struct kvk_forget_counts *counts)
{
    uint32_t busy = 0;
    size_t place = 0;
    const struct kvk_table_entry *entry;
    counts->writers = 0;
    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        const struct kvk_session *session = (const struct kvk_session *)entry->value;
        if (session->tenant == tenant) {
            counts->writers++;
            counts->writer_pid = session->pid;
        }
    }
    for (const struct kvk_instance *instance = cache->instances; instance != NULL;
         instance = instance->next) {
        busy += instance->tenant == tenant && instance->sequences != NULL ? 1 : 0;
    }
    return busy;
}

/* ---- Blocks ---- */

/* From here on nothing of it is found. Maintenance sweeps too, should this call end early. */
static void spaces_retire(struct kvk_cache *cache, struct kvk_tenant_state *state)
{
    cache->purge_left = kvk_index_block_id_end(cache->index);
    cache->purge_wanted = cache->purge_left > 0;
    for (struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        kvk_space_set_generation(space, space->generation + 1);
        kvk_events_cleared(cache, space);
    }
}

/* Every block of the tenant that nobody holds goes, in slices. */
static void blocks_forget_drops(struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    for (uint32_t id = 0; id < kvk_index_block_id_end(cache->index); id++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (block->state != KVK_BLOCK_FREE && block->run != UINT32_MAX &&
            kvk_group_of(cache, block)->space->tenant == tenant) {
            kvk_gone_begin(cache, KVK_GONE_FORGOTTEN, NULL);
            kvk_block_settle(cache, id);
            kvk_gone_end(cache);
        }
        if (id % SLICE_IDS == SLICE_IDS - 1) {
            kvk_pause_drops(cache);
        }
    }
}

/* Slots on disk that blocks have left are free once their records' removal is durable. */
static void disk_settle_drops(struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    const uint64_t *used = cache->tiers[KVK_TIER_DISK].tenant_bytes;
    struct kvk_error error;
    for (int i = 0; i < DISK_ROUNDS && cache->disk_tier != NULL && used[tenant->index] > 0; i++) {
        if (kvk_persist_removals_drops(cache, &error) != KVK_OK) {
            kvk_log(KVK_LOG_WARNING, "forget_disk_waits", "reason=\"%s\"", error.text);
            return; /* it is tried again by the next call */
        }
        if (!kvk_disk_round_drops(cache)) {
            kvk_pause_drops(cache);
        }
    }
}

/* ---- Memory ---- */

/* Slabs in which nothing lies any more are punched out: what a process still maps of them reads as
 * zeros. */
static void slabs_punch_drops(struct kvk_cache *cache, struct kvk_tenant_state *state)
{
    for (struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            for (int i = 0; i < KVK_TIER_COUNT; i++) {
                struct kvk_group *group = space->groups[g];
                uint32_t slab;
                while (group->tiers[i].present &&
                       (slab = kvk_arena_empty_slab(&group->tiers[i].arena)) != KVK_SLAB_NONE) {
                    if (!kvk_room_slab_leave(cache, group, (enum kvk_tier)i, slab)) {
                        break; /* no memory: the next call goes on */
                    }
                }
            }
        }
    }
    (void)kvk_tier_punch_drops(cache);
}

/* Memory comes and goes by whole pages. Where slots are none, what lies in free ones is wiped:
 * their pages may stay for as long as a process keeps the file. So may those of public slots, which
 * cannot be punched. Nobody takes slots of a tenant
 * without sessions, so this needs the lock only to see which are free. */
static void odd_slots_wipe_drops(struct kvk_cache *cache, struct kvk_group *group,
                                 enum kvk_tier tier)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    for (uint32_t shard = 0; at->present && shard < group->shard_count; shard++) {
        uint64_t bytes = group->forms[tier].shard_bytes[shard];
        if ((bytes % PAGE_BYTES == 0 && !group->space->is_public) || at->regions[shard].fd < 0) {
            continue;
        }
        uint32_t end = at->arena.place_fresh * at->arena.slab_slots;
        for (uint32_t slot = 0; slot < end; slot++) {
            uint8_t *memory = kvk_region_at(&at->regions[shard], slot * bytes);
            if (memory != NULL && !kvk_arena_is_used(&at->arena, slot)) {
                memset(memory, 0, bytes);
            }
            if (slot % SLICE_SLOTS == SLICE_SLOTS - 1) {
                kvk_pause_drops(cache);
            }
        }
    }
}

static void odd_slots_drops(struct kvk_cache *cache, const struct kvk_tenant_state *state)
{
    for (struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        space->reference_count++; /* stays while the lock is dropped */
        for (uint32_t g = 0; g < space->group_count; g++) {
            for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
                odd_slots_wipe_drops(cache, space->groups[g], (enum kvk_tier)i);
            }
        }
        space->reference_count--;
    }
}

/* Spaces that nothing refers to any more go, with their files. */
static void spaces_destroy_drops(struct kvk_cache *cache, struct kvk_tenant_state *state,
                                 struct kvk_forget_counts *counts)
{
    struct kvk_space *space = state->spaces;
    while (space != NULL) {
        if (kvk_space_reclaim_drops(cache, space)) {
            counts->spaces++;
            space = state->spaces; /* the lock was dropped */
        } else {
            space = space->tenant_next;
        }
    }
}

/* ---- The call ---- */

static void let_go_drops(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                         struct kvk_tenant_state *state, struct kvk_forget_counts *counts)
{
    blocks_forget_drops(cache, tenant);
    disk_settle_drops(cache, tenant);
    slabs_punch_drops(cache, state);
    spaces_destroy_drops(cache, state, counts);
    odd_slots_drops(cache, state);
}

/* Calls of it that are still running end soon: they were told that their sequences are gone. */
static bool wait_drops(struct kvk_cache *cache, const struct kvk_caller *caller)
{
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    if (!cache->threads || now_ns >= caller->deadline_ns) {
        return false;
    }
    (void)kvk_condition_wait(&cache->changed, &cache->lock, now_ns + WAIT_NS);
    return true;
}

static enum kvk_status fail_waiting(const struct kvk_forget_counts *counts, uint32_t busy,
                                    struct kvk_error *error)
{
    if (counts->writers > 0) {
        (void)kvk_fail_limit(error, KVK_UNAVAILABLE, KVK_CAUSE_QUARANTINE, "name", counts->writers,
                             0,
                             "%llu processes still map memory of the tenant, such as pid %d: %llu "
                             "bytes wait for their end",
                             (unsigned long long)counts->writers, counts->writer_pid,
                             (unsigned long long)counts->left_bytes);
    } else if (counts->public_spaces > 0) {
        (void)kvk_fail_limit(
            error, KVK_UNAVAILABLE, KVK_CAUSE_BUSY, "name", counts->public_spaces, 0,
            "%u public prefixes of the tenant, withdrawn, are still held or mapped "
            "by others: %llu bytes",
            counts->public_spaces, (unsigned long long)counts->left_bytes);
    } else {
        (void)kvk_fail_limit(error, KVK_UNAVAILABLE, KVK_CAUSE_BUSY, "name", busy, 0,
                             "%llu bytes of the tenant are still being worked on",
                             (unsigned long long)counts->left_bytes);
    }
    kvk_error_retry(error, RETRY_MS);
    return KVK_UNAVAILABLE;
}

/* Nothing of its spaces is found any more, nor in the store that daemons share, where a later
 * tenant of this name has the same keys. A store that is away hears of it when it is back, from
 * whoever opens such a space again. */
static enum kvk_status spaces_end_drops(struct kvk_cache *cache, const struct kvk_caller *caller,
                                        struct kvk_tenant_state *state, struct kvk_error *error)
{
    struct kvk_space **spaces = NULL;
    uint32_t count = 0;
    if (cache->remote == NULL || state->spaces == NULL) {
        spaces_retire(cache, state);
        return KVK_OK;
    }
    spaces = calloc(cache->config->spaces, sizeof(struct kvk_space *));
    if (spaces == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the spaces");
    }
    for (struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        if (!space->is_public) {
            space->reference_count++; /* stays while the lock is dropped */
            spaces[count++] = space;
        }
    }
    enum kvk_status status = kvk_remote_raise_begin_drops(cache, spaces, count, error);
    if (status == KVK_OK) {
        spaces_retire(cache, state);
        kvk_unlock(&cache->lock);
        uint32_t pending = kvk_remote_raise_end_unlocked(cache, spaces, count, caller->deadline_ns);
        if (pending > 0) {
            kvk_log(KVK_LOG_WARNING, "forget_store_waits", "spaces=%u", pending);
        }
        kvk_lock(&cache->lock);
    }
    for (uint32_t i = 0; i < count; i++) {
        spaces[i]->reference_count--;
    }
    free(spaces);
    return status;
}

static enum kvk_status forget_drops(struct kvk_cache *cache, const struct kvk_caller *caller,
                                    const struct kvk_tenant *tenant,
                                    struct kvk_forget_counts *counts, struct kvk_error *error)
{
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    if (state->tenant != tenant) {
        return KVK_OK; /* it never used anything, or is forgotten already */
    }
    state->forgetting = true;
    count_what_is_there(cache, state, tenant, counts);
    enum kvk_status status = sessions_end_drops(cache, tenant, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_public_forget(cache, tenant);
    status = spaces_end_drops(cache, caller, state, error);
    if (status != KVK_OK) {
        return status;
    }
    uint32_t busy = 0;
    for (uint32_t i = 0; i < WAITS; i++) {
        let_go_drops(cache, tenant, state, counts);
        busy = count_waiting(cache, tenant, counts);
        counts->left_bytes = bytes_left(cache, tenant);
        counts->public_spaces = kvk_public_spaces_held(cache, tenant);
        if (state->spaces == NULL && busy == 0 && counts->writers == 0) {
            kvk_usage_end(cache, state);
            return kvk_public_settle_drops(cache, error);
        }
        if (counts->writers > 0 || !wait_drops(cache, caller)) {
            break;
        }
    }
    return fail_waiting(counts, busy, error);
}

enum kvk_status kvk_tenant_forget(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  const struct kvk_tenant *tenant, struct kvk_forget_counts *counts,
                                  struct kvk_error *error)
{
    *counts = (struct kvk_forget_counts){.instances = 0};
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    kvk_lock(&cache->lock);
    enum kvk_status status = forget_drops(cache, caller, tenant, counts, error);
    if (status == KVK_OK) {
        kvk_mrc_end(cache, tenant);
    }
    kvk_unlock(&cache->lock);
    if (status == KVK_OK) {
        kvk_usage_forget_unlocked(cache, tenant);
    }
    kvk_log(KVK_LOG_INFO, "tenant_forgotten",
            "tenant_id=%llu complete=%s instances=%llu spaces=%llu device_bytes=%llu "
            "host_bytes=%llu disk_bytes=%llu left_bytes=%llu",
            (unsigned long long)tenant->id, status == KVK_OK ? "yes" : "no",
            (unsigned long long)counts->instances, (unsigned long long)counts->spaces,
            (unsigned long long)counts->bytes[KVK_TIER_DEVICE],
            (unsigned long long)counts->bytes[KVK_TIER_HOST],
            (unsigned long long)counts->bytes[KVK_TIER_DISK],
            (unsigned long long)counts->left_bytes);
    return status;
}
