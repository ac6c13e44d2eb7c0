/*
 * Lists for operators: sequences, leases, sessions. Pages go by id, so that what comes and goes
 * between two pages moves no other row.
 */
#include "daemon/report_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

/* ---- The smallest ids of a table, above one ---- */

struct page {
    uint64_t *ids; /* [capacity], a heap with the largest on top until sorted; ours */
    uint64_t capacity;
    uint64_t count;
    bool more; /* some did not fit */
};

static void sift_down(struct page *page)
{
    uint64_t at = 0;
    for (;;) {
        uint64_t child = 2 * at + 1;
        if (child >= page->count) {
            return;
        }
        if (child + 1 < page->count && page->ids[child + 1] > page->ids[child]) {
            child++;
        }
        if (page->ids[at] >= page->ids[child]) {
            return;
        }
        uint64_t id = page->ids[at];
        page->ids[at] = page->ids[child];
        page->ids[child] = id;
        at = child;
    }
}

static void page_add(struct page *page, uint64_t id)
{
    if (page->count == page->capacity) {
        page->more = true;
        if (id < page->ids[0]) {
            page->ids[0] = id;
            sift_down(page);
        }
        return;
    }
    uint64_t at = page->count;
    page->count++;
    page->ids[at] = id;
    while (at > 0 && page->ids[(at - 1) / 2] < page->ids[at]) {
        uint64_t parent = (at - 1) / 2;
        page->ids[at] = page->ids[parent];
        page->ids[parent] = id;
        at = parent;
    }
}

static int compare_ids(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left;
    uint64_t b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

/* Whether the caller sees the entry, whose value is a pointer. */
typedef bool (*sees_entry)(const struct kvk_scope *scope, uintptr_t value);

/* The page's ids, sorted; the lock is held and dropped between slices. Entries that are moved by
 * others meanwhile may be missed: they are on another page or in the next answer. */
static void page_fill_drops(struct kvk_cache *cache, const struct kvk_table *table,
                            const struct kvk_scope *scope, sees_entry sees, uint64_t after_id,
                            struct page *page)
{
    uint64_t work = 0;
    size_t place = 0;

    for (;;) {
        size_t before = place;
        const struct kvk_table_entry *entry = kvk_table_next(table, &place);
        if (entry == NULL) {
            break;
        }
        if (entry->key > after_id && sees(scope, entry->value)) {
            page_add(page, entry->key);
        }
        kvk_report_slice_drops(cache, &work, place - before);
    }
    qsort(page->ids, page->count, sizeof(page->ids[0]), compare_ids);
}

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                    "no memory for the rows of the answer");
}

static enum kvk_status page_init(struct page *page, uint64_t limit, uint64_t most,
                                 struct kvk_error *error)
{
    *page = (struct page){.capacity = limit < most ? limit : most};
    page->ids = calloc(page->capacity + 1, sizeof(page->ids[0]));
    return page->ids != NULL ? KVK_OK : no_memory(error);
}

static uint64_t age_ms(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? (now_ns - then_ns) / KVK_NS_PER_MS : 0;
}

/* ---- Sequences ---- */

static bool sees_sequence(const struct kvk_scope *scope, uintptr_t value)
{
    return kvk_scope_sees(scope, ((const struct kvk_sequence *)value)->space->tenant);
}

static void sequence_fill(const struct kvk_sequence *sequence, uint64_t now_ns,
                          struct kvk_sequence_report *row)
{
    *row = (struct kvk_sequence_report){
        .sequence_id = sequence->id,
        .tenant = sequence->space->tenant,
        .space_id = sequence->space->id,
        .instance_id = sequence->instance->id,
        .state = sequence->state,
        .length = sequence->length,
        .sealed_tokens = sequence->sealed,
        .cached_tokens = sequence->cached,
        .draft_tokens = sequence->length - sequence->committed,
        .age_ms = age_ms(now_ns, sequence->opened_ns),
        .growth_tokens = sequence->growth_tokens,
    };
}

static void block_count_in(const struct kvk_cache *cache, uint32_t id,
                           struct kvk_sequence_report *row)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    const struct kvk_group *group = kvk_group_of(cache, block);

    row->blocks++;
    row->shared_blocks += block->hold_count > 1;
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        if (block->slot[tier] != KVK_SLOT_NONE) {
            row->tier_bytes[tier] += group->forms[tier].block_bytes;
        }
    }
}

/* One row; a long sequence's blocks are counted in slices, each as it is then. False: it is gone.
 */
static bool sequence_row_drops(struct kvk_cache *cache, uint64_t id, uint64_t *work,
                               struct kvk_sequence_report *row)
{
    const struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, id);
    if (sequence == NULL) {
        return false;
    }
    sequence_fill(sequence, kvk_clock_now(cache->clock), row);
    uint32_t group_count = sequence->space->group_count;
    for (uint32_t g = 0; g < group_count; g++) {
        for (uint32_t i = 0; sequence != NULL && i < sequence->groups[g].block_count; i++) {
            if (sequence->groups[g].blocks[i] != KVK_BLOCK_NONE) {
                block_count_in(cache, sequence->groups[g].blocks[i], row);
            }
            kvk_report_slice_drops(cache, work, 1);
            sequence = kvk_table_get(&cache->sequence_table, id);
        }
    }
    return true;
}

enum kvk_status kvk_report_sequences(struct kvk_cache *cache, const struct kvk_caller *caller,
                                     struct kvk_view tenant, uint64_t after_id, uint64_t limit,
                                     struct kvk_sequence_report **rows, uint32_t *row_count,
                                     bool *more, struct kvk_error *error)
{
    struct kvk_scope scope;
    struct page page;
    uint64_t work = 0;

    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status == KVK_OK) {
        status = page_init(&page, limit, cache->config->sequences, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_sequence_report *list = calloc(page.capacity + 1, sizeof(list[0]));
    if (list == NULL) {
        free(page.ids);
        return no_memory(error);
    }
    uint32_t count = 0;
    kvk_lock(&cache->lock);
    page_fill_drops(cache, &cache->sequence_table, &scope, sees_sequence, after_id, &page);
    for (uint64_t i = 0; i < page.count; i++) {
        if (sequence_row_drops(cache, page.ids[i], &work, &list[count])) {
            count++;
        }
    }
    kvk_unlock(&cache->lock);
    free(page.ids);
    *rows = list;
    *row_count = count;
    *more = page.more;
    return KVK_OK;
}

/* ---- Leases ---- */

static bool sees_lease(const struct kvk_scope *scope, uintptr_t value)
{
    return kvk_scope_sees(scope, ((const struct kvk_lease *)value)->space->tenant);
}

static bool lease_row(struct kvk_cache *cache, uint64_t id, uint64_t *steps,
                      struct kvk_lease_report *row)
{
    const struct kvk_lease *lease = kvk_table_get(&cache->lease_table, id);
    if (lease == NULL) {
        return false;
    }
    uint64_t now_ns = kvk_lease_clock(cache);
    *row = (struct kvk_lease_report){
        .lease_id = lease->id,
        .tenant = lease->space->tenant,
        .space_id = lease->space->id,
        .instance_id = lease->instance->id,
        .tokens = lease->tokens,
        .age_ms = age_ms(now_ns, lease->begun_ns),
        .ttl_ms = age_ms(lease->expires_ns, now_ns),
        .copy_pin = lease->copy_pin,
        .open_transfers = lease->open_transfers,
    };
    memcpy(row->instance_name, lease->instance->name, sizeof(row->instance_name));
    *steps = 1;
    for (uint32_t g = 0; g < lease->space->group_count; g++) {
        const struct kvk_lease_group *group = &lease->groups[g];
        for (uint32_t i = 0; i < group->block_count; i++) {
            row->blocks += group->blocks[i] != KVK_BLOCK_NONE;
        }
        *steps += group->block_count / 64; /* a line of memory holds 16 */
    }
    return true;
}

enum kvk_status kvk_report_leases(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  struct kvk_view tenant, uint64_t after_id, uint64_t limit,
                                  struct kvk_lease_report **rows, uint32_t *row_count, bool *more,
                                  struct kvk_error *error)
{
    struct kvk_scope scope;
    struct page page;
    uint64_t work = 0;

    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status == KVK_OK) {
        status = page_init(&page, limit, cache->config->leases, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_lease_report *list = calloc(page.capacity + 1, sizeof(list[0]));
    if (list == NULL) {
        free(page.ids);
        return no_memory(error);
    }
    uint32_t count = 0;
    kvk_lock(&cache->lock);
    page_fill_drops(cache, &cache->lease_table, &scope, sees_lease, after_id, &page);
    for (uint64_t i = 0; i < page.count; i++) {
        uint64_t steps = 0;
        if (lease_row(cache, page.ids[i], &steps, &list[count])) {
            count++;
        }
        kvk_report_slice_drops(cache, &work, steps);
    }
    kvk_unlock(&cache->lock);
    free(page.ids);
    *rows = list;
    *row_count = count;
    *more = page.more;
    return KVK_OK;
}

/* ---- Sessions ---- */

static uint64_t mapped_bytes(const struct kvk_session *session)
{
    uint64_t bytes = 0;
    for (const struct kvk_mapping *mapping = session->mappings; mapping != NULL;
         mapping = mapping->next) {
        if (!mapping->taken) {
            continue;
        }
        bytes += mapping->kind == KVK_MAP_SCRATCH
                     ? mapping->scratch.size_bytes
                     : mapping->group->tiers[mapping->tier].regions[mapping->shard].size_bytes;
    }
    return bytes;
}

static void session_fill(const struct kvk_session *session, bool show_id,
                         struct kvk_session_report *row)
{
    row->session_id = show_id ? session->id : 0;
    row->tenant = session->tenant;
    row->rank = session->rank;
    row->pid = session->pid;
    row->uid = session->uid;
    row->side_socket = session->side_bound;
    row->connected = session->connected;
    row->mapped_bytes = mapped_bytes(session);
}

/* A session's instance, or, where that is over, what is left of it. */
static void instance_fill(const struct kvk_instance *instance, uint64_t now_ns,
                          struct kvk_session_report *row)
{
    row->instance_id = instance->id;
    memcpy(row->instance_name, instance->name, sizeof(row->instance_name));
    row->instance_age_ms = age_ms(now_ns, instance->begun_ns);
    row->instance_sequences = instance->sequence_count;
    row->instance_leases = instance->lease_count;
    for (const struct kvk_session *session = instance->sessions; session != NULL;
         session = session->next) {
        row->instance_quarantine_blocks += session->quarantine_count;
    }
}

/* Sessions that outlived their instance: those of one stand together in the list, too. */
static uint32_t waiting_fill(const struct kvk_cache *cache, const struct kvk_scope *scope,
                             struct kvk_session_report *list, uint32_t count)
{
    for (const struct kvk_session *session = cache->waiting_sessions; session != NULL;
         session = session->next) {
        if (!kvk_scope_sees(scope, session->tenant)) {
            continue;
        }
        struct kvk_session_report *row = &list[count];
        *row = (struct kvk_session_report){.instance_id = session->instance_id};
        session_fill(session, scope->credential->admin, row);
        for (const struct kvk_session *other = session;
             other != NULL && other->instance_id == session->instance_id; other = other->next) {
            row->instance_quarantine_blocks += other->quarantine_count;
        }
        count++;
    }
    return count;
}

enum kvk_status kvk_report_sessions(struct kvk_cache *cache, const struct kvk_caller *caller,
                                    struct kvk_view tenant, struct kvk_session_report **rows,
                                    uint32_t *row_count, struct kvk_error *error)
{
    struct kvk_scope scope;

    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status != KVK_OK) {
        return status;
    }
    uint32_t capacity = cache->config->sessions;
    struct kvk_session_report *list = calloc(capacity, sizeof(list[0]));
    if (list == NULL) {
        return no_memory(error);
    }
    bool show_ids = scope.credential->admin;
    uint32_t count = 0;
    /* In one go: what an instance has must not change between its rows. config.sessions bounds it.
     */
    kvk_lock(&cache->lock);
    uint64_t now_ns = kvk_clock_now(cache->clock);
    for (const struct kvk_instance *instance = cache->instances; instance != NULL;
         instance = instance->next) {
        struct kvk_session_report of_instance = {.session_id = 0};
        if (!kvk_scope_sees(&scope, instance->tenant)) {
            continue;
        }
        instance_fill(instance, now_ns, &of_instance);
        for (const struct kvk_session *session = instance->sessions; session != NULL;
             session = session->next) {
            KVK_ASSERT(count < capacity);
            list[count] = of_instance;
            session_fill(session, show_ids, &list[count]);
            count++;
        }
    }
    count = waiting_fill(cache, &scope, list, count);
    KVK_ASSERT(count <= capacity);
    kvk_unlock(&cache->lock);
    *rows = list;
    *row_count = count;
    return KVK_OK;
}
