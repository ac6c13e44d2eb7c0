/*
 * From plain formats to compact ones and back: what moves to a tier that stores less, and returns.
 *
 * The rounding, in fp32 with every step rounded to nearest, ties to even, the same on every path:
 *     m = the largest magnitude of the values that share a scale
 *     int8_channel  scale = m / 127, to the next bf16 that is not smaller
 *     int8_32       scale = the nearest fp16 of m / 127, at most 65504
 *     fp8_e4m3      scale = m / 448
 *     stored = value x (1 / scale), to the nearest that the format has, at most 127 or 448
 * A scale below 2^-126 (int8_32: one that rounds to 0) is 0, and so is all that is stored under it.
 * Back: stored x scale, to the nearest of the wide format, at most its largest finite value; a NaN
 * in fp8 stays one.
 *
 * So a value comes back within half a step of its own (int8: scale / 2; fp8: 2^-4 of the value, or
 * scale x 2^-10 where that is more), and one that came back is no longer what was sealed. Values
 * that are not finite have no place in a compact format: they are refused.
 *
 * Parts lie heads first; both sides have the same heads, tokens and head size. Nothing needs to be
 * aligned. Memory alone; any thread.
 */
#ifndef KVK_GPU_CONVERT_H
#define KVK_GPU_CONVERT_H

#include "base/geometry.h"
#include "base/status.h"

struct kvk_convert_kernel;

/* The kernels called `path` ("avx512", "avx2", "plain"), or the best that this processor runs where
 * path is NULL. NULL: not known, or not for this processor. Static, never freed. */
const struct kvk_convert_kernel *kvk_convert_find(const char *path);
const char *kvk_convert_name(const struct kvk_convert_kernel *kernel);

/* One part, from plain to compact. KVK_INVALID: a value is not finite; what is then in the target
 * is of no use. Padding is written as zeros, so that equal values are equal bytes. */
KVK_CHECKED enum kvk_status kvk_convert_narrow(const struct kvk_convert_kernel *kernel,
                                               const struct kvk_part *wide, const void *source,
                                               const struct kvk_part *narrow, void *target,
                                               struct kvk_error *error);

/* One part, from compact to plain. */
void kvk_convert_widen(const struct kvk_convert_kernel *kernel, const struct kvk_part *narrow,
                       const void *source, const struct kvk_part *wide, void *target);

/*
 * A shard of a block: all layers, K and V. `wide` and `narrow` differ in their formats alone and
 * lie heads first. A refusal names the layer and the head.
 */
KVK_CHECKED enum kvk_status kvk_convert_shard_narrow(const struct kvk_convert_kernel *kernel,
                                                     const struct kvk_geometry *wide,
                                                     const struct kvk_geometry *narrow,
                                                     uint32_t shard, const void *source,
                                                     void *target, struct kvk_error *error);
void kvk_convert_shard_widen(const struct kvk_convert_kernel *kernel,
                             const struct kvk_geometry *narrow, const struct kvk_geometry *wide,
                             uint32_t shard, const void *source, void *target);

#endif
