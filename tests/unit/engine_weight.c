/*
 * What the queues of a space are told of its worth: finite, the same for all its groups, and more
 * for a model that is dearer per byte. (A weight that is not finite makes every victim equal, and
 * the policy blind, without anything else going wrong.)
 */
#include <math.h>

#include "tests/engine_house.h"

static float weight_of_space(struct house *house, const char *model, double flops_per_token,
                             uint32_t group_count)
{
    struct kvk_space_request request = {.block_tokens = 4,
                                        .group_count = group_count,
                                        .flops_per_token = flops_per_token,
                                        .flops_per_token_position = 1};
    struct kvk_space_reply reply;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
    for (uint32_t g = 0; g < group_count; g++) {
        request.groups[g] = house_geometry();
    }
    cr_assert_eq(kvk_space_open(house->cache, &house->caller, &request, &reply, &house->error),
                 KVK_OK, "%s", house->error.text);
    const struct kvk_space *space = kvk_table_get(&house->cache->space_table, reply.space_id);
    float weight = space->groups[0]->tiers[KVK_TIER_DEVICE].queue.weight;
    for (uint32_t g = 0; g < group_count; g++) {
        for (int t = 0; t < KVK_MEMORY_TIER_COUNT; t++) {
            cr_assert_eq(space->groups[g]->tiers[t].queue.weight, weight);
            cr_assert_eq(space->groups[g]->tiers[t].clean.weight, weight);
            cr_assert_eq(space->groups[g]->tiers[t].held.weight, weight);
        }
    }
    return weight;
}

Test(engine_weight, follows_from_cost_and_bytes)
{
    struct house house;
    house_init(&house);
    const struct house_options options = {.device_bytes = 1 << 20, .host_bytes = 1 << 20};
    house_start(&house, &options);
    double block_bytes =
        (double)kvk_geometry_block_bytes(&(struct kvk_geometry){.layers = 2,
                                                                .kv_heads = 2,
                                                                .head_size_k = 8,
                                                                .head_size_v = 8,
                                                                .block_tokens = 4,
                                                                .format_k = KVK_FORMAT_FP32,
                                                                .format_v = KVK_FORMAT_FP32,
                                                                .layout = KVK_LAYOUT_HEADS_FIRST,
                                                                .attention = KVK_ATTENTION_SELF,
                                                                .tensor_shards = 1,
                                                                .pipeline_shards = 1});
    float one = weight_of_space(&house, "cheap", 1000, 1);
    cr_assert_float_eq(one, (float)(4 * (1000 + 2.0) / block_bytes), 1e-3F);
    cr_assert_float_eq(weight_of_space(&house, "dear", 10000, 1) / one, 9.98F, 0.01F);
    cr_assert_float_eq(weight_of_space(&house, "two groups", 1000, 2) / one, 0.5F, 1e-4F);
    cr_assert(isfinite(weight_of_space(&house, "absurd", 1e308, 1)));
    cr_assert_gt(weight_of_space(&house, "unsaid", 0, 1), 0);
    house_stop(&house);
}
