/* The sidecar's file: making one, believing one that was found, ending it. */
#include <stdlib.h>
#include <string.h>

#include "base/assert.h"
#include "base/copy.h"
#include "base/log.h"
#include "base/random.h"
#include "daemon/process_watch.h"
#include "daemon/sidecar_internal.h"
#include "base/pages.h"

#define ENTRY_ALIGN 64U
#define INLINE_MIN 64U

static struct kvk_kept_name name_of(const struct kvk_group *group)
{
    return (struct kvk_kept_name){
        .kind = KVK_KEPT_SIDECAR, .space_id = group->space->id, .group = group->index};
}

static uint64_t round_up(uint64_t value, uint64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static uint64_t processes_offset(void)
{
    return KVK_SIDECAR_PAGE;
}

static uint64_t words_offset(const struct kvk_sidecar_header *header, int tier)
{
    uint64_t processes = header->process_capacity * sizeof(struct kvk_sidecar_process);
    return processes_offset() + round_up(processes, KVK_SIDECAR_PAGE) +
           (uint64_t)tier * KVK_SIDECAR_SLOTS_MAX * sizeof(uint64_t);
}

static uint64_t entries_offset(const struct kvk_sidecar_header *header)
{
    return words_offset(header, KVK_MEMORY_TIER_COUNT);
}

static uint64_t file_bytes(const struct kvk_sidecar_header *header)
{
    uint64_t entries = (uint64_t)header->entry_capacity * header->entry_size;
    return entries_offset(header) + round_up(entries, KVK_SIDECAR_PAGE);
}

static uint64_t header_sum(const struct kvk_sidecar_header *header)
{
    return kvk_checksum(header, offsetof(struct kvk_sidecar_header, checksum));
}

/* Strides of the device tier's files, and of the host's where they are others. */
static uint64_t shard_digest(const struct kvk_group *group)
{
    uint64_t size_bytes = group->shard_count * sizeof(group->shard_bytes[0]);
    uint64_t digest = kvk_checksum(group->shard_bytes, size_bytes);
    const struct kvk_tier_form *host = &group->forms[KVK_TIER_HOST];
    return host->compact ? digest ^ (kvk_checksum(host->shard_bytes, size_bytes) + 1) : digest;
}

/* What the header of a new file of the group says. */
static struct kvk_sidecar_header header_for(const struct kvk_cache *cache,
                                            const struct kvk_group *group)
{
    struct kvk_sidecar_header header = {
        .magic = KVK_SIDECAR_MAGIC,
        .version = KVK_SIDECAR_VERSION,
        .header_size = sizeof(header),
        .space_id = group->space->id,
        .tenant_id = group->space->tenant->id,
        .shard_digest = shard_digest(group),
        .namespace_id = kvk_process_namespace(),
        .group = group->index,
        .shard_count = group->shard_count * (group->forms[KVK_TIER_HOST].compact ? 2 : 1),
        .block_tokens = group->space->block_tokens,
        .entry_capacity = cache->config->blocks,
        .process_capacity = cache->config->sessions,
    };
    uint64_t inline_size = round_up(cache->config->salt_bytes, sizeof(uint64_t));
    header.inline_size = inline_size < INLINE_MIN ? INLINE_MIN : (uint32_t)inline_size;
    uint64_t entry_size = sizeof(struct kvk_sidecar_entry) + header.shard_count * sizeof(uint64_t) +
                          header.block_tokens * sizeof(uint32_t) + header.inline_size;
    header.entry_size = (uint32_t)round_up(entry_size, ENTRY_ALIGN);
    kvk_random_secret(&header.nonce, sizeof(header.nonce));
    header.checksum = header_sum(&header);
    return header;
}

/* ---- In memory ---- */

static void sidecar_free(struct kvk_sidecar *sidecar, uint32_t entry_capacity)
{
    kvk_pages_destroy_sparse(sidecar->free_entries, entry_capacity * sizeof(uint32_t));
    free(sidecar->process_refs);
    free(sidecar->bound);
    free(sidecar);
}

static struct kvk_sidecar *sidecar_alloc(uint32_t entry_capacity, uint32_t process_capacity)
{
    struct kvk_sidecar *sidecar = calloc(1, sizeof(*sidecar));
    if (sidecar == NULL) {
        return NULL;
    }
    sidecar->process_refs = calloc(process_capacity, sizeof(*sidecar->process_refs));
    sidecar->free_entries = kvk_pages_create_sparse(entry_capacity * sizeof(uint32_t));
    if (sidecar->process_refs == NULL || sidecar->free_entries == NULL) {
        sidecar_free(sidecar, entry_capacity);
        return NULL;
    }
    return sidecar;
}

/* Where everything lies in the region. */
static void parts_find(struct kvk_sidecar *sidecar, const struct kvk_sidecar_header *header)
{
    uint8_t *base = sidecar->region.address;
    sidecar->header = (struct kvk_sidecar_header *)(void *)base;
    sidecar->processes = (struct kvk_sidecar_process *)(void *)(base + processes_offset());
    sidecar->entries = base + entries_offset(header);
}

static void words_find(struct kvk_sidecar *sidecar, const struct kvk_group *group)
{
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        /* Memory that does not outlive the daemon needs no words. */
        bool kept = group->tiers[i].present && group->tiers[i].regions[0].fd >= 0;
        sidecar->words[i] =
            kept ? (uint64_t *)(void *)(sidecar->region.address + words_offset(sidecar->header, i))
                 : NULL;
    }
}

/* ---- Finding ---- */

/* NULL, or what is wrong with it. Sizes come from the file, so they are checked before use. */
static const char *header_wrong(const struct kvk_cache *cache, const struct kvk_group *group,
                                const struct kvk_sidecar_header *header)
{
    struct kvk_sidecar_header wanted = header_for(cache, group);
    if (header->magic != wanted.magic || header->header_size != wanted.header_size) {
        return "it is no sidecar";
    }
    if (header->version != wanted.version) {
        return "it is of another version";
    }
    if (header->checksum != header_sum(header)) {
        return "its header is damaged";
    }
    if (header->space_id != wanted.space_id || header->tenant_id != wanted.tenant_id ||
        header->group != wanted.group || header->shard_count != wanted.shard_count ||
        header->shard_digest != wanted.shard_digest ||
        header->block_tokens != wanted.block_tokens) {
        return "it is of another space or geometry";
    }
    if (header->namespace_id != wanted.namespace_id) {
        return "the processes that may still write are in another namespace";
    }
    uint64_t entry_size = sizeof(struct kvk_sidecar_entry) +
                          header->shard_count * sizeof(uint64_t) +
                          header->block_tokens * sizeof(uint32_t) + header->inline_size;
    if (header->entry_size != round_up(entry_size, ENTRY_ALIGN) || header->entry_capacity == 0 ||
        header->process_capacity == 0 || header->entry_high > header->entry_capacity ||
        header->inline_size < wanted.inline_size ||
        header->process_capacity < wanted.process_capacity) {
        return "its entries are smaller than the configuration asks for now";
    }
    return NULL;
}

static void find_fail(const struct kvk_group *group, const char *reason)
{
    kvk_log(KVK_LOG_WARNING, "kept_memory_refused", "space=%llu group=%u text=\"%s\"",
            (unsigned long long)group->space->id, group->index, reason);
}

/* The header alone, to know how large the file must be. */
static bool header_read(struct kvk_cache *cache, struct kvk_group *group,
                        struct kvk_sidecar_header *header)
{
    const struct kvk_kept_name name = name_of(group);
    if (!kvk_kept_has(cache, &name, KVK_SIDECAR_PAGE) ||
        !kvk_kept_read(cache, &name, header, sizeof(*header))) {
        return false;
    }
    const char *wrong = header_wrong(cache, group, header);
    if (wrong == NULL && !kvk_kept_has(cache, &name, file_bytes(header))) {
        wrong = "its file is too short";
    }
    if (wrong != NULL) {
        find_fail(group, wrong);
    }
    return wrong == NULL;
}

void kvk_sidecar_find_unlocked(struct kvk_cache *cache, struct kvk_group *group)
{
    struct kvk_sidecar_header header;
    struct kvk_error error;
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache->kept == NULL || !header_read(cache, group, &header)) {
        return;
    }
    struct kvk_sidecar *sidecar = sidecar_alloc(header.entry_capacity, header.process_capacity);
    if (sidecar == NULL) {
        find_fail(group, "no memory");
        return;
    }
    const struct kvk_kept_name name = name_of(group);
    uint64_t offset = entries_offset(&header);
    uint64_t entry_bytes = (uint64_t)header.entry_high * header.entry_size;
    enum kvk_status status = kvk_kept_adopt(cache, cache->memory, &name, file_bytes(&header), 0,
                                            &sidecar->region, &error);
    if (status == KVK_OK && entry_bytes > 0) {
        status =
            cache->memory->ops->back(cache->memory, &sidecar->region, offset, entry_bytes, &error);
    }
    if (status != KVK_OK) {
        find_fail(group, error.text);
        kvk_kept_free(cache, cache->memory, &name, &sidecar->region);
        sidecar_free(sidecar, header.entry_capacity);
        return;
    }
    parts_find(sidecar, &header);
    sidecar->entry_backed = header.entry_high;
    sidecar->found.found = true;
    group->sidecar = sidecar;
}

void kvk_sidecar_tier_reset_unlocked(struct kvk_cache *cache, struct kvk_group *group,
                                     enum kvk_tier tier)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    struct kvk_error error;
    if (sidecar == NULL) {
        return;
    }
    enum kvk_status status = cache->memory->ops->punch(
        cache->memory, &sidecar->region, words_offset(sidecar->header, (int)tier),
        KVK_SIDECAR_SLOTS_MAX * sizeof(uint64_t), &error);
    KVK_ASSERT(status == KVK_OK); /* else words would name slots of another file */
}

/* ---- Making ---- */

static bool any_adopted(const struct kvk_group *group)
{
    return group->tiers[KVK_TIER_DEVICE].adopted || group->tiers[KVK_TIER_HOST].adopted;
}

static bool any_to_keep(const struct kvk_group *group)
{
    bool any = false;
    for (int i = 0; i < KVK_MEMORY_TIER_COUNT; i++) {
        any = any || (group->tiers[i].present && group->tiers[i].regions[0].fd >= 0);
    }
    return any;
}

enum kvk_status kvk_sidecar_create_unlocked(struct kvk_cache *cache, struct kvk_group *group,
                                            struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    if (group->sidecar != NULL && any_adopted(group)) {
        words_find(group->sidecar, group);
        return KVK_OK;
    }
    kvk_sidecar_destroy_unlocked(cache, group);
    if (cache->kept == NULL || !any_to_keep(group)) {
        return KVK_OK;
    }
    const struct kvk_sidecar_header header = header_for(cache, group);
    const struct kvk_kept_name name = name_of(group);
    struct kvk_sidecar *sidecar = sidecar_alloc(header.entry_capacity, header.process_capacity);
    if (sidecar == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for a sidecar");
    }
    enum kvk_status status = kvk_kept_alloc(cache, cache->memory, &name, file_bytes(&header), 0,
                                            "kvkeep-sidecar", &sidecar->region, error);
    if (status == KVK_OK) {
        status = cache->memory->ops->back(cache->memory, &sidecar->region, 0,
                                          words_offset(&header, 0), error);
    }
    if (status != KVK_OK) {
        kvk_kept_free(cache, cache->memory, &name, &sidecar->region);
        sidecar_free(sidecar, header.entry_capacity);
        return status;
    }
    parts_find(sidecar, &header);
    *sidecar->header = header;
    words_find(sidecar, group);
    group->sidecar = sidecar;
    return KVK_OK;
}

void kvk_sidecar_destroy_unlocked(struct kvk_cache *cache, struct kvk_group *group)
{
    struct kvk_sidecar *sidecar = group->sidecar;
    if (sidecar == NULL) {
        return;
    }
    const struct kvk_kept_name name = name_of(group);
    uint32_t entry_capacity = sidecar->header->entry_capacity;
    kvk_kept_free(cache, cache->memory, &name, &sidecar->region);
    sidecar_free(sidecar, entry_capacity);
    group->sidecar = NULL;
}

uint64_t kvk_sidecar_entry_offset(const struct kvk_group *group, uint32_t entry)
{
    return entries_offset(group->sidecar->header) +
           (uint64_t)entry * group->sidecar->header->entry_size;
}

uint64_t kvk_sidecar_entry_bytes(const struct kvk_group *group)
{
    return group->sidecar->header->entry_size;
}
