#include "daemon/tenant.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <openssl/evp.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/random.h"

#define DIGEST_SIZE 32

/* How a credential is recognised; beside the credential, which calls carry around. */
struct proof {
    uint8_t digest[DIGEST_SIZE]; /* SHA-256 of the token, so that lengths do not show either */
    bool has_token;
    uint32_t uids[16]; /* [uid_count] */
    uint32_t uid_count;
};

struct kvk_tenants {
    struct kvk_tenant *tenants; /* [tenant_count], ours */
    uint32_t tenant_count;
    struct kvk_credential *credentials; /* [credential_count], ours */
    struct proof *proofs;               /* [credential_count], ours */
    uint32_t credential_count;
    /* Whoever comes over TCP without a token, where the configuration says insecure = yes and
     * knows no credentials; else NULL. One of `credentials`. */
    const struct kvk_credential *anonymous;
};

static void token_digest(const uint8_t *token, size_t token_size, uint8_t digest[DIGEST_SIZE])
{
    unsigned size = 0;
    int result = EVP_Digest(token, token_size, digest, &size, EVP_sha256(), NULL);
    KVK_ASSERT(result == 1);
    KVK_ASSERT(size == DIGEST_SIZE);
}

static void tenant_init(struct kvk_tenant *tenant, uint32_t index, const char *name)
{
    uint8_t secret[KVK_SECRET_SIZE];

    KVK_ASSERT(tenant != NULL);
    /* Both are of KVK_NAME_SIZE and end with a NUL. */
    memcpy(tenant->name, name, strlen(name) + 1);
    tenant->index = index;
    tenant->id = UINT64_C(1) + index;
    kvk_random_secret(secret, sizeof(secret));
    kvk_hasher_init(&tenant->hasher, secret);
    kvk_secret_wipe(secret, sizeof(secret));
    tenant->hasher_constant = tenant->hasher;
    tenant->hasher_constant.constant = true;
}

static enum kvk_status tables_alloc(struct kvk_tenants *tenants, uint32_t tenant_count,
                                    uint32_t credential_count, struct kvk_error *error)
{
    tenants->tenants = calloc(tenant_count, sizeof(tenants->tenants[0]));
    tenants->credentials = calloc(credential_count, sizeof(tenants->credentials[0]));
    tenants->proofs = calloc(credential_count, sizeof(tenants->proofs[0]));
    if (tenants->tenants == NULL || tenants->credentials == NULL || tenants->proofs == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for the table of tenants");
    }
    tenants->tenant_count = tenant_count;
    tenants->credential_count = credential_count;
    return KVK_OK;
}

/* No table: one tenant for the daemon's own user, and for nobody over TCP unless said so. */
static enum kvk_status create_default(const struct kvk_config *config, struct kvk_tenants *tenants,
                                      struct kvk_error *error)
{
    enum kvk_status status = tables_alloc(tenants, 1, 2, error);
    if (status != KVK_OK) {
        return status;
    }
    tenant_init(&tenants->tenants[0], 0, "default");
    struct kvk_credential *own = &tenants->credentials[0];
    *own = (struct kvk_credential){
        .name = "default", .tenants = {&tenants->tenants[0]}, .tenant_count = 1, .admin = true};
    tenants->proofs[0] = (struct proof){.uids = {(uint32_t)geteuid()}, .uid_count = 1};

    struct kvk_credential *anonymous = &tenants->credentials[1];
    *anonymous = (struct kvk_credential){
        .name = "anonymous", .tenants = {&tenants->tenants[0]}, .tenant_count = 1};
    if (config->tcp_insecure) {
        tenants->anonymous = anonymous;
    }
    return KVK_OK;
}

static void credential_init(struct kvk_tenants *tenants, uint32_t index,
                            const struct kvk_credential_config *config)
{
    struct kvk_credential *credential = &tenants->credentials[index];
    struct proof *proof = &tenants->proofs[index];

    _Static_assert(sizeof(proof->uids) == sizeof(config->uids), "as many uids");
    _Static_assert(sizeof(credential->tenants) / sizeof(credential->tenants[0]) ==
                       sizeof(config->tenants) / sizeof(config->tenants[0]),
                   "as many tenants");
    memcpy(credential->name, config->name, sizeof(credential->name));
    credential->admin = config->admin;
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        KVK_ASSERT(config->tenants[i] < tenants->tenant_count);
        credential->tenants[i] = &tenants->tenants[config->tenants[i]];
    }
    credential->tenant_count = config->tenant_count;

    size_t token_size = strlen(config->token);
    if (token_size > 0) {
        token_digest((const uint8_t *)config->token, token_size, proof->digest);
        proof->has_token = true;
    }
    memcpy(proof->uids, config->uids, sizeof(proof->uids));
    proof->uid_count = config->uid_count;
}

static enum kvk_status create_table(const struct kvk_config *config, struct kvk_tenants *tenants,
                                    struct kvk_error *error)
{
    enum kvk_status status =
        tables_alloc(tenants, config->tenant_count, config->credential_count, error);
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        tenant_init(&tenants->tenants[i], i, config->tenants[i].name);
    }
    for (uint32_t i = 0; i < config->credential_count; i++) {
        credential_init(tenants, i, &config->credentials[i]);
    }
    return KVK_OK;
}

enum kvk_status kvk_tenants_create(const struct kvk_config *config, struct kvk_tenants **tenants,
                                   struct kvk_error *error)
{
    enum kvk_status status = kvk_config_check(config, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_tenants *table = calloc(1, sizeof(*table));
    if (table == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for the table of tenants");
    }
    status = config->tenant_count == 0 ? create_default(config, table, error)
                                       : create_table(config, table, error);
    if (status != KVK_OK) {
        kvk_tenants_destroy(table);
        return status;
    }
    *tenants = table;
    return KVK_OK;
}

void kvk_tenants_destroy(struct kvk_tenants *tenants)
{
    if (tenants == NULL) {
        return;
    }
    if (tenants->tenants != NULL) {
        kvk_secret_wipe(tenants->tenants, tenants->tenant_count * sizeof(tenants->tenants[0]));
    }
    free(tenants->tenants);
    free(tenants->credentials);
    free(tenants->proofs);
    free(tenants);
}

uint32_t kvk_tenants_count(const struct kvk_tenants *tenants)
{
    return tenants->tenant_count;
}

const struct kvk_tenant *kvk_tenants_get(const struct kvk_tenants *tenants, uint32_t index)
{
    KVK_ASSERT(index < tenants->tenant_count);
    return &tenants->tenants[index];
}

const struct kvk_tenant *kvk_tenants_find(const struct kvk_tenants *tenants, uint64_t id)
{
    for (uint32_t i = 0; i < tenants->tenant_count; i++) {
        if (tenants->tenants[i].id == id) {
            return &tenants->tenants[i];
        }
    }
    return NULL;
}

/* ---- Who is it? ---- */

/* Every credential is compared, whichever matches, so that time tells nothing. */
static const struct kvk_credential *find_token(const struct kvk_tenants *tenants,
                                               const uint8_t *token, size_t token_size)
{
    uint8_t digest[DIGEST_SIZE];
    uint32_t found = UINT32_MAX;

    token_digest(token, token_size, digest);
    for (uint32_t i = 0; i < tenants->credential_count; i++) {
        uint32_t equal = kvk_secret_equal(digest, tenants->proofs[i].digest, DIGEST_SIZE) &
                         tenants->proofs[i].has_token;
        uint32_t mask = 0u - equal;
        found = (found & ~mask) | (i & mask);
    }
    return found == UINT32_MAX ? NULL : &tenants->credentials[found];
}

static const struct kvk_credential *find_uid(const struct kvk_tenants *tenants, uint32_t uid)
{
    for (uint32_t i = 0; i < tenants->credential_count; i++) {
        for (uint32_t j = 0; j < tenants->proofs[i].uid_count; j++) {
            if (tenants->proofs[i].uids[j] == uid) {
                return &tenants->credentials[i];
            }
        }
    }
    return NULL;
}

enum kvk_status kvk_tenants_authenticate(const struct kvk_tenants *tenants, const uint8_t *token,
                                         size_t token_size, bool local, uint32_t uid,
                                         const struct kvk_credential **credential,
                                         struct kvk_error *error)
{
    const struct kvk_credential *found = NULL;

    if (token != NULL) {
        found = find_token(tenants, token, token_size);
        if (found == NULL) {
            return kvk_fail(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization",
                            "the token is not known");
        }
    } else if (local) {
        found = find_uid(tenants, uid);
        if (found == NULL) {
            return kvk_fail_limit(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization", uid,
                                  0, "no token was sent, and no credential has uid %u", uid);
        }
    } else {
        found = tenants->anonymous;
        if (found == NULL) {
            return kvk_fail(error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "authorization",
                            "no token was sent");
        }
    }
    *credential = found;
    return KVK_OK;
}

/* ---- For whom may it act? ---- */

enum kvk_status kvk_credential_tenant(const struct kvk_credential *credential, const uint8_t *name,
                                      size_t name_size, const struct kvk_tenant **tenant,
                                      struct kvk_error *error)
{
    if (name_size == 0) {
        if (credential->tenant_count == 0) {
            return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "tenant",
                            "the credential acts for no tenant");
        }
        *tenant = credential->tenants[0];
        return KVK_OK;
    }
    if (name_size >= KVK_NAME_SIZE || !kvk_utf8_ok(name, name_size)) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "tenant", name_size,
                              KVK_NAME_SIZE - 1, "tenant must be UTF-8 of 1 to %d bytes",
                              KVK_NAME_SIZE - 1);
    }
    for (uint32_t i = 0; i < credential->tenant_count; i++) {
        const char *own = credential->tenants[i]->name;
        if (strlen(own) == name_size && memcmp(own, name, name_size) == 0) {
            *tenant = credential->tenants[i];
            return KVK_OK;
        }
    }
    return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NOT_OWNER, "tenant",
                    "the credential may not act for this tenant");
}

bool kvk_credential_allows(const struct kvk_credential *credential, const struct kvk_tenant *tenant)
{
    for (uint32_t i = 0; i < credential->tenant_count; i++) {
        if (credential->tenants[i] == tenant) {
            return true;
        }
    }
    return false;
}
