/*
 * Attention over what sequences and leases hold, at random and in the field's cases, against the
 * plain loop of tests/engine_ask.h.
 */
#include "daemon/attention.h"

#include <math.h>
#include <stdio.h>

#include "tests/engine_ask.h"
#include "tests/engine_house.h"

/* ---- Shapes, tiers and masks at random ---- */

static struct kvk_geometry random_geometry(struct kvk_random *random)
{
    static const enum kvk_format formats[] = {KVK_FORMAT_FP32, KVK_FORMAT_FP16, KVK_FORMAT_BF16};
    struct kvk_geometry geometry = {
        .layers = (uint32_t)kvk_random_between(random, 1, 3),
        .kv_heads = 1U << kvk_random_below(random, 3),
        .head_size_k = 8 * (uint32_t)kvk_random_between(random, 1, 4),
        .head_size_v = 8 * (uint32_t)kvk_random_between(random, 1, 4),
        .block_tokens = 2 * (uint32_t)kvk_random_between(random, 1, 6),
        .layout = KVK_LAYOUT_HEADS_FIRST,
        .attention = KVK_ATTENTION_SELF,
        .tensor_shards = 1U << kvk_random_below(random, 3),
        .latent = kvk_random_chance(random, 0.2),
    };
    geometry.format_k = formats[kvk_random_below(random, 3)];
    geometry.format_v = formats[kvk_random_below(random, 3)];
    geometry.pipeline_shards = (uint32_t)kvk_random_between(random, 1, geometry.layers);
    if (geometry.latent) {
        geometry.format_v = KVK_FORMAT_NONE;
        if (geometry.head_size_v > geometry.head_size_k) {
            geometry.head_size_v = geometry.head_size_k;
        }
    }
    if (kvk_random_chance(random, 0.3)) {
        geometry.window = (uint32_t)kvk_random_between(random, 1, 40);
        geometry.sinks = (uint32_t)kvk_random_below(random, 8);
    }
    return geometry;
}

/* Four sequences, two of them sharing a prefix; some swapped out, so that shared blocks lie on the
 * device and their own on the host. */
struct scene {
    uint32_t tokens[4][128];
    uint64_t lengths[4];
    uint64_t ids[4];
};

static void scene_make(struct house *house, struct kvk_random *random, uint64_t session_id,
                       uint64_t space_id, struct scene *scene)
{
    uint64_t shared = kvk_random_between(random, 1, 60);

    for (uint32_t i = 0; i < 4; i++) {
        scene->lengths[i] = kvk_random_between(random, 1, 128);
        for (uint64_t t = 0; t < 128; t++) {
            bool same = i == 1 && t < shared;
            scene->tokens[i][t] = same ? scene->tokens[0][t] : (uint32_t)kvk_random_next(random);
        }
        scene->ids[i] =
            sequence_make(house, session_id, space_id, scene->tokens[i], scene->lengths[i]);
    }
    for (uint32_t i = 1; i < 4; i++) {
        if (kvk_random_chance(random, 0.6)) {
            swap_out(house, session_id, scene->ids[i]);
        }
    }
}

static void scene_ask(struct house *house, struct kvk_random *random, uint64_t session_id,
                      const struct kvk_geometry *geometry, const struct scene *scene,
                      uint64_t tier_tokens[KVK_MEMORY_TIER_COUNT])
{
    static const enum kvk_format formats[] = {KVK_FORMAT_FP32, KVK_FORMAT_FP16, KVK_FORMAT_BF16};
    struct ask ask;
    uint32_t shard = kvk_geometry_rank_shard(geometry, 0);
    uint32_t heads =
        kvk_geometry_shard_heads(geometry, shard) * (uint32_t)kvk_random_between(random, 1, 4);

    ask_init(&ask, session_id, geometry, heads);
    ask.request.format = formats[kvk_random_below(random, 3)];
    ask.request.layer = (uint32_t)kvk_random_below(random, geometry->layers);
    ask.request.rank = (uint32_t)kvk_random_below(random, geometry->tensor_shards);
    ask.request.soft_cap = kvk_random_chance(random, 0.3) ? 5.0F : 0.0F;
    ask.request.causal = geometry->window != 0 || kvk_random_chance(random, 0.7);
    ask.request.group_window = geometry->window != 0;
    if (kvk_random_chance(random, 0.3)) {
        ask_slopes(&ask);
    }
    if (kvk_random_chance(random, 0.3)) {
        ask_sinks(&ask);
    }
    if (geometry->window == 0 && kvk_random_chance(random, 0.4)) {
        ask.request.window = (uint32_t)kvk_random_between(random, 1, 50);
        ask.request.sinks = (uint32_t)kvk_random_below(random, 6);
    }
    for (uint32_t i = 0; i < 4; i++) {
        uint64_t length = scene->lengths[i];
        /* Under the group's window only the end is still there. */
        uint64_t position = geometry->window != 0 ? length : kvk_random_below(random, length + 3);
        struct kvk_attention_item *item =
            ask_add(&ask, scene->ids[i], scene->tokens[i], length, position,
                    (uint32_t)kvk_random_between(random, 1, 5));
        if (geometry->window == 0 && kvk_random_chance(random, 0.3)) {
            item->token_limit = kvk_random_between(random, 1, length + 5);
        }
    }
    ask_right(house, &ask, "random");
    for (uint32_t i = 0; i < 4; i++) {
        tier_tokens[KVK_TIER_DEVICE] += ask.items[i].device_tokens;
        tier_tokens[KVK_TIER_HOST] += ask.items[i].host_tokens;
    }
    ask_finish(&ask);
}

Test(engine_attention, random_against_a_plain_loop, .timeout = 240)
{
    uint64_t tier_tokens[KVK_MEMORY_TIER_COUNT] = {0, 0};
    uint32_t mixed = 0;

    for (uint64_t seed = 0; seed < 60; seed++) {
        struct house house;
        struct kvk_random random;
        struct scene scene;

        kvk_random_init(&random, seed);
        house_init(&house);
        house_start(&house,
                    &(struct house_options){.device_bytes = 16 << 20, .host_bytes = 16 << 20});
        struct kvk_geometry geometry = random_geometry(&random);
        uint64_t space_id = house_space_of(&house, &house.caller, "model", &geometry, 1);
        uint64_t session_id = house_session(&house);
        scene_make(&house, &random, session_id, space_id, &scene);
        for (int i = 0; i < 6; i++) {
            uint64_t before = tier_tokens[KVK_TIER_HOST];
            scene_ask(&house, &random, session_id, &geometry, &scene, tier_tokens);
            mixed += tier_tokens[KVK_TIER_HOST] > before;
        }
        cr_expect_gt(house.cache->stats.attended_tokens, 0);
        house_stop(&house);
    }
    /* Or the test would not test what it is for. */
    cr_expect_gt(tier_tokens[KVK_TIER_DEVICE], 1000);
    cr_expect_gt(tier_tokens[KVK_TIER_HOST], 1000);
    cr_expect_gt(mixed, 20);
}

/* One item of which both tiers hold a part. */
Test(engine_attention, parts_are_merged)
{
    struct house house;
    uint32_t tokens[64];
    struct kvk_geometry geometry = house_geometry();
    struct ask ask;

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20, .host_bytes = 1 << 20});
    uint64_t space_id = house_space(&house, "model");
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 64, 5);
    uint64_t keeper = sequence_make(&house, session_id, space_id, tokens, 24);
    uint64_t long_one = sequence_make(&house, session_id, space_id, tokens, 50);
    swap_out(&house, session_id, long_one);

    ask_init(&ask, session_id, &geometry, 4);
    (void)ask_add(&ask, long_one, tokens, 50, 49, 2);
    (void)ask_add(&ask, keeper, tokens, 24, 10, 3);
    ask_right(&house, &ask, "swapped out");
    cr_expect_eq(ask.items[0].device_tokens, 24);
    cr_expect_eq(ask.items[0].host_tokens, 26);
    cr_expect_eq(ask.items[1].device_tokens, 13);
    cr_expect_eq(ask.items[1].host_tokens, 0);
    cr_expect_eq(house.cache->stats.attended_tokens, 63);
    /* A sink logit counts once, though both tiers have a part. */
    ask_sinks(&ask);
    ask_slopes(&ask);
    ask_right(&house, &ask, "sink logits over two tiers");
    swap_in(&house, session_id, long_one);
    ask_right(&house, &ask, "swapped in");
    cr_expect_eq(ask.items[0].device_tokens, 50);
    ask_finish(&ask);
    house_stop(&house);
}

/* The host tier alone: everything is attended there. */
Test(engine_attention, without_a_device_tier)
{
    struct house house;
    uint32_t tokens[20];
    struct kvk_geometry geometry = house_geometry();
    struct ask ask;

    house_init(&house);
    house_start(&house, &(struct house_options){.host_bytes = 1 << 20});
    uint64_t space_id = house_space(&house, "model");
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 20, 5);
    uint64_t id = sequence_make(&house, session_id, space_id, tokens, 20);
    ask_init(&ask, session_id, &geometry, 2);
    (void)ask_add(&ask, id, tokens, 20, 19, 1);
    ask_right(&house, &ask, "host");
    cr_expect_eq(ask.items[0].host_tokens, 20);
    ask_finish(&ask);
    house_stop(&house);
}

Test(engine_attention, by_lease)
{
    struct house house;
    uint32_t tokens[20];
    struct kvk_geometry geometry = house_geometry();
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_pin_reply lease;
    struct ask ask;

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20, .host_bytes = 1 << 20});
    uint64_t space_id = house_space(&house, "model");
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 20, 5);
    house_close(&house, session_id, sequence_make(&house, session_id, space_id, tokens, 18));
    const struct kvk_pin_request pin = {.session_id = session_id,
                                        .space_id = space_id,
                                        .prompt = {.tokens = tokens, .token_count = 20},
                                        .ttl_ms = 10000};
    cr_assert_eq(kvk_lease_pin(house.cache, &house.caller, &pin, &lease, &tables, &house.error),
                 KVK_OK);
    kvk_tables_finish(&tables);
    cr_assert_eq(lease.cached_tokens, 16);
    ask_init(&ask, session_id, &geometry, 2);
    struct kvk_attention_item *item = ask_add(&ask, 0, tokens, 16, 16, 2);
    item->lease_id = lease.lease_id;
    ask_right(&house, &ask, "lease");
    ask_finish(&ask);
    house_stop(&house);
}

/* Forks of one prefix in one batch: its blocks are pinned once. */
Test(engine_attention, forks_share)
{
    struct house house;
    uint32_t tokens[4][24];
    uint64_t ids[3];
    struct kvk_geometry geometry = house_geometry();
    const struct kvk_request_id none = {.size = 0};
    struct ask ask;

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20, .host_bytes = 1 << 20});
    uint64_t space_id = house_space(&house, "model");
    uint64_t session_id = house_session(&house);
    for (uint32_t i = 0; i < 4; i++) {
        house_tokens(tokens[i], 18, 5);
        house_tokens(tokens[i] + 18, 6, 1000 * (i + 1));
    }
    uint64_t parent = sequence_make(&house, session_id, space_id, tokens[0], 18);
    cr_assert_eq(kvk_sequence_fork(house.cache, &house.caller, session_id, parent, 18, 3, &none,
                                   ids, &house.error),
                 KVK_OK, "%s", house.error.text);
    ask_init(&ask, session_id, &geometry, 4);
    (void)ask_add(&ask, parent, tokens[0], 18, 17, 1);
    for (uint32_t i = 0; i < 3; i++) {
        /* The copy of the shared tail keeps what was sealed in it. */
        sequence_append(&house, session_id, ids[i], 18, tokens[i + 1] + 18, i + 1);
        (void)ask_add(&ask, ids[i], tokens[i + 1], 19 + i, 18 + i, 1);
    }
    ask_right(&house, &ask, "forks");
    ask_finish(&ask);
    house_stop(&house);
}

/* Only what is sealed is seen; drafts that are sealed are, too. */
Test(engine_attention, unsealed_tokens_are_not_seen)
{
    struct house house;
    uint32_t tokens[12];
    struct kvk_geometry geometry = house_geometry();
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    struct ask ask;

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20});
    uint64_t space_id = house_space(&house, "model");
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 12, 5);
    uint64_t id = sequence_make(&house, session_id, space_id, tokens, 6);
    const struct kvk_append_request append = {.session_id = session_id,
                                              .sequence_id = id,
                                              .expected_length = 6,
                                              .tokens = tokens + 6,
                                              .token_count = 5,
                                              .draft = true};
    cr_assert_eq(
        kvk_sequence_append(house.cache, &house.caller, &append, &reply, &tables, &house.error),
        KVK_OK);
    kvk_tables_finish(&tables);
    ask_init(&ask, session_id, &geometry, 2);
    (void)ask_add(&ask, id, tokens, 6, 10, 1);
    ask_right(&house, &ask, "granted");
    cr_expect_eq(ask.items[0].device_tokens, 6);
    sequence_write(&house, id, 6);
    house_seal(&house, session_id, id, 11);
    ask.sealed[0] = 11;
    ask_right(&house, &ask, "sealed drafts");
    cr_expect_eq(ask.items[0].device_tokens, 11);
    ask_finish(&ask);
    house_stop(&house);
}

/* ---- Cases ---- */

/* Case B1: attention from the last position, at a block's edge and beside it, cold and cached. */
Test(engine_attention, b1_cold_and_cached_agree)
{
    struct house house;
    uint32_t tokens[17];
    struct kvk_geometry geometry = house_geometry();

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20});
    uint64_t space_id = house_space(&house, "model");
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 17, 5);
    house_close(&house, session_id, sequence_make(&house, session_id, space_id, tokens, 16));
    for (uint64_t length = 15; length <= 17; length++) {
        struct kvk_tables tables = {.part_count = 0};
        struct kvk_sequence_reply reply;
        struct ask ask;
        const struct kvk_open_request request = {
            .session_id = session_id,
            .space_id = space_id,
            .prompt = {.tokens = tokens, .token_count = length},
            .leave_last = true,
            .tier = -1};
        cr_assert_eq(
            kvk_sequence_open(house.cache, &house.caller, &request, &reply, &tables, &house.error),
            KVK_OK);
        kvk_tables_finish(&tables);
        cr_expect_eq(reply.cached_tokens, length == 17 ? 16 : 12);
        sequence_write(&house, reply.sequence_id, reply.grant_first);
        house_seal(&house, session_id, reply.sequence_id, length);
        ask_init(&ask, session_id, &geometry, 4);
        (void)ask_add(&ask, reply.sequence_id, tokens, length, length - 1, 1);
        ask_right(&house, &ask, "cached");
        ask_finish(&ask);
        house_close(&house, session_id, reply.sequence_id);
    }
    house_stop(&house);
}

/* Case B6: a chunk longer than the window; every one of its queries sees its whole window. */
Test(engine_attention, b6_a_chunk_longer_than_the_window)
{
    struct house house;
    uint32_t tokens[40];
    struct kvk_geometry geometry = house_geometry();
    struct ask ask;

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20});
    geometry.window = 8;
    uint64_t space_id = house_space_of(&house, &house.caller, "windowed", &geometry, 1);
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 40, 5);
    uint64_t id = sequence_make(&house, session_id, space_id, tokens, 6);
    sequence_append(&house, session_id, id, 6, tokens + 6, 12);
    ask_init(&ask, session_id, &geometry, 2);
    ask.request.group_window = true;
    (void)ask_add(&ask, id, tokens, 18, 6, 12);
    ask_right(&house, &ask, "chunk");
    cr_expect_eq(ask.items[0].device_tokens, 18);

    /* Once the sequence has gone on, the same queries would need what the window has let go. */
    sequence_append(&house, session_id, id, 18, tokens + 18, 12);
    sequence_append(&house, session_id, id, 30, tokens + 30, 1);
    ask.sealed[0] = 31;
    cr_expect_eq(ask_run(&house, &ask), KVK_PRECONDITION);
    cr_expect_eq(house.error.cause, KVK_CAUSE_WINDOW_GONE, "%s", house.error.text);
    ask_finish(&ask);
    ask_init(&ask, session_id, &geometry, 2);
    ask.request.group_window = true;
    (void)ask_add(&ask, id, tokens, 31, 30, 1);
    ask_right(&house, &ask, "the next one");
    cr_expect_eq(ask.items[0].device_tokens, 8);
    /* A wider mask than the group's own sees what is gone. */
    ask.request.group_window = false;
    cr_expect_eq(ask_run(&house, &ask), KVK_PRECONDITION);
    ask_finish(&ask);
    house_stop(&house);
}

/* Case B7: an encoder's K/V is as long as the encoder's tokens, goes to the host and comes back,
 * is seen whole, and is nothing to a decoder. */
Test(engine_attention, b7_cross_attention)
{
    struct house house;
    uint32_t tokens[1500];
    struct kvk_geometry geometry = house_geometry();
    struct kvk_geometry decoder = house_geometry();
    struct ask ask;

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 2 << 20, .host_bytes = 2 << 20});
    geometry.block_tokens = 16;
    geometry.attention = KVK_ATTENTION_CROSS;
    decoder.block_tokens = 16;
    uint64_t encoder_id = house_space_of(&house, &house.caller, "encoder", &geometry, 1);
    uint64_t decoder_id = house_space_of(&house, &house.caller, "decoder", &decoder, 1);
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 1500, 1);
    uint64_t id = sequence_make(&house, session_id, encoder_id, tokens, 1500);
    cr_expect_eq(house_bound(&house, KVK_TIER_DEVICE), 94 * UINT64_C(4096));
    ask_init(&ask, session_id, &geometry, 2);
    ask.request.window = 4; /* means nothing here */
    (void)ask_add(&ask, id, tokens, 1500, 0, 2);
    ask_right(&house, &ask, "device");
    swap_out(&house, session_id, id);
    cr_expect_eq(house_bound(&house, KVK_TIER_DEVICE), 0);
    ask_right(&house, &ask, "host");
    cr_expect_eq(ask.items[0].host_tokens, 1500);
    swap_in(&house, session_id, id);
    ask_right(&house, &ask, "device again");
    cr_expect_eq(ask.items[0].device_tokens, 1500);
    cr_expect_eq(house_cached(&house, decoder_id, tokens, 1500), 0);
    ask_sinks(&ask);
    ask_right(&house, &ask, "sink logits");
    ask_slopes(&ask);
    cr_expect_eq(ask_run(&house, &ask), KVK_INVALID, "an encoder's tokens are at no distance");
    cr_expect_str_eq(house.error.field, "alibi_slopes");
    ask_finish(&ask);
    house_stop(&house);
}

static void two_tenants(struct house *house)
{
    house_init(house);
    house->config.tenants = calloc(2, sizeof(house->config.tenants[0]));
    house->config.credentials = calloc(2, sizeof(house->config.credentials[0]));
    house->config.tenant_count = 2;
    house->config.credential_count = 2;
    strcpy(house->config.tenants[0].name, "a");
    strcpy(house->config.tenants[1].name, "b");
    house->config.credentials[0] = (struct kvk_credential_config){
        .name = "a", .token = "credential-of-a-0", .tenants = {0}, .tenant_count = 1};
    house->config.credentials[1] = (struct kvk_credential_config){
        .name = "b", .token = "credential-of-b-0", .tenants = {1}, .tenant_count = 1};
}

/* Case L4: nothing to see is an answer, and one tenant's bytes are never another's. */
Test(engine_attention, l4_another_tenants_room)
{
    struct house house;
    uint32_t tokens[4];
    struct kvk_geometry geometry = house_geometry();
    struct ask ask;

    two_tenants(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1024});
    house.caller = house_caller_of(&house, "credential-of-a-0");
    house_tokens(tokens, 4, 5);
    uint64_t space_a = house_space(&house, "model");
    uint64_t session_a = house_session(&house);
    uint64_t id = house_open(&house, session_a, space_a, tokens, 4).sequence_id;
    kvk_lock(&house.cache->lock);
    struct kvk_sequence *sequence = kvk_table_get(&house.cache->sequence_table, id);
    const struct kvk_block *block =
        kvk_index_block(house.cache->index, sequence->groups[0].blocks[0]);
    memset(kvk_block_address(house.cache, block, KVK_TIER_DEVICE, 0), 0xff, 1024);
    kvk_unlock(&house.cache->lock);
    house_seal(&house, session_a, id, 4);
    house_close(&house, session_a, id);

    house.caller = house_caller_of(&house, "credential-of-b-0");
    uint64_t space_b = house_space(&house, "model");
    uint64_t session_b = house_session(&house);
    struct kvk_sequence_reply reply = house_open(&house, session_b, space_b, tokens, 3);
    cr_expect_eq(reply.cached_tokens, 0);
    const struct kvk_read_request read = {.session_id = session_b,
                                          .sequence_id = reply.sequence_id};
    kvk_lock(&house.cache->lock);
    sequence = kvk_table_get(&house.cache->sequence_table, reply.sequence_id);
    block = kvk_index_block(house.cache->index, sequence->groups[0].blocks[0]);
    uint8_t *page = kvk_block_address(house.cache, block, KVK_TIER_DEVICE, 0);
    for (uint32_t i = 0; i < 1024; i++) {
        cr_assert_neq(page[i], 0xff, "a's byte %u", i);
    }
    for (uint32_t t = 0; t < 3; t++) {
        token_write(&geometry, 0, page, t, tokens[t], t);
    }
    kvk_unlock(&house.cache->lock);
    house_seal(&house, session_b, reply.sequence_id, 3);
    ask_init(&ask, session_b, &geometry, 2);
    (void)ask_add(&ask, reply.sequence_id, tokens, 3, 2, 1);
    (void)ask_add(&ask, reply.sequence_id, tokens, 3, 0, 3);
    ask_right(&house, &ask, "b");
    ask_finish(&ask);

    const uint8_t *data = NULL;
    uint64_t size_bytes = 0;
    struct kvk_read_handle handle;
    if (kvk_read_begin(house.cache, &house.caller, &read, &data, &size_bytes, &handle,
                       &house.error) == KVK_OK) {
        for (uint64_t i = 0; i + 4 <= size_bytes; i++) {
            cr_assert(memcmp(data + i, "\xff\xff\xff\xff", 4) != 0);
        }
        kvk_read_end(house.cache, &handle);
    }
    house_stop(&house);
}

Test(engine_attention, l4_nothing_to_see)
{
    struct house house;
    struct kvk_geometry geometry = house_geometry();
    struct ask ask;
    uint32_t tokens[4];

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20, .host_bytes = 1 << 20});
    uint64_t space_id = house_space(&house, "model");
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 4, 1);
    uint64_t empty = house_open(&house, session_id, space_id, tokens, 0).sequence_id;
    uint64_t unsealed = house_open(&house, session_id, space_id, tokens, 4).sequence_id;
    ask_init(&ask, session_id, &geometry, 2);
    (void)ask_add(&ask, empty, tokens, 0, 0, 2);
    (void)ask_add(&ask, unsealed, tokens, 0, 3, 1);
    ask_right(&house, &ask, "empty");
    cr_expect_eq(ask.output[0][0], 0);
    cr_expect(isinf(ask.lse[0][0]));
    swap_out(&house, session_id, empty);
    ask_right(&house, &ask, "empty, swapped out");
    ask_sinks(&ask);
    ask_right(&house, &ask, "empty but for sink logits");
    cr_expect_eq(ask.lse[0][0], -2);
    ask_finish(&ask);
    house_stop(&house);
}

/* ---- Wrong requests ---- */

Test(engine_attention, wrong_requests)
{
    struct house house;
    struct kvk_geometry groups[2] = {house_geometry(), house_geometry()};
    uint32_t tokens[8];
    struct ask ask;
    uint32_t k = 0;
    uint32_t v = 0;

    house_init(&house);
    house.config.attend_queries = 8;
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20, .host_bytes = 1 << 20});
    groups[1].layout = KVK_LAYOUT_TOKENS_FIRST;
    uint64_t space_id = house_space_of(&house, &house.caller, "two groups", groups, 2);
    uint64_t other_space = house_space(&house, "other");
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 8, 5);
    uint64_t id = house_open(&house, session_id, space_id, tokens, 8).sequence_id;
    uint64_t other = house_open(&house, session_id, other_space, tokens, 8).sequence_id;
    house_seal(&house, session_id, id, 8);

    ask_init(&ask, session_id, &groups[0], 2);
    (void)ask_add(&ask, id, tokens, 8, 7, 1);
    (void)ask_add(&ask, id, tokens, 8, 7, 1);
    const struct ask good = ask;
    const struct kvk_attention_request *request = &ask.request;
    cr_expect_eq(kvk_attention_shape(house.cache, &house.caller, request, &k, &v, &house.error),
                 KVK_OK);
    cr_expect_eq(k, 8);
    cr_expect_eq(v, 8);

#define REFUSED(change, expected, name)                                                            \
    do {                                                                                           \
        change;                                                                                    \
        cr_expect_eq(kvk_attention_run(house.cache, &house.caller, &ask.request, &house.error),    \
                     (expected), #change ": %s", house.error.text);                                \
        cr_expect_str_eq(house.error.field, (name));                                               \
        ask = good;                                                                                \
        ask.request.items = ask.items;                                                             \
    } while (0)

    REFUSED(ask.request.item_count = 0, KVK_INVALID, "items");
    REFUSED(ask.request.query_heads = 3, KVK_INVALID, "query_heads");
    REFUSED(ask.request.query_heads = 0, KVK_INVALID, "query_heads");
    REFUSED(ask.request.query_heads = 1025, KVK_INVALID, "query_heads");
    REFUSED(ask.request.query_heads = 4, KVK_INVALID, "items[0].queries");
    REFUSED(ask.request.format = KVK_FORMAT_NONE, KVK_INVALID, "format");
    REFUSED(ask.request.format = (enum kvk_format)99, KVK_INVALID, "format");
    REFUSED(ask.request.scale = NAN, KVK_INVALID, "scale");
    REFUSED(ask.request.scale = INFINITY, KVK_INVALID, "scale");
    REFUSED(ask.request.soft_cap = -1, KVK_INVALID, "soft_cap");
    const float heads[8] = {0, INFINITY, NAN, 0, -INFINITY, 0, 0, 0};
    REFUSED((ask.request.alibi_slopes = heads, ask.request.alibi_slope_count = 1), KVK_INVALID,
            "alibi_slopes");
    REFUSED((ask.request.alibi_slopes = heads, ask.request.alibi_slope_count = 2), KVK_INVALID,
            "alibi_slopes[1]");
    REFUSED((ask.request.sink_logits = heads, ask.request.sink_logit_count = 3), KVK_INVALID,
            "sink_logits");
    REFUSED((ask.request.sink_logits = heads + 1, ask.request.sink_logit_count = 2), KVK_INVALID,
            "sink_logits[0]");
    REFUSED((ask.request.sink_logits = heads + 2, ask.request.sink_logit_count = 2), KVK_INVALID,
            "sink_logits[0]");
    REFUSED(ask.request.group = 2, KVK_INVALID, "group");
    REFUSED(ask.request.group = 1, KVK_UNSUPPORTED, "group");
    REFUSED(ask.request.layer = 2, KVK_INVALID, "layer");
    REFUSED(ask.request.rank = 1, KVK_INVALID, "rank");
    REFUSED(ask.request.session_id++, KVK_NOT_FOUND, "session_id");
    REFUSED(ask.items[0].sequence_id = 1, KVK_NOT_FOUND, "sequence_id");
    REFUSED(ask.items[1].sequence_id = 0, KVK_INVALID, "items[1].sequence_id");
    REFUSED(ask.items[1].lease_id = 1, KVK_INVALID, "items[1].sequence_id");
    REFUSED(ask.items[1].sequence_id = other, KVK_INVALID, "items[1]");
    REFUSED(ask.items[1].query_count = 0, KVK_INVALID, "items[1].query_count");
    REFUSED(ask.items[1].query_count = 8, KVK_INVALID, "items[1].query_count");
    REFUSED(ask.items[1].query_count = UINT32_MAX, KVK_INVALID, "items[1].query_count");
    REFUSED(ask.items[1].query_count = 2, KVK_INVALID, "items[1].queries");
    REFUSED(ask.items[1].queries_size--, KVK_INVALID, "items[1].queries");
    REFUSED(ask.items[1].queries = NULL, KVK_INVALID, "items[1].queries");
    REFUSED(ask.items[1].position = UINT64_MAX, KVK_INVALID, "items[1].position");
#undef REFUSED

    struct kvk_caller impatient = house.caller;
    impatient.may_block = false;
    cr_expect_eq(kvk_attention_run(house.cache, &impatient, &ask.request, &house.error),
                 KVK_WOULD_BLOCK);
    impatient = house.caller;
    impatient.deadline_ns = 1;
    cr_expect_eq(kvk_attention_run(house.cache, &impatient, &ask.request, &house.error),
                 KVK_DEADLINE);
    cr_expect_eq(house.cache->passing_holds, 0);
    ask_finish(&ask);
    house_stop(&house);
}
