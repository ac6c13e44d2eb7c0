/*
 * Bytes from outside and bytes that are stored: fixed little-endian order, sums and products that
 * say when they overflow, text that is what it claims to be, secrets compared without a clock.
 */
#ifndef KVK_BASE_BYTES_H
#define KVK_BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* ---- Little-endian, at any address ---- */

static inline uint16_t kvk_load_le16(const void *source)
{
    const uint8_t *bytes = (const uint8_t *)source;
    return (uint16_t)(bytes[0] | bytes[1] << 8);
}

static inline uint32_t kvk_load_le32(const void *source)
{
    const uint8_t *bytes = (const uint8_t *)source;
    return kvk_load_le16(bytes) | (uint32_t)kvk_load_le16(bytes + 2) << 16;
}

static inline uint64_t kvk_load_le64(const void *source)
{
    const uint8_t *bytes = (const uint8_t *)source;
    return kvk_load_le32(bytes) | (uint64_t)kvk_load_le32(bytes + 4) << 32;
}

static inline void kvk_store_le16(void *target, uint16_t value)
{
    uint8_t *bytes = (uint8_t *)target;
    bytes[0] = (uint8_t)value;
    bytes[1] = (uint8_t)(value >> 8);
}

static inline void kvk_store_le32(void *target, uint32_t value)
{
    uint8_t *bytes = (uint8_t *)target;
    kvk_store_le16(bytes, (uint16_t)value);
    kvk_store_le16(bytes + 2, (uint16_t)(value >> 16));
}

static inline void kvk_store_le64(void *target, uint64_t value)
{
    uint8_t *bytes = (uint8_t *)target;
    kvk_store_le32(bytes, (uint32_t)value);
    kvk_store_le32(bytes + 4, (uint32_t)(value >> 32));
}

/* ---- Arithmetic on numbers from outside: true, or false and nothing stored on overflow ---- */

KVK_CHECKED static inline bool kvk_add_fits(uint64_t a, uint64_t b, uint64_t *sum)
{
    uint64_t result;
    if (__builtin_add_overflow(a, b, &result)) {
        return false;
    }
    *sum = result;
    return true;
}

KVK_CHECKED static inline bool kvk_multiply_fits(uint64_t a, uint64_t b, uint64_t *product)
{
    uint64_t result;
    if (__builtin_mul_overflow(a, b, &result)) {
        return false;
    }
    *product = result;
    return true;
}

/* ---- Text ---- */

/* Well-formed UTF-8 without NUL: no overlong forms, no surrogates, nothing past U+10FFFF. */
bool kvk_utf8_ok(const void *text, size_t size);

/* Lower-case hex and a final NUL: `text` has room for 2 * size + 1. */
void kvk_hex_write(const void *source, size_t size, char *text);

/* False for a length that is not 2 * size or a character that is no hex digit; `target` may then
 * hold some bytes. Either case is read. */
KVK_CHECKED bool kvk_hex_read(const char *text, size_t text_size, void *target, size_t size);

/* "512 B", "12.5 GiB", "300 MiB": for people. */
#define KVK_BYTES_TEXT_SIZE 32
const char *kvk_bytes_text(uint64_t bytes, char text[KVK_BYTES_TEXT_SIZE]);

/* ---- Secrets ---- */

/* Equal? In a time that depends on the size alone. */
bool kvk_secret_equal(const void *a, const void *b, size_t size);

/* Forget: a wipe that the compiler does not leave out. */
void kvk_secret_wipe(void *target, size_t size);

#endif
