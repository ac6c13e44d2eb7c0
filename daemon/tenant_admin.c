#include "daemon/tenant_admin.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/tenant_internal.h"

/* ---- What cannot be changed here ---- */

static enum kvk_status durable_check(const struct kvk_tenants *tenants, struct kvk_error *error)
{
    if (tenants->catalogue == NULL) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "durable.folder",
                        "tenants and credentials can be changed only where the configuration names "
                        "a durable.folder");
    }
    return KVK_OK;
}

static enum kvk_status tenant_of(const struct kvk_tenants *tenants, const char *name,
                                 struct kvk_tenant_entry **entry, struct kvk_error *error)
{
    *entry = kvk_tenants_entry(tenants, name);
    if (*entry == NULL) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "name", "no such tenant");
    }
    return KVK_OK;
}

static enum kvk_status configured_refuse(const char *what, struct kvk_error *error)
{
    return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_FIELD, "name",
                    "the %s is of the configuration file: it is changed there, with a restart",
                    what);
}

static enum kvk_status leaving_refuse(struct kvk_error *error)
{
    return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_SWITCHED_OFF, "name",
                    "the tenant is being deleted");
}

/* ---- Tenants ---- */

static void change_apply(struct kvk_tenant_record *record, const struct kvk_tenant_change *change)
{
    if (change->set_quota) {
        record->quota = change->quota;
    }
    if (change->set_mode) {
        record->mode = (uint8_t)change->mode;
    }
    if (change->set_may_publish) {
        record->may_publish = change->may_publish;
    }
}

/* With the record's own kept: what the file, or a repeated call, would make of it. */
static bool is_same(const struct kvk_tenant_entry *entry,
                    const struct kvk_tenant_change *properties)
{
    struct kvk_tenant_record wanted = {.mode = KVK_TENANT_ON};
    change_apply(&wanted, properties);
    return !entry->tenant.configured && entry->record.mode == wanted.mode &&
           entry->record.may_publish == wanted.may_publish &&
           kvk_tenant_quota_equal(&entry->record.quota, &wanted.quota);
}

static enum kvk_status tenant_add(struct kvk_tenants *tenants, const char *name,
                                  const struct kvk_tenant_change *properties,
                                  struct kvk_tenant_entry **entry, struct kvk_error *error)
{
    struct kvk_tenant_record record = {.created_s = kvk_wall_seconds()};
    (void)snprintf(record.name, sizeof(record.name), "%s", name);
    kvk_random_secret(record.secret, sizeof(record.secret));
    change_apply(&record, properties);
    if (atomic_load(&tenants->tenant_count) == KVK_TENANT_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "name", KVK_TENANT_COUNT_MAX,
                              KVK_TENANT_COUNT_MAX, "there are %d tenants, and no more can be",
                              KVK_TENANT_COUNT_MAX);
    }
    enum kvk_status status = kvk_catalogue_put_tenant(tenants->catalogue, &record, error);
    if (status == KVK_OK) {
        status = kvk_tenants_enter(tenants, &record, false, entry, error);
        if (status != KVK_OK &&
            kvk_catalogue_remove_tenant(tenants->catalogue, record.id, NULL) != KVK_OK) {
            kvk_log(KVK_LOG_WARNING, "tenant_left_in_catalogue", "name=\"%s\"", name);
        }
    }
    kvk_secret_wipe(record.secret, sizeof(record.secret));
    return status;
}

enum kvk_status kvk_tenants_add(struct kvk_tenants *tenants, const char *name,
                                const struct kvk_tenant_change *properties,
                                const struct kvk_tenant **tenant, bool *created,
                                struct kvk_error *error)
{
    *created = false;
    enum kvk_status status = durable_check(tenants, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_tenants_change_begin(tenants);
    struct kvk_tenant_entry *entry = kvk_tenants_entry(tenants, name);
    if (entry != NULL && entry->record.forgetting) {
        status = leaving_refuse(error);
    } else if (entry != NULL && !is_same(entry, properties)) {
        status = kvk_fail(error, KVK_EXISTS, KVK_CAUSE_NONE, "name",
                          "there is a tenant of this name with other properties");
    } else if (entry == NULL) {
        status = tenant_add(tenants, name, properties, &entry, error);
        *created = status == KVK_OK;
    }
    if (status == KVK_OK) {
        KVK_ASSERT(entry != NULL);
        *tenant = &entry->tenant;
        atomic_fetch_add(&tenants->changes, *created);
    }
    kvk_tenants_change_end(tenants);
    return status;
}

static enum kvk_status tenant_change(struct kvk_tenants *tenants, const char *name,
                                     const struct kvk_tenant_change *change,
                                     struct kvk_error *error)
{
    struct kvk_tenant_entry *entry = NULL;
    enum kvk_status status = tenant_of(tenants, name, &entry, error);
    if (status != KVK_OK) {
        return status;
    }
    if (entry->record.forgetting) {
        return leaving_refuse(error);
    }
    /* A switch has to work for whoever turns it. What the file says comes back at the next start.
     */
    bool switches_alone = change->set_mode && !change->set_quota && !change->set_may_publish;
    if (entry->tenant.configured && !switches_alone) {
        return configured_refuse("tenant", error);
    }
    struct kvk_tenant_record record = entry->record;
    change_apply(&record, change);
    if (!entry->tenant.configured) {
        status = durable_check(tenants, error);
        if (status == KVK_OK) {
            status = kvk_catalogue_put_tenant(tenants->catalogue, &record, error);
        }
    }
    if (status == KVK_OK) {
        entry->record = record;
        kvk_tenant_publish(entry);
        atomic_fetch_add(&tenants->changes, 1);
    }
    kvk_secret_wipe(record.secret, sizeof(record.secret));
    return status;
}

enum kvk_status kvk_tenants_change(struct kvk_tenants *tenants, const char *name,
                                   const struct kvk_tenant_change *change, struct kvk_error *error)
{
    kvk_tenants_change_begin(tenants);
    enum kvk_status status = tenant_change(tenants, name, change, error);
    kvk_tenants_change_end(tenants);
    return status;
}

/* ---- Credentials, one at a time ---- */

/* A table of credentials as it will be: made before the catalogue is written, so that nothing can
 * fail after it. */
struct next_table {
    struct kvk_credential_entry **list; /* [count]; ours, as the next */
    uint32_t count;
    struct kvk_auth_snapshot *snapshot;
};

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for credentials");
}

/* `place` replaced by `entry` (NULL: left out), or `entry` appended where it is UINT32_MAX. False:
 * no memory. */
static bool table_prepare(const struct kvk_tenants *tenants, uint32_t place,
                          struct kvk_credential_entry *entry, struct next_table *next)
{
    uint32_t before = atomic_load(&tenants->credential_count);
    *next = (struct next_table){.list = calloc(before + 1u, sizeof(*next->list))};
    if (next->list == NULL) {
        return false;
    }
    for (uint32_t i = 0; i < before; i++) {
        struct kvk_credential_entry *kept = i == place ? entry : tenants->credentials[i];
        if (kept != NULL) {
            next->list[next->count++] = kept;
        }
    }
    if (place == UINT32_MAX) {
        next->list[next->count++] = entry;
    }
    KVK_ASSERT(next->count <= KVK_CREDENTIAL_COUNT_MAX);
    next->snapshot = kvk_auth_snapshot_make(next->list, next->count);
    if (next->snapshot == NULL) {
        free(next->list);
        return false;
    }
    return true;
}

static void table_install(struct kvk_tenants *tenants, struct next_table *next)
{
    memcpy(tenants->credentials, next->list, next->count * sizeof(next->list[0]));
    atomic_store(&tenants->credential_count, next->count);
    kvk_auth_snapshot_install(tenants, next->snapshot);
    free(next->list);
    atomic_fetch_add(&tenants->changes, 1);
}

static void table_discard(struct next_table *next)
{
    kvk_auth_snapshot_free(next->snapshot);
    free(next->list);
}

/* Store a new credential, or one that acts for others than before, and let it be known. */
static enum kvk_status credential_put(struct kvk_tenants *tenants, uint32_t place,
                                      const struct kvk_credential_record *record,
                                      struct kvk_error *error)
{
    struct kvk_credential_entry *entry = NULL;
    struct next_table next;
    enum kvk_status status = kvk_credential_make(tenants, record, false, &entry, error);
    if (status != KVK_OK) {
        return status;
    }
    if (!table_prepare(tenants, place, entry, &next)) {
        return no_memory(error);
    }
    status = kvk_catalogue_put_credential(tenants->catalogue, record, error);
    if (status != KVK_OK) {
        table_discard(&next);
        return status;
    }
    table_install(tenants, &next);
    return KVK_OK;
}

/* Other tokens of the credential at `place`, which calls under way go on with: it stays where it
 * is. */
static enum kvk_status tokens_put(struct kvk_tenants *tenants, uint32_t place,
                                  const struct kvk_credential_record *record,
                                  struct kvk_error *error)
{
    struct kvk_credential_entry *entry = tenants->credentials[place];
    struct kvk_credential_entry before = *entry;
    struct next_table next;
    enum kvk_status status = KVK_OK;
    kvk_credential_set_tokens(tenants, entry, record);
    if (!table_prepare(tenants, place, entry, &next)) {
        status = no_memory(error);
    } else {
        status = kvk_catalogue_put_credential(tenants->catalogue, &entry->record, error);
        if (status == KVK_OK) {
            table_install(tenants, &next);
        } else {
            table_discard(&next);
        }
    }
    if (status != KVK_OK) {
        kvk_credential_set_tokens(tenants, entry, &before.record);
    }
    kvk_secret_wipe(before.record.tokens, sizeof(before.record.tokens));
    return status;
}

static enum kvk_status credential_drop(struct kvk_tenants *tenants, uint32_t place,
                                       struct kvk_error *error)
{
    const char *name = tenants->credentials[place]->credential.name;
    struct next_table next;
    if (!table_prepare(tenants, place, NULL, &next)) {
        return no_memory(error);
    }
    enum kvk_status status = kvk_catalogue_remove_credential(tenants->catalogue, name, error);
    if (status != KVK_OK && status != KVK_NOT_FOUND) {
        table_discard(&next);
        return status;
    }
    table_install(tenants, &next);
    return KVK_OK;
}

/* One of the catalogue's, by name. */
static enum kvk_status credential_of(const struct kvk_tenants *tenants, const char *name,
                                     uint32_t *place, struct kvk_error *error)
{
    enum kvk_status status = durable_check(tenants, error);
    if (status != KVK_OK) {
        return status;
    }
    *place = kvk_credential_place(tenants, name);
    if (*place == UINT32_MAX) {
        return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "name", "no such credential");
    }
    if (tenants->credentials[*place]->configured) {
        return configured_refuse("credential", error);
    }
    return KVK_OK;
}

/* ---- Deleting a tenant ---- */

/* Take the tenant out of the credential at `place`. `dropped`: it had nothing else. */
static enum kvk_status credential_without(struct kvk_tenants *tenants, uint32_t place,
                                          uint64_t tenant_id, bool *dropped,
                                          struct kvk_error *error)
{
    struct kvk_credential_record record = tenants->credentials[place]->record;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < record.tenant_count; i++) {
        if (record.tenant_ids[i] != tenant_id) {
            record.tenant_ids[kept++] = record.tenant_ids[i];
        }
    }
    record.tenant_count = kept;
    *dropped = kept == 0 && !record.admin;
    return *dropped ? credential_drop(tenants, place, error)
                    : credential_put(tenants, place, &record, error);
}

static bool acts_for(const struct kvk_credential_entry *entry, uint64_t tenant_id)
{
    for (uint32_t i = 0; i < entry->record.tenant_count; i++) {
        if (entry->record.tenant_ids[i] == tenant_id) {
            return true;
        }
    }
    return false;
}

static enum kvk_status credentials_without(struct kvk_tenants *tenants, uint64_t tenant_id,
                                           uint32_t *dropped_count, struct kvk_error *error)
{
    uint32_t place = 0;
    while (place < atomic_load(&tenants->credential_count)) {
        bool dropped = false;
        if (!acts_for(tenants->credentials[place], tenant_id)) {
            place++;
            continue;
        }
        KVK_ASSERT(!tenants->credentials[place]->configured); /* they name the file's tenants */
        enum kvk_status status = credential_without(tenants, place, tenant_id, &dropped, error);
        if (status != KVK_OK) {
            return status;
        }
        *dropped_count += dropped;
        place += !dropped;
    }
    return KVK_OK;
}

static enum kvk_status tenant_retire(struct kvk_tenants *tenants, const char *name,
                                     const struct kvk_tenant **tenant, uint32_t *credentials,
                                     struct kvk_error *error)
{
    struct kvk_tenant_entry *entry = NULL;
    enum kvk_status status = durable_check(tenants, error);
    if (status == KVK_OK) {
        status = tenant_of(tenants, name, &entry, error);
    }
    if (status == KVK_OK && entry->tenant.configured) {
        status = configured_refuse("tenant", error);
    }
    if (status != KVK_OK) {
        return status;
    }
    *tenant = &entry->tenant;
    if (!entry->record.forgetting) {
        struct kvk_tenant_record record = entry->record;
        record.forgetting = true;
        status = kvk_catalogue_put_tenant(tenants->catalogue, &record, error);
        kvk_secret_wipe(record.secret, sizeof(record.secret));
        if (status != KVK_OK) {
            return status;
        }
        entry->record.forgetting = true;
        kvk_tenant_publish(entry);
        atomic_fetch_add(&tenants->changes, 1);
    }
    return credentials_without(tenants, entry->tenant.id, credentials, error);
}

enum kvk_status kvk_tenants_retire(struct kvk_tenants *tenants, const char *name,
                                   const struct kvk_tenant **tenant, uint32_t *credentials,
                                   struct kvk_error *error)
{
    *credentials = 0;
    kvk_tenants_change_begin(tenants);
    enum kvk_status status = tenant_retire(tenants, name, tenant, credentials, error);
    kvk_tenants_change_end(tenants);
    return status;
}

enum kvk_status kvk_tenants_remove(struct kvk_tenants *tenants, const struct kvk_tenant *tenant,
                                   struct kvk_error *error)
{
    kvk_tenants_change_begin(tenants);
    struct kvk_tenant_entry *entry = kvk_tenants_entry(tenants, tenant->name);
    enum kvk_status status = KVK_OK;
    /* Else somebody else has finished it. */
    if (entry != NULL && &entry->tenant == tenant) {
        KVK_ASSERT(entry->record.forgetting);
        status = kvk_catalogue_remove_tenant(tenants->catalogue, tenant->id, error);
        if (status == KVK_OK || status == KVK_NOT_FOUND) {
            kvk_tenants_leave(tenants, entry);
            status = KVK_OK;
        }
    }
    kvk_tenants_change_end(tenants);
    return status;
}

/* ---- Credentials ---- */

/* A token nobody has seen, and its digest behind the record's others. */
static enum kvk_status token_make(struct kvk_credential_record *record,
                                  char token[KVK_TOKEN_TEXT_SIZE], struct kvk_error *error)
{
    uint8_t secret[32];
    KVK_ASSERT(record->token_count < KVK_CREDENTIAL_TOKENS_MAX);
    kvk_random_secret(secret, sizeof(secret));
    memcpy(token, KVK_TOKEN_PREFIX, sizeof(KVK_TOKEN_PREFIX) - 1);
    kvk_hex_write(secret, sizeof(secret), token + sizeof(KVK_TOKEN_PREFIX) - 1);
    kvk_secret_wipe(secret, sizeof(secret));
    uint32_t place = record->token_count;
    if (!kvk_token_digest((const uint8_t *)token, KVK_TOKEN_TEXT_SIZE - 1,
                          record->tokens[place].digest)) {
        kvk_secret_wipe(token, KVK_TOKEN_TEXT_SIZE);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a digest");
    }
    record->tokens[place].created_s = kvk_wall_seconds();
    record->tokens[place].expires_s = 0;
    record->token_count++;
    return KVK_OK;
}

static enum kvk_status exists(const char *field, struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXISTS, KVK_CAUSE_NONE, field, "another credential has this %s",
                    field);
}

static enum kvk_status uid_check(const struct kvk_tenants *tenants, uint32_t uid,
                                 struct kvk_error *error)
{
    uint32_t count = atomic_load(&tenants->credential_count);
    for (uint32_t i = 0; i < count; i++) {
        const struct kvk_credential_record *record = &tenants->credentials[i]->record;
        for (uint32_t j = 0; j < record->uid_count; j++) {
            if (record->uids[j] == uid) {
                return exists("uid", error);
            }
        }
    }
    return KVK_OK;
}

static enum kvk_status collisions_check(const struct kvk_tenants *tenants,
                                        const struct kvk_credential_request *request,
                                        struct kvk_error *error)
{
    uint32_t count = atomic_load(&tenants->credential_count);
    if (kvk_credential_place(tenants, request->name) != UINT32_MAX) {
        return exists("name", error);
    }
    for (uint32_t i = 0; i < count && request->certificate[0] != '\0'; i++) {
        if (strcmp(tenants->credentials[i]->record.certificate_subject, request->certificate) ==
            0) {
            return exists("certificate", error);
        }
    }
    for (uint32_t i = 0; i < request->uid_count; i++) {
        enum kvk_status status = uid_check(tenants, request->uids[i], error);
        if (status != KVK_OK) {
            return status;
        }
    }
    if (count == KVK_CREDENTIAL_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "name", count, count,
                              "there are %d credentials, and no more can be",
                              KVK_CREDENTIAL_COUNT_MAX);
    }
    return KVK_OK;
}

static enum kvk_status tenants_fill(const struct kvk_tenants *tenants,
                                    const struct kvk_credential_request *request,
                                    struct kvk_credential_record *record, struct kvk_error *error)
{
    for (uint32_t i = 0; i < request->tenant_count; i++) {
        const struct kvk_tenant_entry *entry = kvk_tenants_entry(tenants, request->tenants[i]);
        if (entry == NULL || entry->record.forgetting) {
            return kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_FIELD, "tenants",
                            "tenants[%u] names no tenant", i);
        }
        for (uint32_t j = 0; j < i; j++) {
            if (record->tenant_ids[j] == entry->tenant.id) {
                return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "tenants",
                                "tenants[%u] is there twice", i);
            }
        }
        record->tenant_ids[record->tenant_count++] = entry->tenant.id;
    }
    return KVK_OK;
}

static enum kvk_status request_check(const struct kvk_credential_request *request,
                                     struct kvk_error *error)
{
    if (!request->token && request->certificate[0] == '\0' && request->uid_count == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "token",
                        "a credential needs a token, a certificate or uids");
    }
    if (request->tenant_count == 0 && !request->admin) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "tenants",
                        "it would act for no tenant and is no admin");
    }
    return KVK_OK;
}

enum kvk_status kvk_credentials_add(struct kvk_tenants *tenants,
                                    const struct kvk_credential_request *request,
                                    char token[KVK_TOKEN_TEXT_SIZE], struct kvk_error *error)
{
    struct kvk_credential_record record = {.admin = request->admin,
                                           .uid_count = request->uid_count};
    token[0] = '\0';
    enum kvk_status status = durable_check(tenants, error);
    if (status == KVK_OK) {
        status = request_check(request, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    KVK_ASSERT(request->uid_count <= sizeof(record.uids) / sizeof(record.uids[0]));
    memcpy(record.uids, request->uids, sizeof(record.uids));
    (void)snprintf(record.name, sizeof(record.name), "%s", request->name);
    (void)snprintf(record.certificate_subject, sizeof(record.certificate_subject), "%s",
                   request->certificate);
    kvk_tenants_change_begin(tenants);
    status = collisions_check(tenants, request, error);
    if (status == KVK_OK) {
        status = tenants_fill(tenants, request, &record, error);
    }
    if (status == KVK_OK && request->token) {
        status = token_make(&record, token, error);
    }
    if (status == KVK_OK) {
        status = credential_put(tenants, UINT32_MAX, &record, error);
    }
    kvk_tenants_change_end(tenants);
    if (status != KVK_OK) {
        kvk_secret_wipe(token, KVK_TOKEN_TEXT_SIZE);
        token[0] = '\0';
    }
    return status;
}

/* Without the tokens that have ended. */
static void tokens_tidy(struct kvk_credential_record *record, uint64_t wall_s)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < record->token_count; i++) {
        if (record->tokens[i].expires_s == 0 || record->tokens[i].expires_s > wall_s) {
            record->tokens[kept++] = record->tokens[i];
        }
    }
    record->token_count = kept;
}

static enum kvk_status credential_rotate(struct kvk_tenants *tenants, const char *name,
                                         uint64_t overlap_s, char token[KVK_TOKEN_TEXT_SIZE],
                                         struct kvk_error *error)
{
    uint32_t place = 0;
    enum kvk_status status = credential_of(tenants, name, &place, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_credential_record record = tenants->credentials[place]->record;
    uint64_t wall_s = kvk_wall_seconds();
    tokens_tidy(&record, wall_s);
    for (uint32_t i = 0; i < record.token_count; i++) {
        uint64_t *expires_s = &record.tokens[i].expires_s;
        if (*expires_s == 0 || *expires_s > wall_s + overlap_s) {
            *expires_s = wall_s + overlap_s;
        }
    }
    tokens_tidy(&record, wall_s);
    if (record.token_count == KVK_CREDENTIAL_TOKENS_MAX) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "overlap_s",
                              record.token_count, KVK_CREDENTIAL_TOKENS_MAX,
                              "%d tokens of the credential overlap: let one end, or revoke them",
                              KVK_CREDENTIAL_TOKENS_MAX);
    }
    status = token_make(&record, token, error);
    return status == KVK_OK ? tokens_put(tenants, place, &record, error) : status;
}

enum kvk_status kvk_credentials_rotate(struct kvk_tenants *tenants, const char *name,
                                       uint64_t overlap_s, char token[KVK_TOKEN_TEXT_SIZE],
                                       struct kvk_error *error)
{
    token[0] = '\0';
    if (overlap_s > KVK_TOKEN_OVERLAP_S_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "overlap_s", overlap_s,
                              KVK_TOKEN_OVERLAP_S_MAX, "overlap_s must be at most a year");
    }
    kvk_tenants_change_begin(tenants);
    enum kvk_status status = credential_rotate(tenants, name, overlap_s, token, error);
    kvk_tenants_change_end(tenants);
    if (status != KVK_OK) {
        kvk_secret_wipe(token, KVK_TOKEN_TEXT_SIZE);
        token[0] = '\0';
    }
    return status;
}

enum kvk_status kvk_credentials_revoke(struct kvk_tenants *tenants, const char *name,
                                       uint32_t *token_count, struct kvk_error *error)
{
    uint32_t place = 0;
    *token_count = 0;
    kvk_tenants_change_begin(tenants);
    enum kvk_status status = credential_of(tenants, name, &place, error);
    if (status == KVK_OK && tenants->credentials[place]->record.token_count > 0) {
        struct kvk_credential_record record = tenants->credentials[place]->record;
        *token_count = record.token_count;
        record.token_count = 0;
        kvk_secret_wipe(record.tokens, sizeof(record.tokens));
        status = tokens_put(tenants, place, &record, error);
    }
    kvk_tenants_change_end(tenants);
    return status;
}

enum kvk_status kvk_credentials_delete(struct kvk_tenants *tenants, const char *name,
                                       struct kvk_error *error)
{
    uint32_t place = 0;
    kvk_tenants_change_begin(tenants);
    enum kvk_status status = credential_of(tenants, name, &place, error);
    if (status == KVK_OK) {
        status = credential_drop(tenants, place, error);
    }
    kvk_tenants_change_end(tenants);
    return status;
}

/* ---- Listing ---- */

static void report_fill(const struct kvk_credential_entry *entry, uint64_t wall_s,
                        struct kvk_credential_report *row)
{
    struct kvk_credential_record record = entry->record;
    tokens_tidy(&record, wall_s);
    memcpy(row->name, record.name, sizeof(row->name));
    row->tenant_count = entry->credential.tenant_count;
    memcpy(row->tenants, entry->credential.tenants, sizeof(row->tenants));
    row->admin = record.admin;
    row->configured = entry->configured;
    memcpy(row->certificate, record.certificate_subject, sizeof(row->certificate));
    memcpy(row->uids, record.uids, sizeof(row->uids));
    row->uid_count = record.uid_count;
    row->token_count = record.token_count;
    for (uint32_t i = 0; i < record.token_count; i++) {
        row->tokens[i].created_s = record.tokens[i].created_s;
        row->tokens[i].expires_s = record.tokens[i].expires_s;
    }
}

enum kvk_status kvk_credentials_list(struct kvk_tenants *tenants,
                                     struct kvk_credential_report **rows, uint32_t *count,
                                     struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    kvk_tenants_change_begin(tenants);
    *count = atomic_load(&tenants->credential_count);
    *rows = calloc((size_t)*count + 1, sizeof(**rows));
    if (*rows == NULL) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    uint64_t wall_s = kvk_wall_seconds();
    for (uint32_t i = 0; i < *count && *rows != NULL; i++) {
        report_fill(tenants->credentials[i], wall_s, &(*rows)[i]);
    }
    kvk_tenants_change_end(tenants);
    return status;
}
