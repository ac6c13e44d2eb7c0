/*
 * Copies of the CPU device: streaming stores that leave the caches to others, in small steps
 * that yield the processor, with the checksum taken in the same pass over the memory.
 */
#ifndef KVK_GPU_COPY_CPU_H
#define KVK_GPU_COPY_CPU_H

#include <stdint.h>

#include "gpu/device.h"

struct kvk_threads;

struct kvk_copy_cpu {
    struct kvk_threads *threads; /* ours */
    uint64_t step_bytes;
    uint32_t test_delay_us;
};

KVK_CHECKED enum kvk_status kvk_copy_cpu_init(struct kvk_copy_cpu *copy,
                                              const struct kvk_device_cpu_options *options,
                                              struct kvk_error *error);
void kvk_copy_cpu_finish(struct kvk_copy_cpu *copy);

/* Thread safe. Pieces are dealt out to the threads; a lone piece without a checksum is cut. */
void kvk_copy_cpu_run(struct kvk_copy_cpu *copy, const struct kvk_copy *copies,
                      uint32_t copy_count);

#endif
