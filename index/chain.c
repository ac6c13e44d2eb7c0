/* Chains: finding, inserting and removing blocks, and their children. */
#include <string.h>

#include "base/assert.h"
#include "index/content.h"
#include "index/internal.h"

/* Compare this many bytes at once; where they differ, block by block. */
#define COMPARE_SIZE 4096

/* ---- Equality ---- */

static bool extra_equal(const struct kvk_extra *extra, const uint8_t *bytes, size_t size)
{
    if (extra == NULL || size == 0) {
        return extra == NULL && size == 0;
    }
    return extra->size == size && memcmp(extra->bytes, bytes, size) == 0;
}

/* How many of `count` blocks' tokens are equal before the first that is not. */
static uint32_t tokens_match(const uint32_t *a, const uint32_t *b, uint32_t block_tokens,
                             uint32_t count)
{
    size_t block_size = (size_t)block_tokens * sizeof(uint32_t);
    uint32_t step = block_size < COMPARE_SIZE ? (uint32_t)(COMPARE_SIZE / block_size) : 1;
    uint32_t done = 0;
    while (done < count) {
        uint32_t blocks = count - done < step ? count - done : step;
        size_t at = (size_t)done * block_tokens;
        if (memcmp(a + at, b + at, blocks * block_size) == 0) {
            done += blocks;
        } else if (blocks == 1) {
            break;
        } else {
            step = blocks / 2;
        }
    }
    return done;
}

uint32_t kvk_chain_child(const struct kvk_index *index, uint32_t root, uint32_t parent,
                         struct kvk_key key, const uint32_t *tokens, const uint8_t *extra,
                         size_t extra_size)
{
    size_t token_size = (size_t)kvk_root_at(index, root)->block_tokens * sizeof(*tokens);
    for (uint32_t id = *kvk_keymap_head(index, key); id != KVK_BLOCK_NONE;) {
        const struct kvk_block *block = kvk_block_at(index, id);
        if (kvk_key_equal(block->key, key) && block->parent == parent) {
            const struct kvk_run *run = kvk_run_at(index, block->run);
            if (run->root == root &&
                memcmp(kvk_run_tokens(run, block->run_offset), tokens, token_size) == 0 &&
                extra_equal(kvk_run_extra(run, block->run_offset), extra, extra_size)) {
                return id;
            }
        }
        id = block->hash_next;
    }
    return KVK_BLOCK_NONE;
}

static struct kvk_key key_of(const struct kvk_index *index, uint32_t root, uint32_t block)
{
    return block == KVK_BLOCK_NONE ? kvk_root_at(index, root)->key
                                   : kvk_block_at(index, block)->key;
}

bool kvk_index_key_step(const struct kvk_index *index, const struct kvk_hasher *hasher,
                        uint32_t block_tokens, const struct kvk_content *content, uint64_t block,
                        struct kvk_key *key)
{
    KVK_ASSERT(content->first == 0);
    KVK_ASSERT((block + 1) * block_tokens <= content->token_count);
    size_t extra_size = 0;
    if (content->span_count > 0) {
        if (index->scratch_size < kvk_content_size_max(block_tokens)) {
            return false;
        }
        extra_size = kvk_content_bytes(content, block * block_tokens, block_tokens, index->scratch);
    }
    *key = kvk_key_block(hasher, *key, content->tokens + block * block_tokens, block_tokens,
                         index->scratch, extra_size);
    return true;
}

/* ---- Finding ---- */

/* One walk over `content`: where it is in it, and in the chain. */
struct walk {
    const struct kvk_index *index;
    const struct kvk_content *content;
    const struct kvk_root *root;
    const struct kvk_run *run; /* the next block may be here; NULL: at the root */
    uint32_t offset;           /* at this place of the run */
    uint64_t done;             /* blocks matched */
    uint64_t wanted;           /* blocks to match at most */
};

static const uint32_t *walk_tokens(const struct walk *walk, uint64_t ahead)
{
    return walk->content->tokens + (walk->done + ahead) * walk->root->block_tokens;
}

static size_t walk_extra(const struct walk *walk, uint64_t ahead)
{
    uint32_t block_tokens = walk->root->block_tokens;
    uint64_t position = walk->content->first + (walk->done + ahead) * block_tokens;
    return kvk_content_bytes(walk->content, position, block_tokens, walk->index->scratch);
}

/* Does the block at this place of the run say what comes next in the content? */
static bool walk_block_is(const struct walk *walk, const struct kvk_run *run, uint32_t offset)
{
    size_t token_size = (size_t)walk->root->block_tokens * sizeof(uint32_t);
    if (memcmp(kvk_run_tokens(run, offset), walk_tokens(walk, 0), token_size) != 0) {
        return false;
    }
    size_t size = walk_extra(walk, 0);
    return extra_equal(kvk_run_extra(run, offset), walk->index->scratch, size);
}

/* How far the run goes along with the content from here. */
static uint32_t walk_ahead(const struct walk *walk)
{
    const struct kvk_run *run = walk->run;
    uint32_t limit = run->count - walk->offset;
    if (limit > walk->wanted - walk->done) {
        limit = (uint32_t)(walk->wanted - walk->done);
    }
    uint32_t matched = tokens_match(kvk_run_tokens(run, walk->offset), walk_tokens(walk, 0),
                                    walk->root->block_tokens, limit);
    if (run->extras == NULL && walk->content->span_count == 0) {
        return matched;
    }
    for (uint32_t i = 0; i < matched; i++) {
        size_t size = walk_extra(walk, i);
        if (!extra_equal(kvk_run_extra(run, walk->offset + i), walk->index->scratch, size)) {
            return i;
        }
    }
    return matched;
}

/* Follow the run as far as it goes along, and hand out what lies there. */
static void walk_run(struct walk *walk, struct kvk_match *match)
{
    const struct kvk_run *run = walk->run;
    uint32_t count = walk_ahead(walk);
    if (count == 0) {
        return;
    }
    const uint32_t *ids = kvk_run_ids(run) + walk->offset;
    if (match->path != NULL) {
        memcpy(match->path + walk->done, ids, count * sizeof(*ids));
    }
    if (match->tiers != NULL) {
        memcpy(match->tiers + walk->done, kvk_run_tiers(run) + walk->offset, count);
    }
    match->cursor.block = ids[count - 1];
    walk->offset += count;
    walk->done += count;
}

/* The run did not go on with the content: is there another that does? False: the walk ends. */
static bool walk_branch(struct walk *walk, struct kvk_match *match)
{
    const struct kvk_index *index = walk->index;
    uint32_t branches =
        walk->run == NULL ? walk->root->first_run : kvk_run_branches(walk->run)[walk->offset - 1];
    if (branches == KVK_RUN_NONE) {
        return false;
    }
    /* The first of them is there for one comparison; often, at the end of a full run, it is also
     * the only one. Past it a hash is cheaper than a list that may be very long. */
    const struct kvk_run *first = kvk_run_at(index, branches);
    if (walk_block_is(walk, first, 0)) {
        walk->run = first;
        walk->offset = 0;
        return true;
    }
    if (first->next_sibling == KVK_RUN_NONE) {
        return false;
    }
    uint32_t root = match->cursor.root;
    uint32_t parent = match->cursor.block;
    uint32_t block_tokens = walk->root->block_tokens;
    size_t extra_size = walk_extra(walk, 0);
    struct kvk_key key =
        kvk_key_block(walk->root->hasher, key_of(index, root, parent), walk_tokens(walk, 0),
                      block_tokens, index->scratch, extra_size);
    match->hashed_bytes += sizeof(key) + (uint64_t)block_tokens * sizeof(uint32_t) + extra_size;
    uint32_t child =
        kvk_chain_child(index, root, parent, key, walk_tokens(walk, 0), index->scratch, extra_size);
    if (child == KVK_BLOCK_NONE) {
        return false;
    }
    const struct kvk_block *block = kvk_block_at(index, child);
    walk->run = kvk_run_at(index, block->run);
    walk->offset = block->run_offset;
    return true;
}

static void cursor_check(const struct kvk_index *index, const struct kvk_cursor *cursor)
{
    KVK_ASSERT(cursor->root < index->root_high);
    KVK_ASSERT(kvk_root_at(index, cursor->root)->hasher != NULL);
    if (cursor->block == KVK_BLOCK_NONE) {
        KVK_ASSERT(cursor->blocks == 0);
        return;
    }
    KVK_ASSERT(kvk_index_root_of(index, cursor->block) == cursor->root);
    KVK_ASSERT(kvk_block_at(index, cursor->block)->position + UINT64_C(1) == cursor->blocks);
}

void kvk_index_match(const struct kvk_index *index, const struct kvk_content *content,
                     struct kvk_match *match)
{
    cursor_check(index, &match->cursor);
    struct walk walk = {
        .index = index,
        .content = content,
        .root = kvk_root_at(index, match->cursor.root),
    };
    uint32_t block_tokens = walk.root->block_tokens;
    KVK_ASSERT(content->first == match->cursor.blocks * block_tokens);
    walk.wanted = content->token_count / block_tokens;
    if (walk.wanted > match->path_capacity) {
        walk.wanted = match->path_capacity;
    }
    if (match->cursor.block != KVK_BLOCK_NONE) {
        const struct kvk_block *block = kvk_block_at(index, match->cursor.block);
        walk.run = kvk_run_at(index, block->run);
        walk.offset = block->run_offset + 1;
    }
    match->hashed_bytes = 0;
    while (walk.done < walk.wanted) {
        if (walk.run != NULL) {
            walk_run(&walk, match);
        }
        if (walk.done == walk.wanted || !walk_branch(&walk, match)) {
            break;
        }
    }
    match->path_count = walk.done;
    match->cursor.blocks += walk.done;
}

/* ---- Inserting and removing ---- */

/* The run that a child of `parent` is appended to, with room: the parent's, where nothing follows
 * it there, else a new one. KVK_RUN_NONE: no memory. */
static uint32_t run_for_child(struct kvk_index *index, uint32_t root, uint32_t parent,
                              bool with_extra)
{
    if (parent != KVK_BLOCK_NONE) {
        const struct kvk_block *block = kvk_block_at(index, parent);
        struct kvk_run *run = kvk_run_at(index, block->run);
        if (block->run_offset + 1 == run->count &&
            run->count < kvk_root_at(index, root)->run_blocks_max) {
            return kvk_run_reserve(index, run, with_extra) ? block->run : KVK_RUN_NONE;
        }
    }
    uint32_t created = kvk_run_create(index, root);
    if (created != KVK_RUN_NONE &&
        !kvk_run_reserve(index, kvk_run_at(index, created), with_extra)) {
        kvk_run_destroy(index, created);
        return KVK_RUN_NONE;
    }
    return created;
}

static bool has_children(const struct kvk_index *index, const struct kvk_cursor *cursor)
{
    if (cursor->block == KVK_BLOCK_NONE) {
        return kvk_root_at(index, cursor->root)->child_count > 0;
    }
    return kvk_block_at(index, cursor->block)->child_count > 0;
}

/* One child more for the parent, or for the root. */
static void child_added(struct kvk_index *index, struct kvk_root *root,
                        const struct kvk_block *child)
{
    index->indexed_count++;
    index->hollow_count += child->tier_mask == 0;
    root->block_count++;
    if (child->parent == KVK_BLOCK_NONE) {
        root->child_count++;
        return;
    }
    struct kvk_block *parent = kvk_block_at(index, child->parent);
    parent->child_count++;
    parent->memory_children += kvk_mask_has_memory(child->tier_mask);
    parent->disk_children += kvk_mask_has_disk(child->tier_mask);
    parent->device_children += kvk_mask_has_device(child->tier_mask);
}

static void child_removed(struct kvk_index *index, struct kvk_root *root,
                          const struct kvk_block *child)
{
    index->indexed_count--;
    index->hollow_count -= child->tier_mask == 0;
    root->block_count--;
    if (child->parent == KVK_BLOCK_NONE) {
        root->child_count--;
        return;
    }
    struct kvk_block *parent = kvk_block_at(index, child->parent);
    parent->child_count--;
    parent->memory_children -= kvk_mask_has_memory(child->tier_mask);
    parent->disk_children -= kvk_mask_has_disk(child->tier_mask);
    parent->device_children -= kvk_mask_has_device(child->tier_mask);
}

/* What a block to be inserted says. */
struct said {
    struct kvk_key key;
    const uint32_t *tokens; /* [block_tokens] */
    const uint8_t *extra;
    size_t extra_size;
};

static enum kvk_status insert(struct kvk_index *index, struct kvk_cursor *cursor,
                              const struct said *said, uint32_t block, uint32_t *winner)
{
    struct kvk_block *added = kvk_index_block(index, block);
    struct kvk_root *root = kvk_root_at(index, cursor->root);
    KVK_ASSERT(!kvk_block_is_indexed(added));
    KVK_ASSERT(kvk_block_is_whole(added) || added->state == KVK_BLOCK_HOLLOW);
    KVK_ASSERT(cursor->blocks < UINT32_MAX);
    if (has_children(index, cursor)) {
        uint32_t known = kvk_chain_child(index, cursor->root, cursor->block, said->key,
                                         said->tokens, said->extra, said->extra_size);
        if (known != KVK_BLOCK_NONE) {
            *winner = known;
            cursor->block = known;
            cursor->blocks++;
            return KVK_EXISTS;
        }
    }
    struct kvk_extra *extra = NULL;
    if (said->extra_size > 0) {
        extra = kvk_extra_create(index, said->extra, said->extra_size);
        if (extra == NULL) {
            return KVK_EXHAUSTED;
        }
    }
    uint32_t run_id = run_for_child(index, cursor->root, cursor->block, extra != NULL);
    if (run_id == KVK_RUN_NONE) {
        kvk_extra_destroy(index, extra);
        return KVK_EXHAUSTED;
    }
    struct kvk_run *run = kvk_run_at(index, run_id);
    if (run->count == 0) {
        kvk_run_link(index, run_id, cursor->block);
    }
    added->key = said->key;
    added->parent = cursor->block;
    added->run = run_id;
    added->run_offset = run->count;
    added->child_count = 0;
    added->memory_children = 0;
    added->disk_children = 0;
    added->device_children = 0;
    added->position = (uint32_t)cursor->blocks;
    kvk_run_append(index, run, block, said->tokens, extra, added->tier_mask);
    kvk_keymap_insert(index, block);
    child_added(index, root, added);
    cursor->block = block;
    cursor->blocks++;
    return KVK_OK;
}

enum kvk_status kvk_index_insert(struct kvk_index *index, struct kvk_cursor *cursor,
                                 const struct kvk_content *content, uint32_t block,
                                 uint32_t *winner)
{
    cursor_check(index, cursor);
    const struct kvk_root *root = kvk_root_at(index, cursor->root);
    uint64_t position = cursor->blocks * root->block_tokens;
    KVK_ASSERT(position >= content->first);
    KVK_ASSERT(position - content->first + root->block_tokens <= content->token_count);
    struct said said = {
        .tokens = content->tokens + (position - content->first),
        .extra = index->scratch,
        .extra_size = kvk_content_bytes(content, position, root->block_tokens, index->scratch),
    };
    said.key = kvk_key_block(root->hasher, key_of(index, cursor->root, cursor->block), said.tokens,
                             root->block_tokens, said.extra, said.extra_size);
    return insert(index, cursor, &said, block, winner);
}

enum kvk_status kvk_index_insert_known(struct kvk_index *index, struct kvk_cursor *cursor,
                                       struct kvk_key key, const uint32_t *tokens,
                                       const uint8_t *extra, size_t extra_size, uint32_t block,
                                       uint32_t *winner)
{
    cursor_check(index, cursor);
    const struct kvk_root *root = kvk_root_at(index, cursor->root);
    const struct said said = {
        .key = kvk_key_block(root->hasher, key_of(index, cursor->root, cursor->block), tokens,
                             root->block_tokens, extra, extra_size),
        .tokens = tokens,
        .extra = extra,
        .extra_size = extra_size,
    };
    if (!kvk_key_equal(said.key, key)) {
        return KVK_DATA_LOSS;
    }
    return insert(index, cursor, &said, block, winner);
}

uint32_t kvk_index_remove(struct kvk_index *index, uint32_t block)
{
    struct kvk_block *removed = kvk_index_block(index, block);
    KVK_ASSERT(kvk_block_is_indexed(removed));
    KVK_ASSERT(removed->child_count == 0);
    KVK_ASSERT(removed->anchor_count == 0);
    struct kvk_run *run = kvk_run_at(index, removed->run);
    /* Without children nothing follows it in its run. */
    KVK_ASSERT(removed->run_offset + 1 == run->count);
    uint32_t root = run->root;
    uint32_t parent = removed->parent;
    __builtin_prefetch(kvk_keymap_head(index, removed->key), 1);
    child_removed(index, kvk_root_at(index, root), removed);
    kvk_run_drop_last(index, run);
    if (run->count == 0) {
        kvk_run_unlink(index, removed->run);
        kvk_run_destroy(index, removed->run);
    }
    kvk_keymap_remove(index, block);
    removed->run = KVK_RUN_NONE;
    removed->run_offset = 0;
    removed->parent = KVK_BLOCK_NONE;
    removed->position = 0;
    kvk_root_free_unused(index, root);
    return parent;
}

/* ---- What lies where ---- */

static const struct kvk_run *run_of(const struct kvk_index *index, const struct kvk_block *block)
{
    KVK_ASSERT(kvk_block_is_indexed(block));
    return kvk_run_at(index, block->run);
}

const uint32_t *kvk_index_tokens(const struct kvk_index *index, uint32_t block)
{
    const struct kvk_block *indexed = kvk_index_block(index, block);
    return kvk_run_tokens(run_of(index, indexed), indexed->run_offset);
}

const uint8_t *kvk_index_extra(const struct kvk_index *index, uint32_t block, size_t *extra_size)
{
    const struct kvk_block *indexed = kvk_index_block(index, block);
    const struct kvk_extra *extra = kvk_run_extra(run_of(index, indexed), indexed->run_offset);
    *extra_size = extra == NULL ? 0 : extra->size;
    return extra == NULL ? NULL : extra->bytes;
}

/* The first block of a run; KVK_BLOCK_NONE for no run. */
static uint32_t run_first(const struct kvk_index *index, uint32_t run)
{
    return run == KVK_RUN_NONE ? KVK_BLOCK_NONE : kvk_run_ids(kvk_run_at(index, run))[0];
}

uint32_t kvk_index_first_child(const struct kvk_index *index, uint32_t root, uint32_t block)
{
    if (block != KVK_BLOCK_NONE) {
        const struct kvk_block *parent = kvk_index_block(index, block);
        const struct kvk_run *run = run_of(index, parent);
        if (parent->run_offset + 1 < run->count) {
            return kvk_run_ids(run)[parent->run_offset + 1];
        }
    }
    return run_first(index, *kvk_run_head(index, root, block));
}

uint32_t kvk_index_next_child(const struct kvk_index *index, uint32_t child)
{
    const struct kvk_block *block = kvk_index_block(index, child);
    const struct kvk_run *run = run_of(index, block);
    if (block->run_offset > 0) {
        return run_first(index, kvk_run_branches(run)[block->run_offset - 1]);
    }
    return run_first(index, run->next_sibling);
}
