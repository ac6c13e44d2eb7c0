/*
 * A unit of attention: some rows of some items and some KV heads over one range of what they see.
 *
 * A row is a query of one head; the rows of an item and KV head are numbered query by query, so
 * that the query heads that share a KV head lie side by side and its K/V is read once for them.
 * Rows of several items are together where the items share the pages that are gone over. KV heads
 * go together, as many as fit, because a block holds all of its heads: going through it in one go
 * is easy on page tables and on memory.
 */
#ifndef KVK_GPU_ATTEND_UNIT_H
#define KVK_GPU_ATTEND_UNIT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "gpu/attend.h"
#include "gpu/attend_kernel.h"
#include "gpu/attend_visible.h"

/* Rows of one item, of each head. */
struct kvk_attend_run {
    uint32_t item;
    uint64_t first_row; /* of the item's rows of a head */
    uint32_t row_count;
};

struct kvk_attend_unit {
    const struct kvk_attend_run *runs; /* [run_count], all of the same pages; borrowed */
    uint32_t run_count;
    uint32_t first_head; /* KV heads */
    uint32_t head_count;
    uint32_t row_count; /* of each head, over all runs; of all heads 1 to KVK_ATTEND_ROWS_MAX */
    struct kvk_attend_visible visible; /* what this unit goes over; the rows may see less of it */
    float *output; /* [head_count][row_count][head_size_v], where it is one of several; or NULL */
    float *lse;    /* [head_count][row_count], likewise */
};

/* Rows of all heads, in order: row `r` is row r % row_count of head r / row_count. */
static inline uint32_t kvk_attend_unit_rows(const struct kvk_attend_unit *unit)
{
    return unit->head_count * unit->row_count;
}

/* What the rows see of positions in `range`, whole; the plan cuts it. */
struct kvk_attend_visible kvk_attend_unit_visible(const struct kvk_attend *attend,
                                                  const struct kvk_attend_unit *unit,
                                                  struct kvk_token_range range);

/* Which row of an item's [query_count x query_heads] row `head_row` of a KV head is. */
uint64_t kvk_attend_item_row(const struct kvk_attend *attend, uint32_t head, uint64_t head_row);

/* Bytes of scratch memory, a multiple of 64, for units of up to `row_count` rows. */
size_t kvk_attend_unit_scratch_bytes(const struct kvk_attend_kernel *kernel,
                                     const struct kvk_attend *attend, uint32_t row_count);

/* `scratch` is aligned to 64 bytes; what is in it does not matter. */
void kvk_attend_unit_run(const struct kvk_attend_kernel *kernel, const struct kvk_attend *attend,
                         const struct kvk_attend_unit *unit, uint8_t *scratch);

#endif
