/*
 * An operator's look at the daemon from a test: what each tier holds, and what is held by whom.
 *
 * Instances whose name begins with "keep" are those of bystanders, which go on while others are
 * killed; what they hold is not counted among what must be free.
 */
#ifndef KVK_TESTS_DAEMON_LOOK_H
#define KVK_TESTS_DAEMON_LOOK_H

#include "tests/daemon_worker.h"

#define ADMIN_METHOD(name) "/kvkeep.v1.Admin/" name
#define KEPT_MAX 64

struct tier_look {
    uint64_t limit, used, free, slabs, quarantine, stray, growth;
};

struct look {
    char target[96];
    char tenant[32];           /* told: whose things are counted; empty: everybody's */
    struct tier_look tiers[4]; /* by enum kvkeep_tier, of all tenants */
    uint64_t reserved, active, sealed, shared, evictable;
    uint64_t device_blocks, host_blocks;
    uint64_t sequences, leases, transfers, instances, sessions, lost_sessions, quarantine_blocks;
    uint64_t kept[KEPT_MAX]; /* ids of bystanders' instances */
    uint32_t kept_count;
    uint64_t copy_delay_us; /* told to look_set_delay() */
};

static inline void look_tiers(struct look *look)
{
    Kvkeep__V1__GetOccupancyRequest request = KVKEEP__V1__GET_OCCUPANCY_REQUEST__INIT;
    Kvkeep__V1__GetOccupancyResponse *response = NULL;
    request.tenant = kvkeep_text(look->tenant);
    CHECK_OK(worker_call(ADMIN_METHOD("GetOccupancy"), &request.base,
                         &kvkeep__v1__get_occupancy_response__descriptor, &response));
    memset(look->tiers, 0, sizeof(look->tiers));
    look->reserved = look->active = look->sealed = look->shared = look->evictable = 0;
    look->device_blocks = look->host_blocks = 0;
    for (size_t i = 0; i < response->n_tiers; i++) {
        const Kvkeep__V1__TierUse *tier = response->tiers[i];
        CHECK(tier->tier >= 1 && tier->tier <= 3, "tier %d", (int)tier->tier);
        look->tiers[tier->tier] = (struct tier_look){.limit = tier->limit_bytes,
                                                     .used = tier->used_bytes,
                                                     .free = tier->free_bytes,
                                                     .slabs = tier->slab_bytes,
                                                     .quarantine = tier->quarantine_bytes,
                                                     .stray = tier->stray_bytes,
                                                     .growth = tier->growth_bytes};
    }
    for (size_t i = 0; i < response->n_rows; i++) {
        const Kvkeep__V1__OccupancyRow *row = response->rows[i];
        look->reserved += row->counts->reserved;
        look->active += row->counts->active;
        look->sealed += row->counts->sealed;
        look->shared += row->counts->shared;
        look->evictable += row->counts->evictable;
        look->device_blocks += row->device_blocks;
        look->host_blocks += row->host_blocks;
    }
    message_free(response);
}

static inline bool look_is_kept(const struct look *look, uint64_t instance_id)
{
    for (uint32_t i = 0; i < look->kept_count; i++) {
        if (look->kept[i] == instance_id) {
            return true;
        }
    }
    return false;
}

static inline void look_instances(struct look *look)
{
    Kvkeep__V1__ListInstancesRequest request = KVKEEP__V1__LIST_INSTANCES_REQUEST__INIT;
    Kvkeep__V1__ListInstancesResponse *response = NULL;
    request.tenant = kvkeep_text(look->tenant);
    CHECK_OK(worker_call(ADMIN_METHOD("ListInstances"), &request.base,
                         &kvkeep__v1__list_instances_response__descriptor, &response));
    look->instances = look->sessions = look->lost_sessions = look->quarantine_blocks = 0;
    look->kept_count = 0;
    for (size_t i = 0; i < response->n_instances; i++) {
        const Kvkeep__V1__InstanceInfo *instance = response->instances[i];
        if (instance->name.len >= 4 && memcmp(instance->name.data, "keep", 4) == 0) {
            CHECK(look->kept_count < KEPT_MAX, "too many bystanders");
            look->kept[look->kept_count] = instance->instance_id;
            look->kept_count++;
            continue;
        }
        look->instances++;
        look->quarantine_blocks += instance->quarantine_blocks;
        for (size_t j = 0; j < instance->n_sessions; j++) {
            look->sessions++;
            look->lost_sessions += instance->sessions[j]->connected ? 0 : 1;
        }
    }
    message_free(response);
}

static inline void look_holders(struct look *look)
{
    Kvkeep__V1__ListSequencesRequest sequences = KVKEEP__V1__LIST_SEQUENCES_REQUEST__INIT;
    Kvkeep__V1__ListSequencesResponse *listed = NULL;
    sequences.tenant = kvkeep_text(look->tenant);
    CHECK_OK(worker_call(ADMIN_METHOD("ListSequences"), &sequences.base,
                         &kvkeep__v1__list_sequences_response__descriptor, &listed));
    look->sequences = look->leases = look->transfers = 0;
    for (size_t i = 0; i < listed->n_sequences; i++) {
        look->sequences += look_is_kept(look, listed->sequences[i]->instance_id) ? 0 : 1;
    }
    message_free(listed);

    Kvkeep__V1__ListLeasesRequest leases = KVKEEP__V1__LIST_LEASES_REQUEST__INIT;
    Kvkeep__V1__ListLeasesResponse *leased = NULL;
    leases.tenant = kvkeep_text(look->tenant);
    CHECK_OK(worker_call(ADMIN_METHOD("ListLeases"), &leases.base,
                         &kvkeep__v1__list_leases_response__descriptor, &leased));
    for (size_t i = 0; i < leased->n_leases; i++) {
        if (!look_is_kept(look, leased->leases[i]->instance_id)) {
            look->leases++;
            look->transfers += leased->leases[i]->open_transfers;
        }
    }
    message_free(leased);
}

/* ---- tasks of the observer, an agent without a session ---- */

static inline void observe(void *shared)
{
    struct look *look = shared;
    if (self.client == NULL) {
        worker_connect(&(struct worker_options){.target = look->target, .timeout_ms = 10000});
    }
    look_tiers(look);
    look_instances(look);
    look_holders(look);
}

static inline void observe_tiers(void *shared)
{
    struct look *look = shared;
    if (self.client == NULL) {
        worker_connect(&(struct worker_options){.target = look->target, .timeout_ms = 10000});
    }
    look_tiers(look);
}

static inline void look_set_delay(void *shared)
{
    const struct look *look = shared;
    Kvkeep__V1__TestControlRequest request = KVKEEP__V1__TEST_CONTROL_REQUEST__INIT;
    Kvkeep__V1__TestControlResponse *response = NULL;
    if (self.client == NULL) {
        worker_connect(&(struct worker_options){.target = look->target, .timeout_ms = 10000});
    }
    request.set_copy_delay = true;
    request.copy_delay_us = look->copy_delay_us;
    CHECK_OK(worker_call(ADMIN_METHOD("TestControl"), &request.base,
                         &kvkeep__v1__test_control_response__descriptor, &response));
    message_free(response);
}

static inline void forget_tenant(void *shared)
{
    worker_forget_all(((const struct look *)shared)->tenant);
}

/* ---- the master's words ---- */

/* Copies take so long for each piece from now on. */
static inline void copies_take(struct agent *observer, struct look *look, uint64_t delay_us)
{
    look->copy_delay_us = delay_us;
    agent_do(observer, look_set_delay, look);
}

static inline bool nothing_is_held(const struct look *look)
{
    return look->sequences == 0 && look->leases == 0 && look->transfers == 0 &&
           look->instances == 0 && look->quarantine_blocks == 0;
}

/* Blocks of the tenant too; only where no bystander is of it. */
static inline bool no_block_is_held(const struct look *look)
{
    return look->reserved == 0 && look->active == 0 && look->sealed == 0 && look->shared == 0;
}

static inline void look_print(const struct look *look)
{
    (void)fprintf(
        stderr,
        "sequences=%llu leases=%llu transfers=%llu instances=%llu sessions=%llu lost=%llu "
        "quarantine=%llu reserved=%llu active=%llu sealed=%llu shared=%llu "
        "evictable=%llu\n",
        (unsigned long long)look->sequences, (unsigned long long)look->leases,
        (unsigned long long)look->transfers, (unsigned long long)look->instances,
        (unsigned long long)look->sessions, (unsigned long long)look->lost_sessions,
        (unsigned long long)look->quarantine_blocks, (unsigned long long)look->reserved,
        (unsigned long long)look->active, (unsigned long long)look->sealed,
        (unsigned long long)look->shared, (unsigned long long)look->evictable);
    for (int i = 1; i < 3; i++) {
        const struct tier_look *tier = &look->tiers[i];
        (void)fprintf(stderr,
                      "tier %d: limit=%llu used=%llu free=%llu slabs=%llu quarantine=%llu "
                      "stray=%llu growth=%llu\n",
                      i, (unsigned long long)tier->limit, (unsigned long long)tier->used,
                      (unsigned long long)tier->free, (unsigned long long)tier->slabs,
                      (unsigned long long)tier->quarantine, (unsigned long long)tier->stray,
                      (unsigned long long)tier->growth);
    }
}

/*
 * All that the killed held is free within a second of `since_us`; answers how long it took. With
 * `bystanders` of the same tenant, whose blocks come and go, only the holders are looked at.
 */
static inline uint64_t expect_free(struct agent *observer, struct look *look, bool bystanders,
                                   uint64_t since_us)
{
    for (;;) {
        uint64_t asked_us = now_us();
        agent_do(observer, observe, look);
        if (nothing_is_held(look) && (bystanders || no_block_is_held(look))) {
            return asked_us > since_us ? asked_us - since_us : 0;
        }
        if (asked_us - since_us > promised_ms(1000) * 1000) {
            look_print(look);
            CHECK(false, "not free within a second");
        }
        pause_us(2000);
    }
}

#endif
