#include "base/bytes.h"

#include <stdio.h>
#include <string.h>

/* The length of the character that begins with `first`, and how low its second byte may be and how
 * high: that is where overlong forms, surrogates and numbers past U+10FFFF are told apart. */
static size_t utf8_shape(uint8_t first, uint8_t *low, uint8_t *high)
{
    *low = 0x80;
    *high = 0xbf;
    if (first >= 0x01 && first <= 0x7f) {
        return 1;
    }
    if (first >= 0xc2 && first <= 0xdf) {
        return 2;
    }
    if (first >= 0xe0 && first <= 0xef) {
        *low = first == 0xe0 ? 0xa0 : 0x80;
        *high = first == 0xed ? 0x9f : 0xbf;
        return 3;
    }
    if (first >= 0xf0 && first <= 0xf4) {
        *low = first == 0xf0 ? 0x90 : 0x80;
        *high = first == 0xf4 ? 0x8f : 0xbf;
        return 4;
    }
    return 0;
}

bool kvk_utf8_ok(const void *text, size_t size)
{
    const uint8_t *bytes = text;
    size_t at = 0;
    while (at < size) {
        uint8_t low = 0;
        uint8_t high = 0;
        size_t length = utf8_shape(bytes[at], &low, &high);
        if (length == 0 || length > size - at) {
            return false;
        }
        if (length > 1 && (bytes[at + 1] < low || bytes[at + 1] > high)) {
            return false;
        }
        for (size_t i = 2; i < length; i++) {
            if ((bytes[at + i] & 0xc0) != 0x80) {
                return false;
            }
        }
        at += length;
    }
    return true;
}

void kvk_hex_write(const void *source, size_t size, char *text)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *bytes = source;
    for (size_t i = 0; i < size; i++) {
        text[2 * i] = digits[bytes[i] >> 4];
        text[2 * i + 1] = digits[bytes[i] & 15];
    }
    text[2 * size] = '\0';
}

static int hex_digit(char digit)
{
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    if (digit >= 'a' && digit <= 'f') {
        return digit - 'a' + 10;
    }
    if (digit >= 'A' && digit <= 'F') {
        return digit - 'A' + 10;
    }
    return -1;
}

bool kvk_hex_read(const char *text, size_t text_size, void *target, size_t size)
{
    uint8_t *bytes = target;
    if (text_size % 2 != 0 || text_size / 2 != size) {
        return false;
    }
    for (size_t i = 0; i < size; i++) {
        int high = hex_digit(text[2 * i]);
        int low = hex_digit(text[2 * i + 1]);
        if (high < 0 || low < 0) {
            return false;
        }
        bytes[i] = (uint8_t)(high << 4 | low);
    }
    return true;
}

const char *kvk_bytes_text(uint64_t bytes, char text[KVK_BYTES_TEXT_SIZE])
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    (void)snprintf(text, KVK_BYTES_TEXT_SIZE, unit == 0 || value >= 100 ? "%.0f %s" : "%.1f %s",
                   value, units[unit]);
    return text;
}

bool kvk_secret_equal(const void *a, const void *b, size_t size)
{
    const volatile uint8_t *left = a;
    const volatile uint8_t *right = b;
    uint8_t difference = 0;
    for (size_t i = 0; i < size; i++) {
        difference |= (uint8_t)(left[i] ^ right[i]);
    }
    return difference == 0;
}

void kvk_secret_wipe(void *target, size_t size)
{
    explicit_bzero(target, size);
}
