/*
 * Can a block be written, moved and read? A few pages are, in memory of each tier's own device and
 * on disk, with a checksum that must come out the same everywhere. It takes no slot and no tenant's
 * room.
 */
#ifndef KVK_DAEMON_CANARY_H
#define KVK_DAEMON_CANARY_H

#include "daemon/cache.h"

/* KVK_OK, or what failed and in which tier. May block; without any lock. */
KVK_CHECKED enum kvk_status kvk_canary_run(struct kvk_cache *cache, struct kvk_error *error);

#endif
