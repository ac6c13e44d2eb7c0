/*
 * Attention of decoding queries over long cached sequences, on the CPU device: GB/s of K and V
 * read, against a plain read (a sum of all words) of the same memory with as many threads, in the
 * same run. The memory is larger than any cache, and the blocks of a sequence lie scattered in it.
 *
 *     bench_attend [--json] [--mib N] [--threads N] [--path NAME] [--rounds N]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "bench/report.h"
#include "gpu/device.h"
#include "gpu/threads.h"

#define TOKENS 32768
#define BLOCK_TOKENS 16
#define KV_HEADS 8
#define HEAD_SIZE 128
#define VALUE_BYTES 2
#define GROUP_COUNT 3
#define ROUNDS_MAX 101
#define READ_PARTS_PER_THREAD 8

static const uint32_t groups[GROUP_COUNT] = {1, 4, 8};

struct settings {
    uint64_t mib;
    uint32_t threads;
    uint32_t rounds;
    const char *path;
    bool json;
};

/* All sequences of one run; they share one layer's geometry, a block holds just that layer. */
struct workload {
    struct kvk_device *device;
    struct kvk_threads *threads; /* of the plain read: as many as attend has */
    struct kvk_region region;
    uint64_t block_bytes;
    uint32_t block_count; /* of all sequences */
    uint32_t sequence_count;
    const void **pages; /* [block_count] */
    uint16_t *queries;  /* [groups' largest x KV_HEADS][HEAD_SIZE], the same for all sequences */
    float *output;      /* [sequence_count][query heads][HEAD_SIZE] */
    float *lse;
    struct kvk_attend_item *items;
};

static _Noreturn void give_up(const char *what, const char *why)
{
    (void)fprintf(stderr, "bench_attend: %s: %s\n", what, why);
    exit(1);
}

static void *alloc_or_give_up(size_t count, size_t size)
{
    void *memory = calloc(count, size);

    if (memory == NULL) {
        give_up("memory", "there is not enough");
    }
    return memory;
}

/* ---- The plain read ---- */

/* A sum that no compiler leaves out, as wide as the machine's vectors. */
__attribute__((target_clones("avx512f", "avx2", "default"))) static uint64_t
sum_words(const uint64_t *words, uint64_t count)
{
    uint64_t sums[32] = {0};

    for (uint64_t i = 0; i < count; i += 32) {
        for (uint32_t lane = 0; lane < 32; lane++) {
            sums[lane] += words[i + lane];
        }
    }
    uint64_t sum = 0;
    for (uint32_t lane = 0; lane < 32; lane++) {
        sum += sums[lane];
    }
    return sum;
}

static _Atomic uint64_t sum_of_all;

static void read_part(void *context, uint32_t part, uint32_t thread)
{
    const struct workload *load = context;
    uint32_t part_count = kvk_threads_count(load->threads) * READ_PARTS_PER_THREAD;
    uint64_t first = (uint64_t)load->block_count * part / part_count;
    uint64_t end = (uint64_t)load->block_count * (part + 1) / part_count;

    (void)thread;
    sum_of_all += sum_words(
        (const uint64_t *)(const void *)(load->region.address + first * load->block_bytes),
        (end - first) * load->block_bytes / sizeof(uint64_t));
}

static double read_seconds(struct workload *load)
{
    double began = kvk_report_seconds();

    kvk_threads_run(load->threads, kvk_threads_count(load->threads) * READ_PARTS_PER_THREAD,
                    read_part, load);
    return kvk_report_seconds() - began;
}

/* ---- Attention ---- */

static double attend_seconds(struct workload *load, uint32_t group)
{
    struct kvk_attend attend = {
        .items = load->items,
        .item_count = load->sequence_count,
        .query_heads = KV_HEADS * group,
        .kv_heads = KV_HEADS,
        .head_size_k = HEAD_SIZE,
        .head_size_v = HEAD_SIZE,
        .block_tokens = BLOCK_TOKENS,
        .format_q = KVK_FORMAT_BF16,
        .format_k = KVK_FORMAT_BF16,
        .format_v = KVK_FORMAT_BF16,
        .v_offset = load->block_bytes / 2,
        .scale = 1.0F / sqrtf(HEAD_SIZE),
        .causal = true,
    };
    struct kvk_error error;

    double began = kvk_report_seconds();
    if (load->device->ops->attend(load->device, &attend, &error) != KVK_OK) {
        give_up("attend", error.text);
    }
    double took = kvk_report_seconds() - began;
    if (!isfinite(load->output[0]) || !isfinite(load->lse[0])) {
        give_up("attend", "the result is not finite");
    }
    return took;
}

/* ---- The workload ---- */

static uint16_t random_bf16(struct kvk_random *random)
{
    float value = (float)(kvk_random_unit(random) * 2 - 1);
    uint32_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return (uint16_t)(bits >> 16);
}

/* Fill all blocks with values from one random stretch, each from another place in it. */
static void fill_blocks(struct workload *load, struct kvk_random *random)
{
    const uint64_t stretch_values = 4 * load->block_bytes / VALUE_BYTES;
    uint16_t *stretch = alloc_or_give_up(stretch_values, VALUE_BYTES);

    for (uint64_t i = 0; i < stretch_values; i++) {
        stretch[i] = random_bf16(random);
    }
    for (uint32_t block = 0; block < load->block_count; block++) {
        uint64_t from = kvk_random_below(random, stretch_values - load->block_bytes / VALUE_BYTES);
        memcpy(load->region.address + block * load->block_bytes, stretch + from, load->block_bytes);
    }
    free(stretch);
}

/* Deal the blocks out in random order, as an old pool would. */
static void deal_pages(struct workload *load, struct kvk_random *random)
{
    for (uint32_t i = 0; i < load->block_count; i++) {
        load->pages[i] = load->region.address + i * load->block_bytes;
    }
    for (uint32_t i = load->block_count - 1; i > 0; i--) {
        uint32_t other = (uint32_t)kvk_random_below(random, i + 1);
        const void *page = load->pages[i];
        load->pages[i] = load->pages[other];
        load->pages[other] = page;
    }
}

static void make_items(struct workload *load, struct kvk_random *random)
{
    const uint32_t rows = KV_HEADS * groups[GROUP_COUNT - 1];

    load->queries = alloc_or_give_up((size_t)rows * HEAD_SIZE, sizeof(uint16_t));
    for (uint32_t i = 0; i < rows * HEAD_SIZE; i++) {
        load->queries[i] = random_bf16(random);
    }
    load->output = alloc_or_give_up((size_t)load->sequence_count * rows * HEAD_SIZE, sizeof(float));
    load->lse = alloc_or_give_up((size_t)load->sequence_count * rows, sizeof(float));
    load->items = alloc_or_give_up(load->sequence_count, sizeof(*load->items));
    for (uint32_t i = 0; i < load->sequence_count; i++) {
        load->items[i] = (struct kvk_attend_item){
            .queries = load->queries,
            .output = load->output + (size_t)i * rows * HEAD_SIZE,
            .lse = load->lse + (size_t)i * rows,
            .query_count = 1,
            .position = TOKENS - 1,
            .token_count = TOKENS,
            .pages = load->pages + (size_t)i * (TOKENS / BLOCK_TOKENS),
            .page_count = TOKENS / BLOCK_TOKENS,
        };
    }
}

static void workload_init(struct workload *load, const struct settings *settings)
{
    const struct kvk_device_cpu_options options = {
        .attend_thread_count = settings->threads, .huge_pages = true, .path = settings->path};
    struct kvk_device_info info;
    struct kvk_random random;
    struct kvk_error error;

    *load = (struct workload){0};
    kvk_random_init(&random, 1);
    load->block_bytes = (uint64_t)2 * KV_HEADS * BLOCK_TOKENS * HEAD_SIZE * VALUE_BYTES;
    uint64_t sequence_bytes = load->block_bytes * (TOKENS / BLOCK_TOKENS);
    load->sequence_count =
        (uint32_t)(((settings->mib << 20) + sequence_bytes - 1) / sequence_bytes);
    load->block_count = load->sequence_count * (TOKENS / BLOCK_TOKENS);
    uint64_t size_bytes = load->block_count * load->block_bytes;
    if (kvk_device_cpu_open(&options, &load->device, &error) != KVK_OK) {
        give_up("device", error.text);
    }
    load->device->ops->info(load->device, &info);
    if (kvk_threads_create(info.thread_count, "bench-read", &load->threads, &error) != KVK_OK) {
        give_up("threads", error.text);
    }
    if (load->device->ops->alloc(load->device, size_bytes, 0, "bench", &load->region, &error) !=
            KVK_OK ||
        load->device->ops->back(load->device, &load->region, 0, size_bytes, &error) != KVK_OK) {
        give_up("memory", error.text);
    }
    load->pages = alloc_or_give_up(load->block_count, sizeof(*load->pages));
    fill_blocks(load, &random);
    deal_pages(load, &random);
    make_items(load, &random);
    if (!settings->json) {
        (void)printf("%u sequences of %d tokens, %llu MiB, kernels %s, %u threads\n",
                     load->sequence_count, TOKENS, (unsigned long long)(size_bytes >> 20),
                     info.path, info.thread_count);
    }
}

static void workload_finish(struct workload *load)
{
    free(load->items);
    free(load->lse);
    free(load->output);
    free(load->queries);
    free(load->pages);
    load->device->ops->free(load->device, &load->region);
    kvk_threads_destroy(load->threads);
    load->device->ops->close(load->device);
}

/* ---- Measuring ---- */

/* Read and attention in turn, so that both meet the machine in the same mood. */
static void measure(struct workload *load, const struct settings *settings,
                    struct kvk_report *report)
{
    static const char *const names[GROUP_COUNT] = {"attend_g1", "attend_g4", "attend_g8"};
    double gigabytes = (double)load->block_count * (double)load->block_bytes / 1e9;

    for (uint32_t i = 0; i < GROUP_COUNT; i++) {
        double reads[ROUNDS_MAX];
        double attends[ROUNDS_MAX];
        (void)attend_seconds(load, groups[i]); /* warm up */
        for (uint32_t round = 0; round < settings->rounds; round++) {
            reads[round] = gigabytes / read_seconds(load);
            attends[round] = gigabytes / attend_seconds(load, groups[i]);
        }
        kvk_report_ratio(report, names[i], kvk_report_median(attends, settings->rounds), "GB/s",
                         kvk_report_median(reads, settings->rounds));
    }
}

static uint64_t number(const char *option, const char *text, uint64_t max)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);

    if (*text < '0' || *text > '9' || *end != '\0' || value == 0 || value > max) {
        (void)fprintf(stderr, "bench_attend: %s wants a number from 1 to %llu\n", option,
                      (unsigned long long)max);
        exit(2);
    }
    return value;
}

static void parse(int argc, char **argv, struct settings *settings, struct kvk_report *report)
{
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(report, argv[i])) {
            continue;
        }
        if (i + 1 < argc && strcmp(argv[i], "--mib") == 0) {
            settings->mib = number("--mib", argv[++i], UINT64_C(1) << 20);
        } else if (i + 1 < argc && strcmp(argv[i], "--threads") == 0) {
            settings->threads = (uint32_t)number("--threads", argv[++i], KVK_THREAD_COUNT_MAX);
        } else if (i + 1 < argc && strcmp(argv[i], "--rounds") == 0) {
            settings->rounds = (uint32_t)number("--rounds", argv[++i], ROUNDS_MAX);
        } else if (i + 1 < argc && strcmp(argv[i], "--path") == 0) {
            settings->path = argv[++i];
        } else {
            (void)fprintf(stderr, "usage: bench_attend [--json] [--mib N] [--threads N] "
                                  "[--path NAME] [--rounds N]\n");
            exit(2);
        }
    }
    settings->json = report->json;
}

int main(int argc, char **argv)
{
    struct settings settings = {.mib = 2048, .rounds = 7};
    struct kvk_report report;
    struct workload load;

    kvk_report_init(&report, "attend");
    parse(argc, argv, &settings, &report);
    workload_init(&load, &settings);
    measure(&load, &settings, &report);
    workload_finish(&load);
    return kvk_report_print(&report);
}
