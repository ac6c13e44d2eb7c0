/* What operators are told, and what other tenants are not. */
#include "daemon/report.h"

#include <stdio.h>

#include "tests/engine_trio.h"

#define BLOCK_BYTES 1024 /* of house_geometry() */

/* ---- Occupancy ---- */

Test(engine_report, occupancy)
{
    struct trio trio;
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    struct kvk_group_report *rows = NULL;
    uint32_t count = 0;
    uint32_t tokens[16];

    trio_start(&trio, &(struct house_options){.device_bytes = 32 * BLOCK_BYTES,
                                              .host_bytes = 64 * BLOCK_BYTES});
    struct house *house = &trio.house;
    uint64_t space_a = house_space(house, "model-of-a");
    uint64_t session_a = house_session(house);
    house_tokens(tokens, 16, 1);
    uint64_t cached = house_open(house, session_a, space_a, tokens, 8).sequence_id;
    house_seal(house, session_a, cached, 8);
    house_close(house, session_a, cached);
    house_tokens(tokens, 16, 100);
    (void)house_open(house, session_a, space_a, tokens, 12);
    house->caller = trio.b;
    uint64_t space_b = house_space(house, "model-of-b");
    uint64_t session_b = house_session(house);
    (void)house_open(house, session_b, space_b, tokens, 4);

    cr_assert_eq(kvk_report_occupancy(house->cache, &trio.admin, everybody, tiers, &rows, &count,
                                      &house->error),
                 KVK_OK);
    const struct kvk_tier_report *device = &tiers[KVK_TIER_DEVICE];
    cr_expect_eq(device->limit_bytes, 32 * BLOCK_BYTES);
    cr_expect_eq(device->used_bytes, 6 * BLOCK_BYTES);
    cr_expect_eq(device->used_bytes + device->free_bytes, device->limit_bytes);
    cr_expect_eq(device->active_bytes, 4 * BLOCK_BYTES);
    cr_expect_eq(device->evictable_bytes, 2 * BLOCK_BYTES);
    cr_expect_eq(device->largest_admissible_bytes, 28 * BLOCK_BYTES);
    cr_expect_geq(device->slab_bytes, device->used_bytes);
    cr_expect_eq(tiers[KVK_TIER_HOST].used_bytes, 0);
    cr_assert_eq(count, 2);
    cr_expect_str_eq(rows[0].tenant->name, "a");
    cr_expect_str_eq(rows[0].model, "model-of-a");
    cr_expect_eq(rows[0].space_id, space_a);
    cr_expect_eq(rows[0].block_bytes, BLOCK_BYTES);
    cr_expect_eq(rows[0].tier_blocks[KVK_TIER_DEVICE], 2);
    cr_expect_eq(rows[0].state_counts[KVK_BLOCK_EVICTABLE], 2);
    cr_expect_eq(rows[0].state_counts[KVK_BLOCK_RESERVED] + rows[0].state_counts[KVK_BLOCK_ACTIVE],
                 3);
    cr_expect_str_eq(rows[1].tenant->name, "b");
    free(rows);

    /* b sees itself alone, however it asks. */
    cr_assert_eq(
        kvk_report_occupancy(house->cache, &trio.b, everybody, tiers, &rows, &count, &house->error),
        KVK_OK);
    cr_assert_eq(count, 1);
    cr_expect_eq(rows[0].space_id, space_b);
    cr_expect_eq(tiers[KVK_TIER_DEVICE].used_bytes, BLOCK_BYTES);
    cr_expect_eq(tiers[KVK_TIER_DEVICE].evictable_bytes, 0);
    cr_expect_eq(tiers[KVK_TIER_DEVICE].active_bytes, 0);
    cr_expect_eq(tiers[KVK_TIER_DEVICE].slab_bytes, 0);
    free(rows);
    rows = NULL;
    cr_expect_eq(kvk_report_occupancy(house->cache, &trio.b, house_view("a"), tiers, &rows, &count,
                                      &house->error),
                 KVK_PERMISSION);
    cr_expect_eq(kvk_report_occupancy(house->cache, &trio.b, house_view("zzz"), tiers, &rows,
                                      &count, &house->error),
                 KVK_PERMISSION);
    cr_expect_eq(kvk_report_occupancy(house->cache, &trio.admin, house_view("zzz"), tiers, &rows,
                                      &count, &house->error),
                 KVK_NOT_FOUND);
    cr_assert_eq(kvk_report_occupancy(house->cache, &trio.admin, house_view("a"), tiers, &rows,
                                      &count, &house->error),
                 KVK_OK);
    cr_assert_eq(count, 1);
    cr_expect_eq(rows[0].space_id, space_a);
    cr_expect_eq(tiers[KVK_TIER_DEVICE].used_bytes, 5 * BLOCK_BYTES);
    free(rows);
    house_stop(house);
}

/* A model's name may be longer than a row has room for; it is cut between two characters. */
Test(engine_report, long_names_are_cut_whole)
{
    struct house house;
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    struct kvk_group_report *rows = NULL;
    uint32_t count = 0;
    char name[601];

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    for (int i = 0; i < 300; i++) {
        memcpy(name + 2 * i, "\xc3\xa9", 2);
    }
    name[600] = '\0';
    (void)house_space(&house, name);
    cr_assert_eq(kvk_report_occupancy(house.cache, &house.caller, everybody, tiers, &rows, &count,
                                      &house.error),
                 KVK_OK);
    cr_assert_eq(count, 1);
    cr_expect_eq(strlen(rows[0].model), 254);
    free(rows);
    house_stop(&house);
}

Test(engine_report, spaces)
{
    struct trio trio;
    struct kvk_space_report *rows = NULL;
    uint32_t count = 0;
    uint32_t tokens[8];

    trio_start(&trio, &(struct house_options){.host_bytes = 64 * BLOCK_BYTES});
    struct house *house = &trio.house;
    uint64_t space_a = house_space(house, "model-of-a");
    uint64_t session_a = house_session(house);
    house_tokens(tokens, 8, 1);
    uint64_t id = house_open(house, session_a, space_a, tokens, 8).sequence_id;
    house_seal(house, session_a, id, 8);
    (void)house_cached(house, space_a, tokens, 8);
    house->caller = trio.b;
    uint64_t space_b = house_space(house, "model-of-b");

    cr_assert_eq(
        kvk_report_spaces(house->cache, &trio.admin, everybody, &rows, &count, &house->error),
        KVK_OK);
    cr_assert_eq(count, 2);
    const struct kvk_space_report *a = rows[0].space_id == space_a ? &rows[0] : &rows[1];
    cr_expect_eq(a->blocks, 2);
    cr_expect_eq(a->bytes, 2 * BLOCK_BYTES);
    cr_expect_eq(a->queries, 2);
    cr_expect_eq(a->query_tokens, 16);
    cr_expect_eq(a->hit_tokens, 8);
    cr_expect_eq(a->block_tokens, 4);
    cr_expect_eq(a->group_count, 1);
    cr_expect_eq(a->groups[0].kv_heads, 2);
    size_t offset = 0;
    uint32_t tag = 0;
    struct kvk_view part;
    cr_assert(kvk_identity_next(a->identity, a->identity_size, &offset, &tag, &part));
    cr_expect_eq(tag, KVK_IDENTITY_MODEL);
    cr_expect_eq(part.size, strlen("model-of-a"));
    cr_expect_eq(memcmp(part.data, "model-of-a", part.size), 0);
    while (kvk_identity_next(a->identity, a->identity_size, &offset, &tag, &part)) {
    }
    cr_expect_eq(offset, a->identity_size, "more than the identity");
    kvk_report_spaces_free(rows, count);

    cr_assert_eq(kvk_report_spaces(house->cache, &trio.b, everybody, &rows, &count, &house->error),
                 KVK_OK);
    cr_assert_eq(count, 1);
    cr_expect_eq(rows[0].space_id, space_b);
    kvk_report_spaces_free(rows, count);
    kvk_report_spaces_free(NULL, 0);
    house_stop(house);
}

/* ---- Lists ---- */

Test(engine_report, sequences_in_pages)
{
    struct trio trio;
    struct kvk_sequence_report *rows = NULL;
    uint32_t count = 0;
    bool more = false;
    uint32_t tokens[8];
    uint64_t ids[20];

    trio_start(&trio, &(struct house_options){.host_bytes = 256 * BLOCK_BYTES});
    struct house *house = &trio.house;
    uint64_t space_a = house_space(house, "model");
    uint64_t session_a = house_session(house);
    for (uint32_t i = 0; i < 20; i++) {
        house_tokens(tokens, 8, 100 * (i / 2)); /* two of each share */
        ids[i] = house_open(house, session_a, space_a, tokens, 7).sequence_id;
        house_seal(house, session_a, ids[i], 7);
    }
    house->caller = trio.b;
    uint64_t space_b = house_space(house, "model");
    uint64_t session_b = house_session(house);
    uint64_t of_b = house_open(house, session_b, space_b, tokens, 8).sequence_id;

    uint64_t after = 0;
    uint32_t seen = 0;
    do {
        cr_assert_eq(kvk_report_sequences(house->cache, &trio.a, everybody, after, 7, &rows, &count,
                                          &more, &house->error),
                     KVK_OK);
        cr_assert(count > 0 && count <= 7);
        for (uint32_t i = 0; i < count; i++) {
            cr_expect_gt(rows[i].sequence_id, after);
            after = rows[i].sequence_id;
            cr_expect_neq(after, of_b);
            cr_expect_eq(rows[i].length, 7);
            cr_expect_eq(rows[i].sealed_tokens, 7);
            cr_expect_eq(rows[i].blocks, 2);
            cr_expect_eq(rows[i].shared_blocks, 1);
            cr_expect_eq(rows[i].tier_bytes[KVK_TIER_HOST], 2 * BLOCK_BYTES);
            cr_expect_eq(rows[i].tier_bytes[KVK_TIER_DEVICE], 0);
            cr_expect_eq(rows[i].state, KVK_SEQUENCE_RUNNING);
            seen++;
        }
        free(rows);
    } while (more);
    cr_expect_eq(seen, 20);

    cr_assert_eq(kvk_report_sequences(house->cache, &trio.admin, everybody, 0, 1000, &rows, &count,
                                      &more, &house->error),
                 KVK_OK);
    cr_expect_eq(count, 21);
    cr_expect_not(more);
    free(rows);
    cr_assert_eq(kvk_report_sequences(house->cache, &trio.a, everybody, ids[19] + 1000, 5, &rows,
                                      &count, &more, &house->error),
                 KVK_OK);
    cr_expect_eq(count, 0);
    cr_expect_not(more);
    free(rows);
    house_stop(house);
}

Test(engine_report, leases)
{
    struct trio trio;
    struct kvk_lease_report *rows = NULL;
    uint32_t count = 0;
    bool more = false;
    uint32_t tokens[8];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_pin_reply lease;

    trio_start(&trio,
               &(struct house_options){.host_bytes = 256 * BLOCK_BYTES, .manual_clock = true});
    struct house *house = &trio.house;
    uint64_t space_a = house_space(house, "model");
    struct kvk_hello hello = house_hello();
    hello.name = house_view("engine-0");
    uint64_t session_a = house_begin(house, &hello).session_id;
    house_tokens(tokens, 8, 1);
    uint64_t id = house_open(house, session_a, space_a, tokens, 8).sequence_id;
    house_seal(house, session_a, id, 8);
    const struct kvk_pin_request pin = {.session_id = session_a,
                                        .space_id = space_a,
                                        .prompt = {.tokens = tokens, .token_count = 8},
                                        .ttl_ms = 5000,
                                        .copy_pin = true};
    for (int i = 0; i < 3; i++) {
        cr_assert_eq(kvk_lease_pin(house->cache, &trio.a, &pin, &lease, &tables, &house->error),
                     KVK_OK);
    }
    const struct kvk_transfer_request transfer = {
        .session_id = session_a, .lease_id = lease.lease_id, .block_count = 1};
    uint64_t ticket = 0;
    cr_assert_eq(
        kvk_transfer_begin(house->cache, &trio.a, &transfer, &ticket, &tables, &house->error),
        KVK_OK, "%s", house->error.text);
    kvk_tables_finish(&tables);
    kvk_clock_manual_set(&house->manual,
                         kvk_clock_now(&house->manual.clock) + 2 * KVK_NS_PER_SECOND);
    cr_assert_eq(kvk_report_leases(house->cache, &trio.a, everybody, 0, 10, &rows, &count, &more,
                                   &house->error),
                 KVK_OK);
    cr_assert_eq(count, 3);
    cr_expect_eq(rows[2].lease_id, lease.lease_id);
    cr_expect_eq(rows[2].open_transfers, 1);
    cr_expect_eq(rows[2].tokens, 8);
    cr_expect_eq(rows[2].blocks, 2);
    cr_expect(rows[2].copy_pin);
    cr_expect_str_eq(rows[2].instance_name, "engine-0");
    cr_expect_eq(rows[0].age_ms, 2000);
    cr_expect_eq(rows[0].ttl_ms, 3000);
    free(rows);
    cr_assert_eq(kvk_report_leases(house->cache, &trio.b, everybody, 0, 10, &rows, &count, &more,
                                   &house->error),
                 KVK_OK);
    cr_expect_eq(count, 0);
    free(rows);
    house_stop(house);
}

Test(engine_report, sessions)
{
    struct trio trio;
    struct kvk_session_report *rows = NULL;
    uint32_t count = 0;
    uint32_t tokens[8];

    trio_start(&trio, &(struct house_options){.host_bytes = 256 * BLOCK_BYTES});
    struct house *house = &trio.house;
    uint64_t space_a = house_space(house, "model");
    struct kvk_hello hello = house_hello();
    hello.name = house_view("engine-0");
    struct kvk_welcome opener = house_begin(house, &hello);
    hello.instance_token = (struct kvk_view){.data = opener.instance_token, .size = KVK_TOKEN_SIZE};
    hello.rank = 1;
    (void)house_begin(house, &hello);
    house_tokens(tokens, 8, 1);
    (void)house_open(house, opener.session_id, space_a, tokens, 8);
    house->caller = trio.b;
    (void)house_session(house);

    cr_assert_eq(
        kvk_report_sessions(house->cache, &trio.admin, everybody, &rows, &count, &house->error),
        KVK_OK);
    cr_assert_eq(count, 3);
    uint32_t of_a = 0;
    for (uint32_t i = 0; i < count; i++) {
        cr_expect_neq(rows[i].session_id, 0);
        cr_expect(rows[i].connected);
        cr_expect_eq(rows[i].pid, (int32_t)getpid());
        if (strcmp(rows[i].tenant->name, "a") == 0) {
            cr_expect_str_eq(rows[i].instance_name, "engine-0");
            cr_expect_eq(rows[i].instance_sequences, 1);
            of_a++;
        }
    }
    cr_expect_eq(of_a, 2);
    free(rows);

    /* A session's id is the right to use it: not for tenants' eyes. */
    cr_assert_eq(
        kvk_report_sessions(house->cache, &trio.a, everybody, &rows, &count, &house->error),
        KVK_OK);
    cr_assert_eq(count, 2);
    cr_expect_eq(rows[0].session_id, 0);
    cr_expect_eq(rows[0].instance_id, rows[1].instance_id);
    cr_expect_neq(rows[0].rank, rows[1].rank);
    free(rows);
    house_stop(house);
}

/* ---- One block ---- */

Test(engine_report, block)
{
    struct trio trio;
    uint32_t tokens[12];
    struct kvk_block_report report;

    trio_start(&trio, &(struct house_options){.device_bytes = 64 * BLOCK_BYTES,
                                              .host_bytes = 64 * BLOCK_BYTES,
                                              .manual_clock = true});
    struct house *house = &trio.house;
    uint64_t space_id = house_space(house, "model");
    uint64_t session_id = house_session(house);
    house_tokens(tokens, 12, 1);
    uint64_t id = house_open(house, session_id, space_id, tokens, 12).sequence_id;
    cr_assert_eq(house_try_seal(house, session_id, id, 12, 8), KVK_OK);
    kvk_clock_manual_set(&house->manual,
                         kvk_clock_now(&house->manual.clock) + 2 * KVK_NS_PER_SECOND);
    struct kvk_prompt prefix = {.tokens = tokens, .token_count = 4};
    cr_assert_eq(
        kvk_report_block(house->cache, &trio.a, space_id, 0, &prefix, &report, &house->error),
        KVK_OK, "%s", house->error.text);
    cr_expect_eq(report.state, KVK_BLOCK_SEALED);
    cr_expect_eq(report.tier_mask, 1 << KVK_TIER_DEVICE);
    cr_expect_neq(report.slot[KVK_TIER_DEVICE], KVK_SLOT_NONE);
    cr_expect_eq(report.slot[KVK_TIER_HOST], KVK_SLOT_NONE);
    cr_expect_eq(report.holds, 1);
    cr_expect_eq(report.pins[KVK_TIER_DEVICE], 1);
    cr_expect_eq(report.children, 1);
    cr_expect_eq(report.position, 0);
    cr_expect_eq(report.uses, 1);
    cr_expect_eq(report.idle_ms, 2000);
    house_close(house, session_id, id);
    prefix.token_count = 8;
    cr_assert_eq(
        kvk_report_block(house->cache, &trio.admin, space_id, 0, &prefix, &report, &house->error),
        KVK_OK);
    cr_expect_eq(report.state, KVK_BLOCK_EVICTABLE);
    cr_expect_eq(report.position, 1);
    cr_expect_eq(report.holds, 0);

    prefix.token_count = 12;
    cr_expect_eq(
        kvk_report_block(house->cache, &trio.a, space_id, 0, &prefix, &report, &house->error),
        KVK_NOT_FOUND);
    prefix.token_count = 7;
    cr_expect_eq(
        kvk_report_block(house->cache, &trio.a, space_id, 0, &prefix, &report, &house->error),
        KVK_INVALID);
    prefix.token_count = 0;
    cr_expect_eq(
        kvk_report_block(house->cache, &trio.a, space_id, 0, &prefix, &report, &house->error),
        KVK_INVALID);
    prefix.token_count = 8;
    cr_expect_eq(
        kvk_report_block(house->cache, &trio.a, space_id, 1, &prefix, &report, &house->error),
        KVK_INVALID);
    prefix.salt = (const uint8_t *)"salt";
    prefix.salt_size = 4;
    cr_expect_eq(
        kvk_report_block(house->cache, &trio.a, space_id, 0, &prefix, &report, &house->error),
        KVK_NOT_FOUND);
    /* Not another tenant's, not even that there is one. */
    prefix.salt_size = 0;
    cr_expect_eq(
        kvk_report_block(house->cache, &trio.b, space_id, 0, &prefix, &report, &house->error),
        KVK_NOT_FOUND);
    cr_expect_str_eq(house->error.field, "space_id");
    house_stop(house);
}

/* ---- Why ---- */

static uint32_t ask_why(struct trio *trio, const struct kvk_caller *caller, uint64_t sequence_id,
                        struct kvk_refusal *refusals, uint32_t limit, char *advice)
{
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    uint32_t count = 0;
    cr_assert_eq(kvk_report_why(trio->house.cache, caller, everybody, sequence_id, refusals, limit,
                                &count, tiers, advice, 512, &trio->house.error),
                 KVK_OK);
    return count;
}

static void expect_words(const char *advice, const char *const words[])
{
    for (size_t i = 0; words[i] != NULL; i++) {
        cr_expect(strstr(advice, words[i]) != NULL, "\"%s\" lacks \"%s\"", advice, words[i]);
    }
}

Test(engine_report, why_sequences)
{
    struct trio trio;
    struct kvk_refusal refusals[300];
    struct kvk_sequence_reply reply;
    char advice[512];
    uint32_t tokens[64];

    trio_start(&trio,
               &(struct house_options){.host_bytes = 16 * BLOCK_BYTES, .manual_clock = true});
    struct house *house = &trio.house;
    cr_expect_eq(ask_why(&trio, &trio.admin, 0, refusals, 20, advice), 0);
    expect_words(advice, (const char *const[]){"Nothing stands in the way", "host", NULL});

    uint64_t space_id = house_space(house, "model");
    struct kvk_hello hello = house_hello();
    hello.name = house_view("engine-7");
    uint64_t session_id = house_begin(house, &hello).session_id;
    house_tokens(tokens, 64, 1);
    uint64_t oldest = house_open(house, session_id, space_id, tokens, 32).sequence_id;
    kvk_clock_manual_set(&house->manual,
                         kvk_clock_now(&house->manual.clock) + 600 * KVK_NS_PER_SECOND);
    (void)house_open(house, session_id, space_id, tokens + 4, 32);
    cr_expect_eq(house_try_open(house, session_id, space_id, tokens + 8, 20, &reply),
                 KVK_EXHAUSTED);
    house->caller = trio.b;
    uint64_t space_b = house_space(house, "model");
    uint64_t session_b = house_session(house);
    for (int i = 0; i < 300; i++) {
        cr_expect_eq(house_try_open(house, session_b, space_b, tokens, 4, &reply), KVK_EXHAUSTED);
    }

    char id_text[32];
    (void)snprintf(id_text, sizeof(id_text), "%llu", (unsigned long long)oldest);
    uint32_t count = ask_why(&trio, &trio.admin, 0, refusals, 300, advice);
    cr_expect_eq(count, KVK_REFUSAL_COUNT); /* the ring; a's has been pushed out */
    cr_expect_str_eq(refusals[0].tenant->name, "b");
    cr_expect_str_eq(refusals[0].call, "Test");
    cr_expect_eq(refusals[0].error.status, KVK_EXHAUSTED);
    cr_expect_eq(refusals[0].needed_bytes, BLOCK_BYTES);
    cr_expect_eq(house->cache->refusal_count, 301);
    expect_words(advice, (const char *const[]){"host tier is bound to 100 %", "tenant a",
                                               "2 of them", "engine-7", "10 min", id_text, NULL});

    /* b hears of itself alone: its own refusals, and no name of a's. */
    count = ask_why(&trio, &trio.b, 0, refusals, 5, advice);
    cr_expect_eq(count, 5);
    cr_expect_str_eq(refusals[4].tenant->name, "b");
    cr_expect_null(strstr(advice, "engine-7"), "%s", advice);
    cr_expect_null(strstr(advice, id_text), "%s", advice);
    expect_words(advice, (const char *const[]){"You use 0 B of the host tier", NULL});
    cr_expect_eq(ask_why(&trio, &trio.a, 0, refusals, 300, advice), 0);
    house_stop(house);
}

Test(engine_report, why_leases_and_growth)
{
    struct trio trio;
    struct kvk_refusal refusals[20];
    char advice[512];
    uint32_t tokens[64];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_pin_reply lease;

    trio_start(&trio, &(struct house_options){.host_bytes = 16 * BLOCK_BYTES});
    struct house *house = &trio.house;
    uint64_t space_id = house_space(house, "model");
    uint64_t session_id = house_session(house);
    house_tokens(tokens, 64, 1);
    uint64_t id = house_open(house, session_id, space_id, tokens, 60).sequence_id;
    house_seal(house, session_id, id, 60);
    house_close(house, session_id, id);
    const struct kvk_pin_request pin = {.session_id = session_id,
                                        .space_id = space_id,
                                        .prompt = {.tokens = tokens, .token_count = 60},
                                        .ttl_ms = 5000};
    cr_assert_eq(kvk_lease_pin(house->cache, &trio.a, &pin, &lease, &tables, &house->error),
                 KVK_OK);
    (void)ask_why(&trio, &trio.admin, 0, refusals, 20, advice);
    expect_words(advice, (const char *const[]){"1 leases bind 94 %", "host tier", "Release", NULL});
    uint64_t released = 0;
    cr_assert_eq(kvk_lease_release(house->cache, &trio.a, session_id, &lease.lease_id, 1, &released,
                                   &house->error),
                 KVK_OK);

    const struct kvk_open_request grow = {.session_id = session_id,
                                          .space_id = space_id,
                                          .prompt = {.tokens = tokens + 1, .token_count = 4},
                                          .growth_tokens = 60,
                                          .tier = -1};
    struct kvk_sequence_reply reply;
    cr_assert_eq(kvk_sequence_open(house->cache, &trio.a, &grow, &reply, &tables, &house->error),
                 KVK_OK, "%s", house->error.text);
    kvk_tables_finish(&tables);
    (void)ask_why(&trio, &trio.admin, 0, refusals, 20, advice);
    expect_words(advice, (const char *const[]){"15.0 KiB of the host tier", "growth", NULL});

    /* A short buffer gets what fits. */
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    uint32_t count = 0;
    char tiny[8];
    memset(tiny, 'x', sizeof(tiny));
    cr_assert_eq(kvk_report_why(house->cache, &trio.admin, everybody, 0, refusals, 20, &count,
                                tiers, tiny, sizeof(tiny), &house->error),
                 KVK_OK);
    cr_expect_eq(strlen(tiny), 7);
    house_stop(house);
}

/* ---- Counters ---- */

#define STATS_MAX 1000

struct collected {
    char name[STATS_MAX][200];
    double value[STATS_MAX];
    uint32_t count;
};

static void collect(void *context, const char *name, double value)
{
    struct collected *collected = context;
    cr_expect_eq(kvk_locks_held(), 0);
    cr_assert(collected->count < STATS_MAX);
    (void)snprintf(collected->name[collected->count], 200, "%s", name);
    collected->value[collected->count] = value;
    collected->count++;
}

static double stat_of(const struct collected *collected, const char *name)
{
    for (uint32_t i = 0; i < collected->count; i++) {
        if (strcmp(collected->name[i], name) == 0) {
            return collected->value[i];
        }
    }
    cr_assert(false, "no stat %s", name);
    return -1;
}

Test(engine_report, stats_have_names_and_move)
{
    struct trio trio;
    static struct collected before;
    static struct collected after;
    uint32_t tokens[8];

    trio_start(&trio, &(struct house_options){.device_bytes = 16 * BLOCK_BYTES,
                                              .host_bytes = 16 * BLOCK_BYTES});
    struct house *house = &trio.house;
    kvk_report_stats(house->cache, collect, &before);
    uint64_t space_id = house_space(house, "model");
    uint64_t session_id = house_session(house);
    house_tokens(tokens, 8, 1);
    uint64_t id = house_open(house, session_id, space_id, tokens, 8).sequence_id;
    house_seal(house, session_id, id, 8);
    (void)house_cached(house, space_id, tokens, 8);
    kvk_report_stats(house->cache, collect, &after);

    for (uint32_t i = 0; i < after.count; i++) {
        cr_expect_eq(strncmp(after.name[i], "kvkeep_", 7), 0, "%s", after.name[i]);
        for (uint32_t j = 0; j < i; j++) {
            cr_expect_str_neq(after.name[i], after.name[j]);
        }
    }
    cr_expect_eq(stat_of(&after, "kvkeep_sequences_opened_total"), 1);
    cr_expect_eq(stat_of(&after, "kvkeep_seals_total"), 1);
    cr_expect_eq(stat_of(&after, "kvkeep_sealed_blocks_total"), 2);
    cr_expect_eq(stat_of(&after, "kvkeep_lookup_total"), 2);
    cr_expect_eq(stat_of(&after, "kvkeep_hit_tokens_total"), 8);
    cr_expect_eq(stat_of(&after, "kvkeep_spaces"), 1);
    cr_expect_eq(stat_of(&after, "kvkeep_sequences"), 1);
    cr_expect_eq(stat_of(&after, "kvkeep_sessions"), 1);
    cr_expect_eq(stat_of(&after, "kvkeep_blocks{state=\"SEALED\"}"), 2);
    cr_expect_eq(stat_of(&after, "kvkeep_index_blocks"), 2);
    cr_expect_eq(stat_of(&after, "kvkeep_tier_used_bytes{tier=\"device\"}"), 2 * BLOCK_BYTES);
    cr_expect_eq(stat_of(&after, "kvkeep_tier_limit_bytes{tier=\"host\"}"), 16 * BLOCK_BYTES);
    cr_expect_eq(stat_of(&after, "kvkeep_tenant_used_bytes{tenant=\"a\",tier=\"device\"}"),
                 2 * BLOCK_BYTES);
    cr_expect_eq(stat_of(&after, "kvkeep_tenant_sequences{tenant=\"a\"}"), 1);
    cr_expect_eq(stat_of(&after, "kvkeep_evictions_total{tier=\"device\"}"), 0);
    /* Tenants without anything have no rows; what is there stays there. */
    for (uint32_t i = 0; i < after.count; i++) {
        cr_expect_null(strstr(after.name[i], "\"b\""));
    }
    for (uint32_t i = 0; i < before.count; i++) {
        cr_expect_geq(stat_of(&after, before.name[i]), 0);
    }
    kvk_session_end(house->cache, session_id);
    static struct collected ended;
    kvk_report_stats(house->cache, collect, &ended);
    cr_expect_eq(stat_of(&ended, "kvkeep_sessions_ended_total"), 1);
    cr_expect_eq(stat_of(&ended, "kvkeep_instances_ended_total"), 1);
    cr_expect_eq(stat_of(&ended, "kvkeep_sequences"), 0);
    cr_expect_eq(stat_of(&ended, "kvkeep_tier_evictable_bytes{tier=\"device\"}"), 2 * BLOCK_BYTES);
    house_stop(house);
}
