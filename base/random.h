/*
 * Random numbers of two kinds, never to be mixed up: bytes from the kernel for secrets and tokens,
 * and a seeded generator (xoshiro256**) whose sequence is the same everywhere, for tests and
 * workloads.
 *
 * Locking: a generator belongs to one thread.
 */
#ifndef KVK_BASE_RANDOM_H
#define KVK_BASE_RANDOM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Unpredictable bytes, from getrandom(2). Aborts where the kernel has none to give. */
void kvk_random_secret(void *target, size_t size);

/* For tests and workloads only: whoever sees a few outputs can tell the rest. */
struct kvk_random {
    uint64_t state[4];
};

void kvk_random_init(struct kvk_random *random, uint64_t seed); /* any seed, 0 too */
uint64_t kvk_random_next(struct kvk_random *random);
uint64_t kvk_random_below(struct kvk_random *random, uint64_t bound); /* 0 to bound - 1, even */
uint64_t kvk_random_between(struct kvk_random *random, uint64_t low, uint64_t high); /* both in */
double kvk_random_unit(struct kvk_random *random);                                   /* [0, 1) */
bool kvk_random_chance(struct kvk_random *random, double probability);
void kvk_random_fill(struct kvk_random *random, void *target, size_t size);

#endif
