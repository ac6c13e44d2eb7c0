/*
 * Single values of the formats that K, V and queries are stored in, widened to fp32. Every
 * widening is exact; a value of a compact format is exact in double, as a product with its scale.
 * For loops that need no speed; the kernels have wider ways.
 */
#ifndef KVK_GPU_VALUES_H
#define KVK_GPU_VALUES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "base/assert.h"
#include "base/geometry.h"

static inline float kvk_bf16_widen(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;

    memcpy(&value, &wide, sizeof(value));
    return value;
}

static inline float kvk_fp16_widen(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16;
    uint32_t exponent = (bits >> 10) & 0x1f;
    uint32_t fraction = bits & 0x3ff;
    float value;

    if (exponent == 0) { /* zero or subnormal: fraction x 2^-24 */
        value = ldexpf((float)fraction, -24);
        return sign != 0 ? -value : value;
    }
    uint32_t wide_exponent = exponent == 0x1f ? 0xff : exponent + (127 - 15);
    uint32_t wide = sign | wide_exponent << 23 | fraction << 13;
    memcpy(&value, &wide, sizeof(value));
    return value;
}

/* OCP E4M3: no infinities, all ones is NaN. */
static inline float kvk_fp8_e4m3_widen(uint8_t bits)
{
    uint32_t exponent = (bits >> 3) & 0xf;
    uint32_t fraction = bits & 7;
    float value;

    if ((bits & 0x7f) == 0x7f) {
        return NAN;
    }
    if (exponent == 0) {
        value = ldexpf((float)fraction, -9);
    } else {
        value = ldexpf((float)(8 + fraction), (int)exponent - 10);
    }
    return (bits & 0x80) != 0 ? -value : value;
}

/* Value `index` of an array of plain values, that need not be aligned. */
static inline float kvk_value_widen(enum kvk_format format, const void *values, uint64_t index)
{
    const uint8_t *bytes = values;
    float value;
    uint16_t bits;

    switch (format) {
    case KVK_FORMAT_FP32:
        memcpy(&value, bytes + 4 * index, sizeof(value));
        return value;
    case KVK_FORMAT_FP16:
        memcpy(&bits, bytes + 2 * index, sizeof(bits));
        return kvk_fp16_widen(bits);
    case KVK_FORMAT_BF16:
        memcpy(&bits, bytes + 2 * index, sizeof(bits));
        return kvk_bf16_widen(bits);
    case KVK_FORMAT_NONE:
    case KVK_FORMAT_FP8_E4M3:
    case KVK_FORMAT_INT8_CHANNEL:
    case KVK_FORMAT_INT8_32:
        break;
    }
    KVK_UNREACHABLE();
}

/* Of the part's [head] rows of [token]: where a token's values begin. */
static inline const uint8_t *kvk_part_row(const struct kvk_part *part, const void *bytes,
                                          uint32_t head, uint32_t token)
{
    return (const uint8_t *)bytes + ((uint64_t)head * part->tokens + token) * part->row_bytes;
}

/* The scale of one value; 1 in plain formats. */
static inline float kvk_part_scale(const struct kvk_part *part, const void *bytes, uint32_t head,
                                   uint32_t token, uint32_t index)
{
    const uint8_t *scales = (const uint8_t *)bytes + part->scales_offset;
    const uint8_t *row = kvk_part_row(part, bytes, head, token);

    scales += head * part->scale_stride;
    switch (part->format) {
    case KVK_FORMAT_FP8_E4M3:
        return kvk_value_widen(KVK_FORMAT_FP32, scales, 0);
    case KVK_FORMAT_INT8_CHANNEL:
        return kvk_value_widen(KVK_FORMAT_BF16, scales, part->is_value ? token : index);
    case KVK_FORMAT_INT8_32:
        row += (uint64_t)index / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES;
        return kvk_value_widen(KVK_FORMAT_FP16, row, 0);
    case KVK_FORMAT_NONE:
    case KVK_FORMAT_FP32:
    case KVK_FORMAT_FP16:
    case KVK_FORMAT_BF16:
        break;
    }
    return 1;
}

/* A value of K or V, in any format, heads first. */
static inline double kvk_part_value(const struct kvk_part *part, const void *bytes, uint32_t head,
                                    uint32_t token, uint32_t index)
{
    const uint8_t *row = kvk_part_row(part, bytes, head, token);

    switch (part->format) {
    case KVK_FORMAT_FP8_E4M3:
        return (double)kvk_part_scale(part, bytes, head, token, index) *
               (double)kvk_fp8_e4m3_widen(row[index]);
    case KVK_FORMAT_INT8_CHANNEL:
        return (double)kvk_part_scale(part, bytes, head, token, index) * (int8_t)row[index];
    case KVK_FORMAT_INT8_32:
        row += (uint64_t)index / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES;
        return (double)kvk_value_widen(KVK_FORMAT_FP16, row, 0) *
               (int8_t)row[2 + index % KVK_INT8_32_VALUES];
    case KVK_FORMAT_NONE:
    case KVK_FORMAT_FP32:
    case KVK_FORMAT_FP16:
    case KVK_FORMAT_BF16:
        break;
    }
    return (double)kvk_value_widen(part->format, row, index);
}

#endif
