/* The conversions of a build for x86-64, best first. */
#include "gpu/convert_kernel.h"

const struct kvk_convert_kernel *const kvk_convert_kernels[] = {
    &kvk_convert_avx512,
    &kvk_convert_avx2,
    &kvk_convert_plain,
    NULL,
};
