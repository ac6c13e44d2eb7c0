/* Bytes from outside: order, overflow, text, secrets. */
#include "base/bytes.h"

#include <criterion/criterion.h>
#include <string.h>

#include "base/random.h"

Test(base_bytes, little_endian_at_odd_addresses)
{
    uint8_t bytes[16] = {0};
    kvk_store_le64(bytes + 1, UINT64_C(0x0807060504030201));
    for (uint8_t i = 0; i < 8; i++) {
        cr_assert_eq(bytes[1 + i], i + 1);
    }
    cr_assert_eq(bytes[0], 0);
    cr_assert_eq(bytes[9], 0);
    cr_assert_eq(kvk_load_le16(bytes + 1), 0x0201);
    cr_assert_eq(kvk_load_le32(bytes + 3), UINT32_C(0x06050403));
    cr_assert_eq(kvk_load_le64(bytes + 1), UINT64_C(0x0807060504030201));
    memset(bytes, 0xff, sizeof(bytes));
    cr_assert_eq(kvk_load_le16(bytes), UINT16_MAX);
    cr_assert_eq(kvk_load_le32(bytes), UINT32_MAX);
    cr_assert_eq(kvk_load_le64(bytes), UINT64_MAX);
    kvk_store_le16(bytes, 0x1234);
    kvk_store_le32(bytes + 2, UINT32_C(0xdeadbeef));
    cr_assert_eq(kvk_load_le16(bytes), 0x1234);
    cr_assert_eq(kvk_load_le32(bytes + 2), UINT32_C(0xdeadbeef));
    cr_assert_eq(bytes[6], 0xff);
}

Test(base_bytes, sums_and_products_that_do_not_fit)
{
    uint64_t result = 7;
    cr_assert(kvk_add_fits(UINT64_MAX - 1, 1, &result));
    cr_assert_eq(result, UINT64_MAX);
    result = 7;
    cr_assert_not(kvk_add_fits(UINT64_MAX, 1, &result));
    cr_assert_eq(result, 7);
    cr_assert(kvk_multiply_fits(UINT64_C(1) << 32, UINT32_MAX, &result));
    cr_assert_eq(result, (uint64_t)UINT32_MAX << 32);
    result = 7;
    cr_assert_not(kvk_multiply_fits(UINT64_C(1) << 32, UINT64_C(1) << 32, &result));
    cr_assert_eq(result, 7);
    cr_assert(kvk_multiply_fits(0, UINT64_MAX, &result));
    cr_assert_eq(result, 0);
}

/* What the decoder must do, the slow way: decode, encode again, compare. */
static bool utf8_by_decoding(const uint8_t *text, size_t size)
{
    size_t at = 0;
    while (at < size) {
        uint8_t first = text[at];
        size_t length = first < 0x80 ? 1 : first >> 5 == 6 ? 2 : first >> 4 == 14 ? 3 : 4;
        if (length == 4 && first >> 3 != 30) {
            return false;
        }
        if (at + length > size) {
            return false;
        }
        uint32_t point = length == 1 ? first : first & (0x7fU >> length);
        for (size_t i = 1; i < length; i++) {
            if (text[at + i] >> 6 != 2) {
                return false;
            }
            point = point << 6 | (text[at + i] & 0x3f);
        }
        size_t shortest = point < 0x80 ? 1 : point < 0x800 ? 2 : point < 0x10000 ? 3 : 4;
        bool surrogate = point >= 0xd800 && point <= 0xdfff;
        if (length != shortest || surrogate || point == 0 || point > 0x10ffff) {
            return false;
        }
        at += length;
    }
    return true;
}

Test(base_bytes, utf8_by_example)
{
    cr_assert(kvk_utf8_ok("", 0));
    cr_assert(kvk_utf8_ok("plain", 5));
    cr_assert(kvk_utf8_ok("\xc3\x85", 2));             /* U+00C5 */
    cr_assert(kvk_utf8_ok("\xe2\x84\xab", 3));         /* U+212B */
    cr_assert(kvk_utf8_ok("\xf4\x8f\xbf\xbf", 4));     /* U+10FFFF */
    cr_assert_not(kvk_utf8_ok("a\0b", 3));             /* NUL */
    cr_assert_not(kvk_utf8_ok("\xc0\xaf", 2));         /* overlong '/' */
    cr_assert_not(kvk_utf8_ok("\xe0\x80\xaf", 3));     /* overlong '/' */
    cr_assert_not(kvk_utf8_ok("\xf0\x80\x80\xaf", 4)); /* overlong '/' */
    cr_assert_not(kvk_utf8_ok("\xed\xa0\x80", 3));     /* surrogate */
    cr_assert_not(kvk_utf8_ok("\xf4\x90\x80\x80", 4)); /* past the end of Unicode */
    cr_assert_not(kvk_utf8_ok("\xc3", 1));             /* cut off */
    cr_assert_not(kvk_utf8_ok("\xe2\x84", 2));
    cr_assert_not(kvk_utf8_ok("\x80", 1));
    cr_assert_not(kvk_utf8_ok("\xff", 1));
}

/* Every text of one, two and three bytes, and many of four. */
Test(base_bytes, utf8_agrees_with_decoding)
{
    uint8_t text[4];
    for (uint32_t value = 0; value < UINT32_C(1) << 24; value++) {
        kvk_store_le32(text, value);
        size_t size = value < 0x100 ? 1 : value < 0x10000 ? 2 : 3;
        if (kvk_utf8_ok(text, size) != utf8_by_decoding(text, size)) {
            cr_assert_fail("%06x", value);
        }
    }
    struct kvk_random random;
    kvk_random_init(&random, 1);
    for (uint32_t i = 0; i < 4000000; i++) {
        kvk_store_le32(text, (uint32_t)kvk_random_next(&random));
        text[0] |= 0xf0;
        for (int j = 1; j < 4; j++) {
            text[j] = kvk_random_chance(&random, 0.9) ? (text[j] & 0x3f) | 0x80 : text[j];
        }
        cr_assert_eq(kvk_utf8_ok(text, 4), utf8_by_decoding(text, 4), "%08x", kvk_load_le32(text));
    }
}

Test(base_bytes, hex_there_and_back)
{
    uint8_t bytes[256];
    for (uint32_t i = 0; i < 256; i++) {
        bytes[i] = (uint8_t)i;
    }
    char text[513];
    kvk_hex_write(bytes, sizeof(bytes), text);
    cr_assert_eq(strlen(text), 512);
    cr_assert_eq(memcmp(text, "000102", 6), 0);
    cr_assert_str_eq(text + 506, "fdfeff");
    uint8_t back[256] = {0};
    cr_assert(kvk_hex_read(text, 512, back, 256));
    cr_assert_eq(memcmp(bytes, back, 256), 0);
    cr_assert(kvk_hex_read("aBCd", 4, back, 2));
    cr_assert_eq(back[0], 0xab);
    cr_assert_not(kvk_hex_read("abc", 3, back, 1));
    cr_assert_not(kvk_hex_read("abcd", 4, back, 3));
    cr_assert_not(kvk_hex_read("ag", 2, back, 1));
    cr_assert_not(kvk_hex_read("-1", 2, back, 1));
    cr_assert(kvk_hex_read("", 0, back, 0));
}

Test(base_bytes, secrets)
{
    uint8_t a[64];
    uint8_t b[64];
    memset(a, 3, sizeof(a));
    memcpy(b, a, sizeof(a));
    cr_assert(kvk_secret_equal(a, b, sizeof(a)));
    cr_assert(kvk_secret_equal(a, b, 0));
    for (size_t i = 0; i < sizeof(a); i++) {
        for (int bit = 0; bit < 8; bit++) {
            b[i] ^= (uint8_t)(1 << bit);
            cr_assert_not(kvk_secret_equal(a, b, sizeof(a)));
            b[i] ^= (uint8_t)(1 << bit);
        }
    }
    kvk_secret_wipe(a, 32);
    cr_assert_eq(a[31], 0);
    cr_assert_eq(a[32], 3);
}

Test(base_bytes, sizes_for_people)
{
    char text[KVK_BYTES_TEXT_SIZE];
    cr_expect_str_eq(kvk_bytes_text(0, text), "0 B");
    cr_expect_str_eq(kvk_bytes_text(1023, text), "1023 B");
    cr_expect_str_eq(kvk_bytes_text(1536, text), "1.5 KiB");
    cr_expect_str_eq(kvk_bytes_text(UINT64_C(300) << 20, text), "300 MiB");
    cr_expect_str_eq(kvk_bytes_text(UINT64_C(25) << 29, text), "12.5 GiB");
    cr_expect_str_eq(kvk_bytes_text(UINT64_MAX, text), "16384 PiB");
}
