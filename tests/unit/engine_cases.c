/*
 * Faults that people who run KV caches have met, as black-box checks of the engine. Each test is
 * named after the case it plays. A block holds 4 tokens unless the case says otherwise. Here:
 * identity, boundaries and windows.
 */
#include "tests/engine_attend.h"

/* ---- A: no false hit ---- */

static uint64_t open_adapter(struct stage *stage, const char *name, const char *id,
                             const char *version)
{
    struct kvk_space_request request = {.block_tokens = 4, .group_count = 1};
    struct kvk_space_reply reply;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view("llama");
    request.identity.parts[KVK_IDENTITY_ADAPTER_NAME - 1] = house_view(name);
    request.identity.parts[KVK_IDENTITY_ADAPTER_ID - 1] = house_view(id);
    request.identity.parts[KVK_IDENTITY_ADAPTER_VERSION - 1] = house_view(version);
    request.groups[0] = stage->geometry;
    STAGE_OK(stage, kvk_space_open(stage->house.cache, &stage->house.caller, &request, &reply,
                                   &stage->house.error));
    return reply.space_id;
}

Test(cases, a1_adapters_of_one_name_do_not_share)
{
    struct stage stage;
    uint32_t tokens[12];
    stage_start(&stage, 16, 0);
    uint64_t count = stage_range(tokens, 1, 12);
    uint64_t first = open_adapter(&stage, "x", "1", "");
    stage.space = first;
    stage_cache(&stage, tokens, count, 1);

    stage.space = open_adapter(&stage, "x", "2", "");
    cr_expect_eq(stage_hit(&stage, tokens, count, false), 0);
    stage.space = open_adapter(&stage, "x", "1", "2");
    cr_expect_eq(stage_hit(&stage, tokens, count, false), 0);
    stage.space = open_adapter(&stage, "", "", "");
    cr_expect_eq(stage_hit(&stage, tokens, count, false), 0);
    stage.space = first;
    cr_expect_eq(stage_hit(&stage, tokens, count, false), 12);
    stage_stop(&stage);
}

/* Six text tokens and ten placeholders for one image, from token `first` on. */
static uint64_t image_hit(struct stage *stage, const uint32_t *tokens, uint64_t first,
                          uint64_t count, uint8_t digest_first, bool cache_it)
{
    struct kvk_content_span span = {
        .first = first, .count = count, .digest_size = 32, .digest = {digest_first}};
    memset(span.digest + 30, 0xcd, 2); /* digests that end alike */
    const struct kvk_prompt prompt = {
        .tokens = tokens, .token_count = 16, .spans = &span, .span_count = 1};
    if (cache_it) {
        const struct kvk_open_request request = {.prompt = prompt, .tier = -1};
        struct kvk_sequence_reply reply;
        STAGE_OK(stage, stage_try_open(stage, &request, &reply));
        stage_fill(stage, reply.sequence_id, 1);
        stage_close(stage, reply.sequence_id);
    }
    const struct kvk_lookup_request request = {.space_id = stage->space, .prompt = prompt};
    struct kvk_lookup_reply reply;
    STAGE_OK(stage, kvk_lookup(stage->house.cache, &stage->house.caller, &request, &reply,
                               &stage->house.error));
    return reply.cached_tokens;
}

Test(cases, a3_images_are_told_apart)
{
    struct stage stage;
    uint32_t tokens[16];
    stage_start(&stage, 16, 0);
    for (uint32_t i = 0; i < 16; i++) {
        tokens[i] = i < 6 ? i + 1 : 9000;
    }
    cr_expect_eq(image_hit(&stage, tokens, 6, 10, 0x11, true), 16);
    cr_expect_eq(image_hit(&stage, tokens, 6, 10, 0x22, false), 4);
    cr_expect_leq(image_hit(&stage, tokens, 7, 9, 0x11, false), 4);
    cr_expect_eq(image_hit(&stage, tokens, 6, 10, 0x11, false), 16);
    stage_stop(&stage);
}

static void expect_altered_misses(struct stage *stage, bool constant)
{
    uint32_t base[32];
    uint32_t altered[32];
    struct kvk_geometry geometry = house_geometry();
    const struct kvk_test_control control = {.constant_hash = constant};
    geometry.block_tokens = 16;
    house_init(&stage->house);
    stage_start_with(stage, &geometry, 64, 0);
    STAGE_OK(stage, kvk_cache_test_control(stage->house.cache, &control, &stage->house.error));
    stage->space = house_space_of(&stage->house, &stage->house.caller, "a4", &geometry, 1);
    house_tokens(base, 32, 1000);
    stage_cache(stage, base, 32, 1);
    const struct {
        int third, fourth;
    } changes[] = {{31, -1}, {1, -31}};
    for (size_t block = 0; block < 2; block++) {
        for (size_t i = 0; i < 2; i++) {
            memcpy(altered, base, sizeof(base));
            altered[block * 16 + 3] += (uint32_t)changes[i].third;
            altered[block * 16 + 4] += (uint32_t)changes[i].fourth;
            cr_expect_eq(stage_hit(stage, altered, 32, false), block * 16);
        }
    }
    cr_expect_eq(stage_hit(stage, base, 32, false), 32);
    /* Two prompts whose keys are alike live side by side. */
    memcpy(altered, base, sizeof(base));
    altered[3]++;
    stage_cache(stage, altered, 32, 2);
    cr_expect_eq(stage_hit(stage, altered, 32, false), 32);
    uint64_t id = stage_open(stage, base, 32).sequence_id;
    stage_verify(stage, id, 0, 32, 1);
    stage_close(stage, id);
    stage_stop(stage);
}

Test(cases, a4_hashes_only_find_candidates)
{
    struct stage stage;
    expect_altered_misses(&stage, false);
}

Test(cases, a4_constant_hash)
{
    struct stage stage;
    expect_altered_misses(&stage, true);
}

Test(cases, a8_nothing_is_found_before_it_is_whole)
{
    struct stage stage;
    uint32_t tokens[8];
    stage_start(&stage, 8, 0);
    uint64_t count = stage_range(tokens, 1, 8);
    uint64_t free0 = 8 - stage_used(&stage, KVK_TIER_DEVICE);
    uint64_t id = stage_open(&stage, tokens, count).sequence_id;
    STAGE_OK(&stage, stage_try_write(&stage, id, 0, 0, 0, 4, 1));
    cr_expect_eq(stage_hit(&stage, tokens, count, false), 0);
    stage_close(&stage, id);
    cr_expect_eq(stage_hit(&stage, tokens, count, false), 0);
    cr_expect_eq(8 - stage_used(&stage, KVK_TIER_DEVICE), free0);
    stage_stop(&stage);
}

/* ---- B: boundaries, partial blocks, windows ---- */

Test(cases, b1_leave_the_last_token_to_compute)
{
    struct stage stage;
    uint32_t tokens[17];
    stage_start(&stage, 16, 0);
    stage_range(tokens, 1, 17);
    stage_cache(&stage, tokens, 16, 1);
    cr_expect_eq(stage_hit(&stage, tokens, 15, true), 12);
    cr_expect_eq(stage_hit(&stage, tokens, 16, true), 12);
    cr_expect_eq(stage_hit(&stage, tokens, 17, true), 16);
    for (uint64_t count = 15; count <= 17; count++) {
        const struct kvk_open_request request = {
            .prompt = {.tokens = tokens, .token_count = count}, .leave_last = true, .tier = -1};
        struct kvk_sequence_reply reply;
        STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
        cr_expect_lt(reply.cached_tokens, count);
        cr_expect_eq(reply.grant_first, reply.cached_tokens);
        stage_fill(&stage, reply.sequence_id, 1);
        stage_verify(&stage, reply.sequence_id, 0, count, 1);
        stage_close(&stage, reply.sequence_id);
    }
    stage_stop(&stage);
}

Test(cases, b2_forks_do_not_tear_their_tail)
{
    struct stage stage;
    uint32_t tokens[6];
    uint64_t forks[4];
    stage_start(&stage, 16, 0);
    stage_range(tokens, 1, 6);
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    STAGE_OK(&stage, stage_try_fork(&stage, id, 6, 4, "", forks));
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t first[] = {100 + i};
        stage_append(&stage, forks[i], 6, first, 1, false);
        stage_fill(&stage, forks[i], 10 + i);
    }
    for (uint32_t i = 0; i < 4; i++) {
        const uint32_t more[] = {200 + i, 300 + i, 400 + i};
        stage_append(&stage, forks[i], 7, more, 3, false);
        stage_fill(&stage, forks[i], 10 + i);
    }
    for (uint32_t i = 0; i < 4; i++) {
        stage_verify(&stage, forks[i], 0, 6, 1);
        stage_verify(&stage, forks[i], 6, 10, 10 + i);
        cr_expect_eq(stage_block(&stage, forks[i], 0), stage_block(&stage, id, 0));
        for (uint32_t j = 0; j < i; j++) {
            cr_expect_neq(stage_block(&stage, forks[i], 1), stage_block(&stage, forks[j], 1));
        }
    }
    stage_verify(&stage, id, 0, 6, 1);
    cr_expect_eq(stage_get(&stage, id).length, 6);
    stage_close(&stage, id);
    for (uint32_t i = 0; i < 4; i++) {
        stage_close(&stage, forks[i]);
    }
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    stage_stop(&stage);
}

Test(cases, b3_many_tokens_in_one_step)
{
    struct stage stage;
    uint32_t tokens[13];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 4, 0);
    stage_range(tokens, 1, 13);
    uint64_t id = stage_sealed(&stage, tokens, 3, 1);
    reply = stage_append(&stage, id, 3, tokens + 3, 10, true);
    cr_expect_eq(reply.length, 13);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 4);
    stage_close(&stage, id);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 0);

    uint64_t other = stage_open(&stage, tokens, 4).sequence_id;
    id = stage_sealed(&stage, tokens + 1, 3, 1);
    cr_assert_eq(stage_used(&stage, KVK_TIER_DEVICE), 2);
    cr_expect_eq(stage_try_append(&stage, id, 3, tokens + 3, 10, true, &reply), KVK_EXHAUSTED);
    cr_expect_eq(stage_get(&stage, id).length, 3);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 2);
    stage_verify(&stage, id, 0, 3, 1);
    stage_close(&stage, id);
    stage_close(&stage, other);
    stage_stop(&stage);
}

static void start_windowed(struct stage *stage, uint32_t window, uint32_t sinks, uint32_t blocks)
{
    struct kvk_geometry geometry = house_geometry();
    geometry.window = window;
    geometry.sinks = sinks;
    house_init(&stage->house);
    stage_start_with(stage, &geometry, blocks, 0);
}

Test(cases, b5_a_window_that_is_gone_is_gone)
{
    struct stage stage;
    uint32_t tokens[20];
    uint32_t others[12];
    struct kvk_sequence_reply reply;
    start_windowed(&stage, 8, 0, 5);
    stage_range(tokens, 1, 20);
    uint64_t id = stage_sealed(&stage, tokens, 20, 1);

    /* (b) What the window has let go of is not asked back. */
    cr_expect_eq(stage_try_truncate(&stage, id, 20, 6, &reply), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_WINDOW_GONE);
    cr_expect_eq(stage_get(&stage, id).length, 20);
    stage_verify(&stage, id, 12, 20, 1);
    STAGE_OK(&stage, stage_try_truncate(&stage, id, 20, 19, &reply));
    stage_close(&stage, id);

    /* (a) Three blocks go, the oldest first: 3 and 4 stay. */
    stage_range(others, 101, 112);
    stage_close(&stage, stage_open(&stage, others, 12).sequence_id);
    cr_expect_eq(stage_hit(&stage, tokens, 20, false), 20);
    cr_expect_eq(stage_hit(&stage, tokens, 20, true), 0);
    stage_stop(&stage);
}

Test(cases, b6_every_query_of_a_chunk_sees_its_window)
{
    struct stage stage;
    uint32_t tokens[18];
    start_windowed(&stage, 8, 0, 8);
    stage_range(tokens, 1, 18);
    uint64_t id = stage_open(&stage, tokens, 6).sequence_id;
    write_values(&stage, id, 0, 6);
    stage_seal(&stage, id);
    stage_append(&stage, id, 6, tokens + 6, 12, false);
    write_values(&stage, id, 6, 18);
    stage_seal(&stage, id);
    for (uint64_t position = 6; position < 18; position++) {
        expect_attends(&stage, id, position, position < 8 ? 0 : position - 7);
    }
    /* The next tokens do without what only those queries saw. */
    uint64_t used = stage_bound(&stage, KVK_TIER_DEVICE);
    const uint32_t next[] = {19};
    stage_append(&stage, id, 18, next, 1, false);
    cr_expect_lt(stage_bound(&stage, KVK_TIER_DEVICE), used);
    write_values(&stage, id, 18, 19);
    stage_seal(&stage, id);
    expect_attends(&stage, id, 18, 11);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(cases, b7_cross_attention_of_an_encoder)
{
    static uint32_t tokens[1500];
    struct stage stage;
    struct kvk_geometry cross = house_geometry();
    struct kvk_swap_reply swap;
    cross.block_tokens = 16;
    cross.attention = KVK_ATTENTION_CROSS;
    house_init(&stage.house);
    stage_start_with(&stage, &cross, 100, 100);
    house_tokens(tokens, 1500, 1);
    uint64_t id = stage_sealed(&stage, tokens, 1500, 1);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 94);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swap));
    cr_expect_eq(swap.moved_blocks, 94);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 0);
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &swap));
    stage_verify(&stage, id, 0, 1500, 1);

    uint64_t encoder = stage.space;
    cross.attention = KVK_ATTENTION_SELF;
    stage.space = house_space_of(&stage.house, &stage.house.caller, "decoder", &cross, 1);
    cr_expect_eq(stage_hit(&stage, tokens, 1500, false), 0);
    stage.space = encoder;
    cr_expect_eq(stage_hit(&stage, tokens, 1500, false), 1488);
    stage_close(&stage, id);
    stage_stop(&stage);
}
