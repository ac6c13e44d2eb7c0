/*
 * Keys that are the same on every node: equal if and only if all is equal that must be, and what
 * they are made of, against a second way to make them.
 */
#include <criterion/criterion.h>
#include <fcntl.h>
#include <openssl/core_names.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/kdf.h>
#include <openssl/params.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/random.h"
#include "daemon/fleet.h"

#define TOKENS 16
#define LINKS 5

static struct kvk_error failure;

static const uint8_t fleet_key[32] = "0123456789abcdef0123456789abcdeX";

static struct kvk_geometry geometry_make(void)
{
    return (struct kvk_geometry){
        .layers = 4,
        .kv_heads = 2,
        .head_size_k = 64,
        .head_size_v = 64,
        .block_tokens = TOKENS,
        .format_k = KVK_FORMAT_BF16,
        .format_v = KVK_FORMAT_BF16,
        .layout = KVK_LAYOUT_HEADS_FIRST,
        .attention = KVK_ATTENTION_SELF,
        .tensor_shards = 1,
        .pipeline_shards = 1,
    };
}

/* All that a chain depends on. */
struct setting {
    uint8_t key[32];
    const char *tenant;
    const char *identity;
    struct kvk_geometry groups[2];
    uint32_t group_count;
    uint32_t group;
    const char *salt;
    const char *extra;
    uint32_t tokens[LINKS * TOKENS];
    bool constant;
};

static struct setting setting_make(void)
{
    struct setting made = {
        .tenant = "acme",
        .identity = "model x, revision 1, adapter none",
        .group_count = 2,
        .salt = "",
        .extra = "",
    };
    memcpy(made.key, fleet_key, sizeof(made.key));
    made.groups[0] = geometry_make();
    made.groups[1] = geometry_make();
    made.groups[1].window = 128;
    for (uint32_t i = 0; i < LINKS * TOKENS; i++) {
        made.tokens[i] = 1000 + i;
    }
    return made;
}

struct result {
    struct kvk_fleet_identity identity;
    struct kvk_remote_id ids[LINKS];
    uint8_t witness[LINKS][32 + 4 * TOKENS];
    struct kvk_fleet_link links[LINKS];
};

static void run(const struct setting *setting, struct result *result)
{
    const struct kvk_geometry *geometries[] = {&setting->groups[0], &setting->groups[1]};
    const struct kvk_fleet_identity_options options = {
        .key = setting->key,
        .tenant = setting->tenant,
        .identity = (const uint8_t *)setting->identity,
        .identity_size = strlen(setting->identity),
        .geometries = geometries,
        .group_count = setting->group_count,
        .constant_hash = setting->constant,
    };
    memset(result, 0, sizeof(*result));
    cr_assert_eq(kvk_fleet_identity_init(&result->identity, &options, &failure), KVK_OK);
    struct kvk_fleet_chain *chain = NULL;
    struct kvk_fleet_link link;
    cr_assert_eq(kvk_fleet_chain_create(&result->identity, &chain, &failure), KVK_OK);
    cr_assert_eq(kvk_fleet_witness_bytes(TOKENS), sizeof(result->witness[0]));
    kvk_fleet_chain_root(chain, setting->group, (const uint8_t *)setting->salt,
                         strlen(setting->salt), &link);
    for (uint32_t i = 0; i < LINKS; i++) {
        kvk_fleet_chain_next(chain, &link, setting->tokens + (size_t)i * TOKENS,
                             (const uint8_t *)setting->extra, strlen(setting->extra),
                             &result->ids[i], result->witness[i]);
        result->links[i] = link;
    }
    kvk_fleet_chain_destroy(chain);
}

/* From block `from` on nothing is alike, before it all is. */
static void expect_apart(const struct result *a, const struct result *b, uint32_t from,
                         const char *what)
{
    for (uint32_t i = 0; i < LINKS; i++) {
        bool key = memcmp(a->ids[i].key, b->ids[i].key, 16) == 0;
        bool witness = memcmp(a->witness[i], b->witness[i], sizeof(a->witness[i])) == 0;
        cr_expect_eq(key, i < from, "%s: the key of block %u", what, i);
        cr_expect_eq(witness, i < from, "%s: the witness of block %u", what, i);
    }
}

Test(fleet, same_on_all_nodes)
{
    struct setting setting = setting_make();
    struct result a;
    struct result b;
    run(&setting, &a);
    run(&setting, &b);
    expect_apart(&a, &b, LINKS, "the same");
    cr_expect_arr_eq(a.identity.digest, b.identity.digest, 16);
    for (uint32_t i = 1; i < LINKS; i++) {
        cr_expect_arr_eq(a.ids[i].parent, a.ids[i - 1].key, 16);
    }
}

Test(fleet, all_that_must_part_does)
{
    const struct setting base = setting_make();
    struct result a;
    struct result b;
    run(&base, &a);
#define PARTS(what, from, ...)                                                                     \
    do {                                                                                           \
        struct setting other = base;                                                               \
        __VA_ARGS__;                                                                               \
        run(&other, &b);                                                                           \
        expect_apart(&a, &b, from, what);                                                          \
    } while (0)
    PARTS("another fleet's key", 0, other.key[31] ^= 1);
    PARTS("another tenant", 0, other.tenant = "acmf");
    PARTS("a tenant's name that goes on", 0, other.tenant = "acme ");
    PARTS("another adapter", 0, other.identity = "model x, revision 1, adapter some");
    PARTS("an identity that goes on", 0, other.identity = "model x, revision 1, adapter none ");
    PARTS("another format", 0, other.groups[0].format_k = KVK_FORMAT_FP16;
          other.groups[0].format_v = KVK_FORMAT_FP16);
    PARTS("another second group", 0, other.groups[1].window = 256);
    PARTS("one group less", 0, other.group_count = 1);
    PARTS("shards", 0, other.groups[0].tensor_shards = 2; other.groups[1].tensor_shards = 2);
    PARTS("another group", 0, other.group = 1);
    PARTS("a salt", 0, other.salt = "user 1");
    PARTS("content", 0, other.extra = "image 1");
    PARTS("a token of block 0", 0, other.tokens[0]++);
    PARTS("the last token of block 2", 2, other.tokens[3 * TOKENS - 1] ^= 0x80000000);
    PARTS("two tokens that change places", 1, other.tokens[TOKENS] = base.tokens[TOKENS + 1];
          other.tokens[TOKENS + 1] = base.tokens[TOKENS]);
#undef PARTS
    struct setting one = base;
    struct setting two = base;
    one.salt = "a";
    two.salt = "b";
    run(&one, &a);
    run(&two, &b);
    expect_apart(&a, &b, 0, "two salts");
}

/* Every field of a geometry counts, in the digest of the space and in its shape. */
Test(fleet, geometry_in_full)
{
    struct setting base = setting_make();
    struct result a;
    struct result b;
    uint8_t shape_a[16];
    uint8_t shape_b[16];
    run(&base, &a);
    cr_assert_eq(kvk_fleet_shape(&base.groups[0], shape_a, &failure), KVK_OK);
    size_t offsets[] = {
        offsetof(struct kvk_geometry, layers),          offsetof(struct kvk_geometry, kv_heads),
        offsetof(struct kvk_geometry, head_size_k),     offsetof(struct kvk_geometry, head_size_v),
        offsetof(struct kvk_geometry, format_k),        offsetof(struct kvk_geometry, format_v),
        offsetof(struct kvk_geometry, layout),          offsetof(struct kvk_geometry, attention),
        offsetof(struct kvk_geometry, tensor_shards),   offsetof(struct kvk_geometry, latent),
        offsetof(struct kvk_geometry, pipeline_shards), offsetof(struct kvk_geometry, window),
        offsetof(struct kvk_geometry, sinks),           offsetof(struct kvk_geometry, opaque_bytes),
    };
    for (size_t i = 0; i < sizeof(offsets) / sizeof(offsets[0]); i++) {
        struct setting other = base;
        ((uint8_t *)&other.groups[0])[offsets[i]] ^= 1;
        run(&other, &b);
        expect_apart(&a, &b, 0, "a field of the geometry");
        cr_expect_neq(memcmp(a.identity.digest, b.identity.digest, 16), 0, "field %zu", i);
        cr_assert_eq(kvk_fleet_shape(&other.groups[0], shape_b, &failure), KVK_OK);
        cr_expect_neq(memcmp(shape_a, shape_b, 16), 0, "field %zu", i);
    }
}

/* Field case A4: two blocks of which an algebraic hash makes one key, and every name alike by the
 * test hook: the witness still tells them apart, by their tokens and by their ancestors. */
Test(fleet, names_alike_witnesses_not)
{
    struct setting base = setting_make();
    base.constant = true;
    struct result a;
    struct result b;
    run(&base, &a);
    for (uint32_t block = 0; block < 2; block++) {
        for (int kind = 0; kind < 2; kind++) {
            struct setting other = base;
            other.tokens[block * TOKENS + 3] += kind == 0 ? 31 : 1;
            other.tokens[block * TOKENS + 4] -= kind == 0 ? 1 : 31;
            run(&other, &b);
            for (uint32_t i = 0; i < LINKS; i++) {
                cr_expect_arr_eq(a.ids[i].key, b.ids[i].key, 16);
                cr_expect_eq(memcmp(a.witness[i], b.witness[i], sizeof(a.witness[i])) == 0,
                             i < block);
            }
        }
    }
    struct setting other = base;
    other.extra = "image";
    run(&other, &b);
    cr_expect_neq(memcmp(a.witness[0], b.witness[0], sizeof(a.witness[0])), 0);
}

/* Who reads the store sees neither tokens nor that two blocks have the same. */
Test(fleet, witness_hides_tokens)
{
    struct setting setting = setting_make();
    for (uint32_t i = 0; i < LINKS * TOKENS; i++) {
        setting.tokens[i] = 7;
    }
    struct result a;
    run(&setting, &a);
    for (uint32_t i = 0; i < LINKS; i++) {
        for (uint32_t k = 0; k < TOKENS; k++) {
            uint32_t word = kvk_load_le32(a.witness[i] + 32 + 4 * (size_t)k);
            cr_expect_neq(word, 7);
            for (uint32_t m = 0; m < i; m++) {
                cr_expect_neq(word, kvk_load_le32(a.witness[m] + 32 + 4 * (size_t)k));
            }
        }
    }
}

/* ---- The second way ---- */

static void hmac_of(const uint8_t *key, const uint8_t *message, size_t size, uint8_t out[32])
{
    unsigned int out_size = 0;
    cr_assert_neq(HMAC(EVP_sha256(), key, 32, message, size, out, &out_size), NULL);
    cr_assert_eq(out_size, 32);
}

static void hkdf_of(const uint8_t *key, const char *tenant, uint8_t out[32])
{
    EVP_KDF *kdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
    EVP_KDF_CTX *context = EVP_KDF_CTX_new(kdf);
    char digest[] = "SHA256";
    char salt[] = "kvkeep fleet 1";
    uint8_t secret[32];
    char info[256];
    memcpy(secret, key, 32);
    (void)snprintf(info, sizeof(info), "%s", tenant);
    OSSL_PARAM parameters[] = {
        OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST, digest, 0),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY, secret, 32),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_SALT, salt, strlen(salt)),
        OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_INFO, info, strlen(info)),
        OSSL_PARAM_construct_end(),
    };
    cr_assert_eq(EVP_KDF_derive(context, out, 32, parameters), 1);
    EVP_KDF_CTX_free(context);
    EVP_KDF_free(kdf);
}

Test(fleet, as_described)
{
    struct setting setting = setting_make();
    setting.salt = "some salt";
    setting.extra = "an image's digest";
    setting.group = 1;
    struct result made;
    uint8_t secret[32];
    run(&setting, &made);
    hkdf_of(fleet_key, "acme", secret);
    cr_expect_arr_eq(made.identity.secret, secret, 32);

    uint8_t message[1024] = {0};
    uint8_t link[32];
    kvk_store_le32(message, 1);
    kvk_store_le32(message + 4, 1);
    kvk_store_le64(message + 8, strlen(setting.salt));
    memcpy(message + 16, setting.salt, strlen(setting.salt));
    hmac_of(made.identity.chain_key, message, 16 + strlen(setting.salt), link);
    for (uint32_t i = 0; i < LINKS; i++) {
        cr_expect_arr_eq(made.ids[i].parent, link, 16);
        size_t size = 16;
        kvk_store_le32(message, 2);
        kvk_store_le32(message + 4, TOKENS);
        kvk_store_le64(message + 8, strlen(setting.extra));
        memcpy(message + size, link, 32);
        size += 32;
        for (uint32_t k = 0; k < TOKENS; k++, size += 4) {
            kvk_store_le32(message + size, setting.tokens[i * TOKENS + k]);
        }
        memcpy(message + size, setting.extra, strlen(setting.extra));
        size += strlen(setting.extra);
        hmac_of(made.identity.chain_key, message, size, link);
        cr_expect_arr_eq(made.ids[i].key, link, 16);
        cr_expect_arr_eq(made.links[i].proof, link, 32);
        uint8_t hash[32];
        memset(message, 0, 8);
        kvk_store_le32(message, 3);
        memcpy(message + 8, link, 32);
        hmac_of(made.identity.chain_key, message, 40, hash);
        cr_expect_arr_eq(made.witness[i], hash, 32);
        kvk_store_le32(message, 4);
        kvk_store_le32(message + 4, 8);
        hmac_of(made.identity.chain_key, message, 40, hash);
        uint32_t token = kvk_load_le32(made.witness[i] + 32 + 4 * 9) ^ kvk_load_le32(hash + 4);
        cr_expect_eq(token, setting.tokens[i * TOKENS + 9]);
    }
}

/* Values that move between the parts of a message make another message. */
Test(fleet, random_neighbours)
{
    struct kvk_random random;
    kvk_random_init(&random, 6);
    struct setting base = setting_make();
    struct result a;
    struct result b;
    run(&base, &a);
    for (int round = 0; round < 300; round++) {
        struct setting other = base;
        uint32_t place = (uint32_t)kvk_random_below(&random, (uint64_t)LINKS * TOKENS);
        other.tokens[place] ^= UINT32_C(1) << kvk_random_below(&random, 32);
        run(&other, &b);
        expect_apart(&a, &b, place / TOKENS, "one bit of a token");
    }
}

/* ---- The key's file ---- */

static enum kvk_status read_text(const char *text, mode_t mode, uint8_t key[32])
{
    char path[] = "/tmp/kvkeep-fleet-key-XXXXXX";
    int fd = mkstemp(path);
    cr_assert(fd >= 0);
    cr_assert_eq(write(fd, text, strlen(text)), (ssize_t)strlen(text));
    cr_assert_eq(fchmod(fd, mode), 0);
    (void)close(fd);
    enum kvk_status status = kvk_fleet_key_read(path, "remote.key_file", key, &failure);
    (void)unlink(path);
    return status;
}

Test(fleet, key_file)
{
    const char *good = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f";
    char text[100];
    uint8_t key[32];
    cr_expect_eq(read_text(good, 0600, key), KVK_OK);
    for (int i = 0; i < 32; i++) {
        cr_expect_eq(key[i], i);
    }
    (void)snprintf(text, sizeof(text), "%s\n", good);
    cr_expect_eq(read_text(text, 0640, key), KVK_OK);
    cr_expect_eq(read_text(text, 0644, key), KVK_INVALID);
    cr_expect(strstr(failure.text, "chmod") != NULL, "%s", failure.text);
    cr_expect_str_eq(failure.field, "remote.key_file");
    cr_expect_eq(read_text(text, 0660, key), KVK_INVALID);
    cr_expect_eq(read_text("", 0600, key), KVK_INVALID);
    (void)snprintf(text, sizeof(text), "%s0", good);
    cr_expect_eq(read_text(text, 0600, key), KVK_INVALID);
    (void)snprintf(text, sizeof(text), "%s", good);
    text[5] = 'g';
    cr_expect_eq(read_text(text, 0600, key), KVK_INVALID);
    memset(text, '0', 64);
    text[64] = '\0';
    cr_expect_eq(read_text(text, 0600, key), KVK_INVALID);
    cr_expect_eq(kvk_fleet_key_read("/tmp", "remote.key_file", key, &failure), KVK_INVALID);
    cr_expect_eq(kvk_fleet_key_read("/nowhere/key", "remote.key_file", key, &failure), KVK_INVALID);
    cr_expect(strstr(failure.text, "No such file") != NULL, "%s", failure.text);
}
