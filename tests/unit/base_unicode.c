/* Names: one spelling each, and what is no name. */
#include "base/unicode.h"

#include <criterion/criterion.h>
#include <string.h>

#define SIZE 256

static struct kvk_error error;

static enum kvk_status name_of(const char *text, size_t size, char name[SIZE])
{
    memset(&error, 0, sizeof(error));
    return kvk_name_normalise(text, size, "tenant", name, SIZE, &error);
}

static const char *name(const char *text)
{
    static char result[SIZE];
    return name_of(text, strlen(text), result) == KVK_OK ? result : "(refused)";
}

/* Case A7: the ring, as one character, as the unit sign, and as A with a mark. */
Test(base_unicode, one_glyph_is_one_name)
{
    cr_expect_str_eq(name("\xc3\x85"), "\xc3\x85");
    cr_expect_str_eq(name("\xe2\x84\xab"), "\xc3\x85");
    cr_expect_str_eq(name("A\xcc\x8a"), "\xc3\x85");
    cr_expect_str_eq(name("a\xcc\xa3\xcc\x87"), name("a\xcc\x87\xcc\xa3"),
                     "marks are put in order");
    /* Compatibility forms are other names. */
    cr_expect_str_eq(name("\xef\xac\x81"), "\xef\xac\x81");
    cr_expect_str_eq(name("plain name/../x"), "plain name/../x");
}

Test(base_unicode, what_is_no_name)
{
    char result[SIZE];
    const char *wrong[] = {
        "",
        "\xff",
        "\xc3",
        "\xed\xa0\x80", /* a surrogate */
        "a\nb",
        "a\x7f",
        "\xc2\x85",      /* next line */
        "a\xe2\x80\x8b", /* zero width space */
        "a\xe2\x80\xae", /* right-to-left override */
        "\xe2\x80\xa8",  /* line separator */
        "a,b",
    };
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        cr_expect_eq(name_of(wrong[i], strlen(wrong[i]), result), KVK_INVALID, "%zu", i);
        cr_expect_str_eq(error.field, "tenant");
    }
    cr_expect_eq(name_of("a\0b", 3, result), KVK_INVALID);
}

Test(base_unicode, lengths)
{
    static char text[41000];
    char result[SIZE];

    memset(text, 'x', sizeof(text));
    cr_expect_eq(name_of(text, SIZE - 1, result), KVK_OK);
    cr_expect_eq(strlen(result), SIZE - 1u);
    cr_expect_eq(name_of(text, SIZE, result), KVK_INVALID);
    cr_expect_eq(error.limit, SIZE - 1u);
    cr_expect_eq(name_of(text, 40960, result), KVK_INVALID);
    /* What counts is the length that is kept: 127 signs of 3 bytes are 254. */
    for (size_t i = 0; i < 127; i++) {
        memcpy(text + 3 * i, "\xe2\x84\xab", 3);
    }
    cr_expect_eq(name_of(text, 127 * 3, result), KVK_OK);
    cr_expect_eq(strlen(result), 254u);
    /* And some grow. */
    for (size_t i = 0; i < 64; i++) {
        memcpy(text + 3 * i, "\xef\xac\xac",
               3); /* shin with dagesh and shin dot: three characters */
    }
    cr_expect_eq(name_of(text, 64 * 3, result), KVK_INVALID);
}
