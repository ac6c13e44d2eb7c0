/*
 * Does a noisy tenant slow a quiet one down? The quiet tenant looks up one cached prompt, call
 * after call; the noisy one has many connections that open, seal, look up, swap and close sequences
 * of fresh prompts as fast as they are answered, which evicts without end. Rounds alone and rounds
 * beside the noise take turns, so that both see the same machine.
 *
 * The noisy tenant has a quota as an operator would set it (a limit of each tier and a rate of
 * requests), or none with --without-quota.
 *
 *     bench_noisy [--json] [--kvkeepd PATH] [--connections N] [--rounds N] [--without-quota]
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

#include "base/random.h"
#include "bench/report.h"
#include "client/kvkeep.h"

#define BLOCK_TOKENS 16
#define QUIET_TOKENS 2048
#define NOISY_TOKENS 1024
#define CALLS_PER_ROUND 500
#define SETTLE_MS 100 /* between a change and the measuring */
#define CONNECTIONS_MAX 64
#define ROUNDS_MAX 201
#define START_MS_MAX 20000

static char folder[] = "/tmp/kvkeep-noisy-XXXXXX";

static _Noreturn void give_up(const char *what, const char *why)
{
    (void)fprintf(stderr, "bench_noisy: %s: %s\n", what, why);
    exit(1); /* the children go with us */
}

static void expect_ok(enum kvk_status status, const struct kvk_error *error, const char *what)
{
    if (status != KVK_OK) {
        give_up(what, error->text);
    }
}

static void sleep_ms(uint64_t ms)
{
    const struct timespec time = {.tv_sec = (time_t)(ms / 1000),
                                  .tv_nsec = (long)(ms % 1000) * 1000000};
    (void)nanosleep(&time, NULL);
}

/* ---- The daemon ---- */

static void config_write(const char *path, bool bounded)
{
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        give_up("cannot write", path);
    }
    (void)fprintf(file,
                  "[tiers]\ndevice_bytes = 32 MiB\nhost_bytes = 64 MiB\nhuge_pages = no\n"
                  "[tenant quiet]\nhost_guaranteed_bytes = 16 MiB\n"
                  "device_guaranteed_bytes = 16 MiB\n"
                  "[tenant noisy]\n%s"
                  "[credential quiet]\ntoken = quiet-quiet-quiet\ntenants = quiet\n"
                  "[credential noisy]\ntoken = noisy-noisy-noisy\ntenants = noisy\n",
                  bounded ? "requests_per_second = 500\nrequest_burst = 50\n"
                            "device_limit_bytes = 16 MiB\nhost_limit_bytes = 48 MiB\n"
                          : "");
    if (fclose(file) != 0) {
        give_up("cannot write", path);
    }
}

static void daemon_path(const char *given, char *path, size_t size)
{
    if (given != NULL) {
        (void)snprintf(path, size, "%s", given);
        return;
    }
    ssize_t length = readlink("/proc/self/exe", path, size - 1);
    if (length < 0) {
        give_up("where is kvkeepd", "no /proc/self/exe");
    }
    path[length] = '\0';
    char *slash = strrchr(path, '/');
    (void)snprintf(slash + 1, size - (size_t)(slash + 1 - path), "kvkeepd");
}

static pid_t daemon_start(const char *given, const char *socket_path, bool bounded)
{
    char path[4096];
    char config[128];
    daemon_path(given, path, sizeof(path));
    (void)snprintf(config, sizeof(config), "%s/%s.ini", folder, bounded ? "bounded" : "unbounded");
    config_write(config, bounded);
    pid_t pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (freopen("/dev/null", "w", stderr) == NULL) {
            exit(1);
        }
        (void)execl(path, path, "--config", config, "--socket", socket_path, (char *)NULL);
        exit(1);
    }
    struct stat status;
    for (uint32_t ms = 0; stat(socket_path, &status) != 0; ms += 10) {
        if (ms > START_MS_MAX) {
            give_up("kvkeepd does not come up", path);
        }
        sleep_ms(10);
    }
    return pid;
}

/* ---- Both sides ---- */

static struct kvkeep_client *connect_as(const char *target, const char *token)
{
    const struct kvkeep_options options = {.target = target, .token = token, .no_retry = true};
    struct kvkeep_client *client = NULL;
    struct kvk_error error;
    enum kvk_status status = KVK_UNAVAILABLE;
    for (uint32_t ms = 0; status != KVK_OK && ms < START_MS_MAX; ms += 20) {
        status = kvkeep_connect(&options, &client, &error);
        if (status != KVK_OK) {
            sleep_ms(20);
        }
    }
    expect_ok(status, &error, "connect");
    return client;
}

/* 4 KiB a block. Repeated while the rate of requests says no. */
static void space_open(struct kvkeep_client *client, const char *model, struct kvkeep_space *space)
{
    const struct kvk_geometry geometry = {.layers = 2,
                                          .kv_heads = 2,
                                          .head_size_k = 16,
                                          .head_size_v = 16,
                                          .block_tokens = BLOCK_TOKENS,
                                          .format_k = KVK_FORMAT_BF16,
                                          .format_v = KVK_FORMAT_BF16,
                                          .layout = KVK_LAYOUT_HEADS_FIRST,
                                          .attention = KVK_ATTENTION_SELF,
                                          .tensor_shards = 1,
                                          .pipeline_shards = 1};
    const struct kvkeep_space_options options = {.identity = {.model = model},
                                                 .block_tokens = BLOCK_TOKENS,
                                                 .groups = &geometry,
                                                 .group_count = 1};
    struct kvk_error error = {.status = KVK_OK};
    enum kvk_status status = KVK_EXHAUSTED;
    for (uint32_t i = 0; status == KVK_EXHAUSTED && i < 1000; i++) {
        status = kvkeep_space_open(client, &options, space, &error);
        if (status == KVK_EXHAUSTED) {
            sleep_ms(5);
        }
    }
    expect_ok(status, &error, "OpenSpace");
}

/* ---- The noisy tenant: a process of its own ---- */

struct noise {
    _Atomic bool on;
    _Atomic uint64_t calls;
    _Atomic uint64_t refused;
};

struct noisy_lane {
    const char *target;
    struct noise *noise;
    uint32_t number;
};

static bool noisy_count(struct noise *noise, enum kvk_status status)
{
    atomic_fetch_add(&noise->calls, 1);
    if (status == KVK_EXHAUSTED) {
        atomic_fetch_add(&noise->refused, 1);
    }
    return status == KVK_OK;
}

/* One fresh prompt: opened, sealed, looked up, swapped out and in, closed. Whatever is refused is
 * left out; nobody waits. */
static void noisy_round(struct noise *noise, struct kvkeep_client *client,
                        struct kvkeep_session *session, const struct kvkeep_space *space,
                        uint32_t *tokens, struct kvk_random *random)
{
    const struct kvkeep_open_options options = {.leave_last = true};
    struct kvkeep_sequence sequence;
    struct kvkeep_lookup found;
    struct kvkeep_swap swap;
    struct kvk_error error;
    for (uint32_t i = 0; i < NOISY_TOKENS; i++) {
        tokens[i] = (uint32_t)kvk_random_below(random, 100000);
    }
    const struct kvkeep_prompt prompt = {.tokens = tokens, .token_count = NOISY_TOKENS};
    if (!noisy_count(noise,
                     kvkeep_sequence_open(session, space, &prompt, &options, &sequence, &error))) {
        (void)noisy_count(noise, kvkeep_lookup(client, space, &prompt, false, &found, &error));
        return;
    }
    (void)noisy_count(noise, kvkeep_seal(session, &sequence, NOISY_TOKENS, true, &error));
    for (uint32_t i = 0; i < 8; i++) {
        (void)noisy_count(noise, kvkeep_lookup(client, space, &prompt, false, &found, &error));
    }
    if (noisy_count(noise, kvkeep_swap_out(session, &sequence, &swap, &error))) {
        (void)noisy_count(noise, kvkeep_swap_in(session, &sequence, &swap, &error));
    }
    (void)noisy_count(noise, kvkeep_close(session, &sequence, &error));
}

static int noisy_lane_run(void *argument)
{
    struct noisy_lane *lane = argument;
    static _Thread_local uint32_t tokens[NOISY_TOKENS];
    struct kvkeep_client *client = connect_as(lane->target, "noisy-noisy-noisy");
    struct kvkeep_space space;
    struct kvkeep_session *session = NULL;
    struct kvk_random random;
    struct kvk_error error;
    const struct kvkeep_session_options options = {.name = "noisy", .no_side_socket = true};
    kvk_random_init(&random, lane->number + 1);
    space_open(client, "noisy", &space);
    expect_ok(kvkeep_session_open(client, &options, &session, &error), &error, "Session");
    for (;;) {
        if (atomic_load(&lane->noise->on)) {
            noisy_round(lane->noise, client, session, &space, tokens, &random);
        } else {
            sleep_ms(1);
        }
    }
    return 0;
}

static pid_t noisy_start(const char *target, uint32_t connections, struct noise *noise)
{
    pid_t pid = fork();
    if (pid != 0) {
        return pid;
    }
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    /* Elsewhere it would run on processors of its own: what is measured is the daemon. */
    (void)setpriority(PRIO_PROCESS, 0, 19);
    static struct noisy_lane lanes[CONNECTIONS_MAX];
    for (uint32_t i = 0; i < connections; i++) {
        thrd_t thread;
        lanes[i] = (struct noisy_lane){.target = target, .noise = noise, .number = i};
        if (thrd_create(&thread, noisy_lane_run, &lanes[i]) != thrd_success) {
            give_up("no thread", "noisy");
        }
    }
    for (;;) {
        (void)pause();
    }
}

/* ---- The quiet tenant ---- */

struct quiet {
    struct kvkeep_client *client;
    struct kvkeep_session *session;
    struct kvkeep_space space;
    uint32_t tokens[QUIET_TOKENS];
};

static void quiet_start(struct quiet *quiet, const char *target)
{
    const struct kvkeep_session_options session_options = {.name = "quiet", .no_side_socket = true};
    const struct kvkeep_open_options options = {.leave_last = false};
    struct kvkeep_sequence sequence;
    struct kvk_error error;
    quiet->client = connect_as(target, "quiet-quiet-quiet");
    space_open(quiet->client, "quiet", &quiet->space);
    for (uint32_t i = 0; i < QUIET_TOKENS; i++) {
        quiet->tokens[i] = i;
    }
    const struct kvkeep_prompt prompt = {.tokens = quiet->tokens, .token_count = QUIET_TOKENS};
    expect_ok(kvkeep_session_open(quiet->client, &session_options, &quiet->session, &error), &error,
              "Session");
    expect_ok(
        kvkeep_sequence_open(quiet->session, &quiet->space, &prompt, &options, &sequence, &error),
        &error, "OpenSequence");
    expect_ok(kvkeep_seal(quiet->session, &sequence, QUIET_TOKENS, true, &error), &error, "Seal");
    expect_ok(kvkeep_close(quiet->session, &sequence, &error), &error, "Close");
}

static int compare_doubles(const void *left, const void *right)
{
    double a = *(const double *)left;
    double b = *(const double *)right;
    return a < b ? -1 : a > b;
}

struct round {
    double p50_us;
    double p99_us;
};

static struct round quiet_round(struct quiet *quiet)
{
    static double times[CALLS_PER_ROUND];
    const struct kvkeep_prompt prompt = {.tokens = quiet->tokens, .token_count = QUIET_TOKENS};
    for (uint32_t i = 0; i < CALLS_PER_ROUND; i++) {
        struct kvkeep_lookup found;
        struct kvk_error error;
        double begin = kvk_report_seconds();
        expect_ok(kvkeep_lookup(quiet->client, &quiet->space, &prompt, false, &found, &error),
                  &error, "Lookup");
        times[i] = (kvk_report_seconds() - begin) * 1e6;
        if (found.cached_tokens != QUIET_TOKENS) {
            give_up("the quiet tenant's prompt", "was taken from it");
        }
    }
    qsort(times, CALLS_PER_ROUND, sizeof(times[0]), compare_doubles);
    return (struct round){.p50_us = times[CALLS_PER_ROUND / 2],
                          .p99_us = times[CALLS_PER_ROUND * 99 / 100]};
}

/* ---- Measuring ---- */

struct names {
    const char *p50, *p99, *ratio, *calls, *refused;
};

static void measure(struct kvk_report *report, const struct names *names, const char *kvkeepd,
                    uint32_t connections, uint32_t rounds, bool bounded)
{
    char target[64];
    static double alone50[ROUNDS_MAX], alone99[ROUNDS_MAX], beside50[ROUNDS_MAX];
    static double beside99[ROUNDS_MAX], ratios[ROUNDS_MAX];
    struct noise *noise =
        mmap(NULL, sizeof(*noise), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (noise == MAP_FAILED) {
        give_up("no memory", "noise");
    }
    (void)snprintf(target, sizeof(target), "unix:%s/%s", folder, bounded ? "b" : "u");
    pid_t daemon_pid = daemon_start(kvkeepd, target + strlen("unix:"), bounded);
    pid_t noisy_pid = noisy_start(target, connections, noise);
    static struct quiet quiet;
    quiet_start(&quiet, target);
    (void)quiet_round(&quiet);
    for (uint32_t i = 0; i < rounds; i++) {
        struct round alone = quiet_round(&quiet);
        atomic_store(&noise->on, true);
        sleep_ms(SETTLE_MS);
        struct round beside = quiet_round(&quiet);
        atomic_store(&noise->on, false);
        sleep_ms(SETTLE_MS);
        alone50[i] = alone.p50_us;
        alone99[i] = alone.p99_us;
        beside50[i] = beside.p50_us;
        beside99[i] = beside.p99_us;
        ratios[i] = beside.p99_us / alone.p99_us;
    }
    kvk_report_ratio(report, names->p50, kvk_report_median(beside50, rounds), "us",
                     kvk_report_median(alone50, rounds));
    kvk_report_ratio(report, names->p99, kvk_report_median(beside99, rounds), "us",
                     kvk_report_median(alone99, rounds));
    kvk_report_value(report, names->ratio, kvk_report_median(ratios, rounds), "x");
    kvk_report_value(report, names->calls, (double)atomic_load(&noise->calls), "calls");
    kvk_report_value(report, names->refused, (double)atomic_load(&noise->refused), "calls");
    (void)kill(noisy_pid, SIGKILL);
    (void)waitpid(noisy_pid, NULL, 0);
    kvkeep_session_close(quiet.session);
    kvkeep_disconnect(quiet.client);
    (void)kill(daemon_pid, SIGTERM);
    (void)waitpid(daemon_pid, NULL, 0);
    (void)munmap(noise, sizeof(*noise));
}

int main(int argc, char **argv)
{
    static const struct names bounded = {
        "look-up p50 beside a noisy tenant with a quota", "look-up p99 beside it",
        "p99 ratio of paired rounds, median", "calls of the noisy tenant", "of them refused"};
    static const struct names unbounded = {
        "look-up p50 beside a noisy tenant without any", "look-up p99 beside that",
        "p99 ratio of paired rounds, median, no quota", "calls of the noisy tenant, no quota",
        "of them refused, no quota"};
    struct kvk_report report;
    const char *kvkeepd = NULL;
    unsigned long connections = 16;
    unsigned long rounds = 21;
    bool without = false;
    kvk_report_init(&report, "noisy");
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--kvkeepd") == 0 && has_value) {
            kvkeepd = argv[++i];
        } else if (strcmp(argv[i], "--connections") == 0 && has_value) {
            connections = strtoul(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--rounds") == 0 && has_value) {
            rounds = strtoul(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--without-quota") == 0) {
            without = true;
        } else {
            (void)fputs("usage: bench_noisy [--json] [--kvkeepd PATH] [--connections N] "
                        "[--rounds N] [--without-quota]\n",
                        stderr);
            return 2;
        }
    }
    if (connections == 0 || connections > CONNECTIONS_MAX || rounds == 0 || rounds > ROUNDS_MAX) {
        (void)fprintf(stderr, "bench_noisy: 1 to %d connections, 1 to %d rounds\n", CONNECTIONS_MAX,
                      ROUNDS_MAX);
        return 2;
    }
    if (mkdtemp(folder) == NULL) {
        give_up("no temporary folder", folder);
    }
    measure(&report, without ? &unbounded : &bounded, kvkeepd, (uint32_t)connections,
            (uint32_t)rounds, !without);
    char command[128];
    (void)snprintf(command, sizeof(command), "rm -rf -- %s", folder);
    if (system(command) != 0) {
        (void)fprintf(stderr, "bench_noisy: %s is left over\n", folder);
    }
    return kvk_report_print(&report);
}
