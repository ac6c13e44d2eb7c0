/*
 * The sections of the configuration that come once per tenant and once per credential.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/unicode.h"
#include "daemon/config_table.h"
#include "index/block.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define TENANT_AT(member) KVK_OPTION_AT(struct kvk_tenant_config, member)
#define CREDENTIAL_AT(member) KVK_OPTION_AT(struct kvk_credential_config, member)
#define BYTES_MAX (UINT64_C(64) << 40)

/* A name in the one spelling that is kept: what the reader takes for another label may be the same
 * name. */
static enum kvk_status label_read(const char *label, char name[KVK_NAME_SIZE],
                                  struct kvk_error *error)
{
    struct kvk_error inner = {.status = KVK_OK};
    if (kvk_name_normalise(label, strlen(label), "the name", name, KVK_NAME_SIZE, &inner) ==
        KVK_OK) {
        return KVK_OK;
    }
    return kvk_fail(error, inner.status, inner.cause, "", "%s", inner.text);
}

static enum kvk_status named_twice(const char *kind, const char *name, struct kvk_error *error)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "",
                    "[%s %.60s] is there twice, in two spellings of one name", kind, name);
}

static uint32_t find_tenant(const struct kvk_config *config, const char *name)
{
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        if (strcmp(config->tenants[i].name, name) == 0) {
            return i;
        }
    }
    return UINT32_MAX;
}

enum kvk_status kvk_config_open_tenant(void *target, const char *label, void **record,
                                       struct kvk_error *error)
{
    struct kvk_config *config = &((struct kvk_config_file *)target)->config;

    char name[KVK_NAME_SIZE];
    enum kvk_status status = label_read(label, name, error);
    if (status != KVK_OK) {
        return status;
    }
    if (find_tenant(config, name) != UINT32_MAX) {
        return named_twice("tenant", name, error);
    }
    if (config->tenants == NULL) {
        config->tenants = calloc(KVK_TENANT_COUNT_MAX, sizeof(config->tenants[0]));
        if (config->tenants == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory");
        }
    }
    KVK_ASSERT(config->tenant_count < KVK_TENANT_COUNT_MAX);
    struct kvk_tenant_config *tenant = &config->tenants[config->tenant_count];
    _Static_assert(sizeof(tenant->name) == KVK_OPTION_LABEL_SIZE, "a label is a name");
    memcpy(tenant->name, name, sizeof(tenant->name));
    config->tenant_count++;
    *record = tenant;
    return KVK_OK;
}

enum kvk_status kvk_config_open_credential(void *target, const char *label, void **record,
                                           struct kvk_error *error)
{
    struct kvk_config_file *file = target;

    char name[KVK_NAME_SIZE];
    enum kvk_status status = label_read(label, name, error);
    if (status != KVK_OK) {
        return status;
    }
    for (uint32_t i = 0; i < file->credential_count; i++) {
        if (strcmp(file->credentials[i].credential.name, name) == 0) {
            return named_twice("credential", name, error);
        }
    }
    if (file->credentials == NULL) {
        file->credentials = calloc(KVK_CREDENTIAL_COUNT_MAX, sizeof(file->credentials[0]));
        if (file->credentials == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory");
        }
    }
    KVK_ASSERT(file->credential_count < KVK_CREDENTIAL_COUNT_MAX);
    struct kvk_credential_section *credential = &file->credentials[file->credential_count];
    memcpy(credential->credential.name, name, sizeof(name));
    credential->file = file;
    file->credential_count++;
    *record = credential;
    return KVK_OK;
}

/* Cut the next item off a comma-separated list. False: the list is at its end. */
static bool next_item(const char **list, char *item, size_t item_size)
{
    const char *at = *list + strspn(*list, " \t");
    if (*at == '\0') {
        return false;
    }
    size_t length = strcspn(at, ",");
    *list = at[length] == ',' ? at + length + 1 : at + length;
    while (length > 0 && (at[length - 1] == ' ' || at[length - 1] == '\t')) {
        length--;
    }
    (void)snprintf(item, item_size, "%.*s", (int)length, at);
    return true;
}

static bool read_token(void *record, void *member, const char *text, char *reason,
                       size_t reason_size)
{
    size_t size = strlen(text);
    char *token = member;

    (void)record;
    if (size > 0 && (size < KVK_TOKEN_TEXT_SIZE_MIN || size >= KVK_NAME_SIZE)) {
        (void)snprintf(reason, reason_size, "must be %d to %d bytes", KVK_TOKEN_TEXT_SIZE_MIN,
                       KVK_NAME_SIZE - 1);
        return false;
    }
    /* It travels in a header. */
    for (size_t i = 0; i < size; i++) {
        if (text[i] < 0x21 || text[i] > 0x7e) {
            (void)snprintf(reason, reason_size, "must be printable ASCII without blanks");
            return false;
        }
    }
    memcpy(token, text, size + 1);
    return true;
}

static bool read_uids(void *record, void *member, const char *text, char *reason,
                      size_t reason_size)
{
    struct kvk_credential_config *credential = record;
    char item[32];

    (void)member;
    credential->uid_count = 0;
    while (next_item(&text, item, sizeof(item))) {
        size_t digits = strspn(item, "0123456789");
        unsigned long long uid = strtoull(item, NULL, 10);
        /* (uid_t)-1 means nobody in particular. */
        if (digits == 0 || digits > 10 || item[digits] != '\0' || uid >= UINT32_MAX) {
            (void)snprintf(reason, reason_size, "is not a list of uids, each 0 to %u",
                           UINT32_MAX - 1);
            return false;
        }
        if (credential->uid_count == COUNT(credential->uids)) {
            (void)snprintf(reason, reason_size, "has more than %zu uids", COUNT(credential->uids));
            return false;
        }
        credential->uids[credential->uid_count] = (uint32_t)uid;
        credential->uid_count++;
    }
    return true;
}

static bool read_tenants(void *record, void *member, const char *text, char *reason,
                         size_t reason_size)
{
    struct kvk_credential_section *credential_record = record;
    struct kvk_credential_config *credential = &credential_record->credential;
    char item[KVK_NAME_SIZE + 1];

    (void)member;
    credential->tenant_count = 0;
    while (next_item(&text, item, sizeof(item))) {
        uint32_t tenant = UINT32_MAX;
        char name[KVK_NAME_SIZE];
        if (kvk_name_normalise(item, strlen(item), "tenants", name, sizeof(name), NULL) == KVK_OK) {
            tenant = find_tenant(&credential_record->file->config, name);
        }
        if (tenant == UINT32_MAX) {
            (void)snprintf(reason, reason_size, "names a tenant without a [tenant %.40s] above",
                           item);
            return false;
        }
        for (uint32_t i = 0; i < credential->tenant_count; i++) {
            if (credential->tenants[i] == tenant) {
                (void)snprintf(reason, reason_size, "names [tenant %.40s] twice", item);
                return false;
            }
        }
        if (credential->tenant_count == COUNT(credential->tenants)) {
            (void)snprintf(reason, reason_size, "names more than %zu tenants",
                           COUNT(credential->tenants));
            return false;
        }
        credential->tenants[credential->tenant_count] = tenant;
        credential->tenant_count++;
    }
    return true;
}

const struct kvk_option_field kvk_config_credential_fields[] = {
    {.name = "token",
     .kind = KVK_OPTION_CUSTOM,
     CREDENTIAL_AT(token),
     .fallback = "",
     .read = read_token,
     .secret = true,
     .range = "16 to 255 bytes of ASCII",
     .help = "What a caller sends as authorization: Bearer TOKEN. Each credential has its own. "
             "Keep the file readable for the daemon alone."},
    {.name = "uids",
     .kind = KVK_OPTION_CUSTOM,
     CREDENTIAL_AT(uids),
     .fallback = "",
     .read = read_uids,
     .range = "up to 16 numbers, commas between",
     .help = "Users who need no token on the unix socket."},
    {.name = "certificate",
     .kind = KVK_OPTION_TEXT,
     CREDENTIAL_AT(certificate),
     .fallback = "",
     .help = "A name in a client's certificate (a subject alternative name, such as "
             "spiffe://cluster/engine-0, or the common name), in place of a token over TLS. See "
             "[tls]."},
    {.name = "tenants",
     .kind = KVK_OPTION_CUSTOM,
     CREDENTIAL_AT(tenants),
     .fallback = "",
     .read = read_tenants,
     .range = "up to 200 names, commas between",
     .help = "Tenants that it may act for; the first is meant where a request names none. Their "
             "sections come before this one."},
    {.name = "admin",
     .kind = KVK_OPTION_BOOL,
     CREDENTIAL_AT(admin),
     .fallback = "no",
     .help = "May see all tenants' figures through the Admin service, and change tenants and "
             "credentials. It acts for its own tenants only, and reads no other's data."},
};

static const char *const over_quota_words[] = {"evict", "refuse", NULL};
static const char *const mode_words[] = {"on", "shadow", "off", NULL};
_Static_assert(KVK_TENANT_ON == 0 && KVK_TENANT_SHADOW == 1 && KVK_TENANT_OFF == 2,
               "the order of the words");

#define TIER_FIELDS(tier, index)                                                                   \
    {.name = tier "_guaranteed_bytes",                                                             \
     .kind = KVK_OPTION_SIZE,                                                                      \
     TENANT_AT(quota.guaranteed_bytes[index]),                                                     \
     .fallback = "0",                                                                              \
     .maximum = BYTES_MAX,                                                                         \
     .help = "Bytes of the " tier " tier that no other tenant takes from it."},                    \
    {                                                                                              \
        .name = tier "_limit_bytes", .kind = KVK_OPTION_SIZE, TENANT_AT(quota.limit_bytes[index]), \
        .fallback = "0", .maximum = BYTES_MAX,                                                     \
        .help = "Bytes of the " tier " tier that it never passes. 0: no limit of its own."         \
    }

const struct kvk_option_field kvk_config_tenant_fields[] = {
    TIER_FIELDS("device", KVK_TIER_DEVICE),
    TIER_FIELDS("host", KVK_TIER_HOST),
    TIER_FIELDS("disk", KVK_TIER_DISK),
    {.name = "sequences",
     .kind = KVK_OPTION_COUNT,
     TENANT_AT(quota.sequences),
     .fallback = "0",
     .help = "Open sequences of the tenant. 0: no limit of its own."},
    {.name = "leases",
     .kind = KVK_OPTION_COUNT,
     TENANT_AT(quota.leases),
     .fallback = "0",
     .help = "Leases of the tenant that have not ended. 0: no limit of its own."},
    {.name = "requests_per_second",
     .kind = KVK_OPTION_COUNT,
     TENANT_AT(quota.requests_per_second),
     .fallback = "0",
     .help = "Calls for the tenant, over time. 0: no limit."},
    {.name = "request_burst",
     .kind = KVK_OPTION_COUNT,
     TENANT_AT(quota.request_burst),
     .fallback = "0",
     .help = "Calls at once beyond that rate. 0: as many as of one second."},
    {.name = "over_quota",
     .kind = KVK_OPTION_CHOICE,
     TENANT_AT(over_quota),
     .fallback = "evict",
     .choices = over_quota_words,
     .help = "At its byte limit: evict the tenant's own idle blocks, or refuse the write."},
    {.name = "idle_ms",
     .kind = KVK_OPTION_DURATION,
     TENANT_AT(quota.idle_ms),
     .fallback = "0",
     .help = "After so long unused its blocks go. 0: never for that."},
    {.name = "metadata_limit_bytes",
     .kind = KVK_OPTION_SIZE,
     TENANT_AT(quota.metadata_limit_bytes),
     .fallback = "0",
     .maximum = UINT64_C(1) << 52,
     .help =
         "What is kept for it besides the bytes of its blocks: see limits.tenant_metadata_bytes, "
         "which holds where this is 0. Whole MiB."},
    {.name = "mode",
     .kind = KVK_OPTION_CHOICE,
     TENANT_AT(mode),
     .fallback = "on",
     .choices = mode_words,
     .help = "shadow: look-ups are counted and answered as misses, and nothing is kept for others. "
             "off: every call for the tenant is refused."},
    {.name = "may_publish",
     .kind = KVK_OPTION_BOOL,
     TENANT_AT(may_publish),
     .fallback = "no",
     .help = "May put prefixes into the public scope."},
};
_Static_assert(COUNT(kvk_config_tenant_fields) == KVK_CONFIG_TENANT_FIELD_COUNT, "as declared");
_Static_assert(COUNT(kvk_config_credential_fields) == KVK_CONFIG_CREDENTIAL_FIELD_COUNT,
               "as declared");
