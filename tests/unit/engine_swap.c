/* Swap: byte-exact both ways, all or nothing, and harmless to whoever comes between. */
#include "tests/engine_stage.h"

#define PROMPT 22 /* five blocks and a half */

static uint64_t prompt_sealed(struct stage *stage, uint32_t tag)
{
    uint32_t tokens[PROMPT];
    house_tokens(tokens, PROMPT, tag * 100);
    return stage_sealed(stage, tokens, PROMPT, tag);
}

Test(swap, out_and_in_is_byte_exact)
{
    struct stage stage;
    struct kvk_swap_reply reply;
    uint32_t drafts[5] = {1, 2, 3, 4, 5};
    stage_start(&stage, 10, 10);
    uint64_t id = prompt_sealed(&stage, 1);
    stage_append(&stage, id, PROMPT, drafts, 5, true);
    stage_fill(&stage, id, 2);
    for (int round = 0; round < 20; round++) {
        STAGE_OK(&stage, stage_try_swap_out(&stage, id, &reply));
        cr_assert_eq(reply.moved_blocks, 7);
        cr_assert_eq(reply.moved_bytes, 7 * stage.block_bytes);
        cr_assert_eq(reply.sequence.state, KVK_SEQUENCE_SWAPPED_OUT);
        cr_assert_eq(stage_used(&stage, KVK_TIER_DEVICE), 0);
        cr_assert_eq(stage_used(&stage, KVK_TIER_HOST), 7);
        for (uint32_t i = 0; i < 7; i++) {
            cr_assert_eq(stage.tables.parts[0].tiers[i], 2);
        }
        stage_verify(&stage, id, 0, PROMPT, 1);
        STAGE_OK(&stage, stage_try_swap_out(&stage, id, &reply)); /* is out already */
        cr_assert_eq(reply.moved_blocks, 0);
        STAGE_OK(&stage, stage_try_swap_in(&stage, id, &reply));
        cr_assert_eq(reply.moved_blocks, 7);
        cr_assert_gt(reply.load_ns, 0);
        cr_assert_eq(stage_used(&stage, KVK_TIER_DEVICE), 7);
        cr_assert_eq(stage_used(&stage, KVK_TIER_HOST), 0, "the host tier is exclusive");
        stage_verify(&stage, id, 0, PROMPT, 1);
        stage_verify(&stage, id, PROMPT, PROMPT + 5, 2);
    }
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &reply)); /* is in already */
    struct kvk_sequence_reply committed;
    STAGE_OK(&stage, stage_try_commit(&stage, id, PROMPT + 5, 2, &committed));
    cr_expect_eq(committed.length, PROMPT + 2);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(swap, what_is_out_only_reads_cuts_and_closes)
{
    struct stage stage;
    struct kvk_swap_reply swap;
    struct kvk_sequence_reply reply;
    uint64_t fork;
    const uint32_t one[] = {1};
    stage_start(&stage, 10, 10);
    uint64_t id = prompt_sealed(&stage, 1);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swap));
    cr_expect_eq(stage_try_append(&stage, id, PROMPT, one, 1, false, &reply), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_SWAPPED_OUT);
    cr_expect_eq(stage_try_fork(&stage, id, PROMPT, 1, "", &fork), KVK_PRECONDITION);
    cr_expect_eq(house_try_seal(&stage.house, stage.session, id, PROMPT, PROMPT), KVK_PRECONDITION);
    cr_expect_eq(stage_try_commit(&stage, id, PROMPT, 0, &reply), KVK_PRECONDITION);
    stage_verify(&stage, id, 0, PROMPT, 1);
    STAGE_OK(&stage, stage_try_truncate(&stage, id, PROMPT, 9, &reply));
    cr_expect_eq(reply.freed_blocks, 3);
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &swap));
    stage_verify(&stage, id, 0, 9, 1);
    stage_append(&stage, id, 9, one, 1, false);
    stage_fill(&stage, id, 2);
    stage_verify(&stage, id, 0, 9, 1);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(swap, out_waits_for_what_is_granted)
{
    struct stage stage;
    struct kvk_swap_reply reply;
    const uint32_t one[] = {1};
    stage_start(&stage, 10, 10);
    uint64_t id = prompt_sealed(&stage, 1);
    stage_append(&stage, id, PROMPT, one, 1, false);
    cr_expect_eq(stage_try_swap_out(&stage, id, &reply), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_GRANT_UNWRITTEN);
    stage.house.caller.may_block = false;
    house_seal(&stage.house, stage.session, id, PROMPT + 1);
    cr_expect_eq(stage_try_swap_out(&stage, id, &reply), KVK_WOULD_BLOCK);
    cr_expect_eq(stage_get(&stage, id).state, KVK_SEQUENCE_RUNNING);
    stage.house.caller.may_block = true;
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(swap, refuses_whole_where_there_is_no_room)
{
    struct stage stage;
    struct kvk_swap_reply reply;
    uint32_t tokens[40];
    stage_start(&stage, 10, 5);
    uint64_t id = prompt_sealed(&stage, 1); /* six blocks: one too many */
    cr_expect_eq(stage_try_swap_out(&stage, id, &reply), KVK_EXHAUSTED);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 6);
    cr_expect_eq(stage_used(&stage, KVK_TIER_HOST), 0);
    stage_verify(&stage, id, 0, PROMPT, 1);
    struct kvk_sequence_reply cut;
    STAGE_OK(&stage, stage_try_truncate(&stage, id, PROMPT, 18, &cut));
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &reply));
    cr_expect_eq(reply.moved_blocks, 5);

    house_tokens(tokens, 40, 5000);
    uint64_t other = stage_open(&stage, tokens, 24).sequence_id;
    cr_expect_eq(stage_try_swap_in(&stage, id, &reply), KVK_EXHAUSTED);
    cr_expect_eq(stage_get(&stage, id).state, KVK_SEQUENCE_SWAPPED_OUT);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 6);
    stage_verify(&stage, id, 0, 18, 1);
    stage_close(&stage, other);
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &reply));
    stage_verify(&stage, id, 0, 18, 1);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(swap, a_failed_copy_changes_nothing)
{
    struct stage stage;
    struct kvk_swap_reply reply;
    stage_start(&stage, 10, 10);
    uint64_t id = prompt_sealed(&stage, 1);
    kvk_mover_test_fail_next(stage.house.cache->mover);
    cr_expect_neq(stage_try_swap_out(&stage, id, &reply), KVK_OK);
    cr_expect_eq(stage_get(&stage, id).state, KVK_SEQUENCE_RUNNING);
    cr_expect_eq(stage_used(&stage, KVK_TIER_HOST), 0);
    stage_check(&stage);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &reply));
    kvk_mover_test_fail_next(stage.house.cache->mover);
    cr_expect_neq(stage_try_swap_in(&stage, id, &reply), KVK_OK);
    cr_expect_eq(stage_get(&stage, id).state, KVK_SEQUENCE_SWAPPED_OUT);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 0);
    stage_check(&stage);
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &reply));
    stage_verify(&stage, id, 0, PROMPT, 1);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(swap, what_is_shared_keeps_its_place_for_the_others)
{
    struct stage stage;
    struct kvk_swap_reply reply;
    uint64_t fork;
    const uint32_t one[] = {1};
    stage_start(&stage, 10, 10);
    uint64_t id = prompt_sealed(&stage, 1);
    STAGE_OK(&stage, stage_try_fork(&stage, id, PROMPT, 1, "", &fork));
    stage_append(&stage, fork, PROMPT, one, 1, false); /* a tail of its own */
    stage_fill(&stage, fork, 2);
    STAGE_OK(&stage, stage_try_swap_out(&stage, fork, &reply));
    cr_expect_eq(reply.moved_blocks, 1);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 6);
    stage_verify(&stage, fork, 0, PROMPT, 1);
    stage_verify(&stage, fork, PROMPT, PROMPT + 1, 2);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &reply));
    cr_expect_eq(reply.moved_blocks, 6, "now nobody else needs them there");
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 0);
    STAGE_OK(&stage, stage_try_swap_in(&stage, fork, &reply));
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &reply));
    stage_verify(&stage, id, 0, PROMPT, 1);
    stage_verify(&stage, fork, PROMPT, PROMPT + 1, 2);
    stage_close(&stage, id);
    stage_close(&stage, fork);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_HOST), 0);
    stage_stop(&stage);
}

Test(swap, where_the_host_is_home_only_the_state_changes)
{
    struct stage stage;
    struct kvk_swap_reply reply;
    uint32_t tokens[6];
    stage_start(&stage, 0, 10);
    house_tokens(tokens, 6, 1);
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &reply));
    cr_expect_eq(reply.moved_blocks, 0);
    cr_expect_eq(reply.sequence.state, KVK_SEQUENCE_SWAPPED_OUT);
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &reply));
    cr_expect_eq(reply.sequence.state, KVK_SEQUENCE_RUNNING);
    stage_verify(&stage, id, 0, 6, 1);
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* ---- While it runs ---- */

struct between {
    struct stage *stage;
    uint64_t id;
    int calls;
    uint64_t other;
};

static void call_it(void *context)
{
    struct between *between = context;
    struct stage *stage = between->stage;
    struct kvk_sequence_reply reply;
    kvk_mover_test_hook(stage->house.cache->mover, NULL, NULL);
    between->calls++;
    cr_expect_eq(stage_try_truncate(stage, between->id, PROMPT, 0, &reply), KVK_UNAVAILABLE);
    cr_expect_eq(stage->house.error.cause, KVK_CAUSE_BUSY);
    cr_expect_gt(stage->house.error.retry_after_ms, 0);
    /* Others take what is free, and write there. */
    between->other = prompt_sealed(stage, 7);
    /* And find the very blocks that are on their way. */
    uint32_t tokens[PROMPT];
    house_tokens(tokens, PROMPT, 100);
    struct kvk_sequence_reply hit;
    const struct kvk_open_request request = {
        .prompt = {.tokens = tokens, .token_count = 20}, .leave_on_host = true, .tier = -1};
    STAGE_OK(stage, stage_try_open(stage, &request, &hit));
    cr_expect_eq(hit.cached_tokens, 20);
    stage_verify(stage, hit.sequence_id, 0, 20, 1);
    stage_close(stage, hit.sequence_id);
}

Test(swap, others_run_while_bytes_move)
{
    struct stage stage;
    struct kvk_swap_reply reply;
    stage_start(&stage, 16, 16);
    struct between between = {.stage = &stage, .id = prompt_sealed(&stage, 1)};
    for (int round = 0; round < 2; round++) {
        kvk_mover_test_hook(stage.house.cache->mover, call_it, &between);
        if (round == 0) {
            STAGE_OK(&stage, stage_try_swap_out(&stage, between.id, &reply));
        } else {
            STAGE_OK(&stage, stage_try_swap_in(&stage, between.id, &reply));
        }
        cr_expect_eq(between.calls, round + 1);
        stage_check(&stage);
        stage_verify(&stage, between.id, 0, PROMPT, 1);
        stage_verify(&stage, between.other, 0, PROMPT, 7);
        stage_close(&stage, between.other);
    }
    stage_close(&stage, between.id);
    stage_stop(&stage);
}

static void end_it(void *context)
{
    struct stage *stage = context;
    kvk_mover_test_hook(stage->house.cache->mover, NULL, NULL);
    kvk_session_end(stage->house.cache, stage->session);
}

Test(swap, a_client_that_goes_meanwhile_loses_nothing_but_itself)
{
    for (int round = 0; round < 2; round++) {
        struct stage stage;
        struct kvk_swap_reply reply;
        stage_start(&stage, 10, 10);
        uint64_t id = prompt_sealed(&stage, 1);
        if (round == 1) {
            STAGE_OK(&stage, stage_try_swap_out(&stage, id, &reply));
        }
        kvk_mover_test_hook(stage.house.cache->mover, end_it, &stage);
        cr_expect_eq(round == 0 ? stage_try_swap_out(&stage, id, &reply)
                                : stage_try_swap_in(&stage, id, &reply),
                     KVK_ABORTED);
        kvk_cache_maintain(stage.house.cache);
        cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
        cr_expect_eq(stage_bound(&stage, KVK_TIER_HOST), 0);
        cr_expect_eq(stage.house.cache->instance_count, 0);
        stage_check(&stage);
        stage.session = house_session(&stage.house);
        uint32_t tokens[PROMPT];
        house_tokens(tokens, PROMPT, 100);
        id = stage_open(&stage, tokens, PROMPT).sequence_id; /* what was sealed is cached */
        stage_verify(&stage, id, 0, 20, 1);
        stage_stop(&stage);
    }
}
