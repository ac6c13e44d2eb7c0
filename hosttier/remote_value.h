/*
 * How a block lies in a store that is shared by many daemons: its name, and the value under it.
 *
 * Whoever runs the store may read it, scribble over it, or bring back what was there last week. So
 * a value proves what it is before a byte of it is believed, and its name says nothing: names and
 * checks are HMACs under a key of the tenant, and the payload is sealed under another: encrypted by
 * AES-256-GCM where the space asks for it, else only authenticated, by Poly1305. Anything else than
 * the whole right value is a miss of a kind of its own, never an error and never bytes.
 *
 * A block of more than KVK_REMOTE_PAYLOAD_MAX bytes is cut into equal parts, each with a name and
 * a value, which lie on different nodes.
 *
 *     name   = prefix, hex of HMAC(name key; "name", space, group, part, key) [0..16)
 *     value  = header (144 bytes, little-endian), payload
 *     mark   = HMAC(seal key; "head", the header up to it) [0..8)
 *     tag    = AES-256-GCM(HMAC(seal key; "seal", nonce [0..12)), nonce [12..24), data, payload)
 *           or = Poly1305(HMAC(seal key; "once", nonce [0..24)), data, payload)
 *     data   = the header without checksum and tag
 *
 * The nonce is random and long enough to never repeat, so each value has a key of its own. The tag
 * proves all of the value; the mark proves a header that came alone, and the header's checksum
 * (XXH3) tells one that decayed from one that was forged.
 *
 * Locking: none; a kvk_remote_crypt belongs to one thread, a space is read by many.
 */
#ifndef KVK_HOSTTIER_REMOTE_VALUE_H
#define KVK_HOSTTIER_REMOTE_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "base/status.h"

#define KVK_REMOTE_SECRET_SIZE 32 /* of a tenant; the same in all daemons that share */
#define KVK_REMOTE_KEY_SIZE 16    /* of a block, a space, a shape */
#define KVK_REMOTE_HEADER_SIZE 144
#define KVK_REMOTE_VALUE_MAX (UINT32_C(2) << 20)
#define KVK_REMOTE_PAYLOAD_MAX (KVK_REMOTE_VALUE_MAX - KVK_REMOTE_HEADER_SIZE)
#define KVK_REMOTE_PARTS_MAX 1024U /* so a block has at most 2 GiB */
#define KVK_REMOTE_PREFIX_MAX 31   /* characters before the hash in a name */
#define KVK_REMOTE_NAME_SIZE (KVK_REMOTE_PREFIX_MAX + 2 * KVK_REMOTE_KEY_SIZE + 1)

/* What became of a block. Numbers are only added: counters are kept for each. */
enum kvk_remote_result {
    KVK_REMOTE_PENDING = 0, /* not known yet */
    KVK_REMOTE_HIT,         /* fetched and right, there, or stored */
    /* Misses: the store has nothing that may be used. */
    KVK_REMOTE_ABSENT,     /* no value, or not all its parts */
    KVK_REMOTE_NOT_OURS,   /* a value that never was kvkeep's */
    KVK_REMOTE_VERSION,    /* of a version that this one cannot read */
    KVK_REMOTE_TRUNCATED,  /* shorter or longer than it says */
    KVK_REMOTE_DAMAGED,    /* not what was sealed: half-written, decayed or scribbled over */
    KVK_REMOTE_FOREIGN,    /* its header is not sealed with this tenant's key */
    KVK_REMOTE_OTHER_KEY,  /* a right value, but of another block */
    KVK_REMOTE_GENERATION, /* from before an invalidation, or after one not heard of yet */
    KVK_REMOTE_FORMAT,     /* of another KV format, or encrypted where it must not be, or not */
    KVK_REMOTE_SHAPE,      /* of another geometry */
    KVK_REMOTE_PARENT,     /* hangs below another parent */
    KVK_REMOTE_PART,       /* another part, or cut otherwise */
    /* The store could not be asked, or said no. Also misses to whoever wants bytes. */
    KVK_REMOTE_FULL,        /* it has no memory for a store (maxmemory without eviction) */
    KVK_REMOTE_UNAVAILABLE, /* its node is away, failing over, or lets nobody in */
    KVK_REMOTE_DEADLINE,    /* the time was over first */
    KVK_REMOTE_REFUSED,     /* it answered with an error: a right that is missing, say */
    KVK_REMOTE_SKIPPED,     /* behind a gap of its chain: not asked for */
    KVK_REMOTE_CANCELLED,   /* the client was closed */
    KVK_REMOTE_RESULT_COUNT,
};

const char *kvk_remote_result_name(enum kvk_remote_result result); /* "absent", never NULL */

/* What a space is to the store. All of it is fixed in a kvk_remote_space but the generation. */
struct kvk_remote_space_options {
    const uint8_t *secret; /* [KVK_REMOTE_SECRET_SIZE]; read once */
    const uint8_t *space;  /* [KVK_REMOTE_KEY_SIZE] digest of its identity, alike on all nodes */
    const uint8_t *shape; /* [KVK_REMOTE_KEY_SIZE] digest of its geometry: shards, layout, tokens */
    uint32_t group;       /* layer group */
    uint32_t format;      /* of K and V as they are stored; the caller's numbering */
    uint64_t generation;  /* of the space; what was stored under another is a miss */
    uint64_t block_bytes; /* all shards together; 1 to KVK_REMOTE_PARTS_MAX payloads */
    bool encrypt;         /* else only authenticated */
};

/* The caller's memory; to be wiped by kvk_remote_space_finish(). */
struct kvk_remote_space {
    uint8_t name_key[32];
    uint8_t seal_key[32];
    uint8_t space[KVK_REMOTE_KEY_SIZE];
    uint8_t shape_check[KVK_REMOTE_KEY_SIZE];
    uint64_t generation;
    uint64_t block_bytes;
    uint32_t group;
    uint32_t format;
    uint32_t part_count;
    uint32_t part_bytes; /* of every part but the last */
    bool encrypt;
};

KVK_CHECKED enum kvk_status kvk_remote_space_init(struct kvk_remote_space *space,
                                                  const struct kvk_remote_space_options *options,
                                                  struct kvk_error *error);
void kvk_remote_space_finish(struct kvk_remote_space *space);

/* Which block: its chain key, and its parent's (a root's parent is the root key). */
struct kvk_remote_id {
    uint8_t key[KVK_REMOTE_KEY_SIZE];
    uint8_t parent[KVK_REMOTE_KEY_SIZE];
};

/* Memory of a block: its shards one after another. Together they are block_bytes. */
struct kvk_remote_piece {
    void *memory;
    uint64_t size_bytes;
};

/* What one thread needs of OpenSSL. */
struct kvk_remote_crypt;
KVK_CHECKED enum kvk_status kvk_remote_crypt_create(struct kvk_remote_crypt **crypt,
                                                    struct kvk_error *error);
void kvk_remote_crypt_destroy(struct kvk_remote_crypt *crypt);

/* What the store is asked for, and what must come: a part of a block. */
struct kvk_remote_want {
    const struct kvk_remote_space *space;
    const struct kvk_remote_id *id;
    uint32_t part;
    uint8_t hash[KVK_REMOTE_KEY_SIZE];         /* the name, without prefix, not as hex yet */
    uint8_t key_check[KVK_REMOTE_KEY_SIZE];    /* the other half of the same HMAC */
    uint8_t parent_check[KVK_REMOTE_KEY_SIZE]; /* depends on the block too: chains do not show */
};

void kvk_remote_want_init(struct kvk_remote_want *want, struct kvk_remote_crypt *crypt,
                          const struct kvk_remote_space *space, const struct kvk_remote_id *id,
                          uint32_t part);

/* Bytes of a part's payload; its value is KVK_REMOTE_HEADER_SIZE more. */
uint32_t kvk_remote_payload_bytes(const struct kvk_remote_space *space, uint32_t part);

/* ---- Where a part's bytes lie in the block's memory ---- */

struct kvk_remote_place {
    const struct kvk_remote_piece *pieces; /* [count], borrowed */
    uint32_t count, index;
    uint64_t offset; /* in the piece */
    uint64_t left;   /* of the part */
};

void kvk_remote_place_init(struct kvk_remote_place *place, const struct kvk_remote_want *want,
                           const struct kvk_remote_piece *pieces, uint32_t count);

/* The next run of memory, size_max at most, or false at the part's end. */
bool kvk_remote_place_next(struct kvk_remote_place *place, size_t size_max, uint8_t **memory,
                           size_t *size);

/* ---- Out ---- */

/*
 * Seal a part: write its header, and its payload to `payload`, encrypted where the space asks for
 * it. NULL: the payload is sent from where it lies, which is for spaces that do not encrypt; should
 * it change until it is sent, nobody will believe the value.
 */
void kvk_remote_value_seal(const struct kvk_remote_want *want, struct kvk_remote_crypt *crypt,
                           const struct kvk_remote_piece *pieces, uint32_t piece_count,
                           uint8_t *header, uint8_t *payload);

/* ---- In ---- */

/* Is this header the wanted one's, and proven to be? `size` is of the header's bytes that came:
 * less than all of them is KVK_REMOTE_TRUNCATED or _NOT_OURS. */
enum kvk_remote_result kvk_remote_header_check(const struct kvk_remote_want *want,
                                               struct kvk_remote_crypt *crypt,
                                               const uint8_t *header, size_t size);

/*
 * A value that arrives, in whatever pieces the network makes of it. What of it may be the payload
 * goes straight to its place in the block's memory; there, or on the way there, it is authenticated
 * and decrypted while it is in the cache. Nothing is believed before the end: until then, and where
 * that is no HIT, the part's memory holds anything. A payload whose header is not the wanted one's
 * goes nowhere, and the memory is not touched.
 */
struct kvk_remote_arrival {
    const struct kvk_remote_want *want; /* borrowed; NULL: abandoned */
    struct kvk_remote_crypt *crypt;     /* borrowed, its cipher its own from begin to end */
    struct kvk_remote_place place;
    size_t size, done;             /* of the value */
    enum kvk_remote_result framed; /* HIT: as long as it says of itself */
    enum kvk_remote_result wanted; /* HIT: its header is the wanted one's, the payload is placed */
    uint8_t header[KVK_REMOTE_HEADER_SIZE];
};

void kvk_remote_arrival_begin(struct kvk_remote_arrival *arrival,
                              const struct kvk_remote_want *want, struct kvk_remote_crypt *crypt,
                              const struct kvk_remote_piece *pieces, uint32_t piece_count,
                              size_t size);

/* Some bytes came elsewhere, the value's next ones first: how many of them are its own. */
size_t kvk_remote_arrival_take(struct kvk_remote_arrival *arrival, const uint8_t *bytes,
                               size_t size);

/* Where its next bytes may be put, for kvk_remote_arrival_came() to be told of them: so many runs
 * of `rooms` [room_max], together size_max at most. 0: they must come by way of _take(). */
uint32_t kvk_remote_arrival_rooms(const struct kvk_remote_arrival *arrival, size_t size_max,
                                  struct iovec *rooms, uint32_t room_max);
void kvk_remote_arrival_came(struct kvk_remote_arrival *arrival, size_t size);

/* Nobody waits for it any more: its want and its memory are not touched again. */
void kvk_remote_arrival_abandon(struct kvk_remote_arrival *arrival);

static inline bool kvk_remote_arrival_whole(const struct kvk_remote_arrival *arrival)
{
    return arrival->done == arrival->size;
}

/* What it was, all of it here: KVK_REMOTE_HIT, or a miss; KVK_REMOTE_DEADLINE if abandoned. */
enum kvk_remote_result kvk_remote_arrival_end(struct kvk_remote_arrival *arrival);

#endif
