/*
 * Tenants, and who may act for them.
 *
 * A caller is known by its credential: a bearer token, a client's certificate, or on the unix
 * socket the process's uid. A credential names the tenants that it may act for; every request is
 * charged to one of them, and nothing in a request can name another.
 *
 * Tenants and credentials come from the configuration file and, where there is a catalogue, from
 * there: those of the file are the file's to change, the others are made, changed and deleted
 * through daemon/tenant_admin.h. Each tenant has an id and a secret that last: a configured one
 * gets its record at the first start with a catalogue.
 *
 * Locking: everything here may be called by any thread at any time, with the engine's lock or
 * without. Tenants and credentials are never freed before kvk_tenants_destroy(): pointers stay
 * valid, and a name, id, index or list of tenants never changes under its reader. What may change
 * (mode, quota, rights) is read by functions. Authentication takes a read lock that is held
 * elsewhere only while one pointer is exchanged, and allocates nothing but, once per thread, the
 * room for a digest.
 */
#ifndef KVK_DAEMON_TENANT_H
#define KVK_DAEMON_TENANT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/status.h"
#include "daemon/config.h"
#include "hosttier/catalogue.h"
#include "index/key.h"

/* A struct kvk_tenant_quota as words that are read while they are written. */
#define KVK_TENANT_QUOTA_WORDS (sizeof(struct kvk_tenant_quota) / sizeof(uint64_t))
_Static_assert(sizeof(struct kvk_tenant_quota) % sizeof(uint64_t) == 0, "whole words");

struct kvk_tenant {
    char name[KVK_NAME_SIZE]; /* UTF-8 in NFC */
    uint64_t id;              /* never 0, never given twice; the catalogue's, where there is one */
    uint32_t index;  /* in tables per tenant: below KVK_TENANT_COUNT_MAX. Given on to another tenant
                        only when this one is forgotten: nothing is counted under it any more */
    bool configured; /* by the file: no call changes or deletes it */
    uint64_t created_s;
    struct kvk_hasher hasher;          /* keyed with the tenant's random secret */
    struct kvk_hasher hasher_constant; /* test hook: every key alike */

    /* Read by the functions below alone. */
    _Atomic uint8_t mode;
    _Atomic bool may_publish;
    _Atomic bool leaving;
    _Atomic uint32_t quota_version; /* odd: being written */
    _Atomic uint64_t quota[KVK_TENANT_QUOTA_WORDS];
};

enum kvk_tenant_mode kvk_tenant_mode(const struct kvk_tenant *tenant);
bool kvk_tenant_may_publish(const struct kvk_tenant *tenant);
/* Being deleted: nothing new is begun for it. Never false again. */
bool kvk_tenant_is_leaving(const struct kvk_tenant *tenant);
/* A consistent copy. */
void kvk_tenant_quota(const struct kvk_tenant *tenant, struct kvk_tenant_quota *quota);
/* Changes with every change of the quota: who keeps a copy compares. */
uint32_t kvk_tenant_quota_version(const struct kvk_tenant *tenant);

/* May anything be done for it now? KVK_PERMISSION with KVK_CAUSE_SWITCHED_OFF: it is switched off,
 * or being deleted. Asked by whoever finds a space, a session or the tenant of a request. */
KVK_CHECKED enum kvk_status kvk_tenant_check(const struct kvk_tenant *tenant,
                                             struct kvk_error *error);

struct kvk_credential {
    char name[KVK_NAME_SIZE];
    const struct kvk_tenant *tenants[KVK_CREDENTIAL_TENANTS_MAX]; /* [tenant_count], borrowed from
                                                                     the table */
    uint32_t tenant_count;
    bool admin;
};

struct kvk_tenants;

struct kvk_tenants_options {
    const struct kvk_config *config;
    struct kvk_catalogue *catalogue; /* borrowed; NULL: nothing lasts, nothing can be changed */
    struct kvk_clock *clock;         /* NULL: monotonic */
};

/* Also finishes the deletion of tenants that a crash has interrupted, as far as the catalogue goes:
 * before anything else of it is read. */
KVK_CHECKED enum kvk_status kvk_tenants_open(const struct kvk_tenants_options *options,
                                             struct kvk_tenants **tenants, struct kvk_error *error);
/* Without a catalogue. */
KVK_CHECKED enum kvk_status kvk_tenants_create(const struct kvk_config *config,
                                               struct kvk_tenants **tenants,
                                               struct kvk_error *error);
void kvk_tenants_destroy(struct kvk_tenants *tenants);

/* Indices below this have been given out. Never falls. */
uint32_t kvk_tenants_count(const struct kvk_tenants *tenants);
/* NULL: nobody has this index now. */
const struct kvk_tenant *kvk_tenants_get(const struct kvk_tenants *tenants, uint32_t index);
/* NULL: none has this id. */
const struct kvk_tenant *kvk_tenants_find(const struct kvk_tenants *tenants, uint64_t id);
/* By name, normalised here. NULL: none. */
const struct kvk_tenant *kvk_tenants_find_name(const struct kvk_tenants *tenants, const void *name,
                                               size_t name_size);

/* ---- Whose call is it? ---- */

#define KVK_SUBJECTS_MAX 16

/* What a caller shows. All of it borrowed. */
struct kvk_proof {
    const uint8_t *token; /* NULL: none was sent */
    size_t token_size;
    bool local; /* over the unix socket, from `uid` */
    uint32_t uid;
    /* Names in a client's certificate that the server has verified, the most specific first. */
    const char *subjects[KVK_SUBJECTS_MAX]; /* [subject_count] */
    uint32_t subject_count;
};

/*
 * A token decides where one was sent; then a certificate; then the uid. KVK_UNAUTHENTICATED: none
 * of these says who; a token that is wrong is refused even where the rest would do. Tokens are
 * compared as SHA-256 digests in constant time, and equally many whether there is such a token or
 * not.
 * `guessable` (may be NULL): the proof is a token of the file, which people choose: see
 * auth_limit.h.
 */
KVK_CHECKED enum kvk_status kvk_tenants_identify(struct kvk_tenants *tenants,
                                                 const struct kvk_proof *proof,
                                                 const struct kvk_credential **credential,
                                                 bool *guessable, struct kvk_error *error);

/* By token or uid alone. */
KVK_CHECKED enum kvk_status kvk_tenants_authenticate(struct kvk_tenants *tenants,
                                                     const uint8_t *token, size_t token_size,
                                                     bool local, uint32_t uid,
                                                     const struct kvk_credential **credential,
                                                     struct kvk_error *error);

/* The tenant that a request names, "" for the credential's first. KVK_PERMISSION: not one of
 * those; the answer is the same whether such a tenant exists or not. Also as kvk_tenant_check(). */
KVK_CHECKED enum kvk_status kvk_credential_tenant(const struct kvk_credential *credential,
                                                  const uint8_t *name, size_t name_size,
                                                  const struct kvk_tenant **tenant,
                                                  struct kvk_error *error);

bool kvk_credential_allows(const struct kvk_credential *credential,
                           const struct kvk_tenant *tenant);

struct kvk_tenants_stats {
    uint64_t tenants;           /* now */
    uint64_t credentials;       /* now */
    uint64_t changes;           /* through tenant_admin.h, that succeeded */
    uint64_t identified;        /* calls whose caller was known */
    uint64_t identify_failures; /* … was not */
};
void kvk_tenants_stats(const struct kvk_tenants *tenants, struct kvk_tenants_stats *stats);

#endif
