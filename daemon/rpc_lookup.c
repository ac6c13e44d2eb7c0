/*
 * Lookup, Touch, leases and transfers.
 */
#include "daemon/lookup.h"
#include "daemon/rpc_private.h"

_Static_assert(
    (int)KVK_REMOTE_USE_ASKED == (int)KVKEEP__V1__REMOTE_STATE__REMOTE_STATE_ASKED &&
        (int)KVK_REMOTE_USE_FETCHING == (int)KVKEEP__V1__REMOTE_STATE__REMOTE_STATE_FETCHING &&
        (int)KVK_REMOTE_USE_DONE == (int)KVKEEP__V1__REMOTE_STATE__REMOTE_STATE_DONE &&
        (int)KVK_REMOTE_USE_ABSENT == (int)KVKEEP__V1__REMOTE_STATE__REMOTE_STATE_ABSENT &&
        (int)KVK_REMOTE_USE_LEFT == (int)KVKEEP__V1__REMOTE_STATE__REMOTE_STATE_LEFT &&
        (int)KVK_REMOTE_USE_FAILED == (int)KVKEEP__V1__REMOTE_STATE__REMOTE_STATE_FAILED &&
        (int)KVK_REMOTE_USE_BUSY == (int)KVKEEP__V1__REMOTE_STATE__REMOTE_STATE_BUSY,
    "the API's numbers are the engine's");

Kvkeep__V1__RemoteUse *kvk_rpc_fill_remote(Kvkeep__V1__RemoteUse *target,
                                           const struct kvk_remote_use *use)
{
    kvkeep__v1__remote_use__init(target);
    target->state = (Kvkeep__V1__RemoteState)use->state;
    target->tokens = use->tokens;
    target->fetch_ns = use->fetch_ns;
    target->recompute_ns = use->recompute_ns;
    return use->state == KVK_REMOTE_USE_NONE ? NULL : target;
}

KVK_RPC_HANDLER(kvk_rpc_lookup)
{
    const Kvkeep__V1__LookupRequest *asked = (const Kvkeep__V1__LookupRequest *)message;
    struct kvk_lookup_request request = {.space_id = asked->space_id,
                                         .leave_last = asked->leave_last,
                                         .retry = asked->retry,
                                         .read_ahead = asked->read_ahead};
    struct kvk_lookup_reply reply;
    enum kvk_status status = kvk_rpc_check_id(asked->space_id, "space_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_prompt(run, asked->prompt, "prompt", &request.prompt, error);
    }
    if (status == KVK_OK) {
        status = kvk_lookup(run->rpc->cache, &run->caller, &request, &reply, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__LookupResponse response = KVKEEP__V1__LOOKUP_RESPONSE__INIT;
    response.cached_tokens = reply.cached_tokens;
    response.device_tokens = reply.device_tokens;
    response.host_tokens = reply.host_tokens;
    response.disk_tokens = reply.disk_tokens;
    response.restore_ns = reply.restore_ns;
    response.restore_recompute_ns = reply.restore_recompute_ns;
    response.public_tokens = reply.public_tokens;
    response.partial_tokens = reply.partial_tokens;
    response.load_ns = reply.load_ns;
    response.recompute_ns = reply.recompute_ns;
    Kvkeep__V1__RemoteUse remote;
    response.remote = kvk_rpc_fill_remote(&remote, &reply.remote);
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_touch)
{
    const Kvkeep__V1__TouchRequest *asked = (const Kvkeep__V1__TouchRequest *)message;
    struct kvk_prompt prompt;
    Kvkeep__V1__TouchResponse response = KVKEEP__V1__TOUCH_RESPONSE__INIT;
    enum kvk_status status = kvk_rpc_check_id(asked->space_id, "space_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_prompt(run, asked->prompt, "prompt", &prompt, error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_hints(run, asked->n_hints, asked->hints, &prompt, error);
    }
    if (status == KVK_OK) {
        status = kvk_touch(run->rpc->cache, &run->caller, asked->space_id, &prompt,
                           &response.touched_tokens, error);
    }
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

/* ---- leases ---- */

static enum kvk_status check_pin(struct kvk_rpc_run *run, const Kvkeep__V1__PinRequest *asked,
                                 struct kvk_pin_request *request, struct kvk_error *error)
{
    enum kvk_status status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_id(asked->space_id, "space_id", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_count(asked->ttl_ms, run->rpc->config->lease_ms, "ttl_ms", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_prompt(run, asked->prompt, "prompt", &request->prompt, error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_request_id(&asked->request_id, &request->request_id, error);
    }
    request->session_id = asked->session_id;
    request->space_id = asked->space_id;
    request->leave_last = asked->leave_last;
    request->ttl_ms = asked->ttl_ms;
    request->min_tokens = asked->min_tokens;
    request->copy_pin = asked->copy_pin;
    return status;
}

KVK_RPC_HANDLER(kvk_rpc_pin)
{
    struct kvk_pin_request request;
    struct kvk_pin_reply reply;
    struct kvk_tables *tables = &run->memory->tables;
    enum kvk_status status =
        check_pin(run, (const Kvkeep__V1__PinRequest *)message, &request, error);
    if (status == KVK_OK) {
        status = kvk_lease_pin(run->rpc->cache, &run->caller, &request, &reply, tables, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__PinResponse response = KVKEEP__V1__PIN_RESPONSE__INIT;
    struct kvk_rpc_tables packed;
    response.lease_id = reply.lease_id;
    response.cached_tokens = reply.cached_tokens;
    response.ttl_ms = reply.ttl_ms;
    response.n_tables = kvk_rpc_fill_tables(&packed, tables);
    response.tables = packed.pointers;
    response.disk = kvk_rpc_fill_disk(&packed, &reply.disk);
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_renew)
{
    const Kvkeep__V1__RenewRequest *asked = (const Kvkeep__V1__RenewRequest *)message;
    enum kvk_status status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_id(asked->lease_id, "lease_id", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_count(asked->ttl_ms, run->rpc->config->lease_ms, "ttl_ms", error);
    }
    if (status == KVK_OK) {
        status = kvk_lease_renew(run->rpc->cache, &run->caller, asked->session_id, asked->lease_id,
                                 asked->ttl_ms, error);
    }
    Kvkeep__V1__RenewResponse response = KVKEEP__V1__RENEW_RESPONSE__INIT;
    response.ttl_ms = asked->ttl_ms;
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

KVK_RPC_HANDLER(kvk_rpc_release)
{
    const Kvkeep__V1__ReleaseRequest *asked = (const Kvkeep__V1__ReleaseRequest *)message;
    Kvkeep__V1__ReleaseResponse response = KVKEEP__V1__RELEASE_RESPONSE__INIT;
    enum kvk_status status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_ids(run, asked->lease_ids, asked->n_lease_ids, "lease_ids", error);
    }
    if (status == KVK_OK) {
        status =
            kvk_lease_release(run->rpc->cache, &run->caller, asked->session_id, asked->lease_ids,
                              (uint32_t)asked->n_lease_ids, &response.released_blocks, error);
    }
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}

/* ---- transfers ---- */

KVK_RPC_HANDLER(kvk_rpc_begin_transfer)
{
    const Kvkeep__V1__BeginTransferRequest *asked =
        (const Kvkeep__V1__BeginTransferRequest *)message;
    struct kvk_tables *tables = &run->memory->tables;
    Kvkeep__V1__BeginTransferResponse response = KVKEEP__V1__BEGIN_TRANSFER_RESPONSE__INIT;
    enum kvk_status status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_one_of(asked->sequence_id, asked->lease_id, "", error);
    }
    if (status == KVK_OK && asked->write && asked->sequence_id == 0) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "write",
                          "write needs a sequence: what a lease holds never changes");
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_range(asked->first_block, asked->block_count, "block_count", error);
    }
    if (status == KVK_OK) {
        const struct kvk_transfer_request request = {.session_id = asked->session_id,
                                                     .sequence_id = asked->sequence_id,
                                                     .lease_id = asked->lease_id,
                                                     .write = asked->write,
                                                     .first_block = asked->first_block,
                                                     .block_count = asked->block_count};
        status = kvk_transfer_begin(run->rpc->cache, &run->caller, &request, &response.ticket,
                                    tables, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_rpc_tables packed;
    response.n_tables = kvk_rpc_fill_tables(&packed, tables);
    response.tables = packed.pointers;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_end_transfer)
{
    const Kvkeep__V1__EndTransferRequest *asked = (const Kvkeep__V1__EndTransferRequest *)message;
    enum kvk_status status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_id(asked->ticket, "ticket", error);
    }
    if (status == KVK_OK) {
        status = kvk_transfer_end(run->rpc->cache, &run->caller, asked->session_id, asked->ticket,
                                  error);
    }
    Kvkeep__V1__EndTransferResponse response = KVKEEP__V1__END_TRANSFER_RESPONSE__INIT;
    return status == KVK_OK ? kvk_rpc_reply(run, &response.base, error) : status;
}
