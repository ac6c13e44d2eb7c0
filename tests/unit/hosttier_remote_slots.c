/*
 * Where names lie in a cluster: the specification's own examples, and what nodes say, right and
 * wrong.
 */
#include "hosttier/remote_internal.h"

#include <criterion/criterion.h>
#include <string.h>

#include "base/random.h"

static uint16_t slot_of(const char *name)
{
    return kvk_remote_slot(name, strlen(name));
}

Test(remote_slots, crc16_of_the_specification)
{
    cr_assert_eq(slot_of("123456789"), 0x31C3);
    cr_assert_eq(slot_of("foo"), 12182);
    cr_assert_eq(slot_of("bar"), 5061);
    cr_assert_eq(slot_of(""), 0);
}

/* Bit by bit, as the specification tells it. */
static uint16_t plain_crc16(const uint8_t *bytes, size_t size)
{
    uint32_t crc = 0;
    for (size_t i = 0; i < size * 8; i++) {
        uint32_t bit = (uint32_t)bytes[i / 8] >> (7 - i % 8) & 1U;
        uint32_t top = crc >> 15 & 1U;
        crc = (crc << 1 & 0xffffU) ^ (top != bit ? 0x1021U : 0U);
    }
    return (uint16_t)crc;
}

Test(remote_slots, crc16_of_anything)
{
    struct kvk_random random;
    kvk_random_init(&random, 1);
    for (int i = 0; i < 5000; i++) {
        char name[64];
        size_t size = (size_t)kvk_random_below(&random, sizeof(name) + 1);
        kvk_random_fill(&random, name, size);
        for (size_t k = 0; k < size; k++) {
            name[k] = name[k] == '{' ? '(' : name[k];
        }
        cr_assert_eq(kvk_remote_slot(name, size),
                     plain_crc16((const uint8_t *)name, size) % KVK_REMOTE_SLOT_COUNT);
    }
}

Test(remote_slots, what_stands_in_braces_decides)
{
    cr_assert_eq(slot_of("{user1000}.following"), slot_of("{user1000}.followers"));
    cr_assert_eq(slot_of("{user1000}.following"), slot_of("user1000"));
    cr_assert_eq(slot_of("foo{bar}{zap}"), slot_of("bar"));
    cr_assert_eq(slot_of("foo{{bar}}zap"), slot_of("{bar"));
    cr_assert_neq(slot_of("foo{}{bar}"), slot_of("bar"));
    cr_assert_neq(slot_of("foo{bar"), slot_of("bar"));
}

static bool address(const char *text, const char *self, struct kvk_remote_address *out)
{
    return kvk_remote_address_read(text, strlen(text), self, out);
}

Test(remote_slots, addresses)
{
    struct kvk_remote_address out;
    cr_assert(address("127.0.0.1:7000", "", &out));
    cr_assert_str_eq(out.host, "127.0.0.1");
    cr_assert_eq(out.port, 7000);
    cr_assert(address("[fe80::1]:65535", "", &out));
    cr_assert_str_eq(out.host, "fe80::1");
    cr_assert_eq(out.port, 65535);
    cr_assert(address("fe80::1:7000", "", &out));
    cr_assert_str_eq(out.host, "fe80::1");
    cr_assert(address(":7000", "10.0.0.1", &out));
    cr_assert_str_eq(out.host, "10.0.0.1");
    cr_assert(address("?:7000", "10.0.0.1", &out));
    cr_assert_str_eq(out.host, "10.0.0.1");
    const char *const wrong[] = {"",        "host",     "host:", "host:0",   "host:65536",
                                 "host:-1", "host:7 0", ":7000", "a b:7000", "host:123456"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        cr_assert_not(address(wrong[i], "", &out), "'%s'", wrong[i]);
    }
    char many[400];
    memset(many, 'h', sizeof(many));
    memcpy(many + sizeof(many) - 5, ":7000", 5);
    cr_assert_not(kvk_remote_address_read(many, sizeof(many), "", &out));
}

Test(remote_slots, redirects)
{
    struct kvk_remote_address out;
    bool ask = true;
    uint16_t slot = 0;
    const char moved[] = "MOVED 3999 127.0.0.1:6381";
    cr_assert(kvk_remote_redirect_read(moved, strlen(moved), "", &ask, &slot, &out));
    cr_assert(!ask && slot == 3999 && out.port == 6381);
    const char asked[] = "ASK 16383 :6382";
    cr_assert(kvk_remote_redirect_read(asked, strlen(asked), "self", &ask, &slot, &out));
    cr_assert(ask && slot == 16383 && out.port == 6382);
    cr_assert_str_eq(out.host, "self");
    const char *const wrong[] = {"",
                                 "ERR no",
                                 "MOVED",
                                 "MOVED ",
                                 "MOVED 1",
                                 "MOVED 16384 a:1",
                                 "MOVED x a:1",
                                 "ASK 1 a:0",
                                 "ASK 99999999 a:1",
                                 "MOVED 1  ",
                                 "ASK  a:1"};
    for (size_t i = 0; i < sizeof(wrong) / sizeof(wrong[0]); i++) {
        cr_assert_not(
            kvk_remote_redirect_read(wrong[i], strlen(wrong[i]), "self", &ask, &slot, &out), "'%s'",
            wrong[i]);
    }
}
