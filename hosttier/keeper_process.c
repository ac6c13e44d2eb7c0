/*
 * The daemon's side of the keeper process: start one where none answers, and ask.
 *
 * The process is started so that it is nobody's child and in no terminal's group: it shall outlive
 * the daemon, whatever ends that.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "hosttier/keeper_internal.h"

#define ANSWER_MS 5000 /* for one answer */
#define START_MS 3000  /* until a new process listens */
#define BUSY_MS 2000   /* a daemon that was killed just now still has the connection for a moment */
#define PAUSE_MS 5

static enum kvk_status fail_gone(struct kvk_error *error, const char *what)
{
    return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                    "the keeper process does not answer to %s: %s", what,
                    errno == 0 ? "it has ended" : strerror(errno));
}

/* ---- Starting ---- */

/* In the child: become nobody's child, then the keeper. Only calls that a fork of a process with
 * threads may make. */
static void child_run(const char *program, char *const arguments[])
{
    sigset_t none;
    if (setsid() < 0) {
        _exit(1);
    }
    pid_t pid = fork();
    if (pid != 0) {
        _exit(pid < 0 ? 1 : 0);
    }
    (void)sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
    (void)execv(program, arguments);
    _exit(1);
}

static enum kvk_status process_start(const struct kvk_keeper_options *options,
                                     struct kvk_error *error)
{
    char hold[32];
    char name[] = "kvkeepd";
    char flag[] = "--keeper";
    char hold_flag[] = "--keeper-hold-ms";
    char path[sizeof(((struct sockaddr_un *)NULL)->sun_path)];
    char *const arguments[] = {name, flag, path, hold_flag, hold, NULL};
    (void)snprintf(hold, sizeof(hold), "%llu", (unsigned long long)options->hold_ms);
    (void)snprintf(path, sizeof(path), "%s", options->socket_path);
    const char *program = options->program != NULL ? options->program : "/proc/self/exe";

    pid_t pid = fork();
    if (pid == 0) {
        child_run(program, arguments);
    }
    if (pid < 0) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                        "the keeper process cannot be started: %s", strerror(errno));
    }
    int result = 0;
    while (waitpid(pid, &result, 0) < 0 && errno == EINTR) {
    }
    if (result != 0) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                        "the keeper process cannot be started: no second fork");
    }
    return KVK_OK;
}

/* ---- Connecting ---- */

static void pause_ms(long ms)
{
    struct timespec time = {.tv_nsec = ms * 1000000};
    (void)nanosleep(&time, NULL);
}

/* -1: nobody listens, or errno says what else. */
static int socket_connect(const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, strlen(path) + 1);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) {
        return -1;
    }
    const struct timeval wait = {.tv_sec = ANSWER_MS / 1000};
    struct ucred peer;
    socklen_t size = sizeof(peer);
    if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof(wait)) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof(wait)) != 0 ||
        connect(fd, (const struct sockaddr *)&address, sizeof(address)) != 0) {
        int cause = errno;
        (void)close(fd);
        errno = cause;
        return -1;
    }
    /* Descriptors of tenants' memory go to our own user alone, whoever put a socket there. */
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0 || peer.uid != geteuid()) {
        (void)close(fd);
        errno = EACCES;
        return -1;
    }
    return fd;
}

static enum kvk_status ask(struct kvk_keeper *keeper, enum kvk_keeper_message_kind kind,
                           struct kvk_keeper_message *message, int *fd, const char *what,
                           struct kvk_error *error)
{
    int received = -1;
    message->magic = KVK_KEEPER_MAGIC;
    message->version = KVK_KEEPER_VERSION;
    message->kind = (uint16_t)kind;
    if (keeper->socket < 0) {
        errno = 0;
        return fail_gone(error, what);
    }
    bool answered = kvk_keeper_send(keeper->socket, message, kind == KVK_KEEPER_PUT ? *fd : -1) &&
                    kvk_keeper_receive(keeper->socket, message, &received);
    if (answered && (message->kind != kind || (received >= 0 && kind != KVK_KEEPER_TAKE))) {
        answered = false;
        errno = EBADMSG;
    }
    if (!answered) {
        enum kvk_status status = fail_gone(error, what);
        if (received >= 0) {
            (void)close(received);
        }
        /* What it would say later would be taken for an answer to something else. */
        (void)close(keeper->socket);
        keeper->socket = -1;
        return status;
    }
    if (kind == KVK_KEEPER_TAKE) {
        *fd = received;
    }
    return KVK_OK;
}

static enum kvk_status hello(struct kvk_keeper *keeper, uint64_t hold_ms, struct kvk_error *error)
{
    struct kvk_keeper_message message = {.hold_ms = hold_ms};
    int none = -1;
    enum kvk_status status = ask(keeper, KVK_KEEPER_HELLO, &message, &none, "a greeting", error);
    if (status != KVK_OK) {
        return status;
    }
    keeper->count = message.count;
    if (message.status == KVK_EXISTS) {
        return kvk_fail(error, KVK_EXISTS, KVK_CAUSE_NONE, "keeper_socket",
                        "another daemon holds the keeper process");
    }
    return message.status == KVK_OK
               ? KVK_OK
               : kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                          "the keeper process refuses: status %u", message.status);
}

static enum kvk_status socket_open(const struct kvk_keeper_options *options,
                                   struct kvk_keeper *keeper, struct kvk_error *error)
{
    uint64_t until_ns = 0;
    for (;;) {
        keeper->socket = socket_connect(options->socket_path);
        if (keeper->socket >= 0) {
            return KVK_OK;
        }
        if (errno != ENOENT && errno != ECONNREFUSED) {
            return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "keeper_socket",
                            "cannot connect to the keeper at %s: %s", options->socket_path,
                            strerror(errno));
        }
        uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
        if (until_ns == 0) {
            enum kvk_status status = process_start(options, error);
            if (status != KVK_OK) {
                return status;
            }
            until_ns = now_ns + START_MS * KVK_NS_PER_MS;
        } else if (now_ns >= until_ns) {
            return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_FIELD, "keeper_socket",
                            "the keeper process was started and does not listen at %s",
                            options->socket_path);
        }
        pause_ms(PAUSE_MS);
    }
}

/* ---- The kind ---- */

static enum kvk_status process_take(struct kvk_keeper *keeper,
                                    void (*visit)(void *context, const char *name, int fd),
                                    void *context, struct kvk_error *error)
{
    for (uint32_t i = 0; i < KVK_KEEPER_FILES_MAX; i++) {
        struct kvk_keeper_message message = {.count = i};
        int fd = -1;
        enum kvk_status status = ask(keeper, KVK_KEEPER_TAKE, &message, &fd, "TAKE", error);
        if (status != KVK_OK) {
            return status;
        }
        if (message.status != KVK_OK || fd < 0 || !kvk_keeper_name_ok(message.name)) {
            if (fd >= 0) {
                (void)close(fd);
            }
            return message.status == KVK_NOT_FOUND
                       ? KVK_OK
                       : kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, "",
                                  "the keeper process hands out nothing: status %u",
                                  message.status);
        }
        visit(context, message.name, fd);
    }
    return KVK_OK;
}

static enum kvk_status process_put(struct kvk_keeper *keeper, const char *name, int fd,
                                   struct kvk_error *error)
{
    struct kvk_keeper_message message = {.count = 0};
    memcpy(message.name, name, sizeof(message.name));
    enum kvk_status status = ask(keeper, KVK_KEEPER_PUT, &message, &fd, "PUT", error);
    if (status != KVK_OK) {
        return status;
    }
    keeper->count = message.count;
    if (message.status == KVK_EXISTS) {
        return kvk_fail(error, KVK_EXISTS, KVK_CAUSE_NONE, "name",
                        "the keeper has a file of that name: %s", name);
    }
    return message.status == KVK_OK
               ? KVK_OK
               : kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "", message.count,
                                message.count, "the keeper takes no more than its %u files",
                                message.count);
}

static enum kvk_status process_drop(struct kvk_keeper *keeper, const char *name,
                                    struct kvk_error *error)
{
    struct kvk_keeper_message message = {.count = 0};
    int none = -1;
    memcpy(message.name, name, sizeof(message.name));
    enum kvk_status status = ask(keeper, KVK_KEEPER_DROP, &message, &none, "DROP", error);
    if (status != KVK_OK) {
        return status;
    }
    keeper->count = message.count;
    return message.status == KVK_OK ? KVK_OK
                                    : kvk_fail(error, KVK_NOT_FOUND, KVK_CAUSE_NONE, "name",
                                               "the keeper has no file %s", name);
}

static enum kvk_status process_forget(struct kvk_keeper *keeper, struct kvk_error *error)
{
    struct kvk_keeper_message message = {.count = 0};
    int none = -1;
    enum kvk_status status = ask(keeper, KVK_KEEPER_FORGET, &message, &none, "FORGET", error);
    if (status == KVK_OK) {
        keeper->count = 0;
        (void)close(keeper->socket);
        keeper->socket = -1;
    }
    return status;
}

static void process_disconnect(struct kvk_keeper *keeper)
{
    if (keeper->socket >= 0) {
        (void)close(keeper->socket);
    }
}

static const struct kvk_keeper_ops process_ops = {
    .name = "process",
    .take = process_take,
    .put = process_put,
    .drop = process_drop,
    .forget = process_forget,
    .disconnect = process_disconnect,
};

enum kvk_status kvk_keeper_process_connect(const struct kvk_keeper_options *options,
                                           struct kvk_keeper *keeper, struct kvk_error *error)
{
    keeper->ops = &process_ops;
    size_t size = strlen(options->socket_path);
    if (size == 0 || size >= sizeof(((struct sockaddr_un *)NULL)->sun_path)) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "keeper_socket", size,
                              sizeof(((struct sockaddr_un *)NULL)->sun_path) - 1,
                              "the keeper's socket path has %zu bytes", size);
    }
    uint64_t until_ns = kvk_clock_now(kvk_clock_monotonic()) + BUSY_MS * KVK_NS_PER_MS;
    for (;;) {
        enum kvk_status status = socket_open(options, keeper, error);
        if (status == KVK_OK) {
            status = hello(keeper, options->hold_ms, error);
        }
        if (status == KVK_OK || kvk_clock_now(kvk_clock_monotonic()) >= until_ns ||
            (status != KVK_EXISTS && keeper->socket >= 0)) {
            return status;
        }
        /* Busy with a daemon that is just ending; or it ended itself while we connected. */
        if (keeper->socket >= 0) {
            (void)close(keeper->socket);
            keeper->socket = -1;
        }
        pause_ms(PAUSE_MS);
    }
}
