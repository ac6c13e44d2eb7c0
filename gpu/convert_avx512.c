/* Conversion for AVX-512 (F, BW, DQ, VL). */
#include "gpu/convert_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "gpu/values.h"

#include "gpu/attend_lanes_avx512.inc"
#include "gpu/compact_lanes_avx512.inc"
#include "gpu/convert_lanes.inc"

static bool avx512_available(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

const struct kvk_convert_kernel kvk_convert_avx512 = {
    .name = "avx512",
    .available = avx512_available,
    .narrow = lanes_narrow,
    .widen = lanes_widen_plane,
};
