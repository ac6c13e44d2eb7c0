/*
 * The remote store's counters and gauges, by their Prometheus names.
 */
#include "daemon/report_remote.h"

#include <stdio.h>

#include "daemon/cache_internal.h"

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

struct named {
    const char *name;
    size_t offset; /* of a uint64_t in its struct */
};

#define STAT(member)                                                                               \
    {                                                                                              \
        .name = "kvkeep_remote_" #member "_total",                                                 \
        .offset = offsetof(struct kvk_remote_stats, member)                                        \
    }
#define WIRE(member, text)                                                                         \
    {                                                                                              \
        .name = "kvkeep_remote_" text "_total",                                                    \
        .offset = offsetof(struct kvk_remote_counters, member)                                     \
    }
#define FLEET(member, text)                                                                        \
    {                                                                                              \
        .name = "kvkeep_remote_generation_" text "_total",                                         \
        .offset = offsetof(struct kvk_fleet_counters, member)                                      \
    }

static const struct named stats[] = {
    STAT(asks),
    STAT(ask_hits),
    STAT(asks_dropped),
    STAT(asks_failed),
    STAT(fetches),
    STAT(recomputes),
    STAT(fetched_blocks),
    STAT(fetched_bytes),
    STAT(fetched_tokens),
    STAT(fetch_failures),
    STAT(fetch_unroomed),
    STAT(witness_failures),
    STAT(overtaken),
    STAT(offered_blocks),
    STAT(offers_dropped),
    STAT(present_blocks),
    STAT(sent_blocks),
    STAT(sent_bytes),
    STAT(send_failures),
    STAT(late_blocks),
    STAT(unworthy_blocks),
    STAT(unfit_blocks),
    STAT(over_budget_blocks),
};

static const struct named wire[] = {
    WIRE(batches, "batches"),
    WIRE(refused, "batches_refused"),
    WIRE(requests, "requests"),
    WIRE(repeated, "requests_repeated"),
    WIRE(moved, "moved"),
    WIRE(asked, "redirected"),
    WIRE(try_agains, "try_agains"),
    WIRE(cluster_downs, "cluster_downs"),
    WIRE(late_answers, "late_answers"),
    WIRE(connects, "connects"),
    WIRE(connect_failures, "connect_failures"),
    WIRE(lost_connections, "lost_connections"),
    WIRE(stalls, "stalls"),
    WIRE(protocol_errors, "protocol_errors"),
    WIRE(breaker_openings, "breaker_openings"),
    WIRE(refreshes, "refreshes"),
};

static const struct named generations[] = {
    FLEET(reads, "reads"),     FLEET(read_failures, "read_failures"),
    FLEET(raises, "raises"),   FLEET(learned, "learned"),
    FLEET(begun, "begun"),     FLEET(restored, "restored"),
    FLEET(foreign, "foreign"),
};

static const char *const operations[] = {"exists", "fetch", "store", "drop"};

struct visitor {
    void (*visit)(void *context, const char *name, double value);
    void *context;
};

static void visit(const struct visitor *visitor, const char *name, uint64_t value)
{
    visitor->visit(visitor->context, name, (double)value);
}

static void visit_all(const struct visitor *visitor, const struct named *names, size_t count,
                      const void *record)
{
    for (size_t i = 0; i < count; i++) {
        visit(visitor, names[i].name,
              *(const uint64_t *)(const void *)((const uint8_t *)record + names[i].offset));
    }
}

const char *kvk_remote_state_name(enum kvk_remote_state state)
{
    switch (state) {
    case KVK_REMOTE_AWAY:
        return "away";
    case KVK_REMOTE_PARTLY:
        return "partly";
    case KVK_REMOTE_GOOD:
        return "good";
    }
    return "away";
}

/* What became of blocks: all that did, and hits and absences in any case. */
static void visit_results(const struct visitor *visitor, const struct kvk_remote_counters *counters)
{
    char name[96];
    for (size_t o = 0; o < COUNT(operations); o++) {
        for (int r = KVK_REMOTE_HIT; r < KVK_REMOTE_RESULT_COUNT; r++) {
            if (counters->blocks[o][r] == 0 && r > KVK_REMOTE_ABSENT) {
                continue;
            }
            (void)snprintf(name, sizeof(name),
                           "kvkeep_remote_blocks_total{operation=\"%s\",result=\"%s\"}",
                           operations[o], kvk_remote_result_name((enum kvk_remote_result)r));
            visit(visitor, name, counters->blocks[o][r]);
        }
    }
    for (size_t o = KVK_REMOTE_FETCH; o <= KVK_REMOTE_STORE; o++) {
        (void)snprintf(name, sizeof(name), "kvkeep_remote_bytes_total{operation=\"%s\"}",
                       operations[o]);
        visit(visitor, name, counters->bytes[o]);
    }
}

void kvk_report_remote_visit(const struct kvk_remote_report *report,
                             void (*each)(void *context, const char *name, double value),
                             void *context)
{
    const struct visitor visitor = {.visit = each, .context = context};
    char name[64];
    if (!report->present) {
        return;
    }
    for (int state = KVK_REMOTE_AWAY; state <= KVK_REMOTE_GOOD; state++) {
        (void)snprintf(name, sizeof(name), "kvkeep_remote_state{state=\"%s\"}",
                       kvk_remote_state_name((enum kvk_remote_state)state));
        visit(&visitor, name, (int)report->health.state == state ? 1 : 0);
    }
    visit(&visitor, "kvkeep_remote_nodes", report->health.node_count);
    visit(&visitor, "kvkeep_remote_nodes_away", report->health.node_away_count);
    visit(&visitor, "kvkeep_remote_slots_away", report->health.slot_away_count);
    visit(&visitor, "kvkeep_remote_fetch_bytes_per_second", report->health.fetch_rate);
    visit(&visitor, "kvkeep_remote_store_bytes_per_second", report->health.store_rate);
    each(context, "kvkeep_remote_round_trip_seconds", (double)report->health.round_trip_ns / 1e9);
    visit(&visitor, "kvkeep_remote_prompts_waiting", report->asks_waiting);
    visit(&visitor, "kvkeep_remote_blocks_waiting", report->send_waiting);
    visit(&visitor, "kvkeep_remote_spaces", report->spaces);
    visit(&visitor, "kvkeep_remote_spaces_out", report->spaces_out);
    visit_all(&visitor, stats, COUNT(stats), &report->stats);
    visit_all(&visitor, wire, COUNT(wire), &report->health.counters);
    visit_all(&visitor, generations, COUNT(generations), &report->fleet);
    visit_results(&visitor, &report->health.counters);
}

void kvk_remote_report_unlocked(struct kvk_cache *cache, struct kvk_remote_report *report)
{
    kvk_lock(&cache->lock);
    kvk_remote_report(cache, report);
    kvk_unlock(&cache->lock);
}
