/* The kernels of a build for processors that have none of their own. */
#include "gpu/attend_kernel.h"

const struct kvk_attend_kernel *const kvk_attend_kernels[] = {
    &kvk_attend_plain,
    NULL,
};
