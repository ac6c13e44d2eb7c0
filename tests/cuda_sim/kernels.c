/* The CUDA kernels against the double-precision reference, on the simulator, in every order of
 * threads. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "tests/cuda_sim/attend_case.h"

/* Head sizes that the matrix kernel has, and some that it leaves to the plain one. */
struct shape {
    uint32_t size_k, size_v;
    bool latent;
};

static const struct shape shapes[] = {
    {64, 64, false},   {96, 96, false},   {128, 128, false}, {192, 128, false},
    {256, 256, false}, {576, 512, true},  {40, 24, false},   {7, 9, false},
    {128, 64, false},  {160, 160, false}, {33, 20, true},
};
#define SHAPE_COUNT (sizeof(shapes) / sizeof(shapes[0]))

static uint32_t pick(struct kvk_random *random, const uint32_t *choices, uint32_t count)
{
    return choices[kvk_random_below(random, count)];
}

/* Sometimes K and V are compact; where the shape allows it. */
static void pick_compact(struct kvk_random *random, struct kvk_attend *attend)
{
    enum kvk_format format =
        (enum kvk_format)(KVK_FORMAT_FP8_E4M3 + (int)kvk_random_below(random, 3));
    bool fits = kvk_format_fits(format, attend->head_size_k) &&
                kvk_format_fits(format, attend->head_size_v) &&
                !(attend->latent && format == KVK_FORMAT_INT8_CHANNEL);

    if (fits && kvk_random_chance(random, 0.35)) {
        attend->format_k = format;
        attend->format_v = format;
    }
}

static void pick_shape(struct kvk_random *random, struct kvk_attend *attend)
{
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 8, 16, 17};
    static const uint32_t blocks[] = {1, 3, 16, 16, 16, 17, 32, 64, 100};
    const struct shape *shape = &shapes[kvk_random_below(random, SHAPE_COUNT)];

    attend->kv_heads = 1 + (uint32_t)kvk_random_below(random, 2);
    attend->query_heads = attend->kv_heads * pick(random, groups, 8);
    attend->head_size_k = shape->size_k;
    attend->head_size_v = shape->size_v;
    attend->latent = shape->latent;
    attend->block_tokens = pick(random, blocks, 9);
    attend->format_k = kvk_random_chance(random, 0.5) ? KVK_FORMAT_BF16 : KVK_FORMAT_FP16;
    if (kvk_random_chance(random, 0.1)) {
        attend->format_k = KVK_FORMAT_FP32;
    }
    attend->format_q = kvk_random_chance(random, 0.1) ? KVK_FORMAT_FP32 : attend->format_k;
    attend->format_v = kvk_random_chance(random, 0.1) ? KVK_FORMAT_FP32 : attend->format_k;
    pick_compact(random, attend);
    attend->k_offset = kvk_random_below(random, 4) * (kvk_random_chance(random, 0.2) ? 25 : 16);
    attend->v_offset =
        attend->k_offset + gpu_case_k_bytes(attend) + kvk_random_below(random, 2) * 48;
}

static void pick_rules(struct kvk_random *random, struct gpu_case *test)
{
    struct kvk_attend *attend = &test->attend;

    attend->scale = 1.0F / sqrtf((float)attend->head_size_k);
    if (kvk_random_chance(random, 0.25)) {
        attend->soft_cap = powf(10, (float)kvk_random_unit(random) * 4 - 1); /* 0.1 to 1,000 */
    }
    attend->causal = kvk_random_chance(random, 0.7);
    if (kvk_random_chance(random, 0.4)) {
        attend->window = 1 + (uint32_t)kvk_random_below(random, 90);
        if (kvk_random_chance(random, 0.5)) {
            attend->sinks = (uint32_t)kvk_random_below(random, 80);
        }
    }
    for (uint32_t i = 0; i < attend->query_heads; i++) {
        test->slopes[i] = (float)kvk_random_unit(random) - 0.3F;
        test->sinks[i] =
            kvk_random_chance(random, 0.2) ? -INFINITY : (float)kvk_random_unit(random) * 8 - 4;
    }
    if (kvk_random_chance(random, 0.25)) {
        attend->alibi_slopes = test->slopes;
    }
    if (kvk_random_chance(random, 0.25)) {
        attend->sink_logits = test->sinks;
    }
}

static void pick_item(struct kvk_random *random, struct gpu_case *test, uint32_t index)
{
    struct kvk_attend *attend = &test->attend;
    struct kvk_attend_item *item = &test->items[index];
    uint32_t tokens_max = kvk_random_chance(random, 0.2) ? 300 : 100;

    item->query_count =
        kvk_random_chance(random, 0.5) ? 1 : 1 + (uint32_t)kvk_random_below(random, 20);
    item->token_count = kvk_random_below(random, tokens_max);
    item->position = item->token_count;
    if (item->position >= item->query_count) {
        item->position -= item->query_count;
    }
    if (kvk_random_chance(random, 0.3)) {
        item->position = kvk_random_below(random, 2 * tokens_max);
    }
    if (kvk_random_chance(random, 0.2)) {
        item->first_token = kvk_random_below(random, item->token_count + 1);
    }
    item->partial = kvk_random_chance(random, 0.3);
    uint64_t held = item->token_count - item->first_token;
    item->page_count = (uint32_t)((held + attend->block_tokens - 1) / attend->block_tokens);
    item->page_count += (uint32_t)kvk_random_below(random, 2);
    gpu_case_fill_item(test, index, random, kvk_random_chance(random, 0.2) ? 0.3 : 0);
}

/* All orders give the same bytes, and those are right. */
static void check_orders(struct gpu_case *test, uint64_t seed, uint32_t split_tokens)
{
    float *first[GPU_CASE_ITEMS_MAX] = {0};

    for (int order = KVK_SIM_FORWARD; order <= KVK_SIM_RANDOM; order++) {
        kvk_sim_order_set((enum kvk_sim_order)order, seed);
        cr_assert_eq(attend_case_run(test, split_tokens), 0, "seed %llu order %d",
                     (unsigned long long)seed, order);
        cr_assert(attend_case_is_right(test), "seed %llu order %d: output %g, lse %g off",
                  (unsigned long long)seed, order, gpu_case_output_error(test),
                  gpu_case_lse_error(test));
        for (uint32_t i = 0; i < test->attend.item_count; i++) {
            size_t size_bytes = (size_t)test->items[i].query_count * test->attend.query_heads *
                                test->attend.head_size_v * sizeof(float);
            KVK_ASSERT(size_bytes > 0);
            if (first[i] == NULL) {
                first[i] = gpu_case_alloc(size_bytes);
                memcpy(first[i], test->items[i].output, size_bytes);
            }
            cr_assert_eq(memcmp(first[i], test->items[i].output, size_bytes), 0,
                         "seed %llu order %d: other bytes", (unsigned long long)seed, order);
        }
    }
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        free(first[i]);
    }
}

#define CASE_COUNT 50

Test(cuda_kernels, random_batches_match_the_reference)
{
    uint32_t matrix_count = 0;

    for (uint64_t seed = 1; seed <= CASE_COUNT; seed++) {
        static const uint32_t splits[] = {0, 0, 33, 64, 100};
        struct kvk_random random;
        struct gpu_case test = {0};
        kvk_random_init(&random, seed);
        pick_shape(&random, &test.attend);
        pick_rules(&random, &test);
        test.attend.items = test.items;
        test.attend.item_count = 1 + (uint32_t)kvk_random_below(&random, 3);
        for (uint32_t i = 0; i < test.attend.item_count; i++) {
            pick_item(&random, &test, i);
        }
        gpu_case_expect(&test);
        matrix_count += attend_case_kernel(&test) == KVK_CUDA_KERNEL_MATRIX;
        check_orders(&test, seed, pick(&random, splits, 5));
        gpu_case_free(&test);
    }
    cr_assert_geq(matrix_count, CASE_COUNT / 5);
    cr_assert_leq(matrix_count, CASE_COUNT * 4 / 5);
}

/* One item of one query, 2 KV heads of 128, blocks of 16. */
static void plain_case(struct gpu_case *test, enum kvk_format format, uint64_t tokens)
{
    memset(test, 0, sizeof(*test));
    test->attend = (struct kvk_attend){
        .items = test->items,
        .item_count = 1,
        .query_heads = 6,
        .kv_heads = 2,
        .head_size_k = 128,
        .head_size_v = 128,
        .block_tokens = 16,
        .format_q = format,
        .format_k = format,
        .format_v = format,
        .scale = 0.088F,
        .causal = true,
    };
    test->attend.v_offset = gpu_case_k_bytes(&test->attend);
    test->items[0].query_count = 1;
    test->items[0].token_count = tokens;
    test->items[0].position = tokens > 0 ? tokens - 1 : 0;
    test->items[0].page_count = (uint32_t)((tokens + 15) / 16);
}

/* Unused slots hold NaN, pages end at guard pages. */
Test(cuda_kernels, every_length_to_two_blocks_and_past_tiles)
{
    for (uint64_t tokens = 0; tokens <= 150; tokens = tokens < 34 ? tokens + 1 : tokens + 29) {
        struct attend_case_memory memory[16];
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, tokens);
        plain_case(&test, KVK_FORMAT_BF16, tokens);
        gpu_case_fill_item(&test, 0, &random, 0);
        gpu_case_expect(&test);
        for (uint32_t i = 0; i < test.items[0].page_count; i++) {
            memory[i] =
                attend_case_memory_of(test.pages[0][i], gpu_case_page_bytes(&test.attend), 16);
            free(test.pages[0][i]);
            test.pages[0][i] = memory[i].begin;
        }
        check_orders(&test, tokens, 0);
        for (uint32_t i = 0; i < test.items[0].page_count; i++) {
            attend_case_memory_free(memory[i]);
            test.pages[0][i] = NULL;
        }
        gpu_case_free(&test);
    }
}

/* What a query sees must not hang on where tiles, blocks and splits end. */
Test(cuda_kernels, windows_around_tiles_and_blocks)
{
    static const uint32_t windows[] = {1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129};

    for (uint32_t i = 0; i < sizeof(windows) / sizeof(windows[0]); i++) {
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, i);
        plain_case(&test, i % 2 == 0 ? KVK_FORMAT_BF16 : KVK_FORMAT_FP16, 200 + i);
        test.attend.window = windows[i];
        test.attend.sinks = i % 3 * 5;
        test.items[0].query_count = 1 + i % 4 * 3;
        test.items[0].position = 190 - i % 4 * 3;
        gpu_case_fill_item(&test, 0, &random, 0);
        gpu_case_expect(&test);
        check_orders(&test, i, i % 2 == 0 ? 0 : 64);
        gpu_case_free(&test);
    }
}

/* Sinks are positions, not places in a table that begins later. */
Test(cuda_kernels, sinks_of_a_table_that_begins_late)
{
    for (uint32_t i = 0; i < 4; i++) {
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, i);
        plain_case(&test, i % 2 == 0 ? KVK_FORMAT_BF16 : KVK_FORMAT_FP32, 80);
        test.attend.window = 33;
        test.attend.sinks = 20 + i;
        test.items[0].query_count = 11;
        test.items[0].position = 50;
        test.items[0].first_token = 16;
        test.items[0].page_count = 4;
        gpu_case_fill_item(&test, 0, &random, 0);
        gpu_case_expect(&test);
        check_orders(&test, i, i < 2 ? 0 : 16);
        gpu_case_free(&test);
    }
}

/* Fill all of an item's K, or V, with one value. */
static void fill_values(struct gpu_case *test, bool is_value, uint16_t bits)
{
    uint64_t offset = is_value ? test->attend.v_offset : test->attend.k_offset;
    uint64_t count = gpu_case_k_bytes(&test->attend) / sizeof(bits);

    for (uint32_t page = 0; page < test->items[0].page_count; page++) {
        for (uint64_t i = 0; i < count; i++) {
            memcpy(test->pages[0][page] + offset + i * sizeof(bits), &bits, sizeof(bits));
        }
    }
}

#define FP16_200 0x5a40
#define FP16_1 0x3c00

/* Products of 200 x 200 pass fp16's range: they must never be in it. */
Test(cuda_kernels, large_fp16_values_do_not_overflow)
{
    struct kvk_random random;
    struct gpu_case test;
    uint16_t bits = FP16_200;

    kvk_random_init(&random, 1);
    plain_case(&test, KVK_FORMAT_FP16, 80);
    gpu_case_fill_item(&test, 0, &random, 0);
    fill_values(&test, false, FP16_200);
    for (uint32_t i = 0; i < test.attend.query_heads * test.attend.head_size_k; i++) {
        memcpy((uint8_t *)(uintptr_t)test.items[0].queries + i * sizeof(bits), &bits, sizeof(bits));
    }
    test.attend.scale = 1;
    gpu_case_expect(&test);
    check_orders(&test, 1, 32);
    cr_assert(test.items[0].lse[0] > 5e6F); /* 128 x 40,000 */
    gpu_case_free(&test);
}

/* Caps and slopes with logits far past where exp() ends. */
Test(cuda_kernels, large_logits)
{
    for (uint32_t i = 0; i < 4; i++) {
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, i);
        plain_case(&test, KVK_FORMAT_BF16, 150);
        gpu_case_fill_item(&test, 0, &random, 0);
        test.attend.scale = 30;
        test.attend.soft_cap = i % 2 == 0 ? 0 : 50;
        for (uint32_t head = 0; head < test.attend.query_heads; head++) {
            test.slopes[head] = 10.0F * (float)head;
        }
        test.attend.alibi_slopes = i < 2 ? NULL : test.slopes;
        gpu_case_expect(&test);
        check_orders(&test, i, 64);
        gpu_case_free(&test);
    }
}

/* A constant V must come back as it is, however many weights are added up. */
Test(cuda_kernels, constant_values_over_many_tokens)
{
    struct kvk_random random;
    struct gpu_case test;

    kvk_random_init(&random, 1);
    plain_case(&test, KVK_FORMAT_FP16, 5000);
    gpu_case_fill_item(&test, 0, &random, 0);
    fill_values(&test, true, FP16_1);
    kvk_sim_order_set(KVK_SIM_FORWARD, 1);
    cr_assert_eq(attend_case_run(&test, 0), 0);
    for (uint32_t i = 0; i < test.attend.query_heads * test.attend.head_size_v; i++) {
        cr_assert(fabsf(test.items[0].output[i] - 1) < 2e-6F, "value %u is %g", i,
                  (double)test.items[0].output[i]);
    }
    gpu_case_free(&test);
}

/* Pages of a gigabyte in a sparse pool of several: no offset is counted in 32 bits. */
Test(cuda_kernels, pages_far_apart)
{
    const uint64_t stride = UINT64_C(1) << 30;
    const uint32_t count = 5;

    for (int i = 0; i < 2; i++) {
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, 1);
        plain_case(&test, i == 0 ? KVK_FORMAT_BF16 : KVK_FORMAT_FP32, (uint64_t)count * 16);
        test.attend.k_offset = stride - (1 << 20);
        test.attend.v_offset = test.attend.k_offset + gpu_case_k_bytes(&test.attend);
        uint8_t *pool = mmap(NULL, count * stride, PROT_READ | PROT_WRITE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        cr_assert_neq(pool, MAP_FAILED);
        test.items[0].page_count = 0; /* its buffers without pages */
        test.items[0].token_count = 0;
        gpu_case_fill_item(&test, 0, &random, 0);
        free(test.pages[0]);
        test.items[0].token_count = (uint64_t)count * 16;
        test.items[0].page_count = count;
        test.pages[0] = calloc(count, sizeof(uint8_t *));
        cr_assert_not_null(test.pages[0]);
        test.items[0].pages = (const void *const *)test.pages[0];
        for (uint32_t page = 0; page < count; page++) {
            test.pages[0][page] = pool + (count - 1 - page) * stride;
            for (uint32_t slot = 0; slot < 16; slot++) {
                gpu_case_fill_slot(&test.attend, &random, test.pages[0][page], slot);
            }
        }
        gpu_case_expect(&test);
        check_orders(&test, 1, 48);
        test.items[0].page_count = 0; /* the pool's, not the case's */
        gpu_case_free(&test);
        cr_assert_eq(munmap(pool, count * stride), 0);
    }
}

/* Parts whose largest logits are far apart, and an LSE of exactly 0: one token with a logit of 0.
 */
Test(cuda_kernels, merges_of_parts_far_apart)
{
    for (uint32_t i = 0; i < 3; i++) {
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, i);
        plain_case(&test, KVK_FORMAT_BF16, i == 2 ? 1 : 128);
        gpu_case_fill_item(&test, 0, &random, 0);
        for (uint32_t head = 0; head < test.attend.query_heads; head++) {
            test.slopes[head] = i == 0 ? 200.0F : -200.0F; /* 1e4 from one part to the next */
        }
        test.attend.alibi_slopes = i == 2 ? NULL : test.slopes;
        if (i == 2) {
            test.attend.scale = 0;
        }
        gpu_case_expect(&test);
        check_orders(&test, i, 64);
        if (i == 2) {
            cr_assert(test.items[0].lse[0] == 0);
        }
        gpu_case_free(&test);
    }
}

/* A page table of absent pages alone, and one that a chunk is longer than. */
Test(cuda_kernels, nothing_to_see)
{
    struct kvk_random random;
    struct gpu_case test;

    kvk_random_init(&random, 1);
    plain_case(&test, KVK_FORMAT_BF16, 40);
    test.items[0].query_count = 60;
    test.items[0].position = 0;
    test.attend.sink_logits = test.sinks;
    test.sinks[1] = 2;
    gpu_case_fill_item(&test, 0, &random, 1);
    gpu_case_expect(&test);
    check_orders(&test, 1, 16);
    gpu_case_free(&test);
}

/* Compact formats in the matrix kernel, for few rows and for many. */
Test(cuda_kernels, compact_formats_are_attended_by_matrix_instructions)
{
    static const struct shape sizes[] = {
        {64, 64, false}, {96, 96, false}, {128, 128, false}, {192, 128, false}, {256, 256, false}};

    for (uint32_t i = 0; i < 30; i++) {
        const struct shape *size = &sizes[i % 5];
        enum kvk_format format = (enum kvk_format)(KVK_FORMAT_FP8_E4M3 + (int)(i / 5 % 3));
        bool is_chunk = i >= 15;
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, i);
        plain_case(&test, KVK_FORMAT_BF16, 75);
        test.attend.head_size_k = size->size_k;
        test.attend.head_size_v = size->size_v;
        test.attend.format_k = test.attend.format_v = format;
        test.attend.format_q = (enum kvk_format)(KVK_FORMAT_FP32 + (int)(i % 3));
        test.attend.v_offset = gpu_case_k_bytes(&test.attend);
        test.items[0].query_count = is_chunk ? 6 : 1;
        test.items[0].position = is_chunk ? 69 : 74;
        gpu_case_fill_item(&test, 0, &random, 0);
        gpu_case_expect(&test);
        bool fits = format != KVK_FORMAT_INT8_32 || size->size_k % 64 == 0;
        cr_assert_eq(attend_case_kernel(&test),
                     fits ? KVK_CUDA_KERNEL_MATRIX : KVK_CUDA_KERNEL_PLAIN);
        check_orders(&test, i, is_chunk ? 0 : 40);
        gpu_case_free(&test);
    }
}

/* GPUs that give a block less shared memory (8.6, 8.9, 12.0) run what fits: matrix kernels for few
 * rows where those for many do not, else the plain one. */
Test(cuda_kernels, kernels_are_chosen_by_what_a_gpu_has_room_for)
{
    static const struct {
        struct shape size;
        enum kvk_format format;
        uint32_t rows; /* of a matrix kernel in 99 KiB; 0: none */
    } cases[] = {
        {{64, 64, false}, KVK_FORMAT_BF16, 16},     {{128, 128, false}, KVK_FORMAT_BF16, 0},
        {{256, 256, false}, KVK_FORMAT_BF16, 0},    {{576, 512, true}, KVK_FORMAT_BF16, 0},
        {{64, 64, false}, KVK_FORMAT_FP8_E4M3, 64}, {{128, 128, false}, KVK_FORMAT_FP8_E4M3, 16},
    };

    kvk_sim_shared_limit_set(99 * 1024);
    for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, i);
        plain_case(&test, KVK_FORMAT_BF16, 75);
        test.attend.head_size_k = cases[i].size.size_k;
        test.attend.head_size_v = cases[i].size.size_v;
        test.attend.latent = cases[i].size.latent;
        test.attend.format_k = test.attend.format_v = cases[i].format;
        test.attend.v_offset = gpu_case_k_bytes(&test.attend);
        test.items[0].query_count = 6;
        test.items[0].position = 69;
        gpu_case_fill_item(&test, 0, &random, 0);
        gpu_case_expect(&test);
        cr_expect_eq(kvk_cuda_matrix_rows(KVK_FORMAT_BF16, cases[i].format, cases[i].format,
                                          cases[i].size.size_k, cases[i].size.size_v,
                                          cases[i].size.latent, 99 * 1024),
                     cases[i].rows, "case %u", i);
        check_orders(&test, i, 0);
        gpu_case_free(&test);
    }
    kvk_sim_shared_limit_set(163 * 1024);
}

/* Tokens that all units of the batch go over together. */
static uint64_t unit_tokens(const struct gpu_case *test)
{
    const struct kvk_cuda_limits limits = {.shared_bytes = kvk_sim_shared_limit(),
                                           .multiprocessor_count = ATTEND_CASE_MULTIPROCESSORS};
    struct kvk_cuda_plan plan;
    struct kvk_error error;
    uint64_t total = 0;

    cr_assert_eq(kvk_cuda_plan_init(&plan, &test->attend, &limits, &error), KVK_OK);
    uint8_t *upload = gpu_case_alloc(plan.upload_bytes);
    uint8_t *work = gpu_case_alloc(plan.work_bytes);
    kvk_cuda_plan_fill(&plan, &test->attend, upload);
    kvk_cuda_plan_bind(&plan, &test->attend, upload, work);
    for (uint32_t i = 0; i < plan.launch.unit_count; i++) {
        total += plan.launch.units[i].end - plan.launch.units[i].begin;
    }
    kvk_cuda_plan_finish(&plan);
    free(upload);
    free(work);
    return total;
}

/* Items of different lengths and positions begin with the same pages, some of them with more. */
Test(cuda_kernels, shared_prefixes_are_read_once)
{
    for (uint32_t seed = 0; seed < 8; seed++) {
        static const uint32_t splits[] = {0, 48};
        const uint32_t pages = 9;
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, seed);
        plain_case(&test, seed % 4 == 3 ? KVK_FORMAT_FP32 : KVK_FORMAT_BF16, 0);
        test.attend.item_count = 6;
        test.attend.sink_logits = seed % 2 == 0 ? NULL : test.sinks;
        test.attend.window = seed >= 6 ? 100 : 0;
        test.attend.sinks = seed >= 6 ? 20 : 0;
        uint64_t alone = 0;
        for (uint32_t i = 0; i < test.attend.item_count; i++) {
            uint64_t tokens = pages * 16 + (seed >= 6 ? 40 : 1 + kvk_random_below(&random, 60));
            test.items[i] = (struct kvk_attend_item){
                .query_count = i == 4 && seed < 6 ? 6 : 1,
                .token_count = tokens,
                .position = tokens - (i == 4 && seed < 6 ? 6 : 1),
                .page_count = (uint32_t)((tokens + 15) / 16),
                .partial = i == 2,
            };
            alone += tokens;
            gpu_case_fill_item(&test, i, &random, 0);
        }
        for (uint32_t i = 1; i < 5; i++) { /* the last item is alone */
            gpu_case_share(&test, 0, i, pages, &random);
        }
        gpu_case_expect(&test);
        check_orders(&test, seed, splits[seed / 2 % 2]);
        if (attend_case_kernel(&test) == KVK_CUDA_KERNEL_MATRIX && seed < 6) {
            cr_assert_leq(unit_tokens(&test), alone - (uint64_t)pages * 16 * 4);
        }
        gpu_case_free(&test);
    }
}

/* Who shares a page may use less of it than another: its tokens end where they end. */
Test(cuda_kernels, shared_pages_that_are_used_to_different_ends)
{
    for (uint32_t seed = 0; seed < 4; seed++) {
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, seed);
        plain_case(&test, seed % 2 == 0 ? KVK_FORMAT_BF16 : KVK_FORMAT_FP32, 0);
        test.attend.item_count = 4;
        test.attend.causal = seed >= 2;
        for (uint32_t i = 0; i < test.attend.item_count; i++) {
            test.items[i] = (struct kvk_attend_item){
                .query_count = 1, .token_count = 160 - i * 7, .position = 165, .page_count = 10};
            gpu_case_fill_item(&test, i, &random, 0);
        }
        for (uint32_t i = 1; i < test.attend.item_count; i++) {
            gpu_case_share(&test, 0, i, 9 + (i < 3), &random);
        }
        gpu_case_expect(&test);
        check_orders(&test, seed, 0);
        gpu_case_free(&test);
    }
}

/* Sizes that no variant has, or one whose rows are too many, are refused before anything runs. */
Test(cuda_kernels, unknown_variants_are_refused)
{
    struct kvk_cuda_attend launch = {
        .kernel = KVK_CUDA_KERNEL_MATRIX,
        .unit_count = 1,
        .unit_rows = 16,
        .query_heads = 1,
        .kv_heads = 1,
        .head_size_k = 72,
        .head_size_v = 72,
        .format_q = KVK_FORMAT_BF16,
        .format_k = KVK_FORMAT_BF16,
        .format_v = KVK_FORMAT_BF16,
    };
    uint64_t before = kvk_sim_kernel_count();

    cr_assert_eq(kvk_cuda_attend_launch(&launch, NULL), 1);
    launch.head_size_k = launch.head_size_v = 128;
    launch.unit_rows = 65;
    cr_assert_eq(kvk_cuda_attend_launch(&launch, NULL), 1);
    launch.unit_rows = 64;
    launch.format_q = KVK_FORMAT_FP16;
    cr_assert_eq(kvk_cuda_attend_launch(&launch, NULL), 1);
    cr_assert_eq(kvk_sim_kernel_count(), before);
}
