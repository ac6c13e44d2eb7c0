/*
 * Spaces: one model identity of one tenant, its layer groups, and the memory of their slots.
 *
 * An identity is compared in full, as canonical bytes in which every part is tagged and
 * length-prefixed, so that no two identities have the same bytes.
 */
#ifndef KVK_DAEMON_SPACE_H
#define KVK_DAEMON_SPACE_H

#include "daemon/cache.h"

enum kvk_identity_part {
    KVK_IDENTITY_MODEL = 1,
    KVK_IDENTITY_REVISION,
    KVK_IDENTITY_TOKENIZER,
    KVK_IDENTITY_TEMPLATE,
    KVK_IDENTITY_POSITION,
    KVK_IDENTITY_ADAPTER_NAME,
    KVK_IDENTITY_ADAPTER_ID,
    KVK_IDENTITY_ADAPTER_VERSION,
    KVK_IDENTITY_KV_FORMAT,
    KVK_IDENTITY_MASK,
};
#define KVK_IDENTITY_PART_COUNT 10
#define KVK_IDENTITY_PART_SIZE_MAX 4096
#define KVK_IDENTITY_EXTRA_MAX 64

struct kvk_identity {
    struct kvk_view {
        const uint8_t *data;
        size_t size;
    } parts[KVK_IDENTITY_PART_COUNT]; /* by enum kvk_identity_part - 1; the model is required */
    struct {
        struct kvk_view name;
        struct kvk_view value;
    } extra[KVK_IDENTITY_EXTRA_MAX]; /* any order; names differ */
    uint32_t extra_count;
};

/* Tags of the extra pairs in canonical bytes, beside enum kvk_identity_part. */
#define KVK_IDENTITY_EXTRA_NAME 100
#define KVK_IDENTITY_EXTRA_VALUE 101

/* Walk canonical bytes: begin with *offset = 0; false at the end. `part` points into them. Parts
 * come in the order of enum kvk_identity_part, given or not, then the extra pairs by name. */
bool kvk_identity_next(const uint8_t *identity, size_t size, size_t *offset, uint32_t *tag,
                       struct kvk_view *part);

struct kvk_space_request {
    struct kvk_view tenant; /* name, or empty */
    struct kvk_identity identity;
    uint32_t block_tokens;
    struct kvk_geometry groups[KVK_GROUP_COUNT_MAX]; /* block_tokens and shards as the space's */
    uint32_t group_count;
    enum kvk_format disk_formats[KVK_GROUP_COUNT_MAX]; /* in which blocks lie on disk. NONE: in the
                                                          group's own; of a space that exists, as
                                                          it is */
    enum kvk_format host_formats[KVK_GROUP_COUNT_MAX]; /* and in the host tier: then on disk too */
    double flops_per_token;
    double flops_per_token_position;
    double flops_per_second;
    uint32_t lookup_min_tokens;
    uint64_t idle_ms; /* 0: as the tenant's quota says */
    enum kvk_partial_reuse {
        KVK_PARTIAL_REUSE_AS_IT_IS = 0, /* off in a new space */
        KVK_PARTIAL_REUSE_OFF = 1,
        KVK_PARTIAL_REUSE_ON = 2,
    } partial_reuse;
};

struct kvk_space_reply {
    uint64_t space_id;
    bool created;
    bool partial_reuse; /* on, now */
    uint32_t group_count;
    struct {
        uint64_t block_bytes;
        uint32_t shard_count;
        uint64_t shard_bytes[KVK_SHARD_COUNT_MAX];
        enum kvk_format disk_format; /* NONE: the group's own */
        uint64_t disk_block_bytes;   /* in that format; 0: none lies on disk */
        enum kvk_format host_format;
        uint64_t host_block_bytes;
        uint32_t rank_count;
        uint32_t rank_shard[KVK_SHARD_COUNT_MAX];
    } groups[KVK_GROUP_COUNT_MAX];
};

/* KVK_INVALID: a field, named. KVK_EXISTS (identity mismatch): known with another geometry.
 * KVK_EXHAUSTED: config.spaces. Makes memory regions: may block. */
KVK_CHECKED enum kvk_status kvk_space_open(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           const struct kvk_space_request *request,
                                           struct kvk_space_reply *reply, struct kvk_error *error);

/* Switch it: the stricter of its mode and its tenant's holds. With a catalogue it is durable before
 * it counts, and lasts (but for a public one). KVK_NOT_FOUND; the catalogue's failures, which
 * change nothing. May block. */
KVK_CHECKED enum kvk_status kvk_space_set_mode(struct kvk_cache *cache, uint64_t space_id,
                                               enum kvk_tenant_mode mode, struct kvk_error *error);

struct kvk_invalidate_request {
    uint64_t space_id; /* 0: by tenant and the names below */
    struct kvk_view tenant;
    struct kvk_view model; /* empty: any */
    struct kvk_view revision;
    struct kvk_view adapter_name;
    struct kvk_view adapter_id;
    struct kvk_view adapter_version;
    struct kvk_view position_encoding;
    struct kvk_view kv_format;
    struct kvk_view mask_rule;
    bool by_salt; /* only what this salt began, in the space or in all that match */
    struct kvk_view salt;
    const struct kvk_prompt *prefix; /* NULL: the whole; with its own salt. Its last whole block and
                                        all that hangs below it; no whole block: all of its salt */
};
struct kvk_invalidate_reply {
    uint64_t spaces;
    uint64_t blocks[KVK_TIER_COUNT]; /* copies that can no longer be found */
    uint64_t held_blocks;
    uint64_t store_pending; /* spaces of which the remote store does not know it yet */
};

/*
 * After it returns no look-up finds what was named, in no tier, and none will after a restart or a
 * power cut either. Blocks that are held stay until their holders let go; the rest is freed in
 * slices by maintenance. docs/durability.md says how.
 *
 * KVK_UNAVAILABLE, KVK_EXHAUSTED and the like of the catalogue: whole spaces are as they were; of a
 * salt or a prefix what was found is gone from this daemon, but might come back with the next one:
 * the call is to be repeated, and then says whether all of it is durable.
 */
KVK_CHECKED enum kvk_status kvk_invalidate(struct kvk_cache *cache, const struct kvk_caller *caller,
                                           const struct kvk_invalidate_request *request,
                                           struct kvk_invalidate_reply *reply,
                                           struct kvk_error *error);

#endif
