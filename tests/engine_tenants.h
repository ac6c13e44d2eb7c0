/*
 * A house of several tenants with quotas, and short words for what each of them does there.
 */
#ifndef KVK_TESTS_ENGINE_TENANTS_H
#define KVK_TESTS_ENGINE_TENANTS_H

#include <stdio.h>

#include "tests/engine_house.h"

#define TENANTS_MAX 128
#define BLOCK UINT64_C(1024) /* of house_geometry() */

struct party {
    struct house house;
    uint32_t count;
    struct kvk_caller callers[TENANTS_MAX];
    uint64_t sessions[TENANTS_MAX];
    uint64_t spaces[TENANTS_MAX];
};

/* Tiers in blocks. Quotas are set in house.config.tenants before party_start(). */
static inline void party_init(struct party *party, uint32_t count)
{
    memset(party, 0, sizeof(*party));
    house_init(&party->house);
    struct kvk_config *config = &party->house.config;
    party->count = count;
    config->tenants = calloc(count, sizeof(*config->tenants));
    config->credentials = calloc(count, sizeof(*config->credentials));
    config->tenant_count = config->credential_count = count;
    for (uint32_t i = 0; i < count; i++) {
        (void)snprintf(config->tenants[i].name, KVK_NAME_SIZE, "tenant-%u", i);
        (void)snprintf(config->credentials[i].name, KVK_NAME_SIZE, "credential-%u", i);
        (void)snprintf(config->credentials[i].token, KVK_NAME_SIZE, "secret-of-tenant-%u", i);
        config->credentials[i].tenants[0] = i;
        config->credentials[i].tenant_count = 1;
    }
}

static inline struct kvk_tenant_quota *party_quota(struct party *party, uint32_t tenant)
{
    return &party->house.config.tenants[tenant].quota;
}

/* The tenant's calls are made from here on. */
static inline void party_be(struct party *party, uint32_t tenant)
{
    party->house.caller = party->callers[tenant];
}

/* On this device, which is the cache's from then on; NULL: a CPU's. */
static inline void party_start_on(struct party *party, uint64_t device_blocks, uint64_t host_blocks,
                                  struct kvk_device *device)
{
    const struct house_options options = {.device_bytes = device_blocks * BLOCK,
                                          .host_bytes = host_blocks * BLOCK,
                                          .manual_clock = true,
                                          .device = device};
    house_start(&party->house, &options);
    for (uint32_t i = 0; i < party->count; i++) {
        char token[64];
        (void)snprintf(token, sizeof(token), "secret-of-tenant-%u", i);
        party->callers[i] = house_caller_of(&party->house, token);
        party_be(party, i);
        if (i < 64) { /* as many sessions as house_init() allows instances */
            party->sessions[i] = house_session(&party->house);
        }
        party->spaces[i] = house_space(&party->house, "model");
    }
}

static inline void party_start(struct party *party, uint64_t device_blocks, uint64_t host_blocks)
{
    party_start_on(party, device_blocks, host_blocks, NULL);
}

static inline void party_stop(struct party *party)
{
    house_stop(&party->house);
}

static inline const struct kvk_tenant *party_tenant(struct party *party, uint32_t tenant)
{
    return party->callers[tenant].credential->tenants[0];
}

static inline uint64_t party_blocks(struct party *party, uint32_t tenant, enum kvk_tier tier)
{
    uint32_t index = party_tenant(party, tenant)->index;
    return party->house.cache->tiers[tier].tenant_bytes[index] / BLOCK;
}

static inline struct kvk_tenant_usage party_usage(struct party *party, uint32_t tenant)
{
    struct kvk_tenant_usage usage;
    kvk_usage_get(party->house.cache, party_tenant(party, tenant), &usage);
    return usage;
}

/* A prompt of whole blocks that `name` makes different from all others. */
static inline enum kvk_status party_try_open(struct party *party, uint32_t tenant, uint32_t name,
                                             uint32_t blocks, struct kvk_sequence_reply *reply)
{
    uint32_t tokens[1024];
    cr_assert_leq(4 * blocks, 1024);
    party_be(party, tenant);
    house_tokens(tokens, 4 * (uint64_t)blocks, name * 1000);
    return house_try_open(&party->house, party->sessions[tenant], party->spaces[tenant], tokens,
                          4 * (uint64_t)blocks, reply);
}

/* Opened, sealed and closed: idle in the cache afterwards. */
static inline enum kvk_status party_try_store(struct party *party, uint32_t tenant, uint32_t name,
                                              uint32_t blocks)
{
    struct kvk_sequence_reply reply;
    enum kvk_status status = party_try_open(party, tenant, name, blocks, &reply);
    if (status == KVK_OK) {
        house_seal(&party->house, party->sessions[tenant], reply.sequence_id, 4 * (uint64_t)blocks);
        house_close(&party->house, party->sessions[tenant], reply.sequence_id);
    }
    return status;
}

static inline void party_store(struct party *party, uint32_t tenant, uint32_t name, uint32_t blocks)
{
    cr_assert_eq(party_try_store(party, tenant, name, blocks), KVK_OK, "%s",
                 party->house.error.text);
}

/* Of `count` prompts of one block, from `first` on: how many are cached? */
static inline uint32_t party_cached(struct party *party, uint32_t tenant, uint32_t first,
                                    uint32_t count)
{
    uint32_t cached = 0;
    party_be(party, tenant);
    for (uint32_t i = 0; i < count; i++) {
        uint32_t tokens[4];
        house_tokens(tokens, 4, (first + i) * 1000);
        cached += house_cached(&party->house, party->spaces[tenant], tokens, 4) == 4 ? 1 : 0;
    }
    return cached;
}

#endif
