#include "daemon/tenant.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/log.h"
#include "base/random.h"
#include "base/unicode.h"
#include "daemon/tenant_internal.h"

_Static_assert(KVK_NAME_SIZE == KVK_CATALOGUE_NAME_SIZE, "names are stored as they are");
_Static_assert(sizeof(((struct kvk_tenant_record *)0)->secret) == KVK_SECRET_SIZE, "likewise");

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the table of tenants");
}

uint64_t kvk_wall_seconds(void)
{
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    KVK_ASSERT(result == 0);
    return now.tv_sec > 0 ? (uint64_t)now.tv_sec : 0;
}

/* ---- What may change ---- */

enum kvk_tenant_mode kvk_tenant_mode(const struct kvk_tenant *tenant)
{
    return (enum kvk_tenant_mode)atomic_load_explicit(&tenant->mode, memory_order_relaxed);
}

bool kvk_tenant_may_publish(const struct kvk_tenant *tenant)
{
    return atomic_load_explicit(&tenant->may_publish, memory_order_relaxed);
}

bool kvk_tenant_is_leaving(const struct kvk_tenant *tenant)
{
    return atomic_load_explicit(&tenant->leaving, memory_order_acquire);
}

uint32_t kvk_tenant_quota_version(const struct kvk_tenant *tenant)
{
    return atomic_load_explicit(&tenant->quota_version, memory_order_acquire);
}

void kvk_tenant_quota(const struct kvk_tenant *tenant, struct kvk_tenant_quota *quota)
{
    uint64_t words[KVK_TENANT_QUOTA_WORDS];
    uint32_t before;
    uint32_t after;
    do {
        before = atomic_load(&tenant->quota_version);
        for (size_t i = 0; i < KVK_TENANT_QUOTA_WORDS; i++) {
            words[i] = atomic_load(&tenant->quota[i]);
        }
        after = atomic_load(&tenant->quota_version);
    } while (before != after || before % 2 != 0);
    memcpy(quota, words, sizeof(*quota));
}

bool kvk_tenant_quota_equal(const struct kvk_tenant_quota *a, const struct kvk_tenant_quota *b)
{
    for (int i = 0; i < KVK_CATALOGUE_TIERS; i++) {
        if (a->guaranteed_bytes[i] != b->guaranteed_bytes[i] ||
            a->limit_bytes[i] != b->limit_bytes[i]) {
            return false;
        }
    }
    return a->sequences == b->sequences && a->leases == b->leases &&
           a->requests_per_second == b->requests_per_second &&
           a->request_burst == b->request_burst && a->over_quota == b->over_quota &&
           a->idle_ms == b->idle_ms && a->metadata_limit_bytes == b->metadata_limit_bytes;
}

enum kvk_status kvk_tenant_check(const struct kvk_tenant *tenant, struct kvk_error *error)
{
    if (kvk_tenant_is_leaving(tenant)) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_SWITCHED_OFF, "tenant",
                        "the tenant is being deleted");
    }
    if (kvk_tenant_mode(tenant) == KVK_TENANT_OFF) {
        return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_SWITCHED_OFF, "tenant",
                        "the tenant is switched off");
    }
    return KVK_OK;
}

void kvk_tenant_publish(struct kvk_tenant_entry *entry)
{
    struct kvk_tenant *tenant = &entry->tenant;
    uint64_t words[KVK_TENANT_QUOTA_WORDS];
    memcpy(words, &entry->record.quota, sizeof(words));
    atomic_fetch_add(&tenant->quota_version, 1);
    for (size_t i = 0; i < KVK_TENANT_QUOTA_WORDS; i++) {
        atomic_store(&tenant->quota[i], words[i]);
    }
    atomic_fetch_add(&tenant->quota_version, 1);
    atomic_store_explicit(&tenant->mode, entry->record.mode, memory_order_relaxed);
    atomic_store_explicit(&tenant->may_publish, entry->record.may_publish, memory_order_relaxed);
    atomic_store_explicit(&tenant->leaving, entry->record.forgetting, memory_order_release);
}

/* ---- One change at a time ---- */

void kvk_tenants_change_begin(struct kvk_tenants *tenants)
{
    kvk_lock(&tenants->lock);
    while (tenants->changing) {
        (void)kvk_condition_wait(&tenants->changed, &tenants->lock, UINT64_MAX);
    }
    tenants->changing = true;
    kvk_unlock(&tenants->lock);
}

void kvk_tenants_change_end(struct kvk_tenants *tenants)
{
    kvk_lock(&tenants->lock);
    KVK_ASSERT(tenants->changing);
    tenants->changing = false;
    (void)pthread_cond_signal(&tenants->changed);
    kvk_unlock(&tenants->lock);
}

static enum kvk_status life_take(struct kvk_tenants *tenants, struct kvk_error *error)
{
    if (tenants->lives >= KVK_TENANT_LIVES_MAX) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", tenants->lives,
                              KVK_TENANT_LIVES_MAX,
                              "%d tenants and credentials were made since the daemon started: "
                              "restart it to make more",
                              KVK_TENANT_LIVES_MAX);
    }
    tenants->lives++;
    return KVK_OK;
}

/* ---- Tenants ---- */

static void tenant_init(struct kvk_tenant_entry *entry, const struct kvk_tenant_record *record,
                        uint32_t index, bool configured)
{
    struct kvk_tenant *tenant = &entry->tenant;
    entry->record = *record;
    memcpy(tenant->name, record->name, sizeof(tenant->name));
    tenant->id = record->id;
    tenant->index = index;
    tenant->configured = configured;
    tenant->created_s = record->created_s;
    kvk_hasher_init(&tenant->hasher, record->secret);
    tenant->hasher_constant = tenant->hasher;
    tenant->hasher_constant.constant = true;
    kvk_tenant_publish(entry);
}

/* The place that was free for longest would be best; the first will do, for all of a tenant is gone
 * before its place is free. */
static uint32_t free_index(const struct kvk_tenants *tenants)
{
    for (uint32_t i = 0; i < KVK_TENANT_COUNT_MAX; i++) {
        if (atomic_load(&tenants->by_index[i]) == NULL) {
            return i;
        }
    }
    return UINT32_MAX;
}

enum kvk_status kvk_tenants_enter(struct kvk_tenants *tenants,
                                  const struct kvk_tenant_record *record, bool configured,
                                  struct kvk_tenant_entry **entry, struct kvk_error *error)
{
    uint32_t index = free_index(tenants);
    if (index == UINT32_MAX) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "name", KVK_TENANT_COUNT_MAX,
                              KVK_TENANT_COUNT_MAX, "there are %d tenants, and no more can be",
                              KVK_TENANT_COUNT_MAX);
    }
    enum kvk_status status = life_take(tenants, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_tenant_entry *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return no_memory(error);
    }
    tenant_init(made, record, index, configured);
    made->next = tenants->tenant_lives;
    tenants->tenant_lives = made;
    atomic_store(&tenants->by_index[index], made);
    atomic_fetch_add(&tenants->tenant_count, 1);
    if (index >= atomic_load(&tenants->tenant_end)) {
        atomic_store(&tenants->tenant_end, index + 1);
    }
    *entry = made;
    return KVK_OK;
}

void kvk_tenants_leave(struct kvk_tenants *tenants, struct kvk_tenant_entry *entry)
{
    uint32_t index = entry->tenant.index;
    KVK_ASSERT(atomic_load(&tenants->by_index[index]) == entry);
    atomic_store(&entry->tenant.leaving, true);
    kvk_secret_wipe(entry->record.secret, sizeof(entry->record.secret));
    atomic_store(&tenants->by_index[index], NULL);
    atomic_fetch_sub(&tenants->tenant_count, 1);
}

struct kvk_tenant_entry *kvk_tenants_entry(const struct kvk_tenants *tenants, const char *name)
{
    for (uint32_t i = 0; i < kvk_tenants_count(tenants); i++) {
        struct kvk_tenant_entry *entry = atomic_load(&tenants->by_index[i]);
        if (entry != NULL && strcmp(entry->tenant.name, name) == 0) {
            return entry;
        }
    }
    return NULL;
}

uint32_t kvk_tenants_count(const struct kvk_tenants *tenants)
{
    return atomic_load(&tenants->tenant_end);
}

const struct kvk_tenant *kvk_tenants_get(const struct kvk_tenants *tenants, uint32_t index)
{
    KVK_ASSERT(index < KVK_TENANT_COUNT_MAX);
    const struct kvk_tenant_entry *entry = atomic_load(&tenants->by_index[index]);
    return entry == NULL ? NULL : &entry->tenant;
}

const struct kvk_tenant *kvk_tenants_find(const struct kvk_tenants *tenants, uint64_t id)
{
    for (uint32_t i = 0; i < kvk_tenants_count(tenants); i++) {
        const struct kvk_tenant *tenant = kvk_tenants_get(tenants, i);
        if (tenant != NULL && tenant->id == id) {
            return tenant;
        }
    }
    return NULL;
}

const struct kvk_tenant *kvk_tenants_find_name(const struct kvk_tenants *tenants, const void *name,
                                               size_t name_size)
{
    char normal[KVK_NAME_SIZE];
    if (kvk_name_normalise(name, name_size, "tenant", normal, sizeof(normal), NULL) != KVK_OK) {
        return NULL;
    }
    const struct kvk_tenant_entry *entry = kvk_tenants_entry(tenants, normal);
    return entry == NULL ? NULL : &entry->tenant;
}

/* ---- Credentials ---- */

static struct kvk_tenant_entry *entry_of_id(const struct kvk_tenants *tenants, uint64_t id)
{
    for (uint32_t i = 0; i < kvk_tenants_count(tenants); i++) {
        struct kvk_tenant_entry *entry = atomic_load(&tenants->by_index[i]);
        if (entry != NULL && entry->tenant.id == id) {
            return entry;
        }
    }
    return NULL;
}

/* Kept as time of day, for the daemon may be away meanwhile; counted on the clock that nobody sets
 * back. */
static uint64_t expiry_on_clock(const struct kvk_tenants *tenants, uint64_t expires_s)
{
    if (expires_s == 0) {
        return UINT64_MAX;
    }
    uint64_t wall_s = kvk_wall_seconds();
    uint64_t now_ns = kvk_clock_now(tenants->clock);
    if (expires_s <= wall_s) {
        return now_ns;
    }
    uint64_t left_s = expires_s - wall_s;
    return left_s > UINT32_MAX ? UINT64_MAX : now_ns + left_s * KVK_NS_PER_SECOND;
}

void kvk_credential_set_tokens(const struct kvk_tenants *tenants,
                               struct kvk_credential_entry *entry,
                               const struct kvk_credential_record *record)
{
    memcpy(entry->record.tokens, record->tokens, sizeof(record->tokens));
    entry->record.token_count = record->token_count;
    for (uint32_t i = 0; i < record->token_count; i++) {
        entry->expires_ns[i] = expiry_on_clock(tenants, record->tokens[i].expires_s);
    }
}

enum kvk_status kvk_credential_make(struct kvk_tenants *tenants,
                                    const struct kvk_credential_record *record, bool configured,
                                    struct kvk_credential_entry **entry, struct kvk_error *error)
{
    KVK_ASSERT(record->tenant_count <= KVK_CREDENTIAL_TENANTS_MAX);
    KVK_ASSERT(record->token_count <= KVK_CREDENTIAL_TOKENS_MAX);
    enum kvk_status status = life_take(tenants, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_credential_entry *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return no_memory(error);
    }
    made->record = *record;
    made->configured = configured;
    made->record.tenant_count = 0;
    memcpy(made->credential.name, record->name, sizeof(made->credential.name));
    made->credential.admin = record->admin;
    for (uint32_t i = 0; i < record->tenant_count; i++) {
        const struct kvk_tenant_entry *tenant = entry_of_id(tenants, record->tenant_ids[i]);
        if (tenant != NULL && !tenant->record.forgetting) {
            made->record.tenant_ids[made->record.tenant_count++] = record->tenant_ids[i];
            made->credential.tenants[made->credential.tenant_count++] = &tenant->tenant;
        }
    }
    kvk_credential_set_tokens(tenants, made, record);
    made->next = tenants->credential_lives;
    tenants->credential_lives = made;
    *entry = made;
    return KVK_OK;
}

uint32_t kvk_credential_place(const struct kvk_tenants *tenants, const char *name)
{
    uint32_t count = atomic_load(&tenants->credential_count);
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(tenants->credentials[i]->credential.name, name) == 0) {
            return i;
        }
    }
    return UINT32_MAX;
}

/* ---- For whom may it act? ---- */

enum kvk_status kvk_credential_tenant(const struct kvk_credential *credential, const uint8_t *name,
                                      size_t name_size, const struct kvk_tenant **tenant,
                                      struct kvk_error *error)
{
    char normal[KVK_NAME_SIZE];
    if (name_size == 0) {
        if (credential->tenant_count == 0) {
            return kvk_fail(error, KVK_PERMISSION, KVK_CAUSE_NONE, "tenant",
                            "the credential acts for no tenant: show the token of one that does");
        }
        *tenant = credential->tenants[0];
        return kvk_tenant_check(*tenant, error);
    }
    enum kvk_status status =
        kvk_name_normalise(name, name_size, "tenant", normal, sizeof(normal), error);
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t i = 0; i < credential->tenant_count; i++) {
        if (strcmp(credential->tenants[i]->name, normal) == 0) {
            *tenant = credential->tenants[i];
            return kvk_tenant_check(*tenant, error);
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

void kvk_tenants_stats(const struct kvk_tenants *tenants, struct kvk_tenants_stats *stats)
{
    stats->tenants = atomic_load(&tenants->tenant_count);
    stats->credentials = atomic_load(&tenants->credential_count);
    stats->changes = atomic_load(&tenants->changes);
    stats->identified = atomic_load(&tenants->identified);
    stats->identify_failures = atomic_load(&tenants->identify_failures);
}

/* ---- Life ---- */

void kvk_tenants_destroy(struct kvk_tenants *tenants)
{
    if (tenants == NULL) {
        return;
    }
    while (tenants->tenant_lives != NULL) {
        struct kvk_tenant_entry *gone = tenants->tenant_lives;
        tenants->tenant_lives = gone->next;
        kvk_secret_wipe(gone, sizeof(*gone));
        free(gone);
    }
    while (tenants->credential_lives != NULL) {
        struct kvk_credential_entry *gone = tenants->credential_lives;
        tenants->credential_lives = gone->next;
        free(gone);
    }
    kvk_auth_snapshot_free(tenants->snapshot);
    (void)pthread_rwlock_destroy(&tenants->snapshot_lock);
    (void)pthread_cond_destroy(&tenants->changed);
    kvk_lock_finish(&tenants->lock);
    free(tenants);
}

enum kvk_status kvk_tenants_create(const struct kvk_config *config, struct kvk_tenants **tenants,
                                   struct kvk_error *error)
{
    const struct kvk_tenants_options options = {.config = config};
    return kvk_tenants_open(&options, tenants, error);
}
