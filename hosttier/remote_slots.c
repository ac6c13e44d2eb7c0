/*
 * Where a name lies in a cluster: its slot, and what nodes say of where slots are.
 */
#include "hosttier/remote_internal.h"

#include <string.h>

/* CRC16 as the cluster's specification has it: polynomial 0x1021, nothing reflected, from 0. */
/* CRC16 of the polynomial 0x1021: its remainders of four bits, so two steps for each byte. */
static uint16_t crc16(const uint8_t *bytes, size_t size)
{
    static const uint16_t remainders[16] = {
        0x0000, 0x1021, 0x2042, 0x3063, 0x4084, 0x50a5, 0x60c6, 0x70e7,
        0x8108, 0x9129, 0xa14a, 0xb16b, 0xc18c, 0xd1ad, 0xe1ce, 0xf1ef,
    };
    uint32_t crc = 0;
    for (size_t i = 0; i < size; i++) {
        crc = (crc << 4 & 0xffffU) ^ remainders[crc >> 12 ^ bytes[i] >> 4];
        crc = (crc << 4 & 0xffffU) ^ remainders[crc >> 12 ^ (bytes[i] & 15U)];
    }
    return (uint16_t)crc;
}

uint16_t kvk_remote_slot(const char *name, size_t size)
{
    const char *open = memchr(name, '{', size);
    if (open != NULL) {
        size_t rest = size - (size_t)(open + 1 - name);
        const char *close = memchr(open + 1, '}', rest);
        if (close != NULL && close != open + 1) {
            name = open + 1;
            size = (size_t)(close - name);
        }
    }
    return crc16((const uint8_t *)name, size) % KVK_REMOTE_SLOT_COUNT;
}

/* Digits only, 0 to `limit`. */
static bool number_read(const char *text, size_t size, uint32_t limit, uint32_t *number)
{
    uint32_t value = 0;
    if (size == 0 || size > 5) {
        return false;
    }
    for (size_t i = 0; i < size; i++) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        value = value * 10 + (uint32_t)(text[i] - '0');
    }
    *number = value;
    return value <= limit;
}

bool kvk_remote_address_read(const char *text, size_t size, const char *self,
                             struct kvk_remote_address *address)
{
    const char *colon = memrchr(text, ':', size);
    uint32_t port = 0;
    if (colon == NULL ||
        !number_read(colon + 1, size - (size_t)(colon + 1 - text), UINT16_MAX, &port) ||
        port == 0) {
        return false;
    }
    size_t host_size = (size_t)(colon - text);
    if (host_size >= 2 && text[0] == '[' && text[host_size - 1] == ']') {
        text++;
        host_size -= 2;
    }
    if (host_size == 0 || (host_size == 1 && text[0] == '?')) {
        text = self;
        host_size = strlen(self);
    }
    if (host_size == 0 || host_size >= sizeof(address->host) ||
        memchr(text, '\0', host_size) != NULL || memchr(text, ' ', host_size) != NULL) {
        return false;
    }
    memset(address, 0, sizeof(*address));
    memcpy(address->host, text, host_size);
    address->port = (uint16_t)port;
    return true;
}

bool kvk_remote_redirect_read(const char *text, size_t size, const char *self, bool *ask,
                              uint16_t *slot, struct kvk_remote_address *address)
{
    size_t skip = 0;
    if (size > 6 && memcmp(text, "MOVED ", 6) == 0) {
        *ask = false;
        skip = 6;
    } else if (size > 4 && memcmp(text, "ASK ", 4) == 0) {
        *ask = true;
        skip = 4;
    } else {
        return false;
    }
    const char *space = memchr(text + skip, ' ', size - skip);
    uint32_t number = 0;
    if (space == NULL || !number_read(text + skip, (size_t)(space - text) - skip,
                                      KVK_REMOTE_SLOT_COUNT - 1, &number)) {
        return false;
    }
    *slot = (uint16_t)number;
    return kvk_remote_address_read(space + 1, size - (size_t)(space + 1 - text), self, address);
}
