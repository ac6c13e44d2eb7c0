/*
 * How room is made in a tier, one slot at a time: room_choose.c decides what comes next and changes
 * nothing, room.c does what can be done at once, room_make.c what needs the lock dropped.
 *
 * The order: first what the tenant's limit asks for, a victim of its own where it is reached; a
 * free slot; a slab from the pool's budget; a slab that stands empty elsewhere; then a victim. Free
 * memory comes before any victim, so that a pool of n slots holds n blocks. Of victims, those of
 * tenants above their fair share go first, then the asking group's own (or those of another group
 * of its tenant that are worth less), and somebody else's only where nothing else can go; never
 * those of another tenant within its guarantee. For a tenant within its own guarantee whoever is
 * above his gives first. Another group's slots are of another size, so it gives a whole slab.
 *
 * Locking: all of it needs cache.lock; *_drops give it up in between.
 */
#ifndef KVK_DAEMON_ROOM_INTERNAL_H
#define KVK_DAEMON_ROOM_INTERNAL_H

#include "daemon/cache_internal.h"

enum kvk_room_step {
    /* At once. */
    KVK_ROOM_TAKE,  /* the arena has a free slot */
    KVK_ROOM_GROW,  /* the pool has budget and `place` has memory */
    KVK_ROOM_EVICT, /* drop the victim's copy in `victim_tier` */
    /* Only with the lock dropped. */
    KVK_ROOM_BACK,      /* the pool has budget, but `place` has no memory yet */
    KVK_ROOM_HAND_OVER, /* `giver` has `slab`, which is empty */
    KVK_ROOM_DEMOTE,    /* the group's own victims have to be copied to the host tier first */
    KVK_ROOM_VACATE,    /* `giver` gives `slab`, whose blocks have to go first */
    KVK_ROOM_COMPACT,   /* `giver` gives `slab`, whose blocks move to slots of its victims first */
    KVK_ROOM_PUNCH,     /* a slab that was given up waits to be punched out */
    KVK_ROOM_WAIT,      /* copies under way will free something */
    KVK_ROOM_LIMIT,     /* the tenant's limit is reached, and nothing of its own may go */
    KVK_ROOM_NOTHING,
};

struct kvk_room_choice {
    enum kvk_room_step step;
    uint32_t place;
    uint32_t victim;
    enum kvk_tier victim_tier;
    struct kvk_group *giver; /* for its tenant's limit: also the group to demote from */
    uint32_t slab;
    bool by_limit; /* the victim goes since its tenant's limit is reached */
    bool due;      /* chosen for a tenant within its guarantee */
};

/* ---- room_choose.c ---- */

/* What gets the group one more slot in the tier. `want` (may be NULL): do not take from another of
 * its groups what that one needs itself. */
void kvk_room_choose(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                     const struct kvk_room_want *want, struct kvk_room_choice *choice);
/* The same where the slots that are free do not suffice. */
void kvk_room_choose_more(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          const struct kvk_room_want *want, struct kvk_room_choice *choice);

/* The least worth of the tenant's own in the tier, for its limit: KVK_ROOM_EVICT, KVK_ROOM_DEMOTE
 * (from `giver`), or KVK_ROOM_LIMIT where it has none. */
void kvk_room_choose_own(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                         enum kvk_tier tier, struct kvk_room_choice *choice);

/* Must `block` be copied to the host tier before it may leave the device? */
bool kvk_room_is_dirty(const struct kvk_group *group, const struct kvk_block *block);

/* Visit every group that has slots in the tier: begin with *number = 0, until NULL. */
struct kvk_group *kvk_room_next_group(const struct kvk_cache *cache, enum kvk_tier tier,
                                      uint32_t *number);

/* No memory lies below the tier: what leaves it is on disk, or forgotten. */
static inline bool kvk_room_is_last_memory(const struct kvk_group *group, enum kvk_tier tier)
{
    return tier == KVK_TIER_HOST ||
           (tier == KVK_TIER_DEVICE && !group->tiers[KVK_TIER_HOST].present);
}

/* Has the block another copy that does for what the one in `tier` is there for? Holders need one in
 * memory. */
static inline bool kvk_room_has_other(const struct kvk_block *block, enum kvk_tier tier)
{
    uint8_t others = (uint8_t)(block->tier_mask & ~(1U << tier));
    return (block->hold_count > 0 ? others & KVK_MEMORY_TIER_MASK : others) != 0;
}

static inline uint32_t kvk_room_free_slots(const struct kvk_group *group, enum kvk_tier tier)
{
    const struct kvk_arena *arena = &group->tiers[tier].arena;
    return arena->slot_count - arena->used_count;
}

/* ---- room.c ---- */

/* Take the chosen place. False: no memory for the queues' entries. */
bool kvk_room_grow(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                   uint32_t place);

/* Do what the choice says where that needs no waiting. False: it does. */
bool kvk_room_apply(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                    const struct kvk_room_choice *choice);

/* What the slots that are wanted take, over all groups. */
uint64_t kvk_room_want_bytes(const struct kvk_space *space, const struct kvk_room_want *want);

/* Forget a block that nobody holds, and below it all that would be stranded. */
void kvk_room_forget_tree(struct kvk_cache *cache, uint32_t block);

/* The empty slab leaves its arena; its budget comes back once it is punched out. False: no memory.
 */
bool kvk_room_slab_leave(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                         uint32_t slab);

/* ---- room_compact.c ---- */

/* Are all blocks of the slab whole, and free to lie elsewhere in their tier? */
bool kvk_room_slab_may_shift(const struct kvk_cache *cache, const struct kvk_group *group,
                             enum kvk_tier tier, uint32_t slab);

/* Move what lies in the slab into other slots of the arena, forgetting its least worth for it. What
 * is pinned meanwhile stays. KVK_EXHAUSTED: there are not enough victims. */
KVK_CHECKED enum kvk_status kvk_room_compact_drops(struct kvk_cache *cache, struct kvk_group *group,
                                                   enum kvk_tier tier, uint32_t slab,
                                                   struct kvk_error *error);

/* ---- room_make.c ---- */

/* Demote `count` of the group's device victims, for its tenant's limit. */
KVK_CHECKED enum kvk_status kvk_room_demote_own_drops(struct kvk_cache *cache,
                                                      struct kvk_group *group, uint32_t count,
                                                      struct kvk_error *error);

/* Demote up to `count` of the group's device victims and free their slots there. KVK_EXHAUSTED: the
 * host tier has no room, or the queue of copies is full. */
KVK_CHECKED enum kvk_status kvk_room_demote_drops(struct kvk_cache *cache, struct kvk_group *group,
                                                  uint32_t count, bool keep_device_copies,
                                                  uint32_t *demoted, struct kvk_error *error);

#endif
