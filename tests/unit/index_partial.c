/* Where a prompt leaves the chain within a block: against a plain reference, and within bounds. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/random.h"
#include "tests/index_chain.h"

#define BLOCK_TOKENS 8
#define CHILDREN 24
#define PROMPT_TOKENS (2 * BLOCK_TOKENS)

/* A prompt of one whole block, always the same, and what comes then. */
struct told {
    uint32_t tokens[PROMPT_TOKENS];
    struct kvk_content_span spans[PROMPT_TOKENS];
    uint32_t span_count;
    uint64_t token_count;
    uint32_t block; /* of the second block, where it is indexed */
    bool has_bytes;
};

static struct kvk_content content_of(const struct told *told)
{
    return (struct kvk_content){
        .tokens = told->tokens,
        .token_count = told->token_count,
        .spans = told->spans,
        .span_count = told->span_count,
    };
}

/* The first block's tokens are 0, and a span there is the same for all, or reaches over its end.
 */
static void told_pick(struct kvk_random *random, struct told *told, uint64_t token_count)
{
    memset(told, 0, sizeof(*told));
    told->token_count = token_count;
    for (uint32_t i = BLOCK_TOKENS; i < token_count; i++) {
        told->tokens[i] = kvk_random_below(random, 6) == 0 ? 1 : 0;
    }
    uint64_t at = kvk_random_below(random, 3) == 0 ? BLOCK_TOKENS : BLOCK_TOKENS - 2;
    if (kvk_random_below(random, 2) == 0) {
        at = token_count; /* no spans */
    }
    while (at < token_count) {
        struct kvk_content_span *span = &told->spans[told->span_count++];
        span->first = at;
        span->count = at < BLOCK_TOKENS ? 4 : 1 + kvk_random_below(random, 4);
        span->count = span->count > token_count - at ? token_count - at : span->count;
        span->digest_size = 4 + (uint32_t)kvk_random_below(random, 2);
        /* What reaches over from the first block is of one content, or the parent would differ. */
        span->digest[0] = at < BLOCK_TOKENS ? 9 : (uint8_t)kvk_random_below(random, 2);
        span->digest_size = at < BLOCK_TOKENS ? 4 : span->digest_size;
        at += span->count + kvk_random_below(random, 3);
    }
}

/* The span that a token is in; NULL: none. */
static const struct kvk_content_span *span_of(const struct told *told, uint64_t token)
{
    for (uint32_t i = 0; i < told->span_count; i++) {
        const struct kvk_content_span *span = &told->spans[i];
        if (token >= span->first && token < span->first + span->count) {
            return span;
        }
    }
    return NULL;
}

/* Do both say the same of a token, with all of its span before `end`? */
static bool token_is(const struct told *a, const struct told *b, uint64_t token, uint64_t end)
{
    const struct kvk_content_span *span = span_of(a, token);
    const struct kvk_content_span *other = span_of(b, token);
    if (a->tokens[token] != b->tokens[token] || (span == NULL) != (other == NULL)) {
        return false;
    }
    return span == NULL ||
           (span->first == other->first && span->count == other->count &&
            span->first + span->count <= end && span->digest_size == other->digest_size &&
            memcmp(span->digest, other->digest, span->digest_size) == 0);
}

/* The most tokens behind the first block that both say, by trying all lengths. */
static uint32_t reference(const struct told *known, const struct told *asked)
{
    uint64_t limit = asked->token_count - BLOCK_TOKENS;
    limit = limit < BLOCK_TOKENS ? limit : BLOCK_TOKENS - 1;
    for (uint64_t count = limit; count > 0; count--) {
        bool all = true;
        for (uint64_t t = 0; t < count && all; t++) {
            all = token_is(known, asked, BLOCK_TOKENS + t, BLOCK_TOKENS + count);
        }
        if (all) {
            return (uint32_t)count;
        }
    }
    return 0;
}

static bool parent_is(const struct told *a, const struct told *b)
{
    for (uint64_t t = 0; t < BLOCK_TOKENS; t++) {
        const struct kvk_content_span *span = span_of(a, t);
        const struct kvk_content_span *other = span_of(b, t);
        if ((span == NULL) != (other == NULL)) {
            return false;
        }
    }
    return true;
}

/* Put the two blocks of `told` into the index; KVK_BLOCK_NONE: the second was there already. */
static uint32_t insert(struct kvk_index *index, uint32_t root, const struct told *told,
                       uint8_t tier_mask, struct kvk_cursor *behind_first)
{
    struct kvk_cursor cursor = {.root = root, .block = KVK_BLOCK_NONE};
    struct kvk_content content = content_of(told);
    uint32_t ids[2] = {KVK_BLOCK_NONE, KVK_BLOCK_NONE};
    for (uint32_t b = 0; b < 2; b++) {
        uint32_t winner;
        uint32_t id = chain_block(index, b == 0 ? CHAIN_ON_DEVICE : tier_mask);
        cr_assert_neq(id, KVK_BLOCK_NONE);
        enum kvk_status status = kvk_index_insert(index, &cursor, &content, id, &winner);
        if (status == KVK_EXISTS) {
            chain_discard(index, id);
        } else {
            cr_assert_eq(status, KVK_OK);
            kvk_block_step(kvk_index_block(index, id), KVK_BLOCK_RELEASE);
            ids[b] = id;
        }
        if (b == 0) {
            *behind_first = cursor;
        }
    }
    return ids[1];
}

/* What is known, and where the chains stand behind the first block: it is another where a span
 * reaches over its end ([1]). */
struct known {
    struct told told[CHILDREN];
    uint32_t count;
    struct kvk_cursor behind[2];
    bool has_behind[2];
};

static bool reaches_over(const struct told *told)
{
    return span_of(told, BLOCK_TOKENS - 1) != NULL;
}

static void known_make(struct kvk_random *random, struct kvk_index *index, uint32_t root,
                       struct known *known)
{
    *known = (struct known){.count = 0};
    for (uint32_t i = 0; i < CHILDREN; i++) {
        struct told *told = &known->told[known->count];
        told_pick(random, told, PROMPT_TOKENS);
        bool over = reaches_over(told);
        /* Some have no bytes where they are asked for. */
        told->has_bytes = kvk_random_below(random, 4) != 0;
        told->block =
            insert(index, root, told, told->has_bytes ? CHAIN_ON_DEVICE : 1U << KVK_TIER_DISK,
                   &known->behind[over]);
        known->has_behind[over] = true;
        known->count += told->block != KVK_BLOCK_NONE ? 1 : 0;
    }
}

static uint32_t most_of(const struct known *known, const struct told *asked)
{
    uint32_t most = 0;
    for (uint32_t i = 0; i < known->count; i++) {
        const struct told *told = &known->told[i];
        uint32_t count = told->has_bytes && parent_is(told, asked) ? reference(told, asked) : 0;
        most = count > most ? count : most;
    }
    return most;
}

static void ask(struct kvk_random *random, const struct kvk_index *index, const struct known *known)
{
    struct told asked;
    struct kvk_partial partial;
    told_pick(random, &asked, BLOCK_TOKENS + kvk_random_below(random, BLOCK_TOKENS + 1));
    bool over = reaches_over(&asked);
    if (!known->has_behind[over]) {
        return;
    }
    uint32_t most = most_of(known, &asked);
    struct kvk_content content = content_of(&asked);
    kvk_index_match_part(index, &content, &known->behind[over], KVK_MEMORY_TIER_MASK, &partial);
    cr_assert_eq(partial.tokens, most, "%u tokens, not %u", partial.tokens, most);
    cr_assert_eq(partial.block == KVK_BLOCK_NONE, most == 0);
    for (uint32_t i = 0; i < known->count && most > 0; i++) {
        if (known->told[i].block == partial.block) {
            cr_assert_eq(reference(&known->told[i], &asked), most);
        }
    }
}

Test(index_partial, as_the_reference_says)
{
    const uint8_t secret[KVK_SECRET_SIZE] = {7};
    struct kvk_hasher hasher;
    struct kvk_random random;
    kvk_random_init(&random, 5);
    kvk_hasher_init(&hasher, secret);
    for (uint32_t i = 0; i < 600; i++) {
        struct kvk_index *index = chain_index(4 * CHILDREN, 1);
        struct known known;
        known_make(&random, index, chain_root(index, &hasher, "m", BLOCK_TOKENS), &known);
        for (uint32_t round = 0; round < 40; round++) {
            ask(&random, index, &known);
        }
        kvk_index_destroy(index);
    }
}

/* Thousands of children: a bounded number of them is looked at, the newest first. */
Test(index_partial, bounded)
{
    const uint8_t secret[KVK_SECRET_SIZE] = {7};
    struct kvk_hasher hasher;
    kvk_hasher_init(&hasher, secret);
    struct kvk_index *index = chain_index(8192, 1);
    uint32_t root = chain_root(index, &hasher, "m", BLOCK_TOKENS);
    struct kvk_cursor cursor;
    struct told told = {.token_count = PROMPT_TOKENS};
    for (uint32_t i = 0; i < 2000; i++) {
        told.tokens[BLOCK_TOKENS] = i;
        (void)insert(index, root, &told, CHAIN_ON_DEVICE, &cursor);
    }
    struct kvk_partial partial;
    struct kvk_content content = content_of(&told);
    told.tokens[PROMPT_TOKENS - 1] = 1; /* but for the last token the newest of all */
    kvk_index_match_part(index, &content, &cursor, KVK_MEMORY_TIER_MASK, &partial);
    cr_expect_eq(partial.tokens, BLOCK_TOKENS - 1);
    cr_expect_leq(partial.looked, 2U); /* its own run goes on with the oldest */
    told.tokens[BLOCK_TOKENS] = 100;   /* too old */
    kvk_index_match_part(index, &content, &cursor, KVK_MEMORY_TIER_MASK, &partial);
    cr_expect_eq(partial.tokens, 0U);
    cr_expect_eq(partial.looked, (uint32_t)KVK_PARTIAL_CHILDREN_MAX);
    kvk_index_destroy(index);
}

/* Long blocks that are alike for long: what is compared is bounded too. */
Test(index_partial, bounded_bytes)
{
    enum { LONG = 4096 };
    static uint32_t tokens[LONG];
    const uint8_t secret[KVK_SECRET_SIZE] = {7};
    struct kvk_hasher hasher;
    kvk_hasher_init(&hasher, secret);
    struct kvk_index *index = chain_index(256, 1);
    uint32_t root = chain_root(index, &hasher, "m", LONG);
    struct kvk_content content = {.tokens = tokens, .token_count = LONG};
    for (uint32_t i = 0; i < 40; i++) {
        struct kvk_cursor cursor = {.root = root, .block = KVK_BLOCK_NONE};
        uint32_t winner;
        uint32_t id = chain_block(index, CHAIN_ON_DEVICE);
        tokens[4000 - i] = 1; /* each is alike for longer than the one before it, looked at after */
        cr_assert_eq(kvk_index_insert(index, &cursor, &content, id, &winner), KVK_OK);
        tokens[4000 - i] = 0;
    }
    const struct kvk_cursor start = {.root = root, .block = KVK_BLOCK_NONE};
    struct kvk_partial partial;
    kvk_index_match_part(index, &content, &start, KVK_MEMORY_TIER_MASK, &partial);
    cr_expect_gt(partial.tokens, 3900U);
    cr_expect_leq(partial.compared_bytes,
                  KVK_PARTIAL_BYTES_MAX + (LONG + UINT64_C(1)) * sizeof(uint32_t));
    cr_expect_lt(partial.looked, 8U);
    kvk_index_destroy(index);
}
