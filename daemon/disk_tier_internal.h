/*
 * What the files of the disk tier share.
 *
 * Locking: cache.lock, unless said otherwise. The buffer, and what else belongs to the round, is
 * used by one thread at a time: the disk thread, or whoever steps the cache without threads.
 */
#ifndef KVK_DAEMON_DISK_TIER_INTERNAL_H
#define KVK_DAEMON_DISK_TIER_INTERNAL_H

#include "daemon/cache_internal.h"
#include "daemon/disk_tier.h"
#include "hosttier/catalogue.h"
#include "hosttier/disk.h"

#define KVK_DISK_BATCH_BLOCKS 64 /* written or read in one go */
#define KVK_DISK_BATCH_BYTES (UINT64_C(16) << 20)
#define KVK_DISK_QUEUE_BLOCKS 65536U       /* that wait to be written */
#define KVK_DISK_RATE_UNKNOWN 200000000ULL /* bytes per second, before anything was read */
#define KVK_DISK_LATENCY_NS UINT64_C(200000)

/* Of each block id one bit. */
struct kvk_disk_bits {
    uint64_t *words; /* ours */
};

struct kvk_disk_ring {
    uint32_t *blocks; /* [capacity], ours */
    uint32_t capacity, first, count;
};

struct kvk_disk_tier {
    struct kvk_disk_bits queued;    /* in the ring of those to be written */
    struct kvk_disk_bits writing;   /* in the batch that is being written; taken back where the id
                                       is given to another block meanwhile */
    struct kvk_disk_bits restoring; /* somebody is reading it */
    struct kvk_disk_ring behind;
    struct kvk_disk_ring ahead;
    uint8_t *buffer; /* of the round; ours, aligned */
    uint64_t buffer_bytes;
    uint8_t *staging; /* beside it: what is converted on its way to the buffer. Ours */
    uint64_t staging_bytes;
    uint64_t leaving_count; /* slots, over all groups */
    uint64_t paused_until_ns;
    uint64_t full_until_ns;   /* no more extents are asked for */
    uint64_t copies_until_ns; /* nothing is written from where it lies */
    uint8_t told_state;       /* as it was logged last */
    bool slab_wanted;         /* by a group that has nothing to evict */
    bool closing;             /* what is dropped stays recorded */
    bool ready;               /* what was recorded is back: rounds may begin */

    pthread_t thread;
    pthread_cond_t wake;
    bool thread_running;
    bool stopping;
    bool round_running;          /* by whoever steps: not entered twice */
    void (*hook)(void *context); /* tests; NULL: none */
    void *hook_context;
};

struct kvk_disk_group {
    struct kvk_disk_file *file;                 /* ours; NULL until something is to be written */
    uint64_t shard_offset[KVK_SHARD_COUNT_MAX]; /* in a slot */
    uint64_t shard_stride[KVK_SHARD_COUNT_MAX];
    /* Slots that wait for the removal of their record, oldest first. */
    uint64_t *leave_tickets;          /* [slot] 0: not queued yet. Zero pages until used; ours */
    uint32_t *leave_next;             /* [slot] slot + 1; ours */
    uint32_t leave_first, leave_last; /* slot + 1; 0: none */
    uint32_t leaving_count;
    uint32_t hand; /* slot that is looked at next for a copy to drop */
};

bool kvk_disk_bit(const struct kvk_disk_bits *bits, uint32_t block);
void kvk_disk_bit_set(struct kvk_disk_bits *bits, uint32_t block, bool value);
bool kvk_disk_ring_add(struct kvk_disk_ring *ring, uint32_t block);
uint32_t kvk_disk_ring_take(struct kvk_disk_ring *ring); /* KVK_BLOCK_NONE: empty */

static inline bool kvk_disk_is_memory(const struct kvk_block *block)
{
    return (block->tier_mask & KVK_MEMORY_TIER_MASK) != 0;
}

static inline bool kvk_disk_is_on_disk(const struct kvk_block *block)
{
    return (block->tier_mask & (1U << KVK_TIER_DISK)) != 0;
}

static inline void kvk_disk_hook_unlocked(const struct kvk_disk_tier *tier)
{
    if (tier->hook != NULL) {
        tier->hook(tier->hook_context);
    }
}

/* Whole, indexed, and not invalidated. */
bool kvk_disk_is_current(const struct kvk_cache *cache, uint32_t block);

/* Is the disk of any use now? Logs when that changes. */
bool kvk_disk_is_usable(struct kvk_cache *cache);
uint64_t kvk_disk_restore_ns(const struct kvk_cache *cache, uint64_t bytes);

/* The pieces of one block in `memory`: shard by shard, or `whole` strides. Returns how many. */
uint32_t kvk_disk_pieces(const struct kvk_cache *cache, const struct kvk_group *group,
                         uint32_t slot, struct kvk_disk_piece *pieces);

/* ---- disk_room.c ---- */

/* A slot for one more copy, loose. KVK_EXHAUSTED: there is none now. Drops the lock for extents. */
KVK_CHECKED enum kvk_status kvk_disk_slot_get_drops(struct kvk_cache *cache,
                                                    struct kvk_group *group, uint32_t *slot);
/* Drop copies of least worth, until there is a slot, free or on its way, for `candidate` and for
 * some that may follow. What was used later than it stays. */
void kvk_disk_evict(struct kvk_cache *cache, struct kvk_group *group, uint32_t candidate);
/* Slots whose removal is committed are free; those that are not queued yet are. */
void kvk_disk_leaving_settle(struct kvk_cache *cache);
/* Extents of empty slabs that others need, and all that was given up. */
void kvk_disk_punch_drops(struct kvk_cache *cache);
KVK_CHECKED enum kvk_status kvk_disk_file_open_drops(struct kvk_cache *cache,
                                                     struct kvk_group *group);

/* ---- disk_straight.c ---- */

/* May the block be written from where it lies, beside so many bytes that are? */
bool kvk_disk_is_straight(const struct kvk_cache *cache, const struct kvk_group *group,
                          const struct kvk_block *block, uint64_t straight_bytes);
/* How long the disk took for the last of them. */
void kvk_disk_straight_took(struct kvk_cache *cache, uint64_t duration_ns);

/* ---- disk_write.c ---- */

/* One batch; true: there is more, and it may be written now. */
bool kvk_disk_write_drops(struct kvk_cache *cache);

/* ---- disk_restore.c, disk_ahead.c ---- */

/* A copy to be read from disk into a loose slot of memory; the block is borrowed on disk. */
struct kvk_disk_read_job {
    uint32_t block;
    uint32_t slot;
    bool landed;
    bool damaged;
};
/* Read them all into their slots of `tier` and end them: attached, or the slot given back. Which
 * came, and how the disk feels, is in the jobs. KVK_OK: all landed. */
KVK_CHECKED enum kvk_status kvk_disk_read_jobs_drops(struct kvk_cache *cache, enum kvk_tier tier,
                                                     uint8_t class, struct kvk_disk_read_job *jobs,
                                                     uint32_t count);
void kvk_disk_read_begin(struct kvk_cache *cache, uint32_t block);
/* Where copies are brought to. False: to no memory that the processor can read. */
bool kvk_disk_target(const struct kvk_group *group, enum kvk_tier *tier);
bool kvk_disk_ahead_drops(struct kvk_cache *cache);

#endif
