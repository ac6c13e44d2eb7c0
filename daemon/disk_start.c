/*
 * The disk tier after a restart: its records go back into the index, and what nobody has any more
 * goes back to the file system.
 */
#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/disk_tier_internal.h"
#include "daemon/restore.h"
#include "daemon/room_internal.h"

/* ---- Records ---- */

struct reader {
    struct kvk_cache *cache;
    struct kvk_restore *restore;
    struct kvk_space *space;
    uint64_t now_s;
    enum kvk_status status;
    struct kvk_error *error;
};

static struct kvk_group *group_of(const struct reader *reader,
                                  const struct kvk_disk_block_record *record)
{
    const struct kvk_space *space = reader->space;
    if (record->group >= space->group_count || record->generation != space->generation ||
        record->token_count != space->block_tokens) {
        return NULL;
    }
    struct kvk_group *group = space->groups[record->group];
    bool fits = group->tiers[KVK_TIER_DISK].present && record->shard_count == group->shard_count &&
                record->slot < kvk_arena_slot_capacity(&group->tiers[KVK_TIER_DISK].arena);
    return fits ? group : NULL;
}

static void refuse(struct kvk_cache *cache, uint64_t space_id, uint32_t group, uint32_t slot)
{
    cache->stats.disk_refused_blocks++;
    /* Where the queue is full the record stays: its checksum will not match what comes there. */
    if (kvk_catalogue_block_remove(cache->catalogue, space_id, group, slot, NULL) != KVK_OK) {
        kvk_log(KVK_LOG_DEBUG, "record_stays", "space=%llu slot=%u", (unsigned long long)space_id,
                slot);
    }
}

static bool record_visit(void *context, const struct kvk_disk_block_record *record)
{
    struct reader *reader = context;
    struct kvk_group *group = group_of(reader, record);
    if (group == NULL) {
        refuse(reader->cache, record->space_id, record->group, record->slot);
        return true;
    }
    uint64_t idle_s = reader->now_s > record->used_s ? reader->now_s - record->used_s : 0;
    idle_s = idle_s < UINT64_MAX / KVK_NS_PER_SECOND ? idle_s : 0;
    struct kvk_restore_block block = {
        .group = group,
        .position = record->position,
        .tokens = record->tokens,
        .extra = record->extra,
        .extra_size = record->extra_size,
        .salt = record->salt,
        .salt_size = record->salt_size,
        .checksums = record->checksums,
        .slot = {KVK_SLOT_NONE, KVK_SLOT_NONE, record->slot},
        .use_count = record->use_count,
        .idle_ns = idle_s * KVK_NS_PER_SECOND,
    };
    memcpy(&block.key, record->key.bytes, sizeof(block.key));
    memcpy(&block.parent, record->parent.bytes, sizeof(block.parent));
    reader->status = kvk_restore_add(reader->restore, &block, reader->error);
    return reader->status == KVK_OK;
}

enum kvk_status kvk_disk_records_read(struct kvk_cache *cache, struct kvk_restore *restore,
                                      struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    struct reader reader = {.cache = cache,
                            .restore = restore,
                            .now_s = (uint64_t)time(NULL),
                            .status = KVK_OK,
                            .error = error};
    if (cache->catalogue == NULL || cache->disk_tier == NULL) {
        return KVK_OK;
    }
    for (struct kvk_space *space = cache->spaces; space != NULL; space = space->next) {
        reader.space = space;
        enum kvk_status status =
            kvk_catalogue_blocks(cache->catalogue, space->id, record_visit, &reader, error);
        if (status != KVK_OK || reader.status != KVK_OK) {
            return status != KVK_OK ? status : reader.status;
        }
    }
    return KVK_OK;
}

void kvk_disk_record_refused(void *context, struct kvk_group *group, enum kvk_tier tier,
                             uint32_t slot)
{
    struct kvk_cache *cache = context;
    if (tier == KVK_TIER_DISK) {
        refuse(cache, group->space->id, group->index, slot);
    }
}

/* ---- Extents ---- */

/* Queues, and whole slabs again. With the lock. */
static bool slabs_complete(struct kvk_group *group)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    kvk_arena_fill_out(&at->arena);
    uint32_t slots = at->arena.slot_count;
    return kvk_evict_queue_reserve(&at->queue, slots) == KVK_OK &&
           kvk_evict_queue_reserve(&at->clean, slots) == KVK_OK &&
           kvk_evict_queue_reserve(&at->held, slots) == KVK_OK;
}

/* Give back every place without a slab; have extents where one is. */
static void extents_settle_unlocked(struct kvk_group *group)
{
    struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
    struct kvk_disk_file *file = group->disk->file;
    struct kvk_error error;
    uint32_t slab_slots = at->arena.slab_slots;
    uint32_t first = 0; /* place from which on there is no slab */
    for (uint32_t place = 0; place <= at->arena.slab_capacity; place++) {
        bool slab = place < at->arena.slab_capacity && at->arena.slabs[place].slot_count > 0;
        if (!slab && place < at->arena.slab_capacity) {
            continue;
        }
        if (place > first && kvk_disk_file_punch(file, first * slab_slots,
                                                 (place - first) * slab_slots, &error) != KVK_OK) {
            kvk_log(KVK_LOG_WARNING, "disk_punch_failed", "text=\"%s\"", error.text);
        }
        first = place + 1;
        if (!slab) {
            break;
        }
        uint32_t slots = at->arena.slabs[place].slot_count;
        if (kvk_disk_file_allocate(file, place * slab_slots, slots, &error) != KVK_OK) {
            kvk_log(KVK_LOG_WARNING, "disk_extent_refused", "space=%llu text=\"%s\"",
                    (unsigned long long)group->space->id, error.text);
        }
        at->places[place] = slots;
    }
}

static bool is_known(void *context, uint64_t space_id, uint32_t group)
{
    const struct kvk_cache *cache = context;
    const struct kvk_space *space = cache->spaces;
    while (space != NULL && space->id != space_id) {
        space = space->next;
    }
    return space != NULL && group < space->group_count && space->groups[group]->disk != NULL &&
           space->groups[group]->disk->file != NULL;
}

void kvk_disk_tidy_unlocked(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    struct kvk_error error;
    uint32_t file_count = 0;
    uint64_t bytes = 0;
    uint32_t number = 0;
    struct kvk_group *group;
    if (cache->disk_tier == NULL) {
        return;
    }
    while ((group = kvk_room_next_group(cache, KVK_TIER_DISK, &number)) != NULL) {
        kvk_lock(&cache->lock);
        const struct kvk_group_tier *at = &group->tiers[KVK_TIER_DISK];
        bool used = at->arena.slab_count > 0;
        if (used) {
            cache->stats.disk_returned_blocks += group->tier_blocks[KVK_TIER_DISK];
            used = slabs_complete(group) && kvk_disk_file_open_drops(cache, group) == KVK_OK;
        }
        kvk_unlock(&cache->lock);
        if (used) {
            extents_settle_unlocked(group);
        }
    }
    if (kvk_disk_sweep(cache->disk, is_known, cache, &file_count, &bytes, &error) != KVK_OK) {
        kvk_log(KVK_LOG_WARNING, "disk_not_swept", "text=\"%s\"", error.text);
    } else if (file_count > 0) {
        kvk_log(KVK_LOG_INFO, "disk_swept", "files=%u bytes=%llu", file_count,
                (unsigned long long)bytes);
    }
    kvk_lock(&cache->lock);
    cache->disk_tier->ready = true;
    kvk_unlock(&cache->lock);
}
