/* The index against a naive model, with a history that the fuzzer makes up. */
#include <stddef.h>
#include <stdint.h>

#include "tests/index_model.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    model_run(data, size);
    return 0;
}
