/*
 * Three engines that share one Redis server, each under load from threads of its own over pools
 * that are too small, while values are scribbled over, deleted and swapped, the server stands
 * still, dies and comes back empty, and spaces and prefixes are invalidated.
 *
 *     test_cluster_engine_load [SECONDS]
 *
 * Skipped (77) where redis-server is not installed.
 */
#include "tests/remote_load.h"

enum {
    NODES = 3,
    THREADS = 2, /* of each */
    GENERATION_MS = 500,
};

static struct load load;
static struct load_node nodes[NODES];
static struct load_worker workers[NODES * THREADS];
static uint64_t invalidated;

/* A script over names of blocks, a random third of them. */
static void scribble(struct kvk_random *random)
{
    static const char *const scripts[] = {
        "redis.call('SETRANGE', k, math.random(0, 500), 'scribble')",
        "redis.call('DEL', k)",
        "if last then redis.call('SET', last, redis.call('GET', k)) end last = k",
        "redis.call('SET', k, string.sub(redis.call('GET', k), 1, math.random(0, 300)))",
    };
    char path[96];
    (void)snprintf(path, sizeof(path), "%s/scribble.lua", load.server.folder);
    FILE *file = fopen(path, "w");
    KVK_ASSERT(file != NULL);
    (void)fprintf(file,
                  "local last = nil\nmath.randomseed(%u)\n"
                  "for _, k in ipairs(redis.call('KEYS', 'kvkeep:*')) do\n"
                  "if math.random(3) == 1 and redis.call('GETRANGE', k, 0, 3) == 'KVKR' then\n%s\n"
                  "end end\n",
                  (unsigned)kvk_random_below(random, 1000000),
                  scripts[kvk_random_below(random, sizeof(scripts) / sizeof(scripts[0]))]);
    KVK_ASSERT(fclose(file) == 0);
    (void)remote_command("redis-cli -p %u --eval %s >/dev/null 2>&1", load.server.port, path);
}

/* A whole space, on any node; what is computed from its beginning on is of the next version. What
 * was computed before is found nowhere once it has ended, if the store was in reach. */
static void invalidate(struct kvk_random *random)
{
    struct load_node *node = &nodes[kvk_random_below(random, NODES)];
    const struct kvk_invalidate_request request = {.space_id = node->space};
    struct kvk_invalidate_reply reply;
    struct kvk_error error;
    uint64_t version = atomic_fetch_add(&load.version, 1) + 1;
    if (load_went_well(kvk_invalidate(node->cache, &node->caller, &request, &reply, &error),
                       &error) &&
        reply.store_pending == 0) {
        (void)usleep(GENERATION_MS *
                     2000); /* for threads of others that the machine kept waiting */
        for (int i = 0; i < NODES; i++) {
            atomic_store(&nodes[i].least, version);
        }
        invalidated++;
    }
}

static void trouble(struct kvk_random *random)
{
    switch (kvk_random_below(random, 8)) {
    case 0:
        (void)kill(load.server.pid, SIGSTOP);
        (void)usleep(400000);
        (void)kill(load.server.pid, SIGCONT);
        break;
    case 1:
        remote_server_kill(&load.server);
        (void)usleep(200000);
        remote_server_run(&load.server);
        break;
    case 2:
    case 3:
        invalidate(random);
        break;
    default:
        scribble(random);
        break;
    }
}

static void report_all(void)
{
    uint64_t fetched = 0;
    uint64_t wrong = 0;
    uint64_t sent = 0;
    for (int i = 0; i < NODES; i++) {
        struct kvk_cache *cache = nodes[i].cache;
        struct kvk_remote_report report;
        kvk_lock(&cache->lock);
        kvk_remote_report(cache, &report);
        fetched += report.stats.fetched_blocks;
        sent += report.stats.sent_blocks;
        wrong += report.stats.fetch_failures + report.stats.witness_failures;
        KVK_ASSERT(cache->stats.checksum_failures == 0);
        kvk_unlock(&cache->lock);
    }
    (void)printf("%llu sequences, %llu blocks read, %llu look-ups again, %llu invalidations; "
                 "%llu blocks sent, %llu fetched, %llu were there and did not come\n",
                 (unsigned long long)load.opened, (unsigned long long)load.read,
                 (unsigned long long)load.waited, (unsigned long long)invalidated,
                 (unsigned long long)sent, (unsigned long long)fetched, (unsigned long long)wrong);
    KVK_ASSERT(load.read > 0 && sent > 0 && fetched > 0);
}

int main(int count, char **arguments)
{
    unsigned seconds = count > 1 ? (unsigned)atoi(arguments[1]) : 8;
    if (!load_open(&load)) {
        return 77;
    }
    for (int i = 0; i < NODES; i++) {
        load_node_init(&nodes[i], &load, UINT64_C(4) << 20, GENERATION_MS); /* 128 blocks */
        load_node_start(&nodes[i], 32768);
    }
    for (uint32_t i = 0; i < NODES * THREADS; i++) {
        load_worker_start(&workers[i], &nodes[i % NODES], i + 1, load_worker_main);
    }
    struct kvk_random random;
    kvk_random_init(&random, (uint64_t)getpid());
    uint64_t end_ns = kvk_clock_now(kvk_clock_monotonic()) + seconds * KVK_NS_PER_SECOND;
    while (kvk_clock_now(kvk_clock_monotonic()) < end_ns) {
        (void)usleep(300000);
        trouble(&random);
    }
    atomic_store(&load.stop, true);
    for (uint32_t i = 0; i < NODES * THREADS; i++) {
        pthread_join(workers[i].thread, NULL);
    }
    report_all();
    for (int i = 0; i < NODES; i++) {
        load_node_stop(&nodes[i]);
    }
    remote_server_stop(&load.server);
    return 0;
}
