/*
 * Emptying a slab of a tier below which there is nothing, without forgetting what lies in it: the
 * least worth of the whole arena are forgotten, wherever they lie, and the slab's blocks move into
 * their slots. Forgetting the slab's own blocks would take everything that hangs below them along,
 * which for the first blocks of popular prompts is most of what their space has cached.
 */
#include <stdlib.h>

#include "base/assert.h"
#include "daemon/room_internal.h"

/* A block on its way to another slot of its tier. */
struct shift {
    uint32_t block;
    uint32_t slot;
    uint32_t first_sum;
};

struct compaction {
    struct kvk_cache *cache;
    struct kvk_group *group;
    enum kvk_tier tier;
    uint32_t first_slot; /* of the slab */
    uint32_t slot_count;
    uint32_t *slots; /* [free_count] loose, outside the slab */
    uint32_t free_count;
    uint32_t *inside; /* [inside_count] loose, of the slab itself: so that nobody else gets them */
    uint32_t inside_count;
    struct shift *shifts; /* [shift_count] */
    uint32_t shift_count;
    struct kvk_copy *copies; /* [copy_count] */
    uint32_t copy_count;
    uint64_t *sums; /* one per copy */
};

bool kvk_room_slab_may_shift(const struct kvk_cache *cache, const struct kvk_group *group,
                             enum kvk_tier tier, uint32_t number)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    const struct kvk_slab *slab = &at->arena.slabs[number];
    for (uint32_t i = 0; i < slab->slot_count; i++) {
        uint32_t owner = at->owners[slab->first_slot + i];
        if (owner == 0) {
            if (kvk_arena_is_used(&at->arena, slab->first_slot + i)) {
                return false; /* a copy is on its way there */
            }
            continue;
        }
        const struct kvk_block *block = kvk_index_block(cache->index, owner - 1);
        if (!kvk_block_is_whole(block) || block->transfer_count > 0 || block->pin_count[tier] > 0) {
            return false;
        }
    }
    return true;
}

static bool is_inside(const struct compaction *job, uint32_t slot)
{
    return slot >= job->first_slot && slot - job->first_slot < job->slot_count;
}

/* The least worth of the arena, of those that may be forgotten at once. */
static bool forget_one(const struct compaction *job)
{
    struct kvk_cache *cache = job->cache;
    struct kvk_group_tier *at = &job->group->tiers[job->tier];
    uint64_t now = kvk_policy_now(cache);
    uint32_t victim = kvk_evict_queue_peek(&at->queue, now, NULL);
    if (victim == KVK_BLOCK_NONE) {
        victim = kvk_evict_queue_peek(&at->clean, now, NULL); /* what is on disk too */
    }
    if (victim == KVK_BLOCK_NONE ||
        !kvk_block_is_leaf(job->group, kvk_index_block(cache->index, victim))) {
        return false;
    }
    kvk_block_drop_copy(cache, victim, job->tier, true);
    return true;
}

static uint32_t owned_count(const struct compaction *job)
{
    const struct kvk_group_tier *at = &job->group->tiers[job->tier];
    uint32_t count = 0;
    for (uint32_t i = 0; i < job->slot_count; i++) {
        count += at->owners[job->first_slot + i] != 0 ? 1 : 0;
    }
    return count;
}

/* As many loose slots outside the slab as it has blocks, and the slab's own free ones out of the
 * way. False: there are not enough victims. */
static bool slots_gather(struct compaction *job)
{
    uint32_t owned = owned_count(job);
    while (job->free_count < owned) {
        uint32_t slot = kvk_slot_take(job->cache, job->group, job->tier);
        if (slot == KVK_SLOT_NONE) {
            if (!forget_one(job)) {
                return false;
            }
            owned = owned_count(job); /* the victim may have been one of the slab's own */
        } else if (is_inside(job, slot)) {
            job->inside[job->inside_count++] = slot;
        } else {
            job->slots[job->free_count++] = slot;
        }
    }
    return true;
}

/* Borrow every block of the slab, and say what is to be copied where. */
static void shifts_begin(struct compaction *job)
{
    struct kvk_cache *cache = job->cache;
    const struct kvk_group *group = job->group;
    const struct kvk_group_tier *at = &group->tiers[job->tier];
    for (uint32_t i = 0; i < job->slot_count && job->shift_count < job->free_count; i++) {
        uint32_t owner = at->owners[job->first_slot + i];
        if (owner == 0) {
            continue;
        }
        struct kvk_block *block = kvk_index_block(cache->index, owner - 1);
        if (!kvk_block_is_whole(block) || block->transfer_count > 0 ||
            block->pin_count[job->tier] > 0) {
            continue;
        }
        struct shift *shift = &job->shifts[job->shift_count];
        *shift = (struct shift){
            .block = owner - 1, .slot = job->slots[job->shift_count], .first_sum = job->copy_count};
        job->shift_count++;
        for (uint32_t shard = 0; shard < group->shard_count; shard++) {
            uint64_t bytes = group->forms[job->tier].shard_bytes[shard];
            job->copies[job->copy_count] =
                (struct kvk_copy){.target = kvk_slot_address(group, job->tier, shift->slot, shard),
                                  .source = kvk_block_address(cache, block, job->tier, shard),
                                  .size_bytes = bytes,
                                  .checksum = &job->sums[job->copy_count]};
            job->copy_count++;
        }
        kvk_block_step(block, KVK_BLOCK_TRANSFER_BEGIN);
        cache->moves_under_way++;
        kvk_block_borrow(cache, shift->block, job->tier);
    }
}

static bool sums_match(const struct compaction *job, const struct shift *shift)
{
    const struct kvk_block *block = kvk_index_block(job->cache->index, shift->block);
    const uint64_t *known = kvk_block_checksums(job->cache, block, job->tier);
    for (uint32_t shard = 0; shard < job->group->shard_count; shard++) {
        if (known[shard] != 0 && known[shard] != job->sums[shift->first_sum + shard]) {
            return false;
        }
    }
    return true;
}

/* The block is in its new slot now, unless somebody pinned it meanwhile or the bytes are not what
 * was sealed: whoever reads it next is told so. Is it? */
static bool shift_end(struct compaction *job, const struct shift *shift, bool copied)
{
    struct kvk_cache *cache = job->cache;
    struct kvk_block *block = kvk_index_block(cache->index, shift->block);
    kvk_block_step(block, copied ? KVK_BLOCK_TRANSFER_DONE : KVK_BLOCK_TRANSFER_FAIL);
    kvk_block_unpin(cache, shift->block, job->tier);
    bool moves = copied && kvk_block_is_whole(block) && block->transfer_count == 0 &&
                 block->pin_count[job->tier] == 0 && block->slot[job->tier] != KVK_SLOT_NONE &&
                 sums_match(job, shift);
    if (moves) {
        kvk_block_reslot(cache, shift->block, job->tier, shift->slot, job->sums + shift->first_sum);
    } else {
        kvk_slot_give(cache, job->group, job->tier, shift->slot);
    }
    KVK_ASSERT(cache->moves_under_way > 0);
    cache->moves_under_way--;
    KVK_ASSERT(cache->passing_holds > 0);
    cache->passing_holds--;
    kvk_block_release(cache, shift->block, false);
    return moves;
}

static void shifts_end(struct compaction *job, bool copied)
{
    for (uint32_t i = 0; i < job->shift_count; i++) {
        job->cache->stats.shifted_blocks += shift_end(job, &job->shifts[i], copied) ? 1 : 0;
    }
    pthread_cond_broadcast(&job->cache->changed);
}

static void compaction_finish(struct compaction *job)
{
    for (uint32_t i = job->shift_count; i < job->free_count; i++) {
        kvk_slot_give(job->cache, job->group, job->tier, job->slots[i]);
    }
    for (uint32_t i = 0; i < job->inside_count; i++) {
        kvk_slot_give(job->cache, job->group, job->tier, job->inside[i]);
    }
    free(job->slots);
    free(job->inside);
    free(job->shifts);
    free(job->copies);
    free(job->sums);
}

static bool compaction_init(struct compaction *job)
{
    size_t count = job->slot_count;
    size_t copies = count * job->group->shard_count;
    job->slots = calloc(count, sizeof(*job->slots));
    job->inside = calloc(count, sizeof(*job->inside));
    job->shifts = calloc(count, sizeof(*job->shifts));
    job->copies = calloc(copies, sizeof(*job->copies));
    job->sums = calloc(copies, sizeof(*job->sums));
    return job->slots != NULL && job->inside != NULL && job->shifts != NULL &&
           job->copies != NULL && job->sums != NULL;
}

enum kvk_status kvk_room_compact_drops(struct kvk_cache *cache, struct kvk_group *group,
                                       enum kvk_tier tier, uint32_t slab, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_slab *place = &group->tiers[tier].arena.slabs[slab];
    struct compaction job = {.cache = cache,
                             .group = group,
                             .tier = tier,
                             .first_slot = place->first_slot,
                             .slot_count = place->slot_count};
    if (!compaction_init(&job)) {
        compaction_finish(&job);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a copy");
    }
    enum kvk_status status = KVK_EXHAUSTED;
    if (slots_gather(&job)) {
        shifts_begin(&job);
        status = KVK_OK;
    }
    if (job.shift_count > 0) {
        kvk_unlock(&cache->lock);
        status = kvk_mover_copy(cache->mover, cache->tiers[tier].device, job.copies, job.copy_count,
                                error);
        kvk_lock(&cache->lock);
        cache->stats.copy_failures += status == KVK_OK ? 0 : 1;
        shifts_end(&job, status == KVK_OK);
    }
    compaction_finish(&job);
    return status;
}
