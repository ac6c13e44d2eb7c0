/*
 * The remote store in the engine, on a real Redis server: what is sent and fetched and what is not,
 * and stores that are away, still or full.
 */
#include "tests/engine_remote.h"

#include <math.h>

/* ---- Failure ---- */

Test(engine_remote_policy, a_store_that_dies_harms_nobody_and_hits_come_back, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_start(&a, 256);
    node_start(&b, 256);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 40, 1);
    node_await(&b, tokens, TOKENS, 40);

    remote_server_kill(&server);
    uint64_t worst_ns = 0;
    for (uint32_t i = 0; i < 200; i++) { /* everything local goes on, at once */
        uint32_t others[TOKENS];
        ten_blocks(others, 10000 + 100 * (i % 20));
        const struct kvk_prompt prompt = {.tokens = others, .token_count = 40};
        uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
        struct kvk_lookup_reply reply = node_lookup(&b, &prompt);
        uint64_t took_ns = kvk_clock_now(kvk_clock_monotonic()) - begun_ns;
        worst_ns = took_ns > worst_ns ? took_ns : worst_ns;
        cr_assert_eq(reply.cached_tokens, i < 20 ? 0 : 40);
        if (i < 20) {
            stage_cache(&b, others, 40, i);
        }
    }
    cr_assert_lt(worst_ns, 1000 * KVK_NS_PER_MS, "a look-up took %lu us",
                 (unsigned long)(worst_ns / 1000));
    verify_hit(&b, tokens, TOKENS, 40, 1);
    NODE_UNTIL(&a, report.health.state == KVK_REMOTE_AWAY);
    ten_blocks(tokens, 777);
    stage_cache(&a, tokens, 40, 9); /* waits in the queue */
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    struct kvk_lookup_reply reply = node_settle(&b, &prompt);
    cr_assert_eq(reply.cached_tokens, 0);
    cr_assert_eq(reply.remote.state, KVK_REMOTE_USE_FAILED);
    cr_assert_gt(node_report(&b).stats.asks_failed, 0);

    remote_server_run(&server);
    NODE_UNTIL(&a, report.stats.sent_blocks >= 20);
    node_await(&b, tokens, TOKENS, 40);
    verify_hit(&b, tokens, TOKENS, 40, 9);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* Connected, and it says nothing: as good as dead, for everybody but who waits for it. */
Test(engine_remote_policy, a_store_that_stands_still, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    a.house.config.remote.node_timeout_ms = b.house.config.remote.node_timeout_ms = 300;
    a.house.config.remote.ask_ms = b.house.config.remote.ask_ms = 1000;
    node_start(&a, 256);
    node_start(&b, 256);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 40, 1);
    cr_assert_eq(kill(server.pid, SIGSTOP), 0);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 0);
    stage_cache(&b, tokens, 20, 1);
    verify_hit(&b, tokens, 40, 20, 1);
    cr_assert_eq(kill(server.pid, SIGCONT), 0);
    node_await(&b, tokens, 40, 40);
    verify_hit(&b, tokens, TOKENS, 40, 1);
    cr_assert_eq(kill(server.pid, SIGSTOP), 0);
    stage_stop(&a); /* nor does ending wait for it long */
    stage_stop(&b);
    cr_assert_eq(kill(server.pid, SIGCONT), 0);
    remote_server_stop(&server);
}

Test(engine_remote_policy, a_full_store, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    char answer[256];
    remote_server_need(&server);
    node_init(&a, &server);
    node_start(&a, 256);
    remote_ask(&server, answer, "config set maxmemory 1");
    ten_blocks(tokens, 1);
    stage_cache(&a, tokens, 40, 1);
    NODE_UNTIL(&a, report.stats.send_failures > 0);
    cr_assert_gt(node_report(&a).health.counters.blocks[KVK_REMOTE_STORE][KVK_REMOTE_FULL], 0);
    cr_assert_eq(remote_values(&server), 0);
    verify_hit(&a, tokens, TOKENS, 40, 1);
    stage_stop(&a);
    remote_server_stop(&server);
}

/* ---- Policy ---- */

Test(engine_remote_policy, a_tenant_s_budget, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    a.house.config.remote.tenant_bytes = 4 * (1024 + 48) + 100; /* four blocks with witnesses */
    node_start(&a, 64);
    ten_blocks(tokens, 1);
    stage_cache(&a, tokens, 40, 1);
    NODE_UNTIL(&a, report.stats.over_budget_blocks > 0 && report.send_waiting == 0);
    NODE_UNTIL(&a, report.stats.sent_blocks == 4);
    cr_assert_eq(node_report(&a).stats.sent_bytes, UINT64_C(4) * (1024 + 48));
    cr_assert_eq(remote_values(&server), 4);
    stage_stop(&a);
    remote_server_stop(&server);
}

Test(engine_remote_policy, values_have_their_time, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    a.house.config.remote.ttl_ms = 700;
    node_start(&a, 64);
    node_start(&b, 64);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 40, 1);
    house_sleep_ms(1000);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    cr_assert_eq(node_settle(&b, &prompt).remote.state, KVK_REMOTE_USE_ABSENT);
    /* Used again where it is, it is sent again. */
    for (int i = 0; i < 4; i++) {
        verify_hit(&a, tokens, TOKENS, 40, 1);
    }
    NODE_UNTIL(&a, report.stats.sent_blocks >= 20);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* Sent when it is used for the so-manieth time. */
Test(engine_remote_policy, uses_are_counted, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    a.house.config.remote.admit_uses = 3;
    node_start(&a, 64);
    ten_blocks(tokens, 1);
    stage_cache(&a, tokens, 40, 1);
    verify_hit(&a, tokens, TOKENS, 40, 1);
    house_sleep_ms(300);
    cr_assert_eq(node_report(&a).stats.offered_blocks, 0);
    verify_hit(&a, tokens, 21, 20, 1); /* the first half */
    NODE_UNTIL(&a, report.stats.sent_blocks == 5);
    stage_stop(&a);
    remote_server_stop(&server);
}

/* A space whose tokens cost `flops` on a machine that does 1e9 a second. */
static void costly_space(struct stage *node, double flops)
{
    struct kvk_space_request request = {
        .block_tokens = 4, .group_count = 1, .flops_per_token = flops, .flops_per_second = 1e9};
    struct kvk_space_reply reply;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view("costly");
    request.groups[0] = node->geometry;
    STAGE_OK(node, kvk_space_open(node->house.cache, &node->house.caller, &request, &reply,
                                  &node->house.error));
    node->space = reply.space_id;
    node_ready(node);
}

/* A space of one identity, which is cheap to compute on one machine and dear on the other. */
Test(engine_remote_policy, quicker_computed_than_fetched, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    struct stage c;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_init(&c, &server);
    node_start(&a, 64);
    node_start(&b, 64);
    node_start(&c, 64);
    costly_space(&a, 1e9);
    costly_space(&b, 2.5);
    costly_space(&c, 1e9);
    ten_blocks(tokens, 1);
    stage_cache(&a, tokens, 40, 1);
    NODE_UNTIL(&a, report.stats.sent_blocks == 10);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    struct kvk_lookup_reply reply = node_settle(&b, &prompt);
    cr_assert_eq(reply.remote.state, KVK_REMOTE_USE_LEFT);
    cr_assert_eq(reply.cached_tokens, 0);
    cr_assert_eq(reply.remote.tokens, 40);
    cr_assert_geq(reply.remote.fetch_ns, reply.remote.recompute_ns);
    struct kvk_remote_report told = node_report(&b);
    cr_assert_eq(told.stats.recomputes, 1);
    cr_assert_eq(told.stats.fetched_blocks, 0);
    node_await(&c, tokens, TOKENS, 40);
    /* Nor is sent what is quicker computed. */
    ten_blocks(tokens, 3000);
    stage_cache(&b, tokens, 40, 1);
    NODE_UNTIL(&b, report.stats.unworthy_blocks == 10);
    cr_assert_eq(node_report(&b).stats.sent_blocks, 0);
    stage_stop(&a);
    stage_stop(&b);
    stage_stop(&c);
    remote_server_stop(&server);
}

/* Memory for four blocks, and ten of them in the store; and then all of it held. */
Test(engine_remote_policy, no_room, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    uint32_t others[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_start(&a, 64);
    node_start(&b, 4);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 40, 1);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 16);
    cr_assert_gt(node_report(&b).stats.fetch_unroomed, 0);
    verify_hit(&b, tokens, 16, 16, 1);
    stage_check(&b);

    ten_blocks(others, 3000);
    uint64_t id = stage_open(&b, others, 16).sequence_id; /* the tier is full of it */
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 0);
    stage_close(&b, id);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* More prompts than may wait: look-ups go on, and it is counted. */
Test(engine_remote_policy, queues_are_bounded, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    a.house.config.remote.ask_queue = 2;
    a.house.config.remote.send_queue = 3;
    node_start(&a, 256);
    bool busy = false;
    for (uint32_t i = 0; i < 100; i++) {
        ten_blocks(tokens, 1000 * i);
        const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
        busy = node_lookup(&a, &prompt).remote.state == KVK_REMOTE_USE_BUSY || busy;
    }
    cr_assert(busy);
    cr_assert_gt(node_report(&a).stats.asks_dropped, 0);
    ten_blocks(tokens, 1);
    stage_cache(&a, tokens, 40, 1);
    cr_assert_gt(node_report(&a).stats.offers_dropped, 0);
    stage_stop(&a);
    remote_server_stop(&server);
}

/* What leaves memory before its turn is not sent. */
Test(engine_remote_policy, who_comes_too_late, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
    node_init(&a, &server);
    a.house.config.remote.ask_ms = 500;
    node_start(&a, 10);
    cr_assert_eq(kill(server.pid, SIGSTOP), 0);
    for (uint32_t i = 0; i < 4; i++) {
        ten_blocks(tokens, 1000 * i);
        stage_cache(&a, tokens, 40, i);
    }
    cr_assert_eq(kill(server.pid, SIGCONT), 0);
    NODE_UNTIL(&a, report.stats.late_blocks > 0 && report.stats.sent_blocks >= 10);
    verify_hit(&a, tokens, 40, 40, 3);
    stage_stop(&a);
    remote_server_stop(&server);
}

/* ---- Compact forms ---- */

#define FORM_BLOCKS 4U

/* A node whose space may have its blocks compact below: in the host tier, or on disk alone. */
static void form_start(struct stage *node, const struct remote_server *server, bool host,
                       struct kvk_tier_form *form)
{
    struct kvk_geometry geometry = house_geometry();
    struct kvk_space_request request = {.block_tokens = 4, .group_count = 1};
    struct kvk_space_reply reply;
    geometry.head_size_k = geometry.head_size_v = 64;
    node_init(node, server);
    node->geometry = geometry;
    node->block_bytes = kvk_geometry_block_bytes(&geometry);
    const struct house_options options = {.device_bytes = host ? 32 * node->block_bytes : 0,
                                          .host_bytes = 32 * node->block_bytes,
                                          .threads = true};
    house_start(&node->house, &options);
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view("compact");
    request.groups[0] = geometry;
    request.host_formats[0] = host ? KVK_FORMAT_INT8_32 : KVK_FORMAT_NONE;
    request.disk_formats[0] = KVK_FORMAT_INT8_32;
    STAGE_OK(node, kvk_space_open(node->house.cache, &node->house.caller, &request, &reply,
                                  &node->house.error));
    node->space = reply.space_id;
    node->session = house_session(&node->house);
    kvk_tier_form_init(form, &geometry, KVK_FORMAT_INT8_32);
    node_ready(node);
}

/* The values of a block; what is not finite has no compact form. */
static void form_values(float *values, uint64_t count, uint64_t block, bool finite)
{
    struct kvk_random random;
    kvk_random_init(&random, block + 1);
    for (uint64_t i = 0; i < count; i++) {
        values[i] = (float)(kvk_random_unit(&random) * 4 - 2);
    }
    values[count / 2] = finite ? values[count / 2] : NAN;
}

static void form_cache(struct stage *node, const uint32_t *tokens, bool finite)
{
    struct kvk_sequence_reply reply = stage_open(node, tokens, FORM_BLOCKS * 4);
    float *values = malloc(node->block_bytes);
    cr_assert_not_null(values);
    for (uint64_t block = 0; block < FORM_BLOCKS; block++) {
        form_values(values, node->block_bytes / sizeof(*values), tokens[0] + block,
                    finite || block != 2);
        const struct kvk_write_piece piece = {.block = block,
                                              .data = (const uint8_t *)values,
                                              .size_bytes = node->block_bytes,
                                              .checksum = kvk_checksum(values, node->block_bytes)};
        STAGE_OK(node, kvk_sequence_write(node->house.cache, &node->house.caller, node->session,
                                          reply.sequence_id, &piece, &node->house.error));
    }
    house_seal(&node->house, node->session, reply.sequence_id, FORM_BLOCKS * 4);
    stage_close(node, reply.sequence_id);
    free(values);
}

/* What comes is what the conversions make of what was sealed, no more and no less. */
static void form_verify(struct stage *node, const struct kvk_tier_form *form,
                        const uint32_t *tokens)
{
    struct kvk_sequence_reply reply = stage_open(node, tokens, FORM_BLOCKS * 4);
    float *values = malloc(node->block_bytes);
    uint8_t *wide = malloc(node->block_bytes);
    uint8_t *narrow = malloc(node->block_bytes);
    cr_assert(values != NULL && wide != NULL && narrow != NULL);
    cr_assert_eq(reply.cached_tokens, FORM_BLOCKS * 4);
    for (uint64_t block = 0; block < FORM_BLOCKS; block++) {
        const struct kvk_read_request request = {
            .session_id = node->session, .sequence_id = reply.sequence_id, .block = block};
        const uint8_t *data;
        uint64_t size;
        uint64_t sum;
        struct kvk_read_handle handle;
        form_values(values, node->block_bytes / sizeof(*values), tokens[0] + block, true);
        STAGE_OK(node, kvk_tier_form_narrow(&node->geometry, form, 0, values, narrow, &sum,
                                            &node->house.error));
        kvk_tier_form_widen(form, &node->geometry, 0, narrow, wide, &sum);
        STAGE_OK(node, kvk_read_begin(node->house.cache, &node->house.caller, &request, &data,
                                      &size, &handle, &node->house.error));
        cr_assert_eq(size, node->block_bytes);
        cr_assert(memcmp(data, wide, size) == 0, "block %lu", (unsigned long)block);
        kvk_read_end(node->house.cache, &handle);
    }
    stage_close(node, reply.sequence_id);
    free(values);
    free(wide);
    free(narrow);
}

static void compact(bool host)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    struct kvk_tier_form form;
    uint32_t tokens[FORM_BLOCKS * 4];
    char answer[256];
    remote_server_need(&server);
    form_start(&a, &server, host, &form);
    form_start(&b, &server, host, &form);
    cr_assert_lt(form.block_bytes, a.block_bytes / 2);
    house_tokens(tokens, FORM_BLOCKS * 4, 100);
    form_cache(&a, tokens, true);
    NODE_UNTIL(&a, report.stats.sent_blocks == FORM_BLOCKS);
    cr_assert_eq(node_report(&a).stats.sent_bytes, FORM_BLOCKS * (form.block_bytes + 48));
    remote_ask(&server, answer,
               "eval \"local n = 0 for _, k in ipairs(redis.call('KEYS', '*')) do "
               "if redis.call('TYPE', k).ok == 'string' and redis.call('STRLEN', k) == %lu then "
               "n = n + 1 end end return n\" 0",
               (unsigned long)(144 + 48 + form.block_bytes));
    cr_assert_str_eq(answer, "4");
    node_await(&b, tokens, FORM_BLOCKS * 4, FORM_BLOCKS * 4);
    form_verify(&b, &form, tokens);
    /* A block without such a form is not sent, nor what follows on it of any use. */
    house_tokens(tokens, FORM_BLOCKS * 4, 900);
    form_cache(&a, tokens, false);
    NODE_UNTIL(&a, report.stats.unfit_blocks > 0 && report.stats.sent_blocks >= FORM_BLOCKS + 2);
    node_await(&b, tokens, FORM_BLOCKS * 4, 8);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

Test(engine_remote_policy, compact_on_the_wire, .timeout = 200)
{
    compact(false);
}

Test(engine_remote_policy, compact_in_the_host_tier, .timeout = 200)
{
    compact(true);
}
