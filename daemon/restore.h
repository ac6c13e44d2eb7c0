/*
 * What comes back at a start: blocks whose records were found, in memory that was kept (the
 * sidecars) or on disk (the catalogue), go into the index again.
 *
 * Records come in any order and from both sources; the same block may come from each, and then has
 * copies in several tiers. When all are there they are put in from the roots down, chain by chain,
 * so that each finds its parent. One whose ancestors are unknown is given up: its slot is free, and
 * it is counted. A record is believed only where hashing its tokens under its parent gives its key
 * again, down from a root whose key follows from the space's identity and generation as they are
 * now.
 *
 * Used before the daemon serves, on one thread; takes the cache's lock in slices.
 */
#ifndef KVK_DAEMON_RESTORE_H
#define KVK_DAEMON_RESTORE_H

#include "daemon/cache.h"

struct kvk_restore;
struct kvk_group;

struct kvk_restore_block {
    struct kvk_group *group; /* its space is open again, under its old id and generation */
    struct kvk_key key;
    struct kvk_key parent; /* a block's; the root's at position 0 */
    uint32_t position;
    const uint32_t *tokens; /* [space.block_tokens]; copied */
    const uint8_t *extra;   /* copied */
    size_t extra_size;
    const uint8_t *salt; /* of the root, at position 0; copied */
    size_t salt_size;
    const uint64_t *checksums;      /* [group.shard_count]; copied */
    const uint64_t *host_checksums; /* of what lies in the host tier, where that is borrowed */
    uint32_t slot[KVK_TIER_COUNT];  /* KVK_SLOT_NONE: no copy there. None at all: hollow */
    uint32_t use_count;
    uint64_t idle_ns; /* since its last use, by the wall clock; 0 where that jumped back */
    bool borrowed;    /* what the pointers point to stays until kvk_restore_finish(): not copied */
    uint32_t record;  /* its entry in the group's sidecar, + 1; 0: it comes from elsewhere */
};

struct kvk_restore_counts {
    uint64_t records;
    uint64_t blocks; /* that are in the index again */
    uint64_t copies[KVK_TIER_COUNT];
    uint64_t orphans;    /* without their ancestors, or of a generation that is over */
    uint64_t crowded;    /* for which the configuration has no room now */
    uint64_t wrong;      /* whose key does not follow from their tokens, or slot is not theirs */
    uint64_t duplicates; /* two records of one slot, or two blocks of one key */
    uint64_t duration_ns;
};

/* Some 120 bytes a record, and what is copied; all of it is freed by the finish. */
KVK_CHECKED enum kvk_status kvk_restore_begin(struct kvk_cache *cache, struct kvk_restore **restore,
                                              struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_restore_add(struct kvk_restore *restore,
                                            const struct kvk_restore_block *block,
                                            struct kvk_error *error);
/* Put all in; ends the restore, also where it fails. `refused` is told each (group, tier, slot)
 * that did not come back, so that its record can go; without the lock; may be NULL. */
KVK_CHECKED enum kvk_status kvk_restore_finish(
    struct kvk_restore *restore,
    void (*refused)(void *context, struct kvk_group *group, enum kvk_tier tier, uint32_t slot),
    void *context, struct kvk_restore_counts *counts, struct kvk_error *error);

#endif
