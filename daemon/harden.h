/*
 * What the process gives up before it serves: privileges, inherited descriptors, core dumps, and by
 * wish system calls that it never needs.
 *
 * In this order, each once, from the main thread:
 *     kvk_harden_begin()       first of all: descriptors, file modes, limits
 *     kvk_harden_privileges()  when the configuration is read, before any thread, file or socket:
 *                              user and group, capabilities, no way back; core dumps
 *     kvk_harden_calls()       when all stands, for all threads: the filter of system calls
 *
 * What a service manager can take away beyond that is in deploy/kvkeepd.service.
 */
#ifndef KVK_DAEMON_HARDEN_H
#define KVK_DAEMON_HARDEN_H

#include <stdbool.h>

#include "base/status.h"

/*
 * Close every descriptor but the standard three and those that a service manager passed on
 * ($LISTEN_FDS for this process); put /dev/null where one of the three is missing, so that no file
 * of ours becomes standard error. New files are the owner's alone. As many descriptors and as much
 * locked memory as the system allows.
 */
void kvk_harden_begin(void);

/*
 * Become `user` and `group` ("": the user's own, or no change) where the process was started as
 * root; anybody else must be that user already. Then, whoever it is, every capability goes, from
 * the bounding set too, and no program that it starts can gain any. KVK_INVALID: no such user or
 * group, or not allowed; the text names the field.
 *
 * Without `core_dumps` the kernel writes no core and nobody of the same user can trace the process
 * or read its memory: prompts, and K/V in messages, are in it. With them a core leaves out all
 * shared memory, so all slots of blocks.
 */
KVK_CHECKED enum kvk_status kvk_harden_privileges(const char *user, const char *group,
                                                  bool core_dumps, struct kvk_error *error);

/*
 * Refuse (EPERM) system calls that kvkeepd never makes and that a hijacked one would want: tracing
 * and reading other processes, mounting, modules, keys, name spaces, clocks, and those of other
 * architectures. KVK_UNSUPPORTED: the kernel or the architecture has no filter.
 */
KVK_CHECKED enum kvk_status kvk_harden_calls(struct kvk_error *error);

#endif
