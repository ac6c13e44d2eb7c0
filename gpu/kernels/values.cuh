/* Single values of the formats that K, V and queries are stored in, widened to fp32. For kernels
 * that take any format at any alignment; those in a hurry have ways of their own. */
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
