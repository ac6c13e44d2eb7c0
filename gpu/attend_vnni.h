/*
 * Attention over int8 for AVX512-VNNI, its two halves: dot products of whole numbers, summed in 32
 * bits, two to four times as many a step as in fp32. K and V stay as they are stored; what meets
 * them is rounded, and the sums are scaled back:
 *
 *     queries   to 16 bits of the largest, once; for int8_channel multiplied by each block's
 *               channel scales, in 15 bits of the block's largest
 *     weights   to 8 bits of the largest of a tile, times their tokens' scales (int8_32: a
 *               group's); so scales that are negative, which no scale is, would count as 0
 *
 * The functions are those of struct kvk_attend_kernel; all need the processor that
 * kvk_attend_compact_vnni needs.
 */
#ifndef KVK_GPU_ATTEND_VNNI_H
#define KVK_GPU_ATTEND_VNNI_H

#include "gpu/attend_kernel.h"

/* What the largest value of a query becomes in 16 bits. */
#define KVK_ATTEND_VNNI_LARGEST 32767.0F

/* A packed query: what a step is, a float, in 64 bytes; then [pad(head_size_k)] steps. */
#define KVK_ATTEND_VNNI_HEADER_BYTES 64

/* What to multiply with so that `largest` becomes `whole`, and back. A NaN stays one. */
struct kvk_attend_vnni_scale {
    float there;
    float back;
};

static inline struct kvk_attend_vnni_scale kvk_attend_vnni_scale(float largest, float whole)
{
    if (largest == 0) {
        return (struct kvk_attend_vnni_scale){0, 0};
    }
    /* By division both ways, since a subnormal has no finite inverse. */
    return (struct kvk_attend_vnni_scale){whole / largest, largest / whole};
}

void kvk_attend_vnni_score(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                           const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                           float *scores);
void kvk_attend_vnni_weigh(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                           const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                           const float *weights);

#endif
