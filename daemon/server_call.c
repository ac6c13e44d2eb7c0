/*
 * Calls: armed so that gRPC may hand them over, given to their handler, their callbacks run one at
 * a time, and recycled. What they send is server_send.c.
 */
#include "daemon/server_private.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/assert.h"
#include "base/clock.h"
#include "daemon/server_sanitize.h"

#define CALL_OF(member, tag)                                                                       \
    ((struct kvk_call *)(void *)((char *)(tag)-offsetof(struct kvk_call, member)))

static void call_new(struct kvk_tag *tag, bool ok);
static void call_received(struct kvk_tag *tag, bool ok);
static void call_closed(struct kvk_tag *tag, bool ok);

#define INLINE_QUANTUM_NS UINT64_C(100000)

/* What reading a message costs this thread, in ns for 1,024 bytes: gRPC does it before anybody
 * knows whose it is, so that it is paid for with the call. */
#define READ_NS_PER_KIB 450U

enum kvk_status kvk_calls_init(struct kvk_server *server, struct kvk_error *error)
{
    const uint32_t owner_count = server->options.owner_count;
    kvk_lock_init(&server->calls.lock);
    server->calls.owner_live = calloc(owner_count, sizeof(*server->calls.owner_live));
    server->calls.owner_hold_ns = calloc(owner_count + 1, sizeof(*server->calls.owner_hold_ns));
    if (server->calls.owner_live == NULL || server->calls.owner_hold_ns == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the server");
    }
    enum kvk_status status =
        kvk_fair_init(&server->calls.fair, owner_count + 1, 1, INLINE_QUANTUM_NS, error);
    if (status == KVK_OK) {
        kvk_fair_pace(&server->calls.fair, server->options.owner_share_percent, owner_count);
    }
    return status;
}

/* ---- from the free list and back ---- */

static struct kvk_call *call_take(struct kvk_server *server)
{
    kvk_lock(&server->calls.lock);
    struct kvk_call *call = server->calls.free;
    if (call != NULL) {
        server->calls.free = call->next;
    }
    kvk_unlock(&server->calls.lock);
    if (call == NULL) {
        call = calloc(1, sizeof(*call));
        KVK_ASSERT(call != NULL); /* gRPC aborts without memory as well */
        call->server = server;
        call->tag_new.run = call_new;
        call->tag_send.run = kvk_call_send_done;
        call->tag_receive.run = call_received;
        call->tag_close.run = call_closed;
        kvk_lock_init(&call->lock);
        grpc_metadata_array_init(&call->metadata);
    }
    return call;
}

/* All that a call has got goes; what is set once per object stays. */
static void call_give(struct kvk_call *call)
{
    struct kvk_server *server = call->server;
    if (call->received != NULL) {
        grpc_byte_buffer_destroy(call->received);
    }
    if (call->flat_made) {
        grpc_slice_unref(call->flat);
    }
    if (call->reply_made) {
        grpc_slice_unref(call->reply);
    }
    if (call->sending != NULL) {
        grpc_byte_buffer_destroy(call->sending);
    }
    if (call->status_text_made) {
        grpc_slice_unref(call->status_text);
    }
    if (call->trailing_made) {
        grpc_slice_unref(call->trailing.value);
    }
    KVK_ASSERT(call->send_count == 0);
    free(call->send_queue);
    if (call->method->registered == NULL) {
        grpc_call_details_destroy(&call->details);
    }
    call->metadata.count = 0; /* its slices belong to the call; the array serves again */
    call->received = NULL;
    call->flat_made = false;
    call->reply_made = false;
    call->sending = NULL;
    call->status_text_made = false;
    call->trailing_made = false;
    call->send_queue = NULL;

    kvk_lock(&server->calls.lock);
    call->next = server->calls.free;
    server->calls.free = call;
    kvk_unlock(&server->calls.lock);
}

void kvk_calls_finish(struct kvk_server *server)
{
    KVK_ASSERT(atomic_load(&server->calls.live_count) == 0);
    KVK_ASSERT(atomic_load(&server->calls.armed_count) == 0);
    while (server->calls.free != NULL) {
        struct kvk_call *call = server->calls.free;
        server->calls.free = call->next;
        grpc_metadata_array_destroy(&call->metadata);
        kvk_lock_finish(&call->lock);
        free(call);
    }
    kvk_fair_finish(&server->calls.fair);
    free(server->calls.owner_live);
    free(server->calls.owner_hold_ns);
    kvk_lock_finish(&server->calls.lock);
}

void kvk_calls_arm(struct kvk_server_method *method)
{
    struct kvk_server *server = method->server;
    struct kvk_call *call = call_take(server);
    call->method = method;
    call->connection = NULL;
    call->call = NULL;
    call->owner = 0;
    call->owner_counted = false;
    call->caller = NULL;
    call->close_cancelled = 0;
    atomic_store_explicit(&call->cancelled, false, memory_order_relaxed);
    call->context = NULL;
    call->events = NULL;
    call->on_cancel = NULL;
    call->on_done = NULL;
    call->deferred = NULL;
    call->begun = false;
    call->managed = false;
    call->close_watched = false;
    call->events_waiting = 0;
    call->running = false;
    call->ended = false;
    call->cancel_told = false;
    call->receiving = false;
    call->receive_over = false;
    call->send_under_way = false;
    call->metadata_sent = false;
    call->status_sent = false;
    call->send_first = 0;

    atomic_fetch_add(&server->calls.armed_count, 1);
    kvk_handoff_release(&call->tag_new);
    grpc_call_error result;
    if (method->registered != NULL) {
        bool with_request = method->method.kind == KVK_METHOD_UNARY ||
                            method->method.kind == KVK_METHOD_SERVER_STREAM;
        result = grpc_server_request_registered_call(
            server->grpc, method->registered, &call->call, &call->deadline, &call->metadata,
            with_request ? &call->received : NULL, server->queue, server->queue, &call->tag_new);
    } else {
        grpc_call_details_init(&call->details);
        result =
            grpc_server_request_call(server->grpc, &call->call, &call->details, &call->metadata,
                                     server->queue, server->queue, &call->tag_new);
    }
    KVK_ASSERT(result == GRPC_CALL_OK);
}

/* ---- references ---- */

static void call_retain(struct kvk_call *call)
{
    atomic_fetch_add_explicit(&call->references, 1, memory_order_relaxed);
}

void kvk_call_release(struct kvk_call *call)
{
    if (atomic_fetch_sub_explicit(&call->references, 1, memory_order_acq_rel) != 1) {
        return;
    }
    struct kvk_server *server = call->server;
    KVK_ASSERT(call->ended && call->status_sent);
    if (call->on_done != NULL) {
        call->on_done(call->context);
    }
    /* The connection first: gRPC closes its descriptor only after the last of its calls, so that
     * the number cannot name another connection while one of these still carries it. */
    if (call->connection != NULL) {
        kvk_connection_release(call->connection);
    }
    grpc_call_unref(call->call);
    atomic_fetch_sub(&call->method->live_count, 1);
    if (call->owner_counted) {
        atomic_fetch_sub(&server->calls.owner_live[call->owner], 1);
    }
    call_give(call);
    atomic_fetch_sub(&server->calls.live_count, 1);
    kvk_server_drain_notify(server);
}

void kvk_call_start_batch(struct kvk_call *call, const grpc_op *operations, size_t count,
                          struct kvk_tag *tag)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    grpc_call *handle = call->call;
    kvk_handoff_release(tag); /* from here the call may be gone, and serve another */
    grpc_call_error result = grpc_call_start_batch(handle, operations, count, tag, NULL);
    KVK_ASSERT(result == GRPC_CALL_OK);
}

/* ---- callbacks, one at a time ---- */

/* The next thing to do, or 0: nothing more, and another thread may begin anew. */
static unsigned events_take(struct kvk_call *call, bool on_bulk, bool *hand_over)
{
    unsigned event = 0;
    *hand_over = false;
    kvk_lock(&call->lock);
    KVK_ASSERT(call->running);
    if (call->ended || call->cancel_told) {
        call->events_waiting &= KVK_EVENT_RUN | KVK_EVENT_SENT;
    }
    if (call->events_waiting == 0) {
        call->running = false;
    } else {
        event = call->events_waiting & -call->events_waiting;
        if (event == KVK_EVENT_RUN && !on_bulk) {
            *hand_over = true;
        } else {
            call->events_waiting &= ~event;
        }
        if (event == KVK_EVENT_CANCEL) {
            call->cancel_told = true;
        }
    }
    kvk_unlock(&call->lock);
    return event;
}

static bool call_wants_events(struct kvk_call *call)
{
    kvk_lock(&call->lock);
    bool wants = !call->ended && !call->cancel_told;
    kvk_unlock(&call->lock);
    return wants;
}

static void event_deliver(struct kvk_call *call, unsigned event)
{
    const struct kvk_stream_events *events = call->events;
    switch ((enum kvk_call_event)event) {
    case KVK_EVENT_RUN:
        call->deferred(call);
        break;
    case KVK_EVENT_CANCEL:
        call->on_cancel(call);
        break;
    case KVK_EVENT_SENT:
        kvk_call_advance_sends(call);
        if (call_wants_events(call) && events->on_sent != NULL) {
            events->on_sent(call);
        }
        break;
    case KVK_EVENT_MESSAGE:
        if (events->on_message(call)) {
            kvk_call_receive(call);
        }
        break;
    case KVK_EVENT_HALF_CLOSE:
        events->on_half_close(call);
        break;
    case KVK_EVENT_WAKE:
        if (events->on_wake != NULL) {
            events->on_wake(call);
        }
        break;
    }
}

/* Takes over one reference. */
static void call_run_events(struct kvk_call *call, bool on_bulk)
{
    for (;;) {
        bool hand_over;
        unsigned event = events_take(call, on_bulk, &hand_over);
        if (event == 0) {
            break;
        }
        if (hand_over) {
            kvk_bulk_push(&call->server->bulk, call);
            return;
        }
        KVK_ASSERT(kvk_locks_held() == 0);
        event_deliver(call, event);
    }
    kvk_call_release(call);
}

void kvk_call_post(struct kvk_call *call, enum kvk_call_event event)
{
    kvk_lock(&call->lock);
    call->events_waiting |= event;
    bool begin = !call->running;
    if (begin) {
        call->running = true;
        call_retain(call);
    }
    kvk_unlock(&call->lock);
    if (!begin) {
        return;
    }
    if (call->method->method.class == KVK_CLASS_BULK) {
        kvk_bulk_push(&call->server->bulk, call);
    } else {
        call_run_events(call, false);
    }
}

static bool method_receives(const struct kvk_server_method *method)
{
    return method->method.kind == KVK_METHOD_CLIENT_STREAM ||
           method->method.kind == KVK_METHOD_BIDI;
}

/* The handler itself. Takes over the reference of the running thread. */
static void call_dispatch(struct kvk_call *call, bool on_bulk)
{
    const struct kvk_method *method = &call->method->method;
    method->on_call(call, method->user_data);
    if (!call->managed) {
        kvk_call_release(call);
        return;
    }
    if (call->events != NULL && method_receives(call->method)) {
        kvk_call_receive(call);
    }
    call_run_events(call, on_bulk);
}

void kvk_call_run_bulk(struct kvk_call *call)
{
    if (call->begun) {
        call_run_events(call, true);
    } else {
        call->begun = true;
        call_dispatch(call, true);
    }
}

/* ---- what gRPC tells ---- */

/* Why a new call is not given to its handler; KVK_OK: it is. */
static enum kvk_status call_admit(struct kvk_call *call, uint32_t live, uint32_t method_live,
                                  struct kvk_error *error)
{
    struct kvk_server *server = call->server;
    const struct kvk_method *method = &call->method->method;
    enum kvk_method_kind kind = method->kind;

    if (call->method->registered == NULL) {
        atomic_fetch_add(&server->calls.unknown_count, 1);
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "", "no such method");
    }
    if (call->connection == NULL) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "", "the connection is gone");
    }
    if (live > server->options.live_calls_max ||
        (method->live_max != 0 && method_live > method->live_max)) {
        atomic_fetch_add(&server->calls.refused_count, 1);
        bool of_all = live > server->options.live_calls_max;
        (void)kvk_fail_limit(
            error, KVK_EXHAUSTED, KVK_CAUSE_QUEUE_FULL, "", of_all ? live : method_live,
            of_all ? server->options.live_calls_max : method->live_max,
            of_all ? "too many calls at a time" : "too many calls of this method at a time");
        kvk_error_retry(error, 10);
        return KVK_EXHAUSTED;
    }
    if ((kind == KVK_METHOD_UNARY || kind == KVK_METHOD_SERVER_STREAM) && call->received == NULL) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_NONE, "", "the call came without a request");
    }
    return KVK_OK;
}

/* Whose it is, and whether that one may have one more. */
static enum kvk_status call_find_owner(struct kvk_call *call, struct kvk_error *error)
{
    struct kvk_server *server = call->server;
    const struct kvk_method *method = &call->method->method;
    /* The standard services are nobody's. */
    call->owner = call->method->own ? server->options.owner_count : 0;
    if (server->options.call_owner != NULL && !call->method->own) {
        enum kvk_status status =
            server->options.call_owner(call, method->user_data, &call->owner, error);
        if (status != KVK_OK) {
            return status;
        }
        KVK_ASSERT(call->owner < server->options.owner_count);
    }
    if (call->method->own || method->kind == KVK_METHOD_BIDI) {
        return KVK_OK; /* they last as long as their client wants */
    }
    call->owner_counted = true;
    uint32_t live = atomic_fetch_add(&server->calls.owner_live[call->owner], 1) + 1;
    if (live <= server->options.owner_calls_max) {
        return KVK_OK;
    }
    atomic_fetch_add(&server->calls.refused_count, 1);
    atomic_fetch_add(&server->calls.one_refused_count, 1);
    (void)kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_TENANT_LIMIT, "tenant_calls", live,
                         server->options.owner_calls_max, "too many calls of one tenant at a time");
    kvk_error_retry(error, 10);
    return KVK_EXHAUSTED;
}

/* To the queue of the thread, or threads, that will run it. */
static void call_queue(struct kvk_call *call)
{
    struct kvk_server *server = call->server;
    if (call->method->method.class == KVK_CLASS_BULK) {
        kvk_bulk_push(&server->bulk, call);
    } else {
        kvk_fair_add(&server->calls.fair, &call->turn, call->owner,
                     kvk_clock_now(kvk_clock_monotonic()));
    }
}

bool kvk_calls_serve_one(struct kvk_server *server)
{
    struct kvk_fair *fair = &server->calls.fair;
    uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
    struct kvk_fair_item *item = kvk_fair_take(fair, begun_ns);
    if (item == NULL) {
        return false;
    }
    struct kvk_call *call = CALL_OF(turn, item);
    uint32_t owner = item->owner;
    uint64_t size_bytes = kvk_call_message_size(call);
    uint64_t long_bytes = call->method->method.long_bytes;
    if (long_bytes > 0 && size_bytes >= long_bytes && kvk_fair_others_come(fair, owner, begun_ns)) {
        kvk_bulk_push(&server->bulk, call); /* what it takes there is paid for there */
    } else {
        call->begun = true;
        call_dispatch(call, false); /* it may be gone now, and serve another */
    }
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    uint64_t read_ns = size_bytes * READ_NS_PER_KIB / 1024;
    (void)kvk_fair_end(fair, owner, now_ns - begun_ns + read_ns, now_ns);
    uint64_t hold_ns = atomic_exchange(&server->calls.owner_hold_ns[owner], 0);
    if (hold_ns > 0) {
        kvk_fair_hold(fair, owner, hold_ns, now_ns);
    }
    return true;
}

static void call_new(struct kvk_tag *tag, bool ok)
{
    struct kvk_call *call = CALL_OF(tag_new, tag);
    struct kvk_server *server = call->server;
    struct kvk_server_method *method = call->method;

    if (!ok) { /* the server shuts down: nothing was handed over */
        call_give(call);
        atomic_fetch_sub(&server->calls.armed_count, 1);
        kvk_server_drain_notify(server);
        return;
    }
    uint32_t live = atomic_fetch_add(&server->calls.live_count, 1) + 1;
    uint32_t method_live = atomic_fetch_add(&method->live_count, 1) + 1;
    kvk_calls_arm(method); /* first, so that as many as before may come */
    atomic_fetch_sub(&server->calls.armed_count, 1);

    atomic_store_explicit(&call->references, 2, memory_order_relaxed);
    call->running = true;
    call->connection = kvk_call_find_connection(call);

    struct kvk_error error;
    enum kvk_status status = call_admit(call, live, method_live, &error);
    if (status == KVK_OK) {
        status = call_find_owner(call, &error);
    }
    if (status != KVK_OK) {
        kvk_call_fail(call, &error);
        kvk_call_release(call);
        return;
    }
    atomic_fetch_add_explicit(&server->calls.call_count, 1, memory_order_relaxed);
    call_queue(call);
}

/*
 * One message, or none. None may be the client's orderly end or its loss, which reach us alike but
 * for what gRPC remembers of it; of a loss tag_close tells.
 */
static void call_received(struct kvk_tag *tag, bool ok)
{
    struct kvk_call *call = CALL_OF(tag_receive, tag);
    bool message = ok && call->received != NULL;
    bool lost = !ok || grpc_call_failed_before_recv_message(call->call) != 0;
    kvk_lock(&call->lock);
    call->receiving = false;
    if (!message) {
        call->receive_over = true;
    }
    kvk_unlock(&call->lock);
    if (message) {
        kvk_call_post(call, KVK_EVENT_MESSAGE);
    } else if (!lost) {
        kvk_call_post(call, KVK_EVENT_HALF_CLOSE);
    }
    kvk_call_release(call);
}

static void call_closed(struct kvk_tag *tag, bool ok)
{
    (void)ok;
    struct kvk_call *call = CALL_OF(tag_close, tag);
    if (call->close_cancelled != 0) {
        atomic_fetch_add(&call->server->calls.cancelled_count, 1);
        atomic_store(&call->cancelled, true);
        kvk_call_drop_sends(call);
        kvk_call_post(call, KVK_EVENT_CANCEL);
    }
    kvk_call_release(call);
}

/* ---- what handlers ask ---- */

size_t kvk_call_message_size(struct kvk_call *call)
{
    return call->received != NULL ? grpc_byte_buffer_length(call->received) : 0;
}

bool kvk_call_message_part(struct kvk_call *call, uint32_t index, struct kvk_bytes *part)
{
    if (call->received == NULL || index >= call->received->data.raw.slice_buffer.count) {
        return false;
    }
    grpc_slice *slice = &call->received->data.raw.slice_buffer.slices[index];
    part->data = GRPC_SLICE_START_PTR(*slice);
    part->size_bytes = GRPC_SLICE_LENGTH(*slice);
    return true;
}

struct kvk_bytes kvk_call_message(struct kvk_call *call)
{
    struct kvk_bytes bytes = {.data = NULL, .size_bytes = 0};
    if (call->received == NULL) {
        return bytes;
    }
    if (call->received->data.raw.slice_buffer.count == 1) {
        (void)kvk_call_message_part(call, 0, &bytes);
        return bytes;
    }
    if (!call->flat_made) {
        grpc_byte_buffer_reader reader;
        int begun = grpc_byte_buffer_reader_init(&reader, call->received);
        KVK_ASSERT(begun == 1);
        call->flat = grpc_byte_buffer_reader_readall(&reader);
        call->flat_made = true;
        grpc_byte_buffer_reader_destroy(&reader);
    }
    bytes.data = GRPC_SLICE_START_PTR(call->flat);
    bytes.size_bytes = GRPC_SLICE_LENGTH(call->flat);
    return bytes;
}

bool kvk_call_metadata(struct kvk_call *call, const char *key, struct kvk_bytes *value)
{
    size_t size = strlen(key);
    for (size_t i = 0; i < call->metadata.count; i++) {
        const grpc_metadata *entry = &call->metadata.metadata[i];
        if (GRPC_SLICE_LENGTH(entry->key) == size &&
            memcmp(GRPC_SLICE_START_PTR(entry->key), key, size) == 0) {
            value->data = GRPC_SLICE_START_PTR(entry->value);
            value->size_bytes = GRPC_SLICE_LENGTH(entry->value);
            return true;
        }
    }
    return false;
}

bool kvk_call_bearer_token(struct kvk_call *call, struct kvk_bytes *token)
{
    static const char scheme[] = "Bearer ";
    const size_t size = sizeof(scheme) - 1;
    struct kvk_bytes value;
    if (!kvk_call_metadata(call, "authorization", &value) || value.size_bytes <= size ||
        value.size_bytes > size + KVK_SERVER_TOKEN_MAX ||
        strncasecmp((const char *)value.data, scheme, size) != 0) {
        return false;
    }
    token->data = value.data + size;
    token->size_bytes = value.size_bytes - size;
    return true;
}

const struct kvk_peer *kvk_call_peer(struct kvk_call *call)
{
    return &call->connection->peer;
}

uint64_t kvk_call_deadline_ns(struct kvk_call *call)
{
    if (gpr_time_cmp(call->deadline, gpr_inf_future(call->deadline.clock_type)) == 0) {
        return UINT64_MAX;
    }
    gpr_timespec time = gpr_convert_clock_type(call->deadline, GPR_CLOCK_MONOTONIC);
    if (time.tv_sec < 0) {
        return 0;
    }
    return (uint64_t)time.tv_sec * KVK_NS_PER_SECOND + (uint64_t)time.tv_nsec;
}

bool kvk_call_is_cancelled(struct kvk_call *call)
{
    return atomic_load(&call->cancelled) ||
           kvk_call_deadline_ns(call) <= kvk_clock_now(kvk_clock_monotonic());
}

void kvk_call_set_caller(struct kvk_call *call, const void *caller)
{
    call->caller = caller;
}

const void *kvk_call_caller(struct kvk_call *call)
{
    return call->caller;
}

void kvk_call_hold_owner(struct kvk_call *call, uint64_t hold_ns)
{
    /* Of several at a time the last counts: they would be held back for about the same. */
    atomic_store(&call->server->calls.owner_hold_ns[call->owner], hold_ns);
}

void kvk_call_set_context(struct kvk_call *call, void *context)
{
    call->context = context;
}

void *kvk_call_context(struct kvk_call *call)
{
    return call->context;
}

/* ---- what handlers begin ---- */

static void call_watch_close(struct kvk_call *call)
{
    grpc_op operation;
    memset(&operation, 0, sizeof(operation));
    operation.op = GRPC_OP_RECV_CLOSE_ON_SERVER;
    operation.data.recv_close_on_server.cancelled = &call->close_cancelled;
    call->managed = true;
    call->close_watched = true;
    call_retain(call);
    kvk_call_start_batch(call, &operation, 1, &call->tag_close);
}

void kvk_call_on_cancel(struct kvk_call *call, void (*on_cancel)(struct kvk_call *call),
                        void (*on_done)(void *context))
{
    KVK_ASSERT(call->method->method.kind == KVK_METHOD_UNARY);
    KVK_ASSERT(!call->close_watched && !call->ended);
    KVK_ASSERT(on_cancel != NULL);
    call->on_cancel = on_cancel;
    call->on_done = on_done;
    call_watch_close(call);
}

void kvk_call_defer(struct kvk_call *call, void (*run)(struct kvk_call *call))
{
    KVK_ASSERT(call->method->method.kind == KVK_METHOD_UNARY);
    call->managed = true;
    kvk_lock(&call->lock);
    KVK_ASSERT(call->running && !call->ended);
    KVK_ASSERT((call->events_waiting & KVK_EVENT_RUN) == 0);
    call->deferred = run;
    call->events_waiting |= KVK_EVENT_RUN;
    kvk_unlock(&call->lock);
}

void kvk_call_stream(struct kvk_call *call, const struct kvk_stream_events *events, void *context)
{
    KVK_ASSERT(call->method->method.kind != KVK_METHOD_UNARY);
    KVK_ASSERT(!call->managed && !call->ended);
    KVK_ASSERT(events->on_cancel != NULL);
    if (method_receives(call->method)) {
        KVK_ASSERT(events->on_message != NULL && events->on_half_close != NULL);
    }
    call->events = events;
    call->on_cancel = events->on_cancel;
    call->on_done = events->on_done;
    call->context = context;
    if (call->method->method.kind != KVK_METHOD_CLIENT_STREAM) {
        call->send_queue =
            calloc(call->server->options.send_queue_max, sizeof(call->send_queue[0]));
        KVK_ASSERT(call->send_queue != NULL);
    }
    call_watch_close(call);
}

void kvk_call_receive(struct kvk_call *call)
{
    kvk_lock(&call->lock);
    KVK_ASSERT(!call->receiving);
    bool begin = !call->ended && !call->receive_over && !atomic_load(&call->cancelled);
    if (begin) {
        call->receiving = true;
        call_retain(call);
    }
    kvk_unlock(&call->lock);
    if (!begin) {
        return;
    }
    if (call->flat_made) {
        grpc_slice_unref(call->flat);
        call->flat_made = false;
    }
    if (call->received != NULL) {
        grpc_byte_buffer_destroy(call->received);
        call->received = NULL;
    }
    grpc_op operation;
    memset(&operation, 0, sizeof(operation));
    operation.op = GRPC_OP_RECV_MESSAGE;
    operation.data.recv_message.recv_message = &call->received;
    kvk_call_start_batch(call, &operation, 1, &call->tag_receive);
}

void kvk_call_wake(struct kvk_call *call)
{
    KVK_ASSERT(call->method->method.class == KVK_CLASS_BULK && call->events != NULL);
    kvk_call_post(call, KVK_EVENT_WAKE);
}
