/* Sequences: their memory and references, finding them, and how they end. */
#include "daemon/sequence.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/sequence_internal.h"

/* ---- Memory ---- */

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", "no memory for the sequence");
}

void kvk_sequence_free(struct kvk_sequence *sequence)
{
    if (sequence == NULL) {
        return;
    }
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        free(sequence->groups[g].blocks);
        free(sequence->groups[g].pins);
    }
    free(sequence->tokens);
    free(sequence->spans);
    free(sequence->salt);
    free(sequence->hints);
    free(sequence);
}

/* Make an array of `*capacity` elements larger, so that `needed` fit; a half more at least. */
static bool array_grow(void **array, uint64_t capacity, uint64_t needed, size_t element_size,
                       uint64_t *grown)
{
    *grown = capacity;
    if (needed <= capacity && *array != NULL) {
        return true;
    }
    uint64_t wanted = capacity + capacity / 2;
    wanted = wanted < needed ? needed : wanted;
    wanted = wanted == 0 ? 1 : wanted;
    void *moved = realloc(*array, wanted * element_size);
    if (moved == NULL) {
        return false;
    }
    *array = moved;
    *grown = wanted;
    return true;
}

static bool group_grow(struct kvk_sequence_group *group, uint64_t blocks)
{
    void *ids = group->blocks;
    void *pins = group->pins;
    uint64_t id_capacity;
    uint64_t pin_capacity;
    bool ids_ok = array_grow(&ids, group->block_capacity, blocks, sizeof(uint32_t), &id_capacity);
    group->blocks = ids;
    bool pins_ok = array_grow(&pins, group->block_capacity, blocks, 1, &pin_capacity);
    group->pins = pins;
    if (!ids_ok || !pins_ok || id_capacity > UINT32_MAX) {
        return false; /* one of the two may be larger than it says */
    }
    group->block_capacity = (uint32_t)id_capacity;
    return true;
}

uint64_t kvk_sequence_metadata(const struct kvk_sequence *sequence)
{
    uint64_t bytes = sequence->fixed_bytes + sequence->extra_bytes +
                     sequence->token_capacity * sizeof(uint32_t) +
                     sequence->span_capacity * sizeof(*sequence->spans);
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        bytes += sequence->groups[g].block_capacity * (uint64_t)(sizeof(uint32_t) + 1);
    }
    return bytes;
}

static void metadata_update(struct kvk_cache *cache, struct kvk_sequence *sequence)
{
    const struct kvk_tenant *tenant = sequence->space->tenant;
    kvk_metadata_sub(cache, tenant, KVK_METADATA_SEQUENCES, 0, sequence->metadata_bytes);
    sequence->metadata_bytes = kvk_sequence_metadata(sequence);
    kvk_metadata_add(cache, tenant, KVK_METADATA_SEQUENCES, 0, sequence->metadata_bytes);
}

void kvk_sequence_extra_use(struct kvk_cache *cache, struct kvk_sequence *sequence, uint64_t bytes)
{
    sequence->extra_bytes -= bytes < sequence->extra_bytes ? bytes : sequence->extra_bytes;
    metadata_update(cache, sequence);
}

/* What array_grow() adds, in elements. */
static uint64_t array_growth(uint64_t capacity, uint64_t needed)
{
    uint64_t wanted = capacity + capacity / 2;
    return needed <= capacity ? 0 : (wanted < needed ? needed : wanted) - capacity;
}

enum kvk_status kvk_sequence_grow(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                  uint64_t tokens, uint64_t blocks, uint32_t spans,
                                  uint64_t extra_bytes, struct kvk_error *error)
{
    uint32_t group_count = sequence->space->group_count;
    uint64_t more = extra_bytes +
                    array_growth(sequence->token_capacity, tokens) * sizeof(uint32_t) +
                    array_growth(sequence->groups[0].block_capacity, blocks) * group_count *
                        (sizeof(uint32_t) + 1);
    more += spans > sequence->span_capacity
                ? (spans - sequence->span_capacity) * sizeof(*sequence->spans)
                : 0;
    enum kvk_status status = KVK_OK;
    if (more > 0) {
        status = kvk_metadata_admit(cache, sequence->space->tenant, KVK_METADATA_SEQUENCES, 0, more,
                                    error);
    }
    if (status != KVK_OK) {
        return status;
    }
    void *token_array = sequence->tokens;
    bool grown = array_grow(&token_array, sequence->token_capacity, tokens, sizeof(uint32_t),
                            &sequence->token_capacity);
    sequence->tokens = token_array;
    if (grown && spans > sequence->span_capacity) {
        void *span_array = realloc(sequence->spans, spans * sizeof(*sequence->spans));
        grown = span_array != NULL;
        sequence->spans = grown ? span_array : sequence->spans;
        sequence->span_capacity = grown ? spans : sequence->span_capacity;
    }
    for (uint32_t g = 0; g < group_count && grown; g++) {
        grown = group_grow(&sequence->groups[g], blocks);
    }
    sequence->extra_bytes += extra_bytes;
    metadata_update(cache, sequence);
    return grown ? KVK_OK : no_memory(error);
}

enum kvk_status kvk_sequence_create(const struct kvk_sequence_size *size,
                                    struct kvk_sequence **sequence, struct kvk_error *error)
{
    struct kvk_sequence *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return no_memory(error);
    }
    void *tokens = NULL;
    bool made = array_grow(&tokens, 0, size->tokens, sizeof(uint32_t), &created->token_capacity);
    created->tokens = tokens;
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        created->groups[g].root = KVK_ROOT_NONE;
        created->groups[g].cursor.block = KVK_BLOCK_NONE;
        if (made && g < size->group_count) {
            made = group_grow(&created->groups[g], size->blocks);
        }
    }
    if (made && size->spans > 0) {
        created->spans = malloc(size->spans * sizeof(*created->spans));
        made = created->spans != NULL;
        created->span_capacity = size->spans;
    }
    if (made && size->salt_size > 0) {
        created->salt = malloc(size->salt_size);
        made = created->salt != NULL;
    }
    if (made && size->hints > 0) {
        created->hints = malloc(size->hints * sizeof(*created->hints));
        made = created->hints != NULL;
    }
    if (!made) {
        kvk_sequence_free(created);
        return no_memory(error);
    }
    created->fixed_bytes =
        sizeof(*created) + size->salt_size + size->hints * sizeof(*created->hints);
    *sequence = created;
    return KVK_OK;
}

/* ---- Its place in the instance ---- */

enum kvk_status kvk_sequence_link(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                  struct kvk_instance *instance, struct kvk_space *space,
                                  struct kvk_error *error)
{
    struct kvk_tenant_state *tenant = kvk_tenant_state_of(cache, space->tenant);
    enum kvk_status status = kvk_quota_check_count(tenant, true, 1, error);
    uint64_t bytes = kvk_sequence_metadata(sequence);
    if (status == KVK_OK) {
        status = kvk_metadata_admit(cache, space->tenant, KVK_METADATA_SEQUENCES, 1, bytes, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    sequence->id = kvk_cache_new_id(cache);
    if (kvk_table_put(&cache->sequence_table, sequence->id, sequence) != KVK_OK) {
        kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "sequences",
                       cache->sequence_table.count, cache->config->sequences,
                       "limit of open sequences reached: %u", cache->config->sequences);
        kvk_error_retry(error, 100);
        return KVK_EXHAUSTED;
    }
    sequence->instance = instance;
    sequence->space = space;
    sequence->opened_ns = kvk_clock_now(cache->clock);
    sequence->previous = NULL;
    sequence->next = instance->sequences;
    if (sequence->next != NULL) {
        sequence->next->previous = sequence;
    }
    instance->sequences = sequence;
    instance->sequence_count++;
    tenant->sequences++;
    sequence->metadata_bytes = bytes;
    kvk_metadata_add(cache, space->tenant, KVK_METADATA_SEQUENCES, 1, bytes);
    space->reference_count++;
    return KVK_OK;
}

static void sequence_unlink(struct kvk_cache *cache, struct kvk_sequence *sequence)
{
    struct kvk_instance *instance = sequence->instance;
    void *removed = kvk_table_remove(&cache->sequence_table, sequence->id);
    KVK_ASSERT(removed == sequence);
    if (sequence->next != NULL) {
        sequence->next->previous = sequence->previous;
    }
    if (sequence->previous != NULL) {
        sequence->previous->next = sequence->next;
    } else {
        KVK_ASSERT(instance->sequences == sequence);
        instance->sequences = sequence->next;
    }
    KVK_ASSERT(instance->sequence_count > 0);
    instance->sequence_count--;
    kvk_tenant_state_of(cache, sequence->space->tenant)->sequences--;
    kvk_metadata_sub(cache, sequence->space->tenant, KVK_METADATA_SEQUENCES, 1,
                     sequence->metadata_bytes);
    KVK_ASSERT(sequence->space->reference_count > 0);
    sequence->space->reference_count--;
}

/* ---- Blocks ---- */

void kvk_sequence_take(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                       uint32_t index, uint32_t block, bool pin)
{
    struct kvk_sequence_group *table = &sequence->groups[group];
    KVK_ASSERT(index < table->block_capacity);
    table->blocks[index] = block;
    table->pins[index] = 0;
    kvk_block_hold(cache, block, false);
    if (pin) {
        enum kvk_tier tier = kvk_block_tier(kvk_index_block(cache->index, block));
        kvk_block_pin(cache, block, tier);
        table->pins[index] = (uint8_t)(tier + 1);
    }
}

void kvk_sequence_drop_pin(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                           uint32_t index)
{
    struct kvk_sequence_group *table = &sequence->groups[group];
    if (table->pins[index] != 0) {
        kvk_block_unpin(cache, table->blocks[index], (enum kvk_tier)(table->pins[index] - 1));
        table->pins[index] = 0;
    }
}

void kvk_sequence_drop(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                       uint32_t index)
{
    struct kvk_sequence_group *table = &sequence->groups[group];
    uint32_t block = table->blocks[index];
    if (block == KVK_BLOCK_NONE) {
        return;
    }
    kvk_sequence_drop_pin(cache, sequence, group, index);
    table->blocks[index] = KVK_BLOCK_NONE;
    kvk_block_release(cache, block, false);
}

void kvk_block_give_back(struct kvk_cache *cache, uint32_t block)
{
    kvk_block_unpin(cache, block, kvk_block_tier(kvk_index_block(cache->index, block)));
    kvk_block_release(cache, block, false);
}

void kvk_block_grant(struct kvk_cache *cache, uint32_t block)
{
    kvk_block_step(kvk_index_block(cache->index, block), KVK_BLOCK_WRITE);
    kvk_block_settle(cache, block);
}

/* ---- Growth ---- */

uint64_t kvk_sequence_growth_bytes(const struct kvk_space *space, uint64_t length,
                                   uint64_t growth_tokens)
{
    uint64_t blocks = kvk_blocks_for(space, length + growth_tokens) - kvk_blocks_for(space, length);
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        const struct kvk_group *group = space->groups[g];
        uint64_t needed = blocks;
        if (group->windowed) {
            uint64_t window = kvk_blocks_for(space, group->geometry.window) + UINT64_C(1);
            needed = needed < window ? needed : window;
        }
        bytes += needed * group->block_bytes;
    }
    return bytes;
}

void kvk_sequence_keep_growth(struct kvk_cache *cache, struct kvk_sequence *sequence,
                              uint64_t bytes)
{
    kvk_quota_growth_change(cache, sequence->space->tenant, sequence->home, sequence->growth_bytes,
                            bytes);
    sequence->growth_bytes = bytes;
}

/* ---- Its place in the chains ---- */

void kvk_sequence_move_cursor(struct kvk_cache *cache, struct kvk_sequence_group *group,
                              struct kvk_cursor cursor)
{
    uint32_t before = group->cursor.block;
    group->cursor = cursor;
    if (cursor.block != KVK_BLOCK_NONE) {
        kvk_index_anchor(cache->index, cursor.block);
    }
    if (before != KVK_BLOCK_NONE) {
        kvk_index_unanchor(cache->index, before);
        kvk_block_settle(cache, before);
    }
}

void kvk_sequence_detach(struct kvk_cache *cache, struct kvk_sequence_group *group)
{
    group->detached = true;
    kvk_sequence_move_cursor(cache, group,
                             (struct kvk_cursor){.root = group->root, .block = KVK_BLOCK_NONE});
}

void kvk_sequence_slide(struct kvk_cache *cache, struct kvk_sequence *sequence, uint64_t position)
{
    const struct kvk_space *space = sequence->space;
    for (uint32_t g = 0; g < space->group_count; g++) {
        const struct kvk_geometry *geometry = &space->groups[g]->geometry;
        struct kvk_sequence_group *table = &sequence->groups[g];
        if (!space->groups[g]->windowed) {
            continue;
        }
        uint32_t sinks = kvk_blocks_for(space, geometry->sinks);
        uint64_t seen = kvk_geometry_window_start(geometry, position) / space->block_tokens;
        uint32_t end = seen < table->block_count ? (uint32_t)seen : table->block_count;
        uint32_t first = table->window_block > sinks ? table->window_block : sinks;
        for (uint32_t i = first; i < end; i++) {
            kvk_sequence_drop(cache, sequence, g, i);
        }
        if (end > table->window_block) {
            table->window_block = end;
        }
    }
}

/* ---- How it ends ---- */

/* What becomes of a block when its holder here goes. */
static void close_count(const struct kvk_cache *cache, uint32_t block,
                        struct kvk_close_reply *reply)
{
    if (reply == NULL || block == KVK_BLOCK_NONE) {
        return;
    }
    const struct kvk_block *held = kvk_index_block(cache->index, block);
    bool indexed = kvk_block_is_whole(held) && held->run != UINT32_MAX;
    if (held->hold_count > 1 || indexed) {
        reply->cached_blocks++;
    } else {
        reply->freed_blocks++;
    }
}

uint64_t kvk_sequence_blocks(const struct kvk_sequence *sequence)
{
    uint64_t blocks = 0;
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        blocks += sequence->groups[g].block_count;
    }
    return blocks;
}

void kvk_sequence_doom(struct kvk_sequence *sequence)
{
    sequence->busy = true;
    sequence->doomed = true;
}

/* Deepest first: an anchor or a child no longer keeps what lies before it. */
static void tables_end_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                             struct kvk_close_reply *reply)
{
    uint32_t work = 0;
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        kvk_sequence_move_cursor(cache, table,
                                 (struct kvk_cursor){.root = table->root, .block = KVK_BLOCK_NONE});
    }
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        while (table->block_count > 0) {
            table->block_count--;
            close_count(cache, table->blocks[table->block_count], reply);
            kvk_sequence_drop(cache, sequence, g, table->block_count);
            (void)kvk_slice_drops(cache, &work);
        }
        if (table->root != KVK_ROOT_NONE) {
            kvk_index_root_release(cache->index, table->root);
            table->root = KVK_ROOT_NONE;
        }
    }
}

void kvk_sequence_end_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                            struct kvk_close_reply *reply)
{
    kvk_sequence_doom(sequence);
    kvk_gone_note_aborted(cache, sequence);
    kvk_sequence_keep_growth(cache, sequence, 0);
    tables_end_drops(cache, sequence, reply);
    sequence_unlink(cache, sequence);
    kvk_sequence_free(sequence);
    (void)pthread_cond_broadcast(&cache->changed);
}

/* A session that has ended, but whose process lives on and may write the slots. */
static bool may_still_write(const struct kvk_session *session, const struct kvk_group *group,
                            enum kvk_tier tier)
{
    if (session->process_gone || session->leaving) {
        return false;
    }
    for (const struct kvk_mapping *m = session->mappings; m != NULL; m = m->next) {
        if (m->kind == KVK_MAP_SLOTS && m->writable && m->taken && m->group == group &&
            m->tier == tier) {
            return true;
        }
    }
    return false;
}

/* The rank that ended, or any that did, where it may still write to the slots; else NULL. */
static struct kvk_session *ended_writer(const struct kvk_instance *instance,
                                        struct kvk_session *session, const struct kvk_group *group,
                                        enum kvk_tier tier)
{
    if (session != NULL) {
        return may_still_write(session, group, tier) ? session : NULL;
    }
    for (struct kvk_session *s = instance->sessions; s != NULL; s = s->next) {
        if (!s->connected && may_still_write(s, group, tier)) {
            return s;
        }
    }
    return NULL;
}

/* The block, with hold and pin, is the session's until its process is gone. */
static void quarantine(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                       uint32_t index, struct kvk_session *session)
{
    struct kvk_sequence_group *table = &sequence->groups[group];
    uint32_t block = table->blocks[index];
    KVK_ASSERT(table->pins[index] != 0);
    table->blocks[index] = KVK_BLOCK_NONE;
    table->pins[index] = 0;
    kvk_session_quarantine(cache, session, block);
}

static bool is_granted(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                       uint32_t group, uint32_t index)
{
    uint32_t block = sequence->groups[group].blocks[index];
    return sequence->state == KVK_SEQUENCE_RUNNING && sequence->sealed < sequence->length &&
           block != KVK_BLOCK_NONE && !kvk_block_is_whole(kvk_index_block(cache->index, block));
}

void kvk_sequence_abandon_drops(struct kvk_cache *cache, struct kvk_sequence *sequence)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (sequence->busy) {
        sequence->doomed = true;
        return;
    }
    const struct kvk_space *space = sequence->space;
    uint32_t first = (uint32_t)(sequence->sealed / space->block_tokens);
    for (uint32_t g = 0; g < space->group_count; g++) {
        for (uint32_t i = first; i < sequence->groups[g].block_count; i++) {
            if (!is_granted(cache, sequence, g, i)) {
                continue;
            }
            enum kvk_tier tier = (enum kvk_tier)(sequence->groups[g].pins[i] - 1);
            struct kvk_session *writer =
                kvk_instance_writer(sequence->instance, space->groups[g], tier);
            if (writer != NULL) {
                quarantine(cache, sequence, g, i, writer);
            }
        }
    }
    kvk_sequence_end_drops(cache, sequence, NULL);
}

void kvk_sequence_rank_ended(struct kvk_cache *cache, struct kvk_sequence *sequence,
                             struct kvk_session *session)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (sequence->busy) {
        sequence->cut_wanted = true;
        return;
    }
    const struct kvk_space *space = sequence->space;
    uint32_t tail = (uint32_t)(sequence->sealed / space->block_tokens);
    bool tail_stays = sequence->sealed % space->block_tokens != 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        struct kvk_sequence_group *table = &sequence->groups[g];
        for (uint32_t i = tail; i < table->block_count; i++) {
            if (!is_granted(cache, sequence, g, i)) {
                continue;
            }
            enum kvk_tier tier = (enum kvk_tier)(table->pins[i] - 1);
            struct kvk_session *writer =
                ended_writer(sequence->instance, session, space->groups[g], tier);
            if (writer == NULL) {
                continue;
            }
            if (i == tail && tail_stays) {
                /* What is sealed in it stays ours; as with a fork, we copy it before we write. */
                kvk_block_hold(cache, table->blocks[i], false);
                kvk_block_pin(cache, table->blocks[i], tier);
                kvk_session_quarantine(cache, writer, table->blocks[i]);
                sequence->shared_tokens = sequence->sealed;
            } else {
                quarantine(cache, sequence, g, i, writer);
            }
        }
    }
    if (sequence->length > sequence->sealed) {
        (void)kvk_sequence_cut(cache, sequence, sequence->sealed);
        sequence->last.kind = KVK_CHANGE_NONE;
    }
}

/* ---- Busy ---- */

void kvk_sequence_busy_begin(struct kvk_sequence *sequence)
{
    KVK_ASSERT(!sequence->busy);
    sequence->busy = true;
}

/* *cut: it was, since a rank ended. */
static enum kvk_status end_drops(struct kvk_cache *cache, struct kvk_sequence *sequence, bool *cut,
                                 struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(sequence->busy);
    sequence->busy = false;
    (void)pthread_cond_broadcast(&cache->changed);
    if (sequence->doomed) {
        kvk_sequence_abandon_drops(cache, sequence);
        return kvk_fail(error, KVK_ABORTED, KVK_CAUSE_SESSION_ENDED, "session_id",
                        "the instance ended while the call ran");
    }
    *cut = kvk_sequence_is_lost(sequence);
    sequence->cut_wanted = false;
    if (*cut) {
        kvk_sequence_rank_ended(cache, sequence, NULL);
    }
    return KVK_OK;
}

enum kvk_status kvk_sequence_busy_end_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                                            struct kvk_error *error)
{
    bool cut = false;
    enum kvk_status status = end_drops(cache, sequence, &cut, error);
    if (status == KVK_OK && cut) {
        return kvk_fail(error, KVK_ABORTED, KVK_CAUSE_SESSION_ENDED, "session_id",
                        "a rank of the instance ended while the call ran");
    }
    return status;
}

enum kvk_status kvk_sequence_applied_end_drops(struct kvk_cache *cache,
                                               struct kvk_sequence *sequence,
                                               struct kvk_error *error)
{
    bool cut = false;
    return end_drops(cache, sequence, &cut, error);
}

/* ---- Finding ---- */

enum kvk_status kvk_sequence_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  uint64_t session_id, uint64_t sequence_id,
                                  struct kvk_session **session, struct kvk_sequence **sequence,
                                  struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    enum kvk_status status = kvk_session_find(cache, caller, session_id, session, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_sequence *found = kvk_table_get(&cache->sequence_table, sequence_id);
    /* Another tenant's answers as if there were none. */
    if (found == NULL || found->doomed || found->instance->tenant != (*session)->tenant) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "sequence_id", "no such sequence");
    }
    if (found->instance != (*session)->instance) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NOT_OWNER, "sequence_id",
                        "another instance owns the sequence");
    }
    if (found->busy) {
        kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_BUSY, "sequence_id",
                 "another call works on the sequence");
        kvk_error_retry(error, 1);
        return KVK_UNAVAILABLE;
    }
    *sequence = found;
    return KVK_OK;
}

static uint64_t entries_for(const struct kvk_sequence *sequence, uint64_t new_tokens)
{
    const struct kvk_space *space = sequence->space;
    uint64_t blocks = sequence->groups[0].block_count;
    if (new_tokens != KVK_WHOLE_TABLE) {
        blocks = new_tokens / space->block_tokens + 2; /* a tail before, and one behind */
    }
    return blocks * space->group_count;
}

enum kvk_status kvk_sequence_lock(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  uint64_t session_id, uint64_t sequence_id, uint64_t new_tokens,
                                  struct kvk_tables *tables, struct kvk_session **session,
                                  struct kvk_sequence **sequence, struct kvk_error *error)
{
    uint64_t reserved = KVK_TABLE_ENTRIES_AHEAD;
    *sequence = NULL;
    for (;;) {
        enum kvk_status reserve_status = KVK_OK;
        if (tables != NULL) {
            reserve_status = kvk_tables_reserve_unlocked(tables, reserved, error);
        }
        kvk_lock(&cache->lock);
        if (reserve_status != KVK_OK) {
            return reserve_status;
        }
        enum kvk_status status =
            kvk_sequence_find(cache, caller, session_id, sequence_id, session, sequence, error);
        if (status != KVK_OK || tables == NULL) {
            return status;
        }
        KVK_ASSERT(*sequence != NULL);
        uint64_t needed = entries_for(*sequence, new_tokens);
        if (needed <= reserved) {
            return KVK_OK;
        }
        kvk_unlock(&cache->lock);
        reserved = needed;
    }
}

enum kvk_status kvk_sequence_check_running(const struct kvk_sequence *sequence,
                                           struct kvk_error *error)
{
    if (sequence->state == KVK_SEQUENCE_SWAPPED_OUT) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_SWAPPED_OUT, "sequence_id",
                        "the sequence is swapped out");
    }
    return KVK_OK;
}

enum kvk_status kvk_sequence_check_unwritten(const struct kvk_sequence *sequence,
                                             struct kvk_error *error)
{
    if (sequence->writers > 0) {
        kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_BUSY, "sequence_id",
                 "bytes are being written to the sequence");
        kvk_error_retry(error, 1);
        return KVK_UNAVAILABLE;
    }
    return KVK_OK;
}

enum kvk_status kvk_sequence_check_length(const struct kvk_sequence *sequence,
                                          uint64_t expected_length, struct kvk_error *error)
{
    if (expected_length == sequence->length) {
        return KVK_OK;
    }
    return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_LENGTH_MISMATCH, "expected_length",
                          sequence->length, 0, "the sequence has %llu tokens, not %llu",
                          (unsigned long long)sequence->length,
                          (unsigned long long)expected_length);
}

enum kvk_status kvk_sequence_refused(struct kvk_cache *cache, const struct kvk_caller *caller,
                                     const struct kvk_sequence *sequence, enum kvk_status status,
                                     const struct kvk_error *error)
{
    if (status == KVK_PRECONDITION && error != NULL) {
        kvk_refusal_note(cache, caller, sequence->space->tenant, sequence->id, 0, error);
    }
    return status;
}

bool kvk_request_id_equal(const struct kvk_request_id *a, const struct kvk_request_id *b)
{
    KVK_ASSERT(a->size <= KVK_REQUEST_ID_SIZE_MAX);
    return a->size == b->size && memcmp(a->bytes, b->bytes, a->size) == 0;
}

/* ---- Answers ---- */

void kvk_sequence_answer(const struct kvk_sequence *sequence, struct kvk_sequence_reply *reply)
{
    *reply = (struct kvk_sequence_reply){
        .sequence_id = sequence->id,
        .state = sequence->state,
        .cached_tokens = sequence->cached,
        .sealed_tokens = sequence->sealed,
        .committed_tokens = sequence->committed,
        .length = sequence->length,
        .grant_first = sequence->sealed,
        .disk = sequence->disk,
        .public_tokens = sequence->public_tokens,
        .partial_tokens = sequence->partial_tokens,
    };
}

void kvk_tables_add(const struct kvk_cache *cache, struct kvk_tables *tables, uint32_t group,
                    uint64_t first_block, const uint32_t *blocks, uint32_t count)
{
    if (count > 0) {
        struct kvk_table_part *part = kvk_tables_part(tables, group, first_block, count);
        kvk_table_fill(cache, blocks, count, part);
    }
}

void kvk_sequence_tables(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                         const uint32_t first_block[KVK_GROUP_COUNT_MAX], struct kvk_tables *tables)
{
    if (tables == NULL) {
        return;
    }
    tables->part_count = 0;
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        const struct kvk_sequence_group *table = &sequence->groups[g];
        KVK_ASSERT(first_block[g] <= table->block_count);
        kvk_tables_add(cache, tables, g, first_block[g], table->blocks + first_block[g],
                       table->block_count - first_block[g]);
    }
}

void kvk_sequence_tables_all(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                             struct kvk_tables *tables)
{
    const uint32_t first_block[KVK_GROUP_COUNT_MAX] = {0};
    kvk_sequence_tables(cache, sequence, first_block, tables);
}

/* ---- Get and Close ---- */

enum kvk_status kvk_sequence_get(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 uint64_t session_id, uint64_t sequence_id,
                                 struct kvk_sequence_reply *reply, struct kvk_tables *tables,
                                 struct kvk_error *error)
{
    struct kvk_session *session = NULL;
    struct kvk_sequence *sequence = NULL;
    enum kvk_status status = kvk_sequence_lock(cache, caller, session_id, sequence_id,
                                               KVK_WHOLE_TABLE, tables, &session, &sequence, error);
    if (status == KVK_OK) {
        KVK_ASSERT(sequence != NULL);
        kvk_sequence_answer(sequence, reply);
        kvk_sequence_tables_all(cache, sequence, tables);
    }
    kvk_unlock(&cache->lock);
    return status;
}

/* All of them, in one go: nobody finds any of them from here on. Or none. */
static enum kvk_status close_mark(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  uint64_t session_id, const uint64_t *sequence_ids, uint32_t count,
                                  struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    uint64_t blocks = 0;
    uint32_t marked = 0;
    for (; marked < count; marked++) {
        struct kvk_session *session = NULL;
        struct kvk_sequence *sequence = NULL;
        status = kvk_sequence_find(cache, caller, session_id, sequence_ids[marked], &session,
                                   &sequence, error);
        KVK_ASSERT(status != KVK_OK || sequence != NULL);
        if (status == KVK_OK && sequence->marked) {
            status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "sequence_ids",
                              "sequence_ids names a sequence twice");
        }
        if (status != KVK_OK) {
            break;
        }
        sequence->marked = true;
        blocks += kvk_sequence_blocks(sequence) + 1;
    }
    if (status == KVK_OK) {
        status = kvk_slice_admit(cache, caller, blocks);
    }
    for (uint32_t i = 0; i < marked; i++) {
        struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, sequence_ids[i]);
        sequence->marked = false;
        if (status == KVK_OK) {
            kvk_sequence_doom(sequence);
        }
    }
    return status;
}

enum kvk_status kvk_sequence_close(struct kvk_cache *cache, const struct kvk_caller *caller,
                                   uint64_t session_id, const uint64_t *sequence_ids,
                                   uint32_t count, struct kvk_close_reply *reply,
                                   struct kvk_error *error)
{
    *reply = (struct kvk_close_reply){0};
    if (count == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "sequence_ids",
                        "sequence_ids is empty");
    }
    kvk_lock(&cache->lock);
    enum kvk_status status = close_mark(cache, caller, session_id, sequence_ids, count, error);
    for (uint32_t i = 0; i < count && status == KVK_OK; i++) {
        /* Doomed by us, so it is there. */
        struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, sequence_ids[i]);
        kvk_sequence_end_drops(cache, sequence, reply);
        cache->stats.closes++;
    }
    kvk_unlock(&cache->lock);
    return status;
}
