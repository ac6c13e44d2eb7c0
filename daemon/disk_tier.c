/*
 * The disk tier's life, its bits and rings, and what others are told of it.
 */
#include "daemon/disk_tier.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/priority.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/room_internal.h"
#include "base/pages.h"

#define WORD_BITS 64U
#define TICK_NS (50 * KVK_NS_PER_MS)
#define LEAVING_TICK_NS (5 * KVK_NS_PER_MS) /* while writing waits for slots to be free */

/* ---- Bits and rings ---- */

bool kvk_disk_bit(const struct kvk_disk_bits *bits, uint32_t block)
{
    return (bits->words[block / WORD_BITS] >> (block % WORD_BITS) & 1) != 0;
}

void kvk_disk_bit_set(struct kvk_disk_bits *bits, uint32_t block, bool value)
{
    uint64_t bit = UINT64_C(1) << (block % WORD_BITS);
    if (value) {
        bits->words[block / WORD_BITS] |= bit;
    } else {
        bits->words[block / WORD_BITS] &= ~bit;
    }
}

bool kvk_disk_ring_add(struct kvk_disk_ring *ring, uint32_t block)
{
    if (ring->count == ring->capacity) {
        return false;
    }
    ring->blocks[(ring->first + ring->count) % ring->capacity] = block;
    ring->count++;
    return true;
}

uint32_t kvk_disk_ring_take(struct kvk_disk_ring *ring)
{
    if (ring->count == 0) {
        return KVK_BLOCK_NONE;
    }
    uint32_t block = ring->blocks[ring->first];
    ring->first = (ring->first + 1) % ring->capacity;
    ring->count--;
    return block;
}

static bool bits_init(struct kvk_disk_bits *bits, uint32_t blocks)
{
    bits->words = calloc(blocks / WORD_BITS + 1, sizeof(*bits->words));
    return bits->words != NULL;
}

static bool ring_init(struct kvk_disk_ring *ring, uint32_t capacity)
{
    *ring = (struct kvk_disk_ring){.capacity = capacity};
    ring->blocks = calloc((size_t)capacity + 1, sizeof(*ring->blocks));
    return ring->blocks != NULL;
}

/* ---- Life ---- */

static enum kvk_status fail_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the disk tier");
}

enum kvk_status kvk_disk_tier_create(struct kvk_cache *cache, struct kvk_error *error)
{
    const struct kvk_config *config = cache->config;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache->disk == NULL || config->disk_bytes == 0) {
        return KVK_OK;
    }
    struct kvk_disk_tier *tier = calloc(1, sizeof(*tier));
    if (tier == NULL) {
        return fail_memory(error);
    }
    kvk_condition_init(&tier->wake);
    tier->ready = cache->catalogue == NULL; /* else kvk_disk_tidy_unlocked() says so */
    cache->disk_tier = tier;                /* from here on destroying undoes what was done */
    uint32_t queue =
        config->blocks < KVK_DISK_QUEUE_BLOCKS ? config->blocks : KVK_DISK_QUEUE_BLOCKS;
    if (!bits_init(&tier->queued, config->blocks) || !bits_init(&tier->writing, config->blocks) ||
        !bits_init(&tier->restoring, config->blocks) || !ring_init(&tier->behind, queue) ||
        !ring_init(&tier->ahead, config->disk_read_ahead)) {
        return fail_memory(error);
    }
    return KVK_OK;
}

static void *thread_main(void *argument)
{
    struct kvk_cache *cache = argument;
    struct kvk_disk_tier *tier = cache->disk_tier;
    kvk_priority_works();
    kvk_lock(&cache->lock);
    while (!tier->stopping) {
        bool waits = tier->leaving_count > 0 && tier->behind.count > 0;
        uint64_t until_ns =
            kvk_clock_now(kvk_clock_monotonic()) + (waits ? LEAVING_TICK_NS : TICK_NS);
        (void)kvk_condition_wait(&tier->wake, &cache->lock, until_ns);
        while (!tier->stopping && kvk_disk_round_drops(cache)) {
            kvk_lock_pass(&cache->lock); /* a round that wrote nothing has held it all the time */
        }
    }
    kvk_unlock(&cache->lock);
    return NULL;
}

enum kvk_status kvk_disk_tier_start(struct kvk_cache *cache, struct kvk_error *error)
{
    struct kvk_disk_tier *tier = cache->disk_tier;
    sigset_t all;
    sigset_t before;
    if (tier == NULL || !cache->threads) {
        return KVK_OK;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&tier->thread, NULL, thread_main, cache);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no thread for the disk tier");
    }
    tier->thread_running = true;
    (void)pthread_setname_np(tier->thread, "kvk-disk");
    return KVK_OK;
}

void kvk_disk_tier_stop(struct kvk_cache *cache)
{
    struct kvk_disk_tier *tier = cache->disk_tier;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (tier == NULL) {
        return;
    }
    kvk_lock(&cache->lock);
    tier->stopping = true;
    pthread_cond_broadcast(&tier->wake);
    kvk_unlock(&cache->lock);
    if (tier->thread_running) {
        pthread_join(tier->thread, NULL);
        tier->thread_running = false;
    }
    kvk_lock(&cache->lock);
    tier->closing = true;
    uint32_t number = 0;
    struct kvk_group *group;
    while ((group = kvk_room_next_group(cache, KVK_TIER_DISK, &number)) != NULL) {
        struct kvk_disk_group *at = group->disk;
        while (at->leave_first != 0) { /* the next start refuses what is still recorded of them */
            uint32_t slot = at->leave_first - 1;
            at->leave_first = at->leave_next[slot];
            at->leaving_count--;
            tier->leaving_count--;
            kvk_slot_retire(cache, group, slot);
        }
        at->leave_last = 0;
    }
    kvk_unlock(&cache->lock);
}

void kvk_disk_tier_destroy(struct kvk_cache *cache)
{
    struct kvk_disk_tier *tier = cache->disk_tier;
    if (tier == NULL) {
        return;
    }
    KVK_ASSERT(!tier->thread_running);
    free(tier->queued.words);
    free(tier->writing.words);
    free(tier->restoring.words);
    free(tier->behind.blocks);
    free(tier->ahead.blocks);
    free(tier->buffer);
    free(tier->staging);
    pthread_cond_destroy(&tier->wake);
    free(tier);
    cache->disk_tier = NULL;
}

/* ---- Groups ---- */

enum kvk_status kvk_disk_group_create(struct kvk_cache *cache, struct kvk_group *group,
                                      struct kvk_error *error)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    struct kvk_tier_state *state = &cache->tiers[KVK_TIER_DISK];
    const struct kvk_tier_form *form = &group->forms[KVK_TIER_DISK];
    uint64_t slot_bytes = 0;
    if (cache->disk_tier == NULL) {
        return KVK_OK;
    }
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        slot_bytes += kvk_disk_shard_stride(form->shard_bytes[shard]);
    }
    if (slot_bytes > state->pool.limit_bytes) {
        return KVK_OK; /* not one of its blocks fits */
    }
    group->disk = calloc(1, sizeof(*group->disk));
    if (group->disk == NULL || kvk_arena_init(&at->arena, &state->pool, slot_bytes) != KVK_OK) {
        free(group->disk);
        group->disk = NULL;
        return fail_memory(error);
    }
    at->present = true; /* from here on destroying undoes what was done */
    kvk_evict_queue_init(&at->queue, cache->evict, KVK_TIER_DISK, true, 1.0F);
    kvk_evict_queue_init(&at->clean, cache->evict, KVK_TIER_DISK, false, 1.0F);
    kvk_evict_queue_init(&at->held, cache->evict, KVK_TIER_DISK, false, 1.0F);
    slot_bytes = 0;
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        group->disk->shard_offset[shard] = slot_bytes;
        group->disk->shard_stride[shard] = kvk_disk_shard_stride(form->shard_bytes[shard]);
        slot_bytes += group->disk->shard_stride[shard];
    }
    size_t slots = kvk_arena_slot_capacity(&at->arena);
    at->checksums = kvk_pages_create_sparse(slots * group->shard_count * sizeof(*at->checksums));
    at->owners = kvk_pages_create_sparse(slots * sizeof(*at->owners));
    at->places = calloc(at->arena.slab_capacity, sizeof(*at->places));
    group->disk->leave_tickets = kvk_pages_create_sparse(slots * sizeof(uint64_t));
    group->disk->leave_next = kvk_pages_create_sparse(slots * sizeof(uint32_t));
    return at->checksums != NULL && at->owners != NULL && at->places != NULL &&
                   group->disk->leave_tickets != NULL && group->disk->leave_next != NULL
               ? KVK_OK
               : fail_memory(error);
}

static void file_end_unlocked(struct kvk_cache *cache, const struct kvk_group *group)
{
    struct kvk_error error;
    bool keeps = cache->catalogue != NULL && cache->disk_tier->closing;
    if (group->disk->file == NULL) {
        return;
    }
    kvk_disk_file_close(group->disk->file);
    if (!keeps &&
        kvk_disk_file_remove(cache->disk, group->space->id, group->index, &error) != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "disk_file_not_removed", "space=%llu group=%u text=\"%s\"",
                (unsigned long long)group->space->id, group->index, error.text);
    }
}

void kvk_disk_group_destroy_unlocked(struct kvk_cache *cache, struct kvk_group *group)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    KVK_ASSERT(kvk_locks_held() == 0);
    if (!at->present) {
        return;
    }
    KVK_ASSERT(group->disk->leaving_count == 0);
    file_end_unlocked(cache, group);
    size_t slots = kvk_arena_slot_capacity(&at->arena);
    kvk_pages_destroy_sparse(at->checksums, slots * group->shard_count * sizeof(*at->checksums));
    kvk_pages_destroy_sparse(at->owners, slots * sizeof(*at->owners));
    kvk_pages_destroy_sparse(group->disk->leave_tickets, slots * sizeof(uint64_t));
    kvk_pages_destroy_sparse(group->disk->leave_next, slots * sizeof(uint32_t));
    free(at->places);
    kvk_evict_queue_finish(&at->queue);
    kvk_evict_queue_finish(&at->clean);
    kvk_evict_queue_finish(&at->held);
    kvk_lock(&cache->lock);
    kvk_arena_finish(&at->arena);
    kvk_unlock(&cache->lock);
    free(group->disk);
    group->disk = NULL;
}

/* ---- What the round does ---- */

bool kvk_disk_is_current(const struct kvk_cache *cache, uint32_t id)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    return kvk_block_is_whole(block) && block->run != UINT32_MAX &&
           kvk_root_is_current(cache, kvk_index_root_of(cache->index, id));
}

static const char *state_name(const struct kvk_disk_health *health)
{
    if (health->state == KVK_DISK_OFF) {
        return "off";
    }
    if (health->read_only) {
        return "read-only";
    }
    if (health->full) {
        return "full";
    }
    if (health->state == KVK_DISK_FAILING) {
        return "failing";
    }
    return health->slow ? "slow" : "good";
}

bool kvk_disk_is_usable(struct kvk_cache *cache)
{
    struct kvk_disk_tier *tier = cache->disk_tier;
    struct kvk_disk_health health;
    kvk_disk_health(cache->disk, &health);
    uint8_t now =
        (uint8_t)((unsigned)health.state | (health.read_only ? 4U : 0U) | (health.full ? 8U : 0U));
    if (now != tier->told_state) {
        tier->told_state = now;
        kvk_log(now == KVK_DISK_GOOD ? KVK_LOG_INFO : KVK_LOG_WARNING, "disk_state",
                "state=%s reason=\"%s\"", state_name(&health), health.reason);
    }
    return health.state != KVK_DISK_OFF;
}

bool kvk_disk_round_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_disk_tier *tier = cache->disk_tier;
    if (tier == NULL || !tier->ready || tier->round_running || tier->stopping) {
        return false;
    }
    tier->round_running = true;
    if (!cache->threads && cache->catalogue != NULL && tier->leaving_count > 0) {
        struct kvk_error error;
        kvk_unlock(&cache->lock);
        if (kvk_catalogue_flush(cache->catalogue, &error) != KVK_OK) {
            kvk_log(KVK_LOG_DEBUG, "catalogue_not_flushed", "text=\"%s\"", error.text);
        }
        kvk_lock(&cache->lock);
    }
    kvk_disk_leaving_settle(cache);
    bool usable = kvk_disk_is_usable(cache);
    bool more = usable && kvk_disk_ahead_drops(cache);
    if (usable && kvk_clock_now(cache->clock) >= tier->paused_until_ns) {
        more = kvk_disk_write_drops(cache) || more;
    }
    kvk_disk_punch_drops(cache);
    tier->round_running = false;
    return more;
}

void kvk_disk_test_hook(struct kvk_cache *cache, void (*hook)(void *context), void *context)
{
    if (cache->disk_tier != NULL) {
        cache->disk_tier->hook = hook;
        cache->disk_tier->hook_context = context;
    }
}

/* ---- Figures ---- */

uint64_t kvk_disk_restore_ns(const struct kvk_cache *cache, uint64_t bytes)
{
    struct kvk_disk_health health;
    kvk_disk_health(cache->disk, &health);
    uint64_t rate = health.read_rate != 0 ? health.read_rate : KVK_DISK_RATE_UNKNOWN;
    double ns = (double)bytes / (double)rate * (double)KVK_NS_PER_SECOND;
    return KVK_DISK_LATENCY_NS + (uint64_t)ns;
}

void kvk_disk_report(const struct kvk_cache *cache, struct kvk_disk_report *report)
{
    const struct kvk_disk_tier *tier = cache->disk_tier;
    *report = (struct kvk_disk_report){.state = "", .path = ""};
    if (tier == NULL) {
        return;
    }
    struct kvk_disk_health health;
    kvk_disk_health(cache->disk, &health);
    *report = (struct kvk_disk_report){
        .present = true,
        .state = state_name(&health),
        .path = kvk_disk_path_name(cache->disk),
        .queued = tier->behind.count,
        .leaving = tier->leaving_count,
        .read_rate = health.read_rate,
        .write_rate = health.write_rate,
        .read_errors = health.read_errors,
        .write_errors = health.write_errors,
        .sync_errors = health.sync_errors,
        .short_reads = health.short_reads,
        .full_errors = health.full_errors,
        .read_bytes = health.read_bytes,
        .written_bytes = health.written_bytes,
    };
    memcpy(report->reason, health.reason, sizeof(report->reason));
}
