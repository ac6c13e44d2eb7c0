/*
 * Writing behind: blocks that have earned a copy on disk get one, parents before children.
 *
 * A batch is gathered from the queue, written, synced, and then attached and recorded. What suits
 * (disk_straight.c) is written from where it lies, and kept there until the disk has it; the rest
 * is copied to the buffer first, and kept for the copy alone. A block that changed meanwhile, or
 * whose parent did not come along, goes without. Where the disk has a compact format, blocks are
 * copied beside the buffer and converted into it, once they are known to be what was sealed.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/room_internal.h"

#define CHAIN_MAX 256              /* ancestors that are looked at for one block */
#define PAUSE_NS KVK_NS_PER_SECOND /* between tries on a disk that does not write */
#define HUGE_PAGE_BYTES (UINT64_C(2) << 20)
#define LOOKED_MAX (4U * KVK_DISK_BATCH_BLOCKS) /* blocks of the queue, for one batch */

#define HELD_MAX 32U /* that are late, between two moments for others */
#define SLICE 8U     /* blocks that are let go, likewise */

/* One block of a batch. */
struct entry {
    uint32_t block;
    uint32_t slot;
    enum kvk_tier source;
    uint32_t first_piece; /* one per shard, and as many sums */
    uint32_t shard_count;
    struct kvk_group *group;
    uint64_t staging_offset; /* of a block that is converted */
    bool straight;           /* written from where it lies, and kept there; no copies */
    bool narrows;            /* what was copied is in the own format still */
    bool begun;              /* it has pieces and sums, and copies unless it is straight */
    bool staged;             /* and they are what was sealed, as the disk has it */
    bool written;
};

struct batch {
    struct entry entries[KVK_DISK_BATCH_BLOCKS];
    uint32_t count;
    uint64_t bytes;                /* of the buffer */
    struct kvk_disk_piece *pieces; /* [piece_count], ours, as the next two */
    struct kvk_copy *copies;
    uint64_t *sums;      /* of the bytes in memory */
    uint64_t *disk_sums; /* of the bytes as stored */
    uint32_t piece_count;
    uint32_t copy_count;
    uint64_t staging_bytes;
    uint64_t straight_bytes;
};

/* ---- Queueing ---- */

/* Twice as often used each time, so that a block that was not written the first time gets another
 * chance, and one whose copy was dropped again is not written for ever. */
static bool is_due(const struct kvk_cache *cache, const struct kvk_block *block)
{
    uint32_t uses = block->use_count;
    uint32_t due = cache->config->disk_admit_uses;
    while (due < uses) {
        due *= 2;
    }
    return due == uses;
}

static void queue_add(struct kvk_cache *cache, uint32_t id)
{
    struct kvk_disk_tier *tier = cache->disk_tier;
    if (kvk_disk_bit(&tier->queued, id)) {
        return;
    }
    if (!kvk_disk_ring_add(&tier->behind, id)) {
        cache->stats.disk_skipped_blocks++;
        return;
    }
    kvk_disk_bit_set(&tier->queued, id, true);
    if (tier->behind.count == 1) {
        pthread_cond_signal(&tier->wake);
    }
}

void kvk_disk_offer(struct kvk_cache *cache, uint32_t id, bool sealed)
{
    if (cache->disk_tier == NULL) {
        return;
    }
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    bool due = sealed ? block->use_count >= cache->config->disk_admit_uses : is_due(cache, block);
    if (!due || kvk_disk_is_on_disk(block) || !kvk_disk_is_memory(block) ||
        !kvk_group_of(cache, block)->tiers[KVK_TIER_DISK].present) {
        return;
    }
    queue_add(cache, id);
}

void kvk_disk_block_gone(struct kvk_cache *cache, uint32_t id)
{
    if (cache->disk_tier != NULL) {
        kvk_disk_bit_set(&cache->disk_tier->queued, id, false);
        kvk_disk_bit_set(&cache->disk_tier->writing, id, false);
    }
}

/* ---- Gathering ---- */

static bool is_wanted(const struct kvk_cache *cache, uint32_t id)
{
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    return kvk_disk_is_current(cache, id) && block->slot[KVK_TIER_DISK] == KVK_SLOT_NONE &&
           kvk_group_of(cache, block)->tiers[KVK_TIER_DISK].present;
}

static bool is_writing(const struct kvk_cache *cache, uint32_t id)
{
    return kvk_disk_bit(&cache->disk_tier->writing, id);
}

static bool parent_is_there(const struct kvk_cache *cache, const struct kvk_group *group,
                            const struct kvk_block *block)
{
    if (group->windowed || block->parent == KVK_BLOCK_NONE) {
        return true;
    }
    return kvk_disk_is_on_disk(kvk_index_block(cache->index, block->parent)) ||
           is_writing(cache, block->parent);
}

/* The block, or its first ancestor, that can be written now; KVK_BLOCK_NONE: there is none. */
static uint32_t writable(struct kvk_cache *cache, uint32_t id)
{
    for (uint32_t i = 0; i < CHAIN_MAX; i++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (!is_wanted(cache, id)) {
            return KVK_BLOCK_NONE;
        }
        if (!kvk_disk_is_memory(block)) {
            return KVK_BLOCK_NONE;
        }
        if (parent_is_there(cache, kvk_group_of(cache, block), block)) {
            return id;
        }
        id = block->parent;
    }
    return KVK_BLOCK_NONE;
}

static bool buffer_reserve(struct kvk_disk_tier *tier, uint64_t bytes)
{
    if (tier->buffer_bytes >= bytes) {
        return true;
    }
    uint64_t wanted = bytes > KVK_DISK_BATCH_BYTES ? bytes : KVK_DISK_BATCH_BYTES;
    wanted = (wanted + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    void *buffer = aligned_alloc(HUGE_PAGE_BYTES, wanted);
    if (buffer == NULL) {
        return false;
    }
    /* Writing past the page cache pins each page of it, every time: few of them cost less. */
    (void)madvise(buffer, wanted, MADV_HUGEPAGE);
    free(tier->buffer);
    tier->buffer = buffer;
    tier->buffer_bytes = wanted;
    return true;
}

enum gathering { GATHER_MORE, GATHER_DONE };

/* Beside the buffer, for what is converted. */
static bool staging_reserve(struct kvk_disk_tier *tier, uint64_t bytes)
{
    if (tier->staging_bytes >= bytes) {
        return true;
    }
    void *staging = malloc(bytes);
    if (staging == NULL) {
        return false;
    }
    free(tier->staging);
    tier->staging = staging;
    tier->staging_bytes = bytes;
    return true;
}

static enum gathering gather_one_drops(struct kvk_cache *cache, struct batch *batch)
{
    struct kvk_disk_tier *tier = cache->disk_tier;
    if (tier->behind.count == 0) {
        return GATHER_DONE;
    }
    uint32_t candidate = tier->behind.blocks[tier->behind.first];
    bool queued = kvk_disk_bit(&tier->queued, candidate);
    uint32_t id = queued ? writable(cache, candidate) : KVK_BLOCK_NONE;
    if (id == KVK_BLOCK_NONE) {
        bool late = !queued || !kvk_disk_is_memory(kvk_index_block(cache->index, candidate));
        cache->stats.disk_late_blocks += late ? 1 : 0;
        (void)kvk_disk_ring_take(&tier->behind);
        kvk_disk_bit_set(&tier->queued, candidate, false);
        return GATHER_MORE;
    }
    struct kvk_group *group = kvk_group_of(cache, kvk_index_block(cache->index, id));
    uint64_t bytes = group->tiers[KVK_TIER_DISK].arena.slot_bytes;
    if (batch->count == KVK_DISK_BATCH_BLOCKS ||
        (batch->count > 0 && batch->bytes + bytes > tier->buffer_bytes) ||
        !buffer_reserve(tier, bytes)) {
        return GATHER_DONE;
    }
    kvk_disk_evict(cache, group, id);
    kvk_disk_bit_set(&tier->writing, id, true); /* what is behind it can follow */
    uint32_t slot;
    enum kvk_status status = kvk_disk_slot_get_drops(cache, group, &slot);
    if (status != KVK_OK) {
        kvk_disk_bit_set(&tier->writing, id, false);
        if (group->disk->leaving_count > 0 || tier->slab_wanted) {
            return GATHER_DONE; /* soon there is one */
        }
        cache->stats.disk_skipped_blocks++; /* nothing there is worth less than this one */
        (void)kvk_disk_ring_take(&tier->behind);
        kvk_disk_bit_set(&tier->queued, candidate, false);
        return status == KVK_EXHAUSTED ? GATHER_MORE : GATHER_DONE;
    }
    if (id == candidate && tier->behind.count > 0 &&
        tier->behind.blocks[tier->behind.first] == candidate) {
        (void)kvk_disk_ring_take(&tier->behind);
        kvk_disk_bit_set(&tier->queued, candidate, false);
    }
    batch->entries[batch->count++] = (struct entry){
        .block = id, .slot = slot, .group = group, .shard_count = group->shard_count};
    batch->bytes += bytes;
    batch->staging_bytes += group->forms[KVK_TIER_DISK].compact ? group->block_bytes : 0;
    batch->piece_count += group->shard_count;
    group->space->reference_count++; /* stays, whatever becomes of its blocks */
    return GATHER_MORE;
}

/* ---- Staging ---- */

static bool batch_allocate(struct kvk_disk_tier *tier, struct batch *batch)
{
    batch->pieces = calloc(batch->piece_count, sizeof(*batch->pieces));
    batch->copies = calloc(batch->piece_count, sizeof(*batch->copies));
    batch->sums = calloc(batch->piece_count, sizeof(*batch->sums));
    batch->disk_sums = calloc(batch->piece_count, sizeof(*batch->disk_sums));
    return batch->pieces != NULL && batch->copies != NULL && batch->sums != NULL &&
           batch->disk_sums != NULL && staging_reserve(tier, batch->staging_bytes);
}

static void batch_free(struct batch *batch)
{
    free(batch->pieces);
    free(batch->copies);
    free(batch->sums);
    free(batch->disk_sums);
}

/* Is the block still the one that was gathered? Its id may have been given to another since, and
 * gathered again, perhaps in another group. */
static bool is_entrys_block(const struct kvk_cache *cache, const struct entry *entry)
{
    return is_writing(cache, entry->block) && is_wanted(cache, entry->block) &&
           kvk_group_of(cache, kvk_index_block(cache->index, entry->block)) == entry->group;
}

static struct kvk_disk_piece piece_of(const struct entry *entry, uint32_t shard, void *memory,
                                      uint64_t bytes)
{
    return (struct kvk_disk_piece){.file = entry->group->disk->file,
                                   .slot = entry->slot,
                                   .offset = entry->group->disk->shard_offset[shard],
                                   .memory = memory,
                                   .size_bytes = bytes};
}

/* The disk takes it from where it lies, and knows it by the checksums of sealing. */
static void straight_begin(struct kvk_cache *cache, struct batch *batch, struct entry *entry,
                           const struct kvk_block *block)
{
    entry->source = KVK_TIER_HOST;
    const struct kvk_tier_form *form = &entry->group->forms[entry->source];
    const uint64_t *known = kvk_block_checksums(cache, block, entry->source);
    for (uint32_t shard = 0; shard < entry->shard_count; shard++) {
        uint32_t at = entry->first_piece + shard;
        batch->sums[at] = known[shard];
        batch->pieces[at] =
            piece_of(entry, shard, kvk_block_address(cache, block, entry->source, shard),
                     form->shard_bytes[shard]);
    }
    entry->straight = true;
    batch->straight_bytes += form->block_bytes;
    kvk_upkeep_borrow_lasting(cache, entry->block, entry->source);
}

/* It is copied to `target`, or beside the buffer where it is converted. Returns what follows. */
static uint8_t *copy_begin(struct kvk_cache *cache, struct batch *batch, struct entry *entry,
                           const struct kvk_block *block, uint8_t *target, uint64_t *staged_bytes)
{
    const struct kvk_group *group = entry->group;
    const struct kvk_tier_form *form = &group->forms[KVK_TIER_DISK];
    entry->narrows = form->compact && !group->forms[entry->source].compact;
    entry->staging_offset = *staged_bytes;
    for (uint32_t shard = 0; shard < entry->shard_count; shard++) {
        uint32_t at = entry->first_piece + shard;
        uint64_t bytes = group->forms[entry->source].shard_bytes[shard];
        uint64_t stride = group->disk->shard_stride[shard];
        batch->copies[batch->copy_count++] = (struct kvk_copy){
            .target = entry->narrows ? cache->disk_tier->staging + *staged_bytes : target,
            .source = kvk_block_address(cache, block, entry->source, shard),
            .size_bytes = bytes,
            .checksum = &batch->sums[at]};
        *staged_bytes += entry->narrows ? bytes : 0;
        memset(target + form->shard_bytes[shard], 0, stride - form->shard_bytes[shard]);
        batch->pieces[at] = piece_of(entry, shard, target, stride);
        target += stride;
    }
    kvk_upkeep_borrow(cache, entry->block, entry->source);
    return target;
}

/* Borrow what is still to be written, and say what comes from where. Returns how many pieces. */
static uint32_t stage_begin(struct kvk_cache *cache, struct batch *batch)
{
    uint8_t *target = cache->disk_tier->buffer;
    uint64_t staged_bytes = 0;
    uint32_t count = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        entry->first_piece = count;
        if (!is_entrys_block(cache, entry)) {
            continue;
        }
        const struct kvk_block *block = kvk_index_block(cache->index, entry->block);
        if (!kvk_disk_is_memory(block)) {
            continue;
        }
        entry->source = kvk_block_tier(block);
        entry->begun = true;
        entry->staged = true;
        if (kvk_disk_is_straight(cache, entry->group, block, batch->straight_bytes)) {
            straight_begin(cache, batch, entry, block);
        } else {
            target = copy_begin(cache, batch, entry, block, target, &staged_bytes);
        }
        count += entry->shard_count;
    }
    return count;
}

/* Do the bytes in the buffer match what was sealed? Where nobody knew, these are it. */
static bool sums_match(const struct kvk_cache *cache, const struct batch *batch,
                       const struct entry *entry)
{
    const struct kvk_block *block = kvk_index_block(cache->index, entry->block);
    uint64_t *known = kvk_block_checksums(cache, block, entry->source);
    for (uint32_t shard = 0; shard < entry->shard_count; shard++) {
        uint64_t sum = batch->sums[entry->first_piece + shard];
        if (known[shard] == 0) {
            known[shard] = sum;
        } else if (known[shard] != sum) {
            return false;
        }
    }
    return true;
}

static void stage_end(struct kvk_cache *cache, struct batch *batch, bool copied)
{
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        if (!entry->staged || entry->straight) {
            continue;
        }
        entry->staged = copied && sums_match(cache, batch, entry);
        if (copied && !entry->staged) {
            cache->stats.checksum_failures++;
            kvk_log(KVK_LOG_ERROR, "checksum_mismatch", "block=%u tier=%d", entry->block,
                    (int)entry->source);
            kvk_block_discredit(cache, entry->block, entry->source);
        }
        kvk_upkeep_return(cache, entry->block, entry->source);
    }
}

/* The disk has them, or will not. */
static void straight_end(struct kvk_cache *cache, const struct batch *batch)
{
    uint32_t ended = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        const struct entry *entry = &batch->entries[i];
        if (!entry->straight) {
            continue;
        }
        kvk_upkeep_return_lasting(cache, entry->block, entry->source);
        ended++;
        if (ended % SLICE == 0) {
            kvk_lock_pass(&cache->lock);
        }
    }
}

/* ---- Converting ---- */

/* The block as it is stored, from the staging into its pieces of the buffer. False: it has no
 * compact form. */
static bool entry_narrow(struct kvk_cache *cache, struct batch *batch, const struct entry *entry)
{
    const struct kvk_group *group = entry->group;
    const uint8_t *source = cache->disk_tier->staging + entry->staging_offset;
    bool fits = true;
    for (uint32_t shard = 0; shard < entry->shard_count; shard++) {
        uint32_t at = entry->first_piece + shard;
        struct kvk_error error;
        /* A shard that is refused is zeros, so that nothing old of the buffer is written. */
        fits = kvk_tier_form_narrow(&group->geometry, &group->forms[KVK_TIER_DISK], shard, source,
                                    batch->pieces[at].memory, &batch->disk_sums[at],
                                    &error) == KVK_OK &&
               fits;
        source += group->shard_bytes[shard];
        (void)sched_yield(); /* look-ups go first */
    }
    return fits;
}

/* Everything that is staged and good, as the disk has it; what was damaged leaves nothing. Returns
 * how many blocks had no compact form. */
static uint32_t batch_convert_unlocked(struct kvk_cache *cache, struct batch *batch)
{
    uint32_t unfit = 0;
    KVK_ASSERT(kvk_locks_held() == 0);
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        if (!entry->narrows) {
            memcpy(batch->disk_sums + entry->first_piece, batch->sums + entry->first_piece,
                   (entry->begun ? entry->shard_count : 0) * sizeof(*batch->sums));
        } else if (entry->begun && !entry_narrow(cache, batch, entry)) {
            unfit += entry->staged ? 1 : 0;
            entry->staged = false;
        }
    }
    return unfit;
}

/* ---- Writing ---- */

static enum kvk_status sync_unlocked(struct batch *batch, struct kvk_error *error)
{
    enum kvk_status status = KVK_OK;
    for (uint32_t i = 0; i < batch->count; i++) {
        struct kvk_disk_file *file = batch->entries[i].group->disk->file;
        bool before = !batch->entries[i].written;
        for (uint32_t j = 0; j < i && !before; j++) {
            before = batch->entries[j].written && batch->entries[j].group->disk->file == file;
        }
        if (before) {
            continue;
        }
        enum kvk_status synced = kvk_disk_sync(file, error);
        for (uint32_t j = i; j < batch->count && synced != KVK_OK; j++) {
            if (batch->entries[j].group->disk->file == file) {
                batch->entries[j].written = false;
            }
        }
        status = status == KVK_OK ? synced : status;
    }
    return status;
}

static enum kvk_status write_unlocked(struct kvk_cache *cache, struct batch *batch,
                                      uint32_t piece_count, struct kvk_error *error)
{
    kvk_disk_hook_unlocked(cache->disk_tier);
    enum kvk_status status =
        kvk_disk_write(cache->disk, KVK_DISK_BEHIND, batch->pieces, piece_count, error);
    for (uint32_t i = 0; i < batch->count; i++) {
        struct entry *entry = &batch->entries[i];
        entry->written = entry->staged && status != KVK_UNAVAILABLE;
        for (uint32_t shard = 0; entry->written && shard < entry->shard_count; shard++) {
            entry->written = batch->pieces[entry->first_piece + shard].status == KVK_OK;
        }
    }
    return status;
}

/* ---- Attaching ---- */

static void record_fill(const struct kvk_cache *cache, const struct entry *entry,
                        const uint64_t *sums, struct kvk_disk_block_record *record)
{
    const struct kvk_block *block = kvk_index_block(cache->index, entry->block);
    const struct kvk_space *space = entry->group->space;
    uint32_t root = kvk_index_root_of(cache->index, entry->block);
    uint64_t now_ns = kvk_policy_now(cache);
    uint64_t idle_ns = now_ns > block->used_ns ? now_ns - block->used_ns : 0;
    uint64_t now_s = (uint64_t)time(NULL);
    *record = (struct kvk_disk_block_record){
        .space_id = space->id,
        .group = entry->group->index,
        .slot = entry->slot,
        .generation = space->generation,
        .position = block->position,
        .use_count = block->use_count,
        .used_s = now_s - (idle_ns / KVK_NS_PER_SECOND < now_s ? idle_ns / KVK_NS_PER_SECOND : 0),
        .cost = block->cost,
        .tokens = kvk_index_tokens(cache->index, entry->block),
        .token_count = space->block_tokens,
        .checksums = sums,
        .shard_count = entry->shard_count,
    };
    record->extra = kvk_index_extra(cache->index, entry->block, &record->extra_size);
    struct kvk_key parent = kvk_index_root_own_key(cache->index, root);
    if (block->parent != KVK_BLOCK_NONE) {
        parent = kvk_index_block(cache->index, block->parent)->key;
    } else {
        record->salt = kvk_index_root_salt(cache->index, root, &record->salt_size);
    }
    _Static_assert(sizeof(parent) == sizeof(record->parent), "a key is 16 bytes");
    memcpy(record->parent.bytes, &parent, sizeof(parent));
    memcpy(record->key.bytes, &block->key, sizeof(block->key));
}

/* The copy counts from here on. False: it does not, and its slot is to go back. */
static bool attach(struct kvk_cache *cache, const struct batch *batch, const struct entry *entry)
{
    const uint64_t *sums = batch->disk_sums + entry->first_piece;
    struct kvk_disk_block_record record;
    if (!entry->written || !is_entrys_block(cache, entry)) {
        return false;
    }
    const struct kvk_block *block = kvk_index_block(cache->index, entry->block);
    bool alone = entry->group->windowed || block->parent == KVK_BLOCK_NONE;
    if (!alone && !kvk_disk_is_on_disk(kvk_index_block(cache->index, block->parent))) {
        return false; /* its parent did not come along */
    }
    if (cache->catalogue != NULL) {
        record_fill(cache, entry, sums, &record);
        if (kvk_catalogue_block_put(cache->catalogue, &record, NULL) != KVK_OK) {
            return false;
        }
    }
    kvk_block_attach(cache, entry->block, KVK_TIER_DISK, entry->slot);
    memcpy(kvk_block_checksums(cache, block, KVK_TIER_DISK), sums,
           entry->shard_count * sizeof(*sums));
    cache->stats.disk_written_blocks++;
    cache->stats.disk_written_bytes += entry->group->tiers[KVK_TIER_DISK].arena.slot_bytes;
    cache->stats.disk_narrowed_blocks += entry->narrows ? 1 : 0;
    cache->stats.disk_straight_blocks += entry->straight ? 1 : 0;
    return true;
}

static uint32_t batch_end(struct kvk_cache *cache, struct batch *batch)
{
    uint32_t attached = 0;
    for (uint32_t i = 0; i < batch->count; i++) {
        const struct entry *entry = &batch->entries[i];
        bool landed = attach(cache, batch, entry);
        if (!landed) {
            cache->stats.disk_write_failures += entry->staged && !entry->written ? 1 : 0;
            kvk_slot_give(cache, entry->group, KVK_TIER_DISK, entry->slot);
        }
        attached += landed ? 1 : 0;
        kvk_disk_bit_set(&cache->disk_tier->writing, entry->block, false);
        KVK_ASSERT(entry->group->space->reference_count > 0);
        entry->group->space->reference_count--;
    }
    return attached;
}

/* ---- A batch ---- */

/* What is not written from where it lies, to the buffer. */
static enum kvk_status copies_make_drops(struct kvk_cache *cache, struct batch *batch,
                                         struct kvk_error *error)
{
    struct kvk_device *device = cache->tiers[KVK_TIER_DEVICE].device != NULL
                                    ? cache->tiers[KVK_TIER_DEVICE].device
                                    : cache->tiers[KVK_TIER_HOST].device;
    if (batch->copy_count == 0) {
        return KVK_OK;
    }
    kvk_unlock(&cache->lock);
    enum kvk_status status =
        kvk_mover_copy_behind(cache->mover, device, batch->copies, batch->copy_count, error);
    kvk_lock(&cache->lock);
    cache->stats.copy_failures += status == KVK_OK ? 0 : 1;
    stage_end(cache, batch, status == KVK_OK);
    return status;
}

static enum kvk_status batch_write_drops(struct kvk_cache *cache, struct batch *batch,
                                         struct kvk_error *error)
{
    uint32_t count = stage_begin(cache, batch);
    if (count == 0) {
        return KVK_OK;
    }
    enum kvk_status status = copies_make_drops(cache, batch, error);
    if (status != KVK_OK) {
        straight_end(cache, batch);
        return status;
    }
    kvk_unlock(&cache->lock);
    uint32_t unfit = batch_convert_unlocked(cache, batch);
    uint64_t begun_ns = kvk_clock_now(cache->clock);
    status = write_unlocked(cache, batch, count, error);
    uint64_t took_ns = kvk_clock_now(cache->clock) - begun_ns;
    kvk_lock(&cache->lock);
    cache->stats.disk_unfit_blocks += unfit;
    kvk_disk_straight_took(cache, took_ns);
    straight_end(cache, batch);
    kvk_unlock(&cache->lock);
    enum kvk_status synced = sync_unlocked(batch, error);
    kvk_lock(&cache->lock);
    return status != KVK_OK ? status : synced;
}

bool kvk_disk_write_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    struct kvk_disk_tier *tier = cache->disk_tier;
    if (tier->behind.count == 0) {
        return false;
    }
    struct batch *batch = calloc(1, sizeof(*batch));
    if (batch == NULL) {
        return false;
    }
    struct kvk_error error = {.status = KVK_OK};
    uint32_t looked = 0;
    while (looked < LOOKED_MAX && gather_one_drops(cache, batch) == GATHER_MORE) {
        looked++;
        if (batch->count == 0 && looked % HELD_MAX == 0) {
            kvk_lock_pass(&cache->lock);
        }
    }
    uint32_t count = batch->count;
    /* All of them had left memory: what was sealed since is further behind. Where more is sealed
     * than the disk takes, a pause here would see the rest go, too. */
    bool late_alone = count == 0 && looked == LOOKED_MAX;
    enum kvk_status status = KVK_OK;
    if (count > 0 && batch_allocate(tier, batch)) {
        status = batch_write_drops(cache, batch, &error);
    }
    uint32_t attached = batch_end(cache, batch);
    if (status != KVK_OK) {
        kvk_log(KVK_LOG_DEBUG, "disk_write_failed", "text=\"%s\"", error.text);
        tier->paused_until_ns = kvk_clock_now(cache->clock) + PAUSE_NS;
    }
    batch_free(batch);
    free(batch);
    return status == KVK_OK && (attached > 0 || late_alone) && tier->behind.count > 0;
}
