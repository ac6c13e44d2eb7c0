/*
 * A server with methods of every kind over plain bytes, which counts what its handlers are told.
 * For the tests of the gRPC layer.
 */
#ifndef KVK_TESTS_SERVER_FIXTURE_H
#define KVK_TESTS_SERVER_FIXTURE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"
#include "daemon/server.h"
#include "proto/descriptor_set.h"
#include "tests/patience.h"

#define FIXTURE_DATA_BYTES (1u << 20)

/* What the handlers saw, over all calls. */
struct fixture_counts {
    atomic_uint cancels, dones, half_closes, messages, releases, sends_refused;
    atomic_uint connections_closed, drains;
    atomic_uint last_uid, last_pid, last_connection_id, closed_connection_id;
    atomic_ulong bytes;
    atomic_bool on_bulk_thread;
};

struct fixture {
    struct kvk_server *server;
    struct kvk_server_options options;
    char path[64];
    char target[80];
    struct fixture_counts counts;
    uint8_t *data; /* [FIXTURE_DATA_BYTES] */

    /* Calls of "/t/Late" that wait for fixture_answer_late(). */
    pthread_mutex_t late_lock;
    struct kvk_call *late[64];
    unsigned late_count;
};

static struct fixture *fixture_now; /* streams' callbacks know no user data */

static inline bool fixture_thread_is(const char *prefix)
{
    char name[16] = "";
    (void)pthread_getname_np(pthread_self(), name, sizeof(name));
    return strncmp(name, prefix, strlen(prefix)) == 0;
}

/* Until *counter reaches `value`. */
static inline bool fixture_wait(const atomic_uint *counter, unsigned value)
{
    for (int i = 0; i < PATIENCE_MS; i++) {
        if (atomic_load(counter) >= value) {
            return true;
        }
        usleep(1000);
    }
    return false;
}

#define FIXTURE_ANY UINT32_MAX

/* Until so many calls and connections live. */
static inline bool fixture_wait_live(struct fixture *fixture, unsigned calls, unsigned connections)
{
    for (int i = 0; i < PATIENCE_MS; i++) {
        struct kvk_server_stats stats;
        kvk_server_stats(fixture->server, &stats);
        if (stats.live_calls == calls &&
            (connections == FIXTURE_ANY || stats.live_connections == connections)) {
            return true;
        }
        usleep(1000);
    }
    struct kvk_server_stats stats;
    kvk_server_stats(fixture->server, &stats);
    (void)fprintf(stderr, "still %u calls, %u connections\n", stats.live_calls,
                  stats.live_connections);
    return false;
}

/* ---- unary ---- */

static inline void fixture_reply_request(struct kvk_call *call)
{
    struct kvk_bytes request = kvk_call_message(call);
    uint8_t *reply = kvk_call_reply_alloc(call, request.size_bytes);
    if (request.size_bytes > 0) {
        memcpy(reply, request.data, request.size_bytes);
    }
    kvk_call_reply(call);
}

static inline void fixture_echo(struct kvk_call *call, void *user_data)
{
    struct fixture *fixture = user_data;
    atomic_store(&fixture->counts.on_bulk_thread, fixture_thread_is("kvk-bulk"));
    const struct kvk_peer *peer = kvk_call_peer(call);
    atomic_store(&fixture->counts.last_uid, peer->uid);
    atomic_store(&fixture->counts.last_pid, (unsigned)peer->pid);
    atomic_store(&fixture->counts.last_connection_id, (unsigned)peer->connection_id);
    fixture_reply_request(call);
}

static inline void fixture_deferred(struct kvk_call *call)
{
    KVK_ASSERT(fixture_thread_is("kvk-bulk"));
    fixture_reply_request(call);
}

static inline void fixture_defer(struct kvk_call *call, void *user_data)
{
    (void)user_data;
    KVK_ASSERT(fixture_thread_is("kvk-lookup"));
    kvk_call_defer(call, fixture_deferred);
}

static inline void fixture_token(struct kvk_call *call, void *user_data)
{
    (void)user_data;
    struct kvk_bytes token;
    if (!kvk_call_bearer_token(call, &token)) {
        struct kvk_error error;
        (void)kvk_fail(&error, KVK_UNAUTHENTICATED, KVK_CAUSE_NONE, "", "no token");
        kvk_call_fail(call, &error);
        return;
    }
    memcpy(kvk_call_reply_alloc(call, token.size_bytes), token.data, token.size_bytes);
    kvk_call_reply(call);
}

static inline void fixture_fail(struct kvk_call *call, void *user_data)
{
    (void)user_data;
    struct kvk_error error;
    (void)kvk_fail(&error, KVK_PRECONDITION, KVK_CAUSE_SWAPPED_OUT, "sequence_id",
                   "the sequence is swapped out");
    (void)kvk_call_reply_alloc(call, 100); /* dropped */
    kvk_call_fail(call, &error);
}

static inline void fixture_cancelled(struct kvk_call *call)
{
    KVK_ASSERT(kvk_call_is_cancelled(call));
    atomic_fetch_add(&fixture_now->counts.cancels, 1);
}

static inline void fixture_done(void *context)
{
    struct fixture *fixture = context;
    atomic_fetch_add(&fixture->counts.dones, 1);
}

static inline void fixture_late(struct kvk_call *call, void *user_data)
{
    struct fixture *fixture = user_data;
    kvk_call_set_context(call, fixture);
    kvk_call_on_cancel(call, fixture_cancelled, fixture_done);
    (void)pthread_mutex_lock(&fixture->late_lock);
    KVK_ASSERT(fixture->late_count < 64);
    fixture->late[fixture->late_count++] = call;
    (void)pthread_mutex_unlock(&fixture->late_lock);
}

static inline void fixture_answer_late(struct fixture *fixture)
{
    for (;;) {
        (void)pthread_mutex_lock(&fixture->late_lock);
        struct kvk_call *call =
            fixture->late_count > 0 ? fixture->late[--fixture->late_count] : NULL;
        (void)pthread_mutex_unlock(&fixture->late_lock);
        if (call == NULL) {
            return;
        }
        fixture_reply_request(call);
    }
}

static inline bool fixture_wait_late(struct fixture *fixture, unsigned count)
{
    for (int i = 0; i < PATIENCE_MS; i++) {
        (void)pthread_mutex_lock(&fixture->late_lock);
        unsigned waiting = fixture->late_count;
        (void)pthread_mutex_unlock(&fixture->late_lock);
        if (waiting == count) {
            return true;
        }
        usleep(1000);
    }
    return false;
}

/* ---- streams ---- */

struct fixture_stream {
    struct fixture *fixture;
    uint64_t bytes;
    uint32_t left; /* messages to send */
    uint32_t size_bytes;
};

static inline void fixture_stream_done(void *context)
{
    struct fixture_stream *stream = context;
    atomic_fetch_add(&stream->fixture->counts.dones, 1);
    free(stream);
}

static inline void fixture_stream_cancelled(struct kvk_call *call)
{
    struct fixture_stream *stream = kvk_call_context(call);
    atomic_fetch_add(&stream->fixture->counts.cancels, 1);
    struct kvk_error error;
    (void)kvk_fail(&error, KVK_CANCELLED, KVK_CAUSE_NONE, "", "the client is gone");
    kvk_call_fail(call, &error);
}

static inline struct fixture_stream *fixture_stream_new(struct fixture *fixture)
{
    struct fixture_stream *stream = calloc(1, sizeof(*stream));
    KVK_ASSERT(stream != NULL);
    stream->fixture = fixture;
    return stream;
}

static inline void fixture_release(void *argument)
{
    struct fixture *fixture = argument;
    atomic_fetch_add(&fixture->counts.releases, 1);
}

/* Send until the queue is full, then from on_sent again. */
static inline void fixture_download_pump(struct kvk_call *call)
{
    struct fixture_stream *stream = kvk_call_context(call);
    struct kvk_borrowed data = {
        .data = stream->fixture->data,
        .size_bytes = stream->size_bytes,
        .release = fixture_release,
        .argument = stream->fixture,
    };
    while (stream->left > 0) {
        memcpy(kvk_call_reply_alloc(call, 4), &stream->left, 4);
        enum kvk_status status = kvk_call_send_borrowed(call, &data);
        if (status != KVK_OK) {
            atomic_fetch_add(&stream->fixture->counts.sends_refused, 1);
            return;
        }
        stream->left--;
    }
    kvk_call_finish(call);
}

static const struct kvk_stream_events fixture_download_events = {
    .on_sent = fixture_download_pump,
    .on_cancel = fixture_stream_cancelled,
    .on_done = fixture_stream_done,
};

/* Request: u32 messages, u32 bytes of each. */
static inline void fixture_download(struct kvk_call *call, void *user_data)
{
    struct fixture_stream *stream = fixture_stream_new(user_data);
    struct kvk_bytes request = kvk_call_message(call);
    KVK_ASSERT(request.size_bytes == 8);
    memcpy(&stream->left, request.data, 4);
    memcpy(&stream->size_bytes, request.data + 4, 4);
    kvk_call_stream(call, &fixture_download_events, stream);
    fixture_download_pump(call);
}

static inline bool fixture_upload_message(struct kvk_call *call)
{
    struct fixture_stream *stream = kvk_call_context(call);
    struct kvk_bytes part;
    uint64_t bytes = 0;
    for (uint32_t i = 0; kvk_call_message_part(call, i, &part); i++) {
        bytes += part.size_bytes;
    }
    KVK_ASSERT(bytes == kvk_call_message_size(call));
    stream->bytes += bytes;
    atomic_fetch_add(&stream->fixture->counts.messages, 1);
    return true;
}

static inline void fixture_upload_end(struct kvk_call *call)
{
    struct fixture_stream *stream = kvk_call_context(call);
    atomic_fetch_add(&stream->fixture->counts.half_closes, 1);
    memcpy(kvk_call_reply_alloc(call, 8), &stream->bytes, 8);
    kvk_call_reply(call);
}

static const struct kvk_stream_events fixture_upload_events = {
    .on_message = fixture_upload_message,
    .on_half_close = fixture_upload_end,
    .on_cancel = fixture_stream_cancelled,
    .on_done = fixture_stream_done,
};

static inline void fixture_upload(struct kvk_call *call, void *user_data)
{
    kvk_call_stream(call, &fixture_upload_events, fixture_stream_new(user_data));
}

static inline bool fixture_pipe_message(struct kvk_call *call)
{
    struct fixture_stream *stream = kvk_call_context(call);
    struct kvk_bytes message = kvk_call_message(call);
    atomic_fetch_add(&stream->fixture->counts.messages, 1);
    if (message.size_bytes == 4 && memcmp(message.data, "fail", 4) == 0) {
        struct kvk_error error;
        (void)kvk_fail(&error, KVK_ABORTED, KVK_CAUSE_NONE, "", "asked to");
        kvk_call_fail(call, &error);
        return true;
    }
    uint8_t *reply = kvk_call_reply_alloc(call, message.size_bytes);
    if (message.size_bytes > 0) {
        memcpy(reply, message.data, message.size_bytes);
    }
    if (kvk_call_send(call) != KVK_OK) {
        atomic_fetch_add(&stream->fixture->counts.sends_refused, 1);
    }
    return true;
}

static inline void fixture_pipe_end(struct kvk_call *call)
{
    struct fixture_stream *stream = kvk_call_context(call);
    atomic_fetch_add(&stream->fixture->counts.half_closes, 1);
    kvk_call_finish(call);
}

static const struct kvk_stream_events fixture_pipe_events = {
    .on_message = fixture_pipe_message,
    .on_half_close = fixture_pipe_end,
    .on_cancel = fixture_stream_cancelled,
    .on_done = fixture_stream_done,
};

static inline void fixture_pipe(struct kvk_call *call, void *user_data)
{
    kvk_call_stream(call, &fixture_pipe_events, fixture_stream_new(user_data));
}

/* ---- the server ---- */

static inline size_t fixture_details(const struct kvk_error *error, int code, uint8_t *buffer,
                                     size_t capacity)
{
    int size = snprintf((char *)buffer, capacity, "code=%d cause=%s field=%s", code,
                        kvk_cause_name(error->cause), error->field);
    return (size_t)size;
}

static inline void fixture_connection_closed(const struct kvk_peer *peer, void *user_data)
{
    struct fixture *fixture = user_data;
    atomic_store(&fixture->counts.closed_connection_id, (unsigned)peer->connection_id);
    atomic_fetch_add(&fixture->counts.connections_closed, 1);
}

static inline void fixture_drained(void *user_data)
{
    struct fixture *fixture = user_data;
    atomic_fetch_add(&fixture->counts.drains, 1);
}

#define FIXTURE_METHODS 10

static inline void fixture_methods(struct fixture *fixture, struct kvk_method *methods)
{
    const struct kvk_method table[FIXTURE_METHODS] = {
        {"/t/Echo", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 64, 0, fixture_echo, fixture, 0},
        {"/t/EchoBulk", KVK_METHOD_UNARY, KVK_CLASS_BULK, 0, 0, fixture_echo, fixture, 0},
        {"/t/Defer", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 0, 0, fixture_defer, fixture, 0},
        {"/t/Token", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 0, 0, fixture_token, fixture, 0},
        {"/t/Fail", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 0, 0, fixture_fail, fixture, 0},
        {"/t/Late", KVK_METHOD_UNARY, KVK_CLASS_INLINE, 0, 4, fixture_late, fixture, 0},
        {"/t/Download", KVK_METHOD_SERVER_STREAM, KVK_CLASS_BULK, 0, 0, fixture_download, fixture,
         0},
        {"/t/Upload", KVK_METHOD_CLIENT_STREAM, KVK_CLASS_BULK, 0, 0, fixture_upload, fixture, 0},
        {"/t/Pipe", KVK_METHOD_BIDI, KVK_CLASS_INLINE, 0, 0, fixture_pipe, fixture, 0},
        {"/t/PipeBulk", KVK_METHOD_BIDI, KVK_CLASS_BULK, 0, 0, fixture_pipe, fixture, 0},
    };
    memcpy(methods, table, sizeof(table));
}

/* Options that a test may change before fixture_start(). */
static inline void fixture_init(struct fixture *fixture, const char *name)
{
    memset(fixture, 0, sizeof(*fixture));
    (void)snprintf(fixture->path, sizeof(fixture->path), "/tmp/kvk-test-%s-%d", name,
                   (int)getpid());
    (void)snprintf(fixture->target, sizeof(fixture->target), "unix:%s", fixture->path);
    (void)pthread_mutex_init(&fixture->late_lock, NULL);
    fixture->data = malloc(FIXTURE_DATA_BYTES);
    KVK_ASSERT(fixture->data != NULL);
    for (size_t i = 0; i < FIXTURE_DATA_BYTES; i++) {
        fixture->data[i] = (uint8_t)(i * 7 + i / 251);
    }
    struct kvk_server_options *options = &fixture->options;
    kvk_server_options_init(options);
    options->unix_path = fixture->path;
    options->error_details = fixture_details;
    options->on_connection_closed = fixture_connection_closed;
    options->on_drain = fixture_drained;
    options->user_data = fixture;
    options->descriptor_set.data = kvk_descriptor_set(&options->descriptor_set.size_bytes);
    fixture_now = fixture;
}

static inline void fixture_start(struct fixture *fixture)
{
    struct kvk_method methods[FIXTURE_METHODS];
    fixture_methods(fixture, methods);
    struct kvk_error error;
    enum kvk_status status =
        kvk_server_create(&fixture->options, methods, FIXTURE_METHODS, &fixture->server, &error);
    if (status == KVK_OK) {
        kvk_server_set_serving(fixture->server, "t", true);
        status = kvk_server_start(fixture->server, &error);
    }
    if (status != KVK_OK) {
        (void)fprintf(stderr, "the server does not start: %s\n", error.text);
        abort();
    }
}

static inline void fixture_finish(struct fixture *fixture)
{
    kvk_server_destroy(fixture->server);
    free(fixture->data);
    (void)pthread_mutex_destroy(&fixture->late_lock);
    char lock[80];
    (void)snprintf(lock, sizeof(lock), "%s.lock", fixture->path);
    (void)unlink(lock);
}

#endif
