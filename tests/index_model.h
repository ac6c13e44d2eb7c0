/*
 * The index against a naive model: a list of blocks, searched from end to end.
 *
 * Bytes, random or from a fuzzer, say what happens next. The alphabet is tiny, so that prompts
 * share prefixes, branch and collide; one of the roots hashes everything to one key. The model
 * compares what every token stands for, not canonical bytes, so it shares no code with the index.
 * After each step all laws of the index are recounted.
 */
#ifndef KVK_TESTS_INDEX_MODEL_H
#define KVK_TESTS_INDEX_MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/assert.h"
#include "index/index.h"
#include "tests/index_chain.h"

#define MODEL_BLOCK_COUNT 48
#define MODEL_ROOT_COUNT 4
#define MODEL_ROOT_COUNT_MAX 3 /* of the index: one of them is always refused */
#define MODEL_BLOCK_TOKENS 2
#define MODEL_DEPTH 10
#define MODEL_TOKENS (MODEL_DEPTH * MODEL_BLOCK_TOKENS)

struct model_source {
    const uint8_t *bytes;
    size_t size;
    size_t at;
};

static inline uint32_t model_pick(struct model_source *source, uint32_t bound)
{
    return source->at < source->size ? source->bytes[source->at++] % bound : 0;
}

/* What one token says: its id, and the content behind it. */
struct model_token {
    uint32_t id;
    uint32_t digest; /* 0: none */
    uint64_t offset; /* in that content */
};

struct model_prompt {
    uint32_t tokens[MODEL_TOKENS];
    struct kvk_content_span spans[MODEL_TOKENS];
    uint32_t span_count;
    uint32_t token_count;
    struct model_token meaning[MODEL_TOKENS];
};

struct model_block {
    bool used;
    uint32_t id; /* in the index */
    uint32_t root;
    uint32_t parent; /* place in the model; KVK_BLOCK_NONE: the root */
    struct model_token tokens[MODEL_BLOCK_TOKENS];
    uint8_t tier_mask;
    uint32_t anchors;
    bool held;
};

struct model {
    struct kvk_index *index;
    struct kvk_hasher hashers[2];     /* the second is constant */
    uint32_t roots[MODEL_ROOT_COUNT]; /* KVK_ROOT_NONE: not open */
    struct model_block blocks[MODEL_BLOCK_COUNT];
};

static inline void model_prompt_pick(struct model_source *source, struct model_prompt *prompt)
{
    memset(prompt, 0, sizeof(*prompt));
    prompt->token_count = 1 + model_pick(source, MODEL_TOKENS);
    for (uint32_t i = 0; i < prompt->token_count; i++) {
        prompt->tokens[i] = model_pick(source, 8) == 0 ? 1 : 0;
        prompt->meaning[i].id = prompt->tokens[i];
    }
    uint32_t at = model_pick(source, 4) == 0 ? model_pick(source, MODEL_TOKENS) : MODEL_TOKENS;
    while (at < prompt->token_count) {
        struct kvk_content_span *span = &prompt->spans[prompt->span_count++];
        span->first = at;
        span->count = 1 + model_pick(source, 6);
        span->digest_size = 4;
        span->digest[3] = (uint8_t)(1 + model_pick(source, 2));
        for (uint64_t i = 0; i < span->count && at + i < prompt->token_count; i++) {
            prompt->meaning[at + i].digest = span->digest[3];
            prompt->meaning[at + i].offset = i;
        }
        at += (uint32_t)span->count + model_pick(source, 5);
    }
}

static inline struct kvk_content model_content(const struct model_prompt *prompt,
                                               uint32_t first_block)
{
    uint32_t first = first_block * MODEL_BLOCK_TOKENS;
    return (struct kvk_content){
        .tokens = prompt->tokens + first,
        .first = first,
        .token_count = prompt->token_count - first,
        .spans = prompt->spans,
        .span_count = prompt->span_count,
    };
}

/* The place of the child of `parent` that says what block `block` of the prompt says. */
static inline uint32_t model_child(const struct model *model, uint32_t root, uint32_t parent,
                                   const struct model_prompt *prompt, uint32_t block)
{
    for (uint32_t i = 0; i < MODEL_BLOCK_COUNT; i++) {
        const struct model_block *candidate = &model->blocks[i];
        bool same = candidate->used && candidate->root == root && candidate->parent == parent;
        for (uint32_t t = 0; t < MODEL_BLOCK_TOKENS && same; t++) {
            const struct model_token *a = &candidate->tokens[t];
            const struct model_token *b = &prompt->meaning[block * MODEL_BLOCK_TOKENS + t];
            same = a->id == b->id && a->digest == b->digest && a->offset == b->offset;
        }
        if (same) {
            return i;
        }
    }
    return KVK_BLOCK_NONE;
}

static inline bool model_has_children(const struct model *model, uint32_t place)
{
    for (uint32_t i = 0; i < MODEL_BLOCK_COUNT; i++) {
        if (model->blocks[i].used && model->blocks[i].parent == place) {
            return true;
        }
    }
    return false;
}

static inline uint32_t model_place_of(const struct model *model, uint32_t id)
{
    for (uint32_t i = 0; i < MODEL_BLOCK_COUNT; i++) {
        if (model->blocks[i].used && model->blocks[i].id == id) {
            return i;
        }
    }
    return KVK_BLOCK_NONE;
}

/* Look a prompt up, in two parts that meet somewhere; the model says what must come out. */
static inline void model_match(const struct model *model, uint32_t root,
                               const struct model_prompt *prompt, uint32_t meet)
{
    uint32_t whole = prompt->token_count / MODEL_BLOCK_TOKENS;
    uint32_t path[MODEL_DEPTH];
    uint8_t tiers[MODEL_DEPTH];
    struct kvk_match match = {
        .cursor = {.root = model->roots[root], .block = KVK_BLOCK_NONE},
        .path = path,
        .tiers = tiers,
        .path_capacity = meet,
    };
    struct kvk_content content = model_content(prompt, 0);
    kvk_index_match(model->index, &content, &match);
    uint64_t found = match.path_count;
    KVK_ASSERT(found <= meet);
    if (found == meet && meet < whole) {
        content = model_content(prompt, meet);
        match.path = path + meet;
        match.tiers = tiers + meet;
        match.path_capacity = MODEL_DEPTH;
        kvk_index_match(model->index, &content, &match);
        found += match.path_count;
    }
    uint32_t parent = KVK_BLOCK_NONE;
    uint64_t expected = 0;
    while (expected < whole) {
        uint32_t child = model_child(model, root, parent, prompt, (uint32_t)expected);
        if (child == KVK_BLOCK_NONE) {
            break;
        }
        KVK_ASSERT(expected < found);
        KVK_ASSERT(path[expected] == model->blocks[child].id);
        KVK_ASSERT(tiers[expected] == model->blocks[child].tier_mask);
        parent = child;
        expected++;
    }
    KVK_ASSERT(found == expected);
    KVK_ASSERT(match.cursor.blocks == expected);
    KVK_ASSERT(match.cursor.block ==
               (parent == KVK_BLOCK_NONE ? KVK_BLOCK_NONE : model->blocks[parent].id));
}

/* Insert a prompt block by block, over what is there already. */
static inline void model_insert(struct model *model, uint32_t root,
                                const struct model_prompt *prompt, uint8_t tier_mask)
{
    struct kvk_cursor cursor = {.root = model->roots[root], .block = KVK_BLOCK_NONE};
    struct kvk_content content = model_content(prompt, 0);
    uint32_t parent = KVK_BLOCK_NONE;
    for (uint32_t b = 0; (b + 1) * MODEL_BLOCK_TOKENS <= prompt->token_count; b++) {
        uint32_t id = chain_block(model->index, tier_mask);
        if (id == KVK_BLOCK_NONE) {
            KVK_ASSERT(kvk_index_block_count(model->index) == MODEL_BLOCK_COUNT);
            return;
        }
        uint32_t child = model_child(model, root, parent, prompt, b);
        uint32_t winner = KVK_BLOCK_NONE;
        enum kvk_status status = kvk_index_insert(model->index, &cursor, &content, id, &winner);
        KVK_ASSERT(cursor.blocks == b + 1);
        if (child != KVK_BLOCK_NONE) {
            KVK_ASSERT(status == KVK_EXISTS);
            KVK_ASSERT(winner == model->blocks[child].id);
            KVK_ASSERT(cursor.block == winner);
            chain_discard(model->index, id);
            parent = child;
            continue;
        }
        KVK_ASSERT(status == KVK_OK);
        KVK_ASSERT(cursor.block == id);
        kvk_block_step(kvk_index_block(model->index, id), KVK_BLOCK_RELEASE);
        uint32_t place = 0;
        while (model->blocks[place].used) {
            place++;
        }
        model->blocks[place] = (struct model_block){
            .used = true, .id = id, .root = root, .parent = parent, .tier_mask = tier_mask};
        memcpy(model->blocks[place].tokens, prompt->meaning + (size_t)b * MODEL_BLOCK_TOKENS,
               sizeof(model->blocks[place].tokens));
        parent = place;
    }
}

static inline void model_remove(struct model *model, uint32_t place)
{
    struct model_block *block = &model->blocks[place];
    uint32_t parent = kvk_index_remove(model->index, block->id);
    KVK_ASSERT(parent == (block->parent == KVK_BLOCK_NONE ? KVK_BLOCK_NONE
                                                          : model->blocks[block->parent].id));
    kvk_index_block_free(model->index, block->id);
    block->used = false;
}

/* Evict, fill or prune: whatever the block's state has next. */
static inline void model_turn_over(struct model *model, uint32_t place, uint8_t tier_mask)
{
    struct model_block *block = &model->blocks[place];
    struct kvk_block *indexed = kvk_index_block(model->index, block->id);
    bool needed = model_has_children(model, place) || block->anchors > 0;
    if (block->held) {
        return;
    }
    if (indexed->state == KVK_BLOCK_EVICTABLE) {
        kvk_block_step(indexed, KVK_BLOCK_EVICT);
        kvk_index_set_tiers(model->index, block->id, 0);
        block->tier_mask = 0;
        KVK_ASSERT(indexed->state == (needed ? KVK_BLOCK_HOLLOW : KVK_BLOCK_FREE));
        if (!needed) {
            model_remove(model, place);
        }
        return;
    }
    KVK_ASSERT(indexed->state == KVK_BLOCK_HOLLOW);
    KVK_ASSERT(kvk_block_allows(indexed, KVK_BLOCK_PRUNE) == !needed);
    if (!needed) {
        kvk_block_step(indexed, KVK_BLOCK_PRUNE);
        model_remove(model, place);
        return;
    }
    kvk_block_step(indexed, KVK_BLOCK_FILL);
    kvk_index_set_tiers(model->index, block->id, tier_mask);
    kvk_block_step(indexed, KVK_BLOCK_RELEASE);
    block->tier_mask = tier_mask;
}

/* Another mask for a block that has copies: the parent must be told when it becomes a leaf. */
static inline void model_set_tiers(struct model *model, uint32_t place, uint8_t tier_mask)
{
    struct model_block *block = &model->blocks[place];
    if (block->tier_mask == 0) {
        return;
    }
    uint32_t parent = block->parent;
    uint32_t before = 0;
    uint32_t after = 0;
    for (uint32_t i = 0; i < MODEL_BLOCK_COUNT; i++) {
        const struct model_block *sibling = &model->blocks[i];
        if (sibling->used && sibling->root == block->root && sibling->parent == parent) {
            before += sibling->tier_mask & CHAIN_ON_DEVICE;
            after += (i == place ? tier_mask : sibling->tier_mask) & CHAIN_ON_DEVICE;
        }
    }
    bool told = parent != KVK_BLOCK_NONE && (before == 0) != (after == 0);
    uint32_t leaf = kvk_index_set_tiers(model->index, block->id, tier_mask);
    KVK_ASSERT(leaf == (told ? model->blocks[parent].id : KVK_BLOCK_NONE));
    block->tier_mask = tier_mask;
}

static inline void model_anchor(struct model *model, uint32_t place)
{
    struct model_block *block = &model->blocks[place];
    if (block->anchors > 0) {
        block->anchors--;
        kvk_index_unanchor(model->index, block->id);
    } else {
        block->anchors++;
        kvk_index_anchor(model->index, block->id);
    }
}

static inline void model_hold(struct model *model, uint32_t place)
{
    struct model_block *block = &model->blocks[place];
    if (block->tier_mask == 0) {
        return;
    }
    kvk_block_step(kvk_index_block(model->index, block->id),
                   block->held ? KVK_BLOCK_RELEASE : KVK_BLOCK_HOLD);
    block->held = !block->held;
}

/* Every child that the index names, once, and no other. */
static inline void model_children(const struct model *model, uint32_t root, uint32_t place)
{
    uint32_t id = place == KVK_BLOCK_NONE ? KVK_BLOCK_NONE : model->blocks[place].id;
    uint32_t named = 0;
    for (uint32_t child = kvk_index_first_child(model->index, model->roots[root], id);
         child != KVK_BLOCK_NONE; child = kvk_index_next_child(model->index, child)) {
        uint32_t found = model_place_of(model, child);
        KVK_ASSERT(found != KVK_BLOCK_NONE);
        KVK_ASSERT(model->blocks[found].parent == place);
        KVK_ASSERT(model->blocks[found].root == root);
        named++;
    }
    for (uint32_t i = 0; i < MODEL_BLOCK_COUNT; i++) {
        const struct model_block *block = &model->blocks[i];
        named -= block->used && block->root == root && block->parent == place;
    }
    KVK_ASSERT(named == 0);
}

/* Open a root that is not, or give back one that is: it stays while it has blocks. */
static inline void model_root(struct model *model, uint32_t root)
{
    const struct kvk_root_options options = {
        .hasher = &model->hashers[root % 2],
        .identity = (const uint8_t *)"model",
        .identity_size = 5,
        .group = root / 2,
        .block_tokens = MODEL_BLOCK_TOKENS,
    };
    bool has_blocks = false;
    for (uint32_t i = 0; i < MODEL_BLOCK_COUNT; i++) {
        has_blocks = has_blocks || (model->blocks[i].used && model->blocks[i].root == root);
    }
    uint32_t open = 0;
    for (uint32_t i = 0; i < MODEL_ROOT_COUNT; i++) {
        open += model->roots[i] != KVK_ROOT_NONE;
    }
    if (model->roots[root] == KVK_ROOT_NONE) {
        enum kvk_status status = kvk_index_root_open(model->index, &options, &model->roots[root]);
        KVK_ASSERT(status == (open < MODEL_ROOT_COUNT_MAX ? KVK_OK : KVK_EXHAUSTED));
        return;
    }
    uint32_t again = KVK_ROOT_NONE;
    enum kvk_status status = kvk_index_root_open(model->index, &options, &again);
    KVK_ASSERT(status == KVK_OK);
    KVK_ASSERT(again == model->roots[root]);
    kvk_index_root_release(model->index, again);
    if (!has_blocks) {
        kvk_index_root_release(model->index, again);
        model->roots[root] = KVK_ROOT_NONE;
    }
}

static inline void model_step(struct model *model, struct model_source *source)
{
    uint32_t action = model_pick(source, 16);
    uint32_t root = model_pick(source, MODEL_ROOT_COUNT);
    uint32_t place = model_pick(source, MODEL_BLOCK_COUNT);
    uint8_t tier_mask = (uint8_t)(1 + model_pick(source, 3));
    if (action < 9 && model->roots[root] == KVK_ROOT_NONE) {
        action = 15;
    }
    if (action < 9) {
        struct model_prompt prompt;
        model_prompt_pick(source, &prompt);
        if (action < 4) {
            model_insert(model, root, &prompt, tier_mask);
        }
        model_match(model, root, &prompt, place % (MODEL_DEPTH + 1));
        model_children(model, root, KVK_BLOCK_NONE);
    } else if (action == 15) {
        model_root(model, root);
    } else if (model->blocks[place].used) {
        model_children(model, model->blocks[place].root, place);
        if (action < 12) {
            model_turn_over(model, place, tier_mask);
        } else if (action == 12) {
            model_set_tiers(model, place, tier_mask);
        } else if (action == 13) {
            model_anchor(model, place);
        } else {
            model_hold(model, place);
        }
    }
    kvk_index_check(model->index);
}

/* All that the bytes say, from an empty index to an empty one. */
static inline void model_run(const uint8_t *bytes, size_t size)
{
    static const uint8_t secret[KVK_SECRET_SIZE] = {9};
    static struct model model;
    memset(&model, 0, sizeof(model));
    model.index = chain_index(MODEL_BLOCK_COUNT, MODEL_ROOT_COUNT_MAX);
    kvk_hasher_init(&model.hashers[0], secret);
    kvk_hasher_init(&model.hashers[1], secret);
    model.hashers[1].constant = true;
    for (uint32_t root = 0; root < MODEL_ROOT_COUNT; root++) {
        model.roots[root] = KVK_ROOT_NONE;
    }
    struct model_source source = {.bytes = bytes, .size = size};
    while (source.at < source.size) {
        model_step(&model, &source);
    }

    for (uint32_t place = 0; place < MODEL_BLOCK_COUNT; place++) {
        if (model.blocks[place].used && model.blocks[place].held) {
            model_hold(&model, place);
        }
        if (model.blocks[place].used && model.blocks[place].anchors > 0) {
            model_anchor(&model, place);
        }
    }
    for (uint32_t left = 1; left > 0;) {
        left = 0;
        for (uint32_t place = 0; place < MODEL_BLOCK_COUNT; place++) {
            if (model.blocks[place].used && !model_has_children(&model, place)) {
                model_turn_over(&model, place, 1);
                left++;
            }
        }
    }
    KVK_ASSERT(kvk_index_block_count(model.index) == 0);
    kvk_index_check(model.index);
    kvk_index_destroy(model.index);
}

#endif
