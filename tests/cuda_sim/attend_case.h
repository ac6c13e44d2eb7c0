/*
 * Runs a batch of tests/unit/gpu_case.h through the CUDA kernels, on the simulator. All that the
 * kernels are given lies in memory that ends at a guard page.
 */
#ifndef KVK_TESTS_CUDA_SIM_ATTEND_CASE_H
#define KVK_TESTS_CUDA_SIM_ATTEND_CASE_H

#include <sys/mman.h>
#include <unistd.h>

#include "gpu/cuda_plan.h"
#include "tests/cuda_sim/device_side.h"
#include "tests/unit/gpu_case.h"

/* As an H200 has: small cases are cut no further than they ask for. */
#define ATTEND_CASE_MULTIPROCESSORS 132

/* Memory full of NaN, between guard pages: it ends less than `align` before one. */
struct attend_case_memory {
    uint8_t *area;
    size_t area_bytes;
    uint8_t *begin;
};

static inline struct attend_case_memory attend_case_memory_make(size_t size_bytes, size_t align)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t whole = (size_bytes + page) / page * page;
    struct attend_case_memory memory = {.area_bytes = whole + 2 * page};

    memory.area = mmap(NULL, memory.area_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    KVK_ASSERT(memory.area != MAP_FAILED);
    KVK_ASSERT(mprotect(memory.area + page, whole, PROT_READ | PROT_WRITE) == 0);
    memory.begin = memory.area + page + whole - (size_bytes + align - 1) / align * align;
    memset(memory.area + page, 0xff, whole);
    return memory;
}

/* The same with a copy of some bytes in it. */
static inline struct attend_case_memory attend_case_memory_of(const void *bytes, size_t size_bytes,
                                                              size_t align)
{
    struct attend_case_memory memory = attend_case_memory_make(size_bytes, align);

    memcpy(memory.begin, bytes, size_bytes);
    return memory;
}

static inline void attend_case_memory_free(struct attend_case_memory memory)
{
    KVK_ASSERT(munmap(memory.area, memory.area_bytes) == 0);
}

#define ATTEND_CASE_PARTS 4

/* Let the launch read its lists from memory of their own. */
static inline void attend_case_guard(const struct kvk_cuda_plan *plan,
                                     struct kvk_cuda_attend *launch,
                                     struct attend_case_memory parts[ATTEND_CASE_PARTS])
{
    size_t query_bytes = (size_t)plan->query_count * launch->query_heads * launch->head_size_k *
                         kvk_format_bytes((enum kvk_format)launch->format_q);

    parts[0] = attend_case_memory_of(launch->queries, query_bytes, 16);
    parts[1] = attend_case_memory_of(launch->pages, plan->page_count * sizeof(void *), 8);
    parts[2] =
        attend_case_memory_of(launch->units, launch->unit_count * sizeof(struct kvk_cuda_unit), 8);
    parts[3] =
        attend_case_memory_of(launch->rows, plan->row_count * sizeof(struct kvk_cuda_row), 8);
    launch->queries = parts[0].begin;
    launch->pages = (const uint8_t *const *)(void *)parts[1].begin;
    launch->units = (const struct kvk_cuda_unit *)(void *)parts[2].begin;
    launch->rows = (const struct kvk_cuda_row *)(void *)parts[3].begin;
}

/* A launch may be changed before it runs: for faults that are planted. */
typedef void attend_case_change(struct kvk_cuda_attend *launch);

/* Results as on the device: NaN where nothing was written. Answers the launch's error. */
static inline int attend_case_launch(const struct kvk_attend *attend, uint32_t split_tokens,
                                     attend_case_change *change)
{
    const struct kvk_cuda_limits limits = {.shared_bytes = kvk_sim_shared_limit(),
                                           .multiprocessor_count = ATTEND_CASE_MULTIPROCESSORS,
                                           .split_tokens = split_tokens};
    struct attend_case_memory parts[ATTEND_CASE_PARTS];
    struct kvk_cuda_plan plan;
    struct kvk_error error;

    KVK_ASSERT(kvk_attend_check(attend, &error) == KVK_OK);
    KVK_ASSERT(kvk_cuda_plan_init(&plan, attend, &limits, &error) == KVK_OK);
    struct attend_case_memory upload = attend_case_memory_make(plan.upload_bytes, 256);
    struct attend_case_memory work = attend_case_memory_make(plan.work_bytes, 256);
    kvk_cuda_plan_fill(&plan, attend, upload.begin);
    kvk_cuda_plan_bind(&plan, attend, upload.begin, work.begin);
    attend_case_guard(&plan, &plan.launch, parts);
    if (change != NULL) {
        change(&plan.launch);
    }
    int result = kvk_cuda_attend_launch(&plan.launch, NULL);
    kvk_cuda_plan_scatter(&plan, attend, work.begin);
    for (int i = 0; i < ATTEND_CASE_PARTS; i++) {
        attend_case_memory_free(parts[i]);
    }
    attend_case_memory_free(upload);
    attend_case_memory_free(work);
    kvk_cuda_plan_finish(&plan);
    return result;
}

static inline int attend_case_run(struct gpu_case *test, uint32_t split_tokens)
{
    gpu_case_spoil(test);
    return attend_case_launch(&test->attend, split_tokens, NULL);
}

/* The kernel that would run it. */
static inline enum kvk_cuda_kernel attend_case_kernel(const struct gpu_case *test)
{
    const struct kvk_cuda_limits limits = {.shared_bytes = kvk_sim_shared_limit(),
                                           .multiprocessor_count = ATTEND_CASE_MULTIPROCESSORS};
    struct kvk_cuda_plan plan;
    struct kvk_error error;

    KVK_ASSERT(kvk_cuda_plan_init(&plan, &test->attend, &limits, &error) == KVK_OK);
    kvk_cuda_plan_finish(&plan);
    return (enum kvk_cuda_kernel)plan.launch.kernel;
}

/* What the kernels may be off by: they multiply and add in fp32, with weights of two 16-bit parts.
 * A NaN is never below it. */
static inline bool attend_case_is_right(const struct gpu_case *test)
{
    return gpu_case_output_error(test) < 1e-5 && gpu_case_lse_error(test) < 1e-5;
}

#endif
