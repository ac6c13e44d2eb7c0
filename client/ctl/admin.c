/*
 * The commands that ask once and print: status, tenants, spaces, sequences, leases, instances, why,
 * stats.
 */
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "client/ctl/ctl.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define ADMIN(name) "/kvkeep.v1.Admin/" name
#define CALL_TIMEOUT_MS 10000

void *ctl_admin_call(const struct ctl_options *options, const char *method,
                     const ProtobufCMessage *request,
                     const ProtobufCMessageDescriptor *response_type, int *code)
{
    return ctl_admin_call_within(options, method, request, response_type, CALL_TIMEOUT_MS, code);
}

void *ctl_admin_call_within(const struct ctl_options *options, const char *method,
                            const ProtobufCMessage *request,
                            const ProtobufCMessageDescriptor *response_type, uint32_t timeout_ms,
                            int *code)
{
    struct kvkeep_connection *connection = NULL;
    struct kvk_error error = {0};
    ProtobufCMessage *response = NULL;
    enum kvk_status status = kvkeep_connection_create_tls(options->target, options->token,
                                                          options->tls, &connection, &error);
    if (status == KVK_OK) {
        status = kvkeep_connection_call(connection, method, request, response_type, timeout_ms,
                                        &response, &error);
        kvkeep_connection_destroy(connection);
    }
    *code = CTL_OK;
    if (status != KVK_OK) {
        *code = ctl_fail(strrchr(method, '/') + 1, &error);
        return NULL;
    }
    return response;
}

/* --tenant NAME and --limit N, which most of these commands have. */
struct filter {
    const char *tenant;
    uint64_t limit;
    uint64_t sequence;
};

static bool filter_parse(struct filter *filter, int argc, char **argv, const char *usage)
{
    static const struct option names[] = {{"tenant", required_argument, NULL, 't'},
                                          {"limit", required_argument, NULL, 'n'},
                                          {"sequence", required_argument, NULL, 's'},
                                          {NULL, 0, NULL, 0}};
    *filter = (struct filter){0};
    struct ctl_command command = {.name = argv[0], .usage = usage};
    bool right = true;
    int option;
    int at = 0;
    while (right && (option = getopt_long(argc, argv, "", names, &at)) != -1) {
        if (option == 't') {
            filter->tenant = optarg;
        } else if (option == '?') {
            right = false;
        } else if (!ctl_parse_count(optarg, option == 'n' ? &filter->limit : &filter->sequence)) {
            (void)ctl_option_wrong(argv[0], names[at].name, optarg, "a whole number");
            return false;
        }
    }
    if (right && optind == argc) {
        return true;
    }
    (void)ctl_usage(&command, right ? "options only" : NULL);
    return false;
}

static const char tenant_usage[] = "  --tenant NAME   only this tenant\n";
static const char list_usage[] = "  --tenant NAME   only this tenant\n"
                                 "  --limit N       at most so many rows (1000)\n";

static ProtobufCBinaryData text(const char *value)
{
    ProtobufCBinaryData data = {.data = (uint8_t *)(uintptr_t)value,
                                .len = value == NULL ? 0 : strlen(value)};
    return data;
}

static const char *tier_name(Kvkeep__V1__Tier tier)
{
    return tier == KVKEEP__V1__TIER__TIER_DEVICE ? "device"
           : tier == KVKEEP__V1__TIER__TIER_HOST ? "host"
           : tier == KVKEEP__V1__TIER__TIER_DISK ? "disk"
                                                 : "none";
}

static Kvkeep__V1__GetOccupancyResponse *occupancy_ask(const struct ctl_options *options,
                                                       const char *tenant, int *code)
{
    Kvkeep__V1__GetOccupancyRequest request = KVKEEP__V1__GET_OCCUPANCY_REQUEST__INIT;
    request.tenant = text(tenant);
    return ctl_admin_call(options, ADMIN("GetOccupancy"), &request.base,
                          &kvkeep__v1__get_occupancy_response__descriptor, code);
}

/* ---- status ---- */

static json_t *tiers_json(const Kvkeep__V1__GetOccupancyResponse *occupancy)
{
    json_t *tiers = json_array();
    for (size_t i = 0; i < occupancy->n_tiers; i++) {
        const Kvkeep__V1__TierUse *use = occupancy->tiers[i];
        json_array_append_new(
            tiers,
            json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "tier", tier_name(use->tier),
                      "limit_bytes", (json_int_t)use->limit_bytes, "used_bytes",
                      (json_int_t)use->used_bytes, "free_bytes", (json_int_t)use->free_bytes,
                      "slab_bytes", (json_int_t)use->slab_bytes, "quarantine_bytes",
                      (json_int_t)use->quarantine_bytes, "stray_bytes",
                      (json_int_t)use->stray_bytes, "growth_bytes", (json_int_t)use->growth_bytes,
                      "public_bytes", (json_int_t)use->public_bytes));
    }
    return tiers;
}

/* NULL: the device tier is none that can fall away. */
static json_t *gpu_json(const Kvkeep__V1__DeviceState *device)
{
    return device == NULL ? NULL
                          : json_pack("{s:b, s:o, s:I, s:I}", "lost", device->lost, "reason",
                                      ctl_json_text(device->reason), "memory_failures",
                                      (json_int_t)device->memory_failures, "call_failures",
                                      (json_int_t)device->call_failures);
}

static void tiers_print(const Kvkeep__V1__GetOccupancyResponse *occupancy)
{
    static const char *const titles[] = {"-tier", "limit",  "used",       "free",  "public",
                                         "slabs", "growth", "quarantine", "strays"};
    struct ctl_table table;
    ctl_table_init(&table, 9, titles);
    for (size_t i = 0; i < occupancy->n_tiers; i++) {
        const Kvkeep__V1__TierUse *use = occupancy->tiers[i];
        ctl_table_row(&table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", tier_name(use->tier),
                      ctl_bytes(use->limit_bytes), ctl_bytes(use->used_bytes),
                      ctl_bytes(use->free_bytes), ctl_bytes(use->public_bytes),
                      ctl_bytes(use->slab_bytes), ctl_bytes(use->growth_bytes),
                      ctl_bytes(use->quarantine_bytes), ctl_bytes(use->stray_bytes));
    }
    ctl_table_print(&table);
    const Kvkeep__V1__DeviceState *device = occupancy->device;
    if (device != NULL && (device->lost || device->reason.len > 0)) {
        (void)printf("GPU: %s, %llu times without memory, %llu failures survived; %.*s\n",
                     device->lost ? "FALLEN AWAY" : "there",
                     (unsigned long long)device->memory_failures,
                     (unsigned long long)device->call_failures, (int)device->reason.len,
                     (const char *)device->reason.data);
    }
    const Kvkeep__V1__DiskState *disk = occupancy->disk;
    if (disk != NULL) {
        (void)printf("disk: %.*s, %.*s, %llu blocks wait to be written%s%.*s\n",
                     (int)disk->state.len, (const char *)disk->state.data, (int)disk->path.len,
                     (const char *)disk->path.data, (unsigned long long)disk->queued_blocks,
                     disk->reason.len > 0 ? "; last failure: " : "", (int)disk->reason.len,
                     (const char *)disk->reason.data);
    }
    const Kvkeep__V1__RemoteStore *remote = occupancy->remote;
    if (remote != NULL) {
        (void)printf("remote store: %.*s, %u of %u nodes away, %llu of %llu spaces out; fetched "
                     "%s, sent %s; %llu prompts and %llu blocks wait%s%.*s\n",
                     (int)remote->state.len, (const char *)remote->state.data, remote->nodes_away,
                     remote->nodes, (unsigned long long)remote->spaces_out,
                     (unsigned long long)remote->spaces, ctl_bytes(remote->fetched_bytes),
                     ctl_bytes(remote->sent_bytes), (unsigned long long)remote->prompts_waiting,
                     (unsigned long long)remote->blocks_waiting,
                     remote->reason.len > 0 ? "; last failure: " : "", (int)remote->reason.len,
                     (const char *)remote->reason.data);
    }
}

int ctl_status(const struct ctl_options *options, int argc, char **argv)
{
    struct filter filter;
    if (!filter_parse(&filter, argc, argv, "")) {
        return CTL_USAGE;
    }
    struct kvkeep_options connect = {.target = options->target,
                                     .token = options->token,
                                     .tls = options->tls,
                                     .timeout_ms = CALL_TIMEOUT_MS,
                                     .no_retry = true};
    struct kvkeep_client *client = NULL;
    struct kvkeep_server_info info;
    struct kvk_error error = {0};
    if (kvkeep_connect(&connect, &client, &error) != KVK_OK) {
        return ctl_fail("status", &error);
    }
    enum kvk_status status = kvkeep_server_info(client, &info, &error);
    kvkeep_disconnect(client);
    if (status != KVK_OK) {
        return ctl_fail("status", &error);
    }
    int code;
    Kvkeep__V1__GetOccupancyResponse *occupancy = occupancy_ask(options, NULL, &code);
    if (occupancy == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(json_pack(
            "{s:s, s:s, s:s, s:s, s:s, s:b, s:I, s:o, s:o*, s:o*}", "version", info.version,
            "device", info.device, "device_path", info.device_path, "policy", info.policy, "tenant",
            info.tenant, "admin", info.admin, "uptime_ms", (json_int_t)info.uptime_ms, "tiers",
            tiers_json(occupancy), "scrub", info.admin ? ctl_scrub_json(options) : NULL, "gpu",
            gpu_json(occupancy->device)));
    } else {
        const char *who = info.admin ? " (admin)" : "";
        who = info.admin && info.tenant[0] == '\0' ? "an admin without a tenant" : who;
        (void)printf("kvkeepd %s, up %s, device %s (%s), policy %s, you are %s%s\n\n", info.version,
                     ctl_duration_ms(info.uptime_ms), info.device, info.device_path, info.policy,
                     info.tenant, who);
        tiers_print(occupancy);
        if (info.admin) {
            ctl_scrub_print(options);
        }
    }
    kvkeep__v1__get_occupancy_response__free_unpacked(occupancy, NULL);
    return CTL_OK;
}

/* ---- tenants: rows of the occupancy, summed ---- */

struct tenant_sum {
    ProtobufCBinaryData name;
    uint64_t device_bytes;
    uint64_t host_bytes;
    uint64_t blocks;
    uint64_t held;
    uint64_t evictable;
    uint32_t groups;
    const Kvkeep__V1__TenantMetadata *metadata; /* of the answer, or NULL */
};

static uint32_t sum_of(struct tenant_sum *sums, uint32_t *count, ProtobufCBinaryData name)
{
    uint32_t t = 0;
    while (t < *count &&
           (sums[t].name.len != name.len || memcmp(sums[t].name.data, name.data, name.len) != 0)) {
        t++;
    }
    if (t == *count) {
        sums[t].name = name;
        (*count)++;
    }
    return t;
}

static uint32_t tenants_sum(const Kvkeep__V1__GetOccupancyResponse *occupancy,
                            struct tenant_sum *sums)
{
    uint32_t count = 0;
    for (size_t i = 0; i < occupancy->n_metadata; i++) {
        sums[sum_of(sums, &count, occupancy->metadata[i]->tenant)].metadata =
            occupancy->metadata[i];
    }
    for (size_t i = 0; i < occupancy->n_rows; i++) {
        const Kvkeep__V1__OccupancyRow *row = occupancy->rows[i];
        uint32_t t = sum_of(sums, &count, row->tenant);
        sums[t].device_bytes += row->device_bytes;
        sums[t].host_bytes += row->host_bytes;
        sums[t].groups++;
        if (row->counts != NULL) {
            uint64_t held = row->counts->reserved + row->counts->active + row->counts->sealed +
                            row->counts->shared;
            sums[t].held += held;
            sums[t].evictable += row->counts->evictable;
            sums[t].blocks += held + row->counts->evictable;
        }
    }
    return count;
}

static json_t *metadata_json(const Kvkeep__V1__TenantMetadata *metadata)
{
    if (metadata == NULL) {
        return json_null();
    }
    json_t *kinds = json_object();
    for (size_t i = 0; i < metadata->n_uses; i++) {
        const Kvkeep__V1__MetadataUse *use = metadata->uses[i];
        json_object_set_new(kinds, ctl_text(use->kind),
                            json_pack("{s:I, s:I, s:I}", "count", (json_int_t)use->count,
                                      "count_limit", (json_int_t)use->count_limit, "bytes",
                                      (json_int_t)use->bytes));
    }
    return json_pack("{s:I, s:I, s:o}", "bytes", (json_int_t)metadata->bytes, "limit_bytes",
                     (json_int_t)metadata->limit_bytes, "kinds", kinds);
}

int ctl_tenants(const struct ctl_options *options, int argc, char **argv)
{
    struct filter filter;
    int code;
    if (!filter_parse(&filter, argc, argv, tenant_usage)) {
        return CTL_USAGE;
    }
    Kvkeep__V1__GetOccupancyResponse *occupancy = occupancy_ask(options, filter.tenant, &code);
    if (occupancy == NULL) {
        return code;
    }
    struct tenant_sum *sums = calloc(occupancy->n_rows + occupancy->n_metadata + 1, sizeof sums[0]);
    uint32_t count = sums == NULL ? 0 : tenants_sum(occupancy, sums);
    static const char *const titles[] = {"-tenant", "device", "host",     "blocks",    "held",
                                         "cached",  "groups", "metadata", "of at most"};
    struct ctl_table table;
    ctl_table_init(&table, 9, titles);
    json_t *list = json_array();
    for (uint32_t t = 0; t < count; t++) {
        const Kvkeep__V1__TenantMetadata *metadata = sums[t].metadata;
        ctl_table_row(&table, "%s\t%s\t%s\t%s\t%s\t%s\t%u\t%s\t%s", ctl_text(sums[t].name),
                      ctl_bytes(sums[t].device_bytes), ctl_bytes(sums[t].host_bytes),
                      ctl_count(sums[t].blocks), ctl_count(sums[t].held),
                      ctl_count(sums[t].evictable), sums[t].groups,
                      metadata == NULL ? "-" : ctl_bytes(metadata->bytes),
                      metadata == NULL ? "-" : ctl_bytes(metadata->limit_bytes));
        json_array_append_new(
            list,
            json_pack("{s:o, s:I, s:I, s:I, s:I, s:I, s:o}", "tenant", ctl_json_text(sums[t].name),
                      "device_bytes", (json_int_t)sums[t].device_bytes, "host_bytes",
                      (json_int_t)sums[t].host_bytes, "blocks", (json_int_t)sums[t].blocks,
                      "held_blocks", (json_int_t)sums[t].held, "evictable_blocks",
                      (json_int_t)sums[t].evictable, "metadata", metadata_json(sums[t].metadata)));
    }
    ctl_list_print(options, &table, list, false);
    free(sums);
    kvkeep__v1__get_occupancy_response__free_unpacked(occupancy, NULL);
    return CTL_OK;
}

/* ---- spaces ---- */

static const char *space_layers(const Kvkeep__V1__SpaceInfo *space)
{
    static char line[128];
    size_t at = 0;
    line[0] = '\0';
    for (size_t g = 0; g < space->n_groups && at < sizeof line; g++) {
        const Kvkeep__V1__LayerGroup *group = space->groups[g];
        enum kvk_format host = (enum kvk_format)group->host_format;
        enum kvk_format disk = (enum kvk_format)group->disk_format;
        int wrote =
            snprintf(line + at, sizeof line - at, "%s%ux%ux%u%s%s%s%s%s", g == 0 ? "" : " + ",
                     group->layers, group->kv_heads, group->head_size_k,
                     group->window > 0 ? " windowed" : "", host != KVK_FORMAT_NONE ? ", host " : "",
                     host != KVK_FORMAT_NONE ? kvk_format_name(host) : "",
                     disk != KVK_FORMAT_NONE ? ", disk " : "",
                     disk != KVK_FORMAT_NONE ? kvk_format_name(disk) : "");
        at += wrote < 0 ? 0 : (size_t)wrote;
    }
    return line;
}

/* Of each group the format on disk, or in the host tier, or null where that is its own. */
static json_t *space_formats(const Kvkeep__V1__SpaceInfo *space, bool host)
{
    json_t *list = json_array();
    for (size_t g = 0; g < space->n_groups; g++) {
        enum kvk_format format =
            (enum kvk_format)(host ? space->groups[g]->host_format : space->groups[g]->disk_format);
        json_array_append_new(
            list, format == KVK_FORMAT_NONE ? json_null() : json_string(kvk_format_name(format)));
    }
    return list;
}

static json_t *space_json(const Kvkeep__V1__SpaceInfo *space)
{
    ProtobufCBinaryData none = {0};
    char id[24]; /* as text, too: tools that keep numbers as doubles (jq 1.6) cut the other */
    (void)snprintf(id, sizeof(id), "%llu", (unsigned long long)space->space_id);
    return json_pack(
        "{s:s, s:I, s:o, s:o, s:o, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:I, s:I, s:b, s:s, s:b, "
        "s:o, "
        "s:o}",
        "id", id, "space_id", (json_int_t)space->space_id, "tenant", ctl_json_text(space->tenant),
        "model", ctl_json_text(space->identity == NULL ? none : space->identity->model), "revision",
        ctl_json_text(space->identity == NULL ? none : space->identity->revision), "block_tokens",
        (int)space->block_tokens, "tensor_shards", (int)space->tensor_shards, "pipeline_shards",
        (int)space->pipeline_shards, "blocks", (json_int_t)space->blocks, "bytes",
        (json_int_t)space->bytes, "queries", (json_int_t)space->queries, "query_tokens",
        (json_int_t)space->query_tokens, "hit_tokens", (json_int_t)space->hit_tokens, "generation",
        (json_int_t)space->generation, "is_public", space->is_public, "mode",
        ctl_mode_name(space->mode), "partial_reuse", space->partial_reuse, "disk_formats",
        space_formats(space, false), "host_formats", space_formats(space, true));
}

int ctl_spaces(const struct ctl_options *options, int argc, char **argv)
{
    struct filter filter;
    int code;
    if (!filter_parse(&filter, argc, argv, tenant_usage)) {
        return CTL_USAGE;
    }
    Kvkeep__V1__ListSpacesRequest request = KVKEEP__V1__LIST_SPACES_REQUEST__INIT;
    request.tenant = text(filter.tenant);
    Kvkeep__V1__ListSpacesResponse *response =
        ctl_admin_call(options, ADMIN("ListSpaces"), &request.base,
                       &kvkeep__v1__list_spaces_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    static const char *const titles[] = {
        "space",   "-tenant", "-model", "-layers x kv heads x size",
        "tokens",  "shards",  "blocks", "bytes",
        "queries", "hit %",   "-mode"};
    struct ctl_table table;
    ctl_table_init(&table, 11, titles);
    json_t *list = json_array();
    for (size_t i = 0; i < response->n_spaces; i++) {
        const Kvkeep__V1__SpaceInfo *space = response->spaces[i];
        ProtobufCBinaryData none = {0};
        double hits = space->query_tokens == 0
                          ? 0
                          : 100.0 * (double)space->hit_tokens / (double)space->query_tokens;
        ctl_table_row(&table, "%llu\t%s\t%s%s\t%s\t%u\t%u\t%s\t%s\t%s\t%.1f\t%s",
                      (unsigned long long)space->space_id, ctl_text(space->tenant),
                      ctl_text(space->identity == NULL ? none : space->identity->model),
                      space->is_public ? " (public)" : "", space_layers(space), space->block_tokens,
                      space->tensor_shards * space->pipeline_shards, ctl_count(space->blocks),
                      ctl_bytes(space->bytes), ctl_count(space->queries), hits,
                      ctl_mode_name(space->mode));
        json_array_append_new(list, space_json(space));
    }
    ctl_list_print(options, &table, list, false);
    kvkeep__v1__list_spaces_response__free_unpacked(response, NULL);
    return CTL_OK;
}

/* ---- sequences ---- */

static const char *state_name(Kvkeep__V1__SequenceState state)
{
    return state == KVKEEP__V1__SEQUENCE_STATE__SEQUENCE_STATE_SWAPPED_OUT ? "swapped out"
                                                                           : "running";
}

int ctl_sequences(const struct ctl_options *options, int argc, char **argv)
{
    struct filter filter;
    int code;
    if (!filter_parse(&filter, argc, argv, list_usage)) {
        return CTL_USAGE;
    }
    Kvkeep__V1__ListSequencesRequest request = KVKEEP__V1__LIST_SEQUENCES_REQUEST__INIT;
    request.tenant = text(filter.tenant);
    request.limit = filter.limit;
    Kvkeep__V1__ListSequencesResponse *response =
        ctl_admin_call(options, ADMIN("ListSequences"), &request.base,
                       &kvkeep__v1__list_sequences_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    static const char *const titles[] = {"sequence", "-tenant", "-state", "tokens",
                                         "sealed",   "cached",  "drafts", "blocks",
                                         "shared",   "device",  "host",   "age"};
    struct ctl_table table;
    ctl_table_init(&table, 12, titles);
    json_t *list = json_array();
    for (size_t i = 0; i < response->n_sequences; i++) {
        const Kvkeep__V1__SequenceInfo *row = response->sequences[i];
        ctl_table_row(
            &table, "%llu\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s",
            (unsigned long long)row->sequence_id, ctl_text(row->tenant), state_name(row->state),
            ctl_count(row->length), ctl_count(row->sealed_tokens), ctl_count(row->cached_tokens),
            ctl_count(row->draft_tokens), ctl_count(row->blocks), ctl_count(row->shared_blocks),
            ctl_bytes(row->device_bytes), ctl_bytes(row->host_bytes), ctl_duration_ms(row->age_ms));
        json_array_append_new(
            list,
            json_pack("{s:I, s:o, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "sequence_id",
                      (json_int_t)row->sequence_id, "tenant", ctl_json_text(row->tenant), "state",
                      state_name(row->state), "length", (json_int_t)row->length, "sealed_tokens",
                      (json_int_t)row->sealed_tokens, "cached_tokens",
                      (json_int_t)row->cached_tokens, "draft_tokens", (json_int_t)row->draft_tokens,
                      "blocks", (json_int_t)row->blocks, "shared_blocks",
                      (json_int_t)row->shared_blocks, "device_bytes", (json_int_t)row->device_bytes,
                      "host_bytes", (json_int_t)row->host_bytes, "age_ms",
                      (json_int_t)row->age_ms));
    }
    ctl_list_print(options, &table, list, response->more);
    kvkeep__v1__list_sequences_response__free_unpacked(response, NULL);
    return CTL_OK;
}

/* ---- leases ---- */

int ctl_leases(const struct ctl_options *options, int argc, char **argv)
{
    struct filter filter;
    int code;
    if (!filter_parse(&filter, argc, argv, list_usage)) {
        return CTL_USAGE;
    }
    Kvkeep__V1__ListLeasesRequest request = KVKEEP__V1__LIST_LEASES_REQUEST__INIT;
    request.tenant = text(filter.tenant);
    request.limit = filter.limit;
    Kvkeep__V1__ListLeasesResponse *response =
        ctl_admin_call(options, ADMIN("ListLeases"), &request.base,
                       &kvkeep__v1__list_leases_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    static const char *const titles[] = {"lease", "-tenant", "-owner", "tokens",   "blocks",
                                         "-kind", "age",     "left",   "transfers"};
    struct ctl_table table;
    ctl_table_init(&table, 9, titles);
    json_t *list = json_array();
    for (size_t i = 0; i < response->n_leases; i++) {
        const Kvkeep__V1__LeaseInfo *row = response->leases[i];
        ctl_table_row(&table, "%llu\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%u",
                      (unsigned long long)row->lease_id, ctl_text(row->tenant),
                      ctl_text(row->instance_name), ctl_count(row->tokens), ctl_count(row->blocks),
                      row->copy_pin ? "pin" : "hold", ctl_duration_ms(row->age_ms),
                      ctl_duration_ms(row->ttl_ms), row->open_transfers);
        json_array_append_new(
            list, json_pack("{s:I, s:o, s:o, s:I, s:I, s:I, s:I, s:b, s:i}", "lease_id",
                            (json_int_t)row->lease_id, "tenant", ctl_json_text(row->tenant),
                            "instance", ctl_json_text(row->instance_name), "tokens",
                            (json_int_t)row->tokens, "blocks", (json_int_t)row->blocks, "age_ms",
                            (json_int_t)row->age_ms, "ttl_ms", (json_int_t)row->ttl_ms, "copy_pin",
                            row->copy_pin, "open_transfers", (int)row->open_transfers));
    }
    ctl_list_print(options, &table, list, response->more);
    kvkeep__v1__list_leases_response__free_unpacked(response, NULL);
    return CTL_OK;
}

/* ---- instances ---- */

static void sessions_rows(const Kvkeep__V1__InstanceInfo *instance, struct ctl_table *table,
                          json_t *list)
{
    json_t *sessions = json_array();
    for (size_t s = 0; s < instance->n_sessions; s++) {
        const Kvkeep__V1__SessionInfo *row = instance->sessions[s];
        ctl_table_row(
            table, "%s\t%s\t%s\t%s\t%s\t%s\t%u\t%llu\t%s\t%s",
            s == 0 ? ctl_text(instance->tenant) : "", s == 0 ? ctl_text(instance->name) : "",
            s == 0 ? ctl_duration_ms(instance->age_ms) : "",
            s == 0 ? ctl_count(instance->sequences) : "", s == 0 ? ctl_count(instance->leases) : "",
            s == 0 ? ctl_count(instance->quarantine_blocks) : "", row->rank,
            (unsigned long long)row->pid, row->connected ? "yes" : "gone",
            ctl_bytes(row->mapped_bytes));
        json_array_append_new(
            sessions, json_pack("{s:i, s:I, s:b, s:b, s:I}", "rank", (int)row->rank, "pid",
                                (json_int_t)row->pid, "connected", row->connected, "side_socket",
                                row->side_socket, "mapped_bytes", (json_int_t)row->mapped_bytes));
    }
    json_array_append_new(
        list,
        json_pack("{s:I, s:o, s:o, s:I, s:I, s:I, s:I, s:o}", "instance_id",
                  (json_int_t)instance->instance_id, "tenant", ctl_json_text(instance->tenant),
                  "name", ctl_json_text(instance->name), "age_ms", (json_int_t)instance->age_ms,
                  "sequences", (json_int_t)instance->sequences, "leases",
                  (json_int_t)instance->leases, "quarantine_blocks",
                  (json_int_t)instance->quarantine_blocks, "sessions", sessions));
}

int ctl_instances(const struct ctl_options *options, int argc, char **argv)
{
    struct filter filter;
    int code;
    if (!filter_parse(&filter, argc, argv, tenant_usage)) {
        return CTL_USAGE;
    }
    Kvkeep__V1__ListInstancesRequest request = KVKEEP__V1__LIST_INSTANCES_REQUEST__INIT;
    request.tenant = text(filter.tenant);
    Kvkeep__V1__ListInstancesResponse *response =
        ctl_admin_call(options, ADMIN("ListInstances"), &request.base,
                       &kvkeep__v1__list_instances_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    static const char *const titles[] = {"-tenant", "-instance", "age", "sequences",  "leases",
                                         "waiting", "rank",      "pid", "-connected", "mapped"};
    struct ctl_table table;
    ctl_table_init(&table, 10, titles);
    json_t *list = json_array();
    for (size_t i = 0; i < response->n_instances; i++) {
        sessions_rows(response->instances[i], &table, list);
    }
    ctl_list_print(options, &table, list, false);
    kvkeep__v1__list_instances_response__free_unpacked(response, NULL);
    return CTL_OK;
}

/* ---- why ---- */

static const char *cause_text(Kvkeep__V1__Cause cause)
{
    return kvk_cause_name((enum kvk_cause)cause);
}

/* What the newest one's caller was told to do. */
static void why_print_advice(const Kvkeep__V1__Refusal *refusal)
{
    const Kvkeep__V1__ErrorDetail *detail = refusal->detail;
    if (detail == NULL) {
        return;
    }
    if (detail->retry_after_ms > 0) {
        (void)printf("\nThe newest was told to try again in %s.\n",
                     ctl_duration_ms(detail->retry_after_ms));
    }
    const Kvkeep__V1__Advice *advice = detail->advice;
    if (advice == NULL) {
        return;
    }
    bool swaps = advice->kind == KVKEEP__V1__ADVICE__KIND__KIND_SWAP_OUT;
    (void)printf("%s were missing; %s %s of its own sequences makes %s free",
                 ctl_bytes(advice->missing_bytes), swaps ? "swapping out" : "closing",
                 ctl_count(advice->total), ctl_bytes(advice->bytes));
    if (advice->cost_ns > 0) {
        (void)printf(", at an estimated cost of %s", ctl_duration_ms(advice->cost_ns / 1000000));
    }
    for (size_t i = 0; i < advice->n_sequence_ids && i < advice->n_sequence_bytes; i++) {
        (void)printf("%s %llu (%s)", i == 0 ? ":" : ",",
                     (unsigned long long)advice->sequence_ids[i],
                     ctl_bytes(advice->sequence_bytes[i]));
    }
    (void)printf(".\n");
}

static json_t *advice_json(const Kvkeep__V1__Advice *advice)
{
    json_t *ids = json_array();
    if (advice == NULL) {
        json_decref(ids);
        return json_null();
    }
    for (size_t i = 0; i < advice->n_sequence_ids; i++) {
        /* JSON's integers have a sign, and ids use all 64 bits. */
        json_array_append_new(ids,
                              json_sprintf("%llu", (unsigned long long)advice->sequence_ids[i]));
    }
    return json_pack("{s:s, s:o, s:I, s:I, s:I, s:I}", "do",
                     advice->kind == KVKEEP__V1__ADVICE__KIND__KIND_SWAP_OUT ? "swap_out" : "close",
                     "sequence_ids", ids, "total", (json_int_t)advice->total, "missing_bytes",
                     (json_int_t)advice->missing_bytes, "bytes", (json_int_t)advice->bytes,
                     "cost_ns", (json_int_t)advice->cost_ns);
}

static bool is_same(ProtobufCBinaryData a, ProtobufCBinaryData b)
{
    return a.len == b.len && (a.len == 0 || memcmp(a.data, b.data, a.len) == 0);
}

/* The same call of the same tenant, refused in the same words. */
static bool is_alike(const Kvkeep__V1__Refusal *a, const Kvkeep__V1__Refusal *b)
{
    return a->detail != NULL && b->detail != NULL && is_same(a->tenant, b->tenant) &&
           is_same(a->call, b->call) && is_same(a->detail->message, b->detail->message);
}

static void why_print(const Kvkeep__V1__WhyResponse *response)
{
    (void)printf("%s\n\n", ctl_text(response->advice));
    static const char *const tier_titles[] = {"-tier",     "limit",     "active",  "leased",
                                              "evictable", "growth",    "copying", "quarantine",
                                              "scattered", "admissible"};
    struct ctl_table table;
    ctl_table_init(&table, 10, tier_titles);
    for (size_t i = 0; i < response->n_tiers; i++) {
        const Kvkeep__V1__TierWhy *tier = response->tiers[i];
        ctl_table_row(&table, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s", tier_name(tier->tier),
                      ctl_bytes(tier->limit_bytes), ctl_bytes(tier->active_bytes),
                      ctl_bytes(tier->leased_bytes), ctl_bytes(tier->evictable_bytes),
                      ctl_bytes(tier->growth_bytes), ctl_bytes(tier->copying_bytes),
                      ctl_bytes(tier->quarantine_bytes), ctl_bytes(tier->scattered_bytes),
                      ctl_bytes(tier->largest_admissible_bytes));
    }
    ctl_table_print(&table);
    if (response->metadata_bytes > 0) {
        (void)printf("\nBeside the tiers: %s of the daemon's own tables, %s of workspace.\n",
                     ctl_bytes(response->metadata_bytes), ctl_bytes(response->workspace_bytes));
    }
    if (response->n_refusals == 0) {
        (void)printf("\nNothing was refused lately.\n");
        return;
    }
    (void)putchar('\n');
    static const char *const titles[] = {"age",    "times",  "-tenant",  "-call",
                                         "-cause", "needed", "-sentence"};
    ctl_table_init(&table, 7, titles);
    for (size_t i = 0; i < response->n_refusals; i++) {
        const Kvkeep__V1__Refusal *row = response->refusals[i];
        ProtobufCBinaryData none = {0};
        size_t times = 1; /* a client that tries again and again is one line, of the newest time */
        while (i + 1 < response->n_refusals && is_alike(row, response->refusals[i + 1])) {
            times++;
            i++;
        }
        ctl_table_row(&table, "%s\t%zu\t%s\t%s\t%s\t%s\t%s", ctl_duration_ms(row->age_ms), times,
                      ctl_text(row->tenant), ctl_text(row->call),
                      row->detail == NULL ? "" : cause_text(row->detail->cause),
                      ctl_bytes(row->needed_bytes),
                      ctl_text(row->detail == NULL ? none : row->detail->message));
    }
    ctl_table_print(&table);
    why_print_advice(response->refusals[0]);
}

static json_t *why_json(const Kvkeep__V1__WhyResponse *response)
{
    json_t *refusals = json_array();
    for (size_t i = 0; i < response->n_refusals; i++) {
        const Kvkeep__V1__Refusal *row = response->refusals[i];
        ProtobufCBinaryData none = {0};
        json_array_append_new(
            refusals,
            json_pack("{s:o, s:I, s:I, s:o, s:o, s:s, s:I, s:I, s:o}", "advice",
                      advice_json(row->detail == NULL ? NULL : row->detail->advice),
                      "retry_after_ms",
                      (json_int_t)(row->detail == NULL ? 0 : row->detail->retry_after_ms), "age_ms",
                      (json_int_t)row->age_ms, "tenant", ctl_json_text(row->tenant), "call",
                      ctl_json_text(row->call), "cause",
                      row->detail == NULL ? "none" : cause_text(row->detail->cause), "needed_bytes",
                      (json_int_t)row->needed_bytes, "sequence_id", (json_int_t)row->sequence_id,
                      "message", ctl_json_text(row->detail == NULL ? none : row->detail->message)));
    }
    json_t *tiers = json_array();
    for (size_t i = 0; i < response->n_tiers; i++) {
        const Kvkeep__V1__TierWhy *tier = response->tiers[i];
        json_array_append_new(
            tiers, json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "tier",
                             tier_name(tier->tier), "limit_bytes", (json_int_t)tier->limit_bytes,
                             "active_bytes", (json_int_t)tier->active_bytes, "leased_bytes",
                             (json_int_t)tier->leased_bytes, "evictable_bytes",
                             (json_int_t)tier->evictable_bytes, "growth_bytes",
                             (json_int_t)tier->growth_bytes, "quarantine_bytes",
                             (json_int_t)tier->quarantine_bytes, "largest_admissible_bytes",
                             (json_int_t)tier->largest_admissible_bytes));
    }
    return json_pack("{s:o, s:o, s:o, s:I, s:I}", "advice", ctl_json_text(response->advice),
                     "tiers", tiers, "refusals", refusals, "metadata_bytes",
                     (json_int_t)response->metadata_bytes, "workspace_bytes",
                     (json_int_t)response->workspace_bytes);
}

int ctl_why(const struct ctl_options *options, int argc, char **argv)
{
    struct filter filter;
    int code;
    if (ctl_why_is_miss(argc, argv)) {
        return ctl_why_miss(options, argc, argv);
    }
    if (!filter_parse(&filter, argc, argv,
                      "why was a request refused:\n"
                      "  --tenant NAME   only this tenant's refusals\n"
                      "  --sequence ID   only this sequence's\n"
                      "  --limit N       the newest so many (20)\n"
                      "why did a prompt miss:\n"
                      "  --space ID|MODEL     where it was looked up\n"
                      "  --tokens T,T,…       the prompt,\n"
                      "  --prompt-file FILE   or a file of its tokens: numbers as text (JSON too), "
                      "or\n"
                      "                       little-endian 32-bit words; - is standard input\n"
                      "  --salt TEXT          that it had\n"
                      "  --leave-last         the last token was to be left to compute\n"
                      "  --tenant NAME        whose space, where a model is named\n")) {
        return CTL_USAGE;
    }
    Kvkeep__V1__WhyRequest request = KVKEEP__V1__WHY_REQUEST__INIT;
    request.tenant = text(filter.tenant);
    request.sequence_id = filter.sequence;
    request.limit = filter.limit;
    Kvkeep__V1__WhyResponse *response = ctl_admin_call(
        options, ADMIN("Why"), &request.base, &kvkeep__v1__why_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    if (options->json) {
        ctl_json_print(why_json(response));
    } else {
        why_print(response);
    }
    kvkeep__v1__why_response__free_unpacked(response, NULL);
    return CTL_OK;
}

/* ---- stats ---- */

int ctl_stats(const struct ctl_options *options, int argc, char **argv)
{
    struct filter filter;
    int code;
    if (!filter_parse(&filter, argc, argv, "")) {
        return CTL_USAGE;
    }
    Kvkeep__V1__GetStatsRequest request = KVKEEP__V1__GET_STATS_REQUEST__INIT;
    Kvkeep__V1__GetStatsResponse *response =
        ctl_admin_call(options, ADMIN("GetStats"), &request.base,
                       &kvkeep__v1__get_stats_response__descriptor, &code);
    if (response == NULL) {
        return code;
    }
    json_t *object = json_object();
    for (size_t i = 0; i < response->n_stats; i++) {
        const Kvkeep__V1__Stat *stat = response->stats[i];
        if (options->json) {
            json_object_set_new(object, ctl_text(stat->name), json_real(stat->value));
        } else {
            (void)printf("%s %.17g\n", ctl_text(stat->name), stat->value);
        }
    }
    if (options->json) {
        json_incref(object);
        ctl_json_print(object);
    }
    json_decref(object);
    kvkeep__v1__get_stats_response__free_unpacked(response, NULL);
    return CTL_OK;
}
