/*
 * Three engines that share one Redis server, each under load from threads of its own over pools
 * that are too small, while values are scribbled over, deleted and swapped, the server stands
 * still, dies and comes back empty, and spaces and prefixes are invalidated.
 *
 * What a block holds follows from the tokens before it and from how often its space has been
 * invalidated: so whoever reads can tell a wrong byte, and one that should have been forgotten.
 *
 *     test_cluster_engine_load [SECONDS]
 *
 * Skipped (77) where redis-server is not installed.
 */
#include <arpa/inet.h>
#include <ftw.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/remote_internal.h"

enum {
    NODES = 3,
    THREADS = 2, /* of each */
    BLOCK_TOKENS = 4,
    BLOCKS_MAX = 24,
    TOKENS_MAX = BLOCKS_MAX * BLOCK_TOKENS,
    VOCABULARY = 3,
    GENERATION_MS = 500,
};

struct node {
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_caller caller;
    uint64_t space;
    uint64_t block_bytes;
};

struct worker {
    struct node *node;
    struct kvk_random random;
    uint64_t session;
    pthread_t thread;
};

static struct {
    char folder[64];
    unsigned port;
    pid_t server;
    struct node nodes[NODES];
    struct worker workers[NODES * THREADS];
    _Atomic bool stop;
    _Atomic uint64_t version; /* of what is computed now */
    _Atomic uint64_t least;   /* that may still be found: raised when an invalidation has ended */
    _Atomic uint64_t opened, read, waited, invalidated;
} house;

/* ---- The server ---- */

static int KVK_PRINTF(1, 2) command(const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    int code = system(text); /* NOLINT(cert-env33-c): of this test's own making */
    return WIFEXITED(code) ? WEXITSTATUS(code) : 1;
}

static bool port_answers(unsigned port)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool answers = fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof(address)) == 0;
    (void)close(fd);
    return answers;
}

static void server_run(void)
{
    char port[16];
    (void)snprintf(port, sizeof(port), "%u", house.port);
    house.server = fork();
    KVK_ASSERT(house.server >= 0);
    if (house.server == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)execlp("redis-server", "redis-server", "--port", port, "--bind", "127.0.0.1",
                     "--save", "", "--dir", house.folder, "--logfile", "log", (char *)NULL);
        _exit(127);
    }
    for (int i = 0; i < 2000 && !port_answers(house.port); i++) {
        (void)usleep(5000);
    }
    KVK_ASSERT(port_answers(house.port));
}

static void server_kill(void)
{
    (void)kill(house.server, SIGKILL);
    (void)waitpid(house.server, NULL, 0);
}

static void house_open(void)
{
    struct kvk_random random;
    kvk_random_init(&random, (uint64_t)getpid());
    do {
        house.port = (unsigned)kvk_random_between(&random, 20000, 32000);
    } while (port_answers(house.port));
    (void)snprintf(house.folder, sizeof(house.folder), "/tmp/kvkeep-load-%d", (int)getpid());
    KVK_ASSERT(mkdir(house.folder, 0700) == 0);
    KVK_ASSERT(command("umask 077; openssl rand -hex 32 >%s/key", house.folder) == 0);
    server_run();
}

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
    (void)snprintf(path, sizeof(path), "%s/scribble.lua", house.folder);
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
    (void)command("redis-cli -p %u --eval %s >/dev/null 2>&1", house.port, path);
}

/* ---- Prompts and their bytes ---- */

static uint32_t prompt_make(struct kvk_random *random, uint32_t tokens[TOKENS_MAX])
{
    uint32_t blocks = (uint32_t)kvk_random_between(random, 1, BLOCKS_MAX);
    memset(tokens, 0, TOKENS_MAX * sizeof(*tokens));
    for (uint32_t b = 0; b < blocks; b++) {
        tokens[b * BLOCK_TOKENS] = (uint32_t)kvk_random_below(random, b % 5 == 0 ? VOCABULARY : 1);
    }
    return blocks;
}

/* The block's first word is the version, the others follow from it and the chain. */
static uint64_t block_word(const uint32_t *tokens, uint64_t block, uint64_t version)
{
    uint64_t word = UINT64_C(0x9e3779b97f4a7c15) * (version + 1);
    for (uint64_t i = 0; i < (block + 1) * BLOCK_TOKENS; i++) {
        word = (word ^ tokens[i]) * 0x100000001b3 + block;
    }
    return word;
}

static void block_fill(uint64_t *bytes, uint64_t size, uint64_t word, uint64_t version)
{
    bytes[0] = version;
    for (uint64_t i = 1; i < size / sizeof(*bytes); i++) {
        bytes[i] = word + i;
    }
}

static void block_expect(const uint8_t *bytes, uint64_t size, const uint32_t *tokens,
                         uint64_t block, uint64_t least)
{
    uint64_t version;
    memcpy(&version, bytes, sizeof(version));
    if (version < least) {
        (void)fprintf(stderr, "a block of version %llu, after %llu was the least\n",
                      (unsigned long long)version, (unsigned long long)least);
        abort();
    }
    uint64_t word = block_word(tokens, block, version);
    for (uint64_t i = 1; i < size / sizeof(word); i++) {
        uint64_t value;
        memcpy(&value, bytes + i * sizeof(value), sizeof(value));
        KVK_ASSERT(value == word + i);
    }
}

/* ---- Load ---- */

static bool went_well(enum kvk_status status, const struct kvk_error *error)
{
    if (status != KVK_OK && status != KVK_EXHAUSTED && status != KVK_DEADLINE &&
        status != KVK_UNAVAILABLE) {
        (void)fprintf(stderr, "status %s: %s\n", kvk_status_name(status), error->text);
        KVK_UNREACHABLE();
    }
    return status == KVK_OK;
}

static struct kvk_caller caller_of(const struct node *node)
{
    struct kvk_caller caller = node->caller;
    caller.deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + 5 * KVK_NS_PER_SECOND;
    return caller;
}

/* As a worker that would rather wait than compute, for a while. */
static void look_up(struct worker *worker, const struct kvk_prompt *prompt)
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
        atomic_fetch_add(&house.waited, 1);
        (void)usleep(2000);
    }
}

static void read_all(struct worker *worker, uint64_t sequence, const uint32_t *tokens,
                     uint64_t blocks, uint64_t least)
{
    struct kvk_caller caller = caller_of(worker->node);
    for (uint64_t b = 0; b < blocks; b++) {
        const struct kvk_read_request request = {
            .session_id = worker->session, .sequence_id = sequence, .block = b};
        const uint8_t *data;
        uint64_t size;
        struct kvk_read_handle handle;
        struct kvk_error error;
        enum kvk_status status =
            kvk_read_begin(worker->node->cache, &caller, &request, &data, &size, &handle, &error);
        if (went_well(status, &error)) {
            block_expect(data, size, tokens, b, least);
            kvk_read_end(worker->node->cache, &handle);
            atomic_fetch_add(&house.read, 1);
        }
    }
}

static void write_rest(struct worker *worker, uint64_t sequence, const uint32_t *tokens,
                       uint64_t first, uint64_t blocks)
{
    struct node *node = worker->node;
    struct kvk_caller caller = caller_of(node);
    struct kvk_error error;
    uint64_t *bytes = malloc(node->block_bytes);
    uint64_t version = atomic_load(&house.version);
    KVK_ASSERT(bytes != NULL);
    for (uint64_t b = first; b < blocks; b++) {
        block_fill(bytes, node->block_bytes, block_word(tokens, b, version), version);
        const struct kvk_write_piece piece = {
            .block = b, .data = (const uint8_t *)bytes, .size_bytes = node->block_bytes};
        KVK_ASSERT(went_well(
            kvk_sequence_write(node->cache, &caller, worker->session, sequence, &piece, &error),
            &error));
    }
    free(bytes);
    const struct kvk_seal_request seal = {.session_id = worker->session,
                                          .sequence_id = sequence,
                                          .expected_length = blocks * BLOCK_TOKENS,
                                          .length = blocks * BLOCK_TOKENS,
                                          .all_ranks = true};
    struct kvk_seal_reply reply;
    (void)went_well(kvk_sequence_seal(node->cache, &caller, &seal, &reply, &error), &error);
}

static void do_sequence(struct worker *worker)
{
    struct node *node = worker->node;
    struct kvk_caller caller = caller_of(node);
    uint32_t tokens[TOKENS_MAX];
    uint32_t blocks = prompt_make(&worker->random, tokens);
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    struct kvk_error error;
    const struct kvk_open_request request = {
        .session_id = worker->session,
        .space_id = node->space,
        .prompt = {.tokens = tokens, .token_count = (uint64_t)blocks * BLOCK_TOKENS},
        .tier = -1};
    if (kvk_random_chance(&worker->random, 0.7)) {
        look_up(worker, &request.prompt);
    }
    uint64_t least = atomic_load(&house.least);
    enum kvk_status status =
        kvk_sequence_open(node->cache, &caller, &request, &reply, &tables, &error);
    kvk_tables_finish(&tables);
    if (!went_well(status, &error)) {
        return;
    }
    uint64_t id = reply.sequence_id;
    uint64_t cached = reply.cached_tokens / BLOCK_TOKENS;
    atomic_fetch_add(&house.opened, 1);
    read_all(worker, id, tokens, cached, least);
    write_rest(worker, id, tokens, cached, blocks);
    struct kvk_close_reply closed;
    status = kvk_sequence_close(node->cache, &caller, worker->session, &id, 1, &closed, &error);
    KVK_ASSERT(status == KVK_OK);
}

static void *worker_main(void *argument)
{
    struct worker *worker = argument;
    while (!atomic_load(&house.stop)) {
        do_sequence(worker);
    }
    return NULL;
}

/* A whole space, on any node; what is computed from its beginning on is of the next version. What
 * was computed before is found nowhere once it has ended, if the store was in reach. */
static void invalidate(struct kvk_random *random)
{
    struct node *node = &house.nodes[kvk_random_below(random, NODES)];
    const struct kvk_invalidate_request request = {.space_id = node->space};
    struct kvk_invalidate_reply reply;
    struct kvk_error error;
    uint64_t version = atomic_fetch_add(&house.version, 1) + 1;
    if (went_well(kvk_invalidate(node->cache, &node->caller, &request, &reply, &error), &error) &&
        reply.store_pending == 0) {
        (void)usleep(GENERATION_MS *
                     2000); /* for threads of others that the machine kept waiting */
        atomic_store(&house.least, version);
        atomic_fetch_add(&house.invalidated, 1);
    }
}

/* ---- Nodes ---- */

static void node_start(struct node *node)
{
    const struct kvk_credential *credential;
    struct kvk_error error;
    const struct kvk_device_cpu_options device_options = {.attend_thread_count = 1};
    struct kvk_device *device;
    kvk_config_init(&node->config);
    node->config.device_bytes = 0;
    node->config.host_bytes = UINT64_C(4) << 20; /* 128 blocks */
    node->config.blocks = 512;
    node->config.tokens = 4096;
    node->config.scrub_interval_ms = 1;
    struct kvk_remote_config *remote = &node->config.remote;
    (void)snprintf(remote->seeds, sizeof(remote->seeds), "127.0.0.1:%u", house.port);
    (void)snprintf(remote->key_file, sizeof(remote->key_file), "%s/key", house.folder);
    remote->admit_uses = 1;
    remote->fetch_tokens = 1;
    remote->generation_ms = GENERATION_MS;
    remote->node_timeout_ms = 300;
    remote->fetch_ms = remote->store_ms = 1000;
    KVK_ASSERT(kvk_tenants_create(&node->config, &node->tenants, &error) == KVK_OK);
    KVK_ASSERT(kvk_device_cpu_open(&device_options, &device, &error) == KVK_OK);
    const struct kvk_cache_options options = {
        .config = &node->config, .tenants = node->tenants, .host_device = device, .threads = true};
    KVK_ASSERT(kvk_cache_create(&options, &node->cache, &error) == KVK_OK);
    KVK_ASSERT(kvk_tenants_authenticate(node->tenants, NULL, 0, true, (uint32_t)geteuid(),
                                        &credential, &error) == KVK_OK);
    node->caller = (struct kvk_caller){
        .credential = credential, .call = "Load", .may_block = true, .deadline_ns = UINT64_MAX};
    struct kvk_space_request request = {.block_tokens = BLOCK_TOKENS, .group_count = 1};
    request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){.data = (const uint8_t *)"model", .size = 5};
    /* Opaque: computed again, a block of the next version is no mistake of somebody's. */
    request.groups[0] = (struct kvk_geometry){.layers = 1,
                                              .kv_heads = 1,
                                              .head_size_k = 1,
                                              .head_size_v = 1,
                                              .block_tokens = BLOCK_TOKENS,
                                              .format_k = KVK_FORMAT_FP32,
                                              .format_v = KVK_FORMAT_FP32,
                                              .layout = KVK_LAYOUT_OPAQUE,
                                              .opaque_bytes = 32768,
                                              .attention = KVK_ATTENTION_SELF,
                                              .tensor_shards = 1,
                                              .pipeline_shards = 1};
    struct kvk_space_reply reply;
    KVK_ASSERT(kvk_space_open(node->cache, &node->caller, &request, &reply, &error) == KVK_OK);
    node->space = reply.space_id;
    node->block_bytes = reply.groups[0].block_bytes;
    struct kvk_remote_report report;
    do { /* one after the other: the next learns its number */
        (void)usleep(5000);
        kvk_lock(&node->cache->lock);
        kvk_remote_report(node->cache, &report);
        kvk_unlock(&node->cache->lock);
    } while (report.spaces_out > 0);
}

static void node_stop(struct node *node)
{
    kvk_cache_quiesce(node->cache);
    kvk_cache_check(node->cache);
    kvk_cache_destroy(node->cache);
    kvk_tenants_destroy(node->tenants);
    kvk_config_finish(&node->config);
}

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *place)
{
    (void)status;
    (void)kind;
    (void)place;
    return remove(path);
}

static void trouble(struct kvk_random *random)
{
    switch (kvk_random_below(random, 8)) {
    case 0:
        (void)kill(house.server, SIGSTOP);
        (void)usleep(400000);
        (void)kill(house.server, SIGCONT);
        break;
    case 1:
        server_kill();
        (void)usleep(200000);
        server_run();
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
        struct kvk_cache *cache = house.nodes[i].cache;
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
                 (unsigned long long)house.opened, (unsigned long long)house.read,
                 (unsigned long long)house.waited, (unsigned long long)house.invalidated,
                 (unsigned long long)sent, (unsigned long long)fetched, (unsigned long long)wrong);
    KVK_ASSERT(house.read > 0 && sent > 0 && fetched > 0);
}

int main(int count, char **arguments)
{
    unsigned seconds = count > 1 ? (unsigned)atoi(arguments[1]) : 8;
    if (command("command -v redis-server >/dev/null && command -v redis-cli >/dev/null") != 0) {
        (void)fprintf(stderr, "skipped: redis-server is not installed\n");
        return 77;
    }
    kvk_log_set_level(KVK_LOG_ERROR);
    (void)signal(SIGPIPE, SIG_IGN);
    house_open();
    for (int i = 0; i < NODES; i++) {
        node_start(&house.nodes[i]);
    }
    for (uint32_t i = 0; i < NODES * THREADS; i++) {
        struct worker *worker = &house.workers[i];
        struct kvk_welcome welcome;
        struct kvk_error error;
        const struct kvk_hello hello = {
            .local = true, .pid = (int32_t)getpid(), .uid = (uint32_t)geteuid(), .pidfd = -1};
        worker->node = &house.nodes[i % NODES];
        KVK_ASSERT(kvk_session_begin(worker->node->cache, &worker->node->caller, &hello, &welcome,
                                     &error) == KVK_OK);
        worker->session = welcome.session_id;
        kvk_random_init(&worker->random, i + 1);
        KVK_ASSERT(pthread_create(&worker->thread, NULL, worker_main, worker) == 0);
    }
    struct kvk_random random;
    kvk_random_init(&random, (uint64_t)getpid());
    uint64_t end_ns = kvk_clock_now(kvk_clock_monotonic()) + seconds * KVK_NS_PER_SECOND;
    while (kvk_clock_now(kvk_clock_monotonic()) < end_ns) {
        (void)usleep(300000);
        trouble(&random);
    }
    atomic_store(&house.stop, true);
    for (uint32_t i = 0; i < NODES * THREADS; i++) {
        pthread_join(house.workers[i].thread, NULL);
    }
    report_all();
    for (int i = 0; i < NODES; i++) {
        node_stop(&house.nodes[i]);
    }
    server_kill();
    (void)nftw(house.folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return 0;
}
