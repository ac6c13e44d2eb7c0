/*
 * What the files of the remote store's values share: the header's layout, and what one thread needs
 * of OpenSSL. Read remote_value.h first.
 *
 * Locking: none; as there.
 */
#ifndef KVK_HOSTTIER_REMOTE_VALUE_INTERNAL_H
#define KVK_HOSTTIER_REMOTE_VALUE_INTERNAL_H

#include <openssl/evp.h>

#include "hosttier/remote_value.h"

#define KVK_REMOTE_VERSION_NUMBER 3U
#define KVK_REMOTE_FLAG_ENCRYPTED 1U
#define KVK_REMOTE_HASH_SIZE 32
#define KVK_REMOTE_TAG_SIZE 16
#define KVK_REMOTE_MARK_SIZE 8
#define KVK_REMOTE_NONCE_SIZE 24
#define KVK_REMOTE_GCM_NONCE_SIZE 12
#define KVK_REMOTE_CHUNK_SIZE (32U << 10) /* proven, or sealed and copied, while in the cache */
#define KVK_REMOTE_NONCES_AHEAD 64U       /* drawn at once: each is used once */

/* Where the header's fields lie. The tag covers all before the checksum, and the payload; the mark
 * all before itself, and the checksum that and the mark. */
enum {
    KVK_REMOTE_AT_MAGIC = 0, /* "KVKR" */
    KVK_REMOTE_AT_VERSION = 4,
    KVK_REMOTE_AT_FLAGS = 6,
    KVK_REMOTE_AT_PAYLOAD = 8,
    KVK_REMOTE_AT_PART = 12,
    KVK_REMOTE_AT_PART_COUNT = 14,
    KVK_REMOTE_AT_GENERATION = 16,
    KVK_REMOTE_AT_FORMAT = 24,
    KVK_REMOTE_AT_ZERO = 28, /* 4 bytes */
    KVK_REMOTE_AT_SHAPE = 32,
    KVK_REMOTE_AT_KEY = 48,
    KVK_REMOTE_AT_PARENT = 64,
    KVK_REMOTE_AT_BLOCK_BYTES = 80,
    KVK_REMOTE_AT_NONCE = 88,
    KVK_REMOTE_AT_MARK = 112,
    KVK_REMOTE_AT_CHECKSUM = 120,
    KVK_REMOTE_AT_TAG = 128,
};
_Static_assert(KVK_REMOTE_AT_TAG + KVK_REMOTE_TAG_SIZE == KVK_REMOTE_HEADER_SIZE,
               "the header is stored: 144 bytes");
_Static_assert(KVK_REMOTE_AT_NONCE + KVK_REMOTE_NONCE_SIZE == KVK_REMOTE_AT_MARK &&
                   KVK_REMOTE_AT_MARK + KVK_REMOTE_MARK_SIZE == KVK_REMOTE_AT_CHECKSUM,
               "the header has no holes");

extern const uint8_t kvk_remote_magic[4]; /* "KVKR" */

/* An HMAC of one key after another: most often of the same one, which is then not set up again. */
struct kvk_remote_mac {
    EVP_MD_CTX *inner, *outer; /* have hashed the key already */
    EVP_MD_CTX *work;
    uint8_t key[32];
    bool keyed;
};

struct kvk_remote_crypt {
    EVP_MD *sha256;
    struct kvk_remote_mac names, seals;
    EVP_CIPHER *cipher;
    EVP_CIPHER_CTX *cipher_context;
    EVP_MAC *once; /* Poly1305: each key for one value */
    EVP_MAC_CTX *once_context;
    bool encrypts; /* this value is sealed by the cipher, not by `once` */
    uint8_t nonces[KVK_REMOTE_NONCES_AHEAD][KVK_REMOTE_NONCE_SIZE];
    uint32_t nonce_left;
};

/* Begin a value's seal, with its header. */
void kvk_remote_seal_begin(struct kvk_remote_crypt *crypt, const struct kvk_remote_space *space,
                           const uint8_t *header, bool seal);
/* The payload's next bytes, en- or decrypted to `out` (which may be `in`); NULL: authenticated. */
void kvk_remote_seal_add(struct kvk_remote_crypt *crypt, uint8_t *out, const uint8_t *in,
                         size_t size);
void kvk_remote_seal_end(struct kvk_remote_crypt *crypt, uint8_t tag[KVK_REMOTE_TAG_SIZE]);
bool kvk_remote_seal_proves(struct kvk_remote_crypt *crypt, const uint8_t tag[KVK_REMOTE_TAG_SIZE]);

#endif
