/*
 * What goes out: the one batch that ends a unary call, and the messages and the status of streams.
 *
 * gRPC takes one message of a stream at a time; the others wait in a bounded ring. Of a BULK method
 * the next one is started on a bulk thread, so that the copying that gRPC does is not the look-up
 * thread's.
 */
#include "daemon/server_private.h"

#include <grpc/byte_buffer.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/server_sanitize.h"

#define SEND_OPERATIONS_MAX 4

static const char details_key[] = "grpc-status-details-bin";

int kvk_status_rpc_code(enum kvk_status status)
{
    switch (status) {
    case KVK_OK:
        return GRPC_STATUS_OK;
    case KVK_CANCELLED:
        return GRPC_STATUS_CANCELLED;
    case KVK_INVALID:
        return GRPC_STATUS_INVALID_ARGUMENT;
    case KVK_DEADLINE:
        return GRPC_STATUS_DEADLINE_EXCEEDED;
    case KVK_NOT_FOUND:
        return GRPC_STATUS_NOT_FOUND;
    case KVK_EXISTS:
        return GRPC_STATUS_ALREADY_EXISTS;
    case KVK_PERMISSION:
        return GRPC_STATUS_PERMISSION_DENIED;
    case KVK_EXHAUSTED:
        return GRPC_STATUS_RESOURCE_EXHAUSTED;
    case KVK_PRECONDITION:
        return GRPC_STATUS_FAILED_PRECONDITION;
    case KVK_ABORTED:
        return GRPC_STATUS_ABORTED;
    case KVK_OUT_OF_RANGE:
        return GRPC_STATUS_OUT_OF_RANGE;
    case KVK_UNSUPPORTED:
        return GRPC_STATUS_UNIMPLEMENTED;
    case KVK_WOULD_BLOCK: /* never leaves the daemon */
    case KVK_INTERNAL:
        return GRPC_STATUS_INTERNAL;
    case KVK_UNAVAILABLE:
        return GRPC_STATUS_UNAVAILABLE;
    case KVK_DATA_LOSS:
        return GRPC_STATUS_DATA_LOSS;
    case KVK_UNAUTHENTICATED:
        return GRPC_STATUS_UNAUTHENTICATED;
    }
    KVK_UNREACHABLE();
}

/* ---- batches ---- */

struct batch {
    grpc_op operations[SEND_OPERATIONS_MAX];
    size_t count;
};

static grpc_op *batch_add(struct batch *batch, grpc_op_type type)
{
    KVK_ASSERT(batch->count < SEND_OPERATIONS_MAX);
    grpc_op *operation = &batch->operations[batch->count++];
    memset(operation, 0, sizeof(*operation));
    operation->op = type;
    return operation;
}

static void batch_add_metadata(struct batch *batch, struct kvk_call *call)
{
    if (!call->metadata_sent) {
        call->metadata_sent = true;
        (void)batch_add(batch, GRPC_OP_SEND_INITIAL_METADATA);
    }
}

static void batch_add_message(struct batch *batch, struct kvk_call *call, grpc_byte_buffer *buffer)
{
    KVK_ASSERT(call->sending == NULL);
    call->sending = buffer;
    batch_add(batch, GRPC_OP_SEND_MESSAGE)->data.send_message.send_message = buffer;
}

static void batch_add_status(struct batch *batch, struct kvk_call *call)
{
    grpc_op *operation = batch_add(batch, GRPC_OP_SEND_STATUS_FROM_SERVER);
    operation->data.send_status_from_server.status = call->status_code;
    if (call->status_text_made) {
        operation->data.send_status_from_server.status_details = &call->status_text;
    }
    if (call->trailing_made) {
        operation->data.send_status_from_server.trailing_metadata_count = 1;
        operation->data.send_status_from_server.trailing_metadata = &call->trailing;
    }
    if (!call->close_watched) {
        operation = batch_add(batch, GRPC_OP_RECV_CLOSE_ON_SERVER);
        operation->data.recv_close_on_server.cancelled = &call->close_cancelled;
    }
    KVK_ASSERT(!call->status_sent);
    call->status_sent = true;
}

/* The last batch of a call; it carries the handler's reference. */
static void start_status(struct kvk_call *call, grpc_byte_buffer *message)
{
    struct batch batch = {.count = 0};
    batch_add_metadata(&batch, call);
    if (message != NULL) {
        batch_add_message(&batch, call, message);
    }
    batch_add_status(&batch, call);
    kvk_call_start_batch(call, batch.operations, batch.count, &call->tag_send);
}

static void start_message(struct kvk_call *call, grpc_byte_buffer *message)
{
    struct batch batch = {.count = 0};
    batch_add_metadata(&batch, call);
    batch_add_message(&batch, call, message);
    atomic_fetch_add_explicit(&call->references, 1, memory_order_relaxed);
    kvk_call_start_batch(call, batch.operations, batch.count, &call->tag_send);
}

/* ---- buffers ---- */

uint8_t *kvk_call_reply_alloc(struct kvk_call *call, size_t size_bytes)
{
    KVK_ASSERT(!call->reply_made);
    call->reply = grpc_slice_malloc(size_bytes);
    call->reply_made = true;
    return GRPC_SLICE_START_PTR(call->reply);
}

/* The reply's slice and the borrowed bytes behind it as one message. */
static grpc_byte_buffer *take_message(struct kvk_call *call, const struct kvk_borrowed *data)
{
    grpc_slice slices[2];
    size_t count = 0;
    if (call->reply_made) {
        slices[count++] = call->reply;
        call->reply_made = false;
    }
    if (data != NULL && data->size_bytes > 0) {
        /* gRPC takes void * and only reads. */
        void *bytes = (void *)(uintptr_t)data->data;
        slices[count++] =
            grpc_slice_new_with_user_data(bytes, data->size_bytes, data->release, data->argument);
    } else if (data != NULL) {
        data->release(data->argument);
    }
    grpc_byte_buffer *message = grpc_raw_byte_buffer_create(slices, count);
    for (size_t i = 0; i < count; i++) {
        grpc_slice_unref(slices[i]);
    }
    return message;
}

/* ---- the end of a call ---- */

/* True: the status may go at once; false: it goes after the message under way and the queue. */
static bool end_begin(struct kvk_call *call, grpc_status_code code)
{
    if (!call->managed) {
        KVK_ASSERT(!call->ended);
        call->ended = true;
        call->status_code = code;
        return true;
    }
    kvk_lock(&call->lock);
    KVK_ASSERT(!call->ended);
    call->ended = true;
    call->status_code = code;
    bool at_once = !call->send_under_way;
    kvk_unlock(&call->lock);
    return at_once;
}

void kvk_call_reply_borrowed(struct kvk_call *call, const struct kvk_borrowed *data)
{
    KVK_ASSERT(call->method->method.kind == KVK_METHOD_UNARY ||
               call->method->method.kind == KVK_METHOD_CLIENT_STREAM);
    grpc_byte_buffer *message = take_message(call, data);
    bool at_once = end_begin(call, GRPC_STATUS_OK);
    KVK_ASSERT(at_once);
    start_status(call, message);
}

void kvk_call_reply(struct kvk_call *call)
{
    kvk_call_reply_borrowed(call, NULL);
}

static void set_failure(struct kvk_call *call, const struct kvk_error *error)
{
    const struct kvk_server_options *options = &call->server->options;
    call->status_text = grpc_slice_from_copied_string(error->text);
    call->status_text_made = true;
    if (options->error_details == NULL) {
        return;
    }
    uint8_t details[KVK_SERVER_DETAILS_MAX];
    size_t size =
        options->error_details(error, kvk_status_rpc_code(error->status), details, sizeof(details));
    KVK_ASSERT(size <= sizeof(details));
    if (size > 0) {
        call->trailing.key = grpc_slice_from_static_string(details_key);
        call->trailing.value = grpc_slice_from_copied_buffer((const char *)details, size);
        call->trailing_made = true;
    }
}

void kvk_call_fail(struct kvk_call *call, const struct kvk_error *error)
{
    KVK_ASSERT(error->status != KVK_OK);
    set_failure(call, error);
    if (call->reply_made) {
        grpc_slice_unref(call->reply);
        call->reply_made = false;
    }
    kvk_call_drop_sends(call);
    if (end_begin(call, (grpc_status_code)kvk_status_rpc_code(error->status))) {
        start_status(call, NULL);
    }
}

void kvk_call_finish(struct kvk_call *call)
{
    KVK_ASSERT(call->method->method.kind == KVK_METHOD_SERVER_STREAM ||
               call->method->method.kind == KVK_METHOD_BIDI);
    KVK_ASSERT(!call->reply_made);
    if (end_begin(call, GRPC_STATUS_OK)) {
        start_status(call, NULL);
    }
}

/* ---- messages of streams ---- */

enum kvk_status kvk_call_send_borrowed(struct kvk_call *call, const struct kvk_borrowed *data)
{
    KVK_ASSERT(call->send_queue != NULL);
    grpc_byte_buffer *message = take_message(call, data);
    enum kvk_status status = KVK_OK;
    bool start = false;

    kvk_lock(&call->lock);
    uint32_t waiting = call->send_count + (call->send_under_way ? 1 : 0);
    uint32_t capacity = call->server->options.send_queue_max;
    if (call->ended || atomic_load(&call->cancelled)) {
        status = KVK_CANCELLED;
    } else if (waiting >= capacity) {
        status = KVK_EXHAUSTED;
    } else if (call->send_under_way) {
        call->send_queue[(call->send_first + call->send_count) % capacity] = message;
        call->send_count++;
    } else {
        call->send_under_way = true;
        start = true;
    }
    kvk_unlock(&call->lock);

    if (status != KVK_OK) {
        grpc_byte_buffer_destroy(message);
    } else if (start) {
        start_message(call, message);
    }
    return status;
}

enum kvk_status kvk_call_send(struct kvk_call *call)
{
    return kvk_call_send_borrowed(call, NULL);
}

uint32_t kvk_call_sends_pending(struct kvk_call *call)
{
    kvk_lock(&call->lock);
    uint32_t count = call->send_count + (call->send_under_way ? 1 : 0);
    kvk_unlock(&call->lock);
    return count;
}

/* The oldest message that waits, or NULL. */
static grpc_byte_buffer *queue_take(struct kvk_call *call)
{
    if (call->send_count == 0) {
        return NULL;
    }
    grpc_byte_buffer *message = call->send_queue[call->send_first];
    call->send_first = (call->send_first + 1) % call->server->options.send_queue_max;
    call->send_count--;
    return message;
}

void kvk_call_drop_sends(struct kvk_call *call)
{
    if (call->send_queue == NULL) {
        return;
    }
    for (;;) {
        kvk_lock(&call->lock);
        grpc_byte_buffer *message = queue_take(call);
        kvk_unlock(&call->lock);
        if (message == NULL) {
            return;
        }
        grpc_byte_buffer_destroy(message); /* may call the owner's release */
    }
}

void kvk_call_advance_sends(struct kvk_call *call)
{
    grpc_byte_buffer_destroy(call->sending);
    call->sending = NULL;
    kvk_lock(&call->lock);
    grpc_byte_buffer *message = queue_take(call);
    bool end = message == NULL && call->ended;
    if (message == NULL) {
        call->send_under_way = false;
    }
    kvk_unlock(&call->lock);
    if (message != NULL) {
        start_message(call, message);
    } else if (end) {
        start_status(call, NULL);
    }
}

/* A message that failed is no news: tag_close tells of the stream's end, and drops the others. */
void kvk_call_send_done(struct kvk_tag *tag, bool ok)
{
    (void)ok;
    struct kvk_call *call =
        (struct kvk_call *)(void *)((char *)tag - offsetof(struct kvk_call, tag_send));
    if (!call->status_sent) {
        kvk_call_post(call, KVK_EVENT_SENT);
    } else if (!call->close_watched && call->close_cancelled != 0) {
        atomic_fetch_add(&call->server->calls.cancelled_count, 1);
    }
    kvk_call_release(call);
}
