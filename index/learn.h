/*
 * When do blocks come back? Learned online, per class of blocks.
 *
 * A block enters a class when it is used: the class says how often it has been used by then. From
 * there it either comes back at some age, which ends its stay in the class with a reuse at that
 * age, or it never does. Two counts per class say all of it: how many entered, and how many came
 * back at which age, in log-spaced buckets. They decay, so that an old day does not outvote today.
 *
 * From them follows the density of a block of class k at age a: the most hits per second of further
 * residence that any waiting time from now on offers,
 *
 *     density(k, a) = max over q >= a of  hits(a..q) / seconds of residence(a..q)
 *
 * where hits(a..q) counts what came back in those ages, and the residence is what all that had not
 * come back by then spent in them. The maximum matters: a block that tends to come back in ten
 * minutes is worth its room for the whole ten minutes, although nothing happens in the first nine.
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
 * the capacity: it weighs the prior. About 5,000 additions. */
void kvk_learn_refresh(struct kvk_learn *learn, uint32_t block_count);

#endif
