#include "daemon/hint.h"

#include "base/assert.h"
#include "daemon/cache_internal.h"

struct kvk_hint kvk_hint_from(const struct kvk_priority_hint *asked, uint64_t now_ns)
{
    KVK_ASSERT(asked->priority <= KVK_HINT_PRIORITY_MAX);
    KVK_ASSERT(asked->duration_ms <= KVK_HINT_MS_MAX);
    uint32_t strength = asked->priority > KVK_HINT_PRIORITY_NEUTRAL
                            ? asked->priority - KVK_HINT_PRIORITY_NEUTRAL
                            : KVK_HINT_PRIORITY_NEUTRAL - asked->priority;
    struct kvk_hint hint = {
        .first_token = asked->first_token,
        .end_token = asked->first_token + asked->token_count,
        .until_ns =
            now_ns + asked->duration_ms * KVK_NS_PER_MS / KVK_HINT_PRIORITY_NEUTRAL * strength,
        .kind = KVK_EVICT_HINT_NONE,
    };
    if (strength > 0) {
        hint.kind = asked->priority > KVK_HINT_PRIORITY_NEUTRAL ? KVK_EVICT_HINT_LAST
                                                                : KVK_EVICT_HINT_FIRST;
    }
    return hint;
}

void kvk_hints_apply(struct kvk_cache *cache, const struct kvk_space *space,
                     const struct kvk_hint *hints, uint32_t hint_count, uint64_t index, uint32_t id)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint64_t first = index * space->block_tokens;
    struct kvk_block *block = kvk_index_block(cache->index, id);
    if (!kvk_block_is_whole(block) || block->run == UINT32_MAX) {
        return;
    }
    for (uint32_t i = hint_count; i > 0; i--) {
        const struct kvk_hint *hint = &hints[i - 1];
        if (hint->end_token <= first || hint->first_token >= first + space->block_tokens) {
            continue;
        }
        struct kvk_tenant_state *state = kvk_tenant_state_of(cache, space->tenant);
        const struct kvk_evict_share *share = &state->hint_share;
        const struct kvk_group *group = kvk_group_of(cache, block);
        uint64_t bytes = kvk_evict_kept_bytes(block, group->block_bytes, group->windowed);
        if (hint->kind == KVK_EVICT_HINT_LAST && block->hint != KVK_EVICT_HINT_LAST &&
            share->kept_bytes + bytes > share->limit_bytes) {
            state->usage.hints_left_out++;
        } else {
            kvk_evict_hint(cache->evict, block, hint->kind, hint->until_ns);
        }
        return;
    }
}
