/* The cases of tests/engine_both.h on the CPU device. */
#include "tests/engine_both.h"

Test(engine_both, on_the_cpu)
{
    for (size_t i = 0; i < BOTH_CASE_COUNT; i++) {
        both_cases[i].run(house_device);
    }
}
