/* Attention over compact formats for AVX2. */
#include "gpu/attend_kernel.h"

#include <math.h>
#include <string.h>

#include "base/assert.h"

#include "gpu/attend_lanes_avx2.inc"
#include "gpu/compact_lanes_avx2.inc"
#include "gpu/attend_compact_lanes.inc"

#define PLAIN kvk_attend_avx2
#define COMPACT kvk_attend_compact_avx2
#define NAME "avx2"

#include "gpu/attend_compact_rest.inc"
