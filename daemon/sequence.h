/*
 * Sequences: a request's block table in the daemon, from OpenSequence to Close.
 *
 * A running sequence holds its blocks and pins the copies that its tables name. Tokens below
 * `sealed` are written by all ranks; [sealed, length) is granted: the worker may be writing there
 * right now. Full committed sealed blocks are indexed; a block that another indexed first stays
 * private. Tokens past `committed` are drafts.
 *
 * Under a window a sequence lets go of whole blocks that no query after what is settled (sealed and
 * committed) sees, the sinks apart. Those that queries of the tokens settled last still see stay
 * for attention until the next Append, Seal, Commit or SwapOut; Truncate counts them as gone
 * already, so that what it refuses does not depend on when it comes.
 *
 * Calls answer block tables into `tables`, which may be NULL where the caller needs none.
 */
#ifndef KVK_DAEMON_SEQUENCE_H
#define KVK_DAEMON_SEQUENCE_H

#include "daemon/lease.h"

enum kvk_sequence_state {
    KVK_SEQUENCE_RUNNING = 1,
    KVK_SEQUENCE_SWAPPED_OUT = 2,
};

struct kvk_sequence_reply {
    uint64_t sequence_id;
    enum kvk_sequence_state state;
    uint64_t cached_tokens;
    uint64_t sealed_tokens;
    uint64_t committed_tokens;
    uint64_t length;
    uint64_t grant_first;
    uint64_t freed_blocks;
    struct kvk_disk_estimate disk; /* as it was when the sequence was opened */
    uint64_t public_tokens;        /* of cached_tokens, those in public blocks (group 0) */
    uint64_t partial_tokens;       /* of cached_tokens, those copied from a part of a block */
};

struct kvk_open_request {
    uint64_t session_id;
    uint64_t space_id;
    struct kvk_request_id request_id;
    struct kvk_prompt prompt;
    bool leave_last;
    uint64_t growth_tokens;
    int tier; /* enum kvk_tier, or -1: the default */
    bool leave_on_host;
    bool no_lookup;
    bool retry;
};

KVK_CHECKED enum kvk_status kvk_sequence_open(struct kvk_cache *cache,
                                              const struct kvk_caller *caller,
                                              const struct kvk_open_request *request,
                                              struct kvk_sequence_reply *reply,
                                              struct kvk_tables *tables, struct kvk_error *error);

KVK_CHECKED enum kvk_status kvk_sequence_get(struct kvk_cache *cache,
                                             const struct kvk_caller *caller, uint64_t session_id,
                                             uint64_t sequence_id, struct kvk_sequence_reply *reply,
                                             struct kvk_tables *tables, struct kvk_error *error);

struct kvk_append_request {
    uint64_t session_id;
    uint64_t sequence_id;
    uint64_t expected_length;
    const uint32_t *tokens;
    uint64_t token_count;
    bool draft;
    const struct kvk_content_span *spans;
    uint32_t span_count;
};

KVK_CHECKED enum kvk_status kvk_sequence_append(struct kvk_cache *cache,
                                                const struct kvk_caller *caller,
                                                const struct kvk_append_request *request,
                                                struct kvk_sequence_reply *reply,
                                                struct kvk_tables *tables, struct kvk_error *error);

struct kvk_seal_request {
    uint64_t session_id;
    uint64_t sequence_id;
    uint64_t expected_length;
    uint64_t length;
    bool all_ranks;
};
struct kvk_seal_reply {
    uint64_t sealed_tokens;
    uint64_t new_blocks;
    uint64_t known_blocks;
};

KVK_CHECKED enum kvk_status kvk_sequence_seal(struct kvk_cache *cache,
                                              const struct kvk_caller *caller,
                                              const struct kvk_seal_request *request,
                                              struct kvk_seal_reply *reply,
                                              struct kvk_error *error);

/* Commit: accept the first `accept` drafts, drop the others. */
KVK_CHECKED enum kvk_status kvk_sequence_commit(struct kvk_cache *cache,
                                                const struct kvk_caller *caller,
                                                uint64_t session_id, uint64_t sequence_id,
                                                uint64_t expected_length, uint64_t accept,
                                                struct kvk_sequence_reply *reply,
                                                struct kvk_tables *tables, struct kvk_error *error);

KVK_CHECKED enum kvk_status
kvk_sequence_truncate(struct kvk_cache *cache, const struct kvk_caller *caller, uint64_t session_id,
                      uint64_t sequence_id, uint64_t expected_length, uint64_t length,
                      struct kvk_sequence_reply *reply, struct kvk_tables *tables,
                      struct kvk_error *error);

/* `sequence_ids` [count]. All or none. */
KVK_CHECKED enum kvk_status kvk_sequence_fork(struct kvk_cache *cache,
                                              const struct kvk_caller *caller, uint64_t session_id,
                                              uint64_t sequence_id, uint64_t expected_length,
                                              uint32_t count,
                                              const struct kvk_request_id *request_id,
                                              uint64_t *sequence_ids, struct kvk_error *error);

/* SwapOut also gives up the room that was kept for growth: others run now. */
struct kvk_swap_reply {
    struct kvk_sequence_reply sequence;
    uint64_t moved_blocks;
    uint64_t moved_bytes;
    uint64_t copy_ns;
    uint64_t load_ns;
    uint64_t recompute_ns;
};

KVK_CHECKED enum kvk_status
kvk_sequence_swap_out(struct kvk_cache *cache, const struct kvk_caller *caller, uint64_t session_id,
                      uint64_t sequence_id, struct kvk_swap_reply *reply, struct kvk_tables *tables,
                      struct kvk_error *error);
KVK_CHECKED enum kvk_status
kvk_sequence_swap_in(struct kvk_cache *cache, const struct kvk_caller *caller, uint64_t session_id,
                     uint64_t sequence_id, struct kvk_swap_reply *reply, struct kvk_tables *tables,
                     struct kvk_error *error);

struct kvk_close_reply {
    uint64_t freed_blocks;
    uint64_t cached_blocks;
};
/* All or none. */
KVK_CHECKED enum kvk_status kvk_sequence_close(struct kvk_cache *cache,
                                               const struct kvk_caller *caller, uint64_t session_id,
                                               const uint64_t *sequence_ids, uint32_t count,
                                               struct kvk_close_reply *reply,
                                               struct kvk_error *error);

/* ---- Bytes of blocks, for the calls that stream them ---- */

struct kvk_write_piece {
    uint32_t group;
    uint32_t rank;
    uint64_t block;  /* in the sequence's table */
    uint64_t offset; /* bytes from the shard's start */
    const uint8_t *data;
    uint64_t size_bytes;
    uint64_t checksum; /* of data; 0: not given */
};

/* Write into granted tokens only: a piece that touches a sealed token's bytes is refused. Blocks
 * (copies bytes). KVK_DATA_LOSS: the checksum does not match. */
KVK_CHECKED enum kvk_status kvk_sequence_write(struct kvk_cache *cache,
                                               const struct kvk_caller *caller, uint64_t session_id,
                                               uint64_t sequence_id,
                                               const struct kvk_write_piece *piece,
                                               struct kvk_error *error);

struct kvk_read_request {
    uint64_t session_id;
    uint64_t sequence_id; /* one of the two */
    uint64_t lease_id;
    uint32_t group;
    uint32_t rank;
    uint64_t block;
};

/*
 * Begin to read one block's shard: its address, pinned until kvk_read_end() with the same handle.
 * The lease or sequence is checked now, so each block of a long read answers for itself; a whole
 * block's checksum is verified once per begin. `size_bytes` counts the shard.
 */
struct kvk_read_handle {
    uint32_t block_id;
    enum kvk_tier tier;
    uint8_t
        *fetched; /* the bytes of memory that the processor cannot read; NULL: not needed. Ours */
};
KVK_CHECKED enum kvk_status kvk_read_begin(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           const struct kvk_read_request *request,
                                           const uint8_t **data, uint64_t *size_bytes,
                                           struct kvk_read_handle *handle, struct kvk_error *error);
void kvk_read_end(struct kvk_cache *cache, const struct kvk_read_handle *handle);

#endif
