/*
 * Conversion in plain C, value by value: the reference that the vector kernels equal to the bit,
 * and what runs where there are none.
 */
#include "gpu/convert_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "gpu/values.h"

static bool plain_available(void)
{
    return true;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* ---- Rounding ---- */

static uint16_t bf16_nearest(float value)
{
    uint32_t bits = bits_of(value);

    if (isnan(value)) {
        return 0x7fc0;
    }
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static uint16_t bf16_not_smaller(float positive)
{
    return (uint16_t)((bits_of(positive) + 0xffff) >> 16);
}

/* Of a magnitude up to the largest finite one. */
static uint16_t fp16_nearest_magnitude(float value)
{
    if (value < 0x1p-14F) { /* subnormal: in steps of 2^-24; the largest rounds up to a normal */
        return (uint16_t)nearbyintf(value * 0x1p24F);
    }
    uint32_t bits = bits_of(value);
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)((bits >> 13) - ((127 - 15) << 10));
}

static uint16_t fp16_nearest(float value)
{
    uint16_t sign = (uint16_t)(bits_of(value) >> 16 & 0x8000);

    if (isnan(value)) {
        return 0x7e00;
    }
    return (uint16_t)(sign | fp16_nearest_magnitude(fabsf(value)));
}

/* Of a magnitude up to 448. */
static uint8_t fp8_nearest(float value)
{
    float magnitude = fabsf(value);
    uint8_t sign = (uint8_t)(bits_of(value) >> 24 & 0x80);

    if (magnitude < 0x1p-6F) { /* subnormal: in steps of 2^-9 */
        return (uint8_t)(sign | (uint8_t)nearbyintf(magnitude * 0x1p9F));
    }
    uint32_t bits = bits_of(magnitude);
    bits += 0x7ffff + (bits >> 20 & 1);
    return (uint8_t)(sign | ((bits >> 20) - ((127 - 7) << 3)));
}

static float clamp(float value, float largest)
{
    if (value > largest) {
        return largest;
    }
    return value < -largest ? -largest : value;
}

/* ---- To compact ---- */

/* The scale as it is stored, and what it then is. */
static float scale_store(enum kvk_format format, float largest, uint8_t *at)
{
    float scale = largest / (format == KVK_FORMAT_FP8_E4M3 ? KVK_FP8_LARGEST : KVK_INT8_LARGEST);
    uint16_t half;

    if (format == KVK_FORMAT_INT8_32) {
        half = fp16_nearest_magnitude(scale < KVK_FP16_LARGEST ? scale : KVK_FP16_LARGEST);
        memcpy(at, &half, sizeof(half));
        return kvk_fp16_widen(half);
    }
    if (scale < KVK_SCALE_LEAST) {
        scale = 0;
    }
    if (format == KVK_FORMAT_FP8_E4M3) {
        memcpy(at, &scale, sizeof(scale));
        return scale;
    }
    half = bf16_not_smaller(scale);
    memcpy(at, &half, sizeof(half));
    return kvk_bf16_widen(half);
}

static uint8_t value_store(enum kvk_format format, float value, float inverse)
{
    float scaled = value * inverse;

    if (format == KVK_FORMAT_FP8_E4M3) {
        return fp8_nearest(clamp(scaled, KVK_FP8_LARGEST));
    }
    return (uint8_t)(int8_t)nearbyintf(clamp(scaled, KVK_INT8_LARGEST));
}

/* Values that share a scale: `count` rows of `width` values each, at one index on. */
struct share {
    uint32_t first_row;
    uint32_t row_count;
    uint32_t first_index;
    uint32_t width;
};

static float wide_value(const struct kvk_convert_plane *plane, uint32_t row, uint32_t index)
{
    return kvk_value_widen(plane->wide->format, plane->wide_rows + row * plane->wide->row_bytes,
                           index);
}

static uint8_t *narrow_at(const struct kvk_convert_plane *plane, uint32_t row, uint32_t index)
{
    uint8_t *at = plane->narrow_rows + row * plane->narrow->row_bytes;

    if (plane->narrow->format == KVK_FORMAT_INT8_32) {
        return at + (size_t)index / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES + 2 +
               index % KVK_INT8_32_VALUES;
    }
    return at + index;
}

static bool share_narrow(const struct kvk_convert_plane *plane, const struct share *share,
                         uint8_t *scale_at)
{
    enum kvk_format format = plane->narrow->format;
    float largest = 0;

    for (uint32_t row = share->first_row; row < share->first_row + share->row_count; row++) {
        for (uint32_t i = share->first_index; i < share->first_index + share->width; i++) {
            float magnitude = fabsf(wide_value(plane, row, i));
            if (!isfinite(magnitude)) {
                return false;
            }
            largest = magnitude > largest ? magnitude : largest;
        }
    }
    float scale = scale_store(format, largest, scale_at);
    float inverse = scale > 0 ? 1 / scale : 0;
    for (uint32_t row = share->first_row; row < share->first_row + share->row_count; row++) {
        for (uint32_t i = share->first_index; i < share->first_index + share->width; i++) {
            *narrow_at(plane, row, i) = value_store(format, wide_value(plane, row, i), inverse);
        }
    }
    return true;
}

static bool channels_narrow(const struct kvk_convert_plane *plane)
{
    for (uint32_t i = 0; i < plane->narrow->head_size; i++) {
        const struct share share = {0, plane->narrow->tokens, i, 1};
        if (!share_narrow(plane, &share, plane->scales + (size_t)2 * i)) {
            return false;
        }
    }
    return true;
}

static bool tokens_narrow(const struct kvk_convert_plane *plane)
{
    for (uint32_t row = 0; row < plane->narrow->tokens; row++) {
        const struct share share = {row, 1, 0, plane->narrow->head_size};
        if (!share_narrow(plane, &share, plane->scales + (size_t)2 * row)) {
            return false;
        }
    }
    return true;
}

static bool groups_narrow(const struct kvk_convert_plane *plane)
{
    for (uint32_t row = 0; row < plane->narrow->tokens; row++) {
        for (uint32_t i = 0; i < plane->narrow->head_size; i += KVK_INT8_32_VALUES) {
            const struct share share = {row, 1, i, KVK_INT8_32_VALUES};
            if (!share_narrow(plane, &share, narrow_at(plane, row, i) - 2)) {
                return false;
            }
        }
    }
    return true;
}

static bool plain_narrow(const struct kvk_convert_plane *plane)
{
    const struct share all = {0, plane->narrow->tokens, 0, plane->narrow->head_size};

    switch (plane->narrow->format) {
    case KVK_FORMAT_FP8_E4M3:
        return share_narrow(plane, &all, plane->scales);
    case KVK_FORMAT_INT8_CHANNEL:
        return plane->narrow->is_value ? tokens_narrow(plane) : channels_narrow(plane);
    case KVK_FORMAT_INT8_32:
        return groups_narrow(plane);
    case KVK_FORMAT_NONE:
    case KVK_FORMAT_FP32:
    case KVK_FORMAT_FP16:
    case KVK_FORMAT_BF16:
        break;
    }
    KVK_UNREACHABLE();
}

/* ---- And back ---- */

static void wide_store(enum kvk_format format, float value, uint8_t *rows, uint32_t index)
{
    uint16_t half;

    if (format == KVK_FORMAT_FP32) {
        value = isnan(value) ? NAN : clamp(value, 0x1.fffffep127F);
        memcpy(rows + (size_t)4 * index, &value, sizeof(value));
        return;
    }
    half = format == KVK_FORMAT_FP16 ? fp16_nearest(clamp(value, KVK_FP16_LARGEST))
                                     : bf16_nearest(clamp(value, KVK_BF16_LARGEST));
    memcpy(rows + (size_t)2 * index, &half, sizeof(half));
}

static float narrow_value(const struct kvk_convert_plane *plane, uint32_t row, uint32_t index)
{
    const uint8_t *at = narrow_at(plane, row, index);

    if (plane->narrow->format == KVK_FORMAT_FP8_E4M3) {
        return kvk_fp8_e4m3_widen(*at);
    }
    return (float)(int8_t)*at;
}

static float narrow_scale(const struct kvk_convert_plane *plane, uint32_t row, uint32_t index)
{
    if (plane->narrow->format == KVK_FORMAT_INT8_32) {
        return kvk_value_widen(KVK_FORMAT_FP16,
                               narrow_at(plane, row, index) - 2 - index % KVK_INT8_32_VALUES, 0);
    }
    if (plane->narrow->format == KVK_FORMAT_FP8_E4M3) {
        return kvk_value_widen(KVK_FORMAT_FP32, plane->scales, 0);
    }
    return kvk_value_widen(KVK_FORMAT_BF16, plane->scales, plane->narrow->is_value ? row : index);
}

static void plain_widen(const struct kvk_convert_plane *plane)
{
    for (uint32_t row = 0; row < plane->narrow->tokens; row++) {
        uint8_t *rows = plane->wide_rows + row * plane->wide->row_bytes;
        for (uint32_t i = 0; i < plane->narrow->head_size; i++) {
            wide_store(plane->wide->format,
                       narrow_scale(plane, row, i) * narrow_value(plane, row, i), rows, i);
        }
    }
}

const struct kvk_convert_kernel kvk_convert_plain = {
    .name = "plain",
    .available = plain_available,
    .narrow = plain_narrow,
    .widen = plain_widen,
};
