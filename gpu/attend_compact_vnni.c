/*
 * Attention over int8 for AVX512-VNNI: dot products of whole numbers, summed in 32 bits, two to
 * four times as many a step as in fp32. K and V stay as they are stored; what meets them is
 * rounded, and the sums are scaled back:
 *
 *     queries   to 16 bits of the largest: int8_32 once, int8_channel for each block anew, since
 *               a block's channel scales are in them
 *     weights   to 8 bits of the largest of a tile, times their tokens' scales (int8_32: a
 * group's); so scales that are negative, which no scale is, would count as 0
 *
 * fp8 has a way of its own (gpu/attend_compact_fp8.c), or that of plain AVX-512, as has all that is
 * not of K and V.
 */
#include "gpu/attend_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

#include "gpu/attend_lanes_avx512.inc"
#include "gpu/compact_lanes_avx512.inc"

#define INLINE static inline __attribute__((always_inline))

/* Rows are worked on four, two and one at a time. */
#define BLOCK_ROWS_MAX 4

/* Values of a vector in 16 bits; a group of int8_32 is as many. */
#define STEP_VALUES 32U
_Static_assert(STEP_VALUES == KVK_INT8_32_VALUES, "a group is a vector");
_Static_assert(KVK_ATTEND_PAD_VALUES % STEP_VALUES == 0, "rows are whole vectors");

/* What the largest becomes in 16 bits. Lanes of sums then never overflow: at most
 * KVK_HEAD_SIZE_MAX / 16 products of 2^7 x 2^15 meet in one. */
#define WHOLE_LARGEST 32767.0F
#define WEIGHT_LARGEST 255.0F
#define WHOLE_HEAD_MAX 256 /* up to here a whole dot product does not overflow either */
_Static_assert(WHOLE_HEAD_MAX *(INT64_C(1) << 7) * (1 << 15) < INT32_MAX, "dots fit 32 bits");
_Static_assert(KVK_HEAD_SIZE_MAX / 16 < 1 << 9, "sums fit 32 bits");

/* A packed query: what a step is, in 64 bytes; then [pad(head_size_k)] steps: in 16 bits (int8_32),
 * or unrounded in fp32, as two vectors that _mm512_packs_epi32() brings into order (int8_channel).
 */
#define HEADER_BYTES 64

static bool vnni_available(void)
{
    return kvk_attend_avx512.available() && __builtin_cpu_supports("avx512vnni");
}

static bool is_whole(enum kvk_format format)
{
    return format == KVK_FORMAT_INT8_CHANNEL || format == KVK_FORMAT_INT8_32;
}

/* Where fp8 goes. */
static const struct kvk_attend_kernel *other(void)
{
    return kvk_attend_compact_fp8.available() ? &kvk_attend_compact_fp8
                                              : &kvk_attend_compact_avx512;
}

/* ---- Whole numbers ---- */

/* What to multiply with so that `largest` becomes `whole`, and back. A NaN stays one. */
struct whole_scale {
    float there;
    float back;
};

static struct whole_scale whole_scale_of(float largest, float whole)
{
    if (largest == 0) {
        return (struct whole_scale){0, 0};
    }
    /* By division both ways, since a subnormal has no finite inverse. */
    return (struct whole_scale){whole / largest, largest / whole};
}

/* Two vectors of floats, rounded to 16 bits, in their order. */
INLINE __m512i whole_pack(lanes low, lanes high)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i packed = _mm512_packs_epi32(_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high));

    return _mm512_permutexvar_epi64(order, packed);
}

/* STEP_VALUES stored values; `count` of them are there, the others are 0 and not read. */
INLINE __m256i bytes_load(const uint8_t *bytes, size_t count)
{
    if (count < STEP_VALUES) {
        return _mm256_maskz_loadu_epi8((__mmask32)((UINT64_C(1) << count) - 1), bytes);
    }
    return _mm256_loadu_si256((const __m256i *)(const void *)bytes);
}

INLINE size_t step_count(size_t head_size, size_t index)
{
    return head_size - index < STEP_VALUES ? head_size - index : STEP_VALUES;
}

/* ---- Queries ---- */

static size_t vnni_packed_bytes(const struct kvk_attend *attend)
{
    size_t values = kvk_attend_pad(attend->head_size_k);

    if (attend->format_k == KVK_FORMAT_INT8_32) {
        return HEADER_BYTES + values * sizeof(int16_t);
    }
    if (!is_whole(attend->format_k)) {
        return other()->packed_bytes(attend);
    }
    return HEADER_BYTES + kvk_attend_compact_avx512.packed_bytes(attend);
}

/* Every other four of STEP_VALUES values, then those between. */
INLINE void channel_pack(const float *wide, float there, uint8_t *packed)
{
    lanes a = lanes_load(wide) * lanes_set(there);
    lanes b = lanes_load(wide + LANES) * lanes_set(there);

    _mm512_store_ps(packed, _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0)));
    _mm512_store_ps(packed + 64, _mm512_shuffle_f32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
}

static void vnni_pack(const struct kvk_attend *attend, const uint8_t *query, uint8_t *packed)
{
    size_t values = kvk_attend_pad(attend->head_size_k);
    _Alignas(64) float wide[KVK_HEAD_SIZE_MAX];
    lanes largest = lanes_set(0);

    if (!is_whole(attend->format_k)) {
        other()->pack(attend, query, packed);
        return;
    }
    kvk_attend_compact_avx512.pack(attend, query, (uint8_t *)wide);
    for (size_t i = 0; i < values; i += LANES) {
        largest = lanes_larger(largest, lanes_load(wide + i));
    }
    float most = lanes_largest_of(largest);
    struct whole_scale scale = whole_scale_of(most, WHOLE_LARGEST);
    memcpy(packed, &scale.back, sizeof(scale.back));
    for (size_t i = 0; i < values; i += STEP_VALUES) {
        if (attend->format_k == KVK_FORMAT_INT8_CHANNEL) {
            channel_pack(wide + i, scale.there, packed + HEADER_BYTES + i * sizeof(float));
            continue;
        }
        __m512i whole = whole_pack(lanes_load(wide + i) * lanes_set(scale.there),
                                   lanes_load(wide + i + LANES) * lanes_set(scale.there));
        _mm512_store_si512(packed + HEADER_BYTES + i * sizeof(int16_t), whole);
    }
}

INLINE float header_of(const uint8_t *packed)
{
    float header;

    memcpy(&header, packed, sizeof(header));
    return header;
}

/* ---- Scores ---- */

INLINE __m512i whole_fold32(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}

INLINE __m512i whole_fold64(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

INLINE __m512i whole_fold128(__m512i a, __m512i b)
{
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, _MM_SHUFFLE(2, 0, 2, 0)),
                            _mm512_shuffle_i32x4(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
}

/* Lane i = the sum of vector i, as lanes_reduce() has it. */
INLINE __m512i whole_reduce(const __m512i *x)
{
    __m512i quads[4];

#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        quads[i] = whole_fold64(whole_fold32(x[4 * i], x[4 * i + 1]),
                                whole_fold32(x[4 * i + 2], x[4 * i + 3]));
    }
    return whole_fold128(whole_fold128(quads[0], quads[1]), whole_fold128(quads[2], quads[3]));
}

/* STEP_VALUES values, from `i` on, of a cell of int8_channel; `count` of them are there. */
INLINE void channel_step(const int16_t *const *q, uint32_t row_count, const uint8_t *const *k,
                         uint32_t token_count, size_t i, size_t count, __m512i *sums)
{
    __m512i rows[BLOCK_ROWS_MAX];

#pragma GCC unroll 4
    for (uint32_t row = 0; row < row_count; row++) {
        rows[row] = _mm512_load_si512(q[row] + i);
    }
#pragma GCC unroll 16
    for (uint32_t token = 0; token < token_count; token++) {
        __m512i values = _mm512_cvtepi8_epi16(bytes_load(k[token] + i, count));
#pragma GCC unroll 4
        for (uint32_t row = 0; row < row_count; row++) {
            uint32_t cell = row * token_count + token;
            sums[cell] = _mm512_dpwssd_epi32(sums[cell], values, rows[row]);
        }
    }
}

/* LANES dot products, `row_count` rows by LANES / row_count tokens. */
INLINE void channel_cell(size_t head_size, const int16_t *const *q, uint32_t row_count,
                         const uint8_t *const *k, struct kvk_attend_fetch *fetch,
                         uint32_t fetch_lines, float *results)
{
    const uint32_t token_count = LANES / row_count;
    __m512i sums[LANES];
    size_t i = 0;

#pragma GCC unroll 16
    for (uint32_t cell = 0; cell < LANES; cell++) {
        sums[cell] = _mm512_setzero_si512();
    }
    for (; i + STEP_VALUES <= head_size; i += STEP_VALUES) {
        channel_step(q, row_count, k, token_count, i, STEP_VALUES, sums);
        kvk_attend_fetch_lines(fetch, fetch_lines);
    }
    if (i < head_size) {
        channel_step(q, row_count, k, token_count, i, head_size - i, sums);
    }
    if (head_size <= WHOLE_HEAD_MAX) {
        lanes_store(results, _mm512_cvtepi32_ps(whole_reduce(sums)));
        return;
    }
    lanes wide[LANES];
#pragma GCC unroll 16
    for (uint32_t cell = 0; cell < LANES; cell++) {
        wide[cell] = _mm512_cvtepi32_ps(sums[cell]);
    }
    lanes_store(results, lanes_reduce(wide));
}

/* The same of int8_32, with the groups' scales in it. */
INLINE void group_cell(size_t head_size, const int16_t *const *q, uint32_t row_count,
                       const uint8_t *const *k, struct kvk_attend_fetch *fetch,
                       uint32_t fetch_lines, float *results)
{
    const uint32_t token_count = LANES / row_count;
    lanes sums[LANES];

#pragma GCC unroll 16
    for (uint32_t cell = 0; cell < LANES; cell++) {
        sums[cell] = lanes_set(0);
    }
    for (size_t i = 0; i < head_size; i += STEP_VALUES) {
        __m512i rows[BLOCK_ROWS_MAX];
#pragma GCC unroll 4
        for (uint32_t row = 0; row < row_count; row++) {
            rows[row] = _mm512_load_si512(q[row] + i);
        }
#pragma GCC unroll 16
        for (uint32_t token = 0; token < token_count; token++) {
            const uint8_t *group = k[token] + i / STEP_VALUES * KVK_INT8_32_BYTES;
            __m512i values = _mm512_cvtepi8_epi16(bytes_load(group + 2, STEP_VALUES));
            uint16_t half;
            memcpy(&half, group, sizeof(half));
            lanes scale = _mm512_cvtph_ps(_mm256_set1_epi16((int16_t)half));
#pragma GCC unroll 4
            for (uint32_t row = 0; row < row_count; row++) {
                uint32_t cell = row * token_count + token;
                lanes dots = _mm512_cvtepi32_ps(_mm512_madd_epi16(values, rows[row]));
                sums[cell] = lanes_fma(dots, scale, sums[cell]);
            }
        }
        kvk_attend_fetch_lines(fetch, fetch_lines);
    }
    lanes_store(results, lanes_reduce(sums));
}

/* Tokens from `first` to `end` with `row_count` rows; `back` makes a logit of a row's products. */
INLINE void score_block(enum kvk_format format, const struct kvk_attend *attend,
                        const int16_t *const *q, const float *back, uint32_t row_count,
                        const struct kvk_attend_tokens *tokens, uint32_t first, uint32_t end,
                        struct kvk_attend_fetch *fetch, uint32_t fetch_lines, float *scores)
{
    const uint32_t step = LANES / row_count;

    for (uint32_t token = first; token < end; token += step) {
        const uint8_t *k[LANES];
        float results[LANES];
        uint32_t count = end - token < step ? end - token : step;
        kvk_attend_keys_find(tokens, token, end, step, k);
        if (format == KVK_FORMAT_INT8_CHANNEL) {
            channel_cell(attend->head_size_k, q, row_count, k, fetch, fetch_lines, results);
        } else {
            group_cell(attend->head_size_k, q, row_count, k, fetch, fetch_lines, results);
        }
        for (uint32_t row = 0; row < row_count; row++) {
            float *to = scores + row * KVK_ATTEND_TILE_TOKENS + token;
            if (count == step && step == 4) {
                _mm_storeu_ps(to, _mm_loadu_ps(results + row * step) * _mm_set1_ps(back[row]));
                continue;
            }
            for (uint32_t i = 0; i < count; i++) {
                to[i] = results[row * step + i] * back[row];
            }
        }
    }
}

/* The largest of a block's channel scales. */
static float channels_largest(const uint8_t *scales, size_t head_size)
{
    const __m512i magnitude = _mm512_set1_epi16(0x7fff);
    __m512i largest = _mm512_setzero_si512();

    for (size_t i = 0; i < head_size; i += STEP_VALUES) {
        __mmask32 mask = (__mmask32)((UINT64_C(1) << step_count(head_size, i)) - 1);
        __m512i some = _mm512_maskz_loadu_epi16(mask, scales + 2 * i);
        largest = _mm512_max_epu16(largest, _mm512_and_si512(some, magnitude));
    }
    uint32_t bits = (uint32_t)halves_largest_of(_mm256_max_epu16(
                        _mm512_castsi512_si256(largest), _mm512_extracti64x4_epi64(largest, 1)))
                    << 16;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

/* [row][pad(head_size)]: close together, so that no two rows look alike to a processor that
 * compares the low bits of addresses. */
struct whole_rows {
    _Alignas(64) int16_t values[BLOCK_ROWS_MAX * KVK_HEAD_SIZE_MAX];
};

/* Queries with the scales of a block's channels, as whole numbers: the largest scale is one. */
INLINE void rows_scale(const struct kvk_attend_rows *rows, uint32_t row, uint32_t row_count,
                       const uint8_t *scales, float largest, size_t head_size,
                       struct whole_rows *whole, float *back)
{
    /* Past half the range of exponents a share of the largest is no number, or not to be seen. */
    lanes share = lanes_set(largest > 0 ? 1 / largest : largest);
    size_t stride = kvk_attend_pad(head_size);

    for (size_t i = 0; i < head_size; i += STEP_VALUES) {
        __mmask32 mask = (__mmask32)((UINT64_C(1) << step_count(head_size, i)) - 1);
        __m512i some = _mm512_maskz_loadu_epi16(mask, scales + 2 * i);
        __m512i zero = _mm512_setzero_si512();
        lanes low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, some)) * share;
        lanes high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, some)) * share;
#pragma GCC unroll 4
        for (uint32_t r = 0; r < row_count; r++) {
            const uint8_t *q = kvk_attend_row(rows, row + r) + HEADER_BYTES + i * sizeof(float);
            __m512i a = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(q), low));
            __m512i b = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(q + 64), high));
            _mm512_store_si512(whole->values + r * stride + i, _mm512_packs_epi32(a, b));
        }
    }
    for (uint32_t r = 0; r < row_count; r++) {
        back[r] = header_of(kvk_attend_row(rows, row + r)) * largest;
    }
}

/* All tokens with `row_count` rows from `row` on. */
INLINE void score_rows(enum kvk_format format, const struct kvk_attend *attend,
                       const struct kvk_attend_rows *rows, uint32_t row, uint32_t row_count,
                       const struct kvk_attend_tokens *tokens, const float *largest,
                       struct kvk_attend_fetch *fetch, uint32_t fetch_lines, float *scores)
{
    const int16_t *q[BLOCK_ROWS_MAX];
    float back[BLOCK_ROWS_MAX];
    struct whole_rows whole;

    scores += row * KVK_ATTEND_TILE_TOKENS;
    for (uint32_t i = 0; i < row_count; i++) {
        q[i] = whole.values + i * kvk_attend_pad(attend->head_size_k);
        if (format == KVK_FORMAT_INT8_32) {
            const uint8_t *packed = kvk_attend_row(rows, row + i);
            q[i] = (const int16_t *)(const void *)(packed + HEADER_BYTES);
            back[i] = header_of(packed);
        }
    }
    for (uint32_t first = 0; first < tokens->count;) {
        uint32_t end = tokens->count;
        if (format == KVK_FORMAT_INT8_CHANNEL) {
            end = kvk_attend_block_end(tokens, first);
            rows_scale(rows, row, row_count, tokens->pages[first] + tokens->k_scales,
                       largest[first], attend->head_size_k, &whole, back);
        }
        score_block(format, attend, q, back, row_count, tokens, first, end, fetch, fetch_lines,
                    scores);
        first = end;
    }
}

INLINE void score_format(enum kvk_format format, const struct kvk_attend *attend,
                         const struct kvk_attend_rows *rows, const struct kvk_attend_tokens *tokens,
                         struct kvk_attend_fetch *fetch, float *scores)
{
    size_t steps = kvk_attend_steps(tokens->count, LANES) * rows->count *
                   kvk_attend_steps(attend->head_size_k, STEP_VALUES);
    uint32_t fetch_lines = (uint32_t)kvk_attend_steps(fetch->line_count, steps);
    float largest[KVK_ATTEND_TILE_TOKENS]; /* at the first token of each block */
    uint32_t row = 0;

    if (format == KVK_FORMAT_INT8_CHANNEL) {
        for (uint32_t first = 0; first < tokens->count;
             first = kvk_attend_block_end(tokens, first)) {
            largest[first] =
                channels_largest(tokens->pages[first] + tokens->k_scales, attend->head_size_k);
        }
    }
    for (; row + 4 <= rows->count; row += 4) {
        score_rows(format, attend, rows, row, 4, tokens, largest, fetch, fetch_lines, scores);
    }
    if (row + 2 <= rows->count) {
        score_rows(format, attend, rows, row, 2, tokens, largest, fetch, fetch_lines, scores);
        row += 2;
    }
    if (row < rows->count) {
        score_rows(format, attend, rows, row, 1, tokens, largest, fetch, fetch_lines, scores);
    }
}

static void vnni_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                       float *scores)
{
    if (attend->format_k == KVK_FORMAT_INT8_CHANNEL) {
        score_format(KVK_FORMAT_INT8_CHANNEL, attend, rows, tokens, fetch, scores);
    } else if (attend->format_k == KVK_FORMAT_INT8_32) {
        score_format(KVK_FORMAT_INT8_32, attend, rows, tokens, fetch, scores);
    } else {
        other()->score(attend, rows, tokens, fetch, scores);
    }
}

static void vnni_soften(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t token_count, float *scores)
{
    kvk_attend_avx512.soften(attend, rows, token_count, scores);
}

/* ---- Values ---- */

/* Weights in 8 bits without a sign, and what one of them is. */
struct whole_weights {
    _Alignas(64) uint8_t values[KVK_ATTEND_ROWS_MAX][KVK_ATTEND_TILE_TOKENS];
    float back[KVK_ATTEND_ROWS_MAX];
};

/* Weights, that are 0 past the tile's end, times the scales of their tokens. */
static void weights_make(const struct kvk_attend_rows *rows, const float *scales,
                         uint32_t token_count, const float *weights, struct whole_weights *whole)
{
    uint32_t padded = (uint32_t)kvk_attend_pad(token_count);

    for (uint32_t row = 0; row < rows->count; row++) {
        const float *from = weights + row * KVK_ATTEND_TILE_TOKENS;
        lanes scaled[KVK_ATTEND_TILE_TOKENS / LANES];
        lanes largest = lanes_set(0);
        for (uint32_t i = 0; i < padded; i += LANES) {
            scaled[i / LANES] = lanes_load(from + i) * lanes_load(scales + i);
            largest = lanes_larger(largest, scaled[i / LANES]);
        }
        struct whole_scale scale = whole_scale_of(lanes_largest_of(largest), WEIGHT_LARGEST);
        for (uint32_t i = 0; i < padded; i += LANES) {
            __m512i wide = _mm512_cvtps_epi32(scaled[i / LANES] * lanes_set(scale.there));
            _mm_store_si128((__m128i *)(void *)(whole->values[row] + i),
                            _mm512_cvtusepi32_epi8(wide));
        }
        whole->back[row] = scale.back;
    }
}

/* Four tokens' values, side by side: every four of STEP_VALUES in a lane of 128 bits. */
INLINE void quads_load(const struct kvk_attend_tokens *tokens, uint32_t token, size_t v_offset,
                       size_t count, __m256i *quads)
{
    __m256i v[4];

    /* Past the end the last token stands in, under a weight of 0. */
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        uint32_t present = token + i < tokens->count ? token + i : tokens->count - 1;
        v[i] = bytes_load(tokens->v[present] + v_offset, count);
    }
    __m256i low = _mm256_unpacklo_epi8(v[0], v[1]);
    __m256i high = _mm256_unpackhi_epi8(v[0], v[1]);
    __m256i other_low = _mm256_unpacklo_epi8(v[2], v[3]);
    __m256i other_high = _mm256_unpackhi_epi8(v[2], v[3]);
    quads[0] = _mm256_unpacklo_epi16(low, other_low);   /* 0 to 3, 16 to 19 */
    quads[1] = _mm256_unpackhi_epi16(low, other_low);   /* 4 to 7, 20 to 23 */
    quads[2] = _mm256_unpacklo_epi16(high, other_high); /* and so on */
    quads[3] = _mm256_unpackhi_epi16(high, other_high);
}

/* values += sums x back, in their order. */
INLINE void quads_add(const __m256i *sums, float back, float *values)
{
    const __m256i ordered[4] = {
        _mm256_permute2x128_si256(sums[0], sums[1], 0x20),
        _mm256_permute2x128_si256(sums[2], sums[3], 0x20),
        _mm256_permute2x128_si256(sums[0], sums[1], 0x31),
        _mm256_permute2x128_si256(sums[2], sums[3], 0x31),
    };

#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        __m256 old = _mm256_loadu_ps(values + i * 8);
        _mm256_storeu_ps(values + i * 8,
                         _mm256_cvtepi32_ps(ordered[i]) * _mm256_set1_ps(back) + old);
    }
}

/* Add weight x V of all tokens to STEP_VALUES values of `row_count` rows: `count` of them are
 * there, `v_offset` bytes past the tokens' pointers. */
INLINE void weigh_cell(const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                       uint32_t fetch_lines, size_t v_offset, size_t count,
                       const struct whole_weights *weights, uint32_t first_row, uint32_t row_count,
                       float *const *values)
{
    __m256i sums[4 * BLOCK_ROWS_MAX];

#pragma GCC unroll 16
    for (uint32_t i = 0; i < 4 * row_count; i++) {
        sums[i] = _mm256_setzero_si256();
    }
    for (uint32_t token = 0; token < tokens->count; token += 4) {
        __m256i quads[4];
        quads_load(tokens, token, v_offset, count, quads);
#pragma GCC unroll 4
        for (uint32_t row = 0; row < row_count; row++) {
            int32_t quad;
            memcpy(&quad, &weights->values[first_row + row][token], sizeof(quad));
            __m256i weight = _mm256_set1_epi32(quad);
#pragma GCC unroll 4
            for (uint32_t i = 0; i < 4; i++) {
                sums[4 * row + i] = _mm256_dpbusd_epi32(sums[4 * row + i], weight, quads[i]);
            }
        }
        kvk_attend_fetch_lines(fetch, fetch_lines);
    }
#pragma GCC unroll 4
    for (uint32_t row = 0; row < row_count; row++) {
        quads_add(&sums[4 * row], weights->back[first_row + row], values[row]);
    }
}

/* STEP_VALUES values from `index` on, of all rows; `count` of them are there. */
INLINE void weigh_step(const struct kvk_attend_rows *rows, const struct kvk_attend_tokens *tokens,
                       struct kvk_attend_fetch *fetch, uint32_t fetch_lines, size_t index,
                       size_t v_offset, size_t count, const struct whole_weights *weights)
{
    float *values[BLOCK_ROWS_MAX];
    uint32_t row = 0;

    while (row < rows->count) {
        uint32_t left = rows->count - row;
        uint32_t row_count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        for (uint32_t i = 0; i < row_count; i++) {
            values[i] = rows->values + (row + i) * rows->value_stride + index;
        }
        if (row_count == 4) {
            weigh_cell(tokens, fetch, fetch_lines, v_offset, count, weights, row, 4, values);
        } else if (row_count == 2) {
            weigh_cell(tokens, fetch, fetch_lines, v_offset, count, weights, row, 2, values);
        } else {
            weigh_cell(tokens, fetch, fetch_lines, v_offset, count, weights, row, 1, values);
        }
        row += row_count;
    }
}

/* The scale of each token: of its own (int8_channel), or of one group of its values. */
static void token_scales(enum kvk_format format, const struct kvk_attend_tokens *tokens,
                         size_t group, float *scales)
{
    _Alignas(64) uint16_t halves_of[KVK_ATTEND_TILE_TOKENS] = {0};

    for (uint32_t token = 0; token < tokens->count; token++) {
        const uint8_t *at =
            format == KVK_FORMAT_INT8_32
                ? tokens->v[token] + tokens->v_offset + group * KVK_INT8_32_BYTES
                : tokens->pages[token] + tokens->v_scales + (size_t)2 * tokens->slots[token];
        memcpy(&halves_of[token], at, sizeof(*halves_of));
    }
    enum kvk_format half_format = format == KVK_FORMAT_INT8_32 ? KVK_FORMAT_FP16 : KVK_FORMAT_BF16;
    for (uint32_t i = 0; i < KVK_ATTEND_TILE_TOKENS; i += LANES) {
        lanes_store(scales + i,
                    lanes_widen(half_format, (const uint8_t *)halves_of + i * sizeof(*halves_of)));
    }
}

static void vnni_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                       const float *weights)
{
    enum kvk_format format = kvk_attend_value_format(attend);
    size_t head_size = attend->head_size_v;
    size_t steps = kvk_attend_steps(tokens->count, 4) * kvk_attend_steps(rows->count, 4) *
                   kvk_attend_steps(head_size, STEP_VALUES);
    uint32_t fetch_lines = (uint32_t)kvk_attend_steps(fetch->line_count, steps);
    float scales[KVK_ATTEND_TILE_TOKENS];
    struct whole_weights whole;

    if (!is_whole(format)) {
        other()->weigh(attend, rows, tokens, fetch, weights);
        return;
    }
    for (size_t i = 0; i < head_size; i += STEP_VALUES) {
        size_t v_offset = tokens->v_offset + i;
        if (format == KVK_FORMAT_INT8_32) {
            v_offset = tokens->v_offset + i / STEP_VALUES * KVK_INT8_32_BYTES + 2;
        }
        if (format == KVK_FORMAT_INT8_32 || i == 0) {
            token_scales(format, tokens, i / STEP_VALUES, scales);
            weights_make(rows, scales, tokens->count, weights, &whole);
        }
        if (i + STEP_VALUES <= head_size) {
            weigh_step(rows, tokens, fetch, fetch_lines, i, v_offset, STEP_VALUES, &whole);
        } else {
            weigh_step(rows, tokens, fetch, fetch_lines, i, v_offset, head_size - i, &whole);
        }
    }
}

static void vnni_finish(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t row, float *output, float *lse)
{
    if (is_whole(attend->format_k)) {
        kvk_attend_avx512.finish(attend, rows, row, output, lse);
    } else {
        other()->finish(attend, rows, row, output, lse);
    }
}

const struct kvk_attend_kernel kvk_attend_compact_vnni = {
    .name = "avx512_bf16",
    .available = vnni_available,
    .compact = &kvk_attend_compact_avx512,
    .packed_bytes = vnni_packed_bytes,
    .pack = vnni_pack,
    .score = vnni_score,
    .soften = vnni_soften,
    .weigh = vnni_weigh,
    .finish = vnni_finish,
};
