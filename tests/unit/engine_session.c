/*
 * Instances and sessions: who may begin and join, who is told what, and what comes back when one
 * ends. Real processes are in engine_process.c.
 */
#include "daemon/session.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "tests/engine_house.h"

#define BLOCK_BYTES 1024 /* of house_geometry() */

static uint32_t session_count(struct house *house)
{
    kvk_lock(&house->cache->lock);
    uint32_t count = house->cache->session_table.count;
    kvk_unlock(&house->cache->lock);
    return count;
}

/* ---- Beginning ---- */

Test(engine_session, hello_is_checked)
{
    struct house house;
    struct kvk_welcome welcome;
    char name[300];

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    struct kvk_hello hello = house_hello();
    hello.rank = KVK_SHARD_COUNT_MAX;
    cr_expect_eq(kvk_session_begin(house.cache, &house.caller, &hello, &welcome, &house.error),
                 KVK_INVALID);
    cr_expect_str_eq(house.error.field, "hello.rank");
    hello = house_hello();
    memset(name, 'n', sizeof(name));
    hello.name = (struct kvk_view){.data = (const uint8_t *)name, .size = 256};
    cr_expect_eq(kvk_session_begin(house.cache, &house.caller, &hello, &welcome, &house.error),
                 KVK_INVALID);
    hello.name = house_view("\xff");
    cr_expect_eq(kvk_session_begin(house.cache, &house.caller, &hello, &welcome, &house.error),
                 KVK_INVALID);
    cr_expect_str_eq(house.error.field, "hello.name");
    hello = house_hello();
    hello.instance_token = house_view("short");
    cr_expect_eq(kvk_session_begin(house.cache, &house.caller, &hello, &welcome, &house.error),
                 KVK_INVALID);
    cr_expect_str_eq(house.error.field, "hello.instance_token");
    hello = house_hello();
    hello.tenant = house_view("somebody");
    cr_expect_eq(kvk_session_begin(house.cache, &house.caller, &hello, &welcome, &house.error),
                 KVK_PERMISSION);
    cr_expect_eq(session_count(&house), 0);

    /* 255 bytes are a name. */
    hello = house_hello();
    hello.name = (struct kvk_view){.data = (const uint8_t *)name, .size = 255};
    hello.rank = KVK_SHARD_COUNT_MAX - 1;
    welcome = house_begin(&house, &hello);
    cr_expect_neq(welcome.session_id, 0);
    house_stop(&house);
}

Test(engine_session, limits)
{
    struct house house;
    struct kvk_welcome welcome;

    house_init(&house);
    house.config.instances = 2;
    house.config.sessions = 3;
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    struct kvk_hello hello = house_hello();
    struct kvk_welcome first = house_begin(&house, &hello);
    uint64_t second = house_session(&house);
    cr_expect_eq(kvk_session_begin(house.cache, &house.caller, &hello, &welcome, &house.error),
                 KVK_EXHAUSTED);
    cr_expect_str_eq(house.error.field, "limits.instances");
    hello.instance_token = (struct kvk_view){.data = first.instance_token, .size = KVK_TOKEN_SIZE};
    hello.rank = 1;
    (void)house_begin(&house, &hello);
    hello.rank = 2;
    cr_expect_eq(kvk_session_begin(house.cache, &house.caller, &hello, &welcome, &house.error),
                 KVK_EXHAUSTED);
    cr_expect_str_eq(house.error.field, "limits.sessions");
    cr_expect_eq(house.error.limit, 3);

    /* What ends makes room. */
    kvk_session_end(house.cache, second);
    (void)house_begin(&house, &hello);
    cr_expect_eq(house.cache->refusal_count, 2);
    house_stop(&house);
}

static void two_tenants(struct house *house)
{
    house_init(house);
    house->config.tenants = calloc(2, sizeof(house->config.tenants[0]));
    house->config.credentials = calloc(2, sizeof(house->config.credentials[0]));
    house->config.tenant_count = 2;
    house->config.credential_count = 2;
    strcpy(house->config.tenants[0].name, "a");
    strcpy(house->config.tenants[1].name, "b");
    house->config.credentials[0] = (struct kvk_credential_config){
        .name = "a", .token = "credential-of-a-0", .tenants = {0}, .tenant_count = 1};
    house->config.credentials[1] = (struct kvk_credential_config){
        .name = "b", .token = "credential-of-b-0", .tenants = {1}, .tenant_count = 1};
}

Test(engine_session, ranks_join_by_the_token)
{
    struct house house;
    struct kvk_welcome welcome;

    two_tenants(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    struct kvk_caller a = house_caller_of(&house, "credential-of-a-0");
    struct kvk_caller b = house_caller_of(&house, "credential-of-b-0");
    house.caller = a;
    struct kvk_hello hello = house_hello();
    struct kvk_welcome opener = house_begin(&house, &hello);

    hello.instance_token = (struct kvk_view){.data = opener.instance_token, .size = KVK_TOKEN_SIZE};
    cr_expect_eq(kvk_session_begin(house.cache, &a, &hello, &welcome, &house.error), KVK_EXISTS);
    hello.rank = 1;
    welcome = house_begin(&house, &hello);
    cr_expect_eq(memcmp(welcome.instance_token, opener.instance_token, KVK_TOKEN_SIZE), 0);
    cr_expect_eq(kvk_session_begin(house.cache, &a, &hello, &welcome, &house.error), KVK_EXISTS);
    cr_expect_str_eq(house.error.field, "hello.rank");

    /* Another tenant with the token is told the same as with any other token. */
    hello.rank = 2;
    cr_expect_eq(kvk_session_begin(house.cache, &b, &hello, &welcome, &house.error), KVK_NOT_FOUND);
    struct kvk_error first = house.error;
    uint8_t wrong[KVK_TOKEN_SIZE] = {1};
    hello.instance_token.data = wrong;
    cr_expect_eq(kvk_session_begin(house.cache, &b, &hello, &welcome, &house.error), KVK_NOT_FOUND);
    cr_expect_eq(memcmp(&first, &house.error, sizeof(first)), 0);

    /* Nobody joins an instance that has ended. */
    kvk_session_end(house.cache, opener.session_id);
    hello.instance_token.data = opener.instance_token;
    cr_expect_eq(kvk_session_begin(house.cache, &a, &hello, &welcome, &house.error), KVK_NOT_FOUND);
    house_stop(&house);
}

/* Another tenant that guessed the id of a session can do nothing with it. */
Test(engine_session, sessions_are_of_a_tenant)
{
    struct house house;
    struct kvk_session *session = NULL;

    two_tenants(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    struct kvk_caller a = house_caller_of(&house, "credential-of-a-0");
    struct kvk_caller b = house_caller_of(&house, "credential-of-b-0");
    house.caller = a;
    uint64_t id = house_session(&house);
    kvk_lock(&house.cache->lock);
    cr_expect_eq(kvk_session_find(house.cache, &a, id, &session, &house.error), KVK_OK);
    cr_expect_eq(kvk_session_find(house.cache, &b, id, &session, &house.error), KVK_NOT_FOUND);
    struct kvk_error first = house.error;
    cr_expect_eq(kvk_session_find(house.cache, &a, id + 1, &session, &house.error), KVK_NOT_FOUND);
    cr_expect_eq(memcmp(&first, &house.error, sizeof(first)), 0);
    cr_expect_eq(house.error.cause, KVK_CAUSE_SESSION_ENDED);
    kvk_unlock(&house.cache->lock);
    house_stop(&house);
}

/* ---- Notices ---- */

struct told {
    _Atomic int count;
    _Atomic int kind;
    _Atomic uint64_t value;
    _Atomic bool slow;
    _Atomic bool inside;
};

static void on_notice(void *context, enum kvk_notice_kind kind, uint64_t value)
{
    struct told *told = context;

    cr_expect_eq(kvk_locks_held(), 0);
    told->inside = true;
    if (told->slow) {
        house_sleep_ms(50);
    }
    told->kind = (int)kind;
    told->value = value;
    told->count++;
    told->inside = false;
}

Test(engine_session, others_are_told_of_a_ranks_end)
{
    struct house house;
    struct told told[3] = {{.count = 0}};
    struct kvk_welcome welcomes[3];

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    struct kvk_hello hello = house_hello();
    for (uint32_t rank = 0; rank < 3; rank++) {
        hello.rank = rank;
        hello.on_notice = on_notice;
        hello.context = &told[rank];
        welcomes[rank] = house_begin(&house, &hello);
        hello.instance_token =
            (struct kvk_view){.data = welcomes[0].instance_token, .size = KVK_TOKEN_SIZE};
    }
    kvk_session_end(house.cache, welcomes[2].session_id);
    cr_expect_eq(told[0].count, 1);
    cr_expect_eq(told[0].kind, KVK_NOTICE_RANK_ENDED);
    cr_expect_eq(told[0].value, 2);
    cr_expect_eq(told[1].count, 1);
    cr_expect_eq(told[2].count, 0);

    kvk_sessions_drain(house.cache);
    cr_expect_eq(told[0].kind, KVK_NOTICE_DRAINING);
    cr_expect_eq(told[1].kind, KVK_NOTICE_DRAINING);
    cr_expect_eq(told[2].count, 0);
    struct kvk_welcome welcome;
    cr_expect_eq(kvk_session_begin(house.cache, &house.caller, &hello, &welcome, &house.error),
                 KVK_UNAVAILABLE);
    cr_expect_eq(house.error.cause, KVK_CAUSE_DRAINING);

    /* With the opener the instance ends, and the other ranks' sessions are good for nothing. */
    kvk_session_end(house.cache, welcomes[0].session_id);
    cr_expect_eq(told[1].kind, KVK_NOTICE_RANK_ENDED);
    cr_expect_eq(told[1].value, 0);
    struct kvk_session *session = NULL;
    kvk_lock(&house.cache->lock);
    cr_expect_eq(kvk_session_find(house.cache, &house.caller, welcomes[1].session_id, &session,
                                  &house.error),
                 KVK_NOT_FOUND);
    kvk_unlock(&house.cache->lock);
    kvk_session_end(house.cache, welcomes[1].session_id);
    cr_expect_eq(session_count(&house), 0);
    cr_expect_eq(house.cache->instance_count, 0);
    house_stop(&house);
}

static void *drain_all(void *argument)
{
    kvk_sessions_drain(argument);
    return NULL;
}

/* After kvk_session_end() nobody is told any more, also where a notice was just under way. */
Test(engine_session, end_waits_for_a_notice)
{
    struct house house;
    struct told told = {.slow = true};
    pthread_t thread;

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    struct kvk_hello hello = house_hello();
    hello.on_notice = on_notice;
    hello.context = &told;
    uint64_t id = house_begin(&house, &hello).session_id;
    cr_assert_eq(pthread_create(&thread, NULL, drain_all, house.cache), 0);
    while (!told.inside) {
        house_sleep_ms(1);
    }
    kvk_session_end(house.cache, id);
    cr_expect_not(told.inside);
    cr_expect_eq(told.count, 1);
    cr_assert_eq(pthread_join(thread, NULL), 0);
    house_stop(&house);
}

/* ---- Ends without mappings ---- */

/* All that an instance had is back at once, and what it had sealed stays cached. Case C4. */
Test(engine_session, c4_a_dead_writers_blocks_come_back)
{
    struct house house;
    uint32_t tokens[12];

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 16 * BLOCK_BYTES});
    uint64_t space_id = house_space(&house, "model");
    house_tokens(tokens, 12, 1);
    uint64_t first = house_session(&house);
    struct kvk_sequence_reply sequence = house_open(&house, first, space_id, tokens, 12);
    cr_expect_eq(house_bound(&house, KVK_TIER_HOST), 3 * BLOCK_BYTES);
    cr_assert_eq(house_try_seal(&house, first, sequence.sequence_id, 12, 4), KVK_OK);
    kvk_session_end(house.cache, first);
    cr_expect_eq(house_bound(&house, KVK_TIER_HOST), 0);
    cr_expect_eq(house_cached(&house, space_id, tokens, 12), 4);

    /* A second writes and seals the same tokens at once; the first's late seal is refused. */
    uint64_t second = house_session(&house);
    struct kvk_sequence_reply again = house_open(&house, second, space_id, tokens, 12);
    cr_expect_eq(again.cached_tokens, 4);
    house_seal(&house, second, again.sequence_id, 12);
    cr_expect_eq(house_try_seal(&house, first, sequence.sequence_id, 12, 12), KVK_NOT_FOUND);
    cr_expect_eq(house.error.cause, KVK_CAUSE_SESSION_ENDED);
    house_close(&house, second, again.sequence_id);
    cr_expect_eq(house_cached(&house, space_id, tokens, 12), 12);
    house_stop(&house);
}

/* A rank's end cuts the instance's sequences back to what all have sealed; it may come again. */
Test(engine_session, a_rank_ends)
{
    struct house house;
    uint32_t tokens[12];
    struct kvk_seal_reply sealed;

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 32 * BLOCK_BYTES});
    struct kvk_geometry geometry = house_geometry();
    geometry.tensor_shards = 2;
    uint64_t space_id = house_space_of(&house, &house.caller, "sharded", &geometry, 1);
    struct kvk_hello hello = house_hello();
    struct kvk_welcome opener = house_begin(&house, &hello);
    hello.rank = 1;
    hello.instance_token = (struct kvk_view){.data = opener.instance_token, .size = KVK_TOKEN_SIZE};
    struct kvk_welcome rank = house_begin(&house, &hello);

    house_tokens(tokens, 12, 1);
    struct kvk_sequence_reply sequence =
        house_open(&house, opener.session_id, space_id, tokens, 12);
    struct kvk_seal_request seal = {.session_id = opener.session_id,
                                    .sequence_id = sequence.sequence_id,
                                    .expected_length = 12,
                                    .length = 12};
    cr_assert_eq(kvk_sequence_seal(house.cache, &house.caller, &seal, &sealed, &house.error),
                 KVK_OK);
    cr_expect_eq(sealed.sealed_tokens, 0);
    seal.session_id = rank.session_id;
    seal.length = 5;
    cr_assert_eq(kvk_sequence_seal(house.cache, &house.caller, &seal, &sealed, &house.error),
                 KVK_OK);
    cr_expect_eq(sealed.sealed_tokens, 5);
    cr_expect_eq(house_cached(&house, space_id, tokens, 12), 4);

    kvk_session_end(house.cache, rank.session_id);
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    cr_assert_eq(kvk_sequence_get(house.cache, &house.caller, opener.session_id,
                                  sequence.sequence_id, &reply, &tables, &house.error),
                 KVK_OK, "%s", house.error.text);
    kvk_tables_finish(&tables);
    cr_expect_eq(reply.length, 5);
    cr_expect_eq(reply.sealed_tokens, 5);
    cr_expect_eq(house_bound(&house, KVK_TIER_HOST), 2 * BLOCK_BYTES);
    cr_expect_eq(house_cached(&house, space_id, tokens, 12), 4);
    (void)house_begin(&house, &hello);
    house_stop(&house);
}

/* ---- Case C3: the client dies while a restore is under way ---- */

struct restore {
    struct house *house;
    uint64_t session_id;
    uint64_t sequence_id;
    enum kvk_status status;
};

static void *run_restore(void *argument)
{
    struct restore *restore = argument;
    struct kvk_swap_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_error error;

    restore->status =
        kvk_sequence_swap_in(restore->house->cache, &restore->house->caller, restore->session_id,
                             restore->sequence_id, &reply, &tables, &error);
    kvk_tables_finish(&tables);
    return NULL;
}

Test(engine_session, c3_an_end_during_a_restore, .timeout = 240)
{
    struct house house;
    uint32_t tokens[16];
    uint32_t caught = 0;

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 16 * BLOCK_BYTES,
                                                .host_bytes = 64 * BLOCK_BYTES,
                                                .threads = true});
    uint64_t space_id = house_space(&house, "model");
    const struct kvk_test_control slow = {.set_copy_delay = true, .copy_delay_us = 300};
    cr_assert_eq(kvk_cache_test_control(house.cache, &slow, &house.error), KVK_OK);
    for (uint32_t round = 0; round < 200; round++) {
        struct restore restore = {.house = &house};
        struct kvk_swap_reply reply;
        struct kvk_tables tables = {.part_count = 0};
        pthread_t thread;

        restore.session_id = house_session(&house);
        house_tokens(tokens, 16, 100 * round);
        restore.sequence_id =
            house_open(&house, restore.session_id, space_id, tokens, 16).sequence_id;
        house_seal(&house, restore.session_id, restore.sequence_id, 16);
        cr_assert_eq(kvk_sequence_swap_out(house.cache, &house.caller, restore.session_id,
                                           restore.sequence_id, &reply, &tables, &house.error),
                     KVK_OK, "%s", house.error.text);
        kvk_tables_finish(&tables);
        cr_assert_eq(pthread_create(&thread, NULL, run_restore, &restore), 0);
        if (round % 4 != 0) {
            const struct timespec pause = {.tv_nsec = round % 4 * 200000};
            (void)nanosleep(&pause, NULL);
        }
        kvk_session_end(house.cache, restore.session_id);
        cr_assert_eq(pthread_join(thread, NULL), 0);
        caught += restore.status != KVK_OK;
        cr_expect_eq(house_bound(&house, KVK_TIER_DEVICE), 0);
    }
    cr_expect_gt(caught, 0, "no restore was under way");
    kvk_cache_maintain(house.cache);
    cr_expect_eq(house.cache->instance_count, 0);
    cr_expect_eq(house_bound(&house, KVK_TIER_HOST), 0);
    house_stop(&house);
}
