/*
 * The traps and edges of attention on the whole CUDA device, simulated: pages in device memory,
 * which the processor cannot read, streams that start late, and no work that is not ordered. Of
 * each a planted fault is seen.
 */
#include "tests/cuda_sim/device_house.h"
#include "tests/cuda_sim/trap_faults.h"
#include "tests/gpu_moved.h"

static bool within(double error, double limit)
{
    return error <= limit;
}

static void run_all(const struct trap_named *named, size_t count)
{
    device_house_open(1, 20, 0);
    const struct trap_target target = {
        "simulated device", device, gpu_moved_attend, kvk_attend_merge, within, 1e-5, 2e-5};
    for (size_t i = 0; i < count; i++) {
        cr_expect(named[i].run(&target), "%s", named[i].name);
    }
    device_house_close();
}

Test(cuda_traps, the_device_falls_into_none, .timeout = 300)
{
    run_all(gpu_traps, GPU_TRAP_COUNT);
}

Test(cuda_traps, the_device_is_right_at_the_edges, .timeout = 300)
{
    run_all(gpu_edges, GPU_EDGE_COUNT);
}

Test(cuda_traps, every_planted_fault_is_seen_on_the_device, .timeout = 300)
{
    device_house_open(1, 0, 0);
    for (size_t i = 0; i < TRAP_PLANTED_COUNT; i++) {
        struct trap_faulty faulty = {
            .fault = trap_planted[i].fault, .context = device, .attend = gpu_moved_attend};
        const struct trap_target target = {
            "simulated device", &faulty, trap_faulty_attend, kvk_attend_merge, within, 1e-5, 2e-5};
        cr_expect_not(trap_planted[i].run(&target), "%s does not see fault %d",
                      trap_planted[i].name, trap_planted[i].fault);
    }
    device_house_close();
}
