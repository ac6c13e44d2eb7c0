/*
 * Starting warm: what a keeper held and a disk has is in the cache again before anybody is served;
 * and leaving so that the next daemon can.
 *
 * Processes of before may live on with their mappings. What they had been granted when the daemon
 * went stays out of use until they are gone: each that lives is a session without a connection,
 * whose quarantine holds those slots. A process that cannot be watched, or more granted memory than
 * can be set aside, lets the group begin cold, with files of its own, which nobody has mapped.
 *
 * Locking: without the lock, before anybody is served or when nobody is any more.
 */
#ifndef KVK_DAEMON_WARM_H
#define KVK_DAEMON_WARM_H

#include "daemon/cache.h"
#include "daemon/restore.h"

struct kvk_group;

/* Can everything be set aside that processes of before may still write in the group's memory? Asked
 * once, when its tiers are there and before it is known; a yes is counted against the pools. */
KVK_CHECKED bool kvk_warm_is_possible(struct kvk_cache *cache, struct kvk_group *group);

/* After the spaces are open again. Damage is counted and left out; what fails is memory alone. */
KVK_CHECKED enum kvk_status kvk_warm_start(struct kvk_cache *cache, struct kvk_error *error);

/* What kvk_warm_start() brought back. */
void kvk_warm_counts(struct kvk_cache *cache, struct kvk_restore_counts *counts);

/* Get ready to end: no new sequences; blocks whose only copy is in memory that goes with the
 * process are copied to where it does not, as far as there is room; what waits to be written behind
 * is, for durable.drain_flush_ms at most; the catalogue is written. */
struct kvk_drain_reply {
    bool kept; /* there is a keeper */
    uint64_t kept_blocks, disk_blocks, demoted_blocks;
    uint64_t flushed_blocks;   /* written behind while the call waited */
    uint64_t unflushed_blocks; /* that were worth a copy on disk, and have none */
};
KVK_CHECKED enum kvk_status kvk_drain(struct kvk_cache *cache, const struct kvk_caller *caller,
                                      struct kvk_drain_reply *reply, struct kvk_error *error);

/* Nothing is recorded any more and nothing kept is freed: the cache is about to be destroyed.
 * After maintenance has been stopped. */
void kvk_warm_leave(struct kvk_cache *cache);

#endif
