/*
 * Topics and what is published in them: events sorted by tenant and model, packed, sent, and kept
 * for replay as long as there is room.
 */
#include "daemon/publish_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <zmq.h>

#include "base/assert.h"
#include "base/clock.h"

#define TOPICS_MAX 1024U
#define TOPIC_PREFIX "kv@"
#define RESTART_PAUSE_NS (2 * KVK_NS_PER_SECOND)

/* ---- Topics ---- */

static uint64_t wall_us(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME, &now);
    return (uint64_t)now.tv_sec * 1000000 + (uint64_t)now.tv_nsec / 1000;
}

static bool has_begun(const struct kvk_publish_topic *topic)
{
    return topic->next_number != topic->first_number;
}

struct kvk_publish_topic *kvk_publish_topic_find(struct kvk_publisher *publisher, const void *name,
                                                 size_t size)
{
    for (struct kvk_publish_topic *topic = publisher->topics; topic != NULL; topic = topic->next) {
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
static struct kvk_publish_topic *topic_of(struct kvk_publisher *publisher,
                                          const struct kvk_event_space *names)
{
    char *name = topic_name(names);
    if (name == NULL) {
        return NULL;
    }
    struct kvk_publish_topic *topic = kvk_publish_topic_find(publisher, name, strlen(name));
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

static void space_free(struct kvk_publish_space *space)
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
        struct kvk_publish_space *space = (struct kvk_publish_space *)entry->value;
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
static const struct kvk_publish_space *space_of(struct kvk_publisher *publisher, uint64_t space_id)
{
    struct kvk_publish_space *known =
        (struct kvk_publish_space *)kvk_table_get(&publisher->spaces, space_id);
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
    struct kvk_publish_message *message = publisher->first;
    struct kvk_publish_topic *topic = message->topic;
    KVK_ASSERT(topic->first == message); /* both lists are in the order of publishing */
    topic->first = message->next_of_topic;
    topic->last = topic->first == NULL ? NULL : topic->last;
    publisher->first = message->next;
    publisher->last = publisher->first == NULL ? NULL : publisher->last;
    publisher->kept_bytes -= sizeof(*message) + message->size;
    free(message);
}

static void message_keep(struct kvk_publisher *publisher, struct kvk_publish_topic *topic,
                         const void *data, size_t size)
{
    struct kvk_publish_message *message =
        publisher->replay == NULL ? NULL : malloc(sizeof(*message) + size);
    if (message == NULL) {
        return; /* who asks for it gets everything anew */
    }
    *message =
        (struct kvk_publish_message){.topic = topic, .number = topic->next_number, .size = size};
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

void kvk_publish_number_write(uint8_t bytes[8], uint64_t number)
{
    for (int i = 0; i < 8; i++) {
        bytes[i] = (uint8_t)(number >> (56 - 8 * i));
    }
}

/* Pack and send what the topic has gathered. */
static void topic_flush(struct kvk_publisher *publisher, struct kvk_publish_topic *topic,
                        bool cleared)
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
    kvk_publish_number_write(number, topic->next_number);
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
    for (struct kvk_publish_topic *topic = publisher->topics; topic != NULL; topic = topic->next) {
        topic_flush(publisher, topic, false);
    }
}

/* ---- Events ---- */

/* Sort the batch's events into their topics; `only` (NULL: any) leaves out all others. */
static void gather(struct kvk_publisher *publisher, const struct kvk_publish_topic *only)
{
    for (uint32_t i = 0; i < publisher->batch.count; i++) {
        const struct kvk_event *event = &publisher->batch.events[i];
        const struct kvk_publish_space *space = space_of(publisher, event->space_id);
        if (space == NULL || (only != NULL && space->topic != only)) {
            continue;
        }
        struct kvk_publish_topic *topic = space->topic;
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
static void topic_restart(struct kvk_publisher *publisher, struct kvk_publish_topic *topic,
                          uint64_t tenant_id)
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
        const struct kvk_publish_space *space = (const struct kvk_publish_space *)entry->value;
        struct kvk_publish_topic *topic = space->topic;
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
void kvk_publish_all_anew(struct kvk_publisher *publisher)
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
    for (struct kvk_publish_topic *topic = publisher->topics; topic != NULL; topic = topic->next) {
        topic->restart_wanted = true;
    }
}

/* All events there are. */
void kvk_publish_new(struct kvk_publisher *publisher)
{
    struct kvk_cache *cache = publisher->cache;
    while (!atomic_load(&publisher->stop) && publisher->after != kvk_events_newest(cache)) {
        if (!kvk_events_read_unlocked(cache, 0, &publisher->after, &publisher->batch)) {
            kvk_publish_all_anew(publisher); /* they came faster than they could be published */
            break;
        }
        gather(publisher, NULL);
        flush_all(publisher);
    }
    restart_where_wanted(publisher);
}

/* ---- The end ---- */

void kvk_publish_topics_free(struct kvk_publisher *publisher)
{
    while (publisher->first != NULL) {
        message_forget(publisher);
    }
    const struct kvk_table_entry *entry;
    size_t place = 0;
    while (publisher->spaces.entries != NULL &&
           (entry = kvk_table_next(&publisher->spaces, &place)) != NULL) {
        struct kvk_publish_space *space = (struct kvk_publish_space *)entry->value;
        space_free(space);
    }
    kvk_table_finish(&publisher->spaces);
    while (publisher->topics != NULL) {
        struct kvk_publish_topic *topic = publisher->topics;
        publisher->topics = topic->next;
        free(topic->name);
        free(topic);
    }
}
