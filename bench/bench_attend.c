/*
 * Attention of decoding queries over long cached sequences, on the CPU device: GB/s of K and V
 * read, against a plain read (a sum of all words) of the same memory with as many threads, in the
 * same run. The memory is larger than any cache, and the blocks of a sequence lie scattered in it.
 * Compact formats: tokens/s against bf16's, in turn, over as many tokens.
 *
 *     bench_attend [--json] [--mib N] [--threads N] [--path NAME] [--rounds N]
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "bench/report.h"
#include "gpu/convert.h"
#include "gpu/device.h"
#include "gpu/threads.h"

#define TOKENS 32768
#define TOKENS_MAX 131072
#define SHARING_COUNT 16
#define BLOCK_TOKENS 16
#define KV_HEADS 8
#define HEAD_SIZE 128
#define VALUE_BYTES 2
#define GROUP_COUNT 3
#define GROUP_MAX 8
#define ROUNDS_MAX 101
#define READ_PARTS_PER_THREAD 8

static const uint32_t groups[GROUP_COUNT] = {1, 4, GROUP_MAX};

static const struct {
    enum kvk_format format;
    const char *names[GROUP_COUNT];
} compacts[] = {
    {KVK_FORMAT_INT8_CHANNEL, {"int8_channel_g1", "int8_channel_g4", "int8_channel_g8"}},
    {KVK_FORMAT_INT8_32, {"int8_32_g1", "int8_32_g4", "int8_32_g8"}},
    {KVK_FORMAT_FP8_E4M3, {"fp8_e4m3_g1", "fp8_e4m3_g4", "fp8_e4m3_g8"}},
};

struct settings {
    uint64_t mib;
    uint32_t threads;
    uint32_t rounds;
    const char *path;
    bool json;
    uint32_t shape_tokens; /* 0: no shape of its own */
    uint32_t shape_sequences;
    uint32_t shape_group;
};

/* All sequences of one run; they share one layer's geometry, a block holds just that layer. */
struct workload {
    enum kvk_format format;
    struct kvk_part k; /* of a block */
    struct kvk_part v;
    struct kvk_device *device;
    struct kvk_threads *threads; /* of the plain read: as many as attend has */
    struct kvk_region region;
    uint64_t block_bytes;
    uint32_t block_count; /* of all sequences */
    uint32_t sequence_count;
    const void **pages; /* [block_count] */
    uint16_t *queries;  /* [groups' largest x KV_HEADS][HEAD_SIZE], the same for all sequences */
    float *output;      /* [items_max][query heads][HEAD_SIZE] */
    float *lse;
    struct kvk_attend_item *items; /* [items_max] */
    uint32_t items_max;
    uint32_t item_count; /* of the present batch */
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
        .item_count = load->item_count,
        .query_heads = KV_HEADS * group,
        .kv_heads = KV_HEADS,
        .head_size_k = HEAD_SIZE,
        .head_size_v = HEAD_SIZE,
        .block_tokens = BLOCK_TOKENS,
        .format_q = KVK_FORMAT_BF16,
        .format_k = load->format,
        .format_v = load->format,
        .v_offset = load->k.size_bytes,
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

/* A block of bf16, K and V, in the workload's format. */
static void fill_block(struct workload *load, const uint16_t *values, uint8_t *block)
{
    const struct kvk_part k =
        kvk_part_of(KVK_FORMAT_BF16, false, KV_HEADS, BLOCK_TOKENS, HEAD_SIZE);
    const struct kvk_part v = kvk_part_of(KVK_FORMAT_BF16, true, KV_HEADS, BLOCK_TOKENS, HEAD_SIZE);
    const struct kvk_convert_kernel *kernel = kvk_convert_find(NULL);
    struct kvk_error error;

    if (load->format == KVK_FORMAT_BF16) {
        memcpy(block, values, load->block_bytes);
        return;
    }
    if (kvk_convert_narrow(kernel, &k, values, &load->k, block, &error) != KVK_OK ||
        kvk_convert_narrow(kernel, &v, values + k.size_bytes / VALUE_BYTES, &load->v,
                           block + load->k.size_bytes, &error) != KVK_OK) {
        give_up("convert", error.text);
    }
}

/* Fill all blocks with values from one random stretch, each from another place in it. */
static void fill_blocks(struct workload *load, struct kvk_random *random)
{
    const uint64_t block_values = (uint64_t)2 * KV_HEADS * BLOCK_TOKENS * HEAD_SIZE;
    const uint64_t stretch_values = 4 * block_values;
    uint16_t *stretch = alloc_or_give_up(stretch_values, VALUE_BYTES);

    for (uint64_t i = 0; i < stretch_values; i++) {
        stretch[i] = random_bf16(random);
    }
    for (uint32_t block = 0; block < load->block_count; block++) {
        uint64_t from = kvk_random_below(random, stretch_values - block_values);
        fill_block(load, stretch + from, load->region.address + block * load->block_bytes);
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

static void make_operands(struct workload *load, struct kvk_random *random)
{
    const uint32_t rows = KV_HEADS * GROUP_MAX;

    load->items_max = load->sequence_count > SHARING_COUNT ? load->sequence_count : SHARING_COUNT;
    load->queries = alloc_or_give_up((size_t)rows * HEAD_SIZE, sizeof(uint16_t));
    for (uint32_t i = 0; i < rows * HEAD_SIZE; i++) {
        load->queries[i] = random_bf16(random);
    }
    load->output = alloc_or_give_up((size_t)load->items_max * rows * HEAD_SIZE, sizeof(float));
    load->lse = alloc_or_give_up((size_t)load->items_max * rows, sizeof(float));
    load->items = alloc_or_give_up(load->items_max, sizeof(*load->items));
}

/* A batch of sequences that all begin at block `first` of the table, or each at its own. */
static void make_items(struct workload *load, uint32_t count, uint32_t tokens, bool shared)
{
    const uint32_t rows = KV_HEADS * GROUP_MAX;
    const uint32_t page_count = tokens / BLOCK_TOKENS;

    load->item_count = count;
    for (uint32_t i = 0; i < count; i++) {
        load->items[i] = (struct kvk_attend_item){
            .queries = load->queries,
            .output = load->output + (size_t)i * rows * HEAD_SIZE,
            .lse = load->lse + (size_t)i * rows,
            .query_count = 1,
            .position = tokens - 1,
            .token_count = tokens,
            .pages = load->pages + (shared ? 0 : (size_t)i * page_count),
            .page_count = page_count,
        };
    }
}

static void workload_init(struct workload *load, enum kvk_format format,
                          const struct settings *settings)
{
    const struct kvk_device_cpu_options options = {
        .attend_thread_count = settings->threads, .huge_pages = true, .path = settings->path};
    struct kvk_device_info info;
    struct kvk_random random;
    struct kvk_error error;

    *load = (struct workload){
        .format = format,
        .k = kvk_part_of(format, false, KV_HEADS, BLOCK_TOKENS, HEAD_SIZE),
        .v = kvk_part_of(format, true, KV_HEADS, BLOCK_TOKENS, HEAD_SIZE),
    };
    kvk_random_init(&random, 1);
    load->block_bytes = load->k.size_bytes + load->v.size_bytes;
    uint64_t sequence_bytes = (uint64_t)2 * KV_HEADS * TOKENS * HEAD_SIZE * VALUE_BYTES; /* bf16 */
    load->sequence_count =
        (uint32_t)(((settings->mib << 20) + sequence_bytes - 1) / sequence_bytes);
    load->block_count = load->sequence_count * (TOKENS / BLOCK_TOKENS);
    if (settings->shape_tokens > 0) {
        load->sequence_count = settings->shape_sequences;
        load->block_count = load->sequence_count * (settings->shape_tokens / BLOCK_TOKENS);
    }
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
    make_operands(load, &random);
    if (!settings->json) {
        (void)printf("%u sequences of %d tokens, %s, %llu MiB, kernels %s, %u threads\n",
                     load->sequence_count, TOKENS, kvk_format_name(format),
                     (unsigned long long)(size_bytes >> 20), info.path, info.thread_count);
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
static void measure_batch(struct workload *load, const struct settings *settings, uint32_t group,
                          const char *name, struct kvk_report *report)
{
    double gigabytes = (double)load->block_count * (double)load->block_bytes / 1e9;
    double reads[ROUNDS_MAX];
    double attends[ROUNDS_MAX];

    (void)attend_seconds(load, group); /* warm up */
    for (uint32_t round = 0; round < settings->rounds; round++) {
        reads[round] = gigabytes / read_seconds(load);
        attends[round] = gigabytes / attend_seconds(load, group);
    }
    kvk_report_ratio(report, name, kvk_report_median(attends, settings->rounds), "GB/s",
                     kvk_report_median(reads, settings->rounds));
}

/* One batch of all that share, and one of one of them, times their number. */
static void measure_shared(struct workload *load, const struct settings *settings, uint32_t group,
                           const char *name, struct kvk_report *report)
{
    double together[ROUNDS_MAX];
    double alone[ROUNDS_MAX];

    for (uint32_t round = 0; round < settings->rounds; round++) {
        make_items(load, SHARING_COUNT, TOKENS, true);
        together[round] = SHARING_COUNT / attend_seconds(load, group);
        make_items(load, 1, TOKENS, true);
        alone[round] = 1 / attend_seconds(load, group);
    }
    kvk_report_ratio(report, name, kvk_report_median(together, settings->rounds), "items/s",
                     kvk_report_median(alone, settings->rounds));
}

static void measure(struct workload *load, const struct settings *settings,
                    struct kvk_report *report)
{
    static const char *const names[GROUP_COUNT] = {"attend_g1", "attend_g4", "attend_g8"};
    static const char *const shared[GROUP_COUNT] = {"shared16_g1", "shared16_g4", "shared16_g8"};
    const uint32_t long_count = load->block_count / (TOKENS_MAX / BLOCK_TOKENS);

    make_items(load, load->sequence_count, TOKENS, false);
    for (uint32_t i = 0; i < GROUP_COUNT; i++) {
        measure_batch(load, settings, groups[i], names[i], report);
    }
    if (long_count * (TOKENS_MAX / BLOCK_TOKENS) == load->block_count) {
        make_items(load, long_count, TOKENS_MAX, false);
        measure_batch(load, settings, 4, "attend_128k_g4", report);
    }
    for (uint32_t i = 0; i < GROUP_COUNT; i++) {
        measure_shared(load, settings, groups[i], shared[i], report);
    }
}

/* A format of fewer bytes against bf16, in turn, over as many tokens. */
static void measure_compact(struct workload *load, const struct settings *settings,
                            enum kvk_format format, const char *const *names,
                            struct kvk_report *report)
{
    struct workload compact;
    double tokens = (double)load->sequence_count * TOKENS;

    workload_init(&compact, format, settings);
    make_items(&compact, compact.sequence_count, TOKENS, false);
    make_items(load, load->sequence_count, TOKENS, false);
    for (uint32_t i = 0; i < GROUP_COUNT; i++) {
        double plain[ROUNDS_MAX];
        double small[ROUNDS_MAX];
        (void)attend_seconds(&compact, groups[i]); /* warm up */
        for (uint32_t round = 0; round < settings->rounds; round++) {
            plain[round] = tokens / attend_seconds(load, groups[i]) / 1e6;
            small[round] = tokens / attend_seconds(&compact, groups[i]) / 1e6;
        }
        kvk_report_ratio(report, names[i], kvk_report_median(small, settings->rounds), "Mtokens/s",
                         kvk_report_median(plain, settings->rounds));
    }
    workload_finish(&compact);
}

static void measure_shape(struct workload *load, const struct settings *settings,
                          struct kvk_report *report)
{
    double took[ROUNDS_MAX];

    make_items(load, settings->shape_sequences, settings->shape_tokens, false);
    (void)attend_seconds(load, settings->shape_group);
    for (uint32_t round = 0; round < settings->rounds; round++) {
        took[round] = attend_seconds(load, settings->shape_group) * 1e3;
    }
    kvk_report_value(report, "attend_shape", kvk_report_median(took, settings->rounds), "ms");
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

static void parse_shape(const char *text, struct settings *settings)
{
    const uint64_t limits[] = {TOKENS_MAX, 1024, GROUP_MAX};
    uint64_t numbers[3] = {0};
    char part[16];

    for (uint32_t i = 0; i < 3; i++) {
        size_t size = strcspn(text, ",");
        (void)snprintf(part, sizeof(part), "%.*s", (int)(size < 15 ? size : 15), text);
        numbers[i] = number("--shape", part, limits[i]);
        text += text[size] == ',' ? size + 1 : size;
    }
    settings->shape_tokens = (uint32_t)numbers[0] / BLOCK_TOKENS * BLOCK_TOKENS;
    settings->shape_sequences = (uint32_t)numbers[1];
    settings->shape_group = (uint32_t)numbers[2];
    if (settings->shape_tokens == 0) {
        give_up("--shape", "a sequence has at least 16 tokens");
    }
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
        } else if (i + 1 < argc && strcmp(argv[i], "--shape") == 0) {
            parse_shape(argv[++i], settings);
        } else if (i + 1 < argc && strcmp(argv[i], "--path") == 0) {
            settings->path = argv[++i];
        } else {
            (void)fprintf(stderr, "usage: bench_attend [--json] [--mib N] [--threads N] "
                                  "[--path NAME] [--rounds N] "
                                  "[--shape TOKENS,SEQUENCES,GROUP]\n");
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
    workload_init(&load, KVK_FORMAT_BF16, &settings);
    if (settings.shape_tokens > 0) {
        measure_shape(&load, &settings, &report);
    } else {
        measure(&load, &settings, &report);
        for (uint32_t i = 0; i < sizeof(compacts) / sizeof(compacts[0]); i++) {
            measure_compact(&load, &settings, compacts[i].format, compacts[i].names, &report);
        }
    }
    workload_finish(&load);
    return kvk_report_print(&report);
}
