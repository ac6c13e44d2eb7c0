/*
 * What a failure of CUDA means to the daemon: a refusal, or the end of the device.
 *
 * An error is sticky where the context is broken: every later call fails alike, whatever it is. No
 * list of numbers is complete, so after any failure that is not known to be harmless the GPU is
 * asked for something that always works.
 */
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/lock.h"
#include "base/log.h"
#include "gpu/device_cuda_internal.h"

/* Failures of one call alone. */
static bool is_harmless(cudaError_t result)
{
    return result == cudaErrorMemoryAllocation || result == cudaErrorNotSupported ||
           result == cudaErrorHostMemoryAlreadyRegistered ||
           result == cudaErrorHostMemoryNotRegistered;
}

/* Failures after which nothing works any more. */
static bool is_sticky(cudaError_t result)
{
    static const int sticky[] = {
        cudaErrorDevicesUnavailable,
        cudaErrorNoDevice,
        cudaErrorECCUncorrectable,
        cudaErrorNvlinkUncorrectable,
        cudaErrorIllegalAddress,
        cudaErrorLaunchTimeout,
        cudaErrorContextIsDestroyed,
        cudaErrorAssert,
        cudaErrorHardwareStackError,
        cudaErrorIllegalInstruction,
        cudaErrorMisalignedAddress,
        cudaErrorInvalidAddressSpace,
        cudaErrorInvalidPc,
        cudaErrorLaunchFailure,
        cudaErrorSystemNotReady,
        cudaErrorMpsConnectionFailed,
        cudaErrorUnknown,
    };
    for (size_t i = 0; i < sizeof(sticky) / sizeof(sticky[0]); i++) {
        if ((int)result == sticky[i]) {
            return true;
        }
    }
    return false;
}

static bool is_broken(const struct kvk_cuda_gpu *gpu)
{
    size_t free_bytes;
    size_t total_bytes;
    (void)cudaGetLastError(); /* what was only that call's is over with it */
    return cudaSetDevice(gpu->ordinal) != cudaSuccess ||
           cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess;
}

enum kvk_status kvk_cuda_fail_lost(struct kvk_error *error)
{
    return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_NONE, "",
                    "the GPU has fallen away, with what lay on it; restart the daemon to use it "
                    "again");
}

/* What of it is asked for later. Of a loss the first word counts, and the last of what is survived.
 */
static void health_note(struct kvk_device_cuda *cuda, const struct kvk_cuda_gpu *gpu,
                        cudaError_t result, bool is_loss, const char *what)
{
    const char *text = cudaGetErrorString(result);
    (void)pthread_mutex_lock(&cuda->health_lock);
    if (cuda->lost_error == 0) {
        cuda->lost_error = is_loss ? (int32_t)result : 0;
        (void)snprintf(cuda->reason, sizeof(cuda->reason), "GPU %d: %s: %s (CUDA error %d)",
                       gpu->ordinal, what, text, (int)result);
    }
    (void)pthread_mutex_unlock(&cuda->health_lock);
}

void kvk_cuda_health(struct kvk_device *device, struct kvk_device_health *health)
{
    struct kvk_device_cuda *cuda = kvk_device_cuda_of(device);
    *health = (struct kvk_device_health){
        .can_fail = true,
        .lost = atomic_load(&cuda->lost),
        .memory_failures = atomic_load(&cuda->memory_failures),
        .call_failures = atomic_load(&cuda->call_failures),
    };
    (void)pthread_mutex_lock(&cuda->health_lock);
    health->error = cuda->lost_error;
    memcpy(health->reason, cuda->reason, sizeof(health->reason));
    (void)pthread_mutex_unlock(&cuda->health_lock);
}

enum kvk_status kvk_cuda_fail(struct kvk_device_cuda *cuda, const struct kvk_cuda_gpu *gpu,
                              cudaError_t result, const char *what, struct kvk_error *error)
{
    KVK_ASSERT(result != cudaSuccess);
    KVK_ASSERT(kvk_locks_held() == 0);
    const char *text = cudaGetErrorString(result);
    bool is_loss = is_sticky(result) || (!is_harmless(result) && is_broken(gpu));
    bool is_counted = result != cudaErrorHostMemoryAlreadyRegistered &&
                      result != cudaErrorHostMemoryNotRegistered &&
                      result != cudaErrorNotSupported; /* these are answers */
    if (is_loss || is_counted) {
        health_note(cuda, gpu, result, is_loss, what);
    }
    if (is_loss) {
        if (!atomic_exchange(&cuda->lost, true)) {
            kvk_log(KVK_LOG_ERROR, "gpu_lost", "gpu=%d error=%d text=\"%s: %s\"", gpu->ordinal,
                    (int)result, what, text);
        }
        return kvk_fail_limit(error, KVK_PRECONDITION, KVK_CAUSE_NONE, "", (uint64_t)result, 0,
                              "GPU %d is lost: %s: %s", gpu->ordinal, what, text);
    }
    (void)cudaGetLastError();
    if (is_counted) {
        atomic_fetch_add(
            result == cudaErrorMemoryAllocation ? &cuda->memory_failures : &cuda->call_failures, 1);
    }
    if (result == cudaErrorMemoryAllocation) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", (uint64_t)result, 0,
                              "GPU %d: %s: %s (is other work on it?)", gpu->ordinal, what, text);
    }
    enum kvk_status status = result == cudaErrorNotSupported ? KVK_UNSUPPORTED : KVK_INTERNAL;
    return kvk_fail_limit(error, status, KVK_CAUSE_NONE, "", (uint64_t)result, 0, "GPU %d: %s: %s",
                          gpu->ordinal, what, text);
}

enum kvk_status kvk_cuda_enter(struct kvk_device_cuda *cuda, const struct kvk_cuda_gpu *gpu,
                               struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    if (atomic_load(&cuda->lost)) {
        return kvk_cuda_fail_lost(error);
    }
    cudaError_t result = cudaSetDevice(gpu->ordinal);
    return result == cudaSuccess ? KVK_OK
                                 : kvk_cuda_fail(cuda, gpu, result, "choosing the GPU", error);
}
