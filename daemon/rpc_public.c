/* PublishPrefix, UnpublishPrefix, ListPublicPrefixes: what one tenant publishes for all. */
#include <stdio.h>
#include <stdlib.h>

#include "daemon/public.h"
#include "daemon/rpc_private.h"

#define OBJECT_SIZE 64
#define DETAILS_SIZE 160

/* Who published or withdrew what; not its tokens. */
static void audit(struct kvk_rpc_run *run, const char *kind, uint64_t id, const char *details,
                  enum kvk_status status, const struct kvk_error *error)
{
    char object[OBJECT_SIZE];
    (void)snprintf(object, sizeof(object), "%s=%llu", kind, (unsigned long long)id);
    kvk_rpc_audit(run, object, details, status, error);
}

KVK_RPC_HANDLER(kvk_rpc_publish_prefix)
{
    const Kvkeep__V1__PublishPrefixRequest *asked =
        (const Kvkeep__V1__PublishPrefixRequest *)message;
    struct kvk_publish_request request = {.space_id = asked->space_id};
    struct kvk_publish_reply reply = {.public_id = 0};
    char details[DETAILS_SIZE] = "";
    enum kvk_status status = kvk_rpc_check_id(asked->space_id, "space_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_prompt(run, asked->prompt, "prompt", &request.prompt, error);
    }
    if (status == KVK_OK) {
        status = kvk_public_publish(run->rpc->cache, &run->caller, &request, &reply, error);
    }
    if (status == KVK_OK) {
        (void)snprintf(details, sizeof(details), "public=%llu tokens=%llu blocks=%llu created=%s",
                       (unsigned long long)reply.public_id, (unsigned long long)reply.tokens,
                       (unsigned long long)reply.blocks, reply.created ? "yes" : "no");
    }
    if (status != KVK_WOULD_BLOCK) {
        audit(run, "space", asked->space_id, details, status, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__PublishPrefixResponse response = KVKEEP__V1__PUBLISH_PREFIX_RESPONSE__INIT;
    response.public_id = reply.public_id;
    response.space_id = reply.space_id;
    response.tokens = reply.tokens;
    response.blocks = reply.blocks;
    response.bytes = reply.bytes;
    response.created = reply.created;
    response.durable = reply.durable;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_unpublish_prefix)
{
    const Kvkeep__V1__UnpublishPrefixRequest *asked =
        (const Kvkeep__V1__UnpublishPrefixRequest *)message;
    struct kvk_withdraw_reply reply = {.blocks = 0};
    char details[DETAILS_SIZE] = "";
    enum kvk_status status = kvk_rpc_check_id(asked->public_id, "public_id", error);
    if (status == KVK_OK) {
        status =
            kvk_public_withdraw(run->rpc->cache, &run->caller, asked->public_id, &reply, error);
    }
    if (status == KVK_OK) {
        (void)snprintf(details, sizeof(details), "blocks=%llu held=%llu",
                       (unsigned long long)reply.blocks, (unsigned long long)reply.held_blocks);
    }
    audit(run, "public", asked->public_id, details, status, error);
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__UnpublishPrefixResponse response = KVKEEP__V1__UNPUBLISH_PREFIX_RESPONSE__INIT;
    response.blocks = reply.blocks;
    response.held_blocks = reply.held_blocks;
    return kvk_rpc_reply(run, &response.base, error);
}

static void fill_row(Kvkeep__V1__PublicPrefix *row, const struct kvk_public_row *report)
{
    kvkeep__v1__public_prefix__init(row);
    row->public_id = report->public_id;
    row->tenant = kvk_rpc_text(report->tenant->name);
    row->source_space_id = report->source_id;
    row->space_id = report->space_id;
    row->tokens = report->tokens;
    row->blocks = report->blocks;
    row->bytes = report->bytes;
    row->published_s = report->published_s;
    row->hits = report->hits;
    row->hit_tokens = report->hit_tokens;
    row->visible = report->visible;
    row->durable = report->durable;
}

static enum kvk_status reply_list(struct kvk_rpc_run *run, const struct kvk_public_row *reports,
                                  uint32_t count, const struct kvk_public_totals *totals,
                                  struct kvk_error *error)
{
    struct kvk_rpc_arena *arena = &run->memory->arena;
    Kvkeep__V1__PublicPrefix *rows = kvk_rpc_arena_take_extra(arena, (count + 1U) * sizeof(*rows));
    Kvkeep__V1__PublicPrefix **pointers =
        kvk_rpc_arena_take_extra(arena, (count + 1U) * sizeof(*pointers));
    if (rows == NULL || pointers == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    for (uint32_t i = 0; i < count; i++) {
        fill_row(&rows[i], &reports[i]);
        pointers[i] = &rows[i];
    }
    Kvkeep__V1__ListPublicPrefixesResponse response =
        KVKEEP__V1__LIST_PUBLIC_PREFIXES_RESPONSE__INIT;
    response.n_prefixes = count;
    response.prefixes = pointers;
    response.withdrawn_spaces = totals->withdrawn_spaces;
    response.withdrawn_bytes = totals->withdrawn_bytes;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_list_public_prefixes)
{
    struct kvk_public_row *reports = NULL;
    struct kvk_public_totals totals;
    uint32_t count = 0;
    (void)message;
    enum kvk_status status =
        kvk_public_list(run->rpc->cache, &run->caller, &reports, &count, &totals, error);
    if (status == KVK_OK) {
        status = reply_list(run, reports, count, &totals, error);
    }
    free(reports);
    return status;
}
