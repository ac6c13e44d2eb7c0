/* Copy and hash with AVX2: streaming stores of whole lines. Compiled with -mavx2. */
#include "base/copy_path.h"

#include <immintrin.h>
#include <string.h>

static bool works(void)
{
    return __builtin_cpu_supports("avx2");
}

/* The target is at the start of a line and the size a multiple of one. Fetches the source one step
 * ahead, which may be past its end: a prefetch of what is not there does nothing. */
static void stream_lines(uint8_t *target, const uint8_t *source, size_t size)
{
    for (size_t at = 0; at < size; at += KVK_COPY_LINE_BYTES) {
        _mm_prefetch((const char *)source + at + KVK_COPY_STEP_BYTES, _MM_HINT_T0);
        __m256i low = _mm256_loadu_si256((const __m256i *)(const void *)(source + at));
        __m256i high = _mm256_loadu_si256((const __m256i *)(const void *)(source + at + 32));
        _mm256_stream_si256((__m256i *)(void *)(target + at), low);
        _mm256_stream_si256((__m256i *)(void *)(target + at + 32), high);
    }
}

static void copy(uint8_t *target, const uint8_t *source, size_t size)
{
    if (size < KVK_COPY_STREAM_BYTES_MIN) {
        memcpy(target, source, size);
        return;
    }
    size_t head = kvk_copy_head_bytes(target, size);
    memcpy(target, source, head);
    size_t body = (size - head) / KVK_COPY_LINE_BYTES * KVK_COPY_LINE_BYTES;
    stream_lines(target + head, source + head, body);
    memcpy(target + head + body, source + head + body, size - head - body);
    _mm_sfence(); /* streaming stores are ordered by nothing else */
}

static void add(XXH3_state_t *state, const uint8_t *source, size_t size)
{
    kvk_copy_hash_add(state, source, size);
}

static void add_copy(XXH3_state_t *state, uint8_t *target, const uint8_t *source, size_t size)
{
    if (size < KVK_COPY_STREAM_BYTES_MIN) {
        kvk_copy_hash_add(state, source, size);
        memcpy(target, source, size);
        return;
    }
    size_t head = kvk_copy_head_bytes(target, size);
    kvk_copy_hash_add(state, source, head);
    memcpy(target, source, head);
    size_t done = head;
    while (size - done >= KVK_COPY_STEP_BYTES) {
        kvk_copy_hash_add(state, source + done, KVK_COPY_STEP_BYTES);
        stream_lines(target + done, source + done, KVK_COPY_STEP_BYTES);
        done += KVK_COPY_STEP_BYTES;
    }
    kvk_copy_hash_add(state, source + done, size - done);
    memcpy(target + done, source + done, size - done);
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
