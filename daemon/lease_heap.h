/*
 * Leases by the time at which they end: a pairing heap through the leases themselves, so that a
 * lease costs no allocation of its own there and the next one to expire is always at hand.
 *
 * Adding is O(1), removing O(log n) amortised. Locking: the cache lock.
 */
#ifndef KVK_DAEMON_LEASE_HEAP_H
#define KVK_DAEMON_LEASE_HEAP_H

#include "daemon/cache_internal.h"

/* `*heap` NULL: empty. A lease is in one heap at most; expires_ns does not change while it is. */
void kvk_lease_heap_add(struct kvk_lease **heap, struct kvk_lease *lease);
void kvk_lease_heap_remove(struct kvk_lease **heap, struct kvk_lease *lease);

#endif
