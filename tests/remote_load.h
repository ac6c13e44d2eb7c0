/*
 * Engines that share one Redis server, and workers that load them, for plain programs: over pools
 * that are too small, so that blocks are sent, evicted, and fetched again all the time.
 *
 * What a block holds follows from the tokens before it and from its version, how often its space
 * had been invalidated when it was computed: so whoever reads can tell a wrong byte, and one that
 * should have been forgotten.
 */
#ifndef KVK_TESTS_REMOTE_LOAD_H
#define KVK_TESTS_REMOTE_LOAD_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/remote_internal.h"
#include "tests/engine_bare.h"
#include "tests/remote_server.h"

enum {
    LOAD_BLOCK_TOKENS = 4,
    LOAD_BLOCKS_MAX = 24,
    LOAD_TOKENS_MAX = LOAD_BLOCKS_MAX * LOAD_BLOCK_TOKENS,
    LOAD_VOCABULARY = 3,
};

/* The server, and what all workers count together. */
struct load {
    struct remote_server server;
    _Atomic bool stop;
    _Atomic uint64_t version; /* of what is computed now */
    _Atomic uint64_t opened, read, waited;
};

struct load_node {
    struct load *load;
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_caller caller;
    uint64_t space;
    uint64_t block_bytes;
    _Atomic uint64_t least; /* version that may still be found */
};

struct load_worker {
    struct load_node *node;
    struct kvk_random random;
    uint64_t session;
    pthread_t thread;
};

/* False, in words: redis-server is not installed. */
static inline bool load_open(struct load *load)
{
    if (!remote_is_installed()) {
        return false;
    }
    kvk_log_set_level(KVK_LOG_ERROR);
    (void)signal(SIGPIPE, SIG_IGN);
    remote_server_start(&load->server);
    return true;
}

/* ---- Prompts and their bytes ---- */

static inline uint32_t load_prompt(struct kvk_random *random, uint32_t tokens[LOAD_TOKENS_MAX])
{
    uint32_t blocks = (uint32_t)kvk_random_between(random, 1, LOAD_BLOCKS_MAX);
    memset(tokens, 0, LOAD_TOKENS_MAX * sizeof(*tokens));
    for (uint32_t b = 0; b < blocks; b++) {
        tokens[b * LOAD_BLOCK_TOKENS] =
            (uint32_t)kvk_random_below(random, b % 5 == 0 ? LOAD_VOCABULARY : 1);
    }
    return blocks;
}

/* The block's first word is the version, the others follow from it and the chain. */
static inline uint64_t load_word(const uint32_t *tokens, uint64_t block, uint64_t version)
{
    uint64_t word = UINT64_C(0x9e3779b97f4a7c15) * (version + 1);
    for (uint64_t i = 0; i < (block + 1) * LOAD_BLOCK_TOKENS; i++) {
        word = (word ^ tokens[i]) * 0x100000001b3 + block;
    }
    return word;
}

static inline void load_fill(uint64_t *bytes, uint64_t size, uint64_t word, uint64_t version)
{
    bytes[0] = version;
    for (uint64_t i = 1; i < size / sizeof(*bytes); i++) {
        bytes[i] = word + i;
    }
}

static inline void load_expect(const uint8_t *bytes, uint64_t size, const uint32_t *tokens,
                               uint64_t block, uint64_t least)
{
    uint64_t version;
    memcpy(&version, bytes, sizeof(version));
    if (version < least) {
        (void)fprintf(stderr, "a block of version %llu, after %llu was the least\n",
                      (unsigned long long)version, (unsigned long long)least);
        abort();
    }
    uint64_t word = load_word(tokens, block, version);
    for (uint64_t i = 1; i < size / sizeof(word); i++) {
        uint64_t value;
        memcpy(&value, bytes + i * sizeof(value), sizeof(value));
        KVK_ASSERT(value == word + i);
    }
}

/* ---- A worker's calls ---- */

static inline bool load_went_well(enum kvk_status status, const struct kvk_error *error)
{
    if (status != KVK_OK && status != KVK_EXHAUSTED && status != KVK_DEADLINE &&
        status != KVK_UNAVAILABLE) {
        (void)fprintf(stderr, "status %s: %s\n", kvk_status_name(status), error->text);
        KVK_UNREACHABLE();
    }
    return status == KVK_OK;
}

static inline struct kvk_caller load_caller(const struct load_node *node)
{
    struct kvk_caller caller = node->caller;
    caller.deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + 5 * KVK_NS_PER_SECOND;
    return caller;
}

/* As a worker that would rather wait than compute, for a while. */
static inline void load_look_up(struct load_worker *worker, const struct kvk_prompt *prompt)
{
    const struct kvk_lookup_request request = {.space_id = worker->node->space, .prompt = *prompt};
    struct kvk_lookup_reply reply;
    struct kvk_error error;
    for (int i = 0; i < 20; i++) {
        uint64_t begun_ns = kvk_clock_now(kvk_clock_monotonic());
        enum kvk_status status =
            kvk_lookup(worker->node->cache, &worker->node->caller, &request, &reply, &error);
        KVK_ASSERT(status == KVK_OK);
        KVK_ASSERT(reply.cached_tokens <= prompt->token_count);
        /* No look-up waits for the store; a busy machine may take the processor away. */
        KVK_ASSERT(kvk_clock_now(kvk_clock_monotonic()) - begun_ns < 2 * KVK_NS_PER_SECOND);
        if (reply.remote.state != KVK_REMOTE_USE_ASKED &&
            reply.remote.state != KVK_REMOTE_USE_FETCHING) {
            return;
        }
        atomic_fetch_add(&worker->node->load->waited, 1);
        (void)usleep(2000);
    }
}

static inline void load_read_all(struct load_worker *worker, uint64_t sequence,
                                 const uint32_t *tokens, uint64_t blocks, uint64_t least)
{
    struct kvk_caller caller = load_caller(worker->node);
    for (uint64_t b = 0; b < blocks; b++) {
        const struct kvk_read_request request = {
            .session_id = worker->session, .sequence_id = sequence, .block = b};
        const uint8_t *data;
        uint64_t size;
        struct kvk_read_handle handle;
        struct kvk_error error;
        enum kvk_status status =
            kvk_read_begin(worker->node->cache, &caller, &request, &data, &size, &handle, &error);
        if (load_went_well(status, &error)) {
            load_expect(data, size, tokens, b, least);
            kvk_read_end(worker->node->cache, &handle);
            atomic_fetch_add(&worker->node->load->read, 1);
        }
    }
}

static inline void load_write_rest(struct load_worker *worker, uint64_t sequence,
                                   const uint32_t *tokens, uint64_t first, uint64_t blocks)
{
    struct load_node *node = worker->node;
    struct kvk_caller caller = load_caller(node);
    struct kvk_error error;
    uint64_t *bytes = malloc(node->block_bytes);
    uint64_t version = atomic_load(&node->load->version);
    KVK_ASSERT(bytes != NULL);
    for (uint64_t b = first; b < blocks; b++) {
        load_fill(bytes, node->block_bytes, load_word(tokens, b, version), version);
        const struct kvk_write_piece piece = {
            .block = b, .data = (const uint8_t *)bytes, .size_bytes = node->block_bytes};
        KVK_ASSERT(load_went_well(
            kvk_sequence_write(node->cache, &caller, worker->session, sequence, &piece, &error),
            &error));
    }
    free(bytes);
    const struct kvk_seal_request seal = {.session_id = worker->session,
                                          .sequence_id = sequence,
                                          .expected_length = blocks * LOAD_BLOCK_TOKENS,
                                          .length = blocks * LOAD_BLOCK_TOKENS,
                                          .all_ranks = true};
    struct kvk_seal_reply reply;
    (void)load_went_well(kvk_sequence_seal(node->cache, &caller, &seal, &reply, &error), &error);
}

/* One prompt: looked up, opened, what was found is read, the rest computed, sealed and closed. */
static inline void load_sequence(struct load_worker *worker)
{
    struct load_node *node = worker->node;
    struct kvk_caller caller = load_caller(node);
    uint32_t tokens[LOAD_TOKENS_MAX];
    uint32_t blocks = load_prompt(&worker->random, tokens);
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    struct kvk_error error;
    const struct kvk_open_request request = {
        .session_id = worker->session,
        .space_id = node->space,
        .prompt = {.tokens = tokens, .token_count = (uint64_t)blocks * LOAD_BLOCK_TOKENS},
        .tier = -1};
    if (kvk_random_chance(&worker->random, 0.7)) {
        load_look_up(worker, &request.prompt);
    }
    uint64_t least = atomic_load(&node->least);
    enum kvk_status status =
        kvk_sequence_open(node->cache, &caller, &request, &reply, &tables, &error);
    kvk_tables_finish(&tables);
    if (!load_went_well(status, &error)) {
        return;
    }
    uint64_t id = reply.sequence_id;
    uint64_t cached = reply.cached_tokens / LOAD_BLOCK_TOKENS;
    atomic_fetch_add(&node->load->opened, 1);
    load_read_all(worker, id, tokens, cached, least);
    load_write_rest(worker, id, tokens, cached, blocks);
    struct kvk_close_reply closed;
    status = kvk_sequence_close(node->cache, &caller, worker->session, &id, 1, &closed, &error);
    KVK_ASSERT(status == KVK_OK);
}

static inline void *load_worker_main(void *argument)
{
    struct load_worker *worker = argument;
    while (!atomic_load(&worker->node->load->stop)) {
        load_sequence(worker);
    }
    return NULL;
}

static inline void load_worker_start(struct load_worker *worker, struct load_node *node,
                                     uint64_t seed, void *(*run)(void *worker))
{
    worker->node = node;
    worker->session = bare_session(node->cache, &node->caller);
    kvk_random_init(&worker->random, seed);
    KVK_ASSERT(pthread_create(&worker->thread, NULL, run, worker) == 0);
}

/* ---- Nodes ---- */

static inline struct kvk_remote_report load_report(const struct load_node *node)
{
    struct kvk_remote_report report;
    kvk_lock(&node->cache->lock);
    kvk_remote_report(node->cache, &report);
    kvk_unlock(&node->cache->lock);
    return report;
}

/* Opaque: computed again, a block of the next version is no mistake of somebody's. */
static inline struct kvk_space_request load_space(const char *model, uint64_t block_bytes)
{
    const struct kvk_geometry geometry = bare_opaque(block_bytes, LOAD_BLOCK_TOKENS);
    return bare_space_request(model, &geometry);
}

/* node->config may be changed between this and load_node_start(). */
static inline void load_node_init(struct load_node *node, struct load *load, uint64_t host_bytes,
                                  uint64_t generation_ms)
{
    memset(node, 0, sizeof(*node));
    node->load = load;
    kvk_config_init(&node->config);
    node->config.device_bytes = 0;
    node->config.host_bytes = host_bytes;
    node->config.blocks = 512;
    node->config.tokens = 4096;
    node->config.scrub_interval_ms = 1;
    struct kvk_remote_config *remote = &node->config.remote;
    (void)snprintf(remote->seeds, sizeof(remote->seeds), "127.0.0.1:%u", load->server.port);
    (void)snprintf(remote->key_file, sizeof(remote->key_file), "%s/key", load->server.folder);
    remote->admit_uses = 1;
    remote->fetch_tokens = 1;
    remote->generation_ms = generation_ms;
    remote->node_timeout_ms = 300;
    remote->fetch_ms = remote->store_ms = 1000;
}

static inline void load_node_start(struct load_node *node, uint64_t block_bytes)
{
    struct kvk_error error;
    bare_must(kvk_tenants_create(&node->config, &node->tenants, &error), &error);
    const struct kvk_cache_options options = {.config = &node->config,
                                              .tenants = node->tenants,
                                              .host_device = bare_device(),
                                              .threads = true};
    bare_must(kvk_cache_create(&options, &node->cache, &error), &error);
    node->caller = bare_user(node->tenants);
    const struct kvk_space_request request = load_space("model", block_bytes);
    struct kvk_space_reply reply;
    bare_must(kvk_space_open(node->cache, &node->caller, &request, &reply, &error), &error);
    node->space = reply.space_id;
    node->block_bytes = reply.groups[0].block_bytes;
    do { /* one after the other: the next learns its number */
        (void)usleep(5000);
    } while (load_report(node).spaces_out > 0);
}

static inline void load_node_stop(struct load_node *node)
{
    kvk_cache_quiesce(node->cache);
    kvk_cache_check(node->cache);
    kvk_cache_destroy(node->cache);
    kvk_tenants_destroy(node->tenants);
    kvk_config_finish(&node->config);
}

#endif
