/*
 * Leases and transfers: the right to read a pinned prefix until a time, and the right to copy from
 * or to slots that outlasts it.
 *
 * A lease holds its blocks (some copy stays); with copy_pin it pins the very copies. It ends by
 * release, by its time, or with its instance. A transfer pins copies until it is ended, or until
 * its process is gone: memory that a live process may still copy is given to nobody else.
 * Expiry counts on the monotonic clock, and time in which the daemon itself stood still is added
 * to every lease.
 */
#ifndef KVK_DAEMON_LEASE_H
#define KVK_DAEMON_LEASE_H

#include "daemon/cache.h"
#include "daemon/disk_tier.h"

#define KVK_REQUEST_ID_SIZE_MAX 64

struct kvk_request_id {
    uint8_t bytes[KVK_REQUEST_ID_SIZE_MAX];
    uint32_t size; /* 0: not repeatable */
};

struct kvk_pin_request {
    uint64_t session_id;
    uint64_t space_id;
    struct kvk_prompt prompt;
    bool leave_last;
    uint64_t ttl_ms;
    uint64_t min_tokens;
    bool copy_pin;
    struct kvk_request_id request_id;
};

struct kvk_pin_reply {
    uint64_t lease_id; /* 0: nothing cached */
    uint64_t cached_tokens;
    uint64_t ttl_ms;
    struct kvk_disk_estimate disk; /* what of it was on disk alone */
};

KVK_CHECKED enum kvk_status kvk_lease_pin(struct kvk_cache *cache, const struct kvk_caller *caller,
                                          const struct kvk_pin_request *request,
                                          struct kvk_pin_reply *reply, struct kvk_tables *tables,
                                          struct kvk_error *error);

KVK_CHECKED enum kvk_status kvk_lease_renew(struct kvk_cache *cache,
                                            const struct kvk_caller *caller, uint64_t session_id,
                                            uint64_t lease_id, uint64_t ttl_ms,
                                            struct kvk_error *error);

/* All or none. */
KVK_CHECKED enum kvk_status kvk_lease_release(struct kvk_cache *cache,
                                              const struct kvk_caller *caller, uint64_t session_id,
                                              const uint64_t *lease_ids, uint32_t lease_count,
                                              uint64_t *released_blocks, struct kvk_error *error);

struct kvk_transfer_request {
    uint64_t session_id;
    uint64_t sequence_id; /* one of the two */
    uint64_t lease_id;
    bool write;
    uint64_t first_block;
    uint64_t block_count;
};

KVK_CHECKED enum kvk_status kvk_transfer_begin(struct kvk_cache *cache,
                                               const struct kvk_caller *caller,
                                               const struct kvk_transfer_request *request,
                                               uint64_t *ticket, struct kvk_tables *tables,
                                               struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_transfer_end(struct kvk_cache *cache,
                                             const struct kvk_caller *caller, uint64_t session_id,
                                             uint64_t ticket, struct kvk_error *error);

#endif
