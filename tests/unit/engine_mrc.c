/* The miss-ratio curve of the engine against exact reuse distances of the same requests. */
#include "daemon/mrc.h"

#include <math.h>

#include "daemon/sequence.h"
#include "tests/engine_trio.h"

#define BLOCK_BYTES 1024 /* of house_geometry() */
#define THINGS 200000
#define USES 400000

/* ---- Exactly: the stack of blocks, by name, in the order that the engine uses them ---- */

struct exact {
    uint32_t *sums; /* [USES + 1] */
    uint32_t *places;
    uint32_t *distances; /* [count] blocks, itself included; 0: the first time */
    uint32_t uses, count;
};

static void exact_add(struct exact *exact, uint32_t place, uint32_t value)
{
    for (uint32_t i = place; i <= USES; i += i & (0 - i)) {
        exact->sums[i] += value;
    }
}

static uint32_t exact_sum(const struct exact *exact, uint32_t place)
{
    uint32_t sum = 0;
    for (uint32_t i = place; i > 0; i -= i & (0 - i)) {
        sum += exact->sums[i];
    }
    return sum;
}

static void exact_refer(struct exact *exact, uint32_t thing, bool asked)
{
    uint32_t before = exact->places[thing];
    uint32_t now = ++exact->uses;
    uint32_t distance = 0;
    cr_assert(now < USES && thing < THINGS);
    if (before != 0) {
        distance = exact_sum(exact, now - 1) - exact_sum(exact, before) + 1;
        exact_add(exact, before, (uint32_t)-1);
    }
    exact_add(exact, now, 1);
    exact->places[thing] = now;
    if (asked) {
        exact->distances[exact->count++] = distance;
    }
}

static double exact_ratio(const struct exact *exact, uint64_t blocks)
{
    uint32_t hits = 0;
    for (uint32_t i = 0; i < exact->count; i++) {
        hits += exact->distances[i] != 0 && exact->distances[i] <= blocks ? 1 : 0;
    }
    return (double)hits / exact->count;
}

/* ---- Requests: conversations that go on turn by turn, behind a few system prompts ---- */

#define CONVERSATIONS 3000
#define SYSTEM_BLOCKS 6

struct world {
    struct house *house;
    struct exact exact;
    struct kvk_random random;
    uint64_t session, space;
    uint32_t lengths[CONVERSATIONS]; /* blocks */
};

/* Block `index` of a conversation, as a number of its own. */
static uint32_t thing_of(uint32_t conversation, uint32_t index)
{
    return index < SYSTEM_BLOCKS ? conversation % 3 * SYSTEM_BLOCKS + index
                                 : 100 + conversation * 60 + index;
}

static void tokens_of(uint32_t conversation, uint32_t blocks, uint32_t *tokens)
{
    for (uint32_t i = 0; i < 4 * blocks; i++) {
        tokens[i] = thing_of(conversation, i / 4) * 4 + i % 4;
    }
}

/* One turn: all that was said and `more` blocks, then `generated` blocks nobody asked for. */
static void turn(struct world *world, uint32_t conversation, uint32_t more, uint32_t generated)
{
    struct house *house = world->house;
    uint32_t tokens[4 * 64];
    uint32_t asked = world->lengths[conversation] + more;
    uint32_t blocks = asked + generated;
    tokens_of(conversation, blocks, tokens);
    struct kvk_sequence_reply reply =
        house_open(house, world->session, world->space, tokens, 4 * asked);
    house_seal(house, world->session, reply.sequence_id, 4 * asked);
    uint32_t cached = (uint32_t)reply.cached_tokens / 4;
    for (uint32_t i = cached; i > 0; i--) {
        exact_refer(&world->exact, thing_of(conversation, i - 1), true);
    }
    for (uint32_t i = asked; i > cached; i--) {
        exact_refer(&world->exact, thing_of(conversation, i - 1), true);
    }
    if (generated > 0) {
        struct kvk_tables tables = {.part_count = 0};
        const struct kvk_append_request request = {.session_id = world->session,
                                                   .sequence_id = reply.sequence_id,
                                                   .expected_length = 4 * asked,
                                                   .tokens = tokens + 4 * asked,
                                                   .token_count = 4 * generated};
        cr_assert_eq(kvk_sequence_append(house->cache, &house->caller, &request, &reply, &tables,
                                         &house->error),
                     KVK_OK);
        kvk_tables_finish(&tables);
        house_seal(house, world->session, reply.sequence_id, 4 * blocks);
        for (uint32_t i = blocks; i > asked; i--) {
            exact_refer(&world->exact, thing_of(conversation, i - 1), false);
        }
    }
    house_close(house, world->session, reply.sequence_id);
    world->lengths[conversation] = blocks;
}

static void world_start(struct world *world, struct house *house)
{
    memset(world, 0, sizeof(*world));
    world->house = house;
    world->exact.sums = calloc(USES + 1, sizeof(uint32_t));
    world->exact.places = calloc(THINGS, sizeof(uint32_t));
    world->exact.distances = calloc(USES, sizeof(uint32_t));
    world->session = house_session(house);
    world->space = house_space(house, "model");
    kvk_random_init(&world->random, 7);
}

static void world_run(struct world *world, uint32_t turns)
{
    for (uint32_t i = 0; i < turns; i++) {
        double u = (double)(kvk_random_next(&world->random) >> 11) * 0x1p-53;
        uint32_t conversation = (uint32_t)(CONVERSATIONS * u * u);
        if (world->lengths[conversation] > 40) {
            world->lengths[conversation] = 0; /* from the start again */
        }
        uint32_t more = 1 + (uint32_t)kvk_random_below(&world->random, 8);
        turn(world, conversation, more, (uint32_t)kvk_random_below(&world->random, 3));
    }
}

static void world_finish(struct world *world)
{
    free(world->exact.sums);
    free(world->exact.places);
    free(world->exact.distances);
}

static struct kvk_mrc_report ask(struct house *house, const struct kvk_caller *caller)
{
    struct kvk_mrc_report *rows = NULL;
    uint32_t count = 0;
    cr_assert_eq(
        kvk_report_mrc(house->cache, caller, house_view("a"), &rows, &count, &house->error), KVK_OK,
        "%s", house->error.text);
    cr_assert_eq(count, 1);
    struct kvk_mrc_report report = rows[0];
    free(rows);
    return report;
}

static void near(const char *what, double found, double expected, double within)
{
    cr_expect(fabs(found - expected) <= within, "%s: %.4f, exactly %.4f", what, found, expected);
}

Test(engine_mrc, the_curve_is_that_of_lru)
{
    struct trio trio;
    struct world world;
    trio_start(&trio, &(struct house_options){.host_bytes = 4000 * BLOCK_BYTES});
    struct house *house = &trio.house;
    world_start(&world, house);
    world_run(&world, 12000);
    struct kvk_mrc_report report = ask(house, &trio.a);
    const struct exact *exact = &world.exact;
    cr_expect_str_eq(report.tenant->name, "a");
    cr_expect_eq(report.pool_bytes, 4000 * BLOCK_BYTES);
    cr_expect_eq(report.now_bytes, 4000 * BLOCK_BYTES, "it is full");
    cr_expect_eq((uint64_t)report.references, exact->count);
    near("what the cache had", report.hits, exact_ratio(exact, 4000), 0.005);
    near("now", report.now.hits, exact_ratio(exact, 4000), 0.02);
    near("twice", report.twice.hits, exact_ratio(exact, 8000), 0.02);
    near("four times", report.four_times.hits, exact_ratio(exact, 16000), 0.02);
    near("pool", report.pool.hits, exact_ratio(exact, 4000), 0.02);
    near("ceiling", report.ceiling.hits, exact_ratio(exact, THINGS), 0.02);
    cr_assert_eq(report.point_count, KVK_MRC_POINTS);
    double sum = 0;
    for (uint32_t i = 0; i < report.point_count; i++) {
        const struct kvk_mrc_point *point = &report.points[i];
        sum += fabs(point->hits - exact_ratio(exact, point->size_bytes / BLOCK_BYTES));
        cr_expect(i == 0 || point->size_bytes > report.points[i - 1].size_bytes);
        cr_expect(i == 0 || point->hits >= report.points[i - 1].hits);
        cr_expect_lt(point->error, 0.1);
    }
    cr_expect_leq(sum / report.point_count, 0.02, "mean absolute error %.4f",
                  sum / report.point_count);
    cr_expect_leq(report.samples, 8192);
    world_finish(&world);
    house_stop(house);
}

/* A Lookup holds nothing and is no reference; a refused open is none; a fork is none. */
Test(engine_mrc, a_request_is_counted_once)
{
    struct trio trio;
    uint32_t tokens[80];
    struct kvk_sequence_reply reply;
    trio_start(&trio, &(struct house_options){.host_bytes = 16 * BLOCK_BYTES});
    struct house *house = &trio.house;
    uint64_t session = house_session(house);
    uint64_t space = house_space(house, "model");
    house_tokens(tokens, 80, 1);
    for (int i = 0; i < 50; i++) {
        (void)house_cached(house, space, tokens, 32);
        cr_assert_eq(house_try_open(house, session, space, tokens, 80, &reply), KVK_EXHAUSTED);
    }
    cr_expect_eq((uint64_t)ask(house, &trio.a).references, 0);
    uint64_t id = house_open(house, session, space, tokens, 34).sequence_id;
    cr_expect_eq((uint64_t)ask(house, &trio.a).references, 0, "not yet cached, and not sealed");
    house_seal(house, session, id, 34);
    cr_expect_eq((uint64_t)ask(house, &trio.a).references, 8);
    cr_expect_float_eq(ask(house, &trio.a).hits, 0, 0);
    house_close(house, session, id);
    id = house_open(house, session, space, tokens, 34).sequence_id;
    cr_expect_eq((uint64_t)ask(house, &trio.a).references, 16);
    cr_expect_float_eq(ask(house, &trio.a).hits, 0.5, 1e-9);
    house_close(house, session, id);
    /* Without a look-up nothing was asked for. */
    struct kvk_tables tables = {.part_count = 0};
    const struct kvk_open_request request = {.session_id = session,
                                             .space_id = space,
                                             .prompt = {.tokens = tokens, .token_count = 8},
                                             .tier = -1,
                                             .no_lookup = true};
    cr_assert_eq(
        kvk_sequence_open(house->cache, &house->caller, &request, &reply, &tables, &house->error),
        KVK_OK);
    kvk_tables_finish(&tables);
    house_seal(house, session, reply.sequence_id, 8);
    cr_expect_eq((uint64_t)ask(house, &trio.a).references, 16);
    house_close(house, session, reply.sequence_id);
    house_stop(house);
}

Test(engine_mrc, whose_it_is)
{
    struct trio trio;
    struct kvk_mrc_report *rows = NULL;
    uint32_t count = 0;
    trio_start(&trio, &(struct house_options){.host_bytes = 16 * BLOCK_BYTES});
    struct house *house = &trio.house;
    (void)house_space(house, "model");
    (void)house_space(house, "another of a");
    house->caller = trio.b;
    (void)house_space(house, "model");
    cr_assert_eq(kvk_report_mrc(house->cache, &trio.admin, everybody, &rows, &count, &house->error),
                 KVK_OK);
    cr_expect_eq(count, 2);
    free(rows);
    cr_assert_eq(kvk_report_mrc(house->cache, &trio.b, everybody, &rows, &count, &house->error),
                 KVK_OK);
    cr_assert_eq(count, 1);
    cr_expect_str_eq(rows[0].tenant->name, "b");
    cr_expect_eq(rows[0].point_count, 0, "of nothing nothing is drawn");
    cr_expect_float_eq(rows[0].ceiling.error, 1, 0);
    free(rows);
    cr_expect_eq(
        kvk_report_mrc(house->cache, &trio.b, house_view("a"), &rows, &count, &house->error),
        KVK_PERMISSION);
    cr_expect_eq(
        kvk_report_mrc(house->cache, &trio.admin, house_view("zzz"), &rows, &count, &house->error),
        KVK_NOT_FOUND);
    /* A tenant that is forgotten leaves its place to the next. */
    kvk_lock(&house->cache->lock);
    cr_expect_eq(house->cache->mrcs.count, 2);
    cr_expect_gt(kvk_mrcs_bytes(&house->cache->mrcs), 100000);
    kvk_mrc_end(house->cache, trio.b.credential->tenants[0]);
    kvk_mrc_end(house->cache, trio.b.credential->tenants[0]);
    cr_expect_eq(house->cache->mrcs.count, 1);
    kvk_mrc_begin(house->cache, trio.b.credential->tenants[0]);
    cr_expect_eq(house->cache->mrcs.count, 2);
    kvk_unlock(&house->cache->lock);
    house_stop(house);
}

Test(engine_mrc, limits_of_the_configuration)
{
    struct house house;
    struct kvk_error error;
    house_init(&house);
    house.config.mrc_samples = 63;
    cr_expect_eq(kvk_config_check(&house.config, &error), KVK_INVALID);
    cr_expect_str_eq(error.field, "limits.mrc_samples");
    cr_expect_eq(error.limit, 64);
    house.config.mrc_samples = 64;
    cr_expect_eq(kvk_config_check(&house.config, &error), KVK_OK);
    house.config.mrc_samples = 0;
    cr_expect_eq(kvk_config_check(&house.config, &error), KVK_OK);
    struct kvk_mrc_report *rows = NULL;
    uint32_t count = 1;
    house_start(&house, &(struct house_options){.host_bytes = 16 * BLOCK_BYTES});
    (void)house_space(&house, "model");
    cr_assert_eq(kvk_report_mrc(house.cache, &house.caller, everybody, &rows, &count, &house.error),
                 KVK_OK);
    cr_expect_eq(count, 0);
    free(rows);
    house_stop(&house);
}

/* More than a hundredth of the time is not spent on it; and what is old counts less. */
Test(engine_mrc, it_keeps_to_its_budget_and_ages)
{
    struct trio trio;
    struct world world;
    trio_start(&trio,
               &(struct house_options){.host_bytes = 4000 * BLOCK_BYTES, .manual_clock = true});
    struct house *house = &trio.house;
    world_start(&world, house);
    kvk_cache_maintain(house->cache);
    world_run(&world, 1500);
    double rate = ask(house, &trio.a).rate;
    double references = ask(house, &trio.a).references;
    cr_expect_float_eq(rate, 0.125, 1e-9);
    uint64_t now_ns = kvk_clock_now(&house->manual.clock);
    kvk_clock_manual_set(&house->manual, now_ns + 10 * KVK_NS_PER_SECOND);
    kvk_cache_maintain(house->cache);
    cr_expect_float_eq(ask(house, &trio.a).rate, rate, 1e-9, "in ten seconds that is little");
    world_run(&world, 5000);
    kvk_clock_manual_set(&house->manual, now_ns + 10 * KVK_NS_PER_SECOND + 10 * KVK_NS_PER_MS);
    kvk_cache_maintain(house->cache);
    cr_expect_float_eq(ask(house, &trio.a).rate, rate / 2, 1e-9, "in ten milliseconds much: %g",
                       ask(house, &trio.a).rate);
    double both = ask(house, &trio.a).references;
    cr_expect_gt(both, references * 1.5);
    kvk_clock_manual_set(&house->manual, now_ns + UINT64_C(13) * 3600 * KVK_NS_PER_SECOND);
    kvk_cache_maintain(house->cache);
    cr_expect_float_eq(ask(house, &trio.a).references, both / 4, 1e-6 * both);
    world_finish(&world);
    house_stop(house);
}
