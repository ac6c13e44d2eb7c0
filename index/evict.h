/*
 * Which block goes next: leaf-first LRU, or RP-cost, which learns when blocks come back.
 *
 * A policy only proposes; it moves no bytes and frees nothing. Candidates are the blocks that the
 * engine puts into a queue (one per arena and tier): whole, held by nobody, and under full
 * attention without children that have bytes.
 *
 * RP-cost: four classes by use count (1, 2, 3-4, 5+), each ordered by last use, deeper first. For
 * each class a histogram of log-spaced ages at reuse is learned, from hits and from a ring of
 * ghosts (keys evicted before). The victim is, among the heads of the classes, the one with the
 * lowest expected hits per second of further stay, times the square root of its cost where the
 * next step down is to be forgotten. Refreshed every 10 s of the policy's clock with decay.
 *
 * With cost lists each class is kept in eight lists more, by cost in half octaves, and the victim
 * is chosen among the heads of all of them: a cheap block need not wait behind a dear one that is
 * older. What is learned stays by use count alone. Costs then count with the power 0.65.
 *
 * Hints: whoever knows more of a block than its past can say for how long it shall go after all
 * others of its queue, or before them. Each queue has a list more for either kind, ordered by what
 * is left of that time; when it is over the block counts as any other. Past a share of the memory
 * (struct kvk_evict_share) a hint to keep counts for nothing, soonest to end first.
 *
 * Locking: every function needs the cache lock.
 */
#ifndef KVK_INDEX_EVICT_H
#define KVK_INDEX_EVICT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "index/index.h"

enum kvk_evict_policy {
    KVK_EVICT_LRU = 0,
    KVK_EVICT_RP_COST = 1,
};

#define KVK_EVICT_CLASS_COUNT 4
#define KVK_EVICT_COST_COUNT 8 /* lists of each class, where there are cost lists */
#define KVK_EVICT_LIST_COUNT (KVK_EVICT_CLASS_COUNT * KVK_EVICT_COST_COUNT)

enum kvk_evict_hint_kind {
    KVK_EVICT_HINT_NONE = 0,
    KVK_EVICT_HINT_FIRST = 1, /* goes before the others */
    KVK_EVICT_HINT_LAST = 2,  /* goes after them */
};
/* Behind the lists by class: one of each kind of hint. */
#define KVK_EVICT_HEAP_COUNT (KVK_EVICT_LIST_COUNT + 2)
#define KVK_EVICT_HINT_NS (125 * UINT64_C(1000000)) /* unit of kvk_block.hint_until */

struct kvk_evict; /* what was learned, and the ghosts; shared by all queues of its blocks */

struct kvk_evict_options {
    enum kvk_evict_policy policy;
    uint32_t ghost_count; /* evicted keys remembered; about 4 times the blocks of capacity */
    uint32_t block_count; /* capacity in blocks as known: weighs the prior; may change later */
    bool cost_lists;      /* of KVK_EVICT_RP_COST */
};

KVK_CHECKED enum kvk_status kvk_evict_create(struct kvk_index *index,
                                             const struct kvk_evict_options *options,
                                             struct kvk_evict **evict);
void kvk_evict_destroy(struct kvk_evict *evict);

/*
 * Capacity became known or changed: resize the ghost ring and the prior. Bounded work: nothing is
 * moved; the newest ghosts that fit stay known, those of two sizes ago are lost. KVK_EXHAUSTED: no
 * memory for the ghosts, the old ring stays; the prior is set all the same.
 */
KVK_CHECKED enum kvk_status kvk_evict_resize(struct kvk_evict *evict, uint32_t ghost_count,
                                             uint32_t block_count);
uint64_t kvk_evict_bytes(const struct kvk_evict *evict); /* of memory, ghosts included */

/*
 * A freshly indexed block, once, before it is in any queue. `cost` is relative to the first block
 * of its space. Looks for its ghost: a block that comes back is not new. `stamp` orders requests:
 * every use within one request has the same one, later requests a higher one.
 */
void kvk_evict_admit(struct kvk_evict *evict, struct kvk_block *block, float cost, bool windowed,
                     uint64_t stamp, uint64_t now_ns);

/* As admit, for a block that was admitted in another process: with the uses that it had there. */
void kvk_evict_restore(struct kvk_evict *evict, struct kvk_block *block, float cost, bool windowed,
                       uint64_t stamp, uint64_t used_ns, uint32_t use_count);

/* One more use of an admitted block; in a queue or not. A further use with the stamp of the last
 * one is the same request's, and counts for nothing. A hollow block that gets bytes again was
 * known all the time: a use, not an admission. O(log n). */
void kvk_evict_use(struct kvk_evict *evict, struct kvk_block *block, bool windowed, uint64_t stamp,
                   uint64_t now_ns);

/* The block's last copy goes: remember its key as a ghost. Before the block is freed. */
void kvk_evict_forget(struct kvk_evict *evict, const struct kvk_block *block);

/* The block goes before or after all others of its queue until the time is over (NONE: a hint of
 * before ends). Of an admitted block, in a queue or not. O(log n). */
void kvk_evict_hint(struct kvk_evict *evict, struct kvk_block *block, enum kvk_evict_hint_kind kind,
                    uint64_t until_ns);

/* What the queues of one owner may keep by hints, all together. The owner's memory. */
struct kvk_evict_share {
    uint64_t kept_bytes; /* in KVK_EVICT_HINT_LAST lists, and above them: a leaf that stays keeps
                            all its ancestors (shared ones count once for each). Written by the
                            queues */
    uint64_t limit_bytes;
};

/* ---- Queues of candidates ---- */

/* Blocks ordered by kvk_block.order, in pages that the heaps of a queue share. */
struct kvk_evict_heap {
    uint32_t **pages; /* [page_count_max of the queue], ours; those in use belong to the heap */
    uint32_t count;   /* blocks */
};

/* The caller's memory; it may not move while a block is in it. */
struct kvk_evict_queue {
    struct kvk_evict *evict; /* borrowed */
    enum kvk_tier tier;
    bool weigh_cost; /* the next step down from here is to be forgotten */
    float weight;    /* of one block against other queues': cost of its first block per byte */
    struct kvk_evict_heap heaps[KVK_EVICT_HEAP_COUNT]; /* by kvk_block.queue_class, or its hint */
    struct kvk_evict_share *share; /* borrowed, set after init; NULL: hints keep all they say */
    uint64_t block_bytes;          /* of one block, for the share */
    bool windowed;                 /* a block keeps none above it, for the share */
    uint32_t **free_pages;         /* [page_count_max], ours; the first free_page_count are free */
    uint32_t free_page_count;
    uint32_t page_count;
    uint32_t page_count_max;
};

void kvk_evict_queue_init(struct kvk_evict_queue *queue, struct kvk_evict *evict,
                          enum kvk_tier tier, bool weigh_cost, float weight);
void kvk_evict_queue_finish(struct kvk_evict_queue *queue); /* must be empty */
uint32_t kvk_evict_queue_count(const struct kvk_evict_queue *queue);

/* Make room for `count` candidates, so that add never fails. KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_evict_queue_reserve(struct kvk_evict_queue *queue, uint32_t count);

uint64_t kvk_evict_queue_bytes(const struct kvk_evict_queue *queue); /* of memory */

/* A block is in at most one queue. O(log n). */
void kvk_evict_queue_add(struct kvk_evict_queue *queue, uint32_t block);
void kvk_evict_queue_remove(struct kvk_evict_queue *queue, uint32_t block);

/* The next victim, left in the queue; KVK_BLOCK_NONE where it is empty. `score` (may be NULL) is
 * comparable between queues of one kvk_evict: LRU: the age order; RP-cost: worth per byte. */
uint32_t kvk_evict_queue_peek(struct kvk_evict_queue *queue, uint64_t now_ns, double *score);

/* What the block would keep by a hint: itself and its ancestors. */
static inline uint64_t kvk_evict_kept_bytes(const struct kvk_block *block, uint64_t block_bytes,
                                            bool windowed)
{
    return windowed ? block_bytes : block_bytes * (block->position + UINT64_C(1));
}

/* The block that was not used for longest, and when it was; KVK_BLOCK_NONE where it is empty. Hints
 * are no hindrance. */
uint32_t kvk_evict_queue_oldest(const struct kvk_evict_queue *queue, uint64_t *used_ns);

/* Worth of any block by what was learned alone: to compare it with those of other owners. */
double kvk_evict_plain_score(const struct kvk_evict_queue *queue, const struct kvk_block *block,
                             uint64_t now_ns);

/* Worth of any block as peek would score it: for taking a slab where its blocks score least. */
double kvk_evict_score(const struct kvk_evict_queue *queue, const struct kvk_block *block,
                       uint64_t now_ns);

#endif
