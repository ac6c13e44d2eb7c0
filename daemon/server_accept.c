/*
 * Connections: one thread accepts them, asks the kernel who is at the other end, hands the
 * descriptor to gRPC, and watches a duplicate of it, so that the death of a peer is seen at once,
 * calls or no calls.
 *
 * A call finds its connection by the number of gRPC's descriptor, which is in the peer's name.
 * That is sound: gRPC closes the descriptor only after the last call of the connection is released,
 * so the number cannot name another connection while a call still carries it; and a call that
 * comes up after the close was seen finds nothing and is refused.
 */
#include "daemon/server_private.h"

#include <errno.h>
#include <fcntl.h>
#include <grpc/grpc_posix.h>
#include <grpc/grpc_security.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/clock.h"

#define EPOLL_BATCH 64
#define ACCEPT_BATCH 64
#define ACCEPT_PAUSE_MS 10

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

void kvk_connection_release(struct kvk_connection *connection)
{
    if (atomic_fetch_sub(&connection->references, 1) != 1) {
        return;
    }
    if (connection->peer.pidfd >= 0) {
        (void)close(connection->peer.pidfd);
    }
    free(connection);
}

struct kvk_connection *kvk_connection_find(struct kvk_connections *connections, int fd)
{
    struct kvk_connection *connection = NULL;
    kvk_lock(&connections->lock);
    if (fd >= 0 && (uint32_t)fd < connections->fd_capacity) {
        connection = connections->by_fd[fd];
        if (connection != NULL) {
            atomic_fetch_add(&connection->references, 1);
        }
    }
    kvk_unlock(&connections->lock);
    return connection;
}

/* False: no memory. */
static bool table_set(struct kvk_connections *connections, struct kvk_connection *connection)
{
    uint32_t fd = (uint32_t)connection->fd;
    bool fits = true;
    kvk_lock(&connections->lock);
    if (fd >= connections->fd_capacity) {
        uint32_t capacity = (fd + 1) * 2;
        struct kvk_connection **table =
            realloc(connections->by_fd, capacity * sizeof(connections->by_fd[0]));
        fits = table != NULL;
        if (fits) {
            memset(table + connections->fd_capacity, 0,
                   (capacity - connections->fd_capacity) * sizeof(table[0]));
            connections->by_fd = table;
            connections->fd_capacity = capacity;
        }
    }
    if (fits) {
        /* An older one of this number was closed by gRPC, so its end is to be seen by us too; where
         * the accept came first, it is replaced here and its event finds itself replaced. */
        connections->by_fd[fd] = connection;
    }
    kvk_unlock(&connections->lock);
    return fits;
}

static void table_clear(struct kvk_connections *connections, struct kvk_connection *connection)
{
    kvk_lock(&connections->lock);
    if (connections->by_fd[connection->fd] == connection) {
        connections->by_fd[connection->fd] = NULL;
    }
    kvk_unlock(&connections->lock);
}

bool kvk_connections_unread(const struct kvk_connections *connections)
{
    struct epoll_event event;
    return epoll_wait(connections->unread_fd, &event, 1, 0) > 0;
}

void kvk_connections_wait(const struct kvk_connections *connections, uint64_t ns)
{
    const struct timespec time = {.tv_sec = (time_t)(ns / KVK_NS_PER_SECOND),
                                  .tv_nsec = (long)(ns % KVK_NS_PER_SECOND)};
    struct epoll_event event;
    if (epoll_pwait2(connections->unread_fd, &event, 1, &time, NULL) < 0 && errno != EINTR) {
        (void)epoll_wait(connections->unread_fd, &event, 1, 1); /* before Linux 5.11 */
    }
}

/* ---- one connection ---- */

/* A descriptor that stands for the peer's process, whatever happens to its number. */
static int peer_pidfd(int fd, pid_t pid)
{
    int pidfd = -1;
    socklen_t size = sizeof(pidfd);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERPIDFD, &pidfd, &size) == 0) {
        return pidfd;
    }
    if (pid <= 0) {
        return -1;
    }
    /* Older kernels: a moment's doubt whether the number still is the peer's. */
    return (int)syscall(SYS_pidfd_open, pid, 0);
}

static void peer_ask(struct kvk_peer *peer, int fd)
{
    peer->uid = UINT32_MAX;
    peer->gid = UINT32_MAX;
    peer->pid = 0;
    peer->pidfd = -1;
    if (peer->kind != KVK_PEER_UNIX) {
        return;
    }
    struct ucred credentials;
    socklen_t size = sizeof(credentials);
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
        return;
    }
    peer->uid = credentials.uid;
    peer->gid = credentials.gid;
    peer->pid = credentials.pid;
    peer->pidfd = peer_pidfd(fd, credentials.pid);
}

static void connection_link(struct kvk_connections *connections, struct kvk_connection *connection)
{
    connection->next = connections->open;
    connection->previous = NULL;
    if (connections->open != NULL) {
        connections->open->previous = connection;
    }
    connections->open = connection;
    atomic_fetch_add(&connections->live_count, 1);
}

static void connection_unlink(struct kvk_connections *connections,
                              struct kvk_connection *connection)
{
    if (connection->next != NULL) {
        connection->next->previous = connection->previous;
    }
    if (connection->previous != NULL) {
        connection->previous->next = connection->next;
    } else {
        connections->open = connection->next;
    }
    atomic_fetch_sub(&connections->live_count, 1);
}

static void connection_close(struct kvk_server *server, struct kvk_connection *connection)
{
    struct kvk_connections *connections = &server->connections;
    /* Closing alone would not end the watch: gRPC's descriptor is of the same open socket. */
    (void)epoll_ctl(connections->epoll_fd, EPOLL_CTL_DEL, connection->watch_fd, NULL);
    (void)epoll_ctl(connections->unread_fd, EPOLL_CTL_DEL, connection->watch_fd, NULL);
    (void)close(connection->watch_fd);
    connection->watch_fd = -1;
    table_clear(connections, connection);
    connection_unlink(connections, connection);
    if (server->options.on_connection_closed != NULL) {
        KVK_ASSERT(kvk_locks_held() == 0);
        server->options.on_connection_closed(&connection->peer, server->options.user_data);
    }
    kvk_connection_release(connection);
}

/* Takes over `fd`. Without memory or descriptors it is closed, and the peer sees that. */
static void connection_open(struct kvk_server *server, int fd, enum kvk_peer_kind kind)
{
    struct kvk_connections *connections = &server->connections;
    if (atomic_load(&connections->live_count) >= server->options.connections_max) {
        goto refuse;
    }
    struct kvk_connection *connection = calloc(1, sizeof(*connection));
    if (connection == NULL) {
        goto refuse;
    }
    connection->fd = fd;
    connection->peer.kind = kind;
    connection->peer.connection_id = ++connections->last_id;
    atomic_init(&connection->references, 1);
    connection->watch_fd = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (connection->watch_fd < 0) {
        free(connection);
        goto refuse;
    }
    if (kind == KVK_PEER_TCP) {
        kvk_peer_address(&connection->peer, fd);
        const int on = 1;
        (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    }
    peer_ask(&connection->peer, fd);
    struct epoll_event event = {.events = EPOLLRDHUP, .data.ptr = connection};
    if (!table_set(connections, connection)) {
        goto refuse_connection;
    }
    if (epoll_ctl(connections->epoll_fd, EPOLL_CTL_ADD, connection->watch_fd, &event) != 0) {
        table_clear(connections, connection);
        goto refuse_connection;
    }
    /* Where there is no memory for this, turns are found out a little later: no more. */
    event.events = EPOLLIN;
    (void)epoll_ctl(connections->unread_fd, EPOLL_CTL_ADD, connection->watch_fd, &event);
    connection_link(connections, connection);
    atomic_fetch_add(&connections->accepted_count, 1);
    grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
    grpc_server_add_channel_from_fd(server->grpc, fd, credentials);
    grpc_server_credentials_release(credentials);
    return;

refuse_connection:
    (void)close(connection->watch_fd);
    kvk_connection_release(connection);
refuse:
    atomic_fetch_add(&connections->refused_count, 1);
    (void)close(fd);
}

/* ---- the thread ---- */

static void pause_ms(long ms)
{
    struct timespec time = {.tv_sec = 0, .tv_nsec = ms * 1000000};
    (void)nanosleep(&time, NULL);
}

static void accept_some(struct kvk_server *server, const struct kvk_listener *listener)
{
    for (int i = 0; i < ACCEPT_BATCH; i++) {
        int fd = accept4(listener->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd >= 0) {
            connection_open(server, fd, listener->kind);
            continue;
        }
        if (errno == EINTR || errno == ECONNABORTED) {
            continue;
        }
        if (errno != EAGAIN) {
            pause_ms(ACCEPT_PAUSE_MS); /* out of descriptors or memory: not in a busy loop */
        }
        return;
    }
}

/* What an event's pointer stands for, if it is a listener; else NULL. */
static const struct kvk_listener *listener_of(const struct kvk_connections *connections,
                                              const void *pointer)
{
    for (uint32_t i = 0; i < connections->listener_count; i++) {
        if (pointer == &connections->listeners[i]) {
            return &connections->listeners[i];
        }
    }
    return NULL;
}

static void *accept_run(void *argument)
{
    struct kvk_server *server = argument;
    struct kvk_connections *connections = &server->connections;
    while (!atomic_load(&connections->stop)) {
        struct epoll_event events[EPOLL_BATCH];
        int count = epoll_wait(connections->epoll_fd, events, EPOLL_BATCH, -1);
        /* Ends before beginnings: who reconnects at once finds its old self gone. */
        for (int i = 0; i < count; i++) {
            void *pointer = events[i].data.ptr;
            if (pointer != connections && listener_of(connections, pointer) == NULL) {
                connection_close(server, pointer);
                events[i].data.ptr = NULL;
            }
        }
        for (int i = 0; i < count; i++) {
            void *pointer = events[i].data.ptr;
            if (pointer == connections) {
                uint64_t value;
                (void)!read(connections->wake_fd, &value, sizeof(value));
                if (atomic_load(&connections->stop_accepting)) {
                    kvk_listeners_stop(connections, &server->options);
                }
                continue;
            }
            const struct kvk_listener *listener = listener_of(connections, pointer);
            if (listener != NULL && !atomic_load(&connections->stop_accepting)) {
                accept_some(server, listener);
            }
        }
    }
    return NULL;
}

static void accept_wake(struct kvk_connections *connections)
{
    const uint64_t one = 1;
    (void)!write(connections->wake_fd, &one, sizeof(one));
}

/* ---- life ---- */

enum kvk_status kvk_connections_init(struct kvk_connections *connections, struct kvk_error *error)
{
    kvk_lock_init(&connections->lock);
    connections->lock_fd = -1;
    connections->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    connections->unread_fd = epoll_create1(EPOLL_CLOEXEC);
    connections->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (connections->epoll_fd < 0 || connections->unread_fd < 0 || connections->wake_fd < 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no descriptors: %s",
                        strerror(errno));
    }
    return KVK_OK;
}

enum kvk_status kvk_connections_start(struct kvk_server *server, struct kvk_error *error)
{
    struct kvk_connections *connections = &server->connections;
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = connections};
    int result = epoll_ctl(connections->epoll_fd, EPOLL_CTL_ADD, connections->wake_fd, &event);
    for (uint32_t i = 0; i < connections->listener_count && result == 0; i++) {
        event.data.ptr = &connections->listeners[i];
        result =
            epoll_ctl(connections->epoll_fd, EPOLL_CTL_ADD, connections->listeners[i].fd, &event);
    }
    if (result != 0) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "cannot watch sockets: %s",
                        strerror(errno));
    }
    enum kvk_status status =
        kvk_server_thread(&connections->thread, "kvk-accept", accept_run, server, error);
    connections->thread_runs = status == KVK_OK;
    return status;
}

void kvk_connections_stop_accepting(struct kvk_server *server)
{
    atomic_store(&server->connections.stop_accepting, true);
    accept_wake(&server->connections);
}

void kvk_connections_finish(struct kvk_server *server)
{
    struct kvk_connections *connections = &server->connections;
    if (connections->thread_runs) {
        atomic_store(&connections->stop, true);
        accept_wake(connections);
        (void)pthread_join(connections->thread, NULL);
        connections->thread_runs = false;
    }
    while (connections->open != NULL) {
        connection_close(server, connections->open);
    }
    kvk_listeners_close(connections, &server->options);
    free(connections->by_fd);
    if (connections->epoll_fd >= 0) {
        (void)close(connections->epoll_fd);
    }
    if (connections->unread_fd >= 0) {
        (void)close(connections->unread_fd);
    }
    if (connections->wake_fd >= 0) {
        (void)close(connections->wake_fd);
    }
    kvk_lock_finish(&connections->lock);
}
