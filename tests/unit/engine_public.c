/* Public prefixes: found where they are asked for, paid for by who published them, and nobody's
 * secret: nothing is public that was not published. */
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/forget.h"
#include "daemon/report.h"
#include "daemon/space.h"
#include "tests/engine_public.h"

/* ---- Finding ---- */

Test(engine_public, nothing_is_public_by_being_equal)
{
    struct party party;
    uint32_t tokens[16];
    start_cached(&party, tokens, 16);
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
    start_cached(&party, tokens, 16);
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
    start_cached(&party, tokens, 8);
    publish(&party, PUBLISHER, tokens, 8);
    cr_assert_eq(look(&party, READER, tokens, 8, true), 8);
    party_be(&party, READER);
    party.spaces[READER] = house_space(&party.house, "another model");
    cr_assert_eq(look(&party, READER, tokens, 8, true), 0);
    party.spaces[READER] = house_space(&party.house, "mode1"); /* as long as the right one */
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
    start_cached(&party, tokens, 16);
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
    start_cached(&party, tokens, 16);
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
    start_cached(&party, tokens, 16);
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

/* As GetOccupancy says it: of the host tier, in blocks; and its rows are marked. */
static uint64_t public_blocks(struct party *party, const struct kvk_caller *caller)
{
    struct house *house = &party->house;
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    struct kvk_group_report *rows;
    uint32_t count;
    uint64_t bytes = 0;
    const struct kvk_view all = {.size = 0};
    cr_assert_eq(
        kvk_report_occupancy(house->cache, caller, all, tiers, &rows, &count, &house->error),
        KVK_OK);
    for (uint32_t i = 0; i < count; i++) {
        bytes += rows[i].is_public ? rows[i].tier_blocks[HOST] * rows[i].block_bytes : 0;
    }
    free(rows);
    cr_assert_eq(tiers[HOST].public_bytes, bytes);
    cr_assert_leq(tiers[HOST].public_bytes, tiers[HOST].used_bytes);
    cr_assert_eq(tiers[KVK_TIER_DEVICE].public_bytes, 0);
    return bytes / BLOCK;
}

Test(engine_public, occupancy_shows_it_apart)
{
    struct party party;
    struct kvk_withdraw_reply gone;
    uint32_t tokens[16];
    start_cached(&party, tokens, 16);
    const struct kvk_credential operator_credential = {.name = "operator", .admin = true};
    const struct kvk_caller admin = house_caller(&operator_credential);
    cr_assert_eq(public_blocks(&party, &admin), 0);
    struct kvk_publish_reply published = publish(&party, PUBLISHER, tokens, 16);
    cr_assert_eq(public_blocks(&party, &admin), 4);
    party_be(&party, PUBLISHER);
    cr_assert_eq(public_blocks(&party, &party.house.caller), 4, "it pays for them");
    party_be(&party, READER);
    cr_assert_eq(public_blocks(&party, &party.house.caller), 0, "and nobody else");
    uint64_t id = open_with(&party, READER, tokens, 16, true, NULL).sequence_id;
    cr_assert_eq(public_blocks(&party, &party.house.caller), 0);
    cr_assert_eq(withdraw(&party, PUBLISHER, published.public_id, &gone), KVK_OK);
    cr_assert_eq(public_blocks(&party, &admin), 4, "it is still read");
    close_one(&party, READER, id);
    cr_assert_eq(public_spaces(&party), 0);
    cr_assert_eq(public_blocks(&party, &admin), 0);
    party_stop(&party);
}

Test(engine_public, withdrawn_at_once_and_freed_with_the_last_holder)
{
    struct party party;
    struct kvk_withdraw_reply gone;
    uint32_t tokens[16];
    start_cached(&party, tokens, 16);
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
    start_cached(&party, tokens, 16);
    struct house *house = &party.house;
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
    start_cached(&party, tokens, 8);
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
    start_cached(&party, tokens, 16);
    struct house *house = &party.house;
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
    start_cached(&party, tokens, 16);
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

/* Of a window only what a query from the prefix's end sees is published, and found. */
Test(engine_public, a_window_is_public_where_it_is_seen)
{
    struct party party;
    struct kvk_geometry groups[2] = {house_geometry(), house_geometry()};
    uint32_t tokens[24];
    house_tokens(tokens, 24, 100);
    start(&party, 0, 128);
    groups[1].window = 8;
    for (uint32_t i = 0; i < 3; i++) {
        party_be(&party, i);
        party.spaces[i] = house_space_of(&party.house, &party.house.caller, "windowed", groups, 2);
    }
    cache_prompt(&party, PUBLISHER, tokens, 24);
    struct kvk_publish_reply published = publish(&party, PUBLISHER, tokens, 24);
    cr_assert_eq(published.blocks, 6 + 2);
    cr_assert_eq(look(&party, READER, tokens, 24, true), 24);
    cr_assert_eq(look(&party, READER, tokens, 20, true), 0, "its window is not there");
    uint64_t id = open_with(&party, READER, tokens, 24, true, NULL).sequence_id;
    kvk_cache_check(party.house.cache);
    cr_assert_eq(block_bytes(&party, id, 5)[0], byte_of(PUBLISHER, 5));
    close_one(&party, READER, id);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}
