/*
 * The CPU device from many threads at once: attention, copies, and the threads that they share.
 * A plain program, so that ThreadSanitizer can watch. Exit code 0: all results were right.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#include "gpu/threads.h"
#include "tests/unit/gpu_case.h"

#define CALLER_COUNT 5
#define ROUNDS 12

static struct kvk_device *device;
static _Atomic uint32_t wrong_count;

static void expect(bool right, const char *what)
{
    if (!right) {
        (void)fprintf(stderr, "wrong: %s\n", what);
        atomic_fetch_add(&wrong_count, 1);
    }
}

/* ---- The threads alone ---- */

struct count_job {
    _Atomic uint32_t run_counts[300];
    uint32_t thread_busy[8]; /* plain: two parts with one thread number must not overlap */
};

static void count_part(void *context, uint32_t part, uint32_t thread)
{
    struct count_job *job = context;

    job->thread_busy[thread]++;
    atomic_fetch_add(&job->run_counts[part], 1);
}

static void *count_caller(void *argument)
{
    struct kvk_threads *threads = argument;

    for (uint32_t round = 0; round < 200; round++) {
        struct count_job job = {0};
        uint32_t part_count = round * 7 % 300;
        kvk_threads_run(threads, part_count, count_part, &job);
        uint32_t total = 0;
        for (uint32_t i = 0; i < 8; i++) {
            total += job.thread_busy[i];
        }
        expect(total == part_count, "parts that threads ran");
        for (uint32_t i = 0; i < 300; i++) {
            expect(job.run_counts[i] == (i < part_count ? 1U : 0U), "a part's runs");
        }
    }
    return NULL;
}

static void run_callers(void *(*caller)(void *), void *argument)
{
    pthread_t callers[CALLER_COUNT];

    for (uint32_t i = 0; i < CALLER_COUNT; i++) {
        int result = pthread_create(&callers[i], NULL, caller, argument);
        KVK_ASSERT(result == 0);
    }
    for (uint32_t i = 0; i < CALLER_COUNT; i++) {
        pthread_join(callers[i], NULL);
    }
}

static void check_threads(void)
{
    for (uint32_t count = 1; count <= 8; count += 3) {
        struct kvk_threads *threads;
        struct kvk_error error;
        enum kvk_status status = kvk_threads_create(count, "test", &threads, &error);
        KVK_ASSERT(status == KVK_OK);
        expect(kvk_threads_count(threads) == count, "the count of threads");
        run_callers(count_caller, threads);
        kvk_threads_destroy(threads);
    }
    kvk_threads_destroy(NULL);
}

/* ---- The device ---- */

static void make_case(struct gpu_case *test, uint64_t seed)
{
    struct kvk_random random;

    kvk_random_init(&random, seed);
    *test = (struct gpu_case){0};
    test->attend = (struct kvk_attend){
        .items = test->items,
        .item_count = 2,
        .query_heads = 4,
        .kv_heads = 2,
        .head_size_k = 16,
        .head_size_v = 16,
        .block_tokens = 16,
        .format_q = KVK_FORMAT_FP32,
        .format_k = KVK_FORMAT_BF16,
        .format_v = KVK_FORMAT_BF16,
        .scale = 0.25F,
        .causal = true,
    };
    test->attend.v_offset = gpu_case_k_bytes(&test->attend);
    for (uint32_t i = 0; i < 2; i++) {
        test->items[i].query_count = 1 + i;
        test->items[i].token_count = i == 0 ? 1500 : 300;
        test->items[i].position = test->items[i].token_count - 1;
        test->items[i].page_count = (uint32_t)((test->items[i].token_count + 15) / 16);
        gpu_case_fill_item(test, i, &random, 0);
    }
    gpu_case_expect(test);
}

static void attend_once(struct gpu_case *test)
{
    struct kvk_error error;

    gpu_case_spoil(test);
    enum kvk_status status = device->ops->attend(device, &test->attend, &error);
    expect(status == KVK_OK, "attend's status");
    expect(gpu_case_output_error(test) <= 5e-3, "attend's output");
    expect(gpu_case_lse_error(test) <= 1e-5, "attend's LSE");
}

static void copy_once(const uint8_t *source, uint8_t *target, uint64_t size_bytes)
{
    struct kvk_copy copies[4];
    uint64_t checksums[4];
    struct kvk_error error;

    for (uint32_t i = 0; i < 4; i++) {
        copies[i] = (struct kvk_copy){
            .target = target + i * size_bytes / 4,
            .source = source + i * size_bytes / 4,
            .size_bytes = size_bytes / 4,
            .checksum = &checksums[i],
        };
    }
    enum kvk_status status = device->ops->copy(device, copies, 4, &error);
    expect(status == KVK_OK, "copy's status");
    expect(memcmp(source, target, size_bytes) == 0, "copied bytes");
}

static void *device_caller(void *argument)
{
    static _Atomic uint64_t next_seed;
    uint64_t seed = atomic_fetch_add(&next_seed, 1);
    uint64_t size_bytes = 400000;
    uint8_t *source = gpu_case_alloc(size_bytes);
    uint8_t *target = gpu_case_alloc(size_bytes);
    struct kvk_random random;
    struct gpu_case test;

    (void)argument;
    kvk_random_init(&random, seed);
    kvk_random_fill(&random, source, size_bytes);
    make_case(&test, seed);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        attend_once(&test);
        copy_once(source, target, size_bytes);
    }
    gpu_case_free(&test);
    free(source);
    free(target);
    return NULL;
}

int main(void)
{
    const struct kvk_device_cpu_options options = {.attend_thread_count = 3,
                                                   .copy_thread_count = 3};
    struct kvk_error error;

    check_threads();
    if (kvk_device_cpu_open(&options, &device, &error) != KVK_OK) {
        (void)fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    run_callers(device_caller, NULL);
    device->ops->close(device);
    return wrong_count == 0 ? 0 : 1;
}
