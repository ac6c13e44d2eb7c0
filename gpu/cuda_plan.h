/*
 * The plan of an attention launch on a CUDA device: what a batch is cut into, and the one block of
 * bytes that carries it there.
 *
 * Plain C without CUDA, so that it is built and tested everywhere. A caller does:
 *     kvk_cuda_plan_init()            sizes
 *     kvk_cuda_plan_fill(staging)     write upload_bytes into pinned host memory
 *     copy staging to the device      upload_bytes
 *     kvk_cuda_plan_bind(...)         device addresses into plan.launch
 *     kvk_cuda_attend_launch(&plan.launch, stream)
 *     copy results to the host        result_bytes
 *     kvk_cuda_plan_scatter(results)  into the items' output and lse
 *     kvk_cuda_plan_finish()          also where something of this failed
 *
 * The cut: an item's rows (queries x heads of one KV head) in groups of unit_rows, and the tokens
 * that each group sees in ranges, so many that all multiprocessors have work. A prefix that items
 * share is read once: its units have rows of all of them.
 *
 * Locking: none; a plan is one caller's.
 */
#ifndef KVK_GPU_CUDA_PLAN_H
#define KVK_GPU_CUDA_PLAN_H

#include <stddef.h>

#include "gpu/attend.h"
#include "gpu/attend_shared.h"
#include "gpu/kernels/kernels.h"

/* Of the device. */
struct kvk_cuda_limits {
    uint32_t multiprocessor_count;
    uint32_t shared_bytes; /* that a block may have; kernels that need more are not chosen */
    uint32_t split_tokens; /* a test's wish: tokens of a range; 0: as many as serve best */
};

/* Where an item's queries and pages begin among those of the batch. */
struct kvk_cuda_plan_start {
    uint64_t query;
    uint64_t page;
};

struct kvk_cuda_plan {
    struct kvk_cuda_attend launch; /* pointers are set by kvk_cuda_plan_bind() */
    size_t upload_bytes;           /* queries, pages and lists; 16-byte aligned memory */
    size_t result_bytes;           /* outputs, then LSEs */
    size_t work_bytes;             /* results and partial results, in device memory */
    uint64_t split_tokens;
    uint64_t row_count; /* entries of the lists */
    uint64_t source_count;
    uint64_t slot_count;
    uint64_t page_count;
    uint64_t query_count;
    struct kvk_attend_split split;      /* ours */
    struct kvk_cuda_plan_start *starts; /* [item_count], ours */
    bool is_shared;                     /* some items have pages in common */
};

/* `attend` has passed kvk_attend_check(); its pages are device addresses, all else is host memory.
 * KVK_EXHAUSTED: no memory, or the batch is past what one launch can count (2^31 rows or units);
 * there is then nothing to finish. */
KVK_CHECKED enum kvk_status kvk_cuda_plan_init(struct kvk_cuda_plan *plan,
                                               const struct kvk_attend *attend,
                                               const struct kvk_cuda_limits *limits,
                                               struct kvk_error *error);

/* `upload`: [upload_bytes], written whole. */
void kvk_cuda_plan_fill(const struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                        uint8_t *upload);

/* Device addresses of upload_bytes and work_bytes, both aligned to 256 bytes. Results begin where
 * `work` does. */
void kvk_cuda_plan_bind(struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                        const void *upload, void *work);

/* `results`: [result_bytes], as copied from the device. */
void kvk_cuda_plan_scatter(const struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                           const uint8_t *results);

void kvk_cuda_plan_finish(struct kvk_cuda_plan *plan);

#endif
