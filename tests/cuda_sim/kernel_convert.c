/* The kernel that converts parts: equal to the CPU's plain conversion to the bit, both ways. */
#include <criterion/criterion.h>

#include "gpu/convert.h"
#include "gpu/values.h"
#include "tests/cuda_sim/attend_case.h"

#define PART_COUNT 40

struct conversion_case {
    struct kvk_part wide, narrow;
    struct attend_case_memory wide_bytes, narrow_bytes, back_bytes;
    uint8_t *expected, *expected_back;
    bool is_refused;
};

static struct kvk_cuda_part cuda_part(const struct kvk_part *part)
{
    return (struct kvk_cuda_part){.scales_offset = part->scales_offset,
                                  .row_bytes = (uint32_t)part->row_bytes,
                                  .scale_stride = (uint32_t)part->scale_stride};
}

/* Finite bits of any size, edges among them. */
static void fill(struct kvk_random *random, const struct kvk_part *part, uint8_t *bytes)
{
    size_t value_bytes = kvk_format_bytes(part->format);
    bool is_wild = kvk_random_chance(random, 0.4);

    for (uint64_t i = 0; i < part->size_bytes / value_bytes; i++) {
        uint8_t *at = bytes + i * value_bytes;
        gpu_case_value(random, part->format, at);
        while (is_wild) {
            uint64_t bits = kvk_random_next(random);
            memcpy(at, &bits, value_bytes);
            if (isfinite(kvk_value_widen(part->format, at, 0))) {
                break;
            }
        }
    }
}

static void case_make(struct kvk_random *random, struct conversion_case *test, uint32_t index)
{
    static const uint32_t head_sizes[] = {64, 96, 128, 32, 5, 33, 160};
    enum kvk_format narrow = (enum kvk_format)(KVK_FORMAT_FP8_E4M3 + (int)(index % 3));
    enum kvk_format wide = (enum kvk_format)(KVK_FORMAT_FP32 + (int)(index / 3 % 3));
    uint32_t head_size = head_sizes[kvk_random_below(random, 7)];
    uint32_t heads = 1 + (uint32_t)kvk_random_below(random, 3);
    uint32_t tokens = 1 + (uint32_t)kvk_random_below(random, 20);
    bool is_value = kvk_random_chance(random, 0.5);
    struct kvk_error error;

    head_size = kvk_format_fits(narrow, head_size) ? head_size : 32;
    test->wide = kvk_part_of(wide, is_value, heads, tokens, head_size);
    test->narrow = kvk_part_of(narrow, is_value, heads, tokens, head_size);
    test->wide_bytes = attend_case_memory_make(test->wide.size_bytes, 4);
    test->narrow_bytes = attend_case_memory_make(test->narrow.size_bytes, 4);
    test->back_bytes = attend_case_memory_make(test->wide.size_bytes, 4);
    test->expected = gpu_case_alloc(test->narrow.size_bytes);
    test->expected_back = gpu_case_alloc(test->wide.size_bytes);
    fill(random, &test->wide, test->wide_bytes.begin);
    if (index % 10 == 9) { /* one NaN, somewhere */
        memset(test->wide_bytes.begin + test->wide.row_bytes * (tokens - 1), 0xff, 4);
    }
    const struct kvk_convert_kernel *plain = kvk_convert_find("plain");
    test->is_refused = kvk_convert_narrow(plain, &test->wide, test->wide_bytes.begin, &test->narrow,
                                          test->expected, &error) != KVK_OK;
    kvk_convert_widen(plain, &test->narrow, test->expected, &test->wide, test->expected_back);
}

static struct kvk_cuda_conversion conversion_of(const struct conversion_case *test,
                                                bool is_widening)
{
    return (struct kvk_cuda_conversion){
        .source = is_widening ? test->narrow_bytes.begin : test->wide_bytes.begin,
        .target = is_widening ? test->back_bytes.begin : test->narrow_bytes.begin,
        .wide = cuda_part(&test->wide),
        .narrow = cuda_part(&test->narrow),
        .heads = test->wide.heads,
        .tokens = test->wide.tokens,
        .head_size = test->wide.head_size,
        .format_wide = (uint8_t)test->wide.format,
        .format_narrow = (uint8_t)test->narrow.format,
        .is_value = test->wide.is_value,
        .is_widening = is_widening,
    };
}

static void convert_all(const struct conversion_case *tests, bool is_widening,
                        uint32_t refused[PART_COUNT])
{
    struct kvk_cuda_conversion list[PART_COUNT];

    for (uint32_t i = 0; i < PART_COUNT; i++) {
        list[i] = conversion_of(&tests[i], is_widening);
    }
    struct attend_case_memory memory = attend_case_memory_of(list, sizeof(list), 8);
    cr_assert_eq(kvk_cuda_convert_launch((const struct kvk_cuda_conversion *)(void *)memory.begin,
                                         PART_COUNT, 3, refused, NULL),
                 0);
    attend_case_memory_free(memory);
}

static void case_check(const struct conversion_case *test, uint32_t index, bool was_refused)
{
    cr_assert_eq(was_refused, test->is_refused, "part %u", index);
    if (test->is_refused) {
        return;
    }
    cr_assert_eq(memcmp(test->narrow_bytes.begin, test->expected, test->narrow.size_bytes), 0,
                 "part %u, %s to %s", index, kvk_format_name(test->wide.format),
                 kvk_format_name(test->narrow.format));
    cr_assert_eq(memcmp(test->back_bytes.begin, test->expected_back, test->wide.size_bytes), 0,
                 "part %u, %s back to %s", index, kvk_format_name(test->narrow.format),
                 kvk_format_name(test->wide.format));
}

Test(cuda_convert, equals_the_plain_conversion_to_the_bit)
{
    for (int order = KVK_SIM_FORWARD; order <= KVK_SIM_RANDOM; order++) {
        struct conversion_case tests[PART_COUNT];
        uint32_t refused[PART_COUNT] = {0};
        uint32_t refused_back[PART_COUNT] = {0};
        struct kvk_random random;
        kvk_random_init(&random, (uint64_t)order + 1);
        kvk_sim_order_set((enum kvk_sim_order)order, 1);
        for (uint32_t i = 0; i < PART_COUNT; i++) {
            case_make(&random, &tests[i], i);
        }
        convert_all(tests, false, refused);
        convert_all(tests, true, refused_back);
        for (uint32_t i = 0; i < PART_COUNT; i++) {
            case_check(&tests[i], i, refused[i] != 0);
            cr_assert_eq(refused_back[i], 0);
            attend_case_memory_free(tests[i].wide_bytes);
            attend_case_memory_free(tests[i].narrow_bytes);
            attend_case_memory_free(tests[i].back_bytes);
            free(tests[i].expected);
            free(tests[i].expected_back);
        }
    }
}
