/*
 * Words for tests of public prefixes: three tenants, of which the first may publish, and what each
 * of them does there.
 */
#ifndef KVK_TESTS_ENGINE_PUBLIC_H
#define KVK_TESTS_ENGINE_PUBLIC_H

#include "daemon/public.h"
#include "tests/engine_tenants.h"

#define HOST KVK_TIER_HOST
#define PUBLISHER 0
#define READER 1
#define STRANGER 2 /* without the right, as READER */

/* Three tenants; the first may publish. */
static inline void start(struct party *party, uint64_t device_blocks, uint64_t host_blocks)
{
    party_init(party, 3);
    party->house.config.tenants[PUBLISHER].may_publish = true;
    party_start(party, device_blocks, host_blocks);
}

/* ---- Words ---- */

static inline uint8_t byte_of(uint32_t tenant, uint32_t block)
{
    return (uint8_t)(1 + tenant * 97 + block * 13);
}

/* The bytes of a sequence's block, where the engine has them. */
static inline uint8_t *block_bytes(struct party *party, uint64_t sequence_id, uint32_t index)
{
    struct kvk_cache *cache = party->house.cache;
    const struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, sequence_id);
    cr_assert_not_null(sequence);
    const struct kvk_block *block =
        kvk_index_block(cache->index, sequence->groups[0].blocks[index]);
    return kvk_block_address(cache, block, kvk_block_tier(block), 0);
}

static inline struct kvk_sequence_reply open_with(struct party *party, uint32_t tenant,
                                                  const uint32_t *tokens, uint64_t count,
                                                  bool use_public, struct kvk_tables *tables)
{
    struct kvk_sequence_reply reply;
    const struct kvk_open_request request = {
        .session_id = party->sessions[tenant],
        .space_id = party->spaces[tenant],
        .prompt = {.tokens = tokens, .token_count = count, .use_public = use_public},
        .tier = -1};
    party_be(party, tenant);
    cr_assert_eq(kvk_sequence_open(party->house.cache, &party->house.caller, &request, &reply,
                                   tables, &party->house.error),
                 KVK_OK, "%s", party->house.error.text);
    return reply;
}

/* Open, write the blocks that are not cached with the tenant's bytes, seal. */
static inline uint64_t write_prompt(struct party *party, uint32_t tenant, const uint32_t *tokens,
                                    uint64_t count, bool use_public)
{
    struct kvk_sequence_reply reply = open_with(party, tenant, tokens, count, use_public, NULL);
    for (uint64_t i = reply.cached_tokens / 4; i < (count + 3) / 4; i++) {
        memset(block_bytes(party, reply.sequence_id, (uint32_t)i), byte_of(tenant, (uint32_t)i),
               BLOCK);
    }
    house_seal(&party->house, party->sessions[tenant], reply.sequence_id, count);
    return reply.sequence_id;
}

static inline void cache_prompt(struct party *party, uint32_t tenant, const uint32_t *tokens,
                                uint64_t count)
{
    uint64_t id = write_prompt(party, tenant, tokens, count, false);
    house_close(&party->house, party->sessions[tenant], id);
}

/* Three tenants, and a prompt that the publisher has cached and nobody else knows. */
static inline void start_cached(struct party *party, uint32_t *tokens, uint32_t count)
{
    house_tokens(tokens, count, 100);
    start(party, 0, 64);
    cache_prompt(party, PUBLISHER, tokens, count);
}

static inline enum kvk_status try_publish(struct party *party, uint32_t tenant,
                                          const uint32_t *tokens, uint64_t count,
                                          struct kvk_publish_reply *reply)
{
    const struct kvk_publish_request request = {.space_id = party->spaces[tenant],
                                                .prompt = {.tokens = tokens, .token_count = count}};
    party_be(party, tenant);
    return kvk_public_publish(party->house.cache, &party->house.caller, &request, reply,
                              &party->house.error);
}

static inline struct kvk_publish_reply publish(struct party *party, uint32_t tenant,
                                               const uint32_t *tokens, uint64_t count)
{
    struct kvk_publish_reply reply;
    cr_assert_eq(try_publish(party, tenant, tokens, count, &reply), KVK_OK, "%s",
                 party->house.error.text);
    kvk_cache_check(party->house.cache);
    return reply;
}

static inline enum kvk_status withdraw(struct party *party, uint32_t tenant, uint64_t public_id,
                                       struct kvk_withdraw_reply *reply)
{
    party_be(party, tenant);
    enum kvk_status status = kvk_public_withdraw(party->house.cache, &party->house.caller,
                                                 public_id, reply, &party->house.error);
    kvk_cache_check(party->house.cache);
    return status;
}

static inline struct kvk_lookup_reply look_with(struct party *party, uint32_t tenant,
                                                const struct kvk_prompt *prompt)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {.space_id = party->spaces[tenant],
                                               .prompt = *prompt};
    party_be(party, tenant);
    cr_assert_eq(
        kvk_lookup(party->house.cache, &party->house.caller, &request, &reply, &party->house.error),
        KVK_OK, "%s", party->house.error.text);
    return reply;
}

static inline uint64_t look(struct party *party, uint32_t tenant, const uint32_t *tokens,
                            uint64_t count, bool use_public)
{
    const struct kvk_prompt prompt = {
        .tokens = tokens, .token_count = count, .use_public = use_public};
    return look_with(party, tenant, &prompt).cached_tokens;
}

static inline uint64_t host_bytes(struct party *party, uint32_t tenant)
{
    struct kvk_cache *cache = party->house.cache;
    kvk_lock(&cache->lock);
    uint64_t bytes = cache->tiers[HOST].tenant_bytes[party_tenant(party, tenant)->index];
    kvk_unlock(&cache->lock);
    return bytes;
}

static inline uint32_t public_spaces(struct party *party)
{
    uint32_t count = 0;
    kvk_cache_maintain(party->house.cache);
    kvk_lock(&party->house.cache->lock);
    for (const struct kvk_space *s = party->house.cache->spaces; s != NULL; s = s->next) {
        count += s->is_public;
    }
    kvk_unlock(&party->house.cache->lock);
    return count;
}

static inline void close_one(struct party *party, uint32_t tenant, uint64_t sequence_id)
{
    party_be(party, tenant);
    house_close(&party->house, party->sessions[tenant], sequence_id);
}

#endif
