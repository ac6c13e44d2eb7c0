/*
 * The records of a group's blocks in kept memory: one mapped file beside the files of slots, so
 * that after a crash the next daemon knows what lies where.
 *
 * The file has, one behind the other and all of it sparse:
 *     a header           what the rest is, with a checksum
 *     processes          who was given descriptors to write with, each by number and start time
 *     words, per tier    one per slot: FREE, GRANTED (reserved or being written), or SEALED with
 * the entry of the block whose bytes lie there entries            one per indexed block with bytes
 * in memory or none at all (blocks on disk alone have their record in the catalogue): key, parent,
 * position, tokens, content bytes, salt, checksums of the bytes, under a checksum of its own;
 *                        beside them how often and when it was used
 *
 * Order is all there is to it. A word says SEALED only after the bytes, the entry and its checksum
 * are there; it stops saying so before the slot or the entry can be another's. Each step is one
 * store, so a process that is killed between any two of them leaves what is true, or an entry whose
 * checksum does not match. Nothing here waits, allocates or makes a system call under the lock:
 * memory for words and entries is there before slots are. Uses are written down by and by, in
 * maintenance; look-ups write nothing.
 *
 * Locking: cache.lock, unless named *_unlocked; group.sidecar is NULL where nothing is kept, and
 * every function then does nothing.
 */
#ifndef KVK_DAEMON_SIDECAR_H
#define KVK_DAEMON_SIDECAR_H

#include "daemon/cache.h"

struct kvk_group;
struct kvk_restore;
struct kvk_session;
struct kvk_sidecar;

/* ---- Life; without the lock ---- */

/* The kept sidecar of a group that is being made, where there is one that can be believed:
 * group.sidecar. Never fails: without one the group begins cold. */
void kvk_sidecar_find_unlocked(struct kvk_cache *cache, struct kvk_group *group);
/* Nothing of this tier came back: its words start anew. */
void kvk_sidecar_tier_reset_unlocked(struct kvk_cache *cache, struct kvk_group *group,
                                     enum kvk_tier tier);
/* All tiers are there: keep the sidecar that was found where any of them was adopted, else make a
 * new one. Without a keeper there is none. */
KVK_CHECKED enum kvk_status kvk_sidecar_create_unlocked(struct kvk_cache *cache,
                                                        struct kvk_group *group,
                                                        struct kvk_error *error);
void kvk_sidecar_destroy_unlocked(struct kvk_cache *cache, struct kvk_group *group);

/* Memory for the words of some slots, and for as many entries more. */
KVK_CHECKED enum kvk_status kvk_sidecar_back_unlocked(struct kvk_cache *cache,
                                                      struct kvk_group *group, enum kvk_tier tier,
                                                      uint32_t first_slot, uint32_t slot_count,
                                                      struct kvk_error *error);

/* ---- What happens to slots and blocks: called by block_store.c alone ---- */

void kvk_sidecar_slot_granted(struct kvk_group *group, enum kvk_tier tier, uint32_t slot);
/* Before it can be given to another. */
void kvk_sidecar_slot_freed(struct kvk_group *group, enum kvk_tier tier, uint32_t slot);
/* The block was indexed, or its copies changed: record it as it is now. */
void kvk_sidecar_block_changed(struct kvk_cache *cache, struct kvk_group *group, uint32_t block);
/* Before the block leaves the index. */
void kvk_sidecar_block_leaves(struct kvk_cache *cache, struct kvk_group *group, uint32_t block);

/* ---- Processes that may write: session files ---- */

/* The session's process is about to be given a descriptor of the group's slots, to write with.
 * False: the table is full. Once for each mapping, and given back so. */
KVK_CHECKED bool kvk_sidecar_process_add(struct kvk_group *group, enum kvk_tier tier,
                                         const struct kvk_session *session);
void kvk_sidecar_process_remove(struct kvk_group *group, const struct kvk_session *session);

/* From here on what is recorded stays as it is: the cache is leaving. */
void kvk_sidecar_freeze(struct kvk_group *group);

/* ---- Maintenance ---- */

/* Write down uses, and record what found no place before: over at most `count` block ids. */
void kvk_sidecar_sync_slice(struct kvk_cache *cache, uint32_t count);
/* Entries ahead of need. Drops the lock. */
void kvk_sidecar_tidy_drops(struct kvk_cache *cache);

/* ---- After a restart, in this order: see warm.c ---- */

/* Visit what was found: every process that is written down. False from visit ends it. */
void kvk_sidecar_processes(const struct kvk_group *group,
                           void (*visit)(void *context, int32_t pid, uint64_t start,
                                         uint8_t tier_mask),
                           void *context);
/* Every slot that was granted. */
void kvk_sidecar_granted(const struct kvk_group *group, enum kvk_tier tier,
                         void (*visit)(void *context, uint32_t slot), void *context);
/* Forget the processes; those that still live are added again. */
void kvk_sidecar_processes_clear(struct kvk_group *group);
/* Hand every entry that can be believed to the restore. Borrowed: it stays where it is. */
KVK_CHECKED enum kvk_status kvk_sidecar_read_unlocked(struct kvk_cache *cache,
                                                      struct kvk_group *group,
                                                      struct kvk_restore *restore,
                                                      struct kvk_error *error);
/* By the restore: the entry is this block's again. */
void kvk_sidecar_bind(struct kvk_cache *cache, struct kvk_group *group, uint32_t block,
                      uint32_t entry);
/* What did not come back is free: entries of no block, and slots that nobody has, whose generation
 * rises. From here on the sidecar is as any other. */
void kvk_sidecar_settle_drops(struct kvk_cache *cache, struct kvk_group *group);

/* What was found when the group was made, as long as it is not settled. */
struct kvk_sidecar_found {
    bool found;
    uint32_t granted[KVK_MEMORY_TIER_COUNT];
    uint64_t torn; /* entries whose checksum did not match; known after the read */
};
void kvk_sidecar_found(const struct kvk_group *group, struct kvk_sidecar_found *found);

struct kvk_sidecar_stats {
    uint64_t entries; /* in use */
    uint64_t backed;  /* that have memory */
    uint64_t bytes;   /* of memory of entries */
};
void kvk_sidecar_stats(const struct kvk_group *group, struct kvk_sidecar_stats *stats);

/* Every law of the sidecar: each slot's word and each block's entry say what the engine says. */
void kvk_sidecar_check(const struct kvk_cache *cache, const struct kvk_group *group);

/* The geometry of the file, for tests that damage it: where entry 0 begins, and bytes of one. */
uint64_t kvk_sidecar_entry_offset(const struct kvk_group *group, uint32_t entry);
uint64_t kvk_sidecar_entry_bytes(const struct kvk_group *group);

#endif
