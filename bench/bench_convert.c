/*
 * Conversion of blocks from bf16 to compact formats and back, on one thread, against memcpy of the
 * same bf16 bytes in the same run: GB/s are of bf16 bytes, read by the one, written by the other,
 * whatever is on the compact side. The memory is larger than any cache.
 *
 *     bench_convert [--json] [--mib N] [--path NAME] [--rounds N]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/random.h"
#include "bench/report.h"
#include "gpu/convert.h"

#define ROUNDS_MAX 101
#define FORMAT_COUNT 3

struct direction {
    enum kvk_format format;
    const char *narrow; /* the figure's name */
    const char *widen;
};

static const struct direction directions[FORMAT_COUNT] = {
    {KVK_FORMAT_INT8_CHANNEL, "bf16_to_int8_channel", "int8_channel_to_bf16"},
    {KVK_FORMAT_INT8_32, "bf16_to_int8_32", "int8_32_to_bf16"},
    {KVK_FORMAT_FP8_E4M3, "bf16_to_fp8_e4m3", "fp8_e4m3_to_bf16"},
};

struct workload {
    const struct kvk_convert_kernel *kernel;
    struct kvk_geometry wide;
    struct kvk_geometry narrow;
    uint64_t block_count;
    uint64_t wide_bytes; /* of a block */
    uint64_t narrow_bytes;
    uint8_t *source;  /* [block_count][wide_bytes] */
    uint8_t *target;  /* likewise */
    uint8_t *compact; /* [block_count][wide_bytes]: room for any format */
};

static _Noreturn void give_up(const char *what, const char *why)
{
    (void)fprintf(stderr, "bench_convert: %s: %s\n", what, why);
    exit(1);
}

static uint8_t *alloc_or_give_up(uint64_t size_bytes)
{
    uint8_t *memory = aligned_alloc(4096, (size_bytes + 4095) / 4096 * 4096);

    if (memory == NULL) {
        give_up("memory", "there is not enough");
    }
    memset(memory, 0, size_bytes);
    return memory;
}

static void workload_init(struct workload *load, uint64_t mib, const char *path)
{
    struct kvk_random random;

    *load = (struct workload){
        .kernel = kvk_convert_find(path),
        .wide = {.layers = 4,
                 .kv_heads = 8,
                 .head_size_k = 128,
                 .head_size_v = 128,
                 .block_tokens = 16,
                 .format_k = KVK_FORMAT_BF16,
                 .format_v = KVK_FORMAT_BF16,
                 .layout = KVK_LAYOUT_HEADS_FIRST,
                 .attention = KVK_ATTENTION_SELF,
                 .tensor_shards = 1,
                 .pipeline_shards = 1},
    };
    if (load->kernel == NULL) {
        give_up("path", "not known, or not for this processor");
    }
    load->wide_bytes = kvk_geometry_shard_bytes(&load->wide, 0);
    load->block_count = (mib << 20) / load->wide_bytes;
    uint64_t size_bytes = load->block_count * load->wide_bytes;
    load->source = alloc_or_give_up(size_bytes);
    load->target = alloc_or_give_up(size_bytes);
    load->compact = alloc_or_give_up(size_bytes);
    kvk_random_init(&random, 1);
    for (uint64_t i = 0; i < size_bytes; i += 8) { /* four bf16 between 2^-4 and 2 */
        uint64_t bits = kvk_random_next(&random);
        bits = (bits & UINT64_C(0x81ff81ff81ff81ff)) | UINT64_C(0x3e003e003e003e00);
        memcpy(load->source + i, &bits, sizeof(bits));
    }
}

static double copy_seconds(struct workload *load)
{
    double began = kvk_report_seconds();

    for (uint64_t i = 0; i < load->block_count; i++) {
        memcpy(load->target + i * load->wide_bytes, load->source + i * load->wide_bytes,
               load->wide_bytes);
    }
    return kvk_report_seconds() - began;
}

static double narrow_seconds(struct workload *load)
{
    struct kvk_error error;
    double began = kvk_report_seconds();

    for (uint64_t i = 0; i < load->block_count; i++) {
        if (kvk_convert_shard_narrow(load->kernel, &load->wide, &load->narrow, 0,
                                     load->source + i * load->wide_bytes,
                                     load->compact + i * load->narrow_bytes, &error) != KVK_OK) {
            give_up("narrow", error.text);
        }
    }
    return kvk_report_seconds() - began;
}

static double widen_seconds(struct workload *load)
{
    double began = kvk_report_seconds();

    for (uint64_t i = 0; i < load->block_count; i++) {
        kvk_convert_shard_widen(load->kernel, &load->narrow, &load->wide, 0,
                                load->compact + i * load->narrow_bytes,
                                load->target + i * load->wide_bytes);
    }
    return kvk_report_seconds() - began;
}

/* Copying and converting in turn, so that all meet the machine in the same mood. */
static void measure(struct workload *load, const struct direction *direction, uint32_t rounds,
                    struct kvk_report *report)
{
    double gigabytes = (double)(load->block_count * load->wide_bytes) / 1e9;
    double copies[ROUNDS_MAX];
    double narrows[ROUNDS_MAX];
    double widens[ROUNDS_MAX];

    load->narrow = load->wide;
    load->narrow.format_k = load->narrow.format_v = direction->format;
    load->narrow_bytes = kvk_geometry_shard_bytes(&load->narrow, 0);
    (void)narrow_seconds(load); /* warm up */
    for (uint32_t round = 0; round < rounds; round++) {
        copies[round] = gigabytes / copy_seconds(load);
        narrows[round] = gigabytes / narrow_seconds(load);
        widens[round] = gigabytes / widen_seconds(load);
    }
    double copy = kvk_report_median(copies, rounds);
    kvk_report_ratio(report, direction->narrow, kvk_report_median(narrows, rounds), "GB/s", copy);
    kvk_report_ratio(report, direction->widen, kvk_report_median(widens, rounds), "GB/s", copy);
}

static uint64_t number(const char *option, const char *text, uint64_t max)
{
    char *end;
    unsigned long long value = strtoull(text, &end, 10);

    if (*text < '0' || *text > '9' || *end != '\0' || value == 0 || value > max) {
        (void)fprintf(stderr, "bench_convert: %s wants a number from 1 to %llu\n", option,
                      (unsigned long long)max);
        exit(2);
    }
    return value;
}

int main(int argc, char **argv)
{
    struct kvk_report report;
    struct workload load;
    const char *path = NULL;
    uint64_t mib = 512;
    uint32_t rounds = 7;

    kvk_report_init(&report, "convert");
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        if (i + 1 < argc && strcmp(argv[i], "--mib") == 0) {
            mib = number("--mib", argv[++i], UINT64_C(1) << 20);
        } else if (i + 1 < argc && strcmp(argv[i], "--rounds") == 0) {
            rounds = (uint32_t)number("--rounds", argv[++i], ROUNDS_MAX);
        } else if (i + 1 < argc && strcmp(argv[i], "--path") == 0) {
            path = argv[++i];
        } else {
            (void)fprintf(stderr, "usage: bench_convert [--json] [--mib N] [--path NAME] "
                                  "[--rounds N]\n");
            exit(2);
        }
    }
    workload_init(&load, mib, path);
    for (int i = 0; i < FORMAT_COUNT; i++) {
        measure(&load, &directions[i], rounds, &report);
    }
    free(load.compact);
    free(load.target);
    free(load.source);
    return kvk_report_print(&report);
}
