/*
 * The disk as a tier: copies of blocks that outlive memory, and the daemon.
 *
 * A copy on disk is whole, checksummed and synced before its bit is in the block's tier_mask, and
 * recorded in the catalogue. It has no address: whoever reads a block's bytes holds it, and what is
 * held has a copy in memory. So a block whose only copy is on disk is held by nobody, but for the
 * moment by a call that is bringing it back.
 *
 * Writing runs behind: blocks that were used [durable] disk_admit_uses times are queued, written,
 * synced and recorded by one thread, from where they lie (disk_straight.c: a small share of the
 * host tier at a time, kept in its place meanwhile) or from a copy (kept for the copying alone).
 * Nothing else in memory waits for it; a block that leaves memory before its turn is simply not on
 * disk. A slot whose block left it is free only when the removal of its record is committed.
 *
 * A disk that fails, is full or read-only turns into fewer hits and words in the log, no more.
 *
 * Locking: cache.lock, unless said otherwise; *_drops give it up in between.
 */
#ifndef KVK_DAEMON_DISK_TIER_H
#define KVK_DAEMON_DISK_TIER_H

#include "daemon/cache.h"

struct kvk_disk_tier;
struct kvk_disk_group;
struct kvk_group;
struct kvk_prefix;
struct kvk_restore;
struct kvk_space;

/* ---- Life, in this order ---- */

/* Nothing where the options have no disk or the configuration no bytes for it. Unlocked. */
KVK_CHECKED enum kvk_status kvk_disk_tier_create(struct kvk_cache *cache, struct kvk_error *error);
/* The thread, where the cache has threads. Unlocked. */
KVK_CHECKED enum kvk_status kvk_disk_tier_start(struct kvk_cache *cache, struct kvk_error *error);
/* Nothing is under way when it returns, and what is dropped from here on stays recorded: the cache
 * is about to be destroyed. Unlocked. */
void kvk_disk_tier_stop(struct kvk_cache *cache);
void kvk_disk_tier_destroy(struct kvk_cache *cache);

/* The group's part, before anybody knows the group. Unlocked. */
KVK_CHECKED enum kvk_status kvk_disk_group_create(struct kvk_cache *cache, struct kvk_group *group,
                                                  struct kvk_error *error);
/* Its file goes too, unless the cache is being destroyed and the file is recorded. Unlocked. */
void kvk_disk_group_destroy_unlocked(struct kvk_cache *cache, struct kvk_group *group);

/* ---- What was there before ---- */

/* After the spaces are open again: hand every record of the catalogue to `restore`. Unlocked. */
KVK_CHECKED enum kvk_status kvk_disk_records_read(struct kvk_cache *cache,
                                                  struct kvk_restore *restore,
                                                  struct kvk_error *error);
/* For kvk_restore_finish(): the record of what did not come back goes. Its own locking. */
void kvk_disk_record_refused(void *cache, struct kvk_group *group, enum kvk_tier tier,
                             uint32_t slot);
/* Once all that comes back is there: extents that nobody has are given back to the file system, and
 * files of no space removed. Unlocked. */
void kvk_disk_tidy_unlocked(struct kvk_cache *cache);

/* ---- For block_store.c ---- */

/* The slot's block is not there any more: its record goes, then it is free. Never fails. */
void kvk_disk_slot_leave(struct kvk_cache *cache, struct kvk_group *group, uint32_t slot);
/* The block's id is about to be nobody's: what is being done for it is not for its next owner. */
void kvk_disk_block_gone(struct kvk_cache *cache, uint32_t block);

/* For kvk_cache_check(): how many slots of the group wait for the removal of their record. */
uint32_t kvk_disk_leaving_check(const struct kvk_cache *cache, const struct kvk_group *group);

/* ---- Writing behind ---- */

/* The block was used, or `sealed` just now: it is queued if it is worth it and not on disk yet.
 * Cheap. */
void kvk_disk_offer(struct kvk_cache *cache, uint32_t block, bool sealed);

/* One bounded round of what the thread does: slots that are free again, reading ahead, writing
 * behind, giving extents back. True: there is more to do at once. */
bool kvk_disk_round_drops(struct kvk_cache *cache);

/* ---- Bringing back ---- */

/* What a prefix that reaches to the disk would cost, and what became of it. */
struct kvk_disk_estimate {
    uint64_t disk_tokens;      /* of the prefix, that are in no memory */
    uint64_t restore_ns;       /* estimated, to read them */
    uint64_t recompute_ns;     /* to compute from the first of them on; 0: not known */
    uint64_t restored_tokens;  /* out of disk_tokens, brought back by this call */
    uint64_t recompute_tokens; /* left on disk, since computing is estimated to be quicker */
};

/* Blocks that a call keeps until it has taken its own holds. */
struct kvk_disk_kept {
    uint32_t *blocks; /* [count], ours */
    uint32_t count, capacity;
};

/*
 * As kvk_prefix_find(), but the prefix ends where bytes are in memory: what is on disk alone is
 * brought back before, where that is estimated to be quicker than to compute it. A block that
 * cannot be read or is damaged ends the prefix: a miss, never an error.
 *
 * KVK_WOULD_BLOCK: there is something to bring back and the caller may not block. KVK_DEADLINE,
 * KVK_CANCELLED as the caller wants. The lock is dropped only if the caller may block. What was
 * brought back is in `kept` (zeroed by the caller) until kvk_disk_kept_finish(), also on failure.
 */
KVK_CHECKED enum kvk_status
kvk_disk_prefix_find_drops(struct kvk_cache *cache, struct kvk_space *space, const uint32_t *roots,
                           const struct kvk_prompt *prompt, uint64_t token_limit,
                           const struct kvk_caller *caller, struct kvk_prefix *prefix,
                           struct kvk_disk_estimate *estimate, struct kvk_disk_kept *kept,
                           struct kvk_error *error);
void kvk_disk_kept_finish(struct kvk_cache *cache, struct kvk_disk_kept *kept);
/* As far as it is in memory, at once. */
void kvk_disk_prefix_find_memory(struct kvk_cache *cache, struct kvk_space *space,
                                 const uint32_t *roots, const struct kvk_prompt *prompt,
                                 uint64_t token_limit, struct kvk_prefix *prefix);

/* Is what is on disk alone left there, since computing it is estimated to be quicker? */
static inline bool kvk_disk_is_left(const struct kvk_disk_estimate *estimate)
{
    return estimate->recompute_ns != 0 && estimate->restore_ns >= estimate->recompute_ns;
}

/* What it would cost to bring back what the prefix has on disk alone; for look-ups. */
void kvk_disk_estimate(const struct kvk_cache *cache, const struct kvk_space *space,
                       const struct kvk_prefix *prefix, struct kvk_disk_estimate *estimate);

/* Blocks of the path from the start that are on disk alone are read ahead, as far as there is free
 * or clean room for them. Queues only. */
void kvk_disk_ahead(struct kvk_cache *cache, const struct kvk_space *space,
                    const struct kvk_prefix *prefix);

/* Test hook: runs before bytes move, without any lock; a simulation lets other requests in there.
 */
void kvk_disk_test_hook(struct kvk_cache *cache, void (*hook)(void *context), void *context);

/* ---- Answers ---- */

struct kvk_disk_report {
    bool present;
    const char *state;   /* "good", "slow", "failing", "off", "full", "read-only" */
    const char *path;    /* how bytes are moved: "uring+direct"… */
    char reason[160];    /* of the last failure, "" if never */
    uint64_t queued;     /* blocks that wait to be written */
    uint64_t leaving;    /* slots that wait for the removal of their record */
    uint64_t read_rate;  /* bytes per second; 0: not known yet */
    uint64_t write_rate; /* bytes per second */
    uint64_t read_errors, write_errors, sync_errors, short_reads, full_errors;
    uint64_t read_bytes, written_bytes;
};
/* With or without the lock. */
void kvk_disk_report(const struct kvk_cache *cache, struct kvk_disk_report *report);

#endif
