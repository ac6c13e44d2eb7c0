/* Prefixes that items of a batch share: found in their tables, read once, and nobody's result
 * changed by it. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "gpu/attend_shared.h"
#include "tests/unit/gpu_case.h"

static const char *const paths[] = {"plain", "avx2", "avx512", "avx512_bf16"};
#define PATH_COUNT (sizeof(paths) / sizeof(paths[0]))

/* ---- What is shared, against every pair of tables ---- */

#define TABLE_ITEMS 12
#define TABLE_PAGES 24

struct tables {
    struct kvk_attend attend;
    struct kvk_attend_item items[TABLE_ITEMS];
    const void *pages[TABLE_ITEMS][TABLE_PAGES];
    uint8_t places[TABLE_ITEMS * TABLE_PAGES];
};

/* Each begins as some item before it does, for a while. */
static void tables_make(struct tables *tables, struct kvk_random *random)
{
    memset(tables, 0, sizeof(*tables));
    tables->attend = (struct kvk_attend){
        .items = tables->items,
        .item_count = 1 + (uint32_t)kvk_random_below(random, TABLE_ITEMS),
        .block_tokens = 4,
        .window = kvk_random_chance(random, 0.2) ? 100 : 0,
    };
    for (uint32_t i = 0; i < tables->attend.item_count; i++) {
        struct kvk_attend_item *item = &tables->items[i];
        const void **pages = tables->pages[i];
        item->page_count = (uint32_t)kvk_random_below(random, TABLE_PAGES + 1);
        item->pages = pages;
        item->first_token = kvk_random_chance(random, 0.1) ? 8 : 0;
        item->position = kvk_random_below(random, 2);
        for (uint32_t page = 0; page < item->page_count; page++) {
            pages[page] = &tables->places[i * TABLE_PAGES + page];
        }
        if (i > 0 && kvk_random_chance(random, 0.8)) {
            uint32_t other = (uint32_t)kvk_random_below(random, i);
            uint32_t count = (uint32_t)kvk_random_below(random, TABLE_PAGES + 1);
            count = count < item->page_count ? count : item->page_count;
            count =
                count < tables->items[other].page_count ? count : tables->items[other].page_count;
            memcpy(pages, tables->pages[other], count * sizeof(pages[0]));
        }
        if (item->page_count > 0 && kvk_random_chance(random, 0.2)) {
            pages[kvk_random_below(random, item->page_count)] = NULL;
        }
    }
}

/* Behind the last page that the two have in common from their begin; both may lack some. */
static uint32_t common_pages(const struct tables *tables, uint32_t a, uint32_t b)
{
    const struct kvk_attend_item *left = &tables->items[a];
    const struct kvk_attend_item *right = &tables->items[b];
    uint32_t last = 0;

    if (left->first_token != right->first_token ||
        (tables->attend.window != 0 && left->position != right->position)) {
        return 0;
    }
    for (uint32_t page = 0; page < left->page_count && page < right->page_count; page++) {
        if (left->pages[page] != right->pages[page]) {
            break;
        }
        last = left->pages[page] != NULL ? page + 1 : last;
    }
    return last;
}

static bool is_member(const struct kvk_attend_split *split,
                      const struct kvk_attend_segment *segment, uint32_t item)
{
    for (uint32_t i = 0; i < segment->member_count; i++) {
        if (split->members[segment->first_member + i] == item) {
            return true;
        }
    }
    return false;
}

/* Page by page: in one segment, and with all that share it, unless so few tokens do. */
static void split_check(const struct tables *tables, const struct kvk_attend_split *split,
                        uint64_t tokens_min, uint64_t seed)
{
    for (uint32_t i = 0; i < tables->attend.item_count; i++) {
        uint32_t next_page = 0;
        for (uint32_t s = 0; s < split->segment_count; s++) {
            const struct kvk_attend_segment *segment = &split->segments[s];
            if (!is_member(split, segment, i)) {
                continue;
            }
            cr_assert_eq(segment->first_page, next_page, "seed %llu: a gap",
                         (unsigned long long)seed);
            next_page += segment->page_count;
            uint32_t end = segment->first_page + segment->page_count;
            cr_assert(segment->member_count == 1 ||
                      (uint64_t)segment->page_count * 4 >= tokens_min);
            for (uint32_t j = 0; j < tables->attend.item_count; j++) {
                uint32_t common = common_pages(tables, i, j);
                if (j != i && is_member(split, segment, j)) {
                    cr_assert_geq(common, end, "seed %llu: not shared", (unsigned long long)seed);
                } else if (j != i && tokens_min == 0) {
                    cr_assert_leq(common, segment->first_page, "seed %llu: sharing was missed",
                                  (unsigned long long)seed);
                }
            }
        }
        cr_assert_eq(next_page, tables->items[i].page_count);
    }
}

Test(gpu_shared, segments_against_every_pair_of_tables)
{
    static struct tables tables;
    uint32_t shared = 0;

    for (uint64_t seed = 0; seed < 2000; seed++) {
        struct kvk_random random;
        struct kvk_attend_split split;
        uint64_t tokens_min = seed % 3 * 10;
        kvk_random_init(&random, seed);
        tables_make(&tables, &random);
        cr_assert_eq(kvk_attend_split_init(&split, &tables.attend, tokens_min, NULL), KVK_OK);
        split_check(&tables, &split, tokens_min, seed);
        for (uint32_t i = 0; i < split.segment_count; i++) {
            shared += split.segments[i].member_count > 1 ? 1 : 0;
        }
        kvk_attend_split_finish(&split);
    }
    cr_assert_gt(shared, 2000);
}

/* ---- Attending it ---- */

static struct kvk_device *device_make(const char *path, uint32_t threads)
{
    const struct kvk_device_cpu_options options = {.attend_thread_count = threads, .path = path};
    struct kvk_device *device = NULL;
    enum kvk_status status = kvk_device_cpu_open(&options, &device, NULL);

    cr_assert(status == KVK_OK || status == KVK_UNSUPPORTED);
    return device;
}

/* A batch of which some share a long prefix, some a longer one, and one nothing. */
static void batch_make(struct gpu_case *test, uint64_t seed)
{
    struct kvk_random random;
    const enum kvk_format formats[] = {KVK_FORMAT_FP32, KVK_FORMAT_FP16, KVK_FORMAT_BF16};

    kvk_random_init(&random, seed);
    memset(test, 0, sizeof(*test));
    test->attend = (struct kvk_attend){
        .items = test->items,
        .item_count = 2 + (uint32_t)kvk_random_below(&random, GPU_CASE_ITEMS_MAX - 1),
        .kv_heads = 1 + (uint32_t)kvk_random_below(&random, 3),
        .head_size_k = 8 * (1 + (uint32_t)kvk_random_below(&random, 5)),
        .block_tokens = 8,
        .format_q = formats[seed % 3],
        .format_k = formats[seed % 3],
        .format_v = formats[seed % 3],
        .scale = 0.3F,
        .causal = kvk_random_chance(&random, 0.8),
        .latent = kvk_random_chance(&random, 0.1),
        .soft_cap = kvk_random_chance(&random, 0.2) ? 3.0F : 0,
        .alibi_slopes = kvk_random_chance(&random, 0.3) ? test->slopes : NULL,
        .sink_logits = kvk_random_chance(&random, 0.5) ? test->sinks : NULL,
    };
    test->attend.query_heads = test->attend.kv_heads * (1 + (uint32_t)kvk_random_below(&random, 9));
    test->attend.head_size_v = test->attend.head_size_k;
    test->attend.v_offset = gpu_case_k_bytes(&test->attend);
    for (uint32_t i = 0; i < test->attend.query_heads; i++) {
        test->slopes[i] = 0.02F * (float)i;
        test->sinks[i] = (float)i - 4;
    }
    uint64_t position = 250 + kvk_random_below(&random, 200);
    if (kvk_random_chance(&random, 0.25)) {
        test->attend.window = 1 + (uint32_t)kvk_random_below(&random, 300);
        test->attend.sinks = (uint32_t)kvk_random_below(&random, 10);
    }
    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        struct kvk_attend_item *item = &test->items[i];
        item->query_count = 1 + (uint32_t)kvk_random_below(&random, 3);
        item->position = test->attend.window != 0 ? position : 250 + kvk_random_below(&random, 200);
        item->token_count = 230 + kvk_random_below(&random, 230);
        item->page_count = (uint32_t)((item->token_count + 7) / 8);
        item->partial = kvk_random_chance(&random, 0.2);
        gpu_case_fill_item(test, i, &random, 0);
    }
    for (uint32_t i = 1; i + 1 < test->attend.item_count; i++) {
        gpu_case_share(test, 0, i, i % 3 == 2 ? 12 : 25, &random);
    }
    gpu_case_expect(test);
}

static void batch_run(struct kvk_device *device, struct gpu_case *test)
{
    struct kvk_error error;

    gpu_case_spoil(test);
    cr_assert_eq(device->ops->attend(device, &test->attend, &error), KVK_OK, "%s", error.text);
}

Test(gpu_shared, batches_match_the_reference)
{
    static struct gpu_case test;

    for (size_t path = 0; path < PATH_COUNT; path++) {
        for (uint32_t threads = 1; threads <= 3; threads += 2) {
            struct kvk_device *device = device_make(paths[path], threads);
            for (uint64_t seed = 0; device != NULL && seed < GPU_CASE_SEEDS(30); seed++) {
                batch_make(&test, seed);
                batch_run(device, &test);
                bool rounded = strcmp(paths[path], "avx512_bf16") == 0 &&
                               test.attend.format_k == KVK_FORMAT_BF16;
                double output_error = gpu_case_output_error(&test);
                double lse_error = gpu_case_lse_error(&test);
                cr_assert(output_error <= (rounded ? 5e-3 : 1e-5) && lse_error <= 2e-5,
                          "seed %llu, %s, %u threads: off by %g and %g", (unsigned long long)seed,
                          paths[path], threads, output_error, lse_error);
                gpu_case_free(&test);
            }
            if (device != NULL) {
                device->ops->close(device);
            }
        }
    }
}

/* All results of a batch, one after another. */
static size_t results_copy(const struct gpu_case *test, float *target)
{
    size_t count = 0;

    for (uint32_t i = 0; i < test->attend.item_count; i++) {
        size_t rows = (size_t)test->items[i].query_count * test->attend.query_heads;
        size_t values = rows * test->attend.head_size_v;
        memcpy(target + count, test->items[i].output, values * sizeof(float));
        count += values;
        memcpy(target + count, test->items[i].lse, rows * sizeof(float));
        count += rows;
    }
    return count;
}

/* The same split twice gives the same bits; another split the same to 1e-5. */
Test(gpu_shared, a_split_is_repeated_exactly_and_others_agree)
{
    static struct gpu_case test;
    static float results[4][GPU_CASE_ITEMS_MAX * 3 * 32 * 64];

    for (size_t path = 0; path < PATH_COUNT; path++) {
        struct kvk_device *one = device_make(paths[path], 1);
        struct kvk_device *many = device_make(paths[path], 3);
        for (uint64_t seed = 0; one != NULL && seed < GPU_CASE_SEEDS(10); seed++) {
            size_t count = 0;
            batch_make(&test, seed);
            for (uint32_t run = 0; run < 4; run++) {
                batch_run(run < 2 ? one : many, &test);
                count = results_copy(&test, results[run]);
                cr_assert_leq(count, sizeof(results[0]) / sizeof(results[0][0]));
            }
            cr_assert_eq(memcmp(results[0], results[1], count * sizeof(float)), 0);
            cr_assert_eq(memcmp(results[2], results[3], count * sizeof(float)), 0);
            bool rounded =
                strcmp(paths[path], "avx512_bf16") == 0 && test.attend.format_k == KVK_FORMAT_BF16;
            double distance = 0;
            double norm = 0;
            for (size_t i = 0; i < count; i++) {
                double a = (double)results[0][i];
                double b = (double)results[2][i];
                if (a == b) { /* both may be -inf */
                    continue;
                }
                distance += (a - b) * (a - b);
                norm += a * a;
            }
            cr_assert(sqrt(distance) <= (rounded ? 2e-3 : 1e-5) * sqrt(norm),
                      "%s, seed %llu: splits differ by %g of %g", paths[path],
                      (unsigned long long)seed, sqrt(distance), sqrt(norm));
            gpu_case_free(&test);
        }
        if (one != NULL) {
            one->ops->close(one);
            many->ops->close(many);
        }
    }
}
