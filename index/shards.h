/*
 * How often would an LRU cache of this or that size have hit? Reuse distances, sampled.
 *
 * SHARDS (Waldspurger et al., FAST 2015), of fixed size: a reference is followed if a hash of what
 * it refers to lies below a threshold. So either all references to a thing are followed, or none,
 * and distances among the followed ones are true ones times the rate. Where more than
 * `sample_count` things are followed, the one with the highest hash goes and the threshold comes
 * down to it: memory is fixed, and the rate finds itself.
 *
 * Distances are in bytes, the thing itself included: it would have been a hit where the cache is at
 * least so large. They are counted in a histogram with 16 steps per octave, each for as many
 * references as it stands for (1 / rate).
 *
 * What all references are in truth is counted apart, for things that were in the real cache and
 * for others: the estimate is held against that. Of references to what was there, what lacks or is
 * too much goes to the shortest distances, as in the paper's SHARDS-adj: a few things are very hot,
 * and whether they are among those followed is luck. The others are scaled.
 *
 * The error is estimated from the samples themselves, which are counted in eight classes by key: by
 * how far the answer moves where one class is left out.
 *
 * Locking: the caller's. Nothing is allocated after create. A reference is O(log sample_count), but
 * one in sample_count of them renumbers all in O(sample_count): some 100 us.
 */
#ifndef KVK_INDEX_SHARDS_H
#define KVK_INDEX_SHARDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "index/key.h"

#define KVK_SHARDS_HASH_BITS 24
#define KVK_SHARDS_HASH_END (UINT32_C(1) << KVK_SHARDS_HASH_BITS)
#define KVK_SHARDS_SAMPLES_MIN 64

struct kvk_shards;

/* KVK_EXHAUSTED: no memory. `rate_max`, 0 to 1: the share of all things whose references the caller
 * offers at all; the hash decides about those. */
KVK_CHECKED enum kvk_status kvk_shards_create(uint32_t sample_count, double rate_max,
                                              struct kvk_shards **shards);
void kvk_shards_destroy(struct kvk_shards *shards);

/* A thing is followed if its hash, of KVK_SHARDS_HASH_BITS bits, is below this. */
uint32_t kvk_shards_threshold(const struct kvk_shards *shards);

enum kvk_shards_kind {
    KVK_SHARDS_KNOWN = 0, /* asked for, and the real cache had it */
    KVK_SHARDS_NEW = 1,   /* asked for, and it had not */
    KVK_SHARDS_PUT = 2, /* put into the cache without being asked for: it takes room, and is no hit
                           and no miss */
};

/* A reference to a thing that is followed. */
void kvk_shards_refer(struct kvk_shards *shards, struct kvk_key key, uint32_t hash, uint64_t bytes,
                      enum kvk_shards_kind kind);

/* So many references in all, followed or not, were asked for. */
void kvk_shards_count(struct kvk_shards *shards, enum kvk_shards_kind kind, uint64_t references);

/* Follow half as many from now on, at least one in 2^14 of those offered. O(sample_count). */
void kvk_shards_halve(struct kvk_shards *shards);

/* What was counted so far weighs `factor` times as much from now on, 0 to 1. */
void kvk_shards_age(struct kvk_shards *shards, double factor);

/* ---- Answers ---- */

#define KVK_SHARDS_STEPS_PER_OCTAVE 16
#define KVK_SHARDS_BUCKETS (64 * KVK_SHARDS_STEPS_PER_OCTAVE)
#define KVK_SHARDS_CLASSES 8 /* of keys */
#define KVK_SHARDS_ASKED 2   /* kinds: KVK_SHARDS_KNOWN, KVK_SHARDS_NEW */

/* What was counted; a copy of it answers without the lock. */
struct kvk_shards_counts {
    double references[KVK_SHARDS_ASKED];                    /* asked for, in truth */
    double estimated[KVK_SHARDS_ASKED][KVK_SHARDS_CLASSES]; /* what the followed ones stand for */
    uint64_t longest_bytes;                                 /* distance */
    uint64_t shortest_bytes;                                /* UINT64_MAX: none yet */
    float hits[KVK_SHARDS_ASKED][KVK_SHARDS_CLASSES][KVK_SHARDS_BUCKETS]; /* by distance */
};
const struct kvk_shards_counts *kvk_shards_counts(const struct kvk_shards *shards);

struct kvk_shards_ratio {
    double hits;  /* of references asked for, 0 to 1 */
    double error; /* standard error of it, estimated; 1 where nothing is known */
};

/* Of an LRU cache of so many bytes; UINT64_MAX: an endless one. */
struct kvk_shards_ratio kvk_shards_ratio(const struct kvk_shards_counts *counts,
                                         uint64_t size_bytes);

struct kvk_shards_stats {
    double rate;             /* things followed of all, now */
    uint32_t samples;        /* things followed now */
    uint64_t followed;       /* references ever followed */
    uint64_t distinct_bytes; /* estimate: of all different things in the sample's time */
};
void kvk_shards_stats(const struct kvk_shards *shards, struct kvk_shards_stats *stats);
uint64_t kvk_shards_bytes(const struct kvk_shards *shards); /* of memory */

#endif
