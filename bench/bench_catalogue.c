/*
 * The catalogue alone: how fast block records are written, fully synced, and how fast a restart
 * reads them again, with how much memory.
 *
 * The reference of reading is a bare loop over as many bytes in memory that hashes each record as
 * the catalogue has to. Records are written in the order of their slots; then a tenth of them anew,
 * at random places, which costs a page each.
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/assert.h"
#include "base/log.h"
#include "base/random.h"
#include "bench/report.h"
#include "hosttier/catalogue.h"

#define BLOCK_TOKENS 16
#define RECORD_BYTES 160 /* of such a record, about */
#define SPACE 1

struct bench {
    struct kvk_catalogue *catalogue;
    uint32_t record_count;
    char folder[256];
};

static void must(enum kvk_status status, const struct kvk_error *error)
{
    if (status != KVK_OK) {
        (void)fprintf(stderr, "bench_catalogue: %s\n", error->text);
        exit(EXIT_FAILURE);
    }
}

static double cpu_seconds(void)
{
    struct rusage usage;
    int failed = getrusage(RUSAGE_SELF, &usage);
    KVK_ASSERT(failed == 0);
    return (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
           (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
}

/* Memory of our own, without the pages of the file, which are the page cache's. */
static double anonymous_mib(void)
{
    char line[256];
    unsigned long long kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    KVK_ASSERT(file != NULL);
    while (fgets(line, sizeof(line), file) != NULL) {
        if (strncmp(line, "RssAnon:", 8) == 0) {
            kib = strtoull(line + 8, NULL, 10);
        }
    }
    (void)fclose(file);
    return (double)kib / 1024;
}

static void bench_open(struct bench *bench)
{
    struct kvk_error error;
    const struct kvk_catalogue_options options = {.folder = bench->folder, .threads = true};
    must(kvk_catalogue_open(&options, &bench->catalogue, &error), &error);
}

static void put(struct bench *bench, uint32_t slot, uint32_t generation)
{
    uint32_t tokens[BLOCK_TOKENS];
    uint64_t checksum = slot * UINT64_C(0x9e3779b97f4a7c15);
    for (uint32_t i = 0; i < BLOCK_TOKENS; i++) {
        tokens[i] = slot + i;
    }
    struct kvk_disk_block_record record = {.space_id = SPACE,
                                           .slot = slot,
                                           .generation = generation,
                                           .position = slot,
                                           .tokens = tokens,
                                           .token_count = BLOCK_TOKENS,
                                           .checksums = &checksum,
                                           .shard_count = 1};
    memcpy(record.key.bytes, &checksum, sizeof(checksum));
    struct kvk_error error;
    enum kvk_status status;
    while ((status = kvk_catalogue_block_put(bench->catalogue, &record, NULL)) == KVK_EXHAUSTED) {
        must(kvk_catalogue_flush(bench->catalogue, &error), &error);
    }
    KVK_ASSERT(status == KVK_OK);
}

static void bench_write(struct bench *bench, struct kvk_report *report)
{
    struct kvk_error error;
    static const uint8_t identity[] = "identity";
    const struct kvk_space_record space = {.id = SPACE,
                                           .tenant_id = 1,
                                           .generation = 1,
                                           .identity = identity,
                                           .identity_size = sizeof(identity)};
    must(kvk_catalogue_put_space(bench->catalogue, &space, &error), &error);
    double begin = kvk_report_seconds();
    for (uint32_t slot = 0; slot < bench->record_count; slot++) {
        put(bench, slot, 1);
    }
    must(kvk_catalogue_flush(bench->catalogue, &error), &error);
    double seconds = kvk_report_seconds() - begin;
    kvk_report_value(report, "written in order", bench->record_count / seconds / 1e3,
                     "thousand records/s");
    kvk_report_value(report, "own memory after writing", anonymous_mib(), "MiB");

    struct kvk_random random;
    kvk_random_init(&random, 1);
    uint32_t count = bench->record_count / 10;
    begin = kvk_report_seconds();
    for (uint32_t i = 0; i < count; i++) {
        put(bench, (uint32_t)kvk_random_below(&random, bench->record_count), 2);
    }
    must(kvk_catalogue_flush(bench->catalogue, &error), &error);
    seconds = kvk_report_seconds() - begin;
    kvk_report_value(report, "written at random", count / seconds / 1e3, "thousand records/s");
    struct kvk_catalogue_stats stats;
    kvk_catalogue_stats(bench->catalogue, &stats);
    kvk_report_value(report, "bytes in use per record",
                     (double)stats.used_bytes / bench->record_count, "B");
}

static bool count_record(void *context, const struct kvk_disk_block_record *record)
{
    uint64_t *sum = context;
    *sum += record->slot + record->tokens[0] + record->checksums[0];
    return true;
}

static double reference_seconds(uint32_t count)
{
    uint8_t *bytes = malloc((size_t)count * RECORD_BYTES);
    KVK_ASSERT(bytes != NULL);
    memset(bytes, 1, (size_t)count * RECORD_BYTES);
    double begin = kvk_report_seconds();
    uint64_t hash = 0;
    for (uint32_t i = 0; i < count; i++) {
        const uint8_t *at = bytes + (size_t)i * RECORD_BYTES;
        hash += XXH3_64bits_withSeed(at + 16, RECORD_BYTES - 16, XXH3_64bits(at, 24));
    }
    double seconds = kvk_report_seconds() - begin;
    KVK_ASSERT(hash != 1);
    free(bytes);
    return seconds;
}

static void bench_read(struct bench *bench, struct kvk_report *report)
{
    struct kvk_error error;
    uint64_t sum = 0;
    kvk_catalogue_close(bench->catalogue);
    malloc_trim(0);
    double before_mib = anonymous_mib();
    double cpu = cpu_seconds();
    double begin = kvk_report_seconds();
    bench_open(bench);
    must(kvk_catalogue_blocks(bench->catalogue, SPACE, count_record, &sum, &error), &error);
    double seconds = kvk_report_seconds() - begin;
    cpu = cpu_seconds() - cpu;
    kvk_report_ratio(report, "opened and read", seconds, "s",
                     reference_seconds(bench->record_count));
    kvk_report_value(report, "processor time of that", cpu, "s");
    kvk_report_value(report, "own memory for it", anonymous_mib() - before_mib, "MiB");
}

int main(int argc, char **argv)
{
    struct bench bench = {.record_count = 1000000};
    struct kvk_report report;
    const char *under = "/tmp";
    kvk_report_init(&report, "catalogue");
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        if (strcmp(argv[i], "--records") == 0 && i + 1 < argc) {
            bench.record_count = (uint32_t)strtoul(argv[++i], NULL, 10);
        } else if (strcmp(argv[i], "--folder") == 0 && i + 1 < argc) {
            under = argv[++i];
        } else {
            bench.record_count = 0;
        }
    }
    int size = snprintf(bench.folder, sizeof(bench.folder), "%s/bench-catalogue-XXXXXX", under);
    if (bench.record_count < 10 || size < 0 || (size_t)size >= sizeof(bench.folder) ||
        mkdtemp(bench.folder) == NULL) {
        (void)fprintf(stderr, "usage: bench_catalogue [--json] [--records N] [--folder FOLDER]\n"
                              "N: at least 10; 1000000 unless given. FOLDER: where to write; /tmp "
                              "unless given\n");
        return 2;
    }
    kvk_log_set_level(KVK_LOG_WARNING);
    bench_open(&bench);
    bench_write(&bench, &report);
    bench_read(&bench, &report);
    kvk_catalogue_close(bench.catalogue);
    static const char *const files[] = {"catalogue/data.mdb", "catalogue/lock.mdb", "catalogue",
                                        "lock", "."};
    for (size_t i = 0; i < sizeof(files) / sizeof(files[0]); i++) {
        char path[320];
        (void)snprintf(path, sizeof(path), "%s/%s", bench.folder, files[i]);
        (void)remove(i + 1 < sizeof(files) / sizeof(files[0]) ? path : bench.folder);
    }
    return kvk_report_print(&report);
}
