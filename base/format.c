#include "base/format.h"

#include "base/assert.h"

const char *kvk_format_name(enum kvk_format format)
{
    switch (format) {
    case KVK_FORMAT_NONE:
        return "none";
    case KVK_FORMAT_FP32:
        return "fp32";
    case KVK_FORMAT_FP16:
        return "fp16";
    case KVK_FORMAT_BF16:
        return "bf16";
    case KVK_FORMAT_FP8_E4M3:
        return "fp8_e4m3";
    case KVK_FORMAT_INT8_CHANNEL:
        return "int8_channel";
    case KVK_FORMAT_INT8_32:
        return "int8_32";
    }
    return "unknown";
}

size_t kvk_format_bytes(enum kvk_format format)
{
    switch (format) {
    case KVK_FORMAT_FP32:
        return 4;
    case KVK_FORMAT_FP16:
    case KVK_FORMAT_BF16:
        return 2;
    case KVK_FORMAT_NONE:
    case KVK_FORMAT_FP8_E4M3:
    case KVK_FORMAT_INT8_CHANNEL:
    case KVK_FORMAT_INT8_32:
        return 0;
    }
    return 0;
}

bool kvk_format_is_compact(enum kvk_format format)
{
    return format == KVK_FORMAT_FP8_E4M3 || format == KVK_FORMAT_INT8_CHANNEL ||
           format == KVK_FORMAT_INT8_32;
}

bool kvk_format_is_known(enum kvk_format format)
{
    return kvk_format_bytes(format) != 0 || kvk_format_is_compact(format);
}

size_t kvk_format_align(enum kvk_format format)
{
    switch (format) {
    case KVK_FORMAT_FP32:
    case KVK_FORMAT_FP8_E4M3:
        return 4;
    case KVK_FORMAT_FP16:
    case KVK_FORMAT_BF16:
    case KVK_FORMAT_INT8_CHANNEL:
    case KVK_FORMAT_INT8_32:
        return 2;
    case KVK_FORMAT_NONE:
        return 0;
    }
    return 0;
}

bool kvk_format_fits(enum kvk_format format, uint32_t head_size)
{
    return format != KVK_FORMAT_INT8_32 || head_size % KVK_INT8_32_VALUES == 0;
}

size_t kvk_format_row_bytes(enum kvk_format format, uint32_t head_size)
{
    switch (format) {
    case KVK_FORMAT_FP32:
    case KVK_FORMAT_FP16:
    case KVK_FORMAT_BF16:
        return head_size * kvk_format_bytes(format);
    case KVK_FORMAT_FP8_E4M3:
    case KVK_FORMAT_INT8_CHANNEL:
        return head_size;
    case KVK_FORMAT_INT8_32:
        return (size_t)head_size / KVK_INT8_32_VALUES * KVK_INT8_32_BYTES;
    case KVK_FORMAT_NONE:
        return 0;
    }
    return 0;
}

static uint64_t padded(uint64_t size_bytes)
{
    return (size_bytes + KVK_FORMAT_PART_ALIGN - 1) / KVK_FORMAT_PART_ALIGN * KVK_FORMAT_PART_ALIGN;
}

/* Bytes of one head's scales that follow the rows. */
static uint64_t scale_bytes(const struct kvk_part *part)
{
    if (part->format == KVK_FORMAT_FP8_E4M3) {
        return sizeof(float);
    }
    if (part->format == KVK_FORMAT_INT8_CHANNEL) {
        return sizeof(uint16_t) * (uint64_t)(part->is_value ? part->tokens : part->head_size);
    }
    return 0;
}

struct kvk_part kvk_part_of(enum kvk_format format, bool is_value, uint32_t heads, uint32_t tokens,
                            uint32_t head_size)
{
    struct kvk_part part = {.format = format,
                            .is_value = is_value,
                            .heads = heads,
                            .tokens = tokens,
                            .head_size = head_size};

    KVK_ASSERT(kvk_format_fits(format, head_size));
    part.row_bytes = kvk_format_row_bytes(format, head_size);
    part.scale_stride = scale_bytes(&part);
    part.size_bytes = part.row_bytes * tokens * heads;
    if (part.scale_stride != 0) {
        part.scales_offset = padded(part.size_bytes);
        part.size_bytes = part.scales_offset + padded(part.scale_stride * heads);
    }
    return part;
}
