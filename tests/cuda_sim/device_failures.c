/* Calls of CUDA that fail, one after the other: a refusal, or a device that is lost, never worse.
 */
#include "tests/cuda_sim/device_house.h"
#include "tests/unit/gpu_case.h"

#define BYTES (UINT64_C(40) << 10)

static void setup(void)
{
    device_house_open(1, 20, 64 * MIB);
}

/* Of a lost device nothing is given back: the driver has it. */
static void end_lost(void)
{
    host->ops->close(host);
    device->ops->close(device);
}

TestSuite(cuda_failures, .init = setup);

/* What a copy of each kind calls, and where it may fail. */
static const char *const copy_calls[] = {
    "cudaMemcpyAsync",      "cudaMemcpy2DAsync", "cudaEventRecord", "cudaHostAlloc",
    "cudaEventSynchronize", "cudaMalloc",        "cudaLaunchKernel"};
#define COPY_CALL_COUNT (sizeof(copy_calls) / sizeof(copy_calls[0]))

struct scene {
    struct kvk_region region, locked;
    uint8_t *plain;
    struct kvk_copy copies[40];
    uint64_t sum;
    uint32_t count;
};

/* One of everything: over buffers, in a run, in a crowd. */
static void scene_make(struct scene *scene)
{
    scene->region = region_make(device, 4096, 256, 128);
    scene->locked = region_make(host, 4096, 256, 64);
    scene->plain = malloc(BYTES);
    cr_assert_not_null(scene->plain);
    for (uint64_t i = 0; i < BYTES; i++) {
        scene->plain[i] = (uint8_t)(i * 31 + i / 255);
    }
    memcpy(kvk_region_at(&scene->locked, 0), scene->plain, BYTES);
    scene->count = 0;
    scene->copies[scene->count++] = (struct kvk_copy){.target = kvk_region_at(&scene->region, 0),
                                                      .source = scene->plain,
                                                      .size_bytes = BYTES,
                                                      .checksum = &scene->sum};
    for (uint64_t i = 0; i < 4; i++) { /* every other one, hashed: a run */
        scene->copies[scene->count++] =
            (struct kvk_copy){.target = kvk_region_at(&scene->region, (20 + 2 * i) * 4096),
                              .source = kvk_region_at(&scene->locked, i * 4096),
                              .size_bytes = 4096,
                              .checksum = &scene->sum};
    }
    for (uint64_t i = 0; i < 20; i++) {
        scene->copies[scene->count++] =
            (struct kvk_copy){.target = kvk_region_at(&scene->region, 40 * 4096 + 100 * i),
                              .source = kvk_region_at(&scene->locked, 100 * i),
                              .size_bytes = 99};
    }
}

static enum kvk_status scene_copy(struct scene *scene, struct kvk_error *error)
{
    return device->ops->copy(device, scene->copies, scene->count, error);
}

static void scene_check(const struct scene *scene)
{
    static uint8_t bytes[BYTES];
    kvk_sim_peek(bytes, kvk_region_at(&scene->region, 0), BYTES);
    cr_assert_arr_eq(bytes, scene->plain, BYTES);
    kvk_sim_peek(bytes, kvk_region_at(&scene->region, 26 * 4096), 4096);
    cr_assert_arr_eq(bytes, scene->plain + 3 * 4096, 4096);
    kvk_sim_peek(bytes, kvk_region_at(&scene->region, 40 * 4096 + 1900), 99);
    cr_assert_arr_eq(bytes, scene->plain + 1900, 99);
}

static void scene_end(struct scene *scene)
{
    device->ops->free(device, &scene->region);
    host->ops->free(host, &scene->locked);
    free(scene->plain);
}

/* Each call of a copy fails once: the copy says so, and the next one is right. */
Test(cuda_failures, a_call_that_fails_once_fails_one_copy)
{
    struct scene scene;
    struct kvk_error error;
    scene_make(&scene);
    for (size_t i = 0; i < COPY_CALL_COUNT; i++) {
        for (uint32_t nth = 1; nth <= 3; nth++) {
            kvk_sim_fail(copy_calls[i], nth, cudaErrorInvalidValue, false);
            enum kvk_status status = scene_copy(&scene, &error);
            cr_assert(status == KVK_OK || status == KVK_INTERNAL, "%s", kvk_status_name(status));
            cr_assert(nth > 1 || status == KVK_INTERNAL ||
                          strcmp(copy_calls[i], "cudaHostAlloc") == 0 ||
                          strcmp(copy_calls[i], "cudaMalloc") == 0,
                      "%s is not called", copy_calls[i]);
            while (scene_copy(&scene, &error) != KVK_OK) { /* it waits for a later call */
                cr_assert_not(device->ops->is_lost(device));
            }
            scene_check(&scene);
        }
    }
    cr_assert_not(device->ops->is_lost(device));
    scene_end(&scene);
    device_house_close();
}

Test(cuda_failures, no_memory_for_buffers_is_a_refusal)
{
    struct scene scene;
    struct kvk_error error;
    scene_make(&scene);
    kvk_sim_fail("cudaHostAlloc", 1, cudaErrorMemoryAllocation, false);
    cr_assert_eq(scene_copy(&scene, &error), KVK_EXHAUSTED);
    cr_assert_eq(scene_copy(&scene, &error), KVK_OK, "%s", error.text);
    scene_check(&scene);
    scene_end(&scene);
    device_house_close();
}

/* Memory errors of the GPU, in the middle of a copy. Whatever is asked of it then refuses, and what
 * was taken can be given back. */
Test(cuda_failures, a_lost_gpu_refuses_everything)
{
    for (size_t i = 0; i < COPY_CALL_COUNT; i++) {
        struct scene scene;
        struct kvk_error error;
        struct kvk_region other;
        if (i > 0) {
            setup();
        }
        scene_make(&scene);
        kvk_sim_fail(copy_calls[i], 1, cudaErrorECCUncorrectable, true);
        cr_assert_eq(scene_copy(&scene, &error), KVK_PRECONDITION, "%s", copy_calls[i]);
        cr_assert_not_null(strstr(error.text, "GPU 0 is lost"), "%s", error.text);
        cr_assert(device->ops->is_lost(device));
        cr_assert_eq(scene_copy(&scene, &error), KVK_PRECONDITION);
        cr_assert_eq(device->ops->back(device, &scene.region, 200 * 4096, 4096, &error),
                     KVK_PRECONDITION);
        cr_assert_eq(device->ops->alloc(device, 4096, 0, "canary", &other, &error),
                     KVK_PRECONDITION);
        /* What is the host's alone is still copied. */
        const struct kvk_copy copy = {.target = kvk_region_at(&scene.locked, 32 * 4096),
                                      .source = scene.plain,
                                      .size_bytes = 4096};
        cr_assert_eq(device->ops->copy(device, &copy, 1, &error), KVK_OK);
        cr_assert_eq(device->ops->punch(device, &scene.region, 0, 128 * 4096, &error), KVK_OK);
        scene_end(&scene);
        end_lost();
    }
}

/* A number that no list has is found out by asking for something that always works. */
Test(cuda_failures, what_lasts_is_found_out)
{
    struct scene scene;
    struct kvk_error error;
    scene_make(&scene);
    kvk_sim_fail("cudaMemcpyAsync", 1, cudaErrorMapBufferObjectFailed, true);
    cr_assert_eq(scene_copy(&scene, &error), KVK_PRECONDITION);
    cr_assert(device->ops->is_lost(device));
    scene_end(&scene);
    end_lost();
}

Test(cuda_failures, attention_that_fails_says_so)
{
    static const char *const calls[] = {"cudaHostAlloc", "cudaMalloc", "cudaMemcpyAsync",
                                        "cudaLaunchKernel", "cudaStreamSynchronize"};
    struct kvk_region region = region_make(device, 4096, 4, 4);
    uint8_t *page = kvk_region_at(&region, 0);
    uint16_t queries[64] = {0};
    float output[64];
    float lse[1];
    struct kvk_error error;
    const struct kvk_attend_item item = {.queries = queries,
                                         .output = output,
                                         .lse = lse,
                                         .query_count = 1,
                                         .token_count = 8,
                                         .position = 7,
                                         .pages = (const void *const *)&page,
                                         .page_count = 1};
    const struct kvk_attend attend = {.items = &item,
                                      .item_count = 1,
                                      .query_heads = 1,
                                      .kv_heads = 1,
                                      .head_size_k = 64,
                                      .head_size_v = 64,
                                      .block_tokens = 8,
                                      .format_q = KVK_FORMAT_BF16,
                                      .format_k = KVK_FORMAT_BF16,
                                      .format_v = KVK_FORMAT_BF16,
                                      .v_offset = 1024,
                                      .scale = 1,
                                      .causal = true};
    for (size_t i = 0; i < sizeof(calls) / sizeof(calls[0]); i++) {
        kvk_sim_fail(calls[i], 1, cudaErrorInvalidValue, false);
        cr_assert_eq(device->ops->attend(device, &attend, &error), KVK_INTERNAL, "%s", calls[i]);
        if (i == 0) {
            continue; /* before it goes well its second buffer fails to come */
        }
        cr_assert_eq(device->ops->attend(device, &attend, &error), KVK_OK, "%s: %s", calls[i],
                     error.text);
        cr_assert(lse[0] > 2.0F && lse[0] < 2.1F, "ln 8 over zeros, not %g", (double)lse[0]);
    }
    kvk_sim_fail("cudaLaunchKernel", 1, cudaErrorIllegalAddress, true);
    cr_assert_eq(device->ops->attend(device, &attend, &error), KVK_PRECONDITION);
    cr_assert(device->ops->is_lost(device));
    device->ops->free(device, &region);
    end_lost();
}

static struct kvk_device_health health_of(void)
{
    struct kvk_device_health health;
    device->ops->health(device, &health);
    return health;
}

/* What was survived is counted; of a loss its first word stays. */
Test(cuda_failures, what_went_wrong_is_told)
{
    struct scene scene;
    struct kvk_error error;
    scene_make(&scene);
    struct kvk_device_health health = health_of();
    cr_expect(health.can_fail);
    cr_expect_not(health.lost);
    cr_expect_eq(health.memory_failures + health.call_failures, 0U);
    cr_expect_str_empty(health.reason);
    kvk_sim_fail("cudaHostAlloc", 1, cudaErrorMemoryAllocation, false);
    cr_assert_eq(scene_copy(&scene, &error), KVK_EXHAUSTED);
    health = health_of();
    cr_expect_eq(health.memory_failures, 1U);
    cr_expect_eq(health.call_failures, 0U);
    cr_expect_not_null(strstr(health.reason, "GPU 0: "), "%s", health.reason);
    kvk_sim_fail("cudaMemcpyAsync", 1, cudaErrorInvalidValue, false);
    cr_assert_eq(scene_copy(&scene, &error), KVK_INTERNAL);
    health = health_of();
    cr_expect_eq(health.memory_failures, 1U);
    cr_expect_eq(health.call_failures, 1U);
    cr_expect_eq(health.error, 0);
    kvk_sim_fail("cudaMemcpyAsync", 1, cudaErrorECCUncorrectable, true);
    cr_assert_eq(scene_copy(&scene, &error), KVK_PRECONDITION);
    cr_assert_eq(scene_copy(&scene, &error), KVK_PRECONDITION);
    health = health_of();
    cr_expect(health.lost);
    cr_expect_eq(health.error, cudaErrorECCUncorrectable);
    cr_expect_eq(health.call_failures, 1U);
    cr_expect_not_null(strstr(health.reason, "CUDA error 214"), "%s", health.reason);
    scene_end(&scene);
    end_lost();
}
