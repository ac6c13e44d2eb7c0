#include "daemon/attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "daemon/attention_internal.h"

/* Positions from outside stay far from the end of 64 bits, so that sums of a few never overflow. */
#define POSITION_MAX (UINT64_C(1) << 48)

/* ---- Checking ---- */

static enum kvk_status refuse_field(struct kvk_error *error, const char *field, uint64_t value,
                                    uint64_t limit, const char *reason)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit, "%s: %llu: %s",
                          field, (unsigned long long)value, reason);
}

static enum kvk_status refuse_item(struct kvk_error *error, uint32_t index, const char *name,
                                   uint64_t value, uint64_t limit, const char *reason)
{
    char field[KVK_ERROR_FIELD_SIZE];

    (void)snprintf(field, sizeof(field), "items[%u].%s", index, name);
    return refuse_field(error, field, value, limit, reason);
}

/* None, or a number for each query head; the index of a bad one is part of the field's name. */
static enum kvk_status per_head_check(const struct kvk_attention_request *request, const char *name,
                                      const float *values, size_t count, bool lowest_allowed,
                                      struct kvk_error *error)
{
    char field[KVK_ERROR_FIELD_SIZE];

    if (count != 0 && count != request->query_heads) {
        return refuse_field(error, name, count, request->query_heads,
                            "there must be one for each of query_heads, or none");
    }
    for (size_t i = 0; i < count; i++) {
        if (!isfinite(values[i]) && !(lowest_allowed && values[i] == -INFINITY)) {
            (void)snprintf(field, sizeof(field), "%s[%zu]", name, i);
            return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s must be finite", field);
        }
    }
    return KVK_OK;
}

static enum kvk_status request_check(const struct kvk_attention_request *request,
                                     struct kvk_error *error)
{
    if (request->item_count == 0) {
        return refuse_field(error, "items", 0, 0, "there must be at least one");
    }
    if (request->query_heads == 0 || request->query_heads > KVK_HEAD_COUNT_MAX) {
        return refuse_field(error, "query_heads", request->query_heads, KVK_HEAD_COUNT_MAX,
                            "must be 1 to 1024");
    }
    if (kvk_format_bytes(request->format) == 0) {
        return refuse_field(error, "format", (uint64_t)request->format, 0, "no such format");
    }
    if (!isfinite(request->scale)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "scale", "scale must be finite");
    }
    if (!isfinite(request->soft_cap) || request->soft_cap < 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "soft_cap",
                        "soft_cap must be finite and not negative");
    }
    enum kvk_status status = per_head_check(request, "alibi_slopes", request->alibi_slopes,
                                            request->alibi_slope_count, false, error);
    if (status == KVK_OK) {
        status = per_head_check(request, "sink_logits", request->sink_logits,
                                request->sink_logit_count, true, error);
    }
    return status;
}

/* Items as they stand, before their shapes are known. */
static enum kvk_status items_check(const struct kvk_cache *cache,
                                   const struct kvk_attention_request *request,
                                   struct kvk_error *error)
{
    uint64_t limit = cache->config->attend_queries;
    uint64_t left = limit;

    for (uint32_t i = 0; i < request->item_count; i++) {
        const struct kvk_attention_item *item = &request->items[i];
        if ((item->sequence_id == 0) == (item->lease_id == 0)) {
            return refuse_item(error, i, "sequence_id", item->sequence_id, 0,
                               "there must be either a sequence or a lease");
        }
        if (item->query_count == 0 || item->query_count > left) {
            return refuse_item(error, i, "query_count", item->query_count, limit,
                               "must be at least 1, and all together at most "
                               "limits.attend_queries");
        }
        left -= item->query_count;
        if (item->position > POSITION_MAX) {
            return refuse_item(error, i, "position", item->position, POSITION_MAX,
                               "is past any sequence");
        }
    }
    return KVK_OK;
}

/* With the shapes known: operands of the right size. The bounds of each factor keep the product
 * below 2^60. */
static enum kvk_status operands_check(const struct kvk_attention_plan *plan,
                                      struct kvk_error *error)
{
    const struct kvk_attention_request *request = plan->request;
    uint64_t row_bytes = (uint64_t)request->query_heads * plan->geometry.head_size_k *
                         kvk_format_bytes(request->format);

    for (uint32_t i = 0; i < request->item_count; i++) {
        const struct kvk_attention_item *item = &request->items[i];
        uint64_t size = 0;
        if (!kvk_multiply_fits(row_bytes, item->query_count, &size) || item->queries_size != size) {
            return refuse_item(error, i, "queries", item->queries_size, size,
                               "bytes, which is not what the shape has");
        }
        if (item->queries == NULL || item->output == NULL || item->lse == NULL) {
            return refuse_item(error, i, "queries", 0, 0, "an operand or a result is missing");
        }
    }
    return KVK_OK;
}

/* ---- Which shard ---- */

/* The pipeline rank that has the layer: the first ranks have one more. */
static uint32_t pipeline_rank(const struct kvk_geometry *geometry, uint32_t layer,
                              uint32_t *shard_layer)
{
    for (uint32_t pipeline = 0; pipeline < geometry->pipeline_shards; pipeline++) {
        uint32_t shard = kvk_geometry_rank_shard(geometry, pipeline * geometry->tensor_shards);
        uint32_t first = kvk_geometry_shard_first_layer(geometry, shard);
        if (layer < first + kvk_geometry_shard_layers(geometry, shard)) {
            *shard_layer = layer - first;
            return pipeline;
        }
    }
    KVK_UNREACHABLE();
}

static enum kvk_status group_check(const struct kvk_attention_request *request,
                                   const struct kvk_space *space, struct kvk_error *error)
{
    if (request->group >= space->group_count) {
        return refuse_field(error, "group", request->group, space->group_count - 1,
                            "the space has no such group");
    }
    const struct kvk_geometry *geometry = &space->groups[request->group]->geometry;
    if (geometry->layout != KVK_LAYOUT_HEADS_FIRST) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_FIELD, "group",
                        "only groups whose layout is heads first can be attended");
    }
    if (request->layer >= geometry->layers) {
        return refuse_field(error, "layer", request->layer, geometry->layers - 1,
                            "the group has no such layer");
    }
    if (geometry->attention == KVK_ATTENTION_CROSS && request->alibi_slope_count != 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "alibi_slopes",
                        "alibi_slopes: a query has no distance from what it attends across");
    }
    if (request->rank >= geometry->tensor_shards) {
        return refuse_field(error, "rank", request->rank, geometry->tensor_shards - 1,
                            "there is no such tensor rank");
    }
    return KVK_OK;
}

enum kvk_status kvk_attention_choose_group(struct kvk_attention_plan *plan,
                                           const struct kvk_space *space, struct kvk_error *error)
{
    const struct kvk_attention_request *request = plan->request;

    enum kvk_status status = group_check(request, space, error);
    if (status != KVK_OK) {
        return status;
    }
    plan->geometry = space->groups[request->group]->geometry;
    const struct kvk_geometry *geometry = &plan->geometry;
    uint32_t pipeline = pipeline_rank(geometry, request->layer, &plan->shard_layer);
    plan->shard =
        kvk_geometry_rank_shard(geometry, pipeline * geometry->tensor_shards + request->rank);
    uint32_t kv_heads = kvk_geometry_shard_heads(geometry, plan->shard);
    if (request->query_heads % kv_heads != 0) {
        return refuse_field(error, "query_heads", request->query_heads, kv_heads,
                            "must be a multiple of the rank's KV heads");
    }
    /* An encoder's K/V has no order with the queries: each sees all of it. */
    bool cross = geometry->attention == KVK_ATTENTION_CROSS;
    plan->attend = (struct kvk_attend){
        .query_heads = request->query_heads,
        .kv_heads = kv_heads,
        .head_size_k = geometry->head_size_k,
        .head_size_v = geometry->head_size_v,
        .block_tokens = geometry->block_tokens,
        .format_q = request->format,
        .format_k = geometry->format_k,
        .format_v = geometry->latent ? geometry->format_k : geometry->format_v,
        .latent = geometry->latent,
        .k_offset = kvk_geometry_k_offset(geometry, plan->shard, plan->shard_layer),
        .v_offset =
            geometry->latent ? 0 : kvk_geometry_v_offset(geometry, plan->shard, plan->shard_layer),
        .scale = request->scale,
        .soft_cap = request->soft_cap,
        .causal = request->causal && !cross,
        .alibi_slopes = request->alibi_slope_count != 0 ? request->alibi_slopes : NULL,
        .sink_logits = request->sink_logit_count != 0 ? request->sink_logits : NULL,
    };
    if (!cross) {
        plan->attend.window = request->group_window ? geometry->window : request->window;
        plan->attend.sinks = request->group_window ? geometry->sinks : request->sinks;
    }
    plan->host_geometry = space->groups[request->group]->forms[KVK_TIER_HOST].geometry;
    const struct kvk_geometry *host = &plan->host_geometry;
    plan->host_attend = plan->attend;
    plan->host_attend.format_k = host->format_k;
    plan->host_attend.format_v = host->latent ? host->format_k : host->format_v;
    plan->host_attend.k_offset = kvk_geometry_k_offset(host, plan->shard, plan->shard_layer);
    plan->host_attend.v_offset =
        host->latent ? 0 : kvk_geometry_v_offset(host, plan->shard, plan->shard_layer);
    return KVK_OK;
}

enum kvk_status kvk_attention_shape(struct kvk_cache *cache, const struct kvk_caller *caller,
                                    const struct kvk_attention_request *request,
                                    uint32_t *head_size_k, uint32_t *head_size_v,
                                    struct kvk_error *error)
{
    struct kvk_attention_request copy = *request;
    struct kvk_attention_plan plan = {.cache = cache, .caller = caller, .request = &copy};
    struct kvk_space *space = NULL;

    enum kvk_status status = request_check(request, error);
    if (status == KVK_OK) {
        status = items_check(cache, request, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    status = kvk_attention_space(&plan, 0, &space, error);
    if (status == KVK_OK) {
        status = kvk_attention_choose_group(&plan, space, error);
    }
    kvk_unlock(&cache->lock);
    *head_size_k = plan.geometry.head_size_k;
    *head_size_v = plan.geometry.head_size_v;
    return status;
}

/* ---- Computing ---- */

/* The two results of an item that both tiers attend, until they are merged. */
struct partial {
    float *output;
    float *lse;
};

struct work {
    struct kvk_attend_item *items; /* [item_count] of one device's call; ours */
    struct partial *partials;      /* [item_count]; NULL: not needed. Ours */
    float *memory;                 /* of all partials; ours */
    struct kvk_attention_brought brought;
};

static uint64_t item_rows(const struct kvk_attention_plan *plan, uint32_t index)
{
    return (uint64_t)plan->request->items[index].query_count * plan->request->query_heads;
}

static bool is_mixed(const struct kvk_attention_span *span)
{
    return span->tokens[KVK_TIER_DEVICE] > 0 && span->tokens[KVK_TIER_HOST] > 0;
}

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "items", "no memory for the call");
}

static void work_finish(struct work *work)
{
    free(work->items);
    free(work->partials);
    free(work->memory);
}

/* Room for the host's part of items that both tiers attend: as large as their results. */
static enum kvk_status work_init(const struct kvk_attention_plan *plan, struct work *work,
                                 struct kvk_error *error)
{
    uint32_t count = plan->request->item_count;
    uint64_t values_per_row = (uint64_t)plan->geometry.head_size_v + 1;
    uint64_t values = 0;

    *work = (struct work){.items = calloc(count, sizeof(work->items[0])),
                          .partials = calloc(count, sizeof(work->partials[0]))};
    if (work->items == NULL || work->partials == NULL) {
        return no_memory(error);
    }
    for (uint32_t i = 0; i < count; i++) {
        values += is_mixed(&plan->spans[i]) ? item_rows(plan, i) * values_per_row : 0;
    }
    if (values == 0) {
        return KVK_OK;
    }
    uint64_t size_bytes = 0;
    if (!kvk_multiply_fits(values, sizeof(float), &size_bytes)) {
        return no_memory(error);
    }
    work->memory = malloc(size_bytes);
    if (work->memory == NULL) {
        return no_memory(error);
    }
    float *at = work->memory;
    for (uint32_t i = 0; i < count; i++) {
        if (is_mixed(&plan->spans[i])) {
            work->partials[i].output = at;
            at += item_rows(plan, i) * plan->geometry.head_size_v;
            work->partials[i].lse = at;
            at += item_rows(plan, i);
        }
    }
    return KVK_OK;
}

/* K and V that a tier's queries see, in bytes: each once, however many queries see it. */
static uint64_t seen_bytes(const struct kvk_attention_plan *plan, enum kvk_tier tier)
{
    const struct kvk_geometry *geometry =
        tier == KVK_TIER_HOST ? &plan->host_geometry : &plan->geometry;
    uint64_t token_bytes = kvk_geometry_shard_bytes(geometry, plan->shard) /
                           kvk_geometry_shard_layers(geometry, plan->shard) /
                           geometry->block_tokens;
    uint64_t tokens = 0;

    for (uint32_t i = 0; i < plan->request->item_count; i++) {
        tokens += plan->spans[i].tokens[tier];
    }
    return tokens * token_bytes;
}

/* One device attends what lies in its tier, of all items that have something there. */
static enum kvk_status attend_tier(const struct kvk_attention_plan *plan, struct work *work,
                                   enum kvk_tier tier, struct kvk_error *error)
{
    struct kvk_device *device = plan->cache->tiers[tier].device;
    const void *const *pages = plan->addresses[tier];
    struct kvk_attend attend = tier == KVK_TIER_HOST ? plan->host_attend : plan->attend;

    if (tier == KVK_TIER_HOST && work->brought.device != NULL) {
        device = work->brought.device;
        pages = work->brought.pages;
        attend.v_offset = attend.latent ? 0 : attend.v_offset - attend.k_offset;
        attend.k_offset = 0;
    }
    for (uint32_t i = 0; i < plan->request->item_count; i++) {
        const struct kvk_attention_item *item = &plan->request->items[i];
        const struct kvk_attention_span *span = &plan->spans[i];
        if (span->tokens[tier] == 0) {
            continue;
        }
        bool apart = tier == KVK_TIER_HOST && is_mixed(span);
        work->items[attend.item_count] = (struct kvk_attend_item){
            .queries = item->queries,
            .output = apart ? work->partials[i].output : item->output,
            .lse = apart ? work->partials[i].lse : item->lse,
            .query_count = item->query_count,
            .position = item->position,
            .token_count = span->token_count,
            .pages = pages + span->offset,
            .page_count = span->page_count,
            .first_token = span->first_page * plan->geometry.block_tokens,
            .partial = is_mixed(span),
        };
        attend.item_count++;
    }
    if (attend.item_count == 0) {
        return KVK_OK;
    }
    attend.items = work->items;
    return device->ops->attend(device, &attend, error);
}

/* The same, and measured: by the device whose memory it is. */
static enum kvk_status attend_measured(const struct kvk_attention_plan *plan, struct work *work,
                                       enum kvk_tier tier, struct kvk_error *error)
{
    struct kvk_attention_state *state = &plan->cache->attention;
    bool by_cpu = tier == KVK_TIER_HOST && work->brought.device == NULL;
    _Atomic uint64_t *rate = by_cpu ? &state->host_rate : &state->device_rate;
    uint32_t sharers = 1;

    if (by_cpu) {
        sharers += atomic_fetch_add_explicit(&state->host_calls, 1, memory_order_relaxed);
    }
    uint64_t began_ns = kvk_clock_now(kvk_clock_monotonic());
    enum kvk_status status = attend_tier(plan, work, tier, error);
    uint64_t took_ns = kvk_clock_now(kvk_clock_monotonic()) - began_ns;
    if (by_cpu) {
        atomic_fetch_sub_explicit(&state->host_calls, 1, memory_order_relaxed);
    }
    if (status == KVK_OK) {
        uint64_t before = atomic_load_explicit(rate, memory_order_relaxed);
        uint64_t after =
            kvk_attention_rate_after(before, seen_bytes(plan, tier) * sharers, took_ns);
        atomic_store_explicit(rate, after, memory_order_relaxed);
    }
    return status;
}

/* ---- Where the host's blocks are attended ---- */

static struct kvk_attention_choice choose_place(const struct kvk_attention_plan *plan)
{
    struct kvk_cache *cache = plan->cache;
    uint64_t host_bytes = seen_bytes(plan, KVK_TIER_HOST);
    const struct kvk_attention_load load = {
        .apart = cache->config->device_kind != KVK_DEVICE_CPU &&
                 cache->tiers[KVK_TIER_DEVICE].device != NULL,
        .host_bytes = host_bytes,
        .copy_bytes = host_bytes > 0 ? kvk_attention_bring_bytes(plan) : 0,
        .room_bytes = KVK_ATTENTION_BRING_BYTES_MAX,
        .host_rate = atomic_load_explicit(&cache->attention.host_rate, memory_order_relaxed),
        .host_calls = 1 + atomic_load_explicit(&cache->attention.host_calls, memory_order_relaxed),
        .link_rate = kvk_mover_rate(cache->mover),
        .device_rate = atomic_load_explicit(&cache->attention.device_rate, memory_order_relaxed),
    };

    return kvk_attention_choose_place(&load);
}

/* Where bringing in is refused (the device has no room), the CPU does it after all. */
static void place_host_blocks(struct kvk_attention_plan *plan, struct work *work)
{
    struct kvk_attention_choice choice = choose_place(plan);
    struct kvk_error ignored;

    if (choice.place == KVK_ATTENTION_BROUGHT_IN &&
        kvk_attention_bring(plan, &work->brought, &ignored) != KVK_OK) {
        choice.place = KVK_ATTENTION_IN_PLACE;
    }
    plan->request->choice = choice;
}

static void item_finish(const struct kvk_attention_plan *plan, const struct work *work,
                        uint32_t index)
{
    struct kvk_attention_item *item = &plan->request->items[index];
    const struct kvk_attention_span *span = &plan->spans[index];
    uint64_t rows = item_rows(plan, index);
    uint32_t head_size = plan->geometry.head_size_v;
    bool merged_here = true;

    item->device_tokens = span->tokens[KVK_TIER_DEVICE];
    item->host_tokens = span->tokens[KVK_TIER_HOST];
    if (is_mixed(span)) {
        kvk_attend_merge(item->output, item->lse, work->partials[index].output,
                         work->partials[index].lse, rows, head_size);
    } else if (item->device_tokens + item->host_tokens == 0) {
        memset(item->output, 0, rows * head_size * sizeof(float));
        for (uint64_t row = 0; row < rows; row++) {
            item->lse[row] = -INFINITY;
        }
    } else {
        merged_here = false;
    }
    if (merged_here && plan->attend.sink_logits != NULL) {
        kvk_attend_sink_logits(item->output, item->lse, plan->attend.sink_logits, item->query_count,
                               plan->request->query_heads, head_size);
    }
}

static enum kvk_status still_wanted(const struct kvk_caller *caller, struct kvk_error *error)
{
    if (caller->cancelled != NULL && caller->cancelled(caller->cancelled_context)) {
        return kvk_fail(error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the caller is gone");
    }
    if (kvk_clock_now(kvk_clock_monotonic()) >= caller->deadline_ns) {
        return kvk_fail(error, KVK_DEADLINE, KVK_CAUSE_NONE, "", "the caller's time is over");
    }
    return KVK_OK;
}

static enum kvk_status compute(struct kvk_attention_plan *plan, struct kvk_error *error)
{
    struct work work;

    enum kvk_status status = work_init(plan, &work, error);
    if (status == KVK_OK) {
        place_host_blocks(plan, &work);
    }
    for (int tier = 0; status == KVK_OK && tier < KVK_MEMORY_TIER_COUNT; tier++) {
        status = still_wanted(plan->caller, error);
        if (status == KVK_OK) {
            status = attend_measured(plan, &work, (enum kvk_tier)tier, error);
        }
    }
    for (uint32_t i = 0; status == KVK_OK && i < plan->request->item_count; i++) {
        item_finish(plan, &work, i);
    }
    kvk_attention_bring_finish(plan->cache, &work.brought);
    work_finish(&work);
    return status;
}

/* ---- The call ---- */

static enum kvk_status pages_alloc(struct kvk_attention_plan *plan, struct kvk_error *error)
{
    uint64_t count = plan->page_count + 1; /* calloc of nothing may give NULL */

    plan->pages = calloc(count, sizeof(plan->pages[0]));
    bool good = plan->pages != NULL;
    for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT; tier++) {
        plan->addresses[tier] = calloc(count, sizeof(plan->addresses[0][0]));
        good = good && plan->addresses[tier] != NULL;
    }
    if (!good) {
        return no_memory(error);
    }
    for (uint64_t i = 0; i < plan->page_count; i++) {
        plan->pages[i].block = KVK_BLOCK_NONE;
    }
    return KVK_OK;
}

static void plan_finish(struct kvk_attention_plan *plan)
{
    free(plan->spans);
    free(plan->pages);
    for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT; tier++) {
        free((void *)plan->addresses[tier]);
    }
}

static void count_tokens(struct kvk_attention_plan *plan)
{
    enum kvk_attention_place place = plan->request->choice.place;

    kvk_lock(&plan->cache->lock);
    if (place != KVK_ATTENTION_NO_CHOICE) {
        plan->cache->stats.attended_in_place += place == KVK_ATTENTION_IN_PLACE ? 1 : 0;
        plan->cache->stats.attended_brought_in += place == KVK_ATTENTION_BROUGHT_IN ? 1 : 0;
        plan->cache->attention.last = plan->request->choice;
    }
    for (uint32_t i = 0; i < plan->request->item_count; i++) {
        plan->cache->stats.attended_tokens +=
            plan->request->items[i].device_tokens + plan->request->items[i].host_tokens;
    }
    kvk_unlock(&plan->cache->lock);
}

enum kvk_status kvk_attention_run(struct kvk_cache *cache, const struct kvk_caller *caller,
                                  struct kvk_attention_request *request, struct kvk_error *error)
{
    struct kvk_attention_plan plan = {.cache = cache, .caller = caller, .request = request};

    enum kvk_status status = request_check(request, error);
    if (status == KVK_OK) {
        status = items_check(cache, request, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    plan.spans = calloc(request->item_count, sizeof(plan.spans[0]));
    status = plan.spans != NULL ? KVK_OK : no_memory(error);
    if (status == KVK_OK) {
        status = kvk_attention_measure_unlocked(&plan, error);
    }
    if (status == KVK_OK) {
        status = operands_check(&plan, error);
    }
    if (status == KVK_OK) {
        status = pages_alloc(&plan, error);
    }
    if (status == KVK_OK) {
        status = kvk_attention_take_unlocked(&plan, error);
    }
    if (status == KVK_OK) {
        status = compute(&plan, error);
        kvk_attention_return_unlocked(&plan);
    }
    if (status == KVK_OK) {
        count_tokens(&plan);
    }
    plan_finish(&plan);
    return status;
}
