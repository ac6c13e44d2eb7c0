#include "daemon/publish.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <zmq.h>

#include "daemon/publish_internal.h"

#define SEND_QUEUE 100000 /* messages that ZeroMQ keeps for a slow subscriber */

/* ---- Endpoints ---- */

static bool is_loopback(const char *endpoint)
{
    static const char *const ours[] = {"tcp://127.", "tcp://localhost:", "tcp://[::1]:", "ipc:///"};
    for (size_t i = 0; i < sizeof(ours) / sizeof(ours[0]); i++) {
        if (strncmp(endpoint, ours[i], strlen(ours[i])) == 0) {
            return true;
        }
    }
    return false;
}

static enum kvk_status endpoint_check(const struct kvk_config *config, const char *field,
                                      const char *endpoint, struct kvk_error *error)
{
    /* Not ipc://@NAME either: anybody on the machine may connect to that. */
    if (strncmp(endpoint, "tcp://", 6) != 0 && strncmp(endpoint, "ipc:///", 7) != 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s must be tcp://ADDRESS:PORT or ipc:///PATH", field);
    }
    if (!config->events_remote && !is_loopback(endpoint)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s can be reached by other machines, which need no credential to read "
                        "every tenant's tokens: say events.remote = yes if that is meant",
                        field);
    }
    return KVK_OK;
}

enum kvk_status kvk_publish_check(const struct kvk_config *config, struct kvk_error *error)
{
    bool publishes = config->events_publish[0] != '\0';
    bool replays = config->events_replay[0] != '\0';
    if ((publishes || replays) && config->events_log_bytes == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "events.log_bytes",
                        "events.log_bytes is 0, so there is nothing to publish");
    }
    if (replays && !publishes) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "events.publish",
                        "events.replay needs events.publish");
    }
    enum kvk_status status = KVK_OK;
    if (publishes) {
        status = endpoint_check(config, "events.publish", config->events_publish, error);
    }
    if (status == KVK_OK && replays) {
        status = endpoint_check(config, "events.replay", config->events_replay, error);
    }
    return status;
}

/* ---- The thread ---- */

static void *thread_main(void *argument)
{
    struct kvk_publisher *publisher = argument;
    const long pause_ms = (long)publisher->config->events_batch_ms;
    const struct timespec pause = {.tv_sec = pause_ms / 1000, .tv_nsec = pause_ms % 1000 * 1000000};
    kvk_publish_all_anew(publisher); /* what there is already */
    while (!atomic_load(&publisher->stop)) {
        kvk_publish_new(publisher);
        if (publisher->replay == NULL) {
            (void)nanosleep(&pause, NULL);
            continue;
        }
        zmq_pollitem_t item = {.socket = publisher->replay, .events = ZMQ_POLLIN};
        if (zmq_poll(&item, 1, pause_ms) > 0) {
            kvk_publish_replay_serve(publisher);
        }
    }
    return NULL;
}

static void *socket_bind(struct kvk_publisher *publisher, int kind, const char *field,
                         const char *endpoint, struct kvk_error *error)
{
    const int queue = SEND_QUEUE;
    const int linger = 0;
    const int64_t message_max = 64 << 10; /* of what comes in */
    void *socket = zmq_socket(publisher->context, kind);
    if (socket == NULL || zmq_setsockopt(socket, ZMQ_SNDHWM, &queue, sizeof(queue)) != 0 ||
        zmq_setsockopt(socket, ZMQ_LINGER, &linger, sizeof(linger)) != 0 ||
        zmq_setsockopt(socket, ZMQ_MAXMSGSIZE, &message_max, sizeof(message_max)) != 0 ||
        zmq_bind(socket, endpoint) != 0) {
        (void)kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, field, "%s cannot be bound: %s",
                       field, zmq_strerror(zmq_errno()));
        if (socket != NULL) {
            (void)zmq_close(socket);
        }
        return NULL;
    }
    return socket;
}

enum kvk_status kvk_publisher_create(struct kvk_cache *cache, const struct kvk_config *config,
                                     struct kvk_publisher **result, struct kvk_error *error)
{
    *result = NULL;
    if (config->events_publish[0] == '\0') {
        return KVK_OK;
    }
    struct kvk_publisher *publisher = calloc(1, sizeof(*publisher));
    if (publisher == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the publisher");
    }
    publisher->cache = cache;
    publisher->config = config;
    kvk_publish_pack_init(&publisher->pack, config->events_encoding == 1);
    publisher->context = zmq_ctx_new();
    enum kvk_status status = KVK_UNAVAILABLE;
    if (publisher->context == NULL ||
        kvk_table_init(&publisher->spaces, config->spaces * 2) != KVK_OK) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the publisher");
    } else {
        publisher->publish =
            socket_bind(publisher, ZMQ_PUB, "events.publish", config->events_publish, error);
        if (publisher->publish != NULL) {
            status = KVK_OK;
        }
    }
    if (status == KVK_OK && config->events_replay[0] != '\0') {
        publisher->replay =
            socket_bind(publisher, ZMQ_ROUTER, "events.replay", config->events_replay, error);
        status = publisher->replay != NULL ? KVK_OK : KVK_UNAVAILABLE;
    }
    if (status == KVK_OK) {
        publisher->thread_runs =
            pthread_create(&publisher->thread, NULL, thread_main, publisher) == 0;
        if (!publisher->thread_runs) {
            status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no thread to publish");
        }
    }
    if (status != KVK_OK) {
        kvk_publisher_destroy(publisher);
        return status;
    }
    *result = publisher;
    return KVK_OK;
}

void kvk_publisher_destroy(struct kvk_publisher *publisher)
{
    if (publisher == NULL) {
        return;
    }
    atomic_store(&publisher->stop, true);
    if (publisher->thread_runs) {
        (void)pthread_join(publisher->thread, NULL);
    }
    kvk_publish_topics_free(publisher);
    if (publisher->publish != NULL) {
        (void)zmq_close(publisher->publish);
    }
    if (publisher->replay != NULL) {
        (void)zmq_close(publisher->replay);
    }
    if (publisher->context != NULL) {
        (void)zmq_ctx_term(publisher->context);
    }
    kvk_publish_pack_finish(&publisher->pack);
    free(publisher);
}

void kvk_publisher_stats(const struct kvk_publisher *publisher, struct kvk_publish_stats *stats)
{
    *stats = (struct kvk_publish_stats){
        .events = atomic_load(&publisher->events),
        .messages = atomic_load(&publisher->messages),
        .bytes = atomic_load(&publisher->bytes),
        .replays = atomic_load(&publisher->replays),
        .restarts = atomic_load(&publisher->restarts),
        .topics = atomic_load(&publisher->topic_count),
        .dropped = atomic_load(&publisher->dropped),
    };
}
