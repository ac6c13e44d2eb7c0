#include "daemon/rpc_stats.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/metrics.h"
#include "daemon/cache_state.h"
#include "daemon/events.h"
#include "daemon/publish.h"
#include "daemon/report.h"
#include "daemon/rpc_private.h"

#define STATS_MAX 16384
#define STATS_TEXT_BYTES ((size_t)4 << 20)

/* Bounds of the histograms, in nanoseconds: 1 us to 17 s. */
#define LATENCY_LOW (UINT64_C(1) << 10)
#define LATENCY_HIGH (UINT64_C(1) << 34)

/* ---- Latencies ---- */

enum kvk_status kvk_rpc_latencies_create(struct kvk_rpc *rpc, struct kvk_error *error)
{
    enum kvk_status status = kvk_metrics_create(KVK_RPC_METHODS_MAX, &rpc->metrics);
    for (uint32_t i = 0; i < rpc->method_count && status == KVK_OK; i++) {
        struct kvk_rpc_bound *bound = &rpc->bound[i];
        char labels[KVK_METRIC_LABELS_SIZE] = "";
        if (bound->method->kind != KVK_METHOD_UNARY ||
            !kvk_metrics_label(labels, "method", bound->method->name)) {
            continue; /* a stream lasts as long as its client wants */
        }
        status = kvk_metrics_histogram(rpc->metrics, "kvkeep_call_seconds",
                                       "Time that calls were worked on, waiting in queues apart.",
                                       labels, 1e-9, LATENCY_LOW, LATENCY_HIGH, &bound->latency);
    }
    return status == KVK_OK ? KVK_OK
                            : kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "",
                                       "no memory for the latencies of calls");
}

enum kvk_status kvk_rpc_stats_latencies(struct kvk_rpc *rpc, char **text, size_t *size)
{
    return kvk_metrics_render(rpc->metrics, text, size);
}

/* ---- Visiting ---- */

struct visitor {
    void (*visit)(void *context, const char *name, double value);
    void *context;
};

static void visit_server(const struct visitor *visitor, struct kvk_server *server)
{
    struct kvk_server_stats counts;
    kvk_server_stats(server, &counts);
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"kvkeep_calls_total", counts.calls},
        {"kvkeep_calls_refused_total", counts.calls_refused},
        {"kvkeep_calls_of_one_tenant_refused_total", counts.calls_of_one_refused},
        {"kvkeep_calls_unknown_total", counts.calls_unknown},
        {"kvkeep_calls_cancelled_total", counts.calls_cancelled},
        {"kvkeep_connections_total", counts.connections},
        {"kvkeep_connections_refused_total", counts.connections_refused},
        {"kvkeep_calls_live", counts.live_calls},
        {"kvkeep_connections_live", counts.live_connections},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        visitor->visit(visitor->context, rows[i].name, (double)rows[i].value);
    }
}

static void visit_callers(const struct visitor *visitor, struct kvk_rpc *rpc)
{
    struct kvk_tenants_stats tenants;
    struct kvk_audit_stats audit = {.entries = 0};
    kvk_tenants_stats(rpc->tenants, &tenants);
    if (rpc->audit != NULL) {
        kvk_audit_stats(rpc->audit, &audit);
    }
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"kvkeep_tenants", tenants.tenants},
        {"kvkeep_credentials", tenants.credentials},
        {"kvkeep_tenant_changes_total", tenants.changes},
        {"kvkeep_callers_identified_total", tenants.identified},
        {"kvkeep_auth_failures_total", tenants.identify_failures},
        {"kvkeep_auth_limited_total", atomic_load(&rpc->auth_limit.refused)},
        {"kvkeep_audit_entries_total", audit.entries},
        {"kvkeep_audit_failures_total", audit.failures},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        visitor->visit(visitor->context, rows[i].name, (double)rows[i].value);
    }
}

/* Where there are events. */
static void visit_events(const struct visitor *visitor, struct kvk_rpc *rpc)
{
    struct kvk_events_stats log;
    struct kvk_publish_stats published = {.events = 0};
    if (rpc->cache->events == NULL) {
        return;
    }
    kvk_events_stats_unlocked(rpc->cache, &log);
    if (rpc->publisher != NULL) {
        kvk_publisher_stats(rpc->publisher, &published);
    }
    kvk_lock(&rpc->watches.lock);
    uint32_t watchers = rpc->watches.count;
    kvk_unlock(&rpc->watches.lock);
    const struct {
        const char *name;
        uint64_t value;
    } rows[] = {
        {"kvkeep_events_total", log.logged},
        {"kvkeep_events_kept", log.logged + 1 - log.oldest},
        {"kvkeep_events_watchers", watchers},
        {"kvkeep_events_snapshots_total", atomic_load(&rpc->watches.snapshots)},
        {"kvkeep_events_published_total", published.events},
        {"kvkeep_events_messages_total", published.messages},
        {"kvkeep_events_message_bytes_total", published.bytes},
        {"kvkeep_events_topics", published.topics},
        {"kvkeep_events_topic_restarts_total", published.restarts},
        {"kvkeep_events_replays_total", published.replays},
        {"kvkeep_events_dropped_total", published.dropped},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        visitor->visit(visitor->context, rows[i].name, (double)rows[i].value);
    }
}

/* Of methods that were called. */
static void visit_latencies(const struct visitor *visitor, const struct kvk_rpc *rpc)
{
    static const struct {
        const char *text;
        double share;
    } quantiles[] = {{"0.5", 0.5}, {"0.99", 0.99}};
    for (uint32_t i = 0; i < rpc->method_count; i++) {
        const struct kvk_rpc_bound *bound = &rpc->bound[i];
        if (bound->latency == NULL || kvk_histogram_count(bound->latency) == 0) {
            continue;
        }
        for (size_t q = 0; q < sizeof(quantiles) / sizeof(quantiles[0]); q++) {
            char name[128];
            (void)snprintf(name, sizeof(name),
                           "kvkeep_call_latency_seconds{method=\"%s\",quantile=\"%s\"}",
                           bound->method->name, quantiles[q].text);
            double ns = (double)kvk_histogram_quantile(bound->latency, quantiles[q].share);
            visitor->visit(visitor->context, name, ns / (double)KVK_NS_PER_SECOND);
        }
    }
}

void kvk_rpc_stats(struct kvk_rpc *rpc,
                   void (*visit)(void *context, const char *name, double value), void *context)
{
    const struct visitor visitor = {.visit = visit, .context = context};
    visit_server(&visitor, rpc->server);
    visit_callers(&visitor, rpc);
    visit_events(&visitor, rpc);
    visit_latencies(&visitor, rpc);
    kvk_report_stats(rpc->cache, visit, context);
}

/* ---- GetStats ---- */

/* Names are copied while they are visited: they need not outlive the visit. */
struct rpc_stats {
    Kvkeep__V1__Stat *rows; /* [STATS_MAX] */
    Kvkeep__V1__Stat **pointers;
    size_t count;
    char *text; /* [STATS_TEXT_BYTES] */
    size_t text_used;
    bool full;
};

static void stats_add(void *context, const char *name, double value)
{
    struct rpc_stats *stats = context;
    size_t size = strlen(name);
    if (stats->count == STATS_MAX || size >= STATS_TEXT_BYTES - stats->text_used) {
        stats->full = true;
        return;
    }
    char *copy = stats->text + stats->text_used;
    memcpy(copy, name, size + 1);
    stats->text_used += size + 1;
    Kvkeep__V1__Stat *row = &stats->rows[stats->count];
    stats->pointers[stats->count++] = row;
    kvkeep__v1__stat__init(row);
    row->name = kvk_rpc_bytes(copy, size);
    row->value = value;
}

KVK_RPC_HANDLER(kvk_rpc_get_stats)
{
    (void)message;
    enum kvk_status status = kvk_rpc_require_admin(run, error);
    if (status != KVK_OK) {
        return status;
    }
    struct kvk_rpc_arena *arena = &run->memory->arena;
    struct rpc_stats stats = {.count = 0};
    stats.rows = kvk_rpc_arena_take_extra(arena, STATS_MAX * sizeof(*stats.rows));
    stats.pointers = kvk_rpc_arena_take_extra(arena, STATS_MAX * sizeof(*stats.pointers));
    stats.text = kvk_rpc_arena_take_extra(arena, STATS_TEXT_BYTES);
    if (stats.rows == NULL || stats.pointers == NULL || stats.text == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the answer");
    }
    kvk_rpc_stats(run->rpc, stats_add, &stats);
    if (stats.full) {
        return kvk_fail_limit(error, KVK_INTERNAL, KVK_CAUSE_LIMIT, "", stats.count, STATS_MAX,
                              "more counters than an answer has room for");
    }
    Kvkeep__V1__GetStatsResponse response = KVKEEP__V1__GET_STATS_RESPONSE__INIT;
    response.n_stats = stats.count;
    response.stats = stats.pointers;
    return kvk_rpc_reply(run, &response.base, error);
}
