/*
 * Every figure of the daemon by its Prometheus name: the engine's, the server's, the callers', and
 * how long calls took.
 */
#ifndef KVK_DAEMON_RPC_STATS_H
#define KVK_DAEMON_RPC_STATS_H

#include "daemon/rpc.h"

/* Visit counters and gauges, labels included; of the latencies their quantiles. */
void kvk_rpc_stats(struct kvk_rpc *rpc,
                   void (*visit)(void *context, const char *name, double value), void *context);

/* The latencies as Prometheus histograms; the caller frees `text`. KVK_EXHAUSTED: no memory. */
KVK_CHECKED enum kvk_status kvk_rpc_stats_latencies(struct kvk_rpc *rpc, char **text, size_t *size);

#endif
