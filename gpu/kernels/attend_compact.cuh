/*
 * Attention by matrix instructions over compact K and V (base/format.h): as attend_matrix.cuh, with
 * one more step in the loop. What was copied of a tile is unpacked, times its scales, into two bf16
 * numbers for each value, a high and a low part; Q is taken apart likewise. So results are those of
 * fp32, near enough: what is left out is 2^-16 of a value.
 *
 * Memory is read as compact as it is stored; the unpacked tile lives in shared memory alone.
 */
#pragma once

#include "gpu/kernels/attend_matrix.cuh"
#include "gpu/kernels/values.cuh"

/* Tiles are short, for they lie in shared memory unpacked. */
#define KVK_COMPACT_TILE_TOKENS 32
/* Values that a thread unpacks together. */
#define KVK_COMPACT_STEP 4

/* The longest row of a compact format: int8_32. */
constexpr int kvk_compact_row_bytes(int head_size)
{
    return head_size / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES;
}

constexpr int kvk_compact_aligned(int size_bytes)
{
    return (size_bytes + 15) / 16 * 16;
}

template <int kHeadSizeK, int kHeadSizeV, int kRowTiles, int kStages> struct kvk_compact_shape {
    static constexpr int kTile = KVK_COMPACT_TILE_TOKENS;
    static constexpr int kCombinationsK = 3;
    static constexpr int kCombinationsV = 3;
    static constexpr int kRows = 16 * kRowTiles;
    static constexpr int kStrideK = kHeadSizeK + KVK_MATRIX_PAD;
    static constexpr int kStrideV = kHeadSizeV + KVK_MATRIX_PAD;
    static constexpr int kRowBytesK = kvk_compact_aligned(kvk_compact_row_bytes(kHeadSizeK));
    static constexpr int kRowBytesV = kvk_compact_aligned(kvk_compact_row_bytes(kHeadSizeV));
    static constexpr int kRowThreads = KVK_MATRIX_THREADS / kRows;
    static constexpr int kStrideLogits = kTile + kRowThreads;
    static constexpr int kStrideWeights = kTile + KVK_MATRIX_PAD;
    static constexpr int kPlaces = (kStages + 1) * kTile;
    static constexpr int kColumnsK = kTile / KVK_MATRIX_WARPS / 8;
    static constexpr int kColumnsV = kHeadSizeV / KVK_MATRIX_WARPS / 8;

    alignas(16) kvk_bf16 queries[2 * kRows * kStrideK]; /* high, then low */
    alignas(16) kvk_bf16 keys[2 * kTile * kStrideK];
    alignas(16) kvk_bf16 values[2 * kTile * kStrideV];
    alignas(16) uint8_t stages_k[kStages][kTile * kRowBytesK];
    alignas(16) uint8_t stages_v[kStages][kTile * kRowBytesV];
    alignas(16) kvk_bf16 weights[2][kRows * kStrideWeights];
    alignas(16) float logits[kRows * kStrideLogits];
    alignas(16) kvk_token_place places[kPlaces];
    alignas(16) float factors[kRows];
};

/* Start to copy K or V of a tile, as wide as the format's rows are aligned. */
template <int kTargetRowBytes>
__device__ __forceinline__ void kvk_compact_copy(uint8_t *target, const kvk_token_place *places,
                                                 const kvk_cuda_part &part)
{
    uint32_t piece_bytes = part.row_bytes % 16 == 0 ? 16 : 4;
    uint32_t pieces = part.row_bytes / piece_bytes;

    for (uint32_t i = threadIdx.x; i < KVK_COMPACT_TILE_TOKENS * pieces; i += KVK_MATRIX_THREADS) {
        uint32_t token = i / pieces;
        uint32_t at = i % pieces * piece_bytes;
        kvk_token_place place = places[token];
        const uint8_t *source = place.page + part.offset + place.row * part.row_bytes + at;
        uint8_t *to = target + token * kTargetRowBytes + at;
        if (piece_bytes == 16) {
            kvk_copy_async(to, source, place.page != nullptr);
        } else {
            kvk_copy_async_word(to, source, place.page != nullptr);
        }
    }
}

/* Values `column` and the next three of a token's row, as it was copied. */
__device__ __forceinline__ void kvk_compact_widen(const kvk_cuda_part &part, uint8_t format,
                                                  bool is_value, const uint8_t *row,
                                                  kvk_token_place place, uint32_t token,
                                                  uint32_t column, float values[KVK_COMPACT_STEP])
{
    const uint8_t *scales =
        place.page + part.offset + part.scales_offset + (uint64_t)blockIdx.y * part.scale_stride;

    if (format == KVK_FORMAT_FP8_E4M3) {
        float scale = *(const float *)(const void *)scales;
#pragma unroll
        for (uint32_t i = 0; i < KVK_COMPACT_STEP; i++) {
            values[i] = scale * kvk_fp8_widen(row[column + i]);
        }
    } else if (format == KVK_FORMAT_INT8_CHANNEL) {
        const kvk_bf16 *channels = (const kvk_bf16 *)(const void *)scales;
#pragma unroll
        for (uint32_t i = 0; i < KVK_COMPACT_STEP; i++) {
            float scale = kvk_widen(channels[is_value ? token : column + i]);
            values[i] = scale * (float)(int8_t)row[column + i];
        }
    } else {
        row += column / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES;
        float scale = kvk_widen(*(const kvk_fp16 *)(const void *)row);
#pragma unroll
        for (uint32_t i = 0; i < KVK_COMPACT_STEP; i++) {
            values[i] = scale * (float)(int8_t)row[2 + column % KVK_INT8_32_VALUES + i];
        }
    }
}

/* Two bf16 numbers whose sum is the value, but for 2^-17 of it. An infinite one has no low part. */
__device__ __forceinline__ void kvk_compact_take_apart(float value, kvk_bf16 *high, kvk_bf16 *low)
{
    kvk_narrow(value, high);
    kvk_narrow(value - kvk_widen(*high), low);
}

/* K or V of a tile, from its stage to where matrix instructions find it. */
template <int kHeadSize, int kStride, int kRowBytes>
__device__ __forceinline__ void kvk_compact_unpack(const kvk_cuda_attend &attend,
                                                   const kvk_cuda_part &part, uint8_t format,
                                                   bool is_value, const uint8_t *stage,
                                                   const kvk_token_place *places, kvk_bf16 *target)
{
    constexpr int kSteps = kHeadSize / KVK_COMPACT_STEP;

#pragma unroll 2
    for (int i = (int)threadIdx.x; i < KVK_COMPACT_TILE_TOKENS * kSteps; i += KVK_MATRIX_THREADS) {
        int token = i / kSteps;
        int column = i % kSteps * KVK_COMPACT_STEP;
        kvk_token_place place = places[token];
        kvk_bf16 *high = target + token * kStride + column;
        kvk_bf16 *low = high + KVK_COMPACT_TILE_TOKENS * kStride;
        float values[KVK_COMPACT_STEP] = {};
        if (place.page != nullptr) {
            uint32_t slot = (uint32_t)(place.row - (uint64_t)blockIdx.y * attend.block_tokens);
            kvk_compact_widen(part, format, is_value, stage + token * kRowBytes, place, slot,
                              (uint32_t)column, values);
        }
#pragma unroll
        for (int j = 0; j < KVK_COMPACT_STEP; j++) {
            kvk_compact_take_apart(values[j], &high[j], &low[j]);
        }
    }
}

/* Q of any plain format; rows past the unit's last one are zeros. */
template <typename Shape, int kHeadSizeK>
__device__ __forceinline__ void kvk_compact_take_queries(const kvk_cuda_attend &attend,
                                                         const kvk_cuda_unit &unit, Shape &shared)
{
    for (int i = (int)threadIdx.x; i < Shape::kRows * kHeadSizeK; i += KVK_MATRIX_THREADS) {
        uint32_t row = (uint32_t)(i / kHeadSizeK);
        uint32_t column = (uint32_t)(i % kHeadSizeK);
        kvk_bf16 *high = shared.queries + row * Shape::kStrideK + column;
        float value = 0;
        if (row < unit.row_count) {
            const kvk_cuda_row &of = attend.rows[unit.first_row + row];
            uint64_t query = (uint64_t)of.query * attend.query_heads +
                             kvk_query_head(attend, blockIdx.y, of.head);
            value = kvk_value_read(attend.format_q, (const uint8_t *)attend.queries,
                                   query * kHeadSizeK + column);
        }
        kvk_compact_take_apart(value, high, high + Shape::kRows * Shape::kStrideK);
    }
}

template <int kHeadSizeK, int kHeadSizeV, int kRowTiles, int kStages>
__global__ void __launch_bounds__(KVK_MATRIX_THREADS, 1) kvk_attend_compact(kvk_cuda_attend attend)
{
    using Shape = kvk_compact_shape<kHeadSizeK, kHeadSizeV, kRowTiles, kStages>;
    constexpr int kTile = KVK_COMPACT_TILE_TOKENS;
    Shape &shared = kvk_matrix_shared<Shape>();
    const kvk_cuda_unit unit = attend.units[blockIdx.x];
    uint32_t tile_count = kvk_tile_count(unit, kTile);
    kvk_matrix_row state = kvk_matrix_row_of<Shape>(attend, unit);
    float values[kRowTiles][Shape::kColumnsV][4] = {};

    auto copy_tile = [&](uint32_t index) {
        const kvk_token_place *places = shared.places + index % (kStages + 1) * (uint32_t)kTile;
        kvk_compact_copy<Shape::kRowBytesK>(shared.stages_k[index % kStages], places, attend.k);
        kvk_compact_copy<Shape::kRowBytesV>(shared.stages_v[index % kStages], places, attend.v);
    };

    for (uint32_t i = 0; i < kStages && threadIdx.x < kTile; i++) {
        shared.places[i * kTile + threadIdx.x] = kvk_matrix_place<kTile>(attend, unit, i);
    }
    kvk_compact_take_queries<Shape, kHeadSizeK>(attend, unit, shared);
    kvk_barrier();
    for (uint32_t i = 0; i < kStages - 1; i++) {
        if (i < tile_count) {
            copy_tile(i);
        }
        kvk_copy_async_close();
    }

    for (uint32_t i = 0; i < tile_count; i++) {
        const kvk_token_place *places = shared.places + i % (kStages + 1) * (uint32_t)kTile;
        kvk_copy_async_wait<kStages - 2>();
        kvk_barrier();
        if (i + kStages - 1 < tile_count) {
            copy_tile(i + kStages - 1);
        }
        kvk_copy_async_close();
        kvk_token_place place = kvk_matrix_place<kTile>(attend, unit, i + kStages);
        kvk_compact_unpack<kHeadSizeK, Shape::kStrideK, Shape::kRowBytesK>(
            attend, attend.k, attend.format_k, false, shared.stages_k[i % kStages], places,
            shared.keys);
        kvk_compact_unpack<kHeadSizeV, Shape::kStrideV, Shape::kRowBytesV>(
            attend, attend.v, attend.format_v, true, shared.stages_v[i % kStages], places,
            shared.values);
        if (threadIdx.x < kTile) {
            shared.places[(i + kStages) % (kStages + 1) * kTile + threadIdx.x] = place;
        }
        kvk_barrier();
        kvk_matrix_score<kvk_bf16, Shape, kHeadSizeK, kRowTiles>(shared, shared.keys);
        kvk_barrier();
        kvk_matrix_soften<kvk_bf16, Shape, kTile>(attend, unit, shared, places,
                                                  kvk_tile_at(unit, kTile, i), state);
        kvk_barrier();
        kvk_matrix_weigh<kvk_bf16, Shape, kRowTiles, kTile>(shared, shared.values, values);
    }

    kvk_barrier(); /* factors are written anew */
    kvk_matrix_finish<Shape>(attend, unit, shared, state);
    kvk_barrier();
    kvk_matrix_store<Shape, kRowTiles>(attend, unit, shared, values);
}
