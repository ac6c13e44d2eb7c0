/*
 * What blocks need of slots: for block_store.c alone. Others take and give slots by the functions
 * of cache_internal.h.
 *
 * Locking: the cache lock.
 */
#ifndef KVK_DAEMON_BLOCK_SLOTS_H
#define KVK_DAEMON_BLOCK_SLOTS_H

#include "base/assert.h"
#include "daemon/cache_internal.h"

/* A sum that would fall below nothing has lost count. */
static inline void kvk_bytes_sub(uint64_t *counter, uint64_t bytes)
{
    KVK_ASSERT(*counter >= bytes);
    *counter -= bytes;
}

/* A loose slot becomes the block's. */
void kvk_slot_own(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                  uint32_t slot, uint32_t block);

/* The block's slot of the tier goes back to its arena. */
void kvk_slot_disown(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                     uint32_t block);

#endif
