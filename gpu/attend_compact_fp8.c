/*
 * Attention over fp8 for AVX512-BF16 and VBMI: a tile's K or V is widened to bf16, which holds
 * every E4M3 value exactly, once for all rows, into memory that stays in the first or second cache;
 * dot products are then those of bf16. The heads' scales multiply scores and weights.
 */
#include "gpu/attend_kernel.h"

#include <immintrin.h>
#include <pthread.h>
#include <string.h>

#include "gpu/values.h"

/* Values of a head that tiles are made room for; longer ones go the way of plain AVX-512. */
#define FP8_HEAD_MAX 640
#define VECTOR_BYTES 64U

struct wide_tile {
    _Alignas(64) uint16_t values[KVK_ATTEND_TILE_TOKENS * FP8_HEAD_MAX];
    const uint8_t *rows[KVK_ATTEND_TILE_TOKENS];
};
_Static_assert(FP8_HEAD_MAX % VECTOR_BYTES == 0, "rows are whole vectors");

/* bf16 of the magnitudes of E4M3, low and high bytes: made once, since 128 values for every tile
 * would be as much work as the tile. */
static _Alignas(64) uint8_t wide_low[128];
static _Alignas(64) uint8_t wide_high[128];
static pthread_once_t wide_once = PTHREAD_ONCE_INIT;

static bool fp8_available(void)
{
    return kvk_attend_avx512_bf16.available() && __builtin_cpu_supports("avx512vbmi");
}

static bool is_wide(const struct kvk_attend *attend)
{
    return attend->head_size_k <= FP8_HEAD_MAX && attend->head_size_v <= FP8_HEAD_MAX;
}

/* The call as bf16's kernels see it. */
static struct kvk_attend as_bf16(const struct kvk_attend *attend)
{
    struct kvk_attend plain = *attend;

    plain.format_k = plain.format_v = KVK_FORMAT_BF16;
    return plain;
}

static void wide_make(void)
{
    for (uint32_t code = 0; code < sizeof(wide_low); code++) {
        float value = kvk_fp8_e4m3_widen((uint8_t)code);
        uint32_t bits;
        memcpy(&bits, &value, sizeof(bits));
        wide_low[code] = (uint8_t)(bits >> 16);
        wide_high[code] = (uint8_t)(bits >> 24);
    }
}

/* Rows of `head_size` values from `offset` past each pointer on; no byte past them is read. */
static void tile_widen(const uint8_t *const *from, size_t offset, uint32_t token_count,
                       size_t head_size, struct wide_tile *tile)
{
    (void)pthread_once(&wide_once, wide_make);
    const __m512i low_first = _mm512_load_si512(wide_low);
    const __m512i low_last = _mm512_load_si512(wide_low + VECTOR_BYTES);
    const __m512i high_first = _mm512_load_si512(wide_high);
    const __m512i high_last = _mm512_load_si512(wide_high + VECTOR_BYTES);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* for unpacking by lanes */
    const __m512i sign = _mm512_set1_epi8((char)0x80);
    size_t stride = (head_size + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES;

    for (uint32_t token = 0; token < token_count; token++) {
        uint16_t *row = tile->values + token * stride;
        tile->rows[token] = (const uint8_t *)row;
        for (size_t i = 0; i < head_size; i += VECTOR_BYTES) {
            const uint8_t *at = from[token] + offset + i;
            __m512i codes = head_size - i >= VECTOR_BYTES
                                ? _mm512_loadu_si512(at)
                                : _mm512_maskz_loadu_epi8((UINT64_C(1) << (head_size - i)) - 1, at);
            codes = _mm512_permutexvar_epi64(order, codes);
            __m512i low = _mm512_permutex2var_epi8(low_first, codes, low_last);
            __m512i high = _mm512_permutex2var_epi8(high_first, codes, high_last);
            high = _mm512_or_si512(high, _mm512_and_si512(codes, sign));
            _mm512_store_si512(row + i, _mm512_unpacklo_epi8(low, high));
            _mm512_store_si512(row + i + VECTOR_BYTES / 2, _mm512_unpackhi_epi8(low, high));
        }
    }
}

/* The scales of tokens' heads; 0 past the end. */
static void scales_get(const struct kvk_attend_tokens *tokens, size_t scales_at, float *scales)
{
    memset(scales, 0, KVK_ATTEND_TILE_TOKENS * sizeof(*scales));
    for (uint32_t token = 0; token < tokens->count; token++) {
        memcpy(&scales[token], tokens->pages[token] + scales_at, sizeof(*scales));
    }
}

/* Of all rows, [row][KVK_ATTEND_TILE_TOKENS]. */
static void scale_all(const struct kvk_attend_rows *rows, const float *from, const float *scales,
                      float *to)
{
    for (uint32_t row = 0; row < rows->count; row++) {
        for (uint32_t i = 0; i < KVK_ATTEND_TILE_TOKENS; i += 16) {
            size_t at = (size_t)row * KVK_ATTEND_TILE_TOKENS + i;
            _mm512_storeu_ps(
                to + at, _mm512_mul_ps(_mm512_loadu_ps(from + at), _mm512_loadu_ps(scales + i)));
        }
    }
}

static size_t fp8_packed_bytes(const struct kvk_attend *attend)
{
    struct kvk_attend plain = as_bf16(attend);

    return is_wide(attend) ? kvk_attend_avx512_bf16.packed_bytes(&plain)
                           : kvk_attend_compact_avx512.packed_bytes(attend);
}

static void fp8_pack(const struct kvk_attend *attend, const uint8_t *query, uint8_t *packed)
{
    struct kvk_attend plain = as_bf16(attend);

    if (is_wide(attend)) {
        kvk_attend_avx512_bf16.pack(&plain, query, packed);
    } else {
        kvk_attend_compact_avx512.pack(attend, query, packed);
    }
}

static void fp8_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                      const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                      float *scores)
{
    struct kvk_attend plain = as_bf16(attend);
    struct kvk_attend_tokens wide = *tokens;
    float scales[KVK_ATTEND_TILE_TOKENS];
    struct wide_tile tile;

    if (!is_wide(attend)) {
        kvk_attend_compact_avx512.score(attend, rows, tokens, fetch, scores);
        return;
    }
    tile_widen(tokens->k, tokens->k_offset, tokens->count, attend->head_size_k, &tile);
    wide.k = tile.rows;
    wide.k_offset = 0;
    kvk_attend_avx512_bf16.score(&plain, rows, &wide, fetch, scores);
    scales_get(tokens, tokens->k_scales, scales);
    scale_all(rows, scores, scales, scores);
}

static void fp8_soften(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       uint32_t token_count, float *scores)
{
    kvk_attend_avx512.soften(attend, rows, token_count, scores);
}

static void fp8_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                      const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                      const float *weights)
{
    _Alignas(64) float scaled[KVK_ATTEND_ROWS_MAX * KVK_ATTEND_TILE_TOKENS];
    struct kvk_attend plain = as_bf16(attend);
    struct kvk_attend_tokens wide = *tokens;
    float scales[KVK_ATTEND_TILE_TOKENS];
    struct wide_tile tile;

    if (!is_wide(attend)) {
        kvk_attend_compact_avx512.weigh(attend, rows, tokens, fetch, weights);
        return;
    }
    tile_widen(tokens->v, tokens->v_offset, tokens->count, attend->head_size_v, &tile);
    wide.v = tile.rows;
    wide.v_offset = 0;
    scales_get(tokens, tokens->v_scales, scales);
    scale_all(rows, weights, scales, scaled);
    kvk_attend_avx512_bf16.weigh(&plain, rows, &wide, fetch, scaled);
}

static void fp8_finish(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       uint32_t row, float *output, float *lse)
{
    struct kvk_attend plain = as_bf16(attend);

    if (is_wide(attend)) {
        kvk_attend_avx512_bf16.finish(&plain, rows, row, output, lse);
    } else {
        kvk_attend_compact_avx512.finish(attend, rows, row, output, lse);
    }
}

const struct kvk_attend_kernel kvk_attend_compact_fp8 = {
    .name = "avx512_bf16",
    .available = fp8_available,
    .compact = &kvk_attend_compact_avx512,
    .packed_bytes = fp8_packed_bytes,
    .pack = fp8_pack,
    .score = fp8_score,
    .soften = fp8_soften,
    .weigh = fp8_weigh,
    .finish = fp8_finish,
};
