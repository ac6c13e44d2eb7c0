/*
 * Identities as canonical bytes.
 *
 *     per part, in the order of enum kvk_identity_part:  u8 its number, u32 size, bytes
 *     per extra pair, sorted by name:                    u8 100, u32 size, name
 *                                                        u8 101, u32 size, value
 *
 * Numbers are little-endian. A part that is not given has size 0. Tag and length before each part
 * make it impossible to move bytes from one part to the next.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "daemon/space_internal.h"

#define PREFIX_SIZE (sizeof(uint8_t) + sizeof(uint32_t))

static const struct {
    const char *field;
    bool text; /* else any bytes */
} parts[KVK_IDENTITY_PART_COUNT] = {
    [KVK_IDENTITY_MODEL - 1] = {"identity.model", true},
    [KVK_IDENTITY_REVISION - 1] = {"identity.revision", true},
    [KVK_IDENTITY_TOKENIZER - 1] = {"identity.tokenizer_digest", false},
    [KVK_IDENTITY_TEMPLATE - 1] = {"identity.template_digest", false},
    [KVK_IDENTITY_POSITION - 1] = {"identity.position_encoding", true},
    [KVK_IDENTITY_ADAPTER_NAME - 1] = {"identity.adapter_name", true},
    [KVK_IDENTITY_ADAPTER_ID - 1] = {"identity.adapter_id", true},
    [KVK_IDENTITY_ADAPTER_VERSION - 1] = {"identity.adapter_version", true},
    [KVK_IDENTITY_KV_FORMAT - 1] = {"identity.kv_format", false},
    [KVK_IDENTITY_MASK - 1] = {"identity.mask_rule", true},
};

static enum kvk_status check_view(const char *field, const struct kvk_view *view, bool text,
                                  struct kvk_error *error)
{
    if (view->size > KVK_IDENTITY_PART_SIZE_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, view->size,
                              KVK_IDENTITY_PART_SIZE_MAX, "%s: %zu bytes, more than %d", field,
                              view->size, KVK_IDENTITY_PART_SIZE_MAX);
    }
    if (text && view->size > 0 && !kvk_utf8_ok(view->data, view->size)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s: must be UTF-8 without NUL",
                        field);
    }
    return KVK_OK;
}

static int compare_views(const struct kvk_view *a, const struct kvk_view *b)
{
    size_t size = a->size < b->size ? a->size : b->size;
    int order = size == 0 ? 0 : memcmp(a->data, b->data, size);
    if (order != 0) {
        return order;
    }
    return a->size < b->size ? -1 : a->size > b->size;
}

static enum kvk_status check_parts(const struct kvk_identity *identity, struct kvk_error *error)
{
    if (identity->parts[KVK_IDENTITY_MODEL - 1].size == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "identity.model",
                        "identity.model is required");
    }
    for (int i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        enum kvk_status status =
            check_view(parts[i].field, &identity->parts[i], parts[i].text, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

/* Check the extra pairs and find their order by name. */
static enum kvk_status sort_extra(const struct kvk_identity *identity,
                                  uint32_t order[KVK_IDENTITY_EXTRA_MAX], struct kvk_error *error)
{
    if (identity->extra_count > KVK_IDENTITY_EXTRA_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "identity.extra",
                              identity->extra_count, KVK_IDENTITY_EXTRA_MAX,
                              "identity.extra: more than %d pairs", KVK_IDENTITY_EXTRA_MAX);
    }
    for (uint32_t i = 0; i < identity->extra_count; i++) {
        char field[KVK_ERROR_FIELD_SIZE];
        (void)snprintf(field, sizeof(field), "identity.extra[%u].name", i);
        const struct kvk_view *name = &identity->extra[i].name;
        if (name->size == 0) {
            return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field, "%s is empty", field);
        }
        enum kvk_status status = check_view(field, name, true, error);
        if (status != KVK_OK) {
            return status;
        }
        uint32_t place = i;
        while (place > 0) {
            int compared = compare_views(&identity->extra[order[place - 1]].name, name);
            if (compared == 0) {
                return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                                "%s: the name comes twice", field);
            }
            if (compared < 0) {
                break;
            }
            order[place] = order[place - 1];
            place--;
        }
        order[place] = i;
        (void)snprintf(field, sizeof(field), "identity.extra[%u].value", i);
        status = check_view(field, &identity->extra[i].value, true, error);
        if (status != KVK_OK) {
            return status;
        }
    }
    return KVK_OK;
}

static uint8_t *put(uint8_t *at, uint8_t tag, const struct kvk_view *view)
{
    at[0] = tag;
    kvk_store_le32(at + 1, (uint32_t)view->size);
    if (view->size > 0) {
        memcpy(at + PREFIX_SIZE, view->data, view->size);
    }
    return at + PREFIX_SIZE + view->size;
}

enum kvk_status kvk_identity_encode(const struct kvk_identity *identity, size_t spare,
                                    uint8_t **bytes, size_t *size, struct kvk_error *error)
{
    uint32_t order[KVK_IDENTITY_EXTRA_MAX];
    enum kvk_status status = check_parts(identity, error);
    if (status == KVK_OK) {
        status = sort_extra(identity, order, error);
    }
    if (status != KVK_OK) {
        return status;
    }
    size_t total = 0;
    for (int i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        total += PREFIX_SIZE + identity->parts[i].size;
    }
    for (uint32_t i = 0; i < identity->extra_count; i++) {
        total += 2 * PREFIX_SIZE + identity->extra[i].name.size + identity->extra[i].value.size;
    }
    uint8_t *made = calloc(1, total + spare);
    if (made == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for an identity");
    }
    uint8_t *at = made;
    for (int i = 0; i < KVK_IDENTITY_PART_COUNT; i++) {
        at = put(at, (uint8_t)(i + 1), &identity->parts[i]);
    }
    for (uint32_t i = 0; i < identity->extra_count; i++) {
        at = put(at, KVK_IDENTITY_EXTRA_NAME, &identity->extra[order[i]].name);
        at = put(at, KVK_IDENTITY_EXTRA_VALUE, &identity->extra[order[i]].value);
    }
    KVK_ASSERT(at == made + total);
    *bytes = made;
    *size = total;
    return KVK_OK;
}

bool kvk_identity_next(const uint8_t *identity, size_t size, size_t *offset, uint32_t *tag,
                       struct kvk_view *part)
{
    KVK_ASSERT(*offset <= size);
    if (*offset == size) {
        return false;
    }
    KVK_ASSERT(size - *offset >= PREFIX_SIZE);
    *tag = identity[*offset];
    part->size = kvk_load_le32(identity + *offset + 1);
    part->data = identity + *offset + PREFIX_SIZE;
    KVK_ASSERT(part->size <= size - *offset - PREFIX_SIZE);
    *offset += PREFIX_SIZE + part->size;
    return true;
}
