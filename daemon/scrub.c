/*
 * The scrub: see scrub.h. A pass goes over the block ids in order; what comes in behind it waits
 * for the next pass.
 */
#include "daemon/scrub.h"

#include <sched.h>
#include <signal.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "base/priority.h"
#include "daemon/cache_internal.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/heal.h"

#define SCAN_IDS 4096U                 /* looked at while the lock is held */
#define STEP_BYTES (UINT64_C(1) << 20) /* hashed before others may run */
#define PAUSE_NS_MIN KVK_NS_PER_MS     /* between two copies */
#define DUTY 20                        /* rest so many times as long as a copy took */

struct kvk_scrub {
    uint32_t next_block; /* where the pass goes on */
    uint8_t next_tier;
    bool pass_running;
    uint64_t pass_begin_ns;
    uint64_t last_begin_ns; /* of the last full pass */
    struct kvk_scrub_counts counts;
    uint8_t *buffer; /* [buffer_bytes], for reading from disk; the stepping thread's. Ours */
    uint64_t buffer_bytes;
    bool stepping; /* not entered twice */

    pthread_t thread;
    pthread_cond_t wake;
    bool thread_running;
    _Atomic bool stopping;
};

/* The copy that is looked at, as it was when it was borrowed. */
struct scrub_copy {
    uint32_t block;
    enum kvk_tier tier;
    uint32_t shard_count;
    const uint8_t *address[KVK_SHARD_COUNT_MAX]; /* in memory */
    uint64_t size_bytes[KVK_SHARD_COUNT_MAX];
    uint64_t sums[KVK_SHARD_COUNT_MAX];
    struct kvk_disk_piece pieces[KVK_SHARD_COUNT_MAX]; /* on disk */
    uint64_t bytes;
};

enum verdict {
    VERDICT_NONE, /* could not be looked at now */
    VERDICT_GOOD,
    VERDICT_DAMAGED,
    VERDICT_UNREADABLE,
};

/* ---- Choosing ---- */

/* Has the block a whole copy here that can be read and compared? */
static bool is_worth_it(const struct kvk_cache *cache, const struct kvk_block *block,
                        enum kvk_tier tier)
{
    if (!kvk_block_is_whole(block) || (block->tier_mask & 1U << tier) == 0 ||
        block->transfer_count > 0) {
        return false;
    }
    const struct kvk_group *group = kvk_group_of(cache, block);
    if (tier == KVK_TIER_DISK) {
        return cache->disk_tier != NULL && group->disk != NULL && group->disk->file != NULL;
    }
    if (group->tiers[tier].regions[0].fd < 0) {
        return false; /* a device's own memory: its checksums are taken as it moves */
    }
    const uint64_t *known = kvk_block_checksums(cache, block, tier);
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        if (known[shard] == 0) {
            return false;
        }
    }
    return true;
}

/* Go on to the next copy, over at most SCAN_IDS blocks. False: none among them. */
static bool copy_find(struct kvk_cache *cache, struct kvk_scrub *scrub, struct scrub_copy *copy)
{
    uint32_t end = kvk_index_block_id_end(cache->index);
    for (uint32_t i = 0; i < SCAN_IDS && scrub->next_block < end; i++) {
        const struct kvk_block *block = kvk_index_block(cache->index, scrub->next_block);
        while (scrub->next_tier < KVK_TIER_COUNT) {
            enum kvk_tier tier = (enum kvk_tier)scrub->next_tier;
            scrub->next_tier++;
            if (is_worth_it(cache, block, tier)) {
                copy->block = scrub->next_block;
                copy->tier = tier;
                return true;
            }
        }
        scrub->next_tier = 0;
        scrub->next_block++;
    }
    return false;
}

/* ---- Looking ---- */

static void copy_borrow(struct kvk_cache *cache, struct scrub_copy *copy)
{
    const struct kvk_block *block = kvk_index_block(cache->index, copy->block);
    const struct kvk_group *group = kvk_group_of(cache, block);
    copy->shard_count = group->shard_count;
    const struct kvk_tier_form *form = &group->forms[copy->tier];
    copy->bytes = form->block_bytes;
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        copy->size_bytes[shard] = form->shard_bytes[shard];
        if (copy->tier == KVK_TIER_DISK) {
            copy->pieces[shard] =
                (struct kvk_disk_piece){.file = group->disk->file,
                                        .slot = block->slot[KVK_TIER_DISK],
                                        .offset = group->disk->shard_offset[shard],
                                        .size_bytes = form->shard_bytes[shard],
                                        .checksum = &copy->sums[shard]};
        } else {
            copy->address[shard] = kvk_block_address(cache, block, copy->tier, shard);
        }
    }
    if (copy->tier == KVK_TIER_DISK) {
        kvk_block_borrow(cache, copy->block, copy->tier);
    } else {
        kvk_upkeep_borrow(cache, copy->block, copy->tier);
    }
}

/* False: told to stop in the middle. */
static bool memory_hash(const struct kvk_scrub *scrub, struct scrub_copy *copy)
{
    for (uint32_t shard = 0; shard < copy->shard_count; shard++) {
        struct kvk_checksum_state state;
        uint64_t size = copy->size_bytes[shard];
        kvk_checksum_begin(&state);
        for (uint64_t at = 0; at < size; at += STEP_BYTES) {
            uint64_t left = size - at;
            kvk_checksum_add(&state, copy->address[shard] + at,
                             left < STEP_BYTES ? left : STEP_BYTES);
            if (left > STEP_BYTES) {
                (void)sched_yield();
            }
            if (atomic_load(&scrub->stopping)) {
                return false;
            }
        }
        copy->sums[shard] = kvk_checksum_end(&state);
    }
    return true;
}

static enum verdict disk_read(struct kvk_cache *cache, struct kvk_scrub *scrub,
                              struct scrub_copy *copy)
{
    uint64_t bytes = 0;
    for (uint32_t shard = 0; shard < copy->shard_count; shard++) {
        bytes += kvk_disk_shard_stride(copy->size_bytes[shard]);
    }
    if (bytes > scrub->buffer_bytes) {
        free(scrub->buffer);
        scrub->buffer = aligned_alloc(KVK_DISK_ALIGN, bytes);
        scrub->buffer_bytes = scrub->buffer != NULL ? bytes : 0;
    }
    if (scrub->buffer == NULL) {
        return VERDICT_NONE;
    }
    uint64_t at = 0;
    for (uint32_t shard = 0; shard < copy->shard_count; shard++) {
        copy->pieces[shard].memory = scrub->buffer + at;
        at += kvk_disk_shard_stride(copy->size_bytes[shard]);
    }
    struct kvk_error error;
    enum kvk_status status =
        kvk_disk_read(cache->disk, KVK_DISK_AHEAD, copy->pieces, copy->shard_count, &error);
    if (status == KVK_OK) {
        return VERDICT_GOOD;
    }
    return status == KVK_INTERNAL ? VERDICT_UNREADABLE : VERDICT_NONE;
}

/* ---- Judging ---- */

static bool sums_match(const struct kvk_cache *cache, const struct scrub_copy *copy)
{
    const struct kvk_block *block = kvk_index_block(cache->index, copy->block);
    const uint64_t *known = kvk_block_checksums(cache, block, copy->tier);
    for (uint32_t shard = 0; shard < copy->shard_count; shard++) {
        if (known[shard] != copy->sums[shard]) {
            return false;
        }
    }
    return true;
}

static void copy_give_up(struct kvk_cache *cache, const struct scrub_copy *copy,
                         enum verdict verdict)
{
    static const char *const names[KVK_TIER_COUNT] = {"device", "host", "disk"};
    const struct kvk_block *block = kvk_index_block(cache->index, copy->block);
    bool on_disk = copy->tier == KVK_TIER_DISK;
    if (verdict == VERDICT_DAMAGED) {
        cache->scrub->counts.damaged[copy->tier]++;
        cache->stats.checksum_failures += on_disk ? 0 : 1;
        cache->stats.disk_damaged_blocks += on_disk ? 1 : 0;
    } else {
        cache->scrub->counts.unreadable++;
    }
    kvk_log(KVK_LOG_ERROR, "scrub_block_lost", "block=%u space=%llu tier=%s reason=%s", copy->block,
            (unsigned long long)kvk_group_of(cache, block)->space->id, names[copy->tier],
            verdict == VERDICT_DAMAGED ? "checksum" : "unreadable");
    kvk_block_discredit(cache, copy->block, copy->tier);
}

static void copy_judge(struct kvk_cache *cache, const struct scrub_copy *copy, enum verdict verdict)
{
    struct kvk_scrub_counts *counts = &cache->scrub->counts;
    if (verdict == VERDICT_GOOD && !sums_match(cache, copy)) {
        verdict = VERDICT_DAMAGED;
    }
    if (verdict == VERDICT_GOOD || verdict == VERDICT_DAMAGED) {
        counts->blocks[copy->tier]++;
        counts->bytes[copy->tier] += copy->bytes;
    }
    if (verdict == VERDICT_DAMAGED || verdict == VERDICT_UNREADABLE) {
        copy_give_up(cache, copy, verdict);
    }
}

static void copy_return(struct kvk_cache *cache, const struct scrub_copy *copy)
{
    if (copy->tier == KVK_TIER_DISK) {
        kvk_block_return(cache, copy->block, copy->tier);
    } else {
        kvk_upkeep_return(cache, copy->block, copy->tier);
    }
}

/* ---- Steps ---- */

static void pass_begin(struct kvk_cache *cache, struct kvk_scrub *scrub)
{
    scrub->pass_running = true;
    scrub->pass_begin_ns = kvk_clock_now(cache->clock);
    scrub->next_block = 0;
    scrub->next_tier = 0;
}

static void pass_end(struct kvk_cache *cache, struct kvk_scrub *scrub)
{
    scrub->pass_running = false;
    scrub->last_begin_ns = scrub->pass_begin_ns;
    scrub->counts.last_pass_ns = kvk_clock_now(cache->clock) - scrub->pass_begin_ns;
    scrub->counts.passes++;
    uint64_t damaged = scrub->counts.unreadable;
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        damaged += scrub->counts.damaged[tier];
    }
    kvk_log(KVK_LOG_DEBUG, "scrub_pass", "passes=%llu took_ms=%llu lost_in_all=%llu",
            (unsigned long long)scrub->counts.passes,
            (unsigned long long)(scrub->counts.last_pass_ns / KVK_NS_PER_MS),
            (unsigned long long)damaged);
}

/* One copy, or a stretch of blocks without any. `bytes`: looked at. False: the pass is over. */
static bool step_drops(struct kvk_cache *cache, uint64_t *bytes)
{
    struct kvk_scrub *scrub = cache->scrub;
    struct scrub_copy copy = {.bytes = 0};
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(!scrub->stepping);
    *bytes = 0;
    if (!scrub->pass_running) {
        pass_begin(cache, scrub);
    }
    if (!copy_find(cache, scrub, &copy)) {
        if (scrub->next_block < kvk_index_block_id_end(cache->index)) {
            return true;
        }
        pass_end(cache, scrub);
        return false;
    }
    scrub->stepping = true;
    copy_borrow(cache, &copy);
    kvk_unlock(&cache->lock);
    enum verdict verdict = VERDICT_NONE;
    if (copy.tier == KVK_TIER_DISK) {
        verdict = disk_read(cache, scrub, &copy);
    } else {
        verdict = memory_hash(scrub, &copy) ? VERDICT_GOOD : VERDICT_NONE;
    }
    kvk_lock(&cache->lock);
    copy_judge(cache, &copy, verdict);
    (void)kvk_block_heal_drops(cache, copy.block);
    copy_return(cache, &copy);
    scrub->stepping = false;
    *bytes = copy.bytes;
    return true;
}

bool kvk_scrub_step_unlocked(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    uint64_t bytes = 0;
    bool more = true;
    kvk_lock(&cache->lock);
    while (more && bytes == 0) {
        more = step_drops(cache, &bytes);
    }
    kvk_unlock(&cache->lock);
    return more;
}

void kvk_scrub_counts(const struct kvk_cache *cache, struct kvk_scrub_counts *counts)
{
    const struct kvk_scrub *scrub = cache->scrub;
    *counts = (struct kvk_scrub_counts){.passes = 0};
    if (scrub != NULL) {
        *counts = scrub->counts;
        uint64_t now_ns = kvk_clock_now(cache->clock);
        bool any = counts->passes > 0 && now_ns > scrub->last_begin_ns;
        counts->last_pass_age_ns = any ? now_ns - scrub->last_begin_ns : 0;
    }
}

/* ---- The thread ---- */

/* How long to rest after a copy: for the rate, and so that most of the time nothing is borrowed. */
static uint64_t rest_ns(const struct kvk_cache *cache, uint64_t bytes, uint64_t took_ns)
{
    double rate = (double)cache->config->scrub_bytes_per_second;
    uint64_t due_ns = (uint64_t)((double)bytes * (double)KVK_NS_PER_SECOND / rate);
    uint64_t duty_ns = bytes > 0 ? DUTY * took_ns : 0;
    due_ns = due_ns > took_ns ? due_ns - took_ns : 0;
    due_ns = due_ns > duty_ns ? due_ns : duty_ns;
    return due_ns > PAUSE_NS_MIN ? due_ns : PAUSE_NS_MIN;
}

static void *thread_main(void *argument)
{
    struct kvk_cache *cache = argument;
    struct kvk_scrub *scrub = cache->scrub;
    struct kvk_clock *clock = kvk_clock_monotonic();
    /* Its rate keeps it small. A smaller share of the processors would not do: it takes the cache's
     * lock, and preempted with it in hand it would hold up whoever answers. */
    kvk_priority_works();
    uint64_t next_ns = 0;
    uint64_t begin_ns = kvk_clock_now(clock);

    kvk_lock(&cache->lock);
    while (!atomic_load(&scrub->stopping)) {
        uint64_t now_ns = kvk_clock_now(clock);
        if (now_ns < next_ns) {
            (void)kvk_condition_wait(&scrub->wake, &cache->lock, next_ns);
            continue;
        }
        uint64_t bytes = 0;
        if (step_drops(cache, &bytes)) {
            uint64_t end_ns = kvk_clock_now(clock);
            next_ns = end_ns + rest_ns(cache, bytes, end_ns - now_ns);
        } else {
            next_ns = begin_ns + cache->config->scrub_interval_ms * KVK_NS_PER_MS;
            begin_ns = next_ns > now_ns ? next_ns : now_ns;
            next_ns = begin_ns > now_ns + PAUSE_NS_MIN ? begin_ns : now_ns + PAUSE_NS_MIN;
        }
    }
    kvk_unlock(&cache->lock);
    return NULL;
}

static enum kvk_status thread_start(struct kvk_cache *cache, struct kvk_error *error)
{
    struct kvk_scrub *scrub = cache->scrub;
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&scrub->thread, NULL, thread_main, cache);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no thread for the scrub");
    }
    scrub->thread_running = true;
    (void)pthread_setname_np(scrub->thread, "kvk-scrub");
    return KVK_OK;
}

enum kvk_status kvk_scrub_create(struct kvk_cache *cache, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    cache->scrub = calloc(1, sizeof(*cache->scrub));
    if (cache->scrub == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the scrub");
    }
    kvk_condition_init(&cache->scrub->wake);
    if (!cache->threads || cache->config->scrub_bytes_per_second == 0) {
        return KVK_OK;
    }
    return thread_start(cache, error);
}

void kvk_scrub_destroy(struct kvk_cache *cache)
{
    struct kvk_scrub *scrub = cache->scrub;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (scrub == NULL) {
        return;
    }
    kvk_lock(&cache->lock);
    atomic_store(&scrub->stopping, true);
    pthread_cond_broadcast(&scrub->wake);
    kvk_unlock(&cache->lock);
    if (scrub->thread_running) {
        pthread_join(scrub->thread, NULL);
    }
    KVK_ASSERT(!scrub->stepping);
    free(scrub->buffer);
    pthread_cond_destroy(&scrub->wake);
    free(scrub);
    cache->scrub = NULL;
}
