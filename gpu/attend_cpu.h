/*
 * Attention of the CPU device: one plan and one driver over kernels that are chosen at run time.
 *
 * Work is cut by item, KV head, rows of queries, and ranges of tokens; the results of the ranges
 * are merged by their LSE. The kernels do the arithmetic (gpu/attend_kernel.h).
 */
#ifndef KVK_GPU_ATTEND_CPU_H
#define KVK_GPU_ATTEND_CPU_H

#include "gpu/attend.h"

struct kvk_threads;
struct kvk_attend_kernel;

/* The kernels called `path`, or the best that this processor runs where path is NULL. NULL: not
 * known, or not for this processor. Static, never freed. */
const struct kvk_attend_kernel *kvk_attend_kernel_find(const char *path);
const char *kvk_attend_kernel_name(const struct kvk_attend_kernel *kernel);

/* `attend` has passed kvk_attend_check(). KVK_EXHAUSTED: no memory for partial results; then
 * nothing was written. */
KVK_CHECKED enum kvk_status kvk_attend_cpu_run(const struct kvk_attend_kernel *kernel,
                                               struct kvk_threads *threads,
                                               const struct kvk_attend *attend,
                                               struct kvk_error *error);

#endif
