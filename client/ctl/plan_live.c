/* kvkeepctl plan --space: what the formulas say of a live space, and what it takes. */
#include <stdio.h>

#include "client/ctl/ctl.h"
#include "client/ctl/plan.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

static const char *const tiers[] = {"?", "device", "host", "disk"};

static const char *tier_name(Kvkeep__V1__Tier tier)
{
    return tier >= 1 && tier <= 3 ? tiers[tier] : tiers[0];
}

static void answer_json(uint64_t space_id, const Kvkeep__V1__PlanResponse *plan)
{
    json_t *measured = json_array();
    for (size_t i = 0; i < plan->n_measured; i++) {
        const Kvkeep__V1__MeasuredTier *tier = plan->measured[i];
        (void)json_array_append_new(
            measured,
            json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:f}", "tier",
                      tier_name(tier->tier), "limit_bytes", (json_int_t)tier->limit_bytes, "blocks",
                      (json_int_t)tier->blocks, "tokens", (json_int_t)tier->tokens, "used_bytes",
                      (json_int_t)tier->used_bytes, "planned_bytes",
                      (json_int_t)tier->planned_bytes, "bytes_per_token", tier->bytes_per_token,
                      "planned_bytes_per_value", tier->planned_bytes_per_value, "bytes_per_value",
                      tier->bytes_per_value));
    }
    ctl_json_print(json_pack(
        "{s:o, s:I, s:I, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:o}", "space_id",
        json_sprintf("%llu", (unsigned long long)space_id), "bytes_per_token",
        (json_int_t)plan->bytes_per_token, "bytes_per_token_per_rank",
        (json_int_t)plan->bytes_per_token_per_rank, "bytes_per_value", plan->bytes_per_value,
        "block_bytes_per_rank", (json_int_t)plan->block_bytes_per_rank, "cross_bytes",
        (json_int_t)plan->cross_bytes, "budget_bytes", (json_int_t)plan->budget_bytes, "blocks",
        (json_int_t)plan->blocks, "max_tokens", (json_int_t)plan->max_tokens, "sequences_at_once",
        (json_int_t)plan->sequences_at_once, "measured", measured));
}

static void answer_print(const struct plan_live *live, const Kvkeep__V1__PlanResponse *plan)
{
    static const char *const titles[] = {"-tier",    "limit",   "blocks",  "tokens",     "planned",
                                         "measured", "a token", "a value", "of the plan"};
    (void)printf("%s bytes a token, %s a rank; %.3f bytes a value\n",
                 ctl_count(plan->bytes_per_token), ctl_count(plan->bytes_per_token_per_rank),
                 plan->bytes_per_value);
    (void)printf("%s on each rank hold %s blocks, or one sequence of %s tokens\n",
                 ctl_bytes(plan->budget_bytes), ctl_count(plan->blocks),
                 ctl_count(plan->max_tokens));
    if (live->prompt + live->output > 0) {
        (void)printf("%s sequences of %s + %s tokens run at once\n",
                     ctl_count(plan->sequences_at_once), ctl_count(live->prompt),
                     ctl_count(live->output));
    }
    (void)printf("\n");
    struct ctl_table table;
    ctl_table_init(&table, sizeof(titles) / sizeof(titles[0]), titles);
    for (size_t i = 0; i < plan->n_measured; i++) {
        const Kvkeep__V1__MeasuredTier *tier = plan->measured[i];
        if (tier->limit_bytes == 0 && tier->blocks == 0) {
            continue;
        }
        char share[32] = "-";
        char token[32] = "-";
        char value[48] = "-";
        if (tier->tokens > 0) {
            (void)snprintf(token, sizeof(token), "%.0f B", tier->bytes_per_token);
            (void)snprintf(value, sizeof(value), "%.3f B (%.3f)", tier->bytes_per_value,
                           tier->planned_bytes_per_value);
            (void)snprintf(share, sizeof(share), "%.3f",
                           (double)tier->used_bytes / (double)tier->planned_bytes);
        }
        ctl_table_row(&table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", tier_name(tier->tier),
                      ctl_bytes(tier->limit_bytes), ctl_count(tier->blocks),
                      ctl_count(tier->tokens), ctl_bytes(tier->planned_bytes),
                      ctl_bytes(tier->used_bytes), token, value, share);
    }
    ctl_table_print(&table);
}

int plan_live(const struct ctl_options *options, const struct plan_live *live)
{
    int code = CTL_OK;
    uint64_t space_id = ctl_space_find(options, "plan", live->space, live->tenant, &code);
    if (space_id == 0) {
        return code == CTL_OK ? CTL_FAILED : code;
    }
    Kvkeep__V1__PlanRequest request = KVKEEP__V1__PLAN_REQUEST__INIT;
    request.space_id = space_id;
    request.budget_bytes = live->budget;
    request.prompt_tokens = live->prompt;
    request.output_tokens = live->output;
    request.preempt = live->preempt;
    Kvkeep__V1__PlanResponse *response =
        ctl_admin_call(options, "/kvkeep.v1.Admin/Plan", &request.base,
                       &kvkeep__v1__plan_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    if (options->json) {
        answer_json(space_id, response);
    } else {
        answer_print(live, response);
    }
    kvkeep__v1__plan_response__free_unpacked(response, NULL);
    return CTL_OK;
}
