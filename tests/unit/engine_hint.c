/* Hints of priority and idle time: what stays longer, what goes sooner, and that both end. */
#include "tests/engine_tenants.h"

#define DEVICE KVK_TIER_DEVICE
#define HOST KVK_TIER_HOST

static struct kvk_prompt prompt_of(uint32_t *tokens, uint32_t name, uint32_t blocks,
                                   const struct kvk_priority_hint *hints, uint32_t hint_count)
{
    house_tokens(tokens, 4 * (uint64_t)blocks, name * 1000);
    return (struct kvk_prompt){.tokens = tokens,
                               .token_count = 4 * (uint64_t)blocks,
                               .hints = hints,
                               .hint_count = hint_count};
}

static void touch(struct party *party, uint32_t name, uint32_t blocks, uint32_t priority,
                  uint64_t duration_ms)
{
    uint32_t tokens[256];
    uint64_t touched;
    const struct kvk_priority_hint hint = {.first_token = 0,
                                           .token_count = 4 * (uint64_t)blocks,
                                           .priority = priority,
                                           .duration_ms = duration_ms};
    const struct kvk_prompt prompt = prompt_of(tokens, name, blocks, &hint, 1);
    cr_assert_eq(kvk_touch(party->house.cache, &party->house.caller, party->spaces[0], &prompt,
                           &touched, &party->house.error),
                 KVK_OK);
    cr_assert_eq(touched, 4 * (uint64_t)blocks);
}

static void seconds(struct party *party, uint64_t second)
{
    kvk_clock_manual_set(&party->house.manual, (1000 + second) * KVK_NS_PER_SECOND);
}

static void party_of_one(struct party *party, uint64_t device_blocks, uint64_t host_blocks)
{
    party_init(party, 1);
    party_start(party, device_blocks, host_blocks);
    party_be(party, 0);
}

Test(hint, what_is_to_stay_goes_after_all_others_until_its_time_is_over)
{
    struct party party;
    party_of_one(&party, 20, 0);
    for (uint32_t i = 0; i < 4; i++) {
        party_store(&party, 0, i, 1);
        touch(&party, i, 1, 100, 10000);
    }
    for (uint32_t i = 100; i < 200; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_cached(&party, 0, 0, 4), 4);
    kvk_cache_check(party.house.cache);
    seconds(&party, 11);
    for (uint32_t i = 200; i < 220; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_cached(&party, 0, 0, 4), 0, "a hint ages out");
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

Test(hint, strength_is_time)
{
    struct party party;
    party_of_one(&party, 20, 0);
    party_store(&party, 0, 0, 1);
    party_store(&party, 0, 1, 1);
    touch(&party, 0, 1, 100, 10000);
    touch(&party, 1, 1, 75, 10000);
    seconds(&party, 6);
    for (uint32_t i = 100; i < 140; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_cached(&party, 0, 0, 1), 1);
    cr_assert_eq(party_cached(&party, 0, 1, 1), 0, "75 counts for half the time");
    party_stop(&party);
}

Test(hint, what_may_go_first_does)
{
    struct party party;
    party_of_one(&party, 20, 0);
    for (uint32_t i = 0; i < 20; i++) {
        party_store(&party, 0, i, 1);
    }
    for (uint32_t i = 15; i < 20; i++) {
        touch(&party, i, 1, 0, 60000); /* used last, to go first */
    }
    for (uint32_t i = 100; i < 105; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_cached(&party, 0, 15, 5), 0);
    cr_assert_eq(party_cached(&party, 0, 0, 15), 15);
    touch(&party, 3, 1, 0, 60000);
    touch(&party, 3, 1, 50, 60000); /* taken back: now it is the newest */
    for (uint32_t i = 105; i < 119; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_cached(&party, 0, 3, 1), 1);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

Test(hint, hints_of_a_sequence_hold_for_what_it_seals)
{
    struct party party;
    uint32_t tokens[64];
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    party_of_one(&party, 20, 0);
    const struct kvk_priority_hint hints[2] = {
        {.first_token = 0, .token_count = 16, .priority = 100, .duration_ms = 60000},
        {.first_token = 8, .token_count = 3, .priority = 50, .duration_ms = 60000}};
    struct kvk_open_request request = {.session_id = party.sessions[0],
                                       .space_id = party.spaces[0],
                                       .prompt = prompt_of(tokens, 7, 8, hints, 2),
                                       .tier = -1};
    cr_assert_eq(kvk_sequence_open(party.house.cache, &party.house.caller, &request, &reply,
                                   &tables, &party.house.error),
                 KVK_OK, "%s", party.house.error.text);
    house_seal(&party.house, party.sessions[0], reply.sequence_id, 32);
    house_close(&party.house, party.sessions[0], reply.sequence_id);
    /* Blocks 0, 1 and 3 are to stay; 2 is not, but 3 hangs below it. */
    for (uint32_t i = 100; i < 150; i++) {
        party_store(&party, 0, i, 1);
    }
    house_tokens(tokens, 32, 7000);
    cr_assert_eq(house_cached(&party.house, party.spaces[0], tokens, 32), 16);
    kvk_tables_finish(&tables);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

Test(hint, hints_cannot_keep_more_than_their_share)
{
    struct party party;
    party_init(&party, 2);
    party.house.config.hint_percent = 25;
    party_start(&party, 40, 0);
    for (uint32_t i = 0; i < 40; i++) {
        party_store(&party, 0, i, 1);
        touch(&party, i, 1, 100, 3600000);
    }
    struct kvk_tenant_usage usage = party_usage(&party, 0);
    cr_assert_eq(usage.hints_left_out, 30);
    cr_assert_eq(
        party.house.cache->tenant_states[party_tenant(&party, 0)->index].hint_share.kept_bytes,
        10 * BLOCK);
    for (uint32_t i = 100; i < 180; i++) {
        party_store(&party, 0, i, 1);
    }
    cr_assert_eq(party_cached(&party, 0, 0, 10), 10);
    cr_assert_eq(party_cached(&party, 0, 10, 30), 0);
    /* Nor is another tenant kept out by them. */
    for (uint32_t i = 0; i < 20; i++) {
        party_store(&party, 1, i, 1);
    }
    cr_assert_geq(party_cached(&party, 1, 0, 20), 18);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

/* What was hinted while it was held counts from when it is let go. */
Test(hint, what_is_past_the_share_goes_like_any_other)
{
    struct party party;
    uint32_t tokens[160];
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    party_of_one(&party, 40, 0);
    const struct kvk_priority_hint hint = {
        .token_count = 160, .priority = 100, .duration_ms = 3600000};
    struct kvk_open_request request = {.session_id = party.sessions[0],
                                       .space_id = party.spaces[0],
                                       .prompt = prompt_of(tokens, 7, 40, &hint, 1),
                                       .tier = -1};
    cr_assert_eq(kvk_sequence_open(party.house.cache, &party.house.caller, &request, &reply,
                                   &tables, &party.house.error),
                 KVK_OK, "%s", party.house.error.text);
    house_seal(&party.house, party.sessions[0], reply.sequence_id, 160);
    house_close(&party.house, party.sessions[0], reply.sequence_id);
    for (uint32_t i = 0; i < 40; i++) {
        seconds(&party, 1 + i);
        party_store(&party, 0, 100 + i, 1);
        touch(&party, 100 + i, 1, 50, 1);
    }
    uint64_t kept =
        party.house.cache->tenant_states[party_tenant(&party, 0)->index].hint_share.kept_bytes;
    cr_assert_leq(kept, 10 * BLOCK, "%llu", (unsigned long long)kept);
    kvk_tables_finish(&tables);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

/* Against a plain list: stay, go and neutral, random times, LRU within. */
Test(hint, victims_are_those_of_a_plain_model)
{
    struct plain {
        uint32_t name;
        uint64_t used;
        int kind; /* -1 first, 1 last */
        uint64_t until;
    };
    enum { POOL = 24, NAMES = 60 };
    struct party party;
    struct kvk_random random;
    struct plain list[POOL];
    uint32_t count = 0;
    party_init(&party, 1);
    party.house.config.hint_percent = 100;
    party_start(&party, POOL, 0);
    party_be(&party, 0);
    kvk_random_init(&random, 99);
    for (uint64_t step = 1; step < 3000; step++) {
        seconds(&party, step);
        uint32_t name = (uint32_t)kvk_random_below(&random, NAMES);
        uint32_t place = 0;
        while (place < count && list[place].name != name) {
            place++;
        }
        if (place == count && count == POOL) {
            uint32_t victim = 0;
            for (uint32_t i = 0; i < count; i++) {
                list[i].kind = list[i].until <= step ? 0 : list[i].kind;
            }
            for (uint32_t i = 1; i < count; i++) {
                const struct plain *a = &list[i];
                const struct plain *b = &list[victim];
                bool sooner = a->kind != 0 ? a->until < b->until : a->used < b->used;
                victim = a->kind < b->kind || (a->kind == b->kind && sooner) ? i : victim;
            }
            list[victim] = list[--count];
            place = count;
        }
        party_store(&party, 0, name, 1);
        if (place == count) {
            list[count++] = (struct plain){.name = name};
        }
        list[place].used = step;
        if (kvk_random_below(&random, 3) == 0) {
            int kind = kvk_random_below(&random, 2) == 0 ? -1 : 1;
            /* Different ends, so that no two are equal. */
            uint64_t lasts = 1 + kvk_random_below(&random, 80);
            for (uint32_t i = 0; i < count; i++) {
                lasts += list[i].until == step + lasts ? 100 : 0;
            }
            touch(&party, name, 1, kind < 0 ? 0 : 100, lasts * 1000);
            list[place].kind = kind;
            list[place].until = step + lasts;
        }
        if (step % 50 == 0) {
            for (uint32_t i = 0; i < count; i++) {
                cr_assert_eq(party_cached(&party, 0, list[i].name, 1), 1, "step %u name %u",
                             (unsigned)step, list[i].name);
            }
            kvk_cache_check(party.house.cache);
        }
    }
    party_stop(&party);
}

/* ---- Idle time ---- */

Test(hint, idle_blocks_go_leaves_first_and_held_ones_stay)
{
    struct party party;
    struct kvk_sequence_reply reply;
    party_init(&party, 2);
    party_quota(&party, 0)->idle_ms = 10000;
    party_start(&party, 32, 64);
    party_store(&party, 0, 1, 6);
    party_store(&party, 0, 2, 3);
    for (uint32_t i = 0; i < 20; i++) {
        party_store(&party, 0, 100 + i, 1);
        party_store(&party, 1, 100 + i, 1);
    }
    cr_assert_eq(party_try_open(&party, 0, 2, 3, &reply), KVK_OK);
    seconds(&party, 6);
    touch(&party, 1, 4, 50, 1);
    seconds(&party, 12);
    kvk_cache_maintain(party.house.cache);
    kvk_cache_check(party.house.cache);
    cr_assert_eq(party_cached(&party, 0, 100, 20), 0);
    cr_assert_eq(party_cached(&party, 1, 100, 20), 20, "another tenant's stay");
    party_be(&party, 0);
    uint32_t tokens[24];
    house_tokens(tokens, 24, 1000);
    cr_assert_eq(house_cached(&party.house, party.spaces[0], tokens, 24), 16, "used since");
    house_tokens(tokens, 12, 2000);
    cr_assert_eq(house_cached(&party.house, party.spaces[0], tokens, 12), 12, "held");
    cr_assert_eq(party_usage(&party, 0).idle_blocks, 22);
    house_close(&party.house, party.sessions[0], reply.sequence_id);
    seconds(&party, 17);
    touch(&party, 2, 3, 100, 60000);
    seconds(&party, 40);
    kvk_cache_maintain(party.house.cache);
    house_tokens(tokens, 12, 2000);
    cr_assert_eq(house_cached(&party.house, party.spaces[0], tokens, 12), 12, "hinted to stay");
    seconds(&party, 90);
    kvk_cache_maintain(party.house.cache);
    cr_assert_eq(party_blocks(&party, 0, DEVICE) + party_blocks(&party, 0, HOST), 0);
    kvk_cache_check(party.house.cache);
    party_stop(&party);
}

Test(hint, a_space_may_say_an_idle_time_of_its_own)
{
    struct party party;
    struct kvk_space_reply reply;
    party_init(&party, 1);
    party_start(&party, 0, 64);
    party_store(&party, 0, 1, 3);
    struct kvk_space_request request = {
        .block_tokens = 4, .group_count = 1, .groups = {house_geometry()}, .idle_ms = 5000};
    request.identity.parts[KVK_IDENTITY_MODEL - 1] = house_view("model");
    cr_assert_eq(kvk_space_open(party.house.cache, &party.house.caller, &request, &reply,
                                &party.house.error),
                 KVK_OK);
    cr_assert(!reply.created);
    seconds(&party, 4);
    kvk_cache_maintain(party.house.cache);
    cr_assert_eq(party_blocks(&party, 0, HOST), 3);
    seconds(&party, 6);
    kvk_cache_maintain(party.house.cache);
    cr_assert_eq(party_blocks(&party, 0, HOST), 0);
    party_stop(&party);
}
