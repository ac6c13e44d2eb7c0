/*
 * Keys of evicted blocks, with when and how often they were used: so that a block that comes back
 * is known again, and the learner hears of reuse that the cache was too small to hold.
 *
 * A ring, oldest out first, with lists by hash over it: 16 bytes a ghost. How long ghosts live
 * matters to what is learned, so the ring is exact: the last `capacity` ones are known, no others.
 * A ghost is known by 39 bits of its key; taking a stranger for a ghost miscounts one use and does
 * no other harm.
 *
 * Lists are never mended. They run from newer to older, so a link that leads to a newer ghost, or
 * to one of another list, leads to where a ghost of this list was overwritten: the list ends there,
 * for what came behind it was older still. Adding a ghost writes in one place and at one head.
 *
 * A change of size starts a new ring and keeps the old one beside it, for reading, until as many
 * new ghosts have come as there is room for. So nothing that fits is lost and nothing is moved.
 *
 * Locking: the cache lock.
 */
#ifndef KVK_INDEX_GHOSTS_H
#define KVK_INDEX_GHOSTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "index/key.h"

struct kvk_ghost {
    uint32_t fingerprint;
    uint32_t next; /* in its list: place in the ring + 1; 0: the end */
    uint32_t seen; /* use count, more of the fingerprint, time of the last use; 0: taken */
};

struct kvk_ghost_ring {
    uint32_t *heads;           /* [capacity] place in the ring + 1; 0: none; ours */
    struct kvk_ghost *entries; /* [capacity], ours */
    uint32_t capacity;
    uint32_t next_place; /* where the next one goes */
    uint64_t added;      /* ever */
};

struct kvk_ghosts {
    struct kvk_ghost_ring current;
    struct kvk_ghost_ring older; /* capacity 0: there is none */
};

#define KVK_GHOST_USE_COUNT_MAX 7 /* greater counts are remembered as this */

/* KVK_EXHAUSTED: no memory. `capacity` may be 0: nothing is remembered then. */
KVK_CHECKED enum kvk_status kvk_ghosts_init(struct kvk_ghosts *ghosts, uint32_t capacity);
void kvk_ghosts_finish(struct kvk_ghosts *ghosts);

/* KVK_EXHAUSTED: no memory, nothing changed. The newest ones stay known, as many as fit; what was
 * there before the last change of size but one goes. */
KVK_CHECKED enum kvk_status kvk_ghosts_resize(struct kvk_ghosts *ghosts, uint32_t capacity);

/* The key is no ghost now. */
void kvk_ghosts_add(struct kvk_ghosts *ghosts, struct kvk_key key, uint64_t used_ns,
                    uint32_t use_count);

/* The key will be added or asked for soon: a hint that lets the memory come near meanwhile. */
void kvk_ghosts_expect(const struct kvk_ghosts *ghosts, struct kvk_key key);

/* Is the key a ghost? It is none any more after this. `age_ns` since its last use is exact to
 * 67 ms, up to 78 hours. */
bool kvk_ghosts_take(struct kvk_ghosts *ghosts, struct kvk_key key, uint64_t now_ns,
                     uint64_t *age_ns, uint32_t *use_count);

uint64_t kvk_ghosts_bytes(const struct kvk_ghosts *ghosts);

#endif
