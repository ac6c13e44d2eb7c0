/* Quotas: limits that no path passes, guarantees that nobody takes, and what is said and counted.
 */
#include "tests/engine_tenants.h"

#define DEVICE KVK_TIER_DEVICE
#define HOST KVK_TIER_HOST

/* ---- J1 ---- */

static void j1(uint32_t over_quota, bool on_host)
{
    struct party party;
    enum kvk_tier tier = on_host ? HOST : DEVICE;
    party_init(&party, 2);
    party_quota(&party, 0)->limit_bytes[tier] = 10 * BLOCK;
    party.house.config.tenants[0].over_quota = over_quota;
    party_start(&party, on_host ? 0 : 64, on_host ? 64 : 0);
    for (uint32_t i = 0; i < 20; i++) {
        party_store(&party, 1, i, 1);
    }
    uint32_t accepted = 0;
    uint32_t refused = 0;
    for (uint32_t i = 0; i < 256; i++) {
        enum kvk_status status = party_try_store(&party, 0, i, 1);
        accepted += status == KVK_OK ? 1 : 0;
        if (status != KVK_OK) {
            refused++;
            cr_assert_eq(status, KVK_EXHAUSTED);
            cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT);
            cr_assert_eq(party.house.error.limit, 10 * BLOCK);
            cr_assert_str_eq(party.house.error.field,
                             on_host ? "host_limit_bytes" : "device_limit_bytes");
        }
        cr_assert_leq(party_blocks(&party, 0, tier), 10);
        kvk_cache_check(party.house.cache);
    }
    struct kvk_tenant_usage usage = party_usage(&party, 0);
    uint32_t resident = party_cached(&party, 0, 0, 256);
    cr_expect_eq(accepted + refused, 256);
    cr_expect_eq(accepted - usage.evictions[tier], resident, "accepted - evicted = resident");
    cr_expect_eq(resident, 10);
    cr_expect_eq(usage.limit_refusals, refused, "every refusal is counted");
    cr_expect_eq(usage.sealed_blocks, accepted);
    cr_expect_eq(usage.limit_evictions, usage.evictions[tier]);
    cr_expect_eq(refused, over_quota == KVK_OVER_QUOTA_REFUSE ? 246 : 0);
    if (over_quota == KVK_OVER_QUOTA_EVICT) {
        cr_expect_eq(party_cached(&party, 0, 246, 10), 10, "the least worth went");
    }
    cr_expect_eq(party_cached(&party, 1, 0, 20), 20, "the neighbour still has 20");
    cr_expect_eq(party_usage(&party, 1).evictions[tier], 0);
    party_stop(&party);
}

Test(quota, j1_over_the_limit_ones_own_idle_blocks_go)
{
    j1(KVK_OVER_QUOTA_EVICT, false);
    j1(KVK_OVER_QUOTA_EVICT, true);
}

Test(quota, j1_over_the_limit_writes_are_refused_where_so_configured)
{
    j1(KVK_OVER_QUOTA_REFUSE, false);
    j1(KVK_OVER_QUOTA_REFUSE, true);
}

Test(quota, what_can_never_fit_is_refused_at_once_and_nothing_is_evicted_for_it)
{
    struct party party;
    struct kvk_sequence_reply reply;
    party_init(&party, 1);
    party_quota(&party, 0)->limit_bytes[DEVICE] = 10 * BLOCK;
    party_start(&party, 64, 0);
    for (uint32_t i = 0; i < 10; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_try_open(&party, 0, 100, 11, &reply), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT);
    cr_assert_eq(party.house.error.value, 11 * BLOCK);
    cr_assert_eq(party.house.error.retry_after_ms, 0, "it would never fit");
    cr_assert_eq(party_cached(&party, 0, 0, 10), 10);
    /* What others of its own are using stands in the way for a while only. */
    cr_assert_eq(party_try_open(&party, 0, 200, 6, &reply), KVK_OK);
    struct kvk_sequence_reply second;
    cr_assert_eq(party_try_open(&party, 0, 300, 5, &second), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT);
    cr_assert_gt(party.house.error.retry_after_ms, 0);
    cr_assert_eq(party_try_open(&party, 0, 300, 4, &second), KVK_OK, "%s", party.house.error.text);
    party_stop(&party);
}

Test(quota, several_groups_of_a_space_share_one_limit)
{
    struct party party;
    party_init(&party, 2);
    party_quota(&party, 0)->limit_bytes[DEVICE] = 8 * BLOCK;
    party_start(&party, 64, 64);
    party_be(&party, 0);
    struct kvk_geometry groups[2] = {house_geometry(), house_geometry()};
    uint64_t space = house_space_of(&party.house, &party.callers[0], "two", groups, 2);
    for (uint32_t i = 0; i < 40; i++) {
        uint32_t tokens[12];
        struct kvk_sequence_reply reply;
        house_tokens(tokens, 12, 5000 * (i + 1));
        cr_assert_eq(house_try_open(&party.house, party.sessions[0], space, tokens, 12, &reply),
                     KVK_OK, "%u: %s", i, party.house.error.text);
        house_seal(&party.house, party.sessions[0], reply.sequence_id, 12);
        house_close(&party.house, party.sessions[0], reply.sequence_id);
        party_store(&party, 0, i, 2);
        cr_assert_leq(party_blocks(&party, 0, DEVICE), 8);
        kvk_cache_check(party.house.cache);
    }
    cr_assert_eq(party.house.cache->stats.refusals, 0);
    cr_assert_gt(party_blocks(&party, 0, HOST), 40, "they went down, not away");
    party_stop(&party);
}

/* ---- Every path ---- */

Test(quota, demotion_does_not_pass_the_limit_of_the_host)
{
    for (uint32_t over_quota = 0; over_quota < 2; over_quota++) {
        struct party party;
        party_init(&party, 2);
        party_quota(&party, 0)->limit_bytes[HOST] = 5 * BLOCK;
        party.house.config.tenants[0].over_quota = over_quota;
        party_start(&party, 8, 64);
        for (uint32_t i = 0; i < 100; i++) {
            party_store(&party, 0, i, 1);
            cr_assert_leq(party_blocks(&party, 0, HOST), 5);
            kvk_cache_check(party.house.cache);
        }
        cr_assert_eq(party_blocks(&party, 0, HOST), 5);
        cr_assert_gt(party_usage(&party, 0).moved_bytes, 4 * BLOCK);
        party_stop(&party);
    }
}

Test(quota, demotion_ahead_of_need_stays_within_the_limit)
{
    struct party party;
    party_init(&party, 2);
    party.house.config.device_free_percent = 50;
    party_quota(&party, 0)->limit_bytes[HOST] = 3 * BLOCK;
    party_start(&party, 16, 64);
    for (uint32_t i = 0; i < 60; i++) {
        party_store(&party, 0, i, 1);
        kvk_cache_maintain(party.house.cache);
        cr_assert_leq(party_blocks(&party, 0, HOST), 3);
        kvk_cache_check(party.house.cache);
    }
    cr_assert_eq(party_blocks(&party, 0, HOST), 3);
    party_stop(&party);
}

static enum kvk_status swap(struct party *party, bool in, uint64_t sequence_id)
{
    struct kvk_swap_reply reply;
    struct house *house = &party->house;
    return (in ? kvk_sequence_swap_in : kvk_sequence_swap_out)(
        house->cache, &house->caller, party->sessions[0], sequence_id, &reply, NULL, &house->error);
}

Test(quota, swapping_out_and_in_stays_within_the_limits)
{
    struct party party;
    struct kvk_sequence_reply reply;
    party_init(&party, 1);
    party_quota(&party, 0)->limit_bytes[HOST] = 4 * BLOCK;
    party_quota(&party, 0)->limit_bytes[DEVICE] = 8 * BLOCK;
    party_start(&party, 32, 32);
    cr_assert_eq(party_try_open(&party, 0, 1, 5, &reply), KVK_OK);
    house_seal(&party.house, party.sessions[0], reply.sequence_id, 20);
    cr_assert_eq(swap(&party, false, reply.sequence_id), KVK_EXHAUSTED, "%s",
                 party.house.error.text);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT, "%s", party.house.error.text);
    cr_assert_str_eq(party.house.error.field, "host_limit_bytes");
    kvk_cache_check(party.house.cache);
    house_close(&party.house, party.sessions[0], reply.sequence_id);

    cr_assert_eq(party_try_open(&party, 0, 2, 4, &reply), KVK_OK);
    house_seal(&party.house, party.sessions[0], reply.sequence_id, 16);
    cr_assert_eq(swap(&party, false, reply.sequence_id), KVK_OK, "%s", party.house.error.text);
    cr_assert_eq(party_blocks(&party, 0, HOST), 4);
    /* Others of its own took the device meanwhile. */
    struct kvk_sequence_reply other;
    cr_assert_eq(party_try_open(&party, 0, 3, 5, &other), KVK_OK);
    cr_assert_eq(swap(&party, true, reply.sequence_id), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT);
    cr_assert_eq(party_blocks(&party, 0, HOST), 4, "still whole there");
    house_close(&party.house, party.sessions[0], other.sequence_id);
    cr_assert_eq(swap(&party, true, reply.sequence_id), KVK_OK, "%s", party.house.error.text);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

Test(quota, a_lowered_limit_takes_what_is_idle_and_waits_for_the_rest)
{
    struct party party;
    struct kvk_sequence_reply reply;
    struct kvk_tenant_quota quota;
    party_init(&party, 1);
    party_start(&party, 64, 0);
    for (uint32_t i = 0; i < 20; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_try_open(&party, 0, 100, 10, &reply), KVK_OK);
    kvk_quota_get(party.house.cache, party_tenant(&party, 0), &quota);
    quota.limit_bytes[DEVICE] = 6 * BLOCK;
    cr_assert_eq(
        kvk_quota_set(party.house.cache, party_tenant(&party, 0), &quota, &party.house.error),
        KVK_OK);
    kvk_cache_maintain(party.house.cache);
    kvk_cache_check(party.house.cache);
    cr_assert_eq(party_blocks(&party, 0, DEVICE), 10, "what runs goes on");
    house_close(&party.house, party.sessions[0], reply.sequence_id);
    kvk_cache_maintain(party.house.cache);
    cr_assert_leq(party_blocks(&party, 0, DEVICE), 6);
    kvk_cache_maintain(party.house.cache);
    cr_assert(!party.house.cache->trim_wanted);
    party_stop(&party);
}

/* ---- Guarantees ---- */

Test(quota, a_flood_does_not_take_what_is_guaranteed)
{
    struct party party;
    party_init(&party, 2);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 40 * BLOCK;
    party_start(&party, 64, 0);
    for (uint32_t i = 0; i < 40; i++) {
        party_store(&party, 0, i, 1);
    }
    for (uint32_t i = 0; i < 500; i++) {
        party_store(&party, 1, i, 1);
        kvk_cache_check(party.house.cache);
    }
    cr_assert_eq(party_cached(&party, 0, 0, 40), 40, "more than an equal share, and all of it");
    cr_assert_eq(party_usage(&party, 0).evictions[DEVICE], 0);
    cr_assert_eq(party_blocks(&party, 1, DEVICE), 24, "and the rest is used");
    party_stop(&party);
}

Test(quota, what_is_borrowed_comes_back_at_once)
{
    struct party party;
    party_init(&party, 3);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 30 * BLOCK;
    party_start(&party, 60, 0);
    for (uint32_t i = 0; i < 5; i++) {
        party_store(&party, 0, i, 1);
    }
    for (uint32_t i = 0; i < 200; i++) {
        party_store(&party, 1, i, 1);
    }
    cr_assert_geq(party_blocks(&party, 1, DEVICE), 50, "what is not used may be borrowed");
    for (uint32_t i = 5; i < 30; i++) {
        party_store(&party, 0, i, 1);
        kvk_cache_check(party.house.cache);
    }
    cr_assert_eq(party_cached(&party, 0, 0, 30), 30, "not one of its own went for it");
    cr_assert_eq(party_usage(&party, 0).evictions[DEVICE], 0);
    cr_assert_eq(party_blocks(&party, 1, DEVICE), 30);
    party_stop(&party);
}

Test(quota, a_guarantee_holds_in_both_tiers_and_with_slabs_of_many_slots)
{
    struct party party;
    party_init(&party, 2);
    party_quota(&party, 0)->guaranteed_bytes[HOST] = 300 * BLOCK;
    party_start(&party, 32, 640); /* slabs of ten slots */
    for (uint32_t i = 0; i < 320; i++) {
        party_store(&party, 0, i, 1);
    }
    for (uint32_t i = 0; i < 40; i++) {
        party_store(&party, 1, i, 1); /* what is on the device goes down */
    }
    uint64_t before = party_blocks(&party, 0, HOST);
    cr_assert_geq(before, 290);
    for (uint32_t i = 40; i < 2000; i++) {
        party_store(&party, 1, i, 1);
    }
    kvk_cache_check(party.house.cache);
    uint64_t after = party_blocks(&party, 0, HOST);
    cr_assert_geq(after, before < 300 ? before : 300, "%llu of %llu", (unsigned long long)after,
                  (unsigned long long)before);
    party_stop(&party);
}

/* Chains make one block's going take others along: also then no more goes than may. */
Test(quota, a_guarantee_counts_what_hangs_below)
{
    struct party party;
    party_init(&party, 2);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 190 * BLOCK;
    party_start(&party, 256, 0); /* slabs of four slots */
    for (uint32_t i = 0; i < 10; i++) {
        party_store(&party, 0, i, 20);
    }
    cr_assert_eq(party_blocks(&party, 0, DEVICE), 200);
    for (uint32_t i = 0; i < 400; i++) {
        party_store(&party, 1, i, 3);
        cr_assert_geq(party_blocks(&party, 0, DEVICE), 190);
    }
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

/* What runs takes from who is above his guarantee, and not a block more. */
Test(quota, running_sequences_take_no_more_than_is_spare)
{
    struct party party;
    struct kvk_sequence_reply reply;
    party_init(&party, 2);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 190 * BLOCK;
    party_start(&party, 256, 0); /* slabs of four slots */
    for (uint32_t i = 0; i < 10; i++) {
        party_store(&party, 0, i, 20);
    }
    enum kvk_status status = KVK_OK;
    uint32_t opened = 0;
    for (uint32_t i = 0; status == KVK_OK; i++) {
        status = party_try_open(&party, 1, i, 1, &reply);
        opened += status == KVK_OK ? 1 : 0;
        cr_assert_geq(party_blocks(&party, 0, DEVICE), 190, "after %u", opened);
    }
    cr_assert_eq(status, KVK_EXHAUSTED);
    cr_assert_geq(opened, 60, "whole slabs of what is spare are had: %u", opened);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

/* None of them is far above its share, and still together they have what is the owner's. */
Test(quota, many_small_borrowers_give_back_too)
{
    struct party party;
    party_init(&party, 35);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 30 * BLOCK;
    party_start(&party, 64, 0);
    for (uint32_t i = 0; i < 2; i++) {
        for (uint32_t t = 1; t < 35; t++) {
            party_store(&party, t, i, 1);
        }
    }
    for (uint32_t i = 0; i < 30; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_cached(&party, 0, 0, 30), 30);
    cr_assert_eq(party_usage(&party, 0).evictions[DEVICE], 0);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

Test(quota, active_work_of_others_leaves_room_for_what_is_guaranteed)
{
    struct party party;
    struct kvk_sequence_reply reply;
    struct kvk_sequence_reply mine;
    party_init(&party, 2);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 20 * BLOCK;
    party_start(&party, 64, 0);
    cr_assert_eq(party_try_open(&party, 1, 1, 45, &reply), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_GUARANTEED, "%s", party.house.error.text);
    cr_assert_str_eq(party.house.error.field, "device_guaranteed_bytes");
    cr_assert_eq(party_try_open(&party, 1, 1, 44, &reply), KVK_OK, "%s", party.house.error.text);
    cr_assert_eq(party_try_open(&party, 0, 1, 20, &mine), KVK_OK, "%s", party.house.error.text);
    kvk_cache_check(party.house.cache);
    house_close(&party.house, party.sessions[0], mine.sequence_id);
    party_stop(&party);
}

Test(quota, growth_that_is_kept_counts_like_what_is_used)
{
    struct party party;
    uint32_t tokens[8];
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    party_init(&party, 2);
    party_quota(&party, 0)->limit_bytes[DEVICE] = 10 * BLOCK;
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 10 * BLOCK;
    party_start(&party, 64, 0);
    house_tokens(tokens, 8, 1);
    struct kvk_open_request request = {.session_id = party.sessions[0],
                                       .space_id = party.spaces[0],
                                       .prompt = {.tokens = tokens, .token_count = 8},
                                       .growth_tokens = 36,
                                       .tier = -1};
    party_be(&party, 0);
    cr_assert_eq(kvk_sequence_open(party.house.cache, &party.house.caller, &request, &reply,
                                   &tables, &party.house.error),
                 KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT);
    request.growth_tokens = 32;
    cr_assert_eq(kvk_sequence_open(party.house.cache, &party.house.caller, &request, &reply,
                                   &tables, &party.house.error),
                 KVK_OK, "%s", party.house.error.text);
    kvk_cache_check(party.house.cache);
    struct kvk_sequence_reply other;
    cr_assert_eq(party_try_open(&party, 0, 9, 1, &other), KVK_EXHAUSTED, "it is kept");
    cr_assert_eq(party_try_open(&party, 1, 9, 55, &other), KVK_EXHAUSTED);
    cr_assert_eq(party_try_open(&party, 1, 9, 54, &other), KVK_OK, "%s", party.house.error.text);
    kvk_tables_finish(&tables);
    party_stop(&party);
}

Test(quota, holds_on_what_was_borrowed_leave_the_owner_its_share)
{
    struct party party;
    uint32_t tokens[256];
    struct kvk_pin_reply pinned;
    struct kvk_sequence_reply reply;
    party_init(&party, 2);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 20 * BLOCK;
    party_start(&party, 64, 0);
    for (uint32_t i = 0; i < 8; i++) {
        party_store(&party, 1, i, 8);
    }
    uint64_t bound = 0;
    uint32_t leases = 0;
    enum kvk_status status = KVK_OK;
    for (uint32_t i = 0; i < 8 && status == KVK_OK; i++) {
        house_tokens(tokens, 32, i * 1000);
        const struct kvk_pin_request request = {
            .session_id = party.sessions[1],
            .space_id = party.spaces[1],
            .prompt = {.tokens = tokens, .token_count = 32},
            .ttl_ms = 1000,
        };
        status = kvk_lease_pin(party.house.cache, &party.house.caller, &request, &pinned, NULL,
                               &party.house.error);
        leases += status == KVK_OK ? 1 : 0;
        bound = house_bound(&party.house, DEVICE);
        kvk_cache_check(party.house.cache);
    }
    cr_assert_eq(status, KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_GUARANTEED, "%s", party.house.error.text);
    cr_assert_eq(leases, 5);
    cr_assert_eq(bound, 40 * BLOCK, "what was refused is held no more");
    /* A hit of a sequence is a hold too. */
    cr_assert_eq(party_try_open(&party, 1, 7, 8, &reply), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_GUARANTEED);
    cr_assert_eq(house_bound(&party.house, DEVICE), 40 * BLOCK);
    cr_assert_eq(party_try_open(&party, 0, 1, 20, &reply), KVK_OK, "%s", party.house.error.text);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

/* ---- Between those above their guarantee ---- */

Test(quota, who_is_furthest_above_the_fair_share_pays_first)
{
    struct party party;
    party_init(&party, 3);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 32 * BLOCK;
    party_start(&party, 128, 0);
    /* Fair shares of three: 32 guaranteed and 32 each: 64, 32, 32. */
    for (uint32_t i = 0; i < 60; i++) {
        party_store(&party, 0, i, 1);
    }
    for (uint32_t i = 0; i < 68; i++) {
        party_store(&party, 1, i, 1);
    }
    cr_assert_eq(party_blocks(&party, 1, DEVICE), 68, "36 above its share");
    for (uint32_t i = 0; i < 30; i++) {
        party_store(&party, 2, i, 1);
    }
    cr_assert_eq(party_cached(&party, 2, 0, 30), 30);
    cr_assert_eq(party_blocks(&party, 0, DEVICE), 60, "it is within its share");
    cr_assert_eq(party_blocks(&party, 1, DEVICE), 38);
    party_stop(&party);
}

Test(quota, a_hundred_tenants_get_their_guarantee)
{
    struct party party;
    party_init(&party, 61);
    for (uint32_t i = 1; i < 61; i++) {
        party_quota(&party, i)->guaranteed_bytes[DEVICE] = 8 * BLOCK;
    }
    party_start(&party, 600, 0); /* slabs of nine slots */
    for (uint32_t i = 0; i < 700; i++) {
        party_store(&party, 0, i, 1);
    }
    for (uint32_t t = 1; t < 61; t++) {
        for (uint32_t i = 0; i < 8; i++) {
            party_store(&party, t, i, 1);
        }
        cr_assert_eq(party_blocks(&party, t, DEVICE), 8);
    }
    for (uint32_t i = 0; i < 300; i++) {
        party_store(&party, 0, 1000 + i, 1);
    }
    for (uint32_t t = 1; t < 61; t++) {
        cr_assert_eq(party_cached(&party, t, 0, 8), 8, "tenant %u", t);
    }
    party_stop(&party);
}

/* ---- Setting ---- */

Test(quota, a_limit_that_no_block_fits_in_is_told)
{
    struct party party;
    struct kvk_tenant_quota quota = {.idle_ms = 0};
    struct kvk_quota_short found;
    char text[256];
    party_init(&party, 2);
    party_start(&party, 64, 64);
    const struct kvk_tenant *tenant = party_tenant(&party, 1);
    quota.limit_bytes[HOST] = BLOCK - 1;
    cr_assert_eq(kvk_quota_set(party.house.cache, tenant, &quota, &party.house.error), KVK_OK);
    kvk_quota_short_text(party.house.cache, tenant, text, sizeof(text));
    cr_expect_not_null(strstr(text, "host_limit_bytes is 1023, less than the 1024 bytes"), "%s",
                       text);
    kvk_lock(&party.house.cache->lock);
    cr_expect(kvk_quota_is_short(party.house.cache, tenant, &found));
    cr_expect_eq(found.tier, KVK_TIER_HOST);
    cr_expect_eq(found.block_bytes, BLOCK);
    cr_expect_not(kvk_quota_is_short(party.house.cache, party_tenant(&party, 0), &found),
                  "another tenant's is its own");
    kvk_unlock(&party.house.cache->lock);
    quota.limit_bytes[HOST] = BLOCK;
    cr_assert_eq(kvk_quota_set(party.house.cache, tenant, &quota, &party.house.error), KVK_OK);
    kvk_quota_short_text(party.house.cache, tenant, text, sizeof(text));
    cr_expect_str_eq(text, "", "one block fits");
    quota.limit_bytes[HOST] = 0;
    cr_assert_eq(kvk_quota_set(party.house.cache, tenant, &quota, &party.house.error), KVK_OK);
    kvk_quota_short_text(party.house.cache, tenant, text, sizeof(text));
    cr_expect_str_eq(text, "", "0 is no limit");
    party_stop(&party);
}

Test(quota, impossible_quotas_are_refused_with_field_and_limit)
{
    struct party party;
    struct kvk_tenant_quota quota = {.idle_ms = 0};
    struct kvk_error *error = &party.house.error;
    party_init(&party, 2);
    party_quota(&party, 0)->guaranteed_bytes[DEVICE] = 40 * BLOCK;
    party_start(&party, 64, 0);
    const struct kvk_tenant *tenant = party_tenant(&party, 1);
    quota.guaranteed_bytes[DEVICE] = 25 * BLOCK;
    cr_expect_eq(kvk_quota_set(party.house.cache, tenant, &quota, error), KVK_INVALID);
    cr_expect_str_eq(error->field, "device_guaranteed_bytes");
    cr_expect_eq(error->limit, 24 * BLOCK);
    quota.guaranteed_bytes[DEVICE] = 24 * BLOCK;
    cr_expect_eq(kvk_quota_set(party.house.cache, tenant, &quota, error), KVK_OK);
    quota.limit_bytes[DEVICE] = 23 * BLOCK;
    cr_expect_eq(kvk_quota_set(party.house.cache, tenant, &quota, error), KVK_INVALID);
    quota.guaranteed_bytes[DEVICE] = 0;
    quota.guaranteed_bytes[HOST] = 1;
    cr_expect_eq(kvk_quota_set(party.house.cache, tenant, &quota, error), KVK_INVALID);
    cr_expect_str_eq(error->field, "host_guaranteed_bytes");
    quota.guaranteed_bytes[HOST] = 0;
    quota.request_burst = 5;
    cr_expect_eq(kvk_quota_set(party.house.cache, tenant, &quota, error), KVK_INVALID);
    cr_expect_str_eq(error->field, "request_burst");
    quota.request_burst = 0;
    quota.over_quota = 2;
    cr_expect_eq(kvk_quota_set(party.house.cache, tenant, &quota, error), KVK_INVALID);
    cr_expect_str_eq(error->field, "over_quota");
    kvk_quota_get(party.house.cache, tenant, &quota);
    cr_expect_eq(quota.guaranteed_bytes[DEVICE], 24 * BLOCK, "the last good one holds");
    party_stop(&party);
}

Test(quota, a_start_with_more_guaranteed_than_there_is_fails_in_words)
{
    struct house house;
    house_init(&house);
    house.config.tenants = calloc(2, sizeof(*house.config.tenants));
    house.config.credentials = calloc(1, sizeof(*house.config.credentials));
    house.config.tenant_count = 2;
    house.config.credential_count = 1;
    for (uint32_t i = 0; i < 2; i++) {
        (void)snprintf(house.config.tenants[i].name, KVK_NAME_SIZE, "tenant-%u", i);
        house.config.tenants[i].quota.guaranteed_bytes[DEVICE] = 40 * BLOCK;
    }
    (void)snprintf(house.config.credentials[0].name, KVK_NAME_SIZE, "c");
    (void)snprintf(house.config.credentials[0].token, KVK_NAME_SIZE, "0123456789abcdef");
    house.config.credentials[0].tenant_count = 1;
    house.config.device_bytes = 64 * BLOCK;
    house.config.host_bytes = 0;
    cr_assert_eq(kvk_config_check(&house.config, &house.error), KVK_INVALID);
    cr_assert_not_null(strstr(house.error.text, "device_guaranteed_bytes"), "%s", house.error.text);
    kvk_config_finish(&house.config);
}

/* ---- Counts ---- */

Test(quota, sequences_and_leases_have_limits_of_their_own)
{
    struct party party;
    struct kvk_sequence_reply replies[4];
    struct kvk_pin_reply pinned;
    uint32_t tokens[4];
    party_init(&party, 2);
    party_quota(&party, 0)->sequences = 3;
    party_quota(&party, 0)->leases = 2;
    party_start(&party, 64, 0);
    party_store(&party, 0, 50, 1);
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert_eq(party_try_open(&party, 0, i, 1, &replies[i]), KVK_OK);
    }
    cr_assert_eq(party_try_open(&party, 0, 3, 1, &replies[3]), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT);
    cr_assert_str_eq(party.house.error.field, "sequences");
    cr_assert_eq(party.house.error.limit, 3);
    cr_assert_gt(party.house.error.retry_after_ms, 0);
    cr_assert_eq(party_try_open(&party, 1, 3, 1, &replies[3]), KVK_OK, "the other has no limit");
    party_be(&party, 0);
    house_close(&party.house, party.sessions[0], replies[0].sequence_id);
    cr_assert_eq(party_try_open(&party, 0, 3, 1, &replies[0]), KVK_OK);
    house_tokens(tokens, 4, 50000);
    const struct kvk_pin_request request = {.session_id = party.sessions[0],
                                            .space_id = party.spaces[0],
                                            .prompt = {.tokens = tokens, .token_count = 4},
                                            .ttl_ms = 1000};
    for (uint32_t i = 0; i < 3; i++) {
        enum kvk_status status = kvk_lease_pin(party.house.cache, &party.house.caller, &request,
                                               &pinned, NULL, &party.house.error);
        cr_assert_eq(status, i < 2 ? KVK_OK : KVK_EXHAUSTED, "lease %u", i);
    }
    cr_assert_str_eq(party.house.error.field, "leases");
    cr_assert_eq(party_usage(&party, 0).limit_refusals, 2);
    kvk_clock_manual_set(&party.house.manual, 1002 * KVK_NS_PER_SECOND);
    kvk_cache_maintain(party.house.cache);
    cr_assert_eq(kvk_lease_pin(party.house.cache, &party.house.caller, &request, &pinned, NULL,
                               &party.house.error),
                 KVK_OK, "expired ones do not count");
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

Test(quota, forks_count_as_sequences)
{
    struct party party;
    struct kvk_sequence_reply reply;
    uint64_t ids[4];
    party_init(&party, 1);
    party_quota(&party, 0)->sequences = 3;
    party_start(&party, 64, 0);
    cr_assert_eq(party_try_open(&party, 0, 1, 1, &reply), KVK_OK);
    house_seal(&party.house, party.sessions[0], reply.sequence_id, 4);
    for (uint32_t count = 3; count > 1; count--) {
        const struct kvk_request_id request_id = {.size = 0};
        enum kvk_status status =
            kvk_sequence_fork(party.house.cache, &party.house.caller, party.sessions[0],
                              reply.sequence_id, 4, count, &request_id, ids, &party.house.error);
        cr_assert_eq(status, count == 3 ? KVK_EXHAUSTED : KVK_OK);
        kvk_cache_check(party.house.cache);
    }
    cr_assert_str_eq(party.house.error.field, "sequences");
    party_stop(&party);
}

/* ---- The rate ---- */

Test(quota, requests_come_at_their_rate_and_in_bursts)
{
    struct party party;
    party_init(&party, 2);
    party_quota(&party, 0)->requests_per_second = 100;
    party_quota(&party, 0)->request_burst = 5;
    party_start(&party, 64, 0);
    struct kvk_cache *cache = party.house.cache;
    const struct kvk_tenant *tenant = party_tenant(&party, 0);
    uint64_t now_ns = 2000 * KVK_NS_PER_SECOND;
    kvk_clock_manual_set(&party.house.manual, now_ns);
    for (uint32_t i = 0; i < 5; i++) {
        cr_assert_eq(kvk_rate_take(cache, tenant, &party.house.error), KVK_OK, "%u", i);
    }
    cr_assert_eq(kvk_rate_take(cache, tenant, &party.house.error), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT);
    cr_assert_str_eq(party.house.error.field, "requests_per_second");
    cr_assert_eq(party.house.error.limit, 100);
    cr_assert_eq(party.house.error.retry_after_ms, 10);
    cr_assert_eq(kvk_rate_take(cache, party_tenant(&party, 1), NULL), KVK_OK, "others go on");
    kvk_clock_manual_set(&party.house.manual, now_ns + 9 * KVK_NS_PER_MS);
    cr_assert_eq(kvk_rate_take(cache, tenant, &party.house.error), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.retry_after_ms, 1);
    kvk_clock_manual_set(&party.house.manual, now_ns + 10 * KVK_NS_PER_MS);
    cr_assert_eq(kvk_rate_take(cache, tenant, NULL), KVK_OK);
    /* Over a long time exactly the rate, however often it is tried. */
    uint32_t passed = 0;
    for (uint32_t ms = 11; ms <= 10010; ms++) {
        kvk_clock_manual_set(&party.house.manual, now_ns + ms * KVK_NS_PER_MS);
        for (uint32_t i = 0; i < 3; i++) {
            passed += kvk_rate_take(cache, tenant, NULL) == KVK_OK ? 1 : 0;
        }
    }
    cr_assert_eq(passed, 1000);
    struct kvk_tenant_usage usage = party_usage(&party, 0);
    cr_assert_eq(usage.requests, 1006);
    cr_assert_eq(usage.rate_refusals, 3 * UINT64_C(10000) - 1000 + 2);
    party_stop(&party);
}

/* ---- What is used ---- */

Test(quota, byte_seconds_are_exact)
{
    struct party party;
    party_init(&party, 2);
    party_start(&party, 64, 64);
    struct kvk_random random;
    kvk_random_init(&random, 5);
    uint64_t now_ns = 1000 * KVK_NS_PER_SECOND;
    unsigned long long sums[2][2] = {{0}}; /* byte x us */
    for (uint32_t step = 0; step < 3000; step++) {
        uint32_t tenant = (uint32_t)kvk_random_below(&random, 2);
        party_store(&party, tenant, (uint32_t)kvk_random_below(&random, 200),
                    1 + (uint32_t)kvk_random_below(&random, 5));
        uint64_t wait_us = kvk_random_below(&random, 1000000);
        now_ns += wait_us * 1000;
        for (uint32_t t = 0; t < 2; t++) {
            for (int tier = 0; tier < 2; tier++) {
                sums[t][tier] += party_blocks(&party, t, (enum kvk_tier)tier) * BLOCK * wait_us;
            }
        }
        kvk_clock_manual_set(&party.house.manual, now_ns);
    }
    for (uint32_t t = 0; t < 2; t++) {
        struct kvk_tenant_usage usage = party_usage(&party, t);
        for (int tier = 0; tier < 2; tier++) {
            cr_assert_gt(sums[t][tier], 1000000);
            cr_assert_eq(usage.byte_seconds[tier], sums[t][tier] / 1000000, "tenant %u tier %d", t,
                         tier);
        }
    }
    party_stop(&party);
}

Test(quota, look_ups_hits_and_savings_are_counted_for_their_tenant)
{
    struct party party;
    struct kvk_sequence_reply reply;
    party_init(&party, 2);
    party_start(&party, 64, 0);
    party_store(&party, 0, 1, 3);
    cr_assert_eq(party_try_open(&party, 0, 1, 3, &reply), KVK_OK);
    cr_assert_eq(reply.cached_tokens, 12);
    cr_assert_eq(party_cached(&party, 0, 1, 1), 1);
    struct kvk_tenant_usage usage = party_usage(&party, 0);
    cr_assert_eq(usage.lookups, 3);
    cr_assert_eq(usage.lookup_tokens, 12 + 12 + 4);
    cr_assert_eq(usage.hit_tokens, 12 + 4);
    cr_assert_eq(usage.saved_tokens, 12);
    cr_assert_eq(usage.sealed_blocks, 3);
    usage = party_usage(&party, 1);
    cr_assert_eq(usage.lookups, 0);
    cr_assert_eq(usage.byte_seconds[DEVICE], 0);
    party_stop(&party);
}
