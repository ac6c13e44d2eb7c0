/*
 * Blocks as the engine keeps them: who holds and pins them, where their copies lie, and what that
 * makes of the counters and of the queues of victims.
 *
 * kvk_block_settle() is the one place that writes counters and queues. It remembers in block.flags
 * what it has counted a block as, so that bringing the sums in line never needs to know what
 * changed.
 */
#include "daemon/cache_internal.h"

#include <string.h>

#include "base/assert.h"
#include "daemon/block_slots.h"
#include "daemon/sidecar.h"

/* ---- What a block is counted as, in block.flags ---- */

#define COUNTED_STATE 0x07U /* enum kvk_block_state; FREE: not counted */
#define COUNTED_BOUND(tier) (0x08U << (tier))
#define COUNTED_KIND_SHIFT 5
#define COUNTED_KIND 0x60U
#define COUNTED_ALL 0x7fU

_Static_assert(KVK_BLOCK_STATE_COUNT <= COUNTED_STATE + 1, "a state fits in its bits");
_Static_assert(COUNTED_BOUND(KVK_MEMORY_TIER_COUNT - 1) < (1U << COUNTED_KIND_SHIFT),
               "so do the tiers");
_Static_assert((KVK_BLOCK_QUARANTINED & COUNTED_ALL) == 0, "the input bit is apart");

/* Why bytes are bound: one reason a block, the first that holds from below. */
enum kind {
    KIND_ACTIVE = 0,
    KIND_LEASED,
    KIND_COPYING,
    KIND_QUARANTINE,
};

static bool is_indexed(const struct kvk_block *block)
{
    return block->run != UINT32_MAX;
}

static bool is_unsealed(const struct kvk_block *block)
{
    return block->state == KVK_BLOCK_RESERVED || block->state == KVK_BLOCK_ACTIVE;
}

static bool has_copy(const struct kvk_block *block, enum kvk_tier tier)
{
    return (block->tier_mask & (1U << tier)) != 0;
}

/* A whole block's bytes that do not match their checksum count as no copy: nobody finds them. They
 * keep their slot while a holder has nothing else, and go as soon as they can. */
static bool is_damaged(const struct kvk_block *block, enum kvk_tier tier)
{
    return kvk_block_is_whole(block) && block->slot[tier] != KVK_SLOT_NONE &&
           !has_copy(block, tier);
}

/* Where a block's bytes lie, in memory before disk. */
static enum kvk_tier first_tier(const struct kvk_block *block)
{
    bool in_memory = block->slot[KVK_TIER_DEVICE] != KVK_SLOT_NONE ||
                     block->slot[KVK_TIER_HOST] != KVK_SLOT_NONE;
    return in_memory ? kvk_block_tier(block) : KVK_TIER_DISK;
}

static bool is_current(const struct kvk_cache *cache, uint32_t id, const struct kvk_block *block)
{
    return is_indexed(block) && kvk_root_is_current(cache, kvk_index_root_of(cache->index, id));
}

static bool is_at_rest(const struct kvk_block *block)
{
    return block->transfer_count == 0 && block->pin_count[KVK_TIER_DEVICE] == 0 &&
           block->pin_count[KVK_TIER_HOST] == 0 && block->pin_count[KVK_TIER_DISK] == 0;
}

/* A leaf as far as the disk goes: with it nothing is stranded there, nor in memory. */
static bool is_disk_leaf(const struct kvk_group *group, const struct kvk_block *block)
{
    return group->windowed || (block->disk_children == 0 && block->memory_children == 0);
}

/* A leaf as far as the device tier goes: leaving it strands no child there. */
static bool is_device_leaf(const struct kvk_group *group, const struct kvk_block *block)
{
    return group->windowed || block->device_children == 0;
}

/* ---- Counters ---- */

static enum kind kind_of(const struct kvk_block *block)
{
    if ((block->flags & KVK_BLOCK_QUARANTINED) != 0) {
        return KIND_QUARANTINE;
    }
    if (block->transfer_count > 0) {
        return KIND_COPYING;
    }
    if (block->hold_count > 0 && block->hold_count == block->lease_hold_count) {
        return KIND_LEASED;
    }
    return KIND_ACTIVE;
}

/* Can the bytes in this tier not leave it, whatever is done? */
static bool is_bound(const struct kvk_cache *cache, const struct kvk_group *group, uint32_t id,
                     const struct kvk_block *block, enum kvk_tier tier)
{
    if (block->slot[tier] == KVK_SLOT_NONE) {
        return false;
    }
    if (is_unsealed(block) || block->pin_count[tier] > 0 || block->transfer_count > 0) {
        return true;
    }
    if (block->hold_count == 0) {
        return false;
    }
    if (tier == KVK_TIER_DEVICE && kvk_group_is_compact_below(group)) {
        return true;
    }
    bool other_copy = (block->tier_mask & KVK_MEMORY_TIER_MASK & ~(1U << tier)) != 0;
    bool may_move = tier == KVK_TIER_DEVICE && has_copy(block, tier) &&
                    group->tiers[KVK_TIER_HOST].present && is_current(cache, id, block);
    return !other_copy && !may_move;
}

static uint64_t *kind_counter(struct kvk_tier_state *tier, enum kind kind)
{
    switch (kind) {
    case KIND_ACTIVE:
        return NULL; /* what is left of bound */
    case KIND_LEASED:
        return &tier->leased_bytes;
    case KIND_COPYING:
        return &tier->copying_bytes;
    case KIND_QUARANTINE:
        return &tier->quarantine_bytes;
    }
    return NULL;
}

static void bound_count(struct kvk_cache *cache, const struct kvk_group *group, uint8_t flags,
                        bool add)
{
    enum kind kind = (enum kind)((flags & COUNTED_KIND) >> COUNTED_KIND_SHIFT);
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if ((flags & COUNTED_BOUND(i)) == 0) {
            continue;
        }
        struct kvk_tier_state *tier = &cache->tiers[i];
        uint64_t bytes = group->forms[i].block_bytes;
        uint64_t *counter = kind_counter(tier, kind);
        kvk_quota_bound_change(cache, group->space->tenant, (enum kvk_tier)i, bytes, add);
        if (add) {
            if (counter != NULL) {
                *counter += bytes;
            }
        } else {
            if (counter != NULL) {
                kvk_bytes_sub(counter, bytes);
            }
        }
    }
}

/* Count the block as `now` instead of as what its flags say. */
static void count_as(struct kvk_cache *cache, struct kvk_group *group, struct kvk_block *block,
                     uint8_t now)
{
    uint8_t before = block->flags & COUNTED_ALL;
    if (now == before) {
        return;
    }
    uint8_t state_before = before & COUNTED_STATE;
    uint8_t state_now = now & COUNTED_STATE;
    if (state_before != KVK_BLOCK_FREE) {
        kvk_bytes_sub(&group->state_counts[state_before], 1);
    }
    if (state_now != KVK_BLOCK_FREE) {
        group->state_counts[state_now]++;
    }
    bound_count(cache, group, before, false);
    bound_count(cache, group, now, true);
    block->flags = (uint8_t)((block->flags & ~COUNTED_ALL) | now);
    uint8_t bound = COUNTED_BOUND(KVK_TIER_DEVICE) | COUNTED_BOUND(KVK_TIER_HOST);
    if ((before & bound & ~now) != 0) {
        for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
            cache->tiers[i].release_rate.released_bytes +=
                (before & COUNTED_BOUND(i) & ~now) != 0 ? group->forms[i].block_bytes : 0;
        }
        pthread_cond_broadcast(&cache->changed); /* something may leave that could not */
    }
}

static void count_update(struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                         struct kvk_block *block)
{
    uint32_t now = block->state;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (is_bound(cache, group, id, block, (enum kvk_tier)i)) {
            now |= COUNTED_BOUND(i);
            now |= (uint32_t)kind_of(block) << COUNTED_KIND_SHIFT;
        }
    }
    count_as(cache, group, block, (uint8_t)now);
}

/* ---- Queues ---- */

static struct kvk_evict_queue *queue_for(const struct kvk_cache *cache, struct kvk_group *group,
                                         uint32_t id, const struct kvk_block *block)
{
    if (!kvk_block_is_whole(block) || block->transfer_count > 0 || !is_current(cache, id, block)) {
        return NULL;
    }
    bool evictable = block->state == KVK_BLOCK_EVICTABLE;
    bool on_disk = has_copy(block, KVK_TIER_DISK);
    bool is_last_memory = !group->tiers[KVK_TIER_HOST].present;
    if (has_copy(block, KVK_TIER_DEVICE)) {
        struct kvk_group_tier *device = &group->tiers[KVK_TIER_DEVICE];
        if (block->pin_count[KVK_TIER_DEVICE] > 0 || !is_device_leaf(group, block)) {
            return NULL;
        }
        if (!evictable && kvk_group_is_compact_below(group)) {
            return NULL;
        }
        if (has_copy(block, KVK_TIER_HOST)) {
            return &device->clean;
        }
        if (evictable) {
            return is_last_memory && on_disk ? &device->clean : &device->queue;
        }
        return is_last_memory ? NULL : &device->held;
    }
    if (has_copy(block, KVK_TIER_HOST)) {
        struct kvk_group_tier *host = &group->tiers[KVK_TIER_HOST];
        bool leaves =
            evictable && block->pin_count[KVK_TIER_HOST] == 0 && kvk_block_is_leaf(group, block);
        if (!leaves) {
            return NULL;
        }
        return on_disk ? &host->clean : &host->queue;
    }
    bool leaves_disk =
        evictable && on_disk && block->pin_count[KVK_TIER_DISK] == 0 && is_disk_leaf(group, block);
    return leaves_disk ? &group->tiers[KVK_TIER_DISK].queue : NULL;
}

static void queue_leave(struct kvk_block *block, uint32_t id)
{
    if (block->queue != NULL) {
        kvk_evict_queue_remove(block->queue, id);
    }
}

static void queue_update(struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                         struct kvk_block *block)
{
    struct kvk_evict_queue *wanted = queue_for(cache, group, id, block);
    if (wanted == block->queue) {
        return;
    }
    queue_leave(block, id);
    if (wanted != NULL) {
        kvk_evict_queue_add(wanted, id);
    }
}

/* A child came, went, or changed its tiers. Never frees the parent: its child needs it, or whoever
 * took the child away looks after it. */
static void parent_update(struct kvk_cache *cache, uint32_t parent)
{
    if (parent != KVK_BLOCK_NONE) {
        struct kvk_block *block = kvk_index_block(cache->index, parent);
        queue_update(cache, kvk_group_of(cache, block), parent, block);
    }
}

/* ---- The end of blocks ---- */

/* Where whole copies lie: in the block, its run, its parent and the group's counts. */
static void tiers_set(struct kvk_cache *cache, struct kvk_group *group, uint32_t id, uint8_t mask)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        uint8_t bit = (uint8_t)(1U << i);
        if ((mask & bit) != 0 && (block->tier_mask & bit) == 0) {
            group->tier_blocks[i]++;
        } else if ((mask & bit) == 0 && (block->tier_mask & bit) != 0) {
            kvk_bytes_sub(&group->tier_blocks[i], 1);
        }
    }
    kvk_events_tiers(cache, group, id, block->tier_mask, mask);
    parent_update(cache, kvk_index_set_tiers(cache->index, id, mask));
    kvk_sidecar_block_changed(cache, group, id);
}

static bool is_needless(const struct kvk_block *block)
{
    return block->state == KVK_BLOCK_HOLLOW && block->child_count == 0 && block->anchor_count == 0;
}

/* A FREE block leaves the index and is nobody's any more. Its parent, or KVK_BLOCK_NONE. */
static uint32_t block_erase(struct kvk_cache *cache, struct kvk_group *group, uint32_t id)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    KVK_ASSERT(block->state == KVK_BLOCK_FREE);
    KVK_ASSERT(block->queue == NULL);
    count_as(cache, group, block, KVK_BLOCK_FREE);
    kvk_sidecar_block_leaves(cache, group, id);
    uint32_t parent = KVK_BLOCK_NONE;
    if (is_indexed(block)) {
        kvk_metadata_extra_sub(cache, group, id);
        parent = kvk_index_remove(cache->index, id);
    }
    kvk_disk_block_gone(cache, id);
    kvk_remote_block_gone(cache, id);
    kvk_index_block_free(cache->index, id);
    kvk_metadata_sub(cache, group->space->tenant, KVK_METADATA_BLOCKS, 1, group->record_bytes);
    return parent;
}

/* A block lost a child. Hollow ancestors that only it needed go with it. */
static void parent_lost_child(struct kvk_cache *cache, struct kvk_group *group, uint32_t parent)
{
    while (parent != KVK_BLOCK_NONE) {
        struct kvk_block *above = kvk_index_block(cache->index, parent);
        if (!is_needless(above)) {
            parent_update(cache, parent);
            return;
        }
        kvk_block_step(above, KVK_BLOCK_PRUNE);
        parent = block_erase(cache, group, parent);
    }
}

static void block_end(struct kvk_cache *cache, struct kvk_group *group, uint32_t id)
{
    parent_lost_child(cache, group, block_erase(cache, group, id));
}

/* The bytes in one tier go. What that leaves of the block is the caller's to settle. */
static void copy_remove(struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                        enum kvk_tier tier)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    KVK_ASSERT(has_copy(block, tier));
    KVK_ASSERT(block->pin_count[tier] == 0);
    KVK_ASSERT(block->transfer_count == 0);
    tiers_set(cache, group, id, (uint8_t)(block->tier_mask & ~(1U << tier)));
    kvk_slot_disown(cache, group, tier, id);
}

/* The slot in one tier goes, whether its bytes count as a copy or not. */
static void slot_remove(struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                        enum kvk_tier tier)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    if (has_copy(block, tier)) {
        copy_remove(cache, group, id, tier);
    } else if (block->slot[tier] != KVK_SLOT_NONE) {
        kvk_slot_disown(cache, group, tier, id);
    }
}

/* Why a block goes by itself, where nobody said. */
static enum kvk_gone_reason own_reason(const struct kvk_cache *cache, uint32_t id,
                                       const struct kvk_block *block)
{
    if (!is_current(cache, id, block)) {
        const struct kvk_tenant *tenant = kvk_group_of(cache, block)->space->tenant;
        return kvk_tenant_state_of(cache, tenant)->forgetting ? KVK_GONE_FORGOTTEN
                                                              : KVK_GONE_INVALIDATED;
    }
    return block->tier_mask == 0 ? KVK_GONE_DAMAGED : KVK_GONE_NONE;
}

/* Every copy of a block that nobody holds goes. Its place in the index stays while it is needed. */
static void block_forget(struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                         enum kvk_gone_reason reason)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    KVK_ASSERT(block->state == KVK_BLOCK_EVICTABLE);
    kvk_gone_note(cache, id, first_tier(block), 0, reason);
    queue_leave(block, id);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        slot_remove(cache, group, id, (enum kvk_tier)i);
    }
    cache->stats.forgotten_blocks++;
    kvk_block_step(block, KVK_BLOCK_EVICT);
    if (block->state == KVK_BLOCK_HOLLOW) {
        count_update(cache, group, id, block);
        return;
    }
    block_end(cache, group, id);
}

/* Damaged bytes go as soon as nobody needs just them. A holder has bytes in memory, be they what
 * they may: a copy on disk alone does not serve him. */
static void damage_clear(struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                         const struct kvk_block *block)
{
    uint8_t in_memory = block->tier_mask & KVK_MEMORY_TIER_MASK;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        bool needed = i < KVK_MEMORY_TIER_COUNT &&
                      (block->hold_count > 0 ? in_memory == 0 : block->tier_mask == 0);
        if (is_damaged(block, (enum kvk_tier)i) && block->pin_count[i] == 0 &&
            block->transfer_count == 0 && !needed) {
            kvk_slot_disown(cache, group, (enum kvk_tier)i, id);
        }
    }
}

/* What nobody can find any more does not stay on disk, whoever still holds it. */
static void disk_clear(struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                       const struct kvk_block *block)
{
    if (block->slot[KVK_TIER_DISK] != KVK_SLOT_NONE && block->pin_count[KVK_TIER_DISK] == 0 &&
        block->transfer_count == 0 && kvk_block_is_whole(block) && block->hold_count > 0 &&
        !is_current(cache, id, block)) {
        slot_remove(cache, group, id, KVK_TIER_DISK);
    }
}

void kvk_block_settle(struct kvk_cache *cache, uint32_t id)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, id);
    struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(block->state != KVK_BLOCK_FREE);

    if (is_needless(block)) {
        kvk_block_step(block, KVK_BLOCK_PRUNE);
        block_end(cache, group, id);
        return;
    }
    damage_clear(cache, group, id, block);
    disk_clear(cache, group, id, block);
    if (block->state == KVK_BLOCK_EVICTABLE && is_at_rest(block)) {
        if (block->tier_mask == 0 || !is_current(cache, id, block)) {
            block_forget(cache, group, id, own_reason(cache, id, block));
            return;
        }
        if (has_copy(block, KVK_TIER_DEVICE) && has_copy(block, KVK_TIER_HOST) &&
            !is_device_leaf(group, block) && !kvk_group_is_compact_below(group)) {
            /* A second copy is kept only of what leaves the device next; a compact one always, so
             * that no block is rounded again for having been used. */
            queue_leave(block, id);
            copy_remove(cache, group, id, KVK_TIER_HOST);
        }
    }
    count_update(cache, group, id, block);
    queue_update(cache, group, id, block);
    parent_update(cache, block->parent);
}

/* ---- Holds and pins ---- */

void kvk_block_hold(struct kvk_cache *cache, uint32_t id, bool leased)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    kvk_block_step(block, KVK_BLOCK_HOLD);
    block->lease_hold_count += leased ? 1 : 0;
    kvk_block_settle(cache, id);
}

/* The last holder of bytes that no index knows: they were never whole, or lost their place. */
static void last_release(struct kvk_cache *cache, struct kvk_group *group, uint32_t id)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    bool unsealed = is_unsealed(block);
    KVK_ASSERT(block->queue == NULL);
    kvk_block_step(block, unsealed ? KVK_BLOCK_ABORT : KVK_BLOCK_DISCARD);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        slot_remove(cache, group, id, (enum kvk_tier)i);
    }
    block_end(cache, group, id);
}

void kvk_block_release(struct kvk_cache *cache, uint32_t id, bool leased)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, id);
    if (leased) {
        KVK_ASSERT(block->lease_hold_count > 0);
        block->lease_hold_count--;
    }
    KVK_ASSERT(block->hold_count > block->lease_hold_count);
    if (block->hold_count == 1 && (is_unsealed(block) || !is_indexed(block))) {
        last_release(cache, kvk_group_of(cache, block), id);
        return;
    }
    kvk_block_step(block, KVK_BLOCK_RELEASE);
    kvk_block_settle(cache, id);
}

static void pin_add(struct kvk_block *block, enum kvk_tier tier)
{
    KVK_ASSERT(block->slot[tier] != KVK_SLOT_NONE);
    KVK_ASSERT(block->hold_count > 0);
    KVK_ASSERT(block->pin_count[tier] < UINT32_MAX);
    block->pin_count[tier]++;
}

/* What is in use on the device does not leave it soon: a second copy would only take room. */
static void second_copy_drop(struct kvk_cache *cache, uint32_t id, struct kvk_block *block)
{
    if (has_copy(block, KVK_TIER_DEVICE) && has_copy(block, KVK_TIER_HOST) &&
        !kvk_group_is_compact_below(kvk_group_of(cache, block)) &&
        block->pin_count[KVK_TIER_DEVICE] > 0 && block->pin_count[KVK_TIER_HOST] == 0 &&
        block->transfer_count == 0) {
        queue_leave(block, id);
        copy_remove(cache, kvk_group_of(cache, block), id, KVK_TIER_HOST);
    }
}

void kvk_block_pin(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, id);
    pin_add(block, tier);
    second_copy_drop(cache, id, block);
    kvk_block_settle(cache, id);
}

void kvk_block_unpin(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, id);
    KVK_ASSERT(block->pin_count[tier] > 0);
    block->pin_count[tier]--;
    if (tier == KVK_TIER_HOST) {
        second_copy_drop(cache, id, block);
    }
    kvk_block_settle(cache, id);
}

void kvk_block_borrow(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier)
{
    cache->passing_holds++;
    kvk_block_hold(cache, id, false);
    pin_add(kvk_index_block(cache->index, id), tier);
    kvk_block_settle(cache, id);
}

void kvk_block_return(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier)
{
    KVK_ASSERT(cache->passing_holds > 0);
    cache->passing_holds--;
    kvk_block_unpin(cache, id, tier);
    kvk_block_release(cache, id, false);
}

void kvk_block_keep(struct kvk_cache *cache, uint32_t id)
{
    cache->passing_holds++;
    kvk_block_hold(cache, id, false);
}

void kvk_block_let_go(struct kvk_cache *cache, uint32_t id)
{
    KVK_ASSERT(cache->passing_holds > 0);
    cache->passing_holds--;
    kvk_block_release(cache, id, false);
}

void kvk_block_set_quarantined(struct kvk_cache *cache, uint32_t id, bool quarantined)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    block->flags = (uint8_t)(quarantined ? block->flags | KVK_BLOCK_QUARANTINED
                                         : block->flags & ~KVK_BLOCK_QUARANTINED);
    kvk_block_settle(cache, id);
}

void kvk_block_unindex(struct kvk_cache *cache, uint32_t id)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, id);
    KVK_ASSERT(block->hold_count > 0);
    kvk_gone_note(cache, id, first_tier(block), 0, KVK_GONE_INVALIDATED);
    queue_leave(block, id);
    kvk_sidecar_block_leaves(cache, kvk_group_of(cache, block), id);
    kvk_events_tiers(cache, kvk_group_of(cache, block), id, block->tier_mask, 0);
    kvk_metadata_extra_sub(cache, kvk_group_of(cache, block), id);
    uint32_t parent = kvk_index_remove(cache->index, id);
    parent_lost_child(cache, kvk_group_of(cache, block), parent);
    kvk_block_settle(cache, id);
}

/* ---- Copies ---- */

uint32_t kvk_block_create(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          uint32_t slot)
{
    uint32_t id = kvk_index_block_alloc(cache->index, group->number);
    if (id == KVK_BLOCK_NONE) {
        return id;
    }
    kvk_metadata_add(cache, group->space->tenant, KVK_METADATA_BLOCKS, 1, group->record_bytes);
    struct kvk_block *block = kvk_index_block(cache->index, id);
    kvk_block_step(block, KVK_BLOCK_RESERVE);
    kvk_slot_own(cache, group, tier, slot, id);
    block->pin_count[tier] = 1;
    kvk_block_settle(cache, id);
    return id;
}

enum kvk_status kvk_block_know(struct kvk_cache *cache, struct kvk_group *group,
                               struct kvk_cursor *cursor, const struct kvk_content *content)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t id = kvk_index_block_alloc(cache->index, group->number);
    if (id == KVK_BLOCK_NONE) {
        return KVK_EXHAUSTED;
    }
    struct kvk_block *block = kvk_index_block(cache->index, id);
    uint32_t winner;
    kvk_block_step(block, KVK_BLOCK_KNOW);
    enum kvk_status status = kvk_index_insert(cache->index, cursor, content, id, &winner);
    if (status != KVK_OK) {
        kvk_block_step(block, KVK_BLOCK_PRUNE);
        kvk_index_block_free(cache->index, id);
        return status == KVK_EXISTS ? KVK_OK : status;
    }
    kvk_metadata_add(cache, group->space->tenant, KVK_METADATA_BLOCKS, 1, group->record_bytes);
    (void)kvk_metadata_extra_add(cache, group, id);
    count_update(cache, group, id, block);
    return KVK_OK;
}

void kvk_block_attach(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier, uint32_t slot)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(kvk_block_is_whole(block));
    kvk_slot_own(cache, group, tier, slot, id);
    tiers_set(cache, group, id, (uint8_t)(block->tier_mask | 1U << tier));
    kvk_block_settle(cache, id);
}

void kvk_block_put_back(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier, uint32_t slot,
                        const uint64_t *checksums)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(kvk_block_is_whole(block) && is_indexed(block));
    kvk_slot_own(cache, group, tier, slot, id);
    memcpy(group->tiers[tier].checksums + (size_t)slot * group->shard_count, checksums,
           group->shard_count * sizeof(*checksums));
    tiers_set(cache, group, id, (uint8_t)(block->tier_mask | 1U << tier));
}

void kvk_block_relocate(struct kvk_cache *cache, uint32_t id, enum kvk_tier target, uint32_t slot)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    struct kvk_group *group = kvk_group_of(cache, block);
    enum kvk_tier source = kvk_block_tier(block);
    KVK_ASSERT(is_unsealed(block));
    KVK_ASSERT(source != target);
    kvk_slot_own(cache, group, target, slot, id);
    block->pin_count[target] = block->pin_count[source];
    block->pin_count[source] = 0;
    kvk_slot_disown(cache, group, source, id);
    kvk_block_settle(cache, id);
}

void kvk_block_reslot(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier, uint32_t slot,
                      const uint64_t *checksums)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(has_copy(block, tier));
    KVK_ASSERT(block->pin_count[tier] == 0);
    KVK_ASSERT(block->transfer_count == 0);
    kvk_slot_disown(cache, group, tier, id);
    kvk_slot_own(cache, group, tier, slot, id);
    memcpy(kvk_block_checksums(cache, block, tier), checksums,
           group->shard_count * sizeof(*checksums));
    kvk_sidecar_block_changed(cache, group, id);
    kvk_block_settle(cache, id);
}

void kvk_block_drop_copy(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier, bool evicted)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, id);
    struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(has_copy(block, tier));
    KVK_ASSERT(tier == KVK_TIER_DISK || block->hold_count == 0 ||
               (block->tier_mask & KVK_MEMORY_TIER_MASK & ~(1U << tier)) != 0);
    if (evicted) {
        cache->stats.evictions[tier]++;
        kvk_tenant_state_of(cache, group->space->tenant)->usage.evictions[tier]++;
    }
    if (block->tier_mask == 1U << tier) {
        KVK_ASSERT(block->hold_count == 0);
        if (evicted) {
            kvk_evict_forget(cache->evict, block);
        }
        block_forget(cache, group, id, evicted ? KVK_GONE_EVICTED : KVK_GONE_NONE);
        return;
    }
    if (evicted) {
        kvk_gone_note(cache, id, tier, (uint8_t)(block->tier_mask & ~(1U << tier)),
                      KVK_GONE_EVICTED);
    }
    queue_leave(block, id);
    copy_remove(cache, group, id, tier);
    kvk_block_settle(cache, id);
}

void kvk_block_discredit(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, id);
    if (!has_copy(block, tier)) {
        return; /* found out by another call before */
    }
    queue_leave(block, id);
    tiers_set(cache, kvk_group_of(cache, block), id, (uint8_t)(block->tier_mask & ~(1U << tier)));
    kvk_block_settle(cache, id);
}

void kvk_block_recredit(struct kvk_cache *cache, uint32_t id, enum kvk_tier tier,
                        const uint64_t *checksums)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_block *block = kvk_index_block(cache->index, id);
    struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(is_damaged(block, tier));
    queue_leave(block, id);
    memcpy(kvk_block_checksums(cache, block, tier), checksums,
           group->shard_count * sizeof(*checksums));
    tiers_set(cache, group, id, (uint8_t)(block->tier_mask | 1U << tier));
    kvk_block_settle(cache, id);
}

void kvk_block_seal(struct kvk_cache *cache, uint32_t id)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    if (block->state == KVK_BLOCK_RESERVED) {
        kvk_block_step(block, KVK_BLOCK_WRITE); /* written by a worker, unseen by the daemon */
    }
    enum kvk_tier tier = first_tier(block);
    kvk_block_step(block, KVK_BLOCK_SEAL);
    tiers_set(cache, kvk_group_of(cache, block), id, (uint8_t)(1U << tier));
    kvk_block_settle(cache, id);
}

/* `block` (sealed, private, one holder) ends; its bytes in memory, holder and pins are the
 * winner's, which has none there. What the holder is to the winner, `event` says. */
static void bytes_hand_over(struct kvk_cache *cache, uint32_t winner_id, uint32_t id,
                            enum kvk_block_event event)
{
    struct kvk_block *block = kvk_index_block(cache->index, id);
    struct kvk_block *winner = kvk_index_block(cache->index, winner_id);
    struct kvk_group *group = kvk_group_of(cache, block);
    KVK_ASSERT(winner->arena == block->arena);
    KVK_ASSERT(is_indexed(winner));
    KVK_ASSERT(!is_indexed(block));
    KVK_ASSERT(block->transfer_count == 0);
    KVK_ASSERT(block->queue == NULL);

    uint8_t mask = block->tier_mask;
    queue_leave(winner, winner_id);
    kvk_block_step(winner, event);
    winner->lease_hold_count += block->lease_hold_count;
    block->lease_hold_count = 0;
    tiers_set(cache, group, id, 0);
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        KVK_ASSERT(winner->slot[i] == KVK_SLOT_NONE);
        winner->slot[i] = block->slot[i];
        winner->pin_count[i] = block->pin_count[i];
        if (block->slot[i] != KVK_SLOT_NONE) {
            group->tiers[i].owners[block->slot[i]] = winner_id + 1;
        }
        block->slot[i] = KVK_SLOT_NONE;
        block->pin_count[i] = 0;
    }
    tiers_set(cache, group, winner_id, (uint8_t)(winner->tier_mask | mask));
    kvk_block_step(block, KVK_BLOCK_DISCARD);
    block_end(cache, group, id);
    kvk_block_settle(cache, winner_id);
}

void kvk_block_fill(struct kvk_cache *cache, uint32_t winner, uint32_t id)
{
    bytes_hand_over(cache, winner, id, KVK_BLOCK_FILL);
}

void kvk_block_adopt(struct kvk_cache *cache, uint32_t winner, uint32_t id)
{
    KVK_ASSERT(kvk_block_is_whole(kvk_index_block(cache->index, winner)));
    KVK_ASSERT(kvk_index_block(cache->index, id)->hold_count == 1);
    bytes_hand_over(cache, winner, id, KVK_BLOCK_HOLD);
}
