/* What tenants have used, across a daemon that is killed: all but the last KVK_USAGE_SAVE_S. */
#include "daemon/report_usage.h"
#include "tests/engine_warm.h"

static struct kvk_tenant_usage usage_of(struct place *place)
{
    struct kvk_tenant_usage usage;
    kvk_usage_get(place->house.cache, place_group(place)->space->tenant, &usage);
    return usage;
}

/* A chain that is found again, by three others; then its record is due; then one more, which the
 * kill comes too soon for. */
static void life_with_a_due_record(struct place *place)
{
    struct kvk_cache *cache = place->house.cache;
    chain_put(place, 1000, CHAIN_TOKENS);
    for (int i = 0; i < 3; i++) {
        chain_put(place, 1000, CHAIN_TOKENS);
    }
    kvk_lock(&cache->lock);
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, place_group(place)->space->tenant);
    state->usage_saved_ns -= KVK_USAGE_SAVE_S * KVK_NS_PER_SECOND; /* as if so long had passed */
    kvk_unlock(&cache->lock);
    for (int i = 0; i < 64; i++) { /* a round looks at some of the places for tenants */
        kvk_cache_maintain(cache);
    }
    place->shared->numbers[0] = usage_of(place).saved_tokens;
    chain_put(place, 1000, CHAIN_TOKENS);
    place->shared->numbers[1] = usage_of(place).saved_tokens;
}

Test(usage_crash, what_was_due_is_there_and_no_more_than_that_is_lost)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_with_a_due_record);
    cr_assert_gt(place.shared->numbers[0], 0);
    cr_assert_gt(place.shared->numbers[1], place.shared->numbers[0]);
    daemon_start(&place);
    cr_assert_eq(usage_of(&place).saved_tokens, place.shared->numbers[0]);
    cr_assert_leq(KVK_USAGE_SAVE_S, 10, "as it is documented");
    daemon_stop(&place);
    place_finish(&place);
}
