/*
 * kvkeepctl demo: the main job. Worker processes serve the built-in workload on a running daemon;
 * they share prefixes, fork, are preempted, speculate, hold leases and crash on purpose, and verify
 * every byte that they read. Then a table: what was asked, what was hit against a cache without
 * end, what it cost.
 */
#include "client/ctl/demo.h"

#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"

struct demo {
    const struct ctl_options *options;
    const struct demo_settings *settings;
    struct demo_shared *shared;
    pid_t pids[DEMO_WORKERS_MAX];
    uint64_t lives; /* workers begun, crashed ones again */
    uint64_t started_ns;
    uint64_t ended_ns;
};

static uint64_t read_count(const _Atomic uint64_t *counter)
{
    return atomic_load((_Atomic uint64_t *)(uintptr_t)counter);
}

/* This process has not used gRPC yet, so it may fork. */
static bool worker_start(struct demo *demo, uint32_t number)
{
    uint64_t seed = demo->settings->seed * 1000003 + demo->lives++;
    (void)fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        _exit(demo_worker_run(demo->options, demo->settings, demo->shared, number, seed));
    }
    demo->pids[number] = pid < 0 ? 0 : pid;
    return pid > 0;
}

/* Reap who ended; begin again who was killed. The number of workers that still run. */
static uint32_t workers_watch(struct demo *demo)
{
    uint32_t running = 0;
    for (uint32_t w = 0; w < demo->settings->workers; w++) {
        int status = 0;
        if (demo->pids[w] == 0) {
            continue;
        }
        if (waitpid(demo->pids[w], &status, WNOHANG) == 0) {
            running++;
            continue;
        }
        demo->pids[w] = 0;
        if (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) {
            atomic_fetch_add(&demo->shared->crashes, 1);
            running += worker_start(demo, w) ? 1 : 0;
        } else if (!WIFEXITED(status) || WEXITSTATUS(status) != CTL_OK) {
            if (atomic_fetch_add(&demo->shared->failures, WIFSIGNALED(status) ? 1 : 0) == 0 &&
                WIFSIGNALED(status)) {
                (void)snprintf(demo->shared->failure, sizeof demo->shared->failure,
                               "a worker died of signal %d", WTERMSIG(status));
            }
        }
    }
    return running;
}

static int compare_u32(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a;
    uint32_t y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static double latency_us(struct demo_shared *shared, double share)
{
    uint32_t count = atomic_load(&shared->latency_count);
    count = count > DEMO_LATENCY_COUNT ? DEMO_LATENCY_COUNT : count;
    if (count == 0) {
        return 0;
    }
    qsort(shared->latency_ns, count, sizeof shared->latency_ns[0], compare_u32);
    return shared->latency_ns[(uint32_t)(share * (count - 1))] / 1000.0;
}

static double share_of(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0 : 100.0 * (double)part / (double)whole;
}

static void demo_print(const struct demo *demo)
{
    struct demo_shared *shared = demo->shared;
    double seconds = (double)(demo->ended_ns - demo->started_ns) / 1e9;
    uint64_t blocks = read_count(&shared->blocks);
    double hit = share_of(read_count(&shared->hit_blocks), blocks);
    double ceiling = share_of(read_count(&shared->ceiling_blocks), blocks);
    (void)printf("\n  requests             %s in %.1f s by %llu workers\n",
                 ctl_count(read_count(&shared->requests)), seconds,
                 (unsigned long long)demo->settings->workers);
    (void)printf("  prompt blocks        %s\n", ctl_count(blocks));
    (void)printf("  hit ratio            %.1f %% (a cache without end: %.1f %%)\n", hit, ceiling);
    (void)printf("  look-up              p50 %.0f us, p99 %.0f us\n", latency_us(shared, 0.5),
                 latency_us(shared, 0.99));
    (void)printf("  K/V written          %s (%s tokens)\n",
                 ctl_bytes(read_count(&shared->bytes_written)),
                 ctl_count(read_count(&shared->tokens_written)));
    (void)printf("  K/V verified         %s mapped, %s through gRPC, %s wrong\n",
                 ctl_bytes(read_count(&shared->bytes_verified)),
                 ctl_bytes(read_count(&shared->bytes_streamed)),
                 ctl_count(read_count(&shared->mismatches)));
    (void)printf("  preempted            %s times, %s moved\n",
                 ctl_count(read_count(&shared->swaps)),
                 ctl_bytes(read_count(&shared->swapped_bytes)));
    (void)printf("  forks, drafts        %s, %s tokens\n", ctl_count(read_count(&shared->forks)),
                 ctl_count(read_count(&shared->drafts)));
    (void)printf("  leases               %s, %s blocks had moved on when read\n",
                 ctl_count(read_count(&shared->leases)),
                 ctl_count(read_count(&shared->lost_reads)));
    (void)printf("  crashes on purpose   %s\n", ctl_count(read_count(&shared->crashes)));
    (void)printf("  refused for room     %s times, tried again\n",
                 ctl_count(read_count(&shared->refusals)));
}

static void demo_json(const struct demo *demo)
{
    struct demo_shared *shared = demo->shared;
    uint64_t blocks = read_count(&shared->blocks);
    uint64_t verified = read_count(&shared->bytes_verified) + read_count(&shared->bytes_streamed);
    ctl_json_print(json_pack(
        "{s:I, s:f, s:f, s:f, s:f, s:f, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "requests",
        (json_int_t)read_count(&shared->requests), "seconds",
        (double)(demo->ended_ns - demo->started_ns) / 1e9, "block_hit_ratio",
        share_of(read_count(&shared->hit_blocks), blocks) / 100, "ceiling_block_hit_ratio",
        share_of(read_count(&shared->ceiling_blocks), blocks) / 100, "lookup_p50_us",
        latency_us(shared, 0.5), "lookup_p99_us", latency_us(shared, 0.99), "bytes_written",
        (json_int_t)read_count(&shared->bytes_written), "bytes_verified", (json_int_t)verified,
        "mismatches", (json_int_t)read_count(&shared->mismatches), "swaps",
        (json_int_t)read_count(&shared->swaps), "forks", (json_int_t)read_count(&shared->forks),
        "crashes", (json_int_t)read_count(&shared->crashes), "refusals",
        (json_int_t)read_count(&shared->refusals), "failures",
        (json_int_t)read_count(&shared->failures)));
}

/* The daemon's own view afterwards: nothing may be held any more, evictions, occupancy. */
static int demo_after(const struct demo *demo)
{
    char name[] = "tenants";
    char *arguments[] = {name, NULL};
    (void)printf("\n");
    optind = 1;
    int code = ctl_tenants(demo->options, 1, arguments);
    (void)printf("\n");
    optind = 1;
    code = code == CTL_OK ? ctl_status(demo->options, 1, arguments) : code;
    return code;
}

/* Does a daemon answer? Workers would try for half a minute. Asked by a process of its own, which
 * says what is wrong, for this one has to fork yet. The exit code. */
static int daemon_answers(const struct ctl_options *options)
{
    int status = 0;
    (void)fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        char name[] = "demo";
        char *arguments[] = {name, NULL};
        optind = 1;
        _exit(freopen("/dev/null", "w", stdout) == NULL ? CTL_FAILED
                                                        : ctl_status(options, 1, arguments));
    }
    bool ended = pid > 0 && waitpid(pid, &status, 0) == pid && WIFEXITED(status);
    return ended ? WEXITSTATUS(status) : CTL_FAILED;
}

static int demo_run(const struct ctl_options *options, const struct demo_settings *settings)
{
    int answers = daemon_answers(options);
    if (answers != CTL_OK) {
        return answers;
    }
    struct demo demo = {.options = options, .settings = settings};
    demo.shared =
        mmap(NULL, sizeof *demo.shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (demo.shared == MAP_FAILED) {
        (void)fprintf(stderr, "kvkeepctl demo: no memory\n");
        return CTL_FAILED;
    }
    atomic_store(&demo.shared->requests_left, settings->requests);
    struct ctl_progress progress;
    ctl_progress_begin(&progress, "serving", settings->requests);
    demo.started_ns = kvk_clock_now(kvk_clock_monotonic());
    for (uint32_t w = 0; w < settings->workers; w++) {
        (void)worker_start(&demo, w);
    }
    while (workers_watch(&demo) > 0) {
        struct timespec moment = {.tv_nsec = 20 * 1000000};
        (void)nanosleep(&moment, NULL);
        ctl_progress_show(&progress, read_count(&demo.shared->requests));
    }
    demo.ended_ns = kvk_clock_now(kvk_clock_monotonic());
    ctl_progress_end(&progress);
    int code = CTL_OK;
    if (read_count(&demo.shared->failures) > 0 || read_count(&demo.shared->mismatches) > 0) {
        (void)fprintf(stderr, "kvkeepctl demo: %llu workers failed, %llu tokens wrong: %s\n",
                      (unsigned long long)read_count(&demo.shared->failures),
                      (unsigned long long)read_count(&demo.shared->mismatches),
                      demo.shared->failure);
        code = CTL_FAILED;
    }
    if (options->json) {
        demo_json(&demo);
    } else {
        demo_print(&demo);
        int after = demo_after(&demo);
        code = code == CTL_OK ? after : code;
    }
    munmap(demo.shared, sizeof *demo.shared);
    return code;
}

int ctl_demo(const struct ctl_options *options, int argc, char **argv)
{
    static const struct ctl_command command = {
        .name = "demo",
        .usage = "  --workers N     worker processes (4)\n"
                 "  --requests N    requests over all of them (2000)\n"
                 "  --seed N        of the workload (1)\n"
                 "  --no-crash      workers do not kill themselves now and then\n"};
    static const struct option names[] = {{"workers", required_argument, NULL, 'w'},
                                          {"requests", required_argument, NULL, 'n'},
                                          {"seed", required_argument, NULL, 's'},
                                          {"no-crash", no_argument, NULL, 'c'},
                                          {NULL, 0, NULL, 0}};
    struct demo_settings settings = {.workers = 4, .requests = 2000, .seed = 1, .crash = true};
    bool right = true;
    int option;
    while ((option = getopt_long(argc, argv, "", names, NULL)) != -1) {
        if (option == 'w') {
            right &= ctl_parse_count(optarg, &settings.workers);
        } else if (option == 'n') {
            right &= ctl_parse_count(optarg, &settings.requests);
        } else if (option == 's') {
            right &= ctl_parse_count(optarg, &settings.seed);
        } else if (option == 'c') {
            settings.crash = false;
        } else {
            right = false;
        }
    }
    if (!right || optind != argc || settings.workers < 1 || settings.workers > DEMO_WORKERS_MAX) {
        return ctl_usage(&command, "1 to 64 workers");
    }
    return demo_run(options, &settings);
}
