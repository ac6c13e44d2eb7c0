/* What tenants have used, across a daemon that is killed: all but the last KVK_USAGE_SAVE_S. */
#include <stdio.h>

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

/* What a daemon wrote down that knew one counter less is read as what it was. */
Test(usage_crash, a_record_of_an_older_daemon_counts)
{
    struct place place;
    struct kvk_error error;
    char name[32];
    uint32_t record[128];
    size_t size = sizeof(record);
    place_init(&place);
    daemon_start(&place);
    chain_put(&place, 1000, CHAIN_TOKENS);
    chain_put(&place, 1000, CHAIN_TOKENS);
    kvk_usage_save(place.house.cache);
    const struct kvk_tenant_usage before = usage_of(&place);
    cr_assert_gt(before.saved_tokens, 0);
    (void)snprintf(name, sizeof(name), "usage.%016llx",
                   (unsigned long long)place_group(&place)->space->tenant->id);
    cr_assert_eq(
        kvk_catalogue_get_value(place.house.durable.catalogue, name, record, &size, &error),
        KVK_OK);
    cr_assert_eq(record[0], 2U);
    cr_assert_eq(record[1], size);
    daemon_stop(&place);

    struct kvk_catalogue *catalogue = NULL;
    char folder[128];
    (void)snprintf(folder, sizeof(folder), "%s/data", place.folder);
    const struct kvk_catalogue_options options = {.folder = folder,
                                                  .map_bytes = UINT64_C(64) << 20};
    cr_assert_eq(kvk_catalogue_open(&options, &catalogue, &error), KVK_OK, "%s", error.text);
    record[0] = 1;
    record[1] = (uint32_t)size - 8;
    cr_assert_eq(kvk_catalogue_put_value(catalogue, name, record, size - 8, &error), KVK_OK);
    kvk_catalogue_close(catalogue);

    daemon_start(&place);
    const struct kvk_tenant_usage after = usage_of(&place);
    cr_expect_eq(after.saved_tokens, before.saved_tokens);
    cr_expect_eq(after.rate_refusals, before.rate_refusals);
    cr_expect_eq(after.partial_hit_tokens, 0U);
    daemon_stop(&place);
    place_finish(&place);
}
