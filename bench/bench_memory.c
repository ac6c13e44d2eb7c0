/*
 * What memory of the host tier costs before the first byte is in it, slab by slab as the daemon
 * takes it: in huge pages and in small ones, in turns, in the same run; and what it costs to attach
 * it again, as a warm start does.
 *
 * A virtual machine may have to ask its host for memory that nobody used lately, which takes far
 * longer than all of this: the first round, which is not counted, uses it.
 *
 *     bench_memory [--json] [--mib N] [--slab-mib N] [--rounds N]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "bench/report.h"
#include "gpu/device.h"

#define ROUNDS_MAX 101
#define MS 1e3
#define GIB (double)(UINT64_C(1) << 30)

struct options {
    uint64_t mib, slab_mib;
    uint32_t rounds;
};

enum pages { PAGES_SMALL, PAGES_HUGE, PAGES_COUNT };

/* Medians are taken over the rounds. */
struct figures {
    double back_ms[ROUNDS_MAX];   /* per GiB */
    double slab_ms[ROUNDS_MAX];   /* the slowest of a round */
    double fill_ms[ROUNDS_MAX];   /* per GiB, of setting every byte the first time */
    double attach_ms[ROUNDS_MAX]; /* per GiB */
};

static struct kvk_error error;

static void expect(enum kvk_status status, const char *what)
{
    if (status != KVK_OK) {
        (void)fprintf(stderr, "bench_memory: %s: %s\n", what, error.text);
        exit(1);
    }
}

/* Back all of it; the seconds of the slowest slab. */
static double slabs_back(struct kvk_device *device, struct kvk_region *region,
                         const struct options *options)
{
    const uint64_t slab_bytes = options->slab_mib << 20;
    double worst = 0;
    for (uint64_t at = 0; at < region->size_bytes; at += slab_bytes) {
        double began = kvk_report_seconds();
        expect(device->ops->back(device, region, at, slab_bytes, &error), "backing");
        double took = kvk_report_seconds() - began;
        worst = took > worst ? took : worst;
    }
    return worst;
}

static void round_run(const struct options *options, enum pages pages, struct figures *figures,
                      uint32_t at)
{
    const struct kvk_device_cpu_options wishes = {.attend_thread_count = 1,
                                                  .huge_pages = pages == PAGES_HUGE};
    const uint64_t bytes = options->mib << 20;
    struct kvk_device *device = NULL;
    struct kvk_region region;
    expect(kvk_device_cpu_open(&wishes, &device, &error), "device");
    expect(device->ops->alloc(device, bytes, 0, "bench", &region, &error), "region");
    double began = kvk_report_seconds();
    double worst = slabs_back(device, &region, options);
    double backed = kvk_report_seconds();
    memset(region.address, 7, bytes);
    double filled = kvk_report_seconds();
    int kept = dup(region.fd);
    device->ops->leave(device, &region);
    double left = kvk_report_seconds();
    expect(device->ops->adopt(device, kept, bytes, 0, &region, &error), "attaching");
    (void)slabs_back(device, &region, options);
    double attached = kvk_report_seconds();
    if (region.address[bytes - 1] != 7 || device->ops->backed_bytes(device, &region) != bytes) {
        (void)fprintf(stderr, "bench_memory: what was attached is not what was left\n");
        exit(1);
    }
    device->ops->free(device, &region);
    device->ops->close(device);
    const double gib = (double)bytes / GIB;
    figures->back_ms[at] = (backed - began) * MS / gib;
    figures->slab_ms[at] = worst * MS;
    figures->fill_ms[at] = (filled - backed) * MS / gib;
    figures->attach_ms[at] = (attached - left) * MS / gib;
}

static void options_read(struct options *options, struct kvk_report *report, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(report, argv[i])) {
            continue;
        }
        uint64_t value = i + 1 < argc ? strtoull(argv[i + 1], NULL, 10) : 0;
        if (strcmp(argv[i], "--mib") == 0 && value > 0) {
            options->mib = value;
        } else if (strcmp(argv[i], "--slab-mib") == 0 && value > 0) {
            options->slab_mib = value;
        } else if (strcmp(argv[i], "--rounds") == 0 && value > 0 && value < ROUNDS_MAX) {
            options->rounds = (uint32_t)value;
        } else {
            (void)fprintf(stderr,
                          "usage: bench_memory [--json] [--mib N] [--slab-mib N] "
                          "[--rounds N], at most %d rounds\n",
                          ROUNDS_MAX - 1);
            exit(2);
        }
        i++;
    }
    options->mib = (options->mib + options->slab_mib - 1) / options->slab_mib * options->slab_mib;
}

static void report_row(struct kvk_report *report, const char *name, double *huge, double *small,
                       const char *unit, uint32_t rounds)
{
    kvk_report_ratio(report, name, kvk_report_median(huge, rounds), unit,
                     kvk_report_median(small, rounds));
}

int main(int argc, char **argv)
{
    static struct figures figures[PAGES_COUNT];
    struct options options = {.mib = 1024, .slab_mib = 32, .rounds = 9};
    struct kvk_report report;
    kvk_report_init(&report, "memory");
    options_read(&options, &report, argc, argv);
    for (uint32_t i = 0; i <= options.rounds; i++) { /* the first is overwritten */
        uint32_t at = i == 0 ? 0 : i - 1;
        round_run(&options, PAGES_SMALL, &figures[PAGES_SMALL], at);
        round_run(&options, PAGES_HUGE, &figures[PAGES_HUGE], at);
    }
    struct figures *huge = &figures[PAGES_HUGE];
    struct figures *small = &figures[PAGES_SMALL];
    report_row(&report, "huge pages, taking a GiB", huge->back_ms, small->back_ms, "ms",
               options.rounds);
    report_row(&report, "its slowest slab", huge->slab_ms, small->slab_ms, "ms", options.rounds);
    report_row(&report, "filling it", huge->fill_ms, small->fill_ms, "ms", options.rounds);
    report_row(&report, "attaching it again", huge->attach_ms, small->attach_ms, "ms",
               options.rounds);
    return kvk_report_print(&report);
}
