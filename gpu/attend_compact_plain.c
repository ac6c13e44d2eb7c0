/*
 * Attention over compact formats in plain C: rows are widened with their scales a token at a time,
 * once for all queries, and the rest is as over plain formats.
 */
#include "gpu/attend_kernel.h"

#include <string.h>

#include "base/assert.h"
#include "gpu/values.h"

/* One row. `scales` are its head's; `slot` is which of the block's tokens it is. */
static void row_widen(enum kvk_format format, bool is_value, const uint8_t *row,
                      const uint8_t *scales, uint32_t slot, uint32_t count, float *values)
{
    float scale = 1;

    if (format == KVK_FORMAT_FP8_E4M3) {
        scale = kvk_value_widen(KVK_FORMAT_FP32, scales, 0);
    } else if (format == KVK_FORMAT_INT8_CHANNEL && is_value) {
        scale = kvk_value_widen(KVK_FORMAT_BF16, scales, slot);
    }
    for (uint32_t i = 0; i < count; i++) {
        if (format == KVK_FORMAT_FP8_E4M3) {
            values[i] = scale * kvk_fp8_e4m3_widen(row[i]);
        } else if (format == KVK_FORMAT_INT8_CHANNEL) {
            scale = is_value ? scale : kvk_value_widen(KVK_FORMAT_BF16, scales, i);
            values[i] = scale * (float)(int8_t)row[i];
        } else {
            const uint8_t *group = row + (size_t)i / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES;
            values[i] = kvk_value_widen(KVK_FORMAT_FP16, group, 0) *
                        (float)(int8_t)group[2 + i % KVK_INT8_32_VALUES];
        }
    }
}

static void compact_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                          const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                          float *scores)
{
    float k[KVK_HEAD_SIZE_MAX];

    (void)fetch; /* the arithmetic is slower than any memory */
    for (uint32_t token = 0; token < tokens->count; token++) {
        row_widen(attend->format_k, false, tokens->k[token] + tokens->k_offset,
                  tokens->pages[token] + tokens->k_scales, tokens->slots[token],
                  attend->head_size_k, k);
        for (uint32_t row = 0; row < rows->count; row++) {
            const float *q = kvk_attend_row_floats(rows, row);
            float dots[4] = {0};
            for (uint32_t i = 0; i < attend->head_size_k; i++) {
                dots[i % 4] += q[i] * k[i];
            }
            scores[row * KVK_ATTEND_TILE_TOKENS + token] =
                (dots[0] + dots[1]) + (dots[2] + dots[3]);
        }
    }
}

static void compact_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                          const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                          const float *weights)
{
    float v[KVK_HEAD_SIZE_MAX];

    (void)fetch;
    for (uint32_t token = 0; token < tokens->count; token++) {
        row_widen(kvk_attend_value_format(attend), true, tokens->v[token] + tokens->v_offset,
                  tokens->pages[token] + tokens->v_scales, tokens->slots[token],
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

#define PLAIN kvk_attend_plain
#define COMPACT kvk_attend_compact_plain
#define NAME "plain"

#include "gpu/attend_compact_rest.inc"
