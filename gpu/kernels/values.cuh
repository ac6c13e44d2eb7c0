/*
 * Single values of the formats that K, V and queries are stored in (base/format.h), widened to
 * fp32. For kernels that take any format at any alignment; those in a hurry have ways of their own.
 */
#pragma once

#include "gpu/kernels/device.cuh"
#include "gpu/kernels/kernels.h"

__device__ __forceinline__ uint32_t kvk_read_16(const uint8_t *bytes)
{
    if (((uintptr_t)bytes & 1) == 0) {
        return *(const uint16_t *)bytes;
    }
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8;
}

__device__ __forceinline__ uint32_t kvk_read_32(const uint8_t *bytes)
{
    if (((uintptr_t)bytes & 3) == 0) {
        return *(const uint32_t *)bytes;
    }
    return kvk_read_16(bytes) | kvk_read_16(bytes + 2) << 16;
}

/* Value `index` of an array of one of fp32, fp16, bf16. */
__device__ __forceinline__ float kvk_value_read(uint8_t format, const uint8_t *values,
                                                uint64_t index)
{
    if (format == KVK_FORMAT_FP32) {
        return kvk_float_of(kvk_read_32(values + 4 * index));
    }
    uint16_t bits = (uint16_t)kvk_read_16(values + 2 * index);
    if (format == KVK_FORMAT_FP16) {
        kvk_fp16 half = {bits};
        return kvk_widen(half);
    }
    kvk_bf16 brain = {bits};
    return kvk_widen(brain);
}

/* OCP E4M3: no infinities, all ones is NaN. */
__device__ __forceinline__ float kvk_fp8_widen(uint8_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x80) << 24;
    uint32_t size = bits & 0x7f;
    /* As an fp32 with the same exponent field: 2^-120 of the value, subnormal ones included. */
    float value = kvk_float_of(sign | size << 20) * kvk_float_of((127U + 120) << 23);

    return size == 0x7f ? kvk_float_of(0x7fc00000) : value;
}

/* Value `index` of a token of K or V. */
__device__ __forceinline__ float kvk_part_value(const kvk_cuda_part &part, uint8_t format,
                                                bool is_value, const uint8_t *page, uint64_t row,
                                                uint32_t head, uint32_t token, uint32_t index)
{
    const uint8_t *bytes = page + part.offset;
    const uint8_t *stored = bytes + row * part.row_bytes;
    const uint8_t *scales = bytes + part.scales_offset + (uint64_t)head * part.scale_stride;

    if (format == KVK_FORMAT_FP8_E4M3) {
        return kvk_value_read(KVK_FORMAT_FP32, scales, 0) * kvk_fp8_widen(stored[index]);
    }
    if (format == KVK_FORMAT_INT8_CHANNEL) {
        float scale = kvk_value_read(KVK_FORMAT_BF16, scales, is_value ? token : index);
        return scale * (float)(int8_t)stored[index];
    }
    if (format == KVK_FORMAT_INT8_32) {
        stored += index / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES;
        float scale = kvk_value_read(KVK_FORMAT_FP16, stored, 0);
        return scale * (float)(int8_t)stored[2 + index % KVK_INT8_32_VALUES];
    }
    return kvk_value_read(format, stored, index);
}
