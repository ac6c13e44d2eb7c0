/*
 * The remote store in the engine, on a real Redis server: what one node computed another one finds,
 * byte by byte; what is not to be found is not.
 */
#include "tests/engine_remote.h"

Test(engine_remote, what_one_node_computed_another_finds, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
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
    remote_server_need(&server);
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

Test(engine_remote, shards_windows_and_large_blocks, .timeout = 200)
{
    all_shapes(true);
}

Test(engine_remote, authenticated_alone, .timeout = 200)
{
    all_shapes(false);
}

/* Salts and contents part what shares tokens. */
Test(engine_remote, salts_and_contents_part, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    struct kvk_content_span span = {.first = 6, .count = 10, .digest_size = 8, .digest = "image-1"};
    const uint8_t salt[] = "user-1";
    remote_server_need(&server);
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
Test(engine_remote, the_first_gap_ends_the_prefix, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
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
Test(engine_remote, scribbled_values_are_misses, .timeout = 200)
{
    static const struct {
        const char *script;
        enum kvk_remote_operation operation; /* that finds it out */
        enum kvk_remote_result result;
    } scribbles[] = {
        {"redis.call('SET', k, 'hello')", KVK_REMOTE_EXISTS, KVK_REMOTE_NOT_OURS},
        {"redis.call('SETRANGE', k, 300, 'x\\0y\\0z')", KVK_REMOTE_FETCH, KVK_REMOTE_DAMAGED},
        {"redis.call('SETRANGE', k, 20, 'xyz')", KVK_REMOTE_EXISTS, KVK_REMOTE_DAMAGED},
        {"redis.call('SET', k, redis.call('GETRANGE', k, 0, 500))", KVK_REMOTE_FETCH,
         KVK_REMOTE_TRUNCATED},
        {"if n > 1 then redis.call('SET', k, first) else first = redis.call('GET', k) end",
         KVK_REMOTE_EXISTS, KVK_REMOTE_OTHER_KEY},
    };
    struct remote_server server;
    struct stage a;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
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
        cr_assert(scribbles[i].operation != KVK_REMOTE_FETCH ||
                  node_report(&b).stats.fetch_failures > 0);
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
Test(engine_remote, no_false_hit_where_all_names_are_one, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    const struct kvk_test_control control = {.constant_hash = true};
    const struct kvk_geometry geometry = house_geometry();
    remote_server_need(&server);
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

Test(engine_remote, other_tenants_and_other_fleets_never_hit, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    remote_server_need(&server);
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
