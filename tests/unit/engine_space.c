/* Spaces: identities, memory, costs, and their invalidation. */
#include <math.h>

#include "tests/engine_store.h"

#define DEVICE KVK_TIER_DEVICE

static void space_request(struct kvk_space_request *request, const char *model)
{
    memset(request, 0, sizeof(*request));
    request->block_tokens = 4;
    request->group_count = 1;
    request->groups[0] = house_geometry();
    request->identity.parts[KVK_IDENTITY_MODEL - 1] = house_view(model);
}

static void small_house(struct house *house)
{
    const struct house_options options = {.device_bytes = 64 << 10, .manual_clock = true};
    house_init(house);
    house_start(house, &options);
}

static enum kvk_status try_space(struct house *house, const struct kvk_space_request *request,
                                 struct kvk_space_reply *reply)
{
    return kvk_space_open(house->cache, &house->caller, request, reply, &house->error);
}

static uint64_t open_space(struct house *house, const struct kvk_space_request *request)
{
    struct kvk_space_reply reply;
    cr_assert_eq(try_space(house, request, &reply), KVK_OK, "%s", house->error.text);
    return reply.space_id;
}

/* ---- Identities ---- */

Test(space, the_same_identity_is_the_same_space)
{
    struct house house;
    struct kvk_space_request request;
    struct kvk_space_reply reply;
    small_house(&house);
    space_request(&request, "model");
    cr_assert_eq(try_space(&house, &request, &reply), KVK_OK);
    cr_assert(reply.created);
    cr_assert_eq(reply.group_count, 1);
    cr_assert_eq(reply.groups[0].block_bytes, 1024);
    cr_assert_eq(reply.groups[0].shard_count, 1);
    cr_assert_eq(reply.groups[0].rank_shard[0], 0);
    uint64_t id = reply.space_id;
    cr_assert_eq(try_space(&house, &request, &reply), KVK_OK);
    cr_assert_not(reply.created);
    cr_assert_eq(reply.space_id, id);
    house.caller.may_block = false;
    cr_assert_eq(try_space(&house, &request, &reply), KVK_OK, "finding one never blocks");
    space_request(&request, "another");
    cr_assert_eq(try_space(&house, &request, &reply), KVK_WOULD_BLOCK);
    house_stop(&house);
}

/* What differs in any part is another space, also where the parts' bytes in a row are the same. */
Test(space, every_part_counts_and_none_runs_into_the_next)
{
    struct house house;
    struct kvk_space_request request;
    uint64_t ids[64];
    uint32_t count = 0;
    small_house(&house);
    space_request(&request, "ab");
    ids[count++] = open_space(&house, &request);
    for (int part = 1; part < KVK_IDENTITY_PART_COUNT; part++) {
        space_request(&request, "ab");
        request.identity.parts[part] = house_view("c");
        ids[count++] = open_space(&house, &request);
        space_request(&request, "a");
        request.identity.parts[part] = house_view("bc");
        ids[count++] = open_space(&house, &request);
    }
    const char *pairs[][4] = {{"x", "yz", NULL, NULL},
                              {"xy", "z", NULL, NULL},
                              {"x", "y", "z", ""},
                              {"x", "", "y", "z"},
                              {"x", "y", NULL, NULL}};
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        space_request(&request, "ab");
        for (uint32_t k = 0; k < 2 && pairs[i][2 * k] != NULL; k++) {
            request.identity.extra[k].name = house_view(pairs[i][2 * k]);
            request.identity.extra[k].value = house_view(pairs[i][2 * k + 1]);
            request.identity.extra_count++;
        }
        ids[count++] = open_space(&house, &request);
    }
    for (uint32_t i = 0; i < count; i++) {
        for (uint32_t k = 0; k < i; k++) {
            cr_assert_neq(ids[i], ids[k], "identities %u and %u", k, i);
        }
    }
    house_stop(&house);
}

Test(space, extra_pairs_come_in_any_order_but_once)
{
    struct house house;
    struct kvk_space_request request;
    struct kvk_space_reply reply;
    small_house(&house);
    space_request(&request, "m");
    request.identity.extra_count = 3;
    const char *names[3] = {"b", "a", "ab"};
    for (uint32_t i = 0; i < 3; i++) {
        request.identity.extra[i].name = house_view(names[i]);
        request.identity.extra[i].value = house_view("1");
    }
    uint64_t id = open_space(&house, &request);
    request.identity.extra[0].name = house_view(names[2]);
    request.identity.extra[2].name = house_view(names[0]);
    cr_assert_eq(open_space(&house, &request), id);
    request.identity.extra[1].name = house_view(names[0]);
    cr_assert_eq(try_space(&house, &request, &reply), KVK_INVALID, "a name that comes twice");
    cr_assert_str_eq(house.error.field, "identity.extra[2].name");
    house_stop(&house);
}

Test(space, canonical_bytes_can_be_read_back)
{
    struct house house;
    struct kvk_space_request request;
    small_house(&house);
    space_request(&request, "model");
    request.identity.parts[KVK_IDENTITY_MASK - 1] = house_view("causal");
    request.identity.extra_count = 1;
    request.identity.extra[0].name = house_view("name");
    request.identity.extra[0].value = house_view("value");
    (void)open_space(&house, &request);
    const struct kvk_space *space = house.cache->spaces;
    size_t offset = 0;
    uint32_t tag;
    uint32_t count = 0;
    struct kvk_view part;
    while (kvk_identity_next(space->identity, space->identity_size, &offset, &tag, &part)) {
        count++;
        if (count <= KVK_IDENTITY_PART_COUNT) {
            cr_assert_eq(tag, count);
        }
        if (tag == KVK_IDENTITY_MODEL) {
            cr_assert(part.size == 5 && memcmp(part.data, "model", 5) == 0);
        } else if (tag == KVK_IDENTITY_EXTRA_VALUE) {
            cr_assert(part.size == 5 && memcmp(part.data, "value", 5) == 0);
        }
    }
    cr_assert_eq(count, KVK_IDENTITY_PART_COUNT + 2);
    house_stop(&house);
}

static void expect_invalid(struct house *house, const struct kvk_space_request *request,
                           const char *field)
{
    struct kvk_space_reply reply;
    cr_assert_eq(try_space(house, request, &reply), KVK_INVALID, "%s", field);
    cr_assert_str_eq(house->error.field, field);
    cr_assert_eq(house->error.cause, KVK_CAUSE_FIELD);
}

Test(space, what_cannot_be_is_refused_by_name)
{
    static char long_name[KVK_IDENTITY_PART_SIZE_MAX + 2];
    struct house house;
    struct kvk_space_request request;
    small_house(&house);
    space_request(&request, "");
    expect_invalid(&house, &request, "identity.model");
    space_request(&request, "\xff\xfe");
    expect_invalid(&house, &request, "identity.model");
    space_request(&request, "m");
    request.identity.parts[KVK_IDENTITY_REVISION - 1] =
        (struct kvk_view){.data = (const uint8_t *)"a\0b", .size = 3};
    expect_invalid(&house, &request, "identity.revision");
    memset(long_name, 'a', sizeof(long_name) - 1);
    space_request(&request, long_name);
    expect_invalid(&house, &request, "identity.model");
    const uint32_t block_tokens[2] = {0, KVK_BLOCK_TOKENS_MAX + 1};
    for (int i = 0; i < 2; i++) {
        space_request(&request, "m");
        request.block_tokens = block_tokens[i];
        expect_invalid(&house, &request, "block_tokens");
    }
    space_request(&request, "m");
    request.group_count = 0;
    expect_invalid(&house, &request, "groups");
    space_request(&request, "m");
    request.groups[0].kv_heads = 0;
    expect_invalid(&house, &request, "groups[0].kv_heads");
    space_request(&request, "m");
    request.group_count = 2;
    request.groups[1] = house_geometry();
    request.groups[1].block_tokens = 8;
    expect_invalid(&house, &request, "groups[1].block_tokens");
    request.groups[1] = house_geometry();
    request.groups[1].tensor_shards = 2;
    expect_invalid(&house, &request, "groups[1].tensor_shards");
    const double costs[3] = {NAN, INFINITY, -1};
    for (int i = 0; i < 3; i++) {
        space_request(&request, "m");
        request.flops_per_token = costs[i];
        expect_invalid(&house, &request, "prefill_cost.flops_per_token");
    }
    /* Digests are bytes, not text. */
    space_request(&request, "m");
    request.identity.parts[KVK_IDENTITY_TOKENIZER - 1] =
        (struct kvk_view){.data = (const uint8_t *)"\xff\0\xfe", .size = 3};
    (void)open_space(&house, &request);
    cr_assert_eq(house.cache->space_count, 1, "what was refused left nothing behind");
    house_stop(&house);
}

Test(space, another_geometry_is_a_mismatch)
{
    struct house house;
    struct kvk_space_request request;
    struct kvk_space_reply reply;
    small_house(&house);
    space_request(&request, "m");
    (void)open_space(&house, &request);
    request.groups[0].format_k = KVK_FORMAT_BF16;
    request.groups[0].format_v = KVK_FORMAT_BF16;
    cr_assert_eq(try_space(&house, &request, &reply), KVK_EXISTS);
    cr_assert_eq(house.error.cause, KVK_CAUSE_IDENTITY_MISMATCH);
    space_request(&request, "m");
    request.block_tokens = request.groups[0].block_tokens = 8;
    cr_assert_eq(try_space(&house, &request, &reply), KVK_EXISTS);
    cr_assert_str_eq(house.error.field, "block_tokens");
    house_stop(&house);
}

Test(space, a_block_larger_than_every_tier)
{
    struct house house;
    struct kvk_space_request request;
    struct kvk_space_reply reply;
    small_house(&house);
    space_request(&request, "m");
    request.groups[0].layers = 1000;
    cr_assert_eq(try_space(&house, &request, &reply), KVK_EXHAUSTED);
    cr_assert_eq(house.error.cause, KVK_CAUSE_TOO_LARGE);
    cr_assert_eq(house.cache->space_count, 0);
    house_stop(&house);
}

Test(space, unused_ones_make_place_for_new_ones)
{
    struct house house;
    struct kvk_space_request request;
    struct kvk_space_reply reply;
    const struct house_options options = {.device_bytes = 64 << 10, .manual_clock = true};
    house_init(&house);
    house.config.spaces = 2;
    house_start(&house, &options);
    uint64_t session = house_session(&house);
    uint64_t first = house_space(&house, "first");
    uint32_t tokens[4];
    house_tokens(tokens, 4, 1);
    uint64_t sequence = house_open(&house, session, first, tokens, 4).sequence_id;
    for (uint32_t i = 0; i < 20; i++) {
        char model[16];
        (void)snprintf(model, sizeof(model), "model-%u", i);
        (void)house_space(&house, model);
        kvk_cache_check(house.cache);
    }
    uint64_t second = house_space(&house, "second");
    uint64_t other = house_open(&house, session, second, tokens, 4).sequence_id;
    space_request(&request, "third");
    cr_assert_eq(try_space(&house, &request, &reply), KVK_EXHAUSTED, "both are in use");
    cr_assert_eq(house.error.cause, KVK_CAUSE_LIMIT);
    house_close(&house, session, other);
    (void)open_space(&house, &request);
    house_close(&house, session, sequence);
    house_stop(&house);
}

/* ---- Costs ---- */

Test(space, costs_are_as_measured)
{
    /* Llama-3.1-8B: tokens x (16.06e9 + 524288 x (p + half a block)). */
    struct kvk_space space = {
        .block_tokens = 16, .flops_per_token = 16.06e9, .flops_per_token_position = 524288};
    double first = 16.06e9 + 524288.0 * 8;
    cr_assert_float_eq(kvk_space_block_cost(&space, 0), 1, 1e-6);
    cr_assert_float_eq(kvk_space_block_cost(&space, 100), (16.06e9 + 524288.0 * 1608) / first,
                       1e-6);
    cr_assert_float_eq(kvk_space_block_cost(&space, 1914), 2, 1e-2,
                       "attention equals the linear part at about 31k tokens");
    cr_assert_eq(kvk_space_recompute_ns(&space, 0, 1000), 0, "the speed is not known");
    space.flops_per_second = 1e15;
    cr_assert_float_eq((double)kvk_space_recompute_ns(&space, 0, 1000),
                       (16.06e9 * 1000 + 524288 * 500e3) / 1e15 * 1e9, 2);
    const struct kvk_space unknown = {.block_tokens = 16};
    cr_assert_float_eq(kvk_space_block_cost(&unknown, 500), 1, 1e-6);
}

/* ---- Invalidation ---- */

struct rig {
    struct house house;
    uint64_t session;
    uint64_t space;
};

static void rig_start(struct rig *rig)
{
    const struct house_options options = {
        .device_bytes = 64 << 10, .host_bytes = 64 << 10, .manual_clock = true};
    house_init(&rig->house);
    house_start(&rig->house, &options);
    rig->session = house_session(&rig->house);
    rig->space = house_space(&rig->house, "model");
}

static struct kvk_prompt prompt_of(const uint32_t *tokens, uint64_t count, const char *salt)
{
    return (struct kvk_prompt){.tokens = tokens,
                               .token_count = count,
                               .salt = (const uint8_t *)salt,
                               .salt_size = strlen(salt)};
}

static uint64_t open_salted(struct rig *rig, const uint32_t *tokens, uint64_t count,
                            const char *salt)
{
    struct kvk_sequence_reply reply;
    struct kvk_tables tables = {.part_count = 0};
    const struct kvk_open_request request = {.session_id = rig->session,
                                             .space_id = rig->space,
                                             .prompt = prompt_of(tokens, count, salt),
                                             .tier = -1};
    cr_assert_eq(kvk_sequence_open(rig->house.cache, &rig->house.caller, &request, &reply, &tables,
                                   &rig->house.error),
                 KVK_OK, "%s", rig->house.error.text);
    kvk_tables_finish(&tables);
    return reply.sequence_id;
}

static void seal_and_close(struct rig *rig, const uint32_t *tokens, uint64_t count,
                           const char *salt)
{
    uint64_t id = open_salted(rig, tokens, count, salt);
    house_seal(&rig->house, rig->session, id, count);
    house_close(&rig->house, rig->session, id);
}

static uint64_t cached(struct rig *rig, const uint32_t *tokens, uint64_t count, const char *salt)
{
    struct kvk_lookup_reply reply;
    const struct kvk_lookup_request request = {.space_id = rig->space,
                                               .prompt = prompt_of(tokens, count, salt)};
    cr_assert_eq(
        kvk_lookup(rig->house.cache, &rig->house.caller, &request, &reply, &rig->house.error),
        KVK_OK);
    return reply.cached_tokens;
}

static struct kvk_invalidate_reply invalidate(struct rig *rig,
                                              const struct kvk_invalidate_request *request)
{
    struct kvk_invalidate_reply reply;
    cr_assert_eq(
        kvk_invalidate(rig->house.cache, &rig->house.caller, request, &reply, &rig->house.error),
        KVK_OK, "%s", rig->house.error.text);
    kvk_cache_check(rig->house.cache);
    return reply;
}

Test(invalidate, a_whole_space)
{
    struct rig rig;
    uint32_t tokens[16];
    rig_start(&rig);
    house_tokens(tokens, 16, 1);
    seal_and_close(&rig, tokens, 16, "");
    uint64_t held = open_salted(&rig, tokens, 8, "");
    const struct kvk_invalidate_request request = {.space_id = rig.space};
    struct kvk_invalidate_reply reply = invalidate(&rig, &request);
    cr_assert_eq(reply.spaces, 1);
    cr_assert_eq(reply.blocks[DEVICE], 4);
    cr_assert_eq(reply.held_blocks, 2);
    cr_assert_eq(cached(&rig, tokens, 16, ""), 0);
    cr_assert_eq(rig.house.cache->tiers[DEVICE].used_bytes, 2 * 1024, "its holder may finish");
    house_close(&rig.house, rig.session, held);
    cr_assert_eq(rig.house.cache->tiers[DEVICE].used_bytes, 0);
    seal_and_close(&rig, tokens, 16, "");
    cr_assert_eq(cached(&rig, tokens, 16, ""), 16, "what is new is found");
    house_stop(&rig.house);
}

/* An open sequence from before must not bring old bytes back under the new generation. */
Test(invalidate, what_was_begun_before_is_not_found_after)
{
    struct rig rig;
    uint32_t tokens[16];
    rig_start(&rig);
    house_tokens(tokens, 16, 1);
    uint64_t before = open_salted(&rig, tokens, 16, "");
    const struct kvk_invalidate_request request = {.space_id = rig.space};
    (void)invalidate(&rig, &request);
    house_seal(&rig.house, rig.session, before, 16);
    cr_assert_eq(cached(&rig, tokens, 16, ""), 0);
    house_close(&rig.house, rig.session, before);
    cr_assert_eq(rig.house.cache->tiers[DEVICE].used_bytes, 0);
    house_stop(&rig.house);
}

Test(invalidate, by_names)
{
    struct rig rig;
    uint32_t tokens[8];
    struct kvk_space_request request;
    rig_start(&rig);
    house_tokens(tokens, 8, 1);
    const char *revisions[2] = {"r1", "r2"};
    uint64_t spaces[2];
    for (int i = 0; i < 2; i++) {
        space_request(&request, "named");
        request.identity.parts[KVK_IDENTITY_REVISION - 1] = house_view(revisions[i]);
        spaces[i] = rig.space = open_space(&rig.house, &request);
        seal_and_close(&rig, tokens, 8, "");
    }
    struct kvk_invalidate_request names = {.model = house_view("named"),
                                           .revision = house_view("r1")};
    cr_assert_eq(invalidate(&rig, &names).spaces, 1);
    rig.space = spaces[0];
    cr_assert_eq(cached(&rig, tokens, 8, ""), 0);
    rig.space = spaces[1];
    cr_assert_eq(cached(&rig, tokens, 8, ""), 8);
    names = (struct kvk_invalidate_request){.model = house_view("unknown")};
    cr_assert_eq(invalidate(&rig, &names).spaces, 0);
    names = (struct kvk_invalidate_request){.space_id = 0};
    cr_assert_eq(invalidate(&rig, &names).spaces, 3, "all of the tenant");
    cr_assert_eq(cached(&rig, tokens, 8, ""), 0);
    house_stop(&rig.house);
}

Test(invalidate, by_salt)
{
    struct rig rig;
    uint32_t tokens[16];
    rig_start(&rig);
    house_tokens(tokens, 16, 1);
    seal_and_close(&rig, tokens, 16, "alice");
    seal_and_close(&rig, tokens, 16, "bob");
    uint64_t running = open_salted(&rig, tokens, 12, "alice");
    const struct kvk_invalidate_request request = {
        .space_id = rig.space, .by_salt = true, .salt = house_view("alice")};
    struct kvk_invalidate_reply reply = invalidate(&rig, &request);
    cr_assert_eq(reply.blocks[DEVICE], 4);
    cr_assert_eq(reply.held_blocks, 3);
    cr_assert_eq(cached(&rig, tokens, 16, "alice"), 0);
    cr_assert_eq(cached(&rig, tokens, 16, "bob"), 16);
    house_close(&rig.house, rig.session, running);
    kvk_cache_check(rig.house.cache);
    cr_assert_eq(rig.house.cache->tiers[DEVICE].used_bytes, 4 * 1024, "bob's");
    seal_and_close(&rig, tokens, 16, "alice");
    cr_assert_eq(cached(&rig, tokens, 16, "alice"), 16);
    house_stop(&rig.house);
}

Test(invalidate, by_prefix)
{
    struct rig rig;
    uint32_t tokens[16];
    uint32_t branch[16];
    rig_start(&rig);
    house_tokens(tokens, 16, 1);
    house_tokens(branch, 16, 1);
    branch[12] = 99;
    seal_and_close(&rig, tokens, 16, "");
    seal_and_close(&rig, branch, 16, "");
    /* It goes on under the prefix: what it seals later is its own. */
    uint64_t running = open_salted(&rig, tokens, 12, "");
    const struct kvk_prompt prefix = prompt_of(tokens, 9, "");
    const struct kvk_invalidate_request request = {.space_id = rig.space, .prefix = &prefix};
    struct kvk_invalidate_reply reply = invalidate(&rig, &request);
    cr_assert_eq(reply.blocks[DEVICE], 4, "blocks 1 and 2, and both of block 3");
    cr_assert_eq(reply.held_blocks, 2);
    cr_assert_eq(cached(&rig, tokens, 16, ""), 4);
    cr_assert_eq(cached(&rig, branch, 16, ""), 4);
    struct kvk_sequence_reply appended;
    const struct kvk_append_request append = {.session_id = rig.session,
                                              .sequence_id = running,
                                              .expected_length = 12,
                                              .tokens = tokens + 12,
                                              .token_count = 4};
    cr_assert_eq(kvk_sequence_append(rig.house.cache, &rig.house.caller, &append, &appended, NULL,
                                     &rig.house.error),
                 KVK_OK, "%s", rig.house.error.text);
    house_seal(&rig.house, rig.session, running, 16);
    cr_assert_eq(cached(&rig, tokens, 16, ""), 4, "what was begun before is not found after");
    house_close(&rig.house, rig.session, running);
    kvk_cache_check(rig.house.cache);
    cr_assert_eq(rig.house.cache->tiers[DEVICE].used_bytes, 1024, "block 0");
    seal_and_close(&rig, tokens, 16, "");
    cr_assert_eq(cached(&rig, tokens, 16, ""), 16);
    house_stop(&rig.house);
}

/* More blocks than one slice: found by nobody at once, and free soon after. */
Test(invalidate, large_spaces_go_in_slices)
{
    struct rig rig;
    const struct house_options options = {.device_bytes = 20000 << 10, .manual_clock = true};
    house_init(&rig.house);
    house_start(&rig.house, &options);
    rig.session = house_session(&rig.house);
    rig.space = house_space(&rig.house, "model");
    uint32_t *tokens = malloc(60000 * sizeof(*tokens));
    house_tokens(tokens, 60000, 1);
    seal_and_close(&rig, tokens, 60000, "");
    const struct kvk_invalidate_request request = {.space_id = rig.space};
    struct kvk_invalidate_reply reply = invalidate(&rig, &request);
    cr_assert_eq(reply.blocks[DEVICE], 15000);
    cr_assert_eq(cached(&rig, tokens, 60000, ""), 0);
    cr_assert_gt(rig.house.cache->tiers[DEVICE].used_bytes, 0, "the rest goes in slices");
    for (uint32_t i = 0; i < 10; i++) {
        kvk_cache_maintain(rig.house.cache);
    }
    kvk_cache_check(rig.house.cache);
    cr_assert_eq(rig.house.cache->tiers[DEVICE].used_bytes, 0);
    cr_assert_eq(rig.house.cache->stats.invalidated_blocks, 15000);
    free(tokens);
    house_stop(&rig.house);
}

static uint32_t notices;
static uint64_t notice_value;

static void on_notice(void *context, enum kvk_notice_kind kind, uint64_t value)
{
    (void)context;
    cr_assert_eq(kvk_locks_held(), 0);
    cr_assert_eq(kind, KVK_NOTICE_INVALIDATED);
    notices++;
    notice_value = value;
}

Test(invalidate, sessions_are_told)
{
    struct rig rig;
    rig_start(&rig);
    struct kvk_hello hello = house_hello();
    hello.on_notice = on_notice;
    (void)house_begin(&rig.house, &hello);
    const struct kvk_invalidate_request request = {.space_id = rig.space};
    (void)invalidate(&rig, &request);
    cr_assert_eq(notices, 1);
    cr_assert_eq(notice_value, rig.space);
    house_stop(&rig.house);
}
