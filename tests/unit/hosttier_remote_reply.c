/*
 * Replies as trees: the largest that a cluster may have to say is read whole, and one that never
 * ends is cut off before it has taken memory that matters, whatever it is made of.
 */
#include "hosttier/remote_internal.h"

#include <criterion/criterion.h>
#include <hiredis/hiredis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct kvk_remote_connection connection;
static redisReader *reader;

static void begin(void)
{
    memset(&connection, 0, sizeof(connection));
    reader = redisReaderCreateWithFunctions(&kvk_remote_reply_functions);
    cr_assert_not_null(reader);
    reader->privdata = &connection;
    reader->maxbuf = 0;
}

static void end(void)
{
    redisReaderFree(reader);
}

/* False: the reader will not go on. */
static bool feed(const char *text, size_t size, struct kvk_remote_reply **reply)
{
    void *made = NULL;
    bool well = redisReaderFeed(reader, text, size) == REDIS_OK &&
                redisReaderGetReply(reader, &made) == REDIS_OK;
    *reply = made;
    return well;
}

/* How many bytes the reader takes of an array of arrays of this element. */
static size_t bytes_taken(const char *element)
{
    const size_t bytes_max = (size_t)1 << 28;
    const unsigned count = 100;
    struct kvk_remote_reply *reply = NULL;
    char *slice = malloc(16 + count * strlen(element));
    cr_assert_not_null(slice);
    size_t slice_size = (size_t)sprintf(slice, "*%u\r\n", count);
    for (unsigned i = 0; i < count; i++) {
        slice_size += (size_t)sprintf(slice + slice_size, "%s", element);
    }
    size_t taken = 0;
    begin();
    bool goes_on = feed("*20000\r\n", 8, &reply);
    while (goes_on && taken < bytes_max) {
        goes_on = feed(slice, slice_size, &reply);
        cr_assert_null(reply);
        taken += slice_size;
        cr_assert(!goes_on || connection.reply_bytes <= KVK_REMOTE_REPLY_BYTES_MAX);
    }
    end();
    free(slice);
    return taken;
}

Test(remote_reply, one_without_end_is_cut_off)
{
    char text[KVK_REMOTE_REPLY_TEXT_MAX + 16];
    (void)snprintf(text, sizeof(text), "$%u\r\n%0*d\r\n", KVK_REMOTE_REPLY_TEXT_MAX,
                   (int)KVK_REMOTE_REPLY_TEXT_MAX, 0);
    const char *elements[] = {
        "*1\r\n:1\r\n", "*0\r\n", "$4\r\nabcd\r\n", "+\r\n",
        "$-1\r\n",      text,     "*20000\r\n", /* deeper and deeper */
    };
    for (size_t i = 0; i < sizeof(elements) / sizeof(elements[0]); i++) {
        size_t taken = bytes_taken(elements[i]);
        cr_assert_lt(taken, KVK_REMOTE_REPLY_BYTES_MAX + (1U << 20), "%s: %zu", elements[i], taken);
    }
}

Test(remote_reply, an_array_of_more_than_any_is_refused)
{
    struct kvk_remote_reply *reply = NULL;
    begin();
    cr_assert(!feed("*20001\r\n", 8, &reply));
    end();
}

/* Every slot a range of its own, each with four replicas. */
Test(remote_reply, the_largest_cluster_is_read_whole)
{
    const uint32_t nodes = 5;
    const size_t size_max = (size_t)KVK_REMOTE_SLOT_COUNT * (64 + nodes * 128);
    char *text = malloc(size_max);
    cr_assert_not_null(text);
    size_t size = (size_t)snprintf(text, size_max, "*%u\r\n", KVK_REMOTE_SLOT_COUNT);
    for (uint32_t slot = 0; slot < KVK_REMOTE_SLOT_COUNT; slot++) {
        size += (size_t)snprintf(text + size, size_max - size, "*%u\r\n:%u\r\n:%u\r\n", 2 + nodes,
                                 slot, slot);
        for (uint32_t i = 0; i < nodes; i++) {
            size += (size_t)snprintf(text + size, size_max - size,
                                     "*4\r\n$15\r\n100.100.100.%03u\r\n:%u\r\n$40\r\n%040u\r\n"
                                     "*0\r\n",
                                     i, 7000 + i, slot);
        }
        cr_assert_lt(size, size_max);
    }
    begin();
    struct kvk_remote_reply *reply = NULL;
    for (size_t at = 0; at < size; at += 10000) {
        cr_assert_null(reply);
        cr_assert(feed(text + at, size - at < 10000 ? size - at : 10000, &reply));
    }
    cr_assert_not_null(reply);
    cr_assert_eq(reply->element_count, KVK_REMOTE_SLOT_COUNT);
    const struct kvk_remote_reply *last = reply->elements[KVK_REMOTE_SLOT_COUNT - 1];
    cr_assert_eq(last->element_count, 2 + nodes);
    cr_assert_str_eq(last->elements[1 + nodes]->elements[0]->text, "100.100.100.004");
    cr_assert_eq(last->elements[1 + nodes]->elements[1]->integer, 7004);
    kvk_remote_reply_free(reply);
    end();
    free(text);
}

#if HIREDIS_MAJOR >= 1
/* Newer protocols' doubles and booleans answer nothing that was asked. */
Test(remote_reply, other_kinds_end_it)
{
    const char *kinds[] = {",1.5\r\n", "#t\r\n", "*2\r\n:1\r\n,2.5\r\n"};
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        struct kvk_remote_reply *reply = NULL;
        begin();
        cr_assert(!feed(kinds[i], strlen(kinds[i]), &reply));
        end();
    }
}
#endif
