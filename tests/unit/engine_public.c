/* Public prefixes: found where they are asked for, paid for by who published them, and nobody's
 * secret: nothing is public that was not published. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/forget.h"
#include "daemon/public.h"
#include "daemon/space.h"
#include "tests/engine_tenants.h"

#define HOST KVK_TIER_HOST
#define PUBLISHER 0
#define READER 1
#define STRANGER 2 /* without the right, as READER */

/* Three tenants; the first may publish. */
static void start(struct party *party, uint64_t device_blocks, uint64_t host_blocks)
{
    party_init(party, 3);
    party->house.config.tenants[PUBLISHER].may_publish = true;
    party_start(party, device_blocks, host_blocks);
}

/* ---- Words ---- */

static uint8_t byte_of(uint32_t tenant, uint32_t block)
{
    return (uint8_t)(1 + tenant * 97 + block * 13);
}

/* The bytes of a sequence's block, where the engine has them. */
static uint8_t *block_bytes(struct party *party, uint64_t sequence_id, uint32_t index)
{
    struct kvk_cache *cache = party->house.cache;
    const struct kvk_sequence *sequence = kvk_table_get(&cache->sequence_table, sequence_id);
    cr_assert_not_null(sequence);
    const struct kvk_block *block =
        kvk_index_block(cache->index, sequence->groups[0].blocks[index]);
    return kvk_block_address(cache, block, kvk_block_tier(block), 0);
}

static struct kvk_sequence_reply open_with(struct party *party, uint32_t tenant,
                                           const uint32_t *tokens, uint64_t count, bool use_public,
                                           struct kvk_tables *tables)
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
static uint64_t write_prompt(struct party *party, uint32_t tenant, const uint32_t *tokens,
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

static void cache_prompt(struct party *party, uint32_t tenant, const uint32_t *tokens,
                         uint64_t count)
{
    uint64_t id = write_prompt(party, tenant, tokens, count, false);
    house_close(&party->house, party->sessions[tenant], id);
}

static enum kvk_status try_publish(struct party *party, uint32_t tenant, const uint32_t *tokens,
                                   uint64_t count, struct kvk_publish_reply *reply)
{
    const struct kvk_publish_request request = {.space_id = party->spaces[tenant],
                                                .prompt = {.tokens = tokens, .token_count = count}};
    party_be(party, tenant);
    return kvk_public_publish(party->house.cache, &party->house.caller, &request, reply,
                              &party->house.error);
}

static struct kvk_publish_reply publish(struct party *party, uint32_t tenant,
                                        const uint32_t *tokens, uint64_t count)
{
    struct kvk_publish_reply reply;
    cr_assert_eq(try_publish(party, tenant, tokens, count, &reply), KVK_OK, "%s",
                 party->house.error.text);
    kvk_cache_check(party->house.cache);
    return reply;
}

static enum kvk_status withdraw(struct party *party, uint32_t tenant, uint64_t public_id,
                                struct kvk_withdraw_reply *reply)
{
    party_be(party, tenant);
    enum kvk_status status = kvk_public_withdraw(party->house.cache, &party->house.caller,
                                                 public_id, reply, &party->house.error);
    kvk_cache_check(party->house.cache);
    return status;
}

static struct kvk_lookup_reply look_with(struct party *party, uint32_t tenant,
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

static uint64_t look(struct party *party, uint32_t tenant, const uint32_t *tokens, uint64_t count,
                     bool use_public)
{
    const struct kvk_prompt prompt = {
        .tokens = tokens, .token_count = count, .use_public = use_public};
    return look_with(party, tenant, &prompt).cached_tokens;
}

static uint64_t host_bytes(struct party *party, uint32_t tenant)
{
    struct kvk_cache *cache = party->house.cache;
    kvk_lock(&cache->lock);
    uint64_t bytes = cache->tiers[HOST].tenant_bytes[party_tenant(party, tenant)->index];
    kvk_unlock(&cache->lock);
    return bytes;
}

static uint32_t public_spaces(struct party *party)
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

static void close_one(struct party *party, uint32_t tenant, uint64_t sequence_id)
{
    party_be(party, tenant);
    house_close(&party->house, party->sessions[tenant], sequence_id);
}

/* ---- Finding ---- */

Test(engine_public, nothing_is_public_by_being_equal)
{
    struct party party;
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    cr_assert_eq(look(&party, PUBLISHER, tokens, 16, true), 16);
    cr_assert_eq(look(&party, READER, tokens, 16, true), 0);
    cache_prompt(&party, READER, tokens, 16); /* its own, of the same tokens */
    cr_assert_eq(look(&party, STRANGER, tokens, 16, true), 0);
    publish(&party, PUBLISHER, tokens, 8);
    cr_assert_eq(look(&party, STRANGER, tokens, 16, true), 8, "what was published, no more");
    cr_assert_eq(look(&party, STRANGER, tokens, 16, false), 0, "only where it is asked for");
    cr_assert_eq(look(&party, READER, tokens, 16, true), 16, "its own go further");
    tokens[5]++;
    cr_assert_eq(look(&party, STRANGER, tokens, 16, true), 4);
    party_stop(&party);
}

Test(engine_public, the_bytes_are_those_that_were_published)
{
    struct party party;
    struct kvk_tables tables = {.part_count = 0};
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    struct kvk_publish_reply published = publish(&party, PUBLISHER, tokens, 12);
    cr_assert(published.created);
    cr_assert_eq(published.tokens, 12);
    cr_assert_eq(published.blocks, 3);
    cr_assert_eq(published.bytes, 3 * BLOCK);
    struct kvk_sequence_reply reply = open_with(&party, READER, tokens, 16, true, &tables);
    cr_assert_eq(reply.cached_tokens, 12);
    cr_assert_eq(reply.public_tokens, 12);
    for (uint32_t i = 0; i < 3; i++) {
        const uint8_t *bytes = block_bytes(&party, reply.sequence_id, i);
        for (uint32_t b = 0; b < BLOCK; b++) {
            cr_assert_eq(bytes[b], byte_of(PUBLISHER, i));
        }
        cr_assert_eq(tables.parts[0].spaces[i], published.space_id);
        cr_assert_eq(tables.parts[0].tiers[i], HOST + 1);
    }
    cr_assert(tables.parts[0].any_public);
    cr_assert_eq(tables.parts[0].spaces[3], 0, "the rest is its own");
    /* What the publisher's workers scribble over their own slots harms nobody else. */
    struct kvk_sequence_reply own = open_with(&party, PUBLISHER, tokens, 16, false, NULL);
    memset(block_bytes(&party, own.sequence_id, 0), 0xee, BLOCK);
    cr_assert_eq(block_bytes(&party, reply.sequence_id, 0)[0], byte_of(PUBLISHER, 0));
    kvk_tables_finish(&tables);
    party_stop(&party);
}

Test(engine_public, a_damaged_source_is_not_published)
{
    struct party party;
    uint32_t tokens[8];
    house_tokens(tokens, 8, 100);
    start(&party, 0, 64);
    uint64_t id = write_prompt(&party, PUBLISHER, tokens, 8, false);
    block_bytes(&party, id, 1)[17] ^= 1;
    struct kvk_publish_reply reply;
    cr_assert_eq(try_publish(&party, PUBLISHER, tokens, 8, &reply), KVK_DATA_LOSS);
    kvk_cache_check(party.house.cache);
    cr_assert_eq(look(&party, READER, tokens, 8, true), 0);
    cr_assert_eq(public_spaces(&party), 0, "and nothing is left of it");
    party_stop(&party);
}

Test(engine_public, other_content_behind_the_same_placeholders_is_no_hit)
{
    struct party party;
    uint32_t tokens[16];
    struct kvk_content_span span = {.first = 6, .count = 10, .digest_size = 4, .digest = "abcd"};
    struct kvk_prompt prompt = {
        .tokens = tokens, .token_count = 16, .spans = &span, .span_count = 1};
    house_tokens(tokens, 16, 7);
    start(&party, 0, 64);
    struct kvk_sequence_reply sequence;
    const struct kvk_open_request request = {.session_id = party.sessions[PUBLISHER],
                                             .space_id = party.spaces[PUBLISHER],
                                             .prompt = prompt,
                                             .tier = -1};
    party_be(&party, PUBLISHER);
    cr_assert_eq(kvk_sequence_open(party.house.cache, &party.house.caller, &request, &sequence,
                                   NULL, &party.house.error),
                 KVK_OK);
    house_seal(&party.house, party.sessions[PUBLISHER], sequence.sequence_id, 16);
    const struct kvk_publish_request ask = {.space_id = party.spaces[PUBLISHER], .prompt = prompt};
    struct kvk_publish_reply reply;
    cr_assert_eq(kvk_public_publish(party.house.cache, &party.house.caller, &ask, &reply,
                                    &party.house.error),
                 KVK_OK, "%s", party.house.error.text);
    prompt.use_public = true;
    cr_assert_eq(look_with(&party, READER, &prompt).cached_tokens, 16);
    span.digest[3] = 'e';
    cr_assert_eq(look_with(&party, READER, &prompt).cached_tokens, 4, "only pure text");
    span.digest[3] = 'd';
    span.first = 7;
    span.count = 9;
    cr_assert_eq(look_with(&party, READER, &prompt).cached_tokens, 4, "a position later");
    prompt.span_count = 0;
    cr_assert_eq(look_with(&party, READER, &prompt).cached_tokens, 4);
    /* A longer prompt in which the content goes on past what is public. */
    uint32_t longer[24];
    house_tokens(longer, 24, 7);
    span = (struct kvk_content_span){.first = 6, .count = 16, .digest_size = 4, .digest = "abcd"};
    prompt.tokens = longer;
    prompt.token_count = 24;
    prompt.span_count = 1;
    cr_assert_eq(look_with(&party, READER, &prompt).cached_tokens, 16);
    party_stop(&party);
}

Test(engine_public, another_identity_or_geometry_sees_nothing)
{
    struct party party;
    uint32_t tokens[8];
    struct kvk_geometry geometry = house_geometry();
    house_tokens(tokens, 8, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 8);
    publish(&party, PUBLISHER, tokens, 8);
    cr_assert_eq(look(&party, READER, tokens, 8, true), 8);
    party_be(&party, READER);
    party.spaces[READER] = house_space(&party.house, "another model");
    cr_assert_eq(look(&party, READER, tokens, 8, true), 0);
    party_be(&party, STRANGER);
    geometry.format_k = geometry.format_v = KVK_FORMAT_FP16;
    party.spaces[STRANGER] =
        house_space_of(&party.house, &party.house.caller, "third", &geometry, 1);
    cr_assert_eq(look(&party, STRANGER, tokens, 8, true), 0);
    party_stop(&party);
}

/* ---- Rights ---- */

Test(engine_public, only_who_has_the_right_publishes_and_withdraws)
{
    struct party party;
    struct kvk_publish_reply reply;
    struct kvk_withdraw_reply gone;
    uint32_t tokens[8];
    house_tokens(tokens, 8, 100);
    start(&party, 0, 64);
    cache_prompt(&party, READER, tokens, 8);
    cache_prompt(&party, PUBLISHER, tokens, 8);
    cr_assert_eq(try_publish(&party, READER, tokens, 8, &reply), KVK_PERMISSION);
    /* Another's space is none at all. */
    party.spaces[STRANGER] = party.spaces[PUBLISHER];
    cr_assert_eq(try_publish(&party, STRANGER, tokens, 8, &reply), KVK_NOT_FOUND);
    party.spaces[PUBLISHER] = party.spaces[READER];
    cr_assert_eq(try_publish(&party, PUBLISHER, tokens, 8, &reply), KVK_NOT_FOUND);
    party.spaces[PUBLISHER] = party.spaces[STRANGER];
    reply = publish(&party, PUBLISHER, tokens, 8);
    cr_assert_eq(withdraw(&party, READER, reply.public_id, &gone), KVK_NOT_FOUND);
    cr_assert_eq(withdraw(&party, PUBLISHER, reply.public_id + 1, &gone), KVK_NOT_FOUND);
    cr_assert_eq(withdraw(&party, PUBLISHER, reply.public_id, &gone), KVK_OK);
    cr_assert_eq(gone.blocks, 2);
    cr_assert_eq(gone.held_blocks, 0);
    cr_assert_eq(withdraw(&party, PUBLISHER, reply.public_id, &gone), KVK_NOT_FOUND, "once");
    /* An admin publishes for a tenant without the right, and withdraws. */
    struct kvk_credential admin = *party.callers[STRANGER].credential;
    struct kvk_caller caller = party.callers[STRANGER];
    admin.admin = true;
    caller.credential = &admin;
    const struct kvk_publish_request request = {.space_id = party.spaces[READER],
                                                .prompt = {.tokens = tokens, .token_count = 8}};
    cr_assert_eq(
        kvk_public_publish(party.house.cache, &caller, &request, &reply, &party.house.error),
        KVK_OK, "%s", party.house.error.text);
    cr_assert_eq(
        kvk_public_withdraw(party.house.cache, &caller, reply.public_id, &gone, &party.house.error),
        KVK_OK);
    party_stop(&party);
}

Test(engine_public, what_cannot_be_published_is_refused_and_leaves_nothing)
{
    struct party party;
    struct kvk_publish_reply reply;
    uint32_t tokens[16];
    uint32_t other[8];
    house_tokens(tokens, 16, 100);
    house_tokens(other, 8, 900);
    party_init(&party, 3);
    party.house.config.tenants[PUBLISHER].may_publish = true;
    party.house.config.public_prefixes = 1;
    party_start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 8);
    cache_prompt(&party, PUBLISHER, other, 8);
    cr_assert_eq(try_publish(&party, PUBLISHER, tokens, 3, &reply), KVK_INVALID, "no whole block");
    cr_assert_eq(try_publish(&party, PUBLISHER, tokens, 12, &reply), KVK_NOT_FOUND);
    cr_assert_not_null(strstr(party.house.error.text, "8 of 12"), "%s", party.house.error.text);
    const struct kvk_publish_request salted = {
        .space_id = party.spaces[PUBLISHER],
        .prompt = {
            .tokens = tokens, .token_count = 8, .salt = (const uint8_t *)"s", .salt_size = 1}};
    cr_assert_eq(kvk_public_publish(party.house.cache, &party.house.caller, &salted, &reply,
                                    &party.house.error),
                 KVK_INVALID);
    cr_assert_str_eq(party.house.error.field, "prompt.salt");
    cr_assert_eq(public_spaces(&party), 0);
    struct kvk_publish_reply first = publish(&party, PUBLISHER, tokens, 8);
    cr_assert_eq(try_publish(&party, PUBLISHER, other, 8, &reply), KVK_EXHAUSTED);
    cr_assert_str_eq(party.house.error.field, "public_prefixes");
    /* What is public already is not copied again. */
    struct kvk_withdraw_reply gone;
    cr_assert_eq(withdraw(&party, PUBLISHER, first.public_id, &gone), KVK_OK);
    cr_assert_eq(look(&party, READER, tokens, 8, true), 0);
    party_stop(&party);
}

Test(engine_public, what_is_public_already_is_not_copied_again)
{
    struct party party;
    struct kvk_publish_reply again;
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    struct kvk_publish_reply first = publish(&party, PUBLISHER, tokens, 12);
    uint64_t paid = host_bytes(&party, PUBLISHER);
    cr_assert_eq(try_publish(&party, PUBLISHER, tokens, 8, &again), KVK_OK);
    cr_assert_not(again.created);
    cr_assert_eq(again.public_id, first.public_id);
    cr_assert_eq(host_bytes(&party, PUBLISHER), paid);
    again = publish(&party, PUBLISHER, tokens, 16); /* longer: a publication of its own */
    cr_assert(again.created);
    cr_assert_eq(look(&party, READER, tokens, 16, true), 16);
    party_stop(&party);
}

/* ---- Who pays ---- */

Test(engine_public, the_publisher_pays_and_the_reader_does_not)
{
    struct party party;
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    cr_assert_eq(host_bytes(&party, PUBLISHER), 4 * BLOCK);
    publish(&party, PUBLISHER, tokens, 16);
    cr_assert_eq(host_bytes(&party, PUBLISHER), 8 * BLOCK);
    uint64_t bound = house_bound(&party.house, HOST);
    struct kvk_sequence_reply reply = open_with(&party, READER, tokens, 16, true, NULL);
    cr_assert_eq(reply.cached_tokens, 16);
    cr_assert_eq(host_bytes(&party, READER), 0);
    cr_assert_eq(house_bound(&party.house, HOST), bound, "bound before, and once");
    party_stop(&party);
}

Test(engine_public, the_publishers_limit_holds)
{
    struct party party;
    struct kvk_publish_reply reply;
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    party_init(&party, 3);
    party.house.config.tenants[PUBLISHER].may_publish = true;
    party_quota(&party, PUBLISHER)->limit_bytes[HOST] = 6 * BLOCK;
    party_start(&party, 0, 64);
    uint64_t id = write_prompt(&party, PUBLISHER, tokens, 16, false); /* held: nothing can go */
    cr_assert_eq(try_publish(&party, PUBLISHER, tokens, 16, &reply), KVK_EXHAUSTED);
    cr_assert_eq(party.house.error.cause, KVK_CAUSE_TENANT_LIMIT);
    kvk_cache_check(party.house.cache);
    cr_assert_eq(host_bytes(&party, PUBLISHER), 4 * BLOCK);
    publish(&party, PUBLISHER, tokens, 8);
    close_one(&party, PUBLISHER, id);
    party_stop(&party);
}

Test(engine_public, a_full_tier_makes_room_and_public_blocks_stay)
{
    struct party party;
    uint32_t tokens[16];
    uint32_t other[64];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 24);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    house_tokens(other, 64, 5000);
    cache_prompt(&party, READER, other, 64);
    house_tokens(other, 16, 9000);
    cache_prompt(&party, READER, other, 16);
    publish(&party, PUBLISHER, tokens, 16); /* somebody's idle blocks went for it */
    for (uint32_t i = 0; i < 40; i++) {
        house_tokens(other, 64, 20000 + i * 100);
        cache_prompt(&party, i % 2 == 0 ? READER : STRANGER, other, 64);
        kvk_cache_maintain(party.house.cache);
        kvk_cache_check(party.house.cache);
    }
    cr_assert_eq(look(&party, READER, tokens, 16, true), 16);
    party_stop(&party);
}

/* ---- Going on behind it ---- */

Test(engine_public, own_blocks_hang_behind_public_ones)
{
    struct party party;
    uint32_t tokens[24];
    house_tokens(tokens, 24, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 8);
    publish(&party, PUBLISHER, tokens, 8);
    uint64_t id = write_prompt(&party, READER, tokens, 24, true);
    kvk_cache_check(party.house.cache);
    close_one(&party, READER, id);
    kvk_cache_check(party.house.cache);
    cr_assert_eq(host_bytes(&party, READER), 4 * BLOCK, "past the public ones");
    cr_assert_eq(look(&party, READER, tokens, 24, true), 24);
    cr_assert_eq(look(&party, READER, tokens, 24, false), 0, "its own begin with hollow ones");
    cr_assert_eq(look(&party, STRANGER, tokens, 24, true), 8, "and are its own");
    struct kvk_sequence_reply reply = open_with(&party, READER, tokens, 24, true, NULL);
    cr_assert_eq(reply.cached_tokens, 24);
    cr_assert_eq(reply.public_tokens, 8);
    cr_assert_eq(block_bytes(&party, reply.sequence_id, 1)[5], byte_of(PUBLISHER, 1));
    cr_assert_eq(block_bytes(&party, reply.sequence_id, 2)[5], byte_of(READER, 2));
    close_one(&party, READER, reply.sequence_id);
    /* Computed after all, the hollow ones get bytes, and all of it is its own. */
    id = write_prompt(&party, READER, tokens, 8, false);
    close_one(&party, READER, id);
    cr_assert_eq(look(&party, READER, tokens, 24, false), 24);
    reply = open_with(&party, READER, tokens, 24, true, NULL);
    cr_assert_eq(reply.public_tokens, 0, "what it has itself comes first");
    party_stop(&party);
}

Test(engine_public, who_only_reads_leaves_nothing_behind)
{
    struct party party;
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    publish(&party, PUBLISHER, tokens, 16);
    uint32_t before = kvk_index_block_count(party.house.cache->index);
    for (uint32_t i = 0; i < 100; i++) {
        struct kvk_sequence_reply reply = open_with(&party, READER, tokens, 16, true, NULL);
        close_one(&party, READER, reply.sequence_id);
    }
    kvk_cache_check(party.house.cache);
    cr_assert_eq(kvk_index_block_count(party.house.cache->index), before);
    party_stop(&party);
}

Test(engine_public, namesakes_take_ids_of_idle_blocks_or_the_own_prefix_serves)
{
    struct party party;
    uint32_t tokens[16];
    uint32_t other[8];
    house_tokens(tokens, 16, 100);
    house_tokens(other, 8, 900);
    party_init(&party, 3);
    party.house.config.tenants[PUBLISHER].may_publish = true;
    party.house.config.blocks = 12;
    party_start(&party, 0, 64);
    uint64_t held = write_prompt(&party, PUBLISHER, tokens, 16, false); /* 4, and 4 public */
    publish(&party, PUBLISHER, tokens, 16);
    cache_prompt(&party, STRANGER, other, 8); /* 2 that may go */
    struct kvk_sequence_reply first = open_with(&party, READER, tokens, 12, true, NULL);
    kvk_cache_check(party.house.cache);
    cr_assert_eq(first.cached_tokens, 12, "three namesakes: two ids were free, and one idle");
    cr_assert_eq(look(&party, STRANGER, other, 8, false), 4);
    cr_assert_eq(look(&party, STRANGER, tokens, 8, true), 8, "a look-up needs none");
    struct kvk_sequence_reply second;
    const struct kvk_open_request request = {
        .session_id = party.sessions[STRANGER],
        .space_id = party.spaces[STRANGER],
        .prompt = {.tokens = tokens, .token_count = 8, .use_public = true},
        .tier = -1};
    party_be(&party, STRANGER);
    cr_assert_eq(kvk_sequence_open(party.house.cache, &party.house.caller, &request, &second, NULL,
                                   &party.house.error),
                 KVK_EXHAUSTED, "neither namesakes nor blocks of its own");
    kvk_cache_check(party.house.cache);
    close_one(&party, READER, first.sequence_id);
    second = open_with(&party, STRANGER, tokens, 8, true, NULL);
    cr_assert_eq(second.cached_tokens, 8);
    close_one(&party, STRANGER, second.sequence_id);
    close_one(&party, PUBLISHER, held);
    party_stop(&party);
}

Test(engine_public, fork_truncate_append_and_swap_over_public_blocks)
{
    struct party party;
    uint32_t tokens[16];
    uint64_t children[2];
    struct kvk_sequence_reply reply;
    struct kvk_swap_reply swapped;
    house_tokens(tokens, 16, 100);
    start(&party, 32, 64);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    publish(&party, PUBLISHER, tokens, 16);
    uint64_t id = open_with(&party, READER, tokens, 16, true, NULL).sequence_id;
    struct house *house = &party.house;
    uint64_t session = party.sessions[READER];
    const struct kvk_request_id request_id = {.size = 1, .bytes = {7}};
    cr_assert_eq(kvk_sequence_fork(house->cache, &house->caller, session, id, 16, 2, &request_id,
                                   children, &house->error),
                 KVK_OK, "%s", house->error.text);
    kvk_cache_check(house->cache);
    /* Cut into a public block: what is written to it then is a copy of its own. */
    cr_assert_eq(kvk_sequence_truncate(house->cache, &house->caller, session, children[0], 16, 6,
                                       &reply, NULL, &house->error),
                 KVK_OK, "%s", house->error.text);
    kvk_cache_check(house->cache);
    const uint32_t more[2] = {1, 2};
    const struct kvk_append_request append = {.session_id = session,
                                              .sequence_id = children[0],
                                              .expected_length = 6,
                                              .tokens = more,
                                              .token_count = 2};
    cr_assert_eq(
        kvk_sequence_append(house->cache, &house->caller, &append, &reply, NULL, &house->error),
        KVK_OK, "%s", house->error.text);
    cr_assert_eq(block_bytes(&party, children[0], 1)[9], byte_of(PUBLISHER, 1), "copied");
    memset(block_bytes(&party, children[0], 1), 0x55, BLOCK);
    house_seal(house, session, children[0], 8);
    kvk_cache_check(house->cache);
    cr_assert_eq(block_bytes(&party, id, 1)[9], byte_of(PUBLISHER, 1), "nobody else's changed");
    /* Out and in again: public blocks stay where they are. */
    cr_assert_eq(kvk_sequence_swap_out(house->cache, &house->caller, session, children[0], &swapped,
                                       NULL, &house->error),
                 KVK_OK, "%s", house->error.text);
    cr_assert_eq(swapped.moved_blocks, 1);
    kvk_cache_check(house->cache);
    cr_assert_eq(kvk_sequence_swap_in(house->cache, &house->caller, session, children[0], &swapped,
                                      NULL, &house->error),
                 KVK_OK, "%s", house->error.text);
    cr_assert_eq(swapped.moved_blocks, 1);
    cr_assert_eq(block_bytes(&party, children[0], 0)[3], byte_of(PUBLISHER, 0));
    cr_assert_eq(block_bytes(&party, children[0], 1)[3], 0x55);
    kvk_cache_check(house->cache);
    close_one(&party, READER, children[0]);
    close_one(&party, READER, children[1]);
    close_one(&party, READER, id);
    kvk_cache_check(house->cache);
    party_stop(&party);
}

/* ---- Withdrawing ---- */

Test(engine_public, withdrawn_at_once_and_freed_with_the_last_holder)
{
    struct party party;
    struct kvk_withdraw_reply gone;
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    struct kvk_publish_reply published = publish(&party, PUBLISHER, tokens, 16);
    uint64_t id = open_with(&party, READER, tokens, 16, true, NULL).sequence_id;
    struct kvk_pin_reply lease;
    const struct kvk_pin_request pin = {
        .session_id = party.sessions[STRANGER],
        .space_id = party.spaces[STRANGER],
        .prompt = {.tokens = tokens, .token_count = 8, .use_public = true},
        .ttl_ms = 1000,
        .copy_pin = true};
    party_be(&party, STRANGER);
    cr_assert_eq(kvk_lease_pin(party.house.cache, &party.house.caller, &pin, &lease, NULL,
                               &party.house.error),
                 KVK_OK, "%s", party.house.error.text);
    cr_assert_eq(lease.cached_tokens, 8);
    kvk_cache_check(party.house.cache);
    cr_assert_eq(withdraw(&party, PUBLISHER, published.public_id, &gone), KVK_OK);
    cr_assert_eq(gone.blocks, 4);
    cr_assert_eq(gone.held_blocks, 4);
    cr_assert_eq(look(&party, READER, tokens, 16, true), 0);
    cr_assert_eq(block_bytes(&party, id, 3)[100], byte_of(PUBLISHER, 3), "who reads goes on");
    cr_assert_eq(public_spaces(&party), 1);
    cr_assert_eq(host_bytes(&party, PUBLISHER), 8 * BLOCK);
    close_one(&party, READER, id);
    cr_assert_eq(host_bytes(&party, PUBLISHER), 6 * BLOCK, "the lease has two");
    cr_assert_eq(public_spaces(&party), 1);
    kvk_clock_manual_set(&party.house.manual, 2000 * KVK_NS_PER_SECOND);
    cr_assert_eq(public_spaces(&party), 0, "maintenance has ended the lease, then the space");
    cr_assert_eq(host_bytes(&party, PUBLISHER), 4 * BLOCK);
    party_stop(&party);
}

Test(engine_public, an_invalidation_reaches_what_is_public)
{
    struct party party;
    struct kvk_invalidate_reply reply;
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    struct house *house = &party.house;
    cache_prompt(&party, PUBLISHER, tokens, 16);
    publish(&party, PUBLISHER, tokens, 16);
    /* A reader's own invalidation: for it, what was there before is gone. */
    party_be(&party, READER);
    struct kvk_invalidate_request request = {.space_id = party.spaces[READER]};
    cr_assert_eq(kvk_invalidate(house->cache, &house->caller, &request, &reply, &house->error),
                 KVK_OK);
    cr_assert_eq(look(&party, READER, tokens, 16, true), 0);
    cr_assert_eq(look(&party, STRANGER, tokens, 16, true), 16, "and for nobody else");
    /* A prefix of the publisher's: what begins with it is withdrawn. */
    party_be(&party, PUBLISHER);
    uint32_t other[4];
    house_tokens(other, 4, 4);
    const struct kvk_prompt elsewhere = {.tokens = other, .token_count = 4};
    const struct kvk_prompt prefix = {.tokens = tokens, .token_count = 8};
    request =
        (struct kvk_invalidate_request){.space_id = party.spaces[PUBLISHER], .prefix = &elsewhere};
    cr_assert_eq(kvk_invalidate(house->cache, &house->caller, &request, &reply, &house->error),
                 KVK_OK);
    cr_assert_eq(look(&party, STRANGER, tokens, 16, true), 16);
    party_be(&party, PUBLISHER);
    request.prefix = &prefix;
    cr_assert_eq(kvk_invalidate(house->cache, &house->caller, &request, &reply, &house->error),
                 KVK_OK);
    cr_assert_eq(look(&party, STRANGER, tokens, 16, true), 0);
    /* Published anew it is for all; then the publisher's whole space goes. */
    cache_prompt(&party, PUBLISHER, tokens, 16);
    publish(&party, PUBLISHER, tokens, 16);
    cr_assert_eq(look(&party, READER, tokens, 16, true), 16);
    party_be(&party, PUBLISHER);
    request.prefix = NULL;
    cr_assert_eq(kvk_invalidate(house->cache, &house->caller, &request, &reply, &house->error),
                 KVK_OK);
    cr_assert_eq(look(&party, READER, tokens, 16, true), 0);
    cr_assert_eq(public_spaces(&party), 0);
    kvk_cache_check(house->cache);
    party_stop(&party);
}

Test(engine_public, a_publisher_that_is_switched_off_is_not_seen)
{
    struct party party;
    uint32_t tokens[8];
    house_tokens(tokens, 8, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 8);
    struct kvk_publish_reply published = publish(&party, PUBLISHER, tokens, 8);
    cr_assert_eq(kvk_space_set_mode(party.house.cache, published.space_id, KVK_TENANT_OFF,
                                    &party.house.error),
                 KVK_OK);
    cr_assert_eq(look(&party, READER, tokens, 8, true), 0);
    cr_assert_eq(kvk_space_set_mode(party.house.cache, published.space_id, KVK_TENANT_ON,
                                    &party.house.error),
                 KVK_OK);
    cr_assert_eq(look(&party, READER, tokens, 8, true), 8);
    party_stop(&party);
}

Test(engine_public, a_forgotten_publisher_waits_for_readers_and_leaves_zeros)
{
    struct party party;
    struct kvk_forget_counts counts;
    uint32_t tokens[16];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    struct house *house = &party.house;
    cache_prompt(&party, PUBLISHER, tokens, 16);
    struct kvk_publish_reply published = publish(&party, PUBLISHER, tokens, 16);
    uint64_t id = open_with(&party, READER, tokens, 16, true, NULL).sequence_id;
    const struct kvk_space *space = kvk_table_get(&house->cache->space_table, published.space_id);
    int fd = dup(space->groups[0]->tiers[HOST].regions[0].fd);
    const struct kvk_tenant *tenant = party_tenant(&party, PUBLISHER);
    cr_assert_eq(kvk_tenant_forget(house->cache, &house->caller, tenant, &counts, &house->error),
                 KVK_UNAVAILABLE);
    cr_assert_eq(counts.public_spaces, 1);
    cr_assert_eq(counts.left_bytes, 4 * BLOCK);
    cr_assert_not_null(strstr(house->error.text, "public"), "%s", house->error.text);
    cr_assert_eq(look(&party, READER, tokens, 16, true), 0);
    cr_assert_eq(block_bytes(&party, id, 2)[0], byte_of(PUBLISHER, 2));
    close_one(&party, READER, id);
    cr_assert_eq(kvk_tenant_forget(house->cache, &house->caller, tenant, &counts, &house->error),
                 KVK_OK, "%s", house->error.text);
    uint8_t bytes[4 * BLOCK];
    cr_assert_eq(pread(fd, bytes, sizeof(bytes), 0), (ssize_t)sizeof(bytes));
    for (size_t i = 0; i < sizeof(bytes); i++) {
        cr_assert_eq(bytes[i], 0, "byte %zu", i);
    }
    (void)close(fd);
    party_stop(&party);
}

/* ---- Memory ---- */

Test(engine_public, its_memory_takes_no_writable_mapping)
{
    struct party party;
    uint32_t tokens[16];
    char path[64];
    house_tokens(tokens, 16, 100);
    start(&party, 0, 64);
    cache_prompt(&party, PUBLISHER, tokens, 16);
    struct kvk_publish_reply published = publish(&party, PUBLISHER, tokens, 16);
    const struct kvk_space *space =
        kvk_table_get(&party.house.cache->space_table, published.space_id);
    const struct kvk_group_tier *at = &space->groups[0]->tiers[HOST];
    cr_assert_eq(kvk_arena_slot_capacity(&at->arena), 4, "no larger than what is in it");
    const struct kvk_region *regions[] = {&at->regions[0], &at->generations};
    for (int i = 0; i < 2; i++) {
        int fd = regions[i]->fd;
        size_t size = regions[i]->size_bytes;
        cr_assert_eq(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), MAP_FAILED);
        void *seen = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
        cr_assert_neq(seen, MAP_FAILED);
        cr_assert_neq(mprotect(seen, size, PROT_READ | PROT_WRITE), 0);
        cr_assert_eq(munmap(seen, size), 0);
        /* Nor by opening the file anew, which a process of the same user can. */
        (void)snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
        int again = open(path, O_RDWR | O_CLOEXEC);
        cr_assert_geq(again, 0);
        cr_assert_eq(mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, again, 0), MAP_FAILED);
        cr_assert_neq(pwrite(again, "x", 1, 0), 1);
        cr_assert_neq(ftruncate(again, 0), 0);
        cr_assert_neq(fallocate(again, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
        (void)close(again);
    }
    party_stop(&party);
}

/* ---- At random, against a reference that knows tokens and nothing else ---- */

#define MODEL_PROMPTS 8
#define MODEL_BLOCKS 6
#define MODEL_OPEN 12
#define MODEL_PUBLIC 8

struct model_public {
    uint64_t id;
    uint32_t prompt;
    uint32_t blocks;
};

struct model {
    struct party party;
    uint32_t tokens[MODEL_PROMPTS][MODEL_BLOCKS * 4];
    struct model_public published[MODEL_PUBLIC];
    uint32_t published_count;
    struct model_open {
        uint64_t id;
        uint32_t tenant;
        uint32_t prompt;
        uint32_t blocks;
    } open[MODEL_OPEN];
    uint32_t open_count;
};

/* Prompts that share beginnings: prompt p differs from its neighbours from block p % 3 on. */
static void model_tokens(struct model *model)
{
    for (uint32_t p = 0; p < MODEL_PROMPTS; p++) {
        for (uint32_t t = 0; t < MODEL_BLOCKS * 4; t++) {
            uint32_t family = t / 4 < 1 ? p / 4 : t / 4 < 3 ? p / 2 : p;
            model->tokens[p][t] = 1000 * family + t;
        }
    }
}

/* Whole blocks that two prompts have in common. */
static uint32_t model_common(const struct model *model, uint32_t a, uint32_t b)
{
    uint32_t blocks = 0;
    while (blocks < MODEL_BLOCKS &&
           memcmp(&model->tokens[a][blocks * 4], &model->tokens[b][blocks * 4], 16) == 0) {
        blocks++;
    }
    return blocks;
}

static uint32_t model_public_blocks(const struct model *model, uint32_t prompt)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < model->published_count; i++) {
        uint32_t common = model_common(model, model->published[i].prompt, prompt);
        common = common < model->published[i].blocks ? common : model->published[i].blocks;
        most = common > most ? common : most;
    }
    return most;
}

/* The bytes of a block say its tokens alone, so that every tenant computes the same. */
static uint8_t model_byte(const struct model *model, uint32_t prompt, uint32_t block)
{
    return (uint8_t)(model->tokens[prompt][block * 4] / 1000 * 31 + block * 7 + 1);
}

static void model_open(struct model *model, uint32_t tenant, uint32_t prompt, uint32_t blocks,
                       bool use_public)
{
    struct party *party = &model->party;
    struct kvk_sequence_reply reply =
        open_with(party, tenant, model->tokens[prompt], blocks * 4, use_public, NULL);
    uint32_t known = model_public_blocks(model, prompt);
    known = known < blocks ? known : blocks;
    if (use_public) {
        cr_assert_geq(reply.cached_tokens, known * 4);
    }
    cr_assert_leq(reply.public_tokens, use_public ? known * 4 : 0);
    for (uint32_t i = 0; i < blocks; i++) {
        uint8_t *bytes = block_bytes(party, reply.sequence_id, i);
        if (i < reply.cached_tokens / 4) {
            cr_assert_eq(bytes[0], model_byte(model, prompt, i));
            cr_assert_eq(bytes[BLOCK - 1], model_byte(model, prompt, i));
        } else {
            memset(bytes, model_byte(model, prompt, i), BLOCK);
        }
    }
    house_seal(&party->house, party->sessions[tenant], reply.sequence_id, blocks * 4);
    model->open[model->open_count++] = (struct model_open){
        .id = reply.sequence_id, .tenant = tenant, .prompt = prompt, .blocks = blocks};
}

static void model_close(struct model *model, uint32_t which)
{
    close_one(&model->party, model->open[which].tenant, model->open[which].id);
    model->open[which] = model->open[--model->open_count];
}

static void model_publish(struct model *model, uint32_t prompt, uint32_t blocks)
{
    struct kvk_publish_reply reply;
    struct party *party = &model->party;
    uint64_t own = look(party, PUBLISHER, model->tokens[prompt], blocks * 4, false);
    enum kvk_status status =
        try_publish(party, PUBLISHER, model->tokens[prompt], blocks * 4, &reply);
    if (own < blocks * 4) {
        cr_assert(status == KVK_NOT_FOUND || !reply.created);
        return;
    }
    cr_assert(status == KVK_OK || status == KVK_EXHAUSTED, "%s", party->house.error.text);
    if (status == KVK_OK && reply.created) {
        model->published[model->published_count++] =
            (struct model_public){.id = reply.public_id, .prompt = prompt, .blocks = blocks};
    }
}

static void model_withdraw(struct model *model, uint32_t which)
{
    struct kvk_withdraw_reply reply;
    cr_assert_eq(withdraw(&model->party, PUBLISHER, model->published[which].id, &reply), KVK_OK);
    model->published[which] = model->published[--model->published_count];
}

static void model_step(struct model *model, struct kvk_random *source)
{
    uint64_t random = kvk_random_next(source);
    uint32_t prompt = (uint32_t)(random >> 8) % MODEL_PROMPTS;
    uint32_t blocks = 1 + (uint32_t)(random >> 16) % MODEL_BLOCKS;
    uint32_t tenant = (uint32_t)(random >> 24) % 3;
    bool use_public = (random >> 32) % 4 != 0;
    switch (random % 8) {
    case 0:
        if (model->published_count < MODEL_PUBLIC) {
            model_publish(model, prompt, blocks);
        }
        break;
    case 1:
        if (model->published_count > 0) {
            model_withdraw(model, (uint32_t)(random >> 40) % model->published_count);
        }
        break;
    case 2:
    case 3:
        if (model->open_count < MODEL_OPEN) {
            model_open(model, tenant, prompt, blocks, use_public);
        }
        break;
    case 4:
    case 5:
        if (model->open_count > 0) {
            model_close(model, (uint32_t)(random >> 40) % model->open_count);
        }
        break;
    case 6:
        kvk_cache_maintain(model->party.house.cache);
        break;
    default: {
        uint64_t own = look(&model->party, tenant, model->tokens[prompt], blocks * 4, false);
        uint64_t all = look(&model->party, tenant, model->tokens[prompt], blocks * 4, true);
        uint32_t known = model_public_blocks(model, prompt);
        cr_assert_geq(all, own);
        cr_assert_geq(all, (known < blocks ? known : blocks) * 4);
        if (known == 0) {
            cr_assert_eq(all, own, "nothing of it is public");
        }
    }
    }
    kvk_cache_check(model->party.house.cache);
}

Test(engine_public, random_steps_against_a_reference, .timeout = 60)
{
    for (uint64_t round = 0; round < 6; round++) {
        struct model model = {.published_count = 0};
        struct kvk_random random;
        kvk_random_init(&random, 77 + round);
        model_tokens(&model);
        /* Tight in some rounds, so that blocks go while others hold them; with a device in some. */
        start(&model.party, round % 3 == 2 ? 90 : 0, round % 2 == 0 ? 400 : 140);
        for (uint32_t i = 0; i < 600; i++) {
            model_step(&model, &random);
        }
        while (model.open_count > 0) {
            model_close(&model, 0);
        }
        while (model.published_count > 0) {
            model_withdraw(&model, 0);
        }
        cr_assert_eq(public_spaces(&model.party), 0);
        party_stop(&model.party);
    }
}
