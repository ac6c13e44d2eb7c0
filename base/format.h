/*
 * How values of K and V are stored, and where the scales of compact formats lie.
 *
 * K of one layer of a shard is a part, V another: [head][token] rows, one after the other (or
 * [token][head], where tokens come first; the bytes are as many). Compact formats store what was
 * divided by a scale, and the scales inside the part, so that they are counted in the block's size
 * and move with it:
 *
 *     fp8_e4m3      1 byte a value (OCP E4M3: 1 sign, 4 exponent, 3 fraction bits, bias 7; no
 *                   infinities, 0x7f and 0xff are NaN). One fp32 scale per head: [head]
 *     int8_channel  1 signed byte a value. K: one bf16 scale per channel, that is per head and
 *                   index in it: [head][head_size]. V: one bf16 scale per token: [head][token]
 *     int8_32       34 bytes for every 32 values of a row: one fp16 scale, then 32 signed bytes
 *
 * A value is what is stored times its scale. The scales of the first two follow all rows of the
 * part, heads first whatever the layout; rows and scales are each padded to 16 bytes, so that the
 * next part begins where vectors can be loaded. Everything is little endian.
 */
#ifndef KVK_BASE_FORMAT_H
#define KVK_BASE_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How one value of K or V is stored. The numbers travel in the API and lie in the catalogue; only
 * add. */
enum kvk_format {
    KVK_FORMAT_NONE = 0,
    KVK_FORMAT_FP32 = 1,
    KVK_FORMAT_FP16 = 2,
    KVK_FORMAT_BF16 = 3,
    KVK_FORMAT_FP8_E4M3 = 4,
    KVK_FORMAT_INT8_CHANNEL = 5,
    KVK_FORMAT_INT8_32 = 6,
};

#define KVK_FORMAT_MAX KVK_FORMAT_INT8_32

/* Values that share a scale in int8_32, and the bytes that they and it take. */
#define KVK_INT8_32_VALUES 32
#define KVK_INT8_32_BYTES 34

/* What parts of compact formats, and their scales, are padded to. */
#define KVK_FORMAT_PART_ALIGN 16

const char *kvk_format_name(enum kvk_format format); /* "bf16"; "unknown" */

/* Bytes per value of a plain format; 0 for compact ones, NONE and unknown numbers. */
size_t kvk_format_bytes(enum kvk_format format);

/* Plain or compact: values can be stored in it. */
bool kvk_format_is_known(enum kvk_format format);
/* Values have scales, and rounding has lost something of them. */
bool kvk_format_is_compact(enum kvk_format format);

/* What a row of values, or an array of scales, begins at a multiple of. 0: not known. */
size_t kvk_format_align(enum kvk_format format);

/* Rows have whole groups: a head size that int8_32 cannot cut into 32 is none. */
bool kvk_format_fits(enum kvk_format format, uint32_t head_size);

/* Bytes of the values (and scales among them) of one token of one head. The head size fits. */
size_t kvk_format_row_bytes(enum kvk_format format, uint32_t head_size);

/* K or V of one layer of a shard. */
struct kvk_part {
    enum kvk_format format;
    bool is_value; /* V; false: K */
    uint32_t heads;
    uint32_t tokens;
    uint32_t head_size;
    uint64_t row_bytes;     /* of one token of one head */
    uint64_t scales_offset; /* from the part's start; 0: there are none, or they lie in the rows */
    uint64_t scale_stride;  /* bytes from one head's scales to the next's */
    uint64_t size_bytes;
};

struct kvk_part kvk_part_of(enum kvk_format format, bool is_value, uint32_t heads, uint32_t tokens,
                            uint32_t head_size);

#endif
