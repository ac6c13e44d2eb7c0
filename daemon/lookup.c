#include "daemon/lookup.h"

#include <string.h>

#include "base/assert.h"
#include "daemon/cache_internal.h"

#define DEVICE_BIT (1U << KVK_TIER_DEVICE)

uint64_t kvk_policy_now(const struct kvk_cache *cache)
{
    return cache->policy_ns != 0 ? cache->policy_ns : kvk_clock_now(cache->clock);
}

/* ---- What a query sees ---- */

/* Blocks [0, sinks) and [first, blocks) are seen by a query after `blocks` whole blocks. */
struct seen {
    uint64_t sinks;
    uint64_t first;
};

static struct seen seen_at(const struct kvk_group *group, uint64_t tokens)
{
    const struct kvk_geometry *geometry = &group->geometry;
    if (!group->windowed) {
        return (struct seen){0};
    }
    uint64_t blocks = tokens / geometry->block_tokens;
    uint64_t sinks =
        ((uint64_t)geometry->sinks + geometry->block_tokens - 1) / geometry->block_tokens;
    uint64_t start = kvk_geometry_window_start(geometry, tokens);
    struct seen seen = {
        .sinks = sinks < blocks ? sinks : blocks,
        .first = start / geometry->block_tokens,
    };
    if (seen.first < seen.sinks) {
        seen.first = seen.sinks;
    }
    return seen;
}

static struct seen seen_after(const struct kvk_group *group, uint64_t blocks)
{
    return seen_at(group, blocks * group->geometry.block_tokens);
}

bool kvk_group_sees_at(const struct kvk_group *group, uint64_t tokens, uint64_t index)
{
    struct seen seen = seen_at(group, tokens);
    return index < tokens / group->geometry.block_tokens &&
           (index < seen.sinks || index >= seen.first);
}

bool kvk_group_sees(const struct kvk_group *group, uint64_t blocks, uint64_t index)
{
    return kvk_group_sees_at(group, blocks * group->geometry.block_tokens, index);
}

static bool range_in_memory(const uint8_t *tiers, uint64_t first, uint64_t end)
{
    for (uint64_t i = first; i < end; i++) {
        if ((tiers[i] & KVK_MEMORY_TIER_MASK) == 0) {
            return false;
        }
    }
    return true;
}

bool kvk_prefix_sees_memory(const struct kvk_cache *cache, const struct kvk_space *space,
                            uint64_t tokens)
{
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct seen seen = seen_at(space->groups[g], tokens);
        if (!range_in_memory(cache->path_tiers[g], 0, seen.sinks) ||
            !range_in_memory(cache->path_tiers[g], seen.first, tokens / space->block_tokens)) {
            return false;
        }
    }
    return true;
}

/* ---- The boundary ---- */

/* The first block of [0, count) without bytes; count where there is none. */
static uint64_t first_hole(const uint8_t *tiers, uint64_t count)
{
    const uint8_t *hole = count == 0 ? NULL : memchr(tiers, 0, count);
    return hole == NULL ? count : (uint64_t)(hole - tiers);
}

/*
 * Lower `boundary` until the window before it has bytes. `*whole_from` is how far back from the
 * boundary that is known already, so that all calls together look at each block once.
 */
static uint64_t window_boundary(const struct kvk_group *group, const uint8_t *tiers,
                                uint64_t boundary, uint64_t *whole_from)
{
    if (*whole_from > boundary) {
        *whole_from = boundary;
    }
    for (;;) {
        struct seen seen = seen_after(group, boundary);
        if (*whole_from <= seen.first) {
            return boundary;
        }
        const uint8_t *hole = memrchr(tiers + seen.first, 0, *whole_from - seen.first);
        if (hole == NULL) {
            *whole_from = seen.first;
            return boundary;
        }
        /* Every boundary above the hole, down to here, sees it. */
        boundary = (uint64_t)(hole - tiers);
        *whole_from = boundary;
    }
}

uint64_t kvk_boundary_find(const struct kvk_space *space,
                           const uint8_t *const tiers[KVK_GROUP_COUNT_MAX], uint64_t limit)
{
    for (uint32_t g = 0; g < space->group_count; g++) {
        const struct kvk_group *group = space->groups[g];
        struct seen seen = seen_after(group, limit);
        uint64_t needed = group->windowed ? seen.sinks : limit;
        uint64_t hole = first_hole(tiers[g], needed);
        limit = hole < needed ? hole : limit;
    }
    uint64_t whole_from[KVK_GROUP_COUNT_MAX];
    for (uint32_t g = 0; g < space->group_count; g++) {
        whole_from[g] = limit;
    }
    /* One group may lower the boundary to where another has no bytes: until all agree. */
    uint64_t boundary = limit;
    uint64_t before;
    do {
        before = boundary;
        for (uint32_t g = 0; g < space->group_count; g++) {
            if (space->groups[g]->windowed) {
                boundary = window_boundary(space->groups[g], tiers[g], boundary, &whole_from[g]);
            }
        }
    } while (boundary != before);
    return boundary;
}

static uint64_t boundary_find(const struct kvk_cache *cache, const struct kvk_space *space,
                              uint64_t limit)
{
    const uint8_t *tiers[KVK_GROUP_COUNT_MAX];
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        tiers[g] = cache->path_tiers[g];
    }
    return kvk_boundary_find(space, tiers, limit);
}

uint64_t kvk_prefix_limit(const struct kvk_space *space, const struct kvk_prompt *prompt,
                          bool leave_last)
{
    uint64_t tokens = prompt->token_count;
    if (leave_last && tokens > 0) {
        tokens--;
    }
    return tokens < space->lookup_min_tokens || !kvk_space_shares(space) ? 0 : tokens;
}

void kvk_prefix_find(struct kvk_cache *cache, struct kvk_space *space,
                     const uint32_t roots[KVK_GROUP_COUNT_MAX], const struct kvk_prompt *prompt,
                     uint64_t token_limit, struct kvk_prefix *prefix)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(token_limit <= prompt->token_count);
    *prefix = (struct kvk_prefix){0};
    uint64_t limit = token_limit / space->block_tokens;
    if (limit > cache->path_capacity) {
        limit = cache->path_capacity;
    }
    uint64_t asked = limit;
    for (uint32_t g = 0; g < space->group_count && limit > 0; g++) {
        if (roots[g] == KVK_ROOT_NONE) {
            limit = 0;
            break;
        }
        const struct kvk_content content = {
            .tokens = prompt->tokens,
            .token_count = limit * space->block_tokens,
            .spans = prompt->spans,
            .span_count = prompt->span_count,
        };
        struct kvk_match match = {
            .cursor = {.root = roots[g], .block = KVK_BLOCK_NONE},
            .path = cache->path[g],
            .tiers = cache->path_tiers[g],
            .path_capacity = limit,
        };
        kvk_index_match(cache->index, &content, &match);
        prefix->known[g] = match.path_count;
        prefix->own[g] = match.path_count;
        prefix->hashed_bytes += match.hashed_bytes;
        /* No boundary lies past what one group knows: the others need not go further. */
        limit = match.path_count;
    }
    /* What is public lies in the host tier as it was sealed, which a compact one is not read as. */
    if (prompt->use_public && asked > 0 && cache->publications != NULL &&
        !kvk_space_is_compact_below(space)) {
        limit = kvk_public_merge(cache, space, prompt, asked, prefix);
    }
    prefix->blocks = boundary_find(cache, space, limit);
    kvk_public_count(cache, prefix);
    cache->stats.hashed_bytes += prefix->hashed_bytes;
}

void kvk_prefix_shorten(const struct kvk_cache *cache, const struct kvk_space *space,
                        struct kvk_prefix *prefix)
{
    prefix->blocks = boundary_find(cache, space, prefix->blocks);
    kvk_public_count(cache, prefix);
}

/* The prefix of a prompt, for calls that keep nothing: an unknown salt leaves nothing behind. */
static void prefix_look(struct kvk_cache *cache, struct kvk_space *space,
                        const struct kvk_prompt *prompt, uint64_t token_limit,
                        uint32_t roots[KVK_GROUP_COUNT_MAX], struct kvk_prefix *prefix)
{
    kvk_space_roots_find(cache, space, prompt->salt, prompt->salt_size, roots);
    kvk_prefix_find(cache, space, roots, prompt, token_limit, prefix);
}

/* ---- Counting ---- */

void kvk_prefix_cost(struct kvk_cache *cache, struct kvk_space *space, uint64_t begun_ns)
{
    uint64_t cost_ns = kvk_clock_now(cache->clock) - begun_ns;
    cache->stats.lookup_ns += cost_ns;
    space->cost_ns += cost_ns;
}

void kvk_prefix_count(struct kvk_cache *cache, struct kvk_space *space, uint64_t query_tokens,
                      uint64_t hit_tokens, bool retry)
{
    KVK_ASSERT(hit_tokens <= query_tokens);
    if (retry) {
        cache->stats.retries++;
        return;
    }
    cache->stats.lookups++;
    cache->stats.lookup_tokens += query_tokens;
    cache->stats.hit_tokens += hit_tokens;
    struct kvk_tenant_usage *usage = &kvk_tenant_state_of(cache, space->tenant)->usage;
    usage->lookups++;
    usage->lookup_tokens += query_tokens;
    usage->hit_tokens += hit_tokens;
    space->queries++;
    space->query_tokens += query_tokens;
    space->hit_tokens += hit_tokens;
}

static void use_range(struct kvk_cache *cache, const struct kvk_space *space, uint32_t g,
                      uint64_t first, uint64_t end)
{
    const struct kvk_group *group = space->groups[g];
    uint64_t now = kvk_policy_now(cache);
    for (uint64_t i = end; i > first; i--) {
        uint32_t tiers = cache->path_tiers[g][i - 1];
        cache->stats.block_uses[tiers != 0 ? __builtin_ctz(tiers) : 0] += tiers != 0 ? 1 : 0;
        if (cache->path_tiers[g][i - 1] != 0 &&
            !kvk_block_is_public(cache, cache->path[g][i - 1])) {
            kvk_evict_use(cache->evict, kvk_index_block(cache->index, cache->path[g][i - 1]),
                          group->windowed, cache->stamp, now);
        }
    }
    for (uint64_t i = first; i < end && cache->disk_tier != NULL; i++) { /* parents first */
        if (cache->path_tiers[g][i] != 0 && !kvk_block_is_public(cache, cache->path[g][i])) {
            kvk_disk_offer(cache, cache->path[g][i], false);
        }
    }
    for (uint64_t i = first; i < end && cache->remote != NULL; i++) {
        if (cache->path_tiers[g][i] != 0 && !kvk_block_is_public(cache, cache->path[g][i])) {
            kvk_remote_offer(cache, cache->path[g][i], false);
        }
    }
}

void kvk_prefix_use(struct kvk_cache *cache, struct kvk_space *space,
                    const struct kvk_prefix *prefix)
{
    cache->stamp++;
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct seen seen = seen_after(space->groups[g], prefix->blocks);
        use_range(cache, space, g, seen.first, prefix->blocks);
        use_range(cache, space, g, 0, seen.sinks);
    }
}

/* ---- The calls ---- */

static uint64_t count_off_device(const uint8_t *tiers, uint64_t first, uint64_t end)
{
    uint64_t count = 0;
    for (uint64_t i = first; i < end; i++) {
        count += (tiers[i] & DEVICE_BIT) == 0;
    }
    return count;
}

static uint64_t count_on_disk(const uint8_t *tiers, uint64_t end)
{
    uint64_t count = 0;
    for (uint64_t i = 0; i < end; i++) {
        count += tiers[i] == 1U << KVK_TIER_DISK;
    }
    return count;
}

/* Bytes that would have to come to the device for a query from the boundary. */
static uint64_t bytes_to_load(const struct kvk_cache *cache, const struct kvk_space *space,
                              uint64_t boundary)
{
    if (cache->tiers[KVK_TIER_DEVICE].device == NULL) {
        return 0;
    }
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        const uint8_t *tiers = cache->path_tiers[g];
        struct seen seen = seen_after(space->groups[g], boundary);
        uint64_t blocks =
            count_off_device(tiers, 0, seen.sinks) + count_off_device(tiers, seen.first, boundary);
        bytes += blocks * space->groups[g]->block_bytes;
    }
    return bytes;
}

/* The part of a block that is copied when the sequence is opened. */
static void answer_part(const struct kvk_cache *cache, const struct kvk_space *space,
                        const struct kvk_prefix *prefix, struct kvk_lookup_reply *reply)
{
    const struct kvk_block *source = kvk_index_block(cache->index, prefix->partial[0]);
    bool on_device = (source->tier_mask & DEVICE_BIT) != 0;
    reply->partial_tokens = prefix->partial_tokens;
    reply->cached_tokens += prefix->partial_tokens;
    reply->device_tokens += on_device ? prefix->partial_tokens : 0;
    reply->host_tokens += on_device ? 0 : prefix->partial_tokens;
    reply->recompute_ns = kvk_space_recompute_ns(space, 0, reply->cached_tokens);
}

static void lookup_answer(struct kvk_cache *cache, struct kvk_space *space,
                          const struct kvk_prefix *prefix, struct kvk_lookup_reply *reply)
{
    uint64_t boundary = prefix->blocks;
    reply->cached_tokens = boundary * space->block_tokens;
    reply->host_tokens = count_off_device(cache->path_tiers[0], 0, boundary) * space->block_tokens;
    reply->device_tokens = reply->cached_tokens - reply->host_tokens;
    if (cache->disk_tier != NULL) {
        struct kvk_disk_estimate estimate;
        kvk_disk_estimate(cache, space, prefix, &estimate);
        reply->disk_tokens = count_on_disk(cache->path_tiers[0], boundary) * space->block_tokens;
        reply->host_tokens -= reply->disk_tokens;
        reply->restore_ns = estimate.restore_ns;
        reply->restore_recompute_ns = estimate.recompute_ns;
    }
    uint64_t bytes = bytes_to_load(cache, space, boundary);
    reply->load_ns = bytes == 0 ? 0 : kvk_tier_load_ns(cache, bytes);
    reply->recompute_ns = kvk_space_recompute_ns(space, 0, reply->cached_tokens);
    reply->hashed_bytes = prefix->hashed_bytes;
    reply->public_tokens = prefix->public_blocks * space->block_tokens;
    if (prefix->partial_tokens > 0) {
        answer_part(cache, space, prefix, reply);
    }
}

enum kvk_status kvk_lookup(struct kvk_cache *cache, const struct kvk_caller *caller,
                           const struct kvk_lookup_request *request, struct kvk_lookup_reply *reply,
                           struct kvk_error *error)
{
    struct kvk_space *space;
    *reply = (struct kvk_lookup_reply){0};
    kvk_lock(&cache->lock);
    enum kvk_status status = kvk_space_find(cache, caller, request->space_id, &space, error);
    if (status == KVK_OK) {
        uint64_t begun_ns = kvk_clock_now(cache->clock);
        uint64_t limit = kvk_prefix_limit(space, &request->prompt, request->leave_last);
        uint32_t roots[KVK_GROUP_COUNT_MAX];
        struct kvk_prefix prefix;
        prefix_look(cache, space, &request->prompt, limit, roots, &prefix);
        struct kvk_prefix with_part = prefix;
        kvk_partial_find(cache, space, roots, &request->prompt, limit, &with_part);
        lookup_answer(cache, space, &with_part, reply);
        if (request->read_ahead && reply->disk_tokens > 0) {
            kvk_disk_ahead(cache, space, &prefix);
        }
        kvk_remote_ask(cache, space, &request->prompt, limit, &prefix, &reply->remote);
        kvk_prefix_count(cache, space, request->prompt.token_count, reply->cached_tokens,
                         request->retry);
        kvk_partial_count(cache, space, reply->partial_tokens, request->retry);
        if (!request->retry && prefix.publication != NULL) {
            kvk_public_hit(cache, prefix.publication->id, reply->public_tokens);
        }
        kvk_prefix_cost(cache, space, begun_ns);
    }
    kvk_unlock(&cache->lock);
    return status;
}

static void hint_range(struct kvk_cache *cache, const struct kvk_space *space, uint32_t g,
                       uint64_t known, const struct kvk_prompt *prompt)
{
    struct kvk_hint hints[KVK_HINTS_MAX];
    uint64_t now_ns = kvk_policy_now(cache);
    KVK_ASSERT(prompt->hint_count <= KVK_HINTS_MAX);
    for (uint32_t i = 0; i < prompt->hint_count; i++) {
        hints[i] = kvk_hint_from(&prompt->hints[i], now_ns);
    }
    for (uint64_t i = 0; i < known && prompt->hint_count > 0; i++) {
        kvk_hints_apply(cache, space, hints, prompt->hint_count, i, cache->path[g][i]);
    }
}

enum kvk_status kvk_touch(struct kvk_cache *cache, const struct kvk_caller *caller,
                          uint64_t space_id, const struct kvk_prompt *prompt,
                          uint64_t *touched_tokens, struct kvk_error *error)
{
    struct kvk_space *space;
    *touched_tokens = 0;
    kvk_lock(&cache->lock);
    enum kvk_status status = kvk_space_find(cache, caller, space_id, &space, error);
    if (status == KVK_OK) {
        uint32_t roots[KVK_GROUP_COUNT_MAX];
        struct kvk_prefix prefix;
        struct kvk_prompt own = *prompt;
        uint64_t limit = kvk_space_shares(space) ? prompt->token_count : 0;
        own.use_public = false; /* what is public does not age */
        prefix_look(cache, space, &own, limit, roots, &prefix);
        uint64_t known = prefix.known[space->group_count - 1]; /* the least of all groups */
        cache->stamp++;
        for (uint32_t g = 0; g < space->group_count; g++) {
            use_range(cache, space, g, 0, known);
            hint_range(cache, space, g, known, prompt);
        }
        *touched_tokens = known * space->block_tokens;
        if (cache->disk_tier != NULL) {
            kvk_disk_ahead(cache, space, &prefix);
        }
        struct kvk_remote_use use;
        kvk_remote_ask(cache, space, &own, limit, &prefix, &use);
    }
    kvk_unlock(&cache->lock);
    return status;
}
