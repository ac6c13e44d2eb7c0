/*
 * Slots of the disk tier: who gets one, what goes for it, and the extents behind them.
 *
 * Free slots first, then extents from the budget, then copies that are worth least: those of blocks
 * that are on disk alone, else of blocks that are in memory too. A slot that becomes free so waits
 * for the removal of its record; so room is made a little ahead.
 */
#include "base/assert.h"
#include "base/log.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/room_internal.h"

#define FULL_NS (5 * KVK_NS_PER_SECOND) /* before a full file system is asked for extents again */
#define HAND_SLOTS 1024                 /* that one search looks at */
#define TREE_VISITS_MAX 4096
#define ANCESTORS_MAX 256
#define AHEAD_SHARE 32 /* of all slots so many are made free before they are needed */

/* ---- Leaving ---- */

static bool removal_queue(struct kvk_cache *cache, struct kvk_group *group, uint32_t slot)
{
    return kvk_catalogue_block_remove(cache->catalogue, group->space->id, group->index, slot,
                                      &group->disk->leave_tickets[slot]) == KVK_OK;
}

void kvk_disk_slot_leave(struct kvk_cache *cache, struct kvk_group *group, uint32_t slot)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_disk_tier *tier = cache->disk_tier;
    struct kvk_disk_group *at = group->disk;
    if (cache->catalogue == NULL || tier->closing) {
        kvk_slot_retire(cache, group, slot);
        return;
    }
    at->leave_tickets[slot] = 0;
    at->leave_next[slot] = 0;
    if (at->leave_last == 0) {
        at->leave_first = slot + 1;
    } else {
        at->leave_next[at->leave_last - 1] = slot + 1;
    }
    at->leave_last = slot + 1;
    at->leaving_count++;
    tier->leaving_count++;
    (void)removal_queue(cache, group, slot); /* where the queue is full: in a later round */
}

static void leaving_settle(struct kvk_cache *cache, struct kvk_group *group, uint64_t done)
{
    struct kvk_disk_group *at = group->disk;
    while (at->leave_first != 0) {
        uint32_t slot = at->leave_first - 1;
        if (at->leave_tickets[slot] == 0 || at->leave_tickets[slot] > done) {
            break;
        }
        at->leave_first = at->leave_next[slot];
        if (at->leave_first == 0) {
            at->leave_last = 0;
        }
        at->leaving_count--;
        cache->disk_tier->leaving_count--;
        kvk_slot_retire(cache, group, slot);
    }
    for (uint32_t next = at->leave_first; next != 0; next = at->leave_next[next - 1]) {
        if (at->leave_tickets[next - 1] == 0 && !removal_queue(cache, group, next - 1)) {
            return;
        }
    }
}

void kvk_disk_leaving_settle(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (cache->disk_tier->leaving_count == 0) {
        return;
    }
    uint64_t done = kvk_catalogue_committed(cache->catalogue);
    uint32_t number = 0;
    struct kvk_group *group;
    while ((group = kvk_room_next_group(cache, KVK_TIER_DISK, &number)) != NULL) {
        leaving_settle(cache, group, done);
    }
}

uint32_t kvk_disk_leaving_check(const struct kvk_cache *cache, const struct kvk_group *group)
{
    const struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    uint32_t count = 0;
    uint32_t last = 0;
    for (uint32_t next = group->disk->leave_first; next != 0;
         next = group->disk->leave_next[next - 1]) {
        KVK_ASSERT(at->owners[next - 1] == 0);
        KVK_ASSERT(kvk_arena_is_used(&at->arena, next - 1));
        KVK_ASSERT(count < at->arena.used_count); /* no ring */
        last = next;
        count++;
    }
    KVK_ASSERT(last == group->disk->leave_last);
    KVK_ASSERT(count == group->disk->leaving_count);
    KVK_ASSERT(count <= cache->disk_tier->leaving_count);
    return count;
}

/* ---- Eviction ---- */

static bool may_drop(const struct kvk_group *group, const struct kvk_block *block)
{
    return kvk_disk_is_on_disk(block) && block->pin_count[KVK_TIER_DISK] == 0 &&
           block->transfer_count == 0 && kvk_block_is_whole(block) &&
           (group->windowed || block->disk_children == 0) &&
           (kvk_disk_is_memory(block) || block->hold_count == 0);
}

/* A copy of a block that is in memory too, where every copy on disk is: looked for by a hand that
 * goes round. */
static uint32_t hand_victim(struct kvk_cache *cache, struct kvk_group *group, uint32_t keep)
{
    const struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    uint32_t slots = at->arena.place_fresh * at->arena.slab_slots;
    for (uint32_t i = 0; i < slots && i < HAND_SLOTS; i++) {
        group->disk->hand = group->disk->hand + 1 < slots ? group->disk->hand + 1 : 0;
        uint32_t owner = at->owners[group->disk->hand];
        if (owner != 0 && owner - 1 != keep &&
            may_drop(group, kvk_index_block(cache->index, owner - 1))) {
            return owner - 1;
        }
    }
    return KVK_BLOCK_NONE;
}

/* The block on disk that the candidate would hang from there: it stays, or the candidate could not
 * come, and the two would drive each other out for ever. */
static uint32_t ancestor_on_disk(const struct kvk_cache *cache, const struct kvk_group *group,
                                 const struct kvk_block *candidate)
{
    uint32_t id = group->windowed ? KVK_BLOCK_NONE : candidate->parent;
    for (uint32_t i = 0; i < ANCESTORS_MAX && id != KVK_BLOCK_NONE; i++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (kvk_disk_is_on_disk(block)) {
            return id;
        }
        id = block->parent;
    }
    return KVK_BLOCK_NONE;
}

/* Of two blocks of one request the deeper goes first, so no chain chases its own tail. */
static bool evict_one(struct kvk_cache *cache, struct kvk_group *group,
                      const struct kvk_block *candidate, uint32_t keep)
{
    uint32_t victim =
        kvk_evict_queue_peek(&group->tiers[KVK_TIER_DISK].queue, kvk_policy_now(cache), NULL);
    if (victim == KVK_BLOCK_NONE || victim == keep) {
        victim = hand_victim(cache, group, keep);
    }
    if (victim == KVK_BLOCK_NONE ||
        kvk_index_block(cache->index, victim)->order >= candidate->order) {
        return false;
    }
    kvk_block_drop_copy(cache, victim, KVK_TIER_DISK, true);
    return true;
}

static uint64_t slots_to_have(const struct kvk_cache *cache, const struct kvk_group *group)
{
    const struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    uint64_t slots = kvk_room_free_slots(group, KVK_TIER_DISK);
    if (kvk_clock_now(cache->clock) >= cache->disk_tier->full_until_ns) {
        slots += kvk_pool_free_bytes(&cache->tiers[KVK_TIER_DISK].pool) / at->arena.slot_bytes;
    }
    uint64_t allowed =
        kvk_quota_left(cache, group->space->tenant, KVK_TIER_DISK) / at->arena.slot_bytes;
    return (slots < allowed ? slots : allowed) + group->disk->leaving_count;
}

/* A child that is on disk, below which nothing is. */
static uint32_t disk_leaf(const struct kvk_cache *cache, uint32_t top, uint32_t *visits)
{
    uint32_t leaf = top;
    while (kvk_index_block(cache->index, leaf)->disk_children > 0 && *visits < TREE_VISITS_MAX) {
        uint32_t child = kvk_index_first_child(cache->index, KVK_ROOT_NONE, leaf);
        while (!kvk_disk_is_on_disk(kvk_index_block(cache->index, child))) {
            child = kvk_index_next_child(cache->index, child);
            (*visits)++;
        }
        leaf = child;
        (*visits)++;
    }
    return leaf;
}

/* Drop the copies of a slab, and of what hangs below them on disk. False: something stays. */
static bool slab_clear(struct kvk_cache *cache, struct kvk_group *group, uint32_t number)
{
    const struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    const struct kvk_slab *slab = &at->arena.slabs[number];
    uint32_t visits = 0;
    for (uint32_t i = 0; i < slab->slot_count; i++) {
        uint32_t owner;
        while ((owner = at->owners[slab->first_slot + i]) != 0) {
            uint32_t leaf = group->windowed ? owner - 1 : disk_leaf(cache, owner - 1, &visits);
            if (visits >= TREE_VISITS_MAX ||
                !may_drop(group, kvk_index_block(cache->index, leaf))) {
                return false;
            }
            kvk_block_drop_copy(cache, leaf, KVK_TIER_DISK, true);
        }
    }
    return true;
}

/* Another group has far more than this one, which finds no room: one slab of it goes, that of its
 * next victim. */
static void slab_claim(struct kvk_cache *cache, const struct kvk_group *group)
{
    struct kvk_group *giver = NULL;
    uint32_t number = 0;
    struct kvk_group *other;
    while ((other = kvk_room_next_group(cache, KVK_TIER_DISK, &number)) != NULL) {
        const struct kvk_group_tier *at = &other->tiers[KVK_TIER_DISK];
        uint64_t slab_bytes = at->arena.slab_slots * at->arena.slot_bytes;
        bool larger = at->arena.slot_count * at->arena.slot_bytes >
                      group->tiers[KVK_TIER_DISK].used_bytes + slab_bytes;
        /* What another tenant is guaranteed is not taken from it. */
        larger =
            larger && (other->space->tenant == group->space->tenant ||
                       kvk_quota_spare(cache, other->space->tenant, KVK_TIER_DISK) >= slab_bytes);
        if (other != group && larger && other->disk->leaving_count == 0 &&
            (giver == NULL || at->used_bytes > giver->tiers[KVK_TIER_DISK].used_bytes)) {
            giver = other;
        }
    }
    if (giver == NULL) {
        return;
    }
    cache->disk_tier->slab_wanted = true;
    if (kvk_arena_empty_slab(&giver->tiers[KVK_TIER_DISK].arena) != KVK_SLAB_NONE) {
        return;
    }
    const struct kvk_group_tier *at = &giver->tiers[KVK_TIER_DISK];
    uint32_t victim =
        kvk_evict_queue_peek(&giver->tiers[KVK_TIER_DISK].queue, kvk_policy_now(cache), NULL);
    if (victim == KVK_BLOCK_NONE) {
        victim = hand_victim(cache, giver, KVK_BLOCK_NONE);
    }
    if (victim != KVK_BLOCK_NONE) {
        uint32_t slot = kvk_index_block(cache->index, victim)->slot[KVK_TIER_DISK];
        (void)slab_clear(cache, giver, kvk_arena_slab_of(&at->arena, slot));
    }
}

void kvk_disk_evict(struct kvk_cache *cache, struct kvk_group *group, uint32_t candidate)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_block *block = kvk_index_block(cache->index, candidate);
    uint64_t slots =
        cache->tiers[KVK_TIER_DISK].pool.limit_bytes / group->tiers[KVK_TIER_DISK].arena.slot_bytes;
    uint64_t count = slots / AHEAD_SHARE + 1;
    count = count < KVK_DISK_BATCH_BLOCKS ? count : KVK_DISK_BATCH_BLOCKS;
    uint32_t keep = ancestor_on_disk(cache, group, block);
    for (uint32_t i = 0; i < count && slots_to_have(cache, group) < count; i++) {
        if (!evict_one(cache, group, block, keep)) {
            break;
        }
    }
    if (slots_to_have(cache, group) == 0) {
        slab_claim(cache, group);
    }
}

/* Bytes of the tenant's that leave, once their records are gone. */
static uint64_t leaving_bytes(const struct kvk_tenant_state *state)
{
    uint64_t bytes = 0;
    for (const struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            const struct kvk_group *group = space->groups[g];
            if (group->tiers[KVK_TIER_DISK].present) {
                bytes += group->disk->leaving_count * group->tiers[KVK_TIER_DISK].arena.slot_bytes;
            }
        }
    }
    return bytes;
}

/* The least worth of all groups of the tenant that have some queued; else whatever may go. */
static uint32_t tenant_victim(struct kvk_cache *cache, const struct kvk_tenant_state *state)
{
    uint32_t victim = KVK_BLOCK_NONE;
    double least = 0;
    uint64_t now = kvk_policy_now(cache);
    for (const struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            double score;
            struct kvk_group_tier *at = &space->groups[g]->tiers[KVK_TIER_DISK];
            uint32_t head =
                at->present ? kvk_evict_queue_peek(&at->queue, now, &score) : KVK_BLOCK_NONE;
            if (head != KVK_BLOCK_NONE && (victim == KVK_BLOCK_NONE || score < least)) {
                victim = head;
                least = score;
            }
        }
    }
    for (const struct kvk_space *space = state->spaces; space != NULL && victim == KVK_BLOCK_NONE;
         space = space->tenant_next) {
        for (uint32_t g = 0; g < space->group_count && victim == KVK_BLOCK_NONE; g++) {
            if (space->groups[g]->tiers[KVK_TIER_DISK].present) {
                victim = hand_victim(cache, space->groups[g], KVK_BLOCK_NONE);
            }
        }
    }
    return victim;
}

void kvk_disk_trim(struct kvk_cache *cache, struct kvk_tenant_state *state, uint32_t count)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint64_t limit = state->quota.limit_bytes[KVK_TIER_DISK];
    const uint64_t *used = cache->tiers[KVK_TIER_DISK].tenant_bytes;
    if (limit == 0 || used == NULL || cache->disk_tier == NULL) {
        return;
    }
    for (uint32_t i = 0; i < count && used[state->tenant->index] > limit + leaving_bytes(state);
         i++) {
        uint32_t victim = tenant_victim(cache, state);
        if (victim == KVK_BLOCK_NONE) {
            return;
        }
        state->usage.limit_evictions++;
        kvk_gone_begin(cache, KVK_GONE_QUOTA, NULL);
        kvk_block_drop_copy(cache, victim, KVK_TIER_DISK, true);
        kvk_gone_end(cache);
    }
}

/* ---- Extents ---- */

enum kvk_status kvk_disk_file_open_drops(struct kvk_cache *cache, struct kvk_group *group)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_arena *arena = &group->tiers[KVK_TIER_DISK].arena;
    struct kvk_disk_file *file = NULL;
    struct kvk_error error;
    if (group->disk->file != NULL) {
        return KVK_OK;
    }
    group->space->reference_count++;
    kvk_unlock(&cache->lock);
    enum kvk_status status =
        kvk_disk_file_open(cache->disk, group->space->id, group->index, arena->slot_bytes,
                           kvk_arena_slot_capacity(arena), &file, &error);
    kvk_lock(&cache->lock);
    group->space->reference_count--;
    if (status != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "disk_file_not_opened", "space=%llu group=%u text=\"%s\"",
                (unsigned long long)group->space->id, group->index, error.text);
        return status;
    }
    KVK_ASSERT(group->disk->file == NULL); /* one thread opens files */
    group->disk->file = file;
    return KVK_OK;
}

/* Extents for `slots` slots of a place. */
static enum kvk_status back_drops(struct kvk_cache *cache, struct kvk_group *group, uint32_t place,
                                  uint32_t slots)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    struct kvk_error error;
    enum kvk_status status = kvk_disk_file_open_drops(cache, group);
    if (status != KVK_OK) {
        return status;
    }
    group->space->reference_count++;
    at->backing_count++;
    kvk_unlock(&cache->lock);
    kvk_disk_hook_unlocked(cache->disk_tier);
    status = kvk_disk_file_allocate(group->disk->file, place * at->arena.slab_slots, slots, &error);
    kvk_lock(&cache->lock);
    at->backing_count--;
    group->space->reference_count--;
    if (status == KVK_OK) {
        at->places[place] = slots;
        return KVK_OK;
    }
    cache->disk_tier->full_until_ns = kvk_clock_now(cache->clock) + FULL_NS;
    cache->stats.disk_extent_failures++;
    kvk_log(KVK_LOG_WARNING, "disk_extent_refused", "space=%llu text=\"%s\"",
            (unsigned long long)group->space->id, error.text);
    return status;
}

/* One more slab of the budget. KVK_EXHAUSTED: there is none to be had. */
static enum kvk_status grow_drops(struct kvk_cache *cache, struct kvk_group *group)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    uint64_t fitting =
        kvk_pool_free_bytes(&cache->tiers[KVK_TIER_DISK].pool) / at->arena.slot_bytes;
    uint32_t place = kvk_arena_next_place(&at->arena);
    if (fitting == 0 || place == KVK_SLAB_NONE || at->places[place] == KVK_PLACE_LEAVING ||
        kvk_clock_now(cache->clock) < cache->disk_tier->full_until_ns) {
        return KVK_EXHAUSTED;
    }
    uint32_t slots = fitting < at->arena.slab_slots ? (uint32_t)fitting : at->arena.slab_slots;
    if (at->places[place] < slots) {
        return back_drops(cache, group, place, slots);
    }
    return kvk_room_grow(cache, group, KVK_TIER_DISK, place) ? KVK_OK : KVK_EXHAUSTED;
}

enum kvk_status kvk_disk_slot_get_drops(struct kvk_cache *cache, struct kvk_group *group,
                                        uint32_t *slot)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    for (;;) {
        *slot = kvk_slot_take(cache, group, KVK_TIER_DISK);
        if (*slot != KVK_SLOT_NONE) {
            return KVK_OK;
        }
        if (kvk_room_free_slots(group, KVK_TIER_DISK) > 0) {
            return KVK_EXHAUSTED; /* the tenant's limit */
        }
        enum kvk_status status = grow_drops(cache, group);
        if (status != KVK_OK) {
            return status;
        }
    }
}

/* ---- Giving back ---- */

/* Slabs that stand empty go, where somebody else could use their budget. */
static void empty_give(struct kvk_cache *cache, struct kvk_group *group)
{
    const struct kvk_arena *arena = &group->tiers[KVK_TIER_DISK].arena;
    uint32_t slab;
    while ((cache->disk_tier->slab_wanted || arena->used_count == 0) &&
           (slab = kvk_arena_empty_slab(arena)) != KVK_SLAB_NONE) {
        if (!kvk_room_slab_leave(cache, group, KVK_TIER_DISK, slab)) {
            return;
        }
        cache->disk_tier->slab_wanted = false;
    }
}

static struct kvk_punch *punch_take(struct kvk_cache *cache)
{
    struct kvk_punch **link = &cache->punches;
    while (*link != NULL && (*link)->tier != KVK_TIER_DISK) {
        link = &(*link)->next;
    }
    return *link;
}

void kvk_disk_punch_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t number = 0;
    struct kvk_group *group;
    while ((group = kvk_room_next_group(cache, KVK_TIER_DISK, &number)) != NULL) {
        empty_give(cache, group);
    }
    struct kvk_punch *punch;
    while ((punch = punch_take(cache)) != NULL) {
        const struct kvk_arena *arena = &punch->group->tiers[KVK_TIER_DISK].arena;
        struct kvk_error error;
        punch->under_way = true;
        kvk_unlock(&cache->lock);
        enum kvk_status status = kvk_disk_file_punch(
            punch->group->disk->file, punch->slab * arena->slab_slots, arena->slab_slots, &error);
        kvk_lock(&cache->lock);
        punch->under_way = false;
        if (status != KVK_OK) {
            kvk_log(KVK_LOG_DEBUG, "disk_punch_failed", "text=\"%s\"", error.text);
            return; /* still charged: a later round tries again */
        }
        kvk_tier_punch_end(cache, punch);
    }
}
