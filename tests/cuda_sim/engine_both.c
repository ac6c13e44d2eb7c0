/* The cases of tests/engine_both.h with the device tier on a simulated GPU. */
#include "tests/engine_both.h"

#include "gpu/device_cuda.h"
#include "tests/cuda_sim/runtime.h"

static struct kvk_device *simulated(void)
{
    struct kvk_device *device = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_device_cuda_open(NULL, &device, &error), KVK_OK, "%s", error.text);
    return device;
}

Test(engine_both, on_a_simulated_gpu, .timeout = 120)
{
    for (size_t i = 0; i < BOTH_CASE_COUNT; i++) {
        both_cases[i].run(simulated);
        cr_expect_eq(kvk_sim_race_count(), 0, "%s", both_cases[i].name);
        cr_expect_eq(kvk_sim_device_bytes(), 0, "%s: memory is left over", both_cases[i].name);
    }
}
