/*
 * A small blocking gRPC client over bytes, for tests and benchmarks of the server: one channel of
 * its own, one call at a time per struct, on gRPC's C core.
 */
#ifndef KVK_TESTS_GRPC_CLIENT_H
#define KVK_TESTS_GRPC_CLIENT_H

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"

struct client {
    grpc_channel *channel;
    grpc_completion_queue *queue;
};

/* The end of a call, and of unary ones the answer. */
struct client_result {
    int code;
    char text[256];
    uint8_t details[2048]; /* grpc-status-details-bin */
    size_t details_bytes;
    uint8_t *response; /* malloc'ed; NULL: none */
    size_t response_bytes;
};

struct client_stream {
    struct client *client;
    grpc_call *call;
    grpc_metadata_array initial;
    bool initial_asked; /* gRPC wants it received with or before the first of the rest */
};

static inline void client_open_arguments(struct client *client, const char *target,
                                         const grpc_arg *extra, size_t extra_count)
{
    grpc_init();
    grpc_arg storage[16] = {
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL,
         .value.integer = 1},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         .value.integer = -1},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS,
         .value.integer = 100},
    };
    grpc_channel_args arguments = {.num_args = 3, .args = storage};
    for (size_t i = 0; i < extra_count; i++) {
        storage[arguments.num_args++] = extra[i];
    }
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    client->channel = grpc_channel_create(target, credentials, &arguments);
    grpc_channel_credentials_release(credentials);
    client->queue = grpc_completion_queue_create_for_pluck(NULL);
}

/* "unix:PATH" or "HOST:PORT". Connects with the first call. */
static inline void client_open(struct client *client, const char *target)
{
    client_open_arguments(client, target, NULL, 0);
}

static inline void client_close(struct client *client)
{
    grpc_channel_destroy(client->channel);
    grpc_completion_queue_shutdown(client->queue);
    grpc_event event =
        grpc_completion_queue_pluck(client->queue, NULL, gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    KVK_ASSERT(event.type == GRPC_QUEUE_SHUTDOWN);
    grpc_completion_queue_destroy(client->queue);
    grpc_shutdown();
}

static inline gpr_timespec client_deadline(int timeout_ms)
{
    return timeout_ms < 0 ? gpr_inf_future(GPR_CLOCK_REALTIME)
                          : gpr_time_add(gpr_now(GPR_CLOCK_REALTIME),
                                         gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
}

static inline grpc_call *client_call_new(struct client *client, const char *path, int timeout_ms)
{
    grpc_slice method = grpc_slice_from_copied_string(path);
    grpc_call *call =
        grpc_channel_create_call(client->channel, NULL, GRPC_PROPAGATE_DEFAULTS, client->queue,
                                 method, NULL, client_deadline(timeout_ms), NULL);
    grpc_slice_unref(method);
    return call;
}

/* Run a batch to its end; whether it succeeded. */
static inline bool client_batch(struct client *client, grpc_call *call, grpc_op *operations,
                                size_t count)
{
    grpc_call_error error = grpc_call_start_batch(call, operations, count, operations, NULL);
    KVK_ASSERT(error == GRPC_CALL_OK);
    grpc_event event = grpc_completion_queue_pluck(client->queue, operations,
                                                   gpr_inf_future(GPR_CLOCK_REALTIME), NULL);
    return event.success != 0;
}

static inline void client_take_bytes(grpc_byte_buffer *buffer, uint8_t **bytes, size_t *size)
{
    *bytes = NULL;
    *size = 0;
    if (buffer == NULL) {
        return;
    }
    grpc_byte_buffer_reader reader;
    KVK_ASSERT(grpc_byte_buffer_reader_init(&reader, buffer) == 1);
    grpc_slice slice = grpc_byte_buffer_reader_readall(&reader);
    *size = GRPC_SLICE_LENGTH(slice);
    *bytes = malloc(*size + 1);
    KVK_ASSERT(*bytes != NULL);
    memcpy(*bytes, GRPC_SLICE_START_PTR(slice), *size);
    grpc_slice_unref(slice);
    grpc_byte_buffer_reader_destroy(&reader);
    grpc_byte_buffer_destroy(buffer);
}

static inline grpc_byte_buffer *client_give_bytes(const void *bytes, size_t size)
{
    grpc_slice slice = grpc_slice_from_copied_buffer(bytes, size);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

static inline void client_take_status(struct client_result *result, grpc_status_code code,
                                      grpc_slice text, grpc_metadata_array *trailing)
{
    result->code = (int)code;
    (void)snprintf(result->text, sizeof(result->text), "%.*s", (int)GRPC_SLICE_LENGTH(text),
                   (const char *)GRPC_SLICE_START_PTR(text));
    grpc_slice_unref(text);
    result->details_bytes = 0;
    for (size_t i = 0; i < trailing->count; i++) {
        grpc_metadata *entry = &trailing->metadata[i];
        if (grpc_slice_str_cmp(entry->key, "grpc-status-details-bin") == 0 &&
            GRPC_SLICE_LENGTH(entry->value) <= sizeof(result->details)) {
            result->details_bytes = GRPC_SLICE_LENGTH(entry->value);
            memcpy(result->details, GRPC_SLICE_START_PTR(entry->value), result->details_bytes);
        }
    }
    grpc_metadata_array_destroy(trailing);
}

/* `token` may be NULL; timeout_ms < 0: none. */
static inline void client_unary(struct client *client, const char *path, const void *request,
                                size_t request_bytes, const char *token, int timeout_ms,
                                struct client_result *result)
{
    grpc_call *call = client_call_new(client, path, timeout_ms);
    grpc_metadata_array initial;
    grpc_metadata_array trailing;
    grpc_metadata_array_init(&initial);
    grpc_metadata_array_init(&trailing);
    grpc_status_code code = GRPC_STATUS_UNKNOWN;
    grpc_slice text = grpc_empty_slice();
    grpc_byte_buffer *response = NULL;
    grpc_byte_buffer *message = client_give_bytes(request, request_bytes);
    grpc_metadata credential;
    memset(&credential, 0, sizeof(credential));
    if (token != NULL) {
        char value[512];
        (void)snprintf(value, sizeof(value), "Bearer %s", token);
        credential.key = grpc_slice_from_static_string("authorization");
        credential.value = grpc_slice_from_copied_string(value);
    }

    grpc_op operations[6];
    memset(operations, 0, sizeof(operations));
    operations[0].op = GRPC_OP_SEND_INITIAL_METADATA;
    operations[0].data.send_initial_metadata.count = token != NULL ? 1 : 0;
    operations[0].data.send_initial_metadata.metadata = &credential;
    operations[1].op = GRPC_OP_SEND_MESSAGE;
    operations[1].data.send_message.send_message = message;
    operations[2].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    operations[3].op = GRPC_OP_RECV_INITIAL_METADATA;
    operations[3].data.recv_initial_metadata.recv_initial_metadata = &initial;
    operations[4].op = GRPC_OP_RECV_MESSAGE;
    operations[4].data.recv_message.recv_message = &response;
    operations[5].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    operations[5].data.recv_status_on_client.trailing_metadata = &trailing;
    operations[5].data.recv_status_on_client.status = &code;
    operations[5].data.recv_status_on_client.status_details = &text;
    (void)client_batch(client, call, operations, 6);

    memset(result, 0, sizeof(*result));
    client_take_status(result, code, text, &trailing);
    client_take_bytes(response, &result->response, &result->response_bytes);
    grpc_byte_buffer_destroy(message);
    grpc_metadata_array_destroy(&initial);
    if (token != NULL) {
        grpc_slice_unref(credential.value);
    }
    grpc_call_unref(call);
}

static inline void client_result_free(struct client_result *result)
{
    free(result->response);
    result->response = NULL;
}

/* ---- streams ---- */

static inline bool client_stream_open(struct client_stream *stream, struct client *client,
                                      const char *path, int timeout_ms)
{
    stream->client = client;
    stream->call = client_call_new(client, path, timeout_ms);
    stream->initial_asked = false;
    grpc_metadata_array_init(&stream->initial);
    grpc_op operation;
    memset(&operation, 0, sizeof(operation));
    operation.op = GRPC_OP_SEND_INITIAL_METADATA;
    return client_batch(client, stream->call, &operation, 1);
}

static inline bool client_stream_send(struct client_stream *stream, const void *bytes, size_t size)
{
    grpc_byte_buffer *message = client_give_bytes(bytes, size);
    grpc_op operation;
    memset(&operation, 0, sizeof(operation));
    operation.op = GRPC_OP_SEND_MESSAGE;
    operation.data.send_message.send_message = message;
    bool ok = client_batch(stream->client, stream->call, &operation, 1);
    grpc_byte_buffer_destroy(message);
    return ok;
}

static inline bool client_stream_half_close(struct client_stream *stream)
{
    grpc_op operation;
    memset(&operation, 0, sizeof(operation));
    operation.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    return client_batch(stream->client, stream->call, &operation, 1);
}

static inline size_t client_stream_ask_initial(struct client_stream *stream, grpc_op *operation)
{
    if (stream->initial_asked) {
        return 0;
    }
    stream->initial_asked = true;
    operation->op = GRPC_OP_RECV_INITIAL_METADATA;
    operation->data.recv_initial_metadata.recv_initial_metadata = &stream->initial;
    return 1;
}

/* The next message, to be freed; false: the stream is at its end. */
static inline bool client_stream_receive(struct client_stream *stream, uint8_t **bytes,
                                         size_t *size)
{
    grpc_byte_buffer *message = NULL;
    grpc_op operations[2];
    memset(operations, 0, sizeof(operations));
    size_t count = client_stream_ask_initial(stream, &operations[0]);
    operations[count].op = GRPC_OP_RECV_MESSAGE;
    operations[count].data.recv_message.recv_message = &message;
    bool ok = client_batch(stream->client, stream->call, operations, count + 1);
    bool some = ok && message != NULL;
    client_take_bytes(message, bytes, size);
    return some;
}

static inline void client_stream_cancel(struct client_stream *stream)
{
    grpc_call_error error = grpc_call_cancel(stream->call, NULL);
    KVK_ASSERT(error == GRPC_CALL_OK);
}

/* Wait for the status and give the call up. */
static inline void client_stream_end(struct client_stream *stream, struct client_result *result)
{
    grpc_metadata_array trailing;
    grpc_metadata_array_init(&trailing);
    grpc_status_code code = GRPC_STATUS_UNKNOWN;
    grpc_slice text = grpc_empty_slice();
    grpc_op operations[2];
    memset(operations, 0, sizeof(operations));
    size_t count = client_stream_ask_initial(stream, &operations[0]);
    operations[count].op = GRPC_OP_RECV_STATUS_ON_CLIENT;
    operations[count].data.recv_status_on_client.trailing_metadata = &trailing;
    operations[count].data.recv_status_on_client.status = &code;
    operations[count].data.recv_status_on_client.status_details = &text;
    (void)client_batch(stream->client, stream->call, operations, count + 1);
    memset(result, 0, sizeof(*result));
    client_take_status(result, code, text, &trailing);
    grpc_metadata_array_destroy(&stream->initial);
    grpc_call_unref(stream->call);
}

#endif
