/*
 * What the files of the server share: server.c (life of the whole), server_socket.c (listeners and
 * the lock file), server_accept.c (connections), server_call.c (calls and their callbacks),
 * server_send.c (what goes out), server_tls.c (certificates), server_peer.c (who is at the other
 * end), server_bulk.c (bulk threads), server_fair.c (whose turn it is), server_health.c and
 * server_reflection.c (standard services, as methods like any other).
 *
 * Locks, in the order they may be taken: health.lock, call->lock, then one of bulk.lock,
 * connections.lock, calls.lock, drain_lock. None is held while gRPC is called or a handler runs.
 */
#ifndef KVK_DAEMON_SERVER_PRIVATE_H
#define KVK_DAEMON_SERVER_PRIVATE_H

#include <grpc/grpc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "base/lock.h"
#include "daemon/server.h"
#include "daemon/server_fair.h"

#define KVK_SERVER_HEALTH_SERVICES_MAX 8
#define KVK_SERVER_WATCHERS_MAX 64
#define KVK_SERVER_BULK_THREADS_MAX 64
#define KVK_SERVER_OWN_METHODS 4 /* health's two, reflection's two */

/* What gRPC's completion queue gives back: the continuation. */
struct kvk_tag {
    void (*run)(struct kvk_tag *tag, bool ok);
};

/* ---- connections ---- */

struct kvk_connection {
    struct kvk_peer peer;
    atomic_uint references;                 /* the table's while open, and one per call */
    int fd;                                 /* gRPC's, the key of the table */
    int watch_fd;                           /* our duplicate, to see the peer go; -1 once closed */
    struct kvk_connection *next, *previous; /* open ones; accept thread only */
};

struct kvk_listener {
    int fd;
    enum kvk_peer_kind kind;
    uint16_t port; /* TCP */
};

struct kvk_connections {
    struct kvk_lock lock;
    struct kvk_connection **by_fd; /* [fd_capacity] open connections; lock */
    uint32_t fd_capacity;
    atomic_uint live_count;
    atomic_ulong accepted_count;
    atomic_ulong refused_count;
    struct kvk_connection *open; /* accept thread only */
    uint64_t last_id;            /* accept thread only */

    struct kvk_listener listeners[KVK_SERVER_TCP_MAX + 1];
    uint32_t listener_count;
    int lock_fd; /* of the lock file; -1: none */
    dev_t socket_device;
    ino_t socket_inode; /* the socket file that is ours to remove; 0: none */

    int epoll_fd;
    int unread_fd; /* an epoll of all connections: has any of them bytes that gRPC has not read? */
    int wake_fd;   /* eventfd: stop accepting, stop the thread */
    pthread_t thread;
    bool thread_runs;
    atomic_bool stop_accepting;
    atomic_bool stop;
};

/* ---- bulk threads ---- */

struct kvk_bulk {
    struct kvk_lock lock;
    pthread_cond_t work;
    struct kvk_fair fair; /* a call waits here at most once, so live calls bound it */
    bool stop;
    pthread_t threads[KVK_SERVER_BULK_THREADS_MAX];
    uint32_t thread_count;
};

/* ---- calls ---- */

struct kvk_server_method {
    struct kvk_method method;
    struct kvk_server *server;
    void *registered; /* gRPC's; NULL: the catch-all */
    bool own;         /* of a standard service */
    atomic_uint live_count;
};

enum kvk_call_event {
    KVK_EVENT_RUN = 1 << 0,    /* a deferred run; on a bulk thread only */
    KVK_EVENT_CANCEL = 1 << 1, /* before what came in earlier: nobody waits for that any more */
    KVK_EVENT_SENT = 1 << 2,
    KVK_EVENT_MESSAGE = 1 << 3,
    KVK_EVENT_HALF_CLOSE = 1 << 4,
    KVK_EVENT_WAKE = 1 << 5,
};

/*
 * A call, from the moment it is armed (gRPC may hand one over) until its last reference goes. The
 * references: the handler's, which passes to the batch that carries the status; one per other batch
 * under way; one of the thread that runs its callbacks.
 */
struct kvk_call {
    struct kvk_tag tag_new;
    struct kvk_tag tag_send;    /* messages, and the batch with the status */
    struct kvk_tag tag_receive; /* one message of a stream */
    struct kvk_tag tag_close;   /* the client's end of it, where watched apart from the status */

    struct kvk_server *server;
    struct kvk_server_method *method;
    struct kvk_connection *connection; /* of TLS: one that stands for all */
    struct kvk_call *next;             /* in the free list */
    struct kvk_fair_item turn;         /* in the queue of its thread, or its threads */
    atomic_uint references;

    uint32_t owner;     /* below options.owner_count */
    bool owner_counted; /* in calls.owner_live */
    const void *caller; /* call_owner's */

    grpc_call *call;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_call_details details; /* of the catch-all */

    grpc_byte_buffer *received; /* the request, or the message at hand */
    grpc_slice flat;            /* it in one piece, once asked for */
    bool flat_made;

    grpc_slice reply; /* kvk_call_reply_alloc() */
    bool reply_made;

    grpc_byte_buffer *sending; /* in the batch under way; ours to destroy after it */
    grpc_slice status_text;
    bool status_text_made;
    grpc_metadata trailing; /* grpc-status-details-bin */
    bool trailing_made;
    int close_cancelled; /* written by gRPC before tag_close, or tag_send of a unary call */
    atomic_bool cancelled;

    void *context;
    const struct kvk_stream_events *events; /* streams */
    void (*on_cancel)(struct kvk_call *call);
    void (*on_done)(void *context);
    void (*deferred)(struct kvk_call *call);

    /* Set by the thread that runs on_call, before others can know of the call. */
    bool begun;   /* on_call was entered */
    bool managed; /* has callbacks beyond on_call */
    bool close_watched;

    /* Below: lock, for managed calls. Unmanaged ones belong to one thread at a time. */
    struct kvk_lock lock;
    unsigned events_waiting; /* enum kvk_call_event */
    bool running;            /* a thread runs the callbacks, or is about to */
    bool ended;              /* the handler ended it */
    bool cancel_told;
    bool receiving;
    bool receive_over; /* the client sends nothing more */
    bool send_under_way;
    bool metadata_sent;
    bool status_sent; /* the batch with the status was started: the last one */
    grpc_status_code status_code;
    grpc_byte_buffer **send_queue; /* ring [send_queue_max], streams that send; ours */
    uint32_t send_first;
    uint32_t send_count;
};

struct kvk_calls {
    struct kvk_lock lock;
    struct kvk_call *free; /* recycled calls */
    atomic_uint live_count;
    atomic_uint armed_count; /* calls that gRPC may still hand over */
    atomic_ulong call_count;
    atomic_ulong refused_count;
    atomic_ulong one_refused_count; /* of them, for the limit of one owner */
    atomic_ulong unknown_count;
    atomic_uint *owner_live;     /* [options.owner_count] calls that wait or run; ours */
    atomic_ulong *owner_hold_ns; /* [options.owner_count + 1] see kvk_call_hold_owner(); ours */
    struct kvk_fair fair;        /* INLINE calls that wait for the look-up thread; its alone */
    atomic_ulong cancelled_count;
};

/* ---- the standard services ---- */

struct kvk_health_service {
    char name[128];
    bool serving;
};

struct kvk_health {
    struct kvk_lock lock;
    struct kvk_health_service services[KVK_SERVER_HEALTH_SERVICES_MAX];
    uint32_t service_count;
    struct kvk_health_watch *watchers;
    uint32_t watcher_count;
    bool draining;
};

struct kvk_reflection;
struct kvk_tls;

struct kvk_server {
    struct kvk_server_options options;
    grpc_server *grpc;
    grpc_completion_queue *queue;
    struct kvk_server_method methods[KVK_SERVER_METHODS_MAX + KVK_SERVER_OWN_METHODS];
    uint32_t method_count;
    struct kvk_server_method unknown;
    struct kvk_calls calls;
    struct kvk_bulk bulk;
    struct kvk_connections connections;
    struct kvk_health health;
    struct kvk_reflection *reflection; /* NULL: none */
    struct kvk_tls *tls;               /* NULL: none */
    struct kvk_connection *tls_peer;   /* stands for every TLS connection: gRPC has them */
    uint16_t tls_port;
    pthread_t lookup_thread;
    atomic_ulong turns; /* of it */
    bool grpc_ready;
    bool started;
    bool drained;
    atomic_bool draining;

    struct kvk_lock drain_lock;
    pthread_cond_t drain_progress;
    struct kvk_tag tag_shutdown;
    bool shutdown_done; /* drain_lock */
};

/* server.c: run by who changed what a drain may wait for. */
void kvk_server_drain_notify(struct kvk_server *server);

/* A thread of the server's, with a name and no signals. KVK_EXHAUSTED: the system has none. */
KVK_CHECKED enum kvk_status kvk_server_thread(pthread_t *thread, const char *name,
                                              void *(*run)(void *argument), void *argument,
                                              struct kvk_error *error);

/* server_socket.c */
KVK_CHECKED enum kvk_status kvk_listeners_open(struct kvk_connections *connections,
                                               const struct kvk_server_options *options,
                                               struct kvk_error *error);
/* Nobody can connect any more; the lock is kept. May be repeated. */
void kvk_listeners_stop(struct kvk_connections *connections,
                        const struct kvk_server_options *options);
void kvk_listeners_close(struct kvk_connections *connections,
                         const struct kvk_server_options *options);

/* server_accept.c */
KVK_CHECKED enum kvk_status kvk_connections_init(struct kvk_connections *connections,
                                                 struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_connections_start(struct kvk_server *server,
                                                  struct kvk_error *error);
void kvk_connections_stop_accepting(struct kvk_server *server);
void kvk_connections_finish(struct kvk_server *server);
/* The open connection that has this descriptor, with a reference; NULL: none (any more). */
struct kvk_connection *kvk_connection_find(struct kvk_connections *connections, int fd);
void kvk_connection_release(struct kvk_connection *connection);
/* Have bytes come in that gRPC has not read yet? Those of TLS are not seen. */
bool kvk_connections_unread(const struct kvk_connections *connections);
/* Wait for some, not for longer than this. */
void kvk_connections_wait(const struct kvk_connections *connections, uint64_t ns);

/* server_tls.c */
KVK_CHECKED enum kvk_status kvk_tls_create(const struct kvk_tls_options *options,
                                           struct kvk_tls **tls, struct kvk_error *error);
void kvk_tls_destroy(struct kvk_tls *tls); /* after gRPC's server */
KVK_CHECKED enum kvk_status kvk_tls_reload(struct kvk_tls *tls, struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_tls_listen(struct kvk_server *server, struct kvk_error *error);

/* server_peer.c: the connection of a new call, with a reference; NULL: it is gone. */
struct kvk_connection *kvk_call_find_connection(struct kvk_call *call);
/* The address of a socket's other end. */
void kvk_peer_address(struct kvk_peer *peer, int fd);

/* server_bulk.c */
KVK_CHECKED enum kvk_status kvk_bulk_init(struct kvk_bulk *bulk,
                                          const struct kvk_server_options *options,
                                          struct kvk_error *error);
void kvk_bulk_finish(struct kvk_bulk *bulk);
KVK_CHECKED enum kvk_status kvk_bulk_start(struct kvk_bulk *bulk, uint32_t thread_count,
                                           struct kvk_error *error);
void kvk_bulk_push(struct kvk_bulk *bulk, struct kvk_call *call);
void kvk_bulk_stop(struct kvk_bulk *bulk); /* the queue is empty */

/* server_call.c */
KVK_CHECKED enum kvk_status kvk_calls_init(struct kvk_server *server, struct kvk_error *error);
/* The look-up thread: serve the INLINE call whose turn it is. False: none waits. */
bool kvk_calls_serve_one(struct kvk_server *server);
void kvk_calls_arm(struct kvk_server_method *method);
void kvk_calls_finish(struct kvk_server *server);
/* On a bulk thread, what kvk_bulk_push() brought there. */
void kvk_call_run_bulk(struct kvk_call *call);
void kvk_call_post(struct kvk_call *call, enum kvk_call_event event);
void kvk_call_release(struct kvk_call *call);
void kvk_call_start_batch(struct kvk_call *call, const grpc_op *operations, size_t count,
                          struct kvk_tag *tag);

/* server_send.c */
void kvk_call_send_done(struct kvk_tag *tag, bool ok);
/* The next message of the queue or, where the call was ended, its status; nothing while one is
 * under way. */
void kvk_call_advance_sends(struct kvk_call *call);
void kvk_call_drop_sends(struct kvk_call *call);

/* server_health.c, server_reflection.c: their methods, at most KVK_SERVER_OWN_METHODS in all. */
uint32_t kvk_health_methods(struct kvk_health *health, struct kvk_method *methods);
void kvk_health_init(struct kvk_health *health);
void kvk_health_finish(struct kvk_health *health);
/* "" for the whole server. KVK_EXHAUSTED: too many services. */
KVK_CHECKED enum kvk_status kvk_health_set(struct kvk_health *health, const char *service,
                                           bool serving);
void kvk_health_drain(struct kvk_health *health);

KVK_CHECKED enum kvk_status kvk_reflection_create(struct kvk_bytes descriptor_set,
                                                  struct kvk_reflection **reflection,
                                                  struct kvk_error *error);
void kvk_reflection_destroy(struct kvk_reflection *reflection);
uint32_t kvk_reflection_methods(struct kvk_reflection *reflection, struct kvk_method *methods);

#endif
