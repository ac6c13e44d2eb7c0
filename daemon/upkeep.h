/*
 * Blocks that the daemon itself keeps in their place for a moment, for work that nobody asked for:
 * the scrub that takes their checksums, writing behind to disk, sending to the remote store.
 *
 * Whoever needs the room of just these blocks waits for that moment instead of being refused, as if
 * sequences or leases filled the tier. Most such work computes or copies, and is over before
 * anything else could be done for room. What is written to disk from where it lies is kept for as
 * long as the disk takes: it is waited for only where nothing else makes room, and where a disk
 * hangs not at all, since that may be for ever.
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
#define KVK_UPKEEP_LASTING_NS UINT64_C(1000000000) /* so long a disk is waited for */

struct kvk_upkeep {
    uint32_t blocks[KVK_UPKEEP_BLOCKS_MAX];   /* each once for everyone who keeps it */
    uint64_t until_ns[KVK_UPKEEP_BLOCKS_MAX]; /* waited for so long; 0: it is brief */
    uint32_t count;
};

/* kvk_block_borrow() and kvk_block_return() of a copy in memory, for such work. */
void kvk_upkeep_borrow(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
/* Wakes those who wait for room. */
void kvk_upkeep_return(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);

/* The same for as long as a disk takes. */
void kvk_upkeep_borrow_lasting(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);
void kvk_upkeep_return_lasting(struct kvk_cache *cache, uint32_t block, enum kvk_tier tier);

/* Is there a block in memory that is kept by such work and by nobody else, and worth waiting for?
 * Its holders may have let go since it was borrowed, so this is asked when it matters. */
bool kvk_upkeep_keeps_room(const struct kvk_cache *cache);
/* And is it back before anything else could be done? */
bool kvk_upkeep_keeps_room_briefly(const struct kvk_cache *cache);

#endif
