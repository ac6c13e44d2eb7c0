/*
 * Values of requests: everything that comes from outside is checked here for length, overflow and
 * range, and each refusal names its field. What lies behind a number (is there such a sequence, may
 * this tenant have it) is the engine's to say.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "daemon/rpc_private.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tokens are little-endian on the wire and used where they lie");

#define NAME_SIZE_MAX (KVK_NAME_SIZE - 1)

typedef char field_name[KVK_ERROR_FIELD_SIZE];

/* "prefix" and "name" as "prefix.name"; either may be "". */
static const char *field_join(field_name target, const char *prefix, const char *name)
{
    (void)snprintf(target, KVK_ERROR_FIELD_SIZE, "%s%s%s", prefix, *prefix && *name ? "." : "",
                   name);
    return target;
}

static const char *field_at(field_name target, const char *prefix, size_t index, const char *name)
{
    (void)snprintf(target, KVK_ERROR_FIELD_SIZE, "%s[%zu]%s%s", prefix, index, *name ? "." : "",
                   name);
    return target;
}

static enum kvk_status fail(struct kvk_error *error, const char *field, const char *text)
{
    return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s %s", field, text);
}

static enum kvk_status fail_number(struct kvk_error *error, const char *field, uint64_t value,
                                   uint64_t limit, const char *text)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit, "%s %s", field,
                          text);
}

/* ---- numbers ---- */

enum kvk_status kvk_rpc_check_id(uint64_t id, const char *field, struct kvk_error *error)
{
    return id != 0 ? KVK_OK : fail(error, field, "is required and never 0");
}

enum kvk_status kvk_rpc_check_count(uint64_t value, uint64_t limit, const char *field,
                                    struct kvk_error *error)
{
    if (value >= 1 && value <= limit) {
        return KVK_OK;
    }
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit,
                          "%s must be 1 to %llu", field, (unsigned long long)limit);
}

enum kvk_status kvk_rpc_check_range(uint64_t first, uint64_t count, const char *field,
                                    struct kvk_error *error)
{
    uint64_t end;
    if (count == 0) {
        return fail(error, field, "must be at least 1");
    }
    if (!kvk_add_fits(first, count, &end)) {
        return fail_number(error, field, count, UINT64_MAX - first,
                           "makes a range that does not fit in 64 bits");
    }
    return KVK_OK;
}

enum kvk_status kvk_rpc_check_number(double value, bool positive, const char *field,
                                     struct kvk_error *error)
{
    if (!isfinite(value)) {
        return fail(error, field, "must be a finite number");
    }
    if (value < 0 || (positive && value == 0)) {
        return fail(error, field, positive ? "must be above 0" : "must not be negative");
    }
    return KVK_OK;
}

enum kvk_status kvk_rpc_check_one_of(uint64_t sequence_id, uint64_t lease_id, const char *prefix,
                                     struct kvk_error *error)
{
    if ((sequence_id != 0) != (lease_id != 0)) {
        return KVK_OK;
    }
    field_name field;
    return fail(error, field_join(field, prefix, "sequence_id"),
                sequence_id != 0 ? "and lease_id are both given: one of the two is meant"
                                 : "or lease_id is required");
}

static int compare_ids(const void *a, const void *b)
{
    uint64_t left = *(const uint64_t *)a;
    uint64_t right = *(const uint64_t *)b;
    return (left > right) - (left < right);
}

enum kvk_status kvk_rpc_check_ids(struct kvk_rpc_run *run, const uint64_t *ids, size_t count,
                                  const char *field, struct kvk_error *error)
{
    if (count == 0) {
        return fail(error, field, "names nothing");
    }
    if (count == 1) {
        return kvk_rpc_check_id(ids[0], field, error);
    }
    uint64_t *sorted = kvk_rpc_arena_take_extra(&run->memory->arena, count * sizeof(*sorted));
    if (sorted == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the request");
    }
    memcpy(sorted, ids, count * sizeof(*sorted));
    qsort(sorted, count, sizeof(*sorted), compare_ids);
    for (size_t i = 0; i < count; i++) {
        if (sorted[i] == 0) {
            return fail(error, field, "names an id of 0");
        }
        if (i > 0 && sorted[i] == sorted[i - 1]) {
            return fail_number(error, field, sorted[i], 0, "names an id twice");
        }
    }
    return KVK_OK;
}

/* ---- bytes ---- */

static enum kvk_status check_size(const ProtobufCBinaryData *bytes, size_t size_min,
                                  size_t size_max, const char *field, struct kvk_error *error)
{
    if (bytes->len >= size_min && bytes->len <= size_max) {
        return KVK_OK;
    }
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, bytes->len, size_max,
                          "%s must be %zu to %zu bytes", field, size_min, size_max);
}

static struct kvk_view view_of(const ProtobufCBinaryData *bytes)
{
    return (struct kvk_view){.data = bytes->data, .size = bytes->len};
}

enum kvk_status kvk_rpc_check_name(const ProtobufCBinaryData *bytes, size_t size_min,
                                   size_t size_max, const char *field, struct kvk_view *view,
                                   struct kvk_error *error)
{
    enum kvk_status status = check_size(bytes, size_min, size_max, field, error);
    if (status != KVK_OK) {
        return status;
    }
    if (!kvk_utf8_ok(bytes->data, bytes->len)) {
        return fail(error, field, "must be valid UTF-8 without NUL");
    }
    *view = view_of(bytes);
    return KVK_OK;
}

enum kvk_status kvk_rpc_check_request_id(const ProtobufCBinaryData *bytes,
                                         struct kvk_request_id *request_id, struct kvk_error *error)
{
    enum kvk_status status = check_size(bytes, 0, KVK_REQUEST_ID_SIZE_MAX, "request_id", error);
    if (status != KVK_OK) {
        return status;
    }
    request_id->size = (uint32_t)bytes->len;
    if (bytes->len > 0) {
        memcpy(request_id->bytes, bytes->data, bytes->len);
    }
    return KVK_OK;
}

/* ---- prompts ---- */

enum kvk_status kvk_rpc_check_tokens(struct kvk_rpc_run *run, const ProtobufCBinaryData *bytes,
                                     const char *field, const uint32_t **tokens,
                                     uint64_t *token_count, struct kvk_error *error)
{
    *tokens = NULL;
    *token_count = bytes->len / sizeof(uint32_t);
    if (bytes->len % sizeof(uint32_t) != 0) {
        return fail_number(error, field, bytes->len, 0, "must be whole tokens of 4 bytes");
    }
    uint64_t limit = run->rpc->config->tokens;
    if (*token_count > limit) {
        return fail_number(error, field, *token_count, limit,
                           "are more tokens than a prompt may be");
    }
    if (bytes->len == 0) {
        return KVK_OK;
    }
    const void *data = bytes->data;
    if ((uintptr_t)data % _Alignof(uint32_t) != 0) {
        void *copy = kvk_rpc_arena_take_extra(&run->memory->arena, bytes->len);
        if (copy == NULL) {
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, field, "no memory for tokens");
        }
        data = memcpy(copy, data, bytes->len);
    }
    *tokens = data;
    return KVK_OK;
}

static enum kvk_status check_span(const Kvkeep__V1__ContentSpan *message, uint64_t first,
                                  uint64_t end, const char *field, size_t index,
                                  struct kvk_content_span *span, struct kvk_error *error)
{
    field_name name;
    enum kvk_status status = check_size(&message->digest, 1, KVK_DIGEST_SIZE_MAX,
                                        field_at(name, field, index, "digest"), error);
    if (status != KVK_OK) {
        return status;
    }
    uint64_t span_end;
    if (message->count == 0 || !kvk_add_fits(message->first, message->count, &span_end) ||
        span_end > end) {
        return fail_number(error, field_at(name, field, index, "count"), message->count, end,
                           "must be at least 1, and the span must end within the tokens");
    }
    if (message->first < first) {
        return fail_number(error, field_at(name, field, index, "first"), message->first, first,
                           "is before the tokens or the end of the span before");
    }
    span->first = message->first;
    span->count = message->count;
    span->digest_size = (uint32_t)message->digest.len;
    memcpy(span->digest, message->digest.data, message->digest.len);
    return KVK_OK;
}

enum kvk_status kvk_rpc_check_spans(struct kvk_rpc_run *run, size_t span_count,
                                    Kvkeep__V1__ContentSpan *const *messages, uint64_t first,
                                    uint64_t token_count, const char *field,
                                    const struct kvk_content_span **spans, struct kvk_error *error)
{
    *spans = NULL;
    if (span_count == 0) {
        return KVK_OK;
    }
    struct kvk_content_span *checked =
        kvk_rpc_arena_take_extra(&run->memory->arena, span_count * sizeof(*checked));
    if (checked == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, field, "no memory for spans");
    }
    uint64_t end = first + token_count;
    for (size_t i = 0; i < span_count; i++) {
        enum kvk_status status = check_span(messages[i], first, end, field, i, &checked[i], error);
        if (status != KVK_OK) {
            return status;
        }
        first = checked[i].first + checked[i].count;
    }
    *spans = checked;
    return KVK_OK;
}

enum kvk_status kvk_rpc_check_prompt(struct kvk_rpc_run *run, const Kvkeep__V1__Prompt *message,
                                     const char *field, struct kvk_prompt *prompt,
                                     struct kvk_error *error)
{
    memset(prompt, 0, sizeof(*prompt));
    if (message == NULL) {
        return KVK_OK;
    }
    field_name name;
    enum kvk_status status =
        kvk_rpc_check_tokens(run, &message->tokens, field_join(name, field, "tokens"),
                             &prompt->tokens, &prompt->token_count, error);
    if (status == KVK_OK) {
        status = check_size(&message->salt, 0, run->rpc->config->salt_bytes,
                            field_join(name, field, "salt"), error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_spans(run, message->n_spans, message->spans, 0, prompt->token_count,
                                     field_join(name, field, "spans"), &prompt->spans, error);
    }
    prompt->salt = message->salt.data;
    prompt->salt_size = message->salt.len;
    prompt->span_count = (uint32_t)message->n_spans;
    prompt->use_public = message->use_public;
    prompt->whole_blocks = message->whole_blocks;
    return status;
}

/* ---- enums: a number that is not listed can come in at any time ---- */

static enum kvk_status check_enum(int value, int from, int to, const char *field,
                                  struct kvk_error *error)
{
    if (value >= from && value <= to) {
        return KVK_OK;
    }
    return fail_number(error, field, (uint64_t)(uint32_t)value, (uint64_t)to,
                       "is not a known value, or not one that may stand here");
}

enum kvk_status kvk_rpc_check_format(Kvkeep__V1__Format format, bool may_be_none, const char *field,
                                     enum kvk_format *result, struct kvk_error *error)
{
    _Static_assert((int)KVK_FORMAT_INT8_32 == (int)KVKEEP__V1__FORMAT__FORMAT_INT8_32,
                   "numbers agree");
    *result = (enum kvk_format)format;
    return check_enum((int)format, may_be_none ? KVK_FORMAT_NONE : KVK_FORMAT_FP32, KVK_FORMAT_MAX,
                      field, error);
}

enum kvk_status kvk_rpc_check_layout(Kvkeep__V1__Layout layout, const char *field,
                                     enum kvk_layout *result, struct kvk_error *error)
{
    _Static_assert((int)KVK_LAYOUT_OPAQUE == (int)KVKEEP__V1__LAYOUT__LAYOUT_OPAQUE,
                   "numbers agree");
    *result = (enum kvk_layout)layout;
    return check_enum((int)layout, KVK_LAYOUT_HEADS_FIRST, KVK_LAYOUT_OPAQUE, field, error);
}

enum kvk_status kvk_rpc_check_attention(Kvkeep__V1__Attention attention, const char *field,
                                        enum kvk_attention *result, struct kvk_error *error)
{
    _Static_assert((int)KVK_ATTENTION_CROSS == (int)KVKEEP__V1__ATTENTION__ATTENTION_CROSS,
                   "numbers agree");
    *result = (enum kvk_attention)attention;
    return check_enum((int)attention, KVK_ATTENTION_SELF, KVK_ATTENTION_CROSS, field, error);
}

enum kvk_status kvk_rpc_check_tier(Kvkeep__V1__Tier tier, const char *field, int *result,
                                   struct kvk_error *error)
{
    _Static_assert((int)KVK_TIER_DEVICE + 1 == (int)KVKEEP__V1__TIER__TIER_DEVICE &&
                       (int)KVK_TIER_HOST + 1 == (int)KVKEEP__V1__TIER__TIER_HOST,
                   "the API's numbers are ours and 1");
    *result = (int)tier - 1;
    return check_enum((int)tier, KVKEEP__V1__TIER__TIER_UNSPECIFIED, KVKEEP__V1__TIER__TIER_HOST,
                      field, error);
}

/* ---- spaces ---- */

/* The engine checks what the parts hold, for it makes the identity's canonical bytes of them. */
static enum kvk_status take_identity(const Kvkeep__V1__Identity *message,
                                     struct kvk_identity *identity, struct kvk_error *error)
{
    if (message == NULL) {
        return fail(error, "identity", "is required");
    }
    const struct {
        enum kvk_identity_part part;
        const ProtobufCBinaryData *bytes;
    } parts[] = {
        {KVK_IDENTITY_MODEL, &message->model},
        {KVK_IDENTITY_REVISION, &message->revision},
        {KVK_IDENTITY_TOKENIZER, &message->tokenizer_digest},
        {KVK_IDENTITY_TEMPLATE, &message->template_digest},
        {KVK_IDENTITY_POSITION, &message->position_encoding},
        {KVK_IDENTITY_ADAPTER_NAME, &message->adapter_name},
        {KVK_IDENTITY_ADAPTER_ID, &message->adapter_id},
        {KVK_IDENTITY_ADAPTER_VERSION, &message->adapter_version},
        {KVK_IDENTITY_KV_FORMAT, &message->kv_format},
        {KVK_IDENTITY_MASK, &message->mask_rule},
    };
    _Static_assert(sizeof(parts) / sizeof(parts[0]) == KVK_IDENTITY_PART_COUNT, "every part");
    for (size_t i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        identity->parts[parts[i].part - 1] = view_of(parts[i].bytes);
    }
    if (message->n_extra > KVK_IDENTITY_EXTRA_MAX) {
        return fail_number(error, "identity.extra", message->n_extra, KVK_IDENTITY_EXTRA_MAX,
                           "has too many pairs");
    }
    for (size_t i = 0; i < message->n_extra; i++) {
        identity->extra[i].name = view_of(&message->extra[i]->name);
        identity->extra[i].value = view_of(&message->extra[i]->value);
    }
    identity->extra_count = (uint32_t)message->n_extra;
    return KVK_OK;
}

static enum kvk_status check_group(const Kvkeep__V1__LayerGroup *message, size_t index,
                                   struct kvk_geometry *geometry, struct kvk_error *error)
{
    field_name field;
    enum kvk_status status =
        kvk_rpc_check_format(message->format_k, true, field_at(field, "groups", index, "format_k"),
                             &geometry->format_k, error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_format(message->format_v, true,
                                      field_at(field, "groups", index, "format_v"),
                                      &geometry->format_v, error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_layout(message->layout, field_at(field, "groups", index, "layout"),
                                      &geometry->layout, error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_attention(message->attention,
                                         field_at(field, "groups", index, "attention"),
                                         &geometry->attention, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    geometry->layers = message->layers;
    geometry->kv_heads = message->kv_heads;
    geometry->head_size_k = message->head_size_k;
    geometry->head_size_v = message->head_size_v;
    geometry->latent = message->latent;
    geometry->window = message->window;
    geometry->sinks = message->sinks;
    geometry->opaque_bytes = message->opaque_bytes;
    (void)snprintf(field, sizeof(field), "groups[%zu].", index);
    return kvk_geometry_check(geometry, field, error);
}

enum kvk_status kvk_rpc_check_groups(const struct kvk_rpc_shape *shape,
                                     struct kvk_geometry groups[KVK_GROUP_COUNT_MAX],
                                     struct kvk_error *error)
{
    /* Before the groups: their own check would name a field that the message does not have. */
    const uint32_t tensor_shards = shape->tensor_shards > 0 ? shape->tensor_shards : 1;
    const uint32_t pipeline_shards = shape->pipeline_shards > 0 ? shape->pipeline_shards : 1;
    const struct {
        uint64_t value;
        uint64_t limit;
        const char *field;
    } counts[] = {
        {shape->block_tokens, KVK_BLOCK_TOKENS_MAX, "block_tokens"},
        {shape->group_count, KVK_GROUP_COUNT_MAX, "groups"},
        {tensor_shards, KVK_SHARD_COUNT_MAX, "tensor_shards"},
        {pipeline_shards, KVK_SHARD_COUNT_MAX, "pipeline_shards"},
        {(uint64_t)tensor_shards * pipeline_shards, KVK_SHARD_COUNT_MAX, "pipeline_shards"},
    };
    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        enum kvk_status status =
            kvk_rpc_check_count(counts[i].value, counts[i].limit, counts[i].field, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    for (size_t i = 0; i < shape->group_count; i++) {
        groups[i].block_tokens = shape->block_tokens;
        groups[i].tensor_shards = tensor_shards;
        groups[i].pipeline_shards = pipeline_shards;
        enum kvk_status status = check_group(shape->groups[i], i, &groups[i], error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

static enum kvk_status space_groups(const Kvkeep__V1__OpenSpaceRequest *message,
                                    struct kvk_space_request *request, struct kvk_error *error)
{
    const struct kvk_rpc_shape shape = {.block_tokens = message->block_tokens,
                                        .tensor_shards = message->tensor_shards,
                                        .pipeline_shards = message->pipeline_shards,
                                        .groups = message->groups,
                                        .group_count = message->n_groups};
    enum kvk_status status = kvk_rpc_check_groups(&shape, request->groups, error);
    for (size_t i = 0; i < message->n_groups && status == KVK_OK; i++) {
        field_name field;
        status = kvk_rpc_check_format(message->groups[i]->disk_format, true,
                                      field_at(field, "groups", i, "disk_format"),
                                      &request->disk_formats[i], error);
        if (status == KVK_OK) {
            status = kvk_rpc_check_format(message->groups[i]->host_format, true,
                                          field_at(field, "groups", i, "host_format"),
                                          &request->host_formats[i], error);
        }
    }
    request->block_tokens = message->block_tokens;
    request->group_count = status == KVK_OK ? (uint32_t)message->n_groups : 0;
    return status;
}

static enum kvk_status check_cost(const Kvkeep__V1__PrefillCost *message,
                                  struct kvk_space_request *request, struct kvk_error *error)
{
    if (message == NULL) {
        return KVK_OK;
    }
    request->flops_per_token = message->flops_per_token;
    request->flops_per_token_position = message->flops_per_token_position;
    request->flops_per_second = message->flops_per_second;
    enum kvk_status status = kvk_rpc_check_number(message->flops_per_token, false,
                                                  "prefill_cost.flops_per_token", error);
    if (status == KVK_OK) {
        status = kvk_rpc_check_number(message->flops_per_token_position, false,
                                      "prefill_cost.flops_per_token_position", error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_check_number(message->flops_per_second, false,
                                      "prefill_cost.flops_per_second", error);
    }
    return status;
}

enum kvk_status kvk_rpc_check_space(const Kvkeep__V1__OpenSpaceRequest *message,
                                    struct kvk_space_request *request, struct kvk_error *error)
{
    memset(request, 0, sizeof(*request));
    enum kvk_status status =
        kvk_rpc_check_name(&message->tenant, 0, NAME_SIZE_MAX, "tenant", &request->tenant, error);
    if (status == KVK_OK) {
        status = take_identity(message->identity, &request->identity, error);
    }
    if (status == KVK_OK) {
        status = space_groups(message, request, error);
    }
    if (status == KVK_OK) {
        status = check_cost(message->prefill_cost, request, error);
    }
    request->lookup_min_tokens = message->lookup_min_tokens;
    request->idle_ms = message->idle_ms;
    request->partial_reuse = (enum kvk_partial_reuse)message->partial_reuse;
    return status == KVK_OK ? check_enum((int)message->partial_reuse, KVK_PARTIAL_REUSE_AS_IT_IS,
                                         KVK_PARTIAL_REUSE_ON, "partial_reuse", error)
                            : status;
}
