/*
 * The remote store in the engine, on a real Redis server: an invalidation on one node reaches all,
 * and what the store has of before.
 */
#include "tests/engine_remote.h"

/* Until the node has heard of it. */
static void node_forgets(struct stage *node, const struct kvk_prompt *prompt)
{
    for (int i = 0; i < REMOTE_WAIT_MS / 5 && node_lookup(node, prompt).cached_tokens > 0; i++) {
        house_sleep_ms(5);
    }
    cr_assert_eq(node_settle(node, prompt).cached_tokens, 0);
}

static void invalidate(struct stage *node, uint64_t pending)
{
    struct kvk_invalidate_reply reply;
    const struct kvk_invalidate_request request = {.space_id = node->space};
    STAGE_OK(node, kvk_invalidate(node->house.cache, &node->house.caller, &request, &reply,
                                  &node->house.error));
    cr_assert_eq(reply.spaces, 1);
    cr_assert_eq(reply.store_pending, pending);
}

Test(engine_remote_generation, an_invalidation_reaches_all, .timeout = 200)
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
    node_forgets(&b, &prompt); /* which had it in memory */
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

Test(engine_remote_generation, an_invalidation_reaches_who_was_away, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    char folder[96];
    remote_server_need(&server);
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
Test(engine_remote_generation, an_invalidation_that_has_to_wait, .timeout = 200)
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
    node_share(&a, tokens, 40, 1);
    cr_assert_eq(kill(server.pid, SIGSTOP), 0);
    NODE_UNTIL(&a, report.spaces_out == 1);
    uint64_t learned = node_report(&b).fleet.learned;
    invalidate(&a, 1);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    cr_assert_eq(node_lookup(&a, &prompt).cached_tokens, 0);
    cr_assert_eq(kill(server.pid, SIGCONT), 0);
    node_ready(&a); /* its number is in the store now */
    cr_assert_eq(node_settle(&a, &prompt).cached_tokens, 0);
    NODE_UNTIL(&b, report.fleet.learned == learned + 1);
    node_forgets(&b, &prompt);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* Where there is room for one space alone, another one takes the place of what has no blocks. */
static void space_replace(struct stage *node, const char *model)
{
    struct kvk_space_request request = {.block_tokens = node->geometry.block_tokens,
                                        .group_count = 1};
    struct kvk_space_reply reply;
    enum kvk_status status = KVK_EXHAUSTED;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
    request.groups[0] = node->geometry;
    for (int i = 0; i < REMOTE_WAIT_MS / 5 && status == KVK_EXHAUSTED; i++) {
        status = kvk_space_open(node->house.cache, &node->house.caller, &request, &reply,
                                &node->house.error);
        if (status == KVK_EXHAUSTED) { /* they are still on their way out */
            house_sleep_ms(5);
        }
    }
    STAGE_OK(node, status);
    cr_assert(reply.created);
    node->space = reply.space_id;
}

/* Two nodes; what b has from a is invalidated on a, which has room for one space alone, while the
 * store is away. What b had learned before. */
static uint64_t invalidate_away(struct stage *a, struct stage *b, const uint32_t *tokens,
                                struct remote_server *server)
{
    remote_server_need(server);
    node_init(a, server);
    node_init(b, server);
    a->house.config.spaces = 1;
    node_start(a, 64);
    node_start(b, 64);
    node_share(a, tokens, 40, 1);
    node_await(b, tokens, TOKENS, 40);
    uint64_t learned = node_report(b).fleet.learned;
    cr_assert_eq(kill(server->pid, SIGSTOP), 0);
    NODE_UNTIL(a, report.spaces_out == 1);
    invalidate(a, 1);
    return learned;
}

/* Neither here nor in the store. */
static void verify_gone(struct stage *node, const struct kvk_prompt *prompt)
{
    node_ready(node);
    cr_assert_eq(node_settle(node, prompt).cached_tokens, 0);
    cr_assert_eq(node_report(node).stats.fetched_blocks, 0);
}

/* And the space is given up before the store is back: it gets to know all the same, and so does
 * whoever opens the space again in between. */
static void an_invalidation_outlives_its_space(bool again)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    uint32_t tokens[TOKENS];
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    ten_blocks(tokens, 1);
    uint64_t learned = invalidate_away(&a, &b, tokens, &server);
    space_replace(&a, "n");
    if (again) {
        space_replace(&a, "m");
    }
    cr_assert_eq(kill(server.pid, SIGCONT), 0);
    verify_gone(&a, &prompt);
    NODE_UNTIL(&b, report.fleet.learned == learned + 1);
    node_forgets(&b, &prompt);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

Test(engine_remote_generation, an_invalidation_whose_space_is_given_up, .timeout = 200)
{
    an_invalidation_outlives_its_space(false);
}

Test(engine_remote_generation, an_invalidation_whose_space_comes_back, .timeout = 200)
{
    an_invalidation_outlives_its_space(true);
}

/* A salt's invalidation ends what the store has of the space, and what others have. */
Test(engine_remote_generation, a_salt_s_invalidation, .timeout = 200)
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
    node_forgets(&b, &salted);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}

/* What is on its way when its space is invalidated comes too late. */
Test(engine_remote_generation, what_comes_too_late, .timeout = 200)
{
    struct remote_server server;
    struct stage a;
    struct stage b;
    static uint32_t tokens[TOKENS];
    struct kvk_geometry geometry = house_geometry();
    const uint64_t host_bytes = UINT64_C(160) << 20;
    bool overtaken = false;
    geometry.head_size_k = geometry.head_size_v = 512;
    geometry.layers = 128; /* 4 MiB */
    remote_server_need(&server);
    node_init(&a, &server);
    node_init(&b, &server);
    a.house.config.remote.generation_ms = b.house.config.remote.generation_ms = 100;
    node_start_with(&a, &geometry, 1, host_bytes);
    node_start_with(&b, &geometry, 1, host_bytes);
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = 40};
    for (uint32_t i = 0; i < 20 && !overtaken; i++) {
        ten_blocks(tokens, 1000 * i);
        NODE_UNTIL(&a, report.spaces_out == 0);
        uint64_t sent = node_report(&a).stats.sent_blocks;
        uint64_t id = stage_open(&a, tokens, 40).sequence_id;
        house_seal(&a.house, a.session, id, 40); /* whatever lies there */
        stage_close(&a, id);
        NODE_UNTIL(&a, report.stats.sent_blocks == sent + 10);
        node_ready(&b);
        while (node_lookup(&b, &prompt).remote.state == KVK_REMOTE_USE_ASKED) {
            house_sleep_ms(1);
        }
        invalidate(&b, 0);
        cr_assert_eq(node_lookup(&b, &prompt).cached_tokens, 0);
        overtaken = node_report(&b).stats.overtaken > 0;
        NODE_UNTIL(&a, report.fleet.learned > i);
    }
    cr_assert(overtaken);
    stage_stop(&a);
    stage_stop(&b);
    remote_server_stop(&server);
}
