/* Where a client looks for the daemon when nobody says. */
#include "base/socket_path.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define NOBODY 65534

static char folder[] = "/tmp/kvkeep-run-XXXXXX";

/* A folder for $XDG_RUNTIME_DIR, with a socket in it or without. */
static void make_folder(bool with_socket)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    cr_assert_not_null(mkdtemp(folder));
    cr_assert_eq(setenv("XDG_RUNTIME_DIR", folder, 1), 0);
    if (with_socket) {
        (void)snprintf(address.sun_path, sizeof(address.sun_path), "%s/kvkeep.sock", folder);
        int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        cr_assert(fd >= 0 && bind(fd, (const struct sockaddr *)&address, sizeof(address)) == 0);
        (void)close(fd);
    }
}

static void remove_folder(void)
{
    char path[sizeof(folder) + 16];
    (void)snprintf(path, sizeof(path), "%s/kvkeep.sock", folder);
    (void)unlink(path);
    (void)rmdir(folder);
}

static void expect_client_looks_there(void)
{
    char path[KVK_SOCKET_PATH_SIZE] = "";
    kvk_socket_path_client(path);
    cr_expect_eq(strncmp(path, folder, strlen(folder)), 0, "%s", path);
    cr_expect_str_eq(path + strlen(folder), "/kvkeep.sock");
}

Test(base_socket_path, the_first_socket_that_is_there)
{
    make_folder(true);
    expect_client_looks_there();
    remove_folder();
}

/* Whoever is not of the daemon's group is told so, and not that there is no daemon. */
Test(base_socket_path, a_folder_that_shows_nothing_is_named)
{
    if (access("/run/kvkeep/kvkeep.sock", F_OK) == 0 || access("/tmp/kvkeep.sock", F_OK) == 0) {
        cr_skip_test("a daemon of this machine would be found");
    }
    make_folder(true);
    cr_assert_eq(chmod(folder, 0), 0);
    pid_t other = fork();
    cr_assert_geq(other, 0);
    if (other == 0) {
        char path[KVK_SOCKET_PATH_SIZE] = "";
        if (getuid() == 0 && setuid(NOBODY) != 0) {
            _exit(2);
        }
        kvk_socket_path_client(path);
        _exit(strncmp(path, folder, strlen(folder)) == 0 ? 0 : 1);
    }
    int status = -1;
    cr_expect_eq(waitpid(other, &status, 0), other);
    cr_expect_eq(status, 0);
    cr_assert_eq(chmod(folder, 0700), 0);
    remove_folder();
}
