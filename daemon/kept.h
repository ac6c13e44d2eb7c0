/*
 * Memory files that a keeper holds for the next daemon (hosttier/keeper.h), as the engine uses
 * them: what the keeper had at the start, by name, and one way to make a region that is either one
 * of those again or new and given to the keeper.
 *
 * Names are numbers alone: space id, group, tier, shard. A file that nobody asked for by the time
 * all spaces are open again belongs to a space that is gone, and goes too.
 *
 * A keeper that fails is told once in the log; regions are then made all the same, and are not
 * kept.
 *
 * Locking: everything does I/O and is called without a lock. One thread at the start; afterwards
 * any, since the table does not change any more.
 */
#ifndef KVK_DAEMON_KEPT_H
#define KVK_DAEMON_KEPT_H

#include "daemon/cache.h"
#include "hosttier/keeper.h"

struct kvk_kept;
struct kvk_group;

enum kvk_kept_kind {
    KVK_KEPT_SLOTS = 0,   /* of a tier and a shard */
    KVK_KEPT_GENERATIONS, /* of a tier */
    KVK_KEPT_SIDECAR,
};

struct kvk_kept_name {
    enum kvk_kept_kind kind;
    uint64_t space_id;
    uint32_t group;
    uint32_t tier;  /* 0 of a sidecar */
    uint32_t shard; /* of slots */
};

/* Everything that the keeper has. KVK_OK with an empty table where the cache has no keeper. */
KVK_CHECKED enum kvk_status kvk_kept_load(struct kvk_cache *cache, struct kvk_error *error);
void kvk_kept_destroy(struct kvk_cache *cache);

/* Is there such a file, not yet taken, of at least so many bytes? */
bool kvk_kept_has(const struct kvk_cache *cache, const struct kvk_kept_name *name,
                  uint64_t size_bytes);

/* The first bytes of it. */
KVK_CHECKED bool kvk_kept_read(const struct kvk_cache *cache, const struct kvk_kept_name *name,
                               void *target, size_t size);

/* A region of it, with `piece_bytes` as in gpu/device.h. The keeper goes on holding the file under
 * its name. */
KVK_CHECKED enum kvk_status kvk_kept_adopt(struct kvk_cache *cache, struct kvk_device *device,
                                           const struct kvk_kept_name *name, uint64_t size_bytes,
                                           uint64_t piece_bytes, struct kvk_region *region,
                                           struct kvk_error *error);

/* A new region, given to the keeper where there is one. What the keeper had under the name goes
 * before. */
KVK_CHECKED enum kvk_status kvk_kept_alloc(struct kvk_cache *cache, struct kvk_device *device,
                                           const struct kvk_kept_name *name, uint64_t size_bytes,
                                           uint64_t piece_bytes, const char *label,
                                           struct kvk_region *region, struct kvk_error *error);

/* The end of a region: left to the keeper where the cache goes away and shall come back
 * (cache.leaving), else freed, and the keeper's with it. A region without memory is fine. */
void kvk_kept_free(struct kvk_cache *cache, struct kvk_device *device,
                   const struct kvk_kept_name *name, struct kvk_region *region);

/* Let go of every file of the start that nobody took. */
void kvk_kept_sweep(struct kvk_cache *cache);

/* How many files were there at the start, and how many of them serve again. */
void kvk_kept_counts(const struct kvk_cache *cache, uint32_t *found, uint32_t *taken);

#endif
