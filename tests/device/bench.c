/*
 * What the CUDA device does against what the GPU can do, measured in the same run:
 *
 *     bench_device [--json] [--small]
 *
 * attention   bytes of K and V that decoding reads a second, whole calls with their queries and
 *             results; against a copy within the GPU, whose reads and writes both count
 * swap        slots of 2 MiB between locked memory of the host and the GPU, each way and both ways
 *             at once, without and with checksums; against pinned copies of the same bytes
 * import      another process opens a slab and reads its first byte: milliseconds
 *
 * --small: shapes for a simulated GPU, whose figures say nothing.
 */
#include <cuda_runtime_api.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/slab_table.h"
#include "bench/report.h"
#include "gpu/device_cuda.h"

#define ROUNDS 7
#define MIB (UINT64_C(1) << 20)
#define SLOT_BYTES (2 * MIB)
#define HEAD_SIZE 128
#define BLOCK_TOKENS 16

static struct kvk_device *device;
static struct kvk_device *host;
static struct kvk_error error;
static bool is_small;

static _Noreturn void give_up(const char *what)
{
    (void)fprintf(stderr, "bench_device: %s: %s\n", what, error.text);
    exit(1);
}

static void cuda(cudaError_t result)
{
    if (result != cudaSuccess) {
        (void)fprintf(stderr, "bench_device: %s\n", cudaGetErrorString(result));
        exit(1);
    }
}

static struct kvk_region region_make(struct kvk_device *of, uint64_t piece_bytes, uint64_t pieces)
{
    struct kvk_region region;
    if (of->ops->alloc(of, piece_bytes * pieces, piece_bytes, "bench", &region, &error) != KVK_OK ||
        of->ops->back(of, &region, 0, piece_bytes * pieces, &error) != KVK_OK) {
        give_up("memory");
    }
    return region;
}

/* ---- The GPU's own copies ---- */

struct plain {
    void *target;
    const void *source;
    uint64_t size_bytes;
    cudaStream_t stream;
};

static double plain_seconds(const struct plain *copies, uint32_t count)
{
    double begun = kvk_report_seconds();
    for (uint32_t i = 0; i < count; i++) {
        cuda(cudaMemcpyAsync(copies[i].target, copies[i].source, copies[i].size_bytes,
                             cudaMemcpyDefault, copies[i].stream));
    }
    for (uint32_t i = 0; i < count; i++) {
        cuda(cudaStreamSynchronize(copies[i].stream));
    }
    return kvk_report_seconds() - begun;
}

static double plain_gbps(const struct plain *copies, uint32_t count)
{
    double values[ROUNDS];
    double bytes = 0;
    for (uint32_t i = 0; i < count; i++) {
        bytes += (double)copies[i].size_bytes;
    }
    (void)plain_seconds(copies, count);
    for (int i = 0; i < ROUNDS; i++) {
        values[i] = bytes / plain_seconds(copies, count) / 1e9;
    }
    return kvk_report_median(values, ROUNDS);
}

/* Bytes read and bytes written, a second. */
static double gpu_copy_gbps(void)
{
    uint64_t bytes = is_small ? 4 * MIB : 2048 * MIB;
    struct plain copy = {.size_bytes = bytes};
    void *from;
    cuda(cudaMalloc(&from, bytes));
    cuda(cudaMalloc(&copy.target, bytes));
    cuda(cudaStreamCreateWithFlags(&copy.stream, cudaStreamNonBlocking));
    copy.source = from;
    cuda(cudaMemsetAsync(from, 1, bytes, copy.stream));
    double gbps = 2 * plain_gbps(&copy, 1);
    cuda(cudaStreamDestroy(copy.stream));
    cuda(cudaFree(from));
    cuda(cudaFree(copy.target));
    return gbps;
}

/* ---- Attention ---- */

struct decode {
    struct kvk_attend attend;
    struct kvk_attend_item *items;
    uint8_t **pages;
    uint16_t *queries;
    float *output;
    float *lse;
    double bytes; /* of K and V */
};

static double decode_gbps(const struct decode *decode)
{
    double values[ROUNDS];
    for (int i = -1; i < ROUNDS; i++) {
        double begun = kvk_report_seconds();
        if (device->ops->attend(device, &decode->attend, &error) != KVK_OK) {
            give_up("attention");
        }
        if (i >= 0) {
            values[i] = decode->bytes / (kvk_report_seconds() - begun) / 1e9;
        }
    }
    return kvk_report_median(values, ROUNDS);
}

static double attention_gbps(uint32_t sequences, uint64_t tokens, uint32_t kv_heads, uint32_t group)
{
    uint64_t page_bytes = 2 * (uint64_t)kv_heads * BLOCK_TOKENS * HEAD_SIZE * 2;
    uint64_t page_count = tokens / BLOCK_TOKENS;
    uint64_t row = (uint64_t)kv_heads * group * HEAD_SIZE;
    struct decode decode = {.items = calloc(sequences, sizeof(*decode.items)),
                            .pages = calloc(sequences * page_count, sizeof(*decode.pages)),
                            .queries = calloc(sequences * row, sizeof(*decode.queries)),
                            .output = calloc(sequences * row, sizeof(*decode.output)),
                            .lse = calloc((size_t)sequences * kv_heads * group, sizeof(float)),
                            .bytes = (double)(sequences * page_count * page_bytes)};
    struct kvk_region region = region_make(device, page_bytes, sequences * page_count);
    if (decode.items == NULL || decode.pages == NULL || decode.queries == NULL ||
        decode.output == NULL || decode.lse == NULL) {
        give_up("no memory");
    }
    decode.attend = (struct kvk_attend){.items = decode.items,
                                        .item_count = sequences,
                                        .query_heads = kv_heads * group,
                                        .kv_heads = kv_heads,
                                        .head_size_k = HEAD_SIZE,
                                        .head_size_v = HEAD_SIZE,
                                        .block_tokens = BLOCK_TOKENS,
                                        .format_q = KVK_FORMAT_BF16,
                                        .format_k = KVK_FORMAT_BF16,
                                        .format_v = KVK_FORMAT_BF16,
                                        .v_offset = page_bytes / 2,
                                        .scale = 0.088388F,
                                        .causal = true};
    for (uint64_t i = 0; i < sequences * page_count; i++) {
        decode.pages[i] = kvk_region_at(&region, i * page_bytes);
    }
    for (uint64_t i = 0; i < sequences * row; i++) {
        decode.queries[i] = (uint16_t)(0x3c00 + i % 512); /* about 0.01 */
    }
    for (uint32_t i = 0; i < sequences; i++) {
        decode.items[i] =
            (struct kvk_attend_item){.queries = decode.queries + i * row,
                                     .output = decode.output + i * row,
                                     .lse = decode.lse + (size_t)i * kv_heads * group,
                                     .query_count = 1,
                                     .position = tokens - 1,
                                     .token_count = tokens,
                                     .pages = (const void *const *)(decode.pages + i * page_count),
                                     .page_count = (uint32_t)page_count};
    }
    double gbps = decode_gbps(&decode);
    device->ops->free(device, &region);
    free(decode.items);
    free((void *)decode.pages);
    free(decode.queries);
    free(decode.output);
    free(decode.lse);
    return gbps;
}

static void attention_bench(struct kvk_report *report)
{
    static const struct {
        const char *name;
        uint32_t sequences, kv_heads, group;
        uint64_t tokens;
    } shapes[] = {{"decode 16 x 32k, group 1", 16, 8, 1, 32768},
                  {"decode 16 x 32k, group 4", 16, 8, 4, 32768},
                  {"decode 16 x 32k, group 8", 16, 8, 8, 32768},
                  {"decode 4 x 128k, group 4", 4, 8, 4, 131072},
                  {"decode 256 x 2k, group 4", 256, 8, 4, 2048}};
    double reference = gpu_copy_gbps();
    kvk_report_value(report, "copy within the GPU", reference, "GB/s");
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        uint32_t sequences = is_small ? 2 : shapes[i].sequences;
        uint64_t tokens = is_small ? 128 : shapes[i].tokens;
        double gbps =
            attention_gbps(sequences, tokens, is_small ? 1 : shapes[i].kv_heads, shapes[i].group);
        kvk_report_ratio(report, shapes[i].name, gbps, "GB/s", reference);
    }
}

/* ---- Swap ---- */

struct swap {
    struct kvk_copy *copies;
    uint32_t count;
};

static void *swap_run(void *argument)
{
    const struct swap *swap = argument;
    struct kvk_error own;
    if (device->ops->copy(device, swap->copies, swap->count, &own) != KVK_OK) {
        error = own;
        give_up("a copy");
    }
    return NULL;
}

static double swap_gbps(struct swap *swaps, uint32_t ways)
{
    double values[ROUNDS];
    for (int i = -1; i < ROUNDS; i++) {
        pthread_t thread;
        double begun = kvk_report_seconds();
        if (ways == 2 && pthread_create(&thread, NULL, swap_run, &swaps[1]) != 0) {
            give_up("no thread");
        }
        (void)swap_run(&swaps[0]);
        if (ways == 2) {
            (void)pthread_join(thread, NULL);
        }
        if (i >= 0) {
            values[i] = (double)ways * swaps[0].count * (double)SLOT_BYTES /
                        (kvk_report_seconds() - begun) / 1e9;
        }
    }
    return kvk_report_median(values, ROUNDS);
}

static void swap_fill(struct swap *swap, const struct kvk_region *from, const struct kvk_region *to,
                      uint64_t *sums)
{
    for (uint32_t i = 0; i < swap->count; i++) {
        /* Scattered, as slots of a used pool are. */
        uint64_t slot = ((uint64_t)i * 7919) % swap->count;
        swap->copies[i] = (struct kvk_copy){.source = kvk_region_at(from, slot * SLOT_BYTES),
                                            .target = kvk_region_at(to, i * SLOT_BYTES),
                                            .size_bytes = SLOT_BYTES,
                                            .checksum = sums == NULL ? NULL : &sums[i]};
    }
}

static void swap_bench(struct kvk_report *report)
{
    uint32_t count = is_small ? 4 : 512;
    uint64_t bytes = count * SLOT_BYTES;
    struct kvk_region hosts[2] = {region_make(host, SLOT_BYTES, count),
                                  region_make(host, SLOT_BYTES, count)};
    struct kvk_region gpus[2] = {region_make(device, SLOT_BYTES, count),
                                 region_make(device, SLOT_BYTES, count)};
    struct swap swaps[2];
    uint64_t *sums = calloc(2 * (size_t)count, sizeof(*sums));
    struct plain plains[2] = {{.size_bytes = bytes}, {.size_bytes = bytes}};
    void *memory[4];
    for (int i = 0; i < 2; i++) {
        swaps[i] = (struct swap){.copies = calloc(count, sizeof(struct kvk_copy)), .count = count};
        cuda(cudaHostAlloc(&memory[2 * i], bytes, cudaHostAllocPortable));
        cuda(cudaMalloc(&memory[2 * i + 1], bytes));
        cuda(cudaStreamCreateWithFlags(&plains[i].stream, cudaStreamNonBlocking));
        if (swaps[i].copies == NULL || sums == NULL) {
            give_up("no memory");
        }
    }
    plains[0].source = memory[1]; /* out, as the first swap */
    plains[0].target = memory[0];
    plains[1].source = memory[2];
    plains[1].target = memory[3];
    double out = plain_gbps(&plains[0], 1);
    double in = plain_gbps(&plains[1], 1);
    double both = plain_gbps(plains, 2);
    for (int hashed = 0; hashed < 2; hashed++) {
        swap_fill(&swaps[0], &gpus[0], &hosts[0], hashed ? sums : NULL);
        swap_fill(&swaps[1], &hosts[1], &gpus[1], hashed ? sums + count : NULL);
        kvk_report_ratio(report, hashed ? "swap out, hashed" : "swap out", swap_gbps(swaps, 1),
                         "GB/s", out);
        kvk_report_ratio(report, hashed ? "swap in, hashed" : "swap in", swap_gbps(&swaps[1], 1),
                         "GB/s", in);
        kvk_report_ratio(report, hashed ? "both ways, hashed" : "both ways", swap_gbps(swaps, 2),
                         "GB/s", both);
    }
    for (int i = 0; i < 2; i++) {
        host->ops->free(host, &hosts[i]);
        device->ops->free(device, &gpus[i]);
        free(swaps[i].copies);
        cuda(cudaFreeHost(memory[2 * i]));
        cuda(cudaFree(memory[2 * i + 1]));
        cuda(cudaStreamDestroy(plains[i].stream));
    }
    free(sums);
}

/* ---- Import ---- */

/* Opens each slab that comes and reads its first byte; answers how long that took. */
static _Noreturn void borrower(int orders, int answers)
{
    cudaIpcMemHandle_t handle;
    cudaStream_t stream;
    void *byte;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    cuda(cudaSetDevice(0));
    cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    cuda(cudaHostAlloc(&byte, 1, 0));
    while (read(orders, &handle, sizeof(handle)) == (ssize_t)sizeof(handle)) {
        void *memory;
        double begun = kvk_report_seconds();
        cuda(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess));
        cuda(cudaMemcpyAsync(byte, memory, 1, cudaMemcpyDeviceToHost, stream));
        cuda(cudaStreamSynchronize(stream));
        double took = kvk_report_seconds() - begun;
        cuda(cudaIpcCloseMemHandle(memory));
        if (write(answers, &took, sizeof(took)) != (ssize_t)sizeof(took)) {
            break;
        }
    }
    _exit(0);
}

static void import_bench(struct kvk_report *report, int orders, int answers)
{
    double values[ROUNDS];
    for (int i = 0; i < ROUNDS; i++) {
        double took = 0;
        struct kvk_region region = region_make(device, SLOT_BYTES, 16); /* a slab of 32 MiB */
        const struct kvk_slab_table *table =
            mmap(NULL, 4096, PROT_READ, MAP_SHARED, region.slabs->fd, 0);
        const struct kvk_slab_entry *entry =
            table == MAP_FAILED ? NULL : kvk_slab_table_find(table, 0);
        if (entry == NULL ||
            write(orders, entry->handle, sizeof(entry->handle)) != (ssize_t)sizeof(entry->handle) ||
            read(answers, &took, sizeof(took)) != (ssize_t)sizeof(took)) {
            give_up("the other process opens no slab");
        }
        values[i] = took * 1e3;
        (void)munmap((void *)(uintptr_t)table, 4096);
        device->ops->free(device, &region);
    }
    kvk_report_value(report, "import of a 32 MiB slab", kvk_report_median(values, ROUNDS), "ms");
}

int main(int argc, char **argv)
{
    struct kvk_report report;
    int orders[2];
    int answers[2];
    kvk_report_init(&report, "device");
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--small") == 0) {
            is_small = true;
        } else if (!kvk_report_option(&report, argv[i])) {
            (void)fprintf(stderr, "usage: bench_device [--json] [--small]\n");
            return 2;
        }
    }
    /* Before CUDA is used: a process that has used it cannot be forked. */
    if (pipe(orders) != 0 || pipe(answers) != 0) {
        give_up("no pipe");
    }
    if (fork() == 0) {
        (void)close(orders[1]);
        (void)close(answers[0]);
        borrower(orders[0], answers[1]);
    }
    if (kvk_device_cuda_open(NULL, &device, &error) != KVK_OK) {
        give_up("no device");
    }
    const struct kvk_device_cpu_options options = {
        .attend_thread_count = 1, .huge_pages = true, .watch = kvk_device_cuda_watch(device)};
    if (kvk_device_cpu_open(&options, &host, &error) != KVK_OK) {
        give_up("no memory");
    }
    attention_bench(&report);
    swap_bench(&report);
    import_bench(&report, orders[1], answers[0]);
    host->ops->close(host);
    device->ops->close(device);
    return kvk_report_print(&report);
}
