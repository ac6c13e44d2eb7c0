/* The edges of what a query sees, one by one, on every set of kernels: windows, sinks, chunks,
 * caps, and what must never leak into a result. */
#include <criterion/criterion.h>
#include <stdio.h>
#include <sys/mman.h>

#include "tests/unit/gpu_case.h"

static const char *const paths[] = {"plain", "avx2", "avx512", "avx512_bf16"};
#define PATH_COUNT (sizeof(paths) / sizeof(paths[0]))

static struct kvk_device *devices[PATH_COUNT];

static void setup(void)
{
    for (size_t path = 0; path < PATH_COUNT; path++) {
        struct kvk_device_cpu_options options = {.attend_thread_count = 2, .path = paths[path]};
        enum kvk_status status = kvk_device_cpu_open(&options, &devices[path], NULL);
        cr_assert(status == KVK_OK || status == KVK_UNSUPPORTED);
    }
}

static void teardown(void)
{
    for (size_t path = 0; path < PATH_COUNT; path++) {
        if (devices[path] != NULL) {
            devices[path]->ops->close(devices[path]);
        }
    }
}

TestSuite(gpu_edges, .init = setup, .fini = teardown);

/* A case of two KV heads, four query heads, and one item that is yet to be sized. */
static void case_init(struct gpu_case *test, uint32_t block_tokens)
{
    memset(test, 0, sizeof(*test));
    test->attend = (struct kvk_attend){
        .items = test->items,
        .item_count = 1,
        .query_heads = 4,
        .kv_heads = 2,
        .head_size_k = 24,
        .head_size_v = 24,
        .block_tokens = block_tokens,
        .format_q = KVK_FORMAT_FP32,
        .format_k = KVK_FORMAT_FP32,
        .format_v = KVK_FORMAT_FP32,
        .scale = 0.2F,
        .causal = true,
    };
    test->attend.v_offset = gpu_case_k_bytes(&test->attend);
}

static void case_fill(struct gpu_case *test, uint64_t position, uint32_t query_count,
                      uint64_t token_count, uint64_t seed)
{
    struct kvk_random random;
    struct kvk_attend_item *item = &test->items[0];

    kvk_random_init(&random, seed);
    item->position = position;
    item->query_count = query_count;
    item->token_count = token_count;
    uint64_t held = token_count - item->first_token;
    item->page_count =
        (uint32_t)((held + test->attend.block_tokens - 1) / test->attend.block_tokens);
    gpu_case_fill_item(test, 0, &random, 0);
    gpu_case_expect(test);
}

static void case_run(struct gpu_case *test, size_t path)
{
    struct kvk_error error;

    gpu_case_spoil(test);
    enum kvk_status status = devices[path]->ops->attend(devices[path], &test->attend, &error);
    cr_assert_eq(status, KVK_OK, "%s", error.text);
}

/* Every path gives what the reference gives. */
static void case_check(struct gpu_case *test, const char *what, double limit)
{
    for (size_t path = 0; path < PATH_COUNT; path++) {
        if (devices[path] == NULL) {
            continue;
        }
        case_run(test, path);
        double output_error = gpu_case_output_error(test);
        double lse_error = gpu_case_lse_error(test);
        cr_assert(output_error <= limit && lse_error <= 1e-5, "%s, %s: off by %g and %g", what,
                  paths[path], output_error, lse_error);
    }
}

/* Which tokens query 0 of head 0 was influenced by, asked of the kernels themselves: V of token t
 * is t + 1 in its first value, K is 0, so that the output is the mean of what is seen. */
static double seen_mean(struct gpu_case *test, size_t path, uint32_t query, double *lse)
{
    const struct kvk_attend *attend = &test->attend;
    struct kvk_attend_item *item = &test->items[0];

    for (uint64_t token = 0; token < item->token_count; token++) {
        uint8_t *page = test->pages[0][token / attend->block_tokens];
        if (page == NULL || !gpu_case_seen(test, 0, token)) {
            continue;
        }
        uint64_t row = token % attend->block_tokens * attend->head_size_k;
        float *k = (float *)(void *)(page + attend->k_offset) + row;
        float *v = (float *)(void *)(page + attend->v_offset) + row;
        memset(k, 0, attend->head_size_k * sizeof(float));
        v[0] = (float)token + 1;
    }
    case_run(test, path);
    *lse = (double)item->lse[query * attend->query_heads];
    return (double)item->output[(size_t)query * attend->query_heads * attend->head_size_v];
}

/* ---- Causality, windows and sinks ---- */

Test(gpu_edges, a_query_sees_itself_and_what_is_before)
{
    for (uint64_t position = 0; position < 70; position++) {
        struct gpu_case test;
        double lse;
        case_init(&test, 4);
        case_fill(&test, position, 1, 70, position);
        case_check(&test, "causal", 1e-5);
        for (size_t path = 0; path < PATH_COUNT; path++) {
            if (devices[path] != NULL) {
                double mean = seen_mean(&test, path, 0, &lse);
                cr_assert_float_eq(mean, 1 + (double)position / 2, 1e-4, "%s sees %g at %llu",
                                   paths[path], mean, (unsigned long long)position);
                cr_assert_float_eq(lse, log((double)position + 1), 1e-5);
            }
        }
        gpu_case_free(&test);
    }
}

/* A chunk longer than the window: each of its queries still sees all of its own window. */
Test(gpu_edges, case_b6_a_chunk_longer_than_the_window)
{
    struct gpu_case test;
    double lse;

    case_init(&test, 4);
    test.attend.window = 8;
    case_fill(&test, 6, 12, 18, 6);
    case_check(&test, "B6", 1e-5);
    for (size_t path = 0; path < PATH_COUNT; path++) {
        if (devices[path] == NULL) {
            continue;
        }
        /* The query at 6 sees 0 to 6, the one at 17 sees 10 to 17; V is the position + 1. */
        cr_assert_float_eq(seen_mean(&test, path, 0, &lse), 4, 1e-4);
        cr_assert_float_eq(lse, log(7), 1e-5);
        cr_assert_float_eq(seen_mean(&test, path, 11, &lse), 14.5, 1e-4);
        cr_assert_float_eq(lse, log(8), 1e-5);
    }
    gpu_case_free(&test);
}

/* An encoder's K/V: not causal, every decoder query sees all 1,500 tokens of 94 blocks. */
Test(gpu_edges, case_b7_cross_attention)
{
    struct gpu_case test;
    double lse;

    case_init(&test, 16);
    test.attend.causal = false;
    case_fill(&test, 0, 3, 1500, 7);
    cr_assert_eq(test.items[0].page_count, 94);
    case_check(&test, "B7", 1e-5);
    for (size_t path = 0; path < PATH_COUNT; path++) {
        if (devices[path] != NULL) {
            cr_assert_float_eq(seen_mean(&test, path, 0, &lse), 750.5, 0.01);
            cr_assert_float_eq(lse, log(1500), 1e-5);
        }
    }
    gpu_case_free(&test);
}

/* Empty caches, and a block of which another's NaN fills what was not written. */
Test(gpu_edges, case_l4_nothing_to_see_and_stale_slots)
{
    struct gpu_case test;

    case_init(&test, 4);
    case_fill(&test, 0, 3, 0, 1);
    case_check(&test, "no tokens", 0);
    for (uint32_t i = 0; i < 3 * 4; i++) {
        cr_assert(test.items[0].lse[i] == -INFINITY);
    }
    gpu_case_free(&test);

    /* 3 of 4 tokens are written; the query is at the fourth, whose slot holds NaN. */
    case_init(&test, 4);
    case_fill(&test, 3, 1, 3, 2);
    case_check(&test, "3 of 4", 1e-5);
    gpu_case_free(&test);
}

Test(gpu_edges, sinks_stay_visible_past_the_window)
{
    const uint32_t sink_counts[] = {0, 1, 3, 4, 5, 8, 63, 64, 65, 100, 200};

    for (size_t i = 0; i < sizeof(sink_counts) / sizeof(sink_counts[0]); i++) {
        for (uint32_t window = 1; window <= 130; window += 43) {
            struct gpu_case test;
            case_init(&test, 4);
            test.attend.window = window;
            test.attend.sinks = sink_counts[i];
            case_fill(&test, 110, 40, 150, i);
            case_check(&test, "sinks", 1e-5);
            gpu_case_free(&test);
        }
    }
}

/* Sinks count once where the window covers them too, from the first query of a chunk to the last.
 */
Test(gpu_edges, sinks_and_window_overlap_without_counting_twice)
{
    struct gpu_case test;
    double lse;

    case_init(&test, 4);
    test.attend.window = 6;
    test.attend.sinks = 4;
    case_fill(&test, 0, 20, 20, 3);
    case_check(&test, "overlap", 1e-5);
    for (size_t path = 0; path < PATH_COUNT; path++) {
        if (devices[path] == NULL) {
            continue;
        }
        (void)seen_mean(&test, path, 3, &lse);
        cr_assert_float_eq(lse, log(4), 1e-5);
        (void)seen_mean(&test, path, 7, &lse); /* 2 to 7 and 0, 1 */
        cr_assert_float_eq(lse, log(8), 1e-5);
        (void)seen_mean(&test, path, 19, &lse); /* 14 to 19 and 0 to 3 */
        cr_assert_float_eq(lse, log(10), 1e-5);
    }
    gpu_case_free(&test);
}

Test(gpu_edges, a_window_that_begins_past_the_tokens_sees_sinks_alone)
{
    struct gpu_case test;

    case_init(&test, 4);
    test.attend.window = 5;
    case_fill(&test, 100, 2, 30, 4);
    case_check(&test, "nothing in the window", 0);
    cr_assert(test.items[0].lse[0] == -INFINITY);
    gpu_case_free(&test);

    case_init(&test, 4);
    test.attend.window = 5;
    test.attend.sinks = 2;
    case_fill(&test, 100, 2, 30, 5);
    case_check(&test, "sinks alone", 1e-5);
    cr_assert(test.items[0].lse[0] != -INFINITY);
    gpu_case_free(&test);
}

/* Without causality a window still bounds what lies behind, not what lies ahead. */
Test(gpu_edges, a_window_without_causality)
{
    struct gpu_case test;

    case_init(&test, 4);
    test.attend.causal = false;
    test.attend.window = 9;
    test.attend.sinks = 2;
    case_fill(&test, 20, 15, 90, 8);
    case_check(&test, "window, not causal", 1e-5);
    gpu_case_free(&test);
}

/* ---- Pages ---- */

/* A prefix in two parts, each with the other's pages absent, merges to the whole. */
Test(gpu_edges, parts_merge_to_the_whole)
{
    for (size_t path = 0; path < PATH_COUNT; path++) {
        struct gpu_case test;
        uint8_t *kept[64];
        float output[3 * 4 * 24];
        float lse[3 * 4];
        if (devices[path] == NULL) {
            continue;
        }
        case_init(&test, 16);
        case_fill(&test, 600, 3, 603, 11);
        uint32_t page_count = test.items[0].page_count;
        cr_assert_leq(page_count, 64);
        memcpy(kept, test.pages[0], page_count * sizeof(kept[0]));
        for (uint32_t i = 0; i < page_count; i++) {
            test.pages[0][i] = i % 3 == 0 ? kept[i] : NULL;
        }
        case_run(&test, path);
        memcpy(output, test.items[0].output, sizeof(output));
        memcpy(lse, test.items[0].lse, sizeof(lse));
        for (uint32_t i = 0; i < page_count; i++) {
            test.pages[0][i] = i % 3 == 0 ? NULL : kept[i];
        }
        case_run(&test, path);
        kvk_attend_merge(test.items[0].output, test.items[0].lse, output, lse, 3 * 4, 24);
        memcpy(test.pages[0], kept, page_count * sizeof(kept[0]));
        cr_assert_leq(gpu_case_output_error(&test), 1e-5);
        cr_assert_leq(gpu_case_lse_error(&test), 1e-5);
        gpu_case_free(&test);
    }
}

Test(gpu_edges, no_page_at_all_is_nothing_seen)
{
    struct gpu_case test;

    case_init(&test, 4);
    case_fill(&test, 30, 2, 32, 12);
    for (uint32_t i = 0; i < test.items[0].page_count; i++) {
        free(test.pages[0][i]);
        test.pages[0][i] = NULL;
    }
    gpu_case_expect(&test);
    case_check(&test, "absent", 0);
    cr_assert(test.items[0].lse[0] == -INFINITY);
    gpu_case_free(&test);
}

/* A later token's NaN, in sight of a later query of the same chunk, is none of the earlier's. */
Test(gpu_edges, a_masked_token_never_leaks)
{
    const enum kvk_format formats[] = {KVK_FORMAT_FP32, KVK_FORMAT_FP16, KVK_FORMAT_BF16};

    for (size_t i = 0; i < 3; i++) {
        struct gpu_case test;
        case_init(&test, 4);
        test.attend.format_k = formats[i];
        test.attend.format_v = formats[i];
        test.attend.v_offset = gpu_case_k_bytes(&test.attend);
        case_fill(&test, 10, 4, 14, 13);
        /* Token 13, seen by the last query alone: all of its page's last slots become NaN. */
        uint8_t *page = test.pages[0][3];
        uint64_t row_bytes = 24 * kvk_format_bytes(formats[i]);
        for (uint64_t head = 0; head < 2; head++) {
            memset(page + (head * 4 + 1) * row_bytes, 0xff, row_bytes);
            memset(page + test.attend.v_offset + (head * 4 + 1) * row_bytes, 0xff, row_bytes);
        }
        for (size_t path = 0; path < PATH_COUNT; path++) {
            if (devices[path] == NULL) {
                continue;
            }
            case_run(&test, path);
            for (uint32_t value = 0; value < 3 * 4 * 24; value++) {
                cr_assert(isfinite(test.items[0].output[value]), "%s", paths[path]);
            }
            cr_assert(isnan(test.items[0].output[3 * 4 * 24]), "the last query did see it");
        }
        gpu_case_free(&test);
    }
}

/* Pages far apart: distances past 2^31 bytes, and a block of 4,096 tokens. */
Test(gpu_edges, pages_may_lie_far_apart)
{
    const uint64_t far_bytes = UINT64_C(5) << 31;
    uint8_t *space = mmap(NULL, far_bytes + (8 << 20), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    cr_assert_neq(space, MAP_FAILED);
    for (uint32_t block_tokens = 4; block_tokens <= 4096; block_tokens *= 1024) {
        struct gpu_case test;
        uint8_t *kept[2];
        case_init(&test, block_tokens);
        case_fill(&test, block_tokens + 2, 1, block_tokens + 3, block_tokens);
        uint64_t page_bytes = gpu_case_page_bytes(&test.attend);
        memcpy(kept, test.pages[0], sizeof(kept));
        test.pages[0][0] = space + far_bytes;
        test.pages[0][1] = space;
        memcpy(test.pages[0][0], kept[0], page_bytes);
        memcpy(test.pages[0][1], kept[1], page_bytes);
        case_check(&test, "far", 1e-5);
        memcpy(test.pages[0], kept, sizeof(kept));
        gpu_case_free(&test);
    }
    munmap(space, far_bytes + (8 << 20));
}

/* ---- Numbers ---- */

Test(gpu_edges, large_logits_do_not_overflow)
{
    struct gpu_case test;

    case_init(&test, 4);
    test.attend.scale = 300;
    case_fill(&test, 63, 2, 64, 14);
    case_check(&test, "large logits", 1e-4);
    gpu_case_free(&test);

    case_init(&test, 4);
    test.attend.scale = -300;
    case_fill(&test, 63, 2, 64, 15);
    case_check(&test, "large negative logits", 1e-4);
    gpu_case_free(&test);
}

Test(gpu_edges, caps_small_and_large)
{
    const float caps[] = {0.01F, 0.3F, 1, 5, 30, 50, 1000, 1e6F};

    for (size_t i = 0; i < sizeof(caps) / sizeof(caps[0]); i++) {
        for (uint32_t large = 0; large < 2; large++) {
            struct gpu_case test;
            case_init(&test, 4);
            test.attend.soft_cap = caps[i];
            test.attend.scale = large == 0 ? 0.2F : 3;
            case_fill(&test, 70, 5, 75, i);
            case_check(&test, "cap", 1e-5);
            gpu_case_free(&test);
        }
    }
}

/* A scale of 0 makes every visible token count alike. */
Test(gpu_edges, a_scale_of_zero)
{
    struct gpu_case test;

    case_init(&test, 4);
    test.attend.scale = 0;
    case_fill(&test, 50, 1, 51, 16);
    case_check(&test, "scale 0", 1e-5);
    cr_assert_float_eq((double)test.items[0].lse[0], log(51), 1e-5);
    gpu_case_free(&test);
}
