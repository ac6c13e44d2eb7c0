/*
 * kvkeepctl tenant create|list|change|delete: who is there, what they may use, and how to be rid of
 * them.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define ADMIN(name) "/kvkeep.v1.Admin/" name

static const char usage[] =
    "  tenant create NAME [QUOTA…]    make one\n"
    "  tenant list                    all, with quota and mode\n"
    "  tenant change NAME [QUOTA…]    what is not named stays\n"
    "  tenant delete NAME             end its instances, forget all of its data\n"
    "\n"
    "QUOTA:\n"
    "  --device SIZE, --host SIZE, --disk SIZE       never passed; 0: no limit\n"
    "  --device-share SIZE, --host-share SIZE, --disk-share SIZE\n"
    "                                 guaranteed: nobody else takes these\n"
    "  --sequences N, --leases N      open at a time; 0: no limit\n"
    "  --rate N, --burst N            calls per second, and at once; 0: no limit\n"
    "  --over-quota evict|refuse      its own idle blocks go, or the write is refused\n"
    "  --metadata SIZE                kept for it besides bytes of blocks; whole MiB; 0: the "
    "daemon's\n"
    "                                 limits.tenant_metadata_bytes\n"
    "  --idle SECONDS                 after so long unused its blocks go; 0: never\n"
    "  --mode on|shadow|off           shadow: look-ups miss, nothing is shared; off: all refused\n"
    "  --may-publish yes|no           prefixes into the public scope\n"
    "SIZE is a number with B, KiB, MiB, GiB or TiB; only 0 needs none.\n";

static int wrong(const char *complaint)
{
    const struct ctl_command command = {.name = "tenant", .usage = usage};
    return ctl_usage(&command, complaint);
}

static ProtobufCBinaryData text(const char *value)
{
    ProtobufCBinaryData data = {.data = (uint8_t *)(uintptr_t)value, .len = strlen(value)};
    return data;
}

/* ---- What is asked for ---- */

static bool parse_size(const char *value, uint64_t *bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    char *end = NULL;
    if (value[0] < '0' || value[0] > '9') {
        return false;
    }
    unsigned long long number = strtoull(value, &end, 10);
    end += strspn(end, " ");
    if (*end == '\0') { /* 64 of what? A limit of 64 bytes would refuse everything */
        *bytes = 0;
        return number == 0;
    }
    uint64_t unit = 1;
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (strcmp(end, units[i]) == 0) {
            return kvk_multiply_fits(number, unit, bytes);
        }
        unit *= 1024;
    }
    return false;
}

/* Which of the words; -1: none. */
static int parse_word(const char *value, const char *const *words)
{
    for (int i = 0; words[i] != NULL; i++) {
        if (strcmp(words[i], value) == 0) {
            return i;
        }
    }
    return -1;
}

enum {
    SIZES = 256, /* indices of quota fields follow */
    COUNTS = 512,
    OVER_QUOTA = 1024,
    IDLE,
    MODE,
    MAY_PUBLISH,
};

struct wanted {
    Kvkeep__V1__TenantQuota quota;
    bool quota_given;
    Kvkeep__V1__Mode mode;
    bool may_publish_given;
    bool may_publish;
};

static uint64_t *size_of(Kvkeep__V1__TenantQuota *quota, int which)
{
    uint64_t *const sizes[] = {&quota->device_limit_bytes,    &quota->host_limit_bytes,
                               &quota->disk_limit_bytes,      &quota->device_guaranteed_bytes,
                               &quota->host_guaranteed_bytes, &quota->disk_guaranteed_bytes,
                               &quota->metadata_limit_bytes};
    return sizes[which];
}

static uint64_t *count_of(Kvkeep__V1__TenantQuota *quota, int which)
{
    uint64_t *const counts[] = {&quota->sequences, &quota->leases, &quota->requests_per_second,
                                &quota->request_burst};
    return counts[which];
}

/* NULL: taken; else what it must be. */
static const char *option_take(struct wanted *wanted, int option, const char *value)
{
    static const char *const policies[] = {"evict", "refuse", NULL};
    static const char *const modes[] = {"on", "shadow", "off", NULL};
    static const char *const answers[] = {"no", "yes", NULL};
    int word = -1;
    uint64_t seconds = 0;
    switch (option) {
    case OVER_QUOTA:
        word = parse_word(value, policies);
        wanted->quota.refuse_over_quota = word == 1;
        wanted->quota_given = true;
        return word >= 0 ? NULL : "evict or refuse";
    case IDLE:
        wanted->quota_given = true;
        return ctl_parse_count(value, &seconds) &&
                       kvk_multiply_fits(seconds, 1000, &wanted->quota.idle_ms)
                   ? NULL
                   : "a number of seconds, without a unit";
    case MODE:
        word = parse_word(value, modes);
        wanted->mode = (Kvkeep__V1__Mode)(word + 1);
        return word >= 0 ? NULL : "on, shadow or off";
    case MAY_PUBLISH:
        word = parse_word(value, answers);
        wanted->may_publish_given = true;
        wanted->may_publish = word == 1;
        return word >= 0 ? NULL : "yes or no";
    default:
        break;
    }
    wanted->quota_given = true;
    if (option >= COUNTS) {
        return ctl_parse_count(value, count_of(&wanted->quota, option - COUNTS))
                   ? NULL
                   : "a whole number (k and M may follow)";
    }
    return parse_size(value, size_of(&wanted->quota, option - SIZES))
               ? NULL
               : "a size: a number with B, KiB, MiB, GiB or TiB, or 0";
}

/* argv[0] is the tenant's name; options follow. CTL_OK, or what was wrong was told. */
static int options_take(struct wanted *wanted, int argc, char **argv)
{
    static const struct option names[] = {{"device", required_argument, NULL, SIZES},
                                          {"host", required_argument, NULL, SIZES + 1},
                                          {"disk", required_argument, NULL, SIZES + 2},
                                          {"device-share", required_argument, NULL, SIZES + 3},
                                          {"host-share", required_argument, NULL, SIZES + 4},
                                          {"disk-share", required_argument, NULL, SIZES + 5},
                                          {"metadata", required_argument, NULL, SIZES + 6},
                                          {"sequences", required_argument, NULL, COUNTS},
                                          {"leases", required_argument, NULL, COUNTS + 1},
                                          {"rate", required_argument, NULL, COUNTS + 2},
                                          {"burst", required_argument, NULL, COUNTS + 3},
                                          {"over-quota", required_argument, NULL, OVER_QUOTA},
                                          {"idle", required_argument, NULL, IDLE},
                                          {"mode", required_argument, NULL, MODE},
                                          {"may-publish", required_argument, NULL, MAY_PUBLISH},
                                          {NULL, 0, NULL, 0}};
    static char program[] = "kvkeepctl tenant"; /* as getopt_long() names it in its complaints */
    char *name = argv[0];
    int code = CTL_OK;
    int option = 0;
    int at = 0;
    optind = 1;
    argv[0] = program;
    while (code == CTL_OK && (option = getopt_long(argc, argv, "", names, &at)) != -1) {
        if (option == '?') {
            (void)fputs("usage: kvkeepctl tenant --help\n", stderr);
            code = CTL_USAGE;
            break;
        }
        const char *meant = option_take(wanted, option, optarg);
        code = meant == NULL ? CTL_OK : ctl_option_wrong("tenant", names[at].name, optarg, meant);
    }
    argv[0] = name;
    if (code == CTL_OK && optind < argc) {
        return wrong("one name; one that has blanks goes in quotes, and so does a size that has");
    }
    return code;
}

/* ---- list ---- */

static Kvkeep__V1__ListTenantsResponse *tenants_ask(const struct ctl_options *options, int *code)
{
    Kvkeep__V1__ListTenantsRequest request = KVKEEP__V1__LIST_TENANTS_REQUEST__INIT;
    return ctl_admin_call(options, ADMIN("ListTenants"), &request.base,
                          &kvkeep__v1__list_tenants_response__descriptor, code);
}

const char *ctl_mode_name(int mode)
{
    return mode == KVKEEP__V1__MODE__MODE_OFF      ? "off"
           : mode == KVKEEP__V1__MODE__MODE_SHADOW ? "shadow"
                                                   : "on";
}

static json_t *tenant_json(const Kvkeep__V1__TenantRow *row)
{
    const Kvkeep__V1__TenantQuota *quota = row->quota;
    json_t *limits = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I}",
        "device_guaranteed_bytes", (json_int_t)quota->device_guaranteed_bytes, "device_limit_bytes",
        (json_int_t)quota->device_limit_bytes, "host_guaranteed_bytes",
        (json_int_t)quota->host_guaranteed_bytes, "host_limit_bytes",
        (json_int_t)quota->host_limit_bytes, "disk_guaranteed_bytes",
        (json_int_t)quota->disk_guaranteed_bytes, "disk_limit_bytes",
        (json_int_t)quota->disk_limit_bytes, "sequences", (json_int_t)quota->sequences, "leases",
        (json_int_t)quota->leases, "requests_per_second", (json_int_t)quota->requests_per_second,
        "request_burst", (json_int_t)quota->request_burst, "over_quota",
        quota->refuse_over_quota ? "refuse" : "evict", "idle_ms", (json_int_t)quota->idle_ms,
        "metadata_limit_bytes", (json_int_t)quota->metadata_limit_bytes);
    return json_pack("{s:o, s:I, s:b, s:b, s:I, s:s, s:b, s:o}", "name", ctl_json_text(row->name),
                     "tenant_id", (json_int_t)row->tenant_id, "configured", row->configured,
                     "deleting", row->deleting, "created_s", (json_int_t)row->created_s, "mode",
                     ctl_mode_name(row->mode), "may_publish", row->may_publish, "quota", limits);
}

/* "2 GiB of 8 GiB": guaranteed, limit; "-" where neither is set. */
static void share_text(char *out, size_t out_size, uint64_t guaranteed, uint64_t limit)
{
    if (guaranteed == 0 && limit == 0) {
        (void)snprintf(out, out_size, "-");
    } else if (guaranteed == 0) {
        (void)snprintf(out, out_size, "to %s", ctl_bytes(limit));
    } else if (limit == 0) {
        (void)snprintf(out, out_size, "%s on", ctl_bytes(guaranteed));
    } else {
        (void)snprintf(out, out_size, "%s to %s", ctl_bytes(guaranteed), ctl_bytes(limit));
    }
}

static const char *count_text(uint64_t count)
{
    return count == 0 ? "-" : ctl_count(count);
}

static int tenant_list(const struct ctl_options *options, int argc)
{
    int code = CTL_OK;
    if (argc != 1) {
        return wrong("no more arguments");
    }
    Kvkeep__V1__ListTenantsResponse *answer = tenants_ask(options, &code);
    if (answer == NULL) {
        return code;
    }
    static const char *const titles[] = {"-tenant", "id",          "-mode",     "device",
                                         "host",    "disk",        "sequences", "leases",
                                         "rate",    "-over quota", "-kept in"};
    struct ctl_table table;
    ctl_table_init(&table, 11, titles);
    json_t *list = json_array();
    for (size_t i = 0; i < answer->n_tenants; i++) {
        const Kvkeep__V1__TenantRow *row = answer->tenants[i];
        const Kvkeep__V1__TenantQuota *quota = row->quota;
        if (quota == NULL) {
            continue;
        }
        char shares[3][64];
        share_text(shares[0], sizeof shares[0], quota->device_guaranteed_bytes,
                   quota->device_limit_bytes);
        share_text(shares[1], sizeof shares[1], quota->host_guaranteed_bytes,
                   quota->host_limit_bytes);
        share_text(shares[2], sizeof shares[2], quota->disk_guaranteed_bytes,
                   quota->disk_limit_bytes);
        ctl_table_row(&table, "%s\t%llu\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", ctl_text(row->name),
                      (unsigned long long)row->tenant_id,
                      row->deleting ? "being deleted" : ctl_mode_name(row->mode), shares[0],
                      shares[1], shares[2], count_text(quota->sequences), count_text(quota->leases),
                      count_text(quota->requests_per_second),
                      quota->refuse_over_quota ? "refuse" : "evict",
                      row->configured ? "file" : "catalogue");
        json_array_append_new(list, tenant_json(row));
    }
    ctl_list_print(options, &table, list, false);
    kvkeep__v1__list_tenants_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

/* ---- create, change, delete ---- */

static int tenant_create(const struct ctl_options *options, int argc, char **argv)
{
    struct wanted wanted = {.mode = KVKEEP__V1__MODE__MODE_UNSPECIFIED};
    kvkeep__v1__tenant_quota__init(&wanted.quota);
    if (argc < 2 || argv[1][0] == '-') {
        return wrong("a name and quotas");
    }
    int code = options_take(&wanted, argc - 1, argv + 1);
    if (code != CTL_OK) {
        return code;
    }
    Kvkeep__V1__CreateTenantRequest request = KVKEEP__V1__CREATE_TENANT_REQUEST__INIT;
    request.name = text(argv[1]);
    request.quota = wanted.quota_given ? &wanted.quota : NULL;
    request.mode = wanted.mode;
    request.may_publish = wanted.may_publish;
    Kvkeep__V1__CreateTenantResponse *answer =
        ctl_admin_call(options, ADMIN("CreateTenant"), &request.base,
                       &kvkeep__v1__create_tenant_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(json_pack("{s:o, s:I, s:b}", "name", ctl_json_text(answer->name),
                                 "tenant_id", (json_int_t)answer->tenant_id, "created",
                                 answer->created));
    } else {
        (void)printf("%s %s, id %llu\n", ctl_text(answer->name),
                     answer->created ? "created" : "was there",
                     (unsigned long long)answer->tenant_id);
    }
    kvkeep__v1__create_tenant_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

/* The quota as it is now, over which the options go. Not found is a failure: the daemon might know
 * the name all the same (it normalises what it is told), and would then lose what was not named. */
static int quota_ask(const struct ctl_options *options, const char *name,
                     Kvkeep__V1__TenantQuota *quota)
{
    int code = CTL_OK;
    Kvkeep__V1__ListTenantsResponse *answer = tenants_ask(options, &code);
    if (answer == NULL) {
        return code;
    }
    code = CTL_FAILED;
    for (size_t i = 0; i < answer->n_tenants; i++) {
        const Kvkeep__V1__TenantRow *row = answer->tenants[i];
        if (row->quota != NULL && row->name.len == strlen(name) &&
            memcmp(row->name.data, name, row->name.len) == 0) {
            *quota = *row->quota;
            code = CTL_OK;
        }
    }
    kvkeep__v1__list_tenants_response__free_unpacked(answer, NULL);
    if (code != CTL_OK) {
        (void)fprintf(stderr,
                      "kvkeepctl tenant: no tenant is called \"%s\"; `kvkeepctl tenant list` shows "
                      "the names, byte for byte as they are meant here\n",
                      name);
    }
    return code;
}

static int tenant_change(const struct ctl_options *options, int argc, char **argv)
{
    struct wanted wanted = {.mode = KVKEEP__V1__MODE__MODE_UNSPECIFIED};
    kvkeep__v1__tenant_quota__init(&wanted.quota);
    if (argc < 3 || argv[1][0] == '-') {
        return wrong("a name and what to change");
    }
    struct wanted first = wanted;
    int code = options_take(&first, argc - 1, argv + 1); /* before anybody is asked */
    if (code == CTL_OK && first.quota_given) {
        code = quota_ask(options, argv[1], &wanted.quota);
    }
    if (code == CTL_OK) {
        code = options_take(&wanted, argc - 1, argv + 1);
    }
    if (code != CTL_OK) {
        return code;
    }
    Kvkeep__V1__ChangeTenantRequest request = KVKEEP__V1__CHANGE_TENANT_REQUEST__INIT;
    request.name = text(argv[1]);
    request.quota = wanted.quota_given ? &wanted.quota : NULL;
    request.mode = wanted.mode;
    request.set_may_publish = wanted.may_publish_given;
    request.may_publish = wanted.may_publish;
    Kvkeep__V1__ChangeTenantResponse *answer =
        ctl_admin_call(options, ADMIN("ChangeTenant"), &request.base,
                       &kvkeep__v1__change_tenant_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    if (options->json) {
        json_t *warnings = json_array();
        for (size_t i = 0; i < answer->n_warnings; i++) {
            (void)json_array_append_new(warnings, json_string(answer->warnings[i]));
        }
        ctl_json_print(json_pack("{s:s, s:o}", "changed", argv[1], "warnings", warnings));
    } else {
        (void)printf("%s changed\n", argv[1]);
    }
    for (size_t i = 0; i < answer->n_warnings && !options->json; i++) {
        (void)fprintf(stderr, "kvkeepctl: warning: %s\n", answer->warnings[i]);
    }
    kvkeep__v1__change_tenant_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

static int tenant_delete(const struct ctl_options *options, int argc, char **argv)
{
    Kvkeep__V1__DeleteTenantRequest request = KVKEEP__V1__DELETE_TENANT_REQUEST__INIT;
    if (argc != 2) {
        return wrong("one name");
    }
    request.name = text(argv[1]);
    int code = CTL_OK;
    Kvkeep__V1__DeleteTenantResponse *answer =
        ctl_admin_call(options, ADMIN("DeleteTenant"), &request.base,
                       &kvkeep__v1__delete_tenant_response__descriptor, &code);
    if (answer == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(json_pack(
            "{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "deleted", argv[1],
            "credentials", (json_int_t)answer->credentials, "instances",
            (json_int_t)answer->instances, "sequences", (json_int_t)answer->sequences, "leases",
            (json_int_t)answer->leases, "spaces", (json_int_t)answer->spaces, "device_blocks",
            (json_int_t)answer->device_blocks, "host_blocks", (json_int_t)answer->host_blocks,
            "disk_blocks", (json_int_t)answer->disk_blocks, "device_bytes",
            (json_int_t)answer->device_bytes, "host_bytes", (json_int_t)answer->host_bytes,
            "disk_bytes", (json_int_t)answer->disk_bytes));
    } else {
        (void)printf("%s deleted: %s credentials, %s instances, %s spaces; forgotten %s on the "
                     "device, %s on the host, %s on disk\n",
                     argv[1], ctl_count(answer->credentials), ctl_count(answer->instances),
                     ctl_count(answer->spaces), ctl_bytes(answer->device_bytes),
                     ctl_bytes(answer->host_bytes), ctl_bytes(answer->disk_bytes));
    }
    kvkeep__v1__delete_tenant_response__free_unpacked(answer, NULL);
    return CTL_OK;
}

int ctl_tenant(const struct ctl_options *options, int argc, char **argv)
{
    if (argc < 2) {
        return wrong("create, list, change or delete");
    }
    if (strcmp(argv[1], "create") == 0) {
        return tenant_create(options, argc - 1, argv + 1);
    }
    if (strcmp(argv[1], "list") == 0) {
        return tenant_list(options, argc - 1);
    }
    if (strcmp(argv[1], "change") == 0) {
        return tenant_change(options, argc - 1, argv + 1);
    }
    if (strcmp(argv[1], "delete") == 0) {
        return tenant_delete(options, argc - 1, argv + 1);
    }
    return wrong("create, list, change or delete");
}
