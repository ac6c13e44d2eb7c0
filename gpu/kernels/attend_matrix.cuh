/*
 * Attention by matrix instructions: 16-bit K and V, head sizes that are multiples of 32.
 *
 * A block of four warps works off one unit for one KV head. Its rows (queries of the heads that
 * share the KV head) lie packed in matrices of 16 rows, so K and V are read once for all of them;
 * tokens come in tiles, copied asynchronously kStages - 1 tiles ahead. For each tile
 *   1. each warp multiplies Q with a quarter of the tile's K: logits, into shared memory;
 *   2. a few threads for each row mask, cap and soften them: weights, and the row's new maximum;
 *   3. each warp multiplies the weights with its quarter of V's columns, over all tokens.
 * Three barriers a tile. Stage and location of tile t are written anew only after the first barrier
 * of tile t + 1, past which nobody reads them.
 *
 * Weights are a sum of two 16-bit numbers, so that nothing is lost by their narrow format: results
 * are as good as fp32's, whatever the batch is cut into, and the extra multiplication hides behind
 * the memory's speed.
 */
#pragma once

#include "gpu/kernels/attend_rows.cuh"

#define KVK_MATRIX_THREADS 128
#define KVK_MATRIX_WARPS (KVK_MATRIX_THREADS / KVK_WARP_THREADS)

/* Rows of shared memory are this much longer than their values, so that the eight rows of a matrix
 * begin in different banks. */
#define KVK_MATRIX_PAD 8

/* Where a token's K and V lie. */
struct kvk_token_place {
    const uint8_t *page; /* NULL: the token is not there, or past the tile */
    uint64_t row;        /* among the [kv_head][token] of the page */
};

template <typename Format, int kHeadSizeK, int kHeadSizeV, bool kLatent, int kRowTiles,
          int kTileTokens, int kStages>
struct kvk_matrix_shape {
    static constexpr int kTile = kTileTokens;
    static constexpr int kCombinationsK = 1; /* of parts of Q and K */
    static constexpr int kCombinationsV = 2; /* of parts of weights and V */
    static constexpr int kRows = 16 * kRowTiles;
    static constexpr int kStrideK = kHeadSizeK + KVK_MATRIX_PAD;
    static constexpr int kStrideV = kLatent ? kStrideK : kHeadSizeV + KVK_MATRIX_PAD;
    static constexpr int kStageValues =
        kTileTokens * kStrideK + (kLatent ? 0 : kTileTokens * kStrideV);
    static constexpr int kRowThreads = KVK_MATRIX_THREADS / kRows;
    static constexpr int kStrideLogits = kTileTokens + kRowThreads;
    static constexpr int kStrideWeights = kTileTokens + KVK_MATRIX_PAD;
    static constexpr int kPlaces = (kStages + 1) * kTileTokens;
    static constexpr int kColumnsK = kTileTokens / KVK_MATRIX_WARPS / 8; /* matrices of a warp */
    static constexpr int kColumnsV = kHeadSizeV / KVK_MATRIX_WARPS / 8;

    /* Shared memory, in this order. Every part is a multiple of 16 bytes. */
    alignas(16) Format queries[kRows * kStrideK];
    alignas(16) Format stages[kStages][kStageValues];
    alignas(16) Format weights[2][kRows * kStrideWeights];
    alignas(16) float logits[kRows * kStrideLogits];
    alignas(16) kvk_token_place places[kPlaces];
    alignas(16) float factors[kRows];
};

template <typename Shape> __device__ __forceinline__ Shape &kvk_matrix_shared(void)
{
    return *(Shape *)kvk_shared_memory();
}

/* The thread's token of tile `index`. Reads the page table; the answer is stored later, so that
 * the read goes on meanwhile. */
template <int kTileTokens>
__device__ __forceinline__ kvk_token_place kvk_matrix_place(const kvk_cuda_attend &attend,
                                                            const kvk_cuda_unit &unit,
                                                            uint32_t index)
{
    kvk_tile tile = kvk_tile_at(unit, kTileTokens, index);
    uint32_t token = tile.begin + threadIdx.x;
    kvk_token_place place = {nullptr, 0};

    if (threadIdx.x < kTileTokens && token < tile.end) {
        uint32_t page = token / attend.block_tokens;
        place.page = attend.pages[unit.first_page + page];
        place.row =
            (uint64_t)blockIdx.y * attend.block_tokens + (token - page * attend.block_tokens);
    }
    return place;
}

/* Start to copy K or V of a tile, 16 bytes a step. */
template <typename Format, int kTileTokens, int kHeadSize, int kStride>
__device__ __forceinline__ void kvk_matrix_copy(Format *target, const kvk_token_place *places,
                                                uint64_t offset)
{
    constexpr int kPieceValues = 16 / (int)sizeof(Format);
    constexpr int kPieces = kHeadSize / kPieceValues;

#pragma unroll 4
    for (int i = (int)threadIdx.x; i < kTileTokens * kPieces; i += KVK_MATRIX_THREADS) {
        int token = i / kPieces;
        int piece = i % kPieces;
        kvk_token_place place = places[token];
        const uint8_t *source = place.page + offset + (place.row * kPieces + (uint64_t)piece) * 16;
        kvk_copy_async(target + token * kStride + piece * kPieceValues, source,
                       place.page != nullptr);
    }
}

template <typename Format, typename Shape, int kHeadSizeK>
__device__ __forceinline__ void kvk_matrix_copy_queries(const kvk_cuda_attend &attend,
                                                        const kvk_cuda_unit &unit, Shape &shared)
{
    constexpr int kPieceValues = 16 / (int)sizeof(Format);
    constexpr int kPieces = kHeadSizeK / kPieceValues;

    for (int i = (int)threadIdx.x; i < Shape::kRows * kPieces; i += KVK_MATRIX_THREADS) {
        uint32_t row = (uint32_t)(i / kPieces);
        int piece = i % kPieces;
        bool take = row < unit.row_count;
        const kvk_cuda_row &of = attend.rows[unit.first_row + (take ? row : 0)];
        uint64_t query =
            (uint64_t)of.query * attend.query_heads + kvk_query_head(attend, blockIdx.y, of.head);
        const uint8_t *source =
            (const uint8_t *)attend.queries + (query * kPieces + (uint64_t)piece) * 16;
        kvk_copy_async(shared.queries + (int)row * Shape::kStrideK + piece * kPieceValues, source,
                       take);
    }
}

/*
 * Step 1: the warp's columns of Q x K, into shared memory. Where Q and K are sums of two parts, so
 * is their product, but for low x low, which is too small to count.
 */
template <typename Format, typename Shape, int kHeadSizeK, int kRowTiles>
__device__ __forceinline__ void kvk_matrix_score(Shape &shared, const Format *k)
{
    int lane = (int)threadIdx.x % KVK_WARP_THREADS;
    int column = (int)threadIdx.x / KVK_WARP_THREADS * Shape::kColumnsK * 8;
    float sums[kRowTiles][Shape::kColumnsK][4] = {};

#pragma unroll 1
    for (int combination = 0; combination < Shape::kCombinationsK; combination++) {
        const Format *q_row = shared.queries + (lane & 15) * Shape::kStrideK + (lane >> 4) * 8 +
                              (combination == 2 ? Shape::kRows * Shape::kStrideK : 0);
        const Format *k_row = k + (column + (lane & 7)) * Shape::kStrideK + (lane >> 3) * 8 +
                              (combination == 1 ? Shape::kTile * Shape::kStrideK : 0);
#pragma unroll 2
        for (int i = 0; i < kHeadSizeK; i += 32) {
            uint32_t q[kRowTiles][2][4];
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
                kvk_load_matrices(q[m][0], q_row + m * 16 * Shape::kStrideK + i);
                kvk_load_matrices(q[m][1], q_row + m * 16 * Shape::kStrideK + i + 16);
            }
#pragma unroll
            for (int n = 0; n < Shape::kColumnsK; n++) {
                uint32_t b[4];
                kvk_load_matrices(b, k_row + n * 8 * Shape::kStrideK + i);
#pragma unroll
                for (int m = 0; m < kRowTiles; m++) {
                    kvk_multiply(sums[m][n], q[m][0], b, Format());
                    kvk_multiply(sums[m][n], q[m][1], b + 2, Format());
                }
            }
        }
    }
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
#pragma unroll
        for (int n = 0; n < Shape::kColumnsK; n++) {
            float *logits = shared.logits + (m * 16 + lane / 4) * Shape::kStrideLogits + column +
                            n * 8 + lane % 4 * 2;
            logits[0] = sums[m][n][0];
            logits[1] = sums[m][n][1];
            logits[8 * Shape::kStrideLogits] = sums[m][n][2];
            logits[8 * Shape::kStrideLogits + 1] = sums[m][n][3];
        }
    }
}

/* A row as the threads that soften it keep it. */
struct kvk_matrix_row {
    int64_t position; /* counted from the unit's first token, as is token_end */
    int64_t token_end;
    float slope;
    float max;
    float sum; /* of the thread's own columns */
};

template <typename Shape>
__device__ __forceinline__ kvk_matrix_row kvk_matrix_row_of(const kvk_cuda_attend &attend,
                                                            const kvk_cuda_unit &unit)
{
    uint32_t row = threadIdx.x / Shape::kRowThreads;
    kvk_matrix_row state = {0, 0, 0, -kvk_infinity(), 0};

    if (row < unit.row_count) {
        const kvk_cuda_row &of = attend.rows[unit.first_row + row];
        state.position = of.position - unit.first_token;
        state.token_end = of.token_end - unit.first_token;
        if (attend.slopes != nullptr) {
            state.slope = attend.slopes[kvk_query_head(attend, blockIdx.y, of.head)];
        }
    }
    return state;
}

/* Step 2: logits become weights. Rows past the unit's last one have queries of zeros; what becomes
 * of them is not stored. */
template <typename Format, typename Shape, int kTileTokens>
__device__ __forceinline__ void
kvk_matrix_soften(const kvk_cuda_attend &attend, const kvk_cuda_unit &unit, Shape &shared,
                  const kvk_token_place *places, kvk_tile tile, kvk_matrix_row &state)
{
    constexpr int kColumns = kTileTokens / Shape::kRowThreads;
    int row = (int)threadIdx.x / Shape::kRowThreads;
    int first = (int)threadIdx.x % Shape::kRowThreads;
    kvk_row_view view = kvk_row_view_of(attend, unit, state.position, state.token_end, tile);
    const float *logits = shared.logits + row * Shape::kStrideLogits;
    Format *high = shared.weights[0] + row * Shape::kStrideWeights;
    Format *low = shared.weights[1] + row * Shape::kStrideWeights;
    float values[kColumns];
    float max = state.max;

#pragma unroll
    for (int i = 0; i < kColumns; i++) {
        int column = first + i * Shape::kRowThreads;
        values[i] = -kvk_infinity();
        if (kvk_row_sees(view, column) && places[column].page != nullptr) {
            values[i] = kvk_row_logit(attend, logits[column], state.slope,
                                      state.position - (int64_t)(tile.begin + (uint32_t)column));
        }
        max = fmaxf(max, values[i]);
    }
#pragma unroll
    for (int mask = 1; mask < Shape::kRowThreads; mask *= 2) {
        max = fmaxf(max, kvk_shuffle_xor(max, (uint32_t)mask));
    }
    float top = max == -kvk_infinity() ? 0 : max; /* nothing seen so far: all weights are 0 */
    float factor = kvk_exp(state.max - top);
    state.sum *= factor;
    state.max = max;
#pragma unroll
    for (int i = 0; i < kColumns; i++) {
        int column = first + i * Shape::kRowThreads;
        float weight = kvk_exp(values[i] - top);
        Format part;
        state.sum += weight;
        kvk_narrow(weight, &part);
        high[column] = part;
        kvk_narrow(weight - kvk_widen(part), &part);
        low[column] = part;
    }
    if (first == 0) {
        shared.factors[row] = factor;
    }
}

/* Step 3: the warp's columns of V, weighed by both parts of the weights; of V's second part, where
 * it has one, by the high ones. */
template <typename Format, typename Shape, int kRowTiles, int kTileTokens>
__device__ __forceinline__ void kvk_matrix_weigh(const Shape &shared, const Format *v,
                                                 float values[kRowTiles][Shape::kColumnsV][4])
{
    int lane = (int)threadIdx.x % KVK_WARP_THREADS;
    int column = (int)threadIdx.x / KVK_WARP_THREADS * Shape::kColumnsV * 8;
    int weight = (lane & 15) * Shape::kStrideWeights + (lane >> 4) * 8;

#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
        float factor = shared.factors[m * 16 + lane / 4];
        float factor_below = shared.factors[m * 16 + 8 + lane / 4];
#pragma unroll
        for (int n = 0; n < Shape::kColumnsV; n++) {
            values[m][n][0] *= factor;
            values[m][n][1] *= factor;
            values[m][n][2] *= factor_below;
            values[m][n][3] *= factor_below;
        }
    }
#pragma unroll 1
    for (int token = 0; token < kTileTokens; token += 32) {
        /* V is read again rather than all weights held in registers. */
#pragma unroll 1
        for (int combination = 0; combination < Shape::kCombinationsV; combination++) {
            const Format *v_row = v + (token + lane) * Shape::kStrideV + column +
                                  (combination == 2 ? Shape::kTile * Shape::kStrideV : 0);
            uint32_t weights[kRowTiles][2][4]; /* [tokens 0-15 or 16-31] */
#pragma unroll
            for (int m = 0; m < kRowTiles; m++) {
                const Format *row = shared.weights[combination == 1] + weight +
                                    m * 16 * Shape::kStrideWeights + token;
                kvk_load_matrices(weights[m][0], row);
                kvk_load_matrices(weights[m][1], row + 16);
            }
#pragma unroll
            for (int n = 0; n < Shape::kColumnsV; n++) {
                uint32_t b[4];
                kvk_load_matrices_transposed(b, v_row + n * 8);
#pragma unroll
                for (int m = 0; m < kRowTiles; m++) {
                    kvk_multiply(values[m][n], weights[m][0], b, Format());
                    kvk_multiply(values[m][n], weights[m][1], b + 2, Format());
                }
            }
        }
    }
}

/* The rows' factors are in shared memory. */
template <typename Shape, int kRowTiles>
__device__ __forceinline__ void kvk_matrix_store(const kvk_cuda_attend &attend,
                                                 const kvk_cuda_unit &unit, const Shape &shared,
                                                 const float values[kRowTiles][Shape::kColumnsV][4])
{
    int lane = (int)threadIdx.x % KVK_WARP_THREADS;
    int column = (int)threadIdx.x / KVK_WARP_THREADS * Shape::kColumnsV * 8 + lane % 4 * 2;

#pragma unroll
    for (int half = 0; half < 2 * kRowTiles; half++) {
        uint32_t row = (uint32_t)(half * 8 + lane / 4);
        if (row < unit.row_count) {
            float factor = shared.factors[row];
            float *output = kvk_unit_values(attend, unit, row, blockIdx.y) + column;
#pragma unroll
            for (int n = 0; n < Shape::kColumnsV; n++) {
                output[n * 8] = factor == 0 ? 0 : values[half / 2][n][half % 2 * 2] * factor;
                output[n * 8 + 1] =
                    factor == 0 ? 0 : values[half / 2][n][half % 2 * 2 + 1] * factor;
            }
        }
    }
}

/* Write down what the row has come to, and leave what its values are to be multiplied with. */
template <typename Shape>
__device__ __forceinline__ void kvk_matrix_finish(const kvk_cuda_attend &attend,
                                                  const kvk_cuda_unit &unit, Shape &shared,
                                                  kvk_matrix_row &state)
{
    uint32_t row = threadIdx.x / Shape::kRowThreads;

#pragma unroll
    for (int mask = 1; mask < Shape::kRowThreads; mask *= 2) {
        state.sum += kvk_shuffle_xor(state.sum, (uint32_t)mask);
    }
    if (threadIdx.x % Shape::kRowThreads == 0 && row < unit.row_count) {
        shared.factors[row] = kvk_unit_finish(attend, unit, row, blockIdx.y, state.max, state.sum);
    }
}

template <typename Format, int kHeadSizeK, int kHeadSizeV, bool kLatent, int kRowTiles,
          int kTileTokens, int kStages>
__global__ void __launch_bounds__(KVK_MATRIX_THREADS, 1) kvk_attend_matrix(kvk_cuda_attend attend)
{
    using Shape =
        kvk_matrix_shape<Format, kHeadSizeK, kHeadSizeV, kLatent, kRowTiles, kTileTokens, kStages>;
    Shape &shared = kvk_matrix_shared<Shape>();
    const kvk_cuda_unit unit = attend.units[blockIdx.x];
    uint32_t tile_count = kvk_tile_count(unit, kTileTokens);
    kvk_matrix_row state = kvk_matrix_row_of<Shape>(attend, unit);
    float values[kRowTiles][Shape::kColumnsV][4] = {};
    constexpr int kOffsetV = kLatent ? 0 : kTileTokens * Shape::kStrideK;

    auto copy_tile = [&](uint32_t index) {
        const kvk_token_place *places =
            shared.places + index % (kStages + 1) * (uint32_t)kTileTokens;
        Format *stage = shared.stages[index % kStages];
        kvk_matrix_copy<Format, kTileTokens, kHeadSizeK, Shape::kStrideK>(stage, places,
                                                                          attend.k.offset);
        if (!kLatent) {
            kvk_matrix_copy<Format, kTileTokens, kHeadSizeV, Shape::kStrideV>(
                stage + kOffsetV, places, attend.v.offset);
        }
    };

    for (uint32_t i = 0; i < kStages && threadIdx.x < kTileTokens; i++) {
        shared.places[i * kTileTokens + threadIdx.x] =
            kvk_matrix_place<kTileTokens>(attend, unit, i);
    }
    kvk_matrix_copy_queries<Format, Shape, kHeadSizeK>(attend, unit, shared);
    kvk_barrier();
    for (uint32_t i = 0; i < kStages - 1; i++) {
        if (i < tile_count) {
            copy_tile(i);
        }
        kvk_copy_async_close(); /* even an empty group is counted by the wait */
    }

    for (uint32_t i = 0; i < tile_count; i++) {
        const Format *stage = shared.stages[i % kStages];
        kvk_copy_async_wait<kStages - 2>();
        kvk_barrier();
        if (i + kStages - 1 < tile_count) {
            copy_tile(i + kStages - 1);
        }
        kvk_copy_async_close();
        kvk_token_place place = kvk_matrix_place<kTileTokens>(attend, unit, i + kStages);
        kvk_matrix_score<Format, Shape, kHeadSizeK, kRowTiles>(shared, stage);
        if (threadIdx.x < kTileTokens) {
            shared.places[(i + kStages) % (kStages + 1) * kTileTokens + threadIdx.x] = place;
        }
        kvk_barrier();
        kvk_matrix_soften<Format, Shape, kTileTokens>(
            attend, unit, shared, shared.places + i % (kStages + 1) * (uint32_t)kTileTokens,
            kvk_tile_at(unit, kTileTokens, i), state);
        kvk_barrier();
        kvk_matrix_weigh<Format, Shape, kRowTiles, kTileTokens>(shared, stage + kOffsetV, values);
    }

    kvk_barrier(); /* factors are written anew */
    kvk_matrix_finish<Shape>(attend, unit, shared, state);
    kvk_barrier();
    kvk_matrix_store<Shape, kRowTiles>(attend, unit, shared, values);
}
