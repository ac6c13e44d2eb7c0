/* The kernels of a build for x86-64, best first. */
#include "gpu/attend_kernel.h"

const struct kvk_attend_kernel *const kvk_attend_kernels[] = {
    &kvk_attend_avx512_bf16, &kvk_attend_avx512, &kvk_attend_avx2, &kvk_attend_plain, NULL,
};
