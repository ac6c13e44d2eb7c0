/*
 * Append: grow a sequence, and grant where it may be written.
 *
 * A tail that others share, or that is part of a whole block, is copied first: sealed bytes never
 * change, and nobody writes where another reads.
 */
#include <string.h>

#include "base/assert.h"
#include "daemon/sequence_internal.h"

/* What one Append needs. */
struct growth {
    uint32_t new_blocks;            /* per group */
    bool copy[KVK_GROUP_COUNT_MAX]; /* its tail is copied first */
    bool any_copy;
};

/* ---- Checks ---- */

static bool is_repeat(const struct kvk_sequence *sequence, const struct kvk_append_request *request)
{
    uint64_t end = request->expected_length + request->token_count;
    return sequence->last.kind == KVK_CHANGE_APPEND &&
           sequence->last.expected_length == request->expected_length &&
           sequence->last.argument == request->token_count && sequence->length == end &&
           memcmp(sequence->tokens + request->expected_length, request->tokens,
                  request->token_count * sizeof(uint32_t)) == 0;
}

static enum kvk_status check_spans(const struct kvk_append_request *request,
                                   struct kvk_error *error)
{
    uint64_t next = request->expected_length;
    uint64_t end = request->expected_length + request->token_count;
    for (uint32_t i = 0; i < request->span_count; i++) {
        const struct kvk_content_span *span = &request->spans[i];
        if (span->first < next || span->first >= end || span->count == 0 ||
            span->count > end - span->first || span->digest_size == 0 ||
            span->digest_size > KVK_DIGEST_SIZE_MAX) {
            return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "spans", span->first, end,
                                  "span %u must lie within the new tokens, sorted, with a digest",
                                  i);
        }
        next = span->first + span->count;
    }
    return KVK_OK;
}

static enum kvk_status check_append(const struct kvk_cache *cache,
                                    const struct kvk_sequence *sequence,
                                    const struct kvk_append_request *request,
                                    struct kvk_error *error)
{
    enum kvk_status status = kvk_sequence_check_running(sequence, error);
    if (status == KVK_OK) {
        status = kvk_sequence_check_length(sequence, request->expected_length, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    uint64_t limit = cache->config->tokens;
    if (request->token_count > limit - sequence->length) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "tokens",
                              sequence->length + request->token_count, limit,
                              "a sequence may have %llu tokens", (unsigned long long)limit);
    }
    if (!request->draft && sequence->committed < sequence->length) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_NONE, "draft",
                        "the sequence ends in drafts: commit them or roll them back first");
    }
    return check_spans(request, error);
}

/* ---- Growing ---- */

/* May the tail, where the new tokens begin, not be written in place? */
static bool tail_needs_copy(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                            uint32_t group)
{
    const struct kvk_space *space = sequence->space;
    if (sequence->length % space->block_tokens == 0) {
        return false;
    }
    uint32_t tail = sequence->groups[group].block_count - 1;
    const struct kvk_block *block =
        kvk_index_block(cache->index, sequence->groups[group].blocks[tail]);
    bool may_be_forked = (uint64_t)tail * space->block_tokens < sequence->shared_tokens;
    return kvk_block_is_whole(block) || (may_be_forked && block->hold_count > 1);
}

static struct growth growth_of(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                               uint64_t token_count)
{
    const struct kvk_space *space = sequence->space;
    struct growth growth = {
        .new_blocks = kvk_blocks_for(space, sequence->length + token_count) -
                      kvk_blocks_for(space, sequence->length),
    };
    for (uint32_t g = 0; g < space->group_count; g++) {
        growth.copy[g] = tail_needs_copy(cache, sequence, g);
        growth.any_copy = growth.any_copy || growth.copy[g];
    }
    return growth;
}

/* The new blocks lie behind the table, the copy of the tail behind them. */
static uint32_t fresh_count(const struct growth *growth, uint32_t group)
{
    return growth->new_blocks + (growth->copy[group] ? 1 : 0);
}

static enum kvk_status reserve_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                     const struct growth *growth, const struct kvk_caller *caller,
                                     struct kvk_error *error)
{
    struct kvk_room_want want = {
        .tier = sequence->home,
        .own_growth_bytes = sequence->growth_bytes,
        .sequence_id = sequence->id,
    };
    uint32_t *fresh[KVK_GROUP_COUNT_MAX];
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        want.counts[g] = fresh_count(growth, g);
        fresh[g] = sequence->groups[g].blocks + sequence->groups[g].block_count;
    }
    enum kvk_status status =
        kvk_room_reserve_drops(cache, sequence->space, &want, fresh, caller, error);
    for (uint32_t g = 0; g < sequence->space->group_count && status == KVK_OK; g++) {
        for (uint32_t i = 0; i < want.counts[g]; i++) {
            kvk_block_grant(cache, fresh[g][i]);
        }
    }
    return status;
}

static void fresh_give_back(struct kvk_cache *cache, const struct kvk_sequence *sequence,
                            const struct growth *growth)
{
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        const struct kvk_sequence_group *table = &sequence->groups[g];
        for (uint32_t i = fresh_count(growth, g); i > 0; i--) {
            kvk_block_give_back(cache, table->blocks[table->block_count + i - 1]);
        }
    }
}

static enum kvk_status copy_tails_drops(struct kvk_cache *cache,
                                        const struct kvk_sequence *sequence,
                                        const struct growth *growth, struct kvk_error *error)
{
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        const struct kvk_sequence_group *table = &sequence->groups[g];
        if (!growth->copy[g]) {
            continue;
        }
        enum kvk_status status =
            kvk_block_clone_drops(cache, table->blocks[table->block_count + growth->new_blocks],
                                  table->blocks[table->block_count - 1], error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* Reserve and copy. On failure nothing of it is left; the sequence is busy either way. */
static enum kvk_status grow_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                  const struct growth *growth, const struct kvk_caller *caller,
                                  struct kvk_error *error)
{
    if (growth->new_blocks == 0 && !growth->any_copy) {
        return KVK_OK;
    }
    enum kvk_status status = reserve_drops(cache, sequence, growth, caller, error);
    if (status != KVK_OK) {
        return status;
    }
    status = copy_tails_drops(cache, sequence, growth, error);
    if (status == KVK_OK && kvk_sequence_is_lost(sequence)) {
        status = KVK_ABORTED; /* what ends the busy time says why */
    }
    if (status != KVK_OK) {
        fresh_give_back(cache, sequence, growth);
    }
    return status;
}

/* ---- Applying ---- */

static void apply_group(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                        const struct growth *growth)
{
    struct kvk_sequence_group *table = &sequence->groups[group];
    uint8_t pin = (uint8_t)(sequence->home + 1);
    if (growth->copy[group]) {
        uint32_t tail = table->block_count - 1;
        uint32_t copy = table->blocks[table->block_count + growth->new_blocks];
        kvk_sequence_drop(cache, sequence, group, tail);
        table->blocks[tail] = copy;
        table->pins[tail] = pin;
    }
    memset(table->pins + table->block_count, pin, growth->new_blocks);
    table->block_count += growth->new_blocks;
}

static void apply(struct kvk_cache *cache, struct kvk_sequence *sequence,
                  const struct growth *growth, const struct kvk_append_request *request)
{
    const struct kvk_space *space = sequence->space;
    uint64_t tail_first = sequence->length / space->block_tokens * space->block_tokens;
    for (uint32_t g = 0; g < space->group_count; g++) {
        apply_group(cache, sequence, g, growth);
    }
    if (sequence->shared_tokens > tail_first) {
        sequence->shared_tokens = tail_first; /* the tail is ours alone now */
    }
    memcpy(sequence->tokens + sequence->length, request->tokens,
           request->token_count * sizeof(uint32_t));
    if (request->span_count > 0) {
        memcpy(sequence->spans + sequence->span_count, request->spans,
               request->span_count * sizeof(*request->spans));
        sequence->span_count += request->span_count;
    }
    sequence->length += request->token_count;
    if (!request->draft) {
        sequence->committed = sequence->length;
    }
    sequence->growth_tokens -= request->token_count < sequence->growth_tokens
                                   ? request->token_count
                                   : sequence->growth_tokens;
    uint64_t kept = kvk_sequence_growth_bytes(space, sequence->length, sequence->growth_tokens);
    if (kept < sequence->growth_bytes) {
        kvk_sequence_keep_growth(cache, sequence, kept);
    }
    sequence->last = (struct kvk_last_change){.kind = KVK_CHANGE_APPEND,
                                              .expected_length = request->expected_length,
                                              .argument = request->token_count};
    cache->stats.appends++;
}

static void answer(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                   const uint32_t first_block[KVK_GROUP_COUNT_MAX],
                   struct kvk_sequence_reply *reply, struct kvk_tables *tables)
{
    kvk_sequence_answer(sequence, reply);
    kvk_sequence_tables(cache, sequence, first_block, tables);
}

/* A repeat is told of the tail too, whether it was copied or not. */
static void answer_again(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                         uint64_t length_before, struct kvk_sequence_reply *reply,
                         struct kvk_tables *tables)
{
    uint32_t first_block[KVK_GROUP_COUNT_MAX];
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        first_block[g] = (uint32_t)(length_before / sequence->space->block_tokens);
    }
    answer(cache, sequence, first_block, reply, tables);
}

/* ---- The call ---- */

static enum kvk_status append_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                    const struct kvk_append_request *request,
                                    const struct kvk_caller *caller,
                                    struct kvk_sequence_reply *reply, struct kvk_tables *tables,
                                    struct kvk_error *error)
{
    if (is_repeat(sequence, request)) {
        answer_again(cache, sequence, request->expected_length, reply, tables);
        return KVK_OK;
    }
    enum kvk_status status = check_append(cache, sequence, request, error);
    if (status != KVK_OK) {
        return kvk_sequence_refused(cache, caller, sequence, status, error);
    }
    struct growth growth = growth_of(cache, sequence, request->token_count);
    if (growth.any_copy && !caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    uint32_t first_block[KVK_GROUP_COUNT_MAX];
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        first_block[g] = sequence->groups[g].block_count - (growth.copy[g] ? 1 : 0);
    }
    uint64_t extra =
        kvk_metadata_extra_most(request->spans, request->span_count, sequence->space->block_tokens,
                                sequence->space->group_count);
    status = kvk_sequence_grow(cache, sequence, sequence->length + request->token_count,
                               sequence->groups[0].block_count + growth.new_blocks + UINT64_C(1),
                               sequence->span_count + request->span_count, extra, error);
    if (status != KVK_OK) {
        return kvk_sequence_refused(cache, caller, sequence, status, error);
    }
    /* The tokens before are done with: what only their queries saw makes room for the new ones. */
    kvk_sequence_slide(cache, sequence, kvk_sequence_settled(sequence));
    kvk_sequence_busy_begin(sequence);
    status = grow_drops(cache, sequence, &growth, caller, error);
    enum kvk_status ended = kvk_sequence_busy_end_drops(cache, sequence, error);
    if (status != KVK_OK || ended != KVK_OK) {
        return ended != KVK_OK ? ended : status;
    }
    apply(cache, sequence, &growth, request);
    answer(cache, sequence, first_block, reply, tables);
    return KVK_OK;
}

enum kvk_status kvk_sequence_append(struct kvk_cache *cache, const struct kvk_caller *caller,
                                    const struct kvk_append_request *request,
                                    struct kvk_sequence_reply *reply, struct kvk_tables *tables,
                                    struct kvk_error *error)
{
    struct kvk_session *session;
    struct kvk_sequence *sequence;
    *reply = (struct kvk_sequence_reply){0};
    if (request->token_count == 0 || request->token_count > cache->config->tokens) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "tokens", request->token_count,
                              cache->config->tokens, "tokens must be 1 to %llu",
                              (unsigned long long)cache->config->tokens);
    }
    enum kvk_status status =
        kvk_sequence_lock(cache, caller, request->session_id, request->sequence_id,
                          request->token_count, tables, &session, &sequence, error);
    if (status == KVK_OK) {
        status = append_drops(cache, sequence, request, caller, reply, tables, error);
    }
    kvk_unlock(&cache->lock);
    return status;
}
