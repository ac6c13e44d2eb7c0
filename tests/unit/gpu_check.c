/* What kvk_attend_check() refuses, by field; and how partial results merge. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "tests/unit/gpu_case.h"

/* ---- The check ---- */

struct subject {
    struct kvk_attend attend;
    struct kvk_attend_item item;
    const void *pages[4];
    float queries[4 * 8];
    float output[4 * 8];
    float lse[4];
    uint8_t page[4096];
};

static void subject_init(struct subject *subject)
{
    memset(subject, 0, sizeof(*subject));
    for (uint32_t i = 0; i < 4; i++) {
        subject->pages[i] = subject->page;
    }
    subject->item = (struct kvk_attend_item){
        .queries = subject->queries,
        .output = subject->output,
        .lse = subject->lse,
        .query_count = 1,
        .position = 12,
        .token_count = 13,
        .pages = subject->pages,
        .page_count = 4,
    };
    subject->attend = (struct kvk_attend){
        .items = &subject->item,
        .item_count = 1,
        .query_heads = 4,
        .kv_heads = 2,
        .head_size_k = 8,
        .head_size_v = 8,
        .block_tokens = 4,
        .format_q = KVK_FORMAT_FP32,
        .format_k = KVK_FORMAT_FP32,
        .format_v = KVK_FORMAT_FP32,
        .v_offset = 256,
        .scale = 1,
        .causal = true,
    };
}

static void expect_refusal(const struct subject *subject, const char *field)
{
    struct kvk_error error;
    enum kvk_status status = kvk_attend_check(&subject->attend, &error);

    cr_assert_eq(status, KVK_INVALID, "%s was let through", field);
    cr_assert_str_eq(error.field, field);
    cr_assert_eq(error.cause, KVK_CAUSE_FIELD);
    cr_assert_eq(kvk_attend_check(&subject->attend, NULL), KVK_INVALID);
}

#define REFUSES(field_name, change)                                                                \
    do {                                                                                           \
        struct subject subject;                                                                    \
        subject_init(&subject);                                                                    \
        cr_assert_eq(kvk_attend_check(&subject.attend, NULL), KVK_OK);                             \
        change;                                                                                    \
        expect_refusal(&subject, field_name);                                                      \
    } while (0)

Test(gpu_check, refuses_sizes_that_cannot_be)
{
    REFUSES("item_count", subject.attend.item_count = 0);
    REFUSES("query_heads", subject.attend.query_heads = 0);
    REFUSES("query_heads", subject.attend.query_heads = 3);
    REFUSES("query_heads", subject.attend.query_heads = KVK_HEAD_COUNT_MAX * 2);
    REFUSES("kv_heads", subject.attend.kv_heads = 0);
    REFUSES("query_heads", subject.attend.kv_heads = 8); /* more than query heads */
    REFUSES("head_size_k", subject.attend.head_size_k = 0);
    REFUSES("head_size_k", subject.attend.head_size_k = KVK_HEAD_SIZE_MAX + 1);
    REFUSES("head_size_v", subject.attend.head_size_v = 0);
    REFUSES("head_size_v", subject.attend.head_size_v = UINT32_MAX);
    REFUSES("head_size_v", (subject.attend.latent = true, subject.attend.head_size_v = 9));
    REFUSES("block_tokens", subject.attend.block_tokens = 0);
    REFUSES("block_tokens", subject.attend.block_tokens = KVK_BLOCK_TOKENS_MAX + 1);
}

Test(gpu_check, refuses_numbers_that_are_none)
{
    REFUSES("scale", subject.attend.scale = NAN);
    REFUSES("scale", subject.attend.scale = INFINITY);
    REFUSES("scale", subject.attend.scale = -INFINITY);
    REFUSES("soft_cap", subject.attend.soft_cap = NAN);
    REFUSES("format_q", subject.attend.format_q = KVK_FORMAT_FP8_E4M3);
    REFUSES("format_k", subject.attend.format_k = (enum kvk_format)(KVK_FORMAT_MAX + 1));
    REFUSES("format_v", subject.attend.format_k = KVK_FORMAT_FP8_E4M3);
    REFUSES("format_v", subject.attend.format_v = KVK_FORMAT_INT8_CHANNEL);
    REFUSES("head_size_k", (subject.attend.format_k = subject.attend.format_v = KVK_FORMAT_INT8_32,
                            subject.attend.head_size_k = 80));
    REFUSES("head_size_v", (subject.attend.format_k = subject.attend.format_v = KVK_FORMAT_INT8_32,
                            subject.attend.head_size_k = 64, subject.attend.head_size_v = 33));
    REFUSES("format_k",
            (subject.attend.format_k = KVK_FORMAT_INT8_CHANNEL, subject.attend.latent = true));
    REFUSES("soft_cap", subject.attend.soft_cap = INFINITY);
    REFUSES("soft_cap", subject.attend.soft_cap = -1);
    const float slopes[4] = {0, -1, INFINITY, 0};
    const float lowest_slopes[4] = {-INFINITY, 0, 0, 0};
    const float sinks[4] = {0, -INFINITY, 2, NAN};
    const float endless_sinks[4] = {0, INFINITY, 2, NAN};
    REFUSES("alibi_slopes[2]", subject.attend.alibi_slopes = slopes);
    REFUSES("alibi_slopes[0]", subject.attend.alibi_slopes = lowest_slopes);
    REFUSES("sink_logits[3]", subject.attend.sink_logits = sinks);
    REFUSES("sink_logits[1]", subject.attend.sink_logits = endless_sinks);
}

Test(gpu_check, refuses_formats_that_are_unknown)
{
    REFUSES("format_q", subject.attend.format_q = KVK_FORMAT_NONE);
    REFUSES("format_k", subject.attend.format_k = KVK_FORMAT_NONE);
    REFUSES("format_v", subject.attend.format_v = KVK_FORMAT_NONE);
}

Test(gpu_check, refuses_offsets_past_any_block)
{
    REFUSES("k_offset", subject.attend.k_offset = KVK_BLOCK_BYTES_MAX);
    REFUSES("k_offset", subject.attend.k_offset = UINT64_MAX);
    REFUSES("v_offset", subject.attend.v_offset = KVK_BLOCK_BYTES_MAX - 255);
    REFUSES("v_offset", subject.attend.v_offset = UINT64_MAX - 10);
}

Test(gpu_check, refuses_items_that_lack_something)
{
    REFUSES("items", subject.attend.items = NULL);
    REFUSES("items[0].query_count", subject.item.query_count = 0);
    REFUSES("items[0].queries", subject.item.queries = NULL);
    REFUSES("items[0].output", subject.item.output = NULL);
    REFUSES("items[0].lse", subject.item.lse = NULL);
    REFUSES("items[0].pages", subject.item.pages = NULL);
    REFUSES("items[0].position", subject.item.position = UINT64_MAX);
    REFUSES("items[0].token_count", subject.item.token_count = UINT64_MAX);
    REFUSES("items[0].first_token", subject.item.first_token = UINT64_MAX - 3);
}

Test(gpu_check, refuses_pages_that_end_too_early)
{
    REFUSES("items[0].pages", subject.item.token_count = 17);
    REFUSES("items[0].pages", subject.item.page_count = 3);
    REFUSES("items[0].pages", (subject.item.page_count = 0, subject.item.pages = NULL));
}

Test(gpu_check, lets_the_odd_but_possible_through)
{
    struct subject subject;

    subject_init(&subject);
    subject.item.token_count = 16; /* pages end just there */
    subject.pages[1] = NULL;       /* attended elsewhere */
    subject.attend.scale = 0;
    subject.attend.sinks = 3;
    cr_assert_eq(kvk_attend_check(&subject.attend, NULL), KVK_OK);
    subject.item.token_count = 0;
    subject.item.page_count = 0;
    subject.item.pages = NULL;
    cr_assert_eq(kvk_attend_check(&subject.attend, NULL), KVK_OK);
    subject_init(&subject);
    subject.attend.latent = true;
    subject.attend.format_v = KVK_FORMAT_NONE;
    subject.attend.v_offset = UINT64_MAX; /* both are not used */
    cr_assert_eq(kvk_attend_check(&subject.attend, NULL), KVK_OK);
    subject.attend.format_k = KVK_FORMAT_FP8_E4M3;
    cr_assert_eq(kvk_attend_check(&subject.attend, NULL), KVK_OK);
}

/* A refused call changes nothing, through the device too. */
Test(gpu_check, a_refused_call_writes_nothing)
{
    struct subject subject;
    struct kvk_device *device;
    struct kvk_error error;

    subject_init(&subject);
    subject.output[0] = 42;
    subject.lse[0] = 43;
    subject.attend.scale = NAN;
    cr_assert_eq(kvk_device_cpu_open(NULL, &device, &error), KVK_OK);
    cr_assert_eq(device->ops->attend(device, &subject.attend, &error), KVK_INVALID);
    cr_assert_str_eq(error.field, "scale");
    cr_assert(subject.output[0] == 42 && subject.lse[0] == 43);
    device->ops->close(device);
}

/* ---- Merging ---- */

Test(gpu_check, parts_that_saw_nothing_count_for_nothing)
{
    float output[4] = {1, 2, 3, 4};
    float lse[2] = {-INFINITY, 0.5F};
    float other[4] = {5, 6, NAN, NAN};
    float other_lse[2] = {2, -INFINITY};

    kvk_attend_merge(output, lse, other, other_lse, 2, 2);
    cr_assert(output[0] == 5 && output[1] == 6 && lse[0] == 2);
    cr_assert(output[2] == 3 && output[3] == 4 && lse[1] == 0.5F);
}

Test(gpu_check, two_parts_that_saw_nothing_give_nothing)
{
    float output[2] = {NAN, 7};
    float lse = -INFINITY;
    const float other[2] = {NAN, NAN};
    const float other_lse = -INFINITY;

    kvk_attend_merge(output, &lse, other, &other_lse, 1, 2);
    cr_assert(output[0] == 0 && output[1] == 0 && lse == -INFINITY);
}

Test(gpu_check, merging_weighs_by_what_was_seen)
{
    float output[1] = {1};
    float lse = logf(3);
    const float other[1] = {5};
    const float other_lse = 0; /* ln 1 */

    kvk_attend_merge(output, &lse, other, &other_lse, 1, 1);
    cr_assert_float_eq(output[0], 2, 1e-6F);
    cr_assert_float_eq(lse, logf(4), 1e-6F);
}

Test(gpu_check, merging_does_not_overflow)
{
    float output[1] = {1};
    float lse = 1e30F;
    const float other[1] = {3};
    const float other_lse = 1e30F;

    kvk_attend_merge(output, &lse, other, &other_lse, 1, 1);
    cr_assert_float_eq(output[0], 2, 1e-6F);
    cr_assert(isfinite(lse));
    lse = -1e30F;
    kvk_attend_merge(output, &lse, other, &other_lse, 1, 1);
    cr_assert(output[0] == 3 && lse == 1e30F);
}

/* In either order, and however parts are put together, the same comes out. */
Test(gpu_check, merging_is_commutative_and_associative)
{
    struct kvk_random random;

    kvk_random_init(&random, 9);
    for (uint32_t round = 0; round < 1000; round++) {
        float values[3][2];
        float lses[3];
        for (uint32_t i = 0; i < 3; i++) {
            values[i][0] = (float)kvk_random_unit(&random) * 2 - 1;
            values[i][1] = (float)kvk_random_unit(&random) * 2 - 1;
            lses[i] = (float)kvk_random_unit(&random) * 20 - 10;
            if (kvk_random_chance(&random, 0.1)) {
                lses[i] = -INFINITY;
                values[i][0] = values[i][1] = 0;
            }
        }
        float left[2] = {values[0][0], values[0][1]};
        float left_lse = lses[0];
        kvk_attend_merge(left, &left_lse, values[1], &lses[1], 1, 2);
        kvk_attend_merge(left, &left_lse, values[2], &lses[2], 1, 2);
        float right[2] = {values[2][0], values[2][1]};
        float right_lse = lses[2];
        kvk_attend_merge(right, &right_lse, values[1], &lses[1], 1, 2);
        kvk_attend_merge(right, &right_lse, values[0], &lses[0], 1, 2);
        cr_assert_float_eq(left[0], right[0], 1e-5F);
        cr_assert_float_eq(left[1], right[1], 1e-5F);
        cr_assert(left_lse == right_lse || fabsf(left_lse - right_lse) < 1e-5F);
    }
}
