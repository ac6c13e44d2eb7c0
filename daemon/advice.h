/*
 * A refusal that helps: when to try again, and which of its own sequences the caller could swap out
 * or close to have the room now, at the least cost.
 *
 * The hint follows from what is measured: when the leases expire that hold what is missing, and how
 * fast bound bytes became free lately. Always between 10 ms and a minute.
 *
 * Locking: the cache lock, but for kvk_advice_choose(), which needs none.
 */
#ifndef KVK_DAEMON_ADVICE_H
#define KVK_DAEMON_ADVICE_H

#include "daemon/cache.h"

struct kvk_space;
struct kvk_sequence;

#define KVK_RETRY_MS_MIN UINT64_C(10)
#define KVK_RETRY_MS_MAX UINT64_C(60000)

/* Of one tier: how fast bytes that could not leave it become such that can. */
struct kvk_release_rate {
    uint64_t released_bytes; /* ever */
    uint64_t measured_bytes; /* as of the last measurement */
    uint64_t measured_ns;
    uint64_t bytes_per_second; /* moving average; 0: nothing yet */
};

/* One round of measuring; does something only a few times a second. */
void kvk_release_rates_maintain(struct kvk_cache *cache);

/*
 * Add hint and advice to a refusal for want of room in the tier. `needed_bytes` is what the call
 * asked for, `sequence` whose call it is (NULL: nobody's in particular, so no advice). Looks at a
 * bounded number of blocks.
 */
void kvk_advise(const struct kvk_cache *cache, enum kvk_tier tier, uint64_t needed_bytes,
                const struct kvk_space *space, const struct kvk_sequence *sequence,
                struct kvk_error *refusal);

/* ---- The choice ---- */

struct kvk_advice_item {
    uint64_t id;
    uint64_t bytes; /* that it makes free */
    uint64_t cost;
};

/*
 * Put those to choose first and return how many, 0: all together are not enough. At least
 * `missing_bytes` at the least cost: exactly up to 12 items; with more, at most twice the least.
 */
uint32_t kvk_advice_choose(struct kvk_advice_item *items, uint32_t count, uint64_t missing_bytes);

#endif
