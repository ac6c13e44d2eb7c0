/*
 * GetUsage, and the rate of each tenant's requests, which is asked before any work is done.
 *
 * Whose request it is: a credential of one tenant says it without looking; else the session or the
 * space that the request names. What gives back (Close, Release, EndTransfer) and what an admin
 * asks is let in always: refusing it would free nothing.
 */
#include <stdlib.h>
#include <string.h>

#include "daemon/report_usage.h"
#include "daemon/rpc_private.h"

/* ---- GetUsage ---- */

#define TIER_ROWS 3

struct usage_row {
    Kvkeep__V1__UsageRow row;
    Kvkeep__V1__TierUsage tiers[TIER_ROWS];
    Kvkeep__V1__TierUsage *tier_pointers[TIER_ROWS];
};

static void fill_row(struct usage_row *row, const struct kvk_usage_report *report)
{
    const struct kvk_tenant_usage *usage = &report->usage;
    kvkeep__v1__usage_row__init(&row->row);
    row->row.tenant = kvk_rpc_text(report->tenant->name);
    for (int i = 0; i < TIER_ROWS; i++) {
        Kvkeep__V1__TierUsage *tier = &row->tiers[i];
        kvkeep__v1__tier_usage__init(tier);
        tier->tier = (Kvkeep__V1__Tier)(i + 1);
        tier->used_bytes = report->used_bytes[i];
        tier->bound_bytes = report->bound_bytes[i];
        tier->guaranteed_bytes = report->quota.guaranteed_bytes[i];
        tier->limit_bytes = report->quota.limit_bytes[i];
        tier->byte_seconds = usage->byte_seconds[i];
        tier->evictions = usage->evictions[i];
        row->tier_pointers[i] = tier;
    }
    row->row.n_tiers = TIER_ROWS;
    row->row.tiers = row->tier_pointers;
    row->row.sequences = report->sequences;
    row->row.leases = report->leases;
    row->row.requests = usage->requests;
    row->row.lookups = usage->lookups;
    row->row.lookup_tokens = usage->lookup_tokens;
    row->row.hit_tokens = usage->hit_tokens;
    row->row.saved_tokens = usage->saved_tokens;
    row->row.sealed_blocks = usage->sealed_blocks;
    row->row.moved_bytes = usage->moved_bytes;
    row->row.limit_evictions = usage->limit_evictions;
    row->row.idle_blocks = usage->idle_blocks;
    row->row.hints_left_out = usage->hints_left_out;
    row->row.refusals = usage->refusals;
    row->row.limit_refusals = usage->limit_refusals;
    row->row.rate_refusals = usage->rate_refusals;
    row->row.partial_hit_tokens = usage->partial_hit_tokens;
}

static enum kvk_status reply_usage(struct kvk_rpc_run *run, const struct kvk_usage_report *reports,
                                   uint32_t count, struct kvk_error *error)
{
    struct kvk_rpc_arena *arena = &run->memory->arena;
    struct usage_row *rows = kvk_rpc_arena_take_extra(arena, (count + 1U) * sizeof(*rows));
    Kvkeep__V1__UsageRow **pointers =
        kvk_rpc_arena_take_extra(arena, (count + 1U) * sizeof(*pointers));
    if (rows == NULL || pointers == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    for (uint32_t i = 0; i < count; i++) {
        fill_row(&rows[i], &reports[i]);
        pointers[i] = &rows[i].row;
    }
    Kvkeep__V1__GetUsageResponse response = KVKEEP__V1__GET_USAGE_RESPONSE__INIT;
    response.n_rows = count;
    response.rows = pointers;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_get_usage)
{
    const Kvkeep__V1__GetUsageRequest *asked = (const Kvkeep__V1__GetUsageRequest *)message;
    struct kvk_view tenant;
    struct kvk_usage_report *reports = NULL;
    uint32_t count = 0;
    enum kvk_status status =
        kvk_rpc_check_name(&asked->tenant, 0, KVK_NAME_SIZE - 1, "tenant", &tenant, error);
    if (status == KVK_OK) {
        status = kvk_report_usage(run->rpc->cache, &run->caller, tenant, &reports, &count, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    status = reply_usage(run, reports, count, error);
    free(reports);
    return status;
}

/* ---- The rate ---- */

/* The message's field of this name, where it has one: a uint64. */
static uint64_t id_in(const ProtobufCMessage *message, const char *name)
{
    const ProtobufCFieldDescriptor *field =
        protobuf_c_message_descriptor_get_field_by_name(message->descriptor, name);
    uint64_t id = 0;
    if (field != NULL && field->type == PROTOBUF_C_TYPE_UINT64 &&
        field->label != PROTOBUF_C_LABEL_REPEATED) {
        memcpy(&id, (const uint8_t *)message + field->offset, sizeof(id));
    }
    return id;
}

bool kvk_rpc_is_rated(const struct kvk_rpc_method *method)
{
    static const char service[] = "/kvkeep.v1.Kvkeep/";
    return method->kind != KVK_METHOD_BIDI &&
           strncmp(method->path, service, sizeof(service) - 1) == 0 &&
           method->handle != kvk_rpc_release && method->handle != kvk_rpc_end_transfer &&
           method->handle != kvk_rpc_close && method->handle != kvk_rpc_get_server_info;
}

enum kvk_status kvk_rpc_rate_take(const struct kvk_rpc_run *run, const struct kvk_rpc_bound *bound,
                                  const ProtobufCMessage *message, struct kvk_error *error)
{
    const struct kvk_credential *credential = run->caller.credential;
    /* An inline call that had to be deferred comes twice, and was counted. */
    bool again = run->caller.may_block && bound->method->class == KVK_CLASS_INLINE;
    if (!bound->rated || again || credential->tenant_count == 0) {
        return KVK_OK;
    }
    bool alone = credential->tenant_count == 1;
    if (alone != (message == NULL)) {
        return KVK_OK; /* decided before unpacking, or only after it */
    }
    const struct kvk_tenant *tenant = credential->tenants[0];
    if (!alone) {
        tenant = kvk_rate_tenant(run->rpc->cache, credential, id_in(message, "session_id"),
                                 id_in(message, "space_id"));
    }
    return tenant == NULL ? KVK_OK : kvk_rate_take(run->rpc->cache, tenant, error);
}
