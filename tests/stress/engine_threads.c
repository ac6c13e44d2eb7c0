/*
 * The engine under many threads: sequences, swaps, leases, look-ups and invalidations at once over
 * pools that are too small, with the mover's and the maintenance thread running.
 *
 * What a block holds follows from the tokens before it, so whoever reads can tell whether these are
 * the right bytes. At the end nothing is held, every law holds, and all is free.
 *
 *     test_stress_engine_threads [SECONDS]
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/cache_internal.h"
#include "tests/engine_bare.h"

enum {
    THREADS = 6,
    BLOCK_TOKENS = 4,
    BLOCKS_MAX = 12,
    TOKENS_MAX = BLOCKS_MAX * BLOCK_TOKENS,
    VOCABULARY = 3,
};

struct rig {
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_caller caller;
    uint64_t space;
    uint64_t block_bytes;
    _Atomic bool stop;
    _Atomic uint64_t opened, refused, read, swapped, forked, leased, invalidated;
};

struct worker {
    struct rig *rig;
    struct kvk_random random;
    uint64_t session;
    pthread_t thread;
};

/* ---- Prompts and their bytes ---- */

/* One token a block is enough to tell chains apart: few chains, so that they are shared. */
static uint32_t prompt_make(struct kvk_random *random, uint32_t tokens[TOKENS_MAX])
{
    uint32_t blocks = (uint32_t)kvk_random_between(random, 1, BLOCKS_MAX);
    memset(tokens, 0, TOKENS_MAX * sizeof(*tokens));
    for (uint32_t b = 0; b < blocks; b++) {
        tokens[b * BLOCK_TOKENS] = (uint32_t)kvk_random_below(random, b < 4 ? 1 : VOCABULARY);
    }
    return blocks;
}

static uint64_t block_word(const uint32_t *tokens, uint32_t block)
{
    uint64_t word = 0x9e3779b97f4a7c15;
    for (uint32_t i = 0; i < (block + 1) * BLOCK_TOKENS; i++) {
        word = (word ^ tokens[i]) * 0x100000001b3 + block;
    }
    return word;
}

static void block_fill(uint64_t *bytes, uint64_t size, uint64_t word)
{
    for (uint64_t i = 0; i < size / sizeof(*bytes); i++) {
        bytes[i] = word + i;
    }
}

static void block_expect(const uint8_t *bytes, uint64_t size, uint64_t word)
{
    for (uint64_t i = 0; i < size / sizeof(word); i++) {
        uint64_t value;
        memcpy(&value, bytes + i * sizeof(value), sizeof(value));
        KVK_ASSERT(value == word + i);
    }
}

/* ---- One worker's calls ---- */

/* The world's answers that a full pool and other threads may give. */
static bool went_well(struct rig *rig, enum kvk_status status, const struct kvk_error *error)
{
    if (status == KVK_OK) {
        return true;
    }
    if (status != KVK_EXHAUSTED && status != KVK_DEADLINE && status != KVK_UNAVAILABLE) {
        (void)fprintf(stderr, "status %s: %s\n", kvk_status_name(status), error->text);
        KVK_UNREACHABLE();
    }
    atomic_fetch_add(&rig->refused, 1);
    return false;
}

static struct kvk_caller caller_of(const struct rig *rig)
{
    struct kvk_caller caller = rig->caller;
    caller.deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + KVK_NS_PER_SECOND;
    return caller;
}

static void read_all(struct worker *worker, uint64_t sequence, uint64_t lease,
                     const uint32_t *tokens, uint64_t blocks)
{
    struct rig *rig = worker->rig;
    struct kvk_caller caller = caller_of(rig);
    for (uint64_t b = 0; b < blocks; b++) {
        const struct kvk_read_request request = {
            .session_id = worker->session, .sequence_id = sequence, .lease_id = lease, .block = b};
        const uint8_t *data;
        uint64_t size;
        struct kvk_read_handle handle;
        struct kvk_error error;
        enum kvk_status status =
            kvk_read_begin(rig->cache, &caller, &request, &data, &size, &handle, &error);
        if (!went_well(rig, status, &error)) {
            continue;
        }
        block_expect(data, size, block_word(tokens, (uint32_t)b));
        kvk_read_end(rig->cache, &handle);
        atomic_fetch_add(&rig->read, 1);
    }
}

static bool write_rest(struct worker *worker, uint64_t sequence, const uint32_t *tokens,
                       uint64_t first, uint64_t blocks)
{
    struct rig *rig = worker->rig;
    struct kvk_caller caller = caller_of(rig);
    struct kvk_error error;
    uint64_t *bytes = malloc(rig->block_bytes);
    KVK_ASSERT(bytes != NULL);
    for (uint64_t b = first; b < blocks; b++) {
        block_fill(bytes, rig->block_bytes, block_word(tokens, (uint32_t)b));
        const struct kvk_write_piece piece = {
            .block = b, .data = (const uint8_t *)bytes, .size_bytes = rig->block_bytes};
        enum kvk_status status =
            kvk_sequence_write(rig->cache, &caller, worker->session, sequence, &piece, &error);
        KVK_ASSERT(went_well(rig, status, &error));
    }
    free(bytes);
    const struct kvk_seal_request seal = {.session_id = worker->session,
                                          .sequence_id = sequence,
                                          .expected_length = blocks * BLOCK_TOKENS,
                                          .length = blocks * BLOCK_TOKENS,
                                          .all_ranks = true};
    struct kvk_seal_reply reply;
    return went_well(rig, kvk_sequence_seal(rig->cache, &caller, &seal, &reply, &error), &error);
}

static void swap(struct worker *worker, uint64_t sequence)
{
    struct rig *rig = worker->rig;
    struct kvk_caller caller = caller_of(rig);
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_swap_reply reply;
    struct kvk_error error;
    if (went_well(rig,
                  kvk_sequence_swap_out(rig->cache, &caller, worker->session, sequence, &reply,
                                        &tables, &error),
                  &error) &&
        went_well(rig,
                  kvk_sequence_swap_in(rig->cache, &caller, worker->session, sequence, &reply,
                                       &tables, &error),
                  &error)) {
        atomic_fetch_add(&rig->swapped, 1);
    }
    kvk_tables_finish(&tables);
}

/* Children read what the parent has; they end all at once. */
static void fork_and_close(struct worker *worker, uint64_t sequence, const uint32_t *tokens,
                           uint32_t blocks)
{
    struct rig *rig = worker->rig;
    struct kvk_caller caller = caller_of(rig);
    const struct kvk_request_id none = {.size = 0};
    uint64_t ids[3];
    struct kvk_close_reply closed;
    struct kvk_error error;
    if (!went_well(rig,
                   kvk_sequence_fork(rig->cache, &caller, worker->session, sequence,
                                     (uint64_t)blocks * BLOCK_TOKENS, 3, &none, ids, &error),
                   &error)) {
        return;
    }
    read_all(worker, ids[2], 0, tokens, blocks);
    enum kvk_status status =
        kvk_sequence_close(rig->cache, &caller, worker->session, ids, 3, &closed, &error);
    KVK_ASSERT(status == KVK_OK);
    atomic_fetch_add(&rig->forked, 1);
}

static void do_sequence(struct worker *worker)
{
    struct rig *rig = worker->rig;
    struct kvk_caller caller = caller_of(rig);
    uint32_t tokens[TOKENS_MAX];
    uint32_t blocks = prompt_make(&worker->random, tokens);
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    struct kvk_error error;
    const struct kvk_open_request request = {
        .session_id = worker->session,
        .space_id = rig->space,
        .prompt = {.tokens = tokens, .token_count = (uint64_t)blocks * BLOCK_TOKENS},
        .tier = kvk_random_chance(&worker->random, 0.2) ? KVK_TIER_HOST : -1};
    enum kvk_status status =
        kvk_sequence_open(rig->cache, &caller, &request, &reply, &tables, &error);
    kvk_tables_finish(&tables);
    if (!went_well(rig, status, &error)) {
        return;
    }
    atomic_fetch_add(&rig->opened, 1);
    uint64_t id = reply.sequence_id;
    if (write_rest(worker, id, tokens, reply.cached_tokens / BLOCK_TOKENS, blocks)) {
        read_all(worker, id, 0, tokens, blocks);
        if (kvk_random_chance(&worker->random, 0.3)) {
            fork_and_close(worker, id, tokens, blocks);
        }
        if (request.tier < 0 && kvk_random_chance(&worker->random, 0.5)) {
            swap(worker, id);
            read_all(worker, id, 0, tokens, blocks);
        }
    }
    struct kvk_close_reply closed;
    status = kvk_sequence_close(rig->cache, &caller, worker->session, &id, 1, &closed, &error);
    KVK_ASSERT(status == KVK_OK);
}

static void do_lease(struct worker *worker)
{
    struct rig *rig = worker->rig;
    struct kvk_caller caller = caller_of(rig);
    uint32_t tokens[TOKENS_MAX];
    uint32_t blocks = prompt_make(&worker->random, tokens);
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_pin_reply reply;
    struct kvk_error error;
    const struct kvk_pin_request request = {
        .session_id = worker->session,
        .space_id = rig->space,
        .prompt = {.tokens = tokens, .token_count = (uint64_t)blocks * BLOCK_TOKENS},
        .ttl_ms = 60000,
        .copy_pin = kvk_random_chance(&worker->random, 0.5)};
    enum kvk_status status = kvk_lease_pin(rig->cache, &caller, &request, &reply, &tables, &error);
    kvk_tables_finish(&tables);
    if (!went_well(rig, status, &error) || reply.lease_id == 0) {
        return;
    }
    read_all(worker, 0, reply.lease_id, tokens, reply.cached_tokens / BLOCK_TOKENS);
    uint64_t released;
    status = kvk_lease_release(rig->cache, &caller, worker->session, &reply.lease_id, 1, &released,
                               &error);
    KVK_ASSERT(status == KVK_OK);
    atomic_fetch_add(&rig->leased, 1);
}

static void do_invalidate(struct worker *worker)
{
    struct rig *rig = worker->rig;
    struct kvk_caller caller = caller_of(rig);
    uint32_t tokens[TOKENS_MAX];
    uint32_t blocks = prompt_make(&worker->random, tokens);
    const struct kvk_prompt prefix = {.tokens = tokens,
                                      .token_count = (uint64_t)blocks * BLOCK_TOKENS};
    const struct kvk_invalidate_request request = {
        .space_id = rig->space, .prefix = kvk_random_chance(&worker->random, 0.7) ? &prefix : NULL};
    struct kvk_invalidate_reply reply;
    struct kvk_error error;
    if (went_well(rig, kvk_invalidate(rig->cache, &caller, &request, &reply, &error), &error)) {
        atomic_fetch_add(&rig->invalidated, 1);
    }
}

static void do_lookup(struct worker *worker)
{
    struct rig *rig = worker->rig;
    uint32_t tokens[TOKENS_MAX];
    uint32_t blocks = prompt_make(&worker->random, tokens);
    const struct kvk_lookup_request request = {
        .space_id = rig->space,
        .prompt = {.tokens = tokens, .token_count = (uint64_t)blocks * BLOCK_TOKENS}};
    struct kvk_lookup_reply reply;
    struct kvk_error error;
    enum kvk_status status = kvk_lookup(rig->cache, &rig->caller, &request, &reply, &error);
    KVK_ASSERT(status == KVK_OK);
    KVK_ASSERT(reply.cached_tokens <= request.prompt.token_count);
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    while (!atomic_load(&worker->rig->stop)) {
        uint64_t what = kvk_random_below(&worker->random, 100);
        if (what < 60) {
            do_sequence(worker);
        } else if (what < 80) {
            do_lookup(worker);
        } else if (what < 98) {
            do_lease(worker);
        } else {
            do_invalidate(worker);
        }
    }
    return NULL;
}

/* ---- The rig ---- */

static struct kvk_device *device_open(void)
{
    const struct kvk_device_cpu_options options = {.attend_thread_count = 1, .window_bytes = 4096};
    struct kvk_device *device;
    struct kvk_error error;
    enum kvk_status status = kvk_device_cpu_open(&options, &device, &error);
    KVK_ASSERT(status == KVK_OK);
    return device;
}

static void rig_start(struct rig *rig)
{
    struct kvk_error error;
    memset(rig, 0, sizeof(*rig));
    kvk_config_init(&rig->config);
    rig->config.device_bytes = UINT64_C(16) << 20; /* 32 blocks of 512 KiB */
    rig->config.host_bytes = UINT64_C(24) << 20;
    rig->config.blocks = 4096;
    rig->config.test_hooks = true; /* slices as short as these prompts need */
    rig->config.tokens = 4096;
    rig->config.copy_threads = 2;
    rig->config.device_free_percent = 10;
    rig->config.scrub_interval_ms = 1; /* and somebody who looks at every block meanwhile */
    rig->config.scrub_bytes_per_second = UINT64_C(1) << 40;
    enum kvk_status status = kvk_tenants_create(&rig->config, &rig->tenants, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_cache_options options = {.config = &rig->config,
                                              .tenants = rig->tenants,
                                              .device = device_open(),
                                              .host_device = device_open(),
                                              .threads = true};
    status = kvk_cache_create(&options, &rig->cache, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_test_control control = {.slice_blocks = 2};
    status = kvk_cache_test_control(rig->cache, &control, &error);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_geometry geometry = bare_geometry(32, 8, 64, BLOCK_TOKENS);
    rig->caller = bare_user(rig->tenants);
    struct kvk_space_reply reply = bare_space(rig->cache, &rig->caller, "model", &geometry);
    rig->space = reply.space_id;
    rig->block_bytes = reply.groups[0].block_bytes;
}

static void rig_stop(struct rig *rig)
{
    const struct kvk_invalidate_request all = {.space_id = rig->space};
    struct kvk_invalidate_reply reply;
    struct kvk_error error;
    enum kvk_status status = kvk_invalidate(rig->cache, &rig->caller, &all, &reply, &error);
    KVK_ASSERT(status == KVK_OK);
    /* Maintenance may still copy a block ahead of need. */
    bool quiet = false;
    while (!quiet) {
        kvk_lock(&rig->cache->lock);
        quiet = rig->cache->passing_holds == 0 && !rig->cache->purge_wanted;
        if (quiet) {
            kvk_cache_check_locked(rig->cache);
            for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
                KVK_ASSERT(rig->cache->tiers[i].used_bytes == 0);
                KVK_ASSERT(rig->cache->tiers[i].bound_bytes == 0);
            }
        }
        kvk_unlock(&rig->cache->lock);
    }
    kvk_cache_destroy(rig->cache);
    kvk_tenants_destroy(rig->tenants);
    kvk_config_finish(&rig->config);
}

int main(int count, char **arguments)
{
    static struct rig rig;
    static struct worker workers[THREADS];
    unsigned seconds = count > 1 ? (unsigned)atoi(arguments[1]) : 5;
    kvk_log_set_level(KVK_LOG_ERROR);
    rig_start(&rig);
    for (uint32_t i = 0; i < THREADS; i++) {
        workers[i].rig = &rig;
        workers[i].session = bare_session(rig.cache, &rig.caller);
        kvk_random_init(&workers[i].random, i + 1);
        int failed = pthread_create(&workers[i].thread, NULL, worker_main, &workers[i]);
        KVK_ASSERT(failed == 0);
    }
    (void)sleep(seconds);
    atomic_store(&rig.stop, true);
    for (uint32_t i = 0; i < THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    struct kvk_cache_stats *stats = &rig.cache->stats;
    (void)printf("%llu sequences, %llu refused, %llu blocks read, %llu swaps, %llu forks, "
                 "%llu leases, %llu invalidations, %llu demoted, %llu promoted, %llu forgotten\n",
                 (unsigned long long)rig.opened, (unsigned long long)rig.refused,
                 (unsigned long long)rig.read, (unsigned long long)rig.swapped,
                 (unsigned long long)rig.forked, (unsigned long long)rig.leased,
                 (unsigned long long)rig.invalidated, (unsigned long long)stats->demoted_blocks,
                 (unsigned long long)stats->promoted_blocks,
                 (unsigned long long)stats->forgotten_blocks);
    KVK_ASSERT(rig.opened > 0 && rig.read > 0 && rig.forked > 0);
    KVK_ASSERT(stats->checksum_failures == 0);
    KVK_ASSERT(stats->wrong_reuse == 0);
    rig_stop(&rig);
    return 0;
}
