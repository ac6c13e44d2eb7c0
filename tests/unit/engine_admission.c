/*
 * Refusals that help: the causes, when to try again, and which of its own sequences a caller could
 * swap out or close: whoever does as advised gets what was refused.
 */
#include "daemon/advice.h"

#include "daemon/lease.h"
#include "tests/engine_trio.h"

#define DEVICE KVK_TIER_DEVICE
#define HOST KVK_TIER_HOST
#define BLOCK UINT64_C(1024) /* of house_geometry() */

/* ---- The choice, against all combinations ---- */

static uint64_t least_cost(const struct kvk_advice_item *items, uint32_t count, uint64_t missing)
{
    uint64_t least = UINT64_MAX;
    for (uint32_t set = 0; set < UINT32_C(1) << count; set++) {
        uint64_t bytes = 0;
        uint64_t cost = 0;
        for (uint32_t i = 0; i < count; i++) {
            bytes += (set >> i & 1) * items[i].bytes;
            cost += (set >> i & 1) * items[i].cost;
        }
        least = bytes >= missing && cost < least ? cost : least;
    }
    return least;
}

Test(admission, the_choice_costs_least)
{
    struct kvk_random random;
    kvk_random_init(&random, 1);
    for (uint32_t round = 0; round < 3000; round++) {
        uint32_t count = 1 + (uint32_t)kvk_random_below(&random, 16);
        struct kvk_advice_item items[16];
        uint64_t all = 0;
        for (uint32_t i = 0; i < count; i++) {
            items[i] = (struct kvk_advice_item){.id = 100 + i,
                                                .bytes = 1 + kvk_random_below(&random, 50),
                                                .cost = 1 + kvk_random_below(&random, 90)};
            all += items[i].bytes;
        }
        uint64_t missing = 1 + kvk_random_below(&random, all + 10);
        uint64_t least = least_cost(items, count, missing);
        uint32_t chosen = kvk_advice_choose(items, count, missing);
        if (missing > all) {
            cr_assert_eq(chosen, 0);
            continue;
        }
        uint64_t bytes = 0;
        uint64_t cost = 0;
        uint64_t ids = 0;
        for (uint32_t i = 0; i < count; i++) {
            bytes += i < chosen ? items[i].bytes : 0;
            cost += i < chosen ? items[i].cost : 0;
            ids |= UINT64_C(1) << (items[i].id - 100);
        }
        cr_assert_eq(ids, (UINT64_C(1) << count) - 1, "each is there once");
        cr_assert_geq(bytes, missing);
        if (count <= 12) {
            cr_assert_eq(cost, least, "%u items", count);
        } else {
            cr_assert_leq(cost, 2 * least, "%u items", count);
        }
    }
}

/* ---- Following it ---- */

struct stage {
    struct house house;
    uint64_t session, space;
};

static void stage_start(struct stage *stage, uint64_t device_blocks, uint64_t host_blocks)
{
    house_init(&stage->house);
    house_start(&stage->house, &(struct house_options){.device_bytes = device_blocks * BLOCK,
                                                       .host_bytes = host_blocks * BLOCK,
                                                       .manual_clock = true});
    stage->session = house_session(&stage->house);
    stage->space = house_space(&stage->house, "model");
}

static uint64_t open_sealed(struct stage *stage, uint32_t first, uint64_t count)
{
    uint32_t tokens[256];
    house_tokens(tokens, count, first);
    uint64_t id =
        house_open(&stage->house, stage->session, stage->space, tokens, count).sequence_id;
    house_seal(&stage->house, stage->session, id, count);
    return id;
}

static enum kvk_status try_open(struct stage *stage, uint32_t first, uint64_t count, uint64_t *id)
{
    uint32_t tokens[256];
    struct kvk_sequence_reply reply;
    house_tokens(tokens, count, first);
    enum kvk_status status =
        house_try_open(&stage->house, stage->session, stage->space, tokens, count, &reply);
    *id = reply.sequence_id;
    return status;
}

static enum kvk_status try_append(struct stage *stage, uint64_t id, uint64_t length, uint64_t count)
{
    uint32_t tokens[64];
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    house_tokens(tokens, count, (uint32_t)(1000000 + length));
    const struct kvk_append_request request = {.session_id = stage->session,
                                               .sequence_id = id,
                                               .expected_length = length,
                                               .tokens = tokens,
                                               .token_count = count};
    enum kvk_status status = kvk_sequence_append(stage->house.cache, &stage->house.caller, &request,
                                                 &reply, &tables, &stage->house.error);
    kvk_tables_finish(&tables);
    return status;
}

static enum kvk_status try_swap(struct stage *stage, uint64_t id, bool out)
{
    struct kvk_swap_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    enum kvk_status status =
        out ? kvk_sequence_swap_out(stage->house.cache, &stage->house.caller, stage->session, id,
                                    &reply, &tables, &stage->house.error)
            : kvk_sequence_swap_in(stage->house.cache, &stage->house.caller, stage->session, id,
                                   &reply, &tables, &stage->house.error);
    kvk_tables_finish(&tables);
    return status;
}

static void follow(struct stage *stage, const struct kvk_advice *advice)
{
    cr_assert_neq(advice->kind, KVK_ADVISE_NOTHING);
    cr_assert_eq(advice->count, advice->total);
    for (uint32_t i = 0; i < advice->count; i++) {
        if (advice->kind == KVK_ADVISE_SWAP_OUT) {
            cr_assert_eq(try_swap(stage, advice->sequence_ids[i], true), KVK_OK, "%s",
                         stage->house.error.text);
        } else {
            house_close(&stage->house, stage->session, advice->sequence_ids[i]);
        }
    }
}

Test(admission, swap_out_as_advised_and_the_open_fits)
{
    struct stage stage;
    uint64_t id;
    stage_start(&stage, 12, 64);
    (void)open_sealed(&stage, 100, 20); /* 5 blocks */
    uint64_t small = open_sealed(&stage, 1000, 8);
    uint64_t middle = open_sealed(&stage, 2000, 12);
    cr_assert_eq(try_open(&stage, 5000, 16, &id), KVK_EXHAUSTED); /* 4, and 2 are free */
    const struct kvk_advice advice = stage.house.error.advice;
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_POOL_ACTIVE);
    cr_expect_eq(advice.kind, KVK_ADVISE_SWAP_OUT);
    cr_expect_eq(advice.missing_bytes, 2 * BLOCK);
    cr_assert_eq(advice.count, 1);
    cr_expect_eq(advice.sequence_ids[0], small, "the one that just makes the room");
    cr_expect_eq(advice.sequence_bytes[0], 2 * BLOCK);
    cr_expect_eq(advice.bytes, 2 * BLOCK);
    follow(&stage, &advice);
    cr_assert_eq(try_open(&stage, 5000, 16, &id), KVK_OK, "%s", stage.house.error.text);
    house_seal(&stage.house, stage.session, id, 16);
    /* The one that is out wants in again. */
    cr_assert_eq(try_swap(&stage, small, false), KVK_EXHAUSTED);
    const struct kvk_advice in = stage.house.error.advice;
    cr_assert_eq(in.kind, KVK_ADVISE_SWAP_OUT);
    cr_expect_eq(in.missing_bytes, 2 * BLOCK);
    cr_assert_eq(in.count, 1);
    cr_expect_eq(in.sequence_ids[0], middle, "three blocks cost less than four or five");
    follow(&stage, &in);
    cr_assert_eq(try_swap(&stage, small, false), KVK_OK, "%s", stage.house.error.text);
    house_stop(&stage.house);
}

/* What others share is not made free, and counts for nothing. */
Test(admission, shared_blocks_make_no_room)
{
    struct stage stage;
    uint64_t id;
    stage_start(&stage, 12, 64);
    uint32_t tokens[64];
    house_tokens(tokens, 28, 100);
    (void)open_sealed(&stage, 100, 24);            /* 6 blocks */
    uint64_t other = open_sealed(&stage, 100, 28); /* shares 6, has 1 of its own */
    uint64_t alone = open_sealed(&stage, 1000, 16);
    cr_assert_eq(try_open(&stage, 5000, 12, &id), KVK_EXHAUSTED); /* 3, and 1 is free */
    cr_assert_eq(stage.house.error.advice.count, 1);
    cr_expect_eq(stage.house.error.advice.sequence_ids[0], alone);
    cr_expect_eq(stage.house.error.advice.bytes, 4 * BLOCK);
    cr_assert_eq(try_open(&stage, 5000, 24, &id), KVK_EXHAUSTED); /* 6: 5 are missing */
    const struct kvk_advice advice = stage.house.error.advice;
    cr_assert_eq(advice.count, 2);
    cr_expect_eq(advice.bytes, 5 * BLOCK);
    cr_expect(advice.sequence_ids[0] == other || advice.sequence_ids[1] == other);
    follow(&stage, &advice);
    cr_assert_eq(try_open(&stage, 5000, 24, &id), KVK_OK, "%s", stage.house.error.text);
    house_stop(&stage.house);
}

/* D5: what is larger than the pool is refused at once, without a hint; a growth that does not fit
 * leaves all as it was. */
Test(admission, larger_than_the_pool_is_refused_for_good)
{
    struct stage stage;
    uint64_t id;
    stage_start(&stage, 12, 0);
    cr_assert_eq(try_open(&stage, 1, 49, &id), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_TOO_LARGE);
    cr_expect_eq(stage.house.error.retry_after_ms, 0);
    cr_expect_eq(stage.house.error.advice.kind, KVK_ADVISE_NOTHING);
    cr_assert_eq(try_open(&stage, 1, 4, &id), KVK_OK);
    house_close(&stage.house, stage.session, id);
    id = open_sealed(&stage, 1, 40);
    for (uint64_t length = 40; length < 48; length++) {
        cr_assert_eq(try_append(&stage, id, length, 1), KVK_OK);
        house_seal(&stage.house, stage.session, id, length + 1);
    }
    cr_assert_eq(try_append(&stage, id, 48, 1), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.error.advice.kind, KVK_ADVISE_NOTHING, "it has nothing else");
    cr_expect_gt(stage.house.error.retry_after_ms, 0);
    house_stop(&stage.house);
}

/* D6: two sequences that grow to 5 blocks each in a pool of 6; the client does as it is advised. */
Test(admission, two_growing_sequences_finish_by_the_advice)
{
    struct stage stage;
    uint64_t ids[2];
    uint64_t lengths[2] = {4, 4};
    bool out[2] = {false, false};
    uint32_t preemptions = 0;
    stage_start(&stage, 6, 16);
    ids[0] = open_sealed(&stage, 100, 4);
    ids[1] = open_sealed(&stage, 200, 4);
    for (uint32_t step = 0; step < 100 && (ids[0] != 0 || ids[1] != 0); step++) {
        uint32_t i = step % 2;
        if (ids[i] == 0) {
            continue;
        }
        if (out[i]) {
            if (ids[1 - i] != 0) {
                continue; /* the other one goes first */
            }
            cr_assert_eq(try_swap(&stage, ids[i], false), KVK_OK);
            out[i] = false;
        }
        enum kvk_status status = try_append(&stage, ids[i], lengths[i], 1);
        if (status == KVK_EXHAUSTED) {
            const struct kvk_advice advice = stage.house.error.advice;
            cr_assert_eq(advice.kind, KVK_ADVISE_SWAP_OUT);
            cr_assert_eq(advice.count, 1);
            cr_assert_eq(advice.sequence_ids[0], ids[1 - i]);
            follow(&stage, &advice);
            out[1 - i] = true;
            preemptions++;
            status = try_append(&stage, ids[i], lengths[i], 1);
        }
        cr_assert_eq(status, KVK_OK, "%s", stage.house.error.text);
        lengths[i]++;
        house_seal(&stage.house, stage.session, ids[i], lengths[i]);
        if (lengths[i] == 20) {
            house_close(&stage.house, stage.session, ids[i]);
            ids[i] = 0;
        }
    }
    cr_expect_eq(ids[0], 0);
    cr_expect_eq(ids[1], 0);
    cr_expect_leq(preemptions, 3);
    house_stop(&stage.house);
}

/* Without a tier below, or without room there, a sequence can only be closed; its sealed blocks
 * stay cached, as far as the room is not needed. */
Test(admission, without_a_tier_below_closing_is_advised)
{
    struct stage stage;
    uint64_t id;
    stage_start(&stage, 0, 12);
    (void)open_sealed(&stage, 100, 24);
    uint64_t small = open_sealed(&stage, 1000, 16);
    cr_assert_eq(try_open(&stage, 5000, 20, &id), KVK_EXHAUSTED);
    const struct kvk_advice advice = stage.house.error.advice;
    cr_expect_eq(advice.kind, KVK_ADVISE_CLOSE);
    cr_assert_eq(advice.count, 1);
    cr_expect_eq(advice.sequence_ids[0], small);
    follow(&stage, &advice);
    cr_assert_eq(try_open(&stage, 5000, 20, &id), KVK_OK, "%s", stage.house.error.text);
    house_stop(&stage.house);
    /* A host tier that is full of swapped-out ones. */
    stage_start(&stage, 6, 4);
    uint64_t below = open_sealed(&stage, 100, 16);
    cr_assert_eq(try_swap(&stage, below, true), KVK_OK);
    (void)open_sealed(&stage, 1000, 24);
    cr_assert_eq(try_open(&stage, 5000, 8, &id), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.error.advice.kind, KVK_ADVISE_CLOSE);
    const struct kvk_advice full = stage.house.error.advice;
    follow(&stage, &full);
    cr_assert_eq(try_open(&stage, 5000, 8, &id), KVK_OK, "%s", stage.house.error.text);
    house_stop(&stage.house);
}

/* Room that is kept for growth comes back with the sequence that it is kept for. */
Test(admission, kept_growth_counts_as_room)
{
    struct stage stage;
    uint64_t id;
    uint32_t tokens[16];
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    stage_start(&stage, 12, 64);
    house_tokens(tokens, 8, 1);
    const struct kvk_open_request request = {.session_id = stage.session,
                                             .space_id = stage.space,
                                             .prompt = {.tokens = tokens, .token_count = 8},
                                             .growth_tokens = 32,
                                             .tier = -1};
    cr_assert_eq(kvk_sequence_open(stage.house.cache, &stage.house.caller, &request, &reply,
                                   &tables, &stage.house.error),
                 KVK_OK);
    kvk_tables_finish(&tables);
    house_seal(&stage.house, stage.session, reply.sequence_id, 8);
    cr_assert_eq(try_open(&stage, 5000, 24, &id), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_GROWTH_RESERVED);
    const struct kvk_advice advice = stage.house.error.advice;
    cr_assert_eq(advice.count, 1);
    cr_expect_eq(advice.bytes, 10 * BLOCK, "two blocks and what was kept for eight");
    follow(&stage, &advice);
    cr_assert_eq(try_open(&stage, 5000, 24, &id), KVK_OK, "%s", stage.house.error.text);
    house_stop(&stage.house);
}

/* Only one's own; what is unsealed cannot be swapped; and the journal has it too. */
Test(admission, others_and_unsealed_ones_are_not_named)
{
    struct stage stage;
    uint64_t id;
    uint32_t tokens[64];
    struct kvk_refusal refusals[4];
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    char advice[512];
    uint32_t count = 0;
    stage_start(&stage, 12, 64);
    uint64_t mine = stage.session;
    stage.session = house_session(&stage.house); /* another instance */
    (void)open_sealed(&stage, 100, 20);
    stage.session = mine;
    house_tokens(tokens, 8, 900);
    (void)house_open(&stage.house, stage.session, stage.space, tokens, 8); /* not sealed */
    cr_assert_eq(try_open(&stage, 5000, 28, &id), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.error.advice.kind, KVK_ADVISE_CLOSE,
                 "the unsealed one cannot go down, and the others are not ours");
    uint64_t sealed = open_sealed(&stage, 1000, 20);
    cr_assert_eq(try_open(&stage, 5000, 20, &id), KVK_EXHAUSTED);
    cr_assert_eq(stage.house.error.advice.kind, KVK_ADVISE_SWAP_OUT);
    cr_assert_eq(stage.house.error.advice.count, 1);
    cr_expect_eq(stage.house.error.advice.sequence_ids[0], sealed);
    cr_assert_eq(kvk_report_why(stage.house.cache, &stage.house.caller, everybody, 0, refusals, 4,
                                &count, tiers, advice, sizeof(advice), &stage.house.error),
                 KVK_OK);
    cr_assert_eq(count, 2);
    cr_expect_eq(refusals[0].error.advice.kind, KVK_ADVISE_SWAP_OUT);
    cr_expect_eq(refusals[0].error.advice.sequence_ids[0], sealed);
    cr_expect_eq(refusals[1].error.advice.kind, KVK_ADVISE_CLOSE);
    house_stop(&stage.house);
}

/* ---- When to try again ---- */

static void pass_ms(struct stage *stage, uint64_t ms)
{
    struct kvk_clock_manual *manual = &stage->house.manual;
    kvk_clock_manual_set(manual, kvk_clock_now(&manual->clock) + ms * KVK_NS_PER_MS);
}

static void pin(struct stage *stage, uint32_t first, uint64_t count, uint64_t ttl_ms)
{
    uint32_t tokens[256];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_pin_reply reply;
    house_tokens(tokens, count, first);
    const struct kvk_pin_request request = {.session_id = stage->session,
                                            .space_id = stage->space,
                                            .prompt = {.tokens = tokens, .token_count = count},
                                            .ttl_ms = ttl_ms};
    cr_assert_eq(kvk_lease_pin(stage->house.cache, &stage->house.caller, &request, &reply, &tables,
                               &stage->house.error),
                 KVK_OK);
    kvk_tables_finish(&tables);
}

Test(admission, the_hint_is_when_enough_leases_have_expired)
{
    struct stage stage;
    uint64_t id;
    const uint64_t ttl_ms[] = {9000, 2000, 30000, 5000, 500000};
    stage_start(&stage, 0, 10);
    for (uint32_t i = 0; i < 5; i++) {
        house_close(&stage.house, stage.session, open_sealed(&stage, 1000 * (i + 1), 8));
        pin(&stage, 1000 * (i + 1), 8, ttl_ms[i]);
    }
    const struct {
        uint64_t tokens;
        uint64_t hint_ms;
    } asked[] = {{4, 2000}, {8, 2000}, {12, 5000}, {20, 9000}, {32, 30000}, {40, 60000}};
    for (size_t i = 0; i < sizeof(asked) / sizeof(asked[0]); i++) {
        cr_assert_eq(try_open(&stage, 90000, asked[i].tokens, &id), KVK_EXHAUSTED);
        cr_expect_eq(stage.house.error.cause, KVK_CAUSE_POOL_LEASED);
        cr_expect_eq(stage.house.error.retry_after_ms, asked[i].hint_ms, "%lu tokens: %lu ms",
                     asked[i].tokens, stage.house.error.retry_after_ms);
    }
    /* Who comes back then is let in. */
    pass_ms(&stage, 5001);
    kvk_cache_maintain(stage.house.cache);
    cr_assert_eq(try_open(&stage, 90000, 12, &id), KVK_OK, "%s", stage.house.error.text);
    house_stop(&stage.house);
}

Test(admission, the_hint_follows_how_fast_room_comes_free)
{
    struct stage stage;
    uint64_t id;
    stage_start(&stage, 0, 16);
    kvk_cache_maintain(stage.house.cache);
    uint64_t held = open_sealed(&stage, 100, 32);
    cr_assert_eq(try_open(&stage, 90000, 60, &id), KVK_EXHAUSTED);
    cr_expect_eq(stage.house.error.retry_after_ms, 1000, "nothing was measured yet");
    /* Eight blocks a second, for a while. */
    for (uint32_t i = 0; i < 40; i++) {
        pass_ms(&stage, 500);
        house_close(&stage.house, stage.session, open_sealed(&stage, 1000 * (i + 1), 16));
        kvk_cache_maintain(stage.house.cache);
    }
    cr_assert_eq(try_open(&stage, 90000, 60, &id), KVK_EXHAUSTED);
    cr_expect_geq(stage.house.error.retry_after_ms, 700); /* 7 blocks missing, 8 a second */
    cr_expect_leq(stage.house.error.retry_after_ms, 1100);
    /* Nothing more comes free: patience grows, and is bounded. */
    for (uint32_t i = 0; i < 400; i++) {
        pass_ms(&stage, 500);
        kvk_cache_maintain(stage.house.cache);
    }
    cr_assert_eq(try_open(&stage, 90000, 60, &id), KVK_EXHAUSTED);
    cr_expect_geq(stage.house.error.retry_after_ms, 1000);
    cr_expect_leq(stage.house.error.retry_after_ms, KVK_RETRY_MS_MAX);
    house_close(&stage.house, stage.session, held);
    house_stop(&stage.house);
}
