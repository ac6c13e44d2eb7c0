/* Failures are told once, whole, and named; assertions end the process. */
#include "base/status.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <string.h>

#include "base/assert.h"

Test(base_status, fail_fills_every_field)
{
    struct kvk_error error;
    memset(&error, 0xff, sizeof(error));
    enum kvk_status status =
        kvk_fail(&error, KVK_INVALID, KVK_CAUSE_FIELD, "block_tokens", "must be 1 to %u", 4096U);
    cr_assert_eq(status, KVK_INVALID);
    cr_assert_eq(error.status, KVK_INVALID);
    cr_assert_eq(error.cause, KVK_CAUSE_FIELD);
    cr_assert_eq(error.value, 0);
    cr_assert_eq(error.limit, 0);
    cr_assert_eq(error.retry_after_ms, 0);
    cr_assert_str_eq(error.field, "block_tokens");
    cr_assert_str_eq(error.text, "must be 1 to 4096");
}

Test(base_status, limits_and_hints_are_kept)
{
    struct kvk_error error;
    enum kvk_status status = kvk_fail_limit(&error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "sequences", 65,
                                            64, "%d are open", 64);
    kvk_error_retry(&error, 250);
    cr_assert_eq(status, KVK_EXHAUSTED);
    cr_assert_eq(error.value, 65);
    cr_assert_eq(error.limit, 64);
    cr_assert_eq(error.retry_after_ms, 250);
    cr_assert_str_eq(error.text, "64 are open");
}

Test(base_status, long_text_is_cut_and_null_is_fine)
{
    char longer[2 * KVK_ERROR_TEXT_SIZE];
    memset(longer, 'x', sizeof(longer));
    longer[sizeof(longer) - 1] = '\0';
    struct kvk_error error;
    (void)kvk_fail(&error, KVK_INTERNAL, KVK_CAUSE_NONE, longer, "%s", longer);
    cr_assert_eq(strlen(error.field), KVK_ERROR_FIELD_SIZE - 1);
    cr_assert_eq(strlen(error.text), KVK_ERROR_TEXT_SIZE - 1);
    (void)kvk_fail(&error, KVK_INTERNAL, KVK_CAUSE_NONE, NULL, "none");
    cr_assert_str_eq(error.field, "");

    cr_assert_eq(kvk_fail(NULL, KVK_ABORTED, KVK_CAUSE_BUSY, "x", "y"), KVK_ABORTED);
    cr_assert_eq(kvk_fail_limit(NULL, KVK_ABORTED, KVK_CAUSE_BUSY, "x", 1, 2, "y"), KVK_ABORTED);
    kvk_error_retry(NULL, 1);
}

Test(base_status, every_value_has_a_name_of_its_own)
{
    for (int i = KVK_OK; i <= KVK_WOULD_BLOCK; i++) {
        cr_assert_str_neq(kvk_status_name((enum kvk_status)i), "UNKNOWN", "status %d", i);
        for (int j = KVK_OK; j < i; j++) {
            cr_assert_str_neq(kvk_status_name((enum kvk_status)i),
                              kvk_status_name((enum kvk_status)j));
        }
    }
    for (int i = KVK_CAUSE_NONE; i <= KVK_CAUSE_SWITCHED_OFF; i++) {
        cr_assert_str_neq(kvk_cause_name((enum kvk_cause)i), "unknown", "cause %d", i);
        for (int j = KVK_CAUSE_NONE; j < i; j++) {
            cr_assert_str_neq(kvk_cause_name((enum kvk_cause)i), kvk_cause_name((enum kvk_cause)j));
        }
    }
    cr_assert_str_eq(kvk_status_name((enum kvk_status)999), "UNKNOWN");
    cr_assert_str_eq(kvk_cause_name((enum kvk_cause)999), "unknown");
}

Test(base_status, a_failed_assertion_aborts, .signal = SIGABRT)
{
    int one = 1;
    KVK_ASSERT(one == 1);
    KVK_ASSERT(one == 2);
}
