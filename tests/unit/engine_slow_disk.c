/*
 * A disk that stalls for seconds: what is in memory goes on as if there were none, answers are the
 * same, queues are bounded, and what it would take too long to read is computed instead.
 */
#include "daemon/disk_tier.h"
#include "tests/engine_disk_stage.h"

#define STALL_US 2500000 /* of each read or write; longer than KVK_DISK_STALL_NS */
#define CALL_MS_MAX                                                                                \
    1000 /* of a call that has no business with the disk: far longer than it takes,                \
            far shorter than one stall */
#define SLOW_CALLS_MAX 8 /* of a test: a busy machine; with the disk in their way it is all */
#define PROMPT_TOKENS 8  /* 2 blocks */

static uint64_t now_ms(void)
{
    return kvk_clock_now(kvk_clock_monotonic()) / KVK_NS_PER_MS;
}

static void expect_quick(uint64_t begun_ms, const char *what)
{
    static uint32_t slow_calls;
    uint64_t took = now_ms() - begun_ms;
    slow_calls += took >= CALL_MS_MAX ? 1 : 0;
    cr_assert_leq(slow_calls, SLOW_CALLS_MAX, "%s took %llu ms, as others did", what,
                  (unsigned long long)took);
}

static struct kvk_disk_report report_of(struct disk_stage *on)
{
    struct kvk_disk_report report;
    struct kvk_cache *cache = on->stage.house.cache;
    kvk_lock(&cache->lock);
    kvk_disk_report(cache, &report);
    kvk_unlock(&cache->lock);
    return report;
}

/* 1e9 flops a token at 1e12 a second: 8 ms for a prompt, far more than a quick disk needs. */
static void start(struct disk_stage *on, uint32_t host_blocks)
{
    const struct kvk_geometry geometry = house_geometry();
    struct kvk_space_reply reply;
    struct kvk_space_request request = {
        .block_tokens = 4, .group_count = 1, .flops_per_token = 1e9, .flops_per_second = 1e12};
    request.groups[0] = geometry;
    disk_stage_init(on);
    disk_stage_start_with(on, &geometry, 0, host_blocks, 256, true);
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view("dear");
    STAGE_OK(&on->stage, kvk_space_open(on->stage.house.cache, &on->stage.house.caller, &request,
                                        &reply, &on->stage.house.error));
    on->stage.space = reply.space_id;
}

static void prompt_of(uint32_t number, uint32_t tokens[PROMPT_TOKENS])
{
    house_tokens(tokens, PROMPT_TOKENS, 1000 * (number + 1));
}

/* Whole there, not only with a slot. */
static uint64_t copies_on_disk(struct disk_stage *on)
{
    struct kvk_cache *cache = on->stage.house.cache;
    kvk_lock(&cache->lock);
    const struct kvk_space *space = kvk_table_get(&cache->space_table, on->stage.space);
    uint64_t blocks = space->groups[0]->tier_blocks[KVK_TIER_DISK];
    kvk_unlock(&cache->lock);
    return blocks;
}

static void wait_for_disk(struct disk_stage *on, uint64_t blocks)
{
    for (int i = 0; copies_on_disk(on) < blocks; i++) {
        cr_assert_lt(i, PATIENCE_MS, "%llu blocks on disk", (unsigned long long)copies_on_disk(on));
        house_sleep_ms(1);
    }
}

/* Writes that stall hold up nobody: what is not written in time leaves memory unwritten. */
Test(slow_disk, nobody_waits_for_writes, .timeout = 290)
{
    struct disk_stage on;
    start(&on, 8);
    atomic_store(&on.faulty.delay_us, STALL_US);
    for (uint32_t i = 0; i < 60; i++) {
        uint32_t tokens[PROMPT_TOKENS];
        prompt_of(i, tokens);
        uint64_t begun = now_ms();
        cr_assert_eq(stage_hit(&on.stage, tokens, PROMPT_TOKENS, false), 0);
        expect_quick(begun, "a look-up");
        begun = now_ms();
        uint64_t sequence = stage_sealed(&on.stage, tokens, PROMPT_TOKENS, i);
        expect_quick(begun, "opening, writing and sealing");
        begun = now_ms();
        cr_assert_eq(stage_hit(&on.stage, tokens, PROMPT_TOKENS, false), PROMPT_TOKENS);
        stage_verify(&on.stage, sequence, 0, PROMPT_TOKENS, i);
        stage_close(&on.stage, sequence);
        expect_quick(begun, "finding, reading and closing");
        cr_assert_leq(report_of(&on).queued, 120);
        house_sleep_ms(10);
    }
    for (int i = 0; strcmp(report_of(&on).state, "slow") != 0; i++) {
        cr_assert_lt(i, PATIENCE_MS, "it says \"%s\"", report_of(&on).state);
        house_sleep_ms(1);
    }
    for (int i = 0; stage_stats(&on.stage).disk_late_blocks == 0; i++) {
        cr_assert_lt(i, PATIENCE_MS, "what left memory meanwhile is not missed");
        house_sleep_ms(1);
    }
    cr_assert_not_null(strstr(report_of(&on).reason, "writing"), "%s", report_of(&on).reason);
    stage_check(&on.stage);
    atomic_store(&on.faulty.delay_us, 0);
    disk_stage_stop(&on);
}

/* One prefix is read at that speed; from then on the estimate knows, and the others are computed.
 */
Test(slow_disk, what_takes_too_long_is_computed, .timeout = 290)
{
    struct disk_stage on;
    uint32_t first[PROMPT_TOKENS], second[PROMPT_TOKENS];
    start(&on, 4);
    prompt_of(0, first);
    prompt_of(1, second);
    stage_cache(&on.stage, first, PROMPT_TOKENS, 1);
    wait_for_disk(&on, 2);
    stage_cache(&on.stage, second, PROMPT_TOKENS, 2);
    wait_for_disk(&on, 4);
    disk_push_out(&on, first, PROMPT_TOKENS, 500000);
    disk_push_out(&on, second, PROMPT_TOKENS, 700000);
    cr_assert_eq(disk_tokens(&on, first, PROMPT_TOKENS), PROMPT_TOKENS);
    cr_assert_eq(disk_tokens(&on, second, PROMPT_TOKENS), PROMPT_TOKENS);

    atomic_store(&on.faulty.delay_us, STALL_US);
    uint64_t begun = now_ms();
    struct kvk_sequence_reply slow = stage_open(&on.stage, first, PROMPT_TOKENS);
    cr_assert_geq(now_ms() - begun, STALL_US / 1000, "it was read");
    cr_assert_eq(slow.cached_tokens, PROMPT_TOKENS);
    stage_verify(&on.stage, slow.sequence_id, 0, PROMPT_TOKENS, 1);
    stage_close(&on.stage, slow.sequence_id);

    begun = now_ms();
    struct kvk_sequence_reply computed = stage_open(&on.stage, second, PROMPT_TOKENS);
    expect_quick(begun, "opening what is computed");
    cr_assert_eq(computed.cached_tokens, 0);
    cr_assert_eq(computed.disk.recompute_tokens, PROMPT_TOKENS, "restore %llu ns, compute %llu ns",
                 (unsigned long long)computed.disk.restore_ns,
                 (unsigned long long)computed.disk.recompute_ns);
    cr_assert_gt(computed.disk.restore_ns, computed.disk.recompute_ns);
    cr_assert_eq(stage_stats(&on.stage).disk_recomputes, 1);
    stage_close(&on.stage, computed.sequence_id);
    stage_check(&on.stage);
    atomic_store(&on.faulty.delay_us, 0);
    disk_stage_stop(&on);
}
