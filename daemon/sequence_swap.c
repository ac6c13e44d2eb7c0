/*
 * SwapOut and SwapIn: what only one sequence needs moves to the host tier and back, byte for byte.
 *
 * Room is taken for all of it before anything moves, so that either call moves everything or
 * nothing. A sequence that is swapped out keeps its holds and gives up its pins: what it shares
 * stays wherever others, or eviction, want it.
 */
#include <stdlib.h>

#include "base/assert.h"
#include "daemon/heal.h"
#include "daemon/sequence_internal.h"

/* ---- Bringing blocks to a tier ---- */

/* A slot in `tier` for each block of the list. What was taken is the caller's, also on failure. */
static enum kvk_status take_slots_drops(struct kvk_cache *cache,
                                        const struct kvk_sequence *sequence, enum kvk_tier tier,
                                        const struct kvk_relocation *list, uint32_t count,
                                        struct kvk_move *moves, uint32_t *taken,
                                        const struct kvk_caller *caller, struct kvk_error *error)
{
    struct kvk_space *space = sequence->space;
    *taken = 0;
    while (*taken < count) {
        const struct kvk_relocation *at = &list[*taken];
        uint32_t slot = KVK_SLOT_NONE;
        enum kvk_status status =
            kvk_room_slot(cache, space->groups[at->group], tier, caller, &slot, error);
        if (status == KVK_OK) {
            moves[*taken] = (struct kvk_move){
                .block = sequence->groups[at->group].blocks[at->index], .slot = slot};
            (*taken)++;
            continue;
        }
        if (status == KVK_EXHAUSTED && error != NULL && caller->call != NULL) {
            /* One block has no room; what would help is room for all that are left. */
            uint64_t rest_bytes = 0;
            for (uint32_t i = *taken; i < count; i++) {
                rest_bytes += space->groups[list[i].group]->forms[tier].block_bytes;
            }
            kvk_advise(cache, tier, rest_bytes, space, sequence, error);
            kvk_refusal_amend(cache, error);
        }
        if (status != KVK_WOULD_BLOCK || !caller->may_block) {
            return status;
        }
        struct kvk_room_want want = {.tier = tier, .sequence_id = sequence->id};
        for (uint32_t i = *taken; i < count; i++) {
            want.counts[list[i].group]++;
        }
        status = kvk_room_make_drops(cache, space, &want, caller, error);
        if (status != KVK_OK) {
            return status;
        }
        if (kvk_sequence_is_lost(sequence)) {
            return kvk_fail(error, KVK_ABORTED, KVK_CAUSE_SESSION_ENDED, "session_id",
                            "the instance ended while room was made");
        }
    }
    return KVK_OK;
}

static void give_slots(struct kvk_cache *cache, const struct kvk_sequence *sequence,
                       enum kvk_tier tier, const struct kvk_relocation *list,
                       const struct kvk_move *moves, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        kvk_room_slot_give(cache, sequence->space->groups[list[i].group], tier, moves[i].slot);
    }
}

/* The block's bytes are in `tier` now: our pin with them. */
static void pin_moved(struct kvk_cache *cache, struct kvk_sequence *sequence,
                      const struct kvk_relocation *at, enum kvk_tier tier)
{
    struct kvk_sequence_group *table = &sequence->groups[at->group];
    uint32_t id = table->blocks[at->index];
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    KVK_ASSERT(table->pins[at->index] != 0);
    enum kvk_tier before = (enum kvk_tier)(table->pins[at->index] - 1);
    if (before == tier) {
        return;
    }
    table->pins[at->index] = (uint8_t)(tier + 1);
    if (!kvk_block_is_whole(block)) {
        return; /* moved, and its pins with it */
    }
    kvk_block_pin(cache, id, tier);
    kvk_block_unpin(cache, id, before);
    if ((block->tier_mask & (1U << before)) != 0 && block->pin_count[before] == 0 &&
        block->transfer_count == 0 && !kvk_group_is_compact_below(kvk_group_of(cache, block))) {
        kvk_block_drop_copy(cache, id, before, false);
    }
}

/* Put those that have a slot in `tier` behind the others, and borrow them, so that they stay there
 * while the others are copied; the slots taken for them go back. How many are to be copied. */
static uint32_t set_aside(struct kvk_cache *cache, const struct kvk_sequence *sequence,
                          enum kvk_tier tier, const struct kvk_relocation *list,
                          struct kvk_move *moves, uint32_t count)
{
    uint32_t left = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t id = moves[i].block;
        if (kvk_index_block(cache->index, id)->slot[tier] != KVK_SLOT_NONE) {
            give_slots(cache, sequence, tier, &list[i], &moves[i], 1);
            kvk_block_borrow(cache, id, tier);
        } else {
            struct kvk_move move = moves[i];
            moves[i] = moves[left];
            moves[left++] = move;
        }
    }
    return left;
}

/* Are the bytes there good? A damaged copy keeps its slot while somebody pins it. */
static enum kvk_status check_there(const struct kvk_cache *cache, enum kvk_tier tier,
                                   const struct kvk_move *moves, uint32_t count,
                                   struct kvk_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_block *block = kvk_index_block(cache->index, moves[i].block);
        if (kvk_block_is_whole(block) && (block->tier_mask & (1U << tier)) == 0) {
            return kvk_fail(error, KVK_DATA_LOSS, KVK_CAUSE_CHECKSUM, "",
                            "a damaged copy of a block is still in use where it is to come");
        }
    }
    return KVK_OK;
}

/* What can never fit in the tenant's limit is refused before its own idle blocks go for it. */
static enum kvk_status check_quota(struct kvk_cache *cache, const struct kvk_sequence *sequence,
                                   enum kvk_tier tier, const struct kvk_relocation *list,
                                   uint32_t count, const struct kvk_caller *caller,
                                   struct kvk_error *error)
{
    struct kvk_space *space = sequence->space;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t id = sequence->groups[list[i].group].blocks[list[i].index];
        bool there = kvk_index_block(cache->index, id)->slot[tier] != KVK_SLOT_NONE;
        bytes += there ? 0 : space->groups[list[i].group]->forms[tier].block_bytes;
    }
    if (cache->tiers[tier].device == NULL ||
        kvk_quota_admits(cache, space->tenant, tier, bytes, 0, 0) == KVK_QUOTA_OK) {
        return KVK_OK; /* where there is no tier, it is said so below */
    }
    return kvk_room_refuse(cache, tier, bytes, space, sequence->id, caller, error);
}

static enum kvk_status bring_once_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                        enum kvk_tier tier, const struct kvk_relocation *list,
                                        uint32_t count, uint32_t *moved,
                                        const struct kvk_caller *caller, struct kvk_error *error)
{
    struct kvk_move *moves = calloc(count, sizeof(*moves));
    if (moves == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", "no memory to move blocks");
    }
    uint32_t taken = 0;
    enum kvk_status status = KVK_OK;
    if (moved == NULL) {
        status = check_quota(cache, sequence, tier, list, count, caller, error);
    }
    if (status == KVK_OK) {
        status = take_slots_drops(cache, sequence, tier, list, count, moves, &taken, caller, error);
    }
    if (status == KVK_EXHAUSTED && moved != NULL) {
        status = KVK_OK; /* as many as there is room for */
    }
    if (status != KVK_OK) {
        give_slots(cache, sequence, tier, list, moves, taken);
        free(moves);
        return status;
    }
    uint32_t left = set_aside(cache, sequence, tier, list, moves, taken);
    status = kvk_tier_copy_drops(cache, tier, moves, left, error);
    if (status == KVK_OK) {
        status = check_there(cache, tier, moves, taken, error);
    }
    for (uint32_t i = 0; i < taken && status == KVK_OK; i++) {
        pin_moved(cache, sequence, &list[i], tier);
    }
    for (uint32_t i = left; i < taken; i++) {
        kvk_block_return(cache, moves[i].block, tier);
    }
    free(moves);
    if (status == KVK_OK && moved != NULL) {
        *moved = taken;
    }
    return status;
}

/* What was damaged of these, and is whole again from disk. */
static bool heal_drops(struct kvk_cache *cache, const struct kvk_sequence *sequence,
                       const struct kvk_relocation *list, uint32_t count)
{
    bool any = false;
    for (uint32_t i = 0; i < count && !kvk_sequence_is_lost(sequence); i++) {
        any = kvk_block_heal_drops(cache, sequence->groups[list[i].group].blocks[list[i].index]) ||
              any;
    }
    return any && !kvk_sequence_is_lost(sequence);
}

enum kvk_status kvk_sequence_bring_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                         enum kvk_tier tier, const struct kvk_relocation *list,
                                         uint32_t count, uint32_t *moved,
                                         const struct kvk_caller *caller, struct kvk_error *error)
{
    KVK_ASSERT(sequence->busy);
    enum kvk_status status =
        bring_once_drops(cache, sequence, tier, list, count, moved, caller, error);
    if (status == KVK_DATA_LOSS && heal_drops(cache, sequence, list, count)) {
        status = bring_once_drops(cache, sequence, tier, list, count, moved, caller, error);
    }
    return status;
}

/* ---- What has to move ---- */

struct swap {
    struct kvk_relocation *list; /* [count], ours */
    uint32_t count;
    uint64_t bytes;
    uint64_t first_token; /* of the first block that moves */
};

/* Does nothing but this sequence keep the block on the device? An unsealed one has a single copy,
 * so it moves only where nobody else holds it. */
static bool leaves_device(const struct kvk_block *block)
{
    if (block->slot[KVK_TIER_DEVICE] == KVK_SLOT_NONE) {
        return false;
    }
    return kvk_block_is_whole(block) ? block->pin_count[KVK_TIER_DEVICE] == 1
                                     : block->hold_count == 1;
}

static bool comes_to_device(const struct kvk_block *block)
{
    return block->slot[KVK_TIER_DEVICE] == KVK_SLOT_NONE;
}

static enum kvk_status swap_list(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                                 bool (*wanted)(const struct kvk_block *block), struct swap *swap,
                                 struct kvk_error *error)
{
    const struct kvk_space *space = sequence->space;
    uint32_t block_count = sequence->groups[0].block_count;
    *swap = (struct swap){0};
    size_t most = (size_t)block_count * space->group_count;
    swap->list = malloc((most == 0 ? 1 : most) * sizeof(*swap->list));
    if (swap->list == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", "no memory to move blocks");
    }
    for (uint32_t i = 0; i < block_count; i++) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            uint32_t id = sequence->groups[g].blocks[i];
            if (id == KVK_BLOCK_NONE || !wanted(kvk_index_block(cache->index, id)) ||
                kvk_block_is_public(cache, id)) { /* those lie where they are for everybody */
                continue;
            }
            if (swap->count == 0) {
                swap->first_token = (uint64_t)i * space->block_tokens;
            }
            swap->list[swap->count++] = (struct kvk_relocation){.group = g, .index = i};
            swap->bytes += space->groups[g]->block_bytes;
        }
    }
    return KVK_OK;
}

static void drop_all_pins(struct kvk_cache *cache, struct kvk_sequence *sequence)
{
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        for (uint32_t i = sequence->groups[g].block_count; i > 0; i--) {
            kvk_sequence_drop_pin(cache, sequence, g, i - 1);
        }
    }
}

static void take_all_pins(struct kvk_cache *cache, struct kvk_sequence *sequence)
{
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        for (uint32_t i = 0; i < table->block_count; i++) {
            if (table->blocks[i] == KVK_BLOCK_NONE) {
                continue;
            }
            enum kvk_tier tier = kvk_block_tier(kvk_index_block(cache->index, table->blocks[i]));
            kvk_block_pin(cache, table->blocks[i], tier);
            table->pins[i] = (uint8_t)(tier + 1);
        }
    }
}

static void swap_answer(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                        const struct swap *swap, struct kvk_swap_reply *reply,
                        struct kvk_tables *tables)
{
    kvk_sequence_answer(sequence, &reply->sequence);
    kvk_sequence_tables_all(cache, sequence, tables);
    if (swap != NULL && swap->count > 0) {
        reply->moved_blocks = swap->count;
        reply->moved_bytes = swap->bytes;
        reply->load_ns = kvk_tier_load_ns(cache, swap->bytes);
        reply->recompute_ns =
            kvk_space_recompute_ns(sequence->space, swap->first_token, sequence->length);
    }
}

/* Move the list, and time it. The sequence is there, and not busy, only where this is KVK_OK or
 * *gone stays false. */
static enum kvk_status swap_run_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                      enum kvk_tier tier, const struct swap *swap,
                                      const struct kvk_caller *caller, bool *gone,
                                      struct kvk_swap_reply *reply, struct kvk_error *error)
{
    uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
    enum kvk_status status = KVK_OK;
    *gone = false;
    kvk_sequence_busy_begin(sequence);
    if (swap->count > 0) {
        status = kvk_sequence_bring_drops(cache, sequence, tier, swap->list, swap->count, NULL,
                                          caller, error);
    }
    enum kvk_status ended = kvk_sequence_busy_end_drops(cache, sequence, error);
    if (ended != KVK_OK) {
        *gone = true;
        return ended;
    }
    reply->copy_ns = swap->count > 0 ? kvk_clock_now(kvk_clock_monotonic()) - begun_ns : 0;
    return status;
}

/* ---- The calls ---- */

static enum kvk_status check_swap(const struct kvk_sequence *sequence, struct kvk_error *error)
{
    if (sequence->sealed < sequence->length) {
        return kvk_fail_limit(
            error, KVK_PRECONDITION, KVK_CAUSE_GRANT_UNWRITTEN, "sequence_id", sequence->sealed,
            sequence->length, "tokens %llu to %llu are granted and not sealed",
            (unsigned long long)sequence->sealed, (unsigned long long)sequence->length);
    }
    return kvk_sequence_check_unwritten(sequence, error);
}

/* What is swapped out comes back byte for byte: not from where it is rounded. */
static enum kvk_status check_host_format(const struct kvk_sequence *sequence,
                                         struct kvk_error *error)
{
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        if (kvk_group_is_compact_below(sequence->space->groups[g])) {
            return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "host_format",
                            "group %u of the space has a compact host tier, and what is swapped "
                            "out must come back byte for byte: close the sequence, and open it "
                            "again by its tokens",
                            g);
        }
    }
    return KVK_OK;
}

static enum kvk_status swap_out_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                      const struct kvk_caller *caller, struct kvk_swap_reply *reply,
                                      struct kvk_tables *tables, struct kvk_error *error)
{
    if (sequence->state == KVK_SEQUENCE_SWAPPED_OUT) {
        swap_answer(cache, sequence, NULL, reply, tables);
        return KVK_OK;
    }
    struct swap swap = {.list = NULL};
    enum kvk_status status = check_swap(sequence, error);
    if (status == KVK_OK) {
        status = check_host_format(sequence, error);
    }
    if (status == KVK_OK) {
        status = swap_list(cache, sequence, leaves_device, &swap, error);
    }
    if (status != KVK_OK) {
        return kvk_sequence_refused(cache, caller, sequence, status, error);
    }
    bool gone = false;
    if (swap.count > 0 && !caller->may_block) {
        status = KVK_WOULD_BLOCK;
    } else {
        status = swap_run_drops(cache, sequence, KVK_TIER_HOST, &swap, caller, &gone, reply, error);
    }
    if (status == KVK_OK) {
        /* Its pins, and the room that was kept for it: others run now. */
        drop_all_pins(cache, sequence);
        kvk_sequence_keep_growth(cache, sequence, 0);
        sequence->growth_tokens = 0;
        sequence->state = KVK_SEQUENCE_SWAPPED_OUT;
        cache->stats.swapped_out_blocks += swap.count;
        cache->stats.swapped_out_bytes += swap.bytes;
        swap_answer(cache, sequence, &swap, reply, tables);
    }
    free(swap.list);
    return status;
}

/* An unsealed block has a single copy: while somebody else reads it under a ticket, it stays. */
static enum kvk_status check_swap_in(const struct kvk_cache *cache,
                                     const struct kvk_sequence *sequence, const struct swap *swap,
                                     struct kvk_error *error)
{
    for (uint32_t i = 0; i < swap->count; i++) {
        const struct kvk_relocation *at = &swap->list[i];
        const struct kvk_block *block =
            kvk_index_block(cache->index, sequence->groups[at->group].blocks[at->index]);
        if (!kvk_block_is_whole(block) && block->hold_count > 1) {
            kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_BUSY, "sequence_id",
                     "an open transfer uses the sequence's last block");
            kvk_error_retry(error, 10);
            return KVK_UNAVAILABLE;
        }
    }
    return KVK_OK;
}

static enum kvk_status swap_in_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                     const struct kvk_caller *caller, struct kvk_swap_reply *reply,
                                     struct kvk_tables *tables, struct kvk_error *error)
{
    if (sequence->state == KVK_SEQUENCE_RUNNING) {
        swap_answer(cache, sequence, NULL, reply, tables);
        return KVK_OK;
    }
    struct swap swap = {0};
    enum kvk_status status = KVK_OK;
    if (sequence->home == KVK_TIER_DEVICE) {
        status = swap_list(cache, sequence, comes_to_device, &swap, error);
    }
    if (status == KVK_OK) {
        status = check_swap_in(cache, sequence, &swap, error);
    }
    bool gone = false;
    if (status == KVK_OK && swap.count > 0 && !caller->may_block) {
        status = KVK_WOULD_BLOCK;
    } else if (status == KVK_OK) {
        take_all_pins(cache, sequence); /* nothing of it moves while room is made */
        status =
            swap_run_drops(cache, sequence, KVK_TIER_DEVICE, &swap, caller, &gone, reply, error);
        if (status != KVK_OK && !gone) {
            drop_all_pins(cache, sequence);
        }
    }
    if (status == KVK_OK) {
        sequence->state = KVK_SEQUENCE_RUNNING;
        cache->stats.swapped_in_blocks += swap.count;
        cache->stats.swapped_in_bytes += swap.bytes;
        swap_answer(cache, sequence, &swap, reply, tables);
    }
    free(swap.list);
    return status;
}

/* One direction of it, with the lock. */
typedef enum kvk_status (*swap_way)(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                    const struct kvk_caller *caller, struct kvk_swap_reply *reply,
                                    struct kvk_tables *tables, struct kvk_error *error);

static enum kvk_status swap_call(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 uint64_t session_id, uint64_t sequence_id, swap_way way_drops,
                                 struct kvk_swap_reply *reply, struct kvk_tables *tables,
                                 struct kvk_error *error)
{
    struct kvk_session *session;
    struct kvk_sequence *sequence;
    *reply = (struct kvk_swap_reply){0};
    enum kvk_status status = kvk_sequence_lock(cache, caller, session_id, sequence_id,
                                               KVK_WHOLE_TABLE, tables, &session, &sequence, error);
    if (status == KVK_OK) {
        status = way_drops(cache, sequence, caller, reply, tables, error);
    }
    kvk_unlock(&cache->lock);
    return status;
}

enum kvk_status kvk_sequence_swap_out(struct kvk_cache *cache, const struct kvk_caller *caller,
                                      uint64_t session_id, uint64_t sequence_id,
                                      struct kvk_swap_reply *reply, struct kvk_tables *tables,
                                      struct kvk_error *error)
{
    return swap_call(cache, caller, session_id, sequence_id, swap_out_drops, reply, tables, error);
}

enum kvk_status kvk_sequence_swap_in(struct kvk_cache *cache, const struct kvk_caller *caller,
                                     uint64_t session_id, uint64_t sequence_id,
                                     struct kvk_swap_reply *reply, struct kvk_tables *tables,
                                     struct kvk_error *error)
{
    return swap_call(cache, caller, session_id, sequence_id, swap_in_drops, reply, tables, error);
}
