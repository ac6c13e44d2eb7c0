#include "daemon/config_table.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define AT(member) KVK_OPTION_AT(struct kvk_config, member)
#define CREDENTIAL_AT(member) KVK_OPTION_AT(struct kvk_credential_config, member)

#define KIB UINT64_C(1024)
#define MIB (KIB * 1024)
#define GIB (MIB * 1024)
#define TIB (GIB * 1024)
#define SECOND UINT64_C(1000)
#define HOUR (SECOND * 3600)

static const struct kvk_option_field server_fields[] = {
    {.name = "unix_path",
     .kind = KVK_OPTION_TEXT,
     AT(unix_path),
     .fallback = "",
     .maximum = KVK_PATH_SIZE - 1 - KVK_SOCKET_SUFFIX_SIZE,
     .help = "The unix socket. Empty: kvkeep.sock in $XDG_RUNTIME_DIR, else in /run/kvkeep, else "
             "in /tmp: the first of these folders that may be written. A lock file and the side "
             "socket lie beside it."},
    {.name = "unix_mode",
     .kind = KVK_OPTION_MODE,
     AT(unix_mode),
     .fallback = "0600",
     .maximum = 0777,
     .help = "Permissions of both sockets: who may connect at all. Credentials say who may act."},
    {.name = "side_path",
     .kind = KVK_OPTION_TEXT,
     AT(side_path),
     .fallback = "",
     .help = "The side socket, which passes memory to workers. Empty: unix_path with .side behind "
             "it."},
    {.name = "tcp_address",
     .kind = KVK_OPTION_TEXT,
     AT(tcp_address),
     .fallback = "",
     .help = "HOST:PORT or [HOST]:PORT to serve on as well. Empty: the unix socket only. Needs "
             "credentials with tokens, or insecure = yes."},
    {.name = "insecure",
     .kind = KVK_OPTION_BOOL,
     AT(tcp_insecure),
     .fallback = "no",
     .help = "Serve TCP without credentials: whoever reaches the port acts for the tenant default. "
             "For closed networks and trials only."},
    {.name = "message_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(message_bytes),
     .fallback = "64 MiB",
     .minimum = 64 * KIB,
     .maximum = GIB,
     .help = "The largest message that is received."},
    {.name = "connections",
     .kind = KVK_OPTION_COUNT,
     AT(connections),
     .fallback = "1024",
     .minimum = 1,
     .maximum = 1 << 20,
     .help = "Connections at a time over all sockets, and as many side connections."},
    {.name = "live_calls",
     .kind = KVK_OPTION_COUNT,
     AT(live_calls),
     .fallback = "8192",
     .minimum = 1,
     .maximum = 1 << 20,
     .help = "Calls under way at a time, streams of sessions included; more are refused at once."},
    {.name = "bulk_threads",
     .kind = KVK_OPTION_COUNT,
     AT(bulk_threads),
     .fallback = "4",
     .minimum = 1,
     .maximum = 64,
     .help = "Threads for calls that may wait: copies, attention, room to be made."},
    {.name = "spin_us",
     .kind = KVK_OPTION_COUNT,
     AT(spin_us),
     .fallback = "0",
     .maximum = 1000000,
     .help = "Microseconds that the look-up thread polls for the next call before it sleeps. Costs "
             "a processor, saves its waking up."},
    {.name = "keepalive_ms",
     .kind = KVK_OPTION_DURATION,
     AT(keepalive_ms),
     .fallback = "20 s",
     .minimum = SECOND,
     .maximum = HOUR,
     .help = "How often a silent connection is asked whether it still lives."},
    {.name = "keepalive_timeout_ms",
     .kind = KVK_OPTION_DURATION,
     AT(keepalive_timeout_ms),
     .fallback = "5 s",
     .minimum = 100,
     .maximum = HOUR,
     .help = "How long it may take to answer; then it counts as lost."},
    {.name = "drain_ms",
     .kind = KVK_OPTION_DURATION,
     AT(drain_ms),
     .fallback = "5 s",
     .maximum = HOUR,
     .help = "After SIGTERM: time that calls under way get to end by themselves."},
};

static const struct kvk_option_field tiers_fields[] = {
    {.name = "device_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(device_bytes),
     .fallback = "1 GiB",
     .maximum = 64 * TIB,
     .help = "Budget of the device tier. 0: none, sequences live in the host tier."},
    {.name = "host_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(host_bytes),
     .fallback = "4 GiB",
     .maximum = 64 * TIB,
     .help = "Budget of the host tier. 0: none, nothing can be swapped out. Not both 0."},
    {.name = "device_free_percent",
     .kind = KVK_OPTION_COUNT,
     AT(device_free_percent),
     .fallback = "5",
     .maximum = 50,
     .help = "Share of the device tier that is kept free, or clean with a copy on the host, ahead "
             "of need. 0: copy only when room is wanted."},
    {.name = "copy_threads",
     .kind = KVK_OPTION_COUNT,
     AT(copy_threads),
     .fallback = "2",
     .minimum = 1,
     .maximum = 64,
     .help = "Threads that move blocks between tiers."},
    {.name = "attend_threads",
     .kind = KVK_OPTION_COUNT,
     AT(attend_threads),
     .fallback = "0",
     .maximum = 256,
     .help = "Threads that attend on the CPU. 0: as many as processors."},
    {.name = "copy_queue",
     .kind = KVK_OPTION_COUNT,
     AT(copy_queue),
     .fallback = "1024",
     .minimum = 1,
     .maximum = 1 << 20,
     .help = "Copy jobs that may wait or run; more are refused."},
    {.name = "huge_pages",
     .kind = KVK_OPTION_BOOL,
     AT(huge_pages),
     .fallback = "yes",
     .help = "Ask the system for huge pages; where it has none, small ones do."},
};

static const char *const policies[] = {"lru", "rp-cost", NULL};
_Static_assert(KVK_EVICT_LRU == 0 && KVK_EVICT_RP_COST == 1, "the order of the words");

static const struct kvk_option_field cache_fields[] = {
    {.name = "policy",
     .kind = KVK_OPTION_CHOICE,
     AT(policy),
     .fallback = "rp-cost",
     .choices = policies,
     .help = "Which block goes first. lru: the one unused for longest, leaves first. rp-cost: the "
             "one least worth its room by how blocks were seen to come back and what it costs to "
             "compute."},
    {.name = "cost_lists",
     .kind = KVK_OPTION_BOOL,
     AT(cost_lists),
     .fallback = "no",
     .help = "rp-cost orders blocks of like cost apart, so that it finds cheap victims behind dear "
             "ones: more computing saved on the traces measured (docs/eviction.md), dearer per "
             "victim."},
    {.name = "ghost_ratio",
     .kind = KVK_OPTION_COUNT,
     AT(ghost_ratio),
     .fallback = "4",
     .maximum = 64,
     .help = "Evicted keys that rp-cost remembers, per block of capacity."},
};

static const struct kvk_option_field limits_fields[] = {
    {.name = "spaces",
     .kind = KVK_OPTION_COUNT,
     AT(spaces),
     .fallback = "1024",
     .minimum = 1,
     .maximum = 1 << 16,
     .help = "Spaces of all tenants."},
    {.name = "blocks",
     .kind = KVK_OPTION_COUNT,
     AT(blocks),
     .fallback = "16777216",
     .minimum = 16,
     .maximum = 1 << 30,
     .help = "Blocks that may be known at a time, those without bytes too. Memory for them (about "
             "160 bytes each, and their tokens) is taken as they come."},
    {.name = "roots",
     .kind = KVK_OPTION_COUNT,
     AT(roots),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Chains' roots: one per space, layer group and salt in use."},
    {.name = "sequences",
     .kind = KVK_OPTION_COUNT,
     AT(sequences),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Open sequences."},
    {.name = "leases",
     .kind = KVK_OPTION_COUNT,
     AT(leases),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Leases that have not ended."},
    {.name = "instances",
     .kind = KVK_OPTION_COUNT,
     AT(instances),
     .fallback = "1024",
     .minimum = 1,
     .maximum = 1 << 16,
     .help = "Instances at a time."},
    {.name = "sessions",
     .kind = KVK_OPTION_COUNT,
     AT(sessions),
     .fallback = "4096",
     .minimum = 1,
     .maximum = 1 << 16,
     .help = "Sessions (processes of instances) at a time, those included whose stream has ended "
             "but whose process may still write. At least as many as instances."},
    {.name = "transfers",
     .kind = KVK_OPTION_COUNT,
     AT(transfers),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Open transfer tickets."},
    {.name = "tokens",
     .kind = KVK_OPTION_COUNT,
     AT(tokens),
     .fallback = "4194304",
     .minimum = 1,
     .maximum = 1 << 28,
     .help = "Tokens of one request, and of one sequence."},
    {.name = "lease_ms",
     .kind = KVK_OPTION_DURATION,
     AT(lease_ms),
     .fallback = "10 min",
     .minimum = 1,
     .maximum = 24 * HOUR,
     .help = "The longest time that a lease may be asked for."},
    {.name = "salt_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(salt_bytes),
     .fallback = "256 B",
     .maximum = 4 * KIB,
     .help = "The longest salt."},
    {.name = "spans",
     .kind = KVK_OPTION_COUNT,
     AT(spans),
     .fallback = "4096",
     .maximum = 1 << 20,
     .help = "Content spans of one request."},
    {.name = "forks",
     .kind = KVK_OPTION_COUNT,
     AT(forks),
     .fallback = "256",
     .minimum = 1,
     .maximum = 1 << 16,
     .help = "New sequences of one Fork."},
    {.name = "scratch_bytes",
     .kind = KVK_OPTION_SIZE,
     AT(scratch_bytes),
     .fallback = "256 MiB",
     .minimum = 4 * KIB,
     .maximum = 64 * GIB,
     .help = "Memory for operands of Attend that one session may have mapped, all its mappings "
             "together. It does not count in a tier's budget."},
    {.name = "attend_queries",
     .kind = KVK_OPTION_COUNT,
     AT(attend_queries),
     .fallback = "65536",
     .minimum = 1,
     .maximum = 1 << 24,
     .help = "Query tokens of one Attend, all its items together."},
};

/* ---- [tenant NAME] and [credential NAME] ---- */

/* Lists of names are split at commas, and control characters would make them look like others. */
static enum kvk_status name_check(const char *name, struct kvk_error *error)
{
    for (const char *at = name; *at != '\0'; at++) {
        if (iscntrl((unsigned char)*at) || *at == ',') {
            return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "",
                            "a name must have neither control characters nor commas");
        }
    }
    return KVK_OK;
}

static enum kvk_status open_tenant(void *target, const char *label, void **record,
                                   struct kvk_error *error)
{
    struct kvk_config *config = &((struct kvk_config_file *)target)->config;

    enum kvk_status status = name_check(label, error);
    if (status != KVK_OK) {
        return status;
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
    memcpy(tenant->name, label, strlen(label) + 1);
    config->tenant_count++;
    *record = tenant;
    return KVK_OK;
}

static enum kvk_status open_credential(void *target, const char *label, void **record,
                                       struct kvk_error *error)
{
    struct kvk_config_file *file = target;

    enum kvk_status status = name_check(label, error);
    if (status != KVK_OK) {
        return status;
    }
    if (file->credentials == NULL) {
        file->credentials = calloc(KVK_CREDENTIAL_COUNT_MAX, sizeof(file->credentials[0]));
        if (file->credentials == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory");
        }
    }
    KVK_ASSERT(file->credential_count < KVK_CREDENTIAL_COUNT_MAX);
    struct kvk_credential_record *credential = &file->credentials[file->credential_count];
    memcpy(credential->credential.name, label, strlen(label) + 1);
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

static uint32_t find_tenant(const struct kvk_config *config, const char *name)
{
    for (uint32_t i = 0; i < config->tenant_count; i++) {
        if (strcmp(config->tenants[i].name, name) == 0) {
            return i;
        }
    }
    return UINT32_MAX;
}

static bool read_tenants(void *record, void *member, const char *text, char *reason,
                         size_t reason_size)
{
    struct kvk_credential_record *credential_record = record;
    struct kvk_credential_config *credential = &credential_record->credential;
    char item[KVK_NAME_SIZE + 1];

    (void)member;
    credential->tenant_count = 0;
    while (next_item(&text, item, sizeof(item))) {
        uint32_t tenant = find_tenant(&credential_record->file->config, item);
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

static const struct kvk_option_field credential_fields[] = {
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
    {.name = "tenants",
     .kind = KVK_OPTION_CUSTOM,
     CREDENTIAL_AT(tenants),
     .fallback = "",
     .read = read_tenants,
     .range = "up to 64 names, commas between",
     .help = "Tenants that it may act for; the first is meant where a request names none. Their "
             "sections come before this one."},
    {.name = "admin",
     .kind = KVK_OPTION_BOOL,
     CREDENTIAL_AT(admin),
     .fallback = "no",
     .help = "May see all tenants' figures through the Admin service. It acts for its own tenants "
             "only."},
};

static const struct kvk_option_section sections[] = {
    {.name = "server",
     .help = "Sockets, connections and calls.",
     .fields = server_fields,
     .field_count = COUNT(server_fields)},
    {.name = "tiers",
     .help = "Memory for blocks, and what works on it.",
     .fields = tiers_fields,
     .field_count = COUNT(tiers_fields)},
    {.name = "cache",
     .help = "What is kept.",
     .fields = cache_fields,
     .field_count = COUNT(cache_fields)},
    {.name = "limits",
     .help = "How many and how large. What is over a limit is refused with the limit's name.",
     .fields = limits_fields,
     .field_count = COUNT(limits_fields)},
    {.name = "tenant",
     .help = "A tenant: whom data belongs to. It has no fields. Without any, there is one tenant, "
             "default, for the daemon's own user on the unix socket.",
     .fields = NULL,
     .field_count = 0,
     .open = open_tenant,
     .count_max = KVK_TENANT_COUNT_MAX},
    {.name = "credential",
     .help = "What a caller shows, and whom it may act for. It needs a token or uids.",
     .fields = credential_fields,
     .field_count = COUNT(credential_fields),
     .open = open_credential,
     .count_max = KVK_CREDENTIAL_COUNT_MAX},
};

const struct kvk_option_table kvk_config_table = {.sections = sections,
                                                  .section_count = COUNT(sections)};
