/* Attention as the contract writes it, in double, and the merge of partial results. */
#include "gpu/attend.h"

#include <math.h>
#include <string.h>

#include "gpu/values.h"

/* A query of one head, and the KV head that it reads. */
struct reference_row {
    const struct kvk_attend *attend;
    struct kvk_part k;
    struct kvk_part v;
    const struct kvk_attend_item *item;
    uint64_t position;
    uint64_t query; /* row of [query_count x query_heads] */
    uint32_t head;
    uint32_t kv_head;
};

static bool row_sees(const struct reference_row *row, uint64_t token)
{
    const struct kvk_attend *attend = row->attend;

    if (token < row->item->first_token) {
        return false;
    }
    uint64_t page = (token - row->item->first_token) / attend->block_tokens;
    if (row->item->pages[page] == NULL) {
        return false;
    }
    if (attend->causal && token > row->position) {
        return false;
    }
    return attend->window == 0 || token + attend->window > row->position || token < attend->sinks;
}

/* Value `index` of the token's K or V. */
static double page_value(const struct reference_row *row, uint64_t token, bool is_value,
                         uint32_t index)
{
    const struct kvk_attend *attend = row->attend;
    const struct kvk_part *part = is_value ? &row->v : &row->k;
    uint64_t slot = token - row->item->first_token;
    const uint8_t *page = row->item->pages[slot / attend->block_tokens];
    uint64_t offset = is_value && !attend->latent ? attend->v_offset : attend->k_offset;

    return kvk_part_value(part, page + offset, row->kv_head,
                          (uint32_t)(slot % attend->block_tokens), index);
}

static double row_logit(const struct reference_row *row, uint64_t token)
{
    const struct kvk_attend *attend = row->attend;
    double dot = 0;

    for (uint32_t i = 0; i < attend->head_size_k; i++) {
        double q = (double)kvk_value_widen(attend->format_q, row->item->queries,
                                           row->query * attend->head_size_k + i);
        dot += q * page_value(row, token, false, i);
    }
    double logit = dot * (double)attend->scale;
    if (attend->soft_cap > 0) {
        logit = (double)attend->soft_cap * tanh(logit / (double)attend->soft_cap);
    }
    if (attend->alibi_slopes != NULL) {
        double distance = (double)token - (double)row->position;
        logit -= (double)attend->alibi_slopes[row->head] * fabs(distance);
    }
    return logit;
}

static void row_attend(const struct reference_row *row)
{
    const struct kvk_attend *attend = row->attend;
    const struct kvk_attend_item *item = row->item;
    float *output = item->output + row->query * attend->head_size_v;
    double values[KVK_HEAD_SIZE_MAX] = {0};
    double sink = attend->sink_logits != NULL && !item->partial
                      ? (double)attend->sink_logits[row->head]
                      : -INFINITY;
    double max = sink;
    double sum = 0;

    for (uint64_t token = 0; token < item->token_count; token++) {
        if (row_sees(row, token)) {
            max = fmax(max, row_logit(row, token));
        }
    }
    for (uint64_t token = 0; token < item->token_count; token++) {
        if (!row_sees(row, token)) {
            continue;
        }
        double weight = exp(row_logit(row, token) - max);
        sum += weight;
        for (uint32_t i = 0; i < attend->head_size_v; i++) {
            values[i] += weight * page_value(row, token, true, i);
        }
    }
    if (sink != -INFINITY) {
        sum += exp(sink - max);
    }
    for (uint32_t i = 0; i < attend->head_size_v; i++) {
        output[i] = sum != 0 ? (float)(values[i] / sum) : 0;
    }
    item->lse[row->query] = sum != 0 ? (float)(max + log(sum)) : -INFINITY;
}

void kvk_attend_reference(const struct kvk_attend *attend)
{
    for (uint32_t i = 0; i < attend->item_count; i++) {
        const struct kvk_attend_item *item = &attend->items[i];
        for (uint64_t query = 0; query < (uint64_t)item->query_count * attend->query_heads;
             query++) {
            uint32_t head = (uint32_t)(query % attend->query_heads);
            const struct reference_row row = {
                .attend = attend,
                .k = kvk_attend_part(attend, false),
                .v = kvk_attend_part(attend, true),
                .item = item,
                .position = item->position + query / attend->query_heads,
                .query = query,
                .head = head,
                .kv_head = head / (attend->query_heads / attend->kv_heads),
            };
            row_attend(&row);
        }
    }
}

/* other = the only part that saw anything. */
static void row_replace(float *output, float *lse, const float *other_output, float other_lse,
                        uint32_t head_size)
{
    memcpy(output, other_output, head_size * sizeof(*output));
    *lse = other_lse;
}

void kvk_attend_merge(float *output, float *lse, const float *other_output, const float *other_lse,
                      uint64_t rows, uint32_t head_size)
{
    for (uint64_t row = 0; row < rows; row++) {
        float *values = output + row * head_size;
        const float *other_values = other_output + row * head_size;
        double a = (double)lse[row];
        double b = (double)other_lse[row];

        if (b == -INFINITY) {
            if (a == -INFINITY) {
                memset(values, 0, head_size * sizeof(*values));
            }
            continue;
        }
        if (a == -INFINITY) {
            row_replace(values, &lse[row], other_values, other_lse[row], head_size);
            continue;
        }
        double max = fmax(a, b);
        double sum = exp(a - max) + exp(b - max);
        float weight = (float)(exp(a - max) / sum);
        float other_weight = (float)(exp(b - max) / sum);
        for (uint32_t i = 0; i < head_size; i++) {
            values[i] = weight * values[i] + other_weight * other_values[i];
        }
        lse[row] = (float)(max + log(sum));
    }
}

void kvk_attend_sink_logits(float *output, float *lse, const float *sink_logits,
                            uint64_t query_count, uint32_t query_heads, uint32_t head_size)
{
    for (uint64_t row = 0; row < query_count * query_heads; row++) {
        float *values = output + row * head_size;
        double sink = (double)sink_logits[row % query_heads];
        double seen = (double)lse[row];

        if (sink == -INFINITY) {
            continue;
        }
        double max = fmax(seen, sink);
        double sum = exp(seen - max) + exp(sink - max);
        float weight = (float)(exp(seen - max) / sum);
        for (uint32_t i = 0; i < head_size; i++) {
            values[i] *= weight;
        }
        lse[row] = (float)(max + log(sum));
    }
}
