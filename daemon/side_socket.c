#include "daemon/side_socket.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"

#define FIRST_MESSAGE_MS 1000 /* after that a connection that says nothing is closed */
#define ACCEPT_PAUSE_MS 100   /* when descriptors run out */
#define REFUSALS_MAX 16       /* wrong or late map tokens of one connection */
#define EVENT_COUNT 64
#define NONE UINT32_MAX

enum client_state {
    CLIENT_FREE = 0,
    CLIENT_NEW,   /* connected, has not said whose it is */
    CLIENT_BOUND, /* to a session */
    CLIENT_ENDED, /* its connection is closed; only the process is still watched */
};

struct client {
    enum client_state state;
    int fd;    /* -1 once closed */
    int pidfd; /* of the session's process; -1: none, or over */
    uint64_t session_id;
    uint64_t until_ns; /* NEW */
    int32_t pid;
    uint32_t uid;
    uint8_t message[KVK_TOKEN_SIZE];
    uint32_t message_size; /* so far */
    uint32_t refusals;
    uint32_t next_free;
};

struct kvk_side_socket {
    struct kvk_cache *cache; /* borrowed */
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    int listener;
    int epoll;
    int stop; /* eventfd */
    bool accepting;
    uint64_t accept_again_ns; /* while not accepting */
    struct client *clients;   /* [client_count], ours */
    uint32_t client_count;
    uint32_t free_client; /* list by next_free */
    uint32_t new_count;   /* clients that have a deadline */
    uint32_t ended_count;
    uint64_t told_ns; /* when a refusal was last logged */
    uint32_t untold;  /* refusals since then */
    pthread_t thread;
};

/* What an epoll event is about: a client and which of its descriptors. */
enum watched {
    WATCHED_LISTENER = 0,
    WATCHED_STOP,
    WATCHED_SOCKET,
    WATCHED_PROCESS,
};

static uint64_t event_key(enum watched watched, uint32_t client)
{
    return (uint64_t)watched << 32 | client;
}

static bool watch(struct kvk_side_socket *side, int fd, enum watched watched, uint32_t client)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = event_key(watched, client)};
    return epoll_ctl(side->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static void unwatch_close(struct kvk_side_socket *side, int *fd)
{
    if (*fd < 0) {
        return;
    }
    (void)epoll_ctl(side->epoll, EPOLL_CTL_DEL, *fd, NULL);
    (void)close(*fd);
    *fd = -1;
}

/* ---- Clients ---- */

static void client_free(struct kvk_side_socket *side, struct client *client)
{
    if (client->state == CLIENT_NEW) {
        side->new_count--;
    } else if (client->state == CLIENT_ENDED) {
        side->ended_count--;
    }
    unwatch_close(side, &client->fd);
    unwatch_close(side, &client->pidfd);
    *client = (struct client){
        .state = CLIENT_FREE, .fd = -1, .pidfd = -1, .next_free = side->free_client};
    side->free_client = (uint32_t)(client - side->clients);
}

/* Room for one more: where all places are taken, a process that is only watched gives way, since
 * maintenance looks at those too. */
static struct client *client_take(struct kvk_side_socket *side)
{
    if (side->free_client == NONE && side->ended_count > 0) {
        for (uint32_t i = 0; i < side->client_count; i++) {
            if (side->clients[i].state == CLIENT_ENDED) {
                client_free(side, &side->clients[i]);
                break;
            }
        }
    }
    if (side->free_client == NONE) {
        return NULL;
    }
    struct client *client = &side->clients[side->free_client];
    side->free_client = client->next_free;
    return client;
}

/* The connection is over, for whatever reason. Its process may live on. */
static void client_close(struct kvk_side_socket *side, struct client *client)
{
    if (client->state == CLIENT_NEW) {
        client_free(side, client);
        return;
    }
    KVK_ASSERT(client->state == CLIENT_BOUND);
    unwatch_close(side, &client->fd);
    client->state = CLIENT_ENDED;
    side->ended_count++;
    kvk_side_closed(side->cache, client->session_id);
    if (client->pidfd < 0) {
        client_free(side, client);
    }
}

static void process_ended(struct kvk_side_socket *side, struct client *client)
{
    unwatch_close(side, &client->pidfd);
    /* A child may have the connection still; then its end is what is waited for. */
    if (client->state == CLIENT_ENDED) {
        kvk_side_process_ended(side->cache, client->session_id);
        client_free(side, client);
    }
}

static void accept_pause(struct kvk_side_socket *side, bool pause)
{
    struct epoll_event event = {.events = pause ? 0 : EPOLLIN,
                                .data.u64 = event_key(WATCHED_LISTENER, 0)};

    (void)epoll_ctl(side->epoll, EPOLL_CTL_MOD, side->listener, &event);
    side->accepting = !pause;
    side->accept_again_ns = kvk_clock_now(kvk_clock_monotonic()) + ACCEPT_PAUSE_MS * KVK_NS_PER_MS;
}

static void accept_one(struct kvk_side_socket *side)
{
    int fd = accept4(side->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd < 0) {
        if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
            accept_pause(side, true);
        }
        return;
    }
    struct ucred peer = {.pid = 0};
    socklen_t size = sizeof(peer);
    struct client *client = NULL;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0) {
        client = client_take(side);
    }
    if (client == NULL) {
        (void)close(fd);
        return;
    }
    *client = (struct client){.state = CLIENT_NEW,
                              .fd = fd,
                              .pidfd = -1,
                              .pid = peer.pid,
                              .uid = peer.uid,
                              .next_free = NONE};
    client->until_ns = kvk_clock_now(kvk_clock_monotonic()) + FIRST_MESSAGE_MS * KVK_NS_PER_MS;
    side->new_count++;
    if (!watch(side, fd, WATCHED_SOCKET, (uint32_t)(client - side->clients))) {
        client_free(side, client);
    }
}

/* ---- Messages ---- */

/* One byte, and with 0 the descriptors. False: the peer does not take it; bytes are never queued.
 */
static bool answer(const struct client *client, uint8_t code, const int fds[2])
{
    union {
        struct cmsghdr header; /* for its alignment */
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control = {.bytes = {0}};
    struct iovec data = {.iov_base = &code, .iov_len = 1};
    struct msghdr message = {.msg_iov = &data, .msg_iovlen = 1};
    size_t fd_count = fds == NULL || fds[0] < 0 ? 0 : fds[1] < 0 ? 1 : 2;

    if (fd_count > 0) {
        message.msg_control = control.bytes;
        message.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, fd_count * sizeof(int));
    }
    ssize_t sent;
    do {
        sent = sendmsg(client->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    return sent == 1;
}

/* Whoever knocks in a loop does not fill the log. */
static void tell_refusal(struct kvk_side_socket *side, const struct client *client,
                         enum kvk_status status)
{
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());

    if (now_ns - side->told_ns < KVK_NS_PER_SECOND) {
        side->untold++;
        return;
    }
    kvk_log(KVK_LOG_WARNING, "side_socket_refused", "pid=%d uid=%u reason=%s untold=%u",
            client->pid, client->uid, kvk_status_name(status), side->untold);
    side->told_ns = now_ns;
    side->untold = 0;
}

/* The first message says whose the connection is. False: close it. */
static bool bind_client(struct kvk_side_socket *side, struct client *client)
{
    int pidfd = -1;
    uint64_t session_id = 0;

    enum kvk_status status =
        kvk_side_bind(side->cache, client->message, client->pid, client->uid, &session_id, &pidfd);
    if (status != KVK_OK) {
        tell_refusal(side, client, status);
        (void)answer(client, 1, NULL);
        return false;
    }
    side->new_count--;
    client->state = CLIENT_BOUND;
    client->session_id = session_id;
    client->pidfd = pidfd;
    if (pidfd >= 0 && !watch(side, pidfd, WATCHED_PROCESS, (uint32_t)(client - side->clients))) {
        (void)close(client->pidfd); /* maintenance looks at it then */
        client->pidfd = -1;
    }
    return answer(client, 0, NULL);
}

/* Every later message fetches one mapping. A token that came too late is told; many are not. */
static bool take_mapping(struct kvk_side_socket *side, struct client *client)
{
    int fds[2] = {-1, -1};

    enum kvk_status status = kvk_side_take(side->cache, client->session_id, client->message, fds);
    bool good = answer(client, status == KVK_OK ? 0 : 1, fds);
    for (int i = 0; i < 2; i++) {
        if (fds[i] >= 0) {
            (void)close(fds[i]);
        }
    }
    if (status != KVK_OK) {
        client->refusals++;
    }
    return good && client->refusals < REFUSALS_MAX;
}

/* One message at most, so that nobody keeps the thread. False: close the connection. */
static bool client_read(struct kvk_side_socket *side, struct client *client)
{
    /* No control buffer: descriptors that a client sends are dropped by the kernel. */
    ssize_t size = recv(client->fd, client->message + client->message_size,
                        KVK_TOKEN_SIZE - client->message_size, MSG_DONTWAIT);
    if (size < 0) {
        return errno == EAGAIN || errno == EINTR;
    }
    if (size == 0) {
        return false;
    }
    client->message_size += (uint32_t)size;
    if (client->message_size < KVK_TOKEN_SIZE) {
        return true;
    }
    client->message_size = 0;
    return client->state == CLIENT_NEW ? bind_client(side, client) : take_mapping(side, client);
}

/* ---- The thread ---- */

static int wait_ms(const struct kvk_side_socket *side)
{
    uint64_t until_ns = side->accepting ? UINT64_MAX : side->accept_again_ns;

    for (uint32_t i = 0; side->new_count > 0 && i < side->client_count; i++) {
        const struct client *client = &side->clients[i];
        if (client->state == CLIENT_NEW && client->until_ns < until_ns) {
            until_ns = client->until_ns;
        }
    }
    if (until_ns == UINT64_MAX) {
        return -1;
    }
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    return now_ns >= until_ns ? 0 : (int)((until_ns - now_ns) / KVK_NS_PER_MS) + 1;
}

static void close_silent(struct kvk_side_socket *side)
{
    if (!side->accepting && kvk_clock_now(kvk_clock_monotonic()) >= side->accept_again_ns) {
        accept_pause(side, false);
    }
    if (side->new_count == 0) {
        return;
    }
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    for (uint32_t i = 0; i < side->client_count; i++) {
        struct client *client = &side->clients[i];
        if (client->state == CLIENT_NEW && now_ns >= client->until_ns) {
            client_free(side, client);
        }
    }
}

/* False: stop. */
static bool handle(struct kvk_side_socket *side, const struct epoll_event *event)
{
    enum watched watched = (enum watched)(event->data.u64 >> 32);
    struct client *client = &side->clients[(uint32_t)event->data.u64];

    switch (watched) {
    case WATCHED_STOP:
        return false;
    case WATCHED_LISTENER:
        accept_one(side);
        return true;
    case WATCHED_SOCKET:
        /* An earlier event of the same round may have ended it. */
        if (client->fd >= 0 && !client_read(side, client)) {
            client_close(side, client);
        }
        return true;
    case WATCHED_PROCESS:
        if (client->pidfd >= 0) {
            process_ended(side, client);
        }
        return true;
    }
    KVK_UNREACHABLE();
}

static void *run(void *argument)
{
    struct kvk_side_socket *side = argument;
    struct epoll_event events[EVENT_COUNT];

    for (;;) {
        int count = epoll_wait(side->epoll, events, EVENT_COUNT, wait_ms(side));
        for (int i = 0; i < count; i++) {
            if (!handle(side, &events[i])) {
                return NULL;
            }
        }
        close_silent(side);
    }
}

/* ---- Life ---- */

static enum kvk_status refuse_system(struct kvk_error *error, const char *what, const char *path)
{
    return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "server.side_path", "%s %s: %s", what,
                    path, strerror(errno));
}

/* A socket that a dead daemon left behind may go; a file of another kind is somebody's. */
static enum kvk_status remove_stale(const char *path, struct kvk_error *error)
{
    struct stat status;

    if (lstat(path, &status) != 0) {
        return KVK_OK;
    }
    if (!S_ISSOCK(status.st_mode)) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "server.side_path",
                        "%s is there and is no socket", path);
    }
    return unlink(path) == 0 ? KVK_OK : refuse_system(error, "cannot replace", path);
}

static enum kvk_status listen_at(struct kvk_side_socket *side, const char *path, uint32_t mode,
                                 struct kvk_error *error)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    if (strlen(path) >= sizeof(address.sun_path)) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "server.side_path", strlen(path),
                              sizeof(address.sun_path) - 1,
                              "server.side_path is longer than %zu bytes",
                              sizeof(address.sun_path) - 1);
    }
    memcpy(address.sun_path, path, strlen(path) + 1);
    memcpy(side->path, path, strlen(path) + 1);
    enum kvk_status status = remove_stale(path, error);
    if (status != KVK_OK) {
        return status;
    }
    side->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (side->listener < 0) {
        return refuse_system(error, "no socket for", path);
    }
    /* The mode of the descriptor is that of the file from its first moment, less the umask. */
    if (fchmod(side->listener, mode) != 0 ||
        bind(side->listener, (const struct sockaddr *)&address, sizeof(address)) != 0 ||
        chmod(path, mode) != 0 || listen(side->listener, SOMAXCONN) != 0) {
        return refuse_system(error, "cannot listen at", path);
    }
    return KVK_OK;
}

static enum kvk_status side_open(struct kvk_side_socket *side, const char *path, uint32_t mode,
                                 uint32_t connections_max, struct kvk_error *error)
{
    side->clients = calloc(connections_max, sizeof(side->clients[0]));
    if (side->clients == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for side connections");
    }
    side->client_count = connections_max;
    for (uint32_t i = 0; i < connections_max; i++) {
        bool last = i + 1 == connections_max;
        side->clients[i] = (struct client){.fd = -1, .pidfd = -1, .next_free = last ? NONE : i + 1};
    }
    side->free_client = 0;
    enum kvk_status status = listen_at(side, path, mode, error);
    if (status != KVK_OK) {
        return status;
    }
    side->epoll = epoll_create1(EPOLL_CLOEXEC);
    side->stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (side->epoll < 0 || side->stop < 0 || !watch(side, side->listener, WATCHED_LISTENER, 0) ||
        !watch(side, side->stop, WATCHED_STOP, 0)) {
        return refuse_system(error, "cannot watch", path);
    }
    side->accepting = true;
    /* Signals are for the daemon's main thread. */
    sigset_t all;
    sigset_t before;
    (void)sigfillset(&all);
    (void)pthread_sigmask(SIG_SETMASK, &all, &before);
    int result = pthread_create(&side->thread, NULL, run, side);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result != 0) {
        errno = result;
        return refuse_system(error, "no thread for", path);
    }
    (void)pthread_setname_np(side->thread, "kvk-side");
    return KVK_OK;
}

/* Everything but the thread. */
static void side_close(struct kvk_side_socket *side)
{
    for (uint32_t i = 0; i < side->client_count; i++) {
        struct client *client = &side->clients[i];
        if (client->state == CLIENT_BOUND) {
            client_close(side, client);
        }
        if (client->state != CLIENT_FREE) {
            client_free(side, client);
        }
    }
    if (side->listener >= 0) {
        (void)close(side->listener);
        (void)unlink(side->path);
    }
    if (side->epoll >= 0) {
        (void)close(side->epoll);
    }
    if (side->stop >= 0) {
        (void)close(side->stop);
    }
    free(side->clients);
    free(side);
}

enum kvk_status kvk_side_socket_create(struct kvk_cache *cache, const char *path, uint32_t mode,
                                       uint32_t connections_max, struct kvk_side_socket **side,
                                       struct kvk_error *error)
{
    KVK_ASSERT(connections_max > 0);
    struct kvk_side_socket *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the side socket");
    }
    created->cache = cache;
    created->listener = -1;
    created->epoll = -1;
    created->stop = -1;
    created->free_client = NONE;
    enum kvk_status status = side_open(created, path, mode, connections_max, error);
    if (status != KVK_OK) {
        side_close(created);
        return status;
    }
    *side = created;
    return KVK_OK;
}

void kvk_side_socket_destroy(struct kvk_side_socket *side)
{
    if (side == NULL) {
        return;
    }
    uint64_t one = 1;
    ssize_t written = write(side->stop, &one, sizeof(one));
    KVK_ASSERT(written == (ssize_t)sizeof(one));
    int result = pthread_join(side->thread, NULL);
    KVK_ASSERT(result == 0);
    side_close(side);
}
