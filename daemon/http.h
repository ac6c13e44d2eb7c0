/*
 * The daemon over HTTP, for people and for Prometheus: the page, the figures it shows as JSON,
 * /metrics, and whether the daemon lives and can work.
 *
 *     GET  /                the page (with /page.css and /page.js); without a credential it shows
 *                           only where to give one
 *     GET  /metrics         Prometheus text
 *     GET  /health/live     200 while the process answers
 *     GET  /health/ready    200 where a block can be written, moved and read in every tier; else
 *                           503 and the reason
 *     POST /api/METHOD      calls that only read (rpc_json.h), by a bearer token
 *
 * It changes nothing in the daemon. Everything is bounded: connections, request sizes, time.
 *
 * Locking: none; libmicrohttpd's one thread runs the handlers, which may block for moments.
 */
#ifndef KVK_DAEMON_HTTP_H
#define KVK_DAEMON_HTTP_H

#include <stdint.h>

#include "daemon/rpc.h"

struct kvk_http;

/* Who is answered without a credential. */
enum kvk_http_open {
    KVK_HTTP_OPEN_NONE = 0,
    KVK_HTTP_OPEN_METRICS = 1, /* /metrics and /health/…: figures by tenant's name, no more */
    KVK_HTTP_OPEN_ALL = 2,     /* all that an admin may see: on the loopback only */
};

struct kvk_http_options {
    const char *address; /* HOST:PORT or [HOST]:PORT; port 0: any */
    enum kvk_http_open open;
    struct kvk_rpc *rpc; /* borrowed for its life, as is the cache */
    struct kvk_cache *cache;
};

/* Does `open` go with the address? KVK_INVALID: all, and not on the loopback. */
KVK_CHECKED enum kvk_status kvk_http_check(const char *address, enum kvk_http_open open,
                                           struct kvk_error *error);
KVK_CHECKED enum kvk_status kvk_http_create(const struct kvk_http_options *options,
                                            struct kvk_http **http, struct kvk_error *error);
void kvk_http_destroy(struct kvk_http *http); /* NULL is fine */
uint16_t kvk_http_port(const struct kvk_http *http);

#endif
