/*
 * Single values of the formats that K, V and queries are stored in, widened to fp32. Every
 * widening is exact. For loops that need no speed; the kernels have wider ways.
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

/* Value `index` of an array that need not be aligned. */
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
        break;
    }
    KVK_UNREACHABLE();
}

#endif
