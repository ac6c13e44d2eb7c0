/*
 * Attention kernels for AVX512-BF16: dot products of pairs of bf16 values, summed in fp32. For K
 * and V in bf16; all else goes the way of plain AVX-512.
 *
 * Queries in another format are taken apart into two bf16 parts, which together keep 16 bits.
 * Weights are rounded to bf16 before they meet V; their sum and the LSE are of the unrounded ones.
 */
#include "gpu/attend_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "gpu/values.h"

#include "gpu/attend_lanes_avx512.inc"

#define INLINE static inline __attribute__((always_inline))

/* Values of a vector. */
#define PAIR_VALUES 32U
#define BLOCK_ROWS_MAX 4

_Static_assert(KVK_ATTEND_PAD_VALUES % PAIR_VALUES == 0, "rows are whole vectors");

static bool bf16_available(void)
{
    return kvk_attend_avx512.available() && __builtin_cpu_supports("avx512bf16");
}

INLINE void prefetch(const uint8_t *bytes, size_t size_bytes)
{
    for (size_t offset = 0; offset < size_bytes; offset += 64) {
        __builtin_prefetch(bytes + offset);
    }
}

/* The first `count` values, at most a vector's; the others are 0, and not read. */
INLINE __m512bh load_some(const uint8_t *bytes, size_t count)
{
    __mmask32 mask = (__mmask32)((UINT64_C(1) << count) - 1);

    return (__m512bh)_mm512_maskz_loadu_epi16(mask, bytes);
}

INLINE __m512bh load(const uint8_t *bytes)
{
    return (__m512bh)_mm512_loadu_si512(bytes);
}

/* ---- Queries: [1 or 2 parts][pad(head_size_k)] bf16 ---- */

static uint32_t part_count(const struct kvk_attend *attend)
{
    return attend->format_q == KVK_FORMAT_BF16 ? 1 : 2;
}

static size_t bf16_packed_bytes(const struct kvk_attend *attend)
{
    if (attend->format_k != KVK_FORMAT_BF16) {
        return kvk_attend_avx512.packed_bytes(attend);
    }
    return part_count(attend) * kvk_attend_pad(attend->head_size_k) * sizeof(uint16_t);
}

static uint16_t bf16_narrow(float value)
{
    return (uint16_t)_mm_extract_epi16((__m128i)_mm_cvtneps_pbh(_mm_set_ss(value)), 0);
}

static void bf16_pack(const struct kvk_attend *attend, const uint8_t *query, uint8_t *packed)
{
    if (attend->format_k != KVK_FORMAT_BF16) {
        kvk_attend_avx512.pack(attend, query, packed);
        return;
    }
    size_t stride = kvk_attend_pad(attend->head_size_k);
    uint16_t *parts = (uint16_t *)(void *)packed;
    memset(packed, 0, bf16_packed_bytes(attend));
    if (attend->format_q == KVK_FORMAT_BF16) {
        memcpy(packed, query, attend->head_size_k * sizeof(uint16_t));
        return;
    }
    for (uint32_t i = 0; i < attend->head_size_k; i++) {
        float value = kvk_value_widen(attend->format_q, query, i);
        parts[i] = bf16_narrow(value);
        parts[stride + i] = bf16_narrow(value - kvk_bf16_widen(parts[i]));
    }
}

/* ---- Scores ---- */

/* LANES scores: `row_count` rows by LANES / row_count tokens. */
INLINE void score_cell(size_t head_size, const uint8_t *const *q, uint32_t row_count,
                       uint32_t parts, const uint8_t *const *k, float *scores)
{
    const uint32_t token_count = LANES / row_count;
    size_t part_bytes = kvk_attend_pad(head_size) * sizeof(uint16_t);
    lanes sums[LANES];
    float results[LANES];

#pragma GCC unroll 16
    for (uint32_t cell = 0; cell < LANES; cell++) {
        sums[cell] = lanes_set(0);
    }
    for (uint32_t part = 0; part < parts; part++) {
        __m512bh rows[BLOCK_ROWS_MAX];
        size_t i = 0;
        for (; i + PAIR_VALUES <= head_size; i += PAIR_VALUES) {
#pragma GCC unroll 4
            for (uint32_t row = 0; row < row_count; row++) {
                rows[row] = load(q[row] + part * part_bytes + i * 2);
            }
#pragma GCC unroll 16
            for (uint32_t token = 0; token < token_count; token++) {
                __m512bh values = load(k[token] + i * 2);
#pragma GCC unroll 4
                for (uint32_t row = 0; row < row_count; row++) {
                    uint32_t cell = row * token_count + token;
                    sums[cell] = _mm512_dpbf16_ps(sums[cell], values, rows[row]);
                }
            }
        }
        if (i < head_size) {
#pragma GCC unroll 16
            for (uint32_t token = 0; token < token_count; token++) {
                __m512bh values = load_some(k[token] + i * 2, head_size - i);
#pragma GCC unroll 4
                for (uint32_t row = 0; row < row_count; row++) {
                    uint32_t cell = row * token_count + token;
                    __m512bh query = load(q[row] + part * part_bytes + i * 2);
                    sums[cell] = _mm512_dpbf16_ps(sums[cell], values, query);
                }
            }
        }
    }
    lanes_store(results, lanes_reduce(sums));
#pragma GCC unroll 4
    for (uint32_t row = 0; row < row_count; row++) {
        memcpy(scores + row * KVK_ATTEND_TILE_TOKENS, results + row * token_count,
               token_count * sizeof(*scores));
    }
}

/* As in gpu/attend_lanes.inc: missing tokens of the last cell are stood in for by the last one. */
INLINE void score_block(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t first_row, uint32_t row_count, uint32_t parts,
                        const struct kvk_attend_tokens *tokens,
                        const struct kvk_attend_tokens *ahead, float *scores)
{
    const uint32_t step = LANES / row_count;
    const uint8_t *k[LANES];
    const uint8_t *q[BLOCK_ROWS_MAX];

    for (uint32_t row = 0; row < row_count; row++) {
        q[row] = rows->queries + (first_row + row) * rows->query_stride_bytes;
    }
    for (uint32_t token = 0; token < tokens->count; token += step) {
        for (uint32_t i = 0; i < step; i++) {
            k[i] = tokens->k[token + i < tokens->count ? token + i : tokens->count - 1] +
                   tokens->k_offset;
            if (first_row == 0 && token + i < ahead->count) {
                prefetch(ahead->k[token + i] + ahead->k_offset, attend->head_size_k * 2);
            }
        }
        score_cell(attend->head_size_k, q, row_count, parts, k,
                   scores + first_row * KVK_ATTEND_TILE_TOKENS + token);
    }
}

INLINE void score_parts(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t parts, const struct kvk_attend_tokens *tokens,
                        const struct kvk_attend_tokens *ahead, float *scores)
{
    uint32_t row = 0;

    for (; row + 4 <= rows->count; row += 4) {
        score_block(attend, rows, row, 4, parts, tokens, ahead, scores);
    }
    if (row + 2 <= rows->count) {
        score_block(attend, rows, row, 2, parts, tokens, ahead, scores);
        row += 2;
    }
    if (row < rows->count) {
        score_block(attend, rows, row, 1, parts, tokens, ahead, scores);
    }
}

static void bf16_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       const struct kvk_attend_tokens *tokens,
                       const struct kvk_attend_tokens *ahead, float *scores)
{
    if (attend->format_k != KVK_FORMAT_BF16) {
        kvk_attend_avx512.score(attend, rows, tokens, ahead, scores);
    } else if (part_count(attend) == 1) {
        score_parts(attend, rows, 1, tokens, ahead, scores);
    } else {
        score_parts(attend, rows, 2, tokens, ahead, scores);
    }
}

static void bf16_soften(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t token_count, float *scores)
{
    kvk_attend_avx512.soften(attend, rows, token_count, scores);
}

/* ---- Values: of every 32, first those of the low half of each 128 bits, then the high half ----
 */

/* [row][token / 2]: the weights of two tokens, as the dot product wants them. */
struct weight_pairs {
    _Alignas(64) uint32_t pairs[KVK_ATTEND_ROWS_MAX][KVK_ATTEND_TILE_TOKENS / 2];
};

static void pairs_make(const struct kvk_attend_rows *rows, uint32_t token_count,
                       const float *weights, struct weight_pairs *result)
{
    for (uint32_t row = 0; row < rows->count; row++) {
        const float *w = weights + row * KVK_ATTEND_TILE_TOKENS;
        for (uint32_t i = 0; i < token_count; i += PAIR_VALUES) {
            __m512bh narrow = _mm512_cvtne2ps_pbh(lanes_load(w + i + LANES), lanes_load(w + i));
            _mm512_store_si512(&result->pairs[row][i / 2], (__m512i)narrow);
        }
    }
}

/* Add weight x V of all tokens to `vector_count` x 32 values of `row_count` rows. `some` > 0: only
 * so many of the 32 are there. */
INLINE void weigh_cell(const struct kvk_attend_tokens *tokens,
                       const struct kvk_attend_tokens *ahead, size_t first_value,
                       const uint32_t *const *pairs, float *const *values, uint32_t row_count,
                       uint32_t vector_count, size_t some, size_t ahead_bytes)
{
    const uint32_t half_count = 2 * vector_count; /* vectors of LANES sums */
    lanes sums[BLOCK_ROWS_MAX * 4];

#pragma GCC unroll 16
    for (uint32_t cell = 0; cell < row_count * half_count; cell++) {
        sums[cell] =
            lanes_load(values[cell / half_count] + first_value + cell % half_count * LANES);
    }
    for (uint32_t token = 0; token < tokens->count; token += 2) {
        bool paired = token + 1 < tokens->count;
        const uint8_t *v0 = tokens->v[token] + tokens->v_offset + first_value * 2;
        const uint8_t *v1 =
            tokens->v[paired ? token + 1 : token] + tokens->v_offset + first_value * 2;
        if (ahead_bytes > 0 && token + 1 < ahead->count) {
            prefetch(ahead->v[token] + ahead->v_offset, ahead_bytes);
            prefetch(ahead->v[token + 1] + ahead->v_offset, ahead_bytes);
        }
#pragma GCC unroll 4
        for (uint32_t vector = 0; vector < vector_count; vector++) {
            size_t offset = vector * PAIR_VALUES * 2;
            __m512i a = (__m512i)(some > 0 ? load_some(v0, some) : load(v0 + offset));
            __m512i b = (__m512i)(some > 0 ? load_some(v1, some) : load(v1 + offset));
            /* A lone last token is paired with itself, under a weight of 0. */
            __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b);
            __m512bh high = (__m512bh)_mm512_unpackhi_epi16(a, b);
#pragma GCC unroll 4
            for (uint32_t row = 0; row < row_count; row++) {
                __m512bh weight = (__m512bh)_mm512_set1_epi32((int)pairs[row][token / 2]);
                uint32_t cell = row * half_count + 2 * vector;
                sums[cell] = _mm512_dpbf16_ps(sums[cell], low, weight);
                sums[cell + 1] = _mm512_dpbf16_ps(sums[cell + 1], high, weight);
            }
        }
    }
#pragma GCC unroll 16
    for (uint32_t cell = 0; cell < row_count * half_count; cell++) {
        lanes_store(values[cell / half_count] + first_value + cell % half_count * LANES,
                    sums[cell]);
    }
}

INLINE void weigh_block(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t first_row, uint32_t row_count,
                        const struct kvk_attend_tokens *tokens,
                        const struct kvk_attend_tokens *ahead, const struct weight_pairs *weights)
{
    const uint32_t vector_count = row_count == 1 ? 4 : 2;
    size_t head_size = attend->head_size_v;
    size_t ahead_bytes = first_row == 0 && !attend->latent ? head_size * 2 : 0;
    const uint32_t *pairs[BLOCK_ROWS_MAX];
    float *values[BLOCK_ROWS_MAX];
    size_t i = 0;

    for (uint32_t row = 0; row < row_count; row++) {
        pairs[row] = weights->pairs[first_row + row];
        values[row] = rows->values + (first_row + row) * rows->value_stride;
    }
    for (; i + vector_count * PAIR_VALUES <= head_size; i += vector_count * PAIR_VALUES) {
        weigh_cell(tokens, ahead, i, pairs, values, row_count, vector_count, 0, ahead_bytes);
        ahead_bytes = 0;
    }
    for (; i + PAIR_VALUES <= head_size; i += PAIR_VALUES) {
        weigh_cell(tokens, ahead, i, pairs, values, row_count, 1, 0, ahead_bytes);
        ahead_bytes = 0;
    }
    if (i < head_size) {
        weigh_cell(tokens, ahead, i, pairs, values, row_count, 1, head_size - i, ahead_bytes);
    }
}

static void bf16_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       const struct kvk_attend_tokens *tokens,
                       const struct kvk_attend_tokens *ahead, const float *weights)
{
    struct weight_pairs pairs;
    uint32_t row = 0;

    if (kvk_attend_value_format(attend) != KVK_FORMAT_BF16) {
        kvk_attend_avx512.weigh(attend, rows, tokens, ahead, weights);
        return;
    }
    pairs_make(rows, tokens->count, weights, &pairs);
    for (; row + 4 <= rows->count; row += 4) {
        weigh_block(attend, rows, row, 4, tokens, ahead, &pairs);
    }
    if (row + 2 <= rows->count) {
        weigh_block(attend, rows, row, 2, tokens, ahead, &pairs);
        row += 2;
    }
    if (row < rows->count) {
        weigh_block(attend, rows, row, 1, tokens, ahead, &pairs);
    }
}

/* 16 values in their right order, from the two halves of their 32. */
static lanes values_order(lanes low, lanes high, uint32_t which)
{
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second =
        _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);

    return _mm512_permutex2var_ps(low, which == 0 ? first : second, high);
}

static void bf16_finish(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t row, float *output, float *lse)
{
    float *values = rows->values + row * rows->value_stride;

    if (kvk_attend_value_format(attend) == KVK_FORMAT_BF16) {
        for (size_t i = 0; i < rows->value_stride; i += PAIR_VALUES) {
            lanes low = lanes_load(values + i);
            lanes high = lanes_load(values + i + LANES);
            lanes_store(values + i, values_order(low, high, 0));
            lanes_store(values + i + LANES, values_order(low, high, 1));
        }
    }
    kvk_attend_avx512.finish(attend, rows, row, output, lse);
}

const struct kvk_attend_kernel kvk_attend_avx512_bf16 = {
    .name = "avx512_bf16",
    .available = bf16_available,
    .packed_bytes = bf16_packed_bytes,
    .pack = bf16_pack,
    .score = bf16_score,
    .soften = bf16_soften,
    .weigh = bf16_weigh,
    .finish = bf16_finish,
};
