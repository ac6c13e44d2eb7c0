#include "gpu/attend_cpu.h"

#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "gpu/attend_kernel.h"
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

/* Rows of one item and some KV heads; their tokens are cut into `unit_count` ranges. */
struct strip {
    uint32_t first_unit;
    uint32_t unit_count;
};

struct plan {
    const struct kvk_attend_kernel *kernel;
    const struct kvk_attend *attend;
    struct kvk_attend_unit *units; /* [unit_count], ours */
    struct strip *strips;          /* [strip_count], ours */
    float *partials;               /* results of the units that are not alone; ours, or NULL */
    uint8_t *scratch;              /* [threads][scratch_bytes], ours */
    uint64_t strip_count;
    uint64_t unit_count;
    uint64_t partial_floats;
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
    size_t token_bytes = attend->head_size_k * kvk_format_bytes(attend->format_k);

    if (!attend->latent) {
        token_bytes += attend->head_size_v * kvk_format_bytes(attend->format_v);
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

/* Call `visit` for every strip with the unit that it would be if it were not cut. */
static void strips_visit(struct plan *plan, strip_visit *visit)
{
    const struct kvk_attend *attend = plan->attend;
    uint32_t group = attend->query_heads / attend->kv_heads;
    uint32_t rows_max = rows_per_strip(attend);

    for (uint32_t item = 0; item < attend->item_count; item++) {
        uint64_t row_count = (uint64_t)attend->items[item].query_count * group;
        uint32_t strip_rows = row_count < rows_max ? (uint32_t)row_count : rows_max;
        uint32_t strip_heads = heads_per_strip(attend, strip_rows);
        for (uint64_t row = 0; row < row_count; row += strip_rows) {
            for (uint32_t head = 0; head < attend->kv_heads; head += strip_heads) {
                struct kvk_attend_unit whole = {
                    .item = item,
                    .first_head = head,
                    .head_count = (uint32_t)smaller(attend->kv_heads - head, strip_heads),
                    .first_row = row,
                    .row_count = (uint32_t)smaller(row_count - row, strip_rows),
                };
                whole.visible = kvk_attend_unit_visible(attend, &whole);
                visit(plan, &whole);
            }
        }
    }
}

static void strip_add_cost(struct plan *plan, const struct kvk_attend_unit *whole)
{
    plan->cost_target += unit_cost(whole);
    if (kvk_attend_unit_rows(whole) > plan->rows_max) {
        plan->rows_max = kvk_attend_unit_rows(whole);
    }
}

static void strip_count_units(struct plan *plan, const struct kvk_attend_unit *whole)
{
    uint32_t count = split_count(plan, whole);

    plan->strip_count++;
    plan->unit_count += count;
    if (count > 1) {
        plan->partial_floats +=
            (uint64_t)count * kvk_attend_unit_rows(whole) * (plan->attend->head_size_v + 1);
    }
}

static void strip_make_units(struct plan *plan, const struct kvk_attend_unit *whole)
{
    uint32_t count = split_count(plan, whole);
    uint64_t token_count = visible_count(&whole->visible);
    uint64_t output_floats = (uint64_t)kvk_attend_unit_rows(whole) * plan->attend->head_size_v;

    plan->strips[plan->strip_count] =
        (struct strip){.first_unit = (uint32_t)plan->unit_count, .unit_count = count};
    plan->strip_count++;
    for (uint32_t i = 0; i < count; i++) {
        struct kvk_attend_unit *unit = &plan->units[plan->unit_count++];
        *unit = *whole;
        unit->visible =
            visible_cut(&whole->visible, token_count * i / count, token_count * (i + 1) / count);
        if (count > 1) {
            unit->output = plan->partials + plan->partial_floats;
            unit->lse = unit->output + output_floats;
            plan->partial_floats += output_floats + kvk_attend_unit_rows(whole);
        }
    }
}

static void plan_finish(struct plan *plan)
{
    free(plan->scratch);
    free(plan->partials);
    free(plan->strips);
    free(plan->units);
}

static enum kvk_status plan_init(struct plan *plan, uint32_t thread_count, struct kvk_error *error)
{
    strips_visit(plan, strip_add_cost);
    plan->cost_target = thread_count == 1
                            ? UINT64_MAX / 2
                            : plan->cost_target / (thread_count * PARTS_PER_THREAD) + 1;
    strips_visit(plan, strip_count_units);
    plan->scratch_bytes = kvk_attend_unit_scratch_bytes(plan->kernel, plan->attend, plan->rows_max);
    if (plan->unit_count > UINT32_MAX) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "items",
                        "one call cannot attend so much");
    }
    KVK_ASSERT(plan->strip_count > 0); /* a checked batch has an item with a query */
    KVK_ASSERT(plan->unit_count > 0);
    plan->units = calloc(plan->unit_count, sizeof(*plan->units));
    plan->strips = calloc(plan->strip_count, sizeof(*plan->strips));
    plan->scratch = aligned_alloc(64, thread_count * plan->scratch_bytes);
    if (plan->partial_floats > 0) {
        plan->partials = malloc(plan->partial_floats * sizeof(float));
    }
    if (plan->units == NULL || plan->strips == NULL || plan->scratch == NULL ||
        (plan->partials == NULL && plan->partial_floats > 0)) {
        plan_finish(plan);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                        "no memory for partial results of attention");
    }
    plan->strip_count = 0;
    plan->unit_count = 0;
    plan->partial_floats = 0;
    strips_visit(plan, strip_make_units);
    return KVK_OK;
}

/* ---- Running it ---- */

static void unit_part(void *context, uint32_t part, uint32_t thread)
{
    const struct plan *plan = context;

    kvk_attend_unit_run(plan->kernel, plan->attend, &plan->units[part],
                        plan->scratch + thread * plan->scratch_bytes);
}

/* Merge the units of a strip into the first, and put its rows where they belong. */
static void strip_part(void *context, uint32_t part, uint32_t thread)
{
    const struct plan *plan = context;
    const struct strip *strip = &plan->strips[part];
    const struct kvk_attend_unit *first = &plan->units[strip->first_unit];
    const struct kvk_attend_item *item = &plan->attend->items[first->item];
    uint32_t head_size = plan->attend->head_size_v;

    (void)thread;
    if (strip->unit_count == 1) {
        return;
    }
    for (uint32_t i = 1; i < strip->unit_count; i++) {
        kvk_attend_merge(first->output, first->lse, first[i].output, first[i].lse,
                         kvk_attend_unit_rows(first), head_size);
    }
    for (uint32_t row = 0; row < kvk_attend_unit_rows(first); row++) {
        uint64_t item_row = kvk_attend_unit_item_row(plan->attend, first, row);
        memcpy(item->output + item_row * head_size, first->output + (size_t)row * head_size,
               head_size * sizeof(float));
        item->lse[item_row] = first->lse[row];
    }
}

enum kvk_status kvk_attend_cpu_run(const struct kvk_attend_kernel *kernel,
                                   struct kvk_threads *threads, const struct kvk_attend *attend,
                                   struct kvk_error *error)
{
    struct plan plan = {.kernel = kernel, .attend = attend};

    enum kvk_status status = plan_init(&plan, kvk_threads_count(threads), error);
    if (status != KVK_OK) {
        return status;
    }
    KVK_ASSERT(plan.unit_count >= plan.strip_count);
    kvk_threads_run(threads, (uint32_t)plan.unit_count, unit_part, &plan);
    if (plan.partials != NULL) {
        kvk_threads_run(threads, (uint32_t)plan.strip_count, strip_part, &plan);
    }
    plan_finish(&plan);
    return KVK_OK;
}
