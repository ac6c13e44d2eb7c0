/*
 * Insides of libkvkeep that its files share. Not installed.
 */
#ifndef KVK_CLIENT_INTERNAL_H
#define KVK_CLIENT_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>

#include "client/connection.h"
#include "client/kvkeep.h"
#include "kvkeep/v1/kvkeep.pb-c.h"

#define KVKEEP_METHOD(name) "/kvkeep.v1.Kvkeep/" name

struct kvkeep_client {
    char *target;
    char *token;           /* NULL: none */
    struct kvkeep_tls tls; /* copies, ours */
    bool use_tls;
    uint32_t timeout_ms;
    bool retry;
    struct kvkeep_connection *calls;
    struct kvkeep_connection *bulk; /* made at the first use; guarded by bulk_mutex */
    pthread_mutex_t bulk_mutex;
};

struct kvkeep_session {
    struct kvkeep_client *client; /* borrowed */
    uint64_t id;
    uint8_t token[16];
    int side_fd; /* -1: none. Guarded by side_mutex */
    pthread_mutex_t side_mutex;
    struct kvkeep_connection *connection; /* the stream's own: it must not wait behind bulk */
    struct kvkeep_stream *stream;
    pthread_t listener;
    _Atomic bool closing;
    void (*on_notice)(void *context, enum kvkeep_notice notice, uint64_t value);
    void *context;
};

/*
 * One unary call, repeated with backoff while the daemon says UNAVAILABLE (busy, draining) and the
 * client's time lasts. Only for calls that may be repeated, or whose refusal changed nothing.
 */
KVK_CHECKED enum kvk_status kvkeep_client_call(struct kvkeep_client *client, const char *method,
                                               const ProtobufCMessage *request,
                                               const ProtobufCMessageDescriptor *response_type,
                                               void *response, struct kvk_error *error);

/* One more connection, as the client's options say. */
KVK_CHECKED enum kvk_status kvkeep_client_connection(const struct kvkeep_client *client,
                                                     struct kvkeep_connection **connection,
                                                     struct kvk_error *error);

/* The connection for streams of bytes. */
KVK_CHECKED enum kvk_status kvkeep_client_bulk(struct kvkeep_client *client,
                                               struct kvkeep_connection **connection,
                                               struct kvk_error *error);

/* A prompt as a message that borrows it; kvkeep_prompt_drop() frees what it made. */
struct kvkeep_prompt_message {
    Kvkeep__V1__Prompt message;
    Kvkeep__V1__ContentSpan *spans;
    Kvkeep__V1__ContentSpan **span_pointers;
};
KVK_CHECKED enum kvk_status kvkeep_prompt_make(const struct kvkeep_prompt *prompt,
                                               struct kvkeep_prompt_message *message,
                                               struct kvk_error *error);
void kvkeep_prompt_drop(struct kvkeep_prompt_message *message);

/* Bytes of a text; empty for NULL. */
ProtobufCBinaryData kvkeep_text(const char *text);

/* Bring one answered part into a table. KVK_INTERNAL: the arrays do not fit together. */
KVK_CHECKED enum kvk_status kvkeep_table_merge(struct kvkeep_table *table,
                                               const Kvkeep__V1__BlockTable *part,
                                               struct kvk_error *error);
void kvkeep_table_finish(struct kvkeep_table *table);

#endif
