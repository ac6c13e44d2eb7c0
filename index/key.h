/*
 * Chain keys: 128-bit keyed hashes that find candidates. They never decide: a hit is confirmed by
 * comparing the parent, the tokens and the content digests themselves.
 *
 *     root key  = H(tenant secret; tagged, length-prefixed identity, group, salt)
 *     block key = H(tenant secret; parent key, the block's tokens, its content bytes)
 *
 * The same secret, identity and tokens give the same key in every process and after a restart.
 */
#ifndef KVK_INDEX_KEY_H
#define KVK_INDEX_KEY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define KVK_SECRET_SIZE 32       /* of a tenant, random */
#define KVK_HASH_SECRET_SIZE 192 /* what XXH3 takes, expanded from it */
#define KVK_DIGEST_SIZE_MAX 64

struct kvk_key {
    uint64_t low;
    uint64_t high;
};

/* A tenant's hashing key. `constant` is a test hook: every hash is the same, so that only the
 * comparison stands between two prompts. */
struct kvk_hasher {
    uint8_t secret[KVK_HASH_SECRET_SIZE];
    bool constant;
};

/* A run of placeholder tokens and the digest of the content (an image, say) they stand for. It
 * counts for every block that it touches, together with where in the span that block begins. */
struct kvk_content_span {
    uint64_t first;       /* token position in the prompt */
    uint64_t count;       /* tokens */
    uint32_t digest_size; /* 1 to KVK_DIGEST_SIZE_MAX */
    uint8_t digest[KVK_DIGEST_SIZE_MAX];
};

/* What a prompt or a part of one says. Borrowed by every function that takes it. */
struct kvk_content {
    const uint32_t *tokens; /* [token_count]; the first stands at position `first` */
    uint64_t first;         /* a multiple of the block's tokens wherever blocks are cut */
    uint64_t token_count;
    const struct kvk_content_span *spans; /* [span_count], sorted by first, not overlapping;
                                             positions count from the prompt's start */
    uint32_t span_count;
};

void kvk_hasher_init(struct kvk_hasher *hasher, const uint8_t secret[KVK_SECRET_SIZE]);

/* Root of one group of one space, for one salt. `identity` is the space's canonical bytes. */
struct kvk_key kvk_key_root(const struct kvk_hasher *hasher, const uint8_t *identity,
                            size_t identity_size, uint32_t group, const uint8_t *salt,
                            size_t salt_size);

/* Key of one block. `extra` are the canonical bytes of the content spans that touch it. */
struct kvk_key kvk_key_block(const struct kvk_hasher *hasher, struct kvk_key parent,
                             const uint32_t *tokens, uint32_t token_count, const uint8_t *extra,
                             size_t extra_size);

static inline bool kvk_key_equal(struct kvk_key a, struct kvk_key b)
{
    return a.low == b.low && a.high == b.high;
}

#endif
