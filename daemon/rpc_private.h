/*
 * What the rpc files share.
 *
 * A unary call goes one way (rpc.c): authenticate, unpack into this thread's arena, run the
 * method's handler, which checks the values, asks the engine and packs its answer. Calls that the
 * engine may answer at once run on the look-up thread first, where it must not block; where it says
 * KVK_WOULD_BLOCK nothing has changed, and the same call runs again from the start on a bulk
 * thread. Streams have callbacks of their own.
 */
#ifndef KVK_DAEMON_RPC_PRIVATE_H
#define KVK_DAEMON_RPC_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "base/lock.h"
#include "base/metrics.h"
#include "daemon/auth_limit.h"
#include "daemon/lease.h"
#include "daemon/rpc.h"
#include "daemon/rpc_messages.h"
#include "daemon/rpc_wire.h"
#include "daemon/sequence.h"
#include "daemon/session.h"
#include "daemon/space.h"

#define KVK_BOOT_ID_SIZE 16

/* One call while a thread works on it. */
struct kvk_rpc_run {
    struct kvk_rpc *rpc;
    struct kvk_call *call;
    struct kvk_rpc_memory *memory; /* this thread's */
    struct kvk_caller caller;
    bool replied;
    /* Where the answer goes instead, if the call did not come by gRPC: then `call` is NULL. */
    void (*sink)(void *context, const ProtobufCMessage *message);
    void *sink_context;
};

/* A row of the method table. */
struct kvk_rpc_method {
    const char *path;
    const char *name; /* "OpenSequence": for the journal of refusals */
    enum kvk_method_kind kind;
    enum kvk_method_class class;
    bool prompt; /* its message may be long, and no other call waits for what it changes */
    bool slow;   /* runs long enough on a bulk thread that a client's cancel must be seen */

    /* Unary: KVK_OK, and kvk_rpc_reply() was called, or a failure, and nothing changed. */
    const ProtobufCMessageDescriptor *request;
    enum kvk_status (*handle)(struct kvk_rpc_run *run, const ProtobufCMessage *message,
                              struct kvk_error *error);

    /* Streams. */
    void (*on_call)(struct kvk_call *call, void *rpc_bound);
};

/* A method of one rpc: what the server hands back with a call. */
struct kvk_rpc_bound {
    struct kvk_rpc *rpc;
    const struct kvk_rpc_method *method;
    struct kvk_histogram *latency; /* of unary calls, in ns; the registry's */
    bool rated;                    /* the rate of its tenant's requests is asked first */
    uint32_t session_field;        /* number of the request's session_id; 0: it has none */
    uint32_t space_field;          /* … of its space_id */
};

#define KVK_RPC_METHODS_MAX 64

/* The streams of sessions, so that a drain can end them. */
struct kvk_rpc_sessions {
    struct kvk_lock lock;
    struct kvk_rpc_session *first; /* whose calls may be woken; lock */
    atomic_uint count;             /* streams, from their first to their last moment */
    atomic_bool end;               /* end them all */
    atomic_bool stop;              /* the drain's thread, too */
    pthread_t drain_thread;
    bool drain_thread_runs; /* the thread that drains alone */
};

/* The streams of WatchBlocks, and the thread that wakes those that have something to tell. */
struct kvk_rpc_watches {
    struct kvk_lock lock;
    pthread_cond_t stop_now;
    struct kvk_rpc_watch *first;    /* whose calls may be woken; lock */
    uint32_t count;                 /* lock */
    atomic_bool end;                /* end them all */
    atomic_uint_fast64_t snapshots; /* begun, since the start */
    bool stop;                      /* the thread, too; lock */
    pthread_t thread;
    bool thread_runs;
};

struct kvk_rpc {
    const struct kvk_config *config;
    struct kvk_tenants *tenants;
    struct kvk_audit *audit; /* NULL: none */
    struct kvk_auth_limit auth_limit;
    struct kvk_clock *clock;
    struct kvk_cache *cache;               /* from kvk_rpc_attach() on */
    struct kvk_server *server;             /* likewise */
    const struct kvk_publisher *publisher; /* NULL: none */
    struct kvk_metrics *metrics;           /* latencies by method; ours */
    struct kvk_device_info device;
    char side_path[KVK_PATH_SIZE];
    uint8_t boot_id[KVK_BOOT_ID_SIZE];
    uint64_t start_ns;
    struct kvk_rpc_sessions sessions;
    struct kvk_rpc_watches watches;
    struct kvk_rpc_bound bound[KVK_RPC_METHODS_MAX]; /* [method_count] */
    struct kvk_method methods[KVK_RPC_METHODS_MAX];
    uint32_t method_count;
};

/* ---- rpc.c ---- */

/* Who calls, and this thread's memory, into `run`. */
KVK_CHECKED enum kvk_status kvk_rpc_run_begin(struct kvk_rpc_run *run,
                                              const struct kvk_rpc_bound *bound,
                                              struct kvk_call *call, bool may_block,
                                              struct kvk_error *error);

/* Pack into the slice that gRPC sends, and end the call. Once, as the last thing that can fail.
 * KVK_EXHAUSTED: larger than a message may be; the call is not ended. */
KVK_CHECKED enum kvk_status kvk_rpc_reply(struct kvk_rpc_run *run, const ProtobufCMessage *message,
                                          struct kvk_error *error);

static inline ProtobufCBinaryData kvk_rpc_bytes(const void *data, size_t size_bytes)
{
    /* protobuf-c has no const bytes; packing only reads. */
    return (ProtobufCBinaryData){.len = size_bytes, .data = (uint8_t *)(uintptr_t)data};
}

ProtobufCBinaryData kvk_rpc_text(const char *text);

/* Block tables of an answer: views of `tables`, in the caller's memory. */
struct kvk_rpc_tables {
    Kvkeep__V1__BlockTable parts[KVK_GROUP_COUNT_MAX];
    Kvkeep__V1__BlockTable *pointers[KVK_GROUP_COUNT_MAX];
    Kvkeep__V1__DiskUse disk;
};
size_t kvk_rpc_fill_tables(struct kvk_rpc_tables *target, const struct kvk_tables *tables);
/* What of a prefix was on disk; NULL: nothing. */
Kvkeep__V1__DiskUse *kvk_rpc_fill_disk(struct kvk_rpc_tables *packed,
                                       const struct kvk_disk_estimate *estimate);

struct kvk_remote_use;
/* What is known of a prompt in the remote store; NULL: nothing. */
Kvkeep__V1__RemoteUse *kvk_rpc_fill_remote(Kvkeep__V1__RemoteUse *target,
                                           const struct kvk_remote_use *use);

/* ---- rpc_stats.c ---- */

/* After the methods are bound. */
KVK_CHECKED enum kvk_status kvk_rpc_latencies_create(struct kvk_rpc *rpc, struct kvk_error *error);

/* ---- rpc_caller.c ---- */

/* KVK_UNAUTHENTICATED: nobody that is known. KVK_EXHAUSTED: too many such from there. */
KVK_CHECKED enum kvk_status kvk_rpc_authenticate(struct kvk_rpc *rpc, struct kvk_call *call,
                                                 const struct kvk_credential **credential,
                                                 struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_rpc_require_admin(const struct kvk_rpc_run *run,
                                                  struct kvk_error *error);
/* Note an administrative call and how it ended, before it is answered. */
void kvk_rpc_audit(struct kvk_rpc_run *run, const char *object, const char *details,
                   enum kvk_status status, const struct kvk_error *error);

/* ---- rpc_owner.c: by whom calls take turns ---- */

/* A tenant's place in the tables, and one more for admins that act for none. */
#define KVK_RPC_OWNERS (KVK_TENANT_COUNT_MAX + 1)

void kvk_rpc_owner_bind(struct kvk_rpc_bound *bound);
/* See kvk_server_options.call_owner. The credential rides with the call, so that nobody asks again.
 */
enum kvk_status kvk_rpc_call_owner(struct kvk_call *call, void *rpc_bound, uint32_t *owner,
                                   struct kvk_error *error);

/* ---- rpc_usage.c ---- */

bool kvk_rpc_is_rated(const struct kvk_rpc_method *method);
/* May this call be done now, by its tenant's rate? Asked twice: before the message is unpacked
 * (NULL), where the credential alone says whose it is, and after it. */
KVK_CHECKED enum kvk_status kvk_rpc_rate_take(const struct kvk_rpc_run *run,
                                              const struct kvk_rpc_bound *bound,
                                              const ProtobufCMessage *message,
                                              struct kvk_error *error);

/* ---- rpc_check.c: values from outside. `field` names the field in errors. ---- */

/* An id that is never 0. */
KVK_CHECKED enum kvk_status kvk_rpc_check_id(uint64_t id, const char *field,
                                             struct kvk_error *error);

/* A list of ids: not empty, none 0, none twice. */
KVK_CHECKED enum kvk_status kvk_rpc_check_ids(struct kvk_rpc_run *run, const uint64_t *ids,
                                              size_t count, const char *field,
                                              struct kvk_error *error);

/* Exactly one of the two is not 0. */
KVK_CHECKED enum kvk_status kvk_rpc_check_one_of(uint64_t sequence_id, uint64_t lease_id,
                                                 const char *prefix, struct kvk_error *error);

/* UTF-8 without NUL; `size_min` is 0 or 1. */
KVK_CHECKED enum kvk_status kvk_rpc_check_name(const ProtobufCBinaryData *bytes, size_t size_min,
                                               size_t size_max, const char *field,
                                               struct kvk_view *view, struct kvk_error *error);

/* A prompt; NULL is an empty one. The result is borrowed from the message and the arena. */
KVK_CHECKED enum kvk_status kvk_rpc_check_prompt(struct kvk_rpc_run *run,
                                                 const Kvkeep__V1__Prompt *message,
                                                 const char *field, struct kvk_prompt *prompt,
                                                 struct kvk_error *error);

KVK_CHECKED enum kvk_status kvk_rpc_check_tokens(struct kvk_rpc_run *run,
                                                 const ProtobufCBinaryData *bytes,
                                                 const char *field, const uint32_t **tokens,
                                                 uint64_t *token_count, struct kvk_error *error);

/* Spans lie in tokens [first, first + token_count), which the caller has checked to fit. */
KVK_CHECKED enum kvk_status kvk_rpc_check_spans(struct kvk_rpc_run *run, size_t span_count,
                                                Kvkeep__V1__ContentSpan *const *messages,
                                                uint64_t first, uint64_t token_count,
                                                const char *field,
                                                const struct kvk_content_span **spans,
                                                struct kvk_error *error);

/* rpc_hint.c: of a prompt that was checked; the result is in it, borrowed from the arena. */
KVK_CHECKED enum kvk_status kvk_rpc_check_hints(struct kvk_rpc_run *run, size_t count,
                                                Kvkeep__V1__PriorityHint *const *messages,
                                                struct kvk_prompt *prompt, struct kvk_error *error);

KVK_CHECKED enum kvk_status kvk_rpc_check_request_id(const ProtobufCBinaryData *bytes,
                                                     struct kvk_request_id *request_id,
                                                     struct kvk_error *error);

/* Enums; the API's numbers are ours. */
KVK_CHECKED enum kvk_status kvk_rpc_check_format(Kvkeep__V1__Format format, bool may_be_none,
                                                 const char *field, enum kvk_format *result,
                                                 struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_rpc_check_layout(Kvkeep__V1__Layout layout, const char *field,
                                                 enum kvk_layout *result, struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_rpc_check_attention(Kvkeep__V1__Attention attention,
                                                    const char *field, enum kvk_attention *result,
                                                    struct kvk_error *error);
/* -1: unspecified, where that is allowed. */
KVK_CHECKED enum kvk_status kvk_rpc_check_tier(Kvkeep__V1__Tier tier, const char *field,
                                               int *result, struct kvk_error *error);

/* Finite and at least 0; not 0 where `positive`. */
KVK_CHECKED enum kvk_status kvk_rpc_check_number(double value, bool positive, const char *field,
                                                 struct kvk_error *error);

/* A count of 1 to `limit`. */
KVK_CHECKED enum kvk_status kvk_rpc_check_count(uint64_t value, uint64_t limit, const char *field,
                                                struct kvk_error *error);

/* [first, first + count) with count at least 1 does not overflow. */
KVK_CHECKED enum kvk_status kvk_rpc_check_range(uint64_t first, uint64_t count, const char *field,
                                                struct kvk_error *error);

/* The whole of OpenSpace's request. */
/* Layer groups as messages give them. */
struct kvk_rpc_shape {
    uint32_t block_tokens;
    uint32_t tensor_shards; /* 0: 1 */
    uint32_t pipeline_shards;
    Kvkeep__V1__LayerGroup *const *groups; /* [group_count] */
    size_t group_count;
};
KVK_CHECKED enum kvk_status kvk_rpc_check_groups(const struct kvk_rpc_shape *shape,
                                                 struct kvk_geometry groups[KVK_GROUP_COUNT_MAX],
                                                 struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_rpc_check_space(const Kvkeep__V1__OpenSpaceRequest *message,
                                                struct kvk_space_request *request,
                                                struct kvk_error *error);

/* ---- rpc_answers.c ---- */

/* An advice as a message that borrows `source`; NULL: there is none. */
struct kvk_rpc_advice {
    Kvkeep__V1__Advice message;
    uint64_t ids[KVK_ADVICE_MAX];
    uint64_t bytes[KVK_ADVICE_MAX];
};
Kvkeep__V1__Advice *kvk_rpc_fill_advice(struct kvk_rpc_advice *target,
                                        const struct kvk_advice *source);

/* ---- the methods ---- */

#define KVK_RPC_HANDLER(name)                                                                      \
    enum kvk_status name(struct kvk_rpc_run *run, const ProtobufCMessage *message,                 \
                         struct kvk_error *error)

KVK_RPC_HANDLER(kvk_rpc_open_space);
KVK_RPC_HANDLER(kvk_rpc_invalidate);

KVK_RPC_HANDLER(kvk_rpc_lookup);
KVK_RPC_HANDLER(kvk_rpc_touch);
KVK_RPC_HANDLER(kvk_rpc_pin);
KVK_RPC_HANDLER(kvk_rpc_renew);
KVK_RPC_HANDLER(kvk_rpc_release);
KVK_RPC_HANDLER(kvk_rpc_begin_transfer);
KVK_RPC_HANDLER(kvk_rpc_end_transfer);

KVK_RPC_HANDLER(kvk_rpc_open_sequence);
KVK_RPC_HANDLER(kvk_rpc_get_sequence);
KVK_RPC_HANDLER(kvk_rpc_append);
KVK_RPC_HANDLER(kvk_rpc_seal);
KVK_RPC_HANDLER(kvk_rpc_commit);
KVK_RPC_HANDLER(kvk_rpc_truncate);
KVK_RPC_HANDLER(kvk_rpc_fork);
KVK_RPC_HANDLER(kvk_rpc_swap_out);
KVK_RPC_HANDLER(kvk_rpc_swap_in);
KVK_RPC_HANDLER(kvk_rpc_close);

KVK_RPC_HANDLER(kvk_rpc_map_memory);
KVK_RPC_HANDLER(kvk_rpc_publish_prefix);
KVK_RPC_HANDLER(kvk_rpc_unpublish_prefix);
KVK_RPC_HANDLER(kvk_rpc_list_public_prefixes);
KVK_RPC_HANDLER(kvk_rpc_attend);

KVK_RPC_HANDLER(kvk_rpc_get_server_info);
KVK_RPC_HANDLER(kvk_rpc_get_occupancy);
KVK_RPC_HANDLER(kvk_rpc_list_spaces);
KVK_RPC_HANDLER(kvk_rpc_list_sequences);
KVK_RPC_HANDLER(kvk_rpc_list_leases);
KVK_RPC_HANDLER(kvk_rpc_list_instances);
KVK_RPC_HANDLER(kvk_rpc_get_block);
KVK_RPC_HANDLER(kvk_rpc_why);
KVK_RPC_HANDLER(kvk_rpc_explain_miss);
KVK_RPC_HANDLER(kvk_rpc_doctor);
KVK_RPC_HANDLER(kvk_rpc_get_miss_ratio);
KVK_RPC_HANDLER(kvk_rpc_get_stats);
KVK_RPC_HANDLER(kvk_rpc_drain);
KVK_RPC_HANDLER(kvk_rpc_plan);
KVK_RPC_HANDLER(kvk_rpc_get_usage);
KVK_RPC_HANDLER(kvk_rpc_get_fleet);
KVK_RPC_HANDLER(kvk_rpc_create_tenant);
KVK_RPC_HANDLER(kvk_rpc_list_tenants);
KVK_RPC_HANDLER(kvk_rpc_change_tenant);
KVK_RPC_HANDLER(kvk_rpc_delete_tenant);
KVK_RPC_HANDLER(kvk_rpc_create_credential);
KVK_RPC_HANDLER(kvk_rpc_list_credentials);
KVK_RPC_HANDLER(kvk_rpc_rotate_token);
KVK_RPC_HANDLER(kvk_rpc_revoke_tokens);
KVK_RPC_HANDLER(kvk_rpc_delete_credential);
KVK_RPC_HANDLER(kvk_rpc_set_space_mode);
KVK_RPC_HANDLER(kvk_rpc_test_control);

Kvkeep__V1__Mode kvk_rpc_give_mode(enum kvk_tenant_mode mode);

void kvk_rpc_sessions_init(struct kvk_rpc_sessions *sessions);
void kvk_rpc_sessions_join(struct kvk_rpc_sessions *sessions); /* the drain's thread */
void kvk_rpc_sessions_finish(struct kvk_rpc_sessions *sessions);
/* Tell all sessions, and end them as soon as no other call lives. Returns at once. */
void kvk_rpc_sessions_drain(struct kvk_rpc *rpc);

/* One packed BlockPiece, checked as far as it goes without its sequence. Its data stays where it
 * is in `bytes`. */
KVK_CHECKED enum kvk_status
kvk_rpc_read_piece(struct kvk_bytes bytes, struct kvk_write_piece *piece, struct kvk_error *error);

void kvk_rpc_session(struct kvk_call *call, void *rpc_bound);
void kvk_rpc_write_blocks(struct kvk_call *call, void *rpc_bound);
void kvk_rpc_read_blocks(struct kvk_call *call, void *rpc_bound);
void kvk_rpc_watch_blocks(struct kvk_call *call, void *rpc_bound);

/* ---- rpc_watch.c ---- */

void kvk_rpc_watches_init(struct kvk_rpc_watches *watches);
/* With the cache attached; does nothing where there are no events. */
void kvk_rpc_watches_start(struct kvk_rpc *rpc);
/* End all streams, in order. */
void kvk_rpc_watches_drain(struct kvk_rpc_watches *watches);
void kvk_rpc_watches_join(struct kvk_rpc_watches *watches);
void kvk_rpc_watches_finish(struct kvk_rpc_watches *watches);

#endif
