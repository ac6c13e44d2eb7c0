/* Reading a sidecar that was found, and making it whole again. */
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "daemon/restore.h"
#include "daemon/sidecar_internal.h"

#define READ_WORDS 8192
#define SLICE_SLOTS 4096

/* ---- Words, read from the file: a hole reads as zeros there and stays a hole ---- */

static uint32_t slots_of(const struct kvk_group *group, enum kvk_tier tier)
{
    uint32_t slots = kvk_arena_slot_capacity(&group->tiers[tier].arena);
    return slots < KVK_SIDECAR_SLOTS_MAX ? slots : KVK_SIDECAR_SLOTS_MAX;
}

/* Visit every word of slots [0, count) that is not FREE, among those that have memory. */
static void words_visit(const struct kvk_sidecar *sidecar, enum kvk_tier tier, uint32_t count,
                        void (*visit)(void *context, uint32_t slot, uint64_t word), void *context)
{
    if (sidecar->words[tier] == NULL) {
        return;
    }
    uint64_t buffer[READ_WORDS];
    off_t base = (off_t)((uint8_t *)sidecar->words[tier] - sidecar->region.address);
    off_t end = base + (off_t)(count * sizeof(uint64_t));
    off_t at = base;
    while (at < end && (at = lseek(sidecar->region.fd, at, SEEK_DATA)) >= 0 && at < end) {
        at -= (at - base) % (off_t)sizeof(uint64_t);
        size_t wanted = end - at < (off_t)sizeof(buffer) ? (size_t)(end - at) : sizeof(buffer);
        ssize_t size = pread(sidecar->region.fd, buffer, wanted, at);
        if (size < (ssize_t)sizeof(uint64_t)) {
            break;
        }
        size_t words = (size_t)size / sizeof(uint64_t);
        uint32_t first = (uint32_t)((at - base) / (off_t)sizeof(uint64_t));
        for (size_t i = 0; i < words; i++) {
            if (buffer[i] != KVK_WORD_FREE) {
                visit(context, first + (uint32_t)i, buffer[i]);
            }
        }
        at += (off_t)(words * sizeof(uint64_t));
    }
}

/* ---- Processes and granted slots ---- */

void kvk_sidecar_processes(const struct kvk_group *group,
                           void (*visit)(void *context, int32_t pid, uint64_t start,
                                         uint8_t tier_mask),
                           void *context)
{
    const struct kvk_sidecar *sidecar = group->sidecar;
    for (uint32_t i = 0; sidecar != NULL && i < sidecar->header->process_capacity; i++) {
        const struct kvk_sidecar_process *process = &sidecar->processes[i];
        if (process->pid != 0 && process->pid <= INT32_MAX) {
            visit(context, (int32_t)process->pid, process->start, (uint8_t)process->tier_mask);
        }
    }
}

void kvk_sidecar_processes_clear(struct kvk_group *group)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    for (uint32_t i = 0; i < sidecar->header->process_capacity; i++) {
        if (sidecar->process_refs[i] == 0) {
            sidecar->processes[i].pid = 0;
        }
    }
}

struct granted {
    const struct kvk_sidecar *sidecar;
    enum kvk_tier tier;
    void (*visit)(void *context, uint32_t slot);
    void *context;
};

/* A word that makes no sense may be of a slot that somebody writes: it counts as granted. */
static void granted_visit(void *context, uint32_t slot, uint64_t word)
{
    const struct granted *granted = context;
    if (!kvk_word_is_sealed(granted->sidecar, granted->tier, slot, word)) {
        granted->visit(granted->context, slot);
    }
}

void kvk_sidecar_granted(const struct kvk_group *group, enum kvk_tier tier,
                         void (*visit)(void *context, uint32_t slot), void *context)
{
    struct granted granted = {
        .sidecar = group->sidecar, .tier = tier, .visit = visit, .context = context};
    if (group->sidecar != NULL) {
        words_visit(group->sidecar, tier, slots_of(group, tier), granted_visit, &granted);
    }
}

/* ---- Entries ---- */

struct reading {
    struct kvk_sidecar *sidecar;
    enum kvk_tier tier;
    uint32_t *slots[KVK_MEMORY_TIER_COUNT]; /* [entry_high] */
};

static void sealed_visit(void *context, uint32_t slot, uint64_t word)
{
    struct reading *reading = context;
    uint32_t entry = kvk_word_entry(word);
    if (kvk_word_is_sealed(reading->sidecar, reading->tier, slot, word) &&
        entry < reading->sidecar->header->entry_high &&
        reading->slots[reading->tier][entry] == KVK_SLOT_NONE) {
        reading->slots[reading->tier][entry] = slot;
    }
}

static bool reading_begin(const struct kvk_group *group, struct reading *reading)
{
    uint32_t high = group->sidecar->header->entry_high;
    *reading = (struct reading){.sidecar = group->sidecar};
    group->sidecar->bound = calloc(high / 64 + 1, sizeof(uint64_t));
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        reading->slots[i] = malloc((high + UINT64_C(1)) * sizeof(uint32_t));
        if (reading->slots[i] == NULL) {
            return false;
        }
        memset(reading->slots[i], 0xff, high * sizeof(uint32_t));
        reading->tier = (enum kvk_tier)i;
        if (group->tiers[i].present) {
            /* Those past a tier that is smaller now too: the restore counts what has no room. */
            words_visit(group->sidecar, reading->tier, KVK_SIDECAR_SLOTS_MAX, sealed_visit,
                        reading);
        }
    }
    return group->sidecar->bound != NULL;
}

/* Only then may its sizes be believed; and only where its checksum matches, the rest. */
static bool entry_is_whole(const struct kvk_sidecar *sidecar, uint32_t number)
{
    const struct kvk_sidecar_entry *entry = kvk_sidecar_entry_at(sidecar, number);
    return (uint32_t)entry->salt_size + entry->extra_size <= sidecar->header->inline_size &&
           entry->checksum == kvk_sidecar_sum(sidecar, number);
}

static void entry_block(struct kvk_group *group, const struct reading *reading, uint32_t number,
                        uint64_t wall_s, struct kvk_restore_block *block)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    struct kvk_sidecar_entry *entry = kvk_sidecar_entry_at(sidecar, number);
    const uint8_t *bytes = kvk_sidecar_inline(sidecar, entry);
    uint64_t idle_s = wall_s > entry->used_s ? wall_s - entry->used_s : 0;
    *block = (struct kvk_restore_block){
        .group = group,
        .key = entry->key,
        .parent = entry->parent,
        .position = entry->position,
        .tokens = kvk_sidecar_tokens(sidecar, entry),
        .salt = bytes,
        .salt_size = entry->salt_size,
        .extra = bytes + entry->salt_size,
        .extra_size = entry->extra_size,
        .checksums = entry->checksums,
        .host_checksums =
            entry->checksums + (group->forms[KVK_TIER_HOST].compact ? group->shard_count : 0),
        .use_count = entry->use_count,
        .idle_ns = idle_s < UINT64_MAX / KVK_NS_PER_SECOND ? idle_s * KVK_NS_PER_SECOND : 0,
        .borrowed = true,
        .record = number + 1,
    };
    for (int i = 0; i < KVK_TIER_COUNT; i++) {
        block->slot[i] = i < KVK_MEMORY_TIER_COUNT ? reading->slots[i][number] : KVK_SLOT_NONE;
    }
}

enum kvk_status kvk_sidecar_read_unlocked(struct kvk_cache *cache, struct kvk_group *group,
                                          struct kvk_restore *restore, struct kvk_error *error)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    struct reading reading;
    enum kvk_status status = KVK_OK;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (sidecar == NULL || !sidecar->found.found) {
        return KVK_OK;
    }
    uint64_t wall_s = (uint64_t)time(NULL);
    if (!reading_begin(group, &reading)) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory to read a sidecar");
    }
    for (uint32_t i = 0; i < sidecar->header->entry_high && status == KVK_OK; i++) {
        struct kvk_restore_block block;
        if (kvk_sidecar_entry_at(sidecar, i)->checksum == 0) {
            continue;
        }
        if (!entry_is_whole(sidecar, i)) {
            sidecar->found.torn++;
            continue;
        }
        entry_block(group, &reading, i, wall_s, &block);
        status = kvk_restore_add(restore, &block, error);
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        free(reading.slots[i]);
    }
    cache->stats.torn_records += sidecar->found.torn;
    return status;
}

void kvk_sidecar_bind(struct kvk_cache *cache, struct kvk_group *group, uint32_t block,
                      uint32_t entry)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    KVK_ASSERT(entry < sidecar->header->entry_high);
    KVK_ASSERT((sidecar->bound[entry / 64] >> (entry % 64) & 1) == 0);
    sidecar->bound[entry / 64] |= UINT64_C(1) << (entry % 64);
    cache->records[block] = entry + 1;
    sidecar->used_count++;
}

/* ---- Settling ---- */

static void entries_free(struct kvk_sidecar *sidecar)
{
    for (uint32_t i = sidecar->header->entry_high; i > 0; i--) {
        uint32_t number = i - 1;
        if (sidecar->bound == NULL || (sidecar->bound[number / 64] >> (number % 64) & 1) == 0) {
            sidecar->used_count++; /* it is given back as one that was in use */
            kvk_sidecar_entry_free(sidecar, number);
        }
    }
    free(sidecar->bound);
    sidecar->bound = NULL;
}

struct settling {
    struct kvk_cache *cache;
    struct kvk_group *group;
    enum kvk_tier tier;
    uint32_t slice;
};

/* Whoever read a slot that did not come back sees another generation. */
static void slot_settle(void *context, uint32_t slot, uint64_t word)
{
    struct settling *settling = context;
    struct kvk_group_tier *at = &settling->group->tiers[settling->tier];
    if (++settling->slice >= SLICE_SLOTS) {
        settling->slice = 0;
        kvk_lock_pass(&settling->cache->lock);
    }
    if (slot >= kvk_arena_slot_capacity(&at->arena)) {
        /* A daemon with a larger tier may have it again: then with nothing in it that was sealed,
         * but perhaps with somebody who writes. */
        if (kvk_word_is_sealed(settling->group->sidecar, settling->tier, slot, word)) {
            kvk_word_write(settling->group->sidecar, settling->tier, slot, KVK_WORD_GRANTED);
        }
    } else if (!kvk_arena_is_used(&at->arena, slot)) {
        uint32_t *generation = (uint32_t *)(void *)at->generations.address + slot;
        (void)__atomic_add_fetch(generation, 1, __ATOMIC_RELEASE);
        kvk_word_write(settling->group->sidecar, settling->tier, slot, KVK_WORD_FREE);
    }
}

void kvk_sidecar_settle_drops(struct kvk_cache *cache, struct kvk_group *group)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    KVK_ASSERT(kvk_lock_held(&cache->lock));
    if (sidecar == NULL || !sidecar->found.found) {
        return;
    }
    /* Slots first: from then on no word names an entry that is nobody's. */
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        struct settling settling = {.cache = cache, .group = group, .tier = (enum kvk_tier)i};
        if (group->tiers[i].present) {
            words_visit(sidecar, settling.tier, KVK_SIDECAR_SLOTS_MAX, slot_settle, &settling);
        }
    }
    entries_free(sidecar);
    sidecar->found = (struct kvk_sidecar_found){.found = false};
}

void kvk_sidecar_found(const struct kvk_group *group, struct kvk_sidecar_found *found)
{
    *found =
        group->sidecar == NULL ? (struct kvk_sidecar_found){.found = false} : group->sidecar->found;
}

/* ---- Checking ---- */

static void word_check(const struct kvk_cache *cache, const struct kvk_group *group,
                       enum kvk_tier tier, uint32_t slot)
{
    const struct kvk_group_tier *at = &group->tiers[tier];
    const struct kvk_sidecar *sidecar = group->sidecar;
    if (at->places[kvk_arena_slab_of(&at->arena, slot)] == 0) {
        return; /* no memory, no word */
    }
    uint64_t word = sidecar->words[tier][slot];
    if (!kvk_arena_is_used(&at->arena, slot)) {
        KVK_ASSERT(word == KVK_WORD_FREE);
        return;
    }
    KVK_ASSERT(word != KVK_WORD_FREE);
    if (kvk_word_state(word) == KVK_WORD_SEALED) {
        KVK_ASSERT(at->owners[slot] != 0);
        uint32_t id = at->owners[slot] - 1;
        KVK_ASSERT((kvk_index_block(cache->index, id)->tier_mask & (1U << tier)) != 0);
        KVK_ASSERT(cache->records[id] == kvk_word_entry(word) + 1);
    }
}

static void entry_check(const struct kvk_cache *cache, const struct kvk_group *group, uint32_t id)
{
    const struct kvk_sidecar *sidecar = group->sidecar;
    const struct kvk_block *block = kvk_index_block(cache->index, id);
    uint32_t number = cache->records[id] - 1;
    struct kvk_sidecar_entry *entry = kvk_sidecar_entry_at(sidecar, number);
    size_t token_size = sidecar->header->block_tokens * sizeof(uint32_t);
    KVK_ASSERT(block->run != UINT32_MAX);
    KVK_ASSERT(number < sidecar->header->entry_high);
    KVK_ASSERT(entry_is_whole(sidecar, number));
    KVK_ASSERT(kvk_key_equal(entry->key, block->key));
    KVK_ASSERT(entry->position == block->position);
    KVK_ASSERT(memcmp(kvk_sidecar_tokens(sidecar, entry), kvk_index_tokens(cache->index, id),
                      token_size) == 0);
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        if ((block->tier_mask & (1U << i)) != 0 && sidecar->words[i] != NULL) {
            uint32_t slot = block->slot[i];
            KVK_ASSERT(sidecar->words[i][slot] ==
                       kvk_word_sealed(sidecar, (enum kvk_tier)i, slot, number));
        }
    }
}

void kvk_sidecar_check(const struct kvk_cache *cache, const struct kvk_group *group)
{
    const struct kvk_sidecar *sidecar = group->sidecar;
    if (sidecar == NULL || sidecar->frozen || sidecar->found.found) {
        return;
    }
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        uint32_t slots = group->tiers[i].present ? slots_of(group, (enum kvk_tier)i) : 0;
        for (uint32_t slot = 0; slot < slots && sidecar->words[i] != NULL; slot++) {
            word_check(cache, group, (enum kvk_tier)i, slot);
        }
    }
    uint32_t used = 0;
    uint32_t end = kvk_index_block_id_end(cache->index);
    for (uint32_t id = 0; id < end; id++) {
        const struct kvk_block *block = kvk_index_block(cache->index, id);
        if (block->state == KVK_BLOCK_FREE || block->arena != group->number) {
            continue;
        }
        if (kvk_sidecar_has_entry(cache, id)) {
            entry_check(cache, group, id);
            used++;
        }
    }
    KVK_ASSERT(used == sidecar->used_count);
    KVK_ASSERT(sidecar->used_count + sidecar->free_count == sidecar->header->entry_high);
}
