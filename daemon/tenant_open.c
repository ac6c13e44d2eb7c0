/*
 * The tables as they are at the start: what the catalogue has, and what the configuration says.
 *
 * The configuration goes first where both know a name: a configured tenant keeps its id and secret
 * from the catalogue, and has its quota, mode and rights from the file; a credential of the
 * catalogue that shares its name, uid or certificate with one of the file is not used, and the log
 * says so. A tenant that is no longer in the file stays, with its data, as one of the catalogue's.
 */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/tenant_internal.h"

struct opening {
    struct kvk_tenants *tenants;
    const struct kvk_config *config;
    struct kvk_tenant_record *records; /* [record_count] of the catalogue; ours */
    uint32_t record_count;
    uint32_t record_capacity;
    struct kvk_credential_record *credentials; /* [credential_count] of the catalogue; ours */
    uint32_t credential_count;
    uint32_t credential_capacity;
    bool no_memory;
};

/* ---- What the catalogue has ---- */

/* Room for one more element. False: no memory. */
static bool grow(void **list, uint32_t count, uint32_t *capacity, size_t element_size)
{
    if (count < *capacity) {
        return true;
    }
    uint32_t wanted = *capacity == 0 ? 16 : *capacity * 2;
    void *larger = realloc(*list, wanted * element_size);
    if (larger == NULL) {
        return false;
    }
    *list = larger;
    *capacity = wanted;
    return true;
}

static void keep_tenant(void *context, const struct kvk_tenant_record *record)
{
    struct opening *opening = context;
    void *list = opening->records;
    if (!grow(&list, opening->record_count, &opening->record_capacity, sizeof(*record))) {
        opening->no_memory = true;
        return;
    }
    opening->records = list;
    opening->records[opening->record_count++] = *record;
}

static void keep_credential(void *context, const struct kvk_credential_record *record)
{
    struct opening *opening = context;
    void *list = opening->credentials;
    if (!grow(&list, opening->credential_count, &opening->credential_capacity, sizeof(*record))) {
        opening->no_memory = true;
        return;
    }
    opening->credentials = list;
    opening->credentials[opening->credential_count++] = *record;
}

/* A deletion that a crash has interrupted. What lay in memory is gone with the process, and no
 * record of the tenant is read below: its blocks are found by nobody. */
static enum kvk_status finish_deletions(struct opening *opening, struct kvk_error *error)
{
    uint32_t kept = 0;
    for (uint32_t i = 0; i < opening->record_count; i++) {
        struct kvk_tenant_record *record = &opening->records[i];
        if (!record->forgetting) {
            opening->records[kept++] = *record;
            continue;
        }
        kvk_log(KVK_LOG_INFO, "tenant_deletion_finished", "tenant_id=%llu",
                (unsigned long long)record->id);
        enum kvk_status status =
            kvk_catalogue_remove_tenant(opening->tenants->catalogue, record->id, error);
        if (status != KVK_OK && status != KVK_NOT_FOUND) {
            return status;
        }
    }
    opening->record_count = kept;
    return KVK_OK;
}

static enum kvk_status catalogue_read(struct opening *opening, struct kvk_error *error)
{
    struct kvk_catalogue *catalogue = opening->tenants->catalogue;
    if (catalogue == NULL) {
        return KVK_OK;
    }
    enum kvk_status status = kvk_catalogue_tenants(catalogue, keep_tenant, opening, error);
    if (status == KVK_OK) {
        status = kvk_catalogue_credentials(catalogue, keep_credential, opening, error);
    }
    if (status == KVK_OK && opening->no_memory) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                          "no memory for the tenants of the catalogue");
    }
    return status == KVK_OK ? finish_deletions(opening, error) : status;
}

static struct kvk_tenant_record *record_named(const struct opening *opening, const char *name)
{
    for (uint32_t i = 0; i < opening->record_count; i++) {
        if (strcmp(opening->records[i].name, name) == 0) {
            return &opening->records[i];
        }
    }
    return NULL;
}

/* ---- Tenants ---- */

/* A tenant of the file, or the one that is there without any. */
static enum kvk_status enter_configured(struct opening *opening,
                                        const struct kvk_tenant_config *config,
                                        struct kvk_error *error)
{
    struct kvk_tenants *tenants = opening->tenants;
    struct kvk_tenant_record record = {.created_s = kvk_wall_seconds()};
    const struct kvk_tenant_record *known = record_named(opening, config->name);

    if (known != NULL) {
        record = *known;
    } else {
        memcpy(record.name, config->name, sizeof(record.name));
        kvk_random_secret(record.secret, sizeof(record.secret));
    }
    struct kvk_tenant_quota quota = config->quota;
    quota.over_quota = (uint8_t)config->over_quota;
    bool changed = known == NULL || record.mode != config->mode ||
                   record.may_publish != config->may_publish ||
                   !kvk_tenant_quota_equal(&record.quota, &quota);
    record.quota = quota;
    record.mode = (uint8_t)config->mode;
    record.may_publish = config->may_publish;
    enum kvk_status status = KVK_OK;
    if (tenants->catalogue == NULL) {
        record.id = ++tenants->last_id;
    } else if (changed) {
        status = kvk_catalogue_put_tenant(tenants->catalogue, &record, error);
    }
    struct kvk_tenant_entry *entry = NULL;
    if (status == KVK_OK) {
        KVK_ASSERT(record.id != 0);
        status = kvk_tenants_enter(tenants, &record, true, &entry, error);
    }
    kvk_secret_wipe(record.secret, sizeof(record.secret));
    return status;
}

static enum kvk_status enter_tenants(struct opening *opening, struct kvk_error *error)
{
    const struct kvk_config *config = opening->config;
    enum kvk_status status = KVK_OK;
    for (uint32_t i = 0; i < config->tenant_count && status == KVK_OK; i++) {
        status = enter_configured(opening, &config->tenants[i], error);
    }
    if (config->tenant_count == 0 && config->credential_count == 0) {
        const struct kvk_tenant_config fallback = {.name = "default"};
        status = enter_configured(opening, &fallback, error);
    }
    for (uint32_t i = 0; i < opening->record_count && status == KVK_OK; i++) {
        const struct kvk_tenant_record *record = &opening->records[i];
        struct kvk_tenant_entry *entry = NULL;
        if (kvk_tenants_entry(opening->tenants, record->name) == NULL) {
            status = kvk_tenants_enter(opening->tenants, record, false, &entry, error);
        }
    }
    return status;
}

/* ---- Credentials ---- */

static enum kvk_status add_credential(struct opening *opening,
                                      const struct kvk_credential_record *record, bool configured,
                                      struct kvk_credential_entry **entry, struct kvk_error *error)
{
    struct kvk_tenants *tenants = opening->tenants;
    uint32_t count = atomic_load(&tenants->credential_count);
    if (count == KVK_CREDENTIAL_COUNT_MAX) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "credential", count, count,
                              "there are more than %d credentials", KVK_CREDENTIAL_COUNT_MAX);
    }
    enum kvk_status status = kvk_credential_make(tenants, record, configured, entry, error);
    if (status == KVK_OK) {
        tenants->credentials[count] = *entry;
        atomic_store(&tenants->credential_count, count + 1);
    }
    return status;
}

/* No table: the daemon's own user, and nobody over TCP unless the file says so. */
static enum kvk_status add_fallback(struct opening *opening, struct kvk_error *error)
{
    struct kvk_tenant_entry *tenant = kvk_tenants_entry(opening->tenants, "default");
    struct kvk_credential_entry *entry = NULL;
    KVK_ASSERT(tenant != NULL);
    struct kvk_credential_record record = {.name = "default",
                                           .tenant_ids = {tenant->tenant.id},
                                           .tenant_count = 1,
                                           .admin = true,
                                           .uids = {(uint32_t)geteuid()},
                                           .uid_count = 1};
    enum kvk_status status = add_credential(opening, &record, true, &entry, error);
    if (status == KVK_OK && opening->config->tcp_insecure) {
        record = (struct kvk_credential_record){
            .name = "anonymous", .tenant_ids = {tenant->tenant.id}, .tenant_count = 1};
        status = add_credential(opening, &record, true, &entry, error);
        if (status == KVK_OK && entry != NULL) {
            entry->anonymous = true;
        }
    }
    return status;
}

static enum kvk_status add_configured(struct opening *opening,
                                      const struct kvk_credential_config *config,
                                      struct kvk_error *error)
{
    struct kvk_credential_record record = {.admin = config->admin, .uid_count = config->uid_count};
    struct kvk_credential_entry *entry = NULL;

    _Static_assert(sizeof(record.uids) == sizeof(config->uids), "as many uids");
    _Static_assert(KVK_CREDENTIAL_TENANTS_MAX ==
                       sizeof(config->tenants) / sizeof(config->tenants[0]),
                   "as many tenants");
    memcpy(record.name, config->name, sizeof(record.name));
    memcpy(record.uids, config->uids, sizeof(record.uids));
    memcpy(record.certificate_subject, config->certificate, sizeof(record.certificate_subject));
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        const char *name = opening->config->tenants[config->tenants[i]].name;
        const struct kvk_tenant_entry *tenant = kvk_tenants_entry(opening->tenants, name);
        KVK_ASSERT(tenant != NULL);
        record.tenant_ids[record.tenant_count++] = tenant->tenant.id;
    }
    size_t token_size = strlen(config->token);
    if (token_size > 0) {
        record.token_count = 1;
        if (!kvk_token_digest((const uint8_t *)config->token, token_size,
                              record.tokens[0].digest)) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a digest");
        }
    }
    return add_credential(opening, &record, true, &entry, error);
}

/* Would both be recognised by the same thing? */
static bool collide(const struct kvk_credential_record *a, const struct kvk_credential_record *b)
{
    if (strcmp(a->name, b->name) == 0 ||
        (a->certificate_subject[0] != '\0' &&
         strcmp(a->certificate_subject, b->certificate_subject) == 0)) {
        return true;
    }
    for (uint32_t i = 0; i < a->uid_count; i++) {
        for (uint32_t j = 0; j < b->uid_count; j++) {
            if (a->uids[i] == b->uids[j]) {
                return true;
            }
        }
    }
    return false;
}

static enum kvk_status add_stored(struct opening *opening,
                                  const struct kvk_credential_record *record,
                                  struct kvk_error *error)
{
    struct kvk_tenants *tenants = opening->tenants;
    struct kvk_credential_entry *entry = NULL;
    uint32_t count = atomic_load(&tenants->credential_count);
    for (uint32_t i = 0; i < count; i++) {
        if (collide(&tenants->credentials[i]->record, record)) {
            kvk_log(KVK_LOG_WARNING, "credential_not_used",
                    "name=\"%s\" text=\"one of the file has its name, uid or certificate\"",
                    record->name);
            return KVK_OK;
        }
    }
    return add_credential(opening, record, false, &entry, error);
}

static enum kvk_status add_credentials(struct opening *opening, struct kvk_error *error)
{
    const struct kvk_config *config = opening->config;
    enum kvk_status status = KVK_OK;
    if (config->tenant_count == 0 && config->credential_count == 0) {
        status = add_fallback(opening, error);
    }
    for (uint32_t i = 0; i < config->credential_count && status == KVK_OK; i++) {
        status = add_configured(opening, &config->credentials[i], error);
    }
    for (uint32_t i = 0; i < opening->credential_count && status == KVK_OK; i++) {
        status = add_stored(opening, &opening->credentials[i], error);
    }
    return status;
}

/* ---- All of it ---- */

static enum kvk_status fill(struct opening *opening, struct kvk_error *error)
{
    struct kvk_tenants *tenants = opening->tenants;
    enum kvk_status status = catalogue_read(opening, error);
    if (status == KVK_OK) {
        status = enter_tenants(opening, error);
    }
    if (status == KVK_OK) {
        status = add_credentials(opening, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_auth_snapshot *snapshot =
        kvk_auth_snapshot_make(tenants->credentials, atomic_load(&tenants->credential_count));
    if (snapshot == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for the table of credentials");
    }
    kvk_auth_snapshot_install(tenants, snapshot);
    return KVK_OK;
}

enum kvk_status kvk_tenants_open(const struct kvk_tenants_options *options,
                                 struct kvk_tenants **tenants, struct kvk_error *error)
{
    enum kvk_status status = kvk_config_check(options->config, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_tenants *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for the table of tenants");
    }
    made->config = options->config;
    made->catalogue = options->catalogue;
    made->clock = options->clock != NULL ? options->clock : kvk_clock_monotonic();
    kvk_lock_init(&made->lock);
    kvk_condition_init(&made->changed);
    int result = pthread_rwlock_init(&made->snapshot_lock, NULL);
    KVK_ASSERT(result == 0);

    struct opening opening = {.tenants = made, .config = options->config};
    status = fill(&opening, error);
    if (opening.records != NULL) {
        kvk_secret_wipe(opening.records, opening.record_count * sizeof(opening.records[0]));
    }
    free(opening.records);
    free(opening.credentials);
    if (status != KVK_OK) {
        kvk_tenants_destroy(made);
        return status;
    }
    *tenants = made;
    return KVK_OK;
}
