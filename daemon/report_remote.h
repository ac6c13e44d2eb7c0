/*
 * What the remote store's figures are called.
 */
#ifndef KVK_DAEMON_REPORT_REMOTE_H
#define KVK_DAEMON_REPORT_REMOTE_H

#include "daemon/remote_store.h"

const char *kvk_remote_state_name(enum kvk_remote_state state); /* "good", never NULL */

/* Takes the lock. */
void kvk_remote_report_unlocked(struct kvk_cache *cache, struct kvk_remote_report *report);

/* Every counter and gauge, nothing where there is no store. */
void kvk_report_remote_visit(const struct kvk_remote_report *report,
                             void (*each)(void *context, const char *name, double value),
                             void *context);

#endif
