/* Attention kernels for AVX-512 (F, BW, DQ, VL). */
#include "gpu/attend_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

#include "gpu/attend_lanes_avx512.inc"
/* With this many registers the narrow way holds out longer. */
#define WIDE_ROWS_MIN 32
#define WEIGH_VECTORS 4

#include "gpu/attend_lanes.inc"

static bool avx512_available(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const struct kvk_attend_kernel kvk_attend_avx512 = {
    .name = "avx512",
    .available = avx512_available,
    .compact = &kvk_attend_compact_avx512,
    .packed_bytes = lanes_packed_bytes,
    .pack = lanes_pack,
    .score = lanes_score,
    .soften = lanes_soften,
    .weigh = lanes_weigh,
    .finish = lanes_finish,
};
