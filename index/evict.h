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

struct kvk_evict; /* what was learned, and the ghosts; shared by all queues of its blocks */

struct kvk_evict_options {
    enum kvk_evict_policy policy;
    uint32_t ghost_count; /* evicted keys remembered; about 4 times the blocks of capacity */
    uint32_t block_count; /* capacity in blocks as known: weighs the prior; may change later */
};

KVK_CHECKED enum kvk_status kvk_evict_create(struct kvk_index *index,
                                             const struct kvk_evict_options *options,
                                             struct kvk_evict **evict);
void kvk_evict_destroy(struct kvk_evict *evict);

/* Capacity became known or changed: resize the ghost ring (keeping what fits) and the prior. */
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

/* One more use of an indexed block; in a queue or not. */
void kvk_evict_use(struct kvk_evict *evict, struct kvk_block *block, bool windowed, uint64_t stamp,
                   uint64_t now_ns);

/* The block's last copy goes: remember its key as a ghost. */
void kvk_evict_forget(struct kvk_evict *evict, const struct kvk_block *block);

/* ---- Queues of candidates ---- */

struct kvk_evict_queue {
    struct kvk_evict *evict; /* borrowed */
    enum kvk_tier tier;
    bool weigh_cost; /* the next step down from here is to be forgotten */
    float weight;    /* of one block against other queues': cost of its first block per byte */
    struct {
        uint32_t *blocks; /* a heap by kvk_block.order, ours */
        uint32_t count;
        uint32_t capacity;
    } heap[KVK_EVICT_CLASS_COUNT];
};

void kvk_evict_queue_init(struct kvk_evict_queue *queue, struct kvk_evict *evict,
                          enum kvk_tier tier, bool weigh_cost, float weight);
void kvk_evict_queue_finish(struct kvk_evict_queue *queue); /* must be empty */
uint32_t kvk_evict_queue_count(const struct kvk_evict_queue *queue);

/* Make room for `count` candidates, so that add never fails. KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_evict_queue_reserve(struct kvk_evict_queue *queue, uint32_t count);

/* A block is in at most one queue. O(log n). */
void kvk_evict_queue_add(struct kvk_evict_queue *queue, uint32_t block);
void kvk_evict_queue_remove(struct kvk_evict_queue *queue, uint32_t block);

/* The next victim, left in the queue; KVK_BLOCK_NONE where it is empty. `score` (may be NULL) is
 * comparable between queues of one kvk_evict: LRU: the age order; RP-cost: worth per byte. */
uint32_t kvk_evict_queue_peek(struct kvk_evict_queue *queue, uint64_t now_ns, double *score);

/* Worth of any block as peek would score it: for taking a slab where its blocks score least. */
double kvk_evict_score(const struct kvk_evict_queue *queue, const struct kvk_block *block,
                       uint64_t now_ns);

#endif
