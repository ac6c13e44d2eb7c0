/*
 * The canonical bytes of the content spans that touch a block: what stands behind its placeholder
 * tokens, in a form that is hashed and compared in full.
 *
 * For every span that touches the block, in order:
 *     u8  tag (KVK_CONTENT_TAG)
 *     u32 digest size, then the digest
 *     u64 where in the span the block begins; 0 where the span begins in the block
 *     u32 first token and u32 end token of the span within the block
 * All numbers are little-endian. Tag and length make two lists of spans that differ give bytes
 * that differ.
 */
#ifndef KVK_INDEX_CONTENT_H
#define KVK_INDEX_CONTENT_H

#include <stddef.h>
#include <stdint.h>

#include "index/key.h"

#define KVK_CONTENT_TAG 0x53
#define KVK_CONTENT_SPAN_SIZE_MAX (1 + 4 + KVK_DIGEST_SIZE_MAX + 8 + 4 + 4)

/* Room for the content bytes of any block: every token a span of its own. */
static inline size_t kvk_content_size_max(uint32_t block_tokens)
{
    return (size_t)block_tokens * KVK_CONTENT_SPAN_SIZE_MAX;
}

/* The content bytes of the block whose first token is at `position` of the prompt, into `bytes`
 * ([kvk_content_size_max()]). Their size; 0 where no span touches the block. */
size_t kvk_content_bytes(const struct kvk_content *content, uint64_t position,
                         uint32_t block_tokens, uint8_t *bytes);

#endif
