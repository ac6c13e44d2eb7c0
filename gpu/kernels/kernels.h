/*
 * The CUDA kernels as C sees them: what a launch is given, and the functions that launch.
 *
 * The kernels know nothing of regions, blocks or sequences. An attention launch works off a list
 * of units: some rows (a query of one head each) over a range of tokens of one page table; grid.y
 * is the KV head. Rows whose tokens are cut over several units leave partial results, with their
 * maximum and sum (an LSE of millions has no digits left for the sum), which a second kernel
 * merges. gpu/cuda_plan.h makes the lists from a struct kvk_attend.
 *
 * Every function puts work on a stream and returns at once: 0 or a cudaError_t. `stream` is a
 * cudaStream_t. Pointers in these structs are device memory, and live until the stream is past the
 * launch. The device of the stream is the current one.
 */
#ifndef KVK_GPU_KERNELS_KERNELS_H
#define KVK_GPU_KERNELS_KERNELS_H

#include <stdint.h>

#include "base/geometry.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where a unit's rows go whose tokens are all in it: straight to the output. */
#define KVK_CUDA_SLOT_NONE UINT32_MAX

/* A query of one head. */
struct kvk_cuda_row {
    uint32_t query;   /* of the whole batch */
    uint16_t head;    /* among the query heads that share a KV head */
    uint16_t partial; /* not 0: the caller merges on, so no sink logit is added */
    int64_t position;
    int64_t token_end; /* position behind the last token that there is for it */
};

/* Tokens are counted from the page table's first one; ranges are [begin, end). At least one is not
 * empty. What lies in them is read, and must be finite: rows that do not see it weigh it with 0. */
struct kvk_cuda_unit {
    int64_t first_token;  /* position of token 0 */
    uint64_t first_page;  /* of the table, in kvk_cuda_attend.pages */
    uint32_t sinks_begin; /* tokens that the window does not bind */
    uint32_t sinks_end;
    uint32_t begin; /* the others, none of them below sinks_end */
    uint32_t end;
    uint32_t first_row;  /* in kvk_cuda_attend.rows */
    uint32_t row_count;  /* 1 to kvk_cuda_attend.unit_rows */
    uint32_t first_slot; /* row r of the unit leaves its part in slot first_slot + r, or
                            KVK_CUDA_SLOT_NONE */
};

/* A row of the output that is merged from several slots. */
struct kvk_cuda_merge {
    uint32_t query;
    uint16_t head;
    uint16_t partial;
    uint32_t first_source; /* in kvk_cuda_attend.sources */
    uint32_t source_count; /* 0: nothing is visible to it */
};

/* How the layer's K or V lies in a page, as struct kvk_part says it. */
struct kvk_cuda_part {
    uint64_t offset;        /* from the page's start */
    uint64_t scales_offset; /* from the part's start */
    uint32_t row_bytes;
    uint32_t scale_stride;
};

/* Which kernel. */
enum kvk_cuda_kernel {
    KVK_CUDA_KERNEL_PLAIN = 0,  /* fp32 arithmetic, every shape and format, any alignment */
    KVK_CUDA_KERNEL_MATRIX = 1, /* matrix instructions; kvk_cuda_matrix_rows() */
};

struct kvk_cuda_attend {
    const struct kvk_cuda_unit *units;   /* [unit_count] */
    const struct kvk_cuda_row *rows;     /* [rows of all units] */
    const struct kvk_cuda_merge *merges; /* [merge_count] */
    const uint32_t *sources;             /* slots */
    const uint8_t *const *pages;         /* device addresses; NULL: absent, not attended */
    const void *queries;                 /* [queries][query_heads][head_size_k], format_q */
    const float *slopes;                 /* [query_heads] ALiBi, or NULL */
    const float *sink_logits;            /* [query_heads], or NULL */
    float *output;                       /* [queries][query_heads][head_size_v] */
    float *lse;                          /* [queries][query_heads] */
    float *slot_output; /* [slots][kv_heads][head_size_v], not divided by the sum */
    float *slot_max;    /* [slots][kv_heads] */
    float *slot_sum;    /* [slots][kv_heads] */
    struct kvk_cuda_part k;
    struct kvk_cuda_part v; /* where latent: k */
    uint32_t unit_count;
    uint32_t unit_rows; /* rows of a unit at most; chooses the kernel's variant */
    uint32_t merge_count;
    uint32_t query_heads;
    uint32_t kv_heads;
    uint32_t head_size_k;
    uint32_t head_size_v;
    uint32_t block_tokens;
    uint32_t window; /* 0: none */
    uint32_t sinks;
    float scale;
    float soft_cap;   /* 0: none */
    uint8_t kernel;   /* enum kvk_cuda_kernel */
    uint8_t format_q; /* enum kvk_format */
    uint8_t format_k;
    uint8_t format_v; /* format_k where latent */
    uint8_t latent;
    uint8_t causal;
};

/* What a unit of the plain kernel may have: its rows, and rows x (head_size_k + head_size_v). They
 * bound its shared memory, which every GPU has. */
#define KVK_CUDA_PLAIN_ROWS_MAX 16
#define KVK_CUDA_PLAIN_VALUES_MAX (96 * 1024 / 4)

/* Rows of a unit of the matrix kernels for few rows. */
#define KVK_CUDA_FEW_ROWS 16

/* Can the current GPU run what was built? cudaErrorNoKernelImageForDevice: it was built for others;
 * cudaErrorUnsupportedPtxVersion: the driver is older than what was built for later ones. */
int kvk_cuda_probe(void);

/* Is there a matrix kernel for these formats and sizes, on a GPU that gives a block `shared_bytes`
 * of shared memory at most? 0: no; else the most rows of a unit. */
uint32_t kvk_cuda_matrix_rows(enum kvk_format format_q, enum kvk_format format_k,
                              enum kvk_format format_v, uint32_t head_size_k, uint32_t head_size_v,
                              bool latent, uint32_t shared_bytes);

/* Attend, then merge: one or two kernels. An unknown variant is cudaErrorInvalidValue (1). */
int kvk_cuda_attend_launch(const struct kvk_cuda_attend *attend, void *stream);

/* A piece to copy. Either end is device memory, or host memory that the device can address; any
 * alignment and size. Pieces of a launch neither overlap nor depend on each other. */
struct kvk_cuda_piece {
    const void *source;
    void *target;
    uint64_t size_bytes;
};

/*
 * Copy many small pieces in one launch: the copy engines spend microseconds on each, this spends
 * nothing but their bytes. Contiguous megabytes go better by cudaMemcpyAsync().
 * `pieces`: device memory, [piece_count]. `size_bytes_max`: of the largest piece.
 */
int kvk_cuda_copy_launch(const struct kvk_cuda_piece *pieces, uint32_t piece_count,
                         uint64_t size_bytes_max, void *stream);

/* One part of a block (K or V of a layer of a shard, heads first), from a plain format to a compact
 * one or back. */
struct kvk_cuda_conversion {
    const uint8_t *source; /* the part's first byte; aligned as kvk_format_align() says */
    uint8_t *target;
    struct kvk_cuda_part wide;   /* offset 0 */
    struct kvk_cuda_part narrow; /* offset 0 */
    uint32_t heads;
    uint32_t tokens;
    uint32_t head_size;
    uint8_t format_wide;   /* enum kvk_format */
    uint8_t format_narrow; /* likewise */
    uint8_t is_value;
    uint8_t is_widening; /* from narrow to wide */
};

/*
 * Convert parts, with the rounding of gpu/convert.h to the bit, padding included. Where a value is
 * not finite the part's `refused` becomes 1, and what is in its target is of no use.
 * `conversions`: device memory, [count]. `refused`: device memory, [count], zeros before.
 */
int kvk_cuda_convert_launch(const struct kvk_cuda_conversion *conversions, uint32_t count,
                            uint32_t heads_max, uint32_t *refused, void *stream);

#ifdef __cplusplus
}
#endif

#endif
