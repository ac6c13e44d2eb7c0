/* Every set of kernels against the double-precision reference, over random shapes. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "tests/unit/gpu_case.h"

static const char *const paths[] = {"plain", "avx2", "avx512", "avx512_bf16"};
#define PATH_COUNT (sizeof(paths) / sizeof(paths[0]))
#define THREADS_MAX 4

/* NULL where this processor has no such path. */
static struct kvk_device *devices[PATH_COUNT][THREADS_MAX + 1];

static void setup(void)
{
    for (size_t path = 0; path < PATH_COUNT; path++) {
        for (uint32_t threads = 1; threads <= THREADS_MAX; threads++) {
            struct kvk_device_cpu_options options = {.attend_thread_count = threads,
                                                     .path = paths[path]};
            struct kvk_error error;
            enum kvk_status status = kvk_device_cpu_open(&options, &devices[path][threads], &error);
            cr_assert(status == KVK_OK || status == KVK_UNSUPPORTED, "%s", error.text);
        }
    }
    cr_assert_not_null(devices[0][1]);
}

static void teardown(void)
{
    for (size_t path = 0; path < PATH_COUNT; path++) {
        for (uint32_t threads = 1; threads <= THREADS_MAX; threads++) {
            struct kvk_device *device = devices[path][threads];
            if (device != NULL) {
                device->ops->close(device);
            }
        }
    }
}

TestSuite(gpu_attend, .init = setup, .fini = teardown);

static enum kvk_format pick_format(struct kvk_random *random)
{
    const enum kvk_format formats[] = {KVK_FORMAT_FP32, KVK_FORMAT_FP16, KVK_FORMAT_BF16};

    return formats[kvk_random_below(random, 3)];
}

static uint32_t pick(struct kvk_random *random, const uint32_t *choices, uint32_t count)
{
    return choices[kvk_random_below(random, count)];
}

/* A compact format, and head sizes that it can have. */
static void pick_compact(struct kvk_random *random, struct kvk_attend *attend)
{
    const enum kvk_format formats[] = {KVK_FORMAT_FP8_E4M3, KVK_FORMAT_INT8_CHANNEL,
                                       KVK_FORMAT_INT8_32};

    attend->format_k = formats[kvk_random_below(random, 3)];
    if (attend->format_k == KVK_FORMAT_INT8_CHANNEL) {
        attend->latent = false;
    } else if (attend->format_k == KVK_FORMAT_INT8_32) {
        attend->head_size_k = (attend->head_size_k + 31) / 32 * 32;
        attend->head_size_v = (attend->head_size_v + 31) / 32 * 32;
    }
    attend->format_v = attend->format_k;
}

/* Shapes that break things: sizes around the widths of vectors, blocks of one token. */
static void pick_shape(struct kvk_random *random, struct kvk_attend *attend)
{
    static const uint32_t heads[] = {1, 1, 2, 3, 4};
    static const uint32_t groups[] = {1, 2, 3, 4, 5, 7, 8, 12, 17};
    static const uint32_t sizes[] = {1,  2,  7,  8,  9,  15, 16, 17, 24,  31, 32,
                                     33, 40, 63, 64, 72, 80, 96, 97, 128, 160};
    static const uint32_t blocks[] = {1, 2, 3, 4, 5, 8, 16, 16, 17, 32, 64, 100};

    attend->kv_heads = pick(random, heads, 5);
    attend->query_heads = attend->kv_heads * pick(random, groups, 9);
    attend->head_size_k = pick(random, sizes, 21);
    attend->head_size_v = attend->head_size_k;
    if (kvk_random_chance(random, 0.3)) {
        attend->head_size_v = pick(random, sizes, 21);
    }
    attend->block_tokens = pick(random, blocks, 12);
    attend->format_q = pick_format(random);
    attend->format_k = pick_format(random);
    attend->format_v = kvk_random_chance(random, 0.5) ? attend->format_k : pick_format(random);
    attend->latent = kvk_random_chance(random, 0.15);
    if (attend->latent && attend->head_size_v > attend->head_size_k) {
        attend->head_size_v = attend->head_size_k;
    }
    if (kvk_random_chance(random, 0.4)) {
        pick_compact(random, attend);
    }
    attend->k_offset = kvk_random_below(random, 4) * 100;
    attend->v_offset =
        attend->k_offset + gpu_case_k_bytes(attend) + kvk_random_below(random, 2) * 36;
}

static void pick_rules(struct kvk_random *random, struct gpu_case *test)
{
    struct kvk_attend *attend = &test->attend;

    attend->scale = 1.0F / sqrtf((float)attend->head_size_k);
    if (kvk_random_chance(random, 0.2)) {
        attend->scale = (float)kvk_random_unit(random) - 0.5F;
    }
    if (kvk_random_chance(random, 0.25)) {
        attend->soft_cap = powf(10, (float)kvk_random_unit(random) * 4 - 1); /* 0.1 to 1,000 */
    }
    attend->causal = kvk_random_chance(random, 0.7);
    if (kvk_random_chance(random, 0.25)) {
        attend->alibi_slopes = test->slopes;
    }
    if (kvk_random_chance(random, 0.25)) {
        attend->sink_logits = test->sinks;
    }
    for (uint32_t i = 0; i < attend->query_heads; i++) {
        test->slopes[i] = (float)kvk_random_unit(random) * 1.5F - 0.25F;
        test->sinks[i] = (float)kvk_random_unit(random) * 12 - 6;
        if (kvk_random_chance(random, 0.1)) {
            test->slopes[i] = 0;
            test->sinks[i] = -INFINITY;
        }
    }
    if (kvk_random_chance(random, 0.4)) {
        attend->window = 1 + (uint32_t)kvk_random_below(random, 90);
        if (kvk_random_chance(random, 0.5)) {
            attend->sinks = (uint32_t)kvk_random_below(random, 20);
        }
    }
}

static void pick_item(struct kvk_random *random, struct gpu_case *test, uint32_t index)
{
    struct kvk_attend *attend = &test->attend;
    struct kvk_attend_item *item = &test->items[index];
    uint32_t tokens_max = kvk_random_chance(random, 0.2) ? 700 : 150;

    item->partial = kvk_random_chance(random, 0.2);

    item->query_count =
        kvk_random_chance(random, 0.4) ? 1 : 1 + (uint32_t)kvk_random_below(random, 40);
    item->token_count = kvk_random_below(random, tokens_max);
    item->position = item->token_count;
    if (item->position >= item->query_count) {
        item->position -= item->query_count; /* the usual: a chunk that was just written */
    }
    if (kvk_random_chance(random, 0.3)) {
        item->position = kvk_random_below(random, 2 * tokens_max);
    }
    if (kvk_random_chance(random, 0.2)) {
        item->first_token = kvk_random_below(random, item->token_count + 1);
    }
    uint64_t held = item->token_count - item->first_token;
    item->page_count = (uint32_t)((held + attend->block_tokens - 1) / attend->block_tokens);
    item->page_count += (uint32_t)kvk_random_below(random, 2);
    gpu_case_fill_item(test, index, random, kvk_random_chance(random, 0.2) ? 0.3 : 0);
}

static void pick_case(struct kvk_random *random, struct gpu_case *test)
{
    memset(test, 0, sizeof(*test));
    pick_shape(random, &test->attend);
    pick_rules(random, test);
    test->attend.items = test->items;
    test->attend.item_count = 1 + (uint32_t)kvk_random_below(random, 4);
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        pick_item(random, test, i);
    }
    gpu_case_expect(test);
}

/* All paths sum in fp32 over exactly widened values; only weights in bf16 cost precision. */
static double tolerance(const struct kvk_attend *attend, const char *path)
{
    enum kvk_format format_v = attend->latent ? attend->format_k : attend->format_v;
    bool bf16_used = attend->format_k == KVK_FORMAT_BF16 || format_v == KVK_FORMAT_BF16;

    if (strcmp(path, "avx512_bf16") == 0 && bf16_used) {
        return 5e-3;
    }
    if (strcmp(path, "avx512_bf16") == 0 && kvk_format_is_compact(format_v)) {
        return 1e-2; /* weights in 8 bits, queries in 16 */
    }
    return strcmp(path, "plain") == 0 ? 3e-5 : 2e-5; /* where a sum cancels */
}

static void check_case(struct gpu_case *test, uint64_t seed, size_t path, uint32_t threads)
{
    struct kvk_device *device = devices[path][threads];
    struct kvk_error error;
    double limit = tolerance(&test->attend, paths[path]);
    double lse_limit = limit == 1e-2 ? 1e-3 : 2e-5;

    if (device == NULL) {
        return;
    }
    gpu_case_spoil(test);
    enum kvk_status status = device->ops->attend(device, &test->attend, &error);
    cr_assert_eq(status, KVK_OK, "%s", error.text);
    double output_error = gpu_case_output_error(test);
    double lse_error = gpu_case_lse_error(test);
    cr_assert(output_error <= limit && lse_error <= lse_limit,
              "seed %llu, %s, %u threads: output off by %g, lse by %g; heads %u/%u, sizes %u %u, "
              "formats %d %d %d, block %u, cap %g, scale %g",
              (unsigned long long)seed, paths[path], threads, output_error, lse_error,
              test->attend.query_heads, test->attend.kv_heads, test->attend.head_size_k,
              test->attend.head_size_v, test->attend.format_q, test->attend.format_k,
              test->attend.format_v, test->attend.block_tokens, (double)test->attend.soft_cap,
              (double)test->attend.scale);
}

Test(gpu_attend, random_shapes_match_the_reference)
{
    for (uint64_t seed = 0; seed < GPU_CASE_SEEDS(180); seed++) {
        struct kvk_random random;
        struct gpu_case test;
        kvk_random_init(&random, seed);
        pick_case(&random, &test);
        for (size_t path = 0; path < PATH_COUNT; path++) {
            check_case(&test, seed, path, 1 + (uint32_t)kvk_random_below(&random, THREADS_MAX));
        }
        gpu_case_free(&test);
    }
}

/* Long enough that the plan cuts the tokens: the parts must agree with the whole. */
Test(gpu_attend, cut_ranges_match_the_reference)
{
    for (uint64_t seed = 0; seed < 6; seed++) {
        struct kvk_random random;
        struct gpu_case test = {0};
        kvk_random_init(&random, seed);
        test.attend = (struct kvk_attend){
            .items = test.items,
            .item_count = 1 + (uint32_t)(seed % 2),
            .query_heads = 3,
            .kv_heads = 1,
            .head_size_k = 20,
            .head_size_v = 20,
            .block_tokens = 16,
            .format_q = KVK_FORMAT_FP32,
            .format_k = seed % 3 == 0 ? KVK_FORMAT_BF16 : KVK_FORMAT_FP32,
            .format_v = KVK_FORMAT_FP32,
            .scale = 0.3F,
            .causal = seed % 2 == 0,
            .window = seed >= 4 ? 4000 : 0,
            .sinks = seed >= 4 ? 37 : 0,
            .alibi_slopes = seed % 3 == 1 ? test.slopes : NULL,
            .sink_logits = seed % 2 == 1 ? test.sinks : NULL,
        };
        for (uint32_t i = 0; i < 3; i++) {
            test.slopes[i] = 0.01F * (float)i;
            test.sinks[i] = (float)i * 3 + 2;
        }
        test.attend.v_offset = gpu_case_k_bytes(&test.attend);
        for (uint32_t i = 0; i < test.attend.item_count; i++) {
            test.items[i].query_count = 1 + i;
            test.items[i].token_count = 6007;
            test.items[i].position = 6000 - 500 * i;
            test.items[i].page_count = 376;
            gpu_case_fill_item(&test, i, &random, seed == 3 ? 0.5 : 0);
        }
        gpu_case_expect(&test);
        for (size_t path = 0; path < PATH_COUNT; path++) {
            for (uint32_t threads = 1; threads <= THREADS_MAX; threads++) {
                check_case(&test, seed, path, threads);
            }
        }
        gpu_case_free(&test);
    }
}

/* The shapes of well-known models, one decoding query and a chunk. */
Test(gpu_attend, shapes_of_models_match_the_reference)
{
    static const struct {
        uint32_t query_heads, kv_heads, size_k, size_v;
        bool latent;
    } shapes[] = {
        {32, 8, 128, 128, false}, /* grouped */
        {8, 1, 256, 256, false},  /* one KV head for all */
        {6, 6, 64, 64, false},    /* one each */
        {128, 1, 576, 512, true}, /* latent */
        {130, 1, 32, 32, false},  /* more rows than one unit takes */
        {4, 2, 192, 128, false},  /* K and V of different sizes */
    };

    for (uint32_t shape = 0; shape < sizeof(shapes) / sizeof(shapes[0]); shape++) {
        for (uint32_t format = KVK_FORMAT_FP32; format <= KVK_FORMAT_MAX; format++) {
            if (format == KVK_FORMAT_INT8_CHANNEL && shapes[shape].latent) {
                continue; /* there is none */
            }
            struct kvk_random random;
            struct gpu_case test = {0};
            kvk_random_init(&random, shape);
            test.attend = (struct kvk_attend){
                .items = test.items,
                .item_count = 2,
                .query_heads = shapes[shape].query_heads,
                .kv_heads = shapes[shape].kv_heads,
                .head_size_k = shapes[shape].size_k,
                .head_size_v = shapes[shape].size_v,
                .latent = shapes[shape].latent,
                .block_tokens = 16,
                .format_q = format <= KVK_FORMAT_BF16 ? format : KVK_FORMAT_BF16,
                .format_k = format,
                .format_v = format,
                .scale = 1.0F / sqrtf((float)shapes[shape].size_k),
                .causal = true,
            };
            test.attend.v_offset = gpu_case_k_bytes(&test.attend);
            test.items[0] = (struct kvk_attend_item){
                .query_count = 1, .position = 149, .token_count = 150, .page_count = 10};
            test.items[1] = (struct kvk_attend_item){
                .query_count = 5, .position = 60, .token_count = 65, .page_count = 5};
            gpu_case_fill_item(&test, 0, &random, 0);
            gpu_case_fill_item(&test, 1, &random, 0);
            gpu_case_expect(&test);
            for (size_t path = 0; path < PATH_COUNT; path++) {
                check_case(&test, shape, path, 2);
            }
            gpu_case_free(&test);
        }
    }
}

/* One page many times over: what lies side by side in a block is then not all that is of its page,
 * and 24 tokens are no multiple of what vectors hold. */
Test(gpu_attend, a_page_may_be_in_a_table_many_times)
{
    for (uint32_t format = KVK_FORMAT_FP32; format <= KVK_FORMAT_MAX; format++) {
        struct kvk_random random;
        struct gpu_case test = {0};
        const void *table[6];
        kvk_random_init(&random, format);
        test.attend = (struct kvk_attend){
            .items = test.items,
            .item_count = 1,
            .query_heads = 16,
            .kv_heads = 2,
            .head_size_k = 64,
            .head_size_v = 64,
            .block_tokens = 24,
            .format_q = KVK_FORMAT_BF16,
            .format_k = format,
            .format_v = format,
            .scale = 0.125F,
            .causal = true,
        };
        test.attend.v_offset = gpu_case_k_bytes(&test.attend);
        test.items[0] = (struct kvk_attend_item){
            .query_count = 1, .position = 6 * 24 - 1, .token_count = 6 * 24, .page_count = 6};
        gpu_case_fill_item(&test, 0, &random, 0);
        for (uint32_t page = 0; page < 6; page++) {
            table[page] = test.pages[0][0];
        }
        test.items[0].pages = table;
        gpu_case_expect(&test);
        for (size_t path = 0; path < PATH_COUNT; path++) {
            check_case(&test, format, path, 1);
        }
        gpu_case_free(&test);
    }
}
