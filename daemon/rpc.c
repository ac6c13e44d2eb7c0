#include "daemon/rpc.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/random.h"
#include "daemon/rpc_private.h"
#include "proto/descriptor_set.h"

#define SESSION_QUEUE_DEPTH 8
/* Of a request with a prompt: unpacking and comparing it takes some ten microseconds. */
#define LONG_PROMPT_BYTES (UINT64_C(64) << 10)

/* ---- the methods ---- */

#define KVKEEP "/kvkeep.v1.Kvkeep/"
#define ADMIN "/kvkeep.v1.Admin/"

/* Answered on the look-up thread where the engine can do so at once. */
#define INLINE_CALL(service, call, message, handler)                                               \
    {                                                                                              \
        .path = service #call, .name = #call, .kind = KVK_METHOD_UNARY, .class = KVK_CLASS_INLINE, \
        .request = &kvkeep__v1__##message##_request__descriptor, .handle = handler                 \
    }
/* Likewise, and it takes a prompt, which may be long. */
#define PROMPT_CALL(service, call, message, handler)                                               \
    {                                                                                              \
        .path = service #call, .name = #call, .kind = KVK_METHOD_UNARY, .class = KVK_CLASS_INLINE, \
        .prompt = true, .request = &kvkeep__v1__##message##_request__descriptor, .handle = handler \
    }
#define BULK_CALL(service, call, message, handler)                                                 \
    {                                                                                              \
        .path = service #call, .name = #call, .kind = KVK_METHOD_UNARY, .class = KVK_CLASS_BULK,   \
        .request = &kvkeep__v1__##message##_request__descriptor, .handle = handler                 \
    }
#define SLOW_CALL(service, call, message, handler)                                                 \
    {                                                                                              \
        .path = service #call, .name = #call, .kind = KVK_METHOD_UNARY, .class = KVK_CLASS_BULK,   \
        .slow = true, .request = &kvkeep__v1__##message##_request__descriptor, .handle = handler   \
    }
#define STREAM(service, call, direction, run)                                                      \
    {                                                                                              \
        .path = service #call, .name = #call, .kind = direction, .class = KVK_CLASS_BULK,          \
        .on_call = run                                                                             \
    }

static const struct kvk_rpc_method methods[] = {
    PROMPT_CALL(KVKEEP, Lookup, lookup, kvk_rpc_lookup),
    PROMPT_CALL(KVKEEP, Touch, touch, kvk_rpc_touch),
    PROMPT_CALL(KVKEEP, Pin, pin, kvk_rpc_pin),
    INLINE_CALL(KVKEEP, Renew, renew, kvk_rpc_renew),
    INLINE_CALL(KVKEEP, Release, release, kvk_rpc_release),
    INLINE_CALL(KVKEEP, BeginTransfer, begin_transfer, kvk_rpc_begin_transfer),
    INLINE_CALL(KVKEEP, EndTransfer, end_transfer, kvk_rpc_end_transfer),
    PROMPT_CALL(KVKEEP, OpenSequence, open_sequence, kvk_rpc_open_sequence),
    INLINE_CALL(KVKEEP, GetSequence, get_sequence, kvk_rpc_get_sequence),
    INLINE_CALL(KVKEEP, Append, append, kvk_rpc_append),
    INLINE_CALL(KVKEEP, Seal, seal, kvk_rpc_seal),
    INLINE_CALL(KVKEEP, Commit, commit, kvk_rpc_commit),
    INLINE_CALL(KVKEEP, Truncate, truncate, kvk_rpc_truncate),
    INLINE_CALL(KVKEEP, Fork, fork, kvk_rpc_fork),
    INLINE_CALL(KVKEEP, Close, close, kvk_rpc_close),
    INLINE_CALL(KVKEEP, GetServerInfo, get_server_info, kvk_rpc_get_server_info),

    SLOW_CALL(KVKEEP, SwapOut, swap_out, kvk_rpc_swap_out),
    SLOW_CALL(KVKEEP, SwapIn, swap_in, kvk_rpc_swap_in),
    SLOW_CALL(KVKEEP, Attend, attend, kvk_rpc_attend),
    BULK_CALL(KVKEEP, OpenSpace, open_space, kvk_rpc_open_space),
    BULK_CALL(KVKEEP, MapMemory, map_memory, kvk_rpc_map_memory),
    BULK_CALL(KVKEEP, Invalidate, invalidate, kvk_rpc_invalidate),
    SLOW_CALL(KVKEEP, PublishPrefix, publish_prefix, kvk_rpc_publish_prefix),
    BULK_CALL(KVKEEP, UnpublishPrefix, unpublish_prefix, kvk_rpc_unpublish_prefix),
    BULK_CALL(KVKEEP, ListPublicPrefixes, list_public_prefixes, kvk_rpc_list_public_prefixes),

    STREAM(KVKEEP, Session, KVK_METHOD_BIDI, kvk_rpc_session),
    STREAM(KVKEEP, WriteBlocks, KVK_METHOD_CLIENT_STREAM, kvk_rpc_write_blocks),
    STREAM(KVKEEP, ReadBlocks, KVK_METHOD_SERVER_STREAM, kvk_rpc_read_blocks),
    STREAM(KVKEEP, WatchBlocks, KVK_METHOD_SERVER_STREAM, kvk_rpc_watch_blocks),

    BULK_CALL(ADMIN, GetOccupancy, get_occupancy, kvk_rpc_get_occupancy),
    BULK_CALL(ADMIN, ListSpaces, list_spaces, kvk_rpc_list_spaces),
    BULK_CALL(ADMIN, ListSequences, list_sequences, kvk_rpc_list_sequences),
    BULK_CALL(ADMIN, ListLeases, list_leases, kvk_rpc_list_leases),
    BULK_CALL(ADMIN, ListInstances, list_instances, kvk_rpc_list_instances),
    BULK_CALL(ADMIN, GetBlock, get_block, kvk_rpc_get_block),
    BULK_CALL(ADMIN, Why, why, kvk_rpc_why),
    BULK_CALL(ADMIN, GetStats, get_stats, kvk_rpc_get_stats),
    BULK_CALL(ADMIN, ExplainMiss, explain_miss, kvk_rpc_explain_miss),
    BULK_CALL(ADMIN, Doctor, doctor, kvk_rpc_doctor),
    BULK_CALL(ADMIN, GetMissRatio, get_miss_ratio, kvk_rpc_get_miss_ratio),
    BULK_CALL(ADMIN, GetUsage, get_usage, kvk_rpc_get_usage),
    BULK_CALL(ADMIN, GetFleet, get_fleet, kvk_rpc_get_fleet),
    BULK_CALL(ADMIN, Plan, plan, kvk_rpc_plan),
    SLOW_CALL(ADMIN, Drain, drain, kvk_rpc_drain),
    BULK_CALL(ADMIN, CreateTenant, create_tenant, kvk_rpc_create_tenant),
    BULK_CALL(ADMIN, ListTenants, list_tenants, kvk_rpc_list_tenants),
    BULK_CALL(ADMIN, ChangeTenant, change_tenant, kvk_rpc_change_tenant),
    SLOW_CALL(ADMIN, DeleteTenant, delete_tenant, kvk_rpc_delete_tenant),
    BULK_CALL(ADMIN, CreateCredential, create_credential, kvk_rpc_create_credential),
    BULK_CALL(ADMIN, ListCredentials, list_credentials, kvk_rpc_list_credentials),
    BULK_CALL(ADMIN, RotateToken, rotate_token, kvk_rpc_rotate_token),
    BULK_CALL(ADMIN, RevokeTokens, revoke_tokens, kvk_rpc_revoke_tokens),
    BULK_CALL(ADMIN, DeleteCredential, delete_credential, kvk_rpc_delete_credential),
    BULK_CALL(ADMIN, SetSpaceMode, set_space_mode, kvk_rpc_set_space_mode),
    BULK_CALL(ADMIN, TestControl, test_control, kvk_rpc_test_control),
};

#define METHOD_COUNT (sizeof(methods) / sizeof(methods[0]))
_Static_assert(METHOD_COUNT <= KVK_RPC_METHODS_MAX, "room for every method");

/* ---- a unary call ---- */

static bool call_is_cancelled(void *context)
{
    return kvk_call_is_cancelled(context);
}

enum kvk_status kvk_rpc_run_begin(struct kvk_rpc_run *run, const struct kvk_rpc_bound *bound,
                                  struct kvk_call *call, bool may_block, struct kvk_error *error)
{
    run->rpc = bound->rpc;
    run->call = call;
    run->replied = false;
    run->sink = NULL;
    run->caller.call = bound->method->name;
    run->caller.may_block = may_block;
    run->caller.deadline_ns = kvk_call_deadline_ns(call);
    run->caller.cancelled = call_is_cancelled;
    run->caller.cancelled_context = call;
    run->memory = kvk_rpc_memory_begin();
    if (run->memory == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the call");
    }
    if (bound->method->kind == KVK_METHOD_UNARY && kvk_call_caller(call) != NULL) {
        run->caller.credential = kvk_call_caller(call);
        return KVK_OK; /* kvk_rpc_call_owner() has asked already */
    }
    return kvk_rpc_authenticate(bound->rpc, call, &run->caller.credential, error);
}

/* Who is over its rate and does not wait, as it was told to, is waited for: what it has sent on
 * stays where it is, and costs nobody anything. */
static void rated_hold(struct kvk_call *call, enum kvk_status status, const struct kvk_error *error)
{
    if (status != KVK_OK) {
        kvk_call_hold_owner(call, error->retry_after_ms * KVK_NS_PER_MS);
    }
}

/* True: the call was ended. False: it would have to wait, and nothing has changed. */
static bool unary_run(struct kvk_call *call, const struct kvk_rpc_bound *bound, bool may_block)
{
    const struct kvk_rpc_method *method = bound->method;
    struct kvk_error error = {.status = KVK_OK};
    struct kvk_rpc_run run;
    ProtobufCMessage *message = NULL;
    uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
    enum kvk_status status = kvk_rpc_run_begin(&run, bound, call, may_block, &error);
    if (status == KVK_OK) {
        status = kvk_rpc_rate_take(&run, bound, NULL, &error);
        rated_hold(call, status, &error);
    }
    if (status == KVK_OK) {
        status = kvk_wire_unpack(bound->rpc->config, &run.memory->arena, method->request,
                                 kvk_call_message(call), &message, &error);
    }
    if (status == KVK_OK) {
        status = kvk_rpc_rate_take(&run, bound, message, &error);
        rated_hold(call, status, &error);
    }
    if (status == KVK_OK) {
        status = method->handle(&run, message, &error);
        KVK_ASSERT((status == KVK_OK) == run.replied);
    }
    if (status == KVK_WOULD_BLOCK) {
        KVK_ASSERT(!may_block);
        return false;
    }
    kvk_histogram_record(bound->latency, kvk_clock_now(kvk_clock_monotonic()) - begun_ns);
    if (status != KVK_OK) {
        error.status = status;
        kvk_call_fail(call, &error);
    }
    return true;
}

/* The cancel is seen by who runs the call, through kvk_call_is_cancelled(). */
static void unary_cancelled(struct kvk_call *call)
{
    (void)call;
}

static void unary_deferred(struct kvk_call *call)
{
    kvk_call_on_cancel(call, unary_cancelled, NULL);
    bool ended = unary_run(call, kvk_call_context(call), true);
    KVK_ASSERT(ended);
}

static void unary_inline(struct kvk_call *call, void *rpc_bound)
{
    if (!unary_run(call, rpc_bound, false)) {
        kvk_call_set_context(call, rpc_bound);
        kvk_call_defer(call, unary_deferred);
    }
}

static void unary_bulk(struct kvk_call *call, void *rpc_bound)
{
    const struct kvk_rpc_bound *bound = rpc_bound;
    if (bound->method->slow) {
        kvk_call_on_cancel(call, unary_cancelled, NULL);
    }
    bool ended = unary_run(call, bound, true);
    KVK_ASSERT(ended);
}

/* ---- answers ---- */

enum kvk_status kvk_rpc_reply(struct kvk_rpc_run *run, const ProtobufCMessage *message,
                              struct kvk_error *error)
{
    KVK_ASSERT(!run->replied);
    if (run->sink != NULL) {
        run->replied = true;
        run->sink(run->sink_context, message);
        return KVK_OK;
    }
    size_t size_bytes = protobuf_c_message_get_packed_size(message);
    uint64_t limit = run->rpc->config->message_bytes;
    if (size_bytes > limit) {
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", size_bytes, limit,
                              "the answer is larger than a message may be");
    }
    uint8_t *buffer = kvk_call_reply_alloc(run->call, size_bytes);
    size_t packed_bytes = protobuf_c_message_pack(message, buffer);
    KVK_ASSERT(packed_bytes == size_bytes);
    run->replied = true;
    kvk_call_reply(run->call);
    return KVK_OK;
}

ProtobufCBinaryData kvk_rpc_text(const char *text)
{
    return kvk_rpc_bytes(text, strlen(text));
}

Kvkeep__V1__DiskUse *kvk_rpc_fill_disk(struct kvk_rpc_tables *packed,
                                       const struct kvk_disk_estimate *estimate)
{
    if (estimate->disk_tokens == 0) {
        return NULL;
    }
    kvkeep__v1__disk_use__init(&packed->disk);
    packed->disk.disk_tokens = estimate->disk_tokens;
    packed->disk.restore_ns = estimate->restore_ns;
    packed->disk.recompute_ns = estimate->recompute_ns;
    packed->disk.restored_tokens = estimate->restored_tokens;
    packed->disk.recompute_tokens = estimate->recompute_tokens;
    return &packed->disk;
}

size_t kvk_rpc_fill_tables(struct kvk_rpc_tables *target, const struct kvk_tables *tables)
{
    KVK_ASSERT(tables->part_count <= KVK_GROUP_COUNT_MAX);
    for (uint32_t i = 0; i < tables->part_count; i++) {
        const struct kvk_table_part *part = &tables->parts[i];
        Kvkeep__V1__BlockTable *table = &target->parts[i];
        kvkeep__v1__block_table__init(table);
        table->group = part->group;
        table->first_block = part->first_block;
        table->slots = kvk_rpc_bytes(part->slots, part->count * sizeof(part->slots[0]));
        table->tiers = kvk_rpc_bytes(part->tiers, part->count * sizeof(part->tiers[0]));
        table->generations =
            kvk_rpc_bytes(part->generations, part->count * sizeof(part->generations[0]));
        if (part->any_public) {
            table->spaces = kvk_rpc_bytes(part->spaces, part->count * sizeof(part->spaces[0]));
        }
        target->pointers[i] = table;
    }
    return tables->part_count;
}

/* The causes travel by number. */
_Static_assert((int)KVK_CAUSE_SWITCHED_OFF == (int)KVKEEP__V1__CAUSE__CAUSE_SWITCHED_OFF &&
                   (int)KVK_CAUSE_LENGTH_MISMATCH == (int)KVKEEP__V1__CAUSE__CAUSE_LENGTH_MISMATCH,
               "the API's causes are those of base/status.h");

size_t kvk_rpc_error_details(const struct kvk_error *error, int code, uint8_t *buffer,
                             size_t capacity)
{
    static char type_url[] = "type.googleapis.com/kvkeep.v1.ErrorDetail";
    Kvkeep__V1__ErrorDetail detail = KVKEEP__V1__ERROR_DETAIL__INIT;
    detail.cause = (Kvkeep__V1__Cause)error->cause;
    detail.field = kvk_rpc_text(error->field);
    detail.value = error->value;
    detail.limit = error->limit;
    detail.retry_after_ms = error->retry_after_ms;
    detail.message = kvk_rpc_text(error->text);
    struct kvk_rpc_advice advice;
    detail.advice = kvk_rpc_fill_advice(&advice, &error->advice);
    uint8_t packed[KVK_ERROR_FIELD_SIZE + KVK_ERROR_TEXT_SIZE + 24 * KVK_ADVICE_MAX + 128];
    KVK_ASSERT(kvkeep__v1__error_detail__get_packed_size(&detail) <= sizeof(packed));
    size_t packed_bytes = kvkeep__v1__error_detail__pack(&detail, packed);

    Google__Protobuf__Any any = GOOGLE__PROTOBUF__ANY__INIT;
    any.type_url = type_url;
    any.value = kvk_rpc_bytes(packed, packed_bytes);
    Google__Protobuf__Any *details[] = {&any};
    char text[KVK_ERROR_TEXT_SIZE];
    (void)snprintf(text, sizeof(text), "%s", error->text);
    Google__Rpc__Status status = GOOGLE__RPC__STATUS__INIT;
    status.code = code;
    status.message = text;
    status.n_details = 1;
    status.details = details;
    if (google__rpc__status__get_packed_size(&status) > capacity) {
        return 0;
    }
    return google__rpc__status__pack(&status, buffer);
}

/* ---- create and destroy ---- */

static void bind_methods(struct kvk_rpc *rpc)
{
    rpc->method_count = METHOD_COUNT;
    for (uint32_t i = 0; i < METHOD_COUNT; i++) {
        const struct kvk_rpc_method *method = &methods[i];
        rpc->bound[i] =
            (struct kvk_rpc_bound){.rpc = rpc, .method = method, .rated = kvk_rpc_is_rated(method)};
        kvk_rpc_owner_bind(&rpc->bound[i]);
        struct kvk_method *target = &rpc->methods[i];
        target->path = method->path;
        target->kind = method->kind;
        target->class = method->class;
        target->user_data = &rpc->bound[i];
        target->on_call = method->on_call;
        target->long_bytes = method->prompt ? LONG_PROMPT_BYTES : 0;
        if (method->kind == KVK_METHOD_UNARY) {
            target->on_call = method->class == KVK_CLASS_INLINE ? unary_inline : unary_bulk;
        }
        if (method->kind == KVK_METHOD_BIDI) {
            target->queue_depth = SESSION_QUEUE_DEPTH;
        }
    }
}

enum kvk_status kvk_rpc_create(const struct kvk_rpc_options *options, struct kvk_rpc **rpc,
                               struct kvk_error *error)
{
    *rpc = NULL;
    struct kvk_rpc *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the calls");
    }
    made->config = options->config;
    made->tenants = options->tenants;
    made->audit = options->audit;
    made->clock = options->clock != NULL ? options->clock : kvk_clock_monotonic();
    made->start_ns = kvk_clock_now(made->clock);
    enum kvk_status status = kvk_auth_limit_init(&made->auth_limit, made->config->auth_failures,
                                                 made->config->auth_failure_ms, error);
    if (status != KVK_OK) {
        free(made);
        return status;
    }
    if (options->side_path != NULL) {
        (void)snprintf(made->side_path, sizeof(made->side_path), "%s", options->side_path);
    }
    kvk_random_secret(made->boot_id, sizeof(made->boot_id));
    kvk_rpc_sessions_init(&made->sessions);
    kvk_rpc_watches_init(&made->watches);
    bind_methods(made);
    status = kvk_rpc_latencies_create(made, error);
    if (status != KVK_OK) {
        kvk_rpc_destroy(made);
        return status;
    }
    *rpc = made;
    return KVK_OK;
}

void kvk_rpc_destroy(struct kvk_rpc *rpc)
{
    if (rpc == NULL) {
        return;
    }
    kvk_rpc_detach(rpc);
    kvk_rpc_sessions_finish(&rpc->sessions);
    kvk_rpc_watches_finish(&rpc->watches);
    kvk_auth_limit_finish(&rpc->auth_limit);
    kvk_metrics_destroy(rpc->metrics);
    free(rpc);
}

const struct kvk_method *kvk_rpc_methods(const struct kvk_rpc *rpc, uint32_t *method_count)
{
    *method_count = rpc->method_count;
    return rpc->methods;
}

static void rpc_drain(void *user_data)
{
    struct kvk_rpc *rpc = user_data;
    kvk_rpc_watches_drain(&rpc->watches);
    kvk_rpc_sessions_drain(rpc);
}

void kvk_rpc_set_callbacks(struct kvk_rpc *rpc, struct kvk_server_options *options)
{
    options->error_details = kvk_rpc_error_details;
    options->on_drain = rpc_drain;
    options->call_owner = kvk_rpc_call_owner;
    options->owner_count = KVK_RPC_OWNERS;
    options->user_data = rpc;
    options->descriptor_set.data = kvk_descriptor_set(&options->descriptor_set.size_bytes);
}

void kvk_rpc_attach(struct kvk_rpc *rpc, struct kvk_cache *cache, struct kvk_server *server,
                    const struct kvk_device_info *device)
{
    rpc->cache = cache;
    rpc->server = server;
    rpc->device = *device;
    kvk_rpc_watches_start(rpc);
}

void kvk_rpc_set_publisher(struct kvk_rpc *rpc, const struct kvk_publisher *publisher)
{
    rpc->publisher = publisher;
}

void kvk_rpc_detach(struct kvk_rpc *rpc)
{
    kvk_rpc_watches_join(&rpc->watches);
    kvk_rpc_sessions_join(&rpc->sessions);
    rpc->cache = NULL;
    rpc->server = NULL;
    rpc->publisher = NULL;
}
