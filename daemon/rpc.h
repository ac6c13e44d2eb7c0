/*
 * kvkeep's calls: what comes in as messages is checked and unpacked here, given to the engine, and
 * its answers are packed. The rpc files are the only ones that see protobuf types.
 *
 *     rpc.c           the method table, and the way that every unary call goes
 *     rpc_wire.c      bytes of messages: bounded before they are unpacked, memory per thread
 *     rpc_caller.c    who calls
 *     rpc_owner.c     by whom calls take turns
 *     rpc_check.c     values of requests: checked in one place, each error names its field
 *     rpc_space.c, rpc_lookup.c, rpc_sequence.c, rpc_bytes.c, rpc_session.c, rpc_attend.c,
 *     rpc_admin.c, rpc_stats.c, rpc_tenants.c, rpc_test.c    the calls, by subject
 *
 * Locking: none of its own but for the notices of one session. Everything here runs on the
 * server's threads.
 */
#ifndef KVK_DAEMON_RPC_H
#define KVK_DAEMON_RPC_H

#include <stddef.h>
#include <stdint.h>

#include "daemon/audit.h"
#include "daemon/cache.h"
#include "daemon/server.h"

struct kvk_rpc;
struct kvk_publisher;

struct kvk_rpc_options {
    const struct kvk_config *config; /* borrowed for the life of the rpc, as is all below */
    struct kvk_tenants *tenants;
    struct kvk_audit *audit; /* where administrative calls are noted; NULL: nowhere */
    struct kvk_clock *clock; /* NULL: monotonic */
    const char *side_path;   /* of the side socket; NULL or "": none */
};

KVK_CHECKED enum kvk_status kvk_rpc_create(const struct kvk_rpc_options *options,
                                           struct kvk_rpc **rpc, struct kvk_error *error);

/* After the server. NULL is fine. */
void kvk_rpc_destroy(struct kvk_rpc *rpc);

/* The table for kvk_server_create(); the rpc's, as long as it lives. */
const struct kvk_method *kvk_rpc_methods(const struct kvk_rpc *rpc, uint32_t *method_count);

/* Fill in what the server calls back here: the drain, the details of errors, and their context. */
void kvk_rpc_set_callbacks(struct kvk_rpc *rpc, struct kvk_server_options *options);

/*
 * What the calls work on, borrowed: before kvk_server_start(). Apart from kvk_rpc_create(), so that
 * the server can take its lock before the pools are there: a second daemon must not even allocate
 * them. `device` says which kernels attend; copied.
 */
void kvk_rpc_attach(struct kvk_rpc *rpc, struct kvk_cache *cache, struct kvk_server *server,
                    const struct kvk_device_info *device);

/* Whose figures the statistics show; borrowed until kvk_rpc_detach(). NULL: none. */
void kvk_rpc_set_publisher(struct kvk_rpc *rpc, const struct kvk_publisher *publisher);

/* After kvk_server_drain() and before kvk_server_destroy(): nothing here touches the server or the
 * cache after it. */
void kvk_rpc_detach(struct kvk_rpc *rpc);

/* Pack google.rpc.Status with one kvkeep.v1.ErrorDetail; see kvk_server_options.error_details. */
size_t kvk_rpc_error_details(const struct kvk_error *error, int code, uint8_t *buffer,
                             size_t capacity);

#endif
