/* Where blocks of host memory are attended: the choice itself, and the engine that follows it. */
#include "daemon/attention_place.h"

#include <stdio.h>

#include "daemon/attention_workspace.h"
#include "tests/engine_ask.h"
#include "tests/engine_house.h"

#define GB UINT64_C(1000000000)

/* A load for which bringing in is twice as quick. */
static struct kvk_attention_load quicker_on_device(void)
{
    return (struct kvk_attention_load){
        .apart = true,
        .host_bytes = GB,
        .copy_bytes = GB,
        .room_bytes = 2 * GB,
        .host_rate = 10 * GB,
        .host_calls = 1,
        .link_rate = 25 * GB,
        .device_rate = 100 * GB,
    };
}

#define CHOOSES(expected, change)                                                                  \
    do {                                                                                           \
        struct kvk_attention_load load = quicker_on_device();                                      \
        change;                                                                                    \
        cr_expect_eq(kvk_attention_choose_place(&load).place, (expected), #change);                \
    } while (0)

Test(engine_attention_place, the_quicker_one)
{
    const struct kvk_attention_load plain = quicker_on_device();
    struct kvk_attention_choice choice = kvk_attention_choose_place(&plain);

    cr_expect_eq(choice.place, KVK_ATTENTION_BROUGHT_IN);
    cr_expect_eq(choice.in_place_ns, 100000000);
    cr_expect_eq(choice.bring_in_ns, 50000000);
    CHOOSES(KVK_ATTENTION_IN_PLACE, load.link_rate = 10 * GB);
    CHOOSES(KVK_ATTENTION_IN_PLACE, load.host_rate = 17 * GB); /* not by a fifth */
    CHOOSES(KVK_ATTENTION_BROUGHT_IN, load.host_rate = 15 * GB);
    CHOOSES(KVK_ATTENTION_IN_PLACE, load.device_rate = 10 * GB);
    CHOOSES(KVK_ATTENTION_BROUGHT_IN, load.device_rate = 0);
    /* A CPU that others use too, and a cache whose blocks the queries see little of. */
    CHOOSES(KVK_ATTENTION_BROUGHT_IN, (load.host_rate = 40 * GB, load.host_calls = 4));
    CHOOSES(KVK_ATTENTION_IN_PLACE, (load.copy_bytes = 2 * GB, load.host_bytes = GB / 10));
}

Test(engine_attention_place, no_choice_or_none_worth_it)
{
    CHOOSES(KVK_ATTENTION_NO_CHOICE, load.apart = false);
    CHOOSES(KVK_ATTENTION_NO_CHOICE, load.host_bytes = 0);
    CHOOSES(KVK_ATTENTION_IN_PLACE, load.host_rate = 0);
    CHOOSES(KVK_ATTENTION_IN_PLACE, load.link_rate = 0);
    CHOOSES(KVK_ATTENTION_IN_PLACE, load.room_bytes = GB - 1);
    CHOOSES(KVK_ATTENTION_BROUGHT_IN, load.host_calls = 0); /* as 1 */
    CHOOSES(KVK_ATTENTION_IN_PLACE,
            (load.link_rate = 1, load.copy_bytes = UINT64_MAX, load.room_bytes = UINT64_MAX));
}

Test(engine_attention_place, rates_follow_what_is_measured)
{
    cr_expect_eq(kvk_attention_rate_after(0, GB, KVK_NS_PER_SECOND), GB);
    cr_expect_eq(kvk_attention_rate_after(GB, 2 * GB, KVK_NS_PER_SECOND), GB + GB / 4);
    cr_expect_eq(kvk_attention_rate_after(GB, 1000, 1), GB, "too little to say anything");
    cr_expect_eq(kvk_attention_rate_after(GB, GB, 0), GB);
}

/* ---- The engine ---- */

static void set_rates(struct house *house, uint64_t host_rate)
{
    house->cache->attention.host_rate = host_rate;
    house->cache->attention.device_rate = 1000 * GB;
}

/* The mover learns its rate from large jobs. */
static void measure_link(struct house *house)
{
    const uint64_t size_bytes = UINT64_C(16) << 20;
    uint8_t *memory = calloc(2, size_bytes);
    const struct kvk_copy copy = {
        .target = memory, .source = memory + size_bytes, .size_bytes = size_bytes};

    cr_assert_not_null(memory);
    cr_assert_eq(kvk_mover_copy(house->cache->mover, house->cache->tiers[KVK_TIER_HOST].device,
                                &copy, 1, &house->error),
                 KVK_OK);
    cr_assert_gt(kvk_mover_rate(house->cache->mover), 0);
    free(memory);
}

static void expect_why(struct house *house, const char *words)
{
    struct kvk_tier_report tiers[KVK_TIER_COUNT];
    struct kvk_refusal refusals[1];
    uint32_t count;
    char advice[1024];

    cr_expect_eq(kvk_report_why(house->cache, &house->caller, (struct kvk_view){NULL, 0}, 0,
                                refusals, 1, &count, tiers, advice, sizeof(advice), &house->error),
                 KVK_OK);
    cr_expect_not_null(strstr(advice, words), "%s", advice);
}

/* A device tier that counts as a GPU's, though it is memory of the CPU, so that what was brought
 * in can be attended here. */
Test(engine_attention_place, the_engine_follows, .timeout = 60)
{
    struct house house;
    uint32_t tokens[64];
    struct kvk_geometry geometry = house_geometry();
    struct ask ask;

    house_init(&house);
    house.config.device_kind = KVK_DEVICE_CUDA;
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20, .host_bytes = 1 << 20});
    geometry.layers = 3;
    uint64_t space_id = house_space_of(&house, &house.caller, "model", &geometry, 1);
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 64, 5);
    (void)sequence_make(&house, session_id, space_id, tokens, 24); /* what stays on the device */
    uint64_t id = sequence_make(&house, session_id, space_id, tokens, 50);
    uint64_t fork = sequence_make(&house, session_id, space_id, tokens, 50);
    swap_out(&house, session_id, fork);
    swap_out(&house, session_id, id);

    ask_init(&ask, session_id, &geometry, 4);
    (void)ask_add(&ask, id, tokens, 50, 49, 2);
    (void)ask_add(&ask, fork, tokens, 50, 47, 1);
    ask_right(&house, &ask, "not measured yet");
    cr_expect_eq(ask.request.choice.place, KVK_ATTENTION_IN_PLACE);
    expect_why(&house, "not yet measured");
    measure_link(&house);
    for (uint32_t layer = 0; layer < 3; layer++) {
        ask.request.layer = layer;
        set_rates(&house, 1);
        ask_right(&house, &ask, "brought in");
        cr_expect_gt(ask.items[0].host_tokens, 0);
        cr_expect_gt(ask.items[0].device_tokens, 0);
        cr_expect_eq(ask.request.choice.place, KVK_ATTENTION_BROUGHT_IN);
    }
    cr_expect_eq(house.cache->stats.attended_brought_in, 3);
    expect_why(&house, "brought to the device");

    set_rates(&house, 1000 * GB);
    ask_right(&house, &ask, "in place");
    cr_expect_eq(ask.request.choice.place, KVK_ATTENTION_IN_PLACE);
    cr_expect_eq(house.cache->stats.attended_in_place, 2);
    expect_why(&house, "attended by the CPU");

    set_rates(&house, 1);
    kvk_mover_test_fail_next(house.cache->mover);
    ask_right(&house, &ask, "in place after all");
    cr_expect_eq(ask.request.choice.place, KVK_ATTENTION_IN_PLACE);
    cr_expect_eq(house.cache->stats.attended_in_place, 3);
    ask_finish(&ask);
    house_stop(&house);
}

/* ---- Its workspace ---- */

/* The device's own operations, counted; or none at all, so that sizes cost nothing. */
static struct {
    const struct kvk_device_ops *own;
    struct kvk_device_ops ops;
    uint32_t allocs, frees;
    bool refuses;
} counted;

static enum kvk_status alloc_counted(struct kvk_device *device, uint64_t size_bytes,
                                     uint64_t piece_bytes, const char *name,
                                     struct kvk_region *region, struct kvk_error *error)
{
    counted.allocs++;
    return counted.own->alloc(device, size_bytes, piece_bytes, name, region, error);
}

static void free_counted(struct kvk_device *device, struct kvk_region *region)
{
    counted.frees++;
    counted.own->free(device, region);
}

static enum kvk_status alloc_nothing(struct kvk_device *device, uint64_t size_bytes,
                                     uint64_t piece_bytes, const char *name,
                                     struct kvk_region *region, struct kvk_error *error)
{
    (void)device;
    (void)piece_bytes;
    (void)name;
    if (counted.refuses) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "the device is full");
    }
    counted.allocs++;
    region->size_bytes = size_bytes;
    return KVK_OK;
}

static enum kvk_status back_nothing(struct kvk_device *device, struct kvk_region *region,
                                    uint64_t offset, uint64_t size_bytes, struct kvk_error *error)
{
    (void)device;
    (void)region;
    (void)offset;
    (void)size_bytes;
    (void)error;
    return KVK_OK;
}

static void free_nothing(struct kvk_device *device, struct kvk_region *region)
{
    (void)device;
    counted.frees++;
    region->size_bytes = 0;
}

static void count_begin(struct house *house)
{
    struct kvk_device *device = house->cache->tiers[KVK_TIER_DEVICE].device;
    memset(&counted, 0, sizeof(counted));
    counted.own = device->ops;
    counted.ops = *device->ops;
    counted.ops.alloc = alloc_counted;
    counted.ops.free = free_counted;
    device->ops = &counted.ops;
}

static void count_end(struct house *house)
{
    house->cache->tiers[KVK_TIER_DEVICE].device->ops = counted.own;
}

static uint64_t workspace_bytes(struct house *house)
{
    kvk_lock(&house->cache->lock);
    uint64_t bytes = kvk_cache_workspace_bytes(house->cache);
    kvk_unlock(&house->cache->lock);
    return bytes;
}

static void pass(struct house *house, uint64_t seconds)
{
    uint64_t now = kvk_clock_now(&house->manual.clock);
    kvk_clock_manual_set(&house->manual, now + seconds * KVK_NS_PER_SECOND);
    kvk_cache_maintain(house->cache);
}

Test(engine_attention_place, what_is_brought_in_has_its_memory_from_call_to_call, .timeout = 60)
{
    struct house house;
    uint32_t tokens[50];
    const struct kvk_geometry geometry = house_geometry();
    struct ask ask;

    house_init(&house);
    house.config.device_kind = KVK_DEVICE_CUDA;
    house_start(&house, &(struct house_options){
                            .device_bytes = 1 << 20, .host_bytes = 1 << 20, .manual_clock = true});
    uint64_t space_id = house_space_of(&house, &house.caller, "model", &geometry, 1);
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 50, 5);
    uint64_t id = sequence_make(&house, session_id, space_id, tokens, 50);
    swap_out(&house, session_id, id);
    measure_link(&house);
    ask_init(&ask, session_id, &geometry, 4);
    (void)ask_add(&ask, id, tokens, 50, 49, 2);
    count_begin(&house);
    for (uint32_t i = 0; i < 6; i++) {
        ask.request.layer = i % 2;
        set_rates(&house, 1);
        ask_right(&house, &ask, "brought in");
        cr_expect_eq(ask.request.choice.place, KVK_ATTENTION_BROUGHT_IN);
    }
    cr_expect_eq(counted.allocs, 1);
    cr_expect_eq(counted.frees, 0);
    cr_expect_eq(workspace_bytes(&house), UINT64_C(2) << 20);
    pass(&house, 9);
    cr_expect_eq(counted.frees, 0, "it may be wanted again");
    pass(&house, 2);
    cr_expect_eq(counted.frees, 1);
    cr_expect_eq(workspace_bytes(&house), 0);
    set_rates(&house, 1);
    ask_right(&house, &ask, "anew");
    cr_expect_eq(counted.allocs, 2);
    kvk_mover_test_fail_next(house.cache->mover);
    set_rates(&house, 1);
    ask_right(&house, &ask, "in place after all");
    cr_expect_eq(ask.request.choice.place, KVK_ATTENTION_IN_PLACE);
    set_rates(&house, 1);
    ask_right(&house, &ask, "brought in again");
    cr_expect_eq(ask.request.choice.place, KVK_ATTENTION_BROUGHT_IN);
    cr_expect_eq(counted.allocs, 2, "a call that fails gives it back");
    count_end(&house);
    ask_finish(&ask);
    house_stop(&house); /* with all of the device's memory given back */
}

static enum kvk_status take(struct house *house, uint64_t mebibytes, struct kvk_workspace **taken)
{
    return kvk_workspace_take_unlocked(house->cache, mebibytes << 20, taken, &house->error);
}

Test(engine_attention_place, workspaces_are_bounded_all_together)
{
    struct house house;
    struct kvk_workspace *a;
    struct kvk_workspace *b;
    struct kvk_workspace *c;

    house_init(&house);
    house.config.device_kind = KVK_DEVICE_CUDA;
    house_start(&house, &(struct house_options){
                            .device_bytes = 1 << 20, .host_bytes = 1 << 20, .manual_clock = true});
    count_begin(&house);
    counted.ops.alloc = alloc_nothing;
    counted.ops.back = back_nothing;
    counted.ops.free = free_nothing;
    cr_expect_eq(take(&house, 257, &a), KVK_EXHAUSTED);
    cr_assert_eq(take(&house, 100, &a), KVK_OK);
    cr_assert_eq(take(&house, 100, &b), KVK_OK);
    cr_expect_neq(a, b, "each call has its own");
    cr_expect_eq(workspace_bytes(&house), UINT64_C(256) << 20);
    cr_expect_eq(take(&house, 1, &c), KVK_EXHAUSTED, "all of it is in use");
    kvk_workspace_give_unlocked(house.cache, a);
    cr_assert_eq(take(&house, 1, &c), KVK_OK);
    cr_expect_eq(c, a, "what is there is used");
    cr_expect_eq(counted.allocs, 2);
    kvk_workspace_give_unlocked(house.cache, b);
    kvk_workspace_give_unlocked(house.cache, c);
    cr_assert_eq(take(&house, 200, &a), KVK_OK, "what stands idle makes room");
    cr_expect_eq(counted.frees, 2);
    cr_expect_eq(workspace_bytes(&house), UINT64_C(256) << 20);
    kvk_workspace_give_unlocked(house.cache, a);
    pass(&house, 11);
    cr_expect_eq(workspace_bytes(&house), 0);
    counted.refuses = true;
    cr_expect_eq(take(&house, 1, &a), KVK_EXHAUSTED);
    cr_expect_eq(workspace_bytes(&house), 0, "what could not be had does not count");
    counted.refuses = false;
    cr_assert_eq(take(&house, 1, &a), KVK_OK);
    kvk_workspace_give_unlocked(house.cache, a);
    pass(&house, 11);
    cr_expect_eq(counted.allocs, counted.frees);
    count_end(&house);
    house_stop(&house);
}

Test(engine_attention_place, one_memory_leaves_no_choice)
{
    struct house house;
    uint32_t tokens[20];
    struct kvk_geometry geometry = house_geometry();
    struct ask ask;

    house_init(&house);
    house_start(&house, &(struct house_options){.device_bytes = 1 << 20, .host_bytes = 1 << 20});
    uint64_t space_id = house_space(&house, "model");
    uint64_t session_id = house_session(&house);
    house_tokens(tokens, 20, 5);
    uint64_t id = sequence_make(&house, session_id, space_id, tokens, 20);
    swap_out(&house, session_id, id);
    ask_init(&ask, session_id, &geometry, 2);
    (void)ask_add(&ask, id, tokens, 20, 19, 1);
    set_rates(&house, 1);
    ask_right(&house, &ask, "where it lies");
    cr_expect_eq(ask.request.choice.place, KVK_ATTENTION_NO_CHOICE);
    cr_expect_eq(house.cache->stats.attended_in_place, 0);
    ask_finish(&ask);
    house_stop(&house);
}
