#include "daemon/quota.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/room_internal.h"

/* Refusals whose time to come nobody can know. */
#define RETRY_MS 500
#define RATE_TRIES 64 /* that others may come between */

static const char *const tier_names[KVK_TIER_COUNT] = {"device", "host", "disk"};

/* ---- A limit that nothing fits in ---- */

static bool space_is_short(const struct kvk_tenant_quota *quota, const struct kvk_space *space,
                           struct kvk_quota_short *found)
{
    for (int i = 0; i < KVK_QUOTA_TIERS && !space->is_public; i++) {
        uint64_t bytes = 0;
        for (uint32_t g = 0; g < space->group_count; g++) {
            const struct kvk_group *group = space->groups[g];
            bytes += group->tiers[i].present ? group->forms[i].block_bytes : 0;
        }
        if (quota->limit_bytes[i] > 0 && quota->limit_bytes[i] < bytes) {
            *found = (struct kvk_quota_short){.tier = (enum kvk_tier)i,
                                              .space_id = space->id,
                                              .limit_bytes = quota->limit_bytes[i],
                                              .block_bytes = bytes};
            return true;
        }
    }
    return false;
}

bool kvk_quota_is_short(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                        struct kvk_quota_short *found)
{
    const struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    if (state->tenant != tenant) {
        return false;
    }
    for (const struct kvk_space *space = state->spaces; space != NULL; space = space->tenant_next) {
        if (space_is_short(&state->quota, space, found)) {
            return true;
        }
    }
    return false;
}

void kvk_quota_short_text(struct kvk_cache *cache, const struct kvk_tenant *tenant, char *text,
                          size_t size)
{
    struct kvk_quota_short found;
    kvk_lock(&cache->lock);
    bool is_short = kvk_quota_is_short(cache, tenant, &found);
    kvk_unlock(&cache->lock);
    text[0] = '\0';
    if (is_short) {
        (void)snprintf(text, size,
                       "%s_limit_bytes is %llu, less than the %llu bytes of one block of space "
                       "%llu: nothing of it can lie in the %s tier",
                       tier_names[found.tier], (unsigned long long)found.limit_bytes,
                       (unsigned long long)found.block_bytes, (unsigned long long)found.space_id,
                       tier_names[found.tier]);
    }
}

static void short_log(const struct kvk_tenant *tenant, const struct kvk_quota_short *found)
{
    kvk_log(KVK_LOG_WARNING, "quota_below_block",
            "tenant_id=%llu space=%llu tier=%s limit_bytes=%llu block_bytes=%llu",
            (unsigned long long)tenant->id, (unsigned long long)found->space_id,
            tier_names[found->tier], (unsigned long long)found->limit_bytes,
            (unsigned long long)found->block_bytes);
}

/* ---- The tables ---- */

struct kvk_tenant_state *kvk_tenant_state_of(const struct kvk_cache *cache,
                                             const struct kvk_tenant *tenant)
{
    KVK_ASSERT(tenant->index < KVK_TENANT_COUNT_MAX);
    return &cache->tenant_states[tenant->index];
}

enum kvk_status kvk_tenant_states_create(struct kvk_cache *cache, struct kvk_error *error)
{
    cache->tenant_states = calloc(KVK_TENANT_COUNT_MAX, sizeof(*cache->tenant_states));
    if (cache->tenant_states == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for the cache");
    }
    for (uint32_t i = 0; i < kvk_tenants_count(cache->tenants); i++) {
        const struct kvk_tenant *tenant = kvk_tenants_get(cache->tenants, i);
        if (tenant == NULL) {
            continue;
        }
        enum kvk_status status = kvk_quota_sync(cache, tenant, error);
        if (status != KVK_OK && tenant->configured) {
            return status;
        }
    }
    return KVK_OK;
}

void kvk_quota_space_link(struct kvk_cache *cache, struct kvk_space *space)
{
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, space->tenant);
    space->tenant_next = state->spaces;
    state->spaces = space;
    kvk_metadata_add(cache, space->tenant, KVK_METADATA_SPACES, 1, kvk_metadata_of_space(space));
    for (uint32_t g = 0; g < space->group_count; g++) {
        for (int i = 0; i < KVK_TIER_COUNT; i++) {
            struct kvk_group_tier *at = &space->groups[g]->tiers[i];
            struct kvk_evict_queue *queues[] = {&at->queue, &at->clean, &at->held};
            for (size_t k = 0; k < sizeof(queues) / sizeof(queues[0]); k++) {
                queues[k]->share = &state->hint_share;
                queues[k]->block_bytes = space->groups[g]->forms[i].block_bytes;
                queues[k]->windowed = space->groups[g]->windowed;
            }
        }
    }
    struct kvk_quota_short found;
    if (space_is_short(&state->quota, space, &found)) {
        short_log(space->tenant, &found);
    }
    state->group_count += space->group_count;
}

void kvk_quota_space_unlink(struct kvk_cache *cache, struct kvk_space *space)
{
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, space->tenant);
    struct kvk_space **link = &state->spaces;
    while (*link != space) {
        KVK_ASSERT(*link != NULL);
        link = &(*link)->tenant_next;
    }
    *link = space->tenant_next;
    kvk_metadata_sub(cache, space->tenant, KVK_METADATA_SPACES, 1, kvk_metadata_of_space(space));
    KVK_ASSERT(state->group_count >= space->group_count);
    state->group_count -= space->group_count;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        state->limit_group[i] = NULL; /* it may have been one of this space's */
    }
}

/* ---- Setting ---- */

static enum kvk_status refuse_bytes(const char *what, int tier, uint64_t value, uint64_t limit,
                                    const char *reason, struct kvk_error *error)
{
    char field[KVK_ERROR_FIELD_SIZE];
    (void)snprintf(field, sizeof(field), "%s_%s_bytes", tier_names[tier], what);
    return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, field, value, limit,
                          "%s: %llu is more than %s: %llu", field, (unsigned long long)value,
                          reason, (unsigned long long)limit);
}

enum kvk_status kvk_quota_check(const struct kvk_tenant_quota *quota,
                                const uint64_t pool_bytes[KVK_TIER_COUNT],
                                const uint64_t guaranteed_bytes[KVK_TIER_COUNT],
                                struct kvk_error *error)
{
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        uint64_t guaranteed = quota->guaranteed_bytes[i];
        uint64_t limit = quota->limit_bytes[i];
        uint64_t left =
            pool_bytes[i] > guaranteed_bytes[i] ? pool_bytes[i] - guaranteed_bytes[i] : 0;
        if (guaranteed > pool_bytes[i]) {
            return refuse_bytes("guaranteed", i, guaranteed, pool_bytes[i], "the whole tier",
                                error);
        }
        if (guaranteed > left) {
            return refuse_bytes("guaranteed", i, guaranteed, left,
                                "what is not guaranteed to other tenants", error);
        }
        if (limit != 0 && guaranteed > limit) {
            return refuse_bytes("guaranteed", i, guaranteed, limit, "the tenant's own limit",
                                error);
        }
    }
    if (quota->over_quota > KVK_OVER_QUOTA_REFUSE) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "over_quota", quota->over_quota,
                              KVK_OVER_QUOTA_REFUSE, "over_quota: must be evict or refuse");
    }
    if (quota->metadata_limit_bytes % KVK_METADATA_UNIT != 0 ||
        quota->metadata_limit_bytes / KVK_METADATA_UNIT > UINT32_MAX) {
        return kvk_fail_limit(error, KVK_INVALID, KVK_CAUSE_FIELD, "metadata_limit_bytes",
                              quota->metadata_limit_bytes, KVK_METADATA_UNIT,
                              "metadata_limit_bytes: must be a whole number of MiB, or 0");
    }
    if (quota->request_burst > 0 && quota->requests_per_second == 0) {
        return kvk_fail(error, KVK_INVALID, KVK_CAUSE_FIELD, "request_burst",
                        "request_burst: has no meaning without requests_per_second");
    }
    return KVK_OK;
}

/* The bucket: a burst is how many requests may come at once; as many as a second has where it is
 * not said. */
static void rate_set(struct kvk_tenant_state *state, const struct kvk_tenant_quota *quota)
{
    uint64_t rate = quota->requests_per_second;
    uint64_t burst = quota->request_burst != 0 ? quota->request_burst : rate;
    uint64_t interval_ns = rate == 0 ? 0 : KVK_NS_PER_SECOND / rate;
    interval_ns = rate != 0 && interval_ns == 0 ? 1 : interval_ns;
    atomic_store(&state->rate_burst_ns, burst * interval_ns);
    atomic_store(&state->rate_interval_ns, interval_ns);
}

static uint64_t larger(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

/* What the tenant keeps from others in the tier. */
static uint64_t guarded_of(const struct kvk_tenant_state *state, int tier)
{
    return larger(state->bound_bytes[tier] + state->growth_bytes[tier],
                  state->quota.guaranteed_bytes[tier]);
}

/* A share of all that the tenant may use. */
static void hint_share_set(const struct kvk_cache *cache, struct kvk_tenant_state *state)
{
    uint64_t bytes = 0;
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        uint64_t limit = state->quota.limit_bytes[i];
        uint64_t pool = cache->tiers[i].pool.limit_bytes;
        bytes += limit != 0 && limit < pool ? limit : pool;
    }
    uint64_t percent = cache->config->hint_percent;
    state->hint_share.limit_bytes = bytes / 100 * percent + bytes % 100 * percent / 100;
}

static void quota_apply(struct kvk_cache *cache, struct kvk_tenant_state *state,
                        const struct kvk_tenant_quota *quota)
{
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        cache->tiers[i].guarded_bytes -= guarded_of(state, i);
        cache->tiers[i].guaranteed_bytes -= state->quota.guaranteed_bytes[i];
    }
    state->quota = *quota;
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        cache->tiers[i].guarded_bytes += guarded_of(state, i);
        cache->tiers[i].guaranteed_bytes += state->quota.guaranteed_bytes[i];
    }
    rate_set(state, quota);
    hint_share_set(cache, state);
    cache->trim_wanted = true;
}

enum kvk_status kvk_quota_set(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                              const struct kvk_tenant_quota *quota, struct kvk_error *error)
{
    uint64_t pool_bytes[KVK_TIER_COUNT] = {0};
    uint64_t guaranteed_bytes[KVK_TIER_COUNT] = {0};
    kvk_lock(&cache->lock);
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    if (state->tenant != tenant) { /* deleted meanwhile: its place is another's */
        kvk_unlock(&cache->lock);
        return KVK_OK;
    }
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        pool_bytes[i] = cache->tiers[i].pool.limit_bytes;
        guaranteed_bytes[i] = cache->tiers[i].guaranteed_bytes - state->quota.guaranteed_bytes[i];
    }
    enum kvk_status status = kvk_quota_check(quota, pool_bytes, guaranteed_bytes, error);
    struct kvk_quota_short found;
    bool is_short = false;
    if (status == KVK_OK) {
        quota_apply(cache, state, quota);
        is_short = kvk_quota_is_short(cache, tenant, &found);
    }
    kvk_unlock(&cache->lock);
    if (is_short) {
        short_log(tenant, &found);
    }
    return status;
}

enum kvk_status kvk_quota_sync(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                               struct kvk_error *error)
{
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    struct kvk_tenant_quota quota;
    struct kvk_error reason;
    if (atomic_load(&state->tenant) != tenant) {
        kvk_usage_begin(cache, tenant);
    }
    uint32_t version = kvk_tenant_quota_version(tenant);
    if (atomic_load(&state->quota_version) == version) {
        return KVK_OK;
    }
    kvk_tenant_quota(tenant, &quota);
    kvk_lock(&cache->lock);
    bool here = state->tenant == tenant;
    if (here) {
        atomic_store(&state->quota_version, version);
    }
    kvk_unlock(&cache->lock);
    if (!here) {
        return KVK_OK;
    }
    enum kvk_status status = kvk_quota_set(cache, tenant, &quota, &reason);
    if (status != KVK_OK) {
        /* It was possible when it was set, in other tiers than there are now. */
        kvk_log(KVK_LOG_WARNING, "quota_impossible", "tenant_id=%llu reason=\"%s\"",
                (unsigned long long)tenant->id, reason.text);
        if (error != NULL) {
            *error = reason;
        }
    }
    return status;
}

void kvk_quota_get(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                   struct kvk_tenant_quota *quota)
{
    kvk_lock(&cache->lock);
    *quota = kvk_tenant_state_of(cache, tenant)->quota;
    kvk_unlock(&cache->lock);
}

/* ---- What is bound ---- */

static void part_change(uint64_t *part, uint64_t bytes, bool add)
{
    KVK_ASSERT(add || *part >= bytes);
    *part = add ? *part + bytes : *part - bytes;
}

void kvk_quota_bound_change(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                            enum kvk_tier tier, uint64_t bytes, bool add)
{
    struct kvk_tier_state *at = &cache->tiers[tier];
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    at->guarded_bytes -= guarded_of(state, tier);
    part_change(&at->bound_bytes, bytes, add);
    part_change(&state->bound_bytes[tier], bytes, add);
    at->guarded_bytes += guarded_of(state, tier);
}

void kvk_quota_growth_change(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                             enum kvk_tier tier, uint64_t before_bytes, uint64_t after_bytes)
{
    struct kvk_tier_state *at = &cache->tiers[tier];
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    at->guarded_bytes -= guarded_of(state, tier);
    part_change(&at->growth_bytes, before_bytes, false);
    part_change(&at->growth_bytes, after_bytes, true);
    part_change(&state->growth_bytes[tier], before_bytes, false);
    part_change(&state->growth_bytes[tier], after_bytes, true);
    at->guarded_bytes += guarded_of(state, tier);
}

/* ---- Limits and shares ---- */

static uint64_t used_by(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                        enum kvk_tier tier)
{
    const uint64_t *bytes = cache->tiers[tier].tenant_bytes; /* NULL: there is no such tier */
    return bytes != NULL ? bytes[tenant->index] : 0;
}

uint64_t kvk_quota_left(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                        enum kvk_tier tier)
{
    uint64_t limit = kvk_tenant_state_of(cache, tenant)->quota.limit_bytes[tier];
    uint64_t used = used_by(cache, tenant, tier);
    if (limit == 0) {
        return UINT64_MAX;
    }
    return limit > used ? limit - used : 0;
}

bool kvk_quota_is_full(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                       enum kvk_tier tier, uint64_t bytes)
{
    return kvk_quota_left(cache, tenant, tier) < bytes;
}

uint64_t kvk_quota_spare(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                         enum kvk_tier tier)
{
    uint64_t guaranteed = kvk_tenant_state_of(cache, tenant)->quota.guaranteed_bytes[tier];
    uint64_t used = used_by(cache, tenant, tier);
    return used > guaranteed ? used - guaranteed : 0;
}

bool kvk_quota_is_due(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                      enum kvk_tier tier, uint64_t bytes)
{
    uint64_t guaranteed = kvk_tenant_state_of(cache, tenant)->quota.guaranteed_bytes[tier];
    return guaranteed > 0 && used_by(cache, tenant, tier) + bytes <= guaranteed;
}

enum kvk_quota_verdict kvk_quota_admits(const struct kvk_cache *cache,
                                        const struct kvk_tenant *tenant, enum kvk_tier tier,
                                        uint64_t needed_bytes, uint64_t growth_bytes,
                                        uint64_t own_growth_bytes)
{
    const struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    const struct kvk_tier_state *at = &cache->tiers[tier];
    const struct kvk_tenant_quota *quota = &state->quota;
    uint64_t limit = quota->limit_bytes[tier];
    KVK_ASSERT(state->growth_bytes[tier] >= own_growth_bytes);
    uint64_t bound = state->bound_bytes[tier] + state->growth_bytes[tier] - own_growth_bytes;
    uint64_t wanted = needed_bytes + growth_bytes;
    /* What evicting all that is idle would leave; or, where nothing may be evicted, all of it. */
    uint64_t stays = bound;
    if (quota->over_quota == KVK_OVER_QUOTA_REFUSE) {
        stays = bound - state->bound_bytes[tier] + used_by(cache, tenant, tier);
    }
    if (limit != 0 && (stays > limit || wanted > limit - stays)) {
        return KVK_QUOTA_LIMIT;
    }
    if (bound + wanted <= quota->guaranteed_bytes[tier] || at->guaranteed_bytes == 0) {
        return KVK_QUOTA_OK;
    }
    uint64_t others = at->guarded_bytes - guarded_of(state, tier) + at->stray_bytes;
    uint64_t pool = at->pool.limit_bytes;
    bool fits = others <= pool && bound <= pool - others && wanted <= pool - others - bound;
    return fits ? KVK_QUOTA_OK : KVK_QUOTA_GUARANTEED;
}

enum kvk_status kvk_quota_fail(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                               enum kvk_tier tier, uint64_t needed_bytes,
                               enum kvk_quota_verdict verdict, struct kvk_error *error)
{
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    uint64_t limit = state->quota.limit_bytes[tier];
    uint64_t used = used_by(cache, tenant, tier);
    char field[KVK_ERROR_FIELD_SIZE];
    if (verdict == KVK_QUOTA_LIMIT) {
        (void)snprintf(field, sizeof(field), "%s_limit_bytes", tier_names[tier]);
        (void)kvk_fail_limit(
            error, KVK_EXHAUSTED, KVK_CAUSE_TENANT_LIMIT, field, needed_bytes, limit,
            "%llu bytes do not fit in the tenant's limit of the %s tier, %llu (it has %llu, in use "
            "%llu)",
            (unsigned long long)needed_bytes, tier_names[tier], (unsigned long long)limit,
            (unsigned long long)used, (unsigned long long)state->bound_bytes[tier]);
        kvk_error_retry(error, needed_bytes > limit ? 0 : RETRY_MS);
        return KVK_EXHAUSTED;
    }
    KVK_ASSERT(verdict == KVK_QUOTA_GUARANTEED);
    (void)snprintf(field, sizeof(field), "%s_guaranteed_bytes", tier_names[tier]);
    (void)kvk_fail_limit(
        error, KVK_EXHAUSTED, KVK_CAUSE_GUARANTEED, field, needed_bytes,
        cache->tiers[tier].pool.limit_bytes,
        "%llu bytes more in use would leave less of the %s tier than other tenants are guaranteed",
        (unsigned long long)needed_bytes, tier_names[tier]);
    kvk_error_retry(error, RETRY_MS);
    return KVK_EXHAUSTED;
}

/* ---- Holds ---- */

void kvk_quota_mark(const struct kvk_cache *cache, const struct kvk_tenant *tenant,
                    struct kvk_quota_mark *mark)
{
    const struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        mark->bound_bytes[i] = state->bound_bytes[i];
    }
}

enum kvk_status kvk_quota_check_holds(const struct kvk_cache *cache,
                                      const struct kvk_tenant *tenant,
                                      const struct kvk_quota_mark *mark, struct kvk_error *error)
{
    const struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    for (int i = 0; i < KVK_QUOTA_TIERS; i++) {
        const struct kvk_tier_state *at = &cache->tiers[i];
        uint64_t bound = state->bound_bytes[i] + state->growth_bytes[i];
        if (at->guaranteed_bytes > 0 && state->bound_bytes[i] > mark->bound_bytes[i] &&
            bound > state->quota.guaranteed_bytes[i] &&
            at->guarded_bytes + at->stray_bytes > at->pool.limit_bytes) {
            return kvk_quota_fail(cache, tenant, (enum kvk_tier)i,
                                  state->bound_bytes[i] - mark->bound_bytes[i],
                                  KVK_QUOTA_GUARANTEED, error);
        }
    }
    return KVK_OK;
}

/* ---- Counts ---- */

enum kvk_status kvk_quota_check_count(const struct kvk_tenant_state *state, bool sequences,
                                      uint32_t more, struct kvk_error *error)
{
    const char *name = sequences ? "sequences" : "leases";
    uint32_t count = sequences ? state->sequences : state->leases;
    uint32_t limit = sequences ? state->quota.sequences : state->quota.leases;
    if (limit == 0 || (count <= limit && more <= limit - count)) {
        return KVK_OK;
    }
    (void)kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_TENANT_LIMIT, name, count, limit,
                         "the tenant's limit of %s is reached: %u", name, limit);
    kvk_error_retry(error, RETRY_MS);
    return KVK_EXHAUSTED;
}

/* ---- The rate ---- */

const struct kvk_tenant *kvk_rate_tenant(struct kvk_cache *cache,
                                         const struct kvk_credential *credential,
                                         uint64_t session_id, uint64_t space_id)
{
    const struct kvk_tenant *tenant = credential->tenants[0];
    kvk_lock(&cache->lock);
    if (session_id != 0) {
        const struct kvk_session *session = kvk_table_get(&cache->session_table, session_id);
        tenant = session != NULL ? session->tenant : NULL;
    } else if (space_id != 0) {
        const struct kvk_space *space = kvk_table_get(&cache->space_table, space_id);
        tenant = space != NULL ? space->tenant : NULL;
    }
    kvk_unlock(&cache->lock);
    return tenant != NULL && kvk_credential_allows(credential, tenant) ? tenant : NULL;
}

/*
 * The bucket as one number: the time at which it would be full again. A request moves it on by one
 * interval, and is let in where it then lies no further ahead than the burst.
 */
enum kvk_status kvk_rate_take(struct kvk_cache *cache, const struct kvk_tenant *tenant,
                              struct kvk_error *error)
{
    struct kvk_tenant_state *state = kvk_tenant_state_of(cache, tenant);
    if (atomic_load_explicit(&state->tenant, memory_order_acquire) != tenant) {
        (void)kvk_quota_sync(cache, tenant, NULL); /* its first request */
    }
    uint64_t interval_ns = atomic_load_explicit(&state->rate_interval_ns, memory_order_relaxed);
    if (interval_ns == 0) {
        atomic_fetch_add_explicit(&state->rate_requests, 1, memory_order_relaxed);
        return KVK_OK;
    }
    uint64_t burst_ns = atomic_load_explicit(&state->rate_burst_ns, memory_order_relaxed);
    uint64_t now_ns = kvk_clock_now(cache->clock);
    uint64_t before_ns = atomic_load_explicit(&state->rate_full_ns, memory_order_relaxed);
    for (int i = 0; i < RATE_TRIES; i++) {
        uint64_t full_ns = larger(before_ns, now_ns) + interval_ns;
        if (full_ns > now_ns + burst_ns) {
            break;
        }
        if (atomic_compare_exchange_weak_explicit(&state->rate_full_ns, &before_ns, full_ns,
                                                  memory_order_relaxed, memory_order_relaxed)) {
            atomic_fetch_add_explicit(&state->rate_requests, 1, memory_order_relaxed);
            return KVK_OK;
        }
    }
    atomic_fetch_add_explicit(&state->rate_refusals, 1, memory_order_relaxed);
    uint64_t rate = KVK_NS_PER_SECOND / interval_ns;
    uint64_t full_ns = larger(before_ns, now_ns) + interval_ns;
    uint64_t wait_ns = full_ns > now_ns + burst_ns ? full_ns - now_ns - burst_ns : 0;
    (void)kvk_fail_limit(error, KVK_EXHAUSTED, KVK_CAUSE_TENANT_LIMIT, "requests_per_second", rate,
                         rate, "the tenant's rate of requests is reached: %llu a second",
                         (unsigned long long)rate);
    kvk_error_retry(error, (wait_ns + KVK_NS_PER_MS - 1) / KVK_NS_PER_MS);
    return KVK_EXHAUSTED;
}

/* ---- What is left to do ---- */

#define TRIM_BLOCKS 256 /* that one round evicts */

/* Evict what is idle of a tenant above its limit. False: the round has done enough. */
static bool trim_tenant_drops(struct kvk_cache *cache, struct kvk_tenant_state *state,
                              enum kvk_tier tier, uint32_t *blocks, bool *above)
{
    while (*blocks < TRIM_BLOCKS) {
        uint64_t limit = state->quota.limit_bytes[tier];
        if (state->tenant == NULL || limit == 0 || used_by(cache, state->tenant, tier) <= limit) {
            return true;
        }
        *above = true;
        struct kvk_room_choice choice;
        kvk_room_choose_own(cache, state->tenant, tier, &choice);
        if (choice.step == KVK_ROOM_EVICT) {
            ++*blocks;
            bool applied = kvk_room_apply(cache, choice.giver, tier, &choice);
            KVK_ASSERT(applied);
        } else if (choice.step == KVK_ROOM_DEMOTE) {
            uint64_t over = used_by(cache, state->tenant, tier) - limit;
            uint64_t bytes = choice.giver->forms[tier].block_bytes;
            uint64_t count = (over + bytes - 1) / bytes;
            count = count < TRIM_BLOCKS ? count : TRIM_BLOCKS;
            enum kvk_status status =
                kvk_room_demote_own_drops(cache, choice.giver, (uint32_t)count, NULL);
            *blocks += (uint32_t)count;
            return status == KVK_OK; /* else the next round */
        } else {
            return true; /* held: until it is let go */
        }
    }
    return false;
}

static void trim_drops(struct kvk_cache *cache)
{
    uint32_t blocks = 0;
    bool above = false;
    for (uint32_t i = 0; i < KVK_TENANT_COUNT_MAX; i++) {
        struct kvk_tenant_state *state = &cache->tenant_states[i];
        for (int tier = 0; tier < KVK_MEMORY_TIER_COUNT; tier++) {
            if (!trim_tenant_drops(cache, state, (enum kvk_tier)tier, &blocks, &above)) {
                return;
            }
        }
        uint64_t disk_limit = state->quota.limit_bytes[KVK_TIER_DISK];
        if (state->tenant != NULL && disk_limit != 0 &&
            used_by(cache, state->tenant, KVK_TIER_DISK) > disk_limit) {
            above = true;
            kvk_disk_trim(cache, state, TRIM_BLOCKS);
        }
    }
    cache->trim_wanted = above;
}

/* Quotas that were changed, and tenants that came. */
static void sync_drops(struct kvk_cache *cache)
{
    kvk_unlock(&cache->lock);
    for (uint32_t i = 0; i < kvk_tenants_count(cache->tenants); i++) {
        const struct kvk_tenant *tenant = kvk_tenants_get(cache->tenants, i);
        if (tenant != NULL && !kvk_tenant_is_leaving(tenant)) {
            (void)kvk_quota_sync(cache, tenant, NULL);
        }
    }
    kvk_lock(&cache->lock);
}

void kvk_quota_maintain_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    sync_drops(cache);
    if (cache->trim_wanted) {
        trim_drops(cache);
    }
    kvk_idle_round(cache);
}
