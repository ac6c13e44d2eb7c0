/* A batch of events in MessagePack, as vLLM packs its own. */
#ifndef KVK_DAEMON_PUBLISH_PACK_H
#define KVK_DAEMON_PUBLISH_PACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <msgpack.h>

#include "daemon/events.h"

/* Neighbours that one BlockStored or BlockRemoved can say are put into one. */
struct kvk_publish_pack {
    msgpack_sbuffer buffer;
    bool arrays; /* events by position in place of by name */
};

void kvk_publish_pack_init(struct kvk_publish_pack *pack, bool arrays);
void kvk_publish_pack_finish(struct kvk_publish_pack *pack);

/*
 * A whole batch, into pack->buffer, which is emptied before: AllBlocksCleared first where
 * `cleared`, then the events [count], STORED and REMOVED only, all of spaces that `names_of` knows.
 * False: no memory.
 */
bool kvk_publish_pack_batch(struct kvk_publish_pack *pack, double time_s, bool cleared,
                            const struct kvk_event *const *events,
                            const struct kvk_event_space *const *names, uint32_t count);

#endif
