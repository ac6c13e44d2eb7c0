/* A drain writes what waits to be written behind, within its bound, and says what it has not. */
#include "tests/engine_disk_stage.h"

#include "daemon/warm.h"

#define BLOCKS 12

static struct kvk_drain_reply drain(struct disk_stage *on)
{
    struct kvk_drain_reply reply;
    struct house *house = &on->stage.house;
    cr_assert_eq(kvk_drain(house->cache, &house->caller, &reply, &house->error), KVK_OK, "%s",
                 house->error.text);
    return reply;
}

static void seal_blocks(struct disk_stage *on)
{
    uint32_t tokens[4 * BLOCKS];
    house_tokens(tokens, 4 * BLOCKS, 1000);
    stage_cache(&on->stage, tokens, 4 * BLOCKS, 7);
}

Test(disk_flush, what_waits_is_written)
{
    struct disk_stage on;
    disk_stage_init(&on);
    on.stage.house.config.drain_flush_ms = 20000;
    disk_stage_start(&on, 0, 16, 64);
    seal_blocks(&on);
    cr_assert_eq(disk_blocks(&on), 0);
    struct kvk_drain_reply reply = drain(&on);
    cr_expect_eq(reply.flushed_blocks, BLOCKS);
    cr_expect_eq(reply.unflushed_blocks, 0);
    cr_expect_eq(reply.disk_blocks, BLOCKS);
    disk_stage_stop(&on);
}

Test(disk_flush, by_the_disk_tiers_own_thread)
{
    struct disk_stage on;
    const struct kvk_geometry geometry = house_geometry();
    disk_stage_init(&on);
    on.stage.house.config.drain_flush_ms = 20000;
    disk_stage_start_with(&on, &geometry, 0, 16, 64, true);
    seal_blocks(&on);
    struct kvk_drain_reply reply = drain(&on);
    cr_expect_eq(reply.unflushed_blocks, 0);
    cr_expect_eq(reply.disk_blocks, BLOCKS);
    disk_stage_stop(&on);
}

Test(disk_flush, without_time_nothing_is_and_it_says_so)
{
    struct disk_stage on;
    disk_stage_init(&on);
    on.stage.house.config.drain_flush_ms = 0;
    disk_stage_start(&on, 0, 16, 64);
    seal_blocks(&on);
    struct kvk_drain_reply reply = drain(&on);
    cr_expect_eq(reply.flushed_blocks, 0);
    cr_expect_eq(reply.unflushed_blocks, BLOCKS);
    cr_expect_eq(reply.disk_blocks, 0);
    disk_stage_stop(&on);
}

/* A client that gives up in half a second hears what became of it. */
Test(disk_flush, the_callers_deadline_bounds_it)
{
    struct disk_stage on;
    disk_stage_init(&on);
    on.stage.house.config.drain_flush_ms = 20000;
    disk_stage_start(&on, 0, 16, 64);
    seal_blocks(&on);
    on.stage.house.caller.deadline_ns =
        kvk_clock_now(kvk_clock_monotonic()) + KVK_NS_PER_SECOND / 2;
    struct kvk_drain_reply reply = drain(&on);
    cr_expect_eq(reply.unflushed_blocks, BLOCKS);
    disk_stage_stop(&on);
}

Test(disk_flush, a_disk_that_fails_does_not_hold_it_up)
{
    struct disk_stage on;
    disk_stage_init(&on);
    on.stage.house.config.drain_flush_ms = 2 * PATIENCE_MS;
    disk_stage_start(&on, 0, 16, 64);
    seal_blocks(&on);
    atomic_store(&on.faulty.write_errno, EIO);
    atomic_store(&on.faulty.fail_writes, 1000000);
    uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
    struct kvk_drain_reply reply = drain(&on);
    cr_expect_eq(reply.flushed_blocks, 0);
    cr_expect_eq(reply.disk_blocks, 0);
    cr_expect_lt(kvk_clock_now(kvk_clock_monotonic()) - begun_ns, PATIENCE_MS * KVK_NS_PER_MS);
    disk_stage_stop(&on);
}

/* More was sealed than the disk took: what has left memory meanwhile holds up nothing that has not,
 * in one go, without a pause between. */
Test(disk_flush, late_blocks_hold_up_none)
{
    struct disk_stage on;
    uint32_t tokens[4];
    disk_stage_init(&on);
    disk_stage_start(&on, 0, 8, 64);
    for (uint32_t i = 0; i < 1000; i++) {
        house_tokens(tokens, 4, 10000 + 10 * i);
        stage_cache(&on.stage, tokens, 4, 7);
    }
    disk_rounds(&on);
    cr_expect_eq(disk_blocks(&on), 8);
    cr_expect_geq(stage_stats(&on.stage).disk_late_blocks, 900);
    disk_stage_stop(&on);
}

Test(disk_flush, without_a_disk_there_is_nothing_to_say)
{
    struct stage stage;
    stage_start(&stage, 0, 8);
    struct kvk_drain_reply reply;
    cr_assert_eq(kvk_drain(stage.house.cache, &stage.house.caller, &reply, &stage.house.error),
                 KVK_OK);
    cr_expect_eq(reply.flushed_blocks + reply.unflushed_blocks, 0);
    stage_stop(&stage);
}
