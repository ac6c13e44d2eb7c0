/* Copy and hash with AVX-512: streaming stores of whole lines. Compiled with -mavx512f. */
#include "base/copy_path.h"

#include <immintrin.h>

static bool works(void)
{
    return __builtin_cpu_supports("avx512f");
}

static void stream_lines(uint8_t *target, const uint8_t *source, size_t size)
{
    for (size_t at = 0; at < size; at += KVK_COPY_LINE_BYTES) {
        _mm_prefetch((const char *)source + at + KVK_COPY_AHEAD_BYTES, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)(void *)(target + at),
                            _mm512_loadu_si512((const void *)(source + at)));
    }
}

static void copy(uint8_t *target, const uint8_t *source, size_t size)
{
    kvk_copy_whole(target, source, size, stream_lines);
    _mm_sfence(); /* streaming stores are ordered by nothing else */
}

static void add(XXH3_state_t *state, const uint8_t *source, size_t size)
{
    kvk_copy_hash_add(state, source, size);
}

static void stripes_copy(XXH64_hash_t accumulators[8], const uint8_t *secret,
                         const uint8_t *stripes, uint8_t *target, const uint8_t *lines,
                         size_t count)
{
    __m512i sum = _mm512_load_si512(accumulators);
    for (size_t i = 0; i < count; i++) {
        size_t at = i * KVK_COPY_LINE_BYTES;
        _mm_prefetch((const char *)lines + at + KVK_COPY_AHEAD_BYTES, _MM_HINT_T0);
        _mm512_stream_si512((__m512i *)(void *)(target + at),
                            _mm512_loadu_si512((const void *)(lines + at)));
        __m512i data = _mm512_loadu_si512((const void *)(stripes + at));
        __m512i keyed = _mm512_xor_si512(data, _mm512_loadu_si512((const void *)(secret + 8 * i)));
        __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
        __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_BADC);
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
    }
    _mm512_store_si512(accumulators, sum);
}

static void add_copy(XXH3_state_t *state, uint8_t *target, const uint8_t *source, size_t size)
{
    kvk_copy_add_copy(state, target, source, size, stripes_copy);
    _mm_sfence(); /* streaming stores are ordered by nothing else */
}

static uint64_t hash(const uint8_t *source, size_t size)
{
    return XXH3_64bits(source, size);
}

const struct kvk_copy_path kvk_copy_path_avx512 = {
    .name = "avx512",
    .works = works,
    .copy = copy,
    .add = add,
    .add_copy = add_copy,
    .hash = hash,
};
