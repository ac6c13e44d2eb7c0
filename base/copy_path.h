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

#define XXH_INLINE_ALL
#include <xxhash.h>

/* What is hashed, then copied, before the next step: small enough to stay in the first cache. */
#define KVK_COPY_STEP_BYTES 2048U
#define KVK_COPY_LINE_BYTES 64U
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

/* XXH3's own functions report misuse only (a null pointer), which these callers exclude. */
static inline void kvk_copy_hash_add(XXH3_state_t *state, const uint8_t *source, size_t size)
{
    (void)XXH3_64bits_update(state, source, size);
}

#endif
