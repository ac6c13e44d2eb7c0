#include "daemon/public.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/public_internal.h"
#include "daemon/public_store.h"
#include "daemon/space_internal.h"

/* ---- Who sees what ---- */

bool kvk_public_is_same_scope(const struct kvk_space *a, const struct kvk_space *b)
{
    if (a->identity_size != b->identity_size || a->block_tokens != b->block_tokens ||
        a->group_count != b->group_count ||
        memcmp(a->identity, b->identity, a->identity_size) != 0) {
        return false;
    }
    for (uint32_t g = 0; g < a->group_count; g++) {
        if (!kvk_geometry_equal(&a->groups[g]->geometry, &b->groups[g]->geometry)) {
            return false;
        }
    }
    return true;
}

static bool is_switched_on(const struct kvk_publication *publication)
{
    return kvk_space_shares(publication->space) &&
           kvk_space_check(publication->space, NULL) == KVK_OK;
}

static bool is_visible(const struct kvk_publication *publication, const struct kvk_space *space)
{
    return publication->clock > space->public_since && is_switched_on(publication) &&
           kvk_public_is_same_scope(publication->space, space);
}

/* ---- How far two prompts are equal ---- */

/* As far as `tokens` goes, that is. */
static bool is_same_span(const struct kvk_content_span *a, const struct kvk_content_span *b,
                         uint64_t tokens)
{
    uint64_t end_a = a->first + a->count < tokens ? a->first + a->count : tokens;
    uint64_t end_b = b->first + b->count < tokens ? b->first + b->count : tokens;
    return a->first == b->first && end_a == end_b && a->digest_size == b->digest_size &&
           memcmp(a->digest, b->digest, a->digest_size) == 0;
}

/* Of `tokens` that are equal, those before the first span that is not. */
static uint64_t common_content(const struct kvk_publication *publication,
                               const struct kvk_prompt *prompt, uint64_t tokens)
{
    for (uint32_t i = 0;; i++) {
        const struct kvk_content_span *a =
            i < publication->span_count ? &publication->spans[i] : NULL;
        const struct kvk_content_span *b = i < prompt->span_count ? &prompt->spans[i] : NULL;
        uint64_t first_a = a != NULL ? a->first : UINT64_MAX;
        uint64_t first_b = b != NULL ? b->first : UINT64_MAX;
        uint64_t first = first_a < first_b ? first_a : first_b;
        if (first >= tokens) {
            return tokens;
        }
        if (a == NULL || b == NULL || !is_same_span(a, b, tokens)) {
            return first;
        }
    }
}

uint64_t kvk_public_common_blocks(const struct kvk_publication *publication,
                                  const struct kvk_prompt *prompt, uint64_t limit)
{
    uint64_t block_tokens = publication->space->block_tokens;
    uint64_t most = publication->block_count < limit ? publication->block_count : limit;
    uint64_t blocks = 0;
    while (blocks < most &&
           memcmp(publication->tokens + blocks * block_tokens,
                  prompt->tokens + blocks * block_tokens, block_tokens * sizeof(uint32_t)) == 0) {
        blocks++;
    }
    return common_content(publication, prompt, blocks * block_tokens) / block_tokens;
}

/* The publication that the space sees with the most of the prompt's first blocks, or NULL. */
static const struct kvk_publication *find_longest(const struct kvk_cache *cache,
                                                  const struct kvk_space *space,
                                                  const struct kvk_prompt *prompt, uint64_t limit,
                                                  uint64_t *blocks)
{
    const struct kvk_publication *best = NULL;
    *blocks = 0;
    for (const struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
        if (p->space->block_tokens != space->block_tokens) {
            continue;
        }
        uint64_t common = kvk_public_common_blocks(p, prompt, limit);
        if (common > *blocks && is_visible(p, space)) {
            *blocks = common;
            best = p;
        }
    }
    return best;
}

/* ---- Finding ---- */

uint64_t kvk_public_merge(struct kvk_cache *cache, const struct kvk_space *space,
                          const struct kvk_prompt *prompt, uint64_t limit,
                          struct kvk_prefix *prefix)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint64_t filled = limit;
    uint64_t common;
    for (uint32_t g = 0; g < space->group_count; g++) {
        filled = prefix->own[g] < filled ? prefix->own[g] : filled;
    }
    const struct kvk_publication *publication = find_longest(cache, space, prompt, limit, &common);
    if (publication == NULL) {
        return filled;
    }
    for (uint32_t g = 0; g < space->group_count; g++) {
        for (uint64_t i = 0; i < common; i++) {
            uint32_t id = publication->blocks[g][i];
            uint8_t mask = id == KVK_BLOCK_NONE ? 0 : kvk_index_block(cache->index, id)->tier_mask;
            bool own = i < prefix->own[g];
            if (!own || (mask != 0 && (cache->path_tiers[g][i] & KVK_MEMORY_TIER_MASK) == 0)) {
                cache->path[g][i] = id;
                cache->path_tiers[g][i] = mask;
            }
        }
        prefix->known[g] = prefix->known[g] > common ? prefix->known[g] : common;
    }
    prefix->publication = publication;
    return common > filled ? common : filled;
}

void kvk_public_count(const struct kvk_cache *cache, struct kvk_prefix *prefix)
{
    const struct kvk_publication *publication = prefix->publication;
    prefix->public_blocks = 0;
    for (uint64_t i = 0; publication != NULL && i < prefix->blocks && i < publication->block_count;
         i++) {
        uint32_t id = publication->blocks[0][i];
        prefix->public_blocks += id != KVK_BLOCK_NONE && id == cache->path[0][i];
    }
}

void kvk_public_hit(struct kvk_cache *cache, uint64_t public_id, uint64_t tokens)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (tokens == 0) {
        return;
    }
    cache->stats.public_hits++;
    cache->stats.public_hit_tokens += tokens;
    for (struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
        if (p->id == public_id) {
            p->hits++;
            p->hit_tokens += tokens;
        }
    }
}

/* ---- The end of a publication ---- */

void kvk_publication_free(struct kvk_publication *publication)
{
    if (publication == NULL) {
        return;
    }
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        free(publication->blocks[g]);
    }
    free(publication->tokens);
    free(publication->spans);
    free(publication);
}

/* Out of the list: no look-up finds it. Its holds go back, and it is freed. */
static void withdraw(struct kvk_cache *cache, struct kvk_publication *publication,
                     struct kvk_withdraw_reply *reply)
{
    struct kvk_publication **link = &cache->publications;
    while (*link != publication) {
        KVK_ASSERT(*link != NULL);
        link = &(*link)->next;
    }
    *link = publication->next;
    for (uint32_t g = 0; g < publication->space->group_count; g++) {
        for (uint32_t i = publication->block_count; i > 0; i--) {
            uint32_t id = publication->blocks[g][i - 1];
            if (id == KVK_BLOCK_NONE) {
                continue;
            }
            reply->blocks++;
            reply->held_blocks += kvk_index_block(cache->index, id)->hold_count > 1;
            kvk_block_unpin(cache, id, KVK_TIER_HOST);
            kvk_block_release(cache, id, false);
        }
    }
    KVK_ASSERT(publication->space->reference_count > 0);
    kvk_metadata_sub(cache, publication->space->tenant, KVK_METADATA_PUBLIC, 1,
                     kvk_metadata_of_publication(publication));
    KVK_ASSERT(cache->publication_count > 0);
    publication->space->reference_count--;
    cache->publication_count--;
    cache->stats.withdrawn++;
    kvk_log(KVK_LOG_INFO, "public_withdrawn", "public=%llu tenant_id=%llu blocks=%llu held=%llu",
            (unsigned long long)publication->id, (unsigned long long)publication->space->tenant->id,
            (unsigned long long)reply->blocks, (unsigned long long)reply->held_blocks);
    if (publication->stored) {
        publication->space = NULL; /* which may go before the file does */
        publication->next = cache->unpublished;
        cache->unpublished = publication;
    } else {
        kvk_publication_free(publication);
    }
    (void)pthread_cond_broadcast(&cache->changed);
}

enum kvk_status kvk_public_settle_drops(struct kvk_cache *cache, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    while (cache->unpublished != NULL) {
        struct kvk_publication *one = cache->unpublished;
        cache->unpublished = one->next;
        kvk_unlock(&cache->lock);
        bool gone = kvk_public_unstore_unlocked(cache, one->id);
        kvk_lock(&cache->lock);
        if (!gone) {
            one->next = cache->unpublished;
            cache->unpublished = one;
            cache->stats.public_store_failures++;
            (void)kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                           "it is withdrawn from this daemon, but its file in the durable folder "
                           "cannot be removed: call again");
            kvk_error_retry(error, 1000);
            return KVK_UNAVAILABLE;
        }
        kvk_publication_free(one);
    }
    return KVK_OK;
}

/* An admin, or somebody who may act for the publisher. */
static bool may_withdraw(const struct kvk_caller *caller, const struct kvk_publication *publication)
{
    return caller->credential->admin ||
           kvk_credential_allows(caller->credential, publication->space->tenant);
}

static bool is_unpublished(const struct kvk_cache *cache, uint64_t public_id)
{
    const struct kvk_publication *p = cache->unpublished;
    while (p != NULL && p->id != public_id) {
        p = p->next;
    }
    return p != NULL;
}

enum kvk_status kvk_public_withdraw(struct kvk_cache *cache, const struct kvk_caller *caller,
                                    uint64_t public_id, struct kvk_withdraw_reply *reply,
                                    struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    *reply = (struct kvk_withdraw_reply){0};
    kvk_lock(&cache->lock);
    struct kvk_publication *found = cache->publications;
    while (found != NULL && (found->id != public_id || !may_withdraw(caller, found))) {
        found = found->next;
    }
    if (found != NULL) {
        withdraw(cache, found, reply);
        status = kvk_public_settle_drops(cache, error);
    } else if (is_unpublished(cache, public_id)) {
        status = kvk_public_settle_drops(cache, error); /* its file could not be removed before */
    } else {
        status =
            kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "public_id", "no such public prefix");
    }
    kvk_unlock(&cache->lock);
    return status;
}

/* Withdraw all for which `wanted` says so. */
static void withdraw_where(struct kvk_cache *cache,
                           bool (*wanted)(const struct kvk_publication *publication,
                                          const void *context),
                           const void *context)
{
    struct kvk_publication *next;
    for (struct kvk_publication *p = cache->publications; p != NULL; p = next) {
        struct kvk_withdraw_reply reply = {0};
        next = p->next;
        if (wanted(p, context)) {
            withdraw(cache, p, &reply);
        }
    }
}

struct source {
    const struct kvk_space *space;
    const struct kvk_prompt *prefix; /* NULL: all of the space */
};

static bool is_from(const struct kvk_publication *publication, const void *context)
{
    const struct source *source = context;
    if (publication->source_id != source->space->id) {
        return false;
    }
    if (source->prefix == NULL) {
        return true;
    }
    uint64_t blocks = source->prefix->token_count / source->space->block_tokens;
    return kvk_public_common_blocks(publication, source->prefix, blocks) == blocks;
}

void kvk_public_invalidated(struct kvk_cache *cache, struct kvk_space *space,
                            const struct kvk_prompt *prefix)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct source source = {.space = space, .prefix = prefix};
    if (prefix == NULL) {
        space->public_since = cache->public_clock;
    }
    if (prefix == NULL || prefix->salt_size == 0) {
        withdraw_where(cache, is_from, &source);
    }
}

static bool is_of_tenant(const struct kvk_publication *publication, const void *context)
{
    return publication->space->tenant == context;
}

void kvk_public_forget(struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    withdraw_where(cache, is_of_tenant, tenant);
}

static bool is_any(const struct kvk_publication *publication, const void *context)
{
    (void)publication;
    (void)context;
    return true;
}

void kvk_public_withdraw_all_unlocked(struct kvk_cache *cache)
{
    kvk_lock(&cache->lock);
    for (struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
        p->stored = false; /* their files are for the next daemon */
    }
    withdraw_where(cache, is_any, NULL);
    while (cache->unpublished != NULL) {
        struct kvk_publication *one = cache->unpublished;
        cache->unpublished = one->next;
        kvk_publication_free(one);
    }
    kvk_unlock(&cache->lock);
}

uint32_t kvk_public_spaces_held(const struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    uint32_t count = 0;
    for (const struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        count += space->is_public && space->tenant == tenant;
    }
    return count;
}

void kvk_public_maintain_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_error error;
    enum kvk_status settled = kvk_public_settle_drops(cache, &error);
    (void)settled; /* what failed is told, and tried again in the next round */
    struct kvk_space *space = cache->spaces;
    while (space != NULL) {
        /* The lock is dropped where one goes: then from the start again. */
        bool gone = space->is_public && kvk_space_reclaim_drops(cache, space);
        space = gone ? cache->spaces : space->next;
    }
}

/* ---- Mapping ---- */

/* Does the tenant have a space that would see what is public there? */
static bool tenant_has_scope(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                             const struct kvk_space *public_space)
{
    const struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    for (const struct kvk_space *s = state->spaces; s != NULL; s = s->tenant_next) {
        if (!s->is_public && kvk_public_is_same_scope(s, public_space)) {
            return true;
        }
    }
    return false;
}

static bool is_published(const struct kvk_cache *cache, const struct kvk_space *public_space)
{
    for (const struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
        if (p->space == public_space) {
            return is_switched_on(p);
        }
    }
    return false;
}

static bool any_there(const struct kvk_cache *cache, const struct kvk_space *public_space,
                      const uint32_t *blocks, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        if (blocks[i] != KVK_BLOCK_NONE &&
            kvk_group_of(cache, kvk_index_block(cache->index, blocks[i]))->space == public_space) {
            return true;
        }
    }
    return false;
}

/* What it was told of before the prefix was withdrawn, it may go on reading. */
static bool instance_holds(const struct kvk_cache *cache, const struct kvk_instance *instance,
                           const struct kvk_space *public_space)
{
    for (const struct kvk_sequence *s = instance->sequences; s != NULL; s = s->next) {
        for (uint32_t g = 0; g < s->space->group_count; g++) {
            if (any_there(cache, public_space, s->groups[g].blocks, s->groups[g].block_count)) {
                return true;
            }
        }
    }
    for (const struct kvk_lease *l = instance->leases; l != NULL; l = l->next) {
        for (uint32_t g = 0; g < l->space->group_count; g++) {
            if (any_there(cache, public_space, l->groups[g].blocks, l->groups[g].block_count)) {
                return true;
            }
        }
    }
    return false;
}

enum kvk_status kvk_public_map_find(struct kvk_cache *cache, const struct kvk_session *session,
                                    uint64_t space_id, struct kvk_space **space,
                                    struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_space *found = kvk_table_get(&cache->space_table, space_id);
    if (found == NULL || !found->is_public || !tenant_has_scope(cache, session->tenant, found) ||
        (!is_published(cache, found) && !instance_holds(cache, session->instance, found))) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "space_id", "no such space");
    }
    *space = found;
    return KVK_OK;
}

/* ---- What there is ---- */

static void row_fill(const struct kvk_publication *publication, bool is_admin,
                     struct kvk_public_row *row)
{
    *row = (struct kvk_public_row){
        .public_id = publication->id,
        .space_id = publication->space->id,
        .source_id = publication->source_id,
        .tenant = publication->space->tenant,
        .tokens = (uint64_t)publication->block_count * publication->space->block_tokens,
        .published_s = publication->published_s,
        .hits = is_admin ? publication->hits : 0,
        .hit_tokens = is_admin ? publication->hit_tokens : 0,
        .durable = publication->stored,
        .visible = is_switched_on(publication),
    };
    kvk_publication_size(publication, &row->blocks, &row->bytes);
}

void kvk_publication_size(const struct kvk_publication *publication, uint64_t *blocks,
                          uint64_t *bytes)
{
    *blocks = 0;
    *bytes = 0;
    for (uint32_t g = 0; g < publication->space->group_count; g++) {
        const struct kvk_group *group = publication->space->groups[g];
        *blocks += group->space->public_slots[g];
        *bytes += group->space->public_slots[g] * group->block_bytes;
    }
}

static void totals_of(const struct kvk_cache *cache, const struct kvk_caller *caller,
                      struct kvk_public_totals *totals)
{
    *totals = (struct kvk_public_totals){0};
    for (const struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
        if (caller == NULL || may_withdraw(caller, p)) {
            uint64_t blocks;
            uint64_t bytes;
            kvk_publication_size(p, &blocks, &bytes);
            totals->prefixes++;
            totals->blocks += blocks;
            totals->bytes += bytes;
        }
    }
    for (const struct kvk_space *s = cache->spaces; s != NULL; s = s->next) {
        bool asked = caller == NULL || caller->credential->admin ||
                     kvk_credential_allows(caller->credential, s->tenant);
        bool published = false;
        for (const struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
            published = published || p->space == s;
        }
        if (!s->is_public || !asked || published) {
            continue;
        }
        totals->withdrawn_spaces++;
        for (uint32_t g = 0; g < s->group_count; g++) {
            const struct kvk_group_tier *host = &s->groups[g]->tiers[KVK_TIER_HOST];
            totals->withdrawn_bytes += host->arena.slot_count * s->groups[g]->block_bytes;
        }
    }
}

enum kvk_status kvk_public_list(struct kvk_cache *cache, const struct kvk_caller *caller,
                                struct kvk_public_row **rows, uint32_t *count,
                                struct kvk_public_totals *totals, struct kvk_error *error)
{
    *count = 0;
    uint32_t most = cache->config->public_prefixes;
    *rows = calloc(most == 0 ? 1 : most, sizeof(**rows));
    if (*rows == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the list");
    }
    kvk_lock(&cache->lock);
    for (const struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
        if (may_withdraw(caller, p)) {
            KVK_ASSERT(*count < most);
            row_fill(p, caller->credential->admin, &(*rows)[(*count)++]);
        }
    }
    totals_of(cache, caller, totals);
    kvk_unlock(&cache->lock);
    return KVK_OK;
}

void kvk_public_totals(struct kvk_cache *cache, struct kvk_public_totals *totals)
{
    kvk_lock(&cache->lock);
    totals_of(cache, NULL, totals);
    kvk_unlock(&cache->lock);
}
