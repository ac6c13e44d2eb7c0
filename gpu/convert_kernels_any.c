/* The conversions of a build for any processor. */
#include "gpu/convert_kernel.h"

const struct kvk_convert_kernel *const kvk_convert_kernels[] = {
    &kvk_convert_plain,
    NULL,
};
