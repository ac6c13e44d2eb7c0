/* The capacity formulas: published models' figures, and counting by hand. */
#include <criterion/criterion.h>

#include "base/capacity.h"
#include "base/geometry.h"
#include "base/random.h"

#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)

static struct kvk_capacity model(uint32_t layers, uint32_t kv_heads, uint32_t head_size)
{
    return (struct kvk_capacity){.groups = {{.layers = layers,
                                             .kv_heads = kv_heads,
                                             .head_size_k = head_size,
                                             .head_size_v = head_size}},
                                 .group_count = 1,
                                 .format = {.value_bits = 16},
                                 .tensor_ranks = 1,
                                 .pipeline_ranks = 1,
                                 .block_tokens = 16};
}

static void check(const struct kvk_capacity *capacity)
{
    struct kvk_error error = {0};
    cr_assert_eq(kvk_capacity_check(capacity, &error), KVK_OK, "%s", error.text);
}

Test(capacity, a_model_of_32_layers)
{
    struct kvk_capacity m = model(32, 8, 128);
    check(&m);
    cr_assert_eq(kvk_capacity_token_bytes(&m), 131072);
    cr_assert_eq(kvk_capacity_sequence_bytes(&m, 4096), 512 * MIB);
    cr_assert_eq(kvk_capacity_sequence_bytes(&m, 1024) + kvk_capacity_sequence_bytes(&m, 2048) +
                     kvk_capacity_sequence_bytes(&m, 4096),
                 896 * MIB);
    cr_assert_eq(kvk_capacity_tokens_max(&m, 5 * GIB), 40960);
    cr_assert_eq(kvk_capacity_kept_blocks(&m, 0, 100), 7);
    struct kvk_capacity many = model(32, 32, 128);
    cr_assert_eq(kvk_capacity_sequence_bytes(&many, 4096), 2 * GIB);
}

Test(capacity, ranks_share_heads_and_layers)
{
    struct kvk_capacity m = model(80, 8, 128); /* 70B */
    m.tensor_ranks = 8;
    check(&m);
    cr_assert_eq(kvk_capacity_token_rank_bytes(&m), 40960);
    m.tensor_ranks = 16; /* each has a copy of one head */
    check(&m);
    cr_assert_eq(kvk_capacity_token_rank_bytes(&m), 40960);
    m = model(32, 8, 128);
    m.pipeline_ranks = 4;
    cr_assert_eq(kvk_capacity_token_rank_bytes(&m), 32768);
    m.tensor_ranks = 2;
    check(&m);
    cr_assert_eq(kvk_capacity_token_rank_bytes(&m), 16384);
    cr_assert_eq(kvk_capacity_token_bytes(&m), 131072);
    m.pipeline_ranks = 3; /* 11, 11, 10 layers */
    cr_assert_eq(kvk_capacity_token_rank_bytes(&m), 11 * 2 * 4 * 128 * 2);
}

Test(capacity, a_latent_cache_is_whole_on_every_rank)
{
    struct kvk_capacity m = model(61, 1, 576);
    m.groups[0].head_size_v = 0;
    m.groups[0].latent = true;
    m.tensor_ranks = 8;
    check(&m);
    cr_assert_eq(kvk_capacity_token_bytes(&m), 70272);
    cr_assert_eq(kvk_capacity_token_rank_bytes(&m), 70272);
}

Test(capacity, windows)
{
    struct kvk_capacity m = model(21, 8, 256);
    m.groups[1] = m.groups[0];
    m.groups[1].window = 4096;
    m.group_count = 2;
    check(&m);
    cr_assert_eq(kvk_capacity_layer_bytes(&m, 0), 8192);
    cr_assert_eq(kvk_capacity_kept_tokens(&m, 0, 8192), 8192);
    cr_assert_eq(kvk_capacity_kept_tokens(&m, 1, 8192), 4096);
    cr_assert_eq(kvk_capacity_kept_blocks(&m, 1, 8192), 256);
    cr_assert_eq(kvk_capacity_kept_blocks(&m, 1, 8193), 257); /* lies across one block more */
    m.groups[1].sinks = 4;
    cr_assert_eq(kvk_capacity_kept_tokens(&m, 1, 8192), 4100);
    cr_assert_eq(kvk_capacity_kept_blocks(&m, 1, 8192), 257);
    m.groups[0] = m.groups[1];
    cr_assert_eq(kvk_capacity_tokens_max(&m, 4 * GIB), UINT64_MAX);
}

Test(capacity, kept_blocks_by_hand)
{
    struct kvk_random random;
    kvk_random_init(&random, 7);
    for (int round = 0; round < 20000; round++) {
        struct kvk_capacity m = model(1, 1, 8);
        m.block_tokens = 1 + (uint32_t)kvk_random_below(&random, 9);
        m.groups[0].window = 1 + (uint32_t)kvk_random_below(&random, 40);
        m.groups[0].sinks = (uint32_t)kvk_random_below(&random, 12);
        uint64_t tokens = kvk_random_below(&random, 100);
        uint64_t blocks = 0;
        uint64_t kept = 0;
        for (uint64_t first = 0; first < tokens; first += m.block_tokens) {
            bool seen = false;
            for (uint64_t t = first; t < first + m.block_tokens && t < tokens; t++) {
                bool visible = t < m.groups[0].sinks || t + m.groups[0].window >= tokens;
                seen = seen || visible;
                kept += visible ? 1 : 0;
            }
            blocks += seen ? 1 : 0;
        }
        cr_assert_eq(kvk_capacity_kept_blocks(&m, 0, tokens), blocks,
                     "block %u window %u sinks %u tokens %llu", m.block_tokens, m.groups[0].window,
                     m.groups[0].sinks, (unsigned long long)tokens);
        cr_assert_eq(kvk_capacity_kept_tokens(&m, 0, tokens), kept);
    }
}

Test(capacity, scales_and_zero_points)
{
    struct kvk_capacity m = model(32, 8, 128);
    cr_assert(kvk_capacity_format_named("int8", &m.format));
    check(&m);
    cr_assert_eq(kvk_capacity_token_bytes(&m), 69632);
    cr_assert_eq(kvk_capacity_tokens_max(&m, GIB) / 16, 963);
    cr_assert(kvk_capacity_format_named("int4z", &m.format));
    cr_assert_eq(kvk_capacity_token_bytes(&m), 65536 / 2 + 65536 / 32 * 4);
    cr_assert_not(kvk_capacity_format_named("int3", &m.format));
}

/* Case K3: the same bytes as the daemon's blocks take, whatever the format. */
Test(capacity, compact_formats_count_as_they_are_stored)
{
    static const char *const names[] = {"fp8_e4m3", "int8_channel", "int8_32"};
    struct kvk_random random;

    kvk_random_init(&random, 3);
    struct kvk_capacity k3 = model(32, 8, 128);
    cr_assert(kvk_capacity_format_named("int8_32", &k3.format));
    check(&k3);
    cr_assert_eq(kvk_capacity_token_bytes(&k3), 69632);
    cr_assert_eq(kvk_capacity_tokens_max(&k3, GIB) / 16, 963);
    cr_assert_float_eq(kvk_capacity_value_bytes(&k3), 1.0625, 1e-12);
    /* K: 16 x 8 x 128 + 8 x 128 x 2; V: 16 x 8 x 128 + 8 x 16 x 2. */
    cr_assert(kvk_capacity_format_named("int8_channel", &k3.format));
    cr_assert_eq(kvk_capacity_block_bytes(&k3), 32 * (18432 + 16640));
    cr_assert(kvk_capacity_format_named("fp8_e4m3", &k3.format));
    cr_assert_eq(kvk_capacity_block_bytes(&k3), 32 * 2 * (16384 + 32));
    cr_assert_eq(kvk_capacity_token_bytes(&k3), 32 * 2 * 1026);

    for (int round = 0; round < 3000; round++) {
        struct kvk_geometry geometry = {
            .layers = 1 + (uint32_t)kvk_random_below(&random, 5),
            .kv_heads = 1 + (uint32_t)kvk_random_below(&random, 9),
            .head_size_k = 32 * (1 + (uint32_t)kvk_random_below(&random, 5)),
            .block_tokens = 1 + (uint32_t)kvk_random_below(&random, 40),
            .layout = KVK_LAYOUT_HEADS_FIRST,
            .attention = KVK_ATTENTION_SELF,
            .tensor_shards = 1,
            .pipeline_shards = 1,
        };
        const char *name = names[kvk_random_below(&random, 3)];
        geometry.head_size_v = 32 * (1 + (uint32_t)kvk_random_below(&random, 5));
        struct kvk_capacity m = model(geometry.layers, geometry.kv_heads, geometry.head_size_k);
        m.groups[0].head_size_v = geometry.head_size_v;
        m.block_tokens = geometry.block_tokens;
        cr_assert(kvk_capacity_format_named(name, &m.format));
        geometry.format_k = geometry.format_v = m.format.stored;
        check(&m);
        cr_assert_eq(kvk_geometry_check(&geometry, "", NULL), KVK_OK);
        cr_assert_eq(kvk_capacity_block_bytes(&m), kvk_geometry_block_bytes(&geometry), "%s", name);
        cr_assert_eq(kvk_capacity_token_bytes(&m), kvk_geometry_token_bytes(&geometry), "%s", name);
    }
}

Test(capacity, compact_formats_that_cannot_be)
{
    struct kvk_error error = {0};
    struct kvk_capacity m = model(2, 2, 80);
    cr_assert(kvk_capacity_format_named("int8_32", &m.format));
    cr_assert_eq(kvk_capacity_check(&m, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "head_size");
    m = model(2, 1, 576);
    m.groups[0].head_size_v = 0;
    m.groups[0].latent = true;
    cr_assert(kvk_capacity_format_named("int8_channel", &m.format));
    cr_assert_eq(kvk_capacity_check(&m, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "format");
    cr_assert(kvk_capacity_format_named("fp8_e4m3", &m.format));
    check(&m);
    cr_assert_eq(kvk_capacity_block_bytes(&m), 2 * (16 * 576 + 16));
}

Test(capacity, cross_attention_does_not_grow)
{
    struct kvk_capacity m = model(12, 12, 64);
    m.groups[1] = m.groups[0];
    m.groups[1].cross = true;
    m.group_count = 2;
    m.encoder_tokens = 512;
    check(&m);
    cr_assert_eq(kvk_capacity_cross_bytes(&m), 18874368);
    cr_assert_eq(kvk_capacity_token_bytes(&m), 36864);
    cr_assert_eq(kvk_capacity_sequence_bytes(&m, 0), 18874368);
    cr_assert_eq(kvk_capacity_sequence_bytes(&m, 16), 18874368 + 16 * 36864);
    cr_assert_eq(kvk_capacity_tokens_max(&m, 18874367), 0);
}

Test(capacity, how_many_at_once)
{
    struct kvk_capacity m = model(32, 8, 128);
    struct kvk_capacity_load load = {.prompt_tokens = 1024, .output_tokens = 1024};
    uint64_t budget = 4 * GIB;
    cr_assert_eq(kvk_capacity_sequences(&m, &load, budget), 16);
    load.preempt = true; /* 1,536 tokens each */
    cr_assert_eq(kvk_capacity_sequences(&m, &load, budget), 21);
    load.preempt = false;
    load.shared_tokens = 1024; /* once 128 MiB, then 128 MiB each */
    cr_assert_eq(kvk_capacity_sequences(&m, &load, budget), 31);
    load.shared_tokens = 1020; /* 63 whole blocks */
    cr_assert_eq(kvk_capacity_sequences(&m, &load, budget),
                 (budget - 63 * 2 * MIB) / (65 * 2 * MIB));
    cr_assert_eq(kvk_capacity_sequences(&m, &load, MIB), 0);
    /* A window that has let go of the shared part has nothing to share. */
    m.groups[0].window = 512;
    cr_assert_eq(kvk_capacity_sequences(&m, &load, budget), 64);
}

Test(capacity, what_cannot_be_is_named)
{
    struct kvk_error error;
    struct kvk_capacity m = model(32, 8, 128);
    m.tensor_ranks = 3;
    cr_assert_eq(kvk_capacity_check(&m, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "tensor_ranks");
    m = model(0, 8, 128);
    cr_assert_eq(kvk_capacity_check(&m, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "layers");
    m = model(32, 8, 100);
    m.format = (struct kvk_capacity_format){.value_bits = 8, .scale_bits = 16, .scale_values = 64};
    m.groups[0].head_size_v = 7;
    cr_assert_eq(kvk_capacity_check(&m, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "scale_values");
    m = model(32, 8, 128);
    m.groups[0].cross = true;
    cr_assert_eq(kvk_capacity_check(&m, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "encoder_tokens");
    m = model(32, 8, 128);
    m.pipeline_ranks = 33;
    cr_assert_eq(kvk_capacity_check(&m, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "pipeline_ranks");
}
