/*
 * Mixed load for a long time: workers of two tenants that share, swap, grow and fork, some of them
 * killed in the middle and replaced, over a daemon with a disk tier and a keeper. At every sample
 * the daemon checks its own laws, and its memory, descriptors and threads are looked at: they must
 * be flat after a time of warming up.
 *
 *     test_soak_soak [--seconds N] [--sample N] [--seed N]
 *
 * Prints a table, and one line of JSON at the end.
 */
#include "tests/daemon_load.h"
#include "tests/daemon_restart.h"

#define MIB (UINT64_C(1) << 20)

enum {
    WORKERS = 6,
    SAMPLES_MAX = 4096,
};

/* What may be added from the first quarter's highest to the end's: buffers of gRPC come and go. */
#define RSS_GROWTH_BYTES (16 * MIB)
#define DESCRIPTOR_GROWTH 8
#define THREAD_GROWTH 8 /* gRPC starts some as they are wanted, at most a few per processor */

static const char *const tenants[] = {"red", "blue"};

struct sample {
    uint64_t second, sealed, rss_bytes, descriptors, threads, used_bytes[4], kills;
};

struct shared {
    struct load load;
    uint64_t seed;
    struct look look;
};
static struct shared *shared;

static void works(void *number)
{
    struct kvk_random random;
    uint32_t me = (uint32_t)(uintptr_t)number;
    kvk_random_init(&random, shared->seed + now_us() + me);
    open_worker(tenants[me % 2], me < 4 ? "model" : "other");
    for (;;) {
        document((uint32_t)kvk_random_below(&random, DOCUMENTS),
                 kvk_random_between(&random, 1, DOCUMENT_TOKENS));
        one_life(&random);
    }
}

static uint64_t process_threads(pid_t pid)
{
    char path[64];
    char line[256];
    unsigned long long threads = 0;
    (void)snprintf(path, sizeof(path), "/proc/%d/status", (int)pid);
    FILE *file = fopen(path, "r");
    CHECK(file != NULL, "cannot read %s", path);
    while (fgets(line, sizeof(line), file) != NULL &&
           sscanf(line, "Threads: %llu", &threads) != 1) {
    }
    (void)fclose(file);
    return threads;
}

static void take_sample(struct agent *observer, const struct durable_daemon *durable,
                        struct sample *sample)
{
    struct look *look = &shared->look;
    daemon_check_alive(&durable->daemon);
    agent_do(observer, observe_laws, look);
    agent_do(observer, observe_tiers, look);
    sample->sealed = atomic_load(&load->sealed);
    sample->rss_bytes = process_anonymous_bytes(durable->daemon.pid);
    sample->descriptors = process_descriptors(durable->daemon.pid);
    sample->threads = process_threads(durable->daemon.pid);
    for (int i = 1; i < 4; i++) {
        sample->used_bytes[i] = look->tiers[i].used;
        CHECK(look->tiers[i].used + look->tiers[i].free == look->tiers[i].limit,
              "tier %d: used and free are not the whole", i);
    }
    uint64_t disk_bytes = durable_disk_use(durable);
    CHECK(disk_bytes <= durable->disk_bytes, "%llu bytes on disk, limit %llu",
          (unsigned long long)disk_bytes, (unsigned long long)durable->disk_bytes);
}

static void print_sample(const struct sample *sample)
{
    (void)printf("%8llu s  %10llu sealed  %7.1f MiB  %5llu fds  %3llu threads  device %5.1f "
                 "host %5.1f disk %6.1f MiB  %llu killed\n",
                 (unsigned long long)sample->second, (unsigned long long)sample->sealed,
                 (double)sample->rss_bytes / (double)MIB, (unsigned long long)sample->descriptors,
                 (unsigned long long)sample->threads, (double)sample->used_bytes[1] / (double)MIB,
                 (double)sample->used_bytes[2] / (double)MIB,
                 (double)sample->used_bytes[3] / (double)MIB, (unsigned long long)sample->kills);
    (void)fflush(stdout);
}

/* A worker in the middle of anything, and another in its place. */
static void replace_worker(struct agent *agents, struct kvk_random *random)
{
    uint32_t which = (uint32_t)kvk_random_below(random, WORKERS);
    agent_kill(&agents[which]);
    agent_start(&agents[which], "worker", NULL);
    agent_begin(&agents[which], works, (void *)(uintptr_t)which);
}

struct verdict {
    uint64_t rss_growth, descriptor_growth, thread_growth;
    bool flat;
};

static uint64_t above(uint64_t value, uint64_t base)
{
    return value > base ? value - base : 0;
}

/* The highest of the first quarter, which warms up, against the last quarter's lowest: what leaks
 * rises through all of it. */
static struct verdict judge(const struct sample *samples, uint32_t count)
{
    struct sample early = {.second = 0};
    struct sample late = samples[count - 1];
    for (uint32_t i = 0; i < count; i++) {
        const struct sample *at = &samples[i];
        if (i <= count / 4) {
            early.rss_bytes = at->rss_bytes > early.rss_bytes ? at->rss_bytes : early.rss_bytes;
            early.descriptors =
                at->descriptors > early.descriptors ? at->descriptors : early.descriptors;
            early.threads = at->threads > early.threads ? at->threads : early.threads;
        } else if (i >= count - count / 4) {
            late.rss_bytes = at->rss_bytes < late.rss_bytes ? at->rss_bytes : late.rss_bytes;
            late.descriptors =
                at->descriptors < late.descriptors ? at->descriptors : late.descriptors;
            late.threads = at->threads < late.threads ? at->threads : late.threads;
        }
    }
    struct verdict verdict = {.rss_growth = above(late.rss_bytes, early.rss_bytes),
                              .descriptor_growth = above(late.descriptors, early.descriptors),
                              .thread_growth = above(late.threads, early.threads)};
    verdict.flat = verdict.rss_growth <= RSS_GROWTH_BYTES &&
                   verdict.descriptor_growth <= DESCRIPTOR_GROWTH &&
                   verdict.thread_growth <= THREAD_GROWTH;
    return verdict;
}

static uint32_t soak(struct durable_daemon *durable, uint64_t seconds, uint64_t sample_seconds,
                     struct sample *samples)
{
    struct agent agents[WORKERS];
    struct agent observer = {.name = "observer"};
    struct kvk_random random;
    uint32_t count = 0;
    uint64_t kills = 0;
    kvk_random_init(&random, shared->seed);
    agent_start(&observer, "observer", worker_close);
    for (uint32_t i = 0; i < WORKERS; i++) {
        agent_start(&agents[i], "worker", NULL);
        agent_begin(&agents[i], works, (void *)(uintptr_t)i);
    }
    uint64_t begun_ms = now_ms();
    uint64_t next_ms = begun_ms + sample_seconds * 1000;
    bool terminal = isatty(STDOUT_FILENO) == 1;
    while (now_ms() < begun_ms + seconds * 1000 + 500) {
        pause_us(200000 + kvk_random_below(&random, 800000));
        if (kvk_random_chance(&random, 0.3)) {
            replace_worker(agents, &random);
            kills++;
        }
        if (terminal) {
            (void)printf(
                "\r%llu of %llu s, %llu sealed ", (unsigned long long)(now_ms() - begun_ms) / 1000,
                (unsigned long long)seconds, (unsigned long long)atomic_load(&load->sealed));
            (void)fflush(stdout);
        }
        if (now_ms() >= next_ms && count < SAMPLES_MAX) {
            struct sample *sample = &samples[count];
            sample->second = (now_ms() - begun_ms) / 1000;
            sample->kills = kills;
            take_sample(&observer, durable, sample);
            (void)printf(terminal ? "\r" : "");
            print_sample(sample);
            count++;
            next_ms += sample_seconds * 1000;
        }
    }
    for (uint32_t i = 0; i < WORKERS; i++) {
        agent_kill(&agents[i]);
    }
    agent_finish(&observer);
    return count;
}

int main(int argc, char **argv)
{
    static char rest[512];
    static struct sample samples[SAMPLES_MAX];
    struct durable_daemon durable;
    uint64_t seconds = option_number(argc, argv, "--seconds", 20);
    uint64_t sample_seconds = option_number(argc, argv, "--sample", seconds >= 600 ? 60 : 2);
    test_begin((unsigned)(seconds + 120));
    shared = shared_alloc(sizeof(*shared));
    load = &shared->load;
    shared->seed = option_number(argc, argv, "--seed", now_us());
    (void)snprintf(rest, sizeof(rest),
                   "[process]\ncore_dumps = yes\n[tenant red]\n[tenant blue]\n"
                   "[credential all]\nuids = %u\ntenants = red, blue\nadmin = yes\n",
                   (unsigned)getuid());
    const struct durable_setup setup = {.device_bytes = 2 * MIB,
                                        .host_bytes = 4 * MIB,
                                        .disk_bytes = 16 * MIB,
                                        .keeper = true,
                                        .rest = rest};
    durable_configure(&durable, &setup);
    memcpy(load->target, durable.daemon.target, sizeof(load->target));
    memcpy(shared->look.target, durable.daemon.target, sizeof(shared->look.target));
    (void)durable_start(&durable);
    uint32_t count = soak(&durable, seconds, sample_seconds, samples);
    CHECK(count > 0, "no sample was taken");
    durable_end(&durable);
    struct verdict verdict = judge(samples, count);
    (void)printf("{\"seconds\": %llu, \"samples\": %u, \"sealed\": %llu, \"swapped\": %llu, "
                 "\"refused\": %llu, \"killed\": %llu, \"rss_growth_bytes\": %llu, "
                 "\"descriptor_growth\": %llu, \"thread_growth\": %llu, \"flat\": %s}\n",
                 (unsigned long long)seconds, count, (unsigned long long)atomic_load(&load->sealed),
                 (unsigned long long)atomic_load(&load->swapped),
                 (unsigned long long)atomic_load(&load->refused),
                 (unsigned long long)samples[count - 1].kills,
                 (unsigned long long)verdict.rss_growth,
                 (unsigned long long)verdict.descriptor_growth,
                 (unsigned long long)verdict.thread_growth, verdict.flat ? "true" : "false");
    CHECK(verdict.flat, "it grows: at most %llu bytes, %d descriptors, %d threads are allowed",
          (unsigned long long)RSS_GROWTH_BYTES, DESCRIPTOR_GROWTH, THREAD_GROWTH);
    return 0;
}
