/*
 * Who is in the fleet: each node says now and then that it is there and how it does, in a record
 * of the store that goes by itself when the node does.
 *
 * Records lie in a fixed number of places, so that all can be asked for at once, without a list
 * that somebody would have to keep. A node begins at the place that its id says, and goes on to
 * the next where another lives; two that took one place at the same time notice at their next
 * turn, and one of them goes on. Records are sealed and encrypted with the fleet's key.
 *
 * What a node holds is told by its events (docs/events.md); a record says where they are.
 *
 * Locking: thread safe.
 */
#ifndef KVK_DAEMON_FLEET_NODES_H
#define KVK_DAEMON_FLEET_NODES_H

#include "daemon/fleet.h"

#define KVK_FLEET_PLACES 4096U /* the most nodes that a fleet has; half of it is better */
#define KVK_FLEET_NODE_TEXT_SIZE 256
#define KVK_FLEET_TIERS 3 /* device, host, disk */

struct kvk_fleet_node {
    uint8_t id[16];                         /* lasts where the node has a catalogue */
    char name[KVK_FLEET_NODE_TEXT_SIZE];    /* as its configuration says, or its host's */
    char address[KVK_FLEET_NODE_TEXT_SIZE]; /* where workers reach it; "": not told */
    char events[KVK_FLEET_NODE_TEXT_SIZE];  /* its events' endpoint; "": none */
    char version[32];                       /* of kvkeepd */
    uint64_t started_s, at_s;               /* seconds since 1970, by its own clock */
    uint64_t number;                        /* one more with each announcement of its life */
    uint64_t used_bytes[KVK_FLEET_TIERS], limit_bytes[KVK_FLEET_TIERS];
    uint64_t uses[KVK_FLEET_TIERS]; /* blocks of hits, by the tier of memory they were used in; of
                                       the disk, those that were brought from there */
    uint64_t fetched_blocks;        /* brought from the store; used in host memory then */
    uint64_t lookups, lookup_tokens, hit_tokens;
    uint64_t sent_bytes, fetched_bytes; /* to and from the store */
    uint64_t spaces;                    /* that share */
    uint32_t store_state;               /* enum kvk_remote_state, as this node sees it */
    bool draining;
};

struct kvk_fleet_directory;

struct kvk_fleet_directory_options {
    const uint8_t *key;           /* [KVK_FLEET_KEY_SIZE]; read once */
    struct kvk_remote *remote;    /* borrowed */
    struct kvk_catalogue *values; /* borrowed; the node's id lasts there. NULL: one for each life */
    uint64_t interval_ms;         /* between announcements; a record lives three of them */
    /* All but id, at_s and number. On the directory's thread, no lock held. */
    void (*describe)(void *context, struct kvk_fleet_node *node);
    void *context;
};

/* Starts a thread, which announces at once. */
KVK_CHECKED enum kvk_status
kvk_fleet_directory_open(const struct kvk_fleet_directory_options *options,
                         struct kvk_fleet_directory **directory, struct kvk_error *error);
/* Takes the record back, where the store answers at once. NULL is fine. */
void kvk_fleet_directory_close(struct kvk_fleet_directory *directory);

/* All nodes that are there, by name; free() them. `incomplete`: a part of the store did not answer,
 * so some may be missing. KVK_UNAVAILABLE: nothing answered. Blocks, until the deadline at most. */
KVK_CHECKED enum kvk_status kvk_fleet_directory_list(struct kvk_fleet_directory *directory,
                                                     uint64_t deadline_ns,
                                                     struct kvk_fleet_node **nodes, uint32_t *count,
                                                     bool *incomplete, struct kvk_error *error);

/* This node's own id. */
void kvk_fleet_directory_self(const struct kvk_fleet_directory *directory, uint8_t id[16]);

struct kvk_fleet_directory_counters {
    uint64_t announcements;
    uint64_t announce_failures;
    uint64_t moves; /* to another place, since somebody else lives there */
};
void kvk_fleet_directory_counters(struct kvk_fleet_directory *directory,
                                  struct kvk_fleet_directory_counters *counters);

#endif
