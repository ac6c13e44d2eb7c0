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
    uint32_t area_count;
    struct kvk_attend_area areas[2 * KVK_ATTEND_TILE_TOKENS]; /* the same, as it lies in pages */
};

/* A running unit. */
struct run {
    const struct kvk_attend_kernel *kernel;
    const struct kvk_attend *attend;
    const struct kvk_attend_unit *unit;
    const struct kvk_attend_item *item;
    uint32_t group; /* query heads per KV head */
    size_t k_bytes; /* of a token of a head */
    size_t v_bytes;
    struct kvk_attend_rows rows;    /* of all heads */
    float *scores;                  /* [row_count][KVK_ATTEND_TILE_TOKENS] */
    struct kvk_attend_visible left; /* what no tile was made of yet */
};

static uint32_t group_of(const struct kvk_attend *attend)
{
    return attend->query_heads / attend->kv_heads;
}

struct kvk_attend_visible kvk_attend_unit_visible(const struct kvk_attend *attend,
                                                  const struct kvk_attend_unit *unit)
{
    const struct kvk_attend_item *item = &attend->items[unit->item];
    uint32_t group = group_of(attend);
    uint64_t first_query = unit->first_row / group;
    uint64_t last_query = (unit->first_row + unit->row_count - 1) / group;

    return kvk_attend_visible(attend, item, item->position + first_query,
                              last_query - first_query + 1);
}

uint64_t kvk_attend_unit_item_row(const struct kvk_attend *attend,
                                  const struct kvk_attend_unit *unit, uint32_t row)
{
    uint32_t group = group_of(attend);
    KVK_ASSERT(unit->row_count > 0);
    uint64_t head_row = unit->first_row + row % unit->row_count;
    uint64_t kv_head = unit->first_head + row / unit->row_count;

    return head_row / group * attend->query_heads + kv_head * group + head_row % group;
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
           score_bytes(row_count) + 2 * align(row_count * sizeof(float));
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

    size_t query_bytes = run->attend->head_size_k * kvk_format_bytes(run->attend->format_q);
    for (uint32_t row = 0; row < count; row++) {
        const uint8_t *query = run->item->queries;
        query += kvk_attend_unit_item_row(run->attend, run->unit, row) * query_bytes;
        run->kernel->pack(run->attend, query, queries + row * rows->query_stride_bytes);
        rows->max[row] = -INFINITY;
        rows->sum[row] = 0;
    }
    rows->queries = queries;
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
    uint64_t position = run->item->position + (run->unit->first_row + row) / run->group;
    struct mask mask = {0, tile->count};

    while (attend->causal && mask.end > 0 && tile->positions[mask.end - 1] > position) {
        mask.end--;
    }
    while (tile->windowed && mask.begin < mask.end &&
           tile->positions[mask.begin] + attend->window <= position) {
        mask.begin++;
    }
    return mask;
}

/* The tokens of a tile as head `head` of the unit has them. */
static struct kvk_attend_tokens tile_tokens(const struct run *run, const struct tile *tile,
                                            uint32_t head, struct mask mask)
{
    return (struct kvk_attend_tokens){
        .k = tile->k + mask.begin,
        .v = tile->v + mask.begin,
        .k_offset = (size_t)head * run->attend->block_tokens * run->k_bytes,
        .v_offset = (size_t)head * run->attend->block_tokens * run->v_bytes,
        .count = mask.end - mask.begin,
    };
}

/* Fold tokens into rows that all see them. */
static void rows_fold(const struct run *run, uint32_t first_row, uint32_t row_count,
                      const struct kvk_attend_tokens *tokens, struct kvk_attend_fetch *fetch)
{
    const struct kvk_attend_rows rows = {
        .count = row_count,
        .queries = run->rows.queries + first_row * run->rows.query_stride_bytes,
        .query_stride_bytes = run->rows.query_stride_bytes,
        .max = run->rows.max + first_row,
        .sum = run->rows.sum + first_row,
        .values = run->rows.values + first_row * run->rows.value_stride,
        .value_stride = run->rows.value_stride,
    };

    run->kernel->score(run->attend, &rows, tokens, fetch, run->scores);
    run->kernel->soften(run->attend, &rows, tokens->count, run->scores);
    run->kernel->weigh(run->attend, &rows, tokens, fetch, run->scores);
}

/*
 * Fold a tile into the rows of one head. Rows of which each sees the same tokens go together: in
 * most tiles all of them. Masked tokens are left out rather than weighed with 0, since 0 times a
 * NaN is a NaN.
 */
static void head_fold(const struct run *run, uint32_t head, const struct tile *tile,
                      struct kvk_attend_fetch *fetch)
{
    uint32_t row_count = run->unit->row_count;
    uint32_t row = 0;

    while (row < row_count) {
        struct mask mask = tile_mask(run, tile, row);
        uint32_t end_row = row + 1;
        while (end_row < row_count) {
            struct mask other = tile_mask(run, tile, end_row);
            if (other.begin != mask.begin || other.end != mask.end) {
                break;
            }
            end_row++;
        }
        if (mask.begin < mask.end) {
            struct kvk_attend_tokens tokens = tile_tokens(run, tile, head, mask);
            rows_fold(run, head * row_count + row, end_row - row, &tokens, fetch);
        }
        row = end_row;
    }
}

/* Half of a head's share is fetched while scores are made, half while values are weighed. */
static struct kvk_attend_fetch tile_fetch(const struct run *run, const struct tile *tile)
{
    size_t token_bytes = run->k_bytes + (run->attend->latent ? 0 : run->v_bytes);
    struct kvk_attend_fetch fetch = {
        .area = tile->areas,
        .area_end = tile->areas + tile->area_count,
        .run_count = run->unit->head_count,
        .runs_left = run->unit->head_count,
        .line_count = (uint32_t)kvk_attend_steps(tile->count * token_bytes,
                                                 (size_t)2 * KVK_ATTEND_LINE_BYTES),
    };

    if (tile->area_count > 0) {
        fetch.run = tile->areas[0].begin;
        fetch.next = fetch.run;
        fetch.end = fetch.run + tile->areas[0].run_bytes;
    }
    return fetch;
}

static void tile_fold(const struct run *run, const struct tile *tile, const struct tile *next)
{
    struct kvk_attend_fetch fetch = tile_fetch(run, next);

    for (uint32_t head = 0; head < run->unit->head_count; head++) {
        head_fold(run, head, tile, &fetch);
    }
}

void kvk_attend_unit_run(const struct kvk_attend_kernel *kernel, const struct kvk_attend *attend,
                         const struct kvk_attend_unit *unit, uint8_t *scratch)
{
    const struct kvk_attend_item *item = &attend->items[unit->item];
    struct run run = {
        .kernel = kernel,
        .attend = attend,
        .unit = unit,
        .item = item,
        .group = group_of(attend),
        .k_bytes = attend->head_size_k * kvk_format_bytes(attend->format_k),
        .v_bytes = attend->head_size_v * kvk_format_bytes(attend->format_v),
        .left = unit->visible,
    };
    struct tile tiles[2];
    uint32_t now = 0;

    if (attend->latent) {
        run.v_bytes = run.k_bytes;
    }
    run_init(&run, scratch);
    tile_next(&run, &tiles[now]);
    while (tiles[now].count > 0) {
        tile_next(&run, &tiles[1 - now]);
        tile_fold(&run, &tiles[now], &tiles[1 - now]);
        now = 1 - now;
    }
    for (uint32_t row = 0; row < run.rows.count; row++) {
        uint64_t item_row = kvk_attend_unit_item_row(attend, unit, row);
        float *output = item->output + item_row * attend->head_size_v;
        float *lse = item->lse + item_row;
        if (unit->output != NULL) {
            output = unit->output + (size_t)row * attend->head_size_v;
            lse = unit->lse + row;
        }
        kernel->finish(attend, &run.rows, row, output, lse);
    }
}
