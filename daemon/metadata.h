/*
 * What a tenant makes the daemon keep besides the bytes of its blocks: a record of every block that
 * is known (its tokens and content digests too), chains' roots with their salts, sequences, leases,
 * transfers, instances, sessions, mappings with their scratch memory, spaces, public prefixes.
 *
 * All of it is counted per tenant, in bytes and in numbers, and bounded apart from the tiers, since
 * bytes of blocks say nothing of it: a block may be of one byte and have a thousand tokens.
 *
 * The rules:
 * - A tenant's bytes are never more than its metadata_limit_bytes (of its quota, or
 *   limits.tenant_metadata_bytes). Records of blocks take at most seven eighths of it, so that what
 *   is cached and idle leaves room for what runs. Over a limit the tenant's own idle blocks go, or
 *   the call is refused, as over_quota says.
 * - Where there are several tenants, one has at most limits.tenant_percent of the numbers that the
 *   configuration allows to all of them (limits.blocks, roots, sequences, ...), so that nobody is
 *   crowded out of the tables either.
 *
 * Locking: everything here needs cache.lock.
 */
#ifndef KVK_DAEMON_METADATA_H
#define KVK_DAEMON_METADATA_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "index/index.h"

struct kvk_cache;
struct kvk_group;
struct kvk_publication;
struct kvk_session;
struct kvk_space;
struct kvk_tenant;

enum kvk_metadata_kind {
    KVK_METADATA_BLOCKS = 0, /* of them, their records */
    KVK_METADATA_ROOTS,
    KVK_METADATA_SEQUENCES,
    KVK_METADATA_LEASES,
    KVK_METADATA_TRANSFERS,
    KVK_METADATA_INSTANCES,
    KVK_METADATA_SESSIONS, /* their mappings and scratch memory included */
    KVK_METADATA_SPACES,
    KVK_METADATA_PUBLIC,
};
#define KVK_METADATA_KINDS 9

/* Content bytes of a block beside themselves. */
#define KVK_METADATA_EXTRA_BYTES 16

struct kvk_metadata {
    uint64_t bytes[KVK_METADATA_KINDS];
    uint32_t counts[KVK_METADATA_KINDS];
    struct kvk_index_account roots; /* what the index counts by itself: in place of [ROOTS] */
};

/* As limits, fields and metrics name it: "blocks". */
const char *kvk_metadata_name(enum kvk_metadata_kind kind);

/* Its own, of all kinds; and of one. */
uint64_t kvk_metadata_bytes(const struct kvk_cache *cache, const struct kvk_tenant *tenant);
uint64_t kvk_metadata_kind_bytes(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                 enum kvk_metadata_kind kind);
uint32_t kvk_metadata_kind_count(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                 enum kvk_metadata_kind kind);
uint64_t kvk_metadata_limit(const struct kvk_cache *cache, const struct kvk_tenant *tenant);

/*
 * May the tenant have so many more of a kind, and so many bytes? Its own idle blocks go where that
 * helps. KVK_EXHAUSTED, cause TENANT_LIMIT: no; the field is metadata_limit_bytes or the kind's
 * name, with the limit.
 */
KVK_CHECKED enum kvk_status kvk_metadata_admit(struct kvk_cache *cache,
                                               const struct kvk_tenant *tenant,
                                               enum kvk_metadata_kind kind, uint32_t count,
                                               uint64_t bytes, struct kvk_error *error);
/* Has one more block of the group a record? For kvk_room_id_free(), which makes the room. */
bool kvk_metadata_has_room(const struct kvk_cache *cache, const struct kvk_group *group);
/* Why not. */
enum kvk_status kvk_metadata_refuse_block(const struct kvk_cache *cache,
                                          const struct kvk_group *group, struct kvk_error *error);

void kvk_metadata_add(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_metadata_kind kind, uint32_t count, uint64_t bytes);
void kvk_metadata_sub(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_metadata_kind kind, uint32_t count, uint64_t bytes);

/* A session's mappings have changed. */
void kvk_metadata_session(struct kvk_cache *cache, struct kvk_session *session);

/* What the content bytes of an indexed block take. */
uint64_t kvk_metadata_extra_of(const struct kvk_cache *cache, uint32_t block);
/* The content bytes of an indexed block of the group came, or are about to go. How many. */
uint64_t kvk_metadata_extra_add(struct kvk_cache *cache, const struct kvk_group *group,
                                uint32_t block);
void kvk_metadata_extra_sub(struct kvk_cache *cache, const struct kvk_group *group, uint32_t block);
/* The most that the blocks which these spans touch will need for that, in so many groups. */
uint64_t kvk_metadata_extra_most(const struct kvk_content_span *spans, uint32_t span_count,
                                 uint32_t block_tokens, uint32_t group_count);

/* How large things are. */
uint64_t kvk_metadata_of_record(const struct kvk_group *group); /* of one block of it */
uint64_t kvk_metadata_of_space(const struct kvk_space *space);
uint64_t kvk_metadata_of_session(const struct kvk_session *session);
uint64_t kvk_metadata_of_publication(const struct kvk_publication *publication);

/* As an operator sees it. */
struct kvk_metadata_report {
    const struct kvk_tenant *tenant;
    uint64_t bytes;
    uint64_t limit_bytes;
    struct {
        uint32_t count;
        uint32_t count_limit;
        uint64_t bytes;
    } kinds[KVK_METADATA_KINDS];
};
void kvk_metadata_report(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                         struct kvk_metadata_report *report);

/* Every count again, by walking all there is; aborts where one is wrong. For tests. */
void kvk_metadata_check(const struct kvk_cache *cache);

#endif
