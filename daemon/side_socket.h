/*
 * The side socket: passes descriptors of slots and scratch memory to workers, and tells when a
 * worker's process is gone. gRPC cannot pass descriptors.
 *
 * One thread with epoll over the listener, the bound connections and the processes' pidfds. Every
 * connection is bounded: 16-byte messages, one second for the first one, a limit on how many.
 */
#ifndef KVK_DAEMON_SIDE_SOCKET_H
#define KVK_DAEMON_SIDE_SOCKET_H

#include "daemon/session.h"

struct kvk_side_socket;

/* Listen at `path` (mode as given; replaces a stale socket: the server's lock file already keeps a
 * second daemon off). */
KVK_CHECKED enum kvk_status kvk_side_socket_create(struct kvk_cache *cache, const char *path,
                                                   uint32_t mode, uint32_t connections_max,
                                                   struct kvk_side_socket **side,
                                                   struct kvk_error *error);
void kvk_side_socket_destroy(struct kvk_side_socket *side);

#endif
