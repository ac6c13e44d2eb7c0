/*
 * Instances and sessions: who owns sequences and leases, which processes write, and what happens
 * when one of them goes.
 *
 * An instance is an engine: the process that opened it and the ranks that joined by its token. A
 * session is one such process. A session ends when its stream ends, or its process (a child may
 * hold the stream open): then what it was granted and did not seal is aborted, and where the
 * process that opened the instance ends (or the last one), all that the instance owns is given back
 * at once.
 *
 * A lost connection is not a dead writer: slots that the session's process has mapped for writing
 * and that were granted to it wait in quarantine until the process is known to be gone (its pidfd
 * says so and its side socket is at its end).
 */
#ifndef KVK_DAEMON_SESSION_H
#define KVK_DAEMON_SESSION_H

#include "daemon/cache.h"
#include "daemon/space.h"

#define KVK_TOKEN_SIZE 16

enum kvk_notice_kind {
    KVK_NOTICE_DRAINING = 1,
    KVK_NOTICE_RANK_ENDED = 2,
    KVK_NOTICE_INVALIDATED = 3,
};

struct kvk_hello {
    struct kvk_view tenant;
    struct kvk_view instance_token; /* empty: open an instance; else KVK_TOKEN_SIZE bytes */
    uint32_t rank;
    struct kvk_view name;
    bool local; /* over the unix socket: pid and pidfd are the kernel's word */
    int32_t pid;
    uint32_t uid;
    int pidfd; /* -1: none; borrowed, dup'ed by the session */
    /* Told without the lock; must not call back into the cache. May be NULL. */
    void (*on_notice)(void *context, enum kvk_notice_kind kind, uint64_t value);
    void *context;
};

struct kvk_welcome {
    uint64_t session_id; /* random, 64 bits */
    uint8_t instance_token[KVK_TOKEN_SIZE];
    uint8_t side_token[KVK_TOKEN_SIZE];
};

KVK_CHECKED enum kvk_status kvk_session_begin(struct kvk_cache *cache,
                                              const struct kvk_caller *caller,
                                              const struct kvk_hello *hello,
                                              struct kvk_welcome *welcome, struct kvk_error *error);

/* The stream ended, for whatever reason. Gives back at once what can be given back (in slices,
 * dropping the lock between them). After it on_notice is not called any more. */
void kvk_session_end(struct kvk_cache *cache, uint64_t session_id);

/* Tell every session that the daemon drains. */
void kvk_sessions_drain(struct kvk_cache *cache);

enum kvk_map_kind {
    KVK_MAP_SLOTS = 1,
    KVK_MAP_SCRATCH = 2,
};

struct kvk_map_request {
    uint64_t session_id;
    enum kvk_map_kind kind;
    uint64_t space_id;
    uint32_t group;
    uint32_t rank;
    int tier; /* enum kvk_tier, or -1: the default, kvk_tier_first() */
    bool read_only;
    uint64_t size_bytes;
};
struct kvk_map_reply {
    uint8_t map_token[KVK_TOKEN_SIZE];
    uint64_t size_bytes;
    uint64_t slot_stride;
    uint64_t slot_count;
    uint64_t map_id;
    int tier;      /* of the slots; -1: scratch */
    bool by_slabs; /* the descriptor is that of a table: base/slab_table.h */
};

/* KVK_PRECONDITION: the session has no bound side socket. May block (makes a memfd). */
KVK_CHECKED enum kvk_status kvk_session_map(struct kvk_cache *cache,
                                            const struct kvk_caller *caller,
                                            const struct kvk_map_request *request,
                                            struct kvk_map_reply *reply, struct kvk_error *error);

/* ---- What the side socket asks. Each token works once, within KVK_TOKEN_MS. ---- */

#define KVK_TOKEN_MS 60000

/* Bind a side connection (from `pid` and `uid`, the kernel's word) to the session of the token.
 * `pidfd`: a new descriptor of the session's process, the caller's to close; -1: there is none. */
KVK_CHECKED enum kvk_status kvk_side_bind(struct kvk_cache *cache,
                                          const uint8_t token[KVK_TOKEN_SIZE], int32_t pid,
                                          uint32_t uid, uint64_t *session_id, int *pidfd);
/* Descriptors for a map token of that session: memory, and generations (-1 for scratch). New
 * descriptors, the caller's to close; the read-only one is opened read-only. */
KVK_CHECKED enum kvk_status kvk_side_take(struct kvk_cache *cache, uint64_t session_id,
                                          const uint8_t token[KVK_TOKEN_SIZE], int fds[2]);
/* The side connection is at its end. */
void kvk_side_closed(struct kvk_cache *cache, uint64_t session_id);
/* The process's pidfd became readable: look whether all of it is gone now. */
void kvk_side_process_ended(struct kvk_cache *cache, uint64_t session_id);

/* The address of a place in a scratch mapping of the session, or NULL: out of range, not its own.
 * The mapping stays for as long as the session or until kvk_scratch_release(). */
uint8_t *kvk_scratch_address(struct kvk_cache *cache, uint64_t session_id, uint64_t map_id,
                             uint64_t offset, uint64_t size_bytes, uint64_t *handle);
void kvk_scratch_release(struct kvk_cache *cache, uint64_t handle);

#endif
