/*
 * Writing behind, to its end: what a planned restart waits for, within a bound.
 *
 * Locking: cache.lock, which is dropped in between.
 */
#ifndef KVK_DAEMON_DISK_FLUSH_H
#define KVK_DAEMON_DISK_FLUSH_H

#include "daemon/cache.h"

struct kvk_disk_flush {
    uint64_t written_blocks; /* by anybody, while it waited */
    uint64_t left_blocks;    /* that wait still, when its time was over or the disk is of no use */
};

/* Until nothing waits to be written, at most until `until_ns` (monotonic) or the caller's deadline,
 * whichever is first; not at all where the disk takes nothing now. Nothing is queued for it: what
 * was not used often enough to be admitted stays out. */
void kvk_disk_flush_drops(struct kvk_cache *cache, const struct kvk_caller *caller,
                          uint64_t until_ns, struct kvk_disk_flush *flush);

#endif
