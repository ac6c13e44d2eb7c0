/* Runs a trap or an edge on every set of the CPU device's kernels, with one thread and with
 * several. */
#ifndef KVK_TESTS_UNIT_GPU_EVERYWHERE_H
#define KVK_TESTS_UNIT_GPU_EVERYWHERE_H

#include <criterion/criterion.h>

#include "tests/gpu_traps.h"

static inline bool gpu_within(double error, double limit)
{
    return error <= limit;
}

static inline enum kvk_status gpu_device_attend(void *context, const struct kvk_attend *attend,
                                                struct kvk_error *error)
{
    struct kvk_device *device = context;

    return device->ops->attend(device, attend, error);
}

static inline void gpu_run_everywhere(const char *what, trap_run *run)
{
    static const char *const paths[] = {"plain", "avx2", "avx512", "avx512_bf16"};

    for (size_t path = 0; path < sizeof(paths) / sizeof(paths[0]); path++) {
        for (uint32_t threads = 1; threads <= 3; threads += 2) {
            const struct kvk_device_cpu_options options = {.attend_thread_count = threads,
                                                           .path = paths[path]};
            struct kvk_device *device = NULL;
            if (kvk_device_cpu_open(&options, &device, NULL) != KVK_OK) {
                continue; /* not on this processor */
            }
            const struct trap_target target = {
                paths[path], device, gpu_device_attend, kvk_attend_merge, gpu_within, 1e-5, 2e-5};
            cr_expect(run(&target), "%s: %s, %u threads", what, paths[path], threads);
            device->ops->close(device);
        }
    }
}

#endif
