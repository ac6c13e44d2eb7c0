/* Eviction: the order of queues, what a use changes, what ghosts remember, what is learned. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/random.h"
#include "index/evict.h"
#include "index/ghosts.h"
#include "index/learn.h"
#include "tests/index_chain.h"

#define SECOND KVK_NS_PER_SECOND

static struct kvk_hasher hasher;
static struct kvk_index *blocks;
static struct kvk_evict *evict;
static struct kvk_evict_queue queue;
static uint32_t root;

static bool cost_lists; /* for the next begin() */

static void begin(enum kvk_evict_policy policy, uint32_t capacity)
{
    static const uint8_t secret[KVK_SECRET_SIZE] = {42};
    kvk_hasher_init(&hasher, secret);
    blocks = chain_index(4 * capacity, 16);
    root = chain_root(blocks, &hasher, "m", 1);
    const struct kvk_evict_options options = {
        .policy = policy,
        .ghost_count = 4 * capacity,
        .block_count = capacity,
        .cost_lists = cost_lists,
    };
    enum kvk_status status = kvk_evict_create(blocks, &options, &evict);
    cr_assert_eq(status, KVK_OK);
    kvk_evict_queue_init(&queue, evict, KVK_TIER_DEVICE, true, 1);
    status = kvk_evict_queue_reserve(&queue, 4 * capacity);
    cr_assert_eq(status, KVK_OK);
}

static void end(void)
{
    while (kvk_evict_queue_count(&queue) > 0) {
        kvk_evict_queue_remove(&queue, kvk_evict_queue_peek(&queue, 0, NULL));
    }
    kvk_evict_queue_finish(&queue);
    kvk_evict_destroy(evict);
    kvk_index_destroy(blocks);
}

/* A block of one token under the root, admitted. */
static uint32_t block_new(uint32_t token, float cost, bool windowed, uint64_t stamp,
                          uint64_t now_ns)
{
    struct kvk_content content = {.tokens = &token, .token_count = 1};
    uint32_t id = KVK_BLOCK_NONE;
    cr_assert_eq(chain_add_all(blocks, root, 1, &content, &id), 1);
    kvk_evict_admit(evict, kvk_index_block(blocks, id), cost, windowed, stamp, now_ns);
    return id;
}

static void block_drop(uint32_t id)
{
    struct kvk_block *block = kvk_index_block(blocks, id);
    if (block->queue != NULL) {
        kvk_evict_queue_remove(&queue, id);
    }
    kvk_evict_forget(evict, block);
    chain_evict(blocks, id);
}

static uint32_t pop(uint64_t now_ns)
{
    uint32_t id = kvk_evict_queue_peek(&queue, now_ns, NULL);
    if (id != KVK_BLOCK_NONE) {
        kvk_evict_queue_remove(&queue, id);
    }
    return id;
}

/* ---- Queues ---- */

Test(index_evict, older_requests_first_and_deeper_blocks_first)
{
    begin(KVK_EVICT_LRU, 100);
    uint32_t tokens[10];
    uint32_t ids[10];
    for (uint32_t i = 0; i < 10; i++) {
        tokens[i] = i;
    }
    struct kvk_content content = {.tokens = tokens, .token_count = 10};
    chain_add_all(blocks, root, 1, &content, ids);
    for (uint32_t i = 0; i < 10; i++) {
        uint64_t stamp = i < 5 ? 2 : 1;
        kvk_evict_admit(evict, kvk_index_block(blocks, ids[i]), 1, false, stamp, stamp * SECOND);
        kvk_evict_queue_add(&queue, ids[i]);
    }
    cr_assert_eq(kvk_evict_queue_count(&queue), 10);
    for (uint32_t i = 10; i-- > 0;) {
        cr_assert_eq(pop(0), ids[i]);
    }
    cr_assert_eq(pop(0), KVK_BLOCK_NONE);
    end();
}

/* Under a window nothing sees the oldest positions again. */
Test(index_evict, windowed_blocks_go_oldest_position_first)
{
    begin(KVK_EVICT_LRU, 100);
    uint32_t tokens[10] = {0};
    uint32_t ids[10];
    struct kvk_content content = {.tokens = tokens, .token_count = 10};
    chain_add_all(blocks, root, 1, &content, ids);
    for (uint32_t i = 0; i < 10; i++) {
        kvk_evict_admit(evict, kvk_index_block(blocks, ids[i]), 1, true, i < 5 ? 2 : 1, SECOND);
        kvk_evict_queue_add(&queue, ids[i]);
    }
    for (uint32_t i = 0; i < 10; i++) {
        cr_assert_eq(pop(0), ids[i < 5 ? i + 5 : i - 5]);
    }
    end();
}

Test(index_evict, a_use_moves_a_block_to_the_end_in_or_out_of_the_queue)
{
    begin(KVK_EVICT_LRU, 100);
    uint32_t ids[4];
    for (uint32_t i = 0; i < 4; i++) {
        ids[i] = block_new(i, 1, false, i + 1, 0);
        if (i != 1) {
            kvk_evict_queue_add(&queue, ids[i]);
        }
    }
    kvk_evict_use(evict, kvk_index_block(blocks, ids[0]), false, 9, SECOND);
    kvk_evict_use(evict, kvk_index_block(blocks, ids[1]), false, 8, SECOND);
    kvk_evict_queue_add(&queue, ids[1]);
    double score;
    cr_assert_eq(kvk_evict_queue_peek(&queue, SECOND, &score), ids[2]);
    cr_assert_eq(score, kvk_evict_score(&queue, kvk_index_block(blocks, ids[2]), SECOND));
    cr_assert_lt(score, kvk_evict_score(&queue, kvk_index_block(blocks, ids[3]), SECOND));
    static const uint32_t order[4] = {2, 3, 1, 0};
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert_eq(pop(SECOND), ids[order[i]]);
    }
    end();
}

Test(index_evict, one_request_uses_a_block_once)
{
    begin(KVK_EVICT_RP_COST, 100);
    uint32_t id = block_new(1, 1, false, 5, 0);
    struct kvk_block *block = kvk_index_block(blocks, id);
    kvk_evict_use(evict, block, false, 5, SECOND);
    cr_assert_eq(block->use_count, 1);
    cr_assert_eq(block->used_ns, 0);
    kvk_evict_use(evict, block, false, 6, SECOND);
    cr_assert_eq(block->use_count, 2);
    cr_assert_eq(block->used_ns, SECOND);
    end();
}

/* A request that runs long does not make a block older that a later one has used meanwhile. */
Test(index_evict, a_late_use_does_not_set_a_block_back)
{
    begin(KVK_EVICT_LRU, 100);
    uint32_t id = block_new(1, 1, false, 5, 0);
    struct kvk_block *block = kvk_index_block(blocks, id);
    kvk_evict_use(evict, block, false, 9, SECOND);
    uint64_t order = block->order;
    kvk_evict_use(evict, block, false, 6, SECOND);
    cr_assert_eq(block->order, order);
    cr_assert_eq(block->use_count, 3);
    end();
}

Test(index_evict, use_counts_saturate)
{
    begin(KVK_EVICT_RP_COST, 100);
    uint32_t id = block_new(1, 1, false, 1, 0);
    struct kvk_block *block = kvk_index_block(blocks, id);
    for (uint64_t stamp = 2; stamp < 70000; stamp++) {
        kvk_evict_use(evict, block, false, stamp, stamp);
    }
    cr_assert_eq(block->use_count, UINT16_MAX);
    cr_assert_eq(block->queue_class / KVK_EVICT_COST_COUNT, 3);
    end();
}

/* Take all out by turns, from the top: each class must come in order. Put all in again. */
static void drain_and_refill(uint64_t now_ns)
{
    uint32_t count = kvk_evict_queue_count(&queue);
    uint32_t *drained = calloc(count + 1, sizeof(*drained));
    uint64_t orders[KVK_EVICT_LIST_COUNT] = {0};
    for (uint32_t i = 0; i < count; i++) {
        drained[i] = pop(now_ns);
        const struct kvk_block *block = kvk_index_block(blocks, drained[i]);
        cr_assert_leq(orders[block->queue_class], block->order);
        orders[block->queue_class] = block->order;
    }
    cr_assert_eq(pop(now_ns), KVK_BLOCK_NONE);
    for (uint32_t i = 0; i < count; i++) {
        kvk_evict_queue_add(&queue, drained[i]);
    }
    free(drained);
}

/* Random adds, removes and uses against a plain list that is searched for its least. */
Test(index_evict, queues_against_a_plain_list)
{
    /* Both policies, and at last the second one with cost lists. */
    for (int policy = KVK_EVICT_LRU; policy <= KVK_EVICT_RP_COST + 1; policy++) {
        cost_lists = policy > KVK_EVICT_RP_COST;
        begin(policy == KVK_EVICT_LRU ? KVK_EVICT_LRU : KVK_EVICT_RP_COST, 2000);
        struct kvk_random random;
        kvk_random_init(&random, 5);
        enum { COUNT = 1500 };
        static uint32_t ids[COUNT];
        for (uint32_t i = 0; i < COUNT; i++) {
            float cost = (float)kvk_random_between(&random, 1, 50);
            uint64_t stamp = kvk_random_between(&random, 1, 100000);
            ids[i] = block_new(i, cost, false, stamp, i * SECOND / 100);
        }
        uint64_t now_ns = COUNT * SECOND / 100;
        for (uint64_t step = 0; step < 60000; step++) {
            now_ns += kvk_random_below(&random, SECOND / 10);
            uint32_t id = ids[kvk_random_below(&random, COUNT)];
            struct kvk_block *block = kvk_index_block(blocks, id);
            if (kvk_random_chance(&random, 0.3)) {
                uint64_t stamp = kvk_random_between(&random, 1, 100000 + step);
                kvk_evict_use(evict, block, false, stamp, now_ns);
            } else if (block->queue == NULL) {
                kvk_evict_queue_add(&queue, id);
            } else if (kvk_random_chance(&random, 0.3)) {
                kvk_evict_queue_remove(&queue, id);
            }
            if (step % 500 == 0) {
                drain_and_refill(now_ns);
            }
            if (step % 20 > 0) {
                continue;
            }
            double score;
            uint32_t victim = kvk_evict_queue_peek(&queue, now_ns, &score);
            uint32_t queued = 0;
            for (uint32_t i = 0; i < COUNT; i++) {
                const struct kvk_block *other = kvk_index_block(blocks, ids[i]);
                if (other->queue == NULL) {
                    continue;
                }
                queued++;
                const struct kvk_block *chosen = kvk_index_block(blocks, victim);
                if (other->queue_class == chosen->queue_class) {
                    cr_assert_leq(chosen->order, other->order, "the oldest of its class");
                }
                if (policy == KVK_EVICT_LRU) {
                    cr_assert_leq(score, kvk_evict_score(&queue, other, now_ns));
                }
            }
            cr_assert_eq(kvk_evict_queue_count(&queue), queued);
        }
        end();
    }
}

Test(index_evict, a_queue_has_room_for_all_in_any_class)
{
    cost_lists = true;
    begin(KVK_EVICT_RP_COST, 1000);
    static uint32_t ids[4000];
    for (uint32_t i = 0; i < 4000; i++) {
        ids[i] = block_new(i, (float)(1 + i % 30), false, 1, 0);
        kvk_evict_queue_add(&queue, ids[i]);
    }
    /* All move to the second class, to the third, to the last, without asking for more. */
    for (uint64_t stamp = 2; stamp < 7; stamp++) {
        for (uint32_t i = 0; i < 4000; i++) {
            kvk_evict_use(evict, kvk_index_block(blocks, ids[i]), false, stamp, 0);
        }
    }
    cr_assert_eq(kvk_evict_queue_count(&queue), 4000);
    end();
}

Test(index_evict, in_one_queue_at_most, .signal = SIGABRT)
{
    begin(KVK_EVICT_LRU, 10);
    uint32_t id = block_new(1, 1, false, 1, 0);
    kvk_evict_queue_add(&queue, id);
    kvk_evict_queue_add(&queue, id);
}

/* ---- RP-cost ---- */

Test(index_evict, the_cheaper_of_two_classes_goes_first)
{
    begin(KVK_EVICT_RP_COST, 10);
    uint32_t once = block_new(1, 100, false, 1, 0);
    uint32_t twice = block_new(2, 1, false, 1, 0);
    kvk_evict_use(evict, kvk_index_block(blocks, twice), false, 2, 0);
    kvk_evict_queue_add(&queue, once);
    kvk_evict_queue_add(&queue, twice);
    /* Nothing is known yet of either class: the cost decides. */
    cr_assert_eq(kvk_evict_queue_peek(&queue, SECOND / 2, NULL), twice);
    double cheap = kvk_evict_score(&queue, kvk_index_block(blocks, twice), 0);
    double dear = kvk_evict_score(&queue, kvk_index_block(blocks, once), 0);
    cr_assert_float_eq(dear / cheap, 10, 1e-9, "the root of 100");
    /* Where a copy stays below, what it cost to compute does not matter. */
    queue.weigh_cost = false;
    cr_assert_eq(kvk_evict_score(&queue, kvk_index_block(blocks, once), 0),
                 kvk_evict_score(&queue, kvk_index_block(blocks, twice), 0));
    cr_assert_eq(kvk_evict_queue_peek(&queue, SECOND / 2, NULL), once);
    queue.weight = 3;
    cr_assert_float_eq(kvk_evict_score(&queue, kvk_index_block(blocks, once), 0), 3 * cheap, 1e-9);
    end();
}

/* With cost lists a cheap block goes before an older dear one of its class. */
Test(index_evict, cost_lists_find_what_is_cheap)
{
    for (int lists = 0; lists < 2; lists++) {
        cost_lists = lists > 0;
        begin(KVK_EVICT_RP_COST, 10);
        uint32_t dear = block_new(1, 8.5F, false, 1, 0);
        uint32_t cheap = block_new(2, 1, false, 2, SECOND / 10);
        kvk_evict_queue_add(&queue, dear);
        kvk_evict_queue_add(&queue, cheap);
        cr_assert_eq(kvk_evict_queue_peek(&queue, SECOND / 5, NULL), cost_lists ? cheap : dear);
        end();
    }
    begin(KVK_EVICT_RP_COST, 10);
    static const float costs[] = {0.5F, 1, 1.4F, 1.42F, 2.01F, 11.2F, 11.4F, 1000};
    static const uint8_t classes[] = {0, 0, 0, 1, 2, 6, 7, 7};
    for (uint32_t i = 0; i < 8; i++) {
        uint32_t id = block_new(i, costs[i], false, 1, 0);
        cr_assert_eq(kvk_index_block(blocks, id)->queue_class, classes[i], "cost %f", costs[i]);
    }
    end();
}

/* Blocks that come back every minute are kept over those used once, though these are younger. */
Test(index_evict, it_learns_which_class_comes_back)
{
    begin(KVK_EVICT_RP_COST, 100);
    uint64_t stamp = 1;
    uint32_t regular[10];
    for (uint32_t i = 0; i < 10; i++) {
        regular[i] = block_new(i, 1, false, stamp, 0);
    }
    uint32_t token = 1000;
    uint64_t now_ns = 0;
    uint32_t last = KVK_BLOCK_NONE;
    for (uint32_t minute = 1; minute < 60; minute++) {
        now_ns = minute * 60 * SECOND;
        stamp++;
        for (uint32_t i = 0; i < 10; i++) {
            kvk_evict_use(evict, kvk_index_block(blocks, regular[i]), false, stamp, now_ns);
        }
        for (uint32_t i = 0; i < 5; i++) {
            last = block_new(token++, 1, false, stamp, now_ns + i);
        }
    }
    kvk_evict_queue_add(&queue, regular[0]);
    kvk_evict_queue_add(&queue, last);
    now_ns += 50 * SECOND;
    kvk_evict_use(evict, kvk_index_block(blocks, last), false, stamp, now_ns);
    cr_assert_eq(kvk_evict_queue_peek(&queue, now_ns, NULL), last);
    end();
}

Test(index_evict, an_evicted_block_that_comes_back_is_not_new)
{
    begin(KVK_EVICT_RP_COST, 100);
    uint32_t id = block_new(1, 1, false, 1, 0);
    kvk_evict_use(evict, kvk_index_block(blocks, id), false, 2, SECOND);
    block_drop(id);
    id = block_new(1, 1, false, 3, 5 * SECOND);
    cr_assert_eq(kvk_index_block(blocks, id)->use_count, 3);
    cr_assert_eq(kvk_index_block(blocks, id)->queue_class / KVK_EVICT_COST_COUNT, 2);
    id = block_new(2, 1, false, 3, 5 * SECOND);
    cr_assert_eq(kvk_index_block(blocks, id)->use_count, 1);
    end();
}

Test(index_evict, lru_keeps_no_ghosts)
{
    begin(KVK_EVICT_LRU, 100);
    uint32_t id = block_new(1, 1, false, 1, 0);
    block_drop(id);
    id = block_new(1, 1, false, 3, 5 * SECOND);
    cr_assert_eq(kvk_index_block(blocks, id)->use_count, 1);
    cr_assert_lt(kvk_evict_bytes(evict), 16384);
    cr_assert_eq(kvk_evict_resize(evict, 1000000, 250000), KVK_OK);
    cr_assert_lt(kvk_evict_bytes(evict), 16384);
    end();
}

/* ---- The learner ---- */

Test(index_evict, before_anything_is_known_the_older_is_worth_less)
{
    struct kvk_learn learn;
    kvk_learn_init(&learn);
    kvk_learn_refresh(&learn, 1000);
    double before = kvk_learn_density(&learn, 0, 0);
    for (double age = 1; age < 1e6; age *= 2) {
        double density = kvk_learn_density(&learn, 0, age);
        cr_assert_leq(density, before);
        before = density;
    }
}

/* The same by hand: 100 of 1,000 come back in one bucket, 300 in the next one. */
Test(index_evict, the_density_is_hits_per_second_of_residence)
{
    struct kvk_learn learn;
    kvk_learn_init(&learn);
    for (int i = 0; i < 1000; i++) {
        kvk_learn_enter(&learn, 2);
        if (i < 400) {
            kvk_learn_reuse(&learn, 2, i < 100 ? 100 : 130);
        }
    }
    kvk_learn_refresh(&learn, 0);
    const double edges[3] = {97.00586, 128, 168.89701}; /* 0.5 x 2^(19, 20, 21 / 2.5) */
    double first = 100 / ((edges[1] - edges[0]) * (1000 + 900) / 2);
    double second = 300 / ((edges[2] - edges[1]) * (900 + 600) / 2);
    cr_assert_gt(second, first);
    cr_assert_float_eq(kvk_learn_density(&learn, 2, 130), second, 1e-5);
    cr_assert_float_eq(kvk_learn_density(&learn, 2, 100), second, 1e-5, "the best ahead");
    cr_assert_lt(kvk_learn_density(&learn, 2, 170), 1e-8);
}

/* All of a class come back after 100 s: a block is worth its room until then, and nothing after. */
Test(index_evict, the_density_sees_a_reuse_ahead)
{
    struct kvk_learn learn;
    kvk_learn_init(&learn);
    for (int i = 0; i < 1000; i++) {
        kvk_learn_enter(&learn, 1);
        kvk_learn_reuse(&learn, 1, 100);
    }
    kvk_learn_refresh(&learn, 0);
    double fresh = kvk_learn_density(&learn, 1, 0);
    double later = kvk_learn_density(&learn, 1, 80);
    cr_assert_geq(fresh, 0.0099, "one hit in a hundred seconds");
    cr_assert_lt(kvk_learn_density(&learn, 1, 200), fresh / 1000);
    cr_assert_geq(fresh, later, "within a class the older is never worth more");
}

Test(index_evict, what_was_learned_fades)
{
    struct kvk_learn learn;
    kvk_learn_init(&learn);
    for (int i = 0; i < 1000; i++) {
        kvk_learn_enter(&learn, 0);
        kvk_learn_reuse(&learn, 0, 10);
    }
    for (int i = 0; i < 1386; i++) {
        kvk_learn_refresh(&learn, 0);
    }
    cr_assert_float_eq(learn.entered[0], 500, 1);
}

/* A class with a few counts is taken to be like all; with many, like itself. */
Test(index_evict, a_new_class_borrows_from_all)
{
    struct kvk_learn learn;
    kvk_learn_init(&learn);
    for (int i = 0; i < 10000; i++) {
        kvk_learn_enter(&learn, 0);
        kvk_learn_reuse(&learn, 0, 10);
    }
    kvk_learn_enter(&learn, 1);
    kvk_learn_refresh(&learn, 10000);
    double all = kvk_learn_density(&learn, 0, 1);
    cr_assert_gt(kvk_learn_density(&learn, 1, 1), all / 2);
    for (int i = 0; i < 100000; i++) {
        kvk_learn_enter(&learn, 1);
    }
    kvk_learn_refresh(&learn, 10000);
    cr_assert_lt(kvk_learn_density(&learn, 1, 1), all / 50);
}

/* ---- Ghosts ---- */

static struct kvk_key key_of(uint64_t number)
{
    struct kvk_random random;
    kvk_random_init(&random, number);
    struct kvk_key key = {.low = kvk_random_next(&random)};
    key.high = kvk_random_next(&random);
    return key;
}

static bool ghost_take(struct kvk_ghosts *ghosts, uint64_t number, uint32_t *use_count)
{
    uint64_t age_ns;
    return kvk_ghosts_take(ghosts, key_of(number), 0, &age_ns, use_count);
}

Test(index_evict, ghosts_are_found_once_with_what_was_known)
{
    struct kvk_ghosts ghosts;
    enum kvk_status status = kvk_ghosts_init(&ghosts, 1000);
    cr_assert_eq(status, KVK_OK);
    for (uint64_t i = 0; i < 1000; i++) {
        kvk_ghosts_add(&ghosts, key_of(i), i * SECOND, (uint32_t)(1 + i % 20));
    }
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t age_ns;
        uint32_t use_count;
        cr_assert(kvk_ghosts_take(&ghosts, key_of(i), 2000 * SECOND, &age_ns, &use_count));
        cr_assert_float_eq((double)age_ns / SECOND, (double)(2000 - i), 0.07);
        cr_assert_eq(use_count, 1 + i % 20 < 7 ? 1 + i % 20 : 7);
        cr_assert_not(kvk_ghosts_take(&ghosts, key_of(i), 2000 * SECOND, &age_ns, &use_count));
    }
    cr_assert_eq(kvk_ghosts_bytes(&ghosts), 16000, "16 bytes a ghost");
    kvk_ghosts_finish(&ghosts);
}

Test(index_evict, the_oldest_ghosts_go_first)
{
    struct kvk_ghosts ghosts;
    enum kvk_status status = kvk_ghosts_init(&ghosts, 100);
    cr_assert_eq(status, KVK_OK);
    uint32_t use_count;
    for (uint64_t i = 0; i < 1234; i++) {
        kvk_ghosts_add(&ghosts, key_of(i), 0, 1);
    }
    for (uint64_t i = 0; i < 1234; i++) {
        cr_assert_eq(ghost_take(&ghosts, i, &use_count), i >= 1134, "ghost %lu", i);
    }
    /* Evicted twice, it counts as evicted late. */
    for (uint64_t i = 0; i < 100; i++) {
        kvk_ghosts_add(&ghosts, key_of(i), 0, 1);
    }
    kvk_ghosts_add(&ghosts, key_of(0), 0, 2);
    for (uint64_t i = 0; i < 99; i++) {
        kvk_ghosts_add(&ghosts, key_of(1000 + i), 0, 1);
    }
    cr_assert(ghost_take(&ghosts, 0, &use_count));
    cr_assert_eq(use_count, 2);
    kvk_ghosts_finish(&ghosts);
}

/* However often and whatever the size changes, the newest that fit stay known. */
Test(index_evict, ghosts_outlive_a_change_of_size)
{
    static const uint32_t sizes[] = {100, 300, 50, 80, 0, 40};
    struct kvk_ghosts ghosts;
    enum kvk_status status = kvk_ghosts_init(&ghosts, sizes[0]);
    cr_assert_eq(status, KVK_OK);
    uint32_t use_count;
    for (size_t s = 1; s < sizeof(sizes) / sizeof(sizes[0]); s++) {
        for (uint64_t after = 0; after <= sizes[s] + 20; after += 10) {
            kvk_ghosts_finish(&ghosts);
            status = kvk_ghosts_init(&ghosts, sizes[s - 1]);
            cr_assert_eq(status, KVK_OK);
            for (uint64_t i = 0; i < 250; i++) {
                kvk_ghosts_add(&ghosts, key_of(i), 0, 1);
            }
            status = kvk_ghosts_resize(&ghosts, sizes[s]);
            cr_assert_eq(status, KVK_OK);
            for (uint64_t i = 0; i < after; i++) {
                kvk_ghosts_add(&ghosts, key_of(1000 + i), 0, 1);
            }
            uint64_t fits = sizes[s] > after ? sizes[s] - after : 0;
            fits = fits < sizes[s - 1] ? fits : sizes[s - 1];
            for (uint64_t i = 0; i < 250; i++) {
                cr_assert_eq(ghost_take(&ghosts, i, &use_count), 250 - i <= fits,
                             "%u to %u, %lu later: ghost %lu", sizes[s - 1], sizes[s], after, i);
            }
            for (uint64_t i = 0; i < after; i++) {
                cr_assert_eq(ghost_take(&ghosts, 1000 + i, &use_count), after - i <= sizes[s]);
            }
        }
    }
    kvk_ghosts_finish(&ghosts);
}
