/*
 * Invalidation: what was named is found no more.
 *
 * A whole space is made unfindable in one step, by one more in its generation, which is part of
 * every root's identity; what hung from the old roots is freed in slices. A salt or a prefix is
 * taken out of the index leaf by leaf, in slices too; sequences that hang from it go on with their
 * own blocks, but index nothing any more.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/persist.h"
#include "daemon/sequence_internal.h"
#include "daemon/space_internal.h"

#define SLICE_IDS 1024     /* block ids that a sweep looks at with the lock held */
#define SLICES_AT_ONCE 8   /* of the sweep, by the call itself */
#define COMPARED_TOKENS 64 /* that cost as much as a reference does */
#define SLICE_LEAVES 256   /* blocks that a walk takes out with the lock held */
#define STUCK_MAX 1000     /* slices that a walk waits for calls that are opening sequences there */
#define WAIT_NS (10 * KVK_NS_PER_MS)

/* ---- The sweep ---- */

void kvk_purge_slice(struct kvk_cache *cache, uint32_t count)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t end = kvk_index_block_id_end(cache->index);
    for (uint32_t i = 0; i < count && cache->purge_left > 0; i++) {
        uint32_t id = cache->purge_next < end ? cache->purge_next : 0;
        cache->purge_next = id + 1;
        cache->purge_left--;
        if (id >= end) {
            cache->purge_left = 0; /* there are no blocks at all */
            break;
        }
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (block->state == KVK_BLOCK_FREE || block->run == UINT32_MAX ||
            kvk_root_is_current(cache, kvk_index_root_of(cache->index, id))) {
            continue;
        }
        bool idle = block->state == KVK_BLOCK_EVICTABLE;
        kvk_block_settle(cache, id); /* frees it, or takes it out of its queue */
        /* One that is copied just now is met again. */
        cache->stats.invalidated_blocks += idle && block->state != KVK_BLOCK_EVICTABLE ? 1 : 0;
    }
    if (cache->purge_left == 0) {
        cache->purge_wanted = false;
    }
}

static void purge_begin_drops(struct kvk_cache *cache)
{
    cache->purge_left = kvk_index_block_id_end(cache->index);
    cache->purge_wanted = cache->purge_left > 0;
    for (uint32_t i = 0; i < SLICES_AT_ONCE && cache->purge_wanted; i++) {
        if (i > 0) {
            kvk_pause_drops(cache);
        }
        kvk_purge_slice(cache, SLICE_IDS);
    }
}

/* ---- Whole spaces ---- */

static struct kvk_view identity_part(const struct kvk_space *space, enum kvk_identity_part wanted)
{
    size_t offset = 0;
    uint32_t tag;
    struct kvk_view part;
    while (kvk_identity_next(space->identity, space->identity_size, &offset, &tag, &part)) {
        if (tag == (uint32_t)wanted) {
            return part;
        }
    }
    return (struct kvk_view){0};
}

/* An empty name matches all. */
static bool name_matches(const struct kvk_space *space, enum kvk_identity_part part,
                         const struct kvk_view *name)
{
    struct kvk_view known = identity_part(space, part);
    return name->size == 0 ||
           (known.size == name->size && memcmp(known.data, name->data, name->size) == 0);
}

static bool is_named(const struct kvk_space *space, const struct kvk_tenant *tenant,
                     const struct kvk_invalidate_request *request)
{
    return space->tenant == tenant && name_matches(space, KVK_IDENTITY_MODEL, &request->model) &&
           name_matches(space, KVK_IDENTITY_REVISION, &request->revision) &&
           name_matches(space, KVK_IDENTITY_ADAPTER_NAME, &request->adapter_name) &&
           name_matches(space, KVK_IDENTITY_ADAPTER_ID, &request->adapter_id) &&
           name_matches(space, KVK_IDENTITY_ADAPTER_VERSION, &request->adapter_version) &&
           name_matches(space, KVK_IDENTITY_POSITION, &request->position_encoding) &&
           name_matches(space, KVK_IDENTITY_KV_FORMAT, &request->kv_format) &&
           name_matches(space, KVK_IDENTITY_MASK, &request->mask_rule);
}

/* The spaces that are named, each referenced so that it stays while the lock is dropped. */
static uint32_t spaces_collect(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                               const struct kvk_invalidate_request *request,
                               struct kvk_space **spaces)
{
    uint32_t count = 0;
    for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        bool named = request->space_id != 0 ? space->id == request->space_id
                                            : is_named(space, tenant, request);
        if (named && !space->is_public) { /* those go with what they were copied from */
            KVK_ASSERT(count < cache->config->spaces);
            space->reference_count++;
            spaces[count++] = space;
        }
    }
    return count;
}

static void spaces_release(struct kvk_space *const *spaces, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++) {
        KVK_ASSERT(spaces[i]->reference_count > 0);
        spaces[i]->reference_count--;
    }
}

/* From here on its old roots are found no more. */
static void space_retire(struct kvk_cache *cache, struct kvk_space *space,
                         struct kvk_invalidate_reply *reply)
{
    kvk_space_set_generation(space, space->generation + 1);
    kvk_events_cleared(cache, space);
    reply->spaces++;
    for (uint32_t g = 0; g < space->group_count; g++) {
        const struct kvk_group *group = space->groups[g];
        for (int i = 0; i < KVK_TIER_COUNT; i++) {
            reply->blocks[i] += group->tier_blocks[i];
        }
        reply->held_blocks +=
            group->state_counts[KVK_BLOCK_SEALED] + group->state_counts[KVK_BLOCK_SHARED];
    }
}

/* The next generations are durable first: a crash in between invalidates more than was answered,
 * never less. Where they cannot be made durable nothing has changed. */
static enum kvk_status spaces_retire_drops(struct kvk_cache *cache, struct kvk_space *const *spaces,
                                           uint32_t count, struct kvk_invalidate_reply *reply,
                                           struct kvk_error *error)
{
    kvk_persist_begin_drops(cache);
    enum kvk_status status = kvk_persist_raise_drops(cache, spaces, count, error);
    for (uint32_t i = 0; i < count && status == KVK_OK; i++) {
        space_retire(cache, spaces[i], reply);
        kvk_public_invalidated(cache, spaces[i], NULL);
    }
    kvk_persist_end(cache);
    return status;
}

void kvk_invalidated_elsewhere(struct kvk_cache *cache, uint64_t space_id)
{
    struct kvk_invalidate_reply reply = {.spaces = 0};
    struct kvk_error error;
    KVK_ASSERT(kvk_locks_held() == 0);
    kvk_lock(&cache->lock);
    struct kvk_space *space = kvk_table_get(&cache->space_table, space_id);
    if (space == NULL) {
        kvk_unlock(&cache->lock);
        return;
    }
    const struct kvk_tenant *tenant = space->tenant;
    space->reference_count++;
    if (spaces_retire_drops(cache, &space, 1, &reply, &error) != KVK_OK) {
        /* It must not be found any more, whether the catalogue knows or not. */
        kvk_log(KVK_LOG_ERROR, "invalidation_not_recorded", "space=%llu text=\"%s\"",
                (unsigned long long)space_id, error.text);
        space_retire(cache, space, &reply);
        kvk_public_invalidated(cache, space, NULL);
    }
    purge_begin_drops(cache);
    spaces_release(&space, 1);
    kvk_unlock(&cache->lock);
    kvk_sessions_notify_unlocked(cache, tenant, KVK_NOTICE_INVALIDATED, space_id);
}

/* ---- A salt, or a prefix ---- */

/* What hangs below the first `blocks` blocks of the prompt, the last of them included. */
struct walk {
    struct kvk_space *space;
    const struct kvk_prompt *prompt;
    uint32_t blocks; /* 0: everything of the salt */
    uint32_t root;   /* KVK_ROOT_NONE: nothing of it is known */
};

static bool sequence_is_below(const struct kvk_sequence *sequence, const struct walk *walk)
{
    const struct kvk_prompt *prompt = walk->prompt;
    size_t tokens = (size_t)walk->blocks * walk->space->block_tokens;
    return sequence->space == walk->space && sequence->salt_size == prompt->salt_size &&
           (prompt->salt_size == 0 ||
            memcmp(sequence->salt, prompt->salt, prompt->salt_size) == 0) &&
           sequence->length >= tokens &&
           (tokens == 0 ||
            memcmp(sequence->tokens, prompt->tokens, tokens * sizeof(*prompt->tokens)) == 0);
}

static bool is_detached(const struct kvk_sequence *sequence)
{
    bool detached = true;
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        detached = detached && sequence->groups[g].detached;
    }
    return detached;
}

static bool sequence_detach(struct kvk_cache *cache, const struct walk *walk,
                            struct kvk_sequence *sequence)
{
    if (!sequence_is_below(sequence, walk)) {
        return false;
    }
    for (uint32_t g = 0; g < walk->space->group_count; g++) {
        if (!sequence->groups[g].detached) {
            kvk_sequence_detach(cache, &sequence->groups[g]);
        }
    }
    return true;
}

/* The space's sequences that are still in its chains, or, without memory for their ids, what is
 * below of them is detached in one go. */
static uint64_t *sequences_list(struct kvk_cache *cache, const struct walk *walk, uint32_t *count)
{
    uint64_t *ids = malloc((cache->sequence_table.count + UINT64_C(1)) * sizeof(*ids));
    size_t place = 0;
    const struct kvk_table_entry *entry;
    *count = 0;
    while ((entry = kvk_table_next(&cache->sequence_table, &place)) != NULL) {
        struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, entry->key);
        if (sequence->space != walk->space || is_detached(sequence)) {
            continue;
        }
        if (ids != NULL) {
            ids[(*count)++] = entry->key;
        } else {
            (void)sequence_detach(cache, walk, sequence);
        }
    }
    return ids;
}

/* Sequences below keep their blocks, but what they seal from now on is theirs alone. In slices,
 * since whole prompts are compared; again until there is none, since one may be forked meanwhile.
 * Whoever opens one meanwhile begins with nothing of this, or stands in the walk's way. */
static void sequences_detach_drops(struct kvk_cache *cache, const struct walk *walk)
{
    uint64_t compared = walk->blocks * (uint64_t)walk->space->block_tokens / COMPARED_TOKENS;
    uint32_t work = 0;
    bool any = true;
    while (any) {
        uint32_t count;
        uint64_t *ids = sequences_list(cache, walk, &count);
        any = false;
        for (uint32_t i = 0; i < count; i++) {
            struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, ids[i]);
            if (sequence != NULL && sequence_detach(cache, walk, sequence)) {
                any = true;
                work += (uint32_t)compared;
            }
            (void)kvk_slice_drops(cache, &work);
        }
        free(ids);
    }
}

/* Where the walk begins: the prefix's last block; KVK_BLOCK_NONE: there is nothing left. */
static uint32_t walk_top(const struct kvk_cache *cache, const struct walk *walk)
{
    if (walk->root == KVK_ROOT_NONE) {
        return KVK_BLOCK_NONE;
    }
    if (walk->blocks == 0) {
        return kvk_index_first_child(cache->index, walk->root, KVK_BLOCK_NONE);
    }
    const struct kvk_content content = {
        .tokens = walk->prompt->tokens,
        .token_count = (uint64_t)walk->blocks * walk->space->block_tokens,
        .spans = walk->prompt->spans,
        .span_count = walk->prompt->span_count,
    };
    struct kvk_match match = {
        .cursor = {.root = walk->root, .block = KVK_BLOCK_NONE},
        .path_capacity = walk->blocks,
    };
    kvk_index_match(cache->index, &content, &match);
    return match.path_count == walk->blocks ? match.cursor.block : KVK_BLOCK_NONE;
}

static uint32_t leaf_below(const struct kvk_cache *cache, uint32_t root, uint32_t id)
{
    uint32_t child;
    while ((child = kvk_index_first_child(cache->index, root, id)) != KVK_BLOCK_NONE) {
        id = child;
    }
    return id;
}

/* Take a leaf out of the index. False: a call that works without the lock stands there. */
static bool leaf_remove(struct kvk_cache *cache, uint32_t id, struct kvk_invalidate_reply *reply)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    KVK_ASSERT(block->child_count == 0);
    uint8_t mask = block->tier_mask;
    bool only_on_disk = mask == 1U << KVK_TIER_DISK;
    if (block->anchor_count > 0 || (block->hold_count > 0 && only_on_disk)) {
        return false; /* the latter is being brought back just now */
    }
    if ((mask & (1U << KVK_TIER_DISK)) != 0 &&
        (block->transfer_count > 0 || block->pin_count[KVK_TIER_DISK] > 0)) {
        return false; /* copied just now: its copy on disk goes when that is over */
    }
    if (block->state == KVK_BLOCK_HOLLOW) {
        kvk_block_settle(cache, id); /* nothing needs it any more */
        return true;
    }
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        reply->blocks[i] += (mask & (1U << i)) != 0 ? 1 : 0;
    }
    cache->stats.invalidated_blocks++;
    if (block->hold_count > 0) {
        reply->held_blocks++;
        kvk_block_unindex(cache, id);
        if ((block->tier_mask & (1U << KVK_TIER_DISK)) != 0) {
            kvk_block_drop_copy(cache, id, KVK_TIER_DISK, false); /* its record goes with it */
        }
        return true;
    }
    kvk_gone_begin(cache, KVK_GONE_INVALIDATED, NULL);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        if ((mask & (1U << i)) != 0) {
            kvk_block_drop_copy(cache, id, (enum kvk_tier)i, false);
        }
    }
    kvk_gone_end(cache);
    return true;
}

/* Is the parent still in its chain, so that the walk can go on from there? Nothing is allocated
 * while leaves are taken out, so a block that went is FREE. */
static bool is_there(const struct kvk_cache *cache, uint32_t id)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    return block->state != KVK_BLOCK_FREE && block->run != UINT32_MAX;
}

enum slice_end { SLICE_DONE, SLICE_MORE, SLICE_STUCK };

static enum slice_end walk_slice(struct kvk_cache *cache, const struct walk *walk,
                                 struct kvk_invalidate_reply *reply)
{
    uint32_t removed = 0;
    uint32_t top;
    while ((top = walk_top(cache, walk)) != KVK_BLOCK_NONE) {
        uint32_t at = top;
        for (;;) {
            uint32_t leaf = leaf_below(cache, walk->root, at);
            uint32_t parent = kvk_index_block(cache->index, leaf)->parent;
            if (!leaf_remove(cache, leaf, reply)) {
                return SLICE_STUCK;
            }
            if (++removed >= SLICE_LEAVES) {
                return SLICE_MORE;
            }
            if (leaf == top || parent == KVK_BLOCK_NONE || !is_there(cache, parent)) {
                break;
            }
            at = parent;
        }
    }
    return SLICE_DONE;
}

/* A while, in which the call that stands in the way may end. */
static void wait_drops(struct kvk_cache *cache)
{
    if (!cache->threads) {
        kvk_pause_drops(cache);
        return;
    }
    uint64_t until_ns = kvk_clock_now(kvk_clock_monotonic()) + WAIT_NS;
    (void)kvk_condition_wait(&cache->changed, &cache->lock, until_ns);
}

static enum kvk_status walk_group_drops(struct kvk_cache *cache, const struct walk *walk,
                                        struct kvk_invalidate_reply *reply, struct kvk_error *error)
{
    sequences_detach_drops(cache, walk);
    for (uint32_t stuck = 0; stuck < STUCK_MAX;) {
        switch (walk_slice(cache, walk, reply)) {
        case SLICE_DONE:
            return KVK_OK;
        case SLICE_MORE:
            kvk_pause_drops(cache);
            break;
        case SLICE_STUCK:
            stuck++;
            wait_drops(cache);
            sequences_detach_drops(cache, walk);
            break;
        }
    }
    (void)kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_BUSY, "prefix",
                   "other calls are still opening sequences on this prefix");
    kvk_error_retry(error, 100);
    return KVK_UNAVAILABLE;
}

static enum kvk_status invalidate_part_drops(struct kvk_cache *cache, struct kvk_space *space,
                                             const struct kvk_invalidate_request *request,
                                             struct kvk_invalidate_reply *reply,
                                             struct kvk_error *error)
{
    const struct kvk_prompt salt_alone = {
        .salt = request->salt.data,
        .salt_size = request->salt.size,
    };
    struct walk walk = {
        .space = space,
        .prompt = request->prefix != NULL ? request->prefix : &salt_alone,
    };
    kvk_public_invalidated(cache, space, walk.prompt);
    uint64_t blocks = walk.prompt->token_count / space->block_tokens;
    walk.blocks = blocks > UINT32_MAX ? UINT32_MAX : (uint32_t)blocks;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    enum kvk_status status =
        kvk_space_roots(cache, space, walk.prompt->salt, walk.prompt->salt_size, roots, error);
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t g = 0; g < space->group_count && status == KVK_OK; g++) {
        walk.root = roots[g];
        status = walk_group_drops(cache, &walk, reply, error);
    }
    kvk_space_roots_release(cache, space, roots);
    reply->spaces++;
    return status;
}

/* The records on disk of what was taken out of the index go, and that is durable. */
static enum kvk_status removals_settle_drops(struct kvk_cache *cache, struct kvk_error *error)
{
    struct kvk_error inner;
    enum kvk_status status = kvk_persist_removals_drops(cache, &inner);
    if (status == KVK_OK) {
        status = kvk_public_settle_drops(cache, &inner);
    }
    if (status != KVK_OK) {
        (void)kvk_fail(error, status, inner.cause, inner.field,
                       "it is gone from this daemon, but not durably: call again (%.150s)",
                       inner.text);
        kvk_error_retry(error, 1000);
    }
    return status;
}

/* ---- The call ---- */

static enum kvk_status check_part(const struct kvk_invalidate_request *request,
                                  struct kvk_error *error)
{
    if (request->prefix != NULL && request->space_id == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "space_id",
                        "space_id is required with a prefix");
    }
    return KVK_OK;
}

static enum kvk_status invalidate_drops(struct kvk_cache *cache, struct kvk_space *const *spaces,
                                        uint32_t count,
                                        const struct kvk_invalidate_request *request,
                                        struct kvk_invalidate_reply *reply, struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    if (request->by_salt || request->prefix != NULL) {
        for (uint32_t i = 0; i < count && status == KVK_OK; i++) {
            status = invalidate_part_drops(cache, spaces[i], request, reply, error);
        }
        return status == KVK_OK ? removals_settle_drops(cache, error) : status;
    }
    status = spaces_retire_drops(cache, spaces, count, reply, error);
    if (status == KVK_OK) {
        purge_begin_drops(cache);
    }
    return status;
}

/* Which spaces, of which tenant? References are the caller's. */
static enum kvk_status target_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                                   const struct kvk_invalidate_request *request,
                                   const struct kvk_tenant **tenant, struct kvk_space **spaces,
                                   uint32_t *count, struct kvk_error *error)
{
    if (request->space_id != 0) {
        struct kvk_space *space;
        enum kvk_status status = kvk_space_find(cache, caller, request->space_id, &space, error);
        if (status != KVK_OK) {
            return status;
        }
        *tenant = space->tenant;
    }
    *count = spaces_collect(cache, *tenant, request, spaces);
    return KVK_OK;
}

enum kvk_status kvk_invalidate(struct kvk_cache *cache, const struct kvk_caller *caller,
                               const struct kvk_invalidate_request *request,
                               struct kvk_invalidate_reply *reply, struct kvk_error *error)
{
    const struct kvk_tenant *tenant = NULL;
    uint32_t count = 0;
    *reply = (struct kvk_invalidate_reply){0};
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    enum kvk_status status = check_part(request, error);
    if (status == KVK_OK && request->space_id == 0) {
        status = kvk_credential_tenant(caller->credential, request->tenant.data,
                                       request->tenant.size, &tenant, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_space **spaces = calloc(cache->config->spaces, sizeof(struct kvk_space *));
    uint64_t *ids = calloc(cache->config->spaces, sizeof(*ids));
    if (spaces == NULL || ids == NULL) {
        free(spaces);
        free(ids);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the spaces' ids");
    }
    kvk_lock(&cache->lock);
    status = target_find(cache, caller, request, &tenant, spaces, &count, error);
    if (status == KVK_OK) {
        status = kvk_remote_raise_begin_drops(cache, spaces, count, error);
    }
    if (status == KVK_OK) { /* begun here is ended here, whatever becomes of it */
        status = invalidate_drops(cache, spaces, count, request, reply, error);
        kvk_unlock(&cache->lock);
        reply->store_pending =
            kvk_remote_raise_end_unlocked(cache, spaces, count, caller->deadline_ns);
        kvk_lock(&cache->lock);
    }
    for (uint32_t i = 0; i < count; i++) {
        ids[i] = spaces[i]->id;
    }
    spaces_release(spaces, count);
    kvk_unlock(&cache->lock);
    for (uint32_t i = 0; i < count; i++) {
        kvk_sessions_notify_unlocked(cache, tenant, KVK_NOTICE_INVALIDATED, ids[i]);
    }
    free(spaces);
    free(ids);
    return status;
}
