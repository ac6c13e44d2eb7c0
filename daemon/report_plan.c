#include "daemon/report_plan.h"

#include "base/assert.h"
#include "daemon/report_internal.h"

/* Values of both parts are stored alike, or there is no one figure of bytes per value. */
static enum kvk_status format_of(const struct kvk_geometry *geometry,
                                 struct kvk_capacity_format *format, struct kvk_error *error)
{
    if (geometry->layout == KVK_LAYOUT_OPAQUE) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "groups.layout",
                        "opaque blocks have no values to plan with");
    }
    if (!geometry->latent && geometry->format_k != geometry->format_v) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "groups.format_v",
                        "K in %s and V in %s: one format is planned with",
                        kvk_format_name(geometry->format_k), kvk_format_name(geometry->format_v));
    }
    *format = (struct kvk_capacity_format){.stored = geometry->format_k};
    if (!kvk_format_is_compact(geometry->format_k)) {
        *format = (struct kvk_capacity_format){
            .value_bits = (uint32_t)(8 * kvk_format_bytes(geometry->format_k))};
    }
    return KVK_OK;
}

enum kvk_status kvk_plan_capacity(const struct kvk_geometry *groups, uint32_t group_count,
                                  uint64_t encoder_tokens, struct kvk_capacity *capacity,
                                  struct kvk_error *error)
{
    KVK_ASSERT(group_count >= 1 && group_count <= KVK_CAPACITY_GROUP_MAX);
    *capacity = (struct kvk_capacity){.group_count = group_count,
                                      .tensor_ranks = groups[0].tensor_shards,
                                      .pipeline_ranks = groups[0].pipeline_shards,
                                      .block_tokens = groups[0].block_tokens,
                                      .encoder_tokens = encoder_tokens};
    for (uint32_t i = 0; i < group_count; i++) {
        const struct kvk_geometry *geometry = &groups[i];
        struct kvk_capacity_format format = {.value_bits = 0};
        enum kvk_status status = format_of(geometry, &format, error);
        if (status != KVK_OK) {
            return status;
        }
        if (i > 0 && (format.stored != capacity->format.stored ||
                      format.value_bits != capacity->format.value_bits)) {
            return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "groups.format_k",
                            "groups of different formats: one is planned with");
        }
        capacity->format = format;
        capacity->groups[i] = (struct kvk_capacity_layers){
            .layers = geometry->layers,
            .kv_heads = geometry->kv_heads,
            .head_size_k = geometry->head_size_k,
            .head_size_v = geometry->latent ? 0 : geometry->head_size_v,
            .latent = geometry->latent,
            .cross = geometry->attention == KVK_ATTENTION_CROSS,
            .window = geometry->window,
            .sinks = geometry->sinks};
    }
    return kvk_capacity_check(capacity, error);
}

/* Values of K and V of one token, all groups and ranks. */
static uint64_t token_values(const struct kvk_capacity *capacity)
{
    uint64_t values = 0;
    for (uint32_t i = 0; i < capacity->group_count; i++) {
        const struct kvk_capacity_layers *layers = &capacity->groups[i];
        values += (uint64_t)layers->layers * layers->kv_heads *
                  ((uint64_t)layers->head_size_k + layers->head_size_v);
    }
    return values;
}

/* By the formulas; where the tier has several formats, group by group. */
static uint64_t tier_token_bytes(const struct kvk_geometry *groups, uint32_t group_count,
                                 uint64_t encoder_tokens)
{
    struct kvk_capacity capacity;
    if (kvk_plan_capacity(groups, group_count, encoder_tokens, &capacity, NULL) == KVK_OK) {
        return kvk_capacity_token_bytes(&capacity);
    }
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < group_count; g++) {
        bytes +=
            groups[g].attention == KVK_ATTENTION_CROSS ? 0 : kvk_geometry_token_bytes(&groups[g]);
    }
    return bytes;
}

static void measure(const struct kvk_cache *cache, const struct kvk_space *space,
                    struct kvk_plan_space *result)
{
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        struct kvk_plan_tier *tier = &result->tiers[i];
        tier->limit_bytes = cache->tiers[i].pool.limit_bytes;
        for (uint32_t g = 0; g < space->group_count; g++) {
            const struct kvk_group *group = space->groups[g];
            uint64_t tokens = group->tier_blocks[i] * space->block_tokens;
            tier->blocks += group->tier_blocks[i];
            tier->used_bytes += group->tiers[i].used_bytes;
            tier->tokens = tokens > tier->tokens ? tokens : tier->tokens;
        }
    }
}

enum kvk_status kvk_report_plan(struct kvk_cache *cache, const struct kvk_caller *caller,
                                uint64_t space_id, uint64_t encoder_tokens,
                                struct kvk_plan_space *result, struct kvk_error *error)
{
    struct kvk_geometry groups[KVK_TIER_COUNT][KVK_GROUP_COUNT_MAX];
    struct kvk_scope scope;
    *result = (struct kvk_plan_space){.capacity = {.group_count = 0}};
    enum kvk_status status =
        kvk_scope_init(cache, caller, (struct kvk_view){.size = 0}, &scope, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    const struct kvk_space *space = kvk_table_get(&cache->space_table, space_id);
    if (space == NULL || !kvk_scope_sees(&scope, space->tenant)) {
        kvk_unlock(&cache->lock);
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_FIELD, "space_id",
                        "there is no such space");
    }
    uint32_t group_count = space->group_count;
    for (uint32_t g = 0; g < group_count; g++) {
        for (int i = 0; i < KVK_TIER_COUNT; i++) {
            groups[i][g] = space->groups[g]->forms[i].geometry;
        }
    }
    measure(cache, space, result);
    kvk_unlock(&cache->lock);
    status = kvk_plan_capacity(groups[KVK_TIER_DEVICE], group_count, encoder_tokens,
                               &result->capacity, error);
    for (int i = 0; i < KVK_TIER_COUNT && status == KVK_OK; i++) {
        struct kvk_plan_tier *tier = &result->tiers[i];
        tier->values = tier->tokens * token_values(&result->capacity);
        tier->planned_bytes =
            tier->tokens * tier_token_bytes(groups[i], group_count, encoder_tokens);
    }
    return status;
}

uint64_t kvk_report_plan_budget(struct kvk_cache *cache, uint32_t rank_count)
{
    kvk_lock(&cache->lock);
    enum kvk_tier tier =
        cache->tiers[KVK_TIER_DEVICE].device != NULL ? KVK_TIER_DEVICE : KVK_TIER_HOST;
    uint64_t bytes = cache->tiers[tier].pool.limit_bytes;
    kvk_unlock(&cache->lock);
    return bytes / rank_count;
}
