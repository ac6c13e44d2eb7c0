/*
 * Public prefixes in files, so that they outlive the daemon: `public/ID` in the durable folder, one
 * file each, with everything that it takes to publish it again byte for byte, whatever has become
 * of the blocks that it was copied from.
 *
 * A file is complete, synced and has its name before its prefix is found by anybody; its name is
 * gone, durably, before the answer that the prefix was withdrawn. What a file says is believed only
 * where all of its checksums match, and where the publisher's space is there at the generation of
 * then: what was invalidated meanwhile does not become public again.
 *
 * A file that cannot be written is told (log, metric, the answer): its prefix ends with the daemon.
 * Without a durable folder all of them do.
 *
 * Locking: as said at each function.
 */
#ifndef KVK_DAEMON_PUBLIC_STORE_H
#define KVK_DAEMON_PUBLIC_STORE_H

#include "daemon/cache_internal.h"

/* What a file says, but for the bytes of blocks. */
struct kvk_public_record {
    uint64_t id;
    uint64_t tenant_id;
    uint64_t source_id;
    uint64_t generation; /* of the source */
    uint64_t published_s;
    uint32_t block_count;
    uint32_t block_tokens;
    uint32_t span_count;
    uint32_t group_count;
    uint32_t counts[KVK_GROUP_COUNT_MAX];        /* blocks with bytes */
    const uint32_t *tokens;                      /* [block_count x block_tokens] */
    const struct kvk_content_span *spans;        /* [span_count] */
    const uint32_t *places[KVK_GROUP_COUNT_MAX]; /* [counts] which of the prefix */
};

/* The file of a prefix whose blocks (ids [counts] per group, held and pinned in the host tier, with
 * checksums) are whole. False: it could not be written, which is told. Without the lock. */
bool kvk_public_store_unlocked(struct kvk_cache *cache, const struct kvk_public_record *record,
                               const struct kvk_space *space,
                               uint32_t *const blocks[KVK_GROUP_COUNT_MAX]);

/* Its name goes, durably. False: it could not; told. Without the lock. */
bool kvk_public_unstore_unlocked(const struct kvk_cache *cache, uint64_t id);

/* A file that is being read. */
struct kvk_public_file {
    int fd;
    struct kvk_public_record record; /* its arrays lie in `memory` */
    uint8_t *memory;
    const uint64_t *sums; /* [blocks of all groups][shard] of that group's shards */
    uint64_t data_offset;
};

/* False: it is not whole, or says what cannot be; nothing is open then. Without the lock. */
bool kvk_public_file_open(const struct kvk_cache *cache, const char *name,
                          struct kvk_public_file *file);
void kvk_public_file_close(struct kvk_public_file *file);
/* `size` bytes at an offset of the data, compared with their checksum. Without the lock. */
bool kvk_public_file_read(const struct kvk_public_file *file, uint64_t offset, void *bytes,
                          uint64_t size, uint64_t sum);

/* public_publish.c: publish again what is in the file. Drops nothing that others need: at the
 * start, before anybody is served. KVK_NOT_FOUND: its space is not there, or of a later generation:
 * the file is needless. Takes the lock. */
KVK_CHECKED enum kvk_status kvk_public_put_back(struct kvk_cache *cache,
                                                const struct kvk_public_file *file,
                                                struct kvk_error *error);

/* All files that there are; those that are damaged or needless go. At the start, when the spaces
 * are known and memory has come back. Without the lock. */
void kvk_public_restore(struct kvk_cache *cache);

#endif
