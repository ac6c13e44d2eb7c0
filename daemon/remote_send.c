/*
 * Sending behind: what has earned it goes to the store, ancestors with their children.
 *
 * A batch is gathered from the queue and asked for first, which touches what is there already
 * (another daemon may have sent it, and the store evicts by its own rule). The rest is copied to a
 * buffer, the only time for which its blocks are kept in their place, checked against its
 * checksums, and stored under the generation that was read before its blocks were seen to be
 * current. Nothing in memory waits for any of it.
 */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/remote_internal.h"
#include "daemon/upkeep.h"

#define BATCH_BLOCKS 128U
#define LOOKED_MAX (4U * BATCH_BLOCKS)
#define LINKS_AT_ONCE 64U          /* that are walked with the lock held */
#define PAUSE_NS KVK_NS_PER_SECOND /* while the store is away, or takes nothing */
#define FULL_PAUSE_NS (5 * KVK_NS_PER_SECOND)

/* A batch sent, one written to disk, and what the scrub looks at. */
_Static_assert(BATCH_BLOCKS + KVK_DISK_BATCH_BLOCKS + 1 <= KVK_UPKEEP_BLOCKS_MAX,
               "all that is kept at a time has a place");

struct entry {
    struct kvk_group *group;
    uint32_t id;
    enum kvk_tier source;
    uint32_t batch;       /* which of the batches */
    uint32_t block;       /* in it */
    uint32_t first_piece; /* of its copies, a shard each */
    struct kvk_remote_id name;
    uint8_t *witness; /* [witness bytes of its space] */
    bool converts;    /* what was copied is in its own form still */
    bool wanted;      /* not there */
    bool staged;
    bool again; /* it was not its fault: it waits for another turn */
};

struct batch {
    struct entry entries[BATCH_BLOCKS];
    uint32_t count;
    uint64_t bytes;
    /* One per group that has entries. */
    struct kvk_remote_batch batches[KVK_GROUP_COUNT_MAX];
    struct kvk_remote_space spaces[KVK_GROUP_COUNT_MAX];
    struct kvk_group *groups[KVK_GROUP_COUNT_MAX];
    uint64_t numbers[KVK_GROUP_COUNT_MAX]; /* generations, as they were read */
    uint32_t group_count;
    struct kvk_remote_block blocks[BATCH_BLOCKS];
    struct kvk_remote_piece *pieces; /* ours, as the next ones */
    struct kvk_copy *copies;
    uint64_t *sums;
    uint8_t *narrow; /* [narrow_bytes] compact forms of what was copied */
    uint64_t narrow_bytes;
    uint64_t own_bytes; /* of all blocks, as they may lie in memory */
    uint8_t *witnesses; /* [witness_bytes] */
    uint64_t witness_bytes;
};

/* ---- Queueing ---- */

static bool is_in_memory(const struct kvk_block *block)
{
    return (block->tier_mask & KVK_MEMORY_TIER_MASK) != 0;
}

/* Twice as often used each time, so that a block that was not sent, or was evicted there, gets
 * another chance, and what is hot here stays so there. */
static bool is_due(const struct kvk_cache *cache, const struct kvk_block *block)
{
    uint32_t due = cache->config->remote.admit_uses;
    while (due < block->use_count) {
        due *= 2;
    }
    return due == block->use_count;
}

static bool queue_add(struct kvk_remote_store *store, uint32_t id)
{
    if (store->queue_count == store->queue_capacity) {
        store->stats.offers_dropped++;
        return false;
    }
    store->queue[(store->queue_first + store->queue_count) % store->queue_capacity] = id;
    store->queue_count++;
    store->flags[id] |= KVK_REMOTE_QUEUED;
    return true;
}

void kvk_remote_offer(struct kvk_cache *cache, uint32_t id, bool sealed)
{
    struct kvk_remote_store *store = cache->remote;
    if (store == NULL) {
        return;
    }
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    bool due = sealed ? block->use_count >= cache->config->remote.admit_uses : is_due(cache, block);
    if (!due || (store->flags[id] & KVK_REMOTE_QUEUED) != 0 || !is_in_memory(block) ||
        kvk_remote_member_of(cache, kvk_group_of(cache, block)->space) == NULL) {
        return;
    }
    if (queue_add(store, id)) {
        store->stats.offered_blocks++;
        if (store->queue_count == 1) {
            pthread_cond_signal(&store->send_wake);
        }
    }
}

static uint32_t queue_take(struct kvk_remote_store *store)
{
    uint32_t id = store->queue[store->queue_first];
    store->queue_first = (store->queue_first + 1) % store->queue_capacity;
    store->queue_count--;
    return id;
}

/* ---- Links ---- */

/* So many of the chain's links as may be walked at once. True: the block's is known now. */
static bool links_walk(struct kvk_remote_store *store, struct kvk_remote_member *member,
                       uint32_t id)
{
    struct kvk_cache *cache = store->cache;
    uint32_t path[LINKS_AT_ONCE]; /* a ring: the highest of those without a link */
    uint32_t count = 0;
    uint32_t at = id;
    while (at != KVK_BLOCK_NONE && (store->flags[at] & KVK_REMOTE_LINKED) == 0) {
        path[count++ % LINKS_AT_ONCE] = at;
        at = kvk_index_block(cache->index, at)->parent;
    }
    struct kvk_fleet_link link;
    if (at != KVK_BLOCK_NONE) {
        link = store->links[at];
    } else {
        size_t salt_size;
        uint32_t root = kvk_index_root_of(cache->index, id);
        const uint8_t *salt = kvk_index_root_salt(cache->index, root, &salt_size);
        const struct kvk_group *group = kvk_group_of(cache, kvk_index_block(cache->index, id));
        kvk_fleet_chain_root(member->chain, group->index, salt, salt_size, &link);
    }
    for (uint32_t walked = 0; walked < LINKS_AT_ONCE && count > 0; walked++) {
        uint32_t next = path[--count % LINKS_AT_ONCE];
        size_t extra_size;
        const uint8_t *extra = kvk_index_extra(cache->index, next, &extra_size);
        struct kvk_remote_id name;
        kvk_fleet_chain_next(member->chain, &link, kvk_index_tokens(cache->index, next), extra,
                             extra_size, &name, NULL);
        store->links[next] = link;
        store->flags[next] |= KVK_REMOTE_LINKED;
    }
    return (store->flags[id] & KVK_REMOTE_LINKED) != 0;
}

static bool is_current(const struct kvk_cache *cache, uint32_t id)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    return kvk_block_is_whole(block) && block->run != UINT32_MAX &&
           kvk_root_is_current(cache, kvk_index_root_of(cache->index, id));
}

/* The block's name and witness: from its parent's link. The lock is dropped between slices. False:
 * it is not what it was any more. */
static bool name_find_drops(struct kvk_remote_store *store, struct entry *entry)
{
    struct kvk_cache *cache = store->cache;
    for (;;) {
        struct kvk_remote_member *member = kvk_remote_member_of(cache, entry->group->space);
        if (member == NULL || (store->flags[entry->id] & KVK_REMOTE_SENDING) == 0 ||
            !is_current(cache, entry->id)) {
            return false;
        }
        uint32_t parent = kvk_index_block(cache->index, entry->id)->parent;
        struct kvk_fleet_link link;
        if (parent != KVK_BLOCK_NONE && !links_walk(store, member, parent)) {
            kvk_lock_pass(&cache->lock);
            continue;
        }
        if (parent != KVK_BLOCK_NONE) {
            link = store->links[parent];
        } else {
            size_t salt_size;
            uint32_t root = kvk_index_root_of(cache->index, entry->id);
            const uint8_t *salt = kvk_index_root_salt(cache->index, root, &salt_size);
            kvk_fleet_chain_root(member->chain, entry->group->index, salt, salt_size, &link);
        }
        size_t extra_size;
        const uint8_t *extra = kvk_index_extra(cache->index, entry->id, &extra_size);
        kvk_fleet_chain_next(member->chain, &link, kvk_index_tokens(cache->index, entry->id), extra,
                             extra_size, &entry->name, entry->witness);
        store->links[entry->id] = link;
        store->flags[entry->id] |= KVK_REMOTE_LINKED;
        return true;
    }
}

/* ---- Gathering ---- */

/* Is the prefix up to the block quicker fetched than computed? All groups' bytes of a position
 * belong together. */
static bool is_worth_it(struct kvk_remote_store *store, const struct kvk_group *group,
                        const struct kvk_block *block, uint64_t rate)
{
    const struct kvk_space *space = group->space;
    uint64_t blocks = (uint64_t)block->position + 1;
    uint64_t recompute_ns = kvk_space_recompute_ns(space, 0, blocks * space->block_tokens);
    uint64_t bytes = 0;
    for (uint32_t g = 0; g < space->group_count; g++) {
        bytes += blocks * kvk_remote_stored_bytes(space->groups[g]);
    }
    double fetch_ns = (double)bytes / (double)rate * (double)KVK_NS_PER_SECOND;
    bool worth = recompute_ns == 0 || fetch_ns < (double)recompute_ns;
    store->stats.unworthy_blocks += worth ? 0 : 1;
    return worth;
}

/* The block, or its first ancestor, that the store is not known to have; under full attention none
 * behind a gap is worth anything. KVK_BLOCK_NONE: an ancestor is not in memory. */
static uint32_t sendable(const struct kvk_remote_store *store, const struct kvk_group *group,
                         uint32_t id)
{
    const struct kvk_cache *cache = store->cache;
    uint32_t at = id;
    while (is_in_memory(kvk_index_block(cache->index, at))) {
        uint32_t parent = kvk_index_block(cache->index, at)->parent;
        if (group->windowed || parent == KVK_BLOCK_NONE ||
            (store->flags[parent] & (KVK_REMOTE_THERE | KVK_REMOTE_SENDING)) != 0) {
            return at;
        }
        at = parent;
    }
    return KVK_BLOCK_NONE;
}

/* The group's place among the batches; KVK_GROUP_COUNT_MAX: there is none left. */
static uint32_t group_place(struct batch *batch, struct kvk_group *group)
{
    for (uint32_t i = 0; i < batch->group_count; i++) {
        if (batch->groups[i] == group) {
            return i;
        }
    }
    return batch->group_count;
}

/* Was the same ancestor tried for the same block in vain just before? */
static bool is_stuck(struct kvk_remote_store *store, const struct batch *batch, uint32_t candidate,
                     uint32_t id)
{
    if (batch->count > 0 || id == candidate) {
        return false;
    }
    bool stuck = store->tried_candidate == candidate && store->tried_ancestor == id;
    store->tried_candidate = stuck ? KVK_BLOCK_NONE : candidate;
    store->tried_ancestor = id;
    return stuck;
}

enum gathering { GATHER_MORE, GATHER_DONE };

static enum gathering gather_one(struct kvk_remote_store *store, struct batch *batch, uint64_t rate)
{
    struct kvk_cache *cache = store->cache;
    uint32_t candidate = store->queue[store->queue_first];
    struct kvk_group *group = NULL;
    uint32_t id = KVK_BLOCK_NONE;
    /* What left the queue's mark was freed, and its id perhaps given on. */
    if ((store->flags[candidate] & KVK_REMOTE_QUEUED) != 0 && is_current(cache, candidate)) {
        group = kvk_group_of(cache, kvk_index_block(cache->index, candidate));
        id = kvk_remote_member_of(cache, group->space) == NULL ? KVK_BLOCK_NONE
                                                               : sendable(store, group, candidate);
    }
    if (id == KVK_BLOCK_NONE || (store->flags[id] & KVK_REMOTE_SENDING) != 0 ||
        is_stuck(store, batch, candidate, id) ||
        !is_worth_it(store, group, kvk_index_block(cache->index, candidate), rate)) {
        store->stats.late_blocks += id == KVK_BLOCK_NONE ? 1 : 0;
        (void)queue_take(store);
        store->flags[candidate] &= (uint8_t)~KVK_REMOTE_QUEUED;
        return GATHER_MORE;
    }
    uint32_t place = group_place(batch, group);
    uint64_t bytes = kvk_remote_stored_bytes(group);
    uint64_t number;
    if (batch->count == BATCH_BLOCKS || place == KVK_GROUP_COUNT_MAX ||
        (batch->count > 0 && batch->bytes + bytes > cache->config->remote.batch_bytes) ||
        !kvk_fleet_generation(group->space->remote->fleet, &number)) {
        return GATHER_DONE;
    }
    if (place < batch->group_count && number != batch->numbers[place]) {
        return GATHER_DONE; /* raised meanwhile */
    }
    if (id == candidate) {
        (void)queue_take(store);
        store->flags[candidate] &= (uint8_t)~KVK_REMOTE_QUEUED;
    }
    if (place == batch->group_count) {
        batch->groups[place] = group;
        batch->numbers[place] = number;
        batch->spaces[place] = group->space->remote->groups[group->index];
        batch->spaces[place].generation = number;
        batch->group_count++;
    }
    batch->entries[batch->count++] = (struct entry){.group = group, .id = id, .batch = place};
    batch->bytes += bytes;
    batch->own_bytes += group->block_bytes;
    batch->narrow_bytes +=
        kvk_remote_form(group)->compact ? kvk_remote_form(group)->block_bytes : 0;
    batch->witness_bytes += kvk_fleet_witness_bytes(group->space->block_tokens);
    store->flags[id] |= KVK_REMOTE_SENDING; /* what hangs below it can follow */
    group->space->reference_count++;        /* stays, whatever becomes of its blocks */
    return GATHER_MORE;
}

static bool batch_allocate(struct batch *batch)
{
    uint64_t shards = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        shards += batch->entries[i].group->shard_count;
    }
    batch->pieces = calloc(shards + batch->count, sizeof(*batch->pieces));
    batch->copies = calloc(shards, sizeof(*batch->copies));
    batch->sums = calloc(shards, sizeof(*batch->sums));
    batch->witnesses = malloc(batch->witness_bytes);
    batch->narrow = batch->narrow_bytes > 0 ? malloc(batch->narrow_bytes) : NULL;
    return (batch->narrow != NULL || batch->narrow_bytes == 0) && batch->pieces != NULL &&
           batch->copies != NULL && batch->sums != NULL && batch->witnesses != NULL;
}

static void batch_free(struct batch *batch)
{
    for (uint32_t i = 0; i < batch->group_count; i++) {
        kvk_remote_space_finish(&batch->spaces[i]);
    }
    free(batch->pieces);
    free(batch->copies);
    free(batch->sums);
    free(batch->witnesses);
    free(batch->narrow);
    free(batch);
}

static bool buffer_reserve(struct kvk_remote_store *store, uint64_t bytes)
{
    uint64_t batch_bytes = store->cache->config->remote.batch_bytes;
    bytes = bytes > batch_bytes ? bytes : batch_bytes;
    if (store->buffer_bytes >= bytes) {
        return true;
    }
    uint8_t *buffer = malloc(bytes);
    if (buffer == NULL) {
        return false;
    }
    free(store->buffer);
    store->buffer = buffer;
    store->buffer_bytes = bytes;
    return true;
}

/* ---- Are they there? ---- */

/* The entries that are left, one batch for each group. */
static uint32_t batches_fill(struct batch *batch, enum kvk_remote_operation operation,
                             bool (*takes)(const struct entry *entry))
{
    uint32_t count = 0;
    uint32_t done = 0;
    for (uint32_t place = 0; place < batch->group_count; place++) {
        uint32_t first = done;
        for (uint32_t i = 0; i < batch->count; i++) {
            struct entry *entry = &batch->entries[i];
            if (entry->batch == place && takes(entry)) {
                entry->block = done;
                batch->blocks[done++] = (struct kvk_remote_block){.id = entry->name};
            }
        }
        if (done > first) {
            batch->batches[count++] = (struct kvk_remote_batch){
                .operation = operation,
                .space = &batch->spaces[place],
                .blocks = &batch->blocks[first],
                .block_count = done - first,
            };
        }
    }
    return count;
}

static bool is_wanted(const struct entry *entry)
{
    return entry->wanted;
}

static bool is_staged(const struct entry *entry)
{
    return entry->staged;
}

static void names_find_drops(struct kvk_remote_store *store, struct batch *batch)
{
    uint8_t *witness = batch->witnesses;
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        entry->witness = witness;
        witness += kvk_fleet_witness_bytes(entry->group->space->block_tokens);
        entry->wanted = name_find_drops(store, entry);
    }
}

/* What is not there stays wanted. False: the store does not answer. */
static bool present_find_drops(struct kvk_remote_store *store, struct batch *batch)
{
    struct kvk_cache *cache = store->cache;
    uint32_t count = batches_fill(batch, KVK_REMOTE_EXISTS, is_wanted);
    bool answers = true;
    kvk_unlock(&cache->lock);
    kvk_remote_run(store, batch->batches, count, cache->config->remote.ask_ms);
    kvk_lock(&cache->lock);
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        if (!entry->wanted) {
            continue;
        }
        enum kvk_remote_result result = batch->blocks[entry->block].result;
        bool is_ours = (store->flags[entry->id] & KVK_REMOTE_SENDING) != 0;
        entry->wanted = is_ours && result < KVK_REMOTE_FULL && result != KVK_REMOTE_HIT;
        answers = answers && result < KVK_REMOTE_FULL;
        if (is_ours && result == KVK_REMOTE_HIT) {
            store->flags[entry->id] |= KVK_REMOTE_THERE;
            store->stats.present_blocks++;
        }
    }
    return answers;
}

/* ---- Staging ---- */

/* May the tenant write so much more? It may, and it is taken. */
static bool budget_take(struct kvk_remote_store *store, const struct kvk_tenant *tenant,
                        uint64_t bytes)
{
    const struct kvk_remote_config *config = &store->cache->config->remote;
    struct kvk_remote_budget *budget = &store->budgets[tenant->index];
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    if (config->tenant_bytes == 0) {
        return true;
    }
    double since = budget->counted_ns == 0
                       ? 1.0
                       : (double)(now_ns - budget->counted_ns) /
                             ((double)config->tenant_period_ms * (double)KVK_NS_PER_MS);
    double left = (double)budget->left_bytes + since * (double)config->tenant_bytes;
    double most = (double)config->tenant_bytes;
    budget->left_bytes = left < most ? (uint64_t)left : config->tenant_bytes;
    budget->counted_ns = now_ns;
    if (bytes > budget->left_bytes) {
        return false;
    }
    budget->left_bytes -= bytes;
    return true;
}

/* Borrow what is still to be sent, and say what is copied where. How many pieces. */
static uint32_t stage_begin(struct kvk_remote_store *store, struct batch *batch)
{
    struct kvk_cache *cache = store->cache;
    uint8_t *target = store->buffer;
    uint32_t count = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        struct kvk_group *group = entry->group;
        uint64_t number;
        const struct kvk_remote_member *member = kvk_remote_member_of(cache, group->space);
        if (!entry->wanted || (store->flags[entry->id] & KVK_REMOTE_SENDING) == 0 ||
            !is_current(cache, entry->id) || member == NULL) {
            continue;
        }
        if (!kvk_fleet_generation(member->fleet, &number) ||
            number != batch->numbers[entry->batch]) {
            entry->again = true;
            continue;
        }
        const struct kvk_block *block = kvk_index_block(cache->index, entry->id);
        if (!is_in_memory(block)) {
            store->stats.late_blocks++;
            continue;
        }
        if (!budget_take(store, group->space->tenant, kvk_remote_stored_bytes(group))) {
            store->stats.over_budget_blocks++;
            continue;
        }
        entry->source = kvk_block_tier(block);
        if (kvk_remote_form(group)->compact && (block->tier_mask & (1U << KVK_TIER_HOST)) != 0) {
            entry->source = KVK_TIER_HOST; /* where it may be compact already */
        }
        entry->converts = kvk_remote_converts(group, entry->source);
        entry->staged = true;
        entry->first_piece = count;
        for (uint32_t shard = 0; shard < group->shard_count; shard++, count++) {
            batch->copies[count] =
                (struct kvk_copy){.target = target,
                                  .source = kvk_block_address(cache, block, entry->source, shard),
                                  .size_bytes = group->forms[entry->source].shard_bytes[shard],
                                  .checksum = &batch->sums[count]};
            target += group->forms[entry->source].shard_bytes[shard];
        }
        kvk_upkeep_borrow(cache, entry->id, entry->source);
    }
    return count;
}

static bool sums_match(const struct kvk_cache *cache, const struct batch *batch,
                       const struct entry *entry)
{
    const struct kvk_block *block = kvk_index_block(cache->index, entry->id);
    uint64_t *known = kvk_block_checksums(cache, block, entry->source);
    for (uint32_t shard = 0; shard < entry->group->shard_count; shard++) {
        uint64_t sum = batch->sums[entry->first_piece + shard];
        if (known[shard] == 0) {
            known[shard] = sum; /* nobody knew: these are it */
        } else if (known[shard] != sum) {
            return false;
        }
    }
    return true;
}

static void stage_end(struct kvk_remote_store *store, struct batch *batch, bool copied)
{
    struct kvk_cache *cache = store->cache;
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        if (!entry->staged) {
            continue;
        }
        entry->staged = copied && sums_match(cache, batch, entry);
        if (copied && !entry->staged) {
            cache->stats.checksum_failures++;
            kvk_log(KVK_LOG_ERROR, "checksum_mismatch", "block=%u tier=%d", entry->id,
                    (int)entry->source);
            kvk_block_discredit(cache, entry->id, entry->source);
        }
        kvk_upkeep_return(cache, entry->id, entry->source);
    }
}

/* Compact forms of what was copied in its own. A block that has none is not sent. How many. */
static uint64_t narrow_unlocked(struct batch *batch)
{
    uint8_t *target = batch->narrow;
    uint64_t unfit = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        const struct kvk_tier_form *form = kvk_remote_form(entry->group);
        for (uint32_t shard = 0;
             shard < entry->group->shard_count && entry->staged && entry->converts; shard++) {
            struct kvk_copy *copy = &batch->copies[entry->first_piece + shard];
            struct kvk_error error;
            uint64_t sum;
            entry->staged = kvk_tier_form_narrow(&entry->group->geometry, form, shard, copy->target,
                                                 target, &sum, &error) == KVK_OK;
            unfit += entry->staged ? 0 : 1;
            copy->target = target;
            copy->size_bytes = form->shard_bytes[shard];
            target += form->shard_bytes[shard];
        }
    }
    return unfit;
}

static void stage_drops(struct kvk_remote_store *store, struct batch *batch)
{
    struct kvk_cache *cache = store->cache;
    struct kvk_error error;
    struct kvk_device *device = cache->tiers[KVK_TIER_DEVICE].device != NULL
                                    ? cache->tiers[KVK_TIER_DEVICE].device
                                    : cache->tiers[KVK_TIER_HOST].device;
    uint32_t count = stage_begin(store, batch);
    if (count == 0) {
        return;
    }
    kvk_unlock(&cache->lock);
    enum kvk_status status =
        kvk_mover_copy_behind(cache->mover, device, batch->copies, count, &error);
    kvk_lock(&cache->lock);
    cache->stats.copy_failures += status == KVK_OK ? 0 : 1;
    stage_end(store, batch, status == KVK_OK);
    if (batch->narrow_bytes > 0) {
        kvk_unlock(&cache->lock);
        uint64_t unfit = narrow_unlocked(batch);
        kvk_lock(&cache->lock);
        store->stats.unfit_blocks += unfit;
    }
}

/* ---- Storing ---- */

static void pieces_fill(struct batch *batch)
{
    struct kvk_remote_piece *pieces = batch->pieces;
    for (uint32_t i = 0; i < batch->count; i++) {
        const struct entry *entry = &batch->entries[i];
        if (!entry->staged) {
            continue;
        }
        struct kvk_remote_block *block = &batch->blocks[entry->block];
        block->pieces = pieces;
        block->piece_count = 1 + entry->group->shard_count;
        *pieces++ = (struct kvk_remote_piece){
            entry->witness, kvk_fleet_witness_bytes(entry->group->space->block_tokens)};
        for (uint32_t shard = 0; shard < entry->group->shard_count; shard++) {
            const struct kvk_copy *copy = &batch->copies[entry->first_piece + shard];
            *pieces++ = (struct kvk_remote_piece){copy->target, copy->size_bytes};
        }
    }
}

static void store_drops(struct kvk_remote_store *store, struct batch *batch)
{
    struct kvk_cache *cache = store->cache;
    uint32_t count = batches_fill(batch, KVK_REMOTE_STORE, is_staged);
    if (count == 0) {
        return;
    }
    pieces_fill(batch);
    kvk_unlock(&cache->lock);
    kvk_remote_run(store, batch->batches, count, cache->config->remote.store_ms);
    kvk_lock(&cache->lock);
    uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        if (!entry->staged) {
            continue;
        }
        enum kvk_remote_result result = batch->blocks[entry->block].result;
        if (result == KVK_REMOTE_HIT) {
            store->stats.sent_blocks++;
            store->stats.sent_bytes += kvk_remote_stored_bytes(entry->group);
            if ((store->flags[entry->id] & KVK_REMOTE_SENDING) != 0) {
                store->flags[entry->id] |= KVK_REMOTE_THERE;
            }
            continue;
        }
        store->stats.send_failures++;
        entry->again = result == KVK_REMOTE_UNAVAILABLE || result == KVK_REMOTE_DEADLINE;
        store->paused_until_ns = now_ns + (result == KVK_REMOTE_FULL ? FULL_PAUSE_NS : PAUSE_NS);
    }
}

/* ---- A batch ---- */

/* What was not answered for waits again, as far as there is room. */
static void batch_end(struct kvk_remote_store *store, struct batch *batch, bool answered)
{
    for (uint32_t i = 0; i < batch->count; i++) {
        const struct entry *entry = &batch->entries[i];
        uint8_t *flags = &store->flags[entry->id];
        bool is_ours = (*flags & KVK_REMOTE_SENDING) != 0;
        *flags &= (uint8_t)~KVK_REMOTE_SENDING;
        if (is_ours && (!answered || entry->again) &&
            (*flags & (KVK_REMOTE_THERE | KVK_REMOTE_QUEUED)) == 0) {
            (void)queue_add(store, entry->id);
        }
        KVK_ASSERT(entry->group->space->reference_count > 0);
        entry->group->space->reference_count--;
    }
}

/* True: there is more to do at once. */
static bool batch_drops(struct kvk_remote_store *store)
{
    struct kvk_cache *cache = store->cache;
    struct batch *batch = calloc(1, sizeof(*batch));
    uint64_t fetch_ns_of_a_gib;
    uint32_t looked = 0;
    if (batch == NULL) {
        return false;
    }
    kvk_unlock(&cache->lock);
    fetch_ns_of_a_gib = kvk_remote_fetch_ns(store, UINT64_C(1) << 30);
    kvk_lock(&cache->lock);
    double rate = (double)(UINT64_C(1) << 30) / (double)fetch_ns_of_a_gib * 1e9;
    while (looked < LOOKED_MAX && store->queue_count > 0 &&
           gather_one(store, batch, (uint64_t)rate) == GATHER_MORE) {
        looked++;
    }
    bool answered = true;
    if (batch->count > 0) {
        kvk_unlock(&cache->lock);
        bool ready = batch_allocate(batch) && buffer_reserve(store, batch->own_bytes);
        kvk_lock(&cache->lock);
        if (ready) {
            names_find_drops(store, batch);
            answered = present_find_drops(store, batch);
            if (answered) {
                stage_drops(store, batch);
                store_drops(store, batch);
            } else {
                store->paused_until_ns = kvk_clock_now(kvk_clock_monotonic()) + PAUSE_NS;
            }
        }
    }
    bool more = looked > 0 && answered && store->queue_count > 0;
    batch_end(store, batch, answered);
    batch_free(batch);
    return more;
}

void *kvk_remote_sender_main(void *argument)
{
    struct kvk_remote_store *store = argument;
    struct kvk_cache *cache = store->cache;
    (void)pthread_setname_np(pthread_self(), "kvk-remote-send");
    kvk_lock(&cache->lock);
    while (!store->stopping) {
        uint64_t now_ns = kvk_clock_now(kvk_clock_monotonic());
        bool paused = store->paused_until_ns > now_ns;
        if (paused || store->queue_count == 0) {
            (void)kvk_condition_wait(&store->send_wake, &cache->lock,
                                     paused ? store->paused_until_ns : UINT64_MAX);
            continue;
        }
        if (!batch_drops(store) && store->queue_count > 0 && !store->stopping &&
            store->paused_until_ns <= now_ns) {
            store->paused_until_ns = now_ns + PAUSE_NS / 10; /* no generation is known now */
        }
    }
    kvk_unlock(&cache->lock);
    return NULL;
}
