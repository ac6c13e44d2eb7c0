/*
 * Tells the service manager that the daemon lives, as long as it does: one thread that looks
 * whether the look-up thread still turns and maintenance still comes round, and only then sends
 * WATCHDOG=1, with a STATUS= line for people. A daemon that hangs is silent, and the manager starts
 * it anew. Looking takes the engine's lock, so a lock that is never given back silences it too.
 *
 * Without a manager ($NOTIFY_SOCKET) there is no thread.
 */
#ifndef KVK_DAEMON_SERVER_WATCHDOG_H
#define KVK_DAEMON_SERVER_WATCHDOG_H

#include "daemon/cache.h"
#include "daemon/server.h"

struct kvk_watchdog;

/* When both serve. `*watchdog` is NULL where nobody is to be told. */
KVK_CHECKED enum kvk_status kvk_watchdog_create(struct kvk_server *server, struct kvk_cache *cache,
                                                struct kvk_watchdog **watchdog,
                                                struct kvk_error *error);

/* Before the server drains. NULL is fine. */
void kvk_watchdog_destroy(struct kvk_watchdog *watchdog);

#endif
