/*
 * What operators ask: occupancy, lists, one block's life, why a request was refused.
 *
 * Locking: these take the cache lock and give it back between slices; figures of one answer are of
 * one moment only where they are said to be (the tiers of an occupancy report are).
 */
#ifndef KVK_DAEMON_REPORT_H
#define KVK_DAEMON_REPORT_H

#include "daemon/metadata.h"
#include "daemon/sequence.h"
#include "daemon/session.h"
#include "gpu/device.h"

struct kvk_tier_report {
    uint64_t limit_bytes;
    uint64_t used_bytes; /* slots in use, quarantine included */
    uint64_t free_bytes; /* limit - used */
    uint64_t slab_bytes;
    uint64_t active_bytes; /* bound by sequences: unsealed, or held by one */
    uint64_t leased_bytes; /* bound by leases alone */
    uint64_t evictable_bytes;
    uint64_t copying_bytes;
    uint64_t quarantine_bytes;
    uint64_t growth_bytes;
    uint64_t stray_bytes;
    uint64_t public_bytes;    /* of used_bytes: public prefixes, withdrawn ones that are held too */
    uint64_t scattered_bytes; /* free slots in slabs that no other geometry can use as they are */
    uint64_t largest_admissible_bytes;
};

/* What of the device tier's device went wrong so far; without the lock. */
void kvk_device_health_unlocked(struct kvk_cache *cache, struct kvk_device_health *health);

struct kvk_group_report {
    const struct kvk_tenant *tenant;
    uint64_t space_id;
    char model[KVK_NAME_SIZE];
    uint32_t group;
    bool is_public; /* of one public prefix */
    uint64_t block_bytes;
    uint64_t tier_blocks[KVK_TIER_COUNT];
    uint64_t tier_bytes[KVK_TIER_COUNT]; /* of them, each in the tier's format */
    uint64_t state_counts[KVK_BLOCK_STATE_COUNT];
};

/* Rows are the caller's to free(). `tenant` NULL: all that the credential may see. */
KVK_CHECKED enum kvk_status
kvk_report_occupancy(struct kvk_cache *cache, const struct kvk_caller *caller,
                     struct kvk_view tenant, struct kvk_tier_report tiers[KVK_TIER_COUNT],
                     struct kvk_group_report **rows, uint32_t *row_count, struct kvk_error *error);

/* What is kept for each tenant that the credential may see and that has used anything. Rows are the
 * caller's to free(). */
KVK_CHECKED enum kvk_status kvk_report_metadata(struct kvk_cache *cache,
                                                const struct kvk_caller *caller,
                                                struct kvk_view tenant,
                                                struct kvk_metadata_report **rows,
                                                uint32_t *row_count, struct kvk_error *error);

struct kvk_space_report {
    uint64_t space_id;
    const struct kvk_tenant *tenant;
    uint8_t *identity; /* canonical bytes, free() */
    size_t identity_size;
    uint32_t block_tokens;
    struct kvk_geometry groups[KVK_GROUP_COUNT_MAX];
    enum kvk_format disk_formats[KVK_GROUP_COUNT_MAX]; /* NONE: the group's own */
    enum kvk_format host_formats[KVK_GROUP_COUNT_MAX];
    uint32_t group_count;
    uint64_t blocks;
    uint64_t bytes;
    uint64_t queries;
    uint64_t query_tokens;
    uint64_t hit_tokens;
    uint64_t generation;
    bool is_public;
    uint8_t mode; /* enum kvk_tenant_mode; its tenant's goes beside it */
    bool partial_reuse;
};
KVK_CHECKED enum kvk_status
kvk_report_spaces(struct kvk_cache *cache, const struct kvk_caller *caller, struct kvk_view tenant,
                  struct kvk_space_report **rows, uint32_t *row_count, struct kvk_error *error);
void kvk_report_spaces_free(struct kvk_space_report *rows, uint32_t row_count);

struct kvk_sequence_report {
    uint64_t sequence_id;
    const struct kvk_tenant *tenant;
    uint64_t space_id;
    uint64_t instance_id;
    enum kvk_sequence_state state;
    uint64_t length;
    uint64_t sealed_tokens;
    uint64_t cached_tokens;
    uint64_t draft_tokens;
    uint64_t blocks;
    uint64_t shared_blocks;
    uint64_t tier_bytes[KVK_TIER_COUNT];
    uint64_t age_ms;
    uint64_t growth_tokens;
};
/* Up to `limit` rows with ids above `after_id`, in the order of ids. */
KVK_CHECKED enum kvk_status kvk_report_sequences(struct kvk_cache *cache,
                                                 const struct kvk_caller *caller,
                                                 struct kvk_view tenant, uint64_t after_id,
                                                 uint64_t limit, struct kvk_sequence_report **rows,
                                                 uint32_t *row_count, bool *more,
                                                 struct kvk_error *error);

struct kvk_lease_report {
    uint64_t lease_id;
    const struct kvk_tenant *tenant;
    uint64_t space_id;
    uint64_t instance_id;
    char instance_name[KVK_NAME_SIZE];
    uint64_t tokens;
    uint64_t blocks;
    uint64_t age_ms;
    uint64_t ttl_ms;
    bool copy_pin;
    uint32_t open_transfers;
};
KVK_CHECKED enum kvk_status
kvk_report_leases(struct kvk_cache *cache, const struct kvk_caller *caller, struct kvk_view tenant,
                  uint64_t after_id, uint64_t limit, struct kvk_lease_report **rows,
                  uint32_t *row_count, bool *more, struct kvk_error *error);

struct kvk_session_report {
    uint64_t session_id; /* shown to admins only, else 0: it is a capability */
    uint64_t instance_id;
    const struct kvk_tenant *tenant;
    char instance_name[KVK_NAME_SIZE];
    uint64_t instance_age_ms;
    uint64_t instance_sequences;
    uint64_t instance_leases;
    uint64_t instance_quarantine_blocks;
    uint32_t rank;
    int32_t pid;
    uint32_t uid;
    bool side_socket;
    bool connected;
    uint64_t mapped_bytes;
};
/* One row per session, those of one instance together. */
KVK_CHECKED enum kvk_status kvk_report_sessions(struct kvk_cache *cache,
                                                const struct kvk_caller *caller,
                                                struct kvk_view tenant,
                                                struct kvk_session_report **rows,
                                                uint32_t *row_count, struct kvk_error *error);

struct kvk_block_report {
    uint32_t block_id;
    struct kvk_key key;
    enum kvk_block_state state;
    uint8_t tier_mask;
    uint32_t slot[KVK_TIER_COUNT];
    uint64_t holds;
    uint64_t lease_holds;
    uint64_t pins[KVK_TIER_COUNT];
    uint64_t children;
    uint64_t uses;
    uint64_t idle_ms;
    double cost;
    double score;
    uint64_t position;
};
KVK_CHECKED enum kvk_status kvk_report_block(struct kvk_cache *cache,
                                             const struct kvk_caller *caller, uint64_t space_id,
                                             uint32_t group, const struct kvk_prompt *prefix,
                                             struct kvk_block_report *report,
                                             struct kvk_error *error);

/* ---- The journal of refusals ---- */

struct kvk_refusal {
    uint64_t time_ns;
    const struct kvk_tenant *tenant; /* NULL: none known */
    const char *call;
    uint64_t sequence_id;
    uint64_t needed_bytes;
    struct kvk_error error;
};

/* Newest first, at most `limit`. `advice` gets one or two sentences about the present state. */
KVK_CHECKED enum kvk_status
kvk_report_why(struct kvk_cache *cache, const struct kvk_caller *caller, struct kvk_view tenant,
               uint64_t sequence_id, struct kvk_refusal *refusals, uint32_t limit, uint32_t *count,
               struct kvk_tier_report tiers[KVK_TIER_COUNT], char *advice, size_t advice_size,
               struct kvk_error *error);

/* Memory beside the tiers: the engine's own tables, and operands of attention. */
void kvk_report_memory(struct kvk_cache *cache, uint64_t *metadata_bytes,
                       uint64_t *workspace_bytes);

/* Visit every counter and gauge of the engine by its Prometheus name (labels included). */
void kvk_report_stats(struct kvk_cache *cache,
                      void (*visit)(void *context, const char *name, double value), void *context);

#endif
