/*
 * The index alone: how long a look-up takes, what a block costs in memory, how fast blocks come
 * and go.
 *
 * Chains are inserted interleaved, a block of each by turns, so that what belongs together lies
 * scattered, as it does in a daemon that serves many requests at once. The reference of a look-up
 * is the least that any scheme of one hash per block can do: a bare loop that hashes the blocks
 * with keyed XXH3, each with the key before it, and looks nothing up.
 */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/assert.h"
#include "bench/report.h"
#include "index/evict.h"
#include "index/index.h"

#define BLOCK_TOKENS 16
#define PROMPT_TOKENS 131072
#define PROMPT_BLOCKS (PROMPT_TOKENS / BLOCK_TOKENS)
#define SHARED_BLOCKS 64 /* a system prompt that SHARED_CHAINS chains begin with */
#define SHARED_CHAINS 8
#define ON_DEVICE (1U << KVK_TIER_DEVICE)

static struct kvk_hasher hasher;

/* A forest of chains that its blocks' numbers alone describe, so that no prompt need be kept. */
struct forest {
    struct kvk_index *index;
    uint32_t root;
    uint32_t chain_count;
    uint32_t chain_blocks;
};

static uint32_t token_at(uint32_t chain, uint32_t block, uint32_t i)
{
    uint32_t from = block < SHARED_BLOCKS ? chain / SHARED_CHAINS * SHARED_CHAINS : chain;
    uint64_t mixed = ((uint64_t)from << 32 | (block * BLOCK_TOKENS + i)) + 1;
    mixed *= UINT64_C(0x9e3779b97f4a7c15);
    mixed ^= mixed >> 29;
    mixed *= UINT64_C(0xbf58476d1ce4e5b9);
    return (uint32_t)(mixed >> 32) % 128256;
}

static void prompt_fill(uint32_t *tokens, uint32_t chain, uint32_t first_block, uint32_t blocks)
{
    for (uint32_t b = 0; b < blocks; b++) {
        for (uint32_t i = 0; i < BLOCK_TOKENS; i++) {
            tokens[b * BLOCK_TOKENS + i] = token_at(chain, first_block + b, i);
        }
    }
}

static uint32_t block_sealed(struct kvk_index *index)
{
    uint32_t id = kvk_index_block_alloc(index, 0);
    KVK_ASSERT(id != KVK_BLOCK_NONE);
    struct kvk_block *block = kvk_index_block(index, id);
    kvk_block_step(block, KVK_BLOCK_RESERVE);
    kvk_block_step(block, KVK_BLOCK_WRITE);
    kvk_block_step(block, KVK_BLOCK_SEAL);
    kvk_index_set_tiers(index, id, ON_DEVICE);
    return id;
}

/* Insert one block, held by us; the one that is there already is left as it is. */
static uint32_t block_insert(struct kvk_index *index, struct kvk_cursor *cursor,
                             const struct kvk_content *content)
{
    uint32_t id = block_sealed(index);
    uint32_t winner = KVK_BLOCK_NONE;
    enum kvk_status status = kvk_index_insert(index, cursor, content, id, &winner);
    if (status == KVK_EXISTS) {
        kvk_block_step(kvk_index_block(index, id), KVK_BLOCK_DISCARD);
        kvk_index_block_free(index, id);
        return winner;
    }
    KVK_ASSERT(status == KVK_OK);
    return id;
}

static void forest_begin(struct forest *forest, uint32_t block_count_max)
{
    const struct kvk_index_options options = {
        .block_count_max = block_count_max,
        .root_count_max = 1,
    };
    enum kvk_status status = kvk_index_create(&options, &forest->index);
    KVK_ASSERT(status == KVK_OK);
    const struct kvk_root_options root = {.hasher = &hasher, .block_tokens = BLOCK_TOKENS};
    status = kvk_index_root_open(forest->index, &root, &forest->root);
    KVK_ASSERT(status == KVK_OK);
}

static void forest_fill(struct forest *forest, uint32_t block_count, uint32_t chain_blocks)
{
    forest->chain_count = block_count / chain_blocks;
    forest->chain_blocks = chain_blocks;
    forest_begin(forest, block_count + 1);
    struct kvk_cursor *cursors = calloc(forest->chain_count, sizeof(*cursors));
    KVK_ASSERT(cursors != NULL);
    for (uint32_t chain = 0; chain < forest->chain_count; chain++) {
        cursors[chain] = (struct kvk_cursor){.root = forest->root, .block = KVK_BLOCK_NONE};
    }
    for (uint32_t block = 0; block < chain_blocks; block++) {
        for (uint32_t chain = 0; chain < forest->chain_count; chain++) {
            uint32_t tokens[BLOCK_TOKENS];
            prompt_fill(tokens, chain, block, 1);
            const struct kvk_content content = {
                .tokens = tokens,
                .first = (uint64_t)block * BLOCK_TOKENS,
                .token_count = BLOCK_TOKENS,
            };
            uint32_t id = block_insert(forest->index, &cursors[chain], &content);
            struct kvk_block *inserted = kvk_index_block(forest->index, id);
            if (inserted->state == KVK_BLOCK_SEALED) {
                kvk_block_step(inserted, KVK_BLOCK_RELEASE);
            }
        }
    }
    free(cursors);
}

/* ---- Look-ups ---- */

static double lookup_seconds(const struct forest *forest, const uint32_t *tokens, uint32_t count)
{
    static uint32_t path[PROMPT_BLOCKS];
    static uint8_t tiers[PROMPT_BLOCKS];
    const struct kvk_content content = {.tokens = tokens, .token_count = count};
    struct kvk_match match = {
        .cursor = {.root = forest->root, .block = KVK_BLOCK_NONE},
        .path = path,
        .tiers = tiers,
        .path_capacity = PROMPT_BLOCKS,
    };
    double begin = kvk_report_seconds();
    kvk_index_match(forest->index, &content, &match);
    double seconds = kvk_report_seconds() - begin;
    KVK_ASSERT(match.path_count == count / BLOCK_TOKENS);
    return seconds;
}

/* The bare loop: what hashing the blocks costs, before anything is looked up. */
static double hash_seconds(const uint32_t *tokens, uint32_t count)
{
    struct {
        XXH128_hash_t parent;
        uint32_t tokens[BLOCK_TOKENS];
    } block = {.parent = {1, 2}};
    double begin = kvk_report_seconds();
    for (uint32_t i = 0; i < count; i += BLOCK_TOKENS) {
        memcpy(block.tokens, tokens + i, sizeof(block.tokens));
        block.parent =
            XXH3_128bits_withSecret(&block, sizeof(block), hasher.secret, sizeof(hasher.secret));
    }
    double seconds = kvk_report_seconds() - begin;
    static volatile uint64_t sink;
    sink = block.parent.low64;
    (void)sink;
    return seconds;
}

/* Among 100 thousand blocks, every chain by turns, look-up and bare loop side by side. */
static void bench_lookup_small(struct kvk_report *report)
{
    enum { ROUNDS = 50, CHAINS = 12 };
    struct forest forest;
    forest_fill(&forest, 100000, PROMPT_BLOCKS);
    KVK_ASSERT(forest.chain_count == CHAINS);
    uint32_t *tokens = malloc((size_t)CHAINS * PROMPT_TOKENS * sizeof(*tokens));
    KVK_ASSERT(tokens != NULL);
    for (uint32_t chain = 0; chain < CHAINS; chain++) {
        prompt_fill(tokens + (size_t)chain * PROMPT_TOKENS, chain, 0, PROMPT_BLOCKS);
    }
    double lookup[ROUNDS * CHAINS];
    double hash[ROUNDS * CHAINS];
    for (uint32_t i = 0; i < ROUNDS * CHAINS; i++) {
        const uint32_t *prompt = tokens + (size_t)(i % CHAINS) * PROMPT_TOKENS;
        /* By turns, so that each finds the prompt near as often as the other. */
        if (i / CHAINS % 2 == 0) {
            lookup[i] = lookup_seconds(&forest, prompt, PROMPT_TOKENS);
            hash[i] = hash_seconds(prompt, PROMPT_TOKENS);
        } else {
            hash[i] = hash_seconds(prompt, PROMPT_TOKENS);
            lookup[i] = lookup_seconds(&forest, prompt, PROMPT_TOKENS);
        }
    }
    kvk_report_ratio(report, "lookup_131072_vs_hash",
                     kvk_report_median(lookup, ROUNDS * CHAINS) * 1e6, "us",
                     kvk_report_median(hash, ROUNDS * CHAINS) * 1e6);
    free(tokens);
    kvk_index_destroy(forest.index);
}

/* Among very many blocks: no chain was looked at since it was written, so nothing is in a cache. */
static void bench_lookup_large(struct kvk_report *report, const struct forest *forest)
{
    enum { ROUNDS = 200 };
    uint32_t *tokens = malloc(PROMPT_TOKENS * sizeof(*tokens));
    KVK_ASSERT(tokens != NULL);
    double whole[ROUNDS];
    double half[ROUNDS];
    for (uint32_t i = 0; i < ROUNDS; i++) {
        uint32_t chain = (uint32_t)((uint64_t)i * 2654435761U % forest->chain_count);
        uint32_t other = (chain + forest->chain_count / 2) % forest->chain_count;
        prompt_fill(tokens, chain, 0, PROMPT_BLOCKS);
        whole[i] = lookup_seconds(forest, tokens, PROMPT_TOKENS);
        prompt_fill(tokens, other, 0, PROMPT_BLOCKS / 2);
        half[i] = lookup_seconds(forest, tokens, PROMPT_TOKENS / 2);
    }
    double median = kvk_report_median(whole, ROUNDS);
    kvk_report_value(report, "lookup_at_10m", median * 1e3, "ms");
    kvk_report_value(report, "lookup_at_10m_worst", whole[ROUNDS - 1] * 1e3, "ms");
    kvk_report_ratio(report, "lookup_doubling", median * 1e6, "us",
                     kvk_report_median(half, ROUNDS) * 1e6);
    free(tokens);
}

/* ---- Memory ---- */

static uint64_t resident_bytes(void)
{
    FILE *file = fopen("/proc/self/statm", "r");
    KVK_ASSERT(file != NULL);
    unsigned long pages = 0;
    int read = fscanf(file, "%*u %lu", &pages);
    KVK_ASSERT(read == 1);
    (void)fclose(file);
    return (uint64_t)pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* All that a block needs, its place in a queue included, even if all of them were leaves. */
static void bench_memory(struct kvk_report *report, const struct forest *forest,
                         uint64_t resident_before)
{
    struct kvk_index_stats stats;
    kvk_index_stats(forest->index, &stats);
    uint32_t count = (uint32_t)stats.blocks;
    const struct kvk_evict_options options = {
        .policy = KVK_EVICT_RP_COST,
        .ghost_count = 4 * count,
        .block_count = count,
    };
    struct kvk_evict *evict;
    enum kvk_status status = kvk_evict_create(forest->index, &options, &evict);
    KVK_ASSERT(status == KVK_OK);
    struct kvk_evict_queue queue;
    kvk_evict_queue_init(&queue, evict, KVK_TIER_DEVICE, true, 1);
    status = kvk_evict_queue_reserve(&queue, count);
    KVK_ASSERT(status == KVK_OK);
    double resident = (double)(resident_bytes() - resident_before);
    double blocks = (double)count;
    kvk_report_ratio(report, "bytes_per_block",
                     ((double)stats.bytes + (double)kvk_evict_queue_bytes(&queue)) / blocks,
                     "bytes", 160);
    kvk_report_value(report, "resident_bytes_per_block",
                     (resident - (double)stats.token_bytes) / blocks, "bytes");
    kvk_report_value(report, "token_bytes_per_block", (double)stats.token_bytes / blocks, "bytes");
    kvk_report_value(report, "ghost_bytes_per_block", (double)kvk_evict_bytes(evict) / blocks,
                     "bytes");
    kvk_report_value(report, "blocks_per_run", blocks / (double)stats.runs, "blocks");
    kvk_evict_queue_finish(&queue);
    kvk_evict_destroy(evict);
}

/* The same for short chains of 12 blocks, where each run has much room beside its blocks. */
static void bench_memory_short(struct kvk_report *report)
{
    struct forest forest;
    forest_fill(&forest, 4000000, SHARED_BLOCKS + 12);
    struct kvk_index_stats stats;
    kvk_index_stats(forest.index, &stats);
    kvk_report_value(report, "bytes_per_block_short", (double)stats.bytes / (double)stats.blocks,
                     "bytes");
    kvk_index_destroy(forest.index);
}

/* ---- Coming and going ---- */

struct turnover {
    struct forest forest;
    struct kvk_evict *evict;
    struct kvk_evict_queue queue;
    uint64_t now_ns;
    uint64_t stamp;
};

static void offer_leaf(struct turnover *turnover, uint32_t id)
{
    const struct kvk_block *block = kvk_index_block(turnover->forest.index, id);
    if (block->state == KVK_BLOCK_EVICTABLE && block->memory_children == 0) {
        kvk_evict_queue_add(&turnover->queue, id);
    }
}

static void evict_one(struct turnover *turnover)
{
    struct kvk_index *index = turnover->forest.index;
    uint32_t id = kvk_evict_queue_peek(&turnover->queue, turnover->now_ns, NULL);
    KVK_ASSERT(id != KVK_BLOCK_NONE);
    struct kvk_block *block = kvk_index_block(index, id);
    kvk_evict_queue_remove(&turnover->queue, id);
    kvk_evict_forget(turnover->evict, block);
    kvk_block_step(block, KVK_BLOCK_EVICT);
    uint32_t parent = kvk_index_set_tiers(index, id, 0);
    kvk_index_remove(index, id);
    kvk_index_block_free(index, id);
    if (parent != KVK_BLOCK_NONE) {
        offer_leaf(turnover, parent);
    }
}

/* One request: a chain that nobody knew, inserted head first, its room taken from the least. */
static void request(struct turnover *turnover, uint32_t chain, uint32_t blocks, uint32_t capacity)
{
    enum { BLOCKS_MAX = 256 };
    KVK_ASSERT(blocks <= BLOCKS_MAX);
    uint32_t tokens[BLOCKS_MAX * BLOCK_TOKENS];
    uint32_t path[BLOCKS_MAX];
    prompt_fill(tokens, chain, SHARED_BLOCKS, blocks);
    struct kvk_index *index = turnover->forest.index;
    struct kvk_cursor cursor = {.root = turnover->forest.root, .block = KVK_BLOCK_NONE};
    const struct kvk_content content = {.tokens = tokens, .token_count = blocks * BLOCK_TOKENS};
    turnover->stamp++;
    turnover->now_ns += 10000000;
    for (uint32_t i = 0; i < blocks; i++) {
        if (kvk_index_block_count(index) >= capacity) {
            evict_one(turnover);
        }
        path[i] = block_insert(index, &cursor, &content);
        kvk_evict_admit(turnover->evict, kvk_index_block(index, path[i]), 1 + (float)i / 100, false,
                        turnover->stamp, turnover->now_ns);
    }
    for (uint32_t i = blocks; i-- > 0;) {
        kvk_block_step(kvk_index_block(index, path[i]), KVK_BLOCK_RELEASE);
        offer_leaf(turnover, path[i]);
    }
}

static double thread_seconds(void)
{
    struct timespec now;
    int failed = clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    KVK_ASSERT(failed == 0);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void bench_turnover(struct kvk_report *report)
{
    enum { CAPACITY = 1000000, CHAIN_BLOCKS = 64, ROUND_BLOCKS = 64000 };
    struct turnover turnover = {0};
    forest_begin(&turnover.forest, CAPACITY + 1);
    const struct kvk_evict_options options = {
        .policy = KVK_EVICT_RP_COST,
        .ghost_count = 4 * CAPACITY,
        .block_count = CAPACITY,
    };
    enum kvk_status status = kvk_evict_create(turnover.forest.index, &options, &turnover.evict);
    KVK_ASSERT(status == KVK_OK);
    kvk_evict_queue_init(&turnover.queue, turnover.evict, KVK_TIER_DEVICE, true, 1);
    status = kvk_evict_queue_reserve(&turnover.queue, CAPACITY);
    KVK_ASSERT(status == KVK_OK);
    uint32_t chain = 0;
    while (kvk_index_block_count(turnover.forest.index) < CAPACITY) {
        request(&turnover, chain++, CHAIN_BLOCKS, CAPACITY);
    }
    /* The best of many short rounds, in the thread's own time: what one core does, whatever else
     * runs on it between. */
    double best = 0;
    for (int round = 0; round < 60; round++) {
        double begin = thread_seconds();
        uint32_t first = chain;
        while (chain < first + ROUND_BLOCKS / CHAIN_BLOCKS) {
            request(&turnover, chain++, CHAIN_BLOCKS, CAPACITY);
        }
        double rate = (chain - first) * CHAIN_BLOCKS / (thread_seconds() - begin);
        best = rate > best ? rate : best;
    }
    kvk_report_ratio(report, "insert_evict", best, "blocks/s", 1e6);
    while (kvk_evict_queue_count(&turnover.queue) > 0) {
        evict_one(&turnover);
    }
    kvk_evict_queue_finish(&turnover.queue);
    kvk_evict_destroy(turnover.evict);
    kvk_index_destroy(turnover.forest.index);
}

int main(int argc, char **argv)
{
    static const uint8_t secret[KVK_SECRET_SIZE] = {1};
    struct kvk_report report;
    uint32_t block_count = 10000000;
    kvk_report_init(&report, "index");
    for (int i = 1; i < argc; i++) {
        if (kvk_report_option(&report, argv[i])) {
            continue;
        }
        if (strcmp(argv[i], "--blocks") == 0 && i + 1 < argc) {
            block_count = (uint32_t)strtoul(argv[++i], NULL, 10);
        }
        if (block_count < 2 * PROMPT_BLOCKS || strcmp(argv[i - 1], "--blocks") != 0) {
            (void)fprintf(stderr,
                          "usage: bench_index [--json] [--blocks N]\n"
                          "N: blocks of the large index, at least %d; 10000000 unless given\n",
                          2 * PROMPT_BLOCKS);
            return 2;
        }
    }
    kvk_hasher_init(&hasher, secret);
    bench_lookup_small(&report);
    bench_turnover(&report);
    bench_memory_short(&report);
    malloc_trim(0);
    uint64_t resident_before = resident_bytes();
    struct forest forest;
    forest_fill(&forest, block_count, PROMPT_BLOCKS);
    bench_lookup_large(&report, &forest);
    bench_memory(&report, &forest, resident_before);
    kvk_index_destroy(forest.index);
    return kvk_report_print(&report);
}
