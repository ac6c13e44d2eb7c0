/*
 * The remote store's inside: lanes, nodes, connections, requests. A lane is one thread with its own
 * nodes and connections; nothing but submissions, the resolver and counters crosses between
 * threads, so that all else needs no lock.
 *
 * A request is a part of a block on its way: in a node's queue, on a connection (sent, its answer
 * awaited in order), or waiting to be repeated. A batch that is done takes its requests out of
 * queues; those that were sent stay as orphans (batch NULL) until their answer or the connection's
 * end, and touch nobody's memory.
 */
#ifndef KVK_HOSTTIER_REMOTE_INTERNAL_H
#define KVK_HOSTTIER_REMOTE_INTERNAL_H

#include <netinet/in.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <hiredis/read.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "base/clock.h"
#include "base/lock.h"
#include "hosttier/remote.h"

#define KVK_REMOTE_SLOT_COUNT 16384U
#define KVK_REMOTE_NODE_NONE UINT16_MAX
#define KVK_REMOTE_NODES_MAX 1024U /* that a lane knows at a time */
#define KVK_REMOTE_CONNECTIONS_MAX 16U
#define KVK_REMOTE_SEEDS_MAX 64U
#define KVK_REMOTE_HOST_SIZE 256
#define KVK_REMOTE_REDIRECTS_MAX 5U
#define KVK_REMOTE_REPEATS_MAX 5U
#define KVK_REMOTE_REPEAT_PAUSE_NS (20 * KVK_NS_PER_MS)
/* Bytes waiting to be written: so many are written at once, and until then no new requests. Less at
 * a time costs the system more for each byte than the cache saves us. */
#define KVK_REMOTE_OUTPUT_ENOUGH (2U << 20)
#define KVK_REMOTE_READ_SIZE (256U << 10)
#define KVK_REMOTE_COMMAND_SIZE 256 /* of a command without its value */

/* ---- Pure: slots, addresses, redirects (remote_slots.c) ---- */

struct kvk_remote_address {
    char host[KVK_REMOTE_HOST_SIZE];
    uint16_t port;
};

/* CRC16 of the name, or of what stands in its first {…}, modulo the slots. */
uint16_t kvk_remote_slot(const char *name, size_t size);

/* "host:port", "[v6]:port", and as nodes write it "v6:port"; an empty host is `self`'s. */
KVK_CHECKED bool kvk_remote_address_read(const char *text, size_t size, const char *self,
                                         struct kvk_remote_address *address);

/* "MOVED 3999 127.0.0.1:6381", "ASK …": false where it is neither. */
KVK_CHECKED bool kvk_remote_redirect_read(const char *text, size_t size, const char *self,
                                          bool *ask, uint16_t *slot,
                                          struct kvk_remote_address *address);

/* ---- Replies (remote_reply.c) ---- */

#define KVK_REMOTE_REPLY_TEXT_MAX 1024U /* of a text that is no value */
#define KVK_REMOTE_REPLY_ELEMENTS_MAX 20000U
/* Of one answer: the slots of the largest cluster that could be, each with four replicas. */
#define KVK_REMOTE_REPLY_BYTES_MAX (64U << 20)
#define KVK_REMOTE_REPLY_ALLOCATION 16U /* what the allocator adds */

struct kvk_remote_reply {
    int type; /* REDIS_REPLY_… */
    long long integer;
    struct kvk_remote_reply **elements; /* [element_count] */
    size_t element_count;
    size_t size;
    char text[]; /* [size], then a NUL */
};

extern redisReplyObjectFunctions kvk_remote_reply_functions;
extern struct kvk_remote_reply kvk_remote_reply_value; /* stands for one that was seen already */
void kvk_remote_reply_free(void *reply);

/* ---- Requests ---- */

enum kvk_remote_request_kind {
    KVK_REMOTE_REQUEST_BLOCK = 0,
    KVK_REMOTE_REQUEST_AUTH,
    KVK_REMOTE_REQUEST_PING,
    KVK_REMOTE_REQUEST_MAP,
};

struct kvk_remote_request {
    struct kvk_remote_request *next;
    struct kvk_remote_batch *batch; /* NULL: nobody waits for it any more, or it is no block's */
    struct kvk_remote_want want;
    char name[KVK_REMOTE_NAME_SIZE];
    uint8_t name_size;
    uint8_t kind;
    uint8_t redirect_count;
    uint8_t repeat_count;
    bool asking;  /* ASKING goes ahead of it, and is answered first */
    bool value;   /* its answer is a whole value, if it is there: remote_input.c takes it */
    bool decoded; /* its value was seen, and is `result` */
    enum kvk_remote_result result;
    uint32_t block;
    uint16_t slot;
    uint64_t sent_ns;
    uint64_t not_before_ns;
};

struct kvk_remote_list {
    struct kvk_remote_request *first, *last;
    uint32_t count;
};

static inline struct kvk_remote_list kvk_remote_list_take(struct kvk_remote_list *list)
{
    struct kvk_remote_list taken = *list;
    *list = (struct kvk_remote_list){0};
    return taken;
}

void kvk_remote_list_push(struct kvk_remote_list *list, struct kvk_remote_request *request);
struct kvk_remote_request *kvk_remote_list_pop(struct kvk_remote_list *list); /* NULL: empty */

/* ---- Connections (remote_connection.c) ---- */

enum kvk_remote_connection_state {
    KVK_REMOTE_CLOSED = 0,
    KVK_REMOTE_CONNECTING,
    KVK_REMOTE_HANDSHAKE, /* of TLS */
    KVK_REMOTE_GREETING,  /* AUTH and PING are under way */
    KVK_REMOTE_READY,
};

struct kvk_remote_lane;
struct kvk_remote_node;

/* Bytes that are sent from where they lie. */
struct kvk_remote_lent {
    const struct kvk_remote_request *request; /* NULL: a copy is sent, `copy` */
    const uint8_t *memory;                    /* [size], the batch's */
    uint8_t *copy;
    size_t size;
    size_t at; /* goes before this byte of the buffer */
};

#define KVK_REMOTE_LENT_MAX 64U

struct kvk_remote_output {
    uint8_t *bytes; /* [capacity]; written up to `done`, filled up to `size` */
    size_t size, done, capacity;
    struct kvk_remote_lent lent[KVK_REMOTE_LENT_MAX]; /* a ring */
    uint32_t lent_first, lent_count;
    size_t lent_bytes;
};

struct kvk_remote_connection {
    struct kvk_remote_node *node;
    enum kvk_remote_connection_state state;
    int fd;
    SSL *tls;
    redisReader *reader;
    struct kvk_remote_list sent; /* in the order of their answers */
    struct kvk_remote_output output;
    struct kvk_remote_crypt *crypt;     /* of the value that arrives */
    struct kvk_remote_arrival *arrival; /* one at a time */
    size_t reply_bytes;                 /* memory of the answer that is being read */
    bool mid_reply, in_value;           /* where it is in its answers (remote_input.c) */
    uint8_t value_end;                  /* of the two bytes behind a value */
    uint8_t line_size;
    char line[16];        /* [line_size], of one that may begin a value */
    uint64_t progress_ns; /* when it last got on */
    uint64_t retry_ns;    /* CLOSED: not before */
    bool wants_write;     /* as epoll knows it */
    bool unread;          /* bytes may be left in the TLS layer */
    bool doomed;          /* nothing is written any more: the next tick closes it */
    bool full;            /* its pipeline was, and is more than half so: requests go in groups */
};

void kvk_remote_connection_open(struct kvk_remote_connection *connection); /* begins to */
/* Its requests are repeated or end; the node hears of it where `failed`. */
void kvk_remote_connection_close(struct kvk_remote_connection *connection, bool failed,
                                 const char *reason);
void kvk_remote_connection_event(struct kvk_remote_connection *connection, uint32_t events);
void kvk_remote_connection_watch(struct kvk_remote_connection *connection, int how, bool write);

/* In (remote_input.c): read what is there, and take it. */
void kvk_remote_connection_read(struct kvk_remote_connection *connection);

/* Out (remote_output.c). */
void kvk_remote_connection_flush(struct kvk_remote_connection *connection);
/* Are so many bytes waiting, and not for the socket? */
bool kvk_remote_output_waits(const struct kvk_remote_connection *connection, size_t size_min);
/* The payloads of this request, or of all whose batch has ended (NULL), may go away now: what is
 * not written of them is copied. Without memory for that the connection is doomed. */
void kvk_remote_connection_keep(struct kvk_remote_connection *connection,
                                const struct kvk_remote_request *request);
void kvk_remote_output_clear(struct kvk_remote_connection *connection);
void kvk_remote_output_free(struct kvk_remote_connection *connection);
bool kvk_remote_connection_takes(const struct kvk_remote_connection *connection);
/* Put a request of ours (AUTH, PING, MAP) or a block's on the wire; false: no memory. */
bool kvk_remote_connection_send(struct kvk_remote_connection *connection,
                                struct kvk_remote_request *request);
/* One of the kinds that are no block's. */
bool kvk_remote_connection_ask(struct kvk_remote_connection *connection, uint8_t kind);

/* No bytes of blocks go with it: it goes before those that have some. */
static inline bool kvk_remote_is_small(enum kvk_remote_operation operation)
{
    return operation != KVK_REMOTE_FETCH && operation != KVK_REMOTE_STORE;
}

/* ---- Nodes (remote_node.c) ---- */

struct kvk_remote_node {
    struct kvk_remote_lane *lane;
    struct kvk_remote_address address;
    struct sockaddr_storage socket_address;
    socklen_t socket_address_size; /* 0: not resolved yet */
    bool resolving;                /* remote->resolver.lock: it is the resolver's */
    bool resolve_failed;           /* likewise */
    uint32_t address_turn;         /* which of a name's addresses is taken, modulo their number */
    bool seed, in_map;
    bool open;                     /* the breaker: nothing is sent but a greeting now and then */
    uint32_t failures;             /* in a row */
    uint64_t retry_ns;             /* open: when the next greeting may be tried */
    uint64_t pause_ms;             /* open: until the one after */
    uint64_t asked_ns;             /* when it was last the target of an ASK */
    struct kvk_remote_list urgent; /* small ones: they go before the queue */
    struct kvk_remote_list queue;
    struct kvk_remote_connection connections[KVK_REMOTE_CONNECTIONS_MAX];
};

struct kvk_remote_node *kvk_remote_node_find(struct kvk_remote_lane *lane,
                                             const struct kvk_remote_address *address);
void kvk_remote_node_failed(struct kvk_remote_node *node, const char *reason);
/* Give up what waits for it: repeated elsewhere, or UNAVAILABLE. */
void kvk_remote_node_empty(struct kvk_remote_node *node, bool repeat);
void kvk_remote_node_push(struct kvk_remote_node *node, struct kvk_remote_request *request);
void kvk_remote_node_well(struct kvk_remote_node *node); /* a connection is READY */
bool kvk_remote_node_ready(const struct kvk_remote_node *node);
void kvk_remote_node_pump(struct kvk_remote_node *node); /* queue to connections, and flush */
void kvk_remote_nodes_tick(struct kvk_remote_lane *lane, uint64_t now);
void kvk_remote_map_learn(struct kvk_remote_lane *lane, struct kvk_remote_node *from,
                          const struct kvk_remote_reply *reply);
void kvk_remote_map_request(struct kvk_remote_lane *lane, uint64_t now);

/* ---- Lanes (remote_lane.c) ---- */

struct kvk_remote_lane {
    struct kvk_remote *remote;
    uint32_t index;
    pthread_t thread;
    bool started;
    int epoll_fd;
    int wake_fd;
    struct kvk_remote_crypt *crypt;

    struct kvk_lock lock; /* over these */
    struct kvk_remote_batch *submitted_first, *submitted_last;
    bool stopping;

    /* The thread's own from here on. */
    struct kvk_remote_batch *active_first, *active_last;
    uint64_t deadline_ns;                /* the earliest of the active; UINT64_MAX: none */
    struct kvk_remote_request *requests; /* [request_count_max] */
    struct kvk_remote_list idle;
    struct kvk_remote_list repeats; /* waiting for their time */
    struct kvk_remote_node *nodes[KVK_REMOTE_NODES_MAX];
    uint32_t node_count;
    uint16_t slot_node[KVK_REMOTE_SLOT_COUNT];
    bool map_known, map_asked, map_wanted, single;
    uint64_t map_ns; /* when it was last asked for */
    uint32_t map_turn;
    uint8_t *input;   /* [KVK_REMOTE_READ_SIZE] */
    uint64_t tick_ns; /* when connections were last looked at */
    uint64_t seen_ns;
    bool trouble;    /* some master is away: the cluster is looked at more often */
    uint64_t now_ns; /* of this round */
};

KVK_CHECKED enum kvk_status kvk_remote_lane_start(struct kvk_remote_lane *lane,
                                                  struct kvk_error *error);
void kvk_remote_lane_stop(struct kvk_remote_lane *lane); /* waits; all batches are done */
void kvk_remote_lane_wake(struct kvk_remote_lane *lane);

/* A request's answer, or its end without one. Gives the request back. */
void kvk_remote_request_done(struct kvk_remote_lane *lane, struct kvk_remote_request *request,
                             enum kvk_remote_result result);
void kvk_remote_request_answered(struct kvk_remote_connection *connection,
                                 struct kvk_remote_request *request,
                                 const struct kvk_remote_reply *reply);
/* Once more, after a pause; or UNAVAILABLE where that was often enough. */
void kvk_remote_request_repeat(struct kvk_remote_lane *lane, struct kvk_remote_request *request,
                               uint64_t pause_ns);
/* Back to the pool, nothing said to anybody. */
void kvk_remote_request_give(struct kvk_remote_lane *lane, struct kvk_remote_request *request);

/* ---- The whole ---- */

struct kvk_remote_resolver {
    struct kvk_lock lock;
    pthread_cond_t work;
    pthread_t thread;
    bool started, stopping;
    struct kvk_remote_node *queue[KVK_REMOTE_SEEDS_MAX]; /* more than fit try again later */
    uint32_t count;
};

/* Counters are written by all lanes: the public struct's layout, each number atomic. */
#define KVK_REMOTE_COUNTER_COUNT (sizeof(struct kvk_remote_counters) / sizeof(uint64_t))

struct kvk_remote {
    struct kvk_remote_options options; /* no 0 where a default stands; texts are ours */
    char *texts[9];
    SSL_CTX *tls;
    struct kvk_remote_address seeds[KVK_REMOTE_SEEDS_MAX];
    uint32_t seed_count;
    struct kvk_remote_resolver resolver;
    _Atomic uint64_t counters[KVK_REMOTE_COUNTER_COUNT];
    _Atomic uint64_t batches_now, bytes_now;
    _Atomic uint64_t rate[KVK_REMOTE_OPERATION_COUNT];
    _Atomic uint64_t round_trip_ns;
    _Atomic uint32_t next_lane;
    struct kvk_lock reason_lock;
    char reason[160];
    /* What a lane last saw of its nodes: state, masters, away, slots away, cluster. */
    struct {
        _Atomic uint32_t state, node_count, node_away_count, slot_away_count, cluster;
    } seen[KVK_REMOTE_THREADS_MAX];
    struct kvk_remote_lane lanes[KVK_REMOTE_THREADS_MAX];
};

#define KVK_REMOTE_COUNT(remote, field, amount)                                                    \
    ((void)atomic_fetch_add_explicit(                                                              \
        &(remote)->counters[offsetof(struct kvk_remote_counters, field) / sizeof(uint64_t)],       \
        (amount), memory_order_relaxed))

void kvk_remote_say(struct kvk_remote *remote, const char *format, ...) KVK_PRINTF(2, 3);
/* Have a node's name resolved; its lane is woken. */
void kvk_remote_resolve(struct kvk_remote *remote, struct kvk_remote_node *node);

/* TLS (remote_tls.c). */
/* What came of a call: 1 goes on, 0 waits, -1 is over. `want_write`: what it waits for. */
int kvk_remote_tls_outcome(SSL *tls, int result, bool *want_write);
KVK_CHECKED enum kvk_status kvk_remote_tls_create(const struct kvk_remote_options *options,
                                                  SSL_CTX **context, struct kvk_error *error);
SSL *kvk_remote_tls_connect(struct kvk_remote *remote, const struct kvk_remote_address *address,
                            int fd); /* NULL: no memory */

#endif
