#include "gpu/device_cuda.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/lock.h"
#include "base/log.h"
#include "gpu/device_cuda_internal.h"
#include "gpu/kernels/kernels.h"

#define LANE_COUNT_DEFAULT 8
#define PART_BYTES_DEFAULT (UINT64_C(1) << 20)
#define PART_BYTES_MIN UINT64_C(4096)

/* The oldest that the kernels are built for. */
#define COMPUTE_CAPABILITY_MIN 80

/* ---- Lanes ---- */

struct kvk_cuda_lane *kvk_cuda_lane_take(struct kvk_cuda_gpu *gpu)
{
    (void)pthread_mutex_lock(&gpu->lanes_lock);
    while (gpu->free_lanes == NULL) {
        (void)pthread_cond_wait(&gpu->lane_free, &gpu->lanes_lock);
    }
    struct kvk_cuda_lane *lane = gpu->free_lanes;
    gpu->free_lanes = lane->next_free;
    (void)pthread_mutex_unlock(&gpu->lanes_lock);
    return lane;
}

void kvk_cuda_lane_give(struct kvk_cuda_lane *lane)
{
    struct kvk_cuda_gpu *gpu = lane->gpu;

    (void)pthread_mutex_lock(&gpu->lanes_lock);
    lane->next_free = gpu->free_lanes;
    gpu->free_lanes = lane;
    (void)pthread_cond_signal(&gpu->lane_free);
    (void)pthread_mutex_unlock(&gpu->lanes_lock);
}

static cudaError_t lane_init(struct kvk_cuda_gpu *gpu, struct kvk_cuda_lane *lane)
{
    lane->gpu = gpu;
    cudaError_t result = cudaStreamCreateWithFlags(&lane->stream, cudaStreamNonBlocking);
    for (int i = 0; i < KVK_CUDA_RING && result == cudaSuccess; i++) {
        result = cudaEventCreateWithFlags(&lane->events[i], cudaEventDisableTiming);
    }
    return result;
}

/* Of a lost GPU nothing can be given back; the driver has it. */
static void lane_finish(struct kvk_cuda_lane *lane)
{
    (void)cudaFree(lane->list);
    (void)cudaFree(lane->attend_bytes);
    (void)cudaFreeHost(lane->attend_host);
    (void)cudaFreeHost(lane->parts);
    for (int i = 0; i < KVK_CUDA_RING; i++) {
        if (lane->events[i] != NULL) {
            (void)cudaEventDestroy(lane->events[i]);
        }
    }
    if (lane->stream != NULL) {
        (void)cudaStreamDestroy(lane->stream);
    }
}

/* ---- GPUs ---- */

static enum kvk_status fail_gpu(const struct kvk_cuda_gpu *gpu, cudaError_t result,
                                struct kvk_error *error)
{
    (void)cudaGetLastError();
    return kvk_fail_limit(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "device.gpus", (uint64_t)result,
                          0, "GPU %d cannot be used: %s", gpu->ordinal, cudaGetErrorString(result));
}

static void gpu_close(struct kvk_device_cuda *cuda, struct kvk_cuda_gpu *gpu)
{
    if (gpu->lanes == NULL) {
        return;
    }
    (void)cudaSetDevice(gpu->ordinal);
    for (uint32_t i = 0; i < cuda->lane_count; i++) {
        lane_finish(&gpu->lanes[i]);
    }
    free(gpu->lanes);
    gpu->lanes = NULL;
    (void)pthread_cond_destroy(&gpu->lane_free);
    (void)pthread_mutex_destroy(&gpu->lanes_lock);
}

static enum kvk_status gpu_open(struct kvk_device_cuda *cuda, struct kvk_cuda_gpu *gpu,
                                struct kvk_error *error)
{
    int reaches = 0;
    cudaError_t result = cudaSetDevice(gpu->ordinal);
    if (result == cudaSuccess) {
        result = cudaGetDeviceProperties(&gpu->properties, gpu->ordinal);
    }
    if (result == cudaSuccess) {
        result = cudaDeviceGetAttribute(&reaches, cudaDevAttrCanUseHostPointerForRegisteredMem,
                                        gpu->ordinal);
    }
    if (result != cudaSuccess) {
        return fail_gpu(gpu, result, error);
    }
    gpu->reaches_host = reaches != 0;
    int capability = gpu->properties.major * 10 + gpu->properties.minor;
    if (capability < COMPUTE_CAPABILITY_MIN) {
        return kvk_fail_limit(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "device.gpus",
                              (uint64_t)capability, COMPUTE_CAPABILITY_MIN,
                              "GPU %d is of compute capability %d.%d; kvkeep needs 8.0 or later",
                              gpu->ordinal, gpu->properties.major, gpu->properties.minor);
    }
    result = (cudaError_t)kvk_cuda_probe();
    if (result != cudaSuccess) {
        return fail_gpu(gpu, result, error);
    }
    gpu->lanes = calloc(cuda->lane_count, sizeof(*gpu->lanes));
    if (gpu->lanes == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a GPU's lanes");
    }
    (void)pthread_mutex_init(&gpu->lanes_lock, NULL);
    (void)pthread_cond_init(&gpu->lane_free, NULL);
    for (uint32_t i = 0; i < cuda->lane_count && result == cudaSuccess; i++) {
        result = lane_init(gpu, &gpu->lanes[i]);
        gpu->lanes[i].next_free = gpu->free_lanes;
        gpu->free_lanes = &gpu->lanes[i];
    }
    return result == cudaSuccess ? KVK_OK : fail_gpu(gpu, result, error);
}

/* ---- The device ---- */

static void cuda_info(struct kvk_device *device, struct kvk_device_info *info)
{
    const struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);
    const struct kvk_cuda_gpu *first = &cuda->gpus[0];

    *info = (struct kvk_device_info){.thread_count = cuda->gpu_count};
    for (uint32_t i = 0; i < cuda->gpu_count; i++) {
        info->memory_bytes += cuda->gpus[i].properties.totalGlobalMem;
    }
    (void)snprintf(info->name, sizeof(info->name), "%u x %.52s", cuda->gpu_count,
                   first->properties.name);
    (void)snprintf(info->path, sizeof(info->path), "cuda_sm_%d%d", first->properties.major,
                   first->properties.minor);
}

static void cuda_close(struct kvk_device *device)
{
    struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);

    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(atomic_load(&cuda->region_count) == 0);
    for (uint32_t i = 0; i < cuda->gpu_count; i++) {
        gpu_close(cuda, &cuda->gpus[i]);
    }
    kvk_copy_cpu_finish(&cuda->copy);
    (void)pthread_rwlock_destroy(&cuda->ranges_lock);
    (void)pthread_mutex_destroy(&cuda->health_lock);
    free(cuda->ranges);
    free(cuda);
}

static bool cuda_is_lost(const struct kvk_device *device)
{
    return atomic_load(&((const struct kvk_device_cuda *)device)->lost);
}

static const struct kvk_device_ops cuda_ops = {
    .info = cuda_info,
    .close = cuda_close,
    .alloc = kvk_cuda_alloc,
    .alloc_at = kvk_cuda_alloc_at,
    .free = kvk_cuda_free,
    .leave = kvk_cuda_leave,
    .back = kvk_cuda_back,
    .punch = kvk_cuda_punch,
    .backed_bytes = kvk_cuda_backed_bytes,
    .copy = kvk_cuda_copy,
    .attend = kvk_cuda_attend,
    .export = kvk_cuda_export,
    .is_lost = cuda_is_lost,
    .health = kvk_cuda_health,
};

const struct kvk_memory_watch *kvk_device_cuda_watch(struct kvk_device *device)
{
    KVK_ASSERT(device->ops == &cuda_ops);
    return &kvk_device_cuda_of(device)->watch;
}

bool kvk_device_cuda_is_built(void)
{
    return true;
}

/* ---- Opening ---- */

static enum kvk_status ordinals_check(const struct kvk_device_cuda_options *options,
                                      struct kvk_error *error)
{
    if (options->ordinal_count > KVK_CUDA_GPU_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "device.gpus",
                              options->ordinal_count, KVK_CUDA_GPU_COUNT_MAX,
                              "device.gpus names %u GPUs, more than %d", options->ordinal_count,
                              KVK_CUDA_GPU_COUNT_MAX);
    }
    for (uint32_t i = 0; i < options->ordinal_count; i++) {
        for (uint32_t k = 0; k < i; k++) {
            if (options->ordinals[i] == options->ordinals[k]) {
                return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "device.gpus",
                                      options->ordinals[i], 0, "device.gpus names GPU %u twice",
                                      options->ordinals[i]);
            }
        }
    }
    if (options->lane_count > KVK_CUDA_LANE_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "lane_count",
                              options->lane_count, KVK_CUDA_LANE_COUNT_MAX,
                              "lane_count is %u, more than %d", options->lane_count,
                              KVK_CUDA_LANE_COUNT_MAX);
    }
    return KVK_OK;
}

/* How many there are; none is told in words. */
static enum kvk_status gpus_count(uint32_t *count, struct kvk_error *error)
{
    int found = 0;
    cudaError_t result = cudaGetDeviceCount(&found);
    if (result == cudaSuccess && found > 0) {
        *count = (uint32_t)found;
        return KVK_OK;
    }
    (void)cudaGetLastError();
    const char *text = "there is no GPU";
    if (result == cudaErrorInsufficientDriver) {
        text = "there is no CUDA driver, or one older than this build needs";
    } else if (result != cudaSuccess && result != cudaErrorNoDevice) {
        text = cudaGetErrorString(result);
    }
    return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "device.kind", "no CUDA here: %s",
                    text);
}

static enum kvk_status gpus_open(struct kvk_device_cuda *cuda,
                                 const struct kvk_device_cuda_options *options,
                                 struct kvk_error *error)
{
    uint32_t found = 0;
    uint32_t wanted = options->ordinal_count == 0 ? 1 : options->ordinal_count;
    enum kvk_status status = gpus_count(&found, error);
    for (uint32_t i = 0; i < wanted && status == KVK_OK; i++) {
        uint32_t ordinal = options->ordinal_count == 0 ? 0 : options->ordinals[i];
        if (ordinal >= found) {
            return kvk_fail_limit(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "device.gpus", ordinal,
                                  found, "there is no GPU %u: CUDA counts %u, from 0", ordinal,
                                  found);
        }
        struct kvk_cuda_gpu *gpu = &cuda->gpus[cuda->gpu_count];
        gpu->ordinal = (int)ordinal;
        gpu->index = cuda->gpu_count++;
        status = gpu_open(cuda, gpu, error);
    }
    return status;
}

enum kvk_status kvk_device_cuda_open(const struct kvk_device_cuda_options *options,
                                     struct kvk_device **device, struct kvk_error *error)
{
    static const struct kvk_device_cuda_options defaults;
    static const struct kvk_device_cpu_options copy_options;

    if (options == NULL) {
        options = &defaults;
    }
    enum kvk_status status = ordinals_check(options, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_device_cuda *cuda = calloc(1, sizeof(*cuda));
    if (cuda == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a device");
    }
    cuda->device.ops = &cuda_ops;
    cuda->watch = (struct kvk_memory_watch){
        .backed = kvk_cuda_memory_backed, .leaving = kvk_cuda_memory_leaving, .context = cuda};
    cuda->lane_count = options->lane_count == 0 ? LANE_COUNT_DEFAULT : options->lane_count;
    cuda->part_bytes = options->part_bytes == 0 ? PART_BYTES_DEFAULT : options->part_bytes;
    if (cuda->part_bytes < PART_BYTES_MIN) {
        cuda->part_bytes = PART_BYTES_MIN;
    }
    cuda->split_tokens = options->split_tokens;
    (void)pthread_rwlock_init(&cuda->ranges_lock, NULL);
    (void)pthread_mutex_init(&cuda->health_lock, NULL);
    status = kvk_copy_cpu_init(&cuda->copy, &copy_options, error);
    if (status == KVK_OK) {
        status = gpus_open(cuda, options, error);
    }
    if (status != KVK_OK) {
        cuda_close(&cuda->device);
        return status;
    }
    *device = &cuda->device;
    return KVK_OK;
}
