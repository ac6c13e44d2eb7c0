/* Recording blocks as they live. What comes back after a restart is in sidecar_restore.c, the file
 * itself in sidecar_file.c. */
#include "daemon/sidecar.h"

#include <string.h>
#include <time.h>

#include "base/assert.h"
#include "base/copy.h"
#include "daemon/sidecar_internal.h"

#define MEMORY_TIERS ((uint8_t)KVK_MEMORY_TIER_MASK)
#define AHEAD_ENTRIES 1024 /* that have memory and are free, at the least */
#define TIDY_GROUPS 16     /* that one round of maintenance looks at */

/* Nothing is recorded before what was found has come back, nor once the cache is leaving. */
static struct kvk_sidecar *sidecar_of(const struct kvk_group *group)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    return sidecar == NULL || sidecar->frozen || sidecar->found.found ? NULL : sidecar;
}

/* ---- Slots ---- */

static bool is_tracked(const struct kvk_sidecar *sidecar, enum kvk_tier tier, uint32_t slot)
{
    return (uint32_t)tier < KVK_MEMORY_TIER_COUNT && sidecar->words[tier] != NULL &&
           slot < KVK_SIDECAR_SLOTS_MAX;
}

void kvk_sidecar_slot_granted(struct kvk_group *group, enum kvk_tier tier, uint32_t slot)
{
    struct kvk_sidecar *sidecar = sidecar_of(group);
    if (sidecar != NULL && is_tracked(sidecar, tier, slot)) {
        kvk_word_write(sidecar, tier, slot, KVK_WORD_GRANTED);
    }
}

void kvk_sidecar_slot_freed(struct kvk_group *group, enum kvk_tier tier, uint32_t slot)
{
    struct kvk_sidecar *sidecar = sidecar_of(group);
    if (sidecar != NULL && is_tracked(sidecar, tier, slot)) {
        kvk_word_write(sidecar, tier, slot, KVK_WORD_FREE);
    }
}

/* ---- Entries ---- */

uint64_t kvk_sidecar_sum(const struct kvk_sidecar *sidecar, uint32_t number)
{
    struct kvk_sidecar_entry *entry = kvk_sidecar_entry_at(sidecar, number);
    const uint8_t *begin = (const uint8_t *)&entry->key;
    const uint8_t *end = kvk_sidecar_inline(sidecar, entry) + entry->salt_size + entry->extra_size;
    /* Another file's entry, or one from another place of this file, is none. */
    uint64_t place = (sidecar->header->nonce + number) * UINT64_C(0x9e3779b97f4a7c15);
    uint64_t sum = kvk_checksum(begin, (size_t)(end - begin)) ^ place;
    return sum != 0 ? sum : 1;
}

/* An exchange, since nothing written after it may be seen before it. */
static void entry_close(struct kvk_sidecar_entry *entry)
{
    (void)__atomic_exchange_n(&entry->checksum, 0, __ATOMIC_ACQ_REL);
}

static void entry_open(const struct kvk_sidecar *sidecar, uint32_t number)
{
    __atomic_store_n(&kvk_sidecar_entry_at(sidecar, number)->checksum,
                     kvk_sidecar_sum(sidecar, number), __ATOMIC_RELEASE);
}

void kvk_sidecar_entry_free(struct kvk_sidecar *sidecar, uint32_t number)
{
    entry_close(kvk_sidecar_entry_at(sidecar, number));
    KVK_ASSERT(sidecar->free_count < sidecar->header->entry_capacity);
    sidecar->free_entries[sidecar->free_count++] = number;
    KVK_ASSERT(sidecar->used_count > 0);
    sidecar->used_count--;
}

/* An entry with memory; UINT32_MAX: there is none now. */
static uint32_t entry_take(struct kvk_sidecar *sidecar)
{
    uint32_t number = UINT32_MAX;
    if (sidecar->free_count > 0) {
        number = sidecar->free_entries[--sidecar->free_count];
    } else if (sidecar->header->entry_high < sidecar->entry_backed) {
        number = sidecar->header->entry_high;
        __atomic_store_n(&sidecar->header->entry_high, number + 1, __ATOMIC_RELEASE);
    }
    sidecar->used_count += number != UINT32_MAX ? 1 : 0;
    return number;
}

static uint32_t wall_seconds(void)
{
    struct timespec now;
    (void)clock_gettime(CLOCK_REALTIME_COARSE, &now);
    return now.tv_sec < 0 ? 0 : (uint32_t)now.tv_sec;
}

/* What has been used so long ago by the policy's clock, on the wall. */
static void use_write(const struct kvk_block *block, uint32_t wall_s, uint64_t policy_ns,
                      struct kvk_sidecar_entry *entry)
{
    uint64_t idle_ns = policy_ns > block->used_ns ? policy_ns - block->used_ns : 0;
    uint64_t idle_s = idle_ns / KVK_NS_PER_SECOND;
    uint32_t used_s = idle_s < wall_s ? wall_s - (uint32_t)idle_s : 0;
    if (entry->used_s != used_s || entry->use_count != block->use_count) {
        entry->use_count = block->use_count;
        entry->used_s = used_s;
    }
}

static struct kvk_key parent_key(const struct kvk_cache *cache, uint32_t id,
                                 const struct kvk_block *block)
{
    return block->parent == KVK_BLOCK_NONE
               ? kvk_index_key_of_root(cache->index, kvk_index_root_of(cache->index, id))
               : kvk_index_block(cache->index, block->parent)->key;
}

/* What an entry holds of a block beside its tokens. */
struct said {
    const uint8_t *salt; /* only of the first block of a chain */
    size_t salt_size;
    const uint8_t *extra;
    size_t extra_size;
};

/* False: more than an entry has room for. */
static bool said_of(const struct kvk_cache *cache, const struct kvk_sidecar *sidecar, uint32_t id,
                    struct said *said)
{
    *said = (struct said){.salt = NULL};
    said->extra = kvk_index_extra(cache->index, id, &said->extra_size);
    if (kvk_index_block(cache->index, id)->parent == KVK_BLOCK_NONE) {
        uint32_t root = kvk_index_root_of(cache->index, id);
        said->salt = kvk_index_salt_of_root(cache->index, root, &said->salt_size);
    }
    return said->salt_size + said->extra_size <= sidecar->header->inline_size;
}

static bool has_copy(const struct kvk_block *block, int tier)
{
    return (block->tier_mask & (1U << tier)) != 0;
}

/* Checksums of a block's bytes in memory: in the own format, and in the host tier's where that is
 * another. [shard_count] each; NULL: not known, or there is no such copy. Borrowed. */
struct sums {
    const uint64_t *own;
    const uint64_t *below;
};

static const uint64_t *sums_in(const struct kvk_group *group, const struct kvk_block *block,
                               int tier)
{
    if (!has_copy(block, tier)) {
        return NULL;
    }
    const uint64_t *sums =
        group->tiers[tier].checksums + (size_t)block->slot[tier] * group->shard_count;
    for (uint32_t shard = 0; shard < group->shard_count; shard++) {
        if (sums[shard] == 0) {
            return NULL;
        }
    }
    return sums;
}

/* From any copy of which they are known. False: of a copy in memory they are not. */
static bool sums_find(const struct kvk_group *group, const struct kvk_block *block,
                      struct sums *sums)
{
    bool known = true;
    *sums = (struct sums){.own = NULL};
    for (int i = 0; i < KVK_TIER_COUNT && sums->own == NULL; i++) {
        sums->own = group->forms[i].compact ? NULL : sums_in(group, block, i);
    }
    if (group->forms[KVK_TIER_HOST].compact) {
        sums->below = sums_in(group, block, KVK_TIER_HOST);
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        const uint64_t *needed = group->forms[i].compact ? sums->below : sums->own;
        known = known && (needed != NULL || !has_copy(block, i));
    }
    return known;
}

static void sums_write(const struct kvk_group *group, const struct sums *sums,
                       struct kvk_sidecar_entry *entry)
{
    size_t size = group->shard_count * sizeof(entry->checksums[0]);
    if (sums->own != NULL) {
        memcpy(entry->checksums, sums->own, size);
    }
    if (sums->below != NULL) {
        memcpy(entry->checksums + group->shard_count, sums->below, size);
    }
}

static bool sums_are(const struct kvk_group *group, const struct sums *sums,
                     const struct kvk_sidecar_entry *entry)
{
    size_t size = group->shard_count * sizeof(entry->checksums[0]);
    return (sums->own == NULL || memcmp(entry->checksums, sums->own, size) == 0) &&
           (sums->below == NULL ||
            memcmp(entry->checksums + group->shard_count, sums->below, size) == 0);
}

/* A new entry of an indexed block; UINT32_MAX: it cannot be kept, now or ever. */
static uint32_t entry_make(struct kvk_cache *cache, struct kvk_group *group, uint32_t id,
                           const struct sums *sums)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    struct said said;
    uint32_t number = said_of(cache, sidecar, id, &said) ? entry_take(sidecar) : UINT32_MAX;
    if (number == UINT32_MAX) {
        return number;
    }
    struct kvk_sidecar_entry *entry = kvk_sidecar_entry_at(sidecar, number);
    entry->key = block->key;
    entry->parent = parent_key(cache, id, block);
    entry->position = block->position;
    entry->salt_size = (uint16_t)said.salt_size;
    entry->extra_size = (uint16_t)said.extra_size;
    memset(entry->checksums, 0, sidecar->header->shard_count * sizeof(entry->checksums[0]));
    sums_write(group, sums, entry);
    memcpy(kvk_sidecar_tokens(sidecar, entry), kvk_index_tokens(cache->index, id),
           sidecar->header->block_tokens * sizeof(uint32_t));
    uint8_t *bytes = kvk_sidecar_inline(sidecar, entry);
    if (said.salt_size > 0) {
        memcpy(bytes, said.salt, said.salt_size);
    }
    if (said.extra_size > 0) {
        memcpy(bytes + said.salt_size, said.extra, said.extra_size);
    }
    use_write(block, wall_seconds(), kvk_policy_now(cache), entry);
    entry_open(sidecar, number);
    return number;
}

/* ---- Blocks ---- */

/* Every slot of the block that is not `entry`'s now stops saying that it is anybody's. */
static void words_unclaim(struct kvk_sidecar *sidecar, const struct kvk_block *block)
{
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        uint32_t slot = block->slot[i];
        if (slot != KVK_SLOT_NONE && is_tracked(sidecar, (enum kvk_tier)i, slot) &&
            kvk_word_state(sidecar->words[i][slot]) == KVK_WORD_SEALED) {
            kvk_word_write(sidecar, (enum kvk_tier)i, slot, KVK_WORD_GRANTED);
        }
    }
}

static void words_claim(struct kvk_sidecar *sidecar, const struct kvk_block *block, uint32_t entry)
{
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        uint32_t slot = block->slot[i];
        if (slot == KVK_SLOT_NONE || !is_tracked(sidecar, (enum kvk_tier)i, slot)) {
            continue;
        }
        uint64_t word = has_copy(block, i) ? kvk_word_sealed(sidecar, (enum kvk_tier)i, slot, entry)
                                           : KVK_WORD_GRANTED;
        if (sidecar->words[i][slot] != word) {
            kvk_word_write(sidecar, (enum kvk_tier)i, slot, word);
        }
    }
}

static void entry_leave(struct kvk_cache *cache, struct kvk_sidecar *sidecar, uint32_t id)
{
    if (kvk_sidecar_has_entry(cache, id)) {
        kvk_sidecar_entry_free(sidecar, cache->records[id] - 1);
    }
    cache->records[id] = 0;
}

/* Its bytes are others than when the entry was written: it was hollow in between. */
static void entry_renew(const struct kvk_group *group, const struct kvk_block *block,
                        uint32_t number, const struct sums *sums)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    struct kvk_sidecar_entry *entry = kvk_sidecar_entry_at(sidecar, number);
    if (!sums_are(group, sums, entry)) {
        words_unclaim(sidecar, block);
        entry_close(entry);
        sums_write(group, sums, entry);
        entry_open(sidecar, number);
    }
}

void kvk_sidecar_block_changed(struct kvk_cache *cache, struct kvk_group *group, uint32_t id)
{
    struct kvk_sidecar *sidecar = sidecar_of(group);
    if (sidecar == NULL) {
        return;
    }
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    bool in_memory = (block->tier_mask & MEMORY_TIERS) != 0;
    bool wanted = block->run != UINT32_MAX && (in_memory || block->tier_mask == 0);
    struct sums sums = {.own = NULL};
    bool known = !wanted || !in_memory || sums_find(group, block, &sums);
    if (!wanted || !known) {
        words_unclaim(sidecar, block);
        entry_leave(cache, sidecar, id);
        return;
    }
    if (!kvk_sidecar_has_entry(cache, id)) {
        uint32_t made = entry_make(cache, group, id, &sums);
        if (made == UINT32_MAX && cache->records[id] == 0) {
            cache->stats.unkept_blocks++; /* once, however often it is tried again */
        }
        cache->records[id] = made == UINT32_MAX ? KVK_RECORD_UNKEPT : made + 1;
    } else if (in_memory) {
        entry_renew(group, block, cache->records[id] - 1, &sums);
    }
    if (kvk_sidecar_has_entry(cache, id)) {
        words_claim(sidecar, block, cache->records[id] - 1);
    }
}

void kvk_sidecar_block_leaves(struct kvk_cache *cache, struct kvk_group *group, uint32_t id)
{
    struct kvk_sidecar *sidecar = sidecar_of(group);
    if (sidecar != NULL) {
        words_unclaim(sidecar, kvk_index_block(cache->index, id));
        entry_leave(cache, sidecar, id);
    } else if (group->sidecar != NULL && group->sidecar->bound != NULL &&
               kvk_sidecar_has_entry(cache, id)) {
        /* While it is being restored: its entry is given back when that settles. */
        uint32_t number = cache->records[id] - 1;
        group->sidecar->bound[number / 64] &= ~(UINT64_C(1) << (number % 64));
        group->sidecar->used_count--;
        cache->records[id] = 0;
    } else if (cache->records != NULL && cache->records[id] == KVK_RECORD_UNKEPT) {
        cache->records[id] = 0; /* the number's next block is another */
    }
}

void kvk_sidecar_freeze(struct kvk_group *group)
{
    if (group->sidecar != NULL) {
        group->sidecar->frozen = true;
    }
}

/* ---- Processes ---- */

static uint32_t process_find(const struct kvk_sidecar *sidecar, const struct kvk_session *session)
{
    uint32_t free_one = UINT32_MAX;
    for (uint32_t i = 0; i < sidecar->header->process_capacity; i++) {
        const struct kvk_sidecar_process *process = &sidecar->processes[i];
        if (process->pid == (uint32_t)session->pid && process->start == session->process_start) {
            return i;
        }
        if (process->pid == 0 && free_one == UINT32_MAX) {
            free_one = i;
        }
    }
    return free_one;
}

bool kvk_sidecar_process_add(struct kvk_group *group, enum kvk_tier tier,
                             const struct kvk_session *session)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    if (sidecar == NULL || sidecar->frozen) {
        return true;
    }
    KVK_ASSERT(session->pid > 0);
    uint32_t at = process_find(sidecar, session);
    if (at == UINT32_MAX || sidecar->process_refs[at] == UINT16_MAX) {
        return false;
    }
    struct kvk_sidecar_process *process = &sidecar->processes[at];
    process->start = session->process_start;
    __atomic_store_n(&process->tier_mask, (process->pid == 0 ? 0 : process->tier_mask) | 1U << tier,
                     __ATOMIC_RELEASE);
    __atomic_store_n(&process->pid, (uint32_t)session->pid, __ATOMIC_RELEASE);
    sidecar->process_refs[at]++;
    return true;
}

void kvk_sidecar_process_remove(struct kvk_group *group, const struct kvk_session *session)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    if (sidecar == NULL || sidecar->frozen) {
        return;
    }
    uint32_t at = process_find(sidecar, session);
    if (at == UINT32_MAX || sidecar->process_refs[at] == 0) {
        return; /* it began before this sidecar did */
    }
    sidecar->process_refs[at]--;
    if (sidecar->process_refs[at] == 0) {
        __atomic_store_n(&sidecar->processes[at].pid, 0, __ATOMIC_RELEASE);
    }
}

/* ---- Maintenance ---- */

/* There was no entry for it; is there one now? */
static bool is_worth_another_try(const struct kvk_cache *cache, const struct kvk_group *group,
                                 uint32_t id, const struct kvk_block *block)
{
    const struct kvk_sidecar *sidecar = group->sidecar;
    struct said said;
    bool any = sidecar->free_count > 0 || sidecar->header->entry_high < sidecar->entry_backed;
    return any && (block->tier_mask & MEMORY_TIERS) != 0 && said_of(cache, sidecar, id, &said);
}

void kvk_sidecar_sync_slice(struct kvk_cache *cache, uint32_t count)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (cache->records == NULL || cache->leaving) {
        return;
    }
    uint32_t end = kvk_index_block_id_end(cache->index);
    uint32_t wall_s = wall_seconds();
    uint64_t policy_ns = kvk_policy_now(cache);
    count = count < end ? count : end;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t id = cache->record_next < end ? cache->record_next : 0;
        cache->record_next = id + 1;
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (block->state == KVK_BLOCK_FREE || block->run == UINT32_MAX) {
            continue;
        }
        struct kvk_group *group = kvk_group_of(cache, block);
        if (group->sidecar == NULL) {
            continue;
        }
        if (kvk_sidecar_has_entry(cache, id)) {
            use_write(block, wall_s, policy_ns,
                      kvk_sidecar_entry_at(group->sidecar, cache->records[id] - 1));
        } else if (is_worth_another_try(cache, group, id, block)) {
            kvk_sidecar_block_changed(cache, group, id);
        }
    }
}

/*
 * How many entries should have memory: one for every slot that a slab has, `slot_count` more, and
 * those of blocks without bytes. Slots count from when they are there, not from when they are
 * sealed: a long prompt takes those of many slabs first, and wants all of their entries at once.
 */
static uint32_t backed_wanted(const struct kvk_group *group, uint64_t slot_count)
{
    const struct kvk_sidecar *sidecar = group->sidecar;
    uint64_t wanted = slot_count + group->state_counts[KVK_BLOCK_HOLLOW];
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        wanted += group->tiers[i].present ? group->tiers[i].arena.slot_count : 0;
    }
    wanted = wanted < sidecar->entry_backed ? sidecar->entry_backed : wanted;
    return wanted < sidecar->header->entry_capacity ? (uint32_t)wanted
                                                    : sidecar->header->entry_capacity;
}

void kvk_sidecar_tidy_drops(struct kvk_cache *cache)
{
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    uint32_t looked = 0;
    for (uint32_t i = 0; cache->kept != NULL && i < cache->group_end && looked < TIDY_GROUPS; i++) {
        cache->record_group_next =
            cache->record_group_next + 1 < cache->group_end ? cache->record_group_next + 1 : 0;
        struct kvk_group *group = cache->groups[cache->record_group_next];
        if (group == NULL || group->sidecar == NULL) {
            continue;
        }
        if (group->space->reference_count == 0 &&
            backed_wanted(group, 0) == group->sidecar->entry_backed) {
            continue; /* one in use gets some ahead, too */
        }
        looked++;
        group->space->reference_count++; /* stays while the lock is dropped */
        kvk_unlock(&cache->lock);
        enum kvk_status status = kvk_sidecar_back_unlocked(cache, group, KVK_TIER_HOST, 0, 0, NULL);
        kvk_lock(&cache->lock);
        if (status != KVK_OK) {
            looked = TIDY_GROUPS; /* blocks without an entry are counted as not kept */
        }
        group->space->reference_count--;
    }
}

enum kvk_status kvk_sidecar_back_unlocked(struct kvk_cache *cache, struct kvk_group *group,
                                          enum kvk_tier tier, uint32_t first_slot,
                                          uint32_t slot_count, struct kvk_error *error)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    struct kvk_device *memory = cache->memory;
    enum kvk_status status = KVK_OK;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (sidecar == NULL || (slot_count > 0 && !is_tracked(sidecar, tier, first_slot))) {
        return KVK_OK;
    }
    kvk_lock(&cache->lock);
    uint32_t backed = sidecar->entry_backed;
    uint32_t wanted = backed_wanted(group, (uint64_t)slot_count + AHEAD_ENTRIES);
    kvk_unlock(&cache->lock);
    if (slot_count > 0) {
        uint64_t offset = (uint64_t)((uint8_t *)sidecar->words[tier] - sidecar->region.address);
        status = memory->ops->back(memory, &sidecar->region, offset + first_slot * UINT64_C(8),
                                   slot_count * UINT64_C(8), error);
    }
    if (status == KVK_OK && wanted > backed) {
        uint64_t offset = (uint64_t)(sidecar->entries - sidecar->region.address);
        uint64_t size = sidecar->header->entry_size;
        status = memory->ops->back(memory, &sidecar->region, offset + backed * size,
                                   (wanted - backed) * size, error);
    }
    if (status == KVK_OK) {
        kvk_lock(&cache->lock);
        sidecar->entry_backed = wanted > sidecar->entry_backed ? wanted : sidecar->entry_backed;
        kvk_unlock(&cache->lock);
    }
    return status;
}

void kvk_sidecar_stats(const struct kvk_group *group, struct kvk_sidecar_stats *stats)
{
    const struct kvk_sidecar *sidecar = group->sidecar;
    *stats = (struct kvk_sidecar_stats){.entries = 0};
    if (sidecar != NULL) {
        stats->entries = sidecar->used_count;
        stats->backed = sidecar->entry_backed;
        stats->bytes = sidecar->entry_backed * (uint64_t)sidecar->header->entry_size;
    }
}
