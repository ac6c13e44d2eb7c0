/*
 * Names and values of the remote store: SHA-256 for HMAC, AES-256-GCM and Poly1305 by OpenSSL,
 * headers' checksums by XXH3.
 */
#include "hosttier/remote_value.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/copy.h"
#include "base/random.h"
#include "hosttier/remote_value_internal.h"

#define HMAC_BLOCK_SIZE 64 /* of SHA-256 */

const uint8_t kvk_remote_magic[4] = {'K', 'V', 'K', 'R'};

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

/* Of its digest, that is: each message's key comes later. */
static bool mac_create(struct kvk_remote_mac *mac)
{
    mac->inner = EVP_MD_CTX_new();
    mac->outer = EVP_MD_CTX_new();
    mac->work = EVP_MD_CTX_new();
    return mac->inner != NULL && mac->outer != NULL && mac->work != NULL;
}

static void mac_destroy(struct kvk_remote_mac *mac)
{
    EVP_MD_CTX_free(mac->inner);
    EVP_MD_CTX_free(mac->outer);
    EVP_MD_CTX_free(mac->work);
}

enum kvk_status kvk_remote_crypt_create(struct kvk_remote_crypt **crypt, struct kvk_error *error)
{
    struct kvk_remote_crypt *made = calloc(1, sizeof(*made));
    bool whole = false;
    if (made != NULL) {
        made->sha256 = EVP_MD_fetch(NULL, "SHA256", NULL);
        made->cipher = EVP_CIPHER_fetch(NULL, "AES-256-GCM", NULL);
        made->cipher_context = EVP_CIPHER_CTX_new();
        made->once = EVP_MAC_fetch(NULL, "POLY1305", NULL);
        made->once_context = made->once == NULL ? NULL : EVP_MAC_CTX_new(made->once);
        whole = made->sha256 != NULL && made->cipher != NULL && made->cipher_context != NULL &&
                made->once_context != NULL && mac_create(&made->names) && mac_create(&made->seals);
    }
    if (!whole) {
        kvk_remote_crypt_destroy(made);
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "the OpenSSL library has no SHA-256, Poly1305 or AES-256-GCM, or memory is "
                        "short");
    }
    *crypt = made;
    return KVK_OK;
}

void kvk_remote_crypt_destroy(struct kvk_remote_crypt *crypt)
{
    if (crypt == NULL) {
        return;
    }
    mac_destroy(&crypt->names);
    mac_destroy(&crypt->seals);
    EVP_MD_free(crypt->sha256);
    EVP_CIPHER_CTX_free(crypt->cipher_context);
    EVP_CIPHER_free(crypt->cipher);
    EVP_MAC_CTX_free(crypt->once_context);
    EVP_MAC_free(crypt->once);
    kvk_secret_wipe(crypt, sizeof(*crypt));
    free(crypt);
}

struct text {
    const void *bytes;
    size_t size;
};

/* One of HMAC's two hashes, as far as it depends on the key alone. */
static int pad_hash(EVP_MD_CTX *context, const EVP_MD *sha256, const uint8_t key[32], uint8_t pad)
{
    uint8_t block[HMAC_BLOCK_SIZE];
    memset(block, pad, sizeof(block));
    for (int i = 0; i < 32; i++) {
        block[i] ^= key[i];
    }
    int ok = EVP_DigestInit_ex2(context, sha256, NULL);
    ok &= EVP_DigestUpdate(context, block, sizeof(block));
    kvk_secret_wipe(block, sizeof(block));
    return ok;
}

/* HMAC-SHA-256 of some texts of fixed lengths, so that no two lists of them are one message. Of
 * EVP's digests, since its MAC does half as much again around the same hashes. After it was created
 * a context fails only by our own doing. */
static void hmac(struct kvk_remote_crypt *crypt, struct kvk_remote_mac *mac, const uint8_t key[32],
                 const struct text *texts, uint32_t count, uint8_t out[KVK_REMOTE_HASH_SIZE])
{
    unsigned size = 0;
    int ok = 1;
    if (!mac->keyed || memcmp(mac->key, key, sizeof(mac->key)) != 0) {
        ok &= pad_hash(mac->inner, crypt->sha256, key, 0x36);
        ok &= pad_hash(mac->outer, crypt->sha256, key, 0x5c);
        memcpy(mac->key, key, sizeof(mac->key));
        mac->keyed = true;
    }
    ok &= EVP_MD_CTX_copy_ex(mac->work, mac->inner);
    for (uint32_t i = 0; i < count; i++) {
        ok &= EVP_DigestUpdate(mac->work, texts[i].bytes, texts[i].size);
    }
    ok &= EVP_DigestFinal_ex(mac->work, out, NULL);
    ok &= EVP_MD_CTX_copy_ex(mac->work, mac->outer);
    ok &= EVP_DigestUpdate(mac->work, out, KVK_REMOTE_HASH_SIZE);
    ok &= EVP_DigestFinal_ex(mac->work, out, &size);
    KVK_ASSERT(ok == 1 && size == KVK_REMOTE_HASH_SIZE);
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
    uint8_t hash[KVK_REMOTE_HASH_SIZE];
    hmac(crypt, &crypt->names, options->secret, &name, 1, space->name_key);
    hmac(crypt, &crypt->names, options->secret, &seal, 1, space->seal_key);
    hmac(crypt, &crypt->names, space->name_key, shape, 2, hash);
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
    uint8_t hash[KVK_REMOTE_HASH_SIZE];
    want->space = space;
    want->id = id;
    want->part = part;
    hmac(crypt, &crypt->names, space->name_key, name, 4, hash);
    memcpy(want->hash, hash, KVK_REMOTE_KEY_SIZE);
    memcpy(want->key_check, hash + KVK_REMOTE_KEY_SIZE, KVK_REMOTE_KEY_SIZE);
    hmac(crypt, &crypt->names, space->name_key, parent, 5, hash);
    memcpy(want->parent_check, hash, KVK_REMOTE_KEY_SIZE);
}

/* ---- Where a part's bytes lie ---- */

void kvk_remote_place_init(struct kvk_remote_place *place, const struct kvk_remote_want *want,
                           const struct kvk_remote_piece *pieces, uint32_t count)
{
    uint64_t skip = (uint64_t)want->part * want->space->part_bytes;
    *place = (struct kvk_remote_place){.pieces = pieces, .count = count};
    while (place->index < count && skip >= pieces[place->index].size_bytes) {
        skip -= pieces[place->index++].size_bytes;
    }
    place->offset = skip;
    place->left = kvk_remote_payload_bytes(want->space, want->part);
}

bool kvk_remote_place_next(struct kvk_remote_place *place, size_t size_max, uint8_t **memory,
                           size_t *size)
{
    KVK_ASSERT(size_max > 0);
    while (place->left > 0) {
        KVK_ASSERT(place->index < place->count); /* the pieces are as large as the block */
        const struct kvk_remote_piece *piece = &place->pieces[place->index];
        uint64_t here = piece->size_bytes - place->offset;
        here = here < place->left ? here : place->left;
        here = here < size_max ? here : size_max;
        *memory = (uint8_t *)piece->memory + place->offset;
        *size = (size_t)here;
        place->left -= here;
        place->offset += here;
        if (place->offset == piece->size_bytes) {
            place->index++;
            place->offset = 0;
        }
        if (here > 0) {
            return true;
        }
    }
    return false;
}

/* ---- Sealing ---- */

/* The cipher's key is made of the first half of the nonce, and its own nonce is the second; a key
 * that is used once is made of all of it. */
void kvk_remote_seal_begin(struct kvk_remote_crypt *crypt, const struct kvk_remote_space *space,
                           const uint8_t *header, bool seal)
{
    uint8_t key[KVK_REMOTE_HASH_SIZE];
    const uint8_t *nonce = header + KVK_REMOTE_AT_NONCE;
    const size_t half = KVK_REMOTE_NONCE_SIZE - KVK_REMOTE_GCM_NONCE_SIZE;
    struct text texts[] = {{space->encrypt ? "seal" : "once", 4},
                           {nonce, space->encrypt ? half : KVK_REMOTE_NONCE_SIZE}};
    int ok = 0;

    hmac(crypt, &crypt->seals, space->seal_key, texts, 2, key);
    crypt->encrypts = space->encrypt;
    if (crypt->encrypts) {
        ok =
            EVP_CipherInit_ex2(crypt->cipher_context, crypt->cipher, key, nonce + half, seal, NULL);
    } else {
        ok = EVP_MAC_init(crypt->once_context, key, sizeof(key), NULL);
    }
    KVK_ASSERT(ok == 1);
    kvk_secret_wipe(key, sizeof(key));
    kvk_remote_seal_add(crypt, NULL, header, KVK_REMOTE_AT_CHECKSUM);
}

void kvk_remote_seal_add(struct kvk_remote_crypt *crypt, uint8_t *out, const uint8_t *in,
                         size_t size)
{
    int done = (int)size;
    int ok = 0;
    if (crypt->encrypts) {
        ok = EVP_CipherUpdate(crypt->cipher_context, out, &done, in, (int)size);
    } else {
        KVK_ASSERT(out == NULL);
        ok = EVP_MAC_update(crypt->once_context, in, size);
    }
    KVK_ASSERT(ok == 1 && (size_t)done == size);
}

static void once_end(struct kvk_remote_crypt *crypt, uint8_t tag[KVK_REMOTE_TAG_SIZE])
{
    size_t size = 0;
    int ok = EVP_MAC_final(crypt->once_context, tag, &size, KVK_REMOTE_TAG_SIZE);
    KVK_ASSERT(ok == 1 && size == KVK_REMOTE_TAG_SIZE);
}

void kvk_remote_seal_end(struct kvk_remote_crypt *crypt, uint8_t tag[KVK_REMOTE_TAG_SIZE])
{
    uint8_t rest[16];
    int done = 0;
    if (!crypt->encrypts) {
        once_end(crypt, tag);
        return;
    }
    int ok = EVP_CipherFinal_ex(crypt->cipher_context, rest, &done);
    ok &=
        EVP_CIPHER_CTX_ctrl(crypt->cipher_context, EVP_CTRL_AEAD_GET_TAG, KVK_REMOTE_TAG_SIZE, tag);
    KVK_ASSERT(ok == 1);
}

bool kvk_remote_seal_proves(struct kvk_remote_crypt *crypt, const uint8_t tag[KVK_REMOTE_TAG_SIZE])
{
    uint8_t right[KVK_REMOTE_TAG_SIZE];
    uint8_t rest[16];
    int done = 0;
    if (!crypt->encrypts) {
        once_end(crypt, right);
        return kvk_secret_equal(right, tag, sizeof(right));
    }
    memcpy(right, tag, sizeof(right)); /* it is not const there */
    int ok =
        EVP_CIPHER_CTX_ctrl(crypt->cipher_context, EVP_CTRL_AEAD_SET_TAG, sizeof(right), right);
    KVK_ASSERT(ok == 1);
    return EVP_CipherFinal_ex(crypt->cipher_context, rest, &done) == 1;
}

/* What only a holder of the tenant's key can put on a header. */
static void mark_make(struct kvk_remote_crypt *crypt, const struct kvk_remote_space *space,
                      const uint8_t *header, uint8_t mark[KVK_REMOTE_MARK_SIZE])
{
    struct text texts[] = {{"head", 4}, {header, KVK_REMOTE_AT_MARK}};
    uint8_t hash[KVK_REMOTE_HASH_SIZE];
    hmac(crypt, &crypt->seals, space->seal_key, texts, 2, hash);
    memcpy(mark, hash, KVK_REMOTE_MARK_SIZE);
}

/* All of a header but the tag. */
static void header_fill(const struct kvk_remote_want *want, struct kvk_remote_crypt *crypt,
                        uint8_t *header)
{
    const struct kvk_remote_space *space = want->space;
    memset(header, 0, KVK_REMOTE_HEADER_SIZE);
    memcpy(header + KVK_REMOTE_AT_MAGIC, kvk_remote_magic, sizeof(kvk_remote_magic));
    kvk_store_le16(header + KVK_REMOTE_AT_VERSION, KVK_REMOTE_VERSION_NUMBER);
    kvk_store_le16(header + KVK_REMOTE_AT_FLAGS, space->encrypt ? KVK_REMOTE_FLAG_ENCRYPTED : 0);
    kvk_store_le32(header + KVK_REMOTE_AT_PAYLOAD, kvk_remote_payload_bytes(space, want->part));
    kvk_store_le16(header + KVK_REMOTE_AT_PART, (uint16_t)want->part);
    kvk_store_le16(header + KVK_REMOTE_AT_PART_COUNT, (uint16_t)space->part_count);
    kvk_store_le64(header + KVK_REMOTE_AT_GENERATION, space->generation);
    kvk_store_le32(header + KVK_REMOTE_AT_FORMAT, space->format);
    memcpy(header + KVK_REMOTE_AT_SHAPE, space->shape_check, KVK_REMOTE_KEY_SIZE);
    memcpy(header + KVK_REMOTE_AT_KEY, want->key_check, KVK_REMOTE_KEY_SIZE);
    memcpy(header + KVK_REMOTE_AT_PARENT, want->parent_check, KVK_REMOTE_KEY_SIZE);
    kvk_store_le64(header + KVK_REMOTE_AT_BLOCK_BYTES, space->block_bytes);
    if (crypt->nonce_left == 0) {
        kvk_random_secret(crypt->nonces, sizeof(crypt->nonces));
        crypt->nonce_left = KVK_REMOTE_NONCES_AHEAD;
    }
    memcpy(header + KVK_REMOTE_AT_NONCE, crypt->nonces[--crypt->nonce_left], KVK_REMOTE_NONCE_SIZE);
    mark_make(crypt, space, header, header + KVK_REMOTE_AT_MARK);
    kvk_store_le64(header + KVK_REMOTE_AT_CHECKSUM, kvk_checksum(header, KVK_REMOTE_AT_CHECKSUM));
}

void kvk_remote_value_seal(const struct kvk_remote_want *want, struct kvk_remote_crypt *crypt,
                           const struct kvk_remote_piece *pieces, uint32_t piece_count,
                           uint8_t *header, uint8_t *payload)
{
    bool encrypt = want->space->encrypt;
    KVK_ASSERT(payload != NULL || !encrypt);
    header_fill(want, crypt, header);
    kvk_remote_seal_begin(crypt, want->space, header, true);
    struct kvk_remote_place place;
    kvk_remote_place_init(&place, want, pieces, piece_count);
    uint8_t *memory = NULL;
    size_t size = 0;
    while (kvk_remote_place_next(&place, KVK_REMOTE_CHUNK_SIZE, &memory, &size)) {
        const uint8_t *sealed = memory;
        if (payload != NULL && !encrypt) {
            memcpy(payload, memory, size);
        }
        if (payload != NULL) {
            sealed = payload;
        }
        kvk_remote_seal_add(crypt, encrypt ? payload : NULL, encrypt ? memory : sealed, size);
        payload = payload != NULL ? payload + size : NULL;
    }
    kvk_remote_seal_end(crypt, header + KVK_REMOTE_AT_TAG);
}

/* ---- Proving ---- */

enum kvk_remote_result kvk_remote_header_check(const struct kvk_remote_want *want,
                                               struct kvk_remote_crypt *crypt,
                                               const uint8_t *header, size_t size)
{
    const struct kvk_remote_space *space = want->space;
    if (size < KVK_REMOTE_AT_FLAGS ||
        memcmp(header, kvk_remote_magic, sizeof(kvk_remote_magic)) != 0) {
        return KVK_REMOTE_NOT_OURS;
    }
    if (kvk_load_le16(header + KVK_REMOTE_AT_VERSION) != KVK_REMOTE_VERSION_NUMBER) {
        return KVK_REMOTE_VERSION;
    }
    if (size < KVK_REMOTE_HEADER_SIZE) {
        return KVK_REMOTE_TRUNCATED;
    }
    if (kvk_load_le64(header + KVK_REMOTE_AT_CHECKSUM) !=
        kvk_checksum(header, KVK_REMOTE_AT_CHECKSUM)) {
        return KVK_REMOTE_DAMAGED;
    }
    if (memcmp(header + KVK_REMOTE_AT_KEY, want->key_check, KVK_REMOTE_KEY_SIZE) != 0) {
        return KVK_REMOTE_OTHER_KEY;
    }
    if (kvk_load_le64(header + KVK_REMOTE_AT_GENERATION) != space->generation) {
        return KVK_REMOTE_GENERATION;
    }
    if (kvk_load_le32(header + KVK_REMOTE_AT_FORMAT) != space->format ||
        kvk_load_le16(header + KVK_REMOTE_AT_FLAGS) !=
            (space->encrypt ? KVK_REMOTE_FLAG_ENCRYPTED : 0)) {
        return KVK_REMOTE_FORMAT;
    }
    if (memcmp(header + KVK_REMOTE_AT_SHAPE, space->shape_check, KVK_REMOTE_KEY_SIZE) != 0) {
        return KVK_REMOTE_SHAPE;
    }
    if (memcmp(header + KVK_REMOTE_AT_PARENT, want->parent_check, KVK_REMOTE_KEY_SIZE) != 0) {
        return KVK_REMOTE_PARENT;
    }
    if (kvk_load_le16(header + KVK_REMOTE_AT_PART) != want->part ||
        kvk_load_le16(header + KVK_REMOTE_AT_PART_COUNT) != space->part_count ||
        kvk_load_le64(header + KVK_REMOTE_AT_BLOCK_BYTES) != space->block_bytes ||
        kvk_load_le32(header + KVK_REMOTE_AT_PAYLOAD) !=
            kvk_remote_payload_bytes(space, want->part)) {
        return KVK_REMOTE_PART;
    }
    uint8_t mark[KVK_REMOTE_MARK_SIZE];
    mark_make(crypt, space, header, mark);
    return kvk_secret_equal(mark, header + KVK_REMOTE_AT_MARK, sizeof(mark)) ? KVK_REMOTE_HIT
                                                                             : KVK_REMOTE_FOREIGN;
}
