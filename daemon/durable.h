/*
 * What outlives the daemon, in the order in which it must stand up: folder and catalogue, disk,
 * keeper; then tenants and the cache; then what was recorded comes back: spaces, the blocks in kept
 * memory, the blocks on disk. Only then may anybody be served.
 *
 * With no [durable] folder there is nothing of it: every pointer is NULL and every function returns
 * at once.
 *
 * Locking: everything here does I/O, and is called without any lock, by main() or a test.
 */
#ifndef KVK_DAEMON_DURABLE_H
#define KVK_DAEMON_DURABLE_H

#include "daemon/cache.h"

struct kvk_durable {
    struct kvk_catalogue *catalogue;
    struct kvk_disk *disk;
    struct kvk_keeper *keeper;
};

/* Before tenants and cache. A folder that cannot be made, is another's, or is held by another
 * daemon is refused with the field's name and the reason. On failure nothing is left open. */
KVK_CHECKED enum kvk_status kvk_durable_open(const struct kvk_config *config,
                                             struct kvk_durable *durable, struct kvk_error *error);

/* Let whoever keeps memory for the next daemon go, and the memory with it. KVK_EXISTS: a daemon
 * uses it now. */
KVK_CHECKED enum kvk_status kvk_durable_forget(const struct kvk_config *config,
                                               struct kvk_error *error);

/* After kvk_cache_create(), before anybody is served: what was recorded is in the cache again. A
 * record that is damaged or belongs to nobody is counted and left out; it never stops the start. */
KVK_CHECKED enum kvk_status kvk_durable_start(struct kvk_cache *cache, struct kvk_error *error);

/* Before kvk_cache_destroy(), when no call is under way any more: what must still be written is,
 * and from here on what the cache frees stays recorded. */
void kvk_durable_stop(struct kvk_cache *cache);

/* After kvk_cache_destroy(). */
void kvk_durable_close(struct kvk_durable *durable);

#endif
