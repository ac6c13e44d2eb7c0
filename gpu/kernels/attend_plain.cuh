/*
 * Attention in fp32 arithmetic: every format, every shape, any alignment. For what the matrix
 * kernel does not take, and to check it against.
 *
 * A block of four warps works off one unit for one KV head, a tile of tokens at a time: each warp
 * multiplies Q with the K of every fourth token, its lanes side by side; one thread for each row
 * softens; each thread adds up some columns of V.
 */
#pragma once

#include "gpu/kernels/attend_rows.cuh"
#include "gpu/kernels/values.cuh"

#define KVK_PLAIN_THREADS 128
#define KVK_PLAIN_WARPS (KVK_PLAIN_THREADS / KVK_WARP_THREADS)
#define KVK_PLAIN_TILE_TOKENS 32

/* Shared memory, in this order; lengths are the launch's. */
struct kvk_plain_shared {
    float *queries;        /* [unit_rows][head_size_k] */
    float *values;         /* [unit_rows][head_size_v] */
    float *logits;         /* [unit_rows][KVK_PLAIN_TILE_TOKENS]; then weights */
    float *factors;        /* [unit_rows] */
    const uint8_t **pages; /* [KVK_PLAIN_TILE_TOKENS]; NULL: the token is not there */
};

/* Of units of so many rows, with so many values of Q and V in all of them. */
static constexpr uint32_t kvk_plain_shared_bytes(uint32_t rows, uint32_t values)
{
    return (values + rows * (KVK_PLAIN_TILE_TOKENS + 1)) * (uint32_t)sizeof(float) +
           KVK_PLAIN_TILE_TOKENS * (uint32_t)sizeof(uint8_t *);
}

#define KVK_PLAIN_SHARED_BYTES_MAX                                                                 \
    kvk_plain_shared_bytes(KVK_CUDA_PLAIN_ROWS_MAX, KVK_CUDA_PLAIN_VALUES_MAX)
/* The least that GPUs of compute capability 8.0 and later give a block. */
static_assert(KVK_PLAIN_SHARED_BYTES_MAX <= 99 * 1024, "runs on every GPU");
static_assert(KVK_CUDA_PLAIN_ROWS_MAX <= KVK_PLAIN_THREADS, "a thread for each row");

__device__ __forceinline__ kvk_plain_shared kvk_plain_shared_of(const kvk_cuda_attend &attend)
{
    kvk_plain_shared shared;

    shared.pages = (const uint8_t **)kvk_shared_memory();
    shared.queries = (float *)(shared.pages + KVK_PLAIN_TILE_TOKENS);
    shared.values = shared.queries + attend.unit_rows * attend.head_size_k;
    shared.logits = shared.values + attend.unit_rows * attend.head_size_v;
    shared.factors = shared.logits + attend.unit_rows * KVK_PLAIN_TILE_TOKENS;
    return shared;
}

/* Logits of every fourth token of the tile. */
__device__ __forceinline__ void kvk_plain_score(const kvk_cuda_attend &attend,
                                                const kvk_cuda_unit &unit,
                                                const kvk_plain_shared &shared, kvk_tile tile)
{
    uint32_t lane = threadIdx.x % KVK_WARP_THREADS;
    uint32_t warp = threadIdx.x / KVK_WARP_THREADS;

    for (uint32_t column = warp; column < tile.end - tile.begin; column += KVK_PLAIN_WARPS) {
        const uint8_t *page = shared.pages[column];
        if (page == nullptr) {
            continue; /* so for the whole warp */
        }
        uint32_t slot = (tile.begin + column) % attend.block_tokens;
        uint64_t k_row = (uint64_t)blockIdx.y * attend.block_tokens + slot;
        for (uint32_t row = 0; row < unit.row_count; row++) {
            float sum = 0;
            for (uint32_t i = lane; i < attend.head_size_k; i += KVK_WARP_THREADS) {
                sum += shared.queries[row * attend.head_size_k + i] *
                       kvk_part_value(attend.k, attend.format_k, false, page, k_row, blockIdx.y,
                                      slot, i);
            }
            for (uint32_t mask = KVK_WARP_THREADS / 2; mask > 0; mask /= 2) {
                sum += kvk_shuffle_xor(sum, mask);
            }
            if (lane == 0) {
                shared.logits[row * KVK_PLAIN_TILE_TOKENS + column] = sum;
            }
        }
    }
}

/* The thread's row: logits become weights. */
__device__ __forceinline__ void kvk_plain_soften(const kvk_cuda_attend &attend,
                                                 const kvk_cuda_unit &unit,
                                                 const kvk_plain_shared &shared, kvk_tile tile,
                                                 float *row_max, float *row_sum)
{
    uint32_t row = threadIdx.x;
    const kvk_cuda_row &of = attend.rows[unit.first_row + row];
    int64_t position = of.position - unit.first_token;
    float slope =
        attend.slopes == nullptr ? 0 : attend.slopes[kvk_query_head(attend, blockIdx.y, of.head)];
    kvk_row_view view =
        kvk_row_view_of(attend, unit, position, of.token_end - unit.first_token, tile);
    float *logits = shared.logits + row * KVK_PLAIN_TILE_TOKENS;
    int32_t count = (int32_t)(tile.end - tile.begin);
    float max = *row_max;

    for (int32_t column = 0; column < count; column++) {
        if (!kvk_row_sees(view, column) || shared.pages[column] == nullptr) {
            logits[column] = -kvk_infinity();
            continue;
        }
        logits[column] = kvk_row_logit(attend, logits[column], slope,
                                       position - (int64_t)(tile.begin + (uint32_t)column));
        max = fmaxf(max, logits[column]);
    }
    float top = max == -kvk_infinity() ? 0 : max;
    float factor = kvk_exp(*row_max - top);
    *row_sum *= factor;
    *row_max = max;
    shared.factors[row] = factor;
    for (int32_t column = 0; column < count; column++) {
        logits[column] = kvk_exp(logits[column] - top);
        *row_sum += logits[column];
    }
}

/* The thread's columns of V, weighed. */
__device__ __forceinline__ void kvk_plain_weigh(const kvk_cuda_attend &attend,
                                                const kvk_cuda_unit &unit,
                                                const kvk_plain_shared &shared, kvk_tile tile)
{
    for (uint32_t i = threadIdx.x; i < attend.head_size_v; i += KVK_PLAIN_THREADS) {
        for (uint32_t row = 0; row < unit.row_count; row++) {
            shared.values[row * attend.head_size_v + i] *= shared.factors[row];
        }
        for (uint32_t column = 0; column < tile.end - tile.begin; column++) {
            const uint8_t *page = shared.pages[column];
            if (page == nullptr) {
                continue;
            }
            uint32_t slot = (tile.begin + column) % attend.block_tokens;
            uint64_t v_row = (uint64_t)blockIdx.y * attend.block_tokens + slot;
            float value = kvk_part_value(attend.v, attend.format_v, attend.latent == 0, page, v_row,
                                         blockIdx.y, slot, i);
            for (uint32_t row = 0; row < unit.row_count; row++) {
                float weight = shared.logits[row * KVK_PLAIN_TILE_TOKENS + column];
                /* What a row does not see does not reach it, whatever it is. */
                if (weight != 0) {
                    shared.values[row * attend.head_size_v + i] += weight * value;
                }
            }
        }
    }
}

__device__ __forceinline__ void kvk_plain_begin(const kvk_cuda_attend &attend,
                                                const kvk_cuda_unit &unit,
                                                const kvk_plain_shared &shared)
{
    for (uint32_t row = 0; row < unit.row_count; row++) {
        const kvk_cuda_row &of = attend.rows[unit.first_row + row];
        uint64_t query =
            (uint64_t)of.query * attend.query_heads + kvk_query_head(attend, blockIdx.y, of.head);
        for (uint32_t i = threadIdx.x; i < attend.head_size_k; i += KVK_PLAIN_THREADS) {
            shared.queries[row * attend.head_size_k + i] = kvk_value_read(
                attend.format_q, (const uint8_t *)attend.queries, query * attend.head_size_k + i);
        }
        for (uint32_t i = threadIdx.x; i < attend.head_size_v; i += KVK_PLAIN_THREADS) {
            shared.values[row * attend.head_size_v + i] = 0;
        }
    }
}

__device__ __forceinline__ void kvk_plain_end(const kvk_cuda_attend &attend,
                                              const kvk_cuda_unit &unit,
                                              const kvk_plain_shared &shared)
{
    for (uint32_t row = 0; row < unit.row_count; row++) {
        float *output = kvk_unit_values(attend, unit, row, blockIdx.y);
        for (uint32_t i = threadIdx.x; i < attend.head_size_v; i += KVK_PLAIN_THREADS) {
            output[i] = shared.values[row * attend.head_size_v + i] * shared.factors[row];
        }
    }
}

__global__ void __launch_bounds__(KVK_PLAIN_THREADS, 1) kvk_attend_plain(kvk_cuda_attend attend)
{
    const kvk_plain_shared shared = kvk_plain_shared_of(attend);
    const kvk_cuda_unit unit = attend.units[blockIdx.x];
    uint32_t tile_count = kvk_tile_count(unit, KVK_PLAIN_TILE_TOKENS);
    float max = -kvk_infinity();
    float sum = 0;

    kvk_plain_begin(attend, unit, shared);
    for (uint32_t i = 0; i < tile_count; i++) {
        kvk_tile tile = kvk_tile_at(unit, KVK_PLAIN_TILE_TOKENS, i);
        if (threadIdx.x < tile.end - tile.begin) {
            uint32_t token = tile.begin + threadIdx.x;
            shared.pages[threadIdx.x] = attend.pages[unit.first_page + token / attend.block_tokens];
        }
        kvk_barrier();
        kvk_plain_score(attend, unit, shared, tile);
        kvk_barrier();
        if (threadIdx.x < unit.row_count) {
            kvk_plain_soften(attend, unit, shared, tile, &max, &sum);
        }
        kvk_barrier();
        kvk_plain_weigh(attend, unit, shared, tile);
        kvk_barrier(); /* pages, weights and factors are written anew */
    }
    if (threadIdx.x < unit.row_count) {
        shared.factors[threadIdx.x] =
            kvk_unit_finish(attend, unit, threadIdx.x, blockIdx.y, max, sum);
    }
    kvk_barrier();
    kvk_plain_end(attend, unit, shared);
}
