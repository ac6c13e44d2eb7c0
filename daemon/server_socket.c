/*
 * Listeners: the unix socket with its lock file, and plain TCP. The daemon accepts by itself and
 * hands the descriptors to gRPC, so that it knows who is at the other end. (TLS will be gRPC's own
 * port, added beside these.)
 *
 * Whoever has the lock owns the socket's path. The lock file stays when the daemon goes: removing
 * it would let two daemons lock two files of one name.
 */
#include "daemon/server_private.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/assert.h"

#define LISTEN_BACKLOG 512
#define LOCK_SUFFIX ".lock"
#define HOST_SIZE 256

/* ---- the lock file ---- */

/* Who holds the lock, as it wrote itself down; 0: it did not, or not yet. */
static long lock_read_pid(int fd)
{
    char text[32];
    ssize_t size = pread(fd, text, sizeof(text) - 1, 0);
    if (size <= 0) {
        return 0;
    }
    text[size] = '\0';
    return strtol(text, NULL, 10);
}

static enum kvk_status lock_take(struct kvk_connections *connections, const char *unix_path,
                                 struct kvk_error *error)
{
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path) + sizeof(LOCK_SUFFIX)];
    (void)snprintf(path, sizeof(path), "%s%s", unix_path, LOCK_SUFFIX);
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (fd < 0) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "unix_path",
                        "cannot open the lock file %s: %s", path, strerror(errno));
    }
    if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
        enum kvk_status status;
        if (errno == EWOULDBLOCK) {
            status = kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "unix_path",
                              "another daemon (pid %ld) has the socket %s", lock_read_pid(fd),
                              unix_path);
        } else {
            status = kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "unix_path",
                              "cannot lock %s: %s", path, strerror(errno));
        }
        (void)close(fd);
        return status;
    }
    char text[32];
    int size = snprintf(text, sizeof(text), "%ld\n", (long)getpid());
    /* Only a hint for people: not worth failing for. */
    if (ftruncate(fd, 0) == 0 && pwrite(fd, text, (size_t)size, 0) != size) {
        (void)ftruncate(fd, 0);
    }
    connections->lock_fd = fd;
    return KVK_OK;
}

/* ---- unix ---- */

/* A socket that a daemon left behind goes; anything else at the path is not ours to remove. */
static enum kvk_status remove_stale(const char *path, struct kvk_error *error)
{
    struct stat info;
    if (lstat(path, &info) != 0) {
        if (errno == ENOENT) {
            return KVK_OK;
        }
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "unix_path",
                        "cannot look at %s: %s", path, strerror(errno));
    }
    if (!S_ISSOCK(info.st_mode)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "unix_path",
                        "%s exists and is not a socket", path);
    }
    if (unlink(path) != 0) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "unix_path",
                        "cannot remove the stale socket %s: %s", path, strerror(errno));
    }
    return KVK_OK;
}

/* Nobody can connect between bind and listen, so the mode is right before the first peer comes. */
static int bind_unix(const struct sockaddr_un *address, mode_t mode)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return -1;
    }
    if (bind(fd, (const struct sockaddr *)address, sizeof(*address)) != 0 ||
        chmod(address->sun_path, mode) != 0 || listen(fd, LISTEN_BACKLOG) != 0) {
        int saved = errno;
        (void)close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

static enum kvk_status listen_unix(struct kvk_connections *connections,
                                   const struct kvk_server_options *options,
                                   struct kvk_error *error)
{
    const char *path = options->unix_path;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t size = strlen(path);
    if (size >= sizeof(address.sun_path)) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "unix_path", size,
                              sizeof(address.sun_path) - 1,
                              "the socket's path has %zu bytes, the system allows %zu", size,
                              sizeof(address.sun_path) - 1);
    }
    if ((options->unix_mode & ~0777u) != 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "unix_mode",
                        "must be permission bits, such as 0600");
    }
    memcpy(address.sun_path, path, size + 1);
    enum kvk_status status = lock_take(connections, path, error);
    if (status != KVK_OK) {
        return status;
    }
    status = remove_stale(path, error);
    if (status != KVK_OK) {
        return status;
    }
    int fd = bind_unix(&address, (mode_t)options->unix_mode);
    if (fd < 0) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "unix_path",
                        "cannot listen on %s: %s", path, strerror(errno));
    }
    struct kvk_listener *listener = &connections->listeners[connections->listener_count++];
    listener->fd = fd;
    listener->kind = KVK_PEER_UNIX;
    struct stat info;
    if (lstat(path, &info) == 0) {
        connections->socket_device = info.st_dev;
        connections->socket_inode = info.st_ino;
    }
    return KVK_OK;
}

/* ---- TCP ---- */

/* "host:port", "[v6]:port"; false: neither. */
static bool split_address(const char *text, char host[HOST_SIZE], const char **port)
{
    const char *colon = strrchr(text, ':');
    if (colon == NULL || colon == text || colon[1] == '\0') {
        return false;
    }
    size_t size = (size_t)(colon - text);
    if (text[0] == '[') {
        if (text[size - 1] != ']') {
            return false;
        }
        text++;
        size -= 2;
    } else if (memchr(text, ':', size) != NULL) {
        return false;
    }
    if (size == 0 || size >= HOST_SIZE) {
        return false;
    }
    memcpy(host, text, size);
    host[size] = '\0';
    *port = colon + 1;
    return true;
}

static int bind_tcp(const struct addrinfo *info)
{
    int fd = socket(info->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
        return -1;
    }
    const int on = 1;
    /* REUSEADDR for restarts; never REUSEPORT, by which a second daemon would share the port. */
    if (setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) != 0 ||
        bind(fd, info->ai_addr, info->ai_addrlen) != 0 || listen(fd, LISTEN_BACKLOG) != 0) {
        int saved = errno;
        (void)close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

static uint16_t bound_port(int fd)
{
    union {
        struct sockaddr any;
        struct sockaddr_in v4;
        struct sockaddr_in6 v6;
    } address;
    memset(&address, 0, sizeof(address));
    socklen_t size = sizeof(address);
    if (getsockname(fd, &address.any, &size) != 0) {
        return 0;
    }
    return ntohs(address.any.sa_family == AF_INET6 ? address.v6.sin6_port : address.v4.sin_port);
}

static enum kvk_status listen_tcp(struct kvk_connections *connections, const char *text,
                                  struct kvk_error *error)
{
    char host[HOST_SIZE];
    const char *port;
    if (!split_address(text, host, &port)) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "tcp_addresses",
                        "\"%.64s\" is not host:port or [v6]:port", text);
    }
    struct addrinfo hints = {.ai_family = AF_UNSPEC,
                             .ai_socktype = SOCK_STREAM,
                             .ai_flags = AI_PASSIVE | AI_NUMERICSERV};
    struct addrinfo *found = NULL;
    int result = getaddrinfo(host, port, &hints, &found);
    if (result != 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "tcp_addresses",
                        "cannot resolve \"%.64s\": %s", text, gai_strerror(result));
    }
    int fd = bind_tcp(found);
    int saved = errno;
    freeaddrinfo(found);
    if (fd < 0) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "tcp_addresses",
                        "cannot listen on %.64s: %s", text, strerror(saved));
    }
    struct kvk_listener *listener = &connections->listeners[connections->listener_count++];
    listener->fd = fd;
    listener->kind = KVK_PEER_TCP;
    listener->port = bound_port(fd);
    return KVK_OK;
}

/* ---- all ---- */

enum kvk_status kvk_listeners_open(struct kvk_connections *connections,
                                   const struct kvk_server_options *options,
                                   struct kvk_error *error)
{
    bool has_unix = options->unix_path != NULL && options->unix_path[0] != '\0';
    if (!has_unix && options->tcp_address_count == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "unix_path",
                        "neither a unix socket nor a TCP address is given");
    }
    bool tls = options->tls.certificate != NULL && options->tls.certificate[0] != '\0';
    if (options->tcp_address_count > 0 && !options->tcp_insecure && !tls) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "tcp_addresses",
                        "TCP without encryption must be allowed on purpose (insecure = yes)");
    }
    enum kvk_status status = KVK_OK;
    if (has_unix) {
        status = listen_unix(connections, options, error);
    }
    /* gRPC listens itself where it speaks TLS. */
    for (uint32_t i = 0; i < options->tcp_address_count && status == KVK_OK && !tls; i++) {
        status = listen_tcp(connections, options->tcp_addresses[i], error);
    }
    return status;
}

void kvk_listeners_stop(struct kvk_connections *connections,
                        const struct kvk_server_options *options)
{
    for (uint32_t i = 0; i < connections->listener_count; i++) {
        (void)close(connections->listeners[i].fd);
    }
    connections->listener_count = 0;
    if (connections->socket_inode != 0) {
        struct stat info;
        if (lstat(options->unix_path, &info) == 0 && info.st_dev == connections->socket_device &&
            info.st_ino == connections->socket_inode) {
            (void)unlink(options->unix_path);
        }
        connections->socket_inode = 0;
    }
}

void kvk_listeners_close(struct kvk_connections *connections,
                         const struct kvk_server_options *options)
{
    kvk_listeners_stop(connections, options);
    if (connections->lock_fd >= 0) {
        (void)close(connections->lock_fd); /* and the lock with it */
        connections->lock_fd = -1;
    }
}
