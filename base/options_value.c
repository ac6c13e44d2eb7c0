#include "base/options_value.h"

#include <ctype.h>
#include <stdarg.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"

#define NUMBER_TEXT_SIZE 32

struct unit {
    const char *name;
    uint64_t factor;
};

/* Largest first, ended by a NULL name. */
static const struct unit size_units[] = {
    {"TiB", UINT64_C(1) << 40},
    {"GiB", UINT64_C(1) << 30},
    {"MiB", UINT64_C(1) << 20},
    {"KiB", UINT64_C(1) << 10},
    {"B", 1},
    {NULL, 0},
};
static const struct unit duration_units[] = {
    {"h", 3600000}, {"min", 60000}, {"s", 1000}, {"ms", 1}, {NULL, 0},
};
static const struct unit no_units[] = {{"", 1}, {NULL, 0}};

static const struct unit *units_of(enum kvk_option_kind kind)
{
    switch (kind) {
    case KVK_OPTION_SIZE:
        return size_units;
    case KVK_OPTION_DURATION:
        return duration_units;
    case KVK_OPTION_COUNT:
    case KVK_OPTION_MODE:
    case KVK_OPTION_BOOL:
    case KVK_OPTION_TEXT:
    case KVK_OPTION_CHOICE:
    case KVK_OPTION_CUSTOM:
        return no_units;
    }
    KVK_UNREACHABLE();
}

KVK_PRINTF(3, 4)
static bool refuse(char *reason, size_t reason_size, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(reason, reason_size, format, arguments);
    va_end(arguments);
    return false;
}

static void print_number(enum kvk_option_kind kind, uint64_t value, char *text)
{
    if (kind == KVK_OPTION_MODE) {
        (void)snprintf(text, NUMBER_TEXT_SIZE, "%04llo", (unsigned long long)value);
        return;
    }
    const struct unit *unit = units_of(kind);
    while (value % unit->factor != 0 || (value == 0 && unit->factor != 1)) {
        unit++;
    }
    const char *blank = unit->name[0] != '\0' ? " " : "";
    (void)snprintf(text, NUMBER_TEXT_SIZE, "%llu%s%s", (unsigned long long)(value / unit->factor),
                   blank, unit->name);
}

static uint64_t maximum_of(const struct kvk_option_field *field)
{
    if (field->maximum != 0) {
        return field->maximum;
    }
    if (field->kind == KVK_OPTION_TEXT) {
        return field->width - 1;
    }
    return field->width == sizeof(uint32_t) ? UINT32_MAX : UINT64_MAX;
}

static void list_words(const char *const *words, char *text, size_t text_size)
{
    size_t at = 0;
    text[0] = '\0';
    for (size_t i = 0; words[i] != NULL && at < text_size; i++) {
        const char *comma = i == 0 ? "" : words[i + 1] == NULL ? " or " : ", ";
        int size = snprintf(text + at, text_size - at, "%s%s", comma, words[i]);
        at += size > 0 ? (size_t)size : 0;
    }
}

void kvk_option_range(const struct kvk_option_field *field, char *text, size_t text_size)
{
    char low[NUMBER_TEXT_SIZE];
    char high[NUMBER_TEXT_SIZE];
    switch (field->kind) {
    case KVK_OPTION_SIZE:
    case KVK_OPTION_DURATION:
    case KVK_OPTION_COUNT:
    case KVK_OPTION_MODE:
        print_number(field->kind, field->minimum, low);
        print_number(field->kind, maximum_of(field), high);
        (void)snprintf(text, text_size, "%s to %s", low, high);
        break;
    case KVK_OPTION_BOOL:
        (void)snprintf(text, text_size, "yes or no");
        break;
    case KVK_OPTION_TEXT:
        (void)snprintf(text, text_size, "%llu to %llu bytes of UTF-8",
                       (unsigned long long)field->minimum, (unsigned long long)maximum_of(field));
        break;
    case KVK_OPTION_CHOICE:
        list_words(field->choices, text, text_size);
        break;
    case KVK_OPTION_CUSTOM:
        (void)snprintf(text, text_size, "%s", field->range != NULL ? field->range : "text");
        break;
    }
}

/* ---- Reading ---- */

/* Digits at the start of `text`. */
static bool read_digits(const char *text, unsigned base, uint64_t *value, const char **rest,
                        char *reason, size_t reason_size)
{
    *rest = text;
    if (text[0] == '-') {
        return refuse(reason, reason_size, "must not be negative");
    }
    const char *at = text;
    uint64_t sum = 0;
    while (isdigit((unsigned char)*at) && (unsigned)(*at - '0') < base) {
        if (!kvk_multiply_fits(sum, base, &sum) ||
            !kvk_add_fits(sum, (uint64_t)(*at - '0'), &sum)) {
            return refuse(reason, reason_size, "is too large a number");
        }
        at++;
    }
    if (at == text) {
        return refuse(reason, reason_size, "is not a whole number");
    }
    *value = sum;
    *rest = at;
    return true;
}

/* Multiply by the unit that `text` names. */
static bool apply_unit(const struct unit *units, const char *text, uint64_t *value, char *reason,
                       size_t reason_size)
{
    while (*text == ' ' || *text == '\t') {
        text++;
    }
    if (*text == '\0' && *value == 0) {
        return true; /* nothing needs no unit */
    }
    for (const struct unit *unit = units; unit->name != NULL; unit++) {
        if (strcmp(text, unit->name) == 0) {
            return kvk_multiply_fits(*value, unit->factor, value) ||
                   refuse(reason, reason_size, "is too large a number");
        }
    }
    if (*text == '.' || *text == 'e' || *text == 'E') {
        return refuse(reason, reason_size, "must be a whole number");
    }
    if (units == size_units) {
        return refuse(reason, reason_size, "needs a unit: B, KiB, MiB, GiB or TiB");
    }
    if (units == duration_units) {
        return refuse(reason, reason_size, "needs a unit: ms, s, min or h");
    }
    return refuse(reason, reason_size, "must be a whole number and nothing else");
}

static bool in_range(const struct kvk_option_field *field, uint64_t value, char *reason,
                     size_t reason_size)
{
    if (value >= field->minimum && value <= maximum_of(field)) {
        return true;
    }
    char range[96];
    kvk_option_range(field, range, sizeof(range));
    return refuse(reason, reason_size, "must be %s", range);
}

static bool read_number(const struct kvk_option_field *field, void *member, const char *text,
                        char *reason, size_t reason_size)
{
    uint64_t value = 0;
    const char *rest = NULL;
    unsigned base = field->kind == KVK_OPTION_MODE ? 8 : 10;
    if (!read_digits(text, base, &value, &rest, reason, reason_size) ||
        !apply_unit(units_of(field->kind), rest, &value, reason, reason_size) ||
        !in_range(field, value, reason, reason_size)) {
        return false;
    }
    if (field->width == sizeof(uint32_t)) {
        KVK_ASSERT(value <= UINT32_MAX); /* or the table's maximum does not fit its member */
        uint32_t narrow = (uint32_t)value;
        memcpy(member, &narrow, sizeof(narrow));
    } else {
        KVK_ASSERT(field->width == sizeof(value));
        memcpy(member, &value, sizeof(value));
    }
    return true;
}

static bool read_bool(const struct kvk_option_field *field, void *member, const char *text,
                      char *reason, size_t reason_size)
{
    KVK_ASSERT(field->width == sizeof(bool));
    bool yes = strcmp(text, "yes") == 0;
    if (!yes && strcmp(text, "no") != 0) {
        return refuse(reason, reason_size, "must be yes or no");
    }
    memcpy(member, &yes, sizeof(yes));
    return true;
}

static bool read_text(const struct kvk_option_field *field, void *member, const char *text,
                      char *reason, size_t reason_size)
{
    KVK_ASSERT(maximum_of(field) < field->width);
    size_t size = strlen(text);
    if (!in_range(field, size, reason, reason_size)) {
        return false;
    }
    memcpy(member, text, size + 1);
    return true;
}

static bool read_choice(const struct kvk_option_field *field, void *member, const char *text,
                        char *reason, size_t reason_size)
{
    KVK_ASSERT(field->width == sizeof(uint32_t));
    for (uint32_t i = 0; field->choices[i] != NULL; i++) {
        if (strcmp(field->choices[i], text) == 0) {
            memcpy(member, &i, sizeof(i));
            return true;
        }
    }
    char words[96];
    list_words(field->choices, words, sizeof(words));
    return refuse(reason, reason_size, "must be %s", words);
}

bool kvk_options_read_value(const struct kvk_option_field *field, void *record, const char *text,
                            char *reason, size_t reason_size)
{
    void *member = (uint8_t *)record + field->offset;
    switch (field->kind) {
    case KVK_OPTION_SIZE:
    case KVK_OPTION_DURATION:
    case KVK_OPTION_COUNT:
    case KVK_OPTION_MODE:
        return read_number(field, member, text, reason, reason_size);
    case KVK_OPTION_BOOL:
        return read_bool(field, member, text, reason, reason_size);
    case KVK_OPTION_TEXT:
        return read_text(field, member, text, reason, reason_size);
    case KVK_OPTION_CHOICE:
        return read_choice(field, member, text, reason, reason_size);
    case KVK_OPTION_CUSTOM:
        return field->read(record, member, text, reason, reason_size);
    }
    KVK_UNREACHABLE();
}
