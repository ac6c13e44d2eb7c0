#include "daemon/report.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/report_internal.h"

/* Steps (a block, a table's place, a row) with the lock held in one go: well under 1 ms. */
#define SLICE_WORK 4096

static const char *const no_rows_memory = "no memory for the rows of the answer";

/* ---- Whose figures ---- */

enum kvk_status kvk_scope_init(const struct kvk_cache *cache, const struct kvk_caller *caller,
                               struct kvk_view tenant, struct kvk_scope *scope,
                               struct kvk_error *error)
{
    *scope = (struct kvk_scope){.credential = caller->credential};
    if (tenant.size == 0) {
        return KVK_OK;
    }
    if (!caller->credential->admin) {
        return kvk_credential_tenant(caller->credential, tenant.data, tenant.size, &scope->tenant,
                                     error);
    }
    scope->tenant = kvk_tenants_find_name(cache->tenants, tenant.data, tenant.size);
    if (scope->tenant != NULL) {
        return KVK_OK;
    }
    return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "tenant", "no such tenant");
}

bool kvk_scope_sees(const struct kvk_scope *scope, const struct kvk_tenant *tenant)
{
    if (scope->tenant != NULL) {
        return tenant == scope->tenant;
    }
    return scope->credential->admin || kvk_credential_allows(scope->credential, tenant);
}

void kvk_report_slice_drops(struct kvk_cache *cache, uint64_t *work, uint64_t more)
{
    *work += more;
    if (*work >= SLICE_WORK) {
        *work = 0;
        kvk_pause_drops(cache);
    }
}

/* ---- Occupancy ---- */

static uint64_t less(uint64_t from, uint64_t what)
{
    return from > what ? from - what : 0;
}

static uint64_t own_used_bytes(const struct kvk_cache *cache, const struct kvk_scope *scope,
                               const struct kvk_tier_state *tier)
{
    uint64_t used_bytes = 0;
    for (uint32_t i = 0; i < kvk_tenants_count(cache->tenants); i++) {
        const struct kvk_tenant *tenant = kvk_tenants_get(cache->tenants, i);
        if (tenant != NULL && kvk_scope_sees(scope, tenant)) {
            used_bytes += tier->tenant_bytes[i];
        }
    }
    return used_bytes;
}

static void tier_fill(const struct kvk_tier_state *tier, struct kvk_tier_report *report)
{
    report->used_bytes = tier->used_bytes;
    report->free_bytes = tier->pool.limit_bytes - tier->used_bytes;
    report->slab_bytes = tier->pool.slab_bytes;
    report->active_bytes =
        tier->bound_bytes - tier->leased_bytes - tier->copying_bytes - tier->quarantine_bytes;
    report->leased_bytes = tier->leased_bytes;
    report->evictable_bytes = tier->used_bytes - tier->bound_bytes;
    report->copying_bytes = tier->copying_bytes;
    report->quarantine_bytes = tier->quarantine_bytes;
    report->growth_bytes = tier->growth_bytes;
    report->stray_bytes = tier->stray_bytes;
    report->scattered_bytes = less(tier->pool.slab_bytes, tier->used_bytes);
}

static void public_fill(const struct kvk_cache *cache, const struct kvk_scope *scope,
                        struct kvk_tier_report tiers[KVK_TIER_COUNT])
{
    for (const struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        if (!space->is_public || !kvk_scope_sees(scope, space->tenant)) {
            continue;
        }
        for (uint32_t g = 0; g < space->group_count; g++) {
            for (int i = 0; i < KVK_TIER_COUNT; i++) {
                tiers[i].public_bytes += space->groups[g]->tiers[i].used_bytes;
            }
        }
    }
}

void kvk_report_tiers(const struct kvk_cache *cache, const struct kvk_scope *scope,
                      struct kvk_tier_report tiers[KVK_TIER_COUNT])
{
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        const struct kvk_tier_state *tier = &cache->tiers[i];
        struct kvk_tier_report *report = &tiers[i];

        *report = (struct kvk_tier_report){.limit_bytes = tier->pool.limit_bytes};
        if (i == KVK_TIER_DISK ? cache->disk_tier == NULL : tier->device == NULL) {
            continue;
        }
        if (kvk_scope_is_all(scope)) {
            tier_fill(tier, report);
        } else {
            report->used_bytes = own_used_bytes(cache, scope, tier);
            report->free_bytes = tier->pool.limit_bytes - report->used_bytes;
        }
        /* A refusal would say as much to anybody. */
        report->largest_admissible_bytes = less(
            tier->pool.limit_bytes, tier->bound_bytes + tier->growth_bytes + tier->stray_bytes);
    }
    public_fill(cache, scope, tiers);
}

static void group_fill(const struct kvk_group *group, struct kvk_group_report *row)
{
    const struct kvk_space *space = group->space;

    *row = (struct kvk_group_report){
        .tenant = space->tenant,
        .space_id = space->id,
        .group = group->index,
        .is_public = space->is_public,
        .block_bytes = group->block_bytes,
    };
    size_t offset = 0;
    uint32_t tag = 0;
    struct kvk_view part = {.size = 0};
    while (kvk_identity_next(space->identity, space->identity_size, &offset, &tag, &part)) {
        if (tag == KVK_IDENTITY_MODEL) {
            size_t size = part.size < sizeof(row->model) ? part.size : sizeof(row->model) - 1;
            /* A cut name stays UTF-8: it ends before the character that does not fit. */
            while (size < part.size && size > 0 && (part.data[size] & 0xc0) == 0x80) {
                size--;
            }
            memcpy(row->model, part.data, size);
            break;
        }
    }
    memcpy(row->tier_blocks, group->tier_blocks, sizeof(row->tier_blocks));
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        row->tier_bytes[i] = group->tier_blocks[i] * group->forms[i].block_bytes;
    }
    memcpy(row->state_counts, group->state_counts, sizeof(row->state_counts));
}

static int compare_groups(const void *left, const void *right)
{
    const struct kvk_group_report *a = left;
    const struct kvk_group_report *b = right;

    if (a->tenant != b->tenant) {
        return a->tenant->index < b->tenant->index ? -1 : 1;
    }
    if (a->space_id != b->space_id) {
        return a->space_id < b->space_id ? -1 : 1;
    }
    return a->group < b->group ? -1 : a->group > b->group;
}

enum kvk_status kvk_report_metadata(struct kvk_cache *cache, const struct kvk_caller *caller,
                                    struct kvk_view tenant, struct kvk_metadata_report **rows,
                                    uint32_t *row_count, struct kvk_error *error)
{
    struct kvk_scope scope;
    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_metadata_report *list = calloc(KVK_TENANT_COUNT_MAX, sizeof(list[0]));
    if (list == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "%s", no_rows_memory);
    }
    uint32_t count = 0;
    kvk_lock(&cache->lock);
    for (uint32_t i = 0; i < kvk_tenants_count(cache->tenants); i++) {
        const struct kvk_tenant *one = cache->tenant_states[i].tenant;
        if (one != NULL && kvk_scope_sees(&scope, one)) {
            kvk_metadata_report(cache, one, &list[count]);
            count++;
        }
    }
    kvk_unlock(&cache->lock);
    *rows = list;
    *row_count = count;
    return KVK_OK;
}

enum kvk_status kvk_report_occupancy(struct kvk_cache *cache, const struct kvk_caller *caller,
                                     struct kvk_view tenant,
                                     struct kvk_tier_report tiers[KVK_TIER_COUNT],
                                     struct kvk_group_report **rows, uint32_t *row_count,
                                     struct kvk_error *error)
{
    struct kvk_scope scope;
    uint64_t work = 0;

    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    uint32_t capacity = cache->space_count * KVK_GROUP_COUNT_MAX;
    kvk_unlock(&cache->lock);
    struct kvk_group_report *list = calloc(capacity + 1u, sizeof(list[0]));
    if (list == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "%s", no_rows_memory);
    }
    uint32_t count = 0;
    kvk_lock(&cache->lock);
    kvk_report_tiers(cache, &scope, tiers);
    /* Groups that came meanwhile and have no room were not there when it was asked. */
    for (uint32_t i = 0; i < cache->group_end && count < capacity; i++) {
        const struct kvk_group *group = cache->groups[i];
        if (group != NULL && kvk_scope_sees(&scope, group->space->tenant)) {
            group_fill(group, &list[count]);
            count++;
        }
        kvk_report_slice_drops(cache, &work, 1);
    }
    kvk_unlock(&cache->lock);
    qsort(list, count, sizeof(list[0]), compare_groups);
    *rows = list;
    *row_count = count;
    return KVK_OK;
}

/* ---- Spaces ---- */

void kvk_report_spaces_free(struct kvk_space_report *rows, uint32_t row_count)
{
    for (uint32_t i = 0; rows != NULL && i < row_count; i++) {
        free(rows[i].identity);
    }
    free(rows);
}

/* Everything but the identity. */
static void space_fill(const struct kvk_space *space, struct kvk_space_report *row)
{
    *row = (struct kvk_space_report){
        .space_id = space->id,
        .tenant = space->tenant,
        .block_tokens = space->block_tokens,
        .group_count = space->group_count,
        .queries = space->queries,
        .query_tokens = space->query_tokens,
        .hit_tokens = space->hit_tokens,
        .generation = space->generation,
        .is_public = space->is_public,
        .mode = space->mode,
        .partial_reuse = space->partial_reuse,
    };
    for (uint32_t i = 0; i < space->group_count; i++) {
        const struct kvk_group *group = space->groups[i];
        row->groups[i] = group->geometry;
        row->disk_formats[i] = kvk_tier_form_format(&group->forms[KVK_TIER_DISK]);
        row->host_formats[i] = kvk_tier_form_format(&group->forms[KVK_TIER_HOST]);
        for (int state = KVK_BLOCK_RESERVED; state <= KVK_BLOCK_EVICTABLE; state++) {
            row->blocks += group->state_counts[state];
        }
        for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
            row->bytes += group->tiers[tier].used_bytes;
        }
    }
}

static struct kvk_space *find_space(const struct kvk_cache *cache, const struct kvk_scope *scope,
                                    uint64_t space_id)
{
    struct kvk_space *space = kvk_table_get(&cache->space_table, space_id);
    return space != NULL && kvk_scope_sees(scope, space->tenant) ? space : NULL;
}

/* The identities: each is copied with the lock held into memory that was there before. */
static enum kvk_status identities_fill(struct kvk_cache *cache, struct kvk_space_report *rows,
                                       uint32_t count, struct kvk_error *error)
{
    for (uint32_t i = 0; i < count; i++) {
        /* A space's identity never changes size; the space may be gone. */
        kvk_lock(&cache->lock);
        const struct kvk_space *space = kvk_table_get(&cache->space_table, rows[i].space_id);
        size_t size = space != NULL ? space->identity_size : 0;
        kvk_unlock(&cache->lock);
        rows[i].identity = calloc(1, size + 1);
        if (rows[i].identity == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "%s", no_rows_memory);
        }
        kvk_lock(&cache->lock);
        space = kvk_table_get(&cache->space_table, rows[i].space_id);
        if (space != NULL && space->identity_size == size) {
            memcpy(rows[i].identity, space->identity, size);
            rows[i].identity_size = size;
        }
        kvk_unlock(&cache->lock);
    }
    return KVK_OK;
}

static int compare_spaces(const void *left, const void *right)
{
    const struct kvk_space_report *a = left;
    const struct kvk_space_report *b = right;
    return a->space_id < b->space_id ? -1 : a->space_id > b->space_id;
}

enum kvk_status kvk_report_spaces(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  struct kvk_view tenant, struct kvk_space_report **rows,
                                  uint32_t *row_count, struct kvk_error *error)
{
    struct kvk_scope scope;
    uint64_t work = 0;

    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    uint32_t capacity = cache->space_count;
    kvk_unlock(&cache->lock);
    struct kvk_space_report *list = calloc(capacity + 1u, sizeof(list[0]));
    if (list == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "%s", no_rows_memory);
    }
    uint32_t count = 0;
    kvk_lock(&cache->lock);
    for (uint32_t i = 0; i < cache->group_end && count < capacity; i++) {
        /* By way of their first groups, whose numbers do not move when the lock is dropped. */
        const struct kvk_group *group = cache->groups[i];
        if (group != NULL && group->index == 0 && kvk_scope_sees(&scope, group->space->tenant)) {
            space_fill(group->space, &list[count]);
            count++;
        }
        kvk_report_slice_drops(cache, &work, 1);
    }
    kvk_unlock(&cache->lock);
    qsort(list, count, sizeof(list[0]), compare_spaces);
    status = identities_fill(cache, list, count, error);
    if (status != KVK_OK) {
        kvk_report_spaces_free(list, count);
        return status;
    }
    *rows = list;
    *row_count = count;
    return KVK_OK;
}

/* ---- One block ---- */

/* The block that ends the prefix, or KVK_BLOCK_NONE. */
static enum kvk_status find_block(struct kvk_cache *cache, struct kvk_space *space, uint32_t group,
                                  const struct kvk_prompt *prefix, uint32_t *block,
                                  struct kvk_error *error)
{
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    uint64_t blocks = prefix->token_count / space->block_tokens;

    enum kvk_status status =
        kvk_space_roots(cache, space, prefix->salt, prefix->salt_size, roots, error);
    if (status != KVK_OK) {
        return status;
    }
    const struct kvk_content content = {.tokens = prefix->tokens,
                                        .token_count = blocks * space->block_tokens,
                                        .spans = prefix->spans,
                                        .span_count = prefix->span_count};
    struct kvk_match match = {.cursor = {.root = roots[group], .block = KVK_BLOCK_NONE},
                              .path_capacity = blocks};
    kvk_index_match(cache->index, &content, &match);
    *block = match.cursor.blocks == blocks ? match.cursor.block : KVK_BLOCK_NONE;
    kvk_space_roots_release(cache, space, roots);
    return KVK_OK;
}

static void block_fill(const struct kvk_cache *cache, uint32_t id, struct kvk_block_report *report)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    const struct kvk_group *group = kvk_group_of(cache, block);
    uint64_t now_ns = kvk_policy_now(cache);

    *report = (struct kvk_block_report){
        .block_id = id,
        .key = block->key,
        .state = (enum kvk_block_state)block->state,
        .tier_mask = block->tier_mask,
        .holds = block->hold_count,
        .lease_holds = block->lease_hold_count,
        .children = block->child_count,
        .uses = block->use_count,
        .idle_ms = less(now_ns, block->used_ns) / KVK_NS_PER_MS,
        .cost = (double)block->cost,
        .position = block->position,
    };
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        report->slot[i] = block->slot[i];
        report->pins[i] = block->pin_count[i];
    }
    /* As the queue that it is in sees it, or that of the tier where it lies. */
    const struct kvk_evict_queue *queue = block->queue;
    for (int i = 0; i < KVK_TIER_COUNT && queue == NULL; i++) {
        queue = (block->tier_mask >> i & 1) != 0 ? &group->tiers[i].queue : NULL;
    }
    if (queue != NULL) {
        report->score = kvk_evict_score(queue, block, now_ns);
    }
}

enum kvk_status kvk_report_block(struct kvk_cache *cache, const struct kvk_caller *caller,
                                 uint64_t space_id, uint32_t group, const struct kvk_prompt *prefix,
                                 struct kvk_block_report *report, struct kvk_error *error)
{
    const struct kvk_scope scope = {.credential = caller->credential};
    uint32_t block = KVK_BLOCK_NONE;
    enum kvk_status status = KVK_OK;

    kvk_lock(&cache->lock);
    struct kvk_space *space = find_space(cache, &scope, space_id);
    if (space == NULL) {
        status = kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "space_id", "no such space");
    } else if (group >= space->group_count) {
        status = kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "group", group,
                                space->group_count - 1, "group: the space has %u groups",
                                space->group_count);
    } else if (prefix->token_count == 0 || prefix->token_count % space->block_tokens != 0) {
        status = kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "prefix.tokens",
                                prefix->token_count, space->block_tokens,
                                "prefix.tokens must be whole blocks of %u tokens, at least one",
                                space->block_tokens);
    } else {
        status = find_block(cache, space, group, prefix, &block, error);
    }
    if (status == KVK_OK && block == KVK_BLOCK_NONE) {
        status =
            kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "prefix", "no block ends this prefix");
    }
    if (status == KVK_OK) {
        block_fill(cache, block, report);
    }
    kvk_unlock(&cache->lock);
    return status;
}
