#include "daemon/publish.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <zmq.h>

#include "base/assert.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/table.h"
#include "daemon/cache_state.h"
#include "daemon/config.h"
#include "daemon/events.h"
#include "daemon/publish_pack.h"

#define TOPICS_MAX 1024U
#define TOPIC_PREFIX "kv@"
#define SEND_QUEUE 100000 /* messages that ZeroMQ keeps for a slow subscriber */
#define RESTART_PAUSE_NS (2 * KVK_NS_PER_SECOND)
#define REPLAY_FRAMES_MAX 4

/* One message, kept so that it can be replayed. In two lists: of all, and of its topic. */
struct message {
    struct topic *topic;
    struct message *next; /* published after it, of any topic */
    struct message *next_of_topic;
    uint64_t number;
    size_t size;
    uint8_t data[];
};

struct topic {
    char *name;            /* ours */
    uint64_t first_number; /* of its first message */
    uint64_t next_number;
    struct message *first, *last; /* those that are kept */
    bool restart_wanted;
    uint64_t restarted_ns;
    struct topic *next;
    /* The batch at hand: events of kvk_publisher.batch. */
    const struct kvk_event *events[KVK_EVENT_BATCH_EVENTS];
    const struct kvk_event_space *names[KVK_EVENT_BATCH_EVENTS];
    uint32_t count;
};

/* What is known of a space that was heard of. */
struct known_space {
    struct kvk_event_space names;
    struct topic *topic; /* NULL: there are too many topics */
};

struct kvk_publisher {
    struct kvk_cache *cache;
    const struct kvk_config *config;
    void *context;
    void *publish;
    void *replay; /* NULL: none */
    pthread_t thread;
    bool thread_runs;
    atomic_bool stop;

    /* The thread's own. */
    uint64_t after; /* number of the last event that was published */
    struct kvk_event_batch batch;
    struct kvk_publish_pack pack;
    struct kvk_table spaces; /* id -> struct known_space, ours */
    struct topic *topics;
    struct message *first, *last;
    uint64_t kept_bytes;

    _Atomic uint64_t events, messages, bytes, replays, restarts, topic_count, dropped;
};

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

/* ---- Topics ---- */

static uint64_t wall_us(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static bool has_begun(const struct topic *topic)
{
    return topic->next_number != topic->first_number;
}

static struct topic *topic_find(struct kvk_publisher *publisher, const void *name, size_t size)
{
    for (struct topic *topic = publisher->topics; topic != NULL; topic = topic->next) {
        if (strlen(topic->name) == size && memcmp(topic->name, name, size) == 0) {
            return topic;
        }
    }
    return NULL;
}

/* kv@TENANT@MODEL, ours to free; in the tenant's name %40 stands for @, so that no tenant's topics
 * begin as another's. NULL: no memory. */
static char *topic_name(const struct kvk_event_space *names)
{
    size_t size = sizeof(TOPIC_PREFIX) + 3 * strlen(names->tenant) + 1 + strlen(names->model) + 1;
    char *name = calloc(size, 1);
    if (name == NULL) {
        return NULL;
    }
    char *end = name + snprintf(name, size, TOPIC_PREFIX);
    for (const char *at = names->tenant; *at != '\0'; at++) {
        if (*at == '@' || *at == '%') {
            end += snprintf(end, 4, "%%%02X", (unsigned)*at);
        } else {
            *end++ = *at;
        }
    }
    *end++ = '@';
    memcpy(end, names->model, strlen(names->model));
    return name;
}

/* Of a tenant's model, made where it is new: then all of it is published first. NULL: too many, or
 * no memory. */
static struct topic *topic_of(struct kvk_publisher *publisher, const struct kvk_event_space *names)
{
    char *name = topic_name(names);
    if (name == NULL) {
        return NULL;
    }
    struct topic *topic = topic_find(publisher, name, strlen(name));
    if (topic != NULL || atomic_load(&publisher->topic_count) == TOPICS_MAX) {
        free(name);
        return topic;
    }
    topic = calloc(1, sizeof(*topic));
    if (topic == NULL) {
        free(name);
        return NULL;
    }
    topic->name = name;
    topic->first_number = wall_us();
    topic->next_number = topic->first_number;
    topic->restart_wanted = true;
    topic->next = publisher->topics;
    publisher->topics = topic;
    atomic_fetch_add(&publisher->topic_count, 1);
    return topic;
}

static void space_free(struct known_space *space)
{
    free(space->names.memory);
    free(space);
}

/* Forget spaces that are gone. Removals of their blocks may be passed over then, so their topics
 * are published anew. */
static void spaces_purge(struct kvk_publisher *publisher)
{
    const struct kvk_table_entry *entry;
    size_t place = 0;
    while ((entry = kvk_table_next(&publisher->spaces, &place)) != NULL) {
        struct known_space *space = (struct known_space *)entry->value;
        struct kvk_event_space names;
        enum kvk_status status = kvk_events_space_unlocked(publisher->cache, entry->key, &names);
        free(names.memory);
        if (status == KVK_NOT_FOUND) {
            if (space->topic != NULL) {
                space->topic->restart_wanted = true;
            }
            (void)kvk_table_remove(&publisher->spaces, entry->key);
            place--;
            space_free(space);
        }
    }
}

/* NULL: it is gone, and was never published. */
static const struct known_space *space_of(struct kvk_publisher *publisher, uint64_t space_id)
{
    struct known_space *known = (struct known_space *)kvk_table_get(&publisher->spaces, space_id);
    if (known != NULL) {
        return known;
    }
    known = calloc(1, sizeof(*known));
    if (known == NULL) {
        return NULL;
    }
    if (publisher->spaces.count == publisher->spaces.count_max) {
        spaces_purge(publisher);
    }
    if (kvk_events_space_unlocked(publisher->cache, space_id, &known->names) != KVK_OK ||
        kvk_table_put(&publisher->spaces, space_id, known) != KVK_OK) {
        space_free(known);
        return NULL;
    }
    known->topic = topic_of(publisher, &known->names);
    return known;
}

/* ---- Messages ---- */

static void message_forget(struct kvk_publisher *publisher)
{
    struct message *message = publisher->first;
    struct topic *topic = message->topic;
    KVK_ASSERT(topic->first == message); /* both lists are in the order of publishing */
    topic->first = message->next_of_topic;
    topic->last = topic->first == NULL ? NULL : topic->last;
    publisher->first = message->next;
    publisher->last = publisher->first == NULL ? NULL : publisher->last;
    publisher->kept_bytes -= sizeof(*message) + message->size;
    free(message);
}

static void message_keep(struct kvk_publisher *publisher, struct topic *topic, const void *data,
                         size_t size)
{
    struct message *message = publisher->replay == NULL ? NULL : malloc(sizeof(*message) + size);
    if (message == NULL) {
        return; /* who asks for it gets everything anew */
    }
    *message = (struct message){.topic = topic, .number = topic->next_number, .size = size};
    memcpy(message->data, data, size);
    *(topic->last == NULL ? &topic->first : &topic->last->next_of_topic) = message;
    topic->last = message;
    *(publisher->last == NULL ? &publisher->first : &publisher->last->next) = message;
    publisher->last = message;
    publisher->kept_bytes += sizeof(*message) + size;
    while (publisher->kept_bytes > publisher->config->events_replay_bytes) {
        message_forget(publisher);
    }
}

static void number_write(uint8_t bytes[8], uint64_t number)
{
    for (int i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(number >> (56 - 8 * i));
    }
}

/* Pack and send what the topic has gathered. */
static void topic_flush(struct kvk_publisher *publisher, struct topic *topic, bool cleared)
{
    if (topic->count == 0 && !cleared) {
        return;
    }
    bool packed = kvk_publish_pack_batch(&publisher->pack, (double)wall_us() / 1e6, cleared,
                                         topic->events, topic->names, topic->count);
    atomic_fetch_add(&publisher->events, topic->count);
    topic->count = 0;
    if (!packed) {
        topic->restart_wanted = true; /* the number is used: a gap that subscribers see */
        topic->next_number++;
        return;
    }
    const msgpack_sbuffer *buffer = &publisher->pack.buffer;
    uint8_t number[8];
    number_write(number, topic->next_number);
    message_keep(publisher, topic, buffer->data, buffer->size);
    topic->next_number++;
    /* A PUB socket drops rather than waits; what fails here is a gap like any other. */
    bool sent = zmq_send(publisher->publish, topic->name, strlen(topic->name), ZMQ_SNDMORE) >= 0 &&
                zmq_send(publisher->publish, number, sizeof(number), ZMQ_SNDMORE) >= 0 &&
                zmq_send(publisher->publish, buffer->data, buffer->size, 0) >= 0;
    if (sent) {
        atomic_fetch_add(&publisher->messages, 1);
        atomic_fetch_add(&publisher->bytes, buffer->size);
    }
}

static void flush_all(struct kvk_publisher *publisher)
{
    for (struct topic *topic = publisher->topics; topic != NULL; topic = topic->next) {
        topic_flush(publisher, topic, false);
    }
}

/* ---- Events ---- */

/* Sort the batch's events into their topics; `only` (NULL: any) leaves out all others. */
static void gather(struct kvk_publisher *publisher, const struct topic *only)
{
    for (uint32_t i = 0; i < publisher->batch.count; i++) {
        const struct kvk_event *event = &publisher->batch.events[i];
        const struct known_space *space = space_of(publisher, event->space_id);
        if (space == NULL || (only != NULL && space->topic != only)) {
            continue;
        }
        struct topic *topic = space->topic;
        if (topic == NULL) {
            atomic_fetch_add(&publisher->dropped, 1);
        } else if (event->kind == KVK_EVENT_CLEARED) {
            topic->restart_wanted = true; /* other spaces of the topic stay: all of it anew */
        } else if (has_begun(topic)) {    /* else its start, which is yet to come, has it */
            topic->events[topic->count] = event;
            topic->names[topic->count] = &space->names;
            topic->count++;
        }
    }
}

/* Everything of the topic: cleared, then what is there. Events since go on as they come, for they
 * say what holds from then on. */
static void topic_restart(struct kvk_publisher *publisher, struct topic *topic, uint64_t tenant_id)
{
    struct kvk_events_walk walk;
    topic->restarted_ns = kvk_clock_now(kvk_clock_monotonic());
    if (kvk_events_walk_begin_unlocked(publisher->cache, tenant_id, &walk) != KVK_OK) {
        return; /* tried again after a pause */
    }
    topic->restart_wanted = false;
    if (has_begun(topic)) {
        atomic_fetch_add(&publisher->restarts, 1);
    }
    topic_flush(publisher, topic, true);
    while (!atomic_load(&publisher->stop) &&
           kvk_events_walk_next_unlocked(publisher->cache, &walk, &publisher->batch)) {
        gather(publisher, topic);
        topic_flush(publisher, topic, false);
    }
    kvk_events_walk_finish(&walk);
}

static void restart_where_wanted(struct kvk_publisher *publisher)
{
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    const struct kvk_table_entry *entry;
    size_t place = 0;
    while ((entry = kvk_table_next(&publisher->spaces, &place)) != NULL) {
        const struct known_space *space = (const struct known_space *)entry->value;
        struct topic *topic = space->topic;
        if (topic != NULL && topic->restart_wanted &&
            (topic->restarted_ns == 0 || now_ns - topic->restarted_ns >= RESTART_PAUSE_NS)) {
            uint64_t tenant_id = space->names.tenant_id;
            topic_restart(publisher, topic, tenant_id);
            place = 0; /* spaces may have become known by it */
        }
    }
}

/* Where events are not known from the start on: every space is heard of, and every topic is
 * published anew. */
static void publish_all_anew(struct kvk_publisher *publisher)
{
    struct kvk_events_walk walk;
    if (kvk_events_walk_begin_unlocked(publisher->cache, 0, &walk) != KVK_OK) {
        return; /* tried again: nothing was read meanwhile */
    }
    publisher->after = walk.after;
    while (!atomic_load(&publisher->stop) &&
           kvk_events_walk_next_unlocked(publisher->cache, &walk, &publisher->batch)) {
        for (uint32_t i = 0; i < publisher->batch.count; i++) {
            (void)space_of(publisher, publisher->batch.events[i].space_id);
        }
    }
    kvk_events_walk_finish(&walk);
    for (struct topic *topic = publisher->topics; topic != NULL; topic = topic->next) {
        topic->restart_wanted = true;
    }
}

/* All events there are. */
static void publish_new(struct kvk_publisher *publisher)
{
    struct kvk_cache *cache = publisher->cache;
    while (!atomic_load(&publisher->stop) && publisher->after != kvk_events_newest(cache)) {
        if (!kvk_events_read_unlocked(cache, 0, &publisher->after, &publisher->batch)) {
            publish_all_anew(publisher); /* they came faster than they could be published */
            break;
        }
        gather(publisher, NULL);
        flush_all(publisher);
    }
    restart_where_wanted(publisher);
}

/* ---- Replay ---- */

static bool replay_send(struct kvk_publisher *publisher, zmq_msg_t *identity, uint64_t number,
                        const void *data, size_t size)
{
    zmq_msg_t copy;
    uint8_t bytes[8];
    number_write(bytes, number);
    if (zmq_msg_init(&copy) != 0 || zmq_msg_copy(&copy, identity) != 0) {
        return false;
    }
    if (zmq_msg_send(&copy, publisher->replay, ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0) {
        (void)zmq_msg_close(&copy);
        return false; /* it does not read, or is gone */
    }
    return zmq_send(publisher->replay, "", 0, ZMQ_SNDMORE) >= 0 &&
           zmq_send(publisher->replay, bytes, sizeof(bytes), ZMQ_SNDMORE) >= 0 &&
           zmq_send(publisher->replay, data, size, 0) >= 0;
}

static void replay_answer(struct kvk_publisher *publisher, zmq_msg_t *identity, uint64_t first,
                          struct topic *topic)
{
    bool sent = true;
    if (topic != NULL) {
        /* Its first message clears, so from there on nothing before it is missed. */
        uint64_t kept = topic->first == NULL ? topic->next_number : topic->first->number;
        topic->restart_wanted |=
            (first < kept && kept != topic->first_number) || first > topic->next_number;
        for (const struct message *at = topic->first; at != NULL && sent; at = at->next_of_topic) {
            if (at->number >= first) {
                sent = replay_send(publisher, identity, at->number, at->data, at->size);
            }
        }
    }
    if (sent) {
        (void)replay_send(publisher, identity, UINT64_MAX, "", 0);
    }
    atomic_fetch_add(&publisher->replays, 1);
}

/* One request, whatever it is: [identity, empty, number] or [identity, empty, number, topic]. */
static void replay_serve(struct kvk_publisher *publisher)
{
    zmq_msg_t frames[REPLAY_FRAMES_MAX];
    uint32_t count = 0;
    uint32_t received = 0;
    bool more = true;
    while (more) {
        zmq_msg_t frame;
        (void)zmq_msg_init(&frame);
        if (zmq_msg_recv(&frame, publisher->replay, ZMQ_DONTWAIT) < 0) {
            (void)zmq_msg_close(&frame);
            break;
        }
        more = zmq_msg_more(&frame) != 0;
        received++;
        if (count < REPLAY_FRAMES_MAX) {
            frames[count++] = frame;
        } else {
            (void)zmq_msg_close(&frame);
        }
    }
    bool well_formed = (received == 3 || received == 4) && zmq_msg_size(&frames[1]) == 0 &&
                       zmq_msg_size(&frames[2]) == 8;
    if (well_formed) {
        const uint8_t *bytes = zmq_msg_data(&frames[2]);
        uint64_t first = 0;
        for (int i = 0; i < 8; i++) {
            first = first << 8 | bytes[i];
        }
        struct topic *topic = publisher->topics;
        if (received == 4) {
            topic = topic_find(publisher, zmq_msg_data(&frames[3]), zmq_msg_size(&frames[3]));
        } else if (topic != NULL && topic->next != NULL) {
            topic = NULL; /* which of them? */
        }
        replay_answer(publisher, &frames[0], first, topic);
    }
    for (uint32_t i = 0; i < count; i++) {
        (void)zmq_msg_close(&frames[i]);
    }
}

/* ---- The thread ---- */

static void *thread_main(void *argument)
{
    struct kvk_publisher *publisher = argument;
    const long pause_ms = (long)publisher->config->events_batch_ms;
    const struct timespec pause = {.tv_sec = pause_ms / 1000, .tv_nsec = pause_ms % 1000 * 1000000};
    publish_all_anew(publisher); /* what there is already */
    while (!atomic_load(&publisher->stop)) {
        publish_new(publisher);
        if (publisher->replay == NULL) {
            (void)nanosleep(&pause, NULL);
            continue;
        }
        zmq_pollitem_t item = {.socket = publisher->replay, .events = ZMQ_POLLIN};
        if (zmq_poll(&item, 1, pause_ms) > 0) {
            replay_serve(publisher);
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
    while (publisher->first != NULL) {
        message_forget(publisher);
    }
    const struct kvk_table_entry *entry;
    size_t place = 0;
    while (publisher->spaces.entries != NULL &&
           (entry = kvk_table_next(&publisher->spaces, &place)) != NULL) {
        struct known_space *space = (struct known_space *)entry->value;
        space_free(space);
    }
    kvk_table_finish(&publisher->spaces);
    while (publisher->topics != NULL) {
        struct topic *topic = publisher->topics;
        publisher->topics = topic->next;
        free(topic->name);
        free(topic);
    }
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
