/*
 * CUDA's runtime interface as far as the stand-in has it, under the name that CUDA's own header
 * has: so gpu/device_cuda*.c are compiled unchanged where there is no toolkit. What is promised is
 * CUDA's; what is different here is in tests/cuda_sim/runtime.h.
 */
#ifndef KVK_TESTS_CUDA_SIM_INCLUDE_CUDA_RUNTIME_API_H
#define KVK_TESTS_CUDA_SIM_INCLUDE_CUDA_RUNTIME_API_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVK_SIM_COPY(name, number)
#define KVK_SIM_ATTRIBUTE(name, number)
#define KVK_SIM_FLAG(name, number)
#define KVK_SIM_ERROR(name, number) name = (number),
enum cudaError {
#include "tests/cuda_sim/include/values.inc"
};
#undef KVK_SIM_ERROR
#undef KVK_SIM_COPY
#undef KVK_SIM_ATTRIBUTE
#undef KVK_SIM_FLAG

#define KVK_SIM_ERROR(name, number)
#define KVK_SIM_ATTRIBUTE(name, number)
#define KVK_SIM_FLAG(name, number)
#define KVK_SIM_COPY(name, number) name = (number),
enum cudaMemcpyKind {
#include "tests/cuda_sim/include/values.inc"
};
#undef KVK_SIM_COPY
#undef KVK_SIM_ATTRIBUTE

#define KVK_SIM_COPY(name, number)
#define KVK_SIM_ATTRIBUTE(name, number) name = (number),
enum cudaDeviceAttr {
#include "tests/cuda_sim/include/values.inc"
};
#undef KVK_SIM_ATTRIBUTE
#undef KVK_SIM_FLAG

#define KVK_SIM_ATTRIBUTE(name, number)
#define KVK_SIM_FLAG(name, number) name = (number),
enum kvk_sim_flags {
#include "tests/cuda_sim/include/values.inc"
};
#undef KVK_SIM_ERROR
#undef KVK_SIM_COPY
#undef KVK_SIM_ATTRIBUTE
#undef KVK_SIM_FLAG

typedef enum cudaError cudaError_t;
typedef struct CUstream_st *cudaStream_t;
typedef struct CUevent_st *cudaEvent_t;

typedef struct {
    char reserved[64];
} cudaIpcMemHandle_t;

typedef struct {
    char bytes[16];
} cudaUUID_t;

struct cudaDeviceProp {
    char name[256];
    cudaUUID_t uuid;
    size_t totalGlobalMem;
    int major;
    int minor;
    int multiProcessorCount;
    size_t sharedMemPerBlockOptin;
};

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device);
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device);
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes);
cudaError_t cudaGetLastError(void);
const char *cudaGetErrorString(cudaError_t error);

cudaError_t cudaMalloc(void **pointer, size_t size);
cudaError_t cudaFree(void *pointer);
cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned int flags);
cudaError_t cudaFreeHost(void *pointer);
cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned int flags);
cudaError_t cudaHostUnregister(void *pointer);

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamQuery(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags);
cudaError_t cudaDeviceSynchronize(void);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaEventQuery(cudaEvent_t event);

cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t size, enum cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source,
                              size_t source_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaMemsetAsync(void *target, int value, size_t size, cudaStream_t stream);

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer);
cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags);
cudaError_t cudaIpcCloseMemHandle(void *pointer);

#ifdef __cplusplus
}
#endif

#endif
