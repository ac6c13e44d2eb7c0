/*
 * One connection to one node: a non-blocking socket, TLS around it where asked for, commands out,
 * answers in, in order. It begins with AUTH and PING, and takes requests once those went well.
 */
#include "hosttier/remote_internal.h"

#include <errno.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <unistd.h>

#include "base/assert.h"

static uint64_t now_of(const struct kvk_remote_connection *connection)
{
    return connection->node->lane->now_ns;
}

/* ---- Beginning and end ---- */

void kvk_remote_connection_watch(struct kvk_remote_connection *connection, int how, bool write)
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
    connection->arrival =
        aligned_alloc(_Alignof(struct kvk_remote_arrival), sizeof(struct kvk_remote_arrival));
    enum kvk_status made = kvk_remote_crypt_create(&connection->crypt, NULL);
    connection->state = KVK_REMOTE_CONNECTING;
    connection->progress_ns = now_of(connection);
    kvk_remote_connection_watch(connection, EPOLL_CTL_ADD, true);
    if (connection->reader == NULL || connection->arrival == NULL || made != KVK_OK) {
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
    free(connection->arrival);
    connection->arrival = NULL;
    kvk_remote_crypt_destroy(connection->crypt);
    connection->crypt = NULL;
    connection->reply_bytes = 0;
    connection->mid_reply = false;
    connection->in_value = false;
    connection->line_size = 0;
    kvk_remote_output_clear(connection);
    connection->unread = false;
    connection->doomed = false;
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

/* ---- The first words ---- */

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
    int outcome = kvk_remote_tls_outcome(connection->tls, result, &want_write);
    if (outcome > 0) {
        greet(connection);
    } else if (outcome < 0) {
        kvk_remote_connection_close(connection, true,
                                    verified != X509_V_OK ? X509_verify_cert_error_string(verified)
                                                          : "no TLS could be agreed on");
    } else if (want_write != connection->wants_write) {
        kvk_remote_connection_watch(connection, EPOLL_CTL_MOD, want_write);
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
            kvk_remote_connection_read(connection);
        }
        break;
    }
}
