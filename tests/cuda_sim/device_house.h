/* A CUDA device on the simulator, and a CPU device beside it whose memory it locks: what the tests
 * of the device share. */
#ifndef KVK_TESTS_CUDA_SIM_DEVICE_HOUSE_H
#define KVK_TESTS_CUDA_SIM_DEVICE_HOUSE_H

#include <criterion/criterion.h>
#include <string.h>

#include "base/copy.h"
#include "base/random.h"
#include "gpu/device_cuda.h"
#include "tests/cuda_sim/include/cuda_runtime_api.h"
#include "tests/cuda_sim/runtime.h"

#define MIB (UINT64_C(1) << 20)

static struct kvk_device *device;
static struct kvk_device *host;

/* Small buffers, so that small pieces go in parts too. */
static inline void device_house_open(uint32_t device_count, uint32_t late_us, uint64_t memory_bytes)
{
    static const uint32_t ordinals[] = {0, 1, 2, 3};
    const struct kvk_sim_options sim = {
        .device_count = device_count, .late_us = late_us, .memory_bytes = memory_bytes, .seed = 7};
    const struct kvk_device_cuda_options options = {
        .ordinals = ordinals, .ordinal_count = device_count, .lane_count = 3, .part_bytes = 8192};
    struct kvk_error error;
    kvk_sim_reset(&sim);
    cr_assert_eq(kvk_device_cuda_open(&options, &device, &error), KVK_OK, "%s", error.text);
    const struct kvk_device_cpu_options cpu = {.attend_thread_count = 1,
                                               .window_bytes = UINT64_C(1) << 20,
                                               .watch = kvk_device_cuda_watch(device)};
    cr_assert_eq(kvk_device_cpu_open(&cpu, &host, &error), KVK_OK, "%s", error.text);
}

/* All is given back, and no two copies touched the same bytes unordered. */
static inline void device_house_close(void)
{
    host->ops->close(host);
    device->ops->close(device);
    cr_assert_eq(kvk_sim_device_bytes(), 0, "device memory is left over");
    cr_assert_eq(kvk_sim_pinned_bytes(), 0, "locked memory is left over");
    cr_assert_eq(kvk_sim_race_count(), 0);
}

static inline struct kvk_region region_make(struct kvk_device *of, uint64_t piece_bytes,
                                            uint64_t pieces, uint64_t backed)
{
    struct kvk_region region;
    struct kvk_error error;
    cr_assert_eq(of->ops->alloc(of, piece_bytes * pieces, piece_bytes, "test", &region, &error),
                 KVK_OK);
    cr_assert_eq(of->ops->back(of, &region, 0, backed * piece_bytes, &error), KVK_OK, "%s",
                 error.text);
    return region;
}

static inline void copy_one(void *target, const void *source, uint64_t size_bytes)
{
    const struct kvk_copy copy = {.target = target, .source = source, .size_bytes = size_bytes};
    struct kvk_error error;
    cr_assert_eq(device->ops->copy(device, &copy, 1, &error), KVK_OK, "%s", error.text);
}

#endif
