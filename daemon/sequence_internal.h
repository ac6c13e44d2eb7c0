/*
 * What the files of sequences share: memory, references, the order of a change.
 *
 * How a change runs, so that it is all or nothing and nothing is lost where the lock is dropped:
 * find and check; kvk_sequence_busy_begin(); do what may fail, giving up the lock as needed;
 * kvk_sequence_busy_end_drops(), which says whether the sequence is still there; then apply, which
 * cannot fail. What is long is applied in slices before kvk_sequence_applied_end_drops(). While it
 * is busy only its own call changes a sequence.
 *
 * Locking: everything here needs cache.lock, unless it says otherwise.
 */
#ifndef KVK_DAEMON_SEQUENCE_INTERNAL_H
#define KVK_DAEMON_SEQUENCE_INTERNAL_H

#include "daemon/cache_internal.h"

enum kvk_change_kind {
    KVK_CHANGE_NONE = 0,
    KVK_CHANGE_APPEND,
    KVK_CHANGE_COMMIT,
    KVK_CHANGE_TRUNCATE,
};

/* Up to so many bytes are hashed or compared with the lock held: a few microseconds. */
#define KVK_INLINE_BYTES_MAX (UINT64_C(64) << 10)

/* ---- sequence.c ---- */

struct kvk_sequence_size {
    uint32_t group_count;
    uint64_t tokens;
    uint64_t blocks; /* per group */
    uint32_t spans;
    size_t salt_size;
    uint32_t hints;
};

/* Memory for a sequence; its numbers are all 0, its roots none. With or without the lock. */
KVK_CHECKED enum kvk_status kvk_sequence_create(const struct kvk_sequence_size *size,
                                                struct kvk_sequence **sequence,
                                                struct kvk_error *error);
void kvk_sequence_free(struct kvk_sequence *sequence); /* the memory alone */
/* Room for more, amortised, and for so many content bytes. KVK_EXHAUSTED: the tenant's limit too.
 */
KVK_CHECKED enum kvk_status kvk_sequence_grow(struct kvk_cache *cache,
                                              struct kvk_sequence *sequence, uint64_t tokens,
                                              uint64_t blocks, uint32_t spans, uint64_t extra_bytes,
                                              struct kvk_error *error);

/* As its tenant is charged for it: metadata.h. */
uint64_t kvk_sequence_metadata(const struct kvk_sequence *sequence);
/* So many of the content bytes that room is kept for are a block's now. */
void kvk_sequence_extra_use(struct kvk_cache *cache, struct kvk_sequence *sequence, uint64_t bytes);

/* Give it an id and its place in the instance. KVK_EXHAUSTED: config.sequences. */
KVK_CHECKED enum kvk_status kvk_sequence_link(struct kvk_cache *cache,
                                              struct kvk_sequence *sequence,
                                              struct kvk_instance *instance,
                                              struct kvk_space *space, struct kvk_error *error);
/* Everything that it has goes back, in slices, and it is freed; nobody finds it meanwhile. `reply`
 * (may be NULL) counts the blocks. */
void kvk_sequence_end_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                            struct kvk_close_reply *reply);
/* Nobody finds it from here on, and the caller ends it. */
void kvk_sequence_doom(struct kvk_sequence *sequence);

/* Take the lock and find, with room in `tables` (may be NULL) for `new_tokens` behind the sequence
 * or, with KVK_WHOLE_TABLE, for all its blocks. The lock is held afterwards in any case. */
#define KVK_WHOLE_TABLE UINT64_MAX
KVK_CHECKED enum kvk_status
kvk_sequence_lock(struct kvk_cache *cache, const struct kvk_caller *caller, uint64_t session_id,
                  uint64_t sequence_id, uint64_t new_tokens, struct kvk_tables *tables,
                  struct kvk_session **session, struct kvk_sequence **sequence,
                  struct kvk_error *error);
/* Refuse what a swapped-out sequence cannot do, and what would disturb a write under way. */
KVK_CHECKED enum kvk_status kvk_sequence_check_running(const struct kvk_sequence *sequence,
                                                       struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_sequence_check_unwritten(const struct kvk_sequence *sequence,
                                                         struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_sequence_check_length(const struct kvk_sequence *sequence,
                                                      uint64_t expected_length,
                                                      struct kvk_error *error);
/* An engine's refusal, for the journal; passes `status` through. */
enum kvk_status kvk_sequence_refused(struct kvk_cache *cache, const struct kvk_caller *caller,
                                     const struct kvk_sequence *sequence, enum kvk_status status,
                                     const struct kvk_error *error);

void kvk_sequence_busy_begin(struct kvk_sequence *sequence);
/* KVK_ABORTED: the sequence was abandoned meanwhile and is gone now, or a rank ended and it was cut
 * back to what is sealed: then the change is not to be applied. Drops the lock then alone. */
KVK_CHECKED enum kvk_status kvk_sequence_busy_end_drops(struct kvk_cache *cache,
                                                        struct kvk_sequence *sequence,
                                                        struct kvk_error *error);
/* The same behind a change that is applied already: a rank's end only cuts the sequence back. */
KVK_CHECKED enum kvk_status kvk_sequence_applied_end_drops(struct kvk_cache *cache,
                                                           struct kvk_sequence *sequence,
                                                           struct kvk_error *error);
/* Will it be? Then what the call took for it has to go back first. */
static inline bool kvk_sequence_is_lost(const struct kvk_sequence *sequence)
{
    return sequence->doomed || (sequence->cut_wanted && sequence->sealed < sequence->length);
}

static inline uint64_t kvk_sequence_settled(const struct kvk_sequence *sequence)
{
    return sequence->sealed < sequence->committed ? sequence->sealed : sequence->committed;
}

static inline uint32_t kvk_blocks_for(const struct kvk_space *space, uint64_t tokens)
{
    return (uint32_t)((tokens + space->block_tokens - 1) / space->block_tokens);
}

/* Hold a whole block that is at `index` of the group's table, and pin it where it lies. */
void kvk_sequence_take(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                       uint32_t index, uint32_t block, bool pin);
void kvk_sequence_drop_pin(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                           uint32_t index);
/* Pin and hold go back; the table has no block there any more. */
void kvk_sequence_drop(struct kvk_cache *cache, struct kvk_sequence *sequence, uint32_t group,
                       uint32_t index);
/* A reserved block of ours, held and pinned, goes back unused. */
void kvk_block_give_back(struct kvk_cache *cache, uint32_t block);
/* A reserved block may be written from now on. */
void kvk_block_grant(struct kvk_cache *cache, uint32_t block);

/* Keep so many bytes of room for its growth. */
void kvk_sequence_keep_growth(struct kvk_cache *cache, struct kvk_sequence *sequence,
                              uint64_t bytes);
/* Bytes for `growth_tokens` behind `length`; a window needs no more than itself. */
uint64_t kvk_sequence_growth_bytes(const struct kvk_space *space, uint64_t length,
                                   uint64_t growth_tokens);

/* Let the cursor stand elsewhere, and the anchor with it. */
void kvk_sequence_move_cursor(struct kvk_cache *cache, struct kvk_sequence_group *group,
                              struct kvk_cursor cursor);
void kvk_sequence_detach(struct kvk_cache *cache, struct kvk_sequence_group *group);

/* Let go of whole blocks that no query from `position` on sees. */
void kvk_sequence_slide(struct kvk_cache *cache, struct kvk_sequence *sequence, uint64_t position);

void kvk_sequence_answer(const struct kvk_sequence *sequence, struct kvk_sequence_reply *reply);
/* Blocks from `first_block` on of every group. */
void kvk_sequence_tables(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                         const uint32_t first_block[KVK_GROUP_COUNT_MAX],
                         struct kvk_tables *tables);
void kvk_sequence_tables_all(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                             struct kvk_tables *tables);

bool kvk_request_id_equal(const struct kvk_request_id *a, const struct kvk_request_id *b);

/* Entries that an answer's tables are given room for before it is known how many it needs. */
#define KVK_TABLE_ENTRIES_AHEAD 256
/* One part more; nothing for no blocks. */
void kvk_tables_add(const struct kvk_cache *cache, struct kvk_tables *tables, uint32_t group,
                    uint64_t first_block, const uint32_t *blocks, uint32_t count);

/* ---- sequence_seal.c ---- */

/* KVK_INVALID: block `number` of its sequence, that is about to be sealed and that the sequence
 * holds where it is, has a scale that is negative or not finite. Drops the lock unless told not to.
 */
KVK_CHECKED enum kvk_status kvk_block_scales_check_drops(struct kvk_cache *cache, uint32_t id,
                                                         uint64_t number, bool keep_lock,
                                                         struct kvk_error *error);

/*
 * Take the checksums of the blocks that `settled` tokens make whole. Drops the lock where there
 * are many bytes; the sequence is busy. KVK_WOULD_BLOCK: many bytes, and the caller may not block.
 */
KVK_CHECKED enum kvk_status kvk_sequence_checksum_drops(struct kvk_cache *cache,
                                                        struct kvk_sequence *sequence,
                                                        uint64_t settled,
                                                        const struct kvk_caller *caller,
                                                        struct kvk_error *error);

/* Copies of one block that were sealed by two: ours, and the one that is indexed. */
struct kvk_duplicate {
    uint32_t ours;
    uint32_t winner;
    uint8_t ours_tier; /* enum kvk_tier: the copies that are compared */
    uint8_t winner_tier;
};
struct kvk_settling {
    uint64_t new_blocks;
    uint64_t known_blocks;
    struct kvk_duplicate *duplicates; /* [duplicate_count], both borrowed: kvk_block_borrow() */
    uint32_t duplicate_count, duplicate_capacity;
};

/* Seal and index what is settled now, where `settled_before` tokens were, and move the windows on;
 * in slices, while the sequence is busy. Cannot fail. */
void kvk_sequence_settle_drops(struct kvk_cache *cache, struct kvk_sequence *sequence,
                               uint64_t settled_before, struct kvk_settling *settling);
/* twins.c: compare the duplicates and give them back. Drops the lock where there are many bytes. */
void kvk_settling_finish_drops(struct kvk_cache *cache, const struct kvk_caller *caller,
                               struct kvk_settling *settling);

/* ---- sequence_cut.c ---- */

/* Cut back to `length`; the blocks past it go. Returns how many. */
uint64_t kvk_sequence_cut(struct kvk_cache *cache, struct kvk_sequence *sequence, uint64_t length);

/* ---- sequence_swap.c ---- */

/* A block of a sequence that is to have a copy in another tier. */
struct kvk_relocation {
    uint32_t group;
    uint32_t index;
};

/*
 * Bring `count` blocks of the (busy) sequence, in this order, to `tier`, and pin them there in
 * place of where they were pinned; a copy that nobody else needs goes. Room is made as the caller
 * allows. `moved` NULL: all or none; else as many as there is room for, counted there. Drops the
 * lock. KVK_DATA_LOSS: one does not match its checksum; none has moved.
 */
KVK_CHECKED enum kvk_status
kvk_sequence_bring_drops(struct kvk_cache *cache, struct kvk_sequence *sequence, enum kvk_tier tier,
                         const struct kvk_relocation *list, uint32_t count, uint32_t *moved,
                         const struct kvk_caller *caller, struct kvk_error *error);

#endif
