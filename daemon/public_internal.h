/*
 * What the files of public prefixes share: public.c finds, shows and withdraws them,
 * public_publish.c makes them.
 *
 * Locking: all of it needs cache.lock, unless it says otherwise.
 */
#ifndef KVK_DAEMON_PUBLIC_INTERNAL_H
#define KVK_DAEMON_PUBLIC_INTERNAL_H

#include "daemon/cache_internal.h"
#include "daemon/public.h"

/* The same identity and geometry, whoever's they are. */
bool kvk_public_is_same_scope(const struct kvk_space *a, const struct kvk_space *b);

/* Whole blocks from the start in which tokens and content are equal; at most `limit`, which the
 * prompt has. */
uint64_t kvk_public_common_blocks(const struct kvk_publication *publication,
                                  const struct kvk_prompt *prompt, uint64_t limit);

/* Over all groups. */
void kvk_publication_size(const struct kvk_publication *publication, uint64_t *blocks,
                          uint64_t *bytes);

/* The memory alone; with or without the lock. NULL is fine. */
void kvk_publication_free(struct kvk_publication *publication);

#endif
