/*
 * Events over ZeroMQ, as vLLM publishes its own, so that routers that read those read these.
 *
 * A PUB socket sends messages of three frames: the topic, a sequence number (8 bytes, big-endian),
 * and a batch in MessagePack, [time, [event...], null]. The topic is kv@TENANT@MODEL. Numbers count
 * by topic, so that a subscriber of one misses none, from the time in microseconds at which it
 * began, so that those of the daemon's next life come after them. The events are BlockStored,
 * BlockRemoved and AllBlocksCleared; a block's hash is its chain key (16 bytes), its medium GPU,
 * CPU or DISK.
 *
 * A topic's first message clears, and what is there already follows. A ROUTER socket answers who
 * missed some: request [empty, first number, topic] (the topic may be left out where there is only
 * one), answers [empty, number, batch] and at the end number -1 with an empty batch. Where messages
 * from the first number on are no longer kept, everything is published anew, beginning with
 * AllBlocksCleared.
 *
 * One thread does all of it. ZeroMQ never waits for a slow subscriber: what it does not take is
 * lost to it, and it sees the gap.
 */
#ifndef KVK_DAEMON_PUBLISH_H
#define KVK_DAEMON_PUBLISH_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct kvk_cache;
struct kvk_config;
struct kvk_publisher;

/* May the endpoints be used: well-formed, and not open to others unless events.remote says so.
 * KVK_INVALID names the field. */
KVK_CHECKED enum kvk_status kvk_publish_check(const struct kvk_config *config,
                                              struct kvk_error *error);

/* Bind and begin. *publisher is NULL where events.publish is "". KVK_UNAVAILABLE: an endpoint
 * cannot be bound. The cache and the configuration are borrowed. */
KVK_CHECKED enum kvk_status kvk_publisher_create(struct kvk_cache *cache,
                                                 const struct kvk_config *config,
                                                 struct kvk_publisher **publisher,
                                                 struct kvk_error *error);
void kvk_publisher_destroy(struct kvk_publisher *publisher); /* NULL is fine */

struct kvk_publish_stats {
    uint64_t events;   /* published, */
    uint64_t messages; /* in so many, */
    uint64_t bytes;    /* of so many bytes */
    uint64_t replays;  /* requests answered */
    uint64_t restarts; /* topics published anew since their start */
    uint64_t topics;   /* now */
    uint64_t dropped;  /* events of topics over the limit of topics */
};
void kvk_publisher_stats(const struct kvk_publisher *publisher, struct kvk_publish_stats *stats);

#endif
