/*
 * Changing who is there and who may do what: tenants and credentials of the catalogue. What the
 * configuration file says can be listed here, and a tenant of it can be switched until the next
 * start; all else of it is the file's to change.
 *
 * Every change is durable when its function returns, and nothing has changed where it fails. Calls
 * that create or delete can be repeated: the same again is answered alike, as far as the answer is
 * still known (a token is shown once and kept nowhere).
 *
 * Locking: any thread, without locks; one change at a time, others wait. They write the catalogue,
 * so they may block.
 */
#ifndef KVK_DAEMON_TENANT_ADMIN_H
#define KVK_DAEMON_TENANT_ADMIN_H

#include "daemon/tenant.h"

#define KVK_TOKEN_PREFIX "kvk_"
/* The prefix, 256 random bits in hex, and a NUL. */
#define KVK_TOKEN_TEXT_SIZE (sizeof(KVK_TOKEN_PREFIX) + 64)
#define KVK_TOKEN_OVERLAP_S_MAX (UINT64_C(366) * 86400)

/* ---- Tenants ---- */

/* What is to change; the rest stays. */
struct kvk_tenant_change {
    bool set_quota;
    struct kvk_tenant_quota quota;
    bool set_mode;
    enum kvk_tenant_mode mode;
    bool set_may_publish;
    bool may_publish;
};

/*
 * KVK_EXISTS: there is one of this name with other properties (the same again is KVK_OK, `created`
 * false). KVK_PRECONDITION: no durable.folder, or it is being deleted. KVK_EXHAUSTED: too many.
 */
KVK_CHECKED enum kvk_status kvk_tenants_add(struct kvk_tenants *tenants, const char *name,
                                            const struct kvk_tenant_change *properties,
                                            const struct kvk_tenant **tenant, bool *created,
                                            struct kvk_error *error);

/* KVK_NOT_FOUND. KVK_PRECONDITION: the file's, or being deleted. */
KVK_CHECKED enum kvk_status kvk_tenants_change(struct kvk_tenants *tenants, const char *name,
                                               const struct kvk_tenant_change *change,
                                               struct kvk_error *error);

/*
 * The first half of deleting one: from here on nothing is begun for it, now and after a crash; it
 * is in no credential any more, and credentials that had nothing else are deleted with it (how many
 * is in `credentials`). May be repeated. The second half follows when the engine has forgotten it
 * (forget.h): its records go, and its place is free.
 */
KVK_CHECKED enum kvk_status kvk_tenants_retire(struct kvk_tenants *tenants, const char *name,
                                               const struct kvk_tenant **tenant,
                                               uint32_t *credentials, struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_tenants_remove(struct kvk_tenants *tenants,
                                               const struct kvk_tenant *tenant,
                                               struct kvk_error *error);

/* ---- Credentials ---- */

struct kvk_credential_request {
    const char *name;                                /* NFC, as all names here */
    const char *tenants[KVK_CREDENTIAL_TENANTS_MAX]; /* [tenant_count], the first is the default */
    uint32_t tenant_count;                           /* 0 for an admin alone */
    bool admin;
    bool token;              /* give it one */
    const char *certificate; /* "": none */
    uint32_t uids[16];
    uint32_t uid_count;
};

/* `token` is filled where one was wanted, and to be wiped. KVK_EXISTS: the name, the certificate or
 * a uid is another's (named in the field). Not repeatable where a token was made: delete it. */
KVK_CHECKED enum kvk_status kvk_credentials_add(struct kvk_tenants *tenants,
                                                const struct kvk_credential_request *request,
                                                char token[KVK_TOKEN_TEXT_SIZE],
                                                struct kvk_error *error);

/* A new token; those of before end after `overlap_s` (0: at once), unless they end sooner.
 * KVK_EXHAUSTED: too many tokens overlap. */
KVK_CHECKED enum kvk_status kvk_credentials_rotate(struct kvk_tenants *tenants, const char *name,
                                                   uint64_t overlap_s,
                                                   char token[KVK_TOKEN_TEXT_SIZE],
                                                   struct kvk_error *error);

/* All of its tokens end at once. The credential stays, with certificate and uids. */
KVK_CHECKED enum kvk_status kvk_credentials_revoke(struct kvk_tenants *tenants, const char *name,
                                                   uint32_t *token_count, struct kvk_error *error);

/* KVK_NOT_FOUND: there is none (any more). */
KVK_CHECKED enum kvk_status kvk_credentials_delete(struct kvk_tenants *tenants, const char *name,
                                                   struct kvk_error *error);

/* What may be told of a credential: no digests. */
struct kvk_credential_report {
    char name[KVK_NAME_SIZE];
    const struct kvk_tenant *tenants[KVK_CREDENTIAL_TENANTS_MAX];
    uint32_t tenant_count;
    bool admin;
    bool configured;
    char certificate[KVK_NAME_SIZE];
    uint32_t uids[16];
    uint32_t uid_count;
    struct {
        uint64_t created_s;              /* 0: not known */
        uint64_t expires_s;              /* 0: never */
    } tokens[KVK_CREDENTIAL_TOKENS_MAX]; /* [token_count], that have not ended */
    uint32_t token_count;
};

/* Rows are the caller's to free(). */
KVK_CHECKED enum kvk_status kvk_credentials_list(struct kvk_tenants *tenants,
                                                 struct kvk_credential_report **rows,
                                                 uint32_t *count, struct kvk_error *error);

#endif
