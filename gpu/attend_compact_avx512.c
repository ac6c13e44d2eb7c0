/* Attention over compact formats for AVX-512; what is not of K and V is as in gpu/attend_avx512.c.
 */
#include "gpu/attend_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

#include "gpu/attend_lanes_avx512.inc"
#include "gpu/compact_lanes_avx512.inc"
#include "gpu/attend_compact_lanes.inc"

static bool compact_available(void)
{
    return kvk_attend_avx512.available();
}

static size_t compact_packed_bytes(const struct kvk_attend *attend)
{
    return kvk_attend_avx512.packed_bytes(attend);
}

static void compact_pack(const struct kvk_attend *attend, const uint8_t *query, uint8_t *packed)
{
    kvk_attend_avx512.pack(attend, query, packed);
}

static void compact_soften(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                           uint32_t token_count, float *scores)
{
    kvk_attend_avx512.soften(attend, rows, token_count, scores);
}

static void compact_finish(const struct kvk_attend *attend, const struct kvk_attend_rows *rows,
                           uint32_t row, float *output, float *lse)
{
    kvk_attend_avx512.finish(attend, rows, row, output, lse);
}

const struct kvk_attend_kernel kvk_attend_compact_avx512 = {
    .name = "avx512",
    .available = compact_available,
    .packed_bytes = compact_packed_bytes,
    .pack = compact_pack,
    .score = compact_score,
    .soften = compact_soften,
    .weigh = compact_weigh,
    .finish = compact_finish,
};
