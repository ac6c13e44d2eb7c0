/*
 * Somebody who holds the host tier's memory while no daemon runs: a tiny process of our own, or
 * systemd's descriptor store.
 *
 * The daemon hands it every memory file as it is made, under a name, before the file is used, and
 * takes the name back when the file goes. After a crash the next daemon asks for all of them and
 * maps them again. No name lies in a file system, so when the keeper lets go the memory is free.
 *
 * The keeper process lives outside the daemon's own life: it ends when it holds nothing, when it is
 * told to, or when no daemon has spoken to it for `hold_ms`. It takes connections from its own uid
 * alone, one daemon at a time, and touches no byte of what it holds.
 *
 * Locking: thread safe; everything does I/O, so none is called with a lock held.
 */
#ifndef KVK_HOSTTIER_KEEPER_H
#define KVK_HOSTTIER_KEEPER_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

#define KVK_KEEPER_NAME_SIZE 64 /* of a file, NUL included: letters, digits, '.', '-' */

struct kvk_keeper;

enum kvk_keeper_kind {
    KVK_KEEPER_AUTO = 0, /* systemd where it offers its store (NOTIFY_SOCKET, FDSTORE), else ours */
    KVK_KEEPER_PROCESS = 1,
    KVK_KEEPER_SYSTEMD = 2,
};

struct kvk_keeper_options {
    enum kvk_keeper_kind kind;
    const char *socket_path; /* of the process: a unix socket, mode 0600, beside the daemon's */
    const char *program;     /* to start where none answers; NULL: this very program */
    uint64_t hold_ms;        /* how long it holds on without a daemon */
};

/* Connect; start the process where none is there. KVK_UNAVAILABLE: neither can be had; the text
 * says why. Another daemon holding it is KVK_EXISTS. */
KVK_CHECKED enum kvk_status kvk_keeper_connect(const struct kvk_keeper_options *options,
                                               struct kvk_keeper **keeper, struct kvk_error *error);
/* The files stay with it, for the next daemon. */
void kvk_keeper_disconnect(struct kvk_keeper *keeper);

/* Every file it holds, each once: the descriptor is the visitor's. Called before any put. */
KVK_CHECKED enum kvk_status kvk_keeper_take(struct kvk_keeper *keeper,
                                            void (*visit)(void *context, const char *name, int fd),
                                            void *context, struct kvk_error *error);
/* It holds a duplicate when this returns. Names are unique: KVK_EXISTS. */
KVK_CHECKED enum kvk_status kvk_keeper_put(struct kvk_keeper *keeper, const char *name, int fd,
                                           struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_keeper_drop(struct kvk_keeper *keeper, const char *name,
                                            struct kvk_error *error);
/* Let go of everything, and end where it is a process of ours. */
KVK_CHECKED enum kvk_status kvk_keeper_forget(struct kvk_keeper *keeper, struct kvk_error *error);

const char *kvk_keeper_kind_name(const struct kvk_keeper *keeper); /* "process", "systemd" */
uint32_t kvk_keeper_count(struct kvk_keeper *keeper);              /* files it holds */

/* The keeper process itself: serve on the socket until it has nothing to do. Its exit code. Called
 * by main() of kvkeepd for --keeper, before anything else is set up. */
int kvk_keeper_main(const char *socket_path, uint64_t hold_ms);

#endif
