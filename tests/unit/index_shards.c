/* Sampled reuse distances against exact ones: on random references and on real traces. */
#include "index/shards.h"

#include <math.h>

#include "base/random.h"
#include "tests/index_trace.h"

/* ---- Exactly ---- */

/* Every reference of numbered things, each of its own size: a Fenwick tree over all of them. */
struct exact {
    uint64_t *sums;      /* [capacity + 1] bytes last used at this reference */
    uint64_t *places;    /* [thing_count] 1 + reference of the last use; 0: none */
    uint64_t *distances; /* [capacity] of each reference asked for; UINT64_MAX: first */
    uint64_t capacity, uses, count;
};

static void exact_init(struct exact *exact, uint64_t capacity, uint64_t thing_count)
{
    *exact = (struct exact){.capacity = capacity};
    exact->sums = calloc(capacity + 1, sizeof(uint64_t));
    exact->places = calloc(thing_count, sizeof(uint64_t));
    exact->distances = calloc(capacity, sizeof(uint64_t));
    cr_assert(exact->sums != NULL && exact->places != NULL && exact->distances != NULL);
}

static void exact_finish(struct exact *exact)
{
    free(exact->sums);
    free(exact->places);
    free(exact->distances);
}

static void exact_add(struct exact *exact, uint64_t place, uint64_t bytes)
{
    for (uint64_t i = place; i <= exact->capacity; i += i & (0 - i)) {
        exact->sums[i] += bytes;
    }
}

static uint64_t exact_sum(const struct exact *exact, uint64_t place)
{
    uint64_t sum = 0;
    for (uint64_t i = place; i > 0; i -= i & (0 - i)) {
        sum += exact->sums[i];
    }
    return sum;
}

static uint64_t exact_refer(struct exact *exact, uint64_t thing, uint64_t bytes, bool asked)
{
    uint64_t before = exact->places[thing];
    uint64_t now = ++exact->uses;
    uint64_t distance = UINT64_MAX;
    if (before != 0) {
        distance = exact_sum(exact, now - 1) - exact_sum(exact, before) + bytes;
        exact_add(exact, before, 0 - bytes);
    }
    exact_add(exact, now, bytes);
    exact->places[thing] = now;
    if (asked) {
        exact->distances[exact->count++] = distance;
    }
    return distance;
}

static double exact_ratio(const struct exact *exact, uint64_t size_bytes)
{
    uint64_t hits = 0;
    for (uint64_t i = 0; i < exact->count; i++) {
        hits += exact->distances[i] != UINT64_MAX && exact->distances[i] <= size_bytes;
    }
    return (double)hits / (double)exact->count;
}

/* ---- Both ---- */

struct both {
    struct exact exact;
    struct kvk_shards *shards;
    double rate_max;
    uint64_t cache_bytes; /* of the real cache, an LRU too */
};

/* As good as any hash of a thing's key. */
static struct kvk_key key_of(uint64_t thing)
{
    struct kvk_random random;
    kvk_random_init(&random, thing);
    uint64_t low = kvk_random_next(&random);
    return (struct kvk_key){.low = low, .high = kvk_random_next(&random)};
}

static void refer(struct both *both, uint64_t thing, uint64_t bytes, bool asked)
{
    bool known = exact_refer(&both->exact, thing, bytes, asked) <= both->cache_bytes;
    enum kvk_shards_kind kind = !asked ? KVK_SHARDS_PUT : known ? KVK_SHARDS_KNOWN : KVK_SHARDS_NEW;
    if (asked) {
        kvk_shards_count(both->shards, kind, 1);
    }
    struct kvk_key key = key_of(thing);
    uint32_t hash = (uint32_t)(key.high >> 40);
    bool offered = (double)(key.low >> 40) < both->rate_max * (double)(1 << 24);
    if (offered && hash < kvk_shards_threshold(both->shards)) {
        kvk_shards_refer(both->shards, key, hash, bytes, kind);
    }
}

/* Mean absolute error over sizes from a thousandth of the longest distance on, and the greatest. */
static double mean_error(const struct both *both, double *greatest)
{
    struct kvk_shards_stats stats;
    kvk_shards_stats(both->shards, &stats);
    uint64_t longest_bytes = kvk_shards_counts(both->shards)->longest_bytes;
    double sum = 0;
    uint32_t count = 0;
    *greatest = 0;
    for (double size = (double)longest_bytes / 1000; size < (double)longest_bytes * 1.2;
         size *= 1.2) {
        struct kvk_shards_ratio ratio =
            kvk_shards_ratio(kvk_shards_counts(both->shards), (uint64_t)size);
        double off = fabs(ratio.hits - exact_ratio(&both->exact, (uint64_t)size));
        *greatest = off > *greatest ? off : *greatest;
        sum += off;
        count++;
        if (getenv("KVK_TRACES_SHOW") != NULL) {
            printf("%14.0f %.4f %.4f +- %.4f\n", size, exact_ratio(&both->exact, (uint64_t)size),
                   ratio.hits, ratio.error);
        }
    }
    struct kvk_shards_ratio ceiling = kvk_shards_ratio(kvk_shards_counts(both->shards), UINT64_MAX);
    double off = fabs(ceiling.hits - exact_ratio(&both->exact, UINT64_MAX - 1));
    *greatest = off > *greatest ? off : *greatest;
    if (getenv("KVK_TRACES_SHOW") != NULL) {
        printf("ceiling %.4f %.4f, mean error %.4f, greatest %.4f, rate %.5f, samples %u\n",
               exact_ratio(&both->exact, UINT64_MAX - 1), ceiling.hits, sum / count, *greatest,
               stats.rate, stats.samples);
    }
    return (sum + off) / (count + 1);
}

static void both_init(struct both *both, uint32_t samples, double rate_max, uint64_t uses,
                      uint64_t things)
{
    both->rate_max = rate_max;
    both->cache_bytes = things * 4096 / 10;
    exact_init(&both->exact, uses, things);
    cr_assert_eq(kvk_shards_create(samples, rate_max, &both->shards), KVK_OK);
}

static void both_finish(struct both *both)
{
    exact_finish(&both->exact);
    kvk_shards_destroy(both->shards);
}

/* A few things often, many seldom. */
static uint64_t skewed(struct kvk_random *random, uint64_t things)
{
    double u = (double)(kvk_random_next(random) >> 11) * 0x1p-53;
    return (uint64_t)((double)things * u * u * u);
}

/* ---- Tests ---- */

Test(index_shards, with_every_thing_followed_it_is_exact)
{
    struct both both;
    struct kvk_random random;
    both_init(&both, 4096, 1, 100000, 3000);
    kvk_random_init(&random, 1);
    for (int i = 0; i < 100000; i++) {
        uint64_t thing = kvk_random_below(&random, 3000);
        refer(&both, thing, 1024 + 64 * (thing % 5), kvk_random_below(&random, 8) != 0);
    }
    struct kvk_shards_stats stats;
    kvk_shards_stats(both.shards, &stats);
    cr_expect_eq(stats.samples, 3000);
    cr_expect_float_eq(stats.rate, 1, 0);
    double greatest;
    /* But for the width of the buckets. */
    cr_expect_leq(mean_error(&both, &greatest), 0.002);
    cr_expect_leq(greatest, 0.01);
    cr_expect_float_eq(kvk_shards_ratio(kvk_shards_counts(both.shards), UINT64_MAX).hits,
                       exact_ratio(&both.exact, UINT64_MAX - 1), 1e-5);
    cr_expect_float_eq(kvk_shards_ratio(kvk_shards_counts(both.shards), 0).hits, 0, 0);
    both_finish(&both);
}

Test(index_shards, random_references)
{
    struct both both;
    struct kvk_random random;
    double greatest;
    both_init(&both, 4096, 0.125, 400000, 200000);
    kvk_random_init(&random, 2);
    for (int i = 0; i < 400000; i++) {
        refer(&both, skewed(&random, 200000), 4096, true);
    }
    cr_expect_leq(mean_error(&both, &greatest), 0.02);
    cr_expect_leq(greatest, 0.05);
    both_finish(&both);
    both_init(&both, 4096, 1, 400000, 100000);
    for (int i = 0; i < 400000; i++) {
        refer(&both, kvk_random_below(&random, 100000), 4096, true);
    }
    struct kvk_shards_stats stats;
    kvk_shards_stats(both.shards, &stats);
    cr_expect_leq(stats.samples, 4096);
    cr_expect_lt(stats.rate, 0.06);
    cr_expect_float_eq((double)stats.distinct_bytes / (100000.0 * 4096), 1, 0.1);
    cr_expect_leq(mean_error(&both, &greatest), 0.02);
    both_finish(&both);
}

/* A request's blocks as the engine uses them: what is known, deepest first, then what is new. */
static void replay(const char *name, uint32_t group, uint32_t samples, uint32_t request_max)
{
    struct trace trace;
    struct both both;
    double greatest;
    if (!trace_read(&trace, name, 512, group)) {
        skip_without_trace();
    }
    uint32_t things = 0;
    for (uint32_t i = 0; i < trace.id_count; i++) {
        things = trace.ids[i] >= things ? trace.ids[i] + 1 : things;
    }
    if (request_max > trace.request_count) {
        request_max = trace.request_count;
    }
    both_init(&both, samples, 0.125, trace.id_count, things);
    both.cache_bytes = (uint64_t)things << 20 >> 4;
    for (uint32_t r = 0; r < request_max; r++) {
        const struct request *request = &trace.requests[r];
        const uint32_t *ids = trace.ids + request->first;
        uint32_t known = 0;
        while (known < request->count && both.exact.places[ids[known]] != 0) {
            known++;
        }
        for (uint32_t i = known; i > 0; i--) {
            refer(&both, ids[i - 1], 1 << 20, true);
        }
        for (uint32_t i = request->count; i > known; i--) {
            refer(&both, ids[i - 1], 1 << 20, true);
        }
    }
    cr_expect_leq(mean_error(&both, &greatest), 0.02);
    cr_expect_leq(greatest, 0.04);
    both_finish(&both);
    trace_free(&trace);
}

Test(index_shards, conversation)
{
    replay("mooncake_conversation.jsonl.gz", 1, 8192, UINT32_MAX);
}

Test(index_shards, synthetic)
{
    replay("mooncake_synthetic.jsonl.gz", 1, 8192, UINT32_MAX);
}

Test(index_shards, agentic, .timeout = 300)
{
    replay("weka_agentic_8h.runs.jsonl.gz", 4, 8192, 8000);
}

Test(index_shards, halving_and_ageing)
{
    struct both both;
    struct kvk_random random;
    struct kvk_shards_stats stats;
    both_init(&both, 8192, 1, 400000, 4000);
    kvk_random_init(&random, 3);
    for (int i = 0; i < 200000; i++) {
        refer(&both, kvk_random_below(&random, 4000), 4096, true);
        if (i == 20000 || i == 40000) {
            kvk_shards_halve(both.shards);
        }
    }
    kvk_shards_stats(both.shards, &stats);
    cr_expect_float_eq(stats.rate, 0.25, 1e-9);
    cr_expect_float_eq((double)stats.samples / 1000, 1, 0.15);
    double greatest;
    cr_expect_leq(mean_error(&both, &greatest), 0.03);
    double before = kvk_shards_ratio(kvk_shards_counts(both.shards), 1000 * 4096).hits;
    kvk_shards_age(both.shards, 0.5);
    cr_expect_float_eq(kvk_shards_ratio(kvk_shards_counts(both.shards), 1000 * 4096).hits, before,
                       1e-4);
    kvk_shards_stats(both.shards, &stats);
    cr_expect_float_eq(kvk_shards_counts(both.shards)->references[KVK_SHARDS_KNOWN] +
                           kvk_shards_counts(both.shards)->references[KVK_SHARDS_NEW],
                       100000, 1);
    for (int i = 0; i < 64; i++) {
        kvk_shards_halve(both.shards);
    }
    kvk_shards_stats(both.shards, &stats);
    cr_expect_gt(stats.rate, 0, "never nothing at all");
    both_finish(&both);
}

Test(index_shards, of_nothing_nothing_is_known)
{
    struct kvk_shards *shards;
    struct kvk_shards_stats stats;
    cr_assert_eq(kvk_shards_create(64, 1, &shards), KVK_OK);
    struct kvk_shards_ratio ratio = kvk_shards_ratio(kvk_shards_counts(shards), UINT64_MAX);
    cr_expect_float_eq(ratio.hits, 0, 0);
    cr_expect_float_eq(ratio.error, 1, 0);
    kvk_shards_stats(shards, &stats);
    cr_expect_eq(stats.samples, 0);
    cr_expect_eq(kvk_shards_counts(shards)->longest_bytes, 0);
    cr_expect_gt(kvk_shards_bytes(shards), 64 * 40);
    /* All keys alike: a test of the engine's. */
    const struct kvk_key same = {.low = 1, .high = 2};
    for (int i = 0; i < 1000; i++) {
        kvk_shards_refer(shards, same, 7, 10, KVK_SHARDS_KNOWN);
        kvk_shards_count(shards, KVK_SHARDS_KNOWN, 1);
    }
    cr_expect_float_eq(kvk_shards_ratio(kvk_shards_counts(shards), 100).hits, 0.999, 1e-6);
    /* Distinct keys with one hash: more than there is room for are never kept. */
    for (uint64_t i = 0; i < 1000; i++) {
        kvk_shards_refer(shards, (struct kvk_key){.low = i << 20}, 7, 10, KVK_SHARDS_NEW);
        kvk_shards_stats(shards, &stats);
        cr_assert_leq(stats.samples, 64);
    }
    kvk_shards_destroy(shards);
    kvk_shards_destroy(NULL);
}
