/*
 * Who changed what, when, and how it ended: one line of JSON for each administrative call, refused
 * ones too, in a file that is only appended to. Never tokens, digests or a tenant's data.
 *
 * The file is audit.log in the durable folder, readable for the daemon alone, synced line by line;
 * past its size it becomes audit.log.1, and the one of before is gone. Each line is also a line of
 * the daemon's log, which alone has it where there is no folder. Where the file cannot be written
 * the log says so, and the call goes on: an auditor who needs it all ships the log elsewhere.
 *
 * Locking: a leaf of its own; may block.
 */
#ifndef KVK_DAEMON_AUDIT_H
#define KVK_DAEMON_AUDIT_H

#include <stdint.h>

#include "base/status.h"

#define KVK_AUDIT_BYTES_MAX (UINT64_C(16) << 20) /* of each of the two files */

struct kvk_audit;

struct kvk_audit_entry {
    const char *who;     /* the credential; "" where it was none */
    const char *peer;    /* "unix:uid=0", "ipv4:10.0.0.1:4711" */
    const char *call;    /* "CreateTenant" */
    const char *object;  /* the name of what was changed */
    const char *details; /* "key=value …"; "" */
    enum kvk_status result;
    const char *reason; /* one sentence where it failed; "" */
};

/* `folder` "": the log alone. KVK_PRECONDITION: the file cannot be opened; the text says why. */
KVK_CHECKED enum kvk_status kvk_audit_open(const char *folder, uint64_t bytes_max,
                                           struct kvk_audit **audit, struct kvk_error *error);
void kvk_audit_close(struct kvk_audit *audit); /* NULL is fine */

void kvk_audit_write(struct kvk_audit *audit, const struct kvk_audit_entry *entry);

struct kvk_audit_stats {
    uint64_t entries;
    uint64_t failures; /* that are not in the file */
};
void kvk_audit_stats(struct kvk_audit *audit, struct kvk_audit_stats *stats);

#endif
