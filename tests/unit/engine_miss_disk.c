/* Why was it no hit: what is on disk alone, and is quicker to compute than to read. */
#include "daemon/report_miss.h"
#include "tests/engine_disk_stage.h"

#define TOKENS 12

static void space_of(struct disk_stage *on, const char *model, double flops_per_token)
{
    struct kvk_space_request request = {.block_tokens = 4,
                                        .group_count = 1,
                                        .flops_per_token = flops_per_token,
                                        .flops_per_second = 1e12};
    struct kvk_space_reply reply;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
    request.groups[0] = house_geometry();
    STAGE_OK(&on->stage, kvk_space_open(on->stage.house.cache, &on->stage.house.caller, &request,
                                        &reply, &on->stage.house.error));
    on->stage.space = reply.space_id;
}

/* Of a prompt that is on disk alone. */
static struct kvk_miss_report ask(struct disk_stage *on, const uint32_t *tokens)
{
    struct house *house = &on->stage.house;
    struct kvk_miss_report report;
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = TOKENS};
    stage_cache(&on->stage, tokens, TOKENS, 7);
    disk_rounds(on);
    disk_push_out(on, tokens, TOKENS, 5000);
    STAGE_OK(&on->stage, kvk_report_miss(house->cache, &house->caller, on->stage.space, &prompt,
                                         false, &report, &house->error));
    return report;
}

Test(miss_disk, on_disk_alone_and_quicker_to_compute)
{
    struct disk_stage on;
    uint32_t tokens[TOKENS];
    house_tokens(tokens, TOKENS, 100);
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    space_of(&on, "cheap", 1e3); /* 12 ns: no disk is as quick */
    struct kvk_miss_report report = ask(&on, tokens);
    cr_assert_eq(report.miss, KVK_MISS_ON_DISK, "%s", report.sentence);
    cr_assert_str_eq(kvk_miss_name(report.miss), "on_disk");
    cr_assert_eq(report.missing_block, 0);
    cr_assert_gt(report.load_ns, report.recompute_ns, "both figures");
    cr_assert_eq(report.recompute_ns, TOKENS);
    cr_assert_not_null(strstr(report.sentence, "disk"), "%s", report.sentence);
    struct kvk_sequence_reply reply = stage_open(&on.stage, tokens, TOKENS);
    cr_assert_eq(reply.cached_tokens, 0, "as it was said");
    stage_close(&on.stage, reply.sequence_id);
    disk_stage_stop(&on);
}

Test(miss_disk, what_is_worth_reading_is_no_miss)
{
    struct disk_stage on;
    uint32_t tokens[TOKENS];
    house_tokens(tokens, TOKENS, 100);
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    space_of(&on, "dear", 1e9);
    struct kvk_miss_report report = ask(&on, tokens);
    cr_assert_eq(report.miss, KVK_MISS_NONE, "%s", report.sentence);
    struct kvk_sequence_reply reply = stage_open(&on.stage, tokens, TOKENS);
    cr_assert_eq(reply.cached_tokens, TOKENS);
    stage_close(&on.stage, reply.sequence_id);
    disk_stage_stop(&on);
}
