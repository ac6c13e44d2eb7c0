/*
 * Identities and chains of a fleet.
 *
 *     secret  = HKDF-SHA-256(fleet key; salt "kvkeep fleet 1", info: tenant's name)
 *     whole   = HMAC(secret; "kvkeep fleet space 1", name, identity, geometries: length-prefixed)
 *     digest  = whole [0..16)
 *     chain   = HMAC(secret; "kvkeep fleet chain 1", whole)
 *     root    = HMAC(chain; 1, group, salt size, salt)
 *     link    = HMAC(chain; 2, token count, content size, parent's link, tokens, content)
 *     witness = HMAC(chain; 3, 0, link), tokens xor HMAC(chain; 4, 0…, link)
 *
 * Every message begins with what it is, and is of fixed length or carries its lengths, so that no
 * two different lists of values are one message.
 */
#include "daemon/fleet.h"

#include <errno.h>
#include <fcntl.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/params.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "daemon/fleet_internal.h"

#define HASH_SIZE 32

enum message_kind {
    MESSAGE_ROOT = 1,
    MESSAGE_BLOCK = 2,
    MESSAGE_WITNESS = 3,
    MESSAGE_HIDE = 4,
};

struct kvk_fleet_chain {
    const struct kvk_fleet_identity *fleet;
    EVP_MAC *mac;
    EVP_MAC_CTX *context; /* with the chain's key */
};

/* ---- HMAC ---- */

static void context_key(EVP_MAC_CTX *context, const uint8_t key[HASH_SIZE])
{
    char digest[] = "SHA256";
    OSSL_PARAM parameters[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest, 0),
        OSSL_PARAM_construct_end(),
    };
    int ok = EVP_MAC_init(context, key, HASH_SIZE, parameters);
    KVK_ASSERT(ok == 1);
}

static void add(EVP_MAC_CTX *context, const void *bytes, size_t size)
{
    if (size > 0) {
        int ok = EVP_MAC_update(context, bytes, size);
        KVK_ASSERT(ok == 1);
    }
}

static void add_number(EVP_MAC_CTX *context, uint64_t number)
{
    uint8_t bytes[8];
    kvk_store_le64(bytes, number);
    add(context, bytes, sizeof(bytes));
}

static void finish(EVP_MAC_CTX *context, uint8_t hash[HASH_SIZE])
{
    size_t size = 0;
    int ok = EVP_MAC_final(context, hash, &size, HASH_SIZE);
    KVK_ASSERT(ok == 1 && size == HASH_SIZE);
}

/* A message of the chain: its key is in the context. */
static void begin(EVP_MAC_CTX *context, enum message_kind kind, uint32_t number)
{
    uint8_t bytes[8];
    int ok = EVP_MAC_init(context, NULL, 0, NULL);
    KVK_ASSERT(ok == 1);
    kvk_store_le32(bytes, (uint32_t)kind);
    kvk_store_le32(bytes + 4, number);
    add(context, bytes, sizeof(bytes));
}

static void hmac_once(const uint8_t *key, size_t key_size, const void *message, size_t size,
                      uint8_t hash[HASH_SIZE])
{
    unsigned int hash_size = 0;
    const unsigned char *made =
        HMAC(EVP_sha256(), key, (int)key_size, message, size, hash, &hash_size);
    KVK_ASSERT(made != NULL && hash_size == HASH_SIZE);
}

/* ---- Secrets and identities ---- */

static enum kvk_status key_parse(const char *path, const char *field, const char *text, size_t size,
                                 uint8_t key[KVK_FLEET_KEY_SIZE], struct kvk_error *error)
{
    while (size > 0 && (text[size - 1] == '\n' || text[size - 1] == '\r')) {
        size--;
    }
    if (!kvk_hex_read(text, size, key, KVK_FLEET_KEY_SIZE)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s: %.100s must hold a key of 64 hex digits and nothing else "
                        "(openssl rand -hex 32)",
                        field, path);
    }
    uint8_t differing = 0;
    for (size_t i = 1; i < KVK_FLEET_KEY_SIZE; i++) {
        differing |= key[i] ^ key[0];
    }
    if (differing == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s: the key in %.100s is one byte repeated", field, path);
    }
    return KVK_OK;
}

enum kvk_status kvk_fleet_key_read(const char *path, const char *field,
                                   uint8_t key[KVK_FLEET_KEY_SIZE], struct kvk_error *error)
{
    char text[2 * KVK_FLEET_KEY_SIZE + 8];
    struct stat about;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: %.100s: %s", field, path,
                        strerror(errno));
    }
    enum kvk_status status = KVK_OK;
    if (fstat(fd, &about) != 0 || !S_ISREG(about.st_mode)) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: %.100s is not a file",
                          field, path);
    } else if ((about.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                          "%s: %.100s may be read by others or written by its group: chmod 0600 or "
                          "0640",
                          field, path);
    } else {
        ssize_t size = read(fd, text, sizeof(text));
        status = key_parse(path, field, text, size > 0 ? (size_t)size : 0, key, error);
        kvk_secret_wipe(text, sizeof(text));
    }
    (void)close(fd);
    return status;
}

void kvk_fleet_hmac(const uint8_t key[32], const void *message, size_t size, uint8_t hash[32])
{
    hmac_once(key, 32, message, size, hash);
}

/* HKDF of one block of output: extract, then expand. */
static void derive(const uint8_t key[KVK_FLEET_KEY_SIZE], const char *salt, const char *tenant,
                   uint8_t secret[KVK_REMOTE_SECRET_SIZE])
{
    uint8_t extracted[HASH_SIZE];
    uint8_t info[KVK_FLEET_NAME_MAX + 1];
    size_t size = strlen(tenant);
    KVK_ASSERT(size <= KVK_FLEET_NAME_MAX);
    hmac_once((const uint8_t *)salt, strlen(salt), key, KVK_FLEET_KEY_SIZE, extracted);
    for (size_t i = 0; i < size; i++) {
        info[i] = (uint8_t)tenant[i];
    }
    info[size] = 1; /* the first block of HKDF's output, and the only one */
    hmac_once(extracted, sizeof(extracted), info, size + 1, secret);
    kvk_secret_wipe(extracted, sizeof(extracted));
}

void kvk_fleet_secret(const uint8_t key[KVK_FLEET_KEY_SIZE], const char *tenant,
                      uint8_t secret[KVK_REMOTE_SECRET_SIZE])
{
    derive(key, "kvkeep fleet 1", tenant, secret);
}

void kvk_fleet_record_secret(const uint8_t key[KVK_FLEET_KEY_SIZE],
                             uint8_t secret[KVK_REMOTE_SECRET_SIZE])
{
    derive(key, "kvkeep fleet records 1", "", secret);
}

static void add_geometry(EVP_MAC_CTX *context, const struct kvk_geometry *geometry)
{
    _Static_assert(sizeof(struct kvk_geometry) == 64, "a new field must be told apart here too");
    const uint64_t fields[] = {
        geometry->layers,
        geometry->kv_heads,
        geometry->head_size_k,
        geometry->head_size_v,
        geometry->block_tokens,
        (uint64_t)geometry->format_k,
        (uint64_t)geometry->format_v,
        (uint64_t)geometry->layout,
        (uint64_t)geometry->attention,
        geometry->tensor_shards,
        geometry->pipeline_shards,
        geometry->latent,
        geometry->window,
        geometry->sinks,
        geometry->opaque_bytes,
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        add_number(context, fields[i]);
    }
}

static void add_tag(EVP_MAC_CTX *context, const char *tag)
{
    add(context, tag, strlen(tag) + 1);
}

/* Contexts of an algorithm that every OpenSSL has: what fails is memory, a few hundred bytes. */
static EVP_MAC_CTX *context_new(EVP_MAC **mac)
{
    *mac = EVP_MAC_fetch(NULL, "HMAC", NULL);
    return *mac != NULL ? EVP_MAC_CTX_new(*mac) : NULL;
}

enum kvk_status kvk_fleet_identity_init(struct kvk_fleet_identity *fleet,
                                        const struct kvk_fleet_identity_options *options,
                                        struct kvk_error *error)
{
    KVK_ASSERT(options->group_count > 0 && options->group_count <= KVK_GROUP_COUNT_MAX);
    EVP_MAC *mac = NULL;
    EVP_MAC_CTX *context = context_new(&mac);
    if (context == NULL) {
        EVP_MAC_free(mac);
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "the OpenSSL library has no HMAC, or memory is short");
    }
    *fleet = (struct kvk_fleet_identity){
        .block_tokens = options->geometries[0]->block_tokens,
        .constant_hash = options->constant_hash,
    };
    kvk_fleet_secret(options->key, options->tenant, fleet->secret);

    uint8_t whole[HASH_SIZE];
    context_key(context, fleet->secret);
    add_tag(context, "kvkeep fleet space 1");
    add_number(context, strlen(options->tenant));
    add(context, options->tenant, strlen(options->tenant));
    add_number(context, options->identity_size);
    add(context, options->identity, options->identity_size);
    add_number(context, options->group_count);
    for (uint32_t i = 0; i < options->group_count; i++) {
        add_geometry(context, options->geometries[i]);
    }
    finish(context, whole);
    memcpy(fleet->digest, whole, sizeof(fleet->digest));

    context_key(context, fleet->secret);
    add_tag(context, "kvkeep fleet chain 1");
    add(context, whole, sizeof(whole));
    finish(context, fleet->chain_key);
    EVP_MAC_CTX_free(context);
    EVP_MAC_free(mac);
    return KVK_OK;
}

void kvk_fleet_identity_finish(struct kvk_fleet_identity *fleet)
{
    kvk_secret_wipe(fleet, sizeof(*fleet));
}

enum kvk_status kvk_fleet_shape(const struct kvk_geometry *stored,
                                uint8_t shape[KVK_REMOTE_KEY_SIZE], struct kvk_error *error)
{
    static const uint8_t key[HASH_SIZE]; /* a digest, no secret: kvk_remote_space keys it */
    EVP_MAC *mac = NULL;
    EVP_MAC_CTX *context = context_new(&mac);
    if (context == NULL) {
        EVP_MAC_free(mac);
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "the OpenSSL library has no HMAC, or memory is short");
    }
    uint8_t hash[HASH_SIZE];
    context_key(context, key);
    add_tag(context, "kvkeep fleet shape 1");
    add_number(context, kvk_fleet_witness_bytes(stored->block_tokens));
    add_geometry(context, stored);
    finish(context, hash);
    memcpy(shape, hash, KVK_REMOTE_KEY_SIZE);
    EVP_MAC_CTX_free(context);
    EVP_MAC_free(mac);
    return KVK_OK;
}

/* ---- Chains ---- */

enum kvk_status kvk_fleet_chain_create(const struct kvk_fleet_identity *fleet,
                                       struct kvk_fleet_chain **chain, struct kvk_error *error)
{
    struct kvk_fleet_chain *made = calloc(1, sizeof(*made));
    if (made != NULL) {
        made->fleet = fleet;
        made->context = context_new(&made->mac);
    }
    if (made == NULL || made->context == NULL) {
        kvk_fleet_chain_destroy(made);
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "the OpenSSL library has no HMAC, or memory is short");
    }
    context_key(made->context, fleet->chain_key);
    *chain = made;
    return KVK_OK;
}

void kvk_fleet_chain_destroy(struct kvk_fleet_chain *chain)
{
    if (chain != NULL) {
        EVP_MAC_CTX_free(chain->context);
        EVP_MAC_free(chain->mac);
        free(chain);
    }
}

void kvk_fleet_chain_root(struct kvk_fleet_chain *chain, uint32_t group, const uint8_t *salt,
                          size_t salt_size, struct kvk_fleet_link *link)
{
    begin(chain->context, MESSAGE_ROOT, group);
    add_number(chain->context, salt_size);
    add(chain->context, salt, salt_size);
    finish(chain->context, link->proof);
}

/* The first half of a link is its name. */
static void name_of(const struct kvk_fleet_chain *chain, const struct kvk_fleet_link *link,
                    uint8_t name[KVK_REMOTE_KEY_SIZE])
{
    if (chain->fleet->constant_hash) {
        memset(name, 0x6b, KVK_REMOTE_KEY_SIZE);
    } else {
        memcpy(name, link->proof, KVK_REMOTE_KEY_SIZE);
    }
}

static void witness_write(struct kvk_fleet_chain *chain, const struct kvk_fleet_link *link,
                          const uint32_t *tokens, uint8_t *witness)
{
    uint32_t count = chain->fleet->block_tokens;
    begin(chain->context, MESSAGE_WITNESS, 0);
    add(chain->context, link->proof, sizeof(link->proof));
    finish(chain->context, witness);
    witness += HASH_SIZE;
    uint8_t mask[HASH_SIZE];
    for (uint32_t i = 0; i < count; i++) {
        uint32_t place = i % (HASH_SIZE / 4);
        if (place == 0) {
            begin(chain->context, MESSAGE_HIDE, i);
            add(chain->context, link->proof, sizeof(link->proof));
            finish(chain->context, mask);
        }
        kvk_store_le32(witness + (size_t)4 * i, tokens[i] ^ kvk_load_le32(mask + 4 * place));
    }
}

void kvk_fleet_chain_next(struct kvk_fleet_chain *chain, struct kvk_fleet_link *link,
                          const uint32_t *tokens, const uint8_t *extra, size_t extra_size,
                          struct kvk_remote_id *id, uint8_t *witness)
{
    _Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tokens are hashed as they lie");
    uint32_t count = chain->fleet->block_tokens;
    name_of(chain, link, id->parent);
    begin(chain->context, MESSAGE_BLOCK, count);
    add_number(chain->context, extra_size);
    add(chain->context, link->proof, sizeof(link->proof));
    add(chain->context, tokens, (size_t)count * sizeof(*tokens));
    add(chain->context, extra, extra_size);
    finish(chain->context, link->proof);
    name_of(chain, link, id->key);
    if (witness != NULL) {
        witness_write(chain, link, tokens, witness);
    }
}
