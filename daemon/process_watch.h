/*
 * Processes of before: is the one that a record names still alive? A process is named by its number
 * and the time at which it began, since numbers come again.
 *
 * Locking: system calls; not under a lock.
 */
#ifndef KVK_DAEMON_PROCESS_WATCH_H
#define KVK_DAEMON_PROCESS_WATCH_H

#include <stdbool.h>
#include <stdint.h>

/* In clock ticks since the machine began; 0: not to be had. */
uint64_t kvk_process_start(int32_t pid);

/* Numbers mean something only in the namespace that they come from; 0: not to be had. */
uint64_t kvk_process_namespace(void);

enum kvk_process_state {
    KVK_PROCESS_GONE = 0,
    KVK_PROCESS_ALIVE,   /* *pidfd becomes readable when it ends, and is the caller's */
    KVK_PROCESS_UNKNOWN, /* it may be alive, and cannot be watched */
};

enum kvk_process_state kvk_process_look(int32_t pid, uint64_t start, int *pidfd);

#endif
