/*
 * Faults that people who run KV caches have met, as black-box checks of the engine. Each test is
 * named after the case it plays. A block holds 4 tokens unless the case says otherwise. Here:
 * references, full pools, leases, speculation, counters and sizes.
 */
#include "tests/engine_attend.h"

/* ---- C: references ---- */

/* Two tenants, each with its credential. */
static void start_two_tenants(struct stage *stage, uint32_t blocks, struct kvk_caller callers[2])
{
    const struct kvk_geometry geometry = house_geometry();
    static const char *const names[] = {"alpha", "beta"};
    static const char *const tokens[] = {"alpha-0123456789abcdef", "beta-0123456789abcdef"};
    house_init(&stage->house);
    struct kvk_config *config = &stage->house.config;
    config->tenants = calloc(2, sizeof(*config->tenants));
    config->credentials = calloc(2, sizeof(*config->credentials));
    cr_assert(config->tenants != NULL && config->credentials != NULL);
    config->tenant_count = 2;
    config->credential_count = 2;
    for (uint32_t i = 0; i < 2; i++) {
        strcpy(config->tenants[i].name, names[i]);
        strcpy(config->credentials[i].name, names[i]);
        strcpy(config->credentials[i].token, tokens[i]);
        config->credentials[i].tenants[0] = i;
        config->credentials[i].tenant_count = 1;
    }
    const struct house_options options = {
        .device_bytes = blocks * kvk_geometry_block_bytes(&geometry), .manual_clock = true};
    *stage = (struct stage){.house = stage->house,
                            .geometry = geometry,
                            .block_bytes = kvk_geometry_block_bytes(&geometry)};
    house_start(&stage->house, &options);
    for (uint32_t i = 0; i < 2; i++) {
        callers[i] = house_caller_of(&stage->house, tokens[i]);
    }
    stage->house.caller = callers[0];
    stage->space = house_space_of(&stage->house, &callers[0], "m", &geometry, 1);
    stage->session = house_session(&stage->house);
}

Test(cases, c1_leases_that_nobody_reads)
{
    struct stage stage;
    struct kvk_caller callers[2];
    uint32_t tokens[12];
    uint32_t others[64];
    uint64_t released;
    start_two_tenants(&stage, 16, callers);
    uint64_t count = stage_range(tokens, 1, 12);
    stage_cache(&stage, tokens, count, 1);
    uint64_t first = stage.session;

    stage.house.caller = callers[1];
    stage.session = house_session(&stage.house);
    struct kvk_caller owner = callers[0];
    for (int i = 0; i < 1000; i++) {
        stage.house.caller = owner;
        uint64_t intruder = stage.session;
        stage.session = first;
        struct kvk_pin_reply lease = stage_pin(&stage, tokens, count, 1000);
        cr_assert_eq(lease.cached_tokens, 12);
        cr_assert_eq(stage_bound(&stage, KVK_TIER_DEVICE), 3);
        stage.house.caller = callers[1];
        stage.session = intruder;
        cr_assert_eq(stage_try_release(&stage, &lease.lease_id, 1, &released), KVK_NOT_FOUND);
        stage.house.caller = owner;
        stage.session = first;
        cr_assert_eq(stage_bound(&stage, KVK_TIER_DEVICE), 3);
        if (i % 2 == 0) {
            STAGE_OK(&stage, stage_try_release(&stage, &lease.lease_id, 1, &released));
            cr_assert_eq(released, 3);
        } else {
            stage_pass_ms(&stage, 1001);
            kvk_cache_maintain(stage.house.cache);
        }
        cr_assert_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
        stage.session = intruder;
    }
    kvk_session_end(stage.house.cache, stage.session);
    stage.session = first;
    /* All can be evicted: another prompt takes the whole pool. */
    house_tokens(others, 64, 1000);
    stage_close(&stage, stage_open(&stage, others, 64).sequence_id);
    cr_expect_eq(stage_hit(&stage, tokens, count, false), 0);
    stage_stop(&stage);
}

/* Free + used = total, per tier, whatever happens. */
static void expect_tiers_add_up(struct stage *stage, uint64_t device, uint64_t host)
{
    kvk_lock(&stage->house.cache->lock);
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const struct kvk_tier_state *tier = &stage->house.cache->tiers[i];
        uint64_t total = (i == KVK_TIER_DEVICE ? device : host) * stage->block_bytes;
        cr_assert_leq(tier->used_bytes, total);
        cr_assert_leq(tier->bound_bytes, tier->used_bytes);
    }
    kvk_unlock(&stage->house.cache->lock);
}

static void sample_tiers(void *context)
{
    expect_tiers_add_up(context, 8, 6);
}

Test(cases, c6_tiers_add_up_in_every_sample)
{
    struct stage stage;
    uint32_t tokens[12];
    struct kvk_close_reply closed;
    stage_start(&stage, 8, 6);
    kvk_mover_test_hook(stage.house.cache->mover, sample_tiers, &stage);
    for (uint32_t i = 0; i < 1000; i++) {
        house_tokens(tokens, 12, i % 20 * 100);
        uint64_t id = stage_open(&stage, tokens, 12).sequence_id;
        sample_tiers(&stage);
        stage_fill(&stage, id, 1);
        if (i % 3 == 0) {
            struct kvk_swap_reply swap;
            STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swap));
            sample_tiers(&stage);
        }
        stage_close(&stage, id);
        sample_tiers(&stage);
        /* Freed once is freed: a repeated id changes nothing. */
        const uint64_t twice[] = {id, id};
        cr_assert_eq(kvk_sequence_close(stage.house.cache, &stage.house.caller, stage.session,
                                        twice, 2, &closed, &stage.house.error),
                     KVK_NOT_FOUND);
    }
    uint64_t id = stage_open(&stage, tokens, 12).sequence_id;
    const uint64_t twice[] = {id, id};
    cr_expect_eq(kvk_sequence_close(stage.house.cache, &stage.house.caller, stage.session, twice, 2,
                                    &closed, &stage.house.error),
                 KVK_INVALID);
    cr_expect_eq(stage_get(&stage, id).length, 12);
    stage_close(&stage, id);
    cr_expect_gt(stage_stats(&stage).demoted_blocks, 0);
    stage_stop(&stage);
}

Test(cases, c8_no_block_leaks)
{
    struct stage stage;
    uint32_t tokens[9];
    stage_start(&stage, 64, 0);
    for (uint32_t i = 0; i < 2000; i++) {
        house_tokens(tokens, 9, i * 16);
        stage_cache(&stage, tokens, 9, i);
    }
    cr_expect_gt(stage_stats(&stage).evictions[KVK_TIER_DEVICE], 0);
    cr_expect_eq(stage_stats(&stage).refusals, 0);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    stage_stop(&stage);
}

/* ---- D: eviction and the full pool ---- */

Test(cases, d1_the_tail_goes_before_the_head)
{
    struct stage stage;
    uint32_t tokens[12];
    uint32_t other[4];
    stage_start(&stage, 3, 0);
    for (uint32_t run = 0; run < 200; run++) {
        house_tokens(tokens, 12, run * 100);
        house_tokens(other, 4, run * 100 + 50);
        stage_cache(&stage, tokens, 12, run);
        uint64_t id = stage_open(&stage, other, 4).sequence_id;
        cr_assert_eq(stage_hit(&stage, tokens, 12, false), 8);
        stage_close(&stage, id);
    }
    stage_stop(&stage);
}

Test(cases, d3_one_held_block_stops_nobody)
{
    struct stage stage;
    uint32_t first[4];
    uint32_t tokens[4];
    stage_start(&stage, 8, 0);
    house_tokens(first, 4, 1);
    stage_cache(&stage, first, 4, 7);
    struct kvk_pin_reply lease = stage_pin(&stage, first, 4, 60000);
    for (uint32_t i = 0; i < 100; i++) {
        house_tokens(tokens, 4, 1000 + i * 8);
        stage_cache(&stage, tokens, 4, i);
    }
    cr_expect_eq(stage_hit(&stage, first, 4, false), 4);
    STAGE_OK(&stage, stage_try_read(&stage, 0, lease.lease_id, 0, 4, 7));
    stage_stop(&stage);
}

Test(cases, d5_what_can_never_fit_is_refused_at_once)
{
    struct stage stage;
    uint32_t tokens[50];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 12, 0);
    house_tokens(tokens, 50, 1);
    const struct kvk_open_request large = {.prompt = {.tokens = tokens, .token_count = 49},
                                           .tier = -1};
    cr_expect_eq(stage_try_open(&stage, &large, &reply), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_TOO_LARGE);
    cr_expect_eq(stage.house.error.retry_after_ms, 0);
    stage_close(&stage, stage_open(&stage, tokens, 4).sequence_id);

    uint64_t id = stage_open(&stage, tokens, 40).sequence_id;
    stage_fill(&stage, id, 3);
    for (uint64_t length = 40; length < 48; length++) {
        stage_append(&stage, id, length, tokens + length, 1, false);
        stage_fill(&stage, id, 3);
    }
    cr_expect_eq(stage_try_append(&stage, id, 48, tokens + 48, 1, false, &reply), KVK_EXHAUSTED);
    cr_expect_eq(stage_get(&stage, id).length, 48);
    stage_verify(&stage, id, 0, 48, 3);
    stage_close(&stage, id);
    stage_stop(&stage);
}

static void fill_with_idle(struct stage *stage, uint32_t blocks, uint32_t first)
{
    uint32_t tokens[4];
    for (uint32_t i = 0; i < blocks; i++) {
        house_tokens(tokens, 4, first + i * 8);
        stage_cache(stage, tokens, 4, i);
    }
}

Test(cases, d6_every_way_of_taking_a_block_evicts)
{
    struct stage stage;
    uint32_t tokens[8];
    const uint32_t one[] = {77};
    uint64_t fork;
    struct kvk_swap_reply swap;
    stage_start(&stage, 8, 8);
    house_tokens(tokens, 8, 1);

    uint64_t id = stage_sealed(&stage, tokens, 4, 1);
    fill_with_idle(&stage, 8, 1000);
    stage_append(&stage, id, 4, one, 1, false); /* by append */
    stage_fill(&stage, id, 1);
    stage_close(&stage, id);

    id = stage_sealed(&stage, tokens, 4, 1);
    fill_with_idle(&stage, 8, 2000);
    stage_append(&stage, id, 4, one, 1, true); /* by drafts */
    stage_close(&stage, id);

    id = stage_sealed(&stage, tokens, 6, 1);
    STAGE_OK(&stage, stage_try_fork(&stage, id, 6, 1, "", &fork));
    fill_with_idle(&stage, 8, 3000);
    stage_append(&stage, fork, 6, one, 1, false); /* by a write after a fork */
    stage_fill(&stage, fork, 2);
    stage_verify(&stage, fork, 0, 6, 1);
    stage_close(&stage, id);

    STAGE_OK(&stage, stage_try_swap_out(&stage, fork, &swap));
    fill_with_idle(&stage, 8, 4000);
    STAGE_OK(&stage, stage_try_swap_in(&stage, fork, &swap)); /* by a restore */
    stage_verify(&stage, fork, 0, 6, 1);
    stage_verify(&stage, fork, 6, 7, 2);
    stage_close(&stage, fork);
    stage_stop(&stage);
}

Test(cases, d6_preemptions_stay_bounded)
{
    struct stage stage;
    uint32_t tokens[2][20];
    uint64_t ids[2];
    uint64_t lengths[2] = {4, 4};
    struct kvk_sequence_reply reply;
    struct kvk_swap_reply swap;
    int preemptions = 0;
    int out = -1;
    stage_start(&stage, 6, 6);
    for (uint32_t i = 0; i < 2; i++) {
        house_tokens(tokens[i], 20, 100 + i * 100);
        ids[i] = stage_sealed(&stage, tokens[i], 4, i);
    }
    while (lengths[0] < 20 || lengths[1] < 20) {
        for (int i = 0; i < 2; i++) {
            if (i == out || lengths[i] == 20) {
                continue;
            }
            enum kvk_status status = stage_try_append(&stage, ids[i], lengths[i],
                                                      tokens[i] + lengths[i], 1, false, &reply);
            if (status == KVK_EXHAUSTED) {
                out = 1 - i;
                STAGE_OK(&stage, stage_try_swap_out(&stage, ids[out], &swap));
                cr_assert_leq(++preemptions, 3);
                continue;
            }
            STAGE_OK(&stage, status);
            stage_fill(&stage, ids[i], (uint32_t)i);
            lengths[i]++;
            if (lengths[i] == 20) {
                stage_verify(&stage, ids[i], 0, 20, (uint32_t)i);
                stage_close(&stage, ids[i]);
                if (out >= 0) {
                    STAGE_OK(&stage, stage_try_swap_in(&stage, ids[out], &swap));
                    out = -1;
                }
            }
        }
    }
    cr_expect_geq(preemptions, 1);
    stage_stop(&stage);
}

/* ---- E, H: pins, leases and time ---- */

static void flood(struct stage *stage, uint32_t blocks)
{
    fill_with_idle(stage, blocks, 50000);
}

Test(cases, e3_what_was_pinned_is_what_is_read)
{
    struct stage stage;
    uint32_t tokens[12];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 12, 1);
    stage_cache(&stage, tokens, 12, 9);
    struct kvk_pin_reply lease = stage_pin(&stage, tokens, 12, 500);
    cr_expect_eq(lease.cached_tokens, 12);
    flood(&stage, 40);
    STAGE_OK(&stage, stage_try_read(&stage, 0, lease.lease_id, 0, 12, 9));
    stage_pass_ms(&stage, 700);
    flood(&stage, 40);
    for (uint64_t token = 0; token < 12; token += 4) {
        cr_expect_eq(stage_try_read(&stage, 0, lease.lease_id, token, token + 4, 9),
                     KVK_PRECONDITION);
        cr_expect_eq(stage.house.error.cause, KVK_CAUSE_LEASE_EXPIRED);
    }
    stage_stop(&stage);
}

Test(cases, h1_no_bytes_after_a_lease)
{
    struct stage stage;
    uint32_t tokens[8];
    uint64_t ticket;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    stage_cache(&stage, tokens, 8, 9);
    struct kvk_pin_reply lease = stage_pin(&stage, tokens, 8, 500);
    stage_pass_ms(&stage, 700);
    kvk_cache_maintain(stage.house.cache);
    flood(&stage, 40);
    cr_expect_eq(stage_try_read(&stage, 0, lease.lease_id, 0, 4, 9), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_LEASE_EXPIRED);
    const struct kvk_transfer_request batch = {
        .session_id = stage.session, .lease_id = lease.lease_id, .block_count = 2};
    cr_expect_eq(kvk_transfer_begin(stage.house.cache, &stage.house.caller, &batch, &ticket,
                                    &stage.tables, &stage.house.error),
                 KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_LEASE_EXPIRED);
    stage_stop(&stage);
}

/* ---- F: speculation ---- */

Test(cases, f1_crops)
{
    struct stage stage;
    uint32_t tokens[3];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 3, 1);
    uint64_t id = stage_sealed(&stage, tokens, 3, 1);
    STAGE_OK(&stage, stage_try_truncate(&stage, id, 3, 0, &reply));
    cr_expect_eq(reply.length, 0);
    cr_expect_eq(reply.freed_blocks, 1);
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 0);
    stage_close(&stage, id);

    id = stage_sealed(&stage, tokens, 3, 1);
    cr_expect_eq(stage_try_truncate(&stage, id, 3, 7, &reply), KVK_OUT_OF_RANGE);
    cr_expect_eq(stage_try_truncate(&stage, id, 3, (uint64_t)3 - 5, &reply), KVK_OUT_OF_RANGE);
    cr_expect_eq(stage_try_commit(&stage, id, 3, 1, &reply), KVK_OUT_OF_RANGE);
    cr_expect_eq(stage_get(&stage, id).length, 3);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(cases, f2_drafts_are_not_found)
{
    struct stage stage;
    uint32_t tokens[12];
    uint32_t real[8];
    struct kvk_sequence_reply reply;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 12, 1);
    uint64_t id = stage_sealed(&stage, tokens, 6, 1);
    stage_append(&stage, id, 6, tokens + 6, 5, true);
    stage_fill(&stage, id, 1);
    cr_expect_leq(stage_hit(&stage, tokens, 11, false), 4);
    uint32_t second = stage_block(&stage, id, 1);

    STAGE_OK(&stage, stage_try_commit(&stage, id, 11, 1, &reply));
    cr_expect_eq(reply.length, 7);
    cr_expect_eq(reply.freed_blocks, 1);
    cr_expect_eq(stage_block(&stage, id, 1), second, "the last block is the one that goes");
    cr_expect_eq(stage_used(&stage, KVK_TIER_DEVICE), 2);
    const uint32_t next[] = {500};
    stage_append(&stage, id, 7, next, 1, false);
    stage_fill(&stage, id, 1);
    memcpy(real, tokens, 7 * sizeof(real[0]));
    real[7] = 500;
    cr_expect_eq(stage_hit(&stage, real, 8, false), 8);
    cr_expect_eq(stage_hit(&stage, tokens, 11, false), 4);
    stage_verify(&stage, id, 0, 8, 1);
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* ---- J: counters ---- */

Test(cases, j3_retries_do_not_make_hits)
{
    struct stage stage;
    uint32_t tokens[32];
    struct kvk_sequence_reply reply;
    struct kvk_swap_reply swap;
    stage_start(&stage, 8, 8);
    house_tokens(tokens, 32, 1);
    uint64_t holder = stage_open(&stage, tokens, 32).sequence_id;
    const struct kvk_open_request request = {.prompt = {.tokens = tokens, .token_count = 8},
                                             .tier = KVK_TIER_DEVICE};
    struct kvk_cache_stats before = stage_stats(&stage);
    for (int i = 0; i < 50; i++) {
        cr_assert_eq(stage_try_open(&stage, &request, &reply), KVK_EXHAUSTED);
    }
    stage_close(&stage, holder);
    STAGE_OK(&stage, stage_try_open(&stage, &request, &reply));
    stage_close(&stage, reply.sequence_id);
    struct kvk_cache_stats after = stage_stats(&stage);
    cr_expect_eq(after.lookups, before.lookups + 1);
    cr_expect_geq(after.refusals, before.refusals + 50);

    before = after;
    for (uint32_t i = 0; i < 20; i++) {
        house_tokens(tokens, 9, 5000 + i * 64);
        uint64_t id = stage_sealed(&stage, tokens, 9, i);
        STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swap));
        STAGE_OK(&stage, stage_try_swap_in(&stage, id, &swap));
        stage_verify(&stage, id, 0, 9, i);
        stage_close(&stage, id);
    }
    after = stage_stats(&stage);
    cr_expect_eq(after.hit_tokens, before.hit_tokens);
    cr_expect_eq(after.lookups, before.lookups + 20);
    cr_expect_leq(after.hit_tokens, after.lookup_tokens);
    stage_stop(&stage);
}

/* ---- L: size and hygiene ---- */

static uint64_t hashed_by(struct stage *stage, const uint32_t *tokens, uint64_t count)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {.space_id = stage->space,
                                               .prompt = {.tokens = tokens, .token_count = count}};
    STAGE_OK(stage, kvk_lookup(stage->house.cache, &stage->house.caller, &request, &reply,
                               &stage->house.error));
    cr_expect_eq(reply.cached_tokens, count);
    return reply.hashed_bytes;
}

Test(cases, l3_hashing_grows_with_the_prompt_alone)
{
    static uint32_t tokens[131072];
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    geometry.block_tokens = 16;
    geometry.layers = 1;
    geometry.kv_heads = 1;
    geometry.head_size_k = 1;
    geometry.head_size_v = 1;
    house_init(&stage.house);
    stage.house.config.tokens = 131072;
    stage_start_with(&stage, &geometry, 8192, 0);
    house_tokens(tokens, 131072, 1);
    uint64_t id = stage_open(&stage, tokens, 131072).sequence_id;
    stage_seal(&stage, id);
    stage_close(&stage, id);
    uint64_t half = hashed_by(&stage, tokens, 65536);
    uint64_t whole = hashed_by(&stage, tokens, 131072);
    cr_expect_leq(whole, 2 * half + 1024, "%lu against %lu", (unsigned long)whole,
                  (unsigned long)half);
    cr_expect_leq(whole, 131072 * UINT64_C(8));
    stage_stop(&stage);
}

Test(cases, l4_zero_tokens)
{
    struct stage stage;
    struct kvk_sequence_reply reply;
    struct kvk_swap_reply swap;
    uint64_t fork;
    const uint32_t one[] = {1};
    stage_start(&stage, 8, 8);
    cr_expect_eq(stage_hit(&stage, NULL, 0, true), 0);
    uint64_t id = stage_open(&stage, NULL, 0).sequence_id;
    STAGE_OK(&stage, stage_try_fork(&stage, id, 0, 1, "", &fork));
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swap));
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &swap));
    STAGE_OK(&stage, stage_try_truncate(&stage, id, 0, 0, &reply));
    STAGE_OK(&stage, stage_try_commit(&stage, id, 0, 0, &reply));
    stage_append(&stage, fork, 0, one, 1, false);
    stage_close(&stage, id);
    stage_close(&stage, fork);
    stage_stop(&stage);
}

Test(cases, l4_another_tenants_room_holds_nothing_of_it)
{
    struct stage stage;
    struct kvk_caller callers[2];
    uint32_t tokens[64];
    uint8_t poison[2][512];
    start_two_tenants(&stage, 16, callers);
    house_tokens(tokens, 64, 1);
    memset(poison, 0xff, sizeof(poison)); /* NaN in any format */
    uint64_t id = stage_open(&stage, tokens, 64).sequence_id;
    for (uint64_t block = 0; block < 16; block++) {
        const struct kvk_write_piece piece = {
            .block = block, .data = poison[0], .size_bytes = stage.block_bytes};
        STAGE_OK(&stage, kvk_sequence_write(stage.house.cache, &stage.house.caller, stage.session,
                                            id, &piece, &stage.house.error));
    }
    stage_close(&stage, id);
    uint64_t first = stage.session;

    stage.house.caller = callers[1];
    stage.space = house_space_of(&stage.house, &callers[1], "m", &stage.geometry, 1);
    stage.session = house_session(&stage.house);
    id = stage_open(&stage, tokens, 3).sequence_id;
    write_values(&stage, id, 0, 3);
    stage_seal(&stage, id);
    expect_attends(&stage, id, 2, 0);
    const struct kvk_read_request request = {.session_id = stage.session, .sequence_id = id};
    const uint8_t *data;
    uint64_t size;
    struct kvk_read_handle handle;
    STAGE_OK(&stage, kvk_read_begin(stage.house.cache, &stage.house.caller, &request, &data, &size,
                                    &handle, &stage.house.error));
    for (uint64_t i = 0; i < 32; i++) {
        cr_expect_neq(data[3 * 32 + i], 0xff, "a byte of another tenant");
    }
    kvk_read_end(stage.house.cache, &handle);
    stage_close(&stage, id);
    kvk_session_end(stage.house.cache, stage.session);
    stage.house.caller = callers[0];
    stage.session = first;
    stage_stop(&stage);
}
