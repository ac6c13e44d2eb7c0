/*
 * A server without gRPC: the functions of daemon/server.h that the rpc files call, so that one
 * thread can drive every handler with any bytes, thousands of times a second, and again the same.
 *
 * Defined here, they stand in for those of the server's library, which is then not linked. A
 * deferred run comes at once; what a stream has sent is gone at once; on_sent and on_wake are told
 * by fake_server_turn(), never from inside another callback. What the contract of server.h asks of
 * handlers is checked: a call is ended exactly once, and not touched after it.
 */
#ifndef KVK_TESTS_FUZZ_SERVER_H
#define KVK_TESTS_FUZZ_SERVER_H

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "daemon/server.h"

#define FAKE_BORROWED_MAX 64
#define FAKE_REPLY_MAX ((size_t)64 << 20)

struct kvk_call {
    const struct kvk_method *method;
    struct kvk_peer peer;
    const char *token; /* NULL: none */
    struct kvk_bytes message;
    uint8_t *reply;
    size_t reply_bytes;
    bool reply_made;
    void *context;
    const void *caller; /* NULL: each handler asks for itself */
    const struct kvk_stream_events *events;
    void (*on_done)(void *context);
    void (*deferred)(struct kvk_call *call);
    bool ended;
    bool cancelled;
    bool sent; /* on_sent is due */
    bool woken;
    enum kvk_status status; /* how it ended */
    uint64_t sent_messages;
    struct kvk_borrowed borrowed[FAKE_BORROWED_MAX]; /* not released yet */
    uint32_t borrowed_count;
    uint8_t *last; /* the last answer or message that was sent, ours */
    size_t last_bytes;
};

static uint64_t fake_sum; /* of all bytes that went out: they must be readable */

static void fake_read(const uint8_t *bytes, size_t size)
{
    for (size_t i = 0; i < size; i++) {
        fake_sum += bytes[i];
    }
}

static void fake_keep(struct kvk_call *call)
{
    free(call->last);
    call->last = call->reply;
    call->last_bytes = call->reply_bytes;
    fake_read(call->last, call->last_bytes);
    call->reply = NULL;
    call->reply_bytes = 0;
    call->reply_made = false;
}

static void fake_end(struct kvk_call *call, enum kvk_status status)
{
    KVK_ASSERT(!call->ended);
    call->ended = true;
    call->status = status;
}

struct kvk_bytes kvk_call_message(struct kvk_call *call)
{
    KVK_ASSERT(!call->ended);
    return call->message;
}

size_t kvk_call_message_size(struct kvk_call *call)
{
    return call->message.size_bytes;
}

bool kvk_call_metadata(struct kvk_call *call, const char *key, struct kvk_bytes *value)
{
    (void)call;
    (void)key;
    (void)value;
    return false;
}

bool kvk_call_bearer_token(struct kvk_call *call, struct kvk_bytes *token)
{
    if (call->token == NULL) {
        return false;
    }
    *token =
        (struct kvk_bytes){.data = (const uint8_t *)call->token, .size_bytes = strlen(call->token)};
    return true;
}

const struct kvk_peer *kvk_call_peer(struct kvk_call *call)
{
    return &call->peer;
}

void kvk_call_peer_text(struct kvk_call *call, char text[KVK_PEER_TEXT_SIZE])
{
    (void)call;
    memcpy(text, "fake", sizeof("fake"));
}

uint32_t kvk_call_peer_address(struct kvk_call *call, uint8_t address[16])
{
    (void)call;
    memset(address, 1, 4);
    return 4;
}

void kvk_call_certificate_names(struct kvk_call *call, struct kvk_certificate_names *names)
{
    (void)call;
    *names = (struct kvk_certificate_names){.count = 0};
}

void kvk_certificate_names_finish(struct kvk_certificate_names *names)
{
    (void)names;
}

uint64_t kvk_call_deadline_ns(struct kvk_call *call)
{
    (void)call;
    return UINT64_MAX;
}

bool kvk_call_is_cancelled(struct kvk_call *call)
{
    return call->cancelled;
}

void kvk_call_set_caller(struct kvk_call *call, const void *caller)
{
    call->caller = caller;
}

const void *kvk_call_caller(struct kvk_call *call)
{
    return call->caller;
}

void kvk_call_set_context(struct kvk_call *call, void *context)
{
    call->context = context;
}

void *kvk_call_context(struct kvk_call *call)
{
    return call->context;
}

void kvk_call_on_cancel(struct kvk_call *call, void (*on_cancel)(struct kvk_call *call),
                        void (*on_done)(void *context))
{
    KVK_ASSERT(!call->ended && on_cancel != NULL);
    call->on_done = on_done;
}

void kvk_call_defer(struct kvk_call *call, void (*run)(struct kvk_call *call))
{
    KVK_ASSERT(!call->ended && call->deferred == NULL);
    call->deferred = run;
}

uint8_t *kvk_call_reply_alloc(struct kvk_call *call, size_t size_bytes)
{
    KVK_ASSERT(!call->ended && !call->reply_made && size_bytes <= FAKE_REPLY_MAX);
    call->reply = malloc(size_bytes + 1);
    KVK_ASSERT(call->reply != NULL);
    call->reply_bytes = size_bytes;
    call->reply_made = true;
    return call->reply;
}

void kvk_call_reply(struct kvk_call *call)
{
    fake_keep(call);
    fake_end(call, KVK_OK);
}

static void fake_borrow(struct kvk_call *call, const struct kvk_borrowed *data)
{
    fake_read(data->data, data->size_bytes);
    if (call->borrowed_count == FAKE_BORROWED_MAX) {
        data->release(data->argument);
        return;
    }
    call->borrowed[call->borrowed_count] = *data;
    call->borrowed_count++;
}

void kvk_call_reply_borrowed(struct kvk_call *call, const struct kvk_borrowed *data)
{
    fake_borrow(call, data);
    kvk_call_reply(call);
}

void kvk_call_fail(struct kvk_call *call, const struct kvk_error *error)
{
    KVK_ASSERT(error->status != KVK_OK && error->status != KVK_WOULD_BLOCK);
    KVK_ASSERT(memchr(error->text, '\0', sizeof(error->text)) != NULL && error->text[0] != '\0');
    KVK_ASSERT(memchr(error->field, '\0', sizeof(error->field)) != NULL);
    fake_end(call, error->status);
}

void kvk_call_stream(struct kvk_call *call, const struct kvk_stream_events *events, void *context)
{
    KVK_ASSERT(!call->ended && call->events == NULL && events->on_cancel != NULL);
    call->events = events;
    call->context = context;
}

void kvk_call_receive(struct kvk_call *call)
{
    (void)call;
}

enum kvk_status kvk_call_send(struct kvk_call *call)
{
    KVK_ASSERT(!call->ended);
    fake_keep(call);
    call->sent_messages++;
    call->sent = true;
    return call->cancelled ? KVK_CANCELLED : KVK_OK;
}

enum kvk_status kvk_call_send_borrowed(struct kvk_call *call, const struct kvk_borrowed *data)
{
    fake_borrow(call, data);
    return kvk_call_send(call);
}

void kvk_call_wake(struct kvk_call *call)
{
    call->woken = true;
}

uint32_t kvk_call_sends_pending(struct kvk_call *call)
{
    (void)call;
    return 0;
}

void kvk_call_finish(struct kvk_call *call)
{
    fake_end(call, KVK_OK);
}

void kvk_call_hold_owner(struct kvk_call *call, uint64_t hold_ns)
{
    (void)hold_ns;
    if (call->ended) {
        abort(); /* it is only for calls that are not ended */
    }
}

void kvk_server_stats(struct kvk_server *server, struct kvk_server_stats *stats)
{
    (void)server;
    memset(stats, 0, sizeof(*stats));
}

/* ---- the driver's side ---- */

/* Nobody uses the call's bytes any more. */
static void fake_release_borrowed(struct kvk_call *call)
{
    while (call->borrowed_count > 0) {
        call->borrowed_count--;
        const struct kvk_borrowed *data = &call->borrowed[call->borrowed_count];
        fake_read(data->data, data->size_bytes);
        data->release(data->argument);
    }
}

/* What is due of a stream: one on_sent, one on_wake. */
static void fake_server_turn(struct kvk_call *call)
{
    if (call->ended || call->events == NULL) {
        return;
    }
    if (call->woken) {
        call->woken = false;
        if (call->events->on_wake != NULL) {
            call->events->on_wake(call);
        }
    }
    if (!call->ended && call->sent) {
        call->sent = false;
        fake_release_borrowed(call);
        if (call->events->on_sent != NULL) {
            call->events->on_sent(call);
        }
    }
}

/* A call that came in: what the server would do first. */
static void fake_server_begin(struct kvk_call *call)
{
    call->method->on_call(call, call->method->user_data);
    if (call->deferred != NULL) {
        KVK_ASSERT(!call->ended);
        call->deferred(call);
        KVK_ASSERT(call->ended);
    }
    KVK_ASSERT(call->ended || call->events != NULL);
}

static void fake_server_message(struct kvk_call *call, struct kvk_bytes message)
{
    if (!call->ended && call->events->on_message != NULL) {
        call->message = message;
        bool more = call->events->on_message(call);
        KVK_ASSERT(!more || !call->ended);
    }
}

static void fake_server_half_close(struct kvk_call *call)
{
    if (!call->ended && call->events->on_half_close != NULL) {
        call->events->on_half_close(call);
        KVK_ASSERT(call->ended);
    }
}

/* The client is gone, where it was not; then the last callback. */
static void fake_server_finish(struct kvk_call *call)
{
    if (!call->ended) {
        KVK_ASSERT(call->events != NULL);
        call->cancelled = true;
        call->events->on_cancel(call);
        KVK_ASSERT(call->ended);
    }
    fake_release_borrowed(call);
    if (call->events != NULL && call->events->on_done != NULL) {
        call->events->on_done(call->context);
    } else if (call->on_done != NULL) {
        call->on_done(call->context);
    }
    free(call->reply);
    free(call->last);
    memset(call, 0, sizeof(*call));
}

#endif
