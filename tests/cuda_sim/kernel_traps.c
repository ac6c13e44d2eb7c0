/*
 * The traps and edges of attention on the CUDA kernels, simulated: threads in forward, reverse or
 * random order, all that the kernels are given between guard pages, and results and room for parts
 * full of NaN. Of each a planted fault is seen.
 */
#include <criterion/criterion.h>
#include <signal.h>

#include "tests/cuda_sim/attend_case.h"
#include "tests/cuda_sim/trap_faults.h"

static attend_case_change *change;

static enum kvk_status kernel_attend(void *context, const struct kvk_attend *attend,
                                     struct kvk_error *error)
{
    (void)context;
    (void)error;
    return attend_case_launch(attend, 0, change) == 0 ? KVK_OK : KVK_INTERNAL;
}

static bool within(double error, double limit)
{
    return error <= limit;
}

static struct trap_target target_of(struct trap_faulty *faulty)
{
    faulty->attend = kernel_attend;
    return (struct trap_target){
        "simulated kernels", faulty, trap_faulty_attend, kvk_attend_merge, within, 1e-5, 2e-5};
}

/* Each in two of the three orders: forward, and by turns in reverse or at random. */
static void run_in_orders(const struct trap_named *named, size_t count)
{
    const struct trap_target target = {
        "simulated kernels", NULL, kernel_attend, kvk_attend_merge, within, 1e-5, 2e-5};
    for (size_t i = 0; i < count; i++) {
        const enum kvk_sim_order orders[] = {KVK_SIM_FORWARD,
                                             i % 2 == 0 ? KVK_SIM_REVERSE : KVK_SIM_RANDOM};
        for (int order = 0; order < 2; order++) {
            kvk_sim_order_set(orders[order], i);
            cr_expect(named[i].run(&target), "%s, order %d", named[i].name, (int)orders[order]);
        }
    }
}

Test(cuda_traps, kernels_fall_into_none, .timeout = 300)
{
    run_in_orders(gpu_traps, GPU_TRAP_COUNT);
}

Test(cuda_traps, kernels_are_right_at_the_edges, .timeout = 300)
{
    run_in_orders(gpu_edges, GPU_EDGE_COUNT);
}

Test(cuda_traps, every_planted_fault_is_seen, .timeout = 300)
{
    for (size_t i = 0; i < TRAP_PLANTED_COUNT; i++) {
        struct trap_faulty faulty = {.fault = trap_planted[i].fault};
        const struct trap_target target = target_of(&faulty);
        cr_expect_not(trap_planted[i].run(&target), "%s does not see fault %d",
                      trap_planted[i].name, trap_planted[i].fault);
    }
}

/* One range of tokens is not computed: what was in the room for its part is taken for it. */
static void leave_one_out(struct kvk_cuda_attend *launch)
{
    launch->unit_count--;
}

Test(cuda_traps, a_part_that_was_never_written_is_seen)
{
    const struct trap_target target = {
        "simulated kernels", NULL, kernel_attend, kvk_attend_merge, within, 1e-5, 2e-5};
    change = leave_one_out;
    cr_expect_not(trap_workspace(&target));
    change = NULL;
    cr_expect(trap_workspace(&target));
}

/* AddressSanitizer takes the signal and ends the test in its own way. */
#ifndef __SANITIZE_ADDRESS__
Test(cuda_traps, a_table_that_is_read_past_its_end_is_seen, .signal = SIGSEGV)
{
    struct trap_faulty faulty = {.fault = TRAP_FAULT_PAST_TABLE};
    const struct trap_target target = target_of(&faulty);
    (void)trap_guard_pages(&target);
}
#endif
