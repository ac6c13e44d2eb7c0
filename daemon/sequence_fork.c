/*
 * Fork: new sequences that share every block, the unfilled tail too.
 *
 * Whoever writes to the tail first copies it (Append); so a fork costs references alone. While the
 * parent is busy and cannot change, the children's memory is made without the lock, and they take
 * their references in slices, busy too: nobody can use one, nor be answered with it, before all
 * have everything.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/sequence_internal.h"

struct forking {
    struct kvk_cache *cache;
    struct kvk_sequence *parent;
    const struct kvk_request_id *request_id;
    uint32_t count;
    struct kvk_sequence **children; /* [count], ours until linked */
    struct kvk_error *error;
};

/* ---- Repeats ---- */

/* The children that an earlier Fork with this request id made. How many live. */
static uint32_t find_children(const struct kvk_instance *instance,
                              const struct kvk_request_id *request_id, uint32_t count,
                              uint64_t *sequence_ids)
{
    uint32_t found = 0;
    if (request_id->size == 0) {
        return 0;
    }
    for (const struct kvk_sequence *s = instance->sequences; s != NULL; s = s->next) {
        if (s->fork_index == 0 || !kvk_request_id_equal(&s->request_id, request_id)) {
            continue;
        }
        found++;
        if (s->fork_index <= count) {
            sequence_ids[s->fork_index - 1] = s->id;
        }
    }
    return found;
}

/* ---- The children ---- */

static enum kvk_status children_create_unlocked(struct forking *forking)
{
    const struct kvk_sequence *parent = forking->parent;
    struct kvk_sequence_size size = {
        .group_count = parent->space->group_count,
        .tokens = parent->length,
        .blocks = parent->groups[0].block_count,
        .spans = parent->span_count,
        .salt_size = parent->salt_size,
    };
    for (uint32_t i = 0; i < forking->count; i++) {
        struct kvk_sequence *child;
        enum kvk_status status = kvk_sequence_create(&size, &child, forking->error);
        if (status != KVK_OK) {
            return status;
        }
        forking->children[i] = child;
        if (parent->length > 0) {
            memcpy(child->tokens, parent->tokens, parent->length * sizeof(uint32_t));
        }
        if (parent->span_count > 0) {
            memcpy(child->spans, parent->spans, parent->span_count * sizeof(*parent->spans));
        }
        if (parent->salt_size > 0) {
            memcpy(child->salt, parent->salt, parent->salt_size);
        }
        child->extra_bytes = parent->extra_bytes;
    }
    return KVK_OK;
}

/* Everything that the parent knows; the references come after. */
static void child_fill(const struct kvk_sequence *parent, struct kvk_sequence *child)
{
    child->state = parent->state;
    child->home = parent->home;
    child->span_count = parent->span_count;
    child->salt_size = parent->salt_size;
    child->length = parent->length;
    child->committed = parent->committed;
    child->cached = parent->cached;
    child->partial_tokens = parent->partial_tokens;
    child->sealed = parent->sealed;
    memcpy(child->rank_sealed, parent->rank_sealed, sizeof(child->rank_sealed));
    child->whole_blocks = parent->whole_blocks;
    child->shared_tokens = parent->length;
}

/* Its place in the chains, from which an invalidation takes it with the parent. */
static void child_place(struct kvk_cache *cache, const struct kvk_sequence *parent,
                        struct kvk_sequence *child)
{
    for (uint32_t g = 0; g < parent->space->group_count; g++) {
        const struct kvk_sequence_group *from = &parent->groups[g];
        struct kvk_sequence_group *table = &child->groups[g];
        kvk_index_root_hold(cache->index, from->root);
        table->root = from->root;
        table->cursor.root = from->root;
        table->detached = from->detached;
        table->window_block = from->window_block;
        table->keep_block = from->keep_block;
        kvk_sequence_move_cursor(cache, table, from->cursor);
    }
}

/* The next block of the parent's table is the child's too. */
static void child_share(struct kvk_cache *cache, const struct kvk_sequence_group *from,
                        struct kvk_sequence_group *table)
{
    uint32_t i = table->block_count;
    uint32_t block = from->blocks[i];
    table->blocks[i] = KVK_BLOCK_NONE;
    table->pins[i] = 0;
    if (block != KVK_BLOCK_NONE) {
        KVK_ASSERT(from->pins[i] != 0);
        kvk_block_hold(cache, block, false);
        kvk_block_pin(cache, block, (enum kvk_tier)(from->pins[i] - 1));
        table->blocks[i] = block;
        table->pins[i] = from->pins[i];
    }
    table->block_count = i + 1;
}

/* The instance ends, and with it all of them. */
static bool is_over(const struct kvk_sequence *parent)
{
    return kvk_sequence_is_lost(parent) || parent->instance->ending;
}

/* Every reference, unless that is for nothing. */
static void children_share_drops(struct forking *forking)
{
    const struct kvk_sequence *parent = forking->parent;
    uint32_t work = 0;
    for (uint32_t c = 0; c < forking->count; c++) {
        for (uint32_t g = 0; g < parent->space->group_count; g++) {
            const struct kvk_sequence_group *from = &parent->groups[g];
            struct kvk_sequence_group *table = &forking->children[c]->groups[g];
            while (table->block_count < from->block_count && !is_over(parent)) {
                child_share(forking->cache, from, table);
                (void)kvk_slice_drops(forking->cache, &work);
            }
        }
    }
}

/* Give all their places, or none. */
static enum kvk_status children_link(struct forking *forking)
{
    struct kvk_cache *cache = forking->cache;
    struct kvk_sequence *parent = forking->parent;
    if (cache->sequence_table.count + forking->count > cache->config->sequences) {
        kvk_fail_limit(forking->error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "count", forking->count,
                       cache->config->sequences, "limit of open sequences reached: %u",
                       cache->config->sequences);
        kvk_error_retry(forking->error, 100);
        return KVK_EXHAUSTED;
    }
    const struct kvk_tenant_state *tenant = kvk_tenant_state_of(cache, parent->space->tenant);
    enum kvk_status status = kvk_quota_check_count(tenant, true, forking->count, forking->error);
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < forking->count; i++) {
        bytes += kvk_sequence_metadata(forking->children[i]);
    }
    if (status == KVK_OK) {
        status = kvk_metadata_admit(cache, parent->space->tenant, KVK_METADATA_SEQUENCES,
                                    forking->count, bytes, forking->error);
    }
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t i = 0; i < forking->count; i++) {
        struct kvk_sequence *child = forking->children[i];
        child_fill(parent, child);
        status = kvk_sequence_link(cache, child, parent->instance, parent->space, forking->error);
        KVK_ASSERT(status == KVK_OK);
        child_place(cache, parent, child);
        kvk_sequence_busy_begin(child);
    }
    return KVK_OK;
}

/* They are there, all at once. */
static void children_show(struct forking *forking)
{
    for (uint32_t i = 0; i < forking->count; i++) {
        struct kvk_sequence *child = forking->children[i];
        child->busy = false;
        child->cut_wanted = false; /* nothing is granted that a rank could have left unwritten */
        child->fork_index = i + 1;
        child->request_id = *forking->request_id;
    }
    forking->parent->shared_tokens = forking->parent->length;
}

static void children_end_drops(struct forking *forking)
{
    for (uint32_t i = 0; i < forking->count; i++) {
        kvk_sequence_end_drops(forking->cache, forking->children[i], NULL);
        forking->children[i] = NULL;
    }
}

/* ---- The call ---- */

static enum kvk_status check_fork(const struct kvk_sequence *sequence, uint64_t expected_length,
                                  struct kvk_error *error)
{
    enum kvk_status status = kvk_sequence_check_running(sequence, error);
    if (status == KVK_OK) {
        status = kvk_sequence_check_length(sequence, expected_length, error);
    }
    if (status == KVK_OK && sequence->sealed < sequence->length) {
        status = kvk_fail_limit(
            error, KVK_PRECONDITION, KVK_CAUSE_GRANT_UNWRITTEN, "sequence_id", sequence->sealed,
            sequence->length, "tokens %llu to %llu are granted and not sealed",
            (unsigned long long)sequence->sealed, (unsigned long long)sequence->length);
    }
    return status == KVK_OK ? kvk_sequence_check_unwritten(sequence, error) : status;
}

static enum kvk_status fork_drops(struct forking *forking)
{
    struct kvk_cache *cache = forking->cache;
    struct kvk_sequence *parent = forking->parent;
    kvk_sequence_busy_begin(parent);
    kvk_unlock(&cache->lock);
    enum kvk_status status = children_create_unlocked(forking);
    kvk_lock(&cache->lock);
    bool linked = false;
    if (status == KVK_OK && !is_over(parent)) {
        status = children_link(forking);
        linked = status == KVK_OK;
    }
    if (linked) {
        children_share_drops(forking);
    }
    bool over = is_over(parent);
    if (linked && over) {
        children_end_drops(forking);
    } else if (linked) {
        children_show(forking);
    }
    enum kvk_status ended = kvk_sequence_busy_end_drops(cache, parent, forking->error);
    if (ended == KVK_OK && over) { /* the parent's turn comes */
        ended = kvk_fail(forking->error, KVK_ABORTED, KVK_CAUSE_SESSION_ENDED, "session_id",
                         "the instance ended while the call ran");
    }
    return ended != KVK_OK ? ended : status;
}

static enum kvk_status fork_locked_drops(struct kvk_cache *cache, const struct kvk_caller *caller,
                                         uint64_t session_id, uint64_t sequence_id,
                                         uint64_t expected_length, struct forking *forking,
                                         uint64_t *sequence_ids)
{
    struct kvk_session *session;
    struct kvk_error *error = forking->error;
    enum kvk_status status = kvk_session_find(cache, caller, session_id, &session, error);
    if (status != KVK_OK) {
        return status;
    }
    uint32_t living =
        find_children(session->instance, forking->request_id, forking->count, sequence_ids);
    if (living == forking->count) {
        return KVK_OK;
    }
    if (living > 0) {
        return kvk_fail_limit(
            error, KVK_PRECONDITION, KVK_CAUSE_NONE, "request_id", living, forking->count,
            "a Fork with this request_id has %u sequences left, not %u", living, forking->count);
    }
    status = kvk_sequence_find(cache, caller, session_id, sequence_id, &session, &forking->parent,
                               error);
    if (status != KVK_OK) {
        return status;
    }
    status = check_fork(forking->parent, expected_length, error);
    if (status != KVK_OK) {
        return kvk_sequence_refused(cache, caller, forking->parent, status, error);
    }
    status =
        kvk_slice_admit(cache, caller, forking->count * (kvk_sequence_blocks(forking->parent) + 1));
    if (status != KVK_OK) {
        return status;
    }
    status = fork_drops(forking);
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t i = 0; i < forking->count; i++) {
        KVK_ASSERT(forking->children[i] != NULL);
        sequence_ids[i] = forking->children[i]->id;
        forking->children[i] = NULL; /* the cache's now */
    }
    cache->stats.forks++;
    return KVK_OK;
}

enum kvk_status kvk_sequence_fork(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  uint64_t session_id, uint64_t sequence_id,
                                  uint64_t expected_length, uint32_t count,
                                  const struct kvk_request_id *request_id, uint64_t *sequence_ids,
                                  struct kvk_error *error)
{
    if (count == 0 || count > cache->config->forks) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "count", count,
                              cache->config->forks, "count must be 1 to %u", cache->config->forks);
    }
    struct forking forking = {
        .cache = cache,
        .request_id = request_id,
        .count = count,
        .children = calloc(count, sizeof(struct kvk_sequence *)),
        .error = error,
    };
    if (forking.children == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", "no memory for a fork");
    }
    kvk_lock(&cache->lock);
    enum kvk_status status = fork_locked_drops(cache, caller, session_id, sequence_id,
                                               expected_length, &forking, sequence_ids);
    kvk_unlock(&cache->lock);
    for (uint32_t i = 0; i < count; i++) {
        kvk_sequence_free(forking.children[i]);
    }
    free(forking.children);
    return status;
}
