/* Blocks in the engine: holds, pins, copies, counters and queues. */
#include "tests/engine_store.h"

#define DEVICE KVK_TIER_DEVICE
#define HOST KVK_TIER_HOST

Test(store, life_of_a_block)
{
    struct store store;
    store_start(&store, 8, 0);
    struct kvk_cursor cursor = store_cursor(&store);
    uint32_t id = store_reserve(&store, DEVICE);
    const struct kvk_block *block = store_block(&store, id);
    cr_assert_eq(block->state, KVK_BLOCK_RESERVED);
    cr_assert_eq(block->hold_count, 1);
    cr_assert_eq(block->pin_count[DEVICE], 1);
    cr_assert_eq(store_used(&store, DEVICE), 1);
    cr_assert_eq(store_bound(&store, DEVICE), 1);
    kvk_cache_check_locked(store.cache);
    store_release(&store, id);
    cr_assert_eq(store_used(&store, DEVICE), 0);
    cr_assert_eq(store_bound(&store, DEVICE), 0);

    id = store_seal(&store, DEVICE, &cursor, 7);
    block = store_block(&store, id);
    cr_assert_eq(block->state, KVK_BLOCK_SEALED);
    cr_assert_eq(block->tier_mask, 1U << DEVICE);
    cr_assert_null(block->queue);
    kvk_cache_check_locked(store.cache);
    kvk_block_hold(store.cache, id, false);
    cr_assert_eq(block->state, KVK_BLOCK_SHARED);
    kvk_block_release(store.cache, id, false);
    store_release(&store, id);
    cr_assert_eq(block->state, KVK_BLOCK_EVICTABLE);
    cr_assert_eq(block->queue, &store.group->tiers[DEVICE].queue);
    cr_assert_eq(store_bound(&store, DEVICE), 0);
    cr_assert_eq(store_used(&store, DEVICE), 1);
    cr_assert_eq(store.group->state_counts[KVK_BLOCK_EVICTABLE], 1);
    kvk_cache_check_locked(store.cache);

    kvk_block_drop_copy(store.cache, id, DEVICE, true);
    cr_assert_eq(store_used(&store, DEVICE), 0);
    cr_assert_eq(store.cache->stats.evictions[DEVICE], 1);
    cr_assert_eq(store.cache->stats.forgotten_blocks, 1);
    cr_assert_eq(kvk_index_block_count(store.cache->index), 0);
    store_stop(&store);
}

Test(store, unindexed_and_invalidated_blocks_end_with_their_last_holder)
{
    struct store store;
    store_start(&store, 8, 0);
    uint32_t id = store_reserve(&store, DEVICE);
    store_write(&store, id, 1);
    kvk_block_seal(store.cache, id);
    kvk_cache_check_locked(store.cache);
    store_release(&store, id);
    cr_assert_eq(store_used(&store, DEVICE), 0, "a private block is nobody's to find");

    struct kvk_cursor cursor = store_cursor(&store);
    id = store_seal(&store, DEVICE, &cursor, 1);
    kvk_unlock(&store.cache->lock);
    const struct kvk_invalidate_request request = {.space_id = store.space->id};
    struct kvk_invalidate_reply reply;
    cr_assert_eq(kvk_invalidate(store.cache, &store.house.caller, &request, &reply, NULL), KVK_OK);
    kvk_lock(&store.cache->lock);
    cr_assert_eq(reply.blocks[DEVICE], 1);
    cr_assert_eq(reply.held_blocks, 1);
    cr_assert_eq(store_used(&store, DEVICE), 1, "it is held");
    kvk_cache_check_locked(store.cache);
    store_release(&store, id);
    cr_assert_eq(store_used(&store, DEVICE), 0, "its root was invalidated");
    store_stop(&store);
}

Test(store, what_is_bound_where)
{
    struct store store;
    store_start(&store, 8, 8);
    struct kvk_cursor cursor = store_cursor(&store);
    uint32_t id = store_seal(&store, DEVICE, &cursor, 1);
    struct kvk_tier_state *device = &store.cache->tiers[DEVICE];
    struct kvk_tier_state *host = &store.cache->tiers[HOST];
    cr_assert_eq(store_bound(&store, DEVICE), 1, "pinned");
    kvk_block_unpin(store.cache, id, DEVICE);
    cr_assert_eq(store_bound(&store, DEVICE), 0, "held, but it may be demoted");
    cr_assert_eq(store_block(&store, id)->queue, &store.group->tiers[DEVICE].held);
    kvk_cache_check_locked(store.cache);

    /* In both tiers either copy may go, but not both. */
    struct kvk_move move = {.block = id};
    cr_assert_eq(
        kvk_room_slot(store.cache, store.group, HOST, &store.house.caller, &move.slot, NULL),
        KVK_WOULD_BLOCK, "no place has memory yet");
    const struct kvk_room_want want = {.tier = HOST, .counts = {1}};
    cr_assert_eq(kvk_room_make_drops(store.cache, store.space, &want, &store.house.caller, NULL),
                 KVK_OK);
    cr_assert_eq(
        kvk_room_slot(store.cache, store.group, HOST, &store.house.caller, &move.slot, NULL),
        KVK_OK);
    cr_assert_eq(host->copying_bytes, 1024, "a slot on its way");
    kvk_cache_check_locked(store.cache);
    cr_assert_eq(kvk_tier_copy_drops(store.cache, HOST, &move, 1, NULL), KVK_OK);
    cr_assert_eq(store_bound(&store, DEVICE), 0);
    cr_assert_eq(store_bound(&store, HOST), 0);
    cr_assert_eq(store_block(&store, id)->queue, &store.group->tiers[DEVICE].clean);
    kvk_cache_check_locked(store.cache);

    kvk_block_drop_copy(store.cache, id, DEVICE, true);
    cr_assert_eq(store_bound(&store, HOST), 1, "the last copy of what is held");
    cr_assert_eq(host->leased_bytes, 0);
    kvk_block_hold(store.cache, id, true);
    store.cache->passing_holds--;
    kvk_block_release(store.cache, id, false);
    cr_assert_eq(host->leased_bytes, 1024, "by a lease alone");
    kvk_block_release(store.cache, id, true);
    cr_assert_eq(host->leased_bytes, 0);
    cr_assert_eq(store_block(&store, id)->queue, &store.group->tiers[HOST].queue);
    cr_assert_eq(device->used_bytes, 0);
    store_stop(&store);
}

Test(store, parents_leave_their_queue_for_children)
{
    struct store store;
    store_start(&store, 8, 0);
    struct kvk_cursor cursor = store_cursor(&store);
    uint32_t parent = store_seal(&store, DEVICE, &cursor, 1);
    store_release(&store, parent);
    cr_assert_not_null(store_block(&store, parent)->queue);
    uint32_t child = store_seal(&store, DEVICE, &cursor, 2);
    cr_assert_null(store_block(&store, parent)->queue, "not a leaf");
    kvk_cache_check_locked(store.cache);
    store_release(&store, child);
    cr_assert_null(store_block(&store, parent)->queue);
    kvk_block_drop_copy(store.cache, child, DEVICE, true);
    cr_assert_not_null(store_block(&store, parent)->queue, "a leaf again");
    store_stop(&store);
}

Test(store, under_a_window_parents_may_go_first)
{
    struct store store;
    store_start(&store, 8, 0);
    kvk_index_root_release(store.cache->index, store.root);
    store.space->reference_count--;
    kvk_unlock(&store.cache->lock);
    store_open_space(&store, "windowed", 8);
    kvk_lock(&store.cache->lock);
    struct kvk_cursor cursor = store_cursor(&store);
    uint32_t parent = store_seal(&store, DEVICE, &cursor, 1);
    uint32_t child = store_seal(&store, DEVICE, &cursor, 2);
    store_release(&store, child);
    store_release(&store, parent);
    cr_assert_not_null(store_block(&store, parent)->queue);
    kvk_block_drop_copy(store.cache, parent, DEVICE, true);
    cr_assert_eq(store_block(&store, parent)->state, KVK_BLOCK_HOLLOW,
                 "an ancestor, without bytes");
    kvk_cache_check_locked(store.cache);
    kvk_block_drop_copy(store.cache, child, DEVICE, true);
    cr_assert_eq(kvk_index_block_count(store.cache->index), 0, "hollow ancestors go with it");
    store_stop(&store);
}

Test(store, hollow_blocks_get_bytes_again)
{
    struct store store;
    store_start(&store, 8, 0);
    struct kvk_cursor cursor = store_cursor(&store);
    uint32_t known = store_seal(&store, DEVICE, &cursor, 1);
    kvk_index_anchor(store.cache->index, known);
    store_release(&store, known);
    kvk_block_drop_copy(store.cache, known, DEVICE, true);
    cr_assert_eq(store_block(&store, known)->state, KVK_BLOCK_HOLLOW);

    uint32_t id = store_reserve(&store, DEVICE);
    store_write(&store, id, 9);
    kvk_block_seal(store.cache, id);
    kvk_block_fill(store.cache, known, id);
    const struct kvk_block *filled = store_block(&store, known);
    cr_assert_eq(filled->state, KVK_BLOCK_SEALED);
    cr_assert_eq(filled->pin_count[DEVICE], 1, "the pin went along");
    cr_assert_eq(store_block(&store, id)->state, KVK_BLOCK_FREE);
    store_expect_bytes(&store, known, DEVICE, 9);
    kvk_cache_check_locked(store.cache);
    store_release(&store, known);
    kvk_block_drop_copy(store.cache, known, DEVICE, true);
    kvk_index_unanchor(store.cache->index, known);
    kvk_block_settle(store.cache, known);
    cr_assert_eq(kvk_index_block_count(store.cache->index), 0, "the anchor was all that kept it");
    store_stop(&store);
}

Test(store, a_freed_slot_has_another_generation)
{
    struct store store;
    store_start(&store, 1, 0);
    uint32_t id = store_reserve(&store, DEVICE);
    uint32_t slot = store_block(&store, id)->slot[DEVICE];
    uint32_t before = kvk_block_generation(store.cache, store_block(&store, id), DEVICE);
    store_write(&store, id, 3);
    cr_assert_eq(kvk_block_checksum_drops(store.cache, &id, 1, false, NULL), KVK_OK);
    cr_assert_neq(*kvk_block_checksums(store.cache, store_block(&store, id), DEVICE), 0);
    store_release(&store, id);
    id = store_reserve(&store, DEVICE);
    cr_assert_eq(store_block(&store, id)->slot[DEVICE], slot);
    cr_assert_eq(kvk_block_generation(store.cache, store_block(&store, id), DEVICE), before + 1);
    cr_assert_eq(*kvk_block_checksums(store.cache, store_block(&store, id), DEVICE), 0,
                 "of other bytes");
    store_release(&store, id);
    store_stop(&store);
}

Test(store, quarantine_is_counted_apart)
{
    struct store store;
    store_start(&store, 4, 0);
    uint32_t id = store_reserve(&store, DEVICE);
    kvk_block_set_quarantined(store.cache, id, true);
    cr_assert_eq(store.cache->tiers[DEVICE].quarantine_bytes, 1024);
    cr_assert_eq(store.cache->tiers[DEVICE].bound_bytes, 1024);
    kvk_block_set_quarantined(store.cache, id, false);
    cr_assert_eq(store.cache->tiers[DEVICE].quarantine_bytes, 0);
    store_release(&store, id);
    store_stop(&store);
}

Test(store, a_used_second_copy_goes)
{
    struct store store;
    store_start(&store, 8, 8);
    struct kvk_cursor cursor = store_cursor(&store);
    uint32_t id = store_seal(&store, DEVICE, &cursor, 5);
    store_release(&store, id);
    store.house.config.device_free_percent = 100;
    kvk_tier_run_ahead_drops(store.cache); /* backs the host's place first */
    kvk_tier_run_ahead_drops(store.cache);
    cr_assert_eq(store_block(&store, id)->tier_mask, 3, "clean");
    kvk_cache_check_locked(store.cache);
    kvk_block_borrow(store.cache, id, DEVICE);
    kvk_block_return(store.cache, id, DEVICE);
    cr_assert_eq(store_block(&store, id)->tier_mask, 3, "a passing look at it");
    store.cache->passing_holds++;
    kvk_block_hold(store.cache, id, false);
    kvk_block_pin(store.cache, id, DEVICE);
    cr_assert_eq(store_block(&store, id)->tier_mask, 1U << DEVICE, "in use again");
    cr_assert_eq(store_used(&store, HOST), 0);
    store_release(&store, id);
    store_stop(&store);
}

Test(store, tables_say_where_blocks_lie)
{
    struct store store;
    struct kvk_tables tables = {.part_count = 0};
    store_start(&store, 4, 4);
    struct kvk_cursor cursor = store_cursor(&store);
    const uint32_t ids[3] = {store_seal(&store, DEVICE, &cursor, 1), KVK_BLOCK_NONE,
                             store_seal(&store, HOST, &cursor, 2)};
    kvk_unlock(&store.cache->lock);
    cr_assert_eq(kvk_tables_reserve_unlocked(&tables, 4, NULL), KVK_OK);
    kvk_lock(&store.cache->lock);
    struct kvk_table_part *first = kvk_tables_part(&tables, 0, 0, 1);
    struct kvk_table_part *part = kvk_tables_part(&tables, 0, 0, 3);
    kvk_table_fill(store.cache, ids, 1, first);
    kvk_table_fill(store.cache, ids, 3, part);
    cr_assert_eq(part->tiers[0], 1);
    cr_assert_eq(part->tiers[1], 0);
    cr_assert_eq(part->tiers[2], 2);
    cr_assert_eq(part->slots[0], store_block(&store, ids[0])->slot[DEVICE]);
    cr_assert_eq(part->slots[1], KVK_TABLE_SLOT_NONE);
    cr_assert_eq(part->slots[2], store_block(&store, ids[2])->slot[HOST]);
    cr_assert_eq(first->slots[0], part->slots[0]);
    kvk_tables_finish(&tables);
    store_release(&store, ids[2]);
    store_release(&store, ids[0]);
    store_stop(&store);
}

/* Random holds, pins and drops against a plain count of them. */
Test(store, random_references_against_plain_counts)
{
    enum { BLOCKS = 12, STEPS = 4000 };
    struct store store;
    struct kvk_random random;
    uint32_t ids[BLOCKS];
    uint32_t holds[BLOCKS] = {0};
    uint32_t pins[BLOCKS] = {0};
    store_start(&store, BLOCKS, 0);
    kvk_random_init(&random, 11);
    struct kvk_cursor cursor = store_cursor(&store);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (kvk_random_chance(&random, 0.5)) {
            cursor = store_cursor(&store);
        }
        ids[i] = store_seal(&store, DEVICE, &cursor, i + 1);
        holds[i] = pins[i] = 1;
    }
    for (uint32_t step = 0; step < STEPS; step++) {
        uint32_t i = (uint32_t)kvk_random_below(&random, BLOCKS);
        const struct kvk_block *block = store_block(&store, ids[i]);
        if (block->state == KVK_BLOCK_FREE || block->state == KVK_BLOCK_HOLLOW) {
            continue;
        }
        switch (kvk_random_below(&random, 5)) {
        case 0:
            kvk_block_hold(store.cache, ids[i], false);
            store.cache->passing_holds++;
            holds[i]++;
            break;
        case 1:
            if (holds[i] > 0) {
                kvk_block_pin(store.cache, ids[i], DEVICE);
                pins[i]++;
            }
            break;
        case 2:
            if (pins[i] > 0) {
                kvk_block_unpin(store.cache, ids[i], DEVICE);
                pins[i]--;
            }
            break;
        case 3:
            if (holds[i] > 1 || (holds[i] == 1 && pins[i] == 0)) {
                store.cache->passing_holds--;
                kvk_block_release(store.cache, ids[i], false);
                holds[i]--;
            }
            break;
        default:
            if (holds[i] == 0 && block->memory_children == 0 && kvk_random_chance(&random, 0.02)) {
                kvk_block_drop_copy(store.cache, ids[i], DEVICE, true);
            }
            break;
        }
        uint64_t bound = 0;
        for (uint32_t k = 0; k < BLOCKS; k++) {
            bound += holds[k] > 0;
            block = store_block(&store, ids[k]);
            if (block->state != KVK_BLOCK_FREE && block->state != KVK_BLOCK_HOLLOW) {
                cr_assert_eq(block->hold_count, holds[k]);
                cr_assert_eq(block->pin_count[DEVICE], pins[k]);
            }
        }
        cr_assert_eq(store_bound(&store, DEVICE), bound);
        kvk_cache_check_locked(store.cache);
    }
    for (uint32_t i = 0; i < BLOCKS; i++) {
        for (; pins[i] > 0; pins[i]--) {
            kvk_block_unpin(store.cache, ids[i], DEVICE);
        }
        for (; holds[i] > 0; holds[i]--) {
            store.cache->passing_holds--;
            kvk_block_release(store.cache, ids[i], false);
        }
    }
    store_stop(&store);
}
