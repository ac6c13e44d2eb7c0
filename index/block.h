/*
 * A cached block: where its bytes live, and what may happen to it next.
 *
 * Bytes are written once, before the block is sealed, and never change afterwards, so a reader
 * needs no content lock. A hold is a promise that some copy stays; a copy pin, that this very copy
 * stays where it is.
 *
 *   FREE -RESERVE-> RESERVED -WRITE-> ACTIVE -SEAL-> SEALED (one holder) / SHARED (several)
 *        -last RELEASE-> EVICTABLE -EVICT-> FREE
 *
 * RESERVED and ACTIVE go straight back to FREE on ABORT. An indexed block that loses its bytes
 * while others need its place in the chain is HOLLOW: known, without bytes; FILL gives it bytes
 * again, PRUNE ends it. Where a sealed block's copies lie is a set of tiers beside the state, and
 * a copy under way is a transfer with its own begin, done and fail. A block whose bytes are public,
 * that is in another's slots, has a HOLLOW namesake in the chain of whoever goes on from it: KNOW.
 *
 * Locking: every function here needs the cache lock.
 */
#ifndef KVK_INDEX_BLOCK_H
#define KVK_INDEX_BLOCK_H

#include <stdbool.h>
#include <stdint.h>

#include "index/key.h"

#define KVK_BLOCK_NONE UINT32_MAX

struct kvk_evict_queue;

enum kvk_tier {
    KVK_TIER_DEVICE = 0,
    KVK_TIER_HOST = 1,
    KVK_TIER_DISK = 2,
};
#define KVK_TIER_COUNT 3
#define KVK_MEMORY_TIER_COUNT 2 /* the first ones, whose slots have addresses */
#define KVK_MEMORY_TIER_MASK ((1U << KVK_MEMORY_TIER_COUNT) - 1U)

enum kvk_block_state {
    KVK_BLOCK_FREE = 0,
    KVK_BLOCK_RESERVED,  /* has a slot, no byte written */
    KVK_BLOCK_ACTIVE,    /* being written; may be a shared, unfilled tail */
    KVK_BLOCK_SEALED,    /* whole; one holder */
    KVK_BLOCK_SHARED,    /* whole; several holders */
    KVK_BLOCK_EVICTABLE, /* whole; nobody holds it */
    KVK_BLOCK_HOLLOW,    /* indexed, without bytes */
};
#define KVK_BLOCK_STATE_COUNT 7

enum kvk_block_event {
    KVK_BLOCK_RESERVE = 0,    /* a slot was taken for it; the caller is its one holder */
    KVK_BLOCK_WRITE,          /* the first byte may be there now */
    KVK_BLOCK_SEAL,           /* every byte of every shard is there */
    KVK_BLOCK_HOLD,           /* one more holder */
    KVK_BLOCK_RELEASE,        /* one holder less; of RESERVED and ACTIVE only while others hold */
    KVK_BLOCK_ABORT,          /* the last holder of an unsealed block goes */
    KVK_BLOCK_EVICT,          /* its last copy goes; leaves FREE, or HOLLOW where indexed and
                                 needed as an ancestor */
    KVK_BLOCK_DISCARD,        /* a sealed but unindexed block loses its last holder: FREE */
    KVK_BLOCK_FILL,           /* a hollow block gets bytes; the caller is its one holder */
    KVK_BLOCK_PRUNE,          /* a hollow block that nothing needs: FREE */
    KVK_BLOCK_TRANSFER_BEGIN, /* a copy to or from another tier begins */
    KVK_BLOCK_TRANSFER_DONE,
    KVK_BLOCK_TRANSFER_FAIL,
    KVK_BLOCK_KNOW, /* known by its tokens alone, since its children are to be indexed: HOLLOW */
};
#define KVK_BLOCK_EVENT_COUNT 14

struct kvk_block {
    /* Place in the index; written by the index alone. */
    struct kvk_key key;       /* fixed while indexed */
    uint32_t parent;          /* block id; KVK_BLOCK_NONE at a root, or while not indexed */
    uint32_t run;             /* the run that holds its tokens; UINT32_MAX while not indexed */
    uint32_t run_offset;      /* blocks from the run's start */
    uint32_t child_count;     /* indexed children */
    uint32_t anchor_count;    /* open sequences whose chain goes on from here: keeps the place */
    uint32_t position;        /* blocks before it in its chain */
    uint32_t memory_children; /* indexed children with bytes in memory: forgetting is leaf-first */
    uint32_t device_children; /* of them, with a copy in the device tier: so is demoting */
    uint32_t disk_children;   /* with a copy on disk: so is forgetting there */
    uint32_t hash_next;       /* next block of its bucket in the table of keys */

    /* Life; written by kvk_block_step() alone. */
    uint32_t hold_count;
    uint8_t state;          /* enum kvk_block_state */
    uint8_t transfer_count; /* copies under way */

    /* Copies; written by the engine through kvk_index_set_tiers(). */
    uint8_t tier_mask;                  /* bit per enum kvk_tier that holds a whole copy */
    uint8_t flags;                      /* the engine's own */
    uint32_t slot[KVK_TIER_COUNT];      /* KVK_SLOT_NONE: none. While RESERVED or ACTIVE, one */
    uint32_t pin_count[KVK_TIER_COUNT]; /* copy pins */
    uint32_t arena;                     /* which space and group: the engine's number */
    uint32_t lease_hold_count;          /* of hold_count, those of leases; the engine's own */

    /* Worth; written by the eviction policy alone. */
    float cost;                    /* to compute again, relative to its space's first block */
    uint32_t hint_until;           /* while it counts: in KVK_EVICT_HINT_NS of the policy clock */
    uint64_t order;                /* within its class: lowest goes first */
    uint64_t used_ns;              /* last use, policy clock */
    struct kvk_evict_queue *queue; /* borrowed: the one that it is in, or NULL */
    uint32_t queue_index;          /* place in its eviction queue; UINT32_MAX: in none */
    uint16_t use_count;            /* saturating */
    uint8_t queue_class;           /* the list of its queue: use class and cost class */
    uint8_t hint;                  /* enum kvk_evict_hint_kind, of somebody who knows better */
};

/* Ten million of these: the order of the fields leaves no holes. */
_Static_assert(sizeof(struct kvk_block) == 136, "no holes");

/* Apply one event. An event that the table does not allow is a bug, and aborts. */
void kvk_block_step(struct kvk_block *block, enum kvk_block_event event);

/* Whether the table allows it: for tests that walk the whole machine. */
bool kvk_block_allows(const struct kvk_block *block, enum kvk_block_event event);

const char *kvk_block_state_name(enum kvk_block_state state); /* "EVICTABLE" */

static inline bool kvk_block_is_whole(const struct kvk_block *block)
{
    return block->state == KVK_BLOCK_SEALED || block->state == KVK_BLOCK_SHARED ||
           block->state == KVK_BLOCK_EVICTABLE;
}

#endif
