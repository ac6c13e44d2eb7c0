/*
 * The engine: tiers, spaces, sequences, leases and sessions under one lock. This header is what
 * the calls above it share; each subject has a header of its own beside it: space, lookup, lease,
 * sequence, session, attention, report.
 *
 * Calls that may have to wait: every operation takes a caller. With may_block false an operation
 * that would need I/O or a copy returns KVK_WOULD_BLOCK and has changed nothing; it is then called
 * again from a bulk thread with may_block true. So look-ups are answered on one thread without ever
 * waiting, and all else is plain straight code.
 *
 * Locking: one lock, kvk_cache.lock. No lock is held across I/O, a device call, gRPC or a callback.
 */
#ifndef KVK_DAEMON_CACHE_H
#define KVK_DAEMON_CACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/clock.h"
#include "base/geometry.h"
#include "base/status.h"
#include "daemon/config.h"
#include "daemon/tenant.h"
#include "gpu/device.h"
#include "index/index.h"

struct kvk_cache;
struct kvk_catalogue;
struct kvk_disk;
struct kvk_keeper;
struct kvk_priority_hint;

/* Who asks, and how long the answer may take. The caller's memory, for the time of the call. */
struct kvk_caller {
    const struct kvk_credential *credential;
    const char *call; /* "OpenSequence": for the journal of refusals; NULL: a try, not noted */
    bool may_block;
    uint64_t deadline_ns;             /* CLOCK_MONOTONIC; UINT64_MAX: none */
    bool (*cancelled)(void *context); /* may be NULL */
    void *cancelled_context;
};

struct kvk_cache_options {
    const struct kvk_config *config; /* borrowed for the cache's life */
    struct kvk_tenants *tenants;     /* borrowed */
    struct kvk_clock *clock;         /* borrowed; NULL: monotonic */
    /* Devices are the cache's from here, also where creating fails. host_device makes the host
     * tier's regions and attends host blocks. Either may be NULL where its tier is 0. */
    struct kvk_device *device;
    struct kvk_device *host_device;
    /* What outlives the daemon; borrowed for the cache's life. NULL: there is none. */
    struct kvk_catalogue *catalogue;
    struct kvk_disk *disk;
    struct kvk_keeper *keeper;
    bool threads; /* run mover and maintenance threads; false: the owner steps (simulation) */
};

KVK_CHECKED enum kvk_status kvk_cache_create(const struct kvk_cache_options *options,
                                             struct kvk_cache **cache, struct kvk_error *error);
/* Nothing runs in the background any more: no bytes move, nothing is evicted. Once, or again by
 * kvk_cache_destroy(). */
void kvk_cache_quiesce(struct kvk_cache *cache);
/* Ends all instances first. No call may be under way. */
void kvk_cache_destroy(struct kvk_cache *cache);

/* One round of what runs in the background: expiry, demotion ahead of need, purging, strays, slabs
 * to back and to punch. Bounded work. The maintenance thread calls it; so does the simulation. */
void kvk_cache_maintain(struct kvk_cache *cache);

/* ---- Block tables in answers ---- */

#define KVK_TABLE_SLOT_NONE UINT32_MAX

/* Blocks first_block… of one group. The arrays lie in kvk_tables.memory. */
struct kvk_table_part {
    uint32_t group;
    uint64_t first_block;
    uint32_t count;
    uint32_t *slots;       /* [count] slot in its tier; KVK_TABLE_SLOT_NONE: no bytes */
    uint8_t *tiers;        /* [count] 0: none, 1: device, 2: host (as enum Tier of the API) */
    uint32_t *generations; /* [count] of the slot */
    uint64_t *spaces;      /* [count] whose slot: 0: of the space asked for; else a public one */
    bool any_public;
};

/* A reusable buffer for tables: zeroed by the caller, grown by the engine (before it takes the
 * lock), ended by finish. */
struct kvk_tables {
    struct kvk_table_part parts[KVK_GROUP_COUNT_MAX];
    uint32_t part_count;
    uint8_t *memory;
    size_t memory_size;
};

void kvk_tables_finish(struct kvk_tables *tables);

/* What a request says about a prompt; borrowed. Checked at the edge: token_count within the limit,
 * spans sorted and inside, digests' sizes right. */
struct kvk_prompt {
    const uint32_t *tokens;
    uint64_t token_count;
    const uint8_t *salt;
    size_t salt_size;
    const struct kvk_content_span *spans;
    uint32_t span_count;
    const struct kvk_priority_hint *hints; /* hint.h; of Touch and OpenSequence alone */
    uint32_t hint_count;
    bool use_public;   /* public blocks are found too: the caller reads where tables say they are */
    bool whole_blocks; /* no hit within a block, though the space allows it */
};

/* ---- Test hooks: KVK_UNSUPPORTED without config.test_hooks ---- */

struct kvk_test_control {
    uint64_t policy_time_ns; /* 0: leave */
    bool set_copy_delay;
    uint32_t copy_delay_us;
    bool constant_hash;
    bool fail_next_copy;
    uint32_t slice_blocks; /* references that are taken or given back in one go; 0: leave */
};
KVK_CHECKED enum kvk_status kvk_cache_test_control(struct kvk_cache *cache,
                                                   const struct kvk_test_control *control,
                                                   struct kvk_error *error);

/* Every law, by walking everything; aborts on a breach. Takes the lock. For tests. */
void kvk_cache_check(struct kvk_cache *cache);

/* ---- How it feels, in a few numbers: for who watches whether it lives. Takes the lock. ---- */

struct kvk_cache_pulse {
    uint64_t silent_ns;                     /* since maintenance came round */
    uint64_t used_bytes[2], limit_bytes[2]; /* device, host */
    uint32_t sequences, leases, sessions;
};
void kvk_cache_pulse(struct kvk_cache *cache, struct kvk_cache_pulse *pulse);

#endif
