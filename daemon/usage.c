/*
 * What each tenant has used, so that it can be charged: byte-seconds are summed at every change of
 * what it has, not sampled; all else is counted where it happens. Written to the catalogue about
 * once a minute and at the drain, a few tenants a round, so that it outlives the daemon; what a
 * crash loses is that minute.
 */
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/cache_internal.h"
#include "daemon/report_usage.h"

#define SAVE_NS (KVK_USAGE_SAVE_S * KVK_NS_PER_SECOND)
#define SAVE_TENANTS 4   /* written by one round: each is a synced commit */
#define SAVE_LOOKS 64    /* places looked at by one round */
#define VALUE_VERSION 2U /* of struct stored */
#define VALUE_VERSION_1_SIZE                                                                       \
    offsetof(struct stored, usage.partial_hit_tokens) /* it ended there                            \
                                                       */

/* As it lies in the catalogue. */
struct stored {
    uint32_t version;
    uint32_t size; /* of the whole */
    struct kvk_tenant_usage usage;
};
_Static_assert(sizeof(struct kvk_tenant_usage) == (2 * KVK_TIER_COUNT + 14) * sizeof(uint64_t),
               "a change of what is stored needs a new version");

/* ---- Byte-seconds ---- */

void kvk_usage_advance(struct kvk_cache *cache, const struct kvk_tenant *tenant, enum kvk_tier tier)
{
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    uint64_t bytes = cache->tiers[tier].tenant_bytes[tenant->index];
    uint64_t now_ns = kvk_clock_now(cache->clock);
    uint64_t elapsed_ns = now_ns > state->usage_ns[tier] ? now_ns - state->usage_ns[tier] : 0;
    state->usage_ns[tier] = now_ns;
    uint64_t product;
    if (!__builtin_mul_overflow(bytes, elapsed_ns, &product) &&
        !__builtin_add_overflow(product, state->usage_rest[tier], &product)) {
        state->usage.byte_seconds[tier] += product / KVK_NS_PER_SECOND;
        state->usage_rest[tier] = product % KVK_NS_PER_SECOND;
        return;
    }
    __extension__ unsigned __int128 wide = bytes;
    wide = wide * elapsed_ns + state->usage_rest[tier];
    state->usage.byte_seconds[tier] += (uint64_t)(wide / KVK_NS_PER_SECOND);
    state->usage_rest[tier] = (uint64_t)(wide % KVK_NS_PER_SECOND);
}

void kvk_usage_refresh(struct kvk_cache *cache, struct kvk_tenant_state *state)
{
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        if (cache->tiers[i].tenant_bytes != NULL) {
            kvk_usage_advance(cache, state->tenant, (enum kvk_tier)i);
        }
    }
    /* Those of the rate are counted without the lock. */
    uint64_t requests = atomic_exchange(&state->rate_requests, 0);
    uint64_t refusals = atomic_exchange(&state->rate_refusals, 0);
    state->usage.requests += requests;
    state->usage.rate_refusals += refusals;
    state->usage.refusals += refusals;
}

void kvk_usage_get(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                   struct kvk_tenant_usage *usage)
{
    (void)kvk_quota_sync(cache, tenant, NULL);
    kvk_lock(&cache->lock);
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    KVK_ASSERT(state->tenant == tenant);
    kvk_usage_refresh(cache, state);
    *usage = state->usage;
    kvk_unlock(&cache->lock);
}

/* ---- What lasts ---- */

#define VALUE_NAME_SIZE 32

static void value_name(uint64_t tenant_id, char name[VALUE_NAME_SIZE])
{
    (void)snprintf(name, VALUE_NAME_SIZE, "usage.%016" PRIx64, tenant_id);
}

static void usage_load_unlocked(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                                struct kvk_tenant_usage *usage)
{
    char name[VALUE_NAME_SIZE];
    struct stored stored = {.version = 0};
    size_t size = sizeof(stored);
    struct kvk_error error;
    *usage = (struct kvk_tenant_usage){.requests = 0};
    if (cache->catalogue == NULL) {
        return;
    }
    value_name(tenant->id, name);
    enum kvk_status status =
        kvk_catalogue_get_value(cache->catalogue, name, &stored, &size, &error);
    size_t right = stored.version == 1 ? VALUE_VERSION_1_SIZE : sizeof(stored);
    if (status == KVK_OK && size == right && stored.size == right &&
        (stored.version == 1 || stored.version == VALUE_VERSION)) {
        *usage = stored.usage;
    } else if (status != KVK_NOT_FOUND) {
        kvk_log(KVK_LOG_WARNING, "usage_lost", "tenant_id=%" PRIu64 " reason=%s", tenant->id,
                status == KVK_OK ? "version" : kvk_status_name(status));
    }
}

void kvk_usage_end(struct kvk_cache *cache, struct kvk_tenant_state *state)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(state->spaces == NULL);
    KVK_ASSERT(state->sequences == 0 && state->leases == 0);
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        KVK_ASSERT(state->bound_bytes[i] == 0 && state->growth_bytes[i] == 0);
        cache->tiers[i].guarded_bytes -= state->quota.guaranteed_bytes[i];
        cache->tiers[i].guaranteed_bytes -= state->quota.guaranteed_bytes[i];
    }
    KVK_ASSERT(state->tenant == NULL || cache->tenant_count > 0);
    cache->tenant_count -= state->tenant != NULL ? 1 : 0;
    /* Processes of it that still read may be waited for: they are counted until they are gone. */
    const struct kvk_metadata metadata = state->metadata;
    memset(state, 0, sizeof(*state));
    state->metadata = metadata;
}

void kvk_usage_forget_unlocked(struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    char name[VALUE_NAME_SIZE];
    const uint8_t nothing = 0; /* no version: see usage_load_unlocked() */
    struct kvk_error error;
    if (cache->catalogue == NULL) {
        return;
    }
    value_name(tenant->id, name);
    if (kvk_catalogue_put_value(cache->catalogue, name, &nothing, sizeof(nothing), &error) !=
        KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "usage_not_forgotten", "reason=\"%s\"", error.text);
    }
}

void kvk_usage_begin(struct kvk_cache *cache, const struct kvk_tenant *tenant)
{
    struct kvk_tenant_usage usage;
    KVK_ASSERT(kvk_locks_held() == 0);
    usage_load_unlocked(cache, tenant, &usage);
    kvk_lock(&cache->lock);
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    /* Another thread was faster; or the tenant is being deleted, and its place may be another's by
     * now: whoever begins that one has seen it leave, under this lock. */
    if (atomic_load(&state->tenant) == tenant || kvk_tenant_is_leaving(tenant)) {
        kvk_unlock(&cache->lock);
        return;
    }
    kvk_usage_end(cache, state);
    state->usage = usage;
    state->usage_saved = usage;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        state->usage_ns[i] = kvk_clock_now(cache->clock);
    }
    /* An odd number is no version. */
    atomic_store(&state->quota_version, UINT32_MAX);
    atomic_store(&state->tenant, tenant);
    cache->tenant_count++;
    kvk_unlock(&cache->lock);
}

/* Without the lock: a commit takes its time. */
static bool usage_write_drops(struct kvk_cache *cache, struct kvk_tenant_state *state)
{
    char name[VALUE_NAME_SIZE];
    struct stored stored = {
        .version = VALUE_VERSION, .size = sizeof(stored), .usage = state->usage};
    struct kvk_error error;
    uint64_t id = state->tenant->id;
    value_name(id, name);
    kvk_unlock(&cache->lock);
    enum kvk_status status =
        kvk_catalogue_put_value(cache->catalogue, name, &stored, sizeof(stored), &error);
    kvk_lock(&cache->lock);
    if (status != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "usage_not_written", "reason=\"%s\"", error.text);
        return false;
    }
    if (state->tenant != NULL && state->tenant->id == id) {
        state->usage_saved = stored.usage;
    }
    return true;
}

static bool usage_differs(const struct kvk_tenant_state *state)
{
    return memcmp(&state->usage, &state->usage_saved, sizeof(state->usage)) != 0;
}

void kvk_usage_maintain_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint64_t now_ns = kvk_clock_now(cache->clock);
    uint32_t written = 0;
    if (cache->catalogue == NULL) {
        return;
    }
    for (uint32_t i = 0; i < SAVE_LOOKS && written < SAVE_TENANTS; i++) {
        struct kvk_tenant_state *state = &cache->tenant_states[cache->usage_next];
        cache->usage_next = (cache->usage_next + 1) % KVK_TENANT_COUNT_MAX;
        if (state->tenant == NULL || state->forgetting ||
            now_ns - state->usage_saved_ns < SAVE_NS) {
            continue;
        }
        state->usage_saved_ns = now_ns;
        kvk_usage_refresh(cache, state);
        if (usage_differs(state)) {
            written++;
            (void)usage_write_drops(cache, state);
        }
    }
}

void kvk_usage_save(struct kvk_cache *cache)
{
    kvk_lock(&cache->lock);
    for (uint32_t i = 0; i < KVK_TENANT_COUNT_MAX && cache->catalogue != NULL; i++) {
        struct kvk_tenant_state *state = &cache->tenant_states[i];
        if (state->tenant == NULL || state->forgetting) {
            continue;
        }
        kvk_usage_refresh(cache, state);
        if (usage_differs(state) && !usage_write_drops(cache, state)) {
            break; /* it would fail for the next one too */
        }
    }
    kvk_unlock(&cache->lock);
}
