/*
 * Swapping a sequence out to the host tier and in again, checksums included, by the engine itself:
 * against the faster of memcpy and non-temporal copying over as many bytes, in pieces of the same
 * size, with as many threads, in the same run.
 *
 *     bench_swap [--json] [--mib N] [--block-kib N] [--threads N]
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/copy.h"
#include "bench/report.h"
#include "daemon/cache.h"
#include "daemon/sequence.h"
#include "daemon/session.h"
#include "daemon/space.h"

#define ROUNDS 9
#define BLOCK_TOKENS 16
#define THREADS_MAX 64

static _Noreturn void give_up(const char *what, const struct kvk_error *error)
{
    fprintf(stderr, "bench_swap: %s: %s\n", what, error == NULL ? "no memory" : error->text);
    exit(1);
}

/* ---- the reference: the same pieces, copied plainly ---- */

struct plain_copy {
    uint8_t *target;
    const uint8_t *source;
    uint64_t piece_bytes;
    uint32_t piece_count;
    uint32_t first; /* this thread's first piece; then every thread_count-th */
    uint32_t thread_count;
    bool streaming; /* past the caches, else memcpy */
};

static void *plain_run(void *argument)
{
    const struct plain_copy *copy = argument;
    for (uint32_t i = copy->first; i < copy->piece_count; i += copy->thread_count) {
        uint8_t *target = copy->target + i * copy->piece_bytes;
        const uint8_t *source = copy->source + i * copy->piece_bytes;
        if (copy->streaming) {
            kvk_copy_stream(target, source, copy->piece_bytes);
        } else {
            memcpy(target, source, copy->piece_bytes);
        }
    }
    return NULL;
}

static double plain_gbps(const struct plain_copy *all, uint32_t thread_count, bool streaming)
{
    struct plain_copy parts[THREADS_MAX];
    pthread_t threads[THREADS_MAX];
    double began = kvk_report_seconds();
    for (uint32_t t = 0; t < thread_count; t++) {
        parts[t] = *all;
        parts[t].first = t;
        parts[t].thread_count = thread_count;
        parts[t].streaming = streaming;
        if (pthread_create(&threads[t], NULL, plain_run, &parts[t]) != 0) {
            give_up("threads", NULL);
        }
    }
    for (uint32_t t = 0; t < thread_count; t++) {
        pthread_join(threads[t], NULL);
    }
    double took = kvk_report_seconds() - began;
    return (double)all->piece_bytes * all->piece_count / took / 1e9;
}

/* Memory as the tiers have it: shared, touched, huge pages where allowed. */
static uint8_t *memory_make(uint64_t bytes, int fill)
{
    uint8_t *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        give_up("memory", NULL);
    }
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    memset(memory, fill, bytes);
    return memory;
}

/* ---- the engine ---- */

struct engine {
    struct kvk_config config;
    struct kvk_tenants *tenants;
    struct kvk_cache *cache;
    struct kvk_caller caller;
    uint64_t session_id;
    uint64_t space_id;
    uint64_t sequence_id;
    struct kvk_tables tables;
    struct kvk_error error;
};

static struct kvk_device *device_open(struct engine *engine)
{
    const struct kvk_device_cpu_options options = {.huge_pages = true};
    struct kvk_device *device = NULL;
    if (kvk_device_cpu_open(&options, &device, &engine->error) != KVK_OK) {
        give_up("device", &engine->error);
    }
    return device;
}

static void space_open(struct engine *engine, uint64_t block_bytes)
{
    struct kvk_space_request request = {.block_tokens = BLOCK_TOKENS, .group_count = 1};
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = (struct kvk_view){(const uint8_t *)"bench", 5};
    request.groups[0] = (struct kvk_geometry){.layers = 1,
                                              .kv_heads = 1,
                                              .block_tokens = BLOCK_TOKENS,
                                              .layout = KVK_LAYOUT_OPAQUE,
                                              .attention = KVK_ATTENTION_SELF,
                                              .tensor_shards = 1,
                                              .pipeline_shards = 1,
                                              .opaque_bytes = block_bytes};
    struct kvk_space_reply space;
    struct kvk_hello hello = {.pidfd = -1};
    struct kvk_welcome welcome;
    if (kvk_space_open(engine->cache, &engine->caller, &request, &space, &engine->error) !=
            KVK_OK ||
        kvk_session_begin(engine->cache, &engine->caller, &hello, &welcome, &engine->error) !=
            KVK_OK) {
        give_up("space", &engine->error);
    }
    engine->space_id = space.space_id;
    engine->session_id = welcome.session_id;
}

static void sequence_open(struct engine *engine, uint32_t block_count, uint64_t block_bytes)
{
    uint64_t count = (uint64_t)block_count * BLOCK_TOKENS;
    uint32_t *tokens = calloc(count, sizeof tokens[0]);
    uint8_t *bytes = malloc(block_bytes);
    struct kvk_sequence_reply reply;
    if (tokens == NULL || bytes == NULL) {
        give_up("tokens", NULL);
    }
    for (uint64_t i = 0; i < count; i++) {
        tokens[i] = (uint32_t)(i * 2654435761u);
    }
    struct kvk_open_request request = {.session_id = engine->session_id,
                                       .space_id = engine->space_id,
                                       .prompt = {.tokens = tokens, .token_count = count},
                                       .tier = -1};
    if (kvk_sequence_open(engine->cache, &engine->caller, &request, &reply, &engine->tables,
                          &engine->error) != KVK_OK) {
        give_up("sequence", &engine->error);
    }
    engine->sequence_id = reply.sequence_id;
    for (uint32_t b = 0; b < block_count; b++) {
        memset(bytes, (int)(b + 1), block_bytes);
        struct kvk_write_piece piece = {.block = b, .data = bytes, .size_bytes = block_bytes};
        if (kvk_sequence_write(engine->cache, &engine->caller, engine->session_id,
                               engine->sequence_id, &piece, &engine->error) != KVK_OK) {
            give_up("write", &engine->error);
        }
    }
    struct kvk_seal_request seal = {.session_id = engine->session_id,
                                    .sequence_id = engine->sequence_id,
                                    .expected_length = count,
                                    .length = count,
                                    .all_ranks = true};
    struct kvk_seal_reply sealed;
    if (kvk_sequence_seal(engine->cache, &engine->caller, &seal, &sealed, &engine->error) !=
        KVK_OK) {
        give_up("seal", &engine->error);
    }
    free(tokens);
    free(bytes);
}

static void engine_open(struct engine *engine, uint32_t block_count, uint64_t block_bytes,
                        uint32_t thread_count)
{
    memset(engine, 0, sizeof *engine);
    kvk_config_init(&engine->config);
    engine->config.device_bytes = block_count * block_bytes;
    engine->config.host_bytes = (block_count + 4) * block_bytes;
    engine->config.device_free_percent = 0;
    engine->config.copy_threads = thread_count;
    const struct kvk_credential *credential = NULL;
    if (kvk_tenants_create(&engine->config, &engine->tenants, &engine->error) != KVK_OK ||
        kvk_tenants_authenticate(engine->tenants, NULL, 0, true, geteuid(), &credential,
                                 &engine->error) != KVK_OK) {
        give_up("tenants", &engine->error);
    }
    engine->caller = (struct kvk_caller){
        .credential = credential, .call = "bench", .may_block = true, .deadline_ns = UINT64_MAX};
    struct kvk_cache_options options = {.config = &engine->config,
                                        .tenants = engine->tenants,
                                        .device = device_open(engine),
                                        .host_device = device_open(engine),
                                        .threads = true};
    if (kvk_cache_create(&options, &engine->cache, &engine->error) != KVK_OK) {
        give_up("cache", &engine->error);
    }
    space_open(engine, block_bytes);
    sequence_open(engine, block_count, block_bytes);
}

static void engine_close(struct engine *engine)
{
    kvk_session_end(engine->cache, engine->session_id);
    kvk_cache_destroy(engine->cache);
    kvk_tenants_destroy(engine->tenants);
    kvk_config_finish(&engine->config);
    kvk_tables_finish(&engine->tables);
}

/* One way, by the wall: everything that the call does. */
static double swap_gbps(struct engine *engine, bool out)
{
    struct kvk_swap_reply reply;
    double began = kvk_report_seconds();
    enum kvk_status status =
        out ? kvk_sequence_swap_out(engine->cache, &engine->caller, engine->session_id,
                                    engine->sequence_id, &reply, &engine->tables, &engine->error)
            : kvk_sequence_swap_in(engine->cache, &engine->caller, engine->session_id,
                                   engine->sequence_id, &reply, &engine->tables, &engine->error);
    double took = kvk_report_seconds() - began;
    if (status != KVK_OK) {
        give_up(out ? "swap out" : "swap in", &engine->error);
    }
    return (double)reply.moved_bytes / took / 1e9;
}

int main(int argc, char **argv)
{
    struct kvk_report report;
    kvk_report_init(&report, "swap");
    uint64_t mib = 512;
    uint64_t block_kib = 2048;
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    uint32_t threads = processors < 2 ? 1 : processors > 8 ? 4 : (uint32_t)processors / 2;
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--mib") == 0) {
            mib = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--block-kib") == 0) {
            block_kib = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--threads") == 0) {
            threads = (uint32_t)strtoul(value, NULL, 10);
        } else {
            fprintf(stderr, "usage: bench_swap [--json] [--mib N] [--block-kib N] [--threads N]\n");
            return 2;
        }
        i++;
    }
    uint32_t block_count = block_kib == 0 ? 0 : (uint32_t)(mib * 1024 / block_kib);
    if (block_count == 0 || threads < 1 || threads > THREADS_MAX) {
        fprintf(stderr, "bench_swap: at least one block, 1 to %d threads\n", THREADS_MAX);
        return 2;
    }
    struct engine engine;
    engine_open(&engine, block_count, block_kib << 10, threads);
    struct plain_copy plain = {.target = memory_make(mib << 20, 1),
                               .source = memory_make(mib << 20, 2),
                               .piece_bytes = block_kib << 10,
                               .piece_count = block_count};
    double out[ROUNDS];
    double in[ROUNDS];
    double best[ROUNDS];
    /* The sides take turns, so that both see the same machine; the first round warms up. */
    for (int round = -1; round < ROUNDS; round++) {
        int at = round < 0 ? 0 : round;
        out[at] = swap_gbps(&engine, true);
        double copied = plain_gbps(&plain, threads, false);
        double streamed = plain_gbps(&plain, threads, true);
        in[at] = swap_gbps(&engine, false);
        best[at] = copied > streamed ? copied : streamed;
    }
    double reference = kvk_report_median(best, ROUNDS);
    kvk_report_ratio(&report, "swap_out", kvk_report_median(out, ROUNDS), "GB/s", reference);
    kvk_report_ratio(&report, "swap_in", kvk_report_median(in, ROUNDS), "GB/s", reference);
    engine_close(&engine);
    munmap(plain.target, mib << 20);
    munmap((void *)(uintptr_t)plain.source, mib << 20);
    return kvk_report_print(&report);
}
