/*
 * How a group's blocks lie in a tier: in the space's own format, or in a compact one.
 *
 * Memory has the space's own format: what is held is held there, so whoever holds a block reads,
 * maps and attends the very bytes that were sealed, and a sequence that was swapped out comes back
 * byte for byte, its unsealed tail too. The disk may have a compact format. A copy there is made
 * from bytes that matched their checksum, has a checksum of its own over what is stored, and stands
 * beside the copy in memory until that one goes; so going down and up again and again rounds once:
 * while the copy on disk stays none is made again.
 *
 * What comes back is widened: the sealed values as the compact format knows them, the same bytes
 * every time. It is then a copy in memory like any other, with a checksum of its own.
 *
 * A block in which a value is not finite has no compact form: it does not go down (and is counted).
 *
 * Locking: the first two functions need nothing; the conversions are called without any lock.
 */
#ifndef KVK_DAEMON_TIER_FORM_H
#define KVK_DAEMON_TIER_FORM_H

#include "base/geometry.h"
#include "base/status.h"

struct kvk_tier_form {
    struct kvk_geometry geometry; /* the group's, but for the format */
    uint64_t shard_bytes[KVK_SHARD_COUNT_MAX];
    uint64_t block_bytes; /* all shards; what alignment takes is the tier's own */
    bool compact;         /* in another format than the space's own */
};

/* Can blocks of this (checked) geometry be held in `format`? NONE: their own, always. KVK_INVALID
 * names `field`. */
KVK_CHECKED enum kvk_status kvk_tier_form_check(const struct kvk_geometry *geometry,
                                                enum kvk_format format, const char *field,
                                                struct kvk_error *error);

/* Of what was checked. */
void kvk_tier_form_init(struct kvk_tier_form *form, const struct kvk_geometry *geometry,
                        enum kvk_format format);

/* The format that was asked for; NONE: the space's own. */
enum kvk_format kvk_tier_form_format(const struct kvk_tier_form *form);

/* One shard of a block from its own format to the compact one. `checksum`: of what is stored.
 * KVK_INVALID: it has no compact form; the target is zeros then. */
KVK_CHECKED enum kvk_status kvk_tier_form_narrow(const struct kvk_geometry *own,
                                                 const struct kvk_tier_form *form, uint32_t shard,
                                                 const void *source, void *target,
                                                 uint64_t *checksum, struct kvk_error *error);
/* And back. */
void kvk_tier_form_widen(const struct kvk_tier_form *form, const struct kvk_geometry *own,
                         uint32_t shard, const void *source, void *target, uint64_t *checksum);

#endif
