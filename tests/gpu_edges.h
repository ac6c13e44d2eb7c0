/*
 * The edges of what a query sees, one function each, for any device: causality, windows, sinks,
 * chunks, pages that are not there, and large numbers. Written as the traps of tests/gpu_traps.h,
 * beside which they run: here is what must come out at an edge, there what a kernel is likely to
 * get wrong.
 */
#ifndef KVK_TESTS_GPU_EDGES_H
#define KVK_TESTS_GPU_EDGES_H

#include "tests/gpu_traps.h"

/* As trap_right(); the case stays. */
static inline bool edge_right(const struct trap_target *target, struct gpu_case *test)
{
    return trap_attend(target, test) && gpu_case_output_error(test) <= trap_limit(target, test) &&
           gpu_case_lse_error(test) <= target->lse_limit;
}

static inline bool edge_near(double value, double wanted, double limit)
{
    return fabs(value - wanted) <= limit; /* which a NaN is not */
}

/* With K of 0 and V that says which token it is, a query's result is the mean of the numbers that
 * it sees, counted from 1, and its LSE says how many they are. */
static inline bool edge_sees(const struct trap_target *target, struct gpu_case *test,
                             uint32_t query, double mean, double count)
{
    const struct kvk_attend *attend = &test->attend;
    const struct kvk_attend_item *item = &test->items[0];

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
    uint64_t row = (uint64_t)query * attend->query_heads;
    return trap_attend(target, test) &&
           edge_near((double)item->output[row * attend->head_size_v], mean,
                     mean * 2 * target->limit) &&
           edge_near((double)item->lse[row], log(count), target->lse_limit);
}

/* ---- Causality, windows and sinks ---- */

static inline bool edge_itself_and_what_is_before(const struct trap_target *target)
{
    bool right = true;

    for (uint64_t position = 0; position < 70 && right; position++) {
        struct gpu_case test;
        trap_case(&test, 4);
        trap_fill(&test, position, 1, 70);
        right = edge_right(target, &test) &&
                edge_sees(target, &test, 0, 1 + (double)position / 2, (double)position + 1);
        gpu_case_free(&test);
    }
    return right;
}

/* Case B6: a chunk longer than the window; each of its queries still sees all of its own window.
 * The one at 6 sees 0 to 6, the one at 17 sees 10 to 17. */
static inline bool edge_b6_long_chunk(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 4);
    test.attend.window = 8;
    trap_fill(&test, 6, 12, 18);
    bool right = edge_right(target, &test) && edge_sees(target, &test, 0, 4, 7) &&
                 edge_sees(target, &test, 11, 14.5, 8);
    gpu_case_free(&test);
    return right;
}

/* Case B7, an encoder's K/V: not causal, every decoder query sees all 1,500 tokens of 94 blocks. */
static inline bool edge_b7_cross_attention(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 16);
    test.attend.causal = false;
    trap_fill(&test, 0, 3, 1500);
    bool right = test.items[0].page_count == 94 && edge_right(target, &test) &&
                 edge_sees(target, &test, 0, 750.5, 1500);
    gpu_case_free(&test);
    return right;
}

/* Nothing is seen by any of so many rows: their output is 0 and their LSE is empty. */
static inline bool edge_nothing(const struct trap_target *target, struct gpu_case *test,
                                uint32_t rows)
{
    bool right = trap_attend(target, test) && gpu_case_output_error(test) <= 0;

    for (uint32_t i = 0; i < rows; i++) {
        right = right && test->items[0].lse[i] == -INFINITY;
    }
    return right;
}

/* Case L4: empty caches, and a block of which another's NaN fills what was not written. */
static inline bool edge_l4_empty_and_stale(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 4);
    trap_fill(&test, 0, 3, 0);
    bool right = edge_nothing(target, &test, 3 * 4);
    gpu_case_free(&test);
    /* 3 of 4 tokens are written; the query is at the fourth, whose slot holds NaN. */
    trap_case(&test, 4);
    trap_fill(&test, 3, 1, 3);
    return trap_right(target, &test) && right;
}

static inline bool edge_many_sinks(const struct trap_target *target)
{
    const uint32_t sink_counts[] = {0, 1, 3, 4, 5, 8, 63, 64, 65, 100, 200};

    for (size_t i = 0; i < sizeof(sink_counts) / sizeof(sink_counts[0]); i++) {
        for (uint32_t window = 1; window <= 130; window += 43) {
            struct gpu_case test;
            trap_case(&test, 4);
            test.attend.window = window;
            test.attend.sinks = sink_counts[i];
            trap_fill(&test, 110, 40, 150);
            if (!trap_right(target, &test)) {
                return false;
            }
        }
    }
    return true;
}

/* Sinks count once where the window covers them too, from the first query of a chunk to the last.
 */
static inline bool edge_sinks_within_the_window(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 4);
    test.attend.window = 6;
    test.attend.sinks = 4;
    trap_fill(&test, 0, 20, 20);
    bool right = edge_right(target, &test) && edge_sees(target, &test, 3, 2.5, 4) &&
                 edge_sees(target, &test, 7, 4.5, 8) &&  /* 2 to 7 and 0, 1 */
                 edge_sees(target, &test, 19, 11.5, 10); /* 14 to 19 and 0 to 3 */
    gpu_case_free(&test);
    return right;
}

static inline bool edge_window_past_the_tokens(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 4);
    test.attend.window = 5;
    trap_fill(&test, 100, 2, 30);
    bool right = edge_nothing(target, &test, 2 * 4);
    gpu_case_free(&test);
    trap_case(&test, 4);
    test.attend.window = 5;
    test.attend.sinks = 2;
    trap_fill(&test, 100, 2, 30);
    right = right && edge_right(target, &test) && test.items[0].lse[0] != -INFINITY;
    gpu_case_free(&test);
    return right;
}

/* Without causality a window still bounds what lies behind, not what lies ahead. */
static inline bool edge_window_without_causality(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 4);
    test.attend.causal = false;
    test.attend.window = 9;
    test.attend.sinks = 2;
    trap_fill(&test, 20, 15, 90);
    return trap_right(target, &test);
}

/* ---- Pages ---- */

/* A prefix in two parts, each with the other's pages absent, merges to the whole. */
static inline bool edge_parts_merge(const struct trap_target *target)
{
    enum { ROWS = 3 * 4, PAGES = 38 };
    struct gpu_case test;
    uint8_t *kept[PAGES];
    float output[ROWS * 24];
    float lse[ROWS];

    trap_case(&test, 16);
    trap_fill(&test, 600, 3, 603);
    KVK_ASSERT(test.items[0].page_count == PAGES);
    memcpy(kept, test.pages[0], sizeof(kept));
    for (uint32_t i = 0; i < PAGES; i++) {
        test.pages[0][i] = i % 3 == 0 ? kept[i] : NULL;
    }
    bool right = trap_attend(target, &test);
    memcpy(output, test.items[0].output, sizeof(output));
    memcpy(lse, test.items[0].lse, sizeof(lse));
    for (uint32_t i = 0; i < PAGES; i++) {
        test.pages[0][i] = i % 3 == 0 ? NULL : kept[i];
    }
    right = right && trap_attend(target, &test);
    target->merge(test.items[0].output, test.items[0].lse, output, lse, ROWS, 24);
    memcpy(test.pages[0], kept, sizeof(kept));
    right = right && gpu_case_output_error(&test) <= target->limit &&
            gpu_case_lse_error(&test) <= target->lse_limit;
    gpu_case_free(&test);
    return right;
}

static inline bool edge_no_page_at_all(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 4);
    trap_fill(&test, 30, 2, 32);
    for (uint32_t i = 0; i < test.items[0].page_count; i++) {
        free(test.pages[0][i]);
        test.pages[0][i] = NULL;
    }
    gpu_case_expect(&test);
    bool right = edge_nothing(target, &test, 2 * 4);
    gpu_case_free(&test);
    return right;
}

/* A later token's NaN, in sight of a later query of the same chunk, is none of the earlier's. */
static inline bool edge_masked_token_never_leaks(const struct trap_target *target)
{
    bool right = true;

    for (uint32_t format = KVK_FORMAT_FP32; format <= KVK_FORMAT_BF16; format++) {
        struct gpu_case test;
        trap_case(&test, 4);
        trap_format(&test, (enum kvk_format)format);
        trap_fill(&test, 10, 4, 14);
        /* Token 13, seen by the last query alone: all of its page's last slots become NaN. */
        uint8_t *page = test.pages[0][3];
        uint64_t row_bytes = 24 * kvk_format_bytes((enum kvk_format)format);
        for (uint64_t head = 0; head < 2; head++) {
            memset(page + (head * 4 + 1) * row_bytes, 0xff, row_bytes);
            memset(page + test.attend.v_offset + (head * 4 + 1) * row_bytes, 0xff, row_bytes);
        }
        right = right && trap_attend(target, &test);
        for (uint32_t value = 0; value < 3 * 4 * 24; value++) {
            right = right && isfinite(test.items[0].output[value]);
        }
        right = right && isnan(test.items[0].output[3 * 4 * 24]); /* the last one did see it */
        gpu_case_free(&test);
    }
    return right;
}

/* ---- Numbers ---- */

/* Of 300 times what is common; both are within 1e-4 of the reference. */
static inline bool edge_large_logits(const struct trap_target *target)
{
    bool right = true;

    for (float scale = -300; scale <= 300; scale += 600) {
        struct gpu_case test;
        trap_case(&test, 4);
        test.attend.scale = scale;
        trap_fill(&test, 63, 2, 64);
        right = right && trap_attend(target, &test) && gpu_case_output_error(&test) <= 1e-4 &&
                gpu_case_lse_error(&test) <= 1e-4;
        gpu_case_free(&test);
    }
    return right;
}

static inline bool edge_caps_small_and_large(const struct trap_target *target)
{
    const float caps[] = {0.01F, 0.3F, 1, 5, 30, 50, 1000, 1e6F};

    for (size_t i = 0; i < sizeof(caps) / sizeof(caps[0]); i++) {
        for (uint32_t large = 0; large < 2; large++) {
            struct gpu_case test;
            trap_case(&test, 4);
            test.attend.soft_cap = caps[i];
            test.attend.scale = large == 0 ? 0.2F : 3;
            trap_fill(&test, 70, 5, 75);
            if (!trap_right(target, &test)) {
                return false;
            }
        }
    }
    return true;
}

/* A scale of 0 makes every visible token count alike. */
static inline bool edge_scale_of_zero(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 4);
    test.attend.scale = 0;
    trap_fill(&test, 50, 1, 51);
    bool right =
        edge_right(target, &test) && edge_near(trap_lse(&test, 0), log(51), target->lse_limit);
    gpu_case_free(&test);
    return right;
}

/* ---- All of them, for programs that run them on a device ---- */

struct trap_named {
    const char *name;
    trap_run *run;
};

static const struct trap_named gpu_edges[] = {
    {"itself_and_what_is_before", edge_itself_and_what_is_before},
    {"b6_long_chunk", edge_b6_long_chunk},
    {"b7_cross_attention", edge_b7_cross_attention},
    {"l4_empty_and_stale", edge_l4_empty_and_stale},
    {"many_sinks", edge_many_sinks},
    {"sinks_within_the_window", edge_sinks_within_the_window},
    {"window_past_the_tokens", edge_window_past_the_tokens},
    {"window_without_causality", edge_window_without_causality},
    {"parts_merge", edge_parts_merge},
    {"no_page_at_all", edge_no_page_at_all},
    {"masked_token_never_leaks", edge_masked_token_never_leaks},
    {"large_logits", edge_large_logits},
    {"caps_small_and_large", edge_caps_small_and_large},
    {"scale_of_zero", edge_scale_of_zero},
};

static const struct trap_named gpu_traps[] = {
    {"unused_slots", trap_unused_slots},
    {"guard_pages", trap_guard_pages},
    {"long_chunk", trap_long_chunk},
    {"merge_empty", trap_merge_empty},
    {"merge_gaps", trap_merge_gaps},
    {"workers_edge", trap_workers_edge},
    {"workspace", trap_workspace},
    {"windows", trap_windows},
    {"partial_block", trap_partial_block},
    {"sinks", trap_sinks},
    {"sink_logits", trap_sink_logits},
    {"rope_shift", trap_rope_shift},
    {"groups", trap_groups},
    {"soft_cap", trap_soft_cap},
    {"half_overflow", trap_half_overflow},
    {"constant_value", trap_constant_value},
    {"far_pages", trap_far_pages},
    {"comparator", trap_comparator},
};

#define GPU_EDGE_COUNT (sizeof(gpu_edges) / sizeof(gpu_edges[0]))
#define GPU_TRAP_COUNT (sizeof(gpu_traps) / sizeof(gpu_traps[0]))

#endif
