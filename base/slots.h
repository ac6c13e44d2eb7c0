/*
 * Who has which slot: pools, arenas and slabs, as numbers only.
 *
 * A pool is a budget of bytes: one per tier. An arena is the slots of one layer group of one space
 * in one tier; all its slots have one size. It takes slabs (runs of slots) from the pool's budget
 * when it needs them and gives whole free slabs back, so that spaces of different geometry share
 * one pool. No memory is touched here; the owner backs a slab's range after kvk_arena_grow() and
 * punches it out after kvk_arena_shrink().
 *
 * A slab is about pool / 64, at most 32 MiB, at least one slot; the last one that fits in the
 * budget may be shorter, so that rounding to slabs costs a lone space less than one slot.
 *
 * Laws: per arena, free + used = slots of its slabs; per pool, the slabs of all arenas plus
 * what is free = the limit; taking what is taken or giving what is free aborts.
 *
 * Locking: none here; the owner's lock covers a pool and all its arenas.
 */
#ifndef KVK_BASE_SLOTS_H
#define KVK_BASE_SLOTS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define KVK_SLOT_NONE UINT32_MAX
#define KVK_SLAB_NONE UINT32_MAX
#define KVK_SLAB_BYTES_MAX (UINT64_C(32) << 20)

struct kvk_pool {
    uint64_t limit_bytes;
    uint64_t slab_bytes;   /* bytes of slabs that arenas have */
    uint64_t charge_bytes; /* other bytes that count: strays that a worker faulted in again */
};

/* Slabs hang in lists by how full they are: level 0 holds the empty ones, full ones hang nowhere.
 */
#define KVK_ARENA_LEVEL_COUNT 8

struct kvk_slab {
    uint32_t first_slot;
    uint32_t slot_count; /* 0: this place in the file has no slab now */
    uint32_t used_count;
    uint32_t next; /* in its level's list, or in the list of free places */
    uint32_t previous;
    uint32_t level; /* KVK_ARENA_LEVEL_COUNT: full */
    uint32_t hint;  /* no summary word below it has a free slot */
};

struct kvk_arena {
    struct kvk_pool *pool;  /* borrowed */
    uint64_t slot_bytes;    /* all shards together: what one slot costs the pool */
    uint32_t slab_slots;    /* slots of a full slab */
    uint32_t slab_capacity; /* places for slabs in the file; places come again after shrink */
    struct kvk_slab *slabs; /* [slab_capacity], ours */
    uint64_t *free_bits;    /* [slab_capacity][slab_words]: one bit per free slot, ours */
    uint64_t *summary_bits; /* [slab_capacity][slab_summaries]: one bit per word with a free slot */
    uint32_t slab_words;
    uint32_t slab_summaries;
    uint32_t levels[KVK_ARENA_LEVEL_COUNT]; /* first slab of each list */
    uint32_t place_returned;                /* first place that shrink gave back */
    uint32_t place_fresh;                   /* places from here on never had a slab */
    uint32_t slab_count;                    /* slabs that exist */
    uint32_t slot_count;                    /* slots of them */
    uint32_t used_count;
};

void kvk_pool_init(struct kvk_pool *pool, uint64_t limit_bytes);
uint64_t kvk_pool_free_bytes(const struct kvk_pool *pool); /* not in any slab */

/*
 * Places are sized so that the arena alone could fill the pool, with a quarter to spare, since
 * short slabs take whole places. Costs next to nothing until slabs come: the tables are zero pages.
 * KVK_EXHAUSTED: no memory.
 */
KVK_CHECKED enum kvk_status kvk_arena_init(struct kvk_arena *arena, struct kvk_pool *pool,
                                           uint64_t slot_bytes);
/* The same for just `slot_count` slots, each a slab of its own: for memory that is made for so many
 * and goes as a whole. */
KVK_CHECKED enum kvk_status kvk_arena_init_for(struct kvk_arena *arena, struct kvk_pool *pool,
                                               uint64_t slot_bytes, uint32_t slot_count);
void kvk_arena_finish(struct kvk_arena *arena); /* returns its slabs to the pool */

/* Slots that the arena's file must have room for. */
uint32_t kvk_arena_slot_capacity(const struct kvk_arena *arena);

/* A free slot of the arena's slabs, or KVK_SLOT_NONE. O(1): full slabs hang in no list. Fuller
 * slabs are preferred, so that empty ones can be handed on; within a slab the lowest slot. */
uint32_t kvk_arena_take(struct kvk_arena *arena);
void kvk_arena_give(struct kvk_arena *arena, uint32_t slot);
bool kvk_arena_is_used(const struct kvk_arena *arena, uint32_t slot);

/*
 * Take this very slot, as it was taken in an arena of the same slot size before: what outlived the
 * process is put back so. Its slab is made, or made longer, just as far as the slot needs, so that
 * whatever was taken at one time fits again; see kvk_arena_fill_out().
 * KVK_EXISTS: it is taken. KVK_EXHAUSTED: the budget has no room. KVK_INVALID: the arena has no
 * such slot.
 */
KVK_CHECKED enum kvk_status kvk_arena_take_at(struct kvk_arena *arena, uint32_t slot);
/* Make short slabs whole again, as far as the budget goes: once all slots are put back. */
void kvk_arena_fill_out(struct kvk_arena *arena);

/* The place in the file that grow would take now, or KVK_SLAB_NONE where there is none left: so
 * that the owner can back it before. */
uint32_t kvk_arena_next_place(const struct kvk_arena *arena);

/* Take one more slab from the pool's budget: its number, or KVK_SLAB_NONE where not even one
 * slot fits, or where short slabs have used up the places. */
uint32_t kvk_arena_grow(struct kvk_arena *arena);

/* Give slab `slab`, which must have no used slot, back to the pool. */
void kvk_arena_shrink(struct kvk_arena *arena, uint32_t slab);

/* A slab without a used slot, or KVK_SLAB_NONE. */
uint32_t kvk_arena_empty_slab(const struct kvk_arena *arena);
uint32_t kvk_arena_slab_of(const struct kvk_arena *arena, uint32_t slot);

/* Every law of the pool over these arenas, recounted; aborts on a breach. For tests. */
void kvk_pool_check(const struct kvk_pool *pool, struct kvk_arena *const *arenas,
                    uint32_t arena_count);

#endif
