/*
 * Which memory comes next when a group needs one more slot. Decides only: see room_internal.h for
 * the order and why.
 */
#include "daemon/room_internal.h"

#include "base/assert.h"

#define SLAB_CANDIDATES 4
#define TREE_VISITS_MAX 4096
#define SHIFT_CANDIDATES 16 /* slabs */
#define ANY_SLOTS_MAX 65536

/* ---- Groups ---- */

struct kvk_group *kvk_room_next_group(const struct kvk_cache *cache, enum kvk_tier tier,
                                      uint32_t *number)
{
    while (*number < cache->group_end) {
        struct kvk_group *group = cache->groups[(*number)++];
        if (group != NULL && group->tiers[tier].present) {
            return group;
        }
    }
    return NULL;
}

static bool is_alone(const struct kvk_cache *cache)
{
    return cache->space_count == 1 && cache->spaces != NULL && cache->spaces->group_count == 1;
}

static uint64_t slab_bytes(const struct kvk_group *group, enum kvk_tier tier)
{
    return group->tiers[tier].arena.slab_slots * group->forms[tier].block_bytes;
}

static uint32_t victims_count(const struct kvk_group *group, enum kvk_tier tier)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    return kvk_evict_queue_count(&at->queue) + kvk_evict_queue_count(&at->clean) +
           kvk_evict_queue_count(&at->held);
}

/* May `giver` lose a slab for `group`? Not one that the same call needs for itself. */
static bool may_give(const struct kvk_group *group, const struct kvk_group *giver,
                     enum kvk_tier tier, const struct kvk_room_want *want)
{
    if (giver == group || giver->space->is_public || /* public memory goes as a whole */
        kvk_tier_is_lent(&giver->tiers[tier])) {
        return false;
    }
    if (want == NULL || giver->space != group->space || want->tier != tier) {
        return true;
    }
    uint64_t has = (uint64_t)kvk_room_free_slots(giver, tier) + victims_count(giver, tier);
    return has >= (uint64_t)want->counts[giver->index] + giver->tiers[tier].arena.slab_slots;
}

/* ---- A group's own victim ---- */

bool kvk_room_is_dirty(const struct kvk_group *group, const struct kvk_block *block)
{
    return group->tiers[KVK_TIER_HOST].present && (block->tier_mask & (1U << KVK_TIER_HOST)) == 0;
}

struct victim {
    uint32_t block; /* KVK_BLOCK_NONE: none */
    enum kvk_tier tier;
    bool dirty; /* to be copied first */
    double score;
};

/* The lower of the heads of two queues. Often both are worth the same, for ages are learned in
 * steps; then the older goes, as in a queue, or what stands in one of them would pile up. */
static uint32_t peek_both(const struct kvk_cache *cache, struct kvk_evict_queue *a,
                          struct kvk_evict_queue *b, uint64_t now, double *score)
{
    double score_b;
    uint32_t block_a = kvk_evict_queue_peek(a, now, score);
    uint32_t block_b = kvk_evict_queue_peek(b, now, &score_b);
    if (block_b == KVK_BLOCK_NONE) {
        return block_a;
    }
    if (block_a != KVK_BLOCK_NONE && *score <= score_b &&
        (*score < score_b || kvk_index_block(cache->index, block_a)->order <
                                 kvk_index_block(cache->index, block_b)->order)) {
        return block_a;
    }
    *score = score_b;
    return block_b;
}

/* What is on disk too is weighed by what it costs to fetch, what is not by what it costs to
 * compute. */
static struct victim host_victim(struct kvk_cache *cache, struct kvk_group *group)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_HOST];
    uint64_t now = kvk_policy_now(cache);
    struct victim victim = {.tier = KVK_TIER_HOST};
    victim.block = peek_both(cache, &at->queue, &at->clean, now, &victim.score);
    if (victim.block != KVK_BLOCK_NONE || !group->tiers[KVK_TIER_DEVICE].present) {
        return victim;
    }
    /* A second copy, made ahead of need, goes before anybody is refused. */
    victim.block = kvk_evict_queue_peek(&group->tiers[KVK_TIER_DEVICE].clean, now, &victim.score);
    if (victim.block != KVK_BLOCK_NONE &&
        kvk_index_block(cache->index, victim.block)->pin_count[KVK_TIER_HOST] > 0) {
        victim.block = KVK_BLOCK_NONE;
    }
    return victim;
}

static bool host_has_room(struct kvk_cache *cache, struct kvk_group *group)
{
    struct kvk_room_choice choice;
    bool full = kvk_quota_is_full(cache, group->space->tenant, KVK_TIER_HOST,
                                  group->forms[KVK_TIER_HOST].block_bytes);
    if (!full && (kvk_room_free_slots(group, KVK_TIER_HOST) > 0 ||
                  host_victim(cache, group).block != KVK_BLOCK_NONE)) {
        return true; /* nearly always, and without looking at other groups */
    }
    kvk_room_choose(cache, group, KVK_TIER_HOST, NULL, &choice);
    return choice.step != KVK_ROOM_NOTHING && choice.step != KVK_ROOM_WAIT &&
           choice.step != KVK_ROOM_LIMIT;
}

static struct victim device_victim(struct kvk_cache *cache, struct kvk_group *group)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_DEVICE];
    uint64_t now = kvk_policy_now(cache);
    struct victim victim = {.tier = KVK_TIER_DEVICE};
    if (!group->tiers[KVK_TIER_HOST].present) {
        victim.block = peek_both(cache, &at->queue, &at->clean, now, &victim.score);
        return victim;
    }
    /* Whoever has a second copy goes without any waiting. */
    victim.block = kvk_evict_queue_peek(&at->clean, now, &victim.score);
    if (victim.block != KVK_BLOCK_NONE) {
        return victim;
    }
    victim.block = peek_both(cache, &at->queue, &at->held, now, &victim.score);
    if (victim.block == KVK_BLOCK_NONE) {
        return victim;
    }
    if (host_has_room(cache, group)) {
        victim.dirty = true;
        return victim;
    }
    /* Nowhere to go to: the bytes of what nobody holds are lost. */
    victim.block = kvk_evict_queue_peek(&at->queue, now, &victim.score);
    if (victim.block != KVK_BLOCK_NONE &&
        !kvk_block_is_leaf(group, kvk_index_block(cache->index, victim.block))) {
        victim.block = KVK_BLOCK_NONE;
    }
    return victim;
}

static struct victim own_victim(struct kvk_cache *cache, struct kvk_group *group,
                                enum kvk_tier tier)
{
    return tier == KVK_TIER_DEVICE ? device_victim(cache, group) : host_victim(cache, group);
}

/* ---- Slabs of others ---- */

/* Can the block and all that hangs below it be forgotten, without touching the device tier where a
 * host slab is wanted? */
static bool tree_may_go(const struct kvk_cache *cache, const struct kvk_group *group, uint32_t top,
                        enum kvk_tier tier, uint32_t *visits)
{
    uint32_t id = top;
    for (;;) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (++*visits > TREE_VISITS_MAX) {
            return false;
        }
        bool goes =
            block->state == KVK_BLOCK_HOLLOW ||
            (block->state == KVK_BLOCK_EVICTABLE && block->transfer_count == 0 &&
             block->pin_count[KVK_TIER_DEVICE] == 0 && block->pin_count[KVK_TIER_HOST] == 0 &&
             (tier == KVK_TIER_DEVICE || id == top ||
              (block->tier_mask & (1U << KVK_TIER_DEVICE)) == 0));
        if (!goes) {
            return false;
        }
        uint32_t next = KVK_BLOCK_NONE;
        if (!group->windowed && block->memory_children > 0) {
            next = kvk_index_first_child(cache->index, KVK_ROOT_NONE, id);
        }
        while (next == KVK_BLOCK_NONE && id != top) {
            next = kvk_index_next_child(cache->index, id);
            if (next == KVK_BLOCK_NONE) {
                id = kvk_index_block(cache->index, id)->parent;
            }
        }
        if (next == KVK_BLOCK_NONE) {
            return true;
        }
        id = next;
    }
}

/* Can this block's slot be freed, by dropping, demoting or forgetting it? */
static bool slot_may_go(const struct kvk_cache *cache, const struct kvk_group *group, uint32_t id,
                        enum kvk_tier tier, uint32_t *visits)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    if (!kvk_block_is_whole(block) || block->transfer_count > 0 || block->pin_count[tier] > 0) {
        return false;
    }
    if (tier == KVK_TIER_DEVICE && block->hold_count > 0 && kvk_group_is_compact_below(group)) {
        return false;
    }
    bool has_other = kvk_room_has_other(block, tier);
    bool has_next = tier == KVK_TIER_DEVICE && group->tiers[KVK_TIER_HOST].present;
    if (has_other || has_next) {
        return true;
    }
    return tree_may_go(cache, group, id, tier, visits);
}

/* Would giving up `blocks` leave its tenant what it is guaranteed? `asking` is whose need it is. */
static bool is_spare(const struct kvk_cache *cache, const struct kvk_group *group,
                     enum kvk_tier tier, uint64_t blocks, const struct kvk_tenant *asking)
{
    const struct kvk_tenant *tenant = group->space->tenant;
    return tenant == asking ||
           kvk_tenant_state_of(cache, tenant)->quota.guaranteed_bytes[tier] == 0 ||
           blocks * group->forms[tier].block_bytes <= kvk_quota_spare(cache, tenant, tier);
}

static bool slab_is_spare(const struct kvk_cache *cache, const struct kvk_group *group,
                          enum kvk_tier tier, uint32_t slab, const struct kvk_tenant *asking)
{
    return is_spare(cache, group, tier, group->tiers[tier].arena.slabs[slab].used_count, asking);
}

/* Can the whole slab be emptied, for `asking`? `mean`: what its blocks are worth. */
static bool slab_may_go(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                        uint32_t number, const struct kvk_tenant *asking, double *mean)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    const struct kvk_slab *slab = &at->arena.slabs[number];
    uint64_t now = kvk_policy_now(cache);
    uint32_t visits = 0;
    uint32_t count = 0;
    double sum = 0;
    for (uint32_t i = 0; i < slab->slot_count; i++) {
        uint32_t owner = at->owners[slab->first_slot + i];
        if (owner == 0) {
            if (kvk_arena_is_used(&at->arena, slab->first_slot + i)) {
                return false; /* a copy is on its way there */
            }
            continue;
        }
        if (!slot_may_go(cache, group, owner - 1, tier, &visits)) {
            return false;
        }
        sum += kvk_evict_score(&at->queue, kvk_index_block(cache->index, owner - 1), now);
        count++;
    }
    *mean = count == 0 ? 0 : sum / count;
    /* With them goes what hangs below; counted more than once where it does so twice. */
    return is_spare(cache, group, tier, (uint64_t)count + visits, asking);
}

/* The slab of the group that is worth least of a few: that of its next victim, and the emptiest.
 * `slots` counts those looked at. */
static uint32_t slab_find(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          const struct kvk_tenant *asking, double *mean, uint64_t *slots)
{
    const struct kvk_arena *arena = &group->tiers[tier].arena;
    uint32_t candidates[SLAB_CANDIDATES];
    uint32_t count = 0;
    struct victim victim = own_victim(cache, group, tier);
    if (victim.block != KVK_BLOCK_NONE && victim.tier == tier) {
        uint32_t slot = kvk_index_block(cache->index, victim.block)->slot[tier];
        candidates[count++] = kvk_arena_slab_of(arena, slot);
    }
    for (uint32_t level = 0; level < KVK_ARENA_LEVEL_COUNT && count < SLAB_CANDIDATES; level++) {
        if (arena->levels[level] != KVK_SLAB_NONE) {
            candidates[count++] = arena->levels[level];
        }
    }
    uint32_t best = KVK_SLAB_NONE;
    for (uint32_t i = 0; i < count; i++) {
        double worth;
        *slots += arena->slabs[candidates[i]].slot_count;
        if (slab_may_go(cache, group, tier, candidates[i], asking, &worth) &&
            (best == KVK_SLAB_NONE || worth < *mean)) {
            best = candidates[i];
            *mean = worth;
        }
    }
    return best;
}

/* A slab that can be emptied by moving what lies in it: the emptiest of a few. */
static uint32_t shiftable_find(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                               const struct kvk_tenant *asking, uint64_t *slots)
{
    const struct kvk_arena *arena = &group->tiers[tier].arena;
    uint32_t looked_at = 0;
    for (uint32_t level = 0; level < KVK_ARENA_LEVEL_COUNT; level++) {
        uint32_t slab = arena->levels[level];
        if (slab != KVK_SLAB_NONE) {
            *slots += arena->slabs[slab].slot_count;
            if (slab_is_spare(cache, group, tier, slab, asking) &&
                kvk_room_slab_may_shift(cache, group, tier, slab)) {
                return slab;
            }
        }
    }
    for (uint32_t slab = 0; slab < arena->slab_capacity && looked_at < SHIFT_CANDIDATES; slab++) {
        if (arena->slabs[slab].slot_count == 0) {
            continue;
        }
        looked_at++;
        *slots += arena->slabs[slab].slot_count;
        if (slab_is_spare(cache, group, tier, slab, asking) &&
            kvk_room_slab_may_shift(cache, group, tier, slab)) {
            return slab;
        }
    }
    return KVK_SLAB_NONE;
}

/* Nothing lies below the tier: what leaves it is forgotten. */
static bool is_last_tier(const struct kvk_group *group, enum kvk_tier tier)
{
    return tier == KVK_TIER_HOST || !group->tiers[KVK_TIER_HOST].present;
}

/* ---- Who gives ---- */

enum claim {
    CLAIM_OTHERS = 0, /* of a tenant within its share: only where nothing else can go */
    CLAIM_TENANT,     /* of the asking tenant */
    CLAIM_OVER,       /* of a tenant above its share, and further than the asking one; or above its
                         guarantee, where the asking one is within its own */
};

struct giver {
    struct kvk_group *group; /* NULL: none */
    enum claim claim;
    double over_bytes; /* above the fair share */
    double score;      /* of its next victim */
    uint32_t slab;
    bool shifts; /* the slab's blocks move first */
};

static uint64_t guaranteed(const struct kvk_cache *cache, enum kvk_tier tier, uint32_t tenant)
{
    return cache->tenant_states[tenant].quota.guaranteed_bytes[tier];
}

/* Of what is guaranteed to none of the tenants that use the tier, the part of each: with what is
 * guaranteed to it, its fair share. */
static double equal_part(const struct kvk_cache *cache, enum kvk_tier tier, uint32_t asking)
{
    uint32_t count = kvk_tenants_count(cache->tenants);
    uint32_t active = 0;
    double rest = (double)cache->tiers[tier].pool.limit_bytes;
    for (uint32_t i = 0; i < count; i++) {
        if (i == asking || cache->tiers[tier].tenant_bytes[i] > 0) {
            active++;
            rest -= (double)guaranteed(cache, tier, i);
        }
    }
    return rest / active;
}

static bool is_better(const struct giver *a, const struct giver *b)
{
    if (b->group == NULL || a->claim != b->claim) {
        return b->group == NULL || a->claim > b->claim;
    }
    if (a->claim == CLAIM_OVER && a->over_bytes != b->over_bytes) {
        return a->over_bytes > b->over_bytes;
    }
    return a->score < b->score;
}

/* What the group's next victim in the tier is worth. False: it has none. */
static bool head_score(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                       double *score)
{
    struct kvk_group_tier *at = &group->tiers[tier];
    struct kvk_evict_queue *queues[] = {&at->queue, &at->clean, &at->held};
    uint64_t now = kvk_policy_now(cache);
    bool any = false;
    for (size_t i = 0; i < sizeof(queues) / sizeof(queues[0]); i++) {
        double head;
        if (kvk_evict_queue_peek(queues[i], now, &head) != KVK_BLOCK_NONE &&
            (!any || head < *score)) {
            *score = head;
            any = true;
        }
    }
    return any;
}

/* Who should give a slab, the asking group apart. Slabs are not passed to and fro between tenants
 * that are nearly equal: two slabs' difference is let be. */
static struct giver giver_find(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                               const struct kvk_room_want *want)
{
    const uint64_t *bytes = cache->tiers[tier].tenant_bytes;
    uint32_t asking = group->space->tenant->index;
    double part = equal_part(cache, tier, asking);
    double asking_over = (double)(bytes[asking] + group->forms[tier].block_bytes) - part -
                         (double)guaranteed(cache, tier, asking);
    bool due = kvk_quota_is_due(cache, group->space->tenant, tier, group->forms[tier].block_bytes);
    struct giver best = {.group = NULL};
    uint32_t number = 0;
    struct kvk_group *other;
    while ((other = kvk_room_next_group(cache, tier, &number)) != NULL) {
        struct giver giver = {.group = other, .claim = CLAIM_OTHERS};
        if (!may_give(group, other, tier, want) || !head_score(cache, other, tier, &giver.score)) {
            continue;
        }
        uint32_t tenant = other->space->tenant->index;
        uint64_t spare = kvk_quota_spare(cache, other->space->tenant, tier);
        if (tenant != asking && spare < other->forms[tier].block_bytes) {
            continue;
        }
        uint64_t slab = slab_bytes(group, tier) > slab_bytes(other, tier) ? slab_bytes(group, tier)
                                                                          : slab_bytes(other, tier);
        giver.over_bytes = (double)spare - part;
        if (tenant == asking) {
            giver.claim = CLAIM_TENANT;
        } else if (due ||
                   (giver.over_bytes > 0 && giver.over_bytes > asking_over + 2 * (double)slab)) {
            giver.claim = CLAIM_OVER;
        }
        if (is_better(&giver, &best)) {
            best = giver;
        }
    }
    return best;
}

/* Any slab that can go at all, where the best giver has none; only of other tenants where that is
 * asked for. It looks at a bounded number of slots and begins with another group each time. */
static bool any_slab_find(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          const struct kvk_room_want *want, bool others_only, struct giver *giver)
{
    uint64_t slots = 0;
    for (uint32_t i = 0; i < cache->group_end && slots < ANY_SLOTS_MAX; i++) {
        cache->give_next = cache->give_next + 1 < cache->group_end ? cache->give_next + 1 : 0;
        struct kvk_group *other = cache->groups[cache->give_next];
        double mean;
        const struct kvk_tenant *asking = group->space->tenant;
        if (other == NULL || !other->tiers[tier].present || !may_give(group, other, tier, want) ||
            (others_only && other->space->tenant == asking)) {
            continue;
        }
        uint32_t slab = slab_find(cache, other, tier, asking, &mean, &slots);
        giver->shifts = slab == KVK_SLAB_NONE && is_last_tier(other, tier);
        if (giver->shifts) {
            slab = shiftable_find(cache, other, tier, asking, &slots);
        }
        if (slab != KVK_SLAB_NONE) {
            giver->group = other;
            giver->slab = slab;
            return true;
        }
    }
    return false;
}

/* ---- The choice ---- */

static void choose_own(struct kvk_room_choice *choice, const struct victim *victim)
{
    choice->step = victim->dirty ? KVK_ROOM_DEMOTE : KVK_ROOM_EVICT;
    choice->victim = victim->block;
    choice->victim_tier = victim->tier;
}

static void choose_slab(struct kvk_room_choice *choice, enum kvk_room_step step,
                        struct kvk_group *giver, uint32_t slab)
{
    choice->step = step;
    choice->giver = giver;
    choice->slab = slab;
}

/* The budget first: true where it decides. */
static bool choose_budget(const struct kvk_cache *cache, struct kvk_group *group,
                          enum kvk_tier tier, struct kvk_room_choice *choice)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    uint64_t fitting =
        kvk_pool_free_bytes(&cache->tiers[tier].pool) / group->forms[tier].block_bytes;
    choice->place = kvk_arena_next_place(&at->arena);
    if (fitting == 0 || choice->place == KVK_SLAB_NONE) {
        return false;
    }
    uint32_t backed = at->places[choice->place];
    if (backed == KVK_PLACE_LEAVING) {
        choice->step = KVK_ROOM_PUNCH;
        return true;
    }
    uint64_t needed = fitting < at->arena.slab_slots ? fitting : at->arena.slab_slots;
    choice->step = backed >= needed ? KVK_ROOM_GROW : KVK_ROOM_BACK;
    return true;
}

static bool choose_empty(const struct kvk_cache *cache, const struct kvk_group *group,
                         enum kvk_tier tier, const struct kvk_room_want *want,
                         struct kvk_room_choice *choice)
{
    uint32_t number = 0;
    struct kvk_group *other;
    if (is_alone(cache)) {
        return false;
    }
    while ((other = kvk_room_next_group(cache, tier, &number)) != NULL) {
        uint32_t slab = kvk_arena_empty_slab(&other->tiers[tier].arena);
        if (slab != KVK_SLAB_NONE && may_give(group, other, tier, want)) {
            choose_slab(choice, KVK_ROOM_HAND_OVER, other, slab);
            return true;
        }
    }
    return false;
}

/* Nobody has a victim: what is on its way? */
static void choose_waiting(const struct kvk_cache *cache, enum kvk_tier tier,
                           struct kvk_room_choice *choice)
{
    choice->step = cache->moves_under_way > 0 ? KVK_ROOM_WAIT : KVK_ROOM_NOTHING;
    for (const struct kvk_punch *punch = cache->punches; punch != NULL; punch = punch->next) {
        if (punch->tier == tier) {
            choice->step = punch->under_way ? KVK_ROOM_WAIT : KVK_ROOM_PUNCH;
            if (!punch->under_way) {
                return;
            }
        }
    }
}

static void choose_victim(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          const struct kvk_room_want *want, struct kvk_room_choice *choice)
{
    struct victim victim = own_victim(cache, group, tier);
    bool own = victim.block != KVK_BLOCK_NONE;
    struct giver giver = {.group = NULL};
    if (!is_alone(cache)) {
        giver = giver_find(cache, group, tier, want);
    }
    double mean = 0;
    uint64_t slots = 0;
    bool others_first =
        giver.group != NULL && (!own || giver.claim == CLAIM_OVER ||
                                (giver.claim == CLAIM_TENANT && giver.score < victim.score));
    if (others_first) {
        const struct kvk_tenant *asking = group->space->tenant;
        giver.slab = slab_find(cache, giver.group, tier, asking, &mean, &slots);
        /* Within a tenant only worth decides: that of the whole slab that would go. */
        if (giver.slab != KVK_SLAB_NONE &&
            (!own || giver.claim == CLAIM_OVER || mean <= victim.score)) {
            choose_slab(choice, KVK_ROOM_VACATE, giver.group, giver.slab);
            return;
        }
        if (giver.slab == KVK_SLAB_NONE && is_last_tier(giver.group, tier)) {
            giver.slab = shiftable_find(cache, giver.group, tier, asking, &slots);
            if (giver.slab != KVK_SLAB_NONE) {
                choose_slab(choice, KVK_ROOM_COMPACT, giver.group, giver.slab);
                return;
            }
        }
    }
    /* A tenant within its guarantee gives up its own only where nobody else can give. */
    bool others_due = choice->due && giver.claim == CLAIM_OVER;
    if (own && !(others_due && any_slab_find(cache, group, tier, want, true, &giver))) {
        choose_own(choice, &victim);
        return;
    }
    if (own) {
        choose_slab(choice, giver.shifts ? KVK_ROOM_COMPACT : KVK_ROOM_VACATE, giver.group,
                    giver.slab);
        return;
    }
    if (!is_alone(cache) && any_slab_find(cache, group, tier, want, false, &giver)) {
        choose_slab(choice, giver.shifts ? KVK_ROOM_COMPACT : KVK_ROOM_VACATE, giver.group,
                    giver.slab);
        return;
    }
    choose_waiting(cache, tier, choice);
}

/* ---- A tenant's own limit ---- */

/* Groups that are asked for a victim, per victim, on average: all of a tenant that has few, or all
 * of it once in a while. */
#define LIMIT_GROUPS 8

/* The least worth of all groups of the tenant, or of the group that had it a few victims ago. */
static struct victim limit_victim(struct kvk_cache *cache, struct kvk_tenant_state *state,
                                  enum kvk_tier tier, struct kvk_group **from)
{
    struct victim least = {.block = KVK_BLOCK_NONE};
    *from = state->limit_group[tier];
    if (state->limit_evictions_left[tier] > 0 && *from != NULL) {
        least = own_victim(cache, *from, tier);
        if (least.block != KVK_BLOCK_NONE) {
            state->limit_evictions_left[tier]--;
            return least;
        }
    }
    for (const struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        for (uint32_t g = 0; g < space->group_count; g++) {
            if (!space->groups[g]->tiers[tier].present) {
                continue;
            }
            struct victim victim = own_victim(cache, space->groups[g], tier);
            if (victim.block != KVK_BLOCK_NONE &&
                (least.block == KVK_BLOCK_NONE || victim.score < least.score)) {
                least = victim;
                *from = space->groups[g];
            }
        }
    }
    state->limit_group[tier] = *from;
    state->limit_evictions_left[tier] = state->group_count / LIMIT_GROUPS;
    return least;
}

void kvk_room_choose_own(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                         enum kvk_tier tier, struct kvk_room_choice *choice)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    struct kvk_group *from;
    *choice = (struct kvk_room_choice){.step = KVK_ROOM_LIMIT, .victim = KVK_BLOCK_NONE};
    struct victim victim = limit_victim(cache, state, tier, &from);
    if (victim.block != KVK_BLOCK_NONE) {
        choose_own(choice, &victim);
        choice->giver = from;
        choice->by_limit = true;
    }
}

/* The tenant's limit first: true where it decides. */
static bool choose_limit(struct kvk_cache *cache, const struct kvk_group *group, enum kvk_tier tier,
                         struct kvk_room_choice *choice)
{
    const struct kvk_tenant *tenant = group->space->tenant;
    if (!kvk_quota_is_full(cache, tenant, tier, group->forms[tier].block_bytes)) {
        return false;
    }
    if (kvk_tenant_state_of(cache, tenant)->quota.over_quota == KVK_OVER_QUOTA_REFUSE) {
        *choice = (struct kvk_room_choice){.step = KVK_ROOM_LIMIT, .victim = KVK_BLOCK_NONE};
    } else {
        kvk_room_choose_own(cache, tenant, tier, choice);
    }
    return true;
}

void kvk_room_choose(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                     const struct kvk_room_want *want, struct kvk_room_choice *choice)
{
    if (group->tiers[tier].present && choose_limit(cache, group, tier, choice)) {
        return;
    }
    if (group->tiers[tier].present && kvk_room_free_slots(group, tier) > 0) {
        *choice = (struct kvk_room_choice){.step = KVK_ROOM_TAKE, .victim = KVK_BLOCK_NONE};
        return;
    }
    kvk_room_choose_more(cache, group, tier, want, choice);
}

void kvk_room_choose_more(struct kvk_cache *cache, struct kvk_group *group, enum kvk_tier tier,
                          const struct kvk_room_want *want, struct kvk_room_choice *choice)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_group_tier *at = &group->tiers[tier];
    *choice = (struct kvk_room_choice){.step = KVK_ROOM_NOTHING, .victim = KVK_BLOCK_NONE};
    if (at->present && choose_limit(cache, group, tier, choice)) {
        return;
    }
    if (!at->present || choose_budget(cache, group, tier, choice)) {
        return;
    }
    choice->due =
        kvk_quota_is_due(cache, group->space->tenant, tier, group->forms[tier].block_bytes);
    /* Looking at all groups is for once in a slab's worth of victims. */
    if (at->own_evictions_left > 0 && (at->own_evictions_due || !choice->due)) {
        struct victim victim = own_victim(cache, group, tier);
        if (victim.block != KVK_BLOCK_NONE) {
            choose_own(choice, &victim);
            return;
        }
    }
    if (!choose_empty(cache, group, tier, want, choice)) {
        choose_victim(cache, group, tier, want, choice);
    }
}
