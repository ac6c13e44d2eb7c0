/*
 * Cases of the engine that depend on what its device tier is, for any device: windows that let go
 * (B5, B6), empty sequences and another's bytes (L4), and the bytes that blocks really take (K3).
 * They write and read as workers do that cannot map the memory.
 */
#ifndef KVK_TESTS_ENGINE_BOTH_H
#define KVK_TESTS_ENGINE_BOTH_H

#include "tests/engine_attend.h"
#include "tests/engine_tenants.h"

/* A device for a cache, which closes it. */
typedef struct kvk_device *both_device(void);

static inline void both_start(struct stage *stage, both_device *make, uint32_t window,
                              uint32_t device_blocks, uint32_t host_blocks)
{
    struct kvk_geometry geometry = house_geometry();
    geometry.window = window;
    house_init(&stage->house);
    stage_start_on(stage, &geometry, device_blocks, host_blocks, make());
}

/* Case B5: window 8, 20 tokens, of which only blocks 3 and 4 are kept. */
static inline void both_b5(both_device *make)
{
    struct stage stage;
    uint32_t tokens[20];
    both_start(&stage, make, 8, 5, 0);
    house_tokens(tokens, 20, 1);
    uint64_t id = stage_open(&stage, tokens, 12).sequence_id;
    write_values(&stage, id, 0, 12);
    stage_seal(&stage, id);
    (void)stage_append(&stage, id, 12, tokens + 12, 8, false); /* lets go of what 12 sees no more */
    write_values(&stage, id, 12, 20);
    stage_seal(&stage, id);
    struct kvk_sequence_reply reply;
    cr_expect_eq(stage_try_truncate(&stage, id, 20, 6, &reply), KVK_PRECONDITION);
    cr_expect_eq(stage.house.error.cause, KVK_CAUSE_WINDOW_GONE);
    cr_expect_eq(stage_get(&stage, id).length, 20U);
    expect_attends(&stage, id, 19, 12);
    stage_close(&stage, id);
    uint32_t others[12]; /* three blocks go: the oldest, and what nobody sees */
    house_tokens(others, 12, 900);
    stage_cache(&stage, others, 12, 1);
    cr_expect_eq(stage_hit(&stage, tokens, 20, false), 20U, "all that 20 sees is there");
    cr_expect_eq(stage_hit(&stage, tokens, 20, true), 0U, "16 needs token 9 onward");
    stage_stop(&stage);
}

/* Case B6: window 8; write 6, then one chunk of 12, and attend for each of it. */
static inline void both_b6(both_device *make)
{
    struct stage stage;
    uint32_t tokens[18];
    both_start(&stage, make, 8, 16, 0);
    house_tokens(tokens, 18, 1);
    uint64_t id = stage_open(&stage, tokens, 6).sequence_id;
    write_values(&stage, id, 0, 6);
    stage_seal(&stage, id);
    (void)stage_append(&stage, id, 6, tokens + 6, 12, false);
    write_values(&stage, id, 6, 18);
    stage_seal(&stage, id);
    for (uint64_t position = 6; position < 18; position++) {
        expect_attends(&stage, id, position, position < 8 ? 0 : position - 7);
    }
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* Case L4: all that can be done with no tokens at all. */
static inline void both_l4_empty(both_device *make)
{
    struct stage stage;
    uint32_t tokens[4];
    uint64_t child = 0;
    struct kvk_swap_reply swapped;
    struct kvk_sequence_reply reply;
    both_start(&stage, make, 0, 8, 8);
    house_tokens(tokens, 4, 1);
    cr_expect_eq(stage_hit(&stage, tokens, 0, true), 0U);
    uint64_t id = stage_open(&stage, tokens, 0).sequence_id;
    STAGE_OK(&stage, stage_try_fork(&stage, id, 0, 1, "f", &child));
    STAGE_OK(&stage, stage_try_swap_out(&stage, id, &swapped));
    STAGE_OK(&stage, stage_try_swap_in(&stage, id, &swapped));
    STAGE_OK(&stage, stage_try_truncate(&stage, id, 0, 0, &reply));
    (void)stage_append(&stage, id, 0, tokens, 4, false);
    write_values(&stage, id, 0, 4);
    stage_seal(&stage, id);
    expect_attends(&stage, id, 3, 0);
    cr_expect_eq(stage_get(&stage, child).length, 0U);
    stage_close(&stage, child);
    stage_close(&stage, id);
    stage_stop(&stage);
}

/* ... and one tenant's NaN in the room that another gets: never read, never in a result. */
static inline void both_l4_another(both_device *make)
{
    struct party party;
    uint32_t tokens[4];
    uint8_t spoiled[1024];
    party_init(&party, 2);
    party_start_on(&party, 1, 0, make());
    house_tokens(tokens, 4, 1);
    memset(spoiled, 0xff, sizeof(spoiled));
    party_be(&party, 0);
    struct house *house = &party.house;
    uint64_t id = house_open(house, party.sessions[0], party.spaces[0], tokens, 4).sequence_id;
    const struct kvk_write_piece piece = {.data = spoiled, .size_bytes = sizeof(spoiled)};
    cr_assert_eq(
        kvk_sequence_write(house->cache, &house->caller, party.sessions[0], id, &piece, NULL),
        KVK_OK);
    house_seal(house, party.sessions[0], id, 4);
    house_close(house, party.sessions[0], id);

    party_be(&party, 1);
    struct stage other = {.house = *house,
                          .geometry = house_geometry(),
                          .session = party.sessions[1],
                          .space = party.spaces[1]};
    struct kvk_sequence_reply reply = stage_open(&other, tokens, 3);
    cr_expect_eq(reply.cached_tokens, 0U);
    write_values(&other, reply.sequence_id, 0, 3);
    stage_seal(&other, reply.sequence_id);
    expect_attends(&other, reply.sequence_id, 2, 0);
    const struct kvk_read_request read = {.session_id = other.session,
                                          .sequence_id = reply.sequence_id};
    const uint8_t *data = NULL;
    uint64_t size_bytes = 0;
    struct kvk_read_handle handle;
    STAGE_OK(&other, kvk_read_begin(house->cache, &house->caller, &read, &data, &size_bytes,
                                    &handle, &other.house.error));
    for (uint64_t i = 0; i + 4 <= size_bytes; i += 4) {
        cr_expect(memcmp(data + i, spoiled, 4) != 0, "byte %lu is the other's", (unsigned long)i);
    }
    kvk_read_end(house->cache, &handle);
    stage_close(&other, reply.sequence_id);
    kvk_tables_finish(&other.tables);
    party_stop(&party);
}

/* Case K3: 8-bit values with one fp16 scale per 32, 32 layers, 8 KV heads of 128, blocks of 16:
 * what the tier has less of, for each token of a block, scales and all. */
static inline void both_k3(both_device *make)
{
    enum { BLOCKS = 5, TOKEN_BYTES = 69632 };
    struct stage stage;
    struct kvk_geometry geometry = house_geometry();
    uint32_t tokens[16 * (BLOCKS + 1)];
    struct kvk_sequence_reply reply;
    geometry.layers = 32;
    geometry.kv_heads = 8;
    geometry.head_size_k = geometry.head_size_v = 128;
    geometry.block_tokens = 16;
    geometry.format_k = geometry.format_v = KVK_FORMAT_INT8_32;
    house_init(&stage.house);
    stage_start_on(&stage, &geometry, BLOCKS, 0, make());
    house_tokens(tokens, 16 * (BLOCKS + 1), 1);
    for (uint64_t blocks = 1; blocks <= BLOCKS; blocks++) {
        uint64_t id = stage_open(&stage, tokens, 16 * blocks).sequence_id;
        kvk_lock(&stage.house.cache->lock);
        uint64_t used = stage.house.cache->tiers[KVK_TIER_DEVICE].used_bytes;
        kvk_unlock(&stage.house.cache->lock);
        cr_expect_eq(used, 16 * blocks * TOKEN_BYTES);
        stage_close(&stage, id);
    }
    const struct kvk_open_request more = {
        .prompt = {.tokens = tokens, .token_count = 16 * BLOCKS + 1}, .tier = -1};
    cr_expect_eq(stage_try_open(&stage, &more, &reply), KVK_EXHAUSTED, "and no more than these");
    stage_stop(&stage);
}

static const struct both_case {
    const char *name;
    void (*run)(both_device *make);
} both_cases[] = {
    {"B5", both_b5},         {"B6", both_b6}, {"L4, empty", both_l4_empty},
    {"L4", both_l4_another}, {"K3", both_k3},
};
#define BOTH_CASE_COUNT (sizeof(both_cases) / sizeof(both_cases[0]))

#endif
