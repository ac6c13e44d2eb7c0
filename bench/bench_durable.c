/*
 * What blocks on disk cost those that are served from memory: the same requests against one engine
 * with a disk tier that writes all it is given, and one without, in turns. The rate of the requests
 * (open with look-up, write, seal, close) and how long opening takes, which is where room is made.
 *
 *     bench_durable [--json] [--folder PATH] [--seconds N] [--block-kib N] [--admit N]
 */
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/log.h"
#include "base/random.h"
#include "bench/report.h"
#include "daemon/cache.h"
#include "daemon/durable.h"
#include "daemon/report.h"
#include "daemon/sequence.h"
#include "daemon/session.h"
#include "daemon/space.h"

#define PAIRS 5
#define BLOCK_TOKENS 16
#define BLOCKS 8 /* of a request */
#define HOST_REQUESTS 64
#define SAMPLES_MAX 2000000

struct engine {
    struct kvk_config config;
    struct kvk_durable durable;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_caller caller;
    struct kvk_tables tables;
    struct kvk_error error;
    uint64_t space_id, session_id;
    uint64_t block_bytes;
    uint8_t *bytes;
    uint32_t next; /* first token of the next new prompt */
    struct kvk_random random;
};

static double samples[SAMPLES_MAX];

static _Noreturn void give_up(const char *what, const struct kvk_error *error)
{
    (void)fprintf(stderr, "bench_durable: %s: %s\n", what, error == NULL ? "" : error->text);
    exit(1);
}

static void space_open(struct engine *engine)
{
    struct kvk_space_request request = {.block_tokens = BLOCK_TOKENS, .group_count = 1};
    struct kvk_space_reply space;
    struct kvk_hello hello = {.pidfd = -1};
    struct kvk_welcome welcome;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = (struct kvk_view){(const uint8_t *)"bench", 5};
    request.groups[0] = (struct kvk_geometry){.layers = 1,
                                              .kv_heads = 1,
                                              .block_tokens = BLOCK_TOKENS,
                                              .layout = KVK_LAYOUT_OPAQUE,
                                              .attention = KVK_ATTENTION_SELF,
                                              .tensor_shards = 1,
                                              .pipeline_shards = 1,
                                              .opaque_bytes = engine->block_bytes};
    if (kvk_space_open(engine->cache, &engine->caller, &request, &space, &engine->error) !=
            KVK_OK ||
        kvk_session_begin(engine->cache, &engine->caller, &hello, &welcome, &engine->error) !=
            KVK_OK) {
        give_up("space", &engine->error);
    }
    engine->space_id = space.space_id;
    engine->session_id = welcome.session_id;
}

static void engine_open(struct engine *engine, const char *folder, uint64_t block_bytes,
                        uint32_t admit)
{
    const struct kvk_device_cpu_options device_options = {.attend_thread_count = 1};
    const struct kvk_credential *credential = NULL;
    struct kvk_device *device = NULL;
    memset(engine, 0, sizeof *engine);
    kvk_config_init(&engine->config);
    engine->block_bytes = block_bytes;
    engine->config.device_bytes = 0;
    engine->config.host_bytes = HOST_REQUESTS * BLOCKS * block_bytes;
    if (folder != NULL) {
        (void)snprintf(engine->config.durable_folder, sizeof engine->config.durable_folder, "%s",
                       folder);
        engine->config.disk_bytes = 4 * engine->config.host_bytes;
        engine->config.disk_admit_uses = admit;
        engine->config.keeper = KVK_CONFIG_KEEPER_NO;
        engine->config.catalogue_bytes = UINT64_C(256) << 20;
    }
    if (kvk_durable_open(&engine->config, &engine->durable, &engine->error) != KVK_OK) {
        give_up("folder", &engine->error);
    }
    const struct kvk_tenants_options tenants = {.config = &engine->config,
                                                .catalogue = engine->durable.catalogue};
    if (kvk_tenants_open(&tenants, &engine->tenants, &engine->error) != KVK_OK ||
        kvk_tenants_authenticate(engine->tenants, NULL, 0, true, geteuid(), &credential,
                                 &engine->error) != KVK_OK ||
        kvk_device_cpu_open(&device_options, &device, &engine->error) != KVK_OK) {
        give_up("tenants", &engine->error);
    }
    engine->caller = (struct kvk_caller){
        .credential = credential, .call = "bench", .may_block = true, .deadline_ns = UINT64_MAX};
    struct kvk_cache_options options = {.config = &engine->config,
                                        .tenants = engine->tenants,
                                        .host_device = device,
                                        .catalogue = engine->durable.catalogue,
                                        .disk = engine->durable.disk,
                                        .threads = true};
    if (kvk_cache_create(&options, &engine->cache, &engine->error) != KVK_OK ||
        kvk_durable_start(engine->cache, &engine->error) != KVK_OK) {
        give_up("cache", &engine->error);
    }
    engine->bytes = malloc(block_bytes);
    if (engine->bytes == NULL) {
        give_up("no memory", NULL);
    }
    memset(engine->bytes, 7, block_bytes);
    kvk_random_init(&engine->random, 1);
    space_open(engine);
}

static void engine_close(struct engine *engine)
{
    kvk_session_end(engine->cache, engine->session_id);
    kvk_durable_stop(engine->cache);
    kvk_cache_destroy(engine->cache);
    kvk_tenants_destroy(engine->tenants);
    kvk_durable_close(&engine->durable);
    kvk_config_finish(&engine->config);
    kvk_tables_finish(&engine->tables);
    free(engine->bytes);
}

/* A request: half are new, half were made before and may be cached. How long its opening took. */
static double request_run(struct engine *engine)
{
    uint32_t tokens[BLOCKS * BLOCK_TOKENS];
    uint32_t first = engine->next;
    if (engine->next > 0 && kvk_random_chance(&engine->random, 0.5)) {
        uint32_t recent = engine->next < HOST_REQUESTS / 2 ? engine->next : HOST_REQUESTS / 2;
        first = engine->next - 1 - (uint32_t)kvk_random_below(&engine->random, recent);
    } else {
        engine->next++;
    }
    for (uint32_t i = 0; i < BLOCKS * BLOCK_TOKENS; i++) {
        tokens[i] = (first + 1) * 2654435761u + i;
    }
    struct kvk_sequence_reply reply;
    const struct kvk_open_request open = {
        .session_id = engine->session_id,
        .space_id = engine->space_id,
        .prompt = {.tokens = tokens, .token_count = BLOCKS * BLOCK_TOKENS},
        .tier = -1};
    double began = kvk_report_seconds();
    if (kvk_sequence_open(engine->cache, &engine->caller, &open, &reply, &engine->tables,
                          &engine->error) != KVK_OK) {
        give_up("open", &engine->error);
    }
    double took = kvk_report_seconds() - began;
    for (uint64_t b = reply.cached_tokens / BLOCK_TOKENS; b < BLOCKS; b++) {
        struct kvk_write_piece piece = {
            .block = b, .data = engine->bytes, .size_bytes = engine->block_bytes};
        if (kvk_sequence_write(engine->cache, &engine->caller, engine->session_id,
                               reply.sequence_id, &piece, &engine->error) != KVK_OK) {
            give_up("write", &engine->error);
        }
    }
    const struct kvk_seal_request seal = {.session_id = engine->session_id,
                                          .sequence_id = reply.sequence_id,
                                          .expected_length = BLOCKS * BLOCK_TOKENS,
                                          .length = BLOCKS * BLOCK_TOKENS,
                                          .all_ranks = true};
    struct kvk_seal_reply sealed;
    struct kvk_close_reply closed;
    if (kvk_sequence_seal(engine->cache, &engine->caller, &seal, &sealed, &engine->error) !=
            KVK_OK ||
        kvk_sequence_close(engine->cache, &engine->caller, engine->session_id, &reply.sequence_id,
                           1, &closed, &engine->error) != KVK_OK) {
        give_up("seal", &engine->error);
    }
    return took;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Requests for so long: their rate, and the 99th percentile of opening, in microseconds. */
static double measure(struct engine *engine, double seconds, double *p99_us)
{
    uint32_t count = 0;
    double began = kvk_report_seconds();
    while (kvk_report_seconds() - began < seconds && count < SAMPLES_MAX) {
        samples[count++] = request_run(engine);
    }
    double rate = count / (kvk_report_seconds() - began);
    qsort(samples, count, sizeof samples[0], compare);
    *p99_us = samples[(uint64_t)count * 99 / 100] * 1e6;
    return rate;
}

static void written_visit(void *context, const char *name, double value)
{
    if (strcmp(name, "kvkeep_disk_written_bytes_total") == 0) {
        *(double *)context = value;
    }
}

static int remove_one(const char *path, const struct stat *stat, int kind, struct FTW *walk)
{
    (void)stat;
    (void)kind;
    (void)walk;
    return remove(path);
}

int main(int argc, char **argv)
{
    struct kvk_report report;
    char folder[128] = "/tmp/kvkeep-bench-durable";
    double seconds = 2;
    uint64_t block_kib = 256;
    uint32_t admit = 1;
    kvk_report_init(&report, "durable");
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--folder") == 0) {
            (void)snprintf(folder, sizeof folder, "%s", value);
        } else if (strcmp(argv[i], "--seconds") == 0) {
            seconds = strtod(value, NULL);
        } else if (strcmp(argv[i], "--block-kib") == 0) {
            block_kib = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--admit") == 0) {
            admit = (uint32_t)strtoul(value, NULL, 10);
        } else {
            (void)fprintf(stderr, "usage: bench_durable [--json] [--folder PATH] [--seconds N] "
                                  "[--block-kib N] [--admit N]\n");
            return 2;
        }
        i++;
    }
    if (block_kib == 0 || !(seconds > 0) || admit == 0) {
        (void)fprintf(stderr, "bench_durable: every number must be at least 1\n");
        return 2;
    }
    kvk_log_set_level(KVK_LOG_ERROR);
    static struct engine plain;
    static struct engine durable;
    double rates[2][PAIRS];
    double p99[2][PAIRS];
    engine_open(&plain, NULL, block_kib << 10, 1);
    engine_open(&durable, folder, block_kib << 10, admit);
    double began = kvk_report_seconds();
    for (int pair = -1; pair < PAIRS; pair++) { /* the first warms up */
        int at = pair < 0 ? 0 : pair;
        rates[0][at] = measure(&plain, seconds, &p99[0][at]);
        rates[1][at] = measure(&durable, seconds, &p99[1][at]);
    }
    double took = kvk_report_seconds() - began;
    double written = 0;
    kvk_report_stats(durable.cache, written_visit, &written);
    kvk_report_ratio(&report, "requests", kvk_report_median(rates[1], PAIRS), "per second",
                     kvk_report_median(rates[0], PAIRS));
    kvk_report_ratio(&report, "open_p99", kvk_report_median(p99[1], PAIRS), "us",
                     kvk_report_median(p99[0], PAIRS));
    kvk_report_value(&report, "written", written / took / 1e6, "MB/s");
    engine_close(&plain);
    engine_close(&durable);
    (void)nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return kvk_report_print(&report);
}
