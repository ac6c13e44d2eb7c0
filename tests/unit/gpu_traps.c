/*
 * Every trap of tests/gpu_traps.h on every set of kernels, with one thread and with several. And
 * for each trap a device, in plain C, that has the fault: the trap must see it.
 */
#include <criterion/criterion.h>
#include <signal.h>

#include "gpu/values.h"
#include "tests/gpu_traps.h"
#include "tests/unit/gpu_everywhere.h"

/* ---- A device that can be told to be wrong ---- */

enum fault {
    FAULT_NONE,
    FAULT_WEIGHS_UNUSED,    /* unused slots get a weight of 0 instead of being left out */
    FAULT_READS_PAST_TABLE, /* looks at the next page before it knows that there is one */
    FAULT_PAST_TOKENS,      /* causality alone ends the tokens */
    FAULT_BASE_TWO,         /* the LSE in base 2 */
    FAULT_WORKSPACE,        /* sums begin with what was in memory */
    FAULT_WINDOW,           /* one token more */
    FAULT_WHOLE_BLOCKS,     /* begins with the window's first whole block */
    FAULT_NO_SINKS,         /* the window hides them */
    FAULT_SINK_TWICE,       /* a sink logit in each of two parts */
    FAULT_FIRST_TOKEN,      /* positions from the table's begin */
    FAULT_CAP_FIRST,        /* capped, then scaled */
    FAULT_HEADS,            /* neighbouring query heads to different KV heads */
    FAULT_HALF_SUMS,        /* products summed in fp16 */
    FAULT_COARSE_SUMS,      /* weights summed in eleven bits */
    FAULT_NARROW_OFFSETS,   /* pages by a 32-bit distance from the first */
};

struct wrong_row {
    enum fault fault;
    const struct kvk_attend *attend;
    const struct kvk_attend_item *item;
    uint64_t position;
    uint64_t query;
    uint32_t kv_head;
};

static float value(const struct wrong_row *row, uint64_t slot, bool is_value, uint32_t index)
{
    const struct kvk_attend *attend = row->attend;
    const uint8_t *page = row->item->pages[slot / attend->block_tokens];
    uint64_t at = (uint64_t)row->kv_head * attend->block_tokens + slot % attend->block_tokens;

    if (row->fault == FAULT_NARROW_OFFSETS) {
        const uint8_t *base = row->item->pages[row->item->page_count - 1];
        page = base + (uint32_t)(page - base);
    }
    return is_value ? kvk_value_widen(attend->format_v, page + attend->v_offset,
                                      at * attend->head_size_v + index)
                    : kvk_value_widen(attend->format_k, page + attend->k_offset,
                                      at * attend->head_size_k + index);
}

static bool visible(const struct wrong_row *row, uint64_t slot)
{
    const struct kvk_attend *attend = row->attend;
    uint64_t token = slot + (row->fault == FAULT_FIRST_TOKEN ? 0 : row->item->first_token);
    uint64_t window = attend->window + (row->fault == FAULT_WINDOW ? 1U : 0);

    if (row->item->pages[slot / attend->block_tokens] == NULL ||
        (attend->causal && token > row->position)) {
        return false;
    }
    if (attend->window == 0 || (token < attend->sinks && row->fault != FAULT_NO_SINKS)) {
        return true;
    }
    if (row->fault == FAULT_WHOLE_BLOCKS) {
        token -= token % attend->block_tokens;
    }
    return token + window > row->position;
}

static double logit(const struct wrong_row *row, uint64_t slot)
{
    const struct kvk_attend *attend = row->attend;
    double dot = 0;

    for (uint32_t i = 0; i < attend->head_size_k; i++) {
        dot += (double)kvk_value_widen(attend->format_q, row->item->queries,
                                       row->query * attend->head_size_k + i) *
               (double)value(row, slot, false, i);
        if (row->fault == FAULT_HALF_SUMS && fabs(dot) > 65504) {
            dot = copysign(INFINITY, dot);
        }
    }
    if (attend->soft_cap > 0) {
        double cap = (double)attend->soft_cap;
        return row->fault == FAULT_CAP_FIRST ? cap * tanh(dot / cap) * (double)attend->scale
                                             : cap * tanh(dot * (double)attend->scale / cap);
    }
    return dot * (double)attend->scale;
}

static double rounded(const struct wrong_row *row, double sum)
{
    int exponent;

    if (row->fault != FAULT_COARSE_SUMS) {
        return sum;
    }
    double fraction = frexp(sum, &exponent);
    return ldexp(rint(fraction * 2048) / 2048, exponent);
}

/* Slots that are gone over. */
static uint64_t slot_count(const struct wrong_row *row)
{
    const struct kvk_attend_item *item = row->item;
    uint64_t count = item->token_count - item->first_token;

    if (row->fault == FAULT_PAST_TOKENS) {
        count = (uint64_t)item->page_count * row->attend->block_tokens;
    }
    return count;
}

static void row_attend(const struct wrong_row *row, double *values)
{
    const struct kvk_attend *attend = row->attend;
    double sink = attend->sink_logits != NULL && !row->item->partial
                      ? (double)attend->sink_logits[row->query % attend->query_heads]
                      : -INFINITY;
    double max = sink;
    double sum = 0;

    for (uint64_t slot = 0; slot < slot_count(row); slot++) {
        max = visible(row, slot) ? fmax(max, logit(row, slot)) : max;
    }
    for (uint32_t i = 0; i < attend->head_size_v && row->fault != FAULT_WORKSPACE; i++) {
        values[i] = 0;
    }
    for (uint64_t slot = 0; slot < slot_count(row); slot++) {
        if (!visible(row, slot)) {
            continue;
        }
        double weight = exp(logit(row, slot) - max);
        sum = rounded(row, sum + weight);
        for (uint32_t i = 0; i < attend->head_size_v; i++) {
            values[i] += weight * (double)value(row, slot, true, i);
        }
    }
    uint64_t end = (uint64_t)row->item->page_count * attend->block_tokens;
    for (uint64_t slot = slot_count(row); slot < end && row->fault == FAULT_WEIGHS_UNUSED; slot++) {
        values[0] += 0 * (double)value(row, slot, true, 0);
    }
    if (sink != -INFINITY) {
        sum += exp(sink - max) * (row->fault == FAULT_SINK_TWICE ? 2 : 1);
    }
    for (uint32_t i = 0; i < attend->head_size_v; i++) {
        row->item->output[row->query * attend->head_size_v + i] =
            sum != 0 ? (float)(values[i] / sum) : 0;
    }
    double lse = sum != 0 ? max + log(sum) : -INFINITY;
    row->item->lse[row->query] = (float)(row->fault == FAULT_BASE_TWO ? lse / log(2) : lse);
}

static enum kvk_status wrong_attend(void *context, const struct kvk_attend *attend,
                                    struct kvk_error *error)
{
    const enum fault *fault = context;

    (void)error;
    for (uint32_t i = 0; i < attend->item_count; i++) {
        const struct kvk_attend_item *item = &attend->items[i];
        uint32_t group = attend->query_heads / attend->kv_heads;
        uint64_t rows = (uint64_t)item->query_count * attend->query_heads;
        if (*fault == FAULT_READS_PAST_TABLE) {
            const void *const volatile *pages = item->pages;
            (void)pages[item->page_count];
        }
        for (uint64_t query = 0; query < rows; query++) {
            uint32_t head = (uint32_t)(query % attend->query_heads);
            const struct wrong_row row = {
                .fault = *fault,
                .attend = attend,
                .item = item,
                .position = item->position + query / attend->query_heads,
                .query = query,
                .kv_head = *fault == FAULT_HEADS ? head % attend->kv_heads : head / group,
            };
            double *values = malloc(attend->head_size_v * sizeof(*values));
            KVK_ASSERT(values != NULL);
            memset(values, 0x7f, attend->head_size_v * sizeof(*values)); /* what was there */
            row_attend(&row, values);
            free(values);
        }
    }
    return KVK_OK;
}

/* Weights without a look at what is empty. */
static void merge_naively(float *output, float *lse, const float *other_output,
                          const float *other_lse, uint64_t rows, uint32_t head_size)
{
    for (uint64_t row = 0; row < rows; row++) {
        float max = lse[row] > other_lse[row] ? lse[row] : other_lse[row];
        float a = expf(lse[row] - max);
        float b = expf(other_lse[row] - max);
        for (uint32_t i = 0; i < head_size; i++) {
            float *to = &output[row * head_size + i];
            *to = (a * *to + b * other_output[row * head_size + i]) / (a + b);
        }
        lse[row] = max + logf(a + b);
    }
}

/* 0 taken for "nothing seen". */
static void merge_zero_as_empty(float *output, float *lse, const float *other_output,
                                const float *other_lse, uint64_t rows, uint32_t head_size)
{
    for (uint64_t row = 0; row < rows; row++) {
        if (other_lse[row] != 0) {
            kvk_attend_merge(output + row * head_size, lse + row, other_output + row * head_size,
                             other_lse + row, 1, head_size);
        }
    }
}

/* Weights without a look at the larger of the two. */
static void merge_without_maximum(float *output, float *lse, const float *other_output,
                                  const float *other_lse, uint64_t rows, uint32_t head_size)
{
    for (uint64_t row = 0; row < rows; row++) {
        float a = expf(lse[row]);
        float b = expf(other_lse[row]);
        for (uint32_t i = 0; i < head_size; i++) {
            float *to = &output[row * head_size + i];
            *to = (a * *to + b * other_output[row * head_size + i]) / (a + b);
        }
        lse[row] = logf(a + b);
    }
}

static bool within_or_nan(double error, double limit)
{
    return !(error > limit);
}

static struct trap_target wrong_target(enum fault *fault)
{
    return (struct trap_target){"wrong",    fault, wrong_attend, kvk_attend_merge,
                                gpu_within, 1e-5,  2e-5};
}

/* ---- The kernels ---- */

static void run_everywhere(const char *what, trap_run *run)
{
    enum fault none = FAULT_NONE;
    const struct trap_target right = wrong_target(&none);

    cr_assert(run(&right), "%s fails on a plain loop that is right", what);
    gpu_run_everywhere(what, run);
}

static void sees(const char *what, trap_run *run, enum fault fault)
{
    const struct trap_target target = wrong_target(&fault);

    cr_expect_not(run(&target), "%s does not see fault %d", what, fault);
}

#define TRAP(name, fault)                                                                          \
    Test(gpu_traps, name, .timeout = 120)                                                          \
    {                                                                                              \
        run_everywhere(#name, trap_##name);                                                        \
        sees(#name, trap_##name, fault);                                                           \
    }                                                                                              \
    struct needs_a_semicolon

TRAP(unused_slots, FAULT_WEIGHS_UNUSED);
TRAP(long_chunk, FAULT_PAST_TOKENS);
TRAP(workers_edge, FAULT_BASE_TWO);
TRAP(workspace, FAULT_WORKSPACE);
TRAP(windows, FAULT_WINDOW);
TRAP(partial_block, FAULT_WHOLE_BLOCKS);
TRAP(sinks, FAULT_NO_SINKS);
TRAP(sink_logits, FAULT_SINK_TWICE);
TRAP(rope_shift, FAULT_FIRST_TOKEN);
TRAP(groups, FAULT_HEADS);
TRAP(soft_cap, FAULT_CAP_FIRST);
TRAP(half_overflow, FAULT_HALF_SUMS);
TRAP(constant_value, FAULT_COARSE_SUMS);
TRAP(far_pages, FAULT_NARROW_OFFSETS);

Test(gpu_traps, guard_pages)
{
    run_everywhere("guard_pages", trap_guard_pages);
}

/* AddressSanitizer takes the signal and ends the test in its own way. */
#ifndef __SANITIZE_ADDRESS__
Test(gpu_traps, guard_pages_sees_its_fault, .signal = SIGSEGV)
{
    enum fault fault = FAULT_READS_PAST_TABLE;
    const struct trap_target target = wrong_target(&fault);

    (void)trap_guard_pages(&target);
}
#endif

Test(gpu_traps, merge_empty)
{
    enum fault none = FAULT_NONE;
    struct trap_target naive = wrong_target(&none);

    run_everywhere("merge_empty", trap_merge_empty);
    naive.merge = merge_naively;
    cr_expect_not(trap_merge_empty(&naive));
}

Test(gpu_traps, merge_gaps)
{
    enum fault none = FAULT_NONE;
    struct trap_target naive = wrong_target(&none);

    run_everywhere("merge_gaps", trap_merge_gaps);
    naive.merge = merge_zero_as_empty;
    cr_expect_not(trap_merge_gaps(&naive));
    naive.merge = merge_without_maximum;
    cr_expect_not(trap_merge_gaps(&naive));
}

Test(gpu_traps, comparator)
{
    enum fault none = FAULT_NONE;
    struct trap_target lenient = wrong_target(&none);

    run_everywhere("comparator", trap_comparator);
    lenient.within = within_or_nan;
    cr_expect_not(trap_comparator(&lenient));
}
