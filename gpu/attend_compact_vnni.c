/*
 * Attention over int8 for AVX512-VNNI: its queries, and who does the rest. Scores and values are in
 * gpu/attend_vnni_score.c and _weigh.c. fp8 has a way of its own (gpu/attend_compact_fp8.c), or
 * that of plain AVX-512, as has all that is not of K and V.
 */
#include "gpu/attend_vnni.h"

#include <math.h>

#include "base/assert.h"

#include "gpu/attend_vnni.inc"

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

/* ---- Queries ---- */

/* Two vectors of floats, rounded to 16 bits, in their order. */
INLINE __m512i whole_pack(lanes low, lanes high)
{
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i packed = _mm512_packs_epi32(_mm512_cvtps_epi32(low), _mm512_cvtps_epi32(high));

    return _mm512_permutexvar_epi64(order, packed);
}

static size_t vnni_packed_bytes(const struct kvk_attend *attend)
{
    size_t values = kvk_attend_pad(attend->head_size_k);

    if (!is_whole(attend->format_k)) {
        return other()->packed_bytes(attend);
    }
    return KVK_ATTEND_VNNI_HEADER_BYTES + values * sizeof(int16_t);
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
    struct kvk_attend_vnni_scale scale = kvk_attend_vnni_scale(most, KVK_ATTEND_VNNI_LARGEST);
    memcpy(packed, &scale.back, sizeof(scale.back));
    for (size_t i = 0; i < values; i += STEP_VALUES) {
        __m512i whole = whole_pack(lanes_load(wide + i) * lanes_set(scale.there),
                                   lanes_load(wide + i + LANES) * lanes_set(scale.there));
        _mm512_store_si512(packed + KVK_ATTEND_VNNI_HEADER_BYTES + i * sizeof(int16_t), whole);
    }
}

/* ---- The kernel ---- */

static void vnni_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                       float *scores)
{
    if (is_whole(attend->format_k)) {
        kvk_attend_vnni_score(attend, rows, tokens, fetch, scores);
    } else {
        other()->score(attend, rows, tokens, fetch, scores);
    }
}

static void vnni_soften(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        uint32_t token_count, float *scores)
{
    kvk_attend_avx512.soften(attend, rows, token_count, scores);
}

static void vnni_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                       const float *weights)
{
    if (is_whole(kvk_attend_value_format(attend))) {
        kvk_attend_vnni_weigh(attend, rows, tokens, fetch, weights);
    } else {
        other()->weigh(attend, rows, tokens, fetch, weights);
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
