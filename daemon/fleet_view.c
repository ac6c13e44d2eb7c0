#include "daemon/fleet_view.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "daemon/remote_internal.h"
#include "daemon/tenant_internal.h"

#define INTERVAL_MS 10000
#define LIST_NS (5 * KVK_NS_PER_SECOND)

/* ---- What we say ---- */

static void texts_fill(const struct kvk_config *config, struct kvk_fleet_node *node)
{
    (void)snprintf(node->name, sizeof(node->name), "%s", config->remote.node_name);
    if (node->name[0] == '\0' && gethostname(node->name, sizeof(node->name)) != 0) {
        (void)snprintf(node->name, sizeof(node->name), "unnamed");
    }
    node->name[sizeof(node->name) - 1] = '\0';
    (void)snprintf(node->address, sizeof(node->address), "%s",
                   config->remote.node_address[0] != '\0' ? config->remote.node_address
                                                          : config->tcp_address);
    (void)snprintf(node->events, sizeof(node->events), "%s", config->events_publish);
    (void)snprintf(node->version, sizeof(node->version), "%s", KVK_VERSION);
}

static void figures_fill(struct kvk_cache *cache, struct kvk_fleet_node *node)
{
    struct kvk_remote_report report;
    kvk_lock(&cache->lock);
    kvk_remote_report(cache, &report);
    for (int i = 0; i < KVK_FLEET_TIERS; i++) {
        node->used_bytes[i] = cache->tiers[i].used_bytes;
        node->limit_bytes[i] = cache->tiers[i].pool.limit_bytes;
        node->uses[i] = cache->stats.block_uses[i];
    }
    node->uses[KVK_TIER_DISK] = cache->stats.disk_restored_blocks;
    node->lookups = cache->stats.lookups;
    node->lookup_tokens = cache->stats.lookup_tokens;
    node->hit_tokens = cache->stats.hit_tokens;
    node->draining = cache->draining;
    node->started_s = cache->remote->started_s;
    kvk_unlock(&cache->lock);
    node->fetched_blocks = report.stats.fetched_blocks;
    node->fetched_bytes = report.stats.fetched_bytes;
    node->sent_bytes = report.stats.sent_bytes;
    node->spaces = report.spaces;
    node->store_state = (uint32_t)report.health.state;
}

static void describe(void *context, struct kvk_fleet_node *node)
{
    struct kvk_cache *cache = context;
    _Static_assert(KVK_FLEET_TIERS == KVK_TIER_COUNT, "tiers are told as they are");
    texts_fill(cache->config, node);
    figures_fill(cache, node);
}

enum kvk_status kvk_fleet_view_start(struct kvk_cache *cache, struct kvk_error *error)
{
    struct kvk_remote_store *store = cache->remote;
    if (store == NULL) {
        return KVK_OK;
    }
    store->started_s = kvk_wall_seconds();
    const struct kvk_fleet_directory_options options = {
        .key = store->key,
        .remote = store->client,
        .values = cache->catalogue,
        .interval_ms = INTERVAL_MS,
        .describe = describe,
        .context = cache,
    };
    return kvk_fleet_directory_open(&options, &store->directory, error);
}

void kvk_fleet_view_stop(struct kvk_cache *cache)
{
    struct kvk_remote_store *store = cache->remote;
    if (store != NULL) {
        kvk_fleet_directory_close(store->directory);
        store->directory = NULL;
    }
}

/* ---- What the others say ---- */

enum kvk_status kvk_fleet_view(struct kvk_cache *cache, const struct kvk_caller *caller,
                               struct kvk_fleet_view *view, struct kvk_error *error)
{
    *view = (struct kvk_fleet_view){0};
    if (!caller->may_block) {
        return KVK_WOULD_BLOCK;
    }
    if (cache->remote == NULL || cache->remote->directory == NULL) {
        return kvk_fail(error, KVK_PRECONDITION, KVK_CAUSE_NONE, "remote.seeds",
                        "this daemon is in no fleet: remote.seeds is empty");
    }
    uint64_t deadline_ns = kvk_clock_now(kvk_clock_monotonic()) + LIST_NS;
    if (caller->deadline_ns < deadline_ns) {
        deadline_ns = caller->deadline_ns;
    }
    struct kvk_fleet_directory *directory = cache->remote->directory;
    kvk_fleet_directory_self(directory, view->self);
    view->now_s = kvk_wall_seconds();
    return kvk_fleet_directory_list(directory, deadline_ns, &view->nodes, &view->count,
                                    &view->incomplete, error);
}
