/*
 * Spaces and their generations in the catalogue, so that they outlive the daemon.
 *
 * A space is recorded before anybody can find it (kvk_space_open(), without the lock), so a space
 * that has blocks has a record; where recording fails the space serves all the same, with a warning
 * and a count, and maintenance tries again. A generation is durable before it counts: an
 * invalidation first commits the next generation, then makes the space's old roots unfindable. A
 * crash in between leaves more invalidated than was answered, never less.
 *
 * Only one call at a time changes what is recorded of spaces (cache.persist_busy): so generations
 * never go back, and no record is written late over a newer one.
 *
 * Without a catalogue every function here does nothing and is KVK_OK.
 */
#ifndef KVK_DAEMON_PERSIST_H
#define KVK_DAEMON_PERSIST_H

#include "daemon/cache_internal.h"

/* ---- A space's shape as bytes: what opening it again needs beside its identity ---- */

struct kvk_space_request;

/* `bytes` has room for KVK_SHAPE_SIZE_MAX; its size is returned. */
#define KVK_SHAPE_SIZE_MAX 1024
size_t kvk_shape_encode(const struct kvk_space *space, uint8_t bytes[KVK_SHAPE_SIZE_MAX]);
/* Fills everything but tenant and identity. False: not a shape of a version known here. */
KVK_CHECKED bool kvk_shape_decode(const uint8_t *bytes, size_t size,
                                  struct kvk_space_request *request);

/* Are these canonical bytes of an identity? They come from a file, so they are checked in full. */
KVK_CHECKED bool kvk_identity_is_canonical(const uint8_t *identity, size_t size);

/* ---- Recording ---- */

/* One call at a time changes what is recorded: wait for it, then be it. Needs the cache's lock,
 * which is given up meanwhile. */
void kvk_persist_begin_drops(struct kvk_cache *cache);
void kvk_persist_end(struct kvk_cache *cache);

/* Record a space that nobody knows yet. False: it is not recorded (told and counted where that is
 * a failure). Without the lock. */
KVK_CHECKED bool kvk_persist_record_unlocked(struct kvk_cache *cache,
                                             const struct kvk_space *space);
/* The space is gone: its records go. A failure is told and counted. Without the lock. */
void kvk_persist_forget_unlocked(struct kvk_cache *cache, uint64_t space_id);

/* The spaces' next generations are durable, all of them or none. By the one who is busy. A space
 * without a record has nothing that could come back, and needs none. */
KVK_CHECKED enum kvk_status kvk_persist_raise_drops(struct kvk_cache *cache,
                                                    struct kvk_space *const *spaces, uint32_t count,
                                                    struct kvk_error *error);

/* The space's mode is durable, or as it was. By the one who is busy. */
KVK_CHECKED enum kvk_status kvk_persist_mode_drops(struct kvk_cache *cache, struct kvk_space *space,
                                                   uint8_t mode, struct kvk_error *error);

/* The removal of every record on disk that was given up before is durable. Where it cannot be made
 * so it stays queued, and is tried again in the background. */
KVK_CHECKED enum kvk_status kvk_persist_removals_drops(struct kvk_cache *cache,
                                                       struct kvk_error *error);

/* Maintenance: try again to record a space where that failed. */
void kvk_persist_maintain_drops(struct kvk_cache *cache);

/* ---- Restoring ---- */

/* Open every recorded space again: id, generation, mode, identity, geometry and tenant as before. A
 * record whose tenant is gone, that is damaged or no longer fits the configuration is counted, told
 * and removed or left out. Without the lock, before anybody is served. */
KVK_CHECKED enum kvk_status kvk_persist_restore_spaces(struct kvk_cache *cache,
                                                       struct kvk_error *error);

#endif
