/*
 * The keeper process: a table of names and descriptors, and nothing else. It maps nothing, reads
 * nothing of what it holds, allocates nothing after its start, and cannot be made to: every message
 * has one size.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/clock.h"
#include "hosttier/keeper_internal.h"

#define CONNECTION_COUNT 8
#define GREETING_MS 1000 /* a connection that says nothing is closed */
#define FIRST_MS 10000   /* for the first daemon to come */
#define ANSWER_MS 1000   /* that a peer may leave an answer unread */
#define LOOK_MS 2000     /* between looks whether its socket can still be found */

struct connection {
    int fd; /* -1: free */
    uint64_t until_ns;
};

struct file {
    int fd;
    char name[KVK_KEEPER_NAME_SIZE];
};

struct server {
    const char *path; /* borrowed */
    ino_t inode;      /* of the socket that lies there */
    int listener;
    struct connection connections[CONNECTION_COUNT];
    struct connection *daemon; /* the one that greeted; NULL: none */
    uint64_t hold_ms;
    uint64_t until_ns;  /* when it ends without a daemon */
    struct file *files; /* [file_max], ours; the first file_count are held */
    uint64_t *hashes;   /* [file_max] of their names, so that a search reads little */
    uint32_t file_count, file_max;
    bool ended;
};

static uint64_t now_ns(void)
{
    return kvk_clock_now(kvk_clock_monotonic());
}

static uint64_t after_ms(uint64_t ms)
{
    uint64_t now = now_ns();
    return ms < (UINT64_MAX - now) / KVK_NS_PER_MS ? now + ms * KVK_NS_PER_MS : UINT64_MAX;
}

/* ---- Files ---- */

static uint64_t name_hash(const char name[KVK_KEEPER_NAME_SIZE])
{
    uint64_t hash = UINT64_C(0xcbf29ce484222325); /* FNV-1a */
    for (size_t i = 0; i < KVK_KEEPER_NAME_SIZE && name[i] != '\0'; i++) {
        hash = (hash ^ (uint8_t)name[i]) * UINT64_C(0x100000001b3);
    }
    return hash;
}

/* file_count: there is none. */
static uint32_t file_find(const struct server *server, const char name[KVK_KEEPER_NAME_SIZE])
{
    uint64_t hash = name_hash(name);
    for (uint32_t i = 0; i < server->file_count; i++) {
        if (server->hashes[i] == hash &&
            memcmp(server->files[i].name, name, KVK_KEEPER_NAME_SIZE) == 0) {
            return i;
        }
    }
    return server->file_count;
}

/* Takes the descriptor over. */
static enum kvk_status file_put(struct server *server, const char name[KVK_KEEPER_NAME_SIZE],
                                int fd)
{
    enum kvk_status status = KVK_OK;
    if (file_find(server, name) < server->file_count) {
        status = KVK_EXISTS;
    } else if (server->file_count == server->file_max) {
        status = KVK_EXHAUSTED;
    }
    if (status != KVK_OK) {
        (void)close(fd);
        return status;
    }
    struct file *file = &server->files[server->file_count];
    server->hashes[server->file_count] = name_hash(name);
    server->file_count++;
    file->fd = fd;
    memcpy(file->name, name, sizeof(file->name));
    return KVK_OK;
}

static enum kvk_status file_drop(struct server *server, const char name[KVK_KEEPER_NAME_SIZE])
{
    uint32_t at = file_find(server, name);
    if (at == server->file_count) {
        return KVK_NOT_FOUND;
    }
    (void)close(server->files[at].fd);
    server->file_count--;
    server->files[at] = server->files[server->file_count];
    server->hashes[at] = server->hashes[server->file_count];
    return KVK_OK;
}

static void files_forget(struct server *server)
{
    for (uint32_t i = 0; i < server->file_count; i++) {
        (void)close(server->files[i].fd);
    }
    server->file_count = 0;
}

/* ---- Connections ---- */

static void connection_close(struct server *server, struct connection *connection)
{
    (void)close(connection->fd);
    connection->fd = -1;
    if (server->daemon == connection) {
        server->daemon = NULL;
        server->until_ns = after_ms(server->hold_ms);
    }
}

static void connection_accept(struct server *server)
{
    int fd = accept4(server->listener, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) {
        return;
    }
    /* Its own user's processes alone; and none of them can make it wait. */
    const struct timeval wait = {.tv_sec = ANSWER_MS / 1000};
    struct ucred peer;
    socklen_t size = sizeof(peer);
    struct connection *free_one = NULL;
    for (uint32_t i = 0; i < CONNECTION_COUNT; i++) {
        free_one = server->connections[i].fd < 0 ? &server->connections[i] : free_one;
    }
    if (free_one == NULL || getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 ||
        peer.uid != geteuid() ||
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait)) != 0) {
        (void)close(fd);
        return;
    }
    *free_one = (struct connection){.fd = fd, .until_ns = after_ms(GREETING_MS)};
}

/* A daemon that was killed may be gone before its end was seen here. */
static void daemon_look(struct server *server)
{
    char byte;
    if (server->daemon != NULL &&
        recv(server->daemon->fd, &byte, sizeof(byte), MSG_PEEK | MSG_DONTWAIT) == 0) {
        connection_close(server, server->daemon);
    }
}

static enum kvk_status greet(struct server *server, struct connection *connection,
                             const struct kvk_keeper_message *message)
{
    daemon_look(server);
    if (server->daemon != NULL && server->daemon != connection) {
        return KVK_EXISTS;
    }
    server->daemon = connection;
    server->hold_ms = message->hold_ms;
    return KVK_OK;
}

/* Is it a request that makes sense at this point? Takes nothing over. */
static bool request_ok(const struct server *server, const struct connection *connection,
                       const struct kvk_keeper_message *message, int fd)
{
    bool greeted = server->daemon == connection;
    bool named = kvk_keeper_name_ok(message->name);
    if (message->kind == KVK_KEEPER_HELLO) {
        return fd < 0;
    }
    if (message->kind == KVK_KEEPER_PUT) {
        return greeted && fd >= 0 && named;
    }
    if (message->kind == KVK_KEEPER_DROP) {
        return greeted && fd < 0 && named;
    }
    bool plain = message->kind == KVK_KEEPER_TAKE || message->kind == KVK_KEEPER_FORGET;
    return plain && greeted && fd < 0;
}

static void request_serve(struct server *server, struct connection *connection,
                          struct kvk_keeper_message *message, int fd)
{
    int given = -1;
    enum kvk_status status = KVK_OK;
    switch ((enum kvk_keeper_message_kind)message->kind) {
    case KVK_KEEPER_HELLO:
        status = greet(server, connection, message);
        break;
    case KVK_KEEPER_PUT:
        status = file_put(server, message->name, fd);
        break;
    case KVK_KEEPER_DROP:
        status = file_drop(server, message->name);
        break;
    case KVK_KEEPER_TAKE:
        status = KVK_NOT_FOUND;
        if (message->count < server->file_count) {
            const struct file *file = &server->files[message->count];
            memcpy(message->name, file->name, sizeof(message->name));
            given = file->fd;
            status = KVK_OK;
        }
        break;
    case KVK_KEEPER_FORGET:
        files_forget(server);
        server->ended = true;
        break;
    }
    message->status = (uint32_t)status;
    message->count = server->file_count;
    if (!kvk_keeper_send(connection->fd, message, given) || server->daemon != connection) {
        connection_close(server, connection);
    }
}

static void connection_read(struct server *server, struct connection *connection)
{
    struct kvk_keeper_message message;
    int fd;
    if (!kvk_keeper_receive(connection->fd, &message, &fd)) {
        connection_close(server, connection);
        return;
    }
    if (!request_ok(server, connection, &message, fd)) {
        if (fd >= 0) {
            (void)close(fd);
        }
        connection_close(server, connection);
        return;
    }
    request_serve(server, connection, &message, fd);
}

/* ---- The loop ---- */

/* Where the socket was removed, no daemon can come any more. */
static bool is_reachable(const struct server *server)
{
    struct stat info;
    return lstat(server->path, &info) == 0 && info.st_ino == server->inode;
}

static uint64_t next_end_ns(const struct server *server)
{
    uint64_t look_ns = after_ms(LOOK_MS);
    uint64_t next = server->until_ns < look_ns ? server->until_ns : look_ns;
    next = server->daemon == NULL ? next : UINT64_MAX;
    for (uint32_t i = 0; i < CONNECTION_COUNT; i++) {
        const struct connection *connection = &server->connections[i];
        if (connection->fd >= 0 && connection != server->daemon && connection->until_ns < next) {
            next = connection->until_ns;
        }
    }
    return next;
}

static void time_passes(struct server *server)
{
    uint64_t now = now_ns();
    bool connected = false;
    for (uint32_t i = 0; i < CONNECTION_COUNT; i++) {
        struct connection *connection = &server->connections[i];
        if (connection->fd >= 0 && connection != server->daemon && now >= connection->until_ns) {
            connection_close(server, connection);
        }
        connected = connected || connection->fd >= 0;
    }
    /* Until the first daemon has come, and then whenever one may come again for what is here. */
    bool needless = server->file_count == 0 && server->hold_ms != UINT64_MAX;
    if (!connected && (now >= server->until_ns || needless || !is_reachable(server))) {
        server->ended = true;
    }
}

static void serve(struct server *server)
{
    while (!server->ended) {
        struct pollfd polls[CONNECTION_COUNT + 1];
        polls[CONNECTION_COUNT] = (struct pollfd){.fd = server->listener, .events = POLLIN};
        for (uint32_t i = 0; i < CONNECTION_COUNT; i++) {
            polls[i] = (struct pollfd){.fd = server->connections[i].fd, .events = POLLIN};
        }
        uint64_t now = now_ns();
        uint64_t next = next_end_ns(server);
        uint64_t wait_ms = next <= now ? 0 : (next - now) / KVK_NS_PER_MS + 1;
        int timeout = next == UINT64_MAX || wait_ms > INT32_MAX ? -1 : (int)wait_ms;
        if (poll(polls, CONNECTION_COUNT + 1, timeout) > 0) {
            for (uint32_t i = 0; i < CONNECTION_COUNT && !server->ended; i++) {
                if (polls[i].revents != 0 && server->connections[i].fd == polls[i].fd) {
                    connection_read(server, &server->connections[i]);
                }
            }
            if (polls[CONNECTION_COUNT].revents != 0) {
                connection_accept(server);
            }
        }
        time_passes(server);
    }
}

/* ---- Start and end ---- */

/* -1: another keeper is there, or the path cannot be had. */
static int listen_at(const struct sockaddr_un *address)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    if (bind(fd, (const struct sockaddr *)address, sizeof(*address)) != 0) {
        /* One that a keeper left behind refuses connections, and goes. */
        int other = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
        bool stale = errno == EADDRINUSE && other >= 0 &&
                     connect(other, (const struct sockaddr *)address, sizeof(*address)) != 0 &&
                     errno == ECONNREFUSED;
        if (other >= 0) {
            (void)close(other);
        }
        if (!stale || unlink(address->sun_path) != 0 ||
            bind(fd, (const struct sockaddr *)address, sizeof(*address)) != 0) {
            (void)close(fd);
            return -1;
        }
    }
    if (chmod(address->sun_path, S_IRUSR | S_IWUSR) != 0 || listen(fd, CONNECTION_COUNT) != 0) {
        (void)unlink(address->sun_path);
        (void)close(fd);
        return -1;
    }
    return fd;
}

/* Nothing of the daemon's stays open here: neither its log's pipe nor its terminal. */
static void descriptors_close(void)
{
    int nothing = open("/dev/null", O_RDWR);
    for (int fd = 0; fd <= 2; fd++) {
        if (nothing >= 0 && nothing != fd) {
            (void)dup2(nothing, fd);
        }
    }
    if (close_range(3, ~0U, 0) != 0) {
        for (int fd = 3; fd < 65536; fd++) {
            (void)close(fd);
        }
    }
}

static uint32_t descriptor_room(void)
{
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) {
        return 64;
    }
    if (limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        (void)setrlimit(RLIMIT_NOFILE, &limit);
        (void)getrlimit(RLIMIT_NOFILE, &limit);
    }
    rlim_t own = CONNECTION_COUNT + KVK_KEEPER_DESCRIPTORS_MAX + 16;
    if (limit.rlim_cur <= own) {
        return 1;
    }
    rlim_t room = limit.rlim_cur - own;
    return room < KVK_KEEPER_FILES_MAX ? (uint32_t)room : KVK_KEEPER_FILES_MAX;
}

int kvk_keeper_serve(const char *socket_path, uint64_t hold_ms, uint32_t file_max)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct stat info;
    size_t size = strlen(socket_path);
    if (size == 0 || size >= sizeof(address.sun_path)) {
        return EXIT_FAILURE;
    }
    memcpy(address.sun_path, socket_path, size);
    struct server server = {
        .path = socket_path, .listener = listen_at(&address), .hold_ms = UINT64_MAX};
    if (server.listener < 0) {
        return EXIT_FAILURE;
    }
    if (lstat(socket_path, &info) != 0) {
        (void)close(server.listener);
        return EXIT_FAILURE;
    }
    server.inode = info.st_ino;
    server.file_max = file_max;
    server.files = calloc(file_max, sizeof(*server.files));
    server.hashes = calloc(file_max, sizeof(*server.hashes));
    server.until_ns = after_ms(hold_ms < FIRST_MS ? hold_ms : FIRST_MS);
    for (uint32_t i = 0; i < CONNECTION_COUNT; i++) {
        server.connections[i].fd = -1;
    }
    if (server.files != NULL && server.hashes != NULL) {
        serve(&server);
    }
    if (is_reachable(&server)) {
        (void)unlink(socket_path); /* first: who comes now finds nobody and starts another */
    }
    for (uint32_t i = 0; i < CONNECTION_COUNT; i++) {
        if (server.connections[i].fd >= 0) {
            (void)close(server.connections[i].fd);
        }
    }
    (void)close(server.listener);
    files_forget(&server);
    free(server.files);
    free(server.hashes);
    return EXIT_SUCCESS;
}

int kvk_keeper_main(const char *socket_path, uint64_t hold_ms)
{
    descriptors_close();
    (void)umask(077);
    if (socket_path[0] == '/') {
        (void)!chdir("/"); /* no file system is kept busy */
    }
    (void)prctl(PR_SET_NAME, "kvkeep-keeper");
    (void)prctl(PR_SET_DUMPABLE, 0); /* nobody takes descriptors out of it by ptrace */
    (void)signal(SIGTERM, SIG_IGN);  /* whoever ends the daemon's group does not mean this one */
    (void)signal(SIGINT, SIG_IGN);
    (void)signal(SIGHUP, SIG_IGN);
    (void)signal(SIGPIPE, SIG_IGN);
    return kvk_keeper_serve(socket_path, hold_ms, descriptor_room());
}
