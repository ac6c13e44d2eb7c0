/*
 * What the kernels need beyond plain C++: threads of a block that work together, asynchronous
 * copies into shared memory, matrix instructions, conversions, and launching.
 *
 * All of it is in this one header, so that it can be replaced: the tests put another
 * gpu/kernels/device.cuh before this one in the include path, compile the kernels unchanged for the
 * processor, and see there what is read before its wait or its barrier. So kernels have no
 * instruction of the GPU's own, no shared memory but kvk_shared_memory(), and no other barrier.
 */
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#define KVK_WARP_THREADS 32

/* ---- Formats ---------------------------------------------------------------------------------
 * A 16-bit format is a type of its own, for kernels that are made once for each. */

struct kvk_bf16 {
    uint16_t bits;
};

struct kvk_fp16 {
    uint16_t bits;
};

__device__ __forceinline__ float kvk_float_of(uint32_t bits)
{
    return __uint_as_float(bits);
}

__device__ __forceinline__ uint32_t kvk_bits_of(float value)
{
    return __float_as_uint(value);
}

__device__ __forceinline__ float kvk_widen(kvk_bf16 value)
{
    return kvk_float_of((uint32_t)value.bits << 16);
}

__device__ __forceinline__ float kvk_widen(kvk_fp16 value)
{
    return __half2float(__ushort_as_half(value.bits));
}

/* To the nearest, ties to even. */
__device__ __forceinline__ void kvk_narrow(float value, kvk_bf16 *narrow)
{
    uint32_t bits = __float_as_uint(value);
    uint32_t odd = (bits >> 16) & 1;

    narrow->bits = (uint16_t)(value == value ? (bits + 0x7fff + odd) >> 16 : 0x7fff);
}

__device__ __forceinline__ void kvk_narrow(float value, kvk_fp16 *narrow)
{
    narrow->bits = __half_as_ushort(__float2half_rn(value));
}

__device__ __forceinline__ float kvk_infinity(void)
{
    return __int_as_float(0x7f800000);
}

/* e^x for x <= 0, and -inf: weights of a softmax. Relative error 2^-20 where it matters. */
__device__ __forceinline__ float kvk_exp(float x)
{
    return exp2f(x * 1.4426950408889634F);
}

/* ---- Threads of a block ------------------------------------------------------------------------
 */

__device__ __forceinline__ void kvk_barrier(void)
{
    __syncthreads();
}

/* The value of the lane whose number differs in the bits of `mask`; all lanes of a warp call. */
__device__ __forceinline__ float kvk_shuffle_xor(float value, uint32_t mask)
{
    return __shfl_xor_sync(0xffffffffU, value, (int)mask);
}

/* The launch's shared memory, aligned to 16 bytes. */
__device__ __forceinline__ uint8_t *kvk_shared_memory(void)
{
    extern __shared__ __align__(16) uint8_t kvk_shared_bytes[];
    return kvk_shared_bytes;
}

/* ---- Asynchronous copies -----------------------------------------------------------------------
 * A thread starts copies, closes a group of them, and waits until all but its newest groups have
 * landed. What landed is seen by the other threads after the next barrier. */

/* 16 bytes, both ends aligned to 16. Where not `take`, zeros are written and nothing is read. */
__device__ __forceinline__ void kvk_copy_async(void *shared, const void *global, bool take)
{
    uint32_t target = (uint32_t)__cvta_generic_to_shared(shared);
    uint32_t size_bytes = take ? 16 : 0;

    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"(target), "l"(global), "r"(size_bytes)
                 : "memory");
}

/* The same of 4 bytes, for rows that are not aligned to more. */
__device__ __forceinline__ void kvk_copy_async_word(void *shared, const void *global, bool take)
{
    uint32_t target = (uint32_t)__cvta_generic_to_shared(shared);
    uint32_t size_bytes = take ? 4 : 0;

    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"(target), "l"(global), "r"(size_bytes)
                 : "memory");
}

__device__ __forceinline__ void kvk_copy_async_close(void)
{
    asm volatile("cp.async.commit_group;" : : : "memory");
}

template <int kNewestGroups> __device__ __forceinline__ void kvk_copy_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" : : "n"(kNewestGroups) : "memory");
}

/* ---- Matrix instructions, by a whole warp ------------------------------------------------------
 * Fragments are as PTX has them for m16n8k16: lane l holds of D rows l / 4 and l / 4 + 8, columns
 * 2 (l % 4) and the next. */

/* Four 8x8 matrices of 16-bit values; lane l says where row l % 8 of matrix l / 8 begins. */
__device__ __forceinline__ void kvk_load_matrices(uint32_t values[4], const void *shared)
{
    uint32_t source = (uint32_t)__cvta_generic_to_shared(shared);

    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(source)
                 : "memory");
}

__device__ __forceinline__ void kvk_load_matrices_transposed(uint32_t values[4], const void *shared)
{
    uint32_t source = (uint32_t)__cvta_generic_to_shared(shared);

    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3])
                 : "r"(source)
                 : "memory");
}

/* d += a x b: [16][16] x [16][8], in fp32. The last argument chooses the format. */
__device__ __forceinline__ void kvk_multiply(float d[4], const uint32_t a[4], const uint32_t b[2],
                                             kvk_bf16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void kvk_multiply(float d[4], const uint32_t a[4], const uint32_t b[2],
                                             kvk_fp16)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* ---- Launching ---------------------------------------------------------------------------------
 */

/* 0, or the cudaError_t that keeps the current GPU from running the kernel. */
template <typename Parameters> static int kvk_probe(void (*kernel)(Parameters))
{
    struct cudaFuncAttributes attributes;
    cudaError_t error = cudaFuncGetAttributes(&attributes, (const void *)kernel);

    if (error != cudaSuccess) {
        (void)cudaGetLastError();
    }
    return (int)error;
}

/* Past this a kernel must ask for its shared memory. */
#define KVK_SHARED_BYTES_USUAL (48 * 1024)

/*
 * 0 or a cudaError_t. `parameters` are copied. `shared_bytes_max` is the same in all launches of a
 * kernel: what it asks for is the kernel's, not the launch's, and were it lowered by one thread, a
 * launch of another that needs more would fail.
 */
template <typename Parameters>
static int kvk_launch(void (*kernel)(Parameters), dim3 grid, uint32_t block_threads,
                      uint32_t shared_bytes, uint32_t shared_bytes_max, void *stream,
                      Parameters parameters)
{
    if (shared_bytes > KVK_SHARED_BYTES_USUAL) {
        cudaError_t error =
            cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 (int)shared_bytes_max);
        if (error != cudaSuccess) {
            (void)cudaGetLastError(); /* a refused wish is no fault of the next call */
            return (int)error;
        }
    }
    kernel<<<grid, dim3(block_threads), shared_bytes, (cudaStream_t)stream>>>(parameters);
    return (int)cudaGetLastError();
}
