/* Chains: what is found, what is never found, and what branches, ends and bounds do. */
#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "index/index.h"
#include "index/internal.h"
#include "tests/index_chain.h"

static struct kvk_hasher hasher;
static struct kvk_index *chains; /* the index under test */

static void setup(void)
{
    static const uint8_t secret[KVK_SECRET_SIZE] = {42};
    kvk_hasher_init(&hasher, secret);
    chains = chain_index(100000, 16);
}

static void teardown(void)
{
    kvk_index_check(chains);
    kvk_index_destroy(chains);
}

TestSuite(index_chain, .init = setup, .fini = teardown);

static struct kvk_content content_of(const uint32_t *tokens, uint64_t count)
{
    return (struct kvk_content){.tokens = tokens, .token_count = count};
}

static void tokens_fill(uint32_t *tokens, uint32_t count, uint32_t first)
{
    for (uint32_t i = 0; i < count; i++) {
        tokens[i] = first + i;
    }
}

/* ---- Finding ---- */

Test(index_chain, longest_prefix_of_whole_blocks)
{
    uint32_t root = chain_root(chains, &hasher, "m", 4);
    uint32_t tokens[4000];
    uint32_t ids[1000];
    tokens_fill(tokens, 4000, 0);
    struct kvk_content content = content_of(tokens, 4000);
    cr_assert_eq(chain_hit(chains, root, &content), 0);
    cr_assert_eq(chain_add_all(chains, root, 4, &content, ids), 1000);
    cr_assert_eq(chain_hit(chains, root, &content), 1000);

    for (uint32_t length = 0; length <= 4000; length += 397) {
        content.token_count = length;
        cr_assert_eq(chain_hit(chains, root, &content), length / 4);
    }
    content.token_count = 4000;
    for (uint32_t at = 0; at < 4000; at += 331) {
        tokens[at] ^= 1;
        cr_assert_eq(chain_hit(chains, root, &content), at / 4, "token %u changed", at);
        tokens[at] ^= 1;
    }

    uint32_t path[1000];
    uint8_t tiers[1000];
    struct kvk_match match = {
        .cursor = {.root = root, .block = KVK_BLOCK_NONE},
        .path = path,
        .tiers = tiers,
        .path_capacity = 700,
    };
    kvk_index_set_tiers(chains, ids[300], 3);
    kvk_index_match(chains, &content, &match);
    cr_assert_eq(match.path_count, 700, "the walk ends where there is no more room");
    cr_assert_arr_eq(path, ids, 700 * sizeof(*ids));
    cr_assert_eq(tiers[299], 1);
    cr_assert_eq(tiers[300], 3);
    cr_assert_eq(match.cursor.block, ids[699]);
    cr_assert_eq(match.cursor.blocks, 700);

    /* An open sequence goes on from where it stands and sends only its new tokens. */
    struct kvk_content rest = {.tokens = tokens + 2800, .first = 2800, .token_count = 1200};
    match.path_capacity = 1000;
    kvk_index_match(chains, &rest, &match);
    cr_assert_eq(match.path_count, 300);
    cr_assert_arr_eq(path, ids + 700, 300 * sizeof(*ids));
    cr_assert_eq(match.cursor.blocks, 1000);
}

Test(index_chain, branches)
{
    uint32_t root = chain_root(chains, &hasher, "m", 2);
    uint32_t tokens[600];
    tokens_fill(tokens, 600, 0);
    struct kvk_content content = content_of(tokens, 600);
    chain_add_all(chains, root, 2, &content, NULL);
    /* From every tenth block on, another continuation. */
    for (uint32_t at = 0; at < 300; at += 10) {
        tokens_fill(tokens, 600, 0);
        for (uint32_t i = 2 * at; i < 600; i++) {
            tokens[i] += 10000 * (at + 1);
        }
        cr_assert_eq(chain_hit(chains, root, &content), at);
        chain_add_all(chains, root, 2, &content, NULL);
        cr_assert_eq(chain_hit(chains, root, &content), 300);
    }
    kvk_index_check(chains);
    tokens_fill(tokens, 600, 0);
    cr_assert_eq(chain_hit(chains, root, &content), 300, "the first chain is whole");
    uint32_t children = 0;
    for (uint32_t id = kvk_index_first_child(chains, root, KVK_BLOCK_NONE); id != KVK_BLOCK_NONE;
         id = kvk_index_next_child(chains, id)) {
        children++;
    }
    cr_assert_eq(children, 2);
}

/* A run is not split where a branch appears, and a long chain lies in few of them. */
Test(index_chain, runs_are_long)
{
    uint32_t root = chain_root(chains, &hasher, "m", 4);
    static uint32_t tokens[40000];
    tokens_fill(tokens, 40000, 0);
    struct kvk_content content = content_of(tokens, 40000);
    chain_add_all(chains, root, 4, &content, NULL);
    struct kvk_index_stats stats;
    kvk_index_stats(chains, &stats);
    cr_assert_eq(stats.blocks, 10000);
    cr_assert_eq(stats.runs, (10000 + KVK_RUN_BLOCKS_MAX - 1) / KVK_RUN_BLOCKS_MAX);
    cr_assert_eq(stats.token_bytes, 160000);
    tokens[20000] ^= 1;
    chain_add_all(chains, root, 4, &content, NULL);
    uint64_t runs = stats.runs;
    kvk_index_stats(chains, &stats);
    cr_assert_eq(stats.runs, runs + 20, "5,000 blocks more");
}

/* Case A4: another prompt with the very same key is not a hit, in any block of the chain. */
static void crafted_collisions(bool constant)
{
    static struct kvk_hasher hashers[2];
    hashers[constant] = hasher;
    hashers[constant].constant = constant;
    uint32_t root = chain_root(chains, &hashers[constant], "m", 16);
    for (uint32_t block = 0; block < 2; block++) {
        uint32_t tokens[32];
        tokens_fill(tokens, 32, 1000 + 5000 * block);
        struct kvk_content content = content_of(tokens, 16 * (block + 1));
        chain_add_all(chains, root, 16, &content, NULL);
        cr_assert_eq(chain_hit(chains, root, &content), block + 1);
        uint32_t *altered = tokens + 16 * block;
        altered[3] += 31;
        altered[4] -= 1;
        cr_assert_eq(chain_hit(chains, root, &content), block);
        altered[3] -= 30;
        altered[4] -= 30;
        cr_assert_eq(chain_hit(chains, root, &content), block);
    }
}

Test(index_chain, case_a4_crafted_collisions)
{
    crafted_collisions(false);
    crafted_collisions(true);
}

/* With every key equal, and every chain's blocks in one bucket, only what was put in is found. */
Test(index_chain, case_a4_all_keys_equal)
{
    hasher.constant = true;
    uint32_t roots[2] = {chain_root(chains, &hasher, "a", 2), chain_root(chains, &hasher, "b", 2)};
    cr_assert_neq(roots[0], roots[1], "equal keys make no two roots one");
    uint32_t tokens[8];
    struct kvk_content content = content_of(tokens, 8);
    for (uint32_t prompt = 0; prompt < 256; prompt += 2) {
        for (uint32_t i = 0; i < 8; i++) {
            tokens[i] = prompt >> i & 1;
        }
        chain_add_all(chains, roots[0], 2, &content, NULL);
    }
    kvk_index_check(chains);
    for (uint32_t prompt = 0; prompt < 256; prompt++) {
        for (uint32_t i = 0; i < 8; i++) {
            tokens[i] = prompt >> i & 1;
        }
        cr_assert_eq(chain_hit(chains, roots[0], &content), prompt % 2 == 0 ? 4 : 0);
        cr_assert_eq(chain_hit(chains, roots[1], &content), 0);
    }
}

/* Case A3: placeholders are one token; what they stand for decides. */
Test(index_chain, case_a3_placeholders)
{
    uint32_t root = chain_root(chains, &hasher, "m", 4);
    uint32_t tokens[17] = {1, 2, 3, 4, 5, 6};
    for (uint32_t i = 6; i < 17; i++) {
        tokens[i] = 999;
    }
    struct kvk_content_span span = {.first = 6, .count = 10, .digest_size = 32};
    span.digest[0] = 0x11;
    memcpy(span.digest + 28, "\x11\x11\xab\xcd", 4);
    struct kvk_content content = content_of(tokens, 16);
    content.spans = &span;
    content.span_count = 1;
    uint32_t ids[4];
    cr_assert_eq(chain_add_all(chains, root, 4, &content, ids), 4);
    cr_assert_eq(chain_hit(chains, root, &content), 4, "the same image");

    span.digest[0] = 0x22;
    cr_assert_eq(chain_hit(chains, root, &content), 1, "another image of the same last bytes");
    span.digest[0] = 0x11;
    span.digest_size = 31;
    cr_assert_eq(chain_hit(chains, root, &content), 1, "a shorter digest is another one");
    span.digest_size = 32;
    span.first = 7;
    cr_assert_leq(chain_hit(chains, root, &content), 1, "the image one position later");
    span.first = 6;
    content.span_count = 0;
    cr_assert_eq(chain_hit(chains, root, &content), 1, "plain tokens of the same id");

    size_t size;
    cr_assert_null(kvk_index_extra(chains, ids[0], &size));
    cr_assert_eq(size, 0);
    cr_assert_not_null(kvk_index_extra(chains, ids[1], &size));
    cr_assert_eq(size, 1 + 4 + 32 + 8 + 4 + 4);
}

/* Plain blocks in a run with images, and images in a prompt against a plain run. */
Test(index_chain, placeholders_beside_plain_blocks)
{
    uint32_t root = chain_root(chains, &hasher, "m", 4);
    uint32_t tokens[400];
    tokens_fill(tokens, 400, 0);
    struct kvk_content_span spans[2] = {{.first = 100, .count = 30, .digest_size = 8},
                                        {.first = 300, .count = 1, .digest_size = 8}};
    struct kvk_content content = content_of(tokens, 400);
    cr_assert_eq(chain_add_all(chains, root, 4, &content, NULL), 100);
    content.spans = spans;
    content.span_count = 2;
    cr_assert_eq(chain_hit(chains, root, &content), 25);
    cr_assert_eq(chain_add_all(chains, root, 4, &content, NULL), 100);
    cr_assert_eq(chain_hit(chains, root, &content), 100);
    spans[1].digest[7] = 1;
    cr_assert_eq(chain_hit(chains, root, &content), 75);
    content.span_count = 0;
    cr_assert_eq(chain_hit(chains, root, &content), 100);
    kvk_index_check(chains);
}

static uint64_t hashed_bytes(uint32_t root, const struct kvk_content *content)
{
    struct kvk_match match = {
        .cursor = {.root = root, .block = KVK_BLOCK_NONE},
        .path_capacity = UINT64_MAX,
    };
    kvk_index_match(chains, content, &match);
    cr_assert_eq(match.path_count, content->token_count / 16);
    return match.hashed_bytes;
}

/* Case L3: bytes hashed grow with what is looked up, not with its square. Every 16th block has
 * three children, the prompt's is the second: each costs one hash of one block. */
Test(index_chain, case_l3_hashed_bytes_are_linear)
{
    static uint32_t tokens[131072];
    uint32_t root = chain_root(chains, &hasher, "m", 16);
    tokens_fill(tokens, 131072, 0);
    struct kvk_content content = content_of(tokens, 131072);
    for (uint32_t block = 16; block < 8192; block += 16) {
        for (uint32_t child = 0; child < 3; child++) {
            tokens[16 * block] = child;
            content.token_count = 16 * (block + 1);
            chain_add_all(chains, root, 16, &content, NULL);
        }
        tokens[16 * block] = 1;
    }
    content.token_count = 131072;
    chain_add_all(chains, root, 16, &content, NULL);
    uint64_t whole = hashed_bytes(root, &content);
    content.token_count = 65536;
    uint64_t half = hashed_bytes(root, &content);
    cr_assert_eq(half, 255 * (16 + 64));
    cr_assert_eq(whole, 511 * (16 + 64));
}

/* Where nothing branches, nothing is hashed. */
Test(index_chain, runs_are_followed_without_hashing)
{
    static uint32_t tokens[131072];
    uint32_t root = chain_root(chains, &hasher, "m", 16);
    tokens_fill(tokens, 131072, 0);
    struct kvk_content content = content_of(tokens, 131072);
    chain_add_all(chains, root, 16, &content, NULL);
    cr_assert_eq(hashed_bytes(root, &content), 0);
}

/* ---- Changing ---- */

Test(index_chain, the_first_of_two_equal_blocks_wins)
{
    uint32_t root = chain_root(chains, &hasher, "m", 2);
    const uint32_t tokens[6] = {1, 2, 3, 4, 5, 6};
    struct kvk_content content = content_of(tokens, 6);
    uint32_t ids[3];
    chain_add_all(chains, root, 2, &content, ids);
    struct kvk_cursor cursor = {.root = root, .block = ids[0], .blocks = 1};
    uint32_t late = chain_block(chains, CHAIN_ON_DEVICE);
    uint32_t winner = KVK_BLOCK_NONE;
    enum kvk_status status = kvk_index_insert(chains, &cursor, &content, late, &winner);
    cr_assert_eq(status, KVK_EXISTS);
    cr_assert_eq(winner, ids[1]);
    cr_assert_eq(cursor.block, ids[1]);
    cr_assert_eq(cursor.blocks, 2);
    cr_assert_eq(kvk_index_block(chains, late)->run, UINT32_MAX, "unchanged");

    /* A hollow winner is one too: the late block's bytes can fill it. */
    chain_evict(chains, ids[1]);
    cr_assert_eq(kvk_index_block(chains, ids[1])->state, KVK_BLOCK_HOLLOW);
    cursor = (struct kvk_cursor){.root = root, .block = ids[0], .blocks = 1};
    status = kvk_index_insert(chains, &cursor, &content, late, &winner);
    cr_assert_eq(status, KVK_EXISTS);
    cr_assert_eq(winner, ids[1]);
    kvk_block_step(kvk_index_block(chains, winner), KVK_BLOCK_FILL);
    kvk_index_set_tiers(chains, winner, CHAIN_ON_DEVICE);
    kvk_index_check(chains);
    chain_discard(chains, late);
}

Test(index_chain, hollow_ancestors)
{
    uint32_t root = chain_root(chains, &hasher, "m", 2);
    uint32_t tokens[20];
    uint32_t ids[10];
    tokens_fill(tokens, 20, 0);
    struct kvk_content content = content_of(tokens, 20);
    chain_add_all(chains, root, 2, &content, ids);
    for (uint32_t i = 0; i < 5; i++) {
        chain_evict(chains, ids[i]); /* as under a window: the oldest first */
        kvk_index_check(chains);
    }
    struct kvk_index_stats stats;
    kvk_index_stats(chains, &stats);
    cr_assert_eq(stats.hollow_blocks, 5);
    cr_assert_eq(stats.blocks, 10);
    uint8_t tiers[10];
    struct kvk_match match = {
        .cursor = {.root = root, .block = KVK_BLOCK_NONE},
        .tiers = tiers,
        .path_capacity = 10,
    };
    kvk_index_match(chains, &content, &match);
    cr_assert_eq(match.path_count, 10, "known, with or without bytes");
    static const uint8_t expected[10] = {0, 0, 0, 0, 0, 1, 1, 1, 1, 1};
    cr_assert_arr_eq(tiers, expected, 10);

    /* From the end: leaves go, and hollow ancestors that nothing needs any more. */
    for (uint32_t i = 9; i >= 5; i--) {
        chain_evict(chains, ids[i]);
    }
    for (uint32_t i = 5; i-- > 0;) {
        kvk_block_step(kvk_index_block(chains, ids[i]), KVK_BLOCK_PRUNE);
        kvk_index_remove(chains, ids[i]);
        kvk_index_block_free(chains, ids[i]);
        kvk_index_check(chains);
    }
    kvk_index_stats(chains, &stats);
    cr_assert_eq(stats.blocks + stats.hollow_blocks + stats.runs, 0);
}

Test(index_chain, tiers_tell_when_a_parent_becomes_a_leaf)
{
    uint32_t root = chain_root(chains, &hasher, "m", 1);
    const uint32_t left[3] = {1, 2, 3};
    const uint32_t right[3] = {1, 2, 4};
    struct kvk_content content = content_of(left, 3);
    uint32_t a[3];
    uint32_t b[3];
    chain_add_all(chains, root, 1, &content, a);
    content.tokens = right;
    chain_add_all(chains, root, 1, &content, b);
    cr_assert_eq(a[1], b[1]);
    const struct kvk_block *parent = kvk_index_block(chains, a[1]);
    cr_assert_eq(parent->memory_children, 2);
    cr_assert_eq(parent->device_children, 2);

    const uint8_t host = 1U << KVK_TIER_HOST;
    cr_assert_eq(kvk_index_set_tiers(chains, a[2], CHAIN_ON_DEVICE | host), KVK_BLOCK_NONE);
    cr_assert_eq(kvk_index_set_tiers(chains, a[2], host), KVK_BLOCK_NONE, "the other is there");
    cr_assert_eq(parent->device_children, 1);
    cr_assert_eq(kvk_index_set_tiers(chains, b[2], host), a[1], "no child on the device now");
    cr_assert_eq(parent->device_children, 0);
    cr_assert_eq(parent->memory_children, 2);
    chain_evict(chains, a[2]);
    cr_assert_eq(parent->memory_children, 1);
    kvk_block_step(kvk_index_block(chains, b[2]), KVK_BLOCK_EVICT);
    cr_assert_eq(kvk_index_set_tiers(chains, b[2], 0), a[1], "no child with bytes now");
    cr_assert_eq(parent->memory_children, 0);
    cr_assert_eq(kvk_index_remove(chains, b[2]), a[1]);
    kvk_index_block_free(chains, b[2]);
    cr_assert_eq(kvk_index_set_tiers(chains, a[0], host), KVK_BLOCK_NONE, "under the root");
}

Test(index_chain, anchors_keep_the_place)
{
    uint32_t root = chain_root(chains, &hasher, "m", 1);
    const uint32_t tokens[2] = {1, 2};
    struct kvk_content content = content_of(tokens, 2);
    uint32_t ids[2];
    chain_add_all(chains, root, 1, &content, ids);
    kvk_index_anchor(chains, ids[1]);
    chain_evict(chains, ids[1]);
    cr_assert_eq(kvk_index_block(chains, ids[1])->state, KVK_BLOCK_HOLLOW);
    cr_assert_eq(chain_hit(chains, root, &content), 2);
    kvk_index_unanchor(chains, ids[1]);
    cr_assert(kvk_block_allows(kvk_index_block(chains, ids[1]), KVK_BLOCK_PRUNE));
}

Test(index_chain, anchored_blocks_are_not_removed, .signal = SIGABRT)
{
    uint32_t root = chain_root(chains, &hasher, "m", 1);
    const uint32_t token = 1;
    struct kvk_content content = content_of(&token, 1);
    uint32_t id = KVK_BLOCK_NONE;
    chain_add_all(chains, root, 1, &content, &id);
    kvk_index_anchor(chains, id);
    kvk_index_remove(chains, id);
}

Test(index_chain, parents_are_not_removed, .signal = SIGABRT)
{
    uint32_t root = chain_root(chains, &hasher, "m", 1);
    const uint32_t tokens[2] = {1, 2};
    struct kvk_content content = content_of(tokens, 2);
    uint32_t ids[2];
    chain_add_all(chains, root, 1, &content, ids);
    kvk_index_remove(chains, ids[0]);
}

Test(index_chain, unsealed_blocks_are_not_indexed, .signal = SIGABRT)
{
    uint32_t root = chain_root(chains, &hasher, "m", 1);
    const uint32_t token = 1;
    struct kvk_content content = content_of(&token, 1);
    struct kvk_cursor cursor = {.root = root, .block = KVK_BLOCK_NONE};
    uint32_t id = kvk_index_block_alloc(chains, 0);
    kvk_block_step(kvk_index_block(chains, id), KVK_BLOCK_RESERVE);
    uint32_t winner;
    enum kvk_status status = kvk_index_insert(chains, &cursor, &content, id, &winner);
    cr_assert_neq(status, KVK_OK);
}

Test(index_chain, tokens_stay_with_their_block_while_runs_move)
{
    uint32_t root = chain_root(chains, &hasher, "m", 3);
    uint32_t tokens[300];
    uint32_t ids[100];
    tokens_fill(tokens, 300, 7);
    struct kvk_content content = content_of(tokens, 300);
    chain_add_all(chains, root, 3, &content, ids);
    for (uint32_t length = 100; length > 0; length--) {
        for (uint32_t i = 0; i < length; i++) {
            cr_assert_arr_eq(kvk_index_tokens(chains, ids[i]), tokens + 3 * i, 12);
            cr_assert_eq(kvk_index_root_of(chains, ids[i]), root);
        }
        chain_evict(chains, ids[length - 1]);
    }
    struct kvk_index_stats stats;
    kvk_index_stats(chains, &stats);
    cr_assert_eq(stats.runs, 0);
    cr_assert_eq(stats.token_bytes, 0);
}

/* ---- Bounds and growth ---- */

Test(index_chain, blocks_are_bounded)
{
    struct kvk_index *small = chain_index(3, 1);
    uint32_t ids[3];
    for (uint32_t i = 0; i < 3; i++) {
        ids[i] = kvk_index_block_alloc(small, 5);
        cr_assert_neq(ids[i], KVK_BLOCK_NONE);
        cr_assert_eq(kvk_index_block(small, ids[i])->arena, 5);
    }
    cr_assert_eq(kvk_index_block_alloc(small, 5), KVK_BLOCK_NONE);
    cr_assert_eq(kvk_index_block_count(small), 3);
    cr_assert_eq(kvk_index_block_id_end(small), 3);
    kvk_index_block_free(small, ids[1]);
    cr_assert_eq(kvk_index_block(small, ids[1])->state, KVK_BLOCK_FREE);
    cr_assert_eq(kvk_index_block(small, ids[1])->run, UINT32_MAX);
    kvk_index_check(small);
    cr_assert_eq(kvk_index_block_alloc(small, 5), ids[1]);
    kvk_index_destroy(small);
}

Test(index_chain, a_block_is_freed_once, .signal = SIGABRT)
{
    uint32_t id = kvk_index_block_alloc(chains, 0);
    kvk_index_block_free(chains, id);
    kvk_index_block_free(chains, id);
}

static struct kvk_root_options root_options(void)
{
    return (struct kvk_root_options){
        .hasher = &hasher,
        .identity = (const uint8_t *)"id",
        .identity_size = 2,
        .salt = (const uint8_t *)"s",
        .salt_size = 1,
        .block_tokens = 1,
        .user = 77,
    };
}

/* Also where every key is the same, so that nothing but the comparison tells roots apart. */
Test(index_chain, every_part_of_a_root_counts)
{
    for (int constant = 0; constant < 2; constant++) {
        hasher.constant = constant > 0;
        struct kvk_hasher other = hasher;
        struct kvk_root_options options[8];
        for (int i = 0; i < 8; i++) {
            options[i] = root_options();
        }
        options[1].hasher = &other;
        options[2].identity = (const uint8_t *)"ie";
        options[3].identity_size = 1;
        options[4].salt = (const uint8_t *)"t";
        options[5].salt_size = 0;
        options[6].group = 1;
        options[7].windowed = true;
        uint32_t roots[8];
        for (int i = 0; i < 8; i++) {
            enum kvk_status status = kvk_index_root_open(chains, &options[i], &roots[i]);
            cr_assert_eq(status, KVK_OK);
            for (int before = 0; before < i; before++) {
                cr_assert_neq(roots[before], roots[i], "%d and %d", before, i);
            }
        }
        for (int i = 0; i < 8; i++) {
            uint32_t again;
            enum kvk_status status = kvk_index_root_open(chains, &options[i], &again);
            cr_assert_eq(status, KVK_OK);
            cr_assert_eq(again, roots[i]);
            cr_assert_eq(kvk_index_root_windowed(chains, again), i == 7);
            cr_assert_eq(kvk_index_root_user(chains, again), 77);
            kvk_index_root_release(chains, again);
            kvk_index_root_release(chains, again);
        }
    }
    struct kvk_index_stats stats;
    kvk_index_stats(chains, &stats);
    cr_assert_eq(stats.roots, 0);
}

Test(index_chain, roots_are_bounded_and_go_with_their_last_user)
{
    struct kvk_root_options options = root_options();
    struct kvk_index *small = chain_index(10, 2);
    uint32_t first;
    uint32_t other;
    cr_assert_eq(kvk_index_root_open(small, &options, &first), KVK_OK);
    options.group = 1;
    cr_assert_eq(kvk_index_root_open(small, &options, &other), KVK_OK);
    options.group = 2;
    cr_assert_eq(kvk_index_root_open(small, &options, &other), KVK_EXHAUSTED);

    const uint32_t token = 1;
    struct kvk_content content = content_of(&token, 1);
    uint32_t id = KVK_BLOCK_NONE;
    chain_add_all(small, first, 1, &content, &id);
    kvk_index_root_hold(small, first);
    kvk_index_root_release(small, first);
    kvk_index_root_release(small, first);
    kvk_index_check(small);
    cr_assert_eq(kvk_index_root_open(small, &options, &other), KVK_EXHAUSTED, "it has a block");
    chain_evict(small, id);
    kvk_index_check(small);
    cr_assert_eq(kvk_index_root_open(small, &options, &other), KVK_OK, "it went with the block");
    kvk_index_destroy(small);
}

Test(index_chain, equal_identities_of_two_tenants_are_two_roots)
{
    struct kvk_hasher other = hasher; /* even with one secret */
    uint32_t mine = chain_root(chains, &hasher, "m", 1);
    uint32_t theirs = chain_root(chains, &other, "m", 1);
    cr_assert_neq(mine, theirs);
    const uint32_t token = 1;
    struct kvk_content content = content_of(&token, 1);
    chain_add_all(chains, mine, 1, &content, NULL);
    cr_assert_eq(chain_hit(chains, theirs, &content), 0);
}

/* The table grows by two buckets per insert, and everything is found at every size. */
Test(index_chain, the_table_grows_by_steps)
{
    uint32_t root = chain_root(chains, &hasher, "m", 1);
    uint32_t buckets = chains->bucket_count;
    for (uint32_t i = 0; i < 20000; i++) {
        struct kvk_content content = content_of(&i, 1);
        chain_add_all(chains, root, 1, &content, NULL);
        cr_assert_leq(chains->bucket_count, buckets + 2);
        buckets = chains->bucket_count;
        if (i % 997 == 0) {
            for (uint32_t known = 0; known <= i; known++) {
                content.tokens = &known;
                cr_assert_eq(chain_hit(chains, root, &content), 1);
            }
        }
    }
    cr_assert_geq(buckets, 39990);
    uint32_t longest = 0;
    for (uint32_t bucket = 0; bucket < buckets; bucket++) {
        uint32_t length = 0;
        for (uint32_t id = *kvk_keymap_bucket(chains, bucket); id != KVK_BLOCK_NONE; length++) {
            id = kvk_index_block(chains, id)->hash_next;
        }
        longest = length > longest ? length : longest;
    }
    cr_assert_lt(longest, 16, "and its lists are short");
}

Test(index_chain, memory_is_counted_and_comes_back)
{
    struct kvk_index_stats before;
    struct kvk_index_stats after;
    uint32_t root = chain_root(chains, &hasher, "m", 16);
    static uint32_t tokens[64000];
    static uint32_t ids[4000];
    tokens_fill(tokens, 64000, 0);
    struct kvk_content_span span = {.first = 1000, .count = 5000, .digest_size = 32};
    struct kvk_content content = content_of(tokens, 64000);
    content.spans = &span;
    content.span_count = 1;
    for (int round = 0; round < 3; round++) {
        chain_add_all(chains, root, 16, &content, ids);
        for (uint32_t i = 4000; i-- > 0;) {
            chain_evict(chains, ids[i]);
        }
        kvk_index_stats(chains, round == 0 ? &before : &after);
        cr_assert_eq(chains->content_bytes, 0);
    }
    cr_assert_eq(before.bytes, after.bytes, "what is kept for reuse does not grow");
    cr_assert_eq(after.blocks, 0);
}
