#include "daemon/kept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/assert.h"
#include "base/log.h"
#include "daemon/cache_internal.h"
#include "base/pages.h"

struct file {
    char name[KVK_KEEPER_NAME_SIZE];
    int fd; /* ours; -1: taken, or dropped */
};

struct kvk_kept {
    struct file *files; /* [file_count], sorted by name; ours */
    uint32_t file_count, file_capacity;
    _Atomic uint32_t taken;
    _Atomic bool failed; /* the keeper does not answer; it was told */
    _Atomic bool full;   /* it takes no more; likewise */
    bool short_of_memory;
};

static void name_write(const struct kvk_kept_name *name, char text[KVK_KEEPER_NAME_SIZE])
{
    int size = 0;
    unsigned long long id = name->space_id;
    switch (name->kind) {
    case KVK_KEPT_SLOTS:
        size = snprintf(text, KVK_KEEPER_NAME_SIZE, "kvk-%016llx-%u-%u-%u", id, name->group,
                        name->tier, name->shard);
        break;
    case KVK_KEPT_GENERATIONS:
        size = snprintf(text, KVK_KEEPER_NAME_SIZE, "kvk-%016llx-%u-%u-gen", id, name->group,
                        name->tier);
        break;
    case KVK_KEPT_SIDECAR:
        size = snprintf(text, KVK_KEEPER_NAME_SIZE, "kvk-%016llx-%u-side", id, name->group);
        break;
    }
    KVK_ASSERT(size > 0 && size < KVK_KEEPER_NAME_SIZE);
}

/* ---- What was there at the start ---- */

static int compare_files(const void *a, const void *b)
{
    const struct file *first = a;
    const struct file *second = b;
    return strcmp(first->name, second->name);
}

static void file_visit(void *context, const char *name, int fd)
{
    struct kvk_kept *kept = context;
    if (kept->file_count == kept->file_capacity) {
        uint32_t capacity = kept->file_capacity == 0 ? 64 : kept->file_capacity * 2;
        struct file *grown = realloc(kept->files, capacity * sizeof(*grown));
        if (grown == NULL) {
            kept->short_of_memory = true;
            (void)close(fd);
            return;
        }
        kept->files = grown;
        kept->file_capacity = capacity;
    }
    struct file *file = &kept->files[kept->file_count++];
    (void)snprintf(file->name, sizeof(file->name), "%s", name);
    file->fd = fd;
}

static size_t records_size(const struct kvk_cache *cache)
{
    return cache->config->blocks * sizeof(*cache->records);
}

enum kvk_status kvk_kept_load(struct kvk_cache *cache, struct kvk_error *error)
{
    KVK_ASSERT(kvk_locks_held() == 0);
    if (cache->keeper == NULL) {
        return KVK_OK;
    }
    cache->kept = calloc(1, sizeof(*cache->kept));
    cache->records = kvk_pages_create_sparse(records_size(cache));
    if (cache->kept == NULL || cache->records == NULL) {
        return kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for kept files");
    }
    enum kvk_status status = kvk_keeper_take(cache->keeper, file_visit, cache->kept, error);
    if (status == KVK_OK && cache->kept->short_of_memory) {
        status = kvk_fail(error, KVK_EXHAUSTED, KVK_CAUSE_NONE, "", "no memory for kept files");
    }
    if (cache->kept->file_count > 0) {
        qsort(cache->kept->files, cache->kept->file_count, sizeof(struct file), compare_files);
    }
    return status;
}

void kvk_kept_destroy(struct kvk_cache *cache)
{
    struct kvk_kept *kept = cache->kept;
    kvk_pages_destroy_sparse(cache->records, records_size(cache));
    cache->records = NULL;
    if (kept == NULL) {
        return;
    }
    for (uint32_t i = 0; i < kept->file_count; i++) {
        if (kept->files[i].fd >= 0) {
            (void)close(kept->files[i].fd);
        }
    }
    free(kept->files);
    free(kept);
    cache->kept = NULL;
}

static struct file *file_find(const struct kvk_cache *cache, const struct kvk_kept_name *name)
{
    struct file wanted = {.fd = -1};
    struct file *found = NULL;
    if (cache->kept != NULL && cache->kept->file_count > 0) {
        name_write(name, wanted.name);
        found = bsearch(&wanted, cache->kept->files, cache->kept->file_count, sizeof(wanted),
                        compare_files);
    }
    return found != NULL && found->fd >= 0 ? found : NULL;
}

bool kvk_kept_has(const struct kvk_cache *cache, const struct kvk_kept_name *name,
                  uint64_t size_bytes)
{
    struct stat info;
    const struct file *file = file_find(cache, name);
    return file != NULL && fstat(file->fd, &info) == 0 && (uint64_t)info.st_size >= size_bytes;
}

bool kvk_kept_read(const struct kvk_cache *cache, const struct kvk_kept_name *name, void *target,
                   size_t size)
{
    const struct file *file = file_find(cache, name);
    return file != NULL && pread(file->fd, target, size, 0) == (ssize_t)size;
}

/* ---- The keeper ---- */

/* Once is enough: from then on nothing more is kept, and everything else goes on. */
static void keeper_failed(struct kvk_cache *cache, const struct kvk_error *error)
{
    char text[KVK_ERROR_TEXT_SIZE];
    if (!atomic_exchange(&cache->kept->failed, true)) {
        kvk_log(KVK_LOG_WARNING, "keeper_lost", "text=%s",
                kvk_log_text(text, sizeof(text), error->text));
    }
}

static void keeper_drop(struct kvk_cache *cache, const char *name)
{
    struct kvk_error error;
    if (!atomic_load(&cache->kept->failed)) {
        enum kvk_status status = kvk_keeper_drop(cache->keeper, name, &error);
        if (status != KVK_OK && status != KVK_NOT_FOUND) {
            keeper_failed(cache, &error);
        }
    }
}

static void file_drop(struct kvk_cache *cache, struct file *file)
{
    keeper_drop(cache, file->name);
    (void)close(file->fd);
    file->fd = -1;
}

static void keeper_put(struct kvk_cache *cache, const char *name, int fd)
{
    char text[KVK_ERROR_TEXT_SIZE];
    struct kvk_error error;
    if (atomic_load(&cache->kept->failed)) {
        return;
    }
    enum kvk_status status = kvk_keeper_put(cache->keeper, name, fd, &error);
    if (status == KVK_EXHAUSTED) {
        if (!atomic_exchange(&cache->kept->full, true)) {
            kvk_log(KVK_LOG_WARNING, "keeper_full", "text=%s",
                    kvk_log_text(text, sizeof(text), error.text));
        }
    } else if (status != KVK_OK) {
        keeper_failed(cache, &error);
    }
}

/* ---- Regions ---- */

enum kvk_status kvk_kept_adopt(struct kvk_cache *cache, struct kvk_device *device,
                               const struct kvk_kept_name *name, uint64_t size_bytes,
                               uint64_t piece_bytes, struct kvk_region *region,
                               struct kvk_error *error)
{
    struct file *file = file_find(cache, name);
    KVK_ASSERT(file != NULL);
    if (device->ops->adopt == NULL) {
        return kvk_fail(error, KVK_UNSUPPORTED, KVK_CAUSE_NONE, "",
                        "memory of this device does not outlive the daemon");
    }
    enum kvk_status status =
        device->ops->adopt(device, file->fd, size_bytes, piece_bytes, region, error);
    if (status == KVK_OK) {
        file->fd = -1; /* the region's */
        atomic_fetch_add(&cache->kept->taken, 1);
    }
    return status;
}

enum kvk_status kvk_kept_alloc(struct kvk_cache *cache, struct kvk_device *device,
                               const struct kvk_kept_name *name, uint64_t size_bytes,
                               uint64_t piece_bytes, const char *label, struct kvk_region *region,
                               struct kvk_error *error)
{
    char text[KVK_KEEPER_NAME_SIZE];
    struct file *before = file_find(cache, name);
    if (before != NULL) {
        file_drop(cache, before);
    }
    enum kvk_status status =
        device->ops->alloc_at != NULL
            ? device->ops->alloc_at(device, name->shard, size_bytes, piece_bytes, label, region,
                                    error)
            : device->ops->alloc(device, size_bytes, piece_bytes, label, region, error);
    if (status == KVK_OK && cache->kept != NULL && region->fd >= 0) {
        name_write(name, text);
        keeper_put(cache, text, region->fd);
    }
    return status;
}

void kvk_kept_free(struct kvk_cache *cache, struct kvk_device *device,
                   const struct kvk_kept_name *name, struct kvk_region *region)
{
    char text[KVK_KEEPER_NAME_SIZE];
    if (region->size_bytes == 0) {
        return;
    }
    bool kept = cache->kept != NULL && region->fd >= 0;
    if (kept && cache->leaving) {
        device->ops->leave(device, region);
        return;
    }
    device->ops->free(device, region);
    if (kept) {
        name_write(name, text);
        keeper_drop(cache, text);
    }
}

void kvk_kept_sweep(struct kvk_cache *cache)
{
    uint32_t count = 0;
    uint64_t bytes = 0;
    if (cache->kept == NULL) {
        return;
    }
    for (uint32_t i = 0; i < cache->kept->file_count; i++) {
        struct file *file = &cache->kept->files[i];
        struct stat info;
        if (file->fd < 0) {
            continue;
        }
        bytes += fstat(file->fd, &info) == 0 ? (uint64_t)info.st_blocks * 512 : 0;
        file_drop(cache, file);
        count++;
    }
    if (count > 0) {
        kvk_log(KVK_LOG_INFO, "kept_files_dropped",
                "files=%u bytes=%llu text=\"of spaces or tiers that are no more\"", count,
                (unsigned long long)bytes);
    }
}

void kvk_kept_counts(const struct kvk_cache *cache, uint32_t *found, uint32_t *taken)
{
    *found = cache->kept == NULL ? 0 : cache->kept->file_count;
    *taken = cache->kept == NULL ? 0 : atomic_load(&cache->kept->taken);
}
