/*
 * Conversion of K and V to compact formats and back, as gpu/convert_plain.c does it, to the bit.
 *
 * A block works on one head of one part. Values that share a scale are shared out so that whoever
 * needs their largest magnitude can have it: all of a head to the block, a token's or a group's to
 * a warp, a channel's to a thread.
 */
#include "gpu/kernels/values.cuh"

#define CONVERT_THREADS 128
#define CONVERT_WARPS (CONVERT_THREADS / KVK_WARP_THREADS)
#define CONVERT_SHARED_BYTES (CONVERT_WARPS * (uint32_t)sizeof(float))

#define INT8_LARGEST 127.0F
#define FP8_LARGEST 448.0F
#define FP16_LARGEST 65504.0F
#define BF16_LARGEST_BITS 0x7f7f0000U
#define FP32_LARGEST_BITS 0x7f7fffffU
#define SCALE_LEAST_BITS 0x00800000U /* 2^-126: below, 1 / scale could be infinite */

struct convert_launch {
    const kvk_cuda_conversion *conversions;
    uint32_t *refused;
};

/* What a block works on. */
struct plane {
    const kvk_cuda_conversion *part;
    const uint8_t *wide_rows; /* [tokens][head_size] */
    uint8_t *narrow_rows;
    uint8_t *scales;
};

/* ---- Rounding ---------------------------------------------------------------------------------
 */

__device__ __forceinline__ float clamp(float value, float largest)
{
    if (value > largest) {
        return largest;
    }
    return value < -largest ? -largest : value;
}

/* Of a magnitude up to 448. */
__device__ __forceinline__ uint8_t fp8_nearest(float value)
{
    float magnitude = fabsf(value);
    uint32_t sign = kvk_bits_of(value) >> 24 & 0x80;

    if (magnitude < 0.015625F) { /* 2^-6: subnormal, in steps of 2^-9 */
        return (uint8_t)(sign | (uint32_t)rintf(magnitude * 512.0F));
    }
    uint32_t bits = kvk_bits_of(magnitude);
    bits += 0x7ffff + (bits >> 20 & 1);
    return (uint8_t)(sign | ((bits >> 20) - ((127U - 7) << 3)));
}

__device__ __forceinline__ uint8_t value_of(uint8_t format, float value, float inverse)
{
    float scaled = value * inverse;

    if (format == KVK_FORMAT_FP8_E4M3) {
        return fp8_nearest(clamp(scaled, FP8_LARGEST));
    }
    return (uint8_t)(int8_t)rintf(clamp(scaled, INT8_LARGEST));
}

/* The scale for a largest magnitude, as its format has it. */
__device__ __forceinline__ float scale_of(uint8_t format, float largest)
{
    float scale = largest / (format == KVK_FORMAT_FP8_E4M3 ? FP8_LARGEST : INT8_LARGEST);

    if (format == KVK_FORMAT_INT8_32) {
        kvk_fp16 half;
        kvk_narrow(scale < FP16_LARGEST ? scale : FP16_LARGEST, &half);
        return kvk_widen(half);
    }
    if (scale < kvk_float_of(SCALE_LEAST_BITS)) {
        return 0;
    }
    if (format == KVK_FORMAT_FP8_E4M3) {
        return scale;
    }
    return kvk_float_of((kvk_bits_of(scale) + 0xffff) & 0xffff0000U); /* bf16, not smaller */
}

/* A scale as it is stored; it is one of its format's. */
__device__ __forceinline__ void scale_store(uint8_t format, float scale, uint8_t *at)
{
    if (format == KVK_FORMAT_FP8_E4M3) {
        *(float *)(void *)at = scale;
    } else if (format == KVK_FORMAT_INT8_CHANNEL) {
        kvk_narrow(scale, (kvk_bf16 *)(void *)at);
    } else {
        kvk_narrow(scale, (kvk_fp16 *)(void *)at);
    }
}

/* ---- To compact -------------------------------------------------------------------------------
 */

__device__ __forceinline__ float wide_value(const plane &plane, uint32_t token, uint32_t index)
{
    return kvk_value_read(plane.part->format_wide, plane.wide_rows,
                          (uint64_t)token * plane.part->head_size + index);
}

__device__ __forceinline__ float magnitude_of(const plane &plane, uint32_t token, uint32_t index,
                                              uint32_t *refused)
{
    float magnitude = fabsf(wide_value(plane, token, index));

    if (!(magnitude < kvk_infinity())) {
        *refused = 1; /* whoever else writes it writes the same */
        return 0;
    }
    return magnitude;
}

__device__ __forceinline__ float warp_largest(float value)
{
    for (uint32_t mask = KVK_WARP_THREADS / 2; mask > 0; mask /= 2) {
        value = fmaxf(value, kvk_shuffle_xor(value, mask));
    }
    return value;
}

__device__ __forceinline__ float inverse_of(float scale)
{
    return scale > 0 ? 1 / scale : 0;
}

/* fp8: one scale for all of the head. */
__device__ __forceinline__ void narrow_head(const plane &plane, uint32_t *refused)
{
    float *largest_of_warps = (float *)(void *)kvk_shared_memory();
    uint32_t head_size = plane.part->head_size;
    uint32_t count = plane.part->tokens * head_size;
    float largest = 0;

    for (uint32_t i = threadIdx.x; i < count; i += CONVERT_THREADS) {
        largest = fmaxf(largest, magnitude_of(plane, i / head_size, i % head_size, refused));
    }
    largest = warp_largest(largest);
    if (threadIdx.x % KVK_WARP_THREADS == 0) {
        largest_of_warps[threadIdx.x / KVK_WARP_THREADS] = largest;
    }
    kvk_barrier();
    for (uint32_t i = 0; i < CONVERT_WARPS; i++) {
        largest = fmaxf(largest, largest_of_warps[i]);
    }
    float scale = scale_of(KVK_FORMAT_FP8_E4M3, largest);
    float inverse = inverse_of(scale);
    if (threadIdx.x == 0) {
        scale_store(KVK_FORMAT_FP8_E4M3, scale, plane.scales);
    }
    for (uint32_t i = threadIdx.x; i < count; i += CONVERT_THREADS) {
        float value = wide_value(plane, i / head_size, i % head_size);
        plane.narrow_rows[i] = value_of(KVK_FORMAT_FP8_E4M3, value, inverse);
    }
}

/* int8_channel, K: a scale for each channel. */
__device__ __forceinline__ void narrow_channels(const plane &plane, uint32_t *refused)
{
    uint32_t head_size = plane.part->head_size;

    for (uint32_t index = threadIdx.x; index < head_size; index += CONVERT_THREADS) {
        float largest = 0;
        for (uint32_t token = 0; token < plane.part->tokens; token++) {
            largest = fmaxf(largest, magnitude_of(plane, token, index, refused));
        }
        float scale = scale_of(KVK_FORMAT_INT8_CHANNEL, largest);
        float inverse = inverse_of(scale);
        scale_store(KVK_FORMAT_INT8_CHANNEL, scale, plane.scales + (uint64_t)2 * index);
        for (uint32_t token = 0; token < plane.part->tokens; token++) {
            plane.narrow_rows[(uint64_t)token * head_size + index] =
                value_of(KVK_FORMAT_INT8_CHANNEL, wide_value(plane, token, index), inverse);
        }
    }
}

/* Values [first, first + width) of a token, under one scale, by a warp. */
__device__ __forceinline__ void narrow_run(const plane &plane, uint8_t format, uint32_t token,
                                           uint32_t first, uint32_t width, uint8_t *scale_at,
                                           uint8_t *values_at, uint32_t *refused)
{
    uint32_t lane = threadIdx.x % KVK_WARP_THREADS;
    float largest = 0;

    for (uint32_t i = lane; i < width; i += KVK_WARP_THREADS) {
        largest = fmaxf(largest, magnitude_of(plane, token, first + i, refused));
    }
    float scale = scale_of(format, warp_largest(largest));
    float inverse = inverse_of(scale);
    if (lane == 0) {
        scale_store(format, scale, scale_at);
    }
    for (uint32_t i = lane; i < width; i += KVK_WARP_THREADS) {
        values_at[i] = value_of(format, wide_value(plane, token, first + i), inverse);
    }
}

/* int8_channel, V: a scale for each token. int8_32: one for each 32 values of it. */
__device__ __forceinline__ void narrow_tokens(const plane &plane, uint32_t *refused)
{
    const kvk_cuda_conversion &part = *plane.part;
    bool is_grouped = part.format_narrow == KVK_FORMAT_INT8_32;
    uint32_t width = is_grouped ? KVK_INT8_32_VALUES : part.head_size;
    uint32_t runs = part.head_size / width;

    for (uint32_t i = threadIdx.x / KVK_WARP_THREADS; i < part.tokens * runs; i += CONVERT_WARPS) {
        uint32_t token = i / runs;
        uint32_t run = i % runs;
        uint8_t *row = plane.narrow_rows + (uint64_t)token * part.narrow.row_bytes;
        uint8_t *group = row + (uint64_t)run * KVK_INT8_32_BYTES;
        narrow_run(plane, part.format_narrow, token, run * width, width,
                   is_grouped ? group : plane.scales + (uint64_t)2 * token,
                   is_grouped ? group + 2 : row, refused);
    }
}

/* Zeros between rows and scales, and behind them: equal values are equal bytes. */
__device__ __forceinline__ void clear_padding(const kvk_cuda_conversion &part)
{
    uint64_t rows_end = (uint64_t)part.narrow.row_bytes * part.tokens * part.heads;
    uint64_t scales_end =
        part.narrow.scales_offset + (uint64_t)part.narrow.scale_stride * part.heads;
    uint64_t end =
        (scales_end + KVK_FORMAT_PART_ALIGN - 1) / KVK_FORMAT_PART_ALIGN * KVK_FORMAT_PART_ALIGN;

    if (part.narrow.scales_offset == 0) {
        return; /* scales lie in the rows */
    }
    for (uint64_t i = rows_end + threadIdx.x; i < part.narrow.scales_offset; i += CONVERT_THREADS) {
        part.target[i] = 0;
    }
    for (uint64_t i = scales_end + threadIdx.x; i < end; i += CONVERT_THREADS) {
        part.target[i] = 0;
    }
}

/* ---- And back ---------------------------------------------------------------------------------
 */

__device__ __forceinline__ void wide_store(uint8_t format, float value, uint8_t *rows,
                                           uint64_t index)
{
    bool is_number = value == value;

    if (format == KVK_FORMAT_FP32) {
        value =
            is_number ? clamp(value, kvk_float_of(FP32_LARGEST_BITS)) : kvk_float_of(0x7fc00000);
        ((float *)(void *)rows)[index] = value;
        return;
    }
    uint16_t *halves = (uint16_t *)(void *)rows;
    if (format == KVK_FORMAT_FP16) {
        kvk_fp16 half;
        kvk_narrow(clamp(value, FP16_LARGEST), &half);
        halves[index] = is_number ? half.bits : 0x7e00;
    } else {
        kvk_bf16 half;
        kvk_narrow(clamp(value, kvk_float_of(BF16_LARGEST_BITS)), &half);
        halves[index] = is_number ? half.bits : 0x7fc0;
    }
}

__device__ __forceinline__ void widen_head(const kvk_cuda_conversion &part, uint32_t head)
{
    uint8_t *rows = part.target + (uint64_t)head * part.tokens * part.wide.row_bytes;
    uint32_t count = part.tokens * part.head_size;

    for (uint32_t i = threadIdx.x; i < count; i += CONVERT_THREADS) {
        uint32_t token = i / part.head_size;
        uint64_t row = (uint64_t)head * part.tokens + token;
        float value = kvk_part_value(part.narrow, part.format_narrow, part.is_value != 0,
                                     part.source, row, head, token, i % part.head_size);
        wide_store(part.format_wide, value, rows, i);
    }
}

__global__ void __launch_bounds__(CONVERT_THREADS) convert_parts(convert_launch launch)
{
    const kvk_cuda_conversion &part = launch.conversions[blockIdx.x];
    uint32_t *refused = launch.refused + blockIdx.x;
    uint32_t head = blockIdx.y;

    if (head >= part.heads) {
        return;
    }
    if (part.is_widening) {
        widen_head(part, head);
        return;
    }
    uint64_t first_row = (uint64_t)head * part.tokens;
    const plane plane = {
        &part,
        part.source + first_row * part.wide.row_bytes,
        part.target + first_row * part.narrow.row_bytes,
        part.target + part.narrow.scales_offset + (uint64_t)head * part.narrow.scale_stride,
    };
    if (part.format_narrow == KVK_FORMAT_FP8_E4M3) {
        narrow_head(plane, refused);
    } else if (part.format_narrow == KVK_FORMAT_INT8_CHANNEL && !part.is_value) {
        narrow_channels(plane, refused);
    } else {
        narrow_tokens(plane, refused);
    }
    if (head == 0) {
        clear_padding(part);
    }
}

extern "C" int kvk_cuda_convert_launch(const struct kvk_cuda_conversion *conversions,
                                       uint32_t count, uint32_t heads_max, uint32_t *refused,
                                       void *stream)
{
    convert_launch launch = {conversions, refused};

    if (count == 0 || heads_max == 0) {
        return 0;
    }
    return kvk_launch(convert_parts, dim3(count, heads_max), CONVERT_THREADS, CONVERT_SHARED_BYTES,
                      CONVERT_SHARED_BYTES, stream, launch);
}
