/*
 * What the files of spaces share: canonical identities, and the memory of groups.
 */
#ifndef KVK_DAEMON_SPACE_INTERNAL_H
#define KVK_DAEMON_SPACE_INTERNAL_H

#include "daemon/cache_internal.h"

/* ---- identity.c ---- */

/* Check an identity and write its canonical bytes: malloc'ed, `spare` bytes more behind them. Two
 * identities have the same bytes if and only if all their parts are equal. */
KVK_CHECKED enum kvk_status kvk_identity_encode(const struct kvk_identity *identity, size_t spare,
                                                uint8_t **bytes, size_t *size,
                                                struct kvk_error *error);

/* ---- space_memory.c ---- */

/* Tell the queues of all its groups what a block is worth per byte against other spaces'. Once all
 * groups are there. */
void kvk_space_weigh(struct kvk_space *space);

/* A group with its regions and tables, known to nobody yet; on disk in a format that was checked
 * (tier_form.h). Without the lock. KVK_EXHAUSTED: no memory, or one block is larger than every
 * pool. */
KVK_CHECKED enum kvk_status kvk_group_create(struct kvk_cache *cache, struct kvk_space *space,
                                             uint32_t index, const struct kvk_geometry *geometry,
                                             enum kvk_format host_format,
                                             enum kvk_format disk_format, struct kvk_group **group,
                                             struct kvk_error *error);

/* Free it, when no block, slot or punch of it is left: memory first, then its budget. Without the
 * lock. NULL is fine. */
void kvk_group_destroy_unlocked(struct kvk_cache *cache, struct kvk_group *group);

/* No block, no slot, no punch: nothing would be lost with it. */
bool kvk_group_is_unused(const struct kvk_cache *cache, const struct kvk_group *group);

/* Nothing refers to the space and it has no blocks: what is reclaimed where config.spaces is
 * reached. */
bool kvk_space_is_unused(const struct kvk_cache *cache, const struct kvk_space *space);

/* ---- space.c ---- */

/* Open a space that was recorded: the request's fields but tenant and identity are checked as those
 * of any request, the identity is canonical, malloc'ed with room for the generation behind it, and
 * taken over also on failure. KVK_EXISTS: id or identity are there already. Without the lock. */
KVK_CHECKED enum kvk_status kvk_space_restore(struct kvk_cache *cache,
                                              const struct kvk_tenant *tenant,
                                              const struct kvk_space_request *request,
                                              uint8_t *identity, size_t identity_size, uint64_t id,
                                              uint64_t generation, struct kvk_error *error);

/* The space of a public prefix, with the identity and geometry of `source` (which the caller
 * references) and so many slots of each group, in the host tier alone. It is recorded nowhere, kept
 * by nobody, and found by nobody but public.c. Drops the lock. KVK_UNSUPPORTED: the host tier has
 * no memory of the kind. */
KVK_CHECKED enum kvk_status kvk_space_make_public_drops(struct kvk_cache *cache,
                                                        struct kvk_space *source,
                                                        const uint32_t slots[KVK_GROUP_COUNT_MAX],
                                                        struct kvk_space **result,
                                                        struct kvk_error *error);

/* A space that is unused goes: out of all tables, and its memory, files and records with it. False:
 * it is not. Drops the lock where it goes. */
bool kvk_space_reclaim_drops(struct kvk_cache *cache, struct kvk_space *space);

/* Write the generation behind the identity. */
void kvk_space_set_generation(struct kvk_space *space, uint64_t generation);

#endif
