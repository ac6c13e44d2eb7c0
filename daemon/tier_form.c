#include "daemon/tier_form.h"

#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/lock.h"
#include "gpu/convert.h"

static struct kvk_geometry narrowed(const struct kvk_geometry *geometry, enum kvk_format format)
{
    struct kvk_geometry narrow = *geometry;
    if (format != KVK_FORMAT_NONE) {
        narrow.format_k = format;
        narrow.format_v = geometry->format_v == KVK_FORMAT_NONE ? KVK_FORMAT_NONE : format;
    }
    return narrow;
}

static enum kvk_status refuse(struct kvk_error *error, const char *field, enum kvk_format format,
                              const char *why)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, (uint64_t)format, 0,
                          "%s: %s is not possible: %s", field, kvk_format_name(format), why);
}

enum kvk_status kvk_tier_form_check(const struct kvk_geometry *geometry, enum kvk_format format,
                                    const char *field, struct kvk_error *error)
{
    struct kvk_error reason;
    if (format == KVK_FORMAT_NONE) {
        return KVK_OK;
    }
    if (!kvk_format_is_compact(format)) {
        return refuse(error, field, format, "fp8_e4m3, int8_channel and int8_32 are compact");
    }
    if (geometry->layout != KVK_LAYOUT_HEADS_FIRST) {
        return refuse(error, field, format, "only blocks with heads first are converted");
    }
    if (kvk_format_is_compact(geometry->format_k)) {
        return refuse(error, field, format, "the group's own format is compact already");
    }
    const struct kvk_geometry narrow = narrowed(geometry, format);
    if (kvk_geometry_check(&narrow, "", &reason) != KVK_OK) {
        return refuse(error, field, format, reason.text);
    }
    return KVK_OK;
}

void kvk_tier_form_init(struct kvk_tier_form *form, const struct kvk_geometry *geometry,
                        enum kvk_format format)
{
    *form = (struct kvk_tier_form){
        .geometry = narrowed(geometry, format),
        .compact = format != KVK_FORMAT_NONE,
    };
    uint32_t shard_count = kvk_geometry_shard_count(geometry);
    for (uint32_t shard = 0; shard < shard_count; shard++) {
        form->shard_bytes[shard] = kvk_geometry_shard_bytes(&form->geometry, shard);
    }
    form->block_bytes = kvk_geometry_block_bytes(&form->geometry);
}

enum kvk_format kvk_tier_form_format(const struct kvk_tier_form *form)
{
    return form->compact ? form->geometry.format_k : KVK_FORMAT_NONE;
}

enum kvk_status kvk_tier_form_narrow(const struct kvk_geometry *own,
                                     const struct kvk_tier_form *form, uint32_t shard,
                                     const void *source, void *target, uint64_t *checksum,
                                     struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(form->compact);
    enum kvk_status status = kvk_convert_shard_narrow(kvk_convert_find(NULL), own, &form->geometry,
                                                      shard, source, target, error);
    if (status != KVK_OK) {
        memset(target, 0, form->shard_bytes[shard]);
        return status;
    }
    *checksum = kvk_checksum(target, form->shard_bytes[shard]);
    return KVK_OK;
}

void kvk_tier_form_widen(const struct kvk_tier_form *form, const struct kvk_geometry *own,
                         uint32_t shard, const void *source, void *target, uint64_t *checksum)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    KVK_ASSERT(form->compact);
    kvk_convert_shard_widen(kvk_convert_find(NULL), &form->geometry, own, shard, source, target);
    *checksum = kvk_checksum(target, kvk_geometry_shard_bytes(own, shard));
}
