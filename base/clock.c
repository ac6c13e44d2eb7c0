#include "base/clock.h"

#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

#include "base/assert.h"

static uint64_t monotonic_now(struct kvk_clock *clock)
{
    (void)clock;
    struct timespec now;
    int failed = clock_gettime(CLOCK_MONOTONIC, &now);
    KVK_ASSERT(failed == 0);
    return (uint64_t)now.tv_sec * KVK_NS_PER_SECOND + (uint64_t)now.tv_nsec;
}

struct kvk_clock *kvk_clock_monotonic(void)
{
    static struct kvk_clock monotonic = {.now_ns = monotonic_now};
    return &monotonic;
}

static uint64_t manual_now(struct kvk_clock *clock)
{
    /* The clock is the first member, so that the one is the address of the other. */
    _Static_assert(offsetof(struct kvk_clock_manual, clock) == 0, "clock comes first");
    struct kvk_clock_manual *manual = (struct kvk_clock_manual *)clock;
    return atomic_load(&manual->ns);
}

void kvk_clock_manual_init(struct kvk_clock_manual *manual, uint64_t start_ns)
{
    manual->clock.now_ns = manual_now;
    atomic_init(&manual->ns, start_ns);
}

void kvk_clock_manual_set(struct kvk_clock_manual *manual, uint64_t ns)
{
    uint64_t before = atomic_exchange(&manual->ns, ns);
    KVK_ASSERT(before <= ns);
}
