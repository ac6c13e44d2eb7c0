/*
 * The store that many daemons share, as the engine uses it (docs/remote.md).
 *
 * It is no tier: no block is held, pinned or counted for what lies there. Beside the engine it is
 * asked for what a prompt goes on with, brings that into host memory as sealed blocks, and is sent
 * what has earned it, all on threads of its own. No look-up, no opening and no sealing ever waits
 * for it; a store that is away, slow, full or wrong makes fewer hits, no more.
 *
 * What may be believed is decided by daemon/fleet.h (names, witnesses and generations that are the
 * same on all nodes) and hosttier/remote_value.h (seals).
 *
 * Locking: cache.lock, unless said otherwise; *_drops give it up in between.
 */
#ifndef KVK_DAEMON_REMOTE_STORE_H
#define KVK_DAEMON_REMOTE_STORE_H

#include "daemon/cache.h"
#include "daemon/fleet.h"
#include "hosttier/remote.h"

struct kvk_prefix;
struct kvk_remote_member;
struct kvk_remote_store;
struct kvk_space;

/* ---- Life, in this order ---- */

/* Nothing where the configuration names no store, or the cache has no threads. Unlocked. */
KVK_CHECKED enum kvk_status kvk_remote_store_create(struct kvk_cache *cache,
                                                    struct kvk_error *error);
/* Its threads. Unlocked. */
KVK_CHECKED enum kvk_status kvk_remote_store_start(struct kvk_cache *cache,
                                                   struct kvk_error *error);
/* Nothing is under way when it returns, and no space shares any more. Unlocked. */
void kvk_remote_store_stop(struct kvk_cache *cache);
void kvk_remote_store_destroy(struct kvk_cache *cache);

/* The space, which can be found by its id from now on, shares. Where it cannot that is told, and it
 * serves all the same. Drops the lock. */
void kvk_remote_space_join_drops(struct kvk_cache *cache, struct kvk_space *space);
/* Its memory goes, and nobody finds it any more. Unlocked. */
void kvk_remote_space_destroy_unlocked(struct kvk_cache *cache, struct kvk_space *space);

/* ---- For look-ups ---- */

enum kvk_remote_use_state {
    KVK_REMOTE_USE_NONE = 0, /* nothing to ask for, or the space does not share */
    KVK_REMOTE_USE_ASKED,    /* the answer is on its way: look up again */
    KVK_REMOTE_USE_FETCHING, /* what is there comes: look up again */
    KVK_REMOTE_USE_DONE,     /* what was there is here, or was */
    KVK_REMOTE_USE_ABSENT,   /* the store knows no more of it than is here */
    KVK_REMOTE_USE_LEFT,     /* left there, since computing is estimated to be quicker */
    KVK_REMOTE_USE_FAILED,   /* it could not be asked, or did not answer in time */
    KVK_REMOTE_USE_BUSY,     /* too many prompts wait already */
};
#define KVK_REMOTE_USE_STATE_COUNT 8

const char *kvk_remote_use_name(enum kvk_remote_use_state state); /* "fetching" */

/* What is known of a prompt in the store. */
struct kvk_remote_use {
    enum kvk_remote_use_state state;
    uint64_t tokens;   /* that the store has behind what is cached here; 0: none, or not known */
    uint64_t fetch_ns; /* estimated when the store had answered, to bring them; 0: not known */
    uint64_t recompute_ns; /* against computing them; 0: not known */
};

/*
 * The prompt's first `token_limit` tokens were looked for and `prefix` was found: the store is to
 * be asked for the rest, unless it just was; what it has comes here where that is estimated to be
 * quicker than to compute it. Says what is known by now. Never blocks, allocates nothing; copies
 * the prompt's tokens where it is asked for.
 */
void kvk_remote_ask(struct kvk_cache *cache, struct kvk_space *space,
                    const struct kvk_prompt *prompt, uint64_t token_limit,
                    const struct kvk_prefix *prefix, struct kvk_remote_use *use);
/* The same, but asks for nothing: what is known from before. For those who explain. */
void kvk_remote_known(struct kvk_cache *cache, const struct kvk_space *space,
                      const struct kvk_prompt *prompt, uint64_t token_limit,
                      const struct kvk_prefix *prefix, struct kvk_remote_use *use);

/* ---- For block_store.c and those who use blocks ---- */

/* The block was used, or `sealed` just now: it is queued to be sent if it is worth it. Cheap. */
void kvk_remote_offer(struct kvk_cache *cache, uint32_t block, bool sealed);
/* The block's id is about to be nobody's. */
void kvk_remote_block_gone(struct kvk_cache *cache, uint32_t block);

/* ---- Invalidation ---- */

/*
 * The spaces are about to be invalidated here: from now on nothing of before counts in the store
 * either. KVK_OK: to be ended by kvk_remote_raise_end_unlocked(). Else nothing was begun.
 */
KVK_CHECKED enum kvk_status kvk_remote_raise_begin_drops(struct kvk_cache *cache,
                                                         struct kvk_space *const *spaces,
                                                         uint32_t count, struct kvk_error *error);
/* Until the store has it, or a while. How many spaces' invalidations it has not got yet: they go
 * there by themselves. */
uint32_t kvk_remote_raise_end_unlocked(struct kvk_cache *cache, struct kvk_space *const *spaces,
                                       uint32_t count, uint64_t deadline_ns);

/* ---- Answers ---- */

struct kvk_remote_stats {
    uint64_t asks;         /* prompts that the store was asked for */
    uint64_t ask_hits;     /* of which it had more than was here */
    uint64_t asks_dropped; /* for want of room in the queue */
    uint64_t asks_failed;  /* the store did not answer */
    uint64_t fetches;      /* begun, since that was estimated to be quicker */
    uint64_t recomputes;   /* not begun, since it was not */
    uint64_t fetched_blocks, fetched_bytes, fetched_tokens;
    uint64_t fetch_failures;   /* blocks that were there when asked for, but did not come */
    uint64_t fetch_unroomed;   /* fetches that ended for want of memory here */
    uint64_t witness_failures; /* right values that were not the block that was asked for */
    uint64_t overtaken;        /* blocks that came too late: invalidated meanwhile */
    uint64_t offered_blocks;   /* queued to be sent */
    uint64_t offers_dropped;   /* for want of room in the queue */
    uint64_t present_blocks;   /* were there already */
    uint64_t sent_blocks, sent_bytes;
    uint64_t send_failures;   /* blocks */
    uint64_t late_blocks;     /* had left memory before their turn */
    uint64_t unworthy_blocks; /* quicker computed than fetched */
    uint64_t unfit_blocks;    /* not finite: without a form that the store takes */
    uint64_t over_budget_blocks;
};

struct kvk_remote_report {
    bool present;
    struct kvk_remote_health health;
    struct kvk_fleet_counters fleet;
    struct kvk_remote_stats stats;
    uint64_t asks_waiting; /* prompts */
    uint64_t send_waiting; /* blocks */
    uint64_t spaces;       /* that share */
    uint64_t spaces_out;   /* of them, those without a generation that counts now */
};
void kvk_remote_report(struct kvk_cache *cache, struct kvk_remote_report *report);

#endif
