/*
 * Blocks that the daemon itself keeps in their place for a moment, for work that nobody asked for:
 * the scrub that takes their checksums, writing behind to disk, sending to the remote store.
 *
 * Whoever needs the room of just these blocks waits for that moment instead of being refused, as if
 * sequences or leases filled the tier.
 *
 * Locking: all with the cache's lock.
 */
#ifndef KVK_DAEMON_UPKEEP_H
#define KVK_DAEMON_UPKEEP_H

#include <stdbool.h>
#include <stdint.h>

#include "index/block.h"

struct kvk_cache;

#define KVK_UPKEEP_BLOCKS_MAX 256U /* of all such work together: a batch of each, and one */

struct kvk_upkeep {
    uint32_t blocks[KVK_UPKEEP_BLOCKS_MAX]; /* each once for everyone who keeps it */
    uint32_t count;
};

/* kvk_block_borrow() and kvk_block_return() of a copy in memory, for such work. */
void kvk_upkeep_borrow(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
/* Wakes those who wait for room. */
void kvk_upkeep_return(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);

/* Is there a block in memory that is kept by such work and by nobody else? Its holders may have let
 * go since it was borrowed, so this is asked when it matters. */
bool kvk_upkeep_keeps_room(const struct kvk_cache *cache);

#endif
