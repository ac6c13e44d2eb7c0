/*
 * What goes into the journal, and with which reason: whoever drops blocks says why before, by
 * kvk_gone_begin(); where nobody did, the block's own state tells.
 */
#include "base/assert.h"
#include "daemon/cache_internal.h"

void kvk_gone_begin(struct kvk_cache *cache, enum kvk_gone_reason reason,
                    const struct kvk_space *space)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(cache->gone_cause.reason == KVK_GONE_NONE);
    cache->gone_cause = (struct kvk_gone_cause){.reason = reason, .space = space};
}

void kvk_gone_end(struct kvk_cache *cache)
{
    KVK_ASSERT(cache->gone_cause.reason != KVK_GONE_NONE);
    cache->gone_cause = (struct kvk_gone_cause){.reason = KVK_GONE_NONE};
}

static uint32_t idle_ms(const struct kvk_block *block, uint64_t now_ns)
{
    uint64_t ms = now_ns > block->used_ns ? (now_ns - block->used_ns) / KVK_NS_PER_MS : 0;
    return ms < UINT32_MAX ? (uint32_t)ms : UINT32_MAX;
}

void kvk_gone_note(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier, uint8_t left,
                   enum kvk_gone_reason otherwise)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_gone_cause *cause = &cache->gone_cause;
    enum kvk_gone_reason reason = cause->reason != KVK_GONE_NONE ? cause->reason : otherwise;
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    if (reason == KVK_GONE_NONE || block->run == UINT32_MAX) {
        return; /* the daemon ends, or nobody could ever have found it */
    }
    kvk_journal_expect(&cache->journal, block->key);
    const struct kvk_group *group = kvk_group_of(cache, block);
    uint64_t now_ns = kvk_clock_now(cache->clock); /* once: this is on the path of every eviction */
    uint64_t policy_ns = cache->policy_ns != 0 ? cache->policy_ns : now_ns;
    const struct kvk_gone gone = {
        .key = block->key,
        .time_ns = now_ns,
        .space_id = group->space->id,
        .for_space_id = cause->space != NULL ? cause->space->id : 0,
        .for_tenant_id = cause->space != NULL ? cause->space->tenant->id : 0,
        .idle_ms = idle_ms(block, policy_ns),
        .score = block->queue != NULL ? (float)kvk_evict_score(block->queue, block, policy_ns) : 0,
        .position = block->position,
        .use_count = block->use_count,
        .group = (uint8_t)group->index,
        .tier = (uint8_t)tier,
        .left = left,
        .reason = (uint8_t)reason,
    };
    kvk_journal_add(&cache->journal, &gone);
}

/* Of the first group, and of the first block that was not sealed: the one that a look-up of the
 * same tokens misses first. One block is hashed. */
void kvk_gone_note_aborted(struct kvk_cache *cache, const struct kvk_sequence *sequence)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_space *space = sequence->space;
    const struct kvk_sequence_group *table = &sequence->groups[0];
    uint64_t end = (sequence->whole_blocks + 1) * space->block_tokens;
    if (sequence->committed < end || table->block_count <= sequence->whole_blocks ||
        table->detached || table->root == KVK_ROOT_NONE ||
        table->cursor.blocks != sequence->whole_blocks ||
        !kvk_root_is_current(cache, table->root)) {
        return; /* nothing that could have been found is lost */
    }
    const struct kvk_content content = {
        .tokens = sequence->tokens,
        .token_count = end,
        .spans = sequence->spans,
        .span_count = sequence->span_count,
    };
    struct kvk_key key;
    if (table->cursor.block != KVK_BLOCK_NONE) {
        key = kvk_index_block(cache->index, table->cursor.block)->key;
    } else if (kvk_space_root_key(space, 0, sequence->salt, sequence->salt_size, 0, &key) !=
               KVK_OK) {
        return;
    }
    if (!kvk_index_key_step(cache->index, kvk_space_hasher(space), space->block_tokens, &content,
                            sequence->whole_blocks, &key)) {
        return;
    }
    const struct kvk_gone gone = {
        .key = key,
        .time_ns = kvk_clock_now(cache->clock),
        .space_id = space->id,
        .position = (uint32_t)sequence->whole_blocks,
        .tier = (uint8_t)sequence->home,
        .reason = KVK_GONE_ABORTED,
    };
    kvk_journal_add(&cache->journal, &gone);
}
