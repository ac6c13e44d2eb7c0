/*
 * One way to copy and hash: a table of functions, one file per instruction set, each compiled for
 * it alone. Private to base/copy*.c.
 *
 * The hashing comes from xxhash.h, inlined into each of these files, since its vector code is
 * chosen at compile time. Its streaming state is the same in all of them.
 */
#ifndef KVK_BASE_COPY_PATH_H
#define KVK_BASE_COPY_PATH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#define KVK_COPY_LINE_BYTES 64U
/* How far ahead of a copy its source is fetched. */
#define KVK_COPY_AHEAD_BYTES 1024U
/* Below this the stores of one piece are too few to be worth going past the caches. */
#define KVK_COPY_STREAM_BYTES_MIN 8192U

struct kvk_copy_path {
    const char *name;
    bool (*works)(void); /* on this processor */
    void (*copy)(uint8_t *target, const uint8_t *source, size_t size);
    void (*add)(XXH3_state_t *state, const uint8_t *source, size_t size);
    void (*add_copy)(XXH3_state_t *state, uint8_t *target, const uint8_t *source, size_t size);
    uint64_t (*hash)(const uint8_t *source, size_t size);
};

extern const struct kvk_copy_path kvk_copy_path_plain;
extern const struct kvk_copy_path kvk_copy_path_avx2;
extern const struct kvk_copy_path kvk_copy_path_avx512;

/* Bytes until `target` is at the start of a line; at most `size`. */
static inline size_t kvk_copy_head_bytes(const uint8_t *target, size_t size)
{
    size_t head = (size_t)(-(uintptr_t)target % KVK_COPY_LINE_BYTES);
    return head < size ? head : size;
}

/* Copy past the caches: the target is at the start of a line and the size a multiple of one.
 * Fetches the source ahead, which may be past its end: a prefetch of what is not there does
 * nothing. */
typedef void (*kvk_copy_lines)(uint8_t *target, const uint8_t *source, size_t size);

/* Copy: whole lines past the caches, where there are enough of them. The caller fences. */
static inline void kvk_copy_whole(uint8_t *target, const uint8_t *source, size_t size,
                                  kvk_copy_lines run)
{
    if (size < KVK_COPY_STREAM_BYTES_MIN) {
        memcpy(target, source, size);
        return;
    }
    size_t head = kvk_copy_head_bytes(target, size);
    size_t body = (size - head) / KVK_COPY_LINE_BYTES * KVK_COPY_LINE_BYTES;
    memcpy(target, source, head);
    run(target + head, source + head, body);
    memcpy(target + head + body, source + head + body, size - head - body);
}

/* XXH3's own functions report misuse only (a null pointer), which these callers exclude. */
static inline void kvk_copy_hash_add(XXH3_state_t *state, const uint8_t *source, size_t size)
{
    (void)XXH3_64bits_update(state, source, size);
}

/*
 * Hashing and copying in one loop. The library's own update would read everything a second time,
 * and while it computes no store is under way; in one loop the hash costs what the memory leaves
 * idle. So the state is advanced here, by XXH3's published algorithm, in stripes of 64 bytes: each
 * is added to the accumulators under the next 8 bytes of the secret, and after every 16 the
 * accumulators are scrambled. What an update leaves in the state's buffer stays the library's
 * business: it begins and ends every piece.
 */
#define KVK_COPY_BLOCK_STRIPES 16U

_Static_assert(XXH_VERSION_MAJOR == 0 && XXH_VERSION_MINOR == 8, "the layout of its state");
_Static_assert(XXH_STRIPE_LEN == KVK_COPY_LINE_BYTES, "a stripe is a line");

/* Add `count` stripes from `stripes` to the accumulators, the first under the secret at `secret`;
 * store `count` lines from `lines` to `target`, which is at the start of one. */
typedef void (*kvk_copy_stripes)(XXH64_hash_t accumulators[8], const uint8_t *secret,
                                 const uint8_t *stripes, uint8_t *target, const uint8_t *lines,
                                 size_t count);

static inline void kvk_copy_scramble(XXH64_hash_t accumulators[8], const uint8_t *secret)
{
    for (size_t i = 0; i < 8; i++) {
        XXH64_hash_t key = XXH_readLE64(secret + 8 * i);
        XXH64_hash_t mixed = accumulators[i] ^ accumulators[i] >> 47 ^ key;
        accumulators[i] = mixed * XXH_PRIME32_1;
    }
}

/* `count` stripes and as many lines; what is left of a block of stripes comes first. */
static inline void kvk_copy_fused(XXH3_state_t *state, const uint8_t *stripes, uint8_t *target,
                                  const uint8_t *lines, size_t count, kvk_copy_stripes run)
{
    const uint8_t *secret = state->extSecret == NULL ? state->customSecret : state->extSecret;
    while (count > 0) {
        size_t room = KVK_COPY_BLOCK_STRIPES - state->nbStripesSoFar;
        size_t now = count < room ? count : room;
        run(state->acc, secret + 8 * state->nbStripesSoFar, stripes, target, lines, now);
        state->nbStripesSoFar += now;
        if (state->nbStripesSoFar == KVK_COPY_BLOCK_STRIPES) {
            kvk_copy_scramble(state->acc, secret + state->secretLimit);
            state->nbStripesSoFar = 0;
        }
        stripes += now * KVK_COPY_LINE_BYTES;
        lines += now * KVK_COPY_LINE_BYTES;
        target += now * KVK_COPY_LINE_BYTES;
        count -= now;
    }
}

/*
 * Add and copy a piece. In one of at least KVK_COPY_STREAM_BYTES_MIN, lines begin where the
 * target's do, stripes where the state's buffer ends: each has its own beginning, and the two
 * advance together. The caller fences the streaming stores.
 */
static inline void kvk_copy_add_copy(XXH3_state_t *state, uint8_t *target, const uint8_t *source,
                                     size_t size, kvk_copy_stripes run)
{
    if (size < KVK_COPY_STREAM_BYTES_MIN) {
        kvk_copy_hash_add(state, source, size);
        memcpy(target, source, size);
        return;
    }
    size_t head = kvk_copy_head_bytes(target, size);
    size_t fill = 0;     /* bytes that complete the buffer */
    size_t buffered = 0; /* stripes in it */
    memcpy(target, source, head);
    if (state->bufferedSize > 0) {
        fill = XXH3_INTERNALBUFFER_SIZE - state->bufferedSize;
        buffered = XXH3_INTERNALBUFFER_SIZE / XXH_STRIPE_LEN;
        kvk_copy_hash_add(state, source, fill);
        kvk_copy_fused(state, state->buffer, target + head, source + head, buffered, run);
    }
    size_t copied = head + buffered * KVK_COPY_LINE_BYTES;
    /* An update never takes the last byte: the digest ends with a stripe of its own. */
    size_t stripes = (size - fill - 1) / XXH_STRIPE_LEN;
    size_t lines = (size - copied) / KVK_COPY_LINE_BYTES;
    size_t count = stripes < lines ? stripes : lines;
    kvk_copy_fused(state, source + fill, target + copied, source + copied, count, run);
    copied += count * KVK_COPY_LINE_BYTES;
    size_t added = fill + count * XXH_STRIPE_LEN;

    /* Its buffer is empty now, and ends with the last stripe taken, as its own update leaves it. */
    memcpy(state->buffer + XXH3_INTERNALBUFFER_SIZE - XXH_STRIPE_LEN,
           source + added - XXH_STRIPE_LEN, XXH_STRIPE_LEN);
    state->bufferedSize = 0;
    state->totalLen += count * XXH_STRIPE_LEN;
    kvk_copy_hash_add(state, source + added, size - added);
    memcpy(target + copied, source + copied, size - copied);
}

#endif
