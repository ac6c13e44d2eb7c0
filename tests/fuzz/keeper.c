/*
 * The keeper and the daemon's side of it, each against any conversation.
 *
 * An even first byte: the server in a thread, and connections that come, greet or not, send
 * messages with any fields, sizes and descriptors, read or not, and go. Whatever they do, it
 * hands out each file under the name it was put with, and afterwards a daemon can greet it, take
 * what is there and end it; no descriptor is left behind. An odd one: a daemon whose keeper answers
 * with anything after its greeting.
 */
#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "hosttier/keeper_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define CONNECTIONS 8
#define STEPS_MAX 96
#define FILES 8 /* that the server holds at the most */
#define NAMES 12

static struct sockaddr_un address = {.sun_family = AF_UNIX};
static int sample = -1; /* a file to hand around */

static uint32_t descriptors_open(void)
{
    uint32_t count = 0;
    DIR *folder = opendir("/proc/self/fd");
    KVK_ASSERT(folder != NULL);
    while (readdir(folder) != NULL) {
        count++;
    }
    (void)closedir(folder);
    return count;
}

static int connect_one(void)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    KVK_ASSERT(fd >= 0);
    if (connect(fd, (const struct sockaddr *)&address, sizeof(address)) != 0) {
        (void)close(fd);
        return -1;
    }
    return fd;
}

/* Any size, and up to three descriptors. */
static void send_raw(int fd, const void *bytes, size_t size, uint32_t fd_count)
{
    union {
        struct cmsghdr header;
        char bytes[CMSG_SPACE(3 * sizeof(int))];
    } control;
    const int fds[3] = {sample, sample, sample};
    uint8_t copy[256];
    memcpy(copy, bytes, size);
    struct iovec part = {.iov_base = copy, .iov_len = size};
    struct msghdr envelope = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd_count > 0) {
        memset(&control, 0, sizeof(control));
        envelope.msg_control = control.bytes;
        envelope.msg_controllen = CMSG_SPACE(fd_count * sizeof(int));
        struct cmsghdr *header = CMSG_FIRSTHDR(&envelope);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(fd_count * sizeof(int));
        memcpy(CMSG_DATA(header), fds, fd_count * sizeof(int));
    }
    (void)!sendmsg(fd, &envelope, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static struct kvk_keeper_message message_of(uint8_t kind, uint8_t which)
{
    struct kvk_keeper_message message = {
        .magic = KVK_KEEPER_MAGIC,
        .version = KVK_KEEPER_VERSION,
        .kind = kind,
        .count = which,
        .hold_ms = which == 255 ? UINT64_MAX : 60000,
    };
    (void)snprintf(message.name, sizeof(message.name), "kvk-%u", which % NAMES);
    return message;
}

/* ---- The server ---- */

static void *serve(void *unused)
{
    int result = kvk_keeper_serve(address.sun_path, 60000, FILES);
    KVK_ASSERT(result == EXIT_SUCCESS);
    return unused;
}

/* Whatever is there. A file comes only with a name that a file can have. */
static void read_answers(int fd)
{
    struct kvk_keeper_message message;
    struct pollfd wait = {.fd = fd, .events = POLLIN};
    while (poll(&wait, 1, 0) > 0) {
        int given;
        if (!kvk_keeper_receive(fd, &message, &given)) {
            return;
        }
        KVK_ASSERT(message.count <= FILES);
        if (given >= 0) {
            KVK_ASSERT(message.status == KVK_OK && kvk_keeper_name_ok(message.name));
            (void)close(given);
        }
    }
}

enum {
    STEP_CONNECT,
    STEP_ASK,     /* a message that is one, of any kind */
    STEP_CHANGED, /* the same with bytes changed */
    STEP_RAW,
    STEP_CLOSE,
    STEP_READ,
    STEP_SHUTDOWN,
    STEP_PUT,
};

/* Answers how many bytes of the input it used beyond its own. */
static size_t step(int connections[CONNECTIONS], uint8_t what, const uint8_t *data, size_t size)
{
    int *fd = &connections[(what >> 3) % CONNECTIONS];
    if (*fd < 0) {
        *fd = connect_one();
        return 0;
    }
    uint8_t a = size > 0 ? data[0] : 0;
    uint8_t b = size > 1 ? data[1] : 0;
    struct kvk_keeper_message message = message_of(a % 8, b);
    switch (what & 7) {
    case STEP_ASK:
        send_raw(*fd, &message, sizeof(message), a >> 6);
        return 2;
    case STEP_CHANGED: {
        uint8_t at = size > 2 ? data[2] : 0;
        ((uint8_t *)&message)[at % sizeof(message)] = size > 3 ? data[3] : 0;
        send_raw(*fd, &message, sizeof(message), a >> 6);
        return 4;
    }
    case STEP_RAW: {
        size_t count = (size_t)2 + b < size ? b : size > 2 ? size - 2 : 0;
        send_raw(*fd, size > 2 ? data + 2 : data, count, a & 3);
        return 2 + count;
    }
    case STEP_CLOSE:
        (void)close(*fd);
        *fd = -1;
        break;
    case STEP_READ:
        read_answers(*fd);
        break;
    case STEP_SHUTDOWN:
        (void)shutdown(*fd, SHUT_WR);
        break;
    case STEP_PUT:
        message = message_of(KVK_KEEPER_PUT, a);
        send_raw(*fd, &message, sizeof(message), 1);
        return 1;
    default:
        break;
    }
    return 0;
}

static bool ask(int fd, uint8_t kind, uint32_t count, struct kvk_keeper_message *message,
                int *given)
{
    *message = message_of(kind, 0);
    message->count = count;
    memset(message->name, 0, sizeof(message->name));
    return kvk_keeper_send(fd, message, -1) && kvk_keeper_receive(fd, message, given);
}

/* What it hands out is what was put, and all that it counts. */
static void files_look(int fd, uint32_t count)
{
    struct kvk_keeper_message message;
    struct stat one, other;
    int given;
    int result = fstat(sample, &other);
    KVK_ASSERT(result == 0 && count <= FILES);
    for (uint32_t i = 0; i < count; i++) {
        bool answered = ask(fd, KVK_KEEPER_TAKE, i, &message, &given);
        KVK_ASSERT(answered && message.status == KVK_OK && given >= 0);
        KVK_ASSERT(kvk_keeper_name_ok(message.name));
        result = fstat(given, &one);
        KVK_ASSERT(result == 0 && one.st_ino == other.st_ino);
        (void)close(given);
    }
    bool answered = ask(fd, KVK_KEEPER_TAKE, count, &message, &given);
    KVK_ASSERT(answered && message.status == KVK_NOT_FOUND && given < 0);
}

/* A daemon comes, finds whole what is there, and ends it; or it has ended by itself. */
static void daemon_ends_it(void)
{
    for (;;) {
        struct kvk_keeper_message message;
        int given;
        int fd = connect_one();
        if (fd < 0) {
            return;
        }
        bool answered = ask(fd, KVK_KEEPER_HELLO, 0, &message, &given);
        if (answered && message.status == KVK_OK) {
            files_look(fd, message.count);
            answered = ask(fd, KVK_KEEPER_FORGET, 0, &message, &given);
            KVK_ASSERT(answered && message.status == KVK_OK && message.count == 0);
            (void)close(fd);
            return;
        }
        (void)close(fd); /* it has not seen yet that the daemon before has gone */
    }
}

static void server_run(const uint8_t *data, size_t size)
{
    int connections[CONNECTIONS];
    pthread_t thread;
    memset(connections, 0xff, sizeof(connections));
    (void)unlink(address.sun_path);
    int result = pthread_create(&thread, NULL, serve, NULL);
    KVK_ASSERT(result == 0);
    do {
        connections[0] = connect_one();
    } while (connections[0] < 0);
    for (int steps = 0; steps < STEPS_MAX && size > 0; steps++) {
        size_t used = 1 + step(connections, data[0], data + 1, size - 1);
        used = used < size ? used : size;
        data += used;
        size -= used;
    }
    for (int i = 0; i < CONNECTIONS; i++) {
        if (connections[i] >= 0) {
            read_answers(connections[i]);
            (void)close(connections[i]);
        }
    }
    daemon_ends_it();
    result = pthread_join(thread, NULL);
    KVK_ASSERT(result == 0);
}

/* ---- The daemon ---- */

struct answers {
    int listener;
    const uint8_t *data;
    size_t size;
};

/* The greeting is answered well, everything else as the input says: its first byte what, the next
 * how many bytes of the message are others. */
static void *answer(void *context)
{
    struct answers *answers = context;
    struct kvk_keeper_message message;
    int given;
    int fd = accept(answers->listener, NULL, NULL);
    KVK_ASSERT(fd >= 0);
    bool greeted = false;
    while (kvk_keeper_receive(fd, &message, &given)) {
        size_t length = sizeof(message);
        uint8_t what = 0;
        if (given >= 0) {
            (void)close(given);
        }
        if (greeted) {
            if (answers->size < 4) {
                break;
            }
            what = answers->data[0];
            message.status = answers->data[1] % 20;
            message.count = answers->data[2];
            size_t others = answers->data[3] % sizeof(message);
            answers->data += 4;
            answers->size -= 4;
            others = others < answers->size ? others : answers->size;
            memcpy((uint8_t *)&message + (what & 0x10 ? 24 : 0), answers->data,
                   what & 0x10 && others > 64 ? 64 : others);
            answers->data += others;
            answers->size -= others;
            length = what & 0x20 ? others : length;
        } else {
            message.status = KVK_OK;
            message.count = 0;
        }
        greeted = true;
        send_raw(fd, &message, length, what & 3);
    }
    (void)close(fd);
    return NULL;
}

static void name_seen(void *context, const char *name, int fd)
{
    (void)context;
    char copy[KVK_KEEPER_NAME_SIZE] = {0};
    KVK_ASSERT(fd >= 0);
    memcpy(copy, name, strlen(name));
    KVK_ASSERT(kvk_keeper_name_ok(copy));
    (void)close(fd);
}

static void daemon_run(const uint8_t *data, size_t size)
{
    struct answers answers = {.data = data, .size = size};
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = address.sun_path, .hold_ms = 60000};
    struct kvk_keeper *keeper = NULL;
    struct kvk_error error = {.text = ""};
    pthread_t thread;
    (void)unlink(address.sun_path);
    answers.listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    KVK_ASSERT(answers.listener >= 0);
    int result = bind(answers.listener, (const struct sockaddr *)&address, sizeof(address));
    KVK_ASSERT(result == 0);
    result = listen(answers.listener, 4);
    KVK_ASSERT(result == 0);
    result = pthread_create(&thread, NULL, answer, &answers);
    KVK_ASSERT(result == 0);
    enum kvk_status status = kvk_keeper_connect(&options, &keeper, &error);
    KVK_ASSERT(status == KVK_OK);
    for (int i = 0; i < 3; i++) {
        error.text[0] = '\0';
        status = kvk_keeper_take(keeper, name_seen, NULL, &error);
        KVK_ASSERT(status == KVK_OK || error.text[0] != '\0');
        error.text[0] = '\0';
        status = kvk_keeper_put(keeper, "kvk-1", sample, &error);
        KVK_ASSERT(status == KVK_OK || error.text[0] != '\0');
        error.text[0] = '\0';
        status = kvk_keeper_drop(keeper, "kvk-1", &error);
        KVK_ASSERT(status == KVK_OK || error.text[0] != '\0');
    }
    kvk_keeper_disconnect(keeper);
    result = pthread_join(thread, NULL);
    KVK_ASSERT(result == 0);
    (void)close(answers.listener);
    (void)unlink(address.sun_path);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (sample < 0) {
        kvk_log_set_level(KVK_LOG_ERROR);
        sample = memfd_create("fuzz", MFD_CLOEXEC);
        KVK_ASSERT(sample >= 0);
        (void)snprintf(address.sun_path, sizeof(address.sun_path), "/tmp/kvk-fuzz-keeper.%d",
                       (int)getpid());
    }
    uint32_t before = descriptors_open();
    if (size > 0 && data[0] % 2 == 1) {
        daemon_run(data + 1, size - 1);
    } else {
        server_run(size > 0 ? data + 1 : data, size > 0 ? size - 1 : 0);
    }
    KVK_ASSERT(descriptors_open() == before);
    return 0;
}
