/*
 * Every figure as Prometheus text (format 0.0.4): samples of one name together, each with its help
 * and type.
 */
#ifndef KVK_DAEMON_HTTP_METRICS_H
#define KVK_DAEMON_HTTP_METRICS_H

#include "daemon/rpc.h"

/* NUL-terminated, the caller's to free(); NULL: no memory. Takes the engine's lock for a moment. */
char *kvk_http_metrics(struct kvk_rpc *rpc);

#endif
