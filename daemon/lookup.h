/*
 * Finding a prefix: which boundary is a hit, in all groups at once, and where it lies.
 *
 * A boundary after b blocks is a hit where every block that a query from there can see has its
 * bytes in every group: all of them under full attention, the window and the sinks under a window.
 */
#ifndef KVK_DAEMON_LOOKUP_H
#define KVK_DAEMON_LOOKUP_H

#include "daemon/cache.h"
#include "daemon/remote_store.h"

struct kvk_lookup_request {
    uint64_t space_id;
    struct kvk_prompt prompt;
    bool leave_last;
    bool retry;
    bool read_ahead; /* what is on disk alone is to come to memory, where there is room for it */
};

struct kvk_lookup_reply {
    uint64_t cached_tokens;
    uint64_t device_tokens;
    uint64_t host_tokens;
    uint64_t disk_tokens;          /* on disk alone: device + host + disk = cached */
    uint64_t restore_ns;           /* estimated, to read those; 0: there are none */
    uint64_t restore_recompute_ns; /* against computing from the first of them on; 0: not known */
    uint64_t load_ns;
    uint64_t recompute_ns;
    uint64_t hashed_bytes;        /* by this walk: grows linearly with the prompt */
    uint64_t public_tokens;       /* of the cached, in public blocks (group 0) */
    uint64_t partial_tokens;      /* of the cached, in a part of a block */
    struct kvk_remote_use remote; /* what is known of the rest in the remote store */
};

/* Changes nothing but counters. Never blocks, allocates nothing. */
KVK_CHECKED enum kvk_status kvk_lookup(struct kvk_cache *cache, const struct kvk_caller *caller,
                                       const struct kvk_lookup_request *request,
                                       struct kvk_lookup_reply *reply, struct kvk_error *error);

/* Count a use of every known block of the prompt. */
KVK_CHECKED enum kvk_status kvk_touch(struct kvk_cache *cache, const struct kvk_caller *caller,
                                      uint64_t space_id, const struct kvk_prompt *prompt,
                                      uint64_t *touched_tokens, struct kvk_error *error);

#endif
