/*
 * Prefix-reuse traces: one JSON object a line, plain or gzip, as published with Mooncake
 * ({"timestamp" ms, "input_length", "hash_ids"}) or run-encoded ("hash_runs": [start, length, …]).
 * An id stands for the whole prefix up to and with its block.
 */
#ifndef KVK_CLIENT_CTL_TRACE_H
#define KVK_CLIENT_CTL_TRACE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

struct ctl_trace_request {
    uint64_t time_ms;
    uint64_t first_id; /* index into trace.ids */
    uint32_t id_count;
    uint32_t last_tokens; /* real tokens of the last id; the others are full blocks */
};

struct ctl_trace {
    struct ctl_trace_request *requests; /* [request_count] */
    uint64_t request_count;
    uint32_t *ids; /* [id_count], numbered densely from 0 */
    uint64_t id_count;
    uint64_t unique_count;
    uint32_t block_tokens; /* of one id, after grouping */
};

/* `group`: keep every group-th id (chained ids: that is the larger block). Lines are checked:
 * the error names file and line. */
KVK_CHECKED enum kvk_status ctl_trace_load(struct ctl_trace *trace, const char *path,
                                           uint32_t group, struct kvk_error *error);
void ctl_trace_finish(struct ctl_trace *trace);

/* Hits of a cache without end: ids seen before / all. */
double ctl_trace_ceiling(const struct ctl_trace *trace);

#endif
