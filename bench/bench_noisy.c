/*
 * Does a noisy tenant slow a quiet one down? The quiet tenant looks up one cached prompt, call
 * after call. The noisy one, with many connections, does what costs the daemon most, as fast as it
 * is answered: half of its lanes open, seal, look up, swap and close sequences of fresh prompts,
 * which evicts without end; half look up a cached prompt of 131,072 tokens, over and over.
 *
 * What is measured is whom the daemon serves, not whom the system's scheduler runs. So each of the
 * three has processors of its own, as if it ran on a machine of its own: the noisy client cannot
 * take the daemon's, and the daemon and the noisy client have the same priority. Where there are
 * fewer than four processors the two clients share one, and the quiet one goes first there.
 * --unpinned leaves all to the scheduler. Rounds alone and rounds beside the noise take turns, so
 * that both see the same machine. On a machine that has other work to do the figures are its own.
 *
 * The noisy tenant has a quota as an operator would set it (a limit of each tier and a rate of
 * requests), or none with --without-quota: then turns alone keep it in bounds.
 *
 *     bench_noisy [--json] [--kvkeepd PATH] [--connections N] [--rounds N] [--without-quota]
 *                 [--unpinned]
 */
#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
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
#define LONG_TOKENS 131072
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

/*
 * Who runs where: this process, and those it starts from here on. kvkeepd has all processors but
 * the last two, where there are four or more, and each client one of these; with fewer the clients
 * share the last, and the quiet one goes first there.
 */
enum place { PLACE_DAEMON, PLACE_QUIET, PLACE_NOISY };

static void place(enum place place)
{
    static cpu_set_t processors;
    size_t last[2] = {0, 0}; /* the last, the one before it */
    if (CPU_COUNT(&processors) == 0 && sched_getaffinity(0, sizeof(processors), &processors) != 0) {
        give_up("processors", "cannot be asked for");
    }
    if (CPU_COUNT(&processors) < 2) {
        give_up("processors", "two are needed; with one, --unpinned");
    }
    bool apart = CPU_COUNT(&processors) >= 4;
    for (size_t i = 0; i < CPU_SETSIZE; i++) {
        if (CPU_ISSET(i, &processors)) {
            last[1] = last[0];
            last[0] = i;
        }
    }
    cpu_set_t allowed = processors;
    if (place == PLACE_DAEMON) {
        CPU_CLR(last[0], &allowed);
        if (apart) {
            CPU_CLR(last[1], &allowed);
        }
    } else {
        CPU_ZERO(&allowed);
        CPU_SET(last[place == PLACE_QUIET && apart ? 1 : 0], &allowed);
    }
    if (sched_setaffinity(0, sizeof(allowed), &allowed) != 0) {
        give_up("processors", "cannot be chosen");
    }
    const struct sched_param first = {.sched_priority = 1};
    if (place == PLACE_QUIET && !apart && sched_setscheduler(0, SCHED_FIFO, &first) != 0) {
        (void)fputs("bench_noisy: the quiet client may not go first on its processor: the figures "
                    "hold what it waits for that, too\n",
                    stderr);
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

/* Of 2 layers, 4 KiB a block. Repeated while the rate of requests says no. */
static void space_open(struct kvkeep_client *client, const char *model, uint32_t layers,
                       struct kvkeep_space *space)
{
    const struct kvk_geometry geometry = {.layers = layers,
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
    _Atomic uint32_t ready; /* lanes */
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

/* The long prompt, sealed once. Repeated while the rate of requests says no. */
static void long_seal(struct kvkeep_client *client, struct kvkeep_session *session,
                      const struct kvkeep_space *space, const struct kvkeep_prompt *prompt)
{
    const struct kvkeep_open_options options = {.leave_last = false};
    struct kvkeep_sequence sequence;
    struct kvkeep_lookup found = {.cached_tokens = 0};
    struct kvk_error error;
    for (uint32_t ms = 0; found.cached_tokens != LONG_TOKENS; ms += 5) {
        if (ms > START_MS_MAX) {
            give_up("the long prompt", "is not sealed");
        }
        sleep_ms(5);
        if (kvkeep_sequence_open(session, space, prompt, &options, &sequence, &error) == KVK_OK) {
            while (kvkeep_seal(session, &sequence, LONG_TOKENS, true, &error) == KVK_EXHAUSTED) {
                sleep_ms(5);
            }
            expect_ok(kvkeep_close(session, &sequence, &error), &error, "Close");
        }
        sleep_ms(5);
        if (kvkeep_lookup(client, space, prompt, false, &found, &error) != KVK_OK) {
            found.cached_tokens = 0; /* the rate said no */
        }
    }
}

static int noisy_lane_run(void *argument)
{
    struct noisy_lane *lane = argument;
    static _Thread_local uint32_t tokens[LONG_TOKENS];
    const bool is_long = lane->number % 2 == 1;
    struct kvkeep_client *client = connect_as(lane->target, "noisy-noisy-noisy");
    struct kvkeep_space space;
    struct kvkeep_session *session = NULL;
    struct kvk_random random;
    struct kvk_error error;
    const struct kvkeep_session_options options = {.name = "noisy", .no_side_socket = true};
    kvk_random_init(&random, lane->number + 1);
    space_open(client, is_long ? "noisy, long" : "noisy", is_long ? 1 : 2, &space);
    expect_ok(kvkeep_session_open(client, &options, &session, &error), &error, "Session");
    const struct kvkeep_prompt prompt = {.tokens = tokens, .token_count = LONG_TOKENS};
    if (is_long) {
        for (uint32_t i = 0; i < LONG_TOKENS; i++) {
            tokens[i] = i;
        }
        long_seal(client, session, &space, &prompt);
    }
    atomic_fetch_add(&lane->noise->ready, 1);
    for (;;) {
        struct kvkeep_lookup found;
        if (!atomic_load(&lane->noise->on)) {
            sleep_ms(1);
        } else if (is_long) {
            (void)noisy_count(lane->noise,
                              kvkeep_lookup(client, &space, &prompt, false, &found, &error));
        } else {
            noisy_round(lane->noise, client, session, &space, tokens, &random);
        }
    }
    return 0;
}

static pid_t noisy_start(const char *target, uint32_t connections, bool pinned, struct noise *noise)
{
    pid_t pid = fork();
    if (pid != 0) {
        return pid;
    }
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (pinned) {
        place(PLACE_NOISY);
    }
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
    int waits_fd;        /* what this thread waited for a processor, */
    int daemon_waits_fd; /* and the daemon's look-up thread */
};

/* The scheduler's account of a thread: nanoseconds run, nanoseconds waited, turns. */
static int waits_open(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        give_up(path, "cannot be read");
    }
    return fd;
}

/* -1: it has no look-up thread yet. */
static int daemon_waits_try(pid_t pid)
{
    char folder_path[64];
    char path[384];
    int fd = -1;
    (void)snprintf(folder_path, sizeof(folder_path), "/proc/%d/task", (int)pid);
    DIR *tasks = opendir(folder_path);
    if (tasks == NULL) {
        give_up(folder_path, "cannot be read");
    }
    for (const struct dirent *task = readdir(tasks); task != NULL && fd < 0;
         task = readdir(tasks)) {
        char name[32] = "";
        (void)snprintf(path, sizeof(path), "%s/%s/comm", folder_path, task->d_name);
        FILE *file = fopen(path, "r");
        if (file != NULL && fgets(name, sizeof(name), file) != NULL &&
            strcmp(name, "kvk-lookup\n") == 0) {
            (void)snprintf(path, sizeof(path), "%s/%s/schedstat", folder_path, task->d_name);
            fd = waits_open(path);
        }
        if (file != NULL) {
            (void)fclose(file);
        }
    }
    (void)closedir(tasks);
    return fd;
}

static int daemon_waits_open(pid_t pid)
{
    int fd = daemon_waits_try(pid);
    for (uint32_t ms = 0; fd < 0; ms += 10) {
        if (ms > START_MS_MAX) {
            give_up("kvkeepd", "has no look-up thread");
        }
        sleep_ms(10);
        fd = daemon_waits_try(pid);
    }
    return fd;
}

static double waited_us(int fd)
{
    char text[96] = "";
    unsigned long long run_ns = 0;
    unsigned long long waited_ns = 0;
    if (pread(fd, text, sizeof(text) - 1, 0) <= 0 ||
        sscanf(text, "%llu %llu", &run_ns, &waited_ns) != 2) {
        give_up("schedstat", "cannot be read");
    }
    return (double)waited_ns / 1e3;
}

static void quiet_start(struct quiet *quiet, const char *target, pid_t daemon_pid)
{
    const struct kvkeep_session_options session_options = {.name = "quiet", .no_side_socket = true};
    const struct kvkeep_open_options options = {.leave_last = false};
    struct kvkeep_sequence sequence;
    struct kvk_error error;
    quiet->waits_fd = waits_open("/proc/thread-self/schedstat");
    quiet->daemon_waits_fd = daemon_waits_open(daemon_pid);
    quiet->client = connect_as(target, "quiet-quiet-quiet");
    space_open(quiet->client, "quiet", 2, &quiet->space);
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
    double p99_own_us; /* without what the quiet client waited for a processor */
    double p99_run_us; /* without what it and the daemon's look-up thread waited for one */
};

static double percentile(double *times, uint32_t percent)
{
    qsort(times, CALLS_PER_ROUND, sizeof(times[0]), compare_doubles);
    return times[CALLS_PER_ROUND * percent / 100];
}

static struct round quiet_round(struct quiet *quiet)
{
    static double times[CALLS_PER_ROUND];
    static double own[CALLS_PER_ROUND];
    static double run[CALLS_PER_ROUND];
    const struct kvkeep_prompt prompt = {.tokens = quiet->tokens, .token_count = QUIET_TOKENS};
    for (uint32_t i = 0; i < CALLS_PER_ROUND; i++) {
        struct kvkeep_lookup found;
        struct kvk_error error;
        double client_us = waited_us(quiet->waits_fd);
        double daemon_us = waited_us(quiet->daemon_waits_fd);
        double begin = kvk_report_seconds();
        expect_ok(kvkeep_lookup(quiet->client, &quiet->space, &prompt, false, &found, &error),
                  &error, "Lookup");
        times[i] = (kvk_report_seconds() - begin) * 1e6;
        own[i] = times[i] - (waited_us(quiet->waits_fd) - client_us);
        run[i] = own[i] - (waited_us(quiet->daemon_waits_fd) - daemon_us);
        if (found.cached_tokens != QUIET_TOKENS) {
            give_up("the quiet tenant's prompt", "was taken from it");
        }
    }
    return (struct round){.p50_us = percentile(times, 50),
                          .p99_us = percentile(times, 99),
                          .p99_own_us = percentile(own, 99),
                          .p99_run_us = percentile(run, 99)};
}

/* ---- Measuring ---- */

struct names {
    const char *p50, *p99, *ratio;
    const char *own, *own_ratio; /* the client's waits for a processor left out */
    const char *run, *run_ratio; /* those of the daemon's look-up thread, too */
    const char *calls, *refused;
};

struct plan {
    const char *kvkeepd;
    uint32_t connections;
    uint32_t rounds;
    bool bounded;
    bool pinned;
};

struct figures {
    double p50[2][ROUNDS_MAX], p99[2][ROUNDS_MAX]; /* [noise is on] */
    double p99_own[2][ROUNDS_MAX], p99_run[2][ROUNDS_MAX];
    double ratios[ROUNDS_MAX], own_ratios[ROUNDS_MAX], run_ratios[ROUNDS_MAX];
};

static void rounds_run(const struct plan *plan, struct quiet *quiet, struct noise *noise,
                       struct figures *figures)
{
    (void)quiet_round(quiet);
    for (uint32_t i = 0; i < plan->rounds; i++) {
        for (int on = 0; on < 2; on++) {
            atomic_store(&noise->on, on == 1);
            sleep_ms(SETTLE_MS);
            struct round round = quiet_round(quiet);
            figures->p50[on][i] = round.p50_us;
            figures->p99[on][i] = round.p99_us;
            figures->p99_own[on][i] = round.p99_own_us;
            figures->p99_run[on][i] = round.p99_run_us;
        }
        figures->ratios[i] = figures->p99[1][i] / figures->p99[0][i];
        figures->own_ratios[i] = figures->p99_own[1][i] / figures->p99_own[0][i];
        figures->run_ratios[i] = figures->p99_run[1][i] / figures->p99_run[0][i];
    }
    atomic_store(&noise->on, false);
}

static void report_fill(struct kvk_report *report, const struct names *names, uint32_t rounds,
                        struct figures *figures, struct noise *noise)
{
    kvk_report_ratio(report, names->p50, kvk_report_median(figures->p50[1], rounds), "us",
                     kvk_report_median(figures->p50[0], rounds));
    kvk_report_ratio(report, names->p99, kvk_report_median(figures->p99[1], rounds), "us",
                     kvk_report_median(figures->p99[0], rounds));
    kvk_report_value(report, names->ratio, kvk_report_median(figures->ratios, rounds), "x");
    kvk_report_ratio(report, names->own, kvk_report_median(figures->p99_own[1], rounds), "us",
                     kvk_report_median(figures->p99_own[0], rounds));
    kvk_report_value(report, names->own_ratio, kvk_report_median(figures->own_ratios, rounds), "x");
    kvk_report_ratio(report, names->run, kvk_report_median(figures->p99_run[1], rounds), "us",
                     kvk_report_median(figures->p99_run[0], rounds));
    kvk_report_value(report, names->run_ratio, kvk_report_median(figures->run_ratios, rounds), "x");
    kvk_report_value(report, names->calls, (double)atomic_load(&noise->calls), "calls");
    kvk_report_value(report, names->refused, (double)atomic_load(&noise->refused), "calls");
}

static void measure(struct kvk_report *report, const struct names *names, const struct plan *plan)
{
    char target[64];
    static struct figures figures;
    static struct quiet quiet;
    struct noise *noise =
        mmap(NULL, sizeof(*noise), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (noise == MAP_FAILED) {
        give_up("no memory", "noise");
    }
    (void)snprintf(target, sizeof(target), "unix:%s/%s", folder, plan->bounded ? "b" : "u");
    if (plan->pinned) {
        place(PLACE_DAEMON);
    }
    pid_t daemon_pid = daemon_start(plan->kvkeepd, target + strlen("unix:"), plan->bounded);
    pid_t noisy_pid = noisy_start(target, plan->connections, plan->pinned, noise);
    if (plan->pinned) {
        place(PLACE_QUIET);
    }
    quiet_start(&quiet, target, daemon_pid);
    for (uint32_t ms = 0; atomic_load(&noise->ready) < plan->connections; ms += 10) {
        if (ms > START_MS_MAX) {
            give_up("the noisy tenant", "is not ready");
        }
        sleep_ms(10);
    }
    rounds_run(plan, &quiet, noise, &figures);
    report_fill(report, names, plan->rounds, &figures, noise);
    (void)kill(noisy_pid, SIGKILL);
    (void)waitpid(noisy_pid, NULL, 0);
    kvkeep_session_close(quiet.session);
    kvkeep_disconnect(quiet.client);
    (void)kill(daemon_pid, SIGTERM);
    (void)waitpid(daemon_pid, NULL, 0);
    (void)munmap(noise, sizeof(*noise));
}

static uint32_t number(const char *option, const char *text, uint32_t most)
{
    char *end = NULL;
    unsigned long value = strtoul(text, &end, 10);
    if (*text == '\0' || *end != '\0' || value == 0 || value > most) {
        (void)fprintf(stderr, "bench_noisy: %s takes a number from 1 to %u\n", option, most);
        exit(2);
    }
    return (uint32_t)value;
}

int main(int argc, char **argv)
{
    static const struct names bounded = {"look-up p50 beside a noisy tenant with a quota",
                                         "look-up p99 beside it",
                                         "p99 ratio of paired rounds, median",
                                         "p99, the client's waits for a processor left out",
                                         "its ratio of paired rounds, median",
                                         "p99, all waits for a processor left out",
                                         "that one's ratio of paired rounds, median",
                                         "calls of the noisy tenant",
                                         "of them refused"};
    static const struct names unbounded = {
        "look-up p50 beside a noisy tenant without any quota",
        "look-up p99 beside that",
        "p99 ratio of paired rounds, median, no quota",
        "p99, the client's waits for a processor left out, no quota",
        "its ratio of paired rounds, median, no quota",
        "p99, all waits for a processor left out, no quota",
        "that one's ratio of paired rounds, median, no quota",
        "calls of the noisy tenant, no quota",
        "of them refused, no quota"};
    struct kvk_report report;
    struct plan plan = {.connections = 16, .rounds = 21, .bounded = true, .pinned = true};
    kvk_report_init(&report, "noisy");
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--kvkeepd") == 0 && has_value) {
            plan.kvkeepd = argv[++i];
        } else if (strcmp(argv[i], "--connections") == 0 && has_value) {
            plan.connections = number(argv[i], argv[i + 1], CONNECTIONS_MAX);
            i++;
        } else if (strcmp(argv[i], "--rounds") == 0 && has_value) {
            plan.rounds = number(argv[i], argv[i + 1], ROUNDS_MAX);
            i++;
        } else if (strcmp(argv[i], "--without-quota") == 0) {
            plan.bounded = false;
        } else if (strcmp(argv[i], "--unpinned") == 0) {
            plan.pinned = false;
        } else {
            (void)fputs("usage: bench_noisy [--json] [--kvkeepd PATH] [--connections N] "
                        "[--rounds N] [--without-quota] [--unpinned]\n",
                        stderr);
            return 2;
        }
    }
    if (mkdtemp(folder) == NULL) {
        give_up("no temporary folder", folder);
    }
    measure(&report, plan.bounded ? &bounded : &unbounded, &plan);
    char command[128];
    (void)snprintf(command, sizeof(command), "rm -rf -- %s", folder);
    if (system(command) != 0) {
        (void)fprintf(stderr, "bench_noisy: %s is left over\n", folder);
    }
    return kvk_report_print(&report);
}
