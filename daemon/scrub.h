/*
 * Looking after bytes that nobody asks for: a slow round over all whole copies, in memory that the
 * processor reads and on disk, that takes their checksums again. What does not match is given up
 * before somebody needs it.
 *
 * One copy at a time: it is borrowed, hashed (or read from disk into a buffer of the scrub's own)
 * without the lock, and given back; then there is a pause, so that the rate of the configuration is
 * kept. Whoever needs the room of just that block meanwhile waits for it: upkeep.h.
 *
 * Locking: as said at each function.
 */
#ifndef KVK_DAEMON_SCRUB_H
#define KVK_DAEMON_SCRUB_H

#include "daemon/cache.h"

struct kvk_scrub_counts {
    uint64_t blocks[KVK_TIER_COUNT]; /* copies that were checked */
    uint64_t bytes[KVK_TIER_COUNT];
    uint64_t damaged[KVK_TIER_COUNT]; /* of them: did not match, and were given up */
    uint64_t unreadable;              /* copies on disk that gave an error, and were given up */
    uint64_t passes;                  /* full ones */
    uint64_t last_pass_ns;            /* how long the last full one took */
    uint64_t last_pass_age_ns;        /* since it began */
};

/* The scrub of the cache and, where the cache has threads and the configuration a rate, its thread.
 * Unlocked. */
KVK_CHECKED enum kvk_status kvk_scrub_create(struct kvk_cache *cache, struct kvk_error *error);
/* Ends the thread first. Where there is none it does nothing. Unlocked. */
void kvk_scrub_destroy(struct kvk_cache *cache);

/* Check the next copy. False: there was none, the pass is over and the next step begins another.
 * For the thread, and where there is none, for whoever steps the cache. Unlocked; may read from
 * disk. */
bool kvk_scrub_step_unlocked(struct kvk_cache *cache);

/* With the lock. */
void kvk_scrub_counts(const struct kvk_cache *cache, struct kvk_scrub_counts *counts);

#endif
