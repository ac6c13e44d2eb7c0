/*
 * Moving blocks: one pass over the memory that copies and takes the checksum.
 *
 * The checksum is XXH3-64 of the whole piece (seed 0), however it was cut into steps. Copies go
 * past the caches (non-temporal stores), since a block that moves between tiers is not read again
 * soon and would push out what is. Hash and copy run in one loop, line by line, so that the hash
 * computes while the memory is waited for.
 *
 * Chosen at run time: AVX-512, AVX2, or plain C. Every function returns with its stores done and
 * visible to other processors. Source and target may have any alignment and must not overlap.
 */
#ifndef KVK_BASE_COPY_H
#define KVK_BASE_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Copy, and store the checksum of the bytes that were copied. */
void kvk_copy_checksum(void *target, const void *source, size_t size, uint64_t *checksum);

/* Copy without a checksum. */
void kvk_copy_stream(void *target, const void *source, size_t size);

uint64_t kvk_checksum(const void *source, size_t size);

/* The same in steps, for pieces that are moved bit by bit. The caller's memory. */
struct kvk_checksum_state {
    _Alignas(64) uint8_t bytes[576];
};

void kvk_checksum_begin(struct kvk_checksum_state *state);
void kvk_checksum_add(struct kvk_checksum_state *state, const void *source, size_t size);
void kvk_checksum_add_copy(struct kvk_checksum_state *state, void *target, const void *source,
                           size_t size);
uint64_t kvk_checksum_end(const struct kvk_checksum_state *state);

/* Which path runs: "avx512", "avx2" or "plain". */
const char *kvk_copy_path_name(void);

/* Take this path from now on, or the best one for NULL. False: no such path on this machine. For
 * tests and measurements; not while copies run. */
bool kvk_copy_path_select(const char *name);

#endif
