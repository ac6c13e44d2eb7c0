/*
 * The engine under many threads at once: sessions and ranks that come and go in the middle of
 * everything, mappings over a real side socket, attention, reports and notices, for a few seconds.
 * The laws are checked while it runs and at the end; ThreadSanitizer looks on in its build.
 */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/lock.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/attention.h"
#include "daemon/report.h"
#include "daemon/side_socket.h"
#include "tests/engine_bare.h"

#define ENGINE_THREADS 4
#define SECONDS 5
#define TOKENS_MAX 64
#define QUERY_HEADS 2
#define HEAD_SIZE 8

struct stress {
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_side_socket *side;
    struct kvk_caller caller;
    char side_path[108];
    uint64_t space_id;
    _Atomic bool stop;
    _Atomic uint64_t notices;
    _Atomic uint64_t rounds;
    _Atomic uint64_t attended;
    _Atomic uint64_t mapped;
};

/* What a thread of an engine goes through, with the statuses that the world may answer. */
struct engine {
    struct stress *stress;
    struct kvk_random random;
    struct kvk_welcome welcome;
    uint32_t tokens[TOKENS_MAX];
    struct kvk_tables tables;
    int side;
    uint32_t number;
};

static void on_notice(void *context, enum kvk_notice_kind kind, uint64_t value)
{
    struct stress *stress = context;
    (void)kind;
    (void)value;
    KVK_ASSERT(kvk_locks_held() == 0);
    atomic_fetch_add(&stress->notices, 1);
}

static bool begin(struct engine *engine, const struct kvk_welcome *instance, uint32_t rank,
                  struct kvk_welcome *welcome)
{
    struct kvk_error error;
    struct kvk_hello hello = {.local = true,
                              .pid = (int32_t)getpid(),
                              .uid = (uint32_t)geteuid(),
                              .pidfd = -1,
                              .rank = rank,
                              .on_notice = on_notice,
                              .context = engine->stress};
    if (instance != NULL) {
        hello.instance_token.data = instance->instance_token;
        hello.instance_token.size = KVK_TOKEN_SIZE;
    }
    return kvk_session_begin(engine->stress->cache, &engine->stress->caller, &hello, welcome,
                             &error) == KVK_OK;
}

/* Map the slots, read-only: this process lives on, so what it could write would wait for ever. */
static void map(struct engine *engine)
{
    struct stress *stress = engine->stress;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct kvk_map_reply reply;
    struct kvk_error error;
    uint8_t answer = 255;

    memcpy(address.sun_path, stress->side_path, sizeof(address.sun_path));
    engine->side = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (connect(engine->side, (const struct sockaddr *)&address, sizeof(address)) != 0 ||
        send(engine->side, engine->welcome.side_token, KVK_TOKEN_SIZE, MSG_NOSIGNAL) !=
            KVK_TOKEN_SIZE ||
        recv(engine->side, &answer, 1, 0) != 1 || answer != 0) {
        return;
    }
    const struct kvk_map_request request = {
        .session_id = engine->welcome.session_id,
        .kind = kvk_random_chance(&engine->random, 0.5) ? KVK_MAP_SLOTS : KVK_MAP_SCRATCH,
        .space_id = stress->space_id,
        .tier = KVK_TIER_HOST,
        .read_only = true,
        .size_bytes = 8192};
    if (kvk_session_map(stress->cache, &stress->caller, &request, &reply, &error) != KVK_OK) {
        return;
    }
    /* Descriptors that are not asked for with room for them are closed by the kernel. */
    if (send(engine->side, reply.map_token, KVK_TOKEN_SIZE, MSG_NOSIGNAL) == KVK_TOKEN_SIZE &&
        recv(engine->side, &answer, 1, 0) == 1 && answer == 0) {
        atomic_fetch_add(&stress->mapped, 1);
    }
}

static uint64_t open_sequence(struct engine *engine, uint64_t session_id, uint64_t count)
{
    struct kvk_sequence_reply reply;
    struct kvk_error error;
    const struct kvk_open_request request = {
        .session_id = session_id,
        .space_id = engine->stress->space_id,
        .prompt = {.tokens = engine->tokens, .token_count = count},
        .tier = -1};
    enum kvk_status status = kvk_sequence_open(engine->stress->cache, &engine->stress->caller,
                                               &request, &reply, &engine->tables, &error);
    return status == KVK_OK ? reply.sequence_id : 0;
}

static void attend(struct engine *engine, uint64_t session_id, uint64_t sequence_id)
{
    float queries[QUERY_HEADS * HEAD_SIZE];
    float output[QUERY_HEADS * HEAD_SIZE];
    float lse[QUERY_HEADS];
    struct kvk_error error;
    struct kvk_attention_item item = {.sequence_id = sequence_id,
                                      .position = TOKENS_MAX,
                                      .query_count = 1,
                                      .queries = (const uint8_t *)queries,
                                      .queries_size = sizeof(queries),
                                      .output = output,
                                      .lse = lse};
    struct kvk_attention_request request = {.session_id = session_id,
                                            .query_heads = QUERY_HEADS,
                                            .format = KVK_FORMAT_FP32,
                                            .scale = 1,
                                            .causal = true,
                                            .items = &item,
                                            .item_count = 1};
    for (uint32_t i = 0; i < QUERY_HEADS * HEAD_SIZE; i++) {
        queries[i] = 1;
    }
    if (kvk_attention_run(engine->stress->cache, &engine->stress->caller, &request, &error) ==
        KVK_OK) {
        KVK_ASSERT(isfinite(output[0]));
        atomic_fetch_add(&engine->stress->attended, 1);
    }
}

static void swap(struct engine *engine, uint64_t session_id, uint64_t sequence_id)
{
    struct stress *stress = engine->stress;
    struct kvk_swap_reply reply;
    struct kvk_error error;

    if (kvk_sequence_swap_out(stress->cache, &stress->caller, session_id, sequence_id, &reply,
                              &engine->tables, &error) != KVK_OK) {
        return;
    }
    attend(engine, session_id, sequence_id);
    (void)!kvk_sequence_swap_in(stress->cache, &stress->caller, session_id, sequence_id, &reply,
                                &engine->tables, &error);
}

static void lease(struct engine *engine, uint64_t session_id)
{
    struct stress *stress = engine->stress;
    struct kvk_pin_reply reply;
    struct kvk_error error;
    uint64_t ticket = 0;
    const struct kvk_pin_request request = {
        .session_id = session_id,
        .space_id = stress->space_id,
        .prompt = {.tokens = engine->tokens, .token_count = TOKENS_MAX},
        .ttl_ms = 1 + kvk_random_below(&engine->random, 50),
        .copy_pin = kvk_random_chance(&engine->random, 0.5)};

    if (kvk_lease_pin(stress->cache, &stress->caller, &request, &reply, &engine->tables, &error) !=
            KVK_OK ||
        reply.lease_id == 0) {
        return;
    }
    const struct kvk_transfer_request transfer = {
        .session_id = session_id, .lease_id = reply.lease_id, .block_count = 1};
    (void)!kvk_transfer_begin(stress->cache, &stress->caller, &transfer, &ticket, &engine->tables,
                              &error);
}

/* One sequence's life, or a part of it. */
static void live(struct engine *engine, uint64_t session_id)
{
    struct stress *stress = engine->stress;
    struct kvk_seal_reply sealed;
    struct kvk_error error;
    uint64_t count = kvk_random_between(&engine->random, 1, TOKENS_MAX);

    for (uint32_t i = 0; i < TOKENS_MAX; i++) {
        engine->tokens[i] = i + 1000 * (uint32_t)kvk_random_below(&engine->random, i < 8 ? 1 : 3);
    }
    uint64_t id = open_sequence(engine, session_id, count);
    if (id == 0) {
        return;
    }
    const struct kvk_seal_request seal = {.session_id = session_id,
                                          .sequence_id = id,
                                          .expected_length = count,
                                          .length = count,
                                          .all_ranks = true};
    if (kvk_random_chance(&engine->random, 0.8)) {
        (void)!kvk_sequence_seal(stress->cache, &stress->caller, &seal, &sealed, &error);
    }
    attend(engine, session_id, id);
    if (kvk_random_chance(&engine->random, 0.5)) {
        swap(engine, session_id, id);
    }
    if (kvk_random_chance(&engine->random, 0.3)) {
        lease(engine, session_id);
    }
    if (kvk_random_chance(&engine->random, 0.5)) {
        struct kvk_close_reply closed;
        (void)!kvk_sequence_close(stress->cache, &stress->caller, session_id, &id, 1, &closed,
                                  &error);
    }
}

/* A rank of the same instance, in a thread of its own: both ends may come at any time. */
struct rank {
    struct engine engine;
    struct kvk_welcome instance;
};

static void *run_rank(void *argument)
{
    struct rank *rank = argument;
    struct kvk_welcome welcome;

    if (begin(&rank->engine, &rank->instance, 1, &welcome)) {
        for (int i = 0; i < 3; i++) {
            live(&rank->engine, welcome.session_id);
        }
        kvk_session_end(rank->engine.stress->cache, welcome.session_id);
    }
    kvk_tables_finish(&rank->engine.tables);
    return NULL;
}

static void *run_engine(void *argument)
{
    struct engine *engine = argument;
    struct stress *stress = engine->stress;

    while (!stress->stop) {
        struct rank rank;
        pthread_t thread;

        if (!begin(engine, NULL, 0, &engine->welcome)) {
            continue;
        }
        engine->side = -1;
        if (kvk_random_chance(&engine->random, 0.5)) {
            map(engine);
        }
        memset(&rank, 0, sizeof(rank));
        rank.engine.stress = stress;
        rank.instance = engine->welcome;
        kvk_random_init(&rank.engine.random, kvk_random_next(&engine->random));
        int result = pthread_create(&thread, NULL, run_rank, &rank);
        KVK_ASSERT(result == 0);
        for (uint64_t i = kvk_random_below(&engine->random, 6); i > 0; i--) {
            live(engine, engine->welcome.session_id);
        }
        bool hang_up_first = engine->side >= 0 && kvk_random_chance(&engine->random, 0.5);
        if (hang_up_first) {
            (void)close(engine->side);
        }
        kvk_session_end(stress->cache, engine->welcome.session_id);
        if (engine->side >= 0 && !hang_up_first) {
            (void)close(engine->side);
        }
        result = pthread_join(thread, NULL);
        KVK_ASSERT(result == 0);
        atomic_fetch_add(&stress->rounds, 1);
    }
    kvk_tables_finish(&engine->tables);
    return NULL;
}

/* ---- Those who look on ---- */

static void count_stat(void *context, const char *name, double value)
{
    (void)context;
    KVK_ASSERT(strncmp(name, "kvkeep_", 7) == 0);
    KVK_ASSERT(value >= 0);
}

static void report_all(struct stress *stress)
{
    const struct kvk_view all = {.size = 0};
    struct kvk_error error;
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    struct kvk_group_report *groups = NULL;
    struct kvk_space_report *spaces = NULL;
    struct kvk_sequence_report *sequences = NULL;
    struct kvk_lease_report *leases = NULL;
    struct kvk_session_report *sessions = NULL;
    static struct kvk_refusal refusals[64];
    char advice[512];
    uint32_t count = 0;
    bool more = false;

    bare_must(
        kvk_report_occupancy(stress->cache, &stress->caller, all, tiers, &groups, &count, &error),
        &error);
    for (int tier = 0; tier < KVK_TIER_COUNT; tier++) {
        KVK_ASSERT(tiers[tier].used_bytes + tiers[tier].free_bytes == tiers[tier].limit_bytes);
        KVK_ASSERT(tiers[tier].active_bytes <= tiers[tier].used_bytes);
    }
    free(groups);
    bare_must(kvk_report_spaces(stress->cache, &stress->caller, all, &spaces, &count, &error),
              &error);
    kvk_report_spaces_free(spaces, count);
    bare_must(kvk_report_sequences(stress->cache, &stress->caller, all, 0, 10, &sequences, &count,
                                   &more, &error),
              &error);
    free(sequences);
    bare_must(kvk_report_leases(stress->cache, &stress->caller, all, 0, 10, &leases, &count, &more,
                                &error),
              &error);
    free(leases);
    bare_must(kvk_report_sessions(stress->cache, &stress->caller, all, &sessions, &count, &error),
              &error);
    free(sessions);
    bare_must(kvk_report_why(stress->cache, &stress->caller, all, 0, refusals, 64, &count, tiers,
                             advice, sizeof(advice), &error),
              &error);
    kvk_report_stats(stress->cache, count_stat, NULL);
}

static void *run_reports(void *argument)
{
    struct stress *stress = argument;
    const struct timespec pause = {.tv_nsec = 1000000};

    while (!stress->stop) {
        report_all(stress);
        kvk_cache_check(stress->cache);
        (void)nanosleep(&pause, NULL);
    }
    return NULL;
}

/* ---- The house ---- */

static struct kvk_device *device_open(void)
{
    const struct kvk_device_cpu_options options = {.attend_thread_count = 2, .window_bytes = 4096};
    struct kvk_device *device = NULL;
    struct kvk_error error;
    bare_must(kvk_device_cpu_open(&options, &device, &error), &error);
    return device;
}

static void house_open(struct stress *stress)
{
    struct kvk_error error;
    const struct kvk_geometry geometry = {.layers = 1,
                                          .kv_heads = 2,
                                          .head_size_k = HEAD_SIZE,
                                          .head_size_v = HEAD_SIZE,
                                          .block_tokens = 4,
                                          .format_k = KVK_FORMAT_FP32,
                                          .format_v = KVK_FORMAT_FP32,
                                          .layout = KVK_LAYOUT_HEADS_FIRST,
                                          .attention = KVK_ATTENTION_SELF,
                                          .tensor_shards = 1,
                                          .pipeline_shards = 1};
    struct kvk_space_request request = {.block_tokens = 4, .groups = {geometry}, .group_count = 1};
    struct kvk_space_reply reply;

    kvk_config_init(&stress->config);
    stress->config.device_bytes = 100 * 512;
    stress->config.host_bytes = 200 * 512;
    stress->config.blocks = 65536;
    stress->config.tokens = 4096;
    stress->config.sequences = 1024;
    stress->config.leases = 1024;
    stress->config.transfers = 1024;
    bare_must(kvk_tenants_create(&stress->config, &stress->tenants, &error), &error);
    const struct kvk_cache_options options = {.config = &stress->config,
                                              .tenants = stress->tenants,
                                              .device = device_open(),
                                              .host_device = device_open(),
                                              .threads = true};
    bare_must(kvk_cache_create(&options, &stress->cache, &error), &error);
    stress->caller =
        (struct kvk_caller){.call = "Stress", .may_block = true, .deadline_ns = UINT64_MAX};
    bare_must(kvk_tenants_authenticate(stress->tenants, NULL, 0, true, (uint32_t)geteuid(),
                                       &stress->caller.credential, &error),
              &error);
    (void)snprintf(stress->side_path, sizeof(stress->side_path), "/tmp/kvkeep-stress-%d.side",
                   (int)getpid());
    bare_must(
        kvk_side_socket_create(stress->cache, stress->side_path, 0600, 64, &stress->side, &error),
        &error);
    request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){.data = (const uint8_t *)"model", .size = 5};
    bare_must(kvk_space_open(stress->cache, &stress->caller, &request, &reply, &error), &error);
    stress->space_id = reply.space_id;
}

int main(void)
{
    static struct stress stress;
    static struct engine engines[ENGINE_THREADS];
    pthread_t threads[ENGINE_THREADS + 1];

    kvk_log_set_level(KVK_LOG_ERROR);
    house_open(&stress);
    for (uint32_t i = 0; i < ENGINE_THREADS; i++) {
        engines[i].stress = &stress;
        engines[i].number = i;
        kvk_random_init(&engines[i].random, i);
        int result = pthread_create(&threads[i], NULL, run_engine, &engines[i]);
        KVK_ASSERT(result == 0);
    }
    int result = pthread_create(&threads[ENGINE_THREADS], NULL, run_reports, &stress);
    KVK_ASSERT(result == 0);
    const struct timespec time = {.tv_sec = SECONDS};
    (void)nanosleep(&time, NULL);
    stress.stop = true;
    for (uint32_t i = 0; i <= ENGINE_THREADS; i++) {
        result = pthread_join(threads[i], NULL);
        KVK_ASSERT(result == 0);
    }
    (void)printf("rounds=%llu attended=%llu mapped=%llu notices=%llu\n",
                 (unsigned long long)stress.rounds, (unsigned long long)stress.attended,
                 (unsigned long long)stress.mapped, (unsigned long long)stress.notices);
    KVK_ASSERT(stress.rounds > 10);
    KVK_ASSERT(stress.attended > 10);
    KVK_ASSERT(stress.mapped > 0);
    kvk_cache_check(stress.cache);
    kvk_side_socket_destroy(stress.side);
    kvk_cache_destroy(stress.cache); /* asserts that nothing is left */
    kvk_tenants_destroy(stress.tenants);
    kvk_config_finish(&stress.config);
    return 0;
}
