/*
 * Attention kernels in plain C, for every processor: what the others fall back to. K and V are
 * widened to fp32 a token at a time, once for all rows.
 */
#include "gpu/attend_kernel.h"

#include <math.h>
#include <string.h>

#include "gpu/values.h"

static bool plain_available(void)
{
    return true;
}

static size_t plain_packed_bytes(const struct kvk_attend *attend)
{
    return kvk_attend_pad(attend->head_size_k) * sizeof(float);
}

static void widen(enum kvk_format format, const uint8_t *bytes, uint32_t count, float *values)
{
    for (uint32_t i = 0; i < count; i++) {
        values[i] = kvk_value_widen(format, bytes, i);
    }
}

static void plain_pack(const struct kvk_attend *attend, const uint8_t *query, uint8_t *packed)
{
    widen(attend->format_q, query, attend->head_size_k, (float *)(void *)packed);
}

static void plain_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                        float *scores)
{
    float k[KVK_HEAD_SIZE_MAX];

    (void)fetch; /* the arithmetic is slower than any memory */
    for (uint32_t token = 0; token < tokens->count; token++) {
        widen(attend->format_k, tokens->k[token] + tokens->k_offset, attend->head_size_k, k);
        for (uint32_t row = 0; row < rows->count; row++) {
            const float *q = kvk_attend_row_floats(rows, row);
            /* Four sums, so that rounding errors of long heads grow more slowly. */
            float dots[4] = {0};
            for (uint32_t i = 0; i < attend->head_size_k; i++) {
                dots[i % 4] += q[i] * k[i];
            }
            scores[row * KVK_ATTEND_TILE_TOKENS + token] =
                (dots[0] + dots[1]) + (dots[2] + dots[3]);
        }
    }
}

static void row_soften(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                       uint32_t row, uint32_t token_count, float *scores)
{
    float *values = rows->values + row * rows->value_stride;
    float max = rows->max[row];

    for (uint32_t i = 0; i < token_count; i++) {
        scores[i] *= attend->scale;
        if (attend->soft_cap > 0) {
            scores[i] = attend->soft_cap * tanhf(scores[i] / attend->soft_cap);
        }
        if (rows->slopes != NULL) {
            scores[i] -= rows->slopes[row] * fabsf(rows->token_places[i] - rows->places[row]);
        }
        max = scores[i] > max ? scores[i] : max;
    }
    if (max > rows->max[row]) {
        float shrink = expf(rows->max[row] - max);
        for (uint32_t i = 0; i < attend->head_size_v; i++) {
            values[i] *= shrink;
        }
        rows->sum[row] *= shrink;
        rows->max[row] = max;
    }
    for (uint32_t i = 0; i < token_count; i++) {
        scores[i] = expf(scores[i] - max);
        rows->sum[row] += scores[i];
    }
}

static void plain_soften(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                         uint32_t token_count, float *scores)
{
    for (uint32_t row = 0; row < rows->count; row++) {
        row_soften(attend, rows, row, token_count, scores + row * KVK_ATTEND_TILE_TOKENS);
    }
}

static void plain_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                        const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                        const float *weights)
{
    float v[KVK_HEAD_SIZE_MAX];

    (void)fetch; /* the arithmetic is slower than any memory */
    for (uint32_t token = 0; token < tokens->count; token++) {
        widen(kvk_attend_value_format(attend), tokens->v[token] + tokens->v_offset,
              attend->head_size_v, v);
        for (uint32_t row = 0; row < rows->count; row++) {
            float weight = weights[row * KVK_ATTEND_TILE_TOKENS + token];
            float *values = rows->values + row * rows->value_stride;
            for (uint32_t i = 0; i < attend->head_size_v; i++) {
                values[i] += weight * v[i];
            }
        }
    }
}

static void plain_finish(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                         uint32_t row, float *output, float *lse)
{
    const float *values = rows->values + row * rows->value_stride;

    if (rows->sum[row] == 0) {
        memset(output, 0, attend->head_size_v * sizeof(*output));
        *lse = -INFINITY;
        return;
    }
    for (uint32_t i = 0; i < attend->head_size_v; i++) {
        output[i] = values[i] / rows->sum[row];
    }
    *lse = rows->max[row] + logf(rows->sum[row]);
}

const struct kvk_attend_kernel kvk_attend_plain = {
    .name = "plain",
    .available = plain_available,
    .compact = &kvk_attend_compact_plain,
    .packed_bytes = plain_packed_bytes,
    .pack = plain_pack,
    .score = plain_score,
    .soften = plain_soften,
    .weigh = plain_weigh,
    .finish = plain_finish,
};
