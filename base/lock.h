/*
 * A mutex that knows its holder, so that helpers can assert that the lock is held and that no
 * lock is held where none may be (I/O, device calls, gRPC, callbacks); and that knows whether
 * anybody waits for it, so that long work in slices can let them in.
 */
#ifndef KVK_BASE_LOCK_H
#define KVK_BASE_LOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

struct kvk_lock {
    pthread_mutex_t mutex;
    _Atomic unsigned long owner; /* pthread_self() of the holder; 0: free */
    _Atomic uint32_t waiting;    /* threads in kvk_lock() that did not get it at once */
    _Atomic uint32_t turns;      /* how often it was taken, modulo 2^32 */
};

void kvk_lock_init(struct kvk_lock *lock);
void kvk_lock_finish(struct kvk_lock *lock);
void kvk_lock(struct kvk_lock *lock);
void kvk_unlock(struct kvk_lock *lock);

/* Between two slices of long work: give it up, and take it again after one of those had it who
 * wait in kvk_lock(), if any do. To unlock and to lock would not be enough: whoever is woken by the
 * first comes too late for the second. */
void kvk_lock_pass(struct kvk_lock *lock);

bool kvk_lock_held(struct kvk_lock *lock); /* by the calling thread */

/* How many kvk_locks the calling thread holds. Code that may block asserts that it is 0. */
unsigned kvk_locks_held(void);

/* Wait on a condition with the lock held; absolute CLOCK_MONOTONIC time, UINT64_MAX: no limit.
 * False: the time was over. The condition must come from kvk_condition_init(). */
void kvk_condition_init(pthread_cond_t *condition);
bool kvk_condition_wait(pthread_cond_t *condition, struct kvk_lock *lock, uint64_t until_ns);

#endif
