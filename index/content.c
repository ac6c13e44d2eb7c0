/* Content spans of a block as canonical bytes. */
#include "index/content.h"

#include <string.h>

#include "base/assert.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "canonical bytes are little-endian");

/* The first span that ends behind `position`; span_count where there is none. */
static uint32_t span_search(const struct kvk_content *content, uint64_t position)
{
    uint32_t low = 0;
    uint32_t high = content->span_count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        const struct kvk_content_span *span = &content->spans[middle];
        if (span->first + span->count > position) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

static uint8_t *bytes_put(uint8_t *bytes, const void *value, size_t size)
{
    memcpy(bytes, value, size);
    return bytes + size;
}

size_t kvk_content_bytes(const struct kvk_content *content, uint64_t position,
                         uint32_t block_tokens, uint8_t *bytes)
{
    if (content->span_count == 0) {
        return 0;
    }
    uint8_t *next = bytes;
    uint64_t end = position + block_tokens;
    for (uint32_t i = span_search(content, position); i < content->span_count; i++) {
        const struct kvk_content_span *span = &content->spans[i];
        if (span->first >= end) {
            break;
        }
        if (span->count == 0) {
            continue;
        }
        KVK_ASSERT(span->digest_size <= KVK_DIGEST_SIZE_MAX);
        uint64_t span_end = span->first + span->count;
        uint64_t begins = span->first < position ? position - span->first : 0;
        uint32_t range_first = span->first > position ? (uint32_t)(span->first - position) : 0;
        uint32_t range_end = span_end < end ? (uint32_t)(span_end - position) : block_tokens;
        *next++ = KVK_CONTENT_TAG;
        next = bytes_put(next, &span->digest_size, sizeof(span->digest_size));
        next = bytes_put(next, span->digest, span->digest_size);
        next = bytes_put(next, &begins, sizeof(begins));
        next = bytes_put(next, &range_first, sizeof(range_first));
        next = bytes_put(next, &range_end, sizeof(range_end));
    }
    return (size_t)(next - bytes);
}
