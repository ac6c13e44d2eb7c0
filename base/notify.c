/* The service manager's notification protocol. */
#include "base/notify.h"

#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"

/* Written once, by the first kvk_notify_open(). */
static struct {
    int fd; /* connected; -1: nobody to speak to */
    uint64_t watchdog_us;
} manager = {.fd = -1};
static pthread_once_t opened = PTHREAD_ONCE_INIT;

static uint64_t number_of(const char *name)
{
    const char *text = getenv(name);
    char *end = NULL;
    if (text == NULL || text[0] < '0' || text[0] > '9') {
        return 0;
    }
    errno = 0;
    unsigned long long number = strtoull(text, &end, 10);
    return errno != 0 || *end != '\0' ? 0 : number;
}

/* The manager speaks of one process; a child that inherits the variable is not meant. */
static uint64_t watchdog_of_environment(void)
{
    uint64_t pid = number_of("WATCHDOG_PID");
    return pid != 0 && pid != (uint64_t)getpid() ? 0 : number_of("WATCHDOG_USEC");
}

static void open_once(void)
{
    const char *path = getenv("NOTIFY_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (path == NULL || path[0] == '\0') {
        return;
    }
    size_t length = strlen(path);
    if ((path[0] != '/' && path[0] != '@') || length >= sizeof(address.sun_path)) {
        kvk_log(KVK_LOG_WARNING, "notify_failed", "text=\"NOTIFY_SOCKET is no path\"");
        return;
    }
    memcpy(address.sun_path, path, length);
    if (address.sun_path[0] == '@') {
        address.sun_path[0] = '\0'; /* a name outside the file system */
    }
    socklen_t size = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + length);
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (const struct sockaddr *)&address, size) != 0) {
        kvk_log(KVK_LOG_WARNING, "notify_failed", "errno=%d", errno);
        if (fd >= 0) {
            (void)close(fd);
        }
        return;
    }
    manager.fd = fd;
    manager.watchdog_us = watchdog_of_environment();
}

bool kvk_notify_open(void)
{
    (void)pthread_once(&opened, open_once);
    return manager.fd >= 0;
}

void kvk_notify_hide(void)
{
    (void)kvk_notify_open();
    (void)unsetenv("NOTIFY_SOCKET");
    (void)unsetenv("WATCHDOG_USEC");
    (void)unsetenv("WATCHDOG_PID");
}

enum kvk_status kvk_notify_send(const char *message, const int *descriptors,
                                uint32_t descriptor_count, struct kvk_error *error)
{
    KVK_ASSERT(descriptor_count <= KVK_NOTIFY_DESCRIPTORS_MAX);
    if (!kvk_notify_open()) {
        return KVK_OK;
    }
    union {
        struct cmsghdr header; /* for its alignment */
        uint8_t bytes[CMSG_SPACE(sizeof(int) * KVK_NOTIFY_DESCRIPTORS_MAX)];
    } control;
    char *text = strdup(message); /* an iovec is not const */
    if (text == NULL) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, NULL, "no memory");
    }
    struct iovec part = {.iov_base = text, .iov_len = strlen(message)};
    struct msghdr packet = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor_count > 0) {
        size_t size = sizeof(int) * descriptor_count;
        memset(&control, 0, sizeof(control));
        packet.msg_control = control.bytes;
        packet.msg_controllen = CMSG_SPACE(size);
        struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(size);
        memcpy(CMSG_DATA(header), descriptors, size);
    }
    ssize_t sent;
    do {
        sent = sendmsg(manager.fd, &packet, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    int reason = errno;
    free(text);
    if (sent < 0) {
        return kvk_fail(error, KVK_UNAVAILABLE, KVK_CAUSE_NONE, NULL,
                        "the service manager does not take a notification: errno %d", reason);
    }
    return KVK_OK;
}

void kvk_notify(const char *message)
{
    struct kvk_error error;
    if (kvk_notify_send(message, NULL, 0, &error) != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "notify_failed", "text=\"%s\"", error.text);
    }
}

uint64_t kvk_notify_watchdog_us(void)
{
    return kvk_notify_open() ? manager.watchdog_us : 0;
}
