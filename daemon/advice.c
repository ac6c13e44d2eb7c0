#include "daemon/advice.h"

#include <stdlib.h>

#include "base/assert.h"
#include "daemon/cache_internal.h"

#define EXACT_COUNT 12   /* items that are tried in all combinations */
#define ITEMS_MAX 256    /* sequences that are weighed */
#define BLOCKS_MAX 16384 /* of theirs, that are looked at */
#define LEASES_MAX 64    /* that are looked at for when they expire */
#define MEASURE_NS (250 * KVK_NS_PER_MS)
#define HINT_UNKNOWN_MS 1000 /* nothing was measured yet */

/* ---- The choice ---- */

static int compare_density(const void *left, const void *right)
{
    const struct kvk_advice_item *a = left;
    const struct kvk_advice_item *b = right;
    double x = (double)a->cost / (double)a->bytes;
    double y = (double)b->cost / (double)b->bytes;
    return x != y ? (x < y ? -1 : 1) : (a->id > b->id) - (a->id < b->id);
}

static int compare_cost_down(const void *left, const void *right)
{
    const struct kvk_advice_item *a = left;
    const struct kvk_advice_item *b = right;
    return (a->cost < b->cost) - (a->cost > b->cost);
}

static void item_swap(struct kvk_advice_item *a, struct kvk_advice_item *b)
{
    struct kvk_advice_item kept = *a;
    *a = *b;
    *b = kept;
}

/* All combinations. */
static uint32_t choose_exactly(struct kvk_advice_item *items, uint32_t count, uint64_t missing)
{
    uint32_t best = 0;
    uint64_t best_cost = UINT64_MAX;
    for (uint32_t set = 1; set < UINT32_C(1) << count; set++) {
        uint64_t bytes = 0;
        uint64_t cost = 0;
        for (uint32_t i = 0; i < count; i++) {
            bytes += (set >> i & 1) != 0 ? items[i].bytes : 0;
            cost += (set >> i & 1) != 0 ? items[i].cost : 0;
        }
        bool fewer = cost == best_cost && __builtin_popcount(set) < __builtin_popcount(best);
        if (bytes >= missing && (cost < best_cost || fewer)) {
            best = set;
            best_cost = cost;
        }
    }
    uint32_t chosen = 0;
    for (uint32_t i = 0; i < count; i++) {
        if ((best >> i & 1) != 0) {
            item_swap(&items[i], &items[chosen++]);
        }
    }
    return chosen;
}

/* The cheapest per byte first, and for every beginning of that order the cheapest single one that
 * makes up the rest: at most twice the least cost. */
static uint32_t choose_nearly(struct kvk_advice_item *items, uint32_t count, uint64_t missing)
{
    qsort(items, count, sizeof(items[0]), compare_density);
    uint64_t bytes = 0;
    uint64_t cost = 0;
    uint64_t best_cost = UINT64_MAX;
    uint32_t best_begin = 0;
    uint32_t best_last = 0;
    for (uint32_t begin = 0; begin < count && bytes < missing; begin++) {
        for (uint32_t i = begin; i < count; i++) {
            if (items[i].bytes >= missing - bytes && cost + items[i].cost < best_cost) {
                best_cost = cost + items[i].cost;
                best_begin = begin;
                best_last = i;
            }
        }
        bytes += items[begin].bytes;
        cost += items[begin].cost;
    }
    if (best_cost == UINT64_MAX) {
        return 0;
    }
    item_swap(&items[best_begin], &items[best_last]);
    uint32_t chosen = best_begin + 1;
    /* What the last one made needless goes again, the dearest first. */
    qsort(items, chosen, sizeof(items[0]), compare_cost_down);
    bytes = 0;
    for (uint32_t i = 0; i < chosen; i++) {
        bytes += items[i].bytes;
    }
    for (uint32_t i = 0; i < chosen;) {
        if (bytes - items[i].bytes >= missing) {
            bytes -= items[i].bytes;
            item_swap(&items[i], &items[--chosen]);
        } else {
            i++;
        }
    }
    return chosen;
}

uint32_t kvk_advice_choose(struct kvk_advice_item *items, uint32_t count, uint64_t missing_bytes)
{
    uint64_t bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        KVK_ASSERT(items[i].bytes > 0);
        bytes += items[i].bytes;
    }
    if (missing_bytes == 0 || bytes < missing_bytes) {
        return 0;
    }
    return count <= EXACT_COUNT ? choose_exactly(items, count, missing_bytes)
                                : choose_nearly(items, count, missing_bytes);
}

/* ---- How much is missing ---- */

/* Would so many bytes be let in, were there enough that may go? As kvk_room_reserve() judges. */
static bool is_let_in(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_tier at, uint64_t bytes, uint64_t own_growth_bytes)
{
    const struct kvk_tier_state *tier = &cache->tiers[at];
    uint64_t taken = tier->bound_bytes + tier->growth_bytes - own_growth_bytes + tier->stray_bytes;
    return kvk_quota_admits(cache, tenant, at, bytes, 0, own_growth_bytes) == KVK_QUOTA_OK &&
           taken <= tier->pool.limit_bytes && bytes <= tier->pool.limit_bytes - taken;
}

/* The fewest bytes that would have to come free; UINT64_MAX: not by any. */
static uint64_t missing_bytes(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                              enum kvk_tier tier, uint64_t needed, uint64_t own_growth)
{
    if (!is_let_in(cache, tenant, tier, 0, own_growth)) {
        return UINT64_MAX;
    }
    uint64_t fits = 0; /* let in; what lies above `over` is not */
    uint64_t over = needed;
    while (fits < over) {
        uint64_t middle = fits + (over - fits + 1) / 2;
        if (is_let_in(cache, tenant, tier, middle, own_growth)) {
            fits = middle;
        } else {
            over = middle - 1;
        }
    }
    return needed - fits;
}

/* ---- Which sequences ---- */

/* What would become free, or at least free to go, without the sequence. */
static bool is_freed(const struct kvk_block *block, enum kvk_tier tier, enum kvk_advice_kind kind)
{
    if (block->slot[tier] == KVK_SLOT_NONE) {
        return false;
    }
    if (kind == KVK_ADVISE_SWAP_OUT && kvk_block_is_whole(block)) {
        return block->pin_count[tier] == 1;
    }
    return block->hold_count == 1;
}

static uint64_t freed_bytes(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                            enum kvk_tier tier, enum kvk_advice_kind kind, uint32_t *looked)
{
    const struct kvk_space *space = sequence->space;
    uint64_t bytes = sequence->home == tier ? sequence->growth_bytes : 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        const struct kvk_sequence_group *table = &sequence->groups[g];
        *looked += table->block_count;
        for (uint32_t i = 0; i < table->block_count; i++) {
            if (table->blocks[i] != KVK_BLOCK_NONE &&
                is_freed(kvk_index_block(cache->index, table->blocks[i]), tier, kind)) {
                bytes += space->groups[g]->block_bytes;
            }
        }
    }
    return bytes;
}

static bool may_be_named(const struct kvk_sequence *sequence, enum kvk_tier tier,
                         enum kvk_advice_kind kind)
{
    if (sequence->busy || sequence->writers > 0) {
        return false;
    }
    if (kind == KVK_ADVISE_SWAP_OUT) {
        return sequence->state == KVK_SEQUENCE_RUNNING && sequence->home == tier &&
               sequence->sealed == sequence->length;
    }
    return true;
}

static uint64_t cost_of(const struct kvk_cache *cache, const struct kvk_sequence *sequence,
                        enum kvk_advice_kind kind, uint64_t bytes, bool *is_time)
{
    uint64_t ns = kind == KVK_ADVISE_SWAP_OUT
                      ? 2 * kvk_tier_load_ns(cache, bytes)
                      : kvk_space_recompute_ns(sequence->space, 0, sequence->length);
    *is_time = *is_time && ns > 0;
    return ns > 0 ? ns : bytes;
}

static uint32_t items_gather(const struct kvk_cache *cache, const struct kvk_sequence *asking,
                             enum kvk_tier tier, enum kvk_advice_kind kind,
                             struct kvk_advice_item items[ITEMS_MAX], bool *is_time)
{
    uint32_t count = 0;
    uint32_t looked = 0;
    for (const struct kvk_sequence *s = asking->instance->sequences;
         s != NULL && count < ITEMS_MAX && looked < BLOCKS_MAX; s = s->next) {
        looked++;
        if (s == asking || !may_be_named(s, tier, kind)) {
            continue;
        }
        uint64_t bytes = freed_bytes(cache, s, tier, kind, &looked);
        if (bytes > 0) {
            items[count++] = (struct kvk_advice_item){
                .id = s->id, .bytes = bytes, .cost = cost_of(cache, s, kind, bytes, is_time)};
        }
    }
    return count;
}

/* Room below for what is swapped out. */
static bool fits_below(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                       const struct kvk_advice *advice)
{
    return cache->tiers[KVK_TIER_HOST].device != NULL &&
           is_let_in(cache, tenant, KVK_TIER_HOST, advice->bytes, 0);
}

static bool advice_make(const struct kvk_cache *cache, const struct kvk_sequence *asking,
                        enum kvk_tier tier, enum kvk_advice_kind kind, uint64_t missing,
                        struct kvk_advice *advice)
{
    struct kvk_advice_item items[ITEMS_MAX];
    bool is_time = true;
    uint32_t count = items_gather(cache, asking, tier, kind, items, &is_time);
    uint32_t chosen = kvk_advice_choose(items, count, missing);
    if (chosen == 0) {
        return false;
    }
    *advice = (struct kvk_advice){.kind = kind, .total = chosen, .missing_bytes = missing};
    for (uint32_t i = 0; i < chosen; i++) {
        advice->bytes += items[i].bytes;
        advice->cost_ns += is_time ? items[i].cost : 0;
        if (i < KVK_ADVICE_MAX) {
            advice->sequence_ids[i] = items[i].id;
            advice->sequence_bytes[i] = items[i].bytes;
            advice->count++;
        }
    }
    return kind != KVK_ADVISE_SWAP_OUT || fits_below(cache, asking->space->tenant, advice);
}

/* ---- When to try again ---- */

void kvk_release_rates_maintain(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint64_t now_ns = kvk_clock_now(cache->clock);
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        struct kvk_release_rate *rate = &cache->tiers[i].release_rate;
        uint64_t passed_ns = now_ns - rate->measured_ns;
        if (rate->measured_ns != 0 && passed_ns < MEASURE_NS) {
            continue;
        }
        if (rate->measured_ns != 0) {
            double now =
                (double)(rate->released_bytes - rate->measured_bytes) * 1e9 / (double)passed_ns;
            double before = (double)rate->bytes_per_second;
            rate->bytes_per_second = (uint64_t)(before == 0 ? now : 0.8 * before + 0.2 * now);
        }
        rate->measured_ns = now_ns;
        rate->measured_bytes = rate->released_bytes;
    }
}

static uint64_t bounded_ms(double ms)
{
    return ms < (double)KVK_RETRY_MS_MIN   ? KVK_RETRY_MS_MIN
           : ms > (double)KVK_RETRY_MS_MAX ? KVK_RETRY_MS_MAX
                                           : (uint64_t)ms;
}

static uint64_t lease_bytes(const struct kvk_lease *lease)
{
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < lease->space->group_count; g++) {
        bytes += lease->groups[g].block_count * lease->space->groups[g]->block_bytes;
    }
    return bytes;
}

/*
 * When will leases of so many bytes have expired? The heap's parents expire before their children,
 * so the next one is always among the children of those that were taken before.
 */
static uint64_t leases_end_ms(const struct kvk_cache *cache, uint64_t missing)
{
    const struct kvk_lease *front[2 * LEASES_MAX];
    uint32_t count = 0;
    uint64_t bytes = 0;
    uint64_t until_ns = 0;
    if (cache->lease_heap != NULL) {
        front[count++] = cache->lease_heap;
    }
    for (uint32_t looked = 0; looked < LEASES_MAX && count > 0 && bytes < missing; looked++) {
        uint32_t first = 0;
        for (uint32_t i = 1; i < count; i++) {
            first = front[i]->expires_ns < front[first]->expires_ns ? i : first;
        }
        const struct kvk_lease *lease = front[first];
        front[first] = front[--count];
        bytes += lease_bytes(lease);
        until_ns = lease->expires_ns;
        const struct kvk_lease *child = lease->heap_child;
        for (; child != NULL && count < 2 * LEASES_MAX; child = child->heap_next) {
            front[count++] = child;
        }
    }
    uint64_t now_ns = kvk_lease_clock(cache);
    return bounded_ms(until_ns > now_ns ? (double)(until_ns - now_ns) / 1e6 : 0);
}

static uint64_t released_ms(const struct kvk_tier_state *tier, uint64_t missing)
{
    uint64_t rate = tier->release_rate.bytes_per_second;
    return rate == 0 ? HINT_UNKNOWN_MS : bounded_ms((double)missing * 1e3 / (double)rate);
}

static uint64_t retry_ms(const struct kvk_cache *cache, enum kvk_tier tier, enum kvk_cause cause,
                         uint64_t missing)
{
    const struct kvk_tier_state *state = &cache->tiers[tier];
    if (cause == KVK_CAUSE_POOL_LEASED) {
        return leases_end_ms(cache, missing);
    }
    if (cause == KVK_CAUSE_COPIES_IN_FLIGHT) {
        return bounded_ms((double)kvk_tier_load_ns(cache, state->copying_bytes) / 1e6);
    }
    return released_ms(state, missing);
}

/* ---- The call ---- */

void kvk_advise(const struct kvk_cache *cache, enum kvk_tier tier, uint64_t needed_bytes,
                const struct kvk_space *space, const struct kvk_sequence *sequence,
                struct kvk_error *refusal)
{
    if (refusal == NULL || refusal->status != KVK_EXHAUSTED ||
        refusal->cause == KVK_CAUSE_TOO_LARGE || refusal->cause == KVK_CAUSE_LIMIT) {
        return; /* waiting does not help, or it is not for room */
    }
    uint64_t own_growth = sequence != NULL && sequence->home == tier ? sequence->growth_bytes : 0;
    uint64_t missing = missing_bytes(cache, space->tenant, tier, needed_bytes, own_growth);
    bool is_own = refusal->cause == KVK_CAUSE_TENANT_LIMIT;
    if (!is_own && missing != UINT64_MAX) {
        refusal->retry_after_ms = retry_ms(cache, tier, refusal->cause, missing);
    }
    if (sequence != NULL && missing != UINT64_MAX && missing > 0) {
        struct kvk_advice advice;
        if ((tier == KVK_TIER_DEVICE &&
             advice_make(cache, sequence, tier, KVK_ADVISE_SWAP_OUT, missing, &advice)) ||
            advice_make(cache, sequence, tier, KVK_ADVISE_CLOSE, missing, &advice)) {
            refusal->advice = advice;
        }
    }
}
