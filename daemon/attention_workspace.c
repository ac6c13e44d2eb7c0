#include "daemon/attention_workspace.h"

#include "base/assert.h"

#define SIZE_MIN (UINT64_C(2) << 20)
#define IDLE_NS (10 * KVK_NS_PER_SECOND) /* then it goes */

/* Sizes double, so that calls of nearly the same size find one that fits. */
static uint64_t size_for(uint64_t size_bytes)
{
    uint64_t size = SIZE_MIN;
    while (size < size_bytes) {
        size *= 2;
    }
    return size;
}

/* The smallest that is free and large enough. */
static struct kvk_workspace *find_fitting(struct kvk_attention_state *state, uint64_t size_bytes)
{
    struct kvk_workspace *best = NULL;
    for (int i = 0; i < KVK_WORKSPACE_COUNT; i++) {
        struct kvk_workspace *w = &state->workspaces[i];
        if (!w->taken && w->size_bytes >= size_bytes &&
            (best == NULL || w->size_bytes < best->size_bytes)) {
            best = w;
        }
    }
    return best;
}

/* The free one that was used longest ago, or one that has no memory. */
static struct kvk_workspace *find_oldest(struct kvk_attention_state *state, bool has_memory)
{
    struct kvk_workspace *oldest = NULL;
    for (int i = 0; i < KVK_WORKSPACE_COUNT; i++) {
        struct kvk_workspace *w = &state->workspaces[i];
        if (!w->taken && (w->size_bytes > 0) == has_memory &&
            (oldest == NULL || w->used_ns < oldest->used_ns)) {
            oldest = w;
        }
    }
    return oldest;
}

uint64_t kvk_workspace_bytes(const struct kvk_cache *cache)
{
    uint64_t bytes = 0;
    for (int i = 0; i < KVK_WORKSPACE_COUNT; i++) {
        bytes += cache->attention.workspaces[i].size_bytes;
    }
    return bytes;
}

/* Its memory goes; it stays counted, and nobody else's, until it has. */
static void empty_drops(struct kvk_cache *cache, struct kvk_workspace *workspace)
{
    struct kvk_device *device = cache->tiers[KVK_TIER_DEVICE].device;
    KVK_ASSERT(!workspace->taken && workspace->size_bytes > 0);
    workspace->taken = true;
    kvk_unlock(&cache->lock);
    device->ops->free(device, &workspace->region);
    kvk_lock(&cache->lock);
    *workspace = (struct kvk_workspace){.taken = false};
}

/* Memory for one that has none, and whose size is counted already. */
static enum kvk_status fill_unlocked(struct kvk_cache *cache, struct kvk_workspace *workspace,
                                     struct kvk_error *error)
{
    struct kvk_device *device = cache->tiers[KVK_TIER_DEVICE].device;
    enum kvk_status status = device->ops->alloc(device, workspace->size_bytes, 0, "attention",
                                                &workspace->region, error);
    if (status != KVK_OK) {
        return status;
    }
    status = device->ops->back(device, &workspace->region, 0, workspace->size_bytes, error);
    if (status != KVK_OK) {
        device->ops->free(device, &workspace->region);
    }
    return status;
}

/* A place without memory, its size counted from here on; others that stand idle make room for it.
 * NULL: there is none. */
static struct kvk_workspace *place_take_drops(struct kvk_cache *cache, uint64_t size)
{
    struct kvk_attention_state *state = &cache->attention;
    for (;;) {
        bool fits = size <= KVK_ATTENTION_BRING_BYTES_MAX &&
                    kvk_workspace_bytes(cache) <= KVK_ATTENTION_BRING_BYTES_MAX - size;
        struct kvk_workspace *place = fits ? find_oldest(state, false) : NULL;
        if (place != NULL) {
            place->taken = true;
            place->size_bytes = size;
            return place;
        }
        struct kvk_workspace *idle = find_oldest(state, true);
        if (idle == NULL || size > KVK_ATTENTION_BRING_BYTES_MAX) {
            return NULL;
        }
        empty_drops(cache, idle);
    }
}

enum kvk_status kvk_workspace_take_unlocked(struct kvk_cache *cache, uint64_t size_bytes,
                                            struct kvk_workspace **workspace,
                                            struct kvk_error *error)
{
    kvk_lock(&cache->lock);
    struct kvk_workspace *found = find_fitting(&cache->attention, size_bytes);
    bool fresh = found == NULL;
    if (fresh) {
        found = place_take_drops(cache, size_for(size_bytes));
    } else {
        found->taken = true;
    }
    kvk_unlock(&cache->lock);
    if (found == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_LIMIT, "",
                        "attention's workspace on the device is in use");
    }
    enum kvk_status status = fresh ? fill_unlocked(cache, found, error) : KVK_OK;
    if (status != KVK_OK) {
        kvk_lock(&cache->lock);
        *found = (struct kvk_workspace){.taken = false};
        kvk_unlock(&cache->lock);
        return status;
    }
    *workspace = found;
    return KVK_OK;
}

void kvk_workspace_give_unlocked(struct kvk_cache *cache, struct kvk_workspace *workspace)
{
    kvk_lock(&cache->lock);
    KVK_ASSERT(workspace->taken);
    workspace->taken = false;
    workspace->used_ns = kvk_clock_now(cache->clock);
    kvk_unlock(&cache->lock);
}

void kvk_workspaces_maintain_drops(struct kvk_cache *cache)
{
    uint64_t now_ns = kvk_clock_now(cache->clock);
    bool lost = kvk_tier_is_lost(cache, KVK_TIER_DEVICE);
    for (int i = 0; i < KVK_WORKSPACE_COUNT; i++) {
        struct kvk_workspace *w = &cache->attention.workspaces[i];
        if (!w->taken && w->size_bytes > 0 && (lost || now_ns - w->used_ns >= IDLE_NS)) {
            empty_drops(cache, w);
        }
    }
}

void kvk_workspaces_finish(struct kvk_cache *cache)
{
    kvk_lock(&cache->lock);
    for (int i = 0; i < KVK_WORKSPACE_COUNT; i++) {
        struct kvk_workspace *w = &cache->attention.workspaces[i];
        KVK_ASSERT(!w->taken);
        if (w->size_bytes > 0) {
            empty_drops(cache, w);
        }
    }
    kvk_unlock(&cache->lock);
}
