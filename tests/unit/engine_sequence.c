/* Sequences, call by call: repeats, refusals, what is left behind, and what comes between. */
#include "tests/engine_stage.h"

static struct kvk_request_id request_id(const char *text)
{
    struct kvk_request_id id = {.size = (uint32_t)strlen(text)};
    memcpy(id.bytes, text, id.size);
    return id;
}

/* ---- Open ---- */

Test(sequence, open_is_repeatable)
{
    struct stage stage;
    uint32_t tokens[6];
    struct kvk_sequence_reply first;
    struct kvk_sequence_reply again;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 6, 1);
    const struct kvk_open_request request = {
        .prompt = {.tokens = tokens, .token_count = 6}, .request_id = request_id("r1"), .tier = -1};
    STAGE_OK(&stage, stage_try_open(&stage, &request, &first));
    STAGE_OK(&stage, stage_try_open(&stage, &request, &again));
    cr_expect_eq(again.sequence_id, first.sequence_id);
    cr_expect_eq(again.length, 6);
    cr_expect_eq(stage.tables.parts[0].count, 2);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 2);
    cr_expect_eq(stage_stats(&stage).opens, 1);
    stage_close(&stage, first.sequence_id);
    STAGE_OK(&stage, stage_try_open(&stage, &request, &again));
    cr_expect_neq(again.sequence_id, first.sequence_id);
    stage_stop(&stage);
}

Test(sequence, open_leaves_nothing_behind_when_it_fails)
{
    struct stage stage;
    uint32_t tokens[40];
    struct kvk_sequence_reply reply;
    struct kvk_index_stats before;
    struct kvk_index_stats after;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 40, 1);
    stage_cache(&stage, tokens, 8, 1);
    kvk_index_stats(stage.house.cache->index, &before);
    static const uint8_t salt[] = {9};
    struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = 40}, .tier = -1};
    cr_expect_eq(stage_try_open(&stage, &request, &reply), KVK_EXHAUSTED);
    request.prompt.salt = salt;
    request.prompt.salt_size = 1;
    cr_expect_eq(stage_try_open(&stage, &request, &reply), KVK_EXHAUSTED);
    request.prompt = (struct kvk_prompt){.tokens = tokens, .token_count = 4};
    request.growth_tokens = 40;
    cr_expect_eq(stage_try_open(&stage, &request, &reply), KVK_EXHAUSTED);
    request.growth_tokens = 0;
    request.tier = KVK_TIER_HOST;
    cr_expect_eq(stage_try_open(&stage, &request, &reply), KVK_INVALID);
    kvk_index_stats(stage.house.cache->index, &after);
    cr_expect_eq(after.roots, before.roots);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    cr_expect_eq(stage_hit(&stage, tokens, 8, false), 8);
    cr_expect_eq(stage.house.cache->sequence_table.count, 0);
    stage_stop(&stage);
}

Test(sequence, growth_is_kept_for_its_owner)
{
    struct stage stage;
    uint32_t tokens[32];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 32, 1);
    const struct kvk_open_request growing = {
        .prompt = {.tokens = tokens, .token_count = 8}, .growth_tokens = 12, .tier = -1};
    STAGE_OK(&stage, stage_try_open(&stage, &growing, &reply));
    uint64_t id = reply.sequence_id;
    const struct kvk_open_request other = {.prompt = {.tokens = tokens + 8, .token_count = 16},
                                           .tier = -1};
    cr_expect_eq(stage_try_open(&stage, &other, &reply), KVK_EXHAUSTED);
    uint64_t small = stage_open(&stage, tokens + 8, 12).sequence_id; /* what is not kept */
    stage_append(&stage, id, 8, tokens + 8, 12, false);
    cr_expect_eq(stage_try_append(&stage, id, 20, tokens + 20, 1, false, &reply), KVK_EXHAUSTED);
    stage_close(&stage, small);
    stage_append(&stage, id, 20, tokens + 20, 1, false);
    stage_close(&stage, id);
    cr_expect_eq(stage.house.cache->tiers[KVK_TIER_DEVICE].growth_bytes, 0);
    stage_stop(&stage);
}

Test(sequence, host_blocks_come_to_the_device_as_far_as_there_is_room)
{
    struct stage stage;
    uint32_t tokens[16];
    uint32_t others[24];
    struct kvk_swap_reply swap;
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 8);
    house_tokens(tokens, 16, 1);
    uint64_t id = stage_sealed(&stage, tokens, 16, 1);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swap));
    stage_close(&stage, id);

    struct kvk_open_request request = {
        .prompt = {.tokens = tokens, .token_count = 16}, .leave_on_host = true, .tier = -1};
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    cr_expect_eq(reply.cached_tokens, 16);
    for (int i = 0; i < 4; i++) {
        cr_expect_eq(stage.tables.parts[0].tiers[i], 2);
    }
    stage_verify(&stage, reply.sequence_id, 0, 16, 1);
    stage_close(&stage, reply.sequence_id);

    house_tokens(others, 24, 100);
    uint64_t busy = stage_open(&stage, others, 24).sequence_id;
    request.leave_on_host = false;
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    cr_expect_eq(reply.cached_tokens, 16);
    cr_expect_eq(stage_stats(&stage).refusals, 0, "nobody was refused");
    for (int i = 0; i < 4; i++) { /* the head first */
        cr_expect_eq(stage.tables.parts[0].tiers[i], i < 2 ? 1 : 2);
    }
    stage_verify(&stage, reply.sequence_id, 0, 16, 1);
    stage_close(&stage, reply.sequence_id);
    stage_close(&stage, busy);

    stage.house.caller.may_block = false;
    cr_expect_eq(stage_try_open(&stage, &request, &reply), KVK_WOULD_BLOCK);
    stage.house.caller.may_block = true;
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    stage_stop(&stage);
}

static void end_session(void *context)
{
    struct stage *stage = context;
    kvk_mover_test_hook(stage->house.cache->mover, NULL, NULL);
    kvk_session_end(stage->house.cache, stage->session);
}

Test(sequence, open_gives_all_back_where_its_session_ends_meanwhile)
{
    struct stage stage;
    uint32_t tokens[16];
    struct kvk_swap_reply swap;
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 8);
    house_tokens(tokens, 16, 1);
    uint64_t id = stage_sealed(&stage, tokens, 8, 1);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swap));
    kvk_mover_test_hook(stage.house.cache->mover, end_session, &stage);
    const struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = 16},
                                             .tier = -1};
    cr_expect_eq(stage_try_open(&stage, &request, &reply), KVK_ABORTED);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_SESSION_ENDED);
    kvk_cache_maintain(stage.house.cache);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_HOST), 0);
    cr_expect_eq(stage.house.cache->sequence_table.count, 0);
    cr_expect_eq(stage.house.cache->instance_count, 0);
    stage_stop(&stage);
}

/* ---- Append ---- */

Test(sequence, append_is_repeatable_and_exact)
{
    struct stage stage;
    uint32_t tokens[20];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 20, 1);
    uint64_t id = stage_sealed(&stage, tokens, 5, 1);
    reply = stage_append(&stage, id, 5, tokens + 5, 8, false);
    cr_expect_eq(reply.grant_first, 5);
    cr_expect_eq(stage.tables.parts[0].first_block, 2, "only what is new");
    cr_expect_eq(stage.tables.parts[0].count, 2);
    uint32_t slot = stage.tables.parts[0].slots[0];
    reply = stage_append(&stage, id, 5, tokens + 5, 8, false);
    cr_expect_eq(reply.length, 13);
    cr_expect_eq(stage.tables.parts[0].first_block, 1);
    cr_expect_eq(stage.tables.parts[0].slots[1], slot);
    cr_expect_eq(stage_try_append(&stage, id, 5, tokens + 5, 7, false, &reply), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_LENGTH_MISMATCH);
    cr_expect_eq(stage.house.error.value, 13);
    cr_expect_eq(stage_try_append(&stage, id, 5, tokens + 6, 8, false, &reply), KVK_PRECONDITION);
    cr_expect_eq(stage_try_append(&stage, id, 13, tokens, 0, false, &reply), KVK_INVALID);
    stage_append(&stage, id, 13, tokens + 13, 1, true);
    cr_expect_eq(stage_try_append(&stage, id, 14, tokens + 14, 1, false, &reply), KVK_PRECONDITION,
                 "no committed token after a draft");
    cr_expect_eq(stage_get(&stage, id).length, 14);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(sequence, append_into_a_sealed_block_copies_it)
{
    struct stage stage;
    uint32_t tokens[8];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    uint64_t id = stage_sealed(&stage, tokens, 8, 1);
    uint32_t sealed = stage_block(&stage, id, 1);
    STAGE_OK(&stage, stage_try_truncate(&stage, id, 8, 6, &reply));
    cr_expect_eq(stage_block(&stage, id, 1), sealed);
    const uint32_t other[] = {77, 78};
    stage.house.caller.may_block = false;
    cr_expect_eq(stage_try_append(&stage, id, 6, other, 2, false, &reply), KVK_WOULD_BLOCK);
    cr_expect_eq(stage_get(&stage, id).length, 6);
    stage.house.caller.may_block = true;
    reply = stage_append(&stage, id, 6, other, 2, false);
    cr_expect_eq(stage.tables.parts[0].first_block, 1, "the tail has moved");
    cr_expect_neq(stage_block(&stage, id, 1), sealed);
    stage_fill(&stage, id, 2);
    stage_verify(&stage, id, 0, 6, 1);
    stage_verify(&stage, id, 6, 8, 2);
    cr_expect_eq(stage_hit(&stage, tokens, 8, false), 8, "the first path is still there");
    uint64_t first = stage_open(&stage, tokens, 8).sequence_id;
    stage_verify(&stage, first, 0, 8, 1);
    stage_close(&stage, first);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(sequence, append_that_fails_to_copy_changes_nothing)
{
    struct stage stage;
    uint32_t tokens[8];
    uint64_t fork;
    struct kvk_sequence_reply reply;
    const uint32_t one[] = {9};
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    STAGE_OK(&stage, stage_try_fork(&stage, id, 6, 1, "", &fork));
    kvk_mover_test_fail_next(stage.house.cache->mover);
    cr_expect_neq(stage_try_append(&stage, fork, 6, one, 1, false, &reply), KVK_OK);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 2);
    cr_expect_eq(stage_get(&stage, fork).length, 6);
    stage_append(&stage, fork, 6, one, 1, false);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 3);
    stage_close(&stage, fork);
    /* Nobody shares the tail now: it is written in place. */
    uint32_t tail = stage_block(&stage, id, 1);
    stage_append(&stage, id, 6, one, 1, false);
    cr_expect_eq(stage_block(&stage, id, 1), tail);
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* ---- Seal ---- */

Test(sequence, a_block_is_visible_when_every_rank_has_sealed_it)
{
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    uint32_t tokens[8];
    geometry.tensor_shards = 2;
    house_init(&stage.house);
    stage_start_with(&stage, &geometry, 8, 0);
    house_tokens(tokens, 8, 1);
    kvk_session_end(stage.house.cache, stage.session);
    struct kvk_hello hello = house_hello();
    struct kvk_welcome welcome = house_begin(&stage.house, &hello);
    stage.session = welcome.session_id;
    hello.rank = 1;
    hello.instance_token =
        (struct kvk_view){.data = welcome.instance_token, .size = KVK_TOKEN_SIZE};
    uint64_t second = house_begin(&stage.house, &hello).session_id;
    hello.rank = 2;
    uint64_t third = house_begin(&stage.house, &hello).session_id;

    uint64_t id = stage_open(&stage, tokens, 8).sequence_id;
    struct kvk_seal_request request = {
        .session_id = stage.session, .sequence_id = id, .expected_length = 8, .length = 8};
    struct kvk_seal_reply reply;
    STAGE_OK(&stage, stage_try_write(&stage, id, 0, 0, 0, 8, 1));
    STAGE_OK(&stage, kvk_sequence_seal(stage.house.cache, &stage.house.caller, &request, &reply,
                                       &stage.house.error));
    cr_expect_eq(reply.sealed_tokens, 0);
    cr_expect_eq(stage_hit(&stage, tokens, 8, false), 0);
    request.session_id = second;
    request.length = 6;
    STAGE_OK(&stage, stage_try_write(&stage, id, 0, 1, 0, 8, 1));
    STAGE_OK(&stage, kvk_sequence_seal(stage.house.cache, &stage.house.caller, &request, &reply,
                                       &stage.house.error));
    cr_expect_eq(reply.sealed_tokens, 6);
    cr_expect_eq(reply.new_blocks, 1);
    cr_expect_eq(stage_hit(&stage, tokens, 8, false), 4);
    request.length = 3; /* a lower one is done already */
    STAGE_OK(&stage, kvk_sequence_seal(stage.house.cache, &stage.house.caller, &request, &reply,
                                       &stage.house.error));
    cr_expect_eq(reply.sealed_tokens, 6);
    cr_expect_eq(stage_try_write(&stage, id, 0, 0, 7, 8, 1), KVK_PRECONDITION,
                 "rank 0 has sealed all of it");
    STAGE_OK(&stage, stage_try_write(&stage, id, 0, 1, 6, 8, 1));
    request.session_id = third;
    cr_expect_eq(kvk_sequence_seal(stage.house.cache, &stage.house.caller, &request, &reply,
                                   &stage.house.error),
                 KVK_INVALID, "the space has two ranks");
    request.length = 9;
    request.session_id = second;
    cr_expect_eq(kvk_sequence_seal(stage.house.cache, &stage.house.caller, &request, &reply,
                                   &stage.house.error),
                 KVK_OUT_OF_RANGE);
    request.length = 8;
    STAGE_OK(&stage, kvk_sequence_seal(stage.house.cache, &stage.house.caller, &request, &reply,
                                       &stage.house.error));
    cr_expect_eq(stage_hit(&stage, tokens, 8, false), 8);
    stage_verify(&stage, id, 0, 8, 1);
    kvk_session_end(stage.house.cache, second);
    kvk_session_end(stage.house.cache, third);
    stage_stop(&stage);
}

Test(sequence, a_rank_that_ends_aborts_what_was_not_sealed)
{
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    uint32_t tokens[12];
    geometry.tensor_shards = 2;
    house_init(&stage.house);
    stage_start_with(&stage, &geometry, 8, 0);
    house_tokens(tokens, 12, 1);
    kvk_session_end(stage.house.cache, stage.session);
    struct kvk_hello hello = house_hello();
    struct kvk_welcome welcome = house_begin(&stage.house, &hello);
    stage.session = welcome.session_id;
    hello.rank = 1;
    hello.instance_token =
        (struct kvk_view){.data = welcome.instance_token, .size = KVK_TOKEN_SIZE};
    uint64_t second = house_begin(&stage.house, &hello).session_id;
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    stage_append(&stage, id, 6, tokens + 6, 6, false);
    kvk_session_end(stage.house.cache, second);
    struct kvk_sequence_reply reply = stage_get(&stage, id);
    cr_expect_eq(reply.length, 6);
    cr_expect_eq(reply.sealed_tokens, 6);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 2);
    stage_verify(&stage, id, 0, 6, 1);
    stage_append(&stage, id, 6, tokens + 6, 1, false);
    stage_fill(&stage, id, 1);
    stage_verify(&stage, id, 0, 7, 1);
    stage_stop(&stage);
}

static struct kvk_seal_reply seal_all(struct stage *stage, uint64_t id, uint64_t length)
{
    const struct kvk_seal_request request = {.session_id = stage->session,
                                             .sequence_id = id,
                                             .expected_length = length,
                                             .length = length,
                                             .all_ranks = true};
    struct kvk_seal_reply reply;
    STAGE_OK(stage, kvk_sequence_seal(stage->house.cache, &stage->house.caller, &request, &reply,
                                      &stage->house.error));
    return reply;
}

Test(sequence, the_later_copy_stays_private_and_is_compared)
{
    struct stage stage;
    uint32_t tokens[8];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    for (uint32_t tag = 1; tag <= 2; tag++) {
        uint64_t first = stage_open(&stage, tokens, 8).sequence_id;
        uint64_t second = stage_open(&stage, tokens, 8).sequence_id;
        if (tag == 2) { /* cached by now: computed anew all the same */
            stage_close(&stage, first);
            stage_close(&stage, second);
            const struct kvk_open_request request = {
                .prompt = {.tokens = tokens, .token_count = 8}, .no_lookup = true, .tier = -1};
            struct kvk_sequence_reply reply;
            STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
            second = reply.sequence_id;
            STAGE_OK(&stage, stage_try_write(&stage, second, 0, 0, 0, 8, tag));
        } else {
            stage_fill(&stage, first, 1);
            STAGE_OK(&stage, stage_try_write(&stage, second, 0, 0, 0, 8, 1));
        }
        struct kvk_seal_reply sealed = seal_all(&stage, second, 8);
        cr_expect_eq(sealed.known_blocks, 2);
        cr_expect_eq(sealed.new_blocks, 0);
        cr_expect_eq(stage_stats(&stage).duplicate_blocks, 2 * tag);
        cr_expect_eq(stage_stats(&stage).wrong_reuse, tag == 2 ? 2 : 0);
        stage_verify(&stage, second, 0, 8, tag);
        stage_close(&stage, second);
        if (tag == 1) {
            stage_close(&stage, first);
        }
    }
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 2);
    uint64_t id = stage_open(&stage, tokens, 8).sequence_id;
    stage_verify(&stage, id, 0, 8, 1);
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* K/V computed twice may differ by rounding. */
Test(sequence, rounding_is_no_wrong_reuse)
{
    struct stage stage;
    uint32_t tokens[4];
    float values[256];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 4, 1);
    for (int copy = 0; copy < 3; copy++) {
        const struct kvk_open_request request = {
            .prompt = {.tokens = tokens, .token_count = 4}, .no_lookup = true, .tier = -1};
        struct kvk_sequence_reply reply;
        STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
        for (int i = 0; i < 256; i++) {
            values[i] = (float)(i % 17 - 8) * (copy == 1 ? 1.0001F : 1.0F) +
                        (copy == 2 && i == 200 ? 60.0F : 0.0F);
        }
        const struct kvk_write_piece piece = {.data = (const uint8_t *)values,
                                              .size_bytes = sizeof(values)};
        STAGE_OK(&stage, kvk_sequence_write(stage.house.cache, &stage.house.caller, stage.session,
                                            reply.sequence_id, &piece, &stage.house.error));
        (void)seal_all(&stage, reply.sequence_id, 4);
        stage_close(&stage, reply.sequence_id);
        cr_expect_eq(stage_stats(&stage).wrong_reuse, copy == 2 ? 1 : 0);
    }
    stage_stop(&stage);
}

Test(sequence, what_is_large_is_hashed_where_calls_may_wait)
{
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    uint32_t tokens[8];
    struct kvk_seal_reply reply;
    geometry.head_size_k = 1024;
    geometry.head_size_v = 1024;
    house_init(&stage.house);
    stage_start_with(&stage, &geometry, 8, 0);
    house_tokens(tokens, 8, 1);
    uint64_t id = stage_open(&stage, tokens, 8).sequence_id;
    const struct kvk_seal_request request = {.session_id = stage.session,
                                             .sequence_id = id,
                                             .expected_length = 8,
                                             .length = 8,
                                             .all_ranks = true};
    stage.house.caller.may_block = false;
    cr_expect_eq(kvk_sequence_seal(stage.house.cache, &stage.house.caller, &request, &reply,
                                   &stage.house.error),
                 KVK_WOULD_BLOCK);
    cr_expect_eq(stage_get(&stage, id).sealed_tokens, 0);
    stage.house.caller.may_block = true;
    STAGE_OK(&stage, kvk_sequence_seal(stage.house.cache, &stage.house.caller, &request, &reply,
                                       &stage.house.error));
    cr_expect_eq(reply.new_blocks, 2);
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* ---- Cutting ---- */

Test(sequence, cuts_are_repeatable)
{
    struct stage stage;
    uint32_t tokens[16];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 16, 1);
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    stage_append(&stage, id, 6, tokens + 6, 8, true);
    STAGE_OK(&stage, stage_try_commit(&stage, id, 14, 3, &reply));
    cr_expect_eq(reply.length, 9);
    cr_expect_eq(reply.committed_tokens, 9);
    cr_expect_eq(reply.freed_blocks, 1);
    STAGE_OK(&stage, stage_try_commit(&stage, id, 14, 3, &reply));
    cr_expect_eq(reply.length, 9);
    cr_expect_eq(stage_try_commit(&stage, id, 14, 2, &reply), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_LENGTH_MISMATCH);
    STAGE_OK(&stage, stage_try_truncate(&stage, id, 9, 5, &reply));
    cr_expect_eq(reply.sealed_tokens, 5);
    STAGE_OK(&stage, stage_try_truncate(&stage, id, 9, 5, &reply));
    cr_expect_eq(reply.length, 5);
    cr_expect_eq(stage_try_truncate(&stage, id, 9, 4, &reply), KVK_PRECONDITION);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(sequence, a_commit_makes_sealed_drafts_visible)
{
    struct stage stage;
    uint32_t tokens[12];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 12, 1);
    uint64_t id = stage_sealed(&stage, tokens, 2, 1);
    stage_append(&stage, id, 2, tokens + 2, 10, true);
    stage_fill(&stage, id, 1);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 0);
    STAGE_OK(&stage, stage_try_commit(&stage, id, 12, 7, &reply));
    cr_expect_eq(reply.length, 9);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 8);
    stage_verify(&stage, id, 0, 9, 1);
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* ---- Fork ---- */

Test(sequence, fork_is_repeatable_and_bounded)
{
    struct stage stage;
    uint32_t tokens[6];
    uint64_t first[3];
    uint64_t again[3];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 6, 1);
    uint64_t id = stage_open(&stage, tokens, 6).sequence_id;
    cr_expect_eq(stage_try_fork(&stage, id, 6, 3, "f", first), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_GRANT_UNWRITTEN);
    stage_fill(&stage, id, 1);
    cr_expect_eq(stage_try_fork(&stage, id, 5, 3, "f", first), KVK_PRECONDITION);
    cr_expect_eq(stage_try_fork(&stage, id, 6, 0, "f", first), KVK_INVALID);
    cr_expect_eq(stage_try_fork(&stage, id, 6, stage.house.config.forks + 1, "f", first),
                 KVK_INVALID);
    STAGE_OK(&stage, stage_try_fork(&stage, id, 6, 3, "f", first));
    STAGE_OK(&stage, stage_try_fork(&stage, id, 6, 3, "f", again));
    cr_expect_eq(memcmp(first, again, sizeof(first)), 0);
    cr_expect_eq(stage.house.cache->sequence_table.count, 4);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 2);
    stage_close(&stage, first[1]);
    cr_expect_eq(stage_try_fork(&stage, id, 6, 3, "f", again), KVK_PRECONDITION);
    stage_stop(&stage);
}

Test(sequence, fork_is_all_or_nothing)
{
    struct stage stage;
    uint32_t tokens[6];
    uint64_t ids[4];
    const struct kvk_geometry geometry = house_geometry();
    house_init(&stage.house);
    stage.house.config.sequences = 4;
    stage_start_with(&stage, &geometry, 8, 0);
    house_tokens(tokens, 6, 1);
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    cr_expect_eq(stage_try_fork(&stage, id, 6, 4, "", ids), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.cache->sequence_table.count, 1);
    STAGE_OK(&stage, stage_try_fork(&stage, id, 6, 3, "", ids));
    struct kvk_sequence_reply reply;
    const struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = 6},
                                             .tier = -1};
    cr_expect_eq(stage_try_open(&stage, &request, &reply), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_LIMIT);
    stage_stop(&stage);
}

Test(sequence, whoever_writes_first_copies_the_tail)
{
    struct stage stage;
    uint32_t tokens[6];
    uint64_t fork;
    uint64_t ticket;
    const uint32_t one[] = {50};
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 6, 1);
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    STAGE_OK(&stage, stage_try_fork(&stage, id, 6, 1, "", &fork));
    uint32_t tail = stage_block(&stage, fork, 1);
    stage_append(&stage, id, 6, one, 1, false); /* the parent, this time */
    cr_expect_eq(stage_block(&stage, fork, 1), tail);
    cr_expect_neq(stage_block(&stage, id, 1), tail);

    /* What is its own alone stays in place, though a worker copies there under a ticket. */
    const struct kvk_transfer_request request = {.session_id = stage.session,
                                                 .sequence_id = id,
                                                 .write = true,
                                                 .first_block = 1,
                                                 .block_count = 1};
    STAGE_OK(&stage, kvk_transfer_begin(stage.house.cache, &stage.house.caller, &request, &ticket,
                                        &stage.tables, &stage.house.error));
    tail = stage_block(&stage, id, 1);
    stage_append(&stage, id, 7, one, 1, false);
    cr_expect_eq(stage_block(&stage, id, 1), tail);
    STAGE_OK(&stage, kvk_transfer_end(stage.house.cache, &stage.house.caller, stage.session, ticket,
                                      &stage.house.error));
    stage_fill(&stage, id, 2);
    stage_verify(&stage, id, 0, 6, 1);
    stage_verify(&stage, id, 6, 8, 2);
    stage_verify(&stage, fork, 0, 6, 1);
    stage_stop(&stage);
}

/* ---- Finding ---- */

Test(sequence, belongs_to_its_instance)
{
    struct stage stage;
    uint32_t tokens[4];
    struct kvk_sequence_reply reply;
    struct kvk_close_reply closed;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 4, 1);
    uint64_t id = stage_sealed(&stage, tokens, 4, 1);
    uint64_t owner = stage.session;
    stage.session = house_session(&stage.house);
    cr_expect_eq(stage_try_truncate(&stage, id, 4, 0, &reply), KVK_PERMISSION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_NOT_OWNER);
    cr_expect_eq(kvk_sequence_close(stage.house.cache, &stage.house.caller, stage.session, &id, 1,
                                    &closed, &stage.house.error),
                 KVK_PERMISSION);
    kvk_session_end(stage.house.cache, stage.session);
    stage.session = owner;
    cr_expect_eq(stage_get(&stage, id).length, 4);
    const uint64_t some[] = {id, id + 7777};
    cr_expect_eq(kvk_sequence_close(stage.house.cache, &stage.house.caller, stage.session, some, 2,
                                    &closed, &stage.house.error),
                 KVK_NOT_FOUND);
    STAGE_OK(&stage, kvk_sequence_close(stage.house.cache, &stage.house.caller, stage.session, some,
                                        1, &closed, &stage.house.error));
    cr_expect_eq(closed.cached_blocks, 1);
    cr_expect_eq(closed.freed_blocks, 0);
    stage_stop(&stage);
}
