/*
 * The life of the server: options, gRPC's server and its queue, the look-up thread, drain and end.
 *
 * One completion queue and one thread that polls it. It does gRPC's I/O, answers INLINE methods on
 * the spot and passes the rest to the bulk threads. A second thread on the queue, or a second
 * queue, costs look-ups a wake-up each, for gRPC polls one set of descriptors whoever waits.
 */
#include "daemon/server.h"

#include <errno.h>
#include <grpc/support/log.h>
#include <grpc/support/time.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/priority.h"
#include "daemon/server_private.h"
#include "daemon/server_sanitize.h"

#define CHANNEL_ARGUMENTS_MAX 16
#define UNKNOWN_QUEUE_DEPTH 2
#define HANDSHAKE_TIMEOUT_MS 10000
#define LOOKS_MAX 64 /* at what comes in, while a call waits for its turn */

void kvk_server_options_init(struct kvk_server_options *options)
{
    memset(options, 0, sizeof(*options));
    options->unix_mode = 0600;
    options->message_bytes_max = UINT64_C(64) << 20;
    options->metadata_bytes_max = 16384;
    options->keepalive_time_ms = 20000;
    options->keepalive_timeout_ms = 5000;
    options->connections_max = 1024;
    options->streams_max = 1024;
    options->live_calls_max = 4096;
    options->queue_depth = 2;
    options->send_queue_max = 64;
    options->bulk_threads = 2;
    options->spin_us = 0;
    options->drain_grace_ms = 5000;
    options->owner_count = 1;
    options->owner_calls_max = options->live_calls_max;
    options->owner_threads_max = KVK_SERVER_BULK_THREADS_MAX;
    options->owner_share_percent = 50;
}

/* ---- options ---- */

static enum kvk_status check_range(const char *field, uint64_t value, uint64_t from, uint64_t to,
                                   struct kvk_error *error)
{
    if (value >= from && value <= to) {
        return KVK_OK;
    }
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, to,
                          "must be %llu to %llu", (unsigned long long)from, (unsigned long long)to);
}

static enum kvk_status options_check(const struct kvk_server_options *options,
                                     struct kvk_error *error)
{
    const struct {
        const char *field;
        uint64_t value, from, to;
    } ranges[] = {
        {"tcp_addresses", options->tcp_address_count, 0, KVK_SERVER_TCP_MAX},
        {"message_bytes_max", options->message_bytes_max, 1024, INT_MAX},
        {"metadata_bytes_max", options->metadata_bytes_max, 1024, 1u << 20},
        {"keepalive_time_ms", options->keepalive_time_ms, 1000, INT_MAX},
        {"keepalive_timeout_ms", options->keepalive_timeout_ms, 100, INT_MAX},
        {"connections_max", options->connections_max, 1, 1u << 20},
        {"streams_max", options->streams_max, 1, 1u << 20},
        {"live_calls_max", options->live_calls_max, 1, 1u << 20},
        {"queue_depth", options->queue_depth, 1, 4096},
        {"send_queue_max", options->send_queue_max, 1, 65536},
        {"bulk_threads", options->bulk_threads, 1, KVK_SERVER_BULK_THREADS_MAX},
        {"spin_us", options->spin_us, 0, 1000000},
        {"owner_count", options->owner_count, 1, 1u << 20},
        {"owner_calls_max", options->owner_calls_max, 1, 1u << 20},
        {"owner_share_percent", options->owner_share_percent, 1, 100},
        {"owner_threads_max", options->owner_threads_max, 1, KVK_SERVER_BULK_THREADS_MAX},
    };
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        enum kvk_status status =
            check_range(ranges[i].field, ranges[i].value, ranges[i].from, ranges[i].to, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* ---- threads ---- */

enum kvk_status kvk_server_thread(pthread_t *thread, const char *name, void *(*run)(void *argument),
                                  void *argument, struct kvk_error *error)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    int result = pthread_create(thread, NULL, run, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "cannot start thread %s: %s",
                        name, strerror(result));
    }
    (void)pthread_setname_np(*thread, name);
    return KVK_OK;
}

static grpc_event queue_look(struct kvk_server *server)
{
    return grpc_completion_queue_next(server->queue, gpr_inf_past(GPR_CLOCK_MONOTONIC), NULL);
}

/* Sleep until something comes in, but not past `until_ns`, when a call may be taken that was held
 * back. gRPC waits for whole milliseconds; what is less we wait for at the sockets, and what other
 * threads bring meanwhile waits with us. */
static grpc_event queue_sleep(struct kvk_server *server, uint64_t until_ns)
{
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    uint64_t left_ns = until_ns > now_ns ? until_ns - now_ns : 0;
    if (left_ns < 2 * KVK_NS_PER_MS) {
        kvk_connections_wait(&server->connections, left_ns);
        return queue_look(server);
    }
    left_ns -= KVK_NS_PER_MS;
    left_ns = left_ns < KVK_NS_PER_SECOND ? left_ns : KVK_NS_PER_SECOND; /* so that it turns */
    gpr_timespec until = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                                      gpr_time_from_nanos((int64_t)left_ns, GPR_TIMESPAN));
    return grpc_completion_queue_next(server->queue, until, NULL);
}

/* Poll without sleeping as long as something came within the last spin_us: a wake-up costs more
 * than a look-up. */
static grpc_event queue_next(struct kvk_server *server, uint64_t until_ns, uint64_t *last_event_ns)
{
    const uint64_t spin_ns = (uint64_t)server->options.spin_us * 1000;
    grpc_event event;
    while (spin_ns > 0) {
        event = queue_look(server);
        uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
        if (event.type != GRPC_QUEUE_TIMEOUT) {
            *last_event_ns = now_ns;
            return event;
        }
        if (now_ns >= until_ns) {
            return event;
        }
        if (now_ns - *last_event_ns >= spin_ns) {
            break;
        }
    }
    event = queue_sleep(server, until_ns);
    if (spin_ns > 0) {
        *last_event_ns = kvk_clock_now(kvk_clock_monotonic());
    }
    return event;
}

/*
 * While calls wait for their turn, what has come in meanwhile is looked at between any two of them,
 * for it may be of an owner that goes first; but not for ever, since every look may bring more.
 */
static void *lookup_run(void *argument)
{
    struct kvk_server *server = argument;
    const struct kvk_fair *fair = &server->calls.fair;
    uint64_t last_event_ns = 0;
    uint32_t looked = 0;
    kvk_priority_answers();
    for (;;) {
        uint64_t ready_ns = kvk_fair_ready_ns(fair);
        bool waiting = ready_ns != UINT64_MAX && ready_ns <= kvk_clock_now(kvk_clock_monotonic());
        grpc_event event = {.type = GRPC_QUEUE_TIMEOUT};
        if (!waiting) {
            event = queue_next(server, ready_ns, &last_event_ns);
        } else if (looked < LOOKS_MAX && !kvk_fair_is_fresh(fair)) {
            event = queue_look(server);
            if (event.type == GRPC_QUEUE_TIMEOUT && kvk_connections_unread(&server->connections)) {
                looked++;
                continue; /* a part of a message was read, others wait */
            }
        }
        looked++;
        atomic_fetch_add_explicit(&server->turns, 1, memory_order_relaxed);
        if (event.type == GRPC_QUEUE_SHUTDOWN) {
            KVK_ASSERT(ready_ns == UINT64_MAX);
            return NULL;
        }
        if (event.type == GRPC_QUEUE_TIMEOUT) {
            looked = 0;
            (void)kvk_calls_serve_one(server);
            continue;
        }
        KVK_ASSERT(event.type == GRPC_OP_COMPLETE);
        struct kvk_tag *tag = event.tag;
        kvk_handoff_acquire(tag);
        tag->run(tag, event.success != 0);
    }
}

/* ---- gRPC's server ---- */

static void argument_add(grpc_channel_args *arguments, const char *key, uint64_t value)
{
    KVK_ASSERT(arguments->num_args < CHANNEL_ARGUMENTS_MAX);
    grpc_arg *argument = &arguments->args[arguments->num_args++];
    argument->type = GRPC_ARG_INTEGER;
    argument->key = (char *)(uintptr_t)key; /* gRPC only reads it */
    argument->value.integer = (int)value;
}

static void grpc_server_make(struct kvk_server *server)
{
    const struct kvk_server_options *options = &server->options;
    grpc_arg storage[CHANNEL_ARGUMENTS_MAX];
    grpc_channel_args arguments = {.num_args = 0, .args = storage};
    argument_add(&arguments, GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, options->message_bytes_max);
    argument_add(&arguments, GRPC_ARG_MAX_SEND_MESSAGE_LENGTH, UINT64_MAX); /* -1: none */
    argument_add(&arguments, GRPC_ARG_MAX_METADATA_SIZE, options->metadata_bytes_max);
    argument_add(&arguments, GRPC_ARG_MAX_CONCURRENT_STREAMS, options->streams_max);
    argument_add(&arguments, GRPC_ARG_KEEPALIVE_TIME_MS, options->keepalive_time_ms);
    argument_add(&arguments, GRPC_ARG_KEEPALIVE_TIMEOUT_MS, options->keepalive_timeout_ms);
    argument_add(&arguments, GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    argument_add(&arguments, GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5000);
    /* K/V does not compress, and a small message must not unpack to a huge one. */
    argument_add(&arguments, GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
                 1u << GRPC_COMPRESS_NONE);
    argument_add(&arguments, GRPC_ARG_ENABLE_CHANNELZ, 0);
    argument_add(&arguments, GRPC_ARG_ALLOW_REUSEPORT, 0);
    argument_add(&arguments, GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, HANDSHAKE_TIMEOUT_MS);
    server->grpc = grpc_server_create(&arguments, NULL);
    server->queue = grpc_completion_queue_create_for_next(NULL);
    grpc_server_register_completion_queue(server->grpc, server->queue, NULL);
}

static enum kvk_status method_add(struct kvk_server *server, const struct kvk_method *method,
                                  struct kvk_error *error)
{
    bool with_request =
        method->kind == KVK_METHOD_UNARY || method->kind == KVK_METHOD_SERVER_STREAM;
    void *registered = grpc_server_register_method(
        server->grpc, method->path, NULL,
        with_request ? GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER : GRPC_SRM_PAYLOAD_NONE, 0);
    if (registered == NULL) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "methods",
                        "method %s cannot be registered: is it there twice?", method->path);
    }
    struct kvk_server_method *added = &server->methods[server->method_count++];
    added->method = *method;
    added->server = server;
    added->registered = registered;
    if (added->method.queue_depth == 0) {
        added->method.queue_depth = server->options.queue_depth;
    }
    return KVK_OK;
}

static enum kvk_status methods_add(struct kvk_server *server, const struct kvk_method *methods,
                                   uint32_t method_count, struct kvk_error *error)
{
    struct kvk_method own[KVK_SERVER_OWN_METHODS];
    uint32_t own_count = kvk_health_methods(&server->health, own);
    if (server->reflection != NULL) {
        own_count += kvk_reflection_methods(server->reflection, own + own_count);
    }
    KVK_ASSERT(own_count <= KVK_SERVER_OWN_METHODS);
    enum kvk_status status = KVK_OK;
    for (uint32_t i = 0; i < method_count && status == KVK_OK; i++) {
        status = method_add(server, &methods[i], error);
    }
    for (uint32_t i = 0; i < own_count && status == KVK_OK; i++) {
        status = method_add(server, &own[i], error);
        if (status == KVK_OK) {
            server->methods[server->method_count - 1].own = true;
        }
    }
    /* Without a catch-all an unknown method would hang until the client's deadline. */
    server->unknown.server = server;
    server->unknown.own = true;
    server->unknown.method.path = "(unknown)";
    server->unknown.method.kind = KVK_METHOD_UNARY;
    server->unknown.method.class = KVK_CLASS_INLINE;
    server->unknown.method.queue_depth = UNKNOWN_QUEUE_DEPTH;
    return status;
}

/* ---- create ---- */

/*
 * What gRPC says goes into our log, one line each. Its errors are mostly a peer's doing (bytes that
 * are no HTTP/2), so they warn; the rest is for who debugs.
 */
static void grpc_said(gpr_log_func_args *said)
{
    enum kvk_log_level level =
        said->severity == GPR_LOG_SEVERITY_ERROR ? KVK_LOG_WARNING : KVK_LOG_DEBUG;
    if (kvk_log_enabled(level)) {
        char text[512];
        kvk_log(level, "grpc", "text=%s", kvk_log_text(text, sizeof(text), said->message));
    }
}

/* gRPC's own threads must not take the daemon's signals. */
static void grpc_begin(struct kvk_server *server)
{
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_BLOCK, &all, &before);
    gpr_set_log_function(grpc_said);
    grpc_init();
    grpc_server_make(server);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    server->grpc_ready = true;
}

static void server_shutdown_done(struct kvk_tag *tag, bool ok)
{
    (void)ok;
    struct kvk_server *server =
        (struct kvk_server *)(void *)((char *)tag - offsetof(struct kvk_server, tag_shutdown));
    kvk_lock(&server->drain_lock);
    server->shutdown_done = true;
    (void)pthread_cond_broadcast(&server->drain_progress);
    kvk_unlock(&server->drain_lock);
}

static enum kvk_status server_init(struct kvk_server *server,
                                   const struct kvk_server_options *options,
                                   struct kvk_error *error)
{
    server->options = *options;
    kvk_lock_init(&server->drain_lock);
    kvk_condition_init(&server->drain_progress);
    kvk_health_init(&server->health);
    server->tag_shutdown.run = server_shutdown_done;
    enum kvk_status calls = kvk_calls_init(server, error);
    enum kvk_status bulk = kvk_bulk_init(&server->bulk, options, error);
    enum kvk_status connections = kvk_connections_init(&server->connections, error);
    if (calls != KVK_OK || bulk != KVK_OK) { /* all are begun, so that all can be finished */
        return calls != KVK_OK ? calls : bulk;
    }
    return connections;
}

static enum kvk_status tls_init(struct kvk_server *server, struct kvk_error *error)
{
    const struct kvk_tls_options *options = &server->options.tls;
    if (options->certificate == NULL || options->certificate[0] == '\0') {
        return KVK_OK;
    }
    if (server->options.tcp_address_count > 1) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "tcp_addresses",
                        "one address at most speaks TLS");
    }
    server->tls_peer = calloc(1, sizeof(*server->tls_peer));
    if (server->tls_peer == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the server");
    }
    atomic_init(&server->tls_peer->references, 1);
    server->tls_peer->fd = -1;
    server->tls_peer->watch_fd = -1;
    server->tls_peer->peer =
        (struct kvk_peer){.kind = KVK_PEER_TLS, .uid = UINT32_MAX, .gid = UINT32_MAX, .pidfd = -1};
    return kvk_tls_create(options, &server->tls, error);
}

enum kvk_status kvk_server_reload(struct kvk_server *server, struct kvk_error *error)
{
    return server->tls == NULL ? KVK_OK : kvk_tls_reload(server->tls, error);
}

enum kvk_status kvk_server_create(const struct kvk_server_options *options,
                                  const struct kvk_method *methods, uint32_t method_count,
                                  struct kvk_server **server, struct kvk_error *error)
{
    KVK_ASSERT(method_count <= KVK_SERVER_METHODS_MAX);
    *server = NULL;
    enum kvk_status status = options_check(options, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_server *made = calloc(1, sizeof(*made));
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the server");
    }
    status = server_init(made, options, error);
    if (status == KVK_OK) {
        status = tls_init(made, error);
    }
    if (status == KVK_OK) {
        status = kvk_listeners_open(&made->connections, options, error);
    }
    if (status == KVK_OK && options->descriptor_set.size_bytes > 0) {
        status = kvk_reflection_create(options->descriptor_set, &made->reflection, error);
    }
    if (status == KVK_OK) {
        grpc_begin(made);
        status = methods_add(made, methods, method_count, error);
    }
    if (status == KVK_OK && made->tls != NULL) {
        status = kvk_tls_listen(made, error);
    }
    if (status != KVK_OK) {
        kvk_server_destroy(made);
        return status;
    }
    *server = made;
    return KVK_OK;
}

enum kvk_status kvk_server_start(struct kvk_server *server, struct kvk_error *error)
{
    KVK_ASSERT(!server->started);
    enum kvk_status status = kvk_bulk_start(&server->bulk, server->options.bulk_threads, error);
    if (status != KVK_OK) {
        return status;
    }
    status = kvk_server_thread(&server->lookup_thread, "kvk-lookup", lookup_run, server, error);
    if (status != KVK_OK) {
        return status;
    }
    server->started = true;
    grpc_server_start(server->grpc);
    for (uint32_t i = 0; i < server->method_count; i++) {
        for (uint32_t j = 0; j < server->methods[i].method.queue_depth; j++) {
            kvk_calls_arm(&server->methods[i]);
        }
    }
    for (uint32_t j = 0; j < server->unknown.method.queue_depth; j++) {
        kvk_calls_arm(&server->unknown);
    }
    status = kvk_health_set(&server->health, "", true);
    KVK_ASSERT(status == KVK_OK);
    return kvk_connections_start(server, error);
}

void kvk_server_set_serving(struct kvk_server *server, const char *service, bool serving)
{
    enum kvk_status status = kvk_health_set(&server->health, service, serving);
    KVK_ASSERT(status == KVK_OK);
}

/* ---- drain and end ---- */

void kvk_server_drain_notify(struct kvk_server *server)
{
    if (!atomic_load(&server->draining)) {
        return;
    }
    kvk_lock(&server->drain_lock);
    (void)pthread_cond_broadcast(&server->drain_progress);
    kvk_unlock(&server->drain_lock);
}

static bool drain_is_over(struct kvk_server *server)
{
    return server->shutdown_done && atomic_load(&server->calls.live_count) == 0 &&
           atomic_load(&server->calls.armed_count) == 0;
}

/* False: the time was over first. */
static bool drain_wait(struct kvk_server *server, uint64_t until_ns)
{
    kvk_lock(&server->drain_lock);
    bool in_time = true;
    while (!drain_is_over(server) && in_time) {
        in_time = kvk_condition_wait(&server->drain_progress, &server->drain_lock, until_ns);
    }
    bool over = drain_is_over(server);
    kvk_unlock(&server->drain_lock);
    return over;
}

void kvk_server_drain(struct kvk_server *server)
{
    KVK_ASSERT(server->started && !server->drained);
    server->drained = true;
    atomic_store(&server->draining, true);
    kvk_health_drain(&server->health);
    kvk_connections_stop_accepting(server);
    if (server->options.on_drain != NULL) {
        server->options.on_drain(server->options.user_data);
    }
    kvk_handoff_release(&server->tag_shutdown);
    grpc_server_shutdown_and_notify(server->grpc, server->queue, &server->tag_shutdown);
    uint64_t grace_ns = (uint64_t)server->options.drain_grace_ms * KVK_NS_PER_MS;
    if (!drain_wait(server, kvk_clock_now(kvk_clock_monotonic()) + grace_ns)) {
        grpc_server_cancel_all_calls(server->grpc);
        bool over = drain_wait(server, UINT64_MAX);
        KVK_ASSERT(over);
    }
}

/* No call lives and none is armed, so nothing can begin a batch after the queue's shutdown. */
static void grpc_end(struct kvk_server *server)
{
    if (server->grpc == NULL) {
        return;
    }
    if (!server->started) {
        /* gRPC wants every server shut down before it is destroyed, started or not. */
        grpc_server_shutdown_and_notify(server->grpc, server->queue, &server->tag_shutdown);
        grpc_event event =
            grpc_completion_queue_next(server->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        KVK_ASSERT(event.tag == &server->tag_shutdown);
    }
    grpc_server_destroy(server->grpc);
    grpc_completion_queue_shutdown(server->queue);
    if (server->started) {
        (void)pthread_join(server->lookup_thread, NULL);
    } else {
        grpc_event event =
            grpc_completion_queue_next(server->queue, gpr_inf_future(GPR_CLOCK_MONOTONIC), NULL);
        KVK_ASSERT(event.type == GRPC_QUEUE_SHUTDOWN);
    }
    grpc_completion_queue_destroy(server->queue);
}

void kvk_server_destroy(struct kvk_server *server)
{
    if (server == NULL) {
        return;
    }
    if (server->started && !server->drained) {
        kvk_server_drain(server);
    }
    grpc_end(server);
    kvk_bulk_stop(&server->bulk);
    kvk_connections_finish(server);
    kvk_calls_finish(server);
    if (server->grpc_ready) {
        grpc_shutdown();
    }
    kvk_tls_destroy(server->tls);
    if (server->tls_peer != NULL) {
        kvk_connection_release(server->tls_peer);
    }
    kvk_reflection_destroy(server->reflection);
    kvk_health_finish(&server->health);
    kvk_bulk_finish(&server->bulk);
    kvk_lock_finish(&server->drain_lock);
    (void)pthread_cond_destroy(&server->drain_progress);
    free(server);
}

/* ---- what it counts ---- */

void kvk_server_stats(struct kvk_server *server, struct kvk_server_stats *stats)
{
    stats->calls = atomic_load(&server->calls.call_count);
    stats->calls_refused = atomic_load(&server->calls.refused_count);
    stats->calls_of_one_refused = atomic_load(&server->calls.one_refused_count);
    stats->calls_unknown = atomic_load(&server->calls.unknown_count);
    stats->calls_cancelled = atomic_load(&server->calls.cancelled_count);
    stats->connections = atomic_load(&server->connections.accepted_count);
    stats->connections_refused = atomic_load(&server->connections.refused_count);
    stats->turns = atomic_load(&server->turns);
    stats->live_calls = atomic_load(&server->calls.live_count);
    stats->live_connections = atomic_load(&server->connections.live_count);
}

uint16_t kvk_server_tcp_port(struct kvk_server *server, uint32_t index)
{
    struct kvk_connections *connections = &server->connections;
    if (server->tls != NULL) {
        return index == 0 ? server->tls_port : 0;
    }
    for (uint32_t i = 0; i < connections->listener_count; i++) {
        if (connections->listeners[i].kind == KVK_PEER_TCP && index-- == 0) {
            return connections->listeners[i].port;
        }
    }
    return 0;
}
