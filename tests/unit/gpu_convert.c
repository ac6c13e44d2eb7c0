/*
 * Conversion to compact formats and back: the documented rounding by hand, every vector path equal
 * to the plain one to the bit, and what values lose.
 */
#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/random.h"
#include "gpu/convert.h"
#include "gpu/values.h"

static const enum kvk_format wide_formats[] = {KVK_FORMAT_FP32, KVK_FORMAT_FP16, KVK_FORMAT_BF16};
static const enum kvk_format narrow_formats[] = {KVK_FORMAT_FP8_E4M3, KVK_FORMAT_INT8_CHANNEL,
                                                 KVK_FORMAT_INT8_32};
static const char *const paths[] = {"avx2", "avx512"};

static uint8_t *bytes_of(uint64_t size_bytes)
{
    uint8_t *bytes = malloc(size_bytes);

    KVK_ASSERT(bytes != NULL);
    memset(bytes, 0xa5, size_bytes);
    return bytes;
}

static uint32_t float_bits(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* ---- Filling ---- */

/* Finite bits of a format, by the mood: of one size, of all sizes, or edges and ties. */
static uint32_t finite_bits(struct kvk_random *random, enum kvk_format format, int mood)
{
    uint32_t bits = (uint32_t)kvk_random_next(random);
    uint32_t exponents = format == KVK_FORMAT_FP16 ? 31 : 255;
    uint32_t fraction_bits = format == KVK_FORMAT_FP32 ? 23 : format == KVK_FORMAT_FP16 ? 10 : 7;
    uint32_t sign_at = format == KVK_FORMAT_FP32 ? 31 : 15;
    uint32_t exponent = exponents / 2 - (uint32_t)kvk_random_below(random, 5);

    if (mood == 1) {
        exponent = (uint32_t)kvk_random_below(random, exponents);
    }
    uint32_t fraction = bits & ((1U << fraction_bits) - 1);
    if (mood == 2) { /* whole numbers and halves of small ones */
        static const uint32_t picks[] = {0, 1, 2, 3};
        exponent = exponents / 2 + (uint32_t)kvk_random_below(random, 7);
        fraction &= ~((1U << (fraction_bits - 3)) - 1);
        switch (picks[kvk_random_below(random, 4)]) {
        case 0:
            exponent = fraction = 0; /* zero */
            break;
        case 1:
            exponent = 0; /* the smallest there are */
            fraction = 1;
            break;
        case 2:
            exponent = exponents - 1; /* the largest */
            fraction = (1U << fraction_bits) - 1;
            if (kvk_random_below(random, 3) != 0) {
                exponent = exponents / 2 + 6;
                fraction = (1U << (fraction_bits - 6)) * 63; /* 127 */
            }
            break;
        default:
            break;
        }
    }
    return (bits >> 31) << sign_at | exponent << fraction_bits | fraction;
}

static void fill(struct kvk_random *random, const struct kvk_part *part, uint8_t *bytes, int mood)
{
    size_t value_bytes = kvk_format_bytes(part->format);

    for (uint64_t i = 0; i < part->size_bytes / value_bytes; i++) {
        uint32_t bits = finite_bits(random, part->format, mood);
        memcpy(bytes + i * value_bytes, &bits, value_bytes);
    }
}

static struct kvk_part random_part(struct kvk_random *random, enum kvk_format wide,
                                   enum kvk_format narrow)
{
    static const uint32_t head_sizes[] = {64, 80, 96, 128, 256, 1, 5, 24, 33, 576};
    uint32_t head_size = head_sizes[kvk_random_below(random, 10)];

    if (!kvk_format_fits(narrow, head_size)) {
        head_size = 32 * (1 + (uint32_t)kvk_random_below(random, 6));
    }
    return kvk_part_of(wide, kvk_random_below(random, 2) != 0,
                       1 + (uint32_t)kvk_random_below(random, 3),
                       1 + (uint32_t)kvk_random_below(random, 20), head_size);
}

/* ---- Every path does the same ---- */

static void assert_paths_agree(struct kvk_random *random, const char *path,
                               const struct kvk_part *wide, const struct kvk_part *narrow)
{
    const struct kvk_convert_kernel *plain = kvk_convert_find("plain");
    const struct kvk_convert_kernel *fast = kvk_convert_find(path);
    uint8_t *source = bytes_of(wide->size_bytes);
    uint8_t *expected = bytes_of(narrow->size_bytes);
    uint8_t *found = bytes_of(narrow->size_bytes);
    uint8_t *expected_back = bytes_of(wide->size_bytes);
    uint8_t *found_back = bytes_of(wide->size_bytes);
    struct kvk_error error = {0};

    for (int mood = 0; mood < 3; mood++) {
        fill(random, wide, source, mood);
        cr_assert_eq(kvk_convert_narrow(plain, wide, source, narrow, expected, &error), KVK_OK,
                     "%s", error.text);
        memset(found, 0x5a, narrow->size_bytes);
        cr_assert_eq(kvk_convert_narrow(fast, wide, source, narrow, found, &error), KVK_OK);
        for (uint64_t i = 0; i < narrow->size_bytes; i++) {
            cr_assert_eq(found[i], expected[i],
                         "%s: byte %llu of %s from %s, head size %u, mood %d: %02x, not %02x", path,
                         (unsigned long long)i, kvk_format_name(narrow->format),
                         kvk_format_name(wide->format), narrow->head_size, mood, found[i],
                         expected[i]);
        }
        if (mood == 1) { /* what others wrote, too: any bytes */
            for (uint64_t i = 0; i < narrow->size_bytes; i++) {
                expected[i] = (uint8_t)kvk_random_next(random);
            }
        }
        kvk_convert_widen(plain, narrow, expected, wide, expected_back);
        kvk_convert_widen(fast, narrow, expected, wide, found_back);
        cr_assert_arr_eq(found_back, expected_back, wide->size_bytes, "%s: back to %s from %s",
                         path, kvk_format_name(wide->format), kvk_format_name(narrow->format));
    }
    free(found_back);
    free(expected_back);
    free(found);
    free(expected);
    free(source);
}

Test(gpu_convert, every_path_does_the_same_to_the_bit)
{
    struct kvk_random random;

    kvk_random_init(&random, 5);
    for (int p = 0; p < 2; p++) {
        if (kvk_convert_find(paths[p]) == NULL) {
            continue;
        }
        for (int round = 0; round < 900; round++) {
            enum kvk_format from = wide_formats[round % 3];
            enum kvk_format to = narrow_formats[round / 3 % 3];
            struct kvk_part wide = random_part(&random, from, to);
            struct kvk_part narrow =
                kvk_part_of(to, wide.is_value, wide.heads, wide.tokens, wide.head_size);
            assert_paths_agree(&random, paths[p], &wide, &narrow);
        }
    }
}

/* All 256 codes, times scales that overflow, vanish, and are none. */
Test(gpu_convert, every_code_widens_alike)
{
    static const float scales[] = {1,        0.37F,      -3.1F, 0,        1e-30F, 1e-42F,
                                   0x1p110F, 0x1.8p119F, 1e36F, INFINITY, NAN};
    struct kvk_part narrow = kvk_part_of(KVK_FORMAT_FP8_E4M3, true, 1, 1, 256);
    uint8_t *bytes = bytes_of(narrow.size_bytes);

    for (int i = 0; i < 256; i++) {
        bytes[i] = (uint8_t)i;
    }
    for (size_t s = 0; s < sizeof(scales) / sizeof(scales[0]); s++) {
        memcpy(bytes + narrow.scales_offset, &scales[s], sizeof(scales[s]));
        for (int f = 0; f < 3; f++) {
            struct kvk_part wide = kvk_part_of(wide_formats[f], true, 1, 1, 256);
            uint8_t expected[256 * 4];
            kvk_convert_widen(kvk_convert_find("plain"), &narrow, bytes, &wide, expected);
            for (int p = 0; p < 2; p++) {
                uint8_t found[256 * 4];
                if (kvk_convert_find(paths[p]) == NULL) {
                    continue;
                }
                kvk_convert_widen(kvk_convert_find(paths[p]), &narrow, bytes, &wide, found);
                cr_assert_arr_eq(found, expected, wide.size_bytes, "%s, scale %g, %s", paths[p],
                                 (double)scales[s], kvk_format_name(wide.format));
            }
        }
    }
    free(bytes);
}

/* ---- The rounding, by hand ---- */

static void narrow_floats(const struct kvk_part *narrow, const float *values, uint8_t *target)
{
    struct kvk_part wide = kvk_part_of(KVK_FORMAT_FP32, narrow->is_value, narrow->heads,
                                       narrow->tokens, narrow->head_size);
    struct kvk_error error = {0};

    cr_assert_eq(
        kvk_convert_narrow(kvk_convert_find("plain"), &wide, values, narrow, target, &error),
        KVK_OK, "%s", error.text);
}

Test(gpu_convert, int8_rounds_to_nearest_even)
{
    struct kvk_part part = kvk_part_of(KVK_FORMAT_INT8_CHANNEL, true, 1, 1, 8);
    const float values[8] = {127, -127, 0.5F, 1.5F, 2.5F, -2.5F, 0, 126.5F};
    const int8_t wanted[8] = {127, -127, 0, 2, 2, -2, 0, 126};
    uint8_t *bytes = bytes_of(part.size_bytes);

    narrow_floats(&part, values, bytes);
    cr_assert_arr_eq(bytes, wanted, sizeof(wanted));
    cr_assert_eq(kvk_value_widen(KVK_FORMAT_BF16, bytes + part.scales_offset, 0), 1.0F);
    for (uint64_t i = 8; i < part.size_bytes; i++) {
        cr_assert(bytes[i] == 0 || i / 2 == part.scales_offset / 2, "padding at %llu",
                  (unsigned long long)i);
    }
    free(bytes);
}

/* 100 / 127 lies between two bf16 numbers: the scale is the upper one, so nothing saturates. */
Test(gpu_convert, scales_of_channels_are_not_too_small)
{
    struct kvk_part part = kvk_part_of(KVK_FORMAT_INT8_CHANNEL, false, 1, 2, 2);
    const float values[4] = {100, 0, -100, 1e-38F};
    uint8_t *bytes = bytes_of(part.size_bytes);

    narrow_floats(&part, values, bytes);
    float scale = kvk_value_widen(KVK_FORMAT_BF16, bytes + part.scales_offset, 0);
    cr_assert_eq(float_bits(scale) & 0xffff, 0);
    cr_assert(scale >= 100.0F / 127 && scale < 100.0F / 127 * 1.0079F);
    cr_assert_eq((int8_t)bytes[0], (int8_t)nearbyintf(100 / scale));
    cr_assert_eq((int8_t)bytes[2], -(int8_t)bytes[0]);
    /* The other channel is too small to divide by: scale and values are 0. */
    cr_assert_eq(kvk_value_widen(KVK_FORMAT_BF16, bytes + part.scales_offset, 1), 0.0F);
    cr_assert_eq(bytes[1], 0);
    cr_assert_eq(bytes[3], 0);
    free(bytes);
}

Test(gpu_convert, scales_of_32_saturate_and_vanish_as_fp16_does)
{
    struct kvk_part part = kvk_part_of(KVK_FORMAT_INT8_32, true, 1, 1, 96);
    float values[96] = {0};
    uint8_t *bytes = bytes_of(part.size_bytes);

    values[0] = 1e8F;   /* / 127 is past fp16 */
    values[1] = 65504;  /* one step */
    values[32] = 3e-6F; /* / 127 is nearer to 0 than to the least fp16 */
    values[64] = 12.7F;
    values[65] = -6.35F;
    narrow_floats(&part, values, bytes);
    cr_assert_eq(kvk_value_widen(KVK_FORMAT_FP16, bytes, 0), 65504.0F);
    cr_assert_eq((int8_t)bytes[2], 127);
    cr_assert_eq((int8_t)bytes[3], 1);
    cr_assert_eq(kvk_value_widen(KVK_FORMAT_FP16, bytes + 34, 0), 0.0F);
    cr_assert_eq(bytes[36], 0);
    cr_assert_float_eq(kvk_value_widen(KVK_FORMAT_FP16, bytes + 68, 0), 0.1F, 1e-4F);
    cr_assert_eq((int8_t)bytes[70], 127);
    cr_assert((int8_t)bytes[71] == -63 || (int8_t)bytes[71] == -64);
    free(bytes);
}

/* Scale 1: every code comes back as itself, and half-way points go to the even one. */
Test(gpu_convert, fp8_rounds_to_nearest_even)
{
    struct kvk_part part = kvk_part_of(KVK_FORMAT_FP8_E4M3, true, 1, 1, 512);
    float values[512];
    uint8_t *bytes = bytes_of(part.size_bytes);

    for (uint32_t code = 0; code < 0x7f; code++) {
        float here = kvk_fp8_e4m3_widen((uint8_t)code);
        float next = code < 0x7e ? kvk_fp8_e4m3_widen((uint8_t)(code + 1)) : here;
        values[4 * code] = here;
        values[4 * code + 1] = -here;
        values[4 * code + 2] = (here + next) / 2;
        values[4 * code + 3] = here + (next - here) * 0.501F;
    }
    for (uint32_t i = 4 * 0x7f; i < 512; i++) {
        values[i] = 448;
    }
    narrow_floats(&part, values, bytes);
    cr_assert_eq(kvk_value_widen(KVK_FORMAT_FP32, bytes + part.scales_offset, 0), 1.0F);
    for (uint32_t code = 0; code < 0x7e; code++) {
        cr_assert_eq(bytes[4 * code], code);
        cr_assert_eq(bytes[4 * code + 1], code | 0x80);
        cr_assert_eq(bytes[4 * code + 2], code + (code & 1), "half-way after %02x", code);
        cr_assert_eq(bytes[4 * code + 3], code + 1);
    }
    free(bytes);
}

/* ---- Refusals ---- */

Test(gpu_convert, what_is_not_finite_is_refused)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    struct kvk_random random;

    kvk_random_init(&random, 9);
    for (int round = 0; round < 600; round++) {
        enum kvk_format to = narrow_formats[round % 3];
        struct kvk_part wide = random_part(&random, wide_formats[round / 3 % 3], to);
        struct kvk_part narrow =
            kvk_part_of(to, wide.is_value, wide.heads, wide.tokens, wide.head_size);
        uint8_t *source = bytes_of(wide.size_bytes);
        uint8_t *target = bytes_of(narrow.size_bytes);
        size_t value_bytes = kvk_format_bytes(wide.format);
        uint64_t count = wide.size_bytes / value_bytes;
        uint64_t at = kvk_random_below(&random, count);
        float value = bad[round % 7 % 3];
        uint32_t bits = float_bits(value);
        if (wide.format == KVK_FORMAT_FP16) {
            bits = (bits >> 16 & 0x8000) | (isnan(value) ? 0x7c01U : 0x7c00U);
        } else if (wide.format == KVK_FORMAT_BF16) {
            bits >>= 16;
        }
        fill(&random, &wide, source, 0);
        memcpy(source + at * value_bytes, &bits, value_bytes);
        for (int p = -1; p < 2; p++) {
            const struct kvk_convert_kernel *kernel = kvk_convert_find(p < 0 ? "plain" : paths[p]);
            struct kvk_error error = {0};
            if (kernel == NULL) {
                continue;
            }
            cr_assert_eq(kvk_convert_narrow(kernel, &wide, source, &narrow, target, &error),
                         KVK_INVALID, "%s, %s, value %llu", kvk_convert_name(kernel),
                         kvk_format_name(to), (unsigned long long)at);
            cr_assert_str_eq(error.field, "format");
        }
        free(target);
        free(source);
    }
}

/* ---- What is lost ---- */

/* Half a step of its own scale, and of the wide format's rounding. */
static double loss_bound(const struct kvk_part *narrow, double scale, double value)
{
    double back = fabs(value) * 0x1p-8; /* to bf16 again */

    if (narrow->format == KVK_FORMAT_FP8_E4M3) {
        return fmax(fabs(value) * 0x1p-4, scale * 0x1p-10) + back;
    }
    return scale * 0.5001 + (narrow->format == KVK_FORMAT_INT8_32 ? fabs(value) * 0x1p-11 : 0) +
           back;
}

Test(gpu_convert, a_value_comes_back_within_half_a_step)
{
    struct kvk_random random;

    kvk_random_init(&random, 11);
    for (int round = 0; round < 300; round++) {
        enum kvk_format to = narrow_formats[round % 3];
        struct kvk_part wide = random_part(&random, KVK_FORMAT_BF16, to);
        struct kvk_part narrow =
            kvk_part_of(to, wide.is_value, wide.heads, wide.tokens, wide.head_size);
        const struct kvk_convert_kernel *kernel = kvk_convert_find(NULL);
        uint8_t *source = bytes_of(wide.size_bytes);
        uint8_t *stored = bytes_of(narrow.size_bytes);
        uint8_t *back = bytes_of(wide.size_bytes);
        struct kvk_error error = {0};
        fill(&random, &wide, source, 0);
        cr_assert_eq(kvk_convert_narrow(kernel, &wide, source, &narrow, stored, &error), KVK_OK);
        kvk_convert_widen(kernel, &narrow, stored, &wide, back);
        for (uint32_t row = 0; row < wide.heads * wide.tokens; row++) {
            for (uint32_t i = 0; i < wide.head_size; i++) {
                uint32_t head = row / wide.tokens;
                uint32_t token = row % wide.tokens;
                double was = kvk_part_value(&wide, source, head, token, i);
                double is = kvk_part_value(&wide, back, head, token, i);
                double scale = (double)kvk_part_scale(&narrow, stored, head, token, i);
                cr_assert(fabs(is - was) <= loss_bound(&narrow, scale, was),
                          "%s: %g came back as %g under a scale of %g", kvk_format_name(to), was,
                          is, scale);
            }
        }
        free(back);
        free(stored);
        free(source);
    }
}

/* ---- Shards ---- */

Test(gpu_convert, a_shard_is_its_parts)
{
    struct kvk_random random;

    kvk_random_init(&random, 13);
    for (int round = 0; round < 60; round++) {
        struct kvk_geometry wide = {
            .layers = 3,
            .kv_heads = 3,
            .head_size_k = 64,
            .head_size_v = round % 2 == 0 ? 32 : 64,
            .block_tokens = 1 + (uint32_t)kvk_random_below(&random, 9),
            .format_k = KVK_FORMAT_BF16,
            .format_v = KVK_FORMAT_BF16,
            .layout = KVK_LAYOUT_HEADS_FIRST,
            .attention = KVK_ATTENTION_SELF,
            .tensor_shards = 2,
            .pipeline_shards = 2,
        };
        struct kvk_geometry narrow = wide;
        narrow.format_k = narrow.format_v = narrow_formats[round % 3];
        if (round % 5 == 0 && round % 3 != 1) {
            wide.latent = narrow.latent = true;
        }
        cr_assert_eq(kvk_geometry_check(&wide, "", NULL), KVK_OK);
        cr_assert_eq(kvk_geometry_check(&narrow, "", NULL), KVK_OK);
        for (uint32_t shard = 0; shard < kvk_geometry_shard_count(&wide); shard++) {
            uint64_t wide_bytes = kvk_geometry_shard_bytes(&wide, shard);
            uint64_t narrow_bytes = kvk_geometry_shard_bytes(&narrow, shard);
            const struct kvk_convert_kernel *kernel = kvk_convert_find(NULL);
            uint8_t *source = bytes_of(wide_bytes);
            uint8_t *stored = bytes_of(narrow_bytes);
            uint8_t *back = bytes_of(wide_bytes);
            struct kvk_error error = {0};
            struct kvk_part all = kvk_part_of(KVK_FORMAT_BF16, false, 1, 1,
                                              (uint32_t)(wide_bytes / 2)); /* just values */
            fill(&random, &all, source, 0);
            cr_assert_eq(
                kvk_convert_shard_narrow(kernel, &wide, &narrow, shard, source, stored, &error),
                KVK_OK);
            kvk_convert_shard_widen(kernel, &narrow, &wide, shard, stored, back);
            for (uint64_t i = 0; i < wide_bytes / 2; i++) {
                double was = (double)kvk_value_widen(KVK_FORMAT_BF16, source, i);
                double is = (double)kvk_value_widen(KVK_FORMAT_BF16, back, i);
                cr_assert(fabs(is - was) <= 0.07 * fabs(was) + 0.009, "%g, %g", was, is);
            }
            uint16_t nan = 0x7fff;
            memcpy(source + wide_bytes - 2, &nan, 2);
            cr_assert_eq(
                kvk_convert_shard_narrow(kernel, &wide, &narrow, shard, source, stored, &error),
                KVK_INVALID);
            free(back);
            free(stored);
            free(source);
        }
    }
}
