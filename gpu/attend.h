/*
 * Attention over paged blocks: the contract, and what a device is asked.
 *
 * K is stored with its position encoding applied. For a query of head h at absolute position p:
 *     logit(j) = q . k_j * scale
 *     if soft_cap > 0: logit = soft_cap * tanh(logit / soft_cap)
 *     if alibi_slopes: logit -= alibi_slopes[h] * |p - j|, so the cap does not bind what it takes
 *     visible(j): (not causal or j <= p) and (window == 0 or j > p - window or j < sinks)
 *     total = sum exp(logit), over visible j; with sink_logits and exp(sink_logits[h])
 *     output = sum exp(logit) v / total, lse = ln(total)
 * in fp32. Nothing visible: output 0, lse -inf, or sink_logits[h]. Query head h reads KV head h /
 * (query_heads / kv_heads). Slots past token_count, and pages that no query sees, are never read
 * into a result: they may hold NaN or be absent.
 *
 * A sink logit is a token without a place and with a V of 0. It counts once for each query, so it
 * is added when nothing more is merged: by the device in its last step, to items that are not
 * `partial`; by kvk_attend_sink_logits() where somebody else merges last.
 *
 * Cross-attention is a call that is not causal and has no window; K's positions are then those of
 * another sequence, so slopes have no meaning there.
 *
 * Items whose tables begin with the same pages from the same first_token share a prefix, and a
 * device may read it once for all of them (gpu/attend_shared.h finds such).
 */
#ifndef KVK_GPU_ATTEND_H
#define KVK_GPU_ATTEND_H

#include <stdbool.h>
#include <stdint.h>

#include "base/geometry.h"

/* One sequence's part of a batch: queries of one layer over the pages of one shard. */
struct kvk_attend_item {
    const void *queries; /* [query_count][query_heads][head_size_k], format_q */
    float *output;       /* [query_count][query_heads][head_size_v], fp32, written whole */
    float *lse;          /* [query_count][query_heads], fp32, written whole */
    uint32_t query_count;
    uint64_t position;        /* absolute position of the first query; the others follow */
    uint64_t token_count;     /* tokens of K/V there are; may be fewer or more than position + 1 */
    const void *const *pages; /* [page_count]: a block's shard; NULL: not part of this item (no
                                 query sees it, or another device attends it; the caller merges) */
    uint32_t page_count;      /* page i holds tokens first_token + i * block_tokens onward */
    uint64_t first_token;     /* position of the first page's first token */
    bool partial;             /* the caller merges the result with others: no sink logits in it */
};

struct kvk_attend {
    const struct kvk_attend_item *items; /* [item_count] */
    uint32_t item_count;
    uint32_t query_heads; /* a multiple of kv_heads */
    uint32_t kv_heads;    /* of the shard */
    uint32_t head_size_k;
    uint32_t head_size_v;
    uint32_t block_tokens;
    enum kvk_format format_q;
    enum kvk_format format_k;
    enum kvk_format format_v;
    bool latent;       /* V is the first head_size_v values of K; v_offset is not used */
    uint64_t k_offset; /* from a page's start to the layer's K: [kv_head][token][head_size_k] */
    uint64_t v_offset; /* likewise V: [kv_head][token][head_size_v] */
    float scale;
    float soft_cap; /* 0: none */
    bool causal;
    uint32_t window; /* 0: none */
    uint32_t sinks;
    const float *alibi_slopes; /* [query_heads], finite; NULL: none */
    const float *sink_logits;  /* [query_heads], finite or -inf (no sink); NULL: none */
};

/*
 * The layer's K or V as it lies in a page. Where latent, V is the first head_size_v values of K's
 * rows. Compact formats are attended as they are: a stored value times its scale, in fp32; a NaN
 * among scales that count is a NaN in the result, as it is among values.
 */
static inline struct kvk_part kvk_attend_part(const struct kvk_attend *attend, bool is_value)
{
    if (is_value && !attend->latent) {
        return kvk_part_of(attend->format_v, true, attend->kv_heads, attend->block_tokens,
                           attend->head_size_v);
    }
    return kvk_part_of(attend->format_k, false, attend->kv_heads, attend->block_tokens,
                       attend->head_size_k);
}

/* KVK_INVALID naming the field: sizes, formats that do not go together, NaN or infinite scale or
 * slopes, heads that do not divide, pages that end before token_count. Every device calls it first.
 * Only tokens of pages that are there are attended: from first_token on, NULL pages left out, so
 * that a prefix can be attended in parts. */
KVK_CHECKED enum kvk_status kvk_attend_check(const struct kvk_attend *attend,
                                             struct kvk_error *error);

/* The plain loop, in double: the reference for every kernel. Slow on purpose. */
void kvk_attend_reference(const struct kvk_attend *attend);

/*
 * Merge two partial results of the same queries over disjoint tokens, by LSE, into the first.
 * [rows][head_size]; a part with lse -inf counts for nothing, and two of them give 0 and -inf.
 */
void kvk_attend_merge(float *output, float *lse, const float *other_output, const float *other_lse,
                      uint64_t rows, uint32_t head_size);

/*
 * Add the sink logits to results that nothing more is merged into. [query_count][query_heads]
 * [head_size]; sink_logits [query_heads]. To be called once: twice counts the sinks twice.
 */
void kvk_attend_sink_logits(float *output, float *lse, const float *sink_logits,
                            uint64_t query_count, uint32_t query_heads, uint32_t head_size);

#endif
