/*
 * Putting blocks back. Records are gathered first; then every chain is followed from its root down,
 * the children of a block found by the key that they name as their parent.
 *
 * While that goes on every block has one holder, the restore, so that nothing is evicted before all
 * is there. At the end it lets go of all of them, and only then do they stand in line for eviction,
 * in the order of their last uses.
 */
#include "daemon/restore.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/assert.h"
#include "daemon/cache_internal.h"
#include "daemon/sidecar.h"

#define NONE UINT32_MAX
#define CHUNK_RECORDS 65536U
#define CHUNK_COUNT_MAX 65536U
#define COPY_CHUNK_BYTES (UINT64_C(1) << 20)
#define SLICE_RECORDS 1024 /* that are put in with the lock held */
#define IDLE_SECONDS_MAX (UINT32_C(1) << 31)

struct record {
    struct kvk_key key;
    struct kvk_key parent;
    struct kvk_group *group;
    const uint32_t *tokens;
    const uint8_t *extra;
    const uint8_t *salt;
    const uint64_t *checksums;
    const uint64_t *host_checksums;
    uint32_t extra_size;
    uint32_t salt_size;
    uint32_t position;
    uint32_t slot[KVK_TIER_COUNT];
    uint32_t use_count;
    uint32_t idle_s;
    uint32_t entry;        /* of the sidecar, + 1 */
    uint32_t next;         /* in its bucket, then on the stack, then of what is in */
    uint32_t block;        /* its parent's, while on the stack; then its own. NONE: none */
    uint8_t returned_mask; /* tiers whose slots came back */
    bool visited;
    bool follows; /* it is the child of the record before it */
};

struct kvk_restore {
    struct kvk_cache *cache; /* borrowed */
    struct record **chunks;  /* [CHUNK_COUNT_MAX], ours */
    struct copies *copies;   /* ours */
    uint32_t *buckets;       /* [bucket_mask + 1] records by the key of their parent; ours */
    uint64_t bucket_mask;
    uint32_t count;
    uint32_t idle_s_max;
    uint32_t stack; /* of records whose parent is in */
    uint32_t done;  /* records that are in, each once; the last one first */
    uint32_t slice; /* records since the lock was taken */
    uint64_t begun_ns;
    uint64_t policy_ns; /* the policy's now, when it began */
    struct {            /* the last root that was opened: chains of one salt come together */
        struct kvk_space *space;
        const uint8_t *salt;
        size_t salt_size;
        uint32_t ids[KVK_GROUP_COUNT_MAX];
    } root;
    struct kvk_restore_counts counts;
};

/* Copied bytes, in pieces that do not move. */
struct copies {
    struct copies *next;
    size_t used, size;
    uint64_t bytes[];
};

static struct record *record_at(const struct kvk_restore *restore, uint32_t number)
{
    return &restore->chunks[number / CHUNK_RECORDS][number % CHUNK_RECORDS];
}

/* ---- Gathering ---- */

enum kvk_status kvk_restore_begin(struct kvk_cache *cache, struct kvk_restore **restore,
                                  struct kvk_error *error)
{
    struct kvk_restore *created = calloc(1, sizeof(*created));
    struct record **chunks = calloc(CHUNK_COUNT_MAX, sizeof(*chunks));
    if (created == NULL || chunks == NULL) {
        free(created);
        free(chunks);
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory to restore blocks");
    }
    created->cache = cache;
    created->chunks = chunks;
    created->stack = NONE;
    created->done = NONE;
    created->begun_ns = kvk_clock_now(kvk_clock_monotonic());
    *restore = created;
    return KVK_OK;
}

static void restore_destroy(struct kvk_restore *restore)
{
    while (restore->copies != NULL) {
        struct copies *next = restore->copies->next;
        free(restore->copies);
        restore->copies = next;
    }
    for (uint32_t i = 0; i < CHUNK_COUNT_MAX && restore->chunks[i] != NULL; i++) {
        free(restore->chunks[i]);
    }
    free(restore->chunks);
    free(restore->buckets);
    free(restore);
}

/* Room for `size` bytes, aligned for anything; NULL: no memory. */
static void *copy_room(struct kvk_restore *restore, size_t size)
{
    size = (size + sizeof(uint64_t) - 1) / sizeof(uint64_t) * sizeof(uint64_t);
    struct copies *copies = restore->copies;
    if (copies == NULL || copies->size - copies->used < size) {
        size_t room = size > COPY_CHUNK_BYTES ? size : COPY_CHUNK_BYTES;
        copies = malloc(sizeof(*copies) + room);
        if (copies == NULL) {
            return NULL;
        }
        *copies = (struct copies){.next = restore->copies, .size = room};
        restore->copies = copies;
    }
    void *bytes = (uint8_t *)copies->bytes + copies->used;
    copies->used += size;
    return bytes;
}

static const void *copy_of(struct kvk_restore *restore, const void *bytes, size_t size,
                           bool *enough)
{
    void *copy = size == 0 ? NULL : copy_room(restore, size);
    if (copy != NULL) {
        memcpy(copy, bytes, size);
    }
    *enough = *enough && (copy != NULL || size == 0);
    return copy;
}

static struct record *record_add(struct kvk_restore *restore)
{
    uint32_t chunk = restore->count / CHUNK_RECORDS;
    if (chunk == CHUNK_COUNT_MAX || restore->count == NONE - 1) {
        return NULL;
    }
    if (restore->chunks[chunk] == NULL) {
        restore->chunks[chunk] = malloc(CHUNK_RECORDS * sizeof(struct record));
        if (restore->chunks[chunk] == NULL) {
            return NULL;
        }
    }
    return record_at(restore, restore->count);
}

enum kvk_status kvk_restore_add(struct kvk_restore *restore, const struct kvk_restore_block *block,
                                struct kvk_error *error)
{
    const struct kvk_group *group = block->group;
    struct record *record = record_add(restore);
    bool enough = record != NULL;
    if (enough) {
        uint64_t idle_s = block->idle_ns / KVK_NS_PER_SECOND;
        *record = (struct record){
            .key = block->key,
            .parent = block->parent,
            .group = block->group,
            .tokens = block->tokens,
            .extra = block->extra,
            .salt = block->salt,
            .checksums = block->checksums,
            .host_checksums = block->host_checksums,
            .extra_size = (uint32_t)block->extra_size,
            .salt_size = block->position == 0 ? (uint32_t)block->salt_size : 0,
            .position = block->position,
            .use_count = block->use_count,
            .idle_s = idle_s < IDLE_SECONDS_MAX ? (uint32_t)idle_s : IDLE_SECONDS_MAX,
            .entry = block->record,
            .block = NONE,
        };
        memcpy(record->slot, block->slot, sizeof(record->slot));
    }
    if (enough && !block->borrowed) {
        size_t token_size = group->space->block_tokens * sizeof(uint32_t);
        size_t checksum_size = group->shard_count * sizeof(uint64_t);
        record->tokens = copy_of(restore, block->tokens, token_size, &enough);
        record->extra = copy_of(restore, block->extra, record->extra_size, &enough);
        record->salt = copy_of(restore, block->salt, record->salt_size, &enough);
        record->checksums = copy_of(restore, block->checksums, checksum_size, &enough);
        record->host_checksums = record->checksums;
    }
    if (!enough) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory to restore blocks");
    }
    if (record->idle_s > restore->idle_s_max) {
        restore->idle_s_max = record->idle_s;
    }
    restore->count++;
    restore->counts.records++;
    return KVK_OK;
}

/* ---- By parents ---- */

static bool is_child_of(const struct record *child, const struct record *parent)
{
    return kvk_key_equal(child->parent, parent->key) && child->group == parent->group &&
           child->position == parent->position + 1;
}

/* Chains were recorded as they grew, so as a rule a child comes right behind its parent, and needs
 * no looking for. How many do not. */
static uint32_t followers_mark(struct kvk_restore *restore)
{
    uint32_t others = 0;
    for (uint32_t i = 0; i < restore->count; i++) {
        struct record *record = record_at(restore, i);
        if (record->position == 0) {
            continue; /* the root is nobody's record */
        }
        record->follows = i > 0 && is_child_of(record, record_at(restore, i - 1));
        others += record->follows ? 0 : 1;
    }
    return others;
}

static bool buckets_make(struct kvk_restore *restore)
{
    uint64_t others = followers_mark(restore);
    uint64_t count = 16;
    while (count < others) {
        count *= 2;
    }
    restore->buckets = malloc(count * sizeof(*restore->buckets));
    if (restore->buckets == NULL) {
        return false;
    }
    (void)madvise(restore->buckets, count * sizeof(*restore->buckets), MADV_HUGEPAGE);
    memset(restore->buckets, 0xff, count * sizeof(*restore->buckets));
    restore->bucket_mask = count - 1;
    for (uint32_t i = 0; i < restore->count; i++) {
        struct record *record = record_at(restore, i);
        if (record->position > 0 && !record->follows) {
            uint32_t *bucket = &restore->buckets[record->parent.low & restore->bucket_mask];
            record->next = *bucket;
            *bucket = i;
        }
    }
    return true;
}

static void child_push(struct kvk_restore *restore, uint32_t number, uint32_t block)
{
    struct record *child = record_at(restore, number);
    child->block = block;
    child->next = restore->stack;
    restore->stack = number;
}

/* Move the children of a block that is in onto the stack. */
static void children_push(struct kvk_restore *restore, uint32_t parent, uint32_t block)
{
    const struct record *record = record_at(restore, parent);
    uint32_t *link = &restore->buckets[record->key.low & restore->bucket_mask];
    while (*link != NONE) {
        uint32_t number = *link;
        struct record *child = record_at(restore, number);
        if (is_child_of(child, record)) {
            *link = child->next;
            child_push(restore, number, block);
        } else {
            link = &child->next;
        }
    }
    if (parent + 1 < restore->count && record_at(restore, parent + 1)->follows) {
        child_push(restore, parent + 1, block);
    }
}

/* ---- Putting in ---- */

/* With the cache full of what was put back, others may have a turn. */
static void slice_drops(struct kvk_restore *restore)
{
    if (++restore->slice >= SLICE_RECORDS) {
        restore->slice = 0;
        kvk_lock_pass(&restore->cache->lock);
    }
}

/* The slots that the record names become the block's, where they are still to be had. */
static void copies_return(struct kvk_restore *restore, struct record *record, uint32_t id)
{
    struct kvk_cache *cache = restore->cache;
    struct kvk_group *group = record->group;
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        enum kvk_tier tier = (enum kvk_tier)i;
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (record->slot[i] == KVK_SLOT_NONE) {
            continue;
        }
        if (!group->tiers[i].present) {
            restore->counts.crowded++;
            continue;
        }
        if (block->slot[i] != KVK_SLOT_NONE) {
            restore->counts.duplicates++;
            continue;
        }
        enum kvk_status status = kvk_slot_take_at(cache, group, tier, record->slot[i]);
        if (status == KVK_OK) {
            kvk_block_put_back(cache, id, tier, record->slot[i],
                               tier == KVK_TIER_HOST ? record->host_checksums : record->checksums);
            record->returned_mask |= (uint8_t)(1U << i);
            restore->counts.copies[i]++;
        } else if (status == KVK_EXISTS) {
            restore->counts.duplicates++;
        } else {
            restore->counts.crowded++; /* the tier is smaller now, or its tenant's limit is */
        }
    }
}

static void worth_return(struct kvk_restore *restore, const struct record *record, uint32_t id)
{
    struct kvk_cache *cache = restore->cache;
    uint64_t idle_ns = record->idle_s * KVK_NS_PER_SECOND;
    uint64_t used_ns = restore->policy_ns > idle_ns ? restore->policy_ns - idle_ns : 0;
    kvk_evict_restore(cache->evict, kvk_index_block(cache->index, id),
                      kvk_space_block_cost(record->group->space, record->position),
                      record->group->windowed, cache->stamp + restore->idle_s_max - record->idle_s,
                      used_ns, record->use_count);
}

static void known_merge(struct kvk_restore *restore, struct record *record, uint32_t winner)
{
    record->block = winner;
    copies_return(restore, record, winner);
    restore->counts.duplicates += record->returned_mask == 0 ? 1 : 0;
}

static void record_insert(struct kvk_restore *restore, uint32_t number, uint32_t root)
{
    struct kvk_cache *cache = restore->cache;
    struct record *record = record_at(restore, number);
    struct kvk_cursor cursor = {.root = root, .block = record->block, .blocks = record->position};
    uint32_t winner;
    record->visited = true;
    record->block = NONE;
    uint32_t id = kvk_index_block_alloc(cache->index, record->group->number);
    if (id == KVK_BLOCK_NONE) {
        restore->counts.crowded++;
        return;
    }
    struct kvk_block *block = kvk_index_block(cache->index, id);
    kvk_block_step(block, KVK_BLOCK_RESERVE);
    kvk_block_step(block, KVK_BLOCK_WRITE);
    kvk_block_step(block, KVK_BLOCK_SEAL);
    enum kvk_status status =
        kvk_index_insert_known(cache->index, &cursor, record->key, record->tokens, record->extra,
                               record->extra_size, id, &winner);
    if (status != KVK_OK) {
        kvk_block_step(block, KVK_BLOCK_DISCARD);
        kvk_index_block_free(cache->index, id);
    } else {
        kvk_metadata_add(cache, record->group->space->tenant, KVK_METADATA_BLOCKS, 1,
                         record->group->record_bytes);
        (void)kvk_metadata_extra_add(cache, record->group, id);
    }
    if (status == KVK_DATA_LOSS) {
        restore->counts.wrong++;
    } else if (status == KVK_EXHAUSTED) {
        restore->counts.crowded++;
    } else if (status == KVK_EXISTS) {
        known_merge(restore, record, winner);
        children_push(restore, number, winner);
    } else {
        record->block = id;
        record->next = restore->done;
        restore->done = number;
        worth_return(restore, record, id);
        if (record->entry != 0) {
            kvk_sidecar_bind(cache, record->group, id, record->entry - 1);
        }
        copies_return(restore, record, id);
        children_push(restore, number, id);
    }
}

/* ---- Roots ---- */

static void root_close(struct kvk_restore *restore)
{
    if (restore->root.space != NULL) {
        kvk_space_roots_release(restore->cache, restore->root.space, restore->root.ids);
        restore->root.space = NULL;
    }
}

/* KVK_ROOT_NONE: no more roots, or the record is of another generation or secret. */
static uint32_t root_open(struct kvk_restore *restore, const struct record *record)
{
    struct kvk_cache *cache = restore->cache;
    struct kvk_space *space = record->group->space;
    bool same = restore->root.space == space && restore->root.salt_size == record->salt_size &&
                (record->salt_size == 0 ||
                 memcmp(restore->root.salt, record->salt, record->salt_size) == 0);
    if (!same) {
        root_close(restore);
        if (kvk_space_roots(cache, space, record->salt, record->salt_size, restore->root.ids,
                            NULL) != KVK_OK) {
            return KVK_ROOT_NONE;
        }
        restore->root.space = space;
        restore->root.salt = record->salt;
        restore->root.salt_size = record->salt_size;
    }
    uint32_t root = restore->root.ids[record->group->index];
    return kvk_key_equal(kvk_index_key_of_root(cache->index, root), record->parent) ? root
                                                                                    : KVK_ROOT_NONE;
}

static void chains_insert_drops(struct kvk_restore *restore)
{
    for (uint32_t i = 0; i < restore->count; i++) {
        struct record *first = record_at(restore, i);
        if (first->position != 0 || first->visited) {
            continue;
        }
        uint32_t root = root_open(restore, first);
        if (root == KVK_ROOT_NONE) {
            continue;
        }
        record_insert(restore, i, root);
        while (restore->stack != NONE) {
            uint32_t number = restore->stack;
            restore->stack = record_at(restore, number)->next;
            record_insert(restore, number, root);
            slice_drops(restore);
        }
        slice_drops(restore);
    }
    root_close(restore);
}

/* ---- Letting go ---- */

static void block_let_go(struct kvk_restore *restore, const struct record *record)
{
    struct kvk_cache *cache = restore->cache;
    struct kvk_block *block = kvk_index_block(cache->index, record->block);
    if (block->tier_mask != 0) {
        restore->counts.blocks++;
        kvk_block_release(cache, record->block, false);
        return;
    }
    /* Hollow; and gone where no child needs it. Children were let go of before. */
    restore->counts.blocks += block->child_count > 0 ? 1 : 0;
    kvk_index_anchor(cache->index, record->block);
    kvk_block_step(block, KVK_BLOCK_RELEASE);
    kvk_block_step(block, KVK_BLOCK_EVICT);
    kvk_index_unanchor(cache->index, record->block);
    kvk_block_settle(cache, record->block);
}

/* The last one that went in first, so children before their parents. */
static void all_let_go_drops(struct kvk_restore *restore)
{
    for (uint32_t number = restore->done; number != NONE;) {
        const struct record *record = record_at(restore, number);
        number = record->next;
        if (number != NONE) {
            __builtin_prefetch(record_at(restore, number));
        }
        block_let_go(restore, record);
        slice_drops(restore);
    }
}

static void short_slabs_fill(struct kvk_cache *cache)
{
    for (uint32_t i = 0; i < cache->group_end; i++) {
        for (int tier = 0; cache->groups[i] != NULL && tier < KVK_TIER_COUNT; tier++) {
            if (tier == KVK_TIER_DISK && cache->groups[i]->tiers[tier].present) {
                kvk_arena_fill_out(&cache->groups[i]->tiers[tier].arena);
            }
        }
    }
}

static void refused_tell(struct kvk_restore *restore,
                         void (*refused)(void *context, struct kvk_group *group, enum kvk_tier tier,
                                         uint32_t slot),
                         void *context)
{
    for (uint32_t i = 0; i < restore->count; i++) {
        const struct record *record = record_at(restore, i);
        restore->counts.orphans += record->visited ? 0 : 1;
        for (int tier = 0; tier < KVK_TIER_COUNT && refused != NULL; tier++) {
            if (record->slot[tier] != KVK_SLOT_NONE &&
                (record->returned_mask & (1U << tier)) == 0) {
                refused(context, record->group, (enum kvk_tier)tier, record->slot[tier]);
            }
        }
    }
}

enum kvk_status kvk_restore_finish(struct kvk_restore *restore,
                                   void (*refused)(void *context, struct kvk_group *group,
                                                   enum kvk_tier tier, uint32_t slot),
                                   void *context, struct kvk_restore_counts *counts,
                                   struct kvk_error *error)
{
    struct kvk_cache *cache = restore->cache;
    enum kvk_status status = KVK_OK;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (!buckets_make(restore)) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory to restore blocks");
    } else if (restore->count > 0) {
        kvk_lock(&cache->lock);
        restore->policy_ns = kvk_policy_now(cache);
        kvk_index_expect(cache->index, restore->count);
        chains_insert_drops(restore);
        cache->stamp += restore->idle_s_max + UINT64_C(1);
        all_let_go_drops(restore);
        short_slabs_fill(cache);
        kvk_unlock(&cache->lock);
    }
    refused_tell(restore, refused, context);
    restore->counts.duration_ns = kvk_clock_now(kvk_clock_monotonic()) - restore->begun_ns;
    *counts = restore->counts;
    restore_destroy(restore);
    return status;
}
