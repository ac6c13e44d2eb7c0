#include "daemon/events.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/cache_internal.h"
#include "daemon/space.h"

/* As many tokens as entries have blocks of 16: where blocks are larger, the tokens' ring is what
 * overwrites first. */
#define ENTRY_TOKENS 16U
#define ENTRIES_MIN 64U

/* One hold of the lock looks at so many entries that are not its reader's. */
#define READ_ENTRIES_MAX 4096U

struct entry {
    struct kvk_event event; /* without its tokens */
    uint64_t token_place;   /* where they begin, counted over all that were ever logged */
};

struct kvk_events {
    struct entry *entries; /* [entry_count], number modulo it; ours */
    uint64_t entry_count;
    uint32_t *tokens; /* [token_capacity], place modulo it; ours */
    uint64_t token_capacity;
    uint64_t token_end;      /* place */
    uint64_t oldest;         /* number of the oldest entry that is whole; newest + 1: none */
    _Atomic uint64_t newest; /* number; written with the cache lock */
};

enum kvk_status kvk_events_create(uint64_t log_bytes, struct kvk_events **result)
{
    *result = NULL;
    if (log_bytes == 0) {
        return KVK_OK;
    }
    struct kvk_events *events = calloc(1, sizeof(*events));
    if (events == NULL) {
        return KVK_EXHAUSTED;
    }
    uint64_t count = log_bytes / (sizeof(struct entry) + ENTRY_TOKENS * sizeof(uint32_t));
    events->entry_count = count < ENTRIES_MIN ? ENTRIES_MIN : count;
    events->token_capacity = events->entry_count * ENTRY_TOKENS;
    if (events->token_capacity < KVK_BLOCK_TOKENS_MAX) {
        events->token_capacity = KVK_BLOCK_TOKENS_MAX;
    }
    events->entries = calloc(events->entry_count, sizeof(*events->entries));
    events->tokens = calloc(events->token_capacity, sizeof(*events->tokens));
    events->oldest = 1;
    if (events->entries == NULL || events->tokens == NULL) {
        kvk_events_destroy(events);
        return KVK_EXHAUSTED;
    }
    *result = events;
    return KVK_OK;
}

void kvk_events_destroy(struct kvk_events *events)
{
    if (events != NULL) {
        free(events->entries);
        free(events->tokens);
        free(events);
    }
}

uint64_t kvk_events_bytes(const struct kvk_events *events)
{
    return events == NULL ? 0
                          : events->entry_count * sizeof(*events->entries) +
                                events->token_capacity * sizeof(*events->tokens);
}

/* ---- Logging ---- */

static struct entry *entry_of(const struct kvk_events *events, uint64_t number)
{
    return &events->entries[number % events->entry_count];
}

/* A place in the log, with room for its tokens: the oldest entries go. */
static struct entry *entry_take(struct kvk_events *events, uint32_t token_count)
{
    KVK_ASSERT(token_count <= events->token_capacity);
    uint64_t number = atomic_load_explicit(&events->newest, memory_order_relaxed) + 1;
    if (number - events->oldest == events->entry_count) {
        events->oldest++;
    }
    uint64_t token_end = events->token_end + token_count;
    while (events->oldest < number &&
           entry_of(events, events->oldest)->token_place + events->token_capacity < token_end) {
        events->oldest++;
    }
    struct entry *entry = entry_of(events, number);
    entry->event = (struct kvk_event){.number = number, .token_count = token_count};
    entry->token_place = events->token_end;
    events->token_end = token_end;
    atomic_store_explicit(&events->newest, number, memory_order_release);
    return entry;
}

static void tokens_put(struct kvk_events *events, const struct entry *entry, const uint32_t *tokens)
{
    uint32_t count = entry->event.token_count;
    uint64_t place = entry->token_place % events->token_capacity;
    uint64_t first = events->token_capacity - place;
    first = first < count ? first : count;
    memcpy(events->tokens + place, tokens, first * sizeof(*tokens));
    memcpy(events->tokens, tokens + first, (count - first) * sizeof(*tokens));
}

static void tokens_get(const struct kvk_events *events, const struct entry *entry, uint32_t *tokens)
{
    uint32_t count = entry->event.token_count;
    uint64_t place = entry->token_place % events->token_capacity;
    uint64_t first = events->token_capacity - place;
    first = first < count ? first : count;
    memcpy(tokens, events->tokens + place, first * sizeof(*tokens));
    memcpy(tokens + first, events->tokens, (count - first) * sizeof(*tokens));
}

/* All of a stored block but its number, its tier and where its tokens are copied to. */
static void describe(struct kvk_cache *cache, const struct kvk_group *group, uint32_t id,
                     struct kvk_event *event)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    uint32_t root = kvk_index_root_of(cache->index, id);
    size_t salt_size;
    size_t extra_size;
    (void)kvk_index_salt_of_root(cache->index, root, &salt_size);
    (void)kvk_index_extra(cache->index, id, &extra_size);
    event->kind = KVK_EVENT_STORED;
    event->tenant_id = group->space->tenant->id;
    event->space_id = group->space->id;
    event->group = (uint8_t)group->index;
    event->key = block->key;
    event->parent = block->parent == KVK_BLOCK_NONE
                        ? kvk_index_key_of_root(cache->index, root)
                        : kvk_index_block(cache->index, block->parent)->key;
    event->position = block->position;
    event->salted = salt_size > 0;
    event->content = extra_size > 0;
}

static void log_stored(struct kvk_cache *cache, const struct kvk_group *group, uint32_t id,
                       int tier)
{
    struct kvk_events *events = cache->events;
    struct entry *entry = entry_take(events, group->space->block_tokens);
    tokens_put(events, entry, kvk_index_tokens(cache->index, id));
    describe(cache, group, id, &entry->event);
    entry->event.tier = (uint8_t)tier;
}

static void log_removed(struct kvk_cache *cache, const struct kvk_group *group, uint32_t id,
                        int tier)
{
    struct entry *entry = entry_take(cache->events, 0);
    entry->event.kind = KVK_EVENT_REMOVED;
    entry->event.tenant_id = group->space->tenant->id;
    entry->event.space_id = group->space->id;
    entry->event.group = (uint8_t)group->index;
    entry->event.key = kvk_index_block(cache->index, id)->key;
    entry->event.tier = (uint8_t)tier;
}

void kvk_events_tiers(struct kvk_cache *cache, const struct kvk_group *group, uint32_t id,
                      uint8_t before, uint8_t after)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (cache->events == NULL || before == after ||
        kvk_index_block(cache->index, id)->run == UINT32_MAX) {
        return;
    }
    bool findable = kvk_root_is_current(cache, kvk_index_root_of(cache->index, id));
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        bool was = (before >> tier & 1) != 0;
        bool is = (after >> tier & 1) != 0;
        if (is && !was && findable) {
            log_stored(cache, group, id, tier);
        } else if (was && !is) {
            log_removed(cache, group, id, tier);
        }
    }
}

void kvk_events_cleared(struct kvk_cache *cache, const struct kvk_space *space)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (cache->events != NULL) {
        struct entry *entry = entry_take(cache->events, 0);
        entry->event.kind = KVK_EVENT_CLEARED;
        entry->event.tenant_id = space->tenant->id;
        entry->event.space_id = space->id;
    }
}

/* ---- Reading ---- */

uint64_t kvk_events_newest(const struct kvk_cache *cache)
{
    return cache->events == NULL
               ? 0
               : atomic_load_explicit(&cache->events->newest, memory_order_acquire);
}

void kvk_events_stats_unlocked(struct kvk_cache *cache, struct kvk_events_stats *stats)
{
    *stats = (struct kvk_events_stats){.logged = kvk_events_newest(cache), .oldest = 1};
    if (cache->events != NULL) {
        kvk_lock(&cache->lock);
        stats->logged = kvk_events_newest(cache);
        stats->oldest = cache->events->oldest;
        kvk_unlock(&cache->lock);
    }
}

static bool batch_has_room(const struct kvk_event_batch *batch, uint32_t events, uint64_t tokens)
{
    return batch->count + events <= KVK_EVENT_BATCH_EVENTS &&
           batch->token_count + tokens <= KVK_EVENT_BATCH_TOKENS;
}

static uint32_t *batch_add(struct kvk_event_batch *batch, const struct kvk_event *event)
{
    struct kvk_event *added = &batch->events[batch->count++];
    uint32_t *tokens = batch->tokens + batch->token_count;
    *added = *event;
    added->tokens = tokens;
    batch->token_count += event->token_count;
    return tokens;
}

bool kvk_events_read_unlocked(struct kvk_cache *cache, uint64_t tenant_id, uint64_t *after,
                              struct kvk_event_batch *batch)
{
    struct kvk_events *events = cache->events;
    KVK_ASSERT(events != NULL);
    batch->count = 0;
    batch->token_count = 0;
    kvk_lock(&cache->lock);
    uint64_t newest = kvk_events_newest(cache);
    bool known = *after <= newest && *after + 1 >= events->oldest;
    for (uint32_t looked = 0; known && *after < newest && looked < READ_ENTRIES_MAX; looked++) {
        const struct entry *entry = entry_of(events, *after + 1);
        if (tenant_id == 0 || entry->event.tenant_id == tenant_id) {
            if (!batch_has_room(batch, 1, entry->event.token_count)) {
                break;
            }
            tokens_get(events, entry, batch_add(batch, &entry->event));
        }
        (*after)++;
    }
    kvk_unlock(&cache->lock);
    return known;
}

/* ---- Snapshots ---- */

/* So many ids are looked at, and at most so many of one chain are told, in one hold. */
#define WALK_IDS_MAX 2048U
#define WALK_PATH_MAX 128U

enum kvk_status kvk_events_walk_begin_unlocked(struct kvk_cache *cache, uint64_t tenant_id,
                                               struct kvk_events_walk *walk)
{
    KVK_ASSERT(cache->events != NULL);
    *walk = (struct kvk_events_walk){.tenant_id = tenant_id};
    kvk_lock(&cache->lock);
    uint32_t end_id = kvk_index_block_id_end(cache->index);
    kvk_unlock(&cache->lock);
    walk->seen = calloc(end_id / 8 + 1, 1);
    if (walk->seen == NULL) {
        return KVK_EXHAUSTED;
    }
    kvk_lock(&cache->lock);
    walk->end_id = end_id;
    walk->after = kvk_events_newest(cache);
    kvk_unlock(&cache->lock);
    return KVK_OK;
}

void kvk_events_walk_finish(struct kvk_events_walk *walk)
{
    free(walk->seen);
    *walk = (struct kvk_events_walk){.seen = NULL};
}

/* Blocks that came after the walk began have events of their own. */
static bool is_seen(const struct kvk_events_walk *walk, uint32_t id)
{
    return id >= walk->end_id || (walk->seen[id / 8] >> id % 8 & 1) != 0;
}

/* Tell a block in each tier that has it. False: there is no room. */
static bool walk_tell(struct kvk_cache *cache, struct kvk_events_walk *walk, uint32_t id,
                      struct kvk_event_batch *batch)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    const struct kvk_group *group = kvk_group_of(cache, block);
    uint32_t tokens = group->space->block_tokens;
    if (!batch_has_room(batch, KVK_TIER_COUNT, (uint64_t)tokens * KVK_TIER_COUNT)) {
        return false;
    }
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        if ((block->tier_mask >> tier & 1U) != 0) {
            struct kvk_event event = {.token_count = tokens, .tier = (uint8_t)tier};
            describe(cache, group, id, &event);
            memcpy(batch_add(batch, &event), kvk_index_tokens(cache->index, id),
                   tokens * sizeof(uint32_t));
        }
    }
    walk->seen[id / 8] |= (uint8_t)(1U << id % 8);
    return true;
}

/* What of a block's chain was not told yet, the block last. False: not all of it now. */
static bool walk_chain(struct kvk_cache *cache, struct kvk_events_walk *walk, uint32_t id,
                       struct kvk_event_batch *batch)
{
    uint32_t path[WALK_PATH_MAX]; /* those next to what was told, the uppermost last */
    uint32_t length = 0;
    for (uint32_t at = id; at != KVK_BLOCK_NONE && !is_seen(walk, at);) {
        path[length++ % WALK_PATH_MAX] = at;
        at = kvk_index_block(cache->index, at)->parent;
    }
    uint32_t kept = length < WALK_PATH_MAX ? length : WALK_PATH_MAX;
    for (uint32_t i = 0; i < kept; i++) {
        if (!walk_tell(cache, walk, path[(length - 1 - i) % WALK_PATH_MAX], batch)) {
            return false;
        }
    }
    return kept == length;
}

static bool is_wanted(const struct kvk_cache *cache, const struct kvk_events_walk *walk,
                      uint32_t id)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    if (block->run == UINT32_MAX || is_seen(walk, id)) {
        return false;
    }
    const struct kvk_group *group = kvk_group_of(cache, block);
    return (walk->tenant_id == 0 || group->space->tenant->id == walk->tenant_id) &&
           kvk_root_is_current(cache, kvk_index_root_of(cache->index, id));
}

bool kvk_events_walk_next_unlocked(struct kvk_cache *cache, struct kvk_events_walk *walk,
                                   struct kvk_event_batch *batch)
{
    batch->count = 0;
    batch->token_count = 0;
    kvk_lock(&cache->lock);
    bool more = walk->next_id < walk->end_id;
    for (uint32_t looked = 0; looked < WALK_IDS_MAX && walk->next_id < walk->end_id; looked++) {
        if (is_wanted(cache, walk, walk->next_id) &&
            !walk_chain(cache, walk, walk->next_id, batch)) {
            break;
        }
        walk->next_id++;
    }
    kvk_unlock(&cache->lock);
    return more;
}

/* ---- Names ---- */

#define SPACE_TEXTS 4

enum kvk_status kvk_events_space_unlocked(struct kvk_cache *cache, uint64_t space_id,
                                          struct kvk_event_space *result)
{
    static const uint32_t tags[SPACE_TEXTS] = {0, KVK_IDENTITY_MODEL, KVK_IDENTITY_REVISION,
                                               KVK_IDENTITY_ADAPTER_NAME};
    const size_t text_size = KVK_IDENTITY_PART_SIZE_MAX + 1;
    *result = (struct kvk_event_space){.memory = calloc(SPACE_TEXTS, text_size)};
    if (result->memory == NULL) {
        return KVK_EXHAUSTED;
    }
    char *texts = result->memory;
    kvk_lock(&cache->lock);
    const struct kvk_space *space = kvk_table_get(&cache->space_table, space_id);
    if (space == NULL) {
        kvk_unlock(&cache->lock);
        free(result->memory);
        *result = (struct kvk_event_space){.memory = NULL};
        return KVK_NOT_FOUND;
    }
    memcpy(texts, space->tenant->name, strlen(space->tenant->name));
    size_t offset = 0;
    uint32_t tag;
    struct kvk_view part;
    while (kvk_identity_next(space->identity, space->identity_size, &offset, &tag, &part)) {
        for (size_t i = 1; i < SPACE_TEXTS; i++) {
            if (tag == tags[i]) {
                memcpy(texts + i * text_size, part.data, part.size);
            }
        }
    }
    result->tenant_id = space->tenant->id;
    result->block_tokens = space->block_tokens;
    result->group_count = space->group_count;
    for (uint32_t g = 0; g < space->group_count; g++) {
        result->windows[g] = (uint32_t)space->groups[g]->geometry.window;
    }
    kvk_unlock(&cache->lock);
    result->tenant = texts;
    result->model = texts + text_size;
    result->revision = texts + 2 * text_size;
    result->adapter = texts + 3 * text_size;
    return KVK_OK;
}
