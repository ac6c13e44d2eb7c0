/* Cutting a batch of attention into units for a CUDA device, and laying it out in one block. */
#include "gpu/cuda_plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "gpu/attend_visible.h"

/* Tokens of a range at least: shorter ones spend more on their merge than they win. */
#define SPLIT_TOKENS_MIN 256
/* Ranges are multiples of it: whole tiles of every kernel. */
#define SPLIT_TOKENS_STEP 64
/* Blocks per multiprocessor to aim at: one or two run at a time, twice or more, so that none waits
 * for long. */
#define BLOCKS_PER_MULTIPROCESSOR 4
/* Shorter prefixes are read by each item that has them: less than a range. */
#define SHARED_TOKENS_MIN 128
/* Lists begin at multiples of it, and so do queries: the kernels copy 16 bytes at a time. */
#define ALIGNMENT 256

/* The lists, while they are counted (pointers NULL) or written. */
struct lists {
    struct kvk_cuda_unit *units;
    struct kvk_cuda_row *rows;
    struct kvk_cuda_merge *merges;
    uint32_t *sources;
    uint64_t unit_count;
    uint64_t row_count;
    uint64_t merge_count;
    uint64_t source_count;
    uint64_t slot_count;
    uint64_t token_count; /* of all units */
};

/* Where each part of the upload begins. */
struct layout {
    size_t queries, pages, units, rows, merges, sources, slopes, sink_logits, end;
};

static size_t align_up(size_t size_bytes)
{
    return (size_bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
}

static uint32_t group_of(const struct kvk_attend *attend)
{
    return attend->query_heads / attend->kv_heads;
}

static struct kvk_cuda_part part_of(const struct kvk_attend *attend, bool is_value)
{
    const struct kvk_part part = kvk_attend_part(attend, is_value);

    return (struct kvk_cuda_part){
        .offset = is_value && !attend->latent ? attend->v_offset : attend->k_offset,
        .scales_offset = part.scales_offset,
        .row_bytes = (uint32_t)part.row_bytes,
        .scale_stride = (uint32_t)part.scale_stride,
    };
}

static uint64_t query_row_bytes(const struct kvk_attend *attend)
{
    return (uint64_t)attend->query_heads * attend->head_size_k * kvk_format_bytes(attend->format_q);
}

/* ---- Which kernel ------------------------------------------------------------------------- */

static bool pages_are_aligned(const struct kvk_attend *attend)
{
    uintptr_t bits = (uintptr_t)attend->k_offset;

    if (!attend->latent) {
        bits |= (uintptr_t)attend->v_offset;
    }
    for (uint32_t i = 0; i < attend->item_count; i++) {
        for (uint32_t page = 0; page < attend->items[i].page_count; page++) {
            bits |= (uintptr_t)attend->items[i].pages[page];
        }
    }
    return bits % 16 == 0;
}

static uint32_t plain_rows(const struct kvk_attend *attend)
{
    uint32_t rows = KVK_CUDA_PLAIN_VALUES_MAX / (attend->head_size_k + attend->head_size_v);

    _Static_assert(2 * KVK_HEAD_SIZE_MAX <= KVK_CUDA_PLAIN_VALUES_MAX, "at least one row");
    return rows > KVK_CUDA_PLAIN_ROWS_MAX ? KVK_CUDA_PLAIN_ROWS_MAX : rows;
}

/* Rows that go over the same tokens, at most. */
static uint64_t rows_together(const struct kvk_cuda_plan *plan, const struct kvk_attend *attend)
{
    uint64_t most = 0;

    for (uint32_t i = 0; i < plan->split.segment_count; i++) {
        const struct kvk_attend_segment *segment = &plan->split.segments[i];
        uint64_t rows = 0;
        for (uint32_t member = 0; member < segment->member_count; member++) {
            uint32_t item = plan->split.members[segment->first_member + member];
            rows += (uint64_t)attend->items[item].query_count * group_of(attend);
        }
        most = rows > most ? rows : most;
    }
    return most;
}

static void choose_kernel(struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                          const struct kvk_cuda_limits *limits)
{
    struct kvk_cuda_attend *launch = &plan->launch;
    uint32_t rows = kvk_cuda_matrix_rows(
        attend->format_q, attend->format_k, attend->latent ? attend->format_k : attend->format_v,
        attend->head_size_k, attend->head_size_v, attend->latent, limits->shared_bytes);

    if (rows == 0 || !pages_are_aligned(attend)) {
        launch->kernel = KVK_CUDA_KERNEL_PLAIN;
        launch->unit_rows = plain_rows(attend);
        return;
    }
    launch->kernel = KVK_CUDA_KERNEL_MATRIX;
    launch->unit_rows = rows_together(plan, attend) > KVK_CUDA_FEW_ROWS ? rows : KVK_CUDA_FEW_ROWS;
}

/* ---- The walk, once to count and once to write ------------------------------------------- */

static void add_rows(struct lists *lists, const struct kvk_attend *attend,
                     const struct kvk_attend_item *item, uint64_t first_query, uint64_t first_row,
                     uint32_t row_count)
{
    for (uint32_t i = 0; i < row_count && lists->rows != NULL; i++) {
        uint64_t row = first_row + i;
        lists->rows[lists->row_count + i] = (struct kvk_cuda_row){
            .query = (uint32_t)(first_query + row / group_of(attend)),
            .head = (uint16_t)(row % group_of(attend)),
            .partial = item->partial,
            .position = (int64_t)(item->position + row / group_of(attend)),
            .token_end = (int64_t)item->token_count,
        };
    }
    lists->row_count += row_count;
}

/* The last `row_count` rows are merged from `part_count` runs of slots, the first of which is
 * `first_slot`. */
static void add_merges(struct lists *lists, uint32_t row_count, uint64_t part_count,
                       uint64_t first_slot)
{
    for (uint32_t i = 0; i < row_count && lists->rows != NULL; i++) {
        const struct kvk_cuda_row *row = &lists->rows[lists->row_count - row_count + i];
        uint64_t first_source = lists->source_count + i * part_count;
        lists->merges[lists->merge_count + i] = (struct kvk_cuda_merge){
            .query = row->query,
            .head = row->head,
            .partial = row->partial,
            .first_source = (uint32_t)first_source,
            .source_count = (uint32_t)part_count,
        };
        for (uint64_t part = 0; part < part_count; part++) {
            lists->sources[first_source + part] = (uint32_t)(first_slot + part * row_count + i);
        }
    }
    lists->merge_count += row_count;
    lists->source_count += row_count * part_count;
}

static void add_unit(struct lists *lists, struct kvk_cuda_unit unit)
{
    if (lists->units != NULL) {
        lists->units[lists->unit_count] = unit;
    }
    lists->token_count += unit.end - unit.begin;
    lists->unit_count++;
}

/* Rows that see the same range, as one unit or as several with their merge. */
static void add_group(struct lists *lists, const struct kvk_cuda_plan *plan,
                      struct kvk_cuda_unit unit)
{
    uint64_t tokens = unit.end - unit.begin;
    uint64_t split = plan->split_tokens;
    uint64_t part_count = (tokens + split - 1) / split;
    uint32_t end = unit.end;

    unit.first_slot = KVK_CUDA_SLOT_NONE;
    if (part_count == 0 && unit.sinks_begin != unit.sinks_end) {
        part_count = 1;
    }
    if (part_count == 1) {
        add_unit(lists, unit);
        return;
    }
    uint64_t first_slot = lists->slot_count;
    for (uint64_t part = 0; part < part_count; part++) {
        unit.first_slot = (uint32_t)lists->slot_count;
        unit.end = end - unit.begin > split ? unit.begin + (uint32_t)split : end;
        add_unit(lists, unit);
        lists->slot_count += unit.row_count;
        unit.begin = unit.end;
        unit.sinks_begin = unit.sinks_end; /* they are the first part's */
    }
    add_merges(lists, unit.row_count, part_count, first_slot);
}

/* Whole positions become tokens of the item's table. */
static struct kvk_cuda_unit unit_of(const struct kvk_attend *attend,
                                    const struct kvk_attend_item *item, uint64_t first_row,
                                    uint32_t row_count)
{
    uint64_t first_query = first_row / group_of(attend);
    uint64_t last_query = (first_row + row_count - 1) / group_of(attend);
    struct kvk_attend_visible visible = kvk_attend_visible(
        attend, item, item->position + first_query, last_query - first_query + 1);
    struct kvk_cuda_unit unit = {
        .first_token = (int64_t)item->first_token,
        .row_count = row_count,
    };

    if (visible.sinks.begin < visible.sinks.end) {
        unit.sinks_begin = (uint32_t)(visible.sinks.begin - item->first_token);
        unit.sinks_end = (uint32_t)(visible.sinks.end - item->first_token);
    }
    if (visible.rest.begin < visible.rest.end) {
        unit.begin = (uint32_t)(visible.rest.begin - item->first_token);
        unit.end = (uint32_t)(visible.rest.end - item->first_token);
    }
    return unit;
}

static void walk_items(struct lists *lists, const struct kvk_cuda_plan *plan,
                       const struct kvk_attend *attend)
{
    for (uint32_t i = 0; i < attend->item_count; i++) {
        const struct kvk_attend_item *item = &attend->items[i];
        uint64_t rows = (uint64_t)item->query_count * group_of(attend);
        for (uint64_t row = 0; row < rows; row += plan->launch.unit_rows) {
            uint64_t left = rows - row;
            uint32_t count =
                left < plan->launch.unit_rows ? (uint32_t)left : plan->launch.unit_rows;
            struct kvk_cuda_unit unit = unit_of(attend, item, row, count);
            unit.first_page = plan->starts[i].page;
            unit.first_row = (uint32_t)lists->row_count;
            add_rows(lists, attend, item, plan->starts[i].query, row, count);
            add_group(lists, plan, unit);
        }
    }
}

/* ---- The same with shared prefixes -----------------------------------------------------------
 * Every row is merged then, from as many slots as there were units that had it. */

/* Slot `slot` has a part of the row: counted first, then written. */
static void note_source(struct lists *lists, const struct kvk_attend *attend,
                        const struct kvk_cuda_row *row, uint64_t slot)
{
    struct kvk_cuda_merge *merge =
        &lists->merges[(uint64_t)row->query * group_of(attend) + row->head];

    if (lists->sources != NULL) {
        lists->sources[merge->first_source + merge->source_count] = (uint32_t)slot;
    }
    merge->source_count++;
}

static void add_shared_unit(struct lists *lists, const struct kvk_cuda_plan *plan,
                            const struct kvk_attend *attend, struct kvk_cuda_unit unit)
{
    uint32_t end = unit.end;
    bool more = unit.begin < end || unit.sinks_begin < unit.sinks_end;

    while (more) {
        unit.first_slot = (uint32_t)lists->slot_count;
        unit.end =
            end - unit.begin > plan->split_tokens ? unit.begin + (uint32_t)plan->split_tokens : end;
        add_unit(lists, unit);
        for (uint32_t i = 0; i < unit.row_count && lists->merges != NULL; i++) {
            note_source(lists, attend, &lists->rows[unit.first_row + i], unit.first_slot + i);
        }
        lists->slot_count += unit.row_count;
        lists->source_count += unit.row_count;
        unit.begin = unit.end;
        unit.sinks_begin = unit.sinks_end;
        more = unit.begin < end;
    }
}

/* What either of two ranges has. An empty one has nothing, wherever it is. */
static void range_join(uint32_t *begin, uint32_t *end, uint32_t other_begin, uint32_t other_end)
{
    if (other_begin == other_end) {
        return;
    }
    if (*begin == *end) {
        *begin = other_begin;
        *end = other_end;
        return;
    }
    *begin = other_begin < *begin ? other_begin : *begin;
    *end = other_end > *end ? other_end : *end;
}

static void range_clip(uint32_t *begin, uint32_t *end, uint64_t low, uint64_t high)
{
    *begin = *begin < low ? (uint32_t)low : *begin;
    *end = *end > high ? (uint32_t)high : *end;
    if (*begin >= *end) {
        *begin = *end = 0;
    }
}

static void walk_segment(struct lists *lists, const struct kvk_cuda_plan *plan,
                         const struct kvk_attend *attend, const struct kvk_attend_segment *segment)
{
    const uint32_t *members = plan->split.members + segment->first_member;
    uint64_t low = (uint64_t)segment->first_page * attend->block_tokens;
    uint64_t high = low + (uint64_t)segment->page_count * attend->block_tokens;
    uint32_t member = 0;
    uint64_t row = 0;

    while (member < segment->member_count) {
        struct kvk_cuda_unit unit = {
            .first_token = (int64_t)attend->items[members[0]].first_token,
            .first_page = plan->starts[members[0]].page,
            .first_row = (uint32_t)lists->row_count,
        };
        while (member < segment->member_count && unit.row_count < plan->launch.unit_rows) {
            const struct kvk_attend_item *item = &attend->items[members[member]];
            uint64_t left = (uint64_t)item->query_count * group_of(attend) - row;
            uint32_t room = plan->launch.unit_rows - unit.row_count;
            uint32_t count = left < room ? (uint32_t)left : room;
            struct kvk_cuda_unit seen = unit_of(attend, item, row, count);
            range_join(&unit.sinks_begin, &unit.sinks_end, seen.sinks_begin, seen.sinks_end);
            range_join(&unit.begin, &unit.end, seen.begin, seen.end);
            add_rows(lists, attend, item, plan->starts[members[member]].query, row, count);
            unit.row_count += count;
            row += count;
            if (count == left) {
                member++;
                row = 0;
            }
        }
        range_clip(&unit.sinks_begin, &unit.sinks_end, low, high);
        range_clip(&unit.begin, &unit.end, low, high);
        add_shared_unit(lists, plan, attend, unit);
    }
}

/* One for each row of the batch, without sources so far. */
static void fill_merges(struct lists *lists, const struct kvk_cuda_plan *plan,
                        const struct kvk_attend *attend)
{
    for (uint32_t i = 0; i < attend->item_count; i++) {
        const struct kvk_attend_item *item = &attend->items[i];
        uint64_t rows = (uint64_t)item->query_count * group_of(attend);
        struct kvk_cuda_merge *merges = &lists->merges[plan->starts[i].query * group_of(attend)];
        for (uint64_t row = 0; row < rows; row++) {
            merges[row] = (struct kvk_cuda_merge){
                .query = (uint32_t)(plan->starts[i].query + row / group_of(attend)),
                .head = (uint16_t)(row % group_of(attend)),
                .partial = item->partial,
            };
        }
    }
}

static void walk_shared(struct lists *lists, const struct kvk_cuda_plan *plan,
                        const struct kvk_attend *attend)
{
    for (uint32_t i = 0; i < plan->split.segment_count; i++) {
        walk_segment(lists, plan, attend, &plan->split.segments[i]);
    }
    lists->merge_count = plan->query_count * group_of(attend);
}

/* Write all lists: where prefixes are shared, sources are counted, then written. */
static void fill_shared(struct lists lists, const struct kvk_cuda_plan *plan,
                        const struct kvk_attend *attend)
{
    struct lists counting = lists;
    uint64_t merge_count = plan->launch.merge_count;
    uint64_t source_count = 0;

    fill_merges(&lists, plan, attend);
    counting.sources = NULL;
    walk_shared(&counting, plan, attend);
    KVK_ASSERT(counting.unit_count == plan->launch.unit_count);
    KVK_ASSERT(counting.source_count == plan->source_count);
    for (uint64_t i = 0; i < merge_count; i++) {
        lists.merges[i].first_source = (uint32_t)source_count;
        source_count += lists.merges[i].source_count;
        lists.merges[i].source_count = 0;
    }
    walk_shared(&lists, plan, attend);
}

static void walk(struct lists *lists, const struct kvk_cuda_plan *plan,
                 const struct kvk_attend *attend)
{
    if (plan->is_shared) {
        walk_shared(lists, plan, attend);
    } else {
        walk_items(lists, plan, attend);
    }
}

/* ---- Sizes ----------------------------------------------------------------------------------- */

static struct layout layout_of(const struct kvk_cuda_plan *plan)
{
    const struct kvk_cuda_attend *launch = &plan->launch;
    struct layout layout = {0};

    layout.pages = layout.queries +
                   align_up((size_t)plan->query_count * launch->query_heads * launch->head_size_k *
                            kvk_format_bytes((enum kvk_format)launch->format_q));
    layout.units = layout.pages + align_up((size_t)plan->page_count * sizeof(void *));
    layout.rows = layout.units + align_up(launch->unit_count * sizeof(struct kvk_cuda_unit));
    layout.merges = layout.rows + align_up((size_t)plan->row_count * sizeof(struct kvk_cuda_row));
    layout.sources = layout.merges + align_up(launch->merge_count * sizeof(struct kvk_cuda_merge));
    layout.slopes = layout.sources + align_up((size_t)plan->source_count * sizeof(uint32_t));
    layout.sink_logits = layout.slopes + align_up(launch->query_heads * sizeof(float));
    layout.end = layout.sink_logits + align_up(launch->query_heads * sizeof(float));
    return layout;
}

/* Dealt out, the tokens that the blocks of all KV heads go over are as many for each. */
static uint64_t choose_split(const struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                             const struct kvk_cuda_limits *limits)
{
    struct kvk_cuda_plan uncut = *plan;
    struct lists lists = {0};
    uint64_t blocks = (uint64_t)limits->multiprocessor_count * BLOCKS_PER_MULTIPROCESSOR;

    KVK_ASSERT(limits->multiprocessor_count > 0);
    if (limits->split_tokens != 0) {
        return limits->split_tokens;
    }
    uncut.split_tokens = UINT32_MAX;
    walk(&lists, &uncut, attend);
    uint64_t split = lists.token_count * attend->kv_heads / blocks + 1;
    split = (split + SPLIT_TOKENS_STEP - 1) / SPLIT_TOKENS_STEP * SPLIT_TOKENS_STEP;
    return split < SPLIT_TOKENS_MIN ? SPLIT_TOKENS_MIN : split;
}

static enum kvk_status items_measure(struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                                     struct kvk_error *error)
{
    for (uint32_t i = 0; i < attend->item_count; i++) {
        const struct kvk_attend_item *item = &attend->items[i];
        uint64_t tokens = (uint64_t)item->page_count * attend->block_tokens;
        if (tokens > UINT32_MAX) {
            return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_TOO_LARGE, "page_count",
                                  item->page_count, UINT32_MAX / attend->block_tokens,
                                  "page_count (%u) is past what a launch counts", item->page_count);
        }
        plan->starts[i].query = plan->query_count;
        plan->starts[i].page = plan->page_count;
        plan->query_count += item->query_count;
        plan->page_count += item->page_count;
    }
    return KVK_OK;
}

static enum kvk_status share(struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                             struct kvk_error *error)
{
    enum kvk_status status = kvk_attend_split_init(&plan->split, attend, SHARED_TOKENS_MIN, error);

    for (uint32_t i = 0; status == KVK_OK && i < plan->split.segment_count; i++) {
        plan->is_shared |= plan->split.segments[i].member_count > 1;
    }
    return status;
}

enum kvk_status kvk_cuda_plan_init(struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                                   const struct kvk_cuda_limits *limits, struct kvk_error *error)
{
    struct lists lists = {0};

    *plan = (struct kvk_cuda_plan){
        .launch =
            {
                .k = part_of(attend, false),
                .v = part_of(attend, true),
                .query_heads = attend->query_heads,
                .kv_heads = attend->kv_heads,
                .head_size_k = attend->head_size_k,
                .head_size_v = attend->head_size_v,
                .block_tokens = attend->block_tokens,
                .window = attend->window,
                .sinks = attend->sinks,
                .scale = attend->scale,
                .soft_cap = attend->soft_cap,
                .format_q = (uint8_t)attend->format_q,
                .format_k = (uint8_t)attend->format_k,
                .format_v = (uint8_t)(attend->latent ? attend->format_k : attend->format_v),
                .latent = attend->latent,
                .causal = attend->causal,
            },
    };
    plan->starts = calloc(attend->item_count, sizeof(*plan->starts));
    if (plan->starts == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory to plan %u items",
                        attend->item_count);
    }
    enum kvk_status status = items_measure(plan, attend, error);
    if (status == KVK_OK) {
        status = share(plan, attend, error);
    }
    if (status != KVK_OK) {
        kvk_cuda_plan_finish(plan);
        return status;
    }
    choose_kernel(plan, attend, limits);
    plan->split_tokens = choose_split(plan, attend, limits);
    walk(&lists, plan, attend);
    uint64_t most = plan->query_count * attend->query_heads;
    most = most > lists.row_count ? most : lists.row_count;
    most = most > lists.source_count ? most : lists.source_count;
    if (most > INT32_MAX) {
        kvk_cuda_plan_finish(plan);
        return kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_TOO_LARGE, "query_count", most,
                              INT32_MAX, "%llu rows are past what a launch counts (%d)",
                              (unsigned long long)most, INT32_MAX);
    }
    plan->launch.unit_count = (uint32_t)lists.unit_count;
    plan->launch.merge_count = (uint32_t)lists.merge_count;
    plan->row_count = lists.row_count;
    plan->source_count = lists.source_count;
    plan->slot_count = lists.slot_count;
    plan->upload_bytes = layout_of(plan).end;
    uint64_t rows = plan->query_count * attend->query_heads;
    uint64_t slots = lists.slot_count * attend->kv_heads;
    plan->result_bytes = (size_t)(rows * (attend->head_size_v + 1U) * sizeof(float));
    plan->work_bytes =
        align_up(plan->result_bytes) + (size_t)(slots * (attend->head_size_v + 2U) * sizeof(float));
    return KVK_OK;
}

/* ---- What travels ---------------------------------------------------------------------------- */

static void fill_queries_and_pages(const struct kvk_attend *attend, uint8_t *queries,
                                   uint8_t *pages)
{
    for (uint32_t i = 0; i < attend->item_count; i++) {
        const struct kvk_attend_item *item = &attend->items[i];
        size_t query_bytes = (size_t)(item->query_count * query_row_bytes(attend));
        size_t page_bytes = item->page_count * sizeof(*item->pages);
        memcpy(queries, item->queries, query_bytes);
        queries += query_bytes;
        if (page_bytes > 0) {
            memcpy(pages, item->pages, page_bytes);
        }
        pages += page_bytes;
    }
}

void kvk_cuda_plan_fill(const struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                        uint8_t *upload)
{
    struct layout layout = layout_of(plan);
    struct lists lists = {
        .units = (struct kvk_cuda_unit *)(void *)(upload + layout.units),
        .rows = (struct kvk_cuda_row *)(void *)(upload + layout.rows),
        .merges = (struct kvk_cuda_merge *)(void *)(upload + layout.merges),
        .sources = (uint32_t *)(void *)(upload + layout.sources),
    };

    KVK_ASSERT((uintptr_t)upload % 16 == 0);
    memset(upload, 0, layout.end);
    fill_queries_and_pages(attend, upload + layout.queries, upload + layout.pages);
    if (plan->is_shared) {
        fill_shared(lists, plan, attend);
    } else {
        walk_items(&lists, plan, attend);
        KVK_ASSERT(lists.unit_count == plan->launch.unit_count);
        KVK_ASSERT(lists.source_count == plan->source_count);
    }
    if (attend->alibi_slopes != NULL) {
        memcpy(upload + layout.slopes, attend->alibi_slopes, attend->query_heads * sizeof(float));
    }
    if (attend->sink_logits != NULL) {
        memcpy(upload + layout.sink_logits, attend->sink_logits,
               attend->query_heads * sizeof(float));
    }
}

void kvk_cuda_plan_bind(struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                        const void *upload, void *work)
{
    struct layout layout = layout_of(plan);
    struct kvk_cuda_attend *launch = &plan->launch;
    uint64_t rows = plan->query_count * launch->query_heads;
    const uint8_t *lists = upload;
    uint8_t *slots = (uint8_t *)work + align_up(plan->result_bytes);

    launch->queries = lists + layout.queries;
    launch->pages = (const uint8_t *const *)(const void *)(lists + layout.pages);
    launch->units = (const struct kvk_cuda_unit *)(const void *)(lists + layout.units);
    launch->rows = (const struct kvk_cuda_row *)(const void *)(lists + layout.rows);
    launch->merges = (const struct kvk_cuda_merge *)(const void *)(lists + layout.merges);
    launch->sources = (const uint32_t *)(const void *)(lists + layout.sources);
    launch->slopes =
        attend->alibi_slopes == NULL ? NULL : (const float *)(const void *)(lists + layout.slopes);
    launch->sink_logits = attend->sink_logits == NULL
                              ? NULL
                              : (const float *)(const void *)(lists + layout.sink_logits);
    launch->output = work;
    launch->lse = launch->output + rows * launch->head_size_v;
    launch->slot_output = (float *)(void *)slots;
    launch->slot_max =
        launch->slot_output + plan->slot_count * launch->kv_heads * launch->head_size_v;
    launch->slot_sum = launch->slot_max + plan->slot_count * launch->kv_heads;
}

void kvk_cuda_plan_scatter(const struct kvk_cuda_plan *plan, const struct kvk_attend *attend,
                           const uint8_t *results)
{
    const uint8_t *output = results;
    const uint8_t *lse =
        results + plan->query_count * attend->query_heads * attend->head_size_v * sizeof(float);

    for (uint32_t i = 0; i < attend->item_count; i++) {
        const struct kvk_attend_item *item = &attend->items[i];
        size_t lse_bytes = (size_t)item->query_count * attend->query_heads * sizeof(float);
        memcpy(item->output, output, lse_bytes * attend->head_size_v);
        memcpy(item->lse, lse, lse_bytes);
        output += lse_bytes * attend->head_size_v;
        lse += lse_bytes;
    }
}

void kvk_cuda_plan_finish(struct kvk_cuda_plan *plan)
{
    kvk_attend_split_finish(&plan->split);
    free(plan->starts);
    plan->starts = NULL;
}
