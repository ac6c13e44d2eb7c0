/*
 * Names and values of the remote store: HMAC-SHA-256 and AES-256-GCM by OpenSSL, checksums by XXH3.
 */
#include "hosttier/remote_value.h"

#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/random.h"

#define VERSION 1U
#define FLAG_ENCRYPTED 1U
#define HASH_SIZE 32
#define TAG_SIZE 16
#define NONCE_SIZE 24
#define GCM_NONCE_SIZE 12
#define CHUNK_SIZE (32U << 10) /* copied, sealed and hashed while it is in the cache */

/* Where the header's fields lie. The tag covers all before it, the checksum all but itself and the
 * tag. */
enum {
    AT_MAGIC = 0, /* "KVKR" */
    AT_VERSION = 4,
    AT_FLAGS = 6,
    AT_PAYLOAD = 8,
    AT_PART = 12,
    AT_PART_COUNT = 14,
    AT_GENERATION = 16,
    AT_FORMAT = 24,
    AT_ZERO = 28, /* 4 bytes */
    AT_SHAPE = 32,
    AT_KEY = 48,
    AT_PARENT = 64,
    AT_BLOCK_BYTES = 80,
    AT_NONCE = 88,
    AT_ZERO_TOO = 112, /* 8 bytes */
    AT_CHECKSUM = 120,
    AT_TAG = 128,
};
_Static_assert(AT_TAG + TAG_SIZE == KVK_REMOTE_HEADER_SIZE, "the header is stored: 144 bytes");
_Static_assert(AT_NONCE + NONCE_SIZE == AT_ZERO_TOO, "the header has no holes");

static const uint8_t magic[4] = {'K', 'V', 'K', 'R'};

struct kvk_remote_crypt {
    EVP_MAC *mac;
    EVP_MAC_CTX *mac_context;
    EVP_CIPHER *cipher;
    EVP_CIPHER_CTX *cipher_context;
    XXH3_state_t *checksum;
};

const char *kvk_remote_result_name(enum kvk_remote_result result)
{
    static const char *const names[KVK_REMOTE_RESULT_COUNT] = {
        [KVK_REMOTE_PENDING] = "pending",     [KVK_REMOTE_HIT] = "hit",
        [KVK_REMOTE_ABSENT] = "absent",       [KVK_REMOTE_NOT_OURS] = "not_ours",
        [KVK_REMOTE_VERSION] = "version",     [KVK_REMOTE_TRUNCATED] = "truncated",
        [KVK_REMOTE_DAMAGED] = "damaged",     [KVK_REMOTE_FOREIGN] = "foreign",
        [KVK_REMOTE_OTHER_KEY] = "other_key", [KVK_REMOTE_GENERATION] = "generation",
        [KVK_REMOTE_FORMAT] = "format",       [KVK_REMOTE_SHAPE] = "shape",
        [KVK_REMOTE_PARENT] = "parent",       [KVK_REMOTE_PART] = "part",
        [KVK_REMOTE_FULL] = "full",           [KVK_REMOTE_UNAVAILABLE] = "unavailable",
        [KVK_REMOTE_DEADLINE] = "deadline",   [KVK_REMOTE_REFUSED] = "refused",
        [KVK_REMOTE_SKIPPED] = "skipped",     [KVK_REMOTE_CANCELLED] = "cancelled",
    };
    return (unsigned)result < KVK_REMOTE_RESULT_COUNT ? names[result] : "unknown";
}

/* ---- OpenSSL ---- */

enum kvk_status kvk_remote_crypt_create(struct kvk_remote_crypt **crypt, struct kvk_error *error)
{
    struct kvk_remote_crypt *made = calloc(1, sizeof(*made));
    if (made != NULL) {
        made->mac = EVP_MAC_fetch(NULL, "HMAC", NULL);
        made->mac_context = made->mac != NULL ? EVP_MAC_CTX_new(made->mac) : NULL;
        made->cipher = EVP_CIPHER_fetch(NULL, "AES-256-GCM", NULL);
        made->cipher_context = EVP_CIPHER_CTX_new();
        made->checksum = XXH3_createState();
    }
    if (made == NULL || made->mac_context == NULL || made->cipher == NULL ||
        made->cipher_context == NULL || made->checksum == NULL) {
        kvk_remote_crypt_destroy(made);
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "the OpenSSL library has no HMAC or AES-256-GCM, or memory is short");
    }
    *crypt = made;
    return KVK_OK;
}

void kvk_remote_crypt_destroy(struct kvk_remote_crypt *crypt)
{
    if (crypt == NULL) {
        return;
    }
    EVP_MAC_CTX_free(crypt->mac_context);
    EVP_MAC_free(crypt->mac);
    EVP_CIPHER_CTX_free(crypt->cipher_context);
    EVP_CIPHER_free(crypt->cipher);
    (void)XXH3_freeState(crypt->checksum);
    free(crypt);
}

struct text {
    const void *bytes;
    size_t size;
};

/* HMAC-SHA-256 of some texts of fixed lengths, so that no two lists of them are one message. After
 * it was created a context fails only by our own doing. */
static void hmac(struct kvk_remote_crypt *crypt, const uint8_t key[32], const struct text *texts,
                 uint32_t count, uint8_t out[HASH_SIZE])
{
    char digest[] = "SHA256";
    OSSL_PARAM parameters[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
        OSSL_PARAM_construct_end(),
    };
    int ok = EVP_MAC_init(crypt->mac_context, key, 32, parameters);
    for (uint32_t i = 0; i < count; i++) {
        ok &= EVP_MAC_update(crypt->mac_context, texts[i].bytes, texts[i].size);
    }
    size_t size = 0;
    ok &= EVP_MAC_final(crypt->mac_context, out, &size, HASH_SIZE);
    KVK_ASSERT(ok == 1 && size == HASH_SIZE);
}

/* ---- Spaces ---- */

enum kvk_status kvk_remote_space_init(struct kvk_remote_space *space,
                                      const struct kvk_remote_space_options *options,
                                      struct kvk_error *error)
{
    uint64_t bytes_max = (uint64_t)KVK_REMOTE_PAYLOAD_MAX * KVK_REMOTE_PARTS_MAX;
    if (options->block_bytes == 0 || options->block_bytes > bytes_max) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "block_bytes",
                              options->block_bytes, bytes_max,
                              "block_bytes of a space in the remote store must be 1 to %llu",
                              (unsigned long long)bytes_max);
    }
    struct kvk_remote_crypt *crypt = NULL;
    enum kvk_status status = kvk_remote_crypt_create(&crypt, error);
    if (status != KVK_OK) {
        return status;
    }
    *space = (struct kvk_remote_space){
        .generation = options->generation,
        .block_bytes = options->block_bytes,
        .group = options->group,
        .format = options->format,
        .encrypt = options->encrypt,
    };
    uint64_t count = (options->block_bytes + KVK_REMOTE_PAYLOAD_MAX - 1) / KVK_REMOTE_PAYLOAD_MAX;
    space->part_count = (uint32_t)count;
    space->part_bytes = (uint32_t)((options->block_bytes + count - 1) / count);
    memcpy(space->space, options->space, sizeof(space->space));

    struct text name = {"kvkeep remote names", 19};
    struct text seal = {"kvkeep remote seals", 19};
    struct text shape[] = {{"shape", 5}, {options->shape, KVK_REMOTE_KEY_SIZE}};
    uint8_t hash[HASH_SIZE];
    hmac(crypt, options->secret, &name, 1, space->name_key);
    hmac(crypt, options->secret, &seal, 1, space->seal_key);
    hmac(crypt, space->name_key, shape, 2, hash);
    memcpy(space->shape_check, hash, sizeof(space->shape_check));
    kvk_remote_crypt_destroy(crypt);
    return KVK_OK;
}

void kvk_remote_space_finish(struct kvk_remote_space *space)
{
    kvk_secret_wipe(space, sizeof(*space));
}

uint32_t kvk_remote_payload_bytes(const struct kvk_remote_space *space, uint32_t part)
{
    KVK_ASSERT(part < space->part_count);
    uint64_t first = (uint64_t)part * space->part_bytes;
    uint64_t left = space->block_bytes - first;
    return left < space->part_bytes ? (uint32_t)left : space->part_bytes;
}

void kvk_remote_want_init(struct kvk_remote_want *want, struct kvk_remote_crypt *crypt,
                          const struct kvk_remote_space *space, const struct kvk_remote_id *id,
                          uint32_t part)
{
    KVK_ASSERT(part < space->part_count);
    uint8_t numbers[8];
    kvk_store_le32(numbers, space->group);
    kvk_store_le32(numbers + 4, part);
    struct text name[] = {{"name", 4},
                          {space->space, sizeof(space->space)},
                          {numbers, sizeof(numbers)},
                          {id->key, sizeof(id->key)}};
    struct text parent[] = {{"parent", 6},
                            {space->space, sizeof(space->space)},
                            {numbers, sizeof(numbers)},
                            {id->key, sizeof(id->key)},
                            {id->parent, sizeof(id->parent)}};
    uint8_t hash[HASH_SIZE];
    want->space = space;
    want->id = id;
    want->part = part;
    hmac(crypt, space->name_key, name, 4, hash);
    memcpy(want->hash, hash, KVK_REMOTE_KEY_SIZE);
    memcpy(want->key_check, hash + KVK_REMOTE_KEY_SIZE, KVK_REMOTE_KEY_SIZE);
    hmac(crypt, space->name_key, parent, 5, hash);
    memcpy(want->parent_check, hash, KVK_REMOTE_KEY_SIZE);
}

/* ---- Walking a part of the block's memory ---- */

struct walk {
    const struct kvk_remote_piece *pieces;
    uint32_t count;
    uint32_t index;
    uint64_t offset; /* in the piece */
    uint64_t left;   /* of the part */
};

static struct walk walk_part(const struct kvk_remote_want *want,
                             const struct kvk_remote_piece *pieces, uint32_t count)
{
    struct walk walk = {.pieces = pieces, .count = count};
    uint64_t skip = (uint64_t)want->part * want->space->part_bytes;
    while (walk.index < count && skip >= pieces[walk.index].size_bytes) {
        skip -= pieces[walk.index++].size_bytes;
    }
    walk.offset = skip;
    walk.left = kvk_remote_payload_bytes(want->space, want->part);
    return walk;
}

/* The next run of memory, CHUNK_SIZE at most, or false at the part's end. */
static bool walk_next(struct walk *walk, uint8_t **memory, size_t *size)
{
    while (walk->left > 0) {
        KVK_ASSERT(walk->index < walk->count); /* the pieces are as large as the block */
        const struct kvk_remote_piece *piece = &walk->pieces[walk->index];
        uint64_t here = piece->size_bytes - walk->offset;
        here = here < walk->left ? here : walk->left;
        here = here < CHUNK_SIZE ? here : CHUNK_SIZE;
        *memory = (uint8_t *)piece->memory + walk->offset;
        *size = (size_t)here;
        walk->left -= here;
        walk->offset += here;
        if (walk->offset == piece->size_bytes) {
            walk->index++;
            walk->offset = 0;
        }
        if (here > 0) {
            return true;
        }
    }
    return false;
}

/* ---- Sealing ---- */

static uint64_t value_checksum(struct kvk_remote_crypt *crypt, const uint8_t *value, size_t size)
{
    (void)XXH3_64bits_reset(crypt->checksum);
    (void)XXH3_64bits_update(crypt->checksum, value, AT_CHECKSUM);
    (void)XXH3_64bits_update(crypt->checksum, value + KVK_REMOTE_HEADER_SIZE,
                             size - KVK_REMOTE_HEADER_SIZE);
    return XXH3_64bits_digest(crypt->checksum);
}

/* Begin a value's cipher; its additional data is the header without checksum and tag. */
static void cipher_begin(struct kvk_remote_crypt *crypt, const struct kvk_remote_space *space,
                         const uint8_t *header, bool seal)
{
    uint8_t key[HASH_SIZE];
    struct text texts[] = {{"seal", 4}, {header + AT_NONCE, NONCE_SIZE - GCM_NONCE_SIZE}};
    const uint8_t *nonce = header + AT_NONCE + NONCE_SIZE - GCM_NONCE_SIZE;
    int done = 0;

    hmac(crypt, space->seal_key, texts, 2, key);
    int ok = EVP_CipherInit_ex2(crypt->cipher_context, crypt->cipher, key, nonce, seal, NULL);
    ok &= EVP_CipherUpdate(crypt->cipher_context, NULL, &done, header, AT_CHECKSUM);
    KVK_ASSERT(ok == 1);
    kvk_secret_wipe(key, sizeof(key));
}

void kvk_remote_value_encode(const struct kvk_remote_want *want, struct kvk_remote_crypt *crypt,
                             const struct kvk_remote_piece *pieces, uint32_t piece_count,
                             uint8_t *target)
{
    const struct kvk_remote_space *space = want->space;
    uint32_t payload_bytes = kvk_remote_payload_bytes(space, want->part);

    memset(target, 0, KVK_REMOTE_HEADER_SIZE);
    memcpy(target + AT_MAGIC, magic, sizeof(magic));
    kvk_store_le16(target + AT_VERSION, VERSION);
    kvk_store_le16(target + AT_FLAGS, space->encrypt ? FLAG_ENCRYPTED : 0);
    kvk_store_le32(target + AT_PAYLOAD, payload_bytes);
    kvk_store_le16(target + AT_PART, (uint16_t)want->part);
    kvk_store_le16(target + AT_PART_COUNT, (uint16_t)space->part_count);
    kvk_store_le64(target + AT_GENERATION, space->generation);
    kvk_store_le32(target + AT_FORMAT, space->format);
    memcpy(target + AT_SHAPE, space->shape_check, KVK_REMOTE_KEY_SIZE);
    memcpy(target + AT_KEY, want->key_check, KVK_REMOTE_KEY_SIZE);
    memcpy(target + AT_PARENT, want->parent_check, KVK_REMOTE_KEY_SIZE);
    kvk_store_le64(target + AT_BLOCK_BYTES, space->block_bytes);
    kvk_random_secret(target + AT_NONCE, NONCE_SIZE);

    cipher_begin(crypt, space, target, true);
    (void)XXH3_64bits_reset(crypt->checksum);
    (void)XXH3_64bits_update(crypt->checksum, target, AT_CHECKSUM);
    struct walk walk = walk_part(want, pieces, piece_count);
    uint8_t *out = target + KVK_REMOTE_HEADER_SIZE;
    uint8_t *memory = NULL;
    size_t size = 0;
    int done = 0;
    int ok = 1;
    while (walk_next(&walk, &memory, &size)) {
        if (!space->encrypt) {
            /* From the copy, so that what is sent is what is sealed, whoever writes meanwhile. */
            memcpy(out, memory, size);
        }
        ok &= EVP_CipherUpdate(crypt->cipher_context, space->encrypt ? out : NULL, &done,
                               space->encrypt ? memory : out, (int)size);
        (void)XXH3_64bits_update(crypt->checksum, out, size);
        out += size;
    }
    ok &= EVP_CipherFinal_ex(crypt->cipher_context, out, &done);
    ok &= EVP_CIPHER_CTX_ctrl(crypt->cipher_context, EVP_CTRL_AEAD_GET_TAG, TAG_SIZE,
                              target + AT_TAG);
    KVK_ASSERT(ok == 1);
    kvk_store_le64(target + AT_CHECKSUM, XXH3_64bits_digest(crypt->checksum));
}

/* ---- Proving ---- */

enum kvk_remote_result kvk_remote_header_check(const struct kvk_remote_want *want,
                                               const uint8_t *header, size_t size)
{
    const struct kvk_remote_space *space = want->space;
    if (size < AT_FLAGS || memcmp(header, magic, sizeof(magic)) != 0) {
        return KVK_REMOTE_NOT_OURS;
    }
    if (kvk_load_le16(header + AT_VERSION) != VERSION) {
        return KVK_REMOTE_VERSION;
    }
    if (size < KVK_REMOTE_HEADER_SIZE) {
        return KVK_REMOTE_TRUNCATED;
    }
    if (memcmp(header + AT_KEY, want->key_check, KVK_REMOTE_KEY_SIZE) != 0) {
        return KVK_REMOTE_OTHER_KEY;
    }
    if (kvk_load_le64(header + AT_GENERATION) != space->generation) {
        return KVK_REMOTE_GENERATION;
    }
    if (kvk_load_le32(header + AT_FORMAT) != space->format ||
        kvk_load_le16(header + AT_FLAGS) != (space->encrypt ? FLAG_ENCRYPTED : 0)) {
        return KVK_REMOTE_FORMAT;
    }
    if (memcmp(header + AT_SHAPE, space->shape_check, KVK_REMOTE_KEY_SIZE) != 0) {
        return KVK_REMOTE_SHAPE;
    }
    if (memcmp(header + AT_PARENT, want->parent_check, KVK_REMOTE_KEY_SIZE) != 0) {
        return KVK_REMOTE_PARENT;
    }
    if (kvk_load_le16(header + AT_PART) != want->part ||
        kvk_load_le16(header + AT_PART_COUNT) != space->part_count ||
        kvk_load_le64(header + AT_BLOCK_BYTES) != space->block_bytes ||
        kvk_load_le32(header + AT_PAYLOAD) != kvk_remote_payload_bytes(space, want->part)) {
        return KVK_REMOTE_PART;
    }
    return KVK_REMOTE_HIT;
}

/* Is it whole? As far as it says of itself, without any key. */
static enum kvk_remote_result value_whole(struct kvk_remote_crypt *crypt, const uint8_t *value,
                                          size_t size)
{
    if (size < AT_FLAGS || memcmp(value, magic, sizeof(magic)) != 0) {
        return KVK_REMOTE_NOT_OURS;
    }
    if (kvk_load_le16(value + AT_VERSION) != VERSION) {
        return KVK_REMOTE_VERSION;
    }
    if (size < KVK_REMOTE_HEADER_SIZE ||
        size - KVK_REMOTE_HEADER_SIZE != kvk_load_le32(value + AT_PAYLOAD)) {
        return KVK_REMOTE_TRUNCATED;
    }
    if (value_checksum(crypt, value, size) != kvk_load_le64(value + AT_CHECKSUM)) {
        return KVK_REMOTE_DAMAGED;
    }
    return KVK_REMOTE_HIT;
}

enum kvk_remote_result kvk_remote_value_decode(const struct kvk_remote_want *want,
                                               struct kvk_remote_crypt *crypt, const uint8_t *value,
                                               size_t size, const struct kvk_remote_piece *pieces,
                                               uint32_t piece_count)
{
    enum kvk_remote_result result = value_whole(crypt, value, size);
    if (result == KVK_REMOTE_HIT) {
        result = kvk_remote_header_check(want, value, size);
    }
    if (result != KVK_REMOTE_HIT) {
        return result;
    }

    bool encrypt = want->space->encrypt;
    const uint8_t *in = value + KVK_REMOTE_HEADER_SIZE;
    uint8_t *memory = NULL;
    size_t run = 0;
    int done = 0;
    int ok = 1;
    cipher_begin(crypt, want->space, value, false);
    struct walk walk = walk_part(want, pieces, piece_count);
    while (walk_next(&walk, &memory, &run)) {
        if (!encrypt) {
            memcpy(memory, in, run);
        }
        ok &= EVP_CipherUpdate(crypt->cipher_context, encrypt ? memory : NULL, &done, in, (int)run);
        in += run;
    }
    KVK_ASSERT(ok == 1);

    uint8_t tag[TAG_SIZE];
    uint8_t rest[16];
    memcpy(tag, value + AT_TAG, sizeof(tag));
    ok = EVP_CIPHER_CTX_ctrl(crypt->cipher_context, EVP_CTRL_AEAD_SET_TAG, TAG_SIZE, tag);
    KVK_ASSERT(ok == 1);
    return EVP_CipherFinal_ex(crypt->cipher_context, rest, &done) == 1 ? KVK_REMOTE_HIT
                                                                       : KVK_REMOTE_FOREIGN;
}
