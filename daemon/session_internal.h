/*
 * What the session files share. session.c begins and ends sessions and instances, session_map.c
 * gives processes memory, session_gone.c waits for processes and gives back what they had.
 *
 * A session's life: begun with its stream (connected), ended with it (not connected any more), and
 * left when nothing of it needs keeping: at once, or, where its process may still touch memory that
 * it was given, when that process is gone. Everything given back goes in slices.
 */
#ifndef KVK_DAEMON_SESSION_INTERNAL_H
#define KVK_DAEMON_SESSION_INTERNAL_H

#include "daemon/cache_internal.h"

/* Mappings of one session, taken or waiting to be. */
#define KVK_SESSION_MAPPINGS_MAX 1024

/* session_gone.c: of a session whose stream has ended: leave it, or keep what its process may still
 * touch. Drops the lock; the session may be gone then. */
void kvk_session_settle_drops(struct kvk_cache *cache, struct kvk_session *session);

/* session.c: free an instance that has ended, once no busy call has anything of it. */
void kvk_instance_finish(struct kvk_cache *cache, struct kvk_instance *instance);

/* session_map.c: take mappings from a session, all or only those that its process cannot touch (or
 * that are none of ours to protect). To be ended by the other, without the lock. */
struct kvk_mapping *kvk_session_mappings_detach(struct kvk_session *session, bool all);
void kvk_mappings_destroy_unlocked(struct kvk_cache *cache, struct kvk_mapping *mappings);

/* Drop the mappings whose tokens were not used in time, as above. */
struct kvk_mapping *kvk_session_mappings_expire(struct kvk_session *session, uint64_t now_ns);

#endif
