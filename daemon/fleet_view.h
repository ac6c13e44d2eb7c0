/*
 * The fleet as an operator sees it from one daemon: what this one says of itself to the others
 * (daemon/fleet_nodes.h), and what they say.
 */
#ifndef KVK_DAEMON_FLEET_VIEW_H
#define KVK_DAEMON_FLEET_VIEW_H

#include "daemon/cache.h"
#include "daemon/fleet_nodes.h"

/* Begin to say so, where there is a remote store; end it. Without the cache's lock. */
KVK_CHECKED enum kvk_status kvk_fleet_view_start(struct kvk_cache *cache, struct kvk_error *error);
void kvk_fleet_view_stop(struct kvk_cache *cache);

struct kvk_fleet_view {
    struct kvk_fleet_node *nodes; /* [count] by name; free() */
    uint32_t count;
    bool incomplete;  /* a part of the store did not answer: some may be missing */
    uint8_t self[16]; /* which of them this daemon is */
    uint64_t now_s;   /* seconds since 1970: ages count from here */
};

/* KVK_PRECONDITION: this daemon shares no store. KVK_UNAVAILABLE: it does not answer. May block. */
KVK_CHECKED enum kvk_status kvk_fleet_view(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           struct kvk_fleet_view *view, struct kvk_error *error);

#endif
