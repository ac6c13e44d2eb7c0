#include "daemon/warm.h"

#include <stdlib.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/cache_internal.h"
#include "daemon/disk_flush.h"
#include "daemon/disk_tier.h"
#include "daemon/kept.h"
#include "daemon/process_watch.h"
#include "daemon/room_internal.h"
#include "daemon/sidecar.h"
#include "hosttier/catalogue.h"

static bool is_found(const struct kvk_group *group)
{
    struct kvk_sidecar_found found;
    kvk_sidecar_found(group, &found);
    return found.found;
}

/* ---- Is it possible? ---- */

/* Processes of before that live, of one group. */
struct survivors {
    uint32_t count;
    uint8_t tier_mask; /* that any of them may write */
    bool unknown;      /* one cannot be watched */
};

static void survivor_count(void *context, int32_t pid, uint64_t start, uint8_t tier_mask)
{
    struct survivors *survivors = context;
    int pidfd = -1;
    switch (kvk_process_look(pid, start, &pidfd)) {
    case KVK_PROCESS_GONE:
        break;
    case KVK_PROCESS_ALIVE:
        (void)close(pidfd);
        survivors->count++;
        survivors->tier_mask |= tier_mask;
        break;
    case KVK_PROCESS_UNKNOWN:
        survivors->unknown = true;
        break;
    }
}

/* What it costs to keep granted slots: slabs reach up to the last of them. */
struct aside {
    const struct kvk_arena *arena;
    uint32_t slab;      /* of the last one; KVK_SLAB_NONE */
    uint32_t last_slot; /* slots come in order */
    uint64_t slots;     /* of slabs that are settled */
    uint32_t granted;
};

static void aside_settle(struct aside *aside)
{
    if (aside->slab != KVK_SLAB_NONE) {
        aside->slots += aside->last_slot - aside->slab * aside->arena->slab_slots + 1;
    }
}

static void aside_count(void *context, uint32_t slot)
{
    struct aside *aside = context;
    uint32_t slab = kvk_arena_slab_of(aside->arena, slot);
    if (slab != aside->slab) {
        aside_settle(aside);
        aside->slab = slab;
    }
    aside->last_slot = slot;
    aside->granted++;
}

static bool refuse(const struct kvk_group *group, const char *reason)
{
    kvk_log(KVK_LOG_WARNING, "kept_memory_refused", "space=%llu group=%u text=\"%s\"",
            (unsigned long long)group->space->id, group->index, reason);
    return false;
}

bool kvk_warm_is_possible(struct kvk_cache *cache, struct kvk_group *group)
{
    struct survivors survivors = {.count = 0};
    uint64_t bytes[KVK_MEMORY_TIER_COUNT] = {0};
    uint32_t blocks = 0;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (!is_found(group)) {
        return true;
    }
    kvk_sidecar_processes(group, survivor_count, &survivors);
    if (survivors.unknown) {
        return refuse(group, "a process that may write there cannot be watched");
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (!group->tiers[i].adopted || (survivors.tier_mask & (1U << i)) == 0) {
            continue;
        }
        struct aside aside = {.arena = &group->tiers[i].arena, .slab = KVK_SLAB_NONE};
        kvk_sidecar_granted(group, (enum kvk_tier)i, aside_count, &aside);
        aside_settle(&aside);
        bytes[i] = aside.slots * group->forms[i].block_bytes;
        blocks += aside.granted;
    }
    bool enough = survivors.count <= cache->config->sessions / 2 - cache->aside_sessions / 2 &&
                  blocks <= cache->config->blocks / 2 - cache->aside_blocks / 2;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        enough = enough && bytes[i] <= cache->tiers[i].pool.limit_bytes - cache->aside_bytes[i];
    }
    if (!enough) {
        return refuse(group, "more than the configuration has room for is still being written");
    }
    cache->aside_sessions += survivors.count;
    cache->aside_blocks += blocks;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        cache->aside_bytes[i] += bytes[i];
    }
    return true;
}

/* ---- Setting aside ---- */

struct quarantine {
    struct kvk_cache *cache;
    struct kvk_group *group;
    enum kvk_tier tier;
    struct kvk_session **sessions; /* [session_count], ours */
    uint32_t session_count, session_capacity;
    uint64_t slots;
    bool failed;
};

/* The session of a process of before, one for all its groups; NULL: no memory. */
static struct kvk_session *survivor_session(struct kvk_cache *cache,
                                            const struct kvk_tenant *tenant, int32_t pid,
                                            uint64_t start, int pidfd)
{
    for (struct kvk_session *known = cache->waiting_sessions; known != NULL; known = known->next) {
        if (known->pid == pid && known->process_start == start && known->tenant == tenant) {
            (void)close(pidfd);
            return known;
        }
    }
    struct kvk_session *session = calloc(1, sizeof(*session));
    if (session == NULL) {
        (void)close(pidfd);
        return NULL;
    }
    session->id = kvk_cache_new_id(cache);
    session->tenant = tenant;
    session->local = true;
    session->pid = pid;
    session->process_start = start;
    session->pidfd = pidfd;
    if (kvk_table_put(&cache->session_table, session->id, session) != KVK_OK) {
        (void)close(pidfd);
        free(session);
        return NULL;
    }
    session->next = cache->waiting_sessions;
    cache->waiting_sessions = session;
    kvk_metadata_add(cache, session->tenant, KVK_METADATA_SESSIONS, 1, 0);
    kvk_metadata_session(cache, session);
    return session;
}

static bool survivor_map(struct kvk_cache *cache, struct kvk_session *session,
                         struct kvk_group *group, enum kvk_tier tier)
{
    struct kvk_mapping *mapping = calloc(1, sizeof(*mapping));
    if (mapping == NULL || !kvk_sidecar_process_add(group, tier, session)) {
        free(mapping);
        return false;
    }
    mapping->kind = KVK_MAP_SLOTS;
    mapping->writable = true;
    mapping->taken = true;
    mapping->group = group;
    mapping->tier = tier;
    mapping->scratch.fd = -1;
    mapping->next = session->mappings;
    session->mappings = mapping;
    kvk_metadata_session(cache, session);
    group->space->reference_count++;
    return true;
}

/* Of every process that lives and may write this tier: a session that is waited for. */
static void survivor_take(void *context, int32_t pid, uint64_t start, uint8_t tier_mask)
{
    struct quarantine *quarantine = context;
    struct kvk_cache *cache = quarantine->cache;
    int pidfd = -1;
    if ((tier_mask & (1U << quarantine->tier)) == 0 || quarantine->failed) {
        return;
    }
    switch (kvk_process_look(pid, start, &pidfd)) {
    case KVK_PROCESS_GONE:
        return;
    case KVK_PROCESS_UNKNOWN:
        quarantine->failed = true;
        return;
    case KVK_PROCESS_ALIVE:
        break;
    }
    kvk_lock(&cache->lock);
    struct kvk_session *session =
        survivor_session(cache, quarantine->group->space->tenant, pid, start, pidfd);
    bool added =
        session != NULL && survivor_map(cache, session, quarantine->group, quarantine->tier);
    kvk_unlock(&cache->lock);
    if (added && quarantine->session_count == quarantine->session_capacity) {
        uint32_t capacity = quarantine->session_capacity * 2 + 16;
        void *grown = realloc(quarantine->sessions, capacity * sizeof(struct kvk_session *));
        added = grown != NULL;
        quarantine->sessions = grown != NULL ? grown : quarantine->sessions;
        quarantine->session_capacity = grown != NULL ? capacity : quarantine->session_capacity;
    }
    if (!added) {
        quarantine->failed = true;
        return;
    }
    quarantine->sessions[quarantine->session_count++] = session;
}

/* The slot is nobody's until every one of those processes is gone. */
static void slot_quarantine(void *context, uint32_t slot)
{
    struct quarantine *quarantine = context;
    struct kvk_cache *cache = quarantine->cache;
    if (quarantine->failed) {
        return;
    }
    kvk_lock(&cache->lock);
    uint32_t block = KVK_BLOCK_NONE;
    if (kvk_slot_keep_at(cache, quarantine->group, quarantine->tier, slot) == KVK_OK) {
        block = kvk_block_create(cache, quarantine->group, quarantine->tier, slot);
        if (block == KVK_BLOCK_NONE) {
            kvk_slot_give(cache, quarantine->group, quarantine->tier, slot);
        }
    }
    quarantine->failed = block == KVK_BLOCK_NONE;
    for (uint32_t i = 0; i < quarantine->session_count && !quarantine->failed; i++) {
        if (i > 0) {
            kvk_block_hold(cache, block, false);
            kvk_block_pin(cache, block, quarantine->tier);
        }
        kvk_session_quarantine(cache, quarantine->sessions[i], block);
    }
    quarantine->slots += quarantine->failed ? 0 : 1;
    kvk_unlock(&cache->lock);
}

static enum kvk_status group_quarantine(struct kvk_cache *cache, struct kvk_group *group,
                                        uint64_t *slots, struct kvk_error *error)
{
    bool failed = false;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT && !failed; i++) {
        struct quarantine quarantine = {.cache = cache, .group = group, .tier = (enum kvk_tier)i};
        if (!group->tiers[i].adopted) {
            continue;
        }
        kvk_sidecar_processes(group, survivor_take, &quarantine);
        if (quarantine.session_count > 0) {
            kvk_sidecar_granted(group, quarantine.tier, slot_quarantine, &quarantine);
        }
        failed = quarantine.failed;
        *slots += quarantine.slots;
        free(quarantine.sessions);
    }
    return failed ? kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                             "no memory to keep what processes of before may still write")
                  : KVK_OK;
}

/* ---- Memory ---- */

/* Give back what is backed of these slots, of which none is in a slab. */
static enum kvk_status slots_punch(struct kvk_group *group, enum kvk_tier tier,
                                   struct kvk_device *device, uint64_t first, uint64_t slots,
                                   struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    for (uint32_t shard = 0; shard < group->shard_count && status == KVK_OK && slots > 0; shard++) {
        uint64_t bytes = group->forms[tier].shard_bytes[shard];
        status = device->ops->punch(device, &group->tiers[tier].regions[shard], first * bytes,
                                    slots * bytes, error);
    }
    return status;
}

/* Slabs that are there again have memory in whole; what lies between them is given back, and behind
 * those that are shorter than they were. */
static enum kvk_status tier_back(struct kvk_cache *cache, struct kvk_group *group,
                                 enum kvk_tier tier, struct kvk_error *error)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_device *device = cache->tiers[tier].device;
    struct kvk_device *memory = cache->memory;
    enum kvk_status status = KVK_OK;
    for (uint32_t i = 0; i < at->arena.slab_capacity && status == KVK_OK; i++) {
        uint64_t first = (uint64_t)i * at->arena.slab_slots;
        uint64_t slots = at->arena.slabs[i].slot_count;
        status =
            slots_punch(group, tier, device, first + slots, at->arena.slab_slots - slots, error);
        for (uint32_t shard = 0; shard < group->shard_count && status == KVK_OK && slots > 0;
             shard++) {
            uint64_t bytes = group->forms[tier].shard_bytes[shard];
            status =
                device->ops->back(device, &at->regions[shard], first * bytes, slots * bytes, error);
        }
        if (status == KVK_OK && slots > 0) {
            status = memory->ops->back(memory, &at->generations, first * sizeof(uint32_t),
                                       slots * sizeof(uint32_t), error);
        }
        if (status == KVK_OK && slots > 0) {
            status = kvk_sidecar_back_unlocked(cache, group, tier, (uint32_t)first, (uint32_t)slots,
                                               error);
        }
    }
    return status;
}

static void tier_settle(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    kvk_lock(&cache->lock);
    at->adopted = false;
    KVK_ASSERT(at->backing_count > 0);
    at->backing_count--; /* strays may be looked for again */
    kvk_unlock(&cache->lock);
}

/* ---- The start ---- */

/* Groups are only made and ended by who serves, and nobody does yet. */
static struct kvk_group *group_next(const struct kvk_cache *cache, uint32_t *number)
{
    while (*number < cache->group_end) {
        struct kvk_group *group = cache->groups[(*number)++];
        if (group != NULL) {
            return group;
        }
    }
    return NULL;
}

static enum kvk_status records_restore(struct kvk_cache *cache, struct kvk_error *error)
{
    struct kvk_restore *restore;
    struct kvk_group *group;
    uint32_t number = 0;
    struct kvk_error later;
    enum kvk_status status = kvk_restore_begin(cache, &restore, error);
    if (status != KVK_OK) {
        return status;
    }
    while (status == KVK_OK && (group = group_next(cache, &number)) != NULL) {
        if (is_found(group)) {
            status = kvk_sidecar_read_unlocked(cache, group, restore, error);
        }
    }
    if (status == KVK_OK && cache->disk_tier != NULL) {
        status = kvk_disk_records_read(cache, restore, error);
    }
    enum kvk_status finished =
        kvk_restore_finish(restore, cache->disk_tier != NULL ? kvk_disk_record_refused : NULL,
                           cache, &cache->restored, status == KVK_OK ? error : &later);
    return status == KVK_OK ? finished : status;
}

static enum kvk_status groups_settle(struct kvk_cache *cache, struct kvk_error *error)
{
    struct kvk_group *group;
    uint32_t number = 0;
    enum kvk_status status = KVK_OK;
    while (status == KVK_OK && (group = group_next(cache, &number)) != NULL) {
        if (!is_found(group)) {
            continue;
        }
        kvk_lock(&cache->lock);
        kvk_sidecar_settle_drops(cache, group);
        kvk_sidecar_processes_clear(group);
        kvk_unlock(&cache->lock);
        for (int i = 0; i < KVK_MEMORY_TIER_COUNT && status == KVK_OK; i++) {
            if (group->tiers[i].adopted) {
                status = tier_back(cache, group, (enum kvk_tier)i, error);
                tier_settle(cache, group, (enum kvk_tier)i);
            }
        }
    }
    return status;
}

static void start_tell(struct kvk_cache *cache, uint64_t quarantined)
{
    const struct kvk_restore_counts *counts = &cache->restored;
    uint32_t found;
    uint32_t taken;
    kvk_kept_counts(cache, &found, &taken);
    if (found == 0 && counts->records == 0) {
        if (cache->keeper != NULL) {
            kvk_log(KVK_LOG_INFO, "cold_start", "text=\"the keeper held nothing\"");
        }
        return;
    }
    kvk_log(KVK_LOG_INFO, "warm_start",
            "files=%u attached=%u records=%llu blocks=%llu device=%llu host=%llu disk=%llu "
            "orphans=%llu wrong=%llu crowded=%llu duplicates=%llu torn=%llu quarantined_slots=%llu "
            "ms=%llu",
            found, taken, (unsigned long long)counts->records, (unsigned long long)counts->blocks,
            (unsigned long long)counts->copies[KVK_TIER_DEVICE],
            (unsigned long long)counts->copies[KVK_TIER_HOST],
            (unsigned long long)counts->copies[KVK_TIER_DISK], (unsigned long long)counts->orphans,
            (unsigned long long)counts->wrong, (unsigned long long)counts->crowded,
            (unsigned long long)counts->duplicates, (unsigned long long)cache->stats.torn_records,
            (unsigned long long)quarantined,
            (unsigned long long)(counts->duration_ns / KVK_NS_PER_MS));
}

enum kvk_status kvk_warm_start(struct kvk_cache *cache, struct kvk_error *error)
{
    struct kvk_group *group;
    uint32_t number = 0;
    uint64_t quarantined = 0;
    enum kvk_status status = KVK_OK;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache->kept == NULL && cache->disk_tier == NULL) {
        return KVK_OK;
    }
    /* First what must not be touched, so that nothing else takes its place. */
    while (status == KVK_OK && (group = group_next(cache, &number)) != NULL) {
        if (is_found(group)) {
            status = group_quarantine(cache, group, &quarantined, error);
        }
    }
    if (status == KVK_OK) {
        status = records_restore(cache, error);
    }
    if (status == KVK_OK) {
        status = groups_settle(cache, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    if (cache->disk_tier != NULL) {
        kvk_disk_tidy_unlocked(cache);
    }
    kvk_kept_sweep(cache);
    kvk_lock(&cache->lock);
    cache->stats.restored_blocks = cache->restored.blocks;
    kvk_unlock(&cache->lock);
    start_tell(cache, quarantined);
    return KVK_OK;
}

void kvk_warm_counts(struct kvk_cache *cache, struct kvk_restore_counts *counts)
{
    kvk_lock(&cache->lock);
    *counts = cache->restored;
    kvk_unlock(&cache->lock);
}

/* ---- The end ---- */

/* What lies only in a device's own memory goes to the host tier, which outlives the daemon. */
static uint64_t group_demote_drops(struct kvk_cache *cache, struct kvk_group *group,
                                   const struct kvk_caller *caller)
{
    uint64_t total = 0;
    bool goes = group->tiers[KVK_TIER_DEVICE].present && group->tiers[KVK_TIER_HOST].present &&
                group->tiers[KVK_TIER_DEVICE].regions[0].fd < 0;
    group->space->reference_count++; /* stays while the lock is dropped */
    while (goes && kvk_clock_now(kvk_clock_monotonic()) < caller->deadline_ns) {
        uint32_t demoted = 0;
        enum kvk_status status =
            kvk_room_demote_drops(cache, group, UINT32_MAX, false, &demoted, NULL);
        total += demoted;
        goes = status == KVK_OK && demoted > 0;
    }
    group->space->reference_count--;
    return total;
}

enum kvk_status kvk_drain(struct kvk_cache *cache, const struct kvk_caller *caller,
                          struct kvk_drain_reply *reply, struct kvk_error *error)
{
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    *reply = (struct kvk_drain_reply){.kept = cache->kept != NULL};
    kvk_sessions_drain(cache);
    kvk_lock(&cache->lock);
    cache->draining = true;
    for (uint32_t i = 0; i < cache->group_end; i++) {
        if (cache->groups[i] == NULL) {
            continue;
        }
        reply->demoted_blocks += group_demote_drops(cache, cache->groups[i], caller);
    }
    struct kvk_disk_flush flush;
    kvk_disk_flush_drops(cache, caller,
                         kvk_clock_now(kvk_clock_monotonic()) +
                             cache->config->drain_flush_ms * KVK_NS_PER_MS,
                         &flush);
    reply->flushed_blocks = flush.written_blocks;
    reply->unflushed_blocks = flush.left_blocks;
    for (uint32_t i = 0; i < cache->group_end; i++) {
        const struct kvk_group *group = cache->groups[i];
        if (group != NULL && group->sidecar != NULL) {
            struct kvk_sidecar_stats stats;
            kvk_sidecar_stats(group, &stats);
            reply->kept_blocks += stats.entries;
        }
        reply->disk_blocks += group != NULL ? group->tier_blocks[KVK_TIER_DISK] : 0;
    }
    kvk_unlock(&cache->lock);
    return cache->catalogue != NULL ? kvk_catalogue_flush(cache->catalogue, error) : KVK_OK;
}

void kvk_warm_leave(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache->kept == NULL || cache->leaving) {
        return;
    }
    kvk_lock(&cache->lock);
    cache->record_next = 0;
    kvk_sidecar_sync_slice(cache, kvk_index_block_id_end(cache->index));
    cache->leaving = true;
    for (uint32_t i = 0; i < cache->group_end; i++) {
        if (cache->groups[i] != NULL) {
            kvk_sidecar_freeze(cache->groups[i]);
        }
    }
    kvk_unlock(&cache->lock);
}
