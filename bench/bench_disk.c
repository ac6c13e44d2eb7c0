/*
 * The disk store, reading and writing whole blocks with their checksums, against what fio does with
 * the very same file: same sizes, same depth, direct or not alike, in turns in the same run.
 *
 *     bench_disk [--json] [--folder F] [--mib N] [--rounds N] [--depth N] [--buffered] [--threads]
 *
 * The folder decides which file system is measured. Every block that comes back is compared by
 * its checksum. Without fio on the machine there are figures, but no reference; that is said.
 * Last, how long one restore takes alone, and while write-behind has all it can use of the disk.
 */
#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/copy.h"
#include "base/random.h"
#include "bench/fio.h"
#include "bench/report.h"
#include "hosttier/disk.h"
#include "tests/folder.h"

#define ROUNDS_MAX 32
#define PATH_SIZE 256
#define RESTORE_COUNT 200
#define RESTORE_BYTES (UINT64_C(2) << 20)

struct bench {
    struct kvk_report report;
    const char *root;
    char folder[PATH_SIZE];
    uint64_t bytes;
    uint32_t rounds;
    uint32_t depth;
    bool direct;
    bool uring;
    bool fio;
    const char *fio_engine;
    struct kvk_disk *disk;
    uint8_t *memory; /* [bytes] */
    uint64_t *checksums;
    struct kvk_disk_piece *pieces;
};

static _Noreturn void give_up(const char *what, const char *why)
{
    (void)fprintf(stderr, "bench_disk: %s: %s\n", what, why);
    exit(1);
}

/* ---- ours ---- */

static uint32_t pieces_make(struct bench *bench, struct kvk_disk_file *file, uint64_t block)
{
    uint32_t count = (uint32_t)(bench->bytes / block);
    for (uint32_t i = 0; i < count; i++) {
        bench->pieces[i] = (struct kvk_disk_piece){.file = file,
                                                   .slot = i,
                                                   .memory = bench->memory + i * block,
                                                   .size_bytes = block,
                                                   .checksum = &bench->checksums[i]};
    }
    return count;
}

/* Bytes per second of one pass, all checksums taken; a write is synced. */
static double our_pass(struct bench *bench, bool write, struct kvk_disk_file *file, uint64_t block)
{
    struct kvk_error error;
    uint32_t count = pieces_make(bench, file, block);
    double began = kvk_report_seconds();
    enum kvk_status status =
        write ? kvk_disk_write(bench->disk, KVK_DISK_BEHIND, bench->pieces, count, &error)
              : kvk_disk_read(bench->disk, KVK_DISK_RESTORE, bench->pieces, count, &error);
    if (status == KVK_OK && write) {
        status = kvk_disk_sync(file, &error);
    }
    if (status != KVK_OK) {
        give_up(write ? "write" : "read", error.text);
    }
    return (double)bench->bytes / (kvk_report_seconds() - began);
}

static void size_measure(struct bench *bench, uint32_t group, uint64_t block,
                         const char *const names[2])
{
    struct kvk_disk_file *file = NULL;
    struct kvk_error error;
    char path[2 * PATH_SIZE];
    uint32_t count = (uint32_t)(bench->bytes / block);
    uint64_t *right = malloc(count * sizeof(*right));
    if (right == NULL ||
        kvk_disk_file_open(bench->disk, 1, group, block, count, &file, &error) != KVK_OK ||
        kvk_disk_file_allocate(file, 0, count, &error) != KVK_OK) {
        give_up("file", right == NULL ? "no memory" : error.text);
    }
    (void)snprintf(path, sizeof(path), "%s/blocks-%016llx-%u", bench->folder, 1ULL, group);

    for (uint32_t pass = 0; pass < 2; pass++) {
        bool write = pass == 0;
        double ours[ROUNDS_MAX], theirs[ROUNDS_MAX];
        if (!write) {
            /* What fio left in the file is not ours any more. */
            (void)our_pass(bench, true, file, block);
            memcpy(right, bench->checksums, count * sizeof(*right));
        }
        for (uint32_t round = 0; round < bench->rounds; round++) {
            ours[round] = our_pass(bench, write, file, block) / 1e6;
            if (!write && memcmp(right, bench->checksums, count * sizeof(*right)) != 0) {
                give_up("read", "other bytes came back than were written");
            }
            const struct kvk_fio_pass reference_pass = {.path = path,
                                                        .size_bytes = bench->bytes,
                                                        .block_bytes = block,
                                                        .depth = bench->depth,
                                                        .direct = bench->direct,
                                                        .write = write,
                                                        .engine = bench->fio_engine};
            theirs[round] = bench->fio ? kvk_fio_run(&reference_pass) / 1e6 : NAN;
        }
        double reference = kvk_report_median(theirs, bench->rounds);
        double value = kvk_report_median(ours, bench->rounds);
        if (bench->fio && !isnan(reference)) {
            kvk_report_ratio(&bench->report, names[pass], value, "MB/s", reference);
        } else {
            kvk_report_value(&bench->report, names[pass], value, "MB/s");
        }
    }
    free(right);
    kvk_disk_file_close(file);
    if (kvk_disk_file_remove(bench->disk, 1, group, &error) != KVK_OK) {
        give_up("remove", error.text);
    }
}

/* ---- One restore, alone and beside write-behind ---- */

struct behind {
    struct bench *bench;
    struct kvk_disk_file *file;
    _Atomic bool stop;
    _Atomic bool begun;
};

static void *behind_main(void *context)
{
    struct behind *behind = context;
    struct bench *bench = behind->bench;
    uint32_t count = (uint32_t)(bench->bytes / RESTORE_BYTES) / 2;
    struct kvk_error error;
    while (!atomic_load(&behind->stop)) {
        for (uint32_t i = 0; i < count; i++) {
            bench->pieces[i] = (struct kvk_disk_piece){.file = behind->file,
                                                       .slot = i,
                                                       .memory = bench->memory + i * RESTORE_BYTES,
                                                       .size_bytes = RESTORE_BYTES};
        }
        atomic_store(&behind->begun, true);
        if (kvk_disk_write(bench->disk, KVK_DISK_BEHIND, bench->pieces, count, &error) != KVK_OK) {
            give_up("write", error.text);
        }
    }
    return NULL;
}

static int double_compare(const void *left, const void *right)
{
    double a = *(const double *)left;
    double b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The 99th of a hundred restores of one block, in milliseconds. */
static double restore_p99_ms(struct bench *bench, struct kvk_disk_file *file)
{
    static double took[RESTORE_COUNT];
    struct kvk_random random;
    struct kvk_error error;
    uint32_t half = (uint32_t)(bench->bytes / RESTORE_BYTES) / 2;
    kvk_random_init(&random, 1);
    for (uint32_t i = 0; i < RESTORE_COUNT; i++) {
        uint64_t checksum = 0;
        struct kvk_disk_piece piece = {.file = file,
                                       .slot = half + (uint32_t)kvk_random_below(&random, half),
                                       .memory = bench->memory + half * RESTORE_BYTES,
                                       .size_bytes = RESTORE_BYTES,
                                       .checksum = &checksum};
        double began = kvk_report_seconds();
        if (kvk_disk_read(bench->disk, KVK_DISK_RESTORE, &piece, 1, &error) != KVK_OK) {
            give_up("read", error.text);
        }
        took[i] = (kvk_report_seconds() - began) * 1e3;
        (void)usleep(2000);
    }
    qsort(took, RESTORE_COUNT, sizeof(took[0]), double_compare);
    return took[RESTORE_COUNT * 99 / 100];
}

static void classes_measure(struct bench *bench)
{
    struct behind behind = {.bench = bench};
    struct kvk_error error;
    pthread_t thread;
    uint32_t count = (uint32_t)(bench->bytes / RESTORE_BYTES);
    if (kvk_disk_file_open(bench->disk, 1, 9, RESTORE_BYTES, count, &behind.file, &error) !=
            KVK_OK ||
        kvk_disk_file_allocate(behind.file, 0, count, &error) != KVK_OK) {
        give_up("file", error.text);
    }
    (void)our_pass(bench, true, behind.file, RESTORE_BYTES);
    double alone = restore_p99_ms(bench, behind.file);
    if (pthread_create(&thread, NULL, behind_main, &behind) != 0) {
        give_up("thread", "could not be started");
    }
    while (!atomic_load(&behind.begun)) {
        (void)usleep(100);
    }
    double beside = restore_p99_ms(bench, behind.file);
    atomic_store(&behind.stop, true);
    (void)pthread_join(thread, NULL);
    kvk_report_ratio(&bench->report, "restore of 2 MiB, p99, writes behind it", beside, "ms",
                     alone);
    kvk_disk_file_close(behind.file);
}

/* ---- main ---- */

static uint32_t number(const char *option, const char *text, uint32_t low, uint32_t high)
{
    char *end = NULL;
    unsigned long value = text != NULL ? strtoul(text, &end, 10) : 0;
    if (text == NULL || *text == '\0' || *end != '\0' || value < low || value > high) {
        (void)fprintf(stderr, "bench_disk: %s takes a number from %u to %u\n", option, low, high);
        exit(2);
    }
    return (uint32_t)value;
}

static void options_read(struct bench *bench, int count, char **arguments)
{
    for (int i = 1; i < count; i++) {
        const char *option = arguments[i];
        const char *value = i + 1 < count ? arguments[i + 1] : NULL;
        if (kvk_report_option(&bench->report, option)) {
            continue;
        }
        if (strcmp(option, "--buffered") == 0) {
            bench->direct = false;
        } else if (strcmp(option, "--threads") == 0) {
            bench->uring = false;
        } else if (strcmp(option, "--folder") == 0 && value != NULL) {
            bench->root = value;
            i++;
        } else if (strcmp(option, "--mib") == 0) {
            bench->bytes = (uint64_t)number(option, value, 64, 1U << 20) << 20;
            i++;
        } else if (strcmp(option, "--rounds") == 0) {
            bench->rounds = number(option, value, 1, ROUNDS_MAX);
            i++;
        } else if (strcmp(option, "--depth") == 0) {
            bench->depth = number(option, value, 1, 1024);
            i++;
        } else {
            (void)fprintf(stderr, "usage: bench_disk [--json] [--folder F] [--mib N] [--rounds N] "
                                  "[--depth N] [--buffered] [--threads]\n");
            exit(2);
        }
    }
}

static void bench_open(struct bench *bench)
{
    struct kvk_error error;
    (void)snprintf(bench->folder, sizeof(bench->folder), "%s/kvkeep-bench-XXXXXX", bench->root);
    if (mkdtemp(bench->folder) == NULL) {
        give_up(bench->folder, strerror(errno));
    }
    struct kvk_disk_options options = {.folder = bench->folder,
                                       .depth = bench->depth,
                                       .thread_count = 16,
                                       .direct = bench->direct,
                                       .uring = bench->uring};
    if (kvk_disk_open(&options, &bench->disk, &error) != KVK_OK) {
        give_up("disk", error.text);
    }
    const char *path = kvk_disk_path_name(bench->disk);
    bench->direct = strstr(path, "direct") != NULL;
    bench->fio = kvk_fio_is_there();
    bench->fio_engine = strstr(path, "uring") != NULL ? "io_uring" : "libaio";
    (void)fprintf(stderr, "bench_disk: %s, %llu MiB, depth %u, reference: %s\n", path,
                  (unsigned long long)(bench->bytes >> 20), bench->depth,
                  bench->fio ? "fio" : "none, fio is not installed: figures without a ratio");

    bench->memory =
        mmap(NULL, bench->bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    bench->pieces = calloc(bench->bytes >> 18, sizeof(*bench->pieces));
    bench->checksums = calloc(bench->bytes >> 18, sizeof(*bench->checksums));
    if (bench->memory == MAP_FAILED || bench->pieces == NULL || bench->checksums == NULL) {
        give_up("memory", "there is not enough");
    }
    (void)madvise(bench->memory, bench->bytes, MADV_HUGEPAGE);
    struct kvk_random random;
    kvk_random_init(&random, 1);
    kvk_random_fill(&random, bench->memory, bench->bytes);
}

int main(int count, char **arguments)
{
    static struct bench bench;
    kvk_report_init(&bench.report, "disk");
    bench.root = "/var/tmp";
    bench.bytes = UINT64_C(512) << 20;
    bench.rounds = 5;
    bench.depth = 64;
    bench.direct = true;
    bench.uring = true;
    options_read(&bench, count, arguments);
    (void)signal(SIGPIPE, SIG_IGN);
    bench_open(&bench);

    static const char *const large[] = {"write of 2 MiB blocks, synced", "restore of 2 MiB blocks"};
    static const char *const small[] = {"write of 256 KiB blocks, synced",
                                        "restore of 256 KiB blocks"};
    size_measure(&bench, 0, UINT64_C(2) << 20, large);
    size_measure(&bench, 1, UINT64_C(256) << 10, small);
    classes_measure(&bench);

    kvk_disk_close(bench.disk);
    folder_remove(bench.folder);
    free(bench.pieces);
    free(bench.checksums);
    return kvk_report_print(&bench.report);
}
