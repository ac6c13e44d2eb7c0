/*
 * The remote store in the engine: what look-ups of one that is cached here cost without a store,
 * with one that is busy fetching and being sent to, and with one that stands still; and how fast a
 * prompt that another node computed comes, from the look-up to the last block in memory.
 *
 *     bench_remote_engine [--json] [--seconds N]
 *
 * Starts a redis-server of its own, without persistence.
 */
#include <math.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "bench/report.h"
#include "daemon/remote_internal.h"
#include "tests/engine_bare.h"
#include "tests/remote_server.h"

#define BLOCK_TOKENS 16U
#define HIT_BLOCKS 64U /* of the prompt that is looked up */
#define SAMPLES_MAX 2000000U

static struct {
    struct kvk_report report;
    double seconds;
    struct remote_server server;
    double *samples; /* [SAMPLES_MAX] us */
} bench = {.seconds = 3.0};

struct node {
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_caller caller;
    uint64_t space;
    uint64_t session;
};

static uint64_t now_ns(void)
{
    return kvk_clock_now(kvk_clock_monotonic());
}

/* ---- Nodes ---- */

static struct kvk_remote_report report_of(struct node *node)
{
    struct kvk_remote_report report;
    kvk_lock(&node->cache->lock);
    kvk_remote_report(node->cache, &report);
    kvk_unlock(&node->cache->lock);
    return report;
}

static void node_start(struct node *node, bool shares, uint64_t block_bytes, uint64_t host_bytes)
{
    struct kvk_error error;
    memset(node, 0, sizeof(*node));
    kvk_config_init(&node->config);
    node->config.device_bytes = 0;
    node->config.host_bytes = host_bytes;
    node->config.tokens = 65536;
    struct kvk_remote_config *remote = &node->config.remote;
    if (shares) {
        (void)snprintf(remote->seeds, sizeof(remote->seeds), "127.0.0.1:%u", bench.server.port);
        (void)snprintf(remote->key_file, sizeof(remote->key_file), "%s/key", bench.server.folder);
        remote->admit_uses = 1;
    }
    bare_must(kvk_tenants_create(&node->config, &node->tenants, &error), &error);
    const struct kvk_cache_options options = {.config = &node->config,
                                              .tenants = node->tenants,
                                              .host_device = bare_device(),
                                              .threads = true};
    bare_must(kvk_cache_create(&options, &node->cache, &error), &error);
    const struct kvk_geometry geometry = bare_opaque(block_bytes, BLOCK_TOKENS);
    node->caller = bare_user(node->tenants);
    node->space = bare_space(node->cache, &node->caller, "model", &geometry).space_id;
    node->session = bare_session(node->cache, &node->caller);
    while (shares && report_of(node).spaces_out > 0) {
        (void)usleep(5000);
    }
}

static void node_stop(struct node *node)
{
    kvk_cache_destroy(node->cache);
    kvk_tenants_destroy(node->tenants);
    kvk_config_finish(&node->config);
}

static void prompt_make(uint32_t *tokens, uint32_t blocks, uint32_t number)
{
    for (uint32_t i = 0; i < blocks * BLOCK_TOKENS; i++) {
        tokens[i] = number * 1000003 + i;
    }
}

static void compute(struct node *node, const uint32_t *tokens, uint32_t blocks)
{
    bare_compute(node->cache, &node->caller, node->session, node->space, tokens,
                 (uint64_t)blocks * BLOCK_TOKENS);
}

static struct kvk_lookup_reply look_up(struct node *node, const uint32_t *tokens, uint32_t blocks)
{
    struct kvk_lookup_reply reply;
    struct kvk_error error;
    const struct kvk_lookup_request request = {
        .space_id = node->space,
        .prompt = {.tokens = tokens, .token_count = (uint64_t)blocks * BLOCK_TOKENS},
        .retry = true};
    KVK_ASSERT(kvk_lookup(node->cache, &node->caller, &request, &reply, &error) == KVK_OK);
    return reply;
}

/* ---- Look-ups ---- */

static int compare(const void *left, const void *right)
{
    double a = *(const double *)left;
    double b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The report's names live as long as it. */
static const char *name_of(const char *format, const char *text, uint32_t number, uint64_t size)
{
    static char names[16][96];
    static uint32_t used;
    KVK_ASSERT(used < sizeof(names) / sizeof(names[0]));
    (void)snprintf(names[used], sizeof(names[0]), "%s%s", format, text);
    if (number > 0) {
        (void)snprintf(names[used], sizeof(names[0]), "%s%s, %u blocks of %llu KiB", format, text,
                       number, (unsigned long long)(size >> 10));
    }
    return names[used++];
}

/* One that is a hit here, again and again; every 100th is of a prompt that nobody knows, so that
 * the store has something to do. */
static void hits_measure(struct node *node, const char *name, double reference[2])
{
    static uint32_t tokens[HIT_BLOCKS * BLOCK_TOKENS];
    static uint32_t others[HIT_BLOCKS * BLOCK_TOKENS];
    static uint32_t number = 100;
    uint32_t count = 0;
    uint64_t end_ns = now_ns() + (uint64_t)(bench.seconds * 1e9);
    prompt_make(tokens, HIT_BLOCKS, 1);
    compute(node, tokens, HIT_BLOCKS);
    for (uint32_t turn = 0; now_ns() < end_ns && count < SAMPLES_MAX; turn++) {
        if (turn % 100 == 0) {
            prompt_make(others, HIT_BLOCKS, number++);
            (void)look_up(node, others, HIT_BLOCKS);
            if (turn % 1000 == 0) {
                compute(node, others, HIT_BLOCKS);
                /* Being looked up is no use, and what is not used makes room. */
                compute(node, tokens, HIT_BLOCKS);
            }
        }
        uint64_t begun_ns = now_ns();
        KVK_ASSERT(look_up(node, tokens, HIT_BLOCKS).cached_tokens == HIT_BLOCKS * BLOCK_TOKENS);
        bench.samples[count++] = (double)(now_ns() - begun_ns) / 1e3;
    }
    qsort(bench.samples, count, sizeof(bench.samples[0]), compare);
    double p50 = bench.samples[count / 2];
    double p99 = bench.samples[count / 100 * 99];
    kvk_report_ratio(&bench.report, name_of(name, ", p50", 0, 0), p50, "us", reference[0]);
    kvk_report_ratio(&bench.report, name_of(name, ", p99", 0, 0), p99, "us", reference[1]);
    reference[0] = isnan(reference[0]) ? p50 : reference[0];
    reference[1] = isnan(reference[1]) ? p99 : reference[1];
}

static void lookups(void)
{
    struct node node;
    double reference[2] = {NAN, NAN};
    const uint64_t block_bytes = UINT64_C(64) << 10;
    const uint64_t host_bytes = UINT64_C(256) << 20;
    node_start(&node, false, block_bytes, host_bytes);
    hits_measure(&node, "look-up that hits, no store", reference);
    node_stop(&node);
    node_start(&node, true, block_bytes, host_bytes);
    hits_measure(&node, "look-up that hits, store good", reference);
    (void)kill(bench.server.pid, SIGSTOP);
    hits_measure(&node, "look-up that hits, store standing still", reference);
    (void)kill(bench.server.pid, SIGCONT);
    node_stop(&node);
}

/* ---- Fetching ---- */

static void fetches(uint64_t block_bytes, uint32_t blocks)
{
    struct node a;
    struct node b;
    uint32_t *tokens = malloc(blocks * BLOCK_TOKENS * sizeof(*tokens));
    KVK_ASSERT(tokens != NULL);
    node_start(&a, true, block_bytes, blocks * block_bytes * 2);
    node_start(&b, true, block_bytes, blocks * block_bytes * 2);
    prompt_make(tokens, blocks, 7);
    uint64_t begun_ns = now_ns();
    compute(&a, tokens, blocks);
    while (report_of(&a).stats.sent_blocks < blocks) {
        (void)usleep(500);
    }
    double seconds = (double)(now_ns() - begun_ns) / 1e9;
    double bytes = (double)blocks * (double)block_bytes;
    kvk_report_value(&bench.report, name_of("sealed to sent", "", blocks, block_bytes),
                     bytes / seconds / 1e6, "MB/s");
    begun_ns = now_ns();
    while (look_up(&b, tokens, blocks).cached_tokens < blocks * BLOCK_TOKENS) {
        (void)usleep(500);
    }
    seconds = (double)(now_ns() - begun_ns) / 1e9;
    kvk_report_value(&bench.report, name_of("look-up to memory", "", blocks, block_bytes),
                     bytes / seconds / 1e6, "MB/s");
    node_stop(&a);
    node_stop(&b);
    free(tokens);
}

int main(int count, char **arguments)
{
    kvk_report_init(&bench.report, "remote_engine");
    for (int i = 1; i < count; i++) {
        if (kvk_report_option(&bench.report, arguments[i])) {
            continue;
        }
        if (strcmp(arguments[i], "--seconds") != 0 || i + 1 == count) {
            (void)fprintf(stderr, "usage: bench_remote_engine [--json] [--seconds N]\n");
            return 2;
        }
        bench.seconds = strtod(arguments[++i], NULL);
    }
    kvk_log_set_level(KVK_LOG_ERROR);
    (void)signal(SIGPIPE, SIG_IGN);
    bench.samples = malloc(SAMPLES_MAX * sizeof(bench.samples[0]));
    KVK_ASSERT(bench.samples != NULL);
    remote_server_start(&bench.server);
    lookups();
    fetches(UINT64_C(64) << 10, 512);
    fetches(UINT64_C(512) << 10, 256);
    fetches(UINT64_C(2) << 20, 64);
    remote_server_stop(&bench.server);
    free(bench.samples);
    return kvk_report_print(&bench.report);
}
