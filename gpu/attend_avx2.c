/* Attention kernels for AVX2 with FMA and F16C. */
#include "gpu/attend_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

#include "gpu/attend_lanes_avx2.inc"

/* Sixteen registers are few, and enough for four rows of three vectors with all that meets them. */
#define WIDE_ROWS_MIN 32
#define WEIGH_VECTORS 3

#include "gpu/attend_lanes.inc"

/* F16C is older than AVX2, and no processor has one without the other; not every compiler can
 * ask for it. */
static bool avx2_available(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

const struct kvk_attend_kernel kvk_attend_avx2 = {
    .name = "avx2",
    .available = avx2_available,
    .compact = &kvk_attend_compact_avx2,
    .packed_bytes = lanes_packed_bytes,
    .pack = lanes_pack,
    .score = lanes_score,
    .soften = lanes_soften,
    .weigh = lanes_weigh,
    .finish = lanes_finish,
};
