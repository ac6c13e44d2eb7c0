/*
 * The calls of a sequence's life.
 */
#include "base/bytes.h"
#include "daemon/rpc_private.h"

/* ---- answers ---- */

_Static_assert((int)KVK_SEQUENCE_RUNNING ==
                       (int)KVKEEP__V1__SEQUENCE_STATE__SEQUENCE_STATE_RUNNING &&
                   (int)KVK_SEQUENCE_SWAPPED_OUT ==
                       (int)KVKEEP__V1__SEQUENCE_STATE__SEQUENCE_STATE_SWAPPED_OUT,
               "numbers agree");

/* A sequence and its tables; `packed` holds what the message points to. */
static void fill_sequence(Kvkeep__V1__SequenceResponse *response, struct kvk_rpc_tables *packed,
                          const struct kvk_sequence_reply *reply, const struct kvk_tables *tables)
{
    kvkeep__v1__sequence_response__init(response);
    response->sequence_id = reply->sequence_id;
    response->state = (Kvkeep__V1__SequenceState)reply->state;
    response->cached_tokens = reply->cached_tokens;
    response->sealed_tokens = reply->sealed_tokens;
    response->committed_tokens = reply->committed_tokens;
    response->length = reply->length;
    response->grant_first = reply->grant_first;
    response->freed_blocks = reply->freed_blocks;
    response->n_tables = kvk_rpc_fill_tables(packed, tables);
    response->tables = packed->pointers;
    response->disk = kvk_rpc_fill_disk(packed, &reply->disk);
    response->public_tokens = reply->public_tokens;
    response->partial_tokens = reply->partial_tokens;
}

static enum kvk_status reply_sequence(struct kvk_rpc_run *run,
                                      const struct kvk_sequence_reply *reply,
                                      struct kvk_error *error)
{
    Kvkeep__V1__SequenceResponse response;
    struct kvk_rpc_tables packed;
    fill_sequence(&response, &packed, reply, &run->memory->tables);
    return kvk_rpc_reply(run, &response.base, error);
}

static enum kvk_status check_ids(uint64_t session_id, uint64_t sequence_id, struct kvk_error *error)
{
    enum kvk_status status = kvk_rpc_check_id(session_id, "session_id", error);
    return status == KVK_OK ? kvk_rpc_check_id(sequence_id, "sequence_id", error) : status;
}

/* ---- open ---- */

static enum kvk_status check_open(struct kvk_rpc_run *run,
                                  const Kvkeep__V1__OpenSequenceRequest *asked,
                                  struct kvk_open_request *request, struct kvk_error *error)
{
    const uint64_t limit = run->rpc->config->tokens;
    enum kvk_status status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_id(asked->space_id, "space_id", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_request_id(&asked->request_id, &request->request_id, error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_prompt(run, asked->prompt, "prompt", &request->prompt, error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_hints(run, asked->n_hints, asked->hints, &request->prompt, error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_tier(asked->tier, "tier", &request->tier, error);
    }
    if (status == KVK_OK && asked->growth_tokens > limit - request->prompt.token_count) {
        status = kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "growth_tokens",
                                asked->growth_tokens, limit - request->prompt.token_count,
                                "growth_tokens would pass the longest sequence that is allowed");
    }
    request->session_id = asked->session_id;
    request->space_id = asked->space_id;
    request->leave_last = asked->leave_last;
    request->growth_tokens = asked->growth_tokens;
    request->leave_on_host = asked->leave_on_host;
    request->no_lookup = asked->no_lookup;
    request->retry = asked->retry;
    return status;
}

/* Nobody will ever hear of this sequence: its client gave up while it was being opened. */
static enum kvk_status close_unheard(struct kvk_rpc_run *run, uint64_t session_id,
                                     uint64_t sequence_id, struct kvk_error *error)
{
    struct kvk_close_reply reply;
    enum kvk_status status = kvk_sequence_close(run->rpc->cache, &run->caller, session_id,
                                                &sequence_id, 1, &reply, error);
    (void)status; /* fails only where the session has ended, and the sequence with it */
    return kvk_fail(error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the client has cancelled the call");
}

KVK_RPC_HANDLER(kvk_rpc_open_sequence)
{
    struct kvk_open_request request;
    struct kvk_sequence_reply reply;
    enum kvk_status status =
        check_open(run, (const Kvkeep__V1__OpenSequenceRequest *)message, &request, error);
    if (status == KVK_OK) {
        status = kvk_sequence_open(run->rpc->cache, &run->caller, &request, &reply,
                                   &run->memory->tables, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    /* Known only of calls that had to wait, which are those that a client tires of. One with a
     * request id may be asked for again. */
    if (request.request_id.size == 0 && kvk_call_is_cancelled(run->call)) {
        return close_unheard(run, request.session_id, reply.sequence_id, error);
    }
    return reply_sequence(run, &reply, error);
}

KVK_RPC_HANDLER(kvk_rpc_get_sequence)
{
    const Kvkeep__V1__GetSequenceRequest *asked = (const Kvkeep__V1__GetSequenceRequest *)message;
    struct kvk_sequence_reply reply;
    enum kvk_status status = check_ids(asked->session_id, asked->sequence_id, error);
    if (status == KVK_OK) {
        status = kvk_sequence_get(run->rpc->cache, &run->caller, asked->session_id,
                                  asked->sequence_id, &reply, &run->memory->tables, error);
    }
    return status == KVK_OK ? reply_sequence(run, &reply, error) : status;
}

/* ---- grow, seal, cut ---- */

static enum kvk_status check_append(struct kvk_rpc_run *run, const Kvkeep__V1__AppendRequest *asked,
                                    struct kvk_append_request *request, struct kvk_error *error)
{
    const uint64_t limit = run->rpc->config->tokens;
    enum kvk_status status = check_ids(asked->session_id, asked->sequence_id, error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_tokens(run, &asked->tokens, "tokens", &request->tokens,
                                      &request->token_count, error);
    }
    if (status == KVK_OK && request->token_count == 0) {
        status =
            kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "tokens", "tokens must be at least one");
    }
    if (status == KVK_OK && asked->expected_length > limit - request->token_count) {
        status = kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "expected_length",
                                asked->expected_length, limit - request->token_count,
                                "the sequence would become longer than is allowed");
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_spans(run, asked->n_spans, asked->spans, asked->expected_length,
                                     request->token_count, "spans", &request->spans, error);
    }
    request->session_id = asked->session_id;
    request->sequence_id = asked->sequence_id;
    request->expected_length = asked->expected_length;
    request->draft = asked->draft;
    request->span_count = (uint32_t)asked->n_spans;
    return status;
}

KVK_RPC_HANDLER(kvk_rpc_append)
{
    struct kvk_append_request request;
    struct kvk_sequence_reply reply;
    enum kvk_status status =
        check_append(run, (const Kvkeep__V1__AppendRequest *)message, &request, error);
    if (status == KVK_OK) {
        status = kvk_sequence_append(run->rpc->cache, &run->caller, &request, &reply,
                                     &run->memory->tables, error);
    }
    return status == KVK_OK ? reply_sequence(run, &reply, error) : status;
}

KVK_RPC_HANDLER(kvk_rpc_seal)
{
    const Kvkeep__V1__SealRequest *asked = (const Kvkeep__V1__SealRequest *)message;
    const struct kvk_seal_request request = {.session_id = asked->session_id,
                                             .sequence_id = asked->sequence_id,
                                             .expected_length = asked->expected_length,
                                             .length = asked->length,
                                             .all_ranks = asked->all_ranks};
    struct kvk_seal_reply reply;
    enum kvk_status status = check_ids(asked->session_id, asked->sequence_id, error);
    if (status == KVK_OK && asked->length > asked->expected_length) {
        status = kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "length", asked->length,
                                asked->expected_length, "length is past expected_length");
    }
    if (status == KVK_OK) {
        status = kvk_sequence_seal(run->rpc->cache, &run->caller, &request, &reply, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__SealResponse response = KVKEEP__V1__SEAL_RESPONSE__INIT;
    response.sealed_tokens = reply.sealed_tokens;
    response.new_blocks = reply.new_blocks;
    response.known_blocks = reply.known_blocks;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_commit)
{
    const Kvkeep__V1__CommitRequest *asked = (const Kvkeep__V1__CommitRequest *)message;
    struct kvk_sequence_reply reply;
    enum kvk_status status = check_ids(asked->session_id, asked->sequence_id, error);
    if (status == KVK_OK) {
        status = kvk_sequence_commit(run->rpc->cache, &run->caller, asked->session_id,
                                     asked->sequence_id, asked->expected_length, asked->accept,
                                     &reply, &run->memory->tables, error);
    }
    return status == KVK_OK ? reply_sequence(run, &reply, error) : status;
}

KVK_RPC_HANDLER(kvk_rpc_truncate)
{
    const Kvkeep__V1__TruncateRequest *asked = (const Kvkeep__V1__TruncateRequest *)message;
    struct kvk_sequence_reply reply;
    enum kvk_status status = check_ids(asked->session_id, asked->sequence_id, error);
    if (status == KVK_OK) {
        status = kvk_sequence_truncate(run->rpc->cache, &run->caller, asked->session_id,
                                       asked->sequence_id, asked->expected_length, asked->length,
                                       &reply, &run->memory->tables, error);
    }
    return status == KVK_OK ? reply_sequence(run, &reply, error) : status;
}

/* ---- fork ---- */

KVK_RPC_HANDLER(kvk_rpc_fork)
{
    const Kvkeep__V1__ForkRequest *asked = (const Kvkeep__V1__ForkRequest *)message;
    struct kvk_request_id request_id;
    enum kvk_status status = check_ids(asked->session_id, asked->sequence_id, error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_count(asked->count, run->rpc->config->forks, "count", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_request_id(&asked->request_id, &request_id, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    uint64_t *sequence_ids =
        kvk_rpc_arena_take_extra(&run->memory->arena, asked->count * sizeof(*sequence_ids));
    if (sequence_ids == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "count", "no memory for the answer");
    }
    status =
        kvk_sequence_fork(run->rpc->cache, &run->caller, asked->session_id, asked->sequence_id,
                          asked->expected_length, asked->count, &request_id, sequence_ids, error);
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__ForkResponse response = KVKEEP__V1__FORK_RESPONSE__INIT;
    response.n_sequence_ids = asked->count;
    response.sequence_ids = sequence_ids;
    return kvk_rpc_reply(run, &response.base, error);
}

/* ---- swap ---- */

static enum kvk_status reply_swap(struct kvk_rpc_run *run, const struct kvk_swap_reply *reply,
                                  struct kvk_error *error)
{
    Kvkeep__V1__SwapResponse response = KVKEEP__V1__SWAP_RESPONSE__INIT;
    Kvkeep__V1__SequenceResponse sequence;
    struct kvk_rpc_tables packed;
    fill_sequence(&sequence, &packed, &reply->sequence, &run->memory->tables);
    response.sequence = &sequence;
    response.moved_blocks = reply->moved_blocks;
    response.moved_bytes = reply->moved_bytes;
    response.copy_ns = reply->copy_ns;
    response.load_ns = reply->load_ns;
    response.recompute_ns = reply->recompute_ns;
    return kvk_rpc_reply(run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_swap_out)
{
    const Kvkeep__V1__SwapOutRequest *asked = (const Kvkeep__V1__SwapOutRequest *)message;
    struct kvk_swap_reply reply;
    enum kvk_status status = check_ids(asked->session_id, asked->sequence_id, error);
    if (status == KVK_OK) {
        status = kvk_sequence_swap_out(run->rpc->cache, &run->caller, asked->session_id,
                                       asked->sequence_id, &reply, &run->memory->tables, error);
    }
    return status == KVK_OK ? reply_swap(run, &reply, error) : status;
}

KVK_RPC_HANDLER(kvk_rpc_swap_in)
{
    const Kvkeep__V1__SwapInRequest *asked = (const Kvkeep__V1__SwapInRequest *)message;
    struct kvk_swap_reply reply;
    enum kvk_status status = check_ids(asked->session_id, asked->sequence_id, error);
    if (status == KVK_OK) {
        status = kvk_sequence_swap_in(run->rpc->cache, &run->caller, asked->session_id,
                                      asked->sequence_id, &reply, &run->memory->tables, error);
    }
    return status == KVK_OK ? reply_swap(run, &reply, error) : status;
}

/* ---- close ---- */

KVK_RPC_HANDLER(kvk_rpc_close)
{
    const Kvkeep__V1__CloseRequest *asked = (const Kvkeep__V1__CloseRequest *)message;
    struct kvk_close_reply reply;
    enum kvk_status status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_ids(run, asked->sequence_ids, asked->n_sequence_ids, "sequence_ids",
                                   error);
    }
    if (status == KVK_OK) {
        status =
            kvk_sequence_close(run->rpc->cache, &run->caller, asked->session_id,
                               asked->sequence_ids, (uint32_t)asked->n_sequence_ids, &reply, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    Kvkeep__V1__CloseResponse response = KVKEEP__V1__CLOSE_RESPONSE__INIT;
    response.freed_blocks = reply.freed_blocks;
    response.cached_blocks = reply.cached_blocks;
    return kvk_rpc_reply(run, &response.base, error);
}
