/*
 * A bounded map from a number to a pointer or an index, for ids of sequences, leases and the like.
 *
 * Open addressing with linear probing in a table that is never more than half full. Removing moves
 * later entries back, so there are no tombstones and look-ups do not slow down with age. All the
 * memory is asked for at the start (base/pages.h), so that put fails only where the table is full,
 * and no call ever rehashes.
 *
 * Locking: none here; the owner's lock covers it.
 */
#ifndef KVK_BASE_TABLE_H
#define KVK_BASE_TABLE_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

#define KVK_TABLE_NONE UINT32_MAX /* no such index; may not be stored */

struct kvk_table_entry {
    uint64_t key;
    uintptr_t value; /* a pointer, or an index + 1; 0: the place is empty */
};

struct kvk_table {
    struct kvk_table_entry *entries; /* [place_mask + 1], ours */
    size_t place_mask;
    uint32_t count;
    uint32_t count_max;
};

/* KVK_EXHAUSTED: no memory. count_max: 1 to 2^30. */
KVK_CHECKED enum kvk_status kvk_table_init(struct kvk_table *table, uint32_t count_max);
void kvk_table_finish(struct kvk_table *table); /* what is stored stays the caller's */

/* KVK_EXISTS: the key is there, nothing changed. KVK_EXHAUSTED: count_max are stored. Any key will
 * do. A table holds either pointers (not NULL) or indices, never both. */
KVK_CHECKED enum kvk_status kvk_table_put(struct kvk_table *table, uint64_t key, void *pointer);
KVK_CHECKED enum kvk_status kvk_table_put_index(struct kvk_table *table, uint64_t key,
                                                uint32_t index);

void *kvk_table_get(const struct kvk_table *table, uint64_t key); /* NULL: not there */
uint32_t kvk_table_get_index(const struct kvk_table *table, uint64_t key);

/* Take out and return what was stored; NULL or KVK_TABLE_NONE: it was not there. */
void *kvk_table_remove(struct kvk_table *table, uint64_t key);
uint32_t kvk_table_remove_index(struct kvk_table *table, uint64_t key);

/*
 * Walk: begin with *place = 0 and go on until NULL. Goes over every place, used or not. The entry
 * last returned may be removed if *place is then set back by one: what moved into its place comes
 * next, and an entry may come twice. Nothing else may change meanwhile.
 */
const struct kvk_table_entry *kvk_table_next(const struct kvk_table *table, size_t *place);

#endif
