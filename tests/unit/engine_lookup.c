/*
 * The boundary of a hit in several groups at once, against the plain definition: every token that
 * a query from there sees has its bytes. And what a look-up counts and leaves behind.
 */
#include "tests/engine_stage.h"

#define BLOCKS 24
#define TOKENS (BLOCKS * 4)

static struct kvk_geometry group_of(uint32_t window, uint32_t sinks)
{
    struct kvk_geometry geometry = house_geometry();
    geometry.window = window;
    geometry.sinks = sinks;
    return geometry;
}

/* A full group, a window with sinks, and windows of odd and tiny sizes. */
static void start_groups(struct stage *stage, struct kvk_geometry groups[4])
{
    groups[0] = group_of(0, 0);
    groups[1] = group_of(9, 5);
    groups[2] = group_of(30, 0);
    groups[3] = group_of(1, 0);
    house_init(&stage->house);
    stage_start_with(stage, &groups[0], 400, 0);
    stage->space = house_space_of(&stage->house, &stage->house.caller, "groups", groups, 4);
}

static bool sees(const struct kvk_geometry *group, uint64_t position, uint64_t token)
{
    return group->window == 0 || token + group->window > position || token < group->sinks;
}

/* `whole` [group][block] */
static uint64_t naive_boundary(const struct kvk_geometry *groups, bool whole[4][BLOCKS],
                               uint64_t token_limit)
{
    for (uint64_t blocks = token_limit / 4; blocks > 0; blocks--) {
        bool hit = true;
        for (uint32_t g = 0; g < 4; g++) {
            for (uint64_t token = 0; token < blocks * 4; token++) {
                if (sees(&groups[g], blocks * 4, token) && !whole[g][token / 4]) {
                    hit = false;
                }
            }
        }
        if (hit) {
            return blocks * 4;
        }
    }
    return 0;
}

/* What the index says lies where. */
static void look_whole(struct stage *stage, const uint32_t *tokens, bool whole[4][BLOCKS],
                       uint32_t ids[4][BLOCKS])
{
    struct kvk_cache *cache = stage->house.cache;
    struct kvk_space *space = kvk_table_get(&cache->space_table, stage->space);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = TOKENS};
    uint32_t roots[KVK_GROUP_COUNT_MAX];
    struct kvk_prefix prefix;
    cr_assert_eq(kvk_space_roots(cache, space, NULL, 0, roots, NULL), KVK_OK);
    kvk_prefix_find(cache, space, roots, &prompt, TOKENS, &prefix);
    kvk_space_roots_release(cache, space, roots);
    for (uint32_t g = 0; g < 4; g++) {
        for (uint64_t i = 0; i < BLOCKS; i++) {
            bool known = i < prefix.known[g];
            whole[g][i] = known && cache->path_tiers[g][i] != 0;
            ids[g][i] = known ? cache->path[g][i] : KVK_BLOCK_NONE;
        }
    }
}

/* Drop bytes here and there; under full attention the deepest ones only. */
static void drop_some(struct stage *stage, const struct kvk_geometry *groups,
                      const uint32_t *tokens, struct kvk_random *random)
{
    bool whole[4][BLOCKS];
    uint32_t ids[4][BLOCKS];
    kvk_lock(&stage->house.cache->lock);
    look_whole(stage, tokens, whole, ids);
    uint64_t full_left = kvk_random_between(random, BLOCKS / 2, BLOCKS);
    uint64_t chance = kvk_random_below(random, 12);
    for (uint32_t g = 0; g < 4; g++) {
        for (uint64_t i = BLOCKS; i > 0; i--) {
            bool drop =
                groups[g].window == 0 ? i > full_left : kvk_random_below(random, 40) < chance;
            if (drop && whole[g][i - 1]) {
                kvk_block_drop_copy(stage->house.cache, ids[g][i - 1], KVK_TIER_DEVICE, true);
            }
        }
    }
    kvk_unlock(&stage->house.cache->lock);
}

Test(lookup, the_boundary_is_where_all_groups_have_what_is_seen)
{
    struct stage stage;
    struct kvk_geometry groups[4];
    struct kvk_random random;
    uint32_t tokens[TOKENS];
    uint64_t hits = 0;
    start_groups(&stage, groups);
    kvk_random_init(&random, 7);
    house_tokens(tokens, TOKENS, 1);
    for (int round = 0; round < 400; round++) {
        /* Computed anew: hollow blocks get their bytes back. */
        const struct kvk_open_request request = {
            .prompt = {.tokens = tokens, .token_count = TOKENS}, .tier = -1, .no_lookup = true};
        struct kvk_sequence_reply reply;
        STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
        stage_seal(&stage, reply.sequence_id);
        stage_close(&stage, reply.sequence_id);
        cr_assert_eq(stage_hit(&stage, tokens, TOKENS, false), TOKENS);

        drop_some(&stage, groups, tokens, &random);
        stage_check(&stage);
        bool whole[4][BLOCKS];
        uint32_t ids[4][BLOCKS];
        kvk_lock(&stage.house.cache->lock);
        look_whole(&stage, tokens, whole, ids);
        kvk_unlock(&stage.house.cache->lock);
        for (uint64_t count = 1; count <= TOKENS; count += kvk_random_between(&random, 1, 5)) {
            uint64_t expected = naive_boundary(groups, whole, count);
            cr_assert_eq(stage_hit(&stage, tokens, count, false), expected);
            cr_assert_eq(stage_hit(&stage, tokens, count, true),
                         naive_boundary(groups, whole, count - 1));
            hits += expected > 0 && expected < count / 4 * 4;
        }
    }
    cr_expect_gt(hits, 100, "hits that holes made shorter were among them");
    stage_stop(&stage);
}

Test(lookup, leaves_no_roots_behind)
{
    struct stage stage;
    struct kvk_index_stats before;
    struct kvk_index_stats after;
    uint32_t tokens[8];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    kvk_index_stats(stage.house.cache->index, &before);
    for (uint32_t salt = 0; salt < 5000; salt++) { /* more than there may be roots */
        struct kvk_lookup_reply reply;
        const struct kvk_lookup_request request = {
            .space_id = stage.space,
            .prompt = {.tokens = tokens,
                       .token_count = 8,
                       .salt = (const uint8_t *)&salt,
                       .salt_size = sizeof(salt)},
        };
        STAGE_OK(&stage, kvk_lookup(stage.house.cache, &stage.house.caller, &request, &reply,
                                    &stage.house.error));
        cr_assert_eq(reply.cached_tokens, 0);
    }
    kvk_index_stats(stage.house.cache->index, &after);
    cr_expect_eq(after.roots, before.roots);
    stage_stop(&stage);
}

Test(lookup, a_salt_keeps_prompts_apart)
{
    struct stage stage;
    uint32_t tokens[8];
    static const uint8_t salts[2] = {1, 2};
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    struct kvk_open_request request = {
        .prompt = {.tokens = tokens, .token_count = 8, .salt = &salts[0], .salt_size = 1},
        .tier = -1};
    struct kvk_sequence_reply reply;
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    stage_fill(&stage, reply.sequence_id, 1);
    stage_close(&stage, reply.sequence_id);
    cr_expect_eq(stage_hit(&stage, tokens, 8, false), 0);
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    cr_expect_eq(reply.cached_tokens, 8);
    stage_close(&stage, reply.sequence_id);
    request.prompt.salt = &salts[1];
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    cr_expect_eq(reply.cached_tokens, 0);
    stage_close(&stage, reply.sequence_id);
    stage_stop(&stage);
}

Test(lookup, counts_one_query_and_what_lies_where)
{
    struct stage stage;
    uint32_t tokens[16];
    struct kvk_swap_reply swap;
    stage_start(&stage, 8, 8);
    house_tokens(tokens, 16, 1);
    uint64_t id = stage_sealed(&stage, tokens, 8, 1);
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swap));
    struct kvk_cache_stats before = stage_stats(&stage);
    struct kvk_lookup_reply reply;
    struct kvk_lookup_request request = {.space_id = stage.space,
                                         .prompt = {.tokens = tokens, .token_count = 16}};
    STAGE_OK(&stage, kvk_lookup(stage.house.cache, &stage.house.caller, &request, &reply,
                                &stage.house.error));
    cr_expect_eq(reply.cached_tokens, 8);
    cr_expect_eq(reply.host_tokens, 8);
    cr_expect_eq(reply.device_tokens, 0);
    cr_expect_gt(reply.load_ns, 0);
    request.retry = true;
    STAGE_OK(&stage, kvk_lookup(stage.house.cache, &stage.house.caller, &request, &reply,
                                &stage.house.error));
    struct kvk_cache_stats after = stage_stats(&stage);
    cr_expect_eq(after.lookups - before.lookups, 1);
    cr_expect_eq(after.retries - before.retries, 1);
    cr_expect_eq(after.lookup_tokens - before.lookup_tokens, 16);
    cr_expect_eq(after.hit_tokens - before.hit_tokens, 8);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(lookup, short_prompts_are_not_looked_up)
{
    struct stage stage;
    uint32_t tokens[16];
    stage_start(&stage, 8, 0);
    struct kvk_space_request request = {
        .block_tokens = 4, .group_count = 1, .groups = {stage.geometry}, .lookup_min_tokens = 12};
    struct kvk_space_reply reply;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view("short");
    STAGE_OK(&stage, kvk_space_open(stage.house.cache, &stage.house.caller, &request, &reply,
                                    &stage.house.error));
    stage.space = reply.space_id;
    house_tokens(tokens, 16, 1);
    stage_cache(&stage, tokens, 16, 1);
    cr_expect_eq(stage_hit(&stage, tokens, 8, false), 0);
    cr_expect_eq(stage_hit(&stage, tokens, 11, false), 0);
    cr_expect_eq(stage_hit(&stage, tokens, 12, false), 12);
    stage_stop(&stage);
}

Test(lookup, touch_keeps_a_prompt_from_ageing_out)
{
    struct stage stage;
    uint32_t hot[4];
    uint32_t tokens[4];
    uint64_t touched;
    stage_start(&stage, 4, 0);
    house_tokens(hot, 4, 1);
    stage_cache(&stage, hot, 4, 1);
    for (uint32_t i = 0; i < 40; i++) {
        const struct kvk_prompt prompt = {.tokens = hot, .token_count = 4};
        STAGE_OK(&stage, kvk_touch(stage.house.cache, &stage.house.caller, stage.space, &prompt,
                                   &touched, &stage.house.error));
        cr_assert_eq(touched, 4);
        house_tokens(tokens, 4, 100 + i * 8);
        stage_cache(&stage, tokens, 4, 1);
    }
    cr_expect_eq(stage_hit(&stage, hot, 4, false), 4);
    stage_stop(&stage);
}
