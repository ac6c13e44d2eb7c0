/* kvkeepctl usage: what each tenant has used and may use, to be charged by. */
#include <getopt.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

static const char *const tier_names[] = {"?", "device", "host", "disk"};

static const char *tier_name(Kvkeep__V1__Tier tier)
{
    size_t index = (size_t)tier;
    return index < sizeof(tier_names) / sizeof(tier_names[0]) ? tier_names[index] : tier_names[0];
}

static json_t *tiers_json(const Kvkeep__V1__UsageRow *row)
{
    json_t *list = json_array();
    for (size_t i = 0; i < row->n_tiers; i++) {
        const Kvkeep__V1__TierUsage *tier = row->tiers[i];
        json_array_append_new(list, json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "tier",
                                              tier_name(tier->tier), "used_bytes",
                                              (json_int_t)tier->used_bytes, "bound_bytes",
                                              (json_int_t)tier->bound_bytes, "guaranteed_bytes",
                                              (json_int_t)tier->guaranteed_bytes, "limit_bytes",
                                              (json_int_t)tier->limit_bytes, "byte_seconds",
                                              (json_int_t)tier->byte_seconds, "evictions",
                                              (json_int_t)tier->evictions));
    }
    return list;
}

static json_t *row_json(const Kvkeep__V1__UsageRow *row)
{
    const struct {
        const char *name;
        uint64_t value;
    } counters[] = {
        {"sequences", row->sequences},         {"leases", row->leases},
        {"requests", row->requests},           {"lookups", row->lookups},
        {"lookup_tokens", row->lookup_tokens}, {"hit_tokens", row->hit_tokens},
        {"saved_tokens", row->saved_tokens},   {"sealed_blocks", row->sealed_blocks},
        {"moved_bytes", row->moved_bytes},     {"limit_evictions", row->limit_evictions},
        {"idle_blocks", row->idle_blocks},     {"hints_left_out", row->hints_left_out},
        {"refusals", row->refusals},           {"limit_refusals", row->limit_refusals},
        {"rate_refusals", row->rate_refusals}, {"partial_hit_tokens", row->partial_hit_tokens},
    };
    json_t *object =
        json_pack("{s:o, s:o}", "tenant", ctl_json_text(row->tenant), "tiers", tiers_json(row));
    for (size_t i = 0; i < sizeof(counters) / sizeof(counters[0]); i++) {
        json_object_set_new(object, counters[i].name, json_integer((json_int_t)counters[i].value));
    }
    return object;
}

/* GiB x hours, as it is charged. */
static const char *gib_hours(uint64_t byte_seconds, char text[32])
{
    (void)snprintf(text, 32, "%.3f", (double)byte_seconds / (1024.0 * 1024 * 1024 * 3600));
    return text;
}

static void tiers_print(const Kvkeep__V1__GetUsageResponse *usage)
{
    static const char *const titles[] = {"-tenant", "-tier",      "used",      "in use",
                                         "limit",   "guaranteed", "GiB hours", "evicted"};
    struct ctl_table table;
    ctl_table_init(&table, 8, titles);
    for (size_t i = 0; i < usage->n_rows; i++) {
        const Kvkeep__V1__UsageRow *row = usage->rows[i];
        for (size_t k = 0; k < row->n_tiers; k++) {
            const Kvkeep__V1__TierUsage *tier = row->tiers[k];
            char hours[32];
            if (tier->used_bytes == 0 && tier->byte_seconds == 0 && tier->limit_bytes == 0 &&
                tier->guaranteed_bytes == 0) {
                continue;
            }
            ctl_table_row(&table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", ctl_text(row->tenant),
                          tier_name(tier->tier), ctl_bytes(tier->used_bytes),
                          ctl_bytes(tier->bound_bytes),
                          tier->limit_bytes == 0 ? "-" : ctl_bytes(tier->limit_bytes),
                          tier->guaranteed_bytes == 0 ? "-" : ctl_bytes(tier->guaranteed_bytes),
                          gib_hours(tier->byte_seconds, hours), ctl_count(tier->evictions));
        }
    }
    ctl_table_print(&table);
}

static void counters_print(const Kvkeep__V1__GetUsageResponse *usage)
{
    static const char *const titles[] = {"-tenant", "requests", "tokens asked", "hit",      "saved",
                                         "moved",   "refused",  "over limit",   "over rate"};
    struct ctl_table table;
    ctl_table_init(&table, 9, titles);
    for (size_t i = 0; i < usage->n_rows; i++) {
        const Kvkeep__V1__UsageRow *row = usage->rows[i];
        ctl_table_row(&table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", ctl_text(row->tenant),
                      ctl_count(row->requests), ctl_count(row->lookup_tokens),
                      ctl_count(row->hit_tokens), ctl_count(row->saved_tokens),
                      ctl_bytes(row->moved_bytes), ctl_count(row->refusals),
                      ctl_count(row->limit_refusals), ctl_count(row->rate_refusals));
    }
    ctl_table_print(&table);
}

int ctl_usage_of_tenants(const struct ctl_options *options, int argc, char **argv)
{
    static const struct option known[] = {{"tenant", required_argument, NULL, 't'},
                                          {NULL, 0, NULL, 0}};
    const struct ctl_command command = {.name = "usage",
                                        .usage = "  --tenant NAME   of one tenant\n"};
    Kvkeep__V1__GetUsageRequest request = KVKEEP__V1__GET_USAGE_REQUEST__INIT;
    int code;
    int option;
    while ((option = getopt_long(argc, argv, "", known, NULL)) != -1) {
        if (option != 't') {
            return ctl_usage(&command, NULL);
        }
        request.tenant.data = (uint8_t *)(uintptr_t)optarg;
        request.tenant.len = strlen(optarg);
    }
    if (optind < argc) {
        return ctl_usage_told(&command, "it takes no arguments");
    }
    Kvkeep__V1__GetUsageResponse *usage =
        ctl_admin_call(options, "/kvkeep.v1.Admin/GetUsage", &request.base,
                       &kvkeep__v1__get_usage_response__descriptor, &code);
    if (usage == NULL) {
        return code;
    }
    if (options->json) {
        json_t *list = json_array();
        for (size_t i = 0; i < usage->n_rows; i++) {
            json_array_append_new(list, row_json(usage->rows[i]));
        }
        ctl_json_print(list);
    } else {
        tiers_print(usage);
        (void)printf("\n");
        counters_print(usage);
    }
    kvkeep__v1__get_usage_response__free_unpacked(usage, NULL);
    return CTL_OK;
}
