#include "base/lock.h"

#include <errno.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "base/assert.h"
#include "base/clock.h"

#define TRIES 64  /* before a thread sleeps; each after */
#define PAUSES 16 /* turns of doing nothing: some 20 to 40 us in all */

static _Thread_local unsigned held_count;

static unsigned long self(void)
{
    return (unsigned long)pthread_self();
}

void kvk_lock_init(struct kvk_lock *lock)
{
    int failed = pthread_mutex_init(&lock->mutex, NULL);
    KVK_ASSERT(failed == 0);
    atomic_init(&lock->owner, 0);
    atomic_init(&lock->waiting, 0);
    atomic_init(&lock->turns, 0);
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
    uint32_t turns = atomic_load_explicit(&lock->turns, memory_order_relaxed);
    atomic_store_explicit(&lock->turns, turns + 1, memory_order_relaxed);
    held_count++;
}

static void mark_free(struct kvk_lock *lock)
{
    KVK_ASSERT(kvk_lock_held(lock));
    KVK_ASSERT(held_count > 0);
    atomic_store_explicit(&lock->owner, 0, memory_order_relaxed);
    held_count--;
}

static void pause_briefly(void)
{
    for (int i = 0; i < PAUSES; i++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("isb");
#endif
    }
}

/* What is done under a lock is short, mostly: some microseconds of waiting awake cost less than to
 * sleep and be woken. */
static int wait_for(pthread_mutex_t *mutex)
{
    int failed = EBUSY;
    for (int i = 0; i < TRIES && failed == EBUSY; i++) {
        pause_briefly();
        failed = pthread_mutex_trylock(mutex);
    }
    return failed == EBUSY ? pthread_mutex_lock(mutex) : failed;
}

void kvk_lock(struct kvk_lock *lock)
{
    KVK_ASSERT(!kvk_lock_held(lock));
    int failed = pthread_mutex_trylock(&lock->mutex);
    if (failed == EBUSY) {
        atomic_fetch_add_explicit(&lock->waiting, 1, memory_order_relaxed);
        failed = wait_for(&lock->mutex);
        atomic_fetch_sub_explicit(&lock->waiting, 1, memory_order_relaxed);
    }
    KVK_ASSERT(failed == 0);
    mark_held(lock);
}

void kvk_unlock(struct kvk_lock *lock)
{
    mark_free(lock);
    int failed = pthread_mutex_unlock(&lock->mutex);
    KVK_ASSERT(failed == 0);
}

void kvk_lock_pass(struct kvk_lock *lock)
{
    KVK_ASSERT(kvk_lock_held(lock));
    bool waited_for = atomic_load_explicit(&lock->waiting, memory_order_relaxed) > 0;
    uint32_t turns = atomic_load_explicit(&lock->turns, memory_order_relaxed);
    kvk_unlock(lock);
    while (waited_for && atomic_load_explicit(&lock->turns, memory_order_relaxed) == turns) {
        (void)sched_yield();
    }
    kvk_lock(lock);
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
