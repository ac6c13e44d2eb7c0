/*
 * What can be found, told as it changes: a block that a look-up can hit is stored in a tier, is
 * removed from one, or all of a space goes at once. For routers, which send a prompt to where its
 * longest prefix lies.
 *
 * The log is a ring of fixed memory: the newest events, numbered from 1. A reader keeps the number
 * of the last event it had; one that fell so far behind that events were overwritten takes a
 * snapshot, block by block in the order of the chains, and goes on with the events since the
 * snapshot began. An event says what is so from then on ("in tier T", "no longer in tier T"), so
 * that whoever applies all of them in order is right, also where the snapshot knew some before.
 *
 * Nothing is logged where the configuration says events.log_bytes = 0, the default: prompts'
 * tokens are in it.
 *
 * Locking: kvk_events_tiers() and kvk_events_cleared() need the cache lock, the readers take it
 * for a bounded time.
 */
#ifndef KVK_DAEMON_EVENTS_H
#define KVK_DAEMON_EVENTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/geometry.h"
#include "base/status.h"
#include "index/block.h"
#include "index/key.h"

struct kvk_cache;
struct kvk_group;
struct kvk_space;
struct kvk_events;

/* Numbers are the API's; only added to. */
enum kvk_event_kind {
    KVK_EVENT_STORED = 1,
    KVK_EVENT_REMOVED = 2,
    KVK_EVENT_CLEARED = 3, /* all of a space; its blocks' removals may follow */
};

struct kvk_event {
    uint64_t number; /* 0 in a snapshot */
    uint64_t tenant_id;
    uint64_t space_id;
    struct kvk_key key;     /* of the block: a hash with the tenant's secret */
    struct kvk_key parent;  /* STORED: of what lies before it; of the root at position 0 */
    const uint32_t *tokens; /* STORED: [token_count], in the batch's memory */
    uint32_t token_count;
    uint32_t position; /* STORED: blocks before it in its chain */
    uint8_t kind;      /* enum kvk_event_kind */
    uint8_t tier;      /* enum kvk_tier; not of CLEARED */
    uint8_t group;
    bool salted;  /* STORED: its chain began with a salt */
    bool content; /* STORED: placeholders among its tokens stand for other content */
};

/* A reader's memory: any number of events that fit. */
#define KVK_EVENT_BATCH_EVENTS 256U
#define KVK_EVENT_BATCH_TOKENS (KVK_BLOCK_TOKENS_MAX * KVK_TIER_COUNT * 2U)

struct kvk_event_batch {
    uint32_t count;
    uint32_t token_count; /* taken of the memory */
    struct kvk_event events[KVK_EVENT_BATCH_EVENTS];
    uint32_t tokens[KVK_EVENT_BATCH_TOKENS];
};

/* `log_bytes` of memory, 0: no log, *events is NULL. KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_events_create(uint64_t log_bytes, struct kvk_events **events);
void kvk_events_destroy(struct kvk_events *events); /* NULL is fine */
uint64_t kvk_events_bytes(const struct kvk_events *events);

/* ---- The engine's side ---- */

/* The tiers in which an indexed block can be found change from one mask to the other. */
void kvk_events_tiers(struct kvk_cache *cache, const struct kvk_group *group, uint32_t block,
                      uint8_t before, uint8_t after);

/* The space was invalidated as a whole. */
void kvk_events_cleared(struct kvk_cache *cache, const struct kvk_space *space);

/* ---- Readers ---- */

struct kvk_events_stats {
    uint64_t logged; /* since the start */
    uint64_t oldest; /* number of the oldest that is still known; logged + 1: none is */
};
void kvk_events_stats_unlocked(struct kvk_cache *cache, struct kvk_events_stats *stats);

/* The number of the newest event. Needs no lock: whether there is something to read. */
uint64_t kvk_events_newest(const struct kvk_cache *cache);

/*
 * Events of a tenant (0: of all) after number *after, into the batch; *after moves on, also over
 * those of others, so that an empty batch with *after below the newest is no end. False: events
 * after it were overwritten, or *after is larger than any: take a snapshot.
 */
KVK_CHECKED bool kvk_events_read_unlocked(struct kvk_cache *cache, uint64_t tenant_id,
                                          uint64_t *after, struct kvk_event_batch *batch);

/* A walk over all that can be found now. */
struct kvk_events_walk {
    uint64_t tenant_id; /* 0: all */
    uint64_t after;     /* go on from here once it is at its end */
    uint8_t *seen;      /* bit per block id; ours */
    uint32_t next_id;
    uint32_t end_id;
};

KVK_CHECKED enum kvk_status kvk_events_walk_begin_unlocked(struct kvk_cache *cache,
                                                           uint64_t tenant_id,
                                                           struct kvk_events_walk *walk);
/* The next blocks, parents first. False: there are no more, and the batch is empty; an empty batch
 * with true is no end. */
bool kvk_events_walk_next_unlocked(struct kvk_cache *cache, struct kvk_events_walk *walk,
                                   struct kvk_event_batch *batch);
void kvk_events_walk_finish(struct kvk_events_walk *walk);

/* What a space is called. Views are valid while `memory` is, malloc'ed: the caller's. */
struct kvk_event_space {
    uint64_t tenant_id;
    const char *tenant;
    const char *model;
    const char *revision;
    const char *adapter; /* its name; "": none */
    uint32_t block_tokens;
    uint32_t group_count;
    uint32_t windows[KVK_GROUP_COUNT_MAX]; /* tokens; 0: full attention */
    void *memory;
};
/* KVK_NOT_FOUND: it is gone. KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_events_space_unlocked(struct kvk_cache *cache, uint64_t space_id,
                                                      struct kvk_event_space *space);

#endif
