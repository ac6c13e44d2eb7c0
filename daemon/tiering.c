/*
 * Bytes between tiers. Nothing is copied with the lock held: a move borrows its block and begins a
 * transfer on it, so that meanwhile it can be held, released and even invalidated, but its source
 * neither leaves nor is written over.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "daemon/room_internal.h"

#define RUN_AHEAD_COUNT 32 /* blocks of one round */
#define CHECKSUM_BATCH 64  /* blocks whose checksums are taken in one go without the lock */
#define UNFIT_BLOCKS_MAX 4096
#define RATE_UNKNOWN UINT64_C(4000000000) /* bytes/s, before anything was copied */

/* ---- One job of moves ---- */

/* A move under way: what must be known at its end, whatever happened meanwhile. */
struct moving {
    uint32_t block;
    uint32_t slot;
    uint32_t first_sum; /* of its shards' checksums */
    bool transfers;     /* has bytes: RESERVED blocks have none yet */
    bool damaged;       /* its source did not match its checksum */
    bool unfit;         /* it has no compact form: a value is not finite */
};

/* A shard that lies in another format in the host tier than on the device. */
struct converting {
    const struct kvk_group
        *group;      /* its space stays: the block is borrowed. NULL: copied as it is */
    uint32_t moving; /* whose */
    uint32_t shard;
    uint8_t *host;    /* address there */
    uint8_t *staging; /* in the own format */
};

struct job {
    enum kvk_tier source, target;
    struct moving *moving; /* [count] */
    uint32_t count;
    struct kvk_copy *copies; /* [copy_count] */
    uint32_t copy_count;
    uint64_t *sums;                 /* one per copy: of the bytes at their source, */
    uint64_t *target_sums;          /* and of what came of them. The same where none is converted */
    struct converting *conversions; /* one per copy; NULL: none is converted */
    uint8_t *staging;
};

static struct kvk_device *copy_device(const struct kvk_cache *cache)
{
    struct kvk_device *device = cache->tiers[KVK_TIER_DEVICE].device;
    return device != NULL ? device : cache->tiers[KVK_TIER_HOST].device;
}

void kvk_tier_move_begin(struct kvk_cache *cache, enum kvk_tier tier, const struct kvk_move *move)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, move->block);
    enum kvk_tier source = tier == KVK_TIER_DEVICE ? KVK_TIER_HOST : KVK_TIER_DEVICE;
    KVK_ASSERT(block->slot[source] != KVK_SLOT_NONE);
    if (block->state != KVK_BLOCK_RESERVED) {
        kvk_block_step(block, KVK_BLOCK_TRANSFER_BEGIN);
    }
    cache->moves_under_way++;
    kvk_block_borrow(cache, move->block, source);
}

static uint32_t shards_of_moves(const struct kvk_cache *cache, const struct kvk_move *moves,
                                uint32_t count, uint64_t *staging_bytes)
{
    uint32_t shards = 0;
    *staging_bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_group *group =
            kvk_group_of(cache, kvk_index_block(cache->index, moves[i].block));
        shards += group->shard_count;
        *staging_bytes += kvk_group_is_compact_below(group) ? group->block_bytes : 0;
    }
    return shards;
}

static void job_finish(struct job *job)
{
    free(job->moving);
    free(job->copies);
    if (job->target_sums != job->sums) {
        free(job->target_sums);
    }
    free(job->sums);
    free(job->conversions);
    free(job->staging);
}

static bool job_allocate(struct job *job, uint32_t count, uint32_t shards, uint64_t staging_bytes)
{
    job->moving = calloc(count, sizeof(*job->moving));
    job->copies = calloc(shards, sizeof(*job->copies));
    job->sums = calloc(shards, sizeof(*job->sums));
    job->target_sums = job->sums;
    if (staging_bytes > 0) {
        job->target_sums = calloc(shards, sizeof(*job->target_sums));
        job->conversions = calloc(shards, sizeof(*job->conversions));
        job->staging = malloc(staging_bytes);
    }
    return job->moving != NULL && job->copies != NULL && job->sums != NULL &&
           job->target_sums != NULL &&
           (staging_bytes == 0 || (job->conversions != NULL && job->staging != NULL));
}

static void job_add(const struct kvk_cache *cache, struct job *job, const struct kvk_move *move,
                    uint8_t **staging)
{
    const struct kvk_block *block = kvk_index_block(cache->index, move->block);
    const struct kvk_group *group = kvk_group_of(cache, block);
    struct moving *moving = &job->moving[job->count];
    bool converts = kvk_group_is_compact_below(group);
    KVK_ASSERT(!converts || kvk_block_is_whole(block)); /* others stay on the device */
    *moving = (struct moving){.block = move->block,
                              .slot = move->slot,
                              .first_sum = job->copy_count,
                              .transfers = block->state != KVK_BLOCK_RESERVED};
    for (uint32_t shard = 0; moving->transfers && shard < group->shard_count; shard++) {
        uint8_t *source = kvk_block_address(cache, block, job->source, shard);
        uint8_t *target = kvk_slot_address(group, job->target, move->slot, shard);
        uint64_t *sum = &job->sums[job->copy_count];
        if (converts) {
            bool down = job->target == KVK_TIER_HOST;
            KVK_ASSERT(job->conversions != NULL);
            job->conversions[job->copy_count] = (struct converting){.group = group,
                                                                    .moving = job->count,
                                                                    .shard = shard,
                                                                    .host = down ? target : source,
                                                                    .staging = *staging};
            source = down ? source : *staging;
            target = down ? *staging : target;
            sum = down ? sum : &job->target_sums[job->copy_count];
            *staging += group->shard_bytes[shard];
        }
        job->copies[job->copy_count++] = (struct kvk_copy){.target = target,
                                                           .source = source,
                                                           .size_bytes = group->shard_bytes[shard],
                                                           .checksum = sum};
    }
    job->count++;
}

static bool job_init(struct kvk_cache *cache, enum kvk_tier tier, const struct kvk_move *moves,
                     uint32_t count, struct job *job)
{
    uint64_t staging_bytes;
    uint32_t shards = shards_of_moves(cache, moves, count, &staging_bytes);
    *job = (struct job){
        .source = tier == KVK_TIER_DEVICE ? KVK_TIER_HOST : KVK_TIER_DEVICE,
        .target = tier,
    };
    if (!job_allocate(job, count, shards, staging_bytes)) {
        job_finish(job);
        return false;
    }
    uint8_t *staging = job->staging;
    for (uint32_t i = 0; i < count; i++) {
        job_add(cache, job, &moves[i], &staging);
    }
    return true;
}

/* What is to come up, in the own format. What is damaged gives nothing of use, and is found out
 * with the others. */
static void job_widen_unlocked(const struct job *job)
{
    for (uint32_t i = 0; job->conversions != NULL && i < job->copy_count; i++) {
        const struct converting *from = &job->conversions[i];
        uint64_t sum;
        if (from->group == NULL || job->target == KVK_TIER_HOST) {
            continue;
        }
        const struct kvk_tier_form *form = &from->group->forms[KVK_TIER_HOST];
        job->sums[i] = kvk_checksum(from->host, form->shard_bytes[from->shard]);
        kvk_tier_form_widen(form, &from->group->geometry, from->shard, from->host, from->staging,
                            &sum);
        (void)sched_yield(); /* look-ups go first */
    }
}

/* What has come down, in the tier's format. */
static void job_narrow_unlocked(const struct job *job)
{
    for (uint32_t i = 0; job->conversions != NULL && i < job->copy_count; i++) {
        const struct converting *to = &job->conversions[i];
        struct kvk_error error;
        if (to->group == NULL) {
            job->target_sums[i] = job->sums[i];
            continue;
        }
        if (job->target != KVK_TIER_HOST || job->moving[to->moving].unfit) {
            continue;
        }
        job->moving[to->moving].unfit =
            kvk_tier_form_narrow(&to->group->geometry, &to->group->forms[KVK_TIER_HOST], to->shard,
                                 to->staging, to->host, &job->target_sums[i], &error) != KVK_OK;
        (void)sched_yield();
    }
}

/* Do the bytes that were copied match what was sealed? Where no checksum was taken yet, these are
 * it. Of unsealed blocks none is known. */
static bool sums_match(struct kvk_cache *cache, const struct job *job, const struct moving *moving)
{
    const struct kvk_block *block = kvk_index_block(cache->index, moving->block);
    const struct kvk_group *group = kvk_group_of(cache, block);
    uint64_t *known = kvk_block_checksums(cache, block, job->source);
    const uint64_t *sums = job->sums + moving->first_sum;
    if (!moving->transfers || !kvk_block_is_whole(block)) {
        return true;
    }
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        if (known[shard] == 0) {
            known[shard] = sums[shard];
        } else if (known[shard] != sums[shard]) {
            return false;
        }
    }
    return true;
}

static uint32_t job_verify(struct kvk_cache *cache, struct job *job)
{
    uint32_t damaged = 0;
    for (uint32_t i = 0; i < job->count; i++) {
        job->moving[i].damaged = !sums_match(cache, job, &job->moving[i]);
        damaged += job->moving[i].damaged ? 1 : 0;
    }
    cache->stats.checksum_failures += damaged;
    return damaged;
}

/* The new slot becomes the block's. */
static void move_land(struct kvk_cache *cache, const struct job *job, const struct moving *moving)
{
    struct kvk_block *block = kvk_index_block(cache->index, moving->block);
    struct kvk_group *group = kvk_group_of(cache, block);
    if (!kvk_block_is_whole(block)) {
        kvk_block_relocate(cache, moving->block, job->target, moving->slot);
        return;
    }
    if (block->slot[job->target] != KVK_SLOT_NONE) {
        kvk_slot_give(cache, group, job->target, moving->slot); /* another call was faster */
        return;
    }
    /* Before it counts: what is kept beside it is written with it. */
    memcpy(group->tiers[job->target].checksums + (size_t)moving->slot * group->shard_count,
           job->target_sums + moving->first_sum, group->shard_count * sizeof(*job->target_sums));
    kvk_block_attach(cache, moving->block, job->target, moving->slot);
    bool converted = kvk_group_is_compact_below(group);
    cache->stats.promoted_blocks += job->target == KVK_TIER_DEVICE ? 1 : 0;
    cache->stats.host_narrowed_blocks += converted && job->target == KVK_TIER_HOST ? 1 : 0;
    cache->stats.host_widened_blocks += converted && job->target == KVK_TIER_DEVICE ? 1 : 0;
}

/* May the copy in one tier go, since there is one in the other? A compact one stays, so that the
 * next time down nothing is rounded again; and nobody who holds the block (but this move) is left
 * with that alone. */
static bool may_drop(const struct kvk_group *group, const struct kvk_block *block,
                     enum kvk_tier tier, enum kvk_tier other)
{
    if (kvk_group_is_compact_below(group) && (tier == KVK_TIER_HOST || block->hold_count > 1)) {
        return false;
    }
    return kvk_block_is_whole(block) &&
           (block->tier_mask & KVK_MEMORY_TIER_MASK) == ((1U << tier) | (1U << other)) &&
           block->pin_count[tier] == 0 && block->transfer_count == 0;
}

/* Room is wanted, and the block can go nowhere: it is forgotten, and before it what hangs below it,
 * unless somebody needs some of it. */
static void unfit_forget(struct kvk_cache *cache, uint32_t id)
{
    for (uint32_t i = 0; i < UNFIT_BLOCKS_MAX; i++) {
        uint32_t leaf = id;
        const struct kvk_block *block = kvk_index_block(cache->index, leaf);
        bool windowed = kvk_group_of(cache, block)->windowed;
        while (!windowed && block->memory_children > 0) {
            leaf = kvk_index_first_child(cache->index, KVK_ROOT_NONE, leaf);
            block = kvk_index_block(cache->index, leaf);
            while ((block->tier_mask & KVK_MEMORY_TIER_MASK) == 0) {
                leaf = kvk_index_next_child(cache->index, leaf);
                block = kvk_index_block(cache->index, leaf);
            }
        }
        if (block->state != KVK_BLOCK_EVICTABLE || block->transfer_count > 0 ||
            block->pin_count[KVK_TIER_DEVICE] > 0 || block->pin_count[KVK_TIER_HOST] > 0 ||
            block->pin_count[KVK_TIER_DISK] > 0) {
            return;
        }
        kvk_room_forget_tree(cache, leaf);
        if (leaf == id) {
            return;
        }
    }
}

/* End one move. The borrowed hold goes last: with it the block may go. */
static void move_end(struct kvk_cache *cache, const struct job *job, const struct moving *moving,
                     bool landed, bool drop_source)
{
    uint32_t id = moving->block;
    struct kvk_block *block = kvk_index_block(cache->index, id);
    bool unfit = landed && moving->unfit;
    landed = landed && !unfit;
    cache->stats.host_unfit_blocks += unfit ? 1 : 0;
    if (landed) {
        const struct kvk_group *group = kvk_group_of(cache, block);
        kvk_tenant_state_of(cache, group->space->tenant)->usage.moved_bytes +=
            moving->transfers ? group->block_bytes : 0;
        move_land(cache, job, moving);
    } else {
        kvk_slot_give(cache, kvk_group_of(cache, block), job->target, moving->slot);
    }
    if (moving->transfers) {
        kvk_block_step(block, landed ? KVK_BLOCK_TRANSFER_DONE : KVK_BLOCK_TRANSFER_FAIL);
    }
    bool whole = kvk_block_is_whole(block);
    kvk_block_unpin(cache, id, landed && !whole ? job->target : job->source);
    if (moving->damaged) {
        kvk_block_discredit(cache, id, job->source);
    } else if (drop_source &&
               may_drop(kvk_group_of(cache, block), block, job->source, job->target)) {
        kvk_block_drop_copy(cache, id, job->source, job->target == KVK_TIER_HOST);
    }
    unfit = unfit && drop_source && block->hold_count == 1 && block->run != UINT32_MAX;
    KVK_ASSERT(cache->moves_under_way > 0);
    KVK_ASSERT(cache->passing_holds > 0);
    cache->moves_under_way--;
    cache->passing_holds--;
    kvk_block_release(cache, id, false);
    if (unfit && block->state == KVK_BLOCK_EVICTABLE) {
        unfit_forget(cache, id);
    }
}

static enum kvk_status fail_damaged(uint32_t damaged, struct kvk_error *error)
{
    kvk_log(KVK_LOG_ERROR, "checksum_mismatch", "blocks=%u", damaged);
    return kvk_fail_limit(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "", damaged, 0,
                          "%u blocks are not the bytes that were sealed", damaged);
}

enum kvk_status kvk_tier_moves_run_drops(struct kvk_cache *cache, enum kvk_tier tier,
                                         const struct kvk_move *moves, uint32_t move_count,
                                         bool drop_source, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct job job;
    if (!job_init(cache, tier, moves, move_count, &job)) {
        /* One after the other, without memory: nothing has begun to move. */
        struct moving moving = {0};
        job = (struct job){.source = tier == KVK_TIER_DEVICE ? KVK_TIER_HOST : KVK_TIER_DEVICE,
                           .target = tier};
        for (uint32_t i = 0; i < move_count; i++) {
            moving.block = moves[i].block;
            moving.slot = moves[i].slot;
            moving.transfers =
                kvk_index_block(cache->index, moves[i].block)->state != KVK_BLOCK_RESERVED;
            move_end(cache, &job, &moving, false, false);
        }
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a copy");
    }
    kvk_unlock(&cache->lock);
    job_widen_unlocked(&job);
    enum kvk_status status =
        kvk_mover_copy(cache->mover, copy_device(cache), job.copies, job.copy_count, error);
    if (status == KVK_OK) {
        job_narrow_unlocked(&job);
    }
    kvk_lock(&cache->lock);
    if (status != KVK_OK) {
        cache->stats.copy_failures++;
    } else {
        uint32_t damaged = job_verify(cache, &job);
        status = damaged == 0 ? KVK_OK : fail_damaged(damaged, error);
    }
    for (uint32_t i = 0; i < job.count; i++) {
        move_end(cache, &job, &job.moving[i], status == KVK_OK, status == KVK_OK && drop_source);
    }
    pthread_cond_broadcast(&cache->changed);
    job_finish(&job);
    return status;
}

enum kvk_status kvk_tier_copy_drops(struct kvk_cache *cache, enum kvk_tier tier,
                                    const struct kvk_move *moves, uint32_t move_count,
                                    struct kvk_error *error)
{
    if (move_count == 0) {
        return KVK_OK;
    }
    for (uint32_t i = 0; i < move_count; i++) {
        kvk_tier_move_begin(cache, tier, &moves[i]);
    }
    return kvk_tier_moves_run_drops(cache, tier, moves, move_count, tier == KVK_TIER_DEVICE, error);
}

/* ---- Copy-on-write ---- */

enum kvk_status kvk_block_clone_drops(struct kvk_cache *cache, uint32_t target, uint32_t source,
                                      struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_block *from = kvk_index_block(cache->index, source);
    const struct kvk_block *to = kvk_index_block(cache->index, target);
    const struct kvk_group *group = kvk_group_of(cache, from);
    KVK_ASSERT(kvk_geometry_equal(&group->geometry, &kvk_group_of(cache, to)->geometry));
    KVK_ASSERT(to->state == KVK_BLOCK_RESERVED || to->state == KVK_BLOCK_ACTIVE);
    if (from->state == KVK_BLOCK_RESERVED) {
        return KVK_OK; /* nothing was written */
    }
    enum kvk_tier from_tier = kvk_block_tier(from);
    enum kvk_tier to_tier = kvk_block_tier(to);
    if (group->forms[from_tier].compact) {
        return kvk_fail(
            error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "host_format",
            "the block lies in the host tier, in a compact format: what is copied to be "
            "written on must be on the device");
    }
    struct kvk_copy copies[KVK_SHARD_COUNT_MAX];
    uint64_t sums[KVK_SHARD_COUNT_MAX];
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        copies[shard] = (struct kvk_copy){
            .target = kvk_block_address(cache, to, to_tier, shard),
            .source = kvk_block_address(cache, from, from_tier, shard),
            .size_bytes = group->shard_bytes[shard],
            .checksum = &sums[shard],
        };
    }
    kvk_block_borrow(cache, source, from_tier);
    kvk_block_borrow(cache, target, to_tier);
    kvk_unlock(&cache->lock);
    enum kvk_status status =
        kvk_mover_copy(cache->mover, copy_device(cache), copies, group->shard_count, error);
    kvk_lock(&cache->lock);
    cache->stats.copy_failures += status == KVK_OK ? 0 : 1;
    const uint64_t *known = kvk_block_checksums(cache, from, from_tier);
    for (uint32_t shard = 0; shard < group->shard_count && status == KVK_OK; shard++) {
        if (kvk_block_is_whole(from) && known[shard] != 0 && known[shard] != sums[shard]) {
            cache->stats.checksum_failures++;
            status = fail_damaged(1, error);
        }
    }
    kvk_block_return(cache, target, to_tier);
    kvk_block_return(cache, source, from_tier);
    return status;
}

/* ---- Checksums where bytes lie ---- */

/* What is hashed before others may run: some 50 us. To yield costs far more than hashing a small
 * block where all processors are busy. */
#define CHECKSUM_STEP_BYTES (UINT64_C(1) << 20)

/* The checksums of up to CHECKSUM_BATCH blocks. */
struct checksums {
    uint32_t count;
    struct {
        uint32_t block;
        enum kvk_tier tier;
        uint32_t shard_count;
        const uint8_t *address[KVK_SHARD_COUNT_MAX];
        uint64_t size_bytes[KVK_SHARD_COUNT_MAX];
        uint64_t sum[KVK_SHARD_COUNT_MAX];
    } blocks[CHECKSUM_BATCH];
};

/* Memory that the processor cannot read is hashed by the device, at its first move. */
static bool is_readable(const struct kvk_group *group, enum kvk_tier tier)
{
    return group->tiers[tier].regions[0].fd >= 0;
}

static void checksums_begin(struct kvk_cache *cache, struct checksums *batch,
                            const uint32_t *blocks, uint32_t count)
{
    batch->count = 0;
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_block *block = kvk_index_block(cache->index, blocks[i]);
        const struct kvk_group *group = kvk_group_of(cache, block);
        enum kvk_tier tier = kvk_block_tier(block);
        if (!is_readable(group, tier)) {
            continue;
        }
        uint32_t at = batch->count++;
        batch->blocks[at].block = blocks[i];
        batch->blocks[at].tier = tier;
        batch->blocks[at].shard_count = group->shard_count;
        for (uint32_t shard = 0; shard < group->shard_count; shard++) {
            batch->blocks[at].address[shard] = kvk_block_address(cache, block, tier, shard);
            batch->blocks[at].size_bytes[shard] = group->forms[tier].shard_bytes[shard];
        }
        kvk_block_borrow(cache, blocks[i], tier);
    }
}

static void checksums_take_unlocked(struct checksums *batch)
{
    uint64_t bytes = 0;

    KVK_ASSERT(kvk_locks_held() == 0);
    for (uint32_t i = 0; i < batch->count; i++) {
        for (uint32_t shard = 0; shard < batch->blocks[i].shard_count; shard++) {
            batch->blocks[i].sum[shard] =
                kvk_checksum(batch->blocks[i].address[shard], batch->blocks[i].size_bytes[shard]);
            bytes += batch->blocks[i].size_bytes[shard];
        }
        if (bytes >= CHECKSUM_STEP_BYTES) {
            bytes = 0;
            (void)sched_yield(); /* look-ups go first */
        }
    }
}

/* Store or compare, and give the blocks back. How many did not match. */
static uint32_t checksums_end(struct kvk_cache *cache, struct checksums *batch, bool verify)
{
    uint32_t damaged_count = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        uint32_t id = batch->blocks[i].block;
        enum kvk_tier tier = batch->blocks[i].tier;
        struct kvk_block *block = kvk_index_block(cache->index, id);
        uint64_t *known = kvk_block_checksums(cache, block, tier);
        bool damaged = false;
        for (uint32_t shard = 0; shard < batch->blocks[i].shard_count; shard++) {
            uint64_t sum = batch->blocks[i].sum[shard];
            if (!verify || known[shard] == 0) {
                known[shard] = sum;
            } else if (known[shard] != sum) {
                damaged = true;
            }
        }
        KVK_ASSERT(cache->passing_holds > 0);
        cache->passing_holds--;
        if (damaged) {
            kvk_block_discredit(cache, id, tier);
        }
        kvk_block_unpin(cache, id, tier);
        kvk_block_release(cache, id, false);
        damaged_count += damaged ? 1 : 0;
    }
    cache->stats.checksum_failures += damaged_count;
    return damaged_count;
}

enum kvk_status kvk_block_checksum_drops(struct kvk_cache *cache, const uint32_t *blocks,
                                         uint32_t count, bool verify, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t damaged = 0;
    struct checksums *batch = malloc(sizeof(*batch));
    if (batch == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for checksums");
    }
    for (uint32_t first = 0; first < count; first += CHECKSUM_BATCH) {
        uint32_t rest = count - first;
        checksums_begin(cache, batch, blocks + first,
                        rest < CHECKSUM_BATCH ? rest : CHECKSUM_BATCH);
        kvk_unlock(&cache->lock);
        checksums_take_unlocked(batch);
        kvk_lock(&cache->lock);
        damaged += checksums_end(cache, batch, verify);
    }
    free(batch);
    return damaged == 0 ? KVK_OK : fail_damaged(damaged, error);
}

/* ---- Ahead of need ---- */

/* The group whose next victim is worth least, among those that can be copied down. */
static struct kvk_group *run_ahead_group(struct kvk_cache *cache)
{
    struct kvk_group *best = NULL;
    double least = 0;
    uint32_t number = 0;
    struct kvk_group *group;
    uint64_t now = kvk_policy_now(cache);
    while ((group = kvk_room_next_group(cache, KVK_TIER_DEVICE, &number)) != NULL) {
        double score;
        if (group->tiers[KVK_TIER_HOST].present &&
            kvk_evict_queue_peek(&group->tiers[KVK_TIER_DEVICE].queue, now, &score) !=
                KVK_BLOCK_NONE &&
            (best == NULL || score < least)) {
            best = group;
            least = score;
        }
    }
    return best;
}

static uint64_t clean_bytes(const struct kvk_cache *cache)
{
    uint64_t bytes = 0;
    uint32_t number = 0;
    const struct kvk_group *group;
    while ((group = kvk_room_next_group(cache, KVK_TIER_DEVICE, &number)) != NULL) {
        bytes += kvk_evict_queue_count(&group->tiers[KVK_TIER_DEVICE].clean) * group->block_bytes;
    }
    return bytes;
}

void kvk_tier_run_ahead_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_tier_state *device = &cache->tiers[KVK_TIER_DEVICE];
    uint32_t percent = cache->config->device_free_percent;
    if (device->device == NULL || cache->tiers[KVK_TIER_HOST].device == NULL || percent == 0 ||
        kvk_tier_is_lost(cache, KVK_TIER_DEVICE)) {
        return;
    }
    uint64_t target = device->pool.limit_bytes * percent / 100;
    uint64_t ready = device->pool.limit_bytes - device->used_bytes + clean_bytes(cache);
    if (ready >= target) {
        return;
    }
    struct kvk_group *group = run_ahead_group(cache);
    if (group == NULL) {
        return;
    }
    uint64_t missing = (target - ready + group->block_bytes - 1) / group->block_bytes;
    uint32_t count = missing < RUN_AHEAD_COUNT ? (uint32_t)missing : RUN_AHEAD_COUNT;
    uint32_t demoted;
    group->space->reference_count++;
    enum kvk_status status = kvk_room_demote_drops(cache, group, count, true, &demoted, NULL);
    if (status != KVK_OK) {
        /* A full host tier or queue of copies ends it for this round. */
        kvk_log(KVK_LOG_DEBUG, "run_ahead_stopped", "reason=%s", kvk_status_name(status));
    }
    group->space->reference_count--;
}

/* ---- Punching ---- */

static enum kvk_status punch_unlocked(struct kvk_cache *cache, const struct kvk_punch *punch)
{
    struct kvk_group_tier *at = &punch->group->tiers[punch->tier];
    struct kvk_device *device = cache->tiers[punch->tier].device;
    uint64_t first = (uint64_t)punch->slab * at->arena.slab_slots;
    for (uint32_t shard = 0; shard < punch->group->shard_count; shard++) {
        uint64_t bytes = punch->group->forms[punch->tier].shard_bytes[shard];
        struct kvk_error error;
        enum kvk_status status = device->ops->punch(device, &at->regions[shard], first * bytes,
                                                    at->arena.slab_slots * bytes, &error);
        if (status != KVK_OK) {
            kvk_log(KVK_LOG_ERROR, "punch_failed", "tier=%d reason=\"%s\"", (int)punch->tier,
                    error.text);
            return status;
        }
    }
    return KVK_OK;
}

static struct kvk_punch *punch_waiting(const struct kvk_cache *cache)
{
    struct kvk_punch *punch = cache->punches;
    while (punch != NULL && (punch->under_way || punch->tier == KVK_TIER_DISK)) {
        punch = punch->next; /* the disk's extents are its own thread's: nobody waits for them */
    }
    return punch;
}

static void punch_remove(struct kvk_cache *cache, struct kvk_punch *punch)
{
    struct kvk_punch **link = &cache->punches;
    while (*link != punch) {
        KVK_ASSERT(*link != NULL);
        link = &(*link)->next;
    }
    *link = punch->next;
}

void kvk_tier_punch_end(struct kvk_cache *cache, struct kvk_punch *punch)
{
    struct kvk_tier_state *state = &cache->tiers[punch->tier];
    punch_remove(cache, punch);
    KVK_ASSERT(state->punch_bytes >= punch->size_bytes);
    KVK_ASSERT(state->pool.charge_bytes >= punch->size_bytes);
    state->punch_bytes -= punch->size_bytes;
    state->pool.charge_bytes -= punch->size_bytes;
    punch->group->tiers[punch->tier].places[punch->slab] = 0;
    pthread_cond_broadcast(&cache->changed);
    free(punch);
}

bool kvk_tier_punch_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_punch *punch;
    bool any = false;
    while ((punch = punch_waiting(cache)) != NULL) {
        any = true;
        punch->under_way = true;
        kvk_unlock(&cache->lock);
        enum kvk_status status = punch_unlocked(cache, punch);
        kvk_lock(&cache->lock);
        punch->under_way = false;
        if (status != KVK_OK) {
            break; /* still charged: the next round tries again */
        }
        kvk_tier_punch_end(cache, punch);
    }
    return any;
}

uint64_t kvk_tier_load_ns(const struct kvk_cache *cache, uint64_t bytes)
{
    uint64_t rate = kvk_mover_rate(cache->mover);
    if (rate == 0) {
        rate = RATE_UNKNOWN;
    }
    return (uint64_t)((double)bytes / (double)rate * (double)KVK_NS_PER_SECOND);
}
