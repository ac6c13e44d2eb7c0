/*
 * The simulator's device side, as the kernels see it through their device.cuh: what a thread of a
 * block asks for. Every call names the line it was made at, which is how sites are told apart.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvk_sim
{

struct place {
    uint32_t x, y, z;
};

/* Of the running thread. */
uint32_t thread_index(void);
place block_index(void);

void barrier(const char *file, int line);
uint8_t *shared_memory(void);

/* 4 or 16 bytes. */
void copy_async(void *shared, const void *global, uint32_t size_bytes, bool take, const char *file,
                int line);
void copy_async_close(void);
void copy_async_wait(uint32_t newest_groups);

/* What the lanes of a warp do together. */
enum warp_work {
    WARP_SHUFFLE_XOR,
    WARP_LOAD_MATRICES,
    WARP_LOAD_MATRICES_TRANSPOSED,
    WARP_MULTIPLY_BF16,
    WARP_MULTIPLY_FP16,
};

struct lane_in {
    uint32_t a[4];
    uint32_t b[2];
    float d[4];
    const void *address;
    uint32_t mask;
};

struct lane_out {
    uint32_t words[4];
    float d[4];
};

lane_out warp(enum warp_work work, const lane_in &in, const char *file, int line);

/* Can the GPU run the kernels? A cudaError_t. */
int probe(void);

/* Run `kernel(parameters)` for each thread of each block, in stream order. Ends the process where
 * a launch needs more shared memory than its kernel asks for, or launches of a kernel ask for
 * different sizes: on a GPU one thread's launch would fail by what another asked for. */
typedef void kernel_call(const void *parameters);
int launch(const void *kernel, kernel_call *call, const void *parameters, size_t parameters_bytes,
           place grid, uint32_t block_threads, uint32_t shared_bytes, uint32_t shared_bytes_max,
           void *stream);

float fp16_widen(uint16_t bits);
uint16_t fp16_narrow(float value);

} // namespace kvk_sim
