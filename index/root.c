/* Roots: where the chains of one space, layer group and salt hang from. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "index/content.h"
#include "index/internal.h"

static uint32_t *bucket_of(const struct kvk_index *index, struct kvk_key key)
{
    return &index->root_buckets[key.low & (index->root_bucket_count - 1)];
}

static bool bytes_equal(const uint8_t *a, const uint8_t *b, size_t size)
{
    return size == 0 || memcmp(a, b, size) == 0;
}

/* Compared in full: a key alone never makes two roots one. */
static bool root_is(const struct kvk_root *root, const struct kvk_root_options *options)
{
    return root->hasher == options->hasher && root->group == options->group &&
           root->block_tokens == options->block_tokens && root->windowed == options->windowed &&
           root->identity_size == options->identity_size && root->salt_size == options->salt_size &&
           bytes_equal(root->identity, options->identity, options->identity_size) &&
           bytes_equal(root->identity + root->identity_size, options->salt, options->salt_size);
}

static bool scratch_reserve(struct kvk_index *index, size_t size)
{
    if (size <= index->scratch_size) {
        return true;
    }
    uint8_t *scratch = realloc(index->scratch, size);
    if (scratch == NULL) {
        return false;
    }
    index->memory_bytes += size - index->scratch_size;
    index->scratch = scratch;
    index->scratch_size = size;
    return true;
}

static uint32_t run_blocks_max(uint32_t block_tokens)
{
    uint32_t blocks = KVK_RUN_TOKENS_MAX / block_tokens;
    if (blocks < KVK_RUN_BLOCKS_MIN) {
        return KVK_RUN_BLOCKS_MIN;
    }
    return blocks < KVK_RUN_BLOCKS_MAX ? blocks : KVK_RUN_BLOCKS_MAX;
}

/* Take a place for a root; KVK_ROOT_NONE where all are taken. */
static uint32_t place_take(struct kvk_index *index)
{
    uint32_t id = index->root_free;
    if (id != KVK_ROOT_NONE) {
        index->root_free = kvk_root_at(index, id)->bucket_next;
        return id;
    }
    return index->root_high < index->root_count_max ? index->root_high++ : KVK_ROOT_NONE;
}

static size_t root_bytes(const struct kvk_root *root)
{
    return root->identity_size + root->salt_size + 1;
}

size_t kvk_index_root_size(const struct kvk_root_options *options)
{
    return sizeof(struct kvk_root) + options->identity_size + options->salt_size + 1;
}

static enum kvk_status root_create(struct kvk_index *index, const struct kvk_root_options *options,
                                   struct kvk_key key, uint32_t *root)
{
    if (!scratch_reserve(index, kvk_content_size_max(options->block_tokens))) {
        return KVK_EXHAUSTED;
    }
    uint8_t *bytes = malloc(options->identity_size + options->salt_size + 1);
    if (bytes == NULL) {
        return KVK_EXHAUSTED;
    }
    uint32_t id = place_take(index);
    if (id == KVK_ROOT_NONE) {
        free(bytes);
        return KVK_EXHAUSTED;
    }
    if (options->identity_size > 0) {
        memcpy(bytes, options->identity, options->identity_size);
    }
    if (options->salt_size > 0) {
        memcpy(bytes + options->identity_size, options->salt, options->salt_size);
    }
    uint32_t *bucket = bucket_of(index, key);
    *kvk_root_at(index, id) = (struct kvk_root){
        .key = key,
        .hasher = options->hasher,
        .identity = bytes,
        .identity_size = options->identity_size,
        .salt_size = options->salt_size,
        .group = options->group,
        .block_tokens = options->block_tokens,
        .run_blocks_max = run_blocks_max(options->block_tokens),
        .reference_count = 1,
        .first_run = KVK_RUN_NONE,
        .bucket_next = *bucket,
        .windowed = options->windowed,
        .user = options->user,
        .account = options->account,
    };
    *bucket = id;
    if (options->account != NULL) {
        options->account->root_bytes += kvk_index_root_size(options);
        options->account->root_count++;
    }
    kvk_memory_add(index, root_bytes(kvk_root_at(index, id)));
    index->root_count++;
    *root = id;
    return KVK_OK;
}

static struct kvk_key key_of(const struct kvk_root_options *options)
{
    KVK_ASSERT(options->hasher != NULL);
    KVK_ASSERT(options->block_tokens > 0);
    return kvk_key_root(options->hasher, options->identity, options->identity_size, options->group,
                        options->salt, options->salt_size);
}

static uint32_t find(const struct kvk_index *index, const struct kvk_root_options *options,
                     struct kvk_key key)
{
    uint32_t id = *bucket_of(index, key);
    while (id != KVK_ROOT_NONE) {
        const struct kvk_root *known = kvk_root_at(index, id);
        if (kvk_key_equal(known->key, key) && root_is(known, options)) {
            break;
        }
        id = known->bucket_next;
    }
    return id;
}

struct kvk_key kvk_index_root_key(const struct kvk_root_options *options)
{
    return key_of(options);
}

uint32_t kvk_index_root_find(const struct kvk_index *index, const struct kvk_root_options *options)
{
    return find(index, options, key_of(options));
}

enum kvk_status kvk_index_root_open(struct kvk_index *index, const struct kvk_root_options *options,
                                    uint32_t *root)
{
    struct kvk_key key = key_of(options);
    uint32_t id = find(index, options, key);
    if (id == KVK_ROOT_NONE) {
        return root_create(index, options, key, root);
    }
    kvk_index_root_hold(index, id);
    *root = id;
    return KVK_OK;
}

uint32_t kvk_index_roots_visit(const struct kvk_index *index, uint32_t first, uint32_t count,
                               bool (*visit)(void *context, uint32_t root, const uint8_t *salt,
                                             size_t salt_size),
                               void *context)
{
    uint32_t id = first;
    for (; id < index->root_high && count > 0; id++, count--) {
        const struct kvk_root *root = kvk_root_at(index, id);
        if (root->hasher != NULL &&
            !visit(context, id, root->identity + root->identity_size, root->salt_size)) {
            return KVK_ROOT_NONE;
        }
    }
    return id < index->root_high ? id : KVK_ROOT_NONE;
}

static struct kvk_root *root_checked(const struct kvk_index *index, uint32_t root)
{
    KVK_ASSERT(root < index->root_high);
    KVK_ASSERT(kvk_root_at(index, root)->hasher != NULL);
    return kvk_root_at(index, root);
}

void kvk_index_root_hold(struct kvk_index *index, uint32_t root)
{
    struct kvk_root *held = root_checked(index, root);
    KVK_ASSERT(held->reference_count < UINT32_MAX);
    held->reference_count++;
}

uint64_t kvk_index_root_user(const struct kvk_index *index, uint32_t root)
{
    return root_checked(index, root)->user;
}

struct kvk_key kvk_index_root_own_key(const struct kvk_index *index, uint32_t root)
{
    return root_checked(index, root)->key;
}

const uint8_t *kvk_index_root_salt(const struct kvk_index *index, uint32_t root, size_t *salt_size)
{
    const struct kvk_root *found = root_checked(index, root);
    *salt_size = found->salt_size;
    return found->identity + found->identity_size;
}

bool kvk_index_root_windowed(const struct kvk_index *index, uint32_t root)
{
    return root_checked(index, root)->windowed;
}

struct kvk_key kvk_index_key_of_root(const struct kvk_index *index, uint32_t root)
{
    return root_checked(index, root)->key;
}

const uint8_t *kvk_index_salt_of_root(const struct kvk_index *index, uint32_t root,
                                      size_t *salt_size)
{
    const struct kvk_root *salted = root_checked(index, root);
    *salt_size = salted->salt_size;
    return salted->identity + salted->identity_size;
}

void kvk_index_root_release(struct kvk_index *index, uint32_t root)
{
    struct kvk_root *released = root_checked(index, root);
    KVK_ASSERT(released->reference_count > 0);
    released->reference_count--;
    kvk_root_free_unused(index, root);
}

void kvk_root_free_unused(struct kvk_index *index, uint32_t root)
{
    struct kvk_root *unused = kvk_root_at(index, root);
    if (unused->reference_count > 0 || unused->block_count > 0) {
        return;
    }
    KVK_ASSERT(unused->first_run == KVK_RUN_NONE);
    uint32_t *link = bucket_of(index, unused->key);
    while (*link != root) {
        KVK_ASSERT(*link != KVK_ROOT_NONE);
        link = &kvk_root_at(index, *link)->bucket_next;
    }
    *link = unused->bucket_next;
    if (unused->account != NULL) {
        KVK_ASSERT(unused->account->root_count > 0);
        unused->account->root_bytes -= sizeof(*unused) + root_bytes(unused);
        unused->account->root_count--;
    }
    kvk_memory_sub(index, root_bytes(unused));
    free(unused->identity);
    *unused = (struct kvk_root){.bucket_next = index->root_free};
    index->root_free = root;
    index->root_count--;
}
