/*
 * What a set of attention kernels is: the arithmetic of a tile of tokens, for one instruction
 * set. The driver (gpu/attend_cpu.c) decides what is visible to whom and in which order tiles
 * come; kernels see only rows and tokens of which every one is visible to every row.
 *
 * For each tile: score() gives logits before scaling, soften() turns them into weights and brings
 * the rows' running maximum and sum up to date, weigh() adds the weighted V. At the end, finish()
 * writes a row out. This is the online softmax: state is (max, sum, values) per row, and values
 * are rescaled whenever the maximum grows.
 */
#ifndef KVK_GPU_ATTEND_KERNEL_H
#define KVK_GPU_ATTEND_KERNEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/attend.h"

/* Tokens of a tile at most. K and V of one at head size 128 in 16 bits are 32 KiB. */
#define KVK_ATTEND_TILE_TOKENS 64

/* Rows (a query of one head each) that are worked on together at most. */
#define KVK_ATTEND_ROWS_MAX 128

/* Values of a row are padded with zeros to a multiple of this, in packed queries too: two of the
 * widest vectors. Packed rows and values begin at multiples of 64 bytes. */
#define KVK_ATTEND_PAD_VALUES 32

struct kvk_attend_rows {
    uint32_t count;
    const uint8_t *queries; /* packed by pack(); row r at r * query_stride_bytes */
    size_t query_stride_bytes;
    float *max;    /* [count]: of the logits so far, scaled and capped; -inf at first */
    float *sum;    /* [count]: of exp(logit - max) */
    float *values; /* [count][value_stride]: sums of weight x V, in the kernel's own order */
    size_t value_stride;
};

/* Tokens of one KV head. What is to be read of a token begins a head's offset past its pointer:
 * the heads of a block lie at equal distances, so pointers are made once for all of them. */
struct kvk_attend_tokens {
    const uint8_t *const *k; /* [count] */
    const uint8_t *const *v; /* [count] */
    size_t k_offset;         /* of the head, in bytes */
    size_t v_offset;
    uint32_t count; /* 1 to KVK_ATTEND_TILE_TOKENS, or 0: there are none */
};

struct kvk_attend_kernel {
    const char *name;
    bool (*available)(void); /* on this processor */

    /* Bytes of a packed query row, a multiple of 64, and packing one. */
    size_t (*packed_bytes)(const struct kvk_attend *attend);
    void (*pack)(const struct kvk_attend *attend, const uint8_t *query, uint8_t *packed);

    /* scores: [rows->count][KVK_ATTEND_TILE_TOKENS], aligned to 64 bytes. `ahead` will be worked
     * on next; its K is fetched by score(), its V by weigh(). */
    void (*score)(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                  const struct kvk_attend_tokens *tokens, const struct kvk_attend_tokens *ahead,
                  float *scores);
    /* Scores become weights; those past the tile's end become 0. */
    void (*soften)(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                   uint32_t token_count, float *scores);
    void (*weigh)(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                  const struct kvk_attend_tokens *tokens, const struct kvk_attend_tokens *ahead,
                  const float *weights);

    /* Write a row's result, [head_size_v] values and the LSE. A row that saw nothing: 0, -inf. */
    void (*finish)(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                   uint32_t row, float *output, float *lse);
};

/* The format V is read in: K's where V is a view of it. */
static inline enum kvk_format kvk_attend_value_format(const struct kvk_attend *attend)
{
    return attend->latent ? attend->format_k : attend->format_v;
}

static inline size_t kvk_attend_pad(size_t values)
{
    return (values + KVK_ATTEND_PAD_VALUES - 1) / KVK_ATTEND_PAD_VALUES * KVK_ATTEND_PAD_VALUES;
}

/* Best last. Each is in a file of its own, compiled for its instruction set. */
extern const struct kvk_attend_kernel kvk_attend_plain;
extern const struct kvk_attend_kernel kvk_attend_avx2;
extern const struct kvk_attend_kernel kvk_attend_avx512;
extern const struct kvk_attend_kernel kvk_attend_avx512_bf16;

/* Those that this build has, best first, NULL at the end. */
extern const struct kvk_attend_kernel *const kvk_attend_kernels[];

#endif
