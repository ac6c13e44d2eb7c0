/* Copy and hash with AVX2: streaming stores of whole lines. Compiled with -mavx2. */
#include "base/copy_path.h"

#include <immintrin.h>

static bool works(void)
{
    return __builtin_cpu_supports("avx2");
}

static void stream_lines(uint8_t *target, const uint8_t *source, size_t size)
{
    for (size_t at = 0; at < size; at += KVK_COPY_LINE_BYTES) {
        _mm_prefetch((const char *)source + at + KVK_COPY_AHEAD_BYTES, _MM_HINT_T0);
        __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)(source + at));
        __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(source + at + 32));
        _mm256_stream_si256((__m256i *)(void *)(target + at), low);
        _mm256_stream_si256((__m256i *)(void *)(target + at + 32), high);
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

static __m256i half_load(const uint8_t *source)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)source);
}

/* Half a stripe: what it adds to its half of the accumulators. */
static __m256i half_add(__m256i sum, __m256i data, __m256i key)
{
    __m256i keyed = _mm256_xor_si256(data, key);
    __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
    __m256i swapped = _mm256_shuffle_epi32(data, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(sum, _mm256_add_epi64(product, swapped));
}

static void stripes_copy(XXH64_hash_t accumulators[8], const uint8_t *secret,
                         const uint8_t *stripes, uint8_t *target, const uint8_t *lines,
                         size_t count)
{
    __m256i *sums = (__m256i *)(void *)accumulators;
    __m256i low = _mm256_load_si256(sums);
    __m256i high = _mm256_load_si256(sums + 1);
    for (size_t i = 0; i < count; i++) {
        size_t at = i * KVK_COPY_LINE_BYTES;
        __m256i *line = (__m256i *)(void *)(target + at);
        _mm_prefetch((const char *)lines + at + KVK_COPY_AHEAD_BYTES, _MM_HINT_T0);
        _mm256_stream_si256(line, half_load(lines + at));
        _mm256_stream_si256(line + 1, half_load(lines + at + 32));
        low = half_add(low, half_load(stripes + at), half_load(secret + 8 * i));
        high = half_add(high, half_load(stripes + at + 32), half_load(secret + 8 * i + 32));
    }
    _mm256_store_si256(sums, low);
    _mm256_store_si256(sums + 1, high);
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

const struct kvk_copy_path kvk_copy_path_avx2 = {
    .name = "avx2",
    .works = works,
    .copy = copy,
    .add = add,
    .add_copy = add_copy,
    .hash = hash,
};
