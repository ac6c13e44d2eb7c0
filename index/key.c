/*
 * Chain keys by XXH3 with a secret of its own per tenant.
 *
 * XXH3 is fast and, without the secret, no one can aim for a collision from outside; it is not a
 * cryptographic hash, and nothing here rests on that: a key only finds a candidate.
 */
#include "index/key.h"

#include <string.h>

#include <openssl/sha.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/assert.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "keys are hashed as little-endian bytes");
_Static_assert(sizeof(struct kvk_key) == 16, "keys are stored and hashed as 16 bytes");
_Static_assert(KVK_HASH_SECRET_SIZE >= XXH3_SECRET_SIZE_MIN, "XXH3 takes no shorter secret");
_Static_assert(KVK_HASH_SECRET_SIZE == 3 * SHA512_DIGEST_LENGTH, "the expansion fills the secret");

/* What is hashed begins with what it is, so that no root's bytes read as a block's. */
enum key_kind {
    KEY_KIND_ROOT = 1,
    KEY_KIND_BLOCK = 2,
};

/* Before the tokens of a block; without padding, for it is hashed as it lies. */
struct block_header {
    uint32_t kind;
    uint32_t token_count;
    uint64_t extra_size;
    struct kvk_key parent;
};
_Static_assert(sizeof(struct block_header) == 32, "no padding");

/* Up to this size a block's bytes are gathered on the stack and hashed in one go. */
#define GATHER_SIZE 512

static struct kvk_key key_from(XXH128_hash_t hash)
{
    return (struct kvk_key){.low = hash.low64, .high = hash.high64};
}

static struct kvk_key key_constant(void)
{
    return (struct kvk_key){.low = UINT64_C(0x6b766b6565700000), .high = 1};
}

/* 192 bytes from 32: SHA-512 of a tag, a counter and the secret, three times. */
void kvk_hasher_init(struct kvk_hasher *hasher, const uint8_t secret[KVK_SECRET_SIZE])
{
    static const char tag[] = "kvkeep chain key secret 1";
    uint8_t input[sizeof(tag) + 1 + KVK_SECRET_SIZE];
    memcpy(input, tag, sizeof(tag));
    memcpy(input + sizeof(tag) + 1, secret, KVK_SECRET_SIZE);
    for (uint8_t i = 0; i < 3; i++) {
        input[sizeof(tag)] = i;
        SHA512(input, sizeof(input), hasher->secret + (size_t)i * SHA512_DIGEST_LENGTH);
    }
    hasher->constant = false;
}

static void hash_add(XXH3_state_t *state, const void *bytes, size_t size)
{
    if (size > 0) {
        XXH_errorcode code = XXH3_128bits_update(state, bytes, size);
        KVK_ASSERT(code == XXH_OK);
    }
}

static void hash_begin(XXH3_state_t *state, const struct kvk_hasher *hasher)
{
    XXH3_INITSTATE(state);
    XXH_errorcode code =
        XXH3_128bits_reset_withSecret(state, hasher->secret, sizeof(hasher->secret));
    KVK_ASSERT(code == XXH_OK);
}

struct kvk_key kvk_key_root(const struct kvk_hasher *hasher, const uint8_t *identity,
                            size_t identity_size, uint32_t group, const uint8_t *salt,
                            size_t salt_size)
{
    if (hasher->constant) {
        return key_constant();
    }
    const uint32_t kind_and_group[2] = {KEY_KIND_ROOT, group};
    const uint64_t sizes[2] = {identity_size, salt_size};
    XXH3_state_t state;
    hash_begin(&state, hasher);
    hash_add(&state, kind_and_group, sizeof(kind_and_group));
    hash_add(&state, sizes, sizeof(sizes));
    hash_add(&state, identity, identity_size);
    hash_add(&state, salt, salt_size);
    return key_from(XXH3_128bits_digest(&state));
}

struct kvk_key kvk_key_block(const struct kvk_hasher *hasher, struct kvk_key parent,
                             const uint32_t *tokens, uint32_t token_count, const uint8_t *extra,
                             size_t extra_size)
{
    if (hasher->constant) {
        return key_constant();
    }
    const struct block_header header = {
        .kind = KEY_KIND_BLOCK,
        .token_count = token_count,
        .extra_size = extra_size,
        .parent = parent,
    };
    size_t token_size = (size_t)token_count * sizeof(*tokens);
    size_t size = sizeof(header) + token_size + extra_size;
    if (size <= GATHER_SIZE) {
        uint8_t bytes[GATHER_SIZE];
        memcpy(bytes, &header, sizeof(header));
        memcpy(bytes + sizeof(header), tokens, token_size);
        if (extra_size > 0) {
            memcpy(bytes + sizeof(header) + token_size, extra, extra_size);
        }
        return key_from(
            XXH3_128bits_withSecret(bytes, size, hasher->secret, sizeof(hasher->secret)));
    }
    XXH3_state_t state;
    hash_begin(&state, hasher);
    hash_add(&state, &header, sizeof(header));
    hash_add(&state, tokens, token_size);
    hash_add(&state, extra, extra_size);
    return key_from(XXH3_128bits_digest(&state));
}
