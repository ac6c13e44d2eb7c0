/* Bytes between tiers, and the mover that carries them. */
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/copy.h"
#include "tests/engine_store.h"

#define DEVICE KVK_TIER_DEVICE
#define HOST KVK_TIER_HOST
#define BOTH ((1U << DEVICE) | (1U << HOST))

static uint32_t slot_in(struct store *store, enum kvk_tier tier)
{
    uint32_t slot = KVK_SLOT_NONE;
    const struct kvk_room_want want = {.tier = tier, .counts = {1}};
    while (kvk_room_slot(store->cache, store->group, tier, NULL, &slot, NULL) == KVK_WOULD_BLOCK) {
        cr_assert_eq(kvk_room_make_drops(store->cache, store->space, &want, &store->house.caller,
                                         &store->house.error),
                     KVK_OK, "%s", store->house.error.text);
    }
    cr_assert_neq(slot, KVK_SLOT_NONE);
    return slot;
}

static enum kvk_status copy_to(struct store *store, enum kvk_tier tier, uint32_t id)
{
    const struct kvk_move move = {.block = id, .slot = slot_in(store, tier)};
    return kvk_tier_copy_drops(store->cache, tier, &move, 1, &store->house.error);
}

static uint32_t sealed_block(struct store *store, enum kvk_tier tier, uint32_t token)
{
    struct kvk_cursor cursor = store_cursor(store);
    return store_seal(store, tier, &cursor, token);
}

Test(tiering, there_and_back_byte_for_byte)
{
    struct store store;
    store_start(&store, 8, 8);
    uint32_t id = sealed_block(&store, DEVICE, 42);
    kvk_block_unpin(store.cache, id, DEVICE);
    cr_assert_eq(copy_to(&store, HOST, id), KVK_OK);
    cr_assert_eq(store_block(&store, id)->tier_mask, BOTH);
    store_expect_bytes(&store, id, HOST, 42);
    cr_assert_eq(*kvk_block_checksums(store.cache, store_block(&store, id), HOST),
                 kvk_checksum(kvk_block_address(store.cache, store_block(&store, id), HOST, 0),
                              store.group->block_bytes));
    kvk_block_drop_copy(store.cache, id, DEVICE, false);
    kvk_cache_check_locked(store.cache);
    cr_assert_eq(copy_to(&store, DEVICE, id), KVK_OK);
    cr_assert_eq(store_block(&store, id)->tier_mask, 1U << DEVICE, "the host tier is exclusive");
    cr_assert_eq(store_used(&store, HOST), 0);
    cr_assert_eq(store.cache->stats.promoted_blocks, 1);
    store_expect_bytes(&store, id, DEVICE, 42);
    kvk_cache_check_locked(store.cache);
    store_release(&store, id);
    store_stop(&store);
}

Test(tiering, a_pinned_source_stays)
{
    struct store store;
    store_start(&store, 8, 8);
    uint32_t id = sealed_block(&store, HOST, 1);
    cr_assert_eq(copy_to(&store, DEVICE, id), KVK_OK);
    cr_assert_eq(store_block(&store, id)->tier_mask, BOTH);
    store_release(&store, id);
    cr_assert_eq(store_block(&store, id)->queue, &store.group->tiers[DEVICE].clean);
    store_stop(&store);
}

Test(tiering, damaged_bytes_are_not_passed_on)
{
    struct store store;
    store_start(&store, 8, 8);
    uint32_t held = sealed_block(&store, DEVICE, 1);
    uint32_t idle = sealed_block(&store, DEVICE, 2);
    uint32_t good = sealed_block(&store, DEVICE, 3);
    const uint32_t ids[3] = {held, idle, good};
    for (uint32_t i = 0; i < 2; i++) {
        *kvk_block_address(store.cache, store_block(&store, ids[i]), DEVICE, 0) ^= 0xff;
    }
    kvk_block_unpin(store.cache, held, DEVICE);
    store_release(&store, idle);
    store_release(&store, good);
    struct kvk_move moves[3];
    for (uint32_t i = 0; i < 3; i++) {
        moves[i] = (struct kvk_move){.block = ids[i], .slot = slot_in(&store, HOST)};
    }
    cr_assert_eq(kvk_tier_copy_drops(store.cache, HOST, moves, 3, &store.house.error),
                 KVK_DATA_LOSS);
    cr_assert_eq(store.house.error.cause, KVK_CAUSE_CHECKSUM);
    cr_assert_eq(store.cache->stats.checksum_failures, 2);
    cr_assert_eq(store_used(&store, HOST), 0, "all new slots went back");
    cr_assert_eq(store_block(&store, held)->tier_mask, 0, "found by nobody any more");
    cr_assert_neq(store_block(&store, held)->slot[DEVICE], KVK_SLOT_NONE, "its holder is told");
    cr_assert_eq(store_bound(&store, DEVICE), 1, "nobody's victim: it would not get past this");
    cr_assert_eq(store_block(&store, idle)->state, KVK_BLOCK_FREE, "nobody is served this one");
    cr_assert_eq(store_block(&store, good)->tier_mask, 1U << DEVICE, "unchanged");
    kvk_cache_check_locked(store.cache);
    cr_assert_eq(kvk_block_checksum_drops(store.cache, &held, 1, true, NULL), KVK_DATA_LOSS);
    cr_assert_eq(kvk_block_checksum_drops(store.cache, &good, 1, true, NULL), KVK_OK);
    store_release(&store, held);
    cr_assert_eq(store_block(&store, held)->state, KVK_BLOCK_FREE);
    store_stop(&store);
}

/* One damaged block that somebody holds does not stand in the way of the others. */
Test(tiering, room_is_made_past_a_damaged_block)
{
    struct store store;
    uint32_t held[4];
    uint32_t fresh[3];
    store_start(&store, 4, 8);
    for (uint32_t i = 0; i < 4; i++) {
        held[i] = sealed_block(&store, DEVICE, i + 1);
        kvk_block_unpin(store.cache, held[i], DEVICE);
    }
    *kvk_block_address(store.cache, store_block(&store, held[0]), DEVICE, 0) ^= 0xff;
    cr_assert_eq(store_try_reserve(&store, DEVICE, 3, fresh), KVK_OK, "%s", store.house.error.text);
    kvk_cache_check_locked(store.cache);
    cr_assert_eq(store.cache->stats.checksum_failures, 1);
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert_eq(store_block(&store, held[i + 1])->tier_mask, 1U << HOST);
        store_release(&store, fresh[i]);
    }
    for (uint32_t i = 0; i < 4; i++) {
        store_release(&store, held[i]);
    }
    store_stop(&store);
}

/* Where another copy is good, the damaged one goes at once. */
Test(tiering, a_second_copy_outlives_a_damaged_one)
{
    struct store store;
    store_start(&store, 4, 4);
    uint32_t id = sealed_block(&store, DEVICE, 9);
    cr_assert_eq(copy_to(&store, HOST, id), KVK_OK);
    *kvk_block_address(store.cache, store_block(&store, id), DEVICE, 0) ^= 0xff;
    cr_assert_eq(kvk_block_checksum_drops(store.cache, &id, 1, true, NULL), KVK_DATA_LOSS);
    cr_assert_eq(store_block(&store, id)->tier_mask, 1U << HOST);
    cr_assert_eq(kvk_block_tier(store_block(&store, id)), HOST, "what is read from now on");
    cr_assert_neq(store_block(&store, id)->slot[DEVICE], KVK_SLOT_NONE, "pinned");
    kvk_cache_check_locked(store.cache);
    kvk_block_unpin(store.cache, id, DEVICE);
    cr_assert_eq(store_block(&store, id)->slot[DEVICE], KVK_SLOT_NONE);
    cr_assert_eq(kvk_block_checksum_drops(store.cache, &id, 1, true, NULL), KVK_OK);
    store_release(&store, id);
    store_stop(&store);
}

Test(tiering, a_failed_copy_changes_nothing)
{
    struct store store;
    store_start(&store, 8, 8);
    uint32_t id = sealed_block(&store, DEVICE, 1);
    kvk_mover_test_fail_next(store.cache->mover);
    cr_assert_eq(copy_to(&store, HOST, id), KVK_INTERNAL);
    cr_assert_eq(store_block(&store, id)->tier_mask, 1U << DEVICE);
    cr_assert_eq(store_block(&store, id)->pin_count[DEVICE], 1);
    cr_assert_eq(store_used(&store, HOST), 0);
    cr_assert_eq(store.cache->stats.copy_failures, 1);
    kvk_cache_check_locked(store.cache);
    cr_assert_eq(copy_to(&store, HOST, id), KVK_OK);
    store_release(&store, id);
    store_stop(&store);
}

/* ---- What happens while bytes move ---- */

struct meanwhile {
    struct store *store;
    uint32_t id;
    bool invalidate;
    bool release;
    bool copy_too; /* another call brings the same block to the same tier */
    bool ran;
};

static void meanwhile_run(void *context)
{
    struct meanwhile *meanwhile = context;
    struct store *store = meanwhile->store;
    if (meanwhile->ran) {
        return;
    }
    meanwhile->ran = true;
    if (meanwhile->invalidate) {
        const struct kvk_invalidate_request request = {.space_id = store->space->id};
        struct kvk_invalidate_reply reply;
        cr_assert_eq(kvk_invalidate(store->cache, &store->house.caller, &request, &reply, NULL),
                     KVK_OK);
    }
    kvk_lock(&store->cache->lock);
    const struct kvk_block *block = store_block(store, meanwhile->id);
    cr_assert_eq(block->transfer_count, 1);
    cr_assert_null(block->queue, "nobody's victim while it is copied");
    kvk_cache_check_locked(store->cache);
    if (meanwhile->release) {
        store_release(store, meanwhile->id);
    }
    if (meanwhile->copy_too) {
        cr_assert_eq(copy_to(store, HOST, meanwhile->id), KVK_OK);
        cr_assert_eq(block->tier_mask, BOTH);
    }
    kvk_cache_check_locked(store->cache);
    kvk_unlock(&store->cache->lock);
}

Test(tiering, released_while_it_is_copied)
{
    struct store store;
    store_start(&store, 8, 8);
    struct meanwhile meanwhile = {
        .store = &store, .id = sealed_block(&store, DEVICE, 1), .release = true};
    kvk_mover_test_hook(store.cache->mover, meanwhile_run, &meanwhile);
    cr_assert_eq(copy_to(&store, HOST, meanwhile.id), KVK_OK);
    cr_assert(meanwhile.ran);
    cr_assert_eq(store_block(&store, meanwhile.id)->state, KVK_BLOCK_EVICTABLE);
    cr_assert_eq(store_block(&store, meanwhile.id)->tier_mask, BOTH);
    store_stop(&store);
}

Test(tiering, invalidated_and_released_while_it_is_copied)
{
    struct store store;
    store_start(&store, 8, 8);
    struct meanwhile meanwhile = {.store = &store,
                                  .id = sealed_block(&store, DEVICE, 1),
                                  .invalidate = true,
                                  .release = true};
    kvk_mover_test_hook(store.cache->mover, meanwhile_run, &meanwhile);
    cr_assert_eq(copy_to(&store, HOST, meanwhile.id), KVK_OK);
    cr_assert_eq(store_used(&store, DEVICE), 0, "its last holder was the copy");
    cr_assert_eq(store_used(&store, HOST), 0);
    store_stop(&store);
}

Test(tiering, two_calls_copy_the_same_block)
{
    struct store store;
    store_start(&store, 8, 8);
    struct meanwhile meanwhile = {
        .store = &store, .id = sealed_block(&store, DEVICE, 1), .copy_too = true};
    kvk_mover_test_hook(store.cache->mover, meanwhile_run, &meanwhile);
    cr_assert_eq(copy_to(&store, HOST, meanwhile.id), KVK_OK);
    cr_assert_eq(store_used(&store, HOST), 1, "the slower one's slot went back");
    cr_assert_eq(store_block(&store, meanwhile.id)->transfer_count, 0);
    store_release(&store, meanwhile.id);
    store_stop(&store);
}

/* ---- Unsealed blocks ---- */

Test(tiering, unsealed_blocks_move_with_their_pins)
{
    struct store store;
    store_start(&store, 8, 8);
    uint32_t written = store_reserve(&store, DEVICE);
    uint32_t reserved = store_reserve(&store, DEVICE);
    store_write(&store, written, 77);
    const uint32_t ids[2] = {written, reserved};
    for (uint32_t i = 0; i < 2; i++) {
        cr_assert_eq(copy_to(&store, HOST, ids[i]), KVK_OK);
        const struct kvk_block *block = store_block(&store, ids[i]);
        cr_assert_eq(block->slot[DEVICE], KVK_SLOT_NONE);
        cr_assert_neq(block->slot[HOST], KVK_SLOT_NONE);
        cr_assert_eq(block->pin_count[DEVICE], 0);
        cr_assert_eq(block->pin_count[HOST], 1);
        cr_assert_eq(block->tier_mask, 0, "still not to be found");
        kvk_cache_check_locked(store.cache);
    }
    store_expect_bytes(&store, written, HOST, 77);
    cr_assert_eq(store_used(&store, DEVICE), 0);
    store_release(&store, written);
    store_release(&store, reserved);
    store_stop(&store);
}

Test(tiering, clones_have_the_same_bytes)
{
    struct store store;
    store_start(&store, 8, 8);
    uint32_t source = store_reserve(&store, HOST);
    uint32_t target = store_reserve(&store, DEVICE);
    store_write(&store, source, 5);
    kvk_block_hold(store.cache, source, false); /* shared */
    cr_assert_eq(kvk_block_clone_drops(store.cache, target, source, NULL), KVK_OK);
    store_expect_bytes(&store, target, DEVICE, 5);
    kvk_mover_test_fail_next(store.cache->mover);
    cr_assert_eq(kvk_block_clone_drops(store.cache, target, source, NULL), KVK_INTERNAL);
    kvk_block_release(store.cache, source, false);
    kvk_cache_check_locked(store.cache);
    store_release(&store, target);
    store_release(&store, source);
    store_stop(&store);
}

/* ---- Ahead of need ---- */

Test(tiering, a_bounded_number_of_second_copies)
{
    enum { BLOCKS = 32 };
    struct store store;
    uint32_t ids[BLOCKS];
    store_start(&store, BLOCKS, 64);
    store.house.config.device_free_percent = 25;
    for (uint32_t i = 0; i < BLOCKS; i++) {
        ids[i] = sealed_block(&store, DEVICE, i + 1);
        store_release(&store, ids[i]);
        if (i == BLOCKS / 2) {
            kvk_tier_run_ahead_drops(store.cache);
            kvk_tier_run_ahead_drops(store.cache);
            cr_assert_eq(store_used(&store, HOST), 0, "there is room enough");
        }
    }
    for (uint32_t i = 0; i < 40; i++) {
        kvk_tier_run_ahead_drops(store.cache);
        kvk_cache_check_locked(store.cache);
    }
    cr_assert_eq(store_used(&store, DEVICE), BLOCKS, "nothing was dropped early");
    cr_assert_eq(store_used(&store, HOST), BLOCKS / 4);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint32_t expected = i < BLOCKS / 4 ? BOTH : 1U << DEVICE;
        cr_assert_eq(store_block(&store, ids[i])->tier_mask, expected, "block %u", i);
    }
    /* Room for these comes without any copying. */
    uint32_t fresh[BLOCKS / 4];
    store.house.caller.may_block = false;
    cr_assert_eq(store_try_reserve(&store, DEVICE, BLOCKS / 4, fresh), KVK_OK);
    cr_assert_eq(store_try_reserve(&store, DEVICE, 1, fresh), KVK_WOULD_BLOCK);
    for (uint32_t i = 0; i < BLOCKS / 4; i++) {
        store_release(&store, fresh[i]);
    }
    store_stop(&store);
}

/* ---- The mover ---- */

Test(mover, copies_by_many_threads)
{
    enum { COPIES = 200, SIZE = 40000 };
    const struct kvk_mover_options options = {.thread_count = 3, .queue_max = 4};
    struct kvk_mover *mover;
    struct kvk_device *device = house_device();
    cr_assert_eq(kvk_mover_create(&options, &mover), KVK_OK);
    uint8_t *source = malloc((size_t)COPIES * SIZE);
    uint8_t *target = calloc(COPIES, SIZE);
    static struct kvk_copy copies[COPIES];
    static uint64_t sums[COPIES];
    struct kvk_random random;
    kvk_random_init(&random, 1);
    kvk_random_fill(&random, source, (size_t)COPIES * SIZE);
    for (uint32_t i = 0; i < COPIES; i++) {
        size_t at = (size_t)i * SIZE;
        copies[i] = (struct kvk_copy){
            .target = target + at, .source = source + at, .size_bytes = SIZE, .checksum = &sums[i]};
    }
    cr_assert_eq(kvk_mover_copy(mover, device, copies, COPIES, NULL), KVK_OK);
    cr_assert_arr_eq(target, source, (size_t)COPIES * SIZE);
    for (uint32_t i = 0; i < COPIES; i++) {
        cr_assert_eq(sums[i], kvk_checksum(source + (size_t)i * SIZE, SIZE));
    }
    cr_assert_eq(kvk_mover_bytes(mover), (uint64_t)COPIES * SIZE);
    cr_assert_gt(kvk_mover_rate(mover), 0);
    kvk_mover_test_fail_next(mover);
    cr_assert_eq(kvk_mover_copy(mover, device, copies, COPIES, NULL), KVK_INTERNAL);
    cr_assert_eq(kvk_mover_copy(mover, device, copies, COPIES, NULL), KVK_OK);
    cr_assert_eq(kvk_mover_copy(mover, device, copies, 0, NULL), KVK_OK);
    kvk_mover_destroy(mover);
    device->ops->close(device);
    free(source);
    free(target);
}

/* A device that notes who copies. */
static char copied_by[16];
static int copied_at_nice;

static enum kvk_status noting_copy(struct kvk_device *device, const struct kvk_copy *copies,
                                   uint32_t copy_count, struct kvk_error *error)
{
    (void)device;
    (void)error;
    for (uint32_t i = 0; i < copy_count; i++) {
        kvk_copy_checksum(copies[i].target, copies[i].source, copies[i].size_bytes,
                          copies[i].checksum);
    }
    (void)pthread_getname_np(pthread_self(), copied_by, sizeof(copied_by));
    copied_at_nice = getpriority(PRIO_PROCESS, (id_t)gettid());
    return KVK_OK;
}

Test(mover, what_nobody_waits_for_is_copied_by_a_thread_that_stands_back)
{
    static uint8_t source[3 << 20], target[3 << 20];
    static const struct kvk_device_ops ops = {.copy = noting_copy};
    struct kvk_device device = {.ops = &ops};
    const struct kvk_mover_options options = {.thread_count = 1, .queue_max = 4};
    struct kvk_mover *mover;
    struct kvk_random random;
    uint64_t sums[3];
    struct kvk_copy copies[3];
    kvk_random_init(&random, 2);
    kvk_random_fill(&random, source, sizeof(source));
    for (size_t i = 0; i < 3; i++) {
        copies[i] = (struct kvk_copy){.target = target + (i << 20),
                                      .source = source + (i << 20),
                                      .size_bytes = 1 << 20,
                                      .checksum = &sums[i]};
    }
    cr_assert_eq(kvk_mover_create(&options, &mover), KVK_OK);
    cr_assert_eq(kvk_mover_copy_behind(mover, &device, copies, 3, NULL), KVK_OK);
    cr_assert_arr_eq(target, source, sizeof(source));
    cr_assert_eq(sums[2], kvk_checksum(source + (2 << 20), 1 << 20));
    cr_expect_str_eq(copied_by, "kvk-behind");
    cr_expect_geq(copied_at_nice, 10);
    cr_expect_eq(kvk_mover_bytes(mover), sizeof(source));
    cr_expect_eq(kvk_mover_rate(mover), 0, "its rate says nothing of what others get");
    copies[0].size_bytes = 1; /* however small */
    cr_assert_eq(kvk_mover_copy_behind(mover, &device, copies, 1, NULL), KVK_OK);
    cr_expect_str_eq(copied_by, "kvk-behind");
    cr_assert_eq(kvk_mover_copy_behind(mover, &device, copies, 0, NULL), KVK_OK);
    kvk_mover_test_fail_next(mover);
    cr_assert_eq(kvk_mover_copy_behind(mover, &device, copies, 1, NULL), KVK_INTERNAL);
    cr_assert_eq(kvk_mover_copy(mover, &device, copies, 3, NULL), KVK_OK);
    cr_expect_str_eq(copied_by, "kvk-move-0");
    cr_expect_eq(copied_at_nice, getpriority(PRIO_PROCESS, 0));
    kvk_mover_destroy(mover);
}

struct nested {
    struct kvk_mover *mover;
    struct kvk_device *device;
    uint32_t depth;
    struct kvk_error error;
    enum kvk_status status;
};

static void nested_run(void *context)
{
    struct nested *nested = context;
    uint8_t bytes[2] = {1, 0};
    const struct kvk_copy copy = {.target = bytes + 1, .source = bytes, .size_bytes = 1};
    nested->depth++;
    enum kvk_status status =
        kvk_mover_copy(nested->mover, nested->device, &copy, 1, &nested->error);
    if (status != KVK_OK) {
        nested->status = status;
    }
}

Test(mover, a_full_queue_says_so)
{
    const struct kvk_mover_options options = {.thread_count = 0, .queue_max = 3};
    struct nested nested = {.device = house_device()};
    cr_assert_eq(kvk_mover_create(&options, &nested.mover), KVK_OK);
    kvk_mover_test_hook(nested.mover, nested_run, &nested);
    nested_run(&nested);
    cr_assert_eq(nested.depth, 4, "each job begins the next");
    cr_assert_eq(nested.status, KVK_EXHAUSTED);
    cr_assert_eq(nested.error.cause, KVK_CAUSE_QUEUE_FULL);
    cr_assert_gt(nested.error.retry_after_ms, 0);
    kvk_mover_destroy(nested.mover);
    nested.device->ops->close(nested.device);
}

/* ---- Time that the daemon itself lost ---- */

Test(maintenance, time_that_stood_still_is_no_lease_time)
{
    struct store store;
    store_start(&store, 4, 0);
    struct kvk_cache *cache = store.cache;
    kvk_unlock(&cache->lock);
    kvk_cache_maintain(cache);
    uint64_t now = kvk_clock_now(cache->clock);
    kvk_clock_manual_set(&store.house.manual, now + 60 * KVK_NS_PER_SECOND);
    kvk_cache_maintain(cache);
    cr_assert_eq(cache->stood_still_ns, 0, "without a thread nobody said when rounds are due");
    cache->maintenance_running = true;
    kvk_clock_manual_set(&store.house.manual, now + 60 * KVK_NS_PER_SECOND + 50 * KVK_NS_PER_MS);
    kvk_cache_maintain(cache);
    cr_assert_eq(cache->stood_still_ns, 0);
    kvk_clock_manual_set(&store.house.manual, now + 160 * KVK_NS_PER_SECOND);
    uint64_t noticed = kvk_cache_stood_still(cache, kvk_clock_now(cache->clock));
    cr_assert_gt(noticed, 98 * KVK_NS_PER_SECOND, "known before the next round");
    kvk_cache_maintain(cache);
    cr_assert_eq(cache->stood_still_ns, noticed);
    cache->maintenance_running = false;
    kvk_lock(&cache->lock);
    store_stop(&store);
}

Test(maintenance, test_hooks_are_asked_for)
{
    struct house house;
    const struct house_options options = {.device_bytes = 4096};
    const struct kvk_test_control control = {.policy_time_ns = 5};
    house_init(&house);
    house.config.test_hooks = false;
    house_start(&house, &options);
    cr_assert_eq(kvk_cache_test_control(house.cache, &control, &house.error), KVK_UNSUPPORTED);
    house.config.test_hooks = true;
    cr_assert_eq(kvk_cache_test_control(house.cache, &control, &house.error), KVK_OK);
    cr_assert_eq(kvk_policy_now(house.cache), 5);
    house_stop(&house);
}
