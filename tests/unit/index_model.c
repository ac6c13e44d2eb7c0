/* The index against a naive model, over random histories. The fuzzer runs the same on its own. */
#include <criterion/criterion.h>
#include <stdlib.h>

#include "base/random.h"
#include "tests/index_model.h"

#define HISTORY_COUNT 50
#define HISTORY_SIZE 30000

Test(index_model, random_histories)
{
    uint8_t *bytes = malloc(HISTORY_SIZE);
    cr_assert_not_null(bytes);
    for (uint64_t seed = 0; seed < HISTORY_COUNT; seed++) {
        struct kvk_random random;
        kvk_random_init(&random, seed);
        kvk_random_fill(&random, bytes, HISTORY_SIZE);
        model_run(bytes, HISTORY_SIZE);
    }
    free(bytes);
}
