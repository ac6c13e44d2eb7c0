#include "gpu/attend_cpu.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "gpu/attend_kernel.h"
#include "gpu/attend_shared.h"
#include "gpu/attend_unit.h"
#include "gpu/threads.h"

/* Parts per thread where work is cut: their ends are then spread by a quarter of a share. */
#define PARTS_PER_THREAD 4

/* A range is not cut below this, or below so many tokens per row: writing and merging a partial
 * result costs about as much as reading a token for each row. */
#define SPLIT_TOKENS_MIN 256
#define SPLIT_TOKENS_PER_ROW 4
#define SPLIT_COUNT_MAX 64

/* Up to about this many rows per KV head the memory sets the pace; past it, the arithmetic. */
#define ROWS_PER_READ 8

/* K and V of a tile of all heads of a unit at most: it and the next tile share the second cache. */
#define TILE_BYTES_MAX ((size_t)256 << 10)

/* A prefix is shared from so many tokens on: each of its rows is one more partial result. */
#define SHARED_TOKENS_MIN 64

/* Rows of some items and some KV heads over a segment; its tokens are cut into `unit_count`
 * ranges. */
struct strip {
    uint32_t segment;
    uint32_t first_unit;
    uint32_t unit_count;
};

/* Where rows of an item are among a strip's: what its results are put together from. */
struct piece {
    uint32_t strip;
    uint32_t first_row; /* of the strip's rows of a head */
    struct kvk_attend_run run;
};

/* Counted in a first pass, filled in a second. */
struct counts {
    uint64_t strips;
    uint64_t units;
    uint64_t runs;
    uint64_t pieces;
    uint64_t partial_floats;
};

struct plan {
    const struct kvk_attend_kernel *kernel;
    const struct kvk_attend *attend;
    struct kvk_attend_split split; /* ours, as is all that follows */
    struct kvk_attend_unit *units;
    struct strip *strips;
    struct kvk_attend_run *runs;
    struct piece *pieces; /* of an item side by side, in the order of its tokens */
    uint32_t *piece_ends; /* [item_count]: where its pieces end, those of the one before begin it */
    uint32_t *segment_uses; /* [item_count]: segments that the item is a member of */
    float *partials;        /* results of the units that are not alone; or NULL */
    uint8_t *scratch;       /* [threads][scratch_bytes] */
    struct counts counts;
    uint32_t segment;     /* that is being visited */
    uint64_t cost_target; /* of a unit */
    size_t scratch_bytes;
    uint32_t rows_max;
};

const struct kvk_attend_kernel *kvk_attend_kernel_find(const char *path)
{
    for (const struct kvk_attend_kernel *const *kernel = kvk_attend_kernels; *kernel != NULL;
         kernel++) {
        if ((path == NULL || strcmp((*kernel)->name, path) == 0) && (*kernel)->available()) {
            return *kernel;
        }
    }
    return NULL;
}

const char *kvk_attend_kernel_name(const struct kvk_attend_kernel *kernel)
{
    return kernel->name;
}

/* ---- The plan ---- */

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Whole queries where one fits. */
static uint32_t rows_per_strip(const struct kvk_attend *attend)
{
    uint32_t group = attend->query_heads / attend->kv_heads;

    if (group >= KVK_ATTEND_ROWS_MAX) {
        return KVK_ATTEND_ROWS_MAX;
    }
    return KVK_ATTEND_ROWS_MAX / group * group;
}

static uint32_t heads_per_strip(const struct kvk_attend *attend, uint32_t strip_rows)
{
    size_t token_bytes = kvk_format_row_bytes(attend->format_k, attend->head_size_k);

    if (!attend->latent) {
        token_bytes += kvk_format_row_bytes(attend->format_v, attend->head_size_v);
    }
    size_t fitting = TILE_BYTES_MAX / (token_bytes * KVK_ATTEND_TILE_TOKENS);
    uint32_t heads = KVK_ATTEND_ROWS_MAX / strip_rows;
    if (heads > fitting) {
        heads = fitting > 0 ? (uint32_t)fitting : 1;
    }
    return heads;
}

static uint64_t visible_count(const struct kvk_attend_visible *visible)
{
    return visible->sinks.end - visible->sinks.begin + visible->rest.end - visible->rest.begin;
}

/* Tokens `begin` to `end` of what is visible, counted over both ranges. */
static struct kvk_attend_visible visible_cut(const struct kvk_attend_visible *visible,
                                             uint64_t begin, uint64_t end)
{
    uint64_t sink_count = visible->sinks.end - visible->sinks.begin;
    struct kvk_attend_visible cut = *visible;

    cut.sinks.begin += smaller(begin, sink_count);
    cut.sinks.end = visible->sinks.begin + smaller(end, sink_count);
    cut.rest.begin += begin < sink_count ? 0 : begin - sink_count;
    cut.rest.end = visible->rest.begin + (end < sink_count ? 0 : end - sink_count);
    return cut;
}

/* In reads of a token's K and V of one head. */
static uint64_t unit_cost(const struct kvk_attend_unit *unit)
{
    uint64_t weight = (unit->row_count + ROWS_PER_READ - 1) / ROWS_PER_READ;

    weight *= unit->head_count;
    return visible_count(&unit->visible) * weight;
}

static uint32_t split_count(const struct plan *plan, const struct kvk_attend_unit *unit)
{
    uint64_t tokens_min = SPLIT_TOKENS_MIN;

    if ((uint64_t)unit->row_count * SPLIT_TOKENS_PER_ROW > tokens_min) {
        tokens_min = (uint64_t)unit->row_count * SPLIT_TOKENS_PER_ROW;
    }
    uint64_t count = (unit_cost(unit) + plan->cost_target - 1) / plan->cost_target;
    count = smaller(count, visible_count(&unit->visible) / tokens_min);
    count = smaller(count, SPLIT_COUNT_MAX);
    return count > 0 ? (uint32_t)count : 1;
}

typedef void strip_visit(struct plan *plan, const struct kvk_attend_unit *whole);

/* All KV heads of some rows of a segment. */
static void heads_visit(struct plan *plan, const struct kvk_attend_segment *segment,
                        const struct kvk_attend_run *runs, uint32_t run_count, uint32_t row_count,
                        strip_visit *visit)
{
    const struct kvk_attend *attend = plan->attend;
    const struct kvk_attend_item *item = &attend->items[runs[0].item];
    uint32_t strip_heads = heads_per_strip(attend, row_count);
    uint64_t begin = item->first_token + (uint64_t)segment->first_page * attend->block_tokens;
    struct kvk_token_range range = {begin,
                                    begin + (uint64_t)segment->page_count * attend->block_tokens};

    for (uint32_t head = 0; head < attend->kv_heads; head += strip_heads) {
        struct kvk_attend_unit whole = {
            .runs = runs,
            .run_count = run_count,
            .first_head = head,
            .head_count = (uint32_t)smaller(attend->kv_heads - head, strip_heads),
            .row_count = row_count,
        };
        whole.visible = kvk_attend_unit_visible(attend, &whole, range);
        visit(plan, &whole);
    }
}

/* A segment's rows, packed into strips: of one member after the other, as many as fit. */
static void segment_visit(struct plan *plan, const struct kvk_attend_segment *segment,
                          strip_visit *visit)
{
    const struct kvk_attend *attend = plan->attend;
    uint32_t group = attend->query_heads / attend->kv_heads;
    uint32_t rows_max = rows_per_strip(attend);
    struct kvk_attend_run runs[KVK_ATTEND_ROWS_MAX];
    uint32_t run_count = 0;
    uint32_t packed = 0;

    for (uint32_t i = 0; i < segment->member_count; i++) {
        uint32_t item = plan->split.members[segment->first_member + i];
        uint64_t row_count = (uint64_t)attend->items[item].query_count * group;
        uint64_t row = 0;
        while (row < row_count) {
            uint32_t count = (uint32_t)smaller(row_count - row, rows_max - packed);
            runs[run_count++] = (struct kvk_attend_run){item, row, count};
            row += count;
            packed += count;
            if (packed == rows_max) {
                heads_visit(plan, segment, runs, run_count, packed, visit);
                run_count = 0;
                packed = 0;
            }
        }
    }
    if (packed > 0) {
        heads_visit(plan, segment, runs, run_count, packed, visit);
    }
}

/* Call `visit` for every strip with the unit that it would be if it were not cut. */
static void strips_visit(struct plan *plan, strip_visit *visit)
{
    for (plan->segment = 0; plan->segment < plan->split.segment_count; plan->segment++) {
        segment_visit(plan, &plan->split.segments[plan->segment], visit);
    }
}

static void strip_add_cost(struct plan *plan, const struct kvk_attend_unit *whole)
{
    plan->cost_target += unit_cost(whole);
    if (kvk_attend_unit_rows(whole) > plan->rows_max) {
        plan->rows_max = kvk_attend_unit_rows(whole);
    }
}

/* Is what the strip's units find all there is for its rows? */
static bool strip_is_alone(const struct plan *plan, const struct kvk_attend_unit *whole,
                           uint32_t unit_count)
{
    for (uint32_t i = 0; i < whole->run_count; i++) {
        if (plan->segment_uses[whole->runs[i].item] > 1) {
            return false;
        }
    }
    return unit_count == 1;
}

static void strip_count(struct plan *plan, const struct kvk_attend_unit *whole)
{
    uint32_t count = split_count(plan, whole);

    plan->counts.strips++;
    plan->counts.units += count;
    plan->counts.runs += whole->run_count;
    if (!strip_is_alone(plan, whole, count)) {
        for (uint32_t i = 0; i < whole->run_count; i++) {
            plan->piece_ends[whole->runs[i].item]++;
        }
        plan->counts.pieces += whole->run_count;
        plan->counts.partial_floats +=
            (uint64_t)count * kvk_attend_unit_rows(whole) * (plan->attend->head_size_v + 1);
    }
}

static void strip_add_pieces(struct plan *plan, const struct kvk_attend_unit *whole)
{
    uint32_t first_row = 0;

    for (uint32_t i = 0; i < whole->run_count; i++) {
        uint32_t at = plan->piece_ends[whole->runs[i].item]++;
        plan->pieces[at] = (struct piece){
            .strip = (uint32_t)plan->counts.strips, .first_row = first_row, .run = whole->runs[i]};
        first_row += whole->runs[i].row_count;
    }
}

static void strip_make(struct plan *plan, const struct kvk_attend_unit *whole)
{
    uint32_t count = split_count(plan, whole);
    uint64_t token_count = visible_count(&whole->visible);
    uint64_t output_floats = (uint64_t)kvk_attend_unit_rows(whole) * plan->attend->head_size_v;
    bool alone = strip_is_alone(plan, whole, count);
    struct kvk_attend_run *runs = plan->runs + plan->counts.runs;

    if (!alone) {
        strip_add_pieces(plan, whole);
    }
    memcpy(runs, whole->runs, whole->run_count * sizeof(*runs));
    plan->counts.runs += whole->run_count;
    plan->strips[plan->counts.strips++] = (struct strip){
        .segment = plan->segment,
        .first_unit = (uint32_t)plan->counts.units,
        .unit_count = count,
    };
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_attend_unit *unit = &plan->units[plan->counts.units++];
        *unit = *whole;
        unit->runs = runs;
        unit->visible =
            visible_cut(&whole->visible, token_count * i / count, token_count * (i + 1) / count);
        if (!alone) {
            unit->output = plan->partials + plan->counts.partial_floats;
            unit->lse = unit->output + output_floats;
            plan->counts.partial_floats += output_floats + kvk_attend_unit_rows(whole);
        }
    }
}

static void plan_finish(struct plan *plan)
{
    free(plan->scratch);
    free(plan->partials);
    free(plan->segment_uses);
    free(plan->piece_ends);
    free(plan->pieces);
    free(plan->runs);
    free(plan->strips);
    free(plan->units);
    kvk_attend_split_finish(&plan->split);
}

static enum kvk_status no_memory(struct kvk_error *error)
{
    return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                    "no memory for partial results of attention");
}

/* Which segments there are, and how much work. */
static enum kvk_status plan_measure(struct plan *plan, uint32_t thread_count,
                                    struct kvk_error *error)
{
    enum kvk_status status =
        kvk_attend_split_init(&plan->split, plan->attend, SHARED_TOKENS_MIN, error);
    if (status != KVK_OK) {
        return status;
    }
    plan->segment_uses = calloc(plan->attend->item_count, sizeof(*plan->segment_uses));
    plan->piece_ends = calloc(plan->attend->item_count, sizeof(*plan->piece_ends));
    if (plan->segment_uses == NULL || plan->piece_ends == NULL) {
        return no_memory(error);
    }
    for (uint32_t i = 0; i < plan->split.segment_count; i++) {
        const struct kvk_attend_segment *segment = &plan->split.segments[i];
        for (uint32_t j = 0; j < segment->member_count; j++) {
            plan->segment_uses[plan->split.members[segment->first_member + j]]++;
        }
    }
    strips_visit(plan, strip_add_cost);
    plan->cost_target = thread_count == 1
                            ? UINT64_MAX / 2
                            : plan->cost_target / (thread_count * PARTS_PER_THREAD) + 1;
    strips_visit(plan, strip_count);
    plan->scratch_bytes = kvk_attend_unit_scratch_bytes(plan->kernel, plan->attend, plan->rows_max);
    if (plan->counts.units > UINT32_MAX || plan->counts.pieces > UINT32_MAX) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "items",
                        "one call cannot attend so much");
    }
    return KVK_OK;
}

static enum kvk_status plan_init(struct plan *plan, uint32_t thread_count, struct kvk_error *error)
{
    enum kvk_status status = plan_measure(plan, thread_count, error);
    if (status != KVK_OK) {
        return status;
    }
    KVK_ASSERT(plan->counts.strips > 0); /* a checked batch has an item with a query */
    KVK_ASSERT(plan->counts.units > 0);
    plan->units = calloc(plan->counts.units, sizeof(*plan->units));
    plan->strips = calloc(plan->counts.strips, sizeof(*plan->strips));
    plan->runs = calloc(plan->counts.runs, sizeof(*plan->runs));
    plan->scratch = aligned_alloc(64, thread_count * plan->scratch_bytes);
    if (plan->counts.pieces > 0) {
        plan->pieces = calloc(plan->counts.pieces, sizeof(*plan->pieces));
        plan->partials = malloc(plan->counts.partial_floats * sizeof(float));
    }
    if (plan->units == NULL || plan->strips == NULL || plan->runs == NULL ||
        plan->scratch == NULL ||
        (plan->counts.pieces > 0 && (plan->pieces == NULL || plan->partials == NULL))) {
        return no_memory(error);
    }
    /* From counts to where each item's pieces begin; filling moves that to where they end. */
    uint32_t begin = 0;
    for (uint32_t i = 0; i < plan->attend->item_count; i++) {
        uint32_t count = plan->piece_ends[i];
        plan->piece_ends[i] = begin;
        begin += count;
    }
    plan->counts = (struct counts){.strips = 0};
    strips_visit(plan, strip_make);
    return KVK_OK;
}

/* ---- Running it ---- */

static void unit_part(void *context, uint32_t part, uint32_t thread)
{
    const struct plan *plan = context;

    kvk_attend_unit_run(plan->kernel, plan->attend, &plan->units[part],
                        plan->scratch + thread * plan->scratch_bytes);
}

/* Fold a unit's results for the rows of a piece and KV head into the item's. */
static void piece_merge(const struct plan *plan, const struct piece *piece,
                        const struct kvk_attend_unit *unit, uint32_t head, bool first)
{
    const struct kvk_attend *attend = plan->attend;
    const struct kvk_attend_item *item = &attend->items[piece->run.item];
    uint32_t head_size = attend->head_size_v;
    size_t unit_row = (size_t)(head - unit->first_head) * unit->row_count + piece->first_row;

    for (uint32_t i = 0; i < piece->run.row_count; i++) {
        uint64_t item_row = kvk_attend_item_row(attend, head, piece->run.first_row + i);
        float *output = item->output + item_row * head_size;
        const float *part = unit->output + (unit_row + i) * head_size;
        if (first) {
            memcpy(output, part, head_size * sizeof(float));
            item->lse[item_row] = unit->lse[unit_row + i];
        } else {
            kvk_attend_merge(output, item->lse + item_row, part, unit->lse + unit_row + i, 1,
                             head_size);
        }
    }
}

static void piece_sink(const struct plan *plan, const struct piece *piece, uint32_t head)
{
    const struct kvk_attend *attend = plan->attend;
    const struct kvk_attend_item *item = &attend->items[piece->run.item];

    for (uint32_t i = 0; i < piece->run.row_count; i++) {
        uint64_t item_row = kvk_attend_item_row(attend, head, piece->run.first_row + i);
        kvk_attend_sink_logits(item->output + item_row * attend->head_size_v, item->lse + item_row,
                               attend->sink_logits + item_row % attend->query_heads, 1, 1,
                               attend->head_size_v);
    }
}

/*
 * The last step for the rows of one item and KV head that no unit had alone. Each segment has all
 * rows of its items once: those of the first begin the results, those of the last end them.
 */
static void head_part(void *context, uint32_t part, uint32_t thread)
{
    const struct plan *plan = context;
    const struct kvk_attend *attend = plan->attend;
    uint32_t index = part / attend->kv_heads;
    uint32_t head = part % attend->kv_heads;
    uint32_t begin = index > 0 ? plan->piece_ends[index - 1] : 0;
    uint32_t end = plan->piece_ends[index];
    bool sinks = attend->sink_logits != NULL && !attend->items[index].partial;

    (void)thread;
    for (uint32_t i = begin; i < end; i++) {
        const struct piece *piece = &plan->pieces[i];
        const struct strip *strip = &plan->strips[piece->strip];
        const struct kvk_attend_unit *units = &plan->units[strip->first_unit];
        bool first = strip->segment == plan->strips[plan->pieces[begin].strip].segment;
        bool last = strip->segment == plan->strips[plan->pieces[end - 1].strip].segment;
        if (head < units->first_head || head - units->first_head >= units->head_count) {
            continue;
        }
        for (uint32_t j = 0; j < strip->unit_count; j++) {
            piece_merge(plan, piece, &units[j], head, first && j == 0);
        }
        if (last && sinks) {
            piece_sink(plan, piece, head);
        }
    }
}

/* Compact formats have kernels of their own. */
static const struct kvk_attend_kernel *kernel_for(const struct kvk_attend_kernel *kernel,
                                                  const struct kvk_attend *attend)
{
    if (!kvk_format_is_compact(attend->format_k)) {
        return kernel;
    }
    kernel = kernel->compact;
    while (!kernel->available()) {
        kernel = kernel->compact;
    }
    return kernel;
}

enum kvk_status kvk_attend_cpu_run(const struct kvk_attend_kernel *kernel,
                                   struct kvk_threads *threads, const struct kvk_attend *attend,
                                   struct kvk_error *error)
{
    struct plan plan = {.kernel = kernel_for(kernel, attend), .attend = attend};

    enum kvk_status status = plan_init(&plan, kvk_threads_count(threads), error);
    if (status == KVK_OK) {
        KVK_ASSERT(plan.counts.units >= plan.counts.strips);
        kvk_threads_run(threads, (uint32_t)plan.counts.units, unit_part, &plan);
        if (plan.pieces != NULL) {
            kvk_threads_run(threads, attend->item_count * attend->kv_heads, head_part, &plan);
        }
    }
    plan_finish(&plan);
    return status;
}
