/* Hits that end within a block: when there is one, what is copied, and what becomes of it. */
#include "daemon/report_miss.h"
#include "daemon/report_usage.h"
#include "tests/engine_partial.h"

#define FIRST UINT32_C(1000) /* tokens of the prompt that is cached */

/* Tokens 0 to `same` are those of the cached prompt, the others are not. */
static void prompt_like(uint32_t *tokens, uint64_t count, uint64_t same)
{
    house_tokens(tokens, count, FIRST);
    for (uint64_t i = same; i < count; i++) {
        tokens[i] += 50000;
    }
}

static const struct kvk_tenant *tenant_of(struct stage *stage)
{
    kvk_lock(&stage->house.cache->lock);
    struct kvk_space *space = kvk_table_get(&stage->house.cache->space_table, stage->space);
    kvk_unlock(&stage->house.cache->lock);
    return space->tenant;
}

/* Case B1, with partial reuse and without: all but the last token is a hit. */
Test(partial, B1_leave_the_last)
{
    static const uint64_t whole[] = {12, 12, 16};
    static const uint64_t part[] = {14, 15, 16};
    struct stage stage;
    uint32_t tokens[17];
    stage_start(&stage, 64, 0);
    prompt_like(tokens, 17, 17);
    stage_cache(&stage, tokens, 16, 7);
    for (uint64_t i = 0; i < 3; i++) {
        cr_expect_eq(stage_hit(&stage, tokens, 15 + i, true), whole[i]);
    }
    partial_on(&stage);
    for (uint64_t i = 0; i < 3; i++) {
        cr_expect_eq(stage_hit(&stage, tokens, 15 + i, true), part[i]);
        struct kvk_sequence_reply reply = partial_open(&stage, tokens, 15 + i, true);
        cr_expect_eq(reply.cached_tokens, part[i]);
        cr_expect_eq(reply.partial_tokens, part[i] % 4);
        cr_expect_eq(reply.sealed_tokens, part[i]);
        cr_expect_eq(reply.grant_first, part[i]);
        stage_verify(&stage, reply.sequence_id, 0, part[i], 7);
        stage_check(&stage);
        stage_close(&stage, reply.sequence_id);
    }
    stage_stop(&stage);
}

/* Another prompt leaves the cached one within a block, goes on by itself, and is found by both. */
Test(partial, a_branch_within_a_block)
{
    struct stage stage;
    uint32_t first[12];
    uint32_t second[12];
    partial_start(&stage, 64, 0);
    prompt_like(first, 12, 12);
    prompt_like(second, 12, 6);
    stage_cache(&stage, first, 12, 1);
    struct kvk_sequence_reply reply = partial_open(&stage, second, 12, false);
    cr_assert_eq(reply.cached_tokens, 6U);
    cr_assert_eq(reply.partial_tokens, 2U);
    stage_verify(&stage, reply.sequence_id, 0, 6, 1);
    /* What was copied is sealed: it is not written again. */
    cr_expect_eq(stage_try_write(&stage, reply.sequence_id, 0, 0, 5, 6, 9), KVK_PRECONDITION);
    stage_fill(&stage, reply.sequence_id, 2);
    stage_verify(&stage, reply.sequence_id, 0, 6, 1);
    stage_verify(&stage, reply.sequence_id, 6, 12, 2);
    stage_close(&stage, reply.sequence_id);
    cr_expect_eq(stage_hit(&stage, first, 12, false), 12U);
    cr_expect_eq(stage_hit(&stage, second, 12, false), 12U);
    uint64_t again = stage_open(&stage, first, 12).sequence_id;
    stage_verify(&stage, again, 0, 12, 1); /* the source is as it was */
    stage_close(&stage, again);
    stage_stop(&stage);
}

Test(partial, off_by_the_space_or_the_prompt)
{
    struct stage stage;
    uint32_t tokens[12];
    struct kvk_space_reply space;
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    stage_cache(&stage, tokens, 12, 1);
    prompt_like(tokens, 12, 7);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 7U);
    const struct kvk_lookup_request whole = {
        .space_id = stage.space,
        .prompt = {.tokens = tokens, .token_count = 12, .whole_blocks = true}};
    struct kvk_lookup_reply found;
    STAGE_OK(&stage, kvk_lookup(stage.house.cache, &stage.house.caller, &whole, &found,
                                &stage.house.error));
    cr_expect_eq(found.cached_tokens, 4U);
    const struct kvk_open_request open = {.prompt = whole.prompt, .tier = -1};
    struct kvk_sequence_reply reply;
    STAGE_OK(&stage, stage_try_open(&stage, &open, &reply));
    cr_expect_eq(reply.cached_tokens, 4U);
    stage_close(&stage, reply.sequence_id);
    STAGE_OK(&stage,
             partial_switch(&stage, &stage.geometry, 1, "m", KVK_PARTIAL_REUSE_AS_IT_IS, &space));
    cr_expect(space.partial_reuse);
    STAGE_OK(&stage,
             partial_switch(&stage, &stage.geometry, 1, "m", KVK_PARTIAL_REUSE_OFF, &space));
    cr_expect_not(space.partial_reuse);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 4U);
    struct kvk_pin_reply lease = stage_pin(&stage, tokens, 12, 1000);
    cr_expect_eq(lease.cached_tokens, 4U);
    partial_on(&stage);
    struct kvk_pin_reply second = stage_pin(&stage, tokens, 12, 1000);
    cr_expect_eq(second.cached_tokens, 4U, "leases stay whole");
    stage_stop(&stage);
}

/* Formats whose tokens share scales, opaque blocks, cross-attention: refused in words. */
Test(partial, what_cannot_be_cut_is_refused)
{
    const struct {
        enum kvk_format format;
        enum kvk_layout layout;
        enum kvk_attention attention;
        const char *word; /* NULL: taken */
    } cases[] = {
        {KVK_FORMAT_FP32, KVK_LAYOUT_HEADS_FIRST, KVK_ATTENTION_SELF, NULL},
        {KVK_FORMAT_BF16, KVK_LAYOUT_TOKENS_FIRST, KVK_ATTENTION_SELF, NULL},
        {KVK_FORMAT_INT8_32, KVK_LAYOUT_HEADS_FIRST, KVK_ATTENTION_SELF, NULL},
        {KVK_FORMAT_INT8_CHANNEL, KVK_LAYOUT_HEADS_FIRST, KVK_ATTENTION_SELF, "share scales"},
        {KVK_FORMAT_FP8_E4M3, KVK_LAYOUT_HEADS_FIRST, KVK_ATTENTION_SELF, "share scales"},
        {KVK_FORMAT_FP32, KVK_LAYOUT_HEADS_FIRST, KVK_ATTENTION_CROSS, "cross-attention"},
        {KVK_FORMAT_NONE, KVK_LAYOUT_OPAQUE, KVK_ATTENTION_SELF, "opaque"},
    };
    struct stage stage;
    stage_start(&stage, 512, 0);
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvk_geometry groups[2] = {house_geometry(), house_geometry()};
        char model[16];
        struct kvk_space_reply reply;
        groups[1].head_size_k = groups[1].head_size_v = 32;
        groups[1].format_k = groups[1].format_v = cases[i].format;
        groups[1].layout = cases[i].layout;
        groups[1].attention = cases[i].attention;
        groups[1].opaque_bytes = cases[i].layout == KVK_LAYOUT_OPAQUE ? 64 : 0;
        (void)snprintf(model, sizeof(model), "cut-%zu", i);
        if (cases[i].word == NULL) {
            STAGE_OK(&stage,
                     partial_switch(&stage, groups, 2, model, KVK_PARTIAL_REUSE_ON, &reply));
            cr_expect(reply.partial_reuse);
            continue;
        }
        cr_expect_eq(partial_switch(&stage, groups, 2, model, KVK_PARTIAL_REUSE_ON, &reply),
                     KVK_INVALID, "case %zu", i);
        cr_expect_str_eq(stage.house.error.field, "partial_reuse");
        cr_expect_not_null(strstr(stage.house.error.text, "groups[1]"));
        cr_expect_not_null(strstr(stage.house.error.text, cases[i].word), "%s",
                           stage.house.error.text);
        STAGE_OK(&stage,
                 partial_switch(&stage, groups, 2, model, KVK_PARTIAL_REUSE_AS_IT_IS, &reply));
        cr_expect_not(reply.partial_reuse);
        cr_expect_eq(partial_switch(&stage, groups, 2, model, KVK_PARTIAL_REUSE_ON, &reply),
                     KVK_INVALID, "nor of a space that is there");
    }
    stage_stop(&stage);
}

/* Tokens that stand for an image are taken with all of it, and only where it is the same one. */
Test(partial, placeholders_match_whole)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    struct kvk_content_span span = {.first = 5, .count = 2, .digest_size = 4, .digest = {1}};
    struct kvk_open_request request = {
        .prompt = {.tokens = tokens, .token_count = 12, .spans = &span, .span_count = 1},
        .tier = -1};
    struct kvk_sequence_reply reply;
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    stage_fill(&stage, reply.sequence_id, 1);
    stage_close(&stage, reply.sequence_id);
    const struct {
        uint64_t count;
        uint8_t digest;
        uint64_t span_count;
        uint64_t hit;
    } cases[] = {
        {8, 1, 2, 8}, {7, 1, 2, 7}, {6, 1, 1, 5}, /* half of it */
        {7, 2, 2, 5},                             /* another image */
        {7, 1, 0, 5},                             /* none */
        {8, 1, 3, 5},                             /* a longer one */
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        span.digest[0] = cases[i].digest;
        span.count = cases[i].span_count;
        request.prompt.token_count = cases[i].count;
        request.prompt.span_count = cases[i].span_count > 0 ? 1 : 0;
        STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
        cr_expect_eq(reply.cached_tokens, cases[i].hit, "case %zu: %lu", i,
                     (unsigned long)reply.cached_tokens);
        stage_close(&stage, reply.sequence_id);
    }
    stage_stop(&stage);
}

Test(partial, salts_stay_apart)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    stage_cache(&stage, tokens, 12, 1);
    prompt_like(tokens, 12, 6);
    const struct kvk_open_request request = {.prompt = {.tokens = tokens,
                                                        .token_count = 12,
                                                        .salt = (const uint8_t *)"s",
                                                        .salt_size = 1},
                                             .tier = -1};
    struct kvk_sequence_reply reply;
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    cr_expect_eq(reply.cached_tokens, 0U);
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

/* Case B5: under a window a query from within the last block sees less than one from its start. */
Test(partial, B5_window_behind_a_hole)
{
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    uint32_t tokens[20];
    geometry.window = 8;
    house_init(&stage.house);
    stage_start_with(&stage, &geometry, 64, 0);
    prompt_like(tokens, 20, 20);
    uint64_t id = stage_sealed(&stage, tokens, 20, 3);
    stage_close(&stage, id);
    kvk_lock(&stage.house.cache->lock); /* blocks 0 to 2 lose their bytes */
    for (uint32_t i = 0, at = 0; i < 3 && at < 64; at++) {
        const struct kvk_block *block = kvk_index_block(stage.house.cache->index, at);
        if (block->state == KVK_BLOCK_EVICTABLE && block->position == i) {
            kvk_block_drop_copy(stage.house.cache, at, KVK_TIER_DEVICE, true);
            i++;
            at = UINT32_MAX;
        }
    }
    kvk_unlock(&stage.house.cache->lock);
    cr_expect_eq(stage_hit(&stage, tokens, 20, true), 0U, "without a part of a block");
    partial_on(&stage);
    cr_expect_eq(stage_hit(&stage, tokens, 20, true), 19U, "19 needs token 12 onward");
    cr_expect_eq(stage_hit(&stage, tokens, 19, true), 0U, "18 needs token 11 onward");
    struct kvk_sequence_reply reply = partial_open(&stage, tokens, 20, true);
    cr_assert_eq(reply.cached_tokens, 19U);
    stage_verify(&stage, reply.sequence_id, 12, 19, 3);
    cr_expect_eq(stage_try_read(&stage, reply.sequence_id, 0, 8, 9, 3), KVK_PRECONDITION,
                 "the window has let go of it");
    stage_fill(&stage, reply.sequence_id, 3);
    stage_check(&stage);
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

/* All shards, of all groups; the source on the host, the copy on the device. */
Test(partial, ranks_groups_and_tiers)
{
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    uint32_t tokens[12];
    geometry.layers = 3;
    geometry.kv_heads = 4;
    geometry.tensor_shards = 2;
    geometry.pipeline_shards = 2;
    geometry.format_v = KVK_FORMAT_FP16;
    house_init(&stage.house);
    stage_start_with(&stage, &geometry, 16, 16);
    partial_on(&stage);
    prompt_like(tokens, 12, 12);
    struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = 12},
                                       .tier = KVK_TIER_HOST};
    struct kvk_sequence_reply reply;
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    stage_fill(&stage, reply.sequence_id, 5);
    stage_close(&stage, reply.sequence_id);
    prompt_like(tokens, 12, 11);
    request.tier = KVK_TIER_DEVICE;
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    cr_assert_eq(reply.cached_tokens, 11U);
    stage_verify(&stage, reply.sequence_id, 0, 11, 5);
    /* And swapped out and in again, with the part in its tail. */
    stage_fill(&stage, reply.sequence_id, 5);
    struct kvk_swap_reply swapped;
    STAGE_OK(&stage, stage_try_swap_out(&stage, reply.sequence_id, &swapped));
    STAGE_OK(&stage, stage_try_swap_in(&stage, reply.sequence_id, &swapped));
    stage_verify(&stage, reply.sequence_id, 0, 12, 5);
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

/* A copy in a compact format is nothing to go on writing in: it is left where it is. */
Test(partial, not_from_a_compact_copy)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 0, 64);
    prompt_like(tokens, 12, 12);
    stage_cache(&stage, tokens, 12, 1);
    prompt_like(tokens, 12, 11);
    kvk_lock(&stage.house.cache->lock);
    struct kvk_space *space = kvk_table_get(&stage.house.cache->space_table, stage.space);
    kvk_unlock(&stage.house.cache->lock);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 11U);
    space->groups[0]->forms[KVK_TIER_HOST].compact = true; /* as if */
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 8U);
    space->groups[0]->forms[KVK_TIER_HOST].compact = false;
    stage_stop(&stage);
}

/* Where one group has less, all take that: a boundary is one for all of them. */
Test(partial, groups_agree)
{
    struct stage stage;
    struct kvk_geometry groups[2] = {house_geometry(), house_geometry()};
    uint32_t tokens[12];
    struct kvk_space_reply space;
    stage_start(&stage, 64, 0);
    STAGE_OK(&stage, partial_switch(&stage, groups, 2, "two", KVK_PARTIAL_REUSE_ON, &space));
    stage.space = space.space_id;
    prompt_like(tokens, 12, 12);
    struct kvk_sequence_reply reply = partial_open(&stage, tokens, 12, false);
    STAGE_OK(&stage, stage_try_write(&stage, reply.sequence_id, 0, 0, 0, 12, 4));
    STAGE_OK(&stage, stage_try_write(&stage, reply.sequence_id, 1, 0, 0, 12, 5));
    stage_seal(&stage, reply.sequence_id);
    stage_close(&stage, reply.sequence_id);
    prompt_like(tokens, 12, 11);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 11U);
    /* The second group loses its last block. */
    kvk_lock(&stage.house.cache->lock);
    for (uint32_t at = 0; at < 6; at++) {
        const struct kvk_block *block = kvk_index_block(stage.house.cache->index, at);
        if (block->state == KVK_BLOCK_EVICTABLE && block->position == 2 &&
            kvk_group_of(stage.house.cache, block)->index == 1) {
            kvk_block_drop_copy(stage.house.cache, at, KVK_TIER_DEVICE, true);
        }
    }
    kvk_unlock(&stage.house.cache->lock);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 8U);
    reply = partial_open(&stage, tokens, 12, false);
    cr_expect_eq(reply.cached_tokens, 8U);
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

/* Bytes that are not those that were sealed: a miss, and never served again. */
Test(partial, a_damaged_source_is_a_miss)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    uint64_t id = stage_sealed(&stage, tokens, 12, 1);
    uint32_t block = stage_block(&stage, id, 2);
    stage_close(&stage, id);
    kvk_lock(&stage.house.cache->lock);
    struct kvk_block *source = kvk_index_block(stage.house.cache->index, block);
    kvk_block_address(stage.house.cache, source, KVK_TIER_DEVICE, 0)[100] ^= 1;
    kvk_unlock(&stage.house.cache->lock);
    prompt_like(tokens, 12, 10);
    struct kvk_sequence_reply reply = partial_open(&stage, tokens, 12, false);
    cr_expect_eq(reply.cached_tokens, 8U);
    cr_expect_eq(reply.partial_tokens, 0U);
    stage_check(&stage);
    struct kvk_cache_stats stats = stage_stats(&stage);
    cr_expect_eq(stats.partial_given_up, 1U);
    cr_expect_eq(stats.partial_hits, 0U);
    cr_expect_eq(stats.checksum_failures, 1U);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 8U, "it is gone");
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

Test(partial, a_failed_copy_is_a_miss)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    stage_cache(&stage, tokens, 12, 1);
    prompt_like(tokens, 12, 10);
    kvk_mover_test_fail_next(stage.house.cache->mover);
    struct kvk_sequence_reply reply = partial_open(&stage, tokens, 12, false);
    cr_expect_eq(reply.cached_tokens, 8U);
    cr_expect_eq(stage_stats(&stage).partial_given_up, 1U);
    stage_close(&stage, reply.sequence_id);
    reply = partial_open(&stage, tokens, 12, false);
    cr_expect_eq(reply.cached_tokens, 10U, "and the next one is not");
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

/* A source that is held takes room: where there is none beside it, it is left. */
Test(partial, nobody_is_refused_for_a_part)
{
    struct stage stage;
    uint32_t tokens[16];
    partial_start(&stage, 4, 0);
    prompt_like(tokens, 16, 16);
    stage_cache(&stage, tokens, 16, 1);
    prompt_like(tokens, 16, 2);
    cr_expect_eq(stage_hit(&stage, tokens, 16, false), 2U);
    struct kvk_sequence_reply reply = partial_open(&stage, tokens, 16, false);
    cr_expect_eq(reply.cached_tokens, 0U);
    struct kvk_cache_stats stats = stage_stats(&stage);
    cr_expect_eq(stats.partial_given_up, 1U);
    cr_expect_eq(stats.refusals, 0U);
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

/* What the caller may not wait for is left to one who may: nothing has changed. */
Test(partial, a_copy_is_for_callers_that_may_wait)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    stage_cache(&stage, tokens, 12, 1);
    prompt_like(tokens, 12, 10);
    const struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = 12},
                                             .tier = -1};
    struct kvk_sequence_reply reply;
    stage.house.caller.may_block = false;
    cr_expect_eq(stage_try_open(&stage, &request, &reply), KVK_WOULD_BLOCK);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0U);
    cr_expect_eq(stage_stats(&stage).lookups, 1U);
    stage.house.caller.may_block = true;
    stage_stop(&stage);
}

/* Copying takes longer than computing: it is left. */
Test(partial, only_where_it_is_worth_it)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    stage_cache(&stage, tokens, 12, 1);
    prompt_like(tokens, 12, 10);
    kvk_lock(&stage.house.cache->lock);
    struct kvk_space *space = kvk_table_get(&stage.house.cache->space_table, stage.space);
    space->flops_per_token = 1;
    space->flops_per_second = 1e9; /* two tokens: 2 ns */
    kvk_unlock(&stage.house.cache->lock);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 8U);
    space->flops_per_second = 1e3; /* 2 ms */
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 10U);
    stage_stop(&stage);
}

/* ---- While it is copied ---- */

struct meanwhile {
    struct stage *stage;
    uint32_t source;
    bool invalidate;
    bool ran;
};

/* The source is invalidated, and all room is taken that can be had: its bytes stay. */
static void meanwhile_run(void *context)
{
    struct meanwhile *meanwhile = context;
    struct stage *stage = meanwhile->stage;
    if (meanwhile->ran) {
        return;
    }
    meanwhile->ran = true;
    kvk_lock(&stage->house.cache->lock);
    const struct kvk_block *source = kvk_index_block(stage->house.cache->index, meanwhile->source);
    cr_expect_gt(source->pin_count[KVK_TIER_DEVICE], 0U);
    cr_expect_gt(source->hold_count, 0U);
    kvk_unlock(&stage->house.cache->lock);
    if (meanwhile->invalidate) {
        const struct kvk_invalidate_request request = {.space_id = stage->space};
        struct kvk_invalidate_reply reply;
        STAGE_OK(stage, kvk_invalidate(stage->house.cache, &stage->house.caller, &request, &reply,
                                       &stage->house.error));
    }
    for (uint32_t i = 0; i < 20; i++) {
        uint32_t others[8];
        struct kvk_sequence_reply reply;
        struct kvk_tables tables = {.part_count = 0};
        house_tokens(others, 8, 90000 + 100 * i);
        const struct kvk_open_request request = {.session_id = stage->session,
                                                 .space_id = stage->space,
                                                 .prompt = {.tokens = others, .token_count = 8},
                                                 .tier = -1};
        if (kvk_sequence_open(stage->house.cache, &stage->house.caller, &request, &reply, &tables,
                              &stage->house.error) == KVK_OK) {
            struct kvk_tables outside = stage->tables;
            stage->tables = (struct kvk_tables){.part_count = 0};
            stage_fill(stage, reply.sequence_id, 77);
            kvk_tables_finish(&stage->tables);
            stage->tables = outside;
            stage_close(stage, reply.sequence_id);
        }
        kvk_tables_finish(&tables);
    }
}

static void copied_meanwhile(bool invalidate)
{
    struct stage stage;
    uint32_t tokens[8];
    partial_start(&stage, 8, 0);
    prompt_like(tokens, 8, 8);
    uint64_t id = stage_sealed(&stage, tokens, 8, 1);
    struct meanwhile meanwhile = {
        .stage = &stage, .source = stage_block(&stage, id, 1), .invalidate = invalidate};
    stage_close(&stage, id);
    prompt_like(tokens, 8, 7);
    kvk_mover_test_hook(stage.house.cache->mover, meanwhile_run, &meanwhile);
    struct kvk_sequence_reply reply = partial_open(&stage, tokens, 8, false);
    kvk_mover_test_hook(stage.house.cache->mover, NULL, NULL);
    cr_expect(meanwhile.ran);
    cr_expect_eq(reply.cached_tokens, invalidate ? 0U : 7U);
    stage_verify(&stage, reply.sequence_id, 0, reply.cached_tokens, 1);
    stage_check(&stage);
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

Test(partial, the_source_stays_while_it_is_copied)
{
    copied_meanwhile(false);
}

Test(partial, an_invalidated_source_is_not_begun_with)
{
    copied_meanwhile(true);
}

/* The session ends while it is copied: everything comes back. */
static void end_session(void *context)
{
    struct stage *stage = context;
    kvk_session_end(stage->house.cache, stage->session);
}

Test(partial, a_client_that_ends_while_it_is_copied)
{
    struct stage stage;
    uint32_t tokens[8];
    partial_start(&stage, 8, 0);
    prompt_like(tokens, 8, 8);
    stage_cache(&stage, tokens, 8, 1);
    prompt_like(tokens, 8, 7);
    const struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = 8},
                                             .tier = -1};
    struct kvk_sequence_reply reply;
    kvk_mover_test_hook(stage.house.cache->mover, end_session, &stage);
    cr_expect_neq(stage_try_open(&stage, &request, &reply), KVK_OK);
    kvk_mover_test_hook(stage.house.cache->mover, NULL, NULL);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0U);
    stage.session = house_session(&stage.house);
    cr_expect_eq(stage_hit(&stage, tokens, 8, false), 7U);
    stage_stop(&stage);
}

/* ---- What it is worth to a worker: attention ---- */

Test(partial, attention_is_as_with_a_cold_sequence)
{
    struct stage stage;
    uint32_t tokens[16];
    partial_start(&stage, 64, 16);
    prompt_like(tokens, 16, 16);
    uint64_t id = stage_open(&stage, tokens, 16).sequence_id;
    write_values(&stage, id, 0, 16);
    stage_seal(&stage, id);
    stage_close(&stage, id);
    for (uint64_t same = 1; same < 16; same++) {
        prompt_like(tokens, 16, same);
        struct kvk_sequence_reply reply = partial_open(&stage, tokens, 16, true);
        cr_assert_eq(reply.cached_tokens, same);
        write_values(&stage, reply.sequence_id, same, 16); /* the values follow from positions */
        stage_seal(&stage, reply.sequence_id);
        for (uint64_t position = same - 1; position < 16; position++) {
            expect_attends(&stage, reply.sequence_id, position, 0);
        }
        float part[8];
        float cold[8];
        const struct kvk_open_request request = {
            .prompt = {.tokens = tokens, .token_count = 16}, .no_lookup = true, .tier = -1};
        struct kvk_sequence_reply other;
        STAGE_OK(&stage, stage_try_open(&stage, &request, &other));
        write_values(&stage, other.sequence_id, 0, 16);
        stage_seal(&stage, other.sequence_id);
        attend_window(&stage, reply.sequence_id, 15, part);
        attend_window(&stage, other.sequence_id, 15, cold);
        cr_expect_arr_eq(part, cold, sizeof(part), "the same bytes give the same bytes");
        stage_close(&stage, other.sequence_id);
        stage_close(&stage, reply.sequence_id);
    }
    stage_stop(&stage);
}

/* ---- What is said of it ---- */

Test(partial, counted_and_told)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    stage_cache(&stage, tokens, 12, 1);
    prompt_like(tokens, 12, 11);
    struct kvk_lookup_reply found;
    const struct kvk_lookup_request lookup = {.space_id = stage.space,
                                              .prompt = {.tokens = tokens, .token_count = 12}};
    STAGE_OK(&stage, kvk_lookup(stage.house.cache, &stage.house.caller, &lookup, &found,
                                &stage.house.error));
    cr_expect_eq(found.partial_tokens, 3U);
    cr_expect_eq(found.device_tokens + found.host_tokens + found.disk_tokens, found.cached_tokens);
    struct kvk_sequence_reply reply = partial_open(&stage, tokens, 12, false);
    cr_expect_eq(stage_get(&stage, reply.sequence_id).partial_tokens, 3U, "any rank is told");
    struct kvk_cache_stats stats = stage_stats(&stage);
    cr_expect_eq(stats.partial_hits, 2U);
    cr_expect_eq(stats.partial_hit_tokens, 6U);
    struct kvk_tenant_usage usage;
    kvk_usage_get(stage.house.cache, tenant_of(&stage), &usage);
    cr_expect_eq(usage.partial_hit_tokens, 6U);
    cr_expect_geq(usage.hit_tokens, 22U);
    uint64_t child = 0;
    stage_fill(&stage, reply.sequence_id, 2);
    STAGE_OK(&stage, stage_try_fork(&stage, reply.sequence_id, 12, 1, "f", &child));
    cr_expect_eq(stage_get(&stage, child).partial_tokens, 3U);
    stage_close(&stage, child);
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

static struct kvk_miss_report explain(struct stage *stage, const uint32_t *tokens, uint64_t count)
{
    struct kvk_miss_report report;
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = count};
    STAGE_OK(stage, kvk_report_miss(stage->house.cache, &stage->house.caller, stage->space, &prompt,
                                    false, &report, &stage->house.error));
    return report;
}

Test(partial, why_knows)
{
    struct stage stage;
    uint32_t tokens[12];
    partial_start(&stage, 64, 0);
    prompt_like(tokens, 12, 12);
    stage_cache(&stage, tokens, 12, 1);
    prompt_like(tokens, 12, 11);
    struct kvk_miss_report report = explain(&stage, tokens, 12);
    cr_expect_eq(report.cached_tokens, 11U);
    cr_expect_eq(report.partial_tokens, 3U);
    cr_expect_eq(report.missing_block, 2U);
    cr_expect_not_null(strstr(report.sentence, "11 tokens are cached"), "%s", report.sentence);
    cr_expect_not_null(strstr(report.sentence, "The last 3 of the cached tokens are a part"), "%s",
                       report.sentence);
    report = explain(&stage, tokens, 3); /* shorter than a block */
    cr_expect_eq(report.miss, KVK_MISS_SHORT);
    cr_expect_eq(report.cached_tokens, 3U);
    cr_expect_not_null(strstr(report.sentence, "The last 3"), "%s", report.sentence);
    report = explain(&stage, tokens, 10); /* nothing is missing, and a part is there too */
    cr_expect_eq(report.miss, KVK_MISS_NONE);
    cr_expect_eq(report.cached_tokens, 10U);
    stage_stop(&stage);
}

/* The source counts as used: what is gone on from in part stays. */
Test(partial, a_source_is_a_use)
{
    struct stage stage;
    uint32_t tokens[8];
    uint32_t other[4];
    partial_start(&stage, 4, 0);
    prompt_like(tokens, 4, 4);
    stage_cache(&stage, tokens, 4, 1);
    house_tokens(other, 4, 500);
    stage_cache(&stage, other, 4, 2);
    prompt_like(tokens, 4, 3); /* the older one is used again */
    struct kvk_sequence_reply reply = partial_open(&stage, tokens, 4, false);
    cr_expect_eq(reply.cached_tokens, 3U);
    stage_close(&stage, reply.sequence_id);
    house_tokens(tokens, 8, 700);
    stage_cache(&stage, tokens, 8, 3);
    house_tokens(tokens, 4, 800);
    stage_cache(&stage, tokens, 4, 3); /* one has to go */
    cr_expect_eq(stage_hit(&stage, other, 4, false), 0U);
    prompt_like(tokens, 4, 4);
    cr_expect_eq(stage_hit(&stage, tokens, 4, false), 4U);
    stage_stop(&stage);
}
