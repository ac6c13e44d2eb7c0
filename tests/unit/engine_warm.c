/*
 * Memory that outlives the daemon: daemons that are killed or stopped, and what the next one finds,
 * with the same configuration or another.
 */
#include "tests/engine_warm.h"

/* ---- After a crash ---- */

Test(engine_warm, what_was_sealed_is_hit_again_with_its_bytes)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    daemon_start(&place);
    struct kvk_restore_counts counts = counts_of(&place);
    cr_assert_eq(counts.records, CHAIN_BLOCKS);
    cr_assert_eq(counts.blocks, CHAIN_BLOCKS);
    cr_assert_eq(counts.copies[KVK_TIER_DEVICE], CHAIN_BLOCKS);
    cr_assert_eq(counts.orphans + counts.wrong + counts.crowded + counts.duplicates, 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    cr_assert_eq(chain_read(&place, 1001, CHAIN_TOKENS), 0);
    /* They lie where they lay, and readers' generations hold. */
    const struct kvk_group_tier *at = &place_group(&place)->tiers[KVK_TIER_DEVICE];
    for (uint64_t i = 0; i < CHAIN_BLOCKS; i++) {
        uint32_t slot = place.shared->slots[i];
        cr_assert_neq(at->owners[slot], 0);
        cr_assert_eq(((const uint32_t *)(void *)at->generations.address)[slot],
                     place.shared->generations[i]);
    }
    /* A sequence of before is not known, and that is a plain answer. */
    struct kvk_close_reply reply;
    cr_assert_eq(kvk_sequence_close(place.house.cache, &place.house.caller, place.session_id,
                                    &place.shared->numbers[0], 1, &reply, &place.house.error),
                 KVK_NOT_FOUND);
    daemon_stop(&place);
    place_finish(&place);
}

/* The slots of many slabs are taken before the first of them is sealed. */
Test(engine_warm, a_long_prompt_is_kept_from_its_seal_on)
{
    enum { LONG_BLOCKS = 8000 };
    struct place place;
    place_init(&place);
    place.device_bytes = UINT64_C(8192) * BLOCK_BYTES;
    place.host_bytes = 0;
    place.blocks = 16384;
    daemon_start(&place);
    uint32_t *tokens = calloc((size_t)LONG_BLOCKS * BLOCK_TOKENS, sizeof(*tokens));
    cr_assert_not_null(tokens);
    house_tokens(tokens, (uint64_t)LONG_BLOCKS * BLOCK_TOKENS, 1);
    struct kvk_sequence_reply reply = house_open(&place.house, place.session_id, place.space_id,
                                                 tokens, (uint64_t)LONG_BLOCKS * BLOCK_TOKENS);
    house_seal(&place.house, place.session_id, reply.sequence_id,
               (uint64_t)LONG_BLOCKS * BLOCK_TOKENS);
    struct kvk_sidecar_stats stats;
    kvk_lock(&place.house.cache->lock);
    kvk_sidecar_stats(place_group(&place), &stats);
    kvk_unlock(&place.house.cache->lock);
    cr_assert_eq(stats.entries, LONG_BLOCKS);
    cr_assert_eq(place.house.cache->stats.unkept_blocks, 0);
    house_close(&place.house, place.session_id, reply.sequence_id);
    free(tokens);
    daemon_stop(&place);
    place_finish(&place);
}

static void life_that_reads(struct place *place)
{
    cr_assert_eq(chain_read(place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    chain_put(place, 2000, CHAIN_TOKENS);
}

Test(engine_warm, it_comes_back_time_and_again)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    for (int i = 0; i < 3; i++) {
        daemon_die(&place, life_that_reads);
    }
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    cr_assert_eq(chain_read(&place, 2000, CHAIN_TOKENS), CHAIN_TOKENS);
    kvk_cache_check(place.house.cache);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, both_tiers_come_back)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_many_chains);
    cr_assert_gt(place.shared->numbers[0], 0);
    daemon_start(&place);
    struct kvk_restore_counts counts = counts_of(&place);
    cr_assert_eq(counts.copies[KVK_TIER_HOST], place.shared->numbers[0]);
    cr_assert_eq(counts.copies[KVK_TIER_DEVICE], place.shared->numbers[1]);
    for (uint32_t i = 0; i < 12; i++) {
        cr_assert_eq(chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS), CHAIN_TOKENS);
    }
    for (int i = 0; i < 4; i++) {
        kvk_cache_maintain(place.house.cache); /* takes none of it for strays */
    }
    for (uint32_t i = 0; i < 12; i++) {
        cr_assert_eq(chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS), CHAIN_TOKENS);
    }
    daemon_stop(&place);
    place_finish(&place);
}

/* The oldest go first, also where they are older than the daemon. */
Test(engine_warm, the_order_of_uses_outlives_the_daemon)
{
    struct place place;
    place_init(&place);
    place.host_bytes = 0;
    place.device_bytes = 16 * BLOCK_BYTES;
    daemon_start(&place);
    chain_put(&place, 1000, CHAIN_TOKENS);
    house_sleep_ms(1100); /* uses are told apart by the second */
    chain_put(&place, 2000, CHAIN_TOKENS);
    house_sleep_ms(1100);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS); /* used again */
    daemon_stop(&place);
    daemon_start(&place);
    chain_put(&place, 3000, 2 * BLOCK_TOKENS);
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    cr_assert_eq(house_cached(&place.house, place.space_id, tokens, CHAIN_TOKENS), CHAIN_TOKENS);
    house_tokens(tokens, CHAIN_TOKENS, 2000);
    cr_assert_eq(house_cached(&place.house, place.space_id, tokens, CHAIN_TOKENS),
                 CHAIN_TOKENS - 2 * BLOCK_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- What does not come back ---- */

static void life_of_halves(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    struct kvk_sequence_reply reply =
        house_open(&place->house, place->session_id, place->space_id, tokens, CHAIN_TOKENS);
    chain_write(place, reply.sequence_id, tokens, 0, CHAIN_BLOCKS);
    house_seal(&place->house, place->session_id, reply.sequence_id, CHAIN_TOKENS);
    house_close(&place->house, place->session_id, reply.sequence_id);
    /* Written, but not sealed. */
    house_tokens(tokens, CHAIN_TOKENS, 2000);
    reply = house_open(&place->house, place->session_id, place->space_id, tokens, CHAIN_TOKENS);
    chain_write(place, reply.sequence_id, tokens, 0, CHAIN_BLOCKS);
    uint32_t id;
    const struct kvk_block *block = chain_block(place, reply.sequence_id, 0, &id);
    place->shared->slots[0] = block->slot[KVK_TIER_DEVICE];
    place->shared->generations[0] =
        kvk_block_generation(place->house.cache, block, KVK_TIER_DEVICE);
}

Test(engine_warm, what_was_not_sealed_is_free)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_halves);
    daemon_start(&place);
    /* Whoever reads it without a pin sees that it is another's now. */
    const struct kvk_group_tier *at = &place_group(&place)->tiers[KVK_TIER_DEVICE];
    cr_assert_gt(((const uint32_t *)(void *)at->generations.address)[place.shared->slots[0]],
                 place.shared->generations[0]);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    cr_assert_eq(chain_read(&place, 2000, CHAIN_TOKENS), 0);
    const struct kvk_cache *cache = place.house.cache;
    cr_assert_eq(cache->tiers[KVK_TIER_DEVICE].used_bytes, CHAIN_BLOCKS * BLOCK_BYTES);
    cr_assert_eq(cache->tiers[KVK_TIER_DEVICE].quarantine_bytes, 0);
    daemon_stop(&place);
    place_finish(&place);
}

static void life_of_few_among_many(struct place *place)
{
    uint32_t tokens[6 * CHAIN_TOKENS];
    chain_put(place, 1000, CHAIN_TOKENS);
    house_tokens(tokens, 6 * CHAIN_TOKENS, 5000);
    struct kvk_sequence_reply reply =
        house_open(&place->house, place->session_id, place->space_id, tokens, 6 * CHAIN_TOKENS);
    chain_write(place, reply.sequence_id, tokens, 0, 6 * (uint64_t)CHAIN_BLOCKS);
}

/* A slab that is shorter than it was leaves no memory behind its end: nobody would count it, and it
 * would be taken for what a worker wrote beside its slots. */
Test(engine_warm, nothing_is_left_behind_a_shorter_slab)
{
    struct place place;
    place_init(&place);
    place.device_bytes = 4096 * BLOCK_BYTES; /* slabs of many slots */
    daemon_die(&place, life_of_few_among_many);
    daemon_start(&place);
    struct kvk_cache *cache = place.house.cache;
    const struct kvk_tier_state *state = &cache->tiers[KVK_TIER_DEVICE];
    const struct kvk_group_tier *at = &place_group(&place)->tiers[KVK_TIER_DEVICE];
    cr_assert_gt(at->arena.slab_slots, 7 * CHAIN_BLOCKS - 1);
    cr_assert_eq(at->arena.slot_count, CHAIN_BLOCKS);
    cr_assert_leq(state->device->ops->backed_bytes(state->device, &at->regions[0]),
                  CHAIN_BLOCKS * BLOCK_BYTES + 2 * 4096);
    kvk_cache_maintain(cache);
    cr_assert_eq(state->stray_bytes, 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    chain_put(&place, 5000, 6 * CHAIN_TOKENS); /* and there is room as before */
    cr_assert_eq(chain_read(&place, 5000, 6 * CHAIN_TOKENS), 6 * CHAIN_TOKENS);
    kvk_cache_check(cache);
    daemon_stop(&place);
    place_finish(&place);
}

static void life_of_invalidation(struct place *place)
{
    chain_put(place, 1000, CHAIN_TOKENS);
    struct kvk_invalidate_reply reply;
    const struct kvk_invalidate_request request = {.space_id = place->space_id};
    cr_assert_eq(kvk_invalidate(place->house.cache, &place->house.caller, &request, &reply,
                                &place->house.error),
                 KVK_OK, "%s", place->house.error.text);
    chain_put(place, 2000, CHAIN_TOKENS);
}

Test(engine_warm, what_was_invalidated_stays_so)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_invalidation);
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 0);
    cr_assert_eq(chain_read(&place, 2000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, without_the_keeper_the_start_is_cold)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_one_chain);
    keeper_kill(&place);
    keeper_start(&place);
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).records, 0);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 0);
    chain_put(&place, 1000, CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

/* The keeper is killed while the daemon serves: it goes on, keeps nothing, and says so. */
Test(engine_warm, a_keeper_that_dies_is_missed_by_nobody)
{
    struct place place;
    place_init(&place);
    daemon_start(&place);
    chain_put(&place, 1000, CHAIN_TOKENS);
    keeper_kill(&place);
    const struct kvk_geometry geometry = house_geometry();
    uint64_t other = house_space_of(&place.house, &place.house.caller, "other", &geometry, 1);
    cr_assert_neq(other, place.space_id);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    keeper_start(&place);
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).records, 0);
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- A planned restart ---- */

Test(engine_warm, a_daemon_that_was_stopped_comes_back_warm)
{
    struct place place;
    place_init(&place);
    daemon_start(&place);
    life_of_many_chains(&place);
    daemon_stop(&place);
    daemon_start(&place);
    for (uint32_t i = 0; i < 12; i++) {
        cr_assert_eq(chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS), CHAIN_TOKENS);
    }
    daemon_stop(&place);
    place_finish(&place);
}

static uint32_t keeper_count(struct place *place)
{
    const struct kvk_keeper_options options = {
        .kind = KVK_KEEPER_PROCESS, .socket_path = place->socket, .hold_ms = 60000};
    struct kvk_keeper *keeper = NULL;
    struct kvk_error error;
    cr_assert_eq(kvk_keeper_connect(&options, &keeper, &error), KVK_OK, "%s", error.text);
    uint32_t count = kvk_keeper_count(keeper);
    kvk_keeper_disconnect(keeper);
    return count;
}

/* ---- Another configuration ---- */

Test(engine_warm, a_smaller_tier_takes_what_fits)
{
    struct place place;
    place_init(&place);
    place.host_bytes = 0;
    daemon_die(&place, life_of_one_chain);
    place.device_bytes = 5 * BLOCK_BYTES;
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).crowded, CHAIN_BLOCKS - 5);
    cr_assert_eq(place.house.cache->tiers[KVK_TIER_DEVICE].used_bytes, 5 * BLOCK_BYTES);
    uint64_t blocks = 0; /* of the chain's beginning, in slots that there still are */
    while (place.shared->slots[blocks] < 5) {
        blocks++;
    }
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    cr_assert_eq(house_cached(&place.house, place.space_id, tokens, CHAIN_TOKENS),
                 blocks * BLOCK_TOKENS);
    chain_put(&place, 7000, 5 * BLOCK_TOKENS);
    daemon_stop(&place);
    /* As large as before again: the slots that had no place are not what they were. */
    place.device_bytes = 64 * BLOCK_BYTES;
    daemon_start(&place);
    cr_assert_eq(chain_read(&place, 7000, 5 * BLOCK_TOKENS), 5 * BLOCK_TOKENS);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), 0);
    chain_put(&place, 1000, CHAIN_TOKENS);
    cr_assert_eq(chain_read(&place, 1000, CHAIN_TOKENS), CHAIN_TOKENS);
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, a_larger_tier_begins_cold)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_many_chains);
    place.host_bytes = 128 * BLOCK_BYTES; /* the device tier stays as it was */
    daemon_start(&place);
    struct kvk_restore_counts counts = counts_of(&place);
    cr_assert_eq(counts.copies[KVK_TIER_HOST], 0);
    cr_assert_eq(counts.copies[KVK_TIER_DEVICE], place.shared->numbers[1]);
    for (uint32_t i = 0; i < 12; i++) {
        (void)chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS);
        chain_put(&place, 100000 + 1000 * i, CHAIN_TOKENS);
    }
    daemon_stop(&place);
    place_finish(&place);
}

Test(engine_warm, a_tier_that_is_no_more_lets_go_of_its_files)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_many_chains);
    cr_assert_eq(keeper_count(&place), 5); /* a sidecar, and slots and generations of two tiers */
    place.host_bytes = 0;
    daemon_start(&place);
    cr_assert_eq(counts_of(&place).copies[KVK_TIER_DEVICE], place.shared->numbers[1]);
    cr_assert_eq(counts_of(&place).copies[KVK_TIER_HOST], 0);
    daemon_stop(&place);
    cr_assert_eq(keeper_count(&place), 3);
    place_finish(&place);
}

Test(engine_warm, fewer_blocks_may_be_known_than_there_were)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_many_chains);
    place.blocks = 20;
    daemon_start(&place);
    cr_assert_leq(counts_of(&place).blocks, 20);
    cr_assert_gt(counts_of(&place).crowded, 0);
    for (uint32_t i = 0; i < 12; i++) {
        (void)chain_read(&place, 1000 * (i + 1), CHAIN_TOKENS);
    }
    daemon_stop(&place);
    place_finish(&place);
}

/* ---- Salts, contents, windows ---- */

static uint64_t salted_cached(struct place *place, const char *salt,
                              const struct kvk_content_span *span)
{
    uint32_t tokens[CHAIN_TOKENS];
    struct kvk_lookup_reply reply;
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    const struct kvk_lookup_request request = {.space_id = place->space_id,
                                               .prompt = {.tokens = tokens,
                                                          .token_count = CHAIN_TOKENS,
                                                          .salt = (const uint8_t *)salt,
                                                          .salt_size = strlen(salt),
                                                          .spans = span,
                                                          .span_count = span == NULL ? 0 : 1}};
    cr_assert_eq(
        kvk_lookup(place->house.cache, &place->house.caller, &request, &reply, &place->house.error),
        KVK_OK);
    return reply.cached_tokens;
}

static void salted_put(struct place *place, const char *salt, const struct kvk_content_span *span)
{
    uint32_t tokens[CHAIN_TOKENS];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    const struct kvk_open_request request = {.session_id = place->session_id,
                                             .space_id = place->space_id,
                                             .prompt = {.tokens = tokens,
                                                        .token_count = CHAIN_TOKENS,
                                                        .salt = (const uint8_t *)salt,
                                                        .salt_size = strlen(salt),
                                                        .spans = span,
                                                        .span_count = span == NULL ? 0 : 1},
                                             .tier = -1};
    cr_assert_eq(kvk_sequence_open(place->house.cache, &place->house.caller, &request, &reply,
                                   &tables, &place->house.error),
                 KVK_OK, "%s", place->house.error.text);
    kvk_tables_finish(&tables);
    house_seal(&place->house, place->session_id, reply.sequence_id, CHAIN_TOKENS);
    house_close(&place->house, place->session_id, reply.sequence_id);
}

static const struct kvk_content_span image = {
    .first = 6, .count = 9, .digest_size = 16, .digest = {1, 2, 3}};

static void life_of_salts(struct place *place)
{
    char longest[256];
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    salted_put(place, "alice", NULL);
    salted_put(place, "bob", &image);
    salted_put(place, longest, NULL);
}

Test(engine_warm, salts_and_contents_come_back_and_stay_apart)
{
    struct place place;
    struct kvk_content_span other = image;
    char longest[256];
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    other.digest[0] = 9;
    place_init(&place);
    daemon_die(&place, life_of_salts);
    daemon_start(&place);
    cr_assert_eq(salted_cached(&place, "alice", NULL), CHAIN_TOKENS);
    cr_assert_eq(salted_cached(&place, "bob", &image), CHAIN_TOKENS);
    cr_assert_eq(salted_cached(&place, longest, NULL), CHAIN_TOKENS);
    cr_assert_eq(salted_cached(&place, "bob", &other), BLOCK_TOKENS);
    cr_assert_eq(salted_cached(&place, "bob", NULL), BLOCK_TOKENS);
    cr_assert_eq(salted_cached(&place, "alice", &image), BLOCK_TOKENS);
    cr_assert_eq(salted_cached(&place, "", NULL), 0);
    daemon_stop(&place);
    place_finish(&place);
}

/* A block whose content does not fit beside its tokens is not kept, and neither is what follows. */
static void life_of_a_long_content(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    struct kvk_content_span spans[4];
    struct kvk_tables tables = {.part_count = 0};
    struct kvk_sequence_reply reply;
    for (uint32_t i = 0; i < 4; i++) {
        spans[i] = (struct kvk_content_span){.first = 12 + i, .count = 1, .digest_size = 64};
        spans[i].digest[0] = (uint8_t)i;
    }
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    const struct kvk_open_request request = {
        .session_id = place->session_id,
        .space_id = place->space_id,
        .prompt = {.tokens = tokens, .token_count = CHAIN_TOKENS, .spans = spans, .span_count = 4},
        .tier = -1};
    cr_assert_eq(kvk_sequence_open(place->house.cache, &place->house.caller, &request, &reply,
                                   &tables, &place->house.error),
                 KVK_OK);
    kvk_tables_finish(&tables);
    house_seal(&place->house, place->session_id, reply.sequence_id, CHAIN_TOKENS);
    house_close(&place->house, place->session_id, reply.sequence_id);
    place->shared->numbers[0] = place->house.cache->stats.unkept_blocks;
    for (int i = 0; i < 3; i++) {
        kvk_cache_maintain(place->house.cache);
    }
    place->shared->numbers[1] = place->house.cache->stats.unkept_blocks;
    kvk_lock(&place->house.cache->lock); /* as when its copies change */
    for (uint32_t id = 0; id < kvk_index_block_id_end(place->house.cache->index); id++) {
        const struct kvk_block *block = kvk_index_block(place->house.cache->index, id);
        if (block->state != KVK_BLOCK_FREE && block->run != UINT32_MAX) {
            kvk_sidecar_block_changed(place->house.cache, kvk_group_of(place->house.cache, block),
                                      id);
        }
    }
    kvk_unlock(&place->house.cache->lock);
    place->shared->numbers[2] = place->house.cache->stats.unkept_blocks;
}

Test(engine_warm, a_content_that_does_not_fit_is_counted_and_not_kept)
{
    struct place place;
    place_init(&place);
    daemon_die(&place, life_of_a_long_content);
    cr_assert_eq(place.shared->numbers[0], 1);
    cr_assert_eq(place.shared->numbers[1], 1, "and not tried again");
    cr_assert_eq(place.shared->numbers[2], 1, "and counted once, however often it is tried");
    daemon_start(&place);
    struct kvk_restore_counts counts = counts_of(&place);
    cr_assert_eq(counts.blocks, 3);
    cr_assert_eq(counts.orphans, CHAIN_BLOCKS - 4);
    cr_assert_eq(place.house.cache->tiers[KVK_TIER_DEVICE].used_bytes, 3 * BLOCK_BYTES);
    daemon_stop(&place);
    place_finish(&place);
}

/* Under a window of 8 tokens only the last blocks have bytes; their ancestors come back hollow. */
static void life_under_a_window(struct place *place)
{
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    chain_put(place, 1000, CHAIN_TOKENS);
    /* The pool is 10 blocks: another chain takes the oldest positions. */
    chain_put(place, 2000, 5 * BLOCK_TOKENS);
    place->shared->numbers[0] = house_cached(&place->house, place->space_id, tokens, CHAIN_TOKENS);
    place->shared->numbers[1] = place_group(place)->state_counts[KVK_BLOCK_HOLLOW];
}

Test(engine_warm, hollow_ancestors_come_back_hollow)
{
    struct place place;
    uint32_t tokens[CHAIN_TOKENS];
    house_tokens(tokens, CHAIN_TOKENS, 1000);
    place_init(&place);
    place.window = 8;
    place.host_bytes = 0;
    place.device_bytes = 10 * BLOCK_BYTES;
    daemon_die(&place, life_under_a_window);
    cr_assert_gt(place.shared->numbers[1], 0, "nothing was hollow");
    daemon_start(&place);
    cr_assert_eq(place_group(&place)->state_counts[KVK_BLOCK_HOLLOW], place.shared->numbers[1]);
    cr_assert_eq(house_cached(&place.house, place.space_id, tokens, CHAIN_TOKENS),
                 place.shared->numbers[0]);
    daemon_stop(&place);
    place_finish(&place);
}
