/* Weighted values of attention over int8: gpu/attend_vnni.h. */
#include "gpu/attend_vnni.h"

#include <math.h>

#include "base/assert.h"

#include "gpu/attend_vnni.inc"

/* What the largest weight becomes in 8 bits. */
#define WEIGHT_LARGEST 255.0F

/* Values of V that are worked on at a time: a vector of bytes, two groups of int8_32. */
#define QUAD_VALUES 64U
#define QUAD_GROUPS (QUAD_VALUES / KVK_INT8_32_VALUES)

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
        struct kvk_attend_vnni_scale scale =
            kvk_attend_vnni_scale(lanes_largest_of(largest), WEIGHT_LARGEST);
        for (uint32_t i = 0; i < padded; i += LANES) {
            __m512i wide = _mm512_cvtps_epi32(scaled[i / LANES] * lanes_set(scale.there));
            _mm_store_si128((__m128i *)(void *)(whole->values[row] + i),
                            _mm512_cvtusepi32_epi8(wide));
        }
        whole->back[row] = scale.back;
    }
}

/* The scale of each token: of its own (int8_channel), or of one group of its values. */
static void token_scales(enum kvk_format format, const struct kvk_attend_tokens *tokens,
                         size_t group, float *scales)
{
    _Alignas(64) uint16_t halves_of[KVK_ATTEND_TILE_TOKENS] = {0};
    enum kvk_format half_format = format == KVK_FORMAT_INT8_32 ? KVK_FORMAT_FP16 : KVK_FORMAT_BF16;
    uint32_t token = 0;

    while (token < tokens->count) {
        if (format == KVK_FORMAT_INT8_CHANNEL && token + LANES <= tokens->count &&
            tokens_are_even(tokens, token)) {
            const uint8_t *at =
                tokens->pages[token] + tokens->v_scales + (size_t)2 * tokens->slots[token];
            memcpy(&halves_of[token], at, LANES * sizeof(*halves_of));
            token += LANES;
            continue;
        }
        const uint8_t *at =
            format == KVK_FORMAT_INT8_32
                ? tokens->v[token] + tokens->v_offset + group * KVK_INT8_32_BYTES
                : tokens->pages[token] + tokens->v_scales + (size_t)2 * tokens->slots[token];
        memcpy(&halves_of[token], at, sizeof(*halves_of));
        token++;
    }
    for (uint32_t i = 0; i < KVK_ATTEND_TILE_TOKENS; i += LANES) {
        lanes_store(scales + i,
                    lanes_widen(half_format, (const uint8_t *)halves_of + i * sizeof(*halves_of)));
    }
}

/* Which values of V, and their weights: of int8_channel `weights` alone, of int8_32 one for each
 * group. */
struct quad_part {
    enum kvk_format format;
    const uint8_t *const *v;             /* the tokens' pointers, up to a whole four */
    size_t v_offset;                     /* past them */
    size_t count;                        /* of QUAD_VALUES, those that are there */
    const struct whole_weights *weights; /* [QUAD_GROUPS] where there are groups */
};

/* A token's values; those that are not there are 0, and not read. */
INLINE __m512i quad_values(const struct quad_part *part, const uint8_t *v)
{
    if (part->format == KVK_FORMAT_INT8_CHANNEL) {
        if (part->count < QUAD_VALUES) {
            return _mm512_maskz_loadu_epi8((UINT64_C(1) << part->count) - 1, v);
        }
        return _mm512_loadu_si512(v);
    }
    __m512i low = _mm512_castsi256_si512(bytes_load(v + 2, STEP_VALUES));
    if (part->count < QUAD_VALUES) {
        return _mm512_inserti64x4(low, _mm256_setzero_si256(), 1);
    }
    return _mm512_inserti64x4(low, bytes_load(v + KVK_INT8_32_BYTES + 2, STEP_VALUES), 1);
}

/* Four tokens' weights of a row, for each value. */
INLINE __m512i quad_weights(const struct quad_part *part, uint32_t row, uint32_t token)
{
    int32_t weights[QUAD_GROUPS] = {0};

    memcpy(&weights[0], &part->weights[0].values[row][token], sizeof(*weights));
    if (part->format == KVK_FORMAT_INT8_CHANNEL) {
        return _mm512_set1_epi32(weights[0]);
    }
    memcpy(&weights[1], &part->weights[1].values[row][token], sizeof(*weights));
    return _mm512_inserti64x4(_mm512_set1_epi32(weights[0]), _mm256_set1_epi32(weights[1]), 1);
}

/* Add weight x V of four tokens to the sums of `row_count` rows. Vector i of a row's four has of
 * each 16 values those from 4 i on. */
INLINE void quad_step(const struct quad_part *part, uint32_t row, uint32_t row_count,
                      uint32_t token, __m512i *sums)
{
    __m512i values[4];
    __m512i quads[4];

#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        values[i] = quad_values(part, part->v[token + i] + part->v_offset);
    }
    __m512i low = _mm512_unpacklo_epi8(values[0], values[1]);
    __m512i high = _mm512_unpackhi_epi8(values[0], values[1]);
    __m512i other_low = _mm512_unpacklo_epi8(values[2], values[3]);
    __m512i other_high = _mm512_unpackhi_epi8(values[2], values[3]);
    quads[0] = _mm512_unpacklo_epi16(low, other_low);
    quads[1] = _mm512_unpackhi_epi16(low, other_low);
    quads[2] = _mm512_unpacklo_epi16(high, other_high);
    quads[3] = _mm512_unpackhi_epi16(high, other_high);
#pragma GCC unroll 4
    for (uint32_t r = 0; r < row_count; r++) {
        __m512i weights = quad_weights(part, row + r, token);
#pragma GCC unroll 4
        for (uint32_t i = 0; i < 4; i++) {
            sums[4 * r + i] = _mm512_dpbusd_epi32(sums[4 * r + i], weights, quads[i]);
        }
    }
}

/* values += sums x back, in their order, as far as there are values. */
INLINE void quad_add(const struct quad_part *part, uint32_t row, const __m512i *sums, float *values)
{
    lanes results[4];
    lanes back = lanes_set(part->weights[0].back[row]);

    if (part->format == KVK_FORMAT_INT8_32) {
        back = lanes_join_halves(part->weights[0].back[row], part->weights[1].back[row]);
    }
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        results[i] = _mm512_cvtepi32_ps(sums[i]) * back;
    }
    lanes_transpose_quarters(results, 1);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; i++) {
        if (i * LANES < part->count) {
            lanes_store(values + i * LANES, lanes_load(values + i * LANES) + results[i]);
        }
    }
}

/* Add weight x V of all tokens to a part of the values of `row_count` rows. */
INLINE void quad_cell(const struct quad_part *part, const struct kvk_attend_tokens *tokens,
                      struct kvk_attend_fetch *fetch, uint32_t fetch_lines, uint32_t row,
                      uint32_t row_count, float *values, size_t value_stride)
{
    __m512i sums[4 * BLOCK_ROWS_MAX];
#pragma GCC unroll 16
    for (uint32_t i = 0; i < 4 * row_count; i++) {
        sums[i] = _mm512_setzero_si512();
    }
    for (uint32_t token = 0; token < tokens->count;) {
        uint32_t end = tokens->count - token < LANES ? tokens->count : token + LANES;
        for (; token < end; token += 4) {
            quad_step(part, row, row_count, token, sums);
        }
        kvk_attend_fetch_lines(fetch, fetch_lines);
    }
#pragma GCC unroll 4
    for (uint32_t r = 0; r < row_count; r++) {
        quad_add(part, row + r, &sums[4 * r], values + r * value_stride);
    }
}

/* A part of the values of all rows, from `index` on. */
INLINE void quad_rows(const struct quad_part *part, const struct kvk_attend_rows *rows,
                      const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                      uint32_t fetch_lines, size_t index)
{
    size_t stride = rows->value_stride;
    float *values = rows->values + index;
    uint32_t row = 0;

    for (; row + 4 <= rows->count; row += 4) {
        quad_cell(part, tokens, fetch, fetch_lines, row, 4, values + row * stride, stride);
    }
    if (row + 2 <= rows->count) {
        quad_cell(part, tokens, fetch, fetch_lines, row, 2, values + row * stride, stride);
        row += 2;
    }
    if (row < rows->count) {
        quad_cell(part, tokens, fetch, fetch_lines, row, 1, values + row * stride, stride);
    }
}

INLINE void weigh_format(enum kvk_format format, const struct kvk_attend *attend,
                         const struct kvk_attend_rows *rows, const struct kvk_attend_tokens *tokens,
                         struct kvk_attend_fetch *fetch, const float *weights)
{
    size_t head_size = attend->head_size_v;
    size_t steps = kvk_attend_steps(tokens->count, LANES) * kvk_attend_steps(rows->count, 4) *
                   kvk_attend_steps(head_size, QUAD_VALUES);
    uint32_t fetch_lines = (uint32_t)kvk_attend_steps(fetch->line_count, steps);
    float scales[KVK_ATTEND_TILE_TOKENS];
    struct whole_weights whole[QUAD_GROUPS];
    const uint8_t *v[KVK_ATTEND_TILE_TOKENS + 3];

    memcpy(v, tokens->v, tokens->count * sizeof(*v));
    for (uint32_t i = 0; i < 3; i++) { /* the last token stands in, under a weight of 0 */
        v[tokens->count + i] = tokens->v[tokens->count - 1];
    }
    for (size_t i = 0; i < head_size; i += QUAD_VALUES) {
        struct quad_part part = {format, v, tokens->v_offset + i, QUAD_VALUES, whole};
        if (format == KVK_FORMAT_INT8_32) {
            part.v_offset = tokens->v_offset + i / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES;
            for (size_t j = 0; j < QUAD_GROUPS && i + j * KVK_INT8_32_VALUES < head_size; j++) {
                token_scales(format, tokens, i / KVK_INT8_32_VALUES + j, scales);
                weights_make(rows, scales, tokens->count, weights, &whole[j]);
            }
        } else if (i == 0) {
            token_scales(format, tokens, 0, scales);
            weights_make(rows, scales, tokens->count, weights, &whole[0]);
        }
        if (i + QUAD_VALUES <= head_size) {
            quad_rows(&part, rows, tokens, fetch, fetch_lines, i);
        } else {
            part.count = head_size - i;
            quad_rows(&part, rows, tokens, fetch, fetch_lines, i);
        }
    }
}

void kvk_attend_vnni_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                           const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                           const float *weights)
{
    if (kvk_attend_value_format(attend) == KVK_FORMAT_INT8_CHANNEL) {
        weigh_format(KVK_FORMAT_INT8_CHANNEL, attend, rows, tokens, fetch, weights);
    } else {
        weigh_format(KVK_FORMAT_INT8_32, attend, rows, tokens, fetch, weights);
    }
}
