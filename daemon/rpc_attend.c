/*
 * Attend: operands as bytes of the messages or as places in scratch memory that the worker mapped.
 *
 * Results that have a place are written there by the kernels. The others are computed in the
 * call's arena, where floats are aligned, and copied into the answer: a message's bytes begin at
 * any address, and next to the K/V that was read for it one copy of a result is nothing.
 */
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "daemon/attention.h"
#include "daemon/rpc_private.h"

/* One Attend under way. */
struct rpc_attend {
    struct kvk_rpc_run *run;
    const Kvkeep__V1__AttendRequest *asked;
    struct kvk_attention_request request;
    uint32_t head_size_k;
    uint32_t head_size_v;
    uint64_t *handles; /* [handle_count] of scratch places, to be released */
    size_t handle_count;
    uint64_t answer_bytes; /* of results that go into the answer */
};

#define PLACES_MAX 3 /* of one item */

static const char *item_field(char *target, size_t index, const char *name)
{
    (void)snprintf(target, KVK_ERROR_FIELD_SIZE, "items[%zu].%s", index, name);
    return target;
}

/* ---- the request, before any memory ---- */

static enum kvk_status check_request(const struct kvk_rpc *rpc,
                                     const Kvkeep__V1__AttendRequest *asked,
                                     struct kvk_attention_request *request, struct kvk_error *error)
{
    enum kvk_status status = kvk_rpc_check_id(asked->session_id, "session_id", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_count(asked->query_heads, KVK_HEAD_COUNT_MAX, "query_heads", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_format(asked->format, false, "format", &request->format, error);
    }
    if (status == KVK_OK && kvk_format_is_compact(request->format)) {
        status = kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "format", request->format,
                                KVK_FORMAT_BF16, "format: queries are fp32, fp16 or bf16");
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_number((double)asked->scale, true, "scale", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_number((double)asked->soft_cap, false, "soft_cap", error);
    }
    if (status == KVK_OK && asked->group_window && (asked->window != 0 || asked->sinks != 0)) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "window",
                          "window and sinks must be 0 with group_window");
    }
    if (status == KVK_OK && asked->sinks != 0 && asked->window == 0) {
        status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "sinks", "sinks needs a window");
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_count(asked->n_items, rpc->config->attend_queries, "items", error);
    }
    request->session_id = asked->session_id;
    request->group = asked->group;
    request->layer = asked->layer;
    request->rank = asked->rank;
    request->query_heads = asked->query_heads;
    request->scale = asked->scale;
    request->soft_cap = asked->soft_cap;
    request->causal = asked->causal;
    request->group_window = asked->group_window;
    request->window = asked->window;
    request->sinks = asked->sinks;
    request->alibi_slopes = asked->alibi_slopes;
    request->alibi_slope_count = asked->n_alibi_slopes;
    request->sink_logits = asked->sink_logits;
    request->sink_logit_count = asked->n_sink_logits;
    request->item_count = (uint32_t)asked->n_items;
    return status;
}

static enum kvk_status check_items(const struct kvk_rpc *rpc,
                                   const Kvkeep__V1__AttendRequest *asked,
                                   struct kvk_attention_item *items, struct kvk_error *error)
{
    uint64_t left = rpc->config->attend_queries;
    char field[KVK_ERROR_FIELD_SIZE];
    char prefix[KVK_ERROR_FIELD_SIZE];
    for (size_t i = 0; i < asked->n_items; i++) {
        const Kvkeep__V1__AttendItem *item = asked->items[i];
        (void)snprintf(prefix, sizeof(prefix), "items[%zu]", i);
        enum kvk_status status =
            kvk_rpc_check_one_of(item->sequence_id, item->lease_id, prefix, error);
        if (status == KVK_OK) {
            status = kvk_rpc_check_count(item->query_count, left,
                                         item_field(field, i, "query_count"), error);
        }
        if (status == KVK_OK) {
            status = kvk_rpc_check_range(item->position, item->query_count,
                                         item_field(field, i, "position"), error);
        }
        if (status != KVK_OK) {
            return status;
        }
        left -= item->query_count;
        items[i].sequence_id = item->sequence_id;
        items[i].lease_id = item->lease_id;
        items[i].position = item->position;
        items[i].query_count = item->query_count;
        items[i].token_limit = item->token_limit;
    }
    return KVK_OK;
}

/* ---- operands ---- */

/* count x heads x head_size x value_bytes; the factors are bounded far below an overflow. */
static uint64_t operand_bytes(uint32_t count, uint32_t heads, uint32_t head_size,
                              size_t value_bytes)
{
    return (uint64_t)count * heads * head_size * value_bytes;
}

/* A place in the session's scratch memory: exactly `size_bytes`, aligned to its values. */
static enum kvk_status take_place(struct rpc_attend *attend, const Kvkeep__V1__MemoryPlace *place,
                                  uint64_t size_bytes, size_t value_bytes, const char *field,
                                  uint8_t **address, struct kvk_error *error)
{
    *address = NULL;
    if (place->size_bytes != size_bytes) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, place->size_bytes,
                              size_bytes, "%s has %llu bytes, its shape %llu", field,
                              (unsigned long long)place->size_bytes,
                              (unsigned long long)size_bytes);
    }
    if (place->offset % value_bytes != 0) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, place->offset,
                              value_bytes, "%s: offset must be a multiple of %zu", field,
                              value_bytes);
    }
    uint64_t handle;
    *address = kvk_scratch_address(attend->run->rpc->cache, attend->request.session_id,
                                   place->map_id, place->offset, size_bytes, &handle);
    if (*address == NULL) {
        return kvk_fail(error, KVK_OUT_OF_RANGE, KVK_CAUSE_NOT_MAPPED, field,
                        "%s is not within a scratch mapping of this session", field);
    }
    attend->handles[attend->handle_count++] = handle;
    return KVK_OK;
}

static enum kvk_status take_queries(struct rpc_attend *attend, size_t index,
                                    struct kvk_error *error)
{
    const Kvkeep__V1__Operand *operand = attend->asked->items[index]->queries;
    struct kvk_attention_item *item = &attend->request.items[index];
    size_t value_bytes = kvk_format_bytes(attend->request.format);
    char field[KVK_ERROR_FIELD_SIZE];
    (void)item_field(field, index, "queries");
    item->queries_size = operand_bytes(item->query_count, attend->request.query_heads,
                                       attend->head_size_k, value_bytes);
    if (operand == NULL || (operand->data.len == 0) == (operand->place == NULL)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s must be either data or a place", field);
    }
    if (operand->place != NULL) {
        uint8_t *address;
        enum kvk_status status = take_place(attend, operand->place, item->queries_size, value_bytes,
                                            field, &address, error);
        item->queries = address;
        return status;
    }
    if (operand->data.len != item->queries_size) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, operand->data.len,
                              item->queries_size, "%s has %zu bytes, its shape %llu", field,
                              operand->data.len, (unsigned long long)item->queries_size);
    }
    item->queries = operand->data.data; /* in the arena: aligned */
    return KVK_OK;
}

/* Where a result goes: its place, or the arena, up to what a message may hold. */
static enum kvk_status take_result(struct rpc_attend *attend, const Kvkeep__V1__MemoryPlace *place,
                                   uint64_t size_bytes, const char *field, float **result,
                                   struct kvk_error *error)
{
    void *address;
    if (place != NULL) {
        uint8_t *bytes;
        enum kvk_status status =
            take_place(attend, place, size_bytes, sizeof(float), field, &bytes, error);
        address = bytes;
        *result = address;
        return status;
    }
    const uint64_t limit = attend->run->rpc->config->message_bytes;
    if (size_bytes > limit - attend->answer_bytes) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                              attend->answer_bytes + size_bytes, limit,
                              "the results are larger than a message may be: give them places");
    }
    attend->answer_bytes += size_bytes;
    address = kvk_rpc_arena_take_extra(&attend->run->memory->arena, size_bytes);
    if (address == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, field, "no memory for the results");
    }
    *result = address;
    return KVK_OK;
}

static enum kvk_status take_operands(struct rpc_attend *attend, struct kvk_error *error)
{
    char field[KVK_ERROR_FIELD_SIZE];
    const uint32_t heads = attend->request.query_heads;
    for (size_t i = 0; i < attend->asked->n_items; i++) {
        const Kvkeep__V1__AttendItem *asked = attend->asked->items[i];
        struct kvk_attention_item *item = &attend->request.items[i];
        enum kvk_status status = take_queries(attend, i, error);
        if (status == KVK_OK) {
            status = take_result(
                attend, asked->output_place,
                operand_bytes(item->query_count, heads, attend->head_size_v, sizeof(float)),
                item_field(field, i, "output_place"), &item->output, error);
        }
        if (status == KVK_OK) {
            status = take_result(attend, asked->lse_place,
                                 operand_bytes(item->query_count, heads, 1, sizeof(float)),
                                 item_field(field, i, "lse_place"), &item->lse, error);
        }
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* ---- the answer ---- */

static enum kvk_status reply(struct rpc_attend *attend, struct kvk_error *error)
{
    const size_t count = attend->asked->n_items;
    const uint32_t heads = attend->request.query_heads;
    struct kvk_rpc_arena *arena = &attend->run->memory->arena;
    Kvkeep__V1__AttendResult *results = kvk_rpc_arena_take_extra(arena, count * sizeof(*results));
    Kvkeep__V1__AttendResult **pointers =
        kvk_rpc_arena_take_extra(arena, count * sizeof(*pointers));
    if (results == NULL || pointers == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    for (size_t i = 0; i < count; i++) {
        const struct kvk_attention_item *item = &attend->request.items[i];
        kvkeep__v1__attend_result__init(&results[i]);
        if (attend->asked->items[i]->output_place == NULL) {
            results[i].output =
                kvk_rpc_bytes(item->output, operand_bytes(item->query_count, heads,
                                                          attend->head_size_v, sizeof(float)));
        }
        if (attend->asked->items[i]->lse_place == NULL) {
            results[i].lse =
                kvk_rpc_bytes(item->lse, operand_bytes(item->query_count, heads, 1, sizeof(float)));
        }
        results[i].device_tokens = item->device_tokens;
        results[i].host_tokens = item->host_tokens;
        pointers[i] = &results[i];
    }
    Kvkeep__V1__AttendResponse response = KVKEEP__V1__ATTEND_RESPONSE__INIT;
    const struct kvk_attention_choice *choice = &attend->request.choice;
    response.host_place = (Kvkeep__V1__AttendPlace)choice->place;
    response.in_place_ns = choice->in_place_ns;
    response.bring_in_ns = choice->bring_in_ns;
    response.n_results = count;
    response.results = pointers;
    return kvk_rpc_reply(attend->run, &response.base, error);
}

KVK_RPC_HANDLER(kvk_rpc_attend)
{
    struct kvk_cache *cache = run->rpc->cache;
    struct rpc_attend attend = {.run = run, .asked = (const Kvkeep__V1__AttendRequest *)message};
    enum kvk_status status = check_request(run->rpc, attend.asked, &attend.request, error);
    if (status != KVK_OK) {
        return status;
    }
    const size_t count = attend.asked->n_items;
    struct kvk_rpc_arena *arena = &run->memory->arena;
    struct kvk_attention_item *items = kvk_rpc_arena_take_extra(arena, count * sizeof(*items));
    attend.handles = kvk_rpc_arena_take_extra(arena, count * PLACES_MAX * sizeof(uint64_t));
    if (items == NULL || attend.handles == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "items", "no memory for the call");
    }
    memset(items, 0, count * sizeof(*items));
    attend.request.items = items;
    status = check_items(run->rpc, attend.asked, items, error);
    if (status == KVK_OK) {
        status = kvk_attention_shape(cache, &run->caller, &attend.request, &attend.head_size_k,
                                     &attend.head_size_v, error);
    }
    if (status == KVK_OK) {
        status = take_operands(&attend, error);
    }
    if (status == KVK_OK) {
        status = kvk_attention_run(cache, &run->caller, &attend.request, error);
    }
    for (size_t i = 0; i < attend.handle_count; i++) {
        kvk_scratch_release(cache, attend.handles[i]);
    }
    return status == KVK_OK ? reply(&attend, error) : status;
}
