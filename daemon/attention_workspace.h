/*
 * Memory of the device for what attention brings there, kept from call to call: to free memory of
 * a GPU waits for all that runs on it.
 *
 * A few regions, all together bounded, beside the tier. A call has one to itself; one that nobody
 * has used for a while goes. They count as the daemon's workspace (kvk_cache_workspace_bytes()).
 *
 * Locking: cache.lock guards them; memory comes and goes without it.
 */
#ifndef KVK_DAEMON_ATTENTION_WORKSPACE_H
#define KVK_DAEMON_ATTENTION_WORKSPACE_H

#include "daemon/cache_internal.h"

/* One of at least so many bytes, the caller's until it gives it back. KVK_EXHAUSTED: all are in
 * use, or the device has no room. Without the lock. */
KVK_CHECKED enum kvk_status kvk_workspace_take_unlocked(struct kvk_cache *cache,
                                                        uint64_t size_bytes,
                                                        struct kvk_workspace **workspace,
                                                        struct kvk_error *error);
void kvk_workspace_give_unlocked(struct kvk_cache *cache, struct kvk_workspace *workspace);

#endif
