#include "base/lock.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "base/assert.h"
#include "base/clock.h"

static _Thread_local unsigned held_count;

static unsigned long self(void)
{
    return (unsigned long)pthread_self();
}

void kvk_lock_init(struct kvk_lock *lock)
{
    pthread_mutexattr_t attributes;
    int failed = pthread_mutexattr_init(&attributes);
    KVK_ASSERT(failed == 0);
    /* What is done under a lock is short, mostly: a few microseconds of waiting awake cost less
     * than to sleep and be woken. */
    failed = pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ADAPTIVE_NP);
    KVK_ASSERT(failed == 0);
    failed = pthread_mutex_init(&lock->mutex, &attributes);
    KVK_ASSERT(failed == 0);
    failed = pthread_mutexattr_destroy(&attributes);
    KVK_ASSERT(failed == 0);
    atomic_init(&lock->owner, 0);
}

void kvk_lock_finish(struct kvk_lock *lock)
{
    KVK_ASSERT(atomic_load(&lock->owner) == 0);
    int failed = pthread_mutex_destroy(&lock->mutex);
    KVK_ASSERT(failed == 0);
}

/*
 * The owner is only ever compared with the asking thread's own number, and only that thread
 * writes its number there, so relaxed order is enough.
 */
static void mark_held(struct kvk_lock *lock)
{
    atomic_store_explicit(&lock->owner, self(), memory_order_relaxed);
    held_count++;
}

static void mark_free(struct kvk_lock *lock)
{
    KVK_ASSERT(kvk_lock_held(lock));
    KVK_ASSERT(held_count > 0);
    atomic_store_explicit(&lock->owner, 0, memory_order_relaxed);
    held_count--;
}

void kvk_lock(struct kvk_lock *lock)
{
    KVK_ASSERT(!kvk_lock_held(lock));
    int failed = pthread_mutex_lock(&lock->mutex);
    KVK_ASSERT(failed == 0);
    mark_held(lock);
}

void kvk_unlock(struct kvk_lock *lock)
{
    mark_free(lock);
    int failed = pthread_mutex_unlock(&lock->mutex);
    KVK_ASSERT(failed == 0);
}

bool kvk_lock_held(struct kvk_lock *lock)
{
    return atomic_load_explicit(&lock->owner, memory_order_relaxed) == self();
}

unsigned kvk_locks_held(void)
{
    return held_count;
}

void kvk_condition_init(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    int failed = pthread_condattr_init(&attributes);
    KVK_ASSERT(failed == 0);
    failed = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    KVK_ASSERT(failed == 0);
    failed = pthread_cond_init(condition, &attributes);
    KVK_ASSERT(failed == 0);
    failed = pthread_condattr_destroy(&attributes);
    KVK_ASSERT(failed == 0);
}

bool kvk_condition_wait(pthread_cond_t *condition, struct kvk_lock *lock, uint64_t until_ns)
{
    int result = 0;
    mark_free(lock);
    if (until_ns == UINT64_MAX) {
        result = pthread_cond_wait(condition, &lock->mutex);
    } else {
        struct timespec until = {
            .tv_sec = (time_t)(until_ns / KVK_NS_PER_SECOND),
            .tv_nsec = (long)(until_ns % KVK_NS_PER_SECOND),
        };
        result = pthread_cond_timedwait(condition, &lock->mutex, &until);
    }
    mark_held(lock);
    KVK_ASSERT(result == 0 || result == ETIMEDOUT);
    return result == 0;
}
