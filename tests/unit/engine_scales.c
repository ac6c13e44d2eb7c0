/*
 * Spaces whose own format is compact: bad scales are never sealed, what is sealed is attended as it
 * is stored, and what was never written leaks into nothing (case L4).
 */
#include <math.h>

#include "daemon/attention.h"
#include "gpu/convert.h"
#include "gpu/values.h"
#include "tests/engine_stage.h"

#define HEADS 2
#define GROUP 2

static struct kvk_geometry compact_geometry(enum kvk_format format)
{
    struct kvk_geometry geometry = house_geometry();

    geometry.head_size_k = geometry.head_size_v = 32;
    geometry.format_k = geometry.format_v = format;
    return geometry;
}

/* A block of random values, as a worker would have it in the space's format; of the same bytes
 * where tokens come first, since the values are as good in any order. */
static uint8_t *block_make(const struct kvk_geometry *space, struct kvk_random *random)
{
    struct kvk_geometry heads_first = *space;
    const struct kvk_geometry *geometry = &heads_first;
    struct kvk_error error;

    heads_first.layout = KVK_LAYOUT_HEADS_FIRST;
    struct kvk_geometry wide = heads_first;
    wide.format_k = wide.format_v = KVK_FORMAT_FP32;
    uint64_t count = kvk_geometry_shard_bytes(&wide, 0) / sizeof(float);
    float *values = malloc(count * sizeof(float));
    uint8_t *bytes = malloc(kvk_geometry_shard_bytes(geometry, 0));
    cr_assert(values != NULL && bytes != NULL);
    for (uint64_t i = 0; i < count; i++) {
        values[i] = (float)kvk_random_unit(random) * 2 - 1;
    }
    cr_assert_eq(
        kvk_convert_shard_narrow(kvk_convert_find(NULL), &wide, geometry, 0, values, bytes, &error),
        KVK_OK);
    free(values);
    return bytes;
}

/* Where the last scale of V in the last layer lies, and its size. */
static uint8_t *last_scale(const struct kvk_geometry *geometry, uint8_t *block, size_t *size)
{
    const struct kvk_part part = kvk_geometry_part(geometry, 0, true);
    uint8_t *bytes = block + kvk_geometry_v_offset(geometry, 0, geometry->layers - 1);

    if (part.format == KVK_FORMAT_INT8_32) {
        *size = 2;
        return bytes + part.size_bytes - KVK_INT8_32_BYTES;
    }
    *size = part.format == KVK_FORMAT_FP8_E4M3 ? 4 : 2;
    return bytes + part.scales_offset + part.scale_stride * part.heads - *size;
}

static void scale_spoil(const struct kvk_geometry *geometry, uint8_t *block, float value)
{
    size_t size;
    uint8_t *at = last_scale(geometry, block, &size);
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    if (geometry->format_v == KVK_FORMAT_INT8_32) {
        bits = isnan(value) ? 0x7e00U : isinf(value) ? 0x7c00U : 0xbc00U; /* -1 */
    } else if (size == 2) {
        bits >>= 16;
    }
    memcpy(at, &bits, size);
}

static enum kvk_status block_write(struct stage *stage, uint64_t id, uint64_t block,
                                   const uint8_t *data)
{
    const struct kvk_write_piece piece = {
        .block = block, .data = data, .size_bytes = stage->block_bytes};

    return kvk_sequence_write(stage->house.cache, &stage->house.caller, stage->session, id, &piece,
                              &stage->house.error);
}

static void refuse_bad_scales(struct kvk_geometry geometry)
{
    static const float bad[] = {NAN, INFINITY, -1};
    struct stage stage;
    struct kvk_random random;
    uint32_t *tokens = malloc(geometry.block_tokens * sizeof(*tokens));

    kvk_random_init(&random, 1);
    house_init(&stage.house);
    stage_start_with(&stage, &geometry, 8, 0);
    house_tokens(tokens, geometry.block_tokens, 1);
    for (int i = 0; i < 3; i++) {
        uint64_t length = geometry.block_tokens;
        uint8_t *block = block_make(&geometry, &random);
        tokens[0] = (uint32_t)i + 7;
        uint64_t id = stage_open(&stage, tokens, length).sequence_id;
        scale_spoil(&geometry, block, bad[i]);
        STAGE_OK(&stage, block_write(&stage, id, 0, block));
        cr_expect_eq(house_try_seal(&stage.house, stage.session, id, length, length), KVK_INVALID);
        cr_expect_str_eq(stage.house.error.field, "scales");
        cr_expect_eq(house_cached(&stage.house, stage.space, tokens, length), 0);
        scale_spoil(&geometry, block, 0.5F);
        if (geometry.format_v == KVK_FORMAT_INT8_32) {
            size_t size;
            memset(last_scale(&geometry, block, &size), 0, 2);
        }
        STAGE_OK(&stage, block_write(&stage, id, 0, block));
        house_seal(&stage.house, stage.session, id, length);
        stage_close(&stage, id);
        free(block);
    }
    free(tokens);
    stage_stop(&stage);
}

Test(scales, bad_ones_are_not_sealed)
{
    for (int format = KVK_FORMAT_FP8_E4M3; format <= KVK_FORMAT_MAX; format++) {
        struct kvk_geometry geometry = compact_geometry((enum kvk_format)format);
        refuse_bad_scales(geometry);
        geometry.layout = KVK_LAYOUT_TOKENS_FIRST;
        refuse_bad_scales(geometry);
        geometry = compact_geometry((enum kvk_format)format);
        geometry.kv_heads = 8; /* more bytes than are looked at under the lock */
        geometry.head_size_k = geometry.head_size_v = 128;
        geometry.layers = 4;
        geometry.block_tokens = 16;
        refuse_bad_scales(geometry);
    }
}

/* ---- Attending them ---- */

/* The plain loop over what was written, in double. */
static void expected_output(const struct kvk_geometry *geometry, uint8_t *const *blocks,
                            uint64_t length, uint32_t layer, uint32_t head, const float *query,
                            double *output)
{
    const struct kvk_part k = kvk_geometry_part(geometry, 0, false);
    const struct kvk_part v = kvk_geometry_part(geometry, 0, true);
    double sum = 0;

    memset(output, 0, geometry->head_size_v * sizeof(*output));
    for (uint64_t token = 0; token < length; token++) {
        uint8_t *block = blocks[token / geometry->block_tokens];
        uint32_t slot = (uint32_t)(token % geometry->block_tokens);
        double logit = 0;
        for (uint32_t i = 0; i < k.head_size; i++) {
            logit += (double)query[i] *
                     kvk_part_value(&k, block + kvk_geometry_k_offset(geometry, 0, layer), head,
                                    slot, i);
        }
        double weight = exp(logit);
        sum += weight;
        for (uint32_t i = 0; i < v.head_size; i++) {
            output[i] +=
                weight * kvk_part_value(&v, block + kvk_geometry_v_offset(geometry, 0, layer), head,
                                        slot, i);
        }
    }
    for (uint32_t i = 0; i < v.head_size; i++) {
        output[i] /= sum;
    }
}

static void check_attends(struct stage *stage, uint64_t id, uint8_t *const *blocks, uint64_t length,
                          struct kvk_random *random)
{
    float queries[HEADS * GROUP][32];
    float output[HEADS * GROUP][32];
    float lse[HEADS * GROUP];

    for (uint32_t i = 0; i < HEADS * GROUP * 32; i++) {
        queries[i / 32][i % 32] = (float)kvk_random_unit(random) - 0.5F;
    }
    struct kvk_attention_item item = {.sequence_id = id,
                                      .position = length - 1,
                                      .query_count = 1,
                                      .queries = (const uint8_t *)queries,
                                      .queries_size = sizeof(queries),
                                      .output = output[0],
                                      .lse = lse};
    struct kvk_attention_request request = {.session_id = stage->session,
                                            .query_heads = HEADS * GROUP,
                                            .layer = 1,
                                            .format = KVK_FORMAT_FP32,
                                            .scale = 1.0F,
                                            .causal = true,
                                            .items = &item,
                                            .item_count = 1};
    STAGE_OK(stage, kvk_attention_run(stage->house.cache, &stage->house.caller, &request,
                                      &stage->house.error));
    for (uint32_t row = 0; row < HEADS * GROUP; row++) {
        double expected[32];
        expected_output(&stage->geometry, blocks, length, 1, row / GROUP, queries[row], expected);
        for (uint32_t i = 0; i < 32; i++) {
            cr_assert_float_eq((double)output[row][i], expected[i], 5e-3, "%s, %lu tokens",
                               kvk_format_name(stage->geometry.format_k), (unsigned long)length);
        }
    }
}

/* NaN in values or scales of the tokens from `slot` on; what earlier ones share stays. */
static void tail_poison(const struct kvk_geometry *geometry, uint8_t *block, uint32_t slot)
{
    for (uint32_t layer = 0; layer < geometry->layers; layer++) {
        for (int is_value = 0; is_value < 2; is_value++) {
            const struct kvk_part part = kvk_geometry_part(geometry, 0, is_value != 0);
            uint8_t *bytes = block + (is_value != 0 ? kvk_geometry_v_offset(geometry, 0, layer)
                                                    : kvk_geometry_k_offset(geometry, 0, layer));
            for (uint32_t head = 0; head < part.heads; head++) {
                memset(bytes + ((uint64_t)head * part.tokens + slot) * part.row_bytes, 0xff,
                       (part.tokens - slot) * part.row_bytes);
                if (part.format == KVK_FORMAT_INT8_CHANNEL && part.is_value) {
                    memset(bytes + part.scales_offset + head * part.scale_stride + 2 * slot, 0xff,
                           2 * (part.tokens - slot));
                }
            }
        }
    }
}

Test(scales, compact_blocks_are_attended_as_they_are)
{
    for (int format = KVK_FORMAT_FP8_E4M3; format <= KVK_FORMAT_MAX; format++) {
        struct kvk_geometry geometry = compact_geometry((enum kvk_format)format);
        struct kvk_random random;
        struct stage stage;
        uint32_t tokens[11];
        uint8_t *blocks[3];
        kvk_random_init(&random, (uint64_t)format);
        house_init(&stage.house);
        stage_start_with(&stage, &geometry, 8, 0);
        house_tokens(tokens, 11, 1);
        uint64_t id = stage_open(&stage, tokens, 11).sequence_id;
        for (uint64_t i = 0; i < 3; i++) {
            blocks[i] = block_make(&geometry, &random);
            if (i == 2) {
                tail_poison(&geometry, blocks[i], 3);
            }
            STAGE_OK(&stage, block_write(&stage, id, i, blocks[i]));
        }
        house_seal(&stage.house, stage.session, id, 11);
        for (uint64_t length = 1; length <= 11; length++) {
            check_attends(&stage, id, blocks, length, &random);
        }
        stage_close(&stage, id);
        for (uint64_t i = 0; i < 3; i++) {
            free(blocks[i]);
        }
        stage_stop(&stage);
    }
}
