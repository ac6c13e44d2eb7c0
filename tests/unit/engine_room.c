/* Room: who gets it, who gives it, and what is said where there is none. */
#include "tests/engine_store.h"

#define DEVICE KVK_TIER_DEVICE
#define HOST KVK_TIER_HOST
#define BLOCK UINT64_C(1024)

static void house_with(struct house *house, uint64_t device_bytes, uint64_t host_bytes)
{
    const struct house_options options = {
        .device_bytes = device_bytes, .host_bytes = host_bytes, .manual_clock = true};
    house_init(house);
    house_start(house, &options);
}

/* A prompt of `blocks` whole blocks whose first token names it: opened, sealed and closed. */
static enum kvk_status try_request(struct house *house, uint64_t session, uint64_t space,
                                   uint32_t name, uint32_t blocks)
{
    uint32_t tokens[256];
    struct kvk_sequence_reply reply;
    house_tokens(tokens, 4 * blocks, name * 1000);
    enum kvk_status status = house_try_open(house, session, space, tokens, 4 * blocks, &reply);
    if (status != KVK_OK) {
        return status;
    }
    house_seal(house, session, reply.sequence_id, 4 * blocks);
    house_close(house, session, reply.sequence_id);
    return KVK_OK;
}

static void request(struct house *house, uint64_t session, uint64_t space, uint32_t name,
                    uint32_t blocks)
{
    cr_assert_eq(try_request(house, session, space, name, blocks), KVK_OK, "%s", house->error.text);
}

static uint64_t cached_blocks(struct house *house, uint64_t space, uint32_t name, uint32_t blocks)
{
    uint32_t tokens[256];
    house_tokens(tokens, 4 * blocks, name * 1000);
    return house_cached(house, space, tokens, 4 * blocks) / 4;
}

/* ---- One space, one tier: exactly LRU ---- */

/* Prompts of one block against a list in the order of use. */
static void against_plain_lru(uint32_t pool_blocks, uint32_t names, uint32_t steps)
{
    struct house house;
    house_with(&house, pool_blocks * BLOCK, 0);
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "model");
    uint32_t *order = calloc(pool_blocks + 1, sizeof(*order)); /* least recently used first */
    uint32_t count = 0;
    struct kvk_random random;
    kvk_random_init(&random, pool_blocks);
    for (uint32_t step = 0; step < steps; step++) {
        uint32_t name = (uint32_t)kvk_random_below(&random, names);
        request(&house, session, space, name, 1);
        uint32_t place = 0;
        while (place < count && order[place] != name) {
            place++;
        }
        if (place == count && count == pool_blocks) {
            place = 0; /* the victim */
        }
        count -= place < count ? 1 : 0;
        memmove(order + place, order + place + 1, (count - place) * sizeof(*order));
        order[count++] = name;
        if (step % 64 != 0) {
            continue;
        }
        for (uint32_t i = 0; i < names; i++) {
            bool expected = false;
            for (uint32_t k = 0; k < count; k++) {
                expected = expected || order[k] == i;
            }
            cr_assert_eq(cached_blocks(&house, space, i, 1), expected, "step %u, prompt %u", step,
                         i);
        }
    }
    cr_assert_eq(house.cache->tiers[DEVICE].used_bytes, pool_blocks * BLOCK,
                 "a pool of n slots holds n blocks");
    free(order);
    house_stop(&house);
}

Test(room, victims_are_exactly_those_of_lru)
{
    against_plain_lru(1, 4, 200);
    against_plain_lru(7, 12, 1500);
    against_plain_lru(63, 90, 1500);
    against_plain_lru(200, 260, 2000); /* slabs of 3 slots, the last one short */
}

/* ---- All or nothing ---- */

Test(room, groups_are_reserved_together_or_not_at_all)
{
    struct house house;
    house_with(&house, 16 * BLOCK, 0);
    uint64_t session = house_session(&house);
    struct kvk_geometry groups[2] = {house_geometry(), house_geometry()};
    groups[1].layers = 6; /* 3 KiB */
    uint64_t space = house_space_of(&house, &house.caller, "two groups", groups, 2);
    uint32_t tokens[64];
    house_tokens(tokens, 64, 1);
    struct kvk_sequence_reply held = house_open(&house, session, space, tokens, 12);
    cr_assert_eq(house_bound(&house, DEVICE), 12 * BLOCK);
    uint32_t others[64];
    struct kvk_sequence_reply reply;
    house_tokens(others, 64, 5000);
    cr_assert_eq(house_try_open(&house, session, space, others, 8, &reply), KVK_EXHAUSTED);
    cr_assert_eq(house.error.cause, KVK_CAUSE_POOL_ACTIVE);
    cr_assert_eq(house_bound(&house, DEVICE), 12 * BLOCK, "nothing of it is left");
    kvk_cache_check(house.cache);
    cr_assert_eq(house_try_open(&house, session, space, others, 4, &reply), KVK_OK, "%s",
                 house.error.text);
    cr_assert_eq(house_bound(&house, DEVICE), 16 * BLOCK);
    house_close(&house, session, held.sequence_id);
    house_stop(&house);
}

Test(room, who_may_not_block_is_sent_back_unchanged)
{
    struct house house;
    house_with(&house, 64 * BLOCK, 0);
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "model");
    uint32_t tokens[8];
    struct kvk_sequence_reply reply;
    house_tokens(tokens, 8, 1);
    house.caller.may_block = false;
    cr_assert_eq(house_try_open(&house, session, space, tokens, 8, &reply), KVK_WOULD_BLOCK,
                 "no place has memory");
    kvk_cache_check(house.cache);
    cr_assert_eq(house_bound(&house, DEVICE), 0);
    house.caller.may_block = true;
    reply = house_open(&house, session, space, tokens, 8);
    house_seal(&house, session, reply.sequence_id, 8);
    house_close(&house, session, reply.sequence_id);
    /* From here on maintenance has memory ready before it is asked for. */
    house.caller.may_block = false;
    reply = house_open(&house, session, space, tokens, 8);
    for (uint32_t i = 0; i < 5; i++) {
        kvk_cache_maintain(house.cache);
        request(&house, session, space, 10 + i, 1);
    }
    house_close(&house, session, reply.sequence_id);
    house_stop(&house);
}

Test(room, time_and_patience_end)
{
    struct store store;
    store_start(&store, 8, 0);
    uint32_t ids[8];
    store.house.caller.deadline_ns = 1;
    cr_assert_eq(store_try_reserve(&store, DEVICE, 1, ids), KVK_DEADLINE);
    store.house.caller.deadline_ns = UINT64_MAX;
    cr_assert_eq(store_used(&store, DEVICE), 0);
    store_stop(&store);
}

/* ---- Causes ---- */

static void expect_refusal(struct store *store, uint32_t count, enum kvk_cause cause)
{
    uint32_t ids[64];
    uint64_t refusals = store->cache->stats.refusals;
    cr_assert_eq(store_try_reserve(store, DEVICE, count, ids), KVK_EXHAUSTED);
    cr_assert_eq(store->house.error.cause, cause, "%s", store->house.error.text);
    cr_assert_eq(store->house.error.value, count * BLOCK);
    cr_assert_eq(store->house.error.limit, 8 * BLOCK);
    cr_assert_eq(store->house.error.retry_after_ms == 0, cause == KVK_CAUSE_TOO_LARGE);
    cr_assert_eq(store->cache->stats.refusals, refusals + 1);
    const struct kvk_refusal *noted =
        &store->cache->refusals[(store->cache->refusal_count - 1) % KVK_REFUSAL_COUNT];
    cr_assert_eq(noted->error.cause, cause);
    cr_assert_eq(noted->needed_bytes, count * BLOCK);
    cr_assert_str_eq(noted->call, "Test");
}

Test(room, every_refusal_has_its_cause)
{
    struct store store;
    uint32_t ids[8];
    store_start(&store, 8, 0);
    struct kvk_tier_state *device = &store.cache->tiers[DEVICE];
    expect_refusal(&store, 9, KVK_CAUSE_TOO_LARGE);

    cr_assert_eq(store_try_reserve(&store, DEVICE, 6, ids), KVK_OK);
    expect_refusal(&store, 3, KVK_CAUSE_POOL_ACTIVE);
    for (uint32_t i = 0; i < 6; i++) {
        kvk_block_set_quarantined(store.cache, ids[i], true);
    }
    expect_refusal(&store, 3, KVK_CAUSE_QUARANTINE);
    for (uint32_t i = 0; i < 6; i++) {
        kvk_block_set_quarantined(store.cache, ids[i], false);
        store_release(&store, ids[i]);
    }

    struct kvk_cursor cursor = store_cursor(&store);
    for (uint32_t i = 0; i < 5; i++) {
        ids[i] = store_seal(&store, DEVICE, &cursor, i);
        kvk_block_hold(store.cache, ids[i], true);
        store_release(&store, ids[i]);
    }
    store.cache->passing_holds += 5;
    cr_assert_eq(device->leased_bytes, 5 * BLOCK);
    uint32_t more[4];
    cr_assert_eq(store_try_reserve(&store, DEVICE, 4, more), KVK_EXHAUSTED);
    cr_assert_eq(store.house.error.cause, KVK_CAUSE_POOL_LEASED);
    for (uint32_t i = 0; i < 5; i++) {
        store.cache->passing_holds--;
        kvk_block_release(store.cache, ids[i], true);
    }

    kvk_quota_growth_change(store.cache, store.space->tenant, DEVICE, 0, 6 * BLOCK);
    uint32_t *blocks[KVK_GROUP_COUNT_MAX] = {more};
    struct kvk_room_want want = {.tier = DEVICE, .counts = {3}};
    cr_assert_eq(kvk_room_reserve_drops(store.cache, store.space, &want, blocks,
                                        &store.house.caller, &store.house.error),
                 KVK_EXHAUSTED);
    cr_assert_eq(store.house.error.cause, KVK_CAUSE_GROWTH_RESERVED);
    want.own_growth_bytes = 1 * BLOCK; /* room that is the caller's own */
    cr_assert_eq(kvk_room_reserve_drops(store.cache, store.space, &want, blocks,
                                        &store.house.caller, &store.house.error),
                 KVK_OK);
    kvk_quota_growth_change(store.cache, store.space->tenant, DEVICE, 6 * BLOCK, 0);
    store.cache->passing_holds += 3;
    for (uint32_t i = 0; i < 3; i++) {
        store_release(&store, more[i]);
    }
    store_stop(&store);
}

Test(room, free_bytes_in_the_wrong_slabs)
{
    /* Slabs of 2 KiB: two blocks of 1 KiB, one of which stays. */
    struct house house;
    house_with(&house, 128 * BLOCK, 0);
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "small");
    uint64_t ids[128];
    uint32_t tokens[4];
    for (uint32_t i = 0; i < 128; i++) {
        house_tokens(tokens, 4, i * 10);
        ids[i] = house_open(&house, session, space, tokens, 4).sequence_id;
    }
    for (uint32_t i = 0; i < 128; i += 2) {
        house_close(&house, session, ids[i]);
    }
    struct kvk_geometry geometry = house_geometry();
    geometry.layers = 4; /* 2 KiB */
    uint64_t large = house_space_of(&house, &house.caller, "large", &geometry, 1);
    cr_assert_eq(try_request(&house, session, large, 1, 1), KVK_EXHAUSTED);
    cr_assert_eq(house.error.cause, KVK_CAUSE_SLABS_SCATTERED, "%s", house.error.text);
    kvk_cache_check(house.cache);
    house_close(&house, session, ids[1]);
    request(&house, session, large, 1, 1);
    house_stop(&house);
}

/* ---- Several spaces share one pool ---- */

Test(room, slabs_go_where_they_are_needed_and_back)
{
    struct house house;
    house_with(&house, 96 * BLOCK, 0);
    uint64_t session = house_session(&house);
    uint64_t small = house_space(&house, "small");
    struct kvk_geometry geometry = house_geometry();
    geometry.layers = 10; /* 5 KiB */
    uint64_t large = house_space_of(&house, &house.caller, "large", &geometry, 1);
    for (uint32_t round = 0; round < 3; round++) {
        for (uint32_t i = 0; i < 96; i++) {
            request(&house, session, small, 100 * round + i, 1);
        }
        kvk_cache_check(house.cache);
        uint64_t cached = 0;
        for (uint32_t i = 0; i < 96; i++) {
            cached += cached_blocks(&house, small, 100 * round + i, 1);
        }
        cr_assert_geq(cached, round == 0 ? 96 : 90, "old blocks of the other space went first");
        for (uint32_t i = 0; i < 19; i++) {
            request(&house, session, large, 100 * round + i, 1);
        }
        kvk_cache_check(house.cache);
        cached = 0;
        for (uint32_t i = 0; i < 19; i++) {
            cached += cached_blocks(&house, large, 100 * round + i, 1);
        }
        cr_assert_geq(cached, 17);
    }
    cr_assert_gt(house.cache->stats.slabs_moved, 0);
    house_stop(&house);
}

Test(room, what_left_holds_no_memory)
{
    struct house house;
    house_with(&house, 16 << 20, 0);
    uint64_t session = house_session(&house);
    struct kvk_geometry geometry = house_geometry();
    geometry.layers = 128; /* 64 KiB: slabs of 256 KiB */
    uint64_t first = house_space_of(&house, &house.caller, "first", &geometry, 1);
    geometry.layers = 256;
    uint64_t second = house_space_of(&house, &house.caller, "second", &geometry, 1);
    for (uint32_t i = 0; i < 256; i++) {
        request(&house, session, first, i, 1);
    }
    for (uint32_t i = 0; i < 200; i++) {
        request(&house, session, second, i, 1);
    }
    kvk_cache_maintain(house.cache);
    kvk_cache_check(house.cache);
    uint64_t backed = 0;
    for (uint32_t number = 0; number < house.cache->group_end; number++) {
        const struct kvk_group *group = house.cache->groups[number];
        struct kvk_device *device = house.cache->tiers[DEVICE].device;
        backed += device->ops->backed_bytes(device, &group->tiers[DEVICE].regions[0]);
    }
    cr_assert_leq(backed, (16 << 20) + (1 << 18), "the pool, and a slab that is ready at most");
    cr_assert_eq(house.cache->tiers[DEVICE].stray_bytes, 0);
    house_stop(&house);
}

/* ---- Tenants ---- */

static void two_tenants(struct house *house, uint64_t device_bytes, uint64_t host_bytes)
{
    const struct house_options options = {
        .device_bytes = device_bytes, .host_bytes = host_bytes, .manual_clock = true};
    house_init(house);
    struct kvk_config *config = &house->config;
    free(config->tenants);
    free(config->credentials);
    config->tenants = calloc(2, sizeof(*config->tenants));
    config->credentials = calloc(2, sizeof(*config->credentials));
    config->tenant_count = config->credential_count = 2;
    for (uint32_t i = 0; i < 2; i++) {
        (void)snprintf(config->tenants[i].name, KVK_NAME_SIZE, "tenant-%u", i);
        (void)snprintf(config->credentials[i].name, KVK_NAME_SIZE, "credential-%u", i);
        (void)snprintf(config->credentials[i].token, KVK_NAME_SIZE, "secret-of-tenant-%u", i);
        config->credentials[i].tenants[0] = i;
        config->credentials[i].tenant_count = 1;
    }
    house_start(house, &options);
}

Test(room, a_flood_takes_no_more_than_its_share)
{
    struct house house;
    two_tenants(&house, 64 * BLOCK, 0);
    struct kvk_caller callers[2] = {house_caller_of(&house, "secret-of-tenant-0"),
                                    house_caller_of(&house, "secret-of-tenant-1")};
    uint64_t sessions[2];
    uint64_t spaces[2];
    for (uint32_t i = 0; i < 2; i++) {
        house.caller = callers[i];
        sessions[i] = house_session(&house);
        spaces[i] = house_space(&house, "model");
    }
    house.caller = callers[0];
    for (uint32_t i = 0; i < 100; i++) {
        request(&house, sessions[0], spaces[0], i, 1);
    }
    cr_assert_eq(house.cache->tiers[DEVICE].tenant_bytes[0], 64 * BLOCK, "nobody else is there");
    /* The second one comes, and gets its half from the first. */
    house.caller = callers[1];
    for (uint32_t i = 0; i < 100; i++) {
        request(&house, sessions[1], spaces[1], i, 1);
    }
    cr_assert_geq(house.cache->tiers[DEVICE].tenant_bytes[1], 30 * BLOCK);
    cr_assert_geq(house.cache->tiers[DEVICE].tenant_bytes[0], 30 * BLOCK);
    /* Neither pushes the other further. */
    house.caller = callers[0];
    for (uint32_t i = 0; i < 500; i++) {
        request(&house, sessions[0], spaces[0], 1000 + i, 1);
    }
    cr_assert_geq(house.cache->tiers[DEVICE].tenant_bytes[1], 30 * BLOCK);
    house.caller = callers[1];
    uint64_t cached = 0;
    for (uint32_t i = 70; i < 100; i++) {
        cached += cached_blocks(&house, spaces[1], i, 1);
    }
    cr_assert_geq(cached, 28, "%llu of the newest 30 are there", (unsigned long long)cached);
    house_stop(&house);
}

Test(room, active_work_outranks_an_idle_neighbours_cache)
{
    struct house house;
    two_tenants(&house, 64 * BLOCK, 0);
    struct kvk_caller callers[2] = {house_caller_of(&house, "secret-of-tenant-0"),
                                    house_caller_of(&house, "secret-of-tenant-1")};
    house.caller = callers[0];
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "model");
    for (uint32_t i = 0; i < 20; i++) {
        request(&house, session, space, i, 1);
    }
    house.caller = callers[1];
    session = house_session(&house);
    space = house_space(&house, "model");
    uint32_t tokens[256];
    house_tokens(tokens, 256, 1);
    struct kvk_sequence_reply reply = house_open(&house, session, space, tokens, 240);
    cr_assert_eq(house_bound(&house, DEVICE), 60 * BLOCK);
    house_close(&house, session, reply.sequence_id);
    house_stop(&house);
}

/* ---- Two tiers ---- */

Test(room, victims_of_the_device_go_to_the_host)
{
    struct house house;
    house_with(&house, 16 * BLOCK, 48 * BLOCK);
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "model");
    for (uint32_t i = 0; i < 64; i++) {
        request(&house, session, space, i, 1);
        kvk_cache_check(house.cache);
    }
    uint64_t cached = 0;
    for (uint32_t i = 0; i < 64; i++) {
        cached += cached_blocks(&house, space, i, 1);
    }
    /* Device and host hold each block once; room is made for a batch at a time. */
    cr_assert_geq(cached, 48, "%llu", (unsigned long long)cached);
    cr_assert_gt(house.cache->stats.demoted_blocks, 0);
    for (uint32_t i = 64; i < 300; i++) {
        request(&house, session, space, i, 1);
    }
    kvk_cache_check(house.cache);
    cr_assert_gt(house.cache->stats.forgotten_blocks, 200);
    house_stop(&house);
}

Test(room, a_full_host_does_not_stop_the_device)
{
    struct store store;
    store_start(&store, 4, 2);
    uint32_t leased[2];
    for (uint32_t i = 0; i < 2; i++) {
        struct kvk_cursor cursor = store_cursor(&store);
        leased[i] = store_seal(&store, HOST, &cursor, 100 + i);
    }
    kvk_unlock(&store.cache->lock);
    uint64_t session = house_session(&store.house);
    for (uint32_t i = 0; i < 40; i++) {
        request(&store.house, session, store.space->id, i, 1);
        kvk_cache_check(store.cache);
    }
    kvk_lock(&store.cache->lock);
    cr_assert_eq(store.cache->tiers[HOST].used_bytes, 2 * BLOCK);
    cr_assert_eq(store.cache->tiers[DEVICE].used_bytes, 4 * BLOCK);
    store_release(&store, leased[0]);
    store_release(&store, leased[1]);
    store_stop(&store);
}

/* What a lease holds without pinning it moves down, and is there afterwards. */
Test(room, held_blocks_are_demoted_not_lost)
{
    struct store store;
    store_start(&store, 4, 8);
    uint32_t held[3];
    for (uint32_t i = 0; i < 3; i++) {
        struct kvk_cursor cursor = store_cursor(&store);
        held[i] = store_seal(&store, DEVICE, &cursor, 100 + i);
        kvk_block_unpin(store.cache, held[i], DEVICE);
    }
    uint32_t ids[4];
    cr_assert_eq(store_try_reserve(&store, DEVICE, 4, ids), KVK_OK, "%s", store.house.error.text);
    kvk_cache_check_locked(store.cache);
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert_eq(store_block(&store, held[i])->tier_mask, 1U << HOST);
        store_expect_bytes(&store, held[i], HOST, (uint8_t)(100 + i));
        store_release(&store, held[i]);
    }
    for (uint32_t i = 0; i < 4; i++) {
        store_release(&store, ids[i]);
    }
    store_stop(&store);
}

Test(room, the_limit_of_blocks_gives_way_to_new_ones)
{
    struct house house;
    const struct house_options options = {.device_bytes = 64 * BLOCK, .manual_clock = true};
    house_init(&house);
    house.config.blocks = 10;
    house_start(&house, &options);
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "model");
    for (uint32_t i = 0; i < 30; i++) {
        request(&house, session, space, i, 3);
        cr_assert_leq(kvk_index_block_count(house.cache->index), 10);
    }
    uint32_t tokens[64];
    struct kvk_sequence_reply reply;
    house_tokens(tokens, 64, 77);
    cr_assert_eq(house_try_open(&house, session, space, tokens, 44, &reply), KVK_EXHAUSTED);
    cr_assert_eq(house.error.cause, KVK_CAUSE_LIMIT);
    cr_assert_str_eq(house.error.field, "blocks");
    house_stop(&house);
}

/* ---- Demotion ---- */

static void count_job(void *context)
{
    (*(uint32_t *)context)++;
}

/* Its blocks become leaves one after the other; a job for each would be a reservation for each. */
Test(room, a_long_chain_goes_down_in_a_few_jobs)
{
    struct house house;
    uint32_t jobs = 0;
    house_with(&house, 64 * BLOCK, 64 * BLOCK);
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "model");
    for (uint32_t name = 3; name > 0; name--) { /* the host has all of its memory by then */
        request(&house, session, space, name, 60);
    }
    kvk_mover_test_hook(house.cache->mover, count_job, &jobs);
    request(&house, session, space, 7, 40);
    cr_assert_leq(jobs, 4, "36 blocks went down in %u jobs", jobs);
    cr_assert_eq(cached_blocks(&house, space, 1, 60), 60);
    cr_assert_eq(cached_blocks(&house, space, 7, 40), 40);
    kvk_cache_check(house.cache);
    house_stop(&house);
}

/* ---- Strays ---- */

Test(room, memory_that_a_worker_faults_in_is_charged)
{
    struct house house;
    house_with(&house, 4 << 20, 0);
    uint64_t session = house_session(&house);
    struct kvk_geometry geometry = house_geometry();
    geometry.layers = 128; /* 64 KiB */
    uint64_t space = house_space_of(&house, &house.caller, "model", &geometry, 1);
    request(&house, session, space, 1, 1);
    kvk_cache_maintain(house.cache);
    struct kvk_group *group = house.cache->spaces->groups[0];
    cr_assert_eq(house.cache->tiers[DEVICE].stray_bytes, 0);
    /* As a worker would that writes past its slots: far behind the slabs that there are. */
    struct kvk_region *region = &group->tiers[DEVICE].regions[0];
    memset(region->address + region->size_bytes / 2, 1, region->size_bytes / 2);
    kvk_cache_maintain(house.cache);
    uint64_t stray = house.cache->tiers[DEVICE].stray_bytes;
    cr_assert_gt(stray, 1 << 20);
    cr_assert_eq(house.cache->tiers[DEVICE].pool.charge_bytes, stray);
    kvk_cache_check(house.cache);
    uint32_t tokens[256];
    struct kvk_sequence_reply reply;
    house_tokens(tokens, 256, 9);
    cr_assert_eq(house_try_open(&house, session, space, tokens, 240, &reply), KVK_EXHAUSTED,
                 "60 blocks of 64 KiB do not fit beside the strays");
    house_stop(&house);
}

/* ---- Slabs that nothing lies in ---- */

Test(room, a_slab_stays_between_requests_that_leave_nothing)
{
    struct house house;
    house_with(&house, 96 * BLOCK, 0);
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "short prompts");
    (void)house_space(&house, "another");
    const struct kvk_cache_stats *stats = &house.cache->stats;
    uint32_t tokens[3];
    house_tokens(tokens, 3, 1);
    for (uint32_t i = 0; i < 100; i++) { /* less than a block: nothing of it can be cached */
        struct kvk_sequence_reply reply = house_open(&house, session, space, tokens, 3);
        house_close(&house, session, reply.sequence_id);
        kvk_cache_maintain(house.cache);
    }
    cr_assert_eq(stats->slabs_moved, 0, "each request would wait for memory anew");
    cr_assert_gt(house.cache->tiers[DEVICE].pool.slab_bytes, 0);
    for (uint32_t i = 0; i < 30; i++) {
        kvk_cache_maintain(house.cache);
    }
    cr_assert_eq(house.cache->tiers[DEVICE].pool.slab_bytes, 0, "after a while it goes");
    house_stop(&house);
}

struct slow_punch {
    struct kvk_cache *cache;
    struct kvk_punch *punch;
};

static void *punch_slowly(void *argument)
{
    const struct slow_punch *slow = argument;
    (void)usleep(50000);
    kvk_lock(&slow->cache->lock);
    kvk_tier_punch_end(slow->cache, slow->punch);
    kvk_unlock(&slow->cache->lock);
    return NULL;
}

/* The place that is next is just being punched out by another thread, which takes a while. */
Test(room, a_place_that_another_thread_punches_is_waited_for)
{
    struct house house;
    const struct house_options options = {.device_bytes = 96 * BLOCK, .threads = true};
    house_init(&house);
    house_start(&house, &options);
    uint64_t session = house_session(&house);
    uint64_t space_id = house_space(&house, "model");
    kvk_lock(&house.cache->lock);
    struct kvk_space *space = kvk_table_get(&house.cache->space_table, space_id);
    struct kvk_group_tier *at = &space->groups[0]->tiers[DEVICE];
    struct slow_punch slow = {.cache = house.cache, .punch = calloc(1, sizeof(*slow.punch))};
    cr_assert_not_null(slow.punch);
    *slow.punch = (struct kvk_punch){.group = space->groups[0],
                                     .tier = DEVICE,
                                     .slab = kvk_arena_next_place(&at->arena),
                                     .under_way = true,
                                     .next = house.cache->punches};
    house.cache->punches = slow.punch;
    at->places[slow.punch->slab] = KVK_PLACE_LEAVING;
    kvk_unlock(&house.cache->lock);
    pthread_t thread;
    cr_assert_eq(pthread_create(&thread, NULL, punch_slowly, &slow), 0);
    request(&house, session, space_id, 1, 2);
    (void)pthread_join(thread, NULL);
    house_stop(&house);
}

/* ---- What was invalidated ---- */

/* It is in nobody's way for long: ten million blocks would be 15 s of rounds. */
Test(room, what_was_invalidated_goes_in_a_few_rounds)
{
    struct house house;
    house_with(&house, 40960 * BLOCK, 0);
    uint64_t session = house_session(&house);
    uint64_t space = house_space(&house, "model");
    for (uint32_t i = 0; i < 640; i++) {
        request(&house, session, space, i, 64);
    }
    cr_assert_eq(house.cache->tiers[DEVICE].used_bytes, 40960 * BLOCK);
    const struct kvk_invalidate_request what = {.space_id = space};
    struct kvk_invalidate_reply reply;
    cr_assert_eq(kvk_invalidate(house.cache, &house.caller, &what, &reply, &house.error), KVK_OK);
    kvk_cache_maintain(house.cache);
    cr_assert_eq(house.cache->tiers[DEVICE].used_bytes, 0);
    house_stop(&house);
}
