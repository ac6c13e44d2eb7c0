/* Copy and hash without special instructions: what every other path must agree with. */
#include "base/copy_path.h"

#include <string.h>

/* What is hashed, then copied, before the next step: small enough to stay in the first cache. */
#define STEP_BYTES 2048U

static bool works(void)
{
    return true;
}

static void copy(uint8_t *target, const uint8_t *source, size_t size)
{
    memcpy(target, source, size);
}

static void add(XXH3_state_t *state, const uint8_t *source, size_t size)
{
    kvk_copy_hash_add(state, source, size);
}

static void add_copy(XXH3_state_t *state, uint8_t *target, const uint8_t *source, size_t size)
{
    for (size_t done = 0; done < size; done += STEP_BYTES) {
        size_t left = size - done;
        size_t step = left < STEP_BYTES ? left : STEP_BYTES;
        kvk_copy_hash_add(state, source + done, step);
        memcpy(target + done, source + done, step);
    }
}

static uint64_t hash(const uint8_t *source, size_t size)
{
    return XXH3_64bits(source, size);
}

const struct kvk_copy_path kvk_copy_path_plain = {
    .name = "plain",
    .works = works,
    .copy = copy,
    .add = add,
    .add_copy = add_copy,
    .hash = hash,
};
