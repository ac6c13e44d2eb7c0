/*
 * Seal: what all ranks have written becomes whole, and what is whole becomes visible.
 *
 * Full blocks of committed tokens are checksummed, sealed and indexed, in the order of the chain.
 * Where another indexed the same block first, the later copy stays private and the two are
 * compared: see twins.c.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "daemon/sequence_internal.h"
#include "daemon/sidecar.h"

#define CHECKSUM_BATCH 256 /* blocks */
#define INDEX_WORK 4       /* what indexing a block costs in references taken */

/* ---- Checksums ---- */

static bool is_unsealed(const struct kvk_cache *cache, uint32_t block)
{
    return block != KVK_BLOCK_NONE && !kvk_block_is_whole(kvk_index_block(cache->index, block));
}

/* Bytes of the blocks in [whole_blocks, end) that are still to be sealed. */
static uint64_t unsealed_bytes(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                               uint64_t end)
{
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        for (uint64_t i = sequence->whole_blocks; i < end; i++) {
            if (is_unsealed(cache, sequence->groups[g].blocks[i])) {
                bytes += sequence->space->groups[g]->block_bytes;
            }
        }
    }
    return bytes;
}

static void checksum_inline(const struct kvk_cache *cache, uint32_t id)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    const struct kvk_group *group = kvk_group_of(cache, block);
    enum kvk_tier tier = kvk_block_tier(block);
    uint64_t *checksums = kvk_block_checksums(cache, block, tier);
    if (group->tiers[tier].regions[0].fd < 0) {
        return; /* memory that the processor cannot read: hashed by the device at its first move */
    }
    for (uint32_t s = 0; s < group->shard_count; s++) {
        checksums[s] =
            kvk_checksum(kvk_block_address(cache, block, tier, s), group->shard_bytes[s]);
    }
}

/* Before anything is noted: all blocks that are to be sealed. */
static enum kvk_status scales_check_drops(struct kvk_cache *cache,
                                          const struct kvk_sequence *sequence, uint64_t end,
                                          bool keep_lock, struct kvk_error *error)
{
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        for (uint64_t i = sequence->whole_blocks; i < end; i++) {
            uint32_t block = sequence->groups[g].blocks[i];
            if (!is_unsealed(cache, block)) {
                continue;
            }
            enum kvk_status status =
                kvk_block_scales_check_drops(cache, block, i, keep_lock, error);
            if (status != KVK_OK) {
                return status;
            }
        }
    }
    return KVK_OK;
}

enum kvk_status kvk_sequence_checksum_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                            uint64_t settled, const struct kvk_caller *caller,
                                            struct kvk_error *error)
{
    KVK_ASSERT(sequence->busy);
    uint64_t end = settled / sequence->space->block_tokens;
    uint64_t work = end > sequence->whole_blocks
                        ? (end - sequence->whole_blocks) * sequence->space->group_count * INDEX_WORK
                        : 0;
    bool is_small = unsealed_bytes(cache, sequence, end) <= KVK_INLINE_BYTES_MAX &&
                    (caller->may_block || work < cache->slice_blocks);
    if (!is_small && !caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    enum kvk_status checked = scales_check_drops(cache, sequence, end, is_small, error);
    if (checked != KVK_OK) {
        return checked;
    }
    uint32_t batch[CHECKSUM_BATCH];
    uint32_t count = 0;
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        for (uint64_t i = sequence->whole_blocks; i < end; i++) {
            uint32_t block = sequence->groups[g].blocks[i];
            if (!is_unsealed(cache, block)) {
                continue;
            }
            if (is_small) {
                checksum_inline(cache, block);
                continue;
            }
            batch[count++] = block;
            if (count < CHECKSUM_BATCH) {
                continue;
            }
            enum kvk_status status = kvk_block_checksum_drops(cache, batch, count, false, error);
            if (status != KVK_OK) {
                return status;
            }
            count = 0;
        }
    }
    return count == 0 ? KVK_OK : kvk_block_checksum_drops(cache, batch, count, false, error);
}

/* ---- Indexing ---- */

static void duplicate_add(struct kvk_cache *cache, struct kvk_settling *settling, uint32_t ours,
                          uint32_t winner)
{
    cache->stats.duplicate_blocks++;
    if (settling->duplicate_count == settling->duplicate_capacity) {
        uint32_t capacity = settling->duplicate_capacity * 2 + 16;
        void *grown = realloc(settling->duplicates, capacity * sizeof(*settling->duplicates));
        if (grown == NULL) {
            return; /* it is not compared then */
        }
        settling->duplicates = grown;
        settling->duplicate_capacity = capacity;
    }
    enum kvk_tier ours_tier = kvk_block_tier(kvk_index_block(cache->index, ours));
    enum kvk_tier winner_tier = kvk_block_tier(kvk_index_block(cache->index, winner));
    kvk_block_borrow(cache, ours, ours_tier);
    kvk_block_borrow(cache, winner, winner_tier);
    settling->duplicates[settling->duplicate_count++] = (struct kvk_duplicate){
        .ours = ours,
        .winner = winner,
        .ours_tier = (uint8_t)ours_tier,
        .winner_tier = (uint8_t)winner_tier,
    };
}

/* The block is indexed now, or has bytes again: its worth begins to count. */
static void admit(struct kvk_cache *cache, const struct kvk_sequence *sequence, uint32_t group,
                  uint32_t id, uint64_t position)
{
    const struct kvk_space *space = sequence->space;
    kvk_evict_admit(cache->evict, kvk_index_block(cache->index, id),
                    kvk_space_block_cost(space, position), space->groups[group]->windowed,
                    cache->stamp, kvk_policy_now(cache));
    kvk_hints_apply(cache, space, sequence->hints, sequence->hint_count, position, id);
    kvk_sidecar_block_changed(cache, space->groups[group], id);
    kvk_block_settle(cache, id);
    kvk_disk_offer(cache, id, true);
    kvk_remote_offer(cache, id, true);
}

/* The winner is whole, but not in memory: on disk alone, or being brought back from there. It gets
 * our bytes. True: that settles it. */
static bool meet_absent(struct kvk_cache *cache, struct kvk_sequence_group *table,
                        uint64_t position, uint32_t winner, struct kvk_settling *settling)
{
    uint32_t ours = table->blocks[position];
    const struct kvk_block *block = kvk_index_block(cache->index, ours);
    const struct kvk_block *known = kvk_index_block(cache->index, winner);
    if (!kvk_block_is_whole(known) || known->slot[KVK_TIER_DEVICE] != KVK_SLOT_NONE ||
        known->slot[KVK_TIER_HOST] != KVK_SLOT_NONE) {
        return false;
    }
    settling->known_blocks++;
    if (block->hold_count == 1 && block->transfer_count == 0) {
        kvk_block_adopt(cache, winner, ours);
        table->blocks[position] = winner;
        kvk_evict_use(cache->evict, kvk_index_block(cache->index, winner),
                      kvk_group_of(cache, known)->windowed, cache->stamp, kvk_policy_now(cache));
    }
    return true;
}

/* Another has sealed this block first. `winner` is whole, or hollow and glad of our bytes. */
static void meet_winner(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                        uint64_t position, uint32_t winner, struct kvk_settling *settling)
{
    struct kvk_sequence_group *table = &sequence->groups[group];
    uint32_t ours = table->blocks[position];
    if (meet_absent(cache, table, position, winner, settling)) {
        return;
    }
    if (kvk_index_block(cache->index, winner)->state != KVK_BLOCK_HOLLOW) {
        settling->known_blocks++;
        duplicate_add(cache, settling, ours, winner);
        return;
    }
    const struct kvk_block *block = kvk_index_block(cache->index, ours);
    if (block->hold_count > 1 || block->transfer_count > 0) {
        settling->known_blocks++; /* others know it by its number: it stays as it is */
        return;
    }
    kvk_block_fill(cache, winner, ours);
    table->blocks[position] = winner;
    admit(cache, sequence, group, winner, position);
    settling->new_blocks++;
}

static void index_block(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                        uint64_t position, struct kvk_settling *settling)
{
    struct kvk_sequence_group *table = &sequence->groups[group];
    uint32_t id = table->blocks[position];
    if (!table->detached &&
        (!kvk_root_is_current(cache, table->root) || !kvk_space_shares(sequence->space))) {
        kvk_sequence_detach(cache, table);
    }
    if (table->detached) {
        return;
    }
    struct kvk_cursor cursor = table->cursor;
    KVK_ASSERT(cursor.blocks == position);
    if (kvk_index_block(cache->index, id)->run != UINT32_MAX) {
        /* A fork that shares it was first. */
        KVK_ASSERT(kvk_index_block(cache->index, id)->position == position);
        cursor.block = id;
        cursor.blocks++;
        kvk_sequence_move_cursor(cache, table, cursor);
        return;
    }
    const struct kvk_content content = {
        .tokens = sequence->tokens,
        .token_count = sequence->length,
        .spans = sequence->spans,
        .span_count = sequence->span_count,
    };
    uint32_t winner = KVK_BLOCK_NONE;
    enum kvk_status status = kvk_index_insert(cache->index, &cursor, &content, id, &winner);
    if (status == KVK_OK) {
        uint64_t extra = kvk_metadata_extra_add(cache, sequence->space->groups[group], id);
        kvk_sequence_extra_use(cache, sequence, extra);
        kvk_events_tiers(cache, sequence->space->groups[group], id, 0,
                         kvk_index_block(cache->index, id)->tier_mask);
        admit(cache, sequence, group, id, position);
        settling->new_blocks++;
    } else if (status == KVK_EXISTS) {
        kvk_index_anchor(cache->index, winner); /* filling it must not lose its place */
        meet_winner(cache, sequence, group, position, winner, settling);
        kvk_index_unanchor(cache->index, winner);
    } else {
        kvk_log(KVK_LOG_WARNING, "index_full", "sequence=%llu group=%u",
                (unsigned long long)sequence->id, group);
        kvk_sequence_detach(cache, table); /* what follows could not be found either */
        return;
    }
    kvk_sequence_move_cursor(cache, table, cursor);
}

/* Move the windows on. Blocks that only queries of the tokens settled just now still see stay
 * until the next change; what later queries do not see counts as gone from here on. */
static void windows_move(struct kvk_cache *cache, struct kvk_sequence *sequence,
                         uint64_t settled_before)
{
    const struct kvk_space *space = sequence->space;
    uint64_t settled = kvk_sequence_settled(sequence);
    kvk_sequence_slide(cache, sequence, settled_before);
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        if (!space->groups[g]->windowed) {
            continue;
        }
        uint64_t start = kvk_geometry_window_start(&space->groups[g]->geometry, settled);
        uint32_t keep = (uint32_t)(start / space->block_tokens);
        table->keep_block = keep > table->keep_block ? keep : table->keep_block;
    }
}

void kvk_sequence_settle_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                               uint64_t settled_before, struct kvk_settling *settling)
{
    KVK_ASSERT(sequence->busy);
    const struct kvk_space *space = sequence->space;
    uint64_t settled = kvk_sequence_settled(sequence);
    uint64_t end = settled / space->block_tokens;
    uint64_t first = sequence->whole_blocks;
    uint32_t work = 0;
    if (settled <= settled_before) {
        return;
    }
    if (sequence->whole_blocks < end) {
        cache->stamp++;
    }
    for (uint64_t i = first; i < end; i++) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            uint32_t id = sequence->groups[g].blocks[i];
            KVK_ASSERT(id != KVK_BLOCK_NONE);
            if (!kvk_block_is_whole(kvk_index_block(cache->index, id))) {
                kvk_block_seal(cache, id);
                cache->stats.sealed_blocks++;
                kvk_tenant_state_of(cache, space->tenant)->usage.sealed_blocks++;
            }
            index_block(cache, sequence, g, i, settling);
            work += INDEX_WORK - 1;
        }
        sequence->whole_blocks = i + 1;
        (void)kvk_slice_drops(cache, &work);
    }
    if (first < end) {
        kvk_mrc_sealed(cache, sequence, first, end);
    }
    windows_move(cache, sequence, settled_before);
}

/* ---- The call ---- */

static enum kvk_status check_seal(const struct kvk_session *session,
                                  const struct kvk_sequence *sequence,
                                  const struct kvk_seal_request *request, struct kvk_error *error)
{
    enum kvk_status status = kvk_sequence_check_running(sequence, error);
    if (status == KVK_OK) {
        status = kvk_sequence_check_length(sequence, request->expected_length, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    if (request->length > sequence->length) {
        return kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_FIELD, "length", request->length,
                              sequence->length, "length %llu is past the sequence's %llu",
                              (unsigned long long)request->length,
                              (unsigned long long)sequence->length);
    }
    uint32_t rank_count = sequence->space->rank_count;
    if (!request->all_ranks && session->rank >= rank_count) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "session_id", session->rank,
                              rank_count, "the session's rank %u is not below the space's %u",
                              session->rank, rank_count);
    }
    bool is_writing =
        request->all_ranks ? sequence->writers > 0 : sequence->rank_writers[session->rank] > 0;
    return is_writing ? kvk_sequence_check_unwritten(sequence, error) : KVK_OK;
}

static uint64_t sealed_by_all(const struct kvk_sequence *sequence,
                              const struct kvk_seal_request *request, uint32_t rank)
{
    uint64_t sealed = sequence->length;
    for (uint32_t r = 0; r < sequence->space->rank_count; r++) {
        uint64_t by_rank = sequence->rank_sealed[r];
        if ((request->all_ranks || r == rank) && by_rank < request->length) {
            by_rank = request->length;
        }
        sealed = by_rank < sealed ? by_rank : sealed;
    }
    return sealed;
}

static void seal_apply(struct kvk_sequence *sequence, const struct kvk_seal_request *request,
                       uint32_t rank, uint64_t sealed)
{
    for (uint32_t r = 0; r < sequence->space->rank_count; r++) {
        if ((request->all_ranks || r == rank) && sequence->rank_sealed[r] < request->length) {
            sequence->rank_sealed[r] = request->length;
        }
    }
    KVK_ASSERT(sealed >= sequence->sealed);
    sequence->sealed = sealed;
}

/* Since when is one rank behind another? */
static void ranks_note(struct kvk_sequence *sequence, uint64_t now_ns)
{
    bool is_apart = false;
    for (uint32_t r = 1; r < sequence->space->rank_count; r++) {
        is_apart = is_apart || sequence->rank_sealed[r] != sequence->rank_sealed[0];
    }
    if (!is_apart) {
        sequence->ranks_apart_ns = 0;
    } else if (sequence->ranks_apart_ns == 0) {
        sequence->ranks_apart_ns = now_ns;
    }
}

static enum kvk_status seal_drops(struct kvk_cache *cache, const struct kvk_session *session,
                                  struct kvk_sequence *sequence,
                                  const struct kvk_seal_request *request,
                                  const struct kvk_caller *caller, struct kvk_seal_reply *reply,
                                  struct kvk_error *error)
{
    enum kvk_status status = check_seal(session, sequence, request, error);
    if (status != KVK_OK) {
        return kvk_sequence_refused(cache, caller, sequence, status, error);
    }
    uint32_t rank = session->rank;
    uint64_t sealed = sealed_by_all(sequence, request, rank);
    uint64_t settled = sealed < sequence->committed ? sealed : sequence->committed;
    uint64_t settled_before = kvk_sequence_settled(sequence);
    kvk_sequence_busy_begin(sequence);
    status = kvk_sequence_checksum_drops(cache, sequence, settled, caller, error);
    if (status != KVK_OK || kvk_sequence_is_lost(sequence)) {
        enum kvk_status ended = kvk_sequence_busy_end_drops(cache, sequence, error);
        return ended != KVK_OK ? ended : status;
    }
    seal_apply(sequence, request, rank, sealed);
    ranks_note(sequence, kvk_clock_now(cache->clock));
    struct kvk_settling settling = {0};
    kvk_sequence_settle_drops(cache, sequence, settled_before, &settling);
    cache->stats.seals++;
    *reply = (struct kvk_seal_reply){
        .sealed_tokens = sequence->sealed,
        .new_blocks = settling.new_blocks,
        .known_blocks = settling.known_blocks,
    };
    status = kvk_sequence_applied_end_drops(cache, sequence, error);
    kvk_settling_finish_drops(cache, caller, &settling);
    return status;
}

enum kvk_status kvk_sequence_seal(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  const struct kvk_seal_request *request,
                                  struct kvk_seal_reply *reply, struct kvk_error *error)
{
    struct kvk_session *session;
    struct kvk_sequence *sequence;
    *reply = (struct kvk_seal_reply){0};
    kvk_lock(&cache->lock);
    enum kvk_status status = kvk_sequence_find(cache, caller, request->session_id,
                                               request->sequence_id, &session, &sequence, error);
    if (status == KVK_OK) {
        status = kvk_tier_check_there(cache, sequence->home, error);
    }
    if (status == KVK_OK) {
        status = seal_drops(cache, session, sequence, request, caller, reply, error);
    }
    kvk_unlock(&cache->lock);
    return status;
}
