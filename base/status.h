/*
 * How a call of kvkeep fails: a status, the cause behind it, and one sentence for people.
 *
 * A status is for what the world does to us; our own bugs abort (base/assert.h). The status maps
 * one to one to a gRPC code, the cause travels as a typed detail beside it, so that a worker can
 * act on a refusal without reading the sentence.
 */
#ifndef KVK_BASE_STATUS_H
#define KVK_BASE_STATUS_H

#include <stdint.h>

#define KVK_CHECKED __attribute__((warn_unused_result))
#define KVK_PRINTF(text, first) __attribute__((format(printf, text, first)))

enum kvk_status {
    KVK_OK = 0,
    KVK_CANCELLED,
    KVK_INVALID,         /* an argument that can never be right */
    KVK_DEADLINE,        /* the caller's time was over first */
    KVK_NOT_FOUND,       /* no such space, sequence, lease, block */
    KVK_EXISTS,          /* it is there already, with another content */
    KVK_PERMISSION,      /* the credential may not do this */
    KVK_EXHAUSTED,       /* a pool, queue or limit is full; see retry_after_ms */
    KVK_PRECONDITION,    /* right call, wrong state of the thing it names */
    KVK_ABORTED,         /* the owner ended while the call ran */
    KVK_OUT_OF_RANGE,    /* past the end of a sequence, block or mapping */
    KVK_UNSUPPORTED,     /* known, but not offered by this build or device */
    KVK_INTERNAL,        /* ours; the log says more */
    KVK_UNAVAILABLE,     /* draining, or a tier is away; try again */
    KVK_DATA_LOSS,       /* a checksum did not match */
    KVK_UNAUTHENTICATED, /* no credential, or one that is not known */
    KVK_WOULD_BLOCK,     /* internal: nothing changed; call again where blocking is allowed */
};

/* Why, typed. Values travel in KvkeepError of the API: never renumber, only add. */
enum kvk_cause {
    KVK_CAUSE_NONE = 0,
    KVK_CAUSE_FIELD = 1,              /* the named field is malformed or past its limit */
    KVK_CAUSE_POOL_ACTIVE = 2,        /* active sequences fill the pool */
    KVK_CAUSE_POOL_LEASED = 3,        /* leases hold what could be evicted */
    KVK_CAUSE_TENANT_LIMIT = 4,       /* over a limit of the tenant */
    KVK_CAUSE_GROWTH_RESERVED = 5,    /* the room is kept for growth of running sequences */
    KVK_CAUSE_SLABS_SCATTERED = 6,    /* free bytes enough, but in no slab of this geometry */
    KVK_CAUSE_COPIES_IN_FLIGHT = 7,   /* the room is being copied from or to; comes soon */
    KVK_CAUSE_QUARANTINE = 8,         /* a live process may still write to the room */
    KVK_CAUSE_TOO_LARGE = 9,          /* larger than the whole pool: never retry */
    KVK_CAUSE_QUEUE_FULL = 10,        /* a bounded queue is full */
    KVK_CAUSE_LENGTH_MISMATCH = 11,   /* the expected length is not the sequence's */
    KVK_CAUSE_SWAPPED_OUT = 12,       /* the sequence is swapped out */
    KVK_CAUSE_GRANT_UNWRITTEN = 13,   /* a granted range is not sealed yet */
    KVK_CAUSE_WINDOW_GONE = 14,       /* the window has let go of what this would need */
    KVK_CAUSE_LEASE_EXPIRED = 15,     /* the lease's time is over */
    KVK_CAUSE_SESSION_ENDED = 16,     /* the session or instance that owned it has ended */
    KVK_CAUSE_NOT_OWNER = 17,         /* another instance or tenant owns it */
    KVK_CAUSE_IDENTITY_MISMATCH = 18, /* the space exists with another geometry */
    KVK_CAUSE_CHECKSUM = 19,          /* the bytes are not those that were sealed */
    KVK_CAUSE_INVALIDATED = 20,       /* an invalidation took it away */
    KVK_CAUSE_DRAINING = 21,          /* the daemon is shutting down */
    KVK_CAUSE_NOT_MAPPED = 22,        /* memory that this call needs is not mapped here */
    KVK_CAUSE_LIMIT = 23,             /* a count of the configuration is reached */
    KVK_CAUSE_BUSY = 24,              /* another call works on the same sequence */
    KVK_CAUSE_GUARANTEED = 25,        /* the room is guaranteed to other tenants */
    KVK_CAUSE_SWITCHED_OFF = 26,      /* the tenant or space is, by an operator */
};

#define KVK_ERROR_FIELD_SIZE 64
#define KVK_ERROR_TEXT_SIZE 256

/* What a caller that was refused room could do itself. Numbers are the API's. */
enum kvk_advice_kind {
    KVK_ADVISE_NOTHING = 0,
    KVK_ADVISE_SWAP_OUT = 1, /* these of its own sequences to the host tier */
    KVK_ADVISE_CLOSE = 2,    /* these: there is no tier below, or no room there */
};

#define KVK_ADVICE_MAX 16

struct kvk_advice {
    enum kvk_advice_kind kind;
    uint32_t count; /* of those named here */
    uint32_t total; /* that it takes; more than `count`: the others are not named */
    uint64_t missing_bytes;
    uint64_t bytes;   /* that all of them together make free */
    uint64_t cost_ns; /* estimate of out and in again, or of computing again; 0: not known */
    uint64_t sequence_ids[KVK_ADVICE_MAX];   /* [count] */
    uint64_t sequence_bytes[KVK_ADVICE_MAX]; /* [count] */
};

/* One failure, told once. The caller owns it; every function here accepts NULL. */
struct kvk_error {
    enum kvk_status status;
    enum kvk_cause cause;
    uint64_t value;                   /* what was asked or found, where a number says it */
    uint64_t limit;                   /* the limit that it met; 0: none */
    uint64_t retry_after_ms;          /* 0: trying again will not help, or at once */
    char field[KVK_ERROR_FIELD_SIZE]; /* the request's or configuration's field, "" if none */
    char text[KVK_ERROR_TEXT_SIZE];   /* one sentence, no tokens, no tenant's data */
    struct kvk_advice advice;         /* how the caller could make the room */
};

/*
 * Fill `error` (may be NULL) and return `status`, so that a failure is one line:
 *     return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "block_tokens", "must be 1 to %u", max);
 * The field is copied and cut to fit; value, limit and retry_after_ms are set to 0.
 */
enum kvk_status kvk_fail(struct kvk_error *error, enum kvk_status status, enum kvk_cause cause,
                         const char *field, const char *format, ...) KVK_PRINTF(5, 6);

/* As kvk_fail(), with the numbers: `value` met `limit`. */
enum kvk_status kvk_fail_limit(struct kvk_error *error, enum kvk_status status,
                               enum kvk_cause cause, const char *field, uint64_t value,
                               uint64_t limit, const char *format, ...) KVK_PRINTF(7, 8);

/* Set the hint on a failure made just before. */
void kvk_error_retry(struct kvk_error *error, uint64_t retry_after_ms);

const char *kvk_status_name(enum kvk_status status); /* "INVALID", never NULL */
const char *kvk_cause_name(enum kvk_cause cause);    /* "pool_active", never NULL */

#endif
