/*
 * One connection to one node: a non-blocking socket, TLS around it where asked for, commands out,
 * answers in, in order. It begins with AUTH and PING, and takes requests once those went well.
 */
#include "hosttier/remote_internal.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/assert.h"

#define READ_ROUNDS_MAX 16 /* of a connection, before others have their turn */
#define FEED_SIZE (16U << 10)
/* What the reader may hold unread: one value, and what else came with it. */
#define UNREAD_MAX (KVK_REMOTE_VALUE_MAX + KVK_REMOTE_READ_SIZE + (64U << 10))

static uint64_t now_of(const struct kvk_remote_connection *connection)
{
    return connection->node->lane->now_ns;
}

/* ---- Beginning and end ---- */

static void watch(struct kvk_remote_connection *connection, int how, bool write)
{
    struct epoll_event event = {.events = EPOLLIN | (write ? EPOLLOUT : 0U),
                                .data.ptr = connection};
    int failed = epoll_ctl(connection->node->lane->epoll_fd, how, connection->fd, &event);
    KVK_ASSERT(failed == 0 || errno == ENOMEM || errno == ENOSPC);
    connection->wants_write = write;
}

void kvk_remote_connection_open(struct kvk_remote_connection *connection)
{
    struct kvk_remote_node *node = connection->node;
    KVK_ASSERT(connection->state == KVK_REMOTE_CLOSED && node->socket_address_size > 0);

    connection->fd =
        socket(node->socket_address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (connection->fd < 0) {
        connection->retry_ns = now_of(connection) + KVK_NS_PER_SECOND;
        kvk_remote_say(node->lane->remote, "no socket: %s", strerror(errno));
        return;
    }
    int one = 1;
    (void)setsockopt(connection->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    (void)setsockopt(connection->fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
    connection->reader = redisReaderCreateWithFunctions(&kvk_remote_reply_functions);
    connection->state = KVK_REMOTE_CONNECTING;
    connection->progress_ns = now_of(connection);
    watch(connection, EPOLL_CTL_ADD, true);
    if (connection->reader == NULL) {
        kvk_remote_connection_close(connection, true, "no memory for a connection");
        return;
    }
    connection->reader->maxbuf = 0; /* keep its buffer: the next value needs it again */
    connection->reader->privdata = connection;
    if (connect(connection->fd, (const struct sockaddr *)&node->socket_address,
                node->socket_address_size) != 0 &&
        errno != EINPROGRESS) {
        kvk_remote_connection_close(connection, true, strerror(errno));
    }
}

void kvk_remote_connection_close(struct kvk_remote_connection *connection, bool failed,
                                 const char *reason)
{
    struct kvk_remote_lane *lane = connection->node->lane;
    if (connection->state == KVK_REMOTE_CLOSED) {
        return;
    }
    if (failed && connection->state == KVK_REMOTE_READY) {
        KVK_REMOTE_COUNT(lane->remote, lost_connections, 1);
    } else if (failed) {
        KVK_REMOTE_COUNT(lane->remote, connect_failures, 1);
    }
    SSL_free(connection->tls);
    connection->tls = NULL;
    (void)close(connection->fd);
    connection->fd = -1;
    if (connection->reader != NULL) {
        redisReaderFree(connection->reader);
        connection->reader = NULL;
    }
    connection->output_size = 0;
    connection->output_done = 0;
    connection->unread = false;
    connection->full = false;
    connection->state = KVK_REMOTE_CLOSED;
    connection->retry_ns =
        now_of(connection) + (failed ? lane->remote->options.breaker_retry_ms * KVK_NS_PER_MS : 0);

    if (failed) {
        kvk_remote_node_failed(connection->node, reason);
    }
    struct kvk_remote_list sent = kvk_remote_list_take(&connection->sent);
    struct kvk_remote_request *request = NULL;
    while ((request = kvk_remote_list_pop(&sent)) != NULL) {
        if (request->kind == KVK_REMOTE_REQUEST_BLOCK) {
            request->asking = false;
            kvk_remote_request_repeat(lane, request, KVK_REMOTE_REPEAT_PAUSE_NS);
            continue;
        }
        if (request->kind == KVK_REMOTE_REQUEST_MAP) {
            lane->map_asked = false;
        }
        free(request);
    }
}

/* ---- Out ---- */

bool kvk_remote_connection_takes(const struct kvk_remote_connection *connection)
{
    return connection->state == KVK_REMOTE_READY && !connection->full &&
           connection->output_size - connection->output_done < KVK_REMOTE_OUTPUT_HIGH;
}

/* Room for so many more bytes of output, or NULL: no memory. */
static uint8_t *output_room(struct kvk_remote_connection *connection, size_t size)
{
    if (connection->output_done == connection->output_size) {
        connection->output_done = 0;
        connection->output_size = 0;
    }
    /* Not sooner than half of it is written, or every request would move all of the others. */
    if (connection->output_done > 0 &&
        connection->output_capacity - connection->output_size < size &&
        connection->output_done >= connection->output_capacity / 2) {
        memmove(connection->output, connection->output + connection->output_done,
                connection->output_size - connection->output_done);
        connection->output_size -= connection->output_done;
        connection->output_done = 0;
    }
    if (connection->output_capacity - connection->output_size < size) {
        size_t capacity = connection->output_size + size;
        capacity += capacity / 2;
        uint8_t *grown = realloc(connection->output, capacity);
        if (grown == NULL) {
            return NULL;
        }
        connection->output = grown;
        connection->output_capacity = capacity;
    }
    return connection->output + connection->output_size;
}

static size_t command_put(uint8_t *target, size_t room, const char *const *words, uint32_t count)
{
    int size = snprintf((char *)target, room, "*%u\r\n", count);
    for (uint32_t i = 0; i < count; i++) {
        KVK_ASSERT(size > 0 && (size_t)size < room);
        size += snprintf((char *)target + size, room - (size_t)size, "$%zu\r\n%s\r\n",
                         strlen(words[i]), words[i]);
    }
    KVK_ASSERT(size > 0 && (size_t)size < room);
    return (size_t)size;
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

static bool store_put(struct kvk_remote_connection *connection, struct kvk_remote_request *request)
{
    struct kvk_remote_lane *lane = connection->node->lane;
    const struct kvk_remote_block *block = &request->batch->blocks[request->block];
    size_t value_size =
        KVK_REMOTE_HEADER_SIZE + kvk_remote_payload_bytes(request->want.space, request->want.part);
    uint8_t *start = output_room(connection, value_size + 2 * (size_t)KVK_REMOTE_COMMAND_SIZE);
    if (start == NULL) {
        return false;
    }
    uint64_t ttl_ms =
        request->batch->ttl_ms > 0 ? request->batch->ttl_ms : lane->remote->options.ttl_ms;
    int size = snprintf((char *)start, KVK_REMOTE_COMMAND_SIZE,
                        "%s*%d\r\n$3\r\nSET\r\n$%u\r\n%s\r\n$%zu\r\n",
                        request->asking ? "*1\r\n$6\r\nASKING\r\n" : "", ttl_ms > 0 ? 5 : 3,
                        request->name_size, request->name, value_size);
    KVK_ASSERT(size > 0 && size < KVK_REMOTE_COMMAND_SIZE);
    uint8_t *at = start + size;
    kvk_remote_value_encode(&request->want, lane->crypt, block->pieces, block->piece_count, at);
    at += value_size;
    char ttl[32];
    char rest[KVK_REMOTE_COMMAND_SIZE] = "\r\n";
    if (ttl_ms > 0) {
        (void)snprintf(ttl, sizeof(ttl), "%llu", (unsigned long long)ttl_ms);
        (void)snprintf(rest, sizeof(rest), "\r\n$2\r\nPX\r\n$%zu\r\n%s\r\n", strlen(ttl), ttl);
    }
    memcpy(at, rest, strlen(rest));
    at += strlen(rest);
    connection->output_size += (size_t)(at - start);
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
    int size = snprintf((char *)start, KVK_REMOTE_COMMAND_SIZE,
                        "%s*3\r\n$6\r\nAPPEND\r\n$%u\r\n%s\r\n$%zu\r\n",
                        request->asking ? "*1\r\n$6\r\nASKING\r\n" : "", request->name_size,
                        request->name, entry_size);
    KVK_ASSERT(size > 0 && size < KVK_REMOTE_COMMAND_SIZE);
    memcpy(start + size, piece->memory, entry_size);
    uint8_t *end = start + size + entry_size;
    end[0] = '\r';
    end[1] = '\n';
    connection->output_size += (size_t)size + entry_size + 2;
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
        connection->output_size += block_command_put(request, target);
    }
    uint32_t depth = connection->node->lane->remote->options.pipeline_depth;
    request->decoded = false;
    request->sent_ns = now_of(connection);
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
    connection->output_size += command_put(target, room, words, count);
    request->kind = kind;
    request->sent_ns = now_of(connection);
    kvk_remote_list_push(&connection->sent, request);
    return true;
}

/* What came of TLS: 1 goes on, 0 waits, -1 is over. `want_write`: what it waits for. */
static int tls_outcome(SSL *tls, int result, bool *want_write)
{
    int kind = SSL_get_error(tls, result);
    *want_write = kind == SSL_ERROR_WANT_WRITE;
    ERR_clear_error();
    if (result > 0) {
        return 1;
    }
    return kind == SSL_ERROR_WANT_READ || kind == SSL_ERROR_WANT_WRITE ? 0 : -1;
}

void kvk_remote_connection_flush(struct kvk_remote_connection *connection)
{
    if (connection->state < KVK_REMOTE_GREETING) {
        return;
    }
    bool blocked = false;
    while (connection->output_done < connection->output_size && !blocked) {
        const uint8_t *from = connection->output + connection->output_done;
        size_t size = connection->output_size - connection->output_done;
        ssize_t written = 0;
        if (connection->tls != NULL) {
            bool want_write = false;
            size_t done = 0;
            int result = SSL_write_ex(connection->tls, from, size, &done);
            int outcome = tls_outcome(connection->tls, result, &want_write);
            written = outcome > 0 ? (ssize_t)done : outcome;
            blocked = outcome == 0;
        } else {
            written = send(connection->fd, from, size, MSG_NOSIGNAL);
            if (written < 0 && (errno == EAGAIN || errno == EINTR)) {
                written = 0;
                blocked = true;
            }
        }
        if (written < 0) {
            kvk_remote_connection_close(connection, true, "it ended the connection");
            return;
        }
        if (written > 0) {
            connection->output_done += (size_t)written;
            connection->progress_ns = now_of(connection);
        }
    }
    if (blocked != connection->wants_write) {
        watch(connection, EPOLL_CTL_MOD, blocked);
    }
}

/* ---- In ---- */

static void greet(struct kvk_remote_connection *connection)
{
    const struct kvk_remote_options *options = &connection->node->lane->remote->options;
    connection->state = KVK_REMOTE_GREETING;
    bool ok = options->password[0] == '\0' ||
              kvk_remote_connection_ask(connection, KVK_REMOTE_REQUEST_AUTH);
    if (!ok || !kvk_remote_connection_ask(connection, KVK_REMOTE_REQUEST_PING)) {
        kvk_remote_connection_close(connection, true, "no memory for a connection");
        return;
    }
    kvk_remote_connection_flush(connection);
}

static void handshake(struct kvk_remote_connection *connection)
{
    bool want_write = false;
    int result = SSL_do_handshake(connection->tls);
    long verified = SSL_get_verify_result(connection->tls);
    int outcome = tls_outcome(connection->tls, result, &want_write);
    if (outcome > 0) {
        greet(connection);
    } else if (outcome < 0) {
        kvk_remote_connection_close(connection, true,
                                    verified != X509_V_OK ? X509_verify_cert_error_string(verified)
                                                          : "no TLS could be agreed on");
    } else if (want_write != connection->wants_write) {
        watch(connection, EPOLL_CTL_MOD, want_write);
    }
}

static void connected(struct kvk_remote_connection *connection)
{
    struct kvk_remote *remote = connection->node->lane->remote;
    int failed = 0;
    socklen_t size = sizeof(failed);
    (void)getsockopt(connection->fd, SOL_SOCKET, SO_ERROR, &failed, &size);
    if (failed != 0) {
        kvk_remote_connection_close(connection, true, strerror(failed));
        return;
    }
    KVK_REMOTE_COUNT(remote, connects, 1);
    if (remote->tls == NULL) {
        greet(connection);
        return;
    }
    connection->tls = kvk_remote_tls_connect(remote, &connection->node->address, connection->fd);
    if (connection->tls == NULL) {
        kvk_remote_connection_close(connection, true, "no memory for TLS");
        return;
    }
    connection->state = KVK_REMOTE_HANDSHAKE;
    handshake(connection);
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

/* Everything that the reader has whole. False: the connection was closed. */
static bool answers_take(struct kvk_remote_connection *connection)
{
    struct kvk_remote *remote = connection->node->lane->remote;
    uint32_t depth = remote->options.pipeline_depth;
    for (;;) {
        void *made = NULL;
        if (redisReaderGetReply(connection->reader, &made) != REDIS_OK ||
            connection->reader->len - connection->reader->pos > UNREAD_MAX ||
            (made != NULL && connection->sent.first == NULL)) {
            kvk_remote_reply_free(made);
            KVK_REMOTE_COUNT(remote, protocol_errors, 1);
            kvk_remote_connection_close(connection, true, "its answers are not the protocol's");
            return false;
        }
        if (made == NULL) {
            return true;
        }
        struct kvk_remote_request *request = connection->sent.first;
        if (request->asking) {
            request->asking = false;
            kvk_remote_reply_free(made);
            continue;
        }
        (void)kvk_remote_list_pop(&connection->sent);
        connection->full = connection->full && connection->sent.count > depth / 2;
        bool open = true;
        if (request->kind == KVK_REMOTE_REQUEST_BLOCK) {
            kvk_remote_request_answered(connection, request, made);
        } else {
            uint8_t kind = request->kind;
            free(request);
            open = own_answered(connection, kind, made);
        }
        kvk_remote_reply_free(made);
        if (!open) {
            return false;
        }
    }
}

/* Bytes read; 0: none now; -1: it is over. */
static ssize_t input_read(struct kvk_remote_connection *connection, uint8_t *input)
{
    if (connection->tls != NULL) {
        bool want_write = false;
        size_t done = 0;
        int result = SSL_read_ex(connection->tls, input, KVK_REMOTE_READ_SIZE, &done);
        int outcome = tls_outcome(connection->tls, result, &want_write);
        return outcome > 0 ? (ssize_t)done : outcome;
    }
    ssize_t size = recv(connection->fd, input, KVK_REMOTE_READ_SIZE, 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) {
        return 0;
    }
    return size > 0 ? size : -1;
}

static void input_take(struct kvk_remote_connection *connection)
{
    uint8_t *input = connection->node->lane->input;
    connection->unread = false;
    for (int round = 0; round < READ_ROUNDS_MAX; round++) {
        ssize_t size = input_read(connection, input);
        if (size < 0) {
            kvk_remote_connection_close(connection, true, "it ended the connection");
            return;
        }
        if (size == 0) {
            return;
        }
        connection->progress_ns = now_of(connection);
        /* In slices: the reader moves what it has left each time it gave some answers. */
        for (size_t at = 0; at < (size_t)size; at += FEED_SIZE) {
            size_t slice = (size_t)size - at < FEED_SIZE ? (size_t)size - at : FEED_SIZE;
            if (redisReaderFeed(connection->reader, (const char *)input + at, slice) != REDIS_OK) {
                kvk_remote_connection_close(connection, true, "no memory for an answer");
                return;
            }
            if (!answers_take(connection)) {
                return;
            }
        }
        if (connection->tls == NULL && (size_t)size < KVK_REMOTE_READ_SIZE) {
            return;
        }
    }
    connection->unread = connection->tls != NULL;
}

void kvk_remote_connection_event(struct kvk_remote_connection *connection, uint32_t events)
{
    switch (connection->state) {
    case KVK_REMOTE_CLOSED:
        break;
    case KVK_REMOTE_CONNECTING:
        connected(connection);
        break;
    case KVK_REMOTE_HANDSHAKE:
        handshake(connection);
        break;
    case KVK_REMOTE_GREETING:
    case KVK_REMOTE_READY:
        if ((events & EPOLLOUT) != 0) {
            kvk_remote_connection_flush(connection);
        }
        if (connection->state != KVK_REMOTE_CLOSED &&
            ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0 || connection->unread)) {
            input_take(connection);
        }
        break;
    }
}
