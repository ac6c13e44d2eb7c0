/* Plan: the planner's formulas over gRPC, and what a live space takes beside them. */
#include "base/assert.h"
#include "daemon/report_plan.h"
#include "daemon/rpc_private.h"

static enum kvk_status shape_take(struct kvk_rpc_run *run, const Kvkeep__V1__PlanRequest *asked,
                                  struct kvk_plan_space *plan, struct kvk_error *error)
{
    bool has_shape = asked->n_groups > 0 || asked->block_tokens > 0;
    if (asked->space_id != 0 && has_shape) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "space_id",
                        "a space or a shape, not both");
    }
    if (asked->space_id != 0) {
        return kvk_report_plan(run->rpc->cache, &run->caller, asked->space_id,
                               asked->encoder_tokens, plan, error);
    }
    const struct kvk_rpc_shape shape = {.block_tokens = asked->block_tokens,
                                        .tensor_shards = asked->tensor_shards,
                                        .pipeline_shards = asked->pipeline_shards,
                                        .groups = asked->groups,
                                        .group_count = asked->n_groups};
    struct kvk_geometry groups[KVK_GROUP_COUNT_MAX] = {{.layers = 0}};
    enum kvk_status status = kvk_rpc_check_groups(&shape, groups, error);
    return status == KVK_OK ? kvk_plan_capacity(groups, (uint32_t)asked->n_groups,
                                                asked->encoder_tokens, &plan->capacity, error)
                            : status;
}

/* Tokens that the formulas take without overflow. */
static enum kvk_status check_tokens(const Kvkeep__V1__PlanRequest *asked, struct kvk_error *error)
{
    const struct {
        uint64_t value;
        const char *field;
    } counts[] = {{asked->encoder_tokens, "encoder_tokens"},
                  {asked->prompt_tokens, "prompt_tokens"},
                  {asked->output_tokens, "output_tokens"},
                  {asked->shared_tokens, "shared_tokens"}};
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        if (counts[i].value > KVK_CAPACITY_TOKENS_MAX) {
            return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, counts[i].field,
                                  counts[i].value, KVK_CAPACITY_TOKENS_MAX, "%s is absurd",
                                  counts[i].field);
        }
    }
    if (asked->shared_tokens > asked->prompt_tokens) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "shared_tokens",
                              asked->shared_tokens, asked->prompt_tokens,
                              "more is shared than a prompt has");
    }
    for (size_t i = 0; i < asked->n_lengths; i++) {
        if (asked->lengths[i] > KVK_CAPACITY_TOKENS_MAX) {
            return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "lengths", asked->lengths[i],
                                  KVK_CAPACITY_TOKENS_MAX, "a length is absurd");
        }
    }
    return KVK_OK;
}

static bool fill_sequences(struct kvk_rpc_run *run, const Kvkeep__V1__PlanRequest *asked,
                           const struct kvk_capacity *capacity, Kvkeep__V1__PlanResponse *response)
{
    struct kvk_rpc_arena *arena = &run->memory->arena;
    size_t count = asked->n_lengths;
    Kvkeep__V1__PlannedSequence *rows =
        kvk_rpc_arena_take_extra(arena, (count + 1) * sizeof(*rows));
    Kvkeep__V1__PlannedSequence **pointers =
        kvk_rpc_arena_take_extra(arena, (count + 1) * sizeof(*pointers));
    if (rows == NULL || pointers == NULL) {
        return false;
    }
    KVK_ASSERT(capacity->block_tokens > 0);
    for (size_t i = 0; i < count; i++) {
        uint64_t tokens = asked->lengths[i];
        uint64_t block = capacity->block_tokens;
        kvkeep__v1__planned_sequence__init(&rows[i]);
        rows[i].tokens = tokens;
        rows[i].blocks = (tokens + block - 1) / block;
        rows[i].unused_slots = rows[i].blocks * block - tokens;
        rows[i].bytes_per_rank = kvk_capacity_sequence_bytes(capacity, tokens);
        pointers[i] = &rows[i];
    }
    response->n_sequences = count;
    response->sequences = pointers;
    return true;
}

static void fill_tier(Kvkeep__V1__MeasuredTier *row, int tier, const struct kvk_plan_tier *measured)
{
    kvkeep__v1__measured_tier__init(row);
    row->tier = (Kvkeep__V1__Tier)(tier + 1);
    row->limit_bytes = measured->limit_bytes;
    row->blocks = measured->blocks;
    row->tokens = measured->tokens;
    row->used_bytes = measured->used_bytes;
    row->planned_bytes = measured->planned_bytes;
    row->bytes_per_token =
        measured->tokens > 0 ? (double)measured->used_bytes / (double)measured->tokens : 0;
    if (measured->values > 0) {
        row->planned_bytes_per_value = (double)measured->planned_bytes / (double)measured->values;
        row->bytes_per_value = (double)measured->used_bytes / (double)measured->values;
    }
}

KVK_RPC_HANDLER(kvk_rpc_plan)
{
    const Kvkeep__V1__PlanRequest *asked = (const Kvkeep__V1__PlanRequest *)message;
    struct kvk_plan_space plan = {.capacity = {.group_count = 0}};
    enum kvk_status status = check_tokens(asked, error);
    if (status == KVK_OK) {
        status = shape_take(run, asked, &plan, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    const struct kvk_capacity *capacity = &plan.capacity;
    uint32_t ranks = capacity->tensor_ranks * capacity->pipeline_ranks;
    uint64_t budget = asked->budget_bytes > 0 ? asked->budget_bytes
                                              : kvk_report_plan_budget(run->rpc->cache, ranks);
    uint64_t most = kvk_capacity_tokens_max(capacity, budget);
    uint64_t block_bytes = kvk_capacity_block_bytes(capacity);
    Kvkeep__V1__PlanResponse response = KVKEEP__V1__PLAN_RESPONSE__INIT;
    response.bytes_per_token = kvk_capacity_token_bytes(capacity);
    response.bytes_per_token_per_rank = kvk_capacity_token_rank_bytes(capacity);
    response.bytes_per_value = kvk_capacity_value_bytes(capacity);
    response.block_bytes_per_rank = block_bytes;
    response.cross_bytes = kvk_capacity_cross_bytes(capacity);
    response.budget_bytes = budget;
    response.blocks = block_bytes > 0 ? budget / block_bytes : 0;
    response.max_tokens = most == UINT64_MAX ? KVK_CAPACITY_TOKENS_MAX : most;
    if (asked->prompt_tokens + asked->output_tokens > 0) {
        const struct kvk_capacity_load load = {.prompt_tokens = asked->prompt_tokens,
                                               .output_tokens = asked->output_tokens,
                                               .shared_tokens = asked->shared_tokens,
                                               .preempt = asked->preempt};
        response.sequences_at_once = kvk_capacity_sequences(capacity, &load, budget);
    }
    if (!fill_sequences(run, asked, capacity, &response)) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    Kvkeep__V1__MeasuredTier tiers[KVK_TIER_COUNT];
    Kvkeep__V1__MeasuredTier *pointers[KVK_TIER_COUNT];
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        fill_tier(&tiers[i], i, &plan.tiers[i]);
        pointers[i] = &tiers[i];
    }
    response.n_measured = asked->space_id != 0 ? KVK_TIER_COUNT : 0;
    response.measured = pointers;
    return kvk_rpc_reply(run, &response.base, error);
}
