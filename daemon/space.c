#include "daemon/space.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/persist.h"
#include "daemon/space_internal.h"

#define GENERATION_SIZE sizeof(uint64_t)

/* ---- Checking a request ---- */

static enum kvk_status check_cost(const char *field, double value, struct kvk_error *error)
{
    if (isfinite(value) && value >= 0) {
        return KVK_OK;
    }
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                    "%s: must be a finite number, 0 or more", field);
}

/* What lies in the host tier in a compact format lies on disk in the same. */
static enum kvk_format disk_format_of(const struct kvk_space_request *request, uint32_t index)
{
    return request->disk_formats[index] != KVK_FORMAT_NONE ? request->disk_formats[index]
                                                           : request->host_formats[index];
}

static enum kvk_status check_host_format(const struct kvk_space_request *request, uint32_t index,
                                         const char *field, struct kvk_error *error)
{
    enum kvk_format format = request->host_formats[index];
    if (format == KVK_FORMAT_NONE) {
        return KVK_OK;
    }
    if (disk_format_of(request, index) != format) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s: %s, but disk_format is %s: what is compact in the host tier goes to "
                        "disk as it is",
                        field, kvk_format_name(format),
                        kvk_format_name(request->disk_formats[index]));
    }
    if (request->partial_reuse == KVK_PARTIAL_REUSE_ON) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s: does not go with partial_reuse, which begins new blocks with what "
                        "others hold",
                        field);
    }
    return kvk_tier_form_check(&request->groups[index], format, field, error);
}

/* A compact host tier is there for a device tier above it that has what sequences hold. */
static enum kvk_status check_host_is_possible(const struct kvk_cache *cache,
                                              const struct kvk_space_request *request,
                                              struct kvk_error *error)
{
    char field[KVK_ERROR_FIELD_SIZE];
    for (uint32_t i = 0; i < request->group_count; i++) {
        if (request->host_formats[i] == KVK_FORMAT_NONE) {
            continue;
        }
        (void)snprintf(field, sizeof(field), "groups[%u].host_format", i);
        if (cache->tiers[KVK_TIER_DEVICE].device == NULL ||
            cache->tiers[KVK_TIER_DEVICE].pool.limit_bytes <
                kvk_geometry_block_bytes(&request->groups[i])) {
            return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, field,
                            "%s: this daemon has no device tier for its blocks, and what sequences "
                            "write is never compact",
                            field);
        }
    }
    return KVK_OK;
}

static enum kvk_status check_group(const struct kvk_space_request *request, uint32_t index,
                                   struct kvk_error *error)
{
    const struct kvk_geometry *group = &request->groups[index];
    char prefix[32];
    char field[KVK_ERROR_FIELD_SIZE];
    (void)snprintf(prefix, sizeof(prefix), "groups[%u].", index);
    enum kvk_status status = kvk_geometry_check(group, prefix, error);
    if (status != KVK_OK) {
        return status;
    }
    (void)snprintf(field, sizeof(field), "%shost_format", prefix);
    status = check_host_format(request, index, field, error);
    if (status != KVK_OK) {
        return status;
    }
    (void)snprintf(field, sizeof(field), "%sdisk_format", prefix);
    status = kvk_tier_form_check(group, request->disk_formats[index], field, error);
    if (status != KVK_OK) {
        return status;
    }
    if (group->block_tokens != request->block_tokens) {
        (void)snprintf(field, sizeof(field), "%sblock_tokens", prefix);
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, group->block_tokens,
                              request->block_tokens, "%s: must be the space's: %u", field,
                              request->block_tokens);
    }
    if (group->tensor_shards != request->groups[0].tensor_shards ||
        group->pipeline_shards != request->groups[0].pipeline_shards) {
        (void)snprintf(field, sizeof(field), "%stensor_shards", prefix);
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s: shards must be alike in all groups", field);
    }
    return KVK_OK;
}

/* Where hits may end within a block, blocks can be cut. */
static enum kvk_status check_parts(const struct kvk_space_request *request, struct kvk_error *error)
{
    for (uint32_t i = 0; i < request->group_count && request->partial_reuse == KVK_PARTIAL_REUSE_ON;
         i++) {
        char name[32];
        (void)snprintf(name, sizeof(name), "groups[%u]", i);
        enum kvk_status status = kvk_partial_check(&request->groups[i], name, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

static enum kvk_status check_request(const struct kvk_space_request *request,
                                     struct kvk_error *error)
{
    if (request->block_tokens == 0 || request->block_tokens > KVK_BLOCK_TOKENS_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "block_tokens",
                              request->block_tokens, KVK_BLOCK_TOKENS_MAX,
                              "block_tokens: must be 1 to %d", KVK_BLOCK_TOKENS_MAX);
    }
    if (request->group_count == 0 || request->group_count > KVK_GROUP_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "groups", request->group_count,
                              KVK_GROUP_COUNT_MAX, "groups: must be 1 to %d", KVK_GROUP_COUNT_MAX);
    }
    for (uint32_t i = 0; i < request->group_count; i++) {
        enum kvk_status status = check_group(request, i, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    enum kvk_status parts = check_parts(request, error);
    if (parts != KVK_OK) {
        return parts;
    }
    const struct {
        const char *field;
        double value;
    } costs[] = {
        {"prefill_cost.flops_per_token", request->flops_per_token},
        {"prefill_cost.flops_per_token_position", request->flops_per_token_position},
        {"prefill_cost.flops_per_second", request->flops_per_second},
    };
    for (size_t i = 0; i < sizeof(costs) / sizeof(costs[0]); i++) {
        enum kvk_status status = check_cost(costs[i].field, costs[i].value, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* ---- Finding ---- */

static struct kvk_space *space_with_identity(const struct kvk_cache *cache,
                                             const struct kvk_tenant *tenant,
                                             const uint8_t *identity, size_t identity_size)
{
    for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        if (!space->is_public && space->tenant == tenant && space->identity_size == identity_size &&
            memcmp(space->identity, identity, identity_size) == 0) {
            return space;
        }
    }
    return NULL;
}

static enum kvk_status compare_geometry(const struct kvk_space *space,
                                        const struct kvk_space_request *request,
                                        struct kvk_error *error)
{
    char field[KVK_ERROR_FIELD_SIZE] = "block_tokens";
    bool equal = space->block_tokens == request->block_tokens;
    if (equal) {
        (void)snprintf(field, sizeof(field), "groups");
        equal = space->group_count == request->group_count;
    }
    for (uint32_t i = 0; equal && i < space->group_count; i++) {
        (void)snprintf(field, sizeof(field), "groups[%u]", i);
        equal = kvk_geometry_equal(&space->groups[i]->geometry, &request->groups[i]);
    }
    for (uint32_t i = 0; equal && i < space->group_count; i++) {
        enum kvk_format asked = request->host_formats[i];
        (void)snprintf(field, sizeof(field), "groups[%u].host_format", i);
        equal = asked == KVK_FORMAT_NONE ||
                asked == kvk_tier_form_format(&space->groups[i]->forms[KVK_TIER_HOST]);
    }
    for (uint32_t i = 0; equal && i < space->group_count; i++) {
        enum kvk_format asked = request->disk_formats[i];
        (void)snprintf(field, sizeof(field), "groups[%u].disk_format", i);
        equal = asked == KVK_FORMAT_NONE ||
                asked == kvk_tier_form_format(&space->groups[i]->forms[KVK_TIER_DISK]);
    }
    if (equal) {
        return KVK_OK;
    }
    return kvk_fail(error, KVK_EXISTS, KVK_CAUSE_IDENTITY_MISMATCH, field,
                    "a space with this identity exists with another geometry: %s differs", field);
}

static void fill_reply(const struct kvk_space *space, bool created, struct kvk_space_reply *reply)
{
    *reply = (struct kvk_space_reply){
        .space_id = space->id,
        .created = created,
        .partial_reuse = space->partial_reuse,
        .group_count = space->group_count,
    };
    for (uint32_t i = 0; i < space->group_count; i++) {
        const struct kvk_group *group = space->groups[i];
        reply->groups[i].block_bytes = group->block_bytes;
        reply->groups[i].shard_count = group->shard_count;
        memcpy(reply->groups[i].shard_bytes, group->shard_bytes, sizeof(group->shard_bytes));
        reply->groups[i].disk_format = kvk_tier_form_format(&group->forms[KVK_TIER_DISK]);
        reply->groups[i].disk_block_bytes =
            group->tiers[KVK_TIER_DISK].present ? group->forms[KVK_TIER_DISK].block_bytes : 0;
        reply->groups[i].host_format = kvk_tier_form_format(&group->forms[KVK_TIER_HOST]);
        reply->groups[i].host_block_bytes =
            group->tiers[KVK_TIER_HOST].present ? group->forms[KVK_TIER_HOST].block_bytes : 0;
        reply->groups[i].rank_count = space->rank_count;
        for (uint32_t rank = 0; rank < space->rank_count; rank++) {
            reply->groups[i].rank_shard[rank] = kvk_geometry_rank_shard(&group->geometry, rank);
        }
    }
}

enum kvk_status kvk_space_find(struct kvk_cache *cache, const struct kvk_caller *caller,
                               uint64_t space_id, struct kvk_space **space, struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_space *found = kvk_table_get(&cache->space_table, space_id);
    if (found == NULL || found->is_public ||
        !kvk_credential_allows(caller->credential, found->tenant)) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "space_id", "no such space");
    }
    *space = found;
    return kvk_space_check(found, error);
}

struct kvk_group *kvk_group_of(const struct kvk_cache *cache, const struct kvk_block *block)
{
    KVK_ASSERT(block->arena < cache->group_capacity);
    struct kvk_group *group = cache->groups[block->arena];
    KVK_ASSERT(group != NULL);
    return group;
}

/* ---- Making and reclaiming ---- */

/* The memory of a space that is in no list, or no longer. */
static void space_destroy_unlocked(struct kvk_cache *cache, struct kvk_space *space)
{
    if (space == NULL) {
        return;
    }
    kvk_remote_space_destroy_unlocked(cache, space);
    for (uint32_t i = 0; i < space->group_count; i++) {
        kvk_group_destroy_unlocked(cache, space->groups[i]);
    }
    free(space->identity);
    free(space);
}

/* Takes `identity` over, also where it fails. The id and generation come first: memory that
 * outlives the process is kept, and found again, under them. `public_slots` [KVK_GROUP_COUNT_MAX]:
 * it is public, and these are its slots; NULL: it is not. */
static enum kvk_status space_create_unlocked(struct kvk_cache *cache,
                                             const struct kvk_tenant *tenant,
                                             const struct kvk_space_request *request,
                                             uint8_t *identity, size_t identity_size, uint64_t id,
                                             uint64_t generation, const uint32_t *public_slots,
                                             struct kvk_space **result, struct kvk_error *error)
{
    struct kvk_space *space = calloc(1, sizeof(*space));
    if (space == NULL) {
        free(identity);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a space");
    }
    space->id = id;
    space->tenant = tenant;
    space->identity = identity;
    space->identity_size = identity_size;
    space->block_tokens = request->block_tokens;
    space->rank_count = kvk_geometry_rank_count(&request->groups[0]);
    space->flops_per_token = request->flops_per_token;
    space->flops_per_token_position = request->flops_per_token_position;
    space->flops_per_second = request->flops_per_second;
    space->lookup_min_tokens = request->lookup_min_tokens;
    space->idle_ms = request->idle_ms;
    space->partial_reuse = request->partial_reuse == KVK_PARTIAL_REUSE_ON;
    kvk_space_set_generation(space, generation);
    if (public_slots != NULL) {
        space->is_public = true;
        memcpy(space->public_slots, public_slots, sizeof(space->public_slots));
    }
    for (uint32_t i = 0; i < request->group_count; i++) {
        struct kvk_group *group;
        enum kvk_status status =
            kvk_group_create(cache, space, i, &request->groups[i], request->host_formats[i],
                             disk_format_of(request, i), &group, error);
        if (status != KVK_OK) {
            space_destroy_unlocked(cache, space);
            return status;
        }
        space->group_count++;
        group->record_bytes = kvk_metadata_of_record(group);
    }
    kvk_space_weigh(space);
    *result = space;
    return KVK_OK;
}

static void space_unlink(struct kvk_cache *cache, struct kvk_space *space)
{
    struct kvk_space **link = &cache->spaces;
    while (*link != space) {
        KVK_ASSERT(*link != NULL);
        link = &(*link)->next;
    }
    *link = space->next;
    kvk_quota_space_unlink(cache, space);
    void *known = kvk_table_remove(&cache->space_table, space->id);
    KVK_ASSERT(known == space);
    for (uint32_t i = 0; i < space->group_count; i++) {
        cache->groups[space->groups[i]->number] = NULL;
    }
    KVK_ASSERT(cache->space_count > 0);
    cache->space_count--;
}

bool kvk_space_reclaim_drops(struct kvk_cache *cache, struct kvk_space *space)
{
    if (!kvk_space_is_unused(cache, space)) {
        return false;
    }
    space_unlink(cache, space);
    kvk_unlock(&cache->lock);
    if (!space->is_public) {
        kvk_persist_forget_unlocked(cache, space->id);
    }
    space_destroy_unlocked(cache, space);
    kvk_lock(&cache->lock);
    return true;
}

/* A space of the tenant's own that nobody misses goes. */
static bool own_reclaim_drops(struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    (void)kvk_tier_punch_drops(cache);
    for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        if (space->tenant == tenant && space->mode == KVK_TENANT_ON &&
            kvk_space_is_unused(cache, space)) {
            return kvk_space_reclaim_drops(cache, space);
        }
    }
    return false;
}

/* A place among config.spaces, where need be that of a space which nobody misses. */
static enum kvk_status place_take_drops(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                        size_t identity_size, struct kvk_error *error)
{
    /* Its groups' tables are small, and counted when they are there. */
    uint64_t bytes = sizeof(struct kvk_space) + identity_size;
    enum kvk_status status =
        kvk_metadata_admit(cache, tenant, KVK_METADATA_SPACES, 1, bytes, error);
    if (status != KVK_OK && own_reclaim_drops(cache, tenant)) {
        status = kvk_metadata_admit(cache, tenant, KVK_METADATA_SPACES, 1, bytes, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    if (cache->space_count < cache->config->spaces) {
        cache->space_count++;
        return KVK_OK;
    }
    (void)kvk_tier_punch_drops(cache);
    for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        /* One that is switched must be known as such when it is opened again. */
        if (space->mode == KVK_TENANT_ON && kvk_space_is_unused(cache, space)) {
            cache->space_count++; /* taken before the lock is dropped */
            bool gone = kvk_space_reclaim_drops(cache, space);
            KVK_ASSERT(gone);
            return KVK_OK;
        }
    }
    return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "spaces", cache->space_count,
                          cache->config->spaces, "all %u spaces of the configuration are in use",
                          cache->config->spaces);
}

static uint32_t group_number_take(struct kvk_cache *cache, struct kvk_group *group)
{
    for (uint32_t i = 0; i < cache->group_capacity; i++) {
        if (cache->groups[i] == NULL) {
            cache->groups[i] = group;
            if (i >= cache->group_end) {
                cache->group_end = i + 1;
            }
            return i;
        }
    }
    KVK_UNREACHABLE(); /* there are as many as config.spaces can have */
}

/* How many blocks of this space the tiers would hold, for ghosts and the prior of the policy. */
static void capacity_learn(struct kvk_cache *cache, const struct kvk_space *space)
{
    uint64_t blocks = 0;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        uint64_t space_bytes = 0;
        for (uint32_t g = 0; g < space->group_count; g++) {
            space_bytes += space->groups[g]->forms[i].block_bytes;
        }
        KVK_ASSERT(space_bytes > 0);
        blocks += cache->tiers[i].pool.limit_bytes / space_bytes * space->group_count;
    }
    if (blocks > cache->config->blocks) {
        blocks = cache->config->blocks;
    }
    if (blocks <= cache->capacity_blocks) {
        return;
    }
    uint64_t ghosts = blocks * cache->config->ghost_ratio;
    uint32_t ghost_count = ghosts > UINT32_MAX / 2 ? UINT32_MAX / 2 : (uint32_t)ghosts;
    if (kvk_evict_resize(cache->evict, ghost_count, (uint32_t)blocks) == KVK_OK) {
        cache->capacity_blocks = (uint32_t)blocks; /* else the policy learns from fewer ghosts */
    }
}

static void space_link(struct kvk_cache *cache, struct kvk_space *space)
{
    for (uint32_t i = 0; i < space->group_count; i++) {
        space->groups[i]->number = group_number_take(cache, space->groups[i]);
    }
    enum kvk_status status = kvk_table_put(&cache->space_table, space->id, space);
    KVK_ASSERT(status == KVK_OK); /* the place was taken before */
    space->next = cache->spaces;
    cache->spaces = space;
    kvk_mrc_begin(cache, space->tenant);
    kvk_quota_space_link(cache, space);
    cache->persist_wanted = cache->persist_wanted || (!space->recorded && !space->is_public);
    capacity_learn(cache, space);
}

/* Ids of spaces last, so a new one may by chance be there. */
static uint64_t space_id_take(struct kvk_cache *cache)
{
    uint64_t id;
    do {
        id = kvk_cache_new_id(cache);
    } while (kvk_table_get(&cache->space_table, id) != NULL);
    return id;
}

/* Make the space without the lock, then see whether somebody else was faster. */
static enum kvk_status open_new_drops(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                      const struct kvk_space_request *request, uint8_t *identity,
                                      size_t identity_size, struct kvk_space_reply *reply,
                                      struct kvk_error *error)
{
    struct kvk_space *space = NULL;
    enum kvk_status status = place_take_drops(cache, tenant, identity_size, error);
    if (status != KVK_OK) {
        free(identity);
        return status;
    }
    uint64_t id = space_id_take(cache);
    bool constant_hash = cache->constant_hash;
    kvk_unlock(&cache->lock);
    status = space_create_unlocked(cache, tenant, request, identity, identity_size, id, 1, NULL,
                                   &space, error);
    if (status == KVK_OK && space != NULL) {
        space->constant_hash = constant_hash;
        space->recorded = kvk_persist_record_unlocked(cache, space); /* before anybody finds it */
    }
    kvk_lock(&cache->lock);
    if (status != KVK_OK) {
        cache->space_count--;
        return status;
    }
    KVK_ASSERT(space != NULL);
    status = kvk_tenant_check(tenant, error); /* it may be forgotten by now */
    struct kvk_space *known =
        space_with_identity(cache, tenant, space->identity, space->identity_size);
    if (status == KVK_OK && known == NULL) {
        space_link(cache, space);
        fill_reply(space, true, reply);
        kvk_remote_space_join_drops(cache, space);
        return KVK_OK;
    }
    cache->space_count--;
    if (status == KVK_OK && known != NULL) {
        status = compare_geometry(known, request, error);
    }
    if (status == KVK_OK && known != NULL) {
        fill_reply(known, false, reply);
    }
    kvk_unlock(&cache->lock);
    if (space->recorded) {
        kvk_persist_forget_unlocked(cache, space->id);
    }
    space_destroy_unlocked(cache, space);
    kvk_lock(&cache->lock);
    return status;
}

/* What a space was opened with, but for its names. */
static void request_of(const struct kvk_space *space, struct kvk_space_request *request)
{
    *request = (struct kvk_space_request){
        .block_tokens = space->block_tokens,
        .group_count = space->group_count,
        .flops_per_token = space->flops_per_token,
        .flops_per_token_position = space->flops_per_token_position,
        .flops_per_second = space->flops_per_second,
        .lookup_min_tokens = space->lookup_min_tokens,
    };
    for (uint32_t g = 0; g < space->group_count; g++) {
        request->groups[g] = space->groups[g]->geometry;
    }
}

enum kvk_status kvk_space_make_public_drops(struct kvk_cache *cache, struct kvk_space *source,
                                            const uint32_t slots[KVK_GROUP_COUNT_MAX],
                                            struct kvk_space **result, struct kvk_error *error)
{
    struct kvk_space *space = NULL;
    struct kvk_space_request request;
    const struct kvk_tenant *tenant = source->tenant;
    size_t identity_size = source->identity_size;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(source->reference_count > 0); /* it stays while the lock is dropped */
    enum kvk_status status = place_take_drops(cache, tenant, identity_size, error);
    if (status != KVK_OK) {
        return status;
    }
    uint64_t id = space_id_take(cache);
    request_of(source, &request);
    kvk_unlock(&cache->lock);
    uint8_t *identity = malloc(identity_size + GENERATION_SIZE);
    if (identity == NULL) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a space");
    } else {
        memcpy(identity, source->identity, identity_size);
        status = space_create_unlocked(cache, tenant, &request, identity, identity_size, id, 1,
                                       slots, &space, error);
    }
    kvk_lock(&cache->lock);
    if (status == KVK_OK) {
        status = kvk_tenant_check(tenant, error); /* it may be forgotten by now */
    }
    if (status == KVK_OK) {
        KVK_ASSERT(space != NULL);
        space_link(cache, space);
        *result = space;
        return KVK_OK;
    }
    cache->space_count--;
    if (space != NULL) {
        kvk_unlock(&cache->lock);
        space_destroy_unlocked(cache, space);
        kvk_lock(&cache->lock);
    }
    return status;
}

/* Under its old id, which no new one may have, and at its old generation. */
static enum kvk_status restore_drops(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                     const struct kvk_space_request *request, uint8_t *identity,
                                     size_t identity_size, uint64_t id, uint64_t generation,
                                     struct kvk_error *error)
{
    struct kvk_space *space = NULL;
    if (space_with_identity(cache, tenant, identity, identity_size) != NULL ||
        kvk_table_get(&cache->space_table, id) != NULL) {
        free(identity);
        return kvk_fail(error, KVK_EXISTS, KVK_CAUSE_NONE, "", "it is open already");
    }
    if (cache->space_count >= cache->config->spaces) {
        free(identity);
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "spaces", cache->space_count,
                              cache->config->spaces,
                              "limits.spaces: more than %u spaces are recorded",
                              cache->config->spaces);
    }
    cache->space_count++;
    kvk_unlock(&cache->lock);
    enum kvk_status status = space_create_unlocked(cache, tenant, request, identity, identity_size,
                                                   id, generation, NULL, &space, error);
    kvk_lock(&cache->lock);
    if (status != KVK_OK) {
        cache->space_count--;
        return status;
    }
    space->recorded = true;
    space_link(cache, space); /* nobody serves yet, so nobody was faster */
    kvk_remote_space_join_drops(cache, space);
    return KVK_OK;
}

enum kvk_status kvk_space_restore(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                  const struct kvk_space_request *request, uint8_t *identity,
                                  size_t identity_size, uint64_t id, uint64_t generation,
                                  struct kvk_error *error)
{
    enum kvk_status status = check_request(request, error);
    if (status == KVK_OK) {
        status = check_host_is_possible(cache, request, error);
    }
    if (status != KVK_OK) {
        free(identity);
        return status;
    }
    kvk_lock(&cache->lock);
    status = restore_drops(cache, tenant, request, identity, identity_size, id, generation, error);
    kvk_unlock(&cache->lock);
    return status;
}

enum kvk_status kvk_space_open(struct kvk_cache *cache, const struct kvk_caller *caller,
                               const struct kvk_space_request *request,
                               struct kvk_space_reply *reply, struct kvk_error *error)
{
    const struct kvk_tenant *tenant;
    uint8_t *identity;
    size_t identity_size;
    enum kvk_status status = kvk_credential_tenant(caller->credential, request->tenant.data,
                                                   request->tenant.size, &tenant, error);
    if (status == KVK_OK) {
        (void)kvk_quota_sync(cache, tenant, NULL); /* impossible ones are in the log */
        status = check_request(request, error);
    }
    if (status == KVK_OK) {
        status = kvk_identity_encode(&request->identity, GENERATION_SIZE, &identity, &identity_size,
                                     error);
    }
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    struct kvk_space *known = space_with_identity(cache, tenant, identity, identity_size);
    status = check_host_is_possible(cache, request, error);
    if (status != KVK_OK) {
        free(identity);
    } else if (known != NULL) {
        status = compare_geometry(known, request, error);
        if (status == KVK_OK && request->partial_reuse == KVK_PARTIAL_REUSE_ON &&
            kvk_space_is_compact_below(known)) {
            status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "partial_reuse",
                              "partial_reuse: does not go with the host_format that the space has");
        }
        if (status == KVK_OK) {
            known->idle_ms = request->idle_ms;
            if (request->partial_reuse != KVK_PARTIAL_REUSE_AS_IT_IS) {
                known->partial_reuse = request->partial_reuse == KVK_PARTIAL_REUSE_ON;
            }
            fill_reply(known, false, reply);
        }
        free(identity);
    } else if (!caller->may_block) {
        status = KVK_WOULD_BLOCK;
        free(identity);
    } else {
        status = open_new_drops(cache, tenant, request, identity, identity_size, reply, error);
    }
    if (status == KVK_EXHAUSTED) {
        kvk_refusal_note(cache, caller, tenant, 0, 0, error);
    }
    kvk_unlock(&cache->lock);
    return status;
}

void kvk_space_destroy_all(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    while (cache->spaces != NULL) {
        struct kvk_space *space = cache->spaces;
        kvk_lock(&cache->lock);
        space_unlink(cache, space);
        kvk_unlock(&cache->lock);
        space_destroy_unlocked(cache, space);
    }
}

/* ---- Roots ---- */

/* (group number, low half of the generation): what kvk_root_is_current() compares. A group's
 * number is not given on while a root of it lives, for its space is then in use. */
static uint64_t root_user(const struct kvk_group *group)
{
    return (uint64_t)group->number << 32 | (uint32_t)group->space->generation;
}

static struct kvk_root_options root_options(const struct kvk_space *space, uint32_t group,
                                            const uint8_t *salt, size_t salt_size)
{
    return (struct kvk_root_options){
        .hasher = space->constant_hash ? &space->tenant->hasher_constant : &space->tenant->hasher,
        .identity = space->identity,
        .identity_size = space->identity_size + GENERATION_SIZE,
        .group = group,
        .salt = salt,
        .salt_size = salt_size,
        .block_tokens = space->block_tokens,
        .windowed = space->groups[group]->windowed,
        .user = root_user(space->groups[group]),
    };
}

const struct kvk_hasher *kvk_space_hasher(const struct kvk_space *space)
{
    return space->constant_hash ? &space->tenant->hasher_constant : &space->tenant->hasher;
}

enum kvk_status kvk_space_root_key(const struct kvk_space *space, uint32_t group,
                                   const uint8_t *salt, size_t salt_size, uint64_t back,
                                   struct kvk_key *key)
{
    struct kvk_root_options options = root_options(space, group, salt, salt_size);
    if (back == 0) {
        *key = kvk_index_root_key(&options);
        return KVK_OK;
    }
    KVK_ASSERT(back <= space->generation);
    struct kvk_space before = *space;
    before.identity = malloc(options.identity_size);
    if (before.identity == NULL) {
        return KVK_EXHAUSTED;
    }
    memcpy(before.identity, space->identity, options.identity_size);
    kvk_space_set_generation(&before, space->generation - back);
    options.identity = before.identity;
    *key = kvk_index_root_key(&options);
    free(before.identity);
    return KVK_OK;
}

void kvk_space_roots_find(const struct kvk_cache *cache, const struct kvk_space *space,
                          const uint8_t *salt, size_t salt_size,
                          uint32_t roots[KVK_GROUP_COUNT_MAX])
{
    for (uint32_t i = 0; i < KVK_GROUP_COUNT_MAX; i++) {
        roots[i] = KVK_ROOT_NONE;
    }
    for (uint32_t i = 0; i < space->group_count; i++) {
        const struct kvk_root_options options = root_options(space, i, salt, salt_size);
        roots[i] = kvk_index_root_find(cache->index, &options);
    }
}

enum kvk_status kvk_space_roots_admit(struct kvk_cache *cache, const struct kvk_space *space,
                                      const uint8_t *salt, size_t salt_size,
                                      struct kvk_error *error)
{
    uint32_t count = 0;
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < space->group_count; i++) {
        const struct kvk_root_options options = root_options(space, i, salt, salt_size);
        if (kvk_index_root_find(cache->index, &options) == KVK_ROOT_NONE) {
            bytes += kvk_index_root_size(&options);
            count++;
        }
    }
    return count == 0
               ? KVK_OK
               : kvk_metadata_admit(cache, space->tenant, KVK_METADATA_ROOTS, count, bytes, error);
}

enum kvk_status kvk_space_roots(struct kvk_cache *cache, struct kvk_space *space,
                                const uint8_t *salt, size_t salt_size,
                                uint32_t roots[KVK_GROUP_COUNT_MAX], struct kvk_error *error)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    for (uint32_t i = 0; i < KVK_GROUP_COUNT_MAX; i++) {
        roots[i] = KVK_ROOT_NONE;
    }
    for (uint32_t i = 0; i < space->group_count; i++) {
        struct kvk_root_options options = root_options(space, i, salt, salt_size);
        options.account = &kvk_tenant_state_of(cache, space->tenant)->metadata.roots;
        if (kvk_index_root_open(cache->index, &options, &roots[i]) != KVK_OK) {
            roots[i] = KVK_ROOT_NONE;
            kvk_space_roots_release(cache, space, roots);
            return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "salt",
                                  cache->config->roots, cache->config->roots,
                                  "all %u roots (salts x groups) of the configuration are in use",
                                  cache->config->roots);
        }
    }
    return KVK_OK;
}

void kvk_space_roots_release(struct kvk_cache *cache, struct kvk_space *space,
                             const uint32_t roots[KVK_GROUP_COUNT_MAX])
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    for (uint32_t i = 0; i < space->group_count; i++) {
        if (roots[i] != KVK_ROOT_NONE) {
            kvk_index_root_release(cache->index, roots[i]);
        }
    }
}

bool kvk_root_is_current(const struct kvk_cache *cache, uint32_t root)
{
    uint64_t user = kvk_index_root_user(cache->index, root);
    const struct kvk_group *group = cache->groups[user >> 32];
    KVK_ASSERT(group != NULL);
    return (uint32_t)user == (uint32_t)group->space->generation;
}

/* ---- What it costs to compute again ---- */

/*
 * A token at position p costs flops_per_token + flops_per_token_position x p; a block that begins
 * at position p costs tokens x (flops_per_token + flops_per_token_position x (p + half a block)).
 */
static double flops_at(const struct kvk_space *space, double first_token)
{
    double middle = first_token + space->block_tokens / 2.0;
    return space->flops_per_token + space->flops_per_token_position * middle;
}

float kvk_space_block_cost(const struct kvk_space *space, uint64_t position)
{
    double first = flops_at(space, 0);
    if (first <= 0) {
        return 1.0F;
    }
    return (float)(flops_at(space, (double)position * space->block_tokens) / first);
}

uint64_t kvk_space_recompute_ns(const struct kvk_space *space, uint64_t first, uint64_t last)
{
    KVK_ASSERT(first <= last);
    if (space->flops_per_second <= 0) {
        return 0;
    }
    double a = (double)first;
    double b = (double)last;
    double flops =
        (b - a) * space->flops_per_token + (b * b - a * a) / 2 * space->flops_per_token_position;
    double ns = flops / space->flops_per_second * (double)KVK_NS_PER_SECOND;
    return ns < 1e18 ? (uint64_t)ns : (uint64_t)1e18;
}
