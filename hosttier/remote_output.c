/*
 * What goes out on a connection: commands, one after another, as one stream. Most bytes lie in its
 * buffer. The payload of a large value that is not encrypted does not: it is lent by the batch, and
 * sent from where it lies between two of the buffer's bytes. A batch that is done before that
 * leaves a copy behind.
 */
#include "hosttier/remote_internal.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>

#include "base/assert.h"

#define RUNS_MAX 64 /* given to the socket at a time */
/* A payload is lent from so many bytes on, in at most so many runs; else it is copied. */
#define LENT_MIN (8U << 10)
#define LENT_RUNS_MAX 16U
#define LINE_SIZE 23 /* of the protocol, with a number of 64 bits */

/* ---- What waits to be written ---- */

static size_t output_left(const struct kvk_remote_connection *connection)
{
    const struct kvk_remote_output *output = &connection->output;
    return output->size - output->done + output->lent_bytes;
}

bool kvk_remote_connection_takes(const struct kvk_remote_connection *connection)
{
    return connection->state == KVK_REMOTE_READY && !connection->full && !connection->doomed &&
           output_left(connection) < KVK_REMOTE_OUTPUT_ENOUGH;
}

bool kvk_remote_output_waits(const struct kvk_remote_connection *connection, size_t size_min)
{
    return output_left(connection) >= size_min && !connection->wants_write && !connection->doomed;
}

void kvk_remote_output_clear(struct kvk_remote_connection *connection)
{
    struct kvk_remote_output *output = &connection->output;
    for (uint32_t i = 0; i < output->lent_count; i++) {
        free(output->lent[(output->lent_first + i) % KVK_REMOTE_LENT_MAX].copy);
    }
    output->size = 0;
    output->done = 0;
    output->lent_count = 0;
    output->lent_bytes = 0;
}

void kvk_remote_output_free(struct kvk_remote_connection *connection)
{
    kvk_remote_output_clear(connection);
    free(connection->output.bytes);
    connection->output.bytes = NULL;
    connection->output.capacity = 0;
}

/* Room for so many more bytes of output, or NULL: no memory. */
static uint8_t *output_room(struct kvk_remote_connection *connection, size_t size)
{
    struct kvk_remote_output *output = &connection->output;
    /* Not sooner than half of it is written, or every request would move all of the others. */
    if (output->done > 0 && output->capacity - output->size < size &&
        output->done >= output->capacity / 2) {
        memmove(output->bytes, output->bytes + output->done, output->size - output->done);
        for (uint32_t i = 0; i < output->lent_count; i++) {
            output->lent[(output->lent_first + i) % KVK_REMOTE_LENT_MAX].at -= output->done;
        }
        output->size -= output->done;
        output->done = 0;
    }
    if (output->capacity - output->size < size) {
        size_t capacity = output->size + size;
        capacity += capacity / 2;
        uint8_t *grown = realloc(output->bytes, capacity);
        if (grown == NULL) {
            return NULL;
        }
        output->bytes = grown;
        output->capacity = capacity;
    }
    return output->bytes + output->size;
}

/* ---- Lent payloads ---- */

/* May this payload be sent from where it lies? */
static bool may_lend(const struct kvk_remote_connection *connection,
                     const struct kvk_remote_request *request)
{
    const struct kvk_remote_want *want = &request->want;
    const struct kvk_remote_block *block = &request->batch->blocks[request->block];
    struct kvk_remote_place place;
    uint32_t runs = 0;
    uint8_t *memory = NULL;
    size_t size = 0;
    if (want->space->encrypt || connection->tls != NULL ||
        kvk_remote_payload_bytes(want->space, want->part) < LENT_MIN) {
        return false;
    }
    kvk_remote_place_init(&place, want, block->pieces, block->piece_count);
    while (runs <= LENT_RUNS_MAX && kvk_remote_place_next(&place, SIZE_MAX, &memory, &size)) {
        runs++;
    }
    return runs <= LENT_RUNS_MAX && connection->output.lent_count + runs <= KVK_REMOTE_LENT_MAX;
}

/* Its payload comes behind what is in the buffer now. */
static void lend(struct kvk_remote_connection *connection, const struct kvk_remote_request *request)
{
    struct kvk_remote_output *output = &connection->output;
    const struct kvk_remote_block *block = &request->batch->blocks[request->block];
    struct kvk_remote_place place;
    uint8_t *memory = NULL;
    size_t size = 0;
    kvk_remote_place_init(&place, &request->want, block->pieces, block->piece_count);
    while (kvk_remote_place_next(&place, SIZE_MAX, &memory, &size)) {
        KVK_ASSERT(output->lent_count < KVK_REMOTE_LENT_MAX);
        uint32_t index = (output->lent_first + output->lent_count++) % KVK_REMOTE_LENT_MAX;
        output->lent[index] = (struct kvk_remote_lent){
            .request = request,
            .memory = memory,
            .size = size,
            .at = output->size,
        };
        output->lent_bytes += size;
    }
}

void kvk_remote_connection_keep(struct kvk_remote_connection *connection,
                                const struct kvk_remote_request *request)
{
    struct kvk_remote_output *output = &connection->output;
    for (uint32_t i = 0; i < output->lent_count && !connection->doomed; i++) {
        struct kvk_remote_lent *lent =
            &output->lent[(output->lent_first + i) % KVK_REMOTE_LENT_MAX];
        bool meant = request != NULL ? lent->request == request
                                     : lent->request != NULL && lent->request->batch == NULL;
        if (!meant) {
            continue;
        }
        uint8_t *copy = malloc(lent->size);
        if (copy == NULL) {
            connection->doomed = true;
            break;
        }
        memcpy(copy, lent->memory, lent->size);
        lent->request = NULL;
        lent->memory = copy;
        lent->copy = copy;
    }
}

/* ---- Commands ---- */

/* What is written for each request is written by hand: printf would be a tenth of its time. */
static uint8_t *bytes_put(uint8_t *target, const void *bytes, size_t size)
{
    memcpy(target, bytes, size);
    return target + size;
}

/* A line of the protocol: what it is, and a number. At most LINE_SIZE bytes. */
static uint8_t *line_put(uint8_t *target, char kind, uint64_t number)
{
    uint8_t digits[20];
    size_t first = sizeof(digits);
    do {
        digits[--first] = (uint8_t)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    *target++ = (uint8_t)kind;
    target = bytes_put(target, digits + first, sizeof(digits) - first);
    return bytes_put(target, "\r\n", 2);
}

static uint8_t *word_put(uint8_t *target, const char *word, size_t size)
{
    target = line_put(target, '$', size);
    target = bytes_put(target, word, size);
    return bytes_put(target, "\r\n", 2);
}

static size_t command_put(uint8_t *target, size_t room, const char *const *words, uint32_t count)
{
    uint8_t *at = line_put(target, '*', count);
    for (uint32_t i = 0; i < count; i++) {
        size_t size = strlen(words[i]);
        KVK_ASSERT((size_t)(at - target) + size + LINE_SIZE + 2 <= room);
        at = word_put(at, words[i], size);
    }
    return (size_t)(at - target);
}

/* The command of a value behind it: `word`, the request's name, and how many bytes come. */
static size_t value_command_put(uint8_t *target, const struct kvk_remote_request *request,
                                const char *word, uint32_t count, size_t value_size)
{
    uint8_t *at = target;
    if (request->asking) {
        const char *const asking[] = {"ASKING"};
        at += command_put(at, KVK_REMOTE_COMMAND_SIZE, asking, 1);
    }
    at = line_put(at, '*', count);
    at = word_put(at, word, strlen(word));
    at = word_put(at, request->name, request->name_size);
    at = line_put(at, '$', value_size);
    KVK_ASSERT(at - target <= KVK_REMOTE_COMMAND_SIZE);
    return (size_t)(at - target);
}

/* The command of a block's request, without a value: its size. */
static size_t block_command_put(struct kvk_remote_request *request, uint8_t *target)
{
    const char *name = request->name;
    /* Where to stop: of a header, or of a value, at the byte that it must not have. So whatever
     * lies there, an answer has a size that we know. */
    uint32_t last = KVK_REMOTE_HEADER_SIZE - 1;
    if (request->batch->operation == KVK_REMOTE_FETCH) {
        last += 1 + kvk_remote_payload_bytes(request->want.space, request->want.part);
    }
    char end[16];
    (void)snprintf(end, sizeof(end), "%u", last);
    size_t size = 0;
    if (request->asking) {
        const char *const asking[] = {"ASKING"};
        size = command_put(target, KVK_REMOTE_COMMAND_SIZE, asking, 1);
    }
    target += size;
    switch (request->batch->operation) {
    case KVK_REMOTE_EXISTS:
    case KVK_REMOTE_FETCH: {
        const char *const words[] = {"GETRANGE", name, "0", end};
        return size + command_put(target, KVK_REMOTE_COMMAND_SIZE - size, words, 4);
    }
    case KVK_REMOTE_DROP: {
        const char *const words[] = {"UNLINK", name};
        return size + command_put(target, KVK_REMOTE_COMMAND_SIZE - size, words, 2);
    }
    case KVK_REMOTE_TAIL: {
        char first[24];
        (void)snprintf(first, sizeof(first), "-%llu",
                       (unsigned long long)request->want.space->block_bytes);
        const char *const words[] = {"GETRANGE", name, first, "-1"};
        return size + command_put(target, KVK_REMOTE_COMMAND_SIZE - size, words, 4);
    }
    case KVK_REMOTE_STORE:
    case KVK_REMOTE_APPEND:
    case KVK_REMOTE_OPERATION_COUNT:
        break;
    }
    KVK_UNREACHABLE();
}

/* What stands behind a value: its time to live, if any. */
static size_t store_end_put(uint64_t ttl_ms, uint8_t *target)
{
    char ttl[32];
    uint8_t *at = bytes_put(target, "\r\n", 2);
    if (ttl_ms > 0) {
        int size = snprintf(ttl, sizeof(ttl), "%llu", (unsigned long long)ttl_ms);
        at = word_put(at, "PX", 2);
        at = word_put(at, ttl, (size_t)size);
    }
    KVK_ASSERT(at - target <= KVK_REMOTE_COMMAND_SIZE);
    return (size_t)(at - target);
}

static bool store_put(struct kvk_remote_connection *connection, struct kvk_remote_request *request)
{
    struct kvk_remote_lane *lane = connection->node->lane;
    const struct kvk_remote_block *block = &request->batch->blocks[request->block];
    size_t payload_bytes = kvk_remote_payload_bytes(request->want.space, request->want.part);
    size_t value_size = KVK_REMOTE_HEADER_SIZE + payload_bytes;
    bool lent = may_lend(connection, request);
    uint8_t *start = output_room(connection, KVK_REMOTE_HEADER_SIZE + (lent ? 0 : payload_bytes) +
                                                 2 * (size_t)KVK_REMOTE_COMMAND_SIZE);
    if (start == NULL) {
        return false;
    }
    uint64_t ttl_ms =
        request->batch->ttl_ms > 0 ? request->batch->ttl_ms : lane->remote->options.ttl_ms;
    size_t size = value_command_put(start, request, "SET", ttl_ms > 0 ? 5 : 3, value_size);
    uint8_t *header = start + size;
    uint8_t *payload = header + KVK_REMOTE_HEADER_SIZE;
    kvk_remote_value_seal(&request->want, lane->crypt, block->pieces, block->piece_count, header,
                          lent ? NULL : payload);
    connection->output.size += size + KVK_REMOTE_HEADER_SIZE;
    if (lent) {
        lend(connection, request);
    } else {
        connection->output.size += payload_bytes;
    }
    connection->output.size +=
        store_end_put(ttl_ms, connection->output.bytes + connection->output.size);
    return true;
}

static bool append_put(struct kvk_remote_connection *connection, struct kvk_remote_request *request)
{
    const struct kvk_remote_piece *piece = &request->batch->blocks[request->block].pieces[0];
    KVK_ASSERT(piece->size_bytes == request->want.space->block_bytes);
    size_t entry_size = (size_t)piece->size_bytes;
    uint8_t *start = output_room(connection, entry_size + 2 * (size_t)KVK_REMOTE_COMMAND_SIZE);
    if (start == NULL) {
        return false;
    }
    size_t size = value_command_put(start, request, "APPEND", 3, entry_size);
    uint8_t *end = bytes_put(start + size, piece->memory, entry_size);
    (void)bytes_put(end, "\r\n", 2);
    connection->output.size += size + entry_size + 2;
    return true;
}

bool kvk_remote_connection_send(struct kvk_remote_connection *connection,
                                struct kvk_remote_request *request)
{
    if (request->batch->operation == KVK_REMOTE_STORE) {
        if (!store_put(connection, request)) {
            return false;
        }
    } else if (request->batch->operation == KVK_REMOTE_APPEND) {
        if (!append_put(connection, request)) {
            return false;
        }
    } else {
        uint8_t *target = output_room(connection, KVK_REMOTE_COMMAND_SIZE);
        if (target == NULL) {
            return false;
        }
        connection->output.size += block_command_put(request, target);
    }
    uint32_t depth = connection->node->lane->remote->options.pipeline_depth;
    request->decoded = false;
    request->value = request->batch->operation == KVK_REMOTE_FETCH;
    request->sent_ns = connection->node->lane->now_ns;
    kvk_remote_list_push(&connection->sent, request);
    connection->full = connection->sent.count >= depth;
    KVK_REMOTE_COUNT(connection->node->lane->remote, requests, 1);
    return true;
}

bool kvk_remote_connection_ask(struct kvk_remote_connection *connection, uint8_t kind)
{
    const struct kvk_remote_options *options = &connection->node->lane->remote->options;
    const char *words[3] = {"PING", NULL, NULL};
    uint32_t count = 1;
    if (kind == KVK_REMOTE_REQUEST_MAP) {
        words[0] = "CLUSTER";
        words[count++] = "SLOTS";
    } else if (kind == KVK_REMOTE_REQUEST_AUTH) {
        words[0] = "AUTH";
        if (options->user[0] != '\0') {
            words[count++] = options->user;
        }
        words[count++] = options->password;
    }
    size_t room = 64;
    for (uint32_t i = 0; i < count; i++) {
        room += strlen(words[i]) + 32;
    }
    struct kvk_remote_request *request = calloc(1, sizeof(*request));
    uint8_t *target = output_room(connection, room);
    if (request == NULL || target == NULL) {
        free(request);
        return false;
    }
    connection->output.size += command_put(target, room, words, count);
    request->kind = kind;
    request->sent_ns = connection->node->lane->now_ns;
    kvk_remote_list_push(&connection->sent, request);
    return true;
}

/* ---- Writing ---- */

/* What comes next of it, in order. */
static uint32_t runs_of(const struct kvk_remote_output *output, struct iovec runs[RUNS_MAX])
{
    uint32_t count = 0;
    size_t at = output->done;
    uint32_t i = 0;
    for (; i < output->lent_count && count + 2 < RUNS_MAX; i++) {
        const struct kvk_remote_lent *lent =
            &output->lent[(output->lent_first + i) % KVK_REMOTE_LENT_MAX];
        if (lent->at > at) {
            runs[count++] =
                (struct iovec){.iov_base = output->bytes + at, .iov_len = lent->at - at};
            at = lent->at;
        }
        runs[count++] =
            (struct iovec){.iov_base = (void *)(uintptr_t)lent->memory, .iov_len = lent->size};
    }
    if (i == output->lent_count && output->size > at) {
        runs[count++] =
            (struct iovec){.iov_base = output->bytes + at, .iov_len = output->size - at};
    }
    return count;
}

/* So many bytes of it were written. */
static void written_take(struct kvk_remote_output *output, size_t written)
{
    while (written > 0) {
        struct kvk_remote_lent *lent = &output->lent[output->lent_first];
        size_t before = (output->lent_count > 0 ? lent->at : output->size) - output->done;
        size_t here = before < written ? before : written;
        output->done += here;
        written -= here;
        if (output->lent_count == 0) {
            KVK_ASSERT(written == 0);
            break;
        }
        here = lent->size < written ? lent->size : written;
        lent->memory += here;
        lent->size -= here;
        output->lent_bytes -= here;
        written -= here;
        if (lent->size == 0 && output->done == lent->at) {
            free(lent->copy);
            output->lent_first = (output->lent_first + 1) % KVK_REMOTE_LENT_MAX;
            output->lent_count--;
        }
    }
    if (output->lent_count == 0 && output->done == output->size) {
        output->done = 0;
        output->size = 0;
    }
}

/* Bytes written; 0: it takes none now; -1: it is over. */
static ssize_t output_write(struct kvk_remote_connection *connection)
{
    struct iovec runs[RUNS_MAX];
    uint32_t count = runs_of(&connection->output, runs);
    KVK_ASSERT(count > 0);
    if (connection->tls != NULL) {
        bool want_write = false;
        size_t done = 0;
        int result = SSL_write_ex(connection->tls, runs[0].iov_base, runs[0].iov_len, &done);
        int outcome = kvk_remote_tls_outcome(connection->tls, result, &want_write);
        return outcome > 0 ? (ssize_t)done : outcome;
    }
    struct msghdr message = {.msg_iov = runs, .msg_iovlen = count};
    ssize_t written = sendmsg(connection->fd, &message, MSG_NOSIGNAL);
    return written < 0 && (errno == EAGAIN || errno == EINTR) ? 0 : written;
}

void kvk_remote_connection_flush(struct kvk_remote_connection *connection)
{
    bool blocked = false;
    if (connection->state < KVK_REMOTE_GREETING || connection->doomed) {
        return;
    }
    while (output_left(connection) > 0 && !blocked) {
        ssize_t written = output_write(connection);
        if (written < 0) {
            kvk_remote_connection_close(connection, true, "it ended the connection");
            return;
        }
        blocked = written == 0;
        if (written > 0) {
            written_take(&connection->output, (size_t)written);
            connection->progress_ns = connection->node->lane->now_ns;
        }
    }
    if (blocked != connection->wants_write) {
        kvk_remote_connection_watch(connection, EPOLL_CTL_MOD, blocked);
    }
}
