/*
 * What the publisher's files share: publish.c (sockets, the thread), publish_topics.c (topics, and
 * what is published in them), publish_replay.c (what was missed). All of it is the thread's own but
 * the counters.
 */
#ifndef KVK_DAEMON_PUBLISH_INTERNAL_H
#define KVK_DAEMON_PUBLISH_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/table.h"
#include "daemon/cache_state.h"
#include "daemon/config.h"
#include "daemon/events.h"
#include "daemon/publish.h"
#include "daemon/publish_pack.h"

/* One message, kept so that it can be replayed. In two lists: of all, and of its topic. */
struct kvk_publish_message {
    struct kvk_publish_topic *topic;
    struct kvk_publish_message *next; /* published after it, of any topic */
    struct kvk_publish_message *next_of_topic;
    uint64_t number;
    size_t size;
    uint8_t data[];
};

struct kvk_publish_topic {
    char *name;            /* ours */
    uint64_t first_number; /* of its first message */
    uint64_t next_number;
    struct kvk_publish_message *first, *last; /* those that are kept */
    bool restart_wanted;
    uint64_t restarted_ns;
    struct kvk_publish_topic *next;
    /* The batch at hand: events of kvk_publisher.batch. */
    const struct kvk_event *events[KVK_EVENT_BATCH_EVENTS];
    const struct kvk_event_space *names[KVK_EVENT_BATCH_EVENTS];
    uint32_t count;
};

/* What is known of a space that was heard of. */
struct kvk_publish_space {
    struct kvk_event_space names;
    struct kvk_publish_topic *topic; /* NULL: there are too many topics */
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
    struct kvk_table spaces; /* id -> struct kvk_publish_space, ours */
    struct kvk_publish_topic *topics;
    struct kvk_publish_message *first, *last;
    uint64_t kept_bytes;

    _Atomic uint64_t events, messages, bytes, replays, restarts, topic_count, dropped;
};

/* ---- publish_topics.c ---- */

/* NULL: there is no such topic. */
struct kvk_publish_topic *kvk_publish_topic_find(struct kvk_publisher *publisher, const void *name,
                                                 size_t size);
/* Where events are not known from the start on: every space is heard of, and every topic is
 * published anew. */
void kvk_publish_all_anew(struct kvk_publisher *publisher);
/* All events there are. */
void kvk_publish_new(struct kvk_publisher *publisher);
void kvk_publish_topics_free(struct kvk_publisher *publisher);
void kvk_publish_number_write(uint8_t bytes[8], uint64_t number); /* big-endian */

/* ---- publish_replay.c ---- */

/* One request that has come, whatever it is. */
void kvk_publish_replay_serve(struct kvk_publisher *publisher);

#endif
