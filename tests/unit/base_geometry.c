/* Bytes of KV against figures worked out by hand. */
#include "base/geometry.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static struct kvk_geometry plain(uint32_t layers, uint32_t kv_heads, uint32_t head_size)
{
    return (struct kvk_geometry){
        .layers = layers,
        .kv_heads = kv_heads,
        .head_size_k = head_size,
        .head_size_v = head_size,
        .block_tokens = 16,
        .format_k = KVK_FORMAT_FP16,
        .format_v = KVK_FORMAT_FP16,
        .layout = KVK_LAYOUT_HEADS_FIRST,
        .attention = KVK_ATTENTION_SELF,
        .tensor_shards = 1,
        .pipeline_shards = 1,
    };
}

static void assert_good(const struct kvk_geometry *geometry)
{
    struct kvk_error error = {.status = KVK_OK};
    cr_assert_eq(kvk_geometry_check(geometry, "", &error), KVK_OK, "%s", error.text);
}

/* Case K1: KV heads, not query heads; head_dim, not hidden / heads. */
Test(base_geometry, k1_bytes_per_token)
{
    struct kvk_geometry geometry = plain(36, 8, 128);
    assert_good(&geometry);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 147456);
    geometry = plain(32, 8, 128);
    assert_good(&geometry);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 131072);
}

/* Case K3 before its scales: 8-bit values would be half of fp16's 131,072 bytes; in fp16 with
 * blocks of 16 tokens 1 GiB holds 512 blocks of 2 MiB. */
Test(base_geometry, k3_blocks_of_a_gibibyte)
{
    struct kvk_geometry geometry = plain(32, 8, 128);
    cr_assert_eq(kvk_geometry_block_bytes(&geometry), UINT64_C(2) << 20);
    cr_assert_eq((UINT64_C(1) << 30) / kvk_geometry_block_bytes(&geometry), 512);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry) / 2, 65536);
}

Test(base_geometry, k_and_v_apart)
{
    struct kvk_geometry geometry = plain(2, 3, 8);
    geometry.head_size_v = 4;
    geometry.format_k = KVK_FORMAT_FP32;
    geometry.format_v = KVK_FORMAT_BF16;
    geometry.block_tokens = 5;
    assert_good(&geometry);
    /* K: 3 heads x 5 tokens x 8 x 4 = 480; V: 3 x 5 x 4 x 2 = 120. */
    cr_assert_eq(kvk_geometry_shard_bytes(&geometry, 0), 1200);
    cr_assert_eq(kvk_geometry_k_offset(&geometry, 0, 0), 0);
    cr_assert_eq(kvk_geometry_v_offset(&geometry, 0, 0), 480);
    cr_assert_eq(kvk_geometry_k_offset(&geometry, 0, 1), 600);
    cr_assert_eq(kvk_geometry_v_offset(&geometry, 0, 1), 1080);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 240);
}

/* 7 layers over 3 pipeline ranks are 3, 2, 2; 10 heads over 4 tensor ranks are 3, 3, 2, 2. */
Test(base_geometry, uneven_shards)
{
    struct kvk_geometry geometry = plain(7, 10, 8);
    geometry.block_tokens = 4;
    geometry.tensor_shards = 4;
    geometry.pipeline_shards = 3;
    assert_good(&geometry);
    static const uint32_t layers[] = {3, 2, 2};
    static const uint32_t first_layers[] = {0, 3, 5};
    static const uint32_t heads[] = {3, 3, 2, 2};
    static const uint32_t first_heads[] = {0, 3, 6, 8};
    cr_assert_eq(kvk_geometry_rank_count(&geometry), 12);
    cr_assert_eq(kvk_geometry_shard_count(&geometry), 12);
    for (uint32_t rank = 0; rank < 12; rank++) {
        uint32_t pipeline = rank / 4;
        uint32_t tensor = rank % 4;
        cr_assert_eq(kvk_geometry_rank_shard(&geometry, rank), rank);
        cr_assert_eq(kvk_geometry_shard_layers(&geometry, rank), layers[pipeline]);
        cr_assert_eq(kvk_geometry_shard_first_layer(&geometry, rank), first_layers[pipeline]);
        cr_assert_eq(kvk_geometry_shard_heads(&geometry, rank), heads[tensor]);
        cr_assert_eq(kvk_geometry_shard_first_head(&geometry, rank), first_heads[tensor]);
    }
    /* Shard 0: 3 layers x 3 heads x 4 tokens x (8 + 8) x 2 = 1,152. All: the whole model once. */
    cr_assert_eq(kvk_geometry_shard_bytes(&geometry, 0), 1152);
    cr_assert_eq(kvk_geometry_shard_bytes(&geometry, 11), 2 * 2 * 4 * 16 * 2);
    cr_assert_eq(kvk_geometry_block_bytes(&geometry), 7 * 10 * 4 * 16 * 2);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 7 * 10 * 16 * 2);
}

/* 2 heads on 8 ranks: ranks 0 to 3 have head 0, 4 to 7 head 1; each stores its own copy. */
Test(base_geometry, fewer_heads_than_ranks)
{
    struct kvk_geometry geometry = plain(4, 2, 64);
    geometry.tensor_shards = 8;
    assert_good(&geometry);
    for (uint32_t rank = 0; rank < 8; rank++) {
        cr_assert_eq(kvk_geometry_shard_heads(&geometry, rank), 1);
        cr_assert_eq(kvk_geometry_shard_first_head(&geometry, rank), rank / 4);
        cr_assert_eq(kvk_geometry_shard_bytes(&geometry, rank), 4 * 16 * (64 + 64) * 2);
    }
    cr_assert_eq(kvk_geometry_block_bytes(&geometry), 8 * 4 * 16 * 128 * 2);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 4 * 2 * 128 * 2);
}

/* DeepSeek-like: 61 layers, one latent head of 512 + 64, bf16: 70,272 bytes a token, on each rank
 * the same, stored once for each pipeline rank. */
Test(base_geometry, latent_is_stored_once)
{
    struct kvk_geometry geometry = plain(61, 1, 576);
    geometry.head_size_v = 512;
    geometry.format_k = KVK_FORMAT_BF16;
    geometry.format_v = KVK_FORMAT_BF16;
    geometry.latent = true;
    geometry.tensor_shards = 8;
    geometry.pipeline_shards = 2;
    assert_good(&geometry);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 70272);
    cr_assert_eq(kvk_geometry_rank_count(&geometry), 16);
    cr_assert_eq(kvk_geometry_shard_count(&geometry), 2);
    for (uint32_t rank = 0; rank < 16; rank++) {
        cr_assert_eq(kvk_geometry_rank_shard(&geometry, rank), rank / 8);
    }
    cr_assert_eq(kvk_geometry_shard_layers(&geometry, 0), 31);
    cr_assert_eq(kvk_geometry_shard_layers(&geometry, 1), 30);
    cr_assert_eq(kvk_geometry_shard_first_layer(&geometry, 1), 31);
    cr_assert_eq(kvk_geometry_shard_bytes(&geometry, 1), 30 * 16 * 576 * 2);
    cr_assert_eq(kvk_geometry_block_bytes(&geometry), 16 * 70272);
    cr_assert_eq(kvk_geometry_v_offset(&geometry, 0, 3), kvk_geometry_k_offset(&geometry, 0, 3));
    geometry.format_v = KVK_FORMAT_NONE;
    assert_good(&geometry);
}

Test(base_geometry, opaque_counts_its_own_bytes)
{
    struct kvk_geometry geometry = {
        .layers = 4,
        .block_tokens = 256,
        .layout = KVK_LAYOUT_OPAQUE,
        .attention = KVK_ATTENTION_SELF,
        .tensor_shards = 2,
        .pipeline_shards = 1,
        .opaque_bytes = 1000,
    };
    assert_good(&geometry);
    cr_assert_eq(kvk_geometry_shard_bytes(&geometry, 1), 1000);
    cr_assert_eq(kvk_geometry_block_bytes(&geometry), 2000);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 8); /* 7.8, rounded up */
    cr_assert_eq(kvk_geometry_shard_heads(&geometry, 0), 0);
}

Test(base_geometry, window_start)
{
    struct kvk_geometry geometry = plain(1, 1, 8);
    cr_assert_eq(kvk_geometry_window_start(&geometry, 1000000), 0);
    geometry.window = 8;
    /* Case B6: the query at 6 sees 0 to 6, the one at 17 sees 10 to 17. */
    cr_assert_eq(kvk_geometry_window_start(&geometry, 6), 0);
    cr_assert_eq(kvk_geometry_window_start(&geometry, 7), 0);
    cr_assert_eq(kvk_geometry_window_start(&geometry, 8), 1);
    cr_assert_eq(kvk_geometry_window_start(&geometry, 17), 10);
    cr_assert_eq(kvk_geometry_window_start(&geometry, UINT64_MAX), UINT64_MAX - 7);
}

/* Set one member to `value` and expect the refusal to name `field`. */
static void assert_refused(struct kvk_geometry geometry, const char *field)
{
    struct kvk_error error = {.status = KVK_OK};
    char wanted[KVK_ERROR_FIELD_SIZE];
    (void)snprintf(wanted, sizeof(wanted), "groups[2].%s", field);
    cr_assert_eq(kvk_geometry_check(&geometry, "groups[2].", &error), KVK_INVALID, "%s", field);
    cr_assert_eq(error.cause, KVK_CAUSE_FIELD);
    cr_assert_str_eq(error.field, wanted);
    cr_assert_neq(strstr(error.text, field), NULL, "%s", error.text);
}

#define REFUSED(member, value)                                                                     \
    do {                                                                                           \
        struct kvk_geometry changed = plain(4, 4, 16);                                             \
        changed.member = (value);                                                                  \
        assert_refused(changed, #member);                                                          \
    } while (0)

Test(base_geometry, refusals_name_the_field)
{
    REFUSED(layers, 0);
    REFUSED(layers, KVK_LAYER_COUNT_MAX + 1);
    REFUSED(kv_heads, 0);
    REFUSED(kv_heads, KVK_HEAD_COUNT_MAX + 1);
    REFUSED(head_size_k, 0);
    REFUSED(head_size_k, UINT32_MAX);
    REFUSED(head_size_v, 0);
    REFUSED(head_size_v, KVK_HEAD_SIZE_MAX + 1);
    REFUSED(block_tokens, 0);
    REFUSED(block_tokens, UINT32_MAX);
    REFUSED(tensor_shards, 0);
    REFUSED(tensor_shards, UINT32_MAX);
    REFUSED(pipeline_shards, 0);
    REFUSED(pipeline_shards, 5); /* of 4 layers */
    REFUSED(format_k, KVK_FORMAT_NONE);
    REFUSED(format_k, (enum kvk_format)77);
    REFUSED(format_v, KVK_FORMAT_NONE);
    REFUSED(format_v, (enum kvk_format)77);
    REFUSED(layout, (enum kvk_layout)0);
    REFUSED(layout, (enum kvk_layout)9);
    REFUSED(attention, (enum kvk_attention)0);
    REFUSED(attention, (enum kvk_attention)3);
    REFUSED(sinks, 4); /* without a window */
    REFUSED(opaque_bytes, 1);
}

Test(base_geometry, refusals_of_combinations)
{
    struct kvk_geometry geometry = plain(64, 4, 16);
    geometry.tensor_shards = 8;
    geometry.pipeline_shards = 9;
    assert_refused(geometry, "tensor_shards");

    geometry = plain(1024, 1024, 4096);
    assert_refused(geometry, "block_tokens"); /* over 1 GiB */

    geometry = plain(4, 1, 16);
    geometry.latent = true;
    geometry.head_size_v = 17;
    assert_refused(geometry, "head_size_v");

    geometry = plain(4, 1, 16);
    geometry.attention = KVK_ATTENTION_CROSS;
    geometry.window = 8;
    assert_refused(geometry, "window");

    geometry = plain(4, 1, 3);
    geometry.block_tokens = 1;
    geometry.format_v = KVK_FORMAT_FP32; /* K takes 6 bytes a head */
    assert_refused(geometry, "format_v");

    geometry = plain(4, 4, 16);
    geometry.layout = KVK_LAYOUT_OPAQUE;
    assert_refused(geometry, "opaque_bytes");
    geometry.opaque_bytes = KVK_BLOCK_BYTES_MAX + 1;
    assert_refused(geometry, "opaque_bytes");
}

Test(base_geometry, odd_block_sizes_are_fine)
{
    static const uint32_t sizes[] = {1, 3, 4, 4096};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        struct kvk_geometry geometry = plain(2, 2, 16);
        geometry.block_tokens = sizes[i];
        assert_good(&geometry);
        cr_assert_eq(kvk_geometry_block_bytes(&geometry), (uint64_t)sizes[i] * 2 * 2 * 32 * 2);
    }
}

#define DIFFERS(member)                                                                            \
    do {                                                                                           \
        struct kvk_geometry other = plain(4, 4, 16);                                               \
        other.member = other.member != 1 ? 1 : 2;                                                  \
        cr_assert_not(kvk_geometry_equal(&geometry, &other), #member);                             \
    } while (0)

Test(base_geometry, equal_looks_at_every_member)
{
    struct kvk_geometry geometry = plain(4, 4, 16);
    struct kvk_geometry same = geometry;
    cr_assert(kvk_geometry_equal(&geometry, &same));
    DIFFERS(layers);
    DIFFERS(kv_heads);
    DIFFERS(head_size_k);
    DIFFERS(head_size_v);
    DIFFERS(block_tokens);
    DIFFERS(format_k);
    DIFFERS(format_v);
    DIFFERS(layout);
    DIFFERS(attention);
    DIFFERS(tensor_shards);
    DIFFERS(pipeline_shards);
    DIFFERS(window);
    DIFFERS(sinks);
    DIFFERS(opaque_bytes);
    struct kvk_geometry other = geometry;
    other.latent = true;
    cr_assert_not(kvk_geometry_equal(&geometry, &other));
}

/* A layer of 3 heads, 5 tokens, in each compact format; scales are counted and aligned. */
Test(base_geometry, compact_formats_hold_their_scales)
{
    struct kvk_geometry geometry = plain(2, 3, 24);
    geometry.block_tokens = 5;
    geometry.format_k = geometry.format_v = KVK_FORMAT_FP8_E4M3;
    assert_good(&geometry);
    /* 3 x 5 x 24 = 360 to 368; 3 scales of 4 to 16. */
    struct kvk_part part = kvk_geometry_part(&geometry, 0, false);
    cr_assert_eq(part.row_bytes, 24);
    cr_assert_eq(part.scales_offset, 368);
    cr_assert_eq(part.scale_stride, 4);
    cr_assert_eq(part.size_bytes, 384);
    cr_assert_eq(kvk_geometry_v_offset(&geometry, 0, 1), 3 * 384);
    cr_assert_eq(kvk_geometry_shard_bytes(&geometry, 0), 4 * 384);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 2 * 154); /* 768 / 5, rounded up */

    geometry.format_k = geometry.format_v = KVK_FORMAT_INT8_CHANNEL;
    assert_good(&geometry);
    part = kvk_geometry_part(&geometry, 0, false); /* 3 x 24 scales of 2: 144 */
    cr_assert_eq(part.scales_offset, 368);
    cr_assert_eq(part.scale_stride, 48);
    cr_assert_eq(part.size_bytes, 512);
    part = kvk_geometry_part(&geometry, 0, true); /* 3 x 5 scales of 2: 30 to 32 */
    cr_assert_eq(part.scale_stride, 10);
    cr_assert_eq(part.size_bytes, 400);
    cr_assert_eq(kvk_geometry_v_offset(&geometry, 0, 1), 912 + 512);

    geometry.head_size_k = geometry.head_size_v = 96;
    geometry.format_k = geometry.format_v = KVK_FORMAT_INT8_32;
    assert_good(&geometry);
    part = kvk_geometry_part(&geometry, 0, true);
    cr_assert_eq(part.row_bytes, 102);
    cr_assert_eq(part.scales_offset, 0);
    cr_assert_eq(part.size_bytes, 3 * 5 * 102);
}

/* Case K3. */
Test(base_geometry, scales_cost_bytes_too)
{
    struct kvk_geometry geometry = plain(32, 8, 128);
    geometry.format_k = geometry.format_v = KVK_FORMAT_INT8_32;
    assert_good(&geometry);
    cr_assert_eq(kvk_geometry_token_bytes(&geometry), 69632);
    cr_assert_eq((UINT64_C(1) << 30) / kvk_geometry_block_bytes(&geometry), 963);
}

Test(base_geometry, compact_formats_that_cannot_be)
{
    struct kvk_geometry geometry = plain(2, 2, 80);
    geometry.format_k = geometry.format_v = KVK_FORMAT_INT8_32;
    assert_refused(geometry, "head_size_k");
    geometry.head_size_k = 96;
    assert_refused(geometry, "head_size_v");
    geometry.head_size_v = 64;
    assert_good(&geometry);
    geometry.format_v = KVK_FORMAT_FP8_E4M3;
    assert_refused(geometry, "format_v");
    geometry.format_v = KVK_FORMAT_BF16;
    assert_refused(geometry, "format_v");
    geometry.format_k = KVK_FORMAT_BF16;
    geometry.format_v = KVK_FORMAT_INT8_32;
    assert_refused(geometry, "format_v");

    geometry = plain(2, 1, 576);
    geometry.latent = true;
    geometry.head_size_v = 512;
    geometry.format_v = KVK_FORMAT_NONE;
    geometry.format_k = KVK_FORMAT_INT8_CHANNEL;
    assert_refused(geometry, "format_k");
    geometry.format_k = KVK_FORMAT_INT8_32;
    assert_good(&geometry);
    geometry.head_size_v = 500; /* its last group would be cut */
    assert_refused(geometry, "head_size_v");
}

Test(base_geometry, formats)
{
    for (int format = 0; format <= KVK_FORMAT_MAX; format++) {
        bool plain_format = kvk_format_bytes((enum kvk_format)format) != 0;
        bool compact = kvk_format_is_compact((enum kvk_format)format);
        cr_assert_eq(kvk_format_is_known((enum kvk_format)format), format != KVK_FORMAT_NONE);
        cr_assert_eq(plain_format || compact, format != KVK_FORMAT_NONE);
        cr_assert_not(plain_format && compact);
        cr_assert_str_neq(kvk_format_name((enum kvk_format)format), "unknown");
        cr_assert_eq(kvk_format_align((enum kvk_format)format) == 0, format == KVK_FORMAT_NONE);
    }
    cr_assert_not(kvk_format_is_known((enum kvk_format)(KVK_FORMAT_MAX + 1)));
    cr_assert_eq(kvk_format_bytes(KVK_FORMAT_NONE), 0);
    cr_assert_eq(kvk_format_bytes(KVK_FORMAT_FP32), 4);
    cr_assert_eq(kvk_format_bytes(KVK_FORMAT_FP16), 2);
    cr_assert_eq(kvk_format_bytes(KVK_FORMAT_BF16), 2);
    cr_assert_str_eq(kvk_format_name(KVK_FORMAT_BF16), "bf16");
    cr_assert_str_eq(kvk_format_name((enum kvk_format)50), "unknown");
}
