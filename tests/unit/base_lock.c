/* Clocks that can be moved, and locks that know who holds them. */
#include "base/lock.h"

#include <criterion/criterion.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/clock.h"

Test(base_clock, monotonic_goes_forward)
{
    struct kvk_clock *clock = kvk_clock_monotonic();
    uint64_t before = kvk_clock_now(clock);
    cr_assert_gt(before, 0);
    for (int i = 0; i < 1000; i++) {
        uint64_t now = kvk_clock_now(clock);
        cr_assert_geq(now, before);
        before = now;
    }
}

Test(base_clock, manual_stands_still_until_moved)
{
    struct kvk_clock_manual manual;
    kvk_clock_manual_init(&manual, 5);
    cr_assert_eq(kvk_clock_now(&manual.clock), 5);
    cr_assert_eq(kvk_clock_now(&manual.clock), 5);
    kvk_clock_manual_set(&manual, 5 + KVK_NS_PER_SECOND);
    cr_assert_eq(kvk_clock_now(&manual.clock), 5 + KVK_NS_PER_SECOND);
}

Test(base_clock, manual_never_goes_back, .signal = SIGABRT)
{
    struct kvk_clock_manual manual;
    kvk_clock_manual_init(&manual, 5);
    kvk_clock_manual_set(&manual, 4);
}

struct shared {
    struct kvk_lock lock;
    pthread_cond_t condition;
    bool held_by_other;
    unsigned other_count;
    int turns;
};

static void *look(void *argument)
{
    struct shared *shared = argument;
    shared->held_by_other = kvk_lock_held(&shared->lock);
    shared->other_count = kvk_locks_held();
    return NULL;
}

Test(base_lock, knows_its_holder_by_thread)
{
    struct shared shared;
    struct kvk_lock second;
    kvk_lock_init(&shared.lock);
    kvk_lock_init(&second);
    cr_assert_not(kvk_lock_held(&shared.lock));
    cr_assert_eq(kvk_locks_held(), 0);
    kvk_lock(&shared.lock);
    kvk_lock(&second);
    cr_assert(kvk_lock_held(&shared.lock));
    cr_assert_eq(kvk_locks_held(), 2);

    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, look, &shared), 0);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_not(shared.held_by_other);
    cr_assert_eq(shared.other_count, 0);

    kvk_unlock(&second);
    kvk_unlock(&shared.lock);
    cr_assert_not(kvk_lock_held(&shared.lock));
    cr_assert_eq(kvk_locks_held(), 0);
    kvk_lock_finish(&second);
    kvk_lock_finish(&shared.lock);
}

Test(base_lock, taking_it_twice_aborts, .signal = SIGABRT)
{
    struct kvk_lock lock;
    kvk_lock_init(&lock);
    kvk_lock(&lock);
    kvk_lock(&lock);
}

Test(base_lock, giving_what_is_not_held_aborts, .signal = SIGABRT)
{
    struct kvk_lock lock;
    kvk_lock_init(&lock);
    kvk_unlock(&lock);
}

static void *take_turn(void *argument)
{
    struct shared *shared = argument;
    kvk_lock(&shared->lock);
    shared->turns++;
    (void)pthread_cond_signal(&shared->condition);
    kvk_unlock(&shared->lock);
    return NULL;
}

Test(base_lock, waits_until_signalled_or_late)
{
    struct shared shared = {.turns = 0};
    kvk_lock_init(&shared.lock);
    kvk_condition_init(&shared.condition);
    struct kvk_clock *clock = kvk_clock_monotonic();

    kvk_lock(&shared.lock);
    uint64_t until = kvk_clock_now(clock) + 20 * KVK_NS_PER_MS;
    while (kvk_condition_wait(&shared.condition, &shared.lock, until)) {
    }
    cr_assert_geq(kvk_clock_now(clock), until);
    cr_assert(kvk_lock_held(&shared.lock));
    cr_assert_eq(kvk_locks_held(), 1);

    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, take_turn, &shared), 0);
    while (shared.turns == 0) {
        cr_assert(kvk_condition_wait(&shared.condition, &shared.lock, UINT64_MAX));
    }
    kvk_unlock(&shared.lock);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    cr_assert_eq(pthread_cond_destroy(&shared.condition), 0);
    kvk_lock_finish(&shared.lock);
}

struct passing {
    struct kvk_lock lock;
    uint32_t had;  /* how often the other had it */
    uint32_t want; /* times */
};

static void *take_often(void *argument)
{
    struct passing *passing = argument;
    for (uint32_t i = 0; i < passing->want; i++) {
        kvk_lock(&passing->lock);
        passing->had++;
        kvk_unlock(&passing->lock);
    }
    return NULL;
}

/* Whoever waits has it before the one that passes it on has it again. Each time the other is left
 * to wait for as long as it takes to fall asleep, or shorter. */
Test(base_lock, passed_on_to_who_waits, .timeout = 60)
{
    struct passing passing = {.want = 300};
    pthread_t other;
    kvk_lock_init(&passing.lock);
    kvk_lock(&passing.lock);
    cr_assert_eq(pthread_create(&other, NULL, take_often, &passing), 0);
    for (uint32_t i = 0; i < passing.want; i++) {
        while (atomic_load(&passing.lock.waiting) == 0) {
            (void)sched_yield();
        }
        (void)usleep(i % 3 * 100);
        uint32_t before = passing.had;
        kvk_lock_pass(&passing.lock);
        cr_assert(kvk_lock_held(&passing.lock));
        cr_assert_gt(passing.had, before, "round %u", i);
        i = passing.had - 1; /* it may have had several turns */
    }
    kvk_unlock(&passing.lock);
    (void)pthread_join(other, NULL);
    cr_assert_eq(passing.had, passing.want);
    kvk_lock_finish(&passing.lock);
}

Test(base_lock, passed_on_to_nobody)
{
    struct kvk_lock lock;
    kvk_lock_init(&lock);
    kvk_lock(&lock);
    kvk_lock_pass(&lock);
    cr_assert(kvk_lock_held(&lock));
    cr_assert_eq(kvk_locks_held(), 1);
    kvk_unlock(&lock);
    kvk_lock_finish(&lock);
}
