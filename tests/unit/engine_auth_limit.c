/* Failed attempts: how many, from whom, and whom they cannot lock out. */
#include "daemon/auth_limit.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"

#define SECOND KVK_NS_PER_SECOND

static struct kvk_error error;
static struct kvk_auth_limit limit;

static void begin(uint64_t attempts)
{
    cr_assert_eq(kvk_auth_limit_init(&limit, attempts, 1000, &error), KVK_OK);
}

static uint32_t fails_let_in(const struct kvk_auth_source *source, uint64_t now_ns, uint32_t tries)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < tries; i++) {
        count += kvk_auth_limit_fail(&limit, source, now_ns, &error) == KVK_OK;
    }
    return count;
}

Test(engine_auth_limit, a_bucket_of_attempts)
{
    struct kvk_auth_source bad = kvk_auth_source_uid(1000);
    struct kvk_auth_source good = kvk_auth_source_uid(1001);
    uint64_t now = 100 * SECOND;
    begin(5);
    cr_expect_not(kvk_auth_limit_is_engaged(&limit, now));
    cr_expect_eq(fails_let_in(&bad, now, 4), 4);
    cr_expect_not(kvk_auth_limit_is_engaged(&limit, now), "one is left");
    cr_expect_eq(kvk_auth_limit_check(&limit, &bad, now, &error), KVK_OK);
    cr_expect_eq(fails_let_in(&bad, now, 10), 1);
    cr_expect_eq(error.status, KVK_EXHAUSTED);
    cr_expect_str_eq(error.field, "server.auth_failures");
    cr_expect_eq(error.limit, 5);
    cr_expect_eq(error.retry_after_ms, 1001);
    cr_expect(kvk_auth_limit_is_engaged(&limit, now));
    cr_expect_eq(kvk_auth_limit_check(&limit, &bad, now, &error), KVK_EXHAUSTED);
    /* Nobody else. */
    cr_expect_eq(kvk_auth_limit_check(&limit, &good, now, &error), KVK_OK);
    cr_expect_eq(fails_let_in(&good, now, 1), 1);
    /* One more each second, and no more than the bucket holds. */
    cr_expect_eq(kvk_auth_limit_check(&limit, &bad, now + SECOND - 1, &error), KVK_EXHAUSTED);
    cr_expect_eq(kvk_auth_limit_check(&limit, &bad, now + SECOND, &error), KVK_OK);
    cr_expect_not(kvk_auth_limit_is_engaged(&limit, now + SECOND));
    cr_expect_eq(fails_let_in(&bad, now + SECOND, 10), 1);
    cr_expect_eq(fails_let_in(&bad, now + 1000 * SECOND, 10), 5);
    cr_expect_eq(atomic_load(&limit.refused), 9u + 1 + 1 + 9 + 5);
    kvk_auth_limit_finish(&limit);
}

Test(engine_auth_limit, none)
{
    struct kvk_auth_source source = kvk_auth_source_uid(1);
    begin(0);
    cr_expect_eq(fails_let_in(&source, SECOND, 1000), 1000);
    cr_expect_not(kvk_auth_limit_is_engaged(&limit, SECOND));
    kvk_auth_limit_finish(&limit);
}

Test(engine_auth_limit, sources)
{
    const uint8_t v4[4] = {10, 0, 0, 1};
    const uint8_t v4_in_v6[16] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1};
    const uint8_t v6[2][16] = {{0x20, 1, 0xd, 0xb8, 0, 0, 0, 1, 1},
                               {0x20, 1, 0xd, 0xb8, 0, 0, 0, 1, 2}};
    const uint8_t other[16] = {0x20, 1, 0xd, 0xb8, 0, 0, 0, 2, 1};
    struct kvk_auth_source a = kvk_auth_source_address(v4, 4);
    struct kvk_auth_source b = kvk_auth_source_address(v4_in_v6, 16);
    cr_expect_eq(memcmp(&a, &b, sizeof(a)), 0);
    a = kvk_auth_source_address(v6[0], 16);
    b = kvk_auth_source_address(v6[1], 16);
    cr_expect_eq(memcmp(&a, &b, sizeof(a)), 0, "one network is one source");
    b = kvk_auth_source_address(other, 16);
    cr_expect_neq(memcmp(&a, &b, sizeof(a)), 0);
    a = kvk_auth_source_uid(0x0100000a);
    b = kvk_auth_source_address(v4, 4);
    cr_expect_neq(memcmp(&a, &b, sizeof(a)), 0, "a uid is no address");
}

/* However many sources come, the table stays as large, and who was over the limit stays so while
 * emptier ones could make room. */
Test(engine_auth_limit, a_flood_of_sources)
{
    struct kvk_auth_source bad = kvk_auth_source_uid(7);
    begin(10);
    cr_expect_eq(fails_let_in(&bad, SECOND, 100), 10);
    for (uint32_t i = 0; i < 200000; i++) {
        struct kvk_auth_source source = kvk_auth_source_uid(1000 + i);
        cr_assert_eq(kvk_auth_limit_fail(&limit, &source, SECOND, &error), KVK_OK);
    }
    cr_expect_eq(kvk_auth_limit_check(&limit, &bad, SECOND, &error), KVK_EXHAUSTED);
    kvk_auth_limit_finish(&limit);
}

/* Against a plain count of attempts per source, with few enough sources that all have a place. */
Test(engine_auth_limit, random_against_a_plain_model)
{
    struct kvk_random random;
    double left[8]; /* attempts */
    uint64_t at[8];
    uint64_t now = SECOND;
    begin(6);
    kvk_random_init(&random, 3);
    for (int i = 0; i < 8; i++) {
        left[i] = 6;
        at[i] = now;
    }
    for (int round = 0; round < 20000; round++) {
        uint32_t i = (uint32_t)kvk_random_below(&random, 8);
        struct kvk_auth_source source = kvk_auth_source_uid(i);
        now += kvk_random_below(&random, 4) * SECOND / 8;
        left[i] += (double)(now - at[i]) / (double)SECOND;
        left[i] = left[i] > 6 ? 6 : left[i];
        at[i] = now;
        bool has = left[i] >= 1;
        if (kvk_random_chance(&random, 0.7)) {
            cr_assert_eq(kvk_auth_limit_fail(&limit, &source, now, &error) == KVK_OK, has, "%d",
                         round);
            left[i] -= has;
        } else {
            cr_assert_eq(kvk_auth_limit_check(&limit, &source, now, &error) == KVK_OK, has, "%d",
                         round);
        }
        cr_assert(has || kvk_auth_limit_is_engaged(&limit, now));
    }
    kvk_auth_limit_finish(&limit);
}
