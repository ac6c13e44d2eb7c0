/*
 * What operators ask: GetServerInfo and the Admin service. Who may see what is the engine's to say;
 * here its rows become messages. Rows and messages live in the call's arena or are freed before
 * the call ends.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "daemon/report.h"
#include "daemon/report_remote.h"
#include "daemon/rpc_private.h"

#define ROWS_DEFAULT 1000
#define ROWS_MAX 10000
#define REFUSALS_DEFAULT 20
#define REFUSALS_MAX 256
#define ADVICE_SIZE 512

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
}

/* `count` messages in the arena, zeroed, and pointers to them, for a repeated field. */
static void *take_rows(struct kvk_rpc_run *run, size_t count, size_t row_bytes, void ***pointers)
{
    uint8_t *rows = kvk_rpc_arena_take_extra(&run->memory->arena, count * row_bytes);
    void **list = kvk_rpc_arena_take_extra(&run->memory->arena, count * sizeof(*list));
    if (rows == NULL || list == NULL) {
        return NULL;
    }
    memset(rows, 0, count * row_bytes);
    for (size_t i = 0; i < count; i++) {
        list[i] = rows + i * row_bytes;
    }
    *pointers = list;
    return rows;
}

static ProtobufCBinaryData tenant_name(const struct kvk_tenant *tenant)
{
    return kvk_rpc_text(tenant != NULL ? tenant->name : "");
}

static uint64_t row_limit(uint64_t asked, uint64_t fallback, uint64_t most)
{
    if (asked == 0) {
        return fallback;
    }
    return asked < most ? asked : most;
}

static enum kvk_status check_tenant(const ProtobufCBinaryData *bytes, struct kvk_view *tenant,
                                    struct kvk_error *error)
{
    return kvk_rpc_check_name(bytes, 0, KVK_NAME_SIZE - 1, "tenant", tenant, error);
}

/* ---- GetServerInfo ---- */

static void fill_limits(const struct kvk_config *config, Kvkeep__V1__Limits *limits)
{
    kvkeep__v1__limits__init(limits);
    limits->message_bytes = config->message_bytes;
    limits->tokens = config->tokens;
    limits->spaces = config->spaces;
    limits->sequences = config->sequences;
    limits->leases = config->leases;
    limits->instances = config->instances;
    limits->sessions = config->sessions;
    limits->blocks = config->blocks;
    limits->lease_ms = config->lease_ms;
    limits->salt_bytes = config->salt_bytes;
    limits->spans = config->spans;
    limits->forks = config->forks;
    limits->attend_queries = config->attend_queries;
    limits->transfers = config->transfers;
}

static size_t fill_features(const struct kvk_rpc *rpc, const struct kvk_peer *peer,
                            ProtobufCBinaryData features[6])
{
    size_t count = 0;
    features[count++] = kvk_rpc_text("attend");
    features[count++] = kvk_rpc_text("stream_bytes");
    if (rpc->config->device_bytes > 0 && rpc->config->host_bytes > 0) {
        features[count++] = kvk_rpc_text("swap");
    }
    if (peer != NULL && peer->kind == KVK_PEER_UNIX && rpc->side_path[0] != '\0') {
        features[count++] = kvk_rpc_text("map_memory");
    }
    if (rpc->config->remote.seeds[0] != '\0') {
        features[count++] = kvk_rpc_text("remote");
    }
    if (rpc->config->test_hooks) {
        features[count++] = kvk_rpc_text("test_hooks");
    }
    return count;
}

KVK_RPC_HANDLER(kvk_rpc_get_server_info)
{
    (void)message;
    const struct kvk_rpc *rpc = run->rpc;
    const struct kvk_credential *credential = run->caller.credential;
    ProtobufCBinaryData features[6];
    ProtobufCBinaryData tenants[sizeof(credential->tenants) / sizeof(credential->tenants[0])];
    Kvkeep__V1__Limits limits;
    fill_limits(rpc->config, &limits);
    for (uint32_t i = 0; i < credential->tenant_count; i++) {
        tenants[i] = kvk_rpc_text(credential->tenants[i]->name);
    }
    Kvkeep__V1__GetServerInfoResponse response = KVKEEP__V1__GET_SERVER_INFO_RESPONSE__INIT;
    response.version = kvk_rpc_text(KVK_VERSION);
    response.boot_id = kvk_rpc_bytes(rpc->boot_id, sizeof(rpc->boot_id));
    response.n_features =
        fill_features(rpc, run->call != NULL ? kvk_call_peer(run->call) : NULL, features);
    response.features = features;
    response.limits = &limits;
    response.n_tenants = credential->tenant_count;
    response.tenants = tenants;
    if (credential->tenant_count > 0) {
        response.tenant = tenants[0];
    }
    response.admin = credential->admin;
    response.device = kvk_rpc_text(rpc->device.name);
    response.device_path = kvk_rpc_text(rpc->device.path);
    response.device_bytes = rpc->config->device_bytes;
    response.host_bytes = rpc->config->host_bytes;
    response.uptime_ms = (kvk_clock_now(rpc->clock) - rpc->start_ns) / KVK_NS_PER_MS;
    response.policy = kvk_rpc_text(rpc->config->policy == KVK_EVICT_LRU ? "lru" : "rp-cost");
    return kvk_rpc_reply(run, &response.base, error);
}

/* ---- GetOccupancy ---- */

static void fill_tier_use(Kvkeep__V1__TierUse *use, enum kvk_tier tier,
                          const struct kvk_tier_report *report)
{
    kvkeep__v1__tier_use__init(use);
    use->tier = (Kvkeep__V1__Tier)(tier + 1);
    use->limit_bytes = report->limit_bytes;
    use->used_bytes = report->used_bytes;
    use->free_bytes = report->free_bytes;
    use->slab_bytes = report->slab_bytes;
    use->quarantine_bytes = report->quarantine_bytes;
    use->stray_bytes = report->stray_bytes;
    use->growth_bytes = report->growth_bytes;
    use->public_bytes = report->public_bytes;
}

static void fill_occupancy_row(Kvkeep__V1__OccupancyRow *row, Kvkeep__V1__BlockCounts *counts,
                               const struct kvk_group_report *report)
{
    kvkeep__v1__occupancy_row__init(row);
    kvkeep__v1__block_counts__init(counts);
    row->tenant = tenant_name(report->tenant);
    row->space_id = report->space_id;
    row->model = kvk_rpc_text(report->model);
    row->group = report->group;
    row->is_public = report->is_public;
    row->block_bytes = report->block_bytes;
    row->device_blocks = report->tier_blocks[KVK_TIER_DEVICE];
    row->host_blocks = report->tier_blocks[KVK_TIER_HOST];
    row->device_bytes = report->tier_bytes[KVK_TIER_DEVICE];
    row->host_bytes = report->tier_bytes[KVK_TIER_HOST];
    row->disk_blocks = report->tier_blocks[KVK_TIER_DISK];
    row->disk_bytes = report->tier_bytes[KVK_TIER_DISK];
    counts->reserved = report->state_counts[KVK_BLOCK_RESERVED];
    counts->active = report->state_counts[KVK_BLOCK_ACTIVE];
    counts->sealed = report->state_counts[KVK_BLOCK_SEALED];
    counts->shared = report->state_counts[KVK_BLOCK_SHARED];
    counts->evictable = report->state_counts[KVK_BLOCK_EVICTABLE];
    counts->hollow = report->state_counts[KVK_BLOCK_HOLLOW];
    row->counts = counts;
}

static void fill_disk_state(Kvkeep__V1__DiskState *state, const struct kvk_disk_report *report)
{
    kvkeep__v1__disk_state__init(state);
    state->state = kvk_rpc_text(report->state);
    state->path = kvk_rpc_text(report->path);
    state->reason = kvk_rpc_text(report->reason);
    state->queued_blocks = report->queued;
    state->leaving_slots = report->leaving;
    state->read_bytes_per_second = report->read_rate;
    state->write_bytes_per_second = report->write_rate;
    state->errors = report->read_errors + report->write_errors + report->sync_errors +
                    report->short_reads + report->full_errors;
}

static void fill_remote_store(Kvkeep__V1__RemoteStore *store,
                              const struct kvk_remote_report *report)
{
    kvkeep__v1__remote_store__init(store);
    store->state = kvk_rpc_text(kvk_remote_state_name(report->health.state));
    store->reason = kvk_rpc_text(report->health.reason);
    store->nodes = report->health.node_count;
    store->nodes_away = report->health.node_away_count;
    store->prompts_waiting = report->asks_waiting;
    store->blocks_waiting = report->send_waiting;
    store->fetch_bytes_per_second = report->health.fetch_rate;
    store->store_bytes_per_second = report->health.store_rate;
    store->fetched_tokens = report->stats.fetched_tokens;
    store->fetched_bytes = report->stats.fetched_bytes;
    store->sent_bytes = report->stats.sent_bytes;
    store->spaces = report->spaces;
    store->spaces_out = report->spaces_out;
}

static void fill_metadata(Kvkeep__V1__TenantMetadata *row, Kvkeep__V1__MetadataUse *uses,
                          Kvkeep__V1__MetadataUse **pointers,
                          const struct kvk_metadata_report *report)
{
    kvkeep__v1__tenant_metadata__init(row);
    row->tenant = tenant_name(report->tenant);
    row->bytes = report->bytes;
    row->limit_bytes = report->limit_bytes;
    row->n_uses = KVK_METADATA_KINDS;
    row->uses = pointers;
    for (int i = 0; i < KVK_METADATA_KINDS; i++) {
        kvkeep__v1__metadata_use__init(&uses[i]);
        uses[i].kind = kvk_rpc_text(kvk_metadata_name((enum kvk_metadata_kind)i));
        uses[i].count = report->kinds[i].count;
        uses[i].count_limit = report->kinds[i].count_limit;
        uses[i].bytes = report->kinds[i].bytes;
        pointers[i] = &uses[i];
    }
}

static enum kvk_status take_metadata(struct kvk_rpc_run *run,
                                     const struct kvk_metadata_report *reports, size_t count,
                                     Kvkeep__V1__GetOccupancyResponse *response,
                                     struct kvk_error *error)
{
    struct kvk_rpc_arena *arena = &run->memory->arena;
    size_t kinds = count * KVK_METADATA_KINDS;
    void **pointers = NULL;
    Kvkeep__V1__TenantMetadata *rows = take_rows(run, count, sizeof(*rows), &pointers);
    Kvkeep__V1__MetadataUse *uses = kvk_rpc_arena_take_extra(arena, kinds * sizeof(*uses));
    Kvkeep__V1__MetadataUse **use_pointers =
        kvk_rpc_arena_take_extra(arena, kinds * sizeof(*use_pointers));
    if (rows == NULL || uses == NULL || use_pointers == NULL) {
        return no_memory(error);
    }
    for (size_t i = 0; i < count; i++) {
        fill_metadata(&rows[i], &uses[i * KVK_METADATA_KINDS],
                      &use_pointers[i * KVK_METADATA_KINDS], &reports[i]);
    }
    response->n_metadata = count;
    response->metadata = (Kvkeep__V1__TenantMetadata **)pointers;
    return KVK_OK;
}

static void fill_device_state(Kvkeep__V1__DeviceState *state,
                              const struct kvk_device_health *health)
{
    kvkeep__v1__device_state__init(state);
    state->lost = health->lost;
    state->reason = kvk_rpc_text(health->reason);
    state->memory_failures = health->memory_failures;
    state->call_failures = health->call_failures;
}

static enum kvk_status reply_occupancy(struct kvk_rpc_run *run,
                                       const struct kvk_tier_report tiers[KVK_TIER_COUNT],
                                       const struct kvk_group_report *reports, size_t count,
                                       const struct kvk_metadata_report *metadata,
                                       size_t metadata_count, struct kvk_error *error)
{
    Kvkeep__V1__GetOccupancyResponse response = KVKEEP__V1__GET_OCCUPANCY_RESPONSE__INIT;
    Kvkeep__V1__TierUse uses[KVK_TIER_COUNT];
    Kvkeep__V1__TierUse *use_pointers[KVK_TIER_COUNT];
    for (unsigned i = 0; i < KVK_TIER_COUNT; i++) {
        fill_tier_use(&uses[i], (enum kvk_tier)i, &tiers[i]);
        use_pointers[i] = &uses[i];
    }
    void **pointers = NULL;
    Kvkeep__V1__OccupancyRow *rows = take_rows(run, count, sizeof(*rows), &pointers);
    Kvkeep__V1__BlockCounts *counts =
        kvk_rpc_arena_take_extra(&run->memory->arena, count * sizeof(*counts));
    if (rows == NULL || counts == NULL) {
        return no_memory(error);
    }
    for (size_t i = 0; i < count; i++) {
        fill_occupancy_row(&rows[i], &counts[i], &reports[i]);
    }
    /* The disk's only where there is one: it comes last. */
    response.n_tiers =
        tiers[KVK_TIER_DISK].limit_bytes > 0 ? KVK_TIER_COUNT : KVK_MEMORY_TIER_COUNT;
    response.tiers = use_pointers;
    Kvkeep__V1__DiskState disk;
    struct kvk_disk_report disk_report;
    kvk_disk_report(run->rpc->cache, &disk_report);
    if (disk_report.present) {
        fill_disk_state(&disk, &disk_report);
        response.disk = &disk;
    }
    Kvkeep__V1__RemoteStore store;
    struct kvk_remote_report store_report;
    kvk_remote_report_unlocked(run->rpc->cache, &store_report);
    if (store_report.present) {
        fill_remote_store(&store, &store_report);
        response.remote = &store;
    }
    Kvkeep__V1__DeviceState device;
    struct kvk_device_health health;
    kvk_device_health_unlocked(run->rpc->cache, &health);
    if (health.can_fail) {
        fill_device_state(&device, &health);
        response.device = &device;
    }
    response.n_rows = count;
    response.rows = (Kvkeep__V1__OccupancyRow **)pointers;
    enum kvk_status status = take_metadata(run, metadata, metadata_count, &response, error);
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

KVK_RPC_HANDLER(kvk_rpc_get_occupancy)
{
    const Kvkeep__V1__GetOccupancyRequest *asked = (const Kvkeep__V1__GetOccupancyRequest *)message;
    struct kvk_view tenant;
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    struct kvk_group_report *reports = NULL;
    struct kvk_metadata_report *metadata = NULL;
    uint32_t count = 0;
    uint32_t metadata_count = 0;
    enum kvk_status status = check_tenant(&asked->tenant, &tenant, error);
    if (status == KVK_OK) {
        status = kvk_report_occupancy(run->rpc->cache, &run->caller, tenant, tiers, &reports,
                                      &count, error);
    }
    if (status == KVK_OK) {
        status = kvk_report_metadata(run->rpc->cache, &run->caller, tenant, &metadata,
                                     &metadata_count, error);
    }
    if (status == KVK_OK) {
        status = reply_occupancy(run, tiers, reports, count, metadata, metadata_count, error);
    }
    free(reports);
    free(metadata);
    return status;
}

/* ---- ListSequences ---- */

static void fill_sequence_info(Kvkeep__V1__SequenceInfo *row,
                               const struct kvk_sequence_report *report)
{
    kvkeep__v1__sequence_info__init(row);
    row->sequence_id = report->sequence_id;
    row->tenant = tenant_name(report->tenant);
    row->space_id = report->space_id;
    row->instance_id = report->instance_id;
    row->state = (Kvkeep__V1__SequenceState)report->state;
    row->length = report->length;
    row->sealed_tokens = report->sealed_tokens;
    row->cached_tokens = report->cached_tokens;
    row->draft_tokens = report->draft_tokens;
    row->blocks = report->blocks;
    row->shared_blocks = report->shared_blocks;
    row->device_bytes = report->tier_bytes[KVK_TIER_DEVICE];
    row->host_bytes = report->tier_bytes[KVK_TIER_HOST];
    row->age_ms = report->age_ms;
    row->growth_tokens = report->growth_tokens;
}

static enum kvk_status reply_sequences(struct kvk_rpc_run *run,
                                       const struct kvk_sequence_report *reports, size_t count,
                                       bool more, struct kvk_error *error)
{
    Kvkeep__V1__ListSequencesResponse response = KVKEEP__V1__LIST_SEQUENCES_RESPONSE__INIT;
    void **pointers = NULL;
    Kvkeep__V1__SequenceInfo *rows = take_rows(run, count, sizeof(*rows), &pointers);
    if (rows == NULL) {
        return no_memory(error);
    }
    for (size_t i = 0; i < count; i++) {
        fill_sequence_info(&rows[i], &reports[i]);
    }
    response.n_sequences = count;
    response.sequences = (Kvkeep__V1__SequenceInfo **)pointers;
    response.more = more;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_list_sequences)
{
    const Kvkeep__V1__ListSequencesRequest *asked =
        (const Kvkeep__V1__ListSequencesRequest *)message;
    struct kvk_view tenant;
    struct kvk_sequence_report *reports = NULL;
    uint32_t count = 0;
    bool more = false;
    enum kvk_status status = check_tenant(&asked->tenant, &tenant, error);
    if (status == KVK_OK) {
        status = kvk_report_sequences(run->rpc->cache, &run->caller, tenant, asked->after_id,
                                      row_limit(asked->limit, ROWS_DEFAULT, ROWS_MAX), &reports,
                                      &count, &more, error);
    }
    if (status == KVK_OK) {
        status = reply_sequences(run, reports, count, more, error);
        free(reports);
    }
    return status;
}

/* ---- ListLeases ---- */

static void fill_lease_info(Kvkeep__V1__LeaseInfo *row, const struct kvk_lease_report *report)
{
    kvkeep__v1__lease_info__init(row);
    row->lease_id = report->lease_id;
    row->tenant = tenant_name(report->tenant);
    row->space_id = report->space_id;
    row->instance_id = report->instance_id;
    row->instance_name = kvk_rpc_text(report->instance_name);
    row->tokens = report->tokens;
    row->blocks = report->blocks;
    row->age_ms = report->age_ms;
    row->ttl_ms = report->ttl_ms;
    row->copy_pin = report->copy_pin;
    row->open_transfers = report->open_transfers;
}

static enum kvk_status reply_leases(struct kvk_rpc_run *run, const struct kvk_lease_report *reports,
                                    size_t count, bool more, struct kvk_error *error)
{
    Kvkeep__V1__ListLeasesResponse response = KVKEEP__V1__LIST_LEASES_RESPONSE__INIT;
    void **pointers = NULL;
    Kvkeep__V1__LeaseInfo *rows = take_rows(run, count, sizeof(*rows), &pointers);
    if (rows == NULL) {
        return no_memory(error);
    }
    for (size_t i = 0; i < count; i++) {
        fill_lease_info(&rows[i], &reports[i]);
    }
    response.n_leases = count;
    response.leases = (Kvkeep__V1__LeaseInfo **)pointers;
    response.more = more;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_list_leases)
{
    const Kvkeep__V1__ListLeasesRequest *asked = (const Kvkeep__V1__ListLeasesRequest *)message;
    struct kvk_view tenant;
    struct kvk_lease_report *reports = NULL;
    uint32_t count = 0;
    bool more = false;
    enum kvk_status status = check_tenant(&asked->tenant, &tenant, error);
    if (status == KVK_OK) {
        status = kvk_report_leases(run->rpc->cache, &run->caller, tenant, asked->after_id,
                                   row_limit(asked->limit, ROWS_DEFAULT, ROWS_MAX), &reports,
                                   &count, &more, error);
    }
    if (status == KVK_OK) {
        status = reply_leases(run, reports, count, more, error);
        free(reports);
    }
    return status;
}

/* ---- ListInstances: rows of one instance stand together ---- */

static void fill_session_info(Kvkeep__V1__SessionInfo *row, const struct kvk_session_report *report)
{
    kvkeep__v1__session_info__init(row);
    row->session_id = report->session_id;
    row->rank = report->rank;
    row->pid = report->pid > 0 ? (uint64_t)report->pid : 0;
    row->uid = report->uid;
    row->side_socket = report->side_socket;
    row->mapped_bytes = report->mapped_bytes;
    row->connected = report->connected;
}

static void fill_instance_info(Kvkeep__V1__InstanceInfo *row,
                               const struct kvk_session_report *report)
{
    kvkeep__v1__instance_info__init(row);
    row->instance_id = report->instance_id;
    row->tenant = tenant_name(report->tenant);
    row->name = kvk_rpc_text(report->instance_name);
    row->age_ms = report->instance_age_ms;
    row->sequences = report->instance_sequences;
    row->leases = report->instance_leases;
    row->quarantine_blocks = report->instance_quarantine_blocks;
}

static enum kvk_status reply_instances(struct kvk_rpc_run *run,
                                       const struct kvk_session_report *reports, size_t count,
                                       struct kvk_error *error)
{
    Kvkeep__V1__ListInstancesResponse response = KVKEEP__V1__LIST_INSTANCES_RESPONSE__INIT;
    void **session_pointers = NULL;
    void **pointers = NULL;
    Kvkeep__V1__SessionInfo *sessions = take_rows(run, count, sizeof(*sessions), &session_pointers);
    Kvkeep__V1__InstanceInfo *rows = take_rows(run, count, sizeof(*rows), &pointers);
    if (sessions == NULL || rows == NULL) {
        return no_memory(error);
    }
    for (size_t i = 0; i < count; i++) {
        fill_session_info(&sessions[i], &reports[i]);
        bool first = i == 0 || reports[i].instance_id != reports[i - 1].instance_id;
        if (first) {
            fill_instance_info(&rows[response.n_instances], &reports[i]);
            rows[response.n_instances].sessions = (Kvkeep__V1__SessionInfo **)session_pointers + i;
            response.n_instances++;
        }
        rows[response.n_instances - 1].n_sessions++;
    }
    response.instances = (Kvkeep__V1__InstanceInfo **)pointers;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_list_instances)
{
    const Kvkeep__V1__ListInstancesRequest *asked =
        (const Kvkeep__V1__ListInstancesRequest *)message;
    struct kvk_view tenant;
    struct kvk_session_report *reports = NULL;
    uint32_t count = 0;
    enum kvk_status status = check_tenant(&asked->tenant, &tenant, error);
    if (status == KVK_OK) {
        status =
            kvk_report_sessions(run->rpc->cache, &run->caller, tenant, &reports, &count, error);
    }
    if (status == KVK_OK) {
        status = reply_instances(run, reports, count, error);
        free(reports);
    }
    return status;
}

/* ---- GetBlock ---- */

static enum kvk_status reply_block(struct kvk_rpc_run *run, const struct kvk_block_report *report,
                                   struct kvk_error *error)
{
    Kvkeep__V1__GetBlockResponse response = KVKEEP__V1__GET_BLOCK_RESPONSE__INIT;
    response.block_id = report->block_id;
    response.key = kvk_rpc_bytes(&report->key, sizeof(report->key));
    response.state = kvk_rpc_text(kvk_block_state_name(report->state));
    response.on_device = (report->tier_mask >> KVK_TIER_DEVICE & 1) != 0;
    response.on_host = (report->tier_mask >> KVK_TIER_HOST & 1) != 0;
    response.on_disk = (report->tier_mask >> KVK_TIER_DISK & 1) != 0;
    response.device_slot = report->slot[KVK_TIER_DEVICE];
    response.host_slot = report->slot[KVK_TIER_HOST];
    response.holds = report->holds;
    response.lease_holds = report->lease_holds;
    response.device_pins = report->pins[KVK_TIER_DEVICE];
    response.host_pins = report->pins[KVK_TIER_HOST];
    response.children = report->children;
    response.uses = report->uses;
    response.idle_ms = report->idle_ms;
    response.cost = report->cost;
    response.score = report->score;
    response.position = report->position;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_get_block)
{
    const Kvkeep__V1__GetBlockRequest *asked = (const Kvkeep__V1__GetBlockRequest *)message;
    struct kvk_prompt prefix;
    struct kvk_block_report report;
    enum kvk_status status = kvk_rpc_check_id(asked->space_id, "space_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_prompt(run, asked->prefix, "prefix", &prefix, error);
    }
    if (status == KVK_OK && prefix.token_count == 0) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "prefix.tokens",
                          "prefix.tokens names no block");
    }
    if (status == KVK_OK) {
        status = kvk_report_block(run->rpc->cache, &run->caller, asked->space_id, asked->group,
                                  &prefix, &report, error);
    }
    return status == KVK_OK ? reply_block(run, &report, error) : status;
}

/* ---- Why ---- */

struct rpc_why {
    struct kvk_refusal refusals[REFUSALS_MAX]; /* [count] */
    uint32_t count;
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    char advice[ADVICE_SIZE];
};

/* A refusal's detail, and the advice that it had. */
struct refusal_detail {
    Kvkeep__V1__ErrorDetail message;
    struct kvk_rpc_advice advice;
};

static void fill_refusal(Kvkeep__V1__Refusal *row, struct refusal_detail *made,
                         const struct kvk_refusal *refusal, uint64_t now_ns)
{
    Kvkeep__V1__ErrorDetail *detail = &made->message;
    kvkeep__v1__refusal__init(row);
    kvkeep__v1__error_detail__init(detail);
    detail->advice = kvk_rpc_fill_advice(&made->advice, &refusal->error.advice);
    row->age_ms = now_ns > refusal->time_ns ? (now_ns - refusal->time_ns) / KVK_NS_PER_MS : 0;
    row->tenant = tenant_name(refusal->tenant);
    row->call = kvk_rpc_text(refusal->call);
    row->sequence_id = refusal->sequence_id;
    row->needed_bytes = refusal->needed_bytes;
    detail->cause = (Kvkeep__V1__Cause)refusal->error.cause;
    detail->field = kvk_rpc_text(refusal->error.field);
    detail->value = refusal->error.value;
    detail->limit = refusal->error.limit;
    detail->retry_after_ms = refusal->error.retry_after_ms;
    detail->message = kvk_rpc_text(refusal->error.text);
    row->detail = detail;
}

static void fill_tier_why(Kvkeep__V1__TierWhy *row, enum kvk_tier tier,
                          const struct kvk_tier_report *report)
{
    kvkeep__v1__tier_why__init(row);
    row->tier = (Kvkeep__V1__Tier)(tier + 1);
    row->limit_bytes = report->limit_bytes;
    row->active_bytes = report->active_bytes;
    row->leased_bytes = report->leased_bytes;
    row->evictable_bytes = report->evictable_bytes;
    row->growth_bytes = report->growth_bytes;
    row->copying_bytes = report->copying_bytes;
    row->quarantine_bytes = report->quarantine_bytes;
    row->scattered_bytes = report->scattered_bytes;
    row->largest_admissible_bytes = report->largest_admissible_bytes;
}

static enum kvk_status reply_why(struct kvk_rpc_run *run, const struct rpc_why *why,
                                 struct kvk_error *error)
{
    Kvkeep__V1__WhyResponse response = KVKEEP__V1__WHY_RESPONSE__INIT;
    Kvkeep__V1__TierWhy tiers[KVK_TIER_COUNT];
    Kvkeep__V1__TierWhy *tier_pointers[KVK_TIER_COUNT];
    for (unsigned i = 0; i < KVK_TIER_COUNT; i++) {
        fill_tier_why(&tiers[i], (enum kvk_tier)i, &why->tiers[i]);
        tier_pointers[i] = &tiers[i];
    }
    void **pointers = NULL;
    Kvkeep__V1__Refusal *rows = take_rows(run, why->count, sizeof(*rows), &pointers);
    struct refusal_detail *details =
        kvk_rpc_arena_take_extra(&run->memory->arena, why->count * sizeof(*details));
    if (rows == NULL || details == NULL) {
        return no_memory(error);
    }
    uint64_t now_ns = kvk_clock_now(run->rpc->clock);
    for (uint32_t i = 0; i < why->count; i++) {
        fill_refusal(&rows[i], &details[i], &why->refusals[i], now_ns);
    }
    response.n_refusals = why->count;
    response.refusals = (Kvkeep__V1__Refusal **)pointers;
    response.n_tiers =
        why->tiers[KVK_TIER_DISK].limit_bytes > 0 ? KVK_TIER_COUNT : KVK_MEMORY_TIER_COUNT;
    response.tiers = tier_pointers;
    response.advice = kvk_rpc_text(why->advice);
    if (run->caller.credential->admin) {
        kvk_report_memory(run->rpc->cache, &response.metadata_bytes, &response.workspace_bytes);
    }
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_why)
{
    const Kvkeep__V1__WhyRequest *asked = (const Kvkeep__V1__WhyRequest *)message;
    struct kvk_view tenant;
    enum kvk_status status = check_tenant(&asked->tenant, &tenant, error);
    if (status != KVK_OK) {
        return status;
    }
    struct rpc_why *why = kvk_rpc_arena_take_extra(&run->memory->arena, sizeof(*why));
    if (why == NULL) {
        return no_memory(error);
    }
    why->count = 0;
    why->advice[0] = '\0';
    status =
        kvk_report_why(run->rpc->cache, &run->caller, tenant, asked->sequence_id, why->refusals,
                       (uint32_t)row_limit(asked->limit, REFUSALS_DEFAULT, REFUSALS_MAX),
                       &why->count, why->tiers, why->advice, sizeof(why->advice), error);
    return status == KVK_OK ? reply_why(run, why, error) : status;
}
