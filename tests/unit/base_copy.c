/* Copies are exact and touch nothing else; checksums are XXH3-64 on every path, however cut. */
#include "base/copy.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "base/random.h"

#define GUARD 128
#define SIZE_MAX_TESTED 100000

static const char *const path_names[] = {"plain", "avx2", "avx512"};

struct buffers {
    uint8_t *source;
    uint8_t *target;
    uint8_t *before;
};

static struct buffers buffers_make(struct kvk_random *random)
{
    size_t size = SIZE_MAX_TESTED + 4 * GUARD;
    struct buffers buffers = {malloc(size), malloc(size), malloc(size)};
    kvk_random_fill(random, buffers.source, size);
    kvk_random_fill(random, buffers.before, size);
    return buffers;
}

static void buffers_free(struct buffers *buffers)
{
    free(buffers->source);
    free(buffers->target);
    free(buffers->before);
}

/* The target holds the source from `at` on, and around it what was there before. */
static void check_target(const struct buffers *buffers, size_t at, size_t from, size_t size)
{
    size_t total = SIZE_MAX_TESTED + 4 * GUARD;
    cr_assert_eq(memcmp(buffers->target + at, buffers->source + from, size), 0);
    cr_assert_eq(memcmp(buffers->target, buffers->before, at), 0);
    cr_assert_eq(
        memcmp(buffers->target + at + size, buffers->before + at + size, total - at - size), 0);
}

static void check_piece(struct buffers *buffers, size_t at, size_t from, size_t size)
{
    size_t total = SIZE_MAX_TESTED + 4 * GUARD;
    const uint8_t *source = buffers->source + from;
    uint64_t expected = XXH3_64bits(source, size); /* the library's own, not the inlined one */
    memcpy(buffers->target, buffers->before, total);
    uint64_t checksum = 0;
    kvk_copy_checksum(buffers->target + at, source, size, &checksum);
    cr_assert_eq(checksum, expected, "size %zu on %s", size, kvk_copy_path_name());
    check_target(buffers, at, from, size);

    memcpy(buffers->target, buffers->before, total);
    kvk_copy_stream(buffers->target + at, source, size);
    check_target(buffers, at, from, size);
    cr_assert_eq(kvk_checksum(source, size), expected);
}

static void check_in_steps(struct buffers *buffers, struct kvk_random *random, size_t size)
{
    struct kvk_checksum_state state;
    kvk_checksum_begin(&state);
    size_t done = 0;
    while (done < size) {
        size_t step = (size_t)kvk_random_below(random, 20000);
        step = step < size - done ? step : size - done;
        if (kvk_random_chance(random, 0.5)) {
            kvk_checksum_add_copy(&state, buffers->target + done, buffers->source + done, step);
            cr_assert_eq(memcmp(buffers->target + done, buffers->source + done, step), 0);
        } else {
            kvk_checksum_add(&state, buffers->source + done, step);
        }
        done += step;
    }
    cr_assert_eq(kvk_checksum_end(&state), XXH3_64bits(buffers->source, size));
}

static void check_path(const char *name)
{
    struct kvk_random random;
    kvk_random_init(&random, 5);
    struct buffers buffers = buffers_make(&random);
    if (!kvk_copy_path_select(name)) {
        buffers_free(&buffers);
        return; /* not on this processor */
    }
    cr_assert_str_eq(kvk_copy_path_name(), name);
    for (size_t size = 0; size < 600; size++) {
        check_piece(&buffers, GUARD + size % 64, size * 7 % 64, size);
    }
    for (int i = 0; i < 600; i++) {
        size_t size = (size_t)kvk_random_below(&random, SIZE_MAX_TESTED);
        size_t at = GUARD + (size_t)kvk_random_below(&random, 128);
        size_t from = (size_t)kvk_random_below(&random, 128);
        check_piece(&buffers, at, from, size);
        check_in_steps(&buffers, &random, size);
    }
    buffers_free(&buffers);
}

Test(base_copy, every_path_is_exact)
{
    for (size_t i = 0; i < sizeof(path_names) / sizeof(path_names[0]); i++) {
        check_path(path_names[i]);
    }
}

Test(base_copy, paths_by_name)
{
    cr_assert_not(kvk_copy_path_select("neon"));
    cr_assert(kvk_copy_path_select("plain"));
    cr_assert_str_eq(kvk_copy_path_name(), "plain");
    cr_assert(kvk_copy_path_select(NULL));
    cr_assert(!__builtin_cpu_supports("avx2") || strcmp(kvk_copy_path_name(), "plain") != 0);
}

/* A flipped bit anywhere in a block changes its checksum. */
Test(base_copy, one_bit_changes_the_checksum)
{
    struct kvk_random random;
    uint8_t block[5000];
    kvk_random_init(&random, 6);
    kvk_random_fill(&random, block, sizeof(block));
    uint64_t whole = kvk_checksum(block, sizeof(block));
    for (size_t bit = 0; bit < sizeof(block) * 8; bit += 13) {
        block[bit / 8] ^= (uint8_t)(1 << bit % 8);
        cr_assert_neq(kvk_checksum(block, sizeof(block)), whole);
        block[bit / 8] ^= (uint8_t)(1 << bit % 8);
    }
}
