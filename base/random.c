#include "base/random.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "base/assert.h"

void kvk_random_secret(void *target, size_t size)
{
    uint8_t *bytes = target;
    size_t done = 0;
    while (done < size) {
        ssize_t got = getrandom(bytes + done, size - done, 0);
        if (got > 0) {
            done += (size_t)got;
        } else {
            /* Going on with a guessable secret would be worse than ending here. */
            KVK_ASSERT(errno == EINTR);
        }
    }
}

/* SplitMix64: spreads one seed over the state, which must not be all zero. */
static uint64_t seed_step(uint64_t *seed)
{
    *seed += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t mixed = *seed;
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    return mixed ^ (mixed >> 31);
}

void kvk_random_init(struct kvk_random *random, uint64_t seed)
{
    for (size_t i = 0; i < 4; i++) {
        random->state[i] = seed_step(&seed);
    }
}

static uint64_t rotate_left(uint64_t value, unsigned count)
{
    return (value << count) | (value >> (64 - count));
}

/* xoshiro256** 1.0 by Blackman and Vigna. */
uint64_t kvk_random_next(struct kvk_random *random)
{
    uint64_t *state = random->state;
    uint64_t result = rotate_left(state[1] * 5, 7) * 9;
    uint64_t shifted = state[1] << 17;
    state[2] ^= state[0];
    state[3] ^= state[1];
    state[1] ^= state[2];
    state[0] ^= state[3];
    state[2] ^= shifted;
    state[3] = rotate_left(state[3], 45);
    return result;
}

uint64_t kvk_random_below(struct kvk_random *random, uint64_t bound)
{
    KVK_ASSERT(bound > 0);
    /* Values past the last whole multiple of the bound are thrown away, so that none is likelier.
     */
    uint64_t surplus = (UINT64_MAX % bound + 1) % bound;
    uint64_t value = kvk_random_next(random);
    while (value > UINT64_MAX - surplus) {
        value = kvk_random_next(random);
    }
    return value % bound;
}

uint64_t kvk_random_between(struct kvk_random *random, uint64_t low, uint64_t high)
{
    KVK_ASSERT(low <= high);
    if (high - low == UINT64_MAX) {
        return kvk_random_next(random);
    }
    return low + kvk_random_below(random, high - low + 1);
}

double kvk_random_unit(struct kvk_random *random)
{
    return (double)(kvk_random_next(random) >> 11) * 0x1.0p-53;
}

bool kvk_random_chance(struct kvk_random *random, double probability)
{
    return kvk_random_unit(random) < probability;
}

void kvk_random_fill(struct kvk_random *random, void *target, size_t size)
{
    uint8_t *bytes = target;
    while (size > 0) {
        uint64_t word = kvk_random_next(random);
        size_t step = size < sizeof(word) ? size : sizeof(word);
        memcpy(bytes, &word, step);
        bytes += step;
        size -= step;
    }
}
