/*
 * The service manager's notification protocol (sd_notify), spoken directly: one datagram of
 * "NAME=value" lines to the socket that $NOTIFY_SOCKET names, with descriptors beside it where the
 * manager is to keep them. A few lines of ours stand for a library that the daemon would need only
 * for this.
 *
 * The socket is opened once, so that a process which later loses rights, or is shut into a file
 * system of its own, can still speak. Whoever speaks must be the main process or be allowed by
 * NotifyAccess=.
 *
 * Locking: kvk_notify_open() before any thread is there; the rest is thread safe. They may block
 * for as long as the manager does not read, so not with a lock held.
 */
#ifndef KVK_BASE_NOTIFY_H
#define KVK_BASE_NOTIFY_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define KVK_NOTIFY_DESCRIPTORS_MAX 16 /* of one message */

/* Is there a manager to speak to? Opens the socket; may be called again, and then does nothing. */
bool kvk_notify_open(void);

/* Take $NOTIFY_SOCKET away, so that no program that this one starts speaks in its name. */
void kvk_notify_hide(void);

/*
 * Send one message, such as "READY=1\nSTATUS=serving" or "FDSTORE=1\nFDNAME=x" with its
 * descriptors, which stay the caller's. KVK_OK also where there is no manager: there is nobody to
 * be told. KVK_UNAVAILABLE: the manager does not take it; the text says why.
 */
KVK_CHECKED enum kvk_status kvk_notify_send(const char *message, const int *descriptors,
                                            uint32_t descriptor_count, struct kvk_error *error);

/* The same for what may be lost: a failure is one warning in the log. */
void kvk_notify(const char *message);

/* Within how many microseconds the manager wants to hear WATCHDOG=1 from this process; 0: never. */
uint64_t kvk_notify_watchdog_us(void);

#endif
