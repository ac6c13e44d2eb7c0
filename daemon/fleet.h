/*
 * What is the same on every node of a fleet: keys under which nodes that share a remote store find
 * each other's blocks, and the generation of a space, which an invalidation on any node raises for
 * all.
 *
 * Within a node a block's key hangs on a secret of the tenant and on a generation that no other
 * node has. In the store it hangs on the fleet's key, the tenant's name, the identity in full,
 * geometry, salt, and on tokens and content of the whole chain: equal on two nodes if and only if
 * all of that is equal. A link of such a chain is a HMAC-SHA-256 over its parent's link, so a name
 * finds the candidate by 128 bits of it. What confirms is the block's witness, stored with its
 * bytes: the other bits' proof, which covers the ancestors and the contents, and the block's tokens
 * themselves, hidden from who reads the store.
 *
 * Locking: the identity and chains belong to their caller; a kvk_fleet is thread safe.
 */
#ifndef KVK_DAEMON_FLEET_H
#define KVK_DAEMON_FLEET_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/geometry.h"
#include "base/status.h"
#include "hosttier/remote.h"

struct kvk_catalogue;

/* ---- The fleet's key, and a tenant's secret ---- */

#define KVK_FLEET_KEY_SIZE 32
#define KVK_FLEET_NAME_MAX 255 /* bytes of a tenant's name */

/* Read a key: 64 hex digits, in a file that nobody but its owner and group can read. KVK_INVALID
 * says what is wrong with it. `field` is the configuration's, for the error. */
KVK_CHECKED enum kvk_status kvk_fleet_key_read(const char *path, const char *field,
                                               uint8_t key[KVK_FLEET_KEY_SIZE],
                                               struct kvk_error *error);

/* The secret of a tenant's values: HKDF-SHA-256 of the key and the tenant's name (NFC). It is no
 * way back to the key, nor to another tenant's. */
void kvk_fleet_secret(const uint8_t key[KVK_FLEET_KEY_SIZE], const char *tenant,
                      uint8_t secret[KVK_REMOTE_SECRET_SIZE]);

/* ---- A space, as all nodes know it ---- */

struct kvk_fleet_identity_options {
    const uint8_t *key;      /* [KVK_FLEET_KEY_SIZE] */
    const char *tenant;      /* its name */
    const uint8_t *identity; /* canonical bytes, without a generation */
    size_t identity_size;
    const struct kvk_geometry *const *geometries; /* [group_count] */
    uint32_t group_count;
    bool constant_hash; /* test hook: all blocks have one name, only witnesses tell them apart */
};

/* The caller's memory; to be wiped by kvk_fleet_identity_finish(). Fixed once it is made: many may
 * read it. */
struct kvk_fleet_identity {
    uint8_t secret[KVK_REMOTE_SECRET_SIZE]; /* of the tenant: for kvk_remote_space_options */
    uint8_t digest[KVK_REMOTE_KEY_SIZE];    /* of all of the options: for its `space` */
    uint8_t chain_key[32];
    uint32_t block_tokens;
    bool constant_hash;
};

/* KVK_UNSUPPORTED: OpenSSL has no HMAC, or memory is short. */
KVK_CHECKED enum kvk_status
kvk_fleet_identity_init(struct kvk_fleet_identity *fleet,
                        const struct kvk_fleet_identity_options *options, struct kvk_error *error);
void kvk_fleet_identity_finish(struct kvk_fleet_identity *fleet);

/* Digest of how a block's bytes lie in the store, for `shape` of kvk_remote_space_options: of the
 * geometry that they are stored in, formats included (where that is another than in memory, of that
 * one), and of the witness before them. */
KVK_CHECKED enum kvk_status kvk_fleet_shape(const struct kvk_geometry *stored,
                                            uint8_t shape[KVK_REMOTE_KEY_SIZE],
                                            struct kvk_error *error);

/* ---- Chains ---- */

/* Bytes of a block's witness: the first piece of its value. Compared after every fetch, before a
 * byte of the block is believed. */
static inline uint32_t kvk_fleet_witness_bytes(uint32_t block_tokens)
{
    return 32 + 4 * block_tokens;
}

/* Where a chain stands: all that its next block needs to know. May be kept and copied. */
struct kvk_fleet_link {
    uint8_t proof[32];
};

/* A walk along chains: one thread's. About a microsecond for each block. */
struct kvk_fleet_chain;

/* KVK_UNSUPPORTED: OpenSSL has no HMAC, or memory is short. The identity is borrowed. */
KVK_CHECKED enum kvk_status kvk_fleet_chain_create(const struct kvk_fleet_identity *fleet,
                                                   struct kvk_fleet_chain **chain,
                                                   struct kvk_error *error);
void kvk_fleet_chain_destroy(struct kvk_fleet_chain *chain); /* NULL is fine */

/* The root of a group's chains under a salt. */
void kvk_fleet_chain_root(struct kvk_fleet_chain *chain, uint32_t group, const uint8_t *salt,
                          size_t salt_size, struct kvk_fleet_link *link);

/* One block on: `link` goes from its parent's to its own. `tokens` are [block_tokens] of the
 * identity, `extra` the canonical bytes of the content spans that touch the block
 * (index/content.h). `witness` [kvk_fleet_witness_bytes()] may be NULL where only the name is
 * wanted. */
void kvk_fleet_chain_next(struct kvk_fleet_chain *chain, struct kvk_fleet_link *link,
                          const uint32_t *tokens, const uint8_t *extra, size_t extra_size,
                          struct kvk_remote_id *id, uint8_t *witness);

/* ---- The generation of a space in the fleet ----
 *
 * It lies in the store as a record of its own: a list that is only added to, of numbers that are
 * sealed with the fleet's key; the highest counts, so that no two writers can undo each other.
 * Numbers come from the clock and chance and are never used twice: a record that the store lost, or
 * that somebody deleted, is an invalidation, never the return of what was invalidated. Who knows a
 * higher number than the record (a store that fell back to an old replica) adds it again.
 *
 * Whoever uses blocks of the store follows three rules:
 *   - values are stored and fetched under the number that kvk_fleet_generation() gave, and none are
 *     while it gives none;
 *   - a block is stored only if, after the number was read, the block was seen to be still current
 *     (its root, under the engine's lock);
 *   - what was fetched is put into the index only if, under the engine's lock, the number is still
 *     the same.
 */

struct kvk_fleet;
struct kvk_fleet_member;

struct kvk_fleet_options {
    const uint8_t *key;           /* [KVK_FLEET_KEY_SIZE]; read once */
    struct kvk_remote *remote;    /* borrowed */
    struct kvk_catalogue *values; /* borrowed: numbers known here outlive the daemon; NULL: not */
    uint64_t generation_ms;       /* what was read counts so long; 100 to 60,000 */
    uint32_t member_count_max;
    /* Somebody else invalidated the space: its blocks here must not be found any more when this
     * returns. On the fleet's thread, no lock held; until it has returned no number is given. */
    void (*invalidated)(void *context, void *user);
    void *context;
};

/* Starts the fleet's thread. */
KVK_CHECKED enum kvk_status kvk_fleet_open(const struct kvk_fleet_options *options,
                                           struct kvk_fleet **fleet, struct kvk_error *error);
void kvk_fleet_close(struct kvk_fleet *fleet); /* NULL is fine; all members have left */

/* Have a space's number followed from now on; the first reading is under way when this returns.
 * `user` is handed to `invalidated`, which may be called before this returns: where the catalogue
 * remembers a lower number than the store has. Does I/O of the catalogue. KVK_EXHAUSTED:
 * member_count_max. */
KVK_CHECKED enum kvk_status kvk_fleet_join(struct kvk_fleet *fleet,
                                           const struct kvk_fleet_identity *identity, void *user,
                                           struct kvk_fleet_member **member,
                                           struct kvk_error *error);
/* Waits for a call of `invalidated` for it that is under way: not with the engine's lock. What was
 * raised here and is not in the store yet goes there all the same, as long as the fleet is open;
 * for at most member_count_max that have left. */
void kvk_fleet_leave(struct kvk_fleet_member *member);

/* The number now; false: none is known that is young enough, so the store must not be used for this
 * space. Never waits: may be called with the engine's lock held. */
KVK_CHECKED bool kvk_fleet_generation(const struct kvk_fleet_member *member, uint64_t *generation);

/*
 * Invalidate for all nodes. Between begin and end no number is given, and the caller makes the
 * space's blocks unfindable on this node. The next number is known here, and in the catalogue, when
 * begin returns: so a crash in between invalidates more than was answered, never less. End waits
 * until the store has it, but not past the deadline.
 *
 * KVK_UNAVAILABLE from end: this node is done, the store was not reached yet; the number goes there
 * by itself when it is back. Begin waits for a call of `invalidated` for the member that is under
 * way: not with anything held that this needs. Calls of one member must not overlap.
 */
KVK_CHECKED enum kvk_status kvk_fleet_raise_begin(struct kvk_fleet_member *member,
                                                  struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_fleet_raise_end(struct kvk_fleet_member *member,
                                                uint64_t deadline_ns, struct kvk_error *error);

struct kvk_fleet_counters {
    uint64_t reads;         /* of records */
    uint64_t read_failures; /* the store did not answer in time */
    uint64_t raises;        /* begun here */
    uint64_t learned;       /* invalidations of others that were carried out here */
    uint64_t begun;         /* records that were not there, and were begun here */
    uint64_t restored;      /* records that had fallen back, and were put right from here */
    uint64_t foreign;       /* entries of records that were not sealed with the fleet's key */
};
void kvk_fleet_counters(const struct kvk_fleet *fleet, struct kvk_fleet_counters *counters);

#endif
