/*
 * Faults planted into the kernels as they are: each must make a result wrong in some order of
 * threads, or be told. This is what the other tests of the kernels rest on.
 */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>

#include "tests/cuda_sim/attend_case.h"

enum verdict {
    VERDICT_RIGHT, /* nobody would have noticed */
    VERDICT_WRONG, /* NaN, or far off */
    VERDICT_TOLD,  /* the simulator ended the process, or a poisoned address did */
};

static void case_make(struct gpu_case *test, enum kvk_format format)
{
    struct kvk_random random;

    memset(test, 0, sizeof(*test));
    kvk_random_init(&random, 5);
    test->attend = (struct kvk_attend){
        .items = test->items,
        .item_count = 1,
        .query_heads = 4,
        .kv_heads = 1,
        .head_size_k = 128,
        .head_size_v = 128,
        .block_tokens = 16,
        .format_q = kvk_format_is_compact(format) ? KVK_FORMAT_BF16 : format,
        .format_k = format,
        .format_v = format,
        .scale = 0.088F,
        .causal = true,
    };
    test->attend.v_offset = gpu_case_k_bytes(&test->attend);
    test->items[0] = (struct kvk_attend_item){
        .query_count = 1, .position = 249, .token_count = 250, .page_count = 16};
    gpu_case_fill_item(test, 0, &random, 0);
    gpu_case_expect(test);
}

static void child_run(const struct kvk_sim_faults *faults, enum kvk_sim_order order,
                      enum kvk_format format)
{
    struct gpu_case test;

    KVK_ASSERT(freopen("/dev/null", "w", stderr) != NULL);
    (void)signal(SIGABRT, SIG_DFL);
    (void)signal(SIGSEGV, SIG_DFL);
    case_make(&test, format);
    kvk_sim_order_set(order, 3);
    kvk_sim_faults_set(faults);
    int error = attend_case_run(&test, 0);
    _exit(error == 0 && attend_case_is_right(&test) ? VERDICT_RIGHT : VERDICT_WRONG);
}

/* In a process of its own, which the simulator may end. */
static enum verdict run_with(const struct kvk_sim_faults *faults, enum kvk_sim_order order,
                             enum kvk_format format)
{
    int status = 0;
    pid_t child = fork();

    if (child == 0) {
        child_run(faults, order, format);
    }
    cr_assert_eq(waitpid(child, &status, 0), child);
    if (WIFSIGNALED(status)) {
        bool is_told = WTERMSIG(status) == SIGABRT || WTERMSIG(status) == SIGSEGV;
        cr_assert(is_told);
        return VERDICT_TOLD;
    }
    return WEXITSTATUS(status) == VERDICT_RIGHT ? VERDICT_RIGHT : VERDICT_WRONG;
}

static uint32_t orders_that_notice(const struct kvk_sim_faults *faults, enum kvk_format format)
{
    uint32_t count = 0;

    for (int order = KVK_SIM_FORWARD; order <= KVK_SIM_RANDOM; order++) {
        count += run_with(faults, (enum kvk_sim_order)order, format) != VERDICT_RIGHT;
    }
    return count;
}

/* Barriers of the kernel that this format takes. */
static uint32_t barriers_of(enum kvk_format format)
{
    const struct kvk_sim_faults none = {0};
    struct gpu_case test;

    case_make(&test, format);
    kvk_sim_faults_set(&none);
    cr_assert_eq(attend_case_run(&test, 0), 0);
    cr_assert(attend_case_is_right(&test));
    gpu_case_free(&test);
    return kvk_sim_barrier_count();
}

/* The plain kernel's, the matrix kernel's, and that of compact K and V. */
static const enum kvk_format formats[] = {KVK_FORMAT_FP32, KVK_FORMAT_BF16, KVK_FORMAT_FP8_E4M3};
#define KERNEL_COUNT 3

Test(cuda_faults, without_faults_all_is_right)
{
    const struct kvk_sim_faults none = {0};

    for (int i = 0; i < KERNEL_COUNT; i++) {
        cr_assert_eq(orders_that_notice(&none, formats[i]), 0);
    }
}

Test(cuda_faults, every_missing_barrier_is_noticed)
{
    for (int i = 0; i < KERNEL_COUNT; i++) {
        uint32_t count = barriers_of(formats[i]);
        cr_assert_geq(count, 5);
        for (uint32_t barrier = 1; barrier <= count; barrier++) {
            const struct kvk_sim_faults faults = {.skipped_barrier = barrier};
            cr_assert_gt(orders_that_notice(&faults, formats[i]), 0,
                         "format %d: nobody misses barrier %u", (int)formats[i], barrier);
        }
    }
}

Test(cuda_faults, every_divergent_barrier_is_noticed_in_every_order)
{
    for (int i = 0; i < KERNEL_COUNT; i++) {
        uint32_t count = barriers_of(formats[i]);
        for (uint32_t barrier = 1; barrier <= count; barrier++) {
            const struct kvk_sim_faults faults = {.divergent_barrier = barrier};
            for (int order = KVK_SIM_FORWARD; order <= KVK_SIM_RANDOM; order++) {
                /* Told as such, or by what the threads that went on then read. */
                cr_assert_neq(run_with(&faults, (enum kvk_sim_order)order, formats[i]),
                              VERDICT_RIGHT, "format %d, barrier %u, order %d", (int)formats[i],
                              barrier, order);
            }
        }
    }
}

/* A wait that lets one group more stay under way, and groups that are never closed. */
Test(cuda_faults, missing_waits_are_noticed_in_every_order)
{
    const struct kvk_sim_faults faults[] = {{.early_waits = 1}, {.forgotten_close = true}};

    for (int i = 0; i < 2; i++) {
        for (int kernel = 1; kernel < KERNEL_COUNT; kernel++) {
            cr_assert_eq(orders_that_notice(&faults[i], formats[kernel]), 3, "fault %d, format %d",
                         i, (int)formats[kernel]);
        }
    }
}

/* A page that is shorter than its geometry says: the read past its end meets a guard page. */
Test(cuda_faults, reads_out_of_range_are_trapped)
{
    for (int i = 0; i < KERNEL_COUNT; i++) {
        pid_t child = fork();
        cr_assert_geq(child, 0);
        if (child == 0) {
            struct gpu_case test;
            (void)signal(SIGSEGV, SIG_DFL);
            case_make(&test, formats[i]);
            size_t size_bytes = (size_t)gpu_case_page_bytes(&test.attend);
            struct attend_case_memory memory =
                attend_case_memory_of(test.pages[0][3], size_bytes - 16, 16);
            test.pages[0][3] = memory.begin;
            _exit(attend_case_run(&test, 0));
        }
        int status;
        cr_assert_eq(waitpid(child, &status, 0), child);
        cr_assert(WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV, "format %d", (int)formats[i]);
    }
}
