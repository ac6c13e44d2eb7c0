/*
 * Every law of the engine, recounted from nothing: what holders there are, what each block must
 * look like, and what all counters must then say. For tests; aborts on a breach.
 *
 * It goes by the rules as they are written in the headers and shares no code with what keeps the
 * counters, so that one does not hide the other's mistakes.
 */
#include <stdlib.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "daemon/cache_internal.h"
#include "daemon/sidecar.h"

/* What was found out about a block by asking its holders. */
struct found {
    uint32_t holds;
    uint32_t lease_holds;
    uint32_t anchors;
    uint32_t pins[KVK_TIER_COUNT];
    bool quarantined;
};

struct tier_sums {
    uint64_t used, bound, leased, copying, quarantine, growth, punch, stray;
};

struct check {
    struct kvk_cache *cache;
    struct found *found; /* [id_end] */
    uint32_t id_end;
    struct tier_sums tiers[KVK_TIER_COUNT];
    uint64_t excess_holds; /* of calls that nobody lists: they are under way */
    uint64_t excess_pins;
    uint64_t (*tenant_bound)[KVK_TIER_COUNT]; /* [KVK_TENANT_COUNT_MAX] */
};

static bool has_bit(uint8_t mask, int tier)
{
    return (mask & (1U << tier)) != 0;
}

static bool is_indexed(const struct kvk_block *block)
{
    return block->run != UINT32_MAX;
}

static bool is_unsealed(const struct kvk_block *block)
{
    return block->state == KVK_BLOCK_RESERVED || block->state == KVK_BLOCK_ACTIVE;
}

/* ---- Holders ---- */

static struct found *found_of(struct check *check, uint32_t id)
{
    KVK_ASSERT(id < check->id_end);
    KVK_ASSERT(kvk_index_block(check->cache->index, id)->state != KVK_BLOCK_FREE);
    return &check->found[id];
}

static void add_pin(struct found *found, uint8_t pin)
{
    if (pin != 0) {
        KVK_ASSERT(pin <= KVK_MEMORY_TIER_COUNT);
        found->pins[pin - 1]++;
    }
}

static void walk_sequence(struct check *check, const struct kvk_sequence *sequence)
{
    for (uint32_t g = 0; g < sequence->space->group_count; g++) {
        const struct kvk_sequence_group *table = &sequence->groups[g];
        for (uint32_t i = 0; i < table->block_count; i++) {
            if (table->blocks[i] == KVK_BLOCK_NONE) {
                continue;
            }
            struct found *found = found_of(check, table->blocks[i]);
            const struct kvk_block *block = kvk_index_block(check->cache->index, table->blocks[i]);
            KVK_ASSERT(block->arena == sequence->space->groups[g]->number ||
                       kvk_block_is_public(check->cache, table->blocks[i]));
            found->holds++;
            add_pin(found, table->pins[i]);
        }
        if (table->cursor.block != KVK_BLOCK_NONE && table->root != KVK_ROOT_NONE) {
            found_of(check, table->cursor.block)->anchors++;
            KVK_ASSERT(!table->detached);
        }
    }
    check->tiers[sequence->home].growth += sequence->growth_bytes;
}

static void walk_lease(struct check *check, const struct kvk_lease *lease)
{
    for (uint32_t g = 0; g < lease->space->group_count; g++) {
        const struct kvk_lease_group *table = &lease->groups[g];
        for (uint32_t i = 0; i < table->block_count; i++) {
            if (table->blocks[i] == KVK_BLOCK_NONE) {
                continue;
            }
            struct found *found = found_of(check, table->blocks[i]);
            found->holds++;
            found->lease_holds++;
            add_pin(found, table->pins[i]);
        }
    }
}

static void walk_session(struct check *check, const struct kvk_session *session)
{
    for (const struct kvk_transfer *transfer = session->transfers; transfer != NULL;
         transfer = transfer->next) {
        for (uint32_t i = 0; i < transfer->pin_count; i++) {
            struct found *found = found_of(check, transfer->pins[i].block);
            found->holds++;
            found->pins[transfer->pins[i].tier]++;
        }
    }
    for (uint32_t i = 0; i < session->quarantine_count; i++) {
        uint32_t id = session->quarantine[i];
        const struct kvk_block *block = kvk_index_block(check->cache->index, id);
        struct found *found = found_of(check, id);
        KVK_ASSERT(is_unsealed(block));
        found->quarantined = true; /* several may wait for their processes */
        found->holds++;
        found->pins[kvk_block_tier(block)]++;
    }
}

static void walk_publications(struct check *check)
{
    uint32_t count = 0;
    for (const struct kvk_publication *p = check->cache->publications; p != NULL; p = p->next) {
        KVK_ASSERT(p->space->is_public && p->space->reference_count > 0);
        for (uint32_t g = 0; g < p->space->group_count; g++) {
            for (uint32_t i = 0; i < p->block_count; i++) {
                uint32_t id = p->blocks[g][i];
                if (id == KVK_BLOCK_NONE) {
                    continue;
                }
                const struct kvk_block *block = kvk_index_block(check->cache->index, id);
                KVK_ASSERT(block->arena == p->space->groups[g]->number);
                KVK_ASSERT(kvk_block_is_whole(block) && !is_indexed(block));
                found_of(check, id)->holds++;
                add_pin(found_of(check, id), KVK_TIER_HOST + 1);
            }
        }
        count++;
    }
    KVK_ASSERT(count <= check->cache->publication_count); /* some are being made */
}

static void walk_holders(struct check *check)
{
    struct kvk_cache *cache = check->cache;
    walk_publications(check);
    uint32_t sequences = 0;
    uint32_t leases = 0;
    uint32_t instances = 0;
    for (const struct kvk_instance *instance = cache->instances; instance != NULL;
         instance = instance->next) {
        uint32_t sequences_before = sequences;
        uint32_t leases_before = leases;
        for (const struct kvk_sequence *sequence = instance->sequences; sequence != NULL;
             sequence = sequence->next) {
            KVK_ASSERT(kvk_table_get(&cache->sequence_table, sequence->id) == sequence);
            walk_sequence(check, sequence);
            sequences++;
        }
        for (const struct kvk_lease *lease = instance->leases; lease != NULL; lease = lease->next) {
            KVK_ASSERT(kvk_table_get(&cache->lease_table, lease->id) == lease);
            walk_lease(check, lease);
            leases++;
        }
        KVK_ASSERT(sequences - sequences_before == instance->sequence_count);
        KVK_ASSERT(leases - leases_before == instance->lease_count);
        instances++;
    }
    KVK_ASSERT(instances == cache->instance_count);
    KVK_ASSERT(sequences == cache->sequence_table.count);
    KVK_ASSERT(leases == cache->lease_table.count);
    size_t place = 0;
    const struct kvk_table_entry *entry;
    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        walk_session(check, kvk_table_get(&cache->session_table, entry->key));
    }
}

/* ---- Blocks ---- */

static void check_references(struct check *check, uint32_t id, const struct kvk_block *block)
{
    const struct found *found = &check->found[id];
    KVK_ASSERT(block->hold_count >= found->holds);
    KVK_ASSERT(block->lease_hold_count == found->lease_holds);
    KVK_ASSERT(block->anchor_count >= found->anchors);
    KVK_ASSERT(((block->flags & KVK_BLOCK_QUARANTINED) != 0) == found->quarantined);
    check->excess_holds += block->hold_count - found->holds;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        KVK_ASSERT(block->pin_count[i] >= found->pins[i]);
        KVK_ASSERT(block->pin_count[i] == 0 || block->slot[i] != KVK_SLOT_NONE);
        check->excess_pins += block->pin_count[i] - found->pins[i];
    }
}

static void check_state(const struct check *check, uint32_t id, const struct kvk_block *block)
{
    const struct kvk_cache *cache = check->cache;
    uint32_t slots = 0;
    /* Whoever holds a block reads it in memory; but for those who are bringing it back. */
    bool in_memory = block->slot[KVK_TIER_DEVICE] != KVK_SLOT_NONE ||
                     block->slot[KVK_TIER_HOST] != KVK_SLOT_NONE;
    KVK_ASSERT(in_memory || block->hold_count == 0 || cache->passing_holds > 0);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        slots += block->slot[i] != KVK_SLOT_NONE;
        KVK_ASSERT(!has_bit(block->tier_mask, i) || block->slot[i] != KVK_SLOT_NONE);
        bool damaged = kvk_block_is_whole(block) && block->slot[i] != KVK_SLOT_NONE &&
                       !has_bit(block->tier_mask, i);
        /* Damaged bytes stay only for who pins them, copies them or has nothing else. */
        KVK_ASSERT(!damaged || block->pin_count[i] > 0 || block->transfer_count > 0 ||
                   (i < KVK_MEMORY_TIER_COUNT && block->hold_count > 0 &&
                    (block->tier_mask & KVK_MEMORY_TIER_MASK) == 0));
    }
    switch ((enum kvk_block_state)block->state) {
    case KVK_BLOCK_RESERVED:
    case KVK_BLOCK_ACTIVE:
        KVK_ASSERT(slots == 1 && block->tier_mask == 0);
        KVK_ASSERT(!is_indexed(block));
        KVK_ASSERT(block->hold_count > 0);
        break;
    case KVK_BLOCK_SEALED:
        KVK_ASSERT((slots > 0 || cache->passing_holds > 0) && block->hold_count == 1);
        break;
    case KVK_BLOCK_SHARED:
        KVK_ASSERT((slots > 0 || cache->passing_holds > 0) && block->hold_count > 1);
        break;
    case KVK_BLOCK_EVICTABLE:
        KVK_ASSERT(slots > 0 && block->hold_count == 0);
        KVK_ASSERT(block->tier_mask != 0 || block->transfer_count > 0);
        KVK_ASSERT(is_indexed(block));
        KVK_ASSERT(block->pin_count[0] == 0 && block->pin_count[1] == 0 &&
                   block->pin_count[2] == 0);
        KVK_ASSERT(cache->purge_wanted ||
                   kvk_root_is_current(cache, kvk_index_root_of(cache->index, id)));
        break;
    case KVK_BLOCK_HOLLOW:
        KVK_ASSERT(slots == 0 && block->hold_count == 0 && block->transfer_count == 0);
        KVK_ASSERT(is_indexed(block));
        KVK_ASSERT(block->child_count > 0 || block->anchor_count > 0);
        break;
    case KVK_BLOCK_FREE:
        KVK_UNREACHABLE();
    }
}

/* Bound: unsealed, or pinned there, or copying, or held where nothing else can serve. */
static bool should_be_bound(const struct kvk_cache *cache, const struct kvk_group *group,
                            uint32_t id, const struct kvk_block *block, int tier)
{
    if (block->slot[tier] == KVK_SLOT_NONE) {
        return false;
    }
    if (is_unsealed(block) || block->pin_count[tier] > 0 || block->transfer_count > 0) {
        return true;
    }
    bool current =
        is_indexed(block) && kvk_root_is_current(cache, kvk_index_root_of(cache->index, id));
    if (block->hold_count > 0 && tier == KVK_TIER_DEVICE && kvk_group_is_compact_below(group)) {
        return true;
    }
    bool can_demote = tier == KVK_TIER_DEVICE && group->tiers[KVK_TIER_HOST].present && current &&
                      has_bit(block->tier_mask, tier);
    bool sole_copy = !has_bit(block->tier_mask, 1 - tier);
    return block->hold_count > 0 && sole_copy && !can_demote;
}

static void sum_block(struct check *check, const struct kvk_group *group, uint32_t id,
                      const struct kvk_block *block)
{
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        struct tier_sums *sums = &check->tiers[i];
        if (block->slot[i] != KVK_SLOT_NONE) {
            sums->used += group->tiers[i].arena.slot_bytes;
        }
        if (i >= KVK_MEMORY_TIER_COUNT || !should_be_bound(check->cache, group, id, block, i)) {
            continue;
        }
        sums->bound += group->forms[i].block_bytes;
        check->tenant_bound[group->space->tenant->index][i] += group->forms[i].block_bytes;
        if (check->found[id].quarantined) {
            sums->quarantine += group->forms[i].block_bytes;
        } else if (block->transfer_count > 0) {
            sums->copying += group->forms[i].block_bytes;
        } else if (block->hold_count > 0 && block->hold_count == block->lease_hold_count) {
            sums->leased += group->forms[i].block_bytes;
        }
    }
}

static struct kvk_evict_queue *expected_queue(struct kvk_group *group,
                                              const struct kvk_block *block, bool current)
{
    bool on_device = has_bit(block->tier_mask, KVK_TIER_DEVICE);
    bool on_host = has_bit(block->tier_mask, KVK_TIER_HOST);
    bool on_disk = has_bit(block->tier_mask, KVK_TIER_DISK);
    if (!kvk_block_is_whole(block) || !current || block->transfer_count > 0) {
        return NULL;
    }
    if (on_device) {
        if (block->pin_count[KVK_TIER_DEVICE] > 0 ||
            (block->device_children > 0 && !group->windowed)) {
            return NULL;
        }
        if (block->hold_count > 0 && kvk_group_is_compact_below(group)) {
            return NULL;
        }
        if (on_host) {
            return &group->tiers[KVK_TIER_DEVICE].clean;
        }
        if (block->hold_count == 0) {
            return on_disk && !group->tiers[KVK_TIER_HOST].present
                       ? &group->tiers[KVK_TIER_DEVICE].clean
                       : &group->tiers[KVK_TIER_DEVICE].queue;
        }
        return group->tiers[KVK_TIER_HOST].present ? &group->tiers[KVK_TIER_DEVICE].held : NULL;
    }
    bool leaf = block->memory_children == 0 || group->windowed;
    if (on_host) {
        bool goes = block->hold_count == 0 && block->pin_count[KVK_TIER_HOST] == 0 && leaf;
        struct kvk_group_tier *host = &group->tiers[KVK_TIER_HOST];
        return !goes ? NULL : on_disk ? &host->clean : &host->queue;
    }
    leaf = leaf && (block->disk_children == 0 || group->windowed);
    bool goes = on_disk && block->hold_count == 0 && block->pin_count[KVK_TIER_DISK] == 0 && leaf;
    return goes ? &group->tiers[KVK_TIER_DISK].queue : NULL;
}

static void check_queue(const struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                        const struct kvk_block *block)
{
    bool current =
        is_indexed(block) && kvk_root_is_current(cache, kvk_index_root_of(cache->index, id));
    if (!current && cache->purge_wanted && is_indexed(block)) {
        return; /* until the sweep comes by, it is in whichever it was in */
    }
    KVK_ASSERT(block->queue == expected_queue(group, block, current));
}

static void check_slots(const struct kvk_group *group, uint32_t id, const struct kvk_block *block)
{
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        if (block->slot[i] != KVK_SLOT_NONE) {
            const struct kvk_group_tier *at = &group->tiers[i];
            KVK_ASSERT(at->present);
            KVK_ASSERT(kvk_arena_is_used(&at->arena, block->slot[i]));
            KVK_ASSERT(at->owners[block->slot[i]] == id + 1);
        }
    }
}

/* ---- Groups ---- */

static void check_places(const struct kvk_cache *cache, const struct kvk_group *group, int tier)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    uint32_t leaving = 0;
    for (uint32_t i = 0; i < at->arena.slab_capacity; i++) {
        uint32_t slots = at->arena.slabs[i].slot_count;
        leaving += at->places[i] == KVK_PLACE_LEAVING;
        KVK_ASSERT(at->places[i] == KVK_PLACE_LEAVING ? slots == 0 : at->places[i] >= slots);
    }
    for (const struct kvk_punch *punch = cache->punches; punch != NULL; punch = punch->next) {
        if (punch->group == group && (int)punch->tier == tier) {
            KVK_ASSERT(at->places[punch->slab] == KVK_PLACE_LEAVING);
            leaving--;
        }
    }
    KVK_ASSERT(leaving == 0);
}

static void check_group_tier(struct check *check, const struct kvk_group *group, int tier)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    uint32_t owned = 0;
    uint32_t slot_end = kvk_arena_slot_capacity(&at->arena);
    for (uint32_t slot = 0; slot < slot_end; slot++) {
        if (at->owners[slot] == 0) {
            continue;
        }
        const struct kvk_block *block = kvk_index_block(check->cache->index, at->owners[slot] - 1);
        KVK_ASSERT(block->arena == group->number);
        KVK_ASSERT(block->slot[tier] == slot);
        owned++;
    }
    uint32_t leaving = tier == KVK_TIER_DISK ? kvk_disk_leaving_check(check->cache, group) : 0;
    KVK_ASSERT(owned + at->loose_count + leaving == at->arena.used_count);
    KVK_ASSERT(at->used_bytes == at->arena.used_count * at->arena.slot_bytes);
    uint64_t loose = at->loose_count * at->arena.slot_bytes;
    check->tiers[tier].used += loose + leaving * at->arena.slot_bytes;
    check->tiers[tier].bound += loose;
    check->tenant_bound[group->space->tenant->index][tier] += loose;
    check->tiers[tier].copying += loose;
    check->tiers[tier].stray += at->stray_bytes;
    check_places(check->cache, group, tier);
}

/* Blocks by state and tier, and members of queues, of one group. */
struct group_sums {
    uint64_t states[KVK_BLOCK_STATE_COUNT];
    uint64_t tiers[KVK_TIER_COUNT];
    uint32_t queues[KVK_TIER_COUNT][3];
};

static void check_group_sums(const struct kvk_group *group, const struct group_sums *sums)
{
    for (int i = 0; i < KVK_BLOCK_STATE_COUNT; i++) {
        KVK_ASSERT(group->state_counts[i] == sums->states[i]);
    }
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        const struct kvk_group_tier *at = &group->tiers[i];
        KVK_ASSERT(group->tier_blocks[i] == sums->tiers[i]);
        if (at->present) {
            KVK_ASSERT(kvk_evict_queue_count(&at->queue) == sums->queues[i][0]);
            KVK_ASSERT(kvk_evict_queue_count(&at->clean) == sums->queues[i][1]);
            KVK_ASSERT(kvk_evict_queue_count(&at->held) == sums->queues[i][2]);
        }
    }
}

static void add_to_group(struct group_sums *sums, const struct kvk_group *group,
                         const struct kvk_block *block)
{
    sums->states[block->state]++;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        const struct kvk_group_tier *at = &group->tiers[i];
        sums->tiers[i] += has_bit(block->tier_mask, i);
        sums->queues[i][0] += block->queue == &at->queue;
        sums->queues[i][1] += block->queue == &at->clean;
        sums->queues[i][2] += block->queue == &at->held;
    }
}

static void check_blocks(struct check *check)
{
    struct kvk_cache *cache = check->cache;
    struct group_sums *sums = calloc(cache->group_end + 1u, sizeof(*sums));
    KVK_ASSERT(sums != NULL);
    uint32_t count = 0;
    for (uint32_t id = 0; id < check->id_end; id++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (block->state == KVK_BLOCK_FREE) {
            continue;
        }
        struct kvk_group *group = kvk_group_of(cache, block);
        check_references(check, id, block);
        check_state(check, id, block);
        check_slots(group, id, block);
        check_queue(cache, group, id, block);
        sum_block(check, group, id, block);
        add_to_group(&sums[group->number], group, block);
        count++;
    }
    KVK_ASSERT(count == kvk_index_block_count(cache->index));
    for (uint32_t number = 0; number < cache->group_end; number++) {
        if (cache->groups[number] != NULL) {
            KVK_ASSERT(cache->groups[number]->number == number);
            check_group_sums(cache->groups[number], &sums[number]);
        }
    }
    free(sums);
}

/* ---- Tiers and spaces ---- */

static void check_tenants(const struct kvk_cache *cache, int tier)
{
    uint32_t tenant_count = kvk_tenants_count(cache->tenants);
    for (uint32_t t = 0; t < tenant_count; t++) {
        uint64_t bytes = 0;
        for (uint32_t number = 0; number < cache->group_end; number++) {
            const struct kvk_group *group = cache->groups[number];
            if (group != NULL && group->space->tenant->index == t && group->tiers[tier].present) {
                bytes += group->tiers[tier].used_bytes;
            }
        }
        KVK_ASSERT(cache->tiers[tier].tenant_bytes[t] == bytes);
    }
}

/* What is bound, kept and guaranteed for every tenant, and that no limit is passed: above it is
 * only who had more before it was lowered. */
static void check_quotas(const struct check *check, int tier)
{
    const struct kvk_cache *cache = check->cache;
    const struct kvk_tier_state *at = &cache->tiers[tier];
    uint64_t bound = 0;
    uint64_t growth = 0;
    uint64_t guaranteed = 0;
    uint64_t guarded = 0;
    for (uint32_t t = 0; t < KVK_TENANT_COUNT_MAX; t++) {
        const struct kvk_tenant_state *state = &cache->tenant_states[t];
        uint64_t own = state->quota.guaranteed_bytes[tier];
        uint64_t limit = state->quota.limit_bytes[tier];
        uint64_t keeps = state->bound_bytes[tier] + state->growth_bytes[tier];
        KVK_ASSERT(state->bound_bytes[tier] == check->tenant_bound[t][tier]);
        KVK_ASSERT(limit == 0 || cache->trim_wanted || at->tenant_bytes[t] <= limit);
        bound += state->bound_bytes[tier];
        growth += state->growth_bytes[tier];
        guaranteed += own;
        guarded += keeps > own ? keeps : own;
    }
    KVK_ASSERT(bound == at->bound_bytes);
    KVK_ASSERT(growth == at->growth_bytes);
    KVK_ASSERT(guaranteed == at->guaranteed_bytes);
    KVK_ASSERT(guarded == at->guarded_bytes);
    KVK_ASSERT(guaranteed <= at->pool.limit_bytes);
}

static void check_tenant_lists(const struct kvk_cache *cache)
{
    uint32_t spaces = 0;
    uint64_t sequences = 0;
    uint64_t leases = 0;
    for (uint32_t t = 0; t < KVK_TENANT_COUNT_MAX; t++) {
        const struct kvk_tenant_state *state = &cache->tenant_states[t];
        uint32_t groups = 0;
        for (const struct kvk_space *space = state->spaces; space != NULL;
             space = space->tenant_next) {
            KVK_ASSERT(space->tenant == state->tenant);
            groups += space->group_count;
            spaces++;
        }
        KVK_ASSERT(groups == state->group_count);
        sequences += state->sequences;
        leases += state->leases;
    }
    KVK_ASSERT(spaces == cache->space_table.count);
    KVK_ASSERT(sequences == cache->sequence_table.count);
    KVK_ASSERT(leases == cache->lease_table.count);
}

static void check_pool(struct kvk_cache *cache, int tier)
{
    struct kvk_arena **arenas = calloc(cache->group_end + 1u, sizeof(struct kvk_arena *));
    uint32_t count = 0;
    KVK_ASSERT(arenas != NULL);
    for (uint32_t number = 0; number < cache->group_end; number++) {
        struct kvk_group *group = cache->groups[number];
        if (group != NULL && group->tiers[tier].present) {
            arenas[count++] = &group->tiers[tier].arena;
        }
    }
    kvk_pool_check(&cache->tiers[tier].pool, arenas, count);
    free(arenas);
}

static void check_tier(struct check *check, int tier)
{
    struct kvk_cache *cache = check->cache;
    const struct kvk_tier_state *state = &cache->tiers[tier];
    struct tier_sums *sums = &check->tiers[tier];
    if (tier < KVK_MEMORY_TIER_COUNT ? state->device == NULL : cache->disk_tier == NULL) {
        return;
    }
    for (uint32_t number = 0; number < cache->group_end; number++) {
        if (cache->groups[number] != NULL && cache->groups[number]->tiers[tier].present) {
            check_group_tier(check, cache->groups[number], tier);
        }
    }
    for (const struct kvk_punch *punch = cache->punches; punch != NULL; punch = punch->next) {
        sums->punch += (int)punch->tier == tier ? punch->size_bytes : 0;
    }
    KVK_ASSERT(state->used_bytes == sums->used);
    KVK_ASSERT(state->used_bytes <= state->pool.limit_bytes);
    KVK_ASSERT(state->bound_bytes == sums->bound);
    KVK_ASSERT(state->leased_bytes == sums->leased);
    KVK_ASSERT(state->copying_bytes == sums->copying);
    KVK_ASSERT(state->quarantine_bytes == sums->quarantine);
    KVK_ASSERT(state->growth_bytes == sums->growth);
    KVK_ASSERT(state->punch_bytes == sums->punch);
    KVK_ASSERT(state->stray_bytes == sums->stray);
    KVK_ASSERT(state->pool.charge_bytes == sums->punch + sums->stray);
    check_tenants(cache, tier);
    check_quotas(check, tier);
    check_pool(cache, tier);
}

static uint32_t references_of(const struct kvk_cache *cache, const struct kvk_space *space)
{
    uint32_t references = 0;
    for (const struct kvk_instance *instance = cache->instances; instance != NULL;
         instance = instance->next) {
        for (const struct kvk_sequence *sequence = instance->sequences; sequence != NULL;
             sequence = sequence->next) {
            references += sequence->space == space;
        }
        for (const struct kvk_lease *lease = instance->leases; lease != NULL; lease = lease->next) {
            references += lease->space == space;
        }
    }
    for (const struct kvk_publication *p = cache->publications; p != NULL; p = p->next) {
        references += p->space == space;
    }
    return references;
}

static void check_spaces(const struct kvk_cache *cache)
{
    uint32_t count = 0;
    for (const struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        KVK_ASSERT(kvk_table_get(&cache->space_table, space->id) == space);
        KVK_ASSERT(kvk_load_le64(space->identity + space->identity_size) == space->generation);
        KVK_ASSERT(space->reference_count >= references_of(cache, space));
        for (uint32_t g = 0; g < space->group_count; g++) {
            KVK_ASSERT(cache->groups[space->groups[g]->number] == space->groups[g]);
        }
        count++;
    }
    KVK_ASSERT(count <= cache->space_count); /* a place is taken before its space is made */
    KVK_ASSERT(count == cache->space_table.count);
}

static uint64_t loose_bytes(const struct kvk_cache *cache, enum kvk_tier tier)
{
    uint64_t bytes = 0;
    for (const struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            const struct kvk_group_tier *at = &space->groups[g]->tiers[tier];
            bytes += at->loose_count * at->arena.slot_bytes;
        }
    }
    return bytes;
}

void kvk_cache_check_locked(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct check check = {.cache = cache, .id_end = kvk_index_block_id_end(cache->index)};
    check.found = calloc(check.id_end + 1u, sizeof(*check.found));
    check.tenant_bound = calloc(KVK_TENANT_COUNT_MAX, sizeof(*check.tenant_bound));
    KVK_ASSERT(check.found != NULL && check.tenant_bound != NULL);
    walk_holders(&check);
    check_blocks(&check);
    kvk_metadata_check(cache);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        check_tier(&check, i);
    }
    check_spaces(cache);
    check_tenant_lists(cache);
    kvk_index_check(cache->index);
    for (uint32_t i = 0; i < cache->group_end; i++) {
        if (cache->groups[i] != NULL) {
            kvk_sidecar_check(cache, cache->groups[i]);
        }
    }
    /* Whoever works without the lock now has references that no table lists. */
    KVK_ASSERT(check.excess_holds >= cache->passing_holds);
    if (cache->passing_holds == 0) {
        KVK_ASSERT(check.excess_holds == 0);
        KVK_ASSERT(check.excess_pins == 0);
        KVK_ASSERT(cache->moves_under_way == 0);
        KVK_ASSERT(cache->upkeep.count == 0);
        /* But slots that a call has taken and waits with for the others that it needs. */
        for (int i = 0; i < KVK_TIER_COUNT; i++) {
            KVK_ASSERT(cache->tiers[i].copying_bytes == loose_bytes(cache, (enum kvk_tier)i));
        }
    }
    free(check.found);
    free(check.tenant_bound);
}

void kvk_cache_check(struct kvk_cache *cache)
{
    kvk_lock(&cache->lock);
    kvk_cache_check_locked(cache);
    kvk_unlock(&cache->lock);
}
