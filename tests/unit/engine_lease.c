/* Leases and tickets: who may, for how long, and what they keep. */
#include "tests/engine_stage.h"

static enum kvk_status renew(struct stage *stage, uint64_t lease_id, uint64_t ttl_ms)
{
    return kvk_lease_renew(stage->house.cache, &stage->house.caller, stage->session, lease_id,
                           ttl_ms, &stage->house.error);
}

/* Evict what can be evicted. */
static void flood(struct stage *stage)
{
    uint32_t tokens[4];
    for (uint32_t i = 0; i < 40; i++) {
        house_tokens(tokens, 4, 7000 + i * 8);
        stage_cache(stage, tokens, 4, i);
    }
}

Test(lease, lasts_as_long_as_it_is_renewed)
{
    struct stage stage;
    uint32_t tokens[8];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    stage_cache(&stage, tokens, 8, 3);
    struct kvk_pin_reply lease = stage_pin(&stage, tokens, 8, 1000);
    cr_expect_eq(lease.cached_tokens, 8);
    cr_expect_eq(lease.ttl_ms, 1000);
    for (int i = 0; i < 5; i++) {
        stage_pass_ms(&stage, 900);
        kvk_cache_maintain(stage.house.cache);
        STAGE_OK(&stage, renew(&stage, lease.lease_id, 1000));
        flood(&stage);
        STAGE_OK(&stage, stage_try_read(&stage, 0, lease.lease_id, 0, 8, 3));
    }
    stage_pass_ms(&stage, 1000); /* at the end itself it is over */
    cr_expect_eq(renew(&stage, lease.lease_id, 1000), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_LEASE_EXPIRED);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    cr_expect_eq(stage_stats(&stage).leases_expired, 1);
    stage_stop(&stage);
}

Test(lease, expiry_needs_nobody_to_ask)
{
    struct stage stage;
    uint32_t tokens[8];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    stage_cache(&stage, tokens, 8, 3);
    for (uint64_t i = 0; i < 200; i++) {
        (void)stage_pin(&stage, tokens, 8, 100 + i * 7 % 100);
    }
    stage_pass_ms(&stage, 150);
    for (int i = 0; i < 10; i++) {
        kvk_cache_maintain(stage.house.cache);
    }
    uint64_t expired = stage_stats(&stage).leases_expired;
    cr_expect(expired > 50 && expired < 150, "%lu", (unsigned long)expired);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 2);
    stage_pass_ms(&stage, 100);
    for (int i = 0; i < 10; i++) {
        kvk_cache_maintain(stage.house.cache);
    }
    cr_expect_eq(stage_stats(&stage).leases_expired, 200);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    stage_stop(&stage);
}

Test(lease, renewing_one_keeps_the_others_time)
{
    struct stage stage;
    uint32_t tokens[8];
    uint64_t ids[8];
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    stage_cache(&stage, tokens, 8, 3);
    for (uint64_t i = 0; i < 8; i++) {
        ids[i] = stage_pin(&stage, tokens, 8, 100 + i * 100).lease_id;
    }
    for (uint64_t i = 0; i < 8; i += 2) {
        STAGE_OK(&stage, renew(&stage, ids[i], 1000 + i));
    }
    uint64_t expired = 0;
    for (uint64_t ms = 0; ms <= 900; ms += 50) {
        cr_expect_eq(stage_stats(&stage).leases_expired, expired);
        stage_pass_ms(&stage, 50);
        kvk_cache_maintain(stage.house.cache);
        expired += ms + 50 == 200 || ms + 50 == 400 || ms + 50 == 600 || ms + 50 == 800;
    }
    stage_pass_ms(&stage, 100);
    kvk_cache_maintain(stage.house.cache);
    cr_expect_eq(stage_stats(&stage).leases_expired, 8);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    stage_stop(&stage);
}

Test(lease, ends_once_and_all_or_none)
{
    struct stage stage;
    uint32_t tokens[8];
    uint64_t blocks;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    stage_cache(&stage, tokens, 8, 3);
    uint64_t a = stage_pin(&stage, tokens, 8, 1000).lease_id;
    uint64_t b = stage_pin(&stage, tokens, 4, 1000).lease_id;
    const uint64_t twice[] = {a, b, a};
    cr_expect_eq(stage_try_release(&stage, twice, 3, &blocks), KVK_INVALID);
    const uint64_t unknown[] = {a, b, a + 1000};
    cr_expect_eq(stage_try_release(&stage, unknown, 3, &blocks), KVK_NOT_FOUND);
    cr_expect_eq(stage_try_release(&stage, NULL, 0, &blocks), KVK_INVALID);
    STAGE_OK(&stage, stage_try_read(&stage, 0, a, 0, 8, 3));
    const uint64_t both[] = {a, b};
    STAGE_OK(&stage, stage_try_release(&stage, both, 2, &blocks));
    cr_expect_eq(blocks, 3);
    cr_expect_eq(stage_try_release(&stage, both, 1, &blocks), KVK_NOT_FOUND);
    stage_stop(&stage);
}

Test(lease, belongs_to_its_instance)
{
    struct stage stage;
    uint32_t tokens[8];
    uint64_t blocks;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    stage_cache(&stage, tokens, 8, 3);
    uint64_t lease = stage_pin(&stage, tokens, 8, 1000).lease_id;
    uint64_t owner = stage.session;
    stage.session = house_session(&stage.house);
    cr_expect_eq(stage_try_release(&stage, &lease, 1, &blocks), KVK_PERMISSION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_NOT_OWNER);
    cr_expect_eq(stage_try_read(&stage, 0, lease, 0, 8, 3), KVK_PERMISSION);
    kvk_session_end(stage.house.cache, stage.session);
    stage.session = owner;
    STAGE_OK(&stage, stage_try_release(&stage, &lease, 1, &blocks));

    lease = stage_pin(&stage, tokens, 8, 1000).lease_id;
    kvk_session_end(stage.house.cache, owner); /* and goes with it */
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    stage.session = house_session(&stage.house);
    cr_expect_eq(stage_try_release(&stage, &lease, 1, &blocks), KVK_NOT_FOUND);
    stage_stop(&stage);
}

Test(lease, says_what_it_needs)
{
    struct stage stage;
    uint32_t tokens[12];
    struct kvk_pin_reply reply;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 12, 1);
    cr_expect_eq(stage_try_pin(&stage, tokens, 8, 0, false, &reply), KVK_INVALID);
    cr_expect_eq(stage_try_pin(&stage, tokens, 8, stage.house.config.lease_ms + 1, false, &reply),
                 KVK_INVALID);
    STAGE_OK(&stage, stage_try_pin(&stage, tokens, 8, 10, false, &reply));
    cr_expect_eq(reply.lease_id, 0);
    cr_expect_eq(reply.cached_tokens, 0);
    stage_cache(&stage, tokens, 8, 3);
    struct kvk_pin_request request = {.session_id = stage.session,
                                      .space_id = stage.space,
                                      .prompt = {.tokens = tokens, .token_count = 12},
                                      .ttl_ms = 10,
                                      .min_tokens = 12};
    cr_expect_eq(kvk_lease_pin(stage.house.cache, &stage.house.caller, &request, &reply,
                               &stage.tables, &stage.house.error),
                 KVK_NOT_FOUND);
    request.min_tokens = 8;
    request.request_id = (struct kvk_request_id){.bytes = "once", .size = 4};
    STAGE_OK(&stage, kvk_lease_pin(stage.house.cache, &stage.house.caller, &request, &reply,
                                   &stage.tables, &stage.house.error));
    cr_expect_eq(stage.tables.part_count, 1);
    cr_expect_eq(stage.tables.parts[0].count, 2);
    uint64_t first = reply.lease_id;
    STAGE_OK(&stage, kvk_lease_pin(stage.house.cache, &stage.house.caller, &request, &reply,
                                   &stage.tables, &stage.house.error));
    cr_expect_eq(reply.lease_id, first);
    cr_expect_eq(stage.tables.parts[0].count, 2);
    stage_pass_ms(&stage, 20); /* over: a new one */
    STAGE_OK(&stage, kvk_lease_pin(stage.house.cache, &stage.house.caller, &request, &reply,
                                   &stage.tables, &stage.house.error));
    cr_expect_neq(reply.lease_id, first);
    stage_stop(&stage);
}

Test(lease, a_hold_may_move_a_copy_pin_stays)
{
    struct stage stage;
    uint32_t tokens[4];
    uint32_t others[32];
    struct kvk_pin_reply held;
    struct kvk_pin_reply pinned;
    stage_start(&stage, 8, 8);
    house_tokens(tokens, 4, 1);
    stage_cache(&stage, tokens, 4, 1);
    STAGE_OK(&stage, stage_try_pin(&stage, tokens, 4, 60000, false, &held));
    house_tokens(tokens, 4, 101);
    stage_cache(&stage, tokens, 4, 2);
    STAGE_OK(&stage, stage_try_pin(&stage, tokens, 4, 60000, true, &pinned));
    uint32_t slot = stage.tables.parts[0].slots[0];

    /* All of the device but the one slot: the held block moves to the host, and reads well. */
    house_tokens(others, 28, 1000);
    uint64_t id = stage_open(&stage, others, 28).sequence_id;
    STAGE_OK(&stage, stage_try_read(&stage, 0, held.lease_id, 0, 4, 1));
    STAGE_OK(&stage, stage_try_read(&stage, 0, pinned.lease_id, 0, 4, 2));
    STAGE_OK(&stage, stage_try_pin(&stage, tokens, 4, 60000, false, &held));
    cr_expect_eq(stage.tables.parts[0].slots[0], slot);
    cr_expect_eq(stage.tables.parts[0].tiers[0], 1);
    const struct kvk_open_request last = {.prompt = {.tokens = others + 28, .token_count = 4},
                                          .tier = KVK_TIER_DEVICE};
    struct kvk_sequence_reply reply;
    others[28] = others[29] = others[30] = others[31] = 5;
    cr_expect_eq(stage_try_open(&stage, &last, &reply), KVK_EXHAUSTED);
    stage_close(&stage, id);
    stage_stop(&stage);
}

Test(lease, a_ticket_outlives_its_lease)
{
    struct stage stage;
    uint32_t tokens[8];
    uint64_t ticket;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 8, 1);
    stage_cache(&stage, tokens, 8, 3);
    struct kvk_pin_reply lease = stage_pin(&stage, tokens, 8, 100);
    struct kvk_transfer_request request = {
        .session_id = stage.session, .lease_id = lease.lease_id, .block_count = 2};
    STAGE_OK(&stage, kvk_transfer_begin(stage.house.cache, &stage.house.caller, &request, &ticket,
                                        &stage.tables, &stage.house.error));
    uint32_t slot = stage.tables.parts[0].slots[1];
    uint32_t generation = stage.tables.parts[0].generations[1];
    stage_pass_ms(&stage, 200);
    kvk_cache_maintain(stage.house.cache);
    flood(&stage);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 2);
    lease = stage_pin(&stage, tokens, 8, 100);
    cr_expect_eq(stage.tables.parts[0].slots[1], slot);
    cr_expect_eq(stage.tables.parts[0].generations[1], generation);
    uint64_t blocks;
    STAGE_OK(&stage, stage_try_release(&stage, &lease.lease_id, 1, &blocks));
    STAGE_OK(&stage, kvk_transfer_end(stage.house.cache, &stage.house.caller, stage.session, ticket,
                                      &stage.house.error));
    cr_expect_eq(kvk_transfer_end(stage.house.cache, &stage.house.caller, stage.session, ticket,
                                  &stage.house.error),
                 KVK_NOT_FOUND);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    stage_stop(&stage);
}

Test(lease, tickets_name_what_may_be_copied)
{
    struct stage stage;
    uint32_t tokens[10];
    uint64_t ticket;
    stage_start(&stage, 8, 0);
    house_tokens(tokens, 10, 1);
    uint64_t id = stage_sealed(&stage, tokens, 6, 3);
    stage_append(&stage, id, 6, tokens + 6, 4, false);
    struct kvk_transfer_request request = {
        .session_id = stage.session, .sequence_id = id, .block_count = 3};
    cr_expect_eq(kvk_transfer_begin(stage.house.cache, &stage.house.caller, &request, &ticket,
                                    &stage.tables, &stage.house.error),
                 KVK_OUT_OF_RANGE, "the third block is not sealed");
    request.block_count = 2;
    STAGE_OK(&stage, kvk_transfer_begin(stage.house.cache, &stage.house.caller, &request, &ticket,
                                        &stage.tables, &stage.house.error));
    STAGE_OK(&stage, kvk_transfer_end(stage.house.cache, &stage.house.caller, stage.session, ticket,
                                      &stage.house.error));
    request.write = true;
    cr_expect_eq(kvk_transfer_begin(stage.house.cache, &stage.house.caller, &request, &ticket,
                                    &stage.tables, &stage.house.error),
                 KVK_PRECONDITION, "the first block is sealed");
    request.first_block = 1;
    STAGE_OK(&stage, kvk_transfer_begin(stage.house.cache, &stage.house.caller, &request, &ticket,
                                        &stage.tables, &stage.house.error));
    /* The sequence goes; what a process may still write to stays. */
    stage_close(&stage, id);
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 2);
    STAGE_OK(&stage, kvk_transfer_end(stage.house.cache, &stage.house.caller, stage.session, ticket,
                                      &stage.house.error));
    cr_expect_eq(stage_bound(&stage, KVK_TIER_DEVICE), 0);
    request.lease_id = 1;
    cr_expect_eq(kvk_transfer_begin(stage.house.cache, &stage.house.caller, &request, &ticket,
                                    &stage.tables, &stage.house.error),
                 KVK_INVALID, "one of the two");
    stage_stop(&stage);
}
