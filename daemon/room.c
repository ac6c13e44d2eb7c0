/*
 * Reserving slots: admission, taking, evicting, and saying why not.
 */
#include "daemon/room_internal.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/log.h"

#define RECORD_EVICTIONS_MAX 1024 /* for one thing that is larger than a record */
#define BLOCK_ID_EVICTIONS_MAX 64 /* for one id, since a victim may stay as a hollow ancestor */

/* ---- Refusals ---- */

void kvk_refusal_note(struct kvk_cache *cache, const struct kvk_caller *caller,
                      const struct kvk_tenant *tenant, uint64_t sequence_id, uint64_t needed_bytes,
                      const struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (caller != NULL && caller->call == NULL) {
        return; /* a part of a call that goes on without it: nobody was refused */
    }
    struct kvk_refusal *refusal = &cache->refusals[cache->refusal_count % KVK_REFUSAL_COUNT];
    *refusal = (struct kvk_refusal){
        .time_ns = kvk_clock_now(cache->clock),
        .tenant = tenant,
        .call = caller != NULL ? caller->call : "",
        .sequence_id = sequence_id,
        .needed_bytes = needed_bytes,
    };
    if (error != NULL) {
        refusal->error = *error;
    }
    cache->refusal_count++;
    cache->stats.refusals++;
    if (tenant != NULL) {
        struct kvk_tenant_usage *usage = &kvk_tenant_state_of(cache, tenant)->usage;
        usage->refusals++;
        usage->limit_refusals += refusal->error.cause == KVK_CAUSE_TENANT_LIMIT ? 1 : 0;
    }
}

void kvk_refusal_amend(struct kvk_cache *cache, const struct kvk_error *error)
{
    KVK_ASSERT(cache->refusal_count > 0);
    cache->refusals[(cache->refusal_count - 1) % KVK_REFUSAL_COUNT].error = *error;
}

static uint64_t active_bytes(const struct kvk_tier_state *tier)
{
    uint64_t others = tier->leased_bytes + tier->copying_bytes + tier->quarantine_bytes;
    KVK_ASSERT(tier->bound_bytes >= others);
    return tier->bound_bytes - others;
}

/* What takes most of the room, and when trying again may help. */
static enum kvk_cause dominant_cause(const struct kvk_tier_state *tier, uint64_t needed_bytes,
                                     uint64_t *retry_ms)
{
    const struct {
        uint64_t bytes;
        enum kvk_cause cause;
        uint64_t retry_ms;
    } reasons[] = {
        {active_bytes(tier), KVK_CAUSE_POOL_ACTIVE, 1000},
        {tier->leased_bytes, KVK_CAUSE_POOL_LEASED, 500},
        {tier->growth_bytes, KVK_CAUSE_GROWTH_RESERVED, 1000},
        {tier->quarantine_bytes, KVK_CAUSE_QUARANTINE, 500},
        {tier->copying_bytes, KVK_CAUSE_COPIES_IN_FLIGHT, 20},
    };
    *retry_ms = 0;
    if (needed_bytes > tier->pool.limit_bytes) {
        return KVK_CAUSE_TOO_LARGE;
    }
    if (tier->bound_bytes + tier->growth_bytes + needed_bytes <= tier->pool.limit_bytes) {
        *retry_ms = 500;
        return KVK_CAUSE_SLABS_SCATTERED;
    }
    size_t most = 0;
    for (size_t i = 1; i < sizeof(reasons) / sizeof(reasons[0]); i++) {
        most = reasons[i].bytes > reasons[most].bytes ? i : most;
    }
    *retry_ms = reasons[most].retry_ms;
    return reasons[most].cause;
}

static const char *cause_sentence(enum kvk_cause cause)
{
    if (cause == KVK_CAUSE_TOO_LARGE) {
        return "more than the whole tier";
    }
    if (cause == KVK_CAUSE_SLABS_SCATTERED) {
        return "free only in slabs of other geometries that are in use";
    }
    if (cause == KVK_CAUSE_POOL_LEASED) {
        return "leases hold it";
    }
    if (cause == KVK_CAUSE_GROWTH_RESERVED) {
        return "kept for the growth of running sequences";
    }
    if (cause == KVK_CAUSE_QUARANTINE) {
        return "live processes may still write there";
    }
    if (cause == KVK_CAUSE_COPIES_IN_FLIGHT) {
        return "copies are under way there";
    }
    return "active sequences fill it";
}

/* Is it for the tenant's limit, or for what others are guaranteed, that there is no room? Where its
 * limit is reached and its own idle blocks could not go, it is for that too; but not where the pool
 * has no room for anybody. */
static enum kvk_quota_verdict quota_verdict(const struct kvk_cache *cache,
                                            const struct kvk_tenant *tenant, enum kvk_tier tier,
                                            uint64_t needed_bytes)
{
    const struct kvk_tier_state *state = &cache->tiers[tier];
    enum kvk_quota_verdict verdict = kvk_quota_admits(cache, tenant, tier, needed_bytes, 0, 0);
    bool has_room = state->bound_bytes + state->growth_bytes + state->stray_bytes + needed_bytes <=
                    state->pool.limit_bytes;
    if (verdict == KVK_QUOTA_GUARANTEED && !has_room) {
        return KVK_QUOTA_OK;
    }
    if (verdict == KVK_QUOTA_OK && has_room &&
        kvk_quota_is_full(cache, tenant, tier, needed_bytes)) {
        return KVK_QUOTA_LIMIT;
    }
    return verdict;
}

enum kvk_status kvk_room_refuse(struct kvk_cache *cache, enum kvk_tier tier, uint64_t needed_bytes,
                                struct kvk_space *space, uint64_t sequence_id,
                                const struct kvk_caller *caller, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_tier_state *state = &cache->tiers[tier];
    const char *name = tier == KVK_TIER_DEVICE ? "device" : "host";
    struct kvk_error refusal;
    uint64_t retry_ms = 0;
    enum kvk_status status;
    enum kvk_quota_verdict verdict = quota_verdict(cache, space->tenant, tier, needed_bytes);
    if (state->device != NULL && verdict != KVK_QUOTA_OK) {
        status = kvk_quota_fail(cache, space->tenant, tier, needed_bytes, verdict, &refusal);
    } else if (state->device == NULL) {
        status = kvk_fail(&refusal, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "tier",
                          "this daemon has no %s tier", name);
    } else {
        enum kvk_cause cause = dominant_cause(state, needed_bytes, &retry_ms);
        status = kvk_fail_limit(
            &refusal, KVK_EXHAUSTED, cause, "", needed_bytes, state->pool.limit_bytes,
            "%llu bytes do not fit in the %s tier of %llu (active %llu, leased %llu, kept %llu): "
            "%s",
            (unsigned long long)needed_bytes, name, (unsigned long long)state->pool.limit_bytes,
            (unsigned long long)active_bytes(state), (unsigned long long)state->leased_bytes,
            (unsigned long long)state->growth_bytes, cause_sentence(cause));
        kvk_error_retry(&refusal, retry_ms);
    }
    bool is_quiet = caller == NULL || caller->call == NULL; /* nobody is told */
    if (!is_quiet) {
        const struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, sequence_id);
        kvk_advise(cache, tier, needed_bytes, space, sequence, &refusal);
    }
    kvk_refusal_note(cache, caller, space->tenant, sequence_id, needed_bytes, &refusal);
    if (error != NULL) {
        *error = refusal;
    }
    return status;
}

/* ---- Steps that need no waiting ---- */

bool kvk_room_grow(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                   uint32_t place)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_group_tier *at = &group->tiers[tier];
    uint32_t slab = kvk_arena_grow(&at->arena);
    KVK_ASSERT(slab == place);
    KVK_ASSERT(at->places[slab] != KVK_PLACE_LEAVING);
    KVK_ASSERT(at->places[slab] >= at->arena.slabs[slab].slot_count);
    uint32_t slots = at->arena.slot_count;
    if (kvk_evict_queue_reserve(&at->queue, slots) != KVK_OK ||
        kvk_evict_queue_reserve(&at->clean, slots) != KVK_OK ||
        kvk_evict_queue_reserve(&at->held, slots) != KVK_OK) {
        kvk_arena_shrink(&at->arena, slab);
        return false;
    }
    return true;
}

bool kvk_room_apply(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                    const struct kvk_room_choice *choice)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    switch (choice->step) {
    case KVK_ROOM_TAKE:
        return true;
    case KVK_ROOM_GROW:
        return kvk_room_grow(cache, group, tier, choice->place);
    case KVK_ROOM_EVICT:
        if (choice->by_limit) {
            kvk_tenant_state_of(cache, group->space->tenant)->usage.limit_evictions++;
        } else {
            at->own_evictions_due =
                at->own_evictions_left == 0 ? choice->due : at->own_evictions_due;
            at->own_evictions_left =
                (at->own_evictions_left == 0 ? at->arena.slab_slots : at->own_evictions_left) - 1;
        }
        kvk_gone_begin(cache, choice->by_limit ? KVK_GONE_QUOTA : KVK_GONE_EVICTED, group->space);
        kvk_block_drop_copy(cache, choice->victim, choice->victim_tier, true);
        kvk_gone_end(cache);
        return true;
    case KVK_ROOM_BACK:
    case KVK_ROOM_HAND_OVER:
    case KVK_ROOM_DEMOTE:
    case KVK_ROOM_VACATE:
    case KVK_ROOM_COMPACT:
    case KVK_ROOM_PUNCH:
    case KVK_ROOM_WAIT:
    case KVK_ROOM_LIMIT:
    case KVK_ROOM_NOTHING:
        break;
    }
    return false;
}

static uint32_t child_with_bytes(const struct kvk_cache *cache, uint32_t parent)
{
    uint32_t child = kvk_index_first_child(cache->index, KVK_ROOT_NONE, parent);
    while ((kvk_index_block(cache->index, child)->tier_mask & KVK_MEMORY_TIER_MASK) == 0) {
        child = kvk_index_next_child(cache->index, child);
    }
    return child;
}

static void forget_all_copies(struct kvk_cache *cache, uint32_t id)
{
    /* The last drop may free the block: the mask is read before. */
    uint8_t mask = kvk_index_block(cache->index, id)->tier_mask;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        if ((mask & (1U << i)) != 0) {
            kvk_block_drop_copy(cache, id, (enum kvk_tier)i, true);
        }
    }
}

void kvk_room_forget_tree(struct kvk_cache *cache, uint32_t top)
{
    const struct kvk_block *block = kvk_index_block(cache->index, top);
    bool windowed = kvk_group_of(cache, block)->windowed;
    while (!windowed && block->memory_children > 0) {
        uint32_t leaf = top;
        while (kvk_index_block(cache->index, leaf)->memory_children > 0) {
            leaf = child_with_bytes(cache, leaf);
        }
        forget_all_copies(cache, leaf);
    }
    forget_all_copies(cache, top);
}

bool kvk_room_slab_leave(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                         uint32_t slab)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_tier_state *state = &cache->tiers[tier];
    if (group->space->is_public || kvk_tier_is_lent(at)) {
        return false; /* sealed memory cannot be punched: it goes with its space; nor what others
                         have opened */
    }
    struct kvk_punch *punch = calloc(1, sizeof(*punch));
    if (punch == NULL) {
        return false;
    }
    *punch = (struct kvk_punch){
        .group = group,
        .tier = tier,
        .slab = slab,
        .size_bytes = at->arena.slabs[slab].slot_count * at->arena.slot_bytes,
        .next = cache->punches,
    };
    cache->punches = punch;
    kvk_arena_shrink(&at->arena, slab);
    at->places[slab] = KVK_PLACE_LEAVING;
    at->leave_count++;
    state->punch_bytes += punch->size_bytes;
    state->pool.charge_bytes += punch->size_bytes;
    cache->stats.slabs_moved++;
    return true;
}

/* ---- Slots ---- */

static enum kvk_status slot_get(struct kvk_cache *cache, struct kvk_group *group,
                                enum kvk_tier tier, const struct kvk_room_want *want,
                                uint32_t *slot)
{
    for (;;) {
        struct kvk_room_choice choice;
        *slot = kvk_slot_take(cache, group, tier);
        if (*slot != KVK_SLOT_NONE) {
            return KVK_OK;
        }
        kvk_room_choose(cache, group, tier, want, &choice);
        if (choice.step == KVK_ROOM_NOTHING || choice.step == KVK_ROOM_LIMIT) {
            return KVK_EXHAUSTED;
        }
        if (!kvk_room_apply(cache, group, tier, &choice)) {
            return KVK_WOULD_BLOCK;
        }
    }
}

/* Would the bytes fit if everything that may go went? */
static bool is_admitted(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                        enum kvk_tier at, uint64_t needed_bytes, uint64_t growth_bytes,
                        uint64_t own_growth_bytes)
{
    const struct kvk_tier_state *tier = &cache->tiers[at];
    KVK_ASSERT(own_growth_bytes <= tier->growth_bytes);
    if (kvk_quota_admits(cache, tenant, at, needed_bytes, growth_bytes, own_growth_bytes) !=
        KVK_QUOTA_OK) {
        return false;
    }
    uint64_t limit = tier->pool.limit_bytes;
    uint64_t others = tier->growth_bytes - own_growth_bytes;
    uint64_t taken = tier->bound_bytes + others + tier->stray_bytes;
    return taken <= limit && growth_bytes <= limit - taken &&
           needed_bytes <= limit - taken - growth_bytes;
}

/* What cannot be had now is refused; but not for a block that only the daemon's own work
 * keeps, for a moment. */
static enum kvk_status refuse_or_wait(struct kvk_cache *cache, enum kvk_tier tier,
                                      uint64_t needed_bytes, struct kvk_space *space,
                                      uint64_t sequence_id, const struct kvk_caller *caller,
                                      struct kvk_error *error)
{
    if (kvk_upkeep_keeps_room(cache) && cache->threads &&
        needed_bytes <= cache->tiers[tier].pool.limit_bytes) {
        return KVK_WOULD_BLOCK;
    }
    return kvk_room_refuse(cache, tier, needed_bytes, space, sequence_id, caller, error);
}

enum kvk_status kvk_room_slot(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                              const struct kvk_caller *caller, uint32_t *slot,
                              struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    enum kvk_status there = kvk_tier_check_there(cache, tier, error);
    if (there != KVK_OK) {
        return there;
    }
    bool admitted = group->tiers[tier].present &&
                    (caller == NULL || is_admitted(cache, group->space->tenant, tier,
                                                   group->forms[tier].block_bytes, 0, 0));
    enum kvk_status status = admitted ? slot_get(cache, group, tier, NULL, slot) : KVK_EXHAUSTED;
    if (status == KVK_EXHAUSTED && caller != NULL) {
        return refuse_or_wait(cache, tier, group->forms[tier].block_bytes, group->space, 0, caller,
                              error);
    }
    return status;
}

void kvk_room_slot_give(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                        uint32_t slot)
{
    kvk_slot_give(cache, group, tier, slot);
}

/* ---- Blocks ---- */

/* May the group's victims be forgotten for want of ids? Not those of another tenant within its
 * guarantee. */
static bool may_lose_id(const struct kvk_cache *cache, const struct kvk_group *group,
                        enum kvk_tier tier, const struct kvk_tenant *asking)
{
    const struct kvk_tenant *tenant = group->space->tenant;
    return tenant == asking ||
           kvk_quota_spare(cache, tenant, tier) >= group->forms[tier].block_bytes;
}

/* Whose record is worth least, among those that may go: leaves that nobody holds. */
static uint32_t record_victim(struct kvk_cache *cache, const struct kvk_tenant *asking,
                              bool own_alone)
{
    uint64_t now = kvk_policy_now(cache);
    uint32_t victim = KVK_BLOCK_NONE;
    double least = 0;
    for (int i = KVK_TIER_COUNT - 1; i >= 0 && victim == KVK_BLOCK_NONE; i--) {
        uint32_t number = 0;
        struct kvk_group *group;
        while ((group = kvk_room_next_group(cache, (enum kvk_tier)i, &number)) != NULL) {
            double score;
            if (own_alone && group->space->tenant != asking) {
                continue;
            }
            uint32_t head = kvk_evict_queue_peek(&group->tiers[i].queue, now, &score);
            if (head == KVK_BLOCK_NONE && kvk_room_is_last_memory(group, (enum kvk_tier)i)) {
                head = kvk_evict_queue_peek(&group->tiers[i].clean, now, &score);
            }
            if (head != KVK_BLOCK_NONE && may_lose_id(cache, group, (enum kvk_tier)i, asking) &&
                kvk_block_is_leaf(group, kvk_index_block(cache->index, head)) &&
                (victim == KVK_BLOCK_NONE || score < least)) {
                victim = head;
                least = score;
            }
        }
    }
    return victim;
}

static bool record_forget(struct kvk_cache *cache, const struct kvk_tenant *asking, bool own_alone)
{
    if (own_alone &&
        kvk_tenant_state_of(cache, asking)->quota.over_quota == KVK_OVER_QUOTA_REFUSE) {
        return false;
    }
    uint32_t victim = record_victim(cache, asking, own_alone);
    if (victim == KVK_BLOCK_NONE) {
        return false;
    }
    kvk_tenant_state_of(cache, asking)->usage.limit_evictions += own_alone ? 1 : 0;
    kvk_gone_begin(cache, own_alone ? KVK_GONE_QUOTA : KVK_GONE_LIMIT, NULL);
    forget_all_copies(cache, victim);
    kvk_gone_end(cache);
    return true;
}

static bool has_id(const struct kvk_cache *cache, const struct kvk_group *group, bool *own_alone)
{
    *own_alone = !kvk_metadata_has_room(cache, group);
    return !*own_alone && kvk_index_block_count(cache->index) < cache->config->blocks;
}

bool kvk_room_id_free(struct kvk_cache *cache, const struct kvk_group *group)
{
    const struct kvk_tenant *asking = group->space->tenant;
    bool own_alone;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    for (uint32_t tries = 0; tries < BLOCK_ID_EVICTIONS_MAX; tries++) {
        if (has_id(cache, group, &own_alone)) {
            return true;
        }
        if (!record_forget(cache, asking, own_alone)) {
            return false;
        }
    }
    return has_id(cache, group, &own_alone);
}

void kvk_room_records_free(struct kvk_cache *cache, const struct kvk_tenant *tenant, uint64_t bytes)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    for (uint32_t tries = 0;
         tries < RECORD_EVICTIONS_MAX && kvk_metadata_bytes(cache, tenant) > bytes; tries++) {
        if (!record_forget(cache, tenant, true)) {
            return;
        }
    }
}

static enum kvk_status refuse_blocks(struct kvk_cache *cache, struct kvk_space *space,
                                     const struct kvk_room_want *want,
                                     const struct kvk_caller *caller, struct kvk_error *error)
{
    struct kvk_error refusal;
    enum kvk_status status = KVK_OK;
    for (uint32_t g = 0; g < space->group_count && status == KVK_OK; g++) {
        if (want->counts[g] > 0 && !kvk_metadata_has_room(cache, space->groups[g])) {
            status = kvk_metadata_refuse_block(cache, space->groups[g], &refusal);
        }
    }
    if (status == KVK_OK) {
        status =
            kvk_fail_limit(&refusal, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "blocks",
                           kvk_index_block_count(cache->index), cache->config->blocks,
                           "all %u blocks of the configuration are in use", cache->config->blocks);
        kvk_error_retry(&refusal, 1000);
    }
    kvk_refusal_note(cache, caller, space->tenant, want->sequence_id, 0, &refusal);
    if (error != NULL) {
        *error = refusal;
    }
    return status;
}

static void blocks_give(struct kvk_cache *cache, const struct kvk_room_want *want,
                        uint32_t *const blocks[KVK_GROUP_COUNT_MAX],
                        const uint32_t done[KVK_GROUP_COUNT_MAX])
{
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        for (uint32_t i = 0; i < done[g]; i++) {
            kvk_block_unpin(cache, blocks[g][i], want->tier);
            kvk_block_release(cache, blocks[g][i], false);
        }
    }
}

/* Slot by slot. KVK_EXHAUSTED with *ids: it is for ids of blocks that there is no room. */
static enum kvk_status blocks_get(struct kvk_cache *cache, struct kvk_space *space,
                                  const struct kvk_room_want *want,
                                  uint32_t *blocks[KVK_GROUP_COUNT_MAX], bool *ids)
{
    uint32_t done[KVK_GROUP_COUNT_MAX] = {0};
    enum kvk_status status = KVK_OK;
    for (uint32_t g = 0; g < space->group_count && status == KVK_OK; g++) {
        struct kvk_group *group = space->groups[g];
        while (done[g] < want->counts[g]) {
            uint32_t slot;
            status = slot_get(cache, group, want->tier, want, &slot);
            if (status != KVK_OK) {
                break;
            }
            uint32_t block = KVK_BLOCK_NONE;
            if (kvk_room_id_free(cache, group)) {
                block = kvk_block_create(cache, group, want->tier, slot);
            }
            if (block == KVK_BLOCK_NONE) {
                kvk_slot_give(cache, group, want->tier, slot);
                *ids = true;
                status = KVK_EXHAUSTED;
                break;
            }
            blocks[g][done[g]++] = block;
        }
    }
    if (status != KVK_OK) {
        blocks_give(cache, want, blocks, done);
    }
    return status;
}

uint64_t kvk_room_want_bytes(const struct kvk_space *space, const struct kvk_room_want *want)
{
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        bytes += want->counts[g] * space->groups[g]->forms[want->tier].block_bytes;
    }
    return bytes;
}

static bool want_is_present(const struct kvk_space *space, const struct kvk_room_want *want)
{
    for (uint32_t g = 0; g < space->group_count; g++) {
        if (want->counts[g] > 0 && !space->groups[g]->tiers[want->tier].present) {
            return false;
        }
    }
    return true;
}

enum kvk_status kvk_room_reserve(struct kvk_cache *cache, struct kvk_space *space,
                                 const struct kvk_room_want *want,
                                 uint32_t *blocks[KVK_GROUP_COUNT_MAX],
                                 const struct kvk_caller *caller, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    enum kvk_status there = kvk_tier_check_there(cache, want->tier, error);
    if (there != KVK_OK) {
        return there;
    }
    uint64_t needed = kvk_room_want_bytes(space, want);
    if (!want_is_present(space, want) || !is_admitted(cache, space->tenant, want->tier, needed,
                                                      want->growth_bytes, want->own_growth_bytes)) {
        return refuse_or_wait(cache, want->tier, needed + want->growth_bytes, space,
                              want->sequence_id, caller, error);
    }
    bool ids = false;
    enum kvk_status status = blocks_get(cache, space, want, blocks, &ids);
    if (status != KVK_EXHAUSTED) {
        return status;
    }
    return ids ? refuse_blocks(cache, space, want, caller, error)
               : refuse_or_wait(cache, want->tier, needed, space, want->sequence_id, caller, error);
}
