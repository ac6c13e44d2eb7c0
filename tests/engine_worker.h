/*
 * A worker's process for tests: a real child that connects to the side socket, maps what it is
 * given, reads and writes there, and dies when told to. The parent commands it over a socket pair,
 * one command and one answer at a time. The child makes system calls alone, so that it may be
 * forked from a process with threads.
 */
#ifndef KVK_TESTS_ENGINE_WORKER_H
#define KVK_TESTS_ENGINE_WORKER_H

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <criterion/criterion.h>

struct worker {
    pid_t pid;
    int pidfd;
    int control;
};

struct worker_command {
    char code;
    uint8_t token[16];
    uint64_t offset;
    uint64_t value;
    char path[108];
};

/* What the child has. */
struct worker_state {
    int side;
    int fds[2];
    volatile uint8_t *memory;
    size_t size;
};

static int64_t worker_connect(struct worker_state *state, const char *path)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, path, sizeof(address.sun_path));
    state->side = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    return connect(state->side, (const struct sockaddr *)&address, sizeof(address)) == 0 ? 0
                                                                                         : -errno;
}

/* Send a token, get one byte and perhaps descriptors. -1: the connection is at its end. */
static int64_t worker_ask(struct worker_state *state, const uint8_t token[16])
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(2 * sizeof(int))];
    } control;
    uint8_t code = 255;
    struct iovec data = {.iov_base = &code, .iov_len = 1};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = control.bytes,
                             .msg_controllen = sizeof(control.bytes)};

    if (send(state->side, token, 16, MSG_NOSIGNAL) != 16) {
        return -1;
    }
    if (recvmsg(state->side, &message, MSG_CMSG_CLOEXEC) != 1) {
        return -1;
    }
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL) {
        memcpy(state->fds, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
    }
    return code;
}

static int64_t worker_map(struct worker_state *state, int fd, size_t size, int protection)
{
    void *memory = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) {
        return -errno;
    }
    state->memory = memory;
    state->size = size;
    return 0;
}

static int64_t worker_fork(void)
{
    pid_t child = fork();
    while (child == 0) {
        (void)pause();
    }
    return child;
}

static int64_t worker_run(struct worker_state *state, const struct worker_command *command)
{
    uint8_t bytes[64] = {0};

    switch (command->code) {
    case 'b': /* connect and bind */
        return worker_connect(state, command->path) == 0 ? worker_ask(state, command->token) : -1;
    case 'k': /* connect alone */
        return worker_connect(state, command->path);
    case 't': /* take a mapping's descriptors */
        return worker_ask(state, command->token);
    case 's': /* send some bytes */
        return send(state->side, bytes, command->value, MSG_NOSIGNAL);
    case 'e': /* wait for the end of the connection */
        return recv(state->side, bytes, 1, 0);
    case 'm':
        return worker_map(state, state->fds[0], command->offset, (int)command->value);
    case 'g':
        return worker_map(state, state->fds[1], command->offset, (int)command->value);
    case 'p':
        return mprotect((void *)(uintptr_t)state->memory, state->size, PROT_READ | PROT_WRITE) == 0
                   ? 0
                   : -errno;
    case 'w':
        state->memory[command->offset] = (uint8_t)command->value;
        return 0;
    case 'r':
        return state->memory[command->offset];
    case 'f':
        return ftruncate(state->fds[command->offset], (off_t)command->value) == 0 ? 0 : -errno;
    case 'o':
        return write(state->fds[command->offset], bytes, 1) == 1 ? 0 : -errno;
    case 'c':
        return close(state->side);
    case 'y': /* a child of its own, which inherits all and sleeps */
        return worker_fork();
    default:
        _exit(0);
    }
}

static void worker_loop(int control)
{
    struct worker_state state = {.side = -1, .fds = {-1, -1}};
    struct worker_command command;

    while (recv(control, &command, sizeof(command), MSG_WAITALL) == (ssize_t)sizeof(command)) {
        int64_t answer = worker_run(&state, &command);
        if (send(control, &answer, sizeof(answer), MSG_NOSIGNAL) != (ssize_t)sizeof(answer)) {
            break;
        }
    }
    _exit(0);
}

static struct worker worker_start(void)
{
    struct worker worker;
    int pair[2];

    cr_assert_eq(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
    worker.pid = fork();
    cr_assert(worker.pid >= 0);
    if (worker.pid == 0) {
        (void)close(pair[0]);
        worker_loop(pair[1]);
    }
    (void)close(pair[1]);
    worker.control = pair[0];
    worker.pidfd = (int)syscall(SYS_pidfd_open, worker.pid, 0);
    cr_assert(worker.pidfd >= 0);
    return worker;
}

static int64_t worker_do(const struct worker *worker, const struct worker_command *command)
{
    int64_t answer = -1000;

    cr_assert_eq(send(worker->control, command, sizeof(*command), MSG_NOSIGNAL),
                 (ssize_t)sizeof(*command));
    cr_assert_eq(recv(worker->control, &answer, sizeof(answer), MSG_WAITALL),
                 (ssize_t)sizeof(answer));
    return answer;
}

static inline int64_t worker_say(const struct worker *worker, char code, uint64_t offset,
                                 uint64_t value)
{
    const struct worker_command command = {.code = code, .offset = offset, .value = value};
    return worker_do(worker, &command);
}

static inline int64_t worker_send_token(const struct worker *worker, char code, const char *path,
                                        const uint8_t token[16])
{
    struct worker_command command = {.code = code};
    memcpy(command.token, token, sizeof(command.token));
    strcpy(command.path, path);
    return worker_do(worker, &command);
}

/* SIGKILL, and no zombie. */
static void worker_kill(struct worker *worker)
{
    cr_assert_eq(kill(worker->pid, SIGKILL), 0);
    cr_assert_eq(waitpid(worker->pid, NULL, 0), worker->pid);
    (void)close(worker->control);
    (void)close(worker->pidfd);
}

#endif
