/*
 * The remote store: blocks shared by many daemons through Redis or Valkey, as a cluster or as one
 * server.
 *
 * Nothing here ever makes a caller wait. A batch of blocks is submitted; whole, it comes back to
 * its callback, at its deadline at the latest. Threads of this file's own do all I/O: each has its
 * own view of the cluster and its own pipelined connections to every master. A store that is slow,
 * full, resharding, cut off or dead makes misses, each counted by its kind: a node that does not
 * answer is left alone after a few failures (its breaker) and tried again by itself, and what would
 * have gone there is a miss at once. What is right about a value is remote_value.h's business.
 *
 * Memory is bounded: batches and their bytes by the options, requests by a pool made at the start,
 * buffers by one value and a few megabytes for each connection.
 *
 * Locking: thread safe. No call blocks but open and close. A callback runs on one of the threads
 * with no lock held; it must not block, and may submit, also the same batch again.
 */
#ifndef KVK_HOSTTIER_REMOTE_H
#define KVK_HOSTTIER_REMOTE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "hosttier/remote_value.h"

struct kvk_remote;
struct kvk_remote_batch;

/* 0 means the default in brackets. Texts are copied. */
struct kvk_remote_options {
    const char *seeds;           /* "host:port,[address]:port": any nodes of the cluster */
    const char *user;            /* of the ACL; "" or NULL: the default user */
    const char *password;        /* "" or NULL: no AUTH */
    const char *key_prefix;      /* of every name, 1 to KVK_REMOTE_PREFIX_MAX of [a-zA-Z0-9:._-]
                                    [kvkeep:]; an ACL user needs no more than ~PREFIX* */
    bool tls;                    /* to all nodes; verified, TLS 1.2 or later */
    const char *tls_ca_file;     /* PEM; "" or NULL: the system's */
    const char *tls_name;        /* that certificates must carry; "" or NULL: the node's address */
    const char *tls_certificate; /* PEM, of this client; "" or NULL: none */
    const char *tls_key;         /* PEM */
    uint32_t thread_count;       /* [1], at most KVK_REMOTE_THREADS_MAX */
    uint32_t connection_count;   /* to each master, by each thread [2], at most 16 */
    uint32_t pipeline_depth;     /* requests under way on a connection [32], at most 1,024 */
    uint32_t batch_count_max;    /* submitted and not done [1,024] */
    uint32_t request_count_max;  /* of a thread, sent or waiting for their node [4,096] */
    uint64_t bytes_max;          /* of fetches and stores not done [1 GiB] */
    uint64_t node_timeout_ms;    /* without a byte of an answer: the connection is dead [1,000] */
    uint32_t breaker_failures;   /* in a row that open a node's breaker [2] */
    uint64_t breaker_retry_ms;   /* first pause before a node is tried again; doubles [100] */
    uint64_t breaker_retry_max_ms; /* [2,000] */
    uint64_t refresh_ms;           /* between looks at the cluster when all is well [5,000] */
    uint64_t ttl_ms;               /* of what is stored; 0: until the store evicts it */
};

#define KVK_REMOTE_THREADS_MAX 8U
#define KVK_REMOTE_BLOCKS_MAX 65536U /* of a batch */

/* KVK_OK as soon as the options are right: whether the store is there is seen in its health. */
KVK_CHECKED enum kvk_status kvk_remote_open(const struct kvk_remote_options *options,
                                            struct kvk_remote **remote, struct kvk_error *error);

/* Ends all batches as KVK_REMOTE_CANCELLED, each with its callback, before it returns. Nobody else
 * may submit any more. NULL is fine. It may wait for the system's resolver of host names. */
void kvk_remote_close(struct kvk_remote *remote);

/* ---- Batches ---- */

enum kvk_remote_operation {
    /* Is it there? Looks at the header alone, so that what is old or of another shape is a miss
     * already here; and counts as a use to the store's eviction: so ancestors are touched. */
    KVK_REMOTE_EXISTS = 0,
    KVK_REMOTE_FETCH,
    KVK_REMOTE_STORE,
    KVK_REMOTE_DROP, /* HIT: it is not there any more, whether it was or not */
    /* Journals: plain bytes under a block's name that are only added to, so that no two writers can
     * undo each other. Nothing is sealed or checked here: that is their users' business, and an
     * entry may stand there twice where a connection broke. A space of one part, a block of one
     * piece. */
    KVK_REMOTE_APPEND, /* HIT: the piece stands at the journal's end; `length` is of all of it */
    KVK_REMOTE_TAIL,   /* HIT: the piece holds the journal's last bytes, at its end, and zeros
                          before them where there are fewer; `length` of them */
    KVK_REMOTE_OPERATION_COUNT,
};

/* The caller's, all of it, until the batch is done. */
struct kvk_remote_block {
    struct kvk_remote_id id;
    const struct kvk_remote_piece *pieces; /* of FETCH and STORE; together block_bytes. What was
                                              fetched is bytes only if the result is HIT; else the
                                              memory holds anything. A STORE only reads it, until
                                              the batch is done: what changes under way is stored
                                              as a value that nobody believes. */
    uint32_t piece_count;
    enum kvk_remote_result result; /* out */
    uint32_t part_left;            /* not the caller's */
    uint64_t length;               /* out, of APPEND and TAIL that are HIT */
};

struct kvk_remote_batch {
    enum kvk_remote_operation operation;
    const struct kvk_remote_space *space; /* borrowed until it is done */
    struct kvk_remote_block *blocks;      /* [block_count] */
    uint32_t block_count;                 /* 1 to KVK_REMOTE_BLOCKS_MAX */
    bool chain;           /* blocks are a chain, ancestors first: what lies behind the first gap is
                             not asked for where that is known in time (KVK_REMOTE_SKIPPED) */
    uint64_t ttl_ms;      /* of a STORE: instead of the options' ttl_ms; 0: that */
    uint64_t deadline_ns; /* of the monotonic clock; it is done at the latest a few ms after */
    void (*done)(void *context, struct kvk_remote_batch *batch);
    void *context;

    /* Out, when it is done. */
    uint32_t run_count; /* blocks from the first on that are HIT: the longest run */
    uint32_t hit_count;
    uint64_t elapsed_ns; /* from its submission */

    /* Not the caller's. */
    struct kvk_remote_batch *next;
    struct kvk_remote_batch *previous;
    struct kvk_remote_want want; /* of the next request, made already */
    uint64_t begun_ns;
    uint64_t bytes;
    uint32_t next_block, next_part;
    uint32_t gap; /* the first block that is known to be no hit */
    uint64_t request_left;
    bool want_made;
};

/*
 * Submit. KVK_OK: `done` will be called once, and the batch belongs to the store until then. Else
 * it will not be called: KVK_EXHAUSTED (batches or bytes are at their limit; the error names it),
 * KVK_UNAVAILABLE (no node of the store is in reach: not worth a try). No allocation, no system
 * call but a write to an eventfd.
 */
KVK_CHECKED enum kvk_status kvk_remote_submit(struct kvk_remote *remote,
                                              struct kvk_remote_batch *batch,
                                              struct kvk_error *error);

/* ---- How it feels ---- */

enum kvk_remote_state {
    KVK_REMOTE_AWAY = 0, /* no node in reach, or nobody knows the slots */
    KVK_REMOTE_PARTLY,   /* some masters are away, or some slots have none */
    KVK_REMOTE_GOOD,
};

struct kvk_remote_counters {
    uint64_t blocks[KVK_REMOTE_OPERATION_COUNT][KVK_REMOTE_RESULT_COUNT]; /* done, by result */
    uint64_t bytes[KVK_REMOTE_OPERATION_COUNT]; /* of blocks that were HIT, of FETCH and STORE */
    uint64_t batches;                           /* done */
    uint64_t refused;                           /* not taken: limits, or the store is away */
    uint64_t requests;                          /* sent: parts of blocks, again where repeated */
    uint64_t repeated;      /* requests that were sent again, for any reason below or a lost node */
    uint64_t moved, asked;  /* redirects of a cluster */
    uint64_t try_agains;    /* TRYAGAIN, READONLY */
    uint64_t cluster_downs; /* CLUSTERDOWN, MASTERDOWN, LOADING */
    uint64_t late_answers;  /* that came after their batch's deadline */
    uint64_t connects, connect_failures;
    uint64_t lost_connections; /* that had been good */
    uint64_t stalls;           /* of those: no answer within node_timeout_ms */
    uint64_t protocol_errors;
    uint64_t breaker_openings;
    uint64_t refreshes; /* of the map of slots */
};

struct kvk_remote_health {
    enum kvk_remote_state state; /* the worst of the threads */
    bool cluster;                /* else one server */
    uint32_t node_count;         /* masters known */
    uint32_t node_away_count;    /* of those, breaker open or not connected */
    uint32_t slot_away_count;    /* of 16,384, without a master in reach */
    char reason[160];            /* of the last failure, "" if never; no secrets */
    uint64_t batches_now, bytes_now;
    uint64_t fetch_rate, store_rate; /* bytes/s of whole batches, moving averages; 0: not known */
    uint64_t round_trip_ns;          /* of a small answer, moving average; 0: not known */
    struct kvk_remote_counters counters;
};

void kvk_remote_health(struct kvk_remote *remote, struct kvk_remote_health *health);

#endif
