#include "base/socket_path.h"

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define SOCKET_NAME "/kvkeep.sock"
#define PLACE_COUNT 3
#define PLACE_TMP 2

/* The folder of a place; NULL: there is none, or its sockets' paths would be too long. */
static const char *place_folder(uint32_t place)
{
    const char *folder = "/tmp";

    if (place == 0) {
        folder = getenv("XDG_RUNTIME_DIR");
    } else if (place == 1) {
        folder = "/run/kvkeep";
    }
    if (folder == NULL || folder[0] != '/') {
        return NULL;
    }
    int size = snprintf(NULL, 0, "%s" SOCKET_NAME, folder);
    return size + KVK_SOCKET_SUFFIX_SIZE < KVK_SOCKET_PATH_SIZE ? folder : NULL;
}

void kvk_socket_path_daemon(char path[KVK_SOCKET_PATH_SIZE])
{
    for (uint32_t place = 0; place < PLACE_COUNT; place++) {
        const char *folder = place_folder(place);
        if (folder != NULL && (place == PLACE_TMP || access(folder, W_OK | X_OK) == 0)) {
            (void)snprintf(path, KVK_SOCKET_PATH_SIZE, "%s" SOCKET_NAME, folder);
            return;
        }
    }
}

/* Sets `hidden` where the folder does not let us look. */
static bool socket_is_there(const char *path, bool anybody_may_write, bool *hidden)
{
    struct stat status;

    if (lstat(path, &status) != 0) {
        *hidden = errno == EACCES;
        return false;
    }
    *hidden = false;
    return S_ISSOCK(status.st_mode) &&
           (!anybody_may_write || status.st_uid == geteuid() || status.st_uid == 0);
}

void kvk_socket_path_client(char path[KVK_SOCKET_PATH_SIZE])
{
    uint32_t closed = PLACE_COUNT; /* the first place where one may be that we do not see */

    for (uint32_t place = 0; place < PLACE_COUNT; place++) {
        const char *folder = place_folder(place);
        bool hidden = false;
        if (folder == NULL) {
            continue;
        }
        (void)snprintf(path, KVK_SOCKET_PATH_SIZE, "%s" SOCKET_NAME, folder);
        if (socket_is_there(path, place == PLACE_TMP, &hidden)) {
            return;
        }
        if (hidden && closed == PLACE_COUNT) {
            closed = place;
        }
    }
    if (closed == PLACE_COUNT) {
        kvk_socket_path_daemon(path);
    } else {
        (void)snprintf(path, KVK_SOCKET_PATH_SIZE, "%s" SOCKET_NAME, place_folder(closed));
    }
}
