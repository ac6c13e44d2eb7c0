#include "gpu/attend_unit.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

/* Tokens in order, of one range; with gaps where pages are absent. */
struct tile {
    uint32_t count; /* 0: there are no more */
    bool windowed;  /* the window binds these: they are not the sinks */
    uint64_t positions[KVK_ATTEND_TILE_TOKENS];
    const uint8_t *k[KVK_ATTEND_TILE_TOKENS];
    const uint8_t *v[KVK_ATTEND_TILE_TOKENS];
};

/* A running unit. */
struct run {
    const struct kvk_attend_kernel *kernel;
    const struct kvk_attend *attend;
    const struct kvk_attend_unit *unit;
    const struct kvk_attend_item *item;
    uint32_t group; /* query heads per KV head */
    struct kvk_attend_rows rows;
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
    uint64_t query = (unit->first_row + row) / group;
    uint64_t head = (uint64_t)unit->kv_head * group + (unit->first_row + row) % group;

    return query * attend->query_heads + head;
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
    uint32_t count = run->unit->row_count;

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
        (uint64_t)run->unit->kv_head * attend->block_tokens + slot % attend->block_tokens;
    size_t k_bytes = attend->head_size_k * kvk_format_bytes(attend->format_k);
    size_t v_bytes =
        attend->latent ? k_bytes : attend->head_size_v * kvk_format_bytes(attend->format_v);
    uint64_t v_offset = attend->latent ? attend->k_offset : attend->v_offset;

    if (page == NULL) {
        return;
    }
    const uint8_t *k = page + attend->k_offset + token_row * k_bytes;
    const uint8_t *v = page + v_offset + token_row * v_bytes;
    for (uint32_t i = 0; i < count; i++) {
        tile->positions[tile->count + i] = first + i;
        tile->k[tile->count + i] = k + i * k_bytes;
        tile->v[tile->count + i] = v + i * v_bytes;
    }
    tile->count += count;
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
    tile->windowed = false;
    tile_fill(run, tile, &run->left.sinks);
    if (tile->count == 0) {
        tile->windowed = run->attend->window != 0;
        tile_fill(run, tile, &run->left.rest);
    }
}

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

/* Fold the tokens of a mask into rows that all see them. */
static void rows_fold(const struct run *run, uint32_t first_row, uint32_t row_count,
                      const struct tile *tile, struct mask mask, const struct tile *ahead)
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
    const struct kvk_attend_tile tokens = {
        .k = tile->k + mask.begin,
        .v = tile->v + mask.begin,
        .count = mask.end - mask.begin,
        .ahead_k = ahead->k,
        .ahead_v = ahead->v,
        .ahead_count = ahead->count,
    };

    run->kernel->score(run->attend, &rows, &tokens, run->scores);
    run->kernel->soften(run->attend, &rows, tokens.count, run->scores);
    run->kernel->weigh(run->attend, &rows, &tokens, run->scores);
}

/*
 * Rows of which each sees the same tokens go together: in most tiles all of them. Masked tokens
 * are left out rather than weighed with 0, since 0 times a NaN is a NaN.
 */
static void tile_fold(const struct run *run, const struct tile *tile, const struct tile *ahead)
{
    uint32_t row = 0;

    while (row < run->unit->row_count) {
        struct mask mask = tile_mask(run, tile, row);
        uint32_t end_row = row + 1;
        while (end_row < run->unit->row_count) {
            struct mask other = tile_mask(run, tile, end_row);
            if (other.begin != mask.begin || other.end != mask.end) {
                break;
            }
            end_row++;
        }
        if (mask.begin < mask.end) {
            rows_fold(run, row, end_row - row, tile, mask, ahead);
        }
        row = end_row;
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
        .left = unit->visible,
    };
    struct tile tiles[2];
    uint32_t now = 0;

    run_init(&run, scratch);
    tile_next(&run, &tiles[now]);
    while (tiles[now].count > 0) {
        tile_next(&run, &tiles[1 - now]);
        tile_fold(&run, &tiles[now], &tiles[1 - now]);
        now = 1 - now;
    }
    for (uint32_t row = 0; row < unit->row_count; row++) {
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
