#include "client/internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/random.h"

/* Repeatable calls carry one of these, so that a lost answer does not open two sequences. */
struct request_id {
    uint8_t bytes[16];
};

static ProtobufCBinaryData request_id_make(struct request_id *id)
{
    kvk_random_secret(id->bytes, sizeof id->bytes);
    ProtobufCBinaryData data = {.data = id->bytes, .len = sizeof id->bytes};
    return data;
}

static void tables_finish(struct kvkeep_table *tables)
{
    for (uint32_t g = 0; g < KVK_GROUP_COUNT_MAX; g++) {
        kvkeep_table_finish(&tables[g]);
    }
}

static enum kvk_status tables_merge(struct kvkeep_table *tables, uint32_t group_count,
                                    size_t part_count, Kvkeep__V1__BlockTable *const *parts,
                                    struct kvk_error *error)
{
    for (size_t i = 0; i < part_count; i++) {
        if (parts[i]->group >= group_count) {
            return kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "tables",
                            "the daemon answered for a layer group that the space has not");
        }
        enum kvk_status status = kvkeep_table_merge(&tables[parts[i]->group], parts[i], error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* ---- leases ---- */

enum kvk_status kvkeep_pin(struct kvkeep_session *session, const struct kvkeep_space *space,
                           const struct kvkeep_prompt *prompt, uint64_t ttl_ms, bool copy_pin,
                           struct kvkeep_lease *lease, struct kvk_error *error)
{
    memset(lease, 0, sizeof *lease);
    struct kvkeep_prompt_message message;
    enum kvk_status status = kvkeep_prompt_make(prompt, &message, error);
    if (status != KVK_OK) {
        return status;
    }
    struct request_id id;
    Kvkeep__V1__PinRequest request = KVKEEP__V1__PIN_REQUEST__INIT;
    request.session_id = session->id;
    request.space_id = space->id;
    request.prompt = &message.message;
    request.ttl_ms = ttl_ms;
    request.copy_pin = copy_pin;
    request.request_id = request_id_make(&id);
    Kvkeep__V1__PinResponse *response = NULL;
    status = kvkeep_client_call(session->client, KVKEEP_METHOD("Pin"), &request.base,
                                &kvkeep__v1__pin_response__descriptor, &response, error);
    kvkeep_prompt_drop(&message);
    if (status != KVK_OK) {
        return status;
    }
    lease->id = response->lease_id;
    lease->cached_tokens = response->cached_tokens;
    lease->group_count = space->group_count;
    status = tables_merge(lease->groups, space->group_count, response->n_tables, response->tables,
                          error);
    kvkeep__v1__pin_response__free_unpacked(response, NULL);
    if (status != KVK_OK) {
        enum kvk_status ignored = kvkeep_release(session, lease, NULL);
        (void)ignored; /* the failure before it is what counts */
    }
    return status;
}

enum kvk_status kvkeep_renew(struct kvkeep_session *session, const struct kvkeep_lease *lease,
                             uint64_t ttl_ms, struct kvk_error *error)
{
    Kvkeep__V1__RenewRequest request = KVKEEP__V1__RENEW_REQUEST__INIT;
    request.session_id = session->id;
    request.lease_id = lease->id;
    request.ttl_ms = ttl_ms;
    Kvkeep__V1__RenewResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(session->client, KVKEEP_METHOD("Renew"), &request.base,
                           &kvkeep__v1__renew_response__descriptor, &response, error);
    if (status == KVK_OK) {
        kvkeep__v1__renew_response__free_unpacked(response, NULL);
    }
    return status;
}

enum kvk_status kvkeep_release(struct kvkeep_session *session, struct kvkeep_lease *lease,
                               struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    if (lease->id != 0) {
        Kvkeep__V1__ReleaseRequest request = KVKEEP__V1__RELEASE_REQUEST__INIT;
        request.session_id = session->id;
        request.n_lease_ids = 1;
        request.lease_ids = &lease->id;
        Kvkeep__V1__ReleaseResponse *response = NULL;
        status = kvkeep_client_call(session->client, KVKEEP_METHOD("Release"), &request.base,
                                    &kvkeep__v1__release_response__descriptor, &response, error);
        if (status == KVK_OK) {
            kvkeep__v1__release_response__free_unpacked(response, NULL);
        }
    }
    tables_finish(lease->groups);
    memset(lease, 0, sizeof *lease);
    return status;
}

/* ---- sequences ---- */

/* Take the daemon's answer into the client's view. The table is as long as the length says. */
static enum kvk_status sequence_take(struct kvkeep_sequence *sequence,
                                     const Kvkeep__V1__SequenceResponse *response,
                                     struct kvk_error *error)
{
    sequence->id = response->sequence_id;
    sequence->swapped_out =
        response->state == KVKEEP__V1__SEQUENCE_STATE__SEQUENCE_STATE_SWAPPED_OUT;
    sequence->cached_tokens = response->cached_tokens;
    sequence->sealed_tokens = response->sealed_tokens;
    sequence->committed_tokens = response->committed_tokens;
    sequence->length = response->length;
    sequence->grant_first = response->grant_first;
    sequence->partial_tokens = response->partial_tokens;
    enum kvk_status status = tables_merge(sequence->groups, sequence->space->group_count,
                                          response->n_tables, response->tables, error);
    uint64_t block_tokens = sequence->space->block_tokens;
    uint64_t block_count = (sequence->length + block_tokens - 1) / block_tokens;
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        if (sequence->groups[g].count > block_count) {
            sequence->groups[g].count = block_count;
        }
    }
    return status;
}

/* A call whose answer is a SequenceResponse. */
static enum kvk_status sequence_call(struct kvkeep_session *session, const char *method,
                                     const ProtobufCMessage *request,
                                     struct kvkeep_sequence *sequence, struct kvk_error *error)
{
    Kvkeep__V1__SequenceResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(session->client, method, request,
                           &kvkeep__v1__sequence_response__descriptor, &response, error);
    if (status == KVK_OK) {
        status = sequence_take(sequence, response, error);
        kvkeep__v1__sequence_response__free_unpacked(response, NULL);
    }
    return status;
}

/* After a failure that is told already. */
static void sequence_abandon(struct kvkeep_session *session, struct kvkeep_sequence *sequence)
{
    enum kvk_status ignored = kvkeep_close(session, sequence, NULL);
    (void)ignored;
}

enum kvk_status kvkeep_sequence_open(struct kvkeep_session *session,
                                     const struct kvkeep_space *space,
                                     const struct kvkeep_prompt *prompt,
                                     const struct kvkeep_open_options *options,
                                     struct kvkeep_sequence *sequence, struct kvk_error *error)
{
    memset(sequence, 0, sizeof *sequence);
    sequence->space = space;
    struct kvkeep_prompt_message message;
    enum kvk_status status = kvkeep_prompt_make(prompt, &message, error);
    if (status != KVK_OK) {
        return status;
    }
    struct request_id id;
    Kvkeep__V1__OpenSequenceRequest request = KVKEEP__V1__OPEN_SEQUENCE_REQUEST__INIT;
    request.session_id = session->id;
    request.space_id = space->id;
    request.request_id = request_id_make(&id);
    request.prompt = &message.message;
    if (options != NULL) {
        request.leave_last = options->leave_last;
        request.no_lookup = options->no_lookup;
        request.leave_on_host = options->leave_on_host;
        request.retry = options->retry;
        request.growth_tokens = options->growth_tokens;
        request.tier = (Kvkeep__V1__Tier)options->tier;
    }
    status = sequence_call(session, KVKEEP_METHOD("OpenSequence"), &request.base, sequence, error);
    kvkeep_prompt_drop(&message);
    if (status != KVK_OK) {
        sequence_abandon(session, sequence);
    }
    return status;
}

enum kvk_status kvkeep_sequence_refresh(struct kvkeep_session *session,
                                        struct kvkeep_sequence *sequence, struct kvk_error *error)
{
    Kvkeep__V1__GetSequenceRequest request = KVKEEP__V1__GET_SEQUENCE_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence->id;
    return sequence_call(session, KVKEEP_METHOD("GetSequence"), &request.base, sequence, error);
}

enum kvk_status kvkeep_append(struct kvkeep_session *session, struct kvkeep_sequence *sequence,
                              const uint32_t *tokens, uint64_t token_count, bool draft,
                              struct kvk_error *error)
{
    Kvkeep__V1__AppendRequest request = KVKEEP__V1__APPEND_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence->id;
    request.expected_length = sequence->length;
    request.tokens.data = (uint8_t *)(uintptr_t)tokens;
    request.tokens.len = token_count * sizeof tokens[0];
    request.draft = draft;
    return sequence_call(session, KVKEEP_METHOD("Append"), &request.base, sequence, error);
}

enum kvk_status kvkeep_seal(struct kvkeep_session *session, struct kvkeep_sequence *sequence,
                            uint64_t length, bool all_ranks, struct kvk_error *error)
{
    Kvkeep__V1__SealRequest request = KVKEEP__V1__SEAL_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence->id;
    request.expected_length = sequence->length;
    request.length = length;
    request.all_ranks = all_ranks;
    Kvkeep__V1__SealResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(session->client, KVKEEP_METHOD("Seal"), &request.base,
                           &kvkeep__v1__seal_response__descriptor, &response, error);
    if (status == KVK_OK) {
        sequence->sealed_tokens = response->sealed_tokens;
        sequence->grant_first = response->sealed_tokens;
        kvkeep__v1__seal_response__free_unpacked(response, NULL);
    }
    return status;
}

enum kvk_status kvkeep_commit(struct kvkeep_session *session, struct kvkeep_sequence *sequence,
                              uint64_t accept, struct kvk_error *error)
{
    Kvkeep__V1__CommitRequest request = KVKEEP__V1__COMMIT_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence->id;
    request.expected_length = sequence->length;
    request.accept = accept;
    return sequence_call(session, KVKEEP_METHOD("Commit"), &request.base, sequence, error);
}

enum kvk_status kvkeep_truncate(struct kvkeep_session *session, struct kvkeep_sequence *sequence,
                                uint64_t length, struct kvk_error *error)
{
    Kvkeep__V1__TruncateRequest request = KVKEEP__V1__TRUNCATE_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence->id;
    request.expected_length = sequence->length;
    request.length = length;
    return sequence_call(session, KVKEEP_METHOD("Truncate"), &request.base, sequence, error);
}

enum kvk_status kvkeep_fork(struct kvkeep_session *session, const struct kvkeep_sequence *sequence,
                            uint32_t count, struct kvkeep_sequence *forks, struct kvk_error *error)
{
    memset(forks, 0, count * sizeof forks[0]);
    struct request_id id;
    Kvkeep__V1__ForkRequest request = KVKEEP__V1__FORK_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence->id;
    request.expected_length = sequence->length;
    request.count = count;
    request.request_id = request_id_make(&id);
    Kvkeep__V1__ForkResponse *response = NULL;
    enum kvk_status status =
        kvkeep_client_call(session->client, KVKEEP_METHOD("Fork"), &request.base,
                           &kvkeep__v1__fork_response__descriptor, &response, error);
    if (status != KVK_OK) {
        return status;
    }
    if (response->n_sequence_ids != count) {
        status = kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "sequence_ids",
                          "the daemon answered with another number of forks");
    }
    for (uint32_t i = 0; i < count && i < response->n_sequence_ids; i++) {
        forks[i].id = response->sequence_ids[i];
        forks[i].space = sequence->space;
    }
    for (uint32_t i = 0; i < count && status == KVK_OK; i++) {
        status = kvkeep_sequence_refresh(session, &forks[i], error);
    }
    kvkeep__v1__fork_response__free_unpacked(response, NULL);
    for (uint32_t i = 0; i < count && status != KVK_OK; i++) {
        sequence_abandon(session, &forks[i]);
    }
    return status;
}

static enum kvk_status swap_call(struct kvkeep_session *session, const char *method,
                                 const ProtobufCMessage *request, struct kvkeep_sequence *sequence,
                                 struct kvkeep_swap *swap, struct kvk_error *error)
{
    Kvkeep__V1__SwapResponse *response = NULL;
    enum kvk_status status = kvkeep_client_call(
        session->client, method, request, &kvkeep__v1__swap_response__descriptor, &response, error);
    if (status != KVK_OK) {
        return status;
    }
    if (swap != NULL) {
        swap->moved_blocks = response->moved_blocks;
        swap->moved_bytes = response->moved_bytes;
        swap->copy_ns = response->copy_ns;
        swap->load_ns = response->load_ns;
        swap->recompute_ns = response->recompute_ns;
    }
    if (response->sequence != NULL) {
        status = sequence_take(sequence, response->sequence, error);
    }
    kvkeep__v1__swap_response__free_unpacked(response, NULL);
    return status;
}

enum kvk_status kvkeep_swap_out(struct kvkeep_session *session, struct kvkeep_sequence *sequence,
                                struct kvkeep_swap *swap, struct kvk_error *error)
{
    Kvkeep__V1__SwapOutRequest request = KVKEEP__V1__SWAP_OUT_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence->id;
    return swap_call(session, KVKEEP_METHOD("SwapOut"), &request.base, sequence, swap, error);
}

enum kvk_status kvkeep_swap_in(struct kvkeep_session *session, struct kvkeep_sequence *sequence,
                               struct kvkeep_swap *swap, struct kvk_error *error)
{
    Kvkeep__V1__SwapInRequest request = KVKEEP__V1__SWAP_IN_REQUEST__INIT;
    request.session_id = session->id;
    request.sequence_id = sequence->id;
    return swap_call(session, KVKEEP_METHOD("SwapIn"), &request.base, sequence, swap, error);
}

enum kvk_status kvkeep_close(struct kvkeep_session *session, struct kvkeep_sequence *sequence,
                             struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    if (sequence->id != 0) {
        Kvkeep__V1__CloseRequest request = KVKEEP__V1__CLOSE_REQUEST__INIT;
        request.session_id = session->id;
        request.n_sequence_ids = 1;
        request.sequence_ids = &sequence->id;
        Kvkeep__V1__CloseResponse *response = NULL;
        status = kvkeep_client_call(session->client, KVKEEP_METHOD("Close"), &request.base,
                                    &kvkeep__v1__close_response__descriptor, &response, error);
        if (status == KVK_OK) {
            kvkeep__v1__close_response__free_unpacked(response, NULL);
        }
    }
    tables_finish(sequence->groups);
    memset(sequence, 0, sizeof *sequence);
    return status;
}
