#include "base/unicode.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <unictype.h>
#include <uninorm.h>
#include <unistr.h>

#include "base/bytes.h"

static bool is_ascii(const uint8_t *text, size_t size)
{
    uint8_t all = 0;
    for (size_t i = 0; i < size; i++) {
        all |= text[i];
    }
    return all < 0x80;
}

/* Control and format characters, line and paragraph separators: none of them can be seen. */
static bool has_invisible(const uint8_t *text, size_t size)
{
    for (size_t at = 0; at < size;) {
        ucs4_t character = 0;
        int length = u8_mbtouc(&character, text + at, size - at);
        if (length <= 0 || character == ',' ||
            uc_is_general_category_withtable(character, UC_CATEGORY_MASK_Cc | UC_CATEGORY_MASK_Cf |
                                                            UC_CATEGORY_MASK_Zl |
                                                            UC_CATEGORY_MASK_Zp)) {
            return true;
        }
        at += (size_t)length;
    }
    return false;
}

static enum kvk_status too_long(const char *field, size_t size, size_t name_size,
                                struct kvk_error *error)
{
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, size, name_size - 1,
                          "%s must be UTF-8 of 1 to %zu bytes", field, name_size - 1);
}

enum kvk_status kvk_name_normalise(const void *text, size_t size, const char *field, char *name,
                                   size_t name_size, struct kvk_error *error)
{
    /* NFC is never shorter than a third of what it came from (U+212B: 3 bytes become 2). */
    if (size == 0 || size >= name_size * 3) {
        return too_long(field, size, name_size, error);
    }
    if (!kvk_utf8_ok(text, size) || has_invisible(text, size)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, field,
                        "%s must be UTF-8 without commas and characters that cannot be seen",
                        field);
    }
    if (is_ascii(text, size)) {
        if (size >= name_size) {
            return too_long(field, size, name_size, error);
        }
        memcpy(name, text, size);
        name[size] = '\0';
        return KVK_OK;
    }
    size_t normal_size = 0;
    uint8_t *normal = u8_normalize(UNINORM_NFC, text, size, NULL, &normal_size);
    if (normal == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, field, "no memory for a name");
    }
    if (normal_size >= name_size) {
        free(normal);
        return too_long(field, normal_size, name_size, error);
    }
    memcpy(name, normal, normal_size);
    name[normal_size] = '\0';
    free(normal);
    return KVK_OK;
}
