/* The seeded generator is the published one, and even; secrets are not repeated. */
#include "base/random.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

/* The reference code of xoshiro256** 1.0 from the state {1, 2, 3, 4}. */
Test(base_random, agrees_with_the_published_sequence)
{
    static const uint64_t expected[] = {
        11520,
        0,
        1509978240,
        1215971899390074240,
        1216172134540287360,
        607988272756665600,
        16172922978634559625U,
        8476171486693032832U,
    };
    struct kvk_random random = {.state = {1, 2, 3, 4}};
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++) {
        cr_assert_eq(kvk_random_next(&random), expected[i], "number %zu", i);
    }
}

Test(base_random, a_seed_is_a_sequence)
{
    struct kvk_random a;
    struct kvk_random b;
    struct kvk_random c;
    kvk_random_init(&a, 0);
    kvk_random_init(&b, 0);
    kvk_random_init(&c, 1);
    uint32_t same = 0;
    for (int i = 0; i < 1000; i++) {
        uint64_t value = kvk_random_next(&a);
        cr_assert_eq(value, kvk_random_next(&b));
        same += value == kvk_random_next(&c) ? 1 : 0;
    }
    cr_assert_eq(same, 0);
}

/* Chi-square over 7 bins, 6 degrees of freedom: above 28 happens once in 10,000 seeds. */
Test(base_random, below_is_even)
{
    struct kvk_random random;
    kvk_random_init(&random, 7);
    double counts[7] = {0};
    for (int i = 0; i < 70000; i++) {
        uint64_t value = kvk_random_below(&random, 7);
        cr_assert_lt(value, 7);
        counts[value]++;
    }
    double chi_square = 0;
    for (int i = 0; i < 7; i++) {
        chi_square += (counts[i] - 10000) * (counts[i] - 10000) / 10000;
    }
    cr_assert_lt(chi_square, 28.0);
    /* A bound of 3/4 of the range: without rejection the lowest third would come twice as often. */
    uint64_t bound = UINT64_C(3) << 62;
    uint32_t low = 0;
    for (int i = 0; i < 30000; i++) {
        low += kvk_random_below(&random, bound) < UINT64_C(1) << 62 ? 1 : 0;
    }
    cr_assert_lt(fabs((double)low - 10000), 500, "%u", low);
}

Test(base_random, ranges_and_shares)
{
    struct kvk_random random;
    kvk_random_init(&random, 3);
    bool low = false;
    bool high = false;
    uint32_t chances = 0;
    for (int i = 0; i < 10000; i++) {
        uint64_t value = kvk_random_between(&random, 10, 12);
        cr_assert(value >= 10 && value <= 12);
        low = low || value == 10;
        high = high || value == 12;
        double unit = kvk_random_unit(&random);
        cr_assert(unit >= 0.0 && unit < 1.0);
        chances += kvk_random_chance(&random, 0.25) ? 1 : 0;
        cr_assert_not(kvk_random_chance(&random, 0.0));
        cr_assert(kvk_random_chance(&random, 1.0));
    }
    cr_assert(low && high);
    cr_assert(chances > 2200 && chances < 2800);
    cr_assert_eq(kvk_random_between(&random, 5, 5), 5);
    (void)kvk_random_between(&random, 0, UINT64_MAX);
}

Test(base_random, fill_writes_every_byte_and_no_more)
{
    struct kvk_random random;
    kvk_random_init(&random, 4);
    for (size_t size = 0; size < 40; size++) {
        uint8_t seen[41] = {0};
        for (int round = 0; round < 32; round++) {
            uint8_t bytes[41] = {0};
            kvk_random_fill(&random, bytes, size);
            for (size_t i = 0; i < sizeof(bytes); i++) {
                seen[i] |= bytes[i];
            }
        }
        for (size_t i = 0; i < sizeof(seen); i++) {
            cr_assert_eq(seen[i] != 0, i < size);
        }
    }
}

Test(base_random, secrets_differ)
{
    uint8_t a[1000] = {0};
    uint8_t b[1000] = {0};
    kvk_random_secret(a, sizeof(a) - 1);
    kvk_random_secret(b, sizeof(b) - 1);
    cr_assert_neq(memcmp(a, b, 32), 0);
    cr_assert_neq(memcmp(a + 900, b + 900, 32), 0);
    cr_assert_eq(a[999], 0);
    kvk_random_secret(a, 0);
}
