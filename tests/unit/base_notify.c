/* The service manager's protocol, with a socket of the test's as the manager. */
#include "base/notify.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static int manager_fd;

/* An abstract name of this process's own, so that nothing is left in a file system. */
static void manager_open(void)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    char name[64];
    int length = snprintf(name, sizeof(name), "@kvkeep-notify-%d", (int)getpid());
    cr_assert_gt(length, 0);
    memcpy(address.sun_path, name, (size_t)length);
    address.sun_path[0] = '\0';
    manager_fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    cr_assert_geq(manager_fd, 0);
    socklen_t size = (socklen_t)(sizeof(sa_family_t) + (size_t)length);
    cr_assert_eq(bind(manager_fd, (const struct sockaddr *)&address, size), 0);
    cr_assert_eq(setenv("NOTIFY_SOCKET", name, 1), 0);
}

/* The next message, and the descriptor that came with it, or -1. */
static const char *manager_reads(int *descriptor)
{
    static char text[512];
    union {
        struct cmsghdr header;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct iovec part = {.iov_base = text, .iov_len = sizeof(text) - 1};
    struct msghdr packet = {.msg_iov = &part,
                            .msg_iovlen = 1,
                            .msg_control = control.bytes,
                            .msg_controllen = sizeof(control)};
    ssize_t size = recvmsg(manager_fd, &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    cr_assert_geq(size, 0, "nothing was said");
    text[size] = '\0';
    *descriptor = -1;
    struct cmsghdr *header = CMSG_FIRSTHDR(&packet);
    if (header != NULL && header->cmsg_type == SCM_RIGHTS) {
        memcpy(descriptor, CMSG_DATA(header), sizeof(int));
    }
    return text;
}

Test(base_notify, nobody_to_tell)
{
    (void)unsetenv("NOTIFY_SOCKET");
    cr_assert_not(kvk_notify_open());
    cr_assert_eq(kvk_notify_send("READY=1", NULL, 0, NULL), KVK_OK);
    cr_assert_eq(kvk_notify_watchdog_us(), 0);
}

Test(base_notify, words_and_a_descriptor, .init = manager_open)
{
    int descriptor = -1;
    int null_device = open("/dev/null", O_RDONLY | O_CLOEXEC);
    struct stat mine;
    struct stat theirs;
    cr_assert(kvk_notify_open());
    kvk_notify("READY=1\nSTATUS=serving");
    cr_assert_str_eq(manager_reads(&descriptor), "READY=1\nSTATUS=serving");
    cr_assert_eq(descriptor, -1);

    cr_assert_eq(kvk_notify_send("FDSTORE=1\nFDNAME=a", &null_device, 1, NULL), KVK_OK);
    cr_assert_str_eq(manager_reads(&descriptor), "FDSTORE=1\nFDNAME=a");
    cr_assert_geq(descriptor, 0);
    cr_assert_eq(fstat(null_device, &mine), 0);
    cr_assert_eq(fstat(descriptor, &theirs), 0);
    cr_assert_eq(mine.st_rdev, theirs.st_rdev);
}

Test(base_notify, hidden_from_children_but_not_lost, .init = manager_open)
{
    int descriptor;
    cr_assert_eq(setenv("WATCHDOG_USEC", "2000000", 1), 0);
    kvk_notify_hide();
    cr_assert_null(getenv("NOTIFY_SOCKET"));
    cr_assert_null(getenv("WATCHDOG_USEC"));
    kvk_notify("STOPPING=1");
    cr_assert_str_eq(manager_reads(&descriptor), "STOPPING=1");
    cr_assert_eq(kvk_notify_watchdog_us(), 2000000);
}

Test(base_notify, another_process_watchdog, .init = manager_open)
{
    cr_assert_eq(setenv("WATCHDOG_USEC", "2000000", 1), 0);
    cr_assert_eq(setenv("WATCHDOG_PID", "1", 1), 0);
    cr_assert_eq(kvk_notify_watchdog_us(), 0);
}

Test(base_notify, a_watchdog_that_is_no_number, .init = manager_open)
{
    cr_assert_eq(setenv("WATCHDOG_USEC", "12x", 1), 0);
    cr_assert_eq(kvk_notify_watchdog_us(), 0);
}

Test(base_notify, a_manager_that_is_gone_is_told_in_words, .init = manager_open)
{
    struct kvk_error error;
    cr_assert(kvk_notify_open());
    (void)close(manager_fd);
    cr_assert_eq(kvk_notify_send("READY=1", NULL, 0, &error), KVK_UNAVAILABLE);
    cr_assert_not_null(strstr(error.text, "service manager"));
    kvk_notify("READY=1"); /* only logs */
}

Test(base_notify, not_a_path)
{
    cr_assert_eq(setenv("NOTIFY_SOCKET", "relative/name", 1), 0);
    cr_assert_not(kvk_notify_open());
}
