/*
 * One connection of a client: unary calls and streams of messages over gRPC's C core, errors turned
 * into struct kvk_error. The only file of the client that sees gRPC. For programs that need
 * more than kvkeep.h offers (the admin calls), with protobuf-c's messages.
 */
#ifndef KVK_CLIENT_CONNECTION_H
#define KVK_CLIENT_CONNECTION_H

#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct kvkeep_connection;
struct kvkeep_stream;
struct kvkeep_tls;

/* `token` may be NULL. Connects lazily. Each connection has a transport of its own. */
KVK_CHECKED enum kvk_status kvkeep_connection_create(const char *target, const char *token,
                                                     struct kvkeep_connection **connection,
                                                     struct kvk_error *error);
/* The same over TLS; `tls` NULL, or a unix socket: without. KVK_INVALID names a file that cannot be
 * read. */
KVK_CHECKED enum kvk_status kvkeep_connection_create_tls(const char *target, const char *token,
                                                         const struct kvkeep_tls *tls,
                                                         struct kvkeep_connection **connection,
                                                         struct kvk_error *error);
void kvkeep_connection_destroy(struct kvkeep_connection *connection);

/*
 * One unary call: "/kvkeep.v1.Kvkeep/Lookup". `response` is freed by
 * protobuf_c_message_free_unpacked(). Thread safe; one call at a time.
 */
KVK_CHECKED enum kvk_status kvkeep_connection_call(struct kvkeep_connection *connection,
                                                   const char *method,
                                                   const ProtobufCMessage *request,
                                                   const ProtobufCMessageDescriptor *response_type,
                                                   uint32_t timeout_ms, ProtobufCMessage **response,
                                                   struct kvk_error *error);

/* A stream of any kind. timeout_ms 0: none. One thread sends and one receives at a time; each
 * waits for its own operation. */
KVK_CHECKED enum kvk_status kvkeep_stream_open(struct kvkeep_connection *connection,
                                               const char *method, uint32_t timeout_ms,
                                               struct kvkeep_stream **stream,
                                               struct kvk_error *error);
/* False: the stream is at its end; kvkeep_stream_finish() says why. */
KVK_CHECKED bool kvkeep_stream_send(struct kvkeep_stream *stream, const ProtobufCMessage *message);
KVK_CHECKED bool kvkeep_stream_half_close(struct kvkeep_stream *stream);
/* The next message, or NULL at the stream's end. */
ProtobufCMessage *kvkeep_stream_receive(struct kvkeep_stream *stream,
                                        const ProtobufCMessageDescriptor *type);
void kvkeep_stream_cancel(struct kvkeep_stream *stream); /* wakes both; any thread */
/* Wait for the stream's status and free it. */
enum kvk_status kvkeep_stream_finish(struct kvkeep_stream *stream, struct kvk_error *error);

#endif
