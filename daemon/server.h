/*
 * The gRPC server under the daemon's calls: sockets, connections, completion queues, calls and
 * streams as bytes. It knows no message of kvkeep; rpc_*.c unpacks and packs on top of it. All of
 * gRPC's C core stays behind this header, for that API is not promised stable.
 *
 * A method's handler gets a call and ends it, now or later and from any thread, by exactly one of
 * kvk_call_reply(), kvk_call_reply_borrowed(), kvk_call_finish() and kvk_call_fail(). Until then
 * the pointer is valid, also when the client is long gone; after it the handler may not touch the
 * call. A client that went away is told through the cancel callbacks; ending the call is still the
 * handler's.
 *
 * Threads: handlers and callbacks of INLINE methods run on the one look-up thread and must neither
 * block nor work long. Those of BULK methods run on the bulk threads and may. Callbacks of one call
 * never run at the same time as each other; the last, on_done, may run on any of the server's
 * threads. One may just be under way when another thread ends the call. No lock of the server is
 * held in any of them, and none may be held by who calls reply, fail, finish, send or receive. All
 * kvk_call_ functions may be called from any thread, but of one call's request, message and reply
 * buffer by one thread at a time.
 *
 * Fork before kvk_server_create(), never after: gRPC starts threads of its own.
 */
#ifndef KVK_DAEMON_SERVER_H
#define KVK_DAEMON_SERVER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

struct kvk_server;
struct kvk_call;

#define KVK_SERVER_METHODS_MAX 64
#define KVK_SERVER_TCP_MAX 8
#define KVK_SERVER_DETAILS_MAX 2048
#define KVK_SERVER_TOKEN_MAX 1024 /* bytes of a bearer token that is looked at */

/* A view of somebody else's bytes. */
struct kvk_bytes {
    const uint8_t *data; /* not NULL where size_bytes > 0 */
    size_t size_bytes;
};

/* ---- who calls ---- */

enum kvk_peer_kind {
    KVK_PEER_UNIX = 1, /* uid, gid, pid and pidfd are the kernel's word */
    KVK_PEER_TCP = 2,  /* without TLS */
    KVK_PEER_TLS = 3,
};

struct kvk_peer {
    enum kvk_peer_kind kind;
    uint64_t connection_id; /* from 1, never used again; 0: not known (TLS) */
    uint32_t uid;           /* UINT32_MAX: not known */
    uint32_t gid;
    int32_t pid; /* 0: not known (another pid namespace) */
    int pidfd;   /* the server's, open as long as the connection; dup() it to keep. -1: none */
    uint8_t address[16];   /* TCP: of the other end, 4 or 16 bytes in network order */
    uint32_t address_size; /* 0: not known (TLS: see kvk_call_peer_address()) */
    uint16_t port;
};

/* ---- certificates ---- */

enum kvk_tls_clients {
    KVK_TLS_CLIENTS_NO = 0,
    KVK_TLS_CLIENTS_REQUEST = 1, /* a certificate that is shown must be valid */
    KVK_TLS_CLIENTS_REQUIRE = 2,
};

/* PEM files; paths are borrowed as long as the server. */
struct kvk_tls_options {
    const char *certificate; /* NULL or "": no TLS */
    const char *key;
    const char *client_ca; /* where clients' certificates are looked at */
    enum kvk_tls_clients client_certificates;
};

/* ---- methods ---- */

enum kvk_method_kind {
    KVK_METHOD_UNARY = 1,
    KVK_METHOD_SERVER_STREAM = 2,
    KVK_METHOD_CLIENT_STREAM = 3,
    KVK_METHOD_BIDI = 4,
};

enum kvk_method_class {
    KVK_CLASS_INLINE = 1, /* answered on the look-up thread itself */
    KVK_CLASS_BULK = 2,   /* handed to the bulk threads */
};

struct kvk_method {
    const char *path; /* "/kvkeep.v1.Kvkeep/Lookup"; borrowed as long as the server */
    enum kvk_method_kind kind;
    enum kvk_method_class class;
    uint32_t queue_depth; /* calls that gRPC may hand over ahead; 0: options.queue_depth */
    uint32_t live_max;    /* calls of this method at a time; 0: only the server's limit */
    void (*on_call)(struct kvk_call *call, void *user_data);
    void *user_data; /* borrowed as long as the server */
    /* INLINE: with a message of so many bytes and more, a call is handed to the bulk threads while
     * other owners' calls come in, so that they do not wait for it; 0: never. Its handler must not
     * mind. */
    uint64_t long_bytes;
};

/* ---- server ---- */

struct kvk_server_options {
    const char *unix_path; /* NULL or "": no unix socket. A lock file, PATH.lock, lies beside it */
    uint32_t unix_mode;    /* 0600 */

    /* TCP listeners, "host:port", "[v6]:port". Refused at start unless tcp_insecure is true or
     * there is a certificate, by which they all speak TLS (then one address at most). */
    const char *tcp_addresses[KVK_SERVER_TCP_MAX];
    uint32_t tcp_address_count;
    bool tcp_insecure;
    struct kvk_tls_options tls;

    uint64_t message_bytes_max; /* of one message received; 64 MiB */
    uint32_t metadata_bytes_max;
    uint32_t keepalive_time_ms;
    uint32_t keepalive_timeout_ms;
    uint32_t connections_max; /* over all listeners, TLS apart */
    uint32_t streams_max;     /* concurrent calls of one connection */
    uint32_t live_calls_max;  /* of all; over it RESOURCE_EXHAUSTED at once */
    uint32_t queue_depth;     /* of methods that do not say */
    uint32_t send_queue_max;  /* messages of one stream that wait to be sent */
    uint32_t bulk_threads;    /* at least 1 */
    uint32_t spin_us;         /* the look-up thread polls this long before it sleeps; 0: never */

    /*
     * Turns: calls wait in a queue per owner, and owners are served by turns of time (see
     * server_fair.h). Without call_owner all calls have one owner.
     *
     * call_owner says whose a new call is: a number below owner_count. It is asked once, on the
     * look-up thread, before the call waits; `user_data` is its method's. It must be quick. Where
     * it fails, the call is failed with its error and given to nobody.
     */
    enum kvk_status (*call_owner)(struct kvk_call *call, void *user_data, uint32_t *owner,
                                  struct kvk_error *error);
    uint32_t owner_count;         /* 1 */
    uint32_t owner_calls_max;     /* of one owner at a time, that wait or run; bidi streams apart */
    uint32_t owner_threads_max;   /* bulk threads that calls of one owner take at a time */
    uint32_t owner_share_percent; /* of the look-up thread's time, that calls of one owner take
                                     while those of others come in; 1 to 100 */
    uint32_t drain_grace_ms;      /* calls that run may end themselves within it */

    /*
     * Pack what travels as grpc-status-details-bin beside a failure (a google.rpc.Status), for
     * failures of the server and of kvk_call_fail() alike. `code` is the gRPC code of the status.
     * Returns the size, 0: none, at most `capacity` (KVK_SERVER_DETAILS_MAX). May be NULL. Any
     * thread, several at a time.
     */
    size_t (*error_details)(const struct kvk_error *error, int code, uint8_t *buffer,
                            size_t capacity);

    /* A connection's peer closed it or died. Once per connection with an id, on the accept thread
     * (of those still open, in kvk_server_destroy()); calls of it may still be under way, and get
     * their cancel callbacks beside this. May be NULL.
     */
    void (*on_connection_closed)(const struct kvk_peer *peer, void *user_data);

    /* The drain began: end what would never end by itself (sessions). May be NULL. */
    void (*on_drain)(void *user_data);
    void *user_data; /* of the callbacks above */

    /* The FileDescriptorSet that server reflection answers from; size 0: no reflection. Borrowed.
     */
    struct kvk_bytes descriptor_set;
};

/* Every field's default: no sockets, limits as documented in docs/configuration.md. */
void kvk_server_options_init(struct kvk_server_options *options);

/*
 * Make a server: take the lock, bind and listen, register the methods (health and reflection are
 * added). Nothing is accepted before kvk_server_start(). `options` is copied, its pointers are
 * borrowed.
 * KVK_INVALID: a field of the options, named. KVK_UNAVAILABLE: another daemon has the socket (its
 * pid is in the text) or an address cannot be bound.
 */
KVK_CHECKED enum kvk_status kvk_server_create(const struct kvk_server_options *options,
                                              const struct kvk_method *methods,
                                              uint32_t method_count, struct kvk_server **server,
                                              struct kvk_error *error);

KVK_CHECKED enum kvk_status kvk_server_start(struct kvk_server *server, struct kvk_error *error);

/* What grpc.health.v1 says of a service from now on. "" (the whole server) and those set before
 * kvk_server_start() are known; at most 8. The whole server is SERVING from start to drain. */
void kvk_server_set_serving(struct kvk_server *server, const char *service, bool serving);

/*
 * Stop: health says NOT_SERVING and its Watch streams end, on_drain is told, nobody is accepted
 * any more, calls under way get options.drain_grace_ms, then are cancelled. Returns when no call
 * lives: every handler must end its call some day. Once only; not from a callback.
 */
void kvk_server_drain(struct kvk_server *server);

/* Drains if that was not done. NULL is fine. */
void kvk_server_destroy(struct kvk_server *server);

struct kvk_server_stats {
    uint64_t calls;                /* handed to handlers, since start */
    uint64_t calls_refused;        /* over a limit */
    uint64_t calls_of_one_refused; /* of them, over owner_calls_max */
    uint64_t calls_unknown;        /* methods that are not there */
    uint64_t calls_cancelled;      /* by the client, its deadline or its loss */
    uint64_t connections;          /* accepted, since start */
    uint64_t connections_refused;
    uint64_t turns; /* of the look-up thread: at least one a second while it lives */
    uint32_t live_calls;
    uint32_t live_connections;
};

void kvk_server_stats(struct kvk_server *server, struct kvk_server_stats *stats);

/* The port that TCP address `index` is bound to (for ":0"). */
uint16_t kvk_server_tcp_port(struct kvk_server *server, uint32_t index);

/* Read the certificates again; new connections have them. On failure, which names the field, those
 * of before stay. KVK_OK without TLS. */
KVK_CHECKED enum kvk_status kvk_server_reload(struct kvk_server *server, struct kvk_error *error);

/* The number of the gRPC status code for a status. */
int kvk_status_rpc_code(enum kvk_status status);

/* ---- a call: what came in ---- */

/*
 * The request of a unary call or a server stream; in on_message the message at hand. One piece:
 * without a copy where it came in one slice. Valid until the call is ended or, for messages, until
 * the next is received.
 */
struct kvk_bytes kvk_call_message(struct kvk_call *call);

size_t kvk_call_message_size(struct kvk_call *call);

/* The same bytes as they came, piece by piece and never copied: for bulk that goes straight where
 * it belongs. False past the last piece. Do not mix with kvk_call_message() of one message. */
bool kvk_call_message_part(struct kvk_call *call, uint32_t index, struct kvk_bytes *part);

/* A value of the request's metadata (lower-case key), the first; false: not there. Valid until the
 * call is ended. */
bool kvk_call_metadata(struct kvk_call *call, const char *key, struct kvk_bytes *value);

/* The token of "authorization: Bearer TOKEN"; false: none, or longer than KVK_SERVER_TOKEN_MAX. */
bool kvk_call_bearer_token(struct kvk_call *call, struct kvk_bytes *token);

const struct kvk_peer *kvk_call_peer(struct kvk_call *call);

/* Where it came from, for people: "unix:uid=0,pid=17", "ipv4:10.0.0.1:4711". */
#define KVK_PEER_TEXT_SIZE 96
void kvk_call_peer_text(struct kvk_call *call, char text[KVK_PEER_TEXT_SIZE]);

/* The address of the other end over TCP or TLS: its size, 4 or 16; 0: not known. */
uint32_t kvk_call_peer_address(struct kvk_call *call, uint8_t address[16]);

/* The names in the client's certificate, where it showed one that is valid: alternative names, then
 * the common one. To be finished; they are valid until then. */
#define KVK_CERTIFICATE_NAMES_MAX 16
struct kvk_certificate_names {
    void *context;                                /* gRPC's */
    const char *names[KVK_CERTIFICATE_NAMES_MAX]; /* [count] */
    uint32_t count;
};
void kvk_call_certificate_names(struct kvk_call *call, struct kvk_certificate_names *names);
void kvk_certificate_names_finish(struct kvk_certificate_names *names);

/* CLOCK_MONOTONIC; UINT64_MAX: none. */
uint64_t kvk_call_deadline_ns(struct kvk_call *call);

/* The client is gone, has cancelled, or its deadline is over. Known at once only for streams and
 * calls with kvk_call_on_cancel(). */
bool kvk_call_is_cancelled(struct kvk_call *call);

/* What call_owner found out about the caller rides with the call; NULL: nothing. */
void kvk_call_set_caller(struct kvk_call *call, const void *caller);
const void *kvk_call_caller(struct kvk_call *call);

/*
 * Before the call is ended: the calls of its owner that wait are not to be served for so long (10
 * ms at most), where calls of others come in. For who asks again and again what cannot be had, and
 * costs others what reading it takes.
 */
void kvk_call_hold_owner(struct kvk_call *call, uint64_t hold_ns);

/* A pointer of the handler's that rides with the call; NULL at first. */
void kvk_call_set_context(struct kvk_call *call, void *context);
void *kvk_call_context(struct kvk_call *call);

/* ---- unary calls that take their time ---- */

/*
 * Be told, once, when the client gives up before the call is ended. Unary only, at most once per
 * call, inside on_call or a deferred run. `on_done`, may be NULL, comes last of all
 * callbacks and exactly once, after the call was ended: what the callbacks use may go then.
 */
void kvk_call_on_cancel(struct kvk_call *call, void (*on_cancel)(struct kvk_call *call),
                        void (*on_done)(void *context));

/* Unary only: go on with `run` on a bulk thread. The calling handler must not touch the call any
 * more. At most one at a time per call. */
void kvk_call_defer(struct kvk_call *call, void (*run)(struct kvk_call *call));

/* ---- what goes out ---- */

/*
 * The buffer of the next reply or message: `size_bytes` bytes in the very slice that gRPC sends,
 * to be filled before kvk_call_reply() or kvk_call_send(). Once per message.
 */
uint8_t *kvk_call_reply_alloc(struct kvk_call *call, size_t size_bytes);

/* Bytes that go out without a copy: `release(argument)` is called once, from any thread, when gRPC
 * needs them no more (also when the send failed or was refused). */
struct kvk_borrowed {
    const uint8_t *data;
    size_t size_bytes;
    void (*release)(void *argument);
    void *argument;
};

/* End a unary call or a client stream with the buffer of kvk_call_reply_alloc() (none: an empty
 * message) and OK. */
void kvk_call_reply(struct kvk_call *call);

/* As kvk_call_reply(), with `data` behind the buffer. */
void kvk_call_reply_borrowed(struct kvk_call *call, const struct kvk_borrowed *data);

/* End a call of any kind with a failure; error->status is not KVK_OK. What a stream has not sent
 * is dropped. */
void kvk_call_fail(struct kvk_call *call, const struct kvk_error *error);

/* ---- streams ---- */

struct kvk_stream_events {
    /*
     * A message came (client streams and bidi): kvk_call_message(). True: receive the next one when
     * this returns; false: only after kvk_call_receive(), and the message stays until then.
     */
    bool (*on_message)(struct kvk_call *call);

    /* The client sent its last message (client streams and bidi); not told after on_cancel. */
    void (*on_half_close)(struct kvk_call *call);

    /* Room in the send queue again: a message has gone to the transport. May be NULL. */
    void (*on_sent)(struct kvk_call *call);

    /* After kvk_call_wake(), once for any number of them. May be NULL. */
    void (*on_wake)(struct kvk_call *call);

    /* The client is gone before the call was ended; end it soon. Once, and none of the above after
     * it. Never NULL. */
    void (*on_cancel)(struct kvk_call *call);

    /* Last of all callbacks, exactly once, after the call was ended: what the callbacks use may go.
     * `context` is the call's. May be NULL. */
    void (*on_done)(void *context);
};

/*
 * Open a stream: in on_call, before anything is sent. `events` is borrowed until on_done. Receiving
 * starts when on_call returns.
 */
void kvk_call_stream(struct kvk_call *call, const struct kvk_stream_events *events, void *context);

/* Receive the next message, after an on_message that returned false. */
void kvk_call_receive(struct kvk_call *call);

/*
 * Queue the buffer of kvk_call_reply_alloc() (none: an empty message) as the stream's next message.
 * Server streams and bidi. KVK_EXHAUSTED: send_queue_max wait already (wait for on_sent).
 * KVK_CANCELLED: the client is gone. The buffer is dropped in both cases.
 */
KVK_CHECKED enum kvk_status kvk_call_send(struct kvk_call *call);

/* As kvk_call_send(), with `data` behind the buffer; released also where this fails. */
KVK_CHECKED enum kvk_status kvk_call_send_borrowed(struct kvk_call *call,
                                                   const struct kvk_borrowed *data);

/*
 * Have on_wake run on a bulk thread, in turn with the call's other callbacks: how another thread
 * hands something to a stream without ending in its callbacks itself. BULK methods only. No gRPC
 * call is made here, so locks may be held.
 */
void kvk_call_wake(struct kvk_call *call);

/* Messages that wait to be sent, the one under way too. */
uint32_t kvk_call_sends_pending(struct kvk_call *call);

/* End a server stream or bidi with OK, after what is queued. */
void kvk_call_finish(struct kvk_call *call);

#endif
