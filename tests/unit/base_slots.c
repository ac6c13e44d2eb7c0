/* Slots against a model that keeps one byte a slot and does everything the slow way. */
#include "base/slots.h"

#include <criterion/criterion.h>
#include <time.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/random.h"

/* ---- The model ---- */

enum cell {
    CELL_ABSENT = 0,
    CELL_FREE,
    CELL_USED,
};

struct model {
    struct kvk_arena arena;
    uint8_t *cells; /* [slot capacity] */
    uint32_t *used; /* [used_count], in any order */
    uint32_t used_count;
};

struct world {
    struct kvk_pool pool;
    struct model models[3];
    struct kvk_arena *arenas[3];
    uint32_t model_count;
    bool filling; /* a spell of taking, or of giving, so that full and empty both happen */
};

static void world_init(struct world *world, uint64_t limit, const uint64_t *slot_bytes,
                       uint32_t count)
{
    memset(world, 0, sizeof(*world));
    kvk_pool_init(&world->pool, limit);
    world->model_count = count;
    for (uint32_t i = 0; i < count; i++) {
        struct model *model = &world->models[i];
        cr_assert_eq(kvk_arena_init(&model->arena, &world->pool, slot_bytes[i]), KVK_OK);
        size_t capacity = kvk_arena_slot_capacity(&model->arena);
        model->cells = calloc(capacity + 1, 1);
        model->used = calloc(capacity + 1, sizeof(*model->used));
        world->arenas[i] = &model->arena;
    }
}

static void world_finish(struct world *world)
{
    for (uint32_t i = 0; i < world->model_count; i++) {
        kvk_arena_finish(&world->models[i].arena);
        free(world->models[i].cells);
        free(world->models[i].used);
    }
    cr_assert_eq(world->pool.slab_bytes, 0);
}

static uint32_t model_count(const struct model *model, enum cell cell)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < kvk_arena_slot_capacity(&model->arena); i++) {
        count += model->cells[i] == cell ? 1 : 0;
    }
    return count;
}

static bool model_take(struct model *model)
{
    uint32_t slot = kvk_arena_take(&model->arena);
    if (slot == KVK_SLOT_NONE) {
        cr_assert_eq(model_count(model, CELL_FREE), 0, "a free slot was not found");
        return false;
    }
    cr_assert_lt(slot, kvk_arena_slot_capacity(&model->arena));
    cr_assert_eq(model->cells[slot], CELL_FREE, "slot %u was not free", slot);
    model->cells[slot] = CELL_USED;
    model->used[model->used_count++] = slot;
    return true;
}

static void model_give(struct model *model, struct kvk_random *random)
{
    if (model->used_count == 0) {
        return;
    }
    uint32_t i = (uint32_t)kvk_random_below(random, model->used_count);
    uint32_t slot = model->used[i];
    model->used[i] = model->used[--model->used_count];
    kvk_arena_give(&model->arena, slot);
    model->cells[slot] = CELL_FREE;
}

static void model_grow(struct world *world, struct model *model)
{
    struct kvk_arena *arena = &model->arena;
    uint64_t fitting = kvk_pool_free_bytes(&world->pool) / arena->slot_bytes;
    uint32_t place = kvk_arena_next_place(arena);
    uint32_t slab = kvk_arena_grow(arena);
    cr_assert_eq(slab, fitting == 0 ? KVK_SLAB_NONE : place);
    if (slab == KVK_SLAB_NONE) {
        cr_assert(fitting == 0 || arena->slab_count == arena->slab_capacity);
        return;
    }
    uint32_t count = fitting < arena->slab_slots ? (uint32_t)fitting : arena->slab_slots;
    cr_assert_eq(arena->slabs[slab].slot_count, count);
    for (uint32_t i = 0; i < arena->slab_slots; i++) {
        uint8_t *cell = &model->cells[arena->slabs[slab].first_slot + i];
        cr_assert_eq(*cell, CELL_ABSENT);
        *cell = i < count ? CELL_FREE : CELL_ABSENT;
    }
}

static void model_shrink(struct model *model)
{
    struct kvk_arena *arena = &model->arena;
    uint32_t slab = kvk_arena_empty_slab(arena);
    if (slab == KVK_SLAB_NONE) {
        for (uint32_t i = 0; i < arena->slab_capacity; i++) {
            const struct kvk_slab *other = &arena->slabs[i];
            cr_assert(other->slot_count == 0 || other->used_count > 0, "%u is empty", i);
        }
        return;
    }
    uint32_t first = arena->slabs[slab].first_slot;
    for (uint32_t i = 0; i < arena->slab_slots; i++) {
        cr_assert_neq(model->cells[first + i], CELL_USED);
        model->cells[first + i] = CELL_ABSENT;
    }
    kvk_arena_shrink(arena, slab);
}

static void world_check(const struct world *world)
{
    kvk_pool_check(&world->pool, world->arenas, world->model_count);
    for (uint32_t i = 0; i < world->model_count; i++) {
        const struct model *model = &world->models[i];
        uint32_t capacity = kvk_arena_slot_capacity(&model->arena);
        for (uint32_t slot = 0; slot < capacity; slot++) {
            cr_assert_eq(kvk_arena_is_used(&model->arena, slot), model->cells[slot] == CELL_USED);
        }
        cr_assert_eq(model->arena.used_count, model->used_count);
        cr_assert_eq(model->arena.slot_count - model->used_count, model_count(model, CELL_FREE));
    }
}

static void world_step(struct world *world, struct kvk_random *random)
{
    uint64_t which = kvk_random_below(random, world->model_count);
    struct model *model = &world->models[which];
    uint64_t dice = kvk_random_below(random, 100);
    if (dice < 60) {
        bool taking = world->filling != kvk_random_chance(random, 0.25);
        if (!taking) {
            model_give(model, random);
        } else if (!model_take(model)) {
            model_grow(world, model);
        }
    } else if (dice < 70) {
        (void)model_take(model);
    } else if (dice < 90) {
        model_shrink(model);
    } else if (dice < 97) {
        model_grow(world, model);
    } else {
        world->pool.charge_bytes = kvk_random_below(random, world->pool.limit_bytes / 4);
        world->filling = !world->filling;
    }
}

static void run(uint64_t seed, uint64_t limit, const uint64_t *slot_bytes, uint32_t count,
                uint32_t used_first)
{
    struct kvk_random random;
    struct world world;
    kvk_random_init(&random, seed);
    world_init(&world, limit, slot_bytes, count);
    while (world.models[0].used_count < used_first) {
        if (!model_take(&world.models[0])) {
            model_grow(&world, &world.models[0]);
        }
    }
    for (uint32_t i = 0; i < 20000; i++) {
        world_step(&world, &random);
        if (i % (limit > 500000 ? 2048 : 128) == 0) {
            world_check(&world);
        }
    }
    world_check(&world);
    world_finish(&world);
}

Test(base_slots, random_operations_agree_with_the_model)
{
    static const uint64_t sizes[3] = {100, 64, 4097};
    for (uint64_t seed = 0; seed < 4; seed++) {
        run(seed, 100000, sizes, 3, 0);
        run(seed, 70001, sizes, 1, 0);
        run(seed, 700, sizes, 2, 0); /* slabs of one slot, and nearly no room */
    }
    static const uint64_t tiny[1] = {1};
    run(9, 640000, tiny, 1, 35000); /* slabs of 10,000 slots: several summary words */
}

/* ---- Single promises ---- */

/* A lone space fills the pool to less than one slot, whatever the sizes. */
Test(base_slots, a_lone_arena_fills_the_pool)
{
    for (uint64_t slot_bytes = 1; slot_bytes < 3000; slot_bytes += 37) {
        struct kvk_pool pool;
        struct kvk_arena arena;
        kvk_pool_init(&pool, 54321);
        cr_assert_eq(kvk_arena_init(&arena, &pool, slot_bytes), KVK_OK);
        while (kvk_arena_grow(&arena) != KVK_SLAB_NONE) {
        }
        cr_assert_eq(arena.slot_count, 54321 / slot_bytes);
        uint32_t taken = 0;
        while (kvk_arena_take(&arena) != KVK_SLOT_NONE) {
            taken++;
        }
        cr_assert_eq(taken, 54321 / slot_bytes);
        kvk_arena_finish(&arena);
    }
}

Test(base_slots, a_pool_of_nothing_gives_nothing)
{
    struct kvk_pool pool;
    struct kvk_arena arena;
    kvk_pool_init(&pool, 0);
    cr_assert_eq(kvk_arena_init(&arena, &pool, 4096), KVK_OK);
    cr_assert_eq(kvk_arena_slot_capacity(&arena), 0);
    cr_assert_eq(kvk_arena_grow(&arena), KVK_SLAB_NONE);
    cr_assert_eq(kvk_arena_take(&arena), KVK_SLOT_NONE);
    cr_assert_eq(kvk_arena_empty_slab(&arena), KVK_SLAB_NONE);
    cr_assert_not(kvk_arena_is_used(&arena, 0));
    kvk_arena_finish(&arena);
}

Test(base_slots, slab_sizes)
{
    struct kvk_pool pool;
    struct kvk_arena arena;
    kvk_pool_init(&pool, UINT64_C(1) << 30);
    cr_assert_eq(kvk_arena_init(&arena, &pool, 1 << 20), KVK_OK);
    cr_assert_eq(arena.slab_slots, 16); /* pool / 64 */
    kvk_arena_finish(&arena);
    kvk_pool_init(&pool, UINT64_C(1) << 40);
    cr_assert_eq(kvk_arena_init(&arena, &pool, 1 << 20), KVK_OK);
    cr_assert_eq(arena.slab_slots, 32); /* at most 32 MiB */
    kvk_arena_finish(&arena);
    cr_assert_eq(kvk_arena_init(&arena, &pool, UINT64_C(1) << 28), KVK_OK);
    cr_assert_eq(arena.slab_slots, 1);
    cr_assert_eq(kvk_arena_slot_capacity(&arena), 4096);
    kvk_arena_finish(&arena);
}

/* Places for all of so many slots, and no more, however scarce the budget was meanwhile. */
Test(base_slots, an_arena_for_so_many_slots)
{
    struct kvk_pool pool;
    struct kvk_arena arena;
    struct kvk_arena other;
    kvk_pool_init(&pool, 1000 * 100);
    cr_assert_eq(kvk_arena_init(&other, &pool, 100), KVK_OK);
    cr_assert_eq(kvk_arena_init_for(&arena, &pool, 70, 37), KVK_OK);
    cr_assert_eq(kvk_arena_slot_capacity(&arena), 37);
    while (kvk_pool_free_bytes(&pool) >= 100) {
        cr_assert_neq(kvk_arena_grow(&other), KVK_SLAB_NONE);
    }
    uint32_t taken = 0;
    while (taken < 37) {
        uint32_t slot = kvk_arena_take(&arena);
        if (slot != KVK_SLOT_NONE) {
            cr_assert_lt(slot, 37);
            taken++;
        } else if (kvk_arena_grow(&arena) == KVK_SLAB_NONE) {
            kvk_arena_shrink(&other, kvk_arena_empty_slab(&other));
        }
    }
    cr_assert_eq(arena.slot_count, 37);
    cr_assert_eq(kvk_arena_grow(&arena), KVK_SLAB_NONE, "no place for one more");
    struct kvk_arena *const both[] = {&arena, &other};
    kvk_pool_check(&pool, both, 2);
    kvk_arena_finish(&arena);
    kvk_arena_finish(&other);
    cr_assert_eq(pool.slab_bytes, 0);
}

/* Half-full slabs fill up before an empty one is touched. */
Test(base_slots, fuller_slabs_come_first)
{
    struct kvk_pool pool;
    struct kvk_arena arena;
    kvk_pool_init(&pool, 64 * 100 * 10);
    cr_assert_eq(kvk_arena_init(&arena, &pool, 10), KVK_OK);
    cr_assert_eq(arena.slab_slots, 100);
    for (int i = 0; i < 3; i++) {
        cr_assert_neq(kvk_arena_grow(&arena), KVK_SLAB_NONE);
    }
    uint32_t slots[150];
    for (int i = 0; i < 150; i++) {
        slots[i] = kvk_arena_take(&arena);
    }
    cr_assert_neq(kvk_arena_empty_slab(&arena), KVK_SLAB_NONE);
    for (int i = 0; i < 90; i++) {
        kvk_arena_give(&arena, slots[i]); /* the first slab has 10 left, the second 50 */
    }
    for (int i = 0; i < 50; i++) {
        uint32_t slot = kvk_arena_take(&arena);
        cr_assert_eq(kvk_arena_slab_of(&arena, slot), kvk_arena_slab_of(&arena, slots[149]));
    }
    cr_assert_neq(kvk_arena_empty_slab(&arena), KVK_SLAB_NONE);
    kvk_arena_finish(&arena);
}

Test(base_slots, strays_count_against_the_pool)
{
    struct kvk_pool pool;
    struct kvk_arena arena;
    kvk_pool_init(&pool, 1000);
    cr_assert_eq(kvk_arena_init(&arena, &pool, 100), KVK_OK);
    pool.charge_bytes = 901;
    cr_assert_eq(kvk_pool_free_bytes(&pool), 99);
    cr_assert_eq(kvk_arena_grow(&arena), KVK_SLAB_NONE);
    pool.charge_bytes = 5000;
    cr_assert_eq(kvk_pool_free_bytes(&pool), 0);
    pool.charge_bytes = 900;
    cr_assert_neq(kvk_arena_grow(&arena), KVK_SLAB_NONE);
    cr_assert_eq(kvk_pool_free_bytes(&pool), 0);
    kvk_arena_finish(&arena);
}

/* ---- What outlived the process ---- */

/* Slots of an arena as they were left: [0, capacity), used or not. */
static uint32_t leave_some(struct kvk_random *random, struct kvk_arena *arena, bool *used)
{
    uint32_t slot;
    while ((slot = kvk_arena_take(arena)) != KVK_SLOT_NONE ||
           kvk_arena_grow(arena) != KVK_SLAB_NONE) {
    }
    uint32_t count = 0;
    uint32_t capacity = kvk_arena_slot_capacity(arena);
    for (uint32_t i = 0; i < capacity; i++) {
        used[i] = kvk_arena_is_used(arena, i);
        if (used[i] && kvk_random_below(random, 2) == 0) {
            kvk_arena_give(arena, i);
            used[i] = false;
        }
        count += used[i] ? 1 : 0;
    }
    return count;
}

Test(base_slots, taken_slots_are_put_back_in_any_order)
{
    struct kvk_random random;
    kvk_random_init(&random, 7);
    for (uint32_t round = 0; round < 200; round++) {
        uint64_t slot_bytes = 1 + kvk_random_below(&random, 50);
        struct kvk_pool pools[2];
        struct kvk_arena before;
        struct kvk_arena arena;
        uint64_t limit = slot_bytes * (1 + kvk_random_below(&random, 20000));
        kvk_pool_init(&pools[0], limit);
        kvk_pool_init(&pools[1], limit);
        cr_assert_eq(kvk_arena_init(&before, &pools[0], slot_bytes), KVK_OK);
        cr_assert_eq(kvk_arena_init(&arena, &pools[1], slot_bytes), KVK_OK);
        uint32_t capacity = kvk_arena_slot_capacity(&before);
        bool *used = calloc(capacity, sizeof(*used));
        uint32_t *order = calloc(capacity, sizeof(*order));
        uint32_t count = leave_some(&random, &before, used);
        uint32_t filled = 0;
        for (uint32_t i = 0; i < capacity; i++) {
            if (used[i]) {
                uint32_t at = (uint32_t)kvk_random_below(&random, filled + 1);
                order[filled++] = order[at];
                order[at] = i;
            }
        }
        struct kvk_arena *arenas[1] = {&arena};
        for (uint32_t i = 0; i < count; i++) {
            cr_assert_eq(kvk_arena_take_at(&arena, order[i]), KVK_OK);
            cr_assert_eq(kvk_arena_take_at(&arena, order[i]), KVK_EXISTS);
        }
        kvk_pool_check(&pools[1], arenas, 1);
        kvk_arena_fill_out(&arena);
        kvk_pool_check(&pools[1], arenas, 1);
        for (uint32_t i = 0; i < capacity; i++) {
            cr_assert_eq(kvk_arena_is_used(&arena, i), used[i]);
        }
        uint32_t total = count; /* and the rest can be had as ever */
        while (kvk_arena_take(&arena) != KVK_SLOT_NONE || kvk_arena_grow(&arena) != KVK_SLAB_NONE) {
        }
        kvk_pool_check(&pools[1], arenas, 1);
        cr_assert_geq(arena.used_count, total);
        cr_assert_lt(kvk_pool_free_bytes(&pools[1]), slot_bytes, "nothing is out of reach");
        free(used);
        free(order);
        kvk_arena_finish(&before);
        kvk_arena_finish(&arena);
    }
}

Test(base_slots, a_slot_is_not_put_back_where_it_cannot_be)
{
    struct kvk_pool pool;
    struct kvk_arena arena;
    kvk_pool_init(&pool, 100 * 64);
    cr_assert_eq(kvk_arena_init(&arena, &pool, 100), KVK_OK);
    cr_assert_eq(kvk_arena_take_at(&arena, kvk_arena_slot_capacity(&arena)), KVK_INVALID);
    cr_assert_eq(kvk_arena_take_at(&arena, UINT32_MAX), KVK_INVALID);
    pool.charge_bytes = 100 * 62;
    cr_assert_eq(kvk_arena_take_at(&arena, 63), KVK_OK);
    cr_assert_eq(kvk_arena_take_at(&arena, 5), KVK_OK);
    cr_assert_eq(kvk_arena_take_at(&arena, 6), KVK_EXHAUSTED, "the budget is never passed");
    struct kvk_arena *arenas[1] = {&arena};
    kvk_pool_check(&pool, arenas, 1);
    kvk_arena_give(&arena, 63);
    kvk_arena_shrink(&arena, kvk_arena_slab_of(&arena, 63));
    cr_assert_eq(kvk_arena_take_at(&arena, 63), KVK_OK, "a place that was given back");
    kvk_pool_check(&pool, arenas, 1);
    kvk_arena_finish(&arena);
}

/* ---- Bugs of the caller abort ---- */

static struct kvk_pool bug_pool;
static struct kvk_arena bug_arena;

static void bug_init(void)
{
    kvk_pool_init(&bug_pool, 6400);
    cr_assert_eq(kvk_arena_init(&bug_arena, &bug_pool, 10), KVK_OK);
    cr_assert_neq(kvk_arena_grow(&bug_arena), KVK_SLAB_NONE);
}

Test(base_slots, giving_twice_aborts, .init = bug_init, .signal = SIGABRT)
{
    uint32_t slot = kvk_arena_take(&bug_arena);
    kvk_arena_give(&bug_arena, slot);
    kvk_arena_give(&bug_arena, slot);
}

Test(base_slots, giving_past_the_end_aborts, .init = bug_init, .signal = SIGABRT)
{
    kvk_arena_give(&bug_arena, KVK_SLOT_NONE);
}

Test(base_slots, giving_where_no_slab_is_aborts, .init = bug_init, .signal = SIGABRT)
{
    kvk_arena_give(&bug_arena, kvk_arena_slot_capacity(&bug_arena) - 1);
}

Test(base_slots, shrinking_a_used_slab_aborts, .init = bug_init, .signal = SIGABRT)
{
    uint32_t slot = kvk_arena_take(&bug_arena);
    kvk_arena_shrink(&bug_arena, kvk_arena_slab_of(&bug_arena, slot));
}

Test(base_slots, the_check_sees_a_lost_slot, .init = bug_init, .signal = SIGABRT)
{
    struct kvk_arena *arenas[] = {&bug_arena};
    kvk_pool_check(&bug_pool, arenas, 1);
    bug_arena.free_bits[0] &= ~UINT64_C(1);
    kvk_pool_check(&bug_pool, arenas, 1);
}

/* ---- Size ---- */

/*
 * Ten million slots: what is empty costs nothing, and the cost of a step does not grow with the
 * pool. The bound is a hundred times what it takes, of this thread's own time, to fail for a scan
 * and not for a busy machine.
 */
static uint64_t own_ns(void)
{
    struct timespec time;
    cr_assert_eq(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time), 0);
    return (uint64_t)time.tv_sec * KVK_NS_PER_SECOND + (uint64_t)time.tv_nsec;
}

Test(base_slots, ten_million_slots)
{
    struct kvk_pool pool;
    struct kvk_arena arena;
    const uint32_t count = 10000000;
    kvk_pool_init(&pool, (uint64_t)count * 65536);
    uint64_t begin = own_ns();
    cr_assert_eq(kvk_arena_init(&arena, &pool, 65536), KVK_OK);
    cr_assert_lt(own_ns() - begin, 100 * KVK_NS_PER_MS);

    begin = own_ns();
    for (uint32_t i = 0; i < count; i++) {
        if (kvk_arena_take(&arena) == KVK_SLOT_NONE) {
            cr_assert_neq(kvk_arena_grow(&arena), KVK_SLAB_NONE);
            cr_assert_neq(kvk_arena_take(&arena), KVK_SLOT_NONE);
        }
    }
    cr_assert_eq(arena.used_count, count);
    cr_assert_eq(kvk_arena_take(&arena), KVK_SLOT_NONE);
    struct kvk_random random;
    kvk_random_init(&random, 1);
    for (uint32_t i = 0; i < 1000000; i++) {
        uint32_t slot = (uint32_t)kvk_random_below(&random, count);
        kvk_arena_give(&arena, slot);
        cr_assert_eq(kvk_arena_take(&arena), slot);
    }
    uint64_t spent = own_ns() - begin;
    cr_assert_lt(spent, 60 * KVK_NS_PER_SECOND);
    kvk_arena_finish(&arena);
}
