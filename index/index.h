/*
 * The index: every block there is, the chains they form, and the longest cached prefix of a prompt.
 *
 * Chains hang from roots, one per space, layer group and salt. A child is found by a keyed hash of
 * its parent's key and its tokens, then confirmed: the parent is that very block, the tokens and
 * the content bytes are equal. Unbranched stretches lie as runs, whose tokens, block ids and tier
 * masks are contiguous: along a run a prompt is followed by comparing tokens, without hashing,
 * probing or touching the blocks. Only where a chain branches is a key computed and the table
 * probed.
 *
 * Everything is bounded: blocks by block_count_max, roots by root_count_max. Tables grow in steps
 * whose work per call is bounded, so that no call stalls under the cache lock.
 *
 * Locking: every function needs the cache lock. No function blocks or does I/O.
 */
#ifndef KVK_INDEX_INDEX_H
#define KVK_INDEX_INDEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "index/block.h"
#include "index/key.h"

struct kvk_index;

#define KVK_ROOT_NONE UINT32_MAX

struct kvk_index_options {
    uint32_t block_count_max; /* indexed, private and hollow ones together */
    uint32_t root_count_max;
};

KVK_CHECKED enum kvk_status kvk_index_create(const struct kvk_index_options *options,
                                             struct kvk_index **index);
void kvk_index_destroy(struct kvk_index *index);

/* ---- Roots ---- */

/* What somebody's roots take, kept up to date by the index. */
struct kvk_index_account {
    uint64_t root_bytes;
    uint32_t root_count;
};

struct kvk_root_options {
    const struct kvk_hasher *hasher; /* borrowed for the root's life: the tenant's */
    const uint8_t *identity;         /* copied; compared in full, so equal keys never mix roots */
    size_t identity_size;
    uint32_t group;
    const uint8_t *salt; /* copied */
    size_t salt_size;
    uint32_t block_tokens;
    bool windowed;                     /* ancestors may lose their bytes before their children do */
    uint64_t user;                     /* the caller's own, see kvk_index_root_user() */
    struct kvk_index_account *account; /* borrowed for the root's life; NULL: nobody counts */
};

/* What it takes, as its account counts it. */
size_t kvk_index_root_size(const struct kvk_root_options *options);

/* Find or make the root; the caller owns one reference. KVK_EXHAUSTED: root_count_max. */
KVK_CHECKED enum kvk_status kvk_index_root_open(struct kvk_index *index,
                                                const struct kvk_root_options *options,
                                                uint32_t *root);
/* The root as it is known, without a reference; KVK_ROOT_NONE: not at all. Makes nothing. */
uint32_t kvk_index_root_find(const struct kvk_index *index, const struct kvk_root_options *options);
void kvk_index_root_hold(struct kvk_index *index, uint32_t root);
uint64_t kvk_index_root_user(const struct kvk_index *index, uint32_t root);
/* Its key, and its salt, which is valid until the root goes. */
struct kvk_key kvk_index_root_own_key(const struct kvk_index *index, uint32_t root);
const uint8_t *kvk_index_root_salt(const struct kvk_index *index, uint32_t root, size_t *salt_size);
bool kvk_index_root_windowed(const struct kvk_index *index, uint32_t root);
/* The key and the salt of a root that is open; the salt is valid as long as the root is. */
struct kvk_key kvk_index_key_of_root(const struct kvk_index *index, uint32_t root);
const uint8_t *kvk_index_salt_of_root(const struct kvk_index *index, uint32_t root,
                                      size_t *salt_size);

/* The highest block id ever handed out, plus 1: for sweeps in slices. Ids that are not in use
 * have state FREE and run UINT32_MAX. */
uint32_t kvk_index_block_id_end(const struct kvk_index *index);

/* Give a reference back. A root without references and blocks goes. */
void kvk_index_root_release(struct kvk_index *index, uint32_t root);

/* ---- Blocks ---- */

/* A FREE, unindexed block of `arena`, or KVK_BLOCK_NONE when block_count_max is reached. */
uint32_t kvk_index_block_alloc(struct kvk_index *index, uint32_t arena);

/* Give back a block that is FREE, not indexed, in no queue. */
void kvk_index_block_free(struct kvk_index *index, uint32_t block);

/* The block itself; its address is fixed for its life. */
struct kvk_block *kvk_index_block(const struct kvk_index *index, uint32_t block);
uint32_t kvk_index_block_count(const struct kvk_index *index);
uint32_t kvk_index_root_of(const struct kvk_index *index, uint32_t block); /* of an indexed one */

/* Set where whole copies lie, in the block and in its run; keeps the parent's memory_children,
 * device_children and disk_children. Returns the parent where one of these counts became 0 or left
 * 0 by this (it may now be a leaf, or no longer be one), or KVK_BLOCK_NONE. A block that is not
 * indexed has no parent: only its own mask is set. */
uint32_t kvk_index_set_tiers(struct kvk_index *index, uint32_t block, uint8_t tier_mask);

/* ---- Finding ---- */

/* Where a walk stands: after `blocks` blocks of the chain of `root`. */
struct kvk_cursor {
    uint32_t root;
    uint32_t block; /* the last one matched; KVK_BLOCK_NONE at the root */
    uint64_t blocks;
};

struct kvk_match {
    struct kvk_cursor cursor; /* in: where to begin; out: behind the last match */
    uint32_t *path;           /* out: block ids, those without bytes too; may be NULL */
    uint8_t *tiers;           /* out: tier mask of each, 0 where hollow; may be NULL */
    uint64_t path_capacity;   /* blocks; the walk ends there */
    uint64_t path_count;      /* out */
    uint64_t hashed_bytes;    /* out: bytes hashed by this walk, for the linearity test */
};

/*
 * Follow `content` (whole blocks of it; content->first must be where the cursor stands) along the
 * chain as far as blocks are known. Changes nothing in the index.
 */
void kvk_index_match(const struct kvk_index *index, const struct kvk_content *content,
                     struct kvk_match *match);

/* What one call of kvk_index_match_part() looks at, at most: some microseconds. */
#define KVK_PARTIAL_CHILDREN_MAX 64
#define KVK_PARTIAL_BYTES_MAX (UINT64_C(64) << 10) /* compared; one child more may pass it */

struct kvk_partial {
    uint32_t block;          /* KVK_BLOCK_NONE: none */
    uint32_t tokens;         /* of its first ones, 1 to block_tokens - 1 */
    uint32_t looked;         /* children */
    uint64_t compared_bytes; /* tokens and content */
};

/*
 * Of the children of the cursor's block that have a copy in one of the tiers of the mask: the one
 * whose first tokens go along with the content there the longest, as far as the content has tokens,
 * but never the whole block. The newest of the children are looked at. Tokens that stand for
 * content count only with all of their span, and only where the content is the same.
 * content->first may lie anywhere before the cursor.
 */
void kvk_index_match_part(const struct kvk_index *index, const struct kvk_content *content,
                          const struct kvk_cursor *cursor, uint8_t tier_mask,
                          struct kvk_partial *partial);

/* One step along the keys of a prompt, whether its blocks are known or not: from the key of what
 * lies before block `block` of `content` (whose first token is the prompt's) to that of the block.
 * Hashes one block. False: no memory yet for the content spans of blocks of this size, for no root
 * has such blocks. */
bool kvk_index_key_step(const struct kvk_index *index, const struct kvk_hasher *hasher,
                        uint32_t block_tokens, const struct kvk_content *content, uint64_t block,
                        struct kvk_key *key);

/* The key of a root that need not be there. */
struct kvk_key kvk_index_root_key(const struct kvk_root_options *options);

/* Call `visit` for the roots of a range of ids, in no order; it changes nothing in the index. False
 * from it ends the walk. Returns the id to go on from, KVK_ROOT_NONE at the end. */
uint32_t kvk_index_roots_visit(const struct kvk_index *index, uint32_t first, uint32_t count,
                               bool (*visit)(void *context, uint32_t root, const uint8_t *salt,
                                             size_t salt_size),
                               void *context);

/* ---- Changing ---- */

/*
 * Put `block`, which must be whole (or hollow, to hold a place) and unindexed, under the cursor
 * with the block_tokens tokens of `content` that begin there. Where it has a copy and is its
 * parent's first child with bytes, the parent (cursor->block before the call) is no longer a leaf:
 * it must be in no queue. KVK_OK: indexed, the cursor stands behind it. KVK_EXISTS: another block
 * stands there; `*winner` is it (it may be hollow), the cursor stands behind the winner, `block` is
 * unchanged. KVK_EXHAUSTED: no memory; nothing changed.
 */
KVK_CHECKED enum kvk_status kvk_index_insert(struct kvk_index *index, struct kvk_cursor *cursor,
                                             const struct kvk_content *content, uint32_t block,
                                             uint32_t *winner);

/*
 * The same for a block that was indexed before, in another process: its tokens and content bytes as
 * they were stored. KVK_DATA_LOSS: hashed under the cursor they do not give `key`; nothing changed.
 */
KVK_CHECKED enum kvk_status kvk_index_insert_known(struct kvk_index *index,
                                                   struct kvk_cursor *cursor, struct kvk_key key,
                                                   const uint32_t *tokens, const uint8_t *extra,
                                                   size_t extra_size, uint32_t block,
                                                   uint32_t *winner);

/* So many blocks are about to be inserted: let the table of keys grow now, all at once. Not while
 * anybody waits. */
void kvk_index_expect(struct kvk_index *index, uint32_t block_count);

/* Take a block without children and anchors out of its chain. Its parent, or KVK_BLOCK_NONE. */
uint32_t kvk_index_remove(struct kvk_index *index, uint32_t block);

/* An open sequence's chain goes on from this indexed block: it stays indexed, though perhaps
 * hollow, until the anchor is taken away again. (At a root, kvk_index_root_hold() is the anchor.)
 */
void kvk_index_anchor(struct kvk_index *index, uint32_t block);
void kvk_index_unanchor(struct kvk_index *index, uint32_t block);

/* Tokens of an indexed block: [block_tokens], valid until the next insert or remove. */
const uint32_t *kvk_index_tokens(const struct kvk_index *index, uint32_t block);

/* Canonical content bytes of an indexed block; NULL and size 0 where it has none. */
const uint8_t *kvk_index_extra(const struct kvk_index *index, uint32_t block, size_t *extra_size);

/* Visit children of a block (or of a root, block = KVK_BLOCK_NONE) in no order. For invalidation
 * in slices and for tests; O(children). */
uint32_t kvk_index_first_child(const struct kvk_index *index, uint32_t root, uint32_t block);
uint32_t kvk_index_next_child(const struct kvk_index *index, uint32_t child);

struct kvk_index_stats {
    uint64_t blocks; /* indexed */
    uint64_t private_blocks;
    uint64_t hollow_blocks;
    uint64_t runs;
    uint64_t roots;
    uint64_t bytes; /* of memory, tokens and content bytes apart */
    uint64_t token_bytes;
};
void kvk_index_stats(const struct kvk_index *index, struct kvk_index_stats *stats);

/* Every law of the index, by walking all of it; aborts on a breach. For tests. */
void kvk_index_check(const struct kvk_index *index);

#endif
