/*
 * Traps that attention kernels fall into, one function each, for any device: what attends is
 * handed in, so that the CPU device's kernels, a GPU and a simulated one meet the same ones.
 * tests/unit/gpu_traps.c runs them, and shows for each a device with the fault that it is there
 * to catch.
 */
#ifndef KVK_TESTS_GPU_TRAPS_H
#define KVK_TESTS_GPU_TRAPS_H

#include <malloc.h>
#include <stdio.h>
#include <sys/mman.h>

#include "tests/unit/gpu_case.h"

struct trap_target {
    const char *name;
    void *context;
    enum kvk_status (*attend)(void *context, const struct kvk_attend *attend,
                              struct kvk_error *error);
    void (*merge)(float *output, float *lse, const float *other_output, const float *other_lse,
                  uint64_t rows, uint32_t head_size);
    bool (*within)(double error, double limit);
    double limit;     /* of errors where all is fp32 */
    double lse_limit; /* of errors of the LSE */
};

/* True: the target gets it right. */
typedef bool trap_run(const struct trap_target *target);

/* ---- Cases ---- */

/* Two KV heads, four query heads, fp32, one item that is yet to be filled. */
static inline void trap_case(struct gpu_case *test, uint32_t block_tokens)
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

static inline void trap_format(struct gpu_case *test, enum kvk_format format)
{
    test->attend.format_q = format;
    test->attend.format_k = format;
    test->attend.format_v = format;
    test->attend.v_offset = gpu_case_k_bytes(&test->attend);
}

static inline void trap_fill(struct gpu_case *test, uint64_t position, uint32_t query_count,
                             uint64_t token_count)
{
    struct kvk_random random;
    struct kvk_attend_item *item = &test->items[0];

    kvk_random_init(&random, token_count);
    item->position = position;
    item->query_count = query_count;
    item->token_count = token_count;
    uint64_t held = token_count - item->first_token;
    item->page_count =
        (uint32_t)((held + test->attend.block_tokens - 1) / test->attend.block_tokens);
    gpu_case_fill_item(test, 0, &random, 0);
    gpu_case_expect(test);
}

static inline bool trap_attend(const struct trap_target *target, struct gpu_case *test)
{
    gpu_case_spoil(test);
    return target->attend(target->context, &test->attend, NULL) == KVK_OK;
}

static inline double trap_limit(const struct trap_target *target, const struct gpu_case *test)
{
    bool rounded =
        test->attend.format_v == KVK_FORMAT_BF16; /* weights may be, before they meet V */

    return rounded && target->limit < 5e-3 ? 5e-3 : target->limit;
}

/* Both results as the reference has them; the case is freed. */
static inline bool trap_right(const struct trap_target *target, struct gpu_case *test)
{
    bool right = trap_attend(target, test) &&
                 gpu_case_output_error(test) <= trap_limit(target, test) &&
                 gpu_case_lse_error(test) <= target->lse_limit;

    gpu_case_free(test);
    return right;
}

static inline double trap_lse(const struct gpu_case *test, uint32_t row)
{
    return (double)test->items[0].lse[row];
}

/* A value of each format whose bits are all exponent: infinity. */
static inline void trap_store_endless(enum kvk_format format, uint8_t *bytes)
{
    const float wide = INFINITY;
    const uint16_t half = format == KVK_FORMAT_FP16 ? 0x7c00 : 0x7f80;

    if (format == KVK_FORMAT_FP32) {
        memcpy(bytes, &wide, sizeof(wide));
    } else {
        memcpy(bytes, &half, sizeof(half));
    }
}

/* ---- What is not there ---- */

static inline void trap_endless_slots(struct gpu_case *test)
{
    const struct kvk_attend *attend = &test->attend;
    const struct kvk_attend_item *item = &test->items[0];
    uint64_t value_bytes = kvk_format_bytes(attend->format_k);
    uint64_t page = item->page_count - 1;
    uint64_t count = (uint64_t)attend->kv_heads * attend->block_tokens * attend->head_size_k;

    for (uint64_t i = 0; i < count; i++) {
        uint64_t slot = i / attend->head_size_k % attend->block_tokens;
        if (page * attend->block_tokens + slot >= item->token_count) {
            uint8_t *bytes = test->pages[0][page] + i * value_bytes;
            trap_store_endless(attend->format_k, bytes + attend->k_offset);
            trap_store_endless(attend->format_v, bytes + attend->v_offset);
        }
    }
}

/* NaN, then infinity, in the slots behind the last token, at lengths 1 to two blocks and one. */
static inline bool trap_unused_slots(const struct trap_target *target)
{
    for (uint32_t format = KVK_FORMAT_FP32; format <= KVK_FORMAT_BF16; format++) {
        for (uint64_t count = 1; count <= 9; count++) {
            for (uint32_t endless = 0; endless < 2; endless++) {
                struct gpu_case test;
                trap_case(&test, 4);
                trap_format(&test, (enum kvk_format)format);
                trap_fill(&test, count - 1, 1, count);
                if (endless == 1) {
                    trap_endless_slots(&test);
                }
                if (!trap_right(target, &test)) {
                    return false;
                }
            }
        }
    }
    return true;
}

/* `size_bytes` that end where a page begins that nobody may touch. */
static inline uint8_t *trap_guarded(uint64_t size_bytes)
{
    const uint64_t room = UINT64_C(1) << 16;
    uint8_t *memory =
        mmap(NULL, 2 * room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    KVK_ASSERT(memory != MAP_FAILED && size_bytes <= room);
    KVK_ASSERT(mprotect(memory + room, room, PROT_NONE) == 0);
    return memory + room - size_bytes;
}

static inline void trap_unguard(const uint8_t *memory, uint64_t size_bytes)
{
    const uint64_t room = UINT64_C(1) << 16;

    KVK_ASSERT(munmap((void *)(uintptr_t)(memory + size_bytes - room), 2 * room) == 0);
}

/* Page tables, pages and queries that end at a guard page: nothing behind them is read. */
static inline bool trap_guard_pages(const struct trap_target *target)
{
    for (uint64_t count = 3; count <= 9; count++) {
        struct gpu_case test;
        trap_case(&test, 4);
        trap_fill(&test, count - 1, 1, count);
        struct kvk_attend_item *item = &test.items[0];
        uint64_t table_bytes = item->page_count * sizeof(void *);
        uint64_t page_bytes = gpu_case_page_bytes(&test.attend);
        const uint64_t query_bytes = UINT64_C(4) * 24 * sizeof(float);
        uint8_t *table = trap_guarded(table_bytes);
        uint8_t *page = trap_guarded(page_bytes);
        uint8_t *queries = trap_guarded(query_bytes);
        const void *queries_before = item->queries;
        uint8_t *page_before = test.pages[0][item->page_count - 1];
        memcpy(page, page_before, page_bytes);
        test.pages[0][item->page_count - 1] = page;
        memcpy(table, test.pages[0], table_bytes);
        memcpy(queries, queries_before, query_bytes);
        item->pages = (const void *const *)(const void *)table;
        item->queries = queries;
        bool right = trap_attend(target, &test) && gpu_case_output_error(&test) <= target->limit &&
                     gpu_case_lse_error(&test) <= target->lse_limit;
        test.pages[0][item->page_count - 1] = page_before;
        item->queries = queries_before;
        gpu_case_free(&test);
        trap_unguard(table, table_bytes);
        trap_unguard(page, page_bytes);
        trap_unguard(queries, query_bytes);
        if (!right) {
            return false;
        }
    }
    return true;
}

/* A chunk of more queries than the cache has tokens, causal and not. */
static inline bool trap_long_chunk(const struct trap_target *target)
{
    for (uint32_t causal = 0; causal < 2; causal++) {
        struct gpu_case test;
        trap_case(&test, 4);
        test.attend.causal = causal == 1;
        trap_fill(&test, 0, 40, 5);
        if (!trap_right(target, &test)) {
            return false;
        }
    }
    return true;
}

/* ---- Merging ---- */

/* Empty with empty, with a full part, and the other way round. */
static inline bool trap_merge_empty(const struct trap_target *target)
{
    float output[6] = {0, 0, 1, 2, 0, 0};
    float lse[3] = {-INFINITY, 0.5F, -INFINITY};
    const float other[6] = {0, 0, 0, 0, 3, 4};
    const float other_lse[3] = {-INFINITY, -INFINITY, -2};

    target->merge(output, lse, other, other_lse, 3, 2);
    return output[0] == 0 && output[1] == 0 && lse[0] == -INFINITY && output[2] == 1 &&
           output[3] == 2 && lse[1] == 0.5F && output[4] == 3 && output[5] == 4 && lse[2] == -2;
}

/* An LSE of exactly 0 is a part like any other; a gap of 10,000 leaves the larger as it is. */
static inline bool trap_merge_gaps(const struct trap_target *target)
{
    float output[3] = {1, 1, 1};
    float lse[3] = {0, 10000, -10000};
    const float other[3] = {3, 3, 3};
    const float other_lse[3] = {0, 0, 0};
    struct gpu_case test;

    target->merge(output, lse, other, other_lse, 3, 1);
    if (!(fabsf(output[0] - 2) < 1e-6F && fabsf(lse[0] - logf(2)) < 1e-6F && output[1] == 1 &&
          lse[1] == 10000 && output[2] == 3 && lse[2] == 0)) {
        return false;
    }
    /* From the device: one token with a logit of 0. */
    trap_case(&test, 4);
    test.attend.scale = 0;
    trap_fill(&test, 0, 1, 1);
    bool zero = trap_attend(target, &test) && test.items[0].lse[0] == 0;
    gpu_case_free(&test);
    return zero;
}

/* 3,072 tokens by the device and 64 by the worker, merged in natural logarithms, against all of
 * them by the reference. */
static inline bool trap_workers_edge(const struct trap_target *target)
{
    enum { CACHED = 3072, OWN = 64, ROWS = 4 };
    struct gpu_case test;
    float output[ROWS * 24];
    float lse[ROWS];
    uint8_t *pages[(CACHED + OWN) / 16];

    trap_case(&test, 16);
    trap_fill(&test, CACHED + OWN - 1, 1, CACHED + OWN);
    memcpy(pages, test.pages[0], sizeof(pages));
    memset(test.pages[0], 0, CACHED / 16 * sizeof(pages[0]));
    kvk_attend_reference(&test.attend);
    memcpy(output, test.items[0].output, sizeof(output));
    memcpy(lse, test.items[0].lse, sizeof(lse));
    memcpy(test.pages[0], pages, sizeof(pages));
    test.items[0].token_count = CACHED;
    bool right = trap_attend(target, &test);
    kvk_attend_merge(test.items[0].output, test.items[0].lse, output, lse, ROWS, 24);
    right = right && gpu_case_output_error(&test) <= 1e-3 && gpu_case_lse_error(&test) <= 1e-3;
    gpu_case_free(&test);
    return right;
}

/* Room for partial results that is full of what was there before. */
static inline bool trap_workspace(const struct trap_target *target)
{
    struct gpu_case test;

    trap_case(&test, 16);
    trap_fill(&test, 5000, 2, 5003);
    (void)mallopt(M_PERTURB, 0x80); /* memory that is handed out holds 0x7f: 3.4e38 */
    bool right = trap_right(target, &test);
    (void)mallopt(M_PERTURB, 0);
    return right;
}

/* ---- Who sees what ---- */

/* Windows shorter than a tile and around the sizes of blocks and tiles, at block edges. */
static inline bool trap_windows(const struct trap_target *target)
{
    const uint32_t windows[] = {1, 2, 15, 16, 17, 63, 64, 65, 100};

    for (size_t i = 0; i < sizeof(windows) / sizeof(windows[0]); i++) {
        for (uint64_t position = 126; position <= 145; position += position == 129 ? 14 : 1) {
            struct gpu_case test;
            trap_case(&test, 16);
            test.attend.window = windows[i];
            trap_fill(&test, position, 1, position + 1);
            if (!trap_right(target, &test)) {
                return false;
            }
        }
    }
    return true;
}

/* A window that begins inside a block touches one block more than its length in blocks. With a
 * scale of 0 the LSE counts what is seen. */
static inline bool trap_partial_block(const struct trap_target *target)
{
    for (uint64_t position = 32; position < 48; position++) {
        struct gpu_case test;
        trap_case(&test, 4);
        test.attend.window = 8;
        test.attend.scale = 0;
        trap_fill(&test, position, 1, position + 1);
        uint32_t present = 0;
        for (uint32_t page = 0; page < test.items[0].page_count; page++) {
            present += test.pages[0][page] != NULL ? 1 : 0;
        }
        bool right =
            trap_attend(target, &test) && fabs(trap_lse(&test, 0) - log(8)) <= target->lse_limit;
        gpu_case_free(&test);
        if (!right || present != (position % 4 == 3 ? 2 : 3)) {
            return false;
        }
    }
    return true;
}

/* Sinks are seen past the window, and once where both reach them. */
static inline bool trap_sinks(const struct trap_target *target)
{
    for (uint32_t sinks = 1; sinks <= 9; sinks += 4) {
        for (uint64_t position = 1; position < 40; position += 6) {
            struct gpu_case test;
            uint64_t seen = position + 1 < 7 + sinks ? position + 1 : 7 + sinks;
            trap_case(&test, 4);
            test.attend.window = 7;
            test.attend.sinks = sinks;
            test.attend.scale = 0;
            trap_fill(&test, position, 1, position + 1);
            bool counted = trap_attend(target, &test) &&
                           fabs(trap_lse(&test, 0) - log((double)seen)) <= target->lse_limit;
            if (!trap_right(target, &test) || !counted) {
                return false;
            }
        }
    }
    return true;
}

/* A sink logit counts once, however the tokens are cut; and not at all in a part. */
static inline bool trap_sink_logits(const struct trap_target *target)
{
    for (uint32_t partial = 0; partial < 2; partial++) {
        struct gpu_case test;
        trap_case(&test, 16);
        test.attend.scale = 0;
        test.attend.sink_logits = test.sinks;
        for (uint32_t head = 0; head < 4; head++) {
            test.sinks[head] = 7 + (float)head;
        }
        test.items[0].partial = partial == 1;
        trap_fill(&test, 2999, 1, 3000);
        double total = 3000 + (partial == 1 ? 0 : exp(8));
        bool counted = trap_attend(target, &test) &&
                       fabs(trap_lse(&test, 1) - log(total)) <= target->lse_limit;
        if (!trap_right(target, &test) || !counted) {
            return false;
        }
    }
    return true;
}

/* Rotate pairs of values by the position, as RoPE does. */
static inline void trap_rotate(float *values, uint32_t count, double position)
{
    for (uint32_t i = 0; i + 1 < count; i += 2) {
        double angle = position * pow(10, -4.0 * i / count);
        double x = (double)values[i];
        double y = (double)values[i + 1];
        values[i] = (float)(x * cos(angle) - y * sin(angle));
        values[i + 1] = (float)(x * sin(angle) + y * cos(angle));
    }
}

/* The item's K and queries as they are at positions `shift` further on. */
static inline void trap_shift(struct gpu_case *test, uint64_t shift)
{
    struct kvk_attend_item *item = &test->items[0];
    uint32_t size = test->attend.head_size_k;
    float *queries = (float *)(uintptr_t)item->queries;

    for (uint32_t row = 0; row < item->query_count * test->attend.query_heads; row++) {
        trap_rotate(queries + row * size, size,
                    (double)(item->position + shift + row / test->attend.query_heads));
    }
    for (uint64_t token = 0; token < item->token_count; token++) {
        float *k = (float *)(void *)test->pages[0][token / 4];
        for (uint64_t head = 0; head < test->attend.kv_heads; head++) {
            trap_rotate(k + (head * 4 + token % 4) * size, size, (double)(token + shift));
        }
    }
    item->position += shift;
    item->token_count += shift;
    item->first_token += shift;
}

/* With the position encoding applied to K and queries, moving all of them along changes nothing:
 * positions are for masks alone, and count from the first token's. */
static inline bool trap_rope_shift(const struct trap_target *target)
{
    float output[2][5 * 4 * 24];
    float lse[2][5 * 4];

    for (uint32_t shifted = 0; shifted < 2; shifted++) {
        struct gpu_case test;
        trap_case(&test, 4);
        trap_fill(&test, 20, 5, 25);
        trap_shift(&test, shifted == 1 ? 1003 : 0);
        bool done = trap_attend(target, &test);
        memcpy(output[shifted], test.items[0].output, sizeof(output[0]));
        memcpy(lse[shifted], test.items[0].lse, sizeof(lse[0]));
        gpu_case_free(&test);
        if (!done) {
            return false;
        }
    }
    for (size_t i = 0; i < sizeof(output[0]) / sizeof(float); i++) {
        if (!(fabsf(output[0][i] - output[1][i]) <= 1e-3F)) {
            return false;
        }
    }
    for (size_t i = 0; i < sizeof(lse[0]) / sizeof(float); i++) {
        if (!(fabsf(lse[0][i] - lse[1][i]) <= 1e-3F)) {
            return false;
        }
    }
    return true;
}

/* Groups of 1, 3, 5 and 8 query heads to a KV head, neighbours to the same one. */
static inline bool trap_groups(const struct trap_target *target)
{
    const uint32_t groups[] = {1, 3, 5, 8};

    for (size_t i = 0; i < 4; i++) {
        struct gpu_case test;
        trap_case(&test, 16);
        test.attend.query_heads = 2 * groups[i];
        trap_fill(&test, 90, 2, 92);
        if (!trap_right(target, &test)) {
            return false;
        }
    }
    return true;
}

/* ---- Numbers ---- */

/* Logits of 1,000 under a cap of 30: scaled first, then capped, then masked. */
static inline bool trap_soft_cap(const struct trap_target *target)
{
    for (uint32_t window = 0; window <= 9; window += 9) {
        struct gpu_case test;
        trap_case(&test, 4);
        test.attend.soft_cap = 30;
        test.attend.scale = 60;
        test.attend.window = window;
        trap_fill(&test, 40, 3, 43);
        if (!trap_right(target, &test)) {
            return false;
        }
    }
    return true;
}

static inline void trap_fill_halves(uint16_t *values, uint64_t count, uint16_t bits)
{
    for (uint64_t i = 0; i < count; i++) {
        values[i] = bits;
    }
}

/* fp16 K and queries of 200: each product is 40,000, a sum of two past what fp16 holds. */
static inline bool trap_half_overflow(const struct trap_target *target)
{
    const uint16_t two_hundred = 0x5a40;
    struct gpu_case test;

    trap_case(&test, 4);
    trap_format(&test, KVK_FORMAT_FP16);
    test.attend.scale = 1e-6F;
    trap_fill(&test, 15, 1, 16);
    trap_fill_halves((uint16_t *)(uintptr_t)test.items[0].queries, UINT64_C(4) * 24, two_hundred);
    for (uint32_t page = 0; page < 4; page++) {
        trap_fill_halves((uint16_t *)(void *)test.pages[0][page], UINT64_C(2) * 4 * 24,
                         two_hundred);
    }
    gpu_case_expect(&test);
    return trap_right(target, &test);
}

/* 128k tokens whose V is 1: so is the result, and the LSE counts them. */
static inline bool trap_constant_value(const struct trap_target *target)
{
    enum { TOKENS = 1 << 17, BLOCK = 512 };
    static const void *pages[TOKENS / BLOCK];
    static float page[2 * BLOCK * 8];
    float queries[8] = {0.5F};
    float output[8];
    float lse[1];
    const struct kvk_attend_item item = {.queries = queries,
                                         .output = output,
                                         .lse = lse,
                                         .query_count = 1,
                                         .position = TOKENS - 1,
                                         .token_count = TOKENS,
                                         .pages = pages,
                                         .page_count = TOKENS / BLOCK};
    const struct kvk_attend attend = {.items = &item,
                                      .item_count = 1,
                                      .query_heads = 1,
                                      .kv_heads = 1,
                                      .head_size_k = 8,
                                      .head_size_v = 8,
                                      .block_tokens = BLOCK,
                                      .format_q = KVK_FORMAT_FP32,
                                      .format_k = KVK_FORMAT_FP32,
                                      .format_v = KVK_FORMAT_FP32,
                                      .v_offset = sizeof(page) / 2,
                                      .scale = 1,
                                      .causal = true};

    for (uint32_t i = 0; i < TOKENS / BLOCK; i++) {
        pages[i] = page;
    }
    for (uint32_t i = 0; i < BLOCK * 8; i++) {
        page[BLOCK * 8 + i] = 1;
    }
    if (target->attend(target->context, &attend, NULL) != KVK_OK) {
        return false;
    }
    for (uint32_t i = 0; i < 8; i++) {
        if (!(fabsf(output[i] - 1) <= 1e-4F)) {
            return false;
        }
    }
    return fabs((double)lse[0] - log(TOKENS)) <= target->lse_limit;
}

/* Pages further apart than 2^31 values of four bytes, in a sparse pool. */
static inline bool trap_far_pages(const struct trap_target *target)
{
    const uint64_t far_bytes = (UINT64_C(1) << 33) + (UINT64_C(3) << 31) + 4096;
    const uint64_t room = UINT64_C(4) << 20;
    uint8_t *pool = mmap(NULL, far_bytes + room, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    bool right = true;

    KVK_ASSERT(pool != MAP_FAILED);
    for (uint32_t block_tokens = 16; block_tokens <= 4096; block_tokens *= 256) {
        struct gpu_case test;
        uint8_t *kept[3];
        trap_case(&test, block_tokens);
        trap_fill(&test, 2 * block_tokens + 13, 1, 2 * block_tokens + 14);
        uint64_t page_bytes = gpu_case_page_bytes(&test.attend);
        KVK_ASSERT(page_bytes <= room);
        memcpy(kept, test.pages[0], sizeof(kept));
        for (uint64_t i = 0; i < 3; i++) {
            test.pages[0][i] = pool + far_bytes * (2 - i) / 2;
            memcpy(test.pages[0][i], kept[i], page_bytes);
        }
        right = right && trap_attend(target, &test) &&
                gpu_case_output_error(&test) <= target->limit &&
                gpu_case_lse_error(&test) <= target->lse_limit;
        memcpy(test.pages[0], kept, sizeof(kept));
        gpu_case_free(&test);
    }
    munmap(pool, far_bytes + room);
    return right;
}

/* A comparison that a NaN passes would let all of the above pass. */
static inline bool trap_comparator(const struct trap_target *target)
{
    struct gpu_case test;
    bool caught = true;

    trap_case(&test, 4);
    trap_fill(&test, 10, 2, 12);
    float *output = test.items[0].output;
    float *lse = test.items[0].lse;
    caught = caught && target->within(gpu_case_output_error(&test), 1e-5);
    for (uint32_t i = 0; i < 2 * 4 * 24; i += 95) {
        float kept = output[i];
        output[i] = NAN;
        caught = caught && !target->within(gpu_case_output_error(&test), 1e-5);
        output[i] = kept;
    }
    const float wrong[] = {NAN, INFINITY, -INFINITY};
    for (uint32_t i = 0; i < 3; i++) {
        float kept = lse[5];
        lse[5] = wrong[i];
        caught = caught && !target->within(gpu_case_lse_error(&test), 1e-5);
        lse[5] = kept;
    }
    gpu_case_free(&test);
    return caught;
}

#endif
