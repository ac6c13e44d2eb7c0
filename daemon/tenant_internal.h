/*
 * The tables of tenants and credentials, for daemon/tenant*.c alone.
 *
 * One change at a time: who changes calls kvk_tenants_change_begin(), and until
 * kvk_tenants_change_end() the tables are its own to write. No lock is held meanwhile, so that the
 * catalogue may be written. All others read the atomics and, under snapshot_lock, the snapshot.
 */
#ifndef KVK_DAEMON_TENANT_INTERNAL_H
#define KVK_DAEMON_TENANT_INTERNAL_H

#include <pthread.h>

#include "base/lock.h"
#include "daemon/tenant.h"

#define KVK_TOKEN_DIGEST_SIZE 32 /* SHA-256 */

/* Tenants and credentials of one life of the daemon, deleted ones included: what was given out once
 * stays in memory. */
#define KVK_TENANT_LIVES_MAX 65536

/* A tenant, and its record as it is stored. */
struct kvk_tenant_entry {
    struct kvk_tenant tenant;
    struct kvk_tenant_record record; /* with the secret; the changer's */
    struct kvk_tenant_entry *next;   /* of all that ever were */
};

/* A credential, and what it is recognised by. */
struct kvk_credential_entry {
    struct kvk_credential credential;
    struct kvk_credential_record record;
    uint64_t expires_ns[KVK_CREDENTIAL_TOKENS_MAX]; /* on our clock; UINT64_MAX: never */
    bool configured;
    bool anonymous;                    /* whoever comes over TCP with nothing to show */
    struct kvk_credential_entry *next; /* of all that ever were */
};

struct kvk_auth_snapshot;

struct kvk_tenants {
    const struct kvk_config *config;
    struct kvk_catalogue *catalogue; /* NULL: none */
    struct kvk_clock *clock;

    struct kvk_lock lock; /* of `changing` */
    pthread_cond_t changed;
    bool changing;

    _Atomic(struct kvk_tenant_entry *) by_index[KVK_TENANT_COUNT_MAX]; /* [tenant_end] */
    _Atomic uint32_t tenant_end;   /* indices from here on were never given out */
    _Atomic uint32_t tenant_count; /* places of by_index that are taken */

    struct kvk_credential_entry *credentials[KVK_CREDENTIAL_COUNT_MAX]; /* [credential_count] */
    _Atomic uint32_t credential_count;

    struct kvk_tenant_entry *tenant_lives; /* ours, as the next */
    struct kvk_credential_entry *credential_lives;
    uint32_t lives;
    uint64_t last_id; /* without a catalogue */

    pthread_rwlock_t snapshot_lock;
    struct kvk_auth_snapshot *snapshot; /* ours; immutable, exchanged as a whole */

    _Atomic uint64_t changes;
    _Atomic uint64_t identified;
    _Atomic uint64_t identify_failures;
};

/* ---- tenant.c: the changer's ---- */

void kvk_tenants_change_begin(struct kvk_tenants *tenants);
void kvk_tenants_change_end(struct kvk_tenants *tenants);

/* A tenant with this record, in the first free place; not stored. KVK_EXHAUSTED: too many. */
KVK_CHECKED enum kvk_status kvk_tenants_enter(struct kvk_tenants *tenants,
                                              const struct kvk_tenant_record *record,
                                              bool configured, struct kvk_tenant_entry **entry,
                                              struct kvk_error *error);
/* Its place is free. */
void kvk_tenants_leave(struct kvk_tenants *tenants, struct kvk_tenant_entry *entry);
/* NULL: none. */
struct kvk_tenant_entry *kvk_tenants_entry(const struct kvk_tenants *tenants, const char *name);
/* What the record says is what readers see from now on. */
void kvk_tenant_publish(struct kvk_tenant_entry *entry);

/* A credential that is in no table yet. Tenants of the record that are not there are left out. */
KVK_CHECKED enum kvk_status
kvk_credential_make(struct kvk_tenants *tenants, const struct kvk_credential_record *record,
                    bool configured, struct kvk_credential_entry **entry, struct kvk_error *error);
/* Its tokens are those of the record from now on; all else of it stays. */
void kvk_credential_set_tokens(const struct kvk_tenants *tenants,
                               struct kvk_credential_entry *entry,
                               const struct kvk_credential_record *record);
/* UINT32_MAX: none. */
uint32_t kvk_credential_place(const struct kvk_tenants *tenants, const char *name);

bool kvk_tenant_quota_equal(const struct kvk_tenant_quota *a, const struct kvk_tenant_quota *b);
/* Seconds since 1970. */
uint64_t kvk_wall_seconds(void);

/* ---- tenant_auth.c ---- */

/* Room for a digest on this thread, made at first use. False: no memory. */
KVK_CHECKED bool kvk_token_digest(const uint8_t *token, size_t token_size,
                                  uint8_t digest[KVK_TOKEN_DIGEST_SIZE]);

/* Everything by which somebody is recognised, from these credentials; NULL: no memory. */
struct kvk_auth_snapshot *kvk_auth_snapshot_make(struct kvk_credential_entry *const *credentials,
                                                 uint32_t count);
void kvk_auth_snapshot_free(struct kvk_auth_snapshot *snapshot);
/* From now on callers are recognised by this one. */
void kvk_auth_snapshot_install(struct kvk_tenants *tenants, struct kvk_auth_snapshot *snapshot);

#endif
