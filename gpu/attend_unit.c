#include "gpu/attend_unit.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

/* Tokens in order, of one range; with gaps where pages are absent. */
struct tile {
    uint32_t count; /* 0: there are no more */
    bool windowed;  /* the window binds these: they are not the sinks */
    uint64_t positions[KVK_ATTEND_TILE_TOKENS];
    const uint8_t *k[KVK_ATTEND_TILE_TOKENS]; /* of the unit's first head */
    const uint8_t *v[KVK_ATTEND_TILE_TOKENS];
    const uint8_t *pages[KVK_ATTEND_TILE_TOKENS];
    uint16_t slots[KVK_ATTEND_TILE_TOKENS]; /* which of their block's tokens they are */
    uint32_t area_count;
    struct kvk_attend_area areas[4 * KVK_ATTEND_TILE_TOKENS]; /* the same, as it lies in pages */
};

/* Tokens of a tile that some rows see, all of them alike. */
struct fold {
    uint32_t first_row; /* of each head */
    uint32_t row_count;
    uint32_t begin; /* of the tile's tokens */
    uint32_t end;
};

/* What a row of a head can see, but for the tile. */
struct view {
    uint64_t position;
    uint64_t token_count;
};

/* A running unit. */
struct run {
    const struct kvk_attend_kernel *kernel;
    const struct kvk_attend *attend;
    const struct kvk_attend_unit *unit;
    const struct kvk_attend_item *item; /* whose pages are gone over: the first run's */
    uint32_t group;                     /* query heads per KV head */
    size_t k_bytes;                     /* of a token of a head */
    size_t v_bytes;
    size_t k_scales; /* from a page to the unit's first head's scales; 0: none lie apart */
    size_t v_scales;
    size_t k_scale_stride; /* from one head's to the next's */
    size_t v_scale_stride;
    struct kvk_attend_rows rows;    /* of all heads */
    float *scores;                  /* [row_count][KVK_ATTEND_TILE_TOKENS] */
    float *slopes;                  /* [row_count], of all heads */
    struct kvk_attend_visible left; /* what no tile was made of yet */
    struct view views[KVK_ATTEND_ROWS_MAX];
    struct fold folds[KVK_ATTEND_ROWS_MAX]; /* of the present tile */
    uint32_t fold_count;
    float places[KVK_ATTEND_ROWS_MAX];
    float token_places[2 * KVK_ATTEND_TILE_TOKENS];
};

static uint32_t group_of(const struct kvk_attend *attend)
{
    return attend->query_heads / attend->kv_heads;
}

static struct kvk_token_range range_cut(struct kvk_token_range range, struct kvk_token_range by)
{
    range = kvk_token_range_from(range, by.begin);
    if (range.end > by.end) {
        range.end = by.end > range.begin ? by.end : range.begin;
    }
    return range;
}

/* One range around two; an empty one counts for nothing. */
static struct kvk_token_range range_join(struct kvk_token_range a, struct kvk_token_range b)
{
    if (a.begin == a.end) {
        return b;
    }
    if (b.begin < b.end) {
        a.begin = b.begin < a.begin ? b.begin : a.begin;
        a.end = b.end > a.end ? b.end : a.end;
    }
    return a;
}

struct kvk_attend_visible kvk_attend_unit_visible(const struct kvk_attend *attend,
                                                  const struct kvk_attend_unit *unit,
                                                  struct kvk_token_range range)
{
    struct kvk_attend_visible all = {{0, 0}, {0, 0}};
    uint32_t group = group_of(attend);

    for (uint32_t i = 0; i < unit->run_count; i++) {
        const struct kvk_attend_run *run = &unit->runs[i];
        const struct kvk_attend_item *item = &attend->items[run->item];
        uint64_t first_query = run->first_row / group;
        uint64_t last_query = (run->first_row + run->row_count - 1) / group;
        struct kvk_attend_visible one = kvk_attend_visible(
            attend, item, item->position + first_query, last_query - first_query + 1);
        all.sinks = range_join(all.sinks, range_cut(one.sinks, range));
        all.rest = range_join(all.rest, range_cut(one.rest, range));
    }
    /* The rest of one may begin amid the sinks of another, which see no further back. */
    if (all.sinks.begin < all.sinks.end) {
        all.rest = kvk_token_range_from(all.rest, all.sinks.end);
    }
    return all;
}

uint64_t kvk_attend_item_row(const struct kvk_attend *attend, uint32_t head, uint64_t head_row)
{
    uint32_t group = group_of(attend);

    return head_row / group * attend->query_heads + (uint64_t)head * group + head_row % group;
}

/* ---- Scratch memory ---- */

static size_t align(size_t size_bytes)
{
    return (size_bytes + 63) / 64 * 64;
}

static size_t score_bytes(uint32_t row_count)
{
    return (size_t)row_count * KVK_ATTEND_TILE_TOKENS * sizeof(float);
}

size_t kvk_attend_unit_scratch_bytes(const struct kvk_attend_kernel *kernel,
                                     const struct kvk_attend *attend, uint32_t row_count)
{
    return row_count * kernel->packed_bytes(attend) +
           row_count * kvk_attend_pad(attend->head_size_v) * sizeof(float) +
           score_bytes(row_count) + 3 * align(row_count * sizeof(float));
}

/* Rows of one run and head: their queries in the kernel's form, and empty sums. */
static void run_pack(struct run *run, const struct kvk_attend_run *part, uint32_t head,
                     uint32_t first_row, uint8_t *queries)
{
    const struct kvk_attend *attend = run->attend;
    const struct kvk_attend_item *item = &attend->items[part->item];
    size_t query_bytes = attend->head_size_k * kvk_format_bytes(attend->format_q);
    struct kvk_attend_rows *rows = &run->rows;

    for (uint32_t i = 0; i < part->row_count; i++) {
        uint32_t row = head * run->unit->row_count + first_row + i;
        uint64_t item_row =
            kvk_attend_item_row(attend, run->unit->first_head + head, part->first_row + i);
        const uint8_t *query = item->queries;
        run->kernel->pack(attend, query + item_row * query_bytes,
                          queries + row * rows->query_stride_bytes);
        rows->max[row] = -INFINITY;
        rows->sum[row] = 0;
        run->slopes[row] =
            attend->alibi_slopes == NULL ? 0 : attend->alibi_slopes[item_row % attend->query_heads];
    }
}

static void rows_pack(struct run *run, uint8_t *queries)
{
    uint32_t first_row = 0;

    for (uint32_t i = 0; i < run->unit->run_count; i++) {
        const struct kvk_attend_run *part = &run->unit->runs[i];
        const struct kvk_attend_item *item = &run->attend->items[part->item];
        for (uint32_t row = 0; row < part->row_count; row++) {
            run->views[first_row + row] = (struct view){
                .position = item->position + (part->first_row + row) / run->group,
                .token_count = item->token_count,
            };
        }
        for (uint32_t head = 0; head < run->unit->head_count; head++) {
            run_pack(run, part, head, first_row, queries);
        }
        first_row += part->row_count;
    }
    KVK_ASSERT(first_row == run->unit->row_count);
}

static void run_init(struct run *run, uint8_t *scratch)
{
    struct kvk_attend_rows *rows = &run->rows;
    uint32_t count = kvk_attend_unit_rows(run->unit);

    KVK_ASSERT((uintptr_t)scratch % 64 == 0);
    rows->count = count;
    rows->query_stride_bytes = run->kernel->packed_bytes(run->attend);
    rows->value_stride = kvk_attend_pad(run->attend->head_size_v);

    uint8_t *queries = scratch;
    scratch += count * rows->query_stride_bytes;
    rows->values = (float *)(void *)scratch;
    memset(rows->values, 0, count * rows->value_stride * sizeof(float));
    scratch += count * rows->value_stride * sizeof(float);
    run->scores = (float *)(void *)scratch;
    scratch += score_bytes(count);
    rows->max = (float *)(void *)scratch;
    scratch += align(count * sizeof(float));
    rows->sum = (float *)(void *)scratch;
    scratch += align(count * sizeof(float));
    run->slopes = (float *)(void *)scratch;
    rows->queries = queries;
    rows_pack(run, queries);
}

/* ---- Tiles ---- */

/* Add tokens of one page, from position `first` on. */
static void tile_add(const struct run *run, struct tile *tile, uint64_t first, uint32_t count)
{
    const struct kvk_attend *attend = run->attend;
    uint64_t slot = first - run->item->first_token;
    const uint8_t *page = run->item->pages[slot / attend->block_tokens];
    uint64_t token_row =
        (uint64_t)run->unit->first_head * attend->block_tokens + slot % attend->block_tokens;
    uint64_t v_offset = attend->latent ? attend->k_offset : attend->v_offset;

    if (page == NULL) {
        return;
    }
    const uint8_t *k = page + attend->k_offset + token_row * run->k_bytes;
    const uint8_t *v = page + v_offset + token_row * run->v_bytes;
    for (uint32_t i = 0; i < count; i++) {
        tile->positions[tile->count + i] = first + i;
        tile->k[tile->count + i] = k + i * run->k_bytes;
        tile->v[tile->count + i] = v + i * run->v_bytes;
        tile->pages[tile->count + i] = page;
        tile->slots[tile->count + i] = (uint16_t)(slot % attend->block_tokens + i);
    }
    tile->count += count;
    tile->areas[tile->area_count++] = (struct kvk_attend_area){
        .begin = k,
        .run_bytes = count * run->k_bytes,
        .stride_bytes = attend->block_tokens * run->k_bytes,
    };
    if (!attend->latent) {
        tile->areas[tile->area_count++] = (struct kvk_attend_area){
            .begin = v,
            .run_bytes = count * run->v_bytes,
            .stride_bytes = attend->block_tokens * run->v_bytes,
        };
    }
    if (run->k_scales != 0) {
        tile->areas[tile->area_count++] = (struct kvk_attend_area){
            page + run->k_scales, run->k_scale_stride, run->k_scale_stride};
        tile->areas[tile->area_count++] = (struct kvk_attend_area){
            page + run->v_scales, run->v_scale_stride, run->v_scale_stride};
    }
}

/* Make a tile of what comes first in a range, and take it off. */
static void tile_fill(const struct run *run, struct tile *tile, struct kvk_token_range *range)
{
    while (range->begin < range->end && tile->count < KVK_ATTEND_TILE_TOKENS) {
        uint64_t slot = range->begin - run->item->first_token;
        uint64_t count = run->attend->block_tokens - slot % run->attend->block_tokens;
        if (count > range->end - range->begin) {
            count = range->end - range->begin;
        }
        if (count > KVK_ATTEND_TILE_TOKENS - tile->count) {
            count = KVK_ATTEND_TILE_TOKENS - tile->count;
        }
        tile_add(run, tile, range->begin, (uint32_t)count);
        range->begin += count;
    }
}

static void tile_next(struct run *run, struct tile *tile)
{
    tile->count = 0;
    tile->area_count = 0;
    tile->windowed = false;
    tile_fill(run, tile, &run->left.sinks);
    if (tile->count == 0) {
        tile->windowed = run->attend->window != 0;
        tile_fill(run, tile, &run->left.rest);
    }
}

/* ---- Folding ---- */

/* Which of a tile's tokens one query sees: always a run. */
struct mask {
    uint32_t begin;
    uint32_t end;
};

static struct mask tile_mask(const struct run *run, const struct tile *tile, uint32_t row)
{
    const struct kvk_attend *attend = run->attend;
    const struct view *view = &run->views[row];
    uint64_t end = view->token_count;
    struct mask mask = {0, tile->count};

    if (attend->causal && view->position < end) {
        end = view->position + 1;
    }
    while (mask.end > 0 && tile->positions[mask.end - 1] >= end) {
        mask.end--;
    }
    while (tile->windowed && mask.begin < mask.end &&
           tile->positions[mask.begin] + attend->window <= view->position) {
        mask.begin++;
    }
    return mask;
}

/*
 * Who sees what of a tile. Rows of which each sees the same tokens go together: in most tiles all
 * of them. Masked tokens are left out rather than weighed with 0, since 0 times a NaN is a NaN.
 */
static void folds_find(struct run *run, const struct tile *tile)
{
    uint32_t row_count = run->unit->row_count;

    run->fold_count = 0;
    for (uint32_t row = 0; row < row_count; row++) {
        struct mask mask = tile_mask(run, tile, row);
        struct fold *last = &run->folds[run->fold_count > 0 ? run->fold_count - 1 : 0];
        if (mask.begin >= mask.end) {
            continue;
        }
        if (run->fold_count > 0 && last->begin == mask.begin && last->end == mask.end &&
            last->first_row + last->row_count == row) {
            last->row_count++;
            continue;
        }
        run->folds[run->fold_count++] = (struct fold){row, 1, mask.begin, mask.end};
    }
}

/* Distances count in single precision, which has them to the token up to 2^24. */
static void places_find(struct run *run, const struct tile *tile)
{
    uint64_t origin = tile->positions[0];

    for (uint32_t i = 0; i < tile->count; i++) {
        run->token_places[i] = (float)(tile->positions[i] - origin);
    }
    for (uint32_t row = 0; row < run->unit->row_count; row++) {
        uint64_t position = run->views[row].position;
        run->places[row] =
            position < origin ? -(float)(origin - position) : (float)(position - origin);
    }
}

static struct kvk_attend_tokens tile_tokens(const struct run *run, const struct tile *tile,
                                            uint32_t head, const struct fold *fold)
{
    return (struct kvk_attend_tokens){
        .k = tile->k + fold->begin,
        .v = tile->v + fold->begin,
        .k_offset = (size_t)head * run->attend->block_tokens * run->k_bytes,
        .v_offset = (size_t)head * run->attend->block_tokens * run->v_bytes,
        .count = fold->end - fold->begin,
        .pages = tile->pages + fold->begin,
        .slots = tile->slots + fold->begin,
        .k_scales = run->k_scales + head * run->k_scale_stride,
        .v_scales = run->v_scales + head * run->v_scale_stride,
    };
}

/* Fold tokens into rows that all see them. */
static void fold_run(const struct run *run, const struct tile *tile, uint32_t head,
                     const struct fold *fold, struct kvk_attend_fetch *fetch)
{
    struct kvk_attend_tokens tokens = tile_tokens(run, tile, head, fold);
    uint32_t first_row = head * run->unit->row_count + fold->first_row;
    struct kvk_attend_rows rows = {
        .count = fold->row_count,
        .queries = run->rows.queries + first_row * run->rows.query_stride_bytes,
        .query_stride_bytes = run->rows.query_stride_bytes,
        .max = run->rows.max + first_row,
        .sum = run->rows.sum + first_row,
        .values = run->rows.values + first_row * run->rows.value_stride,
        .value_stride = run->rows.value_stride,
    };

    if (run->attend->alibi_slopes != NULL) {
        rows.slopes = run->slopes + first_row;
        rows.places = run->places + fold->first_row;
        rows.token_places = run->token_places + fold->begin;
    }
    run->kernel->score(run->attend, &rows, &tokens, fetch, run->scores);
    run->kernel->soften(run->attend, &rows, tokens.count, run->scores);
    run->kernel->weigh(run->attend, &rows, &tokens, fetch, run->scores);
}

/* Half of a head's share is fetched while scores are made, half while values are weighed. */
static struct kvk_attend_fetch tile_fetch(const struct run *run, const struct tile *tile)
{
    size_t line_count = 0;
    struct kvk_attend_fetch fetch = {
        .area = tile->areas,
        .area_end = tile->areas + tile->area_count,
        .run_count = run->unit->head_count,
        .runs_left = run->unit->head_count,
    };

    for (uint32_t i = 0; i < tile->area_count; i++) {
        line_count += kvk_attend_steps(tile->areas[i].run_bytes, KVK_ATTEND_LINE_BYTES);
    }
    fetch.line_count = (uint32_t)kvk_attend_steps(line_count, 2);
    if (tile->area_count > 0) {
        fetch.run = tile->areas[0].begin;
        fetch.next = fetch.run;
        fetch.end = fetch.run + tile->areas[0].run_bytes;
    }
    return fetch;
}

static void tile_fold(struct run *run, const struct tile *tile, const struct tile *next)
{
    struct kvk_attend_fetch fetch = tile_fetch(run, next);

    folds_find(run, tile);
    if (run->attend->alibi_slopes != NULL) {
        places_find(run, tile);
    }
    for (uint32_t head = 0; head < run->unit->head_count; head++) {
        for (uint32_t i = 0; i < run->fold_count; i++) {
            fold_run(run, tile, head, &run->folds[i], &fetch);
        }
    }
}

/* ---- Results ---- */

/* One of several results of its row: the plan puts them together. */
static void row_finish_part(const struct run *run, uint32_t row)
{
    const struct kvk_attend_unit *unit = run->unit;

    run->kernel->finish(run->attend, &run->rows, row,
                        unit->output + (size_t)row * run->attend->head_size_v, unit->lse + row);
}

/* All there is for the rows of one run and head. */
static void run_finish(const struct run *run, const struct kvk_attend_run *part, uint32_t head,
                       uint32_t first_row)
{
    const struct kvk_attend *attend = run->attend;
    const struct kvk_attend_item *item = &attend->items[part->item];

    for (uint32_t i = 0; i < part->row_count; i++) {
        uint32_t row = head * run->unit->row_count + first_row + i;
        uint64_t item_row =
            kvk_attend_item_row(attend, run->unit->first_head + head, part->first_row + i);
        float *output = item->output + item_row * attend->head_size_v;
        float *lse = item->lse + item_row;
        run->kernel->finish(attend, &run->rows, row, output, lse);
        if (attend->sink_logits != NULL && !item->partial) {
            kvk_attend_sink_logits(output, lse,
                                   attend->sink_logits + item_row % attend->query_heads, 1, 1,
                                   attend->head_size_v);
        }
    }
}

static void rows_finish(const struct run *run)
{
    const struct kvk_attend_unit *unit = run->unit;
    uint32_t first_row = 0;

    if (unit->output != NULL) {
        for (uint32_t row = 0; row < run->rows.count; row++) {
            row_finish_part(run, row);
        }
        return;
    }
    for (uint32_t i = 0; i < unit->run_count; i++) {
        for (uint32_t head = 0; head < unit->head_count; head++) {
            run_finish(run, &unit->runs[i], head, first_row);
        }
        first_row += unit->runs[i].row_count;
    }
}

/* Where in a page rows and scales lie. */
static void parts_find(struct run *run)
{
    const struct kvk_attend *attend = run->attend;
    const struct kvk_part k = kvk_attend_part(attend, false);
    const struct kvk_part v = kvk_attend_part(attend, true);
    uint64_t v_offset = attend->latent ? attend->k_offset : attend->v_offset;

    run->k_bytes = k.row_bytes;
    run->v_bytes = v.row_bytes;
    if (k.scales_offset != 0) {
        run->k_scale_stride = k.scale_stride;
        run->v_scale_stride = v.scale_stride;
        run->k_scales = attend->k_offset + k.scales_offset + run->unit->first_head * k.scale_stride;
        run->v_scales = v_offset + v.scales_offset + run->unit->first_head * v.scale_stride;
    }
}

void kvk_attend_unit_run(const struct kvk_attend_kernel *kernel, const struct kvk_attend *attend,
                         const struct kvk_attend_unit *unit, uint8_t *scratch)
{
    struct run run = {
        .kernel = kernel,
        .attend = attend,
        .unit = unit,
        .item = &attend->items[unit->runs[0].item],
        .group = group_of(attend),
        .left = unit->visible,
    };
    struct tile tiles[2];
    uint32_t now = 0;

    parts_find(&run);
    run_init(&run, scratch);
    tile_next(&run, &tiles[now]);
    while (tiles[now].count > 0) {
        tile_next(&run, &tiles[1 - now]);
        tile_fold(&run, &tiles[now], &tiles[1 - now]);
        now = 1 - now;
    }
    rows_finish(&run);
}
