/*
 * Where the daemon's unix socket is when nobody says: one rule for the daemon and its clients.
 *
 *     $XDG_RUNTIME_DIR/kvkeep.sock    a user's own daemon
 *     /run/kvkeep/kvkeep.sock         the machine's daemon, in the folder its service made
 *     /tmp/kvkeep.sock                neither is there
 *
 * The daemon takes the first whose folder it may write. A client takes the first where a socket
 * is; in /tmp, where anybody can put one, only its own user's or root's.
 */
#ifndef KVK_BASE_SOCKET_PATH_H
#define KVK_BASE_SOCKET_PATH_H

#include <stddef.h>

#define KVK_SOCKET_PATH_SIZE 108 /* of sockaddr_un, NUL included */
#define KVK_SOCKET_SUFFIX_SIZE 5 /* ".side" and ".lock" are put behind it */

void kvk_socket_path_daemon(char path[KVK_SOCKET_PATH_SIZE]);

/* Where there is no socket at all, the path for the error that follows: in the folder that does not
 * let us look, else the one that the daemon would take. */
void kvk_socket_path_client(char path[KVK_SOCKET_PATH_SIZE]);

#endif
