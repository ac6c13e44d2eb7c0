/* Conversion for AVX2 with F16C. */
#include "gpu/convert_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"
#include "gpu/values.h"

#include "gpu/attend_lanes_avx2.inc"
#include "gpu/compact_lanes_avx2.inc"
#include "gpu/convert_lanes.inc"

static bool avx2_available(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

const struct kvk_convert_kernel kvk_convert_avx2 = {
    .name = "avx2",
    .available = avx2_available,
    .narrow = lanes_narrow,
    .widen = lanes_widen_plane,
};
