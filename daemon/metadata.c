/*
 * What tenants make the daemon keep: see metadata.h. Whoever makes or ends a thing adds or takes
 * away here; kvk_metadata_check() counts all of it again.
 */
#include "daemon/metadata.h"

#include <stdlib.h>

#include "base/assert.h"
#include "daemon/sequence_internal.h"

#define RECORDS_EIGHTHS 7      /* of a tenant's bytes, for records of blocks */
#define RETRY_MS 500           /* nobody can know when something ends */
#define INDEX_ENTRY_BYTES 16   /* of a block, in the table of keys and its run */
#define SLOT_EXTRA_BYTES 8     /* owner and generation */
#define STORED_RECORD_BYTES 96 /* in the sidecar or on disk, its tokens apart */
#define SLAB_BYTES 64          /* of a place for a slab */

static const char *const names[KVK_METADATA_KINDS] = {
    "blocks",    "roots",    "sequences", "leases",          "transfers",
    "instances", "sessions", "spaces",    "public_prefixes",
};

const char *kvk_metadata_name(enum kvk_metadata_kind kind)
{
    return names[kind];
}

static struct kvk_metadata *metadata_of(const struct kvk_cache *cache,
                                        const struct kvk_tenant *tenant)
{
    return &kvk_tenant_state_of(cache, tenant)->metadata;
}

/* ---- How large things are ---- */

uint64_t kvk_metadata_of_record(const struct kvk_group *group)
{
    uint64_t tokens = (uint64_t)group->space->block_tokens * sizeof(uint32_t);
    uint64_t bytes = sizeof(struct kvk_block) + INDEX_ENTRY_BYTES + tokens;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        if (group->tiers[i].present) {
            bytes += SLOT_EXTRA_BYTES + group->shard_count * sizeof(uint64_t);
        }
    }
    bool stored = group->sidecar != NULL || group->disk != NULL;
    return bytes + (stored ? STORED_RECORD_BYTES + tokens : 0);
}

uint64_t kvk_metadata_of_space(const struct kvk_space *space)
{
    uint64_t bytes = sizeof(*space) + space->identity_size + sizeof(uint64_t);
    for (uint32_t g = 0; g < space->group_count; g++) {
        bytes += sizeof(struct kvk_group);
        for (int i = 0; i < KVK_TIER_COUNT; i++) {
            const struct kvk_group_tier *at = &space->groups[g]->tiers[i];
            bytes += at->present ? at->arena.slab_capacity * (uint64_t)SLAB_BYTES : 0;
        }
    }
    return bytes;
}

uint64_t kvk_metadata_of_session(const struct kvk_session *session)
{
    uint64_t bytes = sizeof(*session);
    for (const struct kvk_mapping *m = session->mappings; m != NULL; m = m->next) {
        bytes += sizeof(*m) + (m->kind == KVK_MAP_SCRATCH ? m->scratch.size_bytes : 0);
    }
    return bytes;
}

uint64_t kvk_metadata_of_publication(const struct kvk_publication *publication)
{
    const struct kvk_space *space = publication->space;
    uint64_t blocks = publication->block_count;
    return sizeof(*publication) + blocks * space->block_tokens * sizeof(uint32_t) +
           blocks * space->group_count * sizeof(uint32_t) +
           publication->span_count * sizeof(*publication->spans);
}

uint64_t kvk_metadata_extra_most(const struct kvk_content_span *spans, uint32_t span_count,
                                 uint32_t block_tokens, uint32_t group_count)
{
    const uint64_t around = KVK_METADATA_EXTRA_BYTES + 1 + 4 + 8 + 4 + 4; /* see content.h */
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < span_count; i++) {
        bytes += (spans[i].count / block_tokens + 2) * (around + spans[i].digest_size);
    }
    return bytes * group_count;
}

/* ---- Its own ---- */

uint64_t kvk_metadata_kind_bytes(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                 enum kvk_metadata_kind kind)
{
    const struct kvk_metadata *metadata = metadata_of(cache, tenant);
    return kind == KVK_METADATA_ROOTS ? metadata->roots.root_bytes : metadata->bytes[kind];
}

uint32_t kvk_metadata_kind_count(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                 enum kvk_metadata_kind kind)
{
    const struct kvk_metadata *metadata = metadata_of(cache, tenant);
    return kind == KVK_METADATA_ROOTS ? metadata->roots.root_count : metadata->counts[kind];
}

uint64_t kvk_metadata_bytes(const struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    uint64_t bytes = 0;
    for (int i = 0; i < KVK_METADATA_KINDS; i++) {
        bytes += kvk_metadata_kind_bytes(cache, tenant, (enum kvk_metadata_kind)i);
    }
    return bytes;
}

uint64_t kvk_metadata_limit(const struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    uint64_t own = kvk_tenant_state_of(cache, tenant)->quota.metadata_limit_bytes;
    return own != 0 ? own : cache->config->tenant_metadata_bytes;
}

/* ---- Limits ---- */

static uint32_t configured(const struct kvk_cache *cache, enum kvk_metadata_kind kind)
{
    const struct kvk_config *config = cache->config;
    switch (kind) {
    case KVK_METADATA_BLOCKS:
        return config->blocks;
    case KVK_METADATA_ROOTS:
        return config->roots;
    case KVK_METADATA_SEQUENCES:
        return config->sequences;
    case KVK_METADATA_LEASES:
        return config->leases;
    case KVK_METADATA_TRANSFERS:
        return config->transfers;
    case KVK_METADATA_INSTANCES:
        return config->instances;
    case KVK_METADATA_SESSIONS:
        return config->sessions;
    case KVK_METADATA_SPACES:
        return config->spaces;
    case KVK_METADATA_PUBLIC:
        return config->public_prefixes;
    }
    KVK_UNREACHABLE();
}

/* The most of a kind that one tenant may have. */
static uint32_t share_of(const struct kvk_cache *cache, enum kvk_metadata_kind kind)
{
    uint32_t all = configured(cache, kind);
    if (cache->tenant_count <= 1 || kind == KVK_METADATA_PUBLIC) {
        return all; /* who publishes was given the right to */
    }
    return (uint32_t)(((uint64_t)all * cache->config->tenant_percent + 99) / 100);
}

static bool has_count(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_metadata_kind kind, uint32_t more)
{
    uint32_t count = kvk_metadata_kind_count(cache, tenant, kind);
    uint32_t share = share_of(cache, kind);
    /* Where it may have all of them, the table's own limit is the one to be told of. */
    return share == configured(cache, kind) || (count <= share && more <= share - count);
}

static bool has_bytes(const struct kvk_cache *cache, const struct kvk_tenant *tenant, uint64_t more)
{
    uint64_t limit = kvk_metadata_limit(cache, tenant);
    uint64_t bytes = kvk_metadata_bytes(cache, tenant);
    return bytes <= limit && more <= limit - bytes;
}

static bool has_record_bytes(const struct kvk_cache *cache, const struct kvk_group *group)
{
    const struct kvk_tenant *tenant = group->space->tenant;
    uint64_t most = kvk_metadata_limit(cache, tenant) / 8 * RECORDS_EIGHTHS;
    uint64_t records = kvk_metadata_kind_bytes(cache, tenant, KVK_METADATA_BLOCKS);
    return records <= most && group->record_bytes <= most - records &&
           has_bytes(cache, tenant, group->record_bytes);
}

bool kvk_metadata_has_room(const struct kvk_cache *cache, const struct kvk_group *group)
{
    return has_count(cache, group->space->tenant, KVK_METADATA_BLOCKS, 1) &&
           has_record_bytes(cache, group);
}

static enum kvk_status refuse_count(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                    enum kvk_metadata_kind kind, struct kvk_error *error)
{
    uint32_t count = kvk_metadata_kind_count(cache, tenant, kind);
    uint32_t share = share_of(cache, kind);
    (void)kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_TENANT_LIMIT, names[kind], count, share,
                         "the tenant has %u of limits.%s, and may have %u: limits.tenant_percent "
                         "is %u",
                         count, names[kind], share, cache->config->tenant_percent);
    kvk_error_retry(error, RETRY_MS);
    return KVK_EXHAUSTED;
}

static enum kvk_status refuse_bytes(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                    uint64_t more, struct kvk_error *error)
{
    uint64_t bytes = kvk_metadata_bytes(cache, tenant);
    uint64_t limit = kvk_metadata_limit(cache, tenant);
    (void)kvk_fail_limit(
        error, KVK_EXHAUSTED, KVK_CAUSE_TENANT_LIMIT, "metadata_limit_bytes", bytes + more, limit,
        "%llu bytes more beside the %llu that are kept for the tenant apart from its blocks' own "
        "bytes are over its limit, metadata_limit_bytes: %llu",
        (unsigned long long)more, (unsigned long long)bytes, (unsigned long long)limit);
    kvk_error_retry(error, more > limit ? 0 : RETRY_MS);
    return KVK_EXHAUSTED;
}

enum kvk_status kvk_metadata_refuse_block(const struct kvk_cache *cache,
                                          const struct kvk_group *group, struct kvk_error *error)
{
    const struct kvk_tenant *tenant = group->space->tenant;
    return has_record_bytes(cache, group) ? refuse_count(cache, tenant, KVK_METADATA_BLOCKS, error)
                                          : refuse_bytes(cache, tenant, group->record_bytes, error);
}

enum kvk_status kvk_metadata_admit(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                   enum kvk_metadata_kind kind, uint32_t count, uint64_t bytes,
                                   struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (!has_count(cache, tenant, kind, count)) {
        return refuse_count(cache, tenant, kind, error);
    }
    uint64_t limit = kvk_metadata_limit(cache, tenant);
    if (!has_bytes(cache, tenant, bytes) && bytes <= limit) {
        kvk_room_records_free(cache, tenant, limit - bytes);
    }
    return has_bytes(cache, tenant, bytes) ? KVK_OK : refuse_bytes(cache, tenant, bytes, error);
}

void kvk_metadata_report(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                         struct kvk_metadata_report *report)
{
    *report = (struct kvk_metadata_report){
        .tenant = tenant,
        .bytes = kvk_metadata_bytes(cache, tenant),
        .limit_bytes = kvk_metadata_limit(cache, tenant),
    };
    for (int i = 0; i < KVK_METADATA_KINDS; i++) {
        enum kvk_metadata_kind kind = (enum kvk_metadata_kind)i;
        report->kinds[i].count = kvk_metadata_kind_count(cache, tenant, kind);
        report->kinds[i].count_limit = share_of(cache, kind);
        report->kinds[i].bytes = kvk_metadata_kind_bytes(cache, tenant, kind);
    }
}

/* ---- Counting ---- */

void kvk_metadata_add(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_metadata_kind kind, uint32_t count, uint64_t bytes)
{
    struct kvk_metadata *metadata = metadata_of(cache, tenant);
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    metadata->bytes[kind] += bytes;
    metadata->counts[kind] += count;
}

void kvk_metadata_sub(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_metadata_kind kind, uint32_t count, uint64_t bytes)
{
    struct kvk_metadata *metadata = metadata_of(cache, tenant);
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(metadata->bytes[kind] >= bytes);
    KVK_ASSERT(metadata->counts[kind] >= count);
    metadata->bytes[kind] -= bytes;
    metadata->counts[kind] -= count;
}

void kvk_metadata_session(struct kvk_cache *cache, struct kvk_session *session)
{
    kvk_metadata_sub(cache, session->tenant, KVK_METADATA_SESSIONS, 0, session->metadata_bytes);
    session->metadata_bytes = kvk_metadata_of_session(session);
    kvk_metadata_add(cache, session->tenant, KVK_METADATA_SESSIONS, 0, session->metadata_bytes);
}

uint64_t kvk_metadata_extra_of(const struct kvk_cache *cache, uint32_t block)
{
    size_t size = 0;
    return kvk_index_extra(cache->index, block, &size) == NULL ? 0
                                                               : size + KVK_METADATA_EXTRA_BYTES;
}

uint64_t kvk_metadata_extra_add(struct kvk_cache *cache, const struct kvk_group *group,
                                uint32_t block)
{
    uint64_t bytes = kvk_metadata_extra_of(cache, block);
    kvk_metadata_add(cache, group->space->tenant, KVK_METADATA_BLOCKS, 0, bytes);
    return bytes;
}

void kvk_metadata_extra_sub(struct kvk_cache *cache, const struct kvk_group *group, uint32_t block)
{
    kvk_metadata_sub(cache, group->space->tenant, KVK_METADATA_BLOCKS, 0,
                     kvk_metadata_extra_of(cache, block));
}

/* ---- Again ---- */

static void count_one(struct kvk_metadata *found, const struct kvk_tenant *tenant,
                      enum kvk_metadata_kind kind, uint64_t bytes)
{
    found[tenant->index].bytes[kind] += bytes;
    found[tenant->index].counts[kind]++;
}

static void count_instances(const struct kvk_cache *cache, struct kvk_metadata *found)
{
    for (const struct kvk_instance *i = cache->instances; i != NULL; i = i->next) {
        count_one(found, i->tenant, KVK_METADATA_INSTANCES, sizeof(*i));
        for (const struct kvk_sequence *s = i->sequences; s != NULL; s = s->next) {
            KVK_ASSERT(s->busy || s->metadata_bytes == kvk_sequence_metadata(s));
            count_one(found, i->tenant, KVK_METADATA_SEQUENCES, s->metadata_bytes);
        }
        for (const struct kvk_lease *lease = i->leases; lease != NULL; lease = lease->next) {
            count_one(found, i->tenant, KVK_METADATA_LEASES, lease->metadata_bytes);
        }
    }
}

static void count_sessions(const struct kvk_cache *cache, struct kvk_metadata *found)
{
    size_t place = 0;
    const struct kvk_table_entry *entry;
    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        const struct kvk_session *s = kvk_table_get(&cache->session_table, entry->key);
        KVK_ASSERT(s->metadata_bytes == kvk_metadata_of_session(s));
        count_one(found, s->tenant, KVK_METADATA_SESSIONS, s->metadata_bytes);
        for (const struct kvk_transfer *t = s->transfers; t != NULL; t = t->next) {
            count_one(found, s->tenant, KVK_METADATA_TRANSFERS, t->metadata_bytes);
        }
    }
}

static void count_blocks(const struct kvk_cache *cache, struct kvk_metadata *found)
{
    uint32_t end = kvk_index_block_id_end(cache->index);
    for (uint32_t id = 0; id < end; id++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (block->state == KVK_BLOCK_FREE) {
            continue;
        }
        const struct kvk_group *group = kvk_group_of(cache, block);
        uint64_t extra = block->run != UINT32_MAX ? kvk_metadata_extra_of(cache, id) : 0;
        KVK_ASSERT(group->record_bytes == kvk_metadata_of_record(group));
        count_one(found, group->space->tenant, KVK_METADATA_BLOCKS, group->record_bytes + extra);
    }
}

void kvk_metadata_check(const struct kvk_cache *cache)
{
    struct kvk_metadata *found = calloc(KVK_TENANT_COUNT_MAX, sizeof(*found));
    KVK_ASSERT(found != NULL);
    count_instances(cache, found);
    count_sessions(cache, found);
    count_blocks(cache, found);
    for (const struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        count_one(found, space->tenant, KVK_METADATA_SPACES, kvk_metadata_of_space(space));
    }
    for (const struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
        count_one(found, p->space->tenant, KVK_METADATA_PUBLIC, kvk_metadata_of_publication(p));
    }
    uint64_t root_count = 0;
    for (uint32_t i = 0; i < KVK_TENANT_COUNT_MAX; i++) {
        const struct kvk_metadata *known = &cache->tenant_states[i].metadata;
        for (int kind = 0; kind < KVK_METADATA_KINDS; kind++) {
            KVK_ASSERT(known->bytes[kind] == found[i].bytes[kind]);
            KVK_ASSERT(known->counts[kind] == found[i].counts[kind]);
        }
        root_count += known->roots.root_count;
    }
    struct kvk_index_stats stats;
    kvk_index_stats(cache->index, &stats);
    KVK_ASSERT(root_count == stats.roots);
    free(found);
}
