/* Attention over compact formats for AVX-512. */
#include "gpu/attend_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

#include "gpu/attend_lanes_avx512.inc"
#include "gpu/compact_lanes_avx512.inc"
#include "gpu/attend_compact_lanes.inc"

#define PLAIN kvk_attend_avx512
#define COMPACT kvk_attend_compact_avx512
#define NAME "avx512"

#include "gpu/attend_compact_rest.inc"
