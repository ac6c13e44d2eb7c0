/* Scores of attention over int8: gpu/attend_vnni.h. */
#include "gpu/attend_vnni.h"

#include <math.h>

#include "base/assert.h"

#include "gpu/attend_vnni.inc"

/* Lanes of sums never overflow: at most KVK_HEAD_SIZE_MAX / 16 products of 2^7 x 2^15 meet in
 * one. */
#define WHOLE_HEAD_MAX 256 /* up to here a whole dot product does not overflow either */
_Static_assert(WHOLE_HEAD_MAX *(INT64_C(1) << 7) * (1 << 15) < INT32_MAX, "dots fit 32 bits");
_Static_assert(KVK_HEAD_SIZE_MAX / 16 < 1 << 9, "sums fit 32 bits");

INLINE size_t step_count(size_t head_size, size_t index)
{
    return head_size - index < STEP_VALUES ? head_size - index : STEP_VALUES;
}

/* What a step of a row's query is, and the steps. */
INLINE float row_back(const struct kvk_attend_rows *rows, uint32_t row)
{
    float back;

    memcpy(&back, kvk_attend_row(rows, row), sizeof(back));
    return back;
}

INLINE const int16_t *row_steps(const struct kvk_attend_rows *rows, uint32_t row)
{
    return (const int16_t *)(const void *)(kvk_attend_row(rows, row) +
                                           KVK_ATTEND_VNNI_HEADER_BYTES);
}

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

/* ---- Channels' scales ---- */

/* The largest scale of a block's channels, and how large each is beside it in 15 bits. */
struct shares {
    _Alignas(64) int16_t values[KVK_HEAD_SIZE_MAX]; /* [pad(head_size)] */
    float back; /* what a step of a query is, multiplied by its share, beside the query's own */
};

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

static void shares_make(struct shares *shares, const uint8_t *scales, size_t head_size)
{
    const __m512i zero = _mm512_setzero_si512();
    float largest = channels_largest(scales, head_size);
    /* Past half the range of exponents a share of the largest is no number, or not to be seen. */
    lanes factor = lanes_set((largest > 0 ? 1 / largest : largest) * KVK_ATTEND_VNNI_LARGEST);

    for (size_t i = 0; i < head_size; i += STEP_VALUES) {
        __mmask32 mask = (__mmask32)((UINT64_C(1) << step_count(head_size, i)) - 1);
        __m512i some = _mm512_maskz_loadu_epi16(mask, scales + 2 * i);
        lanes low = _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, some)) * factor;
        lanes high = _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, some)) * factor;
        _mm512_store_si512(shares->values + i,
                           _mm512_packs_epi32(_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high)));
    }
    /* _mm512_mulhrs_epi16() divides by 2^15. */
    shares->back = largest * (32768.0F / KVK_ATTEND_VNNI_LARGEST);
}

/* ---- Scores of some rows at once: a row or two to 128 bits, so that no sum is folded for a token
 * alone ---- */

/* Queries of 4 or 8 rows: of each the same few values side by side, enough to fill a vector. */
INLINE void square_rows_pack(const struct kvk_attend_rows *rows, uint32_t row, uint32_t row_count,
                             size_t head_size, int16_t *packed)
{
    for (size_t i = 0; i < head_size; i += STEP_VALUES) {
        lanes x[8];
#pragma GCC unroll 8
        for (uint32_t r = 0; r < row_count; r++) {
            x[r] = _mm512_castsi512_ps(_mm512_load_si512(row_steps(rows, row + r) + i));
        }
        if (row_count == 8) {
#pragma GCC unroll 4
            for (uint32_t r = 0; r < 8; r += 2) {
                __m512d a = _mm512_castps_pd(x[r]);
                __m512d b = _mm512_castps_pd(x[r + 1]);
                x[r] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                x[r + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
            lanes_transpose_quarters(x, 2);
            lanes_transpose_quarters(x + 1, 2);
        } else {
            lanes_transpose_quarters(x, 1);
        }
#pragma GCC unroll 8
        for (uint32_t r = 0; r < row_count; r++) {
            _mm512_store_ps(packed + i * row_count + r * STEP_VALUES, x[r]);
        }
    }
}

/* `count` bytes of a token over and over; all of the 32 or 64 bits where it is 0. */
INLINE __m512i bytes_everywhere(const uint8_t *bytes, uint32_t row_count, size_t count)
{
    if (row_count == 8) {
        int32_t some = 0;
        memcpy(&some, bytes, count == 0 ? sizeof(some) : count);
        return _mm512_set1_epi32(some);
    }
    int64_t some = 0;
    memcpy(&some, bytes, count == 0 ? sizeof(some) : count);
    return _mm512_set1_epi64(some);
}

/* K of LANES tokens at equal distances: where it lies, or copied. */
struct even_keys {
    const uint8_t *first;
    size_t stride;
    uint8_t copy[LANES * WHOLE_HEAD_MAX];
};

/* Tokens from `first` on, up to `end`; past it the last one stands in. */
static void even_keys_find(const struct kvk_attend_tokens *tokens, uint32_t first, uint32_t end,
                           size_t head_size, struct even_keys *keys)
{
    const uint8_t *k[LANES];

    keys->first = tokens->k[first] + tokens->k_offset;
    keys->stride = head_size;
    if (end - first >= LANES && tokens_are_even(tokens, first)) {
        return;
    }
    kvk_attend_keys_find(tokens, first, end, LANES, k);
    for (uint32_t token = 0; token < LANES; token++) {
        memcpy(keys->copy + token * head_size, k[token], head_size);
    }
    keys->first = keys->copy;
}

/* As many values of each row as fit a vector, from `i` on, with LANES tokens. Queries are in two
 * bytes each, 2^15 more than they are, high bytes before low ones: a product has one factor that is
 * not negative. */
INLINE void square_step(const int16_t *packed, const struct shares *shares, uint32_t row_count,
                        const struct even_keys *keys, size_t i, size_t count, __m512i *sums)
{
    const __m512i split4 =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 9, 11, 13, 15, 0, 2, 4, 6, 8, 10, 12, 14));
    const __m512i split8 =
        _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
    __m512i share;

    if (row_count == 8) {
        int64_t some;
        memcpy(&some, shares->values + i, sizeof(some));
        share = _mm512_set1_epi64(some);
    } else {
        share = _mm512_broadcast_i32x4(
            _mm_load_si128((const __m128i *)(const void *)(shares->values + i)));
    }
    __m512i q = _mm512_mulhrs_epi16(_mm512_load_si512(packed + i * row_count), share);
    q = _mm512_xor_si512(q, _mm512_set1_epi16(INT16_MIN));
    q = _mm512_shuffle_epi8(q, row_count == 8 ? split8 : split4);
#pragma GCC unroll 4
    for (uint32_t four = 0; four < LANES; four += 4) {
        const uint8_t *k = keys->first + four * keys->stride + i;
#pragma GCC unroll 4
        for (uint32_t token = 0; token < 4; token++) {
            __m512i values = bytes_everywhere(k + token * keys->stride, row_count, count);
            sums[four + token] = _mm512_dpbusd_epi32(sums[four + token], q, values);
        }
    }
}

INLINE __m512i whole_evens(__m512i a, __m512i b)
{
    return _mm512_castps_si512(
        _mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), _MM_SHUFFLE(2, 0, 2, 0)));
}

INLINE __m512i whole_odds(__m512i a, __m512i b)
{
    return _mm512_castps_si512(
        _mm512_shuffle_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), _MM_SHUFFLE(3, 1, 3, 1)));
}

/* Of int8_channel high bytes' sums and low bytes', of int8_32 two parts of a sum, in floats. */
INLINE __m512i square_join(enum kvk_format format, __m512i high, __m512i low)
{
    if (format == KVK_FORMAT_INT8_32) {
        return _mm512_castps_si512(_mm512_castsi512_ps(high) + _mm512_castsi512_ps(low));
    }
    return _mm512_add_epi32(_mm512_slli_epi32(high, 8), low);
}

/* From the sums of LANES tokens to those of each row: `results` [row_count] of LANES tokens. Four
 * rows are of int8_channel. */
INLINE void square_fold(enum kvk_format format, uint32_t row_count, const __m512i *sums,
                        lanes *results)
{
    __m512i pairs[LANES / 2];

#pragma GCC unroll 8
    for (uint32_t i = 0; i < LANES / 2; i++) {
        __m512i evens = whole_evens(sums[2 * i], sums[2 * i + 1]);
        __m512i odds = whole_odds(sums[2 * i], sums[2 * i + 1]);
        pairs[i] =
            row_count == 8 ? square_join(format, evens, odds) : _mm512_add_epi32(evens, odds);
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < LANES / 4; i++) {
        __m512i evens = whole_evens(pairs[2 * i], pairs[2 * i + 1]);
        __m512i odds = whole_odds(pairs[2 * i], pairs[2 * i + 1]);
        if (row_count == 8) {
            results[2 * i] = _mm512_castsi512_ps(evens);
            results[2 * i + 1] = _mm512_castsi512_ps(odds);
        } else {
            results[i] = _mm512_castsi512_ps(square_join(format, evens, odds));
        }
    }
    if (row_count == 8) {
        lanes_transpose_quarters(results, 2);
        lanes_transpose_quarters(results + 1, 2);
    } else {
        lanes_transpose_quarters(results, 1);
    }
}

/* 4 or 8 rows by LANES tokens, of which `count` are there. excess: what each token's sums are too
 * large by. */
INLINE void square_cell(const struct kvk_attend_rows *rows, uint32_t row, uint32_t row_count,
                        const int16_t *packed, const struct shares *shares, size_t head_size,
                        const struct even_keys *keys, __m512i excess, uint32_t count,
                        struct kvk_attend_fetch *fetch, uint32_t fetch_lines, float *scores)
{
    const uint32_t step = STEP_VALUES / row_count;
    __mmask16 mask = (__mmask16)((1U << count) - 1);
    __m512i sums[LANES];
    lanes results[8];
    size_t i = 0;

#pragma GCC unroll 16
    for (uint32_t token = 0; token < LANES; token++) {
        sums[token] = _mm512_setzero_si512();
    }
    while (i + step <= head_size) {
        size_t end = i + STEP_VALUES;
        end = end < head_size ? end : head_size;
        for (; i + step <= end; i += step) {
            square_step(packed, shares, row_count, keys, i, 0, sums);
        }
        kvk_attend_fetch_lines(fetch, fetch_lines);
    }
    if (i < head_size) {
        square_step(packed, shares, row_count, keys, i, head_size - i, sums);
    }
    square_fold(KVK_FORMAT_INT8_CHANNEL, row_count, sums, results);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < row_count; r++) {
        __m512i whole = _mm512_sub_epi32(_mm512_castps_si512(results[r]), excess);
        lanes back = lanes_set(row_back(rows, row + r) * shares->back);
        _mm512_mask_storeu_ps(scores + (row + r) * KVK_ATTEND_TILE_TOKENS, mask,
                              _mm512_cvtepi32_ps(whole) * back);
    }
}

/* 2^15 times the sum of each token's values, which square_step() has in excess. */
INLINE __m512i square_excess(size_t head_size, const struct even_keys *keys)
{
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sums[LANES];

#pragma GCC unroll 16
    for (uint32_t token = 0; token < LANES; token++) {
        const uint8_t *k = keys->first + token * keys->stride;
        size_t i = 0;
        sums[token] = _mm512_setzero_si512();
        for (; i + 64 <= head_size; i += 64) {
            sums[token] = _mm512_dpbusd_epi32(sums[token], ones, _mm512_loadu_si512(k + i));
        }
        if (i < head_size) {
            __mmask64 mask = (UINT64_C(1) << (head_size - i)) - 1;
            sums[token] =
                _mm512_dpbusd_epi32(sums[token], ones, _mm512_maskz_loadu_epi8(mask, k + i));
        }
    }
    return _mm512_slli_epi32(whole_reduce(sums), 15);
}

/* Rows that are scored so: as many fours as there are; of int8_32 eights. */
INLINE uint32_t square_rows(const struct kvk_attend *attend, const struct kvk_attend_rows *rows)
{
    uint32_t step = attend->format_k == KVK_FORMAT_INT8_32 ? 8 : 4;

    return attend->head_size_k <= WHOLE_HEAD_MAX ? rows->count / step * step : 0;
}

/* [row][pad(head_size)], four or eight of them together. */
struct square {
    _Alignas(64) int16_t values[KVK_ATTEND_ROWS_MAX * WHOLE_HEAD_MAX];
};

INLINE void square_pack(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t count, struct square *square)
{
    size_t stride = kvk_attend_pad(attend->head_size_k);
    uint32_t row = 0;

    for (; row + 8 <= count; row += 8) {
        square_rows_pack(rows, row, 8, attend->head_size_k, square->values + row * stride);
    }
    if (row < count) {
        square_rows_pack(rows, row, 4, attend->head_size_k, square->values + row * stride);
    }
}

/* Tokens of a block, from `first` to `end`. */
INLINE void square_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                         uint32_t row_count, const struct square *square,
                         const struct shares *shares, const struct kvk_attend_tokens *tokens,
                         uint32_t first, uint32_t end, struct kvk_attend_fetch *fetch,
                         uint32_t fetch_lines, float *scores)
{
    size_t stride = kvk_attend_pad(attend->head_size_k);

    for (uint32_t token = first; row_count > 0 && token < end; token += LANES) {
        struct even_keys keys;
        uint32_t count = end - token < LANES ? end - token : LANES;
        uint32_t row = 0;
        even_keys_find(tokens, token, end, attend->head_size_k, &keys);
        __m512i excess = square_excess(attend->head_size_k, &keys);
        for (; row + 8 <= row_count; row += 8) {
            square_cell(rows, row, 8, square->values + row * stride, shares, attend->head_size_k,
                        &keys, excess, count, fetch, 8 * fetch_lines, scores + token);
        }
        if (row < row_count) {
            square_cell(rows, row, 4, square->values + row * stride, shares, attend->head_size_k,
                        &keys, excess, count, fetch, 4 * fetch_lines, scores + token);
        }
    }
}

/* ---- The same of int8_32: K widened to 16 bits, since its groups' scales meet sums ---- */

/* Tokens whose sums are in registers at once, in whole numbers and scaled. */
#define GROUP_TOKENS 8

/* Rows that are worth it: with fewer, widening takes longer than it saves. */
#define GROUP_ROWS 8

/* K of LANES tokens. */
struct group_keys {
    _Alignas(64) int16_t values[LANES * WHOLE_HEAD_MAX];             /* [token][head_size] */
    _Alignas(64) float scales[WHOLE_HEAD_MAX / STEP_VALUES * LANES]; /* [group][token] */
};

/* Tokens from `first` on, up to `end`; past it the last one stands in. */
static void group_keys_find(const struct kvk_attend_tokens *tokens, uint32_t first, uint32_t end,
                            size_t head_size, struct group_keys *keys)
{
    _Alignas(64) uint16_t halves_of[WHOLE_HEAD_MAX / STEP_VALUES * LANES];
    const uint8_t *k[LANES];

    kvk_attend_keys_find(tokens, first, end, LANES, k);
    for (uint32_t token = 0; token < LANES; token++) {
        const uint8_t *at = k[token];
        uint16_t *half = halves_of + token;
        for (size_t i = 0; i < head_size; i += STEP_VALUES) {
            memcpy(half, at, sizeof(*half));
            _mm512_store_si512(keys->values + token * head_size + i,
                               _mm512_cvtepi8_epi16(bytes_load(at + 2, STEP_VALUES)));
            at += KVK_INT8_32_BYTES;
            half += LANES;
        }
    }
    for (size_t i = 0; i < head_size / STEP_VALUES * LANES; i += LANES) {
        lanes_store(keys->scales + i,
                    lanes_widen(KVK_FORMAT_FP16, (const uint8_t *)(halves_of + i)));
    }
}

/* As many values of each row as fit a vector, with GROUP_TOKENS tokens. */
INLINE void group_step(const int16_t *packed, const int16_t *k, size_t head_size, __m512i *sums)
{
    __m512i q = _mm512_load_si512(packed);

#pragma GCC unroll 8
    for (uint32_t token = 0; token < GROUP_TOKENS; token++) {
        int64_t some;
        memcpy(&some, k + token * head_size, sizeof(some));
        sums[token] = _mm512_dpwssd_epi32(sums[token], q, _mm512_set1_epi64(some));
    }
}

/* GROUP_ROWS rows by LANES tokens, of which `count` are there. */
INLINE void group_square(const struct kvk_attend_rows *rows, uint32_t row, const int16_t *packed,
                         size_t head_size, const struct group_keys *keys, uint32_t count,
                         struct kvk_attend_fetch *fetch, uint32_t fetch_lines, float *scores)
{
    const uint32_t step = STEP_VALUES / GROUP_ROWS;
    __mmask16 mask = (__mmask16)((1U << count) - 1);
    __m512i wide[LANES];
    lanes results[GROUP_ROWS];

#pragma GCC unroll 2
    for (uint32_t first = 0; first < LANES; first += GROUP_TOKENS) {
        const int16_t *k = keys->values + first * head_size;
        lanes scaled[GROUP_TOKENS];
#pragma GCC unroll 8
        for (uint32_t token = 0; token < GROUP_TOKENS; token++) {
            scaled[token] = lanes_set(0);
        }
        for (size_t i = 0; i < head_size; i += STEP_VALUES) {
            const float *scales = keys->scales + i / STEP_VALUES * LANES + first;
            __m512i sums[GROUP_TOKENS];
#pragma GCC unroll 8
            for (uint32_t token = 0; token < GROUP_TOKENS; token++) {
                sums[token] = _mm512_setzero_si512();
            }
            for (size_t j = i; j < i + STEP_VALUES; j += step) {
                group_step(packed + j * GROUP_ROWS, k + j, head_size, sums);
            }
#pragma GCC unroll 8
            for (uint32_t token = 0; token < GROUP_TOKENS; token++) {
                scaled[token] = lanes_fma(_mm512_cvtepi32_ps(sums[token]), lanes_set(scales[token]),
                                          scaled[token]);
            }
            kvk_attend_fetch_lines(fetch, fetch_lines);
        }
#pragma GCC unroll 8
        for (uint32_t token = 0; token < GROUP_TOKENS; token++) {
            wide[first + token] = _mm512_castps_si512(scaled[token]);
        }
    }
    square_fold(KVK_FORMAT_INT8_32, GROUP_ROWS, wide, results);
#pragma GCC unroll 8
    for (uint32_t r = 0; r < GROUP_ROWS; r++) {
        _mm512_mask_storeu_ps(scores + (row + r) * KVK_ATTEND_TILE_TOKENS, mask,
                              results[r] * lanes_set(row_back(rows, row + r)));
    }
}

/* All tokens. */
static void group_squares(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                          uint32_t row_count, const struct square *square,
                          const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                          uint32_t fetch_lines, float *scores)
{
    size_t head_size = attend->head_size_k;
    struct group_keys keys;

    for (uint32_t token = 0; token < tokens->count; token += LANES) {
        uint32_t left = tokens->count - token;
        uint32_t count = left < LANES ? left : LANES;
        group_keys_find(tokens, token, tokens->count, head_size, &keys);
        for (uint32_t row = 0; row < row_count; row += GROUP_ROWS) {
            group_square(rows, row, square->values + row * head_size, head_size, &keys, count,
                         fetch, GROUP_ROWS / 2 * fetch_lines, scores + token);
        }
    }
}

/* ---- Scores of few rows ---- */

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

/* [row][pad(head_size)]: close together, so that no two rows look alike to a processor that
 * compares the low bits of addresses. */
struct whole_rows {
    _Alignas(64) int16_t values[BLOCK_ROWS_MAX * KVK_HEAD_SIZE_MAX];
};

/* Queries with the scales of a block's channels, as whole numbers: the largest scale is one. */
INLINE void rows_scale(const struct kvk_attend_rows *rows, uint32_t row, uint32_t row_count,
                       const struct shares *shares, size_t head_size, struct whole_rows *whole)
{
    size_t stride = kvk_attend_pad(head_size);

    for (size_t i = 0; i < head_size; i += STEP_VALUES) {
        __m512i share = _mm512_load_si512(shares->values + i);
#pragma GCC unroll 4
        for (uint32_t r = 0; r < row_count; r++) {
            __m512i q = _mm512_load_si512(row_steps(rows, row + r) + i);
            _mm512_store_si512(whole->values + r * stride + i, _mm512_mulhrs_epi16(q, share));
        }
    }
}

/* Tokens from `first` to `end` with `row_count` rows from `row` on. */
INLINE void score_rows(enum kvk_format format, const struct kvk_attend *attend,
                       const struct kvk_attend_rows *rows, uint32_t row, uint32_t row_count,
                       const struct kvk_attend_tokens *tokens, uint32_t first, uint32_t end,
                       const struct shares *shares, struct kvk_attend_fetch *fetch,
                       uint32_t fetch_lines, float *scores)
{
    const int16_t *q[BLOCK_ROWS_MAX];
    float back[BLOCK_ROWS_MAX];
    struct whole_rows whole;

    for (uint32_t i = 0; i < row_count; i++) {
        q[i] = row_steps(rows, row + i);
        back[i] = row_back(rows, row + i);
        if (format == KVK_FORMAT_INT8_CHANNEL) {
            q[i] = whole.values + i * kvk_attend_pad(attend->head_size_k);
            back[i] *= shares->back;
        }
    }
    if (format == KVK_FORMAT_INT8_CHANNEL) {
        rows_scale(rows, row, row_count, shares, attend->head_size_k, &whole);
    }
    score_block(format, attend, q, back, row_count, tokens, first, end, fetch, fetch_lines,
                scores + row * KVK_ATTEND_TILE_TOKENS);
}

/* Tokens from `first` to `end`, of int8_channel all of one block. */
INLINE void score_tokens(enum kvk_format format, const struct kvk_attend *attend,
                         const struct kvk_attend_rows *rows, const struct kvk_attend_tokens *tokens,
                         uint32_t first, uint32_t end, const struct square *square,
                         const struct shares *shares, struct kvk_attend_fetch *fetch,
                         uint32_t fetch_lines, float *scores)
{
    uint32_t row = square_rows(attend, rows);

    if (format == KVK_FORMAT_INT8_CHANNEL) {
        square_score(attend, rows, row, square, shares, tokens, first, end, fetch, fetch_lines,
                     scores);
    }
    for (; row + 4 <= rows->count; row += 4) {
        score_rows(format, attend, rows, row, 4, tokens, first, end, shares, fetch, fetch_lines,
                   scores);
    }
    if (row + 2 <= rows->count) {
        score_rows(format, attend, rows, row, 2, tokens, first, end, shares, fetch, fetch_lines,
                   scores);
        row += 2;
    }
    if (row < rows->count) {
        score_rows(format, attend, rows, row, 1, tokens, first, end, shares, fetch, fetch_lines,
                   scores);
    }
}

static uint32_t score_fetch_lines(const struct kvk_attend *attend,
                                  const struct kvk_attend_rows *rows,
                                  const struct kvk_attend_tokens *tokens,
                                  const struct kvk_attend_fetch *fetch)
{
    size_t steps = kvk_attend_steps(tokens->count, LANES) * rows->count *
                   kvk_attend_steps(attend->head_size_k, STEP_VALUES);

    return (uint32_t)kvk_attend_steps(fetch->line_count, steps);
}

/* Shares of some blocks are made together: of one alone a processor would have to wait for. */
#define SHARES_MAX 4

static void channel_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                          const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                          float *scores)
{
    uint32_t fetch_lines = score_fetch_lines(attend, rows, tokens, fetch);
    struct shares shares[SHARES_MAX];
    struct square square;

    square_pack(attend, rows, square_rows(attend, rows), &square);
    for (uint32_t first = 0; first < tokens->count;) {
        uint32_t ends[SHARES_MAX];
        uint32_t count = 0;
        for (uint32_t begin = first; begin < tokens->count && count < SHARES_MAX;) {
            shares_make(&shares[count], tokens->pages[begin] + tokens->k_scales,
                        attend->head_size_k);
            begin = kvk_attend_block_end(tokens, begin);
            ends[count++] = begin;
        }
        for (uint32_t i = 0; i < count; i++) {
            score_tokens(KVK_FORMAT_INT8_CHANNEL, attend, rows, tokens, first, ends[i], &square,
                         &shares[i], fetch, fetch_lines, scores);
            first = ends[i];
        }
    }
}

static void group_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                        float *scores)
{
    uint32_t fetch_lines = score_fetch_lines(attend, rows, tokens, fetch);
    uint32_t row_count = square_rows(attend, rows);
    struct square square;

    square_pack(attend, rows, row_count, &square);
    if (row_count > 0) {
        group_squares(attend, rows, row_count, &square, tokens, fetch, fetch_lines, scores);
    }
    score_tokens(KVK_FORMAT_INT8_32, attend, rows, tokens, 0, tokens->count, NULL, NULL, fetch,
                 fetch_lines, scores);
}

void kvk_attend_vnni_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                           const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                           float *scores)
{
    if (attend->format_k == KVK_FORMAT_INT8_CHANNEL) {
        channel_score(attend, rows, tokens, fetch, scores);
    } else {
        group_score(attend, rows, tokens, fetch, scores);
    }
}
