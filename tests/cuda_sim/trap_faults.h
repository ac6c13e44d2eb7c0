/*
 * Faults for a device that is right: what it is asked is changed on the way in, or what it answers
 * on the way out, as if its kernels had the fault. So it is seen of every trap and edge that it can
 * fail on this very device.
 */
#ifndef KVK_TESTS_CUDA_SIM_TRAP_FAULTS_H
#define KVK_TESTS_CUDA_SIM_TRAP_FAULTS_H

#include "tests/gpu_edges.h"

enum trap_fault {
    TRAP_FAULT_NONE = 0,
    TRAP_FAULT_PAST_TOKENS,    /* the pages' ends are the tokens' end, whatever the mask */
    TRAP_FAULT_PAST_TABLE,     /* one page more than there is */
    TRAP_FAULT_BASE_TWO,       /* the LSE in base 2 */
    TRAP_FAULT_WINDOW,         /* one token more */
    TRAP_FAULT_WHOLE_BLOCKS,   /* begins with the window's first whole block */
    TRAP_FAULT_NO_SINKS,       /* the window hides them */
    TRAP_FAULT_SINK_TWICE,     /* a sink logit in each of two parts */
    TRAP_FAULT_FIRST_TOKEN,    /* positions from the table's begin */
    TRAP_FAULT_HEADS,          /* neighbouring query heads to different KV heads */
    TRAP_FAULT_CAP_FIRST,      /* capped, then scaled */
    TRAP_FAULT_OVERFLOW,       /* queries past what fp16 holds */
    TRAP_FAULT_PAGE_LEFT_OUT,  /* the last one */
    TRAP_FAULT_NARROW_OFFSETS, /* pages by a 32-bit distance from the last */
    TRAP_FAULT_SEES_ALL,       /* no mask */
    TRAP_FAULT_ZERO_LSE,       /* what is empty has an LSE of 0 */
    TRAP_FAULT_COUNT
};

struct trap_faulty {
    enum trap_fault fault;
    void *context;
    enum kvk_status (*attend)(void *context, const struct kvk_attend *attend,
                              struct kvk_error *error); /* of the device */
};

/* What is asked instead. */
struct trap_changed {
    struct kvk_attend attend;
    struct kvk_attend_item item;
    const void *pages[512];
    uint8_t queries[1 << 16];
    float sinks[16];
};

/* Query heads in the order in which a kernel would take them that deals them out one by one. */
static inline uint32_t trap_dealt(const struct kvk_attend *attend, uint32_t head)
{
    uint32_t group = attend->query_heads / attend->kv_heads;
    return head % attend->kv_heads * group + head / attend->kv_heads;
}

static inline void trap_change_heads(struct trap_changed *changed)
{
    const struct kvk_attend *attend = &changed->attend;
    size_t row_bytes = attend->head_size_k * kvk_format_bytes(attend->format_q);
    uint8_t kept[sizeof(changed->queries)];
    memcpy(kept, changed->queries, sizeof(kept));
    for (uint32_t row = 0; row < changed->item.query_count * attend->query_heads; row++) {
        uint32_t head = row % attend->query_heads;
        uint32_t to = row - head + trap_dealt(attend, head);
        memcpy(changed->queries + to * row_bytes, kept + row * row_bytes, row_bytes);
    }
}

/* Its output comes back in the order in which it was asked for. */
static inline void trap_change_heads_back(const struct kvk_attend *attend)
{
    const struct kvk_attend_item *item = &attend->items[0];
    size_t size = attend->head_size_v;
    for (uint32_t query = 0; query < item->query_count; query++) {
        float kept[32 * 64];
        float lse[32];
        float *output = item->output + (size_t)query * attend->query_heads * size;
        KVK_ASSERT(attend->query_heads * size <= sizeof(kept) / sizeof(kept[0]));
        memcpy(kept, output, attend->query_heads * size * sizeof(float));
        memcpy(lse, item->lse + query * attend->query_heads, attend->query_heads * sizeof(float));
        for (uint32_t head = 0; head < attend->query_heads; head++) {
            uint32_t from = trap_dealt(attend, head);
            memcpy(output + head * size, kept + from * size, size * sizeof(float));
            item->lse[query * attend->query_heads + head] = lse[from];
        }
    }
}

static inline void trap_change_pages(enum trap_fault fault, struct trap_changed *changed)
{
    struct kvk_attend_item *item = &changed->item;
    const uint8_t *last = changed->pages[item->page_count - 1];
    for (uint32_t i = 0; i < item->page_count && fault == TRAP_FAULT_NARROW_OFFSETS; i++) {
        const uint8_t *page = changed->pages[i];
        changed->pages[i] = page == NULL ? NULL : last + (uint32_t)(page - last);
    }
    if (fault == TRAP_FAULT_PAGE_LEFT_OUT) {
        changed->pages[item->page_count - 1] = NULL;
    }
}

static inline void trap_change_mask(enum trap_fault fault, struct trap_changed *changed)
{
    struct kvk_attend *attend = &changed->attend;
    struct kvk_attend_item *item = &changed->item;
    uint32_t block = attend->block_tokens;
    uint64_t start = item->position + 1 - attend->window;
    if (fault == TRAP_FAULT_PAST_TOKENS) {
        item->token_count = item->first_token + (uint64_t)item->page_count * block;
        attend->causal = false;
    } else if (fault == TRAP_FAULT_WINDOW && attend->window > 0) {
        attend->window++;
    } else if (fault == TRAP_FAULT_WHOLE_BLOCKS && attend->window > 0) {
        attend->window -= (uint32_t)((block - start % block) % block);
    } else if (fault == TRAP_FAULT_NO_SINKS) {
        attend->sinks = 0;
    } else if (fault == TRAP_FAULT_FIRST_TOKEN) {
        item->token_count -= item->first_token;
        item->first_token = 0;
    } else if (fault == TRAP_FAULT_SEES_ALL) {
        attend->window = 0;
        attend->sinks = 0;
        attend->causal = false;
    }
}

static inline void trap_change_numbers(enum trap_fault fault, struct trap_changed *changed)
{
    struct kvk_attend *attend = &changed->attend;
    if (fault == TRAP_FAULT_SINK_TWICE && attend->sink_logits != NULL) {
        for (uint32_t i = 0; i < attend->query_heads; i++) {
            changed->sinks[i] = attend->sink_logits[i] + logf(2);
        }
        attend->sink_logits = changed->sinks;
    } else if (fault == TRAP_FAULT_CAP_FIRST) {
        attend->soft_cap *= attend->scale;
    } else if (fault == TRAP_FAULT_OVERFLOW && attend->format_q == KVK_FORMAT_FP16) {
        trap_fill_halves((uint16_t *)(void *)changed->queries,
                         (uint64_t)attend->query_heads * attend->head_size_k, 0x7c00);
    } else if (fault == TRAP_FAULT_HEADS) {
        trap_change_heads(changed);
    }
}

static inline enum kvk_status trap_faulty_attend(void *context, const struct kvk_attend *attend,
                                                 struct kvk_error *error)
{
    static struct trap_changed changed;
    const struct trap_faulty *faulty = context;
    const struct kvk_attend_item *item = &attend->items[0];
    size_t query_bytes = (size_t)item->query_count * attend->query_heads * attend->head_size_k *
                         kvk_format_bytes(attend->format_q);
    KVK_ASSERT(attend->item_count == 1);
    KVK_ASSERT(item->page_count <= 512 && query_bytes <= sizeof(changed.queries));
    changed.attend = *attend;
    changed.item = *item;
    changed.attend.items = &changed.item;
    memcpy(changed.queries, item->queries, query_bytes);
    changed.item.queries = changed.queries;
    if (faulty->fault == TRAP_FAULT_PAST_TABLE) {
        changed.item.page_count++;
    } else if (item->page_count > 0) {
        memcpy(changed.pages, item->pages, item->page_count * sizeof(changed.pages[0]));
        changed.item.pages = changed.pages;
        trap_change_pages(faulty->fault, &changed);
    }
    trap_change_mask(faulty->fault, &changed);
    trap_change_numbers(faulty->fault, &changed);
    enum kvk_status status = faulty->attend(faulty->context, &changed.attend, error);
    if (faulty->fault == TRAP_FAULT_HEADS) {
        trap_change_heads_back(attend);
    }
    for (uint32_t i = 0; i < item->query_count * attend->query_heads; i++) {
        item->lse[i] /= faulty->fault == TRAP_FAULT_BASE_TWO ? logf(2) : 1;
        if (faulty->fault == TRAP_FAULT_ZERO_LSE && item->lse[i] == -INFINITY) {
            item->lse[i] = 0;
        }
    }
    return status;
}

/* Which fault each trap and edge is shown to see; of the others it is said below why. */
static const struct trap_planted {
    const char *name;
    trap_run *run;
    enum trap_fault fault;
} trap_planted[] = {
    {"unused_slots", trap_unused_slots, TRAP_FAULT_PAST_TOKENS},
    {"long_chunk", trap_long_chunk, TRAP_FAULT_PAST_TOKENS},
    {"workers_edge", trap_workers_edge, TRAP_FAULT_BASE_TWO},
    {"merge_gaps", trap_merge_gaps, TRAP_FAULT_PAST_TOKENS},
    {"workspace", trap_workspace, TRAP_FAULT_PAGE_LEFT_OUT},
    {"windows", trap_windows, TRAP_FAULT_WINDOW},
    {"partial_block", trap_partial_block, TRAP_FAULT_WHOLE_BLOCKS},
    {"sinks", trap_sinks, TRAP_FAULT_NO_SINKS},
    {"sink_logits", trap_sink_logits, TRAP_FAULT_SINK_TWICE},
    {"rope_shift", trap_rope_shift, TRAP_FAULT_FIRST_TOKEN},
    {"groups", trap_groups, TRAP_FAULT_HEADS},
    {"soft_cap", trap_soft_cap, TRAP_FAULT_CAP_FIRST},
    {"half_overflow", trap_half_overflow, TRAP_FAULT_OVERFLOW},
    {"constant_value", trap_constant_value, TRAP_FAULT_PAGE_LEFT_OUT},
    {"far_pages", trap_far_pages, TRAP_FAULT_NARROW_OFFSETS},
    {"itself_and_what_is_before", edge_itself_and_what_is_before, TRAP_FAULT_SEES_ALL},
    {"b6_long_chunk", edge_b6_long_chunk, TRAP_FAULT_WHOLE_BLOCKS},
    {"b7_cross_attention", edge_b7_cross_attention, TRAP_FAULT_PAGE_LEFT_OUT},
    {"l4_empty_and_stale", edge_l4_empty_and_stale, TRAP_FAULT_PAST_TOKENS},
    {"l4_empty_and_stale", edge_l4_empty_and_stale, TRAP_FAULT_ZERO_LSE},
    {"many_sinks", edge_many_sinks, TRAP_FAULT_NO_SINKS},
    {"sinks_within_the_window", edge_sinks_within_the_window, TRAP_FAULT_WINDOW},
    {"window_past_the_tokens", edge_window_past_the_tokens, TRAP_FAULT_SEES_ALL},
    {"window_without_causality", edge_window_without_causality, TRAP_FAULT_WINDOW},
    {"parts_merge", edge_parts_merge, TRAP_FAULT_PAGE_LEFT_OUT},
    {"no_page_at_all", edge_no_page_at_all, TRAP_FAULT_ZERO_LSE},
    {"masked_token_never_leaks", edge_masked_token_never_leaks, TRAP_FAULT_SEES_ALL},
    {"large_logits", edge_large_logits, TRAP_FAULT_HEADS},
    {"caps_small_and_large", edge_caps_small_and_large, TRAP_FAULT_CAP_FIRST},
    {"scale_of_zero", edge_scale_of_zero, TRAP_FAULT_BASE_TWO},
};
/* guard_pages ends in a signal: a test of its own. merge_empty and comparator ask nothing of the
 * device: tests/unit/gpu_traps.c. */

#define TRAP_PLANTED_COUNT (sizeof(trap_planted) / sizeof(trap_planted[0]))

#endif
