/* Copying many small pieces in one launch, wherever they lie. */
#include "gpu/kernels/device.cuh"
#include "gpu/kernels/kernels.h"

#define COPY_THREADS 128
/* What a block copies at most of a piece: small enough that large pieces are shared by many. */
#define COPY_PART_BYTES (16 * 1024)
/* Reads that a thread has under way together: pieces may lie in the host's memory, far away. */
#define COPY_READS 4

/* 16 bytes at once. */
struct alignas(16) copy_vector {
    uint32_t words[4];
};

struct copy_launch {
    const kvk_cuda_piece *pieces;
    uint32_t parts; /* of a piece */
};

/* Units of one type, aligned at both ends. */
template <typename Unit>
__device__ __forceinline__ void copy_units(uint8_t *target, const uint8_t *source, uint64_t count)
{
    const Unit *from = (const Unit *)(const void *)source;
    Unit *to = (Unit *)(void *)target;
    uint64_t i = threadIdx.x;

    for (; i + (COPY_READS - 1) * COPY_THREADS < count; i += COPY_READS * COPY_THREADS) {
        Unit units[COPY_READS];
#pragma unroll
        for (uint32_t j = 0; j < COPY_READS; j++) {
            units[j] = from[i + j * COPY_THREADS];
        }
#pragma unroll
        for (uint32_t j = 0; j < COPY_READS; j++) {
            to[i + j * COPY_THREADS] = units[j];
        }
    }
    for (; i < count; i += COPY_THREADS) {
        to[i] = from[i];
    }
}

/* The widest unit that both ends agree on, with single bytes before and after. */
template <typename Unit>
__device__ __forceinline__ void copy_aligned(uint8_t *target, const uint8_t *source, uint64_t size)
{
    uint64_t before = (0 - (uint64_t)(uintptr_t)target) % sizeof(Unit);

    if (before > size) {
        before = size;
    }
    uint64_t count = (size - before) / sizeof(Unit);
    uint64_t after = before + count * sizeof(Unit);
    copy_units<uint8_t>(target, source, before);
    copy_units<Unit>(target + before, source + before, count);
    copy_units<uint8_t>(target + after, source + after, size - after);
}

__global__ void __launch_bounds__(COPY_THREADS) copy_pieces(copy_launch launch)
{
    const kvk_cuda_piece piece = launch.pieces[blockIdx.x / launch.parts];
    uint64_t begin = (uint64_t)(blockIdx.x % launch.parts) * COPY_PART_BYTES;

    if (begin >= piece.size_bytes) {
        return;
    }
    uint64_t left = piece.size_bytes - begin;
    uint64_t size = left < COPY_PART_BYTES ? left : COPY_PART_BYTES;
    const uint8_t *source = (const uint8_t *)piece.source + begin;
    uint8_t *target = (uint8_t *)piece.target + begin;
    uint64_t apart = (uint64_t)(uintptr_t)source ^ (uint64_t)(uintptr_t)target;
    if (apart % sizeof(copy_vector) == 0) {
        copy_aligned<copy_vector>(target, source, size);
    } else if (apart % sizeof(uint32_t) == 0) {
        copy_aligned<uint32_t>(target, source, size);
    } else {
        copy_units<uint8_t>(target, source, size);
    }
}

/* All kernels are built alike: one speaks for them. */
extern "C" int kvk_cuda_probe(void)
{
    return kvk_probe(copy_pieces);
}

extern "C" int kvk_cuda_copy_launch(const struct kvk_cuda_piece *pieces, uint32_t piece_count,
                                    uint64_t size_bytes_max, void *stream)
{
    uint64_t parts = (size_bytes_max + COPY_PART_BYTES - 1) / COPY_PART_BYTES;
    copy_launch launch = {pieces, (uint32_t)parts};

    if (piece_count == 0 || parts == 0) {
        return 0;
    }
    if (parts * piece_count > INT32_MAX) {
        return 1; /* cudaErrorInvalidValue: past the largest grid */
    }
    return kvk_launch(copy_pieces, dim3((uint32_t)parts * piece_count), COPY_THREADS, 0, 0, stream,
                      launch);
}
