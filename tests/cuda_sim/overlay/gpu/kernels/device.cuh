/*
 * The kernels' device.cuh, for the processor: the same names, given by the simulator. It comes
 * before the kernels' own one in the include path, so that they are compiled as they are.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "tests/cuda_sim/kernel_side.hpp"

#define __device__
#define __forceinline__ inline
#define __global__ static
#define __launch_bounds__(...)

#define KVK_WARP_THREADS 32

struct dim3 {
    uint32_t x, y, z;
    dim3(uint32_t x_count = 1, uint32_t y_count = 1, uint32_t z_count = 1)
        : x(x_count), y(y_count), z(z_count)
    {
    }
};

struct kvk_sim_thread {
    uint32_t x;
};

#define threadIdx (kvk_sim_thread{kvk_sim::thread_index()})
#define blockIdx (kvk_sim::block_index())

struct kvk_bf16 {
    uint16_t bits;
};

struct kvk_fp16 {
    uint16_t bits;
};

static inline float kvk_float_of(uint32_t bits)
{
    float value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static inline uint32_t kvk_bits_of(float value)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static inline float kvk_widen(kvk_bf16 value)
{
    return kvk_float_of((uint32_t)value.bits << 16);
}

static inline float kvk_widen(kvk_fp16 value)
{
    return kvk_sim::fp16_widen(value.bits);
}

static inline void kvk_narrow(float value, kvk_bf16 *narrow)
{
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    narrow->bits = (uint16_t)(value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fff);
}

static inline void kvk_narrow(float value, kvk_fp16 *narrow)
{
    narrow->bits = kvk_sim::fp16_narrow(value);
}

static inline float kvk_infinity(void)
{
    return INFINITY;
}

static inline float kvk_exp(float x)
{
    return exp2f(x * 1.4426950408889634F);
}

static inline void kvk_barrier(const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    kvk_sim::barrier(file, line);
}

static inline float kvk_shuffle_xor(float value, uint32_t mask, const char *file = __builtin_FILE(),
                                    int line = __builtin_LINE())
{
    kvk_sim::lane_in in = {};

    in.d[0] = value;
    in.mask = mask;
    return kvk_sim::warp(kvk_sim::WARP_SHUFFLE_XOR, in, file, line).d[0];
}

static inline uint8_t *kvk_shared_memory(void)
{
    return kvk_sim::shared_memory();
}

static inline void kvk_copy_async(void *shared, const void *global, bool take,
                                  const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    kvk_sim::copy_async(shared, global, 16, take, file, line);
}

static inline void kvk_copy_async_word(void *shared, const void *global, bool take,
                                       const char *file = __builtin_FILE(),
                                       int line = __builtin_LINE())
{
    kvk_sim::copy_async(shared, global, 4, take, file, line);
}

static inline void kvk_copy_async_close(void)
{
    kvk_sim::copy_async_close();
}

template <int kNewestGroups> static inline void kvk_copy_async_wait(void)
{
    kvk_sim::copy_async_wait(kNewestGroups);
}

static inline void kvk_load_matrices(uint32_t values[4], const void *shared,
                                     const char *file = __builtin_FILE(),
                                     int line = __builtin_LINE())
{
    kvk_sim::lane_in in = {};

    in.address = shared;
    kvk_sim::lane_out out = kvk_sim::warp(kvk_sim::WARP_LOAD_MATRICES, in, file, line);
    memcpy(values, out.words, sizeof(out.words));
}

static inline void kvk_load_matrices_transposed(uint32_t values[4], const void *shared,
                                                const char *file = __builtin_FILE(),
                                                int line = __builtin_LINE())
{
    kvk_sim::lane_in in = {};

    in.address = shared;
    kvk_sim::lane_out out = kvk_sim::warp(kvk_sim::WARP_LOAD_MATRICES_TRANSPOSED, in, file, line);
    memcpy(values, out.words, sizeof(out.words));
}

static inline void kvk_sim_multiply(float d[4], const uint32_t a[4], const uint32_t b[2],
                                    kvk_sim::warp_work work, const char *file, int line)
{
    kvk_sim::lane_in in = {};

    memcpy(in.a, a, sizeof(in.a));
    memcpy(in.b, b, sizeof(in.b));
    memcpy(in.d, d, sizeof(in.d));
    kvk_sim::lane_out out = kvk_sim::warp(work, in, file, line);
    memcpy(d, out.d, sizeof(out.d));
}

static inline void kvk_multiply(float d[4], const uint32_t a[4], const uint32_t b[2], kvk_bf16,
                                const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    kvk_sim_multiply(d, a, b, kvk_sim::WARP_MULTIPLY_BF16, file, line);
}

static inline void kvk_multiply(float d[4], const uint32_t a[4], const uint32_t b[2], kvk_fp16,
                                const char *file = __builtin_FILE(), int line = __builtin_LINE())
{
    kvk_sim_multiply(d, a, b, kvk_sim::WARP_MULTIPLY_FP16, file, line);
}

/* A kernel and its parameters, as the simulator calls them. */
template <typename Parameters> struct kvk_sim_work {
    void (*kernel)(Parameters);
    Parameters parameters;

    static void call(const void *self)
    {
        const kvk_sim_work *work = (const kvk_sim_work *)self;
        work->kernel(work->parameters);
    }
};

template <typename Parameters> static int kvk_probe(void (*)(Parameters))
{
    return kvk_sim::probe();
}

template <typename Parameters>
static int kvk_launch(void (*kernel)(Parameters), dim3 grid, uint32_t block_threads,
                      uint32_t shared_bytes, uint32_t shared_bytes_max, void *stream,
                      Parameters parameters)
{
    kvk_sim_work<Parameters> work = {kernel, parameters};
    kvk_sim::place places = {grid.x, grid.y, grid.z};

    return kvk_sim::launch((const void *)kernel, kvk_sim_work<Parameters>::call, &work,
                           sizeof(work), places, block_threads, shared_bytes, shared_bytes_max,
                           stream);
}
