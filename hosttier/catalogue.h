/*
 * The catalogue: what must outlive the daemon and the machine's power. Tenants, credentials, spaces
 * with their generation, and one record per block on disk, in one LMDB environment.
 *
 * Rare writes (tenants, credentials, spaces) are durable when their function returns. Block records
 * are queued without waiting and committed in batches by one writer thread; every commit is fully
 * synced, so that no power cut can leave a torn catalogue. A block record is queued only when the
 * block's bytes are durable (see disk.h); a slot is given to another block only when the removal of
 * its record is committed. So a record never names bytes that are not there.
 *
 * Stored records are versioned, of fixed layout and checked when read: lengths, ranges and a
 * checksum. An older version is migrated, a newer one refused in words; nothing is misread. Names
 * are values, never parts of a path.
 *
 * Locking: thread safe. kvk_catalogue_block_put() and _remove() only queue, and may be called with
 * the engine's lock held; everything else does I/O and may not.
 */
#ifndef KVK_HOSTTIER_CATALOGUE_H
#define KVK_HOSTTIER_CATALOGUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define KVK_CATALOGUE_NAME_SIZE 256 /* NUL included; UTF-8, NFC */
#define KVK_CATALOGUE_TIERS 4       /* device, host, disk, remote */
#define KVK_CATALOGUE_SHARDS_MAX 64

struct kvk_catalogue;

struct kvk_catalogue_options {
    const char *folder;     /* made where missing, mode 0700; one process at a time (locked) */
    uint64_t map_bytes;     /* the most it can grow to; 0: 64 GiB of address space */
    uint32_t queue_max;     /* block operations that may wait; 0: 65,536 */
    uint32_t commit_ms_max; /* a queued operation is committed within about this; 0: 50 */
    bool threads;           /* false: kvk_catalogue_flush() commits, no thread (simulation) */
};

/* KVK_UNAVAILABLE: another process has it. KVK_PRECONDITION: a version that this program does not
 * know. KVK_DATA_LOSS: not a catalogue, or a damaged one; the text says what to do. */
KVK_CHECKED enum kvk_status kvk_catalogue_open(const struct kvk_catalogue_options *options,
                                               struct kvk_catalogue **catalogue,
                                               struct kvk_error *error);
/* Everything that is to be read at a start was read. A process that ends between opening and this
 * call may have died of what it read: the next opening then has another process read it first. */
void kvk_catalogue_trust(struct kvk_catalogue *catalogue);
/* Commits what is queued first. NULL is fine. */
void kvk_catalogue_close(struct kvk_catalogue *catalogue);

/* ---- Tenants and credentials ---- */

/* What a tenant may use. 0 in a limit: none set. */
struct kvk_tenant_quota {
    uint64_t guaranteed_bytes[KVK_CATALOGUE_TIERS]; /* nobody else may take these */
    uint64_t limit_bytes[KVK_CATALOGUE_TIERS];      /* never passed */
    uint32_t sequences;
    uint32_t leases;
    uint32_t requests_per_second;
    uint32_t request_burst;
    uint8_t over_quota;            /* 0: evict the tenant's own idle blocks; 1: refuse */
    uint64_t idle_ms;              /* after so long unused its blocks go; 0: never */
    uint64_t metadata_limit_bytes; /* kept for it beside bytes of blocks; a multiple of
                                      KVK_METADATA_UNIT; 0: the daemon's own limit */
};
#define KVK_METADATA_UNIT (UINT64_C(1) << 20)

enum kvk_tenant_mode {
    KVK_TENANT_ON = 0,
    KVK_TENANT_SHADOW = 1, /* look-ups are counted and answered as misses; nothing is stored */
    KVK_TENANT_OFF = 2,    /* kill switch: every call is refused */
};

struct kvk_tenant_record {
    uint64_t id; /* never given twice; 0: let put choose */
    char name[KVK_CATALOGUE_NAME_SIZE];
    uint8_t secret[32]; /* keys its chain hashes; random */
    uint64_t created_s; /* seconds since 1970 */
    uint8_t mode;       /* enum kvk_tenant_mode */
    bool may_publish;   /* public prefixes */
    bool forgetting;    /* being deleted: finished at the next start if a crash came between */
    struct kvk_tenant_quota quota;
};

/* Create or change, by name. KVK_EXHAUSTED: the map is full. Fills record->id. */
KVK_CHECKED enum kvk_status kvk_catalogue_put_tenant(struct kvk_catalogue *catalogue,
                                                     struct kvk_tenant_record *record,
                                                     struct kvk_error *error);
/* Its spaces and block records with it, in batches: may take long. KVK_NOT_FOUND. */
KVK_CHECKED enum kvk_status kvk_catalogue_remove_tenant(struct kvk_catalogue *catalogue,
                                                        uint64_t tenant_id,
                                                        struct kvk_error *error);
KVK_CHECKED enum kvk_status
kvk_catalogue_tenants(struct kvk_catalogue *catalogue,
                      void (*visit)(void *context, const struct kvk_tenant_record *record),
                      void *context, struct kvk_error *error);

#define KVK_CREDENTIAL_TOKENS_MAX 4
#define KVK_CREDENTIAL_TENANTS_MAX 200

struct kvk_credential_record {
    char name[KVK_CATALOGUE_NAME_SIZE];
    uint64_t tenant_ids[KVK_CREDENTIAL_TENANTS_MAX]; /* [tenant_count]; the first is the default */
    uint32_t tenant_count;
    bool admin;
    struct {
        uint8_t digest[32]; /* SHA-256 of the token: the token itself is nowhere */
        uint64_t created_s;
        uint64_t expires_s; /* 0: never. Rotation: old and new overlap until the old expires */
    } tokens[KVK_CREDENTIAL_TOKENS_MAX]; /* [token_count] */
    uint32_t token_count;
    char certificate_subject[KVK_CATALOGUE_NAME_SIZE]; /* mutual TLS: common name or SAN; "" */
    uint32_t uids[16];                                 /* on the unix socket */
    uint32_t uid_count;
};

KVK_CHECKED enum kvk_status kvk_catalogue_put_credential(struct kvk_catalogue *catalogue,
                                                         const struct kvk_credential_record *record,
                                                         struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_catalogue_remove_credential(struct kvk_catalogue *catalogue,
                                                            const char *name,
                                                            struct kvk_error *error);
KVK_CHECKED enum kvk_status
kvk_catalogue_credentials(struct kvk_catalogue *catalogue,
                          void (*visit)(void *context, const struct kvk_credential_record *record),
                          void *context, struct kvk_error *error);

/* ---- Spaces ---- */

/* Everything that opening it again needs. Byte strings are borrowed, both ways. */
struct kvk_space_record {
    uint64_t id;
    uint64_t tenant_id;
    uint64_t generation;
    const uint8_t *identity; /* canonical bytes, in full */
    size_t identity_size;
    const uint8_t *shape; /* the engine's own versioned bytes: groups' geometry, prefill cost… */
    size_t shape_size;
    uint8_t mode; /* enum kvk_tenant_mode: the stricter of it and the tenant's holds */
};

KVK_CHECKED enum kvk_status kvk_catalogue_put_space(struct kvk_catalogue *catalogue,
                                                    const struct kvk_space_record *record,
                                                    struct kvk_error *error);
/* Durable at once, so that what was invalidated stays so after any crash: all generations of one
 * call, together or not at all. One that is not higher than what is recorded, or whose space has no
 * record (so that nothing of it can come back), changes nothing. */
struct kvk_space_generation {
    uint64_t space_id;
    uint64_t generation;
};
KVK_CHECKED enum kvk_status
kvk_catalogue_set_generations(struct kvk_catalogue *catalogue,
                              const struct kvk_space_generation *generations, size_t count,
                              struct kvk_error *error);
/* Its block records go with it, in batches: may take long. What is queued is committed first; block
 * records of a space that has no record are removed when the catalogue is opened. KVK_NOT_FOUND. */
KVK_CHECKED enum kvk_status kvk_catalogue_remove_space(struct kvk_catalogue *catalogue,
                                                       uint64_t space_id, struct kvk_error *error);
KVK_CHECKED enum kvk_status
kvk_catalogue_spaces(struct kvk_catalogue *catalogue,
                     void (*visit)(void *context, const struct kvk_space_record *record),
                     void *context, struct kvk_error *error);

/* ---- Blocks on disk ---- */

struct kvk_catalogue_key {
    uint8_t bytes[16];
};

/* One per slot of a group's file: putting one over another replaces it. Pointers are borrowed, both
 * ways. */
struct kvk_disk_block_record {
    uint64_t space_id;
    uint32_t group;
    uint32_t slot;
    uint64_t generation; /* of the space when it was written */
    struct kvk_catalogue_key key;
    struct kvk_catalogue_key parent; /* a block's, or the root's at position 0 */
    uint32_t position;               /* blocks before it in its chain */
    uint32_t use_count;
    uint64_t used_s; /* last use, seconds since 1970 */
    float cost;
    const uint32_t *tokens; /* [token_count] */
    uint32_t token_count;
    const uint8_t *extra; /* canonical content bytes */
    size_t extra_size;
    const uint8_t *salt; /* of its chain's root; only where position is 0 */
    size_t salt_size;
    const uint64_t *checksums; /* [shard_count] */
    uint32_t shard_count;
};

/* Queue; copies everything. `ticket` (may be NULL) rises by one per operation: it is durable when
 * kvk_catalogue_committed() has reached it. KVK_EXHAUSTED: the queue is full, or commits fail. */
KVK_CHECKED enum kvk_status kvk_catalogue_block_put(struct kvk_catalogue *catalogue,
                                                    const struct kvk_disk_block_record *record,
                                                    uint64_t *ticket);
KVK_CHECKED enum kvk_status kvk_catalogue_block_remove(struct kvk_catalogue *catalogue,
                                                       uint64_t space_id, uint32_t group,
                                                       uint32_t slot, uint64_t *ticket);
uint64_t kvk_catalogue_committed(const struct kvk_catalogue *catalogue);
/* Commit all that was queued before, now, and wait. */
KVK_CHECKED enum kvk_status kvk_catalogue_flush(struct kvk_catalogue *catalogue,
                                                struct kvk_error *error);
/* Told after each commit, on the writer thread, without any lock; at most one listener. */
void kvk_catalogue_listen(struct kvk_catalogue *catalogue, void (*committed)(void *context),
                          void *context);

/* All block records of a space, in the order of (group, slot). A damaged one is skipped and
 * counted. visit returns false to stop. */
KVK_CHECKED enum kvk_status
kvk_catalogue_blocks(struct kvk_catalogue *catalogue, uint64_t space_id,
                     bool (*visit)(void *context, const struct kvk_disk_block_record *record),
                     void *context, struct kvk_error *error);

/* ---- Anything else that lasts: small values by name (usage counters, the daemon's id…) ---- */

KVK_CHECKED enum kvk_status kvk_catalogue_put_value(struct kvk_catalogue *catalogue,
                                                    const char *name, const void *value,
                                                    size_t size, struct kvk_error *error);
/* KVK_NOT_FOUND: none. `size` in: room, out: bytes. */
KVK_CHECKED enum kvk_status kvk_catalogue_get_value(struct kvk_catalogue *catalogue,
                                                    const char *name, void *value, size_t *size,
                                                    struct kvk_error *error);

struct kvk_catalogue_stats {
    uint64_t tenants, credentials, spaces, blocks;
    uint64_t used_bytes, limit_bytes; /* of the map */
    uint64_t queued;                  /* waiting now */
    uint64_t commits, committed_operations, commit_failures;
    uint64_t commit_ns;       /* of the last one */
    uint64_t damaged_records; /* skipped when read */
    bool failing;             /* the last commit failed: it is tried again; text in the log */
};
void kvk_catalogue_stats(struct kvk_catalogue *catalogue, struct kvk_catalogue_stats *stats);

#endif
