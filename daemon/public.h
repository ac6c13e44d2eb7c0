/*
 * Public prefixes: what one tenant publishes on purpose, and the others find too.
 *
 * A publication is a copy. The blocks of a cached prefix are copied into slots of a space of their
 * own, which belongs to the publisher (who pays for them) and is opened by nobody: its memory is
 * sealed against new writable mappings, so that other tenants' workers may map it, and since it was
 * never mapped by anyone before, nobody can write there but the daemon, which is done when the
 * prefix is published. The publisher's own slots, which its workers may still write, are not
 * shared.
 *
 * Nothing becomes public by being equal to something: publications are in no index. A look-up that
 * asks for them (prompt.use_public) compares its tokens and content digests with those of each
 * publication of the very same identity and geometry, in full; no hash decides, and no other
 * tenant's secret is involved. Behind a public prefix the tenant's own blocks hang in its own
 * chain, below hollow namesakes of the public ones that are keyed for it alone.
 *
 * A published block is held by its publication, so that it is never evicted, stays in the host
 * tier, and counts in what the publisher has bound there. Withdrawing ends that hold: no look-up
 * finds it from then on, and its room comes back when the last sequence, lease and mapping has let
 * go. With a durable folder each has a file, from which the next daemon publishes it again
 * (public_store.h).
 */
#ifndef KVK_DAEMON_PUBLIC_H
#define KVK_DAEMON_PUBLIC_H

#include "daemon/cache.h"

struct kvk_publish_request {
    uint64_t space_id;        /* of the publisher, or of anybody where an admin asks */
    struct kvk_prompt prompt; /* its whole blocks; without a salt */
};

struct kvk_publish_reply {
    uint64_t public_id; /* for withdrawing it */
    uint64_t space_id;  /* the public space: for MapMemory, and as tables name it */
    uint64_t tokens;
    uint64_t blocks; /* of all groups */
    uint64_t bytes;
    bool created; /* false: it was public before, by itself or as the beginning of a longer one */
    bool durable; /* it has a file, and is public again after a restart: public_store.h */
};

/*
 * Publish a prefix that is cached in memory, whole. May block, and takes the time of a copy.
 * KVK_PERMISSION: the tenant has no such right. KVK_NOT_FOUND: no such space, or not all of it is
 * cached. KVK_PRECONDITION: some of it is on disk alone. KVK_EXHAUSTED: limits.public_prefixes, or
 * no room for the publisher. KVK_UNSUPPORTED: there is no host tier.
 */
KVK_CHECKED enum kvk_status kvk_public_publish(struct kvk_cache *cache,
                                               const struct kvk_caller *caller,
                                               const struct kvk_publish_request *request,
                                               struct kvk_publish_reply *reply,
                                               struct kvk_error *error);

struct kvk_withdraw_reply {
    uint64_t blocks;      /* that no look-up finds any more */
    uint64_t held_blocks; /* of them: somebody still reads */
};

/* KVK_NOT_FOUND: there is none of this id that the caller may withdraw. */
KVK_CHECKED enum kvk_status kvk_public_withdraw(struct kvk_cache *cache,
                                                const struct kvk_caller *caller, uint64_t public_id,
                                                struct kvk_withdraw_reply *reply,
                                                struct kvk_error *error);

struct kvk_public_row {
    uint64_t public_id;
    uint64_t space_id;  /* the public one */
    uint64_t source_id; /* the space that it was copied from */
    const struct kvk_tenant *tenant;
    uint64_t tokens;
    uint64_t blocks, bytes;
    uint64_t published_s;      /* since 1970 */
    uint64_t hits, hit_tokens; /* for admins alone: they would tell the publisher who asks what */
    bool durable;              /* it outlives the daemon */
    bool visible;              /* false: its tenant or its space is switched off */
};

struct kvk_public_totals {
    uint64_t prefixes, blocks, bytes;
    uint64_t withdrawn_spaces; /* withdrawn, but still held or mapped, */
    uint64_t withdrawn_bytes;  /* and what of the tier they take */
};

/* Those that the caller may withdraw: `*rows` is malloc'ed, [count]. */
KVK_CHECKED enum kvk_status kvk_public_list(struct kvk_cache *cache,
                                            const struct kvk_caller *caller,
                                            struct kvk_public_row **rows, uint32_t *count,
                                            struct kvk_public_totals *totals,
                                            struct kvk_error *error);

/* All there is, for metrics. Takes the lock. */
void kvk_public_totals(struct kvk_cache *cache, struct kvk_public_totals *totals);

#endif
