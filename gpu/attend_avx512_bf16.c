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
                       uint32_t parts, const uint8_t *const *k, struct kvk_attend_fetch *fetch,
                       uint32_t fetch_lines, float *scores)
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
            kvk_attend_fetch_lines(fetch, fetch_lines);
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

/* LANES tokens with `row_count` rows from `row` on. */
INLINE void score_block(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t row, uint32_t row_count, uint32_t parts, const uint8_t *const *k,
                        struct kvk_attend_fetch *fetch, uint32_t fetch_lines, float *scores)
{
    const uint32_t step = LANES / row_count;
    const uint8_t *q[BLOCK_ROWS_MAX];

    for (uint32_t i = 0; i < row_count; i++) {
        q[i] = kvk_attend_row(rows, row + i);
    }
    for (uint32_t token = 0; token < LANES; token += step) {
        score_cell(attend->head_size_k, q, row_count, parts, k + token, fetch, fetch_lines,
                   scores + row * KVK_ATTEND_TILE_TOKENS + token);
    }
}

/* ---- Scores of many rows: one row to a lane, so that nothing is summed across lanes ---- */

/* Heads up to this size, which bounds what lies on the stack. */
#define WIDE_HEAD_SIZE_MAX 640

/* Tokens whose sums are in registers at once. */
#define WIDE_TOKENS 8

/* Pairs of values of LANES rows. */
struct wide_rows {
    _Alignas(64) uint32_t pairs[WIDE_HEAD_SIZE_MAX * LANES]; /* [part][pair][row] */
};

INLINE void wide_rows_init(const struct kvk_attend_rows *rows, uint32_t row, struct wide_rows *wide)
{
    size_t pair_count = rows->query_stride_bytes / sizeof(uint32_t);

    for (size_t i = 0; i < pair_count; i += LANES) {
        lanes square[LANES];
#pragma GCC unroll 16
        for (uint32_t lane = 0; lane < LANES; lane++) {
            const uint8_t *query = kvk_attend_row(rows, row + lane);
            square[lane] = _mm512_load_ps(query + i * sizeof(uint32_t));
        }
        lanes_transpose(square);
#pragma GCC unroll 16
        for (uint32_t lane = 0; lane < LANES; lane++) {
            _mm512_store_ps(wide->pairs + (i + lane) * LANES, square[lane]);
        }
    }
}

INLINE __m512bh pair_everywhere(const uint8_t *bytes, size_t size_bytes)
{
    uint32_t pair = 0;

    memcpy(&pair, bytes, size_bytes);
    return (__m512bh)_mm512_set1_epi32((int)pair);
}

/* LANES rows with WIDE_TOKENS tokens. A lone last value is paired with a 0. */
INLINE void wide_cell(const struct wide_rows *wide, size_t head_size, uint32_t parts,
                      const uint8_t *const *k, struct kvk_attend_fetch *fetch, uint32_t fetch_lines,
                      lanes *sums)
{
    const uint32_t *pairs = wide->pairs;
    size_t part_pairs = kvk_attend_pad(head_size) / 2;

#pragma GCC unroll 8
    for (uint32_t token = 0; token < WIDE_TOKENS; token++) {
        sums[token] = lanes_set(0);
    }
    for (uint32_t part = 0; part < parts; part++) {
        size_t i = 0;
        while (i + 2 <= head_size) {
            size_t end = i + 2 * (size_t)LANES;
            end = end < head_size ? end : head_size;
            for (; i + 2 <= end; i += 2) {
                __m512bh q = (__m512bh)_mm512_load_si512(pairs + i / 2 * LANES);
#pragma GCC unroll 8
                for (uint32_t token = 0; token < WIDE_TOKENS; token++) {
                    __m512bh values = pair_everywhere(k[token] + i * 2, sizeof(uint32_t));
                    sums[token] = _mm512_dpbf16_ps(sums[token], q, values);
                }
            }
            kvk_attend_fetch_lines(fetch, fetch_lines);
        }
        if (i < head_size) {
            __m512bh q = (__m512bh)_mm512_load_si512(pairs + i / 2 * LANES);
#pragma GCC unroll 8
            for (uint32_t token = 0; token < WIDE_TOKENS; token++) {
                __m512bh values = pair_everywhere(k[token] + i * 2, sizeof(uint16_t));
                sums[token] = _mm512_dpbf16_ps(sums[token], q, values);
            }
        }
        pairs += part_pairs * LANES;
    }
}

/* All tokens with LANES rows from `row` on. */
INLINE void score_wide(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       uint32_t row, uint32_t parts, const struct kvk_attend_tokens *tokens,
                       struct kvk_attend_fetch *fetch, uint32_t fetch_lines, float *scores)
{
    struct wide_rows wide;

    wide_rows_init(rows, row, &wide);
    for (uint32_t token = 0; token < tokens->count; token += LANES) {
        lanes sums[LANES];
#pragma GCC unroll 2
        for (uint32_t first = 0; first < LANES; first += WIDE_TOKENS) {
            const uint8_t *k[WIDE_TOKENS];
            kvk_attend_keys_find(tokens, token + first, tokens->count, WIDE_TOKENS, k);
            wide_cell(&wide, attend->head_size_k, parts, k, fetch, fetch_lines, sums + first);
        }
        lanes_transpose(sums);
#pragma GCC unroll 16
        for (uint32_t i = 0; i < LANES; i++) {
            lanes_store(scores + (row + i) * KVK_ATTEND_TILE_TOKENS + token, sums[i]);
        }
    }
}

INLINE void score_parts(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t parts, const struct kvk_attend_tokens *tokens,
                        struct kvk_attend_fetch *fetch, float *scores)
{
    size_t steps = kvk_attend_steps(tokens->count, LANES) * rows->count *
                   kvk_attend_steps(attend->head_size_k, PAIR_VALUES);
    uint32_t fetch_lines = (uint32_t)kvk_attend_steps(fetch->line_count, steps);
    uint32_t first_row = 0;

    if (rows->query_stride_bytes <= WIDE_HEAD_SIZE_MAX * sizeof(uint32_t)) {
        for (; first_row + LANES <= rows->count; first_row += LANES) {
            score_wide(attend, rows, first_row, parts, tokens, fetch, 8 * fetch_lines, scores);
        }
    }
    if (first_row == rows->count) {
        return;
    }
    for (uint32_t token = 0; token < tokens->count; token += LANES) {
        const uint8_t *k[LANES];
        uint32_t row = first_row;
        kvk_attend_keys_find(tokens, token, tokens->count, LANES, k);
        for (; row + 4 <= rows->count; row += 4) {
            score_block(attend, rows, row, 4, parts, k, fetch, fetch_lines, scores + token);
        }
        if (row + 2 <= rows->count) {
            score_block(attend, rows, row, 2, parts, k, fetch, fetch_lines, scores + token);
            row += 2;
        }
        if (row < rows->count) {
            score_block(attend, rows, row, 1, parts, k, fetch, fetch_lines, scores + token);
        }
    }
}

static void bf16_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                       float *scores)
{
    if (attend->format_k != KVK_FORMAT_BF16) {
        kvk_attend_avx512.score(attend, rows, tokens, fetch, scores);
    } else if (part_count(attend) == 1) {
        score_parts(attend, rows, 1, tokens, fetch, scores);
    } else {
        score_parts(attend, rows, 2, tokens, fetch, scores);
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
INLINE void weigh_cell(const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                       uint32_t fetch_lines, size_t first_value, const uint32_t *const *pairs,
                       float *const *values, uint32_t row_count, uint32_t vector_count, size_t some)
{
    const uint32_t half_count = 2 * vector_count; /* vectors of LANES sums */
    size_t v_offset = tokens->v_offset + first_value * 2;
    lanes sums[BLOCK_ROWS_MAX * 4];

#pragma GCC unroll 16
    for (uint32_t cell = 0; cell < row_count * half_count; cell++) {
        sums[cell] =
            lanes_load(values[cell / half_count] + first_value + cell % half_count * LANES);
    }
    for (uint32_t token = 0; token < tokens->count; token += 2) {
        /* A lone last token is paired with itself, under a weight of 0. */
        uint32_t other = token + 1 < tokens->count ? token + 1 : token;
        const uint8_t *v0 = tokens->v[token] + v_offset;
        const uint8_t *v1 = tokens->v[other] + v_offset;
#pragma GCC unroll 4
        for (uint32_t vector = 0; vector < vector_count; vector++) {
            size_t offset = vector * PAIR_VALUES * 2;
            __m512i a = (__m512i)(some > 0 ? load_some(v0, some) : load(v0 + offset));
            __m512i b = (__m512i)(some > 0 ? load_some(v1, some) : load(v1 + offset));
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
        kvk_attend_fetch_lines(fetch, fetch_lines);
    }
#pragma GCC unroll 16
    for (uint32_t cell = 0; cell < row_count * half_count; cell++) {
        lanes_store(values[cell / half_count] + first_value + cell % half_count * LANES,
                    sums[cell]);
    }
}

/* `row_count` rows from `row` on, values from `first_value` on. */
INLINE void weigh_block(const struct kvk_attend_rows *rows, uint32_t row, uint32_t row_count,
                        size_t first_value, uint32_t vector_count, size_t some,
                        const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                        uint32_t fetch_lines, const struct weight_pairs *weights)
{
    const uint32_t *pairs[BLOCK_ROWS_MAX];
    float *values[BLOCK_ROWS_MAX];

    for (uint32_t i = 0; i < row_count; i++) {
        pairs[i] = weights->pairs[row + i];
        values[i] = rows->values + (row + i) * rows->value_stride;
    }
    weigh_cell(tokens, fetch, fetch_lines, first_value, pairs, values, row_count, vector_count,
               some);
}

INLINE void weigh_columns(const struct kvk_attend_rows *rows, size_t first_value,
                          uint32_t vector_count, size_t some,
                          const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                          uint32_t fetch_lines, const struct weight_pairs *weights)
{
    uint32_t row = 0;

    for (; row + 4 <= rows->count; row += 4) {
        weigh_block(rows, row, 4, first_value, vector_count, some, tokens, fetch, fetch_lines,
                    weights);
    }
    if (row + 2 <= rows->count) {
        weigh_block(rows, row, 2, first_value, vector_count, some, tokens, fetch, fetch_lines,
                    weights);
        row += 2;
    }
    if (row < rows->count) {
        weigh_block(rows, row, 1, first_value, vector_count, some, tokens, fetch, fetch_lines,
                    weights);
    }
}

static void bf16_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                       const float *weights)
{
    struct weight_pairs pairs;
    size_t head_size = attend->head_size_v;
    size_t steps = kvk_attend_steps(tokens->count, 2) * kvk_attend_steps(rows->count, 4) *
                   kvk_attend_steps(head_size, 2 * PAIR_VALUES);
    uint32_t fetch_lines = (uint32_t)kvk_attend_steps(fetch->line_count, steps);
    size_t i = 0;

    if (kvk_attend_value_format(attend) != KVK_FORMAT_BF16) {
        kvk_attend_avx512.weigh(attend, rows, tokens, fetch, weights);
        return;
    }
    pairs_make(rows, tokens->count, weights, &pairs);
    if (rows->count == 1) { /* four vectors of a lone row, so that its few sums are enough */
        for (; i + 4 * PAIR_VALUES <= head_size; i += 4 * PAIR_VALUES) {
            weigh_block(rows, 0, 1, i, 4, 0, tokens, fetch, 2 * fetch_lines, &pairs);
        }
    }
    for (; i + 2 * PAIR_VALUES <= head_size; i += 2 * PAIR_VALUES) {
        weigh_columns(rows, i, 2, 0, tokens, fetch, fetch_lines, &pairs);
    }
    for (; i + PAIR_VALUES <= head_size; i += PAIR_VALUES) {
        weigh_columns(rows, i, 1, 0, tokens, fetch, fetch_lines, &pairs);
    }
    if (i < head_size) {
        weigh_columns(rows, i, 1, head_size - i, tokens, fetch, fetch_lines, &pairs);
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
    /* In order now, as sums of fp32 are. */
    struct kvk_attend plain = *attend;
    plain.format_v = KVK_FORMAT_FP32;
    plain.latent = false;
    kvk_attend_avx512.finish(&plain, rows, row, output, lse);
}

const struct kvk_attend_kernel kvk_attend_avx512_bf16 = {
    .name = "avx512_bf16",
    .available = bf16_available,
    .compact = &kvk_attend_compact_vnni,
    .packed_bytes = bf16_packed_bytes,
    .pack = bf16_pack,
    .score = bf16_score,
    .soften = bf16_soften,
    .weigh = bf16_weigh,
    .finish = bf16_finish,
};
