/*
 * Bringing back what is on disk alone, for a call that wants a prefix.
 *
 * Everything of the prefix is kept meanwhile, so that making room does not take what was there.
 * Blocks are read in batches from the front, each into a slot of memory of its own, and count only
 * when their checksums match. Where the disk has a compact format they are read beside it, and
 * converted into the slot. Whoever wants a block that somebody is reading already waits for it.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/heal.h"
#include "daemon/room_internal.h"

#define TRIES 3 /* of the walk, where things change while bytes are read */
#define WAIT_NS (20 * KVK_NS_PER_MS)
#define ON_DISK_ALONE (1U << KVK_TIER_DISK)

/* ---- Reading one batch ---- */

bool kvk_disk_target(const struct kvk_group *group, enum kvk_tier *tier)
{
    *tier = group->tiers[KVK_TIER_HOST].present ? KVK_TIER_HOST : KVK_TIER_DEVICE;
    return group->tiers[*tier].present && group->tiers[*tier].regions[0].fd >= 0;
}

void kvk_disk_read_begin(struct kvk_cache *cache, uint32_t id)
{
    kvk_block_borrow(cache, id, KVK_TIER_DISK);
    kvk_disk_bit_set(&cache->disk_tier->restoring, id, true);
}

struct reading {
    struct kvk_disk_piece *pieces; /* [piece_count], ours */
    uint64_t *sums;                /* [piece_count] as read, ours */
    uint64_t *memory_sums;         /* [piece_count] of what is then in memory, ours */
    struct widening {
        const struct kvk_group *group; /* NULL: read into its place */
        uint32_t shard;
        uint8_t *target; /* of the slot in memory */
        uint64_t known;  /* checksum as it was written */
    } * widenings;       /* [piece_count], ours; NULL: nothing is converted */
    uint8_t *buffer;     /* what is converted is read here; ours */
    uint32_t piece_count;
};

/* Is what lies on disk in another format than the tier's? */
static bool widens(const struct kvk_group *group, enum kvk_tier tier)
{
    return group->forms[KVK_TIER_DISK].compact && !group->forms[tier].compact;
}

static bool reading_allocate(struct reading *reading, uint64_t buffer_bytes)
{
    KVK_ASSERT(reading->piece_count > 0);
    reading->pieces = calloc(reading->piece_count, sizeof(*reading->pieces));
    reading->sums = calloc(reading->piece_count, sizeof(*reading->sums));
    reading->memory_sums = reading->sums;
    if (buffer_bytes > 0) {
        reading->memory_sums = calloc(reading->piece_count, sizeof(*reading->memory_sums));
        reading->widenings = calloc(reading->piece_count, sizeof(*reading->widenings));
        reading->buffer = aligned_alloc(KVK_DISK_ALIGN, buffer_bytes);
    }
    return reading->pieces != NULL && reading->sums != NULL && reading->memory_sums != NULL &&
           (buffer_bytes == 0 || (reading->widenings != NULL && reading->buffer != NULL));
}

static void reading_free(struct reading *reading)
{
    free(reading->pieces);
    if (reading->memory_sums != reading->sums) {
        free(reading->memory_sums);
    }
    free(reading->sums);
    free(reading->widenings);
    free(reading->buffer);
}

static bool reading_init(struct kvk_cache *cache, enum kvk_tier tier,
                         const struct kvk_disk_read_job *jobs, uint32_t count,
                         struct reading *reading)
{
    uint64_t buffer_bytes = 0;
    *reading = (struct reading){0};
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_group *group =
            kvk_group_of(cache, kvk_index_block(cache->index, jobs[i].block));
        reading->piece_count += group->shard_count;
        for (uint32_t shard = 0; shard < group->shard_count; shard++) {
            buffer_bytes += widens(group, tier) ? group->disk->shard_stride[shard] : 0;
        }
    }
    if (!reading_allocate(reading, buffer_bytes)) {
        return false;
    }
    uint8_t *buffer = reading->buffer;
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_block *block = kvk_index_block(cache->index, jobs[i].block);
        const struct kvk_group *group = kvk_group_of(cache, block);
        const struct kvk_tier_form *form = &group->forms[KVK_TIER_DISK];
        for (uint32_t shard = 0; shard < group->shard_count; shard++, next++) {
            uint8_t *target = kvk_slot_address(group, tier, jobs[i].slot, shard);
            reading->pieces[next] = (struct kvk_disk_piece){
                .file = group->disk->file,
                .slot = block->slot[KVK_TIER_DISK],
                .offset = group->disk->shard_offset[shard],
                .memory = widens(group, tier) ? buffer : target,
                .size_bytes = form->shard_bytes[shard],
                .checksum = &reading->sums[next],
                .status = KVK_UNAVAILABLE,
            };
            if (widens(group, tier)) {
                KVK_ASSERT(reading->widenings != NULL);
                reading->widenings[next] = (struct widening){
                    .group = group,
                    .shard = shard,
                    .target = target,
                    .known = kvk_block_checksums(cache, block, KVK_TIER_DISK)[shard]};
                buffer += group->disk->shard_stride[shard];
            } else if (reading->widenings != NULL) {
                reading->pieces[next].checksum = &reading->memory_sums[next];
            }
        }
    }
    return true;
}

/* What came as it was written becomes what memory has. The groups stay: their blocks are held. */
static void reading_widen_unlocked(struct reading *reading)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    for (uint32_t i = 0; reading->widenings != NULL && i < reading->piece_count; i++) {
        const struct widening *widening = &reading->widenings[i];
        if (widening->group == NULL) {
            reading->sums[i] = reading->memory_sums[i];
        } else if (reading->pieces[i].status == KVK_OK && reading->sums[i] == widening->known) {
            kvk_tier_form_widen(&widening->group->forms[KVK_TIER_DISK], &widening->group->geometry,
                                widening->shard, reading->pieces[i].memory, widening->target,
                                &reading->memory_sums[i]);
            (void)sched_yield(); /* look-ups go first */
        }
    }
}

enum job_end { JOB_GOOD, JOB_FAILED, JOB_UNREADABLE, JOB_DAMAGED };

/* What came of one block's bytes. `pieces` NULL: nothing was read. */
static enum job_end job_verdict(const struct kvk_cache *cache, uint32_t id,
                                const struct kvk_disk_piece *pieces, const uint64_t *sums)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    const struct kvk_group *group = kvk_group_of(cache, block);
    const uint64_t *known = kvk_block_checksums(cache, block, KVK_TIER_DISK);
    for (uint32_t shard = 0; pieces != NULL && shard < group->shard_count; shard++) {
        if (pieces[shard].status == KVK_INTERNAL) {
            return JOB_UNREADABLE;
        }
        if (pieces[shard].status != KVK_OK) {
            return JOB_FAILED;
        }
        if (sums[shard] != known[shard]) {
            return JOB_DAMAGED;
        }
    }
    return pieces != NULL ? JOB_GOOD : JOB_FAILED;
}

/* The copy in memory counts from here on, unless somebody else was faster, or nobody may have the
 * block any more. */
static void job_land(struct kvk_cache *cache, enum kvk_tier tier, struct kvk_disk_read_job *job,
                     const uint64_t *memory_sums)
{
    KVK_ASSERT(memory_sums != NULL);
    const struct kvk_block *block = kvk_index_block(cache->index, job->block);
    struct kvk_group *group = kvk_group_of(cache, block);
    job->landed = kvk_disk_is_current(cache, job->block);
    if (!job->landed || block->slot[tier] != KVK_SLOT_NONE || kvk_disk_is_memory(block)) {
        kvk_slot_give(cache, group, tier, job->slot);
        return;
    }
    /* Before it counts: what is kept beside it is written with it. */
    memcpy(group->tiers[tier].checksums + (size_t)job->slot * group->shard_count, memory_sums,
           group->shard_count * sizeof(*memory_sums));
    kvk_block_attach(cache, job->block, tier, job->slot);
    cache->stats.disk_restored_blocks++;
    cache->stats.disk_restored_bytes += group->forms[KVK_TIER_DISK].block_bytes;
    cache->stats.disk_widened_blocks += widens(group, tier) ? 1 : 0;
}

static void job_end(struct kvk_cache *cache, enum kvk_tier tier, struct kvk_disk_read_job *job,
                    const struct kvk_disk_piece *pieces, const uint64_t *sums,
                    const uint64_t *memory_sums)
{
    uint32_t id = job->block;
    struct kvk_group *group = kvk_group_of(cache, kvk_index_block(cache->index, id));
    enum job_end verdict = job_verdict(cache, id, pieces, sums);
    if (verdict == JOB_GOOD) {
        job_land(cache, tier, job, memory_sums);
    } else {
        kvk_slot_give(cache, group, tier, job->slot);
        cache->stats.disk_read_failures += verdict == JOB_DAMAGED ? 0 : 1;
    }
    if (verdict == JOB_DAMAGED || verdict == JOB_UNREADABLE) {
        job->damaged = true;
        cache->stats.disk_damaged_blocks += verdict == JOB_DAMAGED ? 1 : 0;
        kvk_log(KVK_LOG_ERROR, "disk_block_lost", "block=%u space=%llu reason=%s", id,
                (unsigned long long)group->space->id,
                verdict == JOB_DAMAGED ? "checksum" : "unreadable");
        kvk_block_discredit(cache, id, KVK_TIER_DISK);
    }
    kvk_disk_bit_set(&cache->disk_tier->restoring, id, false);
    kvk_block_return(cache, id, KVK_TIER_DISK);
}

enum kvk_status kvk_disk_read_jobs_drops(struct kvk_cache *cache, enum kvk_tier tier, uint8_t class,
                                         struct kvk_disk_read_job *jobs, uint32_t count)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct reading reading;
    struct kvk_error error = {.status = KVK_OK};
    enum kvk_status status = KVK_EXHAUSTED;
    bool ready = reading_init(cache, tier, jobs, count, &reading);
    if (ready) {
        kvk_unlock(&cache->lock);
        kvk_disk_hook_unlocked(cache->disk_tier);
        status = kvk_disk_read(cache->disk, (enum kvk_disk_class) class, reading.pieces,
                               reading.piece_count, &error);
        reading_widen_unlocked(&reading);
        kvk_lock(&cache->lock);
    }
    bool all = true;
    uint32_t next = 0;
    for (uint32_t i = 0; i < count; i++) {
        /* Ending a job may take its block: how many pieces it has is asked before. */
        uint32_t shards =
            kvk_group_of(cache, kvk_index_block(cache->index, jobs[i].block))->shard_count;
        job_end(cache, tier, &jobs[i], ready ? reading.pieces + next : NULL,
                ready ? reading.sums + next : NULL, ready ? reading.memory_sums + next : NULL);
        all = all && jobs[i].landed;
        next += shards;
    }
    pthread_cond_broadcast(&cache->changed);
    reading_free(&reading);
    if (status != KVK_OK) {
        kvk_log(KVK_LOG_DEBUG, "disk_read_failed", "text=\"%s\"", error.text);
    }
    return all ? KVK_OK : KVK_DATA_LOSS;
}

/* ---- What a prefix needs from disk ---- */

void kvk_disk_estimate(const struct kvk_cache *cache, const struct kvk_space *space,
                       const struct kvk_prefix *prefix, struct kvk_disk_estimate *estimate)
{
    uint64_t bytes = 0;
    uint64_t first = prefix->blocks;
    uint64_t tokens = 0;
    *estimate = (struct kvk_disk_estimate){0};
    for (uint32_t g = 0; g < space->group_count && cache->disk_tier != NULL; g++) {
        const uint8_t *tiers = cache->path_tiers[g];
        const uint8_t *at =
            prefix->blocks == 0 ? NULL : memchr(tiers, ON_DISK_ALONE, prefix->blocks);
        uint64_t count = 0;
        for (uint64_t i = at == NULL ? prefix->blocks : (uint64_t)(at - tiers); i < prefix->blocks;
             i++) {
            if (tiers[i] == ON_DISK_ALONE && kvk_group_sees(space->groups[g], prefix->blocks, i)) {
                first = i < first ? i : first;
                count++;
            }
        }
        bytes += count * space->groups[g]->forms[KVK_TIER_DISK].block_bytes;
        tokens = count > tokens ? count : tokens;
    }
    if (tokens == 0) {
        return;
    }
    estimate->disk_tokens = tokens * space->block_tokens;
    estimate->restore_ns = kvk_disk_restore_ns(cache, bytes);
    estimate->recompute_ns = kvk_space_recompute_ns(space, first * space->block_tokens,
                                                    prefix->blocks * space->block_tokens);
}

/* The prefix as far as it is in memory. */
static void narrow(struct kvk_cache *cache, const struct kvk_space *space,
                   struct kvk_prefix *prefix)
{
    for (uint32_t g = 0; g < space->group_count; g++) {
        for (uint64_t i = 0; i < prefix->blocks; i++) {
            cache->path_tiers[g][i] &= KVK_MEMORY_TIER_MASK;
        }
    }
    kvk_prefix_shorten(cache, space, prefix);
}

/* ---- Keeping ---- */

static bool kept_reserve(struct kvk_disk_kept *kept, uint64_t more)
{
    if (more > kept->capacity - kept->count) {
        uint64_t capacity = kept->count + more;
        uint32_t *grown = capacity > UINT32_MAX / 2
                              ? NULL
                              : realloc(kept->blocks, capacity * sizeof(*kept->blocks));
        if (grown == NULL) {
            return false;
        }
        kept->blocks = grown;
        kept->capacity = (uint32_t)capacity;
    }
    return true;
}

/* Everything of the prefix that a query sees, whether in memory or not. */
static bool keep_all(struct kvk_cache *cache, const struct kvk_space *space,
                     const struct kvk_prefix *prefix, struct kvk_disk_kept *kept)
{
    if (!kept_reserve(kept, prefix->blocks * space->group_count)) {
        return false;
    }
    for (uint64_t i = 0; i < prefix->blocks; i++) { /* in the order in which it is brought back */
        for (uint32_t g = 0; g < space->group_count; g++) {
            KVK_ASSERT(cache->path[g][i] != KVK_BLOCK_NONE ||
                       !kvk_group_sees(space->groups[g], prefix->blocks, i));
            if (kvk_group_sees(space->groups[g], prefix->blocks, i)) {
                kvk_block_keep(cache, cache->path[g][i]);
                kept->blocks[kept->count++] = cache->path[g][i];
            }
        }
    }
    return true;
}

void kvk_disk_kept_finish(struct kvk_cache *cache, struct kvk_disk_kept *kept)
{
    for (uint32_t i = kept->count; i > 0; i--) {
        kvk_block_let_go(cache, kept->blocks[i - 1]);
    }
    free(kept->blocks);
    *kept = (struct kvk_disk_kept){0};
}

/* ---- Bringing back ---- */

struct restoring {
    struct kvk_cache *cache;
    struct kvk_space *space;
    struct kvk_caller caller; /* quiet: for want of room here nobody is refused */
    struct kvk_disk_kept *kept;
    uint32_t next; /* of kept */
    bool others;   /* somebody else is reading some of it */
    struct kvk_error *error;
};

/* A slot for one block. KVK_EXHAUSTED: there is no room. */
static enum kvk_status slot_get_drops(struct restoring *job, struct kvk_group *group,
                                      enum kvk_tier tier, uint32_t *slot)
{
    for (;;) {
        enum kvk_status status =
            kvk_room_slot(job->cache, group, tier, &job->caller, slot, job->error);
        if (status != KVK_WOULD_BLOCK) {
            return status;
        }
        struct kvk_room_want want = {.tier = tier};
        want.counts[group->index] = 1;
        status = kvk_room_make_drops(job->cache, job->space, &want, &job->caller, job->error);
        if (status != KVK_OK) {
            return status;
        }
    }
}

static bool is_missing(const struct kvk_cache *cache, uint32_t id)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    return block->tier_mask == ON_DISK_ALONE && kvk_disk_is_current(cache, id);
}

/* Slots for the next blocks that are missing, all in one tier, and the right to read them. */
static enum kvk_status batch_begin_drops(struct restoring *job, enum kvk_tier *tier,
                                         struct kvk_disk_read_job *jobs, uint32_t *count)
{
    struct kvk_cache *cache = job->cache;
    enum kvk_status status = KVK_OK;
    uint64_t bytes = 0;
    *count = 0;
    while (job->next < job->kept->count && *count < KVK_DISK_BATCH_BLOCKS && status == KVK_OK &&
           bytes < KVK_DISK_BATCH_BYTES) {
        uint32_t id = job->kept->blocks[job->next];
        enum kvk_tier target;
        struct kvk_group *group = kvk_group_of(cache, kvk_index_block(cache->index, id));
        if (!is_missing(cache, id)) {
            job->next++;
            continue;
        }
        if (kvk_block_heal_drops(cache, id)) { /* somebody holds what is damaged in memory */
            continue;
        }
        if (kvk_disk_bit(&cache->disk_tier->restoring, id) && cache->threads) {
            job->others = true;
            job->next++;
            continue;
        }
        if (!kvk_disk_target(group, &target)) {
            return *count > 0 ? KVK_OK : KVK_EXHAUSTED;
        }
        if (*count > 0 && target != *tier) {
            break;
        }
        *tier = target;
        uint32_t slot = KVK_SLOT_NONE;
        status = slot_get_drops(job, group, target, &slot);
        if (status == KVK_OK && !is_missing(cache, id)) { /* meanwhile */
            kvk_slot_give(cache, group, target, slot);
        } else if (status == KVK_OK) {
            kvk_disk_read_begin(cache, id);
            jobs[(*count)++] = (struct kvk_disk_read_job){.block = id, .slot = slot};
            bytes += group->block_bytes;
            job->next++;
        }
    }
    return status == KVK_EXHAUSTED && *count > 0 ? KVK_OK : status;
}

/* Until what others are reading has come, or a while. */
static void others_wait_drops(struct restoring *job)
{
    struct kvk_cache *cache = job->cache;
    for (int i = 0; i < 100; i++) {
        bool reading = false;
        for (uint32_t b = 0; b < job->kept->count && !reading; b++) {
            reading = kvk_disk_bit(&cache->disk_tier->restoring, job->kept->blocks[b]);
        }
        uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
        if (!reading || now_ns >= job->caller.deadline_ns) {
            return;
        }
        uint64_t until_ns = now_ns + WAIT_NS;
        (void)kvk_condition_wait(&cache->changed, &cache->lock,
                                 until_ns < job->caller.deadline_ns ? until_ns
                                                                    : job->caller.deadline_ns);
    }
}

static enum kvk_status patience_drops(struct restoring *job)
{
    struct kvk_cache *cache = job->cache;
    if (kvk_clock_now(kvk_clock_monotonic()) >= job->caller.deadline_ns) {
        return kvk_fail(job->error, KVK_DEADLINE, KVK_CAUSE_NONE, "",
                        "the call's time was over while blocks were read from disk");
    }
    if (job->caller.cancelled == NULL) {
        return KVK_OK;
    }
    kvk_unlock(&cache->lock);
    bool cancelled = job->caller.cancelled(job->caller.cancelled_context);
    kvk_lock(&cache->lock);
    return cancelled
               ? kvk_fail(job->error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the call was cancelled")
               : KVK_OK;
}

/* From the front as far as it goes. KVK_OK also where it ends early: what there is then counts. */
static enum kvk_status restore_drops(struct restoring *job)
{
    struct kvk_disk_read_job *jobs = calloc(KVK_DISK_BATCH_BLOCKS, sizeof(*jobs));
    if (jobs == NULL) {
        return KVK_OK;
    }
    enum kvk_status status = KVK_OK;
    while (job->next < job->kept->count && status == KVK_OK) {
        uint32_t count;
        enum kvk_tier tier = KVK_TIER_HOST;
        status = patience_drops(job);
        if (status != KVK_OK) {
            break;
        }
        status = batch_begin_drops(job, &tier, jobs, &count);
        if (count > 0) {
            enum kvk_status read =
                kvk_disk_read_jobs_drops(job->cache, tier, KVK_DISK_RESTORE, jobs, count);
            status = status == KVK_OK ? read : status;
        }
    }
    free(jobs);
    if (status == KVK_OK && job->others) {
        others_wait_drops(job);
    }
    return status == KVK_DEADLINE || status == KVK_CANCELLED ? status : KVK_OK;
}

enum kvk_status kvk_disk_prefix_find_drops(struct kvk_cache *cache, struct kvk_space *space,
                                           const uint32_t *roots, const struct kvk_prompt *prompt,
                                           uint64_t token_limit, const struct kvk_caller *caller,
                                           struct kvk_prefix *prefix,
                                           struct kvk_disk_estimate *estimate,
                                           struct kvk_disk_kept *kept, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct restoring job = {
        .cache = cache, .space = space, .caller = *caller, .kept = kept, .error = error};
    enum kvk_status status = KVK_OK;
    *estimate = (struct kvk_disk_estimate){0};
    job.caller.call = NULL;
    kvk_prefix_find(cache, space, roots, prompt, token_limit, prefix);
    if (cache->disk_tier == NULL) {
        return KVK_OK;
    }
    kvk_disk_estimate(cache, space, prefix, estimate);
    for (int tries = 0; tries < TRIES && status == KVK_OK; tries++) {
        struct kvk_disk_estimate now;
        kvk_disk_estimate(cache, space, prefix, &now);
        if (now.disk_tokens == 0 || !kvk_disk_is_usable(cache)) {
            break;
        }
        if (kvk_disk_is_left(&now)) {
            cache->stats.disk_recomputes++;
            estimate->recompute_tokens = now.disk_tokens;
            break;
        }
        if (!caller->may_block) {
            return KVK_WOULD_BLOCK;
        }
        cache->stats.disk_restores += tries == 0 ? 1 : 0;
        job.next = kept->count;
        job.others = false;
        if (!keep_all(cache, space, prefix, kept)) {
            break;
        }
        space->reference_count++;
        status = restore_drops(&job);
        space->reference_count--;
        kvk_prefix_find(cache, space, roots, prompt, token_limit, prefix);
    }
    struct kvk_disk_estimate left;
    kvk_disk_estimate(cache, space, prefix, &left);
    if (left.disk_tokens > 0) {
        narrow(cache, space, prefix);
    }
    uint64_t restored =
        estimate->disk_tokens > left.disk_tokens ? estimate->disk_tokens - left.disk_tokens : 0;
    uint64_t found = prefix->blocks * space->block_tokens;
    estimate->restored_tokens = restored < found ? restored : found;
    if (estimate->restored_tokens > 0) {
        kvk_disk_ahead(cache, space, prefix);
    }
    return status;
}

void kvk_disk_prefix_find_memory(struct kvk_cache *cache, struct kvk_space *space,
                                 const uint32_t *roots, const struct kvk_prompt *prompt,
                                 uint64_t token_limit, struct kvk_prefix *prefix)
{
    kvk_prefix_find(cache, space, roots, prompt, token_limit, prefix);
    struct kvk_disk_estimate estimate;
    kvk_disk_estimate(cache, space, prefix, &estimate);
    if (estimate.disk_tokens > 0) {
        narrow(cache, space, prefix);
    }
}
