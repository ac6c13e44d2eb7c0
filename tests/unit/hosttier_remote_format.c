/*
 * Names and values of the remote store, taken apart by their documented form (remote_value.h) with
 * OpenSSL's own HMAC, Poly1305 and AES-GCM: what is made piece by piece here is what they say.
 */
#include <criterion/criterion.h>
#include <openssl/evp.h>
#include <string.h>

#include "base/bytes.h"
#include "base/copy.h"
#include "base/random.h"
#include "hosttier/remote_value_internal.h"

#define BLOCK_BYTES (150000U) /* some chunks */
#define DATA_SIZE KVK_REMOTE_AT_CHECKSUM

struct message {
    uint8_t bytes[512];
    size_t size;
};

static void add(struct message *message, const void *bytes, size_t size)
{
    cr_assert_leq(message->size + size, sizeof(message->bytes));
    memcpy(message->bytes + message->size, bytes, size);
    message->size += size;
}

static void hmac(const uint8_t key[32], const struct message *message, uint8_t out[32])
{
    size_t size = 0;
    cr_assert_not_null(EVP_Q_mac(NULL, "HMAC", NULL, "SHA256", NULL, key, 32, message->bytes,
                                 message->size, out, 32, &size));
    cr_assert_eq(size, 32);
}

static void hmac_text(const uint8_t key[32], const char *text, uint8_t out[32])
{
    struct message message = {.size = 0};
    add(&message, text, strlen(text));
    hmac(key, &message, out);
}

/* Right under this key, as whoever has only the documentation would say. */
static void tag_check(const struct kvk_remote_space_options *options, const uint8_t seal_key[32],
                      const uint8_t *value, const uint8_t *bytes)
{
    static uint8_t plain[BLOCK_BYTES];
    static uint8_t data[DATA_SIZE + BLOCK_BYTES];
    const uint8_t *nonce = value + KVK_REMOTE_AT_NONCE;
    const uint8_t *payload = value + KVK_REMOTE_HEADER_SIZE;
    uint8_t key[32];
    uint8_t tag[16];
    struct message message = {.size = 0};
    add(&message, options->encrypt ? "seal" : "once", 4);
    add(&message, nonce, options->encrypt ? 12 : 24);
    hmac(seal_key, &message, key);
    if (!options->encrypt) {
        size_t size = 0;
        memcpy(data, value, DATA_SIZE);
        memcpy(data + DATA_SIZE, payload, BLOCK_BYTES);
        cr_assert_not_null(EVP_Q_mac(NULL, "POLY1305", NULL, NULL, NULL, key, 32, data,
                                     sizeof(data), tag, sizeof(tag), &size));
        cr_assert_arr_eq(tag, value + KVK_REMOTE_AT_TAG, sizeof(tag));
        cr_assert_arr_eq(payload, bytes, BLOCK_BYTES);
        return;
    }
    int done = 0;
    EVP_CIPHER_CTX *context = EVP_CIPHER_CTX_new();
    memcpy(tag, value + KVK_REMOTE_AT_TAG, sizeof(tag));
    cr_assert_eq(EVP_DecryptInit_ex(context, EVP_aes_256_gcm(), NULL, key, nonce + 12), 1);
    cr_assert_eq(EVP_DecryptUpdate(context, NULL, &done, value, DATA_SIZE), 1);
    cr_assert_eq(EVP_DecryptUpdate(context, plain, &done, payload, BLOCK_BYTES), 1);
    cr_assert_eq(EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, sizeof(tag), tag), 1);
    cr_assert_eq(EVP_DecryptFinal_ex(context, plain, &done), 1);
    cr_assert_arr_eq(plain, bytes, BLOCK_BYTES);
    EVP_CIPHER_CTX_free(context);
}

static void value_check(struct kvk_random *random, bool encrypt)
{
    static uint8_t bytes[BLOCK_BYTES];
    static uint8_t value[KVK_REMOTE_HEADER_SIZE + BLOCK_BYTES];
    uint8_t secret[KVK_REMOTE_SECRET_SIZE];
    uint8_t digests[2][KVK_REMOTE_KEY_SIZE];
    uint8_t name_key[32];
    uint8_t seal_key[32];
    uint8_t hash[32];
    uint8_t numbers[8] = {0};
    struct kvk_remote_id id;
    struct kvk_remote_crypt *crypt = NULL;
    struct kvk_remote_space space;
    struct kvk_remote_want want;
    struct kvk_remote_piece piece = {bytes, BLOCK_BYTES};
    kvk_random_fill(random, secret, sizeof(secret));
    kvk_random_fill(random, digests, sizeof(digests));
    kvk_random_fill(random, &id, sizeof(id));
    kvk_random_fill(random, bytes, sizeof(bytes));
    struct kvk_remote_space_options options = {
        .secret = secret,
        .space = digests[0],
        .shape = digests[1],
        .group = (uint32_t)kvk_random_below(random, 1000),
        .format = 3,
        .generation = 77,
        .block_bytes = BLOCK_BYTES,
        .encrypt = encrypt,
    };
    cr_assert_eq(kvk_remote_crypt_create(&crypt, NULL), KVK_OK);
    cr_assert_eq(kvk_remote_space_init(&space, &options, NULL), KVK_OK);
    kvk_remote_want_init(&want, crypt, &space, &id, 0);
    kvk_remote_value_seal(&want, crypt, &piece, 1, value, value + KVK_REMOTE_HEADER_SIZE);

    hmac_text(secret, "kvkeep remote names", name_key);
    hmac_text(secret, "kvkeep remote seals", seal_key);
    kvk_store_le32(numbers, options.group);
    struct message name = {.size = 0};
    add(&name, "name", 4);
    add(&name, digests[0], KVK_REMOTE_KEY_SIZE);
    add(&name, numbers, sizeof(numbers));
    add(&name, id.key, KVK_REMOTE_KEY_SIZE);
    hmac(name_key, &name, hash);
    cr_assert_arr_eq(want.hash, hash, KVK_REMOTE_KEY_SIZE);
    cr_assert_arr_eq(value + KVK_REMOTE_AT_KEY, hash + KVK_REMOTE_KEY_SIZE, KVK_REMOTE_KEY_SIZE);

    struct message mark = {.size = 0};
    add(&mark, "head", 4);
    add(&mark, value, KVK_REMOTE_AT_MARK);
    hmac(seal_key, &mark, hash);
    cr_assert_arr_eq(value + KVK_REMOTE_AT_MARK, hash, KVK_REMOTE_MARK_SIZE);
    cr_assert_eq(kvk_load_le64(value + KVK_REMOTE_AT_CHECKSUM),
                 kvk_checksum(value, KVK_REMOTE_AT_CHECKSUM));
    tag_check(&options, seal_key, value, bytes);
    kvk_remote_space_finish(&space);
    kvk_remote_crypt_destroy(crypt);
}

Test(remote_format, is_what_is_documented)
{
    struct kvk_random random;
    kvk_random_init(&random, 20);
    for (int i = 0; i < 20; i++) {
        value_check(&random, i % 2 != 0);
    }
}
