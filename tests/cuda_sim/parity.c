/* The stand-in's numbers are CUDA's: compiled with CUDA's own header, where there is one. */
#include <cuda_runtime_api.h>

#define KVK_SIM_SAME(name, number) _Static_assert((int)(name) == (number), #name);
#define KVK_SIM_ERROR(name, number) KVK_SIM_SAME(name, number)
#define KVK_SIM_COPY(name, number) KVK_SIM_SAME(name, number)
#define KVK_SIM_ATTRIBUTE(name, number) KVK_SIM_SAME(name, number)
#define KVK_SIM_FLAG(name, number) KVK_SIM_SAME(name, number)
#include "tests/cuda_sim/include/values.inc"

_Static_assert(sizeof(cudaIpcMemHandle_t) == 64, "the handle's size");
_Static_assert(sizeof(((struct cudaDeviceProp *)0)->uuid) == 16, "the name of a GPU");
