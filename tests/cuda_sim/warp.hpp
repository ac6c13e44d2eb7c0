/* What a warp computes together, once all of its lanes have come. */
#pragma once

#include "tests/cuda_sim/kernel_side.hpp"

namespace kvk_sim
{

/* [32] each. */
void warp_compute(enum warp_work work, const lane_in *in, lane_out *out);

} // namespace kvk_sim
