/*
 * What a set of attention kernels is: the arithmetic of a tile of tokens, for one instruction
 * set. The driver (gpu/attend_unit.c) decides what is visible to whom and in which order tiles
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
    /* ALiBi: slope x |row's place - token's place| is taken from a logit, after the cap. */
    const float *slopes;       /* [count]; NULL: none, and no places */
    const float *places;       /* [count]: positions, counted from the tile's first token */
    const float *token_places; /* of the tile's tokens, likewise; readable for a whole tile */
};

/* Tokens of one KV head. What is to be read of a token begins a head's offset past its pointer:
 * the heads of a block lie at equal distances, so pointers are made once for all of them. */
struct kvk_attend_tokens {
    const uint8_t *const *k; /* [count] */
    const uint8_t *const *v; /* [count] */
    size_t k_offset;         /* of the head, in bytes */
    size_t v_offset;
    uint32_t count; /* 1 to KVK_ATTEND_TILE_TOKENS */
    /* Compact formats whose scales lie apart: */
    const uint8_t *const *pages; /* [count]: the block that a token is of */
    const uint16_t *slots;       /* [count]: and which of its tokens */
    size_t k_scales;             /* from a page to the head's scales, in bytes */
    size_t v_scales;
};

/* Runs of bytes at equal distances: K or V of some tokens of a block, of every head. */
struct kvk_attend_area {
    const uint8_t *begin;
    size_t run_bytes;
    size_t stride_bytes;
};

/*
 * What will be read next, to be fetched into the second cache meanwhile, in the order in which it
 * lies in memory: the kernels read head by head, which no hardware foresees. Processors drop what
 * they are asked to fetch too fast, so the kernels spread it over their work.
 */
struct kvk_attend_fetch {
    const uint8_t *next; /* line to be fetched, of a run that ends at `end` */
    const uint8_t *end;
    const uint8_t *run;
    const struct kvk_attend_area *area; /* that the run is of */
    const struct kvk_attend_area *area_end;
    uint32_t run_count;  /* of each area */
    uint32_t runs_left;  /* of this area, the present one included */
    uint32_t line_count; /* how many lines score() should fetch, and how many weigh() */
};

struct kvk_attend_kernel {
    const char *name;
    bool (*available)(void);                 /* on this processor */
    const struct kvk_attend_kernel *compact; /* where K and V are compact; of such a one:
                                                what stands in where it is not available */

    /* Bytes of a packed query row, a multiple of 64, and packing one. */
    size_t (*packed_bytes)(const struct kvk_attend *attend);
    void (*pack)(const struct kvk_attend *attend, const uint8_t *query, uint8_t *packed);

    /* scores: [rows->count][KVK_ATTEND_TILE_TOKENS], aligned to 64 bytes. */
    void (*score)(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                  const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
                  float *scores);
    /* Scores become weights; those past the tile's end become 0. */
    void (*soften)(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                   uint32_t token_count, float *scores);
    void (*weigh)(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                  const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch,
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

/* `count` in steps of `step`, the last one perhaps shorter. */
static inline size_t kvk_attend_steps(size_t count, size_t step)
{
    return (count + step - 1) / step;
}

static inline size_t kvk_attend_pad(size_t values)
{
    return kvk_attend_steps(values, KVK_ATTEND_PAD_VALUES) * KVK_ATTEND_PAD_VALUES;
}

/* ---- Rows and tokens ---- */

/* A row as pack() left it. */
static inline const uint8_t *kvk_attend_row(const struct kvk_attend_rows *rows, uint32_t row)
{
    return rows->queries + row * rows->query_stride_bytes;
}

static inline const float *kvk_attend_row_floats(const struct kvk_attend_rows *rows, uint32_t row)
{
    return (const float *)(const void *)kvk_attend_row(rows, row);
}

/* The end of the run of tokens from `first` on that are of one block. */
static inline uint32_t kvk_attend_block_end(const struct kvk_attend_tokens *tokens, uint32_t first)
{
    uint32_t end = first + 1;

    while (end < tokens->count && tokens->pages[end] == tokens->pages[first]) {
        end++;
    }
    return end;
}

/* Where K is of `count` tokens from `first` on. Those from `end` on are stood in for by the last
 * one before it; what comes of them is not used. */
static inline void kvk_attend_keys_find(const struct kvk_attend_tokens *tokens, uint32_t first,
                                        uint32_t end, uint32_t count, const uint8_t **k)
{
    for (uint32_t i = 0; i < count; i++) {
        uint32_t present = first + i < end ? first + i : end - 1;
        k[i] = tokens->k[present] + tokens->k_offset;
    }
}

/* ---- Fetching ahead ---- */

/* Bytes of a cache line: what one fetch brings. */
#define KVK_ATTEND_LINE_BYTES 64

/* Small and without calls, since it runs amid arithmetic that fills all registers. */
static inline void kvk_attend_fetch_lines(struct kvk_attend_fetch *fetch, uint32_t line_count)
{
    for (; line_count > 0 && fetch->area < fetch->area_end; line_count--) {
        __builtin_prefetch(fetch->next, 0, 2);
        fetch->next += KVK_ATTEND_LINE_BYTES;
        if (fetch->next < fetch->end) {
            continue;
        }
        fetch->run += fetch->area->stride_bytes;
        if (--fetch->runs_left == 0) {
            fetch->area++;
            if (fetch->area == fetch->area_end) {
                return;
            }
            fetch->runs_left = fetch->run_count;
            fetch->run = fetch->area->begin;
        }
        fetch->next = fetch->run;
        fetch->end = fetch->run + fetch->area->run_bytes;
    }
}

/* Each is in a file of its own, compiled for its instruction set. */
extern const struct kvk_attend_kernel kvk_attend_plain;
extern const struct kvk_attend_kernel kvk_attend_avx2;
extern const struct kvk_attend_kernel kvk_attend_avx512;
extern const struct kvk_attend_kernel kvk_attend_avx512_bf16;

/* For K and V in compact formats, and nothing else. */
extern const struct kvk_attend_kernel kvk_attend_compact_plain;
extern const struct kvk_attend_kernel kvk_attend_compact_avx2;
extern const struct kvk_attend_kernel kvk_attend_compact_avx512;
extern const struct kvk_attend_kernel kvk_attend_compact_vnni; /* fp8: as the next */
extern const struct kvk_attend_kernel kvk_attend_compact_fp8;  /* and for fp8 alone */

/* Those that this build has, best first, NULL at the end. */
extern const struct kvk_attend_kernel *const kvk_attend_kernels[];

#endif
