/*
 * Replies as hiredis' reader makes them: a header or a journal is looked at where it lies in the
 * reader's buffer; all else is a tree whose memory is bounded as a whole, since trees of small
 * arrays may go on for ever. A reply that is larger than any we ask for ends its connection. Values
 * that a FETCH waits for are not the reader's (remote_input.c).
 */
#include "hosttier/remote_internal.h"

#include <hiredis/hiredis.h>
#include <stdlib.h>
#include <string.h>

/* What hiredis 1.0 changed. Its doubles and booleans answer nothing that we ask. */
#if HIREDIS_MAJOR >= 1
typedef size_t array_count;

static void *create_double(const redisReadTask *task, double value, char *text, size_t size)
{
    (void)task, (void)value, (void)text, (void)size;
    return NULL;
}

static void *create_bool(const redisReadTask *task, int value)
{
    (void)task, (void)value;
    return NULL;
}
#else
typedef int array_count; /* not negative */
#endif

struct kvk_remote_reply kvk_remote_reply_value = {.type = REDIS_REPLY_STRING};

static void *attach(const redisReadTask *task, struct kvk_remote_reply *reply)
{
    if (reply != NULL && task->parent != NULL) {
        struct kvk_remote_reply *parent = task->parent->obj;
        parent->elements[task->idx] = reply;
    }
    return reply;
}

/* Memory of the answer that is being read; NULL too where that has become too large. */
static void *reply_alloc(const redisReadTask *task, size_t size)
{
    struct kvk_remote_connection *connection = task->privdata;
    connection->reply_bytes += size + KVK_REMOTE_REPLY_ALLOCATION;
    return connection->reply_bytes <= KVK_REMOTE_REPLY_BYTES_MAX ? calloc(1, size) : NULL;
}

static struct kvk_remote_reply *reply_create(const redisReadTask *task, const char *text,
                                             size_t size)
{
    struct kvk_remote_reply *reply = reply_alloc(task, sizeof(*reply) + size + 1);
    if (reply != NULL) {
        reply->type = task->type;
        reply->size = size;
        if (size > 0) {
            memcpy(reply->text, text, size);
        }
    }
    return reply;
}

/* The last bytes of a journal. */
static enum kvk_remote_result tail_take(struct kvk_remote_block *block, const char *text,
                                        size_t size)
{
    const struct kvk_remote_piece *piece = &block->pieces[0];
    if (size > piece->size_bytes) {
        return KVK_REMOTE_NOT_OURS; /* more than was asked for */
    }
    size_t before = (size_t)piece->size_bytes - size;
    memset(piece->memory, 0, before);
    memcpy((uint8_t *)piece->memory + before, text, size);
    block->length = size;
    return KVK_REMOTE_HIT;
}

static void *create_string(const redisReadTask *task, char *text, size_t size)
{
    struct kvk_remote_connection *connection = task->privdata;
    struct kvk_remote_request *request = connection->sent.first;
    /* What answers ASKING is no value, whatever it is. */
    bool value = task->parent == NULL && task->type == REDIS_REPLY_STRING && request != NULL &&
                 request->kind == KVK_REMOTE_REQUEST_BLOCK && !request->asking;
    if (value) {
        request->decoded = true;
        if (request->batch == NULL) {
            request->result = KVK_REMOTE_DEADLINE;
        } else if (size == 0) {
            request->result = KVK_REMOTE_ABSENT; /* GETRANGE of nothing */
        } else if (request->batch->operation == KVK_REMOTE_TAIL) {
            request->result = tail_take(&request->batch->blocks[request->block], text, size);
        } else if (request->batch->operation == KVK_REMOTE_EXISTS) {
            request->result = kvk_remote_header_check(&request->want, connection->crypt,
                                                      (const uint8_t *)text, size);
        } else {
            /* Of a FETCH only what arrived in its place is believed. */
            request->result = KVK_REMOTE_NOT_OURS;
        }
        return &kvk_remote_reply_value;
    }
    if (size > KVK_REMOTE_REPLY_TEXT_MAX) {
        size = KVK_REMOTE_REPLY_TEXT_MAX;
    }
    return attach(task, reply_create(task, text, size));
}

static void *create_array(const redisReadTask *task, array_count count)
{
    if ((size_t)count > KVK_REMOTE_REPLY_ELEMENTS_MAX) {
        return NULL;
    }
    struct kvk_remote_reply *reply = reply_create(task, NULL, 0);
    if (reply != NULL && count > 0) {
        reply->elements = reply_alloc(task, (size_t)count * sizeof(struct kvk_remote_reply *));
        if (reply->elements == NULL) {
            free(reply);
            return NULL;
        }
        reply->element_count = (size_t)count;
    }
    return attach(task, reply);
}

static void *create_integer(const redisReadTask *task, long long integer)
{
    struct kvk_remote_reply *reply = reply_create(task, NULL, 0);
    if (reply != NULL) {
        reply->integer = integer;
    }
    return attach(task, reply);
}

static void *create_nil(const redisReadTask *task)
{
    return attach(task, reply_create(task, NULL, 0));
}

/* The reader bounds how deep it nests: 7 to 9, and 1,024 in the newest, so this does not run away.
 */
void kvk_remote_reply_free(void *reply) // NOLINT(misc-no-recursion)
{
    struct kvk_remote_reply *made = reply;
    if (made == NULL || made == &kvk_remote_reply_value) {
        return;
    }
    for (size_t i = 0; i < made->element_count; i++) {
        kvk_remote_reply_free(made->elements[i]);
    }
    free(made->elements);
    free(made);
}

redisReplyObjectFunctions kvk_remote_reply_functions = {
    .createString = create_string,
    .createArray = create_array,
    .createInteger = create_integer,
    .createNil = create_nil,
#if HIREDIS_MAJOR >= 1
    .createDouble = create_double,
    .createBool = create_bool,
#endif
    .freeObject = kvk_remote_reply_free,
};
