/*
 * A small fixed set of threads that share jobs, each cut into parts.
 *
 * The thread that brings a job works on it too and returns when its last part is done, so a job
 * goes on even where every other thread is busy with somebody else's. Jobs live on the stack of
 * their callers: the pool allocates nothing after it was made, and there are never more jobs
 * than callers.
 *
 * Locking: one inner lock, held only to claim and to count parts, never while a part runs.
 */
#ifndef KVK_GPU_THREADS_H
#define KVK_GPU_THREADS_H

#include <stdint.h>

#include "base/status.h"

#define KVK_THREAD_COUNT_MAX 1024

struct kvk_threads;

/* One part of a job. `thread` is below kvk_threads_count(), and no two parts of one job run at
 * the same time with the same one: scratch memory can be kept per thread. 0 is the caller. */
typedef void kvk_threads_part(void *context, uint32_t part, uint32_t thread);

/* `thread_count` counts the caller: 1 makes no thread at all. 1 to KVK_THREAD_COUNT_MAX.
 * KVK_EXHAUSTED: no memory, or no more threads. */
KVK_CHECKED enum kvk_status kvk_threads_create(uint32_t thread_count, const char *name,
                                               struct kvk_threads **threads,
                                               struct kvk_error *error);

/* No job may be running. NULL is fine. */
void kvk_threads_destroy(struct kvk_threads *threads);

uint32_t kvk_threads_count(const struct kvk_threads *threads);

/* Run parts 0 to part_count - 1, in any order, and return when all are done; what they wrote is
 * then visible to the caller. Several threads may bring jobs at the same time. */
void kvk_threads_run(struct kvk_threads *threads, uint32_t part_count, kvk_threads_part *run,
                     void *context);

#endif
