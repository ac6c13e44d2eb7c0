/*
 * Emptying a slab of a tier below which nothing lies: its blocks move to the slots of the least
 * worth, with their bytes, and what hangs below them stays cached.
 */
#include "daemon/room_internal.h"
#include "tests/engine_house.h"

enum { DEPTH = 60, CHAINS = 600, BLOCKS = 12000, BLOCK_BYTES = 64, TOKENS = 4 };

static struct kvk_geometry geometry_of(uint64_t block_bytes)
{
    return (struct kvk_geometry){.layers = 1,
                                 .kv_heads = 1,
                                 .block_tokens = TOKENS,
                                 .layout = KVK_LAYOUT_OPAQUE,
                                 .attention = KVK_ATTENTION_SELF,
                                 .tensor_shards = 1,
                                 .pipeline_shards = 1,
                                 .opaque_bytes = block_bytes};
}

/* Few beginnings, more middles, every end its own. */
static void chain_tokens(uint32_t chain, uint32_t *tokens)
{
    for (uint32_t b = 0; b < DEPTH; b++) {
        uint32_t which = b < 20 ? chain % 8 : b < 40 ? chain % 80 : chain;
        for (uint32_t t = 0; t < TOKENS; t++) {
            tokens[b * TOKENS + t] = which * 1000 + b;
        }
    }
}

static uint64_t cached_blocks(struct house *house, uint64_t space_id)
{
    kvk_lock(&house->cache->lock);
    const struct kvk_space *space = kvk_table_get(&house->cache->space_table, space_id);
    uint64_t blocks = space->groups[0]->tier_blocks[KVK_TIER_HOST];
    kvk_unlock(&house->cache->lock);
    return blocks;
}

static void write_block(struct house *house, uint64_t session_id, uint64_t sequence_id,
                        uint64_t block, uint64_t word)
{
    uint64_t bytes[BLOCK_BYTES / 8];
    for (uint32_t i = 0; i < BLOCK_BYTES / 8; i++) {
        bytes[i] = word;
    }
    const struct kvk_write_piece piece = {
        .block = block, .data = (const uint8_t *)bytes, .size_bytes = sizeof(bytes)};
    cr_assert_eq(kvk_sequence_write(house->cache, &house->caller, session_id, sequence_id, &piece,
                                    &house->error),
                 KVK_OK, "%s", house->error.text);
}

static void fill(struct house *house, uint64_t session_id, uint64_t space_id)
{
    uint32_t tokens[DEPTH * TOKENS];
    for (uint32_t chain = 0; chain < CHAINS; chain++) {
        chain_tokens(chain, tokens);
        struct kvk_sequence_reply reply =
            house_open(house, session_id, space_id, tokens, DEPTH * TOKENS);
        for (uint64_t b = reply.cached_tokens / TOKENS; b < DEPTH; b++) {
            write_block(house, session_id, reply.sequence_id, b, tokens[b * TOKENS] + 1);
        }
        house_seal(house, session_id, reply.sequence_id, DEPTH * TOKENS);
        house_close(house, session_id, reply.sequence_id);
    }
}

/* The cached beginning of a chain, at least so many blocks, has the bytes that were written. */
static void verify(struct house *house, uint64_t session_id, uint64_t space_id, uint32_t chain,
                   uint64_t blocks)
{
    uint32_t tokens[DEPTH * TOKENS];
    chain_tokens(chain, tokens);
    struct kvk_sequence_reply reply =
        house_open(house, session_id, space_id, tokens, blocks * TOKENS);
    cr_assert_eq(reply.cached_tokens, blocks * TOKENS, "chain %u lost blocks", chain);
    for (uint64_t b = 0; b < blocks; b++) {
        const struct kvk_read_request request = {
            .session_id = session_id, .sequence_id = reply.sequence_id, .block = b};
        const uint8_t *data = NULL;
        uint64_t size_bytes = 0;
        struct kvk_read_handle handle;
        cr_assert_eq(kvk_read_begin(house->cache, &house->caller, &request, &data, &size_bytes,
                                    &handle, &house->error),
                     KVK_OK, "%s", house->error.text);
        uint64_t word;
        memcpy(&word, data + BLOCK_BYTES - sizeof(word), sizeof(word));
        cr_assert_eq(word, tokens[b * TOKENS] + 1);
        kvk_read_end(house->cache, &handle);
    }
    house_close(house, session_id, reply.sequence_id);
}

/* A host tier full of eight chains. */
static void full_house(struct house *house, uint64_t *session_id, uint64_t *space_id)
{
    const struct house_options options = {.host_bytes = BLOCKS * BLOCK_BYTES};
    const struct kvk_geometry geometry = geometry_of(BLOCK_BYTES);
    house_init(house);
    house_start(house, &options);
    *session_id = house_session(house);
    *space_id = house_space_of(house, &house->caller, "deep", &geometry, 1);
    fill(house, *session_id, *space_id);
}

Test(engine_compact, a_slab_is_emptied_and_what_it_held_stays)
{
    struct house house;
    uint64_t session_id, space_id;
    full_house(&house, &session_id, &space_id);
    uint64_t before = cached_blocks(&house, space_id);
    cr_assert_gt(before, BLOCKS - 200);

    kvk_lock(&house.cache->lock);
    const struct kvk_space *space = kvk_table_get(&house.cache->space_table, space_id);
    struct kvk_group *group = space->groups[0];
    const struct kvk_slab *slab = &group->tiers[KVK_TIER_HOST].arena.slabs[0];
    uint32_t slot_count = slab->slot_count;
    cr_assert_gt(slab->used_count, slot_count / 2);
    cr_assert(kvk_room_slab_may_shift(house.cache, group, KVK_TIER_HOST, 0));
    cr_assert_eq(kvk_room_compact_drops(house.cache, group, KVK_TIER_HOST, 0, &house.error), KVK_OK,
                 "%s", house.error.text);
    cr_assert_eq(slab->used_count, 0);
    cr_assert_gt(house.cache->stats.shifted_blocks, slot_count / 2);
    kvk_unlock(&house.cache->lock);

    kvk_cache_check(house.cache);
    /* No more is forgotten than what made room, and of the first blocks nothing. */
    cr_assert_leq(before - cached_blocks(&house, space_id), slot_count);
    for (uint32_t chain = 0; chain < 8; chain++) {
        verify(&house, session_id, space_id, chain, 20);
    }
    kvk_session_end(house.cache, session_id);
    house_stop(&house);
}

Test(engine_compact, what_cannot_be_copied_has_not_moved)
{
    struct house house;
    uint64_t session_id, space_id;
    full_house(&house, &session_id, &space_id);
    kvk_mover_test_fail_next(house.cache->mover);
    kvk_lock(&house.cache->lock);
    const struct kvk_space *space = kvk_table_get(&house.cache->space_table, space_id);
    cr_assert_neq(
        kvk_room_compact_drops(house.cache, space->groups[0], KVK_TIER_HOST, 0, &house.error),
        KVK_OK);
    cr_assert_eq(house.cache->stats.copy_failures, 1);
    cr_assert_eq(house.cache->stats.shifted_blocks, 0);
    kvk_unlock(&house.cache->lock);
    kvk_cache_check(house.cache);
    for (uint32_t chain = 0; chain < 8; chain++) {
        verify(&house, session_id, space_id, chain, 20);
    }
    kvk_session_end(house.cache, session_id);
    house_stop(&house);
}

/* A pinned block stays where it is, and so does its slab; nothing is lost by trying. */
Test(engine_compact, what_is_pinned_stays)
{
    struct house house;
    house_init(&house);
    const struct house_options options = {.host_bytes = BLOCKS * BLOCK_BYTES};
    house_start(&house, &options);
    uint64_t session_id = house_session(&house);
    const struct kvk_geometry geometry = geometry_of(BLOCK_BYTES);
    uint64_t space_id = house_space_of(&house, &house.caller, "deep", &geometry, 1);
    uint32_t tokens[DEPTH * TOKENS];
    chain_tokens(1, tokens);
    struct kvk_sequence_reply reply =
        house_open(&house, session_id, space_id, tokens, DEPTH * TOKENS);
    house_seal(&house, session_id, reply.sequence_id, DEPTH * TOKENS);
    kvk_lock(&house.cache->lock);
    const struct kvk_space *space = kvk_table_get(&house.cache->space_table, space_id);
    cr_assert_not(kvk_room_slab_may_shift(house.cache, space->groups[0], KVK_TIER_HOST, 0));
    kvk_unlock(&house.cache->lock);
    house_close(&house, session_id, reply.sequence_id);
    kvk_session_end(house.cache, session_id);
    house_stop(&house);
}
