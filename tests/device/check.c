/*
 * The CUDA device against the CPU's reference, on whatever GPU there is (or a simulated one): what
 * it copies, clears, attends in every format, the traps and edges of attention, and what it lends
 * to another process. Prints what it did; exits with 1 where anything was wrong.
 *
 *     test_device_check [--rounds N] [--seed N] [--only
 * copies|slabs|attention|traps|threads|import]
 */
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/copy.h"
#include "base/slab_table.h"
#include "gpu/device_cuda.h"
#include "tests/gpu_edges.h"
#include "tests/gpu_moved.h"
#include "tests/unit/gpu_case.h"

#define MIB (UINT64_C(1) << 20)

/* fp32 sums over exactly widened values, in another order than the reference's, and fast
 * exponentials. */
#define OUTPUT_TOLERANCE 5e-5
#define LSE_TOLERANCE 5e-5

#define CHECK(condition, ...)                                                                      \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            (void)fprintf(stderr, "FAILED %s:%d: %s: ", __FILE__, __LINE__, #condition);           \
            (void)fprintf(stderr, __VA_ARGS__);                                                    \
            (void)fputc('\n', stderr);                                                             \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static struct kvk_device *device;
static struct kvk_device *host;
static struct kvk_error error;

static void devices_open(void)
{
    struct kvk_device_info info;
    CHECK(kvk_device_cuda_open(NULL, &device, &error) == KVK_OK, "%s", error.text);
    const struct kvk_device_cpu_options options = {.attend_thread_count = 1,
                                                   .watch = kvk_device_cuda_watch(device)};
    CHECK(kvk_device_cpu_open(&options, &host, &error) == KVK_OK, "%s", error.text);
    device->ops->info(device, &info);
    (void)printf("%s, %s, %.1f GiB\n", info.name, info.path, (double)info.memory_bytes / (1 << 30));
}

static struct kvk_region region_make(struct kvk_device *of, uint64_t piece_bytes, uint64_t pieces)
{
    struct kvk_region region;
    CHECK(of->ops->alloc(of, piece_bytes * pieces, piece_bytes, "check", &region, &error) ==
                  KVK_OK &&
              of->ops->back(of, &region, 0, piece_bytes * pieces, &error) == KVK_OK,
          "%s", error.text);
    return region;
}

static void copy_one(void *target, const void *source, uint64_t size_bytes, uint64_t *checksum)
{
    const struct kvk_copy copy = {
        .target = target, .source = source, .size_bytes = size_bytes, .checksum = checksum};
    struct kvk_error own;
    CHECK(device->ops->copy(device, &copy, 1, &own) == KVK_OK, "%s", own.text);
}

/* ---- Copies ---- */

/* Out over locked memory, within the GPU, back over memory that is not locked; hashed each time. */
static void round_trip(struct kvk_random *random, uint64_t piece_bytes, uint32_t pieces)
{
    struct kvk_region locked = region_make(host, piece_bytes, pieces);
    struct kvk_region first = region_make(device, piece_bytes, pieces);
    struct kvk_region second = region_make(device, piece_bytes, pieces);
    uint8_t *plain = malloc(piece_bytes * pieces);
    struct kvk_copy *copies = calloc(pieces, sizeof(*copies));
    uint64_t *sums = calloc(3 * (size_t)pieces, sizeof(*sums));
    CHECK(plain != NULL && copies != NULL && sums != NULL, "no memory");
    for (uint32_t i = 0; i < pieces; i++) {
        kvk_random_fill(random, kvk_region_at(&locked, i * piece_bytes), piece_bytes);
    }
    for (uint32_t leg = 0; leg < 3; leg++) {
        for (uint32_t i = 0; i < pieces; i++) {
            uint64_t at = i * piece_bytes;
            copies[i] =
                (struct kvk_copy){.source = leg == 0   ? kvk_region_at(&locked, at)
                                            : leg == 1 ? kvk_region_at(&first, at)
                                                       : kvk_region_at(&second, at),
                                  .target = leg == 0   ? kvk_region_at(&first, at)
                                            : leg == 1 ? kvk_region_at(&second, at)
                                                       : plain + at,
                                  .size_bytes = piece_bytes,
                                  .checksum = i % 3 == leg % 3 ? NULL : &sums[leg * pieces + i]};
        }
        CHECK(device->ops->copy(device, copies, pieces, &error) == KVK_OK, "%s", error.text);
    }
    for (uint32_t i = 0; i < pieces; i++) {
        const uint8_t *was = kvk_region_at(&locked, i * piece_bytes);
        uint64_t sum = kvk_checksum(was, piece_bytes);
        CHECK(memcmp(was, plain + i * piece_bytes, piece_bytes) == 0, "piece %u of %u", i, pieces);
        for (uint32_t leg = 0; leg < 3; leg++) {
            CHECK(i % 3 == leg % 3 || sums[leg * pieces + i] == sum, "piece %u: hash", i);
        }
    }
    host->ops->free(host, &locked);
    device->ops->free(device, &first);
    device->ops->free(device, &second);
    free(plain);
    free(copies);
    free(sums);
}

static void copies_check(struct kvk_random *random)
{
    static const uint64_t sizes[] = {1, 77, 4096, 5000, 32768, 32769, 65536, MIB, 3 * MIB + 5};
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        round_trip(random, sizes[i], sizes[i] >= MIB ? 5 : 70);
    }
    (void)printf("copies: out, within and back over %zu sizes, hashed\n",
                 sizeof(sizes) / sizeof(sizes[0]));
}

/* A slab shows nothing of what another had in it. */
static void slabs_check(void)
{
    uint8_t *bytes = malloc(MIB);
    CHECK(bytes != NULL, "no memory");
    for (int round = 0; round < 3; round++) {
        struct kvk_region region = region_make(device, MIB, 8);
        for (uint64_t i = 0; i < 8; i++) {
            copy_one(bytes, kvk_region_at(&region, i * MIB), MIB, NULL);
            for (uint64_t k = 0; k < MIB; k++) {
                CHECK(bytes[k] == 0, "a new slab is not clear");
            }
            memset(bytes, 0xee, MIB);
            copy_one(kvk_region_at(&region, i * MIB), bytes, MIB, NULL);
        }
        device->ops->free(device, &region);
    }
    free(bytes);
    (void)printf("slabs: come clear\n");
}

/* ---- Attention ---- */

static void shape_pick(struct kvk_random *random, struct kvk_attend *attend)
{
    static const uint32_t heads[][2] = {{4, 4}, {8, 2}, {3, 1}, {10, 2}, {8, 1}, {16, 2}};
    static const uint32_t sizes[][2] = {{128, 128}, {64, 64}, {128, 128}, {96, 96}, {192, 128}};
    static const enum kvk_format formats[] = {KVK_FORMAT_BF16, KVK_FORMAT_FP16, KVK_FORMAT_FP32};
    const uint32_t *head = heads[kvk_random_below(random, 6)];
    const uint32_t *size = sizes[kvk_random_below(random, 5)];
    enum kvk_format format = formats[kvk_random_below(random, 3)];
    enum kvk_format compact =
        (enum kvk_format)(KVK_FORMAT_FP8_E4M3 + (int)kvk_random_below(random, 3));
    enum kvk_format stored = kvk_random_chance(random, 0.5) ? compact : format;
    *attend = (struct kvk_attend){.query_heads = head[0],
                                  .kv_heads = head[1],
                                  .head_size_k = size[0],
                                  .head_size_v = size[1],
                                  .block_tokens = kvk_random_chance(random, 0.7) ? 16 : 7,
                                  .format_q = format,
                                  .format_k = stored,
                                  .format_v = stored,
                                  .scale = 0.1F,
                                  .causal = kvk_random_chance(random, 0.8)};
    if (kvk_random_chance(random, 0.3)) {
        attend->window = 1 + (uint32_t)kvk_random_below(random, 200);
        attend->sinks = (uint32_t)kvk_random_below(random, 5);
    }
    attend->soft_cap = kvk_random_chance(random, 0.2) ? 30 : 0;
}

/* The case's pages move to the GPU; gpu_case_free() frees none of them then. */
static struct kvk_region pages_move(struct gpu_case *test)
{
    uint64_t bytes = gpu_case_page_bytes(&test->attend);
    uint64_t pages = 1;
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        pages += test->items[i].page_count;
    }
    struct kvk_region region = region_make(device, bytes, pages);
    uint64_t slot = 0;
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        for (uint32_t page = 0; page < test->items[i].page_count; page++) {
            if (test->pages[i][page] != NULL) {
                uint8_t *there = kvk_region_at(&region, slot++ * bytes);
                copy_one(there, test->pages[i][page], bytes, NULL);
                free(test->pages[i][page]);
                test->pages[i][page] = there;
            }
        }
    }
    return region;
}

static void case_run(struct kvk_random *random, uint64_t seed, uint64_t tokens_max,
                     uint64_t counts[KVK_FORMAT_MAX + 1])
{
    static struct gpu_case test;
    memset(&test, 0, sizeof(test));
    shape_pick(random, &test.attend);
    test.attend.items = test.items;
    test.attend.item_count = 1 + (uint32_t)kvk_random_below(random, 4);
    test.attend.v_offset = gpu_case_k_bytes(&test.attend);
    for (uint32_t i = 0; i < test.attend.item_count; i++) {
        struct kvk_attend_item *item = &test.items[i];
        item->token_count = 1 + kvk_random_below(random, tokens_max);
        item->query_count =
            kvk_random_chance(random, 0.6) ? 1 : 1 + (uint32_t)kvk_random_below(random, 40);
        item->position = item->token_count - 1 + kvk_random_below(random, 2);
        item->page_count = (uint32_t)((item->token_count + test.attend.block_tokens - 1) /
                                      test.attend.block_tokens);
        gpu_case_fill_item(&test, i, random, kvk_random_chance(random, 0.2) ? 0.3 : 0);
    }
    counts[test.attend.format_k]++;
    gpu_case_expect(&test);
    struct kvk_region region = pages_move(&test);
    gpu_case_spoil(&test);
    CHECK(device->ops->attend(device, &test.attend, &error) == KVK_OK, "%s", error.text);
    double output_error = gpu_case_output_error(&test);
    double lse_error = gpu_case_lse_error(&test);
    CHECK(output_error <= OUTPUT_TOLERANCE && lse_error <= LSE_TOLERANCE,
          "seed %llu: output off by %g, lse by %g; heads %u/%u, sizes %u %u, format %d, block %u",
          (unsigned long long)seed, output_error, lse_error, test.attend.query_heads,
          test.attend.kv_heads, test.attend.head_size_k, test.attend.head_size_v,
          (int)test.attend.format_k, test.attend.block_tokens);
    for (uint32_t i = 0; i < test.attend.item_count; i++) {
        memset(test.pages[i], 0, test.items[i].page_count * sizeof(uint8_t *));
    }
    gpu_case_free(&test);
    device->ops->free(device, &region);
}

static void attention_check(uint64_t seed, uint64_t rounds)
{
    struct kvk_random random;
    uint64_t counts[KVK_FORMAT_MAX + 1] = {0};
    for (uint64_t i = 0; i < rounds; i++) {
        kvk_random_init(&random, seed + i);
        case_run(&random, seed + i, i % 8 == 7 ? 3000 : 300, counts);
    }
    (void)printf("attention: %llu random batches match the reference:", (unsigned long long)rounds);
    for (int format = KVK_FORMAT_FP32; format <= KVK_FORMAT_MAX; format++) {
        (void)printf(" %llu %s", (unsigned long long)counts[format],
                     kvk_format_name((enum kvk_format)format));
    }
    (void)printf("\n");
}

static bool within(double off, double limit)
{
    return off <= limit;
}

static void named_check(const struct trap_named *named, size_t count)
{
    const struct trap_target target = {.name = "device",
                                       .context = device,
                                       .attend = gpu_moved_attend,
                                       .merge = kvk_attend_merge,
                                       .within = within,
                                       .limit = OUTPUT_TOLERANCE,
                                       .lse_limit = LSE_TOLERANCE};
    for (size_t i = 0; i < count; i++) {
        CHECK(named[i].run(&target), "%s", named[i].name);
    }
}

static void traps_check(void)
{
    named_check(gpu_traps, GPU_TRAP_COUNT);
    named_check(gpu_edges, GPU_EDGE_COUNT);
    (void)printf("traps: falls into none of %zu, right at %zu edges\n", GPU_TRAP_COUNT,
                 GPU_EDGE_COUNT);
}

/* ---- Several at a time ---- */

static void *thread_run(void *argument)
{
    uint64_t seed = (uint64_t)(uintptr_t)argument;
    struct kvk_random random;
    struct kvk_region *region = malloc(sizeof(*region));
    uint8_t *bytes = malloc(2 * MIB);
    CHECK(region != NULL && bytes != NULL, "no memory");
    kvk_random_init(&random, seed);
    *region = region_make(device, MIB, 16);
    for (int round = 0; round < 8; round++) {
        uint64_t slot = kvk_random_below(&random, 16);
        uint64_t sum = 0;
        kvk_random_fill(&random, bytes, MIB);
        copy_one(kvk_region_at(region, slot * MIB), bytes, MIB, NULL);
        copy_one(bytes + MIB, kvk_region_at(region, slot * MIB), MIB, &sum);
        CHECK(memcmp(bytes, bytes + MIB, MIB) == 0 && sum == kvk_checksum(bytes, MIB), "a copy");
    }
    device->ops->free(device, region);
    free(region);
    free(bytes);
    return NULL;
}

static void threads_check(void)
{
    enum { THREADS = 12 }; /* more than there are lanes */
    pthread_t threads[THREADS];
    for (uint64_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, thread_run, (void *)(uintptr_t)(i + 1)) == 0,
              "no thread");
    }
    for (int i = 0; i < THREADS; i++) {
        (void)pthread_join(threads[i], NULL);
    }
    (void)printf("threads: %d at a time\n", THREADS);
}

/* ---- Another process ---- */

struct lent {
    uint8_t handle[KVK_SLAB_HANDLE_SIZE];
    uint64_t size_bytes;
};

/* Opens what comes, answers its hash, and writes its first byte anew. */
static _Noreturn void borrower(int orders, int answers)
{
    struct lent lent;
    cudaIpcMemHandle_t handle;
    cudaStream_t stream;
    void *memory;
    void *bytes = NULL;
    uint64_t sum = 0;
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (read(orders, &lent, sizeof(lent)) != (ssize_t)sizeof(lent)) {
        _exit(1);
    }
    memcpy(&handle, lent.handle, sizeof(handle));
    if (cudaSetDevice(0) == cudaSuccess &&
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
        cudaHostAlloc(&bytes, lent.size_bytes, 0) == cudaSuccess &&
        cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess &&
        cudaMemcpyAsync(bytes, memory, lent.size_bytes, cudaMemcpyDeviceToHost, stream) ==
            cudaSuccess &&
        cudaStreamSynchronize(stream) == cudaSuccess) {
        sum = kvk_checksum(bytes, lent.size_bytes);
        *(uint8_t *)bytes ^= 0xff;
        (void)cudaMemcpyAsync(memory, bytes, 1, cudaMemcpyHostToDevice, stream);
        (void)cudaStreamSynchronize(stream);
        (void)cudaIpcCloseMemHandle(memory);
    }
    (void)!write(answers, &sum, sizeof(sum));
    _exit(0);
}

static void import_check(struct kvk_random *random, int orders, int answers)
{
    struct kvk_region region = region_make(device, MIB, 8);
    struct lent lent = {.size_bytes = 8 * MIB};
    uint8_t *bytes = malloc(8 * MIB);
    uint64_t sum = 1;
    CHECK(bytes != NULL, "no memory");
    kvk_random_fill(random, bytes, 8 * MIB);
    copy_one(kvk_region_at(&region, 0), bytes, 8 * MIB, NULL);
    const struct kvk_slab_table *table =
        mmap(NULL, 4096, PROT_READ, MAP_SHARED, region.slabs->fd, 0);
    CHECK(table != MAP_FAILED, "the table of slabs cannot be mapped");
    const struct kvk_slab_entry *entry = kvk_slab_table_find(table, 0);
    CHECK(entry != NULL && entry->slot_count == 8, "the slab is not in its table");
    memcpy(lent.handle, entry->handle, sizeof(lent.handle));
    CHECK(write(orders, &lent, sizeof(lent)) == (ssize_t)sizeof(lent) &&
              read(answers, &sum, sizeof(sum)) == (ssize_t)sizeof(sum),
          "the other process is gone");
    CHECK(sum == kvk_checksum(bytes, 8 * MIB), "the other process read other bytes");
    uint8_t first;
    copy_one(&first, kvk_region_at(&region, 0), 1, NULL);
    CHECK(first == 255 - bytes[0], "its write does not show here");
    (void)wait(NULL);
    device->ops->free(device, &region);
    (void)munmap((void *)(uintptr_t)table, 4096);
    free(bytes);
    (void)printf("import: another process read and wrote a slab\n");
}

static uint64_t option_number(int argc, char **argv, const char *name, uint64_t otherwise)
{
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], name) == 0) {
            return strtoull(argv[i + 1], NULL, 10);
        }
    }
    return otherwise;
}

/* Is this part of the check wanted? All are, where none is named. */
static bool is_wanted(int argc, char **argv, const char *part)
{
    for (int i = 1; i + 1 < argc; i++) {
        if (strcmp(argv[i], "--only") == 0) {
            return strcmp(argv[i + 1], part) == 0;
        }
    }
    return true;
}

int main(int argc, char **argv)
{
    uint64_t rounds = option_number(argc, argv, "--rounds", 200);
    uint64_t seed = option_number(argc, argv, "--seed", 1);
    struct kvk_random random;
    int orders[2];
    int answers[2];
    /* Before CUDA is used: a process that has used it cannot be forked. */
    CHECK(pipe(orders) == 0 && pipe(answers) == 0, "no pipe");
    if (fork() == 0) {
        (void)close(orders[1]);
        (void)close(answers[0]);
        borrower(orders[0], answers[1]);
    }
    /* Where the other process ends early, the read of its answer ends too. */
    (void)close(orders[0]);
    (void)close(answers[1]);
    (void)signal(SIGPIPE, SIG_IGN);
    kvk_random_init(&random, seed);
    devices_open();
    if (is_wanted(argc, argv, "copies")) {
        copies_check(&random);
    }
    if (is_wanted(argc, argv, "slabs")) {
        slabs_check();
    }
    if (is_wanted(argc, argv, "attention")) {
        attention_check(seed, rounds);
    }
    if (is_wanted(argc, argv, "traps")) {
        traps_check();
    }
    if (is_wanted(argc, argv, "threads")) {
        threads_check();
    }
    if (is_wanted(argc, argv, "import")) {
        import_check(&random, orders[1], answers[0]);
    }
    CHECK(!device->ops->is_lost(device), "the device is lost");
    host->ops->close(host);
    device->ops->close(device);
    (void)printf("all right\n");
    return 0;
}
