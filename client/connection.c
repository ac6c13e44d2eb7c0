#include "client/connection.h"

#include <grpc/byte_buffer.h>
#include <grpc/byte_buffer_reader.h>
#include <grpc/grpc.h>
#include <grpc/grpc_security.h>
#include <grpc/slice.h>
#include <grpc/support/alloc.h>
#include <grpc/support/time.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "client/kvkeep.h"
#include "google/rpc/status.pb-c.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define FILE_BYTES_MAX (1 << 20)
#define MESSAGE_BYTES_MAX (256 << 20)
#define DETAILS_KEY "grpc-status-details-bin"

struct kvkeep_connection {
    grpc_channel *channel;
    grpc_completion_queue *queue; /* of unary calls */
    pthread_mutex_t mutex;        /* one unary call at a time */
    char *authorization;          /* "Bearer …", or NULL */
};

/* What a call ends with. */
struct outcome {
    grpc_metadata_array initial;
    grpc_metadata_array trailing;
    grpc_status_code code;
    grpc_slice details;
};

struct kvkeep_stream {
    struct kvkeep_connection *connection;
    grpc_completion_queue *queue;
    grpc_call *call;
    struct outcome outcome;
    _Atomic bool cancelled;
};

/* Any address that is the stream's own serves as a tag. */
static void *tag_of(struct kvkeep_stream *stream, unsigned which)
{
    return (char *)stream + which;
}

enum {
    TAG_STATUS = 0,
    TAG_SEND = 1,
    TAG_RECEIVE = 2,
};

static gpr_timespec deadline_after(uint32_t timeout_ms)
{
    if (timeout_ms == 0) {
        return gpr_inf_future(GPR_CLOCK_MONOTONIC);
    }
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
}

static enum kvk_status status_of_code(grpc_status_code code)
{
    static const enum kvk_status by_code[] = {
        KVK_OK,        KVK_CANCELLED,       KVK_INTERNAL,    KVK_INVALID,   KVK_DEADLINE,
        KVK_NOT_FOUND, KVK_EXISTS,          KVK_PERMISSION,  KVK_EXHAUSTED, KVK_PRECONDITION,
        KVK_ABORTED,   KVK_OUT_OF_RANGE,    KVK_UNSUPPORTED, KVK_INTERNAL,  KVK_UNAVAILABLE,
        KVK_DATA_LOSS, KVK_UNAUTHENTICATED,
    };
    size_t index = (size_t)code;
    return index < sizeof by_code / sizeof by_code[0] ? by_code[index] : KVK_INTERNAL;
}

static grpc_byte_buffer *pack(const ProtobufCMessage *message)
{
    size_t size = protobuf_c_message_get_packed_size(message);
    grpc_slice slice = grpc_slice_malloc(size);
    protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

/* NULL where the bytes are no such message. */
static ProtobufCMessage *unpack(grpc_byte_buffer *buffer, const ProtobufCMessageDescriptor *type)
{
    grpc_byte_buffer_reader reader;
    if (!grpc_byte_buffer_reader_init(&reader, buffer)) {
        return NULL;
    }
    grpc_slice slice = grpc_byte_buffer_reader_readall(&reader);
    grpc_byte_buffer_reader_destroy(&reader);
    ProtobufCMessage *message = protobuf_c_message_unpack(type, NULL, GRPC_SLICE_LENGTH(slice),
                                                          GRPC_SLICE_START_PTR(slice));
    grpc_slice_unref(slice);
    return message;
}

/* ---- outcomes ---- */

static void outcome_init(struct outcome *outcome)
{
    grpc_metadata_array_init(&outcome->initial);
    grpc_metadata_array_init(&outcome->trailing);
    outcome->code = GRPC_STATUS_UNKNOWN;
    outcome->details = grpc_empty_slice();
}

static void outcome_finish(struct outcome *outcome)
{
    grpc_metadata_array_destroy(&outcome->initial);
    grpc_metadata_array_destroy(&outcome->trailing);
    grpc_slice_unref(outcome->details);
}

static void advice_read(const Kvkeep__V1__Advice *message, struct kvk_advice *advice)
{
    *advice = (struct kvk_advice){.kind = (enum kvk_advice_kind)message->kind,
                                  .total = (uint32_t)message->total,
                                  .missing_bytes = message->missing_bytes,
                                  .bytes = message->bytes,
                                  .cost_ns = message->cost_ns};
    for (size_t i = 0; i < message->n_sequence_ids && i < message->n_sequence_bytes &&
                       advice->count < KVK_ADVICE_MAX;
         i++) {
        advice->sequence_ids[advice->count] = message->sequence_ids[i];
        advice->sequence_bytes[advice->count] = message->sequence_bytes[i];
        advice->count++;
    }
}

/* Fill cause, field and numbers from an ErrorDetail; false: these bytes are none. */
static bool detail_read(const uint8_t *bytes, size_t size, struct kvk_error *error)
{
    Google__Rpc__Status *status = google__rpc__status__unpack(NULL, size, bytes);
    if (status == NULL) {
        return false;
    }
    bool found = false;
    for (size_t i = 0; i < status->n_details && !found; i++) {
        const Google__Protobuf__Any *any = status->details[i];
        if (any->type_url == NULL ||
            strcmp(any->type_url, "type.googleapis.com/kvkeep.v1.ErrorDetail") != 0) {
            continue;
        }
        Kvkeep__V1__ErrorDetail *detail =
            kvkeep__v1__error_detail__unpack(NULL, any->value.len, any->value.data);
        if (detail == NULL) {
            continue;
        }
        error->cause = (enum kvk_cause)detail->cause;
        error->value = detail->value;
        error->limit = detail->limit;
        error->retry_after_ms = detail->retry_after_ms;
        (void)snprintf(error->field, sizeof error->field, "%.*s", (int)detail->field.len,
                       detail->field.data == NULL ? "" : (const char *)detail->field.data);
        if (detail->advice != NULL) {
            advice_read(detail->advice, &error->advice);
        }
        kvkeep__v1__error_detail__free_unpacked(detail, NULL);
        found = true;
    }
    google__rpc__status__free_unpacked(status, NULL);
    return found;
}

static enum kvk_status outcome_status(const struct outcome *outcome, struct kvk_error *error)
{
    enum kvk_status status = status_of_code(outcome->code);
    if (status == KVK_OK) {
        return KVK_OK;
    }
    struct kvk_error found = {0};
    (void)kvk_fail(&found, status, KVK_CAUSE_NONE, "", "%.*s",
                   (int)GRPC_SLICE_LENGTH(outcome->details),
                   (const char *)GRPC_SLICE_START_PTR(outcome->details));
    for (size_t i = 0; i < outcome->trailing.count; i++) {
        const grpc_metadata *entry = &outcome->trailing.metadata[i];
        if (grpc_slice_str_cmp(entry->key, DETAILS_KEY) == 0) {
            (void)detail_read(GRPC_SLICE_START_PTR(entry->value), GRPC_SLICE_LENGTH(entry->value),
                              &found);
        }
    }
    if (error != NULL) {
        *error = found;
    }
    return status;
}

/* ---- connections ---- */

/* A whole file as text; NULL path: NULL. */
static enum kvk_status file_read(const char *field, const char *path, char **text,
                                 struct kvk_error *error)
{
    *text = NULL;
    if (path == NULL) {
        return KVK_OK;
    }
    FILE *file = fopen(path, "re");
    char *made = file != NULL ? calloc(1, FILE_BYTES_MAX + 1) : NULL;
    size_t size = made != NULL ? fread(made, 1, FILE_BYTES_MAX, file) : 0;
    if (file != NULL) {
        (void)fclose(file);
    }
    if (size == 0) {
        free(made);
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: %.150s cannot be read",
                        field, path);
    }
    *text = made;
    return KVK_OK;
}

static void secret_drop(char *text)
{
    if (text != NULL) {
        kvk_secret_wipe(text, strlen(text));
        free(text);
    }
}

static enum kvk_status credentials_create(const struct kvkeep_tls *tls,
                                          grpc_channel_credentials **credentials,
                                          struct kvk_error *error)
{
    if (tls == NULL) {
        *credentials = grpc_insecure_credentials_create();
        return KVK_OK;
    }
    if ((tls->certificate == NULL) != (tls->key == NULL)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD,
                        tls->key == NULL ? "key" : "certificate",
                        "a certificate and its key come together");
    }
    char *ca = NULL;
    char *certificate = NULL;
    char *key = NULL;
    enum kvk_status status = file_read("ca", tls->ca, &ca, error);
    if (status == KVK_OK) {
        status = file_read("certificate", tls->certificate, &certificate, error);
    }
    if (status == KVK_OK) {
        status = file_read("key", tls->key, &key, error);
    }
    if (status == KVK_OK) {
        grpc_ssl_pem_key_cert_pair pair = {.private_key = key, .cert_chain = certificate};
        *credentials = grpc_ssl_credentials_create_ex(ca, key != NULL ? &pair : NULL, NULL, NULL);
        if (*credentials == NULL) {
            status = kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "ca",
                              "there are no roots to check the daemon's certificate with");
        }
    }
    secret_drop(key);
    free(certificate);
    free(ca);
    return status;
}

enum kvk_status kvkeep_connection_create(const char *target, const char *token,
                                         struct kvkeep_connection **connection,
                                         struct kvk_error *error)
{
    return kvkeep_connection_create_tls(target, token, NULL, connection, error);
}

static void connection_free(struct kvkeep_connection *connection)
{
    secret_drop(connection->authorization);
    free(connection);
}

enum kvk_status kvkeep_connection_create_tls(const char *target, const char *token,
                                             const struct kvkeep_tls *tls,
                                             struct kvkeep_connection **connection,
                                             struct kvk_error *error)
{
    if (target == NULL || target[0] == '\0') {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "target", "must name a socket");
    }
    if (strchr(target, ':') == NULL) { /* gRPC would try port 443 of a host of that name */
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "target",
                        "\"%s\" must be HOST:PORT or unix:PATH", target);
    }
    struct kvkeep_connection *new = calloc(1, sizeof *new);
    if (new == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a connection");
    }
    if (token != NULL && token[0] != '\0') {
        size_t size = strlen(token) + sizeof "Bearer ";
        new->authorization = malloc(size);
        if (new->authorization == NULL) {
            free(new);
            return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a token");
        }
        (void)snprintf(new->authorization, size, "Bearer %s", token);
    }
    if (strncmp(target, "unix:", 5) == 0) {
        tls = NULL;
    }
    grpc_init();
    grpc_channel_credentials *credentials = NULL;
    enum kvk_status status = credentials_create(tls, &credentials, error);
    if (status != KVK_OK) {
        connection_free(new);
        grpc_shutdown();
        return status;
    }
    pthread_mutex_init(&new->mutex, NULL);
    /* Without a pool of its own, two connections to one target would share a transport, and bulk
     * would delay look-ups. */
    grpc_arg arguments[] = {
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL,
         .value.integer = 1},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH,
         .value.integer = MESSAGE_BYTES_MAX},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_ENABLE_HTTP_PROXY,
         .value.integer = 0},
        {.type = GRPC_ARG_INTEGER,
         .key = (char *)(uintptr_t)GRPC_ARG_MAX_RECONNECT_BACKOFF_MS,
         .value.integer = 2000},
        {.type = GRPC_ARG_STRING, /* last: left out where there is none */
         .key = (char *)(uintptr_t)GRPC_SSL_TARGET_NAME_OVERRIDE_ARG,
         .value.string =
             tls == NULL ? NULL : (char *)(uintptr_t)tls->server_name /* gRPC only reads it */},
    };
    bool named = tls != NULL && tls->server_name != NULL;
    grpc_channel_args channel_arguments = {sizeof arguments / sizeof arguments[0] - (named ? 0 : 1),
                                           arguments};
    new->channel = grpc_channel_create(target, credentials, &channel_arguments);
    grpc_channel_credentials_release(credentials);
    new->queue = grpc_completion_queue_create_for_pluck(NULL);
    *connection = new;
    return KVK_OK;
}

static void queue_destroy(grpc_completion_queue *queue)
{
    grpc_completion_queue_shutdown(queue);
    (void)grpc_completion_queue_pluck(queue, NULL, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    grpc_completion_queue_destroy(queue);
}

void kvkeep_connection_destroy(struct kvkeep_connection *connection)
{
    if (connection == NULL) {
        return;
    }
    queue_destroy(connection->queue);
    grpc_channel_destroy(connection->channel);
    pthread_mutex_destroy(&connection->mutex);
    connection_free(connection);
    grpc_shutdown();
}

static grpc_call *call_create(struct kvkeep_connection *connection, grpc_completion_queue *queue,
                              const char *method, uint32_t timeout_ms)
{
    return grpc_channel_create_call(connection->channel, NULL, GRPC_PROPAGATE_DEFAULTS, queue,
                                    grpc_slice_from_static_string(method), NULL,
                                    deadline_after(timeout_ms), NULL);
}

static grpc_op initial_metadata(struct kvkeep_connection *connection, grpc_metadata *metadata)
{
    grpc_op op = {.op = GRPC_OP_SEND_INITIAL_METADATA};
    if (connection->authorization != NULL) {
        metadata->key = grpc_slice_from_static_string("authorization");
        metadata->value = grpc_slice_from_static_string(connection->authorization);
        op.data.send_initial_metadata.metadata = metadata;
        op.data.send_initial_metadata.count = 1;
    }
    return op;
}

static grpc_op receive_status(struct outcome *outcome)
{
    grpc_op op = {.op = GRPC_OP_RECV_STATUS_ON_CLIENT};
    op.data.recv_status_on_client.trailing_metadata = &outcome->trailing;
    op.data.recv_status_on_client.status = &outcome->code;
    op.data.recv_status_on_client.status_details = &outcome->details;
    return op;
}

static void batch_start(grpc_call *call, const grpc_op *ops, size_t count, void *tag)
{
    grpc_call_error result = grpc_call_start_batch(call, ops, count, tag, NULL);
    KVK_ASSERT(result == GRPC_CALL_OK);
}

static bool batch_wait(grpc_completion_queue *queue, void *tag)
{
    grpc_event event =
        grpc_completion_queue_pluck(queue, tag, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
    KVK_ASSERT(event.type == GRPC_OP_COMPLETE);
    return event.success != 0;
}

enum kvk_status kvkeep_connection_call(struct kvkeep_connection *connection, const char *method,
                                       const ProtobufCMessage *request,
                                       const ProtobufCMessageDescriptor *response_type,
                                       uint32_t timeout_ms, ProtobufCMessage **response,
                                       struct kvk_error *error)
{
    struct outcome outcome;
    outcome_init(&outcome);
    grpc_byte_buffer *outgoing = pack(request);
    grpc_byte_buffer *incoming = NULL;
    grpc_metadata metadata;
    memset(&metadata, 0, sizeof metadata);

    pthread_mutex_lock(&connection->mutex);
    grpc_call *call = call_create(connection, connection->queue, method, timeout_ms);
    grpc_op ops[6] = {
        initial_metadata(connection, &metadata),
        {.op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = outgoing},
        {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT},
        {.op = GRPC_OP_RECV_INITIAL_METADATA,
         .data.recv_initial_metadata.recv_initial_metadata = &outcome.initial},
        {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &incoming},
        receive_status(&outcome),
    };
    batch_start(call, ops, 6, call);
    (void)batch_wait(connection->queue, call); /* the status says what came of it */
    pthread_mutex_unlock(&connection->mutex);

    grpc_byte_buffer_destroy(outgoing);
    enum kvk_status status = outcome_status(&outcome, error);
    grpc_call_unref(call); /* the metadata was the call's own */
    if (status == KVK_OK) {
        *response = incoming == NULL ? NULL : unpack(incoming, response_type);
        if (*response == NULL) {
            status = kvk_fail(error, KVK_INTERNAL, KVK_CAUSE_NONE, "",
                              "the daemon's answer to %s cannot be read", method);
        }
    }
    if (incoming != NULL) {
        grpc_byte_buffer_destroy(incoming);
    }
    outcome_finish(&outcome);
    return status;
}

/* ---- streams ---- */

enum kvk_status kvkeep_stream_open(struct kvkeep_connection *connection, const char *method,
                                   uint32_t timeout_ms, struct kvkeep_stream **stream,
                                   struct kvk_error *error)
{
    struct kvkeep_stream *new = calloc(1, sizeof *new);
    if (new == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a stream");
    }
    new->connection = connection;
    new->queue = grpc_completion_queue_create_for_pluck(NULL);
    outcome_init(&new->outcome);
    new->call = call_create(connection, new->queue, method, timeout_ms);

    grpc_metadata metadata;
    memset(&metadata, 0, sizeof metadata);
    grpc_op first[] = {
        initial_metadata(connection, &metadata),
        {.op = GRPC_OP_RECV_INITIAL_METADATA,
         .data.recv_initial_metadata.recv_initial_metadata = &new->outcome.initial},
    };
    grpc_op last = receive_status(&new->outcome);
    batch_start(new->call, &last, 1, tag_of(new, TAG_STATUS));
    batch_start(new->call, first, 1, tag_of(new, TAG_SEND));
    bool sent = batch_wait(new->queue, tag_of(new, TAG_SEND));
    batch_start(new->call, first + 1, 1, tag_of(new, TAG_SEND));
    if (!sent) {
        return kvkeep_stream_finish(new, error);
    }
    *stream = new;
    return KVK_OK;
}

bool kvkeep_stream_send(struct kvkeep_stream *stream, const ProtobufCMessage *message)
{
    grpc_byte_buffer *buffer = pack(message);
    grpc_op op = {.op = GRPC_OP_SEND_MESSAGE, .data.send_message.send_message = buffer};
    batch_start(stream->call, &op, 1, tag_of(stream, TAG_SEND + 2));
    bool sent = batch_wait(stream->queue, tag_of(stream, TAG_SEND + 2));
    grpc_byte_buffer_destroy(buffer);
    return sent;
}

bool kvkeep_stream_half_close(struct kvkeep_stream *stream)
{
    grpc_op op = {.op = GRPC_OP_SEND_CLOSE_FROM_CLIENT};
    batch_start(stream->call, &op, 1, tag_of(stream, TAG_SEND + 2));
    return batch_wait(stream->queue, tag_of(stream, TAG_SEND + 2));
}

ProtobufCMessage *kvkeep_stream_receive(struct kvkeep_stream *stream,
                                        const ProtobufCMessageDescriptor *type)
{
    grpc_byte_buffer *buffer = NULL;
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE, .data.recv_message.recv_message = &buffer};
    batch_start(stream->call, &op, 1, tag_of(stream, TAG_RECEIVE));
    (void)batch_wait(stream->queue, tag_of(stream, TAG_RECEIVE));
    if (buffer == NULL) {
        return NULL;
    }
    ProtobufCMessage *message = unpack(buffer, type);
    grpc_byte_buffer_destroy(buffer);
    return message;
}

void kvkeep_stream_cancel(struct kvkeep_stream *stream)
{
    if (!atomic_exchange(&stream->cancelled, true)) {
        (void)grpc_call_cancel(stream->call, NULL);
    }
}

enum kvk_status kvkeep_stream_finish(struct kvkeep_stream *stream, struct kvk_error *error)
{
    (void)batch_wait(stream->queue, tag_of(stream, TAG_STATUS));
    enum kvk_status status = outcome_status(&stream->outcome, error);
    /* What was begun and not waited for, the answer's metadata, is over with the call. */
    (void)batch_wait(stream->queue, tag_of(stream, TAG_SEND));
    grpc_call_unref(stream->call);
    queue_destroy(stream->queue);
    outcome_finish(&stream->outcome);
    free(stream);
    return status;
}
