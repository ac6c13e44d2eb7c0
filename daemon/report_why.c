/*
 * Why was I refused? The journal of refusals, and a sentence or two about what stands in the way
 * now: the largest thing that fills the tightest tier, whose it is and how old, so that an operator
 * knows what to close, release or enlarge. Never tokens; another tenant's names only for admins.
 */
#include "daemon/report_internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"

#define AGE_TEXT_SIZE 32

/* ---- Words ---- */

static const char *age_text(uint64_t age_ns, char text[AGE_TEXT_SIZE])
{
    uint64_t seconds = age_ns / KVK_NS_PER_SECOND;

    if (seconds < 120) {
        (void)snprintf(text, AGE_TEXT_SIZE, "%llu s", (unsigned long long)seconds);
    } else if (seconds < 7200) {
        (void)snprintf(text, AGE_TEXT_SIZE, "%llu min", (unsigned long long)(seconds / 60));
    } else {
        (void)snprintf(text, AGE_TEXT_SIZE, "%llu h", (unsigned long long)(seconds / 3600));
    }
    return text;
}

static const char *tier_name(int tier)
{
    return tier == KVK_TIER_DEVICE ? "device" : "host";
}

static unsigned percent(uint64_t part, uint64_t whole)
{
    return whole == 0 ? 0 : (unsigned)((double)part / (double)whole * 100.0 + 0.5);
}

/* ---- What there is to say: gathered with the lock held, in slices ---- */

struct holders {
    const struct kvk_tenant *tenant; /* who has the most; NULL: nobody */
    uint32_t count;                  /* its sequences or leases */
    uint64_t oldest_ns;              /* begun; UINT64_MAX: none */
    uint64_t oldest_id;
    char instance[KVK_NAME_SIZE]; /* of the oldest */
};

struct situation {
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    int tier; /* the one that is told about: the tightest */
    struct holders sequences;
    struct holders leases;
    uint32_t waiting_processes;
    int32_t waiting_pid;
    uint64_t now_ns;
    uint64_t lease_now_ns;
};

static const struct kvk_tenant *largest_tenant(const struct kvk_cache *cache,
                                               const struct kvk_scope *scope, int tier)
{
    const struct kvk_tenant *found = NULL;
    uint64_t most = 0;

    for (uint32_t i = 0; i < kvk_tenants_count(cache->tenants); i++) {
        const struct kvk_tenant *tenant = kvk_tenants_get(cache->tenants, i);
        uint64_t bytes = cache->tiers[tier].tenant_bytes[i];
        if (tenant != NULL && bytes > most && kvk_scope_sees(scope, tenant)) {
            most = bytes;
            found = tenant;
        }
    }
    return found;
}

static void holder_add(struct holders *holders, uint64_t begun_ns, uint64_t id,
                       const struct kvk_instance *instance)
{
    holders->count++;
    if (begun_ns < holders->oldest_ns) {
        holders->oldest_ns = begun_ns;
        holders->oldest_id = id;
        memcpy(holders->instance, instance->name, sizeof(holders->instance));
    }
}

/* Sequences of the tenant that has the most in the tier, and leases that are seen. */
static void holders_gather_drops(struct kvk_cache *cache, const struct kvk_scope *scope,
                                 struct situation *situation)
{
    const struct kvk_table_entry *entry;
    uint64_t work = 0;
    size_t place = 0;

    situation->sequences.tenant = largest_tenant(cache, scope, situation->tier);
    for (size_t before = 0; (entry = kvk_table_next(&cache->sequence_table, &place)) != NULL;
         before = place) {
        const struct kvk_sequence *sequence = (const struct kvk_sequence *)entry->value;
        bool here = sequence->state == KVK_SEQUENCE_RUNNING ? (int)sequence->home == situation->tier
                                                            : situation->tier == KVK_TIER_HOST;
        if (here && sequence->space->tenant == situation->sequences.tenant) {
            holder_add(&situation->sequences, sequence->opened_ns, sequence->id,
                       sequence->instance);
        }
        kvk_report_slice_drops(cache, &work, place - before);
    }
    place = 0;
    for (size_t before = 0; (entry = kvk_table_next(&cache->lease_table, &place)) != NULL;
         before = place) {
        const struct kvk_lease *lease = (const struct kvk_lease *)entry->value;
        if (kvk_scope_sees(scope, lease->space->tenant)) {
            holder_add(&situation->leases, lease->begun_ns, lease->id, lease->instance);
        }
        kvk_report_slice_drops(cache, &work, place - before);
    }
}

static void waiting_gather(const struct kvk_cache *cache, struct situation *situation)
{
    const struct kvk_table_entry *entry;
    size_t place = 0;

    while ((entry = kvk_table_next(&cache->session_table, &place)) != NULL) {
        const struct kvk_session *session = (const struct kvk_session *)entry->value;
        if (session->quarantine_count > 0) {
            situation->waiting_processes++;
            situation->waiting_pid = session->pid;
        }
    }
}

/* The tier where the smallest share could still be had. */
static int tightest_tier(const struct kvk_tier_report tiers[KVK_TIER_COUNT])
{
    int found = -1;
    double least = 2;

    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if (tiers[i].limit_bytes == 0) {
            continue;
        }
        double share = (double)tiers[i].largest_admissible_bytes / (double)tiers[i].limit_bytes;
        if (share < least) {
            least = share;
            found = i;
        }
    }
    return found;
}

static void situation_gather_drops(struct kvk_cache *cache, const struct kvk_scope *scope,
                                   struct situation *situation)
{
    *situation = (struct situation){
        .sequences.oldest_ns = UINT64_MAX, .leases.oldest_ns = UINT64_MAX, .tier = -1};
    situation->now_ns = kvk_clock_now(cache->clock);
    situation->lease_now_ns = kvk_lease_clock(cache);
    kvk_report_tiers(cache, scope, situation->tiers);
    situation->tier = tightest_tier(situation->tiers);
    if (situation->tier < 0) {
        return;
    }
    if (kvk_scope_is_all(scope)) {
        waiting_gather(cache, situation);
    }
    holders_gather_drops(cache, scope, situation);
}

/* ---- Saying it ---- */

struct advice {
    char *text; /* [size] */
    size_t size;
    size_t used;
};

KVK_PRINTF(2, 3)
static void say(struct advice *advice, const char *format, ...)
{
    va_list arguments;

    if (advice->used + 1 >= advice->size) {
        return;
    }
    va_start(arguments, format);
    int size =
        vsnprintf(advice->text + advice->used, advice->size - advice->used, format, arguments);
    va_end(arguments);
    size_t left = advice->size - advice->used - 1;
    advice->used += size < 0 ? 0 : (size_t)size < left ? (size_t)size : left;
}

static uint64_t since(uint64_t now_ns, uint64_t then_ns)
{
    return now_ns > then_ns ? now_ns - then_ns : 0;
}

static void say_sequences(struct advice *advice, const struct situation *situation)
{
    const struct kvk_tier_report *tier = &situation->tiers[situation->tier];
    const struct holders *sequences = &situation->sequences;
    char age[AGE_TEXT_SIZE];

    if (sequences->tenant == NULL || sequences->count == 0) {
        say(advice, "The %s tier is bound to %u %% by sequences.", tier_name(situation->tier),
            percent(tier->active_bytes, tier->limit_bytes));
        return;
    }
    say(advice,
        "The %s tier is bound to %u %% by sequences; tenant %.64s has the most of it, with %u of "
        "them, the oldest (%llu, instance \"%.64s\") open for %s. Swap some out, or close them.",
        tier_name(situation->tier), percent(tier->active_bytes, tier->limit_bytes),
        sequences->tenant->name, sequences->count, (unsigned long long)sequences->oldest_id,
        sequences->instance, age_text(since(situation->now_ns, sequences->oldest_ns), age));
}

static void say_leases(struct advice *advice, const struct situation *situation)
{
    const struct kvk_tier_report *tier = &situation->tiers[situation->tier];
    const struct holders *leases = &situation->leases;
    char age[AGE_TEXT_SIZE];

    say(advice, "%u leases bind %u %% of the %s tier", leases->count,
        percent(tier->leased_bytes, tier->limit_bytes), tier_name(situation->tier));
    if (leases->count > 0) {
        say(advice, "; the oldest (%llu, instance \"%.64s\") is held for %s",
            (unsigned long long)leases->oldest_id, leases->instance,
            age_text(since(situation->lease_now_ns, leases->oldest_ns), age));
    }
    say(advice, ". They end by Release or by their time.");
}

static void say_largest(struct advice *advice, const struct situation *situation)
{
    const struct kvk_tier_report *tier = &situation->tiers[situation->tier];
    char bytes[KVK_BYTES_TEXT_SIZE];
    const uint64_t parts[] = {tier->active_bytes, tier->leased_bytes, tier->growth_bytes,
                              tier->quarantine_bytes, tier->copying_bytes};
    size_t largest = 0;

    for (size_t i = 1; i < sizeof(parts) / sizeof(parts[0]); i++) {
        largest = parts[i] > parts[largest] ? i : largest;
    }
    switch (largest) {
    case 0:
        say_sequences(advice, situation);
        break;
    case 1:
        say_leases(advice, situation);
        break;
    case 2:
        say(advice,
            "%s of the %s tier are kept for the growth that running sequences asked for. Ask for "
            "less growth_tokens, or close some.",
            kvk_bytes_text(tier->growth_bytes, bytes), tier_name(situation->tier));
        break;
    case 3:
        say(advice,
            "%s of the %s tier wait for %u processes whose sessions ended but which may still "
            "write there, such as pid %d: end them.",
            kvk_bytes_text(tier->quarantine_bytes, bytes), tier_name(situation->tier),
            situation->waiting_processes, situation->waiting_pid);
        break;
    default:
        say(advice, "%s of the %s tier are being copied and come back by themselves: try again.",
            kvk_bytes_text(tier->copying_bytes, bytes), tier_name(situation->tier));
        break;
    }
}

/* What a tenant may know: its own part, and what it could still have. */
static void say_own(struct advice *advice, const struct situation *situation)
{
    const struct kvk_tier_report *tier = &situation->tiers[situation->tier];
    char used[KVK_BYTES_TEXT_SIZE];
    char room[KVK_BYTES_TEXT_SIZE];
    char age[AGE_TEXT_SIZE];

    say(advice, "You use %s of the %s tier (%u %%), and up to %s could be had at once.",
        kvk_bytes_text(tier->used_bytes, used), tier_name(situation->tier),
        percent(tier->used_bytes, tier->limit_bytes),
        kvk_bytes_text(tier->largest_admissible_bytes, room));
    if (situation->sequences.count > 0) {
        say(advice, " You have %u sequences there, the oldest (%llu) open for %s.",
            situation->sequences.count, (unsigned long long)situation->sequences.oldest_id,
            age_text(since(situation->now_ns, situation->sequences.oldest_ns), age));
    }
}

static void advise(const struct situation *situation, const struct kvk_scope *scope,
                   struct advice *advice)
{
    char room[KVK_BYTES_TEXT_SIZE];
    char scattered[KVK_BYTES_TEXT_SIZE];

    if (situation->tier < 0) {
        return;
    }
    const struct kvk_tier_report *tier = &situation->tiers[situation->tier];
    if (!kvk_scope_is_all(scope)) {
        say_own(advice, situation);
        return;
    }
    /* A tenth that could be had is enough for most requests. */
    if (tier->largest_admissible_bytes > tier->limit_bytes / 10) {
        say(advice, "Nothing stands in the way: up to %s of the %s tier could be had at once.",
            kvk_bytes_text(tier->largest_admissible_bytes, room), tier_name(situation->tier));
    } else {
        say_largest(advice, situation);
    }
    if (tier->scattered_bytes > tier->limit_bytes / 4) {
        say(advice, " %s are free in slabs of other geometry, which are handed over as they empty.",
            kvk_bytes_text(tier->scattered_bytes, scattered));
    }
}

/* Where blocks of host memory were attended last, where there was a choice. */
static void say_attention(struct advice *advice, const struct kvk_attention_choice *choice)
{
    const double ms = 1e6;

    switch (choice->place) {
    case KVK_ATTENTION_NO_CHOICE:
        return;
    case KVK_ATTENTION_IN_PLACE:
        say(advice, " Blocks in host memory were last attended by the CPU");
        break;
    case KVK_ATTENTION_BROUGHT_IN:
        say(advice, " Blocks in host memory were last brought to the device to be attended");
        break;
    }
    if (choice->in_place_ns == 0 || choice->bring_in_ns == 0) {
        say(advice, ", since it is not yet measured what is quicker.");
        return;
    }
    say(advice, ": %.1f ms there were estimated against %.1f ms of bringing them in.",
        (double)choice->in_place_ns / ms, (double)choice->bring_in_ns / ms);
}

/* ---- The journal ---- */

/* Newest first. */
static uint32_t journal_copy(const struct kvk_cache *cache, const struct kvk_scope *scope,
                             uint64_t sequence_id, struct kvk_refusal *refusals, uint32_t limit)
{
    uint64_t first =
        cache->refusal_count > KVK_REFUSAL_COUNT ? cache->refusal_count - KVK_REFUSAL_COUNT : 0;
    uint32_t count = 0;

    for (uint64_t i = cache->refusal_count; i > first && count < limit; i--) {
        const struct kvk_refusal *refusal = &cache->refusals[(i - 1) % KVK_REFUSAL_COUNT];
        bool seen = refusal->tenant != NULL ? kvk_scope_sees(scope, refusal->tenant)
                                            : kvk_scope_is_all(scope);
        if (seen && (sequence_id == 0 || refusal->sequence_id == sequence_id)) {
            refusals[count] = *refusal;
            count++;
        }
    }
    return count;
}

enum kvk_status kvk_report_why(struct kvk_cache *cache, const struct kvk_caller *caller,
                               struct kvk_view tenant, uint64_t sequence_id,
                               struct kvk_refusal *refusals, uint32_t limit, uint32_t *count,
                               struct kvk_tier_report tiers[KVK_TIER_COUNT], char *advice,
                               size_t advice_size, struct kvk_error *error)
{
    struct kvk_scope scope;
    struct situation situation;
    struct advice words = {.text = advice, .size = advice_size};

    enum kvk_status status = kvk_scope_init(cache, caller, tenant, &scope, error);
    if (status != KVK_OK) {
        return status;
    }
    kvk_lock(&cache->lock);
    *count = journal_copy(cache, &scope, sequence_id, refusals, limit);
    situation_gather_drops(cache, &scope, &situation);
    const struct kvk_attention_choice attention = cache->attention.last;
    kvk_unlock(&cache->lock);
    memcpy(tiers, situation.tiers, sizeof(situation.tiers));
    if (advice_size > 0) {
        advice[0] = '\0';
    }
    advise(&situation, &scope, &words);
    if (kvk_scope_is_all(&scope)) {
        say_attention(&words, &attention);
    }
    return KVK_OK;
}

void kvk_report_memory(struct kvk_cache *cache, uint64_t *metadata_bytes, uint64_t *workspace_bytes)
{
    kvk_lock(&cache->lock);
    *metadata_bytes = kvk_cache_metadata_bytes(cache);
    *workspace_bytes = kvk_cache_workspace_bytes(cache);
    kvk_unlock(&cache->lock);
}
