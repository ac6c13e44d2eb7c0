/* Chain keys and content bytes: the same input gives the same bytes, another input others. */
#include <criterion/criterion.h>
#include <string.h>

#include "base/random.h"
#include "index/content.h"
#include "index/key.h"

static const uint8_t secret_a[KVK_SECRET_SIZE] = {1, 2, 3};
static const uint8_t secret_b[KVK_SECRET_SIZE] = {1, 2, 4};

static struct kvk_key root_of(const struct kvk_hasher *hasher, const char *identity, uint32_t group,
                              const char *salt)
{
    return kvk_key_root(hasher, (const uint8_t *)identity, strlen(identity), group,
                        (const uint8_t *)salt, strlen(salt));
}

/* Keys are stored and must be found again by the next version: these bytes are part of it. */
Test(index_key, keys_are_stable)
{
    struct kvk_hasher hasher;
    kvk_hasher_init(&hasher, secret_a);
    struct kvk_key root = root_of(&hasher, "model", 1, "salt");
    const uint32_t tokens[4] = {1, 2, 3, 4};
    struct kvk_key block = kvk_key_block(&hasher, root, tokens, 4, NULL, 0);
    cr_assert_eq(root.low, UINT64_C(0xf5cac24dc206b0ba), "0x%lx", root.low);
    cr_assert_eq(root.high, UINT64_C(0x9e7f1248ceffb4de), "0x%lx", root.high);
    cr_assert_eq(block.low, UINT64_C(0xd0210af9fda2b559), "0x%lx", block.low);
    cr_assert_eq(block.high, UINT64_C(0x40bc9d0d2a851588), "0x%lx", block.high);
}

Test(index_key, every_part_of_a_root_counts)
{
    struct kvk_hasher a;
    struct kvk_hasher b;
    kvk_hasher_init(&a, secret_a);
    kvk_hasher_init(&b, secret_b);
    struct kvk_key key = root_of(&a, "model", 1, "salt");
    cr_assert(kvk_key_equal(key, root_of(&a, "model", 1, "salt")));
    cr_assert_not(kvk_key_equal(key, root_of(&b, "model", 1, "salt")));
    cr_assert_not(kvk_key_equal(key, root_of(&a, "model", 2, "salt")));
    cr_assert_not(kvk_key_equal(key, root_of(&a, "models", 1, "alt")));
    cr_assert_not(kvk_key_equal(key, root_of(&a, "modelsalt", 1, "")));
    cr_assert_not(kvk_key_equal(key, root_of(&a, "", 1, "modelsalt")));
}

Test(index_key, every_part_of_a_block_counts)
{
    struct kvk_hasher hasher;
    kvk_hasher_init(&hasher, secret_a);
    /* Short ones are gathered, long ones are streamed: both sides of the border. */
    for (uint32_t count = 1; count <= 300; count = count * 2 + 1) {
        uint32_t tokens[300];
        uint8_t extra[64] = {0};
        for (uint32_t i = 0; i < count; i++) {
            tokens[i] = i;
        }
        const struct kvk_key parent = {5, 6};
        struct kvk_key key = kvk_key_block(&hasher, parent, tokens, count, extra, 10);
        cr_assert(kvk_key_equal(key, kvk_key_block(&hasher, parent, tokens, count, extra, 10)));
        cr_assert_not(kvk_key_equal(key, kvk_key_block(&hasher, parent, tokens, count, extra, 11)));
        cr_assert_not(kvk_key_equal(key, kvk_key_block(&hasher, parent, tokens, count, NULL, 0)));
        const struct kvk_key other = {5, 7};
        cr_assert_not(kvk_key_equal(key, kvk_key_block(&hasher, other, tokens, count, extra, 10)));
        tokens[count - 1] ^= 1U << 31;
        cr_assert_not(kvk_key_equal(key, kvk_key_block(&hasher, parent, tokens, count, extra, 10)));
        tokens[count - 1] ^= 1U << 31;
        extra[9] = 1;
        cr_assert_not(kvk_key_equal(key, kvk_key_block(&hasher, parent, tokens, count, extra, 10)));
    }
}

Test(index_key, the_secret_is_spread_over_all_of_the_hash_secret)
{
    struct kvk_hasher a;
    struct kvk_hasher b;
    kvk_hasher_init(&a, secret_a);
    kvk_hasher_init(&b, secret_b);
    for (size_t at = 0; at < KVK_HASH_SECRET_SIZE; at += 16) {
        cr_assert_neq(memcmp(a.secret + at, b.secret + at, 16), 0);
    }
}

/* ---- Content bytes ---- */

static struct kvk_content_span span_make(uint64_t first, uint64_t count, uint8_t digest)
{
    struct kvk_content_span span = {.first = first, .count = count, .digest_size = 16};
    memset(span.digest, digest, span.digest_size);
    return span;
}

Test(index_key, content_bytes_of_a_block)
{
    const struct kvk_content_span spans[] = {span_make(2, 3, 0xaa), span_make(6, 6, 0xbb)};
    const struct kvk_content content = {.spans = spans, .span_count = 2};
    uint8_t bytes[4 * KVK_CONTENT_SPAN_SIZE_MAX];
    cr_assert_eq(kvk_content_size_max(4), sizeof(bytes));
    const size_t one = 1 + 4 + 16 + 8 + 4 + 4;
    cr_assert_eq(kvk_content_bytes(&content, 0, 4, bytes), one);
    cr_assert_eq(bytes[0], KVK_CONTENT_TAG);
    static const uint8_t numbers_0[16] = {0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0};
    cr_assert_arr_eq(bytes + 21, numbers_0, 16);

    cr_assert_eq(kvk_content_bytes(&content, 4, 4, bytes), 2 * one, "two spans touch it");
    static const uint8_t numbers_1[16] = {2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0};
    static const uint8_t numbers_2[16] = {0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0};
    cr_assert_arr_eq(bytes + 21, numbers_1, 16);
    cr_assert_arr_eq(bytes + one + 21, numbers_2, 16);

    cr_assert_eq(kvk_content_bytes(&content, 8, 4, bytes), one);
    static const uint8_t numbers_3[16] = {2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0};
    cr_assert_arr_eq(bytes + 21, numbers_3, 16);
    cr_assert_eq(kvk_content_bytes(&content, 12, 4, bytes), 0);
}

Test(index_key, content_bytes_fill_no_more_than_promised)
{
    struct kvk_content_span spans[8];
    for (uint32_t i = 0; i < 8; i++) {
        spans[i] = span_make(i, 1, (uint8_t)i);
        spans[i].digest_size = KVK_DIGEST_SIZE_MAX;
    }
    const struct kvk_content content = {.spans = spans, .span_count = 8};
    uint8_t bytes[8 * KVK_CONTENT_SPAN_SIZE_MAX];
    cr_assert_eq(kvk_content_bytes(&content, 0, 8, bytes), sizeof(bytes));
}

/* What a token stands for: which content, and where in it. */
struct meaning {
    uint8_t digest; /* 0: nothing */
    uint64_t offset;
};

static void meaning_fill(const struct kvk_content_span *spans, uint32_t count, uint64_t position,
                         struct meaning meaning[4])
{
    for (uint64_t i = 0; i < 4; i++) {
        meaning[i] = (struct meaning){0};
        for (uint32_t s = 0; s < count; s++) {
            uint64_t at = position + i;
            if (at >= spans[s].first && at < spans[s].first + spans[s].count) {
                meaning[i].digest = spans[s].digest[0];
                meaning[i].offset = at - spans[s].first;
            }
        }
    }
}

/* Bytes are equal exactly where every token stands for the same part of the same content. */
Test(index_key, content_bytes_mean_what_tokens_stand_for)
{
    struct kvk_random random;
    kvk_random_init(&random, 3);
    uint32_t equal_count = 0;
    for (int round = 0; round < 200000; round++) {
        struct kvk_content_span spans[2][4];
        struct kvk_content content[2];
        struct meaning meaning[2][4];
        uint8_t bytes[2][4 * KVK_CONTENT_SPAN_SIZE_MAX];
        size_t size[2];
        for (int side = 0; side < 2; side++) {
            uint32_t count = 0;
            for (uint64_t at = kvk_random_below(&random, 4); at < 12 && count < 4;) {
                uint64_t length = kvk_random_between(&random, 1, 5);
                uint8_t digest = (uint8_t)kvk_random_between(&random, 1, 2);
                spans[side][count++] = span_make(at, length, digest);
                at += length + kvk_random_below(&random, 3);
            }
            content[side] = (struct kvk_content){.spans = spans[side], .span_count = count};
            uint64_t position = 4 * kvk_random_below(&random, 3);
            meaning_fill(spans[side], count, position, meaning[side]);
            size[side] = kvk_content_bytes(&content[side], position, 4, bytes[side]);
        }
        bool same = true;
        for (int i = 0; i < 4; i++) {
            same = same && meaning[0][i].digest == meaning[1][i].digest &&
                   meaning[0][i].offset == meaning[1][i].offset;
        }
        bool same_bytes = size[0] == size[1] && memcmp(bytes[0], bytes[1], size[0]) == 0;
        cr_assert_eq(same, same_bytes);
        equal_count += same;
    }
    cr_assert_gt(equal_count, 1000, "the random spans must meet");
}
