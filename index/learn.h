/*
 * When do blocks come back? Learned online, per class of blocks.
 *
 * A block enters a class when it is used: the class says how often it has been used by then. From
 * there it either comes back at some age, which ends its stay in the class with a reuse at that
 * age, or it never does. Two counts per class say all of it: how many entered, and how many came
 * back at which age, in log-spaced buckets. They decay, so that an old day does not outvote today.
 *
 * From them follows how many hits a second of residence brings at an age: what came back in that
 * bucket, over the time that all which had not come back before spent in it. The density of a block
 * of class k at age a is the best such rate that is still ahead of it,
 *
 *     density(k, a) = max over q >= a of  hits(k, q) / seconds of residence(k, q)
 *
 * The maximum matters: a block that tends to come back in ten minutes is worth its room for the
 * whole ten minutes, although nothing happens in the first nine. It never rises with age, so within
 * a class the oldest is worth the least, and one look at each class finds the least of all.
 */
#ifndef KVK_INDEX_LEARN_H
#define KVK_INDEX_LEARN_H

#include <stdint.h>

#include "index/evict.h"

#define KVK_LEARN_AGE_COUNT 48

struct kvk_learn {
    double entered[KVK_EVICT_CLASS_COUNT];                      /* uses that led into the class */
    double reused[KVK_EVICT_CLASS_COUNT][KVK_LEARN_AGE_COUNT];  /* that left it, by age */
    double density[KVK_EVICT_CLASS_COUNT][KVK_LEARN_AGE_COUNT]; /* hits per second; what is asked */
    double age_edge[KVK_LEARN_AGE_COUNT + 1];                   /* seconds: where buckets begin */
};

void kvk_learn_init(struct kvk_learn *learn);
void kvk_learn_enter(struct kvk_learn *learn, uint32_t class_index);
void kvk_learn_reuse(struct kvk_learn *learn, uint32_t class_index, double age_s);
double kvk_learn_density(const struct kvk_learn *learn, uint32_t class_index, double age_s);

/* Compute the densities anew from the counts, then let these decay by one step. `block_count` is
 * the capacity: it weighs the prior. A few hundred additions. */
void kvk_learn_refresh(struct kvk_learn *learn, uint32_t block_count);

#endif
