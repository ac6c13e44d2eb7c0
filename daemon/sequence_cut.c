/* Commit and Truncate: sequences become shorter, drafts are accepted or rolled back. */
#include "base/assert.h"
#include "daemon/sequence_internal.h"

/* ---- Cutting ---- */

/* The cursor goes back along its chain to where `blocks` blocks are before it. */
static void cursor_back(struct kvk_cache *cache, struct kvk_sequence_group *table, uint64_t blocks)
{
    struct kvk_cursor cursor = table->cursor;
    if (table->detached || cursor.blocks <= blocks) {
        return;
    }
    while (cursor.blocks > blocks) {
        cursor.block = kvk_index_block(cache->index, cursor.block)->parent;
        cursor.blocks--;
    }
    KVK_ASSERT((cursor.blocks == 0) == (cursor.block == KVK_BLOCK_NONE));
    kvk_sequence_move_cursor(cache, table, cursor);
}

/* Spans past the end go; one that reaches over it is cut. */
static void spans_cut(struct kvk_sequence *sequence, uint64_t length)
{
    while (sequence->span_count > 0) {
        struct kvk_content_span *span = &sequence->spans[sequence->span_count - 1];
        if (span->first < length) {
            if (span->first + span->count > length) {
                span->count = length - span->first;
            }
            return;
        }
        sequence->span_count--;
    }
}

static uint64_t group_cut(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                          uint32_t block_count, uint64_t whole_blocks)
{
    struct kvk_sequence_group *table = &sequence->groups[group];
    uint64_t freed = 0;
    cursor_back(cache, table, whole_blocks);
    for (uint32_t i = table->block_count; i > block_count; i--) {
        freed += table->blocks[i - 1] != KVK_BLOCK_NONE;
        kvk_sequence_drop(cache, sequence, group, i - 1);
    }
    table->block_count = block_count;
    if (table->window_block > block_count) {
        table->window_block = block_count;
    }
    if (table->keep_block > block_count) {
        table->keep_block = block_count;
    }
    return freed;
}

uint64_t kvk_sequence_cut(struct kvk_cache *cache, struct kvk_sequence *sequence, uint64_t length)
{
    const struct kvk_space *space = sequence->space;
    KVK_ASSERT(length <= sequence->length);
    uint64_t whole_blocks = length / space->block_tokens;
    uint64_t freed = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        freed += group_cut(cache, sequence, g, kvk_blocks_for(space, length), whole_blocks);
    }
    spans_cut(sequence, length);
    sequence->length = length;
    if (sequence->committed > length) {
        sequence->committed = length;
    }
    for (uint32_t r = 0; r < space->rank_count; r++) {
        if (sequence->rank_sealed[r] > length) {
            sequence->rank_sealed[r] = length;
        }
    }
    if (sequence->sealed > length) {
        sequence->sealed = length;
    }
    if (sequence->whole_blocks > whole_blocks) {
        sequence->whole_blocks = whole_blocks;
    }
    uint64_t growth = kvk_sequence_growth_bytes(space, length, sequence->growth_tokens);
    if (growth < sequence->growth_bytes) {
        kvk_sequence_keep_growth(cache, sequence, growth);
    }
    return freed;
}

/* A query at `length` must find all that it sees: what the window has let go of does not return. */
static enum kvk_status check_window(const struct kvk_sequence *sequence, uint64_t length,
                                    struct kvk_error *error)
{
    const struct kvk_space *space = sequence->space;
    for (uint32_t g = 0; g < space->group_count; g++) {
        const struct kvk_group *group = space->groups[g];
        if (!group->windowed) {
            continue;
        }
        uint64_t first = kvk_geometry_window_start(&group->geometry, length) / space->block_tokens;
        uint64_t sinks = kvk_blocks_for(space, group->geometry.sinks);
        uint64_t end = kvk_blocks_for(space, length);
        uint64_t keep = sequence->groups[g].keep_block;
        first = first < sinks ? sinks : first;
        if (first < keep && first < end) {
            unsigned long long needed = first * space->block_tokens;
            unsigned long long kept = keep * space->block_tokens;
            return kvk_fail_limit(
                error, KVK_PRECONDITION, KVK_CAUSE_WINDOW_GONE, "length", length, kept,
                "group %u needs tokens from %llu on; its window begins at %llu", g, needed, kept);
        }
    }
    return KVK_OK;
}

/* ---- Repeats ---- */

static bool is_repeat(const struct kvk_sequence *sequence, enum kvk_change_kind kind,
                      uint64_t expected_length, uint64_t argument)
{
    return sequence->last.kind == kind && sequence->last.expected_length == expected_length &&
           sequence->last.argument == argument;
}

/* Nothing is new in the tables: what is left is where it was. */
static void answer(const struct kvk_sequence *sequence, struct kvk_sequence_reply *reply,
                   struct kvk_tables *tables)
{
    kvk_sequence_answer(sequence, reply);
    if (tables != NULL) {
        tables->part_count = 0;
    }
}

/* ---- Truncate ---- */

enum kvk_status kvk_sequence_truncate(struct kvk_cache *cache, const struct kvk_caller *caller,
                                      uint64_t session_id, uint64_t sequence_id,
                                      uint64_t expected_length, uint64_t length,
                                      struct kvk_sequence_reply *reply, struct kvk_tables *tables,
                                      struct kvk_error *error)
{
    struct kvk_session *session;
    struct kvk_sequence *sequence;
    kvk_lock(&cache->lock);
    enum kvk_status status =
        kvk_sequence_find(cache, caller, session_id, sequence_id, &session, &sequence, error);
    if (status != KVK_OK) {
        goto out;
    }
    if (is_repeat(sequence, KVK_CHANGE_TRUNCATE, expected_length, length) &&
        sequence->length == length) {
        answer(sequence, reply, tables);
        goto out;
    }
    status = kvk_sequence_check_length(sequence, expected_length, error);
    if (status == KVK_OK && length > sequence->length) {
        status = kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_FIELD, "length", length,
                                sequence->length, "length %llu is past the sequence's %llu",
                                (unsigned long long)length, (unsigned long long)sequence->length);
    }
    if (status == KVK_OK) {
        status = kvk_sequence_check_unwritten(sequence, error);
    }
    if (status == KVK_OK) {
        status = check_window(sequence, length, error);
    }
    if (status != KVK_OK) {
        status = kvk_sequence_refused(cache, caller, sequence, status, error);
        goto out;
    }
    uint64_t freed = kvk_sequence_cut(cache, sequence, length);
    sequence->last = (struct kvk_last_change){
        .kind = KVK_CHANGE_TRUNCATE, .expected_length = expected_length, .argument = length};
    answer(sequence, reply, tables);
    reply->freed_blocks = freed;
out:
    kvk_unlock(&cache->lock);
    return status;
}

/* ---- Commit ---- */

static enum kvk_status check_commit(const struct kvk_sequence *sequence, uint64_t expected_length,
                                    uint64_t accept, struct kvk_error *error)
{
    enum kvk_status status = kvk_sequence_check_running(sequence, error);
    if (status == KVK_OK) {
        status = kvk_sequence_check_length(sequence, expected_length, error);
    }
    uint64_t drafts = sequence->length - sequence->committed;
    if (status == KVK_OK && accept > drafts) {
        status = kvk_fail_limit(error, KVK_OUT_OF_RANGE, KVK_CAUSE_FIELD, "accept", accept, drafts,
                                "there are only %llu drafts", (unsigned long long)drafts);
    }
    return status == KVK_OK ? kvk_sequence_check_unwritten(sequence, error) : status;
}

static enum kvk_status commit_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                    uint64_t expected_length, uint64_t accept,
                                    const struct kvk_caller *caller,
                                    struct kvk_sequence_reply *reply, struct kvk_tables *tables,
                                    struct kvk_error *error)
{
    if (is_repeat(sequence, KVK_CHANGE_COMMIT, expected_length, accept)) {
        answer(sequence, reply, tables);
        return KVK_OK;
    }
    enum kvk_status status = check_commit(sequence, expected_length, accept, error);
    if (status != KVK_OK) {
        return kvk_sequence_refused(cache, caller, sequence, status, error);
    }
    uint64_t length = sequence->committed + accept;
    uint64_t settled = sequence->sealed < length ? sequence->sealed : length;
    uint64_t settled_before = kvk_sequence_settled(sequence);
    kvk_sequence_busy_begin(sequence);
    status = kvk_sequence_checksum_drops(cache, sequence, settled, caller, error);
    if (status != KVK_OK || kvk_sequence_is_lost(sequence)) {
        enum kvk_status ended = kvk_sequence_busy_end_drops(cache, sequence, error);
        return ended != KVK_OK ? ended : status;
    }
    uint64_t freed = kvk_sequence_cut(cache, sequence, length);
    sequence->committed = length;
    sequence->last = (struct kvk_last_change){
        .kind = KVK_CHANGE_COMMIT, .expected_length = expected_length, .argument = accept};
    struct kvk_settling settling = {0};
    kvk_sequence_settle_drops(cache, sequence, settled_before, &settling);
    answer(sequence, reply, tables);
    reply->freed_blocks = freed;
    status = kvk_sequence_applied_end_drops(cache, sequence, error);
    kvk_settling_finish_drops(cache, caller, &settling);
    return status;
}

enum kvk_status kvk_sequence_commit(struct kvk_cache *cache, const struct kvk_caller *caller,
                                    uint64_t session_id, uint64_t sequence_id,
                                    uint64_t expected_length, uint64_t accept,
                                    struct kvk_sequence_reply *reply, struct kvk_tables *tables,
                                    struct kvk_error *error)
{
    struct kvk_session *session;
    struct kvk_sequence *sequence;
    kvk_lock(&cache->lock);
    enum kvk_status status =
        kvk_sequence_find(cache, caller, session_id, sequence_id, &session, &sequence, error);
    if (status == KVK_OK) {
        status =
            commit_drops(cache, sequence, expected_length, accept, caller, reply, tables, error);
    }
    kvk_unlock(&cache->lock);
    return status;
}
