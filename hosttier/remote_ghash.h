/*
 * The sum of AES-GCM (GHASH, NIST SP 800-38D) over data that is only authenticated, where the
 * processor multiplies four blocks at a time (AVX-512 with VPCLMULQDQ). OpenSSL before 3.2 does one
 * at a time there, which took more than all else that a value costs. Keys, AES and all that is
 * encrypted stay OpenSSL's; the sum is the standard's, so values are the same whoever made them.
 *
 * No branch and no address depends on keys or data, only on sizes.
 *
 * Locking: a sum belongs to one thread.
 */
#ifndef KVK_HOSTTIER_REMOTE_GHASH_H
#define KVK_HOSTTIER_REMOTE_GHASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVK_REMOTE_GHASH_SIZE 16

struct kvk_remote_ghash {
    uint8_t powers[6][KVK_REMOTE_GHASH_SIZE]; /* of the key, as remote_ghash.c has them */
    uint8_t sum[KVK_REMOTE_GHASH_SIZE];
    uint8_t part[KVK_REMOTE_GHASH_SIZE]; /* [part_size], of a block that is not whole yet */
    uint32_t part_size;
    uint64_t size_bytes;
};

/* Can this processor? Without, nothing else here may be called. */
bool kvk_remote_ghash_works(void);

/* `key`: the block of zeros, encrypted. */
void kvk_remote_ghash_begin(struct kvk_remote_ghash *ghash,
                            const uint8_t key[KVK_REMOTE_GHASH_SIZE]);
void kvk_remote_ghash_add(struct kvk_remote_ghash *ghash, const uint8_t *bytes, size_t size);

/* The sum of all that was added as additional data, with its length, and of no ciphertext. */
void kvk_remote_ghash_end(struct kvk_remote_ghash *ghash, uint8_t sum[KVK_REMOTE_GHASH_SIZE]);

#endif
