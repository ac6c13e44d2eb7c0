/*
 * The remote store under many threads: two engines share one Redis server, and send to it and fetch
 * from it all the time, while spaces and prefixes are invalidated, other spaces are opened,
 * invalidated and given up as fast as they go, and operators ask. Once in the middle all
 * connections are cut, and the server is killed and comes back empty; the store is used again by
 * itself.
 *
 * Every byte that is read is compared (tests/remote_load.h). At the end every law holds, and with
 * all invalidated all is free.
 *
 *     test_stress_engine_remote [SECONDS]
 *
 * Skipped (77) where redis-server is not installed.
 */
#include "daemon/fleet_view.h"
#include "daemon/report_remote.h"
#include "tests/patience.h"
#include "tests/remote_load.h"

enum {
    NODES = 2,
    THREADS = 2,  /* of each */
    OPENERS = 2,  /* of the first node's other spaces */
    SPACES = 5,   /* that there is room for */
    MODELS = 8,   /* that are opened by turns */
    BLOCKS = 128, /* of a host tier */
    BLOCK_BYTES = 4096,
    GENERATION_MS = 300,
    OPEN_US = 300,
};

static struct load load;
static struct load_node nodes[NODES];
static struct load_worker workers[NODES * THREADS];
static struct load_worker openers[OPENERS];
static struct load_worker operator;
static _Atomic uint64_t spaces_opened, spaces_filled, spaces_invalidated;
static uint64_t invalidated;

/* ---- Other spaces ---- */

static const char *const models[MODELS] = {"a", "b", "c", "d", "e", "f", "g", "h"};

static const struct kvk_view others = {.data = (const uint8_t *)"others", .size = 6};

/* Whoever opens it, others may have it given up again before it is used. */
static void space_fill(struct load_worker *worker, uint64_t space)
{
    struct load_node *node = worker->node;
    struct kvk_caller caller = load_caller(node);
    uint32_t tokens[LOAD_TOKENS_MAX];
    uint32_t blocks = load_prompt(&worker->random, tokens) / 8 + 1;
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    struct kvk_close_reply closed;
    struct kvk_error error;
    const struct kvk_open_request request = {
        .session_id = worker->session,
        .space_id = space,
        .prompt = {.tokens = tokens, .token_count = (uint64_t)blocks * LOAD_BLOCK_TOKENS},
        .tier = -1};
    enum kvk_status status =
        kvk_sequence_open(node->cache, &caller, &request, &reply, &tables, &error);
    kvk_tables_finish(&tables);
    if (status == KVK_NOT_FOUND || !load_went_well(status, &error)) {
        return;
    }
    uint64_t cached = reply.cached_tokens / LOAD_BLOCK_TOKENS;
    load_read_all(worker, reply.sequence_id, tokens, cached, 0);
    load_write_rest(worker, reply.sequence_id, tokens, cached, blocks);
    status = kvk_sequence_close(node->cache, &caller, worker->session, &reply.sequence_id, 1,
                                &closed, &error);
    KVK_ASSERT(status == KVK_OK);
    atomic_fetch_add(&spaces_filled, 1);
}

/* All of them by their name: so they are found also while somebody opens them. */
static void others_invalidate(const struct load_node *node)
{
    const struct kvk_caller caller = load_caller(node);
    const struct kvk_invalidate_request request = {.revision = others};
    struct kvk_invalidate_reply reply;
    struct kvk_error error;
    if (load_went_well(kvk_invalidate(node->cache, &caller, &request, &reply, &error), &error)) {
        atomic_fetch_add(&spaces_invalidated, reply.spaces);
    }
}

static void operator_ask(const struct load_node *node)
{
    const struct kvk_caller caller = load_caller(node);
    struct kvk_remote_report report;
    struct kvk_fleet_view view;
    struct kvk_error error;
    kvk_remote_report_unlocked(node->cache, &report);
    KVK_ASSERT(report.present && report.spaces <= SPACES && report.spaces_out <= report.spaces);
    if (load_went_well(kvk_fleet_view(node->cache, &caller, &view, &error), &error)) {
        free(view.nodes);
    }
}

static void *opener_main(void *argument)
{
    struct load_worker *worker = argument;
    while (!atomic_load(&load.stop)) {
        (void)usleep(OPEN_US); /* who asks without a pause has the lock nearly always */
        const char *model = models[kvk_random_below(&worker->random, MODELS)];
        struct kvk_space_request request = load_space(model, BLOCK_BYTES);
        request.identity.parts[KVK_IDENTITY_REVISION - 1] = others;
        const struct kvk_caller caller = load_caller(worker->node);
        struct kvk_space_reply reply;
        struct kvk_error error;
        if (load_went_well(kvk_space_open(worker->node->cache, &caller, &request, &reply, &error),
                           &error)) {
            atomic_fetch_add(&spaces_opened, reply.created ? 1 : 0);
            if (kvk_random_chance(&worker->random, 0.008)) {
                space_fill(worker, reply.space_id);
            }
        }
    }
    return NULL;
}

static void *operator_main(void *argument)
{
    struct load_worker *worker = argument;
    while (!atomic_load(&load.stop)) {
        others_invalidate(worker->node);
        operator_ask(&nodes[kvk_random_below(&worker->random, NODES)]);
    }
    return NULL;
}

/* ---- The space of both nodes ---- */

#define UNTIL(condition)                                                                           \
    do {                                                                                           \
        for (int tries_ = 0; tries_ < PATIENCE_MS / 5 && !(condition); tries_++) {                 \
            (void)usleep(5000);                                                                    \
        }                                                                                          \
        KVK_ASSERT(condition);                                                                     \
    } while (0)

/* On one node; the other one hears of it. Of a whole space, nothing of before is found any more on
 * either. */
static void invalidate(struct kvk_random *random)
{
    uint32_t tokens[LOAD_TOKENS_MAX];
    uint32_t first = (uint32_t)kvk_random_below(random, NODES);
    struct load_node *node = &nodes[first];
    struct load_node *other = &nodes[1 - first];
    uint64_t blocks = load_prompt(random, tokens);
    const struct kvk_prompt prefix = {.tokens = tokens, .token_count = blocks * LOAD_BLOCK_TOKENS};
    bool whole = kvk_random_chance(random, 0.5);
    const struct kvk_invalidate_request request = {.space_id = node->space,
                                                   .prefix = whole ? NULL : &prefix};
    struct kvk_invalidate_reply reply;
    struct kvk_error error;
    uint64_t learned = load_report(other).fleet.learned;
    uint64_t version = atomic_fetch_add(&load.version, whole ? 1 : 0) + 1;
    enum kvk_status status = kvk_invalidate(node->cache, &node->caller, &request, &reply, &error);
    if (!load_went_well(status, &error)) {
        return;
    }
    if (whole) {
        atomic_store(&node->least, version);
    }
    UNTIL(load_report(other).fleet.learned > learned);
    if (whole) {
        atomic_store(&other->least, version);
    }
    invalidated++;
}

struct passed {
    uint64_t sent, fetched;
};

static struct passed passed_now(void)
{
    struct passed passed = {.sent = 0};
    for (int i = 0; i < NODES; i++) {
        const struct kvk_remote_stats stats = load_report(&nodes[i]).stats;
        passed.sent += stats.sent_blocks;
        passed.fetched += stats.fetched_blocks;
    }
    return passed;
}

static bool both_passed(const struct passed *since)
{
    struct passed now = passed_now();
    return now.sent > since->sent && now.fetched > since->fetched;
}

static void run_for(struct kvk_random *random, uint64_t ms)
{
    uint64_t end_ns = kvk_clock_now(kvk_clock_monotonic()) + ms * KVK_NS_PER_MS;
    const struct passed before = passed_now();
    while (kvk_clock_now(kvk_clock_monotonic()) < end_ns) {
        (void)usleep(200000);
        invalidate(random);
    }
    UNTIL(both_passed(&before));
}

/* ---- The whole ---- */

/* One with it open is in use: it is not given up while it is empty. */
static uint64_t sequence_keep(const struct load_worker *worker)
{
    static const uint32_t tokens[LOAD_BLOCK_TOKENS];
    struct load_node *node = worker->node;
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    struct kvk_error error;
    const struct kvk_open_request request = {
        .session_id = worker->session,
        .space_id = node->space,
        .prompt = {.tokens = tokens, .token_count = LOAD_BLOCK_TOKENS},
        .tier = -1};
    enum kvk_status status =
        kvk_sequence_open(node->cache, &node->caller, &request, &reply, &tables, &error);
    KVK_ASSERT(status == KVK_OK);
    kvk_tables_finish(&tables);
    return reply.sequence_id;
}

/* What lies in tiers is nobody's any more: it all comes back. */
static void empty(struct load_node *node)
{
    const struct kvk_invalidate_request all = {.space_id = 0};
    struct kvk_invalidate_reply reply;
    struct kvk_error error;
    enum kvk_status status = kvk_invalidate(node->cache, &node->caller, &all, &reply, &error);
    KVK_ASSERT(status == KVK_OK);
    bool quiet = false;
    for (int i = 0; i < PATIENCE_MS / 5 && !quiet; i++) {
        (void)usleep(5000);
        kvk_lock(&node->cache->lock);
        quiet = node->cache->passing_holds == 0 && !node->cache->purge_wanted &&
                node->cache->tiers[KVK_TIER_HOST].used_bytes == 0;
        kvk_unlock(&node->cache->lock);
    }
    KVK_ASSERT(quiet);
    KVK_ASSERT(node->cache->stats.checksum_failures == 0);
    KVK_ASSERT(node->cache->stats.wrong_reuse == 0);
}

static uint64_t all_start(void)
{
    for (int i = 0; i < NODES; i++) {
        load_node_init(&nodes[i], &load, (uint64_t)BLOCKS * BLOCK_BYTES, GENERATION_MS);
        nodes[i].config.spaces = SPACES;
        nodes[i].config.tenant_percent = 100;
        load_node_start(&nodes[i], BLOCK_BYTES);
    }
    for (uint32_t i = 0; i < NODES * THREADS; i++) {
        load_worker_start(&workers[i], &nodes[i % NODES], i + 1, load_worker_main);
    }
    load_worker_start(&operator, & nodes[0], 200, operator_main);
    uint64_t kept = sequence_keep(&operator); /* before there are others to make room for */
    for (uint32_t i = 0; i < OPENERS; i++) {
        load_worker_start(&openers[i], &nodes[0], i + 100, opener_main);
    }
    return kept;
}

static void all_stop(uint64_t kept)
{
    struct kvk_close_reply closed;
    struct kvk_error error;
    atomic_store(&load.stop, true);
    for (uint32_t i = 0; i < NODES * THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    for (uint32_t i = 0; i < OPENERS; i++) {
        pthread_join(openers[i].thread, NULL);
    }
    pthread_join(operator.thread, NULL);
    enum kvk_status status = kvk_sequence_close(nodes[0].cache, &nodes[0].caller, operator.session,
                                                &kept, 1, &closed, &error);
    KVK_ASSERT(status == KVK_OK);
}

int main(int count, char **arguments)
{
    uint64_t seconds = count > 1 ? (uint64_t)atoi(arguments[1]) : 6;
    struct kvk_random random;
    kvk_random_init(&random, (uint64_t)getpid());
    if (!load_open(&load)) {
        return 77;
    }
    uint64_t kept = all_start();
    run_for(&random, seconds * 1000 / 2);
    KVK_ASSERT(remote_command("redis-cli -p %u client kill type normal >/dev/null",
                              load.server.port) == 0);
    (void)usleep(200000);
    remote_server_kill(&load.server);
    (void)usleep(200000);
    remote_server_run(&load.server);
    run_for(&random, seconds * 1000 / 2);
    all_stop(kept);
    struct passed passed = passed_now();
    (void)printf("%llu sequences, %llu blocks read, %llu look-ups again, %llu invalidations; "
                 "%llu blocks sent, %llu fetched; %llu other spaces opened, %llu filled, "
                 "%llu invalidated\n",
                 (unsigned long long)load.opened, (unsigned long long)load.read,
                 (unsigned long long)load.waited, (unsigned long long)invalidated,
                 (unsigned long long)passed.sent, (unsigned long long)passed.fetched,
                 (unsigned long long)spaces_opened, (unsigned long long)spaces_filled,
                 (unsigned long long)spaces_invalidated);
    KVK_ASSERT(passed.sent > 0 && passed.fetched > 0 && load.read > 0 && invalidated > 0);
    KVK_ASSERT(spaces_opened > SPACES && spaces_filled > 0 && spaces_invalidated > 0);
    for (int i = 0; i < NODES; i++) {
        kvk_cache_check(nodes[i].cache);
        empty(&nodes[i]);
        load_node_stop(&nodes[i]);
    }
    remote_server_stop(&load.server);
    return 0;
}
