/*
 * What both attention kernels know of a row: which tokens it sees, what becomes of a dot product,
 * and how a row is finished. The contract is that of gpu/attend.h.
 */
#pragma once

#include "gpu/kernels/device.cuh"
#include "gpu/kernels/kernels.h"

/* A run of a unit's tokens that is worked on at once. */
struct kvk_tile {
    uint32_t begin;
    uint32_t end;
};

/* Tiles of a unit: first those of the sinks, then the others. */
__device__ __forceinline__ uint32_t kvk_tile_count(const kvk_cuda_unit &unit, uint32_t tile_tokens)
{
    uint32_t sinks = (unit.sinks_end - unit.sinks_begin + tile_tokens - 1) / tile_tokens;

    return sinks + (unit.end - unit.begin + tile_tokens - 1) / tile_tokens;
}

__device__ __forceinline__ kvk_tile kvk_tile_at(const kvk_cuda_unit &unit, uint32_t tile_tokens,
                                                uint32_t index)
{
    uint32_t sinks = (unit.sinks_end - unit.sinks_begin + tile_tokens - 1) / tile_tokens;
    uint32_t end = index < sinks ? unit.sinks_end : unit.end;
    uint32_t begin = index < sinks ? unit.sinks_begin + index * tile_tokens
                                   : unit.begin + (index - sinks) * tile_tokens;
    kvk_tile tile = {begin, begin + tile_tokens};

    if (begin >= end) { /* past the last one */
        tile.begin = end;
    }
    if (tile.end > end) {
        tile.end = end;
    }
    return tile;
}

/* The columns of a tile that a row sees: c < high and (c >= low or c < sinks). */
struct kvk_row_view {
    int32_t low;
    int32_t high;
    int32_t sinks;
};

__device__ __forceinline__ int32_t kvk_clamp(int64_t value, int32_t limit)
{
    if (value < 0) {
        return 0;
    }
    return value > limit ? limit : (int32_t)value;
}

/* `position` and `token_end` count from the unit's first token, as tiles do. */
__device__ __forceinline__ kvk_row_view kvk_row_view_of(const kvk_cuda_attend &attend,
                                                        const kvk_cuda_unit &unit, int64_t position,
                                                        int64_t token_end, kvk_tile tile)
{
    /* Other rows of the unit may have more tokens. */
    int32_t count = kvk_clamp(token_end - (int64_t)tile.begin, (int32_t)(tile.end - tile.begin));
    int64_t distance = position - (int64_t)tile.begin; /* the column that the row itself is */
    kvk_row_view view = {0, count, 0};

    if (attend.causal) {
        view.high = kvk_clamp(distance + 1, count);
    }
    if (attend.window != 0) {
        view.low = kvk_clamp(distance + 1 - (int64_t)attend.window, count);
        view.sinks =
            kvk_clamp((int64_t)attend.sinks - unit.first_token - (int64_t)tile.begin, count);
    }
    return view;
}

__device__ __forceinline__ bool kvk_row_sees(kvk_row_view view, int32_t column)
{
    return column < view.high && (column >= view.low || column < view.sinks);
}

/* Scaled, capped, then moved by the distance to the token: slope 0 is no ALiBi. */
__device__ __forceinline__ float kvk_row_logit(const kvk_cuda_attend &attend, float dot,
                                               float slope, int64_t distance)
{
    float logit = dot * attend.scale;

    if (attend.soft_cap > 0) {
        logit = attend.soft_cap * tanhf(logit / attend.soft_cap);
    }
    if (slope != 0) {
        logit -= slope * fabsf((float)distance);
    }
    return logit;
}

/* The running maximum and sum of a row become what its values are multiplied with, and its LSE.
 * `sink` is a logit with no value, or -inf. */
struct kvk_row_end {
    float factor;
    float lse;
};

__device__ __forceinline__ kvk_row_end kvk_row_finish(float max, float sum, float sink)
{
    float top = fmaxf(max, sink);
    kvk_row_end end = {0, -kvk_infinity()};

    if (top == -kvk_infinity()) {
        return end; /* nothing seen, no sink */
    }
    float weight = max == -kvk_infinity() ? 0 : kvk_exp(max - top);
    float total = sum * weight + kvk_exp(sink - top);
    end.factor = weight / total;
    end.lse = top + logf(total);
    return end;
}

/* The sink logit of a row whose result is not merged with others, else -inf. */
__device__ __forceinline__ float kvk_row_sink(const kvk_cuda_attend &attend, uint32_t query_head,
                                              bool partial)
{
    return attend.sink_logits == nullptr || partial ? -kvk_infinity()
                                                    : attend.sink_logits[query_head];
}

/* The query head of `head` among those that share KV head `kv_head`. */
__device__ __forceinline__ uint32_t kvk_query_head(const kvk_cuda_attend &attend, uint32_t kv_head,
                                                   uint32_t head)
{
    return kv_head * (attend.query_heads / attend.kv_heads) + head;
}

/* Among the rows of output and lse. */
__device__ __forceinline__ uint64_t kvk_output_row(const kvk_cuda_attend &attend, uint32_t query,
                                                   uint32_t query_head)
{
    return (uint64_t)query * attend.query_heads + query_head;
}

/* Where row `row` of a unit has its values. */
__device__ __forceinline__ float *kvk_unit_values(const kvk_cuda_attend &attend,
                                                  const kvk_cuda_unit &unit, uint32_t row,
                                                  uint32_t kv_head)
{
    if (unit.first_slot != KVK_CUDA_SLOT_NONE) {
        uint64_t slot = (uint64_t)(unit.first_slot + row) * attend.kv_heads + kv_head;
        return attend.slot_output + slot * attend.head_size_v;
    }
    const kvk_cuda_row &of = attend.rows[unit.first_row + row];
    uint32_t query_head = kvk_query_head(attend, kv_head, of.head);
    return attend.output + kvk_output_row(attend, of.query, query_head) * attend.head_size_v;
}

/* Write down what row `row` of a unit has come to, but for its values; the answer is what those
 * are to be multiplied with. */
__device__ __forceinline__ float kvk_unit_finish(const kvk_cuda_attend &attend,
                                                 const kvk_cuda_unit &unit, uint32_t row,
                                                 uint32_t kv_head, float max, float sum)
{
    if (unit.first_slot != KVK_CUDA_SLOT_NONE) {
        uint64_t slot = (uint64_t)(unit.first_slot + row) * attend.kv_heads + kv_head;
        attend.slot_max[slot] = max;
        attend.slot_sum[slot] = sum;
        return 1;
    }
    const kvk_cuda_row &of = attend.rows[unit.first_row + row];
    uint32_t query_head = kvk_query_head(attend, kv_head, of.head);
    kvk_row_end end = kvk_row_finish(max, sum, kvk_row_sink(attend, query_head, of.partial != 0));
    attend.lse[kvk_output_row(attend, of.query, query_head)] = end.lse;
    return end.factor;
}
