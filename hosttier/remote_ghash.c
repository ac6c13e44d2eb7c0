/*
 * GHASH by POLYVAL (RFC 8452, appendix A): with blocks turned around and the key multiplied by x,
 * both are the same, and POLYVAL needs no reversal of bits. Sums are kept in four lanes, one for
 * each block of a register; lanes are brought together at the end of each run. Compiled for
 * AVX-512 and VPCLMULQDQ; nothing of it runs before works() was asked.
 */
#include "hosttier/remote_ghash.h"

#include <immintrin.h>
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"

#define BLOCK_SIZE ((size_t)KVK_REMOTE_GHASH_SIZE)
#define GROUP_SIZE (16 * BLOCK_SIZE) /* four registers */

/* powers[]: which of the key's they are. */
enum { POWER_1 = 0, POWER_2, POWER_3, POWER_4, POWER_8, POWER_12 };

bool kvk_remote_ghash_works(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("pclmul");
}

static __m128i load(const uint8_t *bytes)
{
    return _mm_loadu_si128((const __m128i *)(const void *)bytes);
}

static void store(uint8_t *bytes, __m128i value)
{
    _mm_storeu_si128((__m128i *)(void *)bytes, value);
}

/* A block as POLYVAL has it. */
static __m128i turned(__m128i block)
{
    return _mm_shuffle_epi8(block,
                            _mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}

/* Products of two, not reduced: sums of them are reduced once. */
struct product {
    __m512i low, middle, high;
};

static inline struct product multiply(__m512i a, __m512i b)
{
    return (struct product){
        .low = _mm512_clmulepi64_epi128(a, b, 0x00),
        .middle = _mm512_xor_si512(_mm512_clmulepi64_epi128(a, b, 0x01),
                                   _mm512_clmulepi64_epi128(a, b, 0x10)),
        .high = _mm512_clmulepi64_epi128(a, b, 0x11),
    };
}

static inline void add_product(struct product *to, __m512i a, __m512i b)
{
    struct product product = multiply(a, b);
    to->low = _mm512_xor_si512(to->low, product.low);
    to->middle = _mm512_xor_si512(to->middle, product.middle);
    to->high = _mm512_xor_si512(to->high, product.high);
}

/* Modulo x^128 + x^127 + x^126 + x^121 + 1, times x^-128: the low half is folded up, 64 bits at a
 * time. */
static inline __m512i reduce(struct product product)
{
    const __m512i polynomial = _mm512_set1_epi64((long long)0xc200000000000000ULL);
    __m512i low = _mm512_xor_si512(product.low, _mm512_bslli_epi128(product.middle, 8));
    __m512i high = _mm512_xor_si512(product.high, _mm512_bsrli_epi128(product.middle, 8));
    for (int i = 0; i < 2; i++) {
        __m512i folded = _mm512_clmulepi64_epi128(low, polynomial, 0x00);
        low = _mm512_xor_si512(_mm512_shuffle_epi32(low, _MM_PERM_BADC), folded);
    }
    return _mm512_xor_si512(high, low);
}

static __m128i times(__m128i a, __m128i b)
{
    return _mm512_castsi512_si128(
        reduce(multiply(_mm512_zextsi128_si512(a), _mm512_zextsi128_si512(b))));
}

void kvk_remote_ghash_begin(struct kvk_remote_ghash *ghash, const uint8_t key[BLOCK_SIZE])
{
    /* Times x: one up, and what falls out is the polynomial's. */
    __m128i turned_key = turned(load(key));
    __m128i carry = _mm_srli_epi64(turned_key, 63);
    __m128i out = _mm_shuffle_epi32(_mm_sub_epi64(_mm_setzero_si128(), carry), 0xee);
    __m128i up = _mm_or_si128(_mm_slli_epi64(turned_key, 1), _mm_slli_si128(carry, 8));
    __m128i polynomial = _mm_set_epi64x((long long)0xc200000000000000ULL, 1);
    __m128i one = _mm_xor_si128(up, _mm_and_si128(out, polynomial));
    __m128i two = times(one, one);
    __m128i four = times(two, two);
    __m128i eight = times(four, four);
    store(ghash->powers[POWER_1], one);
    store(ghash->powers[POWER_2], two);
    store(ghash->powers[POWER_3], times(two, one));
    store(ghash->powers[POWER_4], four);
    store(ghash->powers[POWER_8], eight);
    store(ghash->powers[POWER_12], times(eight, four));
    memset(ghash->sum, 0, sizeof(ghash->sum));
    ghash->part_size = 0;
    ghash->size_bytes = 0;
}

static void block_add(struct kvk_remote_ghash *ghash, const uint8_t *block)
{
    __m128i sum = _mm_xor_si128(load(ghash->sum), turned(load(block)));
    store(ghash->sum, times(sum, load(ghash->powers[POWER_1])));
}

static inline __m512i four_blocks(const uint8_t *bytes)
{
    const __m512i turn =
        _mm512_broadcast_i32x4(_mm_set_epi8(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    return _mm512_shuffle_epi8(_mm512_loadu_si512((const void *)bytes), turn);
}

static inline __m512i in_all_lanes(const uint8_t *power)
{
    return _mm512_broadcast_i32x4(load(power));
}

/* Whole groups. Lanes go four blocks further with each register, so all of them take the same
 * power; only at the end each is short by its own distance from there. */
static void groups_add(struct kvk_remote_ghash *ghash, const uint8_t *bytes, size_t count)
{
    const __m512i by_4 = in_all_lanes(ghash->powers[POWER_4]);
    const __m512i by_8 = in_all_lanes(ghash->powers[POWER_8]);
    const __m512i by_12 = in_all_lanes(ghash->powers[POWER_12]);
    const __m512i by_16 = reduce(multiply(by_8, by_8));
    __m512i lanes = _mm512_zextsi128_si512(load(ghash->sum));
    /* The sum belongs to the first block: with it, the first register is complete. */
    lanes = _mm512_xor_si512(lanes, four_blocks(bytes));
    for (size_t i = 0; i < count; i++, bytes += GROUP_SIZE) {
        bool more = i + 1 < count;
        struct product sum = multiply(lanes, more ? by_16 : by_12);
        add_product(&sum, four_blocks(bytes + 64), more ? by_12 : by_8);
        add_product(&sum, four_blocks(bytes + 128), more ? by_8 : by_4);
        __m512i last = four_blocks(bytes + 192);
        if (more) {
            add_product(&sum, last, by_4);
            lanes = _mm512_xor_si512(reduce(sum), four_blocks(bytes + GROUP_SIZE));
        } else {
            lanes = _mm512_xor_si512(reduce(sum), last);
        }
    }
    __m512i by_place = _mm512_castsi128_si512(load(ghash->powers[POWER_4]));
    by_place = _mm512_inserti32x4(by_place, load(ghash->powers[POWER_3]), 1);
    by_place = _mm512_inserti32x4(by_place, load(ghash->powers[POWER_2]), 2);
    by_place = _mm512_inserti32x4(by_place, load(ghash->powers[POWER_1]), 3);
    lanes = reduce(multiply(lanes, by_place));
    __m128i sum =
        _mm_xor_si128(_mm512_extracti32x4_epi32(lanes, 0), _mm512_extracti32x4_epi32(lanes, 1));
    sum = _mm_xor_si128(sum, _mm512_extracti32x4_epi32(lanes, 2));
    store(ghash->sum, _mm_xor_si128(sum, _mm512_extracti32x4_epi32(lanes, 3)));
}

void kvk_remote_ghash_add(struct kvk_remote_ghash *ghash, const uint8_t *bytes, size_t size)
{
    ghash->size_bytes += size;
    if (ghash->part_size > 0) {
        size_t taken = BLOCK_SIZE - ghash->part_size;
        taken = taken < size ? taken : size;
        memcpy(ghash->part + ghash->part_size, bytes, taken);
        ghash->part_size += (uint32_t)taken;
        bytes += taken;
        size -= taken;
        if (ghash->part_size < BLOCK_SIZE) {
            return;
        }
        block_add(ghash, ghash->part);
        ghash->part_size = 0;
    }
    if (size >= GROUP_SIZE) {
        size_t count = size / GROUP_SIZE;
        groups_add(ghash, bytes, count);
        bytes += count * GROUP_SIZE;
        size -= count * GROUP_SIZE;
    }
    for (; size >= BLOCK_SIZE; bytes += BLOCK_SIZE, size -= BLOCK_SIZE) {
        block_add(ghash, bytes);
    }
    if (size > 0) {
        memcpy(ghash->part, bytes, size);
        ghash->part_size = (uint32_t)size;
    }
}

void kvk_remote_ghash_end(struct kvk_remote_ghash *ghash, uint8_t sum[BLOCK_SIZE])
{
    uint8_t lengths[BLOCK_SIZE] = {0};
    uint64_t bits = ghash->size_bytes * 8;
    if (ghash->part_size > 0) {
        memset(ghash->part + ghash->part_size, 0, BLOCK_SIZE - ghash->part_size);
        block_add(ghash, ghash->part);
    }
    for (int i = 0; i < 8; i++) {
        lengths[i] = (uint8_t)(bits >> (56 - 8 * i));
    }
    block_add(ghash, lengths);
    store(sum, turned(load(ghash->sum)));
}
