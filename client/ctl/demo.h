/*
 * The demonstration's processes: what its workers and their parent share.
 */
#ifndef KVK_CLIENT_CTL_DEMO_H
#define KVK_CLIENT_CTL_DEMO_H

#include <stdatomic.h>
#include <stdint.h>

#include "client/ctl/ctl.h"

#define DEMO_WORKERS_MAX 64
#define DEMO_SEEN_COUNT (1u << 21)    /* places for prefixes seen */
#define DEMO_LATENCY_COUNT (1u << 18) /* look-ups timed */

/* Lies in memory that parent and workers share; counters only grow. */
struct demo_shared {
    _Atomic uint64_t requests_left;
    _Atomic uint64_t requests;
    _Atomic uint64_t blocks; /* full blocks of prompts asked for */
    _Atomic uint64_t hit_blocks;
    _Atomic uint64_t ceiling_blocks; /* that a cache without end would have hit */
    _Atomic uint64_t tokens_written;
    _Atomic uint64_t bytes_written;
    _Atomic uint64_t bytes_verified;
    _Atomic uint64_t bytes_streamed; /* read through gRPC instead of mapped memory */
    _Atomic uint64_t mismatches;
    _Atomic uint64_t forks;
    _Atomic uint64_t swaps;
    _Atomic uint64_t swapped_bytes;
    _Atomic uint64_t drafts;
    _Atomic uint64_t leases;
    _Atomic uint64_t lost_reads; /* a block went while it was read, and the reader knew */
    _Atomic uint64_t refusals;
    _Atomic uint64_t crashes;
    _Atomic uint64_t failures;
    _Atomic uint64_t seen[DEMO_SEEN_COUNT]; /* prefixes that some worker sealed */
    _Atomic uint32_t latency_count;
    uint32_t latency_ns[DEMO_LATENCY_COUNT];
    char failure[512]; /* the first one's sentence */
};

struct demo_settings {
    uint64_t workers;
    uint64_t requests;
    uint64_t seed;
    bool crash; /* workers kill themselves now and then */
};

/* One worker's life: never returns but by its end; its exit code is 0 when the work is done. */
int demo_worker_run(const struct ctl_options *options, const struct demo_settings *settings,
                    struct demo_shared *shared, uint32_t number, uint64_t seed);

#endif
