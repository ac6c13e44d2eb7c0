/* Blocks that are computed again: what passes as rounding, what does not, and what is known of it.
 */
#include "gpu/values.h"

#include <math.h>

#include "tests/engine_ask.h"

/* One block, or `blocks` of them, of tokens from 1 on, sealed with values that are off by `noise`
 * of their size, in the given shard from `first_layer` on, or in V alone. */
struct forgery {
    double noise;
    uint32_t shard;
    uint32_t first_layer;
    bool value_only;
};

static void value_change(enum kvk_format format, uint8_t *at, double factor)
{
    float value = kvk_value_widen(format, at, 0);
    value_store(format, at, (float)((double)value * factor));
}

static void block_forge(struct house *house, uint32_t id, const struct forgery *forgery)
{
    const struct kvk_block *block = kvk_index_block(house->cache->index, id);
    const struct kvk_group *group = kvk_group_of(house->cache, block);
    const struct kvk_geometry *geometry = &group->geometry;
    uint8_t *page = kvk_block_address(house->cache, block, kvk_block_tier(block), forgery->shard);
    if (geometry->layout == KVK_LAYOUT_OPAQUE) {
        page[5] ^= forgery->noise > 0 ? 1 : 0;
        return;
    }
    for (uint32_t l = forgery->first_layer; l < kvk_geometry_shard_layers(geometry, forgery->shard);
         l++) {
        uint64_t rows =
            (uint64_t)kvk_geometry_shard_heads(geometry, forgery->shard) * geometry->block_tokens;
        size_t k_bytes = kvk_format_bytes(geometry->format_k);
        size_t v_bytes = kvk_format_bytes(geometry->format_v);
        uint8_t *k = page + kvk_geometry_k_offset(geometry, forgery->shard, l);
        uint8_t *v = page + kvk_geometry_v_offset(geometry, forgery->shard, l);
        for (uint64_t i = 0; i < rows * geometry->head_size_k && !forgery->value_only; i++) {
            value_change(geometry->format_k, k + i * k_bytes,
                         1 + (i % 2 == 0 ? forgery->noise : -forgery->noise));
        }
        for (uint64_t i = 0; i < rows * geometry->head_size_v; i++) {
            value_change(geometry->format_v, v + i * v_bytes,
                         1 + (i % 2 == 0 ? forgery->noise : -forgery->noise));
        }
    }
}

static void seal_again(struct house *house, uint64_t session, uint64_t space, uint32_t blocks,
                       const struct forgery *forgery)
{
    uint32_t tokens[1024];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    house_tokens(tokens, 4 * blocks, 1);
    const struct kvk_open_request request = {
        .session_id = session,
        .space_id = space,
        .prompt = {.tokens = tokens, .token_count = 4 * blocks},
        .tier = -1,
        .no_lookup = true};
    cr_assert_eq(
        kvk_sequence_open(house->cache, &house->caller, &request, &reply, &tables, &house->error),
        KVK_OK, "%s", house->error.text);
    kvk_tables_finish(&tables);
    kvk_lock(&house->cache->lock);
    const struct kvk_sequence *sequence =
        kvk_table_get(&house->cache->sequence_table, reply.sequence_id);
    bool opaque = sequence->space->groups[0]->geometry.layout == KVK_LAYOUT_OPAQUE;
    kvk_unlock(&house->cache->lock);
    if (!opaque) {
        sequence_write(house, reply.sequence_id, 0);
    }
    if (forgery != NULL) {
        kvk_lock(&house->cache->lock);
        for (uint32_t i = 0; i < blocks; i++) {
            block_forge(house, sequence->groups[0].blocks[i], forgery);
        }
        kvk_unlock(&house->cache->lock);
    }
    house_seal(house, session, reply.sequence_id, 4 * blocks);
    house_close(house, session, reply.sequence_id);
}

struct stage {
    struct house house;
    uint64_t session, space;
};

static void stage_start(struct stage *stage, const struct kvk_geometry *geometry)
{
    house_init(&stage->house);
    house_start(&stage->house, &(struct house_options){.host_bytes = 64 << 20});
    stage->session = house_session(&stage->house);
    stage->space = house_space_of(&stage->house, &stage->house.caller, "model", geometry, 1);
    seal_again(&stage->house, stage->session, stage->space, 1, NULL);
}

static const struct kvk_cache_stats *stats_of(const struct stage *stage)
{
    return &stage->house.cache->stats;
}

static void expect_wrong(struct stage *stage, const struct forgery *forgery, bool wrong)
{
    uint64_t before = stats_of(stage)->wrong_reuse;
    seal_again(&stage->house, stage->session, stage->space, 1, forgery);
    cr_expect_eq(stats_of(stage)->wrong_reuse - before, wrong ? 1 : 0, "noise %g", forgery->noise);
}

Test(twins, equal_checksums_cost_no_comparison)
{
    struct stage stage;
    const struct kvk_geometry geometry = house_geometry();
    stage_start(&stage, &geometry);
    seal_again(&stage.house, stage.session, stage.space, 1, NULL);
    cr_expect_eq(stats_of(&stage)->duplicate_blocks, 1);
    cr_expect_eq(stats_of(&stage)->twins_equal, 1);
    cr_expect_eq(stats_of(&stage)->twins_compared, 0);
    cr_expect_eq(stats_of(&stage)->wrong_reuse, 0);
    house_stop(&stage.house);
}

Test(twins, each_format_has_its_tolerance)
{
    static const struct {
        enum kvk_format format;
        double passes, fails;
    } cases[] = {{KVK_FORMAT_FP32, 5e-4, 5e-3},
                 {KVK_FORMAT_FP16, 1e-2, 5e-2},
                 {KVK_FORMAT_BF16, 5e-2, 2e-1}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct stage stage;
        struct kvk_geometry geometry = house_geometry();
        geometry.format_k = cases[i].format;
        geometry.format_v = cases[i].format;
        stage_start(&stage, &geometry);
        expect_wrong(&stage, &(struct forgery){.noise = cases[i].passes}, false);
        cr_expect_eq(stats_of(&stage)->twins_compared, 1);
        expect_wrong(&stage, &(struct forgery){.noise = cases[i].fails}, true);
        house_stop(&stage.house);
    }
}

Test(twins, what_is_found_says_where)
{
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    geometry.tensor_shards = 2;
    stage_start(&stage, &geometry);
    expect_wrong(&stage,
                 &(struct forgery){.noise = 0.5, .shard = 1, .first_layer = 1, .value_only = true},
                 true);
    const struct kvk_wrong_reuse *found = &stage.house.cache->wrong_reuses[0];
    cr_expect_eq(found->space_id, stage.space);
    cr_expect_eq(found->group, 0);
    cr_expect_eq(found->position, 0);
    cr_expect_eq(found->shard, 1);
    cr_expect_eq(found->layer, 1);
    cr_expect(found->is_value);
    cr_expect_float_eq(found->distance, 0.5, 0.15);
    cr_expect_float_eq(found->tolerance, 1e-3, 1e-9);
    cr_expect_gt(found->time_ns, 0);
    cr_expect(found->key.low != 0 || found->key.high != 0);
    house_stop(&stage.house);
}

/* Nothing is known of opaque bytes: that they differ is counted, and no fault by itself. */
Test(twins, opaque_bytes_are_compared_exactly)
{
    struct stage stage;
    struct kvk_geometry geometry = {.layers = 1,
                                    .block_tokens = 4,
                                    .layout = KVK_LAYOUT_OPAQUE,
                                    .opaque_bytes = 512,
                                    .attention = KVK_ATTENTION_SELF,
                                    .tensor_shards = 1,
                                    .pipeline_shards = 1};
    stage_start(&stage, &geometry);
    seal_again(&stage.house, stage.session, stage.space, 1, NULL);
    cr_expect_eq(stats_of(&stage)->opaque_differences, 0);
    expect_wrong(&stage, &(struct forgery){.noise = 1}, false);
    cr_expect_eq(stats_of(&stage)->opaque_differences, 1);
    house_stop(&stage.house);
}

/* Of very many bytes only some are compared, spread over all; a fault of the space shows all the
 * same. */
Test(twins, one_seal_compares_a_bounded_number_of_bytes)
{
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    geometry.head_size_k = 1024; /* 128 KiB a block */
    geometry.head_size_v = 1024;
    house_init(&stage.house);
    house_start(&stage.house, &(struct house_options){.host_bytes = 256 << 20});
    stage.session = house_session(&stage.house);
    stage.space = house_space_of(&stage.house, &stage.house.caller, "large", &geometry, 1);
    const uint32_t blocks = 160;
    seal_again(&stage.house, stage.session, stage.space, blocks, NULL);
    seal_again(&stage.house, stage.session, stage.space, blocks, &(struct forgery){.noise = 0.5});
    uint64_t bytes = (uint64_t)blocks * 2 * 2 * 4 * (1024 + 1024) * 4;
    uint32_t stride = (uint32_t)(bytes / (8 << 20)) + 1;
    cr_assert_gt(stride, 1, "the test is large enough");
    uint64_t compared = (blocks + stride - 1) / stride;
    cr_expect_eq(stats_of(&stage)->twins_compared, compared);
    cr_expect_eq(stats_of(&stage)->twins_left_out, blocks - compared);
    cr_expect_eq(stats_of(&stage)->wrong_reuse, compared);
    house_stop(&stage.house);
}
