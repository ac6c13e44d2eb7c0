/*
 * What a set of conversion kernels is: one head's plane of a part, for one instruction set.
 * gpu/convert.h has the rounding; every set does the same to the bit.
 */
#ifndef KVK_GPU_CONVERT_KERNEL_H
#define KVK_GPU_CONVERT_KERNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/format.h"

/* A head of a part: [tokens] rows and its scales, where they lie apart. */
struct kvk_convert_plane {
    const struct kvk_part *wide;
    const struct kvk_part *narrow;
    uint8_t *wide_rows; /* not written by narrow(), nor the others by widen() */
    uint8_t *narrow_rows;
    uint8_t *scales;
};

struct kvk_convert_kernel {
    const char *name;
    bool (*available)(void);
    bool (*narrow)(const struct kvk_convert_plane *plane); /* false: a value is not finite */
    void (*widen)(const struct kvk_convert_plane *plane);
};

/* Magnitudes of what can be stored, and the largest finite fp16 and bf16. */
#define KVK_INT8_LARGEST 127.0F
#define KVK_FP8_LARGEST 448.0F
#define KVK_FP16_LARGEST 65504.0F
#define KVK_BF16_LARGEST 0x1.fep127F
#define KVK_SCALE_LEAST 0x1p-126F /* below, 1 / scale could be infinite */

extern const struct kvk_convert_kernel kvk_convert_plain;
extern const struct kvk_convert_kernel kvk_convert_avx2;
extern const struct kvk_convert_kernel kvk_convert_avx512;

/* Those that this build has, best first, NULL at the end. */
extern const struct kvk_convert_kernel *const kvk_convert_kernels[];

#endif
