/*
 * A real Redis server and engines that share it, for tests of the remote store: each node is a
 * stage (tests/engine_stage.h) with threads and the real clock.
 *
 * Where redis-server is not installed the test is skipped in words.
 */
#ifndef KVK_TESTS_ENGINE_REMOTE_H
#define KVK_TESTS_ENGINE_REMOTE_H

#include <stdio.h>

#include "daemon/remote_internal.h"
#include "tests/engine_stage.h"
#include "tests/remote_server.h"

#define REMOTE_WAIT_MS 20000

/* It runs, or the test is skipped. */
static inline void remote_server_need(struct remote_server *server)
{
    if (!remote_is_installed()) {
        cr_skip_test("redis-server is not installed");
    }
    remote_server_start(server);
}

#define REMOTE_VALUE_BYTES (144 + 32 + 4 * 4 + 1024) /* of a block of house_geometry() */

/* What a Lua script makes of all blocks of house_geometry(): it has each name in `k`, and their
 * number so far in `n`. How many there were. */
static inline unsigned long remote_each(const struct remote_server *server, const char *script)
{
    char path[96];
    char answer[256];
    (void)snprintf(path, sizeof(path), "%s/each.lua", server->folder);
    FILE *file = fopen(path, "w");
    cr_assert_not_null(file);
    (void)fprintf(file,
                  "local n = 0\nfor _, k in ipairs(redis.call('KEYS', 'kvkeep:*')) do\n"
                  "if redis.call('TYPE', k).ok == 'string' and redis.call('STRLEN', k) == %d then\n"
                  "n = n + 1\n%s\nend end\nreturn n\n",
                  REMOTE_VALUE_BYTES, script);
    cr_assert_eq(fclose(file), 0);
    remote_ask(server, answer, "--eval %s", path);
    return strtoul(answer, NULL, 10);
}

static inline unsigned long remote_values(const struct remote_server *server)
{
    return remote_each(server, "");
}

/* ---- Nodes ---- */

/* house.config may be changed between this and node_start(). */
static inline void node_init(struct stage *node, const struct remote_server *server)
{
    memset(node, 0, sizeof(*node));
    house_init(&node->house);
    struct kvk_remote_config *remote = &node->house.config.remote;
    (void)snprintf(remote->seeds, sizeof(remote->seeds), "127.0.0.1:%u", server->port);
    (void)snprintf(remote->key_file, sizeof(remote->key_file), "%s/key", server->folder);
    remote->admit_uses = 1;
    remote->fetch_tokens = 1;
    remote->generation_ms = 1000; /* all of it as long as a machine that is busy may need */
    remote->ask_ms = remote->fetch_ms = remote->store_ms = REMOTE_WAIT_MS;
    remote->node_timeout_ms = REMOTE_WAIT_MS / 2;
}

static inline struct kvk_remote_report node_report(struct stage *node)
{
    struct kvk_remote_report report;
    kvk_lock(&node->house.cache->lock);
    kvk_remote_report(node->house.cache, &report);
    kvk_unlock(&node->house.cache->lock);
    return report;
}

/* Until a figure of the report is as wanted. */
#define NODE_UNTIL(node, condition)                                                                \
    do {                                                                                           \
        struct kvk_remote_report report = node_report(node);                                       \
        for (int tries_ = 0; tries_ < REMOTE_WAIT_MS / 5 && !(condition); tries_++) {              \
            house_sleep_ms(5);                                                                     \
            report = node_report(node);                                                            \
        }                                                                                          \
        cr_assert(condition, "%s", #condition);                                                    \
    } while (0)

/* Until the node may use the store: its space's generation is known. */
static inline void node_ready(struct stage *node)
{
    NODE_UNTIL(node, report.spaces > 0 && report.spaces_out == 0);
}

static inline void node_start_with(struct stage *node, const struct kvk_geometry *groups,
                                   uint32_t group_count, uint64_t host_bytes)
{
    node->geometry = groups[0];
    node->block_bytes = kvk_geometry_block_bytes(&groups[0]);
    const struct house_options options = {.host_bytes = host_bytes, .threads = true};
    house_start(&node->house, &options);
    node->space = house_space_of(&node->house, &node->house.caller, "m", groups, group_count);
    node->session = house_session(&node->house);
    node_ready(node); /* before others begin: they learn its number, and it need not theirs */
}

static inline void node_start(struct stage *node, uint32_t host_blocks)
{
    const struct kvk_geometry geometry = house_geometry();
    node_start_with(node, &geometry, 1, host_blocks * kvk_geometry_block_bytes(&geometry));
}

static inline struct kvk_lookup_reply node_lookup(struct stage *node,
                                                  const struct kvk_prompt *prompt)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {
        .space_id = node->space, .prompt = *prompt, .retry = true};
    STAGE_OK(node, kvk_lookup(node->house.cache, &node->house.caller, &request, &reply,
                              &node->house.error));
    return reply;
}

/* Until so many tokens are cached here, looking up again and again as a worker does. */
static inline void node_await(struct stage *node, const uint32_t *tokens, uint64_t count,
                              uint64_t cached)
{
    const struct kvk_prompt prompt = {.tokens = tokens, .token_count = count};
    uint64_t found = 0;
    for (int i = 0; i < REMOTE_WAIT_MS / 5; i++) {
        found = node_lookup(node, &prompt).cached_tokens;
        if (found >= cached) {
            break;
        }
        house_sleep_ms(5);
    }
    cr_assert_eq(found, cached, "%lu tokens came, not %lu", (unsigned long)found,
                 (unsigned long)cached);
}

/* Until the store has answered for the prompt, and what came of it has come. */
static inline struct kvk_lookup_reply node_settle(struct stage *node,
                                                  const struct kvk_prompt *prompt)
{
    struct kvk_lookup_reply reply = {0};
    for (int i = 0; i < REMOTE_WAIT_MS / 5; i++) {
        reply = node_lookup(node, prompt);
        if (reply.remote.state != KVK_REMOTE_USE_ASKED &&
            reply.remote.state != KVK_REMOTE_USE_FETCHING) {
            return reply;
        }
        house_sleep_ms(5);
    }
    cr_assert_fail("the store did not settle");
    return reply;
}

/* A prompt that is cached here, and sent. */
static inline void node_share(struct stage *node, const uint32_t *tokens, uint64_t count,
                              uint32_t tag)
{
    uint64_t blocks = count / node->geometry.block_tokens;
    uint64_t before = node_report(node).stats.sent_blocks;
    uint64_t cached = house_cached(&node->house, node->space, tokens, count);
    stage_cache(node, tokens, count, tag);
    blocks -= cached / node->geometry.block_tokens;
    NODE_UNTIL(node, report.stats.sent_blocks >= before + blocks);
}

/* ---- Prompts ---- */

#define TOKENS 41U /* ten blocks, and one token to compute */

static inline void ten_blocks(uint32_t tokens[TOKENS], uint32_t first)
{
    house_tokens(tokens, TOKENS, first);
}

static inline void verify_hit(struct stage *node, const uint32_t *tokens, uint64_t count,
                              uint64_t cached, uint32_t tag)
{
    struct kvk_sequence_reply reply = stage_open(node, tokens, count);
    cr_assert_eq(reply.cached_tokens, cached);
    stage_verify(node, reply.sequence_id, 0, cached, tag);
    stage_close(node, reply.sequence_id);
}

#endif
