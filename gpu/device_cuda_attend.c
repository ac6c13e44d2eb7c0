/*
 * Attention on the CUDA device: the plan of a batch is filled into pinned memory, sent, worked off,
 * and the results come back the same way. One call has a lane to itself until its results are
 * there.
 */
#include <stddef.h>

#include "base/assert.h"
#include "base/lock.h"
#include "gpu/cuda_plan.h"
#include "gpu/device_cuda_internal.h"

#define BUFFER_BYTES_MIN (UINT64_C(1) << 20)
#define ALIGNMENT UINT64_C(256)

static size_t rounded(size_t size)
{
    size_t result = BUFFER_BYTES_MIN;
    while (result < size) {
        result *= 2;
    }
    return result;
}

static cudaError_t host_need(struct kvk_cuda_lane *lane, size_t size)
{
    if (size <= lane->attend_host_size) {
        return cudaSuccess;
    }
    void *memory = NULL;
    cudaError_t result = cudaFreeHost(lane->attend_host);
    lane->attend_host = NULL;
    lane->attend_host_size = 0;
    if (result == cudaSuccess) {
        result = cudaHostAlloc(&memory, rounded(size), cudaHostAllocPortable);
    }
    if (result == cudaSuccess) {
        lane->attend_host = memory;
        lane->attend_host_size = rounded(size);
    }
    return result;
}

static cudaError_t bytes_need(struct kvk_cuda_lane *lane, size_t size)
{
    if (size <= lane->attend_bytes_size) {
        return cudaSuccess;
    }
    void *memory = NULL;
    cudaError_t result = cudaFree(lane->attend_bytes);
    lane->attend_bytes = NULL;
    lane->attend_bytes_size = 0;
    if (result == cudaSuccess) {
        result = cudaMalloc(&memory, rounded(size));
    }
    if (result == cudaSuccess) {
        lane->attend_bytes = memory;
        lane->attend_bytes_size = rounded(size);
    }
    return result;
}

/* The GPU that has the pages: all of a batch lie in one shard, and so on one. The first, where
 * there is no page at all. */
static enum kvk_status gpu_find(struct kvk_device_cuda *cuda, const struct kvk_attend *attend,
                                struct kvk_cuda_gpu **gpu, struct kvk_error *error)
{
    struct kvk_cuda_range range;
    *gpu = &cuda->gpus[0];
    for (uint32_t i = 0; i < attend->item_count; i++) {
        const struct kvk_attend_item *item = &attend->items[i];
        for (uint32_t page = 0; page < item->page_count; page++) {
            if (item->pages[page] == NULL) {
                continue;
            }
            if (!kvk_cuda_range_find(cuda, item->pages[page], 1, &range) || range.gpu < 0) {
                return kvk_fail(error, KVK_INVALID, KVK_CAUSE_NONE, "pages",
                                "a page lies in no memory of a GPU");
            }
            *gpu = &cuda->gpus[range.gpu];
            return KVK_OK;
        }
    }
    return KVK_OK;
}

static cudaError_t launch(struct kvk_cuda_lane *lane, const struct kvk_attend *attend,
                          struct kvk_cuda_plan *plan)
{
    uint8_t *work =
        lane->attend_bytes + (plan->upload_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    kvk_cuda_plan_bind(plan, attend, lane->attend_bytes, work);
    cudaError_t result = cudaMemcpyAsync(lane->attend_bytes, lane->attend_host, plan->upload_bytes,
                                         cudaMemcpyHostToDevice, lane->stream);
    if (result == cudaSuccess) {
        result = (cudaError_t)kvk_cuda_attend_launch(&plan->launch, lane->stream);
    }
    if (result == cudaSuccess) {
        result = cudaMemcpyAsync(lane->attend_host, work, plan->result_bytes,
                                 cudaMemcpyDeviceToHost, lane->stream);
    }
    cudaError_t waited = cudaStreamSynchronize(lane->stream); /* also where it failed half-way */
    return result == cudaSuccess ? waited : result;
}

static enum kvk_status attend_on(struct kvk_device_cuda *cuda, struct kvk_cuda_lane *lane,
                                 const struct kvk_attend *attend, struct kvk_error *error)
{
    struct kvk_cuda_gpu *gpu = lane->gpu;
    const struct kvk_cuda_limits limits = {
        .multiprocessor_count = (uint32_t)gpu->properties.multiProcessorCount,
        .shared_bytes = (uint32_t)gpu->properties.sharedMemPerBlockOptin,
        .split_tokens = cuda->split_tokens};
    struct kvk_cuda_plan plan;
    enum kvk_status status = kvk_cuda_plan_init(&plan, attend, &limits, error);
    if (status != KVK_OK) {
        return status;
    }
    size_t host = plan.upload_bytes > plan.result_bytes ? plan.upload_bytes : plan.result_bytes;
    cudaError_t result = host_need(lane, host);
    if (result == cudaSuccess) {
        result = bytes_need(lane, plan.upload_bytes + ALIGNMENT + plan.work_bytes);
    }
    if (result == cudaSuccess) {
        kvk_cuda_plan_fill(&plan, attend, lane->attend_host);
        result = launch(lane, attend, &plan);
    }
    if (result == cudaSuccess) {
        kvk_cuda_plan_scatter(&plan, attend, lane->attend_host);
    } else {
        status = kvk_cuda_fail(cuda, gpu, result, "attending", error);
    }
    kvk_cuda_plan_finish(&plan);
    return status;
}

enum kvk_status kvk_cuda_attend(struct kvk_device *device, const struct kvk_attend *attend,
                                struct kvk_error *error)
{
    struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);
    struct kvk_cuda_gpu *gpu = NULL;
    KVK_ASSERT(kvk_locks_held() == 0);
    enum kvk_status status = kvk_attend_check(attend, error);
    if (status == KVK_OK) {
        status = gpu_find(cuda, attend, &gpu, error);
    }
    if (status == KVK_OK) {
        KVK_ASSERT(gpu != NULL);
        status = kvk_cuda_enter(cuda, gpu, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_cuda_lane *lane = kvk_cuda_lane_take(gpu);
    status = attend_on(cuda, lane, attend, error);
    kvk_cuda_lane_give(lane);
    return status;
}
