/*
 * What blocks on disk cost those that are served from memory: the same requests against one engine
 * with a disk tier that writes all it is given, and one without, in turns. The rate of the requests
 * (open with look-up, write, seal, close), how much of them is found in the cache, and how long
 * opening takes, which is where room is made.
 *
 *     bench_durable [--json] [--folder PATH] [--seconds N] [--block-kib N] [--admit N]
 *                   [--host-mib N] [--full | --catalogue] [--beside-fio] [--pairs N]
 *
 * --full: every prompt is new, in blocks of 2 MiB, and in both engines as much is sealed in a
 * second as fio writes in one and a half, so that there is always more to write than the disk
 * takes. Beside the p99 of opening it says how fast the disk tier wrote meanwhile, against fio's
 * writing into the same folder, with the same size and depth, in the same run; and the p99 without
 * what this thread waited for a processor (as the system counts it), which the disk's threads share
 * with it.
 *
 * --beside-fio: in each pair a third turn, without a disk tier, while fio writes into the same
 * folder as fast as the tier did, in blocks as large: what the disk takes from the requests,
 * whoever it is that writes. It shares memory and processors with them, be it behind a virtual
 * machine's back.
 *
 * --catalogue: beside the requests another thread changes what the catalogue keeps, at the same
 * pace in both engines: 100 times a second it opens a space or invalidates one, which with a folder
 * is answered when it is durable; and every block is recorded.
 */
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/log.h"
#include "base/random.h"
#include "bench/fio.h"
#include "bench/report.h"
#include "daemon/cache.h"
#include "daemon/durable.h"
#include "daemon/report.h"
#include "daemon/sequence.h"
#include "daemon/session.h"
#include "daemon/space.h"
#include "tests/folder.h"

#define PAIRS 5
#define PAIRS_MAX 101
#define REST_SECONDS_MAX 5
#define REST_LOOK_US 100000
#define WARM_SECONDS 6 /* of each engine, at least: after 10 of both eviction has learned */
#define FULL_BLOCK_KIB 2048
#define FIO_BYTES (UINT64_C(512) << 20)
#define FIO_DEPTH 64
#define FIO_LEAD_S 0.5         /* that fio needs to begin */
#define FULL_FACTOR 1.5        /* sealed, of what fio writes */
#define CHANGES_PER_SECOND 100 /* with --catalogue */
#define SPACES_MAX 64
#define BLOCK_TOKENS 16
#define BLOCKS 8           /* of a request */
#define RECENT_REQUESTS 32 /* of which one is asked for again */
#define HOST_MIB 1024
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
    uint32_t next;       /* first token of the next new prompt */
    uint64_t hit_tokens; /* of all requests */
    bool fresh;          /* every prompt is new */
    int waits_fd;        /* what this thread waited for a processor; -1: not asked for */
    double open_us;      /* the last opening, */
    double open_run_us;  /* and without that */
    double pace_s;       /* between the beginnings of two requests; 0: as fast as they go */
    uint32_t changes;
    uint64_t spaces[SPACES_MAX]; /* [space_count] that the changes opened */
    uint32_t space_count;
    struct kvk_random random;
};

static double samples[SAMPLES_MAX];
static double run_samples[SAMPLES_MAX]; /* without waits for a processor */

static _Noreturn void give_up(const char *what, const struct kvk_error *error)
{
    (void)fprintf(stderr, "bench_durable: %s: %s\n", what, error == NULL ? "" : error->text);
    exit(1);
}

static uint64_t space_open(struct engine *engine, const char *model)
{
    struct kvk_space_request request = {.block_tokens = BLOCK_TOKENS, .group_count = 1};
    struct kvk_space_reply space;
    struct kvk_error error;
    request.identity.parts[KVK_IDENTITY_MODEL - 1] =
        (struct kvk_view){(const uint8_t *)model, strlen(model)};
    request.groups[0] = (struct kvk_geometry){.layers = 1,
                                              .kv_heads = 1,
                                              .block_tokens = BLOCK_TOKENS,
                                              .layout = KVK_LAYOUT_OPAQUE,
                                              .attention = KVK_ATTENTION_SELF,
                                              .tensor_shards = 1,
                                              .pipeline_shards = 1,
                                              .opaque_bytes = engine->block_bytes};
    if (kvk_space_open(engine->cache, &engine->caller, &request, &space, &error) != KVK_OK) {
        give_up("space", &error);
    }
    return space.space_id;
}

/* One change of what the catalogue keeps: a space more, as far as there may be, or the next
 * generation of one. */
static void change_make(struct engine *engine)
{
    struct kvk_error error;
    if (engine->space_count < SPACES_MAX) {
        char model[32];
        (void)snprintf(model, sizeof model, "model %u", engine->space_count);
        engine->spaces[engine->space_count++] = space_open(engine, model);
        return;
    }
    const struct kvk_invalidate_request request = {
        .space_id = engine->spaces[engine->changes++ % SPACES_MAX]};
    struct kvk_invalidate_reply reply;
    if (kvk_invalidate(engine->cache, &engine->caller, &request, &reply, &error) != KVK_OK) {
        give_up("invalidate", &error);
    }
}

static void engine_open(struct engine *engine, const char *folder, uint64_t block_bytes,
                        uint32_t admit, uint64_t host_bytes)
{
    struct kvk_hello hello = {.pidfd = -1};
    struct kvk_welcome welcome;
    struct kvk_device_cpu_options device_options = {.attend_thread_count = 1};
    const struct kvk_credential *credential = NULL;
    struct kvk_device *device = NULL;
    memset(engine, 0, sizeof *engine);
    engine->waits_fd = -1;
    kvk_config_init(&engine->config);
    device_options.huge_pages = engine->config.huge_pages; /* as the daemon has them */
    engine->block_bytes = block_bytes;
    engine->config.device_bytes = 0;
    engine->config.host_bytes = host_bytes;
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
    engine->space_id = space_open(engine, "bench");
    if (kvk_session_begin(engine->cache, &engine->caller, &hello, &welcome, &engine->error) !=
        KVK_OK) {
        give_up("session", &engine->error);
    }
    engine->session_id = welcome.session_id;
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

/* What this thread waited for a processor so far, in microseconds. */
static double waited_us(const struct engine *engine)
{
    char text[96] = "";
    unsigned long long run_ns = 0;
    unsigned long long waited_ns = 0;
    if (engine->waits_fd >= 0 && (pread(engine->waits_fd, text, sizeof text - 1, 0) <= 0 ||
                                  sscanf(text, "%llu %llu", &run_ns, &waited_ns) != 2)) {
        give_up("schedstat cannot be read", NULL);
    }
    return (double)waited_ns / 1e3;
}

/* A request: new or, half of them unless `fresh`, made before and perhaps cached. */
static void request_run(struct engine *engine)
{
    uint32_t tokens[BLOCKS * BLOCK_TOKENS];
    uint32_t first = engine->next;
    if (!engine->fresh && engine->next > 0 && kvk_random_chance(&engine->random, 0.5)) {
        uint32_t recent = engine->next < RECENT_REQUESTS ? engine->next : RECENT_REQUESTS;
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
    double waited = waited_us(engine);
    double began = kvk_report_seconds();
    if (kvk_sequence_open(engine->cache, &engine->caller, &open, &reply, &engine->tables,
                          &engine->error) != KVK_OK) {
        give_up("open", &engine->error);
    }
    engine->open_us = (kvk_report_seconds() - began) * 1e6;
    engine->open_run_us = engine->open_us - (waited_us(engine) - waited);
    engine->hit_tokens += reply.cached_tokens;
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
}

/* ---- What was written ---- */

struct figure {
    const char *name;
    double value;
};

static void figure_visit(void *context, const char *name, double value)
{
    struct figure *figure = context;
    if (strcmp(name, figure->name) == 0) {
        figure->value = value;
    }
}

static double figure_of(struct engine *engine, const char *name)
{
    struct figure figure = {.name = name};
    kvk_report_stats(engine->cache, figure_visit, &figure);
    return figure.value;
}

static double written_bytes(struct engine *engine)
{
    return figure_of(engine, "kvkeep_disk_written_bytes_total");
}

/* ---- Measuring ---- */

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a;
    double y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* Of this thread alone, or of all. */
static double processor_seconds(clockid_t clock)
{
    struct timespec time;
    (void)clock_gettime(clock, &time);
    return (double)time.tv_sec + (double)time.tv_nsec * 1e-9;
}

static double behind_seconds(void)
{
    return processor_seconds(CLOCK_PROCESS_CPUTIME_ID) - processor_seconds(CLOCK_THREAD_CPUTIME_ID);
}

/* What requests for so long have shown. */
struct turn {
    double rate;
    double run_rate;   /* by the processor time that they took, which leaves out what this thread
                          waited for a lock or a processor */
    double p99_us;     /* of opening, */
    double run_p99_us; /* and without what this thread waited for a processor */
    double hit_tokens; /* that one of them found: what is found is not written again, so where less
                          is found the rate falls, too */
    double write_rate; /* bytes per second that the disk tier wrote meanwhile, and */
    double behind;     /* the processor time of all other threads, for each of them */
};

static double percentile_99(double *values, uint32_t count)
{
    qsort(values, count, sizeof values[0], compare);
    return values[(uint64_t)count * 99 / 100];
}

static void measure(struct engine *engine, double seconds, struct turn *turn)
{
    uint32_t count = 0;
    uint64_t hit_before = engine->hit_tokens;
    double written = written_bytes(engine);
    double behind = behind_seconds();
    double began = kvk_report_seconds();
    double ran = processor_seconds(CLOCK_THREAD_CPUTIME_ID);
    while (kvk_report_seconds() - began < seconds && count < SAMPLES_MAX) {
        double wait = began + count * engine->pace_s - kvk_report_seconds();
        if (engine->pace_s > 0 && wait > 0) {
            (void)usleep((useconds_t)(wait * 1e6));
        }
        request_run(engine);
        samples[count] = engine->open_us;
        run_samples[count] = engine->open_run_us;
        count++;
    }
    double took = kvk_report_seconds() - began;
    turn->rate = count / took;
    turn->run_rate = count / (processor_seconds(CLOCK_THREAD_CPUTIME_ID) - ran);
    turn->hit_tokens = (double)(engine->hit_tokens - hit_before) / count;
    written = written_bytes(engine) - written;
    turn->write_rate = written / took;
    turn->behind = (behind_seconds() - behind) / written;
    turn->p99_us = percentile_99(samples, count);
    turn->run_p99_us = percentile_99(run_samples, count);
}

/* ---- Changes beside the requests ---- */

struct changer {
    struct engine *engine; /* NULL: pause */
    pthread_mutex_t mutex;
    bool stop;
};

/* At the same pace with a catalogue and without. */
static void *changer_main(void *argument)
{
    struct changer *changer = argument;
    double next = kvk_report_seconds();
    for (;;) {
        (void)pthread_mutex_lock(&changer->mutex);
        bool stop = changer->stop;
        if (changer->engine != NULL && !stop) {
            change_make(changer->engine);
        }
        (void)pthread_mutex_unlock(&changer->mutex);
        if (stop) {
            return NULL;
        }
        next += 1.0 / CHANGES_PER_SECOND;
        double wait = next - kvk_report_seconds();
        if (wait > 0) {
            (void)usleep((useconds_t)(wait * 1e6));
        } else {
            next = kvk_report_seconds();
        }
    }
}

static void changer_turn(struct changer *changer, struct engine *engine)
{
    (void)pthread_mutex_lock(&changer->mutex);
    changer->engine = engine;
    (void)pthread_mutex_unlock(&changer->mutex);
}

/* ---- Turns ---- */

/* What waits to be written is not the other engine's business. */
static void engine_rest(struct engine *engine)
{
    double until = kvk_report_seconds() + REST_SECONDS_MAX;
    double before = -1;
    double written = written_bytes(engine);
    while ((figure_of(engine, "kvkeep_disk_queued_blocks") > 0 || written != before) &&
           kvk_report_seconds() < until) {
        (void)usleep(REST_LOOK_US);
        before = written;
        written = written_bytes(engine);
    }
}

static double fio_write(const char *folder, uint64_t block_bytes, double rate, double seconds)
{
    char path[256];
    (void)snprintf(path, sizeof path, "%s/fio", folder);
    const struct kvk_fio_pass pass = {.path = path,
                                      .size_bytes = FIO_BYTES,
                                      .block_bytes = block_bytes,
                                      .depth = FIO_DEPTH,
                                      .direct = true,
                                      .write = true,
                                      .engine = "io_uring",
                                      .rate = rate,
                                      .seconds = seconds};
    return kvk_fio_run(&pass);
}

static double fio_write_rate(const char *folder, uint64_t block_bytes)
{
    char path[256];
    double rate = fio_write(folder, block_bytes, 0, 0);
    (void)snprintf(path, sizeof path, "%s/fio", folder);
    (void)unlink(path);
    return rate;
}

/* fio, while requests run. */
struct other_writer {
    const char *folder;
    uint64_t block_bytes;
    double rate, seconds;
    double wrote; /* bytes per second */
};

static void *other_writer_main(void *argument)
{
    struct other_writer *writer = argument;
    writer->wrote = fio_write(writer->folder, writer->block_bytes, writer->rate, writer->seconds);
    return NULL;
}

struct options {
    char folder[128];
    double seconds;
    uint64_t block_kib;
    uint64_t host_mib;
    uint32_t admit;
    uint32_t pairs;
    bool full;
    bool catalogue;
    bool beside_fio;
};

static void options_read(struct options *options, struct kvk_report *report, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(report, argv[i])) {
            continue;
        }
        if (strcmp(argv[i], "--full") == 0) {
            options->full = true;
            options->block_kib = FULL_BLOCK_KIB;
            continue;
        }
        if (strcmp(argv[i], "--catalogue") == 0) {
            options->catalogue = true;
            continue;
        }
        if (strcmp(argv[i], "--beside-fio") == 0) {
            options->beside_fio = true;
            continue;
        }
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (strcmp(argv[i], "--folder") == 0) {
            (void)snprintf(options->folder, sizeof options->folder, "%s", value);
        } else if (strcmp(argv[i], "--seconds") == 0) {
            options->seconds = strtod(value, NULL);
        } else if (strcmp(argv[i], "--block-kib") == 0) {
            options->block_kib = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--host-mib") == 0) {
            options->host_mib = strtoull(value, NULL, 10);
        } else if (strcmp(argv[i], "--admit") == 0) {
            options->admit = (uint32_t)strtoul(value, NULL, 10);
        } else if (strcmp(argv[i], "--pairs") == 0) {
            options->pairs = (uint32_t)strtoul(value, NULL, 10);
        } else {
            (void)fprintf(stderr, "usage: bench_durable [--json] [--folder PATH] [--seconds N] "
                                  "[--block-kib N] [--admit N] [--host-mib N] "
                                  "[--full | --catalogue] [--beside-fio] [--pairs N]\n");
            exit(2);
        }
        i++;
    }
    if (options->block_kib == 0 || !(options->seconds > 0) || options->admit == 0 ||
        options->host_mib == 0 || options->pairs == 0 || options->pairs > PAIRS_MAX) {
        (void)fprintf(stderr, "bench_durable: every number must be at least 1, pairs at most %d\n",
                      PAIRS_MAX);
        exit(2);
    }
}

/* Of a pair: without a folder, with one, and beside fio. */
enum side { SIDE_ALONE, SIDE_DURABLE, SIDE_FIO, SIDE_COUNT };

struct figures {
    struct turn turns[SIDE_COUNT][PAIRS_MAX];
    double fio_rates[PAIRS_MAX];
};

/* fio is begun first, and goes on for as long as the requests do. */
static void beside_fio_run(const struct options *options, struct engine *engine, double rate,
                           struct turn *turn)
{
    struct other_writer writer = {.folder = options->folder,
                                  .block_bytes = options->block_kib << 10,
                                  .rate = rate,
                                  .seconds = options->seconds + FIO_LEAD_S + 1};
    pthread_t thread;
    if (pthread_create(&thread, NULL, other_writer_main, &writer) != 0) {
        give_up("no thread", NULL);
    }
    (void)usleep((useconds_t)(FIO_LEAD_S * 1e6));
    measure(engine, options->seconds, turn);
    (void)pthread_join(thread, NULL);
    if (isnan(writer.wrote)) {
        give_up("fio", &(struct kvk_error){.text = "is not there, or failed"});
    }
    turn->write_rate = writer.wrote;
}

static void pair_run(const struct options *options, struct engine engines[2],
                     struct changer *changer, int pair, struct figures *figures)
{
    int at = pair < 0 ? 0 : pair;
    double seconds = pair < 0 && options->seconds < WARM_SECONDS ? WARM_SECONDS : options->seconds;
    for (int turn = 0; turn < 2; turn++) { /* who is first goes in turns, too */
        int side = (turn + pair) & 1 ? SIDE_DURABLE : SIDE_ALONE;
        changer_turn(changer, &engines[side]);
        measure(&engines[side], seconds, &figures->turns[side][at]);
        changer_turn(changer, NULL);
        engine_rest(&engines[side]);
    }
    if (options->beside_fio && pair >= 0) {
        beside_fio_run(options, &engines[SIDE_ALONE], figures->turns[SIDE_DURABLE][at].write_rate,
                       &figures->turns[SIDE_FIO][at]);
    }
    if (options->full) {
        figures->fio_rates[at] = fio_write_rate(options->folder, options->block_kib << 10);
    }
}

static void pairs_run(const struct options *options, struct engine engines[2],
                      struct figures *figures)
{
    struct changer changer = {.engine = NULL};
    pthread_t thread;
    (void)pthread_mutex_init(&changer.mutex, NULL);
    if (options->catalogue && pthread_create(&thread, NULL, changer_main, &changer) != 0) {
        give_up("no thread", NULL);
    }
    for (int pair = -1; pair < (int)options->pairs; pair++) { /* the first warms up */
        pair_run(options, engines, &changer, pair, figures);
    }
    if (options->catalogue) {
        (void)pthread_mutex_lock(&changer.mutex);
        changer.stop = true;
        (void)pthread_mutex_unlock(&changer.mutex);
        (void)pthread_join(thread, NULL);
    }
    (void)pthread_mutex_destroy(&changer.mutex);
}

/* ---- What came out ---- */

/* Which field of a turn. */
#define FIELD(name) offsetof(struct turn, name)

static double field_of(const struct turn *turn, size_t field)
{
    double value;
    memcpy(&value, (const uint8_t *)turn + field, sizeof value);
    return value;
}

static double median_of(const struct figures *figures, enum side side, size_t field, uint32_t pairs)
{
    double values[PAIRS_MAX];
    for (uint32_t i = 0; i < pairs; i++) {
        values[i] = field_of(&figures->turns[side][i], field);
    }
    return kvk_report_median(values, pairs);
}

/* Against the same pair's turn alone. */
static double ratio_of(const struct figures *figures, enum side side, size_t field, uint32_t pairs)
{
    double values[PAIRS_MAX];
    for (uint32_t i = 0; i < pairs; i++) {
        values[i] = field_of(&figures->turns[side][i], field) /
                    field_of(&figures->turns[SIDE_ALONE][i], field);
    }
    return kvk_report_median(values, pairs);
}

static void report_fio(const struct options *options, const struct figures *figures,
                       struct kvk_report *report)
{
    const uint32_t pairs = options->pairs;
    kvk_report_value(report, "beside fio: requests, ratio of pairs",
                     ratio_of(figures, SIDE_FIO, FIELD(rate), pairs), "x");
    kvk_report_value(report, "by their own processor time",
                     ratio_of(figures, SIDE_FIO, FIELD(run_rate), pairs), "x");
    kvk_report_value(report, "open_p99, ratio of pairs",
                     ratio_of(figures, SIDE_FIO, FIELD(p99_us), pairs), "x");
    kvk_report_value(report, "written by fio",
                     median_of(figures, SIDE_FIO, FIELD(write_rate), pairs) / 1e6, "MB/s");
}

static void report_fill(const struct options *options, struct figures *figures,
                        struct kvk_report *report)
{
    const uint32_t pairs = options->pairs;
    kvk_report_ratio(report, "requests", median_of(figures, SIDE_DURABLE, FIELD(rate), pairs),
                     "per second", median_of(figures, SIDE_ALONE, FIELD(rate), pairs));
    kvk_report_value(report, "requests, ratio of pairs, median",
                     ratio_of(figures, SIDE_DURABLE, FIELD(rate), pairs), "x");
    kvk_report_value(report, "the same by their own processor time",
                     ratio_of(figures, SIDE_DURABLE, FIELD(run_rate), pairs), "x");
    kvk_report_ratio(report, "tokens found by a request",
                     median_of(figures, SIDE_DURABLE, FIELD(hit_tokens), pairs), "",
                     median_of(figures, SIDE_ALONE, FIELD(hit_tokens), pairs));
    kvk_report_ratio(report, "open_p99", median_of(figures, SIDE_DURABLE, FIELD(p99_us), pairs),
                     "us", median_of(figures, SIDE_ALONE, FIELD(p99_us), pairs));
    kvk_report_value(report, "open_p99, ratio of pairs, median",
                     ratio_of(figures, SIDE_DURABLE, FIELD(p99_us), pairs), "x");
    if (options->full) {
        kvk_report_ratio(report, "open_p99, waits for a processor left out",
                         median_of(figures, SIDE_DURABLE, FIELD(run_p99_us), pairs), "us",
                         median_of(figures, SIDE_ALONE, FIELD(run_p99_us), pairs));
        kvk_report_value(report, "the same, ratio of pairs, median",
                         ratio_of(figures, SIDE_DURABLE, FIELD(run_p99_us), pairs), "x");
    }
    kvk_report_value(report, "work behind, for each MB written",
                     median_of(figures, SIDE_DURABLE, FIELD(behind), pairs) * 1e12, "us");
    double written = median_of(figures, SIDE_DURABLE, FIELD(write_rate), pairs) / 1e6;
    double fio = options->full ? kvk_report_median(figures->fio_rates, pairs) / 1e6 : NAN;
    if (isnan(fio)) {
        kvk_report_value(report, "written", written, "MB/s");
    } else {
        kvk_report_ratio(report, "written meanwhile, against fio", written, "MB/s", fio);
    }
    if (options->beside_fio) {
        report_fio(options, figures, report);
    }
}

int main(int argc, char **argv)
{
    static struct engine engines[2]; /* [with a folder] */
    static struct figures figures;
    struct kvk_report report;
    struct options options = {.folder = "/tmp/kvkeep-bench-durable",
                              .seconds = 2,
                              .block_kib = 256,
                              .host_mib = HOST_MIB,
                              .admit = 1,
                              .pairs = PAIRS};
    kvk_report_init(&report, "durable");
    options_read(&options, &report, argc, argv);
    kvk_log_set_level(KVK_LOG_ERROR);
    for (int durable = 0; durable < 2; durable++) {
        engine_open(&engines[durable], durable == 1 ? options.folder : NULL,
                    options.block_kib << 10, options.admit, options.host_mib << 20);
        engines[durable].fresh = options.full;
        if (options.full) {
            engines[durable].waits_fd = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
        }
    }
    if (options.full) {
        double rate = fio_write_rate(options.folder, options.block_kib << 10);
        if (isnan(rate)) {
            give_up("fio", &(struct kvk_error){.text = "is not there, or failed"});
        }
        engines[0].pace_s = (double)(BLOCKS * (options.block_kib << 10)) / (FULL_FACTOR * rate);
        engines[1].pace_s = engines[0].pace_s;
    }
    pairs_run(&options, engines, &figures);
    report_fill(&options, &figures, &report);
    engine_close(&engines[0]);
    engine_close(&engines[1]);
    folder_remove(options.folder);
    return kvk_report_print(&report);
}
