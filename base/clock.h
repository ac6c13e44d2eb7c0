/*
 * Time, injected. Everything that waits or expires asks the clock it was given, so that tests and
 * replays can move it. Monotonic nanoseconds; a wall clock is for people only.
 */
#ifndef KVK_BASE_CLOCK_H
#define KVK_BASE_CLOCK_H

#include <stdint.h>

#define KVK_NS_PER_MS UINT64_C(1000000)
#define KVK_NS_PER_SECOND UINT64_C(1000000000)

struct kvk_clock {
    uint64_t (*now_ns)(struct kvk_clock *clock);
};

/* The machine's CLOCK_MONOTONIC; static, never freed. */
struct kvk_clock *kvk_clock_monotonic(void);

/* A clock that stands still until it is moved. The caller's memory; any thread may move it. */
struct kvk_clock_manual {
    struct kvk_clock clock;
    _Atomic uint64_t ns;
};

void kvk_clock_manual_init(struct kvk_clock_manual *manual, uint64_t start_ns);
void kvk_clock_manual_set(struct kvk_clock_manual *manual, uint64_t ns); /* never backwards */

static inline uint64_t kvk_clock_now(struct kvk_clock *clock)
{
    return clock->now_ns(clock);
}

#endif
