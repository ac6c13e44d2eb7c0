/*
 * Fetches and stores of the remote store against redis-benchmark, on the same server in the same
 * run: the same size of values, number of keys, connections and pipeline, one thread each. Ours
 * make names by HMAC, seal or encrypt every byte, prove what comes and put it where it belongs, and
 * store by SET and fetch by GETRANGE; redis-benchmark sends the same value again and again by SET,
 * and throws away what GET brings. Conversion between formats is the engine's, and in neither.
 *
 *     bench_remote [--json] [--seconds N] [--repeat N] [--threads N] [--encrypt] [--port PORT]
 *                  [--only WORDS] [--processor] [--kept]
 *
 * Without --port it starts a redis-server of its own, without persistence. With --processor it says
 * of that one and of both clients how much processor time a value took, and how busy they were:
 * which of them bounds a figure. Needs redis-server and redis-benchmark.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "base/clock.h"
#include "base/lock.h"
#include "bench/report.h"
#include "hosttier/remote.h"
#include "tests/remote_server.h"

#define DATA_BYTES (64U << 20) /* of the keys that a case uses */
#define REPEAT_MAX 15U

struct bench_case {
    const char *fetch_name, *store_name;
    uint32_t value_bytes;
    uint32_t connections;
    uint32_t pipeline;
};

static const struct bench_case cases[] = {
    {"fetch 16 KiB, 4 x 16", "store 16 KiB, 4 x 16", 16U << 10, 4, 16},
    {"fetch 128 KiB, 1 x 8", "store 128 KiB, 1 x 8", 128U << 10, 1, 8},
    {"fetch 128 KiB, 4 x 8", "store 128 KiB, 4 x 8", 128U << 10, 4, 8},
    {"fetch 512 KiB, 4 x 4", "store 512 KiB, 4 x 4", 512U << 10, 4, 4},
    {"fetch 2 MiB, 1 x 4", "store 2 MiB, 1 x 4", 2U << 20, 1, 4},
    {"fetch 2 MiB, 4 x 4", "store 2 MiB, 4 x 4", 2U << 20, 4, 4},
};

static struct {
    struct kvk_report report;
    double seconds;
    uint32_t repeat, threads;
    bool encrypt, processor, kept;
    const char *only; /* cases whose name has it */
    unsigned port;
    struct remote_server server; /* its own, without --port */
} bench = {.seconds = 1.0, .repeat = 3, .threads = 1, .only = ""};

/* ---- Processor time ---- */

/* In seconds: of a client, of the server, and of the clock. */
struct spent {
    double client, server, wall;
};

enum { OURS_STORE, THEIRS_SET, OURS_FETCH, THEIRS_GET, SIDE_COUNT };

static struct spent spent[SIDE_COUNT];
static double spent_values[SIDE_COUNT];

static double clock_seconds(clockid_t clock)
{
    struct timespec now = {0};
    (void)clock_gettime(clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* Up to now. Our client is this process, theirs are its children. */
static struct spent spent_now(bool children)
{
    struct spent now = {.wall = kvk_report_seconds()};
    clockid_t clock = 0;
    struct rusage usage = {0};
    if (bench.server.pid > 0 && clock_getcpuclockid(bench.server.pid, &clock) == 0) {
        now.server = clock_seconds(clock);
    }
    if (children && getrusage(RUSAGE_CHILDREN, &usage) == 0) {
        now.client = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                     (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
    } else {
        now.client = clock_seconds(CLOCK_PROCESS_CPUTIME_ID);
    }
    return now;
}

static void spent_add(int side, const struct spent *before, double values)
{
    struct spent now = spent_now(side == THEIRS_SET || side == THEIRS_GET);
    spent[side].client += now.client - before->client;
    spent[side].server += now.server - before->server;
    spent[side].wall += now.wall - before->wall;
    spent_values[side] += values;
}

/* Rows of one operation: ours against theirs. */
static void spent_report(const char *name, int ours, int theirs)
{
    static char names[KVK_REPORT_RESULT_COUNT_MAX][64];
    static uint32_t used;
    double count[2] = {spent_values[ours], spent_values[theirs]};
    KVK_ASSERT(used + 4 <= KVK_REPORT_RESULT_COUNT_MAX);
    for (int server = 0; server < 2; server++) {
        double mine = server ? spent[ours].server : spent[ours].client;
        double other = server ? spent[theirs].server : spent[theirs].client;
        const char *who = server ? "server" : "client";
        (void)snprintf(names[used], sizeof(names[used]), "  %.*s%s",
                       (int)strcspn(name, "0123456789"), name, who);
        kvk_report_ratio(&bench.report, names[used++], mine / count[0] * 1e6, "us",
                         other / count[1] * 1e6);
        (void)snprintf(names[used], sizeof(names[used]), "  %.*s%s busy",
                       (int)strcspn(name, "0123456789"), name, who);
        kvk_report_ratio(&bench.report, names[used++], mine / spent[ours].wall * 100, "%",
                         other / spent[theirs].wall * 100);
    }
}

/* ---- redis-benchmark ---- */

/* Requests a second, or NAN. */
static double theirs(const struct bench_case *of, const char *what, uint32_t keys, uint64_t count)
{
    char command[256];
    char line[512];
    double rate = NAN;
    struct spent before = spent_now(true);
    (void)snprintf(command, sizeof(command),
                   "redis-benchmark -p %u -t %s -d %u -c %u -P %u -r %u -n %llu --csv 2>/dev/null",
                   bench.port, what, of->value_bytes, of->connections, of->pipeline, keys,
                   (unsigned long long)count);
    FILE *pipe = popen(command, "r");
    if (pipe == NULL) {
        return NAN;
    }
    while (fgets(line, sizeof(line), pipe) != NULL) {
        const char *second = strstr(line, "\",\"");
        if (second != NULL && strncmp(line, "\"test\"", 6) != 0) {
            rate = strtod(second + 3, NULL);
        }
    }
    bool well = pclose(pipe) == 0;
    spent_add(strcmp(what, "set") == 0 ? THEIRS_SET : THEIRS_GET, &before, (double)count);
    return well ? rate : NAN;
}

/* ---- Ours ---- */

struct stream {
    struct kvk_remote_batch batch;
    struct kvk_remote_block *blocks;
    struct kvk_remote_piece *pieces;
};

static struct {
    struct kvk_lock lock;
    pthread_cond_t changed;
    struct kvk_remote *remote;
    uint64_t until_ns, count, failed;
    uint32_t keys, next, running;
} run;

static void stream_submit(struct stream *stream)
{
    struct kvk_remote_batch *batch = &stream->batch;
    kvk_lock(&run.lock);
    for (uint32_t i = 0; i < batch->block_count; i++) {
        memset(&stream->blocks[i].id, 0, sizeof(stream->blocks[i].id));
        kvk_store_le32(stream->blocks[i].id.key, run.next++ % run.keys);
    }
    kvk_unlock(&run.lock);
    batch->deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + 20 * KVK_NS_PER_SECOND;
    if (kvk_remote_submit(run.remote, batch, NULL) != KVK_OK) {
        KVK_UNREACHABLE();
    }
}

static void stream_done(void *context, struct kvk_remote_batch *batch)
{
    struct stream *stream = context;
    kvk_lock(&run.lock);
    run.count += batch->hit_count;
    run.failed += batch->block_count - batch->hit_count;
    bool more = kvk_clock_now(kvk_clock_monotonic()) < run.until_ns;
    if (!more) {
        run.running--;
        (void)pthread_cond_signal(&run.changed);
    }
    kvk_unlock(&run.lock);
    if (more) {
        stream_submit(stream);
    }
}

/* Blocks a second, from as many batches at a time as keep all connections' pipelines full. */
static double ours(const struct bench_case *of, const struct kvk_remote_space *space,
                   enum kvk_remote_operation operation, uint8_t *memory, double seconds)
{
    uint32_t count = of->connections + 1;
    struct stream *streams = calloc(count, sizeof(struct stream));
    KVK_ASSERT(streams != NULL);
    struct spent before = spent_now(false);
    double begun = kvk_report_seconds();
    run.until_ns = kvk_clock_now(kvk_clock_monotonic()) + (uint64_t)(seconds * 1e9);
    run.count = 0;
    run.failed = 0;
    run.running = count;
    for (uint32_t i = 0; i < count; i++) {
        struct stream *stream = &streams[i];
        stream->blocks = calloc(of->pipeline, sizeof(struct kvk_remote_block));
        stream->pieces = calloc(of->pipeline, sizeof(struct kvk_remote_piece));
        KVK_ASSERT(stream->blocks != NULL && stream->pieces != NULL);
        for (uint32_t k = 0; k < of->pipeline; k++) {
            stream->pieces[k].memory = memory + ((size_t)i * of->pipeline + k) * space->block_bytes;
            stream->pieces[k].size_bytes = space->block_bytes;
            stream->blocks[k].pieces = &stream->pieces[k];
            stream->blocks[k].piece_count = 1;
        }
        stream->batch = (struct kvk_remote_batch){
            .operation = operation,
            .space = space,
            .blocks = stream->blocks,
            .block_count = of->pipeline,
            .done = stream_done,
            .context = stream,
        };
        stream_submit(stream);
    }
    kvk_lock(&run.lock);
    while (run.running > 0) {
        (void)kvk_condition_wait(&run.changed, &run.lock, UINT64_MAX);
    }
    kvk_unlock(&run.lock);
    double took = kvk_report_seconds() - begun;
    spent_add(operation == KVK_REMOTE_STORE ? OURS_STORE : OURS_FETCH, &before, (double)run.count);
    for (uint32_t i = 0; i < count; i++) {
        free(streams[i].blocks);
        free(streams[i].pieces);
    }
    free(streams);
    if (run.failed > 0) {
        (void)fprintf(stderr, "%llu of %llu blocks were no hits\n", (unsigned long long)run.failed,
                      (unsigned long long)(run.count + run.failed));
    }
    return (double)run.count / took;
}

/* ---- Cases ---- */

static struct kvk_remote *remote_open(const struct bench_case *of)
{
    char seeds[32];
    (void)snprintf(seeds, sizeof(seeds), "127.0.0.1:%u", bench.port);
    struct kvk_remote_options options = {
        .seeds = seeds,
        .thread_count = bench.threads,
        .connection_count = (of->connections + bench.threads - 1) / bench.threads,
        .pipeline_depth = of->pipeline,
        .node_timeout_ms = 10000,
    };
    struct kvk_remote *remote = NULL;
    struct kvk_remote_health health = {0};
    struct kvk_error error;
    if (kvk_remote_open(&options, &remote, &error) != KVK_OK) {
        (void)fprintf(stderr, "%s\n", error.text);
        exit(1);
    }
    for (int i = 0; i < 1000 && health.state != KVK_REMOTE_GOOD; i++) {
        (void)usleep(5000);
        kvk_remote_health(remote, &health);
    }
    if (health.state != KVK_REMOTE_GOOD) {
        (void)fprintf(stderr, "no server: %s\n", health.reason);
        exit(1);
    }
    return remote;
}

static void case_run(const struct bench_case *of)
{
    static const uint8_t digest[KVK_REMOTE_SECRET_SIZE] = {1};
    struct kvk_remote_space space;
    struct kvk_remote_space_options options = {
        .secret = digest,
        .space = digest,
        .shape = digest,
        .block_bytes = of->value_bytes - KVK_REMOTE_HEADER_SIZE,
        .encrypt = bench.encrypt,
    };
    if (kvk_remote_space_init(&space, &options, NULL) != KVK_OK) {
        KVK_UNREACHABLE();
    }
    size_t room = (size_t)(of->connections + 1) * of->pipeline * of->value_bytes;
    uint8_t *memory = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KVK_ASSERT(memory != MAP_FAILED);
    (void)madvise(memory, room, MADV_HUGEPAGE); /* as the daemon's buffers are */
    memset(memory, 0x5a, room);
    run.keys = DATA_BYTES / of->value_bytes;
    run.remote = remote_open(of);

    double fetch[REPEAT_MAX];
    double store[REPEAT_MAX];
    double get[REPEAT_MAX];
    double set[REPEAT_MAX];
    /* All keys are there, on both sides, before anything is measured: a miss is cheap. */
    run.next = 0;
    for (uint64_t stored = 0; stored < run.keys; stored += run.count) {
        (void)ours(of, &space, KVK_REMOTE_STORE, memory, 0.2);
    }
    (void)theirs(of, "set", run.keys, (uint64_t)run.keys * 10);
    memset(spent, 0, sizeof(spent));
    memset(spent_values, 0, sizeof(spent_values));
    for (uint32_t i = 0; i < bench.repeat; i++) {
        /* As long for both: theirs is told a count, so ours goes first. On new connections, as
         * theirs are: with --kept, on those that fetched before. */
        if (!bench.kept) {
            kvk_remote_close(run.remote);
            run.remote = remote_open(of);
        }
        store[i] = ours(of, &space, KVK_REMOTE_STORE, memory, bench.seconds);
        set[i] = theirs(of, "set", run.keys, (uint64_t)(store[i] * bench.seconds) + 1);
        fetch[i] = ours(of, &space, KVK_REMOTE_FETCH, memory, bench.seconds);
        get[i] = theirs(of, "get", run.keys, (uint64_t)(fetch[i] * bench.seconds) + 1);
    }
    double megabytes = of->value_bytes / 1e6;
    kvk_report_ratio(&bench.report, of->fetch_name,
                     kvk_report_median(fetch, bench.repeat) * megabytes, "MB/s",
                     kvk_report_median(get, bench.repeat) * megabytes);
    kvk_report_ratio(&bench.report, of->store_name,
                     kvk_report_median(store, bench.repeat) * megabytes, "MB/s",
                     kvk_report_median(set, bench.repeat) * megabytes);
    if (bench.processor) {
        spent_report(of->store_name, OURS_STORE, THEIRS_SET);
        spent_report(of->fetch_name, OURS_FETCH, THEIRS_GET);
    }
    kvk_remote_close(run.remote);
    kvk_remote_space_finish(&space);
    (void)munmap(memory, room);
}

int main(int count, char **arguments)
{
    bool own = true;
    kvk_report_init(&bench.report, "remote");
    for (int i = 1; i < count; i++) {
        const char *word = arguments[i];
        const char *value = i + 1 < count ? arguments[i + 1] : "";
        if (kvk_report_option(&bench.report, word)) {
            continue;
        }
        if (strcmp(word, "--encrypt") == 0) {
            bench.encrypt = true;
            continue;
        }
        if (strcmp(word, "--kept") == 0) {
            bench.kept = true;
            continue;
        }
        if (strcmp(word, "--processor") == 0) {
            bench.processor = true;
            continue;
        }
        if (strcmp(word, "--seconds") == 0) {
            bench.seconds = strtod(value, NULL);
        } else if (strcmp(word, "--repeat") == 0) {
            bench.repeat = (uint32_t)strtoul(value, NULL, 10);
        } else if (strcmp(word, "--threads") == 0) {
            bench.threads = (uint32_t)strtoul(value, NULL, 10);
        } else if (strcmp(word, "--only") == 0) {
            bench.only = value;
        } else if (strcmp(word, "--port") == 0) {
            bench.port = (unsigned)strtoul(value, NULL, 10);
            own = false;
        } else {
            (void)fprintf(stderr, "usage: bench_remote [--json] [--seconds N] [--repeat N] "
                                  "[--threads N] [--encrypt] [--port PORT] [--only WORDS] "
                                  "[--processor] [--kept]\n");
            return 2;
        }
        i++;
    }
    if (bench.repeat == 0 || bench.repeat > REPEAT_MAX || !(bench.seconds > 0) ||
        bench.threads == 0 || bench.threads > KVK_REMOTE_THREADS_MAX) {
        (void)fprintf(stderr, "bench_remote: --repeat is 1 to %u, --threads 1 to %u\n", REPEAT_MAX,
                      KVK_REMOTE_THREADS_MAX);
        return 2;
    }
    kvk_lock_init(&run.lock);
    kvk_condition_init(&run.changed);
    if (own) {
        remote_server_start(&bench.server);
        bench.port = bench.server.port;
    }
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        if (strstr(cases[i].store_name, bench.only) != NULL) {
            case_run(&cases[i]);
        }
    }
    if (own) {
        remote_server_stop(&bench.server);
    }
    kvk_lock_finish(&run.lock);
    return kvk_report_print(&bench.report);
}
