/*
 * To forget a tenant, so that it can be shown that nothing of it is left: no instance, sequence or
 * lease, no block in the index, no byte in the memory of a tier or on disk, no record.
 *
 * What its processes may still write cannot be taken from them (a mapping cannot be revoked): as
 * long as one lives, the answer says so and the call is repeated. Everything that it does is done
 * in slices; it may be called again at any time, after a crash too, and goes on from where it was.
 *
 * Locking: takes the cache's lock in slices; may block.
 */
#ifndef KVK_DAEMON_FORGET_H
#define KVK_DAEMON_FORGET_H

#include "daemon/cache.h"

struct kvk_forget_counts {
    uint64_t instances; /* ended by this call */
    uint64_t sequences;
    uint64_t leases;
    uint64_t spaces;                 /* that are gone */
    uint64_t blocks[KVK_TIER_COUNT]; /* whole copies that were there when it began */
    uint64_t bytes[KVK_TIER_COUNT];
    uint64_t writers;       /* live processes that may still write to blocks of it */
    uint64_t left_bytes;    /* bytes in use that wait for them; 0: all is forgotten */
    uint32_t public_spaces; /* of public prefixes, withdrawn, that others hold or map still */
    int32_t writer_pid;     /* of one of them */
};

/*
 * From the first call on the tenant has no more sessions: it must have no credential any more, or
 * be off. KVK_OK: nothing of it is left, in memory or on disk; its place in the tables may be given
 * to another tenant. KVK_UNAVAILABLE (with a time to try again): live processes still map its
 * memory, others hold what it had published, or calls of it are still running; what could go has
 * gone. KVK_WOULD_BLOCK: the caller may
 * not block.
 */
KVK_CHECKED enum kvk_status kvk_tenant_forget(struct kvk_cache *cache,
                                              const struct kvk_caller *caller,
                                              const struct kvk_tenant *tenant,
                                              struct kvk_forget_counts *counts,
                                              struct kvk_error *error);

#endif
