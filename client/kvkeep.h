/*
 * libkvkeep: kvkeepd for inference workers in C.
 *
 * A worker connects, opens a session and a space, maps the slots of its shard, and then keeps each
 * request as a sequence: open it (the longest cached prefix is found), write K/V of the other
 * tokens into its slots, seal, append, close. client/examples/tiny_llama.c does all of it.
 *
 * Errors: every call that can fail returns enum kvk_status and fills struct kvk_error (may be
 * NULL): act on error.cause. Calls that may be repeated are repeated here, with backoff, while the
 * daemon says UNAVAILABLE and the call's time lasts; everything else is the caller's decision.
 *
 * Threads: a client serves one call at a time (a mutex inside); threads that must not wait for
 * each other connect each. Fork before kvkeep_connect(), never after.
 *
 * In C++ the structs of a call's name are written with `struct`: struct kvkeep_lookup result;
 *
 * Memory: what a call fills belongs to the caller and is ended by the matching _finish or _close.
 */
#ifndef KVK_CLIENT_KVKEEP_H
#define KVK_CLIENT_KVKEEP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "base/geometry.h"
#include "base/status.h"

/* ---- Connection ---- */

struct kvkeep_client;

/* TLS to a TCP target; a unix socket needs none. PEM files, read at each connection. */
struct kvkeep_tls {
    const char *ca;          /* roots that the daemon's certificate must come from; NULL: the
                                system's */
    const char *certificate; /* our own, where the daemon asks for one, and what lies between it
                                and a root; NULL: none */
    const char *key;         /* its private key */
    const char *server_name; /* the name that the daemon's certificate must have; NULL: the
                                target's host */
};

struct kvkeep_options {
    const char *target;           /* "unix:/run/kvkeep/kvkeep.sock" or "HOST:PORT" */
    const char *token;            /* bearer token; NULL: none (the unix socket knows the uid) */
    uint32_t timeout_ms;          /* of one call, repeats included; 0: 30,000 */
    bool no_retry;                /* never repeat a call */
    const struct kvkeep_tls *tls; /* NULL: none. A token then travels in clear */
};

KVK_CHECKED enum kvk_status kvkeep_connect(const struct kvkeep_options *options,
                                           struct kvkeep_client **client, struct kvk_error *error);
void kvkeep_disconnect(struct kvkeep_client *client); /* sessions first; NULL is fine */

/* Where the connection options say nothing: KVKEEP_TARGET, else the daemon's default socket. */
const char *kvkeep_default_target(void);
/* What KVKEEP_CA, KVKEEP_CERTIFICATE, KVKEEP_KEY and KVKEEP_SERVER_NAME say. False: none of the
 * first two is set, so no TLS is wanted. */
bool kvkeep_default_tls(struct kvkeep_tls *tls);

#define KVKEEP_TENANTS_SHOWN 16

struct kvkeep_server_info {
    char version[32];
    uint8_t boot_id[16];
    char policy[16];
    char device[64];
    char device_path[32];
    char tenant[256];                        /* whom calls that name none are for */
    char tenants[KVKEEP_TENANTS_SHOWN][256]; /* [tenant_count] the credential may act for */
    uint32_t tenant_count;
    bool admin;
    uint64_t device_bytes;
    uint64_t host_bytes;
    uint64_t uptime_ms;
    uint64_t tokens_max;
    uint64_t message_bytes_max;
};
KVK_CHECKED enum kvk_status kvkeep_server_info(struct kvkeep_client *client,
                                               struct kvkeep_server_info *info,
                                               struct kvk_error *error);

/* ---- Spaces ---- */

/* UTF-8, NULL or "": not said. */
struct kvkeep_identity {
    const char *model; /* required */
    const char *revision;
    const char *tokenizer_digest;
    const char *template_digest;
    const char *position_encoding;
    const char *adapter_name;
    const char *adapter_id;
    const char *adapter_version;
    const char *kv_format;
    const char *mask_rule;
};

struct kvkeep_space_options {
    const char *tenant; /* NULL: the credential's own */
    struct kvkeep_identity identity;
    uint32_t block_tokens;
    const struct kvk_geometry *groups; /* [group_count]; block_tokens and shards as here */
    uint32_t group_count;
    const enum kvk_format *disk_formats; /* [group_count] compact, in which blocks lie on disk; NONE
                                            as the groups' own. NULL: all of them */
    const enum kvk_format *host_formats; /* likewise in the host tier, and on disk with it */
    uint32_t tensor_shards;              /* 0: 1 */
    uint32_t pipeline_shards;            /* 0: 1 */
    double flops_per_token;
    double flops_per_token_position;
    double flops_per_second;
    uint32_t lookup_min_tokens;
    enum kvkeep_partial_reuse {
        KVKEEP_PARTIAL_REUSE_AS_IT_IS = 0, /* off in a new space */
        KVKEEP_PARTIAL_REUSE_OFF = 1,
        KVKEEP_PARTIAL_REUSE_ON = 2,
    } partial_reuse; /* a hit may end within a block: cached_tokens is then no multiple of
                        block_tokens, for every worker of the space. Refused where a group's blocks
                        cannot be cut */
};

struct kvkeep_space {
    uint64_t id;
    uint32_t block_tokens;
    uint32_t group_count;
    struct kvk_geometry groups[KVK_GROUP_COUNT_MAX];
    bool partial_reuse; /* on, when it was opened */
};

KVK_CHECKED enum kvk_status kvkeep_space_open(struct kvkeep_client *client,
                                              const struct kvkeep_space_options *options,
                                              struct kvkeep_space *space, struct kvk_error *error);

/* ---- Sessions ---- */

struct kvkeep_session;

enum kvkeep_notice {
    KVKEEP_NOTICE_DRAINING = 1,
    KVKEEP_NOTICE_RANK_ENDED = 2,  /* value: the rank */
    KVKEEP_NOTICE_INVALIDATED = 3, /* value: the space's id */
    KVKEEP_NOTICE_LOST = 4,        /* the stream is at its end; open a new session */
};

struct kvkeep_session_options {
    const char *tenant;
    const uint8_t *instance_token; /* 16 bytes to join an instance; NULL: open one */
    uint32_t rank;
    const char *name;
    bool no_side_socket; /* do not connect it: nothing can be mapped */
    void (*on_notice)(void *context, enum kvkeep_notice notice, uint64_t value); /* may be NULL;
                                                                     on a thread of the session */
    void *context;
};

KVK_CHECKED enum kvk_status kvkeep_session_open(struct kvkeep_client *client,
                                                const struct kvkeep_session_options *options,
                                                struct kvkeep_session **session,
                                                struct kvk_error *error);
void kvkeep_session_close(struct kvkeep_session *session); /* all of its sequences end */
uint64_t kvkeep_session_id(const struct kvkeep_session *session);
const uint8_t *kvkeep_session_token(const struct kvkeep_session *session); /* 16 bytes, to join */

/* ---- Mapped memory ---- */

struct kvk_slab_table;

enum kvkeep_tier {
    KVKEEP_TIER_NONE = 0, /* where a choice is asked for: the daemon's default */
    KVKEEP_TIER_DEVICE = 1,
    KVKEEP_TIER_HOST = 2,
};

struct kvkeep_map {
    uint8_t *address; /* slot s at address + s x slot_stride; never written where read_only. NULL:
                         memory of a GPU, see slabs */
    uint64_t size_bytes;
    uint64_t slot_stride;
    const volatile uint32_t *generations; /* [slot]; read before and after copying: changed means
                                             the bytes are gone. NULL for scratch */
    uint64_t generations_size_bytes;
    uint64_t id;
    enum kvkeep_tier tier; /* of slots; none: scratch */
    bool read_only;
    const struct kvk_slab_table *slabs; /* base/slab_table.h: what cudaIpcOpenMemHandle() opens, and
                                           which slots lie there; of size_bytes. Else NULL */
};

/* In the tier none: in that where a sequence's blocks go if kvkeep_open() is told none. */
KVK_CHECKED enum kvk_status kvkeep_map_slots(struct kvkeep_session *session,
                                             const struct kvkeep_space *space, uint32_t group,
                                             uint32_t rank, enum kvkeep_tier tier, bool read_only,
                                             struct kvkeep_map *map, struct kvk_error *error);
KVK_CHECKED enum kvk_status kvkeep_map_scratch(struct kvkeep_session *session, uint64_t size_bytes,
                                               struct kvkeep_map *map, struct kvk_error *error);
/* The slots of a public space, read-only, in the host tier: `public_space_id` as tables name it.
 * KVK_NOT_FOUND: it is not public (any more), or not of this space's identity and geometry. */
KVK_CHECKED enum kvk_status kvkeep_map_public(struct kvkeep_session *session,
                                              uint64_t public_space_id, uint32_t group,
                                              uint32_t rank, struct kvkeep_map *map,
                                              struct kvk_error *error);
void kvkeep_unmap(struct kvkeep_map *map);

/* ---- Prompts, look-ups, leases ---- */

struct kvkeep_span {
    uint64_t first; /* token position */
    uint64_t count;
    const uint8_t *digest;
    uint32_t digest_size;
};

struct kvkeep_prompt {
    const uint32_t *tokens; /* [token_count] */
    uint64_t token_count;
    const uint8_t *salt;
    size_t salt_size;
    const struct kvkeep_span *spans; /* [span_count], sorted */
    uint32_t span_count;
    bool use_public;   /* of look-ups, leases and opening: published prefixes are found too. For
                          callers that read where kvkeep_table.spaces says */
    bool whole_blocks; /* of look-ups and opening: no hit within a block, though the space allows it
                        */
};

/* Where blocks of a prefix are; index = block of the prefix. */
struct kvkeep_table {
    uint32_t *slots;       /* [count] */
    uint8_t *tiers;        /* [count] enum kvkeep_tier */
    uint32_t *generations; /* [count] */
    uint64_t count;
    uint64_t capacity;
    uint64_t *spaces; /* [count] whose slot it is: 0: the space's own; else a public one's, see
                         kvkeep_map_public() */
};

struct kvkeep_lookup {
    uint64_t cached_tokens;
    uint64_t device_tokens;
    uint64_t host_tokens;
    uint64_t load_ns;
    uint64_t recompute_ns;
    uint64_t disk_tokens;          /* of cached_tokens: on disk alone */
    uint64_t restore_ns;           /* estimated to bring those back, */
    uint64_t restore_recompute_ns; /* and to compute from the first of them on */
    uint64_t partial_tokens;       /* of cached_tokens, the last: in a part of a block */
    enum kvkeep_remote_state {
        KVKEEP_REMOTE_NONE = 0,
        KVKEEP_REMOTE_ASKED = 1,    /* the answer is on its way: look up again */
        KVKEEP_REMOTE_FETCHING = 2, /* what is there comes: look up again */
        KVKEEP_REMOTE_DONE = 3,
        KVKEEP_REMOTE_ABSENT = 4,
        KVKEEP_REMOTE_LEFT = 5, /* left there: computing is estimated to be quicker */
        KVKEEP_REMOTE_FAILED = 6,
        KVKEEP_REMOTE_BUSY = 7,
    } remote_state;         /* of the store that daemons share, for the rest of the prompt */
    uint64_t remote_tokens; /* that it has behind cached_tokens */
};

KVK_CHECKED enum kvk_status kvkeep_lookup(struct kvkeep_client *client,
                                          const struct kvkeep_space *space,
                                          const struct kvkeep_prompt *prompt, bool leave_last,
                                          struct kvkeep_lookup *result, struct kvk_error *error);
/* The same; and what of it is on disk alone is brought to memory behind this call's back, as far as
 * there is free or clean room: for a prompt that will be opened soon. The figures are those of
 * before. */
KVK_CHECKED enum kvk_status kvkeep_lookup_ahead(struct kvkeep_client *client,
                                                const struct kvkeep_space *space,
                                                const struct kvkeep_prompt *prompt, bool leave_last,
                                                struct kvkeep_lookup *result,
                                                struct kvk_error *error);
KVK_CHECKED enum kvk_status kvkeep_touch(struct kvkeep_client *client,
                                         const struct kvkeep_space *space,
                                         const struct kvkeep_prompt *prompt,
                                         uint64_t *touched_tokens, struct kvk_error *error);

struct kvkeep_lease {
    uint64_t id; /* 0: nothing was cached */
    uint64_t cached_tokens;
    uint32_t group_count;
    struct kvkeep_table groups[KVK_GROUP_COUNT_MAX];
};

KVK_CHECKED enum kvk_status kvkeep_pin(struct kvkeep_session *session,
                                       const struct kvkeep_space *space,
                                       const struct kvkeep_prompt *prompt, uint64_t ttl_ms,
                                       bool copy_pin, struct kvkeep_lease *lease,
                                       struct kvk_error *error);
KVK_CHECKED enum kvk_status kvkeep_renew(struct kvkeep_session *session,
                                         const struct kvkeep_lease *lease, uint64_t ttl_ms,
                                         struct kvk_error *error);
/* Releases on the daemon and finishes the struct, whether or not the daemon still knew it. */
KVK_CHECKED enum kvk_status kvkeep_release(struct kvkeep_session *session,
                                           struct kvkeep_lease *lease, struct kvk_error *error);

/* ---- Public prefixes ---- */

struct kvkeep_publication {
    uint64_t id;       /* for kvkeep_unpublish() */
    uint64_t space_id; /* the public space, as tables name it */
    uint64_t tokens;
    uint64_t blocks, bytes; /* of all groups; paid for by the publisher */
    bool created;           /* false: it was public before, by itself or within a longer one */
};

/* The prompt's whole blocks, which are cached, become public; without a salt. KVK_PERMISSION: no
 * such right. KVK_NOT_FOUND: not all of it is cached. May be repeated. */
KVK_CHECKED enum kvk_status kvkeep_publish(struct kvkeep_client *client,
                                           const struct kvkeep_space *space,
                                           const struct kvkeep_prompt *prompt,
                                           struct kvkeep_publication *publication,
                                           struct kvk_error *error);
/* No look-up finds it any more. `held_blocks` (may be NULL): somebody still reads. KVK_NOT_FOUND:
 * there is none of this id that the caller may withdraw. */
KVK_CHECKED enum kvk_status kvkeep_unpublish(struct kvkeep_client *client, uint64_t public_id,
                                             uint64_t *held_blocks, struct kvk_error *error);

/* ---- Sequences ---- */

/* The client's view of a sequence: kept in step with the daemon by every call below. */
struct kvkeep_sequence {
    uint64_t id; /* 0: none */
    const struct kvkeep_space *space;
    bool swapped_out;
    uint64_t cached_tokens;
    uint64_t sealed_tokens;
    uint64_t committed_tokens;
    uint64_t length;
    uint64_t grant_first;
    struct kvkeep_table groups[KVK_GROUP_COUNT_MAX];
    uint64_t partial_tokens; /* of cached_tokens, the last: copied into a block of its own */
};

struct kvkeep_open_options {
    bool leave_last;
    bool no_lookup;
    bool leave_on_host;
    bool retry; /* of a request that was counted before: not another query */
    uint64_t growth_tokens;
    enum kvkeep_tier tier; /* NONE: the default */
};

KVK_CHECKED enum kvk_status
kvkeep_sequence_open(struct kvkeep_session *session, const struct kvkeep_space *space,
                     const struct kvkeep_prompt *prompt, const struct kvkeep_open_options *options,
                     struct kvkeep_sequence *sequence, struct kvk_error *error);
KVK_CHECKED enum kvk_status kvkeep_sequence_refresh(struct kvkeep_session *session,
                                                    struct kvkeep_sequence *sequence,
                                                    struct kvk_error *error);
KVK_CHECKED enum kvk_status kvkeep_append(struct kvkeep_session *session,
                                          struct kvkeep_sequence *sequence, const uint32_t *tokens,
                                          uint64_t token_count, bool draft,
                                          struct kvk_error *error);
/* This rank has written all below `length`; all_ranks: the shards of all ranks. */
KVK_CHECKED enum kvk_status kvkeep_seal(struct kvkeep_session *session,
                                        struct kvkeep_sequence *sequence, uint64_t length,
                                        bool all_ranks, struct kvk_error *error);
KVK_CHECKED enum kvk_status kvkeep_commit(struct kvkeep_session *session,
                                          struct kvkeep_sequence *sequence, uint64_t accept,
                                          struct kvk_error *error);
KVK_CHECKED enum kvk_status kvkeep_truncate(struct kvkeep_session *session,
                                            struct kvkeep_sequence *sequence, uint64_t length,
                                            struct kvk_error *error);
/* `forks` [count], each with its tables. */
KVK_CHECKED enum kvk_status kvkeep_fork(struct kvkeep_session *session,
                                        const struct kvkeep_sequence *sequence, uint32_t count,
                                        struct kvkeep_sequence *forks, struct kvk_error *error);

struct kvkeep_swap {
    uint64_t moved_blocks;
    uint64_t moved_bytes;
    uint64_t copy_ns;
    uint64_t load_ns;
    uint64_t recompute_ns;
};
KVK_CHECKED enum kvk_status kvkeep_swap_out(struct kvkeep_session *session,
                                            struct kvkeep_sequence *sequence,
                                            struct kvkeep_swap *swap, struct kvk_error *error);
KVK_CHECKED enum kvk_status kvkeep_swap_in(struct kvkeep_session *session,
                                           struct kvkeep_sequence *sequence,
                                           struct kvkeep_swap *swap, struct kvk_error *error);
/* Closes on the daemon and finishes the struct, whether or not the daemon still knew it. */
KVK_CHECKED enum kvk_status kvkeep_close(struct kvkeep_session *session,
                                         struct kvkeep_sequence *sequence, struct kvk_error *error);

/* ---- Bytes through gRPC, on a connection of their own ---- */

struct kvkeep_piece {
    uint32_t group;
    uint32_t rank;
    uint64_t block;
    uint64_t offset; /* bytes from the shard's start */
    const void *data;
    uint64_t size_bytes;
};
KVK_CHECKED enum kvk_status kvkeep_write(struct kvkeep_session *session,
                                         const struct kvkeep_sequence *sequence,
                                         const struct kvkeep_piece *pieces, uint32_t piece_count,
                                         struct kvk_error *error);
/* Blocks first_block… into `data` [block_count][shard bytes], checksums verified. One of
 * `sequence` and `lease`. */
KVK_CHECKED enum kvk_status kvkeep_read(struct kvkeep_session *session,
                                        const struct kvkeep_sequence *sequence,
                                        const struct kvkeep_lease *lease, uint32_t group,
                                        uint32_t rank, uint64_t first_block, uint64_t block_count,
                                        void *data, uint64_t size_bytes, struct kvk_error *error);

/* ---- Attention ---- */

struct kvkeep_attend_item {
    const struct kvkeep_sequence *sequence; /* one of the two */
    const struct kvkeep_lease *lease;
    uint64_t position;
    uint32_t query_count;
    const void *queries; /* [query_count][query_heads][head_size_k] */
    float *output;       /* [query_count][query_heads][head_size_v], filled */
    float *lse;          /* [query_count][query_heads], filled */
    uint64_t token_limit;
    uint64_t device_tokens; /* out */
    uint64_t host_tokens;   /* out */
};
enum kvkeep_attend_place {
    KVKEEP_ATTEND_NO_CHOICE = 0,  /* nothing on the host, or the device tier is the CPU's too */
    KVKEEP_ATTEND_IN_PLACE = 1,   /* by the CPU, where the blocks lie */
    KVKEEP_ATTEND_BROUGHT_IN = 2, /* on the device, to which the layer was copied for this call */
};
/* Where blocks of host memory were attended, and why: the quicker by what was measured. */
struct kvkeep_attend_choice {
    enum kvkeep_attend_place host_place;
    uint64_t in_place_ns; /* estimated; 0: not known */
    uint64_t bring_in_ns; /* estimated; 0: not known */
};
struct kvkeep_attend {
    uint32_t group;
    uint32_t layer;
    uint32_t rank;
    uint32_t query_heads;
    uint32_t head_size_k;
    uint32_t head_size_v;
    enum kvk_format format;
    float scale;
    float soft_cap;
    bool causal;
    bool group_window;
    uint32_t window;
    uint32_t sinks;
    const float *alibi_slopes; /* [query_heads], or NULL: none */
    const float *sink_logits;  /* [query_heads], or NULL: none; -inf: none for that head */
    struct kvkeep_attend_choice *choice; /* out, for all items; NULL: not asked */
};
KVK_CHECKED enum kvk_status kvkeep_attend(struct kvkeep_session *session,
                                          const struct kvkeep_attend *attend,
                                          struct kvkeep_attend_item *items, uint32_t item_count,
                                          struct kvk_error *error);

#ifdef __cplusplus
}
#endif

#endif
