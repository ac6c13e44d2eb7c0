/*
 * A daemon of one's own: kvkeepd started with a configuration in a temporary folder, and ended with
 * the program. For replays and demonstrations that must not disturb a running daemon.
 */
#ifndef KVK_CLIENT_CTL_PRIVATE_DAEMON_H
#define KVK_CLIENT_CTL_PRIVATE_DAEMON_H

#include <stdint.h>
#include <sys/types.h>

#include <stdbool.h>

#include "base/status.h"

struct ctl_private_daemon {
    char folder[64];
    char target[128]; /* "unix:…" */
    pid_t pid;
};

struct ctl_private_daemon_options {
    uint64_t device_bytes;
    uint64_t host_bytes;
    const char *policy;  /* "lru", "rp-cost", or "rp-lists": rp-cost with cost lists */
    uint64_t tokens_max; /* of one request; 0: the default */
};

/* Start kvkeepd (KVKEEPD, or the one beside this program) with --test-hooks, and wait until it
 * answers. Before gRPC is used in this process. */
KVK_CHECKED enum kvk_status
ctl_private_daemon_start(struct ctl_private_daemon *daemon,
                         const struct ctl_private_daemon_options *options, struct kvk_error *error);

/* SIGTERM, then the folder goes. */
void ctl_private_daemon_stop(struct ctl_private_daemon *daemon);

#endif
