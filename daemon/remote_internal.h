/*
 * What the files of the remote store share.
 *
 * Threads: askers (each sees one prompt to its end: asking, fetching, putting in) and one sender.
 * They take cache.lock for tables alone, never while the store is spoken to.
 *
 * Locking: cache.lock, but for what belongs to one thread.
 */
#ifndef KVK_DAEMON_REMOTE_INTERNAL_H
#define KVK_DAEMON_REMOTE_INTERNAL_H

#include "daemon/cache_internal.h"
#include "daemon/fleet_nodes.h"
#include "daemon/remote_store.h"

#define KVK_REMOTE_ASKERS 4
#define KVK_REMOTE_RECENT 1024               /* prompts whose answers are remembered */
#define KVK_REMOTE_RATE_UNKNOWN 500000000ULL /* bytes per second, before anything was fetched */
#define KVK_REMOTE_TRIP_UNKNOWN UINT64_C(1000000) /* ns */

/* Of a block id, a bit each. */
#define KVK_REMOTE_LINKED 1U /* its link is known */
#define KVK_REMOTE_QUEUED 2U /* in the ring of those to be sent */
#define KVK_REMOTE_THERE 4U  /* was seen in the store */
#define KVK_REMOTE_SENDING                                                                         \
    8U /* the sender works on it: taken back where the id gets another owner */

/* ---- Prompts ---- */

/* A prompt in the table of recent ones: what look-ups are told. */
struct kvk_remote_recent {
    uint64_t fingerprint[2]; /* of space, salt, tokens and spans; 0, 0: none */
    uint64_t changed_ns;
    uint64_t blocks; /* of the boundary that the store and this daemon have together */
    uint64_t fetch_ns;
    uint64_t recompute_ns;
    uint8_t state; /* enum kvk_remote_use_state */
};

/* A prompt that waits, or is worked on. Its content lies in the ring of bytes. */
struct kvk_remote_ask_entry {
    uint64_t space_id;
    uint64_t generation; /* the space's own, when it was asked for */
    uint32_t recent;     /* its place in the table of recent ones */
    uint32_t span_count;
    uint64_t blocks;                                 /* whole blocks that are asked for */
    uint64_t token_offset, span_offset, salt_offset; /* in the ring */
    uint64_t salt_size;
    uint64_t end; /* in the ring, of what is taken for it */
    bool use_public;
    bool taken; /* an asker has it */
    bool done;
};

/* ---- Spaces ---- */

struct kvk_remote_member {
    struct kvk_fleet_identity identity;
    struct kvk_fleet_member *fleet; /* NULL: not followed any more */
    struct kvk_fleet_chain *chain;  /* the sender's */
    uint64_t space_id;
    struct kvk_remote_space groups[KVK_GROUP_COUNT_MAX]; /* without a generation: to be copied */
};

struct kvk_remote_budget {
    uint64_t left_bytes;
    uint64_t counted_ns;
};

/* ---- The whole ---- */

struct kvk_remote_store {
    struct kvk_cache *cache; /* borrowed */
    struct kvk_remote *client;
    struct kvk_fleet *fleet;
    struct kvk_fleet_directory *directory; /* daemon/fleet_view.c's */
    uint64_t started_s;
    uint8_t key[KVK_FLEET_KEY_SIZE];

    uint8_t *flags;               /* [config.blocks] by id; zero pages, ours */
    struct kvk_fleet_link *links; /* [config.blocks] where LINKED; zero pages, ours */

    struct kvk_remote_recent *recent;  /* [KVK_REMOTE_RECENT] */
    struct kvk_remote_ask_entry *asks; /* [ask_capacity] a ring */
    uint32_t ask_capacity, ask_first, ask_count;
    uint32_t asks_waiting;
    uint8_t *ask_bytes;                    /* [ask_size] a ring, too */
    uint64_t ask_size, ask_head, ask_tail; /* numbers that only grow; the place is modulo size */

    uint32_t *queue; /* [queue_capacity] blocks to be sent: a ring */
    uint32_t queue_capacity, queue_first, queue_count;
    uint32_t tried_candidate; /* at the head of the queue, and what was tried for it */
    uint32_t tried_ancestor;
    uint64_t paused_until_ns; /* the sender is */
    uint8_t *buffer;          /* [config.batch_bytes] the sender's */
    uint64_t buffer_bytes;
    struct kvk_remote_budget *budgets; /* [KVK_TENANT_COUNT_MAX] */

    bool raising; /* somebody invalidates: one at a time */
    bool stopping;
    pthread_t askers[KVK_REMOTE_ASKERS];
    uint32_t asker_count;
    pthread_t sender;
    bool sender_running;
    pthread_cond_t ask_wake;
    pthread_cond_t send_wake;

    struct kvk_lock close_lock; /* over `closing` and submissions; a leaf, without cache.lock */
    bool closing;               /* nobody submits any more */

    struct kvk_remote_stats stats;
};

/* The space's part, if it shares and may now; NULL: it does not. */
struct kvk_remote_member *kvk_remote_member_of(const struct kvk_cache *cache,
                                               const struct kvk_space *space);

/* Batches of one caller, run together. Fills in done, context and deadline. Waits until all are
 * done; what could not be submitted has KVK_REMOTE_UNAVAILABLE everywhere. No lock held. */
void kvk_remote_run(struct kvk_remote_store *store, struct kvk_remote_batch *batches,
                    uint32_t count, uint64_t timeout_ms);

/* Estimate, to bring so many bytes. */
uint64_t kvk_remote_fetch_ns(struct kvk_remote_store *store, uint64_t bytes);

/* How the group's blocks lie in the store: as compact as any tier below may have them. */
static inline const struct kvk_tier_form *kvk_remote_form(const struct kvk_group *group)
{
    bool host = group->forms[KVK_TIER_HOST].compact || !group->forms[KVK_TIER_DISK].compact;
    return &group->forms[host ? KVK_TIER_HOST : KVK_TIER_DISK];
}

/* Does what lies in the tier lie otherwise in the store? */
static inline bool kvk_remote_converts(const struct kvk_group *group, enum kvk_tier tier)
{
    return kvk_remote_form(group)->compact && !group->forms[tier].compact;
}

/* Bytes of a block of the group as it lies in the store. */
static inline uint64_t kvk_remote_stored_bytes(const struct kvk_group *group)
{
    return kvk_remote_form(group)->block_bytes +
           kvk_fleet_witness_bytes(group->space->block_tokens);
}

/* ---- remote_ask.c ---- */

KVK_CHECKED enum kvk_status kvk_remote_asks_create(struct kvk_remote_store *store,
                                                   struct kvk_error *error);
void kvk_remote_asks_destroy(struct kvk_remote_store *store);
void *kvk_remote_asker_main(void *store);

/* ---- remote_fetch.c ---- */

/* What an asker works on: the content as it lies in the ring. */
struct kvk_remote_job {
    struct kvk_remote_store *store;
    uint64_t space_id;
    uint64_t generation;
    uint64_t blocks;
    struct kvk_prompt prompt;
    struct kvk_remote_recent *recent; /* written with the lock */
};

/* See it to its end. The lock is not held. */
void kvk_remote_job_run(struct kvk_remote_job *job);

/* ---- remote_send.c ---- */

void *kvk_remote_sender_main(void *store);

#endif
