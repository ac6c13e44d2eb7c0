/*
 * Bytes in memory that were found damaged while somebody holds the block, made whole again from its
 * copy on disk.
 *
 * Whoever holds a block keeps the slot that he was given, damaged or not: it may be mapped, and its
 * number is in his table. So the sealed bytes are put back where they were. They count as a copy
 * again only after the disk's bytes have matched their checksum, and what then stands in memory
 * has too. Until then, and where there is no good copy on disk, nobody else finds the block.
 *
 * A block that nobody holds needs none of this: its damaged bytes go, and the copy on disk serves.
 *
 * Locking: cache.lock, dropped meanwhile.
 */
#ifndef KVK_DAEMON_HEAL_H
#define KVK_DAEMON_HEAL_H

#include <stdbool.h>
#include <stdint.h>

struct kvk_cache;

/* The caller holds the block. True: it was damaged in memory and is whole again. */
bool kvk_block_heal_drops(struct kvk_cache *cache, uint32_t block);

#endif
