#include "gpu/convert.h"

#include <string.h>

#include "base/assert.h"
#include "gpu/convert_kernel.h"

const struct kvk_convert_kernel *kvk_convert_find(const char *path)
{
    for (const struct kvk_convert_kernel *const *kernel = kvk_convert_kernels; *kernel != NULL;
         kernel++) {
        if ((path == NULL || strcmp((*kernel)->name, path) == 0) && (*kernel)->available()) {
            return *kernel;
        }
    }
    return NULL;
}

const char *kvk_convert_name(const struct kvk_convert_kernel *kernel)
{
    return kernel->name;
}

static void parts_check(const struct kvk_part *wide, const struct kvk_part *narrow)
{
    KVK_ASSERT(kvk_format_bytes(wide->format) != 0);
    KVK_ASSERT(kvk_format_is_compact(narrow->format));
    KVK_ASSERT(wide->heads == narrow->heads);
    KVK_ASSERT(wide->tokens == narrow->tokens);
    KVK_ASSERT(wide->head_size == narrow->head_size);
    KVK_ASSERT(wide->is_value == narrow->is_value);
}

/* Kernels write only the side that they make, so a plane may name what must not be written. */
static uint8_t *unwritten(const void *bytes)
{
    return (uint8_t *)(uintptr_t)bytes;
}

static struct kvk_convert_plane plane_of(const struct kvk_part *wide, uint8_t *wide_bytes,
                                         const struct kvk_part *narrow, uint8_t *narrow_bytes,
                                         uint32_t head)
{
    return (struct kvk_convert_plane){
        .wide = wide,
        .narrow = narrow,
        .wide_rows = wide_bytes + wide->row_bytes * wide->tokens * head,
        .narrow_rows = narrow_bytes + narrow->row_bytes * narrow->tokens * head,
        .scales = narrow_bytes + narrow->scales_offset + narrow->scale_stride * head,
    };
}

/* Zeros between rows and scales, and behind them. */
static void padding_clear(const struct kvk_part *part, uint8_t *bytes)
{
    if (part->scales_offset == 0) {
        return;
    }
    uint64_t rows_end = part->row_bytes * part->tokens * part->heads;
    uint64_t scales_end = part->scales_offset + part->scale_stride * part->heads;
    memset(bytes + rows_end, 0, part->scales_offset - rows_end);
    memset(bytes + scales_end, 0, part->size_bytes - scales_end);
}

/* The head that is refused, or the number of heads where all is well. */
static uint32_t part_narrow(const struct kvk_convert_kernel *kernel, const struct kvk_part *wide,
                            const void *source, const struct kvk_part *narrow, uint8_t *target)
{
    parts_check(wide, narrow);
    for (uint32_t head = 0; head < wide->heads; head++) {
        const struct kvk_convert_plane plane =
            plane_of(wide, unwritten(source), narrow, target, head);
        if (!kernel->narrow(&plane)) {
            return head;
        }
    }
    padding_clear(narrow, target);
    return wide->heads;
}

static enum kvk_status refuse(struct kvk_error *error, const struct kvk_part *part, uint32_t layer,
                              uint32_t head)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "format", part->format, 0,
                          "%s of layer %u, head %u is not finite: %s cannot hold it",
                          part->is_value ? "V" : "K", layer, head, kvk_format_name(part->format));
}

enum kvk_status kvk_convert_narrow(const struct kvk_convert_kernel *kernel,
                                   const struct kvk_part *wide, const void *source,
                                   const struct kvk_part *narrow, void *target,
                                   struct kvk_error *error)
{
    uint32_t head = part_narrow(kernel, wide, source, narrow, target);

    return head == wide->heads ? KVK_OK : refuse(error, narrow, 0, head);
}

void kvk_convert_widen(const struct kvk_convert_kernel *kernel, const struct kvk_part *narrow,
                       const void *source, const struct kvk_part *wide, void *target)
{
    parts_check(wide, narrow);
    for (uint32_t head = 0; head < wide->heads; head++) {
        const struct kvk_convert_plane plane =
            plane_of(wide, target, narrow, unwritten(source), head);
        kernel->widen(&plane);
    }
}

enum kvk_status kvk_convert_shard_narrow(const struct kvk_convert_kernel *kernel,
                                         const struct kvk_geometry *wide,
                                         const struct kvk_geometry *narrow, uint32_t shard,
                                         const void *source, void *target, struct kvk_error *error)
{
    KVK_ASSERT(wide->layout == KVK_LAYOUT_HEADS_FIRST && narrow->layout == wide->layout);
    uint32_t layers = kvk_geometry_shard_layers(wide, shard);

    for (uint32_t layer = 0; layer < layers; layer++) {
        for (int is_value = 0; is_value < (wide->latent ? 1 : 2); is_value++) {
            const struct kvk_part from = kvk_geometry_part(wide, shard, is_value != 0);
            const struct kvk_part to = kvk_geometry_part(narrow, shard, is_value != 0);
            const uint8_t *begin = source;
            uint8_t *end = target;
            begin += is_value != 0 ? kvk_geometry_v_offset(wide, shard, layer)
                                   : kvk_geometry_k_offset(wide, shard, layer);
            end += is_value != 0 ? kvk_geometry_v_offset(narrow, shard, layer)
                                 : kvk_geometry_k_offset(narrow, shard, layer);
            uint32_t head = part_narrow(kernel, &from, begin, &to, end);
            if (head < from.heads) {
                return refuse(error, &to, kvk_geometry_shard_first_layer(wide, shard) + layer,
                              kvk_geometry_shard_first_head(wide, shard) + head);
            }
        }
    }
    return KVK_OK;
}

void kvk_convert_shard_widen(const struct kvk_convert_kernel *kernel,
                             const struct kvk_geometry *narrow, const struct kvk_geometry *wide,
                             uint32_t shard, const void *source, void *target)
{
    KVK_ASSERT(wide->layout == KVK_LAYOUT_HEADS_FIRST && narrow->layout == wide->layout);
    uint32_t layers = kvk_geometry_shard_layers(wide, shard);

    for (uint32_t layer = 0; layer < layers; layer++) {
        for (int is_value = 0; is_value < (wide->latent ? 1 : 2); is_value++) {
            const struct kvk_part from = kvk_geometry_part(narrow, shard, is_value != 0);
            const struct kvk_part to = kvk_geometry_part(wide, shard, is_value != 0);
            const uint8_t *begin = source;
            uint8_t *end = target;
            begin += is_value != 0 ? kvk_geometry_v_offset(narrow, shard, layer)
                                   : kvk_geometry_k_offset(narrow, shard, layer);
            end += is_value != 0 ? kvk_geometry_v_offset(wide, shard, layer)
                                 : kvk_geometry_k_offset(wide, shard, layer);
            kvk_convert_widen(kernel, &from, begin, &to, end);
        }
    }
}
