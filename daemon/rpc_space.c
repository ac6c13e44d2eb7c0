/*
 * OpenSpace, ListSpaces, Invalidate and MapMemory.
 */
#include <string.h>

#include "base/assert.h"
#include "daemon/report.h"
#include "daemon/rpc_private.h"

/* ---- OpenSpace ---- */

KVK_RPC_HANDLER(kvk_rpc_open_space)
{
    struct kvk_space_request request;
    struct kvk_space_reply reply;
    enum kvk_status status =
        kvk_rpc_check_space((const Kvkeep__V1__OpenSpaceRequest *)message, &request, error);
    if (status == KVK_OK) {
        status = kvk_space_open(run->rpc->cache, &run->caller, &request, &reply, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__OpenSpaceResponse response = KVKEEP__V1__OPEN_SPACE_RESPONSE__INIT;
    Kvkeep__V1__GroupInfo groups[KVK_GROUP_COUNT_MAX];
    Kvkeep__V1__GroupInfo *pointers[KVK_GROUP_COUNT_MAX];
    for (uint32_t i = 0; i < reply.group_count; i++) {
        kvkeep__v1__group_info__init(&groups[i]);
        groups[i].block_bytes = reply.groups[i].block_bytes;
        groups[i].n_shard_bytes = reply.groups[i].shard_count;
        groups[i].shard_bytes = reply.groups[i].shard_bytes;
        groups[i].n_rank_shard = reply.groups[i].rank_count;
        groups[i].rank_shard = reply.groups[i].rank_shard;
        groups[i].disk_format = (Kvkeep__V1__Format)reply.groups[i].disk_format;
        groups[i].disk_block_bytes = reply.groups[i].disk_block_bytes;
        groups[i].host_format = (Kvkeep__V1__Format)reply.groups[i].host_format;
        groups[i].host_block_bytes = reply.groups[i].host_block_bytes;
        pointers[i] = &groups[i];
    }
    response.space_id = reply.space_id;
    response.created = reply.created;
    response.partial_reuse = reply.partial_reuse;
    response.n_groups = reply.group_count;
    response.groups = pointers;
    return kvk_rpc_reply(run, &response.base, error);
}

/* ---- ListSpaces ---- */

/* All that one row points to. */
struct rpc_space_row {
    Kvkeep__V1__SpaceInfo info;
    Kvkeep__V1__Identity identity;
    Kvkeep__V1__Pair extra[KVK_IDENTITY_EXTRA_MAX];
    Kvkeep__V1__Pair *extra_pointers[KVK_IDENTITY_EXTRA_MAX];
    Kvkeep__V1__LayerGroup groups[KVK_GROUP_COUNT_MAX];
    Kvkeep__V1__LayerGroup *group_pointers[KVK_GROUP_COUNT_MAX];
};

static ProtobufCBinaryData *identity_part(Kvkeep__V1__Identity *identity,
                                          enum kvk_identity_part part)
{
    switch (part) {
    case KVK_IDENTITY_MODEL:
        return &identity->model;
    case KVK_IDENTITY_REVISION:
        return &identity->revision;
    case KVK_IDENTITY_TOKENIZER:
        return &identity->tokenizer_digest;
    case KVK_IDENTITY_TEMPLATE:
        return &identity->template_digest;
    case KVK_IDENTITY_POSITION:
        return &identity->position_encoding;
    case KVK_IDENTITY_ADAPTER_NAME:
        return &identity->adapter_name;
    case KVK_IDENTITY_ADAPTER_ID:
        return &identity->adapter_id;
    case KVK_IDENTITY_ADAPTER_VERSION:
        return &identity->adapter_version;
    case KVK_IDENTITY_KV_FORMAT:
        return &identity->kv_format;
    case KVK_IDENTITY_MASK:
        return &identity->mask_rule;
    }
    KVK_UNREACHABLE();
}

static void fill_identity(struct rpc_space_row *row, const struct kvk_space_report *report)
{
    Kvkeep__V1__Identity *identity = &row->identity;
    kvkeep__v1__identity__init(identity);
    size_t offset = 0;
    uint32_t tag;
    struct kvk_view part;
    while (kvk_identity_next(report->identity, report->identity_size, &offset, &tag, &part)) {
        ProtobufCBinaryData bytes = kvk_rpc_bytes(part.data, part.size);
        if (tag == KVK_IDENTITY_EXTRA_NAME) {
            KVK_ASSERT(identity->n_extra < KVK_IDENTITY_EXTRA_MAX);
            Kvkeep__V1__Pair *pair = &row->extra[identity->n_extra];
            kvkeep__v1__pair__init(pair);
            pair->name = bytes;
            row->extra_pointers[identity->n_extra++] = pair;
        } else if (tag == KVK_IDENTITY_EXTRA_VALUE) {
            KVK_ASSERT(identity->n_extra > 0);
            row->extra[identity->n_extra - 1].value = bytes;
        } else {
            *identity_part(identity, (enum kvk_identity_part)tag) = bytes;
        }
    }
    identity->extra = row->extra_pointers;
}

static void fill_group(Kvkeep__V1__LayerGroup *group, const struct kvk_geometry *geometry)
{
    kvkeep__v1__layer_group__init(group);
    group->layers = geometry->layers;
    group->kv_heads = geometry->kv_heads;
    group->head_size_k = geometry->head_size_k;
    group->head_size_v = geometry->head_size_v;
    group->format_k = (Kvkeep__V1__Format)geometry->format_k;
    group->format_v = (Kvkeep__V1__Format)geometry->format_v;
    group->layout = (Kvkeep__V1__Layout)geometry->layout;
    group->attention = (Kvkeep__V1__Attention)geometry->attention;
    group->latent = geometry->latent;
    group->window = geometry->window;
    group->sinks = geometry->sinks;
    group->opaque_bytes = geometry->opaque_bytes;
}

static void fill_space(struct rpc_space_row *row, const struct kvk_space_report *report)
{
    Kvkeep__V1__SpaceInfo *info = &row->info;
    kvkeep__v1__space_info__init(info);
    fill_identity(row, report);
    for (uint32_t i = 0; i < report->group_count; i++) {
        fill_group(&row->groups[i], &report->groups[i]);
        row->groups[i].disk_format = (Kvkeep__V1__Format)report->disk_formats[i];
        row->groups[i].host_format = (Kvkeep__V1__Format)report->host_formats[i];
        row->group_pointers[i] = &row->groups[i];
    }
    info->space_id = report->space_id;
    info->tenant = kvk_rpc_text(report->tenant != NULL ? report->tenant->name : "");
    info->identity = &row->identity;
    info->block_tokens = report->block_tokens;
    info->n_groups = report->group_count;
    info->groups = row->group_pointers;
    info->tensor_shards = report->groups[0].tensor_shards;
    info->pipeline_shards = report->groups[0].pipeline_shards;
    info->blocks = report->blocks;
    info->bytes = report->bytes;
    info->queries = report->queries;
    info->query_tokens = report->query_tokens;
    info->hit_tokens = report->hit_tokens;
    info->generation = report->generation;
    info->is_public = report->is_public;
    info->partial_reuse = report->partial_reuse;
    info->mode = kvk_rpc_give_mode((enum kvk_tenant_mode)report->mode);
}

static enum kvk_status reply_spaces(struct kvk_rpc_run *run, const struct kvk_space_report *reports,
                                    uint32_t count, struct kvk_error *error)
{
    struct kvk_rpc_arena *arena = &run->memory->arena;
    struct rpc_space_row *rows = kvk_rpc_arena_take_extra(arena, count * sizeof(*rows));
    Kvkeep__V1__SpaceInfo **pointers = kvk_rpc_arena_take_extra(arena, count * sizeof(*pointers));
    if (rows == NULL || pointers == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    for (uint32_t i = 0; i < count; i++) {
        fill_space(&rows[i], &reports[i]);
        pointers[i] = &rows[i].info;
    }
    Kvkeep__V1__ListSpacesResponse response = KVKEEP__V1__LIST_SPACES_RESPONSE__INIT;
    response.n_spaces = count;
    response.spaces = pointers;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_list_spaces)
{
    const Kvkeep__V1__ListSpacesRequest *asked = (const Kvkeep__V1__ListSpacesRequest *)message;
    struct kvk_view tenant;
    struct kvk_space_report *reports = NULL;
    uint32_t count = 0;
    enum kvk_status status =
        kvk_rpc_check_name(&asked->tenant, 0, KVK_NAME_SIZE - 1, "tenant", &tenant, error);
    if (status == KVK_OK) {
        status = kvk_report_spaces(run->rpc->cache, &run->caller, tenant, &reports, &count, error);
    }
    if (status == KVK_OK) {
        status = reply_spaces(run, reports, count, error);
        kvk_report_spaces_free(reports, count);
    }
    return status;
}

/* ---- Invalidate ---- */

static enum kvk_status check_invalidate(struct kvk_rpc_run *run,
                                        const Kvkeep__V1__InvalidateRequest *message,
                                        struct kvk_invalidate_request *request,
                                        struct kvk_prompt *prefix, struct kvk_error *error)
{
    const struct {
        const ProtobufCBinaryData *bytes;
        const char *field;
        struct kvk_view *view;
    } names[] = {
        {&message->model, "model", &request->model},
        {&message->revision, "revision", &request->revision},
        {&message->adapter_name, "adapter_name", &request->adapter_name},
        {&message->adapter_id, "adapter_id", &request->adapter_id},
        {&message->adapter_version, "adapter_version", &request->adapter_version},
        {&message->position_encoding, "position_encoding", &request->position_encoding},
        {&message->mask_rule, "mask_rule", &request->mask_rule},
    };
    enum kvk_status status = kvk_rpc_check_name(&message->tenant, 0, KVK_NAME_SIZE - 1, "tenant",
                                                &request->tenant, error);
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]) && status == KVK_OK; i++) {
        status = kvk_rpc_check_name(names[i].bytes, 0, KVK_IDENTITY_PART_SIZE_MAX, names[i].field,
                                    names[i].view, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    if (message->kv_format.len > KVK_IDENTITY_PART_SIZE_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "kv_format",
                              message->kv_format.len, KVK_IDENTITY_PART_SIZE_MAX,
                              "kv_format is too long");
    }
    request->kv_format =
        (struct kvk_view){.data = message->kv_format.data, .size = message->kv_format.len};
    request->space_id = message->space_id;
    request->by_salt = message->by_salt;
    request->salt = (struct kvk_view){.data = message->salt.data, .size = message->salt.len};
    if (message->salt.len > run->rpc->config->salt_bytes) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "salt", message->salt.len,
                              run->rpc->config->salt_bytes, "salt is too long");
    }
    if (message->prefix != NULL && message->space_id == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "space_id",
                        "space_id is required with prefix");
    }
    if (message->by_salt && message->prefix != NULL) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "by_salt",
                        "by_salt does not go with prefix, which has its own salt");
    }
    if (message->prefix == NULL) {
        return KVK_OK;
    }
    request->prefix = prefix;
    status = kvk_rpc_check_prompt(run, message->prefix, "prefix", prefix, error);
    if (status == KVK_OK && prefix->token_count == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "prefix.tokens",
                        "prefix.tokens names no block");
    }
    return status;
}

KVK_RPC_HANDLER(kvk_rpc_invalidate)
{
    struct kvk_invalidate_request request = {.space_id = 0};
    struct kvk_invalidate_reply reply = {.spaces = 0};
    struct kvk_prompt prefix;
    enum kvk_status status = check_invalidate(run, (const Kvkeep__V1__InvalidateRequest *)message,
                                              &request, &prefix, error);
    if (status == KVK_OK) {
        status = kvk_invalidate(run->rpc->cache, &run->caller, &request, &reply, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__InvalidateResponse response = KVKEEP__V1__INVALIDATE_RESPONSE__INIT;
    response.spaces = reply.spaces;
    response.device_blocks = reply.blocks[KVK_TIER_DEVICE];
    response.host_blocks = reply.blocks[KVK_TIER_HOST];
    response.disk_blocks = reply.blocks[KVK_TIER_DISK];
    response.held_blocks = reply.held_blocks;
    response.store_pending_spaces = reply.store_pending;
    return kvk_rpc_reply(run, &response.base, error);
}

/* ---- MapMemory ---- */

static enum kvk_status check_map(const struct kvk_rpc *rpc,
                                 const Kvkeep__V1__MapMemoryRequest *message,
                                 struct kvk_map_request *request, struct kvk_error *error)
{
    _Static_assert((int)KVK_MAP_SLOTS == (int)KVKEEP__V1__MAP_MEMORY_REQUEST__KIND__KIND_SLOTS &&
                       (int)KVK_MAP_SCRATCH ==
                           (int)KVKEEP__V1__MAP_MEMORY_REQUEST__KIND__KIND_SCRATCH,
                   "numbers agree");
    enum kvk_status status = kvk_rpc_check_id(message->session_id, "session_id", error);
    if (status != KVK_OK) {
        return status;
    }
    request->session_id = message->session_id;
    request->kind = (enum kvk_map_kind)message->kind;
    request->read_only = message->read_only;
    if ((int)message->kind == KVK_MAP_SCRATCH) {
        request->size_bytes = message->size_bytes;
        return kvk_rpc_check_count(message->size_bytes, rpc->config->scratch_bytes, "size_bytes",
                                   error);
    }
    if ((int)message->kind != KVK_MAP_SLOTS) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "kind", (uint32_t)message->kind,
                              0, "kind is not a known value");
    }
    status = kvk_rpc_check_id(message->space_id, "space_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_tier(message->tier, "tier", &request->tier, error);
    }
    request->space_id = message->space_id;
    request->group = message->group;
    request->rank = message->rank;
    return status;
}

KVK_RPC_HANDLER(kvk_rpc_map_memory)
{
    struct kvk_map_request request = {.session_id = 0};
    struct kvk_map_reply reply;
    enum kvk_status status =
        check_map(run->rpc, (const Kvkeep__V1__MapMemoryRequest *)message, &request, error);
    if (status == KVK_OK) {
        status = kvk_session_map(run->rpc->cache, &run->caller, &request, &reply, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__MapMemoryResponse response = KVKEEP__V1__MAP_MEMORY_RESPONSE__INIT;
    response.map_token = kvk_rpc_bytes(reply.map_token, sizeof(reply.map_token));
    response.size_bytes = reply.size_bytes;
    response.slot_stride = reply.slot_stride;
    response.slot_count = reply.slot_count;
    response.map_id = reply.map_id;
    response.by_slabs = reply.by_slabs;
    response.tier = (Kvkeep__V1__Tier)(reply.tier + 1);
    return kvk_rpc_reply(run, &response.base, error);
}
