/*
 * The simulator's device side, as tests see it: kernels run on the processor, each thread of a
 * block a fiber.
 *
 * A thread runs until it waits for others: at a barrier, or at something that a warp does together.
 * Which thread goes on then is the order's choice. A kernel that is right gives the same bytes in
 * every order; one that misses a barrier or a wait meets memory that is not there yet, and that is
 * poisoned with NaN: shared memory when a block begins, and what an asynchronous copy will write
 * from its start to its wait. What can be seen at once ends the process with a sentence on stderr
 * that begins with "cuda_sim:": threads at different barriers, threads that wait for one that has
 * ended, addresses outside shared memory or not aligned, copies that nobody waits for.
 *
 * Not simulated: time, blocks side by side, and memory that other blocks see late.
 *
 * Locking: options and faults are the process's, to be set while nothing runs. Kernels may run on
 * several threads at a time.
 */
#ifndef KVK_TESTS_CUDA_SIM_DEVICE_SIDE_H
#define KVK_TESTS_CUDA_SIM_DEVICE_SIDE_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Which thread goes on when one waits; blocks of a grid run in the same order. */
enum kvk_sim_order {
    KVK_SIM_FORWARD = 0,
    KVK_SIM_REVERSE = 1,
    KVK_SIM_RANDOM = 2, /* and threads pause where they need not */
};

void kvk_sim_order_set(enum kvk_sim_order order, uint64_t seed);

/* Shared memory a block may have; more is cudaErrorInvalidValue. At first that of sm_80. */
void kvk_sim_shared_limit_set(uint32_t size_bytes);
uint32_t kvk_sim_shared_limit(void);

/* Faults to be planted into kernels as they are. Sites are numbered in the order in which they are
 * first come to: see kvk_sim_barrier_count(). */
struct kvk_sim_faults {
    uint32_t skipped_barrier;   /* its number from 1 on: nobody waits there; 0: none */
    uint32_t divergent_barrier; /* its number from 1 on: the last warp does not come; 0: none */
    uint32_t early_waits;       /* every wait leaves this many groups more under way */
    bool forgotten_close;       /* groups are never closed, so waits see none */
};

void kvk_sim_faults_set(const struct kvk_sim_faults *faults);

/* Barriers, as places in the source, that were come to since the last kvk_sim_faults_set(). */
uint32_t kvk_sim_barrier_count(void);

/* Kernels launched since the process began. */
uint64_t kvk_sim_kernel_count(void);

#ifdef __cplusplus
}
#endif

#endif
