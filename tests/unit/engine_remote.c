/*
 * The remote store in the engine, on a real Redis server: what one node computed another one finds,
 * byte by byte; what is not to be found is not.
 */
#include "tests/engine_remote.h"

#include <math.h>

#define TOKENS 41U /* ten blocks, and one token to compute */

static void ten_blocks(uint32_t tokens[TOKENS], uint32_t first)
{
    house_tokens(tokens, TOKENS, first);
}

static void verify_hit(struct stage *node, const uint32_t *tokens, uint64_t count, uint64_t cached,
                       uint32_t tag)
{
    struct kvk_sequence_reply reply = stage_open(node, tokens, count);
    cr_assert_eq(reply.cached_tokens, cached);
    stage_verify(node, reply.sequence_id, 0, cached, tag);
    stage_close(node, reply.sequence_id);
}

Test(engine_remote, what_one_node_computed_another_finds, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_start(&a, 64);
    node_start(&b, 64);
    ten_blocks(tokens, 100);
    node_share(&a, tokens, TOKENS, 7);
    cr_assert_eq(remote_values(&server), 10);

    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = TOKENS};
    struct kvk_lookup_reply reply = node_lookup(&b, &prompt);
    cr_assert_eq(reply.cached_tokens, 0);
    cr_assert_eq(reply.remote.state, KVK_REMOTE_USE_ASKED);
    reply = node_settle(&b, &prompt);
    cr_assert_eq(reply.cached_tokens, 40);
    verify_hit(&b, tokens, TOKENS, 40, 7);

    struct kvk_remote_report report = node_report(&b);
    cr_assert_eq(report.stats.fetched_blocks, 10);
    cr_assert_eq(report.stats.fetched_tokens, 40);
    cr_assert_eq(report.stats.ask_hits, 1);
    cr_assert_eq(report.stats.fetches, 1);
    cr_assert_eq(report.stats.fetch_failures + report.stats.witness_failures, 0);
    /* It need not be sent from here: it is known to be there. */
    cr_assert_eq(report.stats.sent_blocks, 0);

    /* All of it is here now: nothing is asked for. */
    cr_assert_eq(node_lookup(&b, &prompt).remote.state, KVK_REMOTE_USE_NONE);
    /* What nobody has is absent, and so is what follows on it. */
    ten_blocks(tokens, 5000);
    reply = node_settle(&b, &prompt);
    cr_assert_eq(reply.remote.state, KVK_REMOTE_USE_ABSENT);
    cr_assert_eq(reply.cached_tokens, 0);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* Shards, a window beside full attention, blocks of several values, encrypted and not. */
static void all_shapes(bool encrypt)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    static uint32_t tokens[TOKENS];
    struct kvk_geometry groups[2] = {house_geometry(), house_geometry()};
    groups[0].tensor_shards = 2;
    groups[0].head_size_k = groups[0].head_size_v = 512;
    groups[0].layers = 128; /* 4 MiB: three values */
    groups[1].tensor_shards = 2;
    groups[1].window = 10;
    remote_server_start(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    a.house.config.remote.encrypt = b.house.config.remote.encrypt = encrypt;
    node_start_with(&a, groups, 2, UINT64_C(192) << 20);
    node_start_with(&b, groups, 2, UINT64_C(192) << 20);
    ten_blocks(tokens, 1);

    struct kvk_sequence_reply opened = stage_open(&a, tokens, 40);
    uint64_t block_bytes[2][KVK_SHARD_COUNT_MAX];
    for (uint32_t g = 0; g < 2; g++) {
        for (uint32_t rank = 0; rank < 2; rank++) {
            uint64_t size = kvk_geometry_shard_bytes(&groups[g], rank);
            uint8_t *data = malloc(size);
            cr_assert_not_null(data);
            block_bytes[g][rank] = size;
            for (uint64_t block = 0; block < 10; block++) {
                struct kvk_random random;
                kvk_random_init(&random, g * 1000 + rank * 100 + block);
                kvk_random_fill(&random, data, size);
                const struct kvk_write_piece piece = {
                    .group = g,
                    .rank = rank,
                    .block = block,
                    .data = data,
                    .size_bytes = size,
                    .checksum = kvk_checksum(data, size),
                };
                STAGE_OK(&a, kvk_sequence_write(a.house.cache, &a.house.caller, a.session,
                                                opened.sequence_id, &piece, &a.house.error));
            }
            free(data);
        }
    }
    house_seal(&a.house, a.session, opened.sequence_id, 40);
    stage_close(&a, opened.sequence_id);
    NODE_UNTIL(&a, report.stats.sent_blocks == 20);

    node_await(&b, tokens, 41, 40);
    struct kvk_sequence_reply found = stage_open(&b, tokens, 41);
    cr_assert_eq(found.cached_tokens, 40);
    for (uint32_t g = 0; g < 2; g++) {
        for (uint32_t rank = 0; rank < 2; rank++) {
            uint8_t *data = malloc(block_bytes[g][rank]);
            cr_assert_not_null(data);
            for (uint64_t block = g == 0 ? 0 : 8; block < 10; block++) {
                struct kvk_random random;
                const struct kvk_read_request request = {.session_id = b.session,
                                                         .sequence_id = found.sequence_id,
                                                         .group = g,
                                                         .rank = rank,
                                                         .block = block};
                const uint8_t *read;
                uint64_t size;
                struct kvk_read_handle handle;
                STAGE_OK(&b, kvk_read_begin(b.house.cache, &b.house.caller, &request, &read, &size,
                                            &handle, &b.house.error));
                cr_assert_eq(size, block_bytes[g][rank]);
                kvk_random_init(&random, g * 1000 + rank * 100 + block);
                kvk_random_fill(&random, data, size);
                cr_assert(memcmp(read, data, size) == 0);
                kvk_read_end(b.house.cache, &handle);
            }
            free(data);
        }
    }
    stage_close(&b, found.sequence_id);
    /* Of the window only what is seen came. */
    cr_assert_lt(node_report(&b).stats.fetched_blocks, 20);
    cr_assert_geq(node_report(&b).stats.fetched_blocks, 12);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

Test(engine_remote, shards_windows_and_large_blocks, .timeout = 60)
{
    all_shapes(true);
}

Test(engine_remote, authenticated_alone, .timeout = 60)
{
    all_shapes(false);
}

/* Salts and contents part what shares tokens. */
Test(engine_remote, salts_and_contents_part, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    struct kvk_content_span span = {.first = 6, .count = 10, .digest_size = 8, .digest = "image-1"};
    const uint8_t salt[] = "user-1";
    remote_server_start(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_start(&a, 64);
    node_start(&b, 64);
    ten_blocks(tokens, 9);
    const struct kvk_open_request request = {.prompt = {.tokens = tokens,
                                                        .token_count = 40,
                                                        .salt = salt,
                                                        .salt_size = 6,
                                                        .spans = &span,
                                                        .span_count = 1},
                                             .tier = -1};
    struct kvk_sequence_reply reply;
    STAGE_OK(&a, stage_try_open(&a, &request, &reply));
    stage_fill(&a, reply.sequence_id, 3);
    stage_close(&a, reply.sequence_id);
    NODE_UNTIL(&a, report.stats.sent_blocks == 10);

    struct kvk_prompt prompt = request.prompt;
    prompt.salt_size = 5;
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 0);
    prompt.salt_size = 6;
    struct kvk_content_span other = span;
    other.digest[6] = '2';
    prompt.spans = &other;
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 4); /* before the image */
    prompt.spans = &span;
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 40);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* A deleted value in the middle of a chain ends the prefix there. */
Test(engine_remote, the_first_gap_ends_the_prefix, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_start(&a, 64);
    node_start(&b, 64);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 24, 5);
    cr_assert_eq(remote_each(&server, "redis.call('SADD', 'old', k)"), 6);
    node_share(&a, tokens, 28, 5);
    cr_assert_eq(remote_each(&server, "if redis.call('SISMEMBER', 'old', k) == 0 then "
                                      "redis.call('SET', 'seventh', k) end"),
                 7);
    node_share(&a, tokens, 40, 5);
    cr_assert_eq(remote_values(&server), 10);
    char answer[256];
    remote_ask(&server, answer, "--raw get seventh | xargs redis-cli -p %u del", server.port);
    cr_assert_eq(remote_values(&server), 9);

    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 24);
    verify_hit(&b, tokens, 40, 24, 5);
    cr_assert_eq(node_report(&b).stats.fetched_blocks, 6);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* What strangers make of values is a miss, counted, and never bytes. */
Test(engine_remote, scribbled_values_are_misses, .timeout = 60)
{
    static const struct {
        const char *script;
        enum kvk_remote_operation operation; /* that finds it out */
        enum kvk_remote_result result;
    } scribbles[] = {
        {"redis.call('SET', k, 'hello')", KVK_REMOTE_EXISTS, KVK_REMOTE_NOT_OURS},
        {"redis.call('SETRANGE', k, 300, 'x\\0y\\0z')", KVK_REMOTE_FETCH, KVK_REMOTE_DAMAGED},
        {"redis.call('SETRANGE', k, 20, 'xyz')", KVK_REMOTE_EXISTS, KVK_REMOTE_GENERATION},
        {"redis.call('SET', k, redis.call('GETRANGE', k, 0, 500))", KVK_REMOTE_FETCH,
         KVK_REMOTE_TRUNCATED},
        {"if n > 1 then redis.call('SET', k, first) else first = redis.call('GET', k) end",
         KVK_REMOTE_EXISTS, KVK_REMOTE_OTHER_KEY},
    };
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
    node_init(&a, &server);
    node_start(&a, 256);
    for (uint32_t i = 0; i < sizeof(scribbles) / sizeof(scribbles[0]); i++) {
        struct stage b;
        char script[256];
        ten_blocks(tokens, 1000 * (i + 1));
        node_share(&a, tokens, 40, i);
        (void)snprintf(script, sizeof(script), "%s", scribbles[i].script);
        if (strstr(script, "first") != NULL) { /* a name for the script's whole run */
            (void)snprintf(script, sizeof(script),
                           "if n == 1 then redis.call('SET', 'first', redis.call('GET', k)) else "
                           "redis.call('SET', k, redis.call('GET', 'first')) end");
        }
        cr_assert_eq(remote_each(&server, script), 10);
        node_init(&b, &server);
        node_start(&b, 64);
        const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
        struct kvk_lookup_reply reply = node_settle(&b, &prompt);
        cr_assert_leq(reply.cached_tokens, 4); /* one value may have been left where it belongs */
        const struct kvk_remote_counters counters = node_report(&b).health.counters;
        cr_assert_gt(counters.blocks[scribbles[i].operation][scribbles[i].result], 0, "%u", i);
        verify_hit(&b, tokens, 40, reply.cached_tokens, i);
        /* Here it is computed again, and takes the place of what they made of it. */
        stage_cache(&b, tokens, 40, i);
        NODE_UNTIL(&b, report.stats.sent_blocks + report.stats.present_blocks >= 10);
        struct stage c;
        node_init(&c, &server);
        node_start(&c, 64);
        node_await(&c, tokens, TOKENS, 40);
        verify_hit(&c, tokens, TOKENS, 40, i);
        stage_stop(&c);
        stage_stop(&b);
        (void)remote_each(&server, "redis.call('DEL', k)");
    }
    stage_stop(&a);
    remote_server_stop(&server);
}

/* Right values under one name: only their witnesses tell blocks apart. */
Test(engine_remote, no_false_hit_where_all_names_are_one, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    const struct kvk_test_control control = {.constant_hash = true};
    const struct kvk_geometry geometry = house_geometry();
    remote_server_start(&server);
    struct stage *nodes[] = {&a, &b};
    for (int i = 0; i < 2; i++) {
        node_init(nodes[i], &server);
        node_start(nodes[i], 64);
        STAGE_OK(nodes[i],
                 kvk_cache_test_control(nodes[i]->house.cache, &control, &nodes[i]->house.error));
        nodes[i]->space =
            house_space_of(&nodes[i]->house, &nodes[i]->house.caller, "constant", &geometry, 1);
        node_ready(nodes[i]);
    }
    ten_blocks(tokens, 1);
    stage_cache(&a, tokens, 40, 1);
    NODE_UNTIL(&a, report.stats.sent_blocks > 0);
    cr_assert_eq(remote_values(&server), 1);
    ten_blocks(tokens, 2000);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 0);
    cr_assert_gt(node_report(&b).stats.witness_failures, 0);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

Test(engine_remote, other_tenants_and_other_fleets_never_hit, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
    node_init(&a, &server);
    node_start(&a, 64);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 40, 1);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};

    for (int i = 0; i < 2; i++) {
        node_init(&b, &server);
        struct kvk_config *config = &b.house.config;
        if (i == 0) { /* the same uid, but another tenant than "default" */
            config->tenants = calloc(1, sizeof(*config->tenants));
            config->credentials = calloc(1, sizeof(*config->credentials));
            config->tenant_count = config->credential_count = 1;
            (void)snprintf(config->tenants[0].name, KVK_NAME_SIZE, "other");
            (void)snprintf(config->credentials[0].name, KVK_NAME_SIZE, "other");
            (void)snprintf(config->credentials[0].token, KVK_NAME_SIZE, "the-others-token");
            config->credentials[0].tenant_count = 1;
        } else {
            (void)snprintf(config->remote.key_file, sizeof(config->remote.key_file), "%s/key2",
                           server.folder);
            cr_assert_eq(remote_command("umask 077; tr 0123 4567 <%s/key >%s/key2", server.folder,
                                        server.folder),
                         0);
        }
        const struct kvk_geometry geometry = house_geometry();
        const struct house_options options = {.host_bytes = 64 * 1024, .threads = true};
        b.geometry = geometry;
        b.block_bytes = 1024;
        house_start(&b.house, &options);
        if (i == 0) {
            b.house.caller = house_caller_of(&b.house, "the-others-token");
        }
        b.space = house_space_of(&b.house, &b.house.caller, "m", &geometry, 1);
        b.session = house_session(&b.house);
        node_ready(&b);
        struct kvk_lookup_reply reply = node_settle(&b, &prompt);
        cr_assert_eq(reply.cached_tokens, 0);
        cr_assert_eq(reply.remote.state, KVK_REMOTE_USE_ABSENT);
        /* The same tokens of its own: beside the others', which stay. */
        node_share(&b, tokens, 40, 2);
        cr_assert_eq(remote_values(&server), 20 + 10UL * (unsigned long)i);
        verify_hit(&a, tokens, 40, 40, 1);
        stage_stop(&b);
    }
    stage_stop(&a);
    remote_server_stop(&server);
}

/* ---- Failure ---- */

Test(engine_remote, a_store_that_dies_harms_nobody_and_hits_come_back, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
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
    cr_assert_lt(worst_ns, 100 * KVK_NS_PER_MS, "a look-up took %lu us",
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
Test(engine_remote, a_store_that_stands_still, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
    node_init(&a, &server);
    node_init(&b, &server);
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

Test(engine_remote, a_full_store, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    char answer[256];
    remote_server_start(&server);
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

Test(engine_remote, a_tenant_s_budget, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
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

Test(engine_remote, values_have_their_time, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
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
Test(engine_remote, uses_are_counted, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
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
Test(engine_remote, quicker_computed_than_fetched, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    struct stage c;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
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
Test(engine_remote, no_room, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    uint32_t others[TOKENS];
    remote_server_start(&server);
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
Test(engine_remote, queues_are_bounded, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
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
    remote_server_start(&server);
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

Test(engine_remote, compact_on_the_wire, .timeout = 60)
{
    compact(false);
}

Test(engine_remote, compact_in_the_host_tier, .timeout = 60)
{
    compact(true);
}

/* ---- Invalidation ---- */

static void invalidate(struct stage *node, uint64_t pending)
{
    struct kvk_invalidate_reply reply;
    const struct kvk_invalidate_request request = {.space_id = node->space};
    STAGE_OK(node, kvk_invalidate(node->house.cache, &node->house.caller, &request, &reply,
                                  &node->house.error));
    cr_assert_eq(reply.spaces, 1);
    cr_assert_eq(reply.store_pending, pending);
}

Test(engine_remote, an_invalidation_reaches_all, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    struct stage c;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_init(&c, &server);
    node_start(&a, 64);
    node_start(&b, 64);
    node_start(&c, 64);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 40, 1);
    node_await(&b, tokens, TOKENS, 40);
    uint64_t learned = node_report(&b).fleet.learned;
    invalidate(&a, 0);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    for (int i = 0; i < 100; i++) { /* neither here nor from the store, from now on */
        cr_assert_eq(node_lookup(&a, &prompt).cached_tokens, 0);
        cr_assert_eq(node_lookup(&c, &prompt).cached_tokens, 0);
        house_sleep_ms(5);
    }
    cr_assert_eq(node_report(&c).stats.fetched_blocks, 0);
    cr_assert_eq(node_lookup(&b, &prompt).cached_tokens, 0); /* which had it in memory */
    cr_assert_eq(node_report(&b).fleet.learned, learned + 1);
    /* Computed anew it is shared again, and the old ones' places are taken. */
    node_ready(&a);
    node_share(&a, tokens, 40, 2);
    node_await(&b, tokens, TOKENS, 40);
    verify_hit(&b, tokens, TOKENS, 40, 2);
    node_await(&c, tokens, TOKENS, 40);
    verify_hit(&c, tokens, TOKENS, 40, 2);
    cr_assert_eq(remote_values(&server), 10);
    stage_stop(&a);
    stage_stop(&b);
    stage_stop(&c);
    remote_server_stop(&server);
}

/* A node that was away has its blocks on its own disk, and does not serve them. */
static void away_start(struct stage *b, const struct remote_server *server, const char *folder)
{
    const struct kvk_geometry geometry = house_geometry();
    node_init(b, server);
    (void)snprintf(b->house.config.durable_folder, sizeof(b->house.config.durable_folder), "%s",
                   folder);
    b->house.config.disk_bytes = 1 << 20;
    b->house.config.disk_admit_uses = 1;
    b->house.config.disk_direct = false;
    node_start_with(b, &geometry, 1, UINT64_C(64) * 1024);
}

Test(engine_remote, an_invalidation_reaches_who_was_away, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    char folder[96];
    remote_server_start(&server);
    (void)snprintf(folder, sizeof(folder), "%s/data", server.folder);
    node_init(&a, &server);
    node_start(&a, 64);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 40, 1);
    away_start(&b, &server, folder);
    node_ready(&b);
    node_await(&b, tokens, TOKENS, 40);
    for (int i = 0; i < 1000; i++) {
        kvk_lock(&b.house.cache->lock);
        uint64_t written = b.house.cache->stats.disk_written_blocks;
        kvk_unlock(&b.house.cache->lock);
        if (written == 10) {
            break;
        }
        house_sleep_ms(5);
    }
    stage_stop(&b);
    /* Away and back: it is there again. */
    away_start(&b, &server, folder);
    cr_assert_eq(house_cached(&b.house, b.space, tokens, 40), 40);
    node_ready(&b);
    stage_stop(&b);
    /* Away, and meanwhile it was invalidated. */
    invalidate(&a, 0);
    away_start(&b, &server, folder);
    node_ready(&b); /* it uses the store only once it knows */
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 0);
    cr_assert_eq(node_report(&b).stats.fetched_blocks, 0);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* Invalidated while the store was away: it gets to know when it is back. */
Test(engine_remote, an_invalidation_that_has_to_wait, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_start(&a, 64);
    node_start(&b, 64);
    ten_blocks(tokens, 1);
    node_share(&a, tokens, 40, 1);
    cr_assert_eq(kill(server.pid, SIGSTOP), 0);
    NODE_UNTIL(&a, report.spaces_out == 1);
    invalidate(&a, 1);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    cr_assert_eq(node_lookup(&a, &prompt).cached_tokens, 0);
    cr_assert_eq(kill(server.pid, SIGCONT), 0);
    node_ready(&a); /* its number is in the store now */
    cr_assert_eq(node_settle(&a, &prompt).cached_tokens, 0);
    house_sleep_ms(400); /* generation_ms, twice */
    cr_assert_eq(node_settle(&b, &prompt).cached_tokens, 0);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* A salt's invalidation ends what the store has of the space, and what others have. */
Test(engine_remote, a_salt_s_invalidation, .timeout = 60)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_start(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    node_start(&a, 64);
    node_start(&b, 64);
    ten_blocks(tokens, 1);
    const struct kvk_prompt salted = {
        .tokens = tokens, .token_count = 40, .salt = (const uint8_t *)"user-1", .salt_size = 6};
    const struct kvk_prompt plain = {.tokens = tokens, .token_count = 40};
    const struct kvk_open_request request = {.prompt = salted, .tier = -1};
    struct kvk_sequence_reply reply;
    STAGE_OK(&a, stage_try_open(&a, &request, &reply));
    stage_fill(&a, reply.sequence_id, 3);
    stage_close(&a, reply.sequence_id);
    stage_cache(&a, tokens, 40, 1);
    NODE_UNTIL(&a, report.stats.sent_blocks == 20);
    cr_assert_eq(node_settle(&b, &salted).cached_tokens, 40);

    struct kvk_invalidate_reply answer;
    const struct kvk_invalidate_request invalidation = {
        .space_id = a.space, .by_salt = true, .salt = house_view("user-1")};
    STAGE_OK(
        &a, kvk_invalidate(a.house.cache, &a.house.caller, &invalidation, &answer, &a.house.error));
    cr_assert_eq(node_lookup(&a, &salted).cached_tokens, 0);
    cr_assert_eq(node_lookup(&a, &plain).cached_tokens, 40); /* the others' stay here */
    house_sleep_ms(500);
    cr_assert_eq(node_settle(&b, &salted).cached_tokens, 0);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}
