/*
 * What comes on a connection: answers in the order of what was sent. Values that a FETCH waits for
 * are received right into the block's memory, as far as they are large; all else goes through
 * hiredis' reader.
 *
 * A connection is at one of three places in its answers: within one that the reader has a part of
 * (`mid_reply`), within the line that begins a value (`line`), or within a value (`in_value`); or
 * between two answers. Whose answer is next decides who takes its bytes.
 */
#include "hosttier/remote_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>

#include "base/assert.h"

#define READ_ROUNDS_MAX 16 /* of a connection, before others have their turn */
#define FEED_SIZE (16U << 10)
/* What the reader may hold unread: one journal, and what else came with it. */
#define UNREAD_MAX (KVK_REMOTE_VALUE_MAX + KVK_REMOTE_READ_SIZE + (64U << 10))
#define ROOMS_MAX 8U
/* Of a value, what is worth being received into its place; less is copied there from the cache. */
#define PLACED_MIN (24U << 10)
#define BESIDE_SIZE (16U << 10) /* read with it: what comes behind the value */

static void count_protocol_error(struct kvk_remote_connection *connection)
{
    KVK_REMOTE_COUNT(connection->node->lane->remote, protocol_errors, 1);
    kvk_remote_connection_close(connection, true, "its answers are not the protocol's");
}

/* An answer to one of our own questions. False: the connection was closed. */
static bool own_answered(struct kvk_remote_connection *connection, uint8_t kind,
                         const struct kvk_remote_reply *reply)
{
    bool refused = reply->type == REDIS_REPLY_ERROR;
    if (kind == KVK_REMOTE_REQUEST_MAP) {
        connection->node->lane->map_asked = false;
        kvk_remote_map_learn(connection->node->lane, connection->node, reply);
        return true;
    }
    /* Whoever may not PING may still do all that is needed. */
    if (refused && strncmp(reply->text, "NOPERM", 6) != 0) {
        kvk_remote_connection_close(connection, true, reply->text);
        return false;
    }
    if (kind == KVK_REMOTE_REQUEST_PING) {
        connection->state = KVK_REMOTE_READY;
        kvk_remote_node_well(connection->node);
    }
    return true;
}

/* The answer to what was sent first. False: the connection was closed. */
static bool answer_take(struct kvk_remote_connection *connection,
                        const struct kvk_remote_reply *reply)
{
    uint32_t depth = connection->node->lane->remote->options.pipeline_depth;
    struct kvk_remote_request *request = connection->sent.first;
    if (request->asking) {
        request->asking = false;
        return true;
    }
    /* Who answers before all was sent gets the rest from a copy: the batch may be done now. */
    kvk_remote_connection_keep(connection, request);
    (void)kvk_remote_list_pop(&connection->sent);
    connection->full = connection->full && connection->sent.count > depth / 2;
    if (request->kind == KVK_REMOTE_REQUEST_BLOCK) {
        kvk_remote_request_answered(connection, request, reply);
        return true;
    }
    uint8_t kind = request->kind;
    free(request);
    return own_answered(connection, kind, reply);
}

/* ---- By hiredis' reader ---- */

/* Is a value the next answer, if it is no error? */
static bool value_is_next(const struct kvk_remote_connection *connection)
{
    const struct kvk_remote_request *request = connection->sent.first;
    return request != NULL && request->value && !request->asking;
}

/* Give the reader some bytes, and take the answers that it has whole by then, but no value: how
 * many of the bytes were taken; -1: the connection was closed. */
static ssize_t reader_take(struct kvk_remote_connection *connection, const uint8_t *bytes,
                           size_t size)
{
    redisReader *reader = connection->reader;
    if (redisReaderFeed(reader, (const char *)bytes, size) != REDIS_OK) {
        kvk_remote_connection_close(connection, true, "no memory for an answer");
        return -1;
    }
    for (;;) {
        void *made = NULL;
        if (redisReaderGetReply(reader, &made) != REDIS_OK ||
            reader->len - reader->pos > UNREAD_MAX ||
            (made != NULL && connection->sent.first == NULL)) {
            kvk_remote_reply_free(made);
            count_protocol_error(connection);
            return -1;
        }
        connection->mid_reply = made == NULL;
        if (made == NULL) {
            return (ssize_t)size;
        }
        bool open = answer_take(connection, made);
        kvk_remote_reply_free(made);
        connection->reply_bytes = 0;
        if (!open) {
            return -1;
        }
        size_t left = reader->len - reader->pos;
        KVK_ASSERT(left <= size); /* an answer ends in the bytes that made it whole */
        if (left == 0 || value_is_next(connection)) {
            reader->pos = reader->len; /* what is left is not the reader's */
            return (ssize_t)(size - left);
        }
    }
}

/* ---- Values ---- */

static void value_begin(struct kvk_remote_connection *connection, size_t size)
{
    const struct kvk_remote_request *request = connection->sent.first;
    struct kvk_remote_arrival *arrival = connection->arrival;
    connection->in_value = true;
    connection->value_end = 0;
    if (request->batch != NULL) {
        const struct kvk_remote_block *block = &request->batch->blocks[request->block];
        kvk_remote_arrival_begin(arrival, &request->want, connection->crypt, block->pieces,
                                 block->piece_count, size);
    } else {
        kvk_remote_arrival_begin(arrival, NULL, connection->crypt, NULL, 0, size);
    }
}

/* The size that a line "$123\r\n" tells; -1: it is another one. */
static int64_t line_size_read(const char *line, size_t size)
{
    int64_t number = 0;
    if (size < 4 || line[0] != '$' || line[size - 2] != '\r' || line[size - 1] != '\n') {
        return -1;
    }
    for (size_t i = 1; i < size - 2; i++) {
        if (line[i] < '0' || line[i] > '9') {
            return -1;
        }
        number = number * 10 + (line[i] - '0');
    }
    return number;
}

/* The line that begins an answer which may be a value: how many bytes were taken, or -1. */
static ssize_t line_take(struct kvk_remote_connection *connection, const uint8_t *bytes,
                         size_t size)
{
    size_t taken = 0;
    bool whole = false;
    if (connection->line_size == 0 && bytes[0] != '$') {
        return reader_take(connection, bytes, size);
    }
    while (taken < size && !whole && connection->line_size < sizeof(connection->line)) {
        connection->line[connection->line_size++] = (char)bytes[taken];
        whole = bytes[taken++] == '\n';
    }
    if (!whole && connection->line_size < sizeof(connection->line)) {
        return (ssize_t)taken;
    }
    int64_t value_size = line_size_read(connection->line, connection->line_size);
    if (value_size > (int64_t)KVK_REMOTE_VALUE_MAX + 1) { /* more than was asked for */
        count_protocol_error(connection);
        return -1;
    }
    if (value_size > 0) {
        connection->line_size = 0;
        value_begin(connection, (size_t)value_size);
        return (ssize_t)taken;
    }
    /* Nothing lies there, or it is none of the protocol's: the reader knows which. */
    size_t line_size = connection->line_size;
    connection->line_size = 0;
    ssize_t given = reader_take(connection, (const uint8_t *)connection->line, line_size);
    KVK_ASSERT(given < 0 || (size_t)given == line_size);
    return given < 0 ? -1 : (ssize_t)taken;
}

/* All of it is here, and what ends it. False: the connection was closed. */
static bool value_end(struct kvk_remote_connection *connection)
{
    struct kvk_remote_request *request = connection->sent.first;
    connection->in_value = false;
    request->decoded = true;
    request->result = kvk_remote_arrival_end(connection->arrival);
    return answer_take(connection, &kvk_remote_reply_value);
}

/* Bytes of a value, and of what ends it: how many were taken, or -1. */
static ssize_t value_take(struct kvk_remote_connection *connection, const uint8_t *bytes,
                          size_t size)
{
    static const uint8_t end[2] = {'\r', '\n'};
    size_t taken = kvk_remote_arrival_take(connection->arrival, bytes, size);
    while (taken < size && connection->value_end < sizeof(end)) {
        if (bytes[taken++] != end[connection->value_end++]) {
            count_protocol_error(connection);
            return -1;
        }
    }
    bool whole = connection->value_end == sizeof(end);
    return whole && !value_end(connection) ? -1 : (ssize_t)taken;
}

/* ---- Reading ---- */

/* False: the connection was closed. */
static bool bytes_take(struct kvk_remote_connection *connection, const uint8_t *bytes, size_t size)
{
    while (size > 0) {
        ssize_t taken = 0;
        if (connection->in_value) {
            taken = value_take(connection, bytes, size);
        } else if (!connection->mid_reply && value_is_next(connection)) {
            taken = line_take(connection, bytes, size);
        } else {
            /* In slices: the reader moves what it has left each time it gave some answers. */
            taken = reader_take(connection, bytes, size < FEED_SIZE ? size : FEED_SIZE);
        }
        if (taken < 0) {
            return false;
        }
        bytes += taken;
        size -= (size_t)taken;
    }
    return true;
}

/* Where the next bytes go: places of a value, then the lane's buffer. */
struct rooms {
    struct iovec runs[ROOMS_MAX + 1];
    uint32_t count;
    size_t placed; /* bytes of the runs before the buffer */
    size_t size;
};

static void rooms_choose(const struct kvk_remote_connection *connection, struct rooms *rooms)
{
    const struct kvk_remote_arrival *arrival = connection->arrival;
    size_t beside = KVK_REMOTE_READ_SIZE;
    *rooms = (struct rooms){.count = 0};
    if (connection->in_value && arrival->size - arrival->done >= PLACED_MIN) {
        rooms->count =
            kvk_remote_arrival_rooms(arrival, KVK_REMOTE_READ_SIZE, rooms->runs, ROOMS_MAX);
        for (uint32_t i = 0; i < rooms->count; i++) {
            rooms->placed += rooms->runs[i].iov_len;
        }
        if (rooms->placed == arrival->size - arrival->done ||
            arrival->framed == KVK_REMOTE_PENDING) {
            beside = BESIDE_SIZE; /* or the rest of its header, which tells the place */
        } else if (rooms->placed > 0) {
            beside = 0;
        }
    } else if (connection->in_value && arrival->size >= PLACED_MIN) {
        beside = arrival->size - arrival->done + BESIDE_SIZE;
    } else if (!connection->in_value && value_is_next(connection) &&
               connection->sent.first->batch != NULL) {
        const struct kvk_remote_want *want = &connection->sent.first->want;
        bool large = kvk_remote_payload_bytes(want->space, want->part) >= PLACED_MIN;
        beside = large ? BESIDE_SIZE : beside;
    }
    rooms->size = rooms->placed + beside;
    if (beside > 0) {
        rooms->runs[rooms->count++] =
            (struct iovec){.iov_base = connection->node->lane->input, .iov_len = beside};
    }
}

/* Bytes read; 0: none now; -1: it is over. */
static ssize_t input_read(struct kvk_remote_connection *connection, struct rooms *rooms)
{
    if (connection->tls != NULL) {
        bool want_write = false;
        size_t done = 0;
        const struct iovec *first = &rooms->runs[0];
        int result = SSL_read_ex(connection->tls, first->iov_base, first->iov_len, &done);
        int outcome = kvk_remote_tls_outcome(connection->tls, result, &want_write);
        return outcome > 0 ? (ssize_t)done : outcome;
    }
    ssize_t size = readv(connection->fd, rooms->runs, (int)rooms->count);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
    }
    return size > 0 ? size : -1;
}

void kvk_remote_connection_read(struct kvk_remote_connection *connection)
{
    struct kvk_remote_lane *lane = connection->node->lane;
    struct rooms rooms;
    connection->unread = false;
    if (connection->in_value && connection->sent.first->batch == NULL) {
        kvk_remote_arrival_abandon(connection->arrival); /* its batch ended meanwhile */
    }
    for (int round = 0; round < READ_ROUNDS_MAX; round++) {
        rooms_choose(connection, &rooms);
        ssize_t size = input_read(connection, &rooms);
        if (size < 0) {
            kvk_remote_connection_close(connection, true, "it ended the connection");
            return;
        }
        if (size == 0) {
            return;
        }
        connection->progress_ns = lane->now_ns;
        size_t placed = (size_t)size < rooms.placed ? (size_t)size : rooms.placed;
        if (placed > 0) {
            kvk_remote_arrival_came(connection->arrival, placed);
        }
        if (!bytes_take(connection, lane->input, (size_t)size - placed)) {
            return;
        }
        if (connection->tls == NULL && (size_t)size < rooms.size) {
            return;
        }
    }
    connection->unread = connection->tls != NULL;
}
