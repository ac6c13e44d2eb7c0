/*
 * The stand-in for CUDA's runtime library: what tests, and the simulator's device side, ask of it.
 *
 * Streams are queues, each worked off by a thread of its own that starts late on purpose; copies
 * land when the thread comes to them, and what they will write is poisoned until then. Device
 * memory comes poisoned, lies between guard pages and cannot be touched by the processor but while
 * a kernel runs. Copies whose order nothing fixes are told: see kvk_sim_race_count(). A handle for
 * another process names a memory file that is fetched over a socket, so that nothing is left over
 * where a process is killed.
 *
 * Locking: one lock of its own, never held while a copy or a kernel runs.
 */
#ifndef KVK_TESTS_CUDA_SIM_RUNTIME_H
#define KVK_TESTS_CUDA_SIM_RUNTIME_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What a launch of a kernel becomes: `run(context)` when the stream comes to it, on the stream's
 * thread. `run` frees its context. `stream` is a cudaStream_t; a cudaError_t is answered. */
typedef void kvk_sim_kernel(void *context);
int kvk_sim_launch(void *stream, kvk_sim_kernel *run, void *context);

/* Whether the current GPU can run the kernels: a cudaError_t, as cudaFuncGetAttributes() has it. */
int kvk_sim_probe(void);

struct kvk_sim_options {
    uint32_t device_count; /* 0: there is no driver */
    uint64_t memory_bytes; /* of each device; 0: 1 GiB */
    uint32_t late_us;      /* a random time up to this before each piece of work; 0: none */
    uint64_t seed;
};

/* Begin anew. Nothing of before may be in use. Without it the options come from the variable
 * KVKEEP_CUDA_SIM, "devices=2 memory=1048576 late_us=200 seed=1", or are one device. */
void kvk_sim_reset(const struct kvk_sim_options *options);

/* The nth call from now of this name ("cudaMalloc"; 1: the next) fails with this cudaError_t. Where
 * sticky, the device is lost: every later call on it fails so. KVKEEP_CUDA_SIM_FAULT names a file
 * that says the same, "cudaMalloc 1 2 0": looked for at each call, and removed when taken. */
void kvk_sim_fail(const char *call, uint32_t nth, int error, bool sticky);

uint64_t kvk_sim_call_count(const char *call);
/* Work that touches the same bytes, one of them writing, with nothing that orders it. */
uint64_t kvk_sim_race_count(void);
/* Bytes of device memory that are allocated, over all devices; and of pinned host memory. */
uint64_t kvk_sim_device_bytes(void);
uint64_t kvk_sim_pinned_bytes(void);
/* Processes that have an allocation of this one open, now. */
uint32_t kvk_sim_import_count(void);
/* Read and write device memory as no kernel would: for tests. Waits for nothing. */
void kvk_sim_peek(void *target, const void *device_memory, uint64_t size_bytes);
void kvk_sim_poke(void *device_memory, const void *source, uint64_t size_bytes);

#ifdef __cplusplus
}
#endif

#endif
