/*
 * Making room where that takes time: backing places, copying victims to the host tier, emptying
 * slabs and punching them out. One bounded step a call, without the lock while bytes move.
 */
#include "daemon/room_internal.h"
#include "daemon/sidecar.h"

#include <stdlib.h>

#include "base/assert.h"
#include "base/log.h"

#define DEMOTE_COUNT_MIN 16
#define DEMOTE_COUNT_MAX 1024
#define DEMOTE_BYTES_MAX (UINT64_C(64) << 20)
#define WAIT_NS (50 * KVK_NS_PER_MS)
#define TIDY_GROUPS 32  /* that one round looks at */
#define TIDY_BACKS 2    /* slabs that one round backs: each takes milliseconds */
#define EMPTY_ROUNDS 20 /* that find a group's slabs empty, with nothing taken in between */

/* ---- Backing ---- */

/* Give memory to `slots` slots of a place. The space is kept meanwhile. */
static enum kvk_status back_drops(struct kvk_cache *cache, struct kvk_group *group,
                                  enum kvk_tier tier, uint32_t place, uint32_t slots,
                                  struct kvk_error *error)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_device *device = cache->tiers[tier].device;
    struct kvk_device *memory = cache->memory;
    uint64_t first = (uint64_t)place * at->arena.slab_slots;
    uint32_t leave_count = at->leave_count;
    enum kvk_status status = KVK_OK;

    KVK_ASSERT(slots > 0 && slots <= at->arena.slab_slots);
    group->space->reference_count++;
    at->backing_count++;
    kvk_unlock(&cache->lock);
    for (uint32_t shard = 0; shard < group->shard_count && status == KVK_OK; shard++) {
        uint64_t bytes = group->forms[tier].shard_bytes[shard];
        status =
            device->ops->back(device, &at->regions[shard], first * bytes, slots * bytes, error);
    }
    if (status == KVK_OK) {
        status = memory->ops->back(memory, &at->generations, first * sizeof(uint32_t),
                                   slots * sizeof(uint32_t), error);
    }
    if (status == KVK_OK) {
        status = kvk_sidecar_back_unlocked(cache, group, tier, (uint32_t)first, slots, error);
    }
    kvk_lock(&cache->lock);
    at->backing_count--;
    group->space->reference_count--;
    /* Where a slab left meanwhile, this place's memory may have been punched out again. */
    if (status == KVK_OK && at->leave_count == leave_count && at->places[place] < slots) {
        at->places[place] = slots;
    }
    return status;
}

/* Slots of the next slab, were `bytes` free in the pool. */
static uint32_t slots_for(const struct kvk_group *group, enum kvk_tier tier, uint64_t bytes)
{
    uint64_t slots = bytes / group->forms[tier].block_bytes;
    uint32_t slab_slots = group->tiers[tier].arena.slab_slots;
    return slots < slab_slots ? (uint32_t)slots : slab_slots;
}

static enum kvk_status step_back_drops(struct kvk_cache *cache, struct kvk_group *group,
                                       enum kvk_tier tier, uint32_t place, struct kvk_error *error)
{
    uint64_t bytes = kvk_pool_free_bytes(&cache->tiers[tier].pool);
    return back_drops(cache, group, tier, place, slots_for(group, tier, bytes), error);
}

/*
 * Memory for the place that a slab from `giver` will make budget for, before that slab is given up:
 * so that the budget is taken up in the same breath as it comes free, before others can.
 * True: that was to do and is done; look again.
 */
static bool prepare_drops(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          const struct kvk_room_choice *choice, enum kvk_status *status,
                          struct kvk_error *error)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    uint64_t bytes = kvk_pool_free_bytes(&cache->tiers[tier].pool) +
                     choice->giver->tiers[tier].arena.slabs[choice->slab].slot_count *
                         choice->giver->forms[tier].block_bytes;
    uint32_t slots = slots_for(group, tier, bytes);
    uint32_t place = kvk_arena_next_place(&at->arena);
    *status = KVK_OK;
    if (slots == 0 || place == KVK_SLAB_NONE || at->places[place] >= slots) {
        return false; /* LEAVING counts as large */
    }
    *status = back_drops(cache, group, tier, place, slots, error);
    return true;
}

/* ---- Leaving and punching ---- */

static enum kvk_status hand_over_drops(struct kvk_cache *cache, struct kvk_group *group,
                                       enum kvk_tier tier, struct kvk_group *giver, uint32_t slab)
{
    if (!kvk_room_slab_leave(cache, giver, tier, slab)) {
        return KVK_EXHAUSTED;
    }
    (void)kvk_tier_punch_drops(cache);
    struct kvk_room_choice choice;
    kvk_room_choose_more(cache, group, tier, NULL, &choice);
    if (choice.step == KVK_ROOM_GROW) {
        (void)kvk_room_grow(cache, group, tier, choice.place);
    }
    return KVK_OK;
}

/* ---- Demoting ---- */

static uint32_t batch_limit(const struct kvk_group *group, uint32_t count)
{
    uint64_t by_bytes = DEMOTE_BYTES_MAX / group->block_bytes;
    if (count > DEMOTE_COUNT_MAX) {
        count = DEMOTE_COUNT_MAX;
    }
    if (count > by_bytes) {
        count = by_bytes == 0 ? 1 : (uint32_t)by_bytes;
    }
    return count;
}

/* May it go from the device, as it is now? The lock was dropped since it was chosen. */
static bool may_leave_device(const struct kvk_group *group, const struct kvk_block *block)
{
    return kvk_block_is_whole(block) && block->transfer_count == 0 &&
           block->pin_count[KVK_TIER_DEVICE] == 0 &&
           (block->hold_count == 0 || !kvk_group_is_compact_below(group));
}

/*
 * The block above `child`, whose move down has begun, if nothing but that child keeps it on the
 * device. A chain's blocks become leaves only one after the other: without this a long chain would
 * go down in as many jobs as it has blocks.
 */
static uint32_t demotion_parent(struct kvk_cache *cache, const struct kvk_group *group,
                                uint32_t child)
{
    if (child == KVK_BLOCK_NONE || group->windowed) {
        return KVK_BLOCK_NONE;
    }
    uint32_t parent = kvk_index_block(cache->index, child)->parent;
    if (parent == KVK_BLOCK_NONE) {
        return KVK_BLOCK_NONE;
    }
    const struct kvk_block *block = kvk_index_block(cache->index, parent);
    bool may_go = may_leave_device(group, block) &&
                  (block->tier_mask & KVK_MEMORY_TIER_MASK) == 1U << KVK_TIER_DEVICE &&
                  block->device_children == 1;
    return may_go ? parent : KVK_BLOCK_NONE;
}

/* `before`: the victim before this one, on its way to the host and no more on the device then; or
 * KVK_BLOCK_NONE. */
static uint32_t demotion_victim(struct kvk_cache *cache, struct kvk_group *group, uint32_t before)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_DEVICE];
    uint64_t now = kvk_policy_now(cache);
    double score;
    double score_held;
    uint32_t block = kvk_evict_queue_peek(&at->queue, now, &score);
    uint32_t held = kvk_evict_queue_peek(&at->held, now, &score_held);
    if (held != KVK_BLOCK_NONE && (block == KVK_BLOCK_NONE || score_held < score)) {
        block = held;
        score = score_held;
    }
    uint32_t parent = demotion_parent(cache, group, before);
    if (parent != KVK_BLOCK_NONE &&
        (block == KVK_BLOCK_NONE ||
         kvk_evict_score(&at->queue, kvk_index_block(cache->index, parent), now) <= score)) {
        block = parent;
    }
    return block;
}

/* A host slot for one more block, and its move begun. */
static enum kvk_status demotion_begin(struct kvk_cache *cache, struct kvk_group *group,
                                      uint32_t block, struct kvk_move *move)
{
    enum kvk_status status = kvk_room_slot(cache, group, KVK_TIER_HOST, NULL, &move->slot, NULL);
    if (status == KVK_OK) {
        move->block = block;
        kvk_tier_move_begin(cache, KVK_TIER_HOST, move);
    }
    return status;
}

static enum kvk_status step_drops(struct kvk_cache *cache, struct kvk_group *group,
                                  enum kvk_tier tier, const struct kvk_room_want *want,
                                  uint32_t count, const struct kvk_caller *caller,
                                  struct kvk_error *error);

/* The host tier needs a step of its own first: backing, or a slab of another group. */
static enum kvk_status host_step_drops(struct kvk_cache *cache, struct kvk_group *group,
                                       struct kvk_error *error)
{
    return step_drops(cache, group, KVK_TIER_HOST, NULL, 1, NULL, error);
}

enum kvk_status kvk_room_demote_drops(struct kvk_cache *cache, struct kvk_group *group,
                                      uint32_t count, bool keep_device_copies, uint32_t *demoted,
                                      struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t limit = batch_limit(group, count);
    uint32_t begun = 0;
    enum kvk_status status = KVK_OK;
    *demoted = 0;
    struct kvk_move *moves = calloc(limit, sizeof(*moves));
    if (moves == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a copy");
    }
    while (begun < limit && status == KVK_OK) {
        /* With the copies kept on the device, children stay there and parents are none to go. */
        uint32_t before =
            begun > 0 && !keep_device_copies ? moves[begun - 1].block : KVK_BLOCK_NONE;
        uint32_t block = demotion_victim(cache, group, before);
        if (block == KVK_BLOCK_NONE) {
            break;
        }
        status = demotion_begin(cache, group, block, &moves[begun]);
        begun += status == KVK_OK ? 1 : 0;
    }
    if (begun > 0) {
        status = kvk_tier_moves_run_drops(cache, KVK_TIER_HOST, moves, begun, !keep_device_copies,
                                          error);
        *demoted = status == KVK_OK ? begun : 0;
        cache->stats.demoted_blocks += *demoted;
    } else if (status == KVK_WOULD_BLOCK) {
        status = host_step_drops(cache, group, error);
    }
    free(moves);
    return status;
}

/* ---- Emptying a slab ---- */

/* Where blocks can only be forgotten: all at once, for nothing has to be copied. */
static void slab_forget(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                        uint32_t number)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    const struct kvk_slab *slab = &at->arena.slabs[number];
    for (uint32_t i = 0; i < slab->slot_count; i++) {
        /* One block's going may take others with it. */
        uint32_t owner = at->owners[slab->first_slot + i];
        if (owner == 0) {
            continue;
        }
        const struct kvk_block *block = kvk_index_block(cache->index, owner - 1);
        if (kvk_room_has_other(block, tier)) {
            kvk_block_drop_copy(cache, owner - 1, tier, true);
        } else {
            kvk_room_forget_tree(cache, owner - 1);
        }
    }
}

/* Device blocks with a host tier below: drop what has a copy there, begin to copy the rest. */
static enum kvk_status slab_demote_drops(struct kvk_cache *cache, struct kvk_group *group,
                                         uint32_t number, struct kvk_error *error)
{
    const struct kvk_group_tier *at = &group->tiers[KVK_TIER_DEVICE];
    const struct kvk_slab *slab = &at->arena.slabs[number];
    uint32_t limit = batch_limit(group, slab->slot_count);
    uint32_t begun = 0;
    enum kvk_status status = KVK_OK;
    struct kvk_move *moves = calloc(limit, sizeof(*moves));
    if (moves == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a copy");
    }
    for (uint32_t i = 0; i < slab->slot_count && begun < limit && status == KVK_OK; i++) {
        uint32_t owner = at->owners[slab->first_slot + i];
        if (owner == 0) {
            continue;
        }
        const struct kvk_block *block = kvk_index_block(cache->index, owner - 1);
        if (!may_leave_device(group, block)) {
            status = KVK_WOULD_BLOCK; /* not this slab, after all */
        } else if (!kvk_room_is_dirty(group, block)) {
            kvk_block_drop_copy(cache, owner - 1, KVK_TIER_DEVICE, true);
        } else {
            status = demotion_begin(cache, group, owner - 1, &moves[begun]);
            begun += status == KVK_OK ? 1 : 0;
        }
    }
    if (begun > 0) {
        status = kvk_tier_moves_run_drops(cache, KVK_TIER_HOST, moves, begun, true, error);
        cache->stats.demoted_blocks += status == KVK_OK ? begun : 0;
    } else if (status == KVK_WOULD_BLOCK) {
        status = host_step_drops(cache, group, error);
    }
    free(moves);
    return status;
}

static enum kvk_status vacate_drops(struct kvk_cache *cache, struct kvk_group *group,
                                    enum kvk_tier tier, const struct kvk_room_choice *choice,
                                    struct kvk_error *error)
{
    struct kvk_group *giver = choice->giver;
    struct kvk_space *space = giver->space;
    enum kvk_status status = KVK_OK;
    space->reference_count++;
    if (tier == KVK_TIER_DEVICE && giver->tiers[KVK_TIER_HOST].present) {
        status = slab_demote_drops(cache, giver, choice->slab, error);
    } else if (choice->step == KVK_ROOM_COMPACT) {
        status = kvk_room_compact_drops(cache, giver, tier, choice->slab, error);
    } else {
        kvk_gone_begin(cache, KVK_GONE_EVICTED, group->space);
        slab_forget(cache, giver, tier, choice->slab);
        kvk_gone_end(cache);
    }
    const struct kvk_slab *slab = &giver->tiers[tier].arena.slabs[choice->slab];
    if (status == KVK_OK && slab->slot_count > 0 && slab->used_count == 0) {
        status = hand_over_drops(cache, group, tier, giver, choice->slab);
    }
    space->reference_count--;
    return status;
}

/* For its tenant's limit: the group stays meanwhile. */
enum kvk_status kvk_room_demote_own_drops(struct kvk_cache *cache, struct kvk_group *group,
                                          uint32_t count, struct kvk_error *error)
{
    uint32_t demoted;
    struct kvk_space *space = group->space;
    space->reference_count++;
    enum kvk_status status = kvk_room_demote_drops(cache, group, count, false, &demoted, error);
    kvk_tenant_state_of(cache, space->tenant)->usage.limit_evictions += demoted;
    space->reference_count--;
    return status;
}

/* ---- One step ---- */

/* Until something was freed, or a little while. Without threads nobody would end the waiting. */
static enum kvk_status wait_drops(struct kvk_cache *cache, const struct kvk_caller *caller)
{
    if (!cache->threads) {
        return KVK_EXHAUSTED;
    }
    uint64_t until_ns = kvk_clock_now(kvk_clock_monotonic()) + WAIT_NS;
    if (caller != NULL && caller->deadline_ns < until_ns) {
        until_ns = caller->deadline_ns;
    }
    (void)kvk_condition_wait(&cache->changed, &cache->lock, until_ns);
    return KVK_OK;
}

/* Nothing else makes room: what is being written to disk from where it lies is back soon.
 * KVK_EXHAUSTED: there is no such thing. */
static enum kvk_status wait_for_disk_drops(struct kvk_cache *cache, const struct kvk_caller *caller)
{
    return kvk_upkeep_keeps_room(cache) ? wait_drops(cache, caller) : KVK_EXHAUSTED;
}

/* Get the group at least one slot further in the tier. KVK_EXHAUSTED: nothing can be done. */
static enum kvk_status step_drops(struct kvk_cache *cache, struct kvk_group *group,
                                  enum kvk_tier tier, const struct kvk_room_want *want,
                                  uint32_t count, const struct kvk_caller *caller,
                                  struct kvk_error *error)
{
    struct kvk_room_choice choice;
    enum kvk_status status = KVK_OK;
    uint32_t demoted;
    kvk_room_choose_more(cache, group, tier, want, &choice);
    switch (choice.step) {
    case KVK_ROOM_TAKE:
    case KVK_ROOM_GROW:
    case KVK_ROOM_EVICT:
        return kvk_room_apply(cache, group, tier, &choice) ? KVK_OK : KVK_EXHAUSTED;
    case KVK_ROOM_BACK:
        return step_back_drops(cache, group, tier, choice.place, error);
    case KVK_ROOM_HAND_OVER:
        if (prepare_drops(cache, group, tier, &choice, &status, error)) {
            return status;
        }
        return hand_over_drops(cache, group, tier, choice.giver, choice.slab);
    case KVK_ROOM_DEMOTE:
        if (choice.by_limit) { /* no more of its own than needed */
            return kvk_room_demote_own_drops(cache, choice.giver, count, error);
        }
        count = count < DEMOTE_COUNT_MIN ? DEMOTE_COUNT_MIN : count;
        return kvk_room_demote_drops(cache, group, count, false, &demoted, error);
    case KVK_ROOM_VACATE:
    case KVK_ROOM_COMPACT:
        if (prepare_drops(cache, group, tier, &choice, &status, error)) {
            return status;
        }
        return vacate_drops(cache, group, tier, &choice, error);
    case KVK_ROOM_PUNCH: /* or another thread is at it: that may take milliseconds */
        return kvk_tier_punch_drops(cache) ? KVK_OK : wait_drops(cache, caller);
    case KVK_ROOM_WAIT:
        return wait_drops(cache, caller);
    case KVK_ROOM_LIMIT:
    case KVK_ROOM_NOTHING:
        break;
    }
    return KVK_EXHAUSTED;
}

/* ---- The callers ---- */

static enum kvk_status check_patience_drops(struct kvk_cache *cache,
                                            const struct kvk_caller *caller,
                                            struct kvk_error *error)
{
    if (kvk_clock_now(kvk_clock_monotonic()) >= caller->deadline_ns) {
        return kvk_fail(error, KVK_DEADLINE, KVK_CAUSE_NONE, "",
                        "the call's time was over before there was room");
    }
    if (caller->cancelled == NULL) {
        return KVK_OK;
    }
    kvk_unlock(&cache->lock);
    bool cancelled = caller->cancelled(caller->cancelled_context);
    kvk_lock(&cache->lock);
    return cancelled ? kvk_fail(error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the call was cancelled")
                     : KVK_OK;
}

/* Slots of the group that are missing, or that the tenant's limit has no room for; `left_bytes` of
 * it are left for this group and those after it. */
static uint64_t shortage(const struct kvk_space *space, const struct kvk_room_want *want,
                         uint32_t g, uint64_t *left_bytes)
{
    const struct kvk_group *group = space->groups[g];
    uint64_t has = kvk_room_free_slots(group, want->tier);
    uint64_t block_bytes = group->forms[want->tier].block_bytes;
    uint64_t allowed = *left_bytes / block_bytes;
    has = allowed < has ? allowed : has;
    uint64_t wanted_bytes = want->counts[g] * block_bytes;
    if (*left_bytes != UINT64_MAX) {
        *left_bytes -= wanted_bytes < *left_bytes ? wanted_bytes : *left_bytes;
    }
    return want->counts[g] > has ? want->counts[g] - has : 0;
}

/* Which statuses of a step mean that there is no way on? A failed copy is told as it is. */
static enum kvk_status step_verdict(struct kvk_cache *cache, struct kvk_space *space,
                                    const struct kvk_room_want *want, uint64_t bytes,
                                    enum kvk_status status, const struct kvk_error *step_error,
                                    const struct kvk_caller *caller, struct kvk_error *error)
{
    if (status == KVK_OK || status == KVK_WOULD_BLOCK || status == KVK_DATA_LOSS) {
        return KVK_OK; /* what was damaged is dropped and counted; the next victim may do */
    }
    if (status == KVK_EXHAUSTED && step_error->status == KVK_OK) {
        return kvk_room_refuse(cache, want->tier, bytes, space, want->sequence_id, caller, error);
    }
    if (error != NULL) {
        *error = *step_error;
    }
    kvk_refusal_note(cache, caller, space->tenant, want->sequence_id, bytes, step_error);
    return status;
}

enum kvk_status kvk_room_make_drops(struct kvk_cache *cache, struct kvk_space *space,
                                    const struct kvk_room_want *want,
                                    const struct kvk_caller *caller, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(caller->may_block);
    space->reference_count++;
    enum kvk_status status = check_patience_drops(cache, caller, error);
    uint64_t left_bytes = kvk_quota_left(cache, space->tenant, want->tier);
    bool waited = status == KVK_OK && kvk_upkeep_keeps_room_briefly(cache) && cache->threads;
    if (waited) {
        status = wait_drops(cache, caller);
    }
    bool stepped = waited;
    for (uint32_t g = 0; g < space->group_count && status == KVK_OK && !waited; g++) {
        struct kvk_group *group = space->groups[g];
        if (want->counts[g] == 0 || !group->tiers[want->tier].present) {
            continue;
        }
        uint64_t missing = shortage(space, want, g, &left_bytes);
        if (missing == 0) {
            continue;
        }
        struct kvk_error step_error = {.status = KVK_OK};
        stepped = true;
        status = step_drops(cache, group, want->tier, want, (uint32_t)missing, caller, &step_error);
        if (status == KVK_EXHAUSTED && step_error.status == KVK_OK) {
            status = wait_for_disk_drops(cache, caller);
        }
        status = step_verdict(cache, space, want, missing * group->forms[want->tier].block_bytes,
                              status, &step_error, caller, error);
        break;
    }
    if (status == KVK_OK && !stepped) { /* there are slots, but the budget is full */
        enum kvk_status waiting = wait_for_disk_drops(cache, caller);
        KVK_ASSERT(waiting == KVK_OK || waiting == KVK_EXHAUSTED); /* the next try says so */
    }
    space->reference_count--;
    return status;
}

/* Every step gets at least one slot further, or waits; others may take what it got. */
static uint64_t steps_max(const struct kvk_space *space, const struct kvk_room_want *want)
{
    uint64_t steps = 1000;
    for (uint32_t g = 0; g < space->group_count; g++) {
        steps += 8 * (uint64_t)want->counts[g];
    }
    return steps;
}

enum kvk_status kvk_room_reserve_drops(struct kvk_cache *cache, struct kvk_space *space,
                                       const struct kvk_room_want *want,
                                       uint32_t *blocks[KVK_GROUP_COUNT_MAX],
                                       const struct kvk_caller *caller, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    enum kvk_status status = KVK_WOULD_BLOCK;
    uint64_t steps = steps_max(space, want);
    space->reference_count++;
    while (status == KVK_WOULD_BLOCK) {
        status = kvk_room_reserve(cache, space, want, blocks, caller, error);
        if (status != KVK_WOULD_BLOCK || !caller->may_block) {
            break;
        }
        if (steps-- == 0) {
            status = kvk_room_refuse(cache, want->tier, kvk_room_want_bytes(space, want), space,
                                     want->sequence_id, caller, error);
            break;
        }
        status = kvk_room_make_drops(cache, space, want, caller, error);
        if (status == KVK_OK) {
            status = KVK_WOULD_BLOCK;
        }
    }
    space->reference_count--;
    return status;
}

/* ---- Tidying ---- */

/* More memory than the pool has budget for: a place that was backed ahead and is not needed. */
static void ahead_give(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    uint32_t place = kvk_arena_next_place(&at->arena);
    if (place == KVK_SLAB_NONE || at->places[place] == 0 || kvk_tier_is_lent(at) ||
        at->places[place] == KVK_PLACE_LEAVING ||
        kvk_pool_free_bytes(&cache->tiers[tier].pool) >= group->forms[tier].block_bytes) {
        return;
    }
    struct kvk_punch *punch = calloc(1, sizeof(*punch));
    if (punch == NULL) {
        return; /* the next round tries again */
    }
    *punch =
        (struct kvk_punch){.group = group, .tier = tier, .slab = place, .next = cache->punches};
    cache->punches = punch;
    at->places[place] = KVK_PLACE_LEAVING;
    at->leave_count++;
}

/* A slab before the last free slots are taken, so that taking the next one does not wait. */
static bool back_ahead_drops(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    uint32_t place = kvk_arena_next_place(&at->arena);
    uint32_t slots = slots_for(group, tier, kvk_pool_free_bytes(&cache->tiers[tier].pool));
    if (group->space->reference_count == 0 || slots == 0 || place == KVK_SLAB_NONE ||
        at->places[place] >= slots || kvk_room_free_slots(group, tier) > at->arena.slab_slots / 2) {
        return false;
    }
    return back_drops(cache, group, tier, place, slots, NULL) == KVK_OK;
}

/*
 * Slabs of a group that has held nothing for a while go back, where others could use them; whoever
 * wants one earlier is handed it over. Not at once: where requests come and go and nothing of them
 * stays, as with prompts shorter than a block, each would wait for a slab to be backed anew.
 */
static void empty_give(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    const struct kvk_arena *arena = &at->arena;
    if (arena->used_count > 0 || cache->space_count < 2) {
        return;
    }
    if (at->empty_rounds < EMPTY_ROUNDS) {
        at->empty_rounds++; /* 0 whenever a slot is taken */
        return;
    }
    uint32_t slab;
    while ((slab = kvk_arena_empty_slab(arena)) != KVK_SLAB_NONE) {
        if (!kvk_room_slab_leave(cache, group, tier, slab)) {
            return;
        }
    }
}

void kvk_room_tidy_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t backs = 0;
    uint32_t looked = 0;
    uint32_t passed = 0;
    while (looked < TIDY_GROUPS && passed < cache->group_end && backs < TIDY_BACKS) {
        passed++;
        cache->tidy_next = cache->tidy_next + 1 < cache->group_end ? cache->tidy_next + 1 : 0;
        struct kvk_group *group = cache->groups[cache->tidy_next];
        if (group == NULL || group->space->is_public) {
            continue;
        }
        looked++;
        struct kvk_space *space = group->space;
        bool used = space->reference_count > 0;
        space->reference_count += used ? 1 : 0; /* stays while the lock is dropped */
        for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
            if (!group->tiers[i].present) {
                continue;
            }
            ahead_give(cache, group, (enum kvk_tier)i);
            if (!used) {
                empty_give(cache, group, (enum kvk_tier)i);
            } else if (back_ahead_drops(cache, group, (enum kvk_tier)i)) {
                backs++;
            }
        }
        space->reference_count -= used ? 1 : 0;
    }
    (void)kvk_tier_punch_drops(cache);
}
