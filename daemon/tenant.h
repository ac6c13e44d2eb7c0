/*
 * Tenants, and who may act for them.
 *
 * A caller is known by its credential: a bearer token, or on the unix socket the process's uid. A
 * credential names the tenants that it may act for; every request is charged to one of them, and
 * nothing in a request can name another.
 *
 * Locking: the table does not change after kvk_tenants_create(); everything may be read by any
 * thread.
 */
#ifndef KVK_DAEMON_TENANT_H
#define KVK_DAEMON_TENANT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "daemon/config.h"
#include "index/key.h"

struct kvk_tenant {
    char name[KVK_NAME_SIZE];
    uint64_t id;    /* never 0, never given twice; the catalogue's, where there is one */
    uint32_t index; /* in tables per tenant: below KVK_TENANT_COUNT_MAX */
    struct kvk_hasher hasher;          /* keyed with the tenant's random secret */
    struct kvk_hasher hasher_constant; /* test hook: every key alike */
};

struct kvk_credential {
    char name[KVK_NAME_SIZE];
    const struct kvk_tenant *tenants[64]; /* [tenant_count], borrowed from the table */
    uint32_t tenant_count;
    bool admin;
};

struct kvk_tenants;

KVK_CHECKED enum kvk_status kvk_tenants_create(const struct kvk_config *config,
                                               struct kvk_tenants **tenants,
                                               struct kvk_error *error);
void kvk_tenants_destroy(struct kvk_tenants *tenants);

uint32_t kvk_tenants_count(const struct kvk_tenants *tenants);
const struct kvk_tenant *kvk_tenants_get(const struct kvk_tenants *tenants, uint32_t index);
/* NULL: none has this id. */
const struct kvk_tenant *kvk_tenants_find(const struct kvk_tenants *tenants, uint64_t id);

/*
 * Whose call is it? `token` NULL: none was sent. `local`: over the unix socket, from `uid`.
 * KVK_UNAUTHENTICATED: neither says who; a token that is wrong is refused even where the uid would
 * do. Tokens are compared in constant time.
 */
KVK_CHECKED enum kvk_status kvk_tenants_authenticate(const struct kvk_tenants *tenants,
                                                     const uint8_t *token, size_t token_size,
                                                     bool local, uint32_t uid,
                                                     const struct kvk_credential **credential,
                                                     struct kvk_error *error);

/* The tenant that a request names, "" for the credential's first. KVK_PERMISSION: not one of
 * those; the answer is the same whether such a tenant exists or not. */
KVK_CHECKED enum kvk_status kvk_credential_tenant(const struct kvk_credential *credential,
                                                  const uint8_t *name, size_t name_size,
                                                  const struct kvk_tenant **tenant,
                                                  struct kvk_error *error);

bool kvk_credential_allows(const struct kvk_credential *credential,
                           const struct kvk_tenant *tenant);

#endif
