/* Is this a batch that can be attended? Every device asks here first, so none needs to ask. */
#include "gpu/attend.h"

#include <math.h>
#include <stdio.h>

/* No position or length comes near the end of 64 bits, so sums of a few never overflow. */
#define POSITION_MAX (UINT64_C(1) << 62)

static enum kvk_status refuse(struct kvk_error *error, const char *field, uint64_t value,
                              const char *reason)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, 0, "%s (%llu) %s",
                          field, (unsigned long long)value, reason);
}

static enum kvk_status refuse_item(struct kvk_error *error, uint32_t item, const char *name,
                                   uint64_t value, const char *reason)
{
    char field[KVK_ERROR_FIELD_SIZE];

    (void)snprintf(field, sizeof(field), "items[%u].%s", item, name);
    return refuse(error, field, value, reason);
}

struct count_limit {
    const char *field;
    uint32_t value;
    uint32_t limit;
};

static enum kvk_status counts_check(const struct kvk_attend *attend, struct kvk_error *error)
{
    const struct count_limit counts[] = {
        {"item_count", attend->item_count, UINT32_MAX},
        {"query_heads", attend->query_heads, KVK_HEAD_COUNT_MAX},
        {"kv_heads", attend->kv_heads, KVK_HEAD_COUNT_MAX},
        {"head_size_k", attend->head_size_k, KVK_HEAD_SIZE_MAX},
        {"head_size_v", attend->head_size_v, KVK_HEAD_SIZE_MAX},
        {"block_tokens", attend->block_tokens, KVK_BLOCK_TOKENS_MAX},
    };

    for (size_t i = 0; i < sizeof(counts) / sizeof(counts[0]); i++) {
        if (counts[i].value == 0 || counts[i].value > counts[i].limit) {
            return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, counts[i].field,
                                  counts[i].value, counts[i].limit, "%s (%u) must be 1 to %u",
                                  counts[i].field, counts[i].value, counts[i].limit);
        }
    }
    if (attend->query_heads % attend->kv_heads != 0) {
        return refuse(error, "query_heads", attend->query_heads, "must be a multiple of kv_heads");
    }
    if (attend->latent && attend->head_size_v > attend->head_size_k) {
        return refuse(error, "head_size_v", attend->head_size_v,
                      "must be at most head_size_k where latent");
    }
    return KVK_OK;
}

static enum kvk_status formats_check(const struct kvk_attend *attend, struct kvk_error *error)
{
    if (kvk_format_bytes(attend->format_q) == 0) {
        return refuse(error, "format_q", (uint64_t)attend->format_q, "is not known");
    }
    if (!kvk_format_is_known(attend->format_k)) {
        return refuse(error, "format_k", (uint64_t)attend->format_k, "is not known");
    }
    if (!attend->latent && !kvk_format_is_known(attend->format_v)) {
        return refuse(error, "format_v", (uint64_t)attend->format_v, "is not known");
    }
    enum kvk_format format_v = attend->latent ? attend->format_k : attend->format_v;
    if (attend->format_k != format_v &&
        (kvk_format_is_compact(attend->format_k) || kvk_format_is_compact(format_v))) {
        return refuse(error, "format_v", (uint64_t)format_v,
                      "must be format_k where one of them is compact");
    }
    if (attend->latent && attend->format_k == KVK_FORMAT_INT8_CHANNEL) {
        return refuse(error, "format_k", (uint64_t)attend->format_k, "cannot be of a latent cache");
    }
    if (!kvk_format_fits(attend->format_k, attend->head_size_k)) {
        return refuse(error, "head_size_k", attend->head_size_k, "must be a multiple of 32");
    }
    if (!kvk_format_fits(format_v, attend->head_size_v)) {
        return refuse(error, "head_size_v", attend->head_size_v, "must be a multiple of 32");
    }
    if (!isfinite(attend->scale)) {
        return refuse(error, "scale", 0, "must be a finite number");
    }
    if (!isfinite(attend->soft_cap) || attend->soft_cap < 0) {
        return refuse(error, "soft_cap", 0, "must be 0 or a positive finite number");
    }
    return KVK_OK;
}

/* One number per query head; the index of a bad one is part of the field's name. */
static enum kvk_status per_head_check(const struct kvk_attend *attend, const char *name,
                                      const float *values, bool lowest_allowed,
                                      struct kvk_error *error)
{
    char field[KVK_ERROR_FIELD_SIZE];

    for (uint32_t i = 0; values != NULL && i < attend->query_heads; i++) {
        if (!isfinite(values[i]) && !(lowest_allowed && values[i] == -INFINITY)) {
            (void)snprintf(field, sizeof(field), "%s[%u]", name, i);
            return refuse(error, field, 0, "must be a finite number");
        }
    }
    return KVK_OK;
}

/* The layer's K or V must lie in a shard that a geometry can have. */
static enum kvk_status offset_check(const char *field, uint64_t offset, const struct kvk_part *part,
                                    struct kvk_error *error)
{
    uint64_t size_bytes = part->size_bytes;

    if (offset > KVK_BLOCK_BYTES_MAX || size_bytes > KVK_BLOCK_BYTES_MAX - offset) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, offset,
                              KVK_BLOCK_BYTES_MAX, "%s (%llu) and the layer's %llu bytes pass %llu",
                              field, (unsigned long long)offset, (unsigned long long)size_bytes,
                              (unsigned long long)KVK_BLOCK_BYTES_MAX);
    }
    return KVK_OK;
}

/* A table that ends before the tokens do is a mistake; pages that are absent are meant so. */
static enum kvk_status pages_check(const struct kvk_attend *attend, uint32_t index,
                                   struct kvk_error *error)
{
    const struct kvk_attend_item *item = &attend->items[index];
    uint64_t end = item->first_token + (uint64_t)item->page_count * attend->block_tokens;

    if (item->pages == NULL && item->page_count > 0) {
        return refuse_item(error, index, "pages", item->page_count, "are missing");
    }
    if (end < item->token_count) {
        return refuse_item(error, index, "pages", end, "is where the pages end, before the tokens");
    }
    return KVK_OK;
}

static enum kvk_status item_check(const struct kvk_attend *attend, uint32_t index,
                                  struct kvk_error *error)
{
    const struct kvk_attend_item *item = &attend->items[index];

    if (item->query_count == 0) {
        return refuse_item(error, index, "query_count", 0, "must be at least 1");
    }
    if (item->queries == NULL) {
        return refuse_item(error, index, "queries", 0, "is missing");
    }
    if (item->output == NULL) {
        return refuse_item(error, index, "output", 0, "is missing");
    }
    if (item->lse == NULL) {
        return refuse_item(error, index, "lse", 0, "is missing");
    }
    if (item->position > POSITION_MAX) {
        return refuse_item(error, index, "position", item->position, "is past any sequence");
    }
    if (item->token_count > POSITION_MAX) {
        return refuse_item(error, index, "token_count", item->token_count, "is past any sequence");
    }
    if (item->first_token > POSITION_MAX) {
        return refuse_item(error, index, "first_token", item->first_token, "is past any sequence");
    }
    return pages_check(attend, index, error);
}

enum kvk_status kvk_attend_check(const struct kvk_attend *attend, struct kvk_error *error)
{
    enum kvk_status status = counts_check(attend, error);
    if (status == KVK_OK) {
        status = formats_check(attend, error);
    }
    if (status == KVK_OK) {
        status = per_head_check(attend, "alibi_slopes", attend->alibi_slopes, false, error);
    }
    if (status == KVK_OK) {
        status = per_head_check(attend, "sink_logits", attend->sink_logits, true, error);
    }
    if (status == KVK_OK) {
        const struct kvk_part part = kvk_attend_part(attend, false);
        status = offset_check("k_offset", attend->k_offset, &part, error);
    }
    if (status == KVK_OK && !attend->latent) {
        const struct kvk_part part = kvk_attend_part(attend, true);
        status = offset_check("v_offset", attend->v_offset, &part, error);
    }
    if (status == KVK_OK && attend->items == NULL) {
        status = refuse(error, "items", attend->item_count, "are missing");
    }
    for (uint32_t i = 0; status == KVK_OK && i < attend->item_count; i++) {
        status = item_check(attend, i, error);
    }
    return status;
}
