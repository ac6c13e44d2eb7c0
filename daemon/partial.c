/*
 * Partial reuse: a hit that ends within a block.
 *
 * Where a prompt leaves the chain in the middle of a block, another block of the same chain may
 * begin with the same tokens. Their K and V are as good for this prompt: they depend on what lies
 * before them alone. The block itself is another's, sealed, and cannot be gone on with; so it is
 * copied into the sequence's own block, whole, which lets its checksum be verified on the way, and
 * the tokens behind the shared ones are written over as those of any unfilled tail.
 *
 * Nothing is found across roots, so tenants, spaces and salts stay apart as everywhere.
 */
#include "base/assert.h"
#include "daemon/cache_internal.h"

enum kvk_status kvk_partial_check(const struct kvk_geometry *geometry, const char *name,
                                  struct kvk_error *error)
{
    const char *reason = NULL;
    if (geometry->layout == KVK_LAYOUT_OPAQUE) {
        reason = "its blocks are opaque: what they hold belongs to their end";
    } else if (geometry->attention == KVK_ATTENTION_CROSS) {
        reason = "it is cross-attention: what is in a block follows from all tokens";
    } else if (geometry->format_k == KVK_FORMAT_FP8_E4M3 ||
               geometry->format_k == KVK_FORMAT_INT8_CHANNEL) {
        reason = "its tokens share scales within a block, which later tokens would change";
    }
    if (reason == NULL) {
        return KVK_OK;
    }
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "partial_reuse",
                    "partial_reuse: no block of %s can be cut: %s", name, reason);
}

/* Where the group's own chain stands after `blocks` blocks; false: it does not go so far. */
static bool place_find(const struct kvk_cache *cache, const struct kvk_content *content, uint32_t g,
                       uint32_t root, uint64_t blocks, const struct kvk_prefix *prefix,
                       struct kvk_cursor *cursor)
{
    *cursor = (struct kvk_cursor){.root = root, .block = KVK_BLOCK_NONE};
    if (prefix->own[g] < blocks) {
        return false;
    }
    if (prefix->publication == NULL) {
        cursor->blocks = blocks;
        cursor->block = blocks == 0 ? KVK_BLOCK_NONE : cache->path[g][blocks - 1];
        return true;
    }
    /* The path says where the bytes are, which is not in the chain where they are public. */
    struct kvk_match match = {.cursor = *cursor, .path_capacity = blocks};
    kvk_index_match(cache->index, content, &match);
    *cursor = match.cursor;
    return match.path_count == blocks;
}

/* Copying takes less time than computing would, or nobody knows. */
static bool is_worth_it(const struct kvk_cache *cache, const struct kvk_space *space,
                        uint64_t first, uint64_t end)
{
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        bytes += space->groups[g]->block_bytes;
    }
    uint64_t recompute_ns = kvk_space_recompute_ns(space, first, end);
    return recompute_ns == 0 || recompute_ns > kvk_tier_load_ns(cache, bytes);
}

/* Where copies lie as the worker wrote them: a compact one cannot be written on. */
static uint8_t own_form_tiers(const struct kvk_group *group)
{
    uint8_t mask = 0;
    for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT; tier++) {
        mask |= (uint8_t)(group->forms[tier].compact ? 0 : 1U << tier);
    }
    return mask;
}

/* Try behind `blocks` whole blocks. */
static bool part_find(struct kvk_cache *cache, const struct kvk_space *space,
                      const uint32_t roots[KVK_GROUP_COUNT_MAX], const struct kvk_prompt *prompt,
                      uint64_t token_limit, uint64_t blocks, struct kvk_prefix *prefix)
{
    uint64_t first = blocks * space->block_tokens;
    struct kvk_content content = {
        .tokens = prompt->tokens,
        .token_count = token_limit,
        .spans = prompt->spans,
        .span_count = prompt->span_count,
    };
    uint32_t sources[KVK_GROUP_COUNT_MAX];
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct kvk_cursor cursor;
        struct kvk_partial partial = {.tokens = 0};
        if (roots[g] != KVK_ROOT_NONE &&
            place_find(cache, &content, g, roots[g], blocks, prefix, &cursor)) {
            kvk_index_match_part(cache->index, &content, &cursor, own_form_tiers(space->groups[g]),
                                 &partial);
        }
        if (partial.tokens == 0) {
            return false;
        }
        sources[g] = partial.block;
        content.token_count = first + partial.tokens; /* no group takes more than another */
    }
    if (!is_worth_it(cache, space, first, content.token_count) ||
        (blocks > prefix->blocks && !kvk_prefix_sees_memory(cache, space, content.token_count))) {
        return false;
    }
    prefix->blocks = blocks;
    prefix->partial_tokens = (uint32_t)(content.token_count - first);
    for (uint32_t g = 0; g < space->group_count; g++) {
        prefix->partial[g] = sources[g];
    }
    return true;
}

void kvk_partial_find(struct kvk_cache *cache, const struct kvk_space *space,
                      const uint32_t roots[KVK_GROUP_COUNT_MAX], const struct kvk_prompt *prompt,
                      uint64_t token_limit, struct kvk_prefix *prefix)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(prefix->blocks * space->block_tokens <= token_limit);
    prefix->partial_tokens = 0;
    if (!space->partial_reuse || prompt->whole_blocks) {
        return;
    }
    /* Under a window a query from further on sees less: where whole blocks are a hit no more, a
     * part of the next one may be. */
    uint64_t known = prefix->known[space->group_count - 1]; /* the least of all groups */
    if (prefix->publication == NULL && known > prefix->blocks &&
        part_find(cache, space, roots, prompt, token_limit, known, prefix)) {
        return;
    }
    (void)part_find(cache, space, roots, prompt, token_limit, prefix->blocks, prefix);
}

void kvk_partial_count(struct kvk_cache *cache, const struct kvk_space *space, uint64_t tokens,
                       bool retry)
{
    if (tokens == 0 || retry) {
        return;
    }
    cache->stats.partial_hits++;
    cache->stats.partial_hit_tokens += tokens;
    kvk_tenant_state_of(cache, space->tenant)->usage.partial_hit_tokens += tokens;
}

/* ---- The copy ---- */

void kvk_partial_borrow(struct kvk_cache *cache, const struct kvk_space *space,
                        const struct kvk_prefix *prefix, struct kvk_partial_sources *sources)
{
    KVK_ASSERT(sources->count == 0);
    for (uint32_t g = 0; g < space->group_count && prefix->partial_tokens > 0; g++) {
        uint32_t id = prefix->partial[g];
        enum kvk_tier tier = kvk_block_tier(kvk_index_block(cache->index, id));
        kvk_block_borrow(cache, id, tier);
        sources->blocks[g] = id;
        sources->tiers[g] = (uint8_t)tier;
        sources->count++;
    }
}

void kvk_partial_return(struct kvk_cache *cache, struct kvk_partial_sources *sources)
{
    for (; sources->count > 0; sources->count--) {
        uint32_t g = sources->count - 1;
        kvk_block_return(cache, sources->blocks[g], (enum kvk_tier)sources->tiers[g]);
    }
}

enum kvk_status kvk_partial_copy_drops(struct kvk_cache *cache, const uint32_t *targets,
                                       const struct kvk_partial_sources *sources,
                                       struct kvk_error *error)
{
    for (uint32_t g = 0; g < sources->count; g++) {
        uint32_t source = sources->blocks[g];
        enum kvk_tier tier = kvk_block_tier(kvk_index_block(cache->index, source));
        enum kvk_status status = kvk_block_clone_drops(cache, targets[g], source, error);
        if (status == KVK_DATA_LOSS) {
            kvk_block_discredit(cache, source, tier);
        }
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

void kvk_partial_use(struct kvk_cache *cache, const struct kvk_space *space,
                     const struct kvk_partial_sources *sources)
{
    for (uint32_t g = 0; g < sources->count; g++) {
        struct kvk_block *block = kvk_index_block(cache->index, sources->blocks[g]);
        if (block->run != UINT32_MAX) { /* else invalidated meanwhile */
            kvk_evict_use(cache->evict, block, space->groups[g]->windowed, cache->stamp,
                          kvk_policy_now(cache));
        }
    }
}
