/*
 * Publishing a prefix: its blocks are copied into slots of a public space of their own.
 *
 * What is copied is kept by the call meanwhile, and what was made goes again where anything fails:
 * nobody finds the publication before all of it is there, sealed, with checksums that match those
 * of the blocks it was copied from.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/public_internal.h"
#include "daemon/public_store.h"
#include "daemon/sequence_internal.h"
#include "daemon/space_internal.h"
#include "daemon/tenant_internal.h"

#define CHECKSUM_BATCH 64 /* blocks */

struct publishing {
    struct kvk_cache *cache;
    const struct kvk_caller *caller;
    const struct kvk_publish_request *request;
    struct kvk_error *error;
    struct kvk_space *space;                /* referenced */
    struct kvk_space *target;               /* referenced; NULL: not yet */
    uint32_t blocks;                        /* of the prefix */
    uint32_t counts[KVK_GROUP_COUNT_MAX];   /* to be copied, per group */
    uint32_t *sources[KVK_GROUP_COUNT_MAX]; /* [counts] kept; ours */
    uint32_t *places[KVK_GROUP_COUNT_MAX];  /* [counts] which of the prefix; ours */
    uint32_t *fresh[KVK_GROUP_COUNT_MAX];   /* [counts] the copies; ours */
    bool reserved;                          /* fresh are there: one hold and one pin each, ours */
    struct kvk_publication *made;           /* ours until it is linked */
};

/* ---- Whether ---- */

/* A space of the caller's, or anybody's where an admin asks. */
static enum kvk_status find_space(struct publishing *job)
{
    const struct kvk_caller *caller = job->caller;
    struct kvk_space *space = kvk_table_get(&job->cache->space_table, job->request->space_id);
    if (space == NULL || space->is_public ||
        (!caller->credential->admin && !kvk_credential_allows(caller->credential, space->tenant))) {
        return kvk_fail(job->error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "space_id", "no such space");
    }
    if (!caller->credential->admin && !kvk_tenant_may_publish(space->tenant)) {
        return kvk_fail(job->error, KVK_PERMISSION, KVK_CAUSE_NONE, "space_id",
                        "the tenant has no right to publish (may_publish)");
    }
    job->space = space;
    return kvk_space_check(space, job->error);
}

static enum kvk_status check_limits(struct publishing *job)
{
    struct kvk_cache *cache = job->cache;
    KVK_ASSERT(job->space != NULL);
    uint64_t tokens = job->request->prompt.token_count;
    uint64_t blocks = tokens / job->space->block_tokens;
    if (blocks == 0 || tokens > cache->config->tokens) {
        return kvk_fail_limit(job->error, KVK_INVALID, KVK_CAUSE_FIELD, "prompt.tokens", tokens,
                              blocks == 0 ? job->space->block_tokens : cache->config->tokens,
                              "prompt.tokens: must be at least one whole block, and no more than a "
                              "sequence may have");
    }
    job->blocks = (uint32_t)blocks;
    if (cache->draining) {
        return kvk_fail(job->error, KVK_UNAVAILABLE, KVK_CAUSE_DRAINING, "",
                        "the daemon is draining: nothing new is published");
    }
    if (kvk_space_is_compact_below(job->space)) {
        return kvk_fail(
            job->error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "space_id",
            "the space's host tier is compact (host_format), and public prefixes lie in "
            "the host tier as they were sealed");
    }
    if (cache->tiers[KVK_TIER_HOST].device == NULL) {
        return kvk_fail(job->error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "public prefixes lie in the host tier, and the daemon has none");
    }
    if (!kvk_space_shares(job->space)) {
        return kvk_fail(job->error, KVK_PRECONDITION, KVK_CAUSE_SWITCHED_OFF, "space_id",
                        "the space or its tenant is in shadow mode: nothing of it is shared");
    }
    if (cache->publication_count >= cache->config->public_prefixes) {
        return kvk_fail_limit(job->error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "public_prefixes",
                              cache->publication_count, cache->config->public_prefixes,
                              "limits.public_prefixes: %u prefixes are public already",
                              cache->config->public_prefixes);
    }
    uint64_t bytes =
        sizeof(struct kvk_publication) +
        blocks * (job->space->block_tokens + job->space->group_count) * sizeof(uint32_t) +
        job->request->prompt.span_count * sizeof(struct kvk_content_span);
    return kvk_metadata_admit(cache, job->space->tenant, KVK_METADATA_PUBLIC, 1, bytes, job->error);
}

static void answer(const struct kvk_publication *publication, bool created,
                   struct kvk_publish_reply *reply)
{
    *reply = (struct kvk_publish_reply){
        .public_id = publication->id,
        .space_id = publication->space->id,
        .tokens = (uint64_t)publication->block_count * publication->space->block_tokens,
        .created = created,
        .durable = publication->stored,
    };
    kvk_publication_size(publication, &reply->blocks, &reply->bytes);
}

/* Is all of it public by the same tenant already, as far as a query from its end sees? */
static const struct kvk_publication *find_covering(const struct publishing *job)
{
    for (const struct kvk_publication *p = job->cache->publications; p != NULL; p = p->next) {
        if (p->space->tenant != job->space->tenant || p->source_id != job->space->id ||
            kvk_public_common_blocks(p, &job->request->prompt, job->blocks) < job->blocks) {
            continue;
        }
        bool covers = true;
        for (uint32_t g = 0; g < p->space->group_count && covers; g++) {
            for (uint32_t i = 0; i < job->blocks && covers; i++) {
                covers = p->blocks[g][i] != KVK_BLOCK_NONE ||
                         !kvk_group_sees(job->space->groups[g], job->blocks, i);
            }
        }
        if (covers) {
            return p;
        }
    }
    return NULL;
}

/* ---- Memory ---- */

static bool copy_of(const void *source, size_t count, size_t size, void **result)
{
    *result = malloc(count == 0 ? 1 : count * size);
    if (*result != NULL && count > 0) {
        memcpy(*result, source, count * size);
    }
    return *result != NULL;
}

/* Spans of the published blocks alone. */
static void spans_cut(struct kvk_publication *made, uint64_t tokens)
{
    while (made->span_count > 0 && made->spans[made->span_count - 1].first >= tokens) {
        made->span_count--;
    }
    if (made->span_count > 0) {
        struct kvk_content_span *last = &made->spans[made->span_count - 1];
        last->count = last->first + last->count > tokens ? tokens - last->first : last->count;
    }
}

static enum kvk_status memory_make(struct publishing *job)
{
    const struct kvk_prompt *prompt = &job->request->prompt;
    uint64_t tokens = (uint64_t)job->blocks * job->space->block_tokens;
    KVK_ASSERT(job->blocks > 0);
    void *copied_tokens = NULL;
    void *copied_spans = NULL;
    struct kvk_publication *made = calloc(1, sizeof(*made));
    bool complete =
        made != NULL && copy_of(prompt->tokens, tokens, sizeof(*prompt->tokens), &copied_tokens) &&
        copy_of(prompt->spans, prompt->span_count, sizeof(*prompt->spans), &copied_spans);
    if (made != NULL) {
        made->tokens = copied_tokens;
        made->spans = copied_spans;
        made->span_count = complete ? prompt->span_count : 0;
        made->block_count = job->blocks;
        job->made = made;
    }
    for (uint32_t g = 0; g < job->space->group_count && complete; g++) {
        made->blocks[g] = malloc(job->blocks * sizeof(uint32_t));
        job->sources[g] = malloc(job->blocks * sizeof(uint32_t));
        job->places[g] = malloc(job->blocks * sizeof(uint32_t));
        job->fresh[g] = malloc(job->blocks * sizeof(uint32_t));
        complete = made->blocks[g] != NULL && job->sources[g] != NULL && job->places[g] != NULL &&
                   job->fresh[g] != NULL;
    }
    if (!complete) {
        return kvk_fail(job->error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for a public prefix");
    }
    spans_cut(made, tokens);
    return KVK_OK;
}

static void memory_free(struct publishing *job)
{
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        free(job->sources[g]);
        free(job->places[g]);
        free(job->fresh[g]);
    }
    kvk_publication_free(job->made);
}

/* ---- What is copied ---- */

static void sources_let_go(struct publishing *job)
{
    for (uint32_t g = 0; g < job->space->group_count; g++) {
        for (uint32_t i = job->counts[g]; i > 0; i--) {
            kvk_block_let_go(job->cache, job->sources[g][i - 1]);
        }
    }
}

/* What a query from the prefix's end sees, kept for the time of the call. */
static enum kvk_status sources_keep(struct publishing *job)
{
    struct kvk_cache *cache = job->cache;
    struct kvk_space *space = job->space;
    struct kvk_prompt prompt = job->request->prompt;
    struct kvk_prefix prefix;
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    uint64_t on_disk = 0;
    prompt.use_public = false; /* what it has itself, not what others published */
    prompt.token_count = (uint64_t)job->blocks * space->block_tokens;
    kvk_space_roots_find(cache, space, NULL, 0, roots);
    kvk_prefix_find(cache, space, roots, &prompt, prompt.token_count, &prefix);
    if (prefix.blocks < job->blocks) {
        uint64_t cached = prefix.blocks * space->block_tokens;
        return kvk_fail_limit(job->error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "prompt.tokens", cached,
                              prompt.token_count, "only %llu of %llu tokens are cached",
                              (unsigned long long)cached, (unsigned long long)prompt.token_count);
    }
    for (uint32_t g = 0; g < space->group_count; g++) {
        for (uint32_t i = 0; i < job->blocks; i++) {
            bool seen = kvk_group_sees(space->groups[g], job->blocks, i);
            on_disk += seen && (cache->path_tiers[g][i] & KVK_MEMORY_TIER_MASK) == 0;
        }
    }
    if (on_disk > 0) {
        return kvk_fail_limit(job->error, KVK_PRECONDITION, KVK_CAUSE_NONE, "prompt.tokens",
                              on_disk, 0, "%llu of its blocks are on disk alone: pin it first",
                              (unsigned long long)on_disk);
    }
    for (uint32_t g = 0; g < space->group_count; g++) {
        KVK_ASSERT(job->sources[g] != NULL && job->places[g] != NULL);
        for (uint32_t i = 0; i < job->blocks; i++) {
            if (kvk_group_sees(space->groups[g], job->blocks, i)) {
                kvk_block_keep(cache, cache->path[g][i]);
                job->places[g][job->counts[g]] = i;
                job->sources[g][job->counts[g]++] = cache->path[g][i];
            }
        }
    }
    return KVK_OK;
}

/* Was any of it invalidated while the lock was dropped? */
static bool sources_are_current(const struct publishing *job)
{
    const struct kvk_cache *cache = job->cache;
    for (uint32_t g = 0; g < job->space->group_count; g++) {
        for (uint32_t i = 0; i < job->counts[g]; i++) {
            uint32_t id = job->sources[g][i];
            if (kvk_index_block(cache->index, id)->run == UINT32_MAX ||
                !kvk_root_is_current(cache, kvk_index_root_of(cache->index, id))) {
                return false;
            }
        }
    }
    return true;
}

/* ---- Copying ---- */

static enum kvk_status check_patience_drops(const struct publishing *job)
{
    const struct kvk_caller *caller = job->caller;
    if (kvk_clock_now(kvk_clock_monotonic()) >= caller->deadline_ns) {
        return kvk_fail(job->error, KVK_DEADLINE, KVK_CAUSE_NONE, "",
                        "the call's time was over before the prefix was copied");
    }
    if (caller->cancelled == NULL) {
        return KVK_OK;
    }
    kvk_unlock(&job->cache->lock);
    bool cancelled = caller->cancelled(caller->cancelled_context);
    kvk_lock(&job->cache->lock);
    return cancelled
               ? kvk_fail(job->error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the call was cancelled")
               : KVK_OK;
}

static enum kvk_status reserve_drops(struct publishing *job)
{
    struct kvk_cache *cache = job->cache;
    struct kvk_room_want want = {.tier = KVK_TIER_HOST};
    memcpy(want.counts, job->counts, sizeof(want.counts));
    enum kvk_status status =
        kvk_room_reserve_drops(cache, job->target, &want, job->fresh, job->caller, job->error);
    job->reserved = status == KVK_OK;
    for (uint32_t g = 0; g < job->space->group_count && job->reserved; g++) {
        for (uint32_t i = 0; i < job->counts[g]; i++) {
            kvk_block_grant(cache, job->fresh[g][i]);
        }
    }
    return status;
}

/* Copies compare the source's checksums on the way; those of the copies are taken then. */
static enum kvk_status group_copy_drops(struct publishing *job, uint32_t g)
{
    enum kvk_status status = KVK_OK;
    for (uint32_t i = 0; i < job->counts[g] && status == KVK_OK; i++) {
        status =
            kvk_block_clone_drops(job->cache, job->fresh[g][i], job->sources[g][i], job->error);
        if (status == KVK_OK) {
            status = check_patience_drops(job);
        }
    }
    for (uint32_t i = 0; i < job->counts[g] && status == KVK_OK; i += CHECKSUM_BATCH) {
        uint32_t left = job->counts[g] - i;
        status = kvk_block_checksum_drops(job->cache, job->fresh[g] + i,
                                          left < CHECKSUM_BATCH ? left : CHECKSUM_BATCH, false,
                                          job->error);
    }
    return status;
}

static void fresh_give_back(struct publishing *job)
{
    for (uint32_t g = 0; g < job->space->group_count && job->reserved; g++) {
        for (uint32_t i = job->counts[g]; i > 0; i--) {
            kvk_block_give_back(job->cache, job->fresh[g][i - 1]);
        }
    }
}

/* From here on it is found. */
static void link(struct publishing *job)
{
    struct kvk_cache *cache = job->cache;
    struct kvk_publication *made = job->made;
    for (uint32_t g = 0; g < job->space->group_count; g++) {
        for (uint32_t i = 0; i < job->blocks; i++) {
            made->blocks[g][i] = KVK_BLOCK_NONE;
        }
        for (uint32_t i = 0; i < job->counts[g]; i++) {
            kvk_block_seal(cache, job->fresh[g][i]);
            made->blocks[g][job->places[g][i]] = job->fresh[g][i];
        }
    }
    KVK_ASSERT(made->id != 0);
    made->space = job->target;
    made->source_id = job->space->id;
    made->clock = ++cache->public_clock;
    made->next = cache->publications;
    cache->publications = made;
    kvk_metadata_add(cache, made->space->tenant, KVK_METADATA_PUBLIC, 1,
                     kvk_metadata_of_publication(made));
    cache->stats.published++;
    kvk_log(KVK_LOG_INFO, "public_published",
            "public=%llu tenant_id=%llu space=%llu public_space=%llu blocks=%u",
            (unsigned long long)made->id, (unsigned long long)made->space->tenant->id,
            (unsigned long long)made->source_id, (unsigned long long)made->space->id, job->blocks);
}

/* What the file of it says. */
static struct kvk_public_record record_of(const struct publishing *job)
{
    struct kvk_public_record record = {
        .id = job->made->id,
        .tenant_id = job->space->tenant->id,
        .source_id = job->space->id,
        .generation = job->space->generation,
        .published_s = job->made->published_s,
        .block_count = job->blocks,
        .block_tokens = job->space->block_tokens,
        .span_count = job->made->span_count,
        .group_count = job->space->group_count,
        .tokens = job->made->tokens,
        .spans = job->made->spans,
    };
    for (uint32_t g = 0; g < record.group_count; g++) {
        record.counts[g] = job->counts[g];
        record.places[g] = job->places[g];
    }
    return record;
}

/* Its file, where there is a folder. Afterwards whether it is still to be published is asked anew.
 */
static void store_drops(struct publishing *job)
{
    struct kvk_cache *cache = job->cache;
    if (cache->config->durable_folder[0] == '\0') {
        return;
    }
    const struct kvk_public_record record = record_of(job);
    kvk_unlock(&cache->lock);
    job->made->stored = kvk_public_store_unlocked(cache, &record, job->target, job->fresh);
    kvk_lock(&cache->lock);
    cache->stats.public_store_failures += job->made->stored ? 0 : 1;
}

/* It is not published after all. */
static void unstore_drops(struct publishing *job)
{
    struct kvk_cache *cache = job->cache;
    if (job->made->stored) {
        kvk_unlock(&cache->lock);
        (void)kvk_public_unstore_unlocked(cache, job->made->id);
        kvk_lock(&cache->lock);
        job->made->stored = false;
    }
}

/* A public space with room for all of it, which the publication references from now on. */
static enum kvk_status target_make_drops(struct publishing *job)
{
    enum kvk_status status =
        kvk_space_make_public_drops(job->cache, job->space, job->counts, &job->target, job->error);
    if (status == KVK_OK) {
        KVK_ASSERT(job->target != NULL);
        job->target->reference_count++; /* the publication's, then */
        status = reserve_drops(job);
    }
    return status;
}

static void target_give_back_drops(struct publishing *job)
{
    if (job->target != NULL) {
        fresh_give_back(job);
        job->target->reference_count--;
        (void)kvk_space_reclaim_drops(job->cache, job->target); /* else maintenance does */
    }
}

/* With the sources kept: a space, room, the bytes. */
static enum kvk_status copy_drops(struct publishing *job)
{
    struct kvk_cache *cache = job->cache;
    enum kvk_status status = target_make_drops(job);
    for (uint32_t g = 0; g < job->space->group_count && status == KVK_OK; g++) {
        status = group_copy_drops(job, g);
    }
    if (status == KVK_OK) {
        job->made->id = kvk_cache_new_id(cache);
        job->made->published_s = kvk_wall_seconds();
        store_drops(job);
        status = kvk_space_check(job->space, job->error);
    }
    if (status == KVK_OK && !sources_are_current(job)) {
        status = kvk_fail(job->error, KVK_UNAVAILABLE, KVK_CAUSE_INVALIDATED, "space_id",
                          "the prefix was invalidated while it was published");
    }
    if (status == KVK_OK) {
        link(job);
        return KVK_OK;
    }
    unstore_drops(job);
    target_give_back_drops(job);
    return status;
}

static enum kvk_status publish_drops(struct publishing *job, struct kvk_publish_reply *reply)
{
    enum kvk_status status = kvk_space_check(job->space, job->error); /* time has passed */
    if (status == KVK_OK) {
        status = sources_keep(job);
    }
    if (status == KVK_OK) {
        status = copy_drops(job);
    }
    sources_let_go(job);
    if (status == KVK_OK) {
        answer(job->made, true, reply);
        job->made = NULL; /* the cache's now */
    }
    return status;
}

enum kvk_status kvk_public_publish(struct kvk_cache *cache, const struct kvk_caller *caller,
                                   const struct kvk_publish_request *request,
                                   struct kvk_publish_reply *reply, struct kvk_error *error)
{
    struct publishing job = {.cache = cache, .caller = caller, .request = request, .error = error};
    *reply = (struct kvk_publish_reply){0};
    if (request->prompt.salt_size > 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "prompt.salt",
                        "prompt.salt: what is shared under one salt alone cannot be public");
    }
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    kvk_lock(&cache->lock);
    enum kvk_status status = find_space(&job);
    if (status == KVK_OK) {
        status = check_limits(&job);
    }
    const struct kvk_publication *covering = status == KVK_OK ? find_covering(&job) : NULL;
    if (covering != NULL) {
        answer(covering, false, reply);
    }
    if (status != KVK_OK || covering != NULL) {
        kvk_unlock(&cache->lock);
        return status;
    }
    job.space->reference_count++;
    cache->publication_count++;
    kvk_unlock(&cache->lock);

    status = memory_make(&job);

    kvk_lock(&cache->lock);
    if (status == KVK_OK) {
        status = publish_drops(&job, reply);
    }
    cache->publication_count -= status == KVK_OK ? 0 : 1;
    job.space->reference_count--;
    kvk_unlock(&cache->lock);
    memory_free(&job);
    return status;
}

/* ---- Again, from its file ---- */

static bool shape_fits(const struct kvk_public_record *record, const struct kvk_space *space)
{
    bool fits =
        record->block_tokens == space->block_tokens && record->group_count == space->group_count;
    for (uint32_t g = 0; g < space->group_count && fits; g++) {
        uint32_t seen = 0;
        for (uint32_t i = 0; i < record->block_count; i++) {
            seen += kvk_group_sees(space->groups[g], record->block_count, i) ? 1 : 0;
        }
        fits = record->counts[g] == seen;
    }
    return fits;
}

/* The space that it was published from, if it is as it was then. */
static enum kvk_status origin_find(struct publishing *job, const struct kvk_public_record *record)
{
    struct kvk_space *space = kvk_table_get(&job->cache->space_table, record->source_id);
    if (space == NULL || space->is_public || space->tenant->id != record->tenant_id ||
        space->generation != record->generation || !shape_fits(record, space)) {
        return kvk_fail(job->error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "space_id",
                        "its space is gone, invalidated, or another");
    }
    job->space = space;
    return kvk_tenant_check(space->tenant, job->error);
}

/* The bytes into the slots, each compared with its checksum; then the slots' own are taken. */
static enum kvk_status file_read_drops(struct publishing *job, const struct kvk_public_file *file)
{
    struct kvk_cache *cache = job->cache;
    enum kvk_status status = KVK_OK;
    const uint64_t *sums = file->sums;
    uint64_t offset = 0;
    for (uint32_t g = 0; g < job->space->group_count; g++) {
        const struct kvk_group *group = job->target->groups[g];
        for (uint32_t i = 0; i < job->counts[g]; i++) {
            for (uint32_t shard = 0; shard < group->shard_count; shard++) {
                const struct kvk_block *block = kvk_index_block(cache->index, job->fresh[g][i]);
                uint8_t *bytes = kvk_block_address(cache, block, KVK_TIER_HOST, shard);
                kvk_unlock(&cache->lock);
                bool right =
                    kvk_public_file_read(file, offset, bytes, group->shard_bytes[shard], *sums);
                kvk_lock(&cache->lock);
                if (!right) {
                    return kvk_fail(job->error, KVK_DATA_LOSS, KVK_CAUSE_NONE, "",
                                    "its bytes do not match");
                }
                offset += group->shard_bytes[shard];
                sums++;
            }
        }
        for (uint32_t i = 0; i < job->counts[g] && status == KVK_OK; i += CHECKSUM_BATCH) {
            uint32_t left = job->counts[g] - i;
            status = kvk_block_checksum_drops(cache, job->fresh[g] + i,
                                              left < CHECKSUM_BATCH ? left : CHECKSUM_BATCH, false,
                                              job->error);
        }
    }
    return status;
}

static enum kvk_status put_back_drops(struct publishing *job, const struct kvk_public_file *file)
{
    const struct kvk_public_record *record = &file->record;
    for (uint32_t g = 0; g < job->space->group_count; g++) {
        KVK_ASSERT(job->places[g] != NULL);
        job->counts[g] = record->counts[g];
        memcpy(job->places[g], record->places[g], record->counts[g] * sizeof(uint32_t));
    }
    enum kvk_status status = target_make_drops(job);
    if (status == KVK_OK) {
        status = file_read_drops(job, file);
    }
    if (status != KVK_OK) {
        target_give_back_drops(job);
        return status;
    }
    job->made->id = record->id;
    job->made->published_s = record->published_s;
    job->made->stored = true;
    link(job);
    job->made = NULL; /* the cache's now */
    return KVK_OK;
}

enum kvk_status kvk_public_put_back(struct kvk_cache *cache, const struct kvk_public_file *file,
                                    struct kvk_error *error)
{
    const struct kvk_public_record *record = &file->record;
    const struct kvk_credential everything = {.admin = true};
    const struct kvk_caller caller = {
        .credential = &everything, .may_block = true, .deadline_ns = UINT64_MAX};
    const struct kvk_publish_request request = {
        .space_id = record->source_id,
        .prompt = {.tokens = record->tokens,
                   .token_count = (uint64_t)record->block_count * record->block_tokens,
                   .spans = record->spans,
                   .span_count = record->span_count}};
    struct publishing job = {
        .cache = cache, .caller = &caller, .request = &request, .error = error};
    kvk_lock(&cache->lock);
    enum kvk_status status = origin_find(&job, record);
    if (status == KVK_OK) {
        status = check_limits(&job);
    }
    if (status != KVK_OK) {
        kvk_unlock(&cache->lock);
        return status;
    }
    job.space->reference_count++;
    cache->publication_count++;
    kvk_unlock(&cache->lock);

    status = memory_make(&job);

    kvk_lock(&cache->lock);
    if (status == KVK_OK) {
        status = put_back_drops(&job, file);
    }
    cache->publication_count -= status == KVK_OK ? 0 : 1;
    cache->stats.public_restored += status == KVK_OK ? 1 : 0;
    job.space->reference_count--;
    kvk_unlock(&cache->lock);
    memory_free(&job);
    return status;
}
