/*
 * Where a prompt leaves a chain within a block: the child that goes along with it the longest.
 *
 * A hash of a whole block finds no part of one, so the children are looked at one after the other,
 * the newest first, and their tokens compared. How many, and how many bytes of them, is bounded:
 * behind a system prompt there may be thousands.
 */
#include <string.h>

#include "base/assert.h"
#include "base/bytes.h"
#include "index/content.h"
#include "index/internal.h"

/* ---- Content ---- */

/* One span of canonical content bytes: see index/content.h. */
struct span {
    const uint8_t *bytes;
    size_t size; /* 0: there is no further one */
    uint32_t first;
    uint32_t end;
};

static struct span span_at(const uint8_t *bytes, size_t size)
{
    const size_t head = 1 + sizeof(uint32_t);
    const size_t tail = sizeof(uint64_t) + 2 * sizeof(uint32_t);
    if (size == 0) {
        return (struct span){.first = UINT32_MAX, .end = UINT32_MAX};
    }
    KVK_ASSERT(size >= head + tail && bytes[0] == KVK_CONTENT_TAG);
    uint32_t digest_size = kvk_load_le32(bytes + 1);
    KVK_ASSERT(digest_size <= size - head - tail);
    const uint8_t *range = bytes + head + digest_size + sizeof(uint64_t);
    return (struct span){
        .bytes = bytes,
        .size = head + digest_size + tail,
        .first = kvk_load_le32(range),
        .end = kvk_load_le32(range + sizeof(uint32_t)),
    };
}

/* Of `tokens` tokens that are equal, those that also stand for the same: up to the first span that
 * is not in both, or that is not whole among them. */
static uint32_t tokens_meant(const uint8_t *a, size_t a_size, const uint8_t *b, size_t b_size,
                             uint32_t tokens)
{
    for (;;) {
        struct span span = span_at(a, a_size);
        struct span other = span_at(b, b_size);
        uint32_t first = span.first < other.first ? span.first : other.first;
        if (first >= tokens) {
            return tokens;
        }
        if (span.end > tokens || span.size != other.size ||
            memcmp(span.bytes, other.bytes, span.size) != 0) {
            return first;
        }
        a += span.size;
        a_size -= span.size;
        b += span.size;
        b_size -= span.size;
    }
}

/* ---- Children ---- */

static uint32_t tokens_equal(const uint32_t *a, const uint32_t *b, uint32_t count)
{
    uint32_t equal = 0;
    while (equal < count && a[equal] == b[equal]) {
        equal++;
    }
    return equal;
}

void kvk_index_match_part(const struct kvk_index *index, const struct kvk_content *content,
                          const struct kvk_cursor *cursor, uint8_t tier_mask,
                          struct kvk_partial *partial)
{
    const struct kvk_root *root = kvk_root_at(index, cursor->root);
    uint64_t position = cursor->blocks * root->block_tokens;
    KVK_ASSERT(root->hasher != NULL);
    KVK_ASSERT(position >= content->first);
    KVK_ASSERT(position - content->first <= content->token_count);
    const uint32_t *asked = content->tokens + (position - content->first);
    uint64_t left = content->token_count - (position - content->first);
    uint32_t limit = left < root->block_tokens ? (uint32_t)left : root->block_tokens - 1;
    size_t extra_size = kvk_content_bytes(content, position, root->block_tokens, index->scratch);
    *partial = (struct kvk_partial){.block = KVK_BLOCK_NONE};
    uint32_t child = kvk_index_first_child(index, cursor->root, cursor->block);
    for (; child != KVK_BLOCK_NONE && partial->tokens < limit &&
           partial->looked < KVK_PARTIAL_CHILDREN_MAX &&
           partial->compared_bytes < KVK_PARTIAL_BYTES_MAX;
         child = kvk_index_next_child(index, child)) {
        const struct kvk_block *block = kvk_block_at(index, child);
        const struct kvk_run *run = kvk_run_at(index, block->run);
        const uint32_t *tokens = kvk_run_tokens(run, block->run_offset);
        partial->looked++;
        if ((block->tier_mask & tier_mask) == 0 ||
            tokens[partial->tokens] != asked[partial->tokens]) {
            continue; /* nothing to copy, or no more of it than what was found before */
        }
        uint32_t equal = tokens_equal(tokens, asked, limit);
        const struct kvk_extra *extra = kvk_run_extra(run, block->run_offset);
        partial->compared_bytes += (equal + UINT64_C(1)) * sizeof(*tokens);
        if (extra != NULL || extra_size > 0) {
            partial->compared_bytes += extra_size;
            equal =
                tokens_meant(extra == NULL ? NULL : extra->bytes, extra == NULL ? 0 : extra->size,
                             index->scratch, extra_size, equal);
        }
        if (equal > partial->tokens) {
            partial->tokens = equal;
            partial->block = child;
        }
    }
}
