/*
 * OpenSequence: find the longest cached prefix, hold it, reserve blocks for the rest.
 *
 * The sequence is given its place in the instance first, busy, so that whatever happens while the
 * lock is dropped (the instance ends, the same request comes again) meets it. A call that fails
 * ends it again, and with it everything that it took.
 */
#include <string.h>

#include "base/assert.h"
#include "daemon/sequence_internal.h"

#define OPEN_TRIES 4     /* where invalidations come between, or a part of a block cannot be had */
#define PROMOTE_SLICE 64 /* blocks that are brought to the device in one go */

struct opening {
    struct kvk_cache *cache;
    const struct kvk_caller *caller;
    const struct kvk_open_request *request;
    struct kvk_tables *tables; /* may be NULL */
    struct kvk_error *error;

    struct kvk_sequence *sequence; /* ours until it is linked */
    struct kvk_instance *instance; /* while the lock is held */
    struct kvk_space *space;
    struct kvk_sequence_size size;
    uint64_t extra_bytes; /* for content bytes of the blocks that it will seal */
    uint64_t repeated_id; /* the answer to this request id lives; 0: none */
    bool lookup;
    bool own_alone;     /* without what is public: there is no room for its namesakes */
    uint64_t public_id; /* what was used of it */
    uint64_t public_tokens;
    struct kvk_partial_sources sources; /* what a part of a block is copied from */
    bool whole_blocks; /* without a part of a block: there was no room beside it, or no copy */
    bool again;        /* the last try ended because of that, */
    bool invalidated;  /* or because of this */
};

/* ---- Checks ---- */

static bool tier_is_there(const struct kvk_cache *cache, int tier)
{
    return (tier == KVK_TIER_DEVICE || tier == KVK_TIER_HOST) && cache->tiers[tier].device != NULL;
}

static enum kvk_tier home_of(const struct opening *opening)
{
    if (opening->request->tier >= 0) {
        return (enum kvk_tier)opening->request->tier;
    }
    return kvk_tier_first(opening->cache);
}

static enum kvk_status check_request(const struct opening *opening)
{
    const struct kvk_cache *cache = opening->cache;
    const struct kvk_open_request *request = opening->request;
    if (request->tier >= 0 && !tier_is_there(cache, request->tier)) {
        return kvk_fail(opening->error, KVK_INVALID, KVK_CAUSE_FIELD, "tier",
                        "the daemon has no such tier");
    }
    uint64_t limit = cache->config->tokens;
    if (request->prompt.token_count > limit) {
        return kvk_fail_limit(opening->error, KVK_INVALID, KVK_CAUSE_FIELD, "prompt.tokens",
                              request->prompt.token_count, limit,
                              "more tokens than a sequence may have: %llu",
                              (unsigned long long)limit);
    }
    if (request->growth_tokens > limit - request->prompt.token_count) {
        return kvk_fail_limit(opening->error, KVK_INVALID, KVK_CAUSE_FIELD, "growth_tokens",
                              request->growth_tokens, limit - request->prompt.token_count,
                              "more growth than a sequence may have");
    }
    return KVK_OK;
}

/* Nobody writes into a tier that holds what is sealed in another format. */
static enum kvk_status check_home(const struct opening *opening)
{
    if (home_of(opening) != KVK_TIER_HOST || !kvk_space_is_compact_below(opening->space)) {
        return KVK_OK;
    }
    return kvk_fail(opening->error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "tier",
                    "the space's host tier is compact (host_format): its sequences begin on the "
                    "device");
}

/* The sequence that an earlier call with this request id opened; 0: none that lives. */
static uint64_t find_repeated(const struct kvk_instance *instance,
                              const struct kvk_request_id *request_id)
{
    if (request_id->size == 0) {
        return 0;
    }
    for (const struct kvk_sequence *s = instance->sequences; s != NULL; s = s->next) {
        if (s->fork_index == 0 && kvk_request_id_equal(&s->request_id, request_id)) {
            return s->id;
        }
    }
    return 0;
}

/* Session and space as they are now; the request id that was answered before. */
static enum kvk_status open_find(struct opening *opening)
{
    struct kvk_cache *cache = opening->cache;
    const struct kvk_open_request *request = opening->request;
    struct kvk_session *session;
    enum kvk_status status =
        kvk_session_find(cache, opening->caller, request->session_id, &session, opening->error);
    if (status != KVK_OK) {
        return status;
    }
    opening->instance = session->instance;
    opening->repeated_id = find_repeated(session->instance, &request->request_id);
    if (opening->repeated_id != 0) {
        return KVK_OK;
    }
    if (cache->draining) {
        return kvk_fail(opening->error, KVK_UNAVAILABLE, KVK_CAUSE_DRAINING, "",
                        "the daemon is draining: no new sequences");
    }
    status =
        kvk_space_find(cache, opening->caller, request->space_id, &opening->space, opening->error);
    if (status != KVK_OK) {
        return status;
    }
    if (opening->space->tenant != session->tenant) {
        return kvk_fail(opening->error, KVK_PERMISSION, KVK_CAUSE_NOT_OWNER, "space_id",
                        "the space is of another tenant than the session");
    }
    status = check_home(opening);
    if (status != KVK_OK) {
        return status;
    }
    uint64_t tokens = request->prompt.token_count;
    opening->size = (struct kvk_sequence_size){
        .group_count = opening->space->group_count,
        .tokens = tokens + request->growth_tokens,
        .blocks = kvk_blocks_for(opening->space, tokens + request->growth_tokens),
        .spans = request->prompt.span_count,
        .salt_size = request->prompt.salt_size,
        .hints = request->prompt.hint_count,
    };
    opening->extra_bytes =
        kvk_metadata_extra_most(request->prompt.spans, request->prompt.span_count,
                                opening->space->block_tokens, opening->space->group_count);
    return KVK_OK;
}

/* ---- What is cached ---- */

static enum kvk_status open_fill(struct opening *opening)
{
    struct kvk_sequence *sequence = opening->sequence;
    const struct kvk_prompt *prompt = &opening->request->prompt;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    enum kvk_status status = kvk_space_roots_admit(opening->cache, opening->space, prompt->salt,
                                                   prompt->salt_size, opening->error);
    if (status == KVK_OK) {
        status = kvk_space_roots(opening->cache, opening->space, prompt->salt, prompt->salt_size,
                                 roots, opening->error);
    }
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t g = 0; g < opening->space->group_count; g++) {
        sequence->groups[g].root = roots[g];
        sequence->groups[g].cursor.root = roots[g];
    }
    if (prompt->token_count > 0) {
        memcpy(sequence->tokens, prompt->tokens, prompt->token_count * sizeof(uint32_t));
    }
    if (prompt->span_count > 0) {
        memcpy(sequence->spans, prompt->spans, prompt->span_count * sizeof(*prompt->spans));
    }
    if (prompt->salt_size > 0) {
        memcpy(sequence->salt, prompt->salt, prompt->salt_size);
    }
    uint64_t now_ns = kvk_policy_now(opening->cache);
    for (uint32_t i = 0; i < prompt->hint_count; i++) {
        sequence->hints[i] = kvk_hint_from(&prompt->hints[i], now_ns);
    }
    sequence->hint_count = prompt->hint_count;
    sequence->span_count = prompt->span_count;
    sequence->salt_size = prompt->salt_size;
    sequence->length = prompt->token_count;
    sequence->committed = prompt->token_count;
    sequence->request_id = opening->request->request_id;
    sequence->state = KVK_SEQUENCE_RUNNING;
    sequence->home = home_of(opening);
    return KVK_OK;
}

/* The longest cached prefix in memory, after what is on disk alone and worth it was brought back.
 * The path is as it is until the lock is dropped the next time. */
static enum kvk_status open_find_drops(struct opening *opening, struct kvk_prefix *prefix)
{
    struct kvk_cache *cache = opening->cache;
    struct kvk_sequence *sequence = opening->sequence;
    struct kvk_prompt asked = opening->request->prompt;
    const struct kvk_prompt *prompt = &asked;
    asked.use_public = asked.use_public && !opening->own_alone;
    struct kvk_disk_kept kept = {.blocks = NULL};
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    *prefix = (struct kvk_prefix){0};
    if (!opening->lookup) {
        return KVK_OK;
    }
    for (uint32_t g = 0; g < opening->space->group_count; g++) {
        roots[g] = sequence->groups[g].root;
    }
    uint64_t begun_ns = kvk_clock_now(cache->clock);
    uint64_t limit = kvk_prefix_limit(opening->space, prompt, opening->request->leave_last);
    enum kvk_status status =
        kvk_disk_prefix_find_drops(cache, opening->space, roots, prompt, limit, opening->caller,
                                   prefix, &sequence->disk, &kept, opening->error);
    if (kept.count > 0) {
        prefix->known[opening->space->group_count - 1] = prefix->blocks; /* the rest may go now */
    }
    kvk_disk_kept_finish(cache, &kept); /* nothing comes between here and our own holds */
    if (status == KVK_OK && !opening->whole_blocks) {
        kvk_partial_find(cache, opening->space, roots, prompt, limit, prefix);
    }
    if (prefix->partial_tokens > 0 && !opening->caller->may_block) {
        status = KVK_WOULD_BLOCK; /* it has to be copied */
    }
    if (sequence->disk.restored_tokens == 0) {
        kvk_prefix_cost(cache, opening->space, begun_ns);
    }
    return status;
}

static struct kvk_content content_of(const struct opening *opening, const struct kvk_prefix *prefix)
{
    const struct kvk_prompt *prompt = &opening->request->prompt;
    return (struct kvk_content){
        .tokens = prompt->tokens,
        .token_count = prefix->blocks * opening->space->block_tokens,
        .spans = prompt->spans,
        .span_count = prompt->span_count,
    };
}

/* As far behind the prefix as the space's own chain goes. */
static void open_place(struct opening *opening, const struct kvk_prefix *prefix, uint32_t g)
{
    struct kvk_cache *cache = opening->cache;
    struct kvk_sequence_group *table = &opening->sequence->groups[g];
    const struct kvk_content content = content_of(opening, prefix);
    struct kvk_match match = {
        .cursor = {.root = table->root, .block = KVK_BLOCK_NONE},
        .path_capacity = prefix->own[g] < prefix->blocks ? prefix->own[g] : prefix->blocks,
    };
    if (prefix->publication == NULL) {
        KVK_ASSERT(match.path_capacity == prefix->blocks);
        match.cursor.blocks = prefix->blocks;
        match.cursor.block =
            prefix->blocks == 0 ? KVK_BLOCK_NONE : cache->path[g][prefix->blocks - 1];
    } else {
        kvk_index_match(cache->index, &content, &match);
        KVK_ASSERT(match.path_count == match.path_capacity);
    }
    kvk_sequence_move_cursor(cache, table, match.cursor);
}

/* What of the prefix is public alone gets hollow namesakes in the space's own chain, so that what
 * is sealed from here on hangs below them. False: there are no ids for them. */
static bool open_namesakes(struct opening *opening, const struct kvk_prefix *prefix)
{
    struct kvk_cache *cache = opening->cache;
    struct kvk_space *space = opening->space;
    const struct kvk_content content = content_of(opening, prefix);
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct kvk_sequence_group *table = &opening->sequence->groups[g];
        while (table->cursor.blocks < prefix->blocks) {
            struct kvk_cursor cursor = table->cursor;
            if (!kvk_room_id_free(cache, space->groups[g]) ||
                kvk_block_know(cache, space->groups[g], &cursor, &content) != KVK_OK) {
                return false;
            }
            kvk_sequence_extra_use(cache, opening->sequence,
                                   kvk_metadata_extra_of(cache, cursor.block));
            kvk_sequence_move_cursor(cache, table, cursor);
        }
    }
    return true;
}

/* Hold, and pin where it lies, what a query behind the prefix sees. */
static void open_prefix(struct opening *opening, const struct kvk_prefix *prefix)
{
    struct kvk_cache *cache = opening->cache;
    struct kvk_sequence *sequence = opening->sequence;
    struct kvk_space *space = opening->space;
    uint32_t blocks = (uint32_t)prefix->blocks;
    uint64_t tokens = kvk_prefix_tokens(space, prefix);
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        open_place(opening, prefix, g);
        for (uint32_t i = 0; i < blocks; i++) {
            table->blocks[i] = KVK_BLOCK_NONE;
            table->pins[i] = 0;
            if (kvk_group_sees_at(space->groups[g], tokens, i)) {
                kvk_sequence_take(cache, sequence, g, i, cache->path[g][i], true);
            }
        }
        table->block_count = blocks;
        if (space->groups[g]->windowed) {
            uint64_t start = kvk_geometry_window_start(&space->groups[g]->geometry, tokens);
            table->keep_block = (uint32_t)(start / space->block_tokens);
            table->window_block = table->keep_block;
        }
    }
    if (prefix->publication != NULL) {
        opening->public_id = prefix->publication->id;
        opening->public_tokens = prefix->public_blocks * space->block_tokens;
        sequence->public_tokens = opening->public_tokens;
    }
    sequence->cached = tokens;
    sequence->partial_tokens = prefix->partial_tokens;
    sequence->sealed = sequence->cached;
    for (uint32_t r = 0; r < space->rank_count; r++) {
        sequence->rank_sealed[r] = sequence->cached;
    }
    sequence->whole_blocks = blocks;
}

/* As if nothing had been found. */
static void open_prefix_undo(struct opening *opening)
{
    struct kvk_sequence *sequence = opening->sequence;
    for (uint32_t g = 0; g < opening->space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        kvk_sequence_move_cursor(opening->cache, table,
                                 (struct kvk_cursor){.root = table->root, .block = KVK_BLOCK_NONE});
        for (uint32_t i = table->block_count; i > 0; i--) {
            kvk_sequence_drop(opening->cache, sequence, g, i - 1);
        }
        table->block_count = 0;
        table->keep_block = 0;
        table->window_block = 0;
    }
    opening->public_id = 0;
    opening->public_tokens = 0;
    sequence->public_tokens = 0;
}

/* No part of a block then: that it could not be had is no reason to refuse anything. */
static enum kvk_status open_give_part_up(struct opening *opening, enum kvk_status status)
{
    if (status != KVK_OK && status != KVK_WOULD_BLOCK && status != KVK_DEADLINE &&
        status != KVK_CANCELLED) {
        opening->cache->stats.partial_given_up++;
        opening->whole_blocks = true;
        opening->again = true;
    }
    return status;
}

/* Find the prefix and hold it before the lock is dropped again, so that making room cannot take it;
 * the chains go on behind it. */
static enum kvk_status open_take_drops(struct opening *opening)
{
    const struct kvk_tenant *tenant = opening->space->tenant;
    struct kvk_prefix prefix;
    struct kvk_quota_mark mark;
    for (;;) {
        enum kvk_status status = open_find_drops(opening, &prefix);
        if (status != KVK_OK) {
            return status;
        }
        kvk_quota_mark(opening->cache, tenant, &mark);
        open_prefix(opening, &prefix);
        if (open_namesakes(opening, &prefix)) {
            break;
        }
        open_prefix_undo(opening);
        opening->own_alone = true; /* which needs none */
    }
    kvk_partial_borrow(opening->cache, opening->space, &prefix, &opening->sources);
    enum kvk_status status = kvk_quota_check_holds(opening->cache, tenant, &mark, opening->error);
    if (status != KVK_OK && opening->sources.count > 0) {
        return open_give_part_up(opening, status);
    }
    if (status != KVK_OK) {
        kvk_refusal_note(opening->cache, opening->caller, tenant, opening->sequence->id, 0,
                         opening->error);
    }
    return status;
}

/* ---- The rest ---- */

static enum kvk_status open_reserve_drops(struct opening *opening)
{
    struct kvk_cache *cache = opening->cache;
    struct kvk_sequence *sequence = opening->sequence;
    struct kvk_space *space = opening->space;
    uint64_t growth_tokens = opening->request->growth_tokens;
    uint32_t total = kvk_blocks_for(space, sequence->length);
    struct kvk_room_want want = {
        .tier = sequence->home,
        .growth_bytes = kvk_sequence_growth_bytes(space, sequence->length, growth_tokens),
        .sequence_id = sequence->id,
    };
    uint32_t *blocks[KVK_GROUP_COUNT_MAX];
    uint64_t wanted = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        want.counts[g] = total - table->block_count;
        blocks[g] = table->blocks + table->block_count;
        wanted += want.counts[g];
    }
    if (wanted == 0 && want.growth_bytes == 0) {
        return KVK_OK;
    }
    struct kvk_caller caller = *opening->caller;
    bool has_part = opening->sources.count > 0;
    caller.call = has_part ? NULL : caller.call; /* with a part nobody is refused */
    enum kvk_status status =
        kvk_room_reserve_drops(cache, space, &want, blocks, &caller, opening->error);
    if (status != KVK_OK) {
        return has_part ? open_give_part_up(opening, status) : status;
    }
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        for (uint32_t i = table->block_count; i < total; i++) {
            table->pins[i] = (uint8_t)(sequence->home + 1);
            kvk_block_grant(cache, table->blocks[i]);
        }
        table->block_count = total;
    }
    sequence->growth_tokens = growth_tokens;
    kvk_sequence_keep_growth(cache, sequence, want.growth_bytes);
    return KVK_OK;
}

/* The part of a block comes into the first of the sequence's own. */
static enum kvk_status open_part_drops(struct opening *opening)
{
    const struct kvk_sequence *sequence = opening->sequence;
    uint32_t targets[KVK_GROUP_COUNT_MAX];
    if (opening->sources.count == 0) {
        return KVK_OK;
    }
    for (uint32_t g = 0; g < opening->sources.count; g++) {
        targets[g] = sequence->groups[g].blocks[sequence->whole_blocks];
    }
    uint64_t begun_ns = kvk_clock_now(opening->cache->clock);
    enum kvk_status status =
        kvk_partial_copy_drops(opening->cache, targets, &opening->sources, opening->error);
    opening->space->cost_ns += kvk_clock_now(opening->cache->clock) - begun_ns;
    return open_give_part_up(opening, status);
}

/* The next blocks of the prefix that lie on the host, head first, from block `*next` on. */
static uint32_t next_on_host(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                             uint32_t *next, struct kvk_relocation list[PROMOTE_SLICE])
{
    uint32_t prefix_blocks = (uint32_t)(sequence->cached / sequence->space->block_tokens);
    uint32_t group_count = sequence->space->group_count;
    uint32_t count = 0;
    for (; *next < prefix_blocks && count + group_count <= PROMOTE_SLICE; (*next)++) {
        for (uint32_t g = 0; g < group_count; g++) {
            if (sequence->groups[g].pins[*next] == KVK_TIER_HOST + 1 &&
                !kvk_block_is_public(cache, sequence->groups[g].blocks[*next])) {
                list[count++] = (struct kvk_relocation){.group = g, .index = *next};
            }
        }
    }
    return count;
}

/* The prefix cannot be used where it is: who asked reads mapped slots, and knows one format. */
static enum kvk_status refuse_device(struct opening *opening, const struct kvk_relocation *list,
                                     uint32_t count)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        bytes += opening->space->groups[list[i].group]->block_bytes;
    }
    return kvk_room_refuse(opening->cache, KVK_TIER_DEVICE, bytes, opening->space,
                           opening->sequence->id, opening->caller, opening->error);
}

/* Bring what lies on the host to the device, as far as there is room; the rest is used where it
 * is, but where that is compact. KVK_DATA_LOSS: it does not match its checksum. */
static enum kvk_status open_promote_drops(struct opening *opening)
{
    struct kvk_sequence *sequence = opening->sequence;
    if (sequence->home != KVK_TIER_DEVICE || opening->request->leave_on_host) {
        return KVK_OK;
    }
    struct kvk_caller quiet = *opening->caller; /* for want of room here nobody is refused */
    struct kvk_relocation list[PROMOTE_SLICE];
    uint32_t next = 0;
    quiet.call = NULL;
    for (;;) {
        uint32_t count = next_on_host(opening->cache, sequence, &next, list);
        if (count == 0) {
            return KVK_OK;
        }
        if (!opening->caller->may_block) {
            return KVK_WOULD_BLOCK;
        }
        uint32_t moved = 0;
        uint64_t begun_ns = kvk_clock_now(opening->cache->clock);
        enum kvk_status status = kvk_sequence_bring_drops(opening->cache, sequence, KVK_TIER_DEVICE,
                                                          list, count, &moved, &quiet, NULL);
        opening->space->cost_ns += kvk_clock_now(opening->cache->clock) - begun_ns;
        if (status == KVK_DATA_LOSS || status == KVK_DEADLINE || status == KVK_CANCELLED) {
            return kvk_fail(opening->error, status, KVK_CAUSE_NONE, "",
                            "the call ended while blocks were brought to the device");
        }
        if ((status != KVK_OK || moved < count) && kvk_space_is_compact_below(opening->space) &&
            !kvk_sequence_is_lost(sequence)) {
            return refuse_device(opening, &list[moved], count - moved);
        }
        if (status != KVK_OK || moved < count || kvk_sequence_is_lost(sequence)) {
            return KVK_OK;
        }
    }
}

/* A use of every block of the prefix, deepest first, now that the call succeeds. */
static void open_count(struct opening *opening)
{
    struct kvk_cache *cache = opening->cache;
    const struct kvk_sequence *sequence = opening->sequence;
    struct kvk_space *space = opening->space;
    uint32_t prefix_blocks = (uint32_t)(sequence->cached / space->block_tokens);
    uint64_t now = kvk_policy_now(cache);
    cache->stamp++;
    for (uint32_t g = 0; g < space->group_count; g++) {
        for (uint32_t i = prefix_blocks; i > 0; i--) {
            uint32_t id = sequence->groups[g].blocks[i - 1];
            if (id == KVK_BLOCK_NONE) {
                continue;
            }
            struct kvk_block *block = kvk_index_block(cache->index, id);
            cache->stats.block_uses[kvk_block_tier(block)]++;
            if (block->run != UINT32_MAX) { /* else invalidated meanwhile */
                kvk_evict_use(cache->evict, block, space->groups[g]->windowed, cache->stamp, now);
                kvk_hints_apply(cache, space, sequence->hints, sequence->hint_count, i - 1, id);
            }
        }
        bool offers = cache->disk_tier != NULL || cache->remote != NULL;
        for (uint32_t i = 0; i < prefix_blocks && offers; i++) {
            uint32_t id = sequence->groups[g].blocks[i];
            if (id != KVK_BLOCK_NONE && kvk_index_block(cache->index, id)->run != UINT32_MAX) {
                kvk_disk_offer(cache, id, false); /* parents first */
                kvk_remote_offer(cache, id, false);
            }
        }
    }
    if (opening->lookup) {
        uint64_t limit =
            kvk_prefix_limit(space, &opening->request->prompt, opening->request->leave_last);
        opening->sequence->asked_blocks = limit / space->block_tokens;
        kvk_mrc_opened(cache, sequence);
    }
    cache->stats.opens++;
    kvk_tenant_state_of(cache, space->tenant)->usage.saved_tokens += sequence->cached;
    uint64_t saved_ns = kvk_space_recompute_ns(space, 0, sequence->cached);
    cache->stats.saved_ns += saved_ns;
    space->saved_ns += saved_ns;
    if (!opening->request->no_lookup) {
        kvk_prefix_count(cache, space, sequence->length, sequence->cached, opening->request->retry);
        kvk_public_hit(cache, opening->public_id,
                       opening->request->retry ? 0 : opening->public_tokens);
        kvk_partial_count(cache, space, sequence->partial_tokens, opening->request->retry);
    }
    kvk_partial_use(cache, space, &opening->sources);
}

/* Was its space, salt or prefix invalidated while the lock was dropped? Who asked for that was
 * promised that nobody begins with what was there before. */
static bool is_invalidated(const struct opening *opening)
{
    for (uint32_t g = 0; g < opening->space->group_count; g++) {
        const struct kvk_sequence_group *table = &opening->sequence->groups[g];
        if (table->detached || !kvk_root_is_current(opening->cache, table->root)) {
            return true;
        }
    }
    return false;
}

/* With the lock: everything from the walk on. On failure the sequence is gone. */
static enum kvk_status open_run_drops(struct opening *opening)
{
    struct kvk_sequence *sequence = opening->sequence;
    kvk_sequence_busy_begin(sequence);
    enum kvk_status status = open_fill(opening);
    if (status == KVK_EXHAUSTED && opening->error != NULL) {
        kvk_refusal_note(opening->cache, opening->caller, opening->space->tenant, 0, 0,
                         opening->error);
    }
    if (status == KVK_OK) {
        status = open_take_drops(opening);
    }
    if (status == KVK_OK) {
        status = open_reserve_drops(opening);
    }
    if (status == KVK_OK) {
        status = open_part_drops(opening);
    }
    if (status == KVK_OK) {
        status = open_promote_drops(opening);
    }
    if (status == KVK_OK && sequence->doomed) {
        status = kvk_fail(opening->error, KVK_ABORTED, KVK_CAUSE_SESSION_ENDED, "session_id",
                          "the session ended while the sequence was opened");
    }
    if (status == KVK_OK && is_invalidated(opening)) {
        opening->invalidated = true;
        status = kvk_fail(opening->error, KVK_UNAVAILABLE, KVK_CAUSE_INVALIDATED, "space_id",
                          "the space was invalidated while the sequence was opened");
    }
    sequence->busy = false;
    sequence->doomed = false;
    sequence->cut_wanted = false; /* nobody was told of its slots yet */
    if (status == KVK_OK) {
        open_count(opening);
    } else {
        kvk_sequence_end_drops(opening->cache, sequence, NULL);
    }
    kvk_partial_return(opening->cache, &opening->sources);
    return status;
}

/* One try, from allocation to answer. */
static enum kvk_status open_try(struct opening *opening, struct kvk_sequence_reply *reply)
{
    struct kvk_cache *cache = opening->cache;
    kvk_lock(&cache->lock);
    enum kvk_status status = open_find(opening);
    kvk_unlock(&cache->lock);
    if (status != KVK_OK || opening->repeated_id != 0) {
        return status;
    }
    if (opening->tables != NULL) {
        status = kvk_tables_reserve_unlocked(
            opening->tables, opening->size.blocks * opening->size.group_count, opening->error);
    }
    if (status == KVK_OK) {
        status = kvk_sequence_create(&opening->size, &opening->sequence, opening->error);
    }
    if (status != KVK_OK) {
        return status;
    }
    KVK_ASSERT(opening->sequence != NULL);
    opening->sequence->extra_bytes = opening->extra_bytes;

    kvk_lock(&cache->lock);
    status = open_find(opening);
    if (status == KVK_OK && opening->repeated_id == 0) {
        KVK_ASSERT(opening->space != NULL);
        status = kvk_sequence_link(cache, opening->sequence, opening->instance, opening->space,
                                   opening->error);
        if (status == KVK_EXHAUSTED && opening->error != NULL) {
            kvk_refusal_note(cache, opening->caller, opening->space->tenant, 0, 0, opening->error);
        }
    }
    if (status != KVK_OK || opening->repeated_id != 0) {
        kvk_unlock(&cache->lock);
        kvk_sequence_free(opening->sequence);
        return status;
    }
    status = open_run_drops(opening);
    if (status == KVK_OK) {
        kvk_sequence_answer(opening->sequence, reply);
        kvk_sequence_tables_all(cache, opening->sequence, opening->tables);
    }
    kvk_unlock(&cache->lock);
    return status;
}

enum kvk_status kvk_sequence_open(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  const struct kvk_open_request *request,
                                  struct kvk_sequence_reply *reply, struct kvk_tables *tables,
                                  struct kvk_error *error)
{
    struct opening opening = {
        .cache = cache,
        .caller = caller,
        .request = request,
        .tables = tables,
        .error = error,
        .lookup = !request->no_lookup,
    };
    *reply = (struct kvk_sequence_reply){0};
    enum kvk_status status = check_request(&opening);
    if (status != KVK_OK) {
        return status;
    }
    for (int tries = 0; tries < OPEN_TRIES; tries++) {
        opening.invalidated = false;
        opening.again = false;
        status = open_try(&opening, reply);
        if (opening.again) {
            continue;
        }
        if (status == KVK_DATA_LOSS) {
            opening.lookup = false; /* what is cached is damaged: a miss, never a hit */
        } else if (!opening.invalidated) {
            break;
        }
    }
    if (status == KVK_OK && opening.repeated_id != 0) {
        return kvk_sequence_get(cache, caller, request->session_id, opening.repeated_id, reply,
                                tables, error);
    }
    return status;
}
