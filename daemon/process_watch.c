#include "daemon/process_watch.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FIELDS_AFTER_NAME 19 /* from the state (the 3rd) to the time of the start (the 22nd) */

uint64_t kvk_process_start(int32_t pid)
{
    char path[32];
    char text[1024];
    (void)snprintf(path, sizeof(path), "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL) {
        return 0;
    }
    size_t size = fread(text, 1, sizeof(text) - 1, file);
    (void)fclose(file);
    text[size] = '\0';
    /* The name is in brackets, and may itself hold brackets and spaces. */
    const char *at = strrchr(text, ')');
    for (int i = 0; at != NULL && i <= FIELDS_AFTER_NAME; i++) {
        at = strchr(at + 1, ' ');
    }
    return at == NULL ? 0 : strtoull(at + 1, NULL, 10);
}

uint64_t kvk_process_namespace(void)
{
    struct stat info;
    return stat("/proc/self/ns/pid", &info) == 0 ? (uint64_t)info.st_ino : 0;
}

enum kvk_process_state kvk_process_look(int32_t pid, uint64_t start, int *pidfd)
{
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0) {
        return errno == ESRCH || errno == EINVAL ? KVK_PROCESS_GONE : KVK_PROCESS_UNKNOWN;
    }
    /* With the descriptor open the number cannot pass to another while the time is read. */
    uint64_t start_now = kvk_process_start(pid);
    struct pollfd ended = {.fd = fd, .events = POLLIN};
    bool other = start != 0 && start_now != 0 && start_now != start;
    if (other || poll(&ended, 1, 0) == 1) {
        (void)close(fd);
        return KVK_PROCESS_GONE;
    }
    *pidfd = fd;
    return KVK_PROCESS_ALIVE;
}
